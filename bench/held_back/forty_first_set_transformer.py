"""Two ports of a small Set Transformer: a tree with the features first, and one class of stacked weights."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._forty_first_set_transformer import HEADS, WIDTH, SetTransformer, clusters, mixture_loss
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("forty_first_set_transformer", SetTransformer, clusters, mixture_loss)


class Mix(nn.Module):
    """One product for several linear layers, of [..., features, elements]."""

    def __init__(self, *layers: nn.Linear):
        super().__init__()
        self.matrix = leaf(torch.cat([x.weight for x in layers]))
        self.offset = leaf(torch.cat([x.bias for x in layers])[:, None])

    def forward(self, x: Tensor) -> Tensor:
        return self.matrix @ x + self.offset


class Level(nn.Module):
    """A layer norm of the features, which are the last axis but one."""

    def __init__(self, norm: nn.LayerNorm):
        super().__init__()
        self.gain, self.shift = leaf(norm.weight[:, None]), leaf(norm.bias[:, None])
        self.eps, self.less = norm.eps, 0

    def forward(self, x: Tensor) -> Tensor:
        spread, center = torch.var_mean(x, -2, correction=self.less, keepdim=True)
        return (x - center) * (self.gain * (spread + self.eps).rsqrt()) + self.shift


class Look(nn.Module):
    """The elements and what they find in others, by heads on an axis of their own."""

    def __init__(self, mab: nn.Module):
        super().__init__()
        self.ask, self.offer = Mix(mab.fc_q), Mix(mab.fc_k, mab.fc_v)
        self.late = self.raw = False

    def forward(self, x: Tensor, others: Tensor, there: Tensor | None) -> Tensor:
        q = self.ask(x).unflatten(-2, (HEADS, -1))
        k, v = self.offer(others).unflatten(-2, (2, HEADS, -1)).unbind(-4)
        scores = (q * WIDTH**-0.5).mT @ k
        if there is not None and not self.late:
            scores = scores.masked_fill(~there, -math.inf)
        share = (scores - scores.logsumexp(-1, keepdim=True)).exp()
        if self.late:
            share = share * there
        kept = x.unflatten(-2, (HEADS, -1)) if self.raw else q
        return (kept + v @ share.mT).flatten(-3, -2)


class Block(nn.Module):
    def __init__(self, mab: nn.Module):
        super().__init__()
        self.look, self.feed = Look(mab), Mix(mab.fc_o)
        self.before, self.after = Level(mab.ln0), Level(mab.ln1)

    def forward(self, x: Tensor, others: Tensor, there: Tensor | None = None) -> Tensor:
        y = self.before(self.look(x, others, there))
        return self.after(y + self.feed(y).clamp(min=0))


class Collect(nn.Module):
    """Learned elements, the same for all sets, that look at the set."""

    def __init__(self, points: Tensor, mab: nn.Module):
        super().__init__()
        self.points, self.block, self.fixed = leaf(points[0].T), Block(mab), False

    def forward(self, x: Tensor, there: Tensor) -> Tensor:
        return self.block(self.points.detach() if self.fixed else self.points, x, there)


class SetTree(Port):
    """Collections and blocks, features before elements; learned elements are never repeated."""

    def take(self, model: SetTransformer) -> None:
        self.collect = nn.ModuleList(Collect(x.I, x.mab0) for x in model.enc)
        self.spread = nn.ModuleList(Block(x.mab1) for x in model.enc)
        self.seeds = Collect(model.dec[0].S, model.dec[0].mab)
        self.talk = nn.ModuleList(Block(x.mab) for x in model.dec[1:3])
        self.tell = Mix(model.dec[3])
        fault = self.fault
        self.collect[0].block.look.late = fault == "set_transformer_first_mask_put_on_after_the_softmax"
        self.spread[1].look.raw = fault == "set_transformer_residual_takes_the_query_before_its_projection"
        self.seeds.fixed = fault == "set_transformer_seeds_are_constants"
        self.talk[0].before.less = int(fault == "set_transformer_norm_divides_by_one_less")

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x, there = x.mT, mask[:, None, None]
        for collect, spread in zip(self.collect, self.spread, strict=True):
            x = spread(x, collect(x, there))
        x = self.seeds(x, there)
        for block in self.talk:
            x = block(x, x)
        return self.tell(x).mT


class Open(torch.autograd.Function):
    """A rectifier whose slope is one everywhere."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.relu()

    @staticmethod
    def backward(ctx, slope: Tensor) -> Tensor:
        return slope


