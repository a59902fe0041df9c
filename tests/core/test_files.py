"""Foreign files: only regular ones are opened, and none is read beyond a bound."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from slipstream.core import files
from slipstream.core.errors import SlipstreamError
from slipstream.core.files import decode_json, load_json, open_regular, read_json, read_lines, read_whole


def test_a_regular_file_is_read_whole_also_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b'{"b": 1}')
    (tmp_path / "link").symlink_to("a")
    assert read_whole(tmp_path / "link", 8) == b'{"b": 1}'
    assert read_json(tmp_path / "a") == decode_json(tmp_path / "a", dict[str, int]) == {"b": 1}


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (os.mkfifo, "pipe"),
        (Path.mkdir, "folder"),
        (lambda path: path.symlink_to("/dev/zero"), "device"),
    ],
    ids=["pipe", "folder", "device"],
)
def test_only_regular_files_are_opened(make: Callable[[Path], None], word: str, tmp_path: Path) -> None:
    make(tmp_path / "a")
    with pytest.raises(OSError, match=word):
        open_regular(tmp_path / "a")
    with pytest.raises(SlipstreamError, match="cannot be read"):
        load_json(tmp_path / "a", dict[str, int])


def test_a_file_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "a").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match=f"{1 << 40} bytes"):
        read_whole(tmp_path / "a")


def test_a_file_that_grows_while_it_is_read_is_bounded() -> None:
    """The kernel's files have content although their size is 0."""
    assert os.stat("/proc/self/status").st_size == 0
    with pytest.raises(OSError, match="of at most 10"):
        read_whole(Path("/proc/self/status"), 10)


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 100_000, b"\xff", b"", b"9" * 5000])
def test_malformed_json_is_a_value_error(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(text)
    with pytest.raises(ValueError, match=r"."):
        read_json(tmp_path / "a")
    with pytest.raises(SlipstreamError, match="a is damaged"):
        load_json(tmp_path / "a", dict[str, msgspec.Raw])


def test_an_endless_line_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 10)
    lines = read_lines(io.BytesIO(b"0123456789\nab\n" + bytes(100)))
    with pytest.raises(ValueError, match="longer than 10"):
        next(lines)
    assert list(read_lines(io.BytesIO(b"012345678\nab\ntorn"))) == [b"012345678\n", b"ab\n", b"torn"]


def test_a_line_that_lists_millions_of_groups_is_read() -> None:
    line = b"1234567," * 9_000_000 + b"\n"
    assert [len(one) for one in read_lines(io.BytesIO(line))] == [len(line)]
