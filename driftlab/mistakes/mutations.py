"""Mistakes that one call of torch may hold: another setting, a call left out, integers that are one off.

They are mutation operators, as mutation testing has them, for numerical code. Those of ``SETTINGS`` are tried
wherever they can be; of those of ``operands.OPERANDS`` there are too many, so that each needs a sign of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from driftlab.mistakes.alterations import ALTERATIONS
from driftlab.mistakes.borders import bordered
from driftlab.mistakes.dilations import dilated, turned_kernel
from driftlab.mistakes.norms import normed_otherwise
from driftlab.mistakes.operands import MOVED, with_operand
from driftlab.mistakes.orders import MOVES, ORDERS, Mutation, moved_on
from driftlab.mistakes.pools import pooled_otherwise
from driftlab.mistakes.resized import resized_otherwise
from driftlab.mistakes.taken_parts import parts_exchanged
from driftlab.mistakes.torch_call import Call

Operator = Callable[[Call, Sequence[Tensor]], Iterator[Mutation]]
_DRAWS = ("dropout", "rand", "randn", "randint", "bernoulli", "multinomial", "normal", "alpha_dropout")
_ALONG = ("sum", "mean", "softmax", "log_softmax", "amax", "amin", "logsumexp", "cumsum", "std", "var")
JOINED = ("batch_norm", "group_norm")
# These take any integers, or refuse those that are none of theirs. The kernel of a recurrent layer, given
# other lengths, writes where it may not.
_CHECKED = (
    *("add", "sub", "rsub", "mul", "div", "floordiv", "floor_divide", "remainder", "mod", "clamp", "abs"),
    *("neg", "minimum", "maximum", "ge", "gt", "le", "lt", "eq", "ne", "and", "or", "xor", "invert", "bool"),
    *("logical_and", "logical_or", "logical_not", "where", "masked_fill", "getitem", "gather", "cumsum"),
    *("embedding", "index_select", "take_along_dim", "index_add", "scatter", "scatter_add", "scatter_reduce"),
)


def numbered(call: Call) -> Callable[[float], Any] | None:
    """The call with the number that is written down in it times another; None where there is none."""
    found = call.number()
    if (
        found
        and found[1]
        and call.tensors
        and call.name in ("add", "sub", "rsub", "mul", "div", "rdiv", "pow", "rpow")
    ):
        return lambda times: call.with_number(found[1] * times)
    if call.name == "scaled_dot_product_attention":
        own = (call.given() or {}).get("scale") or call.args[0].shape[-1] ** -0.5
        return lambda times: call.again(scale=own * times)
    return None


def averaged(call: Call) -> Callable[[float], Any] | None:
    """A division by counts, with the largest times a number as everybody's; None of any other call."""
    counts = call.tensors[1] if call.name == "div" and len(call.tensors) == 2 else None
    if counts is None or counts.numel() < 2 or counts.is_complex():
        return None
    most = counts.max()
    if not bool((counts == counts.round()).all()) or most < 2 or bool((counts == most).all()):
        return None
    return lambda times: call.with_tensor(1, (most * times).expand_as(counts)).run()


def normed_together(calls: Mapping[int, Call]) -> dict[int, Tensor] | None:
    """What calls of one norm by the batch's or a group's statistics give where these are of all of them.

    None where it is no such norm, or is called once.
    """
    if len(calls) < 2 or any(call.name not in JOINED for call in calls.values()):
        return None
    given = [call.argument(0, "input") for call in calls.values()]
    by_batch = next(iter(calls.values())).name == "batch_norm"
    rows = [x.movedim(1, 0).flatten(1)[None] if by_batch else x.flatten(2) for x in given]
    try:
        joined = next(iter(calls.values())).with_tensor(0, torch.cat(rows, 2)).run()
    except Exception:  # not of one batch, or in eval mode
        return None
    made = zip(calls, given, joined.split([row.shape[2] for row in rows], 2), strict=True)
    if not by_batch:
        return {number: part.reshape(x.shape) for number, x, part in made}
    return {n: part[0].unflatten(1, x.movedim(1, 0).shape[1:]).movedim(0, 1) for n, x, part in made}


