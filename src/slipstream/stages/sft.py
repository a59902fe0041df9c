"""The stage `sft`: demonstrations in, a Hugging Face checkpoint out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.batching import collate
from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.jsonl import JsonlWriter
from slipstream.core.plain import shortened
from slipstream.core.stage_sections import WarmStartConfig
from slipstream.core.types import Prompt
from slipstream.models.build import build_policy
from slipstream.models.hf import save_model
from slipstream.models.tokenizer import Tokenizer
from slipstream.prompts import build_prompts, demonstrations
from slipstream.prompts.dataset import read_records, row_of, said_alone
from slipstream.prompts.template import Encoder, Template
from slipstream.stages.completions import split_by_prompt
from slipstream.stages.progress import StageProgress, StageTimes, fresh_folder, write_record
from slipstream.trainer.alone import Alone
from slipstream.trainer.metric_names import sft_names
from slipstream.trainer.optim import AdamW
from slipstream.trainer.reward_model import shuffled_batches
from slipstream.trainer.supervised import Demonstration, Prediction, measure_prediction, supervised_updates


def run_sft(config: RunConfig, run_dir: Path, progress: StageProgress) -> dict[str, Any]:
    """Train on the demonstrations of `config.sft`; writes `sft/model`, `sft/metrics.jsonl` and `sft/stage.json`."""
    times = StageTimes()
    sft = config.sft
    with times.span("start_up"):
        folder = fresh_folder(run_dir, "sft")
        alone = Alone(config)
        made, tokenizer = build_policy(config.sft_model, seed=config.seed)
        model, weights = alone.trained(made)
        found, num_too_long = stage_demonstrations(config, tokenizer)
    train, held_out, num_too_long = _split(found, num_too_long, config, model.config.max_positions, progress)
    steps = sft.steps or sft.epochs * math.ceil(len(train) / sft.batch_size)
    settings = WarmStartConfig(steps=steps, batch_size=sft.batch_size, optimizer=sft.optimizer)
    passes = None if sft.steps else shuffled_batches(len(train), sft.batch_size, config.seed)
    capacity = config.trainer.microbatch_tokens

    def prediction() -> Prediction | None:
        if not held_out:
            return None
        with times.span("evaluate"):
            return measure_prediction(model, held_out, microbatch_tokens=capacity, batching=collate)

    before = prediction()
    losses = []
    with times.span("train"), closing(JsonlWriter(folder / "metrics.jsonl")) as metrics:
        for update in supervised_updates(
            model,
            AdamW(config=settings.optimizer, total_updates=steps, **weights),
            train,
            config=settings,
            microbatch_tokens=capacity,
            seed=config.seed,
            batching=collate,
            batches=passes,
        ):
            metrics.write(asdict(update) | sft_names(loss=update.loss, lr=update.lr))
            losses.append(update.loss)
            progress.phase("sft", update.index + 1, steps, {"loss": update.loss})
        metrics.sync()
    after = prediction()
    if before is not None and after is not None:
        progress.note(
            f"held-out loss {before.loss:.3f} -> {after.loss:.3f} nats per token, "
            f"accuracy {before.accuracy:.3f} -> {after.accuracy:.3f} ({len(held_out)} demonstrations)"
        )
    with times.span("export"):
        save_model(model, folder / "model", tokenizer)
    return write_record(
        run_dir,
        "sft",
        times=times,
        device=str(alone.device),
        num_demonstrations=len(train),
        num_held_out=len(held_out),
        num_too_long=num_too_long,
        steps=steps,
        first_loss=losses[0],
        last_loss=float(np.mean(losses[-10:])),
        held_out=None if before is None or after is None else {"before": asdict(before), "after": asdict(after)},
    )


def _split(
    found: Sequence[Demonstration], num_too_long: int, config: RunConfig, max_positions: int, progress: StageProgress
) -> tuple[list[Demonstration], list[Demonstration], int]:
    """Split demonstrations that the model can read into training and held-out ones; count the others.

    ConfigError where none are left to train on.
    """
    sft = config.sft
    fitting = [pair for pair in found if len(pair[0]) + len(pair[1]) <= max_positions]
    num_too_long += len(found) - len(fitting)
    if not fitting:
        raise ConfigError("there are no demonstrations that fit the model", got=f"{num_too_long}, all too long")
    train, held_out = split_by_prompt(fitting, lambda pair: pair[0], share=sft.held_out, seed=config.seed)
    if not train:
        got = f"{len(fitting)} with sft.held_out = {sft.held_out:g}"
        raise ConfigError("there are no demonstrations to train on", got=got, hint="lower sft.held_out")
    if sft.loss_on == "all":
        train, held_out = ([_all_learned(*pair) for pair in part] for part in (train, held_out))
    dropped = f", {num_too_long} dropped as too long" if num_too_long else ""
    progress.note(f"demonstrations: {len(train)} to train on, {len(held_out)} held out{dropped}")
    return train, held_out, num_too_long


def stage_demonstrations(config: RunConfig, tokenizer: Tokenizer) -> tuple[list[Demonstration], int]:
    """(prompt tokens, completion tokens with EOS), of the dataset or made of the run's training prompts.

    And how many of the dataset's were left out because their prompts are too long. Prompts of a dataset get the
    template, chat template and length limit of [prompts]. The prompts that the run holds out are never among those made
    of its training prompts; a dataset of demonstrations must see to that itself.
    """
    sft = config.sft
    num_too_long = 0
    if sft.dataset is None:
        prompts: list[Prompt] = list(build_prompts(config, tokenizer).train.prompts)
    else:
        prompts, num_too_long = _prompts_of_dataset(config, tokenizer)
    kinds = WarmStartConfig(demonstrations=sft.demonstrations, num_demonstrations=sft.num_demonstrations)
    column = config.prompts.prompt_column
    return demonstrations(kinds, prompts, tokenizer, seed=config.seed, prompt_column=column), num_too_long


def _prompts_of_dataset(config: RunConfig, tokenizer: Tokenizer) -> tuple[list[Prompt], int]:
    sft, source = config.sft, config.sft.dataset
    assert source is not None
    columns = {
        "prompt_column": sft.prompt_column,
        "answer_column": sft.completion_column,
        "messages_column": sft.messages_column,
    }
    reading = config.prompts.model_copy(update={**columns, "between_periods": False})
    template = Template.of(config.prompts)
    encoder = Encoder(reading, tokenizer)
    rows = []
    name, split = sft.dataset_config or config.prompts.config_of(source), sft.dataset_split or reading.dataset_split
    for where, record in read_records(source, name, split):
        completion = record.get(sft.completion_column)
        if isinstance(completion, list | dict) and not record.get(sft.messages_column):
            if (said := said_alone(completion)) is None:
                what, got = f"{where}: the completion is neither text nor the assistant's message", repr(completion)
                allowed = "a text, or [{'role': 'assistant', 'content': text}]"
                hint = f"sft.messages_column names whole chats; now '{sft.messages_column}'"
                raise ConfigError(what, got=shortened(got, 80), allowed=allowed, hint=hint)
            record = {**record, sft.completion_column: said}
        row = row_of(record, reading, template=template, where=where)
        if row is not None and row.answer is None:
            allowed = f"a column '{sft.completion_column}', or chats in '{sft.messages_column}'"
            raise ConfigError(f"{where} has no completion to learn", got=", ".join(record), allowed=allowed)
        if row is not None:
            rows.append(row)
        if len(rows) >= sft.num_demonstrations:
            break
    fitting = [prompt for prompt in encoder.encode(rows) if encoder.fits(prompt)]
    encoder.check(fitting)
    return fitting, len(rows) - len(fitting)


def _all_learned(prompt: np.ndarray, completion: np.ndarray) -> Demonstration:
    """The same text as a completion of its first token, which nothing predicts."""
    return prompt[:1], np.concatenate([prompt[1:], completion])
