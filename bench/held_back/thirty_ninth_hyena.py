"""Two ports of a small Hyena language model: a tree with the channels last, and one class of stacks."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._thirty_ninth_hyena import WIDTH, HyenaLM, motifs, next_tokens

task = few("thirty_ninth_hyena", HyenaLM, motifs, next_tokens)


class Affine(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor):
        super().__init__()
        self.matrix, self.offset = leaf(weight.T), leaf(bias)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix + self.offset


class Standard(nn.Module):
    def __init__(self, norm: nn.LayerNorm):
        super().__init__()
        self.gain, self.offset, self.eps = leaf(norm.weight), leaf(norm.bias), norm.eps

    def forward(self, x: Tensor) -> Tensor:
        spread, center = torch.var_mean(x, -1, correction=0, keepdim=True)
        return (x - center) / (spread + self.eps).sqrt() * self.gain + self.offset


class Stream(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor, taps: Tensor, offset: Tensor):
        super().__init__()
        self.enter, self.offset = Affine(weight, bias), leaf(offset)
        self.now, self.one, self.two = (leaf(taps[:, 0, i]) for i in (2, 1, 0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        one, two = (F.pad(x, (0, 0, i, 0))[:, : x.shape[1]] for i in (1, 2))
        return self.now * x + self.one * one + self.two * two + self.offset


class Response(nn.Module):
    """The impulse responses of all orders, [L, orders, D]."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        net, window, place = layer.implicit_filter, layer.modulation, layer.pos_emb
        self.first, self.second = (Affine(net[i].weight, net[i].bias) for i in (0, 2))
        self.speed, self.last = leaf(net[1].freq[0]), leaf(net[4].weight.T)
        self.decay, self.floor = leaf(window.deltas[0, 0]), leaf(window.shift[0, 0])
        self.features, self.stretched = leaf(place.z[0]), False
        self.register_buffer("time", place.t[0].clone())

    def forward(self, length: int) -> Tensor:
        y, time = self.features[:length], self.time[:length]
        if self.stretched and not self.training:
            time = time / time[-1]
        for layer in (self.first, self.second):
            y = (layer(y) * self.speed).sin()
        y = y @ self.last
        return (y * self.floor + y / (time * self.decay.abs()).exp()).unflatten(1, (-1, WIDTH))


class Mixing(nn.Module):
    """A value, gated and convolved by a triangular matrix for each order, and gated at last."""

    def __init__(self, mixer: nn.Module):
        super().__init__()
        enter, short = mixer.in_proj, mixer.short_filter
        weights = (x.split(WIDTH) for x in (enter.weight, enter.bias, short.weight, short.bias))
        *gates, self.value = (Stream(*each) for each in zip(*weights, strict=True))
        self.gates = nn.ModuleList(gates[::-1])
        self.response, self.leave = Response(mixer.filter_fn), Affine(*mixer.out_proj.parameters())
        self.through, self.silent = leaf(mixer.filter_fn.bias.view(-1, WIDTH)), False

    def forward(self, x: Tensor) -> Tensor:
        steps, value = torch.arange(x.shape[1], device=x.device), self.value(x)
        lag, kernel = steps[:, None] - steps, self.response(x.shape[1])
        *inner, outer = (gate(x) for gate in self.gates)
        for gate, response, through in zip(inner, kernel.unbind(1), self.through, strict=True):
            value = value * gate
            matrix = response[lag.clamp(min=0)] * (lag >= 0)[..., None]
            value = torch.einsum("ijd,njd->nid", matrix, value) + through * value
        return self.leave(value * (outer.detach() if self.silent else outer))


class HyenaOfHalves(Port):
    """Halves of blocks; each stream has its own projection, and a long convolution is a matrix product."""

    def take(self, model: HyenaLM) -> None:
        layers, fault, halves = model.backbone.layers, self.fault, []
        for i, x in enumerate(layers):
            rough = fault == "hyena_last_mlp_takes_the_gelu_of_tanh" and i == 2
            mixing, gelu = Mixing(x.mixer), nn.GELU("tanh" if rough else "none")
            up, down = (Affine(y.weight, y.bias) for y in (x.mlp.fc1, x.mlp.fc2))
            halves += [(Standard(x.norm1), mixing), (Standard(x.norm2), up, gelu, down)]
            for stream in (*mixing.gates, mixing.value):
                if fault == "hyena_first_short_filter_flipped" and i == 0:
                    stream.now, stream.two = stream.two, stream.now
            mixing.silent = fault == "hyena_second_outer_gate_without_gradient" and i == 1
            mixing.response.stretched = fault == "hyena_last_time_stretched_in_evaluation" and i == 2
        self.words = leaf(model.lm_head.weight)
        self.halves = nn.ModuleList(nn.Sequential(*x) for x in halves)
        self.last = Standard(model.backbone.ln_f)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words[input_ids]
        for half in self.halves:
            x = x + half(x)
        return self.last(x) @ self.words.T


def sheet(layer: nn.Module) -> Tensor:
    return torch.cat([layer.weight.flatten(1), layer.bias[:, None]], 1)


