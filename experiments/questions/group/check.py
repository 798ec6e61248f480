"""Settings of the question about groups that cannot be measured, refused in one line."""

from __future__ import annotations

import math

import torch
from omegaconf import DictConfig, OmegaConf

from experiments.configuration import check_whole
from experiments.errors import ConfigurationError
from models.grouped_net import GroupedNet

SIZES = {"tile": [213, 67], "channels": [96, 192, 256, 256, 192], "features": [512, 256]}
_KEYS = {
    "case": ("in_channels", "out_channels", "kernel_size", "padding", "groups", "batch", "image"),
    "net": ("groups", *SIZES, "classes"),
    "thin": tuple(SIZES),
    "sweep": ("groups", "channels", "cases"),
    "training": ("pair", "updates", "batch", "lr"),
}


def net_sizes(given: DictConfig) -> dict:
    """What ``GroupedNet`` takes beside groups and classes, of ``net`` or ``thin``."""
    return {key: list(given[key]) for key in SIZES}


def check(settings: DictConfig) -> None:
    """Raises ConfigurationError for sizes that make no convolution, no network or no training."""
    for where, keys in _KEYS.items():
        _check_keys(where, settings.get(where), keys)
    for where in ("case", "net"):
        check_whole(f"{where}.groups", settings[where].groups, 2)
    _check_case(settings.case)
    _check_training(settings.training)
    _check_sweep(settings.sweep)
    check_whole("net.classes", settings.net.classes, 1)
    for where in ("net", "thin"):
        _check_net(where, settings)


def _check_keys(where: str, given: object, keys: tuple[str, ...]) -> None:
    if not OmegaConf.is_dict(given):
        raise ConfigurationError(f"{where}={given} must hold {', '.join(keys)}")
    for key in given:
        if key not in keys:
            raise ConfigurationError(f"{where}.{key} is unknown: write one of {', '.join(keys)}")
    for key in keys:
        if key not in given:
            raise ConfigurationError(
                f"{where}.{key} is missing: it stands in conf/experiment/group_semantics.yaml"
            )


def _check_case(case: DictConfig) -> None:
    if not OmegaConf.is_list(case.image) or len(case.image) != 2:
        raise ConfigurationError(f"case.image={case.image} is no height and width; write [24, 24]")
    for key in ("in_channels", "out_channels", "kernel_size", "batch"):
        check_whole(f"case.{key}", case[key], 1)
    for size in case.image:
        check_whole("case.image", size, 1)
    check_whole("case.padding", case.padding, 0)
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


def _check_training(training: DictConfig) -> None:
    if training.pair not in ("conv", "net"):
        raise ConfigurationError(f"training.pair={training.pair} is not known; write conv or net")
    check_whole("training.updates", training.updates, 1)
    check_whole("training.batch", training.batch, 1)
    rate = training.lr
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < math.inf:
        raise ConfigurationError(f"training.lr={rate} trains nothing; write a finite number above 0")


def _check_sweep(chosen: DictConfig) -> None:
    if chosen.cases is not None:
        check_whole("sweep.cases", chosen.cases, 1)
    for key, known in (("groups", ", or depthwise"), ("channels", "")):
        values = chosen[key]
        if not OmegaConf.is_list(values) or not values:
            raise ConfigurationError(f"sweep.{key}={values}: write a list of numbers of 2 or more{known}")
        for value in values:
            if not known or value != "depthwise":
                check_whole(f"sweep.{key}", value, 2)


def _check_net(where: str, settings: DictConfig) -> None:
    for key, example in SIZES.items():
        values = settings[where][key]
        if not OmegaConf.is_list(values):
            raise ConfigurationError(f"{where}.{key}={values} is no list; write, for example, {example}")
        for value in values:
            check_whole(f"{where}.{key}", value, 1)
    try:
        with torch.device("meta"):
            GroupedNet(settings.net.groups, **net_sizes(settings[where]), classes=settings.net.classes)
    except ValueError as error:
        raise ConfigurationError(f"{where}: {str(error).removeprefix('GroupedNet: ')}") from None
