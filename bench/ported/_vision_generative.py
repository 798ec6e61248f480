"""A discriminator with normalised weights, and an autoencoder that draws from fixed noise."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from bench.cases._rewritten import copied, linear_of
from bench.tasks import _task


class Discriminator(nn.Module):
    """[N, 3, 12, 12] -> [N, 1]; two convs of spectral norm one, then one of normalised rows."""

    def __init__(self):
        super().__init__()
        self.conv1 = spectral_norm(nn.Conv2d(3, 12, 4, 2, 1))
        self.conv2 = spectral_norm(nn.Conv2d(12, 16, 4, 2, 1))
        self.act = nn.LeakyReLU(0.2)
        self.conv3 = weight_norm(nn.Conv2d(16, 16, 3, padding=1))
        self.out = nn.Linear(144, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.conv2(self.act(self.conv1(x))))
        return self.out(self.act(self.conv3(x)).flatten(1))


discriminator = _task(
    "ported_discriminator",
    Discriminator,
    lambda: (torch.randn(6, 3, 12, 12), torch.randint(2, (6, 1)).float()),
    F.binary_cross_entropy_with_logits,
)


class Spectral(nn.Module):
    """A conv divided by its largest singular value, which one step of the power iteration finds."""

    def __init__(self, conv: nn.Conv2d, detached: bool, always: bool):
        super().__init__()
        stored = conv.parametrizations.weight
        self.weight_bar, self.bias = copied(stored.original), copied(conv.bias)
        self.register_buffer("u", stored[0]._u.clone())
        self.register_buffer("v", stored[0]._v.clone())
        self.detached, self.always = detached, always

    def forward(self, x: Tensor) -> Tensor:
        matrix = self.weight_bar.flatten(1)
        u, v = self.u.clone(), self.v.clone()
        if self.training or self.always:
            with torch.no_grad():
                u = F.normalize(matrix @ v, dim=0, eps=1e-12)
                v = F.normalize(matrix.T @ u, dim=0, eps=1e-12)
                if self.training:
                    self.u.copy_(u)
                    self.v.copy_(v)
        sigma = u @ matrix @ v
        weight = self.weight_bar / (sigma.detach() if self.detached else sigma)
        return F.conv2d(x, weight, self.bias, stride=2, padding=1)


class OldDiscriminator(nn.Module):
    def __init__(self, model: Discriminator, detached: bool = False, always: bool = False):
        super().__init__()
        self.main = nn.ModuleList(Spectral(conv, detached, always) for conv in (model.conv1, model.conv2))
        stored = model.conv3.parametrizations.weight
        self.weight_g, self.weight_v = copied(stored.original0.flatten()), copied(stored.original1)
        self.offset = copied(model.conv3.bias)
        self.score_weight = copied(model.out.weight[0].view(16, 3, 3))
        self.score_bias = copied(model.out.bias)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.main:
            x = F.leaky_relu(conv(x), 0.2)
        norms = self.weight_v.square().sum((1, 2, 3)).sqrt()
        weight = self.weight_v * (self.weight_g / norms)[:, None, None, None]
        x = F.leaky_relu(F.conv2d(x, weight, self.offset, padding=1), 0.2)
        return torch.einsum("nchw,chw->n", x, self.score_weight)[:, None] + self.score_bias


class VAE(nn.Module):
    """[N, 1, 8, 8], noise [N, 6] -> a dict of the image, the mean and the logarithm of the variance."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 8, 4, 2, 1), nn.ELU(), nn.Conv2d(8, 12, 4, 2, 1), nn.ELU())
        self.mu, self.logvar = nn.Linear(48, 6), nn.Linear(48, 6)
        self.expand = nn.Linear(6, 48)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(12, 8, 4, 2, 1), nn.ELU(), nn.ConvTranspose2d(8, 1, 4, 2, 1)
        )

    def forward(self, image: Tensor, noise: Tensor) -> dict[str, Tensor]:
        h = self.encoder(image).flatten(1)
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + noise * (0.5 * logvar).exp()
        made = self.decoder(self.expand(z).relu().unflatten(1, (12, 2, 2)))
        return {"image": made, "mu": mu, "logvar": logvar}


def _evidence(output: dict | tuple, target: Tensor) -> Tensor:
    image, mu, logvar = output.values() if isinstance(output, dict) else output
    divergence = 0.5 * (mu.square() + logvar.exp() - 1 - logvar).sum(1).mean()
    return F.mse_loss(image, target) + 0.05 * divergence


def _noisy() -> tuple[tuple[Tensor, Tensor], Tensor]:
    image = torch.randn(8, 1, 8, 8)
    return (image, torch.randn(8, 6)), image


vae = _task("ported_vae", VAE, _noisy, _evidence)


class Gaussian(nn.Module):
    """Mean and logarithm of the variance come from one layer; the answer is a tuple."""

    def __init__(self, model: VAE, halved: bool = True):
        super().__init__()
        first, second = model.mu, model.logvar
        self.inference = nn.ModuleList([model.encoder[0], model.encoder[2]])
        self.stats = linear_of(torch.cat([first.weight, second.weight]), torch.cat([first.bias, second.bias]))
        self.generate = nn.ModuleList([model.expand, model.decoder[0], model.decoder[2]])
        self.halved = halved

    def forward(self, image: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = image
        for conv in self.inference:
            h = F.elu(conv(h))
        mu, logvar = self.stats(h.reshape(h.shape[0], -1)).chunk(2, 1)
        z = torch.addcmul(mu, noise, logvar.exp().sqrt() if self.halved else logvar.exp())
        h = F.relu(self.generate[0](z)).view(-1, 12, 2, 2)
        return self.generate[2](F.elu(self.generate[1](h))), mu, logvar
