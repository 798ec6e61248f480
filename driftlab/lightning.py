"""``Watch``: a training on a Lightning Trainer, watched (``driftlab.watching`` for a loop of one's own)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import nn

from driftlab import watch
from driftlab.blame import theirs
from driftlab.diagnosis import Diagnosis
from driftlab.extras import extra
from driftlab.network.lightning_module import Step, configured, its_own
from driftlab.network.pair import Rewrite
from driftlab.precision import FLOAT32, TRAINED_IN
from driftlab.words import DiagnoseError

with extra("lightning"):
    import lightning
    from lightning.pytorch.utilities import rank_zero_warn

SHOWN = ("weight_distance/", "gradient_distance/")  # of each look, in the trainer's logger


class Watch(lightning.Callback):
    """Watches a training: would it be the same with the rewritten module?

        watch = driftlab.lightning.Watch(my_rewrite)
        trainer = lightning.Trainer(..., callbacks=[watch])
        trainer.fit(my_module, datamodule)
        watch.diagnosis

    The training is bit for bit what it is without. What is compared is the loss of the module's own
    ``training_step``, which finds ``global_step``, ``current_epoch`` and ``trainer`` as in the training, all
    gradients, and the updates: in float32 and float64, at the learning rate of that batch, gradients clipped
    and gathered as the Trainer does. Where the Trainer runs in mixed precision, looks are taken under its
    autocast too. The first look of a training that begins takes the optimizers that both modules'
    ``configure_optimizers`` make; later ones go on with the groups of the one in use. Names in a place begin
    with ``module.``, the LightningModule. At its end ``report.html`` lies in the trainer's ``log_dir``, and
    the distances of each look are in its logger as
    ``local/weight_distance/candidate.float64`` and so on.

    Args:
        candidate: makes the rewritten module from a deep copy of the LightningModule.
        budget, updates, fold, seed: as in ``driftlab.watching``.
    """

    def __init__(
        self,
        candidate: Rewrite,
        *,
        budget: float = 0.05,
        updates: int = 6,
        fold: Callable | None = None,
        seed: int = 0,
    ):
        self._candidate = candidate
        self._options = {"budget": budget, "updates": updates, "fold": fold, "seed": seed}
        self._watch: watch.Watch | None = None

    @property
    def looks(self) -> list[watch.Look]:
        return self._watch.looks if self._watch else []

    @property
    def diagnosis(self) -> Diagnosis | None:
        """The worst that was found, the first of its kind; None before the first batch."""
        return self._watch.diagnosis if self._watch else None

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Raises DiagnoseError where the module steps its optimizers itself, or has several."""
        if not pl_module.automatic_optimization or len(trainer.optimizers) != 1:
            raise DiagnoseError(
                "Watch follows one optimizer, which the Trainer steps: in a module that steps its own, or "
                "several, use driftlab.watching"
            )
        optimizer, network = trainer.optimizers[0], Step(pl_module, trainer.accumulate_grad_batches, trainer)
        options = self._options | {"clip": _clips(trainer), "begins": trainer.global_step}
        options |= {"accumulate": trainer.accumulate_grad_batches}
        options |= {"precision": _precision(trainer)}
        if trainer.global_step == 0:
            options["configured"] = lambda network: configured(network)[0]
        self._watch = watch.Watch(network, self._rewritten, optimizer, its_own, **options)

    def on_train_batch_start(self, trainer, pl_module, batch: Any, batch_idx: int) -> None:
        self._watch.model.batch_idx, self._watch.model.begins = batch_idx, trainer.global_step
        self._watch.steps = trainer.global_step
        self._watch.gathered = batch_idx % trainer.accumulate_grad_batches  # an epoch's end ends an update
        if self._watch.step({"batch": batch}):
            self._log(trainer)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._watch.steps = trainer.global_step
        if self._watch.end():
            self._log(trainer)
        if self.diagnosis and trainer.is_global_zero:
            folder = Path(trainer.log_dir or trainer.default_root_dir)
            folder.mkdir(parents=True, exist_ok=True)
            try:
                self.diagnosis.to_html(folder / "report.html")
            except ModuleNotFoundError as error:  # a training is not lost for want of a page
                rank_zero_warn(f"no report.html: {error}")

    def _rewritten(self, network: Step) -> Step:
        network.module = theirs(self._candidate, network.module)
        return network

    def _log(self, trainer: lightning.Trainer) -> None:
        last = next(iter(reversed(self.looks[-1].diagnosis.curves)), {})
        shown = {f"local/{name}": value for name, value in last.items() if name.startswith(SHOWN)}
        for logger in trainer.loggers:
            logger.log_metrics(shown, step=trainer.global_step)


def _precision(trainer: lightning.Trainer) -> str:
    """As ``driftlab.watching`` takes it; float32 of any that it does not take."""
    if trainer.precision in TRAINED_IN:
        return trainer.precision
    if trainer.precision not in ("32-true", "64-true"):
        rank_zero_warn(f"driftlab: looks are taken in float32 and float64, not in {trainer.precision}")
    return FLOAT32.name


def _clips(trainer: lightning.Trainer) -> float | Callable[[Iterable[nn.Parameter]], object] | None:
    """What the Trainer does to gradients, as ``driftlab.watching`` takes it."""
    most = trainer.gradient_clip_val or None  # 0 clips nothing
    if most is None or trainer.gradient_clip_algorithm != "value":
        return most
    return lambda parameters: nn.utils.clip_grad_value_(parameters, most)
