"""Checkpoints and exports of several ranks: read by any other number of them, whole or not there."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import checkpoint_jobs as jobs
import pytest
import torch
from covering import with_slow
from drawn import drawn
from hypothesis import strategies as st
from rank_models import CONFIGS, LLAMA, whole_model
from rank_pool import RankPool
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from slipstream.core.errors import CheckpointError, ShapeError
from slipstream.core.lora_section import LoraConfig
from slipstream.models.config import TransformerConfig
from slipstream.models.hf import load_model, logical_tensors, save_model
from slipstream.models.inventory import Held, givers
from slipstream.models.scalar import ScalarModel
from slipstream.models.shards import Box
from slipstream.models.transformer import Transformer
from slipstream.trainer.checkpoint import Checkpoints, Saved, Trained, policy_shapes, trained_shards
from slipstream.trainer.checkpoint_boxes import random_state
from slipstream.trainer.checkpoint_folder import crc32

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)]
FAMILIES = sorted(CONFIGS)
PAIRS = list(itertools.product(LAYOUTS, LAYOUTS))
folders = itertools.count()


@pytest.fixture(scope="module", autouse=True)
def groups(ranks: RankPool) -> None:
    ranks.run(jobs.make_groups, world=4)


@pytest.fixture(scope="module")
def two_saved(ranks: RankPool, groups: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 3 and 4 of two ranks: to be copied by whoever changes them."""
    folder = tmp_path_factory.mktemp("two_saved")
    for step in (3, 4):
        ranks.run(jobs.save, LLAMA, (2, 1), str(folder / f"step_{step}"), world=2)
    return folder


def ranks_of(layout: jobs.Layout) -> int:
    return layout[0] * layout[1]


def round_trip(ranks: RankPool, path: Path, family: str, saved: jobs.Layout, loaded: jobs.Layout) -> None:
    config = CONFIGS[family]
    draws = ranks.run(jobs.save, config, saved, str(path), world=ranks_of(saved))
    outcomes = ranks.run(jobs.load, config, loaded, str(path), world=ranks_of(loaded))
    for rank, (wrong, numbers, step, updates, extra) in enumerate(outcomes):
        assert wrong == []
        assert (step, updates, extra) == (3, {"policy": jobs.UPDATES["policy"]}, {"rank": 0, "cursor": 7})
        if rank < len(draws):
            assert numbers == draws[rank]


@pytest.mark.parametrize(
    ("number", "layouts"),
    [
        pytest.param(number, pair, marks=[] if number in range(5, 35, 5) else pytest.mark.slow)
        for number, pair in enumerate(PAIRS)
    ],
    ids=str,
)
def test_what_any_ranks_saved_any_others_load(
    ranks: RankPool, tmp_path: Path, number: int, layouts: tuple[jobs.Layout, jobs.Layout]
) -> None:
    round_trip(ranks, tmp_path / "step_3", FAMILIES[number % len(FAMILIES)], *layouts)


@drawn(3, 30, family=st.sampled_from(FAMILIES), saved=st.sampled_from(LAYOUTS), loaded=st.sampled_from(LAYOUTS))
def test_in_every_family(ranks: RankPool, tmp_path: Path, family: str, saved: jobs.Layout, loaded: jobs.Layout) -> None:
    round_trip(ranks, tmp_path / f"{next(folders)}" / "step_3", family, saved, loaded)


@pytest.mark.slow
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


# One CPU rank, and the format that it wrote before


def alone(config: TransformerConfig, *, is_filled: bool) -> dict[str, Trained]:
    """A policy and a critic that are whole and stored flat."""
    trained = {"policy": jobs.trained_of(Transformer(config)), "critic": jobs.trained_of(ScalarModel(config))}
    for _, optimizer in trained.values():
        for view in optimizer.parameters.stored():
            view.fill_(float("nan"))
    if is_filled:
        jobs.fill(trained)
    return trained


