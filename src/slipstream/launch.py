"""A run on several machines: the controller's side, and that of the groups that join it (`slipstream launch`).

The controller hosts the store and, as its children, what is not told to be elsewhere; every other group is a torchrun
job of its own, whose agent starts it again when it dies. docs/cluster.md shows it for two machines, SLURM and
Kubernetes.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from slipstream.controller import pool
from slipstream.controller.groups import BACKEND, check_interface, use_rendezvous
from slipstream.controller.meeting import (
    ALWAYS_REMOTE,
    JOIN_TIMEOUT_S,
    Cluster,
    Listen,
    RunSpec,
    attend,
    check_listening,
    host_store,
    is_done,
    parse_address,
    read_spec,
)
from slipstream.controller.pipeline import replica_of
from slipstream.controller.placement import thread_environment
from slipstream.core.addresses import LOOPBACK, check_reachable, numeric_address
from slipstream.core.errors import ConfigError, RunIsOver, SlipstreamError
from slipstream.core.interrupts import LEAVING, Interrupts
from slipstream.core.keys import RUN_KEY_VARIABLE, RunKeys
from slipstream.core.machine import num_cores

GENERATORS = "generator"
JOINS = "--group generator --join, on one machine"
QUIET = {} if "TORCH_CPP_LOG_LEVEL" in os.environ else {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""c10d warns of every address that has no name."""
MAX_DESCRIPTORS = 1 << 16
LEAVE_DEADLINE_S = 2.0
MAX_JOIN_TIMEOUT_S = 365 * 86_400
SAME_RANKS = {"TORCH_ELASTIC_WORKER_IDENTICAL": "1"}
"""A rank follows from the machine's number alone: agents need not read each other's numbers in the store."""


@dataclass(frozen=True)
class Job:
    """Arguments of a group that joins: `controller` is HOST:PORT or the file with that, others reach it at `address`.

    With `nnodes` machines for the group, the command runs on each, as `node_rank`, and they meet at `rendezvous`
    (HOST:PORT of machine 0). `threads` per process; None: the cores of this machine, divided. To `join` is to be the
    first replica that is free. Others are waited for `join_timeout` seconds; nobody once the run in folder `out`, which
    is to do `steps` steps, is done.
    """

    group: str
    controller: str
    join: bool = False
    key_file: Path | None = None
    address: str = LOOPBACK
    nnodes: int = 1
    node_rank: int = 0
    rendezvous: str | None = None
    max_restarts: int = 3
    threads: int | None = None
    shutdown_grace_s: float = 25.0
    join_timeout: float = JOIN_TIMEOUT_S
    out: Path | None = None
    steps: int | None = None


def allow_connections() -> None:
    """Let this process, and all that it starts, have as many descriptors as the system lets them ask for.

    1,000 idle connections use up the usual 1,024: then the store takes no more, and gloo ends the process.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def cluster_of(
    listen: str,
    key_file: Path | None,
    address_file: Path | None,
    also_remote: Collection[str] = (),
    *,
    join_timeout: float = JOIN_TIMEOUT_S,
) -> Cluster:
    """Return the cluster of a run on several machines. A `key_file` that is not there is made; None: the environment's.

    Groups of `also_remote` ('reward_models', 'reference', 'teacher', 'critic') join it as trainer and generators do.
    Each is waited for `join_timeout` seconds. Raises ConfigError for an address that is none of this machine's, and
    without a key.
    """
    allow_connections()
    _check_seconds(join_timeout)
    found = parse_address(listen)
    if found is None:
        raise ConfigError("not an address to listen at", got=listen, allowed="HOST:PORT; port 0 takes any free one")
    host, port = found
    if numeric_address(host).is_unspecified:
        what = "the controller needs an address that the groups can reach"
        raise ConfigError(what, got=listen, allowed="an address or name of this machine in their network")
    check_reachable(host)
    there = Listen(host, port, address_file)
    check_listening(there)  # before a key is made
    return Cluster(there, run_keys(key_file, makes_file=True), ALWAYS_REMOTE | set(also_remote), join_timeout)


def _check_seconds(join_timeout: float) -> None:
    if not 0 < join_timeout <= MAX_JOIN_TIMEOUT_S:
        allowed = f"seconds above 0, at most {MAX_JOIN_TIMEOUT_S} (a year)"
        raise ConfigError("--join-timeout is no time to wait", got=f"{join_timeout:g}", allowed=allowed)


def run_keys(key_file: Path | None, *, makes_file: bool = False) -> RunKeys:
    """Return the keys in `key_file`, or else in the environment."""
    if key_file is None:
        keys = RunKeys.take()
        if keys is None:
            allowed = f"--key-file PATH (the controller makes it, mode 0600), or ${RUN_KEY_VARIABLE}"
            raise ConfigError("a run on several machines needs a key", allowed=allowed)
        return keys
    if makes_file and not key_file.exists():
        keys = RunKeys.new()
        keys.save(key_file)
        return keys
    return RunKeys.load(key_file)


class TorchrunAgent(NamedTuple):
    """The arguments of a group's torchrun agent, additions to its environment, and the keys; and what it is to be."""

    command: list[str]
    environment: dict[str, str]
    keys: RunKeys
    group: str
    leave: Callable[[], None]
    """Give back the number that it got. One that was named is free when the controller has lost its process."""


