"""Two ports of Demucs: falls and rises whose time is folded into channels, and flat code in windows."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._eighteenth_demucs import Demucs, missed, songs
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("eighteenth_demucs", Demucs, songs, missed)


class Gate(nn.Module):
    """A convolution whose values and gates have weights and norms of their own."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        halves = [leaf(half) for layer in layers for x in layer.parameters() for half in x.chunk(2)]
        self.values, self.gates = nn.ParameterList(halves[::2]), nn.ParameterList(halves[1::2])

    def forward(self, x: Tensor) -> Tensor:
        value, gate = (F.conv1d(x, *half[:2]) for half in (self.values, self.gates))
        if len(self.values) > 2:
            value, gate = F.group_norm(value, 1, *self.values[2:]), F.group_norm(gate, 1, *self.gates[2:])
        return value * gate.sigmoid()


class Fall(nn.Module):
    """One depth of the encoder: a stride of samples is one step with more channels."""

    def __init__(self, encode: nn.Sequential):
        super().__init__()
        conv, norm, _, residual, *gate, _ = encode
        self.weight = leaf(conv.weight.unflatten(2, (2, 3)).transpose(2, 3).flatten(1, 2))
        self.bias, self.norm = leaf(conv.bias), nn.ParameterList(map(leaf, norm.parameters()))
        self.branches = nn.ModuleList(nn.ParameterList(map(leaf, x.parameters())) for x in residual.layers)
        self.gate, self.beside = Gate(*gate), False

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv1d(x.unflatten(2, (-1, 3)).transpose(2, 3).flatten(1, 2), self.weight, self.bias)
        x = y = F.gelu(F.group_norm(x, 2, *self.norm) if len(self.norm) else x)
        for i, (wide, bias, gain, shift, point, lift, *last, scale) in enumerate(self.branches):
            z = F.conv1d(x if self.beside else y, wide, bias, padding=2**i, dilation=2**i)
            z = F.conv1d(F.gelu(F.group_norm(z, 1, gain, shift)), point, lift)
            y = y + scale[:, None] * F.glu(F.group_norm(z, 1, *last), 1)
        return self.gate(y)


