"""Three mixers: a diagonal state space, the delta rule, attention with a memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._first_shared import later, leaf, pile
from bench.held_back._first_shell import W, shell
from bench.held_back._third_ports import BACK, faults, only

KEPT = 4


class Diagonal(nn.Module):
    """S4D: three conjugate pairs of modes a channel, held inputs, a kernel applied by spectra."""

    def __init__(self):
        super().__init__()
        self.log_dt, self.d = nn.Parameter(torch.rand(W) - 1.5), nn.Parameter(torch.randn(W))
        self.log_decay, self.c = nn.Parameter(torch.randn(W, 3) / 4), nn.Parameter(torch.randn(W, 3, 2) / 2)
        self.pitch, self.out = nn.Parameter(torch.rand(W, 3) * 4), nn.Linear(W, 2 * W)

    def forward(self, x: Tensor) -> Tensor:
        t, a = x.shape[1], torch.complex(-self.log_decay.exp(), self.pitch)
        power = a * self.log_dt.exp()[:, None]
        c = torch.view_as_complex(self.c) * torch.expm1(power) / a
        steps = torch.arange(t, device=x.device)
        kernel = 2 * torch.einsum("wm,wmt->wt", c, torch.exp(power[..., None] * steps)).real
        y = torch.fft.irfft(torch.fft.rfft(x.mT, 2 * t) * torch.fft.rfft(kernel, 2 * t), 2 * t)[..., :t].mT
        return F.glu(self.out(F.gelu(y + x * self.d)), 2)


class Stepped(nn.Module):
    """The same in real numbers, a step at a time, time first."""

    def __init__(self, m: Diagonal, wrong: str):
        super().__init__()
        self.wrong, self.out, self.rates = wrong, m.out, pile([m.log_decay.T, m.pitch.T])
        self.dt, self.skip, self.mix = leaf(m.log_dt), leaf(m.d), leaf(m.c.permute(2, 1, 0))

    def forward(self, x: Tensor) -> Tensor:
        dt, re, im = self.dt.exp(), -self.rates[0].exp(), self.rates[1]
        size, angle = torch.exp(re * dt), im * dt
        keep = torch.stack([size * angle.cos(), size * angle.sin()])
        if self.wrong == "bilinear_rule_for_the_held_input":
            below = (1 - re * dt / 2) ** 2 + (angle / 2) ** 2
            keep = torch.stack([1 - (re**2 + im**2) * (dt / 2) ** 2, angle]) / below
        ends = keep
        if self.wrong == "step_size_does_not_teach_the_input":
            held = dt.detach()
            ends = torch.exp(re * held) * torch.stack([(im * held).cos(), (im * held).sin()])
        up, across = ends[0] - 1, ends[1]
        gain = torch.stack([up * re + across * im, across * re - up * im]) / (re**2 + im**2)
        a, b = torch.zeros_like(x[0])[:, None], torch.zeros_like(x[0])[:, None]
        outputs = []
        for u in x:
            read = (a, b)
            a, b = a * keep[0] - b * keep[1] + u[:, None], a * keep[1] + b * keep[0]
            p, q = read if self.wrong == "state_read_before_its_input" else (a, b)
            real, imaginary = gain[0] * p - gain[1] * q, gain[0] * q + gain[1] * p
            y = (self.mix[0] * real - self.mix[1] * imaginary).sum(1)
            outputs.append((1 if self.wrong == "conjugate_modes_forgotten" else 2) * y + u * self.skip)
        value, gate = self.out(F.gelu(torch.stack(outputs))).chunk(2, 2)
        return value * gate.sigmoid()


class Delta(nn.Module):
    """The delta rule: each step corrects what the state answers to its key."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(W, W, bias=False) for _ in range(4))
        self.rate, self.norm = nn.Linear(W, 2), nn.RMSNorm(8, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(2, (2, 8)) for f in (self.q, self.k, self.v))
        q, k, rate = F.normalize(q, dim=3), F.normalize(k, dim=3), 2 * self.rate(x).sigmoid()[..., None]
        state, mixed = x.new_zeros(len(x), 2, 8, 8), []
        for t in range(x.shape[1]):
            error = v[:, t] - torch.einsum("nhvk,nhk->nhv", state, k[:, t])
            state = state + (rate[:, t] * error)[..., None] * k[:, t, :, None]
            mixed.append(torch.einsum("nhvk,nhk->nhv", state, q[:, t]))
        return self.out(self.norm(torch.stack(mixed, 1)).flatten(2))


class Solved(nn.Module):
    """All corrections at once from a triangular system."""

    def __init__(self, m: Delta, wrong: str):
        super().__init__()
        self.wrong, self.qkv = wrong, leaf(torch.stack([f.weight.view(2, 8, W) for f in (m.q, m.k, m.v)], 1))
        self.rate, self.rate_bias = leaf(m.rate.weight.T), leaf(m.rate.bias[:, None, None])
        self.scale, self.out = leaf(m.norm.weight), leaf(m.out.weight.view(W, 2, 8))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = torch.einsum("ntd,hced->cnhte", x, self.qkv)
        rate = 2 * torch.sigmoid((x @ self.rate).mT[..., None] + self.rate_bias)
        q = q / q.norm(dim=3, keepdim=True)
        k = k if self.wrong == "keys_not_of_unit_length" else k / k.norm(dim=3, keepdim=True)
        known = k.detach() if self.wrong == "corrections_do_not_teach_the_keys" else k
        first = 0 if self.wrong == "correction_counts_its_own_key" else -1
        system = (rate * (known @ known.mT)).tril(first)
        system = system + torch.eye(x.shape[1], device=x.device, dtype=x.dtype)
        target = v if self.wrong == "rate_for_the_correction_alone" else rate * v
        written = torch.linalg.solve_triangular(system, target, upper=False)
        seen = (q @ k.mT).tril(-1 if self.wrong == "queries_miss_the_last_write" else 0)
        mixed = seen @ written
        mixed = mixed * (mixed.square().mean(3, keepdim=True) + 1e-5).rsqrt() * self.scale
        return torch.einsum("nhte,dhe->ntd", mixed, self.out)


