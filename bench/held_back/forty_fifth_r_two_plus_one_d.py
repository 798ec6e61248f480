"""Two ports of a small R(2+1)D: a tree with the channels last, and one class of packed weights."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._forty_fifth_r_two_plus_one_d import VideoResNet, drifting, third_entropy
from bench.held_back._fourth_ports import Port, Rows, leaf, wrong
from bench.held_back._sixth_ports import few

task = few("forty_fifth_r_two_plus_one_d", VideoResNet, drifting, third_entropy)


class InSpace(nn.Module):
    """A convolution of the frames of [N, T, H, W, C], then a norm and a rectifier."""

    def __init__(self, conv: nn.Conv3d, norm: nn.Module):
        super().__init__()
        self.kernel, self.stride = leaf(conv.weight[:, :, 0].permute(2, 3, 1, 0)), conv.stride[1]
        self.norm, self.late = Rows(norm), 0

    def forward(self, x: Tensor) -> Tensor:
        size, by = len(self.kernel), self.stride
        x = F.pad(x, (0, 0, *[size // 2 - self.late, size // 2] * 2))
        high, wide = ((length - size) // by * by + 1 for length in x.shape[2:4])
        taps = [x[:, :, i : i + high : by, j : j + wide : by] for i in range(size) for j in range(size)]
        return self.norm(torch.cat(taps, -1) @ self.kernel.flatten(0, 2)).clamp(min=0)


class InTime(nn.Module):
    """Products of each frame with those around it (a shortcut: with itself alone), then a norm."""

    def __init__(self, conv: nn.Conv3d, norm: nn.Module):
        super().__init__()
        self.kernel, self.stride = leaf(conv.weight[..., 0, 0].permute(2, 1, 0)), conv.stride[0]
        self.norm = Rows(norm)

    def forward(self, x: Tensor) -> Tensor:
        size, count = len(self.kernel), x.shape[1]
        x = F.pad(x, (0, 0, 0, 0, 0, 0, size // 2, size // 2))
        return self.norm(sum(x[:, i : i + count : self.stride] @ self.kernel[i] for i in range(size)))


class Residual(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        (one, norm, _), (two, last) = block.conv1, block.conv2
        self.first, self.second = InSpace(one[0], one[1]), InTime(one[3], norm)
        self.third, self.fourth = InSpace(two[0], two[1]), InTime(two[3], last)
        self.skip = InTime(*block.downsample) if block.downsample else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inner, by = self.second(self.first(x)).relu(), self.first.stride
        return (self.skip(x[:, :, ::by, ::by]) + self.fourth(self.third(inner))).relu()


class Looking(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        convs = block.theta, block.phi[0], block.g[0]
        self.into = leaf(torch.cat([x.weight.flatten(1) for x in convs]).T)
        self.offset = leaf(block.theta.bias)
        self.out, self.norm, self.fixed = leaf(block.W[0].weight.flatten(1).T), Rows(block.W[1]), False

    def forward(self, x: Tensor) -> Tensor:
        width, high, wide = len(self.offset), x.shape[2] // 2, x.shape[3] // 2
        both = x @ self.into
        query = (both[..., :width] + self.offset).flatten(1, 3)
        pooled = both[:, :, : 2 * high, : 2 * wide, width:].unflatten(3, (wide, 2)).unflatten(2, (high, 2))
        key, value = pooled.amax((3, 5)).flatten(1, 3).chunk(2, -1)
        share = (query @ key.mT).softmax(2)
        seen = (share.detach() if self.fixed else share) @ (value @ self.out)
        return x + self.norm(seen.unflatten(1, x.shape[1:4]))


class VideoTree(Port):
    """Residual pairs of steps in space and in time, channels last."""

    def take(self, model: VideoResNet) -> None:
        stem, fault = model.stem, self.fault
        self.start = nn.ModuleList([InSpace(stem[0], stem[1]), InTime(stem[3], stem[4])])
        early, middle, late = ([*map(Residual, x)] for x in (model.layer1, model.layer2, model.layer3))
        self.body = nn.Sequential(*early, Looking(model.nonlocal1), *middle, Looking(model.nonlocal2), *late)
        self.matrix, self.offset = leaf(model.fc.weight.T), leaf(model.fc.bias)
        self.start[0].late = int(fault == "r_two_plus_one_d_stem_padded_more_after_than_before")
        if fault == "r_two_plus_one_d_first_shortcut_norm_of_a_larger_epsilon":
            middle[0].skip.norm.eps = 1e-3
        self.body[5].fixed = fault == "r_two_plus_one_d_second_attention_without_gradient"

    def forward(self, x: Tensor) -> Tensor:
        (space, time), count = self.start, x.shape[:2]
        x = self.body(time(space(x.flatten(0, 1).movedim(1, 4))).relu())
        scores = (x.flatten(1, 3).mean(1) @ self.matrix + self.offset).unflatten(0, count)
        if self.training or self.fault == "r_two_plus_one_d_scores_averaged_in_evaluation":
            return scores.mean(1)
        return scores.log_softmax(2).logsumexp(1) - math.log(count[1])


class PackedVideo(Port):
    """All kernels in one vector and all norms in one table; the channels lead."""

    def take(self, model: VideoResNet) -> None:
        linear = {n: m for n, m in model.named_modules() if isinstance(m, nn.Conv3d | nn.Linear)}
        norms = {n: m for n, m in model.named_modules() if isinstance(m, nn.BatchNorm3d)}
        self.names, self.norms = [*linear], [*norms]
        self.shapes = [m.weight.shape for m in linear.values()]
        self.widths = [len(m.bias) for m in norms.values()]
        self.w = leaf(torch.cat([m.weight.flatten() for m in linear.values()]))
        self.b = leaf(torch.cat([m.bias for m in linear.values() if m.bias is not None]))
        self.table = leaf(torch.cat([torch.stack([m.weight, m.bias]) for m in norms.values()], 1))
        stats = [torch.stack([m.running_mean, m.running_var]) for m in norms.values()]
        self.register_buffer("stats", torch.cat(stats, 1))

    def kernel(self, name: str) -> Tensor:
        i = self.names.index(name)
        return self.w.split([shape.numel() for shape in self.shapes])[i].view(self.shapes[i])

    def norm(self, name: str, x: Tensor) -> Tensor:
        i, rows = self.norms.index(name), x.flatten(1)
        (gain, offset), kept = (each.split(self.widths, 1)[i] for each in (self.table, self.stats))
        mean, var = kept
        if self.training:
            var, mean = torch.var_mean(rows, 1, correction=0)
            biased = self.fault == "r_two_plus_one_d_last_norm_keeps_the_biased_variance"
            less = 0 if biased and name == "layer3.0.conv2.1" else 1 / rows.shape[1]
            with torch.no_grad():
                kept.lerp_(torch.stack([mean, var / (1 - less)]), 0.1)
        gain = gain / (var + 1e-5).sqrt()
        return (gain[:, None] * rows + (offset - gain * mean)[:, None]).view(x.shape)

    def mix(self, name: str, x: Tensor) -> Tensor:
        return torch.tensordot(self.kernel(name).flatten(1), x, 1)

    def space(self, name: str, x: Tensor, by: int) -> Tensor:
        kernel, size = self.kernel(name)[:, :, 0], self.kernel(name).shape[-1]
        windows = F.pad(x, [size // 2] * 4).unfold(3, size, by).unfold(4, size, by)
        return torch.einsum("ocij,cnthwij->onthw", kernel, windows)

    def time(self, name: str, x: Tensor, by: int) -> Tensor:
        before = after = torch.zeros_like(x[:, :, :1])
        repeats = self.fault == "r_two_plus_one_d_fourth_block_repeats_its_edge_frames"
        if repeats and name == "layer2.1.conv2.0.3":
            before, after = x[:, :, :1], x[:, :, -1:]
        windows = torch.cat([before, x, after], 2).unfold(2, 3, by)
        return torch.einsum("ock,cnthwk->onthw", self.kernel(name)[..., 0, 0], windows)

    def pair(self, name: str, x: Tensor, by: int = 1, later: int = 1) -> Tensor:
        return self.time(name + ".3", self.norm(name + ".1", self.space(name + ".0", x, by)).relu(), later)

    def block(self, name: str, x: Tensor, by: int) -> Tensor:
        y = self.norm(name + ".conv1.1", self.pair(name + ".conv1.0", x, by, by)).relu()
        y = self.norm(name + ".conv2.1", self.pair(name + ".conv2.0", y))
        if by > 1:
            x = self.norm(name + ".downsample.1", self.mix(name + ".downsample.0", x[:, :, ::by, ::by, ::by]))
        if self.fault == "r_two_plus_one_d_first_block_rectifies_before_the_sum" and name == "layer1.0":
            return y.relu() + x
        return (x + y).relu()

    def look(self, i: int, x: Tensor) -> Tensor:
        name = f"nonlocal{i}"
        query, key, value = (self.mix(f"{name}.{part}", x) for part in ("theta", "phi.0", "g.0"))
        mean = self.fault == "r_two_plus_one_d_first_values_pooled_by_their_mean" and i == 1
        k = F.max_pool3d(key, (1, 2, 2)).flatten(2)
        v = (F.avg_pool3d if mean else F.max_pool3d)(value, (1, 2, 2)).flatten(2)
        q = query.flatten(2) + self.b.split([5, 6, 5])[i - 1][:, None, None]
        seen = torch.einsum("cnk,nkq->cnq", v, torch.einsum("cnq,cnk->nkq", q, k).softmax(1))
        return x + self.norm(name + ".W.1", self.mix(name + ".W.0", seen).view(x.shape))

    def forward(self, x: Tensor) -> Tensor:
        count = x.shape[:2]
        x = self.norm("stem.4", self.pair("stem", x.flatten(0, 1).transpose(0, 1), 2)).relu()
        for i, j in ((1, 0), (1, 1), (2, 0), (2, 1), (3, 0)):
            x = self.block(f"layer{i}.{j}", x, 2 if i > 1 and j == 0 else 1)
            x = self.look(i, x) if j == 1 else x
        scores = (x.mean((2, 3, 4)).T @ self.kernel("fc").T + self.b[11:]).view(*count, -1)
        return scores.mean(1) if self.training else scores.softmax(2).mean(1).log()


SLOPES = ("input gradient", "weight gradient")
right(task, "r_two_plus_one_d_tree_with_channels_last", "a tree, taps, fused projections", VideoTree)
right(task, "r_two_plus_one_d_of_packed_weights", "one packed weight, channels first of all", PackedVideo)
wrong(
    task,
    VideoTree,
    r_two_plus_one_d_stem_padded_more_after_than_before=("another padding", "stem.0"),
    r_two_plus_one_d_first_shortcut_norm_of_a_larger_epsilon=("another epsilon", "layer2.0.downsample.1"),
    r_two_plus_one_d_second_attention_without_gradient=("detach", "nonlocal2", SLOPES),
    r_two_plus_one_d_scores_averaged_in_evaluation=("another mean in eval", "", "eval"),
)
wrong(
    task,
    PackedVideo,
    r_two_plus_one_d_first_block_rectifies_before_the_sum=("another order", "layer1.0"),
    r_two_plus_one_d_first_values_pooled_by_their_mean=("another pooling", "nonlocal1.g.1"),
    r_two_plus_one_d_fourth_block_repeats_its_edge_frames=("another padding", "layer2.1.conv2.0.3"),
    r_two_plus_one_d_last_norm_keeps_the_biased_variance=("a count left out", "layer3.0.conv2.1", "buffer"),
)
