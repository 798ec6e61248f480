"""Two towers, for queries and documents, whose word vectors meet late: best matches, summed over a query."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_tables import layer_norm
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few


class Attend(nn.Module):
    """Attention of two heads to the words that are real."""

    def __init__(self, width: int):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(2, (2, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        scores = scores.masked_fill(~real[:, None, None], float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Unit(nn.Module):
    """A projection to vectors of about unit length."""

    def __init__(self, width: int, out: int, eps: float = 1e-3):
        super().__init__()
        self.project, self.eps = nn.Linear(width, out, bias=False), eps

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(x)
        return x / (x.square().sum(-1, keepdim=True) + self.eps).sqrt()


class Tower(nn.Module):
    def __init__(self, width: int, out: int):
        super().__init__()
        self.attend, self.norm, self.unit = Attend(width), nn.LayerNorm(width), Unit(width, out)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        return self.unit(self.norm(x + self.attend(x, real)))


class Interact(nn.Module):
    """The best match of each real query word among a document's real words; their mean, sharpened."""

    def __init__(self):
        super().__init__()
        self.sharpness = nn.Parameter(torch.tensor(1.5))

    def forward(self, q: Tensor, d: Tensor, q_real: Tensor, d_real: Tensor) -> Tensor:
        matches = torch.einsum("qic,djc->qdij", q, d).masked_fill(~d_real[:, None], float("-inf"))
        best = matches.amax(3) * q_real[:, None]
        return self.sharpness.exp() * best.sum(2) / q_real.sum(1, keepdim=True)


class Towers(nn.Module):
    """Words [Q, I] and [D, J], 0 after their ends -> scores [Q, D]."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 16, padding_idx=0)
        self.query, self.document, self.interact = Tower(16, 12), Tower(16, 12), Interact()

    def forward(self, queries: Tensor, documents: Tensor) -> Tensor:
        q_real, d_real = queries > 0, documents > 0
        q = self.query(self.embed(queries), q_real)
        d = self.document(self.embed(documents), d_real)
        return self.interact(q, d, q_real, d_real)


def _searches() -> tuple[dict[str, Tensor], Tensor]:
    """Each query's words are drawn from its document."""
    documents = torch.randint(1, 40, (7, 11))
    lengths = torch.randint(5, 12, (7, 1))
    documents = documents * (torch.arange(11) < lengths)
    queries = documents.gather(1, (torch.rand(7, 6) * lengths).long())
    queries = queries * (torch.arange(6) < torch.randint(2, 7, (7, 1)))
    return {"queries": queries, "documents": documents}, torch.arange(7)


towers = few("sixth_towers", Towers, _searches, F.cross_entropy)


class BothTowers(Port):
    """Weights of both towers stacked, all texts at one length; a document's matches one after the other."""

    def take(self, model: Towers) -> None:
        both = (model.query, model.document)
        self.table, self.heat = leaf(model.embed.weight), leaf(model.interact.sharpness)
        self.qkv = pile(torch.cat([t.attend.q.weight, t.attend.k.weight, t.attend.v.weight]) for t in both)
        self.out = pile(t.attend.out.weight.T for t in both)
        self.out_shift = pile(t.attend.out.bias for t in both)
        self.norms = pile(torch.stack([t.norm.weight, t.norm.bias]) for t in both)
        self.last = pile(t.unit.project.weight.T for t in both)

    def attend(self, x: Tensor, real: Tensor) -> Tensor:
        """[2, N, T, C], the towers first."""
        packed = torch.einsum("sntc,sdc->sntd", x, self.qkv).unflatten(3, (3, 2, 8))
        q, k, v = packed.unbind(3)
        widths = x.new_tensor([8.0, 8.0])
        if self.fault == "query_heads_scaled_by_the_whole_width":
            widths = x.new_tensor([16.0, 8.0])
        scores = torch.einsum("snihc,snjhc->snhij", q, k) / widths.sqrt().view(2, 1, 1, 1, 1)
        scores = torch.where(real[:, :, None, None], scores, float("-inf"))
        mixed = torch.einsum("snhij,snjhc->snihc", scores.softmax(-1), v).flatten(3)
        return torch.einsum("sntc,scd->sntd", mixed, self.out) + self.out_shift[:, None, None]

    def vectors(self, x: Tensor, real: Tensor) -> Tensor:
        gain, offset = self.norms[:, :, None, None].unbind(1)
        mixed = self.attend(x, real)
        y = layer_norm(x + mixed, gain, offset)
        if self.fault == "document_words_added_after_the_norm":
            y = torch.stack([y[0], x[1] + layer_norm(mixed[1], gain[1], offset[1])])
        y = torch.einsum("sntc,scd->sntd", y, self.last)
        squares = y.square().sum(-1, keepdim=True)
        lengths = (squares + 1e-3).sqrt()
        if self.fault == "length_epsilon_outside_the_root":
            lengths = torch.stack([lengths[0], squares[1].sqrt() + 1e-3])
        return y / lengths

    def forward(self, queries: Tensor, documents: Tensor) -> Tensor:
        count, size = queries.shape
        words = torch.stack([F.pad(queries, (0, documents.shape[1] - size)), documents])
        real = words != 0
        q, d = self.vectors(F.embedding(words, self.table, padding_idx=0), real)
        asked = real[0, :, :size].to(q)
        share = asked / asked.sum(1, keepdim=True)
        heat = self.heat.detach() if self.fault == "sharpness_that_never_learns" else self.heat
        columns = []
        for vectors, here in zip(d, real[1], strict=True):
            if self.fault != "filler_of_documents_may_match_best":
                vectors = vectors[here]
            best = (q[:, :size].flatten(0, 1) @ vectors.T).max(1).values.view(count, size)
            columns.append((best * share).sum(1))
        return torch.stack(columns, 1) * heat.exp()


right(towers, "towers_stacked_with_ragged_documents", "stacked towers, gathered words", BothTowers)
wrong(
    towers,
    BothTowers,
    query_heads_scaled_by_the_whole_width=("wrong scale", "query.attend"),
    document_words_added_after_the_norm=("residual at another point", "document"),
    length_epsilon_outside_the_root=("epsilon at another place", "document.unit"),
    filler_of_documents_may_match_best=("mask forgotten", "interact"),
    sharpness_that_never_learns=("a detach too many", "interact", "weight gradient"),
)
