"""What was seen of an arm in one pass over a batch or the test set: all that a measure may read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from driftlab.arithmetic.kinks import KinkSides
from driftlab.lockstep.arm import Arm
from driftlab.lockstep.distance import Folded


@dataclass(eq=False)
class Seen:
    """One arm after its backward pass, before its update; or in an evaluation.

    Attributes:
        arm: with its weights, gradients and buffers as they are now.
        outputs: what the network returned, without a graph.
        targets: as they belong to the outputs; None where there are none.
        leaves: the floating tensors that the network returned, by the reference's names.
        loss: a scalar; None in an evaluation.
        sides: of the kinks; None in an evaluation and at a step that leaves no row.
    """

    arm: Arm
    folded: Folded
    outputs: object
    targets: object
    leaves: Mapping[str, Tensor] = field(default_factory=dict)
    loss: Tensor | None = None
    sides: KinkSides | None = None

    def tensors(self, kind: str) -> Tensor:
        """Everything of one ``kind`` (weight, gradient, buffer), after folding, in one float64 vector."""
        return self.folded.vector(self.arm, kind)

    def distance(self, kind: str) -> Tensor | None:
        """The relative distance of ``tensors`` from those of the arm's against."""
        return self.folded.distance(self.arm, kind)

    @cached_property
    def classes(self) -> Tensor | None:
        """The class predicted for each target, in their shape; None where this is no classification.

        Of images and whole texts the scores are [N, classes]; of tokens [N, T, classes], and of pixels, as
        torch's losses take them, [N, classes, H, W]. Where both could be meant nobody is asked, nor of one
        score a sample, [N].
        """
        outputs, targets = self.outputs, self.targets
        if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor)) or targets.is_floating_point():
            return None
        shape = tuple(outputs.shape)
        places = {
            d
            for d in (1, len(shape) - 1)
            if 0 < d < len(shape) and shape[:d] + shape[d + 1 :] == targets.shape
        }
        return outputs.argmax(places.pop()) if len(places) == 1 else None

    def share(self, those: Tensor) -> Tensor:
        """Among the targets that name a class: one below 0 is left out, as torch's losses leave out -100."""
        told = self.targets >= 0
        return (those & told).double().sum() / told.double().sum()
