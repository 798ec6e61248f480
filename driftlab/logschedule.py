"""Which steps leave a row: every one at first, then thinned evenly in log(step)."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LogSchedule:
    """Every step below ``dense``, then ``per_decade`` steps for each factor of ten.

    With the defaults 80,000 steps leave about 720 rows. ``per_decade=0`` stops after ``dense``.

    Raises:
        ValueError: where ``dense`` < 1 or ``per_decade`` < 0.
    """

    dense: int = 200
    per_decade: int = 200

    def __post_init__(self) -> None:
        if self.dense < 1 or self.per_decade < 0:
            raise ValueError(
                f"log_schedule: dense={self.dense} is below 1 or per_decade={self.per_decade} below 0"
            )

    def __call__(self, step: int) -> bool:
        if step < self.dense:
            return True
        # the first integer of each cell of a grid that is even in log(step)
        return self.per_decade > 0 and self._cell(step) != self._cell(step - 1)

    def _cell(self, step: int) -> int:
        return math.floor(self.per_decade * math.log10(step / self.dense))
