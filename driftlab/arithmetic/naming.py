"""How the outputs of a pass are called: the candidate's by the names of the reference's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from driftlab.network.calling import named_leaves
from driftlab.network.outputs import Outputs
from driftlab.refusing import check_values

# Of the loss that is differentiated, among the outputs: no output is called so, though one may be `loss`.
LOSS = "the loss"


class Named:
    """The outputs of a network by the reference's names, and what became of the others.

    Args:
        beside: what the reference gave, pass -> name -> tensor; None where this is the reference.
        plain: gives a tensor of the candidate's arithmetic as plain numbers.

    Attributes:
        spare: outputs that stand for none of the reference's.
        carried: outputs that a gradient came back to, of those that were watched.
    """

    def __init__(
        self,
        beside: Mapping[str, Mapping[str, Tensor]] | None,
        outputs: Outputs,
        plain: Callable[[Tensor], Tensor],
    ):
        self._beside, self._outputs, self._plain = beside, outputs, plain
        self.spare: set[str] = set()
        self.carried: set[str] = set()

    def of(self, outputs: object, pass_: str) -> dict[str, Tensor]:
        """The floating ones, by name. Raises DiagnoseError where one is sparse, or has no values."""
        leaves = named_leaves(outputs)
        check_values(f"what the network returns{' in eval mode' * (pass_ == 'eval')}", leaves.values())
        mine = self._beside and self._beside.get(pass_)
        if mine is None:
            return leaves
        mine = {n: t for n, t in mine.items() if n != LOSS}
        with _disable_current_modes():
            found = self._outputs.of(leaves, mine, self._plain)
        kept = {id(t) for t in found.values()}
        self.spare |= {n for n, t in leaves.items() if id(t) not in kept}
        return found

    def watch(self, leaves: Mapping[str, Tensor]) -> None:
        """Notice which of them a gradient comes back to."""
        for name, leaf in leaves.items():
            if leaf.requires_grad:
                leaf.register_hook(partial(self._notice, name))

    def _notice(self, name: str, gradient: Tensor | None) -> None:
        if gradient is not None and bool((gradient != 0).any()):
            self.carried.add(name)
