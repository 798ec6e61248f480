"""The state of a lockstep run in one safetensors file, from which it goes on bit for bit.

Tensors (weights, buffers, optimizer state) are stored as they are; what is no tensor (learning rates,
step counts, scheduler state) is JSON in the header. One file, replaced in one rename: a crash leaves
the old state or the new. Loading executes no code.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from driftlab.arm import Arm
from driftlab.lockstep import Lockstep
from driftlab.records import RecordError, write_whole

NAME = "state.safetensors"


def save_checkpoint(lockstep: Lockstep, next_step: int, folder: Path) -> None:
    """Store every arm as it stands before step ``next_step``."""
    tensors: dict[str, Tensor] = {}
    header: dict = {"next_step": next_step, "arms": {}}
    for arm in lockstep.arms:
        rest: dict = {"blown_up_at": arm.blown_up_at}
        rest["optimizer"] = _take_apart(arm.optimizer.state_dict(), f"{arm.name}/optimizer", tensors)
        if arm.scheduler is not None:
            rest["scheduler"] = _take_apart(arm.scheduler.state_dict(), f"{arm.name}/scheduler", tensors)
        _take_apart(arm.module.state_dict(), f"{arm.name}/module", tensors)
        header["arms"][arm.name] = rest
    # safetensors refuses tensors that share memory, so each is stored as its own copy
    stored = {name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()}
    write_whole(folder / NAME, save(stored, {"driftlab": json.dumps(header)}))


def load_checkpoint(lockstep: Lockstep, folder: Path) -> int | None:
    """Put every arm back and return the step to go on with; None where there is no checkpoint.

    Raises:
        RecordError: where the file is damaged or belongs to other arms. The arms may then be half
            restored: make them anew.
    """
    path = folder / NAME
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads(file.metadata()["driftlab"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        if list(header["arms"]) != [arm.name for arm in lockstep.arms]:
            raise RecordError(
                f"{path} holds the arms {', '.join(header['arms'])}, not those of this experiment"
            )
        for arm in lockstep.arms:
            _restore(arm, header["arms"][arm.name], tensors)
        return int(header["next_step"])
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, RecordError):
            raise
        raise RecordError(f"{path} is damaged: {str(error).splitlines()[0]}") from None


def _restore(arm: Arm, rest: dict, tensors: dict[str, Tensor]) -> None:
    prefix = f"{arm.name}/module/"
    state = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    arm.module.load_state_dict(state)
    arm.optimizer.load_state_dict(_put_together(rest["optimizer"], tensors))
    if arm.scheduler is not None:
        arm.scheduler.load_state_dict(_put_together(rest["scheduler"], tensors))
    arm.blown_up_at = rest["blown_up_at"]


def _take_apart(value: object, path: str, tensors: dict[str, Tensor]) -> object:
    """The JSON skeleton of a nested state; its tensors go into ``tensors`` under their paths."""
    if isinstance(value, Tensor):
        tensors[path] = value
        return {"tensor": path}
    if isinstance(value, dict):
        return {"dict": [[k, _take_apart(v, f"{path}/{k}", tensors)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        return {"list": [_take_apart(v, f"{path}/{i}", tensors) for i, v in enumerate(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise TypeError(f"{path} is a {type(value).__name__}, which a checkpoint cannot hold")


def _put_together(skeleton: dict, tensors: dict[str, Tensor]) -> object:
    (kind, value), *_ = skeleton.items()
    if kind == "tensor":
        # a fresh, aligned copy: the stored bytes may start at any address, and kernels sum in another
        # order where the alignment differs
        return tensors[value].clone(memory_format=torch.contiguous_format)
    if kind == "dict":
        return {k: _put_together(v, tensors) for k, v in value}
    if kind == "list":
        return [_put_together(v, tensors) for v in value]
    return value
