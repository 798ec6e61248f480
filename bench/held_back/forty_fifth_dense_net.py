"""Two ports of a small DenseNet-BC: a tree with the channels last, and one class of packed weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._forty_fifth_dense_net import BLOCKS, DenseNet, gratings, quarter_entropy
from bench.held_back._fourth_ports import Port, Rows, leaf, pile, spatial, wrong
from bench.held_back._sixth_ports import few

task = few("forty_fifth_dense_net", DenseNet, gratings, quarter_entropy)


class Gated(nn.Module):
    """A norm of the last axis and a ReLU."""

    def __init__(self, norm: nn.BatchNorm2d):
        super().__init__()
        self.rows, self.late = Rows(norm), False

    def forward(self, x: Tensor) -> Tensor:
        return self.rows(x.relu()) if self.late else self.rows(x).relu()


class Growing(nn.Module):
    """Adds its own features behind those that it was given."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.enter, self.mix = Gated(layer.norm1), leaf(layer.conv1.weight.flatten(1).T)
        self.leave, self.look = Gated(layer.norm2), leaf(layer.conv2.weight)
        self.cut = False

    def forward(self, x: Tensor) -> Tensor:
        given = x.detach() if self.cut else x
        new = spatial(self.leave(self.enter(given) @ self.mix), self.look)
        return torch.cat([x, new], -1)


class Weighing(nn.Module):
    """Weighs the channels of each picture by what the mean of all places says."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.down, self.up = leaf(layer.fc1.weight.flatten(1).T), leaf(layer.fc2.weight.flatten(1).T)
        self.low, self.high = leaf(layer.fc1.bias), leaf(layer.fc2.bias)

    def forward(self, x: Tensor) -> Tensor:
        inner = (x.mean((1, 2), True) @ self.down + self.low).relu()
        return x / (1 + (-(inner @ self.up + self.high)).exp())


class Halving(nn.Module):
    """Means of two by two places, and then the product that halves the channels."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.enter, self.mix = Gated(layer.norm), leaf(layer.conv.weight.flatten(1).T)
        self.ceil = False

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(self.enter(x).movedim(3, 1), 2, ceil_mode=self.ceil)
        return x.movedim(1, 3) @ self.mix


class TreeDenseNet(Port):
    """A stem, stages of growing layers that each end in a halving, and a head."""

    def take(self, model: DenseNet) -> None:
        f = model.features
        self.first, self.gate = leaf(f.conv0.weight), Gated(f.norm0)
        blocks = f.denseblock1, f.denseblock2, f.denseblock3
        one, two, three = ([Growing(x) for x in block.values()] for block in blocks)
        one.append(Halving(f.transition1))
        two += [Weighing(f.attention2), Halving(f.transition2)]
        self.stages = nn.ModuleList(nn.Sequential(*x) for x in (one, two, three))
        self.last, self.matrix = Gated(f.norm5), leaf(model.classifier.weight.T)
        self.offset = leaf(model.classifier.bias)
        one[1].leave.late = self.fault == "dense_net_second_layer_rectifies_before_its_second_norm"
        two[3].ceil = self.fault == "dense_net_second_transition_pools_the_odd_row_too"
        three[1].cut = self.fault == "dense_net_last_block_second_layer_reads_detached"

    def forward(self, x: Tensor) -> Tensor:
        x = self.gate(spatial(x.movedim(1, 3), self.first, stride=2)).movedim(3, 1)
        pool = F.avg_pool2d if self.fault == "dense_net_stem_pool_takes_the_mean" else F.max_pool2d
        x = pool(F.pad(x, (1, 1, 1, 1)), 3, 2).movedim(1, 3)
        for stage in self.stages:
            x = stage(x)
        return self.last(x).mean((1, 2)) @ self.matrix + self.offset


def moments(x: Tensor) -> Tensor:
    """The mean and the variance of each channel, [2, C]."""
    mean = x.mean((0, 2, 3))
    return torch.stack([mean, (x - mean[:, None, None]).square().mean((0, 2, 3))])


