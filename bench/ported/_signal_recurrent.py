"""LSTMs and GRUs of torch against cells by hand with other kernels, gate orders and nesting."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.cases._rewritten import copied
from bench.tasks import _classes, _task


class Tagger(nn.Module):
    """[N, T, 8] -> [N, T, 4] by a bidirectional LSTM, then a forward one."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.LSTM(8, 12, batch_first=True, bidirectional=True)
        self.decoder = nn.LSTM(24, 16, batch_first=True)
        self.tag = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.tag(self.decoder(self.encoder(x)[0])[0])


def _per_step(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


tagger = _task("ported_tagger", Tagger, lambda: (torch.randn(6, 7, 8), torch.randint(4, (6, 7))), _per_step)

ORDERS = {"ifgo": (0, 1, 2, 3), "igfo": (0, 2, 1, 3), "ifog": (0, 1, 3, 2)}


def gates(stored: Tensor, order: str) -> Tensor:
    """The rows of torch's (input, forget, cell, output) in another order."""
    parts = stored.chunk(4)
    return torch.cat([parts[i] for i in ORDERS[order]])


class OneKernel(nn.Module):
    """A direction of an LSTM with one kernel [in + hidden, 4 hidden] and both biases in a row each."""

    def __init__(self, lstm: nn.LSTM, suffix: str, order: str, forget: float, cut: int):
        super().__init__()

        def of(kind: str) -> Tensor:
            return gates(getattr(lstm, f"{kind}_l0{suffix}").detach(), order)

        self.kernel = copied(torch.cat([of("weight_ih"), of("weight_hh")], 1).T)
        self.biases = copied(torch.stack([of("bias_ih"), of("bias_hh")]))
        self.order, self.forget, self.cut = order, forget, cut

    def forward(self, steps: list[Tensor]) -> list[Tensor]:
        h = c = steps[0].new_zeros(steps[0].shape[0], self.kernel.shape[1] // 4)
        states = []
        for t, x in enumerate(steps):
            if self.cut and t == self.cut:
                c = c.detach()
            found = (torch.cat([x, h], 1) @ self.kernel + self.biases.sum(0)).chunk(4, 1)
            i, f, g, o = (found[self.order.index(gate)] for gate in "ifgo")
            c = c * torch.sigmoid(f + self.forget) + torch.sigmoid(i) * torch.tanh(g)
            h = torch.tanh(c) * torch.sigmoid(o)
            states.append(h)
        return states


class TaggerByHand(nn.Module):
    def __init__(self, model: Tagger, order: str = "igfo", forget: float = 0.0, cut: int = 0):
        super().__init__()
        self.there = OneKernel(model.encoder, "", order, 0.0, 0)
        self.back = OneKernel(model.encoder, "_reverse", order, 0.0, 0)
        self.over = OneKernel(model.decoder, "", order, forget, cut)
        self.kernel, self.bias = copied(model.tag.weight.T), copied(model.tag.bias)

    def forward(self, x: Tensor) -> Tensor:
        steps = list(x.unbind(1))
        back = self.back(steps[::-1])
        both = zip(self.there(steps), back[::-1], strict=True)
        states = self.over([torch.cat(pair, 1) for pair in both])
        return torch.stack(states, 1) @ self.kernel + self.bias


class Cells(nn.Module):
    """LSTM cells whose four gates are linear layers of their own."""

    def __init__(self, lstm: nn.LSTM, suffix: str = ""):
        super().__init__()
        for part in ("ih", "hh"):
            weights = getattr(lstm, f"weight_{part}_l0{suffix}").chunk(4)
            biases = getattr(lstm, f"bias_{part}_l0{suffix}").chunk(4)
            for name, weight, bias in zip("ifgo", weights, biases, strict=True):
                layer = nn.Linear(weight.shape[1], weight.shape[0])
                layer.weight, layer.bias = copied(weight), copied(bias)
                setattr(self, f"{part}_{name}", layer)

    def gate(self, name: str, x: Tensor, h: Tensor) -> Tensor:
        return getattr(self, f"ih_{name}")(x) + getattr(self, f"hh_{name}")(h)

    def step(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        i, f, o = (self.gate(name, x, h).sigmoid() for name in "ifo")
        c = f * c + i * self.gate("g", x, h).tanh()
        return o * c.tanh(), c

    def forward(self, x: Tensor, backwards: bool = False) -> Tensor:
        h = c = x.new_zeros(x.shape[0], self.ih_i.out_features)
        times = range(x.shape[1])
        states: dict[int, Tensor] = {}
        for t in reversed(times) if backwards else times:
            h, c = self.step(x[:, t], h, c)
            states[t] = h
        return torch.stack([states[t] for t in times], 1)


class TaggerOfGates(nn.Module):
    def __init__(self, model: Tagger):
        super().__init__()
        self.rnn = nn.ModuleDict(
            {
                "right": Cells(model.encoder),
                "left": Cells(model.encoder, "_reverse"),
                "top": Cells(model.decoder),
            }
        )
        self.project = model.tag

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.rnn["right"](x), self.rnn["left"](x, backwards=True)], 2)
        return self.project(self.rnn["top"](x))


class Counter(nn.Module):
    """[N, T, 6] -> [N, 5]: two layers of GRU, the last state is read."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(6, 14, num_layers=2, batch_first=True)
        self.fc = nn.Linear(14, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.gru(x)[1][-1])


counter = _task("ported_counter", Counter, lambda: (torch.randn(8, 9, 6), _classes(8, 5)))


class KerasGRU(nn.Module):
    """Kernels [in, 3 hidden] with the update gate first; both biases are one array of two rows."""

    def __init__(self, gru: nn.GRU, layer: int, after: bool):
        super().__init__()

        def of(kind: str) -> Tensor:
            reset, update, new = getattr(gru, f"{kind}_l{layer}").detach().chunk(3)
            return torch.cat([update, reset, new])

        self.kernel, self.recurrent_kernel = copied(of("weight_ih").T), copied(of("weight_hh").T)
        self.bias = copied(torch.stack([of("bias_ih"), of("bias_hh")]))
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        width = self.kernel.shape[1] // 3
        h, states = x.new_zeros(x.shape[0], width), []
        seen = x @ self.kernel + self.bias[0]
        for t in range(x.shape[1]):
            z, r, new = seen[:, t].split(width, 1)
            own = h @ self.recurrent_kernel + self.bias[1]
            z, r = (z + own[:, :width]).sigmoid(), (r + own[:, width : 2 * width]).sigmoid()
            if self.after:
                new = (new + r * own[:, 2 * width :]).tanh()
            else:
                own = (r * h) @ self.recurrent_kernel[:, 2 * width :] + self.bias[1, 2 * width :]
                new = (new + own).tanh()
            h = z * h + (1 - z) * new
            states.append(h)
        return torch.stack(states, 1)


class CounterInKeras(nn.Module):
    def __init__(self, model: Counter, after: bool = True):
        super().__init__()
        self.layers = nn.Sequential(*(KerasGRU(model.gru, i, after) for i in range(2)))
        self.dense = nn.ParameterDict({"kernel": copied(model.fc.weight.T), "bias": copied(model.fc.bias)})

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)[:, -1] @ self.dense["kernel"] + self.dense["bias"]
