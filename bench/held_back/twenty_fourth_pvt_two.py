"""Two ports of a small PVT v2: a tree of branches with the channels last, and one class of packed rows."""

import math
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import filled, right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twenty_fourth_pvt_two import POOL_SIZE, PyramidVisionTransformerV2, discs, smoothed

task = few("twenty_fourth_pvt_two", PyramidVisionTransformerV2, discs, smoothed)


def windows(x: Tensor, size: int, stride: int, before: int, after: int) -> Tensor:
    """[N, H, W, C] -> [N, H / stride, W / stride, C, size, size]."""
    return F.pad(x, (0, 0, *[before, after] * 2)).unfold(1, size, stride).unfold(2, size, stride)


def bell(x: Tensor, fused: bool = False) -> Tensor:
    """The exact gelu; ``fused``, with the slope of its quick form by the sigmoid."""
    y, quick = x * torch.special.ndtr(x), x * torch.sigmoid(1.702 * x)
    return quick + (y - quick).detach() if fused else y


def dense(weight: Tensor, bias: Tensor) -> nn.Linear:
    return filled(nn.Linear(weight.shape[1], len(weight)), weight, bias)


class Patches(nn.Module):
    def __init__(self, conv: nn.Conv2d, norm: nn.LayerNorm):
        super().__init__()
        self.kernel, self.bias = leaf(conv.weight.permute(2, 3, 1, 0)), leaf(conv.bias)
        self.stride, self.edges, self.turned, self.norm = conv.stride[0], conv.padding, False, deepcopy(norm)

    def forward(self, x: Tensor) -> Tensor:
        kernel = self.kernel.transpose(0, 1) if self.turned else self.kernel
        x = windows(x, len(kernel), self.stride, *self.edges)
        return self.norm(torch.einsum("nhwcij,ijco->nhwo", x, kernel) + self.bias)


class Pooled(Patches):
    def forward(self, x: Tensor) -> Tensor:
        rows, columns = (F.adaptive_avg_pool1d(torch.eye(n).to(x), POOL_SIZE) for n in x.shape[1:3])
        return bell(super().forward(torch.einsum("nhwc,ha,wb->nabc", x, rows, columns)))


