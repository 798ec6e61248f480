"""A small MaxViT: inverted bottlenecks, then attention within windows and attention over a spread grid."""

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn

STEM, WIDTHS, DEPTHS = 8, (8, 16), (2, 2)
HEAD, CELLS, CLASSES, SHAPE = 4, 3, 5, (24, 48)


def varied(module: nn.Module) -> None:
    """Start with weights and averages that let every layer, gain, shift and position count."""
    if isinstance(module, nn.BatchNorm2d | nn.LayerNorm):
        nn.init.uniform_(module.weight, 0.6, 1.4)
        nn.init.normal_(module.bias, std=0.1)
    elif isinstance(module, nn.Conv2d | nn.Linear):
        gain = 2 if isinstance(module, nn.Conv2d) else 1.2
        nn.init.normal_(module.weight, std=gain / math.sqrt(module.weight[0].numel()))
        if module.bias is not None:
            nn.init.normal_(module.bias, std=0.1)
    elif isinstance(module, RelativeAttention):
        nn.init.normal_(module.to_qkv.weight, std=1.5 * module.scale_factor)
        nn.init.normal_(module.relative_position_bias_table)
    if isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.running_mean, std=0.5)
        nn.init.uniform_(module.running_var, 2, 6)


def batch_norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)


class ConvNormActivation(nn.Sequential):
    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1):
        conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
        super().__init__(conv, batch_norm(outputs), nn.GELU())


class SqueezeExcitation(nn.Module):
    """Each channel of each image times a gate made of the means of all channels."""

    def __init__(self, channels: int, squeezed: int):
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1, self.fc2 = nn.Conv2d(channels, squeezed, 1), nn.Conv2d(squeezed, channels, 1)
        self.activation, self.scale_activation = nn.SiLU(), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale_activation(self.fc2(self.activation(self.fc1(self.avgpool(x)))))


