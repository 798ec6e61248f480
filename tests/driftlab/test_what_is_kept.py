"""What a network keeps from call to call, writes into its inputs, or makes of the dtype it is given."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import Verdict, diagnose


def batches(inputs=None):
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(0, 4, (8,), generator=generator)
    return [(torch.randn(8, 8, generator=generator) if inputs is None else inputs, targets)]


def judged(make, change, inputs=None, **options):
    torch.manual_seed(0)
    reference = make()
    options = {"steps": 6, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1)} | options
    return diagnose(reference, change, batches(inputs), **options)


def network():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


class Cached(nn.Linear):
    """Keeps its transposed weight for evaluation, and may renew it."""

    renewed = False

    def forward(self, x):
        if self.training:
            return F.linear(x, self.weight, self.bias)
        if self.renewed or not hasattr(self, "transposed"):
            self.transposed = self.weight.detach().t().clone()
        return x @ self.transposed + self.bias


@pytest.mark.parametrize("renewed", [True, False])
def test_a_cache_that_evaluation_fills(renewed):
    def cached(model):
        old, model[2] = model[2], Cached(16, 16)
        model[2].load_state_dict(old.state_dict())
        model[2].renewed = renewed
        return model

    found = judged(network, cached)
    if renewed:
        assert found.verdict in (Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL)
    else:
        assert found.verdict is Verdict.BUG
        assert (found.where.module, found.where.pass_) == ("2", "eval")


class Around(nn.Module):
    def __init__(self, network, factor):
        super().__init__()
        self.network, self.factor = network, factor

    def forward(self, x):
        out = self.network(x.clone())
        x *= self.factor
        return out


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, Verdict.BIT_IDENTICAL), (0.5, Verdict.BUG)])
def test_inputs_that_a_network_writes_into(factor, verdict):
    found = judged(network, lambda model: Around(model, factor))
    assert found.verdict is verdict
    if verdict is Verdict.BUG:
        assert found.where.pass_ == "side effect"
        assert "its inputs are 0.5 (relative) off after the call" in found.headline


class Remembers(nn.Module):
    def __init__(self, share):
        super().__init__()
        self.fc, self.share, self.past = nn.Linear(8, 8), share, None

    def forward(self, x):
        h = torch.tanh(self.fc(x))
        self.past = h if self.past is None else h + self.share * self.past
        return self.past


class Thrice(nn.Module):
    def __init__(self, share):
        super().__init__()
        self.before, self.block, self.after = nn.Linear(8, 8), Remembers(share), nn.Linear(8, 4)

    def forward(self, x):
        self.block.past, x = None, self.before(x)
        for _ in range(3):
            x = self.block(x)
        return self.after(x)


def test_a_block_that_keeps_something_from_call_to_call_is_the_place():
    def other(model):
        model.block.share = 0.25
        return model

    found = judged(lambda: Thrice(0.5), other)
    assert (found.verdict, found.where.module, found.where.pass_) == (Verdict.BUG, "block", "forward")


class Scaled(nn.Module):
    """Divides by a root mean square; ``eps`` is a number, or that of the dtype."""

    def __init__(self, eps):
        super().__init__()
        self.fc, self.out, self.eps = nn.Linear(8, 8), nn.Linear(8, 4), eps

    def forward(self, x):
        h = self.fc(x)
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        return self.out(h / (h.pow(2).mean(-1, keepdim=True) + eps).sqrt())


def with_eps(eps):
    def changed(model):
        model.eps = eps
        return model

    return changed


EPS = torch.finfo(torch.float32).eps


@pytest.mark.parametrize(("mine", "theirs"), [(None, EPS), (EPS, None)])
def test_what_only_float64_shows_is_a_remark_where_float32_was_handed_over(mine, theirs):
    found = judged(lambda: Scaled(mine), with_eps(theirs))
    assert found.verdict is Verdict.ROUND_OFF
    assert "in float64 alone they do not" in str(found).replace("\n", " ") or any(
        "in float64 alone they do not" in e.reading for e in found.evidence
    )


def test_it_is_a_bug_where_float64_was_handed_over():
    assert judged(lambda: Scaled(None).double(), with_eps(EPS)).verdict is Verdict.BUG


def test_another_eps_is_a_bug_in_either_dtype():
    assert judged(lambda: Scaled(None), with_eps(1e-5)).verdict is Verdict.BUG


class Bag(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.table, self.out, self.size = nn.Embedding(20, 8, sparse=sparse), nn.Linear(8, 4), 5

    def forward(self, x):
        return self.out(self.table(x).sum(1) / self.size)


@pytest.mark.parametrize("sparse", [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("size", [5, 5.01])
def test_sparse_gradients_are_read(sparse, size):
    def other(model):
        twin = Bag(sparse[1])
        twin.load_state_dict(model.state_dict())
        twin.size = size
        return twin

    ids = torch.arange(40).view(8, 5) % 17
    found = judged(lambda: Bag(sparse[0]), other, ids)
    assert (found.verdict is Verdict.BUG) is (size != 5)
