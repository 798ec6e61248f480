"""Two ports of a small BiLSTM-CRF: a tree of sweeps with masked states, and one class of packed weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._thirty_fifth_bilstm_crf import BiLSTMCRF, likelihood_and_marginals, sentences

task = few("thirty_fifth_bilstm_crf", BiLSTMCRF, sentences, likelihood_and_marginals)
ENDS = "_l0", "_l0_reverse"


class Table(nn.Module):
    def __init__(self, embedding: nn.Embedding):
        super().__init__()
        self.padding, self.rows = leaf(embedding.weight[:1]), leaf(embedding.weight[1:])

    def forward(self, index: Tensor) -> Tensor:
        return torch.cat([self.padding.detach(), self.rows])[index]


class Speller(nn.Module):
    def __init__(self, cnn: nn.Module, everywhere: bool):
        super().__init__()
        self.letters, self.everywhere = Table(cnn.char_embeds), everywhere
        self.kernels = nn.ParameterList(leaf(conv.weight.permute(2, 1, 0)) for conv in cnn.convs)
        self.offset = leaf(torch.cat([conv.bias for conv in cnn.convs]))

    def forward(self, chars: Tensor) -> Tensor:
        x, found, here = self.letters(chars), [], chars[..., None] > 0
        for kernel in self.kernels:
            windows = F.pad(x, (0, 0, *[len(kernel) // 2] * 2)).unfold(2, len(kernel), 1)
            found.append(torch.einsum("ntlck,kco->ntlo", windows, kernel))
        y = torch.tanh(torch.cat(found, 3) + self.offset)
        return (y if self.everywhere else y.where(here, -2)).amax(2) * here.any(2)


class Sweep(nn.Module):
    def __init__(self, rnn: nn.LSTM, end: str):
        super().__init__()
        names = "weight_ih", "weight_hh", "bias_ih", "bias_hh"
        self.w, self.u, self.b, self.d = (leaf(getattr(rnn, name + end).t()) for name in names)
        self.backwards, self.careless, self.cut = "reverse" in end, False, False

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        steps, states = range(x.shape[1]), {}
        h = c = x.new_zeros(len(x), len(self.u))
        given = x @ self.w + self.b
        for t in reversed(steps) if self.backwards else steps:
            let, forget, new, show = (given[:, t] + h @ self.u + self.d).chunk(4, 1)
            fresh = forget.sigmoid() * (c.detach() if self.cut else c) + let.sigmoid() * new.tanh()
            moves = real[:, t] | self.careless
            c = fresh.where(moves, c)
            h = (show.sigmoid() * c.tanh()).where(moves, h)
            states[t] = h
        return torch.stack([states[t] for t in steps], 1) * real


class Chain(nn.Module):
    def __init__(self, crf: nn.Module):
        super().__init__()
        self.first, self.last = leaf(crf.start_transitions), leaf(crf.end_transitions)
        self.into, self.greedy = leaf(crf.transitions.T), False

    def gather(self, scores: Tensor) -> Tensor:
        if self.greedy and not self.training:
            return scores.amax(2)
        return scores.logsumexp(2)

    def forward(self, scores: Tensor, tags: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        count, ahead = scores.shape[1], [self.first + scores[:, 0]]
        behind = [self.last + 0 * scores[:, 0]]
        for t in range(1, count):
            new = self.gather(ahead[-1][:, None] + self.into) + scores[:, t]
            ahead.append(new.where(real[:, t], ahead[-1]))
        for t in reversed(range(1, count)):
            new = torch.logsumexp((scores[:, t] + behind[-1])[..., None] + self.into, 1)
            behind.append(new.where(real[:, t], behind[-1]))
        both = torch.stack(ahead, 1) + torch.stack(behind[::-1], 1)
        total = (ahead[-1] + self.last).logsumexp(1)
        gold = F.one_hot(tags, len(self.first)).to(scores) * real
        pairs = torch.einsum("ntj,nti,ji->n", gold[:, 1:], gold[:, :-1], self.into)
        final = gold * ~F.pad(real[:, 1:], (0, 0, 0, 1))
        path = (gold * scores).sum((1, 2)) + gold[:, 0] @ self.first + pairs + final.sum(1) @ self.last
        return total - path, (both - both.logsumexp(2, True)).exp() * real


class TaggerOfSweeps(Port):
    """A tree: tables, a speller, four sweeps of one direction each, and a chain."""

    def take(self, model: BiLSTMCRF) -> None:
        self.lexicon = Table(model.word_embeds)
        self.speller = Speller(model.char_cnn, self.fault == "bilstm_crf_letters_max_over_the_padding_too")
        self.sweeps = nn.ModuleList(nn.ModuleList(Sweep(x.rnn, y) for y in ENDS) for x in model.lstm)
        self.sweeps[0][1].careless = self.fault == "bilstm_crf_first_layer_backward_starts_in_the_padding"
        self.sweeps[1][0].cut = self.fault == "bilstm_crf_second_layer_forward_cell_detached_at_each_step"
        self.judge, self.chain = model.hidden2tag, Chain(model.crf)
        self.chain.greedy = self.fault == "bilstm_crf_alphas_by_maximum_in_evaluation"

    def forward(self, words: Tensor, chars: Tensor, case: Tensor, tags: Tensor) -> tuple[Tensor, Tensor]:
        real = words[..., None] > 0
        x = torch.cat([self.lexicon(words), self.speller(chars), case], 2)
        for there, back in self.sweeps:
            x = torch.cat([there(x, real), back(x, real)], 2)
        return self.chain(self.judge(x), tags, real)


def packed(rnn: nn.LSTM, end: str) -> Tensor:
    w = {key: x if x.ndim == 2 else x[:, None] for key, x in rnn.named_parameters()}
    return torch.cat([w[key + end] for key in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")], 1).T


class PackedTagger(Port):
    """Packed weights; both directions in one loop over turned sentences; a chain of scaled likelihoods."""

    def take(self, model: BiLSTMCRF) -> None:
        cnn, convs, crf = model.char_cnn, model.char_cnn.convs, model.crf
        self.words, self.chars = leaf(model.word_embeds.weight), leaf(cnn.char_embeds.weight)
        self.taps = nn.ParameterList(leaf(torch.column_stack([x.weight.flatten(1), x.bias])) for x in convs)
        self.cells = nn.ParameterList(pile(packed(x.rnn, y) for y in ENDS) for x in model.lstm)
        self.score = leaf(torch.cat([model.hidden2tag.weight, model.hidden2tag.bias[:, None]], 1))
        self.links = leaf(torch.vstack([crf.transitions, crf.start_transitions, crf.end_transitions]))

    def spell(self, chars: Tensor) -> Tensor:
        x = F.embedding(chars.flatten(0, 1), self.chars, 0).mT
        x = x.detach() if self.fault == "bilstm_crf_letters_frozen" else x
        found, blank = [], chars.flatten(0, 1)[:, None] == 0
        for i, taps in enumerate(self.taps):
            kernel = taps[:, :-1].unflatten(1, (x.shape[1], -1))
            if self.fault == "bilstm_crf_wide_letter_filters_reversed" and i == 1:
                kernel = kernel.flip(2)
            size = kernel.shape[2]
            columns = F.unfold(x[..., None], (size, 1), padding=(size // 2, 0))
            found.append((kernel.flatten(1) @ columns + taps[:, -1:]).masked_fill(blank, -99).amax(2).tanh())
        return torch.cat(found, 1).unflatten(0, chars.shape[:2])

    def layer(self, x: Tensor, cells: Tensor, turned: Tensor) -> Tensor:
        size, width, rows = x.shape[2], cells.shape[2] // 4, torch.arange(len(x), device=x.device)[:, None]
        ready = torch.stack([x, x[rows, turned]]) @ cells[:, None, :size] + cells[:, None, -2:].sum(2, True)
        held, out = cells[:, size:-2], []
        h = c = x.new_zeros(2, len(x), width)
        for t in range(x.shape[1]):
            i, f, g, o = (ready[:, :, t] + h @ held).split(width, 2)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            out.append(h)
        there, back = torch.stack(out, 2)
        return torch.cat([there, back[rows, turned]], 2)

    def forward(self, words: Tensor, chars: Tensor, case: Tensor, tags: Tensor) -> tuple[Tensor, Tensor]:
        count, place = (words > 0).sum(1), torch.arange(words.shape[1], device=words.device)
        turned = torch.where(place < count[:, None], count[:, None] - 1 - place, place)
        x = torch.cat([F.embedding(words, self.words, 0), self.spell(chars), case], 2)
        for cells in self.cells:
            x = self.layer(x, cells, turned)
        e, rows = x @ self.score[:, :-1].T + self.score[:, -1], torch.arange(len(x), device=x.device)
        move, start, end = self.links[:-2], self.links[-2], self.links[-1]
        own, within = e.gather(2, tags[..., None])[..., 0], place < count[:, None]
        late = 1 if self.fault == "bilstm_crf_gold_score_counts_a_transition_into_the_padding" else 0
        step = move[tags[:, :-1], tags[:, 1:]] * (place[1:] < count[:, None] + late)
        gold = start[tags[:, 0]] + (own * within).sum(1) + step.sum(1) + end[tags[rows, count - 1]]
        likely, links = e.exp(), move.exp()
        tiny = 1e-3 if self.fault == "bilstm_crf_small_number_added_within_the_log_of_sums" else 0
        a, total, ahead = start.exp() * likely[:, 0], 0, []
        for t in range(e.shape[1]):
            if t:
                a = torch.where(within[:, t, None], (ahead[-1] @ links) * likely[:, t], ahead[-1])
            size = a.sum(1, True)
            total = total + (size[:, 0] + tiny * within[:, t]).log()
            ahead.append(a / size)
        b, behind = end.exp().expand_as(a), []
        for t in reversed(range(e.shape[1])):
            behind.append(b / b.sum(1, True))
            b = torch.where(within[:, t, None], (likely[:, t] * behind[-1]) @ links.T, behind[-1])
        share = torch.stack(ahead, 1) * torch.stack(behind[::-1], 1)
        return total + (ahead[-1] @ end.exp()).log() - gold, share / share.sum(2, True) * within[..., None]


SLOPES = ("input gradient", "weight gradient")
right(task, "bilstm_crf_of_sweeps", "a tree, masked states, channels last", TaggerOfSweeps)
right(task, "bilstm_crf_of_packed_weights", "packed weights, turned sentences, scaled sums", PackedTagger)
wrong(
    task,
    TaggerOfSweeps,
    bilstm_crf_letters_max_over_the_padding_too=("a mask left out", "char_cnn"),
    bilstm_crf_first_layer_backward_starts_in_the_padding=("a mask left out", "lstm.0"),
    bilstm_crf_second_layer_forward_cell_detached_at_each_step=("detach", "lstm.1.rnn", SLOPES),
    bilstm_crf_alphas_by_maximum_in_evaluation=("maximum in eval", "crf", "eval"),
)
wrong(
    task,
    PackedTagger,
    bilstm_crf_letters_frozen=("detach", "char_cnn.char_embeds", "weight gradient"),
    bilstm_crf_wide_letter_filters_reversed=("taps reversed", "char_cnn.convs.1"),
    bilstm_crf_gold_score_counts_a_transition_into_the_padding=("a mask off by one", "crf"),
    bilstm_crf_small_number_added_within_the_log_of_sums=("a number added", "crf"),
)
