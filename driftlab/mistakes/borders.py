"""What stands behind the border: zeros, the last number, the mirror image, or what lies at the other end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch.nn.functional as F
from torch import Tensor

from driftlab.mistakes.orders import Mutation
from driftlab.mistakes.torch_call import Call

_WORDS = {
    "constant": "zeros",
    "replicate": "the last number over and over",
    "reflect": "the mirror image",
    "circular": "what lies at the other end",
}


def bordered(call: Call, earlier: Sequence[Tensor]) -> Iterator[Mutation]:
    """Another filling of ``pad``, which padding layers call, and convolutions with such borders."""
    if call.name != "pad" or not call.tensors or not call.tensors[0].is_floating_point():
        return
    x, pads, own = call.tensors[0], call.argument(1, "pad"), call.argument(2, "mode", "constant")
    for mode, words in _WORDS.items():
        if mode != own:
            yield f"{words} behind the border", lambda mode=mode: F.pad(x, pads, mode)
