"""A small PointNet++ for part segmentation, with a head for the parts and one for the class."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

OBJECTS, POINTS, CLASSES = 4, 40, 3
OWNER = (0, 0, 1, 1, 1, 2, 2)  # the class that each part belongs to
FIRST, COUNT, PARTS = (0, 2, 5), (2, 3, 2), len(OWNER)


def square_distance(src: Tensor, dst: Tensor) -> Tensor:
    """[B, N, 3] and [B, M, 3] -> [B, N, M]."""
    return (src[:, :, None] - dst[:, None]).square().sum(-1)


def index_points(points: Tensor, idx: Tensor) -> Tensor:
    """[B, N, C] and [B, S] or [B, S, K] -> [B, S, C] or [B, S, K, C]."""
    rows = torch.arange(len(points), device=points.device).view(-1, *[1] * (idx.dim() - 1))
    return points[rows, idx, :]


def farthest_point_sample(xyz: Tensor, npoint: int) -> Tensor:
    b, n, _ = xyz.shape
    centroids = torch.zeros(b, npoint, dtype=torch.long, device=xyz.device)
    distance = xyz.new_full((b, n), 1e10)
    farthest = torch.zeros(b, dtype=torch.long, device=xyz.device)
    rows = torch.arange(b, device=xyz.device)
    for i in range(npoint):
        centroids[:, i] = farthest
        centroid = xyz[rows, farthest][:, None]
        distance = torch.minimum(distance, (xyz - centroid).square().sum(-1))
        farthest = distance.max(-1)[1]
    return centroids


def query_ball_point(radius: float, nsample: int, xyz: Tensor, new_xyz: Tensor) -> Tensor:
    """The first points within the ball of each centre, padded by the very first."""
    b, n, _ = xyz.shape
    group_idx = torch.arange(n, device=xyz.device).repeat(b, new_xyz.shape[1], 1)
    group_idx[square_distance(new_xyz, xyz) > radius**2] = n
    group_idx = group_idx.sort(-1)[0][:, :, :nsample]
    group_first = group_idx[:, :, :1].expand_as(group_idx)
    return torch.where(group_idx == n, group_first, group_idx)


def sample_and_group(npoint: int, radius: float, nsample: int, xyz: Tensor, points: Tensor):
    new_xyz = index_points(xyz, farthest_point_sample(xyz.detach(), npoint))
    idx = query_ball_point(radius, nsample, xyz.detach(), new_xyz.detach())
    grouped_xyz_norm = index_points(xyz, idx) - new_xyz[:, :, None]
    return new_xyz, torch.cat([grouped_xyz_norm, index_points(points, idx)], -1)


def sample_and_group_all(xyz: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    return xyz.new_zeros(len(xyz), 1, 3), torch.cat([xyz, points], -1)[:, None]


class PointNetSetAbstraction(nn.Module):
    def __init__(self, npoint, radius, nsample, in_channel: int, mlp: list[int], group_all: bool):
        super().__init__()
        self.npoint, self.radius, self.nsample, self.group_all = npoint, radius, nsample, group_all
        self.mlp_convs, self.mlp_bns = nn.ModuleList(), nn.ModuleList()
        for out_channel in mlp:
            self.mlp_convs.append(nn.Conv2d(in_channel, out_channel, 1))
            self.mlp_bns.append(nn.BatchNorm2d(out_channel))
            in_channel = out_channel

    def forward(self, xyz: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
        """[B, 3, N] and [B, D, N] -> [B, 3, S] and [B, D', S]."""
        xyz, points = xyz.permute(0, 2, 1), points.permute(0, 2, 1)
        if self.group_all:
            new_xyz, new_points = sample_and_group_all(xyz, points)
        else:
            new_xyz, new_points = sample_and_group(self.npoint, self.radius, self.nsample, xyz, points)
        new_points = new_points.permute(0, 3, 2, 1)  # [B, C, K, S]
        for conv, bn in zip(self.mlp_convs, self.mlp_bns, strict=True):
            new_points = F.relu(bn(conv(new_points)))
        return new_xyz.permute(0, 2, 1), new_points.max(2)[0]


class PointNetFeaturePropagation(nn.Module):
    def __init__(self, in_channel: int, mlp: list[int]):
        super().__init__()
        self.mlp_convs, self.mlp_bns = nn.ModuleList(), nn.ModuleList()
        for out_channel in mlp:
            self.mlp_convs.append(nn.Conv1d(in_channel, out_channel, 1))
            self.mlp_bns.append(nn.BatchNorm1d(out_channel))
            in_channel = out_channel

    def forward(self, xyz1: Tensor, xyz2: Tensor, points1: Tensor, points2: Tensor) -> Tensor:
        """The features [B, D, S] of the points ``xyz2`` carried to ``xyz1``, [B, 3, N]: [B, D', N]."""
        xyz1, xyz2, points2 = xyz1.permute(0, 2, 1), xyz2.permute(0, 2, 1), points2.permute(0, 2, 1)
        if xyz2.shape[1] == 1:
            interpolated_points = points2.repeat(1, xyz1.shape[1], 1)
        else:
            dists, idx = square_distance(xyz1, xyz2).sort(-1)
            dist_recip = 1 / (dists[:, :, :3] + 1e-8)
            weight = dist_recip / dist_recip.sum(2, keepdim=True)
            interpolated_points = (index_points(points2, idx[:, :, :3]) * weight[..., None]).sum(2)
        new_points = torch.cat([points1.permute(0, 2, 1), interpolated_points], -1).permute(0, 2, 1)
        for conv, bn in zip(self.mlp_convs, self.mlp_bns, strict=True):
            new_points = F.relu(bn(conv(new_points)))
        return new_points


class PointNet2(nn.Module):
    """Points and normals, [B, 6, N], and the class: logarithms of [B, N, parts] and of [B, classes]."""

    def __init__(self):
        super().__init__()
        self.sa1 = PointNetSetAbstraction(14, 0.5, 5, 6 + 3, [16, 18, 24], False)
        self.sa2 = PointNetSetAbstraction(6, 0.9, 4, 24 + 3, [26, 28, 36], False)
        self.sa3 = PointNetSetAbstraction(None, None, None, 36 + 3, [40, 52], True)
        self.fp3 = PointNetFeaturePropagation(52 + 36, [44, 34])
        self.fp2 = PointNetFeaturePropagation(34 + 24, [38, 30])
        self.fp1 = PointNetFeaturePropagation(30 + CLASSES + 6 + 3, [32, 22])
        self.conv1 = nn.Conv1d(22, 20, 1)
        self.bn1 = nn.BatchNorm1d(20)
        self.conv2 = nn.Conv1d(20, PARTS, 1)
        self.fc1 = nn.Linear(52, 21)
        self.fc2 = nn.Linear(21, CLASSES)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                nn.init.normal_(module.weight, 1, 0.2)
                nn.init.normal_(module.bias, 0, 0.2)
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.5, 1.5)

    def forward(self, xyz: Tensor, cls_label: Tensor) -> tuple[Tensor, Tensor]:
        l0_points, l0_xyz = xyz, xyz[:, :3]
        l1_xyz, l1_points = self.sa1(l0_xyz, l0_points)
        l2_xyz, l2_points = self.sa2(l1_xyz, l1_points)
        l3_xyz, l3_points = self.sa3(l2_xyz, l2_points)
        l2_points = self.fp3(l2_xyz, l3_xyz, l2_points, l3_points)
        l1_points = self.fp2(l1_xyz, l2_xyz, l1_points, l2_points)
        cls_label_one_hot = cls_label[:, :, None].repeat(1, 1, xyz.shape[2])
        l0_points = torch.cat([cls_label_one_hot, l0_xyz, l0_points], 1)
        l0_points = self.fp1(l0_xyz, l1_xyz, l0_points, l1_points)
        x = self.conv2(F.relu(self.bn1(self.conv1(l0_points))))
        y = self.fc2(F.relu(self.fc1(l3_points[:, :, 0])))
        return F.log_softmax(x, 1).permute(0, 2, 1), F.log_softmax(y, -1)


