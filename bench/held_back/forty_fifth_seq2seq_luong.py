"""Two ports of a pointer-generator: a tree of stepped cells, time first, and one class of packed weights."""

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _forty_fifth_seq2seq_luong as plain
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import Gates, few

EMBEDDED, ENCODED, LAYERS = plain.EMBEDDED, plain.ENCODED, plain.LAYERS
VOCABULARY, EXTRA, Pair = plain.VOCABULARY, plain.EXTRA, tuple[Tensor, Tensor]
task = few("forty_fifth_seq2seq_luong", plain.PointerGenerator, plain.sentences, plain.masked_likelihood)


class BothWays(nn.Module):
    """A layer of the encoder, [T, N, C] -> [T, N, 2 H]; a state waits where a sentence has ended."""

    def __init__(self, w: dict[str, Tensor], layer: int):
        super().__init__()
        self.right, self.left = Gates(w, end=f"_l{layer}"), Gates(w, end=f"_l{layer}_reverse")
        self.waits = True

    def walk(self, cell: Gates, x: Tensor, alive: Tensor, order: list[int]) -> tuple[list[Tensor], Tensor]:
        h, found = x.new_zeros(x.shape[1], ENCODED), {}
        for t in order:
            h = torch.where(alive[t], cell(x[t], h), h)
            found[t] = h
        return [found[t] for t in sorted(found)], h

    def forward(self, x: Tensor, alive: Tensor) -> tuple[Tensor, Tensor]:
        order = list(range(len(x)))
        there, last = self.walk(self.right, x, alive, order)
        back, first = self.walk(self.left, x, alive if self.waits else alive | True, order[::-1])
        return torch.cat([torch.stack(there), torch.stack(back)], 2), torch.cat([last, first], 1)


class Look(nn.Module):
    """Weights of the source's words, which count how often each was looked at."""

    def __init__(self, key: nn.Module, attention: nn.Module):
        super().__init__()
        self.key, self.query = deepcopy(key), deepcopy(attention.decode_proj)
        self.seen, self.score = leaf(attention.W_c.weight[:, 0]), leaf(attention.v.weight[0])
        self.late = False

    def forward(self, h: Tensor, source: Pair, alive: Tensor, past: Tensor) -> tuple[Tensor, ...]:
        memory, keys = source
        level = (keys + self.query(h) + past[..., None] * self.seen).tanh() @ self.score
        weights = level.masked_fill(~alive, -torch.inf).softmax(0)
        skip = self.late and not self.training and not past.any()
        return (weights[..., None] * memory).sum(0), weights, past if skip else past + weights


