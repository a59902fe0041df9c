"""Environments for the tests of hosts, well-behaved and not. Those that misbehave do what the policy's message says."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from slipstream.environments.protocol import Step

HOME = Path(os.environ.get("HOME", "")).name  # of a worker: its own folder
RELEASED = threading.Event()
"""Set by tests of this process at their end: calls that hang return."""


def said(text: Any) -> Step:
    return Step([{"role": "user", "content": str(text)}])


class Diary:
    """Repeats its name, the number of its steps, the folder of its worker, and its thread."""

    def reset(self, name: str, **_: Any) -> str:
        self.name, self.num_steps, self.thread = name, 0, threading.get_ident()
        return f"{name} 0"

    def step(self, message: dict[str, Any]) -> Step:
        self.num_steps += 1
        is_same = self.thread == threading.get_ident()
        text = f"{self.name} {self.num_steps} {message['content']} {HOME} {is_same}"
        return Step([{"role": "user", "content": text}], done=self.num_steps == 3, reward=self.num_steps / 2)

    def final_reward(self) -> float:
        return 10.0 + self.num_steps


class AsyncDiary(Diary):
    """The same, async."""

    async def reset(self, name: str, **_: Any) -> str:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().reset(name)

    async def step(self, message: dict[str, Any]) -> Step:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().step(message)

    async def final_reward(self) -> float:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().final_reward()


class Silent:
    """Says nothing at its reset, has no other methods, and answers by something awaitable from a plain method."""

    def reset(self) -> None:
        return None

    def step(self, message: dict[str, Any]) -> Any:
        async def answer() -> Step:
            await asyncio.sleep(0)
            return said(message["content"])

        return answer()


class Tools:
    """Counts calls of tools."""

    num_tool_calls = num_tool_errors = 0

    def reset(self) -> list[dict[str, Any]]:
        return [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]

    def step(self, message: dict[str, Any]) -> Step:
        calls, errors = map(int, message["content"].split())
        self.num_tool_calls += calls
        self.num_tool_errors += errors
        return Step()


class Keeper:
    """Repeats all that it was told; its state can be kept."""

    def reset(self, name: str, **_: Any) -> str:
        self.name, self.words = name, [name]
        return name

    def step(self, message: dict[str, Any]) -> Step:
        self.words.append(message["content"])
        return Step(" ".join(self.words), done=message["content"] == "end")

    def state(self) -> Any:
        return {"words": self.words, "nothing": None, "half": "\U0001f600"}

    def restore(self, state: Any, name: str, **_: Any) -> Any:
        self.name, self.words = name, state["words"]


class AsyncKeeper(Keeper):
    """The same, async."""

    async def reset(self, name: str, **_: Any) -> str:  # type: ignore[override]
        return super().reset(name)

    async def step(self, message: dict[str, Any]) -> Step:  # type: ignore[override]
        return super().step(message)

    async def state(self) -> Any:
        await asyncio.sleep(0)
        return super().state()

    async def restore(self, state: Any, name: str, **_: Any) -> Any:
        await asyncio.sleep(0)
        return super().restore(state, name)


class CountingKeeper(Keeper):
    """Counts its calls of tools, the restored ones too."""

    num_tool_calls = 0

    def step(self, message: dict[str, Any]) -> Step:
        self.num_tool_calls += 1
        return super().step(message)

    def restore(self, state: Any, name: str, **_: Any) -> Any:
        super().restore(state, name)
        self.num_tool_calls = len(self.words) - 1


def _circle() -> Any:
    circle: list[Any] = []
    circle.append(circle)
    return circle


STATES: dict[str, Any] = {
    "nan": lambda: [float("nan")],
    "tuple": lambda: {"place": (1, 2)},
    "number key": lambda: {1: 2},
    "object": object,
    "circle": _circle,
    "bytes": lambda: b"1",
    "half a character": lambda: "\ud800",
    "large": lambda: "x" * (256 << 10),
}


class BadKeeper(Keeper):
    """Has the state that the policy asks for."""

    def state(self) -> Any:
        order = self.words[-1]
        if order == "raises":
            raise ValueError("no state")
        return STATES[order]() if order in STATES else self.words

    def restore(self, state: Any, name: str, **_: Any) -> Any:
        if "restore raises" in state:
            raise KeyError("no such place")
        return "hello again"


class OnlyState:
    """Has an attribute of the name, as many environments do, and cannot be restored."""

    state = 3

    def reset(self, **_: Any) -> None:
        return None

    def step(self, message: dict[str, Any]) -> Step:
        return said("fine")


class Meeting:
    """No step returns before `count` episodes are in one."""

    present = 0
    all_here = threading.Event()

    def reset(self, count: int) -> None:
        self.count = count

    def step(self, message: dict[str, Any]) -> Step:
        with _lock:
            type(self).present += 1
            if self.present == self.count:
                self.all_here.set()
        self.all_here.wait(100.0)
        return Step(done=self.all_here.is_set())


class AsyncMeeting:
    """The same, async."""

    present = 0
    all_here: asyncio.Event | None = None

    async def reset(self, count: int) -> None:
        self.count = count
        if self.all_here is None:
            type(self).all_here = asyncio.Event()

    async def step(self, message: dict[str, Any]) -> Step:
        assert self.all_here is not None
        type(self).present += 1
        if self.present == self.count:
            self.all_here.set()
        await self.all_here.wait()
        return Step(done=True)


_lock = threading.Lock()


class BrokenTextError(Exception):
    """An error that cannot be told."""

    def __str__(self) -> str:
        raise ValueError


class Careless:
    """Raises, returns nonsense or hangs where it is told to: the first word is the method, the second what it does."""

    def __init__(self) -> None:
        self.order = ""

    def reset(self, order: str = "") -> Any:
        self.order = order
        return self.obey("reset")

    def step(self, message: dict[str, Any]) -> Any:
        self.order = message["content"]
        return self.obey("step") or said("fine")

    def final_reward(self) -> Any:
        return self.obey("final_reward")

    def close(self) -> None:
        self.obey("close")

    def obey(self, method: str) -> Any:
        where, _, what = self.order.partition(" ")
        return NONSENSE[what]() if where == method else None


class Needy:
    """Needs a column."""

    def reset(self, target: str) -> str:
        return target

    def step(self, message: dict[str, Any]) -> Any:
        return said("fine")


class AsyncCareless(Careless):
    """The same, async; it can also hang in ways that only async methods can."""

    async def reset(self, order: str = "") -> Any:
        self.order = order
        return await self.wait("reset")

    async def step(self, message: dict[str, Any]) -> Any:
        self.order = message["content"]
        return await self.wait("step") or said("fine")

    async def final_reward(self) -> Any:
        return await self.wait("final_reward")

    async def close(self) -> None:  # type: ignore[override]
        await self.wait("close")

    async def wait(self, method: str) -> Any:
        if self.order == f"{method} sleeps":
            await asyncio.get_running_loop().create_future()
        while self.order == f"{method} holds on" and not RELEASED.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)
        if self.order == f"{method} leaves a task":
            asyncio.get_running_loop().create_task(_exits())
            await asyncio.sleep(0.01)
            return said("left")
        await asyncio.sleep(0)
        return self.obey(method)


async def _exits() -> None:
    raise SystemExit(3)


def _raises(error: type[BaseException], *arguments: Any) -> Any:
    raise error(*arguments)


NONSENSE: dict[str, Any] = {
    "raises": lambda: _raises(ValueError, "z" * 1_000_000),
    "exits": lambda: _raises(SystemExit, 0),
    "stops": lambda: _raises(StopIteration),
    "raises what cannot be told": lambda: _raises(BrokenTextError),
    "raises half a character": lambda: _raises(ValueError, "\ud800"),
    "returns a number": lambda: 3,
    "returns text": lambda: "text",
    "returns nan": lambda: Step(reward=float("nan")),
    "returns a role": lambda: Step([{"role": "assistant", "content": "I"}]),
    "returns an object": lambda: Step([{"role": "user", "content": object()}]),  # type: ignore[dict-item]
    "returns much": lambda: Step([{"role": "user", "content": "\U0001f600" * 30_000}] * 60),
    "returns inf": lambda: float("inf"),
    "hangs": lambda: RELEASED.wait(300.0),
}


def _fork_and_hide(count: int) -> int:
    started = 0
    for _ in range(count):
        try:
            pid = os.fork()
        except OSError:
            break
        if pid == 0:
            try:
                os.setsid()
                if os.fork() == 0:
                    time.sleep(600)
            finally:
                os._exit(0)
        started += 1
    return started


def _to_every_descriptor(data: bytes) -> None:
    for fd in range(3, 20):
        with contextlib.suppress(OSError):
            os.write(fd, data)


class Hostile:
    """Does what hostile policies try to make environments do, and says a word about it."""

    def reset(self, **_: Any) -> str:
        return "ready"

    def step(self, message: dict[str, Any]) -> Step:
        command, _, argument = message["content"].partition(" ")
        return said(getattr(self, f"do_{command}")(argument))

    def do_ok(self, _: str) -> str:
        return f"ok {os.getpid()}"

    def do_die(self, _: str) -> None:
        os._exit(7)

    def do_fork(self, argument: str) -> int:
        return _fork_and_hide(int(argument))

    def do_return_twice(self, _: str) -> str:
        os.fork()
        return "once"

    def do_memory(self, _: str) -> int:
        return len([0] * (1 << 30))  # 8 GiB

    def do_print(self, _: str) -> str:
        for fd in (1, 2):
            os.write(fd, b"x" * 10_000_000)
        print("y" * 10_000_000)  # noqa: T201
        return "printed"

    def do_flood(self, _: str) -> None:
        _to_every_descriptor(b"\xff" * 100_000_000)
        time.sleep(600)

    def do_forge(self, argument: str) -> str:
        _to_every_descriptor(bytes.fromhex(argument))
        return "forged"

    def do_write(self, argument: str) -> str:
        Path(argument).write_text("was here")
        return "written"

    def do_read(self, argument: str) -> str:
        return Path(argument).read_text()

    def do_network(self, _: str) -> str:
        with socket.create_connection(("127.0.0.1", 9), timeout=0.2):
            return "connected"

    def do_environment(self, argument: str) -> str:
        return os.environ.get(argument, "unset")

    def do_descriptors(self, _: str) -> int:
        return len(os.listdir("/proc/self/fd"))

    def do_processes(self, _: str) -> int:
        return sum(name.isdigit() for name in os.listdir("/proc"))

    def do_identity(self, _: str) -> str:
        return str(os.getuid() == 0 or os.access("/etc/shadow", os.R_OK))

    def do_close(self, _: str) -> None:
        os.closerange(3, 100)
        time.sleep(600)

    def do_hold_the_lock(self, _: str) -> int:
        return 9**9**9**9  # in C, which lets no other thread run


class AsyncHostile(Hostile):
    """Blocks the loop, which every async environment of its worker shares."""

    async def reset(self, **_: Any) -> str:  # type: ignore[override]
        return "ready"

    async def step(self, message: dict[str, Any]) -> Step:  # type: ignore[override]
        if message["content"] == "block":
            RELEASED.wait(300.0)
        if message["content"] == "wait":
            await asyncio.get_running_loop().create_future()
        return super().step(message)

    async def do_nothing(self) -> None:
        return None
