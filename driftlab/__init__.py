"""driftlab: is it round-off, unstable training, or a bug in the rewrite?

``diagnose`` compares two networks in training, ``assert_equivalent`` two modules in a unit test,
``watching`` follows a training of one's own, ``gradient_check`` compares a gradient with its loss;
``batch_invariant`` makes a row's answer that of any batch size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from driftlab.assertion import assert_equivalent
    from driftlab.batch_invariance import batch_invariant
    from driftlab.diagnosis import Diagnosis, diagnose
    from driftlab.gradients import GradientCheck, gradient_check
    from driftlab.watch import Watch, watching
    from driftlab.words import DiagnoseError, Evidence, Place, Verdict

    __version__: str

__all__ = [
    "DiagnoseError",
    "Diagnosis",
    "Evidence",
    "GradientCheck",
    "Place",
    "Verdict",
    "Watch",
    "__version__",
    "assert_equivalent",
    "batch_invariant",
    "diagnose",
    "gradient_check",
    "watching",
]

_HOMES = {
    "assert_equivalent": "driftlab.assertion",
    "batch_invariant": "driftlab.batch_invariance",
    "diagnose": "driftlab.diagnosis",
    "Diagnosis": "driftlab.diagnosis",
    "DiagnoseError": "driftlab.words",
    "Evidence": "driftlab.words",
    "GradientCheck": "driftlab.gradients",
    "gradient_check": "driftlab.gradients",
    "Place": "driftlab.words",
    "Verdict": "driftlab.words",
    "Watch": "driftlab.watch",
    "watching": "driftlab.watch",
}

if not TYPE_CHECKING:  # a type checker would take any name for one of ours

    def __getattr__(name: str) -> object:
        """Names are imported when they are asked for, so that judging and reports need no torch."""
        import importlib

        if name == "__version__":
            from driftlab.record.files import version

            return version()
        if name not in _HOMES:
            raise AttributeError(f"module 'driftlab' has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
