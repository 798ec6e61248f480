"""The settings of ``batch_size``, read once and checked: what is built, which sizes are tried."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from omegaconf import DictConfig, ListConfig, OmegaConf

from experiments.errors import ConfigurationError

AT_LEAST = {
    **{"case.blocks": 0, "case.filters": 1, "case.planes": 1, "case.moves": 1},
    **{"statistics.batches": 1, "statistics.rows": 1, "sweep.up_to": 1, "layers.batch": 2},
    **{"chunk": 1, "cost.repeats": 1, "suite.rows": 2, "suite.steps": 1},
}
SMOKE_ROWS = 17  # the largest batch that scale=smoke tries, one more than a power of two


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        network: keyword arguments of ``PolicyNet`` but for blocks and norm.
        statistics: batches and rows of random boards that the norms' statistics are taken from.
        sizes: batch sizes beside 1, for float32 with BatchNorm, in order.
        few: those of them that everything else is tried at.
        at: the batch size at which each layer is looked at by itself.
        chunk: rows of a chunk where ``invariant``, the mode in which the network is fed in chunks; one of
            ``cost_chunks``.
        suite: rows, steps and learning rate of the pair in lockstep.
    """

    blocks: int
    network: dict
    statistics: tuple[int, int]
    sizes: tuple[int, ...]
    few: tuple[int, ...]
    at: int
    invariant: bool
    chunk: int
    cost_batches: tuple[int, ...]
    cost_chunks: tuple[int, ...]
    repeats: int
    suite: tuple[int, int, float]
    device: torch.device

    @property
    def board(self) -> tuple[int, ...]:
        """The shape of a row: planes, height, width."""
        return (self.network["planes"], *self.network["board"])

    @property
    def largest(self) -> int:
        """The rows of the largest batch."""
        return max(self.sizes[-1], *self.cost_batches, self.at, self.suite[0])


def read(settings: DictConfig) -> Plan:
    """Raises ConfigurationError where a setting cannot be used."""
    _refuse_wrong(settings)
    case, sweep, cost, suite = settings.case, settings.sweep, settings.cost, settings.suite
    sizes = sorted({*range(2, sweep.up_to + 1), *sweep.above, *sweep.few} - {1})
    few = sizes if settings.scale.name == "full" else sorted({*sweep.few} - {1})
    plan = Plan(
        blocks=case.blocks,
        network={k: case[k] for k in ("filters", "planes", "moves")} | {"board": tuple(case.board)},
        statistics=(settings.statistics.batches, settings.statistics.rows),
        sizes=tuple(sizes),
        few=tuple(few),
        at=settings.layers.batch,
        invariant=settings.batch_invariant,
        chunk=settings.chunk,
        cost_batches=tuple(sorted({*cost.batches})),
        cost_chunks=tuple(sorted({*cost.chunks, settings.chunk})),
        repeats=cost.repeats,
        suite=(suite.rows, suite.steps, suite.learning_rate),
        device=torch.device(settings.device),
    )
    return _smaller(plan) if settings.scale.name == "smoke" else plan


def _smaller(plan: Plan) -> Plan:
    """As much as it takes to see whether it runs at all."""
    few = plan.few[:4]
    small = [n for n in plan.sizes if n <= SMOKE_ROWS]
    return replace(
        plan,
        blocks=min(plan.blocks, 2),
        network=plan.network | {"filters": min(plan.network["filters"], 8)},
        statistics=tuple(min(n, SMOKE_ROWS) for n in plan.statistics),
        sizes=tuple(sorted({*small, *few})),
        few=few,
        at=min(plan.at, SMOKE_ROWS),
        cost_batches=plan.cost_batches[:1],
        cost_chunks=tuple(sorted({plan.cost_chunks[0], plan.chunk})),
        repeats=1,
        suite=(2, 2, plan.suite[2]),
    )


def _refuse_wrong(settings: DictConfig) -> None:
    """The first setting that cannot be used, in one line."""
    for name, least in AT_LEAST.items():
        _refuse_count(name, OmegaConf.select(settings, name), least)
    for name in ("case.board", "sweep.above", "sweep.few", "cost.batches", "cost.chunks"):
        values = OmegaConf.select(settings, name)
        if not isinstance(values, ListConfig):
            raise ConfigurationError(f"{name}={values!r} must be a list, such as {name}=[7,6]")
        for place, value in enumerate(values):
            _refuse_count(f"{name}[{place}]", value, 1)
    sweep, cost, board = settings.sweep, settings.cost, settings.case.board
    if len(board) != 2 or board[0] * board[1] < 2:  # of a single value no norm has statistics
        raise ConfigurationError(
            f"case.board={list(board)} must be height and width, with 2 fields or more, such as [7,6]"
        )
    filled = {"sweep.few": set(sweep.few) - {1}, "cost.batches": cost.batches, "cost.chunks": cost.chunks}
    for name in (name for name, values in filled.items() if not values):
        raise ConfigurationError(f"{name} has no size to measure; write sizes such as {name}=[16,64]")
    rate = settings.suite.learning_rate
    if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 < rate < math.inf:
        raise ConfigurationError(f"suite.learning_rate={rate!r} must be a number above 0, such as 0.01")
    if not isinstance(settings.batch_invariant, bool):
        raise ConfigurationError(f"batch_invariant={settings.batch_invariant!r} must be true or false")


def _refuse_count(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigurationError(f"{name}={value!r} must be a whole number, {least} or more")
