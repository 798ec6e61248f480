"""A tagger from letters to a chain of tags, rewritten with packed gates and products of score matrices."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import method_of
from bench.held_back._fifth_ports import SAME, flattened, pairs
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.tasks import _task


class Highway(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.change, self.gate, self.act = nn.Linear(width, width), nn.Linear(width, width), nn.ReLU()
        nn.init.constant_(self.gate.bias, -1.0)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x).sigmoid()
        return gate * self.act(self.change(x)) + (1 - gate) * x


class Chain(nn.Module):
    """The negative log-likelihood of a sentence's tags in a linear-chain random field, per sentence."""

    def __init__(self, tags: int):
        super().__init__()
        self.start, self.end = (nn.Parameter(0.3 * torch.randn(tags)) for _ in range(2))
        self.moves = nn.Parameter(0.3 * torch.randn(tags, tags))

    def path(self, scores: Tensor, tags: Tensor, real: Tensor) -> Tensor:
        own = scores.gather(2, tags[..., None]).squeeze(2)
        steps = own[:, 1:] + self.moves[tags[:, :-1], tags[:, 1:]]
        last = tags.gather(1, real.sum(1, keepdim=True) - 1).squeeze(1)
        return self.start[tags[:, 0]] + own[:, 0] + (steps * real[:, 1:]).sum(1) + self.end[last]

    def total(self, scores: Tensor, real: Tensor) -> Tensor:
        alpha = self.start + scores[:, 0]
        for t in range(1, scores.shape[1]):
            new = (alpha[:, :, None] + self.moves).logsumexp(1) + scores[:, t]
            alpha = torch.where(real[:, t, None], new, alpha)
        return (alpha + self.end).logsumexp(1)

    def forward(self, scores: Tensor, tags: Tensor, lengths: Tensor) -> Tensor:
        real = torch.arange(scores.shape[1]) < lengths[:, None]
        return self.total(scores, real) - self.path(scores, tags, real)


