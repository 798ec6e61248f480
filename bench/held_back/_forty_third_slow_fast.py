"""A small SlowFast: a slow and a fast pathway over clips, with lateral fusions from fast to slow."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FRAMES, HIGH, WIDE, ALPHA, BETA_INV, RATIO = 8, 16, 20, 4, 4, 2
WIDTH, CLASSES, CLIPS = 16, 7, 3
# of each stage: the slow pathway's channels, those inside its blocks, its temporal kernel, the spatial stride
STAGES = (32, 12, 1, 1), (40, 20, 3, 2)


def conv(dim_in: int, dim_out: int, kernel: tuple, stride: tuple = (1, 1, 1)) -> nn.Conv3d:
    layer = nn.Conv3d(dim_in, dim_out, kernel, stride, [size // 2 for size in kernel], bias=False)
    nn.init.normal_(layer.weight, std=1.2 / math.sqrt(dim_in * math.prod(kernel)))
    return layer


def norm(dim: int) -> nn.BatchNorm3d:
    layer = nn.BatchNorm3d(dim)
    nn.init.normal_(layer.weight, 1.0, 0.2), nn.init.normal_(layer.bias, std=0.2)
    nn.init.normal_(layer.running_mean, std=0.2), nn.init.uniform_(layer.running_var, 0.6, 1.6)
    return layer


class ResNetBasicStem(nn.Module):
    def __init__(self, dim_in: int, dim_out: int, kernel: tuple):
        super().__init__()
        self.conv, self.bn = conv(dim_in, dim_out, kernel, (1, 2, 2)), norm(dim_out)
        self.relu, self.pool_layer = nn.ReLU(), nn.MaxPool3d((1, 3, 3), (1, 2, 2), (0, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.pool_layer(self.relu(self.bn(self.conv(x))))


class VideoModelStem(nn.Module):
    def __init__(self):
        super().__init__()
        self.pathway0_stem = ResNetBasicStem(3, WIDTH, (1, 5, 5))
        self.pathway1_stem = ResNetBasicStem(3, WIDTH // BETA_INV, (5, 5, 5))

    def forward(self, x: list[Tensor]) -> list[Tensor]:
        return [self.pathway0_stem(x[0]), self.pathway1_stem(x[1])]


class FuseFastToSlow(nn.Module):
    """Joins to the slow pathway's channels those of a time-strided convolution of the fast one."""

    def __init__(self, dim_in: int):
        super().__init__()
        self.conv_f2s = conv(dim_in, RATIO * dim_in, (5, 1, 1), (ALPHA, 1, 1))
        self.bn, self.relu = norm(RATIO * dim_in), nn.ReLU()

    def forward(self, x: list[Tensor]) -> list[Tensor]:
        x_s, x_f = x
        fuse = self.relu(self.bn(self.conv_f2s(x_f)))
        return [torch.cat([x_s, fuse], 1), x_f]


class BottleneckTransform(nn.Module):
    def __init__(self, dim_in: int, dim_out: int, dim_inner: int, temp_kernel: int, stride: int):
        super().__init__()
        self.a, self.a_bn = conv(dim_in, dim_inner, (temp_kernel, 1, 1)), norm(dim_inner)
        self.a_relu = nn.ReLU()
        self.b, self.b_bn = conv(dim_inner, dim_inner, (1, 3, 3), (1, stride, stride)), norm(dim_inner)
        self.b_relu = nn.ReLU()
        self.c, self.c_bn = conv(dim_inner, dim_out, (1, 1, 1)), norm(dim_out)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a_relu(self.a_bn(self.a(x)))
        x = self.b_relu(self.b_bn(self.b(x)))
        return self.c_bn(self.c(x))


class ResBlock(nn.Module):
    def __init__(self, dim_in: int, dim_out: int, dim_inner: int, temp_kernel: int, stride: int):
        super().__init__()
        if dim_in != dim_out or stride != 1:
            self.branch1 = conv(dim_in, dim_out, (1, 1, 1), (1, stride, stride))
            self.branch1_bn = norm(dim_out)
        self.branch2 = BottleneckTransform(dim_in, dim_out, dim_inner, temp_kernel, stride)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "branch1"):
            return self.relu(self.branch1_bn(self.branch1(x)) + self.branch2(x))
        return self.relu(x + self.branch2(x))


