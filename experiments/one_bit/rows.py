"""What is varied from run to run, row by row, and how a run's network comes to be."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import NamedTuple

import torch
from omegaconf import DictConfig
from torch import nn

from driftlab.lockstep.control import nudge
from models.rewrites.split_conv import split_conv
from models.rewrites.swap import RewriteError
from suite.command.errors import ConfigurationError
from suite.data.images import Images
from suite.running.building import own_seeds
from suite.running.networks import build_reference

BASE = 0  # the seed of everything that a row does not vary
SOURCES = ("init", "order", "augmentation")


class Row(NamedTuple):
    """One line of the table.

    Attributes:
        name: what is varied, in words.
        sources: which of ``SOURCES`` follow the run's seed.
        change: what is done to the initial network: None, "nudge" or "split".
    """

    name: str
    sources: tuple[str, ...] = ()
    change: str | None = None

    @property
    def round_off(self) -> bool:
        """Whether the runs of this row differ by round-off alone."""
        return self.change is not None


ROWS = {
    "nothing": Row("nothing"),
    "one_ulp": Row("one ulp in one weight", change="nudge"),
    "split": Row("convs split", change="split"),
    "order": Row("data order", ("order",)),
    "augmentation": Row("augmentation", ("augmentation",)),
    "init": Row("initial weights", ("init",)),
    "all": Row("all three", SOURCES),
}


def seeds_of(row: Row, settings: DictConfig, run: int) -> dict[str, int]:
    """The seeds of one run. What varies never takes the base seed, so no two rows share a run."""
    fixed = own_seeds(settings, BASE)
    return {name: fixed[name] + 1 + run if name in row.sources else fixed[name] for name in SOURCES}


def network_of(
    row: Row, settings: DictConfig, images: Images, seeds: Mapping[str, int], run: int
) -> tuple[nn.Module, str]:
    """The initial float32 network of a run, on the CPU, and what was changed in it ("" for nothing)."""
    module = build_reference(settings, images, seeds["init"])
    if row.change == "nudge":
        return module, _nudged(module, settings.nudged, run)
    if row.change == "split":
        return split_by_chance(module, run)
    return module, ""


def _nudged(module: nn.Module, name: str, run: int) -> str:
    """Moves one weight of a submodule by one ulp, another one each run; says which."""
    try:
        part = module.get_submodule(name)
    except AttributeError:
        names = ", ".join(n for n, _ in module.named_children())
        raise ConfigurationError(f"nudged={name} is no module of the network: write {names}, ...") from None
    return f"{name}.{nudge(part, run)}".lstrip(".")


def split_by_chance(model: nn.Module, seed: int) -> tuple[nn.Module, str]:
    """A copy of ``model`` with about half of its convs split in two, and which, in words.

    ``seed`` draws which convs, along which channels (output or input) and where. At least one is split.

    Raises:
        RewriteError: no conv has two channels on either side.
    """
    generator = torch.Generator().manual_seed(seed)
    convs = {n: m for n, m in model.named_modules() if isinstance(m, nn.Conv2d)}
    places = {n: [d for d in ("out", "in") if _channels(m, d) > 1] for n, m in convs.items()}
    places = {name: dims for name, dims in places.items() if dims}
    if not places:
        raise RewriteError("split_by_chance: no conv of the network has two channels to split")
    names = list(places)
    chosen = [
        n for n, one in zip(names, torch.rand(len(names), generator=generator), strict=True) if one < 0.5
    ]
    split, words = copy.deepcopy(model), []
    for name in chosen or names[:1]:
        dim = places[name][_below(len(places[name]), generator)]
        first = 1 + _below(_channels(convs[name], dim) - 1, generator)
        split = split_conv(split, dim=dim, sizes=[first, -1], match=name)
        words.append(f"{name} {dim} {first}")
    return split, ", ".join(words)


def _channels(conv: nn.Conv2d, dim: str) -> int:
    return conv.out_channels if dim == "out" else conv.in_channels // conv.groups


def _below(count: int, generator: torch.Generator) -> int:
    return int(torch.randint(count, (1,), generator=generator))