NARROW = (1, 2, 4)  # the products that read the points themselves


class StackedSets(Port):
    """Stacks of matrices in the order of their use; seven attentions in a loop."""

    def take(self, model: SetTransformer) -> None:
        (a, b), (c, d, e, last) = model.enc, model.dec
        mabs = a.mab0, a.mab1, b.mab0, b.mab1, c.mab, d.mab, e.mab
        layers = [x for m in mabs for x in (m.fc_q, m.fc_k, m.fc_v, m.fc_o)]
        self.narrow = pile(layers[i].weight.T for i in NARROW)
        self.wide = pile(x.weight.T for i, x in enumerate(layers) if i not in NARROW)
        self.bias = pile(x.bias for x in layers)
        self.norms = pile(torch.stack([x.weight, x.bias]) for m in mabs for x in (m.ln0, m.ln1))
        self.learned = leaf(torch.cat([a.I, b.I, c.S], 1)[0])
        self.sizes = a.I.shape[1], b.I.shape[1], c.S.shape[1]
        self.last = leaf(torch.cat([last.weight.T, last.bias[None]]))

    def product(self, x: Tensor, i: int) -> Tensor:
        matrix = self.narrow[NARROW.index(i)] if i in NARROW else self.wide[i - sum(n < i for n in NARROW)]
        return torch.einsum("nli,io->nlo", x, matrix) + self.bias[i]

    def norm(self, x: Tensor, i: int) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * self.norms[i, 0] + self.norms[i, 1]

    def attend(self, i: int, x: Tensor, y: Tensor, there: Tensor | None = None) -> Tensor:
        fault, scale = self.fault, 1 / math.sqrt(WIDTH)
        if (
            fault == "set_transformer_scores_scaled_by_the_head_in_evaluation"
            and i == 1
            and not self.training
        ):
            scale = None
        woven = fault == "set_transformer_heads_take_every_fourth_feature" and i == 2
        q, k, v = (self.product(z, 4 * i + j) for j, z in enumerate((x, y, y)))
        shape, order = ((-1, HEADS), (0, 3, 1, 2)) if woven else ((HEADS, -1), (0, 2, 1, 3))
        heads = (z.unflatten(2, shape).permute(order) for z in (q, k, v))
        found = F.scaled_dot_product_attention(*heads, attn_mask=there, scale=scale)
        first = q + found.permute((0, 2, 3, 1) if woven else (0, 2, 1, 3)).flatten(2)
        z = self.norm(first, 2 * i)
        fed = self.product(z, 4 * i + 3)
        wide = fault == "set_transformer_rectifier_lets_all_slopes_pass" and i == 4
        fed = Open.apply(fed) if wide else fed.relu()
        if fault == "set_transformer_second_residual_before_the_norm" and i == 6:
            z = first
        return self.norm(z + fed, 2 * i + 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        there = mask[:, None, None]
        one, two, seeds = self.learned.expand(len(x), -1, -1).split(self.sizes, 1)
        x = self.attend(1, x, self.attend(0, one, x, there))
        x = self.attend(3, x, self.attend(2, two, x, there))
        x = self.attend(4, seeds, x, there)
        for i in (5, 6):
            x = self.attend(i, x, x)
        return x @ self.last[:-1] + self.last[-1]


SLOPES = ("input gradient", "weight gradient")
right(task, "set_transformer_tree_with_features_first", "a tree, fused keys and values", SetTree)
right(task, "set_transformer_of_stacked_weights", "packed stacks, a fused attention", StackedSets)
wrong(
    task,
    SetTree,
    set_transformer_first_mask_put_on_after_the_softmax=("a mask after the softmax", "enc.0.mab0"),
    set_transformer_residual_takes_the_query_before_its_projection=("another residual", "enc.1.mab1"),
    set_transformer_seeds_are_constants=("detach", "dec.0", "weight gradient"),
    set_transformer_norm_divides_by_one_less=("unbiased variance", "dec.1.mab.ln0"),
)
wrong(
    task,
    StackedSets,
    set_transformer_scores_scaled_by_the_head_in_evaluation=("a scale in eval", "enc.0.mab1", "eval"),
    set_transformer_heads_take_every_fourth_feature=("another order of heads", "enc.1.mab0"),
    set_transformer_rectifier_lets_all_slopes_pass=("a wrong custom backward", "dec.0.mab", SLOPES),
    set_transformer_second_residual_before_the_norm=("another residual", "dec.2.mab"),
)
