"""Two ports of a small Informer: a tree with the channels first, and one class of stacked weights."""

import math
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._thirty_sixth_informer import N_HEADS, PRED_LEN, Informer, seasons

task = few("thirty_sixth_informer", Informer, seasons, F.mse_loss)


def joined(layer: nn.Module) -> Tensor:
    weight = layer.weight.mT if layer.weight.dim() == 3 else layer.weight
    return torch.cat([weight.flatten(1), layer.bias[:, None]], 1)


def four(old: nn.Module) -> Tensor:
    names = "query", "key", "value", "out"
    return torch.stack([joined(getattr(old, f"{name}_projection")) for name in names])


def apply(x: Tensor, rows: Tensor) -> Tensor:
    return F.linear(x, rows[:, :-1], rows[:, -1])


def ring(x: Tensor, rows: Tensor) -> Tensor:
    return apply(torch.cat([x.roll(1, 1), x, x.roll(-1, 1)], 2), rows)


class Ring(nn.Module):
    def __init__(self, conv: nn.Conv1d):
        super().__init__()
        self.taps, self.bias, self.open = leaf(conv.weight.permute(2, 0, 1)), leaf(conv.bias), False

    def forward(self, x: Tensor) -> Tensor:
        if self.open:
            return F.conv1d(x, self.taps.permute(1, 2, 0), self.bias, padding=1)
        return sum(tap @ x.roll(1 - k, 2) for k, tap in enumerate(self.taps)) + self.bias[:, None]


class Look(nn.Module):
    def __init__(self, old: nn.Module):
        super().__init__()
        rows, inner = four(old), old.inner_attention
        self.w, self.out = leaf(rows[:3].flatten(0, 1)), leaf(rows[3])
        self.mix, self.causal, self.top = old.mix, getattr(inner, "mask_flag", False), getattr(inner, "u", 0)
        if self.top:
            self.register_buffer(
                "drawn", F.one_hot(inner.index_sample, len(inner.index_sample)).sum(1).to(rows)
            )

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        d, memory = x.shape[1], x if memory is None else memory
        asked = apply(x.mT, self.w[:d]), *apply(memory.mT, self.w[d:]).chunk(2, 2)
        q, k, v = (t.mT.unflatten(1, (N_HEADS, -1)) for t in asked)
        scores = q.mT @ k
        late = torch.ones_like(scores).triu(1).bool() & self.causal
        weights = (scores / math.sqrt(q.shape[2])).masked_fill(late, -math.inf).softmax(3)
        if self.top:
            least = scores.masked_fill(self.drawn == 0, -math.inf).amax(3)
            measure = least - (scores * self.drawn).sum(3) / k.shape[3]
            busy = torch.zeros_like(measure).scatter(2, measure.topk(self.top)[1], 1).bool()
            lazy = torch.ones_like(weights).tril() if self.causal else torch.ones_like(weights) / k.shape[3]
            weights = torch.where(busy[..., None], weights, lazy)
        y = v @ weights.mT
        return apply(y.mT.reshape(x.mT.shape) if self.mix else y.flatten(1, 2).mT, self.out).mT


class Added(nn.Module):
    def __init__(self, norm: nn.LayerNorm, part: nn.Module | None = None):
        super().__init__()
        self.gain, self.shift, self.part = leaf(norm.weight), leaf(norm.bias), part

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        x = x + self.part(x, *more) if self.part else x
        return F.layer_norm(x.mT, self.gain.shape, self.gain, self.shift).mT


