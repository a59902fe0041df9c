"""The generator node: admitted prompts in, completions out, weights swapped between two decode steps.

A replica of several ranks (`generator.pipeline_parallel` x `tensor_parallel`) is as many of these executors, each over
its part of the model. They obey, swap, evaluate and decode in lock step (`lockstep.py`); rank 0 alone speaks with the
other nodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
import torch

from slipstream.core.config import RunConfig
from slipstream.core.executor import Context, Executor
from slipstream.core.peer_messages import EnvironmentsLost, Wake
from slipstream.core.saved import SUFFIX, Saver, rollouts_dir, those_that_fit
from slipstream.core.service_messages import (
    Admit,
    Checkpoint,
    Counters,
    Evaluate,
    Evaluating,
    Ready,
    Settled,
    Waiting,
    counters_every_s,
)
from slipstream.core.turn_messages import Observation
from slipstream.core.types import Message, Stop
from slipstream.core.unfinished_messages import HandedOver, PartialEpisode, Unfinished
from slipstream.generator.backend import Backend
from slipstream.generator.backends import BACKENDS, Setting
from slipstream.generator.completions import TRAIN_STREAM, request_of
from slipstream.generator.episodes import ENVIRONMENTS, EndedEpisode, Episodes, ended_before
from slipstream.generator.evaluations import EvalJobs
from slipstream.generator.lockstep import Agreement, LockStep
from slipstream.generator.outgoing import Ended, Outgoing
from slipstream.generator.partials import Continued, partial_of, partial_of_finished
from slipstream.generator.requests import Finished, GenerationEngine, Labelled, Request
from slipstream.generator.version_swaps import VersionSwaps
from slipstream.models.build import build_tokenizer, first_shape, stop_token_ids
from slipstream.observe.waste import RE_PREFILLED


class Generator(Executor):
    """Continuous batching over fixed slots; never waits for the trainer except where the schedule admits nothing.

    Consumes: `Admit`, `Checkpoint`, `Evaluate`, `Observation`, `Settled`, `Waiting`, `Stop` (commands), versions (its
    WEIGHTS channel). Produces: `Completion` (completions), `TurnSampled` (turns), `Swapped`, `CompletionsFinished`,
    `Evaluating` (events). Waits for: an admission, an observation or a version; with work, on several ranks, also for
    the others at the beginning of a step and in every layer.
    Ends when: told to stop; what is in its slots then belongs to no step and is dropped.
    """

    outputs = ("completions",)
    """With an environment also `turns`. On several ranks rank 0 also has the output `relay` to the others' `commands`,
    and they have the output `staged` to its input of that name."""

    def __init__(self, *, config: RunConfig, replica: int = 0) -> None:
        self.config = config
        self.replica = replica
        self._ends = ExitStack()
        self._is_stopped = False

    def init(self, context: Context) -> None:
        self.context = context
        config = self.config
        torch.set_num_threads(context.num_threads)
        self.tokenizer = build_tokenizer(config.model)
        self.stop_ids = stop_token_ids(self.tokenizer, config.generator, first_shape(config))
        self.spans = Labelled(context.spans)
        self.together = LockStep(context)
        self.backend = self._build_backend()
        self._ends.callback(self.backend.close)
        self.engine = self.backend.engine
        assert context.subscriber is not None, "a generator needs a WEIGHTS channel"
        self.weights = context.subscriber
        self.weights.open(
            self.backend.weights,
            self.backend.probe,
            config.max_probe_error,
            is_threaded=config.host == "process",
            probes_prepared=self.backend.probes_prepared,
            spans=context.spans,
        )
        self.outgoing = Outgoing(
            config, context, replica=self.replica, tokenizer=self.tokenizer, stop_ids=self.stop_ids
        )
        self.episodes = self._new_episodes() if config.environment.is_set else None
        self.continued = Continued(config, max_len=self.backend.max_len, clock=self.together.clock)
        self.saver = Saver()
        self._ends.callback(self.saver.close)
        self.evaluations = EvalJobs(self.backend, config.generator, context.spans, self.episodes)
        self.evaluations.prepare()
        self.swaps = VersionSwaps(
            config,
            context,
            self.weights,
            self.backend,
            self.episodes,
            self.spans,
            replica=self.replica,
            tells=self.together.is_leader,
        )
        self.counted_s, self.counted_re_prefilled = context.clock.now_s(), -1.0
        self.waits_for = "trainer"
        context.spans.set_idle_state(self._idle_state)
        context.outputs["events"].put(Ready(executor=context.name))

    def _build_backend(self) -> Backend:
        clock = self.together.clock
        here = Setting(self.config, self.context, self.replica, self.tokenizer, self.stop_ids, self.spans, clock)
        return BACKENDS[self.config.generator.engine](here)

    def _new_episodes(self) -> Episodes:
        sender = self.context.outputs["turns"] if self.together.is_leader else None
        numbers = itertools.count()

        def new_opening() -> int:
            """Number openings by the time that all ranks agree upon: those of a process before this one are older."""
            return int(self.together.clock.now_s() * 1e6) << 16 | next(numbers) & 0xFFFF

        return Episodes(
            sender,
            replica=self.replica,
            release=self._release,
            may_follow=self._may_follow,
            new_opening=new_opening,
        )

    def _may_follow(self, versions: Collection[int]) -> bool:
        """Whether an episode may go on here whose turns another replica has sampled from `versions`.

        Versions ascend in an episode. Where it has only one, this replica may hold another.
        """
        version = self.engine.version
        if self.config.mixes_turns:
            return max(versions, default=version) <= version
        return all(one == version for one in versions)

    def _release(self, request: Request) -> None:
        """Free what is kept for the next turn of an episode."""
        if request.stream == TRAIN_STREAM or self.evaluations.engine is not None:
            self._engine_of(request).release(request.session)

    def _engine_of(self, request: Request) -> GenerationEngine:
        engine = self.engine if request.stream == TRAIN_STREAM else self.evaluations.engine
        assert engine is not None, "an evaluation's episodes begin with its engine"
        return engine

    @property
    def is_finished(self) -> bool:
        return self._is_stopped and self.together.has_all_reports

    def wait_fds(self) -> list[int]:
        return [*self.weights.wait_fds(), *self.backend.wait_fds()]

    def wait_s(self) -> float | None:
        return self.backend.wait_s()

    def rejoined(self, executor: str) -> None:
        """The process of rewards or environments restarted: it is told again what is open."""
        self.outgoing.rejoined(executor)
        if executor == ENVIRONMENTS:
            self.together.call(EnvironmentsLost())

    def close(self) -> None:
        self._ends.close()

    def step(self) -> bool:
        """Take messages, swap if a version is staged, then one decode step of evaluation and one of training."""
        spans = self.context.spans
        with spans.span("receive"):
            has_news = self.together.receive()
            if self._is_stopped:
                return has_news
            has_news = self.weights.poll() or has_news
        has_news = self._send() or has_news
        agreed = self._agree()
        if agreed is None:
            return has_news
        for command in agreed.commands:
            self._obey(command)
        has_swapped = self.swaps.take(agreed.version)
        has_evaluated = self._evaluate()
        has_decoded = self._decode()
        self._send()
        has_worked = bool(agreed.commands) or has_swapped or has_evaluated or has_decoded
        has_more = self.together.rest(has_worked=has_worked)
        self._count()
        spans.set_idle_state(self._idle_state)
        return has_news or has_more

    def _send(self) -> bool:
        """Send completions, now and then, and turns, at once; whether any was sent. What cannot be sent is kept."""
        is_due = self.outgoing.is_due(more_comes=self.backend.has_work())
        has_turns = self.episodes is not None and self.episodes.num_unsent > 0
        if not is_due and not has_turns:
            return False
        with self.context.spans.span("send"), self.context.together():
            has_sent = is_due and self.outgoing.send()
            return (self.episodes is not None and self.episodes.send()) or has_sent

    @property
    def _idle_state(self) -> str:
        """The state of time without a step: work in a process or thread beside this one, else what is waited for."""
        beside = self.backend.working_state
        is_working = beside is not None or self.backend.has_work()
        environments_think = self.episodes is not None and len(self.episodes) > 0 and not is_working
        working = self.spans.state or beside
        if working is not None and not environments_think:
            return working
        if self.weights.is_staging:
            return "stage"
        return "wait_environment" if environments_think else f"wait_{self.waits_for}"

    def _agree(self) -> Agreement | None:
        """Return what all ranks do now; None while they sleep."""
        staged = self.weights.pending_version
        if self.context.group.world == 1:
            return self.together.agree(staged, self.engine)
        with self.context.spans.span("wait_ranks"):
            return self.together.agree(staged, self.engine)

    def _obey(self, message: Message) -> None:
        match message:
            case Admit():
                self._admit(message)
            case Checkpoint():
                self.save_checkpoint(message)
            case Evaluate():
                version = self.evaluations.add(message)
                if self.together.is_leader:
                    self.context.outputs["events"].put(Evaluating(eval_id=message.eval_id, version=version))
            case Observation():
                self._observe(message)
            case Settled():
                self.outgoing.settle(message)
            case Waiting():
                self.waits_for = message.reason
            case EnvironmentsLost():
                assert self.episodes is not None, "there are environments"
                self.episodes.begin_again()
            case Wake():
                pass  # it has done what it is for: this step
            case Stop():
                self._count(is_last=True)
                self._is_stopped = True
            case _:
                raise TypeError(f"a generator does not take {type(message).__name__}")

    def _admit(self, message: Admit) -> None:
        """Sample the group, or what is not there of it yet."""
        self.outgoing.admit(message)
        requests = [self._request(message, sample) for sample in range(message.num_samples)]
        if self.episodes is not None:
            with self.context.together():
                for request in requests:
                    self._begin_episode(self.episodes, request, message)
            return
        requests, finished = self.continued.split(requests, message.partials, self.engine.version)
        self.engine.submit(requests)
        self._deliver(finished)

    def _begin_episode(self, episodes: Episodes, request: Request, message: Admit) -> None:
        """Open an episode, or pass it on if it was over at the checkpoint. At staleness 0 all of it is sampled here."""
        may_continue = message.is_again and self.config.max_staleness > 0
        partials = message.partials if may_continue else ()
        partial = self.continued.episode(request, partials, self.engine.version)
        if partial is not None and partial.state is None:
            self._pass_on([ended_before(request, message.prompt, partial)])
        else:
            episodes.begin(request, message.prompt, may_continue=may_continue, partial=partial)

    def _observe(self, message: Observation) -> None:
        """Sample the next turn of an episode, or pass it on if it is over."""
        assert self.episodes is not None, "observations are of episodes"
        following = self.episodes.observe(message)
        if isinstance(following, Request):
            self._engine_of(following).submit([following])
        elif following is not None:
            self._pass_on([following])

    def save_checkpoint(self, command: Checkpoint) -> None:
        """Save what there is here of the groups that the cut owes, while decoding goes on: a thread writes.

        Versions of a later cut may have come into it by now; the reader of the file leaves out what they have sampled.
        """
        if self.outgoing.unsettled is None:
            return  # rank 0 has it all
        path = rollouts_dir(Path(command.path)) / f"{self.context.name}{SUFFIX}"
        self.saver.save(path, self._partials(set(command.schedule["readmit"])), cut=command.cut)

    def _partials(self, owed: Collection[int]) -> list[Unfinished]:
        """Return what there is here of the groups `owed`; rank 0 has it all."""
        assert self.outgoing.unsettled is not None, "rank 0"
        finished = self.outgoing.unsettled.of_groups(owed)
        partials = [partial_of_finished(one, self.outgoing.rows[one.ordinal]) for one in finished]
        if self.episodes is None:  # of an open episode the environments have what can be gone on with
            begun = [r for r in self.engine.begun() if r.stream == TRAIN_STREAM and r.ordinal in owed]
            partials += map(partial_of, begun)
        return partials

    def leave(self) -> None:
        """Hand over all that is begun here, and end. Several ranks would have to agree on a step: they end as lost."""
        self.outgoing.send()
        if self.context.group.world == 1:
            groups: dict[int, list[Unfinished]] = {}
            for one in self._partials(self.outgoing.rows):
                groups.setdefault(one.ordinal, []).append(self._handed_over(one))
            for ordinal, partials in groups.items():
                handed_over = HandedOver(ordinal=ordinal, partials=those_that_fit(partials))
                self.context.outputs["events"].put(handed_over)
            self._count(is_last=True)
        self._is_stopped = True

    def _handed_over(self, one: Unfinished) -> Unfinished:
        """Count the tokens that an unfinished completion got here, and mark it as this replica's."""
        if isinstance(one, PartialEpisode) or one.finish_reason is not None:
            return one  # its tokens were counted at its end
        num_restored, _ = self.continued.take(one.ordinal, one.sample)
        self.outgoing.generated_tokens += len(one.segment.tokens) - num_restored
        return msgspec.structs.replace(one, handed_over_by=self.replica)

    def _request(self, message: Admit, sample: int) -> Request:
        """Return the request for one sample; ReMax's baseline, behind the group's own completions, is greedy."""
        is_baseline = sample >= self.config.completions_per_group
        return request_of(
            self.config.generator,
            message.prompt,
            ordinal=message.ordinal,
            sample=sample,
            max_len=self.backend.max_len,
            temperature=0.0 if is_baseline else self.config.generator.temperature,
            is_again=message.is_again,
        )

    # Decoding

    def _decode(self) -> bool:
        if not self.backend.has_work():
            return False
        self.swaps.count_step()
        self._deliver(self.engine.step())
        return True

    def _deliver(self, finished: list[Finished]) -> None:
        """Pass on what was decoded: turns to their environments, all else to who scores it."""
        self.together.note(finished)
        if not finished:
            return
        if self.episodes is None:
            self._pass_on(finished)
            return
        with self.context.spans.span("send"), self.context.together():
            for item in finished:
                is_training = item.request.stream == TRAIN_STREAM
                if self.episodes.finished(item, -1 if is_training else self.evaluations.eval_id):
                    self._engine_of(item.request).let_go_on(item.request.session)

    def _pass_on(self, ended: Sequence[Ended]) -> None:
        with self.context.spans.span("send"), self.context.together():
            told = []
            for one in ended:
                if self.evaluations.is_of(one):
                    self.outgoing.pass_on_answer(one, *self.evaluations.take(one))
                else:
                    if isinstance(one, EndedEpisode):
                        num_restored, by = one.record.num_restored, -1
                    else:
                        num_restored, by = self.continued.take(one.ordinal, one.sample)
                    told.append(self.outgoing.pass_on(one, num_restored=num_restored, handed_over_by=by))
            self.outgoing.tell(told)

    # Evaluation

    def _evaluate(self) -> bool:
        if (finished := self.evaluations.step()) is not None:
            self._deliver(finished)
        return finished is not None

    def _count(self, *, is_last: bool = False) -> None:
        now_s = self.context.clock.now_s()
        if is_last or now_s - self.counted_s >= counters_every_s(self.config.generator.replicas):
            self.counted_s = now_s
            values = {
                "generated_tokens": float(self.outgoing.generated_tokens),
                "live": float(self.engine.num_live),
                RE_PREFILLED: float(self.engine.num_re_prefilled),
            }
            if self.episodes is not None:
                values |= {name: float(count) for name, count in self.engine.session_counts.items()}
                values |= {"open_episodes": float(len(self.episodes))}
            if self.together.is_leader:  # all ranks do the same work, and counts of several are added
                self.context.outputs["events"].put(Counters(executor=self.context.name, values=values))
            if values[RE_PREFILLED] != self.counted_re_prefilled:
                self.counted_re_prefilled = values[RE_PREFILLED]
                self.context.spans.counter("tokens", **{RE_PREFILLED: values[RE_PREFILLED]})
