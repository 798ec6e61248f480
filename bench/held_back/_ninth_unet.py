"""A small conditional U-Net of latent diffusion: it predicts the noise in an image from a time and a text."""

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, GROUPS, HEADS, TEXT, SINES, TIME, IMAGE = 8, 4, 2, 6, 8, 12, 3


def lively(module: nn.Module) -> None:
    """Start with weights that keep the scale of what they read, and with shifts and gains of all sizes."""
    if isinstance(module, (nn.Linear, nn.Conv2d)):
        nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
    elif isinstance(module, (nn.GroupNorm, nn.LayerNorm)):
        nn.init.uniform_(module.weight, 0.6, 1.4)
    if getattr(module, "bias", None) is not None:
        nn.init.normal_(module.bias, std=0.2)


class Timesteps(nn.Module):
    def __init__(self, num_channels: int, downscale_freq_shift: float = 0):
        super().__init__()
        self.num_channels, self.downscale_freq_shift = num_channels, downscale_freq_shift

    def forward(self, timesteps: Tensor, dtype: torch.dtype) -> Tensor:
        half = self.num_channels // 2
        exponent = -math.log(10000) * torch.arange(half, dtype=dtype, device=timesteps.device)
        emb = timesteps[:, None].to(dtype) * (exponent / (half - self.downscale_freq_shift)).exp()
        return torch.cat([emb.cos(), emb.sin()], -1)


