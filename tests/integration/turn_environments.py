"""Environments of the tests of whole runs: what they say and give follows from what was sampled, and from nothing else.

When they answer does not: each waits for a while that nobody knows, so that turns end in another order in every run.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import threading
import time
import urllib.error
import urllib.request
import zlib
from typing import Any

NUM_TURNS = 4


def crc(*parts: object) -> int:
    return zlib.crc32(repr(parts).encode())


class Echo:
    """Says letters of the turn and of the row's word, for two to four turns; rewards depend on every turn's text."""

    longest_wait_s = 0.0

    def reset(self, word: str, **_: Any) -> str | None:
        self._wait()
        self.word, self.texts = word, []
        return None if len(word) % 2 else "~" + word[0]

    def step(self, message: dict[str, Any]) -> dict[str, Any]:
        self._wait()
        text = message["content"]
        self.texts.append(text)
        drawn = crc(self.word, *self.texts)
        reward = None if drawn % 5 == 0 else (drawn % 7) / 7
        is_done = len(self.texts) == NUM_TURNS or (len(self.texts) > 1 and drawn % 3 == 0)
        said = "".join((text + self.word)[place % len(text + self.word)] for place in range(drawn % 4))
        return {"messages": f"{said}?", "done": is_done, "reward": reward}

    def final_reward(self) -> float:
        return sum(letter in self.word for letter in "".join(self.texts)) / 8

    def _wait(self) -> None:
        time.sleep(random.random() * self.longest_wait_s)  # what is tested: nothing depends on it


class Unpunctual(Echo):
    """The same, at any time."""

    longest_wait_s = 0.03


class Talkative(Unpunctual):
    """The same, at length: contexts have many blocks of a prefix cache."""

    def step(self, message: dict[str, Any]) -> dict[str, Any]:
        answer = super().step(message)
        return answer | {"messages": answer["messages"] + self.word * (200 // len(self.word))}


class Kept(Unpunctual):
    """The same, with a state."""

    def state(self) -> list[str]:
        return self.texts

    def restore(self, state: list[str], word: str, **_: Any) -> None:
        self._wait()
        self.word, self.texts = word, state


class Lost(Kept):
    """The same, with a state from which it does not go on."""

    def restore(self, state: list[str], word: str, **_: Any) -> None:
        if NUM_TURNS:  # a rehearsal's state has no turn of the policy
            raise OSError("the board is gone")


def talkative_agent(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """The same, at length."""
    return echo_agent(row, base_url, api_key, Talkative())


def echo_agent(row: dict[str, Any], base_url: str, api_key: str, environment: Echo | None = None) -> float:
    """The same, turned inside out: it asks for each turn of the policy."""
    environment = Unpunctual() if environment is None else environment
    opening = environment.reset(**row)
    messages = [{"role": "user", "content": text} for text in (row["prompt"], opening) if text is not None]
    rewards = []
    while (message := asked(messages, base_url, api_key)) is not None:
        answer = environment.step(message)
        rewards.append(answer["reward"])
        if answer["done"]:
            break
        messages += [message, {"role": "user", "content": answer["messages"]}]
    return sum(reward for reward in rewards if reward is not None) + environment.final_reward()


def asked(messages: list[dict[str, Any]], base_url: str, api_key: str) -> dict[str, Any] | None:
    """Return the policy's turn; None where the episode is over."""
    request = urllib.request.Request(
        f"{base_url}/chat/completions",
        data=json.dumps({"model": "policy", "messages": messages}).encode(),
        headers={"Authorization": f"Bearer {api_key}"},
    )
    try:
        with urllib.request.urlopen(request, timeout=600) as response:
            message: dict[str, Any] = json.load(response)["choices"][0]["message"]
            return message
    except urllib.error.HTTPError as error:
        if error.code not in (400, 401):  # 401: the episode has ended
            raise
        return None


def sociable_agent(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """The same; the first ones begin when more are there than one replica of the test has sessions."""
    COMPANY.join()
    return echo_agent(row, base_url, api_key)


class Company:
    """Those that join wait until there are `enough` of them; whoever comes later does not wait."""

    def __init__(self, enough: int, deadline_s: float) -> None:
        self._enough, self._deadline_s = enough, deadline_s
        self._num, self._joined = 0, threading.Condition()

    def join(self) -> None:
        with self._joined:
            self._num += 1
            self._joined.notify_all()
            if not self._joined.wait_for(lambda: self._num >= self._enough, self._deadline_s):
                raise TimeoutError(f"{self._num} of {self._enough} episodes began in {self._deadline_s:g} s")


COMPANY = Company(enough=12, deadline_s=60)


async def forking_agent(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Asks twice at once, goes on behind one of the answers, sums up what was said, and leaves a request behind."""

    def ask(*texts: str) -> asyncio.Future[Any]:
        roles = itertools.cycle(("user", "assistant"))
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
        return asyncio.ensure_future(asyncio.to_thread(asked, messages, base_url, api_key))

    prompt = row["prompt"]
    first, other = await asyncio.gather(ask(prompt), ask(prompt))
    texts = [first["content"], other["content"] if other else ""]
    drawn = crc(*texts)
    following = await ask(prompt, texts[0], f"{row['word'][: drawn % 3]}?")
    texts.append(following["content"] if following else "")
    summary = await ask("~" + row["word"], texts[-1], "?")
    texts.append(summary["content"] if summary else "")
    if drawn % 2:
        left = ask(prompt, texts[0], "~")
        await asyncio.wait([left], timeout=0.001)
    return crc(*texts) % 8 / 8