def torchrun(job: Job) -> TorchrunAgent:
    """Return the agent of the group on this machine.

    Waits for the controller, which knows how many ranks the group has. Raises ConfigError for another run's key, for a
    group that the run does not have, for one whose ranks do not divide over `nnodes`, and where no number is free;
    RunIsOver where it is done.
    """
    keys = run_keys(job.key_file)
    check_reachable(job.address)
    _check_seconds(job.join_timeout)
    if job.join and (job.group != GENERATORS or job.nnodes != 1):
        got = f"--join with --group {job.group}, --nnodes {job.nnodes}"
        hint = "on several machines, or to have a certain number: --group generator-N without --join"
        raise ConfigError("a free number is for a generator", got=got, allowed=JOINS, hint=hint)
    if job.nnodes < 1 or not 0 <= job.node_rank < job.nnodes:
        got = f"--nnodes {job.nnodes} --node-rank {job.node_rank}"
        allowed = "--nnodes: 1 or more, --node-rank: below it"
        raise ConfigError("a group's machines are counted from 0", got=got, allowed=allowed)
    if (job.nnodes > 1) != (job.rendezvous is not None):
        got = f"--nnodes {job.nnodes}, --rendezvous {job.rendezvous}"
        raise ConfigError("machines of one group meet at a rendezvous", got=got, allowed="both, or neither")
    if job.rendezvous is not None and parse_address(job.rendezvous) is None:
        raise ConfigError("not an address to meet at", got=job.rendezvous, allowed="--rendezvous HOST:PORT")
    if job.nnodes > 1:
        check_interface(job.address)
    is_over = partial(is_done, job.out, job.steps)
    store = attend(job.controller, timeout_s=job.join_timeout, is_over=is_over)
    spec = read_spec(store, keys, timeout_s=job.join_timeout)
    later = [node.name for node in spec.nodes if node.joins_later]
    node = spec.node(job.group if not job.join else later[0] if later else _none_free(spec))
    if node.ranks % job.nnodes:
        what = "the ranks of the group do not divide over its machines"
        got = f"{node.ranks} ranks of '{node.name}', --nnodes {job.nnodes}"
        raise ConfigError(what, got=got, allowed="--nnodes: a divisor of the ranks")
    node.fetch(_say)
    group, claim = _claimed(job, spec, store, later)
    per_machine = node.ranks // job.nnodes
    threads = max(1, num_cores() // per_machine) if job.threads is None else job.threads
    command = ["--nproc-per-node", str(per_machine), "--max-restarts", str(job.max_restarts)]
    command += ["--nnodes", str(job.nnodes), "--node-rank", str(job.node_rank), "--rdzv-backend", BACKEND]
    # The place is known by then (`meet`); without one torchrun warns.
    command += ["--rdzv-id", f"{spec.run_id}-{group}", "--rdzv-endpoint", job.rendezvous or f"{LOOPBACK}:0"]
    # Names of machines need not mean anything to each other; and who is alone needs no address that others reach.
    command += ["--local-addr", LOOPBACK if job.rendezvous is None else job.address]
    command += ["-m", "slipstream.controller.process", "--controller", job.controller, "--group", group]
    command += ["--address", job.address, "--threads", str(threads), "--claim", claim]
    command += ["--join-timeout", str(job.join_timeout)]
    if job.out is not None and job.steps is not None:
        command += ["--out", str(job.out), "--steps", str(job.steps)]
    environment = thread_environment(threads) | QUIET | SAME_RANKS
    if job.key_file is not None:
        command += ["--key-file", str(job.key_file)]
    else:
        environment |= keys.as_environment()
    leave = partial(_leave, store, group, claim) if job.join else lambda: None
    return TorchrunAgent(command, environment, keys, group, leave)


def _claimed(job: Job, spec: RunSpec, store: Store, later: Sequence[str]) -> tuple[str, str]:
    """Return the group that `job` is, and the claim with which it is one of those that may join `later`.

    A command that names its group may be started again before the run has lost the one before: the claim is the same.
    """
    if not job.join:
        if job.group in later and not pool.hold(store, job.group, job.group):
            raise ConfigError(pool.TAKEN, got=job.group, hint=pool.HINT)
        return job.group, job.group
    claim = secrets.token_hex(8)
    group = pool.hold_any(store, later, claim) or _none_free(spec)
    _say(f"joining as {group}")
    return group, claim


def _none_free(spec: RunSpec) -> NoReturn:
    replicas = [node for node in spec.nodes if replica_of(node.name) is not None]
    most, first = len(replicas), sum(not node.joins_later for node in replicas)
    raise ConfigError(
        "no further generator may join this run",
        got=f"{first} that the run began with, {most - first} that have joined since",
        allowed=f"generator.max_replicas = {most}",
        hint="one that leaves makes room; a resume may raise generator.max_replicas",
    )


def _leave(store: Store, group: str, claim: str) -> None:
    """Give the number back; for a moment at most, as the controller may be gone, and its store with it."""

    def give_back() -> None:
        with contextlib.suppress(DistError):
            pool.free(store, group, claim=claim)

    thread = threading.Thread(target=give_back, daemon=True)
    thread.start()
    thread.join(LEAVE_DEADLINE_S)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def meet(job: Job) -> Store:
    """Return the store over which the group's agents meet: machine 0 makes it, the others wait for it.

    Raises ConfigError where it cannot listen, SlipstreamError when machine 0 does not answer.
    """
    timeout = timedelta(seconds=job.join_timeout)
    if job.rendezvous is None:
        return host_store(Listen(LOOPBACK, 0), timeout=timeout)
    if job.node_rank:
        return attend(job.rendezvous, timeout_s=job.join_timeout, whom=f"machine 0 of '{job.group}'")
    place = parse_address(job.rendezvous)
    assert place is not None, "torchrun() has refused it"
    return host_store(Listen(_own_address(place[0], job.address), place[1]), timeout=timeout)


def _own_address(name: str, address: str) -> str:
    """Return where to listen: at `name`, which others know; at `address` where it means nothing or loopback here."""
    try:
        return address if numeric_address(name).is_loopback else name
    except ConfigError:
        return address


def join(job: Job) -> None:
    """Be the group's torchrun agent until the run is over; nothing where it is. SlipstreamError when it has given up.

    Interrupted by a signal, at most `shutdown_grace_s` later. A generator hands over what it has begun. What the run
    cannot do without stays: the controller was told to end, too, and needs it for a checkpoint, or hears of it and
    makes one.
    """
    allow_connections()
    try:
        agent = torchrun(job)
    except RunIsOver as over:
        _say(str(over))
        return
    try:
        _be(agent, replace(job, group=agent.group))
    except BaseException:  # else the run is over
        agent.leave()
        raise


def _be(agent: TorchrunAgent, job: Job) -> None:
    os.environ.update(agent.environment)
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import main

    interrupts = Interrupts()
    try:
        with interrupts:
            use_rendezvous(meet(job), agent.keys, join_timeout_s=job.join_timeout)
            with _leaving(job, interrupts):
                main(["--signals-to-handle", "SIGQUIT", *agent.command])  # the others are taken here
                interrupts.check()
    except ChildFailedError as error:
        interrupts.check()  # the controller had ended before
        what = f"'{job.group}' has failed once more than --max-restarts {job.max_restarts} allows"
        got = f"exit codes {sorted({failure.exitcode for failure in error.failures.values()})}"
        raise SlipstreamError(what, got=got, hint="what its processes have said is above") from error
    except RendezvousError as error:
        what = f"the machines of '{job.group}' could not meet"
        hint = "who can reach the port of the rendezvous can keep them from it: see docs/cluster.md, Security"
        raise SlipstreamError(what, got=str(error) or type(error).__name__, hint=hint) from error


def _leaving(job: Job, interrupts: Interrupts) -> contextlib.AbstractContextManager[None]:
    is_replica = replica_of(job.group) is not None
    what = "hands over what it has begun, and leaves" if is_replica else "stays until the run has saved what it has"

    def tell() -> None:
        os.write(2, f"{job.group} {what}; once more: it ends at once\n".encode())
        for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            os.kill(int(pid), LEAVING)

    return interrupts.deferred(job.shutdown_grace_s, tell)
