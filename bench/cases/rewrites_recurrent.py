"""True rewrites of the LSTM."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench.case import in_place_of
from bench.cases._rewritten import SAME, copied
from bench.tasks import recurrent


@in_place_of("lstm", SAME, "LSTM by hand", recurrent, "lstm_by_hand")
class HandLSTM(nn.Module):
    """One layer, batch first, the cell written out; subclasses change how the four gates are made."""

    def __init__(self, lstm: nn.LSTM):
        super().__init__()
        self.width = lstm.hidden_size
        self.w_ih, self.w_hh = copied(lstm.weight_ih_l0), copied(lstm.weight_hh_l0)
        self.b_ih, self.b_hh = copied(lstm.bias_ih_l0), copied(lstm.bias_hh_l0)

    def gates(self, x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        """Pre-activations of input, forget, cell, output."""
        return (x @ self.w_ih.T + self.b_ih + h @ self.w_hh.T + self.b_hh).chunk(4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h = c = x.new_zeros(x.shape[0], self.width)
        states = []
        for x_t in x.unbind(1):
            i, f, g, o = self.gates(x_t, h)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            states.append(h)
        return torch.stack(states, 1), (h[None], c[None])


@in_place_of("lstm", SAME, "LSTM by hand", recurrent, "lstm_gates_reordered")
class ReorderedGates(HandLSTM):
    """The rows of all weights in the order output, forget, input, cell, as another library keeps them."""

    def __init__(self, lstm: nn.LSTM):
        super().__init__(lstm)
        for name in ("w_ih", "w_hh", "b_ih", "b_hh"):
            i, f, g, o = getattr(self, name).chunk(4)
            setattr(self, name, copied(torch.cat([o, f, i, g])))

    def gates(self, x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        o, f, i, g = super().gates(x, h)
        return i, f, g, o


@in_place_of("lstm", SAME, "LSTM by hand", recurrent, "lstm_one_matrix")
class OneMatrix(HandLSTM):
    """One matrix for input and state. Input and state joined, times one matrix; the two biases stay two."""

    def __init__(self, lstm: nn.LSTM):
        super().__init__(lstm)
        self.w = copied(torch.cat([lstm.weight_ih_l0, lstm.weight_hh_l0], 1))
        del self.w_ih, self.w_hh

    def gates(self, x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        return (torch.cat([x, h], 1) @ self.w.T + (self.b_ih + self.b_hh)).chunk(4, 1)


@in_place_of("lstm", SAME, "LSTM by cells", recurrent, "lstm_by_cells")
class CellByCell(nn.Module):
    """``nn.LSTMCell`` in a loop."""

    def __init__(self, lstm: nn.LSTM):
        super().__init__()
        self.cell = nn.LSTMCell(lstm.input_size, lstm.hidden_size)
        self.cell.load_state_dict({name.removesuffix("_l0"): p for name, p in lstm.state_dict().items()})

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        state, states = None, []
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            states.append(state[0])
        return torch.stack(states, 1), None


@in_place_of("lstm", SAME, "sequence transposed", recurrent, "lstm_time_major")
class TimeMajor(nn.Module):
    """The LSTM sees [T, N, D]."""

    def __init__(self, lstm: nn.LSTM):
        super().__init__()
        self.lstm = nn.LSTM(lstm.input_size, lstm.hidden_size)
        self.lstm.load_state_dict(lstm.state_dict())

    def forward(self, x: Tensor) -> tuple[Tensor, tuple]:
        states, last = self.lstm(x.transpose(0, 1).contiguous())
        return states.transpose(0, 1), last
