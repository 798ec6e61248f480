"""One call for the whole question: is the candidate the same function, and if not, where not?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from driftlab.arguments import (
    clipped_by,
    moved_by,
    stepping,
    the_batches,
    the_seed,
    the_steps,
)
from driftlab.arithmetic.passes import CannotRunError
from driftlab.arithmetic.returned import ByHand, mapped, returned
from driftlab.blame import described, is_out_of_memory, theirs
from driftlab.fold import Fold
from driftlab.inquiry import Examined, before_training, inquire
from driftlab.lockstep.control import ONE_WEIGHT
from driftlab.lockstep.window import Batches, Snapshots, Window
from driftlab.network.calling import calling, copied, each_tensor, named_leaves, own_batch
from driftlab.network.compiled import eager
from driftlab.network.lightning_module import as_network, is_lightning
from driftlab.network.loss import Loss, loss_in
from driftlab.network.otherwise import accumulating, gathered, is_trained_on, takes
from driftlab.network.pair import Pair, Rewrite, judged_in, precision_in, the_pair
from driftlab.precision import FLOAT32, Precision, trained_in
from driftlab.probes import every_probe
from driftlab.probes.examination import Examination, examine
from driftlab.probes.function import ask as ask_function
from driftlab.probes.repeat import ask_repeat
from driftlab.process import measuring
from driftlab.record.column_table import Row
from driftlab.record.json_files import write_json
from driftlab.record.seed_record import SeedRecord, write_whole
from driftlab.refusing import told, whole_number
from driftlab.threads import threads_for
from driftlab.verdict.envelope import window_pair
from driftlab.verdict.outcomes import part_of_a_training
from driftlab.verdict.rules import judge
from driftlab.words import DiagnoseError, Evidence, Finding, Judgement, Place, Verdict, settled_by


@dataclass(frozen=True)
class Diagnosis:
    """The verdict about a candidate, with its reasons; ``print`` shows them as a table.

    Attributes:
        verdict: what came out.
        headline: the same in a sentence.
        where: module, pass and step, where the verdict has a place.
        evidence: every question that was asked, with measured value, threshold and reading.
        threads: with how many torch computed; with another number sums are rounded in another order.
        curves: a row a step, by the names of ``curves.csv`` (``loss/candidate.float32``); empty where nothing
            had to be trained.
    """

    verdict: Verdict
    headline: str
    where: Place | None
    evidence: list[Evidence]
    threads: int = 1
    curves: Sequence[Mapping[str, float]] = field(default=(), repr=False)
    _record: SeedRecord | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        from driftlab.table import as_table

        return as_table(self._judgement)

    def _repr_html_(self) -> str:
        """The same in a notebook."""
        from driftlab.table import as_html

        return as_html(self._judgement)

    def along(self, headline: str, windows: Sequence[Row]) -> Diagnosis:
        """The same of a whole training, whose page shows these local windows."""
        record = self._record and replace(self._record, local=windows)
        return replace(self, headline=headline, _record=record)

    def to_json(self, path: str | Path) -> Path:
        """Write verdict, place and evidence as ``verdict.json`` of an experiment has them, and the curves."""
        written = self._judgement.as_dict() | {"threads": self.threads, "curves": list(self.curves)}
        write_json(Path(path), written)
        return Path(path)

    def to_html(self, path: str | Path) -> Path:
        """Write the page of an experiment for this pair: one file that needs nothing else.

        Raises:
            ModuleNotFoundError: jinja2 or matplotlib is missing: ``pip install 'driftlab[report]'``.
        """
        from driftlab.report import as_page

        records = [self._record] if self._record else []
        write_whole(Path(path), as_page(records, self._judgement, {"experiment": "driftlab.diagnose"}))
        return Path(path)

    @property
    def _judgement(self) -> Judgement:
        return Judgement(self.verdict, self.headline, self.evidence, self.where)


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """What the networks are trained by where nobody says otherwise."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@measuring()
def diagnose(
    reference: nn.Module,
    candidate: nn.Module | Rewrite,
    batches: Iterable[tuple[object, object]],
    loss: Callable[[Any, Any], Tensor] = F.cross_entropy,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = sgd,
    candidate_optimizer: Callable[[nn.Module], Optimizer] | None = None,
    steps: int = 20,
    fold: Callable[[dict[str, Tensor]], Mapping[str, Tensor]] | None = None,
    seed: int = 0,
    *,
    trains: bool = True,
    threads: int | None = None,
    outputs: ByHand = None,
    scheduler: Callable[[Optimizer], LRScheduler] | None = None,
    clip: float | Callable[[Iterable[nn.Parameter]], object] | None = None,
    accumulate: int = 1,
    candidate_inputs: Callable[[Any], object] | None = None,
    candidate_loss: Callable[[Any, Any], Tensor] | None = None,
    precision: str | None = None,
) -> Diagnosis:
    """Say whether ``candidate`` computes and trains as ``reference`` does, and if not, where it departs.

    Probes come first, which need no training; then, unless they settle it, both are trained in lockstep in
    float32 and float64 beside controls nudged by one ulp. Nothing that is handed over is changed. All of it
    runs with every bit of float32 (no TF32) and kernels that repeat themselves, whatever the program has set;
    its settings and torch's random state are afterwards what they were.

    Args:
        reference: the network as it was.
        candidate: the network after the rewrite, from the same weights; or the function that makes it from a
            deep copy of the reference.
        batches: pairs ``(inputs, targets)``, repeated as needed. Inputs are a tensor, or a tuple or dict of
            arguments; they lie on the networks' device. Of those that require a gradient it is compared too.
        loss: ``loss(outputs, targets)``, a scalar tensor. The tensors of a loss module, or of a ``partial``,
            follow the dtype; those that a function closes over do not.
        optimizer: makes an optimizer of parameters.
        candidate_optimizer: makes the candidate's optimizer of the candidate module, for rewrites that change
            parameter groups; as ``optimizer`` where None.
        steps: updates in the lockstep window. A fault that sets in later is not seen.
        fold: ``fold(tensors by the candidate's names) -> tensors by the reference's names``; found by value
            where None.
        seed: of the random layers and of the controls' nudges.
        trains: False judges evaluation alone, on every batch: for norms folded into weights and merged
            adapters, which are another training. No gradient, update or curve is looked at then.
        threads: of torch on the CPU, during this call. None takes one for small networks, which is faster,
            see ``driftlab.threads``; a fault that only several threads bring about needs them.
        outputs: which output of the candidate stands for which of the reference's, where names, places,
            shapes and values do not tell. A mapping of names, ``{"logits": "scores"}``, in which None leaves
            an output of the reference out; names are written as in code, "[1]" in a tuple,
            "hidden_states[3]", "" for a tensor that is returned by itself. Or a function of what the
            candidate returns, which gives what the reference would return; the loss is given its result.
        scheduler: makes the learning-rate scheduler of an optimizer; it moves after each update.
        clip: the norm to which all gradients together are cut before each update, or a function of the
            parameters that does so.
        accumulate: how many batches' gradients one update gathers: those of the mean of their losses. Batches
            are handed over one after the other; their activations are in memory together.
        candidate_inputs: function of a batch's inputs that gives what the candidate takes, where that is
            something else (another layout, no mask); as the reference where None.
        candidate_loss: ``candidate_loss(outputs, targets)``, where the candidate is trained on another one (a
            fused cross-entropy on hidden states); ``loss`` where None.
        precision: "bf16-mixed" or "16-mixed" where the two run under ``torch.autocast``, "bf16-true" where
            weights and batches are bfloat16: the probes then ask of the code as it runs there, and the
            lockstep window trains in it too. That of the reference's weights where None.

    A LightningModule is taken with its own ``training_step`` and ``configure_optimizers``, on the batches of
    its DataLoader as they come, where neither ``loss`` nor an optimizer is given; ``candidate`` then makes
    another of a copy of it.

    Raises:
        DiagnoseError: a network does not run on the batches, an argument is not what it should be.
    """

    with torch.inference_mode(False), torch.enable_grad(), told("diagnose stops", outermost=True):
        of_module = stepping("optimizer", optimizer, nn.Module.parameters)
        by = (
            of_module if candidate_optimizer is None else stepping("candidate_optimizer", candidate_optimizer)
        )
        count = whole_number("accumulate", accumulate, 1)
        if is_lightning(reference) and (loss, optimizer, candidate_optimizer) == (F.cross_entropy, sgd, None):
            own = as_network(reference, candidate, count)
            reference, candidate, loss = own.reference, own.candidate, own.loss
            batches, scheduler = own.batches(batches), scheduler or own.scheduler
            of_module = by = stepping("configure_optimizers", own.optimizer)
        run_in = precision_in(precision, reference, trained_in)
        both = the_pair(reference, candidate, fold, run_in)
        if not isinstance(trains, bool):
            raise DiagnoseError(f"trains is a {type(trains).__name__}: give True or False")
        steps = the_steps(steps, *both[:2])
        kept = the_batches(batches, count * (steps + 1))
        if trains:  # what cannot be made is refused here; without a training none is made at all
            of_module(both[0]), by(both[1])
        pair = made_pair(
            both,
            kept[0],
            loss,
            (of_module, by),
            seed,
            judged=judged_in(reference, run_in),
            precision=run_in,
            outputs=outputs,
            scheduler=moved_by(scheduler),
            clip=clipped_by(clip),
            candidate_inputs=candidate_inputs,
            candidate_loss=candidate_loss,
        )
        if count > 1:
            pair, kept = accumulating(pair, count), gathered(kept, count)
        return of_pair(pair, kept, steps, trains=trains, threads=threads)


