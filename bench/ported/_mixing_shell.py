"""A network around mixers of a sequence, as a reference and as a port; the reference's mixers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.ported._text import chosen, dense, kept, text_task
from bench.tasks import Task

WIDTH, HEADS, STATE, KERNEL, LENGTH = 16, 2, 4, 3, 12


class Layer(nn.Module):
    def __init__(self, mixer: nn.Module):
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(WIDTH), mixer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer(self.norm(x))


class Shell(nn.Module):
    """[N, T, 6] -> logits [N, 3], from the mean over time."""

    def __init__(self, mixer: Callable[[], nn.Module]):
        super().__init__()
        self.embeddings = nn.Linear(6, WIDTH)
        self.layers = nn.ModuleList(Layer(mixer()) for _ in range(2))
        self.norm_f, self.classifier = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.embeddings(x)
        for layer in self.layers:
            x = layer(x)
        return {"logits": self.classifier(self.norm_f(x).mean(1)), "last": x}


class Trunk(nn.Module):
    """The same with the norms' weights in one stack, and with the port's mixers."""

    def __init__(self, model: Shell, mixer: Callable[[nn.Module], nn.Module]):
        super().__init__()
        norms = [*(layer.norm for layer in model.layers), model.norm_f]
        self.gains = kept(torch.stack([norm.weight for norm in norms]))
        self.shifts = kept(torch.stack([norm.bias for norm in norms]))
        self.stem, self.readout = (
            dense(old.weight, old.bias) for old in (model.embeddings, model.classifier)
        )
        self.seq = nn.ModuleList(mixer(layer.mixer) for layer in model.layers)

    def normed(self, x: Tensor, i: int) -> Tensor:
        return F.layer_norm(x, (WIDTH,), self.gains[i], self.shifts[i])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i, mixer in enumerate(self.seq):
            x = x + mixer(self.normed(x, i))
        return self.readout(self.normed(x, -1).mean(1))


class MambaMixer(nn.Module):
    """Selective state space, stepped through time."""

    def __init__(self):
        super().__init__()
        inner, self.rank = 2 * WIDTH, 2
        self.in_proj = nn.Linear(WIDTH, 2 * inner, bias=False)
        self.conv1d = nn.Conv1d(inner, inner, KERNEL, groups=inner, padding=KERNEL - 1)
        self.x_proj = nn.Linear(inner, self.rank + 2 * STATE, bias=False)
        self.dt_proj = nn.Linear(self.rank, inner)
        self.A_log = nn.Parameter(torch.log(torch.arange(1.0, STATE + 1)).repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h, gate = self.in_proj(x).transpose(1, 2).chunk(2, 1)
        h = F.silu(self.conv1d(h)[..., : x.shape[1]])
        step, b, c = self.x_proj(h.transpose(1, 2)).split([self.rank, STATE, STATE], -1)
        step = F.softplus(self.dt_proj(step)).transpose(1, 2)
        decay = torch.exp(step[..., None] * -torch.exp(self.A_log)[:, None])
        fed = step[..., None] * b[:, None] * h[..., None]
        state, seen = torch.zeros_like(fed[:, :, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, :, t] * state + fed[:, :, t]
            seen.append((state * c[:, None, t]).sum(-1))
        y = torch.stack(seen, -1) + h * self.D[:, None]
        return self.out_proj((y * F.silu(gate)).transpose(1, 2))


def decays(like: Tensor) -> Tensor:
    """A head's rate of forgetting, [heads]."""
    return 1 - 2.0 ** (-2 - torch.arange(HEADS, dtype=like.dtype, device=like.device))


class Retention(nn.Module):
    """Decaying attention without a softmax, all positions at once."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.g_proj, self.out_proj = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(5)
        )
        self.group_norm = nn.GroupNorm(HEADS, WIDTH, eps=1e-2, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        at = torch.arange(x.shape[1], device=x.device)
        ago = at[:, None] - at
        kept_share = torch.where(ago >= 0, decays(x)[:, None, None] ** ago.clamp(min=0), 0.0)
        y = (q @ k.transpose(2, 3) / (WIDTH // HEADS) ** 0.5 * kept_share) @ v
        y = self.group_norm(y.transpose(1, 2).flatten(2).flatten(0, 1)).view_as(x)
        return self.out_proj(F.silu(self.g_proj(x)) * y)


class LinearAttention(nn.Module):
    """Causal, with elu + 1, by running sums."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)) for layer in (self.query, self.key, self.value))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        states = (k[..., :, None] * v[..., None, :]).cumsum(1)
        total = (q * k.cumsum(1)).sum(-1, keepdim=True) + 1e-6
        return self.out_proj(((q[..., None, :] @ states)[..., 0, :] / total).flatten(2))


class DiagonalSSM(nn.Module):
    """S4D: a bank of damped oscillators a channel, stepped through time."""

    def __init__(self):
        super().__init__()
        self.log_step = nn.Parameter(torch.full((WIDTH,), -1.5) + 0.3 * torch.randn(WIDTH))
        self.log_damping = nn.Parameter(torch.log(torch.full((WIDTH, STATE), 0.5)))
        self.frequency = nn.Parameter(torch.arange(STATE).float().repeat(WIDTH, 1))
        self.C = nn.Parameter(torch.randn(WIDTH, STATE, 2) * 0.5)
        self.D, self.mix = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, u: Tensor) -> Tensor:
        a = torch.complex(-self.log_damping.exp(), self.frequency)
        turn = torch.exp(a * self.log_step.exp()[:, None])
        fed = (turn - 1) / a
        state, seen = torch.zeros(len(u), *turn.shape, dtype=turn.dtype, device=u.device), []
        for t in range(u.shape[1]):
            state = turn * state + fed * u[:, t, :, None]
            seen.append(2 * (torch.view_as_complex(self.C) * state).sum(-1).real)
        return self.mix(F.gelu(torch.stack(seen, 1) + self.D * u))


def _series() -> tuple[Tensor, Tensor]:
    return torch.randn(6, LENGTH, 6), torch.randint(3, (6,))


def shell_task(name: str, mixer: Callable[[], nn.Module]) -> Task:
    return text_task(name, lambda: Shell(mixer), _series, chosen)


mamba = shell_task("mamba_small", MambaMixer)
retention = shell_task("retention_small", Retention)
linear_attention = shell_task("linear_attention_small", LinearAttention)
diagonal = shell_task("s4d_small", DiagonalSSM)
MIXERS = ("layers.0.mixer", "layers.1.mixer")