class PointerTree(Port):
    """Time first; cells by hand under masks; copies through one-hot rows."""

    def take(self, model: plain.PointerGenerator) -> None:
        encoder, decoder, w = model.encoder, model.decoder, dict(model.encoder.gru.named_parameters())
        self.words = leaf(encoder.embedding.weight)
        self.listen = nn.ModuleList(BothWays(w, i) for i in range(LAYERS))
        self.bridges = nn.ModuleList(map(deepcopy, model.reduce_state.reduce_h))
        self.feed, self.look = deepcopy(decoder.x_context), Look(encoder.W_h, decoder.attention_network)
        cells = [dict(cell.named_parameters()) for cell in decoder.cells]
        early = self.fault == "seq2seq_luong_second_cell_resets_before_the_product"
        self.cells = nn.ModuleList(Gates(cell, early and i == 1) for i, cell in enumerate(cells))
        self.gate, self.low, self.high = map(deepcopy, (decoder.p_gen_linear, decoder.out1, decoder.out2))
        self.listen[0].waits = self.fault != "seq2seq_luong_first_layer_reads_padding_backwards"
        self.look.late = self.fault == "seq2seq_luong_coverage_skips_first_step_in_evaluation"

    def forward(self, enc_batch: Tensor, enc_lens: Tensor, enc_extended: Tensor, dec_batch: Tensor) -> Pair:
        memory, states = self.words[enc_batch.T], []
        alive = torch.arange(len(memory), device=enc_lens.device)[:, None] < enc_lens
        for layer, bridge in zip(self.listen, self.bridges, strict=True):
            memory, ends = layer(memory, alive[..., None])
            states.append(bridge(ends).tanh())
        keys = self.look.key(memory)
        spots = F.one_hot(enc_extended.T, VOCABULARY + EXTRA).to(memory)
        context, past = torch.zeros_like(memory[0]), torch.zeros_like(memory[..., 0])
        found, again = [], []
        for word in self.words[dec_batch.T]:
            if self.fault == "seq2seq_luong_fed_context_is_detached":
                context = context.detach()
            h = x = self.feed(torch.cat([context, word], 1))
            for i, cell in enumerate(self.cells):
                states[i] = h = cell(h, states[i])
            context, weights, later = self.look(h, (memory, keys), alive, past)
            gate = self.gate(torch.cat([context, h, x], 1))
            said = self.high(self.low(torch.cat([h, context], 1))).log_softmax(1) + F.logsigmoid(gate)
            copied = torch.einsum("tn,tnv->nv", weights, spots) * torch.sigmoid(-gate)
            found.append(F.pad(said.exp(), (0, EXTRA)) + copied)
            again.append(torch.minimum(weights, past).sum(0))
            past = later
        return torch.stack(found, 1), torch.stack(again, 1)


def packed(layer: nn.Linear) -> nn.Parameter:
    return leaf(torch.cat([layer.weight.T, layer.bias[None]]))


def gates(w: dict[str, Tensor], end: str = "") -> Tensor:
    rows = w["weight_ih" + end].T, w["weight_hh" + end].T, w["bias_ih" + end][None], w["bias_hh" + end][None]
    return torch.cat(rows)


def cell(x: Tensor, h: Tensor, rows: Tensor) -> Tensor:
    """A gated step of [..., N, C] under [..., C + H + 2, 3 H]."""
    wide, high = x.shape[-1], h.shape[-1]
    a = x @ rows[..., :wide, :] + rows[..., -2:-1, :]
    b = h @ rows[..., wide : wide + high, :] + rows[..., -1:, :]
    (r, z, n), (s, y, m) = a.split(high, -1), b.split(high, -1)
    keep = (z + y).sigmoid()
    return keep * h + (1 - keep) * (n + m * (r + s).sigmoid()).tanh()


def times(x: Tensor, rows: Tensor) -> Tensor:
    return x @ rows[:-1] + rows[-1]


