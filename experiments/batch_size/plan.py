"""The settings of ``batch_size``, read once and checked: what is built, which sizes are tried."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from omegaconf import DictConfig

from suite.command.errors import ConfigurationError

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
    """What the schema does not see, in one line."""
    sweep, board = settings.sweep, settings.case.board
    if len(board) != 2 or board[0] * board[1] < 2:  # of a single value no norm has statistics
        raise ConfigurationError(
            f"case.board={list(board)} must be height and width, with 2 fields or more, such as [7,6]"
        )
    if not {*sweep.few} - {1}:
        raise ConfigurationError("sweep.few has no size to measure; write sizes such as sweep.few=[16,64]")
