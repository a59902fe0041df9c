"""The simulator's engine against the real one: the same rows and prefilled tokens in every step."""

from __future__ import annotations

import random

import numpy as np
import pytest

from slipstream.generator.engine import Engine as RealEngine
from slipstream.generator.noise import noise_keys
from slipstream.generator.requests import Request
from slipstream.generator.runner import Decoded
from slipstream.plan.simulated_generator import SimulatedEngine, group_of
from slipstream.plan.simulated_run import Costs, GroupWork, SimulatedSetup

SEED, STOP, SLOTS = 3, 1, 8


class Room:
    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens


class ScriptedRunner:
    """A runner without a model: rows end when their script does; `log` has (rows, prefilled tokens) of each pass."""

    num_rows, max_len, joins_prefill = SLOTS, 10_000, True

    def routes(self, row: int) -> None:
        return None

    def __init__(self, lengths: dict[tuple[int, int], int]) -> None:
        keys = noise_keys(SEED, [(0, *key) for key in lengths])
        self.length_of = dict(zip(keys.tolist(), lengths.values(), strict=True))
        self.rows: dict[int, list[int]] = {}  # row -> tokens so far, length, its own token
        self.log: list[tuple[int, int]] = []
        self.alone = 0

    def open_prefix(self, num_tokens):
        return Room(num_tokens)

    def prefill(self, chunks):
        self.alone = sum(len(chunk.tokens) for chunk in chunks)

    def close_prefix(self, prefix):
        pass

    def open_rows(self, rows, prefix, states):
        for row, done, key in zip(rows, states.num_new.tolist(), states.noise_keys.tolist(), strict=True):
            self.rows[row] = [done, self.length_of[key], 2 + key % 1_000_003]
        return True

    def close_rows(self, rows):
        for row in rows:
            del self.rows[row]

    def move_rows(self, sources, destinations):
        for source, destination in zip(sources, destinations, strict=True):
            self.rows[destination] = self.rows.pop(source)

    def rows_without_room(self):
        return []

    def settle(self):
        pass

    def decode(self, num_rows, chunks=()):
        tokens = np.zeros(num_rows, dtype=np.int64)
        self.log.append((len(self.rows), self.alone + sum(len(chunk.tokens) for chunk in chunks)))
        self.alone = 0
        for row, state in self.rows.items():
            state[0] += 1
            tokens[row] = STOP if state[0] == state[1] else state[2]
        return Decoded(tokens, np.zeros(num_rows, dtype=np.float32))


def prompt_of(ordinal: int, length: int) -> np.ndarray:
    """No two alike: what two prompts share is stored once, which the simulator does not know of."""
    digits = [(ordinal >> 4 * i & 15) + 2 for i in range(length)]
    return np.array(digits, dtype=np.int32)


MODES = ["keep", "recompute", "recompute_if_older_than", "between_batches", "export", "segments"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(4))
def test_every_step_has_the_rows_and_the_prefill_of_the_real_engine(seed, mode):
    rng = random.Random(seed)
    groups = {
        ordinal: GroupWork(rng.choice([1, 3, 9, 40]), tuple(rng.randint(1, 30) for _ in range(rng.choice([1, 3]))))
        for ordinal in range(30)
    }
    groups = {o: GroupWork(max(work.prompt_tokens, 2 * (o >= 16) + 1), work.lengths) for o, work in groups.items()}
    lengths = {(o, sample): n for o, work in groups.items() for sample, n in enumerate(work.lengths)}
    runner = ScriptedRunner(lengths)
    real = RealEngine(runner, seed=SEED, stop_token_ids=[STOP], prefill_tokens=24, prefill_chunk=16)
    prefilled = []
    costs = Costs(
        decode=lambda *_: 1.0, train=lambda _: {}, prefill=lambda _, tokens, __: prefilled.append(tokens) or 1.0
    )
    setup = SimulatedSetup(slots=SLOTS, prefill_tokens=24, prefill_chunk=16)
    model = SimulatedEngine(setup, costs, 0, SLOTS, 0)
    todo, version, seen, until = deque_of(groups), 0, 0, 0

    def swap() -> None:
        nonlocal version
        version += 1
        kept = mode if mode.startswith(("keep", "recompute")) else "keep"
        real.set_version(version, kv_on_update=kept, max_kv_age=1)
        model.set_version(version)
        if kept != "keep":
            oldest = version - (kept != "recompute")
            model.put_back(model.take_out(lambda row: row.kv_version < oldest, lambda _: []))

    def cut() -> None:
        requests, rows = real.export_live(), model.take_out(lambda _: True, lambda _: [])
        swap()
        real.submit(requests)
        model.put_back(sorted(rows, key=lambda row: (row.ordinal, row.sample)))

    while todo or not real.is_idle:
        if todo and rng.random() < 0.4:
            ordinal, work = todo.pop()
            real.submit(
                [
                    Request(ordinal, s, prompt_of(ordinal, work.prompt_tokens), max_new_tokens=1000, temperature=1.0)
                    for s in range(len(work.lengths))
                ]
            )
            model.waiting.append(group_of(ordinal, work))
        if rng.random() < 0.1:
            if mode in ("between_batches", "segments") and real.num_begun and not model.is_paused:
                real.pause_admission(True)
                model.is_paused, until = True, len(runner.log) + rng.randint(1, 4)
            elif mode == "export":
                cut()
            elif not model.is_paused:
                swap()
        is_cut = mode == "segments" and len(runner.log) >= until
        if model.is_paused and (is_cut or not real.num_begun):
            cut()
            real.pause_admission(False)
            model.is_paused = False
        before = len(runner.log)
        finished = {(one.ordinal, one.sample) for one in real.step()}
        prefilled.clear()
        planned = model.plan()
        if len(runner.log) == before:  # it prefilled at most
            assert planned is None or planned.steps == 0
            assert sum(prefilled) == runner.alone
            runner.alone = 0
            continue
        assert planned is not None
        assert (planned.rows, sum(prefilled)) == runner.log[-1], f"step {len(runner.log)}"
        assert {(row.ordinal, row.sample) for row in model.decoded(1)} == finished
        assert model.num_begun == real.num_begun
        seen += planned.rows
    assert not model.live
    assert not model.waiting
    assert seen == sum(lengths.values()), "each token once"
    assert model.context == 0


def deque_of(groups: dict[int, GroupWork]) -> list[tuple[int, GroupWork]]:
    return list(reversed(groups.items()))
