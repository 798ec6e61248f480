"""Two ports of a small ResNet-D: a tree with the channels last, and packed vectors read by loops."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, Rows, leaf, spatial, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._thirty_third_res_net_d import CARDINALITY, ResNet, smoothed, stripes

task = few("thirty_third_res_net_d", ResNet, stripes, smoothed)


class Normed(nn.Module):
    """A convolution of [N, H, W, C], in groups, and the norm of it."""

    def __init__(self, conv: nn.Conv2d, norm: nn.BatchNorm2d):
        super().__init__()
        self.weight, self.norm = leaf(conv.weight.unflatten(0, (conv.groups, -1))), Rows(norm)
        self.stride = conv.stride[0]

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(x.chunk(len(self.weight), -1), self.weight, strict=True)
        return self.norm(torch.cat([spatial(part, w, stride=self.stride) for part, w in parts], -1))


def soft(x: Tensor, dark: bool = False) -> Tensor:
    """Means of neighbours, twice along each side, of which every other one is kept."""
    for side in (1, 2):
        x = x.transpose(0, side)
        x = torch.cat([0 * x[:1], x, 0 * x[:1]] if dark else [x[1:2], x, x[-2:-1]])
        x = (x[1:] + x[:-1]) / 2
        x = ((x[1:] + x[:-1]) / 2)[::2].transpose(0, side)
    return x


def halved(x: Tensor, dark: bool = False) -> Tensor:
    """Means of four pixels; the last row or column stands in for one that is missing."""
    for side in (1, 2):
        if x.shape[side] % 2:
            last = x.narrow(side, x.shape[side] - 1, 1)
            x = torch.cat([x, 0 * last if dark else last], side)
        x = x.unflatten(side, (-1, 2)).mean(side + 1)
    return x


class Unit(nn.Module):
    """The body and the side path, which are summed."""

    def __init__(self, block: nn.Module):
        super().__init__()
        inner = Normed(block.conv1, block.bn1), nn.ReLU(), Normed(block.conv2, block.bn2), nn.ReLU()
        self.body, self.out = nn.Sequential(*inner), Normed(block.conv3, block.bn3)
        side, se = block.downsample, block.se
        self.down, self.up = (leaf(x.weight.flatten(1).T) for x in (se.fc1, se.fc2))
        self.low, self.high, self.blind = leaf(se.fc1.bias), leaf(se.fc2.bias), False
        self.side = Normed(side[1], side[2]) if side else nn.Identity()
        self.strided, self.dark = not isinstance(block.aa, nn.Identity), ""

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        if self.strided:
            x, y = halved(x, self.dark == "side"), soft(y, self.dark == "body")
        y = self.out(y)
        seen = y.flatten(1, 2).mean(1)
        hidden = F.relu((seen.detach() if self.blind else seen) @ self.down + self.low)
        return self.side(x) + y / (1 + torch.exp(-(hidden @ self.up + self.high)))[:, None, None]


class ResNetOfUnits(Port):
    """Units without their last activation, channels last; a tree of other borders."""

    def take(self, model: ResNet) -> None:
        stem = model.conv1
        self.entry = nn.ModuleList(map(Normed, (stem[0], stem[3], stem[6]), (stem[1], stem[4], model.bn1)))
        self.units = nn.ModuleList(map(Unit, (*model.layer1, *model.layer2, *model.layer3)))
        self.matrix, self.offset = leaf(model.fc.weight.T), leaf(model.fc.bias)
        self.entry[1].norm.own = self.fault == "res_net_d_stem_norm_by_the_batch_in_evaluation"
        self.units[1].blind = self.fault == "res_net_d_second_squeeze_without_gradient"
        self.units[2].dark = "body" if self.fault == "res_net_d_blur_of_second_stage_pads_with_zeros" else ""
        self.units[4].dark = (
            "side" if self.fault == "res_net_d_pool_of_third_stage_counts_its_padding" else ""
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x.movedim(1, 3)
        for layer in self.entry:
            x = layer(x).relu()
        for side in (1, 2):
            x = F.pad(x.transpose(side, 3), (1, 1)).unfold(3, 3, 1).amax(-1).transpose(side, 3)
        x = soft(x)
        for unit in self.units:
            x = unit(x).relu()
        return (x @ self.matrix).mean((1, 2)) + self.offset


def shrunk(x: Tensor, blur: bool) -> Tensor:
    """A product with a matrix along each side: of binomial rows, or of means of two or of the one left."""
    for side in (2, 3):
        rows = torch.eye(x.shape[side]).to(x)
        if blur:
            rows = F.pad(rows[None], (1, 1), mode="reflect")[0].T
            rows = ((rows[:-2] + rows[2:]) / 4 + rows[1:-1] / 2)[::2]
        else:
            rows = F.pad(rows, (0, 0, 0, len(rows) % 2)).unflatten(0, (-1, 2)).sum(1)
            rows = rows / rows.sum(1, True)
        x = (x.transpose(side, 3) @ rows.T).transpose(side, 3)
    return x


class PackedResNet(Port):
    """All kernels of a block in one vector, all norms in one table; sides shrink by matrices."""

    def take(self, model: ResNet) -> None:
        stem, self.w, self.shapes = model.conv1, nn.ParameterList(), []
        self.pack(stem[0].weight, stem[3].weight, stem[6].weight)
        norms = [stem[1], stem[4], model.bn1]
        for block in (*model.layer1, *model.layer2, *model.layer3):
            side, se = block.downsample, block.se
            convs = block.conv1, block.conv2, block.conv3, *([side[1]] if side else [])
            gates = se.fc1.weight.flatten(1), se.fc1.bias, se.fc2.weight.flatten(1), se.fc2.bias
            self.pack(*gates, *(x.weight for x in convs))
            norms += [block.bn1, block.bn2, block.bn3, *([side[2]] if side else [])]
        self.pack(model.fc.weight, model.fc.bias)
        self.sizes = [x.num_features for x in norms]
        columns = [torch.stack([x.weight, x.bias, x.running_mean, x.running_var]) for x in norms]
        affine, kept = torch.cat(columns, 1).detach().chunk(2)
        self.affine = leaf(affine)
        self.register_buffer("kept", kept.clone())

    def pack(self, *tensors: Tensor) -> None:
        self.w.append(leaf(torch.cat([x.flatten() for x in tensors])))
        self.shapes.append([x.shape for x in tensors])

    def unpack(self, i: int) -> list[Tensor]:
        pieces = self.w[i].split([shape.numel() for shape in self.shapes[i]])
        return list(map(Tensor.view, pieces, self.shapes[i]))

    def norm(self, x: Tensor) -> Tensor:
        at, size = sum(self.sizes[: self.turn]), self.sizes[self.turn]
        (gain, offset), kept = self.affine[:, at : at + size], self.kept[:, at : at + size]
        other = self.turn == 16 and self.fault == "res_net_d_last_norm_of_fourth_block_has_another_epsilon"
        eps, used = 1e-3 if other else 1e-5, kept
        if self.training:
            used, count = torch.stack(torch.var_mean(x, (0, 2, 3), correction=0)[::-1]), x.numel() / size
            with torch.no_grad():
                kept += 0.1 * (used * used.new_tensor([[1], [count / (count - 1)]]) - kept)
            if self.turn == 13 and self.fault == "res_net_d_second_shortcut_norm_takes_constants":
                used = used.detach()
        self.turn += 1
        gain = gain / (used[1] + eps).sqrt()
        return x * gain[:, None, None] + (offset - used[0] * gain)[:, None, None]

    def block(self, i: int, x: Tensor) -> Tensor:
        down, low, up, high, one, two, three, *side = self.unpack(i)
        strided = side and i > 2
        y = self.norm(torch.einsum("oi,nihw->nohw", one[:, :, 0, 0], x)).clamp(min=0)
        y = self.norm(F.conv2d(y, two, padding=1, groups=CARDINALITY)).clamp(min=0)
        y = shrunk(y, True) if strided else y
        y = self.norm(torch.einsum("oi,nihw->nohw", three[:, :, 0, 0], y))
        gate = F.linear(F.linear(y.mean((2, 3)), down, low).clamp(min=0), up, high)
        hard = i == 6 and self.fault == "res_net_d_last_gate_is_a_hard_sigmoid"
        y = y * (F.hardsigmoid(gate) if hard else gate.sigmoid())[:, :, None, None]
        if side:  # the product of channels before the means of pixels
            x = torch.einsum("oi,nihw->nohw", side[0][:, :, 0, 0], x)
            x = self.norm(shrunk(x, False) if strided else x)
        return (x + y).clamp(min=0)

    def forward(self, x: Tensor) -> Tensor:
        self.turn, late = 0, self.fault == "res_net_d_first_convolution_pads_only_at_the_end"
        x = F.pad(x, (0, 1, 0, 1) if late else (1, 1, 1, 1))
        for j, kernel in enumerate(self.unpack(0)):
            x = self.norm(F.conv2d(x, kernel, stride=1 if j else 2, padding=1 if j else 0)).clamp(min=0)
        x = shrunk(F.max_pool2d(x, 3, 1, 1), True)
        for i in range(1, 7):
            x = self.block(i, x)
        return F.linear(x.flatten(2).mean(2), *self.unpack(7))


SLOPES = ("input gradient", "weight gradient")
right(task, "res_net_d_of_units_with_channels_last", "a tree, split groups", ResNetOfUnits)
right(task, "res_net_d_of_packed_vectors", "packed vectors, matrices for pools", PackedResNet)
wrong(
    task,
    ResNetOfUnits,
    res_net_d_stem_norm_by_the_batch_in_evaluation=("batch statistics in eval", "conv1.4", "eval"),
    res_net_d_second_squeeze_without_gradient=("detach", "layer1.1.se", SLOPES),
    res_net_d_blur_of_second_stage_pads_with_zeros=("another padding", "layer2.0.aa"),
    res_net_d_pool_of_third_stage_counts_its_padding=("a mean over padding", "layer3.0.downsample.0"),
)
wrong(
    task,
    PackedResNet,
    res_net_d_first_convolution_pads_only_at_the_end=("another padding", "conv1.0"),
    res_net_d_second_shortcut_norm_takes_constants=("detach", "layer2.0.downsample.2", SLOPES),
    res_net_d_last_norm_of_fourth_block_has_another_epsilon=("another epsilon", "layer2.1.bn3"),
    res_net_d_last_gate_is_a_hard_sigmoid=("another function", "layer3.1.se.gate"),
)
