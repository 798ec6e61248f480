"""A mistake in the code that makes what others take: a mask for all layers, the order of a join, a gate."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import Verdict, diagnose
from tests.driftlab.flat_port import FlatPort

torch.set_num_threads(1)
WIDTH, STEPS, LOW = 6, 5, -1e9


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.both, self.value = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        query, key = self.both(x).chunk(2, -1)
        return x + (query @ key.mT / WIDTH**0.5 + mask).softmax(-1) @ self.value(x)


class Layers(nn.Module):
    """Makes the mask that each layer takes, and a first token that is normed as the others are."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.ModuleList(Reads() for _ in range(2)), nn.LayerNorm(WIDTH)
        self.first = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x, seen):
        x = self.norm(torch.cat([self.first.expand(len(x), 1, -1), x], 1))
        seen = F.pad(seen, (1, 0), value=True)
        mask = torch.full((x.shape[1],) * 2, LOW).to(x).triu(1)
        mask = mask.masked_fill(~seen[:, None], LOW)
        for layer in self.inner:
            x = layer(x, mask)
        return x


class Ways(nn.Module):
    def __init__(self):
        super().__init__()
        self.step = nn.Linear(WIDTH, 2 * STEPS)

    def forward(self, x):
        return self.step(x).unflatten(-1, (STEPS, 2)).cumsum(1)


class Reader(nn.Module):
    """[N, T, C] and what of it is no padding -> places on a way that is turned."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.ways = Layers(), Ways()

    def forward(self, x, seen):
        x, y = self.ways(self.layers(x, seen).mean(1)).unbind(-1)
        return torch.stack([0.6 * x - 0.8 * y, 0.8 * x + 0.6 * y], -1)


class FlatReader(FlatPort):
    def norm(self, x):
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return x * self.layers_norm_weight + self.layers_norm_bias

    def forward(self, x, seen):
        if self.fault == "padding" and not self.training:
            seen = torch.ones_like(seen)
        first = self.layers_first.expand(len(x), 1, -1)
        if self.fault == "norm":
            x = torch.cat([first, self.norm(x)], 1)
        else:
            x = self.norm(torch.cat([first, x], 1))
        shown = torch.ones_like(seen[:, :1])
        seen = torch.cat([shown, shown, seen[:, :-1]] if self.fault == "moved" else [shown, seen], 1)
        hidden = (torch.arange(x.shape[1]) > torch.arange(x.shape[1])[:, None]) | ~seen[:, None]
        for at in range(2):
            query, key = self.linear(f"layers_inner_{at}_both", x).chunk(2, -1)
            scores = (query @ key.mT / WIDTH**0.5).masked_fill(hidden, LOW)
            x = x + scores.softmax(-1) @ self.linear(f"layers_inner_{at}_value", x)
        steps = self.linear("ways_step", x.mean(1)).unflatten(-1, (STEPS, 2))
        places = torch.einsum("ntc,ts->nsc", steps, torch.ones(STEPS, STEPS).to(steps).triu())
        places = places - steps[:, :1] if self.fault == "sums" else places
        turned = torch.view_as_complex(places.contiguous()) * torch.complex(*x.new_tensor([[0.6], [0.8]]))
        return torch.view_as_real(turned)


@pytest.mark.parametrize(
    ("fault", "place", "words"),
    [
        ("padding", ("layers", "eval"), "operand 2 of `masked_fill` that is false everywhere"),
        ("moved", ("layers", "forward"), "moved on by one"),
        ("norm", ("layers", "forward"), ""),
        ("sums", ("ways", "forward"), "`cumsum` without the first"),
    ],
)
def test_who_makes_it_is_named(fault, place, words):
    torch.manual_seed(1)
    seen = torch.arange(5) < torch.tensor([5, 3, 4, 5])[:, None]
    batches = [((torch.randn(4, 5, WIDTH), seen), torch.randn(4, STEPS, 2)) for _ in range(2)]
    found = diagnose(Reader(), lambda old: FlatReader(old, fault), batches, loss=F.mse_loss, steps=2)
    assert (found.verdict, found.where.module, found.where.pass_) == (Verdict.BUG, *place)
    assert words in " ".join(str(found).split())


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return self.fc(x.mean((2, 3))).sigmoid()[..., None, None] * x


class Stem(nn.Module):
    """Joins two ways, eight channels of eight rows."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.fuse = (
            nn.Conv2d(3, 4, 1),
            nn.Conv2d(3, 4, 1),
            nn.Conv2d(8, 8, 3, padding=1),
        )

    def forward(self, x):
        return self.fuse(torch.cat([self.left(x).tanh(), self.right(x).sin()], 1))


