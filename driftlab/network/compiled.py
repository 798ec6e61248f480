"""What ``torch.compile`` made of a network: whether it has a part in it, and how a copy stays compiled.

A deep copy of torch's own loses what was compiled in place, keeps a compiled method of the first network, and
takes a copy of the backend, for which everything is compiled anew.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from driftlab.words import DiagnoseError

# How often one piece of code may be compiled in here: for each dtype, mode and size that is asked about.
OFTEN = 4096


class DispatchMode(TorchDispatchMode):
    """Beneath which the compiler is not skipped: to skip it, torch would import it first, two seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def eager() -> AbstractContextManager[Any]:
    """Inside, what ``torch.compile`` made runs as it was written."""
    compiled = "torch._dynamo" in sys.modules  # which takes seconds to import, and nobody compiled without it
    return torch.compiler.set_stance("force_eager") if compiled else ExitStack()


@contextmanager
def compiling(reset: Callable[[], bool]) -> Iterator[None]:
    """Inside, code is compiled as often as it takes, and draws the random numbers of eager code where it can.

    torch gives up on code that it has compiled eight times, for good, and goes on eagerly; a log alone says
    so. ``torch.compiler.reset`` makes it forget.

    Args:
        reset: asked at the end whether anything was compiled, which then must not count afterwards.
    """
    with ExitStack() as stack:
        if (dynamo := sys.modules.get("torch._dynamo.config")) is not None:
            stack.enter_context(dynamo.patch(recompile_limit=OFTEN, accumulated_recompile_limit=OFTEN))
        if (inductor := sys.modules.get("torch._inductor.config")) is not None:
            stack.enter_context(inductor.patch(fallback_random=True))
        try:
            yield
        finally:
            if reset():
                torch.compiler.reset()


def compiled_parts(network: nn.Module) -> list[str]:
    """The outermost modules that ``torch.compile`` made, was called on, or made a function of."""
    found = [name for name, module in network.named_modules() if _is_compiled(module)]
    return [n for n in found if not any(o != n and (not o or n.startswith(f"{o}.")) for o in found)]


def is_scripted(network: nn.Module) -> bool:
    """Whether TorchScript has a part in it."""
    return any(isinstance(m, torch.jit.ScriptModule) for m in network.modules())


def _is_compiled(module: nn.Module) -> bool:
    in_place = getattr(module, "_compiled_call_impl", None) is not None
    return in_place or "_orig_mod" in module._modules or any(_wrappers(module))


def comes_by_compiled(call: Callable[[], object]) -> bool:
    """Whether ``call`` comes by anything compiled: functions of a module's file, a closure's.

    Whatever is compiled there is compiled for a backend that nobody has seen before.
    """
    if "torch._dynamo" not in sys.modules:
        return False
    met: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list) -> Callable:
        met.append(graph)
        return graph.forward

    with torch.compiler.set_stance("default", force_backend=backend):
        call()
    return bool(met)


def backends(network: nn.Module) -> dict[int, object]:
    """What a deep copy shares with ``network``, by id: torch compiles anew for each backend."""
    contexts = (vars(m).get("dynamo_ctx") for m in network.modules())
    return {id(context): context for context in contexts if context is not None}


def carry_compiled(network: nn.Module, twin: nn.Module) -> None:
    """What was compiled of ``network`` in place, or as a method, is compiled of its copy ``twin``."""
    if not compiled_parts(network):
        return
    new = {id(own): other for own, other in zip(network.modules(), twin.modules(), strict=True)}
    for own in network.modules():
        other = new[id(own)]
        if (call := getattr(own, "_compiled_call_impl", None)) is not None:
            other._compiled_call_impl = _compiled_as(call, other._call_impl)
        for name, wrapper in _wrappers(own):
            method = wrapper._torchdynamo_orig_callable
            if id(getattr(method, "__self__", None)) in new:
                bound = types.MethodType(method.__func__, new[id(method.__self__)])
                setattr(other, name, _compiled_as(wrapper, bound))


def _wrappers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        own = name not in ("forward", "_forward") or "_orig_mod" not in module._modules
        compiled = isinstance(value, types.FunctionType) and "_torchdynamo_orig_callable" in vars(value)
        if own and compiled and name != "_compiled_call_impl":
            yield name, value


def _compiled_as(wrapper: Callable, function: Callable) -> Callable:
    """``function`` compiled as ``wrapper`` was; torch keeps how it was in the wrapper alone."""
    context = inspect.getclosurevars(wrapper).nonlocals.get("self")
    if context is None:
        raise DiagnoseError(
            "a module compiled in place cannot be copied with this torch: hand over torch.compile(module)"
        )
    return context(function)