class ResStage(nn.Module):
    def __init__(self, dims_in: list[int], dim_out: int, dim_inner: int, temp_kernel: int, stride: int):
        super().__init__()
        kinds = zip(dims_in, (1, BETA_INV), (temp_kernel, 3), strict=True)
        for p, (dim_in, part, kernel) in enumerate(kinds):
            out, inner = dim_out // part, dim_inner // part
            self.add_module(f"pathway{p}_res0", ResBlock(dim_in, out, inner, kernel, stride))
            self.add_module(f"pathway{p}_res1", ResBlock(out, out, inner, kernel, 1))

    def forward(self, x: list[Tensor]) -> list[Tensor]:
        output = []
        for p in range(2):
            y = x[p]
            for i in range(2):
                y = getattr(self, f"pathway{p}_res{i}")(y)
            output.append(y)
        return output


class ResNetBasicHead(nn.Module):
    """Logits at each position that a pool fits in; in evaluation the mean of their softmax."""

    def __init__(self, dims_in: list[int], pool_size: list[tuple]):
        super().__init__()
        self.pathway0_avgpool = nn.AvgPool3d(pool_size[0], stride=1)
        self.pathway1_avgpool = nn.AvgPool3d(pool_size[1], stride=1)
        self.projection, self.act = nn.Linear(sum(dims_in), CLASSES), nn.Softmax(dim=4)
        nn.init.normal_(self.projection.weight, std=0.15), nn.init.normal_(self.projection.bias, std=0.1)

    def forward(self, x: list[Tensor]) -> Tensor:
        x = torch.cat([self.pathway0_avgpool(x[0]), self.pathway1_avgpool(x[1])], 1)
        x = self.projection(x.permute(0, 2, 3, 4, 1))
        if not self.training:
            x = self.act(x)
            x = x.mean([1, 2, 3])
        return x.reshape(x.shape[0], -1)


class SlowFast(nn.Module):
    """Clips [N, 3, T, H, W] -> logits of all positions in a row, or in evaluation probabilities."""

    def __init__(self):
        super().__init__()
        fast, (two, three) = WIDTH // BETA_INV, STAGES
        self.s1, self.s1_fuse = VideoModelStem(), FuseFastToSlow(fast)
        self.s2 = ResStage([WIDTH + RATIO * fast, fast], *two)
        fast = two[0] // BETA_INV
        self.s2_fuse = FuseFastToSlow(fast)
        self.s3 = ResStage([two[0] + RATIO * fast, fast], *three)
        dims = [three[0], three[0] // BETA_INV]
        self.head = ResNetBasicHead(dims, [(FRAMES // ALPHA, 2, 2), (FRAMES, 2, 2)])

    def forward(self, frames: Tensor) -> Tensor:
        x = self.s1([frames[:, :, ::ALPHA], frames])
        x = self.s2(self.s1_fuse(x))
        x = self.s3(self.s2_fuse(x))
        return self.head(x)


def clips() -> tuple[Tensor, Tensor]:
    """Waves that move: their class tells where to, and how fast."""
    label = torch.randint(CLASSES, (CLIPS,))
    turn = (math.tau * label / CLASSES)[:, None, None, None, None]
    time, across = torch.arange(FRAMES)[:, None, None], torch.arange(WIDE) / 3
    down, tone = torch.arange(HIGH)[:, None] / 3, torch.arange(3)[:, None, None, None]
    phase, speed = 6 * torch.rand(CLIPS, 1, 1, 1, 1), 0.3 + 0.1 * label[:, None, None, None, None]
    wave = torch.sin(turn.cos() * across + turn.sin() * down - speed * time + phase + 0.5 * tone)
    return wave + 0.2 * torch.randn_like(wave), label


def classes_at_positions(outputs: Tensor, label: Tensor) -> Tensor:
    """The cross entropy of the class at every position, by four."""
    logits = outputs.unflatten(1, (-1, CLASSES))
    return F.cross_entropy(logits.transpose(1, 2), label[:, None].expand(logits.shape[:2])) / 4
