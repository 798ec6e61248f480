"""A small NVAE: residual cells upwards, three groups of latents downwards, and pictures of single bits."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIGH, WIDE, LOW, TOP, LATENTS, PICTURES, GROUPS = 8, 12, 10, 14, 3, 4, (2, 1)


class Normal:
    """A normal distribution of parameters that are softly clamped to five."""

    def __init__(self, mu: Tensor, log_sigma: Tensor):
        self.mu = 5 * torch.tanh(mu / 5)
        self.sigma = torch.exp(5 * torch.tanh(log_sigma / 5)) + 1e-2

    def kl(self, normal_dist: "Normal") -> Tensor:
        term1 = (self.mu - normal_dist.mu) / normal_dist.sigma
        term2 = self.sigma / normal_dist.sigma
        return 0.5 * (term1 * term1 + term2 * term2) - 0.5 - torch.log(term2)


def kl_balancer(kl_all: Tensor) -> Tensor:
    """The sum of the groups' KL, each by its detached share and the size of its scale."""
    alpha = torch.cat([torch.full((n,), 4.0**i / n) for i, n in enumerate(GROUPS)]).to(kl_all)
    kl_coeff_i = torch.mean(torch.abs(kl_all), dim=0, keepdim=True) + 0.01
    kl_coeff_i = kl_coeff_i / (alpha / alpha.min()) * torch.sum(kl_coeff_i)
    kl_coeff_i = kl_coeff_i / torch.mean(kl_coeff_i, dim=1, keepdim=True)
    return torch.sum(kl_all * kl_coeff_i.detach(), dim=1)


class BatchNorm2d(nn.BatchNorm2d):
    def __init__(self, width: int):
        super().__init__(width, eps=1e-5, momentum=0.05)
        nn.init.normal_(self.weight, 1.0, 0.2), nn.init.normal_(self.bias, std=0.2)
        self.running_mean.normal_(0, 0.2), self.running_var.uniform_(0.6, 1.4)