def of_pair(
    pair: Pair,
    batches: Batches,
    steps: int,
    *,
    trains: bool = True,
    threads: int | None = None,
    begins: int = 0,
    part: bool = False,
) -> Diagnosis:
    """``diagnose`` of a pair as ``made_pair`` makes it.

    Args:
        batches: in float32, see ``the_batches``.
        begins: the step of a training at which this one begins.
        part: whether these are some updates of a training, which have no end of their own.

    Raises:
        DiagnoseError: a network does not run on the batches.
    """
    try:
        with threads_for(batches[0], pair.reference, pair.candidate, threads=threads) as count:
            if pair.outputs.given:
                returned(pair, batches[0][0])
            record = diagnosed(pair, batches, steps) if trains else evaluated(pair.evaluating(), batches)
    except CannotRunError as error:
        raise DiagnoseError(f"a network does not run on the first batch: {error}") from error
    record = part_of_a_training(record) if part else record
    found = judge([record]).begun_at(begins)
    told_of = found.verdict, found.headline, found.where, found.evidence
    return Diagnosis(*told_of, count, record.curves, record)


def made_pair(
    both: tuple[nn.Module, nn.Module, Fold],
    batch: tuple[object, object],
    loss: Loss,
    by: tuple[Callable[[nn.Module], Optimizer], Callable[[nn.Module], Optimizer]],
    seed: int,
    *,
    judged: str,
    precision: Precision = FLOAT32,
    outputs: ByHand = None,
    scheduler: Callable[[Optimizer], LRScheduler | None] | None = None,
    clip: Callable[[nn.Module], object] | None = None,
    candidate_inputs: Callable[[Any], object] | None = None,
    candidate_loss: Loss | None = None,
) -> Pair:
    """The pair that ``of_pair`` examines, of copies of both networks in float32 as ``the_pair`` makes them.

    Args:
        batch: one, which tells how the reference takes its inputs.
        by: makes the reference's optimizer, and the candidate's, of the network.
        judged: the dtype in which the reference was handed over, or the precision's name.
        precision: in which the probes ask.
        outputs, scheduler, clip, candidate_inputs, candidate_loss: as in ``diagnose``, checked.
    """
    mine, other, fold = both
    called, by_hand = calling(mine, batch[0]), mapped(other, outputs)
    if candidate_inputs is not None:
        takes(other, candidate_inputs, called)
    if candidate_loss is not None:
        is_trained_on(other, _own(candidate_loss, "candidate_loss"))
    own = _own(loss)
    return Pair(
        mine, other, fold, own, *by, called, the_seed(seed), judged, precision, by_hand, scheduler, clip
    )