def product(weight: Tensor, x: Tensor, size: int = 1, stride: int = 1) -> Tensor:
    """A convolution by columns of patches; ``weight`` is [C k k, O]."""
    shape = [(length - 1) // stride + 1 for length in x.shape[2:]]
    columns = F.unfold(x, size, padding=size // 2, stride=stride)
    return (weight.T @ columns).unflatten(2, shape)


def affine(layer: nn.Module) -> nn.Parameter:
    """Weight and bias in one, [I + 1, O]."""
    return leaf(torch.cat([layer.weight.flatten(1), layer.bias[:, None]], 1).T)


class PackedDenseNet(Port):
    """All norms in one weight; the statistics of a feature are taken once for all layers that read it."""

    def take(self, model: DenseNet) -> None:
        f = model.features
        norms = [x for x in model.modules() if isinstance(x, nn.BatchNorm2d)]
        layers = [x for i in (1, 2, 3) for x in getattr(f, f"denseblock{i}").values()]
        self.norms = leaf(torch.cat([torch.stack([x.weight, x.bias]) for x in norms], 1))
        kept = torch.cat([torch.stack([x.running_mean, x.running_var]) for x in norms], 1)
        self.register_buffer("kept", kept.clone())
        self.widths = [x.num_features for x in norms]
        self.narrow = leaf(torch.cat([x.conv1.weight.flatten(1) for x in layers], 1).T)
        self.grow = pile(x.conv2.weight.flatten(1).T for x in layers)
        self.halve = leaf(torch.cat([x.conv.weight.flatten() for x in (f.transition1, f.transition2)]))
        self.stem = leaf(f.conv0.weight.flatten(1).T)
        self.down, self.up = affine(f.attention2.fc1), affine(f.attention2.fc2)
        self.head = affine(model.classifier)

    def rectified(self, x: Tensor, seen: Tensor, k: int, relu: bool = True) -> Tensor:
        """The norm of that number, and a ReLU."""
        cut = slice(sum(self.widths[:k]), sum(self.widths[: k + 1]))
        (scale, shift), used = self.norms[:, cut], self.kept[:, cut]
        if self.training:
            count = x[:, 0].numel()
            plain = self.fault == "dense_net_first_transition_keeps_biased_variance" and k == 7
            grown = 1 if plain else count / (count - 1)
            with torch.no_grad():
                used.mul_(0.9).add_(0.1 * seen * seen.new_tensor([[1], [grown]]))
            used = seen
        wide = self.fault == "dense_net_third_layer_second_norm_has_a_large_eps" and k == 6
        scale = scale / (used[1] + (1e-3 if wide else 1e-5)).sqrt()
        y = x * scale[:, None, None] + (shift - used[0] * scale)[:, None, None]
        return y.relu() if relu else y

    def weighed(self, x: Tensor) -> Tensor:
        inner = (x.mean((2, 3)) @ self.down[:-1] + self.down[-1]).relu()
        power = inner @ self.up[:-1] + self.up[-1]
        hard = self.fault == "dense_net_excitation_by_hard_sigmoid"
        return x * (F.hardsigmoid(power) if hard else power.sigmoid())[:, :, None, None]

    def forward(self, x: Tensor) -> Tensor:
        x = product(self.stem, x, 7, 2)
        x = F.max_pool2d(self.rectified(x, moments(x), 0), 3, 2, 1)
        k, layer, row, spot = 1, 0, 0, 0
        for block, count in enumerate(BLOCKS):
            seen = moments(x)
            for _ in range(count):
                width = x.shape[1]
                y = product(self.narrow[row : row + width], self.rectified(x, seen, k))
                y = product(self.grow[layer], self.rectified(y, moments(y), k + 1), 3)
                x, seen = torch.cat([x, y], 1), torch.cat([seen, moments(y)], 1)
                k, layer, row = k + 2, layer + 1, row + width
            if block == 1:
                x = self.weighed(x)
                seen = moments(x)
            if block < len(BLOCKS) - 1:
                width = x.shape[1]
                weight = self.halve[spot : spot + width * (width // 2)].view(width // 2, width)
                x = F.avg_pool2d(product(weight.T, self.rectified(x, seen, k)), 2)
                k, spot = k + 1, spot + weight.numel()
        x = self.rectified(x, seen, k, self.fault != "dense_net_no_relu_behind_the_final_norm")
        return x.mean((2, 3)) @ self.head[:-1] + self.head[-1]


BLOCK = "features.denseblock"
GRADIENTS = ("input gradient", "weight gradient")
right(task, "dense_net_as_a_tree", "other modules, channels last, pooled before the product", TreeDenseNet)
right(task, "dense_net_packed", "packed weights, statistics shared by layers", PackedDenseNet)
wrong(
    task,
    TreeDenseNet,
    dense_net_stem_pool_takes_the_mean=("another pooling", "features.pool0"),
    dense_net_second_layer_rectifies_before_its_second_norm=("order", f"{BLOCK}1.denselayer2"),
    dense_net_second_transition_pools_the_odd_row_too=("rounded up", "features.transition2.pool"),
    dense_net_last_block_second_layer_reads_detached=("detached", f"{BLOCK}3.denselayer2", GRADIENTS),
)
wrong(
    task,
    PackedDenseNet,
    dense_net_third_layer_second_norm_has_a_large_eps=("epsilon", f"{BLOCK}1.denselayer3.norm2"),
    dense_net_first_transition_keeps_biased_variance=("variance", "features.transition1.norm", "buffer"),
    dense_net_excitation_by_hard_sigmoid=("another function", "features.attention2.scale_activation"),
    dense_net_no_relu_behind_the_final_norm=("left out", ""),
)
