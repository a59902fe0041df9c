"""A decoder with one number per token instead of logits: reward models, which read the last one, and value functions.

Checkpoints are Hugging Face's `*ForSequenceClassification` with one label.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.core.errors import ConfigError
from slipstream.models.config import TransformerConfig, config_from_hf, config_to_hf
from slipstream.models.hf import (
    logical_tensors,
    misfit,
    read_hf_config,
    read_weights,
    remove_weights,
    write_json,
    write_weights,
)
from slipstream.models.layout import LogicalTensor, layout
from slipstream.models.packed import MicrobatchReader
from slipstream.models.tokenizer import Tokenizer
from slipstream.models.transformer import Attention, OneRank, Ranks, Transformer

HeadInit = Literal["reward", "zero"]
HEAD_NAME = "score.weight"
BIAS_KEY = "score_bias"
"""Where config.json keeps what `*ForSequenceClassification` has no tensor for; transformers carries it along."""


class ScalarModel(nn.Module):
    """One value per token from a decoder's final states, by a linear head in fp32, scaled and shifted.

        r_t = gain * (w . h_t + b) + bias

    Ziegler et al. (arXiv:1909.08593), section 2, and their code: `gain` and `bias` normalise a reward model, and are
    1 and 0 otherwise. They are parameters, not buffers: that code trains them too, and so a model's flat tensor holds
    all that decides a score. No dropout anywhere. Weights are uninitialised, the head's too.
    """

    def __init__(self, config: TransformerConfig, ranks: Ranks = OneRank()) -> None:
        """`config` without an output head: the backbone counts as tied, so that every parameter gets a gradient.

        On several `ranks` the backbone is divided, and head, gain and bias are whole on each of them.
        """
        super().__init__()
        self.backbone = Transformer(replace(config, tie_embeddings=True), ranks)
        self.head: nn.Linear = nn.utils.skip_init(nn.Linear, config.hidden_size, 1, dtype=torch.float32)  # type: ignore[no-untyped-call]
        self.gain = nn.Parameter(torch.ones((), dtype=torch.float32))
        self.bias = nn.Parameter(torch.zeros((), dtype=torch.float32))

    @property
    def config(self) -> TransformerConfig:
        return self.backbone.config

    @property
    def varlen(self) -> bool:
        return self.backbone.varlen

    @property
    def reader(self) -> MicrobatchReader:
        return self.backbone.reader

    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Tokens [N] int64 at positions [N] int64 of their sequences -> a value per token, fp32 [N]."""
        return self.values(self.backbone(tokens, positions, attention))

    def values(self, hidden: Tensor) -> Tensor:
        """Values [...] fp32 of final states [..., hidden], computed in fp32 whatever the backbone's precision."""
        raw = F.linear(hidden.float(), self.head.weight.float(), self.head.bias.float()).squeeze(-1)
        return self.gain.float() * raw + self.bias.float()


@torch.no_grad()
def initialise_linear(head: nn.Linear, init: HeadInit, seed: int) -> None:
    """Draw a head hidden -> 1 anew, its bias 0. The global random state is left alone.

    "reward": weights N(0, 1 / sqrt(hidden + 1)) (N, reward model item; the standard deviation is the second number).
    "zero": every value is exactly 0, the start of a value function (N, policy item).
    """
    if init == "reward":
        generator = torch.Generator().manual_seed(seed)
        std = 1.0 / math.sqrt(head.in_features + 1)
        head.weight.copy_(torch.randn(head.weight.shape, generator=generator, dtype=torch.float32) * std)
    else:
        head.weight.zero_()
    head.bias.zero_()


@torch.no_grad()
def initialise_head(model: ScalarModel, init: HeadInit, seed: int) -> None:
    """`initialise_linear` for the model's head, with gain 1 and bias 0 behind it."""
    initialise_linear(model.head, init, seed)
    model.gain.fill_(1.0)
    model.bias.zero_()


@torch.no_grad()
def new_scalar_model(model: Transformer, *, head_init: HeadInit, seed: int) -> ScalarModel:
    """A scalar model on a copy of `model`'s weights, in its precision and on its device, with a fresh head."""
    scalar = ScalarModel(model.config)
    scalar.backbone.to(model.embedding.weight.dtype)
    scalar.backbone.load_state_dict({name: x for name, x in model.state_dict().items() if name != "head.weight"})
    initialise_head(scalar, head_init, seed)
    return scalar.to(model.embedding.weight.device)


