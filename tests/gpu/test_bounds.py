"""What ends a process on a real GPU is an error beforehand: the networks are run on values of our own."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import diagnose
from driftlab.arithmetic.bounds import OutOfBoundsError, within_bounds
from driftlab.words import Verdict


def there(*values):
    return torch.tensor(values).cuda()


NUMBERS = torch.arange(12.0).reshape(3, 4)
REFUSED = {
    "embedding": lambda t: F.embedding(there(0, 3), t),
    "one_hot": lambda t: F.one_hot(there(0, -1), 4),
    "gather": lambda t: t.gather(1, there(0, 4)[None]),
    "scatter": lambda t: t.scatter(0, there(-1)[None], 1.0),
    "index_select": lambda t: t.index_select(-1, there(4)),
    "index": lambda t: t[:, there(1, -5)],
    "index after a mask": lambda t: t[None][there(1) > 0, there(3)],
    "index_put": lambda t: t.index_put((there(3),), t[0]),
    "take": lambda t: t.take(there(12)),
    "nll_loss": lambda t: F.cross_entropy(t, there(0, 1, 4)),
    "nll_loss2d": lambda t: F.cross_entropy(t[None].mT, there(0, 1, -1)[None]),
    "binary_cross_entropy": lambda t: F.binary_cross_entropy(t, t / 12),
    "multinomial": lambda t: torch.multinomial(t - 1, 1),
    "repeat_interleave": lambda t: t.repeat_interleave(there(1, -1, 1), 0),
    "masked_scatter": lambda t: t.masked_scatter(t > 0, t[0]),
}
TAKEN = {
    "embedding": lambda t: F.embedding(there(0, 2), t),
    "gather along another axis": lambda t: t.gather(0, there(2, 0)[None]),
    "index from the end": lambda t: t[:, there(3, -4)],
    "index after a mask": lambda t: t[None][there(1) > 0, there(-3)],
    "a mask": lambda t: t[t > 3],
    "what is ignored": lambda t: F.cross_entropy(t[None].mT, there(0, 1, -100)[None]),
    "an index of nothing": lambda t: t.index_select(0, there(0)[:0]),
    "probabilities": lambda t: torch.bernoulli(t / 12),
    "binary_cross_entropy": lambda t: F.binary_cross_entropy(t / 12, t / 12),
    "masked_scatter": lambda t: t.masked_scatter(t > 0, t),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_the_kernel_sees_it(cuda, name):
    numbers = NUMBERS.cuda()
    with within_bounds(), pytest.raises(OutOfBoundsError):
        REFUSED[name](numbers)


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_taken_comes_out_as_without(cuda, name):
    numbers = NUMBERS.cuda()
    torch.manual_seed(0)
    plain = TAKEN[name](numbers)
    torch.manual_seed(0)
    with within_bounds():
        assert torch.equal(TAKEN[name](numbers), plain)


def test_a_cpu_says_so_itself():
    with within_bounds(), pytest.raises(IndexError):
        F.embedding(torch.tensor([3]), NUMBERS)


class Buckets(nn.Module):
    """Distances in buckets, whose borders are a table that is made on the way."""

    def __init__(self):
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(4, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, steps):
        borders = torch.tensor([0.0, 1.0, 2.0, 4.0], device=steps.device)
        bucket = (steps[..., None] >= borders).sum(-1) - 1
        hot = F.one_hot(bucket, 4).to(self.table.weight)
        return self.head(self.norm(hot @ self.table.weight).tanh())


class Ported(nn.Module):
    def __init__(self, model):
        super().__init__()
        weights = model.table.weight, model.norm.weight, model.norm.bias, model.head.weight, model.head.bias
        self.t, self.g, self.b, self.w, self.o = (nn.Parameter(w.detach().clone()) for w in weights)

    def forward(self, steps):
        borders = torch.tensor([0.0, 1.0, 2.0, 4.0], device=steps.device)
        hot = F.one_hot((steps[..., None] >= borders).sum(-1) - 1, 4).to(self.t)
        x = hot @ self.t
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt()  # over n - 1
        return (x * self.g + self.b).tanh() @ self.w.T + self.o


def test_a_fault_is_placed_there_as_on_a_cpu(cuda):
    torch.manual_seed(0)
    batches = [(torch.arange(6) % 5, torch.arange(6) % 3)] * 2
    here = diagnose(Buckets(), Ported, batches, steps=2)
    torch.manual_seed(0)
    there = diagnose(Buckets().cuda(), Ported, [(x.cuda(), y.cuda()) for x, y in batches], steps=2)
    assert here.verdict is there.verdict is Verdict.BUG
    assert there.where.module == here.where.module == "norm"
