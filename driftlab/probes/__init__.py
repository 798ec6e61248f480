"""The probes: one declared ``Probe`` a file. A new one is a file in this folder, and nothing else.

The list of all, in the order in which they are asked, feeds the inquiry, the assertion and the documentation
(``python -m driftlab.probes`` prints the table of docs/verdict.md).
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from driftlab.probes.probe import Probe


@cache
def every_probe() -> tuple[Probe, ...]:
    """Every ``PROBE`` of the files in this folder, in their order. Imports torch."""
    names = [m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")]
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    found = [module.PROBE for module in modules if isinstance(getattr(module, "PROBE", None), Probe)]
    return tuple(sorted(found, key=lambda probe: probe.order))
