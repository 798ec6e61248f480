"""Tensors that lie on the device: plain ``torch.Tensor``, whose kernels are CUDA's, in memory of the host.

To torch's C++ they lie on the *lazy* device, which nobody else uses: autograd asks a CUDA device for streams
of a driver, and a lazy one for nothing. To Python they lie on ``cuda:N`` (``device.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor

LENT = "lazy"


def lent(device: torch.device | int) -> torch.device:
    """Where ``cuda:N`` is in C++."""
    return torch.device(LENT, device if isinstance(device, int) else device.index or 0)


def gpu_of(leaf: object) -> int:
    """The index of the GPU that a tensor lies on; -1 for one of the host, and for anything else."""
    return _index(leaf) if isinstance(leaf, Tensor) else -1


_index = torch._C.TensorBase.get_device  # of the lent device, whatever Python sees


def storage_on(device: torch.device, owner: torch.UntypedStorage) -> torch.UntypedStorage:
    """The bytes of ``owner``, a storage of the host, on ``device``; they live as long as what is returned.

    Its ``host`` is the same bytes for the CPU's kernels, which cannot move them.
    """
    start, size = owner.data_ptr(), owner.nbytes()
    storage = torch._C._construct_storage_from_data_pointer(start, device, size)
    storage.owner = owner
    storage.host = torch._C._construct_storage_from_data_pointer(start, torch.device("cpu"), size)
    return storage


def on_device(device: torch.device, made: Tensor) -> Tensor:
    """What a CPU kernel made, as a tensor of ``device``; no copy."""
    return within(storage_on(device, made.untyped_storage()), made)


def within(storage: torch.UntypedStorage, made: Tensor) -> Tensor:
    """A tensor of ``storage``, laid out as ``made``."""
    layout = {"size": made.size(), "stride": made.stride(), "storage_offset": made.storage_offset()}
    rest = {"dtype": made.dtype, "device": storage.device, "nbytes": storage.nbytes()}
    return torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(layout | rest, storage)


def on_host(tensor: Tensor) -> Tensor:
    """A tensor of the device as the CPU's kernels see it; no copy."""
    place = tensor.storage_offset(), tensor.size(), tensor.stride()
    seen = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage().host, *place)
    if tensor.is_conj():
        seen = seen.conj()
    return torch._neg_view(seen) if tensor.is_neg() else seen
