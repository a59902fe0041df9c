"""A generator's replica on the ranks of a pool: executors over real channels, with arrivals that a test has written.

Everything that may reach a rank at a moment of its own has a place in a `Case`: commands at rank 0, how late the others
receive them, versions that lie staged. Ranks note what was agreed upon (`Trace`); `follow` does the same with
one executor over the whole model, which is what the replica is compared with.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from ports import NoSpans, Port
from rank_models import LLAMA, whole_model
from rank_pool import Rank

from slipstream.algorithms.logprobs import probe_logprobs
from slipstream.core.channel import connect, wait
from slipstream.core.channel_spec import ChannelSpec, Kind
from slipstream.core.clock import VirtualClock
from slipstream.core.config import RunConfig
from slipstream.core.errors import RankError, WeightSyncError
from slipstream.core.executor import Context
from slipstream.core.links import WakeUp
from slipstream.core.peer_messages import Wake
from slipstream.core.rank_group import RankGroup
from slipstream.core.ranks import rank_name
from slipstream.core.sections import ModelConfig
from slipstream.core.service_messages import Admit, Evaluate
from slipstream.core.spans import Spans
from slipstream.core.types import Completion, Message, Prompt, Stop
from slipstream.core.weights import FlatWeights, Swap
from slipstream.generator.executor import Generator
from slipstream.generator.lockstep import Agreement
from slipstream.models.build import build_policy
from slipstream.models.config import TransformerConfig
from slipstream.models.hf import logical_tensors, save_model
from slipstream.models.quantized import WeightLayout
from slipstream.models.served import ServedWeights
from slipstream.models.sharded import Division, build_sharded_policy
from slipstream.models.shards import load_shard
from slipstream.models.stages import Stage
from slipstream.models.tensor_parallel import TensorParallel
from slipstream.models.tokenizer import char_tokenizer
from slipstream.models.transformer import Transformer

ALPHABET = "".join(map(chr, range(32, 96)))
CONFIG = TransformerConfig(**{**vars(LLAMA), "vocab_size": 3 + len(ALPHABET), "tie_embeddings": True})
"""Neither 2 nor 4 divides the vocabulary; the head is a range of the embedding's rows."""
PROBE = np.random.default_rng(5).integers(2, CONFIG.vocab_size, 12).astype(np.int32)

Trace = list[tuple[tuple[Message, ...], int | None, float]]
"""By round: the commands obeyed, the version that lay staged everywhere, the time."""


@dataclass(frozen=True)
class Case:
    """`commands` (step of rank 0, what arrives); by rank `staged` (step, version or None for one that has given way)
    and `late` (steps by which it receives each command after it was passed on). Steps are counted on each rank."""

    settings: dict[str, Any]
    commands: tuple[tuple[int, Message], ...]
    staged: tuple[tuple[tuple[int, int | None], ...], ...] = ((), (), (), ())
    late: tuple[tuple[int, ...], ...] = ((), (), (), ())
    seconds_per_step: float = 0.0

    def on_one_rank(self) -> Case:
        """The same without pipeline stages."""
        generator = self.settings["generator"] | {"pipeline_parallel": 1}
        return replace(self, settings=self.settings | {"generator": generator})

    @property
    def num_completions(self) -> int:
        admitted = sum(m.num_samples for _, m in self.commands if isinstance(m, Admit))
        return admitted + sum(len(m.prompts) for _, m in self.commands if isinstance(m, Evaluate))


@dataclass
class Outcome:
    """What a rank sent and did. Completions by (purpose, ordinal or evaluation, sample or prompt)."""

    completions: dict[tuple[str, int, int], Completion] = field(default_factory=dict)
    events: list[Message] = field(default_factory=list)
    trace: Trace = field(default_factory=list)
    committed: list[tuple[int, int]] = field(default_factory=list)  # (version, round)
    probe_errors: list[float] = field(default_factory=list)


# Weights of versions


@cache
def version_model(version: int) -> Transformer:
    """The whole model of `version`: version 0 is the checkpoint that runs start from."""
    return whole_model(CONFIG, seed=version)


def save_policy(folder: Path) -> None:
    save_model(version_model(0), folder, char_tokenizer(ALPHABET))


def whole_bytes(model: Transformer, precision: Any) -> torch.Tensor:
    layout = WeightLayout(model, precision)
    flat = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    list(layout.pack(dict(model.named_parameters()), flat))
    return flat


