"""A small Point Transformer: vector attention among neighbours on sampled levels, and interpolation."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PLANES, STRIDES, NSAMPLE, SHARE = (12, 16, 24), (1, 3, 2), (6, 6, 4), 4
CLOUDS, POINTS, PARTS, COLOURS = 4, 48, 4, 3
Cloud = tuple[Tensor, Tensor, Tensor]


def furthestsampling(p: Tensor, count: int, start: Tensor) -> Tensor:
    """Points [B, N, 3] -> the numbers [B, count] of those that lie furthest from the ones before them."""
    last, chosen = start, [start]
    far = torch.full_like(p[..., 0], torch.inf)
    for _ in range(count - 1):
        there = p.gather(1, last[:, None, None].expand(-1, -1, 3))
        far = torch.minimum(far, (p - there).square().sum(-1))
        last = far.argmax(1)
        chosen.append(last)
    return torch.stack(chosen, 1)


@torch.no_grad()
def knnquery(nsample: int, p: Tensor, new_p: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers [B, M, K] of the nearest points of each new point, and their distances."""
    dist = torch.cdist(new_p, p, compute_mode="donot_use_mm_for_euclid_dist")
    dist, idx = dist.topk(nsample, dim=2, largest=False)
    return idx, dist


def grouping(x: Tensor, idx: Tensor) -> Tensor:
    """Features [B, C, N] at numbers [B, M, K] -> [B, C, M, K]."""
    return x.gather(2, idx.flatten(1)[:, None].expand(-1, x.shape[1], -1)).unflatten(2, idx.shape[1:])


def queryandgroup(nsample: int, p: Tensor, new_p: Tensor, x: Tensor) -> Tensor:
    """The neighbours' positions relative to the new points, and their features, [B, 3 + C, M, K]."""
    idx, _ = knnquery(nsample, p, new_p)
    return torch.cat([grouping(p.mT, idx) - new_p.mT[..., None], grouping(x, idx)], 1)


def interpolation(p: Tensor, new_p: Tensor, x: Tensor, k: int = 3) -> Tensor:
    """Features of the points as the new points see them, by the inverse of the distances."""
    idx, dist = knnquery(k, p, new_p)
    dist_recip = 1.0 / (dist + 1e-8)
    weight = dist_recip / dist_recip.sum(2, keepdim=True)
    return (grouping(x, idx) * weight[:, None]).sum(-1)


def normed(inputs: int, planes: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv1d(inputs, planes, 1, bias=False), nn.BatchNorm1d(planes), nn.ReLU())


class PointTransformerLayer(nn.Module):
    def __init__(self, planes: int, nsample: int):
        super().__init__()
        self.nsample, self.share_planes, mid = nsample, SHARE, planes // SHARE
        for name in ("linear_q", "linear_k", "linear_v"):
            self.add_module(name, nn.Conv1d(planes, planes, 1, bias=False))
        self.linear_p = nn.Sequential(
            *(nn.Conv2d(3, 3, 1, bias=False), nn.BatchNorm2d(3), nn.ReLU()),
            nn.Conv2d(3, planes, 1, bias=False),
        )
        self.linear_w = nn.Sequential(
            *(nn.BatchNorm2d(planes), nn.ReLU(), nn.Conv2d(planes, mid, 1, bias=False)),
            *(nn.BatchNorm2d(mid), nn.ReLU(), nn.Conv2d(mid, mid, 1, bias=False)),
        )
        self.softmax = nn.Softmax(dim=3)

    def forward(self, pxs: Cloud) -> Tensor:
        p, x, _ = pxs
        x_q, x_k, x_v = self.linear_q(x), self.linear_k(x), self.linear_v(x)
        x_k = queryandgroup(self.nsample, p, p, x_k)
        x_v = queryandgroup(self.nsample, p, p, x_v)[:, 3:]
        p_r, x_k = self.linear_p(x_k[:, :3]), x_k[:, 3:]
        w = self.softmax(self.linear_w(x_k - x_q[..., None] + p_r))
        x = (x_v + p_r).unflatten(1, (self.share_planes, -1)) * w[:, None]
        return x.flatten(1, 2).sum(-1)


