"""Is the gradient that autograd gives the derivative of the loss? A check for large networks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from driftlab.arguments import check_tensors, the_seed
from driftlab.blame import described, theirs
from driftlab.finite.decision import Outcome, Result, decided
from driftlab.finite.differences import Difference
from driftlab.finite.point import Loss, Point
from driftlab.finite.suspect import Suspect
from driftlab.finite.wording import seen
from driftlab.network.calling import calling, copied, own_batch, seed_random_layers, tensors_in
from driftlab.network.pair import check_weights
from driftlab.process import measuring
from driftlab.refusing import told, whole_number
from driftlab.words import DiagnoseError

DIRECTIONS = 3


@dataclass(frozen=True)
class GradientCheck:
    """The outcome, why, and what it rests on; true where it passed, ``print`` tells it.

    Attributes:
        outcome: pass, fail, or undecided where nothing could be told.
        reading: why, in a sentence with its numbers.
        suspect: which gradient is wrong and how, where it failed and one could be found.
        sees: the least error, relative to the gradient, that would have failed.
        differences: a random direction each.
        evaluations: forward passes that it took.
        seconds: that it took.
    """

    outcome: Outcome
    reading: str
    suspect: Suspect | None
    sees: float
    differences: tuple[Difference, ...]
    evaluations: int
    seconds: float

    def __bool__(self) -> bool:
        return self.outcome is Outcome.PASS

    def __str__(self) -> str:
        return f"gradient check: {self.outcome}. {self.reading}"


@measuring()
def gradient_check(
    module: nn.Module | Callable[..., Any],
    inputs: object,
    loss: Callable[[Any], Tensor] | None = None,
    *,
    directions: int = DIRECTIONS,
    seed: int = 0,
) -> GradientCheck:
    """Check the gradient of ``loss(module(inputs))`` by every parameter and input at once, in float64.

    Along a few random directions in which every number moves, autograd's derivative is held against central
    differences. How far a right one may be off is measured on the spot, so there is no tolerance to choose:
    round-off and truncation, see ``driftlab.finite.differences``. The step shrinks until no ReLU or max-pool
    changes sides between the two ends, since a kink, not rounding, sets the error there. It costs some forty
    forward passes whatever the size, up to three times that close to kinks; where it fails, a few more for
    each halving find the element.

    Nothing that is handed over is changed, but for what a function (as against a network) closes over: hand
    over the network itself, whose parameters are then checked too. What only the float32 path does is not
    seen. By design of their makers, the gradients of straight-through estimators, of ``scale_grad_by_freq``
    and ``max_norm`` embeddings, of ``F.embedding`` by its ``padding_idx``, of spectral norms in training, of
    samples by implicit reparametrisation (Gamma, Dirichlet) and of ``ctc_loss`` by what is no log-softmax are
    not the derivative, and fail.

    Args:
        module: a network, or a function of tensors. It is checked in the mode that it is in.
        inputs: a tensor, or a tuple or dict of arguments.
        loss: of the outputs, one number; a random sum of them where None.
        directions: how many.
        seed: of the directions and of random layers.

    Raises:
        DiagnoseError: the network or its loss does not run in float64, or there is nothing to check; in one
            line, with the file and line of the code that raised.
    """
    began = time.perf_counter()
    directions, seed = whole_number("directions", directions, 2), the_seed(seed)
    network = module if isinstance(module, nn.Module) else _Function(module)
    if loss is not None and not callable(loss):
        raise DiagnoseError(
            f"loss is a {type(loss).__name__}: give a function of the outputs, or leave it out"
        )
    loss = _random_sum(seed) if loss is None else loss
    # a check under no_grad or inference_mode is a check all the same
    with torch.inference_mode(False), torch.enable_grad(), told("gradient_check stops", outermost=True):
        check_tensors("inputs", inputs)
        check_weights("module", network)
        point = _running(lambda: Point(network, inputs, loss, seed), network is not module)
        gradient = _gradient(point, network, inputs, loss, seed)
        if isinstance(gradient, str):
            result: Result = Outcome.FAIL, gradient, None, []
        else:
            result = decided(point, gradient, directions, seed)
    outcome, reading, suspect, found = result
    seconds = time.perf_counter() - began
    return GradientCheck(outcome, reading, suspect, seen(found), tuple(found), point.evaluations, seconds)


class _Function(nn.Module):
    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.forward = function


def _random_sum(seed: int) -> Callable[[object], Tensor]:
    from driftlab.assertion import random_sum

    summed = random_sum(seed)

    def loss(outputs: object) -> Tensor:
        with torch.device("cpu"):  # where its random numbers are drawn, whatever the default device
            return summed(outputs, None)

    return loss


def _running(make: Callable[[], Point], closes_over: bool) -> Point:
    """The point, with its loss once computed. Raises DiagnoseError where it does not run."""
    try:
        point = make()
        loss = point.start()
    except DiagnoseError:
        raise
    except Exception as error:  # whatever a stranger's forward raises
        hint = "; a network that a function closes over stays in its dtype: hand over the network itself"
        raise DiagnoseError(
            f"it does not run in float64: {described(error, 200)}{hint if closes_over else ''}"
        ) from error
    if loss - loss:  # inf or NaN
        raise DiagnoseError(f"the loss is {loss} at the point to be checked: start from a finite one")
    return point


def _gradient(
    point: Point, network: nn.Module, inputs: object, loss: Loss, seed: int
) -> dict[str, Tensor] | str:
    """Autograd's gradient; in a sentence what is wrong with it, where it cannot be a gradient.

    Raises:
        DiagnoseError: the backward pass runs in the network's own dtype and not in float64.
    """
    try:
        gradient = point.gradient()
    except DiagnoseError:
        raise
    except Exception as error:
        if _runs_in_float32(network, inputs, loss, seed):
            raise DiagnoseError(
                f"its backward pass does not run in float64 ({described(error, 200)}): let targets and "
                "constants follow the dtype of the outputs"
            ) from error
        return f"the backward pass raises {described(error, 200)}"
    bad = [n for n, g in gradient.items() if not bool(g.isfinite().all())]
    return f"autograd's gradient of {bad[0]} is not finite, and the loss is" if bad else gradient


def _runs_in_float32(network: nn.Module, inputs: object, loss: Loss, seed: int) -> bool:
    """Whether it is the float64 that the backward pass cannot do."""
    twin, own = copied(network).float(), own_batch(inputs, torch.float32)
    floating = [t for t in tensors_in(own) if t.is_floating_point()]
    leaves = [t.requires_grad_() for t in (*twin.parameters(), *floating)]
    own = pytree.tree_map_only(Tensor, lambda t: t.clone(), own)  # it may write into them
    seed_random_layers(seed)
    try:
        torch.autograd.grad(theirs(loss, calling(twin, own)(twin, own)), leaves, allow_unused=True)
    except Exception:  # whatever a stranger's backward raises
        return False
    return True
