"""A small tree LSTM: child-sum layers and a binary one, a class for every node, a grade for two trees."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, IN, WORD, FIRST, SECOND, MEMORY, ATTEND = 90, 15, 17, 26, 22, 19, 13
HIDDEN, CLASSES, GRADES, PAIRS, SLOTS, LEVELS = 23, 5, 6, 4, 11, 6

Steps = list[tuple[Tensor, Tensor, Tensor]]


class ChildSumTreeLSTM(nn.Module):
    def __init__(self, in_dim: int, mem_dim: int):
        super().__init__()
        self.mem_dim = mem_dim
        self.ioux = nn.Linear(in_dim, 3 * mem_dim)
        self.iouh = nn.Linear(mem_dim, 3 * mem_dim, bias=False)
        self.fx = nn.Linear(in_dim, mem_dim)
        self.fh = nn.Linear(mem_dim, mem_dim, bias=False)

    def node_forward(self, x: Tensor, child_c: Tensor, child_h: Tensor, to: Tensor) -> tuple[Tensor, Tensor]:
        """The states of nodes [n, in] whose children [k, mem] belong to the nodes ``to`` [k]."""
        none = x.new_zeros(len(x), self.mem_dim)
        i, o, u = (self.ioux(x) + self.iouh(none.index_add(0, to, child_h))).chunk(3, 1)
        f = torch.sigmoid(self.fh(child_h) + self.fx(x)[to])
        c = torch.sigmoid(i) * torch.tanh(u) + none.index_add(0, to, f * child_c)
        return c, torch.sigmoid(o) * torch.tanh(c)

    def forward(self, x: Tensor, steps: Steps) -> Tensor:
        c = h = x.new_zeros(len(x), self.mem_dim)
        for nodes, edges, to in steps:
            new_c, new_h = self.node_forward(x[nodes], c[edges], h[edges], to)
            c, h = c.index_copy(0, nodes, new_c), h.index_copy(0, nodes, new_h)
        return h


class BinaryTreeLeafModule(nn.Module):
    def __init__(self, in_dim: int, mem_dim: int):
        super().__init__()
        self.cx, self.ox = nn.Linear(in_dim, mem_dim), nn.Linear(in_dim, mem_dim)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c = self.cx(x)
        return c, torch.sigmoid(self.ox(x)) * torch.tanh(c)


class BinaryTreeComposer(nn.Module):
    def __init__(self, mem_dim: int):
        super().__init__()
        for gate in ("i", "lf", "rf", "u", "o"):
            setattr(self, gate + "lh", nn.Linear(mem_dim, mem_dim))
            setattr(self, gate + "rh", nn.Linear(mem_dim, mem_dim, bias=False))

    def forward(self, lc: Tensor, lh: Tensor, rc: Tensor, rh: Tensor) -> tuple[Tensor, Tensor]:
        i = torch.sigmoid(self.ilh(lh) + self.irh(rh))
        lf = torch.sigmoid(self.lflh(lh) + self.lfrh(rh))
        rf = torch.sigmoid(self.rflh(lh) + self.rfrh(rh))
        update = torch.tanh(self.ulh(lh) + self.urh(rh))
        o = torch.sigmoid(self.olh(lh) + self.orh(rh))
        c = i * update + lf * lc + rf * rc
        return c, o * torch.tanh(c)


class BinaryTreeLSTM(nn.Module):
    def __init__(self, in_dim: int, mem_dim: int):
        super().__init__()
        self.mem_dim = mem_dim
        self.leaf_module = BinaryTreeLeafModule(in_dim, mem_dim)
        self.composer = BinaryTreeComposer(mem_dim)

    def forward(self, x: Tensor, steps: Steps, child: Tensor) -> Tensor:
        c = h = x.new_zeros(len(x), self.mem_dim)
        for level, (nodes, _, _) in enumerate(steps):
            if level == 0:
                new_c, new_h = self.leaf_module(x[nodes])
            else:
                left, right = child[nodes].unbind(1)
                new_c, new_h = self.composer(c[left], h[left], c[right], h[right])
            c, h = c.index_copy(0, nodes, new_c), h.index_copy(0, nodes, new_h)
        return h


class TreeAttention(nn.Module):
    """The mean of each tree's nodes, weighted by a softmax of what they say to its root."""

    def __init__(self, mem_dim: int, att_dim: int):
        super().__init__()
        self.wn, self.wr = nn.Linear(mem_dim, att_dim), nn.Linear(mem_dim, att_dim, bias=False)
        self.v = nn.Linear(att_dim, 1, bias=False)

    def forward(self, h: Tensor, root: Tensor, tree: Tensor) -> Tensor:
        score = self.v(torch.tanh(self.wn(h) + self.wr(root)[tree]))
        weight = torch.exp(score - score.detach().max())
        total = weight.new_zeros(len(root), 1).index_add(0, tree, weight)
        return torch.zeros_like(root).index_add(0, tree, weight / total[tree] * h)


