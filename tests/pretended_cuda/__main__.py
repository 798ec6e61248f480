"""A script on the pretended device, in this process and in the workers that it spawns.

    PRETENDED_GPUS=2 python -m tests.pretended_cuda train.py +experiment=split_conv seed=0..1

Afterwards a line says whether this process used a GPU, and what it waited for most.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

from tests.pretended_cuda import Device, pretended_cuda

SHOWN = 5


def gpus() -> int:
    return int(os.environ.get("PRETENDED_GPUS", "1"))


def told(device: Device) -> str:
    import torch

    used = "used" if torch.cuda.is_initialized() else "not used"
    most = Counter(device.waited).most_common(SHOWN)
    waits = "".join(f"\n  {count:>6} {wait.what}, {wait.place}" for wait, count in most)
    return f"pretended CUDA: {used} by this process, which waited {len(device.waited)} times{waits}"


def run(script: str) -> None:
    """As Python would, but that the workers' main module stays this one."""
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    code = compile(Path(script).read_text(), script, "exec")
    with pretended_cuda(gpus()) as device:
        try:
            exec(code, {"__name__": "__main__", "__file__": script})
        finally:
            print(told(device), file=sys.stderr)


if __name__ == "__mp_main__":  # a worker, whose device ends with it
    lasting = pretended_cuda(gpus())
    lasting.__enter__()
elif __name__ == "__main__":
    # spawned workers run the file that they are told of, and leave a package's __main__ aside
    __spec__ = None
    run(sys.argv[1])
