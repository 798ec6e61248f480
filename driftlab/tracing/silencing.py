"""Which of several beginnings a difference comes from: what becomes of it where a module is silenced.

Where code was written anew, a network lacks much that the other computes, rightly or not, so that the two
seem to part in several modules at once. Then modules are silenced one after the other: their weights are 0 in
both networks. Either the two give the same now or they do not; and a beginning, moved a little, either still
moves the result or does not. Where the difference comes from, the two answers agree. A beginning that would
still be seen while the difference is gone is not it, nor is one that could not be seen while it stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from driftlab.fold import Fold, FoldError
from driftlab.fold.unfold import Unfold, floating_tensors
from driftlab.network.calling import copied
from driftlab.network.modules import common, lies_in, only_holds
from driftlab.tracing.cone import Cone
from driftlab.tracing.flow import Flow, Value
from driftlab.tracing.prints import AGREE, same_numbers
from driftlab.tracing.rewriting import move
from driftlab.tracing.running import Again

# A difference of which less is left is gone: what stays is a good part of it, and rounding next to nothing.
GONE = 1e-3
# Runs of the reference at most: each takes as long as one that is recorded.
RUNS = 48


class Silencing:
    """The two networks with one of the reference's modules silenced in both.

    Args:
        networks: reference and candidate.
        flows: theirs, as they are.
        fold: between their weights.
        again: runs one of the two.
    """

    def __init__(
        self,
        networks: tuple[nn.Module, nn.Module],
        flows: list[Flow],
        fold: Fold,
        again: Callable[[nn.Module], Again],
    ):
        self._networks, self._whole, self._fold, self._again = networks, flows, fold, again

    def survivors(self, cone: Cone) -> list[str]:
        """The modules in which the difference may begin, of those in which the cone does.

        All of them where one alone is left, where nothing can be silenced, or where the answers speak against
        each: a fault in several places is not gone where one of them is silent.
        """
        begun = cone.begun()
        left, runs = dict(begun), 0
        whole, before = self._whole, _differing(self._whole)
        for module in self._modules(begun):
            # of a module and its parts none is ruled out by another: a fault of the one shows in the other
            told = len(left) < len(begun) and common(left) in left
            if told or not before or runs + 2 + len(left) > RUNS:
                break
            both = self._silenced(module)
            if both is None:
                continue
            mine, theirs = map(self._again, both)
            silent, ends = mine.flow(printed=left.values()), theirs.results({})
            runs += 2 + len(left)
            if len(silent.values) != len(whole[0].values):
                continue
            alike = {scope for scope, number in left.items() if _alike(whole[0], silent, number)}
            if not alike:  # behind what is silent nothing is told
                continue
            gone = all(_apart(silent.ends, ends, end) <= GONE * apart for end, apart in before.items())
            for scope, number in list(left.items()):
                moved = _moved(mine, silent, number)
                seen = any(_far(silent.ends[end], moved[end]) for end in silent.ends)
                # a value that is not what it was may lack the numbers on which a fault shows
                if (seen and gone and scope in alike) or not (seen or gone):
                    del left[scope]
        return list(left) or list(begun)

    def _modules(self, begun: Iterable[str]) -> Iterator[str]:
        """Those in which it begins; then those that lie beside them in the same module."""
        own = sorted(filter(None, begun), key=lambda scope: scope.count("."))
        yield from own
        reference = self._networks[0]
        parents = dict.fromkeys(scope.rpartition(".")[0] for scope in own)
        for parent in parents:
            for name in _called_below(reference, parent):
                if name not in own:
                    yield name

    @torch.no_grad()
    def _silenced(self, module: str) -> tuple[nn.Module, nn.Module] | None:
        """None where its weights are not all the candidate's too."""
        mine, theirs = (copied(network) for network in self._networks)
        own, other = (floating_tensors(network, buffers=False) for network in (mine, theirs))
        weights = {name for name in own if lies_in(name, module)}
        try:
            back = Unfold(self._fold, other)
        except FoldError:
            return None
        if not weights or not weights.issubset(back.names):
            return None
        for name in weights:
            own[name].zero_()
        folded = {n: torch.zeros_like(t) if n in weights else t for n, t in self._fold(other).items()}
        for name, tensor in back(folded, other).items():
            other[name].copy_(tensor)
        return mine, theirs


def _moved(again: Again, flow: Flow, number: int) -> Mapping[str, Tensor]:
    """What becomes of the results where a value is moved a little."""
    operation, _, place = flow.values[number].made_by
    if operation:
        return again.results({(operation, place): move})

    def change(made: int, value: Value, tensor: Tensor) -> None:
        if made == number:
            move(tensor)

    return again.flow(change=change, printed=()).ends


def _called_below(network: nn.Module, parent: str) -> Iterator[str]:
    """The modules right below that are called, those in a list or a dict too."""
    for name, module in network.get_submodule(parent).named_children():
        full = f"{parent}.{name}" if parent else name
        if only_holds(module):
            yield from _called_below(network, full)
        else:
            yield full


def _differing(flows: list[Flow]) -> dict[str, float]:
    """How far the results are apart that differ; beside these the others do by rounding alone."""
    mine, theirs = (flow.ends for flow in flows)
    apart = {end: _apart(mine, theirs, end) for end in mine}
    sizes = {end: float(torch.linalg.vector_norm(tensor)) for end, tensor in mine.items()}
    relative = {end: a / max(a, sizes[end]) for end, a in apart.items() if a}
    most = max(relative.values(), default=0.0)
    return {end: apart[end] for end, off in relative.items() if off >= GONE * most}


def _apart(own: Mapping[str, Tensor], others: Mapping[str, Tensor], end: str) -> float:
    """0 where one of the two has no such result."""
    mine, theirs = own.get(end), others.get(end)
    if mine is None or theirs is None or mine.shape != theirs.shape:
        return 0.0
    return float(torch.linalg.vector_norm(mine - theirs))


def _far(mine: Tensor, theirs: Tensor) -> bool:
    apart, size = (float(torch.linalg.vector_norm(t)) for t in (mine - theirs, mine))
    return not apart <= AGREE * size


def _alike(whole: Flow, silent: Flow, number: int) -> bool:
    return same_numbers(whole.values[number].prints, silent.values[number].prints)
