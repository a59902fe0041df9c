"""Adapters against PEFT: logits, losses and gradients of every family, files in both directions, merged models."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from covering import covering, with_slow
from hf_cases import CASES, oracle
from safetensors.torch import load_file, save_file
from test_families import LENGTHS, packed_inputs, packed_logits
from torch.overrides import TorchFunctionMode

from slipstream.core.errors import ConfigError
from slipstream.core.lora_section import LoraConfig
from slipstream.core.rank_group import RankGroup
from slipstream.core.recipes import resolve
from slipstream.core.sections import ModelConfig
from slipstream.models.build import build_tokenizer
from slipstream.models.flat import FlatParameters
from slipstream.models.hf import load_model, save_model
from slipstream.models.initialise import new_model
from slipstream.models.lora import (
    adapter_tensors,
    base_of,
    install,
    linear_layers,
    matrices,
    merged,
    shapes_of,
)
from slipstream.models.peft import ADAPTER_WEIGHTS, PREFIX, base_folder, read_adapter, save_adapter, with_adapters
from slipstream.models.shards import base_digest, local_parts
from slipstream.models.tensor_parallel import TensorParallel
from slipstream.models.tokenizer import CharTokenizer
from slipstream.models.transformer import rope_tables
from slipstream.stages.order import check_order

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # which peft asks transformers for
]
TOLERANCE = 1e-4
"""As for whole models in test_families.py: both sides compute norms, rotations and logits in float32."""
TARGETS = {
    "llama": (["q_proj", "v_proj"], ["k_proj", "o_proj", "up_proj"], "all-linear", ["gate_proj", "lm_head"]),
    "experts": (["q_proj", "v_proj"], ["k_proj"], ["q_proj", "k_proj", "v_proj", "o_proj"], ["o_proj", "lm_head"]),
    "gpt_neox": (["query_key_value"], ["dense", "dense_4h_to_h"], "all-linear", ["query_key_value", "lm_head"]),
    "gpt2": (["c_attn"], ["c_proj"], ["c_attn", "c_proj", "c_fc"], ["c_attn", "lm_head"]),
}
EMBEDDINGS = {"gpt_neox": "embed_in", "gpt2": "wte"}
"""Of the others `embed_tokens`."""
CONFIG = ModelConfig(hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2, num_kv_heads=1, max_positions=32)


def targets_of(case: str):
    """Targets of five adapters; of the last ones the embedding is one, tied or not, in one of them beside the head."""
    kind = "gpt_neox" if "neox" in case else "gpt2" if "gpt2" in case else "llama"
    kind = "experts" if "moe" in case or case == "mixtral" else kind
    own, embedding = TARGETS[kind], EMBEDDINGS.get(kind, "embed_tokens")
    return *own, [embedding, own[0][0]], [embedding, "lm_head"]


def wrapped(case: str, targets, **fields):
    """transformers' model of the case in PEFT's, with A and B away from their start."""
    import peft  # here, since it takes seconds, and each process of the tests imports every file

    torch.manual_seed(7)
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=targets, task_type="CAUSAL_LM", **fields)
    model = peft.get_peft_model(oracle(case), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape))
    return model


def ours_of(theirs, folder, tmp_path):
    """The same model here, by the files that PEFT writes."""
    theirs.peft_config["default"].base_model_name_or_path = str(folder)
    theirs.save_pretrained(tmp_path / "adapter")
    return load_model(tmp_path / "adapter")


def losses_and_gradients(ours, theirs):
    """(our loss, PEFT's), and by name in PEFT's files (our gradient, PEFT's), of one random objective."""
    tokens, positions = packed_inputs(LENGTHS)
    weights = torch.randn(sum(LENGTHS), ours.config.vocab_size, generator=torch.Generator().manual_seed(1))
    loss = (packed_logits(ours, tokens, positions, LENGTHS).log_softmax(-1) * weights).mean()
    loss.backward()
    expected = 0.0
    for sequence, weight in zip(tokens.split(LENGTHS), weights.split(LENGTHS), strict=True):
        part = (theirs(sequence[None]).logits[0].log_softmax(-1) * weight).sum() / weights.numel()
        part.backward()
        expected += part.item()
    trained = {name: parameter.grad for name, parameter in ours.named_parameters() if parameter.requires_grad}
    got = {PREFIX + tensor.name: tensor.read() for _, tensor in adapter_tensors(shapes_of(ours), trained)}
    gradients = {name.replace(".default", ""): p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    assert got.keys() == gradients.keys()
    return (loss.item(), expected), {name: (grad, gradients[name]) for name, grad in got.items()}


class InFloat64(TorchFunctionMode):
    """Where code asks for float32 it gets float64: both sides compute norms, rotations and logits in float32."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def wide(value):
            return torch.float64 if value is torch.float32 else value

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


@pytest.fixture
def in_float64():
    torch.set_default_dtype(torch.float64)
    with InFloat64():
        yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("case", "index"), covering(CASES, range(6)))
def test_losses_and_gradients_are_peft_s_in_float64(case, index, checkpoint, tmp_path, request):
    theirs = wrapped(case, targets_of(case)[index], use_rslora=index == 1)
    ours = ours_of(theirs, checkpoint(case)[1], tmp_path)
    request.getfixturevalue("in_float64")
    for module in theirs.double().modules():
        if hasattr(module, "inv_freq"):
            module.inv_freq = type(module)(module.config).inv_freq
    ours.double()
    if ours.config.rotary_dim:
        ours.cos, ours.signed_sin = rope_tables(ours.config)
    (loss, expected), gradients = losses_and_gradients(ours, theirs)
    assert loss == pytest.approx(expected, abs=1e-10)
    for name, (got, grad) in gradients.items():
        assert grad.abs().max() > 0
        assert got.dtype == torch.float64
        torch.testing.assert_close(got, grad, atol=1e-10, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("case", with_slow(list(CASES)[::4], [case for at, case in enumerate(CASES) if at % 4]))
def test_losses_and_gradients_are_peft_s_in_float32(case, checkpoint, tmp_path):
    theirs = wrapped(case, targets_of(case)[2])
    (loss, expected), gradients = losses_and_gradients(ours_of(theirs, checkpoint(case)[1], tmp_path), theirs)
    assert loss == pytest.approx(expected, abs=1e-6)
    for name, (got, grad) in gradients.items():
        torch.testing.assert_close(got, grad, atol=1e-6, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("case", "targets"),
    covering(
        ["llama_tied", "qwen2", "qwen3", "qwen3_moe", "gpt_neox", "gpt2", "gpt2_untied"],
        [
            [],
            ["lm_head"],
            ["down_proj", "c_proj", "dense"],
            ["embed_tokens", "embed_in", "wte"],
            ["embed_tokens", "embed_in", "wte", "lm_head"],
        ],
        times=2,
    ),
)
def test_peft_reads_what_is_written_here_and_a_merged_model_is_the_same(case, targets, checkpoint, tmp_path):
    import peft

    _, folder = checkpoint(case)
    names = {piece.target for fused in linear_layers(load_model(folder).config).values() for piece in fused.pieces}
    lora = LoraConfig(rank=2, targets=[target for target in targets if target in names], use_rslora=True)
    ours = with_adapters(load_model(folder), lora, seed=0)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if name.endswith((".b", "embedding.adapter.a")):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    save_adapter(ours, tmp_path / "adapter", base=folder, digest=base_digest(ours))
    theirs = peft.PeftModel.from_pretrained(oracle(case), tmp_path / "adapter")
    tokens, positions = packed_inputs([21])
    with torch.no_grad():
        got, expected = packed_logits(ours, tokens, positions, [21]), theirs(tokens[None]).logits[0]
        torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(
            packed_logits(load_model(tmp_path / "adapter"), tokens, positions, [21]), got, atol=0, rtol=0
        )
        save_model(merged(ours), tmp_path / "merged")
        again = packed_logits(load_model(tmp_path / "merged"), tokens, positions, [21])
    torch.testing.assert_close(again, got, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(got, packed_logits(base_of(ours), tokens, positions, [21]), atol=1e-3)


@pytest.mark.parametrize("case", ["llama_tied", "qwen3_moe", "gpt_neox", "gpt2"])
def test_adapters_in_bfloat16_are_peft_s_of_the_rounded_numbers(case, checkpoint, tmp_path):
    """Losses and gradients, of the files that are written here; they are of other numbers than those that are trained.

    The gradients are those of the rounded numbers: as if none had been rounded.
    """
    import peft

    _, folder = checkpoint(case)
    fields = {"rank": 3, "targets": [targets_of(case)[0][0], *targets_of(case)[5]]}
    ours = with_adapters(load_model(folder), LoraConfig(**fields, adapter_precision="bfloat16"), seed=0)
    exact = with_adapters(load_model(folder), LoraConfig(**fields), seed=0)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for (name, parameter), other in zip(ours.named_parameters(), exact.parameters(), strict=True):
            if ".adapter." in name:
                other.copy_(parameter.copy_(0.2 * torch.randn(parameter.shape, generator=draw)))
    save_adapter(ours, tmp_path / "adapter", base=folder, digest=base_digest(ours))
    assert {tensor.dtype for tensor in load_file(tmp_path / "adapter" / ADAPTER_WEIGHTS).values()} == {torch.bfloat16}
    theirs = peft.PeftModel.from_pretrained(oracle(case), tmp_path / "adapter", is_trainable=True)
    (loss, expected), gradients = losses_and_gradients(ours, theirs)
    assert loss == pytest.approx(expected, abs=1e-6)
    for name, (got, grad) in gradients.items():
        torch.testing.assert_close(got, grad, atol=1e-6, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")
    tokens, positions = packed_inputs([21])
    with torch.no_grad():
        got, unrounded, again, whole = (
            packed_logits(model, tokens, positions, [21])
            for model in (ours, exact, load_model(tmp_path / "adapter"), merged(ours))
        )
    assert torch.equal(got, again)
    torch.testing.assert_close(whole, got, atol=1e-5, rtol=1e-5)
    assert (got - unrounded).abs().max() > 1e-3


def adapted(seed: int = 0, **fields):
    model = new_model(CONFIG.model_copy(update=fields.pop("model", {})), vocab_size=11, seed=0)
    return with_adapters(model, LoraConfig(**({"rank": 2} | fields)), seed=seed)


def test_new_adapters_are_drawn_as_peft_does_from_their_names_and_leave_random_state_alone():
    state = torch.get_rng_state()
    other = adapted(targets=["v_proj", "down_proj", "lm_head", "embed_tokens"])
    model, third = adapted(), adapted(seed=1)
    assert torch.equal(state, torch.get_rng_state())
    tensors = [
        {tensor.name: tensor.read() for _, tensor in adapter_tensors(shapes_of(one), dict(one.named_parameters()))}
        for one in (model, other, third)
    ]
    for name, tensor in tensors[0].items():
        if name.endswith("lora_B.weight"):
            assert not tensor.any()
            continue
        bound = tensor.shape[1] ** -0.5
        assert 0.7 * bound < tensor.abs().max() <= bound
        assert not torch.equal(tensor, tensors[2][name])
        if name in tensors[1]:
            assert torch.equal(tensor, tensors[1][name]), "the same whatever else has an adapter"
    assert not tensors[1]["model.embed_tokens.lora_embedding_A"].any()
    assert 0.7 < tensors[1]["model.embed_tokens.lora_embedding_B"].std() < 1.4, "normal, as PEFT's"
    assert "lm_head.lora_A.weight" in tensors[1]
    assert "lm_head.lora_A.weight" not in tensors[0]


def test_a_fresh_adapter_changes_no_bit_and_the_base_has_no_gradients():
    model = adapted(targets=["q_proj", "down_proj", "lm_head", "embed_tokens"])
    tokens, positions = torch.arange(9) % 11, torch.arange(9)
    with torch.no_grad():
        expected = packed_logits(base_of(model), tokens, positions, [9])
        assert torch.equal(packed_logits(model, tokens, positions, [9]), expected)
    flat = FlatParameters(model)
    flat.zero_grad()
    packed_logits(model, tokens, positions, [9]).sum().backward()
    assert flat.num_params == 2 * (2 * 16 + 16 * 2 + 2 * 24 + 16 * 2) + 2 * (2 * 16 + 11 * 2)
    assert {name for name, p in model.named_parameters() if p.grad is not None} == set(flat.named_views())
    assert flat.grad.any()


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2"])
def test_the_boxes_of_adapters_are_every_number_once(family, rank):
    config = {"family": family, "num_kv_heads": 2}
    every = {piece.name for piece in matrices(new_model(CONFIG.model_copy(update=config), 11, 0).config)}
    model = adapted(rank=rank, model=config, targets=sorted(every))
    numbers, end = {}, 0
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            numbers[name] = torch.arange(end, end + parameter.numel()).view(parameter.shape)
            end += parameter.numel()
    seen = torch.cat([part.of(numbers[part.parameter]).flatten() for part in local_parts(model)])
    assert torch.equal(seen.sort().values, torch.arange(end))
    whole = {tensor.name: tensor.read() for _, tensor in adapter_tensors(shapes_of(model), numbers)}
    for part in local_parts(model):
        assert torch.equal(part.of(numbers[part.parameter]), whole[part.box.name][part.box.slices])


def test_the_same_bits_for_8_rows_and_for_40():
    """Decoding has other numbers of rows at every step, in multiples of 8."""
    model = adapted(model={"hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "num_kv_heads": 2}, rank=4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
        x = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
        for layer in (model.layers[0].qkv, model.layers[0].up):
            assert torch.equal(layer(x)[:8], layer(x[:8]))
            assert torch.equal(layer(x)[16:32], layer(x[16:32]))


# Refusals


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"rank": 2, "dropout": 0.1}, "without dropout"),
        ({"rank": 2, "path": "x"}, "brings its own"),
        ({"alpha": 3.0}, "need a rank"),
        ({"adapter_precision": "bfloat16"}, "need a rank"),
    ],
)
def test_fields_that_exclude_each_other(fields, told):
    with pytest.raises(ConfigError, match=told):
        resolve("quickstart", {"model": {"lora": fields}})


@pytest.mark.parametrize(
    ("tables", "told"),
    [
        ({"loss": {"advantages": "gae"}}, "loss.advantages = 'gae'"),
    ],
)
def test_what_does_not_go_together_yet(tables, told):
    with pytest.raises(ConfigError, match=told):
        resolve("quickstart", {"model": {"lora": {"rank": 2}}} | tables)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"targets": ["q_prj"]}, "did you mean 'q_proj'"),
        ({"targets": ["wpe"]}, "names no layer"),
        ({"targets": ["wte"]}, "embed_tokens"),
        ({"rank": 17}, r"1..16 \(hidden_size\)"),
    ],
)
def test_adapters_that_a_model_cannot_have(fields, told):
    with pytest.raises(ConfigError, match=told):
        adapted(**fields)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"ensure_weight_tying": True}, "ensure_weight_tying"),
        ({"alora_invocation_tokens": [5, 6]}, "alora_invocation_tokens"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora"),
        ({"arrow_config": {"top_k": 3}}, "arrow_config"),
        ({"kasa_config": {"beta": 0.1}}, "kasa_config"),
        ({"monteclora_config": {"num_samples": 8}}, "monteclora_config"),
        ({"peft_type": "IA3"}, "peft_type = IA3"),
        ({"r": 4}, "of rank 4"),
        ({"r": 0}, "out of range"),
    ],
)
def test_other_adapters_are_refused(fields, told, tmp_path):
    folder = saved(tmp_path)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    with pytest.raises(ConfigError, match=told):
        load_model(folder)


def saved(tmp_path, base="base", **fields):
    model = adapted(**fields)
    save_model(base_of(model), tmp_path / base)
    save_adapter(model, tmp_path / "adapter", base=tmp_path / base, digest=base_digest(model))
    return tmp_path / "adapter"


class OnGpu(torch.Tensor):
    """A tensor that stays off the host until it is asked to come, as one on CUDA does."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.numpy:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if func is torch.equal and not all(isinstance(one, OnGpu) for one in args):
            raise RuntimeError("Expected all tensors to be on the same device")
        found = super().__torch_function__(func, types, args, kwargs or {})
        comes = func is torch.Tensor.cpu or (func is torch.Tensor.to and type(args[1]) is torch.Tensor)
        return found.as_subclass(torch.Tensor) if comes else found


def put(model, device):
    """`model` on a device, or in tensors that say so."""
    if device == "cuda":
        return model.cuda()
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(parameter.detach().as_subclass(OnGpu)))
    return model


@pytest.mark.parametrize("device", ["make believe", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_adapters_are_written_and_read_where_the_model_is_on_a_gpu(tmp_path, device):
    """With what PEFT writes beside them: copies of the base's weights."""
    fields = {"targets": ("q_proj", "lm_head"), "model": {"tie_embeddings": False}}
    folder = saved(tmp_path, **fields)
    there = put(adapted(**fields), device)
    save_adapter(there, tmp_path / "there", base=tmp_path / "base", digest=base_digest(there))
    assert (tmp_path / "there" / ADAPTER_WEIGHTS).read_bytes() == (folder / ADAPTER_WEIGHTS).read_bytes()
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    head = base_of(adapted(**fields)).head.weight.detach()
    save_file(tensors | {f"{PREFIX}lm_head.base_layer.weight": head}, folder / ADAPTER_WEIGHTS)
    read_adapter(there, folder)
    save_file(tensors | {f"{PREFIX}lm_head.base_layer.weight": head + 1}, folder / ADAPTER_WEIGHTS)
    with pytest.raises(ConfigError, match="brings weights of a base"):
        read_adapter(there, folder)


@pytest.mark.parametrize("device", ["make believe", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_digest_of_a_divided_base_is_taken_where_the_model_is_on_a_gpu(monkeypatch, device):
    monkeypatch.setattr(RankGroup, "gather", lambda self, payload: [payload, payload])  # a peer with the same numbers
    whole = adapted()
    parts = [install(TensorParallel(whole.config, 0, 2).new_model(), shapes_of(whole)) for _ in range(2)]
    for part in parts:
        for parameter in part.parameters():
            torch.nn.init.constant_(parameter, 0.5)
    assert base_digest(put(parts[0], device)) == base_digest(parts[1])


def test_an_adapter_of_another_base_is_refused(tmp_path):
    folder = saved(tmp_path)
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    other = new_model(CONFIG, vocab_size=11, seed=1)
    with pytest.raises(ConfigError, match="beside another base"):
        with_adapters(other, LoraConfig(path=str(folder)), seed=0)
    save_file(tensors, folder / ADAPTER_WEIGHTS)  # as PEFT writes it: nothing says which base
    with_adapters(other, LoraConfig(path=str(folder)), seed=0)
    wider = new_model(CONFIG.model_copy(update={"intermediate_size": 32}), vocab_size=11, seed=0)
    with pytest.raises(ConfigError, match=r"mlp.gate_proj.lora_B.weight has shape"):
        with_adapters(wider, LoraConfig(path=str(folder)), seed=0)
    stray = {f"{PREFIX}model.layers.9.mlp.up_proj.lora_A.weight": torch.ones(2, 16)}
    save_file(tensors | stray, folder / ADAPTER_WEIGHTS)
    with pytest.raises(ConfigError, match=r"unexpected model.layers.9.mlp.up_proj.lora_A"):
        load_model(folder)


@pytest.mark.parametrize("base", ["base", "sft/model", "dpo/model"])
def test_a_base_that_moved_with_its_adapter_is_found(tmp_path, base):
    (tmp_path / "run").mkdir()
    saved(tmp_path / "run", base)
    (tmp_path / "run").rename(tmp_path / "moved")
    assert base_folder(tmp_path / "moved" / "adapter") == tmp_path / "moved" / base
    load_model(tmp_path / "moved" / "adapter")
    (tmp_path / "moved" / base).rename(tmp_path / "moved" / "gone")
    with pytest.raises(ConfigError, match="base of the adapter"):
        load_model(tmp_path / "moved" / "adapter")


def test_the_config_of_the_base_beside_an_adapter_makes_no_model_of_it(tmp_path):
    folder = saved(tmp_path)
    shutil.copy(tmp_path / "base" / "config.json", folder)
    assert shapes_of(load_model(folder))
    assert with_adapters(new_model(CONFIG, vocab_size=11, seed=0), LoraConfig(path=str(folder)), seed=0)
    shutil.copy(tmp_path / "base" / "model.safetensors", folder)
    assert not shapes_of(load_model(folder))


def test_the_tokenizer_of_an_adapter_to_go_on_from_is_the_policys(tmp_path):
    folder = saved(tmp_path)
    config = ModelConfig(path=str(tmp_path / "base"), lora=LoraConfig(path=str(folder)))
    CharTokenizer().save_pretrained(tmp_path / "base")
    assert build_tokenizer(config).chat_template is None
    CharTokenizer().save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    assert build_tokenizer(config).chat_template == "{{ messages[0]['content'] }}"


@pytest.mark.parametrize("stages", [["sft"], ["preferences", "dpo"]])
def test_adapters_without_the_stage_that_trains_them_are_refused(stages):
    tables = {"stages": stages, "model": {"lora": {"rank": 2}}}
    with pytest.raises(ConfigError, match="trained by the stage rl alone"):
        check_order(resolve("quickstart", tables))


def test_a_model_with_adapters_is_not_saved_as_one_without(tmp_path):
    with pytest.raises(ConfigError, match="no checkpoint of a model"):
        save_model(adapted(), tmp_path / "model")
    assert not (tmp_path / "model").exists()
