"""A softmax and a choice in the other order: a router's experts, a mask behind its softmax."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import Verdict, diagnose
from tests.driftlab.flat_port import FlatPort

torch.set_num_threads(1)
WIDTH, EXPERTS, TOP, LAYERS, TEXT = 6, 5, 2, 2, 7


class Router(nn.Module):
    """The weights of all experts, zero for all but ``TOP``: over the chosen ones alone, or over all."""

    def __init__(self, late):
        super().__init__()
        self.layer, self.late = nn.Linear(WIDTH, EXPERTS), late

    def forward(self, x):
        scores = self.layer(x)
        if self.late:
            weights, chosen = scores.softmax(-1).topk(TOP, -1)
        else:
            best, chosen = torch.topk(scores, TOP, dim=-1)
            weights = F.softmax(best, dim=-1)
        return torch.zeros_like(scores).scatter(-1, chosen, weights)


class Look(nn.Module):
    def __init__(self, adds):
        super().__init__()
        self.qk, self.adds = nn.Linear(WIDTH, 2 * WIDTH), adds

    def forward(self, x):
        q, k = self.qk(x).chunk(2, -1)
        scores, later = q @ k.mT, torch.ones(TEXT, TEXT).triu(1).bool()
        if self.adds:
            scores = scores + torch.zeros(TEXT, TEXT).masked_fill(later, torch.finfo(x.dtype).min)
        else:
            scores = scores.masked_fill(later, -torch.inf)
        return scores.softmax(-1) @ x


class Block(nn.Module):
    def __init__(self, late):
        super().__init__()
        self.look, self.router, self.experts = Look(late), Router(late), nn.Linear(WIDTH, EXPERTS * WIDTH)

    def forward(self, x):
        x = x + self.look(x)
        made = self.experts(x).unflatten(-1, (EXPERTS, WIDTH)).tanh()
        return x + (self.router(x)[..., None] * made).sum(-2)


class Net(nn.Module):
    def __init__(self, late):
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.Sequential(*(Block(late) for _ in range(LAYERS))), nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(self.blocks(x).mean(1))


class Flat(FlatPort):
    """Expert by expert; ``fault`` turns the order round in the second block, of its router or of its mask."""

    def __init__(self, old, fault=""):
        super().__init__(old, fault)
        self.late = old.blocks[0].router.late

    def weights(self, scores, late):
        least = scores.sort(-1).values[..., -TOP, None]
        hidden = scores < least
        if late:
            return (scores.exp() / scores.exp().sum(-1, keepdim=True)).masked_fill(hidden, 0.0)
        return scores.masked_fill(hidden, -torch.inf).softmax(-1)

    def seen(self, scores, behind):
        earlier = torch.ones(TEXT, TEXT).tril().bool()
        if behind:
            return scores.softmax(-1) * earlier
        return torch.where(earlier, scores, -torch.inf).softmax(-1)

    def forward(self, x):
        for i in range(LAYERS):
            q, k = self.linear(f"blocks_{i}_look_qk", x).split(WIDTH, -1)
            wrong = self.fault if i == 1 else ""
            x = x + self.seen(torch.einsum("nqc,nkc->nqk", q, k), wrong == "mask") @ x
            scores = self.linear(f"blocks_{i}_router_layer", x)
            shares = self.weights(scores, self.late != (wrong == "router"))
            made = self.linear(f"blocks_{i}_experts", x).tanh().chunk(EXPERTS, -1)
            x = x + sum(shares[..., n, None] * one for n, one in enumerate(made))
        return self.linear("head", x.mean(1))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("fault", "module"), [("", None), ("router", "blocks.1.router"), ("mask", "blocks.1.look")]
)
def test_the_module_that_chooses_is_named(late, fault, module):
    torch.manual_seed(1)
    batches = [(torch.randn(4, TEXT, WIDTH), torch.randint(3, (4,))) for _ in range(3)]
    found = diagnose(Net(late), lambda old: Flat(old, fault), batches, loss=F.cross_entropy, steps=3)
    if not fault:
        assert found.verdict is Verdict.ROUND_OFF
        return
    assert (found.verdict, found.where.module) == (Verdict.BUG, module)
    words = {"mask": "add" if late else "masked_fill", "router": "softmax" if late else "topk"}[fault]
    assert any(f"`{words}` behind `" in e.details for e in found.evidence)
