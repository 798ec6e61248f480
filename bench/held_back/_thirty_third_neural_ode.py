"""A small latent ODE for irregular series: a GRU run backwards, an ODE between the times, a decoder."""

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIMS, LATENT, REC_DIMS, GRU_UNITS, Z0_UNITS, DECODER_UNITS = 3, 10, 14, 44, 36, 26
ODE_UNITS, OBSRV_STD, SERIES, TIMES = (48, 40), 0.3, 5, 9


def split_last_dim(data: Tensor) -> tuple[Tensor, Tensor]:
    return data.chunk(2, -1)


class GRU_unit(nn.Module):  # noqa: N801
    """A cell with nets for gates, of a state and its deviation; rows without an observation keep theirs."""

    def __init__(self, latent_dim: int, input_dim: int, n_units: int):
        super().__init__()
        width = 2 * latent_dim + input_dim
        first, last = (width, n_units), (n_units, latent_dim)
        self.update_gate = nn.Sequential(nn.Linear(*first), nn.Tanh(), nn.Linear(*last), nn.Sigmoid())
        self.reset_gate = nn.Sequential(nn.Linear(*first), nn.Tanh(), nn.Linear(*last), nn.Sigmoid())
        self.new_state_net = nn.Sequential(nn.Linear(*first), nn.Tanh(), nn.Linear(n_units, 2 * latent_dim))

    def forward(self, y_mean: Tensor, y_std: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        y_concat = torch.cat([y_mean, y_std, x], -1)
        update_gate = self.update_gate(y_concat)
        reset_gate = self.reset_gate(y_concat)
        concat = torch.cat([y_mean * reset_gate, y_std * reset_gate, x], -1)
        new_state, new_state_std = split_last_dim(self.new_state_net(concat))
        new_state_std = new_state_std.abs()
        new_y = (1 - update_gate) * new_state + update_gate * y_mean
        new_y_std = (1 - update_gate) * new_state_std + update_gate * y_std
        mask = (x[:, -DIMS:].sum(-1, keepdim=True) > 0).to(x)
        return mask * new_y + (1 - mask) * y_mean, mask * new_y_std + (1 - mask) * y_std


class Encoder_z0_RNN(nn.Module):  # noqa: N801
    """Reads gaps, values and masks from the last time to the first."""

    def __init__(self):
        super().__init__()
        self.gru_rnn = GRU_unit(REC_DIMS, 2 * DIMS + 1, GRU_UNITS)
        ends = nn.Linear(2 * REC_DIMS, Z0_UNITS), nn.Linear(Z0_UNITS, 2 * LATENT)
        self.hiddens_to_z0 = nn.Sequential(ends[0], nn.Tanh(), ends[1])

    def forward(self, data: Tensor, time_steps: Tensor) -> tuple[Tensor, Tensor]:
        """[N, T, 2 D] and [N, T] -> the mean and the log-variance of the first state."""
        data, delta_ts = data.flip(1), (time_steps[:, 1:] - time_steps[:, :-1]).flip(1)
        delta_ts = torch.cat([delta_ts, torch.zeros_like(delta_ts[:, :1])], 1)
        data = torch.cat([delta_ts[..., None], data], -1)
        y = std = data.new_zeros(len(data), REC_DIMS)
        for i in range(data.shape[1]):
            y, std = self.gru_rnn(y, std, data[:, i])
        return split_last_dim(self.hiddens_to_z0(torch.cat([y, std], -1)))


class ConcatSquashLinear(nn.Module):
    def __init__(self, dim_in: int, dim_out: int):
        super().__init__()
        self._layer = nn.Linear(dim_in, dim_out)
        self._hyper_bias = nn.Linear(1, dim_out, bias=False)
        self._hyper_gate = nn.Linear(1, dim_out)

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        return self._layer(x) * torch.sigmoid(self._hyper_gate(t)) + self._hyper_bias(t)


class ODEnet(nn.Module):
    def __init__(self):
        super().__init__()
        widths = (LATENT, *ODE_UNITS, LATENT)
        self.layers = nn.ModuleList(map(ConcatSquashLinear, widths[:-1], widths[1:]))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        dx = y
        for i, layer in enumerate(self.layers):
            dx = layer(t, dx)
            if i < len(self.layers) - 1:
                dx = torch.tanh(dx)
        return dx


class ODEFunc(nn.Module):
    def __init__(self):
        super().__init__()
        self.gradient_net = ODEnet()

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.gradient_net(t, y)


class DiffeqSolver(nn.Module):
    """Steps of the 3/8 rule from each time to the next."""

    def __init__(self):
        super().__init__()
        self.ode_func = ODEFunc()

    def forward(self, first_point: Tensor, time_steps: Tensor) -> Tensor:
        y, solution, times = first_point, [first_point], time_steps[..., None].unbind(1)
        for t0, t1 in pairwise(times):
            dt = t1 - t0
            k1 = self.ode_func(t0, y)
            k2 = self.ode_func(t0 + dt / 3, y + dt * k1 / 3)
            k3 = self.ode_func(t0 + dt * 2 / 3, y + dt * (k2 - k1 / 3))
            k4 = self.ode_func(t1, y + dt * (k1 - k2 + k3))
            y = y + (k1 + 3 * (k2 + k3) + k4) * dt * 0.125
            solution.append(y)
        return torch.stack(solution, 1)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        ends = nn.Linear(LATENT, DECODER_UNITS), nn.Linear(DECODER_UNITS, DIMS)
        self.decoder = nn.Sequential(ends[0], nn.Tanh(), ends[1])

    def forward(self, data: Tensor) -> Tensor:
        return self.decoder(data)


class LatentODE(nn.Module):
    """Values, masks and times of series -> predictions, divergence and the negative bound of each."""

    def __init__(self):
        super().__init__()
        self.encoder_z0, self.diffeq_solver, self.decoder = Encoder_z0_RNN(), DiffeqSolver(), Decoder()
        self.obsrv_std = OBSRV_STD

    def get_gaussian_likelihood(self, truth: Tensor, pred_y: Tensor, mask: Tensor) -> Tensor:
        """The mean over what was observed of each dimension, then over the dimensions."""
        log_std = math.log(self.obsrv_std) + 0.5 * math.log(2 * math.pi)
        log_density = -0.5 * ((truth - pred_y) / self.obsrv_std) ** 2 - log_std
        return ((log_density * mask).sum(1) / mask.sum(1)).mean(-1)

    def forward(
        self, data: Tensor, mask: Tensor, time_steps: Tensor, noise: Tensor, coef: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        mask = mask.to(data)
        mean, logvar = self.encoder_z0(torch.cat([data, mask], -1), time_steps)
        z0 = mean + noise * torch.exp(0.5 * logvar)
        pred_y = self.decoder(self.diffeq_solver(z0, time_steps))
        rec_likelihood = self.get_gaussian_likelihood(data, pred_y, mask)
        kl = -0.5 * (1 + logvar - mean**2 - logvar.exp()).mean(-1)
        return pred_y, kl, coef * kl - rec_likelihood


def spirals() -> tuple[dict[str, Tensor], Tensor]:
    """Damped waves at uneven times, seen here and there and not after the end of each series."""
    times = torch.cumsum(0.05 + 0.25 * torch.rand(TIMES), 0).repeat(SERIES, 1)
    phase, speed = math.tau * torch.rand(SERIES, 1, 1), 2 + torch.rand(SERIES, 1, 1)
    truth = torch.sin(speed * times[..., None] + phase + torch.arange(DIMS)) * torch.exp(
        -times[..., None] / 2
    )
    mask = torch.rand(SERIES, TIMES, DIMS) < 0.6
    ends = torch.randint(TIMES - 3, TIMES + 1, (SERIES,))
    mask &= (torch.arange(TIMES) < ends[:, None])[..., None]
    mask[:, 0], mask[:, 2] = True, False
    inputs = {"data": (truth + 0.05 * torch.randn_like(truth)) * mask, "mask": mask, "time_steps": times}
    return inputs | {"noise": torch.randn(SERIES, LATENT), "coef": torch.rand(1).repeat(SERIES)}, truth


def bound_and_error(outputs: tuple[Tensor, Tensor, Tensor], truth: Tensor) -> Tensor:
    """An eighth of the negative bound, and a tenth of the error at all times."""
    return outputs[2].mean() / 8 + 0.1 * F.mse_loss(outputs[0], truth)