class Tagger(nn.Module):
    """Letters [N, T, L], 0 where a word has ended; the tags and lengths are inputs too."""

    def __init__(self):
        super().__init__()
        self.letters = nn.Embedding(18, 6, padding_idx=0)
        self.convs = nn.ModuleList(nn.Conv1d(6, 6, size) for size in (2, 3))
        self.highways = nn.ModuleList(Highway(12) for _ in range(2))
        self.lstm = nn.LSTM(12, 8, batch_first=True, bidirectional=True)
        self.score, self.chain = nn.Linear(16, 5), Chain(5)

    def words(self, letters: Tensor) -> Tensor:
        x = self.letters(letters.flatten(0, 1)).mT
        return torch.cat([conv(x).tanh().amax(2) for conv in self.convs], 1).unflatten(0, letters.shape[:2])

    def forward(self, letters: Tensor, tags: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        x = self.words(letters)
        for highway in self.highways:
            x = highway(x)
        scores = self.score(self.lstm(x)[0])
        return {"loss": self.chain(scores, tags, lengths), "scores": scores}


class Packed(Port):
    """Four gates and two directions in one product; the chain's total by a tree of score matrices."""

    def take(self, model: Tagger) -> None:
        self.table = leaf(model.letters.weight)
        self.convs = nn.ModuleList(flattened(conv) for conv in model.convs)
        self.ways = pile(torch.cat([h.gate.weight, h.change.weight]) for h in model.highways)
        self.way_shifts = pile(torch.cat([h.gate.bias, h.change.bias]) for h in model.highways)
        w = dict(model.lstm.named_parameters())
        ends = ("_l0", "_l0_reverse")
        self.gates = pile(torch.cat([w["weight_ih" + e], w["weight_hh" + e]], 1).T for e in ends)
        self.gate_shifts = pile(torch.stack([w["bias_ih" + e], w["bias_hh" + e]]) for e in ends)
        self.score = nn.Linear(16, 5)
        self.score.load_state_dict(model.score.state_dict())
        chain = model.chain
        self.chain = leaf(torch.cat([chain.moves, chain.start[None], chain.end[None]]))

    def words(self, letters: Tensor) -> Tensor:
        filler = None if self.fault == "filler_letter_learns" else 0
        x, found = F.embedding(letters, self.table, padding_idx=filler), []
        for conv in self.convs:
            windows = x.unfold(2, conv["weight"].shape[2], 1)
            y = torch.einsum("ntlcj,dcj->ntld", windows, conv["weight"]) + conv["bias"]
            found.append(y.max(2).values.tanh())
        return torch.cat(found, 2)

    def highway(self, i: int, x: Tensor) -> Tensor:
        gate, change = (x @ self.ways[i].T + self.way_shifts[i]).split(12, 2)
        return torch.lerp(x, change.relu(), gate.sigmoid())

    def read(self, x: Tensor) -> Tensor:
        """Both directions at once, [2, N, T, C], the second in reverse."""
        x = torch.stack([x, x.flip(1)])
        h = c = x.new_zeros(2, len(x[0]), 8)
        states = []
        for t in range(x.shape[2]):
            packed = torch.cat([x[:, :, t], h], 2) @ self.gates + self.gate_shifts.sum(1)[:, None]
            i, f, g, o = packed.chunk(4, 2)
            if self.fault == "gates_of_one_direction_swapped":
                f, o = torch.stack([f[0], o[1]]), torch.stack([o[0], f[1]])
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            states.append(h)
        forth, back = torch.stack(states, 2)
        return torch.cat([forth, back.flip(1)], 2)

    def total(self, scores: Tensor, real: Tensor) -> Tensor:
        moves, start, end = self.chain.split([5, 1, 1])
        nothing = torch.full((5, 5), -1e5).fill_diagonal_(0).to(scores)
        steps = torch.where(real[:, 1:, None, None], moves + scores[:, 1:, None], nothing)
        while steps.shape[1] > 1:
            odd = steps[:, -1:] if steps.shape[1] % 2 else steps[:, :0]
            pairs = steps[:, : steps.shape[1] // 2 * 2].unflatten(1, (-1, 2))
            joined = (pairs[:, :, 0, :, :, None] + pairs[:, :, 1, None]).logsumexp(3)
            steps = torch.cat([joined, odd], 1)
        return ((start + scores[:, 0])[:, :, None] + steps[:, 0] + end).flatten(1).logsumexp(1)

    def path(self, scores: Tensor, tags: Tensor, real: Tensor) -> Tensor:
        chosen = F.one_hot(tags, 5).to(scores) * real[..., None]
        moves, start, end = self.chain[:5], self.chain[5], self.chain[6]
        pairs = torch.einsum("nti,ntj,ij->n", chosen[:, :-1], chosen[:, 1:], moves)
        last = chosen[torch.arange(len(tags)), real.sum(1) - 1]
        if self.fault == "end_scored_at_the_last_column":
            last = F.one_hot(tags[:, -1], 5).to(scores)
        return (chosen * scores).sum((1, 2)) + pairs + chosen[:, 0] @ start + last @ end

    def forward(self, letters: Tensor, tags: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        x = self.words(letters)
        for i in range(2):
            x = self.highway(i, x)
        scores = self.score(self.read(x))
        real = torch.arange(tags.shape[1]).expand_as(tags) < lengths.unsqueeze(1)
        return {"scores": scores, "loss": self.total(scores, real) - self.path(scores, tags, real)}


def _sentences() -> tuple[dict[str, Tensor], Tensor]:
    letters = torch.randint(1, 18, (6, 7, 5))
    letters[torch.arange(5) >= torch.randint(1, 6, (6, 7, 1))] = 0
    tags = letters[..., 0] % 5
    return {"letters": letters, "tags": tags, "lengths": torch.randint(3, 8, (6,))}, tags


tagger = _task("fifth_tagger", Tagger, _sentences, lambda outputs, _: outputs["loss"].mean() / 5)
pairs(SAME, tagger, Packed, tagger_by_packed_gates="packed gates, a loop as a tree")
wrong(
    tagger,
    Packed,
    filler_letter_learns=("frozen row that learns", "letters", "weight gradient"),
    gates_of_one_direction_swapped=("swapped gates", "lstm"),
    end_scored_at_the_last_column=("mask forgotten", "chain"),
)


@method_of("chain", SAME, "sums of exponentials, scaled at each step", tagger, method="total")
def total_by_scaled_sums(self: Chain, scores: Tensor, real: Tensor) -> Tensor:
    alpha, moves, logs = (self.start + scores[:, 0]).exp(), self.moves.exp(), 0.0
    for t in range(1, scores.shape[1]):
        size = alpha.sum(1, keepdim=True)
        alpha, logs = alpha / size, logs + size.log().squeeze(1)
        alpha = torch.where(real[:, t, None], (alpha @ moves) * scores[:, t].exp(), alpha)
    return (alpha @ self.end.exp()).log() + logs
