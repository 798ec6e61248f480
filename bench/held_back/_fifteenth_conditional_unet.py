"""A small U-Net of latent diffusion: residual blocks that know the time, transformers that read a text."""

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LATENT, TEXT, WIDTHS, TIME, HEADS, GROUPS = 4, 10, (8, 12), 16, 2, 4


def varied(module: nn.Module) -> None:
    """Start with weights that let every layer, gain and shift count."""
    if isinstance(module, nn.GroupNorm | nn.LayerNorm):
        nn.init.uniform_(module.weight, 0.6, 1.4)
        nn.init.normal_(module.bias, std=0.2)
    elif isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
        if module.bias is not None:
            nn.init.normal_(module.bias, std=0.2)


class Timesteps(nn.Module):
    """Cosines, then sines, of the step at frequencies from 1 down towards 1 / 10000."""

    def __init__(self, num_channels: int):
        super().__init__()
        self.half = num_channels // 2

    def forward(self, timesteps: Tensor) -> Tensor:
        index = torch.arange(self.half, dtype=torch.float64, device=timesteps.device)
        angles = timesteps[:, None] * torch.exp(-math.log(10000) * index / self.half)
        return torch.cat([angles.cos(), angles.sin()], -1)


class ResnetBlock2D(nn.Module):
    """Two normalised convolutions, the projected time between them, and the input around them."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.norm1 = nn.GroupNorm(GROUPS, inputs, eps=1e-5)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time_emb_proj = nn.Linear(TIME, outputs)
        self.norm2 = nn.GroupNorm(GROUPS, outputs, eps=1e-5)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.nonlinearity = nn.SiLU()
        self.conv_shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else None

    def forward(self, x: Tensor, temb: Tensor) -> Tensor:
        h = self.conv1(self.nonlinearity(self.norm1(x)))
        h = h + self.time_emb_proj(self.nonlinearity(temb))[:, :, None, None]
        h = self.conv2(self.nonlinearity(self.norm2(h)))
        return h + (x if self.conv_shortcut is None else self.conv_shortcut(x))


class Attention(nn.Module):
    def __init__(self, query_dim: int, cross_attention_dim: int):
        super().__init__()
        self.to_q = nn.Linear(query_dim, query_dim, bias=False)
        self.to_k = nn.Linear(cross_attention_dim, query_dim, bias=False)
        self.to_v = nn.Linear(cross_attention_dim, query_dim, bias=False)
        self.to_out = nn.ModuleList([nn.Linear(query_dim, query_dim)])

    def forward(self, x: Tensor, encoder_hidden_states: Tensor | None = None) -> Tensor:
        source = x if encoder_hidden_states is None else encoder_hidden_states
        projected = (self.to_q(x), self.to_k(source), self.to_v(source))
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in projected)
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        return self.to_out[0]((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class GEGLU(nn.Module):
    def __init__(self, dim: int, inner: int):
        super().__init__()
        self.proj = nn.Linear(dim, 2 * inner)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.proj(x).chunk(2, -1)
        return value * F.gelu(gate)


class FeedForward(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.net = nn.Sequential(GEGLU(dim, 4 * dim), nn.Identity(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class BasicTransformerBlock(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(dim) for _ in range(3))
        self.attn1, self.attn2, self.ff = Attention(dim, dim), Attention(dim, TEXT), FeedForward(dim)

    def forward(self, x: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        x = self.attn1(self.norm1(x)) + x
        x = self.attn2(self.norm2(x), encoder_hidden_states) + x
        return self.ff(self.norm3(x)) + x


class Transformer2DModel(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.norm = nn.GroupNorm(GROUPS, channels, eps=1e-6)
        self.proj_in = nn.Conv2d(channels, channels, 1)
        self.transformer_blocks = nn.ModuleList([BasicTransformerBlock(channels)])
        self.proj_out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        tokens = self.proj_in(self.norm(x)).flatten(2).transpose(1, 2)
        tokens = self.transformer_blocks[0](tokens, encoder_hidden_states)
        return self.proj_out(tokens.transpose(1, 2).unflatten(2, x.shape[2:])) + x


class Resample2D(nn.Module):
    def __init__(self, channels: int, up: bool):
        super().__init__()
        self.conv, self.up = nn.Conv2d(channels, channels, 3, 1 if up else 2, 1), up

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest") if self.up else x)


class DownBlock2D(nn.Module):
    def __init__(self, inputs: int, outputs: int, attend: bool = False, down: bool = False):
        super().__init__()
        self.attentions = nn.ModuleList(Transformer2DModel(outputs) for _ in range(attend))
        self.resnets = nn.ModuleList([ResnetBlock2D(inputs, outputs)])
        self.downsamplers = nn.ModuleList(Resample2D(outputs, False) for _ in range(down))

    def forward(self, x: Tensor, temb: Tensor, text: Tensor) -> tuple[Tensor, ...]:
        x = self.resnets[0](x, temb)
        for attention in self.attentions:
            x = attention(x, text)
        return (x, *(downsampler(x) for downsampler in self.downsamplers))


class UNetMidBlock2DCrossAttn(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.attentions = nn.ModuleList([Transformer2DModel(width)])
        self.resnets = nn.ModuleList(ResnetBlock2D(width, width) for _ in range(2))

    def forward(self, x: Tensor, temb: Tensor, text: Tensor) -> Tensor:
        return self.resnets[1](self.attentions[0](self.resnets[0](x, temb), text), temb)


class UpBlock2D(nn.Module):
    def __init__(self, inputs: tuple[int, ...], outputs: int, attend: bool = False, up: bool = False):
        super().__init__()
        self.attentions = nn.ModuleList(Transformer2DModel(outputs) for _ in inputs if attend)
        self.resnets = nn.ModuleList(ResnetBlock2D(width, outputs) for width in inputs)
        self.upsamplers = nn.Sequential(*(Resample2D(outputs, True) for _ in range(up)))

    def forward(self, x: Tensor, states: tuple[Tensor, ...], temb: Tensor, text: Tensor) -> Tensor:
        for i, resnet in enumerate(self.resnets):
            x = resnet(torch.cat([x, states[-i - 1]], 1), temb)
            x = self.attentions[i](x, text) if self.attentions else x
        return self.upsamplers(x)


class UNet2DConditionModel(nn.Module):
    """Noisy latents [N, 4, H, W], time steps [N] and text states [N, T, C] -> the noise."""

    def __init__(self):
        super().__init__()
        a, b = WIDTHS
        self.conv_in, self.time_proj = nn.Conv2d(LATENT, a, 3, padding=1), Timesteps(a)
        layers = {"linear_1": nn.Linear(a, TIME), "act": nn.SiLU(), "linear_2": nn.Linear(TIME, TIME)}
        self.time_embedding = nn.Sequential(OrderedDict(layers))
        self.down_blocks = nn.ModuleList([DownBlock2D(a, a, attend=True, down=True), DownBlock2D(a, b)])
        self.mid_block = UNetMidBlock2DCrossAttn(b)
        ups = [UpBlock2D((2 * b, b + a), b, up=True), UpBlock2D((b + a, 2 * a), a, attend=True)]
        self.up_blocks = nn.ModuleList(ups)
        self.conv_norm_out, self.conv_act = nn.GroupNorm(GROUPS, a, eps=1e-5), nn.SiLU()
        self.conv_out = nn.Conv2d(a, LATENT, 3, padding=1)
        self.apply(varied)

    def forward(self, sample: Tensor, timesteps: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        temb = self.time_embedding(self.time_proj(timesteps).to(sample))
        states = (self.conv_in(sample),)
        for block in self.down_blocks:
            states += block(states[-1], temb, encoder_hidden_states)
        x = self.mid_block(states[-1], temb, encoder_hidden_states)
        for block in self.up_blocks:
            x, states = block(x, states[-2:], temb, encoder_hidden_states), states[:-2]
        return self.conv_out(self.conv_act(self.conv_norm_out(x)))


def noised() -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Smooth latents under as much noise as the step says, a text, and the noise."""
    latents = F.interpolate(torch.randn(2, LATENT, 3, 4), (6, 8), mode="bilinear")
    steps, noise = torch.randint(20, 980, (2,)), torch.randn(latents.shape)
    kept = torch.cos(steps / 1000 * math.pi / 2)[:, None, None, None]
    return (kept * latents + (1 - kept**2).sqrt() * noise, steps, torch.randn(2, 5, TEXT)), noise


def denoising(predicted: Tensor, noise: Tensor) -> Tensor:
    """The mean squared error of the noise."""
    return F.mse_loss(predicted, noise)
