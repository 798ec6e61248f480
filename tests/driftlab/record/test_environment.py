"""What ``run.json`` says of the place where a seed ran: whatever its sums depend on, and nothing private."""

import sys
from types import SimpleNamespace

import pytest
import torch

from driftlab.record import environment as module
from driftlab.record.environment import environment

CPU = torch.device("cpu")


@pytest.fixture
def without_inductor(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._inductor.config", raising=False)


def test_variables_below_torch_are_told(monkeypatch, without_inductor):
    assert environment(CPU)["variables"]["NVIDIA_TF32_OVERRIDE"] is None
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/home/somebody")
    found = environment(CPU)
    assert found["variables"]["NVIDIA_TF32_OVERRIDE"] == "0"
    assert found["inductor"] == "TORCHINDUCTOR_MAX_AUTOTUNE=1"
    assert "somebody" not in str(found)


def test_inductor_is_told_and_not_imported(monkeypatch, without_inductor):
    assert environment(CPU)["inductor"] == "torch's defaults"
    assert "torch._inductor.config" not in sys.modules
    changed = SimpleNamespace(
        get_config_copy=lambda: {"emulate_precision_casts": True, "max_autotune": False, "cache": "/home"},
        _is_default=lambda name: name == "max_autotune",
    )
    monkeypatch.setitem(sys.modules, "torch._inductor.config", changed)
    assert environment(CPU)["inductor"] == "emulate_precision_casts=True"


def test_a_gpu_is_told_with_its_driver(monkeypatch, tmp_path):
    file = tmp_path / "version"
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC 12.2"
    )
    monkeypatch.setattr(module, "DRIVER", file)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    assert environment(torch.device("cuda"))["driver"] == "580.65.06"
    assert environment(CPU)["driver"] is None
