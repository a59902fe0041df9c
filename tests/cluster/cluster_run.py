"""A run on two machines that a test starts, watches and disturbs."""

from __future__ import annotations

import json
from pathlib import Path

from machines import Job, Machine, wait_until

TRAINER_SIDE = ("--group", "trainer", "--threads", "1")
RENDEZVOUS_PORT = 29501


def generator(replica: int) -> tuple[str, ...]:
    return ("--group", f"generator-{replica}", "--threads", "1")


class ClusterRun:
    """The quickstart on two machines: controller, rewards and trainer on one, a generator on the other.

    Where `shares_trainer`, the trainer is one group on both: a rank on each.
    """

    def __init__(
        self,
        near: Machine,
        far: Machine,
        folder: Path,
        *overrides: str,
        num_replicas: int = 1,
        shares_trainer: bool = False,
    ) -> None:
        self.near, self.far, self.folder = near, far, folder
        self.key, self.address, self.out = folder / "key", folder / "address", folder / "run"
        self.controller = near.launch(
            "quickstart",
            *("--group", "controller", "--listen", f"{near.address}:0"),
            *("--key-file", str(self.key), "--address-file", str(self.address), "--out", str(self.out)),
            *("--generator.replicas", str(num_replicas)),
            *overrides,
            log="controller.log",
        )
        at = (near, far) if shares_trainer else (near,)
        together = ("--nnodes", "2", "--rendezvous", f"{near.address}:{RENDEZVOUS_PORT}") if shares_trainer else ()
        self.trainers = [
            self.join(machine, *TRAINER_SIDE, *together, *(("--node-rank", str(rank)) if together else ()))
            for rank, machine in enumerate(at)
        ]
        self.generators = [self.join(far, *generator(replica)) for replica in range(num_replicas)]

    def join(self, machine: Machine, *options: str, key: Path | None = None) -> Job:
        wait_until(self.address.exists, "the controller listens", timeout_s=60)
        return machine.launch(
            *options,
            *("--controller", str(self.address), "--key-file", str(key or self.key), "--address", machine.address),
            log=f"{options[1]}.log",
        )

    def steps(self) -> int:
        return self.count("StepDone")

    def count(self, kind: str) -> int:
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
        assert code == 0, "".join(job.tail() for job in (self.controller, *self.trainers, *self.generators))
        return json.loads((self.out / "summary.json").read_text())
