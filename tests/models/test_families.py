"""Every family's logits and gradients against transformers': alone, packed, and padded."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys

import pytest
import torch
from hf_cases import CASES, VOCAB_SIZE
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from slipstream.core.errors import ConfigError
from slipstream.models.attention import PackedAttention
from slipstream.models.config import config_from_hf, config_to_hf
from slipstream.models.hf import load_model, logical_tensors
from slipstream.models.sizes import num_parameters

LENGTHS = [9, 1, 23, 9, 14]
TOLERANCE = 1e-4


def packed_inputs(lengths, seed=0):
    # not the padding token 0, whose embedding gets no gradient in transformers
    tokens = torch.randint(1, VOCAB_SIZE, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    return tokens, torch.cat([torch.arange(length) for length in lengths])


def packed_logits(model, tokens, positions, lengths):
    return model.logits(model(tokens, positions, PackedAttention(lengths)))


@pytest.mark.parametrize("case", CASES)
def test_packed_logits_equal_transformers_on_each_sequence(case, checkpoint):
    theirs, folder = checkpoint(case)
    tokens, positions = packed_inputs(LENGTHS)
    with torch.no_grad():
        logits = packed_logits(load_model(folder), tokens, positions, LENGTHS)
        for ours, sequence in zip(logits.split(LENGTHS), tokens.split(LENGTHS), strict=True):
            torch.testing.assert_close(ours, theirs(sequence[None]).logits[0], atol=TOLERANCE, rtol=0)


def published(case, name, parameter):
    """The gradient under the names of published checkpoints: transformers joins experts when it loads them."""
    block, _, last = name.partition(".experts.")
    names = {"gate_up_proj": ["w1", "w3"], "down_proj": ["w2"]}
    if case != "mixtral":
        names = {"gate_up_proj": ["gate_proj", "up_proj"], "down_proj": ["down_proj"]}
    elif last or name.endswith("mlp.gate.weight"):
        name, block = (text.replace(".mlp", ".block_sparse_moe") for text in (name, block))
    if not last:
        yield name, parameter.grad
        return
    for expert, grad in enumerate(parameter.grad):
        for matrix, piece in zip(names[last], grad.chunk(len(names[last])), strict=True):
            yield f"{block}.experts.{expert}.{matrix}.weight", piece


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("case", ["llama_tied", "mistral", "qwen2", "qwen3", "gpt_neox", "gpt2"])
def test_packed_logits_equal_a_padded_batch_of_transformers(case, side, checkpoint):
    theirs, folder = checkpoint(case)
    tokens, positions = packed_inputs(LENGTHS)
    width = max(LENGTHS)
    batch, mask = torch.zeros(len(LENGTHS), width, dtype=torch.int64), torch.zeros(len(LENGTHS), width)
    for row, sequence in enumerate(tokens.split(LENGTHS)):
        where = slice(0, len(sequence)) if side == "right" else slice(width - len(sequence), width)
        batch[row, where], mask[row, where] = sequence, 1
    position_ids = (mask.cumsum(1) - 1).clamp(min=0).long()
    with torch.no_grad():
        padded = theirs(batch, attention_mask=mask, position_ids=position_ids).logits[mask.bool()]
        ours = packed_logits(load_model(folder), tokens, positions, LENGTHS)
    torch.testing.assert_close(ours, padded, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("case", ["llama_biased", "qwen3", "qwen3_moe_mixed", "mixtral", "gpt_neox", "gpt2"])
def test_gradients_equal_transformers(case, checkpoint):
    theirs, folder = checkpoint(case)
    ours = load_model(folder)
    tokens, positions = packed_inputs(LENGTHS)
    weights = torch.randn(sum(LENGTHS), VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    (packed_logits(ours, tokens, positions, LENGTHS).log_softmax(-1) * weights).sum().backward()
    theirs.zero_grad()
    for sequence, weight in zip(tokens.split(LENGTHS), weights.split(LENGTHS), strict=True):
        (theirs(sequence[None]).logits[0].log_softmax(-1) * weight).sum().backward()
    expected = {name: grad for parameter in theirs.named_parameters() for name, grad in published(case, *parameter)}
    for parameter in ours.parameters():  # the layout of weights is the layout of gradients
        parameter.data = parameter.grad
    got = {name.replace("embed_out.", "lm_head."): grad for name, grad in logical_tensors(ours).items()}
    assert got.keys() == expected.keys()
    for name, grad in got.items():
        torch.testing.assert_close(grad, expected[name], atol=TOLERANCE, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("case", CASES)
def test_parameters_are_as_many_as_transformers_counts(case, checkpoint):
    theirs, _ = checkpoint(case)
    assert num_parameters(config_from_hf(CASES[case].to_dict())) == theirs.num_parameters()


@pytest.mark.parametrize("case", CASES)
def test_config_round_trip(case):
    config = config_from_hf(CASES[case].to_dict())
    assert config_from_hf(config_to_hf(config)) == config


@pytest.mark.parametrize("case", [case for case in CASES if "gpt" not in case])
def test_heads_of_a_width_of_their_own_are_written(case):
    assert config_to_hf(config_from_hf(CASES[case].to_dict() | {"head_dim": 24}))["head_dim"] == 24


@pytest.mark.parametrize("case", CASES)
def test_a_written_config_has_all_fields_that_transformers_would_write(case):
    ours = config_to_hf(config_from_hf(CASES[case].to_dict()))
    theirs = type(CASES[case]).from_dict(ours).to_dict()  # it fills in what a file leaves out
    if case.startswith("qwen3_moe"):
        theirs["num_experts"] = theirs.pop("num_local_experts")
    written, full = (json.loads(json.dumps(hf)) for hf in (ours, theirs))
    for field in ("rope_theta", "rope_scaling", "rotary_emb_base", "rotary_pct"):  # the spelling of transformers 4
        written.pop(field, None)
    assert {k: v for k, v in written.items() if v is not None} == {k: v for k, v in full.items() if v not in (None, "")}
    assert written["architectures"] == [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[written["model_type"]]]


@pytest.mark.parametrize("case", [case for case in CASES if "gpt2" not in case])
def test_rotary_positions_are_written_as_older_files_have_them_too(case):
    """transformers 4 knows no `rope_parameters`, and would take 10,000 without scaling."""
    written = config_to_hf(dataclasses.replace(config_from_hf(CASES[case].to_dict()), rope_theta=5e5))
    older = {name: value for name, value in written.items() if name != "rope_parameters"}
    for hf in (written, older):
        read = type(CASES[case]).from_dict(json.loads(json.dumps(hf))).to_dict()
        assert read["rope_parameters"] == written["rope_parameters"]
        assert config_from_hf(hf).rope_theta == 5e5
    scaling = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 16
    assert written.get("rope_scaling") == (scaling if case == "llama3_rope" else None)
    if "neox" in case:
        assert (written["rotary_emb_base"], written["rotary_pct"]) == (5e5, 0.25)
    else:
        assert written["rope_theta"] == 5e5


def test_a_new_model_is_saved_without_transformers(tmp_path):
    script = f"""
