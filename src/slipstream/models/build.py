"""The policy of a run from its config; the same call gives trainer and generator the same model and tokenizer."""

from __future__ import annotations

from pathlib import Path

from slipstream.core.config import RunConfig, stage_of
from slipstream.core.sections import GeneratorConfig, ModelConfig
from slipstream.models.config import TransformerConfig, config_from_hf, local_config, new_config
from slipstream.models.hf import load_model, read_hf_config
from slipstream.models.initialise import new_model
from slipstream.models.peft import tokenizer_folder
from slipstream.models.tokenizer import CharTokenizer, Tokenizer, has_tokenizer, load_tokenizer
from slipstream.models.transformer import Transformer


def policy_tokenizer_folder(config: ModelConfig) -> Path | None:
    """Return the folder of the policy's tokenizer: of the adapter to go on from, if it has one; None: a fresh model."""
    adapter = config.lora.path
    if config.path is not None and adapter is not None and has_tokenizer(adapter):
        return Path(adapter)
    return None if config.path is None else tokenizer_folder(config.path)


def build_tokenizer(config: ModelConfig) -> Tokenizer:
    """The checkpoint's tokenizer, or one token per character for a fresh model; with `config`'s chat template."""
    folder = policy_tokenizer_folder(config)
    if folder is None:
        return CharTokenizer(config.alphabet)
    tokenizer = load_tokenizer(folder)
    if config.chat_template is not None:
        tokenizer.chat_template = config.chat_template
    return tokenizer


def first_shape(config: RunConfig) -> TransformerConfig:
    """Return the sizes of the policy; of a stage's checkpoint, those of what that stage starts from."""
    return shape_of(config.model.model_copy(update={"path": config.first_checkpoint}))


def max_positions(config: RunConfig) -> int:
    """Return the positions of the policy."""
    return first_shape(config).max_positions


def shape_of(config: ModelConfig) -> TransformerConfig:
    """Return the sizes of the policy that `build_policy` makes."""
    if config.path is not None:
        return config_from_hf(read_hf_config(Path(config.path)))
    return new_config(config, vocab_size=len(build_tokenizer(config)))


def build_policy(
    config: ModelConfig, *, seed: int, tokenizer: Tokenizer | None = None
) -> tuple[Transformer, Tokenizer]:
    """Model (fp32, on the CPU) and tokenizer, without the adapters of `config.lora` (`peft.with_adapters`).

    A fresh model is fully determined by `config` and `seed`.
    """
    tokenizer = build_tokenizer(config) if tokenizer is None else tokenizer
    if config.path is not None:
        return load_model(Path(config.path)), tokenizer
    model = new_model(
        config,
        vocab_size=len(tokenizer),
        seed=seed,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model, tokenizer


def check_division(config: ModelConfig, ranks: int) -> None:
    """Raise ConfigError where this model cannot be divided over `ranks`; those of stages that have not run pass."""
    if ranks == 1 or (config.path is not None and stage_of(config.path) is not None):
        return
    local_config(shape_of(config), ranks)


def stop_token_ids(tokenizer: Tokenizer, config: GeneratorConfig, shape: TransformerConfig) -> list[int]:
    """Return the tokens that end a completion: the tokenizer's EOS and the config's, ascending, then the model's own.

    Without `stop_at_eos` they are the config's alone. Instruction-tuned models name ends that the tokenizer does not;
    what is an ordinary token of it ends nothing: transformers writes the 2 of its classes for models that have no such.
    """
    eos = [] if tokenizer.eos_token_id is None or not config.stop_at_eos else [int(tokenizer.eos_token_id)]
    added = getattr(tokenizer, "added_tokens_decoder", shape.eos_token_ids)
    more = [token for token in shape.eos_token_ids if token in added] if config.stop_at_eos else []
    return list(dict.fromkeys([*sorted({*eos, *config.stop_token_ids}), *more]))
