"""Tiny random transformers models of every family, the oracle of these tests."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCAB_SIZE = 67
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
_GPT2 = {"vocab_size": VOCAB_SIZE, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_GPT2_IDS = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}

CASES: dict[str, transformers.PreTrainedConfig] = {
    "llama_tied": transformers.LlamaConfig(**_GROUPED, tie_word_embeddings=True),
    "llama_biased": transformers.LlamaConfig(**_GROUPED, attention_bias=True, mlp_bias=True, head_dim=16),
    "llama3_rope": transformers.LlamaConfig(**_COMMON, rope_parameters=_LLAMA3),
    "mistral": transformers.MistralConfig(**{**_GROUPED, "num_key_value_heads": 1}, sliding_window=None),
    "qwen2": transformers.Qwen2Config(**_GROUPED),
    "qwen2_tied": transformers.Qwen2Config(**_GROUPED, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**_GROUPED, head_dim=16, tie_word_embeddings=True),
    "qwen3_biased": transformers.Qwen3Config(**_GROUPED, attention_bias=True),
    "qwen3_moe": transformers.Qwen3MoeConfig(**_GROUPED, **_EXPERTS, head_dim=16, norm_topk_prob=True),
    "qwen3_moe_mixed": transformers.Qwen3MoeConfig(
        **{**_GROUPED, "num_hidden_layers": 4}, **_EXPERTS, mlp_only_layers=[3], decoder_sparse_step=2
    ),
    "mixtral": transformers.MixtralConfig(**_GROUPED, num_local_experts=4, tie_word_embeddings=True),
    "gpt_neox": transformers.GPTNeoXConfig(**_COMMON),
    "gpt_neox_sequential": transformers.GPTNeoXConfig(**_COMMON, use_parallel_residual=False, tie_word_embeddings=True),
    "gpt2": transformers.GPT2Config(**_GPT2, **_GPT2_IDS),
    "gpt2_untied": transformers.GPT2Config(**_GPT2, **_GPT2_IDS, n_inner=40, tie_word_embeddings=False),
}


def oracle(case: str) -> transformers.PreTrainedModel:
    """The case's transformers model with every parameter, biases and norms too, moved away from its default."""
    torch.manual_seed(sorted(CASES).index(case))
    model = transformers.AutoModelForCausalLM.from_config(CASES[case], attn_implementation="eager").eval()
    if model.config.model_type in ("qwen3_moe", "mixtral"):
        model.set_experts_implementation("eager")  # the loop over experts, which multiplies float64, too
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model
