"""Tensors in safetensors' format, written straight from the memory that they lie in.

The library's own ``save`` holds the whole file a second time, and its ``save_file`` hides the error of the
disk and what it leaves when it is killed. The format is eight bytes with the length of a JSON header, the
header, the bytes of the tensors (github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from driftlab.record.files import write_pieces

_NAMES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"},
    **{torch.bool: "BOOL", torch.complex64: "C64"},
}


def as_bytes(tensor: Tensor) -> memoryview:
    """What a contiguous CPU tensor holds; no copy."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Contiguous CPU tensors, which may share memory, in one file: the old one or the new, never a part.

    Raises:
        OSError: the disk is full, say; ``filename`` is ``path``.
        TypeError: the format has no name for the dtype of a tensor.
    """
    # the widest first, so that each begins at a multiple of its width
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))
    write_pieces(path, [_header(ordered, metadata), *map(as_bytes, ordered.values())])


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise TypeError(f"{name} is {tensor.dtype}, which a checkpoint cannot hold")
        begin, end = end, end + tensor.nbytes
        entries[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
