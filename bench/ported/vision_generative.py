"""A discriminator with its norms written out, an autoencoder with one layer for mean and variance."""

from __future__ import annotations

from torch import nn

from bench.case import case
from bench.cases._rewritten import SAME
from bench.ported._vision_generative import Gaussian, OldDiscriminator, discriminator, vae

SPECTRAL = ("conv1", "conv2")
SIGMAS = tuple(f"{name}.parametrizations.weight{deep}" for name in SPECTRAL for deep in ("", ".0"))


@case(SAME, "parametrization written out", discriminator)
def discriminator_of_the_paper(model: nn.Module) -> nn.Module:
    return OldDiscriminator(model)


# the weight's gradient, which is that of the input of what makes it
LOST = ("weight gradient", "input gradient")


@case("bug", "detached branch", discriminator, module=(*SPECTRAL, *SIGMAS), passes=LOST)
def discriminator_with_a_detached_norm(model: nn.Module, right: bool = False) -> nn.Module:
    """The spectral norm is detached, so that the weights' gradient lacks its part."""
    return OldDiscriminator(model, detached=not right)


@case("bug", "training in eval", discriminator, module=(*SPECTRAL, *SIGMAS), passes="eval")
def discriminator_iterating_in_eval(model: nn.Module, right: bool = False) -> nn.Module:
    """In eval mode the norm is that of one more step of the power iteration, not the stored one."""
    return OldDiscriminator(model, always=not right)


@case(SAME, "heads fused", vae)
def vae_of_one_head(model: nn.Module) -> nn.Module:
    return Gaussian(model)


@case("bug", "variance for deviation", vae, module="")
def vae_drawing_with_the_variance(model: nn.Module, right: bool = False) -> nn.Module:
    """The noise is scaled by the variance, not by the standard deviation."""
    return Gaussian(model, halved=right)
