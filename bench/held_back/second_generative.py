"""Generative networks: a variational autoencoder, a flow, a diffusion step."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._second_pairs import Port, leaf, pair, squares
from bench.tasks import _task


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(1, 8, 4, 2, 1), nn.ReLU(), nn.Flatten())
        self.mean, self.logvar = nn.Linear(128, 6), nn.Linear(128, 6)
        self.widen, self.decode = nn.Linear(6, 128), nn.ConvTranspose2d(8, 1, 4, 2, 1)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
        h = self.encode(x)
        mean, logvar = self.mean(h), self.logvar(h)
        z = mean + noise * torch.exp(0.5 * logvar)
        return self.decode(F.relu(self.widen(z)).unflatten(1, (8, 4, 4))), mean, logvar


class FusedVAE(Port):
    """One head for both statistics, a dict for a tuple; the fault: no noise in eval mode."""

    def take(self, model: VAE) -> None:
        self.look = model.encode[0]
        self.statistics = leaf(torch.stack([model.mean.weight, model.logvar.weight], 2))
        self.centers = leaf(torch.stack([model.mean.bias, model.logvar.bias], 1))
        self.paint = nn.Sequential(model.widen, nn.ReLU(), nn.Unflatten(1, (8, 4, 4)), model.decode)

    def forward(self, x: Tensor, noise: Tensor) -> dict[str, Tensor]:
        h = self.look(x).relu().flatten(1)
        mean, logvar = (torch.einsum("ni,ois->nos", h, self.statistics) + self.centers).unbind(2)
        silent = self.fault and not self.training
        z = mean if silent else torch.addcmul(mean, noise, (logvar / 2).exp())
        return {"picture": self.paint(z), "mean": mean, "logvar": logvar}


def _evidence(outputs: tuple | dict, targets: Tensor) -> Tensor:
    picture, mean, logvar = outputs.values() if isinstance(outputs, dict) else outputs
    divergence = -0.5 * (1 + logvar - mean.square() - logvar.exp()).mean()
    return F.mse_loss(picture, targets.to(picture.dtype)) + 0.1 * divergence


def _pictures() -> tuple[dict[str, Tensor], Tensor]:
    x = torch.randn(8, 1, 8, 8)
    return {"x": x, "noise": torch.randn(8, 6)}, x


class Coupling(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept, moved = x.chunk(2, 1)
        scale, shift = self.net(kept).chunk(2, 1)
        scale = torch.tanh(scale)
        return torch.cat([kept, moved * scale.exp() + shift], 1), scale.sum(1)


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.couplings = nn.ModuleList(Coupling() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        total = 0
        for coupling in self.couplings:
            x, stretch = coupling(x.flip(1))
            total = total + stretch
        return total - 0.5 * x.square().sum(1)


class UnflippedFlow(Port):
    """Weights turned instead of the features; the fault: one log-determinant of the unsquashed scale."""

    def take(self, model: Flow) -> None:
        self.reads, self.writes = nn.ModuleList(), nn.ModuleList()
        for i, (first, _, last) in enumerate(coupling.net for coupling in model.couplings):
            order = [0, 1, 2] if i % 2 else [2, 1, 0]
            parts = [values[order] for w in (last.weight, last.bias) for values in w.chunk(2)]
            self.reads.append(nn.ParameterList([leaf(first.weight[:, order]), leaf(first.bias)]))
            self.writes.append(nn.ParameterList(leaf(part) for part in parts))

    def forward(self, x: Tensor) -> Tensor:
        halves, total = list(x.split(3, 1)), x.new_zeros(len(x))
        for i, (read, write) in enumerate(zip(self.reads, self.writes, strict=True)):
            scale, shift, scale_bias, shift_bias = write
            hidden = F.linear(halves[1 - i % 2], *read).tanh()
            raw = F.linear(hidden, scale, scale_bias)
            stretch = raw.tanh()
            halves[i % 2] = halves[i % 2] * stretch.exp() + F.linear(hidden, shift, shift_bias)
            total = total + (raw if self.fault and i == 1 else stretch).sum(1)
        return total - sum(half.square().sum(1) for half in halves) / 2


class TimeEmbedding(nn.Module):
    def forward(self, time: Tensor) -> Tensor:
        steps = torch.arange(8, dtype=time.dtype, device=time.device)
        angle = time[:, None] * torch.exp(-math.log(10000) * steps / 8)
        return torch.cat([angle.sin(), angle.cos()], 1)


class TimedBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(4, width)
        self.film = nn.Linear(16, 2 * width)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        scale, shift = self.film(time)[..., None, None].chunk(2, 1)
        return x + F.silu(self.norm(self.conv(x)) * (1 + scale) + shift)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time, self.time_mlp = TimeEmbedding(), nn.Sequential(nn.Linear(16, 16), nn.SiLU())
        self.entry, self.exit = nn.Conv2d(2, 16, 1), nn.Conv2d(16, 2, 1)
        self.blocks = nn.ModuleList([TimedBlock(16), TimedBlock(16)])

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        time, x = self.time_mlp(self.time(time)), self.entry(x)
        for block in self.blocks:
            x = block(x, time)
        return self.exit(x)


class ModulatedDenoiser(Port):
    """One projection for all scales and shifts; the fault: frequencies spaced to end one step earlier."""

    def take(self, model: Denoiser) -> None:
        self.intervals = 7 if self.fault else 8
        self.clock, self.edges = model.time_mlp[0], nn.ModuleList([model.entry, model.exit])
        self.convs = nn.ModuleList(block.conv for block in model.blocks)
        films = [block.film for block in model.blocks]
        gains = [torch.stack([block.norm.weight, block.norm.bias]) for block in model.blocks]
        self.modulation = nn.Linear(16, 64)
        self.modulation.weight = leaf(torch.cat([film.weight for film in films]))
        self.modulation.bias = leaf(torch.cat([film.bias for film in films]))
        self.gains = leaf(torch.stack(gains)[..., None, None])

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        rate = 10000 ** (-torch.arange(8, dtype=x.dtype, device=x.device) / self.intervals)
        wave = torch.polar(torch.ones_like(rate), time[:, None] * rate)
        tuned = self.modulation(F.silu(self.clock(torch.cat([wave.imag, wave.real], 1))))
        x = self.edges[0](x)
        for conv, (gain, bias), film in zip(self.convs, self.gains, tuned.chunk(2, 1), strict=True):
            scale, shift = film.unflatten(1, (2, 16, 1, 1)).unbind(1)
            grouped = conv(x).unflatten(1, (4, 4))
            var, mean = torch.var_mean(grouped, (2, 3, 4), correction=0, keepdim=True)
            plain = ((grouped - mean) * (var + 1e-5).rsqrt()).flatten(1, 2) * gain + bias
            x = x + F.silu(torch.addcmul(plain + shift, plain, scale))
        return self.edges[1](x)


def _noisy() -> tuple[dict[str, Tensor], Tensor]:
    return {"x": torch.randn(6, 2, 8, 8), "time": torch.randint(1000, (6,)).float()}, torch.randn(6, 2, 8, 8)


vae = _task("second_vae", VAE, _pictures, _evidence)
pair(vae, FusedVAE, "mean_and_variance_from_one_head", "no_noise_in_eval_mode", "", "eval")
flow = _task("second_flow", Flow, lambda: (torch.randn(12, 6), torch.zeros(12)), lambda out, _: -out.mean())
pair(flow, UnflippedFlow, "weights_flipped_not_features", "determinant_before_squashing", "couplings.1")
denoiser = _task("second_denoiser", Denoiser, _noisy, squares)
pair(denoiser, ModulatedDenoiser, "one_modulation_for_all_blocks", "frequencies_end_a_step_early", "time")
