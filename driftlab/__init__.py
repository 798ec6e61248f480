"""driftlab: is it round-off, unstable training, or a bug in the rewrite?

``diagnose`` compares two networks in training, ``assert_equivalent`` two modules in a unit test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from driftlab.assertion import assert_equivalent
    from driftlab.diagnosis import Diagnosis, diagnose
    from driftlab.pair import DiagnoseError
    from driftlab.verdict import Evidence, Place, Verdict

__all__ = ["DiagnoseError", "Diagnosis", "Evidence", "Place", "Verdict", "assert_equivalent", "diagnose"]

_HOMES = {
    "assert_equivalent": "driftlab.assertion",
    "diagnose": "driftlab.diagnosis",
    "Diagnosis": "driftlab.diagnosis",
    "DiagnoseError": "driftlab.pair",
    "Evidence": "driftlab.verdict",
    "Place": "driftlab.verdict",
    "Verdict": "driftlab.verdict",
}


def __getattr__(name: str) -> object:
    """Names are imported when they are asked for, so that judging and reports need no torch."""
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'driftlab' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
