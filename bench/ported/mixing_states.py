"""State spaces stepped through time against one product over it, a Fourier transform, states kept."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import case
from bench.cases._rewritten import SAME
from bench.optimizers import sgd
from bench.ported._mixing_shell import KERNEL, MIXERS, STATE, Trunk, diagonal, mamba
from bench.ported._text import dense, kept


class Selective(nn.Module):
    """Two projections in, the convolution as shifted products, the scan as one product with all decays."""

    def __init__(self, own: nn.Module, held: bool = False):
        super().__init__()
        into, gate = own.in_proj.weight.chunk(2)
        self.to_x, self.to_z, self.held = dense(into), dense(gate), held
        self.taps, self.tap_bias = kept(own.conv1d.weight[:, 0].T), kept(own.conv1d.bias)
        self.to_dt, self.to_b, self.to_c = (
            dense(w) for w in own.x_proj.weight.split([own.rank, STATE, STATE])
        )
        self.dt, self.dt_bias = kept(own.dt_proj.weight.T), kept(own.dt_proj.bias)
        self.a, self.skip, self.back = kept(own.A_log.T), kept(own.D), dense(own.out_proj.weight)

    def shifted(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 0, KERNEL - 1, 0))
        return (
            sum(tap * x[:, i : x.shape[1] - KERNEL + 1 + i] for i, tap in enumerate(self.taps))
            + self.tap_bias
        )

    def inputs(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The steps' exponents and what is added, [N, T, state, inner], and the read-out, [N, T, state]."""
        step = F.softplus(self.to_dt(h) @ self.dt + self.dt_bias)[:, :, None]
        rate = -self.a.exp()
        fed = torch.expm1(step * rate) / rate if self.held else step
        return step * rate, fed * self.to_b(h)[..., None] * h[:, :, None], self.to_c(h)

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.shifted(self.to_x(x)))
        exponent, fed, out = self.inputs(h)
        total = exponent.cumsum(1)
        span = total[:, :, None] - total[:, None]
        past = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()[:, :, None, None]
        left = torch.where(past, span, float("-inf")).exp()
        y = torch.einsum("btsni,bsni,btn->bti", left, fed, out) + self.skip * h
        return self.back(y * F.silu(self.to_z(x)))


class Streamed(Selective):
    """In eval mode one position at a time, the last inputs of the convolution and the state kept."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return super().forward(x)
        window = x.new_zeros(len(x), KERNEL, self.to_x.out_features)
        state, outputs = 0.0, []
        for token in x.split(1, 1):
            window = torch.cat([window[:, 1:], self.to_x(token)], 1)
            h = F.silu((window * self.taps).sum(1, keepdim=True) + self.tap_bias)
            exponent, fed, out = self.inputs(h)
            state = exponent.exp() * state + fed
            outputs.append(
                self.back(((state * out[..., None]).sum(2) + self.skip * h) * F.silu(self.to_z(token)))
            )
        return torch.cat(outputs, 1)


@case(SAME, "a scan as one product", mamba, optimizer=sgd(0.02))
def mamba_with_all_decays_at_once(model: nn.Module) -> nn.Module:
    return Trunk(model, Selective)


@case(SAME, "a state kept in eval", mamba, optimizer=sgd(0.02))
def mamba_streamed_when_it_answers(model: nn.Module) -> nn.Module:
    return Trunk(model, Streamed)


@case("bug", "discretisation", mamba, module=MIXERS, optimizer=sgd(0.02))
def mamba_with_the_input_held_too(model: nn.Module, wrong: bool = True) -> nn.Module:
    """The input is discretised by a zero-order hold, as in the paper; the original takes an Euler step."""
    return Trunk(model, lambda own: Selective(own, held=wrong))


class Fourier(nn.Module):
    """The oscillators' response as one kernel, convolved by a Fourier transform."""

    def __init__(self, own: nn.Module, padded: bool = True):
        super().__init__()
        self.dt, self.skip, self.padded = kept(own.log_step), kept(own.D), padded
        self.poles = nn.ParameterDict({"re": kept(own.log_damping), "im": kept(own.frequency)})
        self.c_re, self.c_im = kept(own.C[..., 0]), kept(own.C[..., 1])
        self.kernel, self.bias = kept(own.mix.weight.T), kept(own.mix.bias)

    def response(self, length: int) -> Tensor:
        a = torch.complex(-self.poles["re"].exp(), self.poles["im"])
        step, at = a * self.dt.exp()[:, None], torch.arange(length, device=a.device)
        weights = torch.complex(self.c_re, self.c_im) * torch.expm1(step) / a
        return 2 * torch.einsum("dn,dnt->dt", weights, torch.exp(step[..., None] * at)).real

    def forward(self, u: Tensor) -> Tensor:
        length = u.shape[1]
        size = 2 * length if self.padded else length
        spectrum = torch.fft.rfft(u, size, dim=1) * torch.fft.rfft(self.response(length), size, dim=1).T
        y = torch.fft.irfft(spectrum, size, dim=1)[:, :length]
        return F.gelu(y + self.skip * u) @ self.kernel + self.bias


@case(SAME, "a recurrence as a convolution", diagonal, optimizer=sgd(0.02))
def s4d_by_a_fourier_transform(model: nn.Module) -> nn.Module:
    return Trunk(model, Fourier)


@case("bug", "wrong padding", diagonal, module=MIXERS, optimizer=sgd(0.02))
def s4d_convolved_in_a_circle(model: nn.Module, wrong: bool = True) -> nn.Module:
    """The transform is as long as the sequence, so that its end runs into its start."""
    return Trunk(model, lambda own: Fourier(own, padded=not wrong))
