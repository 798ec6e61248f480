"""Attention: what is masked, biased or counted that should not be, or the other way round."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.real_bugs import real_bug
from bench.real_bugs._encoder import Encoder, MeanPool, encoder
from bench.real_bugs._networks import (
    ATTENTION,
    Attention,
    Prefixed,
    alibi,
    cached,
    decoder,
    windowed,
)


@real_bug(
    "window_one_too_wide",
    "https://github.com/huggingface/transformers/issues/39408",
    "transformers with flash attention, July 2025",
    at=ATTENTION,
    on=windowed,
)
class Wide(Attention):
    """The kernel's window counts the keys behind the query, the configuration's the query itself too."""

    def allowed(self, length: int, device: torch.device) -> Tensor:
        full = torch.ones(length, length, dtype=torch.bool, device=device)
        return full.tril() & full.triu(1 - self.window if self.mended else -self.window)


@real_bug(
    "decoder_sees_the_future",
    "https://github.com/huggingface/transformers/issues/48745",
    "transformers 5.9 to 5.18 (RoFormer, BigBird, RemBert, MegatronBert)",
    at=ATTENTION,
    on=decoder,
)
class Future(Attention):
    """A causal language model attends to later tokens too."""

    def allowed(self, length: int, device: torch.device) -> Tensor:
        full = torch.ones(length, length, dtype=torch.bool, device=device)
        return full.tril() if self.mended else full


@real_bug(
    "alibi_slopes_of_any_number_of_heads",
    "https://github.com/ml-explore/mlx/pull/3071",
    "mlx before January 2026",
    at=ATTENTION,
    on=alibi,
)
class Geometric(Attention):
    """One geometric sequence of slopes, also where the number of heads is no power of two."""

    def slopes(self) -> list[float]:
        if not self.mended:
            return [2 ** (-8 * (h + 1) / self.heads) for h in range(self.heads)]
        return [2.0 ** -(2 * h + 2) for h in range(4)] + [2.0 ** -(2 * h + 1) for h in range(self.heads - 4)]


@real_bug(
    "float_mask_taken_for_bool_in_eval",
    "https://github.com/pytorch/pytorch/issues/107084",
    "torch 2.0 (nn.MultiheadAttention's fast path)",
    at=ATTENTION,
    on=alibi,
    passes="eval",
)
class FastPath(Attention):
    """In eval mode an additive mask is turned into a boolean one: whatever is not 0 is masked out."""

    def masked(self, scores: Tensor) -> Tensor:
        bias = self.bias(scores).masked_fill(~self.allowed(scores.shape[-1], scores.device), -torch.inf)
        if self.training or self.mended:
            return scores + bias
        return scores.masked_fill(bias != 0, -torch.inf)


@real_bug(
    "positions_counted_through_the_padding",
    "https://github.com/ndif-team/nnsight/issues/672",
    "nnsight before June 2026 with GPT-2",
    at="",
    on=encoder,
    module=("", "position"),
)
class Counted(Encoder):
    """Batches are padded on the left, and positions are counted from the padding on."""

    def places(self, mask: Tensor) -> Tensor:
        places = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
        return (places - (~mask).sum(1, keepdim=True)).clamp(min=0) if self.mended else places


@real_bug(
    "mean_over_the_tokens_of_the_batch",
    "https://github.com/SeanLee97/AnglE/issues/101",
    "AnglE before October 2024",
    at="pool",
    on=encoder,
)
class OverBatch(MeanPool):
    """The sum over a sentence's tokens is divided by the number of tokens in the whole batch."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        weights = mask.to(x.dtype)
        count = weights.sum(1, keepdim=True) if self.mended else weights.sum()
        return torch.einsum("ntd,nt->nd", x, weights / count)


@real_bug(
    "causal_mask_at_the_upper_left",
    "https://github.com/pytorch/executorch/pull/21749",
    "executorch before August 2026; torch's is_causal with a cache (pytorch#108108)",
    at=ATTENTION,
    on=cached,
)
class UpperLeft(Prefixed):
    """With more keys than queries is_causal hides the cached ones: it lines up first with first."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.mended:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        length, past = q.shape[2], k.shape[2] - q.shape[2]
        own = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=F.pad(own, (past, 0), value=True))
