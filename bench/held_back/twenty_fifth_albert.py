"""Two ports of a small ALBERT: a tree of rounds with the sequence first, and one class of stacked sheets."""

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _twenty_fifth_albert as known
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("twenty_fifth_albert", known.AlbertForPreTraining, known.sentences, known.words_and_order)
HEADS, ROUNDS, PAD, EPS = known.HEADS, known.LAYERS, known.PAD, known.EPS


def pairs(norms: Iterable[nn.LayerNorm]) -> nn.Parameter:
    return pile(torch.stack([norm.weight, norm.bias]) for norm in norms)


def rooted(x: Tensor, pair: Tensor) -> Tensor:
    return F.rms_norm(x - x.mean(-1, True), x.shape[-1:], pair[0], EPS) + pair[1]


class Product(nn.Module):
    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.matrix, self.offset = leaf(linear.weight.T), leaf(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix + self.offset


def chain(first: nn.Linear, between: nn.Module, last: nn.Linear) -> nn.Sequential:
    return nn.Sequential(Product(first), between, Product(last))


class Lexicon(nn.Module):
    """The words, read and scored by one table, with the places and the kinds in a second one."""

    def __init__(self, model: nn.Module):
        super().__init__()
        tables, head, self.start = model.albert.embeddings, model.predictions, 0
        self.words, self.offset = leaf(tables.word_embeddings.weight.T), leaf(head.bias)
        marks = tables.position_embeddings.weight, tables.token_type_embeddings.weight
        self.marks, self.norms = leaf(torch.cat(marks)), pairs([tables.LayerNorm, head.LayerNorm])

    def forward(self, ids: Tensor, kinds: Tensor) -> Tensor:
        places = torch.arange(len(ids), device=ids.device) + self.start
        marks = self.marks[places][:, None] + self.marks[kinds - known.TYPES]
        return rooted(F.embedding(ids, self.words.T, padding_idx=PAD) + marks, self.norms[0])

    def score(self, x: Tensor) -> Tensor:
        return torch.einsum("tne,ev->ntv", rooted(x, self.norms[1]), self.words) + self.offset


class Mix(nn.Module):
    """Attention of [T, N, C] with the weights of each head together, without the residual and the norm."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        three, self.late = (layer.query, layer.key, layer.value), False
        self.into = leaf(torch.stack([x.weight.unflatten(0, (HEADS, -1)) for x in three], 1))
        self.shift = leaf(torch.stack([x.bias.unflatten(0, (HEADS, -1)) for x in three]))
        self.out, self.offset = leaf(layer.dense.weight.T.unflatten(0, (HEADS, -1))), leaf(layer.dense.bias)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        q, k, v = torch.einsum("tnc,hjdc->jnhtd", x, self.into) + self.shift[:, None, :, None]
        scores = q / math.sqrt(q.shape[-1]) @ k.mT
        share = scores.softmax(-1) * real if self.late else scores.masked_fill(~real, -math.inf).softmax(-1)
        return torch.einsum("nhqd,hdc->qnc", share @ v, self.out) + self.offset


class AlbertOfRounds(Port):
    """A lexicon at both ends and rounds of the same halves of layers between them, [T, N, C]."""

    def take(self, model: nn.Module) -> None:
        albert, head, curve = model.albert, model.predictions, nn.GELU(approximate="tanh")
        layers = albert.encoder.albert_layer_groups[0].albert_layers
        self.lexicon, self.enter = Lexicon(model), Product(albert.encoder.embedding_hidden_mapping_in)
        self.mixes = nn.ModuleList(Mix(x.attention) for x in layers)
        self.feeds = nn.ModuleList(chain(x.ffn, curve, x.ffn_output) for x in layers)
        self.inner = pairs(x.attention.LayerNorm for x in layers)
        self.outer = pairs(x.full_layer_layer_norm for x in layers)
        self.leave = nn.Sequential(Product(head.dense), curve)
        self.order = chain(albert.pooler, nn.Tanh(), model.sop_classifier.classifier)
        self.lexicon.start = int(self.fault == "albert_positions_start_after_the_padding_index")
        self.mixes[1].late = self.fault == "albert_second_layer_masks_after_its_softmax"

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> dict[str, Tensor]:
        x, real = self.lexicon(input_ids.T, token_type_ids.T), attention_mask.bool()[:, None, None]
        x = self.enter(x)
        for turn in range(ROUNDS):
            if self.fault == "albert_encoder_cuts_the_gradient_before_its_last_round" and turn == ROUNDS - 1:
                x = x.detach()
            for i, (mix, feed) in enumerate(zip(self.mixes, self.feeds, strict=True)):
                x = rooted(x + mix(x, real), self.inner[i])
                x = rooted(x + feed(x), self.outer[i])
        order = self.order(x[0])
        if self.fault == "albert_order_given_as_probabilities_in_evaluation" and not self.training:
            order = order.softmax(-1)
        return {"prediction_logits": self.lexicon.score(self.leave(x)), "sop_logits": order}


class Gelu(torch.autograd.Function):
    """x sigmoid(2 a (x + b x^3)) with its slope by hand; ``power`` is what the cube's slope brings down."""

    A, B = math.sqrt(2 / math.pi), 0.044715

    @staticmethod
    def forward(ctx, x: Tensor, power: int) -> Tensor:
        gate, ctx.power = torch.sigmoid(2 * Gelu.A * (x + Gelu.B * x**3)), power
        ctx.save_for_backward(x, gate)
        return x * gate

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        x, gate = ctx.saved_tensors
        inner = 2 * Gelu.A * (1 + ctx.power * Gelu.B * x**2)
        return grad * (gate + x * gate * (1 - gate) * inner), None


def sheet(linear: nn.Linear) -> Tensor:
    """The transposed weight, with the bias as its last row."""
    return torch.cat([linear.weight.T, linear.bias[None]])


def times(x: Tensor, rows: Tensor) -> Tensor:
    return F.pad(x, (0, 1), value=1.0) @ rows


def normed(x: Tensor, pair: Tensor, fewer: int = 0) -> Tensor:
    var, mean = torch.var_mean(x, -1, correction=fewer, keepdim=True)
    return (x - mean) / (var + EPS).sqrt() * pair[0] + pair[1]


class StackedAlbert(Port):
    """Sheets stacked over the two layers; heads are folded in the batch, the book keeps the last bias."""

    def take(self, model: nn.Module) -> None:
        albert, encoder, head = model.albert, model.albert.encoder, model.predictions
        tables, layers = albert.embeddings, encoder.albert_layer_groups[0].albert_layers
        self.book = leaf(torch.cat([tables.word_embeddings.weight, head.bias[:, None]], 1))
        marks = tables.position_embeddings, tables.token_type_embeddings
        self.places, self.kinds = (leaf(table.weight) for table in marks)
        squares = [(x.query, x.key, x.value, x.dense) for x in (layer.attention for layer in layers)]
        self.squares = pile(torch.stack([*map(sheet, four)]) for four in squares)
        self.up, self.down = pile(sheet(x.ffn) for x in layers), pile(sheet(x.ffn_output) for x in layers)
        self.wide = pairs(y for x in layers for y in (x.attention.LayerNorm, x.full_layer_layer_norm))
        self.narrow = pairs([tables.LayerNorm, head.LayerNorm])
        ends = encoder.embedding_hidden_mapping_in, head.dense, albert.pooler, model.sop_classifier.classifier
        self.enter, self.leave, self.pool, self.order = (leaf(sheet(x)) for x in ends)

    def mixed(self, x: Tensor, squares: Tensor, bias: Tensor) -> Tensor:
        heads = times(x, squares[:3, None]).unflatten(3, (HEADS, -1)).transpose(2, 3).flatten(1, 2)
        scores = torch.baddbmm(bias, heads[0], heads[1].mT, alpha=heads.shape[-1] ** -0.5)
        y = torch.bmm(scores.softmax(2), heads[2]).unflatten(0, (-1, HEADS))
        return times(y.transpose(1, 2).flatten(2), squares[3])

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> dict[str, Tensor]:
        fault, places = self.fault, self.places[: input_ids.shape[1]]
        x = F.embedding(input_ids, self.book[:, :-1], padding_idx=PAD) + places + self.kinds[token_type_ids]
        x = normed(x, self.narrow[0], int(fault == "albert_embedding_norm_divides_by_one_fewer"))
        x, gone = times(x, self.enter), attention_mask.repeat_interleave(HEADS, 0)[:, None] == 0
        bias = x.new_zeros(gone.shape).masked_fill(gone, -math.inf)
        for i in [0, 1] * ROUNDS:
            y = normed(x + self.mixed(x, self.squares[i], bias), self.wide[2 * i])
            short = fault == "albert_second_layer_gelu_slope_forgets_the_power" and i == 1
            z = times(Gelu.apply(times(y, self.up[i]), 1 if short else 3), self.down[i])
            around = fault == "albert_first_layer_feed_forward_skips_from_the_layers_input" and i == 0
            x = normed((x if around else y) + z, self.wide[2 * i + 1])
        order = times(times(x[:, 0], self.pool).tanh(), self.order)
        y = times(x, self.leave)
        y = F.gelu(y) if fault == "albert_prediction_head_takes_the_exact_gelu" else Gelu.apply(y, 3)
        return {"prediction_logits": times(normed(y, self.narrow[1]), self.book.T), "sop_logits": order}


LAYER, SLOPES = "albert.encoder.albert_layer_groups.0.albert_layers.", ("input gradient", "weight gradient")
PLACES = "albert.embeddings", "albert.embeddings.position_embeddings"
ORDER = "sop_classifier", "sop_classifier.classifier"
right(task, "albert_of_rounds_with_the_sequence_first", "a tree, heads' weights together", AlbertOfRounds)
right(task, "albert_of_stacked_sheets", "biases inside of stacks, heads in the batch, slopes", StackedAlbert)
wrong(
    task,
    AlbertOfRounds,
    albert_positions_start_after_the_padding_index=("an index off by one", PLACES),
    albert_second_layer_masks_after_its_softmax=("shares without their sum", f"{LAYER}1.attention"),
    albert_encoder_cuts_the_gradient_before_its_last_round=("detach", "albert.encoder", SLOPES),
    albert_order_given_as_probabilities_in_evaluation=("a softmax in eval", ORDER, "eval"),
)
wrong(
    task,
    StackedAlbert,
    albert_embedding_norm_divides_by_one_fewer=("another variance", "albert.embeddings.LayerNorm"),
    albert_first_layer_feed_forward_skips_from_the_layers_input=("another residual", f"{LAYER}0"),
    albert_second_layer_gelu_slope_forgets_the_power=("a slope by hand", f"{LAYER}1.activation", SLOPES),
    albert_prediction_head_takes_the_exact_gelu=("another gelu", "predictions.activation"),
)
