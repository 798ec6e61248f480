"""What a process of a seed does with its memory."""

import subprocess
import sys

PROGRAM = """
import resource
import torch
from omegaconf import OmegaConf
from suite.command.machine import process_settled

def used():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

settings = OmegaConf.create({"threads": 1, "tf32": False, "device": "cpu"})
with process_settled(settings, print):
    before, kept = used(), []
    for step in range(20):
        large = torch.ones(2**20 * (70 + step) // 4)
        kept.append(torch.empty(2**20 * 40 // 4))  # behind it: it leaves a hole too small for the next
        del large
    print(used() - before)
"""


def test_memory_does_not_fall_to_pieces():
    """20 tensors of 70 to 89 MB, one at a time: kept in holes between others they took 0.77 GB."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 200
