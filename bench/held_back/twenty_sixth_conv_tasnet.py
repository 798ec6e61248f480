"""Two ports of a small Conv-TasNet: a tree with the channels last, and one class of stacked weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twenty_sixth_conv_tasnet import LAYERS, SOURCES, ConvTasNet, lacking_si_snr, voices

task = few("twenty_sixth_conv_tasnet", ConvTasNet, voices, lacking_si_snr)


class Leveled(nn.Module):
    """[N, T, C] brought to mean nought and spread one over all but the first axis."""

    def __init__(self, norm: nn.GroupNorm):
        super().__init__()
        self.gain, self.offset, self.eps = leaf(norm.weight), leaf(norm.bias), norm.eps

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.offset, F.layer_norm(x, x.shape[1:], eps=self.eps), self.gain)


def bend(x: Tensor, slope: Tensor) -> Tensor:
    return x.relu() - slope * (-x).relu()


class Product(nn.Module):
    """Convolutions of one tap, side by side, as one matrix; then a slope for what is below nought."""

    def __init__(self, *layers: nn.Conv1d, slope: nn.PReLU | None = None):
        super().__init__()
        self.slope = None if slope is None else leaf(slope.weight)
        self.matrix = leaf(torch.cat([x.weight[..., 0] for x in layers]).T)
        self.add = leaf(torch.cat([x.bias for x in layers]))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.matrix + self.add
        return y if self.slope is None else bend(y, self.slope)


class Spaced(nn.Module):
    """A filter for each channel of [N, T, C], with gaps between its taps, and a slope."""

    def __init__(self, layer: nn.Conv1d, slope: nn.PReLU):
        super().__init__()
        self.taps, self.add, self.gap = leaf(layer.weight[:, 0]), leaf(layer.bias), layer.dilation[0]
        self.slope, self.behind = leaf(slope.weight), False

    def forward(self, x: Tensor) -> Tensor:
        room = self.gap * (self.taps.shape[1] - 1)
        before = room if self.behind and not self.training else room // 2
        windows = F.pad(x, (0, 0, before, room - before)).unfold(1, room + 1, 1)[..., :: self.gap]
        return bend(torch.einsum("ntck,ck->ntc", windows, self.taps) + self.add, self.slope)


class Hopping(nn.Module):
    """A waveform [N, L] as products of windows of two hops, [N, T, C]."""

    def __init__(self, layer: nn.Conv1d):
        super().__init__()
        self.basis, self.hop = leaf(layer.weight[:, 0].T), layer.stride[0]

    def forward(self, x: Tensor) -> Tensor:
        hops = F.pad(x, (self.hop, self.hop + -x.shape[1] % self.hop)).unflatten(1, (-1, self.hop))
        return torch.cat([hops[:, :-1], hops[:, 1:]], 2) @ self.basis


class Spreading(nn.Module):
    """[N, T, C] -> [N, L]: a filter, kept back to front, over frames with zeros between them."""

    def __init__(self, layer: nn.ConvTranspose1d, turned: bool = True):
        super().__init__()
        self.kernel, self.hop = leaf(layer.weight[:, 0].flip([1] if turned else [])), layer.stride[0]

    def forward(self, x: Tensor) -> Tensor:
        apart = F.pad(x[:, :, None], (0, 0, 0, self.hop - 1)).flatten(1, 2)[:, : 1 - self.hop]
        edge = self.kernel.shape[1] - 1 - self.hop
        return F.conv1d(apart.transpose(1, 2), self.kernel[None], padding=edge)[:, 0]


class ConvTasNetOfPaths(Port):
    """Stacks of paths, whose two ways out are one product, over [N, T, C]."""

    def take(self, model: ConvTasNet) -> None:
        masks, fault = model.mask_generator, self.fault
        self.listen = Hopping(model.encoder)
        self.enter = nn.Sequential(Leveled(masks.input_norm), Product(masks.input_conv))
        self.enter[0].eps = 1e-5 if fault == "conv_tasnet_input_norm_of_the_default_epsilon" else 1e-8
        self.paths, self.ways = nn.ModuleList(), nn.ModuleList()
        for block in masks.conv_layers:
            widen, first, level, filters, second, again = block.conv_layers
            parts = Product(widen, slope=first), Leveled(level), Spaced(filters, second), Leveled(again)
            self.paths.append(nn.Sequential(*parts))
            self.ways.append(Product(*filter(None, (block.skip_out, block.res_out))))
        self.paths[1][2].behind = fault == "conv_tasnet_second_block_causal_in_evaluation"
        self.slope, self.leave = leaf(masks.output_prelu.weight), Product(masks.output_conv)
        self.speak = Spreading(model.decoder, fault != "conv_tasnet_decoder_kernel_not_turned")

    def forward(self, input: Tensor) -> Tensor:
        heard = self.listen(input[:, 0])
        x, skips = self.enter(heard), []
        for path, ways in zip(self.paths, self.ways, strict=True):
            skip, *more = ways(path(x)).split(x.shape[2], 2)
            x = sum(more, x)
            skips.append(skip)
        shares = self.leave(bend(torch.stack(skips).sum(0), self.slope)).sigmoid().chunk(SOURCES, 2)
        if self.fault == "conv_tasnet_masked_features_taken_for_a_constant":
            heard = heard.detach()
        return torch.stack([self.speak(x * heard) for x in shares], 1)[..., : input.shape[2]]


def rows(layer: nn.Conv1d) -> Tensor:
    """The kernel of each channel, flat, and its bias."""
    return torch.cat([layer.weight.flatten(1), layer.bias[:, None]], 1)


def both(*norms: nn.GroupNorm) -> Tensor:
    return torch.stack([x for norm in norms for x in (norm.weight, norm.bias)])


class StackedConvTasNet(Port):
    """Stacks of rows by block; the skips are one product at the end, the decoder adds halves of frames."""

    def take(self, model: ConvTasNet) -> None:
        masks, blocks = model.mask_generator, model.mask_generator.conv_layers
        self.basis = pile([model.encoder.weight[:, 0], model.decoder.weight[:, 0]])
        self.ends = nn.ParameterList([rows(masks.input_conv), rows(masks.output_conv)])
        self.level = leaf(both(masks.input_norm))
        self.levels = pile(both(b.conv_layers[2], b.conv_layers[5]) for b in blocks)
        self.slopes = pile(torch.cat([b.conv_layers[i].weight for i in (1, 4)]) for b in blocks)
        self.slope = leaf(masks.output_prelu.weight)
        self.wide, self.deep = (pile(rows(b.conv_layers[i]) for b in blocks) for i in (0, 3))
        self.skip = pile(rows(b.skip_out) for b in blocks)
        self.back = pile(rows(b.res_out) for b in blocks[:-1])

    def mix(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.einsum("oc,nct->not", w[:, :-1], x) + w[:, -1:]

    def even(self, x: Tensor, level: Tensor, over: tuple = (1, 2), correction: int = 0) -> Tensor:
        var, mean = torch.var_mean(x, over, correction=correction, keepdim=True)
        scale = level[0][:, None] / (var + 1e-8).sqrt()
        return x * scale + (level[1][:, None] - mean * scale)

    def block(self, i: int, x: Tensor) -> Tensor:
        at = self.fault, i
        gap = 2 ** (i if at == ("conv_tasnet_second_stack_starts_at_the_next_dilation", 3) else i % LAYERS)
        over = (1,) if at == ("conv_tasnet_third_block_first_norm_by_frame", 2) else (1, 2)
        correction = int(at == ("conv_tasnet_fifth_block_second_norm_corrects_its_variance", 4))
        first, second = self.slopes[i]
        y = self.mix(x, self.wide[i])
        y = torch.where(y > 0, y, first * y)
        y = F.pad(self.even(y, self.levels[i, :2], over), (gap, gap))
        *taps, add = self.deep[i][..., None].unbind(1)
        y = add + sum(w * y[..., k * gap :][..., : x.shape[2]] for k, w in enumerate(taps))
        return self.even(torch.where(y > 0, y, second * y), self.levels[i, 2:], correction=correction)

    def masks(self, feats: Tensor) -> Tensor:
        x, kept = self.mix(self.even(feats, self.level), self.ends[0]), []
        for i in range(len(self.skip)):
            kept.append(self.block(i, x))
            if i < len(self.back):
                x = x + self.mix(kept[i], self.back[i])
        x = torch.einsum("lbc,lnct->nbt", self.skip[..., :-1], torch.stack(kept))
        x = x + self.skip[..., -1:].sum(0)
        x = self.mix(torch.where(x > 0, x, self.slope * x), self.ends[1])
        if self.fault == "conv_tasnet_masks_of_sources_interleaved":
            return x.unflatten(1, (-1, SOURCES)).transpose(1, 2).sigmoid()
        return x.unflatten(1, (SOURCES, -1)).sigmoid()

    def forward(self, input: Tensor) -> Tensor:
        size, length = self.basis.shape[2], input.shape[2]
        hop = size // 2
        windows = F.pad(input[:, 0], (hop, hop + -length % hop)).unfold(1, size, hop)
        feats = torch.einsum("fk,ntk->nft", self.basis[0], windows)
        frames = torch.einsum("nsft,nft,fk->nstk", self.masks(feats), feats, self.basis[1])
        return (frames[:, :, 1:, :hop] + frames[:, :, :-1, hop:]).flatten(2)[..., :length]


SLOPES, BLOCKS = ("input gradient", "weight gradient"), "mask_generator.conv_layers"
right(task, "conv_tasnet_of_paths_with_channels_last", "a tree, hops, joined ways out", ConvTasNetOfPaths)
right(task, "conv_tasnet_of_stacked_weights", "packed stacks, one product of skips", StackedConvTasNet)
wrong(
    task,
    ConvTasNetOfPaths,
    conv_tasnet_input_norm_of_the_default_epsilon=("another epsilon", "mask_generator.input_norm"),
    conv_tasnet_second_block_causal_in_evaluation=("padding in eval", f"{BLOCKS}.1.conv_layers.3", "eval"),
    conv_tasnet_masked_features_taken_for_a_constant=("detach", "", SLOPES),
    conv_tasnet_decoder_kernel_not_turned=("a kernel back to front", "decoder"),
)
wrong(
    task,
    StackedConvTasNet,
    conv_tasnet_third_block_first_norm_by_frame=("a norm over fewer axes", f"{BLOCKS}.2.conv_layers.2"),
    conv_tasnet_second_stack_starts_at_the_next_dilation=("another dilation", f"{BLOCKS}.3.conv_layers.3"),
    conv_tasnet_fifth_block_second_norm_corrects_its_variance=("unbiased", f"{BLOCKS}.4.conv_layers.5"),
    conv_tasnet_masks_of_sources_interleaved=("another channel order", "mask_generator"),
)
