"""The networks that are compared with the reference, which of them are the same function, and their arms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from omegaconf import DictConfig
from torch import nn

from driftlab.lockstep.arm import Arm
from driftlab.lockstep.control import nudge
from driftlab.network.calling import copied
from driftlab.network.pair import Pair
from models.rewrites.planted_bug import split_without_input_gradient
from models.rewrites.planted_faults import (
    batch_norm_with_other_eps,
    split_with_frozen_half,
    split_with_scaled_gradient,
    split_with_swapped_halves,
)
from suite.running.networks import apply_rewrite, load_rewrite, make_arm, make_pair

CONTROL, RIGHT = "control", "right"


@dataclass(frozen=True)
class Network:
    """One network beside the reference.

    Attributes:
        role: of its arms.
        words: what was done to the reference.
        same: whether it is the reference's function; the control counts as such.
        rewrite: makes it; None for the control and for the right rewrite, which the settings name.
    """

    role: str
    words: str
    same: bool
    rewrite: Callable[[nn.Module], nn.Module] | None = None


# The layers are those of ResNet18: which one a fault is in decides how large it is. With these the gradients
# at step 0 are off by 3e-5 to 1.4 of their norm (measured at width 8 on CIFAR-10, float64), and three of the
# five leave the first outputs as they are, to the bit.
NETWORKS = (
    Network(CONTROL, "control: one weight moved by one ulp", True),
    Network(RIGHT, "right rewrite", True),
    Network(
        "scaled",
        "half of a conv: weight gradient 0.1 % too large",
        False,
        partial(split_with_scaled_gradient, match="layer3.0.shortcut.0"),
    ),
    Network(
        "eps",
        "a BatchNorm: eps 1e-3 instead of 1e-5",
        False,
        partial(batch_norm_with_other_eps, match="layer4.1.bn1"),
    ),
    Network(
        "frozen",
        "half of a conv: never updated",
        False,
        partial(split_with_frozen_half, match="layer4.0.conv1"),
    ),
    Network(
        "detached",
        "half of a conv: no input gradient",
        False,
        partial(split_without_input_gradient, match="layer4.0.conv1"),
    ),
    Network(
        "swapped",
        "a conv: halves in the wrong order",
        False,
        partial(split_with_swapped_halves, match="layer3.0.conv1"),
    ),
)


def subjects(settings: DictConfig, reference: nn.Module, seed: int) -> dict[str, Pair]:
    """Role -> the pair of the reference and that network, on their device; the control is no pair.

    Raises:
        ConfigurationError: a rewrite does not fit the network of the settings.
    """
    made = {}
    for network in NETWORKS:
        if network.role != CONTROL:
            target = settings.rewrite.target if network.rewrite is None else network.words
            rewrite = network.rewrite or load_rewrite(settings)
            candidate = apply_rewrite(rewrite, target, reference)
            pair = make_pair(settings, copied(reference), candidate, rewrite, target, seed)
            pair.reference.to(settings.device)
            pair.candidate.to(settings.device)
            made[network.role] = pair
    return made


def build_arms(
    settings: DictConfig, reference: nn.Module, pairs: Mapping[str, Pair], nudge_seed: int
) -> list[Arm]:
    """Every network in both dtypes, each behind the reference of its dtype."""
    arms: list[Arm] = []
    for dtype, steps in (("float64", settings.float64_steps), ("float32", settings.steps)):
        own = make_arm(settings, "reference", dtype, reference, steps)
        own.against = arms[0] if arms else None
        others = [make_arm(settings, CONTROL, dtype, reference, steps)]
        nudge(others[0].module, nudge_seed)
        for role, pair in pairs.items():
            others.append(make_arm(settings, role, dtype, pair.candidate, steps))
            others[-1].fold = pair.comparable
        for arm in others:
            arm.against = own
        arms += [own, *others]
    return arms
