"""What the engine says it is doing: prefill, prefill once more, decode; and how many tokens of each."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine_kit import new_engine, random_model, requests
from heard import Heard

from slipstream.generator.engine import Engine

PROMPTS = 3 + 8 + 13 - 3  # tokens of three prompts but the last ones, which are decoded


def engine_heard(**options: object) -> tuple[Engine, Heard]:
    heard = Heard()
    return new_engine(random_model(), spans=heard, **options), heard


def finish(engine: Engine) -> None:
    while not engine.is_idle:
        engine.step()


def test_pieces_are_passes_and_decode_steps_and_units_are_their_tokens():
    engine, heard = engine_heard()
    engine.submit(requests(3, 2, max_new_tokens=5))
    steps = 0
    while not engine.is_idle:
        engine.step()
        steps += 1
    assert heard.states == {"prefill", "decode"}
    assert heard.work["prefill"][1] == PROMPTS
    assert heard.work["decode"] == (steps, engine.stats.generated_tokens)
    assert engine.num_re_prefilled == 0


def test_what_is_prefilled_again_under_new_weights_is_told_apart():
    engine, heard = engine_heard()
    engine.submit(requests(3, max_new_tokens=20))
    for _ in range(4):
        engine.step()
    assert "re_prefill" not in heard.states
    live = engine.num_live
    engine.set_version(1, kv_on_update="recompute")
    finish(engine)
    assert live == 3
    assert heard.work["re_prefill"][1] == engine.num_re_prefilled == PROMPTS + 3 * 4
    assert heard.work["prefill"][1] == PROMPTS


@pytest.mark.parametrize("is_paged", [False, True])
def test_prompts_of_those_who_wait_are_prefilled_again_where_a_swap_has_forgotten_them(is_paged: bool):
    engine, heard = engine_heard(num_slots=8, is_paged=is_paged)
    engine.submit(requests(1, 12, max_new_tokens=6))  # one prompt for all; four of them wait for a row
    engine.step()
    assert engine.num_waiting == 4
    engine.set_version(1)
    finish(engine)
    assert engine.num_re_prefilled == 2
    assert heard.work["prefill"] == (1, 2)
    assert heard.work.get("re_prefill") == ((1, 2) if is_paged else None), "on slots it rides in a decode step"
    engine.set_version(2)
    engine.submit(requests(1, max_new_tokens=6))
    finish(engine)
    assert engine.num_re_prefilled == 2, "nobody waited for it when it was forgotten"
    assert heard.work["prefill"] == (2, 4)


@pytest.mark.parametrize("how", ["resumed", "again"])
def test_what_goes_on_or_was_lost_is_prefilled_again(how: str):
    first, _ = engine_heard()
    first.submit(requests(3, max_new_tokens=20))
    for _ in range(4):
        first.step()
    exported = first.export_live() if how == "resumed" else requests(3)
    engine, heard = engine_heard()
    engine.submit([replace(request, is_again=how == "again") for request in exported])
    finish(engine)
    assert "prefill" not in heard.states
    assert heard.work["re_prefill"][1] == engine.num_re_prefilled == PROMPTS + (12 if how == "resumed" else 0)


def test_a_pass_of_both_is_named_by_the_most_of_it_and_counted_exactly():
    engine, heard = engine_heard()
    long, short = requests(6)[5], requests(1)[0]  # 28 and 3 tokens
    engine.submit([replace(long, is_again=True), short])
    finish(engine)
    assert heard.work["re_prefill"] == (1, 27 + 2)
    assert engine.num_re_prefilled == 27
