"""One line in a unit test: two modules compute the same function, forward and backward, as precisely."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from driftlab.calling import calling
from driftlab.diagnosis import sgd
from driftlab.distance import named_leaves
from driftlab.examination import Examination
from driftlab.findings.determinism import ask_determinism
from driftlab.findings.fewer import ask_fewer_samples
from driftlab.findings.function import ask_function
from driftlab.findings.precision import ask_precision
from driftlab.findings.rewritten import ask_rewritten_modules
from driftlab.findings.start import ask_same_start
from driftlab.pair import Rewrite, the_pair
from driftlab.subject import Subject
from driftlab.verdict import Finding, Verdict

_ASKED = (
    ask_determinism,
    ask_function,
    ask_fewer_samples,
    ask_same_start,
    ask_rewritten_modules,
    ask_precision,
)


def assert_equivalent(
    reference: nn.Module,
    candidate: nn.Module | Rewrite,
    inputs: object,
    *,
    fold: Callable | None = None,
    seed: int = 0,
) -> None:
    """Assert that ``candidate`` computes what ``reference`` does: outputs, all gradients, buffers, eval mode.

    No tolerance is asked for: what rounding may do is measured on the spot, since a difference in the
    function stays where the float32 path is computed in float64, and rounding does not. Both are left as they
    are.

    Args:
        reference, candidate: modules from the same weights; the candidate may be a function of the reference.
        inputs: a tensor, or a tuple or dict of arguments, float32, on the modules' device.
        fold: from the candidate's tensors to the reference's, by name; found by value where None.
        seed: of the output gradients that are sent back, and of random layers.

    Raises:
        AssertionError: they differ: what, where, by how much.
        DiagnoseError: one of them does not run, or the arguments are not what they should be.
    """
    mine, theirs, found = the_pair(reference, candidate, fold)
    call = calling(mine, inputs)
    subject = Subject(mine, theirs, found, random_sum(seed), sgd, sgd, call, seed)
    examination = Examination(subject, (_wanting_gradients(inputs), None), trains=False)
    with torch.random.fork_rng(devices=[]):
        for ask in _ASKED:
            ask(examination)
            failed = [f for f in examination.findings if _fails(f)]
            if failed:
                raise AssertionError(_message(failed[0], examination))


def _fails(finding: Finding) -> bool:
    return finding.evidence.supports in (Verdict.BUG, Verdict.REDUCED_PRECISION, Verdict.NONDETERMINISTIC)


def random_sum(seed: int) -> Callable[[object, object], Tensor]:
    """The outputs against fixed random numbers: its gradient sends those numbers back."""

    def loss(outputs: object, _: object) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        total = None
        for output in named_leaves(outputs).values():
            weights = torch.randn(output.shape, generator=generator).to(output.device)
            part = (output * weights).sum()
            total = part if total is None else total + part
        return total

    return loss


def _wanting_gradients(inputs: object) -> object:
    def fresh(tensor: Tensor) -> Tensor:
        tensor = tensor.detach().clone()
        return tensor.requires_grad_() if tensor.is_floating_point() else tensor

    return pytree.tree_map_only(Tensor, fresh, copy.copy(inputs))


_OPENINGS = {
    Verdict.BUG: "The candidate is not the same function as the reference",
    Verdict.REDUCED_PRECISION: "The candidate computes in fewer bits than the reference",
    Verdict.NONDETERMINISTIC: "A comparison would mean nothing",
}


def _message(failed: Finding, examination: Examination) -> str:
    e = failed.evidence
    lines = [f"{_OPENINGS[e.supports]}!", "", e.reading, ""]
    if failed.place:
        lines.append(f"Where: {failed.place.pass_} of {failed.place.module or 'the module itself'}")
    if e.measured is not None:
        allowed = f" (up to {e.threshold:.3g} allowed)" if e.threshold is not None else ""
        lines.append(f"Measured: {e.measured:.3g}{allowed}, by the probe {e.probe!r}")
    known = [f"  {f.evidence.probe}: {f.evidence.reading}" for f in examination.findings if f is not failed]
    return "\n".join([*lines, *(["Before that:", *known] if known else [])])
