"""Local windows: at steps of a training both networks are put where the reference is, and followed.

Two trainings that only rounding tells apart part for good after some hundred steps, in float64 too. On the
same weights they agree again, at any step: a right rewrite stays with its controls for the next few updates,
and a fault that has set in shows at once. The growth of a nudge over such a window is the finite-time
Lyapunov exponent of the training at that step (Ott, "Chaos in Dynamical Systems", 2002, section 4.4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from driftlab.fold.unfold import Unfold, floating_tensors
from driftlab.lockstep.arm import Arm
from driftlab.lockstep.carried import Carried
from driftlab.lockstep.window import Batch, Window
from driftlab.network.calling import step_seed
from driftlab.network.pair import Pair, without_gradients
from driftlab.record.seed_record import Row


def pair_at(pair: Pair, reference: Arm, candidate: nn.Module, step: int) -> Pair:
    """Both on the weights, buffers and optimizer state that ``reference`` has before ``step``.

    What the candidate alone keeps (counters, buffers of its own) stays as it is in ``candidate``.

    Raises:
        DiagnoseError: the optimizer moves weights of another network.
        FoldError: the fold computes, so that there is no way from the reference's tensors to the candidate's.
    """
    mine, other = without_gradients(reference.module), without_gradients(candidate)
    theirs = floating_tensors(other)
    given = Unfold(pair.fold, theirs)(floating_tensors(mine), theirs)
    with torch.no_grad():
        for name, tensor in theirs.items():
            tensor.copy_(given[name])
    by = Carried(reference.optimizer, reference.module, other, pair.fold)
    own = {"optimizer": by.of_reference, "candidate_optimizer": by.of_candidate}
    return replace(pair, reference=mine, candidate=other, seed=step_seed(pair.seed, step), **own)


def local_rows(pair: Pair, batches: Sequence[Batch], begins: int, *, float64: bool = True) -> list[Row]:
    """A window of ``len(batches) - 1`` updates, from a pair as ``pair_at`` makes it.

    Args:
        begins: the step of the training at which the window begins.
        float64: whether the candidate takes part in float64.

    Returns:
        A row before each update and one after the last: ``step``, ``updates`` since the window began, and the
        columns of ``curves.csv`` and, where eval mode was looked at, of ``evaluations.csv``.
    """
    found = Window(pair, batches, len(batches) - 1, float64=float64).run()
    seen = {int(row["step"]): row for row in found.evaluations}
    return [
        {**row, **seen.get(k, {}), "step": begins + k, "updates": k} for k, row in enumerate(found.curves)
    ]