class BatchNormSwish(BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(super().forward(x))


class BNSwishConv(nn.Module):
    def __init__(self, c_in: int, c_out: int, stride: int = 1):
        super().__init__()
        self.bn_act = BatchNormSwish(c_in)
        self.conv_0 = nn.Conv2d(c_in, c_out, 3, stride, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv_0(self.bn_act(x))


def conv_bn_swish(c_in: int, c_out: int, k: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(c_in, c_out, k, padding=k // 2, groups=groups, bias=False)
    return nn.Sequential(conv, BatchNormSwish(c_out))


class UpSample(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True)


class InvertedResidual(nn.Module):
    def __init__(self, c_in: int, c_out: int, up: bool, ex: int = 3):
        super().__init__()
        hidden = ex * c_in
        layers = [UpSample()] if up else []
        layers += [BatchNorm2d(c_in), conv_bn_swish(c_in, hidden), conv_bn_swish(hidden, hidden, 5, hidden)]
        self.conv = nn.Sequential(*layers, nn.Conv2d(hidden, c_out, 1, bias=False), BatchNorm2d(c_out))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class FactorizedReduce(nn.Module):
    """Half the size by four pointwise convolutions, each of another pixel of every square."""

    def __init__(self, c_in: int, c_out: int):
        super().__init__()
        part = c_out // 4
        self.conv_1, self.conv_2, self.conv_3 = (nn.Conv2d(c_in, part, 1, 2) for _ in range(3))
        self.conv_4 = nn.Conv2d(c_in, c_out - 3 * part, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        out = F.silu(x)
        conv1, conv2 = self.conv_1(out), self.conv_2(out[:, :, 1:, 1:])
        conv3, conv4 = self.conv_3(out[:, :, :, 1:]), self.conv_4(out[:, :, 1:, :])
        return torch.cat([conv1, conv2, conv3, conv4], dim=1)


class SE(nn.Module):
    def __init__(self, width: int, hidden: int = 5):
        super().__init__()
        self.se = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.se(x.mean((2, 3)))[:, :, None, None]


class Cell(nn.Module):
    def __init__(self, c_in: int, c_out: int, cell_type: str):
        super().__init__()
        self.cell_type, self.skip = cell_type, nn.Identity()
        if cell_type == "down_enc":
            self.skip = FactorizedReduce(c_in, c_out)
        if cell_type == "up_dec":
            self.skip = nn.Sequential(UpSample(), nn.Conv2d(c_in, c_out, 1))
        if cell_type.endswith("enc"):
            ops = BNSwishConv(c_in, c_out, 1 + (c_in != c_out)), BNSwishConv(c_out, c_out)
        else:
            ops = (InvertedResidual(c_in, c_out, cell_type == "up_dec"),)
        self._ops, self.se = nn.ModuleList(ops), SE(c_out)

    def forward(self, s: Tensor) -> Tensor:
        skip = self.skip(s)
        for op in self._ops:
            s = op(s)
        return skip + 0.1 * self.se(s)


class EncCombinerCell(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.cell_type, self.conv = "combiner_enc", nn.Conv2d(width, width, 1)

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        return x1 + self.conv(x2)


class DecCombinerCell(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.cell_type, self.conv = "combiner_dec", nn.Conv2d(width + LATENTS, width, 1)

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        return self.conv(torch.cat([x1, x2], dim=1))


class AutoEncoder(nn.Module):
    """Pictures of bits and noise for each group -> logits, bits per dimension, the KL of each group."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, LOW, 3, padding=1)
        low, down = Cell(LOW, LOW, "normal_enc"), Cell(LOW, TOP, "down_enc")
        top = [Cell(TOP, TOP, "normal_enc"), EncCombinerCell(TOP), Cell(TOP, TOP, "normal_enc")]
        self.enc_tower = nn.ModuleList([low, EncCombinerCell(LOW), down, *top])
        self.enc0 = nn.Sequential(nn.ELU(), nn.Conv2d(TOP, TOP, 1), nn.ELU())
        self.enc_sampler = nn.ModuleList(nn.Conv2d(c, 2 * LATENTS, 3, padding=1) for c in (TOP, TOP, LOW))
        samplers = (nn.Sequential(nn.ELU(), nn.Conv2d(c, 2 * LATENTS, 1)) for c in (TOP, LOW))
        self.dec_sampler = nn.ModuleList(samplers)
        self.prior_ftr0 = nn.Parameter(0.7 * torch.randn(TOP, HIGH // 2, WIDE // 2))
        tower = [DecCombinerCell(TOP), Cell(TOP, TOP, "normal_dec"), DecCombinerCell(TOP)]
        self.dec_tower = nn.ModuleList([*tower, Cell(TOP, LOW, "up_dec"), DecCombinerCell(LOW)])
        self.post_process = nn.ModuleList([Cell(LOW, LOW, "normal_dec")])
        self.image_conditional = nn.Sequential(nn.ELU(), nn.Conv2d(LOW, 1, 3, padding=1))

    def forward(self, x: Tensor, eps0: Tensor, eps1: Tensor, eps2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s, combiners, kl_all = self.stem(2 * x - 1.0), [], []
        for cell in self.enc_tower:
            if cell.cell_type == "combiner_enc":
                combiners.append((cell, s))
            else:
                s = cell(s)
        q = Normal(*self.enc_sampler[0](self.enc0(s)).chunk(2, dim=1))
        p, idx = Normal(torch.zeros_like(eps0), torch.zeros_like(eps0)), 0
        s = self.prior_ftr0.expand(len(x), -1, -1, -1)
        for cell in self.dec_tower:
            if cell.cell_type != "combiner_dec":
                s = cell(s)
                continue
            if idx > 0:
                mu_p, log_sig_p = self.dec_sampler[idx - 1](s).chunk(2, dim=1)
                combiner, feature = combiners[-idx]
                mu_q, log_sig_q = self.enc_sampler[idx](combiner(feature, s)).chunk(2, dim=1)
                p, q = Normal(mu_p, log_sig_p), Normal(mu_p + mu_q, log_sig_p + log_sig_q)
            kl_all.append(q.kl(p).sum(dim=[1, 2, 3]))
            s, idx = cell(s, (eps0, eps1, eps2)[idx] * q.sigma + q.mu), idx + 1
        for cell in self.post_process:
            s = cell(s)
        logits, kl_all = self.image_conditional(s), torch.stack(kl_all, dim=1)
        recon = F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(dim=[1, 2, 3])
        kl = kl_balancer(kl_all) if self.training else kl_all.sum(dim=1)
        return logits, (recon + kl) / (math.log(2.0) * x[0].numel()), kl_all


def blobs() -> tuple[dict[str, Tensor], Tensor]:
    across, down = torch.arange(WIDE), torch.arange(HIGH)[:, None]
    at, noise = torch.rand(2, PICTURES, 1, 1, 1), torch.randn(PICTURES, 3, LATENTS, HIGH, WIDE)
    x = ((across - WIDE * at[0]) ** 2 + (down - HIGH * at[1]) ** 2 < 9).float()
    small = noise[..., : HIGH // 2, : WIDE // 2]
    return {"x": x, "eps0": small[:, 0], "eps1": small[:, 1], "eps2": noise[:, 2]}, x


def bits(outputs: tuple[Tensor, Tensor, Tensor], _: Tensor) -> Tensor:
    return outputs[1].mean() / 16