def objects() -> tuple[dict[str, Tensor], Tensor]:
    """Objects of two or three ellipsoids, in the unit ball, with their normals; the part of each point."""
    label = torch.randint(CLASSES, (OBJECTS,))
    first, count = torch.tensor(FIRST)[label, None], torch.tensor(COUNT)[label, None]
    part = first + (torch.rand(OBJECTS, POINTS) * count).long()
    turn = torch.arange(PARTS)[:, None] * torch.tensor([1.0, 2.3, 3.1])
    middle, radii = turn.sin(), 0.6 + 0.3 * turn.cos()
    ray = F.normalize(torch.randn(OBJECTS, POINTS, 3), dim=-1)
    xyz = middle[part] + radii[part] * ray + 0.02 * torch.randn(OBJECTS, POINTS, 3)
    xyz = xyz - xyz.mean(1, True)
    xyz = xyz / xyz.norm(dim=-1).amax(1)[:, None, None]
    points = torch.cat([xyz, F.normalize(ray / radii[part], dim=-1)], -1)
    return {"xyz": points.transpose(1, 2).contiguous(), "cls_label": F.one_hot(label, CLASSES).to(xyz)}, part


def parts_and_classes(outputs: tuple[Tensor, Tensor], part: Tensor) -> Tensor:
    """Half the likelihood of the parts, and a quarter of that of the class."""
    label = torch.tensor(OWNER, device=part.device)[part[:, 0]]
    return F.nll_loss(outputs[0].flatten(0, 1), part.flatten()) / 2 + F.nll_loss(outputs[1], label) / 4
