"""Runs that train adapters alone: equal to a plain loop, published, resumed, evaluated, exported."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers
from audit import audit, num_older
from safetensors import safe_open
from test_resume import SYNC, after_step, cut_off, small  # noqa: F401 - a fixture
from test_sync_equals_reference import assert_equal, reference_run

import slipstream
from slipstream.cli import main
from slipstream.core.errors import ConfigError, SlipstreamError
from slipstream.core.recipes import resolve
from slipstream.core.run_log import read_metrics
from slipstream.models.attention import PackedAttention
from slipstream.models.hf import load_model
from slipstream.models.lora import shapes_of
from slipstream.observe.samples import read_samples

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]
LORA = {"rank": 4, "targets": ["q_proj", "v_proj", "up_proj", "down_proj", "lm_head", "embed_tokens"]}


@pytest.fixture
def adapted(tiny):
    """Overrides of the quickstart that train adapters."""
    warm_start = tiny["warm_start"] | {"optimizer": {"lr": 1e-2}}
    optimizer = {"optimizer": {"lr": 1e-3}}
    return tiny | {
        "model": tiny["model"] | {"lora": LORA},
        "trainer": tiny["trainer"] | optimizer,
        "warm_start": warm_start,
    }


def adapters_of(run, model="model"):
    with safe_open(run / model / "adapter_model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a dict


def events_of(run):
    return [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()]


def logits_of(model, tokens):
    with torch.no_grad():
        return model.logits(model(tokens, torch.arange(len(tokens)), PackedAttention([len(tokens)])))


def stored_in(adapted, precision, adapters="float32"):
    """The base in one precision on both sides, and `adapters` in another."""
    fields = {"base_precision": precision, "adapter_precision": adapters}
    return adapted | {
        "model": adapted["model"] | {"lora": LORA | fields},
        "generator": adapted["generator"] | {"precision": precision},
    }


@pytest.mark.parametrize(
    ("precision", "adapters"),
    [
        ("float32", "float32"),
        pytest.param("float32", "bfloat16", marks=pytest.mark.slow),
        pytest.param("bfloat16", "float32", marks=pytest.mark.slow),
        pytest.param("bfloat16", "bfloat16", marks=pytest.mark.slow),
        pytest.param("int8", "float32", marks=pytest.mark.slow),
        pytest.param("int8", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_at_staleness_0_adapters_are_those_of_a_plain_loop(adapted, precision, adapters, tmp_path):
    """Also beside a rounded base: the loop samples from the trainer's own model, the run from packed products."""
    overrides = stored_in(adapted, precision, adapters) | SYNC | {"steps": 2}
    overrides["warm_start"] = adapted["warm_start"] | {"steps": 10}
    reference_run(resolve("quickstart", overrides), tmp_path / "reference")
    run = slipstream.run("quickstart", overrides=overrides | {"host": "inline"}, out=tmp_path / "run", display=False)
    assert_equal(run.out / "model", tmp_path / "reference")
    assert all(tensor.any() for tensor in adapters_of(run.out).values()), "all of them have moved"
    assert {str(tensor.dtype) for tensor in adapters_of(run.out).values()} == {f"torch.{adapters}"}
    assert run.summary["staleness"]["max"] == 0


EXPERTS = {"family": "qwen3_moe", "num_experts": 4, "lora": LORA | {"targets": ["v_proj", "gate_up_proj", "down_proj"]}}


