"""What a candidate counts over its training, for one that is made anew in the middle of it."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from driftlab.arithmetic.passes import Recorded, own_inputs
from driftlab.blame import not_ours
from driftlab.network.calling import copied

# So many calls in a row must move a number alike before it counts as a counter.
CALLS = 3
Key = tuple[str, str]  # the module's name, and that of its buffer or attribute


class Counters:
    """The numbers of a candidate that move by the same amount with every training call.

    Made anew at a later step, the candidate would begin to count again, and a fault that waits for its count
    would never show. ``advance`` puts such numbers where that many calls would have brought them.

    Args:
        candidate: as it is made at the first step.
        whole: a batch of the training. Sent back too: some code calls itself again in its backward pass.
    """

    def __init__(self, candidate: nn.Module, whole: Recorded):
        twin = copied(candidate)
        seen = [_numbers(twin)]
        try:
            for _ in range(CALLS):
                whole.send_back(twin, whole.called(twin, own_inputs(whole)))
                seen.append(_numbers(twin))
        except Exception as error:  # one that does not run counts nothing, and the look says why it does not
            not_ours(error)
            seen = seen[:1]
        self._begins, self._each = seen[0], {}
        for key, value in seen[0].items():
            moved = {later.get(key, value) - now.get(key, value) for now, later in pairwise(seen)}
            if len(moved) == 1 and (each := moved.pop()):
                self._each[key] = each

    def advance(self, candidate: nn.Module, calls: int) -> list[str]:
        """Sets the counters as after so many training calls; which. One that came along with the reference
        has left its first value, and stays."""
        found, modules = [], dict(candidate.named_modules())
        now = _numbers(candidate)
        for (name, attribute), each in self._each.items():
            begins = self._begins[name, attribute]
            if now.get((name, attribute)) == begins:
                _count_on(modules[name], attribute, each, calls)
                found.append(f"{name}.{attribute}" if name else attribute)
        return found


def _numbers(network: nn.Module) -> dict[Key, int | float]:
    """Whole numbers among the attributes, and buffers of one number."""
    found: dict[Key, int | float] = {}
    for name, module in network.named_modules():
        found |= {(name, a): v for a, v in vars(module).items() if type(v) is int}
        found |= {
            (name, b): t.item()
            for b, t in module.named_buffers(recurse=False)
            if t.numel() == 1 and not t.is_complex() and t.dtype is not torch.bool
        }
    return found


def _count_on(module: nn.Module, attribute: str, each: float, calls: int) -> None:
    """A whole number too large for its dtype overflows, a float sticks."""
    buffer = module._buffers.get(attribute)
    if not isinstance(buffer, Tensor):
        setattr(module, attribute, getattr(module, attribute) + each * calls)
    elif not buffer.is_floating_point():
        buffer.copy_(torch.tensor(int(buffer) + int(each) * calls).to(buffer.dtype))
    elif buffer.dtype.itemsize > 2:  # whole numbers up to 16 million
        buffer.add_(each * calls)
    else:
        for _ in range(calls):
            before = buffer.clone()
            if torch.equal(buffer.add_(each), before):
                break
