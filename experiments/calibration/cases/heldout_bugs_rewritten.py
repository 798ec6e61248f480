"""Faults inside networks that are otherwise rewritten rightly from end to end, under other names."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from experiments.calibration.case import case
from experiments.calibration.cases._heldout_fault_parts import Backward
from experiments.calibration.cases._heldout_fault_tasks import masked, mobile, preact, rezero
from experiments.calibration.cases._heldout_rewritten_sequence import PackedEncoder, PackedLayer
from experiments.calibration.cases._heldout_rewritten_vision import (
    PixelBlock,
    PixelMobileNet,
    SplitBlock,
    SplitPreActNet,
)


@case("bug", "rewritten network, wrong shortcut", preact, module="stages.1", passes="forward")
def shortcut_of_the_raw_input(model):
    """The projection of a pre-activation block reads the block's input, not its activation."""

    class Block(SplitBlock):
        def bypassed(self, x, active):
            return self.bypass(x)

    return SplitPreActNet(model, {1: Block})


@case("bug", "rewritten network, eps", preact, module="stages.2.norm2", passes="forward")
def eps_of_one_inner_norm(model):
    """One BatchNorm of seven has an eps of 1.01e-5: its result moves by a few parts in a million."""
    model.stages[2].norm2.eps = 1.01e-5
    return SplitPreActNet(model)


@case(
    "bug",
    "rewritten network, half detached",
    preact,
    module="stages.1.conv2",
    passes="input gradient",
    steps=12,
)
def far_half_attenuates_its_gradient(model):
    """The conv over the second half of the channels sends back a gradient that is 1e-7 too small."""

    class Block(SplitBlock):
        def second(self, x):
            near, far = x.chunk(2, 1)
            return super().second(torch.cat([near, Backward.apply(far, lambda g: g * (1 - 1e-7))], 1))

    return SplitPreActNet(model, {1: Block})


WIRES = ("stages.0.conv1", "stages.0.norm2", "stages.0.conv2", "stages.0")


@case("bug", "rewritten network, permutation", preact, module=WIRES, passes="forward")
def two_hidden_channels_crossed(model):
    """The channels are permuted alike in both convs, but for two that the second conv reads crossed."""

    class Block(SplitBlock):
        def second_order(self, weight, order):
            crossed = order.clone()
            crossed[[2, 3]] = order[[3, 2]]
            return weight[:, crossed]

    return SplitPreActNet(model, {0: Block})


@case("bug", "rewritten network, silent branch", rezero, module="stages.2.conv2", passes="forward")
def wrong_padding_in_a_silent_branch(model):
    """The branch's gain starts at zero, so that no output shows that one side is padded by repetition."""

    class Block(SplitBlock):
        def second(self, x):
            x = F.pad(F.pad(x, (0, 1, 0, 0), mode="replicate"), (1, 0, 1, 1))
            return sum(map(F.conv2d, x.chunk(2, 1), (self.near, self.far)))

    return SplitPreActNet(model, {2: Block})


@case("bug", "rewritten network, short constant", mobile, module="blocks.1.se.gate", passes="forward")
def sixth_to_five_digits(model):
    """The hard sigmoid of one block multiplies by 0.16667 for a division by six."""

    class Block(PixelBlock):
        def gate(self, x):
            return ((x + 3) * 0.16667).clamp(0, 1)

    return PixelMobileNet(model, {1: Block})


@case("bug", "rewritten network, one channel", mobile, module="blocks.1.depthwise", passes="forward")
def corner_tap_of_the_last_channel(model):
    """The shifted depthwise conv reads the corner pixel of its last channel from the channel before."""

    class Block(PixelBlock):
        def shifted(self, x):
            pixels = super().shifted(x)
            pixels[8] = torch.cat([pixels[8][..., :-1], pixels[8][..., -2:-1]], -1)
            return pixels

    return PixelMobileNet(model, {1: Block})


@case("bug", "rewritten network, gate detached", mobile, module="blocks.2.se", passes="input gradient")
def squeeze_detached(model):
    """The gate no longer sends a gradient through the mean that it is computed from."""

    class Block(PixelBlock):
        def attend(self, x):
            return x * self.gate(self.excite(F.relu(self.squeeze(x.detach().mean((1, 2))))))[:, None, None]

    return PixelMobileNet(model, {2: Block})


@case("bug", "rewritten network, mask repeated", masked, module="layers.1.attention", passes="forward")
def mask_of_another_sample(model):
    """With heads in the batch the mask is tiled where it has to be interleaved."""

    class Layer(PackedLayer):
        def looks(self, mask):
            return mask.repeat(self.heads, 1)[:, None]

    return PackedEncoder(model, {1: Layer})


@case("bug", "rewritten network, one head", masked, module="layers.0.attention", passes="forward")
def one_head_scaled_otherwise(model):
    """The scores of the third head, as permuted, are 1e-6 too small."""

    class Layer(PackedLayer):
        def scaled(self, scores):
            scores = super().scaled(scores).unflatten(0, (-1, self.heads))
            third = torch.arange(self.heads, device=scores.device) == 2
            return torch.where(third[:, None, None], scores * (1 - 1e-6), scores).flatten(0, 1)

    return PackedEncoder(model, {0: Layer})


@case("bug", "rewritten network, padding mask", masked, module="layers.1.attention", passes="forward")
def padding_zeroed_after_the_softmax(model):
    """The weights of padding are set to zero after the softmax and the rest no longer add up to one."""

    class Layer(PackedLayer):
        def weigh(self, scores, mask):
            return scores.softmax(-1) * self.looks(mask)

    return PackedEncoder(model, {1: Layer})


@case("bug", "rewritten network, gradient by frequency", masked, module="", passes="weight gradient")
def position_gradient_by_frequency(model):
    """Positions are looked up as an embedding that divides its gradient by the count of each row."""

    class Encoder(PackedEncoder):
        def place(self, tokens):
            rows = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
            return self.tok(tokens) + F.embedding(rows, self.pos, scale_grad_by_freq=True)

    return Encoder(model)
