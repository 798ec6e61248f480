"""Ports between codebases: what the two call by other names, hold in other places and hand over otherwise."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import diagnose
from driftlab.words import Verdict

WIDTH = 8
SAME = (Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL)


def batches():
    torch.manual_seed(1)
    return [(torch.randn(6, 5, WIDTH), torch.randint(0, 3, (6,))) for _ in range(4)]


def judged(reference, candidate, loss=F.cross_entropy, given=None):
    torch.manual_seed(0)
    return diagnose(reference(), candidate, given or batches(), loss=loss)


class Attending(nn.Module):
    """Self-attention whose head starts from zeros, so that nothing comes back to it at first."""

    def __init__(self):
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(WIDTH, 2, batch_first=True), nn.Linear(WIDTH, 3)
        nn.init.zeros_(self.head.weight)

    def forward(self, x):
        return self.head(self.attention(x, x, x)[0].mean(1))


class OfOneTensor(nn.Module):
    """What nn.MultiheadAttention computes of three equal tensors, of the first of them."""

    def __init__(self, made):
        super().__init__()
        self.in_proj_weight, self.in_proj_bias, self.out_proj = (
            made.in_proj_weight,
            made.in_proj_bias,
            made.out_proj,
        )

    def forward(self, q, k, v):
        qkv = F.linear(q, self.in_proj_weight, self.in_proj_bias).unflatten(-1, (3, 2, -1))
        y = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4))
        return self.out_proj(y.transpose(1, 2).flatten(2)), None


def test_a_tensor_that_is_handed_over_three_times_stays_one():
    def rewrite(model):
        model.attention = OfOneTensor(model.attention)
        return model

    found = judged(Attending, rewrite)
    assert found.verdict in SAME, str(found)


class RootMeanSquare(nn.Module):
    def __init__(self, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(WIDTH)), eps

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Small(nn.Module):
    """Norms inputs of 0.02, beside which an epsilon of 1e-6 shows with all its digits."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = RootMeanSquare(), nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(self.norm(0.02 * x).mean(1))


@pytest.mark.parametrize(("eps", "verdicts"), [(1e-6, SAME), (1.001e-6, (Verdict.BUG,))])
def test_a_kernel_may_store_its_epsilon_in_float32(eps, verdicts):
    def rewrite(model):
        norm = nn.RMSNorm(WIDTH, eps=eps)
        norm.load_state_dict(model.norm.state_dict())
        model.norm = norm
        return model

    assert judged(Small, rewrite).verdict in verdicts


class Weighed(nn.Module):
    """Labels of 0 and 1 as floating numbers: other ones have no meaning."""

    def __init__(self, by_hand=False):
        super().__init__()
        self.by_hand = by_hand

    def forward(self, x, y):
        if self.by_hand:
            return torch.where(y > 0, F.softplus(-x), F.softplus(x)).mean()
        return F.binary_cross_entropy_with_logits(x, y)


class Scored(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.loss = nn.Linear(WIDTH, 1), Weighed()

    def forward(self, x, y):
        return self.loss(self.head(x).mean(1)[:, 0], y)


def test_labels_are_not_multiplied():
    def rewrite(model):
        model.loss = Weighed(by_hand=True)
        return model

    given = [((x, (y > 0).float()), y) for x, y in batches()]
    found = judged(Scored, rewrite, loss=lambda loss, _: loss, given=given)
    assert found.verdict in SAME, str(found)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = (
            nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, 3)) for _ in range(2)
        )
        self.norm = nn.BatchNorm1d(3, momentum=0.1)

    def forward(self, x):
        return self.norm(self.left(x.mean(1)) * self.right(x[:, 0]))


class InADict(nn.Module):
    """``Towers`` over a dict of weights, in code of its own."""

    def __init__(self, model, approximate="none", momentum=0.1):
        super().__init__()
        weights = {
            f"{side}{i}_{n}": p
            for side in "lr"
            for i in (0, 2)
            for n, p in _tower(model, side)[i].named_parameters()
        }
        self.weights, self.scale, self.shift = nn.ParameterDict(weights), model.norm.weight, model.norm.bias
        self.register_buffer("mean", model.norm.running_mean.clone())
        self.register_buffer("var", model.norm.running_var.clone())
        self.approximate, self.momentum = approximate, momentum

    def tower(self, x, side):
        w = self.weights
        x = F.linear(x, w[f"{side}0_weight"], w[f"{side}0_bias"])
        return F.linear(F.gelu(x, approximate=self.approximate), w[f"{side}2_weight"], w[f"{side}2_bias"])

    def forward(self, x):
        y = self.tower(x.mean(1), "l") * self.tower(x[:, 0], "r")
        norm = self.mean, self.var, self.scale, self.shift, self.training, self.momentum
        return F.batch_norm(y, *norm)


def _tower(model, side):
    return {"l": model.left, "r": model.right}[side]


def test_a_dict_of_weights_is_no_module_to_call():
    found = judged(Towers, InADict)
    assert found.verdict in SAME, str(found)


def test_of_a_fault_in_two_towers_the_first_is_named():
    found = judged(Towers, lambda model: InADict(model, approximate="tanh"))
    assert (found.verdict, found.where.module) == (Verdict.BUG, "left.1"), str(found)


def test_a_wrong_buffer_is_its_owners():
    found = judged(Towers, lambda model: InADict(model, momentum=0.9))
    assert (found.verdict, found.where.module, found.where.pass_) == (Verdict.BUG, "norm", "buffer"), str(
        found
    )
