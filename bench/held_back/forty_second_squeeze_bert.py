"""Two ports of a small SqueezeBERT: a tree with the channels last, and one class of packed rows."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _forty_second_squeeze_bert as made
from bench.held_back._fifth_vision import right
from bench.held_back._forty_second_squeeze_bert import EPS, GROUPS, HEADS, INNER, PAD, WIDTH, SqueezeBert
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("forty_second_squeeze_bert", SqueezeBert, made.sentences, made.words_and_classes)
Pair = tuple[Tensor, Tensor]


class Blocks(nn.Module):
    """A block-diagonal product of the last axis."""

    def __init__(self, conv: nn.Conv1d):
        super().__init__()
        self.weight = leaf(conv.weight[..., 0].unflatten(0, (conv.groups, -1)).transpose(1, 2))
        self.offset = leaf(conv.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (self.weight.shape[0], -1))
        return torch.einsum("ntgi,gio->ntgo", x, self.weight).flatten(2) + self.offset


class Level(nn.Module):
    """Each row to mean zero and deviation one, then a gain and an offset."""

    def __init__(self, norm: nn.LayerNorm, eps: float = EPS):
        super().__init__()
        self.gain, self.offset, self.eps = leaf(norm.weight), leaf(norm.bias), eps

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.gain + self.offset


class Entry(nn.Module):
    def __init__(self, given: nn.Module, eps: float):
        super().__init__()
        self.words, self.places = leaf(given.word_embeddings.weight), leaf(given.position_embeddings.weight)
        self.kinds, self.level = leaf(given.token_type_embeddings.weight), Level(given.LayerNorm, eps)

    def forward(self, ids: Tensor, kinds: Tensor) -> Tensor:
        x = F.one_hot(kinds, len(self.kinds)).to(self.kinds) @ self.kinds + self.places[: ids.shape[1]]
        return self.level(x + F.embedding(ids, self.words, padding_idx=PAD))


class Looking(nn.Module):
    """Attention with its output's product, the sum and the norm."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        given, self.dealt = layer.attention, False
        self.ask, self.offer, self.bring = (Blocks(x) for x in (given.query, given.key, given.value))
        self.out, self.level = Blocks(layer.post_attention.conv1d), Level(layer.post_attention.layernorm)

    def forward(self, x: Tensor, empty: Tensor) -> Tensor:
        q, k, v = (y(x).unflatten(2, (HEADS, -1)) for y in (self.ask, self.offer, self.bring))
        if self.dealt:
            k = k.flatten(2).unflatten(2, (-1, HEADS)).transpose(2, 3)
        scores = torch.einsum("nqhc,nkhc->nhqk", q * (WIDTH // HEADS) ** -0.5, k)
        shares = scores.masked_fill(empty[:, None, None], -torch.inf).softmax(3)
        return self.level(x + self.out(torch.einsum("nhqk,nkhc->nqhc", shares, v).flatten(2)))


class Thinking(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.up, self.down = Blocks(layer.intermediate.conv1d), Blocks(layer.output.conv1d)
        self.level, self.cut = Level(layer.output.layernorm), False

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        y = self.down(y * torch.special.ndtr(y))
        return self.level(y + (x.detach() if self.cut else x))


class SqueezeBertChannelsLast(Port):
    """An entry, pairs of looking and thinking, and the two heads in the network itself."""

    def take(self, model: SqueezeBert) -> None:
        body, head, fault = model.transformer, model.cls["predictions"], self.fault
        eps = 1e-5 if fault == "squeeze_bert_embeddings_norm_takes_the_default_eps" else EPS
        self.entry, layers = Entry(body.embeddings, eps), body.encoder.layers
        self.looking, self.thinking = (nn.ModuleList(map(x, layers)) for x in (Looking, Thinking))
        self.looking[0].dealt = fault == "squeeze_bert_first_key_deals_channels_to_heads_in_turn"
        self.thinking[1].cut = fault == "squeeze_bert_second_output_detaches_its_residual"
        self.pool, self.guess, self.sort = (
            nn.ParameterList([leaf(x.weight.T), leaf(x.bias)])
            for x in (body.pooler.dense, head.transform.dense, model.classifier)
        )
        self.level, self.offset = Level(head.transform.LayerNorm), leaf(head.decoder.bias)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Pair:
        x, empty = self.entry(input_ids, token_type_ids), attention_mask == 0
        for look, think in zip(self.looking, self.thinking, strict=True):
            x = think(look(x, empty))
        first = x[:, -1 if self.fault == "squeeze_bert_pooler_takes_the_last_token" else 0]
        first = (first @ self.pool[0] + self.pool[1]).tanh()
        y = self.level(F.gelu(x @ self.guess[0] + self.guess[1]))
        return y @ self.entry.words.T + self.offset, first @ self.sort[0] + self.sort[1]


SIZES = [(WIDTH, WIDTH)] * 4 + [(INNER, WIDTH), (WIDTH, INNER)]
COUNTS = [out * wide // groups for (out, wide), groups in zip(SIZES, GROUPS.values(), strict=True)]


def packed(layer: nn.Module) -> tuple[Tensor, Tensor]:
    """All kernels of a layer in a row, and all its biases and norms in another."""
    look, post, up, down = layer.attention, layer.post_attention, layer.intermediate, layer.output
    convs = [look.query, look.key, look.value, post.conv1d, up.conv1d, down.conv1d]
    norms = [x for y in (post.layernorm, down.layernorm) for x in (y.weight, y.bias)]
    return torch.cat([x.weight.flatten() for x in convs]), torch.cat([x.bias for x in convs] + norms)


def normal(x: Tensor, gain: Tensor, offset: Tensor) -> Tensor:
    """A layer norm over axis 1; the gain and the offset are columns."""
    spread, center = torch.var_mean(x, 1, correction=0, keepdim=True)
    return torch.addcmul(offset, x - center, gain * (spread + EPS).rsqrt())


class PackedSqueezeBert(Port):
    """A row of kernels and a row of offsets for each layer, full matrices made of their blocks."""

    def take(self, model: SqueezeBert) -> None:
        given, body, head = model.transformer.embeddings, model.transformer, model.cls["predictions"]
        tables = (given.word_embeddings, given.position_embeddings, given.token_type_embeddings)
        self.table = leaf(torch.cat([x.weight for x in tables]))
        self.kernels, self.rows = map(pile, zip(*map(packed, body.encoder.layers), strict=True))
        norms, dense = (given.LayerNorm, head.transform.LayerNorm), (body.pooler.dense, head.transform.dense)
        self.norms = pile(torch.stack([x.weight, x.bias])[..., None] for x in norms)
        self.dense = pile(torch.cat([x.weight, x.bias[:, None]], 1) for x in dense)
        self.sort = leaf(torch.cat([model.classifier.weight, model.classifier.bias[:, None]], 1))
        self.offset = leaf(head.decoder.bias[:, None])

    def layer(self, i: int, x: Tensor, bias: Tensor) -> Tensor:
        kernels = zip(self.kernels[i].split(COUNTS), GROUPS.values(), SIZES, strict=True)
        full = [torch.block_diag(*w.view(n, -1, wide // n)) for w, n, (_, wide) in kernels]
        ends = [3 * WIDTH, WIDTH, INNER, WIDTH, *[WIDTH] * 4]
        look, out, up, down, *norms = self.rows[i][:, None].split(ends)
        q, k, v = (torch.cat(full[:3]) @ x + look).unflatten(1, (3, HEADS, -1)).unbind(1)
        wide = self.fault == "squeeze_bert_second_scores_scaled_by_the_whole_width" and i == 1
        scores = k.mT @ q / math.sqrt(WIDTH if wide else WIDTH // HEADS)
        mixed = v @ (scores + bias).softmax(2)
        x = normal(full[3] @ mixed.flatten(1, 2) + out + x, *norms[:2])
        rough = self.fault == "squeeze_bert_third_gelu_by_tanh" and i == 2
        y = F.gelu(full[4] @ x + up, approximate="tanh" if rough else "none")
        return normal(full[5] @ y + down + x, *norms[2:])

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Pair:
        words, after = self.table[: len(self.offset)], len(self.offset) + made.POSITIONS
        places = len(words) + torch.arange(input_ids.shape[1], device=input_ids.device)
        every = torch.stack([input_ids, places.expand_as(input_ids), after + token_type_ids])
        x = normal(F.embedding(every, self.table, padding_idx=PAD).sum(0).mT, *self.norms[0])
        bias = (attention_mask[:, None, :, None].to(x) - 1) * 1e4
        if self.fault == "squeeze_bert_padding_attended_to_in_evaluation" and not self.training:
            bias = torch.zeros_like(bias)
        for i in range(len(self.kernels)):
            x = self.layer(i, x, bias)
        first = F.linear(x[:, :, 0], self.dense[0, :, :-1], self.dense[0, :, -1]).tanh()
        y = normal(F.gelu(self.dense[1, :, :-1] @ x + self.dense[1, :, -1:]), *self.norms[1])
        if self.fault == "squeeze_bert_decoder_detaches_the_tied_weight":
            words = words.detach()
        return (words @ y + self.offset).mT, F.linear(first, self.sort[:, :-1], self.sort[:, -1])


SLOPES = ("input gradient", "weight gradient")
LAYER = "transformer.encoder.layers"
right(
    task, "squeeze_bert_channels_last", "a tree, channels last, products by blocks", SqueezeBertChannelsLast
)
right(task, "squeeze_bert_of_packed_rows", "packed rows, full matrices, keys first", PackedSqueezeBert)
wrong(
    task,
    SqueezeBertChannelsLast,
    squeeze_bert_embeddings_norm_takes_the_default_eps=("another eps", "transformer.embeddings.LayerNorm"),
    squeeze_bert_first_key_deals_channels_to_heads_in_turn=("another head order", f"{LAYER}.0.attention"),
    squeeze_bert_second_output_detaches_its_residual=("detach", f"{LAYER}.1.output", SLOPES),
    squeeze_bert_pooler_takes_the_last_token=("another position", "transformer.pooler"),
)
wrong(
    task,
    PackedSqueezeBert,
    squeeze_bert_padding_attended_to_in_evaluation=("no mask in eval", "transformer", "eval"),
    squeeze_bert_second_scores_scaled_by_the_whole_width=("another scale", f"{LAYER}.1.attention"),
    squeeze_bert_third_gelu_by_tanh=("an approximation", f"{LAYER}.2.intermediate.act"),
    squeeze_bert_decoder_detaches_the_tied_weight=("detach", "cls.predictions.decoder", "weight gradient"),
)
