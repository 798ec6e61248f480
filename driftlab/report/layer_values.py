"""How far each pair of modules is apart, by pass, over seeds: the ``layers`` of ``run.json``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from driftlab.records import SeedRecord

# As float32 computes it, and with the rounding taken away.
KINDS = ("float32", "exact")


@dataclass(frozen=True)
class Layer:
    """One pair of modules over seeds.

    Attributes:
        values: pass -> kind (``float32``, ``exact`` and what rounding explains of each) -> a value a seed.
    """

    module: str
    rewritten: bool
    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def middle(self, pass_: str, kind: str) -> float | None:
        values = self.values.get(pass_, {}).get(kind)
        return median(values) if values else None

    def beyond(self, pass_: str) -> bool:
        """Whether rounding explains the difference in no more than half of the seeds."""
        found, explained = self.middle(pass_, "exact"), self.middle(pass_, "exact_explained")
        return found is not None and explained is not None and found > explained

    def narrow(self, pass_: str) -> bool:
        """Whether float32 is less exact than its rounding explains, in more than half of the seeds."""
        found, explained = self.middle(pass_, "float32"), self.middle(pass_, "float32_explained")
        return found is not None and explained is not None and found > explained and not self.beyond(pass_)

    def unknown(self, pass_: str) -> bool:
        """Whether it differs, and does not run with the rounding taken away."""
        return bool(self.middle(pass_, "float32")) and self.middle(pass_, "exact") is None

    @property
    def rank(self) -> float:
        """How far beyond what rounding explains its worst pass is, by any kind."""
        pairs = [
            (self.middle(p, kind), self.middle(p, f"{kind}_explained")) for p in self.values for kind in KINDS
        ]
        return max((a / b if b else math.inf for a, b in pairs if a and b is not None), default=0.0)

    @property
    def differs(self) -> bool:
        return any(v > 0 for kinds in self.values.values() for k in KINDS for v in kinds.get(k, []))


def layers_over_seeds(records: Sequence[SeedRecord]) -> list[Layer]:
    """In the order of the forward pass; empty where nothing was compared."""
    layers: dict[str, Layer] = {}
    for record in records:
        for entry in record.run.get("layers") or []:
            layer = layers.setdefault(entry["module"], Layer(entry["module"], entry["rewritten"]))
            for pass_, kinds in entry["passes"].items():
                into = layer.values.setdefault(pass_, {})
                for kind, value in kinds.items():
                    if value is not None:
                        into.setdefault(kind, []).append(float(value))  # JSON holds inf as "inf"
    return list(layers.values())
