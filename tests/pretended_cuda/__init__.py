"""A pretended CUDA device, to run on a machine without a GPU what would run on one.

Tensors say ``cuda:N`` and lie in the host's memory. As on a GPU, tensors of two devices do not mix,
``numpy()`` raises, dropout and attention are CUDA's own operations, and random numbers come from a state of
the GPU's own. What the host would wait for is counted, with its place. Numbers are the CPU's, bit for bit.

Not pretended: streams, rounding that differs from the CPU's or from run to run, memory that runs out,
cuDNN's recurrent networks and batch norm (the plain ones take their place), autocast, torch.compile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import SkipTest

import torch

from tests.pretended_cuda import kernels, seen
from tests.pretended_cuda.device import Device, Wait

__all__ = ["Device", "Wait", "pretended_cuda"]


@contextmanager
def pretended_cuda(gpus: int = 1, name: str = "Pretended GPU") -> Iterator[Device]:
    """Within it this process has ``gpus`` GPUs, in all of its threads; not one afterwards.

    Tensors that were made there are of no use outside.

    Raises:
        SkipTest: this torch does not know what CUDA's operations are.
    """
    if not torch.backends.cuda.is_built():
        raise SkipTest("a pretended GPU takes a torch that was built with CUDA, whose operations it has")
    device = Device(gpus, name)
    with kernels.in_place(device), seen.in_place(device):
        yield device
