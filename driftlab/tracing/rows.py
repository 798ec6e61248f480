"""Rows of one network's values: those that another network has, where it leaves some out."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Those rows of a network's values that the other network has.

    Attributes:
        layout: the sizes of the axes along which rows lie.
        kept: the rows' numbers, in the order in which the other has them.
    """

    layout: tuple[int, ...]
    kept: Tensor

    def of(self, values: Tensor) -> Tensor | None:
        """[rows, ...]; None of what has no such rows."""
        found = self._where(values)
        return None if found is None else values.flatten(0, found[0] - 1)[found[1].to(values.device)]

    def put(self, rows: Tensor, values: Tensor) -> None:
        """Into ``values``, which have such rows, in the place of their own."""
        axes, kept = self._where(values)
        flat = values.flatten(0, axes - 1).clone()
        flat[kept.to(values.device)] = rows.reshape(len(kept), *values.shape[axes:]).to(values)
        values.copy_(flat.reshape(values.shape))

    def _where(self, values: Tensor) -> tuple[int, Tensor] | None:
        """How many axes rows lie along, and which are kept."""
        shape, turned = tuple(values.shape), self.layout[::-1]
        if len(turned) == 2 and turned != self.layout and shape[:2] == turned:
            many, one = self.layout[1], self.kept
            return 2, one % many * self.layout[0] + one // many
        axes = (n for n in range(1, len(shape)) if math.prod(shape[:n]) == math.prod(self.layout))
        return next(((n, self.kept) for n in axes), None)
