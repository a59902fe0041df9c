"""Scalar models against transformers' sequence classifiers, and how their heads begin."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from hf_cases import CASES, VOCAB_SIZE
from safetensors.torch import load_file

from slipstream.core.errors import ConfigError
from slipstream.core.sections import ModelConfig
from slipstream.models.attention import PackedAttention
from slipstream.models.flat import FlatParameters
from slipstream.models.hf import load_model
from slipstream.models.initialise import new_model
from slipstream.models.scalar import (
    ScalarModel,
    initialise_head,
    load_scalar_model,
    new_scalar_model,
    save_scalar_model,
)
from slipstream.models.tokenizer import char_tokenizer

FAMILIES = ["llama_tied", "llama_biased", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gpt_neox", "gpt2"]
FAMILIES.append("gpt2_untied")
LENGTHS = [9, 1, 23, 14]
WIDE = {"hidden_size": 768, "intermediate_size": 8, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
TINY = {"hidden_size": 16, "intermediate_size": 24, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1}


@pytest.fixture(scope="session")
def classifier(tmp_path_factory):
    """classifier(case) -> (transformers sequence classifier, folder it was saved to), each made once."""
    made = {}
    transformers.utils.logging.disable_progress_bar()

    def make(case):
        if case not in made:
            torch.manual_seed(sorted(CASES).index(case))
            config = CASES[case].__class__.from_dict({**CASES[case].to_dict(), "num_labels": 1})
            model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.1 * torch.randn_like(parameter))
            folder = tmp_path_factory.mktemp(f"classifier_{case}")
            model.save_pretrained(folder)
            made[case] = model, folder
        return made[case]

    return make


def inputs(lengths=LENGTHS, seed=0):
    tokens = torch.randint(2, VOCAB_SIZE, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    return tokens, torch.cat([torch.arange(length) for length in lengths])


def last_values(model, lengths=LENGTHS):
    with torch.no_grad():
        values = model(*inputs(lengths), PackedAttention(lengths))
    return values[torch.tensor(lengths).cumsum(0) - 1]


def their_scores(model, side, lengths=LENGTHS):
    """Scores of one padded batch, positions counted over real tokens."""
    tokens, _ = inputs(lengths)
    batch, mask = torch.zeros(len(lengths), max(lengths), dtype=torch.int64), torch.zeros(len(lengths), max(lengths))
    for row, sequence in enumerate(tokens.split(lengths)):
        where = slice(0, len(sequence)) if side == "right" else slice(max(lengths) - len(sequence), None)
        batch[row, where], mask[row, where] = sequence, 1
    position_ids = (mask.cumsum(1) - 1).clamp(min=0).long()
    with torch.no_grad():
        return model(batch, attention_mask=mask, position_ids=position_ids).logits[:, 0]


def scalar(family="llama", *, head_init="reward", seed=0, **changes):
    backbone = new_model(ModelConfig(family=family, max_positions=64, **{**TINY, **changes}), VOCAB_SIZE, seed)
    return new_scalar_model(backbone, head_init=head_init, seed=seed)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("case", FAMILIES)
def test_packed_scores_equal_a_padded_batch_of_transformers(case, side, classifier):
    theirs, folder = classifier(case)
    torch.testing.assert_close(last_values(load_scalar_model(folder)), their_scores(theirs, side), atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", FAMILIES)
def test_transformers_loads_what_we_save_gain_and_bias_included(case, classifier, tmp_path):
    theirs, folder = classifier(case)
    ours = load_scalar_model(folder)
    with torch.no_grad():
        ours.gain.fill_(-2.5)
        ours.head.bias.fill_(0.5)
        ours.bias.fill_(4.0)
    save_scalar_model(ours, tmp_path)
    loaded, report = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is type(theirs)
    assert not any(report.values()), report
    assert loaded.config.num_labels == 1
    assert loaded.config.score_bias == 4.0 - 2.5 * 0.5
    scores = their_scores(loaded, "right")
    torch.testing.assert_close(scores, -2.5 * their_scores(theirs, "right"), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(last_values(ours), scores + loaded.config.score_bias, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt_neox", "gpt2"])
def test_scores_survive_a_round_trip(family, tmp_path):
    ours = scalar(family)
    with torch.no_grad():
        ours.gain.fill_(3.0)
        ours.bias.fill_(-0.1)
    save_scalar_model(ours, tmp_path)
    again = load_scalar_model(tmp_path)
    torch.testing.assert_close(last_values(again), last_values(ours), atol=1e-5, rtol=1e-5)
    assert again.config == ours.config
    assert (again.gain.item(), again.head.bias.item()) == (1.0, 0.0)


def test_the_bias_survives_transformers_saving(tmp_path):
    ours = scalar()
    with torch.no_grad():
        ours.bias.fill_(1.25)
    save_scalar_model(ours, tmp_path / "ours")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    torch.testing.assert_close(last_values(load_scalar_model(tmp_path / "theirs")), last_values(ours))


@pytest.mark.parametrize("case", FAMILIES)
def test_a_language_model_gets_a_fresh_head(case, checkpoint):
    _, folder = checkpoint(case)
    language_model = load_model(folder)
    copied = new_scalar_model(language_model, head_init="reward", seed=3)
    loaded = load_scalar_model(folder, head_init="reward", seed=3)
    assert torch.equal(last_values(copied), last_values(loaded))
    assert "backbone.head.weight" not in dict(loaded.named_parameters())
    with torch.no_grad():
        hidden = language_model(*inputs(), PackedAttention(LENGTHS))
        copied.backbone.embedding.weight.zero_()  # of the copy
        assert torch.equal(language_model(*inputs(), PackedAttention(LENGTHS)), hidden)
        expected = hidden[torch.tensor(LENGTHS).cumsum(0) - 1] @ loaded.head.weight[0]
    torch.testing.assert_close(last_values(loaded), expected, atol=1e-5, rtol=1e-5)


def test_a_language_model_is_no_scalar_model_unless_asked(checkpoint):
    _, folder = checkpoint("llama_tied")
    with pytest.raises(ConfigError, match="no scalar head"):
        load_scalar_model(folder)


def test_a_reward_head_is_drawn_with_the_published_scale():
    heads = torch.cat([scalar(head_init="reward", seed=seed, **WIDE).head.weight[0].detach() for seed in range(8)])
    assert heads.shape == (8 * 768,)
    assert heads.std() == pytest.approx(1 / 769**0.5, rel=0.03)
    assert abs(float(heads.mean())) < 3 / (769 * len(heads)) ** 0.5
    assert scalar().head.bias.item() == 0.0


def test_a_zero_head_gives_zero_everywhere_and_still_learns():
    model = scalar(head_init="zero")
    assert torch.equal(last_values(model), torch.zeros(len(LENGTHS)))
    model(*inputs(), PackedAttention(LENGTHS)).sum().backward()
    assert model.head.weight.grad.abs().sum() > 0


def test_a_head_depends_on_its_seed_alone():
    before = torch.random.get_rng_state()
    backbone = new_model(ModelConfig(**TINY), VOCAB_SIZE, seed=0)
    first, again, other = (new_scalar_model(backbone, head_init="reward", seed=seed).head.weight for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_gain_and_bias_scale_and_shift():
    model = scalar()
    values = last_values(model)
    with torch.no_grad():
        model.gain.fill_(2.0)
        model.head.bias.fill_(0.25)
        model.bias.fill_(-1.0)
    torch.testing.assert_close(last_values(model), 2 * (values + 0.25) - 1)
    initialise_head(model, "reward", 0)
    torch.testing.assert_close(last_values(model), values)


def test_one_flat_tensor_holds_all_that_decides_a_score():
    model, copy = scalar(tie_embeddings=False), ScalarModel(scalar().config)
    flat, other = FlatParameters(model), FlatParameters(copy)
    with torch.no_grad():
        model.gain.fill_(2.0)
        model.bias.fill_(7.0)
    assert flat.num_params == sum(parameter.numel() for parameter in model.parameters())
    other.flat.copy_(flat.flat)
    assert torch.equal(last_values(copy), last_values(model))


def test_every_parameter_gets_a_gradient():
    model = scalar(tie_embeddings=False)
    model(*inputs(), PackedAttention(LENGTHS)).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_half_precision_backbone_keeps_its_head_in_fp32(classifier, tmp_path):
    _, folder = classifier("qwen2")
    half = load_scalar_model(folder, dtype=torch.bfloat16)
    assert (half.backbone.embedding.weight.dtype, half.head.weight.dtype) == (torch.bfloat16, torch.float32)
    values = last_values(half)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, last_values(load_scalar_model(folder)), atol=0.1, rtol=0)
    save_scalar_model(half, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert (stored["score.weight"].dtype, stored["model.norm.weight"].dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(last_values(load_scalar_model(tmp_path, dtype=torch.bfloat16)), values)
    copy = new_scalar_model(half.backbone, head_init="reward", seed=0)
    assert (copy.backbone.embedding.weight.dtype, copy.head.weight.dtype) == (torch.bfloat16, torch.float32)


def test_sharded_scalar_checkpoints(classifier, tmp_path):
    theirs, folder = classifier("gpt_neox")
    ours = load_scalar_model(folder)
    save_scalar_model(ours, tmp_path, char_tokenizer(), max_shard_bytes=20_000)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
    assert torch.equal(last_values(load_scalar_model(tmp_path)), last_values(ours))
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    torch.testing.assert_close(their_scores(loaded, "left"), their_scores(theirs, "left"), atol=1e-4, rtol=0)
    save_scalar_model(ours, tmp_path)  # the shards of an earlier save must not shadow a later one
    assert [file.name for file in tmp_path.glob("model*")] == ["model.safetensors"]


@pytest.mark.parametrize("case", ["qwen3", "gpt2"])
def test_a_model_with_more_positions_than_are_wanted_is_read(case, classifier):
    """A critic's checkpoint may have more than the policy; learned ones are weights, and stay."""
    theirs, folder = classifier(case)
    ours = load_scalar_model(folder, max_positions=32)
    assert ours.config.max_positions == (64 if case == "gpt2" else 32)
    torch.testing.assert_close(last_values(ours), their_scores(theirs, "right"), atol=1e-4, rtol=0)


