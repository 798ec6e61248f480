"""Two ports of a small STGCN: a tree with the channels last, and one class of packed sheets."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import GRADIENTS
from bench.held_back._fifth_vision import filled, right
from bench.held_back._fiftieth_st_gcn import STGCN, masked_mae, traffic
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("fiftieth_st_gcn", STGCN, traffic, masked_mae)


def dense(conv: nn.Conv2d) -> nn.Linear:
    return filled(nn.Linear(conv.in_channels, conv.out_channels), conv.weight.flatten(1), conv.bias)


class Gated(nn.Module):
    """Taps in time of [B, T, N, C], with a weight for the values and one for the gates."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        value, gate = layer.causal_conv.weight.squeeze(3).permute(2, 1, 0).chunk(2, 2)
        self.value, self.gate = leaf(value), leaf(gate)
        self.b, self.c = map(leaf, layer.causal_conv.bias.chunk(2))
        self.early, self.silent = False, False

    def forward(self, x: Tensor) -> Tensor:
        count = x.shape[1] - len(self.value) + 1
        views = torch.stack([x[:, k : k + count] for k in range(len(self.value))], 2)
        value, gate = (torch.einsum("btkni,kio->btno", views, w) for w in (self.value, self.gate))
        kept, gate = views[:, :, 0 if self.early else -1], gate + self.c
        value = value + self.b + F.pad(kept, (0, value.shape[3] - kept.shape[3]))
        return value / (1 + torch.exp(-(gate.detach() if self.silent else gate)))


class Spectral(nn.Module):
    def __init__(self, layer: nn.Module, turned: bool):
        super().__init__()
        self.w0, self.w1, self.w2, self.b = map(leaf, (*layer.weight, layer.bias))
        self.register_buffer("graph", (layer.gso.T if turned else layer.gso).clone())

    def forward(self, x: Tensor) -> Tensor:
        return (
            x @ (self.w0 - self.w2) + self.b + self.graph @ (x @ self.w1 + 2 * (self.graph @ (x @ self.w2)))
        )


