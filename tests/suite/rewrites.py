"""Somebody's own rewrites, right and wrong, for ``rewrite.target``."""

import multiprocessing
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from suite.running.recorder import Recorder
from tests.suite.below import below


def other_shape(model):
    model.fc = nn.Linear(model.fc.in_features, 5)
    return model


def nothing(model):
    return None


def raising(model):
    return 1 / 0


def identity(model):
    return model


def in_tf32(model):
    torch.set_float32_matmul_precision("high")
    return model


class InEval(nn.BatchNorm2d):
    """A norm that ``train`` leaves in eval mode."""

    def train(self, mode=True):
        return super().train(False)


def norm_that_stays_in_eval(model):
    model.bn1.__class__ = InEval
    return model


def replace(model, old, make):
    """Every module of type ``old`` replaced by ``make(module)``."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is old:
                setattr(parent, name, make(child))
    return model


class Transposed(nn.Module):
    """A linear layer that stores its weight the other way round and adds up odd and even inputs apart.

    One matrix product alone has, on some processors, the bits of a linear layer.
    """

    def __init__(self, linear):
        super().__init__()
        self.kernel = nn.Parameter(linear.weight.detach().T.contiguous())
        self.shift = nn.Parameter(linear.bias.detach().clone())

    def forward(self, x):
        return x[:, ::2] @ self.kernel[::2] + x[:, 1::2] @ self.kernel[1::2] + self.shift


def transposed_linear(model):
    return replace(model, nn.Linear, Transposed)


class ByMatrix(nn.Module):
    """A convolution as unfold and a matrix product."""

    def __init__(self, conv):
        super().__init__()
        self.matrix = nn.Parameter(conv.weight.detach().flatten(1).clone())
        self.how = {"kernel_size": conv.kernel_size, "stride": conv.stride, "padding": conv.padding}

    def forward(self, x):
        height, width = (
            (n + 2 * p - k) // s + 1
            for n, p, k, s in zip(
                x.shape[2:], self.how["padding"], self.how["kernel_size"], self.how["stride"], strict=True
            )
        )
        return (self.matrix @ F.unfold(x, **self.how)).unflatten(2, (height, width))


def conv_by_matrix(model):
    return replace(model, nn.Conv2d, ByMatrix)


def frozen_momentum(model):
    """A batch-norm that forgets its statistics faster: training is the same, eval mode is not."""
    return replace(model, nn.BatchNorm2d, lambda bn: _with(bn, momentum=0.2))


def other_epsilon(model):
    return replace(model, nn.BatchNorm2d, lambda bn: _with(bn, eps=1.1e-5))


def _with(module, **attributes):
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


class Late(nn.Module):
    """Right for four calls in training, then off by one in a million."""

    def __init__(self, linear):
        super().__init__()
        self.linear, self.calls = linear, 0

    def forward(self, x):
        self.calls += self.training
        return self.linear(x) * (1 + 1e-6 * (self.calls > 4))


def late(model):
    return replace(model, nn.Linear, Late)


def reinitialised(model):
    torch.manual_seed(99)
    model.fc.reset_parameters()
    return model


class Changed(nn.Module):
    """A module whose inputs go through ``change`` first."""

    def __init__(self, inner, change):
        super().__init__()
        self.inner, self.change = inner, change

    def forward(self, x):
        return self.inner(self.change(x))


def _changed(model, change):
    """The first conv of the first block, with other inputs."""
    block = model.layer1[0]
    block.conv1 = Changed(block.conv1, change)
    return model


def in_bfloat16(model):
    return _changed(model, lambda x: x.bfloat16().to(x.dtype))


def wrong_in_float32_alone(model):
    return _changed(model, lambda x: x * 1.00001 if x.dtype == torch.float32 else x)


def always_in_float32(model):
    return _changed(model, lambda x: (x.float() * 1.5 / 1.5).to(x.dtype))


def without_float64(model):
    def refuse(x):
        if x.dtype == torch.float64:
            raise TypeError("no kernel for float64")
        return x

    return _changed(model, refuse)


def noisy(model):
    generator = np.random.default_rng()
    return _changed(model, lambda x: x * (1 + 1e-7 * generator.standard_normal()))


def memory_for_one(model):
    """As where memory holds one seed but not the several of workers."""
    if multiprocessing.parent_process() is not None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return model


def crashing_once(model):
    """A fault of the program that hits the first job alone, in training."""
    whole, crashed = Recorder.log_new_rows, Path(os.environ["DRIFTLAB_TEST_CRASHED"])

    def crash(recorder):
        if not crashed.exists():
            crashed.touch()
            raise AttributeError("a fault of the program")
        whole(recorder)

    Recorder.log_new_rows = crash
    return model


ACTS = {"os": os, "shutil": shutil, "signal": signal, "sys": sys, "time": time, "Path": Path}


def acting(model):
    """Does what the environment says, once a training has left a checkpoint."""

    def act(x):
        if any(below(os.environ["DRIFTLAB_TEST_RESULTS"], "state.safetensors")):
            exec(os.environ["DRIFTLAB_TEST_ACT"], dict(ACTS))
        return x

    return _changed(model, act)


class RaisingStep(torch.optim.SGD):
    """An optimizer whose third step fails."""

    calls = 0

    def step(self, closure=None):
        RaisingStep.calls += 1
        if RaisingStep.calls > 2:
            raise RuntimeError("in a step")
        return super().step(closure)


class NoException(BaseException):
    """Somebody's own, which is no ``Exception``."""


def raising_no_exception(model):
    raise NoException("mine")


def exiting(model):
    sys.exit(0)
