"""A small SegNeXt: three stages of multi-scale convolutional attention under a light Hamburger head."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PICTURES, CHANNELS, HIGH, WIDE, CLASSES, IGNORED = 2, 3, 34, 50, 5, 255
DIMS, DEPTHS, RATIOS, HAM, ALIGNED, BASES, GROUPS = (8, 12, 20), (2, 2, 1), (4, 3, 2), 24, 16, 6, 4


class Mlp(nn.Module):
    def __init__(self, in_features: int, hidden: int):
        super().__init__()
        self.fc1, self.fc2 = (nn.Conv2d(*x, 1) for x in ((in_features, hidden), (hidden, in_features)))
        self.dwconv, self.act = nn.Conv2d(hidden, hidden, 3, 1, 1, groups=hidden), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.dwconv(self.fc1(x))))


class StemConv(nn.Module):
    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        half, norm = out_channels // 2, nn.BatchNorm2d(out_channels)
        first = nn.Conv2d(in_channels, half, 3, 2, 1), nn.BatchNorm2d(half), nn.GELU()
        self.proj = nn.Sequential(*first, nn.Conv2d(half, out_channels, 3, 2, 1), norm)

    def forward(self, x: Tensor) -> tuple[Tensor, int, int]:
        x = self.proj(x)
        return x.flatten(2).transpose(1, 2), *x.shape[2:]


class OverlapPatchEmbed(nn.Module):
    def __init__(self, in_chans: int, embed_dim: int):
        super().__init__()
        self.proj, self.norm = nn.Conv2d(in_chans, embed_dim, 3, 2, 1), nn.BatchNorm2d(embed_dim)

    def forward(self, x: Tensor) -> tuple[Tensor, int, int]:
        x = self.norm(self.proj(x))
        return x.flatten(2).transpose(1, 2), *x.shape[2:]


class AttentionModule(nn.Module):
    """Strips of three lengths over a depthwise 5 x 5, summed and mixed, gate the input."""

    def __init__(self, dim: int):
        super().__init__()
        self.conv0 = nn.Conv2d(dim, dim, 5, padding=2, groups=dim)
        for i, k in enumerate((7, 11, 21)):
            across = nn.Conv2d(dim, dim, (1, k), padding=(0, k // 2), groups=dim)
            down = nn.Conv2d(dim, dim, (k, 1), padding=(k // 2, 0), groups=dim)
            setattr(self, f"conv{i}_1", across), setattr(self, f"conv{i}_2", down)
        self.conv3 = nn.Conv2d(dim, dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        u, attn = x, self.conv0(x)
        attn_0 = self.conv0_2(self.conv0_1(attn))
        attn_1 = self.conv1_2(self.conv1_1(attn))
        attn_2 = self.conv2_2(self.conv2_1(attn))
        return self.conv3(attn + attn_0 + attn_1 + attn_2) * u


class SpatialAttention(nn.Module):
    def __init__(self, d_model: int):
        super().__init__()
        self.proj_1, self.activation = nn.Conv2d(d_model, d_model, 1), nn.GELU()
        self.spatial_gating_unit = AttentionModule(d_model)
        self.proj_2 = nn.Conv2d(d_model, d_model, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj_2(self.spatial_gating_unit(self.activation(self.proj_1(x)))) + x


class Block(nn.Module):
    def __init__(self, dim: int, mlp_ratio: int):
        super().__init__()
        self.norm1, self.attn = nn.BatchNorm2d(dim), SpatialAttention(dim)
        self.norm2, self.mlp = nn.BatchNorm2d(dim), Mlp(dim, mlp_ratio * dim)
        self.layer_scale_1, self.layer_scale_2 = (nn.Parameter(0.6 + x) for x in 0.1 * torch.randn(2, dim))

    def forward(self, x: Tensor, h: int, w: int) -> Tensor:
        x = x.permute(0, 2, 1).unflatten(2, (h, w))
        x = x + self.layer_scale_1[:, None, None] * self.attn(self.norm1(x))
        x = x + self.layer_scale_2[:, None, None] * self.mlp(self.norm2(x))
        return x.flatten(2).permute(0, 2, 1)


class MSCAN(nn.Module):
    def __init__(self):
        super().__init__()
        for i, dim in enumerate(DIMS):
            embed = OverlapPatchEmbed(DIMS[i - 1], dim) if i else StemConv(CHANNELS, dim)
            setattr(self, f"patch_embed{i + 1}", embed)
            setattr(self, f"block{i + 1}", nn.ModuleList(Block(dim, RATIOS[i]) for _ in range(DEPTHS[i])))
            setattr(self, f"norm{i + 1}", nn.LayerNorm(dim))

    def forward(self, x: Tensor) -> list[Tensor]:
        outs = []
        for i in range(len(DIMS)):
            x, h, w = getattr(self, f"patch_embed{i + 1}")(x)
            for blk in getattr(self, f"block{i + 1}"):
                x = blk(x, h, w)
            x = getattr(self, f"norm{i + 1}")(x)
            outs.append(x := x.unflatten(1, (h, w)).permute(0, 3, 1, 2).contiguous())
        return outs


class ConvModule(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, norm: bool = True, act: bool = True):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 1, bias=not norm)
        self.gn = nn.GroupNorm(GROUPS, out_channels) if norm else nn.Identity()
        self.activate = nn.ReLU() if act else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.activate(self.gn(self.conv(x)))


class NMF2D(nn.Module):
    """A picture as a product of few bases and coefficients, by multiplicative updates from fixed bases."""

    def __init__(self):
        super().__init__()
        self.train_steps, self.eval_steps, self.inv_t = 3, 4, 1
        self.register_buffer("bases", F.normalize(torch.rand(1, HAM, BASES), dim=1))

    def local_inference(self, x: Tensor, bases: Tensor) -> tuple[Tensor, Tensor]:
        coef = F.softmax(self.inv_t * torch.bmm(x.transpose(1, 2), bases), dim=-1)
        for _ in range(self.train_steps if self.training else self.eval_steps):
            coef = self.compute_coef(x, bases, coef)
            bases = bases * x.bmm(coef) / (bases.bmm(coef.transpose(1, 2).bmm(coef)) + 1e-6)
        return bases, coef

    def compute_coef(self, x: Tensor, bases: Tensor, coef: Tensor) -> Tensor:
        denominator = coef.bmm(bases.transpose(1, 2).bmm(bases))
        return coef * torch.bmm(x.transpose(1, 2), bases) / (denominator + 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        shape, x = x.shape, x.flatten(2)
        bases, coef = self.local_inference(x, self.bases.repeat(len(x), 1, 1))
        return torch.bmm(bases, self.compute_coef(x, bases, coef).transpose(1, 2)).view(shape)


class Hamburger(nn.Module):
    def __init__(self):
        super().__init__()
        self.ham_in = ConvModule(HAM, HAM, norm=False, act=False)
        self.ham, self.ham_out = NMF2D(), ConvModule(HAM, HAM, act=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.ham_out(self.ham(F.relu(self.ham_in(x)))))


class LightHamHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.squeeze, self.hamburger = ConvModule(sum(DIMS), HAM), Hamburger()
        self.align, self.conv_seg = ConvModule(HAM, ALIGNED), nn.Conv2d(ALIGNED, CLASSES, 1)

    def forward(self, inputs: list[Tensor]) -> Tensor:
        inputs = [F.interpolate(x, inputs[0].shape[2:], mode="bilinear", align_corners=False) for x in inputs]
        x = self.hamburger(self.squeeze(torch.cat(inputs, 1)))
        return self.conv_seg(self.align(x))


class EncoderDecoder(nn.Module):
    """Pictures -> logits of the classes at a quarter of their size."""

    def __init__(self):
        super().__init__()
        self.backbone, self.decode_head = MSCAN(), LightHamHead()
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d | nn.LayerNorm | nn.GroupNorm):
                nn.init.normal_(module.weight, 1, 0.15), nn.init.normal_(module.bias, 0, 0.15)
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.2), module.running_var.uniform_(0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode_head(self.backbone(x))


def scenes() -> tuple[Tensor, Tensor]:
    """Rectangles over a ground, each of its class's colour and grain; the second picture is padded."""
    label = torch.randint(CLASSES, (PICTURES, 1, 1)).repeat(1, HIGH, WIDE)
    for picture in label:
        for _ in range(5):
            top, left = int(torch.randint(HIGH - 9, ())), int(torch.randint(WIDE - 12, ()))
            picture[top : top + 9 + top % 5, left : left + 12 + left % 7] = torch.randint(CLASSES, ())
    tone = torch.stack([torch.cos(label * (k + 1.3) + k) for k in range(CHANNELS)], 1)
    place = 0.4 * torch.arange(WIDE) + 0.3 * torch.arange(HIGH)[:, None]
    x = tone + 0.5 * torch.sin((label + 1) * place)[:, None] + 0.2 * torch.randn_like(tone)
    x[1, :, :, 43:], label[1, :, 43:] = 0, IGNORED
    return x, label


def by_pixel(logits: Tensor, label: Tensor) -> Tensor:
    """A quarter of the cross entropy of the logits at the label's size."""
    logits = F.interpolate(logits, size=label.shape[1:], mode="bilinear", align_corners=False)
    return F.cross_entropy(logits, label, ignore_index=IGNORED) / 4
