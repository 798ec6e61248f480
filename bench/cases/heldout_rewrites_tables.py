"""True rewrites of a recommender with bags of items, and of routed experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import case, in_place_of, method_of
from bench.cases._heldout_tables import Experts, Recommender, moe, recommender
from bench.cases._rewritten import SAME, copied, linear_of, rewritten
from bench.surgery import recast


@in_place_of("", SAME, "tables joined", recommender, "three_embeddings_in_one_table")
class _OneTable(nn.Module):
    """The three embeddings are rows of one table, as recommenders keep them; indices get an offset."""

    def __init__(self, model: Recommender):
        super().__init__()
        tables = [model.user.weight, model.country.weight, model.items.weight]
        self.table = nn.Embedding.from_pretrained(torch.cat(tables).detach().clone(), freeze=False)
        self.interact, self.out = model.cross, model.out

    def forward(self, user: Tensor, country: Tensor, items: Tensor, offsets: Tensor) -> Tensor:
        who = self.table(torch.stack([user, country + 13])).sum(0)
        bags = F.embedding_bag(items + 18, self.table.weight, offsets, mode="mean")
        return self.out(torch.tanh(self.interact(who, bags)))[:, 0]


class _SegmentMean(nn.EmbeddingBag):
    """Rows looked up one by one and added where they belong; the sum is divided by the count."""

    def forward(self, items: Tensor, offsets: Tensor) -> Tensor:
        counts = torch.diff(offsets, append=offsets.new_tensor([len(items)]))
        bag = torch.repeat_interleave(torch.arange(len(offsets), device=items.device), counts)
        total = self.weight.new_zeros(len(offsets), self.embedding_dim)
        return total.index_add(0, bag, F.embedding(items, self.weight)) / counts[:, None]


@case(SAME, "embedding bag by hand", on=recommender)
def bags_by_adding_rows(model: nn.Module) -> nn.Module:
    """The mean of each bag by ``index_add`` and a division; the interaction by ``einsum``."""

    class Einsum(nn.Bilinear):
        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return torch.einsum("ni,oij,nj->no", left, self.weight, right) + self.bias

    return recast(recast(model, "items", _SegmentMean), "cross", Einsum)


class _CountedBags(nn.EmbeddingBag):
    """The table multiplied by a matrix that counts which bag holds which item how often."""

    def forward(self, items: Tensor, offsets: Tensor) -> Tensor:
        places = torch.arange(len(items), device=items.device)
        bag = torch.bucketize(places, offsets, right=True) - 1
        counts = self.weight.new_zeros(len(offsets), self.num_embeddings)
        counts.index_put_((bag, items), counts.new_ones(()), accumulate=True)
        return torch.mm(counts / counts.sum(1, keepdim=True), self.weight)


class _OuterProduct(nn.Module):
    """A bilinear layer as a linear one of all products; the weight transposed to [left and right, out]."""

    def __init__(self, layer: nn.Bilinear):
        super().__init__()
        self.matrix, self.bias = copied(layer.weight.flatten(1).T), copied(layer.bias)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        products = (left.unsqueeze(2) * right.unsqueeze(1)).flatten(1)
        return torch.addmm(self.bias, products, self.matrix)


@case(SAME, "embedding bag as a product", on=recommender)
def bags_by_a_matrix_of_counts(model: nn.Module) -> nn.Module:
    """Bags by a product with their counts; the interaction as a matrix on outer products."""
    return rewritten(recast(model, "items", _CountedBags), "cross", _OuterProduct)


@method_of("moe", SAME, "dense instead of sparse", moe)
def every_expert_on_every_row(self, x: Tensor) -> Tensor:
    """All experts are run; the softmax is over all of them and scaled again to the two chosen."""
    shares = self.router(x).softmax(1)
    best, chosen = shares.topk(2, dim=1)
    weights = torch.zeros_like(shares).scatter(1, chosen, best / best.sum(1, keepdim=True))
    return torch.stack([expert(x) for expert in self.experts], 1).mul(weights[..., None]).sum(1)


@in_place_of("moe", SAME, "experts stacked", moe, "rows_gather_their_experts")
class _StackedExperts(nn.Module):
    """No loop: the experts' weights lie in four tensors, of which each row gathers those of its two."""

    def __init__(self, block: Experts):
        super().__init__()
        self.gate = copied(block.router.weight.T)
        parts = [(expert.up, expert.down) for expert in block.experts]
        self.w1, self.w2 = (copied(torch.stack([pair[i].weight for pair in parts]).mT) for i in (0, 1))
        self.b1, self.b2 = (copied(torch.stack([pair[i].bias for pair in parts])) for i in (0, 1))

    def forward(self, x: Tensor) -> Tensor:
        best, chosen = torch.topk(x @ self.gate, 2)
        hidden = torch.einsum("nd,nkdh->nkh", x, self.w1[chosen]) + self.b1[chosen]
        out = torch.einsum("nkh,nkhd->nkd", F.silu(hidden), self.w2[chosen]) + self.b2[chosen]
        return torch.einsum("nk,nkd->nd", best.softmax(1), out)


@in_place_of("moe", SAME, "rows sorted by expert", moe, "rows_dispatched_in_order")
class _Dispatched(nn.Module):
    """Rows sorted by expert and sent in blocks; all first layers are slices of one matrix."""

    def __init__(self, block: Experts):
        super().__init__()
        self.router = block.router
        experts = list(block.experts)
        self.up = linear_of(
            torch.cat([e.up.weight for e in experts]), torch.cat([e.up.bias for e in experts])
        )
        self.down = nn.ParameterList(copied(e.down.weight) for e in experts)
        self.bias = copied(torch.cat([e.down.bias for e in experts]))

    def forward(self, x: Tensor) -> Tensor:
        best, chosen = self.router(x).topk(2)
        weights = torch.exp(best - best.logsumexp(1, keepdim=True)).flatten()
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=4).tolist()
        rows, results = order // 2, []
        blocks = zip(
            self.up.weight.chunk(4), self.up.bias.chunk(4), self.down, self.bias.chunk(4), strict=True
        )
        for some, (w1, b1, w2, b2) in zip(x[rows].split(counts), blocks, strict=True):
            results.append(F.linear(F.silu(F.linear(some, w1, b1)), w2, b2))
        weighed = torch.cat(results) * weights[order, None]
        return torch.zeros_like(x).index_add_(0, rows, weighed)


@method_of("moe", SAME, "experts under vmap", moe)
def experts_under_vmap(self, x: Tensor) -> Tensor:
    """The experts' layers are mapped over their stacked weights, made at each call from the modules."""

    def run(w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, w1, b1)), w2, b2)

    weights = zip(*(expert.parameters() for expert in self.experts), strict=True)
    out = torch.vmap(run)(*(torch.stack(same) for same in weights))
    best, chosen = self.router(x).topk(2, dim=1)
    rows = torch.arange(len(x), device=x.device)[:, None]
    return (best.softmax(1)[..., None] * out[chosen, rows]).sum(1)
