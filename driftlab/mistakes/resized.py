"""Maps resized, or sampled, otherwise: with aligned corners, by the nearest pixel, beyond another border."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from driftlab.mistakes.orders import Mutation
from driftlab.mistakes.torch_call import Call

_BY_AXES = {1: "linear", 2: "bilinear", 3: "trilinear"}
_BORDERS = ("zeros", "border", "reflection")


def resized_otherwise(call: Call, earlier: Sequence[Tensor]) -> Iterator[Mutation]:
    """Of ``interpolate`` and ``grid_sample``, with one setting of each that is another."""
    given = call.given() if call.function in (F.interpolate, F.grid_sample) else None
    for words, changed in _changes(call.name, given) if given else ():
        yield f"`{call.name}` {words}", partial(call.again, **changed)


def _changes(name: str, given: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    mode, corners = given["mode"], bool(given["align_corners"])
    smooth = name == "grid_sample" or mode.endswith(("linear", "cubic"))
    if smooth:
        words = "without aligned corners" if corners else "with aligned corners"
        yield words, {"align_corners": not corners}
    if name == "grid_sample":
        other = "nearest" if mode != "nearest" else "bilinear"
        yield f"by `{other}`", {"mode": other}
        for border in _BORDERS:
            if border != given["padding_mode"]:
                yield f"with the border `{border}`", {"padding_mode": border}
        return
    if mode != "nearest":
        yield "by `nearest`", {"mode": "nearest", "align_corners": None, "antialias": False}
    elif (linear := _BY_AXES.get(given["input"].dim() - 2)) is not None:
        for corners in (False, True):
            yield f"by `{linear}`{', corners aligned' * corners}", {"mode": linear, "align_corners": corners}
