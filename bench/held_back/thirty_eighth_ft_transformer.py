"""Two ports of a small FT-Transformer: a tree with the tokens first, and one class of stacked weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import filled, right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._thirty_eighth_ft_transformer import HEADS, PLAIN, FTTransformer, table, values_and_class

task = few("thirty_eighth_ft_transformer", FTTransformer, table, values_and_class)


class Ramps(nn.Module):
    """A value by its bins: clamped to each, and what is left over on either side for the outer ones."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.register_buffer("edges", layer.encoding.edges.clone())
        self.rows, self.offset, self.closed = leaf(layer.linear.weight.T), leaf(layer.linear.bias), False

    def forward(self, x: Tensor) -> Tensor:
        part = (x[:, None] - self.edges[:-1]) / self.edges.diff()
        below, above = part[:, :1].clamp(max=0), (part[:, -1:] - 1).clamp(min=0)
        y = part.clamp(0, 1) @ self.rows + below * self.rows[0] + self.offset
        return y if self.closed else y + above * self.rows[-1]


class Columns(nn.Module):
    """A row of the table as a stack of tokens, [tokens, N, WIDTH], the CLS token last."""

    def __init__(self, model: FTTransformer):
        super().__init__()
        tokens = model.feature_tokenizer
        numbers, names = tokens.num_tokenizer, tokens.cat_tokenizer
        self.slope, self.level = leaf(numbers.weight), leaf(numbers.bias)
        self.ramps = Ramps(tokens.ple_tokenizer)
        cut = names.embeddings.weight.tensor_split(names.category_offsets[1:])
        self.books = nn.ModuleList(filled(nn.Embedding(*rows.shape), rows) for rows in cut)
        self.titles, self.blank = leaf(names.bias), leaf(tokens.missing_token.weight)
        self.summary, self.careless = leaf(model.cls_token.weight), False

    def forward(self, x_num: Tensor, x_cat: Tensor, missing: Tensor) -> Tensor:
        columns = [torch.addcmul(self.level[i], x_num[:, i, None], self.slope[i]) for i in range(PLAIN)]
        columns.append(self.ramps(x_num[:, -1]))
        columns += [book(x_cat[:, i]) + self.titles[i] for i, book in enumerate(self.books)]
        if not self.careless or self.training:
            gaps = zip(columns, self.blank, missing.T[..., None], strict=True)
            columns = [blank * gap + column.masked_fill(gap, 0) for column, blank, gap in gaps]
        return torch.stack([*columns, self.summary.expand(len(x_num), -1)])


class Look(nn.Module):
    """Each head by itself; the compressions are applied to the scores and to the attention."""

    def __init__(self, block: nn.ModuleDict):
        super().__init__()
        old = block["attention"]
        self.norm = block["attention_normalization"] if "attention_normalization" in block else nn.Identity()
        layers, self.silent = (old.W_q, old.W_k, old.W_v), False
        self.ways = nn.ParameterList(leaf(x.weight.unflatten(0, (HEADS, -1))) for x in layers)
        self.shifts = nn.ParameterList(leaf(x.bias.unflatten(0, (HEADS, -1))) for x in layers)
        self.join, self.end = leaf(old.W_out.weight.unflatten(1, (HEADS, -1))), leaf(old.W_out.bias)
        self.squeeze = pile([block["key_compression"].weight, block["value_compression"].weight])

    def forward(self, x: Tensor, count: int) -> Tensor:
        y, total, (short, brief) = self.norm(x), self.end, self.squeeze
        brief = brief.detach() if self.silent else brief
        for h in range(HEADS):
            q, k, v = (F.linear(y, w[h], b[h]) for w, b in zip(self.ways, self.shifts, strict=True))
            scores = torch.einsum("qnd,tnd->nqt", q[-count:], k) @ short.T
            seen = (scores * k.shape[-1] ** -0.5).softmax(-1) @ brief
            total = total + torch.einsum("nqt,tnd,od->qno", seen, v, self.join[:, h])
        return x[-count:] + total


