"""A port of a small Squeezeformer: a tree of channels-last parts."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, Rows, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twenty_ninth_squeezeformer import HEADS, WIDTH, ASRModel, ctc_by_twenty, utterances

task = few("twenty_ninth_squeezeformer", ASRModel, utterances, ctc_by_twenty)


def waves(distance: Tensor) -> Tensor:
    """Sines and cosines by turns, in a last axis."""
    rate = 10000.0 ** (-torch.arange(0, WIDTH, 2, dtype=distance.dtype) / WIDTH)
    angle = distance[..., None] * rate
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)


class Affine(nn.Module):
    """A product from the right and an offset."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.matrix = leaf(torch.cat([x.weight.flatten(1) for x in layers]).T)
        self.offset = leaf(torch.cat([x.bias for x in layers]))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix + self.offset


class Taps(nn.Module):
    """A kernel for each channel of [N, T, C]."""

    def __init__(self, layer: nn.Conv1d):
        super().__init__()
        self.taps, self.offset = leaf(layer.weight[:, 0]), leaf(layer.bias)
        self.edge, self.stride = layer.padding[0], layer.stride[0]

    def forward(self, x: Tensor) -> Tensor:
        windows = F.pad(x, (0, 0, self.edge, self.edge)).unfold(1, self.taps.shape[1], self.stride)
        return (windows * self.taps).sum(-1) + self.offset


class Ear(nn.Module):
    """A quarter of the frames; bands before channels."""

    def __init__(self, embed: nn.Module, norm: nn.LayerNorm):
        super().__init__()
        self.wide, self.deep = leaf(embed.pw_conv.weight[:, 0]), leaf(embed.dw_conv.weight[:, 0])
        self.first, self.second = leaf(embed.pw_conv.bias), leaf(embed.dw_conv.bias)
        self.join = Affine(embed.input_proj[0])
        self.join.matrix = leaf(self.join.matrix.unflatten(0, (WIDTH, -1)).transpose(0, 1).flatten(0, 1))
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        x = torch.einsum("ntfij,cij->ntfc", x.unfold(1, 3, 2).unfold(2, 3, 2), self.wide) + self.first
        x = x.relu().unfold(1, 3, 2).unfold(2, 3, 2)
        x = (torch.einsum("ntfcij,cij->ntfc", x, self.deep) + self.second).relu()
        return self.norm(self.join(x.flatten(2) * WIDTH**0.5))


class Attend(nn.Module):
    def __init__(self, old: nn.Module):
        super().__init__()
        self.three, self.end = Affine(old.linear_q, old.linear_k, old.linear_v), Affine(old.linear_out)
        self.far = leaf(old.linear_pos.weight.T)
        self.lean, self.turned = pile([old.pos_bias_u, old.pos_bias_v]), False

    def forward(self, x: Tensor, real: Tensor, pace: int) -> Tensor:
        q, k, v = self.three(x).unflatten(2, (3, HEADS, -1)).unbind(2)
        frame = torch.arange(x.shape[1])
        distance = frame[:, None] - frame
        places = waves(pace * torch.arange(1 - x.shape[1], x.shape[1], dtype=x.dtype)) @ self.far
        places = torch.einsum("nihd,phd->nhip", q + self.lean[1], places.unflatten(1, (HEADS, -1)))
        index = (-distance if self.turned else distance) + x.shape[1] - 1
        score = torch.einsum("nihd,njhd->nhij", q + self.lean[0], k)
        score = score + places.gather(3, index.expand_as(score))
        score = (score / math.sqrt(q.shape[3])).where(real[:, None, None, :, 0], -math.inf)
        weight = (score - score.logsumexp(3, True)).exp()
        return self.end(torch.einsum("nhij,njhd->nihd", weight, v).flatten(2))


class Feed(nn.Module):
    def __init__(self, old: nn.Module):
        super().__init__()
        self.up, self.down = Affine(old.w_1), Affine(old.w_2)

    def forward(self, x: Tensor, real: Tensor, pace: int) -> Tensor:
        x = self.up(x)
        return self.down(x * x.sigmoid())


