"""What the tests of shadow execution share: the same passes in float64 and in shadow."""

import copy

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from driftlab.arithmetic.shadow import held, shadow, shadow_arithmetic, shadowed


class Watching(TorchDispatchMode):
    """Lists in ``seen`` what a subclass sees of the operations under it."""

    def __init__(self):
        super().__init__()
        self.seen = []

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # to skip it, torch would import it first


class Calling(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def floating(values):
    return [t for t in pytree.tree_leaves(values) if isinstance(t, torch.Tensor) and not t.is_complex()]


def leaves(inputs, change):
    """The inputs in another arithmetic; floating ones want a gradient."""

    def leaf(tensor):
        new = change(tensor.detach().clone())
        return new.requires_grad_() if new.is_floating_point() else new

    return [leaf(t) for t in inputs]


def passes(module, inputs, seed=0):
    """Outputs, gradients of inputs and weights, and buffers, of a curved loss."""
    torch.manual_seed(seed)
    outputs = [o for o in floating(module(*inputs)) if o.is_floating_point()]
    wanted = [o for o in outputs if o.requires_grad]
    if wanted:
        sum(o.sin().sum() for o in wanted).backward()
    gradients = [t.grad for t in (*inputs, *module.parameters()) if t.grad is not None]
    return [*outputs, *gradients, *(b for b in module.buffers() if b.is_floating_point())]


def in_double(module, inputs, seed=0):
    """The network made ``double()``; what it makes on the way is float64 too."""
    torch.set_default_dtype(torch.float64)
    try:
        twin = copy.deepcopy(module).double()
        return passes(twin, leaves(inputs, lambda t: t.double() if t.is_floating_point() else t), seed)
    finally:
        torch.set_default_dtype(torch.float32)


def in_shadow(module, inputs, seed=0):
    twin, own = shadowed(module), leaves(inputs, shadow)
    with shadow_arithmetic():
        return passes(twin, own, seed)


def assert_equal_in_shadow(module, inputs, reference=None):
    """The shadow of ``module`` says float32 and holds what ``reference``, or itself, gives in float64."""
    wide, found = in_double(reference or module, inputs), in_shadow(module, inputs)
    assert len(wide) == len(found)
    for a, b in zip(wide, found, strict=True):
        assert (b.dtype, held(b).dtype) == (torch.float32, torch.float64)
        torch.testing.assert_close(held(b), a.detach(), rtol=1e-11, atol=1e-13)
