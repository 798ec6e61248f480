"""Two ports of a tree LSTM: dense trees by a matrix of children, and one class of packed weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fifty_second_tree_lstm import SentimentTreeLSTM, both_heads, sentences
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("fifty_second_tree_lstm", SentimentTreeLSTM, sentences, both_heads)
GATES = ("i", "lf", "rf", "u", "o")


class Affine(nn.Module):
    """A product from the right, with an offset if there is one."""

    def __init__(self, *layers: nn.Linear):
        super().__init__()
        self.matrix = leaf(torch.cat([layer.weight.T for layer in layers], 1))
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self.offset = leaf(torch.cat(biases)) if biases else None

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.matrix
        return y if self.offset is None else y + self.offset


class Summed(nn.Module):
    """A cell for all nodes at once, [P, S, D]: its children by a matrix [P, S, S] of zeros and ones."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.given, self.gates, self.keep = Affine(layer.ioux, layer.fx), Affine(layer.iouh), Affine(layer.fh)
        self.own_word = self.cut = False

    def forward(self, x: Tensor, levels: Tensor, family: Tensor) -> Tensor:
        iou, word = self.given(x).tensor_split([3 * self.keep.matrix.shape[1]], 2)
        c = h = torch.zeros_like(word)
        parents = word if self.own_word else family.mT @ word
        for now in levels.unbind(1):
            i, o, u = (iou + self.gates(family @ h)).chunk(3, 2)
            held = (self.keep(h) + parents).sigmoid() * (c.detach() if self.cut else c)
            new = i.sigmoid() * u.tanh() + family @ held
            c, h = torch.where(now, new, c), torch.where(now, o.sigmoid() * new.tanh(), h)
        return h