@pytest.mark.slow
@pytest.mark.parametrize("weight_update", ["at staleness 0", "between_batches", "in_flight"])
def test_adapters_of_experts_in_a_run(adapted, weight_update, tmp_path):
    """Equal to the plain loop at staleness 0; else audited, and published alone."""
    overrides = adapted | {"model": adapted["model"] | EXPERTS, "steps": 2, "host": "inline"}
    overrides |= SYNC if weight_update == "at staleness 0" else {"weight_update": weight_update}
    run = slipstream.run("quickstart", overrides=overrides, out=tmp_path / "run", display=False)
    tensors = adapters_of(run.out)
    assert sum(".experts." in name for name in tensors) == 4 * adapted["model"]["num_layers"]
    assert all(tensor.any() for tensor in tensors.values()), "all of them have moved"
    if weight_update == "at staleness 0":
        reference_run(resolve("quickstart", overrides), tmp_path / "reference")
        assert_equal(run.out / "model", tmp_path / "reference")
        return
    audit(run.out)
    errors = [event["probe_error"] for event in events_of(run.out) if event["type"] == "Swapped"]
    assert errors
    assert max(errors) < 1e-4
    synced = run.summary["weight_sync"]
    assert synced["bytes"] == synced["count"] * sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize(
    ("weight_update", "precision", "base", "adapters"),
    [
        pytest.param("in_flight", "float32", "float32", "float32", marks=pytest.mark.slow),
        pytest.param("between_batches", "float32", "float32", "bfloat16", marks=pytest.mark.slow),
        pytest.param("in_flight", "int8", "float32", "float32", marks=pytest.mark.slow),
        ("in_flight", "int8", "int8", "bfloat16"),
        pytest.param("in_flight", "float32", "int8", "float32", marks=pytest.mark.slow),
    ],
)
def test_an_asynchronous_run_publishes_adapters_alone(adapted, weight_update, precision, base, adapters, tmp_path):
    overrides = stored_in(adapted, base, adapters) | {
        "host": "inline",
        "steps": 4,
        "weight_update": weight_update,
        "generator": adapted["generator"] | {"precision": precision},
        "warm_start": adapted["warm_start"] | {"steps": 5},
        "eval": {"every": 2, "num_prompts": 8, "num_slots": 8},
    }
    run = slipstream.run("quickstart", overrides=overrides, out=tmp_path / "run", display=False)
    audit(run.out)
    lines = read_metrics(run.out / "metrics.jsonl")
    found = adapters_of(run.out).values()
    num_bytes, padding = sum(tensor.nbytes for tensor in found), 0 if adapters == "float32" else 63 * len(found)
    synced = run.summary["weight_sync"]
    assert num_bytes <= synced["bytes"] / synced["count"] <= num_bytes + padding, (
        "A and B alone, at their own precision"
    )
    assert all(line["publish_same_frac"] == 0 for line in lines if "publish_same_frac" in line)
    errors = [event["probe_error"] for event in events_of(run.out) if event["type"] == "Swapped"]
    assert len(errors) >= 4
    assert max(errors) < (1e-4 if precision == base else 0.5)
    assert precision == base or min(errors) > 1e-4
    assert any("eval_accuracy" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weight_update", "tensor_parallel", "precision", "base"),
    [
        ("in_flight", 1, "float32", "float32"),
        ("between_batches", 1, "float32", "float32"),
        ("in_flight", 2, "float32", "float32"),
        ("in_flight", 2, "int8", "float32"),
        ("in_flight", 2, "int8", "int8"),
        ("between_batches", 1, "int8", "int8"),
    ],
)
def test_two_trainer_ranks_serve_two_replicas(adapted, weight_update, tensor_parallel, precision, base, tmp_path):
    ranks = {"ranks": 2, "tensor_parallel": tensor_parallel, "checkpoint_every": 1}
    overrides = stored_in(adapted, base) | {
        "steps": 2,
        "weight_update": weight_update,
        "trainer": adapted["trainer"] | ranks,
        "generator": adapted["generator"] | {"replicas": 2, "tensor_parallel": tensor_parallel, "precision": precision},
        "kl": {"coef": 0.05},
        "warm_start": adapted["warm_start"] | {"steps": 10},
        "eval": {"every": 0, "num_prompts": 4, "num_slots": 8},
    }
    run = slipstream.run("quickstart", overrides=overrides, out=tmp_path / "run", display=False)
    assert audit(run.out)["fates"]["trained"] == 8
    swaps = [event for event in events_of(run.out) if event["type"] == "Swapped"]
    assert {swap["replica"] for swap in swaps} == {0, 1}
    assert max(swap["probe_error"] for swap in swaps) < (1e-4 if precision == base else 0.5)
    distances = [line["kl_reference"] for line in read_metrics(run.out / "metrics.jsonl") if "kl_reference" in line]
    assert distances[0] == pytest.approx(0, abs=1e-6 if precision == base else 0.05)
    before = adapters_of(run.out)
    synced = run.summary["weight_sync"]
    one_version = 4 * sum(tensor.numel() for tensor in before.values())
    assert one_version < synced["bytes"] / synced["count"] <= 2 * one_version, "each rank stages what it holds"
    assert shapes_of(load_model(run.out / "model")), "beside a base of the digest that generators have, too"
    first = adapters_of(run.out, "reference")
    assert before.keys() == first.keys()
    assert not any(torch.equal(before[name], first[name]) for name in before), "all were trained, after the warm start"
    if weight_update == "between_batches":
        resumed = slipstream.run("quickstart", resume=run.out, overrides={"steps": 3}, display=False)
        assert audit(resumed.out)["fates"]["trained"] == 12
        after = adapters_of(run.out)
        assert not any(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_two_ranks_train_the_adapters_that_one_does(adapted, tmp_path):
    """Without staleness both runs sample the same first batch, so its step is the same, up to rounding."""
    found = []
    for ranks in (1, 2):
        overrides = adapted | SYNC | {"steps": 1, "trainer": adapted["trainer"] | {"ranks": ranks}}
        overrides["warm_start"] = adapted["warm_start"] | {"steps": 5}
        overrides |= {"generator": adapted["generator"] | {"replicas": ranks}}
        run = slipstream.run("quickstart", overrides=overrides, out=tmp_path / str(ranks), display=False)
        found.append(adapters_of(run.out))
        assert all(tensor.any() for tensor in found[-1].values())
    one, two = ({name: tensor.double() for name, tensor in run.items()} for run in found)
    assert one.keys() == two.keys()
    difference = sum((two[name] - tensor).square().sum() for name, tensor in one.items())
    assert difference.sqrt() < 1e-5 * sum(tensor.square().sum() for tensor in one.values()).sqrt()


@pytest.mark.slow
@pytest.mark.parametrize("host", ["inline", "process"])
def test_between_batches_no_swap_waits_and_no_completion_mixes_versions(adapted, host, tmp_path):
    generator = adapted["generator"] | {"num_slots": 8, "max_new_tokens": 24}
    overrides = adapted | {"host": host, "steps": 12, "generator": generator, "warm_start": {"steps": 0}}
    overrides |= {"weight_update": "between_batches", "max_staleness": 2, "loss": {"skip_no_signal": False}}
    run = slipstream.run("quickstart", overrides=overrides, out=tmp_path / "run", display=False)
    assert audit(run.out)["spanning"] == 0
    assert "drain" not in run.summary["accounting"]["generator-0"]
    assert num_older(run.out) > 0, "versions were side by side"
    assert 1 <= run.summary["staleness"]["max"] <= 2


@pytest.mark.slow
def test_the_reference_is_the_base_and_is_measured_without_a_second_model(adapted, tmp_path):
    """A fresh adapter adds nothing, so the first step has no distance; later ones do."""
    tables = adapted | {"host": "inline", "steps": 3, "kl": {"coef": 0.05}, "warm_start": {"steps": 0}}
    run = slipstream.run(
        "quickstart", overrides=tables | {"loss": {"skip_no_signal": False}} | SYNC, out=tmp_path / "run", display=False
    )
    distances = [line["kl_reference"] for line in read_metrics(run.out / "metrics.jsonl") if "kl_reference" in line]
    assert distances[0] == pytest.approx(0, abs=1e-6)
    assert len(distances) == 3


@pytest.mark.slow
def test_after_a_warm_start_the_reference_is_version_0(adapted, tmp_path, monkeypatch, small):  # noqa: F811
    """Its adapters are written once, and a resumed run measures by the same."""
    tables = small | SYNC | {"loss": {}, "kl": {"coef": 0.05}, "model": adapted["model"]}
    tables["warm_start"] = tables["warm_start"] | {"optimizer": {"lr": 1e-2}}
    whole = slipstream.run("quickstart", overrides=tables, out=tmp_path / "whole", display=False)
    assert shapes_of(load_model(whole.out / "reference"))
    lines = [line for line in read_metrics(whole.out / "metrics.jsonl") if "kl_reference" in line]
    assert lines[0]["kl_reference"] == pytest.approx(0, abs=1e-6)
    cut_off(monkeypatch, tables, tmp_path / "run", after_step(4))
    resumed = slipstream.run("quickstart", resume=tmp_path / "run", display=False)
    assert_equal(resumed.out / "model", whole.out / "model")
    audit(resumed.out)
    checkpoint = resumed.out / "checkpoints" / "step_6" / "index.json"
    names = {name.partition("/")[2] for name in json.loads(checkpoint.read_text())}
    assert names == {name.removeprefix("base_model.model.") for name in adapters_of(resumed.out)}


@pytest.mark.slow
@pytest.mark.parametrize("adapters", ["float32", "bfloat16"])
def test_a_run_beside_a_rounded_base_is_resumed_and_leaves_what_any_run_does(
    small,  # noqa: F811
    adapted,
    adapters,
    tmp_path,
    monkeypatch,
):
    """Its reference shares the rounded base; its files name the float32 numbers, which `base` has."""
    import peft

    tables = stored_in(small | {"model": adapted["model"]}, "int8", adapters) | SYNC
    tables |= {"loss": {}, "kl": {"coef": 0.05}}
    tables["warm_start"] = tables["warm_start"] | {"optimizer": {"lr": 1e-2}}
    whole = slipstream.run("quickstart", overrides=tables, out=tmp_path / "whole", display=False)
    lines = [line for line in read_metrics(whole.out / "metrics.jsonl") if "kl_reference" in line]
    assert lines[0]["kl_reference"] == pytest.approx(0, abs=1e-6)
    cut_off(monkeypatch, tables, tmp_path / "run", after_step(4))
    resumed = slipstream.run("quickstart", resume=tmp_path / "run", display=False)
    assert_equal(resumed.out / "model", whole.out / "model")
    audit(resumed.out)
    base = transformers.AutoModelForCausalLM.from_pretrained(whole.out / "base", attn_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(base, whole.out / "model").eval()
    tokens = torch.arange(3, 40)
    assert main(["export", str(whole.out), str(tmp_path / "merged"), "--merged"]) == 0
    for folder in (whole.out / "model", tmp_path / "merged"):
        with torch.no_grad():
            ours, expected = logits_of(load_model(folder), tokens), theirs(tokens[None]).logits[0]
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    assert len(slipstream.evaluate_model(whole.out, num_prompts=4).greedy_answers) == 4


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Its folder was moved elsewhere afterwards."""
    folder = tmp_path_factory.mktemp("lora")
    overrides = {
        "host": "inline",
        "steps": 2,
        "groups_per_step": 4,
        "completions_per_group": 4,
        "model": {"hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "lora": LORA | {"rank": 16}},
        "prompts": {"num_train": 300, "num_eval": 50},
        "generator": {"num_slots": 16},
        "trainer": {"optimizer": {"lr": 1e-3}},
        "warm_start": {"steps": 40, "batch_size": 16, "num_demonstrations": 300, "optimizer": {"lr": 1e-2}},
        "eval": {"every": 0, "num_prompts": 16, "num_slots": 8},
    }
    slipstream.run("quickstart", overrides=overrides, out=folder / "run", display=False)
    return (folder / "run").rename(folder / "moved")


def test_peft_loads_what_a_run_leaves(finished):
    import peft

    base = transformers.AutoModelForCausalLM.from_pretrained(finished / "base", attn_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(base, finished / "model").eval()
    tokens = torch.arange(3, 40)
    ours = load_model(finished / "model")
    assert json.loads((finished / "summary.json").read_text())["adapter_params"] == sum(
        tensor.numel() for name, tensor in theirs.named_parameters() if "lora_" in name
    )
    assert f"LoRA rank 16 on {', '.join(LORA['targets'])}" in (finished / "report.html").read_text()
    with torch.no_grad():
        torch.testing.assert_close(logits_of(ours, tokens), theirs(tokens[None]).logits[0], atol=1e-5, rtol=1e-5)
    assert transformers.AutoTokenizer.from_pretrained(finished / "model").decode([3 + ord("a") - 32]) == "a"


def test_it_is_evaluated_exported_and_gone_on_with(finished, tmp_path, capsys, monkeypatch):
    result = slipstream.evaluate_model(finished, num_prompts=16)
    accuracy = json.loads((finished / "summary.json").read_text())["eval"]["after"]["accuracy"]
    assert result.accuracy == pytest.approx(accuracy)
    shown = read_samples(finished / "samples.json")
    answers = [(answer.prompt, answer.text) for answer in result.greedy_answers]
    assert [(one.prompt, one.after) for one in shown] == answers[: len(shown)] != []
    assert any(one.after for one in shown)
    for name, flags in (("merged", ["--merged"]), ("adapter", [])):
        assert main(["export", str(finished), str(tmp_path / name), *flags]) == 0
    tokens = torch.arange(3, 40)
    expected = logits_of(load_model(finished / "model"), tokens)
    torch.testing.assert_close(logits_of(load_model(tmp_path / "merged"), tokens), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(logits_of(load_model(tmp_path / "adapter"), tokens), expected)
    assert main(["export", str(finished), str(tmp_path / "merged")]) == 2
    assert "in use" in capsys.readouterr().err
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    assert main(["export", str(finished), str(tmp_path / "for_the_hub"), "--push-to-hub", "org/name"]) == 2
    assert "--merged uploads the whole model" in capsys.readouterr().err
    more = {
        "host": "inline",
        "steps": 1,
        "groups_per_step": 4,
        "completions_per_group": 4,
        "model": {"path": str(finished / "base"), "lora": {"path": str(finished / "model")}},
        "prompts": {"num_train": 300, "num_eval": 50},
        "generator": {"num_slots": 16},
        "warm_start": {"steps": 0},
        "eval": {"every": 0, "num_prompts": 16, "num_slots": 8},
        "kl": {"coef": 0.01},
    }
    run = slipstream.run("quickstart", overrides=more, out=tmp_path / "more", display=False)
    assert run.summary["eval"]["before"]["accuracy"] == pytest.approx(accuracy)
    assert [(one.prompt, one.before) for one in read_samples(run.out / "samples.json")] == answers[: len(shown)]
    assert json.loads((run.out / "model" / "adapter_config.json").read_text())["r"] == 16
    assert not (run.out / "base").exists(), "it is where it was"
    with pytest.raises(ConfigError, match="is an adapter"):
        slipstream.run("quickstart", overrides=more | {"model": {"path": str(finished / "model")}}, display=False)


def test_before_is_the_policy_behind_the_warm_start_of_an_adapter(finished, tmp_path):
    """RL changes next to nothing here, so the policy after it is the one before it."""
    tables = {
        "stages": ["rl", "evaluate"],
        "host": "inline",
        "steps": 1,
        "groups_per_step": 2,
        "completions_per_group": 2,
        "model": {"path": str(finished / "base"), "lora": {"path": str(finished / "model")}},
        "prompts": {"num_train": 300, "num_eval": 8},
        "generator": {"num_slots": 16},
        "trainer": {"optimizer": {"lr": 1e-12}},
        "loss": {"skip_no_signal": False},
        "warm_start": {"steps": 5, "batch_size": 8, "num_demonstrations": 40, "optimizer": {"lr": 3e-2}},
        "kl": {"coef": 0.01},
        "eval": {"every": 0, "num_prompts": 4, "num_slots": 8},
        "evaluation": {"num_prompts": 4},
    }
    run = slipstream.run("quickstart", overrides=tables, out=tmp_path / "run", display=False)
    found = run.summary["evaluation"]
    assert found["checkpoints"]["before"] == str(run.out / "reference")
    for moment in ("before", "after"):
        assert found[moment]["drift"]["kl"]["per_token"] == pytest.approx(0, abs=1e-4)


def test_a_generator_with_another_base_ends_the_run(adapted, tmp_path, monkeypatch):
    """Here its seed is another one; on another machine it would be another file of the same name."""
    from slipstream.generator.native import NativeBackend

    policy = NativeBackend._policy

    def other(self):
        config, self._config = self._config, self._config.model_copy(update={"seed": 1})
        try:
            return policy(self)
        finally:
            self._config = config

    monkeypatch.setattr(NativeBackend, "_policy", other)
    tables = adapted | {"host": "inline", "warm_start": {"steps": 0}}
    with pytest.raises(SlipstreamError, match="different base models"):
        slipstream.run("quickstart", overrides=tables, out=tmp_path / "run", display=False)


def test_a_version_costs_no_packing_of_the_base(adapted):
    """The products of the base are made once: a version has its adapters' alone."""
    from slipstream.models.build import build_tokenizer
    from slipstream.models.flat import FlatParameters
    from slipstream.models.served import ServedWeights
    from slipstream.models.sharded import Division, build_sharded_policy

    config = resolve("quickstart", adapted)
    tokenizer = build_tokenizer(config.model)
    built = [build_sharded_policy(config.model, Division(), seed=0, tokenizer=tokenizer) for _ in range(2)]
    trained, served = built
    sizes = [one.numel() for one in trained.parameters()]
    parameters, weights = FlatParameters(trained), ServedWeights(served, "float32")
    assert weights.num_bytes == parameters.flat.nbytes
    assert 0 <= weights.base_bytes - (4 * sum(sizes) - weights.num_bytes) < 64 * len(sizes), "but for padding"
    base = served.layers[0].qkv.product.keywords["base"]
    plain = served.layers[0].output.product
    with torch.no_grad():
        parameters.flat.copy_(torch.from_numpy(np.random.default_rng(0).normal(0, 0.1, parameters.num_params)))
    flat = parameters.flat.view(torch.uint8).clone()
    weights.prepare(flat)
    weights.rebind(flat)
    assert served.layers[0].qkv.product.keywords["base"] is base
    assert served.layers[0].output.product is plain
    tokens = torch.arange(3, 19)
    torch.testing.assert_close(logits_of(served, tokens), logits_of(trained, tokens), atol=1e-6, rtol=1e-5)
