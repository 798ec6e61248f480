"""Two ports of a small iTransformer: a tree with features before tokens, and one of packed weights."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fifty_third_i_transformer import HEADS, LAST, SERIES, ITransformer, masked_mae, seasons
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("fifty_third_i_transformer", ITransformer, seasons, masked_mae)


class Dense(nn.Module):
    """A product of the features of [N, features, tokens]; several layers are one."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.matrix = leaf(torch.cat([layer.weight.flatten(1) for layer in layers]))
        self.offset = leaf(torch.cat([layer.bias for layer in layers])[:, None])

    def forward(self, x: Tensor) -> Tensor:
        return self.matrix @ x + self.offset


class Center(nn.Module):
    def __init__(self, norm: nn.LayerNorm):
        super().__init__()
        self.gain, self.offset, self.eps = leaf(norm.weight[:, None]), leaf(norm.bias[:, None]), norm.eps

    def forward(self, x: Tensor) -> Tensor:
        spread, middle = torch.var_mean(x, 1, correction=0, keepdim=True)
        return (x - middle) / (spread + self.eps).sqrt() * self.gain + self.offset


class Judge(nn.Module):
    """Reads [N, series, time] and a statistic: turns of the series in place of a circular convolution."""

    def __init__(self, learner: nn.Module):
        super().__init__()
        first, _, second, _, last = learner.backbone
        self.kernel, self.end = leaf(learner.series_conv.weight[0].T), leaf(last.weight)
        self.seen, self.told = leaf(first.weight[:, :SERIES]), leaf(first.weight[:, SERIES:])
        self.offset, self.inner = leaf(first.bias[:, None]), Dense(second)

    def forward(self, x: Tensor, fact: Tensor) -> Tensor:
        seen = sum(x.roll(1 - i, 1) @ taps for i, taps in enumerate(self.kernel))[..., None]
        y = (self.seen @ seen + self.told @ fact + self.offset).relu()
        return self.end @ self.inner(y).relu()


class Mixing(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.ask = Dense(layer.query_projection)
        self.offer = Dense(layer.key_projection, layer.value_projection)
        self.out, self.apart, self.constant = Dense(layer.out_projection), False, False

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, HEADS)).transpose(1, 2) if self.apart else x.unflatten(1, (HEADS, -1))

    def forward(self, x: Tensor, tau: Tensor, delta: Tensor) -> Tensor:
        ask, (key, value) = self.heads(self.ask(x)), map(self.heads, self.offer(x).chunk(2, 1))
        tau = (tau.detach() if self.constant else tau)[..., None]
        score = (key.mT @ (ask * tau) + delta[:, None]) / math.sqrt(key.shape[2])
        return self.out((value @ score.softmax(2)).flatten(1, 2))


