"""All that one seed of the question about groups measures."""

from __future__ import annotations

from collections.abc import Callable

import torch
from omegaconf import DictConfig
from torch import nn

from driftlab.process import random_state_kept
from experiments.group_semantics.check import check, net_sizes
from experiments.group_semantics.cost import costs
from experiments.group_semantics.equal import compare, errors, integers_agree, kernels, side_by_side, sweep
from experiments.group_semantics.reach import (
    GROUPED,
    INTERLEAVED,
    PLAIN,
    blocks,
    layer_reach,
    linearised,
    through_convs,
    to_scores,
    used_inputs,
)
from experiments.group_semantics.verdicts import (
    ASKED,
    case_conv,
    conv_name,
    literal_record,
    verdicts,
    zeros_pulled,
)
from models.grouped_net import TILES, GroupedNet
from models.rewrites.interleave_groups import interleave_groups
from suite.running.asking import Measured

GROUPED_LAYERS = ("conv2_s1", "conv4_s1", "conv5_s1")


def measure(settings: DictConfig, seed: int) -> Measured:
    """Reach, use, cost, equality and verdicts; each part draws from a generator that starts at ``seed``."""
    check(settings)
    parts: dict[str, Callable] = {
        "layers": lambda: _layers(settings),
        "through": lambda: _through(settings),
        "used": lambda: _used(settings),
        "cost": lambda: _cost(settings),
        "literal": lambda: _literal(settings, seed),
        "sweep": lambda: sweep(settings, seed),
        "verdicts": lambda: verdicts(settings, seed),
        "zeros": lambda: zeros_pulled(settings),
    }
    with random_state_kept():
        values = {name: _seeded(seed, part) for name, part in parts.items()}
        return Measured(_seeded(seed, lambda: literal_record(settings, seed)), values)


def _seeded(seed: int, part: Callable):
    torch.manual_seed(seed)
    return part()


def _watched(settings: DictConfig) -> dict:
    """The sizes of the network whose gradients are looked at: the thinned one's at the smallest scale."""
    return net_sizes(settings.thin if settings.scale.name == "smoke" else settings.net)


def _net(settings: DictConfig, groups: int) -> GroupedNet:
    return GroupedNet(groups, **_watched(settings), classes=settings.net.classes)


def _puzzle(settings: DictConfig) -> torch.Tensor:
    return torch.randn(1, TILES, 3, *_watched(settings)["tile"]).to(settings.device)


def _layers(settings: DictConfig) -> dict:
    """layer -> kind -> matrix, for the grouped convs of the network and for the conv that was asked about."""
    net = _net(settings, settings.net.groups)
    layers = {f"conv.{name}": net.conv[name] for name in GROUPED_LAYERS}
    layers[ASKED] = case_conv(settings.case)
    return {name: _kinds(conv, torch.device(settings.device)) for name, conv in layers.items()}


def _kinds(conv: nn.Conv2d, device: torch.device) -> dict:
    inputs, outputs = conv.in_channels, conv.out_channels
    image = [2 * conv.kernel_size[0] + 1] * 2
    contiguous = blocks(outputs, inputs, conv.groups)
    made = {
        PLAIN: (
            nn.Conv2d(inputs, outputs, conv.kernel_size, padding=conv.padding),
            1,
            blocks(outputs, inputs, 1),
        ),
        GROUPED: (conv, conv.groups, contiguous),
        INTERLEAVED: (interleave_groups(conv), conv.groups, blocks(outputs, inputs, conv.groups, True)),
    }
    return {
        kind: layer_reach(layer, image, {"unexpected": defined, "moved": contiguous}, device)
        | {"groups": groups}
        for kind, (layer, groups, defined) in made.items()
    }


def _through(settings: DictConfig) -> dict:
    """From conv1's channels to every later layer, as the network is and with conv3 grouped too."""
    device, net = torch.device(settings.device), _net(settings, settings.net.groups)
    found = {
        "as it is": through_convs(net, device) | {"scores": to_scores(net.to(device), _puzzle(settings))}
    }
    conv3 = net.conv["conv3_s1"]
    sizes = conv3.in_channels, conv3.out_channels, 3
    net.conv["conv3_s1"] = nn.Conv2d(*sizes, padding=1, groups=settings.net.groups)
    net = net.to(device)
    found["conv3 grouped too"] = through_convs(net, device) | {"scores": to_scores(net, _puzzle(settings))}
    return found


def _used(settings: DictConfig) -> dict:
    plain, grouped = (_net(settings, g).to(settings.device) for g in (1, settings.net.groups))
    puzzle = _puzzle(settings)
    return {
        PLAIN: used_inputs(plain, puzzle),
        GROUPED: used_inputs(grouped, puzzle),
        "without kinks": used_inputs(linearised(grouped), puzzle),
    }


def _cost(settings: DictConfig) -> dict:
    shape = (1, TILES, 3, *settings.net.tile)
    with torch.device("meta"):
        nets = {
            kind: GroupedNet(groups, **net_sizes(settings.net), classes=settings.net.classes)
            for kind, groups in ((PLAIN, 1), (GROUPED, settings.net.groups))
        }
    return {kind: costs(net, shape) for kind, net in nets.items()}


def _literal(settings: DictConfig, seed: int) -> dict:
    case = settings.case
    conv = case_conv(case)
    pair = side_by_side(conv, torch.randn(case.batch, case.in_channels, *case.image).to(settings.device))
    shape = [case.batch, case.in_channels, *case.image]
    return {
        "case": f"{conv_name(case)} on {shape}",
        "passes": [found for dtype in ("float32", "float64") for found in compare(pair, dtype)],
        "errors": errors(pair),
        "integers": integers_agree(pair, seed),
        "kernels": {dtype: kernels(pair, dtype) for dtype in ("float32", "float64")},
    }


def about(settings: DictConfig) -> str:
    """One line for the plan. Raises ConfigurationError, as ``measure`` does."""
    check(settings)
    return (
        f"{conv_name(settings.case)} against convs side by side; a network with groups={settings.net.groups} "
        "in three layers: reach, use, cost; other convs; verdicts"
    )
