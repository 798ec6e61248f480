"""True rewrites of the GRU cell and of the loop over it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import in_place_of
from bench.cases._rewritten import SAME
from bench.tasks import recurrent


@in_place_of("cell", SAME, "GRU by hand", recurrent, "gru_cell_by_hand")
class HandGRUCell(nn.Module):
    """The equations, the new state as n + z (h - n)."""

    def __init__(self, cell: nn.GRUCell):
        super().__init__()
        self.weight_ih, self.weight_hh = cell.weight_ih, cell.weight_hh
        self.bias_ih, self.bias_hh = cell.bias_ih, cell.bias_hh

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        r_x, z_x, n_x = F.linear(x, self.weight_ih, self.bias_ih).chunk(3, 1)
        r_h, z_h, n_h = F.linear(h, self.weight_hh, self.bias_hh).chunk(3, 1)
        r, z = torch.sigmoid(r_x + r_h), torch.sigmoid(z_x + z_h)
        n = torch.tanh(n_x + r * n_h)
        return n + z * (h - n)


@in_place_of("cell", SAME, "GRU by hand", recurrent, "gru_cell_by_gate")
class GRUCellByGate(nn.Module):
    """A linear layer for each gate. Six linear layers, one for each gate of the input and of the state."""

    def __init__(self, cell: nn.GRUCell):
        super().__init__()
        for source, inputs in (("ih", cell.input_size), ("hh", cell.hidden_size)):
            weights = getattr(cell, f"weight_{source}").chunk(3)
            biases = getattr(cell, f"bias_{source}").chunk(3)
            for gate, weight, bias in zip("rzn", weights, biases, strict=True):
                linear = nn.Linear(inputs, cell.hidden_size)
                linear.load_state_dict({"weight": weight, "bias": bias})
                setattr(self, f"{gate}_{source}", linear)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        r = torch.sigmoid(self.r_ih(x) + self.r_hh(h))
        z = torch.sigmoid(self.z_ih(x) + self.z_hh(h))
        return (1 - z) * torch.tanh(self.n_ih(x) + r * self.n_hh(h)) + z * h


@in_place_of("", SAME, "loop vectorised", recurrent, "gru_on_whole_sequence")
class WholeSequence(nn.Module):
    """One ``nn.GRU`` in the place of the loop."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.lstm, self.fc = model.lstm, model.fc
        self.gru = nn.GRU(14, 10, batch_first=True)
        self.gru.load_state_dict({f"{name}_l0": p for name, p in model.cell.state_dict().items()})

    def forward(self, x: Tensor) -> Tensor:
        _, last = self.gru(self.lstm(x)[0])
        return self.fc(last[0])


@in_place_of("", SAME, "loop vectorised", recurrent, "gru_inputs_before_the_loop")
class InputsFirst(nn.Module):
    """The input projection of all steps comes before the loop, which keeps what depends on the state."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.lstm, self.cell, self.fc = model.lstm, model.cell, model.fc

    def forward(self, x: Tensor) -> Tensor:
        cell, states = self.cell, self.lstm(x)[0]
        h = x.new_zeros(x.shape[0], cell.hidden_size)
        for projected in F.linear(states, cell.weight_ih, cell.bias_ih).unbind(1):
            r_x, z_x, n_x = projected.chunk(3, 1)
            r_h, z_h, n_h = F.linear(h, cell.weight_hh, cell.bias_hh).chunk(3, 1)
            z = torch.sigmoid(z_x + z_h)
            h = (1 - z) * torch.tanh(n_x + torch.sigmoid(r_x + r_h) * n_h) + z * h
        return self.fc(h)
