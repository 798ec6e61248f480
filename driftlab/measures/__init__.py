"""The curves: one declared ``Measure`` a file. A new one is a file in this folder, and nothing else.

The list feeds the lockstep loop and the evaluations, ``curves.csv`` and ``evaluations.csv``, the loggers, the
dashboards and the page.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from driftlab.measures.measure import SECTIONS, Measure, Moment


@cache
def every_measure() -> tuple[Measure, ...]:
    """Every ``MEASURE`` of the files in this folder, in their order. Imports no torch.

    Raises:
        ValueError: where two have the same name, and so the same columns.
    """
    names = [m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")]
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    found = [module.MEASURE for module in modules if isinstance(getattr(module, "MEASURE", None), Measure)]
    if twice := {m.name for m in found if sum(m.name == other.name for other in found) > 1}:
        raise ValueError(f"declared twice among the measures: {', '.join(sorted(twice))}")
    return tuple(sorted(found, key=lambda measure: measure.order))


def measures_at(moment: Moment) -> tuple[Measure, ...]:
    """Those of one table, in the order of its columns."""
    return tuple(measure for measure in every_measure() if measure.moment is moment)


def by_section() -> dict[str, list[Measure]]:
    """The sections of a dashboard in their order, and their measures."""
    return {name: [m for m in every_measure() if m.section == name] for name in SECTIONS}


def drawn_measures() -> list[Measure]:
    """Those that are figures on a page, section by section."""
    return [measure for section in by_section().values() for measure in section if measure.figure]