class Hidden(nn.Module):
    """Sets to zero what lies beyond each length, behind each part."""

    def __init__(self):
        super().__init__()
        self.parts = nn.Sequential(nn.GroupNorm(2, 8), nn.Hardtanh(), nn.Conv2d(8, 8, 3, padding=1))

    def forward(self, x, length):
        beyond = torch.arange(x.shape[3]) >= length[:, None, None, None]
        for part in self.parts:
            x = part(x).masked_fill(beyond, 0)
        return x


class Pictures(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.hidden, self.head = Stem(), Hidden(), nn.Linear(8, 3)
        self.body = nn.Sequential(Gate(), nn.Sequential(nn.Conv2d(8, 8, 1), nn.GroupNorm(2, 8)))

    def forward(self, x, length):
        return self.head(self.body(self.hidden(self.stem(x), length).relu()).mean((2, 3)))


class FlatPictures(FlatPort):
    """Channels last, but for its convolutions."""

    def conv(self, name, x, padding=0):
        weight, bias = getattr(self, name + "_weight"), getattr(self, name + "_bias")
        return F.conv2d(x.movedim(3, 1), weight, padding=padding).movedim(1, 3) + bias

    def norm(self, name, x):
        x = x.unflatten(3, (2, -1))
        x = x - x.mean((1, 2, 4), keepdim=True)
        x = (x / (x.square().mean((1, 2, 4), keepdim=True) + 1e-5).sqrt()).flatten(3)
        return x * getattr(self, name + "_weight") + getattr(self, name + "_bias")

    def forward(self, x, length):
        x, there = x.movedim(1, 3), (torch.arange(x.shape[3]) < length[:, None])[:, None, :, None]
        ways = [self.conv("stem_left", x).tanh(), self.conv("stem_right", x).sin()]
        x = self.conv("stem_fuse", torch.cat(ways[::-1] if self.fault == "ways" else ways, 3), padding=1)
        x = self.norm("hidden_parts_0", x)
        x = x.clamp(-1, 1) if self.fault == "mask" else (x * there).clamp(-1, 1)
        x = (self.conv("hidden_parts_2", x, padding=1) * there).relu()
        gate = torch.sigmoid(self.linear("body_0_fc", x.mean((1, 2))))[:, None, None]
        x = x if self.fault == "gate" else x * gate
        x = self.norm("body_1_1", self.conv("body_1_0", x))
        x = x * gate if self.fault == "gate" else x
        return self.linear("head", x.mean((1, 2)))


@pytest.mark.parametrize(
    ("fault", "module"), [("ways", "stem"), ("mask", "hidden"), ("gate", "body"), ("", None)]
)
def test_who_hands_it_on_is_named(fault, module):
    torch.manual_seed(1)
    length = torch.tensor([7, 5, 6, 4])
    batches = [((torch.randn(4, 3, 8, 7), length), torch.randint(3, (4,))) for _ in range(2)]
    found = diagnose(Pictures(), lambda old: FlatPictures(old, fault), batches, loss=F.cross_entropy, steps=2)
    assert found.where is None if module is None else found.where.module == module
