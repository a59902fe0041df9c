"""A run on two machines, joined by a cable: it learns, survives a pulled cable, and heals a killed group."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from machines import Job, Machine, are_possible, two_machines, wait_until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not are_possible(), reason="network namespaces need Linux, root and iproute2"),
    pytest.mark.timeout(900),
]

TRAINER_SIDE = ("--group", "trainer", "--threads", "1")
GENERATOR = ("--group", "generator-0", "--threads", "1")


class Run:
    """The quickstart on two machines: controller, rewards and trainer on one, generators on the other."""

    def __init__(self, near: Machine, far: Machine, folder: Path, *overrides: str) -> None:
        self.near, self.far, self.folder = near, far, folder
        self.key, self.address, self.out = folder / "key", folder / "address", folder / "run"
        self.controller = near.launch(
            "quickstart",
            *("--group", "controller", "--listen", f"{near.address}:0"),
            *("--key-file", str(self.key), "--address-file", str(self.address), "--out", str(self.out)),
            *overrides,
            log="controller.log",
        )
        self.trainer = self.join(near, *TRAINER_SIDE)
        self.generator = self.join(far, *GENERATOR)

    def join(self, machine: Machine, *options: str, key: Path | None = None) -> Job:
        wait_until(self.address.exists, "the controller listens", timeout_s=60)
        return machine.launch(
            *options,
            *("--controller", str(self.address), "--key-file", str(key or self.key), "--address", machine.address),
            log=f"{options[1]}.log",
        )

    def steps(self) -> int:
        return self._count("StepDone")

    def _count(self, kind: str) -> int:
        return sum(f'"{kind}"' in line for line in self._events())

    def _events(self) -> list[str]:
        path = self.out / "events.jsonl"
        return path.read_text().splitlines() if path.exists() else []

    def events(self) -> list[dict]:
        return [json.loads(line) for line in self._events()]

    def wait_for_step(self, step: int, timeout_s: float = 300) -> None:
        def is_so() -> bool:
            assert self.controller.process.poll() is None, f"the run ended:\n{self.controller.tail()}"
            return self.steps() >= step

        wait_until(is_so, f"step {step}", timeout_s=timeout_s)

    def end(self, timeout_s: float = 500) -> dict:
        code = self.controller.wait(timeout_s)
        assert code == 0, self.controller.tail() + self.trainer.tail() + self.generator.tail()
        return json.loads((self.out / "summary.json").read_text())


def check_books(summary: dict) -> None:
    prompts = summary["prompts"]
    assert prompts["lost"] == 0
    assert prompts["repeated"] == 0
    assert prompts["admitted"] == sum(prompts[key] for key in ("trained", "skipped", "failed", "pending"))
    assert summary["staleness"]["max"] <= summary["staleness"]["bound"]
    assert summary["status"] == "done"


def test_a_run_on_two_machines_learns_through_a_pulled_cable_and_a_killed_group(tmp_path):
    with two_machines(tmp_path) as (near, far, cable):
        run = Run(near, far, tmp_path, "--eval.num-prompts", "200", "--prompts.num-eval", "200")
        stranger = tmp_path / "other-key"
        run.wait_for_step(5)

        cable.pull()
        time.sleep(10.0)  # what is tested
        cable.plug()
        reached = run.steps()
        run.wait_for_step(reached + 5, timeout_s=60)
        assert run._count("ReplicaLost") == 0, "ten seconds are less than a lease"

        run.generator.kill()
        killed_at = run.steps()
        run.generator = run.join(far, *GENERATOR)
        wait_until(lambda: run._count("ReplicaLost") == 1, "the controller hears of the loss", timeout_s=60)
        run.wait_for_step(killed_at + 5, timeout_s=120)
        check_that_it_heals_within_one_version(run.events())

        stranger.write_text("ab" * 32 + "\n")
        stranger.chmod(0o600)
        imposter = run.join(far, *GENERATOR, "--max-restarts", "0", key=stranger)

        summary = run.end()
        check_books(summary)
        assert summary["eval"]["after"]["accuracy"] > summary["eval"]["before"]["accuracy"] + 0.3
        assert imposter.process.poll() != 0
        assert run.trainer.wait(30) == 0
        assert run.generator.wait(30) == 0


def check_that_it_heals_within_one_version(events: list[dict]) -> None:
    """The first version it samples from is, at most, one behind what the trainer has done by then."""
    kinds = [event["event"]["type"] for event in events]
    lost = kinds.index("ReplicaLost")
    healed = kinds.index("Swapped", lost)
    done = sum(kind == "StepDone" for kind in kinds[:healed])
    assert events[healed]["event"]["version"] >= done - 1
