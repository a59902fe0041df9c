"""The stage `dpo`: preferences in, a Hugging Face checkpoint of the policy out."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slipstream.batching import collate
from slipstream.core.config import RunConfig
from slipstream.core.jsonl import JsonlWriter
from slipstream.models.build import build_policy
from slipstream.models.hf import load_model, save_model
from slipstream.stages.preference_data import read_pairs
from slipstream.stages.progress import StageProgress, StageTimes, fresh_folder, recent_mean, write_record
from slipstream.trainer.alone import Alone
from slipstream.trainer.dpo import (
    PreferenceMeasure,
    dpo_updates,
    measure_preferences,
    preference_data,
    preference_loss,
)
from slipstream.trainer.metric_names import dpo_names


def run_dpo(config: RunConfig, run_dir: Path, progress: StageProgress) -> dict[str, Any]:
    """Train on the preferences of `config.dpo`; writes `dpo/model`, `dpo/metrics.jsonl` and `dpo/stage.json`."""
    times, dpo = StageTimes(), config.dpo
    reading: dict[str, Any] = {"microbatch_tokens": config.trainer.microbatch_tokens, "batching": collate}
    with times.span("start_up"):
        folder = fresh_folder(run_dir, "dpo")
        start = config.model.model_copy(update={"path": dpo.path or config.model.path})
        alone = Alone(config)
        made, tokenizer = build_policy(start, seed=config.seed)
        model, weights = alone.trained(made)
        reference = model if dpo.reference is None else alone.read(load_model(Path(dpo.reference)))
        most = min(model.config.max_positions, reference.config.max_positions)
        found = read_pairs(config, run_dir, tokenizer, max_positions=most)
        progress.note(f"preferences: {found}")
    with times.span("reference"):  # once: neither the data nor the reference changes
        shared = reading | {"loss": preference_loss(dpo), "others": found.train, "max_positions": most}
        train, held_out = (
            preference_data(part, reference, **shared) if part else None for part in (found.train, found.held_out)
        )
        del reference
    assert train is not None, "read_pairs refuses nothing to train on"

    def measured() -> PreferenceMeasure | None:
        with times.span("evaluate"):
            return None if held_out is None else measure_preferences(model, held_out, config=dpo, **reading)

    before = measured()
    total = dpo.steps or dpo.epochs * math.ceil(len(found.train) / dpo.batch_size)
    measures: list[PreferenceMeasure] = []
    with times.span("train"), closing(JsonlWriter(folder / "metrics.jsonl")) as metrics:
        for update in dpo_updates(model, train, config=dpo, seed=config.seed, **reading, **weights):
            line = asdict(update)
            line |= line.pop("measure")
            now = update.measure
            metrics.write(line | dpo_names(now.accuracy, now.margin, now.chosen_reward, now.rejected_reward))
            measures.append(now)
            shown = {"loss": now.loss, "accuracy": now.accuracy, "margin": now.margin}
            progress.phase("dpo", update.index + 1, total, shown)
        metrics.sync()
    after = measured()
    if before is not None and after is not None:
        progress.note(_change(before, after, len(found.held_out)))
    with times.span("export"):
        save_model(model, folder / "model", tokenizer)
    return write_record(
        run_dir,
        "dpo",
        times=times,
        device=str(alone.device),
        loss=dpo.loss,
        num_preferences=len(found.train),
        num_held_out=len(found.held_out),
        num_equal=found.num_equal,
        num_too_long=found.num_too_long,
        steps=total,
        first_loss=measures[0].loss,
        last_loss=recent_mean([one.loss for one in measures]),
        train_accuracy=recent_mean([one.accuracy for one in measures]),
        held_out=None if before is None or after is None else {"before": asdict(before), "after": asdict(after)},
    )


def _change(before: PreferenceMeasure, after: PreferenceMeasure, num_held_out: int) -> str:
    return (
        f"held-out loss {before.loss:.3f} -> {after.loss:.3f}, accuracy {before.accuracy:.3f} -> "
        f"{after.accuracy:.3f}, margin {before.margin:.3f} -> {after.margin:.3f} ({num_held_out} held out)"
    )
