"""Adapters on several ranks: a divided base, gradients, checkpoints and exports are those of one rank."""

from __future__ import annotations

import hashlib
from itertools import product
from pathlib import Path
from typing import Any

import lora_jobs
import numpy as np
import pytest
import torch
import training_jobs
from covering import covering, with_slow
from lora_jobs import adapted, scattered
from rank_models import CONFIGS, MIXTURE
from rank_pool import RankPool
from safetensors.torch import load_file, save_file
from sharded_jobs import Layout, assembled
from test_training import relative, require_same_training
from training_jobs import Span

from slipstream.core.fields import Precision
from slipstream.core.lora_section import LoraConfig
from slipstream.core.rank_group import RankGroup
from slipstream.core.sections import ModelConfig
from slipstream.models.build import build_tokenizer
from slipstream.models.config import TransformerConfig
from slipstream.models.hf import load_model, logical_tensors, save_model
from slipstream.models.initialise import initialise, new_model
from slipstream.models.lora import adapter_tensors, base_of, install, shapes_of
from slipstream.models.peft import PREFIX, save_adapter, with_adapters
from slipstream.models.shards import base_digest, local_shards
from slipstream.models.tensor_parallel import TensorParallel
from slipstream.models.transformer import Transformer

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]
LAYOUTS = {"dp2": Layout(2, 1), "dp4": Layout(4, 1), "tp2": Layout(1, 2), "tp4": Layout(1, 4), "dp2_tp2": Layout(2, 2)}
LAYOUTS["cp2_tp2"] = Layout(1, 2, context_parallel=2)
TRAINER = {"optimizer": {"lr": 2e-3, "max_grad_norm": 0.7}, "microbatch_tokens": 48, "minibatches": 2}
TARGETS = ["q_proj", "k_proj", "o_proj", "up_proj", "down_proj", "lm_head", "embed_tokens"]
SHAPE = {"hidden_size": 16, "intermediate_size": 24, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}


