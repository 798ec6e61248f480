"""A small VoxelMorph of two dimensions: a U-Net, an integrated velocity, and both directions warped."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INSHAPE, ENCODER, DECODER = (16, 24), (6, 10, 14), (18, 16, 13, 11, 9)
INT_STEPS, INT_DOWNSIZE, PAIRS, WINDOW, PENALTY = 4, 2, 3, 5, 0.05


class ConvBlock(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, stride: int = 1):
        super().__init__()
        self.main = nn.Conv2d(in_channels, out_channels, 3, stride, 1)
        nn.init.normal_(self.main.weight, std=(2 / (9 * in_channels)) ** 0.5)
        nn.init.normal_(self.main.bias, std=0.1)
        self.activation = nn.LeakyReLU(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.main(x))


class Unet(nn.Module):
    def __init__(self, infeats: int, nb_features: tuple, max_pool: int = 2):
        super().__init__()
        enc_nf, dec_nf = nb_features
        nb_dec_convs = len(enc_nf)
        dec_nf, final_convs = dec_nf[:nb_dec_convs], dec_nf[nb_dec_convs:]
        self.pooling = [nn.MaxPool2d(max_pool) for _ in enc_nf]
        self.upsampling = [nn.Upsample(scale_factor=max_pool, mode="nearest") for _ in enc_nf]
        prev_nf, self.encoder, self.decoder = infeats, nn.ModuleList(), nn.ModuleList()
        for nf in enc_nf:
            self.encoder.append(nn.ModuleList([ConvBlock(prev_nf, nf)]))
            prev_nf = nf
        for nf, skip in zip(dec_nf, reversed(enc_nf), strict=True):
            self.decoder.append(nn.ModuleList([ConvBlock(prev_nf, nf)]))
            prev_nf = nf + skip
        self.remaining = nn.ModuleList()
        for nf in final_convs:
            self.remaining.append(ConvBlock(prev_nf, nf))
            prev_nf = nf
        self.final_nf = prev_nf

    def forward(self, x: Tensor) -> Tensor:
        x_history = [x]
        for level, convs in enumerate(self.encoder):
            for conv in convs:
                x = conv(x)
            x_history.append(x)
            x = self.pooling[level](x)
        for level, convs in enumerate(self.decoder):
            for conv in convs:
                x = conv(x)
            x = self.upsampling[level](x)
            x = torch.cat([x, x_history.pop()], dim=1)
        for conv in self.remaining:
            x = conv(x)
        return x


class SpatialTransformer(nn.Module):
    """Samples ``src`` at the places to which the flow, in pixels, points."""

    def __init__(self, size: tuple[int, ...], mode: str = "bilinear"):
        super().__init__()
        self.mode = mode
        grids = torch.meshgrid([torch.arange(0, s) for s in size], indexing="ij")
        self.register_buffer("grid", torch.stack(grids)[None].float())

    def forward(self, src: Tensor, flow: Tensor) -> Tensor:
        new_locs, shape = self.grid + flow, flow.shape[2:]
        for i in range(len(shape)):
            new_locs[:, i, ...] = 2 * (new_locs[:, i, ...] / (shape[i] - 1) - 0.5)
        new_locs = new_locs.permute(0, 2, 3, 1)[..., [1, 0]]
        return F.grid_sample(src, new_locs, align_corners=True, mode=self.mode)


class VecInt(nn.Module):
    """Integrates a velocity by scaling and squaring."""

    def __init__(self, inshape: tuple[int, ...], nsteps: int):
        super().__init__()
        self.nsteps, self.scale = nsteps, 1.0 / (2**nsteps)
        self.transformer = SpatialTransformer(inshape)

    def forward(self, vec: Tensor) -> Tensor:
        vec = vec * self.scale
        for _ in range(self.nsteps):
            vec = vec + self.transformer(vec, vec)
        return vec


class ResizeTransform(nn.Module):
    """Resizes a flow, and its values with it."""

    def __init__(self, vel_resize: float):
        super().__init__()
        self.factor, self.mode = 1.0 / vel_resize, "bilinear"

    def forward(self, x: Tensor) -> Tensor:
        if self.factor < 1:
            x = F.interpolate(x, align_corners=True, scale_factor=self.factor, mode=self.mode)
            x = self.factor * x
        elif self.factor > 1:
            x = self.factor * x
            x = F.interpolate(x, align_corners=True, scale_factor=self.factor, mode=self.mode)
        return x


class VxmDense(nn.Module):
    """A moving and a fixed picture -> each warped to the other, and the velocity."""

    def __init__(self):
        super().__init__()
        self.unet_model = Unet(2, (ENCODER, DECODER))
        self.flow = nn.Conv2d(self.unet_model.final_nf, 2, kernel_size=3, padding=1)
        nn.init.normal_(self.flow.weight, std=0.25), nn.init.normal_(self.flow.bias, std=0.5)
        self.resize, self.fullsize = ResizeTransform(INT_DOWNSIZE), ResizeTransform(1 / INT_DOWNSIZE)
        self.integrate = VecInt(tuple(s // INT_DOWNSIZE for s in INSHAPE), INT_STEPS)
        self.transformer = SpatialTransformer(INSHAPE)

    def forward(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.unet_model(torch.cat([source, target], dim=1))
        pos_flow = self.resize(self.flow(x))
        preint_flow, neg_flow = pos_flow, -pos_flow
        pos_flow, neg_flow = self.integrate(pos_flow), self.integrate(neg_flow)
        pos_flow, neg_flow = self.fullsize(pos_flow), self.fullsize(neg_flow)
        return self.transformer(source, pos_flow), self.transformer(target, neg_flow), preint_flow


def blobs() -> tuple[dict[str, Tensor], Tensor]:
    """Pictures of a few blobs, and the same blobs moved a little; the target holds both pictures."""
    high, wide = INSHAPE
    down, across = torch.arange(high)[:, None], torch.arange(wide)
    middle = torch.rand(PAIRS, 4, 2, 1, 1) * torch.tensor([high, wide])[:, None, None]
    size, tone = 2 + 2 * torch.rand(PAIRS, 4, 1, 1), 0.4 + 0.6 * torch.rand(PAIRS, 4, 1, 1)
    pair = []
    for move in (0, 1.5 * torch.randn(PAIRS, 4, 2, 1, 1)):
        y, x = (middle + move).unbind(2)
        picture = (tone * torch.exp(-((down - y) ** 2 + (across - x) ** 2) / (2 * size**2))).sum(1, True)
        pair.append(picture + 0.05 * torch.rand_like(picture))
    source, target = pair
    return {"source": source, "target": target}, torch.cat([target, source], 1)


def ncc(true: Tensor, pred: Tensor) -> Tensor:
    """One less the local normalised cross correlation over windows."""
    filt = true.new_ones(1, 1, WINDOW, WINDOW)
    products = true, pred, true * true, pred * pred, true * pred
    i, j, ii, jj, ij = (F.conv2d(x, filt, padding=WINDOW // 2) for x in products)
    count = WINDOW**2
    cross, i_var, j_var = ij - i * j / count, ii - i * i / count, jj - j * j / count
    return 1 - torch.mean(cross * cross / (i_var * j_var + 1e-2))


def grad(flow: Tensor) -> Tensor:
    dy, dx = flow.diff(dim=2), flow.diff(dim=3)
    return ((dy * dy).mean() + (dx * dx).mean()) / 2


def both_directions(outputs: tuple[Tensor, Tensor, Tensor], pair: Tensor) -> Tensor:
    """The mean of the losses of both directions, and the penalty of the velocity's gradient."""
    (y_source, y_target, flow), (target, source) = outputs, pair.split(1, 1)
    return (ncc(target, y_source) + ncc(source, y_target)) / 2 + PENALTY * grad(flow)
