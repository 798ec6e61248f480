"""Mistakes that one call of torch may hold: a term left out, an operand in another order, or another value.

They are mutation operators, as mutation testing has them, for numerical code. Those of ``SETTINGS`` are tried
wherever they can be; of those of ``OPERANDS`` there are too many, so that each needs a sign of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from driftlab.arithmetic.alterations import ALTERATIONS
from driftlab.arithmetic.torch_call import Call

# What was changed, in words, and what makes the result then.
Mutation = tuple[str, Callable[[], Any]]
Operator = Callable[[Call, Sequence[Tensor]], Iterator[Mutation]]
# An operand may be one of so many values of its shape, of those that were made before it the latest.
OTHERS = 16
_DRAWS = ("dropout", "rand", "randn", "randint", "bernoulli", "multinomial", "normal", "alpha_dropout")
_ALONG = ("sum", "mean", "softmax", "log_softmax", "amax", "amin", "logsumexp", "cumsum", "std", "var")
_BOTH_WAYS = ("add", "mul", "maximum", "minimum")
# These take any integers, or refuse those that are none of theirs. The kernel of a recurrent layer, given
# other lengths, writes where it may not.
_CHECKED = (
    *("add", "sub", "rsub", "mul", "floordiv", "floor_divide", "remainder", "mod", "clamp", "abs", "neg"),
    *("minimum", "maximum", "ge", "gt", "le", "lt", "eq", "ne", "and", "or", "xor", "invert", "bool"),
    *("logical_and", "logical_or", "logical_not", "where", "masked_fill", "getitem", "gather", "cumsum"),
    *("embedding", "index_select", "take_along_dim"),
)
# They give the numbers that they are given.
_MOVES = (
    *("view", "reshape", "transpose", "permute", "flatten", "unflatten", "squeeze", "unsqueeze", "movedim"),
    *("contiguous", "expand", "expand_as", "view_as", "to", "float", "double", "clone", "type_as", "detach"),
    *("t", "swapaxes", "broadcast_to", "repeat", "repeat_interleave"),
)


def numbered(call: Call) -> Callable[[float], Any] | None:
    """The call with the number that is written down in it times another; None where there is none."""
    found = call.number()
    if (
        found
        and found[1]
        and call.tensors
        and call.name in ("add", "sub", "rsub", "mul", "div", "rdiv", "pow")
    ):
        return lambda times: call.with_number(found[1] * times)
    if call.name == "scaled_dot_product_attention":
        own = (call.given() or {}).get("scale") or call.args[0].shape[-1] ** -0.5
        return lambda times: call.again(scale=own * times)
    return None


def mutations(call: Call, earlier: Sequence[Tensor], operator: Operator) -> Iterator[Mutation]:
    """Of a call that draws nothing and is more than another view.

    Args:
        earlier: the floating values that were made before.
    """
    if call.name not in (*_DRAWS, *_MOVES):
        yield from operator(call, earlier)


def _altered(call: Call, earlier: Sequence[Tensor]) -> Iterator[Mutation]:
    """A setting in which two writings often differ."""
    for alteration in ALTERATIONS:
        if alteration.concerns(call):
            yield alteration.words, lambda a=alteration: a.begun().change(call)


def _left_out(call: Call, earlier: Sequence[Tensor]) -> Iterator[Mutation]:
    """What goes in comes out; a number that is added is not."""
    if call.tensors and call.tensors[0].is_floating_point():
        yield f"`{call.name}` left out", lambda: call.tensors[0]


def _parts_exchanged(call: Call, earlier: Sequence[Tensor]) -> Iterator[Mutation]:
    """Gate and up, or query and key, in the other order."""
    if call.name in ("chunk", "split", "tensor_split", "unbind", "split_with_sizes"):
        parts = list(call.run())
        for i, j in combinations(range(len(parts)), 2) if len(parts) <= 4 else ():
            order = list(range(len(parts)))
            order[i], order[j] = j, i
            words = f"parts {i + 1} and {j + 1} of `{call.name}` exchanged"
            yield words, lambda order=tuple(order): tuple(call.run()[k] for k in order)


def _integers(call: Call, earlier: Sequence[Tensor]) -> Iterator[Mutation]:
    """Positions that are one off or of the other sign, a mask that is inverted or nowhere."""
    for place, tensor in enumerate(call.tensors if call.name in _CHECKED else ()):
        if tensor.dtype is torch.bool:
            yield _with(call, place, "inverted", ~tensor)
            yield _with(call, place, "that is false everywhere", torch.zeros_like(tensor))
        elif not tensor.is_floating_point() and not tensor.is_complex():
            yield _with(call, place, "negated", -tensor)
            yield _with(call, place, "one more", tensor + 1)
            yield _with(call, place, "one less", tensor - 1)


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


def _turned(call: Call, earlier: Sequence[Tensor]) -> Iterator[Mutation]:
    """Dimensions of one size exchanged, or the numbers along one in another order."""
    for place, tensor in enumerate(call.tensors):
        if not tensor.is_floating_point():
            continue
        for one, other in combinations(range(tensor.dim()), 2):
            if tensor.shape[one] == tensor.shape[other] > 1:
                words = f"with dimensions {one} and {other} exchanged"
                yield _with(call, place, words, tensor.transpose(one, other))
        for dim, size in enumerate(tensor.shape):
            if size > 1:
                yield _with(call, place, f"in reverse along dimension {dim}", tensor.flip(dim))
            if size > 2 and size % 2 == 0:
                words = f"with its halves along dimension {dim} exchanged"
                yield _with(call, place, words, tensor.roll(size // 2, dim))
    for (i, one), (j, other) in combinations(enumerate(call.tensors), 2):
        floating = one.is_floating_point() and other.is_floating_point()
        if floating and one.shape == other.shape and call.name not in _BOTH_WAYS:
            words = f"operands {i + 1} and {j + 1} of `{call.name}` exchanged"
            yield words, call.with_tensor(i, other).with_tensor(j, one).run


def _others(call: Call, earlier: Sequence[Tensor]) -> Iterator[Mutation]:
    """Another value for an operand."""
    for place, tensor in enumerate(call.tensors):
        alike = [t for t in earlier if t.shape == tensor.shape and t is not tensor]
        for other in alike[: -OTHERS - 1 : -1] if tensor.is_floating_point() else ():
            yield _with(call, place, "that is another value", other)


def _with(call: Call, place: int, words: str, tensor: Tensor) -> Mutation:
    which = f"operand {place + 1} of" if len(call.tensors) > 1 else "the operand of"
    return f"{which} `{call.name}` {words}", call.with_tensor(place, tensor).run


SETTINGS = (_altered, _integers, _parts_exchanged, _left_out, _dims)
OPERANDS = (_terms, _turned, _others)