class ResnetBlock2D(nn.Module):
    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.norm1 = nn.GroupNorm(GROUPS, in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.time_emb_proj = nn.Linear(TIME, out_channels)
        self.norm2 = nn.GroupNorm(GROUPS, out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.nonlinearity = nn.SiLU()
        self.conv_shortcut = nn.Conv2d(in_channels, out_channels, 1) if in_channels != out_channels else None

    def forward(self, x: Tensor, temb: Tensor) -> Tensor:
        h = self.conv1(self.nonlinearity(self.norm1(x)))
        h = h + self.time_emb_proj(self.nonlinearity(temb))[:, :, None, None]
        h = self.conv2(self.nonlinearity(self.norm2(h)))
        return h + (x if self.conv_shortcut is None else self.conv_shortcut(x))


class Attention(nn.Module):
    def __init__(self, dim: int, cross_attention_dim: int | None = None, heads: int = HEADS):
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_k, self.to_v = (nn.Linear(cross_attention_dim or dim, dim, bias=False) for _ in range(2))
        self.to_out = nn.Sequential(nn.Linear(dim, dim), nn.Dropout(0.0))

    def forward(self, x: Tensor, encoder_hidden_states: Tensor | None = None) -> Tensor:
        context = x if encoder_hidden_states is None else encoder_hidden_states
        query, key, value = (
            h.unflatten(2, (self.heads, -1)).transpose(1, 2).flatten(0, 1)
            for h in (self.to_q(x), self.to_k(context), self.to_v(context))
        )
        probs = (torch.bmm(query, key.transpose(1, 2)) * self.scale).softmax(-1)
        return self.to_out(torch.bmm(probs, value).unflatten(0, (-1, self.heads)).transpose(1, 2).flatten(2))


class GEGLU(nn.Module):
    def __init__(self, dim_in: int, dim_out: int):
        super().__init__()
        self.proj = nn.Linear(dim_in, 2 * dim_out)

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.proj(x).chunk(2, dim=-1)
        return x * F.gelu(gate)


class FeedForward(nn.Module):
    def __init__(self, dim: int, mult: int = 2):
        super().__init__()
        self.net = nn.Sequential(GEGLU(dim, mult * dim), nn.Dropout(0.0), nn.Linear(mult * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class BasicTransformerBlock(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.norm1, self.attn1 = nn.LayerNorm(dim), Attention(dim)
        self.norm2, self.attn2 = nn.LayerNorm(dim), Attention(dim, TEXT)
        self.norm3, self.ff = nn.LayerNorm(dim), FeedForward(dim)

    def forward(self, x: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        x = x + self.attn1(self.norm1(x))
        x = x + self.attn2(self.norm2(x), encoder_hidden_states)
        return x + self.ff(self.norm3(x))


class Transformer2DModel(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.norm = nn.GroupNorm(GROUPS, channels, eps=1e-6)
        self.proj_in, self.proj_out = (nn.Conv2d(channels, channels, 1) for _ in range(2))
        self.transformer_blocks = nn.ModuleList([BasicTransformerBlock(channels)])

    def forward(self, x: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        h = self.proj_in(self.norm(x)).flatten(2).transpose(1, 2)
        h = self.transformer_blocks[0](h, encoder_hidden_states)
        return x + self.proj_out(h.transpose(1, 2).unflatten(2, x.shape[2:]))


class Resample2D(nn.Module):
    """Half the size by a stride, or twice the size by repeating pixels."""

    def __init__(self, channels: int, up: bool):
        super().__init__()
        self.up, self.conv = up, nn.Conv2d(channels, channels, 3, stride=1 if up else 2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest") if self.up else x)


class Block2D(nn.Module):
    def __init__(self, layers: int, reads: int, attentions: int, **samplers: bool):
        super().__init__()
        self.resnets = nn.ModuleList(ResnetBlock2D(reads, WIDTH) for _ in range(layers))
        self.attentions = nn.ModuleList(Transformer2DModel(WIDTH) for _ in range(attentions))
        for name, wanted in samplers.items():
            up = name == "upsamplers"
            setattr(self, name, nn.ModuleList([Resample2D(WIDTH, up)] if wanted else []))


class DownBlock2D(Block2D):
    def forward(self, h: Tensor, temb: Tensor, text: Tensor) -> list[Tensor]:
        outputs = []
        for i, resnet in enumerate(self.resnets):
            h = resnet(h, temb)
            h = self.attentions[i](h, text) if self.attentions else h
            outputs.append(h)
        return outputs + [downsampler(h) for downsampler in self.downsamplers]


class MidBlock2D(Block2D):
    def forward(self, h: Tensor, temb: Tensor, text: Tensor) -> Tensor:
        return self.resnets[1](self.attentions[0](self.resnets[0](h, temb), text), temb)


class UpBlock2D(Block2D):
    def forward(self, h: Tensor, skips: list[Tensor], temb: Tensor, text: Tensor) -> Tensor:
        for i, resnet in enumerate(self.resnets):
            h = resnet(torch.cat([h, skips.pop()], 1), temb)
            h = self.attentions[i](h, text) if self.attentions else h
        return self.upsamplers[0](h) if self.upsamplers else h


class UNet2DConditionModel(nn.Module):
    """Noisy images [N, 3, H, W], times [N] and texts [N, T, C] -> the noise [N, 3, H, W]."""

    def __init__(self):
        super().__init__()
        self.conv_in = nn.Conv2d(IMAGE, WIDTH, 3, padding=1)
        self.time_proj = Timesteps(SINES)
        lift, turn = nn.Linear(SINES, TIME), nn.Linear(TIME, TIME)
        self.time_embedding = nn.Sequential(OrderedDict(linear_1=lift, act=nn.SiLU(), linear_2=turn))
        downs = DownBlock2D(1, WIDTH, 1, downsamplers=True), DownBlock2D(1, WIDTH, 0, downsamplers=False)
        ups = UpBlock2D(2, 2 * WIDTH, 0, upsamplers=True), UpBlock2D(2, 2 * WIDTH, 2, upsamplers=False)
        self.down_blocks, self.mid_block = nn.ModuleList(downs), MidBlock2D(2, WIDTH, 1)
        self.up_blocks = nn.ModuleList(ups)
        self.conv_norm_out, self.conv_act = nn.GroupNorm(GROUPS, WIDTH), nn.SiLU()
        self.conv_out = nn.Conv2d(WIDTH, IMAGE, 3, padding=1)
        self.apply(lively)

    def forward(self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        temb, text = self.time_embedding(self.time_proj(timestep, sample.dtype)), encoder_hidden_states
        skips = [self.conv_in(sample)]
        for block in self.down_blocks:
            skips += block(skips[-1], temb, text)
        h = self.mid_block(skips[-1], temb, text)
        for block in self.up_blocks:
            h = block(h, skips, temb, text)
        return self.conv_out(self.conv_act(self.conv_norm_out(h)))


def noisy(count: int = 3, side: int = 8) -> tuple[dict[str, Tensor], Tensor]:
    """Smooth images whose colours and slopes a text tells, blurred by noise as much as a time says."""
    text, times = torch.randn(count, 5, TEXT), torch.randint(1000, (count,))
    told, ramp = text.sum(1).tanh(), torch.linspace(-1, 1, side)
    clean = told[:, :IMAGE, None, None] + told[:, IMAGE:, None, None] * (ramp[:, None] - ramp)
    noise, angle = torch.randn_like(clean), (times / 1000 * math.pi / 2)[:, None, None, None]
    sample = angle.cos() * clean + angle.sin() * noise
    return {"sample": sample, "timestep": times, "encoder_hidden_states": text}, noise


def missed(output: Tensor, noise: Tensor) -> Tensor:
    return F.mse_loss(output, noise.to(output))
