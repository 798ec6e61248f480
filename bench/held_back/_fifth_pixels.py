"""Two networks that make pictures: a larger one of a small one, and one in the style of another."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fourth_ports import parts
from bench.tasks import _task


class Residual(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.conv1, self.act = nn.Conv2d(width, width, 3, padding=1), nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * self.conv2(self.act(self.conv1(x)))


class Enlarger(nn.Module):
    """[N, 3, 7, 7] -> [N, 3, 14, 14]; convolutions of the small picture, then pixels from channels."""

    def __init__(self, width: int = 10):
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.45, 0.43, 0.40])[:, None, None])
        self.head = nn.Conv2d(3, width, 3, padding=1)
        self.body = nn.Sequential(*(Residual(width) for _ in range(3)), nn.Conv2d(width, width, 3, padding=1))
        self.widen, self.shuffle = nn.Conv2d(width, 4 * width, 3, padding=1), nn.PixelShuffle(2)
        self.tail = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(x - self.mean)
        x = x + self.body(x)
        return self.tail(self.shuffle(self.widen(x))) + self.mean


def _small() -> tuple[Tensor, Tensor]:
    large = (0.45 + F.avg_pool2d(torch.randn(6, 3, 16, 16), 3, 1)).clamp(0, 1)
    return F.avg_pool2d(large, 2), large


enlarger = _task("fifth_enlarger", Enlarger, _small, lambda made, large: (made - large).abs().pow(1.5).mean())


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and the deviation of each map, with the unbiased variance."""
    return x.mean((2, 3), keepdim=True), (x.var((2, 3), keepdim=True) + 1e-5).sqrt()


class Restyle(nn.Module):
    """The maps of the content with the moments of the style."""

    def forward(self, content: Tensor, style: Tensor) -> Tensor:
        mean, deviation = moments(content)
        new_mean, new_deviation = moments(style)
        return (content - mean) / deviation * new_deviation + new_mean


def reflected(before: int, after: int, stride: int = 1) -> list[nn.Module]:
    return [nn.ReflectionPad2d(1), nn.Conv2d(before, after, 3, stride)]


class Painter(nn.Module):
    """Content and style [N, 3, 12, 12] -> a picture, and the features on which it is judged.

    The encoder is fixed, and the decoder learns.
    """

    def __init__(self):
        super().__init__()
        layers = [*reflected(3, 8), nn.ReLU(), *reflected(8, 12, 2), nn.ReLU(), *reflected(12, 12), nn.ReLU()]
        self.encoder = nn.Sequential(*layers).requires_grad_(False)
        self.restyle = Restyle()
        layers = [*reflected(12, 12), nn.ReLU(), nn.Upsample(scale_factor=2, mode="nearest")]
        self.decoder = nn.Sequential(*layers, *reflected(12, 8), nn.ReLU(), *reflected(8, 3))

    def forward(self, content: Tensor, style: Tensor) -> tuple[Tensor, ...]:
        styled = self.encoder(style)
        aim = self.restyle(self.encoder(content), styled)
        picture = self.decoder(aim)
        return picture, self.encoder(picture), aim, styled


def _judged(outputs: tuple | dict, targets: Tensor) -> Tensor:
    picture, made, aim, styled = parts(outputs)
    of_style = sum(F.mse_loss(a, b) for a, b in zip(moments(made), moments(styled), strict=True))
    return F.mse_loss(made, aim) + 0.5 * of_style + 0.1 * F.mse_loss(picture, targets)


def _two_pictures() -> tuple[dict[str, Tensor], Tensor]:
    content = F.avg_pool2d(2 * torch.randn(4, 3, 14, 14), 3, 1)
    style = F.avg_pool2d(2 * torch.randn(4, 3, 14, 14), (1, 3), 1)[..., :12, :] + 0.5
    return {"content": content, "style": style}, content


painter = _task("fifth_painter", Painter, _two_pictures, _judged)
