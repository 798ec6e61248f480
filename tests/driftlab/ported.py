"""A small GPT written twice: other names, another structure, the same function, and faults to plant."""

import math

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, HEADS, LENGTH = 11, 8, 2, 5


class Turned(nn.Module):
    """A linear layer that holds its weight the other way round."""

    def __init__(self, into, out):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(into, out)), nn.Parameter(torch.empty(out))

    def forward(self, x):
        return x @ self.weight + self.bias


class Attention(nn.Module):
    """Query, key and value in one."""

    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = Turned(WIDTH, 3 * WIDTH), Turned(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (heads(t) for t in self.c_attn(x).split(WIDTH, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


def heads(x):
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class Feed(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_fc, self.act, self.c_proj = Turned(WIDTH, 20), nn.GELU("tanh"), Turned(20, WIDTH)

    def forward(self, x):
        return self.c_proj(self.act(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = (
            nn.LayerNorm(WIDTH),
            Attention(),
            nn.LayerNorm(WIDTH),
            Feed(),
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Reference(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h, self.ln_f = nn.ModuleList(Block() for _ in range(2)), nn.LayerNorm(WIDTH)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe.weight
        for block in self.h:
            x = block(x)
        return (self.ln_f(x) @ self.wte.weight.T).transpose(1, 2)


class Layer(nn.Module):
    """All in one module; query, key and value apart, each head's scores by hand."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.first = nn.LayerNorm(WIDTH, eps=1e-6 if fault == "epsilon" else 1e-5)
        self.second = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)

    def attend(self, x):
        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        scores = q @ k.transpose(2, 3) / math.sqrt(WIDTH if self.fault == "scale" else WIDTH // HEADS)
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        shares = scores.masked_fill(later, -torch.inf).softmax(-1)
        y = (shares.detach() if self.fault == "detached" else shares) @ v
        return self.o((y.transpose(2, 3) if self.fault == "order" else y).transpose(1, 2).reshape(x.shape))

    def forward(self, x):
        x = x + self.attend(self.first(x))
        y = self.up(self.second(x))
        y = self.down(F.gelu(y, approximate="none" if self.fault == "gelu" else "tanh"))
        return x + (0.9 * y if self.fault == "factor" else y)


class Port(nn.Module):
    def __init__(self, fault, at):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.empty(LENGTH, WIDTH))
        self.layers = nn.ModuleList(Layer(fault if i == at else "") for i in range(2))
        self.norm, self.factor = nn.LayerNorm(WIDTH), WIDTH**0.5 if fault == "embedding" else 1.0

    def forward(self, tokens):
        x = self.words(tokens) * self.factor + self.places
        for layer in self.layers:
            x = layer(x)
        return torch.einsum("btd,vd->bvt", self.norm(x), self.words.weight)


def reference():
    generator = torch.Generator().manual_seed(0)
    network = Reference()
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.4, generator=generator)
    return network


@torch.no_grad()
def port(old, fault="", at=0):
    """``old`` on modules of one's own, with a fault in layer ``at``."""
    new = Port(fault, at)
    new.words.weight.copy_(old.wte.weight)
    new.places.copy_(old.wpe.weight)
    new.norm.load_state_dict(old.ln_f.state_dict())
    for mine, other in zip(new.layers, old.h, strict=True):
        mine.first.load_state_dict(other.ln_1.state_dict())
        mine.second.load_state_dict(other.ln_2.state_dict())
        joined = other.attn.c_attn
        apart = zip(joined.weight.split(WIDTH, 1), joined.bias.split(WIDTH), strict=True)
        given = [*apart, *((m.weight, m.bias) for m in (other.attn.c_proj, other.mlp.c_fc, other.mlp.c_proj))]
        linears = mine.q, mine.k, mine.v, mine.o, mine.up, mine.down
        for linear, (weight, bias) in zip(linears, given, strict=True):
            linear.weight.copy_(weight.T)
            linear.bias.copy_(bias)
    return new


def batches(count=2):
    generator = torch.Generator().manual_seed(1)
    draw = lambda: torch.randint(VOCABULARY, (4, LENGTH), generator=generator)  # noqa: E731
    return [(draw(), draw()) for _ in range(count)]