@torch.no_grad()
def products(model: Transformer) -> Transformer:
    """B A of every adapter where its layer has W, and zeros."""
    found = Transformer(model.config, model.ranks)
    weights, adapters = dict(found.named_parameters()), dict(model.named_parameters())
    for weight in weights.values():
        weight.zero_()
    for name, shape in shapes_of(model).items():
        down, up = adapters[f"{name}.adapter.a"].split(shape.rank), adapters[f"{name}.adapter.b"].split(shape.rows)
        weight = weights[f"{name}.weight"].t() if shape.looks_up else weights[f"{name}.weight"]
        for piece, a, b in zip(shape.pieces, down, up, strict=True):
            weight[piece.start : piece.start + len(b)] = b @ a
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base whose logits are far from uniform, and an adapter beside it."""
    folder = tmp_path_factory.mktemp("base")
    config = ModelConfig(**SHAPE, max_positions=64, tie_embeddings=True)
    tokenizer = build_tokenizer(config)
    base = new_model(config, len(tokenizer), 0)
    with torch.no_grad():
        for parameter in base.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(8.0)
    save_model(base, folder / "base", tokenizer)
    model = scattered(with_adapters(base, LoraConfig(rank=3, targets=TARGETS), seed=1))
    save_adapter(model, folder / "adapter", tokenizer, base=folder / "base", digest=base_digest(model))
    return folder / "base", folder / "adapter"


@pytest.fixture
def sections(folders: tuple[Path, Path]) -> dict[str, Any]:
    base, adapter = map(str, folders)
    return {"model": {"path": base, "lora": {"path": adapter}}, "trainer": TRAINER, "kl": {"coef": 0.1}}


@pytest.mark.parametrize(
    ("layout", "num_steps"), with_slow([("dp2", 3)], [(name, 20) for name in ("dp2", "dp2_tp2", "dp4", "tp2", "tp4")])
)
def test_steps_are_those_of_one_rank(ranks: RankPool, sections: dict[str, Any], layout: str, num_steps: int) -> None:
    if layout == "dp4":
        sections["trainer"] = TRAINER | {"recompute": True, "reduce_once": True}
    one = training_jobs.train_alone(sections, Span(num_steps))
    by_rank = ranks.run(training_jobs.train, sections, LAYOUTS[layout], Span(num_steps), world=LAYOUTS[layout].world)
    require_same_training(by_rank, one)
    assert all("kl_reference" in line for line in one.metrics)
    stored = load_file(Path(sections["model"]["lora"]["path"]) / "adapter_model.safetensors")
    assert {box.name for box, _ in one.weights} == {f"policy/{name.removeprefix(PREFIX)}" for name in stored}


@pytest.mark.parametrize(
    ("case", "layout"),
    with_slow(
        [("gpt2", "dp2_tp2"), ("qwen3_moe", "dp2"), ("qwen3", "cp2_tp2")],
        [
            *(("mistral", layout) for layout in ("tp4", "dp2", "tp2", "dp2_tp2")),
            *((case, layout) for case in ("qwen3", "gpt_neox") for layout in ("dp2", "tp2", "tp4", "dp2_tp2")),
            *(("gpt2", layout) for layout in ("dp2", "tp2", "tp4")),
        ],
    ),
)
def test_gradients_of_every_family_are_those_of_one_rank(ranks: RankPool, case: str, layout: str) -> None:
    """Of Mistral's single key-value head all tensor-parallel ranks have a copy, of which each knows its queries'."""
    config = MIXTURE if case == "qwen3_moe" else CONFIGS[case]
    norm, one = lora_jobs.gradient_alone(config)
    by_rank = ranks.run(lora_jobs.gradient, config, LAYOUTS[layout], world=LAYOUTS[layout].world)
    assert [found for found, _ in by_rank] == pytest.approx([norm] * LAYOUTS[layout].world, rel=1e-5)
    assert relative([gradient for _, gradient in by_rank], one) < 3e-6


@pytest.mark.parametrize(
    ("case", "layout", "precision"),
    with_slow(
        [("mistral", "tp4", "int8"), ("gpt2", "tp2", "bfloat16")],
        [
            *((case, layout, "bfloat16") for case in ("mistral", "qwen3", "gpt_neox") for layout in ("tp2", "tp4")),
            *((case, layout, "int8") for case in ("qwen3", "gpt_neox", "gpt2") for layout in ("tp2", "tp4")),
            ("mistral", "tp2", "int8"),
            ("gpt2", "tp4", "bfloat16"),
        ],
    ),
)
def test_gradients_beside_a_divided_rounded_base(ranks: RankPool, case: str, layout: str, precision: Precision) -> None:
    """Its numbers are those of one rank: scales of int8 are those of whole rows, also where a rank has some columns."""
    norm, one = lora_jobs.gradient_alone(CONFIGS[case], precision)
    exact, _ = lora_jobs.gradient_alone(CONFIGS[case])
    assert abs(norm / exact - 1) > 1e-5
    by_rank = ranks.run(lora_jobs.gradient, CONFIGS[case], LAYOUTS[layout], precision, world=LAYOUTS[layout].world)
    assert [found for found, _ in by_rank] == pytest.approx([norm] * LAYOUTS[layout].world, rel=1e-5)
    assert relative([gradient for _, gradient in by_rank], one) < 3e-6


@pytest.mark.parametrize("layout", [Layout(2, 1, precision="bfloat16"), Layout(1, 2, precision="bfloat16")], ids=str)
def test_gradients_beside_a_base_in_bfloat16(ranks: RankPool, layout: Layout) -> None:
    """As on GPUs: A and B are float32, and so are their gradients; products are bfloat16's, also theirs."""
    _, one = lora_jobs.gradient_alone(CONFIGS["qwen3"])
    by_rank = ranks.run(lora_jobs.gradient, CONFIGS["qwen3"], layout, world=2)
    assert {values.dtype for _, gradient in by_rank for _, values in gradient} == {np.dtype(np.float32)}
    assert 1e-4 < relative([gradient for _, gradient in by_rank], one) < 3e-2


def logits_of_peft(base: Path, adapter: Path) -> torch.Tensor:
    import peft
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    with torch.no_grad():
        found: torch.Tensor = peft.PeftModel.from_pretrained(model, adapter).eval()(lora_jobs.TOKENS[None]).logits[0]
    return found