def test_a_padding_token_that_ends_sequences_is_left_out(tmp_path):
    """transformers would score the token before the end, and in silence."""
    backbone = new_model(ModelConfig(**TINY), VOCAB_SIZE, 0, eos_token_id=1, pad_token_id=1)
    ours = new_scalar_model(backbone, head_init="reward", seed=0)
    save_scalar_model(ours, tmp_path)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    tokens = torch.tensor([5, 6, 7, 1])
    with torch.no_grad():
        expected = ours(tokens, torch.arange(4), PackedAttention([4]))[-1]
        torch.testing.assert_close(theirs(tokens[None]).logits[0, 0], expected, atol=1e-5, rtol=0)
        with pytest.raises(ValueError, match="batch sizes"):
            theirs(tokens[None].expand(2, -1))


def test_classifiers_of_more_labels_and_bad_biases_are_refused(classifier, tmp_path):
    _, folder = classifier("llama_tied")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=3, ignore_mismatched_sizes=True
    )
    theirs.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"score.weight has shape \[3, 32\], not \[1, 32\]"):
        load_scalar_model(tmp_path)
    save_scalar_model(scalar(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "score_bias": "much"}))
    with pytest.raises(ConfigError, match="'much'"):
        load_scalar_model(tmp_path)


def test_missing_tensors_are_listed(classifier, tmp_path):
    _, folder = classifier("llama_tied")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(ConfigError, match=r"missing model.layers.2.*\n.*score.weight"):
        load_scalar_model(tmp_path)
