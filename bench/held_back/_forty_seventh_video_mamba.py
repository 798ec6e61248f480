"""A small VideoMamba: selective state spaces both ways over patches of frames, and one S4D layer between."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS, FRAMES, HIGH, WIDE, PATCH, GRID = 3, 4, 8, 15, (4, 5), 6
WIDTH, INNER, STATE, RANK, KERNEL, MODES, CLASSES, CLIPS = 22, 34, 5, 3, 4, 8, 7, 6


def about(mean: Tensor | float, *shape: int) -> nn.Parameter:
    return nn.Parameter(mean + 0.2 * torch.randn(shape))


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-5):
        super().__init__()
        self.eps, self.weight = eps, about(1.0, width)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class PatchEmbed(nn.Module):
    """[N, C, T, H, W] -> [N, T, patches, width]."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Conv3d(CHANNELS, WIDTH, (1, *PATCH), (1, *PATCH))

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(3).permute(0, 2, 3, 1)


def selective_scan(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor):  # noqa: N803
    """The recurrence over [N, D, L], with a skip, gated by z."""
    decay = torch.exp(torch.einsum("bdl,dn->bdln", delta, A))
    given = torch.einsum("bdl,bnl,bdl->bdln", delta, B, u)
    x, ys = torch.zeros_like(given[:, :, 0]), []
    for i in range(u.shape[2]):
        x = decay[:, :, i] * x + given[:, :, i]
        ys.append(torch.einsum("bdn,bn->bd", x, C[:, :, i]))
    return (torch.stack(ys, 2) + u * D[:, None]) * F.silu(z)


class Mamba(nn.Module):
    """The bidirectional mixer: shared projections in and out, and all else for each direction."""

    def __init__(self):
        super().__init__()
        self.in_proj = nn.Linear(WIDTH, 2 * INNER, bias=False)
        self.conv1d, self.x_proj, self.dt_proj, self.A_log, self.D = self.direction()
        self.conv1d_b, self.x_proj_b, self.dt_proj_b, self.A_b_log, self.D_b = self.direction()
        self.act = nn.SiLU()
        self.out_proj = nn.Linear(INNER, WIDTH, bias=False)

    def direction(self) -> tuple:
        conv = nn.Conv1d(INNER, INNER, KERNEL, groups=INNER, padding=KERNEL - 1)
        dt_proj, dt = nn.Linear(RANK, INNER), 0.05 * 10 ** torch.rand(INNER)
        dt_proj.bias.data = dt + torch.log(-torch.expm1(-dt))
        log = torch.arange(1.0, STATE + 1).log()
        x_proj = nn.Linear(INNER, RANK + 2 * STATE, bias=False)
        x_proj.weight.data.mul_(2)
        return conv, x_proj, dt_proj, about(log, INNER, STATE), about(1.0, INNER)

    def ssm(self, x: Tensor, z: Tensor, mask: Tensor, conv1d, x_proj, dt_proj, A_log, D) -> Tensor:  # noqa: N803
        x = self.act(conv1d(x)[..., : x.shape[2]]) * mask[:, None]
        x_dbl = x_proj(x.transpose(1, 2))
        dt, B, C = x_dbl.split([RANK, STATE, STATE], -1)  # noqa: N806
        dt = F.softplus(dt_proj(dt)).transpose(1, 2)
        return selective_scan(x, dt, -torch.exp(A_log), B.transpose(1, 2), C.transpose(1, 2), D, z)

    def forward(self, hidden_states: Tensor, mask: Tensor) -> Tensor:
        xz = self.in_proj(hidden_states * mask[..., None]).transpose(1, 2)
        x, z = xz.chunk(2, 1)
        one = self.conv1d, self.x_proj, self.dt_proj, self.A_log, self.D
        two = self.conv1d_b, self.x_proj_b, self.dt_proj_b, self.A_b_log, self.D_b
        out = self.ssm(x, z, mask, *one)
        out_b = self.ssm(x.flip(-1), z.flip(-1), mask.flip(-1), *two)
        return self.out_proj((out + out_b.flip(-1)).transpose(1, 2))


