"""A small Monodepth2: depth and poses of three frames, and the loss of one frame seen from the others."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIGH, WIDE, PICTURES = 16, 24, 2
ENCODED, DECODED, POSED = (10, 10, 16), (6, 9, 12), (14, 18, 22)
NEAR, FAR, SMOOTHNESS = 0.1, 100.0, 0.1


class BasicBlock(nn.Module):
    def __init__(self, inplanes: int, planes: int, stride: int = 1):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False), nn.BatchNorm2d(planes)
        self.relu = nn.ReLU()
        self.conv2, self.bn2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False), nn.BatchNorm2d(planes)
        shortcut = nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes)
        self.downsample = nn.Sequential(*shortcut) if stride != 1 else None

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(out + (x if self.downsample is None else self.downsample(x)))


class ResnetEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        a, b, c = ENCODED
        self.conv1, self.bn1 = nn.Conv2d(3, a, 7, 2, 3, bias=False), nn.BatchNorm2d(a)
        self.relu, self.maxpool = nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(BasicBlock(a, b), BasicBlock(b, b))
        self.layer2 = nn.Sequential(BasicBlock(b, c, 2), BasicBlock(c, c))

    def forward(self, input_image: Tensor) -> list[Tensor]:
        x = (input_image - 0.45) / 0.225
        features = [self.relu(self.bn1(self.conv1(x)))]
        features.append(self.layer1(self.maxpool(features[-1])))
        return [*features, self.layer2(features[-1])]


class Conv3x3(nn.Module):
    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.pad, self.conv = nn.ReflectionPad2d(1), nn.Conv2d(in_channels, out_channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.pad(x))


class ConvBlock(nn.Module):
    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.conv, self.nonlin = Conv3x3(in_channels, out_channels), nn.ELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.nonlin(self.conv(x))


class DepthDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        layers, width = [], ENCODED[-1]
        for i in (2, 1, 0):
            joined = DECODED[i] + (ENCODED[i - 1] if i else 0)
            layers += [ConvBlock(width, DECODED[i]), ConvBlock(joined, width := DECODED[i])]
        self.decoder = nn.ModuleList([*layers, Conv3x3(DECODED[0], 1), Conv3x3(DECODED[1], 1)])
        self.sigmoid = nn.Sigmoid()

    def forward(self, features: list[Tensor]) -> list[Tensor]:
        disps, x = [None, None], features[-1]
        for i in (2, 1, 0):
            x = F.interpolate(self.decoder[4 - 2 * i](x), scale_factor=2, mode="nearest")
            x = self.decoder[5 - 2 * i](torch.cat([x, features[i - 1]], 1) if i else x)
            if i < 2:
                disps[i] = self.sigmoid(self.decoder[6 + i](x))
        return disps


class PoseCNN(nn.Module):
    def __init__(self):
        super().__init__()
        a, b, c = POSED
        layers = nn.Conv2d(6, a, 7, 2, 3), nn.Conv2d(a, b, 5, 2, 2), nn.Conv2d(b, c, 3, 2, 1)
        self.net, self.relu, self.pose_conv = nn.ModuleList(layers), nn.ReLU(), nn.Conv2d(c, 6, 1)
        nn.init.normal_(self.pose_conv.weight, std=2.0), nn.init.normal_(self.pose_conv.bias, std=2.0)

    def forward(self, out: Tensor) -> tuple[Tensor, Tensor]:
        for conv in self.net:
            out = self.relu(conv(out))
        out = 0.01 * self.pose_conv(out).mean(3).mean(2).view(-1, 1, 6)
        return out[..., :3], out[..., 3:]


class BackprojectDepth(nn.Module):
    def __init__(self):
        super().__init__()
        y, x = torch.meshgrid(torch.arange(HIGH), torch.arange(WIDE), indexing="ij")
        self.register_buffer("pix_coords", torch.stack([x, y, torch.ones_like(x)]).flatten(1).float()[None])

    def forward(self, depth: Tensor, inv_k: Tensor) -> Tensor:
        cam_points = depth.flatten(2) * torch.matmul(inv_k[:, :3, :3], self.pix_coords)
        return torch.cat([cam_points, torch.ones_like(cam_points[:, :1])], 1)


class Project3D(nn.Module):
    def forward(self, points: Tensor, k: Tensor, t: Tensor) -> Tensor:
        cam_points = torch.matmul(torch.matmul(k, t)[:, :3], points)
        pix_coords = cam_points[:, :2] / (cam_points[:, 2:] + 1e-7)
        pix_coords = pix_coords.unflatten(2, (HIGH, WIDE)).permute(0, 2, 3, 1)
        return (pix_coords / pix_coords.new_tensor([WIDE - 1, HIGH - 1]) - 0.5) * 2


class SSIM(nn.Module):
    def __init__(self):
        super().__init__()
        self.pool, self.refl, self.C1, self.C2 = nn.AvgPool2d(3, 1), nn.ReflectionPad2d(1), 0.01**2, 0.03**2

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = self.refl(x), self.refl(y)
        mu_x, mu_y = self.pool(x), self.pool(y)
        sigma_x, sigma_y = self.pool(x**2) - mu_x**2, self.pool(y**2) - mu_y**2
        sigma_xy = self.pool(x * y) - mu_x * mu_y
        n = (2 * mu_x * mu_y + self.C1) * (2 * sigma_xy + self.C2)
        d = (mu_x**2 + mu_y**2 + self.C1) * (sigma_x + sigma_y + self.C2)
        return torch.clamp((1 - n / d) / 2, 0, 1)


def transformation_from_parameters(axisangle: Tensor, translation: Tensor, invert: bool) -> Tensor:
    angle = torch.norm(axisangle, 2, 2, True)
    x, y, z = (axisangle / (angle + 1e-7))[:, 0].unbind(1)
    ca, sa = angle.cos()[:, 0, 0], angle.sin()[:, 0, 0]
    c, o = 1 - ca, torch.zeros_like(ca)
    rows = [x * x * c + ca, x * y * c - z * sa, z * x * c + y * sa, o]
    rows += [x * y * c + z * sa, y * y * c + ca, y * z * c - x * sa, o]
    rows += [z * x * c - y * sa, y * z * c + x * sa, z * z * c + ca, o, o, o, o, o + 1]
    rot, t = torch.stack(rows, 1).view(-1, 4, 4), -translation if invert else translation
    move = torch.eye(4).to(rot) + F.pad(t.transpose(1, 2), (3, 0, 0, 1))
    return torch.matmul(rot.transpose(1, 2), move) if invert else torch.matmul(move, rot)


def get_smooth_loss(disp: Tensor, img: Tensor) -> Tensor:
    across, down = (disp.diff(dim=i).abs() * (-img.diff(dim=i).abs().mean(1, True)).exp() for i in (3, 2))
    return across.mean((1, 2, 3)) + down.mean((1, 2, 3))


class Monodepth(nn.Module):
    """Three frames, the noise that breaks ties, intrinsics -> disparities, poses and losses by scale."""

    def __init__(self):
        super().__init__()
        self.encoder, self.depth, self.pose = ResnetEncoder(), DepthDecoder(), PoseCNN()
        self.backproject_depth, self.project_3d, self.ssim = BackprojectDepth(), Project3D(), SSIM()
        for norm in (x for x in self.modules() if isinstance(x, nn.BatchNorm2d)):
            nn.init.uniform_(norm.weight, 0.6, 1.4), nn.init.normal_(norm.bias, std=0.2)
            nn.init.normal_(norm.running_mean, std=0.2), nn.init.uniform_(norm.running_var, 0.5, 1.5)

    def compute_reprojection_loss(self, pred: Tensor, target: Tensor) -> Tensor:
        l1_loss, ssim_loss = (target - pred).abs().mean(1, True), self.ssim(pred, target).mean(1, True)
        return 0.85 * ssim_loss + 0.15 * l1_loss

    def forward(self, color: Tensor, before: Tensor, after: Tensor, noise: Tensor, k: Tensor, inv_k: Tensor):
        disps, sources = self.depth(self.encoder(color)), (before, after)
        first = transformation_from_parameters(*self.pose(torch.cat([before, color], 1)), True)
        poses = first, transformation_from_parameters(*self.pose(torch.cat([color, after], 1)), False)
        identity = torch.cat([self.compute_reprojection_loss(x, color) for x in sources], 1)
        losses = []
        for scale, disp in enumerate(disps):
            full = F.interpolate(disp, [HIGH, WIDE], mode="bilinear", align_corners=False)
            points = self.backproject_depth(1 / (1 / FAR + (1 / NEAR - 1 / FAR) * full), inv_k)
            grids = [self.project_3d(points, k, t) for t in poses]
            pairs = zip(sources, grids, strict=True)
            warped = [F.grid_sample(x, g, padding_mode="border", align_corners=True) for x, g in pairs]
            reprojection = torch.cat([self.compute_reprojection_loss(x, color) for x in warped], 1)
            combined = torch.cat([identity + noise[:, scale] * 0.00001, reprojection], 1)
            norm_disp = disp / (disp.mean(2, True).mean(3, True) + 1e-7)
            smooth = get_smooth_loss(norm_disp, F.interpolate(color, disp.shape[2:], mode="area"))
            losses.append(combined.min(1)[0].mean((1, 2)) + SMOOTHNESS * smooth / 2**scale)
        return *disps, torch.stack(poses, 1), torch.stack(losses, 1)


def drive() -> tuple[dict[str, Tensor], Tensor]:
    """Waves on a slope, which move to the side by their disparity, with the intrinsics of the camera."""
    down, across = torch.arange(HIGH)[:, None] / HIGH, torch.arange(WIDE) / 1.0
    disp = 0.2 + 0.5 * down + 0.1 * torch.sin(across / 5 + 6 * torch.rand(PICTURES, 1, 1, 1))
    tone, phase = torch.arange(3)[:, None, None], 6 * torch.rand(PICTURES, 1, 1, 1)
    frames = []
    for move in (0, -1, 1):
        x = across + 2 * move * disp
        wave = torch.sin(0.9 * x + 5 * down + phase + tone) + torch.cos(0.4 * x - 9 * down + 2 * phase)
        frames.append((0.5 + 0.2 * wave + 0.02 * torch.randn_like(wave)).clamp(0.01, 0.99))
    k = torch.eye(4).repeat(PICTURES, 1, 1)
    k[:, 0, 0], k[:, 1, 1] = 0.58 * WIDE + torch.rand(PICTURES), 0.95 * HIGH + torch.rand(PICTURES)
    k[:, 0, 2], k[:, 1, 2] = WIDE / 2, HIGH / 2
    names, noise = ("color", "before", "after"), torch.randn(PICTURES, 2, 2, HIGH, WIDE)
    return {**dict(zip(names, frames, strict=True)), "noise": noise, "k": k, "inv_k": k.inverse()}, disp


def seen_again(outputs: tuple[Tensor, ...], disp: Tensor) -> Tensor:
    return 4 * outputs[3].mean() + 0.1 * (outputs[0] - disp).abs().mean()
