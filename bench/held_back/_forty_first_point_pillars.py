"""A small PointPillars: points by pillar, a canvas, blocks and their upsampling, anchor heads."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIGH, WIDE, PILLARS, POINTS, FRAMES = 16, 24, 26, 7, 2
CLASSES, TURNS, CODE = 3, 2, 7
VOXEL, START = (0.375, 0.5, 3.0), (-1.5, -4.0, -2.0)
FILTERS, BLOCKS, LAYERS, UPSAMPLED = (12, 14), (16, 20, 24), (1, 2, 1), (10, 12, 13)


class PFNLayer(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, last_layer: bool = False):
        super().__init__()
        self.last_vfe = last_layer
        out_channels = out_channels if last_layer else out_channels // 2
        self.linear = nn.Linear(in_channels, out_channels, bias=False)
        self.norm = nn.BatchNorm1d(out_channels, eps=1e-3, momentum=0.01)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.linear(inputs)
        x = F.relu(self.norm(x.permute(0, 2, 1)).permute(0, 2, 1))
        x_max = torch.max(x, dim=1, keepdim=True)[0]
        if self.last_vfe:
            return x_max
        return torch.cat([x, x_max.repeat(1, inputs.shape[1], 1)], dim=2)


class PillarVFE(nn.Module):
    def __init__(self):
        super().__init__()
        widths = (10, *FILTERS)
        last = len(FILTERS) - 1
        layers = (PFNLayer(widths[i], widths[i + 1], i == last) for i in range(len(FILTERS)))
        self.pfn_layers = nn.ModuleList(layers)
        self.register_buffer("voxel_size", torch.tensor(VOXEL))
        self.register_buffer("offset", torch.tensor(VOXEL) / 2 + torch.tensor(START))

    def get_paddings_indicator(self, actual_num: Tensor, max_num: int) -> Tensor:
        return actual_num[:, None] > torch.arange(max_num, device=actual_num.device)

    def forward(self, voxels: Tensor, num_points: Tensor, coords: Tensor) -> Tensor:
        points_mean = voxels[:, :, :3].sum(dim=1, keepdim=True) / num_points.view(-1, 1, 1)
        f_cluster = voxels[:, :, :3] - points_mean
        centre = coords[:, [2, 1, 0]] * self.voxel_size + self.offset
        f_center = voxels[:, :, :3] - centre[:, None]
        features = torch.cat([voxels, f_cluster, f_center], dim=-1)
        mask = self.get_paddings_indicator(num_points, features.shape[1])
        features = features * mask[..., None].to(features)
        for pfn in self.pfn_layers:
            features = pfn(features)
        return features.squeeze(1)


class PointPillarScatter(nn.Module):
    def __init__(self, num_bev_features: int):
        super().__init__()
        self.num_bev_features, self.ny, self.nx = num_bev_features, HIGH, WIDE

    def forward(self, pillar_features: Tensor, coords: Tensor) -> Tensor:
        batch = []
        for pillars, this in zip(pillar_features, coords, strict=True):
            canvas = pillars.new_zeros(self.num_bev_features, self.ny * self.nx)
            canvas[:, this[:, 0] + this[:, 1] * self.nx + this[:, 2]] = pillars.t()
            batch.append(canvas)
        return torch.stack(batch).view(-1, self.num_bev_features, self.ny, self.nx)


def norm_relu(channels: int) -> list[nn.Module]:
    return [nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01), nn.ReLU()]


class BaseBEVBackbone(nn.Module):
    def __init__(self, input_channels: int):
        super().__init__()
        self.blocks, self.deblocks = nn.ModuleList(), nn.ModuleList()
        for i, (width, count, up) in enumerate(zip(BLOCKS, LAYERS, UPSAMPLED, strict=True)):
            layers = [nn.ZeroPad2d(1), nn.Conv2d(input_channels, width, 3, stride=2, bias=False)]
            layers += norm_relu(width)
            for _ in range(count):
                layers += [nn.Conv2d(width, width, 3, padding=1, bias=False), *norm_relu(width)]
            self.blocks.append(nn.Sequential(*layers))
            spread = nn.ConvTranspose2d(width, up, 2**i, stride=2**i, bias=False)
            self.deblocks.append(nn.Sequential(spread, *norm_relu(up)))
            input_channels = width

    def forward(self, x: Tensor) -> Tensor:
        ups = []
        for block, deblock in zip(self.blocks, self.deblocks, strict=True):
            x = block(x)
            ups.append(deblock(x))
        return torch.cat(ups, dim=1)


class AnchorHeadSingle(nn.Module):
    def __init__(self, input_channels: int):
        super().__init__()
        self.conv_cls = nn.Conv2d(input_channels, TURNS * CLASSES, 1)
        self.conv_box = nn.Conv2d(input_channels, TURNS * CODE, 1)
        self.conv_dir_cls = nn.Conv2d(input_channels, TURNS * 2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        cls_preds = self.conv_cls(x).permute(0, 2, 3, 1).reshape(len(x), -1, CLASSES)
        box_preds = self.conv_box(x).permute(0, 2, 3, 1).reshape(len(x), -1, CODE)
        dir_cls_preds = self.conv_dir_cls(x).permute(0, 2, 3, 1).reshape(len(x), -1, 2)
        return cls_preds, box_preds, dir_cls_preds


class PointPillar(nn.Module):
    """Points [N, P, T, 4], counts [N, P] and cells (z, y, x) [N, P, 3] -> classes, boxes, directions."""

    def __init__(self):
        super().__init__()
        self.vfe, self.map_to_bev_module = PillarVFE(), PointPillarScatter(FILTERS[-1])
        self.backbone_2d = BaseBEVBackbone(FILTERS[-1])
        self.dense_head = AnchorHeadSingle(sum(UPSAMPLED))
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                nn.init.normal_(module.weight, 1, 0.2), nn.init.normal_(module.bias, std=0.2)
                nn.init.normal_(module.running_mean, std=0.2), nn.init.uniform_(module.running_var, 0.5, 1.5)
            elif isinstance(module, nn.Conv2d) and module.bias is not None:
                nn.init.normal_(module.weight, std=0.1), nn.init.normal_(module.bias, -0.5, 0.3)

    def forward(self, voxels: Tensor, voxel_num_points: Tensor, voxel_coords: Tensor) -> tuple[Tensor, ...]:
        flat = (each.flatten(0, 1) for each in (voxels, voxel_num_points, voxel_coords))
        features = self.vfe(*flat).unflatten(0, voxels.shape[:2])
        return self.dense_head(self.backbone_2d(self.map_to_bev_module(features, voxel_coords)))


def frame() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two things among single points; the cells by them are of their class, box and direction."""
    cells = torch.zeros(HIGH, WIDE)
    target = torch.zeros(HIGH // 2, WIDE // 2, TURNS, 2 + CODE)
    for _ in range(2):
        y, x = int(torch.randint(2, HIGH - 3, ())), int(torch.randint(2, WIDE - 3, ()))
        cells[y - 1 : y + 3, x - 1 : x + 2] += 2
        label, angle = torch.randint(1, CLASSES + 1, ()), math.pi * (2 * torch.rand(()) - 1)
        target[y // 2, x // 2, :, 0] = label
        target[y // 2, x // 2, :, 1:CODE] = 0.4 * torch.randn(CODE - 1) + 0.1 * label
        target[y // 2, x // 2, :, CODE] = angle - math.pi / 2 * torch.arange(TURNS)
        target[y // 2, x // 2, :, CODE + 1] = (angle > 0).float()
        target[y // 2, x // 2 + 1, :, 0] = -1
    chosen = (cells + torch.rand(HIGH, WIDE)).flatten().topk(PILLARS).indices
    coords = torch.stack([0 * chosen, chosen // WIDE, chosen % WIDE], 1)
    number = torch.randint(1, POINTS + 1, (PILLARS,))
    within = torch.rand(PILLARS, POINTS, 3) * torch.tensor((1, 1, 0.5))
    place = (coords[:, None, [2, 1, 0]] + within) * torch.tensor(VOXEL) + torch.tensor(START)
    points = torch.cat([place, torch.rand(PILLARS, POINTS, 1)], 2)
    return points * (torch.arange(POINTS) < number[:, None])[..., None], number, coords, target.flatten(0, 2)


def drive() -> tuple[dict[str, Tensor], Tensor]:
    """Frames, and for each anchor its class (0 for none, -1 for either), box and direction."""
    voxels, number, coords, target = map(torch.stack, zip(*(frame() for _ in range(FRAMES)), strict=True))
    return {"voxels": voxels, "voxel_num_points": number, "voxel_coords": coords}, target


def anchors_loss(outputs: tuple[Tensor, Tensor, Tensor], target: Tensor) -> Tensor:
    """Focal loss, smooth L1 of sines of differences and direction's cross entropy by positives, by 20."""
    classes, boxes, directions = outputs
    label, wanted, side = target[..., 0], target[..., 1:-1], target[..., -1].long()
    positive, cared = (label > 0).to(boxes), (label >= 0).to(boxes)
    share = positive / positive.sum(1, keepdim=True).clamp(min=1)
    hot = F.one_hot(label.long().clamp(min=0), CLASSES + 1)[..., 1:].to(boxes)
    p = classes.sigmoid()
    focal = hot * 0.25 * (1 - p) ** 2 + (1 - hot) * 0.75 * p**2
    focal = focal * F.binary_cross_entropy_with_logits(classes, hot, reduction="none")
    cost = focal.sum(2) * cared / positive.sum(1, keepdim=True).clamp(min=1)
    a, b = boxes[..., -1:], wanted[..., -1:]
    boxes = torch.cat([boxes[..., :-1], a.sin() * b.cos()], 2)
    wanted = torch.cat([wanted[..., :-1], a.cos() * b.sin()], 2)
    cost = cost + 2 * share * F.smooth_l1_loss(boxes, wanted, beta=1 / 9, reduction="none").sum(2)
    cost = cost + 0.2 * share * F.cross_entropy(directions.transpose(1, 2), side, reduction="none")
    return cost.sum(1).mean() / 20
