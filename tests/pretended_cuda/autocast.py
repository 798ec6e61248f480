"""What stands in for ``torch.autocast`` on the device, whose tensors have no such key in C++.

By the names of functions, from CUDA's own lists ("Autocast Op Reference" in torch's documentation). What
casts inside of a function that is written in Python, as attention by several heads, is not reached.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

_CONVS = {f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)}
TO_16_BITS = _CONVS | {
    *(
        "linear",
        "bilinear",
        "matmul",
        "__matmul__",
        "__rmatmul__",
        "mm",
        "bmm",
        "mv",
        "addmm",
        "addmv",
        "addr",
    ),
    *("addbmm", "baddbmm", "einsum", "prelu", "chain_matmul", "scaled_dot_product_attention"),
}
TO_FLOAT32 = {
    *("softmax", "log_softmax", "softmin", "layer_norm", "group_norm", "normalize", "norm", "dist", "cdist"),
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "renorm"),
    *("binary_cross_entropy_with_logits", "soft_margin_loss", "cosine_similarity", "cosine_embedding_loss"),
    *("exp", "expm1", "log", "log10", "log1p", "log2", "pow", "__pow__", "__rpow__", "reciprocal", "rsqrt"),
    *(
        "sum",
        "prod",
        "cumsum",
        "cumprod",
        "sinh",
        "cosh",
        "tan",
        "acos",
        "asin",
        "erfinv",
        "softplus",
        "logsumexp",
    ),
}
_FEW = (torch.float16, torch.bfloat16)


class Autocast(TorchFunctionMode):
    """Within it the device's tensors are cast for ``TO_16_BITS`` and ``TO_FLOAT32``, but for float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in TO_16_BITS:
            args, kwargs = _cast(
                (args, kwargs or {}), (torch.float32, *_FEW), torch.get_autocast_dtype("cuda")
            )
        elif name in TO_FLOAT32:
            args, kwargs = _cast((args, kwargs or {}), _FEW, torch.float32)
        return func(*args, **(kwargs or {}))


def _cast(values: tuple, of: tuple[torch.dtype, ...], dtype: torch.dtype) -> tuple:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.dtype in of and tensor.is_cuda else tensor

    return pytree.tree_map_only(Tensor, cast, values)


def switch() -> object:
    """``torch.set_autocast_enabled`` for the device: the mode goes on and off with it."""
    plain, inside = torch.set_autocast_enabled, []

    def set_autocast_enabled(kind: str, enabled: bool) -> None:
        if kind == "cuda" and enabled != bool(inside):
            if enabled:
                inside.append(Autocast())
                inside[-1].__enter__()
            else:
                inside.pop().__exit__(None, None, None)
        plain(kind, enabled)

    return set_autocast_enabled
