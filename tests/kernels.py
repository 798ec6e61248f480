"""Kernels of torch that cannot be relied on everywhere: tried before a test that needs them."""

import subprocess
import sys
from functools import cache

import pytest

CONVOLUTIONS = """
import torch
torch.set_num_threads(1)
for channels, kernel, stride in ((3, 3, 1), (4, 1, 2)) * 20:
    conv = torch.nn.Conv2d(channels, 8, kernel, stride, bias=False).to(memory_format=torch.channels_last)
    images = torch.randn(4, channels, 32, 32).to(memory_format=torch.channels_last).requires_grad_()
    conv(images).sum().backward()
print("sound")
"""


@cache
def channels_last_is_sound() -> bool:
    """On some processors torch 2.15's own channels_last backward writes beyond its memory (a double free)."""
    try:
        tried = subprocess.run([sys.executable, "-c", CONVOLUTIONS], capture_output=True, timeout=30)
    except subprocess.TimeoutExpired:  # what remains of such a process waits for itself
        return False
    return tried.stdout.strip() == b"sound"


def need_channels_last() -> None:
    if not channels_last_is_sound():
        pytest.skip("torch's channels_last convolutions corrupt memory on this processor")
