"""Two ports of a small CenterNet: a tree with the channels last, and one class of packed rows."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fifty_first_center_net import ModelWithLoss, own_loss, scenes
from bench.held_back._fourth_ports import Port, Rows, leaf, spatial, wrong
from bench.held_back._sixth_ports import few

task = few("fifty_first_center_net", ModelWithLoss, scenes, own_loss)
LIMIT = float(torch.logit(torch.tensor(1 - 1e-4, dtype=torch.float64)))


class Patch(nn.Module):
    """A convolution of [N, H, W, C] and its norm; ``late`` leaves out the first row and column."""

    def __init__(self, conv: nn.Conv2d, norm: nn.BatchNorm2d, late: bool = False):
        super().__init__()
        self.weight, self.norm = leaf(conv.weight), Rows(norm)
        self.stride, self.late = conv.stride[0], int(late)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(spatial(x[:, self.late :, self.late :], self.weight, None, self.stride))


class Growing(nn.Module):
    """A convolution of the map with zeros between its values, whose kernel is the turned one."""

    def __init__(self, conv: nn.ConvTranspose2d, norm: nn.BatchNorm2d, turned: bool = True):
        super().__init__()
        weight = conv.weight.transpose(0, 1)
        self.weight, self.norm = leaf(weight.flip(2, 3) if turned else weight), Rows(norm)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.new_zeros(len(x), 2 * x.shape[1] + 1, 2 * x.shape[2] + 1, x.shape[3])
        wide[:, 1:-1:2, 1:-1:2] = x
        return self.norm(spatial(wide, self.weight)).relu()


class Pair(nn.Module):
    def __init__(self, block: nn.Module, late: bool):
        super().__init__()
        self.one, self.two = Patch(block.conv1, block.bn1), Patch(block.conv2, block.bn2)
        self.aside = Patch(*block.downsample, late) if block.downsample else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return (self.aside(x) + self.two(self.one(x).relu())).relu()


def rows(conv: nn.Conv2d) -> Tensor:
    return torch.cat([conv.weight.flatten(1), conv.bias[:, None]], 1)


def top(x: Tensor, stride: int) -> Tensor:
    """The greatest of each window of three by three; nothing is below zero."""
    return F.pad(x, (0, 0, 1, 1, 1, 1)).unfold(1, 3, stride).unfold(2, 3, stride).amax((-2, -1))


class CenterNetOfStages(Port):
    """Stem, pairs, growing maps and heads, channels last; the focal loss is of clamped logits."""

    def take(self, model: ModelWithLoss) -> None:
        net, fault = model.model, self.fault
        self.stem, heads = Patch(net.conv1, net.bn1), (net.hm, net.wh, net.reg)
        if fault == "center_net_stem_norm_with_the_epsilon_of_keras":
            self.stem.norm.eps = 1e-3
        late = net.layer2[0] if fault == "center_net_shortcut_takes_the_odd_pixels" else None
        self.down = nn.Sequential(*(Pair(b, b is late) for b in (*net.layer1, *net.layer2, *net.layer3)))
        turned = fault != "center_net_second_deconvolution_not_turned"
        self.up = nn.Sequential(Growing(*net.deconv_layers[:2]), Growing(*net.deconv_layers[3:5], turned))
        self.ask = leaf(torch.cat([head[0].weight for head in heads]))
        self.shift = leaf(torch.cat([head[0].bias for head in heads]))
        self.tell = nn.ParameterList(leaf(rows(h[2]).T) for h in heads)

    def focal(self, logits: Tensor, hm: Tensor) -> Tensor:
        z = logits.clamp(-LIMIT, LIMIT)
        peak, missed, hot = hm == 1, (-z).sigmoid().square(), z.sigmoid().square()
        if self.fault == "center_net_focal_factors_without_gradient":
            missed, hot = missed.detach(), hot.detach()
        far = (1 - hm).square().square() * hot * F.logsigmoid(-z)
        return -torch.where(peak, missed * F.logsigmoid(z), far).sum() / peak.sum().clamp(min=1)

    def apart(self, x: Tensor, goal: dict[str, Tensor], key: str) -> Tensor:
        found, mask = x.flatten(1, 2)[torch.arange(len(x))[:, None], goal["ind"]], goal["reg_mask"].to(x)
        return ((found - goal[key]).abs().sum(2) * mask).sum() / (2 * mask.sum() + 1e-4)

    def forward(self, input: Tensor, **goal: Tensor) -> dict[str, Tensor]:
        x = self.up(self.down(top(self.stem(input.movedim(1, 3)).relu(), 2)))
        each = spatial(x, self.ask, self.shift).relu().chunk(3, 3)
        maps = [y @ w[:-1] + w[-1] for y, w in zip(each, self.tell, strict=True)]
        losses = [self.focal(maps[0].movedim(3, 1), goal["hm"])]
        losses += [self.apart(maps[i], goal, key) for i, key in ((1, "wh"), (2, "reg"))]
        total = losses[0] + losses[1] / 10 + losses[2]
        result = dict(zip(("hm", "wh", "reg"), (y.movedim(3, 1) for y in maps), strict=True))
        result |= dict(zip(("loss", "hm_loss", "wh_loss", "off_loss"), (total, *losses), strict=True))
        if not self.training:
            heat, (high, wide) = maps[0].sigmoid(), maps[0].shape[1:3]
            result["scores"] = torch.where(heat == top(heat, 1), heat, 0).movedim(3, 1)
            grid = torch.cartesian_prod(torch.arange(high), torch.arange(wide)).flip(1)
            center, half = grid + maps[2].flatten(1, 2), maps[1].flatten(1, 2) / 2
            result["bboxes"] = torch.cat([center - half, center + half], 2)
        return result


class PackedCenterNet(Port):
    """Rows of kernels side by side by stage, products of patches, and folds for the deconvolutions."""

    def take(self, model: ModelWithLoss) -> None:
        net, heads = model.model, (model.model.hm, model.model.wh, model.model.reg)
        stages = [[(net.conv1, net.bn1)]]
        for layer in (net.layer1, net.layer2, net.layer3):
            stages.append([(b.conv1, b.bn1) for b in layer] + [(b.conv2, b.bn2) for b in layer])
            stages[-1] += [tuple(b.downsample) for b in layer if b.downsample]
        stages += [[tuple(net.deconv_layers[i : i + 2])] for i in (0, 3)]
        self.w, self.affine = nn.ParameterList(), nn.ParameterList()
        for i, pairs in enumerate(stages):
            kernels = [(c.weight.transpose(0, 1) if i > 3 else c.weight).flatten(1) for c, _ in pairs]
            self.w.append(leaf(torch.cat(kernels, 1)))
            self.affine.append(leaf(torch.stack([torch.stack([b.weight, b.bias]) for _, b in pairs])))
            kept = [torch.stack([b.running_mean, b.running_var]) for _, b in pairs]
            self.register_buffer(f"kept_{i}", torch.stack(kept))
        self.ask, self.tell = (leaf(torch.cat([rows(head[i]) for head in heads])) for i in (0, 2))

    def norm(self, x: Tensor, i: int, k: int) -> Tensor:
        rate = 0.9 if self.fault == "center_net_deconv_norm_reads_momentum_as_decay" and i == 4 else 0.1
        return F.batch_norm(x, *self.get_buffer(f"kept_{i}")[k], *self.affine[i][k], self.training, rate)

    def patches(self, x: Tensor, kernel: Tensor, size: int, stride: int = 1) -> Tensor:
        y = kernel @ F.unfold(x, size, padding=size // 2, stride=stride)
        return y.unflatten(2, ((x.shape[2] - 1) // stride + 1, -1))

    def stage(self, x: Tensor, i: int) -> Tensor:
        wide, narrow, step = 9 * len(self.w[i]), x.shape[1], min(i, 2)
        first, *kernels = self.w[i].split([9 * narrow, wide, wide, wide, *[narrow] * (step - 1)], 1)
        y = self.norm(self.patches(x, first, 3, step), i, 0).relu()
        if step == 2:
            x = self.norm(self.patches(x, kernels[3], 1, step), i, 4)
        x = (x + self.norm(self.patches(y, kernels[1], 3), i, 2)).relu()
        y = self.norm(self.patches(x, kernels[0], 3), i, 1).relu()
        y = self.norm(self.patches(y, kernels[2], 3), i, 3)
        if self.fault == "center_net_last_block_adds_its_shortcut_after_the_relu" and i == 3:
            return x + y.relu()
        return (x + y).relu()

    def forward(self, input: Tensor, **goal: Tensor) -> dict[str, Tensor]:
        x = F.max_pool2d(self.norm(self.patches(input, self.w[0], 7, 2), 0, 0).relu(), 3, 2, 1)
        x = self.stage(self.stage(self.stage(x, 1), 2), 3)
        for i in (4, 5):
            kernel = self.w[i].unflatten(1, (-1, 16)).movedim(1, 2).flatten(0, 1)
            x = F.fold(kernel @ x.flatten(2), (2 * x.shape[2], 2 * x.shape[3]), 4, padding=1, stride=2)
            x = self.norm(x, i, 0).relu()
        y = (self.patches(x, self.ask[:, :-1], 3) + self.ask[:, -1:, None]).relu().chunk(3, 1)
        last = zip(y, self.tell.split([3, 2, 2]), strict=True)
        z = [self.patches(a, r[:, :-1], 1) + r[:, -1:, None] for a, r in last]
        return self.judged(*z, **goal)

    def judged(self, z: Tensor, size: Tensor, move: Tensor, **goal: Tensor) -> dict[str, Tensor]:
        heat = z.sigmoid()
        p, hm = heat.clamp(1e-4, 1 - 1e-4), goal["hm"]
        peak, mask = hm.eq(1), goal["reg_mask"].to(z)
        hit = (p[peak].log() * (1 - p[peak]) ** 2).sum()
        quiet = ((-p).log1p() * (p * (1 - hm) ** 2) ** 2)[~peak].sum()
        losses, hot = [-(hit + quiet) / max(int(peak.sum()), 1)], F.one_hot(goal["ind"], z[0, 0].numel())
        for y, key in ((size, "wh"), (move, "reg")):
            far = (hot.to(y) @ y.flatten(2).mT - goal[key]).abs()
            every = self.fault == "center_net_offsets_averaged_over_the_empty_slots_too" and key == "reg"
            slots = far.numel() if every else 2 * mask.sum()
            losses.append(torch.einsum("nkc,nk->", far, mask) / (slots + 1e-4))
        result = {"hm": z, "wh": size, "reg": move, "loss": losses[0] + 0.1 * losses[1] + losses[2]}
        result |= {"hm_loss": losses[0], "wh_loss": losses[1], "off_loss": losses[2]}
        most = F.max_pool2d(F.max_pool2d(heat, (1, 3), 1, (0, 1)), (3, 1), 1, (1, 0))
        if self.fault == "center_net_peaks_suppressed_across_the_classes":
            most = most.amax(1, keepdim=True)
        center = torch.ones_like(z[0, 0]).nonzero().T.flip(0).view(2, *z.shape[2:]) + move
        boxes = torch.cat([center - 0.5 * size, center + 0.5 * size], 1)
        found = {"scores": heat.masked_fill(heat < most, 0), "bboxes": boxes.flatten(2).mT}
        return result if self.training else result | found


SLOPES, LAST = ("input gradient", "weight gradient"), "model.layer3.1"
right(task, "center_net_of_stages_with_channels_last", "a tree, channels last", CenterNetOfStages)
right(task, "center_net_of_packed_rows", "packed rows, products of patches, folds", PackedCenterNet)
wrong(
    task,
    CenterNetOfStages,
    center_net_stem_norm_with_the_epsilon_of_keras=("another epsilon", "model.bn1"),
    center_net_shortcut_takes_the_odd_pixels=("a stride from another pixel", "model.layer2.0.downsample.0"),
    center_net_second_deconvolution_not_turned=("a kernel not flipped", "model.deconv_layers.3"),
    center_net_focal_factors_without_gradient=("detach", "loss.crit", SLOPES),
)
wrong(
    task,
    PackedCenterNet,
    center_net_last_block_adds_its_shortcut_after_the_relu=("another order", LAST),
    center_net_deconv_norm_reads_momentum_as_decay=("momentum", "model.deconv_layers.1", "buffer"),
    center_net_offsets_averaged_over_the_empty_slots_too=("another divisor", "loss.crit_reg"),
    center_net_peaks_suppressed_across_the_classes=("a maximum over classes too", "", "eval"),
)
