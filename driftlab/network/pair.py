"""The pair under examination: two networks, how they are called, their loss and how they are trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from driftlab.blame import theirs
from driftlab.fold import Fold, FoldError, find_fold
from driftlab.fold.layout import relative_distance
from driftlab.fold.unfold import Unfold, floating_tensors
from driftlab.network.calling import Call, copied, whole
from driftlab.network.modules import paired_modules
from driftlab.network.outputs import Outputs
from driftlab.precision import FLOAT32, Precision, precision_of
from driftlab.process import REWRITE, changed_by, noticed
from driftlab.process.flags import Change
from driftlab.refusing import told
from driftlab.words import DiagnoseError

Rewrite = Callable[[nn.Module], nn.Module]


@dataclass
class Pair:
    """Reference and candidate, in the dtype of their precision, from the same start.

    Attributes:
        loss: of outputs and targets; None of a pair that is not to be trained.
        optimizer, candidate_optimizer: make the optimizer of a module.
        call: how a network takes its inputs.
        precision: in which the two run as they are.
        judged: "float64" of networks that were handed over in it, else the precision's name.
        outputs: which output of the candidate stands for which of the reference's.
        scheduler: makes the learning-rate scheduler of an optimizer, where there is one.
        clip: bounds the gradients of a module before each update, where it does.
        counterparts: names of the reference's modules -> those of the candidate's that stand for them.
        written_otherwise: the reference's parameters that the candidate does not hold with the same values
            (scaled, reparametrised, or another start).
        changed: the settings of the process that the rewrite changed.
    """

    reference: nn.Module
    candidate: nn.Module
    fold: Fold
    loss: Callable[[object, object], Tensor] | None
    optimizer: Callable[[nn.Module], Optimizer]
    candidate_optimizer: Callable[[nn.Module], Optimizer]
    call: Call = whole
    seed: int = 0
    judged: str = "float32"
    precision: Precision = FLOAT32
    outputs: Outputs = field(default_factory=Outputs)
    scheduler: Callable[[Optimizer], LRScheduler | None] | None = None
    clip: Callable[[nn.Module], object] | None = None
    counterparts: Mapping[str, str] = field(init=False)
    written_otherwise: list[str] = field(init=False)
    changed: list[Change] = field(init=False)

    def __post_init__(self) -> None:
        for network in (self.reference, self.candidate):
            in_its_own_mode(network)
        self.counterparts = paired_modules(self.reference, self.candidate, self.fold.sources)
        self.written_otherwise = _written_otherwise(self.reference, self.candidate, self.fold)
        self.changed = changed_by(REWRITE)

    def trained_in(self, others: Sequence[str] = ("float64", "float32")) -> tuple[str, ...]:
        """``others``, and its own precision where that is one of 16 bits."""
        return (*others, self.precision.name) if self.precision.in_16_bits else (*others,)

    def comparable(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The fold, less the parameters that the candidate writes otherwise: they never were equal."""
        return {n: t for n, t in self.fold(tensors).items() if n not in self.written_otherwise}

    def reference_name(self, candidate_name: str | None) -> str | None:
        """The reference's module that a module of the candidate is, or lies in."""
        theirs = {other: name for name, other in self.counterparts.items()}
        while candidate_name and candidate_name not in theirs:
            candidate_name = candidate_name.rpartition(".")[0]
        return theirs[candidate_name] if candidate_name is not None else None

    def evaluating(self) -> Pair:
        """The pair in eval mode with nothing to train: its passes are forward passes alone."""
        mine, theirs = (copied(m).eval() for m in (self.reference, self.candidate))
        return replace(self, reference=mine, candidate=theirs, loss=None)

    def as_held(self) -> Pair:
        """Of networks in float32: with weights as the precision holds them."""
        dtype = self.precision.dtype
        if dtype is torch.float32:  # a candidate may hold some of its weights otherwise
            return self
        return replace(self, reference=self.reference.to(dtype), candidate=self.candidate.to(dtype))

    def in_step(self, reference: nn.Module, candidate: nn.Module, *, put_back: bool = False) -> Pair:
        """The pair at another point of its training, both on the candidate's weights and buffers.

        They are given in float32, and held in the dtypes of this pair's.

        Args:
            put_back: what has no place in the other is as it was at the start, in both, instead of as each of
                the two has trained it.
        """
        reference = held_like(without_gradients(reference), self.reference)
        candidate = held_like(without_gradients(candidate), self.candidate)
        if put_back:
            _put_back(self.candidate, candidate, self.fold)
        given = self.fold(floating_tensors(candidate))
        if put_back:
            given = floating_tensors(self.reference) | given
        with torch.no_grad():
            for name, tensor in floating_tensors(reference).items():
                if name in given:
                    tensor.copy_(given[name])
        return replace(self, reference=reference, candidate=candidate)

    def strays(self, reference: nn.Module) -> list[str]:
        """The reference's buffers without a place in the candidate that its training has moved since.

        A parameter without one is no state: that the candidate does not train it is a fault.
        """
        mine, before = floating_tensors(reference), floating_tensors(self.reference)
        placed = (
            self.fold(floating_tensors(self.candidate)).keys() | dict(reference.named_parameters()).keys()
        )
        moved = (n for n in mine if n not in placed and n in before)
        return [n for n in moved if not torch.equal(mine[n], before[n].to(mine[n]))]


def _put_back(before: nn.Module, candidate: nn.Module, fold: Fold) -> None:
    """The entries that the fold takes nothing from as they were. Raises FoldError where it computes."""
    now, start = floating_tensors(candidate), floating_tensors(before)
    reached = Unfold(fold, now)
    kept = reached(fold(now), start)
    with torch.no_grad():
        for name, tensor in now.items():
            tensor.copy_(kept[name])