def _own(loss: Loss, name: str = "loss") -> Loss:
    """The loss in float32, its tensors its own."""
    if not callable(loss) or isinstance(loss, type):
        raise DiagnoseError(f"{name} is a {type(loss).__name__}: give a function of (outputs, targets)")
    if isinstance(loss, nn.Module | partial):
        return loss_in(
            loss, lambda module: copied(module).float(), lambda held: own_batch(held, torch.float32)
        )

    def own(outputs: object, targets: object) -> Any:
        try:
            return theirs(loss, outputs, each_tensor(torch.clone, targets))  # it may write into them
        except RuntimeError as error:
            wide = any(t.dtype == torch.float64 for t in named_leaves(outputs).values())
            if is_out_of_memory(error) or not wide:
                raise
            hint = "tensors that a function closes over stay in their dtype: give a loss module, or a partial"
            raise DiagnoseError(f"the loss does not run in float64: {described(error)}; {hint}") from error

    return own


def diagnosed(pair: Pair, batches: Batches, steps: int) -> SeedRecord:
    """All the evidence about a pair, as the record of one seed.

    Raises:
        CannotRunError: one of the two does not run at all.
        DiagnoseError: the reference's loss is not finite before any update.
    """
    training = InMemory(pair, batches, steps)
    found, first = before_training(pair, batches[0])
    if "network" in vars(first) and not settled_by(found.findings) and not first.network.finite(loss=True):
        raise DiagnoseError("the reference's loss on the first batch is not finite: check batches and loss")
    with eager():
        record, findings = inquire(training, training.dated(found))
    return replace(record, findings=findings)


