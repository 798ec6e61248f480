"""Two ports of BERT: a trunk whose blocks begin with the norm before them, and flat code with one table."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import GRADIENTS
from bench.held_back import _fifteenth_bert as bert
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("fifteenth_bert", bert.BertForPreTraining, bert.sentences, bert.both_heads)


class Affine(nn.Module):
    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.kernel, self.offset = leaf(linear.weight.T), leaf(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kernel + self.offset


class Standard(nn.Module):
    def __init__(self, norm: nn.LayerNorm):
        super().__init__()
        self.eps, self.scale, self.center = norm.eps, leaf(norm.weight), leaf(norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        spread, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
        return torch.addcmul(self.center, (x - mean) * (spread + self.eps).rsqrt(), self.scale)


class Tokens(nn.Module):
    """The sum of three rows as [T, N, C]; its norm is that of the first block."""

    def __init__(self, embeddings: bert.BertEmbeddings):
        super().__init__()
        self.words = leaf(embeddings.word_embeddings.weight)
        self.kinds = leaf(embeddings.token_type_embeddings.weight)
        self.places, self.start = leaf(embeddings.position_embeddings.weight), 0

    def forward(self, ids: Tensor, kinds: Tensor) -> Tensor:
        x = F.embedding(ids.T, self.words, padding_idx=bert.PAD)
        return x + self.kinds[kinds.T] + self.places[self.start : self.start + len(x), None]


class Mixer(nn.Module):
    """Attention by one product whose rows are sorted by head, then query, key and value."""

    def __init__(self, attention: bert.BertAttention):
        super().__init__()
        linears = [*attention.self.children()]
        weight = torch.stack([x.weight.unflatten(0, (bert.HEADS, -1)) for x in linears], 1)
        bias = torch.stack([x.bias.unflatten(0, (bert.HEADS, -1)) for x in linears], 1)
        self.weight, self.bias = leaf(weight.flatten(0, 2)), leaf(bias.flatten())
        self.out, self.looked_at = Affine(attention.output.dense), None

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias).unflatten(2, (bert.HEADS, 3, -1))
        q, k, v = y.permute(3, 1, 2, 0, 4)
        full = not self.training and bool(keep[: self.looked_at].all())
        y = F.scaled_dot_product_attention(q, k, v, None if full else keep[:, None, None])
        return self.out(y.permute(2, 0, 1, 3).flatten(2))


class Block(nn.Module):
    """The norm that ends what came before, attention, its norm and the feed-forward; the last norm is out."""

    def __init__(self, before: nn.LayerNorm, layer: bert.BertLayer):
        super().__init__()
        self.enter, self.mixer = Standard(before), Mixer(layer.attention)
        self.middle, self.early = Standard(layer.attention.output.LayerNorm), False
        self.feed = nn.Sequential(Affine(layer.intermediate.dense), nn.GELU(), Affine(layer.output.dense))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        x = self.enter(x)
        y = self.middle(x + self.mixer(x, keep))
        return (x if self.early else y) + self.feed(y)


class WordScores(nn.Module):
    def __init__(self, head: bert.BertLMPredictionHead, table: nn.Parameter):
        super().__init__()
        self.turn = nn.Sequential(Affine(head.transform.dense), nn.GELU(), Standard(head.transform.LayerNorm))
        self.table, self.prior = table, leaf(head.decoder.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.turn(x), self.table, self.prior)


class BorrowedNorms(Port):
    """Tokens first; a trunk of blocks between the sum of rows and the last norm, and two heads."""

    def take(self, model: bert.BertForPreTraining) -> None:
        body, layers, heads = model.bert, model.bert.encoder.layer, model.cls
        norms = [body.embeddings.LayerNorm, *(layer.output.LayerNorm for layer in layers)]
        self.tokens, self.leave = Tokens(body.embeddings), Standard(norms[-1])
        self.trunk = nn.ModuleList(Block(*pair) for pair in zip(norms[:-1], layers, strict=True))
        self.order = nn.Sequential(Affine(body.pooler.dense), nn.Tanh(), Affine(heads.seq_relationship))
        apart = self.fault == "bert_word_decoder_is_a_copy_of_the_table"
        self.scores = WordScores(heads.predictions, leaf(self.tokens.words) if apart else self.tokens.words)
        self.tokens.start = int(self.fault == "bert_places_counted_from_behind_the_padding_index")
        if self.fault == "bert_first_mixer_evaluates_by_the_mask_of_one_row":
            self.trunk[0].mixer.looked_at = 1
        self.trunk[1].early = self.fault == "bert_middle_feed_forward_added_to_what_attention_read"

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        x, keep = self.tokens(input_ids, token_type_ids), attention_mask.bool()
        for block in self.trunk:
            x = block(x, keep)
        x = self.leave(x)
        words = self.scores(x).transpose(0, 1)
        return {"prediction_logits": words, "seq_relationship_logits": self.order(x[0])}


def normed(x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + bert.EPS).sqrt() * gain + shift


def bent(x: Tensor) -> Tensor:
    return x * torch.special.ndtr(x)


class OneTable(Port):
    """All that is looked up is in one table, and the weights of all layers are in stacks."""

    def take(self, model: bert.BertForPreTraining) -> None:
        body, heads, layers = model.bert, model.cls, model.bert.encoder.layer
        rows, turn = body.embeddings, heads.predictions.transform
        lookups = rows.word_embeddings, rows.token_type_embeddings, rows.position_embeddings
        self.table = leaf(torch.cat([x.weight for x in lookups]))
        self.prior = leaf(heads.predictions.decoder.bias)
        triples = [[*x.attention.self.children()] for x in layers]
        self.qkv = pile(torch.stack([x.weight for x in t]).unflatten(1, (bert.HEADS, -1)) for t in triples)
        self.qkv_b = pile(torch.stack([x.bias for x in t]).unflatten(1, (bert.HEADS, 1, -1)) for t in triples)
        self.join = pile(x.attention.output.dense.weight.T.unflatten(0, (bert.HEADS, -1)) for x in layers)
        self.up = pile(torch.cat([y.weight.T, y.bias[None]]) for y in (x.intermediate.dense for x in layers))
        self.down = pile(x.output.dense.weight for x in layers)
        ends = [(x.attention.output, x.output) for x in layers]
        self.ends = pile(pile([e.dense.bias, e.LayerNorm.weight, e.LayerNorm.bias]) for x in ends for e in x)
        self.edges = pile(pile([x.weight, x.bias]) for x in (rows.LayerNorm, turn.LayerNorm))
        self.square = pile(torch.cat([x.weight.T, x.bias[None]]) for x in (body.pooler.dense, turn.dense))
        self.order = leaf(torch.cat([heads.seq_relationship.weight.T, heads.seq_relationship.bias[None]]))

    def summed(self, ids: Tensor, kinds: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        rows = torch.stack([ids, kinds + bert.WORDS, places + bert.WORDS + bert.KINDS])
        return normed(F.embedding(rows, self.table, padding_idx=bert.PAD).sum(0), *self.edges[0])

    def attended(self, i: int, x: Tensor, keep: Tensor) -> Tensor:
        products = torch.einsum("ntc,shec->snhte", x, self.qkv[i])
        bias, width = self.qkv_b[i][:, None], products.shape[-1]
        q, k, v = products + bias
        late = self.fault == "bert_middle_query_bias_added_to_scaled_queries" and i == 1
        q = products[0] / width**0.5 + bias[0] if late else q / width**0.5
        scores = torch.einsum("nhqe,nhke->nhqk", q, k)
        heavy = (scores - scores.detach().amax(-1, keepdim=True)).exp()
        kept = heavy * keep[:, None, None]
        whole = heavy if self.fault == "bert_last_attention_masked_behind_its_softmax" and i == 2 else kept
        return torch.einsum("nhqk,nhke,hec->nqc", kept / whole.sum(-1, keepdim=True), v, self.join[i])

    def fed(self, i: int, x: Tensor, keep: Tensor) -> Tensor:
        return torch.einsum("nti,ci->ntc", bent(x @ self.up[i, :-1] + self.up[i, -1]), self.down[i])

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        x = self.summed(input_ids, token_type_ids)
        for i, (bias, gain, shift) in enumerate(self.ends):
            branch = self.fed if i % 2 else self.attended
            x = normed(x + branch(i // 2, x, attention_mask) + bias, gain, shift)
        first = x[:, 0].detach() if self.fault == "bert_order_head_leaves_the_trunk_alone" else x[:, 0]
        pooled = (first @ self.square[0, :-1] + self.square[0, -1]).tanh()
        turned = x @ self.square[1, :-1] + self.square[1, -1]
        early = self.fault == "bert_hidden_word_transform_bends_what_is_normed"
        turned = bent(normed(turned, *self.edges[1])) if early else normed(bent(turned), *self.edges[1])
        order = pooled @ self.order[:-1] + self.order[-1]
        words = turned @ self.table[: bert.WORDS].T + self.prior
        return {"prediction_logits": words, "seq_relationship_logits": order}


EMBEDDED, LAYER, DECODER = "bert.embeddings", "bert.encoder.layer.{}", "cls.predictions.decoder"
FIRST, MIDDLE, LAST = (LAYER.format(i) + ".attention.self" for i in range(bert.DEPTH))
PLACED, TIED = (EMBEDDED + ".position_embeddings", EMBEDDED), (DECODER, EMBEDDED + ".word_embeddings")
AROUND, QUERY = (LAYER.format(1), LAYER.format(1) + ".output"), (MIDDLE + ".query", MIDDLE)
right(task, "bert_of_blocks_that_borrow_norms", "other borders, tokens first, sorted heads", BorrowedNorms)
right(task, "bert_of_one_table_and_stacks", "flat code, one table, stacked weights", OneTable)
wrong(
    task,
    BorrowedNorms,
    bert_places_counted_from_behind_the_padding_index=("positions start at another number", PLACED),
    bert_middle_feed_forward_added_to_what_attention_read=("residual of an earlier value", AROUND),
    bert_first_mixer_evaluates_by_the_mask_of_one_row=("a mask left out", FIRST, "eval"),
    bert_word_decoder_is_a_copy_of_the_table=("a weight no longer tied", TIED, "weight gradient"),
)
wrong(
    task,
    OneTable,
    bert_middle_query_bias_added_to_scaled_queries=("a bias left unscaled", QUERY),
    bert_last_attention_masked_behind_its_softmax=("masked shares not made up for", LAST),
    bert_hidden_word_transform_bends_what_is_normed=("order of two functions", "cls.predictions.transform"),
    bert_order_head_leaves_the_trunk_alone=("a detach too many", ("bert.pooler", "bert"), GRADIENTS),
)
