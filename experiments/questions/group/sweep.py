"""Grouped convs of all kinds against convs side by side."""

from __future__ import annotations

import random

import torch
from omegaconf import DictConfig
from torch import nn

from experiments.questions.group.equal import compare, integers_agree, side_by_side

CASES = {"smoke": 12, "small": 40, "full": 400}  # a seed; every seed draws its own
IMAGE = (13, 11)  # pixels, at least the widest kernel, dilated: 9


def sweep(settings: DictConfig, seed: int) -> list[dict]:
    """Random settings of nn.Conv2d, each with what the float32 passes and the integers of the pair say."""
    drawn = random.Random(seed)
    cases = CASES[settings.scale.name] if settings.sweep.cases is None else settings.sweep.cases
    return [_measured(draw(drawn, settings.sweep), settings.device, seed) for _ in range(cases)]


def draw(drawn: random.Random, sweep: DictConfig) -> dict:
    """Settings of one conv. "depthwise" has a group for every input channel."""
    kind = drawn.choice(list(sweep.groups))
    each = drawn.choice(list(sweep.channels))
    groups = each if kind == "depthwise" else kind
    inputs = each if kind == "depthwise" else each * groups
    return {
        "in_channels": inputs,
        "out_channels": groups * drawn.choice([1, 2, 5]),
        "groups": groups,
        "kernel_size": drawn.choice([1, 3, 5, (5, 3)]),
        "stride": drawn.choice([1, 2]),
        "dilation": drawn.choice([1, 2]),
        "padding": drawn.choice([0, 1, 2]),
        "padding_mode": drawn.choice(["zeros", "reflect", "replicate", "circular"]),
        "bias": drawn.choice([False, True]),
    }


def _measured(case: dict, device: str, seed: int) -> dict:
    x = torch.randn(2, case["in_channels"], *IMAGE).to(device)
    pair = side_by_side(nn.Conv2d(**case), x)
    exact = integers_agree(pair, seed)
    passes = [
        {key: found[key] for key in ("pass", "absolute", "u", "bound", "share", "terms", "equal", "entries")}
        for found in compare(pair, "float32")
    ]
    return {
        "groups": "depthwise" if case["groups"] == case["in_channels"] else case["groups"],
        "case": ", ".join(f"{name}={value}" for name, value in case.items()),
        "integers": exact,
        "passes": passes,
    }
