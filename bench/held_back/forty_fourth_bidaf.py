"""Two ports of a small BiDAF: a tree of one-way readers and fused layers, and one class of packed weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._forty_fourth_bidaf import FILTERS, HIDDEN, WORD, BiDAF, both_ends, passages
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("forty_fourth_bidaf", BiDAF, passages, both_ends)
SIDES, KINDS = ("", "_reverse"), ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


class Lane(nn.Module):
    def __init__(self, gate: nn.Linear, new: nn.Linear):
        super().__init__()
        self.weight, self.crossed = leaf(torch.cat([gate.weight, new.weight])), False
        self.bias = leaf(torch.cat([gate.bias, new.bias]))

    def forward(self, x: Tensor) -> Tensor:
        gate, new = F.linear(x, self.weight, self.bias).chunk(2, -1)
        return torch.lerp(new.relu(), x, torch.sigmoid(gate if self.crossed else -gate))


class Lexicon(nn.Module):
    def __init__(self, emb: nn.Module):
        super().__init__()
        self.words, self.letters = leaf(emb.embed.weight), leaf(emb.char_cnn.embed.weight)
        conv = emb.char_cnn.conv
        self.kernel, self.offset = leaf(conv.weight.transpose(1, 2).flatten(1).T), leaf(conv.bias)
        of_word, of_letters = emb.proj.weight.split([WORD, FILTERS], 1)
        self.of_word, self.of_letters = leaf(of_word.T), leaf(of_letters.T)
        self.lanes = nn.Sequential(*map(Lane, emb.hwy.gates, emb.hwy.transforms))

    def forward(self, words: Tensor, letters: Tensor) -> Tensor:
        x = F.pad(self.letters[letters], (0, 0, 1, 1))
        x = torch.cat([x[..., :-2, :], x[..., 1:-1, :], x[..., 2:, :]], -1) @ self.kernel + self.offset
        x = x.where(letters[..., None] > 0, -torch.inf).amax(-2).clamp(min=0)
        return self.lanes(self.words[words] @ self.of_word + x @ self.of_letters)


class Reader(nn.Module):
    def __init__(self, rnn: nn.LSTM, layer: int, side: str):
        super().__init__()
        w, u, b, c = (getattr(rnn, f"{kind}_l{layer}{side}") for kind in KINDS)
        self.weight, self.biases = leaf(torch.cat([w, u], 1)), pile((b, c))
        self.backwards = bool(side)

    def forward(self, x: Tensor, mask: Tensor, through: bool = False) -> Tensor:
        given = F.linear(x, self.weight[:, :-HIDDEN], self.biases.sum(0))
        h = c = x.new_zeros(len(x), HIDDEN)
        found = [h] * x.shape[1]
        for t in reversed(range(x.shape[1])) if self.backwards else range(x.shape[1]):
            i, f, g, o = (given[:, t] + h @ self.weight[:, -HIDDEN:].T).chunk(4, -1)
            new = f.sigmoid() * c + i.sigmoid() * g.tanh()
            here = torch.ones_like(mask[:, t, None]) if through else mask[:, t, None]
            c, h = torch.where(here, new, c), torch.where(here, o.sigmoid() * new.tanh(), h)
            found[t] = h
        return torch.stack(found, 1) * mask[..., None]


def pair(rnn: nn.LSTM, layer: int = 0) -> nn.ModuleList:
    return nn.ModuleList(Reader(rnn, layer, side) for side in SIDES)


def both(readers: nn.ModuleList, x: Tensor, mask: Tensor, through: bool = False) -> Tensor:
    return torch.cat([readers[0](x, mask), readers[1](x, mask, through)], -1)


class Meeting(nn.Module):
    def __init__(self, att: nn.Module):
        super().__init__()
        self.weight = leaf(torch.cat([att.c_weight[:, 0], att.q_weight[:, 0], att.cq_weight[0, 0]]))
        self.silent = False

    def forward(self, c: Tensor, q: Tensor, c_mask: Tensor, q_mask: Tensor) -> Tensor:
        one, two = torch.broadcast_tensors(c[:, :, None], q[:, None])
        likeness = torch.cat([one, two, one * two], -1) @ self.weight
        likeness = likeness.masked_fill(~q_mask[:, None], -torch.inf)
        salient = likeness.amax(2).masked_fill(~c_mask, -torch.inf).softmax(1)
        salient = salient.detach() if self.silent else salient
        a, b = likeness.softmax(2) @ q, (salient[..., None] * c).sum(1, keepdim=True)
        return torch.cat([c, a, c * a, c * b], -1)


class BidafOfReaders(Port):
    def take(self, model: BiDAF) -> None:
        out = model.out
        self.lexicon, self.context, self.meeting = Lexicon(model.emb), pair(model.enc.rnn), Meeting(model.att)
        self.lexicon.lanes[1].crossed = self.fault == "bidaf_second_highway_swaps_carry_and_transform"
        self.meeting.silent = self.fault == "bidaf_query_to_context_attention_detached"
        self.model, self.last = nn.ModuleList(pair(model.mod.rnn, i) for i in (0, 1)), pair(out.rnn.rnn)
        self.first_end = leaf(torch.cat([out.att_linear_1.weight[0], out.mod_linear_1.weight[0]]))
        self.other_end = leaf(torch.cat([out.att_linear_2.weight[0], out.mod_linear_2.weight[0]]))

    def forward(self, cw_idxs: Tensor, cc_idxs: Tensor, qw_idxs: Tensor, qc_idxs: Tensor) -> tuple:
        here, asked = cw_idxs > 0, qw_idxs > 0
        c = both(self.context, self.lexicon(cw_idxs, cc_idxs), here)
        through = self.fault == "bidaf_question_read_backwards_from_its_padding"
        q = both(self.context, self.lexicon(qw_idxs, qc_idxs), asked, through)
        g = self.meeting(c, q, here, asked)
        m = both(self.model[1], both(self.model[0], g, here), here)
        start, end = torch.cat([g, m], -1) @ self.first_end, torch.cat([g, both(self.last, m, here)], -1)
        low = -8.0 if self.fault == "bidaf_start_logits_of_padding_at_minus_eight" else -1e30
        end = (end @ self.other_end).masked_fill(~here, -1e30)
        return start.masked_fill(~here, low).softmax(1), end.softmax(1)


def packed(rnn: nn.LSTM, layer: int) -> nn.Parameter:
    """Both directions of a layer: the rows of [x, h, 1, 1]."""
    sides = [[getattr(rnn, f"{kind}_l{layer}{side}") for kind in KINDS] for side in SIDES]
    return pile(torch.cat([w, u, b[:, None], c[:, None]], 1).T for w, u, b, c in sides)


class PackedBidaf(Port):
    def take(self, model: BiDAF) -> None:
        emb, att, out = model.emb, model.att, model.out
        tables, conv = (emb.embed.weight, emb.char_cnn.embed.weight, emb.proj.weight), emb.char_cnn.conv
        self.words, self.letters, self.proj = map(leaf, tables)
        self.filters = leaf(torch.cat([conv.weight.flatten(1), conv.bias[:, None]], 1))
        layers = (*emb.hwy.transforms, *emb.hwy.gates)
        self.lanes = pile(torch.cat([x.weight, x.bias[:, None]], 1) for x in layers)
        rnns = (model.enc.rnn, 0), (model.mod.rnn, 0), (model.mod.rnn, 1), (out.rnn.rnn, 0)
        self.w = nn.ParameterList(packed(*each) for each in rnns)
        self.alike = pile((att.c_weight.flatten(), att.q_weight.flatten(), att.cq_weight.flatten()))
        self.of_g = leaf(torch.cat([out.att_linear_1.weight, out.att_linear_2.weight]))
        self.of_m = leaf(torch.cat([out.mod_linear_1.weight, out.mod_linear_2.weight]))

    def embedded(self, words: Tensor, letters: Tensor) -> Tensor:
        kernel = self.filters[:, :-1].unflatten(1, (-1, 3))
        parts = torch.einsum("vd,odk->vko", self.letters, kernel)[letters]
        y = parts[..., 1, :] + self.filters[:, -1]
        y = y + F.pad(parts[..., :-1, 0, :], (0, 0, 1, 0)) + F.pad(parts[..., 1:, 2, :], (0, 0, 0, 1))
        if self.fault != "bidaf_characters_maximum_over_padding_too":
            y = y * (letters > 0)[..., None]
        x = torch.cat([self.words[words], y.amax(2).relu()], 2) @ self.proj.T
        for new, gate in zip(self.lanes[:2], self.lanes[2:], strict=True):
            share = torch.sigmoid(x @ gate[:, :-1].T + gate[:, -1])
            x = x + share * ((x @ new[:, :-1].T + new[:, -1]).relu() - x)
        return x

    def read(self, which: int, x: Tensor, mask: Tensor) -> Tensor:
        turn = (mask.sum(1, keepdim=True) - 1 - torch.arange(x.shape[1], device=x.device)).clamp(min=0)
        rows, w = torch.arange(len(x), device=x.device)[:, None], self.w[which]
        kernel, again, biases = w.split([x.shape[2], HIDDEN, 2], 1)
        bias = biases.sum(1)
        if self.fault == "bidaf_second_modelling_layer_backwards_lacks_its_hidden_bias" and which == 2:
            bias = torch.stack([bias[0], biases[1, 0]])
        given = torch.stack([x, x[rows, turn]]) @ kernel[:, None] + bias[:, None, None]
        h, c, found = x.new_zeros(2, len(x), HIDDEN), 0, []
        for now in given.unbind(2):
            i, f, g, o = torch.baddbmm(now, h, again).split(HIDDEN, 2)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            found.append(h)
        there, back = torch.stack(found, 2)
        return torch.cat([there, back[rows, turn]], 2) * mask[..., None]

    def forward(self, cw_idxs: Tensor, cc_idxs: Tensor, qw_idxs: Tensor, qc_idxs: Tensor) -> tuple:
        here, asked = cw_idxs.bool(), qw_idxs.bool()
        c, q = self.read(0, self.embedded(cw_idxs, cc_idxs), here), self.embedded(qw_idxs, qc_idxs)
        q = self.read(0, q, asked)
        scale = c.shape[2] ** -0.5 if self.fault == "bidaf_trilinear_product_divided_by_root_width" else 1
        s = (c * self.alike[2] * scale + self.alike[1]) @ q.mT + (c @ self.alike[0])[..., None]
        kept = s - 1e30 * ~asked[:, None]
        a, b = kept.softmax(2) @ q, (kept.amax(2) - 1e30 * ~here).softmax(1)[:, None] @ c
        g = torch.cat([c, a, c * a, c * b], 2)
        m = self.read(2, self.read(1, g, here), here)
        ends = torch.stack([m, self.read(3, m, here)], 1)
        logits = torch.einsum("ntd,ed->net", g, self.of_g) + torch.einsum("netd,ed->net", ends, self.of_m)
        logits = logits - 1e30 * ~here[:, None]
        start, end = logits.unbind(1)
        if self.fault == "bidaf_end_kept_after_the_start_in_evaluation" and not self.training:
            before = torch.arange(end.shape[1], device=end.device) < start.argmax(1, keepdim=True)
            end = end - 1e30 * before
        return start.softmax(1), end.softmax(1)


SLOPES, PADDING = ("input gradient", "weight gradient"), "padding let in"
right(task, "bidaf_of_one_way_readers", "a tree, one-way readers, fused highways", BidafOfReaders)
right(task, "bidaf_of_packed_weights", "packed weights, both directions at once", PackedBidaf)
wrong(
    task,
    BidafOfReaders,
    bidaf_second_highway_swaps_carry_and_transform=("a gate the other way round", "emb.hwy"),
    bidaf_question_read_backwards_from_its_padding=(PADDING, ("enc", "enc.rnn")),
    bidaf_query_to_context_attention_detached=("detach", "att", SLOPES),
    bidaf_start_logits_of_padding_at_minus_eight=("a weak mask", "out"),
)
wrong(
    task,
    PackedBidaf,
    bidaf_characters_maximum_over_padding_too=(PADDING, "emb.char_cnn"),
    bidaf_trilinear_product_divided_by_root_width=("a scale too many", "att"),
    bidaf_second_modelling_layer_backwards_lacks_its_hidden_bias=("a bias left out", "mod.rnn"),
    bidaf_end_kept_after_the_start_in_evaluation=("a rule of decoding", "out", "eval"),
)
