"""Stands in for Python where there is a GPU: ``scripts/check_gpu.py``, with parts that do as they are told.

What an item is told stands in the file ``told`` beside the results: a line ``<item> <what>`` each. Every item
leaves its name in the file ``tried``.
"""

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

from scripts import check_gpu
from scripts.gpu_parts.part import Check, Found, Part

ITEMS = {"first": ("a", "b", "c", "d"), "second": ("e", "f")}
MACHINE = ("device", "memory_gib", "capability", "driver", "cuda", "cudnn", "python", "versions", "source")


def told(check: Check) -> dict[str, str]:
    file = check.results.parent / "told"
    return dict(line.split() for line in file.read_text().splitlines())


def item(name: str, check: Check) -> Found:
    with open(check.results.parent / "tried", "a") as file:
        print(name, file=file)
    match told(check).get(name):
        case "dies":
            print("the last words of", name, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        case "raises":
            raise ValueError(f"{name} cannot")
        case "lasts":
            time.sleep(600)
        case "errs":
            return Found(f"{name} found a fault", right=False)
    return Found(f"{name} is well", right=True)


def machine(check: Check) -> Found:
    gpu = told(check).get("gpu", "GPU")
    return Found(gpu, values=dict.fromkeys(MACHINE) | {"device": gpu})


def items(part: str, check: Check) -> dict:
    return {name: partial(item, name) for name in ITEMS[part]}


check_gpu.MACHINE = Part("machine", "The machine", 1, lambda check: {"machine": machine})
check_gpu.PARTS = tuple(Part(name, name.title(), 1, partial(items, name)) for name in ITEMS)

if __name__ == "__main__":
    assert Path(sys.argv[1]).name == "check_gpu.py"
    sys.exit(check_gpu.main(sys.argv[2:]))
