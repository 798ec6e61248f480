"""A value that both networks have, and that one of its takers alone is given otherwise."""

import pytest
import torch
from torch import nn

from driftlab import Verdict, diagnose
from tests.driftlab.flat_port import FlatPort

torch.set_num_threads(1)
WIDTH, BLOCKS, EXPERTS, SEEN = 6, 2, 4, 3


class Look(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, memory):
        scores = self.q(x) @ self.k(memory).mT / WIDTH**0.5
        shares = scores.masked_fill(torch.arange(scores.shape[-1]) >= SEEN, -torch.inf).softmax(-1)
        return torch.tanh(shares @ self.v(memory))


class Mixed(nn.Module):
    """The scores of its gate are its shares' and are handed back as well."""

    def __init__(self):
        super().__init__()
        self.gate, self.made = nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, EXPERTS * WIDTH)

    def forward(self, x):
        scores = self.gate(x)
        made = torch.tanh(self.made(x)).unflatten(-1, (EXPERTS, WIDTH))
        return x + (scores.softmax(-1)[..., None] * made).sum(-2), scores


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.look, self.mixed = nn.LayerNorm(WIDTH), Look(), Mixed()
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)

    def forward(self, x, memory):
        return self.mixed(x + self.look(self.norm(x), memory))


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, WIDTH)

    def forward(self, text):
        return torch.tanh(self.inner(text))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.text, self.head = Text(), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x, text):
        memory, scores = self.text(text), []
        for block in self.blocks:
            x, own = block(x, memory)
            scores.append(own)
        return {"logits": self.head(x.mean(1)), "scores": torch.stack(scores), "memory": memory}


class Flat(FlatPort):
    def norm(self, i, x):
        weight, bias = getattr(self, f"blocks_{i}_norm_weight"), getattr(self, f"blocks_{i}_norm_bias")
        spread, center = torch.var_mean(x, -1, correction=0, keepdim=True)
        return (x - center) / (spread + 1e-5).sqrt() * weight + bias

    def product(self, names, x):
        """Of several layers at once."""
        weight, bias = (
            torch.cat([getattr(self, f"{n}_{kind}") for n in names]) for kind in ("weight", "bias")
        )
        return (x @ weight.T + bias).chunk(len(names), -1)

    def forward(self, x, text):
        memory, scores = torch.tanh(self.linear("text_inner", text)), []
        for i in range(BLOCKS):
            name, last = f"blocks_{i}_", i == BLOCKS - 1
            read = self.norm(i, memory) if last and self.fault == "normed" else memory
            k, v = self.product([f"{name}look_k", f"{name}look_v"], read)
            q = self.linear(f"{name}look_q", self.norm(i, x)) / WIDTH**0.5
            shares = torch.einsum("nqc,nkc->nqk", q, k[:, :SEEN]).softmax(-1)
            x = x + torch.tanh(torch.einsum("nqk,nkc->nqc", shares, v[:, :SEEN]))
            own = self.linear(f"{name}mixed_gate", x)
            made = torch.tanh(self.linear(f"{name}mixed_made", x)).unflatten(-1, (EXPERTS, WIDTH))
            x = x + torch.einsum("nte,ntec->ntc", own.softmax(-1), made)
            scores.append(own.softmax(-1) if last and self.fault == "shares" else own)
        if self.fault == "cleared" and not self.training:
            memory = memory * (torch.arange(memory.shape[1]) < SEEN)[:, None]
        return {"logits": self.linear("head", x.mean(1)), "scores": torch.stack(scores), "memory": memory}


def loss(outputs, target):
    return nn.functional.cross_entropy(outputs["logits"], target) + outputs["scores"].square().mean() / 10


@pytest.mark.parametrize(
    ("fault", "module"),
    [
        ("", None),
        ("normed", "blocks.1.look"),  # whose keys and values are of another memory
        ("shares", "blocks.1.mixed"),  # whose scores are used as they are, and reported otherwise
        ("cleared", "text"),  # that is used as it is, and reported without its end
    ],
)
def test_who_takes_it_is_named_or_who_makes_it_if_it_is_a_result(fault, module):
    torch.manual_seed(1)
    batches = [((torch.randn(3, 4, WIDTH), torch.randn(3, 5, 3)), torch.randint(3, (3,))) for _ in range(2)]
    found = diagnose(Net(), lambda old: Flat(old, fault), batches, loss=loss, steps=2)
    if not fault:
        assert found.verdict in (Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL)
        return
    assert (found.verdict, found.where.module) == (Verdict.BUG, module)


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.narrow(torch.tanh(self.wide(x)))


class OwnNorm(nn.LayerNorm):
    def forward(self, x):
        spread, center = torch.var_mean(x, -1, correction=0, keepdim=True)
        return (x - center) / (spread + self.eps).sqrt() * self.weight + self.bias


class SideBySide(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm, self.first, self.second = norm(WIDTH), Dense(), Dense()

    def forward(self, x):
        normed = self.norm(x)
        return self.first(normed) + self.second(normed) + x


class InParts(nn.Module):
    """The beginning, then the rest, through the same blocks."""

    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.ModuleList(SideBySide(norm) for _ in range(2)), nn.Linear(WIDTH, 3)

    def part(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def forward(self, begin, rest):
        return self.part(begin), self.part(rest)


class BothInOneProduct(FlatPort):
    """What both dense parts make is one product; with its fault the second reads what the first has added."""

    def dense(self, i, name, x):
        return torch.tanh(self.linear(f"blocks_{i}_{name}_wide", x))

    def part(self, x):
        for i in range(2):
            name, last = f"blocks_{i}_", i == 1
            norm = [getattr(self, f"{name}norm_{kind}") for kind in ("weight", "bias")]
            first = self.dense(i, "first", nn.functional.layer_norm(x, [WIDTH], *norm))
            read = x + self.linear(f"{name}first_narrow", first) if self.fault and last else x
            second = self.dense(i, "second", nn.functional.layer_norm(read, [WIDTH], *norm))
            both = [getattr(self, f"{name}{n}_narrow_weight") for n in ("first", "second")]
            bias = sum(getattr(self, f"{name}{n}_narrow_bias") for n in ("first", "second"))
            x = x + torch.cat([first, second], -1) @ torch.cat(both, 1).T + bias
        return self.linear("head", x)

    def forward(self, begin, rest):
        return self.part(begin), self.part(rest)


@pytest.mark.parametrize("norm", [nn.LayerNorm, OwnNorm])
def test_what_one_is_given_at_each_call_that_it_could_not_make_is_its_caller_s(norm):
    torch.manual_seed(1)

    def batch():
        return (torch.randn(4, 5, WIDTH), torch.randn(4, 3, WIDTH)), torch.randn(4, 8, 3)

    def loss(outputs, target):
        return (torch.cat(outputs, 1) - target).square().mean()

    batches = [batch() for _ in range(2)]
    found = diagnose(InParts(norm), lambda old: BothInOneProduct(old, "serial"), batches, loss=loss, steps=2)
    assert (found.verdict, found.where.module) == (Verdict.BUG, "blocks.1")