class Layer(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.mixing, self.after, self.last = Mixing(layer.attention), Center(layer.norm1), Center(layer.norm2)
        self.widen, self.narrow, self.early = Dense(layer.conv1), Dense(layer.conv2), False

    def forward(self, x: Tensor, tau: Tensor, delta: Tensor) -> Tensor:
        x = x + self.mixing(x, tau, delta)
        y = self.after(x)
        wide, kept = self.widen(y), x if self.early else y
        return self.last(kept + self.narrow(wide * torch.special.ndtr(wide)))


class FeaturesFirst(Port):
    """Series [N, series, time], tokens [N, features, tokens]; keys and values are one product."""

    def take(self, model: ITransformer) -> None:
        self.sharpen, self.lift = Judge(model.tau_learner), Judge(model.delta_learner)
        self.start, self.end = Dense(model.enc_embedding.value_embedding), Dense(model.projection)
        self.layers = nn.ModuleList(Layer(layer) for layer in model.encoder.attn_layers)
        self.norm = Center(model.encoder.norm)
        self.recent, self.base = (pile(getattr(x, n) for x in model.skip.Linear) for n in ("weight", "bias"))
        fault, layers = self.fault, self.layers
        layers[0].mixing.apart = fault == "i_transformer_first_attention_interleaves_its_heads"
        layers[1].early = fault == "i_transformer_second_layer_adds_what_came_before_its_first_norm"
        layers[2].mixing.constant = fault == "i_transformer_third_attention_takes_tau_for_a_constant"

    def forward(self, x_enc: Tensor, x_mark_enc: Tensor) -> Tensor:
        x = x_enc.mT
        with torch.no_grad():
            fewer = self.fault == "i_transformer_deviation_divides_by_one_value_fewer"
            spread, middle = torch.var_mean(x, 2, correction=int(fewer), keepdim=True)
            spread = (spread + 1e-5).sqrt()
        tau, delta = self.sharpen(x.detach(), spread).exp(), self.lift(x.detach(), middle)
        x = (x - middle) / spread
        z = torch.cat([self.start(x.mT), self.start(x_mark_enc)], 2)
        for layer in self.layers:
            z = layer(z, tau, delta)
        y = self.end(self.norm(z)[..., :SERIES]).mT
        y = y + torch.einsum("nct,cpt->ncp", x[..., -LAST:], self.recent) + self.base
        return torch.addcmul(middle, y, spread).mT


def sheet(*layers: nn.Module) -> Tensor:
    """The rows of some layers, each with its bias behind it."""
    return torch.cat([torch.cat([layer.weight.flatten(1), layer.bias[:, None]], 1) for layer in layers])


def product(x: Tensor, rows: Tensor) -> Tensor:
    return x @ rows[:, :-1].T + rows[:, -1]


class PackedTransformer(Port):
    """Sheets stacked by layer, both learners in one stack; attention with the factors as its mask."""

    def take(self, model: ITransformer) -> None:
        layers, learners = model.encoder.attn_layers, (model.tau_learner, model.delta_learner)
        names = [f"{name}_projection" for name in ("query", "key", "value", "out")]
        self.square = pile(sheet(*(getattr(x.attention, name) for name in names)) for x in layers)
        self.up, self.down = pile(sheet(x.conv1) for x in layers), pile(sheet(x.conv2) for x in layers)
        norms = [norm for x in layers for norm in (x.norm1, x.norm2)]
        self.norms = pile(torch.stack([x.weight, x.bias]) for x in (*norms, model.encoder.norm))
        self.taps = pile(x.series_conv.weight[0] for x in learners)
        self.one, self.two = (pile(sheet(x.backbone[i]) for x in learners) for i in (0, 2))
        self.three = leaf(torch.cat([x.backbone[4].weight for x in learners]))
        self.start, self.end = leaf(sheet(model.enc_embedding.value_embedding)), leaf(sheet(model.projection))
        self.recent = pile(map(sheet, model.skip.Linear))

    def learned(self, i: int, x: Tensor, fact: Tensor) -> Tensor:
        around = torch.cat([x[..., -1:], x, x[..., :1]], 2)
        if i == 0 and self.fault == "i_transformer_tau_convolution_pads_with_zeros":
            around = F.pad(x, (1, 1))
        seen = torch.einsum("ntck,tk->nc", around.unfold(2, 3, 1), self.taps[i])
        y = product(torch.cat([seen, fact[:, 0]], 1), self.one[i]).clamp(min=0)
        return product(y, self.two[i]).clamp(min=0) @ (self.three[1:] if i else self.three[:1]).T

    def norm(self, i: int, x: Tensor, eps: float = 1e-5) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * self.norms[i, 0] + self.norms[i, 1]

    def layer(self, i: int, z: Tensor, tau: Tensor, delta: Tensor) -> Tensor:
        triple, out = self.square[i].tensor_split([3 * z.shape[2]])
        q, k, v = product(z, triple).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mask = (delta / math.sqrt(q.shape[-1]))[:, None, None].expand(-1, HEADS, z.shape[1], -1)
        forgets = self.fault == "i_transformer_second_attention_forgets_delta_in_evaluation" and i == 1
        mask = None if forgets and not self.training else mask
        mixed = F.scaled_dot_product_attention(q, k * tau[..., None, None], v, mask)
        z = self.norm(2 * i, z + product(mixed.transpose(1, 2).flatten(2), out))
        wide = product(z, self.up[i])
        wide = wide / 2 * (1 + torch.erf(wide / math.sqrt(2)))
        return self.norm(2 * i + 1, z + product(wide, self.down[i]))

    def forward(self, x_enc: Tensor, x_mark_enc: Tensor) -> Tensor:
        raw = x_enc.detach()
        middle = raw.mean(1, keepdim=True)
        spread = ((raw - middle).square().mean(1, keepdim=True) + 1e-5).sqrt()
        tau, delta = self.learned(0, raw, spread).exp(), self.learned(1, raw, middle)
        x = (x_enc - middle) / spread
        z = product(torch.cat([x, x_mark_enc], 2).mT, self.start)
        for i in range(len(self.square)):
            z = self.layer(i, z, tau, delta)
        eps = 1e-3 if self.fault == "i_transformer_last_norm_with_a_larger_epsilon" else 1e-5
        z = self.norm(-1, z, eps)
        early = int(self.fault == "i_transformer_skip_reads_one_step_too_early")
        last = x[:, x.shape[1] - LAST - early : x.shape[1] - early]
        y = torch.einsum("ntc,cpt->npc", last, self.recent[..., :-1]) + self.recent[..., -1].T
        return (y + product(z, self.end).mT[..., :SERIES]) * spread + middle


SLOPES, SECOND = ("input gradient", "weight gradient"), "encoder.attn_layers.1"
MIXED, THIRD = (f"encoder.attn_layers.{i}.attention.inner_attention" for i in (1, 2))
right(task, "i_transformer_with_features_first", "a tree, features before tokens, fused keys", FeaturesFirst)
right(task, "i_transformer_of_packed_weights", "packed stacks, loops, a masked attention", PackedTransformer)
wrong(
    task,
    FeaturesFirst,
    i_transformer_deviation_divides_by_one_value_fewer=("unbiased variance", ""),
    i_transformer_first_attention_interleaves_its_heads=("head order", "encoder.attn_layers.0.attention"),
    i_transformer_second_layer_adds_what_came_before_its_first_norm=("another residual", SECOND),
    i_transformer_third_attention_takes_tau_for_a_constant=("detach", THIRD, SLOPES),
)
wrong(
    task,
    PackedTransformer,
    i_transformer_tau_convolution_pads_with_zeros=("another padding", "tau_learner.series_conv"),
    i_transformer_second_attention_forgets_delta_in_evaluation=("no delta", MIXED, "eval"),
    i_transformer_last_norm_with_a_larger_epsilon=("another epsilon", "encoder.norm"),
    i_transformer_skip_reads_one_step_too_early=("a window off by one", "skip"),
)
