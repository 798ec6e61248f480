"""How many threads a call computes with, as far as driftlab chooses it.

Threads that wait for each other's share of a small sum cost more than they save, most of all where other
programs use the cores too: on two cores under a load of nine ``diagnose`` took 4.0 and 5.7 s with one thread
and 15.6 and 15.9 s with two on a perceptron of 57 parameters, 8 s and more than 150 s on a CNN of 800.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from driftlab.refusing import whole_number

# Of fewer elements torch gives no thread a share of its own (at::internal::GRAIN_SIZE).
GRAIN = 2**15


@contextmanager
def threads_for(batch: object, *networks: nn.Module, threads: int | None = None) -> Iterator[int]:
    """Inside, torch computes with the number that is yielded; with its former one afterwards.

    Args:
        threads: how many; None for one where no parameter and no tensor of the batch reaches ``GRAIN``
            elements, else for as many as torch has been using. Never chosen by timing: the number decides the
            order of sums.

    Raises:
        DiagnoseError: ``threads`` is no number of threads.
    """
    before = torch.get_num_threads()
    if threads is None:
        tensors = [t for t in pytree.tree_leaves(batch) if isinstance(t, Tensor)]
        tensors += [p for network in networks for p in network.parameters()]
        chosen = 1 if all(t.numel() < GRAIN for t in tensors) else before
    else:
        chosen = whole_number("threads", threads, 1, 1024)
    torch.set_num_threads(chosen)
    try:
        yield chosen
    finally:
        torch.set_num_threads(before)
