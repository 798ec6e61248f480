"""Two ports of a Gated PixelCNN: two stacks one after the other, and one class of packed weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._thirty_fourth_pixel_cnn import COLOURS, HIDDEN, PixelCNN, nats, ripples

task = few("thirty_fourth_pixel_cnn", PixelCNN, ripples, nats)


class Dense(nn.Module):
    """A product of the last axis; ``order`` says that no colour may see a later one."""

    def __init__(self, conv: nn.Conv2d, order: bool = False):
        super().__init__()
        self.matrix, self.offset = leaf(conv.weight[:, :, 0, 0].T), leaf(conv.bias)
        self.register_buffer("seen", allowed(*conv.weight.shape[:2]).T if order else None)

    def forward(self, x: Tensor) -> Tensor:
        matrix = self.matrix if self.seen is None else torch.where(self.seen, self.matrix, 0)
        return x @ matrix + self.offset


def allowed(to: int, of: int, own: bool = True) -> Tensor:
    """Whether an output channel may see an input channel of the same pixel."""
    later = torch.arange(to)[:, None] % COLOURS - torch.arange(of) % COLOURS
    return later >= 0 if own else later > 0


def gated(x: Tensor) -> Tensor:
    signal, gate = x.unflatten(-1, (2, -1)).unbind(-2)
    return signal.tanh() / (1 + torch.exp(-gate))


class Above(nn.Module):
    """The vertical half of a block on [N, H, W, C]: its gated output, and what goes to the other half."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.taps, self.offset = leaf(block.v_conv.weight.permute(2, 3, 1, 0)), leaf(block.v_conv.bias)
        self.here, self.blank = Dense(block.v_fc), False

    def forward(self, x: Tensor, told: Tensor | float) -> tuple[Tensor, Tensor]:
        high, wide = self.taps.shape[:2]
        edge = wide // 2
        padded = F.pad(x, (0, 0, edge, edge, high, 0))
        windows = padded.unfold(1, high, 1).unfold(2, wide, 1)
        rows = torch.einsum("nhwcij,ijco->nhwo", windows, self.taps) + self.offset
        passed = F.pad(rows[:, 1:-1], (0, 0, 0, 0, 1, 0)) if self.blank else rows[:, :-1]
        return gated(rows[:, 1:] + (self.here(x) + told)), passed


