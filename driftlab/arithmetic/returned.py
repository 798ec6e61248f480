"""What both networks return, before anything is asked of them; and outputs that are mapped by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from driftlab.arithmetic.passes import Passes, forward_alone, run
from driftlab.blame import theirs
from driftlab.network.calling import named_leaves
from driftlab.network.outputs import Outputs
from driftlab.network.pair import Pair
from driftlab.refusing import shown
from driftlab.words import DiagnoseError

# As ``diagnose`` and ``assert_equivalent`` take it.
ByHand = Mapping[str, str | None] | Callable[[object], object] | None


def mapped(candidate: nn.Module, outputs: ByHand) -> Outputs:
    """What was given by hand; a function is made a part of ``candidate``.

    Raises:
        DiagnoseError: it is neither a mapping of names nor a function.
    """
    if callable(outputs):
        hook(candidate, lambda _, __, out: theirs(outputs, out))
        return Outputs()
    names = dict(outputs) if isinstance(outputs, Mapping) else None
    if outputs is None or (names is not None and all(map(_is_name, names, names.values()))):
        return Outputs(names)
    raise DiagnoseError(
        f"outputs={shown(outputs)}: give a mapping from the reference's outputs to the candidate's, as in "
        "{'logits': 'scores'}, or a function of what the candidate returns"
    )


def _is_name(mine: object, other: object) -> bool:
    return isinstance(mine, str) and isinstance(other, str | None)


def hook(candidate: nn.Module, change: Callable) -> None:
    """Let ``candidate``, and every copy of it, return what ``change(module, args, outputs)`` does."""
    if isinstance(candidate, torch.jit.ScriptModule):
        raise DiagnoseError(
            "outputs: TorchScript does not let its outputs be changed: wrap the candidate in a module that "
            "returns what the reference does"
        )
    candidate.register_forward_hook(change)


def returned(pair: Pair, inputs: object) -> tuple[Passes, Passes]:
    """The outputs of both, in their own names, in their own mode and in eval mode.

    Raises:
        CannotRunError: one of the two does not run.
        DiagnoseError: there is no output of a name that was given by hand.
    """
    call = forward_alone(pair, inputs)
    mine, other = (run(m, call, "float32", pair.seed) for m in (pair.reference, pair.candidate))
    pair.outputs.check(other.tensors["forward"], mine.tensors["forward"])
    return mine, other


def return_alike(pair: Pair, inputs: object) -> list[str]:
    """Let the candidate return a dict with the reference's names; those of the outputs that both return.

    For a loss that is made of the outputs by name. Raises as ``returned``.
    """
    mine, other = returned(pair, inputs)
    outputs, own = pair.outputs, {True: mine.tensors["forward"], False: mine.tensors["eval"]}
    both = list(outputs.of(other.tensors["forward"], own[True]))
    if any(list(mine.tensors[p]) != list(other.tensors[p]) for p in ("forward", "eval")) or outputs.given:

        def alike(module: nn.Module, _: tuple, out: object) -> dict:
            leaves = named_leaves(out)
            found = outputs.of(leaves, own[module.training])
            taken = {id(t) for t in found.values()}
            spare = {n: t for n, t in leaves.items() if id(t) not in taken and n not in own[module.training]}
            return found | spare

        hook(pair.candidate, alike)
        pair.outputs = Outputs({n: None for n, t in outputs.given.items() if t is None})
    return both
