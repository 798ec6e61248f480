"""What driftlab's functions say while their caller has TF32 on: they must see through it, and leave it on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from scripts.gpu_parts.kernels import TF32_WAYS, tf32_on
from scripts.gpu_parts.part import Check, Found, Items, Part

if TYPE_CHECKING:
    from torch import Tensor, nn

Asked = Callable[[], tuple[bool, str]]  # whether it answered as it should, and what

SAME = ("bit_identical", "round_off")
# What is lost where TF32 is on: half of a layer is off by less than TF32 rounds, by more than float32 does.
SLIGHTLY = 2.0**-18


def items(check: Check) -> Items:
    quick = {
        "assert_equivalent, half of a layer off by 2^-18": partial(_asserted, _slightly_wrong, False),
        "gradient_check": _gradient,
        "assert_equivalent, a right split": partial(_asserted, _split, True),
        "diagnose, a layer in 11 bits": partial(_diagnosed, _narrow, ("reduced_precision",)),
    }
    once = {
        "diagnose, a right split": partial(_diagnosed, _split, SAME),
        "diagnose, half of a layer off by 2^-18": partial(_diagnosed, _slightly_wrong, ("bug",)),
    }
    asked = [(name, way, quick[name]) for name in quick for way in TF32_WAYS]
    asked = asked[:3:2] if check.smoke else asked + [(name, TF32_WAYS[0], once[name]) for name in once]
    return {f"{name} ({way})": partial(_with_tf32, way, prepare) for name, way, prepare in asked}


def _with_tf32(way: str, prepare: Callable[[], Asked], check: Check) -> Found:
    """Also whether settings and random state are the caller's afterwards."""
    import torch

    from driftlab.process.flags import changes, settings

    with tf32_on(way):
        ask = prepare()
        was, random = settings(), torch.cuda.get_rng_state()
        right, reading = ask()
        changed = list(map(str, changes(was, settings())))
        if not torch.equal(random, torch.cuda.get_rng_state()):
            changed.append("the random state of the GPU")
    if changed:
        reading += f"; left changed: {', '.join(changed)}"
    return Found(reading, right and not changed)


def _network() -> nn.Module:
    import torch
    from torch import nn

    torch.manual_seed(1)
    layers = nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)).cuda()


def _images() -> Tensor:
    import torch

    return torch.randn(16, 3, 16, 16, generator=torch.Generator().manual_seed(2)).cuda()


def _split(model: nn.Module) -> nn.Module:
    from models.rewrites.split_conv import split_conv

    return split_conv(model, match="2")


def _slightly_wrong(model: nn.Module) -> nn.Module:
    split = _split(model)
    split[2].parts[1].register_forward_hook(lambda module, given, out: out * (1 + SLIGHTLY))
    return split


def _narrow(model: nn.Module) -> nn.Module:
    """As TF32 would, on any device: the operands of one layer are rounded to 11 bits."""
    model[2].register_forward_pre_hook(lambda module, given: tuple(map(_in_11_bits, given)))
    return model


def _in_11_bits(tensor: Tensor) -> Tensor:
    """By adding and taking away what leaves 11 bits (Dekker, 1971); the gradient passes as it is."""
    import torch

    if tensor.dtype is not torch.float32:
        return tensor
    high = tensor.detach() * (2.0**13 + 1)
    return tensor + (high - (high - tensor.detach()) - tensor.detach())


def _diagnosed(rewrite: Callable, expected: tuple[str, ...]) -> Asked:
    import torch

    from driftlab import diagnose

    targets = torch.randint(10, (16,), generator=torch.Generator().manual_seed(3)).cuda()
    reference, batches = _network(), [(_images(), targets)]

    def ask() -> tuple[bool, str]:
        diagnosis = diagnose(reference, rewrite, batches, steps=9)
        right = diagnosis.verdict in expected
        instead = "" if right else f" instead of {' or '.join(expected)}: {diagnosis.headline}"
        return right, f"{diagnosis.verdict}{instead}"

    return ask


def _asserted(rewrite: Callable, equivalent: bool) -> Asked:
    from driftlab import assert_equivalent

    reference, images = _network(), _images()

    def ask() -> tuple[bool, str]:
        try:
            assert_equivalent(reference, rewrite, images)
        except AssertionError as error:
            return not equivalent, f"told apart: {' '.join(str(error).split())[:200]}"
        return equivalent, "taken as equivalent"

    return ask


def _gradient() -> Asked:
    from driftlab import gradient_check

    network, images = _network(), _images()

    def ask() -> tuple[bool, str]:
        found = gradient_check(network, images, lambda out: out.square().sum())
        return bool(found), " ".join(str(found).split())[:200]

    return ask


PART = Part("doors", "driftlab's functions while their caller has TF32 on", 1.5, items)
