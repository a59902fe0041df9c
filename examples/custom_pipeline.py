"""A pipeline of your own: a judge between rewards and trainer, without touching either.

    python examples/custom_pipeline.py [RUN_DIR]

The controller takes a list of executors and a list of channels (LlamaRL, arXiv:2505.24034, algorithm 2). Three of the
executors here are Slipstream's own; the fourth, `Judge`, stands for a slow, remote one (a model behind an API): each
verdict takes `delay_s`, many are under way at once, and nobody waits for them but the rollouts they are about.

    generator -> rewards -> judge -> trainer -> (weights) -> generator
"""

import sys
from collections import deque
from typing import Any

import msgspec

import slipstream
from slipstream.controller.build import make_generator, make_rewards, make_trainer
from slipstream.controller.pipeline import Node, Pipeline, gather, weights
from slipstream.core.executor import Context, Executor
from slipstream.core.service_messages import Counters, Ready
from slipstream.core.types import Rollout, Stop


class Judge(Executor):
    """Adds up to `bonus` to the reward of a right answer, the more the shorter it is; a verdict takes `delay_s`.

    Consumes: rollouts. Produces: `Rollout` (judged), in the order they came. Waits for: a rollout, or the next verdict.
    Ends when: told to stop.
    """

    inputs = ("rollouts",)
    outputs = ("judged",)

    def __init__(self, *, delay_s: float, bonus: float) -> None:
        self.delay_s = delay_s
        self.bonus = bonus
        self.pending: deque[tuple[float, Rollout]] = deque()  # (when its verdict is due, rollout)
        self.num_judged = 0
        self._is_finished = False

    def init(self, context: Context) -> None:
        self.context = context
        context.spans.set_idle_state("wait_rollouts")
        context.outputs["events"].put(Ready(executor=context.name))

    def step(self) -> bool:
        """Ask about every rollout that arrived; hand on those whose verdict is there."""
        now_s = self.context.clock.now_s()
        num_before = len(self.pending), self.num_judged
        while (rollout := self.context.inputs["rollouts"].get_nowait()) is not None:
            assert isinstance(rollout, Rollout)
            self.pending.append((now_s + self.delay_s, rollout))
        while self.pending and self.pending[0][0] <= now_s:
            self.context.outputs["judged"].put(self.judged(self.pending.popleft()[1]))
            self.num_judged += 1
        while (command := self.context.inputs["commands"].get_nowait()) is not None:
            if isinstance(command, Stop):
                self._count()
                self._is_finished = True
                return True
        return (len(self.pending), self.num_judged) != num_before

    def judged(self, rollout: Rollout) -> Rollout:
        """The rollout with its bonus; a wrong answer gets none, so that brevity alone never pays."""
        if rollout.failure is not None or rollout.reward < 1 - 1e-6:
            return rollout
        bonus = self.bonus / (1 + rollout.completion.num_tokens)
        parts = rollout.reward_parts | {"brevity": bonus}
        return msgspec.structs.replace(rollout, reward=rollout.reward + bonus, reward_parts=parts)

    def _count(self) -> None:
        values = {"judged": float(self.num_judged)}
        self.context.outputs["events"].put(Counters(executor=self.context.name, values=values))

    @property
    def is_finished(self) -> bool:
        return self._is_finished

    def wait_s(self) -> float | None:
        """Until the next verdict: the host sleeps no longer than that, and does not poll."""
        return max(0.0, self.pending[0][0] - self.context.clock.now_s()) if self.pending else None


def judged_pipeline(config: slipstream.RunConfig) -> Pipeline:
    """Executors and channels, written out."""
    return Pipeline(
        nodes=(
            Node("generator-0", make_generator, {"config": config}, host=config.host),
            Node("rewards", make_rewards, {"config": config}, host=config.host),
            Node("judge", Judge, {"delay_s": 0.2, "bonus": 0.5}, host=config.host),
            Node("trainer", make_trainer, {"config": config}, host=config.host),
        ),
        channels=(
            gather("completions", "generator-0.completions", "rewards.completions"),
            gather("rollouts", "rewards.rollouts", "judge.rollouts"),
            gather("judged", "judge.judged", "trainer.rollouts"),
            weights("weights", "trainer.weights", "generator-0.weights"),
        ),
        deadline_s=config.deadline_s,
    )


def main(out: str | None = None, overrides: dict[str, Any] | None = None) -> slipstream.Result:
    """A short quickstart with a judge in it; `overrides` replace the short settings."""
    short = {"steps": 30, "eval": {"every": 0, "num_prompts": 200}}
    return slipstream.run("quickstart", overrides=overrides or short, out=out, pipeline=judged_pipeline)


if __name__ == "__main__":
    result = main(*sys.argv[1:2])
    before, after = (result.summary["eval"][when]["accuracy"] for when in ("before", "after"))
    print(f"{result.status}: {result.summary['steps']} steps, accuracy {before:.3f} -> {after:.3f}")
    print(f"time of the judge's process, in seconds: {result.summary['accounting']['judge']}")
