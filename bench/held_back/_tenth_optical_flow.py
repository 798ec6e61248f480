"""Optical flow by recurrent refinement: all pairs of positions compared, a window looked up, a GRU."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, FEATURES, HIDDEN, CONTEXT, MOTION = 8, 16, 8, 8, 8
RADIUS, STEPS, FACTOR, GAMMA = 2, 3, 4, 0.8


def lively(module: nn.Module) -> None:
    """Start with norms that are not plain, and with convolutions that keep the size of their input."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
    elif isinstance(module, nn.InstanceNorm2d | nn.BatchNorm2d):
        nn.init.uniform_(module.weight, 0.7, 1.4)
        nn.init.uniform_(module.bias, -0.3, 0.3)


def grid(x: Tensor) -> Tensor:
    """The coordinates (x, y) of each position of [N, C, H, W], as [1, 2, H, W]."""
    ys, xs = (torch.arange(size, dtype=x.dtype, device=x.device) for size in x.shape[2:])
    ys, xs = torch.meshgrid(ys, xs, indexing="ij")
    return torch.stack([xs, ys])[None]


def sample(x: Tensor, coords: Tensor, padding: str = "zeros") -> Tensor:
    """Values of [N, C, H, W] at coordinates [N, h, w, 2] in pixels, bilinearly."""
    sizes = coords.new_tensor([x.shape[3] - 1, x.shape[2] - 1])
    return F.grid_sample(x, 2 * coords / sizes - 1, padding_mode=padding, align_corners=True)


def reach(x: Tensor) -> Tensor:
    """The steps of a window, as numbers like those of ``x``."""
    return torch.arange(-RADIUS, RADIUS + 1, dtype=x.dtype, device=x.device)


class ResidualBlock(nn.Module):
    def __init__(self, norm: type[nn.Module], stride: int = 1):
        super().__init__()
        self.conv1 = nn.Conv2d(WIDTH, WIDTH, 3, stride, padding=1, bias=False)
        self.norm1 = norm(WIDTH, affine=True)
        self.conv2 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.norm2 = norm(WIDTH, affine=True)
        self.relu = nn.ReLU()
        self.downsample = nn.Identity()
        if stride > 1:
            narrow = nn.Conv2d(WIDTH, WIDTH, 1, stride, bias=False)
            self.downsample = nn.Sequential(narrow, norm(WIDTH, affine=True))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.relu(self.norm2(self.conv2(y)))
        return self.relu(self.downsample(x) + y)


class Encoder(nn.Module):
    """Pictures [N, 3, H, W] -> [N, C, H / 4, W / 4]."""

    def __init__(self, norm: type[nn.Module], width: int):
        super().__init__()
        self.conv1 = nn.Conv2d(3, WIDTH, 3, 2, padding=1, bias=False)
        self.norm1 = norm(WIDTH, affine=True)
        self.relu = nn.ReLU()
        self.layer1 = nn.Sequential(ResidualBlock(norm), ResidualBlock(norm))
        self.layer2 = nn.Sequential(ResidualBlock(norm, 2), ResidualBlock(norm))
        self.conv2 = nn.Conv2d(WIDTH, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm1(self.conv1(x)))
        return self.conv2(self.layer2(self.layer1(x)))


class CorrPyramid(nn.Module):
    """Two feature maps -> each position of the first against the second's, [N * H * W, 1, h, w] a level."""

    def __init__(self):
        super().__init__()
        self.pool = nn.AvgPool2d(2)

    def forward(self, fmap1: Tensor, fmap2: Tensor) -> list[Tensor]:
        volume = torch.einsum("ncp,ncq->npq", fmap1.flatten(2), fmap2.flatten(2)) / fmap1.shape[1] ** 0.5
        volume = volume.reshape(-1, 1, *fmap2.shape[2:])
        return [volume, self.pool(volume)]


class CorrLookup(nn.Module):
    """The windows about coordinates [N, 2, H, W], which learn nothing here; x runs slower in a window."""

    def forward(self, pyramid: list[Tensor], coords: Tensor) -> Tensor:
        count, _, high, wide = coords.shape
        coords = coords.detach().permute(0, 2, 3, 1).reshape(-1, 1, 1, 2)
        delta = torch.stack(torch.meshgrid(reach(coords), reach(coords), indexing="ij"), -1)
        found = [sample(volume, coords / 2**i + delta) for i, volume in enumerate(pyramid)]
        found = [window.reshape(count, high, wide, -1) for window in found]
        return torch.cat(found, -1).permute(0, 3, 1, 2)


class MotionEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.convcorr1 = nn.Conv2d(2 * (2 * RADIUS + 1) ** 2, WIDTH, 1)
        self.convcorr2 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.convflow1 = nn.Conv2d(2, WIDTH, 3, padding=1)
        self.convflow2 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.conv = nn.Conv2d(2 * WIDTH, MOTION - 2, 3, padding=1)

    def forward(self, flow: Tensor, corr: Tensor) -> Tensor:
        corr = F.relu(self.convcorr2(F.relu(self.convcorr1(corr))))
        moved = F.relu(self.convflow2(F.relu(self.convflow1(flow))))
        return torch.cat([F.relu(self.conv(torch.cat([corr, moved], 1))), flow], 1)


class ConvGRU(nn.Module):
    def __init__(self, size: tuple[int, int]):
        super().__init__()
        width, padding = HIDDEN + CONTEXT + MOTION, (size[0] // 2, size[1] // 2)
        self.convz, self.convr, self.convq = (nn.Conv2d(width, HIDDEN, size, padding=padding) for _ in "zrq")

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        hx = torch.cat([h, x], 1)
        z, r = self.convz(hx).sigmoid(), self.convr(hx).sigmoid()
        q = self.convq(torch.cat([r * h, x], 1)).tanh()
        return (1 - z) * h + z * q


def head(width: int, size: int) -> nn.Sequential:
    last = nn.Conv2d(WIDTH, width, size, padding=size // 2)
    return nn.Sequential(nn.Conv2d(HIDDEN, WIDTH, 3, padding=1), nn.ReLU(), last)


class UpdateBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.motion_encoder = MotionEncoder()
        self.convgru1, self.convgru2 = ConvGRU((1, 3)), ConvGRU((3, 1))
        self.flow_head = head(2, 3)

    def forward(self, h: Tensor, context: Tensor, corr: Tensor, flow: Tensor) -> tuple[Tensor, Tensor]:
        flow = flow.detach()
        x = torch.cat([context, self.motion_encoder(flow, corr)], 1)
        h = self.convgru2(self.convgru1(h, x), x)
        return h, flow + self.flow_head(h)


class ConvexUpsample(nn.Module):
    """Each fine flow is a mixture of the nine coarse ones around it."""

    def forward(self, flow: Tensor, mask: Tensor) -> Tensor:
        count, _, high, wide = flow.shape
        mask = mask.view(count, 1, 9, FACTOR, FACTOR, high, wide).softmax(2)
        near = F.unfold(FACTOR * flow, 3, padding=1).view(count, 2, 9, 1, 1, high, wide)
        fine = (mask * near).sum(2).permute(0, 1, 4, 2, 5, 3)
        return fine.reshape(count, 2, FACTOR * high, FACTOR * wide)


class OpticalFlow(nn.Module):
    """Two pictures [N, 3, H, W] -> the flow [N, 2, H, W] from the first to the second after each step."""

    def __init__(self):
        super().__init__()
        self.feature_encoder = Encoder(nn.InstanceNorm2d, FEATURES)
        self.context_encoder = Encoder(nn.BatchNorm2d, HIDDEN + CONTEXT)
        self.corr_pyramid, self.corr_lookup = CorrPyramid(), CorrLookup()
        self.update_block = UpdateBlock()
        self.mask_predictor, self.upsample = head(9 * FACTOR**2, 1), ConvexUpsample()
        self.apply(lively)

    def forward(self, image1: Tensor, image2: Tensor) -> tuple[Tensor, ...]:
        pyramid = self.corr_pyramid(*self.feature_encoder(torch.cat([image1, image2])).chunk(2))
        h, context = self.context_encoder(image1).split([HIDDEN, CONTEXT], 1)
        h, context, places = h.tanh(), context.relu(), grid(h)
        flow, flows = torch.zeros_like(h[:, :2]), []
        for _ in range(STEPS):
            h, flow = self.update_block(h, context, self.corr_lookup(pyramid, places + flow), flow)
            flows.append(self.upsample(flow, 0.25 * self.mask_predictor(h)))
        return tuple(flows)


def frames() -> tuple[dict[str, Tensor], Tensor]:
    """Smooth pictures, and what they looked like before they moved by a smooth flow."""
    image2, flow = (
        F.interpolate(x, (24, 32), mode="bicubic", align_corners=True)
        for x in (torch.randn(2, 3, 12, 16), 2 * torch.randn(2, 2, 2, 3))
    )
    image1 = sample(image2, (grid(image2) + flow).permute(0, 2, 3, 1), "reflection")
    return {"image1": image1, "image2": image2}, flow


def loss(flows: tuple[Tensor, ...], target: Tensor) -> Tensor:
    """Later flows weigh more."""
    return sum(GAMMA**i * (flow - target.to(flow)).abs().mean() for i, flow in enumerate(reversed(flows)))
