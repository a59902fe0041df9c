"""The schema: immutable, described, and conflicts that raise before anything starts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from slipstream.controller.policies import schedule_for
from slipstream.core.config import PRESETS, RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.recipes import resolve

BASE: dict[str, Any] = {"prompts": {"tasks": [{"name": "spell_backward"}]}}


def sections(model: type[BaseModel] = RunConfig) -> Iterator[type[BaseModel]]:
    yield model
    for info in model.model_fields.values():
        for inner in (info.annotation, *get_args(info.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from sections(inner)


def test_every_field_says_what_it_does() -> None:
    for model in sections():
        assert model.__doc__, model
        for name, info in model.model_fields.items():
            assert (info.description or "").endswith("."), f"{model.__name__}.{name}"


def test_every_section_is_frozen_and_closed() -> None:
    for model in sections():
        assert model.model_config["frozen"], model
        assert model.model_config["extra"] == "forbid", model
    with pytest.raises(ValidationError):
        resolve(BASE).steps = 3  # type: ignore[misc]


def test_presets_are_fields_of_the_schema() -> None:
    for values in PRESETS.values():
        assert values.keys() <= RunConfig.model_fields.keys()
    assert {name: resolve(BASE, preset=name).max_staleness for name in PRESETS} == {
        "sync": 0,
        "one_step": 1,
        "bounded": 2,
        "continuous": 2,
        "tolerant": 8,
    }


def test_derived_values() -> None:
    config = resolve(
        BASE, {"groups_per_step": 4, "completions_per_group": 3, "trainer": {"minibatches": 2, "epochs": 3}}
    )
    assert config.updates_per_step == 6
    assert config.completions_per_step == 12


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"publish_every": 4, "max_staleness": 2}, "publish_every leaves"),
        ({"reorder_window": 2, "max_staleness": 0}, "reorder_window is too wide"),
        ({"overtake_steps": 3, "max_staleness": 2}, r"overtake_steps = 3\n.*allowed: 1\.\.33"),
        ({"schedule": {"policy": "areal"}, "overtake_steps": 1}, "has a window"),
        ({"trainer": {"logprob_temperature": 0.5}, "max_staleness": 1}, "read by the policy that sampled"),
        ({"reorder_window": 34, "groups_per_step": 16, "max_staleness": 2}, r"allowed: 1\.\.33"),
        ({"schedule": {"policy": "sample_budget"}}, "staleness_threshold belongs"),
        ({"schedule": {"staleness_threshold": 0.5}}, "staleness_threshold belongs"),
        ({"schedule": {"policy": "finish_order"}}, "queue_groups belongs"),
        ({"schedule": {"policy": "areal", "queue_groups": 99}}, "queue_groups belongs"),
        ({"schedule": {"policy": "finish_order", "queue_groups": 15}}, "does not hold a batch"),
        ({"schedule": {"policy": "areal"}, "reorder_window": 2}, "has a window"),
        ({"schedule": {"policy": "drop_stale"}, "publish_every": 4, "max_staleness": 2}, "publish_every leaves"),
        ({"schedule": {"policy": "one_step"}, "max_staleness": 2}, "one step stale"),
        ({"generator": {"num_slots": 12}}, "bit-reproducible"),
        ({"generator": {"segment_tokens": 8}}, "in_flight swaps need no cut"),
        ({"generator": {"weight_update_at": "turn"}}, "in flight none waits"),
        (
            {
                "generator": {"weight_update_at": "turn"},
                "weight_update": "between_batches",
                "model": {"path": "org/name", "lora": {"rank": 4}},
            },
            "with adapters an episode keeps its own",
        ),
        ({"completions_per_group": 1}, "at least two completions"),
        ({"groups_per_step": 2, "trainer": {"minibatches": 3}}, "at least one group"),
        ({"eval": {"num_prompts": 501}, "prompts": {"num_eval": 500}}, "more prompts than are held out"),
        ({"prompts": {"dataset": "x.jsonl"}}, "exactly one source"),
        ({"prompts": {"tasks": []}}, "exactly one source"),
        ({"model": {"hidden_size": 130}}, "head sizes do not divide"),
        ({"model": {"num_kv_heads": 3}}, "head sizes do not divide"),
        ({"trainer": {"recompute_products": False}}, "nothing is computed again"),
        ({"trainer": {"compile": True, "ranks": 2}}, "torch.compile is for the layers of one rank"),
        ({"trainer": {"compile": True, "recompute": True, "recompute_products": False}}, "everything or nothing"),
        ({"trainer": {"compile": True}, "model": {"lora": {"rank": 4}}}, "do not go together with torch.compile"),
        ({"generator": {"max_new_tokens": 256}, "model": {"max_positions": 256}}, "completions do not fit"),
    ],
)
def test_conflicts_raise(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve(BASE, overrides)
    assert re.search(r"allowed: ", str(caught.value))


def test_the_widest_reorder_window_is_accepted() -> None:
    assert resolve(BASE, {"reorder_window": 33, "groups_per_step": 16, "max_staleness": 2}).window == 33
    assert resolve(BASE, {"overtake_steps": 2, "groups_per_step": 16, "max_staleness": 2}).window == 33


@pytest.mark.parametrize(
    ("overrides", "bound"),
    [
        ({"schedule": {"policy": "oldest_first"}, "max_staleness": 3}, 3),
        ({"schedule": {"policy": "drop_stale"}, "max_staleness": 3}, 3),
        ({"schedule": {"policy": "one_step"}, "max_staleness": 1}, 1),
        ({"schedule": {"policy": "areal"}}, None),
        ({"schedule": {"policy": "sample_budget", "staleness_threshold": 0.0}, "publish_every": 9}, None),
        ({"schedule": {"policy": "finish_order", "queue_groups": 16}, "publish_every": 9}, None),
    ],
)
def test_a_scheduling_policy_promises_what_it_keeps(overrides: dict[str, Any], bound: int | None) -> None:
    config = resolve(BASE, overrides)
    assert config.staleness_bound == bound
    schedule = schedule_for(config)
    assert (schedule.staleness_bound, schedule.bounds_admissions) == (bound, config.bounds_admissions)


def test_sizes_of_a_fresh_model_do_not_matter_with_a_checkpoint() -> None:
    assert resolve(BASE, {"model": {"path": "somewhere", "hidden_size": 130}}).model.path == "somewhere"


def test_without_a_limit_a_slot_has_room_for_the_longest_prompt_that_there_is() -> None:
    config = RunConfig.model_validate({"prompts": {"tasks": [{"name": "spell_backward"}]}})
    assert config.prompts.max_prompt_tokens is None
    assert (config.longest_prompt(2048), config.longest_sequence(2048)) == (2048 - 64, 2048)
    assert config.least_sequence == 1 + 64, "before prompts are read"
    limited = config.model_copy(update={"prompts": config.prompts.model_copy(update={"max_prompt_tokens": 20})})
    assert (limited.longest_sequence(2048), limited.longest_sequence(50)) == (84, 50)
    with pytest.raises(ConfigError, match=r"(?s)do not fit the model.*max_prompt_tokens = null, max_new_tokens = 64"):
        config.check_lengths(64, of="positions", hint="")


def test_a_section_given_in_part_has_the_defaults_of_its_place() -> None:
    """Those of `sft.optimizer` are not those of the trainer's, by whichever way the configuration is made."""
    stages = ("sft", "warm_start", "dpo", "reward_model")
    tables = BASE | {name: {"optimizer": {"warmup_updates": 5}} for name in stages}
    made, resolved = RunConfig(**tables), resolve(tables)
    assert [getattr(made, name) for name in stages] == [getattr(resolved, name) for name in stages]
    assert (made.dpo.optimizer.lr, made.dpo.optimizer.warmup_updates) == (1e-6, 5)