@torch.no_grad()
def load_scalar_model(
    path: str | Path,
    *,
    head_init: HeadInit | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_positions: int | None = None,
) -> ScalarModel:
    """The scalar model in folder `path`, its backbone in `dtype` and its head in fp32.

    A language model's checkpoint, which has no scalar head, gets a fresh one as `head_init` and `seed` say; without
    `head_init` it is a ConfigError, like tensors that are missing, unexpected or misshapen. The gain was folded into
    the weights when they were saved, so gain is 1 and `bias` is config.json's `score_bias`, or 0.
    """
    path = Path(path)
    raw = read_hf_config(path)
    model = ScalarModel(config_from_hf(raw, max_positions=max_positions))
    model.backbone.to(dtype)
    wanted = {tensor.name: tensor for tensor in layout(model.backbone)}
    wanted[HEAD_NAME] = head_tensor(model)
    problems = read_weights(path, wanted, is_tied=True)
    has_head = wanted.pop(HEAD_NAME, None) is None
    problems += [f"missing {name}" for name in wanted]
    if problems:
        allowed = f"the tensors of a {model.config.family} model and {HEAD_NAME} with one row"
        raise misfit(path, problems, allowed=allowed)
    if has_head:
        restore_biases(model, path)
    else:
        start_head(model, path, head_init, seed)
    return model


def start_head(model: ScalarModel, path: Path, head_init: HeadInit | None, seed: int) -> None:
    """`initialise_head` for the checkpoint in folder `path`, which has none. ConfigError without `head_init`."""
    if head_init is None:
        raise ConfigError(
            f"the checkpoint in {path} has no scalar head",
            got=f"no tensor {HEAD_NAME}",
            hint="it is a language model: say how to initialise a head, or name a reward model's folder",
        )
    initialise_head(model, head_init, seed)


def head_tensor(model: ScalarModel) -> LogicalTensor:
    """The head's weight as the checkpoint has it."""
    return LogicalTensor(HEAD_NAME, model.head.weight.detach(), tuple(model.head.weight.shape))


@torch.no_grad()
def restore_biases(model: ScalarModel, path: Path) -> None:
    """Set biases and gain as the checkpoint in folder `path` has them: config.json's `score_bias`, no gain."""
    model.head.bias.zero_()
    model.gain.fill_(1.0)
    model.bias.fill_(_bias(read_hf_config(path), path))


def _bias(raw: dict[str, Any], path: Path) -> float:
    bias = raw.get(BIAS_KEY, 0.0)
    if not isinstance(bias, int | float) or not math.isfinite(bias):
        raise ConfigError(f"{BIAS_KEY} in {path}/config.json is not a number", got=repr(bias))
    return float(bias)


@torch.no_grad()
def save_scalar_model(
    model: ScalarModel,
    path: str | Path,
    tokenizer: Tokenizer | None = None,
    *,
    max_shard_bytes: int = 5 * 1024**3,
) -> None:
    """Write `model` to folder `path` as its family's `*ForSequenceClassification` checkpoint with one label.

        score.weight = gain * w        score_bias = gain * b + bias

    transformers' classes have no bias: their logit plus config.json's `score_bias` is our value at the last token. They
    find that token as the last one that is not padding, so a padding token that also ends sequences is left out of
    config.json: transformers then refuses to batch, where it would have scored the wrong token.
    """
    from transformers.models.auto.modeling_auto import (  # a third of a second, which no start of a process should pay
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    )

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    if model.backbone.compute_copy is not None:
        model.backbone.compute_copy.reshard()  # what is saved are the float32 weights
    config = config_to_hf(model.config)
    config["dtype"] = str(model.backbone.embedding.weight.dtype).removeprefix("torch.")
    config["architectures"] = [MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[model.config.family]]
    config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    if model.config.pad_token_id in model.config.eos_token_ids:
        config["pad_token_id"] = None
    gain = model.gain.double()
    config[BIAS_KEY] = float(gain * model.head.bias.double() + model.bias.double())
    write_json(path / "config.json", config)
    remove_weights(path)
    head = {HEAD_NAME: (gain * model.head.weight.double()).float()}
    write_weights(path, {**logical_tensors(model.backbone), **head}, max_shard_bytes)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