class Left(nn.Module):
    """The horizontal half of a block on [N, H, W, C]: the residue of its output, and the skip if any."""

    def __init__(self, block: nn.Module, own: bool = True):
        super().__init__()
        conv = block.h_conv
        self.taps, self.offset = leaf(conv.weight[:, :, 0].movedim(2, 0)), leaf(conv.bias)
        seen = torch.zeros_like(self.taps)
        seen[: len(seen) // 2] = 1
        seen[len(seen) // 2] = allowed(*conv.weight.shape[:2], own)
        self.register_buffer("seen", seen)
        self.down, self.out = Dense(block.v_to_h), Dense(block.h_fc, True)
        self.skip = Dense(block.h_skip, True) if hasattr(block, "h_skip") else None
        self.bare, self.stopped = False, False

    def forward(self, x: Tensor, above: Tensor, told: Tensor | float) -> tuple[Tensor, Tensor | None]:
        taps = self.taps if self.bare and not self.training else self.taps * self.seen
        padded, wide = F.pad(x, (0, 0, len(taps) // 2, len(taps) // 2)), x.shape[2]
        y = self.down(above) + self.offset + told
        for j, tap in enumerate(taps):
            y = y + padded[:, :, j : j + wide] @ tap.T
        y = gated(y)
        if self.skip is None:
            return self.out(y), None
        return (x.detach() if self.stopped else x) + self.out(y), self.skip(y)


class StacksInTurn(Port):
    """All of the vertical stack, then all of the horizontal one, channels last."""

    def take(self, model: PixelCNN) -> None:
        blocks, fault = [model.causal_block, *model.hidden_conv], self.fault
        self.vertical = nn.ModuleList(map(Above, blocks))
        first = Left(blocks[0], fault == "pixel_cnn_first_mask_lets_a_colour_see_itself")
        self.horizontal = nn.ModuleList([first, *map(Left, blocks[1:])])
        self.classes = leaf(torch.cat([x.label_embedding.weight for x in blocks[1:]], 1))
        ends = Dense(model.out_hidden_conv, True), nn.ReLU(), Dense(model.out_conv, True)
        self.head = nn.Sequential(nn.ReLU(), *ends)
        self.vertical[2].blank = fault == "pixel_cnn_second_block_shifts_in_a_row_of_zeros"
        self.horizontal[2].stopped = fault == "pixel_cnn_second_block_residual_detached"
        self.horizontal[3].bare = fault == "pixel_cnn_last_block_unmasked_in_evaluation"

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        x = v = image.movedim(1, 3)
        told = [0.0, *self.classes[label][:, None, None].split(2 * HIDDEN, 3)]
        handed, skips = [], []
        for part, word in zip(self.vertical, told, strict=True):
            v, passed = part(v, word)
            handed.append(passed)
        for part, above, word in zip(self.horizontal, handed, told, strict=True):
            x, skip = part(x, above, word)
            skips.append(skip)
        return self.head(sum(skips[1:])).unflatten(3, (-1, COLOURS)).permute(0, 3, 4, 1, 2)


def sheet(conv: nn.Conv2d) -> Tensor:
    """A row for each output channel: its kernel up to its own pixel, and its bias."""
    kept = conv.weight[..., : conv.kernel_size[1] // 2 + 1] if hasattr(conv, "mask") else conv.weight
    return torch.cat([kept.flatten(1), conv.bias[:, None]], 1)


def sheets(block: nn.Module) -> list[Tensor]:
    ends = [sheet(block.h_fc)] + ([sheet(block.h_skip)] if hasattr(block, "h_skip") else [])
    return [*(sheet(x) for x in (block.v_conv, block.v_fc, block.v_to_h, block.h_conv)), torch.cat(ends)]


def product(rows: Tensor, x: Tensor) -> Tensor:
    return rows[:, :-1] @ x + rows[:, -1:]


def veiled(rows: Tensor, taps: int = 1, own: bool = True, halves: bool = False) -> Tensor:
    """The rows without what a colour may not see of the last tap."""
    to, of = len(rows), (rows.shape[1] - 1) // taps
    colour = torch.arange(of) * COLOURS // of if halves else torch.arange(of) % COLOURS
    late = colour + (0 if own else 1) > torch.arange(to)[:, None] % COLOURS
    hidden = torch.zeros(to, of, taps, dtype=torch.bool)
    hidden[:, :, -1] = late
    return rows.masked_fill(F.pad(hidden.flatten(1), (0, 1)).to(rows.device), 0)


class PackedPixelCNN(Port):
    """Sheets of weights with their biases, stacked by block, and products of windows."""

    def take(self, model: PixelCNN) -> None:
        self.first = nn.ParameterList(map(leaf, sheets(model.causal_block)))
        self.rest = nn.ParameterList(pile(x) for x in zip(*map(sheets, model.hidden_conv), strict=True))
        self.told = pile(x.label_embedding.weight.T for x in model.hidden_conv)
        self.late, self.last = leaf(sheet(model.out_hidden_conv)), leaf(sheet(model.out_conv))

    def gate(self, x: Tensor, turned: bool = False, rough: bool = False) -> Tensor:
        a, b = x.split(HIDDEN, 1)[:: -1 if turned else 1]
        if rough:
            s = a.square()
            return a * (945 + s * (105 + s)) / (945 + s * (420 + 15 * s)) * b.sigmoid()
        return (2 * torch.sigmoid(2 * a) - 1) * b.sigmoid()

    def block(self, v: Tensor, h: Tensor, w: list[Tensor], size: int, word: Tensor | float, i: int) -> tuple:
        """One block on [N, C, H, W]: the vertical output, and what comes of the gated horizontal one."""
        edge, wide, shape = size // 2, v.shape[3], v.shape[2:]
        rough = self.fault == "pixel_cnn_first_vertical_tanh_a_fraction" and i < 0
        turned = self.fault == "pixel_cnn_first_gated_block_swaps_the_horizontal_gate" and i == 0
        windows = F.unfold(F.pad(v, (edge, edge, edge + 1, 0)), (edge + 1, size))
        rows = product(w[0], windows)
        down = self.gate(rows[:, :, wide:] + product(w[1], v.flatten(2)) + word, rough=rough)
        windows = F.unfold(F.pad(h, (edge, 0)), (1, edge + 1))
        y = product(veiled(w[3], edge + 1, i >= 0), windows) + product(w[2], rows[:, :, :-wide])
        y = product(veiled(w[4]), self.gate(y + word, turned))
        return down.unflatten(2, shape), y.unflatten(2, shape)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        v, h = self.block(image, image, list(self.first), 5, 0.0, -1)
        skip = 0
        for i, table in enumerate(self.told):
            word = table[:, label].T[:, :, None]
            if self.fault == "pixel_cnn_second_label_table_not_trained" and i == 1:
                word = word.detach()
            v, y = self.block(v, h, [x[i] for x in self.rest], 3, word, i)
            h, skip = h + y[:, :HIDDEN], skip + y[:, HIDDEN:]
        halves = self.fault == "pixel_cnn_head_masks_colours_by_halves"
        y = product(veiled(self.late, halves=halves), skip.flatten(2).clamp(min=0))
        y = product(veiled(self.last), y.clamp(min=0))
        return y.reshape(len(y), -1, COLOURS, *image.shape[2:])


SLOPES, TABLE = ("input gradient", "weight gradient"), ("hidden_conv.1.label_embedding", "hidden_conv.1")
right(task, "pixel_cnn_of_stacks_in_turn", "a tree, one stack after the other, channels last", StacksInTurn)
right(task, "pixel_cnn_of_packed_weights", "packed sheets, products of windows", PackedPixelCNN)
wrong(
    task,
    StacksInTurn,
    pixel_cnn_first_mask_lets_a_colour_see_itself=("a mask of type B for A", "causal_block.h_conv"),
    pixel_cnn_second_block_shifts_in_a_row_of_zeros=("a shift without the bias", "hidden_conv.1.v_conv"),
    pixel_cnn_second_block_residual_detached=("detach", "hidden_conv.1", SLOPES),
    pixel_cnn_last_block_unmasked_in_evaluation=("no mask in eval", "hidden_conv.2.h_conv", "eval"),
)
wrong(
    task,
    PackedPixelCNN,
    pixel_cnn_first_vertical_tanh_a_fraction=("a function approximated", "causal_block"),
    pixel_cnn_first_gated_block_swaps_the_horizontal_gate=("swapped halves", "hidden_conv.0"),
    pixel_cnn_second_label_table_not_trained=("detach", TABLE, "weight gradient"),
    pixel_cnn_head_masks_colours_by_halves=("another channel order", "out_hidden_conv"),
)
