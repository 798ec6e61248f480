"""A small SwinIR: residual groups of shifted window attention, a pixel shuffle, and a branch of EDSR."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIGH, WIDE, WINDOW, DIM, HEADS, HIDDEN, FEATURES, SCALE = 7, 11, 4, 18, 3, 28, 10, 2
PADDED, DEPTHS, PICTURES, MEAN, RANGE = (8, 12), (2, 2), 2, (0.4488, 0.4371, 0.4040), 2.0


def window_partition(x: Tensor, window_size: int) -> Tensor:
    b, h, w, c = x.shape
    x = x.view(b, h // window_size, window_size, w // window_size, window_size, c)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, window_size, window_size, c)


def window_reverse(windows: Tensor, window_size: int, h: int, w: int) -> Tensor:
    b = windows.shape[0] // (h * w // window_size // window_size)
    x = windows.view(b, h // window_size, w // window_size, window_size, window_size, -1)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(b, h, w, -1)


class Mlp(nn.Module):
    def __init__(self, in_features: int, hidden_features: int):
        super().__init__()
        self.fc1 = nn.Linear(in_features, hidden_features)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden_features, in_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class WindowAttention(nn.Module):
    def __init__(self, dim: int, window_size: int, num_heads: int):
        super().__init__()
        self.window_size, self.num_heads, self.scale = window_size, num_heads, (dim // num_heads) ** -0.5
        side = 2 * window_size - 1
        self.relative_position_bias_table = nn.Parameter(torch.zeros(side * side, num_heads))
        axis = torch.arange(window_size)
        coords = torch.stack(torch.meshgrid(axis, axis, indexing="ij")).flatten(1)
        relative = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0) + window_size - 1
        self.register_buffer("relative_position_index", relative[..., 0] * side + relative[..., 1])
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.num_heads, c // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0] * self.scale, qkv[1], qkv[2]
        attn = q @ k.transpose(-2, -1)
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)].view(n, n, -1)
        attn = attn + bias.permute(2, 0, 1).contiguous().unsqueeze(0)
        if mask is not None:
            count = mask.shape[0]
            attn = attn.view(b // count, count, self.num_heads, n, n) + mask.unsqueeze(1).unsqueeze(0)
            attn = attn.view(-1, self.num_heads, n, n)
        attn = self.softmax(attn)
        return self.proj((attn @ v).transpose(1, 2).reshape(b, n, c))


class SwinTransformerBlock(nn.Module):
    def __init__(self, dim: int, num_heads: int, window_size: int, shift_size: int):
        super().__init__()
        self.window_size, self.shift_size = window_size, shift_size
        self.norm1 = nn.LayerNorm(dim)
        self.attn = WindowAttention(dim, window_size, num_heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, HIDDEN)
        self.register_buffer("attn_mask", self.calculate_mask(PADDED) if shift_size else None)

    def calculate_mask(self, x_size: tuple[int, int]) -> Tensor:
        img_mask, count = torch.zeros(1, *x_size, 1), 0
        cuts = (0, -self.window_size), (-self.window_size, -self.shift_size), (-self.shift_size, None)
        for h in cuts:
            for w in cuts:
                img_mask[:, slice(*h), slice(*w)] = count
                count += 1
        windows = window_partition(img_mask, self.window_size).view(-1, self.window_size**2)
        mask = windows.unsqueeze(1) - windows.unsqueeze(2)
        return mask.masked_fill(mask != 0, -100.0)

    def forward(self, x: Tensor, x_size: tuple[int, int]) -> Tensor:
        (h, w), (b, _, c), shift = x_size, x.shape, self.shift_size
        shortcut, x = x, self.norm1(x).view(b, h, w, c)
        x = torch.roll(x, shifts=(-shift, -shift), dims=(1, 2))
        windows = window_partition(x, self.window_size).view(-1, self.window_size**2, c)
        windows = self.attn(windows, mask=self.attn_mask).view(-1, self.window_size, self.window_size, c)
        x = window_reverse(windows, self.window_size, h, w)
        x = torch.roll(x, shifts=(shift, shift), dims=(1, 2))
        x = shortcut + x.view(b, h * w, c)
        return x + self.mlp(self.norm2(x))


class BasicLayer(nn.Module):
    def __init__(self, dim: int, depth: int):
        super().__init__()
        shifts = (WINDOW // 2 * (i % 2) for i in range(depth))
        self.blocks = nn.ModuleList(SwinTransformerBlock(dim, HEADS, WINDOW, shift) for shift in shifts)

    def forward(self, x: Tensor, x_size: tuple[int, int]) -> Tensor:
        for block in self.blocks:
            x = block(x, x_size)
        return x


class PatchEmbed(nn.Module):
    def __init__(self, dim: int, norm: bool = False):
        super().__init__()
        self.norm = nn.LayerNorm(dim) if norm else None

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(2).transpose(1, 2)
        return x if self.norm is None else self.norm(x)


class PatchUnEmbed(nn.Module):
    def forward(self, x: Tensor, x_size: tuple[int, int]) -> Tensor:
        return x.transpose(1, 2).reshape(x.shape[0], -1, *x_size)


class RSTB(nn.Module):
    def __init__(self, dim: int, depth: int):
        super().__init__()
        self.residual_group = BasicLayer(dim, depth)
        self.conv = nn.Conv2d(dim, dim, 3, 1, 1)
        self.patch_embed, self.patch_unembed = PatchEmbed(dim), PatchUnEmbed()

    def forward(self, x: Tensor, x_size: tuple[int, int]) -> Tensor:
        y = self.patch_unembed(self.residual_group(x, x_size), x_size)
        return self.patch_embed(self.conv(y)) + x


class ResBlock(nn.Module):
    def __init__(self, n_feats: int, res_scale: float = 0.1):
        super().__init__()
        convs = [nn.Conv2d(n_feats, n_feats, 3, padding=1) for _ in range(2)]
        self.body, self.res_scale = nn.Sequential(convs[0], nn.ReLU(), convs[1]), res_scale

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).mul(self.res_scale) + x


class SwinIR(nn.Module):
    """[N, 3, H, W] -> [N, 3, 2 H, 2 W]; the branch of EDSR joins before the pixel shuffle."""

    def __init__(self):
        super().__init__()
        self.mean, self.img_range = torch.tensor(MEAN).view(1, 3, 1, 1), RANGE
        self.conv_first = nn.Conv2d(3, DIM, 3, 1, 1)
        self.patch_embed, self.patch_unembed = PatchEmbed(DIM, norm=True), PatchUnEmbed()
        self.layers = nn.ModuleList(RSTB(DIM, depth) for depth in DEPTHS)
        self.norm = nn.LayerNorm(DIM)
        self.conv_after_body = nn.Conv2d(DIM, DIM, 3, 1, 1)
        self.conv_before_upsample = nn.Sequential(nn.Conv2d(DIM, FEATURES, 3, 1, 1), nn.LeakyReLU())
        self.edsr_head = nn.Conv2d(3, FEATURES, 3, 1, 1)
        self.edsr_body = nn.Sequential(*(ResBlock(FEATURES) for _ in range(2)))
        wide = nn.Conv2d(FEATURES, SCALE**2 * FEATURES, 3, 1, 1)
        self.upsample = nn.Sequential(wide, nn.PixelShuffle(SCALE))
        self.conv_last = nn.Conv2d(FEATURES, 3, 3, 1, 1)
        for name, p in self.named_parameters():
            if name.endswith("table"):
                nn.init.normal_(p, std=0.5)
            elif p.ndim > 1:
                nn.init.normal_(p, std=0.8 / p[0].numel() ** 0.5)
            else:
                nn.init.normal_(p, 1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.15)

    def forward_features(self, x: Tensor) -> Tensor:
        x_size = x.shape[2:]
        x = self.patch_embed(x)
        for layer in self.layers:
            x = layer(x, x_size)
        return self.patch_unembed(self.norm(x), x_size)

    def forward(self, x: Tensor) -> Tensor:
        h, w = x.shape[2:]
        mean = self.mean.to(x)
        x = (F.pad(x, (0, -w % WINDOW, 0, -h % WINDOW), "reflect") - mean) * self.img_range
        y = self.conv_first(x)
        y = self.conv_after_body(self.forward_features(y)) + y
        y = self.conv_before_upsample(y) + self.edsr_body(self.edsr_head(x))
        y = self.conv_last(self.upsample(y)) / self.img_range + mean
        return y[:, :, : h * SCALE, : w * SCALE]


def scenes() -> tuple[Tensor, Tensor]:
    """Waves with an edge, at both sizes."""
    rows, columns = (torch.arange(SCALE * n) / (SCALE * n) for n in (HIGH, WIDE))
    a, b, c = 9 * torch.rand(3, PICTURES, 3, 1, 1)
    wave = 0.5 + 0.25 * torch.sin(a * rows[:, None] + b * columns + c)
    sharp = (wave + 0.2 * (rows[:, None] > columns * c[:, :1] / 5)).clamp(0, 1)
    return F.avg_pool2d(sharp, SCALE) + 0.02 * torch.randn(PICTURES, 3, HIGH, WIDE), sharp


def charbonnier(output: Tensor, target: Tensor) -> Tensor:
    """Of pictures, with an eps of 0.01."""
    return ((output - target).square() + 1e-4).sqrt().mean()
