"""An autoencoder with a codebook that follows what it is given."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fourth_ports import Port, leaf, parts, spatial, wrong
from bench.tasks import _task


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.act1, self.conv1 = nn.ReLU(), nn.Conv2d(16, 12, 3, padding=1)
        self.act2, self.conv2 = nn.ReLU(), nn.Conv2d(12, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(self.act2(self.conv1(self.act1(x))))


class Codebook(nn.Module):
    """The nearest of sixteen codes for each pixel; a code is the running mean of what was nearest to it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", 0.5 * torch.randn(16, 6))
        self.register_buffer("sums", self.codes.clone())
        self.register_buffer("counts", torch.ones(16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.permute(0, 2, 3, 1).flatten(0, 2)
        distances = self.codes.square().sum(1) - 2 * flat @ self.codes.T
        chosen = F.one_hot(distances.argmin(1), 16).to(x.dtype)
        found = (chosen @ self.codes).view(len(x), *x.shape[2:], -1).permute(0, 3, 1, 2)
        if self.training:
            with torch.no_grad():
                self.counts.lerp_(chosen.sum(0), 0.1)
                self.sums.lerp_(chosen.T @ flat, 0.1)
                total = self.counts.sum()
                self.codes.copy_(self.sums * (total + 0.16) / (self.counts + 0.01)[:, None] / total)
        return x + (found - x).detach(), F.mse_loss(x, found)


class Coded(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(1, 16, 4, 2, 1), Residual(), nn.ReLU(), nn.Conv2d(16, 6, 1))
        self.codebook = Codebook()
        enlarge = nn.ConvTranspose2d(16, 1, 4, 2, 1)
        self.decode = nn.Sequential(nn.Conv2d(6, 16, 3, padding=1), Residual(), nn.ReLU(), enlarge)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found, distance = self.codebook(self.encode(x))
        return self.decode(found), distance


class PixelCodes(Port):
    """Pixels before channels, counts by index; a dict of what it makes."""

    def take(self, model: Coded) -> None:
        self.w = nn.ParameterDict({name.replace(".", "_"): leaf(p) for name, p in model.named_parameters()})
        self.register_buffer("book", model.codebook.codes.T.clone())
        self.register_buffer("heard", torch.cat([model.codebook.sums, model.codebook.counts[:, None]], 1))

    def conv(self, name: str, x: Tensor, stride: int = 1) -> Tensor:
        return spatial(x, self.w[name + "_weight"], self.w[name + "_bias"], stride)

    def residual(self, name: str, x: Tensor) -> Tensor:
        y = self.conv(name + "_conv2", self.conv(name + "_conv1", x.relu()).relu())
        return y + (x.relu() if name == "encode_1" and self.fault == "residual_of_the_active_map" else x)

    @torch.no_grad()
    def follow(self, index: Tensor, flat: Tensor) -> None:
        new = torch.zeros_like(self.heard).index_add(0, index, F.pad(flat, (0, 1), value=1.0))
        self.heard.mul_(0.9).add_(0.1 * new)
        sums, counts = self.heard.split([6, 1], 1)
        if self.fault != "counts_not_smoothed":
            counts = (counts + 0.01) * counts.sum() / (counts.sum() + 0.16)
        self.book.copy_((sums / counts).T)

    def coded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.flatten(0, 2)
        index = (flat @ self.book - self.book.square().sum(0) / 2).argmax(1)
        before = self.book.clone()
        if self.training:
            self.follow(index, flat)
        early = self.fault == "codes_move_before_they_are_read"
        found = (self.book if early else before).T[index].view_as(x)
        held = x.detach() if self.fault == "distance_holds_the_pixels" else x
        return found.detach() + x - x.detach(), (held - found).square().mean()

    def enlarged(self, x: Tensor) -> Tensor:
        height, width = (2 * size for size in x.shape[1:3])
        pieces = torch.einsum("nhwc,cij->nijhw", x, self.w["decode_3_weight"][:, 0]).flatten(3).flatten(1, 2)
        edge = 1 if self.fault == "enlarged_map_cropped_at_one_end" else 0
        whole = F.fold(pieces, (height + 2, width + 2), 4, stride=2)
        return whole[..., 1 + edge : height + 1 + edge, 1 : width + 1] + self.w["decode_3_bias"]

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.residual("encode_1", self.conv("encode_0", x[:, 0, ..., None], 2)).relu()
        found, distance = self.coded(self.conv("encode_3", h))
        h = self.residual("decode_1", self.conv("decode_0", found)).relu()
        return {"picture": self.enlarged(h), "distance": distance}


def _made(outputs: tuple | dict, targets: Tensor) -> Tensor:
    picture, distance = parts(outputs)
    return F.mse_loss(picture, targets.to(picture)) + 0.25 * distance


wrong(
    _task("fourth_coded", Coded, lambda: (torch.randn(8, 1, 8, 8),) * 2, _made),
    PixelCodes,
    residual_of_the_active_map=("residual from the wrong place", "encode.1"),
    codes_move_before_they_are_read=("order of two steps", "codebook"),
    enlarged_map_cropped_at_one_end=("off by one", "decode.3"),
    distance_holds_the_pixels=("detach on the wrong side", "codebook", "input gradient"),
    counts_not_smoothed=("a term missing in a buffer", "codebook", "buffer"),
)
