"""A small Swin Transformer V2: cosine attention in shifted windows, norms at the end of each branch."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, WINDOW, PATCH, HIDDEN = 12, (3, 6), 4, 2, 16
CLASSES, SHAPE, TOP = 5, (18, 14), math.log(100.0)


def varied(module: nn.Module) -> None:
    """Start with weights that let every layer, gain and shift count."""
    if isinstance(module, nn.LayerNorm):
        nn.init.uniform_(module.weight, 0.6, 1.4)
        nn.init.normal_(module.bias, std=0.2)
    elif isinstance(module, nn.Linear | nn.Conv2d):
        nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
        if module.bias is not None:
            nn.init.normal_(module.bias, std=0.2)


class Permute(nn.Module):
    def __init__(self, *axes: int):
        super().__init__()
        self.axes = axes

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(self.axes)


def partitioned(x: Tensor) -> Tensor:
    """[N, H, W, C] -> windows [N * count, tokens, C], one image after the other."""
    n, high, wide, c = x.shape
    cells = x.reshape(n, high // WINDOW, WINDOW, wide // WINDOW, WINDOW, c)
    return cells.transpose(2, 3).reshape(-1, WINDOW * WINDOW, c)


def joined(windows: Tensor, high: int, wide: int) -> Tensor:
    """The way back to [N, H, W, C]."""
    cells = windows.reshape(-1, high // WINDOW, wide // WINDOW, WINDOW, WINDOW, windows.shape[-1])
    return cells.transpose(2, 3).reshape(-1, high, wide, windows.shape[-1])


class ShiftedWindowAttentionV2(nn.Module):
    """Cosine attention in windows of [N, H, W, C]; an axis that one window spans is not shifted."""

    def __init__(self, dim: int, heads: int, shift: int):
        super().__init__()
        self.num_heads, self.shift_size = heads, shift
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.logit_scale = nn.Parameter(torch.linspace(1.8, 4.9, heads)[:, None, None])
        self.cpb_mlp = nn.Sequential(
            nn.Linear(2, HIDDEN), nn.ReLU(inplace=True), nn.Linear(HIDDEN, heads, bias=False)
        )
        far = torch.arange(1.0 - WINDOW, WINDOW) * 8 / (WINDOW - 1)
        far = far.sign() * torch.log2(far.abs() + 1) / math.log2(8)
        table = torch.stack(torch.meshgrid(far, far, indexing="ij"), -1)
        self.register_buffer("relative_coords_table", table)
        places = torch.cartesian_prod(torch.arange(WINDOW), torch.arange(WINDOW))
        rows, columns = (places[:, None] - places[None] + WINDOW - 1).unbind(-1)
        self.register_buffer("relative_position_index", rows * (2 * WINDOW - 1) + columns)

    def position_bias(self) -> Tensor:
        table = self.cpb_mlp(self.relative_coords_table).reshape(-1, self.num_heads)
        return 16 * table[self.relative_position_index].permute(2, 0, 1).sigmoid()

    def region_mask(self, sizes: list[int], shifts: list[int], like: Tensor) -> Tensor:
        """[windows, tokens, tokens]: what keeps apart those that only the roll has brought together."""
        rows, columns = (
            (torch.arange(size)[:, None] >= torch.tensor([size - WINDOW, size - shift])).sum(1)
            for size, shift in zip(sizes, shifts, strict=True)
        )
        regions = partitioned((3 * rows[:, None] + columns)[None, :, :, None])
        return (regions != regions.mT).to(like) * -100

    def forward(self, x: Tensor) -> Tensor:
        n, h, w, c = x.shape
        x = F.pad(x, (0, 0, 0, -w % WINDOW, 0, -h % WINDOW))
        sizes = [*x.shape[1:3]]
        shifts = [0 if size <= WINDOW else self.shift_size for size in sizes]
        windows = partitioned(x.roll([-shift for shift in shifts], (1, 2)))

        bias = self.qkv.bias.clone()
        bias[c : 2 * c].zero_()
        qkv = F.linear(windows, self.qkv.weight, bias)
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
        scores = scores * self.logit_scale.clamp(max=TOP).exp() + self.position_bias()
        if any(shifts):
            mask = self.region_mask(sizes, shifts, scores)
            scores = (scores.unflatten(0, (n, -1)) + mask[:, None]).flatten(0, 1)
        y = self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return joined(y, *sizes).roll(shifts, (1, 2))[:, :h, :w]


class MLP(nn.Sequential):
    def __init__(self, dim: int, hidden: int):
        super().__init__(
            nn.Linear(dim, hidden), nn.GELU(), nn.Identity(), nn.Linear(hidden, dim), nn.Identity()
        )


class SwinTransformerBlockV2(nn.Module):
    def __init__(self, dim: int, heads: int, shift: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-5), nn.LayerNorm(dim, eps=1e-5)
        self.attn = ShiftedWindowAttentionV2(dim, heads, shift)
        self.mlp = MLP(dim, 3 * dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norm1(self.attn(x))
        return x + self.norm2(self.mlp(x))


class PatchMergingV2(nn.Module):
    """Cells of 2 x 2 in one token of twice the width; an odd side gets zeros at its end."""

    def __init__(self, dim: int):
        super().__init__()
        self.reduction, self.norm = nn.Linear(4 * dim, 2 * dim, bias=False), nn.LayerNorm(2 * dim, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))
        quarters = [x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)]
        return self.norm(self.reduction(torch.cat(quarters, -1)))


class SwinTransformer(nn.Module):
    """Images [N, 3, H, W] -> class logits, and the map of each stage as [N, C, H, W]."""

    def __init__(self):
        super().__init__()
        embed = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        layers = [nn.Sequential(embed, Permute(0, 2, 3, 1), nn.LayerNorm(WIDTH, eps=1e-5))]
        for i, heads in enumerate(HEADS):
            if i:
                layers.append(PatchMergingV2(WIDTH * 2 ** (i - 1)))
            shifts = (0, WINDOW // 2)
            layers.append(nn.Sequential(*(SwinTransformerBlockV2(WIDTH * 2**i, heads, s) for s in shifts)))
        self.features = nn.Sequential(*layers)
        last = WIDTH * 2 ** (len(HEADS) - 1)
        self.norm = nn.LayerNorm(last, eps=1e-5)
        self.permute, self.avgpool, self.flatten = Permute(0, 3, 1, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(1)
        self.head = nn.Linear(last, CLASSES)
        self.apply(varied)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        maps = []
        for i, layer in enumerate(self.features):
            x = layer(x)
            if i % 2:
                maps.append(x.permute(0, 3, 1, 2))
        x = self.flatten(self.avgpool(self.permute(self.norm(x))))
        return self.head(x), *maps


def images() -> tuple[Tensor, Tensor]:
    """Stripes whose direction is the class, in a colour of their own, under noise."""
    labels = torch.randint(CLASSES, (3,))
    angle = labels * math.pi / CLASSES
    rows, columns = torch.meshgrid(*(torch.arange(float(size)) for size in SHAPE), indexing="ij")
    along = angle.cos()[:, None, None] * rows + angle.sin()[:, None, None] * columns
    stripes = (1.3 * along + 6 * torch.rand(3, 1, 1)).sin()
    pictures = stripes[:, None] * (0.5 + torch.rand(3, 3, 1, 1))
    return pictures + 0.4 * torch.randn(pictures.shape), labels


def smoothed(outputs: tuple[Tensor, ...], labels: Tensor) -> Tensor:
    """A third of the cross entropy of the logits, a tenth of each target spread over all classes."""
    return 0.3 * F.cross_entropy(outputs[0], labels, label_smoothing=0.1)
