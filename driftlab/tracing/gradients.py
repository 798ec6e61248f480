"""The flow of gradients: each that a step of autograd sends on, and the module that the step belongs to.

It belongs to the module in which it was written down: what comes out of a module and is not yet anybody's is
that module's, what goes into one is its caller's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from driftlab.network.calling import tensors_in
from driftlab.network.modules import common
from driftlab.tracing.flow import Flow, Value
from driftlab.tracing.prints import Prints, prints

Gradients = tuple[list[Prints | None], list[Prints | None]]


@dataclass
class Steps:
    """The steps of autograd, whose they are, and what each was given and gave on, as they ran."""

    scopes: dict[Any, str] = field(default_factory=dict)
    ran: dict[Any, Gradients] = field(default_factory=dict)

    def claim(self, tensors: object, scope: str) -> None:
        """What led to ``tensors`` and is nobody's yet."""
        steps = [t.grad_fn for t in tensors_in(tensors)]
        while steps:
            step = steps.pop()
            if step is not None and step not in self.scopes:
                self.scopes[step] = scope
                steps += [following for following, _ in step.next_functions]

    def watch(self) -> None:
        for step in self.scopes:
            step.register_hook(partial(self._keep, step))

    def _keep(self, step: Any, sent: tuple, got: tuple) -> None:
        self.ran[step] = _all(got), _all(sent)

    def flow(self, leaves: Mapping[str, Tensor]) -> Flow:
        """Results are the gradients of ``leaves``, by their names."""
        flow, coming = Flow(), defaultdict(list)
        names = {id(leaf): name for name, leaf in leaves.items()}
        for step, (got, sent) in self.ran.items():
            scope, arrived = self.scopes[step], []
            for place, gradient in enumerate(got):
                if gradient is not None:
                    parts = tuple(coming[step, place])
                    inside = common([scope, *(flow.values[p].scope for p in parts)])
                    arrived.append(flow.add(Value(inside, parts, gradient)))
            if id(getattr(step, "variable", None)) in names and arrived:
                flow.results[names[id(step.variable)]] = arrived[0]
            for gradient, target in zip(sent, step.next_functions, strict=False):
                if gradient is not None and target[0] is not None:
                    coming[target].append(flow.add(Value(scope, tuple(arrived), gradient)))
        return flow


def _all(gradients: tuple) -> list[Prints | None]:
    return [prints(g) if isinstance(g, Tensor) else None for g in gradients]