def write_first_format(path: Path, trained: dict[str, Trained]) -> tuple[float, ...]:
    """Write a checkpoint as one CPU rank did in format 1; return what the random generators give next."""
    path.mkdir(parents=True)
    for name, (_, optimizer) in trained.items():
        weights = {n: view.detach().clone() for n, view in optimizer.parameters.named_views().items()}
        save_file(weights, path / f"{name}.safetensors")
        moments = {m: torch.cat([view.flatten() for view in v.values()]) for m, v in optimizer.named_moments().items()}
        file = "optimizer.safetensors" if name == "policy" else f"{name}_optimizer.safetensors"
        save_file({**moments, "num_updates": torch.tensor(optimizer.num_updates)}, path / file)
    tensors, generators = random_state()
    save_file(dict(tensors), path / "random.safetensors")
    updates = trained["policy"][1].num_updates
    state = {"step": 3, "num_updates": updates, "random": generators, "extra": {"cursor": 7}}
    (path / "state.json").write_text(json.dumps(state))
    files = {file.name: {"bytes": file.stat().st_size, "crc32": crc32(file)} for file in sorted(path.iterdir())}
    (path / "manifest.json").write_text(json.dumps({"format": 1, "step": 3, "files": files}))
    return jobs.draws()


FORMAT_FAMILIES = ["llama", "gpt_neox", "gpt2"]


def in_families(layouts: list[jobs.Layout | None], usual: list[tuple[str, jobs.Layout | None]]) -> list[Any]:
    """Every family with each of `layouts`; the pairs `usual` in every run of the tests, the others in the slow ones."""
    pairs = itertools.product(FORMAT_FAMILIES, layouts)
    return [pytest.param(*pair, marks=[] if pair in usual else [pytest.mark.slow]) for pair in pairs]


@pytest.mark.parametrize(("family", "layout"), in_families([(1, 1), (2, 2), (4, 1)], usual=[("gpt2", (2, 2))]))
def test_several_ranks_read_the_first_format(ranks: RankPool, tmp_path: Path, family: str, layout: jobs.Layout) -> None:
    path = tmp_path / "step_3"
    draws = write_first_format(path, alone(CONFIGS[family], is_filled=True))
    outcomes = ranks.run(jobs.load, CONFIGS[family], layout, str(path), True, world=ranks_of(layout))
    for rank, (wrong, numbers, step, updates, extra) in enumerate(outcomes):
        assert (wrong, step, updates, extra) == ([], 3, jobs.UPDATES, {"cursor": 7})
        assert (numbers == draws) == (rank == 0)


@pytest.mark.parametrize(
    ("family", "layout"), in_families([None, (2, 2), (4, 1)], usual=[("llama", None), ("gpt2", (2, 2))])
)
def test_one_rank_reads_the_first_format_and_several_ranks(
    ranks: RankPool, tmp_path: Path, family: str, layout: jobs.Layout | None
) -> None:
    path = tmp_path / "step_3"
    if layout is None:
        write_first_format(path, alone(CONFIGS[family], is_filled=True))
    else:
        ranks.run(jobs.save, CONFIGS[family], layout, str(path), True, world=ranks_of(layout))
    fresh = alone(CONFIGS[family], is_filled=False)
    assert jobs.wrong(fresh)
    with closing(Checkpoints()) as checkpoints:
        restored = checkpoints.load(path, fresh)
    assert (restored.step, restored.updates) == (3, jobs.UPDATES)
    assert jobs.wrong(fresh) == []


def test_a_first_format_of_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "step_3"
    trained = alone(LLAMA, is_filled=True)
    write_first_format(path, {"policy": trained["policy"]})
    with closing(Checkpoints()) as checkpoints:
        with pytest.raises(CheckpointError, match=r"(?s)another model.*critic\.safetensors"):
            checkpoints.load(path, trained)
        other = {"policy": jobs.trained_of(Transformer(replace(LLAMA, num_layers=1)))}
        with pytest.raises(CheckpointError, match="another model"):
            checkpoints.load(path, other)
    shapes = policy_shapes(path, replace(LLAMA, intermediate_size=40), LoraConfig())
    assert {name.split(".")[-2] for name in shapes} == {"up", "down"}
    assert policy_shapes(path, LLAMA, LoraConfig()) == {}


