"""Two ports of a small Neural Turing Machine: a tree of cells and pointers, and one of packed weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._forty_second_neural_turing import EPS, LAYERS, NTM, SLOTS, UNITS, copies, masked_bits
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("forty_second_neural_turing", NTM, copies, masked_bits)
ADDRESS = "key", "key_strength", "interpolation_gate", "shift_weighting", "sharpen_factor"
CHANGE = "erase_weight", "add_data"


def packed(head: nn.Module, names: tuple[str, ...]) -> Tensor:
    """A row for each input of the layers of these names, side by side, and one for the offsets."""
    layers = [getattr(head, name + "_fc") for name in names]
    return torch.cat([torch.cat([x.weight, x.bias[:, None]], 1) for x in layers]).T


class Cell(nn.Module):
    """One layer of the LSTM with its own start."""

    def __init__(self, controller: nn.Module, i: int):
        super().__init__()
        self.given, self.held = (leaf(getattr(controller.lstm, f"weight_{x}_l{i}").T) for x in ("ih", "hh"))
        self.one, self.two = (leaf(getattr(controller.lstm, f"bias_{x}_l{i}")) for x in ("ih", "hh"))
        self.h, self.c, self.single = leaf(controller.lstm_h_bias[i]), leaf(controller.lstm_c_bias[i]), False

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        gates = x @ self.given + h @ self.held + self.one
        if not self.single:
            gates = gates + self.two
        enter, keep, new, leave = gates.unflatten(1, (4, -1)).unbind(1)
        c = keep.sigmoid() * c + enter.sigmoid() * new.tanh()
        return leave.sigmoid() * c.tanh(), c


class Pointer(nn.Module):
    """Where a head points: by content, by what it was, by a turn, then sharper."""

    def __init__(self, head: nn.Module, start: Tensor):
        super().__init__()
        self.ask, self.start, self.back = leaf(packed(head, ADDRESS)), leaf(start), False

    def forward(self, h: Tensor, before: Tensor, rows: Tensor) -> Tensor:
        asked = h @ self.ask[:-1] + self.ask[-1]
        key, strength, gate, turn, power = asked.split([UNITS, 1, 1, 3, 1], 1)
        sizes = key.square().sum(1, True).sqrt() * rows.square().sum(2).sqrt()
        alike = torch.einsum("nsu,nu->ns", rows, key) / (sizes + EPS)
        now = torch.lerp(before, (F.softplus(strength) * alike).softmax(1), gate.sigmoid())
        down, stay, up = turn.softmax(1).split(1, 1)
        step = -1 if self.back else 1
        now = down * now.roll(step, 1) + stay * now + up * now.roll(-step, 1)
        return F.normalize(now.pow(1 + F.softplus(power)), p=1, dim=1)


class Pen(nn.Module):
    def __init__(self, head: nn.Module):
        super().__init__()
        self.change, self.cut = leaf(packed(head, CHANGE)), False

    def forward(self, h: Tensor, where: Tensor, rows: Tensor) -> Tensor:
        wipe, ink = (h @ self.change[:-1] + self.change[-1]).chunk(2, 1)
        wipe = wipe.sigmoid()
        if self.cut:
            wipe = wipe.detach()
        return rows + where[:, :, None] * (ink[:, None] - rows * wipe[:, None])


class TuringOfCells(Port):
    """Cells, pointers and a pen."""

    def take(self, model: NTM) -> None:
        fault = self.fault
        self.cells = nn.ModuleList(Cell(model.controller, i) for i in range(LAYERS))
        self.pointers = nn.ModuleList(map(Pointer, model.heads, model.init_weights))
        self.pen, self.rows = Pen(model.heads[1]), leaf(model.memory.mem_bias)
        self.seen = nn.ParameterList(leaf(x) for x in model.init_reads)
        self.tell_state, self.tell_seen = (leaf(x) for x in model.fc.weight.tensor_split((-2 * UNITS,), 1))
        self.tell_offset = leaf(model.fc.bias)
        self.cells[1].single = fault == "neural_turing_second_lstm_layer_without_its_recurrent_bias"
        self.pointers[2].back = fault == "neural_turing_last_read_head_shifts_the_other_way"
        self.pen.cut = fault == "neural_turing_erase_vector_without_gradient"

    def forward(self, x: Tensor) -> Tensor:
        n, told = len(x), []
        rows, seen = self.rows.expand(n, -1, -1), torch.cat([*self.seen], 1).expand(n, -1)
        states = [(cell.h.expand(n, -1), cell.c.expand(n, -1)) for cell in self.cells]
        where = [pointer.start.softmax(1).expand(n, -1) for pointer in self.pointers]
        for now in x.transpose(0, 1):
            h = torch.cat([now, seen], 1)
            for i, cell in enumerate(self.cells):
                states[i] = cell(h, *states[i])
                h = states[i][0]
            where[:2] = [self.pointers[i](h, where[i], rows) for i in (0, 1)]
            first = (where[0][:, :, None] * rows).sum(1)
            rows = self.pen(h, where[1], rows)
            where[2] = self.pointers[2](h, where[2], rows)
            seen = torch.cat([first, (where[2][:, :, None] * rows).sum(1)], 1)
            told.append(h @ self.tell_state.T + seen @ self.tell_seen.T + self.tell_offset)
        told = torch.stack(told, 1)
        if self.fault == "neural_turing_bits_squashed_in_evaluation" and not self.training:
            return told.sigmoid()
        return told


class PackedTuring(Port):
    """Packed weights with their offsets as rows, and the powers of sharpening by logarithms."""

    def take(self, model: NTM) -> None:
        lstm = model.controller.lstm
        for i in range(LAYERS):
            parts = [getattr(lstm, f"{x}_l{i}") for x in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
            self.register_parameter(f"lstm_{i}", leaf(torch.cat([x.reshape(len(x), -1) for x in parts], 1)))
        self.begin = leaf(torch.cat([model.controller.lstm_h_bias, model.controller.lstm_c_bias], 1))
        self.ask = pile(packed(head, ADDRESS) for head in model.heads)
        self.change = leaf(packed(model.heads[1], CHANGE))
        self.board = leaf(torch.cat([model.memory.mem_bias.T, model.init_weights[:, 0]]))
        self.reads = leaf(model.init_reads.flatten())
        self.last = leaf(torch.cat([model.fc.weight, model.fc.bias[:, None]], 1))

    def point(self, i: int, h: Tensor, old: Tensor, board: Tensor) -> Tensor:
        """Over the board, [N, UNITS, SLOTS]."""
        asked = h @ self.ask[i]
        key, (strength, gate, *turn, power) = asked[:, :UNITS], asked[:, UNITS:, None].unbind(1)
        norms = torch.linalg.vector_norm(key, dim=1)[:, None] * torch.linalg.vector_norm(board, dim=1)
        score = strength.exp().log1p() * (key[:, None] @ board)[:, 0] / (norms + EPS)
        content, gate = (score - score.logsumexp(1, True)).exp(), gate.sigmoid()
        if self.fault == "neural_turing_first_head_gates_its_content_for_its_past" and i == 0:
            gate = 1 - gate
        mixed = old + gate * (content - old)
        turn, places = torch.softmax(torch.cat(turn, 1), 1), torch.arange(SLOTS, device=h.device)
        moved = sum(turn[:, k, None] * mixed[:, (places + k - 1) % SLOTS] for k in range(3))
        floor = 0 if self.fault == "neural_turing_last_head_sharpens_without_the_one" and i == 2 else 1
        return ((floor + power.exp().log1p()) * moved.log()).softmax(1)

    def forward(self, x: Tensor) -> Tensor:
        n, told, one = len(x), [], x.new_ones(len(x), 1)
        board = self.board[:UNITS].repeat(n, 1, 1)
        where = [w.softmax(0).repeat(n, 1) for w in self.board[UNITS:]]
        state = [[*start[:, None].repeat(1, n, 1)] for start in self.begin]
        reads = self.reads.repeat(n, 1)
        for t in range(x.shape[1]):
            h = torch.cat([x[:, t], reads], 1)
            for i in range(LAYERS):
                gates = torch.cat([h, state[i][0], one, one], 1) @ self.get_parameter(f"lstm_{i}").T
                enter, keep, new, leave = gates.tensor_split(4, 1)
                c = state[i][1] * keep.sigmoid() + new.tanh() * enter.sigmoid()
                h = c.tanh() * leave.sigmoid()
                state[i] = [h, c]
            full, found = torch.cat([h, one], 1), [h]
            for i in range(3):
                where[i] = self.point(i, full, where[i], board)
                if i != 1:
                    found.append(torch.einsum("nus,ns->nu", board, where[i]))
                    continue
                wipe, ink = (full @ self.change)[:, :, None].tensor_split(2, 1)
                kept, added = 1 - wipe.sigmoid() * where[1][:, None], ink * where[1][:, None]
                if self.fault == "neural_turing_write_adds_before_it_erases":
                    board = (board + added) * kept
                else:
                    board = board * kept + added
            reads = torch.cat(found[1:], 1)
            told.append(torch.cat([*found, one], 1) @ self.last.T)
            if self.fault == "neural_turing_controller_reads_without_gradient":
                reads = reads.detach()
        return torch.stack(told, 1)


SLOPES = ("input gradient", "weight gradient")
right(task, "neural_turing_of_cells_and_pointers", "a tree, cells by hand, rolls, wide heads", TuringOfCells)
right(task, "neural_turing_of_packed_weights", "flat code, units first, powers by logarithms", PackedTuring)
wrong(
    task,
    TuringOfCells,
    neural_turing_second_lstm_layer_without_its_recurrent_bias=("a bias left out", "controller.lstm"),
    neural_turing_erase_vector_without_gradient=("detach", "heads.1", SLOPES),
    neural_turing_last_read_head_shifts_the_other_way=("another direction", "heads.2"),
    neural_turing_bits_squashed_in_evaluation=("a sigmoid in eval", "", "eval"),
)
wrong(
    task,
    PackedTuring,
    neural_turing_controller_reads_without_gradient=("detach", "", SLOPES),
    neural_turing_first_head_gates_its_content_for_its_past=("swapped operands", "heads.0"),
    neural_turing_write_adds_before_it_erases=("another order", ("heads.1", "memory")),
    neural_turing_last_head_sharpens_without_the_one=("a constant left out", "heads.2"),
)
