"""Mistakes that one call of torch may hold: a term left out, an operand in another order, or another value.

They are mutation operators, as mutation testing has them, for numerical code. Those of ``SETTINGS`` are tried
wherever they can be; of those of ``OPERANDS`` there are too many, so that each needs a sign of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from typing import Any

import torch
from torch import Tensor

from driftlab.mistakes.alterations import ALTERATIONS, FORMS, weighted
from driftlab.mistakes.borders import bordered
from driftlab.mistakes.dilations import dilated, turned_kernel
from driftlab.mistakes.norms import normed_otherwise
from driftlab.mistakes.orders import MOVES, ORDERS, Mutation, turnings
from driftlab.mistakes.pools import pooled_otherwise
from driftlab.mistakes.resized import resized_otherwise
from driftlab.mistakes.taken_parts import cut_elsewhere, parts_exchanged
from driftlab.mistakes.torch_call import Call

Operator = Callable[[Call, Sequence[Tensor]], Iterator[Mutation]]
# An operand may be one of so many values of its shape, of those that were made before it the latest.
OTHERS = 16
_DRAWS = ("dropout", "rand", "randn", "randint", "bernoulli", "multinomial", "normal", "alpha_dropout")
_ALONG = ("sum", "mean", "softmax", "log_softmax", "amax", "amin", "logsumexp", "cumsum", "std", "var")
_BOTH_WAYS = ("add", "mul", "maximum", "minimum")
JOINED = ("batch_norm", "group_norm")
_SUMS = ("add", "sub", "rsub", "lerp", "addcmul", "addmm", "baddbmm")
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
            yield _with(call, place, "inverted", ~tensor)
            yield _with(call, place, "that is false everywhere", torch.zeros_like(tensor))
        elif not tensor.is_floating_point() and not tensor.is_complex():
            yield _with(call, place, "negated", -tensor)
            yield _with(call, place, "one more", tensor + 1)
            yield _with(call, place, "one less", tensor - 1)


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


def _terms(call: Call, earlier: Sequence[Tensor]) -> Iterator[Mutation]:
    """An operand that is nothing, or has the other sign."""
    for place, tensor in enumerate(call.tensors):
        if tensor.is_floating_point():
            yield _with(call, place, "negated", -tensor)
            if len(call.tensors) > 1:
                yield _with(call, place, "left out", torch.zeros_like(tensor))


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


def _turned(call: Call, earlier: Sequence[Tensor]) -> Iterator[Mutation]:
    """An operand in another order."""
    for place, tensor in enumerate(call.tensors):
        for words, turned in turnings(tensor) if tensor.is_floating_point() else ():
            yield _with(call, place, words, turned)


def _exchanged(call: Call, earlier: Sequence[Tensor]) -> Iterator[Mutation]:
    """Two operands each in the other's place."""
    for (i, one), (j, other) in combinations(enumerate(call.tensors), 2):
        floating = one.is_floating_point() and other.is_floating_point()
        if floating and one.shape == other.shape and call.name not in _BOTH_WAYS:
            words = f"operands {i + 1} and {j + 1} of `{call.name}` exchanged"
            yield words, call.with_tensor(i, other).with_tensor(j, one).run


def _neutral(call: Call, earlier: Sequence[Tensor]) -> Iterator[Mutation]:
    """A term of a sum that is nothing, a factor that is one."""
    own = {"mul": (0, 1), "div": (1,)}.get(call.name, range(3) if call.name in _SUMS else ())
    made, word = (torch.zeros_like, "left out") if call.name in _SUMS else (torch.ones_like, "taken as one")
    for place, tensor in enumerate(call.tensors):
        if place in own and tensor.is_floating_point():
            yield _with(call, place, word, made(tensor))


def last_alike(tensor: Tensor, earlier: Sequence[Tensor]) -> list[int]:
    """Where the last others of its shape stand among those that were made before, from the last one back."""
    alike = [at for at, t in enumerate(earlier) if t.shape == tensor.shape and t is not tensor]
    return alike[: -OTHERS - 1 : -1]


@dataclass(frozen=True)
class Given:
    """The call with something else for one of its operands."""

    call: Call
    place: int
    value: Tensor

    def __call__(self) -> Any:
        return self.changed.run()

    @property
    def changed(self) -> Call:
        return self.call.with_tensor(self.place, self.value)

    @property
    def own(self) -> Tensor:
        """What stands there."""
        return self.call.tensors[self.place]


class Another(Given):
    """With another value, of those that were made before."""


def _others(call: Call, earlier: Sequence[Tensor]) -> Iterator[Mutation]:
    """Another value for an operand."""
    for place, tensor in enumerate(call.tensors):
        for at in last_alike(tensor, earlier) if tensor.is_floating_point() else ():
            words = f"{_which(call, place)} `{call.name}` that is another value"
            yield words, Another(call, place, earlier[at])


def _moved(call: Call, earlier: Sequence[Tensor]) -> Iterator[Mutation]:
    """Another value that is only moved: of all that its takers are given the first."""
    if call.name in MOVES:
        yield from _others(call, earlier)


def _activated(call: Call, earlier: Sequence[Tensor]) -> Iterator[Mutation]:
    """What a layer with a weight is given, or what it gives, through one more activation."""
    if weighted(call) is None:
        return
    for words in ("ReLU", "SiLU", "gelu"):
        yield _with(call, 0, f"through {words}", FORMS[words](call.tensors[0]))
        yield f"the result of `{call.name}` through {words}", lambda form=FORMS[words]: form(call.run())


def _normed_alone(call: Call, earlier: Sequence[Tensor]) -> Iterator[Mutation]:
    """Of a sum that is normed one term alone is, and the other added to that."""
    if not call.name.endswith("_norm") or not call.tensors:
        return
    x = call.tensors[0]
    for one, other in permutations([earlier[at] for at in last_alike(x, earlier)], 2):
        if torch.equal(one + other, x):
            words = f"a residual that `{call.name}` does not norm"
            yield words, lambda one=one, other=other: one + call.with_tensor(0, other).run()


def _with(call: Call, place: int, words: str, tensor: Tensor) -> Mutation:
    return f"{_which(call, place)} `{call.name}` {words}", Given(call, place, tensor)


def _which(call: Call, place: int) -> str:
    return f"operand {place + 1} of" if len(call.tensors) > 1 else "the operand of"


INDICES, ACTIVATED, TURNED = _integers, _activated, _turned
# Those of few calls first.
SETTINGS = (
    *(pooled_otherwise, resized_otherwise, _accumulated),
    *(_altered, _corrected, INDICES, parts_exchanged, _left_out, _dims),
    *(bordered, dilated, turned_kernel, normed_otherwise),
)
OPERANDS = (_exchanged, _terms, _turned, _others, _normed_alone, _activated, cut_elsewhere)
NEUTRAL, MOVED = (_neutral,), (_moved,)
