import os
import random

import numpy as np
import pytest
import torch
from training_data import load_checkpoint, make_groups, run_config, save_checkpoint, tiny_policy

from slipstream.batching import collate as batching
from slipstream.controller.ledger import read_cut
from slipstream.core.errors import CheckpointError, DiskError
from slipstream.models.flat import FlatParameters
from slipstream.models.transformer import Transformer
from slipstream.trainer.checkpoint_folder import checkpoint_path, newest_whole, prune_checkpoints, settle
from slipstream.trainer.optim import AdamW
from slipstream.trainer.step import train_on_batch

CONFIG = run_config(trainer={"optimizer": {"schedule": "linear", "warmup_updates": 2}})


def fresh(seed: int = 0) -> tuple[Transformer, FlatParameters, AdamW]:
    model, flat = tiny_policy(seed)
    return model, flat, AdamW(flat, CONFIG.trainer.optimizer, total_updates=8)


def train(model, optimizer, steps):
    for step in steps:
        train_on_batch(
            model, optimizer, make_groups(seed=step, version=step), config=CONFIG, step=step, batching=batching
        )


def test_resumed_equals_uninterrupted_bit_for_bit(tmp_path):
    model, flat, optimizer = fresh()
    train(model, optimizer, range(2))
    save_checkpoint(tmp_path / "step_2", (model, optimizer), step=2, extra={"cursor": 7})
    draws = torch.rand(3), np.random.rand(3), random.random()
    train(model, optimizer, range(2, 4))

    other_model, other_flat, other_optimizer = fresh(seed=1)
    restored = load_checkpoint(tmp_path / "step_2", (other_model, other_optimizer))
    assert (restored.step, restored.updates, restored.extra) == (2, {"policy": 2}, {"cursor": 7})
    assert torch.equal(torch.rand(3), draws[0])
    assert np.array_equal(np.random.rand(3), draws[1])
    assert random.random() == draws[2]
    train(other_model, other_optimizer, range(2, 4))
    assert torch.equal(flat.flat, other_flat.flat)
    assert optimizer.num_updates == other_optimizer.num_updates == 4
    for moment, views in optimizer.named_moments().items():
        for name, view in views.items():
            assert torch.equal(view, other_optimizer.named_moments()[moment][name])


def test_a_checkpoint_before_the_first_update(tmp_path):
    model, flat, optimizer = fresh()
    save_checkpoint(tmp_path / "step_0", (model, optimizer), step=0)
    other_model, other_flat, other_optimizer = fresh(seed=1)
    load_checkpoint(tmp_path / "step_0", (other_model, other_optimizer))
    assert torch.equal(flat.flat, other_flat.flat)
    assert other_optimizer.num_updates == 0


def test_a_checkpoint_of_a_run_that_dropped_millions_of_groups_is_read(tmp_path):
    """The list of eight million ordinals, as a text of that length."""
    model, _, optimizer = fresh()
    dropped = "1234567, " * 8_000_000
    schedule = {
        "next_ordinal": 0,
        "steps_done": 3,
        "dropped": [],
        "dropped_in_a_row": 0,
        "num_failed": 0,
        "readmit": [],
    }
    extra = {"schedule": schedule, "num_events": 1, "dropped": dropped}
    save_checkpoint(tmp_path / "step_3", (model, optimizer), step=3, extra=extra)
    assert load_checkpoint(tmp_path / "step_3", (model, optimizer)).extra["num_events"] == 1
    assert read_cut(tmp_path / "step_3").schedule.steps_done == 3


