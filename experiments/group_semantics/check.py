"""Settings of the question about groups that cannot be measured, refused in one line."""

from __future__ import annotations

import torch
from omegaconf import DictConfig

from models.grouped_net import GroupedNet
from suite.command.errors import ConfigurationError

SIZES = ("tile", "channels", "features")


def net_sizes(given: DictConfig) -> dict:
    """What ``GroupedNet`` takes beside groups and classes, of ``net`` or ``thin``."""
    return {key: list(given[key]) for key in SIZES}


def check(settings: DictConfig) -> None:
    """Raises ConfigurationError for sizes that make no convolution, no network or no training."""
    _check_case(settings.case)
    for where in ("net", "thin"):
        _check_net(where, settings)


def _check_case(case: DictConfig) -> None:
    if len(case.image) != 2:
        raise ConfigurationError(f"case.image={case.image} is no height and width; write [24, 24]")
    if case.in_channels % case.groups or case.out_channels % case.groups:
        channels = f"case.in_channels={case.in_channels}, case.out_channels={case.out_channels}"
        raise ConfigurationError(
            f"case.groups={case.groups} does not divide {channels}; write multiples of it"
        )
    largest = min(case.image) + 2 * case.padding
    if case.kernel_size > largest:
        raise ConfigurationError(
            f"case.kernel_size={case.kernel_size} is larger than the padded case.image={list(case.image)}; "
            f"write {largest} or less"
        )


def _check_net(where: str, settings: DictConfig) -> None:
    try:
        with torch.device("meta"):
            GroupedNet(settings.net.groups, **net_sizes(settings[where]), classes=settings.net.classes)
    except ValueError as error:
        raise ConfigurationError(f"{where}: {str(error).removeprefix('GroupedNet: ')}") from None