@pytest.mark.parametrize(("asks_peft", "first"), with_slow([(False, "dp2")], [(True, "dp4")]))
def test_a_run_goes_on_where_it_was_saved_on_other_ranks(
    ranks: RankPool, sections: dict[str, Any], folders: tuple[Path, Path], tmp_path: Path, asks_peft: bool, first: str
) -> None:
    """PEFT reads what is exported, too; that it takes the files which are written here is in models/test_lora.py."""
    layouts = (first, "dp2_tp2")
    spans = [
        Span(1, save=tmp_path / "step_1"),
        Span(2, 1, tmp_path / "step_1", tmp_path / "step_2", tmp_path / layouts[0]),
        Span(3, 2, tmp_path / "step_2", tmp_path / "step_3", tmp_path / layouts[1]),
        Span(4, 3, tmp_path / "step_3"),
    ]
    training_jobs.train_alone(sections, spans[0])
    for span, name in zip(spans[1:3], layouts, strict=True):
        by_rank = ranks.run(training_jobs.train, sections, LAYOUTS[name], span, world=LAYOUTS[name].world)
        trained = assembled([seen.weights for seen in by_rank])
        exported = load_file(tmp_path / name / "adapter_model.safetensors")
        assert {f"policy/{key.removeprefix(PREFIX)}" for key in exported} == trained.keys()
        for key, tensor in exported.items():
            np.testing.assert_array_equal(tensor.numpy(), trained[f"policy/{key.removeprefix(PREFIX)}"])
        ours = lora_jobs.logits_of(load_model(tmp_path / name))
        if asks_peft:
            torch.testing.assert_close(ours, logits_of_peft(folders[0], tmp_path / name), atol=1e-4, rtol=1e-5)
    last = training_jobs.train_alone(sections, spans[3]).weights
    assert relative([last], training_jobs.train_alone(sections, Span(4)).weights) < 1e-5


@pytest.mark.parametrize(
    ("precision", "adapters"),
    with_slow([("int8", "bfloat16")], [("int8", "float32"), ("float32", "bfloat16"), ("bfloat16", "float32")]),
)
def test_a_rounded_base_or_adapter_on_data_parallel_ranks(
    ranks: RankPool, sections: dict[str, Any], precision: Precision, adapters: Precision, tmp_path: Path
) -> None:
    """A rounded base lies whole on each. Checkpoints have the adapters that are updated, exports what is served.

    Products with an int8 base round their inputs to bfloat16: inputs that differ in a bit may round apart, and do where
    adapters are not rounded, too.
    """
    sections["model"]["lora"] |= {"base_precision": precision, "adapter_precision": adapters}
    one = training_jobs.train_alone(sections, Span(3))
    first, then = Span(2, save=tmp_path / "step_2"), Span(3, 2, tmp_path / "step_2", export=tmp_path / "adapter")
    for seen in ranks.run(training_jobs.train, sections, LAYOUTS["dp2"], first, world=2):
        assert relative([seen.first_gradient], one.first_gradient) < 1e-5, "whole on every rank"
    by_rank = ranks.run(training_jobs.train, sections, LAYOUTS["dp2"], then, world=2)
    bound = 1e-4 if (precision, adapters) == ("int8", "float32") else 1e-5
    assert relative([seen.weights for seen in by_rank], one.weights) < bound
    exported = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    is_rounded = []
    for box, values in by_rank[1].weights:
        found = exported[PREFIX + box.name.removeprefix("policy/")]
        trained = torch.from_numpy(values)
        assert torch.equal(found, trained.to(found.dtype))
        is_rounded.append(not torch.equal(found.float(), trained))
    assert all(is_rounded) if adapters == "bfloat16" else not any(is_rounded)


