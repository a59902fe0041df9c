"""A run on several machines, at its controller: the store where groups meet, and what they are told there."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from slipstream.controller.meeting import Listen, Meeting, RunSpec
from slipstream.controller.pipeline import Pipeline
from slipstream.core.addresses import AddressBook, StoreAddresses
from slipstream.core.clock import wall_minus_clock_s
from slipstream.core.keys import RunKeys

ALWAYS_REMOTE = frozenset({"trainer", "generator"})


@dataclass(frozen=True)
class Cluster:
    """That a run is on several machines: where its controller listens, the run's keys, and which groups join it.

    `remote` are names of groups, 'generator' for all replicas; the others are the controller's children.
    """

    listen: Listen
    keys: RunKeys
    remote: frozenset[str] = ALWAYS_REMOTE


class MeetingPlace:
    """Where the processes of a run on several machines meet: the store beside the controller, reached with its keys."""

    def __init__(self, cluster: Cluster, pipeline: Pipeline, *, lease_s: float, deadline_s: float) -> None:
        self._pipeline, self._keys, self._start = pipeline, cluster.keys, secrets.token_hex(16)
        self._channel_keys = self._keys.of_start(self._start)
        self._deadline_s, self._lease_s = deadline_s, lease_s
        self._meeting = Meeting(cluster.listen, timeout_s=deadline_s)

    @property
    def host(self) -> str:
        """The address at which this machine is reached."""
        return self._meeting.host

    @property
    def address(self) -> str:
        """Of the store."""
        return f"{self.host}:{self._meeting.port}"

    def addresses(self, transport_dir: Path) -> AddressBook:
        """Where ports listen; children of this controller meet in `transport_dir`."""
        return StoreAddresses(
            self._pipeline.all_channels,
            self._meeting.store,
            self._channel_keys,
            host=self._meeting.host,
            transport_dir=transport_dir,
            deadline_s=self._deadline_s,
        )

    def child_environment(self) -> dict[str, str]:
        """What a child of the controller needs to speak with the groups."""
        return self._channel_keys.as_environment()

    def announce(self, run_dir: Path, run_id: str, *, delta: bool, relays: bool, started_s: float) -> None:
        """From here on groups may join. `delta`: versions travel as what they have changed; `relays`: through replicas
        that hand them on."""
        self._meeting.announce(
            RunSpec(
                run_id=run_id,
                start=self._start,
                run_dir=run_dir.resolve(),
                nodes=self._pipeline.nodes,
                channels=self._pipeline.all_channels,
                deadline_s=self._deadline_s,
                lease_s=self._lease_s,
                delta=delta,
                relays=relays,
                wall_minus_clock_s=wall_minus_clock_s(),
                started_s=started_s,
            ),
            self._keys,
        )
