"""An Evoformer: aligned sequences and pairs of places that inform each other, to places' distances."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LETTERS, ROW, PAIR, HEADS, REACH, BINS = 6, 8, 6, 2, 3, 5


class Apart(nn.Module):
    """How far a place lies after another, to ``REACH`` steps either way -> [L, L, P]."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(2 * REACH + 1, PAIR)

    def forward(self, length: int) -> Tensor:
        steps = torch.arange(length, device=self.embed.weight.device)
        return self.embed((steps[None] - steps[:, None]).clamp(-REACH, REACH) + REACH)


class Rows(nn.Module):
    """Attention along each sequence [N, S, L, C], gated, with a bias of the pairs [N, L, L, P]."""

    def __init__(self):
        super().__init__()
        self.norm, self.pair_norm = nn.LayerNorm(ROW), nn.LayerNorm(PAIR)
        self.qkv, self.bias = nn.Linear(ROW, 3 * ROW, bias=False), nn.Linear(PAIR, HEADS, bias=False)
        self.gate, self.out = nn.Linear(ROW, ROW), nn.Linear(ROW, ROW)

    def forward(self, m: Tensor, z: Tensor) -> Tensor:
        m = self.norm(m)
        q, k, v = self.qkv(m).unflatten(3, (3, HEADS, -1)).permute(3, 0, 1, 4, 2, 5)
        bias = self.bias(self.pair_norm(z)).permute(0, 3, 1, 2)[:, None]
        mixed = (q @ k.mT / q.shape[-1] ** 0.5 + bias).softmax(-1) @ v
        return self.out(self.gate(m).sigmoid() * mixed.transpose(2, 3).flatten(3))


class Outer(nn.Module):
    """The mean over sequences of products of two places."""

    def __init__(self, width: int = 3):
        super().__init__()
        self.norm = nn.LayerNorm(ROW)
        self.a, self.b, self.out = nn.Linear(ROW, width), nn.Linear(ROW, width), nn.Linear(width**2, PAIR)

    def forward(self, m: Tensor) -> Tensor:
        m = self.norm(m)
        products = torch.einsum("nsic,nsjd->nijcd", self.a(m), self.b(m)) / m.shape[1]
        return self.out(products.flatten(3))


class Triangle(nn.Module):
    """Pairs made new by the other two sides of all triangles, whose edges go out or come in."""

    def __init__(self, outgoing: bool):
        super().__init__()
        self.sides = "nikc,njkc->nijc" if outgoing else "nkic,nkjc->nijc"
        self.norm, self.mid = nn.LayerNorm(PAIR), nn.LayerNorm(PAIR)
        self.a, self.b, self.a_gate, self.b_gate = (nn.Linear(PAIR, PAIR) for _ in range(4))
        self.gate, self.out = nn.Linear(PAIR, PAIR), nn.Linear(PAIR, PAIR)

    def forward(self, z: Tensor) -> Tensor:
        z = self.norm(z)
        a, b = self.a_gate(z).sigmoid() * self.a(z), self.b_gate(z).sigmoid() * self.b(z)
        return self.gate(z).sigmoid() * self.out(self.mid(torch.einsum(self.sides, a, b)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.outer = Rows(), Outer()
        self.feed = nn.Sequential(nn.LayerNorm(ROW), nn.Linear(ROW, 12), nn.ReLU(), nn.Linear(12, ROW))
        self.outgoing, self.incoming = Triangle(True), Triangle(False)

    def forward(self, m: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        m = m + self.rows(m, z)
        m = m + self.feed(m)
        z = z + self.outer(m)
        z = z + self.outgoing(z)
        return m, z + self.incoming(z)


class Distances(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.bins = nn.LayerNorm(PAIR), nn.Linear(PAIR, BINS)

    def forward(self, z: Tensor) -> Tensor:
        z = self.norm(z)
        return self.bins(z + z.transpose(1, 2))


class Folder(nn.Module):
    """Letters [N, S, L], the first sequence the one to fold -> distances' logits [N, L, L, bins]."""

    def __init__(self):
        super().__init__()
        self.letters = nn.Embedding(LETTERS, ROW)
        self.left, self.right = nn.Embedding(LETTERS, PAIR), nn.Embedding(LETTERS, PAIR)
        self.apart = Apart()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.distances = Distances()

    def forward(self, letters: Tensor) -> Tensor:
        m, first = self.letters(letters), letters[:, 0]
        z = self.left(first)[:, :, None] + self.right(first)[:, None] + self.apart(letters.shape[2])
        for block in self.blocks:
            m, z = block(m, z)
        return self.distances(z)


def families() -> tuple[Tensor, Tensor]:
    """Sequences that are nearly the first; places are near that hold like letters."""
    first = torch.randint(LETTERS, (4, 1, 8))
    other = torch.randint(LETTERS, (4, 5, 8))
    letters = torch.where(torch.rand(4, 5, 8) < 0.3, other, first)
    letters[:, :1] = first
    return letters, (first - first.mT).abs().clamp(max=BINS - 1)


def bins(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 2), target.flatten())
