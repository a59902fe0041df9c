"""What vLLM is started with, and the folder of its pushes."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from slipstream.core.errors import WeightSyncError
from slipstream.core.scratch import cleanup, file_prefix
from slipstream.core.sections import ModelConfig
from slipstream.generator.vllm.folder import WeightFolder, save_base
from slipstream.models.hf import load_model
from slipstream.models.initialise import new_model
from slipstream.models.transformer import Transformer

READ_ONLY = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
READ_ONLY += ['mount -t tmpfs -o ro none /dev/shm && exec "$@"', "sh"]
BOTH = """
from pathlib import Path
from slipstream.generator.vllm.folder import WeightFolder
from slipstream.weight_sync.segment import SharedMemory
folder, slots = WeightFolder(1 << 10, Path.touch), SharedMemory("read-only").create(100, 1)
print(folder.path.parent, Path(slots.name).parent)
folder.close()
slots.close()
"""


def fresh(family: str, *, tied: bool) -> Transformer:
    config = ModelConfig(
        family=family,  # type: ignore[arg-type]
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        max_positions=32,
        tie_embeddings=tied,
    )
    return new_model(config, vocab_size=40, seed=3, eos_token_id=1, pad_token_id=0)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt_neox", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_becomes_one_of_its_own(family: str, tied: bool, tmp_path: Path) -> None:
    """transformers reads the same model from it, with a head that is stored."""
    from transformers import AutoModelForCausalLM

    model = fresh(family, tied=tied)
    save_base(model, tmp_path / "checkpoint", "float32")
    loaded = load_model(tmp_path / "checkpoint")
    assert not loaded.config.tie_embeddings
    assert torch.equal(loaded.head.weight, model.embedding.weight if tied else model.head.weight)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint").eval()
    tokens = torch.arange(10)
    with torch.no_grad():
        expected = torch.log_softmax(theirs(tokens[None]).logits[0], -1)
    from slipstream.algorithms.logprobs import probe_logprobs

    ours = torch.from_numpy(probe_logprobs(model, tokens.numpy()))
    torch.testing.assert_close(ours, expected[:-1].gather(1, tokens[1:, None])[:, 0], atol=1e-5, rtol=0)


def test_a_checkpoint_is_there_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh("llama", tied=True)
    folder = WeightFolder(1 << 20, partial(save_base, model, dtype="float32"))
    try:
        first, second = folder.write(0), folder.write(1)
        folder.keep_only([second])
        assert [path.name for path in folder.path.glob("push-*")] == ["push-1"]
        assert not first.exists()

        def full(*_: object, **__: object) -> None:
            raise OSError("no space left on device")

        monkeypatch.setattr("slipstream.models.hf.save_file", full)
        with pytest.raises(WeightSyncError, match="no space left"):
            folder.write(2)
        assert not (folder.path / "push-2").exists()
    finally:
        folder.close()
    assert not folder.path.exists()


def test_a_killed_runs_folder_is_removed_with_its_segments() -> None:
    prefix = file_prefix("folder-test")
    folder, other = (
        WeightFolder(1 << 20, Path.touch, prefix),
        WeightFolder(1 << 20, Path.touch, file_prefix("folder-test2")),
    )
    (folder.path / "unfinished").mkdir()
    assert cleanup("folder-test") == [folder.path]
    assert not folder.path.exists()
    assert other.path.exists()
    other.close()


def test_shared_memory_that_cannot_be_written_is_passed_over(tmp_path: Path) -> None:
    """By the folder, and by the segment that a trainer writes."""
    try:
        is_possible = subprocess.run([*READ_ONLY, "true"], capture_output=True, timeout=60).returncode == 0
    except OSError:
        is_possible = False
    if not is_possible:
        pytest.skip("this machine lets no user mount in a namespace of their own")
    command, environment = [*READ_ONLY, sys.executable, "-c", BOTH], os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == [str(tmp_path)] * 2, done.stderr


def test_weights_without_room_are_refused() -> None:
    with pytest.raises(WeightSyncError, match="no room"):
        WeightFolder(1 << 60, Path.touch)
