"""Episodes in any order of events, on both runners: every turn once, with its own text, and nothing held at the end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from drawn import drawn
from engine_kit import STOP, random_model
from episode_kit import Script, check_turn
from hypothesis import strategies as st

from slipstream.generator.engine import Engine
from slipstream.generator.paged_runner import PagedRunner
from slipstream.generator.requests import Finished, Request, Session
from slipstream.generator.runner import Runner
from slipstream.generator.slot_runner import SlotRunner

MODEL = random_model()
MAX_LEN = 48  # 3 pages
FEWEST_PAGES = 4
MOST_STEPS = 900
SEED = 7
SCRIPTS = [Script(i, 1 + 3 * i, (0, 5, 1)[: i % 4], max_new_tokens=4 + i % 3) for i in range(6)]
ACTIONS = st.one_of(
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("answer"), st.integers(1, 5)),
    st.tuples(st.just("preempt"), st.integers(1, 4)),
    st.tuples(st.just("move"), st.integers(1, 5)),
    st.tuples(st.sampled_from(["keep", "recompute", "recompute_if_older_than"]), st.integers(0, 2)),
    st.tuples(st.just("release"), st.integers(0, 5)),
    st.tuples(st.just("pause"), st.integers(0, 2)),
    st.tuples(st.just("swap between turns"), st.just(0)),
)


class Play:
    """The scripts on one engine after the other; `asked` are the requests that have not finished, by ordinal."""

    def __init__(self, begin: object) -> None:
        self.begin = begin
        self.engines: list[Engine] = [begin(3)]  # type: ignore[operator]
        self.turns: dict[int, list[Finished]] = {script.ordinal: [] for script in SCRIPTS}
        self.answers: list[Request] = [script.request([]) for script in SCRIPTS]
        self.asked: dict[int, Request] = {}
        self.most_tokens: int | None = None

    @property
    def engine(self) -> Engine:
        return self.engines[-1]

    def step(self) -> None:
        for finished in self.engine.step():
            request = self.asked.pop(finished.ordinal)
            assert finished.request.num_before == request.num_before
            turns = self.turns[finished.ordinal]
            turns.append(finished)
            script = SCRIPTS[finished.ordinal]
            if len(turns) <= len(script.observations):
                self.answers.append(replace(script.request(turns), goes_on=True))
            else:
                assert (0, finished.ordinal, 0) not in self.engine._parked, "its last turn does not park"
        assert self.engine.num_live + self.engine.num_waiting == len(self.asked)
        if self.most_tokens is not None:
            assert self.engine._parked.num_tokens <= self.most_tokens

    def answer(self, count: int) -> None:
        self.engine.submit(self.answers[:count])
        self.asked.update({request.ordinal: request for request in self.answers[:count]})
        del self.answers[:count]

    def swap_between_turns(self) -> None:
        """What has begun ends, however much of it waits for a row; nothing else begins until then."""
        self.engine.pause_admission(True, holds_turns=True)
        num_asked, num_begun = len(self.asked), self.engine.num_begun
        for _ in range(MOST_STEPS):
            if not self.engine.num_begun:
                break
            self.step()
        assert len(self.asked) == num_asked - num_begun
        assert not self.engine.has_work
        self.engine.set_version(self.engine.version + 1)
        self.engine.pause_admission(False)

    def move(self, num_rows: int) -> None:
        """Every turn that is asked for goes on in another engine; parked keys stay behind, to be released."""
        live = self.engine.export_live()
        self.asked |= {request.ordinal: request for request in live}
        begun = {request.ordinal for request in live}
        version = self.engine.version
        self.engines.append(self.begin(num_rows))  # type: ignore[operator]
        self.engine.set_version(version)
        self.engine.submit([replace(r, is_again=True) for o, r in self.asked.items() if o not in begun])
        self.engine.submit(live)

    def act(self, action: str, number: int) -> None:
        match action:
            case "step":
                for _ in range(number):
                    self.step()
            case "answer":
                self.answer(number)
            case "preempt":
                self.engine.preempt(number)
            case "move":
                self.move(number)
            case "release":  # an episode that goes on is prefilled again, that is all
                self.engine.release(Session(0, number, 0))
            case "pause":
                self.engine.pause_admission(number > 0, holds_turns=number == 2)
            case "swap between turns":
                self.swap_between_turns()
            case _:  # the weights stay, so that the oracle holds
                self.engine.set_version(self.engine.version + 1, kv_on_update=action, max_kv_age=number)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_paged", [False, True], ids=["slots", "pages"])
@drawn(
    3,
    100,
    actions=st.lists(ACTIONS, max_size=50),
    num_pages=st.integers(FEWEST_PAGES, 12),
    parked_tokens=st.sampled_from([0, 25, 60, None]),
    prefill_tokens=st.sampled_from([1, 16, 64]),
    prefill_chunk=st.sampled_from([8, 512]),
)
def test_every_turn_finishes_once_with_its_own_text(
    is_paged: bool,
    actions: list[tuple[str, int]],
    num_pages: int,
    parked_tokens: int | None,
    prefill_tokens: int,
    prefill_chunk: int,
) -> None:
    def begin(num_rows: int) -> Engine:
        runner: Runner = SlotRunner(MODEL, num_rows=num_rows, max_len=MAX_LEN)
        if is_paged:
            runner = PagedRunner(MODEL, num_rows=num_rows, max_len=MAX_LEN, num_pages=num_pages)
        return Engine(
            runner,
            seed=SEED,
            stop_token_ids=[STOP],
            prefill_chunk=prefill_chunk,
            prefill_tokens=prefill_tokens,
            prefix_cache_tokens=30,
            parked_tokens=parked_tokens,
        )

    play = Play(begin)
    play.most_tokens = parked_tokens
    for action, number in actions:
        play.act(action, number)
        if is_paged:
            assert isinstance(play.engine._runner, PagedRunner)
            play.engine._runner._pages.check()
    play.engine.pause_admission(False)
    for _ in range(MOST_STEPS):
        play.answer(len(play.answers))
        if play.engine.is_idle:
            break
        play.step()
    assert (play.engine.is_idle, play.asked, play.answers) == (True, {}, [])
    assert [len(play.turns[script.ordinal]) for script in SCRIPTS] == [len(s.observations) + 1 for s in SCRIPTS]
    for turn in (turn for turns in play.turns.values() for turn in turns):
        check_turn(MODEL, turn, seed=SEED)
        assert turn.version_spans[0].start == 0
    for engine in play.engines:
        stats = engine.stats
        assert stats.parked_missed_tokens <= stats.re_prefilled_tokens <= stats.prefilled_tokens
        if engine is play.engine:
            assert len(engine._parked) == 0
        engine._queue._queue.clear()  # those that went elsewhere before they had begun
        for script in SCRIPTS:
            engine.release(Session(0, script.ordinal, 0))
        assert (len(engine._parked), engine._parked.num_tokens) == (0, 0)
        if isinstance(engine._runner, PagedRunner):
            for key in list(engine._prefixes._entries):
                engine._prefixes._forget(key)
            engine._runner._pages.check()
            assert engine._runner.num_free_pages == num_pages
