"""Two ports of a small GhostNet: a tree with the channels last, and one class of packed weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right, tapped
from bench.held_back._forty_fourth_ghost_net import GhostNet, stripes, third_of_cross_entropy
from bench.held_back._fourth_ports import Port, Rows, leaf, wrong
from bench.held_back._sixth_ports import few

task = few("forty_fourth_ghost_net", GhostNet, stripes, third_of_cross_entropy)


class Mix(nn.Module):
    def __init__(self, conv: nn.Conv2d, norm: nn.BatchNorm2d):
        super().__init__()
        self.matrix, self.norm = leaf(conv.weight[:, :, 0, 0].T), Rows(norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x @ self.matrix)


class Slide(nn.Module):
    def __init__(self, conv: nn.Conv2d, norm: nn.BatchNorm2d):
        super().__init__()
        self.taps, self.stride, self.norm = leaf(conv.weight[:, 0].movedim(0, 2)), conv.stride[0], Rows(norm)

    def forward(self, x: Tensor) -> Tensor:
        size = len(self.taps)
        x = F.pad(x, (0, 0, *[size // 2] * 4)).unfold(1, size, self.stride).unfold(2, size, self.stride)
        return self.norm(torch.einsum("nhwcij,ijc->nhwc", x, self.taps))


class Twins(nn.Module):
    """Channels and their copies; ``alone`` copies send no gradient back to the first."""

    def __init__(self, ghost: nn.Module, bent: bool):
        super().__init__()
        self.own, self.copy = Mix(*ghost.primary_conv[:2]), Slide(*ghost.cheap_operation[:2])
        self.width, self.bent, self.alone = ghost.oup, bent, False

    def forward(self, x: Tensor) -> Tensor:
        x = self.own(x)
        x = x.relu() if self.bent else x
        y = self.copy(x.detach() if self.alone else x)[..., : self.width - x.shape[-1]]
        return torch.cat([x, y.relu() if self.bent else y], -1)


class Weigh(nn.Module):
    def __init__(self, se: nn.Module):
        super().__init__()
        self.less, self.more = (leaf(x.weight[:, :, 0, 0].T) for x in (se.conv_reduce, se.conv_expand))
        self.low, self.high = leaf(se.conv_reduce.bias), leaf(se.conv_expand.bias)
        self.slope = 1 / 6

    def forward(self, x: Tensor) -> Tensor:
        gate = (x.mean((1, 2), True) @ self.less + self.low).relu() @ self.more + self.high
        return x * (self.slope * gate + 0.5).clamp(0, 1)


class GhostOfTwins(Port):
    """Two chains of a block, which are summed, with the channels last."""

    def take(self, model: GhostNet) -> None:
        fault = self.fault
        self.lens, self.start = leaf(model.conv_stem.weight), Rows(model.bn1)
        self.main, self.side = nn.ModuleList(), nn.ModuleList()
        for (block,) in model.blocks[:3]:
            chain = [Twins(block.ghost1, True)]
            chain += [Slide(block.conv_dw, block.bn_dw)] if block.stride > 1 else []
            chain += [] if block.se is None else [Weigh(block.se)]
            self.main.append(nn.Sequential(*chain, Twins(block.ghost2, False)))
            cut = block.shortcut
            self.side.append(nn.Sequential(Slide(*cut[:2]), Mix(*cut[2:])) if len(cut) else nn.Identity())
        last, unit = model.blocks[3]
        b = unit.branch2
        self.widen = Mix(last.conv, last.bn1)
        self.branch = nn.Sequential(Mix(*b[:2]), nn.ReLU(), Slide(*b[3:5]), Mix(*b[5:7]), nn.ReLU())
        self.head, self.head_bias = leaf(model.conv_head.weight[:, :, 0, 0].T), leaf(model.conv_head.bias)
        self.name, self.name_bias = leaf(model.classifier.weight.T), leaf(model.classifier.bias)
        self.main[0][1].alone = fault == "ghost_net_first_projection_copies_without_gradient"
        self.main[1][1].norm.own = fault == "ghost_net_strided_norm_by_batch_in_evaluation"
        if fault == "ghost_net_second_gate_with_a_slope_of_a_fifth":
            self.main[2][1].slope = 1 / 5

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(tapped(x.movedim(1, 3), self.lens, 2)).relu()
        for main, side in zip(self.main, self.side, strict=True):
            x = side(x) + main(x)
        kept, other = self.widen(x).relu().tensor_split(2, -1)
        flat = self.fault == "ghost_net_shuffle_left_out"
        x = torch.stack([kept, self.branch(other)], -2 if flat else -1).flatten(-2).mean((1, 2))
        return (x @ self.head + self.head_bias).relu() @ self.name + self.name_bias


class PackedGhost(Port):
    """A sheet of kernels for each ghost, a strip of all norms, and a cursor that goes along it."""

    def take(self, model: GhostNet) -> None:
        blocks, (last, unit) = [stage[0] for stage in model.blocks[:3]], model.blocks[3]
        one, two, b = blocks[1], blocks[2], unit.branch2
        norms, self.ghosts = [model.bn1], nn.ParameterList()
        for block in blocks:
            for ghost in (block.ghost1, block.ghost2):
                own, copy = ghost.primary_conv, ghost.cheap_operation
                self.ghosts.append(leaf(torch.cat([own[0].weight.flatten(1), copy[0].weight.flatten(1)], 1)))
                norms += [own[1], copy[1]]
                if ghost is one.ghost1:
                    norms.append(one.bn_dw)
        norms += [one.shortcut[1], one.shortcut[3], last.bn1, b[1], b[4], b[6]]
        names = ("weight", "bias", "running_mean", "running_var")
        strips = [torch.cat([getattr(n, k).detach() for n in norms]) for k in names]
        self.strip = leaf(torch.stack(strips[:2]))
        self.register_buffer("kept", torch.stack(strips[2:]))
        self.side_at = sum(n.num_features for n in norms[:-6])
        self.stem, self.slide = leaf(model.conv_stem.weight), leaf(one.conv_dw.weight)
        self.around, self.across = leaf(one.shortcut[0].weight), leaf(one.shortcut[2].weight.flatten(1))
        unit = torch.cat([b[i].weight.flatten(1) for i in (0, 3, 5)], 1)
        self.wide, self.unit = leaf(last.conv.weight.flatten(1)), leaf(unit)
        gates = [y for x in (one, two) for y in (x.se.conv_reduce, x.se.conv_expand)]
        full = [*gates, model.conv_head, model.classifier]
        self.full = nn.ParameterList(leaf(torch.cat([x.weight.flatten(1), x.bias[:, None]], 1)) for x in full)

    def norm(self, x: Tensor, at: int, eps: float = 1e-5) -> Tensor:
        here = slice(at, at + x.shape[1])
        center, spread = self.kept[:, here]
        if self.training:
            spread, center = torch.var_mean(x, (0, 2, 3), correction=0)
            count = x[:, 0].numel()
            with torch.no_grad():
                new = torch.stack([center, spread * count / (count - 1)])
                self.kept[:, here] = 0.9 * self.kept[:, here] + 0.1 * new
        gain = self.strip[0, here] / (spread + eps).sqrt()
        return x * gain[:, None, None] + (self.strip[1, here] - center * gain)[:, None, None]

    def mix(self, x: Tensor, matrix: Tensor) -> Tensor:
        return torch.einsum("oc,nchw->nohw", matrix, x)

    def line(self, x: Tensor, sheet: Tensor) -> Tensor:
        return sheet[:, :-1] @ x + sheet[:, -1:]

    def each(self, x: Tensor, kernel: Tensor, stride: int = 1, late: bool = False) -> Tensor:
        edge = kernel.shape[-1] // 2
        return F.conv2d(F.pad(x, (edge - late, edge + late) * 2), kernel, stride=stride, groups=len(kernel))

    def ghost(self, x: Tensor, i: int, at: int, width: int) -> Tensor:
        matrix, taps = self.ghosts[i].tensor_split([x.shape[1]], 1)
        floor = -torch.inf if i % 2 else 0
        x = self.norm(self.mix(x, matrix), at).clamp(min=floor)
        y = self.norm(self.each(x, taps.reshape(-1, 1, 3, 3)), at + len(taps)).clamp(min=floor)
        swapped = self.fault == "ghost_net_last_expansion_puts_the_copies_first" and i == 4
        return torch.cat([y, x] if swapped else [x, y], 1)[:, :width]

    def forward(self, x: Tensor) -> Tensor:
        eps = 1e-3 if self.fault == "ghost_net_stem_norm_with_a_larger_epsilon" else 1e-5
        x, at = self.norm(F.conv2d(x, self.stem, stride=2, padding=1), 0, eps).clamp(min=0), len(self.stem)
        for i, (middle, out) in enumerate(((30, 20), (50, 33), (70, 33))):
            y, at = self.ghost(x, 2 * i, at, middle), at + 2 * len(self.ghosts[2 * i])
            if i == 1:
                late = self.fault == "ghost_net_strided_window_padded_as_same"
                y, at = self.norm(self.each(y, self.slide, 2, late), at), at + middle
                x = self.norm(self.each(x, self.around, 2), self.side_at)
                x = self.norm(self.mix(x, self.across), self.side_at + 20)
            if i:
                less, more = self.full[2 * i - 2 : 2 * i]
                gate = self.line(self.line(y.mean((2, 3), True).flatten(2), less).clamp(min=0), more)
                y = y * (F.hardtanh(gate, -3, 3) / 6 + 0.5)[..., None]
            x, at = x + self.ghost(y, 2 * i + 1, at, out), at + 2 * len(self.ghosts[2 * i + 1])
        at = self.side_at + 53
        x = self.norm(self.mix(x, self.wide), at).clamp(min=0)
        (left, y), (first, taps, last) = x.tensor_split(2, 1), self.unit.split([22, 9, 22], 1)
        y = self.norm(self.mix(y, first), at + 44).clamp(min=0)
        y = self.norm(self.each(y, taps.reshape(-1, 1, 3, 3)), at + 66)
        y = self.norm(self.mix(y, last), at + 88).clamp(min=0)
        x = torch.stack([left, y], 2).flatten(1, 2).flatten(2)
        x = x if self.fault == "ghost_net_pools_after_the_head" else x.mean(2, True)
        x = self.line(x, self.full[4]).clamp(min=0).mean(2, True)
        return self.line(x, self.full[5]).flatten(1)


SLOPES = ("input gradient", "weight gradient")
right(task, "ghost_net_of_twins_with_channels_last", "a tree of chains, channels last", GhostOfTwins)
right(task, "ghost_net_of_packed_sheets", "packed sheets, one strip of norms, loops", PackedGhost)
wrong(
    task,
    GhostOfTwins,
    ghost_net_first_projection_copies_without_gradient=("detach", "blocks.0.0.ghost2", SLOPES),
    ghost_net_strided_norm_by_batch_in_evaluation=("batch statistics in eval", "blocks.1.0.bn_dw", "eval"),
    ghost_net_second_gate_with_a_slope_of_a_fifth=("another hard sigmoid", "blocks.2.0.se"),
    ghost_net_shuffle_left_out=("a shuffle left out", "blocks.3.1"),
)
wrong(
    task,
    PackedGhost,
    ghost_net_stem_norm_with_a_larger_epsilon=("another epsilon", "bn1"),
    ghost_net_strided_window_padded_as_same=("another padding", "blocks.1.0.conv_dw"),
    ghost_net_last_expansion_puts_the_copies_first=("another order of parts", "blocks.2.0.ghost1"),
    ghost_net_pools_after_the_head=("another order of operations", ""),
)