class Joined(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        end, pair, self.swapped = layer.leaf_module, layer.composer, False
        self.end = Affine(end.cx, end.ox)
        self.left = Affine(*(getattr(pair, gate + "lh") for gate in GATES))
        self.right = Affine(*(getattr(pair, gate + "rh") for gate in GATES))

    def forward(self, x: Tensor, levels: Tensor, left: Tensor, right: Tensor) -> Tensor:
        c, o = self.end(x).chunk(2, 2)
        h = levels[:, 0] * o.sigmoid() * c.tanh()
        for now in levels.unbind(1)[1:]:
            i, a, b, u, o = (self.left(left @ h) + self.right(right @ h)).chunk(5, 2)
            a, b = (b, a) if self.swapped else (a, b)
            new = a.sigmoid() * (left @ c) + b.sigmoid() * (right @ c) + i.sigmoid() * u.tanh()
            c, h = torch.where(now, new, c), torch.where(now, o.sigmoid() * new.tanh(), h)
        return h


class Summary(nn.Module):
    """The root and the attended mean of a tree, [N, M, D] and which of its slots are real."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.node, self.root, self.score = Affine(layer.wn), Affine(layer.wr), Affine(layer.v)

    def forward(self, h: Tensor, real: Tensor) -> Tensor:
        score = self.score((self.node(h) + self.root(h[:, :1])).tanh())
        weight = score.masked_fill(~real, -torch.inf).softmax(1)
        return torch.cat([h[:, 0], (weight.mT @ h)[:, 0]], 1)


class TreeLSTMOfMatrices(Port):
    """All slots of a pair at every level, of which the level's nodes are kept."""

    def take(self, model: SentimentTreeLSTM) -> None:
        self.table = leaf(model.emb.weight)
        self.turn = Affine(model.proj)
        self.low, self.high = map(Summed, model.childsumtreelstm)
        self.pair, self.summary = Joined(model.binarytreelstm), Summary(model.attention)
        self.low.cut = self.fault == "tree_lstm_first_layer_keeps_cells_without_gradient"
        self.high.own_word = self.fault == "tree_lstm_second_layer_forgets_by_the_childs_own_input"
        self.pair.swapped = self.fault == "tree_lstm_binary_forget_gates_left_for_right"
        self.mood = Affine(model.sentiment)
        self.grade = nn.Sequential(Affine(model.similarity.wh), nn.Sigmoid(), Affine(model.similarity.wp))

    def forward(self, words: Tensor, parent: Tensor, side: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.table[words]
        if self.fault != "tree_lstm_padding_word_is_trained":
            x = torch.where(words[..., None] == 0, x.detach(), x)
        x = self.turn(x)
        slots = torch.arange(words.shape[1], device=words.device)
        now = (levels[..., None] == slots).any(2)[..., None]
        is_child = parent[:, None] == slots[:, None]
        family, left = (y.to(x) for y in (is_child, is_child & (side == 0)[:, None]))
        h = self.high(self.low(x, now, family), now, family)
        h = torch.cat([h, self.pair(h, now, left, family - left)], 2)
        trees, real = (y.unflatten(1, (2, -1)).flatten(0, 1) for y in (h, now.any(1)))
        one, two = self.summary(trees, real).unflatten(0, (-1, 2)).unbind(1)
        return self.mood(h), self.grade(torch.cat([one * two, (one - two).abs()], 1)).log_softmax(1)


def packed(*layers: nn.Linear) -> Tensor:
    """The offset of each output, if there is one, and its weights under it: [1 + in, out]."""
    return torch.cat([torch.cat([x.bias[None], x.weight.T]) for x in layers], 1)


class FlatTreeLSTM(Port):
    """Every slot a row, its cell beside its state, and the rows of its two children; none is the last row."""

    def take(self, model: SentimentTreeLSTM) -> None:
        self.table, self.turn = leaf(model.emb.weight), leaf(packed(model.proj))
        two, binary, ask = model.childsumtreelstm, model.binarytreelstm, model.attention
        self.given = nn.ParameterList(leaf(packed(x.fx, x.ioux)) for x in two)
        self.held = nn.ParameterList(leaf(torch.cat([x.fh.weight, x.iouh.weight])) for x in two)
        pair, end = binary.composer, binary.leaf_module
        self.end = leaf(packed(end.ox, end.cx))
        self.sides = pile(pile(getattr(pair, f"{g}{side}h").weight for g in GATES) for side in "lr")
        self.shift = pile(getattr(pair, f"{gate}lh").bias for gate in GATES)
        self.ask = leaf(torch.cat([ask.wn.weight.T, ask.wr.weight.T, ask.wn.bias[None]]))
        self.vote, last = leaf(ask.v.weight[0]), (model.sentiment, model.similarity.wh, model.similarity.wp)
        self.mood, self.hidden, self.grade = (leaf(packed(x)) for x in last)

    def summed(self, k: int, x: Tensor, now: Tensor, child: tuple) -> Tensor:
        width = self.held[k].shape[1]
        word, given = (self.given[k][0] + x @ self.given[k][1:]).tensor_split([width], 2)
        rows = x.new_zeros(*x.shape[:2], 2 * width)
        for level in now:
            h, c = F.pad(rows, (0, 0, 0, 1))[child].chunk(2, 3)
            keep = torch.sigmoid(h @ self.held[k][:width].T + word[:, :, None])
            i, o, u = (given + h.sum(2) @ self.held[k][width:].T).chunk(3, 2)
            if k == 0 and self.fault == "tree_lstm_first_layer_output_gate_after_the_update":
                o, u = u, o
            c = (keep * c).sum(2) + torch.sigmoid(i) * torch.tanh(u)
            rows = torch.where(level, torch.cat([torch.sigmoid(o) * torch.tanh(c), c], 2), rows)
        return rows[..., :width]

    def joined(self, x: Tensor, now: Tensor, child: tuple) -> Tensor:
        o, c = (self.end[0] + x @ self.end[1:]).chunk(2, 2)
        open_leaf = self.fault == "tree_lstm_leaf_cell_without_its_tanh"
        rows = now[0] * torch.cat([torch.sigmoid(o) * (c if open_leaf else torch.tanh(c)), c], 2)
        for level in now[1:]:
            h, c = F.pad(rows, (0, 0, 0, 1))[child].chunk(2, 3)
            i, a, b, u, o = torch.einsum("nksd,sged->gnke", h, self.sides) + self.shift[:, None, None]
            c = torch.sigmoid(i) * torch.tanh(u) + (torch.sigmoid(torch.stack([a, b], 2)) * c).sum(2)
            rows = torch.where(level, torch.cat([torch.sigmoid(o) * torch.tanh(c), c], 2), rows)
        return rows[..., : c.shape[2]]

    def forward(self, words: Tensor, parent: Tensor, side: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
        n, slots = words.shape
        child = torch.full((n, slots, 2), slots, device=words.device)
        pair, slot = (parent >= 0).nonzero(as_tuple=True)
        child[pair, parent[pair, slot], side[pair, slot]] = slot
        child = torch.arange(n, device=words.device)[:, None, None], child
        now = F.one_hot(levels + 1, slots + 1).amax(2)[..., 1:].movedim(1, 0)[..., None] > 0
        x = F.embedding(words, self.table, padding_idx=0) @ self.turn[1:] + self.turn[0]
        x = self.summed(1, self.summed(0, x, now, child), now, child)
        h = torch.cat([x, self.joined(x, now, child)], 2)
        width, trees = h.shape[2], h.reshape(2 * n, slots // 2, -1)
        asked = trees @ self.ask[:width] + trees[:, :1] @ self.ask[width:-1] + self.ask[-1]
        sharp = self.fault == "tree_lstm_attention_sharpened_in_evaluation" and not self.training
        score = torch.tanh(asked) @ self.vote * (2 if sharp else 1)
        weight = torch.softmax(score - 1e9 * (~now.any(0)).view_as(score), 1)
        both = torch.cat([trees[:, 0], torch.einsum("tm,tmd->td", weight, trees)], 1).view(n, 2, -1)
        apart = (both[:, 0] - both[:, 1]) * (both[:, 0] - both[:, 1]).sign()
        if self.fault == "tree_lstm_similarity_softens_the_absolute_difference":
            apart = (apart.square() + 1e-4).sqrt()
        y = torch.sigmoid(torch.cat([both.prod(1), apart], 1) @ self.hidden[1:] + self.hidden[0])
        return h @ self.mood[1:] + self.mood[0], torch.log_softmax(y @ self.grade[1:] + self.grade[0], 1)


SLOPES, FIRST = ("input gradient", "weight gradient"), "childsumtreelstm.0"
right(task, "tree_lstm_of_matrices", "dense trees, children by a matrix, fused gates", TreeLSTMOfMatrices)
right(task, "tree_lstm_flat", "rows of children, packed weights", FlatTreeLSTM)
wrong(
    task,
    TreeLSTMOfMatrices,
    tree_lstm_padding_word_is_trained=("a frozen row trained", "emb", "weight gradient"),
    tree_lstm_first_layer_keeps_cells_without_gradient=("detach", FIRST, SLOPES),
    tree_lstm_second_layer_forgets_by_the_childs_own_input=("another operand", "childsumtreelstm.1"),
    tree_lstm_binary_forget_gates_left_for_right=("two gates swapped", "binarytreelstm.composer"),
)
wrong(
    task,
    FlatTreeLSTM,
    tree_lstm_first_layer_output_gate_after_the_update=("two gates swapped", FIRST),
    tree_lstm_leaf_cell_without_its_tanh=("a function left out", "binarytreelstm.leaf_module"),
    tree_lstm_similarity_softens_the_absolute_difference=("an epsilon", "similarity"),
    tree_lstm_attention_sharpened_in_evaluation=("a factor in eval", "attention", "eval"),
)