class InformerOfChannels(Port):
    def take(self, model: Informer) -> None:
        enc, dec, ends = model.encoder, model.decoder, (model.enc_embedding, model.dec_embedding)
        self.rings = nn.ModuleList(Ring(x.value_embedding.tokenConv) for x in ends)
        self.clock = pile(x.temporal_embedding.embed.weight for x in ends)
        self.register_buffer("places", ends[0].position_embedding.pe[0].T.clone())
        self.past, self.coming = nn.Sequential(), nn.ModuleList()
        halves = ((Ring(x.downConv), deepcopy(x.norm)) for x in enc.conv_layers)
        downs = (nn.Sequential(*x, nn.ELU(), nn.MaxPool1d(3, 2, 1)) for x in halves)
        for x, end in zip(enc.attn_layers, [*downs, Added(enc.norm)], strict=True):
            wide = nn.Sequential(deepcopy(x.conv1), nn.GELU(), deepcopy(x.conv2))
            self.past.extend([Added(x.norm1, Look(x.attention)), Added(x.norm2, wide), end])
        for x in dec.layers:
            wide = nn.Sequential(deepcopy(x.conv1), nn.GELU(), deepcopy(x.conv2))
            looks = Added(x.norm1, Look(x.self_attention)), Added(x.norm2, Look(x.cross_attention))
            self.coming.append(nn.ModuleList([*looks, Added(x.norm3, wide)]))
        self.last, self.tell = Added(dec.norm), leaf(joined(model.projection))
        self.rings[0].open = self.fault == "informer_encoder_tokens_padded_by_zeros"
        if self.fault == "informer_first_pool_padded_by_zeros":
            self.past[2][3] = nn.Sequential(nn.ConstantPad1d(1, 0.0), nn.MaxPool1d(3, 2))
        self.past[5][1].momentum = 0.9 if self.fault == "informer_second_norm_moves_by_nine_tenths" else 0.1
        self.coming[1][0].part.mix = self.fault != "informer_second_decoder_mixes_no_heads"

    def forward(self, x_enc: Tensor, x_mark_enc: Tensor, x_dec: Tensor, x_mark_dec: Tensor) -> Tensor:
        pairs = zip((x_enc, x_dec), (x_mark_enc, x_mark_dec), self.rings, self.clock, strict=True)
        x, y = (turn(t.mT) + w @ m.mT + self.places[:, : t.shape[1]] for t, m, turn, w in pairs)
        x = self.past(x)
        for own, across, wide in self.coming:
            y = wide(across(own(y), x))
        return apply(self.last(y)[..., -PRED_LEN:].mT, self.tell)