class Think(nn.Module):
    def __init__(self, block: nn.ModuleDict):
        super().__init__()
        first, self.norm = block["ffn"].linear_first, block["ffn_normalization"]
        cut = zip(first.weight.chunk(2), first.bias.chunk(2), strict=True)
        self.value, self.gate = (filled(nn.Linear(*w.T.shape), w, b) for w, b in cut)
        self.back, self.swapped = block["ffn"].linear_second, False

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        value, gate = (self.gate(y), self.value(y)) if self.swapped else (self.value(y), self.gate(y))
        return x + self.back(value * gate.clamp(min=0))


class TableReader(Port):
    """Columns as tokens first, then looks and thoughts by turns, heads one after the other."""

    def take(self, model: FTTransformer) -> None:
        blocks, head, fault = model.transformer.blocks, model.transformer.head, self.fault
        self.columns = Columns(model)
        self.looks, self.thoughts = nn.ModuleList(map(Look, blocks)), nn.ModuleList(map(Think, blocks))
        self.tell = nn.Sequential(head.normalization, nn.ReLU(), head.linear)
        self.columns.ramps.closed = fault == "ft_transformer_last_bin_closed_above"
        self.columns.careless = fault == "ft_transformer_gaps_left_in_evaluation"
        self.looks[0].silent = fault == "ft_transformer_first_value_squeeze_fixed"
        self.thoughts[1].swapped = fault == "ft_transformer_second_reglu_gates_with_its_first_half"

    def forward(self, x_num: Tensor, x_cat: Tensor, missing: Tensor) -> Tensor:
        x = self.columns(x_num, x_cat, missing)
        for i, (look, think) in enumerate(zip(self.looks, self.thoughts, strict=True)):
            x = think(look(x, 1 if i == 2 else len(x)))
        return self.tell(x[0])


def sheet(*layers: nn.Module) -> Tensor:
    """Linear layers of one input side by side, transposed, their biases as the last row."""
    return torch.cat([torch.cat([x.weight.T, x.bias[None]]) for x in layers], 1)