def test_a_head_on_the_policys_states_is_saved_by_one_rank_alone(tmp_path: Path) -> None:
    trained = alone(LLAMA, is_filled=True) | {"critic": jobs.trained_of(torch.nn.Linear(32, 1))}
    jobs.fill(trained)
    with closing(Checkpoints()) as checkpoints:
        checkpoints.save(tmp_path / "step_3", trained, step=3)
        assert checkpoints.poll() == Saved(tmp_path / "step_3", 3)
        for shard in trained_shards(trained):
            shard.view.zero_()
        assert jobs.wrong(trained)
        assert checkpoints.load(tmp_path / "step_3", trained).updates == jobs.UPDATES
    assert jobs.wrong(trained) == []
    assert policy_shapes(tmp_path / "step_3", LLAMA, LoraConfig()) == {}
    assert policy_shapes(tmp_path / "step_3", replace(LLAMA, num_layers=1), LoraConfig())


@pytest.mark.parametrize(
    ("old", "new"),
    [("[0, [0", "[7, [0"), ("[0, [0", '["../../x", [0'), ('"F32"', '"P32"'), ("[0, [0, 0]", "[0, [0]")],
    ids=["another file", "a path", "precision", "dimensions"],
)
def test_an_index_that_names_what_is_not_there_is_torn(tmp_path: Path, old: str, new: str) -> None:
    path = tmp_path / "step_3"
    trained = alone(LLAMA, is_filled=True)
    with closing(Checkpoints()) as checkpoints:
        checkpoints.save(path, trained, step=3)
        index = path / "index.json"
        text = index.read_text()
        assert old in text
        index.write_text(text.replace(old, new, 1))
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["files"]["index.json"] = {"bytes": index.stat().st_size, "crc32": crc32(index)}
        (path / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(CheckpointError, match="torn"):
            checkpoints.load(path, trained)
    assert jobs.wrong(trained) == []


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
        assert "step_4 could not be written" in text
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
def test_a_torn_checkpoint_is_passed_over_by_all_ranks(
    ranks: RankPool, two_saved: Path, tmp_path: Path, damage: str
) -> None:
    copytree(two_saved, tmp_path, dirs_exist_ok=True)
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
def test_another_model_is_refused_on_all_ranks(ranks: RankPool, two_saved: Path, other: object) -> None:
    for status, text in ranks.outcomes(jobs.load_newest, other, (2, 1), str(two_saved), world=2):
        assert status == "failed"
        assert "belongs to another model" in text


def test_there_is_no_pickle_in_it(two_saved: Path) -> None:
    for path in (two_saved / "step_3").iterdir():
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


@drawn(25, 60, by_rank=tilings())
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


@pytest.mark.parametrize(("number", "layout"), with_slow(enumerate(LAYOUTS), enumerate(LAYOUTS, len(LAYOUTS))))
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


@pytest.mark.parametrize("family", with_slow(["gpt2"], ["llama_tied", "gpt_neox"]))
def test_transformers_loads_an_export(ranks: RankPool, tmp_path: Path, family: str) -> None:
    config = CONFIGS[family]
    ranks.run(jobs.export, config, (2, 2), str(tmp_path / "ours"), 8_000, world=4)
    assert len(list((tmp_path / "ours").glob("model-*.safetensors"))) > 4, "ranks split what is too large for a file"
    save_model(whole_model(config), tmp_path / "theirs")
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("ours", "theirs")]
    ours, theirs = (model.state_dict() for model in models)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(("layout", "bound"), with_slow([((2, 2), 1.6)], [((4, 1), 1.3), ((1, 4), 2.1)]))
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
        assert "DiskError: the model could not be written" in text
        assert "rank 1: [Errno 2]" in text
    assert not (tmp_path / "model.safetensors.index.json").exists()


def test_an_export_that_the_disk_of_one_rank_refuses_says_what_to_do(ranks: RankPool, tmp_path: Path) -> None:
    for status, text in ranks.outcomes(jobs.export_within_a_limit, LLAMA, (2, 1), str(tmp_path), world=2):
        assert status == "failed"
        assert "DiskError: the model could not be written" in text
        assert "rank 1: [Errno 27]" in text
        assert "`ulimit -f`); the run goes on with `--resume`" in text