def bytes_of_part(model: Transformer, precision: Any, part: Transformer) -> torch.Tensor:
    """What a rank holds of the whole `model`'s packed weights: values and scales, each cut as the tensors are."""
    whole, local = WeightLayout(model, precision), WeightLayout(part, precision)
    flat = torch.zeros(local.num_bytes, dtype=torch.uint8)
    source, target = whole.views(whole_bytes(model, precision)), local.views(flat)
    if precision == "mxfp4":  # numbers that are stored without loss
        numbers = {name: weight.in_type(torch.float32).values.double() for name, weight in source.items()}
        list(local.pack({name: cut.float() for name, cut in _cut(numbers, model, part).items()}, flat))
        return flat
    values = _cut({name: weight.values.double() for name, weight in source.items()}, model, part)
    scales = {
        name: (torch.ones(()) if weight.scales is None else weight.scales[:, None]).expand_as(weight.values)
        for name, weight in source.items()
    }
    cut_scales = _cut({name: scale.double() for name, scale in scales.items()}, model, part)
    for name, weight in target.items():
        weight.values.copy_(values[name])
        if weight.scales is not None:
            weight.scales.copy_(cut_scales[name][:, 0])
    return flat


def _cut(numbers: dict[str, torch.Tensor], model: Transformer, part: Transformer) -> dict[str, torch.Tensor]:
    """The part's of float64 numbers in the shapes of the whole model's parameters."""
    whole, local = (Transformer(each.config, each.ranks, each.stage).double() for each in (model, part))
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            parameter.copy_(numbers[name])
    load_shard(local, logical_tensors(whole))
    return {name: parameter.detach() for name, parameter in local.named_parameters()}


