"""Two ports of a small dual-path RNN: a tree with the channels last, and one class of stacked weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _forty_first_dual_path_rnn as known
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("forty_first_dual_path_rnn", known.DualRNNModel, known.voices, known.permuted_sisnr)
CHUNK, HIDDEN, KERNEL, WIDTH = known.CHUNK, known.HIDDEN, known.KERNEL, known.WIDTH
LAYERS, SPEAKERS = known.LAYERS, known.SPEAKERS
HOP, HALF = KERNEL // 2, CHUNK // 2


class Product(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.matrix = leaf(layer.weight.flatten(1).T)
        self.offset = None if layer.bias is None else leaf(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix if self.offset is None else x @ self.matrix + self.offset


class Evened(nn.Module):
    def __init__(self, norm: nn.Module, axes: int):
        super().__init__()
        self.gain, self.shift, self.eps = leaf(norm.weight.flatten()), leaf(norm.bias.flatten()), norm.eps
        self.axes, self.correction = tuple(range(-axes, 0)), 0

    def forward(self, x: Tensor) -> Tensor:
        var, mean = torch.var_mean(x, self.axes, correction=self.correction, keepdim=True)
        return torch.addcmul(self.shift, (x - mean) * (var + self.eps).rsqrt(), self.gain)


class OneWay(nn.Module):
    """One direction of a bidirectional LSTM; the time is the first axis."""

    def __init__(self, rnn: nn.LSTM, end: str):
        super().__init__()
        self.reverse, self.turned = bool(end), True
        self.cell = nn.LSTM(WIDTH, HIDDEN)
        for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"):
            setattr(self.cell, name, leaf(getattr(rnn, name + end)))

    def forward(self, x: Tensor) -> Tensor:
        y = self.cell(x.flip(0) if self.reverse else x)[0]
        return y.flip(0) if self.reverse and self.turned else y


class Walk(nn.Module):
    """[B, S, K, C] -> itself: both ways along one of its axes, and what they found evened out."""

    def __init__(self, rnn: nn.LSTM, linear: nn.Linear, norm: nn.Module, axis: int):
        super().__init__()
        self.there, self.back, self.axis = OneWay(rnn, ""), OneWay(rnn, "_reverse"), axis
        self.mix, self.even = Product(linear), Evened(norm, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.movedim(self.axis, 0)
        flat = rows.flatten(1, 2)
        y = self.mix(torch.cat([self.there(flat), self.back(flat)], 2))
        return self.even(y.view_as(rows).movedim(0, self.axis))


class TreeOfWalks(Port):
    """Frames and chunks by windows, the channels last, one module for either walk of a layer."""

    def take(self, model: nn.Module) -> None:
        inner, fault = model.separation, self.fault
        self.listen, self.narrow = Product(model.encoder.conv1d), Product(inner.conv1d)
        self.even, self.voice = Evened(inner.norm, 1), leaf(model.decoder.weight[:, 0])
        self.short = nn.ModuleList(Walk(x.intra_rnn, x.intra_linear, x.intra_norm, 2) for x in inner.dual_rnn)
        self.long = nn.ModuleList(Walk(x.inter_rnn, x.inter_linear, x.inter_norm, 1) for x in inner.dual_rnn)
        self.slope, self.fan = leaf(inner.prelu.weight), Product(inner.conv2d)
        self.end = Product(inner.end_conv1x1)
        self.value, self.gate = Product(inner.output[0]), Product(inner.output_gate[0])
        self.short[1].back.turned = fault != "dual_path_rnn_second_intra_backward_states_left_reversed"
        self.long[2].even.correction = int(fault == "dual_path_rnn_last_inter_norm_unbiased_variance")

    def masks(self, x: Tensor, length: int) -> Tensor:
        """Chunks [B, S, K, C] -> masks [B, speakers, L, filters]."""
        x = self.fan(x.clamp(min=0) + self.slope * x.clamp(max=0))
        x = x.unflatten(3, (SPEAKERS, WIDTH)).permute(0, 3, 4, 2, 1).flatten(0, 1).flatten(1, 2)
        size = 1, HALF * (x.shape[2] + 1)
        x = F.fold(x, size, (1, CHUNK), stride=(1, HALF))[:, :, 0, HALF : HALF + length].transpose(1, 2)
        return self.end(self.value(x).tanh() * self.gate(x).sigmoid()).relu().unflatten(0, (-1, SPEAKERS))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        heard = self.listen(x.unfold(1, KERNEL, HOP)).relu()
        length = heard.shape[1]
        rest = CHUNK - (HALF + length) % CHUNK
        y = F.pad(self.narrow(self.even(heard)), (0, 0, HALF, HALF + rest))
        y = y.unfold(1, CHUNK, HALF).transpose(2, 3)
        for i, (short, long) in enumerate(zip(self.short, self.long, strict=True)):
            near = y + short(y)
            skips = self.fault == "dual_path_rnn_first_inter_residual_from_the_blocks_input" and i == 0
            y = (y if skips else near) + long(near)
        if self.fault == "dual_path_rnn_masks_multiply_detached_features":
            heard = heard.detach()
        frames = (self.masks(y, length) * heard[:, None]) @ self.voice
        sound = F.fold(frames.flatten(0, 1).transpose(1, 2), (1, x.shape[1]), (1, KERNEL), stride=(1, HOP))
        return sound.view(-1, SPEAKERS, x.shape[1]).unbind(1)


def row(layer: nn.Module) -> Tensor:
    return torch.cat([layer.weight.flatten(1), layer.bias[:, None]], 1)


def gates(rnn: nn.LSTM) -> Tensor:
    """Both directions: input weights, state weights and the two offsets side by side."""
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    ways = ([getattr(rnn, name + end) for name in names] for end in ("", "_reverse"))
    return torch.stack([torch.cat([w, u, b[:, None], c[:, None]], 1) for w, u, b, c in ways])


class StackedPaths(Port):
    """Stacks by layer and path, both directions stepped at once by hand, chunks by an index."""

    def take(self, model: nn.Module) -> None:
        inner = model.separation
        paths = [(block, path) for block in inner.dual_rnn for path in ("intra", "inter")]
        norms = [getattr(block, path + "_norm") for block, path in paths]
        self.gates = pile(gates(getattr(block, path + "_rnn")) for block, path in paths)
        self.mixes = pile(row(getattr(block, path + "_linear")) for block, path in paths)
        self.norms = pile(torch.stack([norm.weight.flatten(), norm.bias.flatten()]) for norm in norms)
        self.filters = pile([model.encoder.conv1d.weight[:, 0], model.decoder.weight[:, 0]])
        self.ends = pile([inner.conv1d.weight[:, :, 0].T, inner.end_conv1x1.weight[:, :, 0]])
        self.entry, self.slope = pile([inner.norm.weight, inner.norm.bias]), leaf(inner.prelu.weight)
        self.fan = leaf(row(inner.conv2d))
        self.pair = leaf(torch.cat([row(inner.output[0]), row(inner.output_gate[0])]))

    def path(self, i: int, rows: Tensor) -> Tensor:
        """[B, R, T, C] -> itself, along the third axis."""
        x = rows.flatten(0, 1)
        w, u, b, c = self.gates[i].split([WIDTH, HIDDEN, 1, 1], 2)
        given = torch.stack([x, x.flip(1)]).flatten(1, 2) @ w.mT + (b + c).mT
        given, states = given.unflatten(1, x.shape[:2]), []
        h = cell = x.new_zeros(2, len(x), HIDDEN)
        for t in range(x.shape[1]):
            take, keep, new, show = (given[:, :, t] + h @ u.mT).chunk(4, 2)
            if self.fault == "dual_path_rnn_last_inter_lstm_gates_in_another_order" and i == 2 * LAYERS - 1:
                keep, new = new, keep
            cell = keep.sigmoid() * cell + take.sigmoid() * new.tanh()
            h = show.sigmoid() * cell.tanh()
            states.append(h)
        there, back = torch.stack(states, 2)
        y = torch.cat([there, back.flip(1)], 2) @ self.mixes[i, :, :-1].T + self.mixes[i, :, -1]
        y = y.view_as(rows)
        by_chunk = self.fault == "dual_path_rnn_second_intra_norm_by_chunk_in_evaluation" and i == 2
        axes = (2, 3) if by_chunk and not self.training else (1, 2, 3)
        y = y - y.mean(axes, True)
        return rows + y / (y.square().mean(axes, True) + 1e-8).sqrt() * self.norms[i, 0] + self.norms[i, 1]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        heard = torch.einsum("blk,fk->blf", x.unfold(1, KERNEL, HOP), self.filters[0]).relu()
        length = heard.shape[1]
        y = F.layer_norm(heard, heard.shape[2:], *self.entry) @ self.ends[0]
        count = 2 * ((length + HALF) // CHUNK + 1)
        index = HALF * torch.arange(count, device=x.device)[:, None] + torch.arange(CHUNK, device=x.device)
        y = F.pad(y, (0, 0, HALF, HALF * count - length))[:, index]
        for i in range(LAYERS):
            y = self.path(2 * i + 1, self.path(2 * i, y).transpose(1, 2)).transpose(1, 2)
        constant = self.fault == "dual_path_rnn_prelu_slope_left_untrained"
        y = torch.where(y > 0, y, (self.slope.detach() if constant else self.slope) * y)
        y = y @ self.fan[:, :-1].T + self.fan[:, -1]
        if self.fault == "dual_path_rnn_speakers_interleaved_in_the_channels":
            y = y.unflatten(3, (WIDTH, SPEAKERS)).transpose(3, 4).flatten(3)
        y = y.new_zeros(len(x), HALF * (count + 1), y.shape[3]).index_add(1, index.flatten(), y.flatten(1, 2))
        y = y[:, HALF : HALF + length].unflatten(2, (SPEAKERS, WIDTH))
        value, gate = (y @ self.pair[:, :-1].T + self.pair[:, -1]).chunk(2, 3)
        masks = ((value.tanh() * gate.sigmoid()) @ self.ends[1].T).relu()
        frames = (masks * heard[:, :, None]) @ self.filters[1]
        left, rest = frames.transpose(1, 2).chunk(2, 3)
        sound = F.pad(left.flatten(2), (0, HOP)) + F.pad(rest.flatten(2), (HOP, 0))
        return sound[:, 0], sound[:, 1]


right(task, "dual_path_rnn_tree_of_walks", "a tree, channels last, directions apart, folds", TreeOfWalks)
right(task, "dual_path_rnn_stacked_paths", "stacks by path, LSTMs by hand, chunks by an index", StackedPaths)
BLOCKS = "separation.dual_rnn"
wrong(
    task,
    TreeOfWalks,
    dual_path_rnn_first_inter_residual_from_the_blocks_input=("a residual from elsewhere", f"{BLOCKS}.0"),
    dual_path_rnn_second_intra_backward_states_left_reversed=("a flip left out", f"{BLOCKS}.1.intra_rnn"),
    dual_path_rnn_last_inter_norm_unbiased_variance=("another variance", f"{BLOCKS}.2.inter_norm"),
    dual_path_rnn_masks_multiply_detached_features=("detach", "", ("input gradient", "weight gradient")),
)
wrong(
    task,
    StackedPaths,
    dual_path_rnn_second_intra_norm_by_chunk_in_evaluation=("axes in eval", f"{BLOCKS}.1.intra_norm", "eval"),
    dual_path_rnn_last_inter_lstm_gates_in_another_order=("swapped gates", f"{BLOCKS}.2.inter_rnn"),
    dual_path_rnn_prelu_slope_left_untrained=("detach", "separation.prelu", "weight gradient"),
    dual_path_rnn_speakers_interleaved_in_the_channels=("another channel order", "separation"),
)