class PackedPointer(Port):
    """Both directions at once over sources that are turned within their lengths."""

    def take(self, model: plain.PointerGenerator) -> None:
        decoder, w = model.decoder, dict(model.encoder.gru.named_parameters())
        look = decoder.attention_network
        self.words, self.w = leaf(model.encoder.embedding.weight), nn.ParameterList()
        self.w.extend(pile(gates(w, f"_l{i}{end}") for end in ("", "_reverse")) for i in range(LAYERS))
        self.w.extend(leaf(gates(dict(each.named_parameters()))) for each in decoder.cells)
        self.w.extend(map(packed, (decoder.x_context, decoder.p_gen_linear, decoder.out1, decoder.out2)))
        self.join = pile(map(packed, model.reduce_state.reduce_h))
        look = decoder.attention_network
        rows = model.encoder.W_h.weight.T, look.decode_proj.weight.T, look.decode_proj.bias[None]
        self.look = leaf(torch.cat([*rows, look.W_c.weight.T, look.v.weight]))

    def attend(self, h: Tensor, keys: Tensor, alive: Tensor, past: Tensor) -> Tensor:
        query, (start, seen, score) = self.look[2 * ENCODED : -3], self.look[-3:]
        level = torch.tanh(keys + (h @ query + start)[:, None] + past[..., None] * seen) @ score
        low = -7.0 if self.fault == "seq2seq_luong_padding_masked_by_minus_seven" else -torch.inf
        level = torch.where(alive, level, level + low)
        return torch.exp(level - level.logsumexp(1, True))

    def forward(self, enc_batch: Tensor, enc_lens: Tensor, enc_extended: Tensor, dec_batch: Tensor) -> Pair:
        (n, long), each = enc_batch.shape, torch.arange(len(enc_batch), device=enc_batch.device)[:, None]
        place, ends = torch.arange(long, device=enc_batch.device), enc_lens[:, None]
        alive, turn = place < ends, torch.where(place < ends, ends - 1 - place, place)
        memory, states = self.words[enc_batch], []
        for i in range(LAYERS):
            both, h, steps = torch.stack([memory, memory[each, turn]]), memory.new_zeros(2, n, ENCODED), []
            for t in range(long):
                h = cell(both[:, :, t], h, self.w[i])
                steps.append(h)
            both = torch.stack(steps, 2)
            pair = [*both[:, each[:, 0], enc_lens - 1]]
            if self.fault == "seq2seq_luong_second_bridge_joins_backward_first" and i == 1:
                pair = pair[::-1]
            states.append(times(torch.cat(pair, 1), self.join[i]).tanh())
            memory = torch.cat([both[0], both[1][each, turn]], 2)
        keys, found, again = memory @ self.look[: 2 * ENCODED], [], []
        context, past = memory.new_zeros(n, 2 * ENCODED), memory.new_zeros(n, long)
        feed, gate, low, high = self.w[2 * LAYERS :]
        for y in dec_batch.T:
            h = x = context @ feed[: 2 * ENCODED] + self.words[y] @ feed[-EMBEDDED - 1 : -1] + feed[-1]
            for i in range(LAYERS):
                states[i] = h = cell(h, states[i], self.w[LAYERS + i])
            weights = self.attend(h, keys, alive, past)
            context = torch.einsum("nt,ntc->nc", weights, memory)
            p = times(torch.cat([context, h, x], 1), gate).sigmoid()
            said = times(times(torch.cat([h, context], 1), low), high).softmax(1)
            copies, dist = weights - p * weights, F.pad(p * said, (0, EXTRA))
            summed = self.fault != "seq2seq_luong_copied_word_said_twice_counts_once"
            copied = torch.zeros_like(dist).index_put((each, enc_extended), copies, accumulate=summed)
            found.append(dist + copied)
            fixed = self.fault == "seq2seq_luong_coverage_loss_holds_the_coverage_fixed"
            again.append(torch.minimum(weights, past.detach() if fixed else past).sum(1))
            past = past + weights
        return torch.stack(found, 1), torch.stack(again, 1)


SLOPES, LOOK = ("input gradient", "weight gradient"), "decoder.attention_network"
right(task, "seq2seq_luong_tree_of_cells", "a tree, cells by hand under masks, one-hot copies", PointerTree)
right(task, "seq2seq_luong_of_packed_weights", "packed weights, both directions in one batch", PackedPointer)
wrong(
    task,
    PointerTree,
    seq2seq_luong_first_layer_reads_padding_backwards=("padding is read", ("encoder.gru", "encoder")),
    seq2seq_luong_second_cell_resets_before_the_product=("another order in a gate", "decoder.cells.1"),
    seq2seq_luong_coverage_skips_first_step_in_evaluation=("a sum started late in eval", LOOK, "eval"),
    seq2seq_luong_fed_context_is_detached=("detach", ("decoder", ""), SLOPES),
)
wrong(
    task,
    PackedPointer,
    seq2seq_luong_second_bridge_joins_backward_first=("another order of halves", "reduce_state"),
    seq2seq_luong_padding_masked_by_minus_seven=("a soft mask", LOOK),
    seq2seq_luong_copied_word_said_twice_counts_once=("overwritten, not added", "decoder"),
    seq2seq_luong_coverage_loss_holds_the_coverage_fixed=("detach", "", SLOPES),
)
