"""Hostile values, and changes of structured documents, of bytes and of files: all drawn from one random generator."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

TEXTS = [
    "",
    " ",
    "\x00",
    "a\nb\r\nc",
    "\x1b[2J\x1b]0;x\x07",
    "‮drow\u200b",
    "😀" * 40,
    "\ud800",
    "x" * 5000,
    "../../../etc/passwd",
    "/dev/zero",
    "/dev/null",
    "/proc/self/mem",
    "/",
    "~",
    "no/such/thing",
    "https://192.0.2.1/x",
    "{}",
    "{0.__class__.__init__.__globals__}",
    "{{ self }}",
    "%s%n",
    "$(id)",
    "-1",
    "--help",
    "1_0",
    "١٢",
    "1e400",
    "nan",
    "0x10",
    "NULL",
    "(" * 300,
    "(a+)+$" * 20,
    "".join(f"(?P<g{i}>a)?" for i in range(300)),
]
NUMBERS = [0, -1, 1, 2, 3, 7, 255, 65536, 100_000, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 10**12, 10**30, 10**400]
REALS = [0.5, -0.0, 1e-300, 5e-324, 1e300, 1.8e308, float("inf"), float("-inf"), float("nan"), -1.5]


def nested(value: Any, depth: int, rng: Random) -> Any:
    for _ in range(depth):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def value(rng: Random) -> Any:
    """Any JSON value but null: sizes, signs, types and depths that nobody asked for."""
    kind = rng.randrange(10)
    if kind < 3:
        return rng.choice(NUMBERS)
    if kind < 5:
        return rng.choice(REALS)
    if kind < 8:
        return rng.choice(TEXTS)
    if kind == 8:
        return rng.choice([True, False, [], {}, [[]], [1, "a", {}], {"": 1}, ["x"] * 2000])
    return nested(rng.choice([1, "x", []]), rng.choice([2, 30, 200]), rng)


Place = tuple[Any, Any]


def places(document: Any) -> list[Place]:
    """(container, key) of everything below `document`."""
    found: list[Place] = []
    waiting = [document]
    while waiting:
        one = waiting.pop()
        keys = list(one) if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ()
        for key in keys:
            found.append((one, key))
            if isinstance(one[key], dict | list):
                waiting.append(one[key])
    return found


def mutate(document: Any, rng: Random, *, null: bool = True) -> str:
    """Change one place of `document`; what was done, in words."""
    container, key = rng.choice(places(document))
    old = container[key]
    kind = rng.randrange(8)
    if kind == 0 and isinstance(container, dict):
        del container[key]
        return f"without {key!r}"
    if kind == 1:
        new: Any = nested(old, rng.choice([1, 3, 100]), rng)
    elif kind == 2 and isinstance(old, int | float):
        new = rng.choice([str(old), -old, old * 1000, float(old), old + 1])
    elif kind == 3 and isinstance(old, str):
        new = rng.choice([[old], old * 300, old[:-1], old.upper(), old + "\x00"])
    elif kind == 4 and null:
        new = None
    elif kind == 5 and isinstance(container, dict):
        new = container[rng.choice(list(container))]
    else:
        new = value(rng)
    container[key] = new
    return f"{key!r} = {repr(new)[:80]}"


def broken_bytes(data: bytes, rng: Random) -> tuple[bytes, str]:
    """`data` torn, flipped, repeated, emptied, or with something in between."""
    at = rng.randrange(len(data) + 1)
    kind = rng.randrange(9)
    if kind == 0:
        return data[:at], f"cut to {at} bytes"
    if kind == 1:
        flipped = bytearray(data)
        for _ in range(rng.choice([1, 1, 8, 100])):
            if flipped:
                flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        return bytes(flipped), "bits flipped"
    if kind == 2:
        return bytes(len(data)), "zeroed"
    if kind == 3:
        return b"", "emptied"
    if kind == 4:
        return data[:at] + data[max(0, at - 50) : at] * rng.choice([2, 500]) + data[at:], f"repeated at {at}"
    if kind == 5:
        return rng.choice([b"\xef\xbb\xbf", b"\xff\xfe", b"\x00", b"\x1f\x8b"]) + data, "with a mark in front"
    if kind == 6:
        return data.decode("utf-8", "replace").encode("utf-16"), "in UTF-16"
    if kind == 7:
        inside = rng.choice(
            [b"[" * 100_000, b'{"a":' * 50_000, b"9" * 20_000, b'"\\ud800"', b"\xed\xa0\x80", b"\r", b"NaN"]
        )
        return data[:at] + inside + data[at:], f"{inside[:8]!r}... at {at}"
    return data + data, "twice"


def no_file(path: Path, rng: Random) -> str:
    """Something else than a file in the place of `path`."""
    if path.is_symlink() or path.exists():
        path.unlink()
    kinds: dict[str, Callable[[], object]] = {
        "a folder": path.mkdir,
        "a FIFO": lambda: os.mkfifo(path),
        "a loop of links": lambda: path.symlink_to(path.name),
        "a link to nowhere": lambda: path.symlink_to("nowhere"),
        "an endless device": lambda: path.symlink_to("/dev/zero"),
        "an empty device": lambda: path.symlink_to("/dev/null"),
        "a full device": lambda: path.symlink_to("/dev/full"),
        "nothing": lambda: None,
        "a link to a folder": lambda: path.symlink_to("/proc"),
    }
    name = rng.choice(list(kinds))
    kinds[name]()
    return f"{path.name} is {name}"


def as_json(document: Any) -> bytes:
    return json.dumps(document, ensure_ascii=True).encode()


def break_json(path: Path, rng: Random, *, wanted: dict[str, list[Any]] | None = None) -> str:
    """Change the JSON file at `path`: its structure mostly, its bytes, or that it is one. `wanted`: known fields."""
    kind = rng.random()
    if kind < 0.1:
        return no_file(path, rng)
    if kind < 0.25:
        data, done = broken_bytes(path.read_bytes(), rng)
        path.write_bytes(data)
        return f"{path.name} {done}"
    document = json.loads(path.read_text())
    done = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        if wanted and isinstance(document, dict) and rng.random() < 0.7:
            key = rng.choice(list(wanted))
            document[key] = rng.choice(wanted[key]) if wanted[key] and rng.random() < 0.7 else value(rng)
            done.append(f"{key!r} = {repr(document[key])[:80]}")
        else:
            done.append(mutate(document, rng))
    if kind < 0.3:
        text = as_json(document).decode()
        path.write_text(text[:-1] + f', "{rng.choice(["model_type", "a", "format"])}": 1}}')
        done.append("and a key twice")
    else:
        path.write_bytes(as_json(document))
    return f"{path.name}: {'; '.join(done)}"


def break_lines(path: Path, rng: Random) -> str:
    """Change one line of a JSONL file, or its bytes, or that it is one."""
    kind = rng.random()
    if kind < 0.1:
        return no_file(path, rng)
    if kind < 0.35:
        data, done = broken_bytes(path.read_bytes(), rng)
        path.write_bytes(data)
        return f"{path.name} {done}"
    rows = path.read_bytes().splitlines()
    if not rows:
        path.write_bytes(b"{}\n")
        return f"{path.name}: a line of nothing"
    at = rng.randrange(len(rows))
    try:
        document = json.loads(rows[at])
        done = mutate(document, rng) if isinstance(document, dict) and document else "as it was"
        rows[at] = as_json(document)
    except ValueError:
        done = "as it was"
    if kind < 0.45:
        rows[at] = rng.choice([b"", b"[]", b"1", b"null", b"x", b"{}", b'{"prompt":"a","prompt":"b"}', b'"\\ud800"'])
        done = repr(rows[at])
    if kind > 0.9:
        del rows[rng.randrange(len(rows))]
        done += ", one line less"
    path.write_bytes(b"\n".join(rows) + b"\n")
    return f"{path.name}, line {at + 1}: {done}"


def break_safetensors(path: Path, rng: Random) -> str:
    """Change the header of a safetensors file, or its bytes, or that it is one."""
    kind = rng.random()
    if kind < 0.15:
        return no_file(path, rng)
    content = path.read_bytes()
    if kind < 0.4:
        data, done = broken_bytes(content, rng)
        path.write_bytes(data)
        return f"{path.name} {done}"
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    if kind < 0.6:
        header["__metadata__"] = rng.choice([{"format": 1}, [], "x", {"format": "np"}, {"a": "b" * 100_000}, {"": ""}])
        done = "metadata"
    else:
        done = mutate(header, rng)
    told = as_json(header)
    size = len(told) if kind < 0.9 else rng.choice([0, 1, len(told) + 1, 2**31, 2**63, 2**64 - 1])
    path.write_bytes(size.to_bytes(8, "little") + told + content[8 + length :])
    return f"{path.name}, header of {size}: {done}"