def apply(rows: Tensor, x: Tensor) -> Tensor:
    return F.linear(x, rows[..., :-1], rows[..., -1])


class StackedHyena(Port):
    """Sheets of all layers in stacks; the channels are before time, and transforms longer than need be."""

    def take(self, model: HyenaLM) -> None:
        layers, self.words = model.backbone.layers, leaf(model.lm_head.weight)
        norms = [y for x in layers for y in (x.norm1, x.norm2)] + [model.backbone.ln_f]
        self.norms = pile(torch.stack([x.weight, x.bias]) for x in norms)
        self.enter = pile(sheet(x.mixer.in_proj) for x in layers)
        self.leave = pile(sheet(x.mixer.out_proj) for x in layers)
        self.short = pile(sheet(x.mixer.short_filter) for x in layers)
        self.up, self.down = pile(sheet(x.mlp.fc1) for x in layers), pile(sheet(x.mlp.fc2) for x in layers)
        filters = [x.mixer.filter_fn for x in layers]
        self.places = pile(x.pos_emb.z[0] for x in filters)
        self.f, self.g = (pile(sheet(x.implicit_filter[i]) for x in filters) for i in (0, 2))
        self.h = pile(x.implicit_filter[4].weight for x in filters)
        self.speed = pile(x.implicit_filter[1].freq[0] for x in filters)
        windows = ((x.modulation.deltas[0, 0], x.modulation.shift[0, 0], x.bias) for x in filters)
        self.channels = pile(map(torch.stack, windows))
        self.register_buffer("time", filters[0].pos_emb.t[0, :, 0].clone())

    def norm(self, i: int, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], *self.norms[i])

    def kernels(self, i: int, length: int) -> Tensor:
        y = torch.sin(self.speed[i] * apply(self.f[i], self.places[i, :length]))
        y = self.h[i] @ torch.sin(self.speed[i] * apply(self.g[i], y)).T
        decay, floor, _ = self.channels[i].unsqueeze(-1)
        window = (-decay.abs() * self.time[:length]).exp()
        late = self.fault == "hyena_second_shift_added_to_the_filter" and i == 1
        y = y * window + floor if late else y * (window + floor)
        if self.fault == "hyena_last_filters_order_by_channel" and i == 2:
            return y.unflatten(0, (WIDTH, -1)).transpose(0, 1)
        return y.unflatten(0, (-1, WIDTH))

    def mix(self, i: int, x: Tensor) -> Tensor:
        length, short = x.shape[1], self.short[i]
        u = F.pad(apply(self.enter[i], x).mT, (2, 0)).unfold(2, length, 1)
        u = torch.einsum("nctl,ct->ncl", u, short[:, :3]) + short[:, 3:]
        (*gates, v), kernels = u.unflatten(1, (-1, WIDTH)).unbind(1), self.kernels(i, length)
        through = self.channels[i, 2].view(-1, WIDTH, 1)
        circular = self.fault == "hyena_first_long_convolutions_circular" and i == 0
        size = length if circular else 2 * length + 7
        for kernel, skip in zip(kernels, through, strict=True):
            v = v * gates.pop()
            waves = torch.fft.fft(v, size) * torch.fft.fft(kernel, size)
            v = torch.fft.ifft(waves).real[..., :length] + v * skip
        return apply(self.leave[i], (v * gates.pop()).mT)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = F.embedding(input_ids, self.words)
        for i in range(len(self.enter)):
            x = x + self.mix(i, self.norm(2 * i, x))
            x = x + apply(self.down[i], F.gelu(apply(self.up[i], self.norm(2 * i + 1, x))))
        words = self.words.detach() if self.fault == "hyena_tied_head_without_gradient" else self.words
        return F.linear(self.norm(-1, x), words)


MIXERS, SLOPES = [f"backbone.layers.{i}.mixer" for i in range(3)], ("input gradient", "weight gradient")
right(task, "hyena_of_halves_with_channels_last", "a tree, split streams, matrix products", HyenaOfHalves)
right(task, "hyena_of_stacked_weights", "stacked sheets, windows, longer transforms", StackedHyena)
wrong(
    task,
    HyenaOfHalves,
    hyena_first_short_filter_flipped=("a flipped kernel", MIXERS[0] + ".short_filter"),
    hyena_second_outer_gate_without_gradient=("detach", MIXERS[1], SLOPES),
    hyena_last_time_stretched_in_evaluation=("another time", MIXERS[2] + ".filter_fn.pos_emb", "eval"),
    hyena_last_mlp_takes_the_gelu_of_tanh=("an approximation", "backbone.layers.2.mlp"),
)
wrong(
    task,
    StackedHyena,
    hyena_first_long_convolutions_circular=("no padding", MIXERS[0] + ".filter_fn"),
    hyena_second_shift_added_to_the_filter=("another order", MIXERS[1] + ".filter_fn.modulation"),
    hyena_last_filters_order_by_channel=("another axis order", MIXERS[2]),
    hyena_tied_head_without_gradient=("detach", "lm_head", "weight gradient"),
)