@pytest.mark.parametrize("layout", with_slow(["dp2"], ["dp2_tp2"]))
def test_references_share_the_base_and_the_run_leaves_what_it_made(
    ranks: RankPool, layout: str, tmp_path: Path
) -> None:
    """The base is fresh; the reference is the base alone, or with the adapters in a folder."""
    config = ModelConfig(**SHAPE, max_positions=64, tie_embeddings=False, lora=LoraConfig(rank=3, targets=TARGETS))
    base = new_model(config, len(build_tokenizer(config)), 0)
    fresh = lora_jobs.logits_of(base)
    model = with_adapters(base, config.lora, seed=0)
    digest = base_digest(model)
    save_adapter(scattered(model), tmp_path / "adapter", base=None, digest=digest)
    other = lora_jobs.logits_of(model)
    trained = with_adapters(base_of(model), config.lora, seed=0)
    with torch.no_grad():
        for _, tensor in adapter_tensors(shapes_of(trained), dict(trained.named_parameters())):
            tensor.view.add_(0.1).add_(0.1)
    expected = {"fresh": fresh, "trained": lora_jobs.logits_of(trained)}
    expected |= {f"{name} {turn}": of for name, of in (("base", fresh), ("adapter", other)) for turn in range(2)}
    sections = {"model": config.model_dump()}
    args = sections, LAYOUTS[layout], str(tmp_path / "adapter"), str(tmp_path / "run" / "model")
    for seen in ranks.run(lora_jobs.references, *args, world=LAYOUTS[layout].world):
        assert seen.pop("digest") == digest
        assert seen.keys() == expected.keys()
        for name, logits in expected.items():
            torch.testing.assert_close(seen[name], logits, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    left = load_model(tmp_path / "run" / "model")  # beside a base of the same digest
    torch.testing.assert_close(lora_jobs.logits_of(left), expected["trained"], atol=1e-5, rtol=1e-5)
    for name, tensor in logical_tensors(base_of(left)).items():
        torch.testing.assert_close(tensor, logical_tensors(base_of(model))[name], atol=0, rtol=0)


DIGESTS = [("llama", "dp2"), ("gpt_neox", "tp2"), ("gpt2", "dp2_tp2")]


@pytest.mark.parametrize(
    ("case", "layout"),
    with_slow(
        DIGESTS,
        [pair for pair in product(["llama", "llama_biased", "gpt_neox", "gpt2"], LAYOUTS) if pair not in DIGESTS],
    ),
)
def test_the_digest_is_that_of_the_whole_base(ranks: RankPool, case: str, layout: str) -> None:
    config = CONFIGS[case]
    whole = Transformer(config)
    initialise(whole, 3)
    found = ranks.run(lora_jobs.digest, config, LAYOUTS[layout], world=LAYOUTS[layout].world)
    expected = hashlib.sha256()
    for name, parameter in whole.named_parameters():
        expected.update(f"{name} {list(parameter.shape)} torch.float32".encode() + parameter.detach().numpy().tobytes())
    assert {digest for digest, _ in found} == {expected.hexdigest()} == {base_digest(whole)}
    if LAYOUTS[layout].tensor_parallel == 1:
        assert sum(held for _, held in found) == sum(parameter.numel() for parameter in whole.parameters())


def test_another_base_is_refused_on_every_rank(ranks: RankPool, folders: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = folders
    expected = lora_jobs.logits_of(load_model(adapter))
    for logits in ranks.run(lora_jobs.load, str(adapter), LAYOUTS["dp2_tp2"], world=4):
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    for path in base.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"][-1] += 1e-3
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "adapter").mkdir()
    for path in adapter.iterdir():
        there = path.read_bytes().replace(str(base).encode(), str(tmp_path).encode())
        (tmp_path / "adapter" / path.name).write_bytes(there)
    for told in ranks.run(lora_jobs.load, str(tmp_path / "adapter"), LAYOUTS["dp2"], world=2):
        assert "beside another base" in told


@pytest.mark.parametrize(("world", "precision"), covering([2, 4], ["float32", "int8"]))
def test_a_generator_of_several_ranks_computes_what_one_does(
    ranks: RankPool, folders: tuple[Path, Path], world: int, precision: Precision
) -> None:
    """Scales of int8 are those of the base's whole rows."""
    whole = load_model(folders[1])
    exact = lora_jobs.logits_of(whole)
    expected = lora_jobs.served_logits(whole, precision, RankGroup.alone())
    assert ((expected - exact).abs().max() > 1e-2) == (precision == "int8")
    for logits in ranks.run(lora_jobs.served, str(folders[1]), precision, world=world):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("case", "world"), covering(CONFIGS, [2, 4]))
def test_what_a_rank_adds_is_its_part_of_what_one_adds(case: str, world: int) -> None:
    """s B A of a rank's adapters, in the checkpoint's boxes, is that of the whole ones: for every family's division."""
    config: TransformerConfig = CONFIGS[case]
    one = adapted(config, head=not config.tie_embeddings)
    whole = {tensor.name: tensor.read() for _, tensor in adapter_tensors(shapes_of(one), dict(one.named_parameters()))}
    added = {name: tensor for name, tensor in logical_tensors(products(one)).items() if tensor.any()}
    names = {name.partition(".lora_")[0] + ".weight" for name in whole}
    assert added.keys() == {name.replace("lm_head", "embed_out") if "neox" in case else name for name in names}
    numbers = dict.fromkeys(added, 0)
    for rank in range(world):
        model = install(TensorParallel(config, rank, world).new_model(), shapes_of(one))
        for shard in local_shards(model):
            shard.write(whole[shard.box.name][shard.box.slices])
        for shard in local_shards(products(model), of_base=True):
            if shard.box.name in added:
                torch.testing.assert_close(shard.view, added[shard.box.name][shard.box.slices], atol=1e-6, rtol=1e-5)
                numbers[shard.box.name] += shard.view.numel()
    assert all(numbers[name] >= tensor.numel() > 0 for name, tensor in added.items())
