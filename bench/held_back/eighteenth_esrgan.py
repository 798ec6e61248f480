"""Two ports of Real-ESRGAN: a tree whose maps hand on their shares, and stacks of weights channels last."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._eighteenth_esrgan import EPS, ESRGAN, OUTPUTS, RESIDUAL, SLOPE, both_parts, degraded
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("eighteenth_esrgan", ESRGAN, degraded, both_parts)
bent = nn.LeakyReLU(SLOPE).forward


def passed(steps: nn.Module, x: Tensor) -> list[Tensor]:
    """What goes in, and what each step makes of what the last one made."""
    seen = [x]
    for step in steps:
        seen.append(step(seen[-1]))
    return seen


class Sharing(nn.Module):
    """A dense block in which each map hands its shares on to all layers that follow."""

    def __init__(self, block: nn.Module):
        super().__init__()
        convs = [block.conv1, block.conv2, block.conv3, block.conv4, block.conv5]
        ends, self.grow = [0, *(conv.in_channels for conv in convs)], block.conv1.out_channels
        shares = [[conv.weight[:, ends[i] : ends[i + 1]] for conv in convs[i:]] for i in range(5)]
        self.shares = nn.ParameterList(leaf(torch.cat(share)) for share in shares)
        self.offsets = leaf(torch.cat([conv.bias for conv in convs]))

    def forward(self, x: Tensor) -> Tensor:
        due = F.conv2d(x, self.shares[0], self.offsets, padding=1)
        for share in self.shares[1:]:
            due = due[:, self.grow :] + F.conv2d(bent(due[:, : self.grow]), share, padding=1)
        return torch.add(x, due, alpha=RESIDUAL)


class Bounded(nn.Module):
    """A product with the raw weight, divided by its largest singular value afterwards, and bent."""

    def __init__(self, conv: nn.Module, stale: bool = False):
        super().__init__()
        self.columns, self.stale = leaf(conv.weight_orig.flatten(1).T), stale
        self.shape, self.stride = conv.weight_orig.shape, conv.stride
        self.register_buffer("left", conv.weight_u.clone())
        self.register_buffer("right", conv.weight_v.clone())

    def forward(self, x: Tensor) -> Tensor:
        left, right, matrix = self.left.clone(), self.right.clone(), self.columns.detach()
        if self.training:
            right = F.normalize(matrix @ left, dim=0, eps=EPS)
            left = F.normalize(right @ matrix, dim=0, eps=EPS)
            self.left.copy_(left)
            self.right.copy_(self.right if self.stale else right)
        y = F.conv2d(x, self.columns.T.reshape(self.shape), stride=self.stride, padding=1)
        return bent(y / torch.einsum("i,io,o", right, self.columns, left))


class SharingTree(Port):
    """The fold and the first convolution are one; the critic is a ladder; the features come in steps."""

    def take(self, model: ESRGAN) -> None:
        (g, d, vgg), act = model.children(), nn.LeakyReLU(SLOPE)
        cells = g.conv_first.weight.unflatten(1, (3, 2, 2)).permute(0, 1, 4, 2, 5, 3)
        self.entry, self.offset = leaf(cells.flatten(4).flatten(2, 3)), leaf(g.conv_first.bias)
        self.groups = nn.ModuleList(nn.Sequential(*map(Sharing, group.children())) for group in g.body)
        self.after, rise = g.conv_body, nn.Upsample(scale_factor=2)
        self.grow = nn.Sequential(rise, g.conv_up1, act, rise, g.conv_up2, act, g.conv_hr, act, g.conv_last)
        stale = self.fault == "esrgan_second_spectral_conv_keeps_its_first_right_vector"
        rungs = [Bounded(d.conv1), Bounded(d.conv2, stale), Bounded(d.conv3)]
        self.down = nn.Sequential(nn.Sequential(d.conv0, act), *rungs)
        self.up = nn.ModuleList(map(Bounded, (d.conv4, d.conv5, d.conv6)))
        self.out = nn.Sequential(Bounded(d.conv7), Bounded(d.conv8), d.conv9)
        self.looks = nn.Sequential(vgg.features[0], vgg.features[1:3], vgg.features[3:])
        reverse = self.fault == "esrgan_features_normalised_in_order_of_bgr"
        self.register_buffer("colours", torch.cat([vgg.mean, vgg.std]).flip(1 if reverse else ()))

    def trunk(self, x: Tensor) -> Tensor:
        y, short = x, self.fault == "esrgan_last_rrdb_goes_around_its_last_dense_block_only"
        for group in self.groups:
            seen = passed(group, y)
            y = torch.add(seen[2 if short and group is self.groups[2] else 0], seen[-1], alpha=RESIDUAL)
        return x + self.after(y)

    def judge(self, x: Tensor) -> Tensor:
        *kept, y = passed(self.down, x)
        for rung, side in zip(self.up, kept[:0:-1], strict=True):
            y = side + rung(F.interpolate(y, size=side.shape[2:], mode="bilinear"))
        return self.out(y)

    def forward(self, lq: Tensor, gt: Tensor) -> dict[str, Tensor]:
        made = self.grow(self.trunk(F.conv2d(lq, self.entry, self.offset, stride=2, padding=2)))
        leaks = self.fault == "esrgan_critic_own_part_without_the_detach"
        logits = map(self.judge, (made, gt, made if leaks else made.detach()))
        own, true = (passed(self.looks, (x - self.colours[0]) / self.colours[1]) for x in (made, gt.detach()))
        return dict(zip(OUTPUTS, (made, *logits, *own[1:], *true[1:]), strict=True))


class FlatESRGAN(Port):
    """Channels last, windows, dense blocks in stacks by layer; the critic's three images are one batch."""

    def take(self, model: ESRGAN) -> None:
        g, d, f = model.net_g, model.net_d, model.vgg.features
        blocks = [block for group in g.body for block in group.children()]
        layers = [[block.get_submodule(f"conv{i}") for block in blocks] for i in range(1, 6)]
        self.dense = nn.ParameterList(pile(c.weight.permute(2, 3, 1, 0) for c in layer) for layer in layers)
        self.dense_b = nn.ParameterList(pile(conv.bias for conv in layer) for layer in layers)
        convs = [g.conv_first, g.conv_body, g.conv_up1, g.conv_up2, g.conv_hr, g.conv_last, d.conv0, d.conv9]
        convs += [f[0], f[2], f[5]]
        self.kernels = nn.ParameterList(leaf(conv.weight.permute(2, 3, 1, 0)) for conv in convs)
        self.biases = nn.ParameterList(leaf(conv.bias) for conv in convs)
        for fixed in (*self.kernels[8:], *self.biases[8:]):
            fixed.requires_grad_(False)
        norms = [d.get_submodule(f"conv{i}") for i in range(1, 9)]
        self.critic = nn.ParameterList(leaf(conv.weight_orig.permute(2, 3, 1, 0)) for conv in norms)
        for i, conv in enumerate(norms):
            v = conv.weight_v.view(conv.weight_orig.shape[1:]).permute(1, 2, 0).flatten()
            self.register_buffer(f"pair{i}", torch.cat([conv.weight_u, v]))
        self.register_buffer("colours", torch.stack([model.vgg.mean.flatten(), model.vgg.std.flatten()]))

    def conv(self, x: Tensor, kernel: Tensor, step: int = 1, mode: str = "constant") -> Tensor:
        windows = F.pad(x, (0, 0, 1, 1, 1, 1), mode).unfold(1, len(kernel), step).unfold(2, len(kernel), step)
        return torch.einsum("nhwcij,ijco->nhwo", windows, kernel)

    def plain(self, i: int, x: Tensor, mode: str = "constant") -> Tensor:
        return self.conv(x, self.kernels[i], 1, mode) + self.biases[i]

    def block(self, x: Tensor, i: int) -> Tensor:
        maps, twice = [x], self.fault == "esrgan_fourth_dense_layer_reads_its_third_map_twice" and i == 1
        for layer, (kernels, offsets) in enumerate(zip(self.dense, self.dense_b, strict=True)):
            read = maps[:2] + 2 * maps[3:] if twice and layer == 3 else maps
            y = self.conv(torch.cat(read, 3), kernels[i]) + offsets[i]
            maps.append(bent(y))
        return x + RESIDUAL * y

    def generator(self, x: Tensor) -> Tensor:
        depth = self.fault == "esrgan_unshuffle_leaves_the_colours_last_as_space_to_depth"
        order = (0, 1, 3, 2, 4, 5) if depth else (0, 1, 3, 5, 2, 4)
        first = y = self.plain(0, x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).permute(order).flatten(3))
        for i in range(0, 9, 3):
            y = y + RESIDUAL * self.block(self.block(self.block(y, i), i + 1), i + 2)
        y, around = first + self.plain(1, y), self.fault == "esrgan_conv_up2_repeats_the_edge_around_the_map"
        for i, mode in ((2, "constant"), (3, "replicate" if around else "constant")):
            y = bent(self.plain(i, y.repeat_interleave(2, 1).repeat_interleave(2, 2), mode))
        return self.plain(5, bent(self.plain(4, y)))

    def spectral(self, i: int, x: Tensor) -> Tensor:
        matrix, sigmas = self.critic[i].flatten(0, 2), []
        u, v = getattr(self, f"pair{i}").split(matrix.shape[::-1])
        for _ in range(3):
            if self.training:
                v.copy_(F.normalize(matrix.detach() @ u, dim=0, eps=EPS))
                u.copy_(F.normalize(v @ matrix.detach(), dim=0, eps=EPS))
            sigmas.append((torch.outer(v, u) * matrix).sum())
        y = self.conv(x, self.critic[i], 2 if i < 3 else 1).unflatten(0, (3, -1))
        return (y / torch.stack(sigmas)[:, None, None, None, None]).flatten(0, 1)

    def judged(self, x: Tensor) -> tuple[Tensor, ...]:
        maps = [bent(self.plain(6, x))]
        for i in range(3):
            maps.append(bent(self.spectral(i, maps[-1])))
        y = maps.pop()
        for i in (3, 4, 5):
            ways = [F.interpolate(torch.eye(n)[None].to(y), None, 2, "linear")[0] for n in y.shape[1:3]]
            y, side = self.spectral(i, torch.einsum("nhwc,hp,wq->npqc", y, *ways)), maps.pop()
            early = self.fault == "esrgan_critic_adds_its_middle_skip_before_the_bend" and i == 4
            y = bent(y + side) if early else bent(y) + side
        return self.plain(7, bent(self.spectral(7, bent(self.spectral(6, y))))).movedim(3, 1).chunk(3)

    def looked(self, x: Tensor) -> list[Tensor]:
        first = self.plain(8, (x - self.colours[0]) / self.colours[1])
        second = self.plain(9, first.relu())
        cells = second.relu().unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).amax((2, 4))
        return [y.movedim(3, 1) for y in (first, second, self.plain(10, cells))]

    def forward(self, lq: Tensor, gt: Tensor) -> dict[str, Tensor]:
        made, true = self.generator(lq.movedim(1, 3)), gt.movedim(1, 3)
        logits = self.judged(torch.cat([made, true, made.detach()]))
        looks = (*self.looked(made), *self.looked(true.detach()))
        return dict(zip(OUTPUTS, (made.movedim(3, 1), *logits, *looks), strict=True))


