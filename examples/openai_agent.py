"""An agent on OpenAI's client, trained: it asks the policy for a number until it is found (docs/environments.md).

    pip install openai
    python examples/openai_agent.py [RUN_DIR]

The agent knows nothing of training. Its client could speak to any other model.
"""

import sys
import zlib
from functools import cache
from typing import Any

from openai import AsyncOpenAI

import slipstream


@cache
def client() -> AsyncOpenAI:
    """One pool of connections for all episodes. It is made while the run plays, so it passes proxies by."""
    return AsyncOpenAI(base_url="http://localhost", api_key="-", max_retries=0, timeout=600)


async def play(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Let the policy guess a number in 1..16, five times at most; return 1 if it was found."""
    policy = client().with_options(base_url=base_url, api_key=api_key)
    number = 1 + zlib.crc32(str(row["prompt"]).encode()) % 16
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    for _ in range(5):
        answer = await policy.chat.completions.create(model="policy", messages=messages)
        guess = answer.choices[0].message.content or ""
        if guess == str(number):
            return 1.0
        is_number = guess.isascii() and guess.isdigit()
        said = "1-16" if not is_number else "higher" if int(guess) < number else "lower"
        messages += [{"role": "assistant", "content": guess}, {"role": "user", "content": f">{said}\n"}]
    return 0.0


def main(out: str | None = None, overrides: dict[str, Any] | None = None) -> slipstream.Result:
    """Train the small model of the recipe guess_mini, with this agent in the place of its environment."""
    steps = {"steps": 30, "eval.every": 10}
    plain = {"environment.observation": "{content}"}  # the agent writes ">" and the end of the line itself
    return slipstream.run("guess_mini", agent=play, overrides=plain | steps | (overrides or {}), out=out)


if __name__ == "__main__":
    main(*sys.argv[1:2])
