"""The threads that async agents call blocking code in: as many as there may be episodes."""

from __future__ import annotations

import asyncio
import threading

from slipstream.environments.agents import AgentMaker, FunctionAgent
from slipstream.environments.host import EpisodeHost

NUM_CALLS = 100


def test_blocking_calls_of_many_episodes_run_at_once() -> None:
    """None returns before all have begun, as where requests wait for a swap that waits for other episodes' requests."""

    async def play() -> None:
        host = EpisodeHost([AgentMaker(FunctionAgent(print))], lambda _: None, step_limit_s=5.0)
        await host.open_gateway(request_limit_s=5.0)
        try:
            have_begun = threading.Barrier(NUM_CALLS)
            await asyncio.gather(*(asyncio.to_thread(have_begun.wait, 10) for _ in range(NUM_CALLS)))
        finally:
            await host.close()

    asyncio.run(play())
