"""Two ports of a small BigBird: a tree that looks up blocks, and one class of dense masked attention."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._thirty_sixth_big_bird import (
    BLOCK,
    BLOCKS,
    HEADS,
    PAD,
    BigBirdForPreTraining,
    masked_and_next,
    pairs,
)

task = few("thirty_sixth_big_bird", BigBirdForPreTraining, pairs, masked_and_next)


def seen_by(i: int) -> list[int]:
    """The blocks that a query block sees whatever the random ones are."""
    if i in (0, BLOCKS - 1):
        return list(range(BLOCKS))
    return sorted({0, i - 1, i, i + 1, BLOCKS - 1})


class Dense(nn.Module):
    def __init__(self, *layers: nn.Linear):
        super().__init__()
        self.matrix = leaf(torch.cat([x.weight.T for x in layers], 1))
        self.offset = leaf(torch.cat([x.bias for x in layers]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self.matrix).add(self.offset)


class Centred(nn.Module):
    def __init__(self, norm: nn.LayerNorm):
        super().__init__()
        self.gain, self.shift, self.eps = leaf(norm.weight), leaf(norm.bias), norm.eps

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.gain + self.shift


class Lookup(nn.Module):
    """Each query block looks up the blocks that it sees, in [N, heads, blocks, block, D / heads]."""

    def __init__(self, old: nn.Module):
        super().__init__()
        self.project, self.seen = Dense(old.query, old.key, old.value), [seen_by(i) for i in range(BLOCKS)]
        self.register_buffer("table", old.rand_attn.transpose(0, 1).clone())
        self.quiet = self.blank = False

    def find(self, i: int, x: Tensor, quiet: bool = False) -> Tensor:
        found = x[:, :, self.seen[i]]
        if 0 < i < BLOCKS - 1:
            rows = self.table[i - 1] * int(self.training or not self.blank)
            more = x[:, torch.arange(len(rows), device=x.device)[:, None], rows]
            found = torch.cat([found, more.detach() if quiet else more], 2)
        return found.flatten(2, 3)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        cut = self.project(x).unflatten(2, (3, HEADS, -1)).unflatten(1, (BLOCKS, BLOCK))
        q, k, v = cut.permute(3, 0, 4, 1, 2, 5)
        spots = real.view(len(x), 1, BLOCKS, BLOCK, 1).expand(-1, HEADS, -1, -1, -1)
        rows = []
        for i in range(BLOCKS):
            keys, values = self.find(i, k, self.quiet), self.find(i, v)
            score = (q[:, :, i] * q.shape[-1] ** -0.5) @ keys.mT
            rows.append(score.masked_fill(~self.find(i, spots).mT, -torch.inf).softmax(-1) @ values)
        mixed = torch.cat(rows, 2).permute(0, 2, 1, 3).flatten(2)
        return mixed.masked_fill(~real[..., None], 0)


class Storey(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.look, self.join = Lookup(layer.attention.self), Dense(layer.attention.output.dense)
        self.wide = nn.Sequential(Dense(layer.intermediate.dense), nn.GELU("tanh"), Dense(layer.output.dense))
        self.mid, self.top = Centred(layer.attention.output.LayerNorm), Centred(layer.output.LayerNorm)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        x = self.mid(x + self.join(self.look(x, real)))
        return self.top(x + self.wide(x))


class BigBirdByLookup(Port):
    """Storeys of fused projections; all query blocks are treated alike, by the lists of what they see."""

    def take(self, model: BigBirdForPreTraining) -> None:
        bert, lm, fault = model.bert, model.cls.predictions, self.fault
        table = bert.embeddings
        self.words, self.kinds = leaf(table.word_embeddings.weight), leaf(table.token_type_embeddings.weight)
        self.places, self.start = leaf(table.position_embeddings.weight), Centred(table.LayerNorm)
        self.storeys = nn.ModuleList(map(Storey, bert.encoder.layer))
        self.guess = nn.Sequential(Dense(lm.transform[0]), nn.GELU("tanh"), Centred(lm.transform[2]))
        self.offset = leaf(lm.decoder.bias)
        self.tell = nn.Sequential(Dense(bert.pooler), nn.Tanh(), Dense(model.cls.seq_relationship))
        self.first = 1 if fault == "big_bird_positions_count_from_one" else 0
        self.storeys[0].look.quiet = fault == "big_bird_random_keys_of_first_layer_detached"
        if fault == "big_bird_last_but_one_block_misses_one":
            self.storeys[1].look.seen[-2].remove(BLOCKS - 3)
        self.storeys[2].look.blank = fault == "big_bird_random_table_zero_in_evaluation"

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor):
        places = self.places[self.first : self.first + input_ids.shape[1]]
        x = self.start(F.embedding(input_ids, self.words, PAD) + places + self.kinds[token_type_ids])
        for storey in self.storeys:
            x = storey(x, attention_mask.bool())
        return self.guess(x) @ self.words.T + self.offset, self.tell(x[:, 0])


def packed(layer: nn.Linear) -> Tensor:
    """The transposed weight over the bias."""
    return torch.cat([layer.weight.T, layer.bias[None]])


def affine(x: Tensor, w: Tensor) -> Tensor:
    return x @ w[:-1] + w[-1]


class DenseBigBird(Port):
    """Stacks of packed weights by layer; attention is dense under masks of what is seen."""

    def take(self, model: BigBirdForPreTraining) -> None:
        bert, lm = model.bert, model.cls.predictions
        table, layers = bert.embeddings, bert.encoder.layer
        self.words, self.offset = leaf(table.word_embeddings.weight), leaf(lm.decoder.bias)
        self.rest = leaf(torch.cat([table.token_type_embeddings.weight, table.position_embeddings.weight]))
        views = [x.attention for x in layers]
        maps = [(x.self.query, x.self.key, x.self.value, x.output.dense) for x in views]
        self.maps = pile(torch.stack([packed(y) for y in x]) for x in maps)
        self.up = pile(packed(x.intermediate.dense) for x in layers)
        self.down = pile(packed(x.output.dense) for x in layers)
        norms = [y for x in layers for y in (x.attention.output.LayerNorm, x.output.LayerNorm)]
        norms, self.eps = [table.LayerNorm, *norms, lm.transform[2]], table.LayerNorm.eps
        self.norms = pile(torch.stack([x.weight, x.bias]) for x in norms)
        self.ends = pile(map(packed, (lm.transform[0], bert.pooler)))
        self.pair = leaf(packed(model.cls.seq_relationship))
        fixed = torch.tensor([[j in seen_by(i) for j in range(BLOCKS)] for i in range(BLOCKS)])
        random = torch.zeros(len(layers), HEADS, BLOCKS, BLOCKS, dtype=torch.bool)
        for i, layer in enumerate(layers):
            random[i, :, 1:-1].scatter_(2, layer.attention.self.rand_attn.cpu(), True)
        for name, value in (("fixed", fixed), ("random", random)):
            self.register_buffer(name, torch.kron(value, torch.ones(BLOCK, BLOCK).bool()))

    def norm(self, i: int, x: Tensor) -> Tensor:
        less = int(i == 2 and self.fault == "big_bird_first_output_norm_unbiased")
        spread, middle = torch.var_mean(x, -1, correction=less, keepdim=True)
        return torch.addcmul(self.norms[i, 1], (x - middle) * (spread + self.eps).rsqrt(), self.norms[i, 0])

    def mix(self, i: int, x: Tensor, real: Tensor) -> Tensor:
        q, k, v = (affine(x, w).unflatten(2, (HEADS, -1)) for w in self.maps[i, :3])
        keys = real[:, None, None]
        seen = (self.fixed | self.random[i]) & keys
        if i == 1 and self.fault == "big_bird_random_blocks_of_second_layer_see_padding":
            seen = self.fixed & keys | self.random[i]
        score = torch.einsum("nqhd,nkhd->nhqk", q, k) / q.shape[-1] ** 0.5
        share = torch.where(seen, score, -torch.inf).softmax(-1)
        mixed = torch.einsum("nhqk,nkhd->nqhd", share, v).flatten(2)
        return affine(mixed * real[..., None], self.maps[i, 3])

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor):
        kinds, places = self.rest.tensor_split([2])
        x = F.embedding(input_ids, self.words, PAD) + kinds[token_type_ids] + places[: input_ids.shape[1]]
        x = self.norm(0, x)
        for i in range(len(self.maps)):
            x = self.norm(2 * i + 1, x + self.mix(i, x, attention_mask.bool()))
            exact = i == 2 and self.fault == "big_bird_last_gelu_exact"
            y = F.gelu(affine(x, self.up[i]), approximate="none" if exact else "tanh")
            x = self.norm(2 * i + 2, x + affine(y, self.down[i]))
        y = self.norm(-1, F.gelu(affine(x, self.ends[0]), approximate="tanh"))
        words = self.words.detach() if self.fault == "big_bird_tied_decoder_detached" else self.words
        return F.linear(y, words, self.offset), affine(affine(x[:, 0], self.ends[1]).tanh(), self.pair)


SLOPES, LAYER = ("input gradient", "weight gradient"), "bert.encoder.layer."
right(task, "big_bird_by_lookup_of_blocks", "a tree, fused projections, lists of blocks", BigBirdByLookup)
right(task, "big_bird_dense_under_masks", "packed stacks, dense masked attention", DenseBigBird)
wrong(
    task,
    BigBirdByLookup,
    big_bird_positions_count_from_one=("an index off by one", "bert.embeddings"),
    big_bird_random_keys_of_first_layer_detached=("detach", LAYER + "0.attention.self", SLOPES),
    big_bird_last_but_one_block_misses_one=("a block left out", LAYER + "1.attention.self"),
    big_bird_random_table_zero_in_evaluation=("another table in eval", LAYER + "2.attention.self", "eval"),
)
wrong(
    task,
    DenseBigBird,
    big_bird_first_output_norm_unbiased=("another variance", LAYER + "0.output.LayerNorm"),
    big_bird_random_blocks_of_second_layer_see_padding=("a mask left out", LAYER + "1.attention.self"),
    big_bird_last_gelu_exact=("another activation", LAYER + "2.intermediate.intermediate_act_fn"),
    big_bird_tied_decoder_detached=("detach", "cls.predictions.decoder", "weight gradient"),
)
