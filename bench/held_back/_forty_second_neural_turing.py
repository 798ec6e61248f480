"""A small Neural Turing Machine: an LSTM of two layers, a write head between two read heads, a copy task."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BITS, LONGEST, SEQUENCES = 6, 3, 5
HIDDEN, LAYERS, SLOTS, UNITS, MODES, EPS = 24, 2, 13, 11, "rwr", 1e-6


class Memory(nn.Module):
    """The rows that a sequence starts with, and what heads do with rows."""

    def __init__(self):
        super().__init__()
        self.mem_bias = nn.Parameter(0.6 * torch.randn(SLOTS, UNITS))

    def reset(self, batch_size: int) -> Tensor:
        return self.mem_bias.repeat(batch_size, 1, 1)

    def content_addressing(self, memory: Tensor, key: Tensor, key_strength: Tensor) -> Tensor:
        dot = torch.matmul(memory, key.unsqueeze(2)).squeeze(2)
        norms = key.norm(dim=1, keepdim=True) * memory.norm(dim=2)
        return F.softmax(key_strength * dot / (norms + EPS), dim=1)

    def read(self, memory: Tensor, weights: Tensor) -> Tensor:
        return torch.matmul(weights.unsqueeze(1), memory).squeeze(1)

    def write(self, memory: Tensor, weights: Tensor, erase_vec: Tensor, add_vec: Tensor) -> Tensor:
        weights = weights.unsqueeze(2)
        memory = memory * (1 - torch.matmul(weights, erase_vec.unsqueeze(1)))
        return memory + torch.matmul(weights, add_vec.unsqueeze(1))


class Head(nn.Module):
    def __init__(self, mode: str, memory: Memory):
        super().__init__()
        self.mode, self.memory = mode, memory
        self.key_fc = nn.Linear(HIDDEN, UNITS)
        self.key_strength_fc = nn.Linear(HIDDEN, 1)
        self.interpolation_gate_fc = nn.Linear(HIDDEN, 1)
        self.shift_weighting_fc = nn.Linear(HIDDEN, 3)
        self.sharpen_factor_fc = nn.Linear(HIDDEN, 1)
        if mode == "w":
            self.erase_weight_fc = nn.Linear(HIDDEN, UNITS)
            self.add_data_fc = nn.Linear(HIDDEN, UNITS)

    def forward(self, state: Tensor, prev_weights: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        key = self.key_fc(state)
        key_strength = F.softplus(self.key_strength_fc(state))
        gate = torch.sigmoid(self.interpolation_gate_fc(state))
        shift = F.softmax(self.shift_weighting_fc(state), dim=1)
        sharpen = 1 + F.softplus(self.sharpen_factor_fc(state))
        content_weights = self.memory.content_addressing(memory, key, key_strength)
        gated_weights = gate * content_weights + (1 - gate) * prev_weights
        shifted_weights = self._circular_conv1d(gated_weights, shift)
        weights = shifted_weights**sharpen
        weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-16)
        if self.mode == "r":
            return weights, self.memory.read(memory, weights)
        erase, add = torch.sigmoid(self.erase_weight_fc(state)), self.add_data_fc(state)
        return weights, self.memory.write(memory, weights, erase, add)

    def _circular_conv1d(self, weights: Tensor, shift: Tensor) -> Tensor:
        padded = torch.cat([weights[:, -1:], weights, weights[:, :1]], dim=1)
        return (padded.unfold(1, 3, 1) * shift.unsqueeze(1)).sum(dim=2)


class LSTMController(nn.Module):
    def __init__(self, num_inputs: int):
        super().__init__()
        self.lstm = nn.LSTM(num_inputs, HIDDEN, LAYERS)
        self.lstm_h_bias = nn.Parameter(0.5 * torch.randn(LAYERS, 1, HIDDEN))
        self.lstm_c_bias = nn.Parameter(0.5 * torch.randn(LAYERS, 1, HIDDEN))

    def create_new_state(self, batch_size: int) -> tuple[Tensor, Tensor]:
        return self.lstm_h_bias.repeat(1, batch_size, 1), self.lstm_c_bias.repeat(1, batch_size, 1)

    def forward(self, x: Tensor, prev_state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        output, state = self.lstm(x.unsqueeze(0), prev_state)
        return output.squeeze(0), state


class NTM(nn.Module):
    """Bits and two delimiters, [N, T, BITS + 2] -> logits of bits, [N, T, BITS]."""

    def __init__(self):
        super().__init__()
        reads = MODES.count("r")
        self.memory = Memory()
        self.controller = LSTMController(BITS + 2 + reads * UNITS)
        self.heads = nn.ModuleList(Head(mode, self.memory) for mode in MODES)
        self.fc = nn.Linear(HIDDEN + reads * UNITS, BITS)
        self.init_reads = nn.Parameter(0.5 * torch.randn(reads, 1, UNITS))
        self.init_weights = nn.Parameter(torch.randn(len(MODES), 1, SLOTS))
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, nn.Linear):
                    module.weight.normal_(0, 1.5 / module.in_features**0.5)
                    module.bias.normal_(0, 0.5)
                elif isinstance(module, nn.LSTM):
                    for weight in module.parameters():
                        weight.normal_(0, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        batch_size, outputs = len(x), []
        memory, state = self.memory.reset(batch_size), self.controller.create_new_state(batch_size)
        reads = [read.repeat(batch_size, 1) for read in self.init_reads]
        heads_weights = [F.softmax(w, dim=1).repeat(batch_size, 1) for w in self.init_weights]
        for step in x.unbind(1):
            hidden, state = self.controller(torch.cat([step, *reads], dim=1), state)
            reads = []
            for i, head in enumerate(self.heads):
                heads_weights[i], result = head(hidden, heads_weights[i], memory)
                if head.mode == "r":
                    reads.append(result)
                else:
                    memory = result
            outputs.append(self.fc(torch.cat([hidden, *reads], dim=1)))
        return torch.stack(outputs, dim=1)


def copies() -> tuple[Tensor, Tensor]:
    """Sequences between two delimiters, then blanks; the target has the bits there, and a mask last."""
    x = torch.zeros(SEQUENCES, 2 * LONGEST + 2, BITS + 2)
    target = torch.zeros(SEQUENCES, 2 * LONGEST + 2, BITS + 1)
    for row, wanted in zip(x, target, strict=True):
        length = int(torch.randint(2, LONGEST + 1, ()))
        bits = torch.randint(2, (length, BITS)).float()
        row[0, BITS] = row[length + 1, BITS + 1] = 1
        row[1 : length + 1, :BITS] = bits
        wanted[length + 2 : 2 * length + 2, :BITS], wanted[length + 2 : 2 * length + 2, BITS] = bits, 1
    return x, target


def masked_bits(logits: Tensor, target: Tensor) -> Tensor:
    """The binary cross entropy of the bits that are asked for."""
    loss = F.binary_cross_entropy_with_logits(logits, target[..., :-1], reduction="none").mean(2)
    return (loss * target[..., -1]).sum() / target[..., -1].sum()
