"""Two ports of a small masked autoregressive flow: a tree over whole sets, and stacks with no reversals."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, distributions, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fifty_first_made_flow import Flow, bananas, nats_by_set
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("fifty_first_made_flow", Flow, bananas, nats_by_set)


class Wired(nn.Module):
    """x @ w + b over the last axis, where ``wires`` says which weights there are."""

    def __init__(self, weight: Tensor, bias: Tensor, wires: Tensor | None = None):
        super().__init__()
        self.w, self.b = leaf(weight.T), leaf(bias)
        self.register_buffer("wires", None if wires is None else wires.T.bool())

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.w if self.wires is None else self.w.where(self.wires, 0)) + self.b


def wired(layer: nn.Linear) -> Wired:
    return Wired(layer.weight, layer.bias, getattr(layer, "mask", None))


class Gated(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        self.inner = nn.Sequential(nn.ReLU(), wired(block.linear_layers[0]), nn.ReLU())
        self.outer, self.gate, self.swapped = wired(block.linear_layers[1]), wired(block.context_layer), False

    def forward(self, x: Tensor, told: Tensor) -> Tensor:
        y, gate = self.outer(self.inner(x)), self.gate(told)
        return x + (gate * y.sigmoid() if self.swapped else y * gate.sigmoid())


class Bend(nn.Module):
    """A reversal and the affine step after it, with a head for each of its two numbers."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        net, self.least, self.turned = layer.autoregressive_net, layer.epsilon, True
        self.seen, self.told = wired(net.initial_layer), wired(net.context_layer)
        self.first = nn.Sequential(wired(net.blocks[0].linear), nn.ReLU())
        self.gated = nn.ModuleList(map(Gated, net.blocks[1:]))
        last = net.final_layer
        self.stretch, self.move = (Wired(last.weight[i::2], last.bias[i::2], last.mask[i::2]) for i in (0, 1))

    def heads(self, x: Tensor, told: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(self.told(told) + self.seen(x))
        for block in self.gated:
            y = block(y, told)
        return self.least + F.softplus(self.stretch(y)), self.move(y)

    def forward(self, x: Tensor, told: Tensor) -> tuple[Tensor, Tensor]:
        x = x.flip(-1) if self.turned else x
        scale, shift = self.heads(x, told)
        return torch.addcmul(shift, x, scale), scale.log().sum(-1)


class Level(nn.Module):
    """A batch norm as a shift and a product by the exponential of a logarithm."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.raw, self.offset = leaf(norm.unconstrained_weight), leaf(norm.bias)
        self.eps, self.rate, self.fixed = norm.eps, norm.momentum, False
        self.register_buffer("middle", norm.running_mean.clone())
        self.register_buffer("width", norm.running_var.clone())

    def forward(self, x: Tensor, told: Tensor) -> tuple[Tensor, Tensor]:
        middle, width = self.middle, self.width
        if self.training:
            width, middle = torch.var_mean(x.detach() if self.fixed else x, (0, 1))
            self.middle.lerp_(middle.detach(), self.rate)
            self.width.lerp_(width.detach(), self.rate)
        log = (F.softplus(self.raw) + self.eps).log() - (width + self.eps).log() / 2
        return (x - middle) * log.exp() + self.offset, log.sum()


class FlowOfSets(Port):
    """A tree over [N, T, D] in which the context is broadcast and the weights are transposed."""

    def take(self, model: Flow) -> None:
        layers, fault = model._transform._transforms, self.fault
        self.chain = nn.ModuleList(x for i in (1, 4, 7) for x in (Bend(layers[i]), Level(layers[i + 1])))
        ask, base = model._embedding_net, model._distribution._context_encoder
        self.ask = nn.Sequential(wired(ask[0]), nn.ReLU(), wired(ask[2]))
        self.middle, self.log = map(Wired, base.weight.chunk(2), base.bias.chunk(2))
        self.chain[0].gated[0].swapped = fault == "made_flow_first_residual_block_swaps_its_gate"
        self.chain[2].turned = fault != "made_flow_second_reversal_left_out"
        self.chain[3].fixed = fault == "made_flow_second_batch_norm_takes_its_statistics_for_constants"
        if fault == "made_flow_last_outputs_see_their_own_feature":
            last = layers[7].autoregressive_net
            wires = last.blocks[2].degrees[:, None] <= last.final_layer.degrees[::2]
            self.chain[4].stretch.wires, self.chain[4].move.wires = wires, wires.clone()

    def forward(self, inputs: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        told, z, found = self.ask(context)[:, None], inputs, 0
        for part in self.chain:
            z, more = part(z, told)
            found = found + more
        base = distributions.Normal(self.middle(told), self.log(told).exp(), validate_args=False)
        return -(base.log_prob(z).sum(-1) + found) / z.shape[-1], z


class StackedFlow(Port):
    """Stacks by layer; the features keep their order, and the weights of every other layer are turned."""

    def take(self, model: Flow) -> None:
        layers, base = model._transform._transforms, model._distribution._context_encoder
        nets, norms = [x.autoregressive_net for x in layers[1::3]], layers[2::3]
        squares = [[x.blocks[0].linear, *x.blocks[1].linear_layers, *x.blocks[2].linear_layers] for x in nets]
        sides = [[x.context_layer, x.blocks[1].context_layer, x.blocks[2].context_layer] for x in nets]
        self.inner = leaf(torch.stack([pile(x.weight for x in row) for row in squares]))
        self.side = leaf(torch.stack([pile(x.weight for x in row) for row in sides]))
        rows = [[*a, *b, x.initial_layer] for a, b, x in zip(squares, sides, nets, strict=True)]
        self.bias = leaf(torch.stack([pile(x.bias for x in row) for row in rows]))
        self.enter = leaf(self.turn([x.initial_layer.weight for x in nets]))
        ends = [x.final_layer for x in nets]
        self.leave = leaf(self.turn([x.weight.T.unflatten(1, (-1, 2)).permute(2, 0, 1) for x in ends]))
        self.rest = leaf(self.turn([x.bias.view(-1, 2).T for x in ends]))
        self.norm = leaf(self.turn([torch.stack([x.unconstrained_weight, x.bias]) for x in norms]))
        self.register_buffer("kept", self.turn([torch.stack([x.running_mean, x.running_var]) for x in norms]))
        self.register_buffer("mask_in", self.turn([x.initial_layer.mask for x in nets]))
        self.register_buffer("mask", squares[0][0].mask.clone())
        self.register_buffer("mask_out", self.turn([x.mask[::2].T for x in ends])[:, None])
        self.ask = nn.ParameterList(leaf(x) for x in model._embedding_net.parameters())
        self.base = leaf(torch.cat([base.weight, base.bias[:, None]], 1).unflatten(0, (2, -1)).flip(1))

    def turn(self, each: list[Tensor]) -> Tensor:
        return torch.stack([x if i % 2 else x.flip(-1) for i, x in enumerate(each)])

    def made(self, i: int, x: Tensor, told: Tensor) -> tuple[Tensor, Tensor]:
        inner, bias = self.inner[i] * self.mask, self.bias[i]
        side = torch.einsum("nc,khc->knh", told, self.side[i]) + bias[5:8, None]
        y = F.linear(x, self.enter[i] * self.mask_in[i], bias[8]) + side[0]
        y = F.linear(y, inner[0], bias[0]).clamp(min=0)
        for k in (1, 2):
            more = F.linear(y.clamp(min=0), inner[2 * k - 1], bias[2 * k - 1]).clamp(min=0)
            y = y + F.linear(more, inner[2 * k], bias[2 * k]) / (1 + (-side[k]).exp())
        raw, shift = y @ (self.leave[i] * self.mask_out[i]) + self.rest[i][:, None]
        least = 0 if self.fault == "made_flow_second_scale_without_its_least" and i == 1 else 1e-3
        return raw.exp().log1p() + least, shift

    def level(self, i: int, x: Tensor) -> tuple[Tensor, Tensor]:
        middle, width = self.kept[i]
        if self.training:
            middle = x.mean(0)
            width = new = (x - middle).square().sum(0) / (len(x) - 1)
            if self.fault == "made_flow_first_batch_norm_keeps_the_biased_variance" and i == 0:
                new = width * (len(x) - 1) / len(x)
            self.kept[i] = 0.9 * self.kept[i] + 0.1 * torch.stack([middle, new]).detach()
        gain, spread = self.norm[i, 0].exp().log1p() + 1e-5, (width + 1e-5).sqrt()
        squared = self.fault == "made_flow_third_determinant_takes_the_variance_for_the_spread" and i == 2
        x = (x - middle) / spread * gain + self.norm[i, 1]
        return x, (gain / (spread.square() if squared else spread)).log().sum()

    def forward(self, inputs: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        told = F.linear(F.linear(context, *self.ask[:2]).clamp(min=0), *self.ask[2:])
        (n, points, size), found = inputs.shape, 0
        z, many = inputs.flatten(0, 1), told.repeat_interleave(points, 0)
        for i in range(3):
            scale, shift = self.made(i, z, many)
            z, more = self.level(i, z * scale + shift)
            found = found + scale.log().sum(1) + more
        known = told.detach() if self.fault == "made_flow_base_gives_the_context_no_gradient" else told
        middle, log = torch.einsum("nc,kdc->knd", F.pad(known, (0, 1), value=1.0), self.base)[:, :, None]
        away = (((z := z.view(n, points, size)) - middle) / log.exp()).square() + 2 * log + math.log(math.tau)
        nats = (away.sum(2) / 2 - found.view(n, points)) / size
        return nats, z.flip(2)


SLOPES, AT = ("input gradient", "weight gradient"), "_transform._transforms."
BASE = ("_distribution", "_distribution._context_encoder")
right(task, "made_flow_of_sets", "a tree, split heads, reversals inside, a broadcast context", FlowOfSets)
right(task, "made_flow_of_stacked_weights", "stacks, turned weights for reversals, flat code", StackedFlow)
wrong(
    task,
    FlowOfSets,
    made_flow_first_residual_block_swaps_its_gate=("swapped halves", AT + "1.autoregressive_net.blocks.1"),
    made_flow_second_reversal_left_out=("a permutation left out", AT + "3"),
    made_flow_second_batch_norm_takes_its_statistics_for_constants=("detached statistics", AT + "5", SLOPES),
    made_flow_last_outputs_see_their_own_feature=("a loose mask", AT + "7.autoregressive_net.final_layer"),
)
wrong(
    task,
    StackedFlow,
    made_flow_second_scale_without_its_least=("an epsilon left out", AT + "4"),
    made_flow_third_determinant_takes_the_variance_for_the_spread=("a factor of two", AT + "8"),
    made_flow_first_batch_norm_keeps_the_biased_variance=("a count", AT + "2", ("buffer", "eval")),
    made_flow_base_gives_the_context_no_gradient=("detach", BASE, SLOPES),
)
