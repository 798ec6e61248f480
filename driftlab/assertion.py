"""One line in a unit test: two modules compute the same function, forward and backward, as precisely."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from driftlab import blame
from driftlab.arguments import check_tensors, the_seed
from driftlab.arithmetic.passes import CannotRunError
from driftlab.arithmetic.returned import ByHand, mapped, return_alike
from driftlab.diagnosis import sgd
from driftlab.network.calling import calling, cast, each_tensor, named_leaves
from driftlab.network.pair import Pair, Rewrite, judged_in, precision_in, the_pair
from driftlab.probes import every_probe
from driftlab.probes.examination import Examination, examine
from driftlab.probes.probe import Probe
from driftlab.process import measuring
from driftlab.refusing import told
from driftlab.rounding import BEYOND
from driftlab.threads import threads_for
from driftlab.words import DiagnoseError, Finding, Status, Verdict


@measuring()
def assert_equivalent(
    reference: nn.Module,
    candidate: nn.Module | Rewrite,
    inputs: object,
    *,
    fold: Callable[[dict[str, Tensor]], Mapping[str, Tensor]] | None = None,
    seed: int = 0,
    outputs: ByHand = None,
    precision: str | None = None,
) -> None:
    """Assert that ``candidate`` computes what ``reference`` does: outputs, all gradients, buffers, eval mode.

    No tolerance is asked for: what rounding may do is measured on the spot, since a difference in the
    function stays where the float32 path is computed in float64, and rounding does not. Both are left as they
    are, and so are the program's settings and random state; inside, float32 has all its bits (no TF32).

    Args:
        reference, candidate: modules from the same weights; the candidate may be a function of the reference.
        inputs: a tensor, or a tuple or dict of arguments, taken in the dtype of the precision, on the
            modules' device.
        fold: from the candidate's tensors to the reference's, by name; found by value where None.
        seed: of the output gradients that are sent back, and of random layers.
        outputs: which output of the candidate stands for which of the reference's, as of ``diagnose``.
        precision: "float32", "bf16-mixed", "16-mixed" (under ``torch.autocast``), "bf16-true" or "16-true";
            that of the reference's weights where None. What rounding may do is that of this precision.

    Raises:
        AssertionError: they differ: what, where, by how much.
        DiagnoseError: one of them does not run, or the arguments are not what they should be; in one line,
            with the file and line of the code that raised.
    """
    with torch.inference_mode(False), torch.enable_grad(), told("assert_equivalent stops", outermost=True):
        run_in = precision_in(precision, reference)
        mine, theirs, found = the_pair(reference, candidate, fold, run_in)
        check_tensors("inputs", inputs)
        given, judged = _wanting_gradients(cast(inputs, run_in.dtype)), judged_in(reference, run_in)
        common: list[str] = []
        seed = the_seed(seed)
        loss, by_hand = random_sum(seed, common), mapped(theirs, outputs)
        called = calling(mine, given)
        pair = Pair(mine, theirs, found, loss, _optimizer, _optimizer, called, seed, judged, run_in, by_hand)
        examination = Examination(pair, (given, None), trains=False)
        asked = [probe for probe in every_probe() if probe.asserted]
        with threads_for(given, mine, theirs):
            try:
                common += return_alike(pair, given)
                wrong = _first_wrong(examination, asked)
            except CannotRunError as error:
                raise DiagnoseError(f"a module does not run on these inputs: {error}") from error
    if wrong:
        raise AssertionError(wrong)


def _first_wrong(examination: Examination, asked: Iterable[Probe]) -> str | None:
    """What to say of the first finding that the two differ by."""
    for finding in examine(examination, asked):
        evidence = finding.evidence
        if opening := _OPENINGS.get(evidence.supports):
            return _message(opening, finding, examination)
        if evidence.supports is Verdict.INCONCLUSIVE:
            raise DiagnoseError(evidence.reading)
        if finding.decides and evidence.status in (Status.REFUSED, Status.FAILED):
            raise DiagnoseError(f"the probe {evidence.probe} could not answer: {evidence.reading}")
    if not examination.network.finite(loss=False):
        raise DiagnoseError(
            "no output of the reference is finite: give inputs on which something could differ"
        )
    return None


def _optimizer(module: nn.Module) -> Optimizer:
    return sgd(module.parameters())


def random_sum(seed: int, names: Sequence[str] | None = None) -> Callable[[object, object], Tensor]:
    """The outputs, or those called ``names``, against fixed random numbers, which its gradient sends back."""

    def loss(outputs: object, _: object) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        total, found = None, named_leaves(outputs)
        kept = [found[name] for name in (found if names is None else names) if name in found]
        for output in kept:
            weights = torch.randn(output.shape, generator=generator).to(output.device)
            part = (output * weights).sum()
            total = part if total is None else total + part
        if total is None or not any(output.numel() for output in kept):
            raise DiagnoseError("the outputs hold no floating number: there is nothing to compare")
        return total

    return loss


def _wanting_gradients(inputs: object) -> object:
    def fresh(tensor: Tensor) -> Tensor:
        tensor = tensor.detach().clone()
        return tensor.requires_grad_() if tensor.is_floating_point() else tensor

    return each_tensor(fresh, blame.theirs(copy.copy, inputs))


_OPENINGS: dict[Verdict | None, str] = {
    Verdict.BUG: "The candidate is not the same function as the reference",
    Verdict.REDUCED_PRECISION: "The candidate computes in fewer bits than the reference",
    Verdict.NONDETERMINISTIC: "A comparison would mean nothing",
}


def _message(opening: str, failed: Finding, examination: Examination) -> str:
    e = failed.evidence
    lines = [f"{opening}!", "", e.reading, *e.details.splitlines(), ""]
    if failed.place:
        lines.append(f"Where: {failed.place.pass_} of {failed.place.named or 'the module itself'}")
    if e.measured is not None:
        allowed = f" (up to {e.threshold:.3g} allowed)" if e.threshold is not None else ""
        measured = f"Measured: {e.measured:.3g}{allowed}" if e.measured < BEYOND else "Beyond measure"
        lines.append(f"{measured}, by the probe {e.probe!r}")
    known = [f"  {f.evidence.probe}: {f.evidence.reading}" for f in examination.findings if f is not failed]
    return "\n".join([*lines, *(["Before that:", *known] if known else [])])