@pytest.mark.parametrize("damage", ["no manifest", "half a manifest", "cut file", "flipped bit", "missing file"])
def test_a_torn_checkpoint_falls_back_to_the_one_before(tmp_path, damage):
    model, flat, optimizer = fresh()
    save_checkpoint(checkpoint_path(tmp_path, 9), (model, optimizer), step=9)
    whole = flat.flat.clone()
    train(model, optimizer, range(1))
    torn = checkpoint_path(tmp_path, 10)
    save_checkpoint(torn, (model, optimizer), step=10)
    weights = torn / "rank_00000.safetensors"
    if damage == "no manifest":
        (torn / "manifest.json").unlink()
    elif damage == "half a manifest":
        text = (torn / "manifest.json").read_text()
        (torn / "manifest.json").write_text(text[: len(text) // 2])
    elif damage == "cut file":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "flipped bit":
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
    else:
        weights.unlink()
    before = flat.flat.clone()
    with pytest.raises(CheckpointError, match="torn"):
        load_checkpoint(torn, (model, optimizer))
    assert torch.equal(flat.flat, before)
    newest, [damage] = newest_whole(tmp_path)
    assert newest == tmp_path / "step_9"
    assert "step_10" in damage.what
    assert load_checkpoint(newest, (model, optimizer)).step == 9
    assert torch.equal(flat.flat, whole)


def test_an_interrupted_write_leaves_the_previous_checkpoint(tmp_path, monkeypatch):
    model, _, optimizer = fresh()
    path = tmp_path / "step_1"
    save_checkpoint(path, (model, optimizer), step=1)

    def out_of_space(*_args, **_kwargs):
        raise OSError("no space left")

    monkeypatch.setattr("slipstream.trainer.checkpoint_boxes.write_safetensors", out_of_space)
    with pytest.raises(DiskError, match="no space"):
        save_checkpoint(path, (model, optimizer), step=1)
    assert load_checkpoint(path, (model, optimizer)).step == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"], "what was begun of the new one has gone"


def test_saving_again_replaces_and_old_ones_go(tmp_path):
    model, _, optimizer = fresh()
    for step in (1, 2, 10, 10):
        save_checkpoint(checkpoint_path(tmp_path, step), (model, optimizer), step=step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_10", "step_2"]
    prune_checkpoints(tmp_path, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_10"]


def test_another_models_checkpoint_is_refused(tmp_path):
    model, _, optimizer = fresh()
    save_checkpoint(tmp_path / "step_1", (model, optimizer), step=1)
    model = torch.nn.Linear(2, 2)
    adamw = AdamW(FlatParameters(model), CONFIG.trainer.optimizer, total_updates=1)
    with pytest.raises(CheckpointError, match="another model"):
        load_checkpoint(tmp_path / "step_1", (model, adamw))


def test_nothing_to_load(tmp_path):
    assert newest_whole(tmp_path / "absent") == (None, [])


def test_the_only_whole_checkpoint_is_never_deleted_for_damaged_ones(tmp_path):
    model, _, optimizer = fresh()
    for step in (1, 2, 3, 4):
        save_checkpoint(checkpoint_path(tmp_path, step), (model, optimizer), step=step)
    (tmp_path / "step_4" / "index.json").unlink()
    (tmp_path / "step_3" / "rank_00000.safetensors").write_bytes(b"")
    (tmp_path / "step_4.rollouts").mkdir()
    (tmp_path / "step_1.rollouts").mkdir()
    prune_checkpoints(tmp_path, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_2", "step_3", "step_4", "step_4.rollouts"]
    newest, damages = settle(tmp_path)
    assert newest == tmp_path / "step_2"
    assert ["index.json" in str(damages[0]), "rank_00000" in str(damages[1])] == [True, True]
    names = sorted(path.name for path in tmp_path.iterdir() if "rollouts" not in path.name)
    assert names == [".step_3.damaged", ".step_4.damaged", "step_2"]


def test_a_damaged_one_is_kept_until_its_step_is_saved_again(tmp_path):
    model, _, optimizer = fresh()
    for step in (1, 2, 3):
        save_checkpoint(checkpoint_path(tmp_path, step), (model, optimizer), step=step)
        if step > 1:
            (tmp_path / f"step_{step}" / "rank_00000.safetensors").write_bytes(b"")
    settle(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".step_2.damaged", ".step_3.damaged", "step_1"]
    save_checkpoint(checkpoint_path(tmp_path, 2), (model, optimizer), step=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".step_3.damaged", "step_1", "step_2"]
    save_checkpoint(checkpoint_path(tmp_path, 4), (model, optimizer), step=4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1", "step_2", "step_4"]


def sparse(path):
    with path.open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize("name", ["manifest.json", "rank_00000.safetensors"])
@pytest.mark.parametrize(
    "make", [os.mkfifo, sparse, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "terabyte", "device"]
)
def test_what_is_endless_is_torn_and_not_read(make, name, tmp_path):
    model, _, optimizer = fresh()
    path = checkpoint_path(tmp_path, 1)
    save_checkpoint(path, (model, optimizer), step=1)
    (path / name).unlink()
    make(path / name)
    newest, [damage] = newest_whole(tmp_path)
    assert newest is None
    assert name in str(damage) or "manifest" in str(damage)


def test_a_replacement_that_was_cut_off_between_its_renames_is_undone(tmp_path):
    model, _, optimizer = fresh()
    save_checkpoint(tmp_path / "step_1", (model, optimizer), step=1)
    (tmp_path / "step_1").rename(tmp_path / ".step_1.replaced")
    assert newest_whole(tmp_path) == (tmp_path / "step_1", [])
