"""What the cases are made of: a function with its weights, and the same with another function."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from bench.low_precision.case import Case

# (atol, rtol, where they stand) for bfloat16 and for float16. A project that has none for a type lends those
# of its other half type.
LIGER = "Liger-Kernel test/transformers/"
VLLM = "vLLM tests/kernels/"
TOLERANCES = {
    "liger rms": ((2e-1, 2e-2), (2e-1, 2e-2), LIGER + "test_rms_norm.py"),
    "liger layer norm": ((2e-2, 2e-2), (2e-2, 2e-2), LIGER + "test_layer_norm.py"),
    "liger swiglu": ((2e-1, 2e-2), (2e-1, 2e-2), LIGER + "test_swiglu.py"),
    "liger geglu": ((1e-2, 1e-2), (1e-2, 1e-2), LIGER + "test_geglu.py"),
    "liger rope": ((1e-1, 1e-5), (1e-2, 1e-5), LIGER + "test_rope.py"),
    "liger cross entropy": ((1e-2, 1e-2), (1e-2, 1e-2), LIGER + "test_cross_entropy.py"),
    "liger linear cross entropy": ((5e-3, 5e-2), (5e-3, 5e-2), LIGER + "test_fused_linear_cross_entropy.py"),
    "liger jsd": ((1e-3, 1e-3), (1e-3, 1e-3), LIGER + "test_jsd.py"),
    "vllm layer norm": ((1e-2, 1e-2), (1e-2, 1e-2), VLLM + "core/test_layernorm.py"),
    "vllm": ((1e-3, 1.6e-2), (1e-3, 1e-3), VLLM + "allclose_default.py"),
    "apex": ((3e-3, 1.6e-2), (3e-3, 1.6e-2), "Apex tests/L0/run_fused_layer_norm/test_fused_layer_norm.py"),
    "xformers": ((7e-1, 1e-1), (9.5e-2, 2e-2), "xFormers ops/fmha/cutlass.py, backward"),
    "mamba": ((5e-2, 3e-2), (5e-3, 3e-3), "Mamba tests/ops/test_selective_scan.py"),
    "ssd": ((3e-3, 1e-2), (3e-3, 1e-2), "Mamba tests/ops/triton/test_ssd.py"),
    "gated norm": ((8e-3, 1e-2), (8e-3, 1e-2), "Mamba tests/ops/triton/test_layernorm_gated.py"),
    "causal conv": ((5e-2, 1e-2), (5e-3, 3e-3), "causal-conv1d tests/test_causal_conv1d.py"),
    "torch": ((1e-5, 1.6e-2), (1e-5, 1e-3), "torch.testing.assert_close, defaults"),
}


class Op(nn.Module):
    """A function of the inputs and of trained weights, which it takes by name."""

    def __init__(self, fn: Callable, **weights: Tensor) -> None:
        super().__init__()
        self.fn = fn
        for name, value in weights.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.fn(*inputs, **dict(self.named_parameters(recurse=False)))


def swap(fn: Callable) -> Callable[[nn.Module], nn.Module]:
    """The candidate is a copy of the reference whose one ``Op`` has this function."""

    def build(reference: nn.Module) -> nn.Module:
        new = copy.deepcopy(reference)
        [op] = [m for m in new.modules() if isinstance(m, Op)]
        op.fn = fn
        return new

    return build


def like(cls: type[nn.Module], at: str = "", **attributes: object) -> Callable[[nn.Module], nn.Module]:
    """The candidate is a copy whose module ``at`` is of this class, with these attributes."""

    def build(reference: nn.Module) -> nn.Module:
        new = copy.deepcopy(reference)
        module = new.get_submodule(at)
        module.__class__ = cls
        for name, value in attributes.items():
            setattr(module, name, value)
        return new

    return build


def behind(d_in: int, d_out: int, op: nn.Module) -> nn.Module:
    """Behind a linear layer, whose output autocast makes half."""
    return nn.Sequential(nn.Linear(d_in, d_out), op)


def wide(x: Tensor) -> Tensor:
    """At least float32, as kernels load their operands."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def plain() -> torch.autocast:
    """Autocast is off inside."""
    return torch.autocast("cpu", enabled=False)


def gain(n: int) -> Tensor:
    return 1 + 0.1 * torch.randn(n)


def matrix(out: int, into: int) -> Tensor:
    return torch.randn(out, into) * into**-0.5


def normal(*shape: int, std: float = 1.0, mean: float = 0.0) -> Callable[[], Tensor]:
    return lambda: mean + std * torch.randn(*shape)


def group(file: str, kind: str) -> Callable[..., Case]:
    """``pair`` of one file and one kind of kernel."""

    def pair(
        name: str,
        precision: str,
        label: str,
        reference: Callable[[], nn.Module],
        candidate: Callable[[nn.Module], nn.Module],
        inputs: Callable[[], object],
        tolerance: str,
        factor: float | None = None,
    ) -> Case:
        def make() -> tuple[nn.Module, nn.Module, object]:
            torch.manual_seed(zlib.crc32(name.encode()))
            model = reference()
            return model, candidate(model), inputs()

        *values, source = TOLERANCES[tolerance]
        atol, rtol = values[not precision.startswith("bf16")]
        held_out = file.rsplit(".", 1)[-1].startswith("held_out_")
        return Case(name, kind, precision, label, make, atol, rtol, source, held_out, factor)

    return pair