class S4DKernel(nn.Module):
    """The kernel of a diagonal state space, by zero-order hold."""

    def __init__(self):
        super().__init__()
        self.C = nn.Parameter(torch.randn(WIDTH, MODES, 2))
        self.log_dt = nn.Parameter(torch.rand(WIDTH) * math.log(10) + math.log(0.03))
        self.log_A_real = about(math.log(0.5), WIDTH, MODES)
        self.A_imag = about(math.pi * torch.arange(MODES), WIDTH, MODES)

    def forward(self, L: int) -> Tensor:  # noqa: N803
        dt, C = torch.exp(self.log_dt), torch.view_as_complex(self.C)  # noqa: N806
        A = -torch.exp(self.log_A_real) + 1j * self.A_imag  # noqa: N806
        dtA = A * dt[:, None]  # noqa: N806
        K = dtA[..., None] * torch.arange(L)  # noqa: N806
        C = C * (torch.exp(dtA) - 1.0) / A  # noqa: N806
        return 2 * torch.einsum("hn,hnl->hl", C, torch.exp(K)).real


class S4D(nn.Module):
    def __init__(self):
        super().__init__()
        self.D = about(1.0, WIDTH)
        self.kernel = S4DKernel()
        self.activation = nn.GELU()
        self.output_linear = nn.Sequential(nn.Conv1d(WIDTH, 2 * WIDTH, 1), nn.GLU(-2))

    def forward(self, hidden_states: Tensor, mask: Tensor) -> Tensor:
        u = (hidden_states * mask[..., None]).transpose(1, 2)
        L = u.shape[-1]  # noqa: N806
        k_f, u_f = torch.fft.rfft(self.kernel(L), n=2 * L), torch.fft.rfft(u, n=2 * L)
        y = torch.fft.irfft(u_f * k_f, n=2 * L)[..., :L] + u * self.D[:, None]
        return self.output_linear(self.activation(y)).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, mixer: nn.Module):
        super().__init__()
        self.norm, self.mixer = RMSNorm(WIDTH), mixer

    def forward(self, hidden_states: Tensor, residual: Tensor | None, mask: Tensor) -> tuple[Tensor, Tensor]:
        residual = hidden_states if residual is None else hidden_states + residual
        return self.mixer(self.norm(residual), mask), residual


class VideoMamba(nn.Module):
    """Clips [N, C, T, H, W] and which of their frames are there [N, T] -> logits."""

    def __init__(self):
        super().__init__()
        self.patch_embed = PatchEmbed()
        self.pos_embed = about(0.0, 1, GRID, WIDTH)
        self.temporal_pos_embedding = about(0.0, 1, FRAMES, WIDTH)
        self.layers = nn.ModuleList(Block(mixer()) for mixer in (Mamba, S4D, Mamba))
        self.norm_f = RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, video: Tensor, frames: Tensor) -> Tensor:
        x = self.patch_embed(video) + self.pos_embed[:, None]
        hidden_states = (x + self.temporal_pos_embedding[:, :, None]).flatten(1, 2)
        mask, residual = frames.repeat_interleave(GRID, 1).to(video), None
        for layer in self.layers:
            hidden_states, residual = layer(hidden_states, residual, mask)
        hidden_states = self.norm_f(hidden_states + residual)
        pooled = (hidden_states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return self.head(pooled)


def drifting() -> tuple[dict[str, Tensor], Tensor]:
    """Waves that drift by their class, of two to four frames, padded with zeros."""
    label = torch.randint(CLASSES, (CLIPS,))
    turn, phase = (math.tau * label / CLASSES)[:, None, None, None, None], 6 * torch.rand(CLIPS, 1, 1, 1, 1)
    time, tone = torch.arange(FRAMES)[:, None, None], torch.arange(CHANNELS)[:, None, None, None]
    across, down = torch.arange(WIDE) / 3, torch.arange(HIGH)[:, None] / 2
    wave = torch.sin(turn.cos() * (across - time) + turn.sin() * (down - time) + phase) + (turn + tone).cos()
    frames = torch.arange(FRAMES) < torch.randint(2, FRAMES + 1, (CLIPS, 1))
    video = (wave + 0.2 * torch.randn_like(wave)) * frames[:, None, :, None, None]
    return {"video": video, "frames": frames}, label


def third_of_cross_entropy(logits: Tensor, label: Tensor) -> Tensor:
    return F.cross_entropy(logits, label) / 3