right(task, "esrgan_as_a_tree_of_shared_maps", "weights by source, fold in a strided kernel", SharingTree)
right(task, "esrgan_of_stacked_windows", "channels last, stacked dense blocks, one batch", FlatESRGAN)
wrong(
    task,
    SharingTree,
    esrgan_last_rrdb_goes_around_its_last_dense_block_only=("another shortcut", "net_g.body.2"),
    esrgan_second_spectral_conv_keeps_its_first_right_vector=("a buffer not kept", "net_d.conv2", "buffer"),
    esrgan_features_normalised_in_order_of_bgr=("constants in reverse", "vgg"),
    esrgan_critic_own_part_without_the_detach=("a detach missing", "", ("input gradient", "weight gradient")),
)
DENSE, FIRST = "net_g.body.0.rdb2", ("net_g", "net_g.conv_first")
wrong(
    task,
    FlatESRGAN,
    esrgan_fourth_dense_layer_reads_its_third_map_twice=("another map read", (DENSE, DENSE + ".conv4")),
    esrgan_unshuffle_leaves_the_colours_last_as_space_to_depth=("another order of channels", FIRST),
    esrgan_conv_up2_repeats_the_edge_around_the_map=("another padding", "net_g.conv_up2"),
    esrgan_critic_adds_its_middle_skip_before_the_bend=("a sum too early", "net_d"),
)
