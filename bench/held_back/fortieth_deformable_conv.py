"""Two ports of a deformable segmentation network: a tree, channels last, and one class of packed weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right, tapped
from bench.held_back._fortieth_deformable_conv import GROUPS, EncoderDecoder, discs, labelled
from bench.held_back._fourth_ports import Port, Rows, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("fortieth_deformable_conv", EncoderDecoder, discs, labelled)


class Taps(nn.Module):
    def __init__(self, conv: nn.Conv2d):
        super().__init__()
        self.kernel, self.stride, self.rate = leaf(conv.weight), conv.stride[0], conv.dilation[0]
        self.offset = None if conv.bias is None else leaf(conv.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = tapped(x, self.kernel, self.stride, self.rate)
        return y if self.offset is None else y + self.offset


class Roaming(nn.Module):
    """A deformable convolution by grid samples; moves and gates are one convolution."""

    def __init__(self, conv: nn.Module):
        super().__init__()
        self.stride, self.rate, self.still, self.apart = conv.stride, conv.dilation, False, False
        self.ask = Taps(conv.conv_offset)
        self.mix = leaf(conv.weight.flatten(2).flatten(1).T)

    def forward(self, x: Tensor) -> Tensor:
        move, gate = self.ask(x).split([18 * GROUPS, 9 * GROUPS], 3)
        n, high, wide, _ = move.shape
        shape, axis = ((GROUPS, 2, 9), -2) if self.apart else ((GROUPS, 9, 2), -1)
        v, u = (move.detach() if self.still else move).unflatten(3, shape).movedim(axis, 0)
        tap, (i, j) = torch.arange(9), (self.stride * torch.arange(size)[:, None] for size in (high, wide))
        v = v + (i + (tap // 3 - 1) * self.rate)[:, None, None]
        u = u + (j + (tap % 3 - 1) * self.rate)[:, None]
        grid = torch.stack([(2 * u + 1) / x.shape[2] - 1, (2 * v + 1) / x.shape[1] - 1], -1)
        grid = grid.permute(0, 3, 1, 2, 4, 5).flatten(0, 1).flatten(1, 2)
        sheets = x.unflatten(3, (GROUPS, -1)).permute(0, 3, 4, 1, 2).flatten(0, 1)
        found = F.grid_sample(sheets, grid, align_corners=False).unflatten(0, (n, GROUPS))
        found = found * gate.sigmoid().unflatten(3, (GROUPS, 9)).flatten(1, 2).transpose(1, 2)[:, :, None]
        return (found.permute(0, 3, 1, 2, 4).flatten(2) @ self.mix).unflatten(1, (high, wide))


class Residual(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        middle = Taps(block.conv2) if isinstance(block.conv2, nn.Conv2d) else Roaming(block.conv2)
        front = Taps(block.conv1), Rows(block.bn1), nn.ReLU(), middle, Rows(block.bn2), nn.ReLU()
        self.path, self.side = nn.Sequential(*front, Taps(block.conv3), Rows(block.bn3)), nn.Identity()
        if block.downsample is not None:
            self.side = nn.Sequential(Taps(block.downsample[0]), Rows(block.downsample[1]))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.side(x) + self.path(x))


class DeformableTree(Port):
    """Residuals in a row, channels last; the joint convolution is a sum over the levels of the pyramid."""

    def take(self, model: EncoderDecoder) -> None:
        body, head = model.backbone, model.decode_head
        blocks = [Residual(block) for layer in (body.layer1, body.layer2, body.layer3) for block in layer]
        self.body = nn.Sequential(Taps(body.conv1), Rows(body.bn1), nn.ReLU(), *blocks)
        self.levels = nn.ModuleList(Taps(level[1].conv) for level in head.psp_modules)
        self.joint = nn.ParameterList(map(leaf, head.bottleneck.conv.weight.split([28, 9, 9, 9], 1)))
        self.norm, self.tell = Rows(head.bottleneck.bn), Taps(head.conv_seg)
        self.body[1].eps = 1e-3 if self.fault == "deformable_conv_stem_norm_with_a_larger_eps" else 1e-5
        blocks[3].path[3].apart = self.fault == "deformable_conv_second_offsets_read_all_y_then_all_x"
        blocks[4].path[3].still = self.fault == "deformable_conv_third_offsets_without_gradient"
        self.norm.own = self.fault == "deformable_conv_head_norm_by_the_batch_in_evaluation"

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x.movedim(1, 3))
        joint = tapped(y, self.joint[0])
        for i, level in enumerate(self.levels, 1):
            pooled = F.adaptive_avg_pool2d(y.movedim(3, 1), i).movedim(1, 3)
            level = F.interpolate(F.relu(level(pooled)).movedim(3, 1), y.shape[1:3], mode="bilinear")
            joint = joint + tapped(level.movedim(1, 3), self.joint[i])
        logits = self.tell(F.relu(self.norm(joint))).movedim(3, 1)
        return F.interpolate(logits, x.shape[2:], mode="bilinear")


def sheet(*weights: Tensor) -> Tensor:
    return torch.cat([w.flatten(1) if w.dim() > 1 else w[:, None] for w in weights], 1)


def hats(at: Tensor, size: int) -> Tensor:
    return (1 - (at[..., None] - torch.arange(size)).abs()).clamp(min=0)


def stretched(x: Tensor, size: tuple[int, ...]) -> Tensor:
    rows, columns = (
        hats(((torch.arange(new).to(x) + 0.5) * old / new - 0.5).clamp(0, old - 1), old)
        for old, new in zip(x.shape[2:], size, strict=True)
    )
    return rows @ x @ columns.T


class PackedDeformable(Port):
    """A sheet for each convolution and its norm, one buffer of all statistics, samples by hats."""

    def take(self, model: EncoderDecoder) -> None:
        body, head = model.backbone, model.decode_head
        blocks, pairs = [*body.layer1, *body.layer2, *body.layer3], [(body.conv1, body.bn1)]
        for block in blocks:
            pairs += [(block.conv1, block.bn1), (block.conv2, block.bn2), (block.conv3, block.bn3)]
            pairs += [] if block.downsample is None else [tuple(block.downsample)]
        pairs.append((head.bottleneck.conv, head.bottleneck.bn))
        self.w = nn.ParameterList(leaf(sheet(c.weight, b.weight, b.bias)) for c, b in pairs)
        asked = [sheet(b.conv2.conv_offset.weight, b.conv2.conv_offset.bias) for b in blocks[2:]]
        self.ask = nn.ParameterList([pile(asked[:2]), pile(asked[2:])])
        self.pyramid = pile(sheet(x[1].conv.weight, x[1].conv.bias) for x in head.psp_modules)
        self.tell = leaf(sheet(head.conv_seg.weight, head.conv_seg.bias))
        kept = [torch.stack([b.running_mean, b.running_var]) for _, b in pairs]
        self.register_buffer("kept", torch.cat(kept, 1))
        self.register_buffer("seen", torch.stack([b.num_batches_tracked for _, b in pairs]))

    def windows(self, x: Tensor, kernel: Tensor, stride: int = 1, rate: int = 1) -> Tensor:
        size, shape = int((len(kernel[0]) // x.shape[1]) ** 0.5), [(s - 1) // stride + 1 for s in x.shape[2:]]
        return (kernel @ F.unfold(x, size, rate, rate * (size // 2), stride)).unflatten(2, shape)

    def offset(self, x: Tensor, rows: Tensor, *how: int) -> Tensor:
        return self.windows(x, rows[:, :-1], *how) + rows[:, -1, None, None]

    def normed(self, i: int, x: Tensor) -> Tensor:
        kept, count = self.kept.split([len(w) for w in self.w], 1)[i], x[:, 0].numel()
        var, mean = torch.var_mean(x, (0, 2, 3), correction=0) if self.training else kept.flip(0)
        if self.training:
            with torch.no_grad():
                kept.mul_(0.9).add_(0.1 * torch.stack([mean, var * count / (count - 1)]))
                self.seen[i] += 1
        gain = self.w[i][:, -2] / (var + 1e-5).sqrt()
        return x * gain[:, None, None] + (self.w[i][:, -1] - mean * gain)[:, None, None]

    def plain(self, i: int, x: Tensor, stride: int = 1) -> Tensor:
        return self.normed(i, self.windows(x, self.w[i][:, :-2], stride))

    def roaming(self, i: int, x: Tensor, layer: int, j: int, stride: int, rate: int) -> Tensor:
        asked, (high, wide) = self.offset(x, self.ask[layer][j], stride, rate), x.shape[2:]
        move, gate = asked[:, : 18 * GROUPS], asked[:, 18 * GROUPS :].sigmoid().unflatten(1, (GROUPS, 1, 9))
        rows, columns = (torch.arange(size) * stride for size in asked.shape[2:])
        tap = torch.arange(9)[:, None, None]
        y = move[:, ::2].unflatten(1, (GROUPS, 9)) + (tap // 3 - 1) * rate + rows[:, None]
        z = move[:, 1::2].unflatten(1, (GROUPS, 9)) + (tap % 3 - 1) * rate + columns
        if self.fault == "deformable_conv_first_samples_clamped_to_the_border" and (layer, j) == (0, 0):
            y, z = y.clamp(0, high - 1), z.clamp(0, wide - 1)
        share = (hats(y, high)[..., None] * hats(z, wide)[..., None, :]).flatten(5).flatten(2, 4)
        mixed = self.fault == "deformable_conv_fourth_groups_interleaved" and layer * j == 1
        x = x.unflatten(1, (-1, GROUPS)).transpose(1, 2) if mixed else x.unflatten(1, (GROUPS, -1))
        found = (x.flatten(3) @ share.transpose(2, 3)).unflatten(3, gate.shape[3:]) * gate
        found = (found.transpose(1, 2) if mixed else found).flatten(1, 2).flatten(1, 2)
        return self.normed(i, torch.einsum("oc,nchw->nohw", self.w[i][:, :-2], found))

    def pooled(self, x: Tensor, n: int) -> Tensor:
        up = 0 if self.fault == "deformable_conv_pool_of_two_rounds_its_ends_down" and n == 2 else n - 1
        rows, columns = ([slice(k * s // n, (k * s + s + up) // n) for k in range(n)] for s in x.shape[2:])
        cells = [x[:, :, row, column].mean((2, 3)) for row in rows for column in columns]
        return torch.stack(cells, 2).unflatten(2, (n, n))

    def forward(self, x: Tensor) -> Tensor:
        y, i = self.plain(0, x).relu(), 1
        for layer, j in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)):
            stride, rate = 2 if (layer, j) == (1, 0) else 1, 2 if layer == 2 else 1
            z = self.plain(i, y).relu()
            z = self.roaming(i + 1, z, layer - 1, j, stride, rate) if layer else self.plain(i + 1, z)
            z = self.plain(i + 2, z.relu())
            y = y if j else self.plain(i + 3, y, stride)
            early = self.fault == "deformable_conv_second_plain_block_activates_before_its_sum"
            y, i = z.relu() + y if early and (layer, j) == (0, 1) else (z + y).relu(), i + 4 - j
        levels = [self.offset(self.pooled(y, n), self.pyramid[n - 1]).relu() for n in (1, 2, 3)]
        y = self.plain(i, torch.cat([y, *(stretched(z, y.shape[2:]) for z in levels)], 1)).relu()
        return stretched(self.offset(y, self.tell), x.shape[2:])


SLOPES, OWN = ("input gradient", "weight gradient"), "batch statistics in eval"
right(task, "deformable_conv_tree_with_channels_last", "a tree, grid samples, split kernels", DeformableTree)
right(task, "deformable_conv_of_packed_weights", "packed sheets, hats for samples", PackedDeformable)
wrong(
    task,
    DeformableTree,
    deformable_conv_stem_norm_with_a_larger_eps=("another eps", "backbone.bn1"),
    deformable_conv_second_offsets_read_all_y_then_all_x=("another channel order", "backbone.layer2.1.conv2"),
    deformable_conv_third_offsets_without_gradient=("detach", "backbone.layer3.0.conv2", SLOPES),
    deformable_conv_head_norm_by_the_batch_in_evaluation=(OWN, "decode_head.bottleneck.bn", "eval"),
)
wrong(
    task,
    PackedDeformable,
    deformable_conv_second_plain_block_activates_before_its_sum=("another order", "backbone.layer1.1"),
    deformable_conv_first_samples_clamped_to_the_border=("another padding", "backbone.layer2.0.conv2"),
    deformable_conv_fourth_groups_interleaved=("another grouping", "backbone.layer3.1.conv2"),
    deformable_conv_pool_of_two_rounds_its_ends_down=("another window", "decode_head.psp_modules.1.0"),
)