class MBConv(nn.Module):
    """Widen, filter each channel, gate and narrow again; the way around is pooled where it strides."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        wide = 4 * outputs
        pooled = nn.Sequential(nn.AvgPool2d(3, stride, 1), nn.Conv2d(inputs, outputs, 1))
        self.proj = pooled if stride != 1 else nn.Identity()
        self.layers = nn.Sequential(
            OrderedDict(
                pre_norm=batch_norm(inputs),
                conv_a=ConvNormActivation(inputs, wide, 1),
                conv_b=ConvNormActivation(wide, wide, 3, stride, wide),
                squeeze_excitation=SqueezeExcitation(wide, outputs // 4),
                conv_c=nn.Conv2d(wide, outputs, 1),
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x) + self.layers(x)


class RelativeAttention(nn.Module):
    """Attention within each group of [B, groups, places, C]; each offset of two places has its own bias."""

    def __init__(self, width: int, cells: int):
        super().__init__()
        self.heads, self.scale_factor = width // HEAD, width**-0.5
        self.to_qkv, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        sides = 2 * cells - 1
        self.relative_position_bias_table = nn.Parameter(torch.empty(sides**2, self.heads))
        places = torch.cartesian_prod(*[torch.arange(cells)] * 2)
        offsets = places[:, None] - places[None] + cells - 1
        self.register_buffer("relative_position_index", offsets[..., 0] * sides + offsets[..., 1])

    def forward(self, x: Tensor) -> Tensor:
        batch, groups, places, width = x.shape
        split = (batch, groups, places, self.heads, HEAD)
        q, k, v = (part.reshape(split).transpose(2, 3) for part in self.to_qkv(x).chunk(3, -1))
        bias = self.relative_position_bias_table[self.relative_position_index].permute(2, 0, 1)
        logits = q @ (k * self.scale_factor).transpose(-1, -2)
        mixed = (logits + bias).softmax(-1) @ v
        return self.merge(mixed.transpose(2, 3).reshape(batch, groups, places, width))


class WindowPartition(nn.Module):
    """[B, C, H, W] -> [B, windows, places of a window, C]."""

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        (batch, width, high, wide), (a, b) = x.shape, size
        x = x.view(batch, width, high // a, a, wide // b, b).permute(0, 2, 4, 3, 5, 1)
        return x.reshape(batch, -1, a * b, width)


class WindowDepartition(nn.Module):
    def forward(self, x: Tensor, size: tuple[int, int], count: tuple[int, int]) -> Tensor:
        (batch, _, _, width), (a, b), (high, wide) = x.shape, size, count
        x = x.view(batch, high, wide, a, b, width).permute(0, 5, 1, 3, 2, 4)
        return x.reshape(batch, width, high * a, wide * b)


class SwapAxes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(-2, -3)


class PartitionAttention(nn.Module):
    """Groups are windows of neighbours; or, of a grid, places that lie evenly spread over the map."""

    def __init__(self, width: int, cells: int, kind: str):
        super().__init__()
        self.cells, self.grid = cells, kind == "grid"
        self.partition_op, self.departition_op = WindowPartition(), WindowDepartition()
        self.partition_swap = SwapAxes() if self.grid else nn.Identity()
        self.departition_swap = SwapAxes() if self.grid else nn.Identity()
        self.attn_layer = nn.Sequential(nn.LayerNorm(width), RelativeAttention(width, cells))
        self.mlp_layer = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        size, count = (self.cells, self.cells), (x.shape[2] // self.cells, x.shape[3] // self.cells)
        if self.grid:
            size, count = count, size
        x = self.partition_swap(self.partition_op(x, size))
        x = x + self.attn_layer(x)
        x = x + self.mlp_layer(x)
        return self.departition_op(self.departition_swap(x), size, count)


class MaxVitLayer(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.layers = nn.Sequential(
            OrderedDict(
                MBconv=MBConv(inputs, outputs, stride),
                window_attention=PartitionAttention(outputs, CELLS, "window"),
                grid_attention=PartitionAttention(outputs, CELLS, "grid"),
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class MaxVitBlock(nn.Module):
    """A stage: its first layer halves the map."""

    def __init__(self, inputs: int, outputs: int, depth: int):
        super().__init__()
        rest = (MaxVitLayer(outputs, outputs, 1) for _ in range(depth - 1))
        self.layers = nn.ModuleList([MaxVitLayer(inputs, outputs, 2), *rest])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class MaxVit(nn.Module):
    """Images [N, 3, H, W] -> scores of the classes."""

    def __init__(self):
        super().__init__()
        second = nn.Sequential(nn.Conv2d(STEM, STEM, 3, padding=1))
        self.stem = nn.Sequential(ConvNormActivation(3, STEM, 3, 2), second)
        widths, last = (STEM, *WIDTHS), WIDTHS[-1]
        self.blocks = nn.ModuleList(MaxVitBlock(*widths[i : i + 2], d) for i, d in enumerate(DEPTHS))
        self.classifier = nn.Sequential(
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(last), nn.Linear(last, last)),
            *(nn.Tanh(), nn.Linear(last, CLASSES, bias=False)),
        )
        self.apply(varied)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.classifier(x)


smoothed = nn.CrossEntropyLoss(label_smoothing=0.1)


def ripples() -> tuple[Tensor, Tensor]:
    """Waves whose direction tells the class, of any colour and phase, under noise."""
    labels = torch.randint(CLASSES, (3,))
    rows, columns = torch.meshgrid(*(torch.arange(float(side)) for side in SHAPE), indexing="ij")
    angle = (labels * math.pi / CLASSES)[:, None, None]
    along = rows * angle.sin() + columns * angle.cos() + 6 * torch.rand(3, 1, 1)
    waves = (0.9 * along).sin()[:, None] * (0.5 + torch.rand(3, 3, 1, 1))
    return waves + 0.4 * torch.randn(3, 3, *SHAPE), labels
