"""A neural process: a mean of known pairs makes the weights of a small network with a mixture at its end."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, wrong
from bench.held_back._sixth_ports import few


class Gather(nn.Module):
    """The mean of the first ``lengths`` rows of [N, T, C]."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        real = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
        return (x * real[..., None]).sum(1) / lengths[:, None]


class Made(nn.Module):
    """A linear layer whose weight and bias are made of a context, for each of the batch."""

    def __init__(self, context: int, before: int, after: int):
        super().__init__()
        self.before, self.after = before, after
        self.weight, self.bias = nn.Linear(context, after * before), nn.Linear(context, after)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        weight = self.weight(context).view(-1, self.after, self.before) / self.before**0.5
        return x @ weight.mT + self.bias(context)[:, None]


class Mixture(nn.Module):
    """[N, T, 3 K] -> log-weights, means and spreads of K normal distributions."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights, means, spreads = x.chunk(3, 2)
        return weights.log_softmax(2), means, F.softplus(spreads) + 0.1


class Process(nn.Module):
    """Pairs (x, y), ``lengths`` of them known, and places to ask at -> a mixture for each place."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(2, 20), nn.GELU(), nn.Linear(20, 14), nn.LayerNorm(14))
        self.gather = Gather()
        self.layers = nn.ModuleList([Made(14, 1, 8), Made(14, 8, 8), Made(14, 8, 12)])
        self.mixture = Mixture()

    def forward(self, x: Tensor, y: Tensor, lengths: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        context = self.gather(self.encode(torch.stack([x, y], 2)), lengths)
        h = self.layers[0](at[..., None], context).tanh()
        h = self.layers[1](h, context).tanh()
        return self.mixture(self.layers[2](h, context))


def _curves() -> tuple[dict[str, Tensor], Tensor]:
    """Waves of their own pace and phase, known at some places."""
    x, at = 2 * torch.rand(8, 9) - 1, 2 * torch.rand(8, 11) - 1
    pace, phase = 1 + 2 * torch.rand(8, 1), 3 * torch.rand(8, 1)
    y = torch.sin(pace * x + phase)
    given = {"x": x, "y": y, "lengths": torch.randint(3, 10, (8,)), "at": at}
    return given, torch.sin(pace * at + phase)


def _surprise(outputs: tuple, y: Tensor) -> Tensor:
    """The mean negative log-likelihood."""
    weights, means, spreads = outputs
    away = (y[..., None] - means) / spreads
    logs = weights - 0.5 * away.square() - spreads.log() - 0.5 * math.log(2 * math.pi)
    return -logs.logsumexp(2).mean()


process = few("sixth_process", Process, _curves, _surprise)
SHAPES = ((8, 1), (8, 8), (12, 8))


class OneMaker(Port):
    """All made weights by one product; known pairs one after the other without their filler."""

    def take(self, model: Process) -> None:
        first, _, second, norm = model.encode
        self.enter, self.enter_shift = leaf(first.weight.T), leaf(first.bias)
        self.leave, self.leave_shift = leaf(second.weight.T), leaf(second.bias)
        self.gain, self.offset = leaf(norm.weight), leaf(norm.bias)
        makers = [maker for layer in model.layers for maker in (layer.weight, layer.bias)]
        self.make = leaf(torch.cat([maker.weight for maker in makers]))
        self.make_shift = leaf(torch.cat([maker.bias for maker in makers]))

    def context(self, x: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
        real = torch.arange(x.shape[1], device=x.device).expand_as(x) < lengths[:, None]
        owner = torch.arange(len(x), device=x.device).repeat_interleave(lengths)
        pairs = torch.stack([x[real], y[real]], 1)
        pairs = F.gelu(pairs @ self.enter + self.enter_shift) @ self.leave + self.leave_shift
        pairs = F.layer_norm(pairs, (14,), self.gain, self.offset)
        total = pairs.new_zeros(len(x), 14).index_add(0, owner, pairs)
        if self.fault == "filler_counted_among_the_known_pairs":
            lengths = torch.full_like(lengths, x.shape[1])
        return total / lengths.unsqueeze(1)

    def made(self, context: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The weight [N, before, after] and the shift of each layer."""
        values = context @ self.make.T + self.make_shift
        sizes = [size for after, before in SHAPES for size in (after * before, after)]
        pieces, found = list(values.split(sizes, 1)), []
        for i, (after, before) in enumerate(SHAPES):
            weight, shift = pieces[2 * i : 2 * i + 2]
            weight = weight.unflatten(1, (after, before)).mT / math.sqrt(before)
            if self.fault == "middle_weights_read_by_columns" and i == 1:
                weight = weight.mT
            if self.fault == "last_shift_made_of_a_held_context" and i == 2:
                maker, own = self.make[-after:], self.make_shift[-after:]
                shift = context.detach() @ maker.T + own
            found.append((weight, shift.unsqueeze(1)))
        return found

    def layers(self, h: Tensor, context: Tensor) -> Tensor:
        for i, (weight, shift) in enumerate(self.made(context)):
            h = torch.baddbmm(shift, h if i == 0 else h.tanh(), weight)
        return h

    def forward(self, x: Tensor, y: Tensor, lengths: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.layers(at.unsqueeze(2), self.context(x, y, lengths))
        weights, means, spreads = h[..., :4], h[..., 4:8], h[..., 8:]
        weights = weights - weights.logsumexp(2, keepdim=True)
        if self.fault == "least_spread_inside_the_softplus":
            return weights, means, F.softplus(spreads + 0.1)
        return weights, means, torch.logaddexp(spreads, torch.zeros_like(spreads)) + 0.1


class Bilinear(OneMaker):
    """No weight is ever made: a place and the context meet in one product of three factors."""

    def layers(self, h: Tensor, context: Tensor) -> Tensor:
        start = 0
        for i, (after, before) in enumerate(SHAPES):
            middle, end = start + after * before, start + after * before + after
            h = (h if i == 0 else h.tanh()) / math.sqrt(before)
            cube = self.make[start:middle].view(after, before, 14)
            flat = self.make_shift[start:middle].view(after, before)
            pairs = torch.einsum("ntb,nc->ntbc", h, context)
            y = torch.einsum("ntbc,abc->nta", pairs, cube) + h @ flat.T
            h = y + F.linear(context, self.make[middle:end], self.make_shift[middle:end])[:, None]
            start = end
        return h


right(process, "layers_made_by_one_product", "all makers in one, ragged rows", OneMaker)
right(process, "made_layers_as_bilinear_forms", "a product in another order", Bilinear)
wrong(
    process,
    OneMaker,
    filler_counted_among_the_known_pairs=("padding counted in a mean", "gather"),
    middle_weights_read_by_columns=("transposed weight", "layers.1"),
    last_shift_made_of_a_held_context=("a detach too many", "layers.2", "input gradient"),
    least_spread_inside_the_softplus=("constant at another point", "mixture"),
)