class StackedTables(Port):
    """A stack for each kind of weight; every token goes through every layer, and the last is read."""

    def take(self, model: FTTransformer) -> None:
        tokens, head, blocks = model.feature_tokenizer, model.transformer.head, model.transformer.blocks
        numbers, bins, names = tokens.num_tokenizer, tokens.ple_tokenizer, tokens.cat_tokenizer
        self.rows = leaf(torch.cat([numbers.weight, bins.linear.weight.T, names.embeddings.weight]))
        self.base = leaf(torch.cat([numbers.bias, bins.linear.bias[None], names.bias]))
        self.gap, self.cls = leaf(tokens.missing_token.weight), leaf(model.cls_token.weight)
        self.register_buffer("edges", bins.encoding.edges.clone())
        self.register_buffer("start", names.category_offsets + PLAIN + len(self.edges) - 1)
        if self.fault == "ft_transformer_third_category_starts_a_row_early":
            self.start[2] -= 1
        attentions = [x["attention"] for x in blocks]
        self.ask = pile(sheet(x.W_q, x.W_k, x.W_v) for x in attentions)
        self.out = pile(sheet(x.W_out) for x in attentions)
        ends = ("key_compression", "value_compression")
        self.fewer = pile(torch.stack([x[end].weight for end in ends]) for x in blocks)
        self.up = pile(sheet(x["ffn"].linear_first) for x in blocks)
        self.down, self.last = pile(sheet(x["ffn"].linear_second) for x in blocks), leaf(sheet(head.linear))
        norms = [x["attention_normalization"] for x in blocks[1:]] + [x["ffn_normalization"] for x in blocks]
        self.norms = pile(torch.stack([x.weight, x.bias]) for x in (*norms, head.normalization))

    def through(self, x: Tensor, rows: Tensor) -> Tensor:
        return x @ rows[:-1] + rows[-1]

    def norm(self, x: Tensor, i: int) -> Tensor:
        eps = 1e-3 if i == 0 and self.fault == "ft_transformer_second_block_norm_eps_of_keras" else 1e-5
        x = x - x.mean(-1, keepdim=True)
        return torch.addcmul(
            self.norms[i, 1], x * (x.square().mean(-1, True) + eps).rsqrt(), self.norms[i, 0]
        )

    def tokens(self, x_num: Tensor, x_cat: Tensor, missing: Tensor) -> Tensor:
        fill = (x_num[:, -1:] - self.edges[:-1]) / self.edges.diff()
        fill = torch.cat([fill[:, :1], fill[:, 1:].relu()], 1)
        fill = torch.cat([1 - (1 - fill[:, :-1]).relu(), fill[:, -1:]], 1)
        plain, ramps = self.rows[:PLAIN], self.rows[PLAIN : PLAIN + fill.shape[1]]
        named = self.rows[x_cat + self.start]
        x = torch.cat([x_num[:, :-1, None] * plain, (fill @ ramps)[:, None], named], 1) + self.base
        x = x + missing[..., None] * (self.gap - x)
        return torch.cat([x, self.cls.repeat(len(x), 1, 1)], 1)

    def attend(self, x: Tensor, i: int) -> Tensor:
        q, k, v = self.through(x, self.ask[i]).chunk(3, 2)
        k, y = self.fewer[i, 0] @ k, self.fewer[i, 1] @ v
        if self.fault == "ft_transformer_last_values_compressed_before_projected" and i == 2:
            y = self.through(self.fewer[i, 1] @ x, self.ask[i].chunk(3, 1)[2])
        q, k, y = (t.unflatten(2, (HEADS, -1)).transpose(1, 2) for t in (q, k, y))
        y = F.scaled_dot_product_attention(q, k, y)
        return self.through(y.transpose(1, 2).flatten(2), self.out[i])

    def forward(self, x_num: Tensor, x_cat: Tensor, missing: Tensor) -> Tensor:
        x = self.tokens(x_num, x_cat, missing)
        for i in range(3):
            x = x + self.attend(self.norm(x, i - 1) if i else x, i)
            y = self.through(self.norm(x, i + 2), self.up[i])
            x = x + self.through(y.chunk(2, -1)[0] * y.chunk(2, -1)[1].relu(), self.down[i])
        z = self.norm(x[:, -1], 5)
        if self.fault == "ft_transformer_head_relu_passes_all":
            return self.through(z + (z.relu() - z).detach(), self.last)
        return self.through(z.relu(), self.last)


TOKENS, BLOCK, SLOPES = "feature_tokenizer.", "transformer.blocks.", ("input gradient", "weight gradient")
right(task, "ft_transformer_of_tokens_first", "a tree, heads one by one, split weights", TableReader)
right(task, "ft_transformer_of_stacked_weights", "packed stacks, all tokens to the end", StackedTables)
wrong(
    task,
    TableReader,
    ft_transformer_last_bin_closed_above=("a clamp too many", TOKENS + "ple_tokenizer.encoding"),
    ft_transformer_gaps_left_in_evaluation=("a mask left out", TOKENS + "missing_token", "eval"),
    ft_transformer_first_value_squeeze_fixed=("detach", BLOCK + "0.value_compression", "weight gradient"),
    ft_transformer_second_reglu_gates_with_its_first_half=("swapped halves", BLOCK + "1.ffn.activation"),
)
wrong(
    task,
    StackedTables,
    ft_transformer_third_category_starts_a_row_early=("off by one", TOKENS + "cat_tokenizer"),
    ft_transformer_second_block_norm_eps_of_keras=("epsilon", BLOCK + "1.attention_normalization"),
    ft_transformer_last_values_compressed_before_projected=("another order", BLOCK + "2.attention"),
    ft_transformer_head_relu_passes_all=("straight-through", "transformer.head.activation", SLOPES),
)
