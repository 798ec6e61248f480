"""What one seed of ``split_gradient`` gives: the pair in training, the split as asked, sweep, controls."""

from __future__ import annotations

from collections import OrderedDict

import torch
from omegaconf import DictConfig
from torch import nn

from driftlab.arithmetic.integers import EXACT_PASSES, IntegerPair
from driftlab.arithmetic.passes import Recorded
from driftlab.diagnosis import diagnosed
from driftlab.network.calling import whole
from driftlab.network.pair import Pair, the_pair
from driftlab.process import random_state_kept
from driftlab.record.seed_record import SeedRecord
from experiments.split_gradient.case import Case, draw_as_asked, read_case
from experiments.split_gradient.literal import measure_literal
from experiments.split_gradient.sweep import cases, measure_controls, measure_sweep
from models.rewrites.split_conv import split_conv
from suite.running.asking import Measured


def about(settings: DictConfig) -> str:
    """Raises ConfigurationError where the settings are no case, or the sweep no cases."""
    return f"{read_case(settings.case, 'case').title}; a sweep of {len(cases(settings))} others"


def measure(settings: DictConfig, seed: int) -> Measured:
    """Raises ConfigurationError where the settings are no case, or the sweep no cases."""
    case, swept = read_case(settings.case, "case"), cases(settings)
    values = {
        "literal": measure_literal(case, seed, settings.device),
        "sweep": measure_sweep(swept, seed, settings.device),
        "controls": measure_controls(seed, settings.scale.name),
    }
    with random_state_kept():
        values["integers"] = _integers(case, seed, settings.device)
        record = _record(case, seed, settings.device, settings.window.steps, settings.window.learning_rate)
    return Measured(record, values | {"window": _ends(record)})


def _pair(case: Case, seed: int, device: str):
    # on the meta device no random numbers are drawn only to be thrown away
    conv = nn.Conv2d(case.in_channels, case.out_channels, case.kernel_size, bias=False, device="meta")
    conv.weight = nn.Parameter(draw_as_asked(case, seed).weight)
    network = nn.Sequential(OrderedDict(conv=conv)).to(device)
    return the_pair(network, lambda model: split_conv(model, dim="out", sizes=case.split), None)


def _record(case: Case, seed: int, device: str, steps: int, rate: float) -> SeedRecord:
    """Both in training on the sum of their outputs, whose gradient is ones, on the batch as asked."""
    mine, theirs, fold = _pair(case, seed, device)

    def optimizer(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), lr=rate)

    inputs = draw_as_asked(case, seed).inputs.to(device)
    # A run that diverges ends at twice the loss it began with, which says nothing of a negative one: this is
    # above 0 at first, and falls in a straight line.
    offset = float(mine.conv.weight.detach().abs().sum() * inputs.abs().sum())

    def loss(y: torch.Tensor, _: object) -> torch.Tensor:
        return y.sum() + offset

    subject = Pair(mine, theirs, fold, loss, optimizer, optimizer, whole, seed)
    batches = [(inputs.requires_grad_(), torch.zeros(case.batch, device=device))]
    return diagnosed(subject, batches, steps)


def _ends(record: SeedRecord) -> dict:
    """How far the weights are apart after the last update (relative); empty where none was made."""
    found = {}
    for role in ("candidate", "control"):
        distances = record.series("weight_distance", f"{role}.float32")
        if distances:
            found[role] = distances[max(distances)]
            found["steps"] = max(distances)
    return found


def _integers(case: Case, seed: int, device: str) -> dict:
    """The integer probe on the convolution by itself: is the split the original bit for bit, pass by pass?"""
    mine, theirs, fold = _pair(case, seed, device)
    pair = IntegerPair(mine, theirs, fold, ("", ""), seed)
    pair.set_weights(pair.small)
    call = Recorded((draw_as_asked(case, seed).inputs.to(device).requires_grad_(),))
    found = pair.exactness(pair.inputs(call, pair.small))
    return {p: None if found is None else p not in found for p in EXACT_PASSES}
