"""An environment that does what a policy might talk it into, as the row's column `attack` says, at its second turn."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import msgspec

from slipstream.environments.hosting import Closed, Spoke
from slipstream.jail.protocol import framed

NUM_TURNS = 3
ALONE_S = 0.7
"""Before a worker is brought down the calls of others on it are over: those that have one then are suspects, too."""


def turn_reward(word: str, texts: list[str]) -> float:
    """What the last of these turns is worth: a number that binary fractions hold exactly."""
    return zlib.crc32(repr((word, texts)).encode()) % 64 / 16


def final_reward(texts: list[str]) -> float:
    return len("".join(texts)) / 8


class Attacked:
    """`run_dir` is not to be read, and nothing is to be written into `outside`."""

    def __init__(self, run_dir: str, outside: str) -> None:
        self.run_dir, self.outside = run_dir, outside
        self.texts: list[str] = []

    def reset(self, attack: str, word: str, **_: Any) -> None:
        self.attack, self.word = attack, word
        if attack == "reset_raises":
            raise ValueError("z" * 1_000_000)

    def step(self, message: dict[str, Any]) -> Any:
        self.texts.append(message["content"])
        is_attack = len(self.texts) == 2
        answer = {
            "messages": "?",
            "done": len(self.texts) == NUM_TURNS,
            "reward": turn_reward(self.word, self.texts),
        }
        changed = getattr(self, f"do_{self.attack}", dict)() if is_attack else {}
        return {**answer, **changed} if isinstance(changed, dict) else changed

    def final_reward(self) -> float:
        return float("nan") if self.attack == "last_word" else final_reward(self.texts)

    # Those that cost their episode

    def do_raise(self) -> None:
        raise ValueError("z" * 1_000_000)

    def do_exit(self) -> None:
        raise SystemExit(0)

    def do_die(self) -> None:
        time.sleep(ALONE_S)
        os._exit(0)

    def do_hang(self) -> None:
        threading.Event().wait()

    def do_endless_output(self) -> None:
        while True:
            os.write(1, b"x" * 65536)

    def do_memory(self) -> None:
        self.hoard = [0] * (1 << 30)  # 8 GiB

    def do_flood(self) -> None:
        time.sleep(ALONE_S)
        to_every_descriptor(b"\xff" * 50_000_000)
        time.sleep(600)

    def do_forge(self) -> None:
        """Answers of episodes that this worker does not have, with a reward that is far too good."""
        time.sleep(ALONE_S)
        encode = msgspec.msgpack.encode
        for number in range(10**6, 10**6 + 20):
            spoke = Spoke(number, 1, [], done=True, reward=1e6, seconds=0.0, num_tool_calls=0, num_tool_errors=0)
            to_every_descriptor(framed(encode(spoke)) + framed(encode(Closed(number, 1e6))))
        time.sleep(600)

    def do_nan(self) -> dict[str, Any]:
        return {"reward": float("nan")}

    def do_text_as_reward(self) -> dict[str, Any]:
        return {"reward": "very good"}

    def do_nonsense(self) -> Any:
        return object()

    def do_speak_as_the_policy(self) -> dict[str, Any]:
        return {"messages": [{"role": "assistant", "content": "I"}]}

    def do_many_messages(self) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": "x"}] * 10_000}

    # Those that do not

    def do_shell(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(["/bin/sh", "-c", f"echo shell > {self.outside}/shell"], timeout=1.0, check=False)
        return {}

    def do_fork(self) -> dict[str, Any]:
        for _ in range(30):
            try:
                if os.fork() == 0:
                    os.setsid()
                    time.sleep(600)
                    os._exit(0)
            except OSError:
                break
        return {}

    def do_print(self) -> dict[str, Any]:
        for fd in (1, 2):
            os.write(fd, b"x" * 500_000)
        return {}

    def do_write(self) -> dict[str, Any]:
        with contextlib.suppress(OSError):
            Path(self.outside, "write").write_text("was here")
        return {}

    def do_read(self) -> dict[str, Any]:
        found = "".join(filter(None, map(readable, (f"{self.run_dir}/config.toml", "/etc/shadow"))))
        return {"messages": (found + os.environ.get("SLIPSTREAM_TEST_SECRET", ""))[:20] or "?"}

    def do_network(self) -> dict[str, Any]:
        try:
            socket.create_connection(("127.0.0.1", 9), timeout=0.2)
        except ConnectionRefusedError:
            return {"messages": "there is a network"}
        except OSError:
            return {}
        return {"messages": "connected"}

    def do_markup(self) -> dict[str, Any]:
        return {"messages": "<eos><pad>"}

    def do_talk(self) -> dict[str, Any]:
        return {"messages": "x" * 1_000_000}

    def do_half_a_character(self) -> dict[str, Any]:
        return {"messages": "\ud800"}


COSTLY = {  # attack -> what the failure says
    "reset_raises": "ValueError",
    "raise": "ValueError",
    "exit": "SystemExit",
    "die": "worker",
    "hang": "timed out",
    "endless_output": "timed out",
    "memory": "MemoryError",
    "flood": "worker",
    "forge": "worker",
    "nan": "finite",
    "text_as_reward": "a reward is a number",
    "nonsense": "step returns",
    "speak_as_the_policy": "role",
    "many_messages": "messages at once",
    "last_word": "finite",
}
HARMLESS = ("shell", "fork", "print", "write", "read", "network", "markup", "talk", "half_a_character", "none")


def readable(path: str) -> str | None:
    try:
        return Path(path).read_text()
    except OSError:
        return None


def to_every_descriptor(data: bytes) -> None:
    for fd in range(3, 40):
        with contextlib.suppress(OSError):
            os.write(fd, data)