class StackedInformer(Port):
    def take(self, model: Informer) -> None:
        enc, dec, ends = model.encoder, model.decoder, (model.enc_embedding, model.dec_embedding)
        layers, downs = [*enc.attn_layers, *dec.layers], enc.conv_layers
        looks = [x.attention for x in enc.attn_layers] + [x.self_attention for x in dec.layers]
        self.looks = pile(four(x) for x in (*looks, *(x.cross_attention for x in dec.layers)))
        self.up, self.down = (pile(joined(getattr(x, n)) for x in layers) for n in ("conv1", "conv2"))
        norms = [getattr(x, n) for x in layers for n in ("norm1", "norm2", "norm3") if hasattr(x, n)]
        self.norms = pile(torch.stack([x.weight, x.bias]) for x in (*norms, enc.norm, dec.norm))
        self.halve, self.tell = pile(joined(x.downConv) for x in downs), leaf(joined(model.projection))
        self.bands = pile(torch.stack([x.norm.weight, x.norm.bias]) for x in downs)
        self.enter = nn.ParameterList(leaf(joined(x.value_embedding.tokenConv)) for x in ends)
        self.clock = pile(x.temporal_embedding.embed.weight for x in ends)
        self.register_buffer("places", ends[0].position_embedding.pe[0].clone())
        self.register_buffer("seen", torch.stack([torch.stack([*x.norm.buffers()][:2]) for x in downs]))
        for i, x in enumerate(looks):
            self.register_buffer(f"draw_{i}", x.inner_attention.index_sample.clone())

    def norm(self, x: Tensor, i: int) -> Tensor:
        unbiased = self.fault == "informer_encoder_last_norm_by_the_unbiased_variance" and i == 12
        spread, center = torch.var_mean(x, -1, correction=int(unbiased), keepdim=True)
        return (x - center) * (spread + 1e-5).rsqrt() * self.norms[i, 0] + self.norms[i, 1]

    def attend(self, i: int, x: Tensor, memory: Tensor) -> Tensor:
        pairs, length = zip((x, memory, memory), self.looks[i], strict=False), x.shape[1]
        q, k, v = (apply(t, w).unflatten(2, (N_HEADS, -1)).transpose(1, 2) for t, w in pairs)
        if i > 4:
            weights = (q @ k.mT * q.shape[3] ** -0.5).softmax(3)
            fixed = self.fault == "informer_second_cross_weights_constant" and i == 6
            return apply(
                ((weights.detach() if fixed else weights) @ v).transpose(1, 2).flatten(2), self.looks[i, 3]
            )
        with torch.no_grad():
            some = torch.einsum("nhle,nhlse->nhls", q, k[:, :, self.get_buffer(f"draw_{i}")])
            alone = self.fault == "informer_first_layer_takes_queries_by_maximum" and i == 0
            measure = some.amax(3) - (0 if alone else some.sum(3) / length)
            busy = measure.argsort(2, descending=True)[..., : some.shape[3], None]
        scores = torch.take_along_dim(q, busy, 2) @ k.mT * q.shape[3] ** -0.5
        if i > 2:
            ranked = self.fault == "informer_first_decoder_masks_by_rank" and i == 3
            at = torch.arange(busy.shape[2])[:, None] if ranked else busy
            scores = scores.where(torch.arange(length) <= at, -math.inf)
        rest = v.cumsum(2) if i > 2 else v.mean(2, True).repeat(1, 1, length, 1)
        y = rest.scatter(2, busy.expand(-1, -1, -1, v.shape[3]), scores.softmax(3) @ v)
        return apply(y.reshape(x.shape) if i > 2 else y.transpose(1, 2).flatten(2), self.looks[i, 3])

    def distil(self, i: int, x: Tensor) -> Tensor:
        y = F.batch_norm(ring(x, self.halve[i]).mT, *self.seen[i], *self.bands[i], self.training)
        return F.max_pool1d(F.elu(y), 3, 2, 1).mT

    def forward(self, x_enc: Tensor, x_mark_enc: Tensor, x_dec: Tensor, x_mark_dec: Tensor) -> Tensor:
        pairs = zip((x_enc, x_dec), (x_mark_enc, x_mark_dec), self.enter, self.clock, strict=True)
        x, y = (ring(t, rows) + m @ w.T + self.places[: t.shape[1]] for t, m, rows, w in pairs)
        for i in range(3):
            x = self.norm(x + self.attend(i, x, x), 2 * i)
            x = self.norm(x + apply(F.gelu(apply(x, self.up[i])), self.down[i]), 2 * i + 1)
            x = self.distil(i, x) if i < 2 else self.norm(x, 12)
        for i in (3, 4):
            y = self.norm(y + self.attend(i, y, y), 3 * i - 3)
            y = self.norm(y + self.attend(i + 2, y, x), 3 * i - 2)
            y = self.norm(y + apply(F.gelu(apply(y, self.up[i])), self.down[i]), 3 * i - 1)
        return apply(self.norm(y[:, -PRED_LEN:], 13), self.tell)


SLOPES, PADDED = ("input gradient", "weight gradient"), "another padding"
INNER = "attention.inner_attention"
right(task, "informer_of_channels", "a tree, channels first, lazy rows of weights", InformerOfChannels)
right(task, "informer_of_stacked_weights", "packed stacks, loops, sorted queries", StackedInformer)
wrong(
    task,
    InformerOfChannels,
    informer_encoder_tokens_padded_by_zeros=(PADDED, "enc_embedding.value_embedding.tokenConv"),
    informer_first_pool_padded_by_zeros=(PADDED, "encoder.conv_layers.0.maxPool"),
    informer_second_norm_moves_by_nine_tenths=("momentum", "encoder.conv_layers.1.norm", "buffer"),
    informer_second_decoder_mixes_no_heads=("a step left out", "decoder.layers.1.self_attention"),
)
wrong(
    task,
    StackedInformer,
    informer_first_layer_takes_queries_by_maximum=("another measure", "encoder.attn_layers.0." + INNER),
    informer_encoder_last_norm_by_the_unbiased_variance=("another variance", "encoder.norm"),
    informer_first_decoder_masks_by_rank=("a mask of other places", "decoder.layers.0.self_" + INNER),
    informer_second_cross_weights_constant=("detach", "decoder.layers.1.cross_" + INNER, SLOPES),
)
