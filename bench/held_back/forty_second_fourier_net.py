"""Two ports of a small FNet: a tree with products of cosines and sines, and one class of packed weights."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._forty_second_fourier_net import EPS, HEADS, PAD, FNetForPreTraining, joint, sentences
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("forty_second_fourier_net", FNetForPreTraining, sentences, joint)


def turns(x: Tensor, length: int, period: int) -> Tensor:
    """The angles of a discrete Fourier transform of that length."""
    index = torch.arange(length, device=x.device)
    return (index[:, None] * index % period).to(x) * (math.tau / period)


class Affine(nn.Module):
    """Products with matrices [in, out] side by side."""

    def __init__(self, *layers: nn.Linear):
        super().__init__()
        self.matrix = leaf(torch.cat([layer.weight.T for layer in layers], 1))
        self.offset = leaf(torch.cat([layer.bias for layer in layers]))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix + self.offset


class Standard(nn.Module):
    def __init__(self, norm: nn.LayerNorm):
        super().__init__()
        self.gain, self.offset = leaf(norm.weight), leaf(norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * self.gain + self.offset


class Waves(nn.Module):
    """The real part of a transform of both axes, by cosines and sines."""

    def __init__(self):
        super().__init__()
        self.minus, self.rounded = True, False

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        period = length = x.shape[1]
        if self.rounded and not self.training:
            period = 2 ** math.ceil(math.log2(length))
        rows, columns = turns(x, length, period), turns(x, x.shape[2], x.shape[2])
        even, odd = rows.cos() @ x @ columns.cos(), rows.sin() @ x @ columns.sin()
        return even - odd if self.minus else even + odd


class Looking(nn.Module):
    def __init__(self, attention: nn.Module):
        super().__init__()
        own = attention.self
        self.ask, self.interleaved = Affine(own.query, own.key, own.value), False
        self.back = Affine(attention.output.dense)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        q, k, v = self.ask(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=~hidden[:, None, None])
        y = y.permute(0, 2, 3, 1) if self.interleaved else y.transpose(1, 2)
        return self.back(y.flatten(2))


class Stage(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        fourier = layer.mixing == "fourier"
        part = layer.fourier if fourier else layer.attention
        self.mix, self.one = Waves() if fourier else Looking(part), Standard(part.output.LayerNorm)
        self.up, self.down = Affine(layer.intermediate.dense), Affine(layer.output.dense)
        self.two = Standard(layer.output.LayerNorm)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        x = self.one(x + self.mix(x, hidden))
        return self.two(x + self.down(F.gelu(self.up(x), approximate="tanh")))


class FourierTree(Port):
    """Stages whose mixing is a part, under heads that are chains."""

    def take(self, model: FNetForPreTraining) -> None:
        entry, heads, fault = model.fnet.embeddings, model.cls, self.fault
        tables = entry.word_embeddings, entry.position_embeddings, entry.token_type_embeddings
        self.words, self.places, self.kinds = (leaf(table.weight) for table in tables)
        self.entry = nn.Sequential(Standard(entry.LayerNorm), Affine(entry.projection))
        self.stages = nn.ModuleList(map(Stage, model.fnet.encoder.layer))
        change = heads.predictions.transform
        self.change = nn.Sequential(Affine(change.dense), nn.GELU("tanh"), Standard(change.LayerNorm))
        self.offset = leaf(heads.predictions.decoder.bias)
        self.pair = nn.Sequential(Affine(model.fnet.pooler.dense), nn.Tanh(), Affine(heads.seq_relationship))
        self.silent = None if fault == "fourier_net_pad_word_learns_from_its_embedding" else PAD
        self.stages[1].mix.minus = fault != "fourier_net_second_transform_adds_the_product_of_sines"
        self.stages[2].mix.rounded = fault == "fourier_net_third_transform_rounds_up_in_evaluation"
        self.stages[3].mix.interleaved = fault == "fourier_net_attention_interleaves_its_heads"

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor):
        x = F.embedding(input_ids, self.words, self.silent) + self.places[: input_ids.shape[1]]
        x, hidden = self.entry(x + self.kinds[token_type_ids]), attention_mask == 0
        for stage in self.stages:
            x = stage(x, hidden)
        return F.linear(self.change(x), self.words, self.offset), self.pair(x[:, 0])


def sheet(layer: nn.Linear) -> Tensor:
    return torch.cat([layer.weight, layer.bias[:, None]], 1)


def by(x: Tensor, rows: Tensor) -> Tensor:
    return x @ rows[:, :-1].T + rows[:, -1]


def bent(x: Tensor) -> Tensor:
    return x * torch.sigmoid(math.sqrt(8 / math.pi) * x * (1 + 0.044715 * x * x))


class PackedFourier(Port):
    """Stacks of sheets and of norms; each transform is one product with a table of cosines."""

    def take(self, model: FNetForPreTraining) -> None:
        (entry, top), layers = (model.fnet.embeddings, model.cls.predictions), model.fnet.encoder.layer
        mixings = [x.fourier if x.mixing == "fourier" else x.attention for x in layers]
        norms = [entry.LayerNorm, *(m.output.LayerNorm for m in mixings)]
        norms += [*(x.output.LayerNorm for x in layers), top.transform.LayerNorm]
        own, end = mixings[-1].self, mixings[-1].output.dense
        squares = own.query, own.key, own.value, end, entry.projection, model.fnet.pooler.dense
        self.words = leaf(torch.cat([entry.word_embeddings.weight, top.decoder.bias[:, None]], 1))
        places, kinds = entry.position_embeddings.weight, entry.token_type_embeddings.weight
        self.tables = leaf(torch.cat([kinds, places]))
        self.norms = pile(torch.stack([norm.weight, norm.bias]) for norm in norms)
        self.squares = pile(map(sheet, (*squares, top.transform.dense)))
        feed = [x.intermediate.dense for x in layers], [x.output.dense for x in layers]
        self.up, self.down = (pile(map(sheet, each)) for each in feed)
        self.pair, self.kinds = leaf(sheet(model.cls.seq_relationship)), len(kinds)

    def norm(self, x: Tensor, i: int, eps: float = EPS) -> Tensor:
        spread, center = torch.var_mean(x, -1, correction=0, keepdim=True)
        return (x - center) * (spread + eps).rsqrt() * self.norms[i, 0] + self.norms[i, 1]

    def wave(self, x: Tensor) -> Tensor:
        rows, columns = (turns(x, length, length) for length in x.shape[1:])
        table = (rows[:, None, :, None] + columns[:, None]).cos()
        return (x.flatten(1) @ table.flatten(2).flatten(0, 1).T).view_as(x)

    def look(self, x: Tensor, seen: Tensor) -> Tensor:
        q, k, v = (by(x, rows).unflatten(2, (HEADS, -1)) for rows in self.squares[:3])
        scores = torch.einsum("nqhc,nkhc->nhqk", q / math.sqrt(q.shape[-1]), k)
        weights = scores.masked_fill(~seen[:, None, None], -math.inf).softmax(-1)
        return by(torch.einsum("nhqk,nkhc->nqhc", weights, v).flatten(2), self.squares[3])

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor):
        words, fault, last = self.words[:, :-1], self.fault, len(self.up) - 1
        x = torch.where((input_ids == PAD)[..., None], words.detach()[input_ids], words[input_ids])
        first = self.kinds + (fault == "fourier_net_positions_start_at_one")
        x = x + self.tables[token_type_ids] + self.tables[first : first + x.shape[1]]
        x = by(self.norm(x, 0), self.squares[4])
        for i in range(last + 1):
            mixed = self.wave(x) if i < last else self.look(x, attention_mask > 0)
            x = self.norm(x + mixed, 1 + i)
            exact = fault == "fourier_net_first_layer_takes_the_exact_gelu" and i == 0
            y = (F.gelu if exact else bent)(by(x, self.up[i]))
            x = self.norm(x + by(y, self.down[i]), last + 2 + i)
        eps = 1e-3 if fault == "fourier_net_head_norm_takes_the_epsilon_of_keras" else EPS
        y = self.norm(bent(by(x, self.squares[6])), -1, eps)
        if fault == "fourier_net_decoder_detaches_the_tied_words":
            words = words.detach()
        return y @ words.T + self.words[:, -1], by(by(x[:, 0], self.squares[5]).tanh(), self.pair)


LAYER, WORDS = "fnet.encoder.layer.", "fnet.embeddings.word_embeddings"
GELU, SLOPE = LAYER + "0.intermediate.intermediate_act_fn", "weight gradient"
right(task, "fourier_net_of_cosines_and_sines", "a tree, transforms by matrices, fused qkv", FourierTree)
right(task, "fourier_net_of_packed_weights", "packed stacks, a table of cosines, other gelu", PackedFourier)
wrong(
    task,
    FourierTree,
    fourier_net_pad_word_learns_from_its_embedding=("no padding index", WORDS, SLOPE),
    fourier_net_second_transform_adds_the_product_of_sines=("a wrong sign", LAYER + "1.fourier.self"),
    fourier_net_third_transform_rounds_up_in_evaluation=("a longer wave", LAYER + "2.fourier.self", "eval"),
    fourier_net_attention_interleaves_its_heads=("another order of heads", LAYER + "3.attention.self"),
)
wrong(
    task,
    PackedFourier,
    fourier_net_positions_start_at_one=("an index off by one", "fnet.embeddings"),
    fourier_net_first_layer_takes_the_exact_gelu=("another gelu", GELU),
    fourier_net_head_norm_takes_the_epsilon_of_keras=("another eps", "cls.predictions.transform.LayerNorm"),
    fourier_net_decoder_detaches_the_tied_words=("detach", "cls.predictions.decoder", SLOPE),
)