class Slide(nn.Module):
    def __init__(self, old: nn.Module):
        super().__init__()
        self.gate, self.taps = Affine(old.pointwise_conv1), Taps(old.depthwise_conv)
        self.rows, self.end, self.open = Rows(old.norm), Affine(old.pointwise_conv2), False

    def forward(self, x: Tensor, real: Tensor, pace: int) -> Tensor:
        a, b = self.gate(x if self.open else x * real).chunk(2, 2)
        x = self.rows(self.taps(a * b.sigmoid()))
        return self.end(x * x.sigmoid()) * real


class Around(nn.Module):
    """The scale and the bias before a part, the sum and the norm after it."""

    def __init__(self, make: type, old: nn.Module, norm: nn.LayerNorm):
        super().__init__()
        self.part, self.norm = make(old), norm
        self.tune = leaf(torch.cat([old.ada_scale, old.ada_bias])[:, 0])

    def forward(self, x: Tensor, real: Tensor, pace: int) -> Tensor:
        return self.norm(x + self.part(torch.addcmul(self.tune[1], x, self.tune[0]), real, pace))


def block(old: nn.Module) -> nn.ModuleList:
    pairs = (Attend, old.self_attn), (Feed, old.ffn1), (Slide, old.conv_module), (Feed, old.ffn2)
    norms = old.layer_norm1, old.layer_norm2, old.layer_norm3, old.layer_norm4
    return nn.ModuleList(Around(*pair, norm) for pair, norm in zip(pairs, norms, strict=True))


class HourglassOfSpeech(Port):
    """Blocks of parts within one wrapper, channels last; half the frames is a pace of two."""

    def take(self, model: ASRModel) -> None:
        old, fault = model.encoder, self.fault
        self.ear = Ear(old.embed, old.preln)
        self.blocks = nn.ModuleList(map(block, old.encoders))
        self.shrink = nn.Sequential(
            Taps(old.time_reduction_layer.dw_conv), Affine(old.time_reduction_layer.pw_conv)
        )
        self.grow, self.end = Affine(old.time_recover_layer), Affine(old.final_proj)
        self.spell = Affine(model.ctc.ctc_lo)
        self.blocks[0][2].part.open = fault == "squeezeformer_first_convolution_hears_the_padding"
        self.blocks[1][0].part.turned = fault == "squeezeformer_second_layer_turns_its_distances_round"
        if fault == "squeezeformer_third_batch_norm_keeps_a_tenth_of_its_statistics":
            self.blocks[2][2].part.rows.rate = 0.9

    def through(self, blocks: nn.ModuleList, x: Tensor, real: Tensor, pace: int = 1) -> Tensor:
        for part in (part for each in blocks for part in each):
            x = part(x, real, pace)
        return x

    def forward(self, speech: Tensor, speech_lengths: Tensor) -> Tensor:
        x = self.ear(speech)
        real = (4 * torch.arange(x.shape[1]) < speech_lengths[:, None])[..., None]
        x = self.through(self.blocks[:1], x, real)
        half = real[:, ::2]
        y = self.through(self.blocks[1:3], self.shrink(x * real)[:, : half.shape[1]], half, 2)
        frame = torch.arange(x.shape[1])
        tiled = self.fault == "squeezeformer_recovered_frames_tiled"
        y = self.grow(y)[:, frame % y.shape[1] if tiled else frame // 2]
        x = self.through(self.blocks[3:], (x + y) * real, real)
        x = self.spell(self.end(x))
        return x - x.logsumexp(2, True)


right(task, "squeezeformer_of_wrapped_parts", "a tree, fused products, windows", HourglassOfSpeech)
wrong(
    task,
    HourglassOfSpeech,
    squeezeformer_first_convolution_hears_the_padding=("no mask", "encoder.encoders.0.conv_module"),
    squeezeformer_second_layer_turns_its_distances_round=("a sign", "encoder.encoders.1.self_attn"),
    squeezeformer_third_batch_norm_keeps_a_tenth_of_its_statistics=(
        "an inverse momentum",
        "encoder.encoders.2.conv_module.norm",
        "buffer",
    ),
    squeezeformer_recovered_frames_tiled=("another order of repetition", "encoder"),
)
