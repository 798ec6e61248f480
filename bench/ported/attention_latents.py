"""A Perceiver against torch's attention with another width for keys, and against fused keys and values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench.case import case
from bench.cases._rewritten import SAME
from bench.optimizers import sgd
from bench.ported._attention_nets import LATENT_HEADS, LATENT_WIDTH, perceiver
from bench.ported._text import dense, kept, stacked


class Feed(nn.Module):
    def __init__(self, own: nn.Module):
        super().__init__()
        self.norm, self.net = own.layernorm, nn.Sequential(own.dense1, nn.GELU(), own.dense2)

    def forward(self, z: Tensor) -> Tensor:
        return self.net(self.norm(z)) + z


class TorchAttend(nn.Module):
    """torch's attention; where keys are of another width its projections stand apart."""

    def __init__(self, own: nn.Module, crosses: bool):
        super().__init__()
        width = own.key.in_features
        self.core = nn.MultiheadAttention(
            LATENT_WIDTH, LATENT_HEADS, kdim=width, vdim=width, batch_first=True
        )
        layers = (own.query, own.key, own.value)
        if self.core.in_proj_weight is None:
            for letter, layer in zip("qkv", layers, strict=True):
                setattr(self.core, f"{letter}_proj_weight", kept(layer.weight))
        else:
            self.core.in_proj_weight = kept(torch.cat([layer.weight for layer in layers]))
        self.core.in_proj_bias = kept(torch.cat([layer.bias for layer in layers]))
        self.core.out_proj.weight, self.core.out_proj.bias = kept(own.dense.weight), kept(own.dense.bias)
        self.asks, self.asked = own.layernorm1, own.layernorm2 if crosses else None

    def forward(self, z: Tensor, inputs: Tensor | None) -> Tensor:
        h = self.asks(z)
        context = h if self.asked is None else self.asked(inputs)
        return z + self.core(h, context, context)[0]


class FusedAttend(nn.Module):
    """Keys and values out of one projection, the query's with a head's axis of its own."""

    def __init__(self, own: nn.Module, crosses: bool):
        super().__init__()
        self.norm, self.norm_context = own.layernorm1, own.layernorm2 if crosses else None
        self.to_q = kept(own.query.weight.unflatten(0, (LATENT_HEADS, -1)))
        self.q_bias = kept(own.query.bias.unflatten(0, (LATENT_HEADS, -1)))
        self.to_kv, self.to_out = stacked(own.key, own.value), dense(own.dense.weight, own.dense.bias)

    def forward(self, z: Tensor, inputs: Tensor | None) -> Tensor:
        h = self.norm(z)
        context = h if self.norm_context is None else self.norm_context(inputs)
        k, v = self.to_kv(context).unflatten(-1, (2, LATENT_HEADS, -1)).unbind(2)
        q = torch.einsum("nzc,hdc->nzhd", h, self.to_q) + self.q_bias
        weights = torch.einsum("nzhd,nthd->nhzt", q * q.shape[-1] ** -0.5, k).softmax(-1)
        return z + self.to_out(torch.einsum("nhzt,nthd->nzhd", weights, v).flatten(2))


class Flat(nn.Module):
    """Attention and feed-forward in turns, in one list."""

    def __init__(self, model: nn.Module, attend: type[nn.Module]):
        super().__init__()
        self.queries, self.to_logits = kept(model.latents[None]), model.final_layer
        steps = [attend(model.cross_attention, True), Feed(model.cross_attention)]
        for own in model.self_attends:
            steps += [attend(own, False), Feed(own)]
        self.steps = nn.ModuleList(steps)

    def forward(self, inputs: Tensor) -> Tensor:
        z = self.queries.repeat(len(inputs), 1, 1)
        for i, step in enumerate(self.steps):
            z = step(z) if i % 2 else step(z, inputs)
        return self.to_logits(z.mean(dim=-2))


@case(SAME, "torch's attention", perceiver, optimizer=sgd(0.02))
def perceiver_on_torchs_attention(model: nn.Module) -> nn.Module:
    return Flat(model, TorchAttend)


@case(SAME, "keys and values fused", perceiver, optimizer=sgd(0.02))
def perceiver_with_fused_keys_and_values(model: nn.Module) -> nn.Module:
    return Flat(model, FusedAttend)