class Similarity(nn.Module):
    def __init__(self, mem_dim: int, hidden_dim: int, num_classes: int):
        super().__init__()
        self.wh, self.wp = nn.Linear(2 * mem_dim, hidden_dim), nn.Linear(hidden_dim, num_classes)

    def forward(self, lvec: Tensor, rvec: Tensor) -> Tensor:
        vec_dist = torch.cat((lvec * rvec, torch.abs(lvec - rvec)), 1)
        return F.log_softmax(self.wp(torch.sigmoid(self.wh(vec_dist))), 1)


class SentimentTreeLSTM(nn.Module):
    """Pairs of trees, each in its slots, the root first -> logits of every node, log odds of a grade."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, IN, padding_idx=0)
        self.proj = nn.Linear(IN, WORD)
        layers = ChildSumTreeLSTM(WORD, FIRST), ChildSumTreeLSTM(FIRST, SECOND)
        self.childsumtreelstm = nn.ModuleList(layers)
        self.binarytreelstm = BinaryTreeLSTM(SECOND, MEMORY)
        self.attention = TreeAttention(SECOND + MEMORY, ATTEND)
        self.sentiment = nn.Linear(SECOND + MEMORY, CLASSES)
        self.similarity = Similarity(2 * (SECOND + MEMORY), HIDDEN, GRADES)
        with torch.no_grad():
            for weight in self.parameters():
                weight.mul_(1.7)

    def forward(self, words: Tensor, parent: Tensor, side: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
        pairs, slots = words.shape
        first = slots * torch.arange(pairs, device=words.device)[:, None]
        nodes = torch.arange(pairs * slots, device=words.device)
        has = parent.flatten() >= 0
        up, side = torch.where(parent >= 0, parent + first, -1).flatten(), side.flatten()
        child = up.new_zeros(pairs * slots, 2).index_put((up[has], side[has]), nodes[has])
        steps = []
        for level in levels.unbind(1):
            these = (level + first)[level >= 0]
            place = up.new_full((pairs * slots + 1,), -1)
            place[these] = torch.arange(len(these), device=words.device)
            edges = (place[up] >= 0).nonzero()[:, 0]
            steps.append((these, edges, place[up[edges]]))
        x = self.proj(self.emb(words.flatten()))
        for layer in self.childsumtreelstm:
            x = layer(x, steps)
        h = torch.cat((x, self.binarytreelstm(x, steps, child)), 1)
        real, root = torch.cat([these for these, _, _ in steps]), h[:: slots // 2]
        vec = torch.cat((root, self.attention(h[real], root, real // (slots // 2))), 1)
        return self.sentiment(h).unflatten(0, (pairs, slots)), self.similarity(vec[::2], vec[1::2])


def grow(start: int, leaves: int, parent: Tensor, side: Tensor) -> None:
    """A random binary tree from its root at ``start`` downwards: a leaf is split until there are enough."""
    ends, free = [start], start + 1
    while len(ends) < leaves:
        up = ends.pop(int(torch.randint(len(ends), ())))
        parent[free : free + 2], side[free : free + 2] = up, torch.tensor([0, 1])
        ends, free = [*ends, free, free + 1], free + 2


def sentences() -> tuple[dict[str, Tensor], Tensor]:
    """Pairs of trees of four to six leaves, half the inner nodes without a word; classes and a grade."""
    words, target = torch.zeros(PAIRS, 2 * SLOTS).long(), torch.full((PAIRS, 2 * SLOTS + 1), -100)
    parent, side = torch.full_like(words, -1), torch.full_like(words, -1)
    levels = torch.full((PAIRS, LEVELS, 2 * SLOTS), -1)
    for n in range(PAIRS):
        leaves, mood = torch.randint(4, 7, (2,)), torch.zeros(2)
        for k in (0, 1):
            start, count = k * SLOTS, 2 * int(leaves[k]) - 1
            grow(start, int(leaves[k]), parent[n], side[n])
            height = [0] * (2 * SLOTS)
            for i in reversed(range(start, start + count)):
                word = int(torch.randint(1, VOCABULARY, ()))
                words[n, i] = word if height[i] == 0 or torch.rand(()) < 0.5 else 0
                levels[n, height[i], i] = i
                target[n, i] = int(words[n, start : start + count].max()) % CLASSES
                if i > start:
                    up = int(parent[n, i])
                    height[up] = max(height[up], height[i] + 1)
            mood[k] = target[n, start]
        target[n, -1] = int((mood[0] - mood[1]).abs())
    return {"words": words, "parent": parent, "side": side, "levels": levels}, target


def both_heads(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """The cross entropy of the nodes and half that of the grades, by two."""
    nodes = F.cross_entropy(outputs[0].flatten(0, 1), target[:, :-1].flatten())
    return (nodes + 0.5 * F.nll_loss(outputs[1], target[:, -1])) / 2
