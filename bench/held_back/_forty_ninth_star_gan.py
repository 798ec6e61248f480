"""A small StarGAN: a generator and a critic with a class head, and the losses of one step of both."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS, HIGH, WIDE, LABELS, PICTURES = 3, 16, 24, 5, 2
G_WIDTH, D_WIDTH, BLOCKS, D_LAYERS, SLOPE = 6, 7, 2, 3, 0.01
LAMBDA_CLS, LAMBDA_REC, LAMBDA_GP, G_SHARE = 1.0, 10.0, 10.0, 0.5


def instance_norm(width: int) -> nn.InstanceNorm2d:
    """An instance norm that keeps statistics for evaluation; nothing in it is zero or one."""
    norm = nn.InstanceNorm2d(width, affine=True, track_running_stats=True)
    nn.init.normal_(norm.weight, 1.0, 0.2), nn.init.normal_(norm.bias, std=0.2)
    nn.init.normal_(norm.running_mean, std=0.1), nn.init.uniform_(norm.running_var, 0.2, 0.6)
    return norm


class ResidualBlock(nn.Module):
    def __init__(self, dim_in: int, dim_out: int):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(dim_in, dim_out, 3, 1, 1, bias=False),
            instance_norm(dim_out),
            nn.ReLU(inplace=True),
            nn.Conv2d(dim_out, dim_out, 3, 1, 1, bias=False),
            instance_norm(dim_out),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.main(x)


class Generator(nn.Module):
    """Pictures and the labels they shall have -> pictures."""

    def __init__(self, conv_dim: int = G_WIDTH, c_dim: int = LABELS, repeat_num: int = BLOCKS):
        super().__init__()
        layers = [nn.Conv2d(CHANNELS + c_dim, conv_dim, 7, 1, 3, bias=False)]
        layers += [instance_norm(conv_dim), nn.ReLU(inplace=True)]
        width = conv_dim
        for _ in range(2):
            layers.append(nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False))
            layers += [instance_norm(2 * width), nn.ReLU(inplace=True)]
            width = 2 * width
        layers += [ResidualBlock(width, width) for _ in range(repeat_num)]
        for _ in range(2):
            layers.append(nn.ConvTranspose2d(width, width // 2, 4, 2, 1, bias=False))
            layers += [instance_norm(width // 2), nn.ReLU(inplace=True)]
            width = width // 2
        layers += [nn.Conv2d(width, CHANNELS, 7, 1, 3, bias=False), nn.Tanh()]
        self.main = nn.Sequential(*layers)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        c = c.view(c.size(0), c.size(1), 1, 1).repeat(1, 1, x.size(2), x.size(3))
        return self.main(torch.cat([x, c], dim=1))


class Discriminator(nn.Module):
    """Pictures -> a map that tells whether they are real, and the logits of their labels."""

    def __init__(self, conv_dim: int = D_WIDTH, c_dim: int = LABELS, repeat_num: int = D_LAYERS):
        super().__init__()
        layers, before, width = [], CHANNELS, conv_dim
        for _ in range(repeat_num):
            layers += [nn.Conv2d(before, width, 4, 2, 1), nn.LeakyReLU(SLOPE)]
            before, width = width, 2 * width
        self.main = nn.Sequential(*layers)
        self.conv1 = nn.Conv2d(before, 1, 3, 1, 1, bias=False)
        self.conv2 = nn.Conv2d(before, c_dim, (HIGH // 2**repeat_num, WIDE // 2**repeat_num), bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.main(x)
        out_cls = self.conv2(h)
        return self.conv1(h), out_cls.view(out_cls.size(0), out_cls.size(1))


class StarGAN(nn.Module):
    """Pictures, their labels, those wanted and the penalty's mixing factors -> the losses and the fakes."""

    def __init__(self):
        super().__init__()
        self.G, self.D = Generator(), Discriminator()

    def classification_loss(self, logit: Tensor, target: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logit, target, reduction="sum") / logit.size(0)

    def gradient_penalty(self, x_hat: Tensor) -> Tensor:
        """(|dy/dx| - 1)^2, averaged; the slopes are wanted in evaluation too."""
        with torch.enable_grad():
            x_hat = x_hat.detach().requires_grad_(True)
            y, _ = self.D(x_hat)
            dydx = torch.autograd.grad(y, x_hat, torch.ones_like(y), create_graph=True)[0]
            norm = torch.sqrt(torch.sum(dydx.view(dydx.size(0), -1) ** 2, dim=1))
            return torch.mean((norm - 1) ** 2)

    def forward(self, x_real: Tensor, c_org: Tensor, c_trg: Tensor, alpha: Tensor) -> dict[str, Tensor]:
        x_fake = self.G(x_real, c_trg)
        out_src, out_cls = self.D(x_real)
        d_loss = -torch.mean(out_src) + LAMBDA_CLS * self.classification_loss(out_cls, c_org)
        out_src, _ = self.D(x_fake.detach())
        penalty = self.gradient_penalty(alpha * x_real + (1 - alpha) * x_fake)
        d_loss = d_loss + torch.mean(out_src) + LAMBDA_GP * penalty

        out_src, out_cls = self.D(x_fake)
        g_loss = -torch.mean(out_src) + LAMBDA_CLS * self.classification_loss(out_cls, c_trg)
        x_reconst = self.G(x_fake, c_org)
        g_loss = g_loss + LAMBDA_REC * torch.mean(torch.abs(x_real - x_reconst))
        return {"loss": d_loss + G_SHARE * g_loss, "d_loss": d_loss, "g_loss": g_loss, "x_fake": x_fake}


def faces() -> tuple[dict[str, Tensor], Tensor]:
    """Pictures whose labels are tint, stripes, a spot, a slope and contrast; the labels of another one."""
    c_org, c_trg = torch.randint(2, (2, PICTURES, LABELS)).float()
    down, across = torch.linspace(-1, 1, HIGH)[:, None], torch.linspace(-1, 1, WIDE)
    tint = torch.tensor([0.5, -0.2, -0.4])[:, None, None].expand(CHANNELS, HIGH, WIDE)
    stripes = (9 * across).sin().expand_as(tint)
    spot = torch.exp(-6 * (down**2 + across**2)).expand_as(tint)
    slope = (0.5 * down + 0.2 * across).expand_as(tint)
    looks = torch.stack([tint, 0.4 * stripes, 0.8 * spot, slope])
    x = torch.einsum("nk,kchw->nchw", c_org[:, :4], looks) * (0.6 + 0.4 * c_org[:, 4, None, None, None])
    x = (x + 0.1 * torch.randn_like(x)).clamp(-0.99, 0.99)
    return {"x_real": x, "c_org": c_org, "c_trg": c_trg, "alpha": torch.rand(PICTURES, 1, 1, 1)}, c_trg


def both(outputs: dict[str, Tensor], _: Tensor) -> Tensor:
    """The weighted sum of the losses, by twenty."""
    return outputs["loss"] / 20
