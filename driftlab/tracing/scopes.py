"""Which module of a network is at work while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from driftlab.network.calling import tensors_in


@dataclass(frozen=True, eq=False)
class Entered:
    """A call of a module, what it was given, and what it gave, once it is over."""

    scope: str
    given: list[Tensor]
    gave: list[Tensor] = field(default_factory=list)


class Scopes:
    """Which module is at work.

    Attributes:
        entered: it last, before it who called it.
    """

    def __init__(
        self, network: nn.Module, crossed: Callable[[object, str], None] = lambda tensors, scope: None
    ):
        """``crossed(tensors, scope)`` is called where tensors come in from ``scope``, or out of it."""
        self.entered: list[Entered] = []
        for name, module in network.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                self._watch(module, name, crossed)

    @property
    def now(self) -> str:
        return self.entered[-1].scope if self.entered else ""

    @property
    def inside(self) -> bool:
        """Whether the network itself is at work, and not its loss."""
        return bool(self.entered)

    def begin(self) -> None:
        """Forget a run that broke off."""
        self.entered.clear()

    def _watch(self, module: nn.Module, name: str, crossed: Callable[[object, str], None]) -> None:
        def enter(_: nn.Module, args: tuple, kwargs: dict) -> None:
            crossed((args, kwargs), self.now)
            self.entered.append(Entered(name, tensors_in((args, kwargs))))

        def leave(_: nn.Module, args: tuple, output: object) -> None:
            crossed(output, name)
            self.entered.pop().gave.extend(tensors_in(output))

        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(leave)
