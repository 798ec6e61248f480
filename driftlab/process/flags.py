"""The settings of the process by which sums are made: as they are, as a measurement needs them, and back.

torch has two ways of saying how wide float32 is multiplied, ``allow_tf32`` and ``fp32_precision``, and raises
when the older is read after the newer was set: what is read here never raises.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch

from driftlab.process import cuda_kernels

# A precision is set for an operation, for its backend, or for all; what is "none" takes the level above it.
_ALL, _BACKENDS = ("generic", "all"), (("cuda", "all"), ("mkldnn", "all"))
_OPERATIONS = tuple(product(("cuda", "mkldnn"), ("matmul", "conv", "rnn")))
# torch.backends sets each of them, but for one whose setter sets another (mkldnn.fp32_precision, torch 2.15).
_precision, _set_precision = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter

# What products of float32 keep of 24 bits.
BITS = {"tf32": 11, "bf16": 8}


def _attribute(owner: object, name: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    return partial(getattr, owner, name), partial(setattr, owner, name)


_cuda, _cudnn = torch.backends.cuda, torch.backends.cudnn
_SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    # as use_deterministic_algorithms(True, warn_only=True), which would import torch's compiler: 2.5 s
    "deterministic_debug_mode": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "fill_uninitialized_memory": _attribute(torch.utils.deterministic, "fill_uninitialized_memory"),
    "cudnn.benchmark": _attribute(_cudnn, "benchmark"),
    "cudnn.deterministic": _attribute(_cudnn, "deterministic"),
    "attention.math": (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    "attention.flash": (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    "attention.mem_efficient": (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    "attention.cudnn": (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
}
_SETTLED = {
    "deterministic_debug_mode": 1,  # warn
    # filling fresh memory with NaN shows reads of it, at the price of another pass over every tensor
    "fill_uninitialized_memory": False,
    "cudnn.benchmark": False,
    "cudnn.deterministic": True,
    # While deterministic algorithms only warn, the backward pass of all fused attention on a GPU sums in any
    # order (pytorch #101847); under "error" what has no deterministic algorithm would not run at all.
    "attention.math": True,
    "attention.mem_efficient": False,
    "attention.cudnn": False,
}
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def settings() -> dict[str, Any]:
    """As they hold now, by name; ``float32.<backend>.<operation>`` is "none", "ieee", "tf32" or "bf16"."""
    found = {name: get() for name, (get, _) in _SWITCHES.items()}
    return found | {f"float32.{b}.{o}": _precision(b, o) for b, o in _OPERATIONS}


@dataclass(frozen=True)
class Change:
    """One of the ``settings`` that somebody changed under a measurement."""

    name: str
    was: Any
    now: Any

    @property
    def bits(self) -> int | None:
        """What is left of 24 bits, where the change takes some of them."""
        bits = BITS.get(self.now, 24)
        return bits if bits < BITS.get(self.was, 24) else None

    def __str__(self) -> str:
        return f"{self.name} from {self.was} to {self.now}"


def changes(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    return [Change(name, was[name], now[name]) for name in was if was[name] != now[name]]


def settle(tf32: bool | None, cuda: bool) -> None:
    """Kernels that repeat themselves, and float32 in all its bits, or in TF32's.

    Args:
        tf32: None leaves float32 as it is.
        cuda: whether a GPU computes. A CPU's flash attention repeats itself, and stays.
    """
    os.environ.setdefault(_WORKSPACE, ":4096:8")  # cuBLAS reads it when it starts
    for name, value in _SETTLED.items():
        _SWITCHES[name][1](value)
    if cuda:
        _SWITCHES["attention.flash"][1](False)
        cuda_kernels.begin()
    if tf32 is None:
        return
    for place in (*_BACKENDS, *_OPERATIONS):
        _set_precision(*place, "none")
    _set_precision(*_ALL, "ieee")
    # the older settings last, so that both agree
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    _cudnn.allow_tf32 = tf32


def putting_back() -> Callable[[], None]:
    """What puts all settings back as they are now, to the level on which each is set."""
    workspace = os.environ.get(_WORKSPACE)
    switches = {name: get() for name, (get, _) in _SWITCHES.items()}
    put_precisions_back = _putting_precisions_back()

    def put_back() -> None:
        cuda_kernels.end()
        if workspace is None:
            os.environ.pop(_WORKSPACE, None)
        else:
            os.environ[_WORKSPACE] = workspace
        for name, value in switches.items():
            _SWITCHES[name][1](value)
        put_precisions_back()

    return put_back


def _putting_precisions_back() -> Callable[[], None]:
    precisions = {}
    for level in ((_ALL,), _BACKENDS, _OPERATIONS):  # below what is unset, each tells what itself is set to
        precisions |= {place: _precision(*place) for place in level}
        for place in level:
            _set_precision(*place, "none")
    matmul, cudnn = torch.get_float32_matmul_precision(), _older_cudnn()

    def put_back() -> None:
        torch.set_float32_matmul_precision(matmul)
        _cudnn.allow_tf32 = cudnn
        for place, precision in precisions.items():  # which the two lines above have set as well
            _set_precision(*place, precision)

    put_back()
    return put_back


def _older_cudnn() -> bool:
    """``cudnn.allow_tf32`` while no precision is set: torch then raises instead of saying that it is on."""
    try:
        return _cudnn.allow_tf32
    except RuntimeError:
        return True
