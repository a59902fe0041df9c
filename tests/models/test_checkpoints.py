"""Checkpoints in and out: transformers reads what we write, we read what it writes, and what is wrong is named."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from hf_cases import CASES, VOCAB_SIZE
from safetensors.torch import load_file, save_file

from slipstream.core.errors import ConfigError
from slipstream.core.sections import ModelConfig
from slipstream.models.attention import PackedAttention
from slipstream.models.config import MIXTURES
from slipstream.models.hf import load_model, logical_tensors, save_model
from slipstream.models.initialise import new_model
from slipstream.models.sharded import Division, load_sharded
from slipstream.models.tokenizer import CharTokenizer, char_tokenizer, load_tokenizer

TOKENS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
FRESH = {"hidden_size": 16, "intermediate_size": 24, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1}


def logits(model):
    with torch.no_grad():
        return model.logits(model(TOKENS, torch.arange(len(TOKENS)), PackedAttention([len(TOKENS)])))


def change_json(file, **fields):
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def their_logits(folder):
    with torch.no_grad():
        return transformers.AutoModelForCausalLM.from_pretrained(folder)(TOKENS[None]).logits[0]


@pytest.mark.parametrize("case", CASES)
def test_transformers_loads_what_we_save(case, checkpoint, tmp_path):
    theirs, folder = checkpoint(case)
    save_model(load_model(folder), tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(their_logits(tmp_path), theirs(TOKENS[None]).logits[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("case", ["llama_biased", "qwen3_moe_mixed", "mixtral", "gpt_neox", "gpt2"])
def test_logical_tensors_are_the_checkpoint(case, checkpoint):
    _, folder = checkpoint(case)
    stored = load_file(folder / "model.safetensors")
    ours = logical_tensors(load_model(folder))
    assert ours.keys() == stored.keys()
    assert all(torch.equal(ours[name], stored[name]) for name in stored)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gpt_neox", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_fresh_models_survive_transformers(family, tied, tmp_path):
    experts = {"num_experts": 4} if family in MIXTURES else {}
    config = ModelConfig(family=family, max_positions=32, tie_embeddings=tied, **FRESH, **experts)
    model = new_model(config, vocab_size=VOCAB_SIZE, seed=5, eos_token_id=1, pad_token_id=0)
    save_model(model, tmp_path, CharTokenizer("ab\n 7"))
    torch.testing.assert_close(their_logits(tmp_path), logits(model), atol=1e-5, rtol=0)
    assert load_model(tmp_path).config == model.config
    for _ in range(2):  # of a fresh model, and of one that goes on from it
        tokenizer = load_tokenizer(tmp_path)
        assert tokenizer.encode("b a\n7?<eos>", add_special_tokens=False) == [4, 6, 3, 5, 7, 2, 1]
        assert tokenizer.decode([4, 6, 3, 5, 7, 1]) == "b a\n7<eos>"
        tokenizer.save_pretrained(tmp_path)


def test_sharded_checkpoints_in_both_directions(checkpoint, tmp_path):
    theirs, folder = checkpoint("gpt_neox")
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    model = load_model(tmp_path / "theirs")
    assert torch.equal(logits(model), logits(load_model(folder)))
    save_model(model, tmp_path / "ours", max_shard_bytes=20_000)
    assert len(list((tmp_path / "ours").glob("model-*-of-*.safetensors"))) > 2
    torch.testing.assert_close(their_logits(tmp_path / "ours"), logits(model), atol=1e-5, rtol=0)
    save_model(model, tmp_path / "ours")  # the shards of an earlier save must not shadow a later one
    assert [file.name for file in (tmp_path / "ours").glob("model*")] == ["model.safetensors"]


def test_precision_of_files_and_models(checkpoint, tmp_path):
    _, folder = checkpoint("qwen2")
    half = load_model(folder, dtype=torch.bfloat16)
    save_model(half, tmp_path)
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    widened = load_model(tmp_path)
    assert widened.embedding.weight.dtype == torch.float32
    assert torch.equal(widened.embedding.weight, half.embedding.weight.float())
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16


def test_a_new_model_depends_on_its_seed_alone():
    config = ModelConfig(**FRESH)
    before = torch.random.get_rng_state()
    first, again, other = (new_model(config, vocab_size=7, seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embedding.weight"], other["embedding.weight"])


def test_initial_scales():
    config = ModelConfig(hidden_size=128, intermediate_size=256, num_layers=8, num_heads=4, num_kv_heads=4)
    state = new_model(config, vocab_size=99, seed=0).state_dict()
    assert state["layers.3.qkv.weight"].std() == pytest.approx(0.02, rel=0.05)
    assert state["layers.3.down.weight"].std() == pytest.approx(0.02 / 4, rel=0.05)
    assert (state["final_norm.weight"] == 1).all()


def test_end_tokens_and_tokenizer_travel(tmp_path):
    tokenizer = char_tokenizer()
    model = new_model(
        ModelConfig(**FRESH),
        vocab_size=len(tokenizer),
        seed=0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    save_model(model, tmp_path, tokenizer)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (theirs.generation_config.eos_token_id, theirs.generation_config.pad_token_id) == (1, 0)
    assert load_tokenizer(tmp_path).encode("ab") == tokenizer.encode("ab")
    assert load_model(tmp_path).config.eos_token_ids == (1,)


def test_generation_config_may_add_end_tokens(checkpoint, tmp_path):
    _, folder = checkpoint("llama_tied")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    assert load_model(tmp_path).config.eos_token_ids == (1, 7)


def test_old_buffers_and_copies_of_a_tied_head_are_ignored(checkpoint, tmp_path):
    _, folder = checkpoint("gpt_neox_sequential")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {
        "gpt_neox.layers.0.attention.bias": torch.ones(1),
        "gpt_neox.layers.0.attention.rotary_emb.inv_freq": torch.ones(1),
        "embed_out.weight": tensors["gpt_neox.embed_in.weight"].clone(),
    }
    save_file(tensors | extra, tmp_path / "model.safetensors")
    assert torch.equal(logits(load_model(tmp_path)), logits(load_model(folder)))


@pytest.mark.parametrize("case", ["qwen3", "gpt_neox_sequential", "gpt2"])
def test_a_head_that_is_no_copy_of_the_embedding_it_is_tied_to_is_refused(case, checkpoint, tmp_path):
    """transformers computes with such a head, whatever config.json says."""
    theirs, folder = checkpoint(case)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "embed_out.weight" if case.startswith("gpt_neox") else "lm_head.weight"
    head = theirs.get_input_embeddings().weight.detach().flip(0)
    save_file(tensors | {name: head}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert (their_logits(tmp_path) - their_logits(folder)).abs().max() > 1.0
    for load in (load_model, lambda path: load_sharded(path, Division())):
        with pytest.raises(ConfigError, match=f"{name}, which is not .*\n.*\n.*tie_word_embeddings = false"):
            load(tmp_path)
    change_json(tmp_path / "config.json", tie_word_embeddings=False)
    torch.testing.assert_close(logits(load_model(tmp_path)), their_logits(tmp_path), atol=1e-5, rtol=0)


def test_gpt2_without_its_prefix(checkpoint, tmp_path):
    _, folder = checkpoint("gpt2")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file(bare, tmp_path / "model.safetensors")
    assert torch.equal(logits(load_model(tmp_path)), logits(load_model(folder)))


def test_tensors_that_do_not_fit_are_listed(checkpoint, tmp_path):
    _, folder = checkpoint("llama_tied")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(3, 3)
    tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(1)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError) as error:
        load_model(tmp_path)
    for part in (
        "missing model.norm.weight",
        "q_proj.weight has shape [3, 3], not [32, 32]",
        "unexpected model.layers.9",
    ):
        assert part in str(error.value)


def test_folders_without_a_checkpoint(checkpoint, tmp_path):
    with pytest.raises(ConfigError, match="no model found"):
        load_model(tmp_path)
    with pytest.raises(ConfigError, match="no tokenizer found"):
        load_tokenizer(tmp_path)
    _, folder = checkpoint("llama_tied")
    shutil.copy(folder / "config.json", tmp_path)
    with pytest.raises(ConfigError, match="no weights found"):
        load_model(tmp_path)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="model-00001-of-00002"):
        load_model(tmp_path)