class Spread(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        parts = layer.mlp.weight.flatten(1).T.chunk(7)
        self.own, self.hops, self.b = leaf(parts[0]), pile(parts[1:]), leaf(layer.mlp.bias)
        self.source, self.sink = leaf(layer.nodevec1), leaf(layer.nodevec2.T)
        self.register_buffer("fixed", torch.stack([layer.forward_support.T, layer.backward_support.T]))

    def forward(self, x: Tensor) -> Tensor:
        learned = (self.sink @ self.source.T).clamp(min=0).softmax(0)
        y = x @ self.own + self.b
        for k, move in enumerate((*self.fixed, learned)):
            y = y + move @ (x @ self.hops[2 * k] + move @ (x @ self.hops[2 * k + 1]))
        return y


class Standing(nn.Module):
    def __init__(self, norm: nn.LayerNorm):
        super().__init__()
        self.gain, self.offset, self.eps, self.less = leaf(norm.weight), leaf(norm.bias), norm.eps, 0

    def forward(self, x: Tensor) -> Tensor:
        var, mean = torch.var_mean(x, (-2, -1), correction=self.less, keepdim=True)
        return (x - mean) * torch.rsqrt(var + self.eps) * self.gain + self.offset


class Sandwich(nn.Module):
    def __init__(self, block: nn.Module, skip: nn.Conv2d, turned: bool):
        super().__init__()
        layer = block.graph_conv
        self.before, self.narrow = Gated(block.tmp_conv1), dense(layer.align.align_conv)
        self.mix = Spread(layer.gc) if hasattr(layer.gc, "mlp") else Spectral(layer.gc, turned)
        self.after, self.norm = Gated(block.tmp_conv2), Standing(block.tc2_ln)
        self.tap = dense(skip)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.narrow(self.before(x))
        x = self.norm(self.after((x + self.mix(x)).clamp(min=0)))
        return x, self.tap(x[:, -2:])


class ForecastTree(Port):
    def take(self, model: STGCN) -> None:
        pairs, fault = enumerate(zip(model.st_blocks, model.skip_convs, strict=True)), self.fault
        turned = 1 if fault == "st_gcn_second_laplacian_transposed" else None
        self.parts = nn.ModuleList(Sandwich(*pair, i == turned) for i, pair in pairs)
        self.parts[0].after.silent = fault == "st_gcn_gate_without_gradient_after_the_first_graph"
        self.parts[1].before.early = fault == "st_gcn_gated_residual_from_the_first_tap"
        self.parts[2].norm.less = int(fault == "st_gcn_last_norm_by_unbiased_variance")
        self.join, self.b = (
            leaf(model.end_conv_1.weight.squeeze(3).permute(2, 1, 0)),
            leaf(model.end_conv_1.bias),
        )
        self.last = dense(model.end_conv_2)
        self.register_buffer("scale", torch.stack([model.scaler.mean, model.scaler.std]))

    def forward(self, x: Tensor) -> Tensor:
        x, total = (x.movedim(1, 3) - self.scale[0]) / self.scale[1], 0
        for part in self.parts:
            x, more = part(x)
            total = total + more
        total = total.relu()
        y = (total[:, 0] @ self.join[0] + total[:, 1] @ self.join[1] + self.b).relu()
        return self.last(y).mT * self.scale[1, 0] + self.scale[0, 0]


def sheet(conv: nn.Conv2d) -> nn.Parameter:
    return leaf(torch.cat([conv.weight.flatten(1), conv.bias[:, None]], 1))


def rows(x: Tensor, packed: Tensor) -> Tensor:
    """A sheet on [C, B, N, T], whose taps are as many as its columns hold."""
    taps = (packed.shape[1] - 1) // x.shape[0]
    windows = x.unfold(3, taps, 1).movedim(4, 1).flatten(0, 1)
    return torch.tensordot(packed, torch.cat([windows, torch.ones_like(windows[:1])]), 1)


class PackedForecast(Port):
    def take(self, model: STGCN) -> None:
        self.w = nn.ParameterDict()
        for i, (block, skip) in enumerate(zip(model.st_blocks, model.skip_convs, strict=True)):
            layer, norm = block.graph_conv, block.tc2_ln
            convs = (block.tmp_conv1.causal_conv, layer.align.align_conv, block.tmp_conv2.causal_conv, skip)
            self.w.update({f"{name}{i}": sheet(conv) for name, conv in zip("anbs", convs, strict=True)})
            self.w[f"l{i}"] = pile([norm.weight.T, norm.bias.T])
            if i < 2:
                self.register_buffer(f"lap{i}", layer.gc.gso.clone())
                kernel = layer.gc.weight.permute(2, 0, 1).flatten(1)
                self.w[f"g{i}"] = leaf(torch.cat([kernel, layer.gc.bias[:, None]], 1))
        self.w["g2"], self.w["e"], self.w["f"] = map(
            sheet, (layer.gc.mlp, model.end_conv_1, model.end_conv_2)
        )
        self.w["nodes"] = pile([layer.gc.nodevec1, layer.gc.nodevec2.T])
        there, back = layer.gc.forward_support.T, layer.gc.backward_support.T
        if self.fault == "st_gcn_backward_transition_is_the_forward_transposed":
            back = there.T
        self.register_buffer("moves", torch.stack([there, back]))
        self.register_buffer("one", torch.eye(len(there)).to(there))
        self.register_buffer("scale", torch.stack([model.scaler.mean, model.scaler.std]))

    def graphs(self, i: int) -> Tensor:
        if i < 2:
            lap = self.get_buffer(f"lap{i}")
            return torch.stack([self.one, lap, 2 * lap @ lap - self.one])
        own = (self.w["nodes"][0] @ self.w["nodes"][1].T).relu().softmax(1).T
        if self.fault == "st_gcn_learned_adjacency_cut_in_evaluation" and not self.training:
            own = own * (own > 0.1)
        return torch.stack([self.one, *(y for a in (*self.moves, own) for y in (a, a @ a))])

    def gated(self, x: Tensor, packed: Tensor) -> Tensor:
        y, gate = rows(x, packed).tensor_split(2)
        kept = x[..., x.shape[3] - y.shape[3] :]
        return (y + F.pad(kept, (*[0] * 6, 0, len(y) - len(x)))) * gate.sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        (mean, std), w, skips = self.scale, self.w, []
        below = std + 0.01 if self.fault == "st_gcn_input_deviation_with_an_epsilon" else std
        x = (x.permute(1, 0, 3, 2) - mean[:, None, None, None]) / below[:, None, None, None]
        for i in range(3):
            x = rows(self.gated(x, w[f"a{i}"]), w[f"n{i}"])
            moved = torch.einsum("kvw,cbwt->kcbvt", self.graphs(i), x).flatten(0, 1)
            x = self.gated((x + rows(moved, w[f"g{i}"])).relu(), w[f"b{i}"])
            x, (gain, offset) = x - x.mean((0, 2), keepdim=True), w[f"l{i}"][:, :, None, :, None]
            x = x / (x.square().mean((0, 2), keepdim=True) + 1e-5).sqrt() * gain + offset
            first = self.fault == "st_gcn_first_skip_from_the_oldest_moments" and i == 0
            skips.append(rows(x[..., :2] if first else x[..., -2:], w[f"s{i}"]))
        y = rows(rows(sum(skips).relu(), w["e"]).relu(), w["f"])
        return y[..., 0].transpose(0, 1) * std[0] + mean[0]


right(task, "st_gcn_as_a_tree_with_channels_last", "a tree, split gates, nested polynomials", ForecastTree)
right(task, "st_gcn_of_packed_sheets", "packed sheets, windows, stacked matrices", PackedForecast)
wrong(
    task,
    ForecastTree,
    st_gcn_gate_without_gradient_after_the_first_graph=("detach", "st_blocks.0.tmp_conv2", GRADIENTS),
    st_gcn_gated_residual_from_the_first_tap=("a window shifted", "st_blocks.1.tmp_conv1"),
    st_gcn_second_laplacian_transposed=("a matrix transposed", "st_blocks.1.graph_conv.gc"),
    st_gcn_last_norm_by_unbiased_variance=("another variance", "st_blocks.2.tc2_ln"),
)
wrong(
    task,
    PackedForecast,
    st_gcn_input_deviation_with_an_epsilon=("an epsilon added", "scaler"),
    st_gcn_first_skip_from_the_oldest_moments=("a window shifted", ""),
    st_gcn_backward_transition_is_the_forward_transposed=("a matrix transposed", "st_blocks.2.graph_conv.gc"),
    st_gcn_learned_adjacency_cut_in_evaluation=("a threshold in eval", "st_blocks.2.graph_conv.gc", "eval"),
)
