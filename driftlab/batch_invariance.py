"""Answers that do not depend on how many rows were asked about at once.

Libraries choose kernel and blocking by the shape of their operands, so a row's result in a batch of 63 is
summed in another order than in a batch of 1. A network that only ever sees one shape is computed in one
order: ``batch_invariant`` feeds it chunks of a fixed size, the last one filled up.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from driftlab.process import settled
from driftlab.refusing import check_dense, flattening, whole_number
from driftlab.words import DiagnoseError

# What may stand among the outputs beside tensors.
PLAIN = (str, bool, int, float, type(None))


class BatchInvariant(nn.Module):
    """``module`` in chunks of ``chunk`` rows, see ``batch_invariant``."""

    def __init__(self, module: nn.Module, chunk: int):
        super().__init__()
        self.module = module
        self.chunk = chunk
        self.training = module.training  # of its own: parts may be in another mode

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # its kernels are chosen once, under the settings of the program
            return self._in_chunks(*args, **kwargs)
        with settled(tf32=None):
            return self._in_chunks(*args, **kwargs)

    def _in_chunks(self, *args: Any, **kwargs: Any) -> Any:
        _refuse_interacting_rows(self.module)
        leaves, spec = _flattened("one of the inputs", (args, kwargs))
        rows = _batch_size(leaves)
        if rows == 0:  # there is no row to fill a chunk up with, and none whose answer could vary
            return self.module(*args, **kwargs)
        parts = [self._chunk(leaves, spec, start, rows) for start in range(0, rows, self.chunk)]
        joined = [_joined(pieces) for pieces in zip(*(part for part, _ in parts), strict=True)]
        return pytree.tree_unflatten(joined, parts[0][1])

    def _chunk(self, leaves: list[Any], spec: Any, start: int, rows: int) -> tuple[list[object], Any]:
        """The leaves of the outputs for the rows from ``start`` on, and how they are nested."""
        kept = min(self.chunk, rows - start)
        filled = [_filled(t, start, kept, self.chunk) if _is_batched(t) else t for t in leaves]
        args, kwargs = pytree.tree_unflatten(filled, spec)
        outputs, nesting = _flattened("an output", self.module(*args, **kwargs))
        return [self._cut(t, kept) for t in outputs], nesting

    def _cut(self, output: object, kept: int) -> object:
        if not isinstance(output, Tensor):
            return output
        check_dense("batch_invariant: an output", [output])
        if output.dim() == 0 or output.shape[0] != self.chunk:
            raise DiagnoseError(
                f"batch_invariant: an output of shape {tuple(output.shape)} has no row for each of the "
                f"{self.chunk} inputs; wrap the part of the network before the rows are joined"
            )
        return output[:kept]


def batch_invariant(module: nn.Module, chunk: int = 8) -> BatchInvariant:
    """``module`` made such that a row's output depends on that row and its place in its chunk alone.

    Any batch is cut into chunks of ``chunk`` rows, and the last one is filled up with copies of its last row:
    real inputs, since a row of zeros may be where a network divides by zero. The copies' outputs are dropped
    and no gradient flows through them. Each chunk is copied to memory of its own, in the default layout, for
    kernels may depend on strides and alignment too. With ``chunk=1`` the place does not matter either.

    It holds as long as device, library versions, number of threads and settings such as TF32 stay the same.
    Kernels that are chosen by timing, or that sum in any order, are off while it computes, whatever the
    program has set (compiled code has the program's settings). A module that mixes the rows of a batch by
    code of its own is not recognised; it would then mix those of a chunk.

    Args:
        module: in eval mode. Its inputs and outputs are tensors, or tuples, lists and dicts of them; the
            first dimension of each is the batch, [rows, ...]. Scalars and what is no tensor are handed on.
        chunk: rows of a chunk. Large ones are cheaper for large batches, small ones for small batches.

    Raises:
        DiagnoseError: a ValueError: ``chunk`` is below 1; ``module`` is no module, is in train mode, or has a
            norm that takes its statistics from the batch. Also when called: inputs of different lengths, an
            output without rows, an output that is no tensor and not the same for each chunk.
    """
    if not isinstance(module, nn.Module):
        raise DiagnoseError(f"batch_invariant: module is a {type(module).__name__}: give a torch.nn.Module")
    chunk = whole_number("batch_invariant: chunk", chunk, 1)
    _refuse_interacting_rows(module)
    return BatchInvariant(module, chunk)


def _refuse_interacting_rows(module: nn.Module) -> None:
    if module.training:
        raise DiagnoseError(
            "batch_invariant: the module is in train mode, where rows may interact; call module.eval()"
        )
    for name, part in module.named_modules():
        if isinstance(part, _BatchNorm) and (part.training or part.running_mean is None):
            raise DiagnoseError(
                f"batch_invariant: {name or 'the module'} ({type(part).__name__}) takes its statistics from "
                "the batch, so that rows interact; put it in eval mode with track_running_stats=True"
            )


def _flattened(name: str, values: object) -> tuple[list[Any], Any]:
    with flattening(f"batch_invariant: {name}", "tensors, or tuples, lists and dicts of them"):
        return pytree.tree_flatten(values)


def _is_batched(leaf: object) -> TypeGuard[Tensor]:
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def _batch_size(leaves: list[Any]) -> int:
    check_dense("batch_invariant: one of the inputs", [t for t in leaves if isinstance(t, Tensor)])
    lengths = sorted({t.shape[0] for t in leaves if _is_batched(t)})
    if len(lengths) != 1:
        found = "have no rows" if not lengths else f"have {' and '.join(map(str, lengths))} rows"
        raise DiagnoseError(f"batch_invariant: the inputs {found}; give tensors [rows, ...] of one length")
    return lengths[0]


def _filled(tensor: Tensor, start: int, kept: int, chunk: int) -> Tensor:
    """Rows ``start`` to ``start + kept``, and copies of the last of them up to ``chunk`` rows."""
    rows = tensor[start : start + kept]
    if kept < chunk:
        last = rows[-1:].detach()
        rows = torch.cat([rows, last.expand(chunk - kept, *last.shape[1:])])
    return rows.clone(memory_format=torch.contiguous_format)


def _joined(pieces: tuple[Any, ...]) -> object:
    """Of all chunks; what is no tensor may hold rows, unless it is plain and the same in each."""
    first = pieces[0]
    if isinstance(first, Tensor):
        return torch.cat(pieces)
    if not isinstance(first, PLAIN) or any(piece != first for piece in pieces):
        raise DiagnoseError(
            f"batch_invariant: an output of type {type(first).__name__} cannot be joined from chunks; return "
            "tensors, or tuples, lists and dicts of them"
        )
    return first
