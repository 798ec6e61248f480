"""A pyramid of bidirectional LSTMs over padded speech: packed rows become masks, a backward by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from bench.held_back._first_shared import leaf, pile
from bench.held_back._third_ports import BACK, faults
from bench.tasks import _task

H, V = 10, 7


class FrameNorm(nn.Module):
    """Batch norm over the real frames; padding becomes zero."""

    def __init__(self, width: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        mean, var = self.running_mean, self.running_var
        if self.training:
            var, mean = torch.var_mean(x[kept], 0, correction=0)
            self.running_mean.lerp_(mean.detach(), 0.1)
            self.running_var.lerp_(var.detach(), 0.1)
        x = (x - mean) * torch.rsqrt(var + 1e-3) * self.weight + self.bias
        return x * kept[..., None]


class Layer(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = FrameNorm(width)
        self.lstm = nn.LSTM(width, H, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        kept = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
        rows = pack_padded_sequence(self.norm(x, kept), lengths.cpu(), True, enforce_sorted=False)
        return pad_packed_sequence(self.lstm(rows)[0], True, total_length=x.shape[1])[0]


class Listener(nn.Module):
    """[N, T, 6] and even lengths -> letters' log-probabilities [T / 2, N, V]; frames join after layer one."""

    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList([Layer(6), Layer(4 * H)]), nn.Linear(2 * H, V)

    def forward(self, frames: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        x = self.layers[0](frames, lengths).unflatten(1, (-1, 2)).flatten(2)
        x = self.layers[1](x, lengths // 2)
        return {"letters": self.head(x).log_softmax(2).transpose(0, 1), "lengths": lengths // 2}


def _batch() -> tuple[dict, Tensor]:
    lengths = 2 * torch.randint(4, 8, (6,))
    frames = 1 + torch.randn(6, 14, 6)
    return {"frames": frames, "lengths": lengths}, torch.randint(1, V, (6, 2))


def _loss(out: dict | tuple, target: Tensor) -> Tensor:
    letters, lengths = out.values() if isinstance(out, dict) else out
    return F.ctc_loss(letters, target, lengths, torch.full_like(lengths, 2), zero_infinity=True)


class Cell(torch.autograd.Function):
    """[4, N, H] of sums and the memory -> the new state and memory."""

    @staticmethod
    def forward(ctx, sums: Tensor, c: Tensor, wrong: bool) -> tuple[Tensor, Tensor]:
        i, f, o = sums[[0, 1, 3]].sigmoid()
        g = sums[2].tanh()
        new = f * c + i * g
        ctx.save_for_backward(i, f, g, o, c, new)
        ctx.wrong = wrong
        return o * new.tanh(), new

    @staticmethod
    def backward(ctx, dh: Tensor, dc: Tensor) -> tuple[Tensor, Tensor, None]:
        i, f, g, o, c, new = ctx.saved_tensors
        t = new.tanh()
        dc = dc + dh * o * (1 - t * t)
        slope = 1 - g if ctx.wrong else 1 - g * g
        sums = [dc * g * i * (1 - i), dc * c * f * (1 - f), dc * i * slope, dh * t * o * (1 - o)]
        return torch.stack(sums), dc * f, None


class Masked(nn.Module):
    """Time first; both ways' matrices [inputs + H, 4, H] and summed biases' two parts in one tensor each."""

    def __init__(self, model: Listener, wrong: str = ""):
        super().__init__()
        self.wrong, self.head = wrong, model.head
        self.weights, self.biases, self.norms = nn.ParameterList(), nn.ParameterList(), nn.ParameterList()
        for i, layer in enumerate(model.layers):
            ways = layer.lstm.all_weights
            self.weights.append(pile(torch.cat([p[0].T, p[1].T]).unflatten(1, (4, H)) for p in ways))
            self.biases.append(leaf(torch.stack([torch.stack(p[2:]).unflatten(1, (4, H)) for p in ways])))
            self.norms.append(pile([layer.norm.weight, layer.norm.bias]))
            self.register_buffer(f"mean{i}", layer.norm.running_mean.clone())
            self.register_buffer(f"var{i}", layer.norm.running_var.clone())

    def norm(self, i: int, x: Tensor, kept: Tensor) -> Tensor:
        mean, var = getattr(self, f"mean{i}"), getattr(self, f"var{i}")
        eps = 1e-3
        if self.training:
            share = kept.to(x.dtype) / kept.sum()
            now = (x * share).sum((0, 1))
            now_var = ((x - now).square() * share).sum((0, 1))
            with torch.no_grad():
                old, seen, seen_var = mean.clone(), now, now_var
                if self.wrong == "padding_counts_in_the_running_mean" and i == 0:
                    seen = x.mean((0, 1))
                if self.wrong == "variance_around_the_running_mean" and i == 1:
                    seen_var = ((x - old).square() * share).sum((0, 1))
                mean.copy_(0.9 * mean + 0.1 * seen)
                var.copy_(0.9 * var + 0.1 * seen_var)
            mean, var = now, now_var
        elif self.wrong == "epsilon_missing_in_eval_mode" and i == 0:
            eps = 0.0
        scale, shift = self.norms[i]
        return torch.where(kept, (x - mean) / (var + eps).sqrt() * scale + shift, 0.0)

    def way(self, i: int, x: Tensor, kept: Tensor, back: int) -> Tensor:
        weight, bias = self.weights[i][back], self.biases[i][back].sum(0)
        h = c = x.new_zeros(x.shape[1], H)
        states, times = [], range(len(x))
        blind = self.wrong == "backward_way_starts_in_the_padding" and i == 1
        for t in reversed(times) if back else times:
            sums = torch.einsum("nd,dgh->gnh", torch.cat([x[t], h], 1), weight) + bias[:, None]
            if self.wrong == "output_and_cell_gates_exchanged" and i == 0 and back:
                sums = sums[[0, 1, 3, 2]]
            h, c = Cell.apply(sums, c, self.wrong == "backward_of_the_cell_input_not_squared" and i == 1)
            if not blind:
                h, c = h * kept[t], c * kept[t]
            states.append(h * kept[t])
        return torch.stack(states[::-1] if back else states)

    def layer(self, i: int, x: Tensor, lengths: Tensor) -> Tensor:
        kept = (torch.arange(len(x), device=x.device)[:, None] < lengths)[..., None]
        x = self.norm(i, x, kept)
        return torch.cat([self.way(i, x, kept, 0), self.way(i, x, kept, 1)], 2)

    def forward(self, frames: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x = self.layer(0, frames.transpose(0, 1), lengths)
        x = self.layer(1, torch.cat([x[::2], x[1::2]], 2), lengths // 2)
        return F.log_softmax(self.head(x), 2), lengths // 2


speech = _task("third_speech", Listener, _batch, _loss)
faults(
    speech,
    Masked,
    backward_way_starts_in_the_padding=("layers.1.lstm",),
    output_and_cell_gates_exchanged=("layers.0.lstm",),
    backward_of_the_cell_input_not_squared=("layers.1.lstm", *BACK),
    padding_counts_in_the_running_mean=("layers.0.norm", "buffer"),
    variance_around_the_running_mean=("layers.1.norm", "buffer"),
    epsilon_missing_in_eval_mode=("layers.0.norm", "eval"),
)