# A weight that is off by less means the same and has another value; by more, it may mean something else.
ANOTHER_FORM = 1e-3


def in_another_form(pair: Pair) -> list[str]:
    """Those of ``written_otherwise`` that are far from the reference's values, or nowhere to be found."""
    folded, mine = pair.fold(floating_tensors(pair.candidate)), floating_tensors(pair.reference)
    return [
        n
        for n in pair.written_otherwise
        if n not in folded
        or folded[n].shape != mine[n].shape
        or not float(relative_distance(folded[n].double(), mine[n].double())) < ANOTHER_FORM
    ]


def _written_otherwise(reference: nn.Module, candidate: nn.Module, fold: Fold) -> list[str]:
    folded = fold(floating_tensors(candidate))
    found = []
    for name, parameter in reference.named_parameters():
        other = folded.get(name)
        same = other is not None and other.shape == parameter.shape
        # a dtype of fewer bits holds the same value as well as it can
        if not same or not bool((other == parameter.detach().to(other)).all()):
            found.append(name)
    return found


def without_gradients(module: nn.Module) -> nn.Module:
    twin = copied(module)
    theirs(twin.zero_grad, set_to_none=True)
    return twin


def held_like(module: nn.Module, other: nn.Module) -> nn.Module:
    """``module`` with its floating tensors in the dtypes that those of ``other`` have, by name."""
    dtypes = {name: tensor.dtype for name, tensor in floating_tensors(other).items()}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        tensor.data = tensor.data.to(dtypes.get(name, tensor.dtype))
    return module


def the_pair(
    reference: nn.Module,
    candidate: nn.Module | Rewrite,
    fold: Callable | None,
    precision: Precision = FLOAT32,
) -> tuple[nn.Module, nn.Module, Fold]:
    """Copies of both in the precision's dtype, and the fold between them.

    Raises:
        DiagnoseError: there are not two.
    """
    if not isinstance(reference, nn.Module):
        raise DiagnoseError(f"reference is a {type(reference).__name__}: give a torch.nn.Module")
    if fold is not None and not callable(fold):
        raise DiagnoseError(
            f"fold is a {type(fold).__name__}: give a function from the candidate's tensors by name to the "
            "reference's, or None"
        )
    check_weights("reference", reference)
    with noticed(REWRITE):
        return _the_pair(copied(reference), candidate, fold, precision.dtype)


def _the_pair(
    reference: nn.Module, candidate: nn.Module | Rewrite, fold: Callable | None, dtype: torch.dtype
) -> tuple[nn.Module, nn.Module, Fold]:
    candidate, rewrite = _candidate(reference, candidate)
    if dtype_of(reference) != dtype:  # float64 is looked at anyway, from the same weights
        reference, candidate = reference.to(dtype), candidate.to(dtype)
    if fold is not None:
        candidate.fold = fold
    try:
        return reference, candidate, find_fold(reference, candidate, rewrite)
    except FoldError as error:
        raise DiagnoseError(str(error)) from None


def dtype_of(network: nn.Module) -> torch.dtype:
    """Of its first floating parameter."""
    return next((p.dtype for p in network.parameters() if p.is_floating_point()), torch.float32)


def precision_in(
    name: object, reference: object, chosen: Callable[[object, torch.dtype], Precision] = precision_of
) -> Precision:
    """The precision of this name; where it is None that of the reference's weights.

    Args:
        chosen: ``precision_of``, or ``trained_in`` where the two are to be trained.

    Raises:
        DiagnoseError: there is none.
    """
    return chosen(name, dtype_of(reference) if isinstance(reference, nn.Module) else torch.float32)


def judged_in(reference: nn.Module, precision: Precision = FLOAT32) -> str:
    """What a pair is judged in, of a reference as it was handed over."""
    return "float64" if dtype_of(reference) == torch.float64 else precision.name


def check_weights(role: str, network: nn.Module) -> None:
    """Raises DiagnoseError where there are no weights to start from."""
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        if is_lazy(tensor):
            raise DiagnoseError(f"{role}: {name} has no shape yet (a lazy module): run one batch through it")
        if tensor.is_meta:
            raise DiagnoseError(f"{role}: {name} lies on the meta device, without values: load them first")
    for name, parameter in network.named_parameters() if role == "reference" else ():
        if parameter.is_floating_point() and bool(parameter.isnan().any()):
            raise DiagnoseError(f"{role}: {name} holds NaN, which nothing differs from: start from numbers")


def in_its_own_mode(network: nn.Module) -> None:
    """A network with a ``train`` of its own (norms that stay in eval mode) is put into its mode by that."""
    if any(type(m).train is not nn.Module.train for m in network.modules()):
        with told(f"{type(network).__name__}.train raised"):
            theirs(network.train, network.training)


def _candidate(reference: nn.Module, candidate: nn.Module | Rewrite) -> tuple[nn.Module, Rewrite | None]:
    if isinstance(candidate, nn.Module):
        made, rewrite = candidate, None
    else:
        made, rewrite = _rewritten(reference, candidate), candidate
    check_weights("candidate", made)
    return copied(made), rewrite


def _rewritten(reference: nn.Module, rewrite: Rewrite) -> nn.Module:
    if not callable(rewrite):
        raise DiagnoseError(
            f"candidate is a {type(rewrite).__name__}: give a torch.nn.Module, or a function model -> model"
        )
    with told("candidate(model) raised"):
        made = theirs(rewrite, copied(reference))
    if not isinstance(made, nn.Module):
        raise DiagnoseError(
            f"candidate(model) returned a {type(made).__name__}: it must return a torch.nn.Module"
        )
    return made
