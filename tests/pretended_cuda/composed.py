"""What CUDA makes of an operation otherwise than the CPU, and the operations that it alone has."""

from __future__ import annotations

import math

import torch
from torch import Tensor

aten = torch.ops.aten

# The dtypes for which CUDA has fused attention.
FUSED = (torch.float32, torch.float16, torch.bfloat16)


def dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """One operation with a mask, on CUDA."""
    if not train or p == 0 or not x.numel():
        return x
    return torch.native_dropout(x, p, train)[0] if p < 1 else x * 0


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The memory-efficient kernel where a GPU has one for it, else plain matrix products."""
    fused = torch.backends.cuda.mem_efficient_sdp_enabled() and query.dtype in FUSED
    if fused and attn_mask is None and query.dim() == 4 and not dropout_p and not enable_gqa:
        graded = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, None, graded, 0.0, is_causal, scale=scale
        )[0]
    return aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _weights(
    query: Tensor, key: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, float]:
    """Softmax weights [B, H, L, S] and the log of their sums [B, H, L]."""
    if query.dtype not in FUSED:
        raise RuntimeError(
            f"Expected query, key and value to be of a dtype of {FUSED}, but got {query.dtype}"
        )
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = query @ key.transpose(-2, -1) * scale
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(-1), scores.float().logsumexp(-1), scale


def efficient_attention(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None
):
    weights, sums, _ = _weights(query, key, is_causal, scale)
    nothing = torch.zeros((), dtype=torch.int64)
    return weights @ value, sums if compute_log_sumexp else sums.new_empty(0), nothing, nothing.clone()


def efficient_attention_backward(
    gradient,
    query,
    key,
    value,
    bias,
    out,
    sums,
    seed,
    offset,
    dropout_p,
    mask,
    is_causal=False,
    *,
    scale=None,
):
    """By the formula of softmax: d scores = w * (dw - sum(w * dw))."""
    weights, _, scale = _weights(query, key, is_causal, scale)
    of_weights = gradient @ value.transpose(-2, -1)
    of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True)) * scale
    by_key = of_scores.transpose(-2, -1) @ query
    return of_scores @ key, by_key, weights.transpose(-2, -1) @ gradient, None


def flattened(weights: list[Tensor], *shape) -> Tensor:
    """The weights of a recurrent network as parts of one storage, as cuDNN wants them."""
    whole, start = torch.cat([w.reshape(-1) for w in weights]), 0
    for weight in weights:
        weight.set_(whole.untyped_storage(), start, weight.size(), weight.stride())
        start += weight.numel()
    return whole


# Computed on the CPU, in place of an operation that it has not.
INSTEAD = {
    aten._scaled_dot_product_efficient_attention.default: efficient_attention,
    aten._scaled_dot_product_efficient_attention_backward.default: efficient_attention_backward,
}
# Of other operations on the device.
COMPOSED = {aten._cudnn_rnn_flatten_weight.default: flattened}
# The same, differentiated as what they are made of.
ABOVE_AUTOGRAD = {
    aten.dropout.default: dropout,
    aten.scaled_dot_product_attention.default: scaled_dot_product_attention,
}