class Branch(nn.Module):
    """Adds a change to what it is given; in evaluation, weighted by how often it ``survives``."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm, self.survives = deepcopy(norm), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.change(self.norm(x)) * (1 if self.training else self.survives)


class Reading(Branch):
    def __init__(self, block: nn.Module):
        super().__init__(block.norm1)
        attn, self.heads = block.attn, block.attn.num_heads
        self.ask, self.tell = map(deepcopy, (attn.q, attn.proj))
        self.key, self.value = map(dense, attn.kv.weight.chunk(2), attn.kv.bias.chunk(2))
        make = Pooled if attn.pool else Patches
        self.less = make(attn.sr, attn.norm) if attn.sr else nn.Identity()

    def change(self, x: Tensor) -> Tensor:
        parts = self.ask(x), *(each(self.less(x)) for each in (self.key, self.value))
        q, k, v = (each.unflatten(3, (self.heads, -1)) for each in parts)
        score = torch.einsum("nhwad,nijad->nahwij", q, k).flatten(4) / math.sqrt(q.shape[4])
        share = (score - score.logsumexp(4, keepdim=True)).exp()
        return self.tell(torch.einsum("nahwk,nkad->nhwad", share, v.flatten(1, 2)).flatten(3))


class Mixing(Branch):
    def __init__(self, block: nn.Module):
        super().__init__(block.norm2)
        mlp, self.fused = block.mlp, False
        self.rise, self.fall = map(deepcopy, (mlp.fc1, mlp.fc2))
        self.kernel, self.bias = leaf(mlp.dwconv.weight[:, 0].movedim(0, 2)), leaf(mlp.dwconv.bias)
        self.least = 0 if isinstance(mlp.relu, nn.ReLU) else -math.inf

    def change(self, x: Tensor) -> Tensor:
        x = windows(self.rise(x).clamp(min=self.least), 3, 1, 1, 1)
        return self.fall(bell(torch.einsum("nhwcij,ijc->nhwc", x, self.kernel) + self.bias, self.fused))


class PyramidOfBranches(Port):
    """Levels of a norm, patches and branches that add to what they are given, channels last."""

    def take(self, model: PyramidVisionTransformerV2) -> None:
        self.levels, self.end, fault = nn.Sequential(), nn.Identity(), self.fault
        for stage in model.stages:
            embed = stage.downsample or model.patch_embed
            branches = [make(block) for block in stage.blocks for make in (Reading, Mixing)]
            self.levels.append(nn.Sequential(self.end, Patches(embed.proj, embed.norm), *branches))
            self.end = deepcopy(stage.norm)
        self.say = deepcopy(model.head)
        if fault == "pvt_two_first_patches_padded_as_tensorflow_does":
            self.levels[0][1].edges = (1, 2)
        self.levels[1][4].less.turned = fault == "pvt_two_fourth_reduction_reads_columns_first"
        self.levels[2][3].fused = fault == "pvt_two_fifth_gelu_has_the_slope_of_its_quick_form"
        self.levels[3][5].survives = 0.9 if fault == "pvt_two_last_branch_weighted_in_evaluation" else 1

    def forward(self, x: Tensor) -> Tensor:
        return self.say(self.end(self.levels(x.movedim(1, 3))).mean((1, 2)))


def sheet(layer: nn.Module) -> Tensor:
    """A row for each channel: its weights, then its bias."""
    return torch.cat([layer.weight.reshape(len(layer.bias), -1), layer.bias[:, None]], 1)


def affine(x: Tensor, rows: Tensor) -> Tensor:
    return rows[:, :-1] @ x + rows[:, -1:]


def even(x: Tensor, rows: Tensor, eps: float = 1e-6) -> Tensor:
    """The norm of each token of [N, C, T]."""
    x = x - x.mean(1, keepdim=True)
    return x * (x.square().mean(1, keepdim=True) + eps).rsqrt() * rows[:, :1] + rows[:, 1:]


class PackedPyramid(Port):
    """A row of all weights for each block, over tokens [N, C, T]."""

    def take(self, model: PyramidVisionTransformerV2) -> None:
        self.entries, self.rows, self.shapes = nn.ParameterList(), nn.ParameterList(), []
        for stage in model.stages:
            embed = stage.downsample or model.patch_embed
            self.entries.append(leaf(torch.cat([*map(sheet, (embed.proj, embed.norm, stage.norm))], 1)))
            kept = [[sheet(x) for x in block.modules() if hasattr(x, "bias")] for block in stage.blocks]
            self.rows.append(pile(torch.cat([x.flatten() for x in sheets]) for sheets in kept))
            self.shapes.append([x.shape for x in kept[0]])
        self.head, self.heads = leaf(sheet(model.head)), [x.blocks[0].attn.num_heads for x in model.stages]

    def block(self, i: int, j: int, t: Tensor, size: list[int]) -> Tensor:
        parts = self.rows[i][j].split([x.numel() for x in self.shapes[i]])
        sheets = [x.view(shape) for x, shape in zip(parts, self.shapes[i], strict=True)]
        (first, ask, both, tell), less, (second, up, deep, down) = sheets[:4], sheets[4:-4], sheets[-4:]
        y, order, goal = even(t, first), (2, self.heads[i]), POOL_SIZE
        z = y.unflatten(2, size)
        if self.fault == "pvt_two_second_reduction_reads_a_detached_map" and (i, j) == (0, 1):
            z = z.detach()
        if self.fault == "pvt_two_fifth_attention_pools_windows_of_one_size" and (i, j) == (2, 0):
            z = F.avg_pool2d(z, [n - n // goal * (goal - 1) for n in size], [n // goal for n in size])
        elif i == 2:
            z = F.adaptive_avg_pool2d(z, goal)
        if less:
            step = math.isqrt(less[0].shape[1] // len(tell))
            z = even(affine(F.unfold(z, step, stride=step), less[0]), less[1], 1e-5)
        z = F.gelu(z) if i == 2 else z.flatten(2)
        if self.fault == "pvt_two_seventh_keys_and_values_packed_by_head" and (i, j) == (3, 0):
            order = order[::-1]
        key, value = affine(z, both).unflatten(1, (*order, -1)).unbind(1 + order.index(2))
        asked = affine(y, ask).unflatten(1, (self.heads[i], -1))
        share = (key.mT @ asked / math.sqrt(key.shape[2])).softmax(2)
        t = t + affine((value @ share).flatten(1, 2), tell)
        y = affine(even(t, second), up).unflatten(2, size)
        kernel, bias = deep[:, :-1].unflatten(1, (1, 3, 3)), deep[:, -1]
        y = F.conv2d(y.relu() if i == 2 else y, kernel, bias, padding=1, groups=len(deep))
        return t + affine(F.gelu(y.flatten(2)), down)

    def forward(self, x: Tensor) -> Tensor:
        for i, entry in enumerate(self.entries):
            keras = i == 1 and self.fault == "pvt_two_second_embedding_norm_has_the_epsilon_of_keras"
            kernel, begin, end = entry.tensor_split([-4, -2], 1)
            side = math.isqrt(kernel.shape[1] // x.shape[1])
            step = (side + 1) // 2
            t = affine(F.unfold(x, side, padding=side // 2, stride=step), kernel)
            t, size = even(t, begin, 1e-3 if keras else 1e-5), [(n - 1) // step + 1 for n in x.shape[2:]]
            for j in range(len(self.rows[i])):
                t = self.block(i, j, t, size)
            x = even(t, end).unflatten(2, size)
        return affine(x.flatten(2).mean(2, True), self.head).flatten(1)


SLOPES, LAST = ("input gradient", "weight gradient"), ("stages.3.blocks.1.drop_path2", "stages.3.blocks.1")
right(task, "pvt_two_of_branches", "a tree, channels last, windows, split keys and values", PyramidOfBranches)
right(task, "pvt_two_of_packed_rows", "packed rows, channels first, unfolded patches", PackedPyramid)
wrong(
    task,
    PyramidOfBranches,
    pvt_two_first_patches_padded_as_tensorflow_does=("padding on one side", "patch_embed.proj"),
    pvt_two_fourth_reduction_reads_columns_first=("a transposed kernel", "stages.1.blocks.1.attn.sr"),
    pvt_two_fifth_gelu_has_the_slope_of_its_quick_form=("backward", "stages.2.blocks.0.mlp.act", SLOPES),
    pvt_two_last_branch_weighted_in_evaluation=("a branch weighted in eval", LAST, "eval"),
)
wrong(
    task,
    PackedPyramid,
    pvt_two_second_reduction_reads_a_detached_map=("detach", "stages.0.blocks.1.attn", SLOPES),
    pvt_two_second_embedding_norm_has_the_epsilon_of_keras=("epsilon", "stages.1.downsample.norm"),
    pvt_two_fifth_attention_pools_windows_of_one_size=("pooling windows", "stages.2.blocks.0.attn.pool"),
    pvt_two_seventh_keys_and_values_packed_by_head=("another axis order", "stages.3.blocks.0.attn"),
)
