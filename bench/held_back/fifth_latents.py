"""Two models of a density: coupling layers with their determinant, and an autoencoder given its noise."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from bench.case import in_place_of
from bench.held_back._fifth_latents import HALF, WIDTH, Divergence, Flow, NoisyAutoencoder
from bench.held_back._fifth_tables import SAME, fault, joined, layer_norm, named, right
from bench.held_back._fourth_ports import Port, leaf, pile
from bench.tasks import _task


@dataclass
class Drawn:
    spread: Tensor
    z: Tensor


class Columns(Port):
    """[features, N] from block to block; weights of all blocks stacked; the determinants gathered apart."""

    def take(self, model: Flow) -> None:
        blocks = list(model.blocks)
        self.affine = pile(torch.stack([b.scale.logs, b.scale.shift], 1) for b in blocks)
        self.mix = pile(b.mix.weight for b in blocks)
        nets = [b.coupling.net for b in blocks]
        self.first = pile(torch.cat([net[0].weight, net[0].bias[:, None]], 1) for net in nets)
        self.second = pile(torch.cat([net[2].weight, net[2].bias[:, None]], 1) for net in nets)

    def forward(self, x: Tensor) -> Drawn:
        x, spread = x.T, 0.0
        for step, (affine, mix, first, second) in enumerate(
            zip(self.affine, self.mix, self.first, self.second, strict=True)
        ):
            y = mix @ (affine[:, :1].exp() * x + affine[:, 1:])
            kept, moved = y[:HALF], y[HALF:]
            hidden = torch.tanh(first[:, :-1] @ kept + first[:, -1:])
            raw, shift = (second[:, :-1] @ hidden + second[:, -1:]).tensor_split(2)
            if step == 1 and self.fault == "hard_bound_of_the_scale":
                logs = raw.clamp(-1.5, 1.5)
            else:
                logs = 1.5 * (raw / 1.5).tanh()
            x = torch.cat([kept, torch.addcmul(shift, moved, logs.exp())])
            spread = spread + logs.sum(0)
        logs = self.affine[:3, :, 0] if self.fault == "last_scale_not_counted" else self.affine[..., 0]
        return Drawn(spread=spread + logs.sum() + torch.linalg.slogdet(self.mix)[1].sum(), z=x.T)


class OneVector(Port):
    """Mean and spread in one weight, the layers as functions, the divergence by another formula."""

    def take(self, model: NoisyAutoencoder) -> None:
        named_parts = [*model.encoder.named_parameters("encoder"), *model.decoder.named_parameters("decoder")]
        self.w = nn.ParameterDict({name.replace(".", "_"): leaf(p) for name, p in named_parts})
        both = [model.mean, model.spread]
        self.both, self.both_shift = joined([m.weight for m in both]), joined([m.bias for m in both])
        self.floor = model.divergence.floor
        self.register_buffer("beats", model.warm.count.clone())

    def layer(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.w[name + "_weight"], self.w[name + "_bias"])

    def normed(self, x: Tensor, name: str, eps: float = 1e-3) -> Tensor:
        weight, bias = self.w[name + "_weight"], self.w[name + "_bias"]
        if eps:
            return layer_norm(x, weight, bias, eps)
        y = x - x.mean(-1, keepdim=True)
        return y / (y.square().mean(-1, keepdim=True).sqrt() + 1e-3) * weight + bias

    def beat(self) -> Tensor:
        rate = ((self.beats + 1) / 12).clamp(max=0.5 if self.fault == "warm_up_ends_half_way" else 1.0)
        if self.training:
            self.beats += 1
        return rate

    def forward(self, x: Tensor, noise: Tensor) -> dict[str, Tensor]:
        h = F.gelu(self.normed(self.layer(x, "encoder_0"), "encoder_1"))
        h = F.gelu(self.layer(h, "encoder_3"))
        mean, logs = F.linear(h, self.both, self.both_shift).chunk(2, 1)
        z = torch.addcmul(mean, (0.5 * logs).exp(), noise)
        eps = 0.0 if self.fault == "eps_outside_the_root" else 1e-3
        h = F.gelu(self.normed(self.layer(z, "decoder_0"), "decoder_1", eps))
        made = self.layer(F.gelu(self.layer(h, "decoder_3")), "decoder_5")
        each = (0.5 * (mean.square() + torch.expm1(logs) - logs)).mean(0)
        far = (self.floor + F.relu(each - self.floor)).sum()
        return {"divergence": self.beat().to(far) * far, "picture": made}


def _likelihood(outputs: object, targets: Tensor) -> Tensor:
    z, spread = named(outputs, "z", "spread")
    return (0.5 * z.square().sum(1) - spread).mean() / WIDTH


def _bound(outputs: object, targets: Tensor) -> Tensor:
    made, far = named(outputs, "picture", "divergence")
    return F.mse_loss(made, targets.to(made)) + 0.1 * far


def _moons() -> tuple[Tensor, Tensor]:
    x = torch.randn(20, WIDTH)
    return torch.cat([x[:, :HALF], x[:, HALF:] * 0.5 + x[:, :HALF].square()], 1), torch.zeros(20)


def _noisy() -> tuple[dict[str, Tensor], Tensor]:
    x = torch.randn(20, 4) @ torch.randn(4, 16)
    return {"x": x, "noise": torch.randn(20, 4)}, x


flow = _task("fifth_flow", Flow, _moons, _likelihood)
noisy = _task("fifth_noisy_autoencoder", NoisyAutoencoder, _noisy, _bound)


@in_place_of("divergence", SAME, "another formula", noisy)
class DivergenceByTorch(Divergence):
    """The divergence that torch has for two normal distributions."""

    def forward(self, mean: Tensor, logs: Tensor) -> Tensor:
        far = kl_divergence(Normal(mean, (0.5 * logs).exp()), Normal(0.0, 1.0)).mean(0)
        return torch.where(far > self.floor, far, self.floor).sum()


ADAM = {"optimizer": partial(torch.optim.Adam, lr=3e-3)}
right(flow, Columns, "flow_in_columns", "port, stacked blocks", **ADAM)
fault(flow, Columns, "hard_bound_of_the_scale", "another bound", "blocks.1.coupling", **ADAM)
fault(flow, Columns, "last_scale_not_counted", "a term missing", "blocks.3.scale", **ADAM)
right(noisy, OneVector, "mean_and_spread_in_one_weight", "port, fused heads")
fault(noisy, OneVector, "eps_outside_the_root", "eps in another place", "decoder.1")
fault(noisy, OneVector, "warm_up_ends_half_way", "sets in late", "warm", step=6)
