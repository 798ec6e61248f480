"""Two ports of a small NAFNet: levels inside levels with the channels last, and stacks of sheets."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import filled, right
from bench.held_back._fourth_ports import Port, leaf, pile, spatial, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twenty_sixth_nafnet import NAFBlock, NAFNet, blurred, charbonnier

task = few("twenty_sixth_nafnet", NAFNet, blurred, charbonnier)


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    return filled(nn.Linear(weight[0].numel(), len(weight), bias is not None), weight.flatten(1), bias)


class Standard(torch.autograd.Function):
    """The last axis by its mean and spread, with the gradient by hand; ``fixed`` takes the mean for given."""

    @staticmethod
    def forward(ctx, x: Tensor, fixed: bool) -> Tensor:
        spread, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
        ctx.fixed, rate = fixed, (spread + 1e-6).rsqrt()
        y = (x - mean) * rate
        ctx.save_for_backward(y, rate)
        return y

    @staticmethod
    def backward(ctx, slope: Tensor) -> tuple[Tensor, None]:
        y, rate = ctx.saved_tensors
        inner = slope - y * (slope * y).mean(-1, True)
        return (inner if ctx.fixed else inner - slope.mean(-1, True)) * rate, None


class Windows(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor):
        super().__init__()
        self.taps, self.offset = leaf(weight.permute(2, 3, 1, 0)), leaf(bias)

    def forward(self, x: Tensor) -> Tensor:
        windows = F.pad(x, (0, 0, 1, 1, 1, 1)).unfold(1, 3, 1).unfold(2, 3, 1)
        return torch.einsum("nhwcij,ijc->nhwc", windows, self.taps[:, :, 0]) + self.offset


class Branch(nn.Module):
    """A norm, two halves and their product; its mean, or the ``local`` one in evaluation, may weigh it."""

    def __init__(self, norm: nn.Module, sides: list[nn.Module], leave: nn.Conv2d, rate: Tensor):
        super().__init__()
        self.gain, self.offset, self.rate = leaf(norm.weight), leaf(norm.bias), leaf(rate.flatten())
        self.sides, self.leave = nn.ModuleList(sides), linear(leave.weight, leave.bias)
        self.weigh, self.fixed, self.local = None, False, False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.addcmul(self.offset, Standard.apply(x, self.fixed), self.gain)
        x = self.sides[0](x) * self.sides[1](x)
        if self.weigh is not None:
            mean = x.mean((1, 2), True)
            if self.local and not self.training:
                near = F.pad(x.movedim(3, 1), (5, 5, 5, 5), mode="replicate")
                mean = F.avg_pool2d(near, 11, stride=1).movedim(1, 3)
            x = x * self.weigh(mean)
        return self.leave(x) * self.rate


class Pair(nn.Module):
    def __init__(self, b: NAFBlock):
        super().__init__()
        layers = (b.conv1, b.conv2, b.conv4)
        one, two, four = (zip(x.weight.chunk(2), x.bias.chunk(2), strict=True) for x in layers)
        sides = [nn.Sequential(linear(*v), Windows(*w)) for v, w in zip(one, two, strict=True)]
        self.mixing = Branch(b.norm1, sides, b.conv3, b.beta)
        self.mixing.weigh, self.astray = linear(b.sca[1].weight, b.sca[1].bias), False
        self.feeding = Branch(b.norm2, [linear(*v) for v in four], b.conv5, b.gamma)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.mixing(x)
        return (x if self.astray else y) + self.feeding(y)


class Level(nn.Module):
    """Blocks, what is ``inside`` at half the size, and blocks for the sum of both."""

    def __init__(self, model: NAFNet, i: int, inside: nn.Module):
        super().__init__()
        self.inside, self.turned, down, up = inside, False, model.downs[i], model.ups[1 - i][0].weight
        ends = (model.encoders[i], model.decoders[1 - i])
        self.before, self.after = (nn.Sequential(*map(Pair, x)) for x in ends)
        self.merge = linear(down.weight.permute(0, 2, 3, 1), down.bias)
        self.spread = linear(up.flatten(1).unflatten(0, (-1, 2, 2)).permute(1, 2, 0, 3).flatten(0, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        fours = x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).transpose(2, 3).flatten(3)
        fours = self.spread(self.inside(self.merge(fours))).unflatten(3, (2, 2, -1))
        fours = fours.transpose(3, 4) if self.turned else fours
        return self.after(x + fours.transpose(2, 3).flatten(3, 4).flatten(1, 2))


class NAFNetOfLevels(Port):
    """Levels inside levels, channels last; the picture is added after the cut."""

    def take(self, model: NAFNet) -> None:
        inner = Level(model, 1, nn.Sequential(*map(Pair, model.middle_blks)))
        self.levels = outer = Level(model, 0, inner)
        self.ends = nn.ParameterList(leaf(y) for x in (model.intro, model.ending) for y in (x.weight, x.bias))
        outer.before[0].astray = self.fault == "nafnet_first_block_adds_its_second_branch_to_its_input"
        inner.before[0].mixing.fixed = self.fault == "nafnet_norm_backward_leaves_out_the_mean_of_slopes"
        inner.turned = self.fault == "nafnet_first_shuffle_lays_columns_before_rows"
        outer.after[0].mixing.local = self.fault == "nafnet_last_attention_pools_locally_in_evaluation"

    def forward(self, inp: Tensor) -> Tensor:
        high, wide = inp.shape[2:]
        x = F.pad(inp.movedim(1, 3), (0, 0, 0, -wide % 4, 0, -high % 4))
        x = spatial(self.levels(spatial(x, *self.ends[:2])), *self.ends[2:])
        return inp + x[:, :high, :wide].movedim(3, 1)


def book(b: NAFBlock) -> Tensor:
    """The whole block in rows as wide as it is: 7 C of products, then 27 of filters and offsets, and 6."""
    products, norms = (b.conv1, b.sca[1], b.conv3, b.conv4, b.conv5), (b.norm1, b.norm2)
    rows = [x.weight for x in products] + [b.conv2.weight.flatten(1).T]
    rows += [x.bias for x in (b.conv2, *products)] + [y for x in norms for y in (x.weight, x.bias)]
    return torch.cat([x.reshape(-1, b.beta.numel()) for x in (*rows, b.beta, b.gamma)])


class StackedNAFNet(Port):
    """A stack of blocks for each width; pictures are [N, C, H W], and norms go into the products after."""

    def take(self, model: NAFNet) -> None:
        one, two = ([*model.encoders[i], *model.decoders[1 - i]] for i in (0, 1))
        self.books = nn.ParameterList(pile(map(book, x)) for x in (one, two, model.middle_blks))
        ends = (model.intro, *model.downs, model.ending)
        self.ends = nn.ParameterList(leaf(torch.cat([x.weight.flatten(1), x.bias[:, None]], 1)) for x in ends)
        self.ups = nn.ParameterList(leaf(x[0].weight.flatten(1).T) for x in model.ups)

    def normed(self, x: Tensor, norm: Tensor, w: Tensor, offset: Tensor, eps: float = 1e-6) -> Tensor:
        mean, scaled = x.mean(1, True), w * norm[0]
        std = (x.square().mean(1, True) - mean.square() + eps).sqrt()
        return (scaled @ x - scaled.sum(1, True) * mean) / std + (w @ norm[1] + offset.flatten())[:, None]

    def block(self, x: Tensor, size: tuple[int, int], i: int, k: int) -> Tensor:
        rows, c = self.books[i][k], x.shape[1]
        enter, weigh, leave, rise, fall, v = rows.split([2 * c, c, c, 2 * c, c, 33])
        y = self.normed(x, v[27:29], enter, v[20:22]).unflatten(2, size)
        y = F.unfold(y, 3, padding=1).unflatten(1, (2 * c, 9))
        y = torch.einsum("nckp,kc->ncp", y, v[:18].view(9, -1)) + v[18:20].reshape(-1, 1)
        y = y[:, :c] * y[:, c:]
        silent = self.fault == "nafnet_attention_of_the_middle_pools_without_gradient" and (i, k) == (2, 0)
        mean = y.mean(2).detach() if silent else y.mean(2)
        x = x + v[31, :, None] * ((leave * (mean @ weigh.T + v[22])[:, None]) @ y + v[23, :, None])
        coarse = self.fault == "nafnet_one_norm_with_an_eps_of_a_thousandth" and (i, k) == (1, 3)
        left, other = self.normed(x, v[29:31], rise, v[24:26], 1e-3 if coarse else 1e-6).tensor_split(2, 1)
        return x + v[32, :, None] * (fall @ (left * other) + v[26, :, None])

    def forward(self, inp: Tensor) -> Tensor:
        high, wide = inp.shape[2:]
        mode = "reflect" if self.fault == "nafnet_pictures_padded_by_reflection" else "constant"
        inp = F.pad(inp, (0, -wide % 4, 0, -high % 4), mode=mode)
        sizes, skips = [(inp.shape[2] >> i, inp.shape[3] >> i) for i in range(3)], []
        begin, *downs, end = self.ends
        x = begin[:, :-1] @ F.unfold(inp, 3, padding=1) + begin[:, -1:]
        for i, down in enumerate(downs):
            for k in range(i + 1):
                x = self.block(x, sizes[i], i, k)
            skips.append(x)
            x = F.unfold(x.unflatten(2, sizes[i]), 2, stride=2)
            if self.fault == "nafnet_second_downsampling_reads_columns_before_rows" and i == 1:
                x = x.unflatten(1, (-1, 2, 2)).transpose(2, 3).flatten(1, 3)
            x = down[:, :-1] @ x + down[:, -1:]
        x = self.block(self.block(x, sizes[2], 2, 0), sizes[2], 2, 1)
        for i, up in zip((1, 0), self.ups, strict=True):
            x = skips[i] + F.fold(up.T @ x, sizes[i], 2, stride=2).flatten(2)
            for k in range(i + 1):
                x = self.block(x, sizes[i], i, i + 1 + k)
        x = end[:, :-1] @ F.unfold(x.unflatten(2, sizes[0]), 3, padding=1) + end[:, -1:]
        return (inp + x.unflatten(2, sizes[0]))[:, :, :high, :wide]


SLOPES, ORDER = ("input gradient", "weight gradient"), "another order of a window"
right(task, "nafnet_of_levels_with_channels_last", "a tree inside out, split gates, patches", NAFNetOfLevels)
right(task, "nafnet_of_stacked_weights", "packed stacks, norms in products, unfolding", StackedNAFNet)
wrong(
    task,
    NAFNetOfLevels,
    nafnet_first_block_adds_its_second_branch_to_its_input=("a residual left out", "encoders.0.0"),
    nafnet_norm_backward_leaves_out_the_mean_of_slopes=("custom backward", "encoders.1.0.norm1", SLOPES),
    nafnet_first_shuffle_lays_columns_before_rows=(ORDER, "ups.0.1"),
    nafnet_last_attention_pools_locally_in_evaluation=("local pooling in eval", "decoders.1.0.sca.0", "eval"),
)
wrong(
    task,
    StackedNAFNet,
    nafnet_pictures_padded_by_reflection=("another padding", ""),
    nafnet_second_downsampling_reads_columns_before_rows=(ORDER, "downs.1"),
    nafnet_attention_of_the_middle_pools_without_gradient=("detach", "middle_blks.0.sca.0", SLOPES),
    nafnet_one_norm_with_an_eps_of_a_thousandth=("another eps", "decoders.0.1.norm2"),
)