def mutations(call: Call, earlier: Sequence[Tensor], operator: Operator) -> Iterator[Mutation]:
    """Of a call that draws nothing; of one that is but another view, another order.

    Args:
        earlier: the floating values that were made before.
    """
    of_moves = operator in (*ORDERS, *MOVED)
    if operator is _altered or (call.name not in _DRAWS and (call.name not in MOVES or of_moves)):
        yield from operator(call, earlier)


def _altered(call: Call, earlier: Sequence[Tensor]) -> Iterator[Mutation]:
    """A setting in which two writings often differ."""
    for alteration in ALTERATIONS:
        if alteration.concerns(call):
            yield alteration.words, lambda a=alteration: a.begun().change(call)


def _left_out(call: Call, earlier: Sequence[Tensor]) -> Iterator[Mutation]:
    """What goes in comes out; a number that is added is not."""
    if (place := call.goes_on_with) is not None:
        yield f"`{call.name}` left out", lambda: call.tensors[place]


def checks_integers(call: Call) -> bool:
    return call.name in _CHECKED


def _integers(call: Call, earlier: Sequence[Tensor]) -> Iterator[Mutation]:
    """Positions that are one off or of the other sign, a mask that is inverted or nowhere."""
    for place, tensor in enumerate(call.tensors if checks_integers(call) else ()):
        if tensor.dtype is torch.bool:
            yield with_operand(call, place, "inverted", ~tensor)
            yield with_operand(call, place, "that is false everywhere", torch.zeros_like(tensor))
            for words, moved in moved_on(tensor):
                yield with_operand(call, place, words, moved)
        elif not tensor.is_floating_point() and not tensor.is_complex():
            yield with_operand(call, place, "negated", -tensor)
            yield with_operand(call, place, "one more", tensor + 1)
            yield with_operand(call, place, "one less", tensor - 1)


def _corrected(call: Call, earlier: Sequence[Tensor]) -> Iterator[Mutation]:
    """A variance, or a mean of squares, over n - 1 in place of n, or the other way round."""
    if call.name not in ("var", "std", "var_mean", "std_mean", "mean") or not call.tensors:
        return
    found = call.run()
    out, *rest = found if isinstance(found, tuple) else (found,)
    n = call.tensors[0].numel() / max(1, out.numel())
    power = 0.5 if call.name.startswith("std") else 1.0
    for words, factor in (("n - 1, not n", n / (n - 1)), ("n, not n - 1", (n - 1) / n)) if n > 1 else ():
        made = out * factor**power
        yield f"`{call.name}` over {words}", lambda made=made: (made, *rest) if rest else made


def _dims(call: Call, earlier: Sequence[Tensor]) -> Iterator[Mutation]:
    """A sum, a mean, a softmax along another dimension."""
    for dim in range(call.tensors[0].dim()) if call.name in _ALONG and call.tensors else ():
        yield f"`{call.name}` along dimension {dim}", lambda dim=dim: call.with_argument(1, "dim", dim)


def _accumulated(call: Call, earlier: Sequence[Tensor]) -> Iterator[Mutation]:
    """A running sum that leaves out what it has come to, or where it begins; or that begins at the end."""
    if call.name != "cumsum" or not call.tensors or not call.tensors[0].is_floating_point():
        return
    x, out, dim = call.tensors[0], call.run(), call.argument(1, "dim")
    yield "`cumsum` up to what comes before", lambda: out - x
    yield "`cumsum` without the first", lambda: out - x.narrow(dim, 0, 1)
    yield "`cumsum` from the end", lambda: call.with_tensor(0, x.flip(dim)).run().flip(dim)


INDICES = _integers
# Those of few calls first.
SETTINGS = (
    *(pooled_otherwise, resized_otherwise, _accumulated),
    *(_altered, _corrected, INDICES, parts_exchanged, _left_out, _dims),
    *(bordered, dilated, turned_kernel, normed_otherwise),
)
