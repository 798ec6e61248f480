"""What computes in the place of kernels for CUDA that sum in any order or in float32, against torch's CPU."""

import pytest
import torch
import torch.nn.functional as F

from driftlab.process import cuda_kernels, settled


def maps(dtype=torch.float32):
    draws = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 5, 4, 6, generator=draws).to(dtype).requires_grad_()
    labels = torch.randint(5, (3, 4, 6), generator=draws)
    return scores, labels.masked_fill(torch.rand(labels.shape, generator=draws) < 0.3, -100)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_it_is_the_cross_entropy_with_its_gradient(cuda, reduction, weighted, dtype):
    found = {}
    for device in ("cpu", "cuda"):
        scores, labels = maps(dtype)
        weight = torch.linspace(0.5, 2, 5, dtype=dtype).to(device) if weighted else None
        with settled(cuda=True):
            given = scores.to(device), labels.to(device)
            loss = F.cross_entropy(*given, weight=weight, reduction=reduction)
            loss.sum().backward()
        found[device] = loss.detach().cpu(), scores.grad
    own = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
    for here, there in zip(found["cpu"], found["cuda"], strict=True):
        torch.testing.assert_close(there, here, rtol=own, atol=own)


def test_a_loss_of_nothing_is_what_torch_makes_of_it(cuda):
    scores, labels = maps()
    with settled(cuda=True):
        loss = F.cross_entropy(scores.cuda(), torch.full_like(labels, -100).cuda())
    assert loss.isnan()


def test_it_is_there_inside_and_not_after(cuda, monkeypatch):
    called = []
    own = cuda_kernels.nll_loss2d
    monkeypatch.setattr(cuda_kernels, "nll_loss2d", lambda *given: (called.append(1), own(*given))[1])
    scores, labels = (t.cuda() for t in maps())
    with settled(cuda=True), settled(cuda=True):
        inside = F.cross_entropy(scores, labels)
    assert called == [1]
    after = F.cross_entropy(scores, labels)
    assert called == [1]
    torch.testing.assert_close(inside, after)


def hard_sigmoid(x):
    return (x + 3).clamp(0, 6) / 6


def weight_normed(x):
    return torch._weight_norm(x, x[:, :1] * 1.5, 0)


# by torch's function, and written out: torch's own gradient of hard sigmoid is float32's on a CPU as well
IN_FLOAT64 = {
    "hard swish": (F.hardswish, lambda x: x * hard_sigmoid(x)),
    "hard swish in place": (lambda x: F.hardswish(x * 1, inplace=True), lambda x: x * hard_sigmoid(x)),
    "hard sigmoid": (F.hardsigmoid, hard_sigmoid),
    "hard sigmoid in place": (lambda x: F.hardsigmoid(x * 1, inplace=True), hard_sigmoid),
    "weight norm": (weight_normed, lambda x: x * (x[:, :1] * 1.5 / x.norm(dim=1, keepdim=True))),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", IN_FLOAT64)
def test_float64_is_float64(cuda, monkeypatch, name, dtype):
    """Our own compute in float64 alone: in float32 a training runs as it always does."""
    asked = []
    for kernel, ours in cuda_kernels.IN_FLOAT64.items():
        watched = lambda *given, kernel=kernel, ours=ours: (asked.append(kernel), ours(*given))[1]  # noqa: E731
        monkeypatch.setitem(cuda_kernels.IN_FLOAT64, kernel, watched)
    found = {}
    for device, function in zip(("cuda", "cpu"), IN_FLOAT64[name], strict=True):
        x = torch.linspace(-4, 4, 20, dtype=dtype).reshape(4, 5).requires_grad_()
        with settled(cuda=True):
            y = function(x.to(device))
            y.square().sum().backward()
        found[device] = y.detach().cpu(), x.grad
    assert bool(asked) == (dtype is torch.float64)
    own = 16 * torch.finfo(dtype).eps
    for here, there in zip(found["cpu"], found["cuda"], strict=True):
        torch.testing.assert_close(there, here, rtol=own, atol=own)


def test_nobody_is_replaced_where_no_gpu_computes(monkeypatch):
    monkeypatch.setattr(cuda_kernels, "nll_loss2d", None)
    with settled(cuda=False):
        assert F.cross_entropy(*maps()).isfinite()
