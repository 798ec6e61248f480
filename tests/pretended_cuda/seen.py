"""What Python sees of the device: ``torch.cuda``, and tensors and storages that say ``cuda:N``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest import mock

import torch
from torch import Tensor

from tests.pretended_cuda import autocast
from tests.pretended_cuda.device import Device
from tests.pretended_cuda.memory import LENT, gpu_of, lent, storage_on


@contextmanager
def in_place(device: Device) -> Iterator[None]:
    """Within it Python sees ``device``."""
    named = {torch.Tensor: _tensors(device), torch.UntypedStorage: _storages()}
    named |= {torch: _factories(device), torch.cuda: _cuda(device), torch._C: _bindings(device)}
    with ExitStack() as stack:
        for owner, attributes in named.items():
            for name, attribute in attributes.items():
                stack.enter_context(mock.patch.object(owner, name, attribute, create=True))
        yield


def _factories(device: Device) -> dict:
    """What asks for the driver, or for CUDA's own sort of tensor, before it asks for a kernel."""

    def lent_to(plain):
        def made(*args, **kwargs) -> Tensor:
            return plain(*args, **{name: device.lends(a) for name, a in kwargs.items()})

        return made

    made = {name: lent_to(getattr(torch, name)) for name in ("tensor", "as_tensor", "asarray")}
    return made | {"set_autocast_enabled": autocast.switch()}


def _tensors(device: Device) -> dict:
    plain_to, plain_numpy, plain_device = Tensor.to, Tensor.numpy, Tensor.device
    plain_wrapper = Tensor._make_wrapper_subclass

    def where(tensor: Tensor) -> torch.device:
        return _said(plain_device.__get__(tensor))

    def to(tensor: Tensor, *args, **kwargs) -> Tensor:
        args = [device.lends(a) for a in args]
        return plain_to(tensor, *args, **{name: device.lends(a) for name, a in kwargs.items()})

    def cuda(tensor: Tensor, index: object = None, non_blocking: bool = False, **kwargs) -> Tensor:
        wanted = torch.device("cuda") if index is None else index
        return to(tensor, wanted, non_blocking=non_blocking, **kwargs)

    def numpy(tensor: Tensor, *, force: bool = False):
        if tensor.is_cuda and not force:
            raise TypeError(
                f"can't convert {tensor.device} device type tensor to numpy. "
                "Use Tensor.cpu() to copy the tensor to host memory first."
            )
        return plain_numpy(tensor.detach().cpu() if tensor.is_cuda else tensor, force=force)

    def pin_memory(tensor: Tensor, *args) -> Tensor:
        if tensor.is_cuda:
            raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
        if tensor.is_pinned():
            return tensor
        pinned = tensor.clone()
        pinned.untyped_storage().pinned = True
        return pinned

    def new_tensor(tensor: Tensor, data: object, *, dtype=None, device=None, requires_grad=False) -> Tensor:
        rest = {"dtype": dtype or tensor.dtype, "device": device or tensor.device}
        return torch.tensor(data, **rest, requires_grad=requires_grad)

    def wrapper(cls: type, size, **kwargs) -> Tensor:
        return plain_wrapper(cls, size, **{name: device.lends(a) for name, a in kwargs.items()})

    return {
        "device": property(where),
        "is_cuda": property(lambda tensor: gpu_of(tensor) >= 0),
        "to": to,
        "cuda": cuda,
        "numpy": numpy,
        "new_tensor": new_tensor,
        "pin_memory": pin_memory,
        "is_pinned": lambda tensor, *args: getattr(tensor.untyped_storage(), "pinned", False),
        "_make_wrapper_subclass": staticmethod(wrapper),
    }


def _said(device: torch.device) -> torch.device:
    return torch.device("cuda", device.index) if device.type == LENT else device


def _storages() -> dict:
    plain_device, plain_clone = torch.UntypedStorage.device, torch.UntypedStorage.clone

    def clone(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        if not storage.is_cuda:
            return plain_clone(storage)
        return storage_on(lent(storage.device), plain_clone(storage.owner))

    return {
        "device": property(lambda storage: _said(plain_device.__get__(storage))),
        "is_cuda": property(lambda storage: storage.device.type == "cuda"),
        "clone": clone,
        "cpu": lambda storage: plain_clone(storage.owner) if storage.is_cuda else storage,
    }


def _cuda(device: Device) -> dict:
    """The state of the module, as before its first use, and what it asks of a driver."""
    properties = SimpleNamespace(
        **{"name": device.name, "major": 9, "minor": 0, "total_memory": 80 * 2**30},
        **{"multi_processor_count": 132, "is_integrated": False},
    )
    return {
        "_initialized": False,
        "_queued_calls": [],
        "_lazy_seed_tracker": torch.cuda._LazySeedTracker(),
        "default_generators": (),
        "_cached_device_count": None,
        "_device_count_nvml": lambda: -1,
        "_exchange_device": device.choose,
        "_maybe_exchange_device": device.choose,
        "_get_device_properties": lambda index: properties,
        "mem_get_info": lambda *args: (properties.total_memory, properties.total_memory),
    }


def _bindings(device: Device) -> dict:
    """The functions of torch's C++ that ask a driver."""

    def begin() -> None:
        torch.cuda.default_generators = tuple(torch.Generator() for _ in range(device.count()))

    nothing = ("emptyCache", "clearCublasWorkspaces", "resetPeakMemoryStats", "resetAccumulatedMemoryStats")
    return {
        "_cuda_init": begin,
        "_cuda_getDeviceCount": device.count,
        "_cuda_getDevice": device.current,
        "_cuda_setDevice": device.choose,
        "_cuda_exchangeDevice": device.choose,
        "_cuda_maybeExchangeDevice": device.choose,
        "_cuda_synchronize": lambda: device.waits("synchronize"),
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_accelerator_getDeviceIndex": device.current,
        "_accelerator_setDeviceIndex": device.choose,
        "_accelerator_getStream": lambda index: SimpleNamespace(is_capturing=lambda: False),
        "_accelerator_synchronizeDevice": lambda index: device.waits("synchronize"),
        "_cuda_memoryStats": lambda index: {},
        **{f"_cuda_{name}": lambda *args: None for name in nothing},
    }
