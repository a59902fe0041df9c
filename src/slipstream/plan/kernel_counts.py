"""The kernels that a decode step on a GPU starts: torch's operators that compute, and our own kernels.

`test_kernel_counts.py` counts them in the code that runs, without collectives, which `CostModel` has by themselves.
int8 and mxfp4, which generators on GPUs refuse, are taken for bfloat16, and fp8 to suit all matrices of a layer.
"""

from __future__ import annotations

from slipstream.core.fields import Precision
from slipstream.models.config import TransformerConfig

_EXPERTS = 5 + 8 + 4  # the router and its choice; tokens by expert; rows, two products, answers
_ELSEWHERE = 9  # of experts on other ranks: which they are, and zeros in place of what they give
_TORCH_SAMPLER = 50  # noise, blocks, the token, its logprob (`generator/sampler.py`), of at least 1,024 tokens


def step_kernels(model: TransformerConfig, precision: Precision, *, ranks: int = 1, stages: int = 1) -> tuple[int, int]:
    """Return the kernels of a layer, and of a step besides them, where rows are sampled from the whole vocabulary.

    `ranks` share each layer, `stages` have some of the layers each: on one rank that has all of them
    `generator/fused_decode.py` runs what it can, elsewhere layers run as the model has them, and torch samples. The
    last stage is taken to have all of a step. All rows are taken to need the kernel that joins attention.
    """
    is_alone, is_half = ranks == stages == 1, precision != "float32"
    is_fused, has_rope = model.can_fuse and is_alone, model.rotary_dim > 0
    is_silu = model.gated_mlp and model.activation == "silu"
    layer = 2 + 2 + 2  # norms; qkv and `output`; attention and its join
    layer += 1 if not model.gated_mlp or (is_silu and (is_half or is_fused)) else 2  # the activation, and times `up`
    if model.num_experts:  # gates over their sum; each token's weighted sum
        layer += _EXPERTS + 2 * model.normalises_gates + 2 * model.experts_per_token + _ELSEWHERE * (ranks > 1)
    else:
        layer += 2  # `up` and `down`
    if is_fused:  # sums are in the norms; head norms, rotation, keys and values in one kernel
        layer, rounded = layer + 1, 1 if is_silu else 3  # rows of attention, and of an MLP whose kernels do not round
    else:  # sums; keys and values; head norms, joined; rotation
        rotation = 1 if is_half else 3 + (model.rotary_dim < model.head_dim)
        layer, rounded = layer + 2 + 2 + 3 * model.qk_norm + rotation * has_rope, 4
    # Pages and places of new tokens, lengths; embedding, last norm, head and casts; states, and what the host reads.
    step = 7 + 3 + 2 * is_half + 5
    step += 2 if not has_rope else 0 if is_fused else 2 + 2 * is_half  # learned positions; or cos and sin, cast
    step += 2 if is_alone else _TORCH_SAMPLER + 4 * (model.vocab_size % 128 > 0) + 2 * (ranks > 1)  # logits are joined
    return layer + rounded * (precision == "fp8"), step
