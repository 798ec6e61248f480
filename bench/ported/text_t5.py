"""T5 as transformers has it against einsum style with fused keys and values."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, einsum, nn

from bench.case import case
from bench.cases._rewritten import SAME
from bench.ported._text import dense, kept, stacked
from bench.ported._text_t5 import HEADS, LAYERS, WIDTH, buckets, closed, shifted, t5


class Gain(nn.Module):
    def __init__(self, norm: nn.Module):
        super().__init__()
        self.gamma = kept(norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x / (einsum("...d,...d->...", x, x)[..., None] / x.shape[-1] + 1e-6).sqrt() * self.gamma


class Mixer(nn.Module):
    """Norm and attention in one; keys and values come out of one projection."""

    def __init__(self, norm: nn.Module, own: nn.Module, scaled: bool = False):
        super().__init__()
        self.norm, self.to_q, self.to_kv = Gain(norm), dense(own.q.weight), stacked(own.k, own.v)
        self.to_out, self.scale = (
            dense(own.o.weight),
            (own.q.out_features // HEADS) ** -0.5 if scaled else 1.0,
        )

    def forward(self, x: Tensor, bias: Tensor, context: Tensor | None = None) -> Tensor:
        h = self.norm(x)
        k, v = self.to_kv(h if context is None else context).unflatten(-1, (2, HEADS, -1)).unbind(2)
        q = self.to_q(h).unflatten(-1, (HEADS, -1)) * self.scale
        weights = (einsum("b i h d, b j h d -> b h i j", q, k) + bias).softmax(-1)
        return x + self.to_out(einsum("b h i j, b j h d -> b i h d", weights, v).flatten(2))


class GatedFeedForward(nn.Module):
    def __init__(self, norm: nn.Module, own: nn.Module):
        super().__init__()
        self.norm, self.proj_in, self.proj_out = Gain(norm), stacked(own.wi_0, own.wi_1), dense(own.wo.weight)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.proj_in(self.norm(x)).chunk(2, -1)
        return x + self.proj_out(F.gelu(gate, approximate="tanh") * value)


class XTransformer(nn.Module):
    def __init__(self, model: nn.Module, both: bool = False, scaled: bool = False, cut: bool = False):
        super().__init__()
        self.emb, self.both, self.cut = kept(model.shared.weight), both, cut
        self.rel_pos = nn.ParameterList(
            kept(stack.block[0].SelfAttention.relative_attention_bias.weight)
            for stack in (model.encoder, model.decoder)
        )
        self.enc, self.dec = nn.ModuleList(), nn.ModuleList()
        for block in model.encoder.block:
            self.enc += [
                Mixer(block.norm_self, block.SelfAttention),
                GatedFeedForward(block.norm_ff, block.DenseReluDense),
            ]
        for block in model.decoder.block:
            self.dec += [Mixer(block.norm_self, block.SelfAttention)]
            self.dec += [Mixer(block.norm_cross, block.EncDecAttention, scaled)]
            self.dec += [GatedFeedForward(block.norm_ff, block.DenseReluDense)]
        self.ends = nn.ModuleList(
            [Gain(model.encoder.final_layer_norm), Gain(model.decoder.final_layer_norm)]
        )

    def bias(self, which: int, length: int, both: bool) -> Tensor:
        at = torch.arange(length, device=self.emb.device)
        return self.rel_pos[which][buckets(at[None] - at[:, None], both)].permute(2, 0, 1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x, y = self.emb[input_ids], self.emb[shifted(labels)]
        hidden = closed(~attention_mask.bool()[:, None, None], x)
        bias = self.bias(0, x.shape[1], True) + hidden
        for i, layer in enumerate(self.enc):
            x = layer(x) if i % 2 else layer(x, bias)
        context, length = self.ends[0](x), y.shape[1]
        unseen = torch.ones(length, length, dtype=torch.bool, device=y.device).triu(1)
        bias = self.bias(1, length, self.both) + closed(unseen, y)
        for i in range(LAYERS):
            mix, cross, feed = self.dec[3 * i : 3 * i + 3]
            memory = context.detach() if self.cut and i else context
            y = feed(cross(mix(y, bias), hidden, memory))
        scores = (self.ends[1](y) * WIDTH**-0.5) @ self.emb.T
        return {"scores": scores, "loss": F.cross_entropy(scores.transpose(1, 2), labels)}


@case(SAME, "keys and values fused, einsum", t5)
def t5_in_einsum_style(model: nn.Module) -> nn.Module:
    return XTransformer(model)


BIAS = ("decoder.block.0.SelfAttention", "decoder.block.0.SelfAttention.relative_attention_bias", "decoder")


@case("bug", "relative positions", t5, module=BIAS)
def t5_decoder_with_buckets_for_both_sides(model: nn.Module, wrong: bool = True) -> nn.Module:
    """The decoder's distances are sorted into the buckets of a bidirectional stack."""
    return XTransformer(model, both=wrong)


CROSS = tuple(f"decoder.block.{i}{part}" for i in range(LAYERS) for part in ("", ".EncDecAttention"))


@case("bug", "scale", t5, module=CROSS)
def t5_cross_attention_with_a_scale(model: nn.Module, wrong: bool = True) -> nn.Module:
    """Cross-attention divides by the root of the head's width, which T5 nowhere does."""
    return XTransformer(model, scaled=wrong)


@case(
    "bug",
    "detached branch",
    t5,
    module=(
        "decoder.block.1.EncDecAttention",
        "decoder.block.1",
        "decoder",
    ),
    passes=("input gradient", "weight gradient"),
)
def t5_memory_cut_off_after_the_first_layer(model: nn.Module, wrong: bool = True) -> nn.Module:
    """From the second decoder layer on the encoder's output is a cached copy without a gradient."""
    return XTransformer(model, cut=wrong)
