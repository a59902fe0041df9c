"""A run on several machines: the controller's side, and that of the groups that join it (`slipstream launch`).

The controller hosts the store and, as its children, what is not told to be elsewhere; every other group is a torchrun
job of its own, whose agent starts it again when it dies. docs/cluster.md shows it for two machines, SLURM and
Kubernetes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from slipstream.controller.cluster import ALWAYS_REMOTE, Cluster
from slipstream.controller.meeting import JOIN_TIMEOUT_S, Listen, attend, check_listening, parse_address, read_spec
from slipstream.controller.pipeline import replica_of
from slipstream.controller.placement import num_cores, thread_environment
from slipstream.core.addresses import LOOPBACK, numeric_address
from slipstream.core.errors import ConfigError, SlipstreamError
from slipstream.core.interrupts import LEAVING, Interrupts
from slipstream.core.keys import RUN_KEY_VARIABLE, RunKeys

CONTROLLER_GROUP = "controller"
QUIET = {} if "TORCH_CPP_LOG_LEVEL" in os.environ else {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""c10d warns of every address that has no name."""


@dataclass(frozen=True)
class Job:
    """How a group joins: `controller` is HOST:PORT or the file with that, `address` where others reach this machine.

    With `nnodes` machines for the group, the command runs on each, as `node_rank`, and they meet at `rendezvous`
    (HOST:PORT of machine 0). `threads` per process; None: the cores of this machine, divided.
    """

    group: str
    controller: str
    key_file: Path | None = None
    address: str = LOOPBACK
    nnodes: int = 1
    node_rank: int = 0
    rendezvous: str | None = None
    max_restarts: int = 3
    threads: int | None = None
    shutdown_grace_s: float = 25.0


def cluster_of(
    listen: str, key_file: Path | None, address_file: Path | None, also_remote: Collection[str] = ()
) -> Cluster:
    """What makes a run one on several machines. `key_file` is made where there is none; without one, the environment's.

    Groups of `also_remote` ('reward_models', 'reference') join it as trainer and generators do.
    Raises ConfigError for an address that is none of this machine's, and without a key.
    """
    found = parse_address(listen)
    if found is None:
        raise ConfigError("not an address to listen at", got=listen, allowed="HOST:PORT; port 0 takes any free one")
    host, port = found
    if numeric_address(host).is_unspecified:
        raise ConfigError(
            "the controller needs an address that the groups can reach",
            got=listen,
            allowed="an address or name of this machine in their network",
        )
    there = Listen(host, port, address_file)
    check_listening(there)  # before a key is made
    return Cluster(there, run_keys(key_file, makes_file=True), ALWAYS_REMOTE | set(also_remote))


def run_keys(key_file: Path | None, *, makes_file: bool = False) -> RunKeys:
    """The keys in `key_file`, or else in the environment."""
    if key_file is None:
        keys = RunKeys.take()
        if keys is None:
            raise ConfigError(
                "a run on several machines needs a key",
                allowed=f"--key-file PATH (the controller makes it, mode 0600), or ${RUN_KEY_VARIABLE}",
            )
        return keys
    if makes_file and not key_file.exists():
        keys = RunKeys.new()
        keys.save(key_file)
        return keys
    return RunKeys.load(key_file)


def torchrun(job: Job) -> tuple[list[str], dict[str, str]]:
    """The arguments of the group's torchrun agent on this machine, and what its environment needs besides.

    Waits for the controller, which knows how many ranks the group has. Raises ConfigError for another run's key, for a
    group that the run does not have, and for one whose ranks do not divide over `nnodes`.
    """
    keys = run_keys(job.key_file)
    numeric_address(job.address)
    if job.nnodes < 1 or not 0 <= job.node_rank < job.nnodes:
        raise ConfigError(
            "a group's machines are counted from 0",
            got=f"--nnodes {job.nnodes} --node-rank {job.node_rank}",
            allowed="--nnodes: 1 or more, --node-rank: below it",
        )
    if (job.nnodes > 1) != (job.rendezvous is not None):
        raise ConfigError(
            "machines of one group meet at a rendezvous",
            got=f"--nnodes {job.nnodes}, --rendezvous {job.rendezvous}",
            allowed="both, or neither",
        )
    spec = read_spec(attend(job.controller, timeout_s=JOIN_TIMEOUT_S), keys, timeout_s=JOIN_TIMEOUT_S)
    node = spec.node(job.group)
    if node.ranks % job.nnodes:
        raise ConfigError(
            "the ranks of the group do not divide over its machines",
            got=f"{node.ranks} ranks of '{node.name}', --nnodes {job.nnodes}",
            allowed="--nnodes: a divisor of the ranks",
        )
    per_machine = node.ranks // job.nnodes
    threads = max(1, num_cores() // per_machine) if job.threads is None else job.threads
    command = ["--nproc-per-node", str(per_machine), "--max-restarts", str(job.max_restarts)]
    if job.rendezvous is None:
        command += ["--standalone"]
    else:
        command += ["--nnodes", str(job.nnodes), "--node-rank", str(job.node_rank), "--rdzv-backend", "c10d"]
        command += ["--rdzv-endpoint", job.rendezvous, "--rdzv-id", f"{spec.run_id}-{node.name}"]
        # torchrun would guess who is machine 0 from the name that a machine gives itself.
        command += ["--rdzv-conf", f"is_host={int(job.node_rank == 0)},read_timeout={JOIN_TIMEOUT_S:.0f}"]
        command += ["--local-addr", job.address]  # names of machines need not mean anything to each other
    command += ["-m", "slipstream.controller.member", "--controller", job.controller, "--group", job.group]
    command += ["--address", job.address, "--threads", str(threads)]
    environment = thread_environment(threads) | QUIET
    if job.key_file is not None:
        command += ["--key-file", str(job.key_file)]
    else:
        environment |= keys.as_environment()
    return command, environment


def join(job: Job) -> None:
    """Be the group's torchrun agent until the run is over. SlipstreamError when it has given up.

    Interrupted by a signal: for a generator at once. What the run cannot do without stays for `shutdown_grace_s`: the
    controller was told to end, too, and needs it for a checkpoint, or hears of it and makes one.
    """
    arguments, environment = torchrun(job)
    os.environ.update(environment)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # the others are taken here
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    interrupts = Interrupts()
    try:
        with interrupts, _leaving(job, interrupts):
            main(arguments)
            interrupts.check()
    except ChildFailedError as error:
        interrupts.check()  # the controller had ended before
        raise SlipstreamError(
            f"'{job.group}' has failed once more than --max-restarts {job.max_restarts} allows",
            got=f"exit codes {sorted({failure.exitcode for failure in error.failures.values()})}",
            hint="what its processes have said is above",
        ) from error


def _leaving(job: Job, interrupts: Interrupts) -> contextlib.AbstractContextManager[None]:
    if replica_of(job.group) is not None:
        return contextlib.nullcontext()

    def tell() -> None:
        os.write(2, f"{job.group} stays until the run has saved what it has; once more: it ends at once\n".encode())
        for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            os.kill(int(pid), LEAVING)

    return interrupts.deferred(job.shutdown_grace_s, tell)