class Memory(nn.Module):
    """Every step is read from the chunk that has it nearest its middle."""

    def __init__(self, blstm: nn.Module):
        super().__init__()
        width, self.chunk, self.whole = blstm.lstm.hidden_size, blstm.max_steps, False
        self.runs = nn.LSTM(width, width, 2, batch_first=True, bidirectional=True).to(blstm.linear.weight)
        self.runs.load_state_dict(blstm.lstm.state_dict())
        self.back, self.shift = leaf(blstm.linear.weight.T), leaf(blstm.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        x, length, hop = x.transpose(1, 2), x.shape[2], self.chunk // 2
        if length <= self.chunk or (self.whole and not self.training):
            return (self.runs(x)[0] @ self.back + self.shift).transpose(1, 2)
        x, count = F.pad(x, (0, 0, 0, -length % hop + self.chunk - hop)), -(-length // hop)
        chunks = x.unfold(1, self.chunk, hop).transpose(2, 3).flatten(0, 1)
        y = (self.runs(chunks)[0] @ self.back + self.shift).unflatten(0, (-1, count))
        step = torch.arange(length, device=x.device)
        home = ((step - hop // 2) // hop).clamp(0, count - 1)
        return y[:, home, step - home * hop].transpose(1, 2)


class FallsAndRises(Port):
    """The levelled mix falls, is remembered, and rises with the middle of what it was on its way."""

    def take(self, model: Demucs) -> None:
        self.falls, self.memory = nn.ModuleList(map(Fall, model.encoder)), Memory(model.lstm)
        self.gates = nn.ModuleList(Gate(*decode[:2]) for decode in model.decoder)
        self.lifts = nn.ModuleList(nn.ParameterList(map(leaf, x[3:].parameters())) for x in model.decoder)
        self.falls[1].beside = self.fault == "demucs_middle_residual_branches_side_by_side"
        self.memory.whole = self.fault == "demucs_recurrence_over_the_whole_song_in_eval"
        if self.fault == "demucs_norm_after_the_middle_rise_left_out":
            self.lifts[1] = self.lifts[1][:2]
        self.lost = 0 if self.fault == "demucs_mix_levelled_by_its_biased_deviation" else 1

    def forward(self, mix: Tensor) -> dict[str, Tensor]:
        length, ways = mix.shape[2], []
        spread, mean = torch.var_mean(mix.mean(1)[:, None], 2, correction=self.lost, keepdim=True)
        missing = 78 + (-12 - length) % 27
        x = F.pad((mix - mean) / (spread.sqrt() + 1e-5), (missing // 2, missing - missing // 2))
        for fall in self.falls:
            ways.append(x := fall(x))
        x = self.memory(x)
        for i, (gate, lift) in enumerate(zip(self.gates, self.lifts, strict=True)):
            way = ways[2 - i].narrow(2, (ways[2 - i].shape[2] - x.shape[2]) // 2, x.shape[2])
            x = F.conv_transpose1d(gate(x + way), *lift[:2], stride=3)
            x = F.group_norm(x, 2, *lift[2:]) if len(lift) > 2 else x
            x = F.gelu(x) if i < 2 else x
        x = x.narrow(2, (x.shape[2] - length) // 2, length).unflatten(1, (-1, 2))
        return {"sources": x * spread.sqrt()[..., None] + mean[..., None], "estimates": x}


class SongWindows(Port):
    """Signals [N, T, C]: products with windows, sums of overlaps, both directions of a recurrence at once."""

    def take(self, model: Demucs) -> None:
        self.w, self.b, self.n, self.d = (nn.ParameterDict() for _ in range(4))
        for i, (fall, rise) in enumerate(zip(model.encoder, model.decoder[::-1], strict=True)):
            layers = {"fall": fall[:2], "gate": fall[4:6], "turn": rise[:2], "rise": rise[3:5]}
            for name, (conv, *norm) in layers.items():
                self.w[f"{name}{i}"], self.b[f"{name}{i}"] = leaf(conv.weight.flatten(1)), leaf(conv.bias)
                if i > 0:
                    self.n[f"{name}{i}"] = pile(norm[0].parameters())
            for j, xs in enumerate(zip(*(layer.parameters() for layer in fall[3].layers), strict=True)):
                self.d[f"{i}{j}"] = pile(x.flatten(1).T if x.ndim > 1 else x for x in xs)
        both = [zip(*model.lstm.lstm.all_weights[i : i + 2], strict=True) for i in (0, 2)]
        self.cells = nn.ParameterList(pile(pair) for layer in both for pair in layer)
        self.back, self.shift = leaf(model.lstm.linear.weight.T), leaf(model.lstm.linear.bias)

    def normed(self, x: Tensor, affine: Tensor, groups: int = 1, mixed: bool = False) -> Tensor:
        cells = x.unflatten(2, (-1, groups) if mixed else (groups, -1))
        spread, center = torch.var_mean(cells, (1, 2 if mixed else 3), correction=0, keepdim=True)
        return ((cells - center) * (spread + 1e-5).rsqrt()).flatten(2) * affine[0] + affine[1]

    def unit(self, name: str, x: Tensor, size: int = 1, hop: int = 1) -> Tensor:
        y = x.unfold(1, size, hop).flatten(2) @ self.w[name].T + self.b[name]
        mixed = self.fault == "demucs_deepest_gate_normed_in_interleaved_groups" and name == "gate2"
        return self.normed(y, self.n[name], 2, mixed) if name in self.n else y

    def residual(self, i: int, x: Tensor) -> Tensor:
        for k in range(2):
            w, b, g, s, v, c, *affine, scale = (self.d[f"{i}{j}"][k] for j in range(9))
            y = F.pad(x, (0, 0, k + 1, k + 1)).unfold(1, 2 * k + 3, 1)[..., :: k + 1].flatten(2) @ w + b
            value, gate = self.normed(F.gelu(self.normed(y, (g, s))) @ v + c, affine).chunk(2, 2)
            x = torch.addcmul(x, scale * value, gate.sigmoid())
        return x

    def risen(self, i: int, x: Tensor) -> Tensor:
        name = f"rise{i}"
        cells, bias = (x @ self.w[name]).unflatten(2, (-1, 6)), self.b[name]
        if self.fault == "demucs_last_rise_adds_its_bias_to_each_window" and i == 0:
            cells, bias = cells + bias[:, None], 0
        y = F.pad(cells[..., :3], (0, 0, 0, 0, 0, 1)) + F.pad(cells[..., 3:], (0, 0, 0, 0, 1, 0))
        y = y.transpose(2, 3).flatten(1, 2) + bias
        return F.gelu(self.normed(y, self.n[name], 2)) if i else y

    def recur(self, x: Tensor) -> Tensor:
        for k in (0, 4):
            w, u, b, c = self.cells[k : k + 4]
            given = torch.einsum("dtnc,dgc->tdng", torch.stack([x, x.flip(0)]), w) + (b + c)[:, None]
            steps, (h, cell) = [], given.new_zeros(2, 2, x.shape[1], u.shape[2])
            for step in given:
                i, f, g, o = torch.baddbmm(step, h, u.mT).chunk(4, 2)
                cut = k > 0 and self.fault == "demucs_upper_recurrence_cut_at_each_step"
                cell = f.sigmoid() * (cell.detach() if cut else cell) + i.sigmoid() * g.tanh()
                steps.append(h := o.sigmoid() * cell.tanh())
            ahead, behind = torch.stack(steps, 1)
            x = torch.cat([ahead, behind.flip(0)], 2)
        return x @ self.back + self.shift

    def remember(self, x: Tensor) -> Tensor:
        size, length = x.shape[:2]
        if length <= 8:
            return self.recur(x.transpose(0, 1)).transpose(0, 1)
        x = F.pad(x, (0, 0, 0, -length % 4 + 4))
        y = self.recur(torch.cat([x[:, i : i + 8] for i in range(0, length, 4)]).transpose(0, 1))
        y = y.unflatten(1, (-1, size)).permute(1, 2, 0, 3)
        return torch.cat([y[0, :, :2], *y[:, :, 2:6], y[-1, :, 6:]], 1)[:, :length]

    def forward(self, mix: Tensor) -> dict[str, Tensor]:
        length, ways, mean = mix.shape[2], [], mix.mean((1, 2), keepdim=True)
        std = ((mix.mean(1, keepdim=True) - mean).square().sum(2, keepdim=True) / (length - 1)).sqrt()
        whole = 78 + (-12 - length) % 27
        x = F.pad((mix - mean) / (std + 1e-5), (whole // 2, whole - whole // 2)).transpose(1, 2)
        for i in range(3):
            x = self.residual(i, F.gelu(self.unit(f"fall{i}", x, 6, 3)))
            ways.append(x := F.glu(self.unit(f"gate{i}", x), 2))
        x = self.remember(x)
        for i in (2, 1, 0):
            late = self.fault == "demucs_middle_skip_trimmed_at_its_end_alone" and i == 1
            start = 0 if late else (ways[i].shape[1] - x.shape[1]) // 2
            x = x + ways[i][:, start : start + x.shape[1]]
            x = self.risen(i, F.glu(self.unit(f"turn{i}", x, 3), 2))
        x = x.narrow(1, (x.shape[1] - length) // 2, length).transpose(1, 2).unflatten(1, (-1, 2))
        return {"sources": x * std[..., None] + mean[..., None], "estimates": x}


right(task, "demucs_of_falls_and_rises", "strides as channels, split gates", FallsAndRises)
right(task, "demucs_in_windows_with_channels_last", "flat code, directions batched", SongWindows)
wrong(
    task,
    FallsAndRises,
    demucs_middle_residual_branches_side_by_side=("branches in parallel", "encoder.1.3"),
    demucs_recurrence_over_the_whole_song_in_eval=("no chunks in eval", "lstm", "eval"),
    demucs_norm_after_the_middle_rise_left_out=("a norm missing", ("decoder.1.4", "decoder.1")),
    demucs_mix_levelled_by_its_biased_deviation=("biased deviation", ""),
)
wrong(
    task,
    SongWindows,
    demucs_deepest_gate_normed_in_interleaved_groups=("other groups", "encoder.2.5"),
    demucs_last_rise_adds_its_bias_to_each_window=("a bias twice in overlaps", "decoder.2.3"),
    demucs_upper_recurrence_cut_at_each_step=("a detach", "lstm.lstm", ("input gradient", "weight gradient")),
    demucs_middle_skip_trimmed_at_its_end_alone=("trim at one end", ("", "decoder.1")),
)
