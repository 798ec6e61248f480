"""A call of the library under watch: what it came to, and that nothing of the caller's was changed."""

import random

import numpy as np
import torch
from torch import nn

from driftlab import DiagnoseError
from driftlab.process.flags import settings
from tests.driftlab.hostile import FOREIGN


def of_the_process():
    """Random states, modes and defaults."""
    drawn = torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()
    defaults = torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()
    return drawn, modes, defaults, settings()


def parts(module):
    """It and all in it, whatever ``modules`` of its own may do."""
    yield module
    for child in module._modules.values():
        if child is not None:
            yield from parts(child)


def parameters(module):
    return [t for part in parts(module) for t in part._parameters.values() if t is not None]


def state(value):
    """Of a network (or a loss): modes, attributes, numbers, gradients; of anything else nothing."""
    if not isinstance(value, nn.Module):
        return None
    buffers = [t for part in parts(value) for t in part._buffers.values() if t is not None]
    tensors = [t for t in (*parameters(value), *buffers) if not nn.parameter.is_lazy(t)]
    return (
        [(part.training, sorted(vars(part))) for part in parts(value)],
        [(id(t), type(t), t.requires_grad, t.is_meta or t.detach().tolist()) for t in tensors],
        [None if t.grad is None else t.grad.tolist() for t in tensors],
    )


def around(call, given):
    """What the call came to; the test fails where it changed anything."""
    arguments = {name: make() for name, make in given.items()}
    for parameter in FOREIGN.parameters():
        parameter.grad = torch.ones_like(parameter)
    seen = [*arguments.values(), FOREIGN]
    before = repr([state(value) for value in seen])
    torch.manual_seed(7)
    process = of_the_process()
    try:
        return call(**arguments)
    except (DiagnoseError, AssertionError) as error:
        return error
    finally:
        assert repr([state(value) for value in seen]) == before
        assert of_the_process() == process


def line(found):
    assert isinstance(found, DiagnoseError), found
    assert "\n" not in str(found)
    return str(found)
