"""Faults inside networks that are otherwise rewritten rightly from end to end, under other names."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bench.backward import Backward
from bench.case import case, in_place_of
from bench.cases._heldout_fault_tasks import masked, mobile, preact, rezero
from bench.cases._heldout_inside import inside
from bench.cases._heldout_rewritten_sequence import PackedEncoder, PackedLayer
from bench.cases._heldout_rewritten_vision import PixelBlock, SplitBlock, SplitPreActNet


@inside(SplitBlock, "bypassed", "stages.1", "rewritten network, wrong shortcut", preact, block=1)
def shortcut_of_the_raw_input(self, x, active):
    """The projection of a pre-activation block reads the block's input, not its activation."""
    return self.bypass(x)


@case("bug", "rewritten network, eps", preact, module="stages.2.norm2")
def eps_of_one_inner_norm(model):
    """One BatchNorm of seven has an eps of 1.01e-5: its result moves by a few parts in a million."""
    model.stages[2].norm2.eps = 1.01e-5
    return SplitPreActNet(model)


ATTENUATED = {"block": 1, "passes": "input gradient", "steps": 12}


@inside(SplitBlock, "second", "stages.1.conv2", "rewritten network, half detached", preact, **ATTENUATED)
def far_half_attenuates_its_gradient(self, x):
    """The conv over the second half of the channels sends back a gradient that is 1e-7 too small."""
    near, far = x.chunk(2, 1)
    return SplitBlock.second(self, torch.cat([near, Backward.apply(far, lambda g: g * (1 - 1e-7))], 1))


WIRES = ("stages.0.conv1", "stages.0.norm2", "stages.0.conv2", "stages.0")


@inside(SplitBlock, "second_order", WIRES, "rewritten network, permutation", preact)
def two_hidden_channels_crossed(self, weight, order):
    """The channels are permuted alike in both convs, but for two that the second conv reads crossed."""
    crossed = order.clone()
    crossed[[2, 3]] = order[[3, 2]]
    return weight[:, crossed]


@inside(SplitBlock, "second", "stages.2.conv2", "rewritten network, silent branch", rezero, block=2)
def wrong_padding_in_a_silent_branch(self, x):
    """The branch's gain starts at zero, so that no output shows that one side is padded by repetition."""
    x = F.pad(F.pad(x, (0, 1, 0, 0), mode="replicate"), (1, 0, 1, 1))
    return sum(map(F.conv2d, x.chunk(2, 1), (self.near, self.far)))


@inside(PixelBlock, "gate", "blocks.1.se.gate", "rewritten network, short constant", mobile, block=1)
def sixth_to_five_digits(self, x):
    """The hard sigmoid of one block multiplies by 0.16667 for a division by six."""
    return ((x + 3) * 0.16667).clamp(0, 1)


@inside(PixelBlock, "shifted", "blocks.1.depthwise", "rewritten network, one channel", mobile, block=1)
def corner_tap_of_the_last_channel(self, x):
    """The shifted depthwise conv reads the corner pixel of its last channel from the channel before."""
    pixels = PixelBlock.shifted(self, x)
    pixels[8] = torch.cat([pixels[8][..., :-1], pixels[8][..., -2:-1]], -1)
    return pixels


GATE = {"block": 2, "passes": "input gradient"}


@inside(PixelBlock, "attend", "blocks.2.se", "rewritten network, gate detached", mobile, **GATE)
def squeeze_detached(self, x):
    """The gate no longer sends a gradient through the mean that it is computed from."""
    return x * self.gate(self.excite(F.relu(self.squeeze(x.detach().mean((1, 2))))))[:, None, None]


@inside(PackedLayer, "looks", "layers.1.attention", "rewritten network, mask repeated", masked, block=1)
def mask_of_another_sample(self, mask):
    """With heads in the batch the mask is tiled where it has to be interleaved."""
    return mask.repeat(self.heads, 1)[:, None]


@inside(PackedLayer, "scaled", "layers.0.attention", "rewritten network, one head", masked)
def one_head_scaled_otherwise(self, scores):
    """The scores of the third head, as permuted, are 1e-6 too small."""
    scores = PackedLayer.scaled(self, scores).unflatten(0, (-1, self.heads))
    third = torch.arange(self.heads, device=scores.device) == 2
    return torch.where(third[:, None, None], scores * (1 - 1e-6), scores).flatten(0, 1)


@inside(PackedLayer, "weigh", "layers.1.attention", "rewritten network, padding mask", masked, block=1)
def padding_zeroed_after_the_softmax(self, scores, mask):
    """The weights of padding are set to zero after the softmax and the rest no longer add up to one."""
    return scores.softmax(-1) * self.looks(mask)


@in_place_of(
    "",
    "bug",
    "rewritten network, gradient by frequency",
    masked,
    "position_gradient_by_frequency",
    passes="weight gradient",
)
class PositionGradientByFrequency(PackedEncoder):
    """Positions are looked up as an embedding that divides its gradient by the count of each row."""

    def place(self, tokens):
        rows = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return self.tok(tokens) + F.embedding(rows, self.pos, scale_grad_by_freq=True)
