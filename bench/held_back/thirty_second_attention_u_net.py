"""Two ports of a small Attention U-Net: floors within floors, and one class of packed blocks."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import filled, right
from bench.held_back._fourth_ports import Port, Rows, leaf, spatial, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._thirty_second_attention_u_net import AttentionUNet, organs, supervised

task = few("thirty_second_attention_u_net", AttentionUNet, organs, supervised)


def larger(x: Tensor, corners: bool = False) -> Tensor:
    """Twice as high and wide by lines between the middles of the pixels; the ends are held."""
    if corners:
        return F.interpolate(x.movedim(3, 1), None, 2, "bilinear", True).movedim(1, 3)
    for axis in (2, 1):
        places = torch.arange(x.shape[axis])
        sides = (x.index_select(axis, (places + i).clamp(0, len(places) - 1)) for i in (-1, 1))
        x = torch.stack([x + (side - x) / 4 for side in sides], axis + 1).flatten(axis, axis + 1)
    return x


class Joined(nn.Module):
    """A convolution of several maps, with a kernel for each, and its batch norm."""

    def __init__(self, layer: nn.Conv2d, norm: nn.Module, maps: int = 1):
        super().__init__()
        self.kernels = nn.ParameterList(leaf(part) for part in layer.weight.chunk(maps, 1))
        self.offset, self.rows = leaf(layer.bias), Rows(norm)

    def forward(self, *maps: Tensor) -> Tensor:
        y = sum(spatial(x, kernel) for x, kernel in zip(maps, self.kernels, strict=True))
        return self.rows(y + self.offset)


class Twice(nn.Module):
    def __init__(self, block: nn.Module, maps: int = 1):
        super().__init__()
        self.first, self.second = Joined(*block.conv[:2], maps), Joined(*block.conv[3:5])

    def forward(self, *maps: Tensor) -> Tensor:
        return self.second(self.first(*maps).relu()).relu()


class Valve(nn.Module):
    """How much of each pixel of the skip is let through."""

    def __init__(self, gate: nn.Module):
        super().__init__()
        self.ask, self.show, self.open = Joined(*gate.W_g), Joined(*gate.W_x), Joined(*gate.psi[:2])
        self.still = self.shared = False

    def forward(self, asking: Tensor, shown: Tensor) -> Tensor:
        y = self.open((self.show(shown) + self.ask(asking)).relu())
        y = y.flatten(1).softmax(1).view_as(y) if self.shared else 1 / (1 + torch.exp(-y))
        return y.detach() if self.still else y


class Floor(nn.Module):
    """Goes down to the floor below, if there is one, and comes up again; gives the maps of all, top first."""

    def __init__(self, model: AttentionUNet, level: int):
        super().__init__()
        self.down, self.below = Twice(model.get_submodule(f"Conv{level}")), None
        self.mean = self.corners = False
        if level < 4:
            up, gate, joint = (model.get_submodule(f"{x}{level + 1}") for x in ("Up", "Att", "Up_conv"))
            self.below, self.lift = Floor(model, level + 1), Joined(*up.up[1:3])
            self.valve, self.up = Valve(gate), Twice(joint, 2)

    def forward(self, x: Tensor) -> list[Tensor]:
        skip = self.down(x)
        if self.below is None:
            return [skip]
        tiles = skip.unflatten(2, (-1, 2)).unflatten(1, (-1, 2))
        lower = self.below(tiles.mean((2, 4)) if self.mean else tiles.amax((2, 4)))
        lifted = self.lift(larger(lower[0], self.corners)).relu()
        return [self.up(skip * self.valve(lifted, skip), lifted), *lower]


class AttentionUNetOfFloors(Port):
    """Each floor holds the one below it, channels last; kernels of skips and of what comes up are apart."""

    def take(self, model: AttentionUNet) -> None:
        self.top = Floor(model, 1)
        second, third = self.top.below, self.top.below.below
        second.mean = self.fault == "attention_u_net_second_pooling_takes_the_mean"
        third.corners = self.fault == "attention_u_net_first_upsampling_aligns_corners"
        third.valve.shared = self.fault == "attention_u_net_deepest_gate_is_a_softmax_over_pixels"
        second.valve.still = self.fault == "attention_u_net_middle_gate_opens_without_gradient"
        heads = model.Conv_1x1, model.dsv3.dsv[0]
        sizes = [(x.in_channels, x.out_channels, x.weight.flatten(1), x.bias) for x in heads]
        self.fine, self.coarse = (filled(nn.Linear(a, b), weight, bias) for a, b, weight, bias in sizes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second, *_ = self.top(x.movedim(1, 3))
        return self.fine(first).movedim(3, 1), self.coarse(larger(second)).movedim(3, 1)


def units(model: AttentionUNet) -> list[list[tuple[nn.Module, nn.Module]]]:
    """Each convolution with its norm, by blocks in the order in which they run."""
    blocks = [[x.conv[:2], x.conv[3:5]] for x in (model.Conv1, model.Conv2, model.Conv3, model.Conv4)]
    for level in (4, 3, 2):
        up, gate, joint = (model.get_submodule(f"{x}{level}") for x in ("Up", "Att", "Up_conv"))
        blocks += [[up.up[1:3]], [gate.W_g, gate.W_x, gate.psi[:2]], [joint.conv[:2], joint.conv[3:5]]]
    return blocks


def stretched(x: Tensor) -> Tensor:
    """Twice as high and wide, by a product with a matrix on each side."""
    for size in (x.shape[3], x.shape[2]):
        place = ((torch.arange(2 * size).to(x) + 0.5) / 2 - 0.5).clamp(0, size - 1)
        x = (x @ (1 - (place - torch.arange(size).to(x)[:, None]).abs()).clamp(min=0)).mT
    return x


class PackedAttentionUNet(Port):
    """A vector of weights for each block, products of patches, and one table of running statistics."""

    def take(self, model: AttentionUNet) -> None:
        self.w, self.shapes, memory = nn.ParameterList(), [], []
        for block in units(model):
            sheets = []
            for conv, norm in block:
                columns = (x[:, None] for x in (conv.bias, norm.weight, norm.bias))
                sheets.append(torch.cat([conv.weight.flatten(1), *columns], 1))
                memory.append(torch.stack([norm.running_mean, norm.running_var]))
            self.shapes.append([tuple(sheet.shape) for sheet in sheets])
            self.w.append(leaf(torch.cat([sheet.flatten() for sheet in sheets])))
        self.register_buffer("memory", torch.cat(memory, 1))
        parts = (x for head in (model.Conv_1x1, model.dsv3.dsv[0]) for x in head.parameters())
        self.heads = leaf(torch.cat([x.reshape(len(x), -1) for x in parts], 1))

    def unit(self, block: int, part: int, x: Tensor, size: int = 3) -> Tensor:
        shapes = self.shapes[block]
        sheet = self.w[block].split([a * b for a, b in shapes])[part].view(shapes[part])
        offset, gain, shift = sheet[:, -3:].T[..., None]
        y = sheet[:, :-3] @ F.unfold(x, size, padding=size // 2) + offset
        start = sum(a for each in self.shapes[:block] for a, _ in each) + sum(a for a, _ in shapes[:part])
        mean, var = self.memory[:, start : start + len(sheet)]
        if self.training:
            old, count = (mean, var), y[:, 0].numel()
            var, mean = torch.var_mean(y, (0, 2), correction=0)
            biased = (
                self.fault == "attention_u_net_deepest_norm_keeps_biased_variance" and block == 3 and part
            )
            with torch.no_grad():
                old[0].mul_(0.9).add_(0.1 * mean)
                old[1].mul_(0.9).add_(0.1 * var if biased else 0.1 * count / (count - 1) * var)
        wide = self.fault == "attention_u_net_third_encoder_norm_epsilon" and (block, part) == (2, 0)
        scale = gain / (var + (1e-3 if wide else 1e-5)).sqrt()[:, None]
        return (y * scale + shift - mean[:, None] * scale).unflatten(2, x.shape[2:])

    def twice(self, block: int, x: Tensor) -> Tensor:
        return self.unit(block, 1, self.unit(block, 0, x).clamp(min=0)).clamp(min=0)

    def gate(self, block: int, g: Tensor, x: Tensor) -> Tensor:
        both = self.unit(block, 0, g, 1) + self.unit(block, 1, x, 1)
        much = (1 + (self.unit(block, 2, both.clamp(min=0), 1) / 2).tanh()) / 2
        more = self.fault == "attention_u_net_last_gate_adds_the_skip_again" and block == 11
        return (much + more) * x

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        skips, found = [self.twice(0, x)], []
        for block in (1, 2, 3):
            skips.append(self.twice(block, F.max_pool2d(skips[-1], 2)))
        x = skips.pop()
        for block in (4, 7, 10):
            g = self.unit(block, 0, stretched(x)).clamp(min=0)
            x = self.twice(block + 2, torch.cat([self.gate(block + 1, g, skips.pop()), g], 1))
            found.append(x)
        fine, a, coarse, b = self.heads.split([found[2].shape[1], 1, found[1].shape[1], 1], 1)
        deep = torch.einsum("oc,nchw->nohw", coarse, found[1]) + b[..., None]
        near = self.fault == "attention_u_net_deep_head_repeats_its_pixels"
        deep = F.interpolate(deep, scale_factor=2) if near else stretched(deep)
        return torch.einsum("oc,nchw->nohw", fine, found[2]) + a[..., None], deep


SLOPES, KEPT = ("input gradient", "weight gradient"), ("buffer", "eval")
right(task, "attention_u_net_of_floors", "nested floors, channels last, split kernels", AttentionUNetOfFloors)
right(task, "attention_u_net_of_packed_blocks", "packed vectors, products of patches", PackedAttentionUNet)
wrong(
    task,
    AttentionUNetOfFloors,
    attention_u_net_second_pooling_takes_the_mean=("another pooling", "Maxpool2"),
    attention_u_net_first_upsampling_aligns_corners=("align_corners", "Up4.up.0"),
    attention_u_net_deepest_gate_is_a_softmax_over_pixels=("another activation", "Att4.psi.2"),
    attention_u_net_middle_gate_opens_without_gradient=("detach", ("Att3", "Att3.psi.2"), SLOPES),
)
wrong(
    task,
    PackedAttentionUNet,
    attention_u_net_third_encoder_norm_epsilon=("another epsilon", "Conv3.conv.1"),
    attention_u_net_deepest_norm_keeps_biased_variance=("a biased variance", "Conv4.conv.4", KEPT),
    attention_u_net_last_gate_adds_the_skip_again=("a residual too many", "Att2"),
    attention_u_net_deep_head_repeats_its_pixels=("nearest for bilinear", "dsv3.dsv.1"),
)
