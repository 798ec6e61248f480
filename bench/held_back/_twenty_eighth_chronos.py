"""A small Chronos-Bolt: patches of a series with missing values, a T5 with one decoder step, quantiles."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LENGTH, PATCH, HORIZON, QUANTILES = 33, 5, 6, (0.1, 0.3, 0.5, 0.7, 0.9)
WIDTH, HEADS, HEAD, HIDDEN, LAYERS, BUCKETS, DISTANCE, SERIES = 20, 3, 7, 36, 2, 12, 7, 4


def linear(into: int, out: int, bias: bool = False, gain: float = 1.0) -> nn.Linear:
    layer = nn.Linear(into, out, bias)
    nn.init.normal_(layer.weight, std=gain / math.sqrt(into))
    if bias:
        nn.init.normal_(layer.bias, std=0.1)
    return layer


class InstanceNorm(nn.Module):
    """Each series by the mean and the deviation of what is observed of it; the rest stays NaN."""

    def __init__(self, eps: float = 1e-5):
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor, loc_scale: tuple | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        seen = x.isnan().logical_not()
        known = torch.where(seen, x, 0.0)
        if loc_scale is None:
            count = seen.sum(-1, keepdim=True)
            loc = known.sum(-1, keepdim=True) / count
            scale = torch.where(seen, (known - loc).square(), 0.0).sum(-1, keepdim=True).div(count).sqrt()
            loc_scale = loc, torch.where(scale == 0, self.eps, scale)
        loc, scale = loc_scale
        return torch.where(seen, (known - loc) / scale, torch.nan), loc_scale

    def inverse(self, x: Tensor, loc_scale: tuple[Tensor, Tensor]) -> Tensor:
        loc, scale = loc_scale
        return x * scale + loc


class Patch(nn.Module):
    """[N, T] -> [N, P, PATCH], after NaNs at the start which fill up the first patch."""

    def __init__(self, patch_size: int, patch_stride: int):
        super().__init__()
        self.patch_size, self.patch_stride = patch_size, patch_stride

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] % self.patch_size:
            padding = self.patch_size - x.shape[-1] % self.patch_size
            x = torch.cat([x.new_full((*x.shape[:-1], padding), torch.nan), x], -1)
        return x.unfold(-1, self.patch_size, self.patch_stride)


class ResidualBlock(nn.Module):
    def __init__(self, in_dim: int, h_dim: int, out_dim: int):
        super().__init__()
        self.hidden_layer, self.act = linear(in_dim, h_dim, True), nn.ReLU()
        self.output_layer = linear(h_dim, out_dim, True)
        self.residual_layer = linear(in_dim, out_dim, True)

    def forward(self, x: Tensor) -> Tensor:
        return self.output_layer(self.act(self.hidden_layer(x))) + self.residual_layer(x)


class T5LayerNorm(nn.Module):
    def __init__(self, eps: float = 1e-6):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(1 + 0.2 * torch.randn(WIDTH)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


class T5Attention(nn.Module):
    """Attention without a scale; the first of a stack also holds the bias by relative position."""

    def __init__(self, bidirectional: bool = True, has_relative_attention_bias: bool = False):
        super().__init__()
        inner, self.bidirectional = HEADS * HEAD, bidirectional
        self.q, self.k = linear(WIDTH, inner, gain=1.2 / math.sqrt(HEAD)), linear(WIDTH, inner)
        self.v, self.o = linear(WIDTH, inner), linear(inner, WIDTH)
        if has_relative_attention_bias:
            self.relative_attention_bias = nn.Embedding(BUCKETS, HEADS)

    def _relative_position_bucket(self, position: Tensor) -> Tensor:
        buckets, count = torch.zeros_like(position), BUCKETS
        if self.bidirectional:
            count //= 2
            buckets, position = (position > 0).long() * count, position.abs()
        else:
            position = -position.clamp(max=0)
        exact = count // 2
        large = torch.log(position.clamp(min=1).float() / exact) / math.log(DISTANCE / exact)
        large = (exact + (large * (count - exact)).long()).clamp(max=count - 1)
        return buckets + torch.where(position < exact, position, large)

    def compute_bias(self, queries: int, keys: int) -> Tensor:
        device = self.q.weight.device
        position = torch.arange(keys, device=device)[None] - torch.arange(queries, device=device)[:, None]
        return self.relative_attention_bias(self._relative_position_bucket(position)).permute(2, 0, 1)[None]

    def forward(self, x: Tensor, bias: Tensor | None, memory: Tensor | None = None) -> tuple[Tensor, Tensor]:
        source = x if memory is None else memory
        q, k, v = (
            y.unflatten(-1, (HEADS, HEAD)).transpose(1, 2)
            for y in (self.q(x), self.k(source), self.v(source))
        )
        if hasattr(self, "relative_attention_bias"):
            bias = bias + self.compute_bias(x.shape[1], source.shape[1])
        weights = F.softmax(q @ k.transpose(2, 3) + bias, dim=-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2)), bias


class T5LayerSelfAttention(nn.Module):
    def __init__(self, bidirectional: bool, first: bool):
        super().__init__()
        self.SelfAttention, self.layer_norm = T5Attention(bidirectional, first), T5LayerNorm()

    def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        y, bias = self.SelfAttention(self.layer_norm(x), bias)
        return x + y, bias


class T5LayerCrossAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.EncDecAttention, self.layer_norm = T5Attention(), T5LayerNorm()

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        return x + self.EncDecAttention(self.layer_norm(x), mask, memory)[0]


class T5DenseActDense(nn.Module):
    def __init__(self):
        super().__init__()
        self.wi, self.wo, self.act = linear(WIDTH, HIDDEN), linear(HIDDEN, WIDTH), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(self.act(self.wi(x)))


class T5LayerFF(nn.Module):
    def __init__(self):
        super().__init__()
        self.DenseReluDense, self.layer_norm = T5DenseActDense(), T5LayerNorm()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.DenseReluDense(self.layer_norm(x))


class T5Block(nn.Module):
    def __init__(self, decoder: bool, first: bool):
        super().__init__()
        cross = [T5LayerCrossAttention()] if decoder else []
        self.layer = nn.ModuleList([T5LayerSelfAttention(not decoder, first), *cross, T5LayerFF()])

    def forward(self, x: Tensor, bias: Tensor, *memory: Tensor) -> tuple[Tensor, Tensor]:
        x, bias = self.layer[0](x, bias)
        if memory:
            x = self.layer[1](x, *memory)
        return self.layer[-1](x), bias


class T5Stack(nn.Module):
    def __init__(self, decoder: bool):
        super().__init__()
        self.block = nn.ModuleList(T5Block(decoder, i == 0) for i in range(LAYERS))
        self.final_layer_norm = T5LayerNorm()

    def forward(self, x: Tensor, mask: Tensor, memory: tuple[Tensor, Tensor] | tuple = ()) -> Tensor:
        if memory:
            memory = memory[0], (1 - memory[1])[:, None, None] * torch.finfo(x.dtype).min
        bias = (1 - mask)[:, None, None] * torch.finfo(x.dtype).min
        for block in self.block:
            x, bias = block(x, bias, *memory)
        return self.final_layer_norm(x)


class ChronosBolt(nn.Module):
    """A series, what follows it and whether that counts -> quantiles of what follows, and the loss."""

    def __init__(self):
        super().__init__()
        self.shared, self.reg_token_id, self.decoder_start_token_id = nn.Embedding(2, WIDTH), 1, 0
        self.instance_norm, self.patch = InstanceNorm(), Patch(PATCH, PATCH)
        self.input_patch_embedding = ResidualBlock(2 * PATCH, HIDDEN, WIDTH)
        self.encoder, self.decoder = T5Stack(False), T5Stack(True)
        self.output_patch_embedding = ResidualBlock(WIDTH, HIDDEN, len(QUANTILES) * HORIZON)
        self.register_buffer("quantiles", torch.tensor(QUANTILES), persistent=False)

    def encode(self, context: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
        mask = context.isnan().logical_not().to(context.dtype)
        context, loc_scale = self.instance_norm(context)
        mask = self.patch(mask).nan_to_num(nan=0.0)
        context = torch.where(mask > 0, self.patch(context), 0.0)
        attention_mask = (mask.sum(-1) > 0).to(context.dtype)
        embeds = self.input_patch_embedding(torch.cat([context, mask], -1))
        reg = self.shared(torch.full_like(attention_mask[:, :1], self.reg_token_id, dtype=torch.long))
        attention_mask = torch.cat([attention_mask, torch.ones_like(attention_mask[:, :1])], -1)
        return self.encoder(torch.cat([embeds, reg], 1), attention_mask), loc_scale, attention_mask

    def decode(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        start = torch.full_like(attention_mask[:, :1], self.decoder_start_token_id, dtype=torch.long)
        return self.decoder(
            self.shared(start), torch.ones_like(attention_mask[:, :1]), (hidden, attention_mask)
        )

    def forward(self, context: Tensor, target: Tensor, target_mask: Tensor) -> dict[str, Tensor]:
        hidden, loc_scale, attention_mask = self.encode(context)
        y = self.output_patch_embedding(self.decode(hidden, attention_mask))
        preds = y.view(-1, len(QUANTILES), HORIZON)
        goal = self.instance_norm(target, loc_scale)[0][:, None]
        loss = 2 * ((goal - preds) * ((goal <= preds).to(preds) - self.quantiles[:, None])).abs()
        loss = (loss * target_mask[:, None].to(loss)).mean(-2).sum(-1).mean()
        scaled = self.instance_norm.inverse(preds, tuple(x[:, None] for x in loc_scale))
        return {"quantile_preds": scaled, "loss": loss}


def seasons() -> tuple[dict[str, Tensor], Tensor]:
    """Waves on a slope; some begin late, some values are missing, and some ends are not known."""
    t, (level, rise, phase, pace) = torch.arange(LENGTH + HORIZON), torch.rand(4, SERIES, 1)
    x = 2 * level + 0.04 * rise * t + (1 + level) * torch.sin(6 * phase + (0.4 + 0.5 * pace) * t)
    x = x + 0.1 * torch.randn_like(x)
    context, target = x[:, :LENGTH].clone(), x[:, LENGTH:].clone()
    start = torch.randint(14, (SERIES, 1))
    start[0] = 9
    context[(t[:LENGTH] < start) | (torch.rand(SERIES, LENGTH) < 0.12)] = torch.nan
    known = t[:HORIZON] < torch.randint(3, HORIZON + 1, (SERIES, 1))
    return {"context": context, "target": target, "target_mask": known}, target


def quantile_losses(outputs: dict[str, Tensor], target: Tensor) -> Tensor:
    """The network's own loss and, in the series' units, that of the quantiles of all that follows."""
    miss = target[:, None] - outputs["quantile_preds"]
    levels = torch.tensor(QUANTILES).to(miss)[:, None]
    return outputs["loss"] / 16 + torch.maximum(levels * miss, (levels - 1) * miss).mean() / 4
