"""Errors: whose they are, and which of them are nobody's fault but the machine's."""

import pytest
import torch

from driftlab.blame import is_ours, is_out_of_memory

NO_MEMORY = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
]


@pytest.mark.parametrize("error", NO_MEMORY, ids=lambda e: str(e)[:40])
def test_every_way_of_running_out_of_memory_is_known(error):
    assert is_out_of_memory(error)
    assert not is_ours(error)


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        ValueError("out of memory"),
    ],
    ids=lambda e: str(e)[:40],
)
def test_other_errors_are_not_for_want_of_memory(error):
    assert not is_out_of_memory(error)