class TransitionDown(nn.Module):
    def __init__(self, in_planes: int, out_planes: int, stride: int, nsample: int):
        super().__init__()
        self.stride, self.nsample = stride, nsample
        if stride != 1:
            self.linear = nn.Conv2d(3 + in_planes, out_planes, 1, bias=False)
            self.pool, self.bn = nn.MaxPool2d((1, nsample)), nn.BatchNorm2d(out_planes)
        else:
            self.linear, self.bn = normed(in_planes, out_planes)[:2]
        self.relu = nn.ReLU()

    def forward(self, pxs: Cloud) -> Cloud:
        p, x, start = pxs
        if self.stride == 1:
            return p, self.relu(self.bn(self.linear(x))), start
        idx = furthestsampling(p, p.shape[1] // self.stride, start)
        n_p = p.gather(1, idx[..., None].expand(-1, -1, 3))
        x = queryandgroup(self.nsample, p, n_p, x)
        x = self.pool(self.relu(self.bn(self.linear(x)))).squeeze(-1)
        return n_p, x, torch.zeros_like(start)


class TransitionUp(nn.Module):
    """Joins a level with the next coarser one, or the coarsest with the mean of each cloud."""

    def __init__(self, in_planes: int, out_planes: int | None = None):
        super().__init__()
        planes = out_planes or in_planes
        wide = planes if out_planes else 2 * planes
        self.linear1 = normed(wide, planes)
        if out_planes is None:
            self.linear2 = nn.Sequential(nn.Conv1d(in_planes, in_planes, 1), nn.ReLU())
        else:
            self.linear2 = normed(in_planes, planes)

    def forward(self, pxs1: Cloud, pxs2: Cloud | None = None) -> Tensor:
        p1, x1, _ = pxs1
        if pxs2 is None:
            whole = self.linear2(x1.mean(2, keepdim=True))
            return self.linear1(torch.cat([x1, whole.expand_as(x1)], 1))
        p2, x2, _ = pxs2
        return self.linear1(x1) + interpolation(p2, p1, self.linear2(x2))


class PointTransformerBlock(nn.Module):
    def __init__(self, planes: int, nsample: int):
        super().__init__()
        self.linear1, self.bn1 = nn.Conv1d(planes, planes, 1, bias=False), nn.BatchNorm1d(planes)
        self.transformer2, self.bn2 = PointTransformerLayer(planes, nsample), nn.BatchNorm1d(planes)
        self.linear3, self.bn3 = nn.Conv1d(planes, planes, 1, bias=False), nn.BatchNorm1d(planes)
        self.relu = nn.ReLU()

    def forward(self, pxs: Cloud) -> Cloud:
        p, x, start = pxs
        identity = x
        x = self.relu(self.bn1(self.linear1(x)))
        x = self.relu(self.bn2(self.transformer2((p, x, start))))
        return p, self.relu(self.bn3(self.linear3(x)) + identity), start


class PointTransformerSeg(nn.Module):
    """Clouds [B, N, 3] -> scores of the parts [B, parts, N] and the way to each point's part [B, 3, N]."""

    def __init__(self):
        super().__init__()
        widths = (3 + COLOURS, *PLANES)
        for i, planes in enumerate(PLANES):
            down = TransitionDown(widths[i], planes, STRIDES[i], NSAMPLE[i])
            up = TransitionUp(PLANES[i + 1], planes) if planes != PLANES[-1] else TransitionUp(planes)
            setattr(self, f"enc{i + 1}", nn.Sequential(down, PointTransformerBlock(planes, NSAMPLE[i])))
            setattr(self, f"dec{i + 1}", nn.Sequential(up, PointTransformerBlock(planes, NSAMPLE[i])))
        first = PLANES[0]
        self.cls = nn.Sequential(*normed(first, first), nn.Conv1d(first, PARTS, 1))
        self.offset = nn.Conv1d(first, 3, 1)
        for module in self.modules():
            if isinstance(module, nn.Conv1d | nn.Conv2d):
                nn.init.xavier_uniform_(module.weight, gain=2.0 if module.bias is None else 0.8)
                if module.bias is not None:
                    nn.init.normal_(module.bias, std=0.3)
            elif isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                nn.init.uniform_(module.weight, 0.6, 1.4)
                nn.init.normal_(module.bias, std=0.3)

    def forward(self, coord: Tensor, feat: Tensor, start: Tensor) -> dict[str, Tensor]:
        p1, x1, s1 = self.enc1((coord, torch.cat([coord, feat], 2).mT, start))
        p2, x2, s2 = self.enc2((p1, x1, s1))
        p3, x3, s3 = self.enc3((p2, x2, s2))
        x3 = self.dec3[1:]((p3, self.dec3[0]((p3, x3, s3)), s3))[1]
        x2 = self.dec2[1:]((p2, self.dec2[0]((p2, x2, s2), (p3, x3, s3)), s2))[1]
        x1 = self.dec1[1:]((p1, self.dec1[0]((p1, x1, s1), (p2, x2, s2)), s1))[1]
        return {"logits": self.cls(x1), "offset": self.offset(x1)}


def scenes() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Each cloud has a plate, a stick, a ball and a ring, somewhere and turned, in noisy colours."""
    each = POINTS // PARTS
    kind = torch.arange(PARTS).repeat_interleave(each)
    turn, along = 6.283 * torch.rand(CLOUDS, POINTS), 2 * torch.rand(CLOUDS, POINTS) - 1
    ball = F.normalize(torch.randn(CLOUDS, POINTS, 3), dim=2) * 0.5
    flat = torch.stack([along, along.roll(1, 1), 0 * along], 2)
    stick = torch.stack([0 * along, 0 * along, 1.2 * along], 2)
    ring = torch.stack([turn.cos(), 0 * turn, turn.sin()], 2) * 0.8
    shapes = torch.stack([flat, stick, ball, ring], 2)[:, range(POINTS), kind]
    centre = torch.randn(CLOUDS, PARTS, 3).mul(0.8)[:, kind]
    order, axes = torch.randperm(POINTS), torch.linalg.qr(torch.randn(CLOUDS, 3, 3))[0]
    coord = ((shapes + centre + 0.03 * torch.randn_like(shapes)) @ axes)[:, order]
    feat = 0.5 * torch.randn(CLOUDS, POINTS, COLOURS) + torch.sin(kind[order, None] + torch.arange(COLOURS))
    given = {"coord": coord, "feat": feat, "start": torch.randint(1, POINTS, (CLOUDS,))}
    return given, {"part": kind[order].expand(CLOUDS, -1), "way": ((centre @ axes)[:, order] - coord).mT}


def parted(outputs: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
    way = F.smooth_l1_loss(outputs["offset"], target["way"].to(outputs["offset"]))
    return 0.4 * (F.cross_entropy(outputs["logits"], target["part"], label_smoothing=0.1) + way)
