"""Two ports of a MaxViT: a row of channels-last modules, and flat code that attends along split axes."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import filled, right
from bench.held_back._fourteenth_max_vit import CELLS, HEAD, MaxVit, ripples, smoothed
from bench.held_back._fourth_ports import Port, Rows, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("fourteenth_max_vit", MaxVit, ripples, smoothed)
SIDES = (2 * CELLS - 1, 2 * CELLS - 1)


class Dense(nn.Module):
    def __init__(self, layer: nn.Module, part: slice = slice(None)):
        super().__init__()
        self.kernel = leaf(layer.weight[part].flatten(1).T)
        self.offset = None if layer.bias is None else leaf(layer.bias[part])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kernel if self.offset is None else x @ self.kernel + self.offset


class Filter(nn.Module):
    """A 3x3 convolution of [N, H, W, C], its kernel as [H, W, I, O]."""

    def __init__(self, conv: nn.Conv2d):
        super().__init__()
        self.kernel, self.stride = leaf(conv.weight.permute(2, 3, 1, 0)), conv.stride
        self.offset = None if conv.bias is None else leaf(conv.bias)

    def forward(self, x: Tensor) -> Tensor:
        weight, groups = self.kernel.permute(3, 2, 0, 1), x.shape[3] // self.kernel.shape[2]
        return F.conv2d(x.movedim(3, 1), weight, self.offset, self.stride, 1, 1, groups).movedim(1, 3)


class Bottleneck(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        pre, (up, first, _), (deep, second, _), gate, narrow = block.layers
        self.side = Dense(block.proj[1]) if isinstance(block.proj, nn.Sequential) else None
        self.pool, self.bend = nn.AvgPool2d(3, 2, 1), F.silu
        wide = (Rows(pre), Dense(up), Rows(first), nn.GELU())
        self.body = nn.Sequential(*wide, Filter(deep), Rows(second), nn.GELU())
        self.reduce, self.expand, self.leave = Dense(gate.fc1), Dense(gate.fc2), Dense(narrow)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        squeezed = self.bend(self.reduce(y.mean((1, 2), keepdim=True)))
        if self.side is not None:
            x = self.side(self.pool(x.movedim(3, 1)).movedim(1, 3))
        return x + self.leave(y * self.expand(squeezed).sigmoid())


class Mixer(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        (first, attend), (second, up, _, down) = layer.attn_layer, layer.mlp_layer
        self.order = (0, 2, 4, 1, 3, 5) if layer.grid else (0, 1, 3, 2, 4, 5)
        self.parts = (CELLS, -1) if layer.grid else (-1, CELLS)
        w = len(first.weight)
        self.first, self.second = (filled(nn.LayerNorm(w), x.weight, x.bias) for x in (first, second))
        self.read = nn.ModuleList(Dense(attend.to_qkv, slice(i * w, i * w + w)) for i in range(3))
        self.out, self.scale, self.up, self.down = Dense(attend.merge), w**-0.5, Dense(up), Dense(down)
        self.table = leaf(attend.relative_position_bias_table.T.unflatten(1, SIDES))

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (read(x).unflatten(2, (-1, HEAD)).transpose(1, 2) for read in self.read)
        gaps = torch.arange(CELLS)[:, None] - torch.arange(1 - CELLS, 1)
        bias = self.table[:, gaps[:, None, :, None], gaps[:, None]].flatten(3).flatten(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, bias[None], scale=self.scale)
        return self.out(y.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(2, self.parts).unflatten(1, self.parts).permute(self.order)
        shape, x = x.shape, x.flatten(3, 4).flatten(0, 2)
        x = x + self.attend(self.first(x))
        x = x + self.down(F.gelu(self.up(self.second(x))))
        return x.view(shape).permute([self.order.index(i) for i in range(6)]).flatten(3, 4).flatten(1, 2)


class ChannelsLastRow(Port):
    """One row of bottlenecks and mixers over [N, H, W, C]."""

    def take(self, model: MaxVit) -> None:
        (conv, norm, _), (second,) = model.stem
        self.front = nn.Sequential(Filter(conv), Rows(norm), nn.GELU(), Filter(second))
        parts = [part for block in model.blocks for layer in block.layers for part in layer.layers]
        self.row = nn.Sequential(*(Mixer(x) if i % 3 else Bottleneck(x) for i, x in enumerate(parts)))
        norm, hidden, _, last = model.classifier[2:]
        norm = filled(nn.LayerNorm(norm.normalized_shape), norm.weight, norm.bias)
        self.tail = nn.Sequential(norm, Dense(hidden), nn.Tanh(), Dense(last))
        self.row[6].pool.count_include_pad = self.fault != "maxvit_shortcut_pool_leaves_its_padding_out"
        self.row[3].body[5].rate *= 10 if self.fault == "maxvit_norm_averages_at_default_rate" else 1
        if self.fault == "maxvit_logits_scaled_by_the_width_of_a_head":
            self.row[7].scale = None
        self.row[9].bend = F.relu if self.fault == "maxvit_last_squeeze_bent_by_relu" else F.silu

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.row(self.front(x.movedim(1, 3))).mean((1, 2)))


def many(weights: list[Tensor]) -> nn.ParameterList:
    return nn.ParameterList(map(leaf, weights))


def joined(layers: list[nn.Module]) -> nn.ParameterList:
    return many([torch.cat([x.weight.flatten(1), x.bias[:, None]], 1) for x in layers])


class SplitAxes(Port):
    """Maps [N, C, H, W] that are never cut up: attention runs along inner or outer parts of their axes."""

    def take(self, model: MaxVit) -> None:
        ns = [x for x in model.modules() if isinstance(x, nn.BatchNorm2d)]
        self.ends = torch.tensor([0, *(x.num_features for x in ns)]).cumsum(0).tolist()
        self.levels = leaf(torch.cat([torch.stack([x.weight, x.bias]) for x in ns], 1))
        self.register_buffer("kept", torch.cat([torch.stack([x.running_mean, x.running_var]) for x in ns], 1))
        layers = [layer.layers for block in model.blocks for layer in block.layers]
        blocks, mixers = [x.MBconv.layers for x in layers], [x for layer in layers for x in layer[1:]]
        attends, gates = [x.attn_layer[1] for x in mixers], [x.squeeze_excitation for x in blocks]
        self.stem = many(x[0].weight.movedim(0, 3) for x in model.stem)
        self.stem_shift = leaf(model.stem[1][0].bias[:, None, None])
        self.sides = joined([x.MBconv.proj[1] for x in layers[::2]])
        self.wide, self.deep = (many([x[i][0].weight.squeeze() for x in blocks]) for i in (1, 2))
        self.reduce, self.expand = joined([x.fc1 for x in gates]), joined([x.fc2 for x in gates])
        self.narrow, (norm, hidden, _, last) = joined([x.conv_c for x in blocks]), model.classifier[2:]
        norms = [*((x.attn_layer[0], x.mlp_layer[0]) for x in mixers), (norm,)]
        self.norms = nn.ParameterList(pile(w for x in pair for w in (x.weight, x.bias)) for pair in norms)
        self.qkv, self.merge = joined([x.to_qkv for x in attends]), joined([x.merge for x in attends])
        self.tables = many([x.relative_position_bias_table.unflatten(0, SIDES) for x in attends])
        self.up, self.down = (joined([x.mlp_layer[i] for x in mixers]) for i in (1, 3))
        self.hidden, self.last = joined([hidden]), leaf(last.weight.T)

    def around(self, x: Tensor, stride: int) -> Tensor:
        return F.pad(x, (1, 1, 1, 1)).unfold(2, 3, stride).unfold(3, 3, stride)

    def point(self, matrix: Tensor, x: Tensor) -> Tensor:
        product = torch.einsum("oc,nc...->no...", matrix[:, :-1], x)
        return product + matrix[:, -1].view(-1, *[1] * (x.ndim - 2))

    def level(self, i: int, x: Tensor) -> Tensor:
        part = slice(*self.ends[i : i + 2])
        return F.batch_norm(x, *self.kept[:, part], *self.levels[:, part], self.training, 0.01, 1e-3)

    def normed(self, m: int, which: int, x: Tensor) -> Tensor:
        which *= not (self.fault == "maxvit_mlp_reads_through_the_norm_of_its_attention" and m == 5)
        spread, center = torch.var_mean(x, 1, correction=0, keepdim=True)
        gain, shift = self.norms[m][2 * which :][:2].view(2, -1, *[1] * (x.ndim - 2))
        return (x - center) / (spread + 1e-5).sqrt() * gain + shift

    def bottleneck(self, i: int, x: Tensor) -> Tensor:
        y = self.level(3 * i + 1, x)
        x = y if self.fault == "maxvit_shortcut_taken_after_the_pre_norm" and i == 3 else x
        y = F.gelu(self.level(3 * i + 2, torch.einsum("oc,nchw->nohw", self.wide[i], y)))
        y = torch.einsum("nchwij,cij->nchw", self.around(y, 2 - i % 2), self.deep[i])
        y = F.gelu(self.level(3 * i + 3, y))
        gate = self.point(self.expand[i], F.silu(self.point(self.reduce[i], y.mean((2, 3))))).sigmoid()
        y = self.point(self.narrow[i], y * gate[:, :, None, None])
        return y + (x if i % 2 else self.point(self.sides[i // 2], self.around(x, 2).mean((4, 5))))

    def attention(self, m: int, x: Tensor) -> Tensor:
        grid = m % 2 and not (self.fault == "maxvit_grid_attention_looks_within_windows" and m == 3)
        here, there, size = ("iajb", "kalb", (CELLS, -1)) if grid else ("aibj", "akbl", (-1, CELLS))
        parts = self.point(self.qkv[m], x).unflatten(3, size).unflatten(2, size).unflatten(1, (3, -1, HEAD))
        q, k, v = parts.unbind(1)
        bias = self.tables[m].unfold(0, CELLS, 1).unfold(1, CELLS, 1).flip(3, 4).permute(2, 0, 1, 3, 4)
        bias = bias.detach() if self.fault == "maxvit_window_bias_table_not_learnt" and m == 0 else bias
        logits = torch.einsum(f"nzd{here},nzd{there}->nzabijkl", q, k) / x.shape[1] ** 0.5
        shares = (logits + bias[:, None, None]).flatten(6).softmax(6).view(logits.shape)
        mixed = torch.einsum(f"nzabijkl,nzd{there}->nzd{here}", shares, v)
        return self.point(self.merge[m], mixed.flatten(5, 6).flatten(3, 4).flatten(1, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.level(0, torch.einsum("nchwij,cijo->nohw", self.around(x, 2), self.stem[0])))
        x = torch.einsum("nchwij,cijo->nohw", self.around(x, 1), self.stem[1]) + self.stem_shift
        for m in range(8):
            x = x if m % 2 else self.bottleneck(m // 2, x)
            x = x + self.attention(m, self.normed(m, 0, x))
            x = x + self.point(self.down[m], F.gelu(self.point(self.up[m], self.normed(m, 1, x))))
        return self.point(self.hidden[0], self.normed(8, 0, x.mean((2, 3)))).tanh() @ self.last


right(task, "maxvit_as_a_row_of_channels_last_modules", "a flat row, q, k and v apart", ChannelsLastRow)
right(task, "maxvit_along_split_axes", "one class, attention without partitions", SplitAxes)
A, B, C, D = (f"blocks.{i}.layers.{j}.layers." for i in (0, 1) for j in (0, 1))
GATE, GRID = D + "MBconv.layers.squeeze_excitation", B + "grid_attention"
wrong(
    task,
    ChannelsLastRow,
    maxvit_norm_averages_at_default_rate=("another rate", B + "MBconv.layers.conv_b.1", ("buffer", "eval")),
    maxvit_shortcut_pool_leaves_its_padding_out=("another divisor", C + "MBconv.proj.0"),
    maxvit_logits_scaled_by_the_width_of_a_head=("another scale", C + "window_attention.attn_layer.1"),
    maxvit_last_squeeze_bent_by_relu=("another activation", (GATE + ".activation", GATE)),
)
wrong(
    task,
    SplitAxes,
    maxvit_mlp_reads_through_the_norm_of_its_attention=("a neighbour's", C + "grid_attention.mlp_layer.0"),
    maxvit_shortcut_taken_after_the_pre_norm=("a shortcut from another place", D + "MBconv"),
    maxvit_grid_attention_looks_within_windows=("another partition", (GRID, GRID + ".partition_op")),
    maxvit_window_bias_table_not_learnt=("a detach", A + "window_attention.attn_layer.1", "weight gradient"),
)
