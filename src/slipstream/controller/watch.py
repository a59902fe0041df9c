"""Between the run and whoever watches it: feeds the display of `observe/` from the controller's tally, or nothing."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Protocol

import msgspec

from slipstream.controller.tally import Tally
from slipstream.core.config import RunConfig
from slipstream.core.held_out import is_right
from slipstream.core.types import Counters, Progress, Swapped
from slipstream.observe import samples as samples_module
from slipstream.observe.display import Display, config_summary, in_numbers
from slipstream.observe.samples import Sample
from slipstream.observe.summary import Summary
from slipstream.prompts import PromptReport

log = logging.getLogger(__name__)

NUM_SAMPLES = 6
FILES = ("summary.json", "report.html", "metrics.jsonl", "rollouts.jsonl", "timeline.json", "model")


class Observer(Protocol):
    """Told of everything worth showing; must return at once."""

    def started(self, report: PromptReport) -> None: ...

    def note(self, text: str) -> None: ...

    def progress(self, message: Progress) -> None: ...

    def counted(self, message: Counters) -> None: ...

    def swapped(self, message: Swapped) -> None: ...

    def stepped(self, metrics: dict[str, float]) -> None: ...

    def evaluated(self, tally: Tally, version: int) -> None: ...

    def finished(self, samples: list[Sample], summary: Summary) -> None: ...

    def close(self) -> None:
        """Give the terminal back: nothing more comes, also where the run failed. May be called twice."""


class SilentObserver:
    """Shows nothing."""

    def started(self, report: PromptReport) -> None:
        if report.warning is not None:  # nobody looks at a screen: it belongs into the program's log
            log.warning("%s", report.warning)

    def note(self, text: str) -> None:
        pass

    def progress(self, message: Progress) -> None:
        pass

    def counted(self, message: Counters) -> None:
        pass

    def swapped(self, message: Swapped) -> None:
        pass

    def stepped(self, metrics: dict[str, float]) -> None:
        pass

    def evaluated(self, tally: Tally, version: int) -> None:
        pass

    def finished(self, samples: list[Sample], summary: Summary) -> None:
        pass

    def close(self) -> None:
        pass


class ConsoleObserver:
    """The live display on a terminal, plain lines elsewhere."""

    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.config = config
        self.display = Display(config_summary(config), steps=config.steps, max_staleness=config.staleness_bound)

    def started(self, report: PromptReport) -> None:
        self.display.note(
            f"prompts: {report.num_train} to train on, {report.num_eval} held out, overlap {report.overlap}"
            + (f", {report.num_too_long} dropped as too long" if report.num_too_long else "")
        )
        if report.warning is not None:
            self.display.note(report.warning)

    def note(self, text: str) -> None:
        self.display.note(text)

    def progress(self, message: Progress) -> None:
        self.display.phase(message.phase, message.done, message.total, message.metrics)

    def counted(self, message: Counters) -> None:
        self.display.counters(message.executor, message.values)

    def swapped(self, message: Swapped) -> None:
        self.display.swapped(message.replica, message.version)

    def stepped(self, metrics: dict[str, float]) -> None:
        self.display.step(metrics)

    def evaluated(self, tally: Tally, version: int) -> None:
        found = tally.evaluations[version]
        label = {0: "before", self.config.steps: "after"}.get(version, f"at step {version}")
        if found.sampled is None and found.greedy is not None:
            self.display.evaluation(label, found.greedy)
        elif found.sampled is not None:
            self.display.note(f"  sampled at temperature 1: {in_numbers(found.sampled)}")

    def finished(self, samples: list[Sample], summary: Summary) -> None:
        self.display.samples(samples)
        files = {name: self.run_dir / name for name in FILES if (self.run_dir / name).exists()}
        self.display.finish(summary, files)

    def close(self) -> None:
        self.display.close()


def write_samples(tally: Tally, run_dir: Path) -> list[Sample]:
    """The first few held-out prompts with their greedy answers before and after, also into `samples.json`.

    After a resume, what was answered before it is known from there.
    """
    path, measure = run_dir / "samples.json", tally.config.eval.measure
    before, after = (tally.evaluations.get(version) for version in (0, tally.steps_done))
    if before is not None and before.scores:
        samples = [
            Sample(
                one.prompt_text,
                one.answer,
                one.completion_text,
                None,
                before_reward=one.reward,
                before_is_right=is_right(one, measure),
            )
            for one in before.scores[:NUM_SAMPLES]
        ]
    else:
        samples = samples_module.read_samples(path)
    if tally.steps_done and after is not None and after.scores:
        samples = [
            msgspec.structs.replace(
                sample,
                after=last.completion_text,
                after_reward=last.reward,
                after_is_right=is_right(last, measure),
            )
            for sample, last in zip(samples, after.scores, strict=False)
        ]
    samples_module.write_samples(samples, path)
    return samples
