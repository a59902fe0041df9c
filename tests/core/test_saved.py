"""Saved messages are read back unchanged, or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from slipstream.core import wire
from slipstream.core.errors import CheckpointError
from slipstream.core.saved import Saver, load_messages, rollouts_dir, save_messages, saved_partials, saved_rollouts
from slipstream.core.service_messages import Admit
from slipstream.core.types import Completion, Prompt, Rollout, Segment, VersionSpan
from slipstream.core.unfinished_messages import Partial

PROMPT = Prompt(
    prompt_id="p", text="3 + 4 =", tokens=np.arange(5, dtype=np.int32), task="sum", columns={"a": [1, None]}
)


def segment(seed: int, num_tokens: int, *, version: int = 1, has_kept: bool = False) -> Segment:
    generator = np.random.default_rng(seed)
    counts = generator.integers(1, 4, num_tokens, dtype=np.int32)
    return Segment(
        tokens=generator.integers(0, 99, num_tokens, dtype=np.int32),
        behaviour_logprobs=-generator.random(num_tokens, dtype=np.float32),
        version_spans=(VersionSpan(start=0, version=version),),
        kept_tokens=generator.integers(0, 99, counts.sum(), dtype=np.int32) if has_kept else None,
        kept_counts=counts if has_kept else None,
    )


def rollout(ordinal: int, sample: int, *, version: int = 1) -> Rollout:
    one = segment(ordinal * 10 + sample, 3 + sample, version=version, has_kept=sample % 2 == 1)
    completion = Completion(
        ordinal=ordinal, sample=sample, prompt=PROMPT, segments=(one,), text="é", finish_reason="stop"
    )
    return Rollout(completion=completion, reward=0.1 + sample / 3, reward_parts={"task": None}, scored_s=1e-9 / 3)


def partial(ordinal: int, sample: int, *, version: int = 1) -> Partial:
    return Partial(ordinal=ordinal, sample=sample, prompt_crc32=7, segment=segment(ordinal, 2, version=version))


def test_rollouts_and_partials_come_back_bit_for_bit(tmp_path: Path) -> None:
    """The oracle is their bytes on a channel, which other code makes."""
    rollouts = [rollout(ordinal, sample) for ordinal in range(3) for sample in range(4)]
    save_messages(tmp_path / "a.safetensors", rollouts, cut="one")
    found = load_messages(tmp_path / "a.safetensors", Rollout, cut="one")
    assert [wire.encode(each) for each in found] == [wire.encode(each) for each in rollouts]
    partials = [partial(4, 0), partial(4, 1)]
    save_messages(tmp_path / "b.safetensors", partials, cut="one")
    found_partials = load_messages(tmp_path / "b.safetensors", Partial, cut="one")
    assert [wire.encode(each) for each in found_partials] == [wire.encode(each) for each in partials]
    header = (tmp_path / "a.safetensors").read_bytes()
    size = int.from_bytes(header[:8], "little")
    assert json.loads(header[8 : 8 + size])["__metadata__"]["cut"] == "one", "safetensors, and JSON in its header"


def test_what_an_earlier_attempt_left_is_passed_over_without_a_word(tmp_path: Path) -> None:
    """Nothing waited when this one came to the checkpoint, or there is no such process now."""
    checkpoint, notes = tmp_path / "checkpoints" / "step_1", list[str]()
    folder = rollouts_dir(checkpoint)
    folder.parent.mkdir()
    save_messages(folder / "trainer.safetensors", [rollout(0, 0)], cut="one")
    save_messages(folder / "generator-0.safetensors", [partial(1, 0)], cut="one")
    save_messages(folder / "trainer.safetensors", [], cut="two")
    save_messages(folder / "generator-1.safetensors", [partial(1, 1)], cut="one")
    saver = Saver()
    for name in ("generator-0", "generator-2"):  # the second has no file
        saver.save(folder / f"{name}.safetensors", [], cut="two")
        saver.close()
    assert list(saved_rollouts(checkpoint, cut="two", owed=[0, 1], step=1, notes=notes)) == []
    assert saved_partials(checkpoint, cut="two", owed=[0, 1], step=1, notes=notes) == {}
    assert notes == []


def test_every_damaged_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_messages(path, [rollout(0, 1)], cut="one")
    whole = path.read_bytes()
    assert whole.count(b'"one"') == 1
    name_of_cut = range(at := whole.index(b'"one"') + 1, at + 3)
    for position in range(0, len(whole), 13):
        damaged = bytearray(whole)
        damaged[position] ^= 0x15
        path.write_bytes(damaged)
        try:
            found = load_messages(path, Rollout, cut="one")
        except CheckpointError:
            continue
        expected = [] if position in name_of_cut else [rollout(0, 1)]
        assert [wire.encode(each) for each in found] == [wire.encode(each) for each in expected], position
    for length in range(0, len(whole), 29):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="cannot be used"):
            load_messages(path, Rollout, cut="one")


def test_another_kind_is_refused_and_another_cut_has_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_messages(path, [partial(0, 0)], cut="one")
    assert load_messages(path, Partial, cut="two") == []
    with pytest.raises(CheckpointError, match="cannot be used"):
        load_messages(path, Rollout, cut="one")
    with pytest.raises(CheckpointError, match="cannot be used"):
        load_messages(tmp_path / "absent.safetensors", Rollout, cut="one")


def test_a_resume_takes_owed_groups_of_its_own_versions(tmp_path: Path) -> None:
    """The number of ranks and replicas does not matter; later versions belong to the abandoned continuation."""
    checkpoint = tmp_path / "step_5"
    folder = rollouts_dir(checkpoint)
    save_messages(folder / "trainer.safetensors", [rollout(0, 0), rollout(1, 0, version=5)], cut="one")
    save_messages(folder / "trainer@1.safetensors", [rollout(1, 1), rollout(2, 0, version=6)], cut="one")
    save_messages(folder / "trainer@2.safetensors", [rollout(1, 2)], cut="another")
    (folder / "trainer@3.safetensors").write_bytes(b"damaged")
    save_messages(folder / "generator-0.safetensors", [partial(1, 3), partial(2, 0, version=6)], cut="one")
    save_messages(folder / "generator-1.safetensors", [partial(0, 3), partial(2, 1, version=5)], cut="one")
    notes: list[str] = []
    taken = saved_rollouts(checkpoint, cut="one", owed=[1, 2], step=5, notes=notes)
    assert [(each.ordinal, each.sample) for each in taken] == [(1, 0), (1, 1)]
    assert len(notes) == 1
    assert "trainer@3" in notes[0]
    partials = saved_partials(checkpoint, cut="one", owed=[1, 2], step=5, notes=notes)
    assert {ordinal: [each.sample for each in found] for ordinal, found in partials.items()} == {1: [3], 2: [1]}


def test_a_group_has_as_many_partials_as_a_message_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fits; put together for an admission they may not."""
    routes = np.zeros((100, 10, 10), dtype=np.int16)
    large = [
        msgspec.structs.replace(one, segment=msgspec.structs.replace(one.segment, routes=routes))
        for one in (partial(1, sample) for sample in range(4))
    ]
    checkpoint = tmp_path / "step_5"
    save_messages(rollouts_dir(checkpoint) / "generator-0.safetensors", [*large, partial(2, 0)], cut="one")
    monkeypatch.setattr("slipstream.core.saved.GROUP_BYTES", 3 * routes.nbytes)
    notes: list[str] = []
    found = saved_partials(checkpoint, cut="one", owed=[1, 2], step=5, notes=notes)
    assert {ordinal: [each.sample for each in partials] for ordinal, partials in found.items()} == {1: [0, 1], 2: [0]}
    assert notes == ["2 completions are sampled again: a message holds no more of their groups"]
    admit = Admit(ordinal=1, replica=0, prompt=PROMPT, num_samples=4, partials=found[1], is_again=True)
    assert len(wire.encode(admit)) < 3 * routes.nbytes
