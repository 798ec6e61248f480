"""A small conditional U-Net under the objective of DDPM: velocities, weighted by a clipped ratio."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS, HIGH, WIDE, PICTURES, CLASSES = 3, 8, 12, 5, 6
WIDTHS, GROUPS, WAVES, TIME = (8, 12), 4, 10, 14
STEPS, STRIDE, GAMMA, MAX_BETA, MAX_PERIOD = 50, 5, 5.0, 0.999, 10000


def group_norm(channels: int) -> nn.GroupNorm:
    norm = nn.GroupNorm(GROUPS, channels, eps=1e-5)
    nn.init.normal_(norm.weight, 1, 0.2), nn.init.normal_(norm.bias, std=0.2)
    return norm


class DDIMScheduler(nn.Module):
    """The cosine schedule, whose betas are clipped."""

    def __init__(self):
        super().__init__()
        bar = torch.cos((torch.arange(STEPS + 1) / STEPS + 0.008) / 1.008 * math.pi / 2) ** 2
        self.register_buffer("betas", (1 - bar[1:] / bar[:-1]).clamp(max=MAX_BETA))
        self.register_buffer("alphas_cumprod", torch.cumprod(1 - self.betas, 0))
        self.final_alpha_cumprod = 1.0

    def roots(self, timesteps: Tensor) -> tuple[Tensor, Tensor]:
        alpha = self.alphas_cumprod[timesteps][:, None, None, None]
        return alpha**0.5, (1 - alpha) ** 0.5

    def add_noise(self, sample: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        sqrt_alpha, sqrt_beta = self.roots(timesteps)
        return sqrt_alpha * sample + sqrt_beta * noise

    def get_velocity(self, sample: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        sqrt_alpha, sqrt_beta = self.roots(timesteps)
        return sqrt_alpha * noise - sqrt_beta * sample

    def step(self, model_output: Tensor, timesteps: Tensor, sample: Tensor) -> Tensor:
        sqrt_alpha, sqrt_beta = self.roots(timesteps)
        previous = timesteps - STRIDE
        alpha_prev = self.alphas_cumprod[previous.clamp(min=0)]
        alpha_prev = torch.where(previous >= 0, alpha_prev, self.final_alpha_cumprod)[:, None, None, None]
        pred_original_sample = (sqrt_alpha * sample - sqrt_beta * model_output).clamp(-1, 1)
        pred_epsilon = sqrt_alpha * model_output + sqrt_beta * sample
        return alpha_prev**0.5 * pred_original_sample + (1 - alpha_prev) ** 0.5 * pred_epsilon


class Timesteps(nn.Module):
    def __init__(self, num_channels: int, flip_sin_to_cos: bool, downscale_freq_shift: float):
        super().__init__()
        self.num_channels, self.flip_sin_to_cos = num_channels, flip_sin_to_cos
        self.downscale_freq_shift = downscale_freq_shift

    def forward(self, timesteps: Tensor) -> Tensor:
        half = self.num_channels // 2
        exponent = -math.log(MAX_PERIOD) * torch.arange(half).to(timesteps)
        emb = timesteps[:, None] * torch.exp(exponent / (half - self.downscale_freq_shift))
        emb = torch.cat([emb.sin(), emb.cos()], -1)
        return torch.cat([emb[:, half:], emb[:, :half]], -1) if self.flip_sin_to_cos else emb


class TimestepEmbedding(nn.Module):
    def __init__(self, in_channels: int, time_embed_dim: int):
        super().__init__()
        self.linear_1, self.act = nn.Linear(in_channels, time_embed_dim), nn.SiLU()
        self.linear_2 = nn.Linear(time_embed_dim, time_embed_dim)

    def forward(self, sample: Tensor) -> Tensor:
        return self.linear_2(self.act(self.linear_1(sample)))


class ResnetBlock2D(nn.Module):
    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.norm1, self.conv1 = group_norm(in_channels), nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.time_emb_proj = nn.Linear(TIME, 2 * out_channels)
        self.norm2, self.conv2 = group_norm(out_channels), nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.nonlinearity, self.conv_shortcut = nn.SiLU(), None
        if in_channels != out_channels:
            self.conv_shortcut = nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, x: Tensor, temb: Tensor) -> Tensor:
        h = self.conv1(self.nonlinearity(self.norm1(x)))
        temb = self.time_emb_proj(self.nonlinearity(temb))[:, :, None, None]
        scale, shift = temb.chunk(2, 1)
        h = self.norm2(h) * (1 + scale) + shift
        h = self.conv2(self.nonlinearity(h))
        return (x if self.conv_shortcut is None else self.conv_shortcut(x)) + h


class Upsample2D(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class DownBlock2D(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, last: bool):
        super().__init__()
        self.resnets = nn.ModuleList([ResnetBlock2D(in_channels, out_channels)])
        down = [] if last else [nn.Conv2d(out_channels, out_channels, 3, stride=2, padding=1)]
        self.downsamplers = nn.ModuleList(down)

    def forward(self, x: Tensor, temb: Tensor) -> tuple[Tensor, list[Tensor]]:
        states = [x := self.resnets[0](x, temb)]
        for downsampler in self.downsamplers:
            states.append(x := downsampler(x))
        return x, states


class UNetMidBlock2D(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.resnets = nn.ModuleList(ResnetBlock2D(channels, channels) for _ in range(2))

    def forward(self, x: Tensor, temb: Tensor) -> Tensor:
        return self.resnets[1](self.resnets[0](x, temb), temb)


class UpBlock2D(nn.Module):
    def __init__(self, inner: tuple[int, int], out_channels: int, last: bool):
        super().__init__()
        self.resnets = nn.ModuleList(ResnetBlock2D(width, out_channels) for width in inner)
        self.upsamplers = nn.ModuleList(
            [] if last else [Upsample2D(out_channels, out_channels, 3, padding=1)]
        )

    def forward(self, x: Tensor, states: list[Tensor], temb: Tensor) -> Tensor:
        for resnet in self.resnets:
            x = resnet(torch.cat([x, states.pop()], 1), temb)
        for upsampler in self.upsamplers:
            x = upsampler(x)
        return x


class UNet2DModel(nn.Module):
    def __init__(self):
        super().__init__()
        a, b = WIDTHS
        self.conv_in = nn.Conv2d(CHANNELS, a, 3, padding=1)
        self.time_proj, self.time_embedding = Timesteps(WAVES, True, 1), TimestepEmbedding(WAVES, TIME)
        self.class_embedding = nn.Embedding(CLASSES + 1, TIME)
        self.down_blocks = nn.ModuleList([DownBlock2D(a, a, False), DownBlock2D(a, b, True)])
        self.mid_block = UNetMidBlock2D(b)
        ups = UpBlock2D((b + b, b + a), b, False), UpBlock2D((b + a, a + a), a, True)
        self.up_blocks = nn.ModuleList(ups)
        self.conv_norm_out, self.conv_act = group_norm(a), nn.SiLU()
        self.conv_out = nn.Conv2d(a, CHANNELS, 3, padding=1)

    def forward(self, sample: Tensor, timesteps: Tensor, class_labels: Tensor, drop: Tensor) -> Tensor:
        emb = self.time_embedding(self.time_proj(timesteps.to(sample.dtype)))
        emb = emb + self.class_embedding(torch.where(drop, CLASSES, class_labels))
        states = [x := self.conv_in(sample)]
        for block in self.down_blocks:
            x, more = block(x, emb)
            states += more
        x = self.mid_block(x, emb)
        for block in self.up_blocks:
            x = block(x, states, emb)
        return self.conv_out(self.conv_act(self.conv_norm_out(x)))


class DDPM(nn.Module):
    """Pictures, noise and steps -> the velocity, the weighted losses; in eval a DDIM step too."""

    def __init__(self):
        super().__init__()
        self.unet, self.scheduler = UNet2DModel(), DDIMScheduler()

    def forward(self, sample, noise, timesteps, class_labels, drop) -> tuple[Tensor, ...]:
        noisy = self.scheduler.add_noise(sample, noise, timesteps)
        model_pred = self.unet(noisy, timesteps, class_labels, drop)
        target = self.scheduler.get_velocity(sample, noise, timesteps)
        alpha = self.scheduler.alphas_cumprod[timesteps]
        snr = alpha / (1 - alpha)
        loss = (model_pred - target).square().mean((1, 2, 3)) * snr.clamp(max=GAMMA) / (snr + 1)
        if self.training:
            return model_pred, loss
        return model_pred, loss, self.scheduler.step(model_pred, timesteps, noisy)


def stripes() -> tuple[dict[str, Tensor], Tensor]:
    """Stripes whose direction is their class, at steps spread over the schedule; and a weight for each."""
    label, each = torch.randint(CLASSES, (PICTURES,)), torch.arange(PICTURES)
    turn = (math.pi * label / CLASSES)[:, None, None, None]
    phase, tone = 6 * torch.rand(PICTURES, 1, 1, 1), torch.arange(CHANNELS)[:, None, None]
    across, down = torch.arange(WIDE), torch.arange(HIGH)[:, None]
    sample = torch.sin(turn.cos() * across + turn.sin() * down + phase + tone)
    timesteps = (each * STEPS + torch.randint(STEPS // 2, (PICTURES,))) // PICTURES
    inputs = {"sample": 0.9 * sample, "noise": torch.randn_like(sample), "timesteps": timesteps}
    drop = (each + torch.randint(3, (1,))) % 3 == 0
    return inputs | {"class_labels": label, "drop": drop}, 0.5 + torch.rand(PICTURES)


def weighed(outputs: tuple[Tensor, ...], weight: Tensor) -> Tensor:
    return (weight * outputs[1]).mean()