def part_of(rank: Rank, stages: int) -> Transformer:
    """A rank's part of the model, without weights; of stages x tensor-parallel ranks."""
    together = rank.world // stages
    if together == 1:
        return Transformer(CONFIG, stage=Stage(rank.rank, stages))
    ranks = TensorParallel(CONFIG, rank.rank % together, together)
    return Transformer(ranks.local_config, ranks, Stage(rank.rank // together, stages))


class Versions:
    """A subscriber whose versions are there when the case says so; their bytes are those of `bytes_of_part`."""

    def __init__(self, arrivals: Sequence[tuple[int, int | None]], rank: Rank, precision: Any, stages: int = 1) -> None:
        self.pending_version: int | None = None
        self.version = 0
        self.probe_errors: list[float] = []
        self.spoils = False  # versions: their probes disagree
        self._wake = WakeUp()
        self._left = deque(arrivals)
        self._step = -1
        self._rank, self._precision, self._stages = rank, precision, stages

    def open(
        self,
        parameters: FlatWeights,
        probe: Callable[[np.ndarray], np.ndarray],
        tolerance: float,
        *,
        is_threaded: bool,
        probes_prepared: bool = False,
        spans: Spans,
    ) -> None:
        self._parameters, self._probe, self._tolerance = parameters, probe, tolerance
        assert probes_prepared == (self._rank.world == 1), "ranks probe together, so not while each of them stages"

    @property
    def is_staging(self) -> bool:
        return False  # they arrive whole

    @property
    def has_more(self) -> bool:
        return bool(self._left)

    def arrive(self, version: int) -> None:
        """From another thread: `version` is staged, whatever step it is."""
        self._left.append((0, version))
        self._wake.set()

    def poll(self) -> bool:
        self._wake.clear()
        self._step += 1
        has_news = False
        while self._left and self._left[0][0] <= self._step:
            _, version = self._left.popleft()
            if version is None or version > self.version:
                self.pending_version, has_news = version, True
        return has_news

    def commit(self) -> Swap | None:
        version, self.pending_version = self.pending_version, None
        if version is None:
            return None
        model = version_model(version)
        if self._rank.world == 1:
            flat = whole_bytes(model, self._precision)
        else:
            flat = bytes_of_part(model, self._precision, part_of(self._rank, self._stages))
        previous = self._parameters.flat
        self._parameters.prepare(flat)
        self._parameters.rebind(flat)
        expected = probe_logprobs(model, PROBE) + (9.0 if self.spoils else 0.0)
        error = float(np.abs(self._probe(PROBE) - expected).mean())
        self.probe_errors.append(error)
        if not error <= self._tolerance:
            self._parameters.rebind(previous)
            raise WeightSyncError("the probe disagrees", got=error)
        self.version = version
        return Swap(version, transfer_s=0.5, pause_s=0.25, probe_error=error)

    def wait_fds(self) -> list[int]:
        return [self._wake.fileno()]

    def close(self) -> None:
        self._wake.close()


# Channels


def channels(world: int) -> list[ChannelSpec]:
    """Those that a pipeline has between the ranks of a replica."""
    others = [rank_name("generator-0", rank) for rank in range(1, world)]
    return [
        *(ChannelSpec(f"relay/{o}", Kind.BROADCAST, "generator-0.relay", f"{o}.commands") for o in others),
        *(ChannelSpec(f"staged/{o}", Kind.GATHER, f"{o}.staged", "generator-0.staged") for o in others),
    ]


class Mailbox(Port):
    """A port that another thread may put to, and that can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.wake = WakeUp()

    def put(self, message: Message) -> None:
        super().put(message)
        self.wake.set()

    def get_nowait(self) -> Message | None:
        self.wake.clear()
        return super().get_nowait()


class Late:
    """A port whose messages are there only some steps after they have arrived; `tick` counts steps."""

    def __init__(self, inner: Any, late: Sequence[int]) -> None:
        self._inner, self._late = inner, deque(late)
        self._held: deque[tuple[int, Message]] = deque()
        self._step = 0

    @property
    def is_holding(self) -> bool:
        return bool(self._held)

    def tick(self) -> None:
        self._step += 1
        while (message := self._inner.get_nowait()) is not None:
            self._held.append((self._step + (self._late.popleft() if self._late else 0), message))

    def get_nowait(self) -> Message | None:
        return self._held.popleft()[1] if self._held and self._held[0][0] <= self._step else None


class Member:
    """One rank's executor with its ports."""

    def __init__(self, rank: Rank, case: Case, folder: str, transport: str) -> None:
        self.rank, self.case = rank, case
        generator = {"tensor_parallel": rank.world, "max_new_tokens": 24, "num_slots": 8}
        settings = {
            "prompts": {"tasks": [{"name": "chain_sum"}], "max_prompt_tokens": 40},
            "model": {"path": folder},
            "completions_per_group": 4,
            "host": "process",
            **case.settings,
            "generator": generator | case.settings.get("generator", {}),
        }
        self.config = RunConfig.model_validate(settings)
        self.name = rank_name("generator-0", rank.rank)
        self.ports = connect(channels(rank.world), self.name, Path(transport), 0) if rank.world > 1 else None
        stages = self.config.generator.pipeline_parallel
        self.versions = Versions(case.staged[rank.rank], rank, self.config.generator.precision, stages)
        self.arriving = deque(case.commands)
        self.clock = VirtualClock(100.0 * rank.rank)  # machines need not agree on the time
        self.outputs: dict[str, Any] = {"completions": Port(), "events": Port()}
        self.commands: Any = Mailbox()
        inputs: dict[str, Any] = {}
        if self.ports is not None:
            self.outputs |= self.ports.outputs
            inputs = dict(self.ports.inputs)
            if rank.rank:
                self.commands = Late(inputs["commands"], case.late[rank.rank])
        self.generator = Generator(config=self.config)
        group = RankGroup.over(rank.group) if rank.world > 1 else RankGroup.alone()
        self.generator.init(
            Context(
                name=self.name,
                run_dir=Path(folder),
                inputs=inputs | {"commands": self.commands},
                outputs=self.outputs,
                spans=NoSpans(),
                clock=self.clock,
                subscriber=self.versions,
                group=group,
            )
        )
        self.outcome = Outcome(probe_errors=self.versions.probe_errors)
        self.num_steps = self.num_waits = 0
        self._watch()

    def _watch(self) -> None:
        """Note what is agreed upon and committed."""
        together, engine = self.generator.together, self.generator.engine
        agree, set_version = together.agree, engine.set_version

        def noted(*args: Any) -> Agreement | None:
            agreed = agree(*args)
            if agreed is not None:
                self.outcome.trace.append((agreed.commands, agreed.version, together.clock.now_s()))
            return agreed

        def noted_version(version: int, **options: Any) -> None:
            self.outcome.committed.append((version, len(self.outcome.trace) - 1))
            set_version(version, **options)

        together.agree = noted  # type: ignore[method-assign]
        engine.set_version = noted_version  # type: ignore[method-assign]

    def step(self) -> bool:
        if isinstance(self.commands, Late):
            self.commands.tick()
        elif self.arriving and self.arriving[0][0] <= self.num_steps:
            self.commands.put(self.arriving.popleft()[1])
        self.clock.advance(self.case.seconds_per_step)
        self.num_steps += 1
        return self.generator.step()

    @property
    def is_expecting(self) -> bool:
        """Whether something is to happen at a later step, so that steps must go on."""
        return (
            bool(self.arriving)
            or self.versions.has_more
            or (isinstance(self.commands, Late) and self.commands.is_holding)
        )

    def sleep(self) -> None:
        assert self.ports is not None
        self.num_waits += 1
        fds = self.generator.wait_fds() + ([self.commands.wake.fileno()] if self.rank.rank == 0 else [])
        assert wait(self.ports.inputs.values(), self.ports.outputs.values(), fds, 20.0), "nobody wakes this rank"

    def run(self) -> Outcome:
        """Until every completion is there and nothing more arrives; rank 0 then stops all."""
        is_told = False
        while not self.generator.is_finished:
            has_worked = self.step()
            num_sent = len(self.outputs["completions"].messages)
            if not self.rank.rank and not is_told and num_sent == self.case.num_completions and not self.is_expecting:
                is_told = True
                self.commands.put(Stop())
            elif not has_worked and not self.is_expecting and not self.generator.is_finished:
                self.sleep()
        return self.collected()

    def collected(self) -> Outcome:
        for message in self.outputs["completions"].messages:
            first = message.ordinal if message.purpose == "train" else message.eval_id
            second = message.sample if message.purpose == "train" else message.ordinal
            assert (message.purpose, first, second) not in self.outcome.completions
            self.outcome.completions[message.purpose, first, second] = message
        self.outcome.events = list(self.outputs["events"].messages)
        return self.outcome

    def close(self) -> None:
        self.generator.close()
        self.versions.close()
        if self.ports is not None:
            for outbox in self.ports.outputs.values():
                outbox.flush(5.0)  # as a host does: nobody may be left with what no one takes
            self.ports.close()


# Jobs


def replica(rank: Rank, case: Case, folder: str, transport: str) -> Outcome:
    with closing(Member(rank, case, folder, transport)) as member:
        return member.run()


def follow(rank: Rank, case: Case, folder: str, trace: Trace) -> Outcome:
    """One executor over the whole model, which is told at each step what the replica has agreed upon."""
    with closing(Member(rank, Case(case.settings, ()), folder, "")) as member:
        for commands, version, time_s in trace:
            for command in commands:
                if not isinstance(command, Wake):
                    member.commands.put(command)
            member.versions.pending_version = version
            member.clock.advance(time_s - member.clock.now_s())
            member.step()
        return member.collected()


@dataclass
class Slept:
    """A rank that had work, then none, then work again: steps, rounds and versions in between; when it began again."""

    num_steps: int
    num_rounds: int
    committed: list[tuple[int, int]]
    began_s: float
    put_s: float  # rank 0's
    tokens: dict[tuple[str, int, int], list[tuple[int, int]]]  # version spans of rank 0's completions


def sleep(rank: Rank, folder: str, transport: str, idle_s: float, staged_s: list[float | None]) -> Slept:
    """Work, `idle_s` without any, when each rank stages version 1 after `staged_s` (None: never), and work again."""
    with closing(Member(rank, Case({}, ((0, admit(0)),)), folder, transport)) as member:
        while not (member.outcome.trace and member.generator.engine.is_idle):
            if not member.step():
                member.sleep()
        while member.step():
            pass
        after = staged_s[rank.rank]
        timers = [] if after is None else [threading.Timer(after, member.versions.arrive, [1])]
        put_s: list[float] = []

        def begin() -> None:
            put_s.append(time.monotonic())
            member.commands.put(admit(1))

        if rank.rank == 0:
            timers.append(threading.Timer(idle_s, begin))
        for timer in timers:
            timer.start()
        num_steps, num_rounds = member.num_steps, len(member.outcome.trace)

        def has_begun() -> bool:
            obeyed = [command for commands, *_ in member.outcome.trace for command in commands]
            return any(isinstance(command, Admit) and command.ordinal == 1 for command in obeyed)

        while not has_begun():
            if not member.step():
                member.sleep()
        began_s = time.monotonic()
        slept = Slept(member.num_steps - num_steps, len(member.outcome.trace) - num_rounds, [], began_s, 0.0, {})
        slept.committed = list(member.outcome.committed)
        while not member.generator.engine.is_idle:
            member.step()
        if rank.rank == 0:
            slept.put_s = put_s[0]
            member.commands.put(Stop())
        while not member.generator.is_finished:
            if not member.step() and not member.generator.is_finished:
                member.sleep()
        for timer in timers:
            timer.join()
        for key, completion in member.collected().completions.items():
            slept.tokens[key] = [(span.start, span.version) for span in completion.segments[0].version_spans]
        return slept


def end(rank: Rank, folder: str, transport: str, how: str, stages: int = 1) -> tuple[str, float, int]:
    """The last rank dies or stays away after 5 rounds; or differs in its noise or its commands, or all in their probes.

    (the error that the others end with, seconds it took, the version the engine has then)
    """
    is_last = rank.rank == rank.world - 1
    generator = {"tensor_parallel": rank.world // stages, "pipeline_parallel": stages}
    staged = (((3, 1),),) * 4 if how == "probe" else ((),) * 4
    case = Case({"generator": generator}, ((0, admit(0, 4)), (1, admit(1, 4))), staged=staged)
    member = Member(rank, case, folder, transport)
    member.versions.spoils = True
    dist.monitored_barrier(rank.group, timedelta(seconds=60))  # what each loads first has no place in the rounds' time
    if is_last and how == "noise":
        member.generator.engine._seed += 1  # type: ignore[attr-defined]
    if is_last and how == "commands":
        take = member.commands.get_nowait

        def take_less() -> Message | None:
            found = take()
            return admit(1, 3) if isinstance(found, Admit) and found.ordinal == 1 else found

        member.commands.get_nowait = take_less
    started = time.monotonic()
    try:
        while True:
            if is_last and len(member.outcome.trace) == 5:
                if how == "dies":
                    os._exit(1)
                if how == "hangs":
                    return "", 0.0, 0
            if member.generator.together.num_rounds <= 5:
                started = time.monotonic()
            if not member.step() and not member.is_expecting:
                member.sleep()
    except (RankError, WeightSyncError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - started, member.generator.engine.version


def served(
    rank: Rank, config: TransformerConfig, precision: Any, in_place: bool, text: np.ndarray
) -> list[tuple[bool, np.ndarray]]:
    """Of the weights a rank begins with, of a version prepared, exchanged, and of the exchange undone: whether its
    bytes are its part of the whole model's, and the logprobs of `text`."""
    first, second = whole_model(config, 0), whole_model(config, 1)
    part = TensorParallel.over(rank.group, config, fixed_order=True).new_model()
    load_shard(part, logical_tensors(first))
    plain = TensorParallel(config, rank.rank, rank.world).new_model()
    weights = ServedWeights(part, precision, in_place=in_place, group=RankGroup.over(rank.group))
    previous, new = weights.flat, bytes_of_part(second, precision, plain)
    seen = [(torch.equal(previous, bytes_of_part(first, precision, plain)), probe_logprobs(part, text))]
    weights.prepare(new)
    seen.append((weights.flat is previous, probe_logprobs(weights.prepared_model, text)))
    weights.rebind(new)
    seen.append((weights.flat is new, probe_logprobs(part, text)))
    weights.rebind(previous)
    seen.append((weights.flat is previous, probe_logprobs(part, text)))
    return seen


def fresh(rank: Rank, config: ModelConfig) -> bool:
    """Whether the rank's part of a fresh model has the numbers of the whole one."""
    tokenizer = char_tokenizer(ALPHABET)
    division = Division(tensor_parallel=RankGroup.over(rank.group))
    part = build_sharded_policy(config, division, seed=3, tokenizer=tokenizer)
    whole, _ = build_policy(config, seed=3, tokenizer=tokenizer)
    expected = TensorParallel(whole.config, rank.rank, rank.world).new_model()
    load_shard(expected, logical_tensors(whole))
    return all(torch.equal(a, b) for a, b in zip(part.parameters(), expected.parameters(), strict=True))


def prompt(number: int) -> Prompt:
    length = 3 + 7 * number % 29
    tokens = np.random.default_rng(number).integers(2, CONFIG.vocab_size, length).astype(np.int32)
    return Prompt(prompt_id=str(number), text="x" * length, tokens=tokens, task="chain_sum")


def admit(ordinal: int, num_samples: int = 2) -> Admit:
    return Admit(ordinal=ordinal, replica=0, prompt=prompt(ordinal), num_samples=num_samples)