def evaluated(pair: Pair, batches: Batches) -> SeedRecord:
    """What the probes find in eval mode, as the record of a seed without any training.

    Raises:
        CannotRunError: one of the two does not run at all.
        DiagnoseError: no output of the reference is finite.
    """
    found = Examination(pair, batches[0], trains=False)
    for _ in examine(found, [replace(p, as_compiled=True) for p in every_probe() if p.asserted]):
        pass
    if "network" in vars(found) and not settled_by(found.findings) and not found.network.finite(loss=False):
        raise DiagnoseError("no output of the reference is finite: check batches")
    for batch in batches[1:]:
        if not settled_by(found.findings) and (more := Examination(pair, batch, trains=False)).wrong:
            found.findings += ask_function(more)
    return SeedRecord(pair.seed, [], [], {"arms": {}}, findings=found.findings)


class InMemory:
    """A training for ``inquire``: a window in memory, the float32 pair twice over.

    What the probes settle is not trained; of a fault that they found beside the training's path, it is seen
    from which step on it shows.
    """

    def __init__(self, pair: Pair, batches: Batches, steps: int):
        self.pair, self._batches, self.steps = pair, batches, steps

    def dated(self, found: Examined) -> Examined:
        """With the step at which a fault beside the training's path begins to show in this training."""
        settled = settled_by(found.findings)
        if settled is None or settled[0] is not Verdict.BUG:
            return found
        since = self._since(settled[1], found.float64)
        return replace(found, findings=[since if f is settled[1] else f for f in found.findings])

    def train(self, found: Examined) -> SeedRecord:
        if settled_by(found.findings):
            return SeedRecord(self.pair.seed, [], [], {"arms": {}})
        record = self._window(dtypes=self.pair.trained_in(found.dtypes), float64=found.float64).run()
        self._second = self._window(dtypes=("float32",), controls=())
        self._snapshots = Snapshots(self.pair, self._second)
        return record

    def after(self, found: Examined, record: SeedRecord) -> list[Finding]:
        return [ask_repeat(self._snapshots, record, self._second.record())]

    def until(self, step: int) -> Snapshots:
        return self._snapshots

    def at_the_end(self) -> Snapshots:
        return self._snapshots

    def _window(self, **options: Any) -> Window:
        return Window(self.pair, self._batches, self.steps, **options)

    def _since(self, finding: Finding, float64: bool) -> Finding:
        """The finding with the step from which the fault shows in this training, where it shows."""
        if not finding.off_path or finding.place is None:
            return finding
        dtype = "float64" if float64 else "float32"
        window = self._window(dtypes=(dtype,), controls=(ONE_WEIGHT,))
        for step in window.walk():
            if step and (excess := window_pair([window.record()], "candidate")[1]):
                return finding.at_step(excess.since(finding.place.pass_))
        return finding
