"""The environments' node: turns in, observations out. It owns the episodes; the generators own their tokens' keys."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from pathlib import Path

from slipstream.core.config import RunConfig
from slipstream.core.errors import ChannelClosed
from slipstream.core.executor import Context, Executor, Sender
from slipstream.core.saved import SUFFIX, Saver, rollouts_dir
from slipstream.core.service_messages import Checkpoint, Counters, Noted, Ready
from slipstream.core.turn_messages import Observation, TurnSampled
from slipstream.core.types import EpisodeRecord, Stop
from slipstream.environments.acting import carry_out, take_answer
from slipstream.environments.answers import Lost, Said
from slipstream.environments.build import build_chat, build_chats, keeps_states, make_pool, tools_of
from slipstream.environments.checks import Given
from slipstream.environments.episodes import Act, EpisodeTable, Open, Sources
from slipstream.environments.known_episode import EpisodeLimits
from slipstream.environments.pool import EpisodePool
from slipstream.environments.protocol import MAX_STATE_BYTES
from slipstream.models.build import build_tokenizer, max_positions

_MAX_TAKEN = 256  # turns taken in one step; beyond, the channel holds them back
_COUNTERS_EVERY_S = 1.0
_MAX_NOTES = 8  # failures that are shown at once, each the first of its kind
_FORK = "fork"
_FORKED = (
    "an agent's request does not go on where its episode ends: it is a fork, a branch of its own, whose whole context "
    "is read again and counts for environment.max_episode_tokens. Agents that summarise or change what was said, call "
    "a sub-agent or ask twice do so; where none should, compare the transcripts of an episode. episode/forks counts "
    "them; this is said once"
)
_READ_FIRST = (
    ". Functions, judges and models of [rewards] read the first branch only: leave them out and let the agent return "
    "the reward, or give a function the parameter `branches`"
)
_CUT = (
    "an agent was refused a turn by environment.max_turns, max_episode_tokens or episode_limit_s, and its episode ends "
    "without a reward of its own"
)
_STATE = "state"


class Environments(Executor):
    """Lets environments answer the policy's turns, and agents ask for them; never hangs on one, and loses no episode.

    Consumes: `TurnSampled` (turns), `Checkpoint` (commands), for which it saves open episodes that can be restored.
    Produces: `Observation` (observations), to the replica that samples the episode.
    Waits for: turns, and for environments, each at most `environment.step_limit_s`. `given` are environments and tools
    that were handed over from Python; they run in this process. Stop: drops what is open, which belongs to no step.
    """

    inputs = ("turns",)
    outputs = ("observations",)

    def __init__(self, *, config: RunConfig, given: Given | None = None) -> None:
        self._config, self._given = config, given
        self._pool: EpisodePool | None = None
        self._noted: set[str] = set()
        self._counted_s = 0.0
        self._saver = Saver()
        self._is_finished = False

    def init(self, context: Context) -> None:
        """Start the workers, and wait until they have imported what they need."""
        self._context, config = context, self._config
        tokenizer = build_tokenizer(config.model)
        limits = EpisodeLimits.of(config, config.longest_sequence(max_positions(config)), len(tokenizer))
        self._outbox = ReplicaOutbox(context.outputs["observations"])
        self._pool = make_pool(config, self._given, clock=context.clock, private=[str(context.run_dir)])
        self._pool.wait_ready()
        chat = build_chat(config, tokenizer, tools_of(self._pool))
        self._episodes = EpisodeTable(
            limits,
            chat,
            Sources.of(config),
            chats=build_chats(config, tokenizer),
            keeps_states=keeps_states(config),
        )
        self._label_idle_time()
        context.outputs["events"].put(Ready(executor=context.name))

    def step(self) -> bool:
        """Take turns, hand them to their environments, and pass on what these answered."""
        assert self._pool is not None
        while (command := self._context.inputs["commands"].get_nowait()) is not None:
            if isinstance(command, Stop):
                self._count(is_last=True)
                self._is_finished = True
                return True
            if isinstance(command, Checkpoint):
                self.save_checkpoint(command)
        with self._context.spans.span("receive"):
            num_taken = self._take(self._pool)
        with self._context.spans.span("step"), self._context.together():
            num_answered = self._answer(self._pool)
        with self._context.spans.span("send"), self._context.together():
            has_sent = self._outbox.send()
        self._count()
        self._label_idle_time()
        return has_sent or num_taken + num_answered > 0

    @property
    def is_finished(self) -> bool:
        return self._is_finished

    def wait_fds(self) -> list[int]:
        return [] if self._pool is None else self._pool.fds()

    def wait_s(self) -> float | None:
        deadline_s = None if self._pool is None else self._pool.next_deadline_s()
        return None if deadline_s is None else max(0.0, deadline_s - self._context.clock.now_s())

    def rejoined(self, executor: str) -> None:
        """A replica restarted: it opens its episodes anew, and goes on from what is known of them here."""
        self._outbox.rejoined(executor)

    def save_checkpoint(self, command: Checkpoint) -> None:
        """Save the open episodes of groups that the cut owes, as far as they can be restored; a thread writes."""
        path = rollouts_dir(Path(command.path)) / f"{self._context.name}{SUFFIX}"
        self._saver.save(path, self._episodes.partials(set(command.schedule["readmit"])), cut=command.cut)

    def close(self) -> None:
        self._saver.close()
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _take(self, pool: EpisodePool) -> int:
        num_taken = 0
        while num_taken < _MAX_TAKEN and (message := self._context.inputs["turns"].get_nowait()) is not None:
            assert isinstance(message, TurnSampled), "the port is typed"
            num_taken += 1
            self._do(self._episodes.sampled(message, self._context.clock.now_s()), pool)
        return num_taken

    def _answer(self, pool: EpisodePool) -> int:
        num_answers = 0
        for answer in pool.answers():
            num_answers += 1
            if isinstance(answer, Said):
                self._note_state(answer)
            acts = take_answer(self._episodes, answer, self._context.clock.now_s())
            if isinstance(answer, Lost):
                self._note_failure(answer, acts)
            self._do(acts, pool)
        return num_answers

    def _do(self, acts: Iterable[Act], pool: EpisodePool) -> None:
        for observation in carry_out(acts, pool):
            if observation.branch > 0:
                self._note(_FORK, _FORKED + _READ_FIRST if self._config.rewards.weighted else _FORKED)
            self._outbox.add(observation)

    def _label_idle_time(self) -> None:
        self._context.spans.set_idle_state("step" if self._pool is not None and self._pool.num_calls else "wait_turns")

    def _note_failure(self, lost: Lost, acts: Iterable[Act]) -> None:
        """Show the first failure of its kind at once; one that is for good is shown where it is scored."""
        kind = lost.reason.split(": ", 1)[0]
        if lost.is_guilty is False or len(self._noted - {_FORK, _STATE}) >= _MAX_NOTES:
            return
        for act in acts:
            match act:
                case Open():
                    told = f"an environment failed, and its episode begins again: {lost.reason}"
                    self._note(f"failure: {kind}", told)
                case Observation(record=EpisodeRecord(failure=None)):
                    self._note(f"cut: {kind}", f"{_CUT}: {lost.reason}")

    def _note_state(self, said: Said) -> None:
        if said.state is None and said.state_bytes:
            self._note(
                _STATE,
                f"the state of an environment has {said.state_bytes:,} bytes, and at most {MAX_STATE_BYTES:,} are kept "
                "by a checkpoint: after a resume such episodes begin again",
            )

    def _note(self, kind: str, text: str) -> None:
        """Show `text` to people, if it is the first of its kind."""
        if kind not in self._noted:
            self._noted.add(kind)
            self._context.outputs["events"].put(Noted(executor=self._context.name, text=text[:1000]))

    def _count(self, *, is_last: bool = False) -> None:
        now_s = self._context.clock.now_s()
        if is_last or now_s - self._counted_s >= _COUNTERS_EVERY_S:
            self._counted_s = now_s
            values = {name: float(count) for name, count in self._episodes.counts.items()}
            values |= {"open": float(len(self._episodes)), "environment_s": self._episodes.environment_s}
            self._context.outputs["events"].put(Counters(executor=self._context.name, values=values))


class ReplicaOutbox:
    """Observations on their way, in order by replica: one that is full or gone holds up no other."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._unsent: dict[int, deque[Observation]] = {}

    def add(self, observation: Observation) -> None:
        self._unsent.setdefault(observation.replica, deque()).append(observation)
        self._send(observation.replica)

    def send(self) -> bool:
        """Send what has not been sent; whether anything was."""
        sent = [self._send(replica) for replica in list(self._unsent)]
        return any(sent)

    def rejoined(self, executor: str) -> None:
        """Drop what was meant for the process before."""
        prefix, _, number = executor.partition("-")
        if prefix == "generator" and number.isdigit():
            self._unsent.pop(int(number), None)

    def _send(self, replica: int) -> bool:
        waiting, has_sent = self._unsent.get(replica, deque()), False
        while waiting and self._sender.has_room_for(waiting[0]):
            try:
                self._sender.put(waiting[0])
            except ChannelClosed:  # the replica is lost, and what it was to hear with it
                waiting.clear()
                break
            waiting.popleft()
            has_sent = True
        return has_sent
