"""Adapters of joined experts against PEFT's `target_parameters`: losses, gradients, files both ways, merged."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
import torch
from covering import covering
from hf_cases import oracle
from safetensors.torch import load_file, save_file
from test_families import packed_inputs, packed_logits
from test_lora import InFloat64, losses_and_gradients, ours_of, wrapped

from slipstream.core.errors import ConfigError
from slipstream.core.lora_section import LoraConfig
from slipstream.core.recipes import resolve
from slipstream.models.hf import load_model, save_model
from slipstream.models.lora import AdaptedExperts, base_of, linear_layers, merged
from slipstream.models.peft import ADAPTER_WEIGHTS, PREFIX, save_adapter, with_adapters
from slipstream.models.preflight import check_policy
from slipstream.models.shards import base_digest, local_parts
from slipstream.models.tokenizer import char_tokenizer
from slipstream.models.transformer import rope_tables

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]
CASES = ["qwen3_moe", "qwen3_moe_mixed", "mixtral"]
JOINED = {
    "both": (["gate_up_proj", "experts.down_proj"], []),
    "inner": (["gate_up_proj"], ["q_proj", "o_proj"]),
    "outer": (["experts.down_proj"], ["v_proj"]),
}


@pytest.fixture
def in_float64():
    torch.set_default_dtype(torch.float64)
    with InFloat64():
        yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("case", "kind"), covering(CASES, JOINED))
def test_losses_and_gradients_are_peft_s_in_float64(case, kind, checkpoint, tmp_path, request):
    parameters, modules = JOINED[kind]
    theirs = wrapped(case, modules, target_parameters=parameters, use_rslora=kind == "outer")
    ours = ours_of(theirs, checkpoint(case)[1], tmp_path)
    request.getfixturevalue("in_float64")
    for module in theirs.double().modules():
        if hasattr(module, "inv_freq"):
            module.inv_freq = type(module)(module.config).inv_freq
    ours.double()
    ours.cos, ours.signed_sin = rope_tables(ours.config)
    (loss, expected), gradients = losses_and_gradients(ours, theirs)
    assert loss == pytest.approx(expected, abs=1e-10)
    assert any("experts" in name for name in gradients)
    for name, (got, grad) in gradients.items():
        assert grad.abs().max() > 0
        torch.testing.assert_close(got, grad, atol=1e-10, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(("case", "kind"), covering(CASES, JOINED))
def test_peft_reads_what_is_written_here_and_a_merged_model_is_the_same(case, kind, precision, checkpoint, tmp_path):
    parameters, modules = JOINED[kind]
    _, folder = checkpoint(case)
    lora = LoraConfig(rank=2, targets=[*parameters, *modules], use_rslora=True, adapter_precision=precision)
    ours = with_adapters(load_model(folder), lora, seed=0)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if name.endswith(".b"):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    save_adapter(ours, tmp_path / "adapter", base=folder, digest=base_digest(ours))
    fields = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert set(fields["target_parameters"]) == {name.rpartition(".")[2] for name in parameters}
    import peft  # here, since it takes seconds, and each process of the tests imports every file

    theirs = peft.PeftModel.from_pretrained(oracle(case), tmp_path / "adapter")
    tokens, positions = packed_inputs([21])
    with torch.no_grad():
        got, expected = packed_logits(ours, tokens, positions, [21]), theirs(tokens[None]).logits[0]
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
        again = packed_logits(load_model(tmp_path / "adapter"), tokens, positions, [21])
        torch.testing.assert_close(again, got, atol=0, rtol=0)
        save_model(merged(ours), tmp_path / "merged")
        whole = packed_logits(load_model(tmp_path / "merged"), tokens, positions, [21])
    torch.testing.assert_close(whole, got, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(got, packed_logits(base_of(ours), tokens, positions, [21]), atol=1e-3)


def test_experts_have_adapters_where_they_are_named_alone(checkpoint):
    model = with_adapters(load_model(checkpoint("qwen3_moe")[1]), LoraConfig(rank=2), seed=0)
    assert not [one for one in model.modules() if isinstance(one, AdaptedExperts)]
    names = {piece.target for fused in linear_layers(model.config).values() for piece in fused.pieces}
    assert {"gate_up_proj", "down_proj", "q_proj"} <= names


def test_the_boxes_of_experts_are_every_number_once(checkpoint):
    lora = LoraConfig(rank=2, targets=["gate_up_proj", "down_proj"])
    model = with_adapters(load_model(checkpoint("mixtral")[1]), lora, seed=0)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    seen = {name: torch.zeros(parameter.shape, dtype=torch.int64) for name, parameter in trained.items()}
    for part in local_parts(model):
        part.of(seen[part.parameter]).add_(1)
    assert all((one == 1).all() for one in seen.values())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"target_parameters": ["gate_up_proj"]}, "unexpected"),
        ({"rank_pattern": {"gate_up_proj": 4}}, "rank_pattern"),
        ({"target_parameters": 3}, "out of range"),
    ],
)
def test_adapters_of_experts_that_do_not_fit_are_refused(change, told, checkpoint, tmp_path):
    folder = checkpoint("qwen3_moe")[1]
    model = with_adapters(load_model(folder), LoraConfig(rank=2, targets=["gate_up_proj", "down_proj"]), seed=0)
    save_adapter(model, tmp_path / "adapter", base=folder, digest=base_digest(model))
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ConfigError, match=told):
        load_model(tmp_path / "adapter")


@pytest.mark.parametrize("rank", [2, 8])
def test_ranks_that_a_gpu_does_not_multiply_are_refused_of_a_finished_adapter_too(rank, checkpoint, tmp_path):
    folder = checkpoint("qwen3_moe")[1]
    model = with_adapters(load_model(folder), LoraConfig(rank=rank, targets=["gate_up_proj", "down_proj"]), seed=0)
    words = [chr(0x4E00 + number) for number in range(model.config.vocab_size - 3)]
    tokenizer = char_tokenizer("".join(words))
    save_adapter(model, tmp_path / "adapter", base=folder, digest=base_digest(model), tokenizer=tokenizer)
    here = {"model": {"path": str(tmp_path / "adapter")}, "prompts": {"max_prompt_tokens": 16}}
    check_policy(resolve("quickstart", here))
    there = here | {name: {"device": "cuda", "precision": "bfloat16"} for name in ("trainer", "generator")}
    with pytest.raises(ConfigError, match="multiple of what grouped products") if rank == 2 else nullcontext():
        check_policy(resolve("quickstart", there))


def test_adapters_of_other_experts_are_refused(checkpoint, tmp_path):
    folder = checkpoint("qwen3_moe")[1]
    model = with_adapters(load_model(folder), LoraConfig(rank=2, targets=["gate_up_proj", "down_proj"]), seed=0)
    save_adapter(model, tmp_path / "adapter", base=folder, digest=base_digest(model))
    tensors = load_file(tmp_path / "adapter" / ADAPTER_WEIGHTS)
    inner = f"{PREFIX}model.layers.0.mlp.experts.base_layer.lora_A.weight"
    assert tensors[inner].shape == (2 * model.config.num_experts, model.config.hidden_size)
    save_file(tensors | {inner: tensors[inner][:-2].contiguous()}, tmp_path / "adapter" / ADAPTER_WEIGHTS)
    with pytest.raises(ConfigError, match="has shape"):
        load_model(tmp_path / "adapter")
