"""Checkpoints and exports of several ranks: read by any other number of them, whole or not there."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import checkpoint_jobs as jobs
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rank_models import CONFIGS, LLAMA, whole_model
from rank_pool import RankPool
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slipstream.core.errors import CheckpointError, ShapeError
from slipstream.core.rank_group import RankGroup
from slipstream.core.training_sections import OptimizerConfig
from slipstream.models.flat import FlatParameters
from slipstream.models.hf import load_model, logical_tensors, save_model
from slipstream.models.inventory import Held, givers
from slipstream.models.scalar import ScalarModel
from slipstream.models.shards import Box, Shard
from slipstream.models.transformer import Transformer
from slipstream.trainer.checkpoint import load_checkpoint, save_checkpoint
from slipstream.trainer.optim import FlatAdamW
from slipstream.trainer.sharded_checkpoint import MOMENTS, Saved, ShardedCheckpoints, load_on_one_rank, trained_parts

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)]
FAMILIES = sorted(CONFIGS)
PAIRS = list(itertools.product(LAYOUTS, LAYOUTS))
folders = itertools.count()


@pytest.fixture(scope="module", autouse=True)
def groups(ranks: RankPool) -> None:
    ranks.run(jobs.make_groups, world=4)


def ranks_of(layout: jobs.Layout) -> int:
    return layout[0] * layout[1]


def round_trip(ranks: RankPool, path: Path, family: str, saved: jobs.Layout, loaded: jobs.Layout) -> None:
    config = CONFIGS[family]
    draws = ranks.run(jobs.save, config, saved, str(path), world=ranks_of(saved))
    outcomes = ranks.run(jobs.load, config, loaded, str(path), world=ranks_of(loaded))
    for rank, (wrong, drawn, step, updates, extra) in enumerate(outcomes):
        assert wrong == []
        assert (step, updates, extra) == (3, jobs.UPDATES, {"rank": 0, "cursor": 7})
        if rank < len(draws):
            assert drawn == draws[rank]


@pytest.mark.parametrize(
    ("number", "layouts"),
    [
        pytest.param(number, pair, marks=[] if number % 5 == 0 else pytest.mark.slow)
        for number, pair in enumerate(PAIRS)
    ],
    ids=str,
)
def test_what_any_ranks_saved_any_others_load(
    ranks: RankPool, tmp_path: Path, number: int, layouts: tuple[jobs.Layout, jobs.Layout]
) -> None:
    round_trip(ranks, tmp_path / "step_3", FAMILIES[number % len(FAMILIES)], *layouts)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(family=st.sampled_from(FAMILIES), saved=st.sampled_from(LAYOUTS), loaded=st.sampled_from(LAYOUTS))
def test_in_every_family(ranks: RankPool, tmp_path: Path, family: str, saved: jobs.Layout, loaded: jobs.Layout) -> None:
    round_trip(ranks, tmp_path / f"{next(folders)}" / "step_3", family, saved, loaded)


def test_a_critic_travels_along(ranks: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "step_3")
    ranks.run(jobs.save, LLAMA, (2, 2), path, True, world=4)
    for wrong, *_ in ranks.run(jobs.load, LLAMA, (2, 1), path, True, world=2):
        assert wrong == []


def test_files_are_of_about_one_size_and_hold_everything_once(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "step_3"
    ranks.run(jobs.save, LLAMA, (2, 2), str(path), world=4)
    tensors = [load_file(path / f"rank_{rank:05}.safetensors") for rank in range(4)]
    assert sorted(p.name for p in path.iterdir()) == sorted(
        ["index.json", "manifest.json", "state.json", *(f"rank_{rank:05}.safetensors" for rank in range(4))]
    )
    sizes = [sum(t.nbytes for name, t in held.items() if not name.startswith("random/")) for held in tensors]
    whole = 3 * sum(tensor.nbytes for tensor in logical_tensors(Transformer(LLAMA)).values())
    assert sum(sizes) == whole
    assert max(sizes) < 1.15 * whole / 4


# One CPU rank's own format


def flat(
    module: torch.nn.Module, name: str
) -> tuple[torch.nn.Module, FlatParameters, FlatAdamW, dict[str, torch.Tensor]]:
    parameters = FlatParameters(module)
    optimizer = FlatAdamW(module, parameters, OptimizerConfig(), total_updates=20)
    moments = {moment: torch.zeros(parameters.num_params) for moment in MOMENTS}
    jobs.filled(module, name, parameters.named_views())
    for moment, tensor in moments.items():
        jobs.filled(module, f"{name}.{moment}", parameters.views_of(tensor))
    return module, parameters, optimizer, moments


@pytest.mark.parametrize("layout", [(1, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2"])
def test_several_ranks_read_what_one_wrote(ranks: RankPool, tmp_path: Path, family: str, layout: jobs.Layout) -> None:
    trained = {}
    for name, module in (("policy", Transformer(CONFIGS[family])), ("critic", ScalarModel(CONFIGS[family]))):
        _, parameters, optimizer, moments = flat(module, name)
        optimizer.load_state_dict(moments | {"num_updates": torch.tensor(jobs.UPDATES[name])})
        trained[name] = parameters, optimizer
    path = tmp_path / "step_3"
    save_checkpoint(path, *trained["policy"], step=3, critic=trained["critic"], extra={"cursor": 7})
    outcomes = ranks.run(jobs.load, CONFIGS[family], layout, str(path), True, world=ranks_of(layout))
    for wrong, _, step, updates, extra in outcomes:
        assert (wrong, step, updates, extra) == ([], 3, jobs.UPDATES, {"cursor": 7})


@pytest.mark.parametrize("layout", [(2, 2), (4, 1)])
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2"])
def test_one_rank_reads_what_several_wrote(ranks: RankPool, tmp_path: Path, family: str, layout: jobs.Layout) -> None:
    path = tmp_path / "step_3"
    ranks.run(jobs.save, CONFIGS[family], layout, str(path), True, world=ranks_of(layout))
    fresh, expected = {}, {}
    for name, kind in (("policy", Transformer), ("critic", ScalarModel)):
        _, expected[name], _, moments = flat(kind(CONFIGS[family]), name)
        expected[f"{name}.moments"] = moments
        module = kind(CONFIGS[family])
        parameters = FlatParameters(module)
        fresh[name] = module, parameters, FlatAdamW(module, parameters, OptimizerConfig(), total_updates=20)
    restored = load_on_one_rank(path, fresh["policy"], fresh["critic"])
    assert (restored.step, restored.num_updates, restored.updates) == (3, 12, jobs.UPDATES)
    for name, (_, parameters, optimizer) in fresh.items():
        assert torch.equal(parameters.flat, expected[name].flat)
        state = optimizer.state_dict()
        assert int(state["num_updates"]) == jobs.UPDATES[name]
        assert all(torch.equal(state[moment], expected[f"{name}.moments"][moment]) for moment in MOMENTS)


def test_a_head_on_the_policys_states_is_saved_by_one_rank_alone(tmp_path: Path) -> None:
    trained = {}
    for name, module in (("policy", Transformer(LLAMA)), ("critic", torch.nn.Linear(32, 1))):
        trained[name] = flat(module, name)
    parts: dict[str, Sequence[Shard]] = {}
    for name, (module, parameters, _, moments) in trained.items():
        views = {moment: parameters.views_of(tensor) for moment, tensor in moments.items()}
        parts |= trained_parts(name, module, parameters.named_views(), views)
    alone = ShardedCheckpoints(RankGroup.alone())
    alone.save(tmp_path / "step_3", parts, step=3, updates=jobs.UPDATES)
    alone.close()
    assert alone.poll() == Saved(tmp_path / "step_3", 3)
    for _, parameters, _, moments in trained.values():
        for tensor in (parameters.flat, *moments.values()):
            tensor.zero_()
    assert jobs.wrong(parts)
    assert alone.load(tmp_path / "step_3", parts).updates == jobs.UPDATES
    assert jobs.wrong(parts) == []


def test_one_rank_reads_its_own_as_ever(tmp_path: Path) -> None:
    module, parameters, optimizer, _ = flat(Transformer(LLAMA), "policy")
    save_checkpoint(tmp_path / "step_1", parameters, optimizer, step=1)
    before = parameters.flat.clone()
    parameters.flat.zero_()
    assert load_on_one_rank(tmp_path / "step_1", (module, parameters, optimizer)).step == 1
    assert torch.equal(parameters.flat, before)


# What goes wrong


def test_what_changes_after_save_is_not_saved(ranks: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "step_3")
    ranks.run(jobs.change_while_saving, LLAMA, (2, 1), path, world=2)
    for wrong, *_ in ranks.run(jobs.load, LLAMA, (2, 1), path, world=2):
        assert wrong == []


def test_training_goes_on_while_ranks_save(ranks: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "step_3")
    for sums in ranks.run(jobs.collectives_while_saving, LLAMA, (2, 2), path, world=4):
        assert sums == [4.0 * number + 6.0 for number in range(3) for _ in range(20)]
    for wrong, *_ in ranks.run(jobs.load, LLAMA, (1, 1), path, world=1):
        assert wrong == []


def test_a_failed_save_is_told_by_the_next_call_and_leaves_the_others(ranks: RankPool, tmp_path: Path) -> None:
    for text, left in ranks.run(jobs.fail_once, LLAMA, (2, 1), str(tmp_path), world=2):
        assert "step_4 could not be saved" in text
        assert "rank 1: [Errno 28] No space left" in text
        assert left == ["step_3", "step_6"]


def test_killed_while_saving_leaves_the_one_before(ranks: RankPool, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    doomed = RankPool(2, tmp_path)
    try:
        doomed.run(jobs.make_groups, world=2)
        (status, text), died = doomed.outcomes(jobs.die_while_saving, LLAMA, (2, 1), str(root), world=2)
    finally:
        doomed.close()
    assert died == ("died", None)
    assert status == "failed"
    assert "CheckpointError" in text
    assert sorted(path.name for path in root.iterdir()) == ["step_3"], "who is left removes what was begun"
    for wrong, step in ranks.run(jobs.load_newest, LLAMA, (2, 2), str(root), world=4):
        assert (wrong, step) == ([], 3)
    ranks.run(jobs.save, LLAMA, (2, 1), str(root / "step_5"), world=2)
    assert sorted(path.name for path in root.iterdir()) == ["step_3", "step_5"]


@pytest.mark.parametrize("damage", ["no manifest", "cut file", "flipped bit", "missing file", "other index"])
def test_a_torn_checkpoint_is_passed_over_by_all_ranks(ranks: RankPool, tmp_path: Path, damage: str) -> None:
    for step in (3, 4):
        ranks.run(jobs.save, LLAMA, (2, 1), str(tmp_path / f"step_{step}"), world=2)
    file = tmp_path / "step_4" / "rank_00001.safetensors"
    if damage == "no manifest":
        (tmp_path / "step_4" / "manifest.json").unlink()
    elif damage == "cut file":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "flipped bit":
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    elif damage == "missing file":
        file.unlink()
    else:
        index = tmp_path / "step_4" / "index.json"
        index.write_text(index.read_text().replace("[0, [0", "[1, [0", 1))
    status, text = ranks.outcomes(jobs.load, LLAMA, (2, 2), str(tmp_path / "step_4"), world=4)[3]
    assert status == "failed"
    assert "torn" in text
    for wrong, step in ranks.run(jobs.load_newest, LLAMA, (1, 2), str(tmp_path), world=2):
        assert (wrong, step) == ([], 3)


@pytest.mark.parametrize(
    "other", [replace(LLAMA, num_layers=1), replace(LLAMA, num_layers=3), replace(LLAMA, intermediate_size=40)], ids=str
)
def test_another_model_is_refused_on_all_ranks(ranks: RankPool, tmp_path: Path, other: object) -> None:
    ranks.run(jobs.save, LLAMA, (2, 1), str(tmp_path / "step_3"), world=2)
    for status, text in ranks.outcomes(jobs.load_newest, other, (2, 1), str(tmp_path), world=2):
        assert status == "failed"
        assert "belongs to another model" in text


def test_one_rank_says_that_it_cannot_read_several_ranks_files_by_itself(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(jobs.save, LLAMA, (1, 1), str(tmp_path / "step_3"), world=1)
    _, parameters, optimizer, _ = flat(Transformer(LLAMA), "policy")
    with pytest.raises(CheckpointError, match="format"):
        load_checkpoint(tmp_path / "step_3", parameters, optimizer)


def test_there_is_no_pickle_in_it(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(jobs.save, LLAMA, (2, 1), str(tmp_path / "step_3"), world=2)
    for path in (tmp_path / "step_3").iterdir():
        if path.suffix == ".json":
            json.loads(path.read_text())
        else:
            load_file(path)


# Who gives what


@st.composite
def tilings(draw: st.DrawFn) -> list[list[Held]]:
    """A few tensors cut into grids, each box held by one rank or several."""
    world = draw(st.integers(1, 5))
    by_rank: list[list[Held]] = [[] for _ in range(world)]
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 7), min_size=0, max_size=3)))
        edges = [sorted(draw(st.sets(st.integers(0, size))) | {0, size}) for size in shape]
        for cell in itertools.product(*(itertools.pairwise(places) for places in edges)):
            start, stop = tuple(low for low, _ in cell), tuple(high for _, high in cell)
            held = Held(Box(f"t{number}", shape, start, stop), torch.float32)
            for rank in draw(st.sets(st.integers(0, world - 1), min_size=1)):
                by_rank[rank].append(held)
    return by_rank


@settings(max_examples=60, deadline=None)
@given(by_rank=tilings())
def test_every_box_is_given_once_by_a_rank_that_holds_it(by_rank: list[list[Held]]) -> None:
    chosen = givers(by_rank)
    assert set(chosen) == {held for one in by_rank for held in one}
    given_by = Counter(dict.fromkeys(range(len(by_rank)), 0))
    for held, rank in chosen.items():
        assert held in by_rank[rank]
        given_by[rank] += held.nbytes
    if all(set(one) == set(by_rank[0]) for one in by_rank):  # all hold all: about as much each
        assert max(given_by.values()) - min(given_by.values()) <= max(held.nbytes for held in chosen)


@pytest.mark.parametrize(
    "boxes",
    [[((0, 0), (2, 4))], [((0, 0), (3, 4)), ((2, 0), (4, 4))], [((0, 0), (4, 3)), ((0, 2), (4, 3)), ((0, 3), (1, 4))]],
    ids=["missing", "overlapping", "overlapping and missing"],
)
def test_boxes_that_do_not_make_up_a_tensor_are_refused(boxes: list[tuple[tuple[int, int], tuple[int, int]]]) -> None:
    held = [Held(Box("t", (4, 4), start, stop), torch.float32) for start, stop in boxes]
    with pytest.raises(ShapeError, match="make up t"):
        givers([held[:1], held[1:]])


# Export


@pytest.mark.parametrize(("number", "layout"), list(enumerate(LAYOUTS * 2)), ids=str)
def test_an_export_is_what_one_rank_would_have_written(
    ranks: RankPool, tmp_path: Path, number: int, layout: jobs.Layout
) -> None:
    config = CONFIGS[FAMILIES[number % len(FAMILIES)]]
    ranks.run(jobs.export, config, layout, str(tmp_path / "ours"), 5 * 1024**3, world=ranks_of(layout))
    expected = logical_tensors(whole_model(config))
    found = logical_tensors(load_model(tmp_path / "ours"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    save_model(whole_model(config), tmp_path / "theirs")
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "ours" / name).read_text() == (tmp_path / "theirs" / name).read_text()
    files = list((tmp_path / "ours").glob("model*.safetensors"))
    assert len(files) == ranks_of(layout)


@pytest.mark.parametrize("family", ["llama_tied", "gpt_neox", "gpt2"])
def test_transformers_loads_an_export(ranks: RankPool, tmp_path: Path, family: str) -> None:
    config = CONFIGS[family]
    ranks.run(jobs.export, config, (2, 2), str(tmp_path / "ours"), 8_000, world=4)
    assert len(list((tmp_path / "ours").glob("model-*.safetensors"))) > 4, "ranks split what is too large for a file"
    save_model(whole_model(config), tmp_path / "theirs")
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("ours", "theirs")]
    ours, theirs = (model.state_dict() for model in models)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(("layout", "bound"), [((4, 1), 1.3), ((2, 2), 1.6), ((1, 4), 2.1)])
def test_an_export_needs_little_more_than_the_largest_tensor(
    ranks: RankPool, tmp_path: Path, layout: jobs.Layout, bound: float
) -> None:
    config = replace(LLAMA, num_layers=8, hidden_size=256, head_dim=64, intermediate_size=512, vocab_size=1024)
    sizes = [tensor.nbytes for tensor in logical_tensors(Transformer(config)).values()]
    assert sum(sizes) > 16 * max(sizes)
    peaks = ranks.run(jobs.memory_of_export, config, layout, str(tmp_path), world=4)
    assert max(sizes) <= max(peaks) < bound * max(sizes) + 50_000


def test_who_cannot_write_an_export_tells_all(ranks: RankPool, tmp_path: Path) -> None:
    for status, text in ranks.outcomes(jobs.fail_to_export, LLAMA, (2, 1), str(tmp_path), world=2):
        assert status == "failed"
        assert "CheckpointError: the model could not be written" in text
        assert "rank 1: [Errno 2]" in text
    assert not (tmp_path / "model.safetensors.index.json").exists()
