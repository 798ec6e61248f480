"""Two ports of a recurrent translator: sorted rows that grow fewer, and both directions in one product."""

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._seventeenth_translator import PAD, UNK, LSTMModel, sentences, smoothed
from bench.held_back._sixth_ports import few

task = few("seventeenth_translator", LSTMModel, sentences, smoothed)
KINDS = "weight_ih", "weight_hh", "bias_ih", "bias_hh"


class Cell(Port):
    """One step; the three gates lie before what is new, input and state have one weight."""

    def take(self, values: list[Tensor]) -> None:
        w, u, b, c = (torch.cat([x.chunk(4)[i] for i in (0, 1, 3, 2)]) for x in values)
        self.weight, self.bias = leaf(torch.cat([w, u], 1).T), pile([b, c])

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        sums = torch.cat([x, h], 1) @ self.weight + self.bias[0] + self.bias[1]
        gates, new = sums.tensor_split([3 * h.shape[1]], 1)
        add, keep, show = gates.sigmoid().chunk(3, 1)
        c = torch.addcmul(keep * c, add, new.tanh())
        return show * c.tanh(), c


class SourceReader(Port):
    """Sort by length, read each step with the rows that are long enough, put all back."""

    def take(self, encoder: nn.Module) -> None:
        self.table, lstm = leaf(encoder.embed_tokens.weight), encoder.lstm
        ends = [f"_l{i}{end}" for i in range(encoder.num_layers) for end in ("", "_reverse")]
        self.cells = nn.ModuleList(Cell([getattr(lstm, kind + end) for kind in KINDS]) for end in ends)

    def run(self, cell: Cell, steps: list[Tensor]) -> tuple[list[Tensor], Tensor, Tensor]:
        h = c = steps[0].new_zeros(max(map(len, steps)), len(cell.weight.T) // 4)
        outs = []
        for x in steps:
            own, kept = cell(x, h[: len(x)], c[: len(x)])
            h, c = torch.cat([own, h[len(x) :]]), torch.cat([kept, c[len(x) :]])
            outs.append(own)
        return outs, h, c

    def forward(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        order = lengths.argsort(descending=True, stable=True)
        sizes, back = (torch.arange(ids.shape[1]) < lengths[:, None]).sum(0).tolist(), order.argsort()
        steps = [F.embedding(ids[order[:n], t], self.table, PAD) for t, n in enumerate(sizes) if n]
        lasts = []
        for onward, backward in zip(self.cells[::2], self.cells[1::2], strict=True):
            (first, h, c), (second, g, d) = self.run(onward, steps), self.run(backward, steps[::-1])
            steps = [torch.cat(pair, 1) for pair in zip(first, second[::-1], strict=True)]
            lasts.append(torch.stack([torch.cat([h, g], 1), torch.cat([c, d], 1)]))
        memory = torch.stack([F.pad(y, (0, 0, 0, len(ids) - len(y))) for y in steps], 1)
        h, c = torch.stack(lasts, 1)
        unsorted = self.fault == "translator_last_cells_left_in_the_order_of_lengths"
        memory = F.pad(memory, (0, 0, 0, ids.shape[1] - len(steps)))
        return memory[back], h[:, back], c if unsorted else c[:, back]


class Attend(Port):
    """General attention of one state on [N, S, C]; the join is a sum of two products."""

    def take(self, attention: nn.Module) -> None:
        self.ask, size = leaf(attention.input_proj.weight.T), attention.input_proj.out_features
        self.got, self.own = (leaf(w.T) for w in attention.output_proj.weight.tensor_split([size], 1))

    def forward(self, h: Tensor, memory: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        last = lengths[:, None] - 1 + (self.fault == "translator_attention_sees_one_place_of_padding")
        scores = torch.bmm(memory, (h @ self.ask)[:, :, None])[:, :, 0]
        weights = torch.where(torch.arange(memory.shape[1]) <= last, scores, -torch.inf).softmax(1)
        context = torch.bmm(weights[:, None], memory)[:, 0]
        return (context @ self.got + h @ self.own).tanh(), weights


class Writer(Port):
    """One word after the other, each scored at once."""

    def take(self, decoder: nn.Module) -> None:
        starts, layers = (decoder.encoder_hidden_proj, decoder.encoder_cell_proj), [*decoder.layers]
        self.table, self.attend = leaf(decoder.embed_tokens.weight), Attend(decoder.attention, self.fault)
        self.start, self.start_b = pile(x.weight.T for x in starts), pile(x.bias for x in starts)
        self.cells = nn.ModuleList(Cell([getattr(x, kind) for kind in KINDS]) for x in layers)
        self.heads = nn.Sequential(deepcopy(decoder.additional_fc), deepcopy(decoder.fc_out))
        if self.fault == "translator_upper_writer_with_its_input_bias_twice":
            top = layers[1]
            self.cells[1] = Cell([top.weight_ih, top.weight_hh, top.bias_ih, top.bias_ih])

    def forward(self, ids: Tensor, memory: Tensor, lengths: Tensor, *lasts: Tensor) -> tuple[Tensor, Tensor]:
        h, c = ([*(x @ w + b)] for x, w, b in zip(lasts, self.start, self.start_b, strict=True))
        fed, scores, seen = torch.zeros_like(h[0]), [], []
        for word in ids.T:
            if scores and not self.training and self.fault == "translator_reads_its_own_words_in_evaluation":
                word = scores[-1].argmax(1)
            fed = fed.detach() if self.fault == "translator_fed_vector_without_gradient" else fed
            x = torch.cat([F.embedding(word, self.table, PAD), fed], 1)
            for i, cell in enumerate(self.cells):
                x, c[i] = cell(x, h[i], c[i])
                h[i] = x
            fed, weights = self.attend(x, memory, lengths)
            scores.append(self.heads(fed))
            seen.append(weights)
        return torch.stack(scores, 1), torch.stack(seen, 1)


class SortedTranslator(Port):
    """A reader of sorted rows and a writer."""

    def take(self, model: LSTMModel) -> None:
        self.reader, self.writer = SourceReader(model.encoder, self.fault), Writer(model.decoder, self.fault)

    def forward(self, src_tokens: Tensor, src_lengths: Tensor, prev_output_tokens: Tensor) -> dict:
        memory, h, c = self.reader(src_tokens, src_lengths)
        logits, attn = self.writer(prev_output_tokens, memory, src_lengths, h, c)
        return {"logits": logits, "attn": attn}


class StackedDirections(Port):
    """Time first; both directions step at once, one of them on turned rows; known products are made early."""

    def take(self, model: LSTMModel) -> None:
        lstm, tail, asked = model.encoder.lstm, model.decoder, model.decoder.attention
        rest = tail.encoder_hidden_proj, tail.encoder_cell_proj, tail.additional_fc, tail.fc_out
        names = [kind + end for end in ("_l0", "_l1") for kind in KINDS]
        self.read = nn.ParameterList(pile(getattr(lstm, x + end) for end in ("", "_reverse")) for x in names)
        self.write = nn.ParameterList(leaf(getattr(x, kind)) for x in tail.layers for kind in KINDS)
        self.tables = nn.ParameterList(leaf(x.embed_tokens.weight) for x in (model.encoder, tail))
        self.flat = nn.ParameterList(leaf(x.weight.T) for x in rest)
        self.shifts = nn.ParameterList(leaf(x.bias) for x in rest)
        self.ask, self.join = leaf(asked.input_proj.weight), leaf(asked.output_proj.weight.T)

    def stepped(self, sums: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        add, keep, new, show = sums.chunk(4, -1)
        c = keep.sigmoid() * c + add.sigmoid() * new.tanh()
        return show.sigmoid() * c.tanh(), c

    def floor(self, i: int, x: Tensor, turn: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        w, u, b, d = self.read[4 * i : 4 * i + 4]
        rows = torch.arange(x.shape[1])
        given = torch.einsum("dsbi,doi->sdbo", torch.stack([x, x[turn, rows]]), w) + (b + d)[:, None]
        h = c = x.new_zeros(*given.shape[1:3], u.shape[2])
        outs = []
        for sums, going in zip(given, real[..., None], strict=True):
            pair = self.stepped(sums + torch.einsum("dbi,doi->dbo", h, u), c)
            h, c = (torch.where(going, new, old) for new, old in zip(pair, (h, c), strict=True))
            outs.append(h)
        onward, back = torch.stack(outs, 1)
        if i or self.fault != "translator_lower_backward_words_left_in_reading_order":
            back = back[turn, rows]
        return torch.cat([onward, back], 2), torch.stack([h, c]).transpose(1, 2).flatten(2)

    def forward(self, src_tokens: Tensor, src_lengths: Tensor, prev_output_tokens: Tensor) -> dict:
        places = torch.arange(src_tokens.shape[1])[:, None]
        real = places < src_lengths
        turn = torch.where(real, src_lengths - 1 - places, places)
        unlearned = UNK if self.fault == "translator_unknown_word_never_learns" else PAD
        x, lasts = F.embedding(src_tokens.T, self.tables[0], unlearned), []
        for i in range(2):
            x, last = self.floor(i, x, turn, real)
            lasts.append(last)
        (h, g), (c, d) = (y @ self.flat[i] + self.shifts[i] for i, y in enumerate(torch.stack(lasts, 1)))
        if self.fault == "translator_hidden_starts_bent_by_tanh":
            h, g = h.tanh(), g.tanh()
        (w, u, b, e), (upper_w, upper_u, *upper_b) = self.write[:4], self.write[4:]
        size, units = self.tables[1].shape[1], x.shape[2]
        words = F.linear(F.embedding(prev_output_tokens.T, self.tables[1], PAD), w[:, :size], b + e)
        keys, got, fed, outs, attn = x @ self.ask, x @ self.join[:units], torch.zeros_like(h), [], []
        for word in words:
            h, c = self.stepped(word + F.linear(fed, w[:, size:]) + F.linear(h, u), c)
            g, d = self.stepped(F.linear(h, upper_w) + F.linear(g, upper_u) + sum(upper_b), d)
            scores = torch.einsum("sbc,bc->sb", keys, g).masked_fill(~real, -torch.inf)
            attn.append(scores.softmax(0))
            fed = (torch.einsum("sb,sbc->bc", attn[-1], got) + g @ self.join[units:]).tanh()
            outs.append(fed)
        y = torch.stack(outs, 1) @ self.flat[2] + self.shifts[2]
        return {"logits": y @ self.flat[3] + self.shifts[3], "attn": torch.stack(attn).permute(2, 0, 1)}


right(task, "translator_of_sorted_rows", "rows that grow fewer, gates fused", SortedTranslator)
right(task, "translator_of_stacked_directions", "turned rows, products made early", StackedDirections)
LEARNING, READER = ("input gradient", "weight gradient"), ("encoder.lstm", "encoder")
FEEDING = ("decoder", "decoder.attention", "decoder.layers.0")
wrong(
    task,
    SortedTranslator,
    translator_last_cells_left_in_the_order_of_lengths=("states not sorted back", READER),
    translator_attention_sees_one_place_of_padding=("a mask off by one", ("decoder.attention", "encoder")),
    translator_fed_vector_without_gradient=("a detach too many", FEEDING, LEARNING),
    translator_reads_its_own_words_in_evaluation=("own words", ("decoder", "decoder.embed_tokens"), "eval"),
    translator_upper_writer_with_its_input_bias_twice=("a weight loaded twice", "decoder.layers.1"),
)
wrong(
    task,
    StackedDirections,
    translator_lower_backward_words_left_in_reading_order=("a sequence not turned back", "encoder.lstm"),
    translator_hidden_starts_bent_by_tanh=("a bend too many", ("decoder.encoder_hidden_proj", "decoder")),
    translator_unknown_word_never_learns=("another padding id", "encoder.embed_tokens", "weight gradient"),
)
