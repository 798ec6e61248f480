"""Other sizes and other values for a module than those that its network happened to give it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from driftlab.arithmetic.passes import Recorded, own_inputs
from driftlab.network.calling import copied, each_tensor, named_leaves, seed_random_layers, tensors_in

FEW = 4  # samples: enough for the statistics of a batch, few enough to be quick


def batch_of(call: Recorded, size: int) -> Recorded | None:
    """The first ``size`` samples of a call; None where its tensors have no batch dimension in common."""
    return samples(call, slice(0, size))


def samples(call: Recorded, part: slice) -> Recorded | None:
    """Some samples of a call; None where its tensors have no batch dimension in common, or fewer samples."""
    lengths = {t.shape[0] for t in tensors_in((call.args, call.kwargs)) if t.dim()}
    if len(lengths) != 1 or next(iter(lengths)) < part.stop:
        return None
    return _mapped(call, lambda t: t[part] if t.dim() else t)


def fewer_samples(batch: tuple[object, object], size: int) -> tuple[object, object] | None:
    """The first ``size`` samples of inputs and targets; None where there are no more than that."""
    tensors = [t for t in tensors_in(batch) if t.dim()]
    return samples_of(batch, slice(0, size)) if tensors and tensors[0].shape[0] > size else None


def samples_of(batch: tuple[object, object], part: slice) -> tuple[object, object] | None:
    """Some samples of inputs and targets; None where they have no batch dimension in common, or fewer."""
    lengths = {t.shape[0] if t.dim() else 0 for t in tensors_in(batch)}
    if len(lengths) != 1 or next(iter(lengths)) < part.stop:
        return None
    return each_tensor(lambda t: t[part], batch)


def _mapped(call: Recorded, change: Callable[[Tensor], Tensor]) -> Recorded:
    def changed(tensor: Tensor) -> Tensor:
        return change(tensor.detach()).clone().requires_grad_(tensor.requires_grad)

    args, kwargs = each_tensor(changed, (call.args, call.kwargs))
    gradients = {n: None if g is None else change(g) for n, g in call.gradients.items()}
    return replace(call, args=args, kwargs=kwargs, gradients=gradients)


def with_gradients(module: nn.Module, call: Recorded, make: Callable[[Tensor], Tensor]) -> Recorded:
    """``call`` with output gradients ``make(output)`` in the shapes that ``module`` gives on it.

    Outputs that got none in ``call`` get none.
    """
    seed_random_layers(0)
    twin = copied(module)
    with torch.no_grad():
        args, kwargs = own_inputs(call)
        outputs = named_leaves(twin(*args, **kwargs))
    wanted = {n for n, g in call.gradients.items() if g is not None} or set(outputs)
    return replace(call, gradients={n: make(t).to(t) if n in wanted else None for n, t in outputs.items()})


def other_sizes(call: Recorded) -> Iterator[tuple[str, Recorded]]:
    """Calls of other sizes, named: batches of one and of three, odd and oblong images, shorter sequences.

    Many a module takes one or the other only; what the reference refuses says nothing.
    """
    for size, name in ((1, "a batch of one"), (3, "a batch of three")):
        if (fewer := batch_of(call, size)) is not None:
            yield name, fewer
    few = batch_of(call, min(FEW, _samples(call))) or call
    tensors = tensors_in((call.args, call.kwargs))
    dims = {t.dim() for t in tensors if t.is_floating_point()}
    if len(tensors) == 1 and dims & {3, 4, 5}:
        yield "odd sizes", _cut(few, 2, lambda n: n - 1 + n % 2)
        yield "sizes that are not equal", _cut(few, 2, lambda n: n - 1 + n % 2, last=2)
    if len(tensors) == 1 and dims == {3}:
        # what it gives may have one number a sample
        yield (
            "a shorter sequence",
            _mapped(few, lambda t: t[:, : max(1, t.shape[1] - 2)] if t.dim() > 1 else t),
        )


def _samples(call: Recorded) -> int:
    return min((t.shape[0] for t in tensors_in((call.args, call.kwargs)) if t.dim()), default=1)


def _cut(call: Recorded, start: int, size: Callable[[int], int], last: int = 0) -> Recorded:
    """The dimensions from ``start`` on cut to ``size(n)``, the last by ``last`` more."""

    def cut(tensor: Tensor) -> Tensor:
        for dim in range(start, tensor.dim()):
            less = last if dim == tensor.dim() - 1 else 0
            tensor = tensor.narrow(dim, 0, max(1, size(tensor.shape[dim]) - less))
        return tensor

    return _mapped(call, cut)


def other_values(call: Recorded) -> Iterator[tuple[str, Recorded]]:
    """Calls with other values, named: larger, of the other sign, moved; whole numbers stay as they are."""
    few = batch_of(call, min(FEW, _samples(call))) or call
    for inputs, change in _OTHERWISE.items():
        yield inputs, _values(few, lambda t, change=change: t if _counted(t) else change(t))


_OTHERWISE = {
    "inputs eight times as large": lambda t: 8 * t,
    "inputs of the other sign": lambda t: -t,
    "inputs moved up by two": lambda t: t + 2,
}


def _counted(tensor: Tensor) -> bool:
    """Whole numbers are labels, masks, counts: other ones may mean nothing."""
    return torch.equal(tensor, tensor.round())


def centred(call: Recorded) -> Recorded:
    """The call with inputs of mean zero and spread one."""
    return _values(call, lambda t: (t - t.mean()) / t.std(correction=0).clamp_min(1e-30))


def without_ties(call: Recorded) -> Recorded:
    """The call with a little noise on its inputs, so that no two entries are equal."""
    generator = torch.Generator().manual_seed(0)

    def jitter(tensor: Tensor) -> Tensor:
        noise = torch.randn(tensor.shape, generator=generator).to(tensor)
        return tensor + 1e-3 * tensor.std(correction=0) * noise

    return _values(call, jitter)


def zeros(call: Recorded) -> tuple[str, Recorded]:
    """Every other sample is zero. For the forward pass alone: kinks lie at zero, and ties."""
    few = batch_of(call, min(FEW, _samples(call))) or call

    def blank(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor[::2] = 0
        return tensor

    return "rows of zeros", _values(few, blank)


def _values(call: Recorded, change: Callable[[Tensor], Tensor]) -> Recorded:
    def changed(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.dim() == 0:
            return tensor
        return change(tensor.detach()).requires_grad_(tensor.requires_grad)

    args, kwargs = each_tensor(changed, (call.args, call.kwargs))
    return replace(call, args=args, kwargs=kwargs)