import sys
from slipstream.core.sections import ModelConfig
from slipstream.models.hf import save_model
from slipstream.models.initialise import new_model
from slipstream.models.tokenizer import CharTokenizer
save_model(new_model(ModelConfig(), 99, seed=0), {str(tmp_path)!r}, CharTokenizer())
sys.exit("transformers" in sys.modules)"""
    subprocess.run([sys.executable, "-c", script], check=True)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.vocab_size == 99


def test_old_spellings_are_understood():
    llama = {
        "model_type": "llama",
        "rope_theta": 5e5,
        "num_attention_heads": 8,
        "hidden_size": 64,
        "eos_token_id": [1, 2],
    }
    config = config_from_hf(llama)
    assert (config.rope_theta, config.num_kv_heads, config.head_dim, config.eos_token_ids) == (5e5, 8, 8, (1, 2))
    assert config_from_hf({"model_type": "llama"}).eos_token_ids == (), "no default of a class ends completions"
    neox = config_from_hf({"model_type": "gpt_neox", "rotary_pct": 0.5, "rotary_emb_base": 5000})
    assert (neox.rotary_fraction, neox.rope_theta) == (0.5, 5000)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"model_type": "llama", "hidden_act": "tanh"}, "tanh"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "linear"),
        ({"model_type": "mistral"}, "sliding_window = 4096"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8}, "sliding_window = 8"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "GPT-2"),
        ({"model_type": "llama", "partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"model_type": "qwen3_moe", "rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
    ],
)
def test_what_we_would_get_wrong_is_refused(raw, message):
    with pytest.raises(ConfigError, match=message):
        config_from_hf(raw)


def test_biases_are_read_where_the_family_reads_them():
    """Layers of qwen2 always have biases of queries, keys and values, and those of mistral never."""
    for family, has_bias in (("qwen2", True), ("mistral", False), ("llama", None)):
        for said in (True, False):
            config = config_from_hf({"model_type": family, "attention_bias": said, "sliding_window": None})
            assert config.qkv_bias == (said if has_bias is None else has_bias)


@pytest.mark.parametrize("case", ["llama_tied", "mistral", "qwen3", "mixtral", "gpt2"])
def test_fields_of_another_family_change_nothing(case, checkpoint, tmp_path):
    """transformers passes them over: the layers of these families do not look at them."""
    _, folder = checkpoint(case)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    raw = json.loads((folder / "config.json").read_text()) | {"use_parallel_residual": True}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    tokens, positions = packed_inputs(LENGTHS)
    with torch.no_grad():
        ours = packed_logits(load_model(tmp_path), tokens, positions, LENGTHS)
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
        expected = torch.cat([theirs(sequence[None]).logits[0] for sequence in tokens.split(LENGTHS)])
    torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=0)


def test_a_window_longer_than_the_sequences_does_not_matter():
    config = config_from_hf({"model_type": "mistral"}, max_positions=4096)
    assert config.max_positions == 4096
    assert config == dataclasses.replace(
        config_from_hf({"model_type": "mistral", "sliding_window": None}), max_positions=4096
    )


def test_bf16_model_has_fp32_logits_close_to_fp32(checkpoint):
    _, folder = checkpoint("qwen3")
    tokens, positions = packed_inputs(LENGTHS)
    with torch.no_grad():
        full = packed_logits(load_model(folder), tokens, positions, LENGTHS)
        half = packed_logits(load_model(folder, dtype=torch.bfloat16), tokens, positions, LENGTHS)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, full, atol=0.15, rtol=0)
