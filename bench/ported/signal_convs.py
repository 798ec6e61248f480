"""Causal convs by padding, WaveNet layers of two convs, a spectrogram by a Fourier matrix."""

from __future__ import annotations

from torch import nn

from bench.case import GRADIENTS, case
from bench.cases._rewritten import SAME
from bench.ported._signal_convs import CausalNet, OneConv, sounds, tcn, wavenet
from bench.ported._signal_sounds import SoundsByFrames


@case(SAME, "padded before", tcn)
def tcn_of_taps(model: nn.Module) -> nn.Module:
    return CausalNet(model)


@case("bug", "off by one", tcn, module=("network.1", "network.1.conv2", "network.1.chomp2"))
def tcn_one_sample_late(model: nn.Module, right: bool = False) -> nn.Module:
    """The second conv of the second block pads one sample too many, so that it is a sample late."""
    return CausalNet(model, late=0 if right else 1)


@case(SAME, "filter and gate fused", wavenet)
def wavenet_of_two_convs(model: nn.Module) -> nn.Module:
    return OneConv(model)


@case("bug", "detached branch", wavenet, module=("", "layers.0", "layers.0.skip"), passes=GRADIENTS)
def wavenet_with_a_detached_skip(model: nn.Module, right: bool = False) -> nn.Module:
    """The first layer's skip is detached when it is collected."""
    return OneConv(model, detached=not right)


@case(SAME, "Fourier matrix", sounds)
def sounds_by_frames(model: nn.Module) -> nn.Module:
    return SoundsByFrames(model)


@case("bug", "window", sounds, module="spectrogram")
def sounds_with_a_symmetric_window(model: nn.Module, right: bool = False) -> nn.Module:
    """The Hann window is symmetric, as SciPy makes it for filters, not periodic."""
    return SoundsByFrames(model, periodic=right)
