"""Environments in jailed workers (`jail/`), many episodes in each."""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec

from slipstream.core.clock import Clock
from slipstream.core.scratch import sweep
from slipstream.environments.hosting import MAX_SPOKEN_BYTES, FromHost, HostSetup
from slipstream.environments.pool import EpisodePool, HostLink
from slipstream.jail.sandbox import JailedWorker, Permissions, WorkerKind

_KIND: WorkerKind[FromHost] = WorkerKind(
    module="slipstream.environments.worker",
    scratch="environment",
    decoder=msgspec.msgpack.Decoder(FromHost, strict=True),
    max_bytes=MAX_SPOKEN_BYTES,
)


def _program_folders(command: Sequence[str]) -> list[str]:
    """Return the folders of a program and of its libraries, where it really lies: an interpreter's are often hidden."""
    if not command:
        return []
    folder = os.path.dirname(os.path.realpath(command[0]))
    return [folder, os.path.join(os.path.dirname(folder), "lib")] if os.path.basename(folder) == "bin" else [folder]


class EnvironmentPool(EpisodePool):
    """`num_workers` jailed workers and, later, a warm spare. A call that cannot be cancelled costs its worker.

    `private` folders are empty for workers, where files are confined.
    """

    def __init__(
        self,
        setup: HostSetup,
        *,
        num_workers: int,
        clock: Clock | None = None,
        private: Sequence[str] = (),
        num_spares: int = 1,
    ) -> None:
        self._setup = setup
        self._permissions = Permissions(
            private=private,
            folders=sorted({folder for source in setup.sources for folder in source.folders}),
            environment=setup.environment,
            network=setup.network,
            listens=setup.has_agents,
            programs=[folder for source in setup.sources for folder in _program_folders(source.command)],
        )
        sweep()  # folders of workers that were killed with their pool
        super().__init__(
            num_hosts=num_workers,
            num_spares=num_spares,
            num_sources=len(setup.sources),
            agents=[index for index, source in enumerate(setup.sources) if source.is_agent],
            step_limit_s=setup.step_limit_s,
            max_chars=setup.max_chars,
            clock=clock,
        )

    def _start_host(self) -> HostLink:
        return JailedWorker(_KIND, self._setup, self._permissions)

    def _abandons(self, host: HostLink, episode: int) -> bool:  # noqa: ARG002 - only a thread can be left behind
        return False
