"""Two ports of a small Monodepth2: a tree with the channels last, and flat code of packed kernels."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fifty_second_mono_depth import FAR, NEAR, SMOOTHNESS, Monodepth, drive, seen_again
from bench.held_back._fourth_ports import Port, Rows, leaf, spatial, wrong
from bench.held_back._sixth_ports import few

task = few("fifty_second_mono_depth", Monodepth, drive, seen_again)


class Normed(nn.Module):
    def __init__(self, conv: nn.Conv2d, norm: nn.Module):
        super().__init__()
        self.kernel, self.norm, self.stride = leaf(conv.weight), Rows(norm), conv.stride[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(spatial(x, self.kernel, stride=self.stride))


class Residual(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        self.up, self.out = Normed(block.conv1, block.bn1), Normed(block.conv2, block.bn2)
        self.side, self.outside = Normed(*block.downsample) if block.downsample else nn.Identity(), False

    def forward(self, x: Tensor) -> Tensor:
        y = self.out(self.up(x).clamp(min=0))
        return y.relu() + self.side(x) if self.outside else (y + self.side(x)).relu()


class Mirrored(nn.Module):
    """A convolution of [N, H, W, C] with mirrored edges, its kernel split by what is joined."""

    def __init__(self, conv: nn.Conv2d, *widths: int):
        super().__init__()
        kernels = conv.weight.split(widths or conv.in_channels, 1)
        self.kernels, self.offset, self.zeros = nn.ParameterList(map(leaf, kernels)), leaf(conv.bias), False

    def forward(self, *xs: Tensor) -> Tensor:
        y = self.offset
        for x, kernel in zip(xs, self.kernels, strict=True):
            for i in () if self.zeros else (1, 2):
                x = torch.cat([x.narrow(i, 1, 1), x, x.narrow(i, x.shape[i] - 2, 1)], i)
            y = y + (spatial(x, kernel) if self.zeros else spatial(x, kernel)[:, 1:-1, 1:-1])
        return y


def turned(v: Tensor, t: Tensor, back: bool) -> Tensor:
    angle = v.square().sum(1).sqrt()[:, None, None]
    axis = v / (angle[:, 0] + 1e-7)
    cross = torch.linalg.cross(torch.eye(3).to(v)[None], axis[:, None])
    outer = axis[:, :, None] * axis[:, None]
    rot = angle.cos() * torch.eye(3).to(v) + angle.sin() * cross + (1 - angle.cos()) * outer
    rot, t = (rot.mT, -(rot.mT @ t[:, :, None])) if back else (rot, t[:, :, None])
    return torch.cat([torch.cat([rot, t], 2), v.new_tensor([0, 0, 0, 1.0]).expand(len(v), 1, 4)], 1)


def likeness(x: Tensor, y: Tensor, held: bool = False) -> Tensor:
    a, b = (F.pad(z, [1] * 4, mode="reflect").unfold(2, 3, 1).unfold(3, 3, 1).flatten(4) for z in (x, y))
    m, n = (z.mean(4).detach() if held else z.mean(4) for z in (a, b))
    both, over = (a * b).mean(4) - m * n, a.square().mean(4) + b.square().mean(4) - m * m - n * n
    alike = (2 * m * n + 1e-4) * (2 * both + 9e-4) / ((m * m + n * n + 1e-4) * (over + 9e-4))
    return (0.85 * (0.5 - alike / 2).clamp(0, 1) + 0.15 * (x - y).abs()).mean(1)


def judged(port: Port, disps: list, poses: list, color: Tensor, sources: list, noise, k, inv_k) -> tuple:
    fault, (high, wide), losses = port.fault, color.shape[2:], []
    y, x = torch.meshgrid(torch.arange(high).to(k), torch.arange(wide).to(k), indexing="ij")
    rays = torch.einsum("nij,jhw->nihw", inv_k[:, :3, :3], torch.stack([x, y, x * 0 + 1]))
    less = 0 if fault == "mono_depth_projection_divides_by_the_whole_size" else 1
    size = k.new_tensor([wide - less, high - less])
    halved = 1 if fault == "mono_depth_second_smoothness_not_halved" else 2
    held = fault == "mono_depth_structure_means_held_constant"
    for s, disp in enumerate(disps):
        full = F.interpolate(disp, (high, wide), mode="bilinear") if s else disp
        space, seen = rays / (full / NEAR + (1 - full) / FAR), []
        for i, (source, t) in enumerate(zip(sources, poses, strict=True)):
            moved = torch.einsum("nij,njhw->nihw", t[:, :3, :3], space) + t[:, :3, 3, None, None]
            flat = torch.einsum("nij,njhw->nhwi", k[:, :3, :3], moved) + k[:, None, None, :3, 3]
            grid = 2 * flat[..., :2] / (flat[..., 2:] + 1e-7) / size - 1
            warped = F.grid_sample(source, grid, padding_mode="border", align_corners=True)
            seen += [likeness(source, color, held) + 1e-5 * noise[:, s, i], likeness(warped, color, held)]
        best = torch.stack(seen).amin(0).mean((1, 2))
        even, small = disp / (disp.mean((1, 2, 3), True) + 1e-7), F.avg_pool2d(color, 2**s)
        for axis in (2, 3):
            rough = (even.diff(dim=axis).abs() / small.diff(dim=axis).abs().mean(1, True).exp()).mean(
                (1, 2, 3)
            )
            best = best + SMOOTHNESS * rough / halved**s
        losses.append(best)
    return *disps, torch.stack(poses, 1), torch.stack(losses, 1)


class TreeDepth(Port):
    def take(self, model: Monodepth) -> None:
        e, d, fault = model.encoder, model.depth.decoder, self.fault
        self.stem = Normed(e.conv1, e.bn1)
        self.levels = nn.ModuleList(nn.Sequential(*map(Residual, x)) for x in (e.layer1, e.layer2))
        joined = {1: (12, 10), 3: (9, 10)}
        self.rises = nn.ModuleList(Mirrored(d[i].conv.conv, *joined.get(i, ())) for i in range(6))
        self.heads = nn.ModuleList(Mirrored(x.conv) for x in (d[7], d[6]))
        net = [*model.pose.net, model.pose.pose_conv]
        self.kernels = nn.ParameterList(leaf(x.weight) for x in net)
        self.offsets = nn.ParameterList(leaf(x.bias) for x in net)
        self.levels[0][1].outside = fault == "mono_depth_second_block_rectified_before_its_shortcut"
        if fault == "mono_depth_third_block_keeps_the_biased_variance":
            self.levels[1][0].out.norm.shared = 1e-9
        self.rises[3].zeros = fault == "mono_depth_fourth_decoder_layer_padded_with_zeros"
        self.stem.norm.eps = 1e-3 if fault == "mono_depth_first_norm_with_another_epsilon" else 1e-5

    def motion(self, y: Tensor, back: bool) -> Tensor:
        for w, b in zip(self.kernels[:3], self.offsets[:3], strict=True):
            y = spatial(y, w, b, 2).relu()
        y = 0.01 * (y.mean((1, 2)) @ self.kernels[3].flatten(1).T + self.offsets[3])
        return turned(*y.split(3, 1), back)

    def forward(self, color, before, after, noise, k, inv_k) -> tuple[Tensor, ...]:
        last = [x.movedim(1, 3) for x in (before, color, after)]
        one = self.stem((last[1] - 0.45) / 0.225).relu()
        pooled = F.pad(one, (0, 0, 1, 1, 1, 1)).unfold(1, 3, 2).unfold(2, 3, 2).amax((4, 5))
        x, disps = self.levels[1](two := self.levels[0](pooled)), []
        for i, skip in enumerate(([two], [one], [])):
            x = F.elu(self.rises[2 * i](x)).repeat_interleave(2, 1).repeat_interleave(2, 2)
            x = F.elu(self.rises[2 * i + 1](x, *skip))
            disps = [self.heads[i - 1](x).sigmoid().movedim(3, 1), *disps] if i else disps
        poses = [self.motion(torch.cat(last[i : i + 2], 3), i == 0) for i in (0, 1)]
        return judged(self, disps, poses, color, [before, after], noise, k, inv_k)


class FlatDepth(Port):
    def take(self, model: Monodepth) -> None:
        e, pairs = model.encoder, [(model.encoder.conv1, model.encoder.bn1)]
        for b in (*e.layer1, *e.layer2):
            pairs += [(b.conv1, b.bn1), (b.conv2, b.bn2), *([tuple(b.downsample)] if b.downsample else [])]
        sheets = [torch.cat([c.weight.flatten(1), n.weight[:, None], n.bias[:, None]], 1) for c, n in pairs]
        self.normed = nn.ParameterList(map(leaf, sheets))
        for name in ("running_mean", "running_var"):
            self.register_buffer(name, torch.cat([getattr(n, name) for _, n in pairs]))
        self.register_buffer("seen", e.bn1.num_batches_tracked.clone())
        convs = [x.conv.conv if hasattr(x, "nonlin") else x.conv for x in model.depth.decoder]
        convs += [*model.pose.net, model.pose.pose_conv]
        sheets = [torch.cat([x.weight.flatten(1), x.bias[:, None]], 1) for x in convs]
        self.plain = nn.ParameterList(map(leaf, sheets))

    def unit(self, i: int, x: Tensor, size: int = 3, stride: int = 1) -> Tensor:
        sheet, start = self.normed[i], sum(map(len, self.normed[:i]))
        y = F.conv2d(x, sheet[:, :-2].unflatten(1, (-1, size, size)), None, stride, size // 2)
        kept = (b[start : start + len(sheet)] for b in (self.running_mean, self.running_var))
        return F.batch_norm(y, *kept, sheet[:, -2], sheet[:, -1], self.training)

    def patch(self, i: int, x: Tensor, size: int = 3, stride: int = 1) -> Tensor:
        kernel, offset = self.plain[i][:, :-1].unflatten(1, (-1, size, size)), self.plain[i][:, -1]
        x, edge = (F.pad(x, [1] * 4, mode="reflect"), 0) if i < 8 else (x, size // 2)
        return F.conv2d(x, kernel, offset, stride, edge)

    def forward(self, color, before, after, noise, k, inv_k) -> tuple[Tensor, ...]:
        self.seen += self.training
        skips = [self.unit(0, color / 0.225 - 2, 7, 2).relu()]
        x, disps, poses = F.max_pool2d(skips[0], 3, 2, 1), [], []
        for i in (1, 3, 5, 8):
            y = self.unit(i + 1, self.unit(i, x, 3, 1 + (i == 5)).relu())
            x = (y + (self.unit(7, x, 1, 2) if i == 5 else x)).relu()
            skips += [x] if i == 3 else []
        for i in (0, 2, 4):
            x = F.elu(self.patch(i, x)).repeat_interleave(2, 2).repeat_interleave(2, 3)
            x = F.elu(self.patch(i + 1, torch.cat([x, skips.pop()], 1) if skips else x))
            disps = [self.patch(8 - i // 2, x).sigmoid(), *disps] if i else disps
        for pair in ((before, color), (color, after)):
            y = torch.cat(pair, 1)
            for i, size in ((8, 7), (9, 5), (10, 3)):
                y = self.patch(i, y, size, 2)
                y = y if i == 10 and self.fault == "mono_depth_last_pose_layer_not_rectified" else y.relu()
            y = self.patch(11, y.mean((2, 3), True), 1).flatten(1) / 100
            poses.append(turned(*y.split(3, 1), pair[0] is before))
        return judged(self, disps, poses, color, [before, after], noise, k, inv_k)


SLOPES, PADDED = ("input gradient", "weight gradient"), ("depth.decoder.3.conv", "depth.decoder.3.conv.pad")
right(task, "mono_depth_tree_with_channels_last", "a tree, split kernels, Rodrigues", TreeDepth)
right(task, "mono_depth_of_packed_sheets", "flat code, packed kernels and statistics", FlatDepth)
wrong(
    task,
    TreeDepth,
    mono_depth_first_norm_with_another_epsilon=("another epsilon", "encoder.bn1"),
    mono_depth_second_block_rectified_before_its_shortcut=("another order", "encoder.layer1.1"),
    mono_depth_third_block_keeps_the_biased_variance=("a biased variance", "encoder.layer2.0.bn2", "buffer"),
    mono_depth_fourth_decoder_layer_padded_with_zeros=("another padding", PADDED),
)
wrong(
    task,
    FlatDepth,
    mono_depth_last_pose_layer_not_rectified=("an activation left out", ("pose", "pose.relu")),
    mono_depth_projection_divides_by_the_whole_size=("a count off by one", "project_3d"),
    mono_depth_structure_means_held_constant=("detach", "ssim", SLOPES),
    mono_depth_second_smoothness_not_halved=("a factor left out", ""),
)