class Recalling(nn.Module):
    """Transformer-XL's attention: the last batch's last steps come first, places count by distance."""

    def __init__(self):
        super().__init__()
        self.q, self.kv = nn.Linear(W, W, bias=False), nn.Linear(W, 2 * W, bias=False)
        self.far, self.out = nn.Linear(W, W, bias=False), nn.Linear(W, W, bias=False)
        self.u, self.v = nn.Parameter(torch.randn(2, 1, 8)), nn.Parameter(torch.randn(2, 1, 8))
        self.register_buffer("memory", torch.zeros(6, KEPT, W))

    def forward(self, x: Tensor) -> Tensor:
        t, s = x.shape[1], x.shape[1] + KEPT
        whole = torch.cat([self.memory, x], 1)
        if self.training:
            self.memory.copy_(x[:, -KEPT:].detach())
        q = self.q(x).unflatten(2, (2, 8)).transpose(1, 2)
        k, v = self.kv(whole).unflatten(2, (2, 2, 8)).permute(2, 0, 3, 1, 4)
        angles = torch.arange(s - 1, -1, -1, device=x.device)[:, None] * x.new_tensor([1, 0.5, 0.2, 0.1] * 2)
        far = self.far(torch.cat([angles.sin(), angles.cos()], 1)).view(s, 2, 8).transpose(0, 1)
        places = F.pad((q + self.v) @ far.mT, (1, 0)).view(len(x), 2, s + 1, t)[:, :, 1:].reshape(-1, 2, t, s)
        scores = ((q + self.u) @ k.mT + places) * 8**-0.5
        hidden = later(s, x.device)[KEPT:]
        return self.out((scores.masked_fill(hidden, -torch.inf).softmax(3) @ v).transpose(1, 2).flatten(2))


class Gathered(nn.Module):
    """Places looked up by distance; one matrix for all that goes in."""

    def __init__(self, m: Recalling, wrong: str):
        super().__init__()
        self.wrong, self.enter = wrong, leaf(torch.cat([m.q.weight, m.kv.weight]).view(3, 2, 8, W))
        self.far, self.leave = leaf(m.far.weight.view(2, 8, W)), leaf(m.out.weight.T)
        self.own = pile([m.u, m.v])
        self.register_buffer("past", m.memory.clone())

    def forward(self, x: Tensor) -> Tensor:
        s = x.shape[1] + KEPT
        q, k, v = torch.einsum("nsd,ched->cnhse", torch.cat([self.past, x], 1), self.enter)
        q, t = q[:, :, KEPT:], torch.arange(s, device=x.device)
        if self.training:
            first = self.wrong == "memory_keeps_the_first_steps"
            self.past = (x[:, :KEPT] if first else x[:, -KEPT:]).detach().clone()
        ago = t[KEPT:, None] - t
        angles = torch.outer(t.to(x.dtype), x.new_tensor([1, 0.5, 0.2, 0.1] * 2))
        waves = torch.einsum("sd,hed->hse", torch.stack([angles.sin(), angles.cos()], 1).flatten(1), self.far)
        u, shift = self.own.flip(0) if self.wrong == "the_two_biases_exchanged" else self.own
        looked = (ago - int(self.wrong == "distances_a_step_short")).clamp(0, s - 1)
        places = torch.einsum("nhte,htse->nhts", q + shift, waves[:, looked])
        scores = torch.einsum("nhte,nhse->nhts", q + u, k) / 8**0.5
        scores = scores + places / (1 if self.wrong == "places_not_scaled" else 8**0.5)
        seen = ago > 0 if self.wrong == "tokens_do_not_see_themselves" else ago >= 0
        weights = scores.where(seen, -torch.inf).softmax(3)
        return torch.einsum("nhts,nhse->nthe", weights, v).flatten(2) @ self.leave


FIRST, SECOND = "layers.0.mixer", "layers.1.mixer"
faults(
    shell("third_diagonal", Diagonal),
    only(1, Stepped, True),
    bilinear_rule_for_the_held_input=(SECOND,),
    state_read_before_its_input=(SECOND,),
    conjugate_modes_forgotten=(SECOND,),
    step_size_does_not_teach_the_input=(SECOND, "weight gradient"),
)
faults(
    shell("third_delta", Delta),
    only(0, Solved),
    keys_not_of_unit_length=(FIRST,),
    correction_counts_its_own_key=(FIRST,),
    rate_for_the_correction_alone=(FIRST,),
    queries_miss_the_last_write=(FIRST,),
    corrections_do_not_teach_the_keys=(FIRST, *BACK),
)
faults(
    shell("third_memory", Recalling),
    only(1, Gathered),
    the_two_biases_exchanged=(SECOND,),
    distances_a_step_short=(SECOND,),
    places_not_scaled=(SECOND,),
    tokens_do_not_see_themselves=(SECOND,),
    memory_keeps_the_first_steps=(SECOND, "buffer"),
)
