"""Do the two start alike? Weights after folding, buffers, modes, what is trained, and by which settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from driftlab.fold import Fold, listed
from driftlab.fold.layout import relative_distance
from driftlab.fold.unfold import floating_tensors
from driftlab.words import Place, Verdict

# How an optimizer goes about its work, not what it computes.
_EXECUTION = {"params", "foreach", "fused", "capturable", "differentiable", "initial_lr", "param_names"}


@dataclass(frozen=True)
class Start:
    """One difference at the start: what it is in a sentence, its size where it has one, and where."""

    what: str
    measured: float | None
    supports: Verdict | None
    place: Place | None = None


def owner(tensor_name: str) -> str:
    """The module that a tensor belongs to."""
    return tensor_name.rpartition(".")[0]


def start_differences(reference: nn.Module, candidate: nn.Module, fold: Fold) -> list[Start]:
    """What differs between the two before any training, the gravest first."""
    found = [*_values(reference, candidate, fold), *_frozen(reference, candidate, fold)]
    found += _modes(reference, candidate)
    found += [Start(note, None, None) for note in fold.notes]
    real = {n for n, t in floating_tensors(reference).items() if t.numel()}
    missing = [n for n in fold.unplaced if n in real]
    if missing:
        found.append(Start(f"not found in the candidate: {listed(missing)}; judged without them", None, None))
    return found


def _values(reference: nn.Module, candidate: nn.Module, fold: Fold) -> list[Start]:
    """Tensors that do not start from the reference's values."""
    mine, theirs = floating_tensors(reference), floating_tensors(candidate)
    parameters = {n for n, _ in reference.named_parameters()}
    folded, found = fold(theirs), []
    for name, tensor in mine.items():
        other = folded.get(name)
        if other is None or other.shape != tensor.shape or _equal(tensor, other):
            continue
        off = float(relative_distance(other.double(), tensor.double().to(other.device)))
        kind = "parameter" if name in parameters else "buffer"
        if _equal(tensor.to(other.dtype), other):
            what = f"{name} is stored as {str(other.dtype).removeprefix('torch.')}"
            found.append(Start(what, off, Verdict.REDUCED_PRECISION, Place(owner(name), "forward", 0)))
            continue
        apart = int((other.double() != tensor.double().to(other.device)).sum())
        what = (
            f"the {kind} {name} starts from other values ({apart} of {tensor.numel()} entries, {off:.2g} "
            f"relative)"
        )
        pass_ = "forward" if kind == "parameter" else "buffer"
        found.append(Start(what, off, Verdict.BUG, Place(owner(name), pass_, 0)))
    return found


def _equal(a: Tensor, b: Tensor) -> bool:
    b = b.to(a.device)
    return bool(((a.double() == b.double()) | (a.isnan() & b.isnan())).all())


def _frozen(reference: nn.Module, candidate: nn.Module, fold: Fold) -> list[Start]:
    """Parameters that are trained on one side alone."""
    mine, theirs = dict(reference.named_parameters()), dict(candidate.named_parameters())
    found = []
    for name, parameter in mine.items():
        sources = fold.sources(name)
        if not sources:
            continue
        trained = [n for n in sources if n in theirs and theirs[n].requires_grad]
        if parameter.requires_grad and len(trained) < len(sources):
            idle = sorted(sources - set(trained))[0]
            why = "is frozen" if idle in theirs else "is no parameter"
            what = f"{name} is trained in the reference; in the candidate {idle} {why}"
            found.append(Start(what, None, Verdict.BUG, Place(owner(name), "weight gradient", 0)))
        if not parameter.requires_grad and trained:
            what = f"{name} is frozen in the reference, and {trained[0]} is trained in the candidate"
            found.append(Start(what, None, Verdict.BUG, Place(owner(name), "weight gradient", 0)))
    for name, _ in reference.named_buffers():
        if trained := [n for n in fold.sources(name) if n in theirs and theirs[n].requires_grad]:
            # it counts where a gradient comes to it, which the function tells
            what = f"{name} is a buffer in the reference, and {trained[0]} a parameter in the candidate"
            found.append(Start(what, None, None))
    return found


def _modes(reference: nn.Module, candidate: nn.Module) -> list[Start]:
    mine, theirs = dict(reference.named_modules()), dict(candidate.named_modules())
    names = {True: "training", False: "eval"}
    return [
        Start(
            f"{n or 'the candidate'} is in {names[theirs[n].training]} mode, not {names[m.training]}",
            None,
            None,
        )
        for n, m in mine.items()
        if n in theirs and type(theirs[n]) is type(m) and theirs[n].training != m.training
    ]


def settings_by_tensor(module: nn.Module, optimizer: Optimizer) -> dict[str, Mapping[str, object]]:
    """The settings (learning rate, weight decay, ...) of each parameter that is moved, by name."""
    groups = {
        id(p): {k: v for k, v in group.items() if k not in _EXECUTION}
        for group in optimizer.param_groups
        for p in group["params"]
    }
    return {n: groups[id(p)] for n, p in module.named_parameters() if id(p) in groups}


def setting_differences(
    reference: tuple[nn.Module, Optimizer], candidate: tuple[nn.Module, Optimizer], fold: Fold
) -> dict[str, str]:
    """Reference tensor -> how its optimizer settings differ in the candidate, in words."""
    mine, theirs = settings_by_tensor(*reference), settings_by_tensor(*candidate)
    found = {}
    for name, own in mine.items():
        for source in sorted(fold.sources(name)):
            if source not in theirs:
                found[name] = f"{source} is in no parameter group of the candidate's optimizer"
                break
            other = theirs[source]
            off = [k for k in own if k in other and not _same_setting(own[k], other[k])]
            if off:
                pairs = ", ".join(f"{k} {_said(other[k])} instead of {_said(own[k])}" for k in off)
                found[name] = f"{source} has {pairs}"
                break
    return found


def _same_setting(a: object, b: object) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return bool(torch.equal(torch.as_tensor(a), torch.as_tensor(b)))
    return a == b


def _said(value: object) -> str:
    return f"{value.item():g}" if isinstance(value, Tensor) and value.numel() == 1 else str(value)
