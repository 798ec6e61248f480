"""An optimizer in the middle of a training, made anew for copies of its network and for the rewritten one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from driftlab.fold import Fold
from driftlab.fold.layout import FoldError
from driftlab.fold.unfold import Unfold, floating_tensors
from driftlab.words import DiagnoseError

StateOf = Callable[[Tensor, Tensor, Mapping], dict]  # of an old parameter, a new one, the old one's state


def no_way_back(fold: Fold, candidate: nn.Module) -> str:
    """Why nothing can be put from the reference's tensors into the candidate's; empty where it can."""
    try:
        Unfold(fold, floating_tensors(candidate))
    except FoldError as error:
        return str(error)
    return ""


class Carried:
    """Makes optimizers that go on from where ``live`` stands: its class, groups, settings and state.

    Args:
        live: moves parameters of ``network``, and of nothing else.
        candidate: the rewritten network.
        fold: from its tensors to those of ``network``.

    Attributes:
        dropped: why neither optimizer begins with the state of ``live``: there is no way back from the
            reference's tensors to the candidate's. Empty where both do.

    Raises:
        DiagnoseError: ``live`` moves parameters of another network.
    """

    def __init__(self, live: Optimizer, network: nn.Module, candidate: nn.Module, fold: Fold):
        self._live, self._fold = live, fold
        self._names = {id(p): name for name, p in network.named_parameters()}
        self._held = [p for group in live.param_groups for p in group["params"]]
        if not self._held or not all(id(p) in self._names for p in self._held):
            raise DiagnoseError(
                "optimizer moves parameters that the watched network has not: give that of this network"
            )
        self.dropped = no_way_back(fold, candidate)

    def of_reference(self, module: nn.Module) -> Optimizer:
        """Of a copy of the network, in any dtype."""
        own = dict(module.named_parameters())
        return self._moved({id(p): [own[self._names[id(p)]]] for p in self._held}, self._as_it_is)

    def of_candidate(self, module: nn.Module) -> Optimizer:
        """Of the rewritten network: each parameter in the group, with the state, of what it stands for."""
        own, taken = dict(module.named_parameters()), {}
        for at, name in self._names.items():
            sources = self._fold.sources(name)
            taken[at] = [own.pop(n) for n in list(own) if n in sources]
        taken[id(self._held[0])] += own.values()  # what stands for nothing of the reference
        return self._moved(taken, self._unfolded(module))

    def _moved(self, taken: Mapping[int, list[nn.Parameter]], state_of: StateOf) -> Optimizer:
        """``live`` with other parameters; a copy of everything else."""
        known = {id(p): p for p in self._held}  # the copy keeps them, and is then given the others
        twin = copy.deepcopy(self._live, known)
        state = {p: dict(s) for p, s in twin.state.items()}
        for group in twin.param_groups:
            group["params"] = [new for p in group["params"] for new in taken[id(p)]]
        twin.state.clear()
        if not self.dropped:
            for p in self._held:
                for new in taken[id(p)]:
                    twin.state[new] = state_of(p, new, state.get(p, {}))
        return twin

    @staticmethod
    def _as_it_is(old: Tensor, new: Tensor, state: Mapping) -> dict:
        return {key: _like(new, value) if _is_of(old, key, value) else value for key, value in state.items()}

    def _unfolded(self, module: nn.Module) -> StateOf:
        """State by the candidate's shapes, a key at a time for all parameters."""
        names = {id(p): name for name, p in module.named_parameters()}
        theirs = floating_tensors(module)
        found: dict[str, dict[str, Tensor]] = {}

        def of(key: str) -> dict[str, Tensor]:
            if key not in found:
                unfold = Unfold(self._fold, theirs)
                held = {p: self._live.state.get(p, {}).get(key) for p in self._held}
                mine = {self._names[id(p)]: v for p, v in held.items() if _is_of(p, key, v)}
                shapes = self._fold({n: torch.zeros_like(t) for n, t in theirs.items()})
                mine = {n: v if (v := mine.get(n)) is not None else shapes[n] for n in unfold.names}
                found[key] = unfold(mine, {n: torch.zeros_like(t) for n, t in theirs.items()})
            return found[key]

        def state_of(old: Tensor, new: Tensor, state: Mapping) -> dict:
            return {
                key: _like(new, of(key)[names[id(new)]]) if _is_of(old, key, value) else copy.deepcopy(value)
                for key, value in state.items()
            }

        return state_of


def _is_of(parameter: Tensor, key: str, value: object) -> bool:
    """Whether a state holds a number for each of the parameter's; torch's ``step`` is one for all."""
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and value.shape == parameter.shape
        and key != "step"
    )


@torch.no_grad()
def _like(parameter: Tensor, value: Tensor) -> Tensor:
    """In the parameter's dtype, on its device, of its kind."""
    return torch.zeros_like(parameter).copy_(value.detach())
