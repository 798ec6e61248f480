"""Two ports of a small TAPAS: a tree that sees cells as a grid of memberships, and one flat class."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _fifty_first_tapas_table as ref
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("fifty_first_tapas_table", ref.TapasForQuestionAnswering, ref.tables, ref.mixed_loss)
ROWS, COLUMNS, PLACES, WIDTH, HEADS = ref.ROWS, ref.COLUMNS, ref.PLACES, ref.WIDTH, ref.HEADS


class Affine(nn.Module):
    def __init__(self, *layers: nn.Linear):
        super().__init__()
        self.matrix = leaf(torch.cat([x.weight for x in layers]).T)
        self.offset = leaf(torch.cat([x.bias for x in layers]))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix + self.offset


class Reader(nn.Module):
    """The first layer: words, places in cells, and kinds, which share one long list of rows."""

    def __init__(self, part: nn.Module, swapped: bool):
        super().__init__()
        kinds = [getattr(part, f"token_type_embeddings_{i}").weight for i in range(4)]
        self.words, self.places = leaf(part.word_embeddings.weight), leaf(part.position_embeddings.weight)
        self.kinds, self.norm, self.swapped = leaf(torch.cat(kinds)), part.LayerNorm, swapped
        sizes = torch.tensor([0, *(len(x) for x in kinds[:3])])
        self.register_buffer("starts", sizes.cumsum(0), persistent=False)

    def forward(self, words: Tensor, kinds: Tensor) -> Tensor:
        cell = kinds[..., 1] * (COLUMNS if self.swapped else ROWS) + kinds[..., 2]
        same = cell[:, :, None] == cell[:, None]
        place = torch.arange(words.shape[1]) - same.int().argmax(2)
        found = self.kinds[kinds + self.starts].sum(2) + self.places[place.clamp(max=PLACES - 1)]
        return self.norm(found + F.embedding(words, self.words, padding_idx=0))


class Block(nn.Module):
    def __init__(self, layer: nn.Module, size: int):
        super().__init__()
        mixer, joining = layer.attention.self, layer.attention.output
        self.three, self.size = Affine(mixer.query, mixer.key, mixer.value), size
        self.join, self.after = Affine(joining.dense), joining.LayerNorm
        self.wide, self.narrow = Affine(layer.intermediate.dense), Affine(layer.output.dense)
        self.last = layer.output.LayerNorm

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        q, k, v = self.three(x).unflatten(2, (3, HEADS, -1)).unbind(2)
        scores = torch.einsum("nqhc,nkhc->nqkh", q * self.size**-0.5, k)
        weights = scores.masked_fill(~seen[:, None, :, None], float("-inf")).softmax(2)
        x = self.after(x + self.join(torch.einsum("nqkh,nkhc->nqhc", weights, v).flatten(2)))
        return self.last(x + self.narrow(F.gelu(self.wide(x))))


class TableReader(Port):
    """Cells are a grid of memberships, over which means are products; losses from logarithms of sigmoids."""

    def take(self, model: ref.TapasForQuestionAnswering) -> None:
        tapas, fault = model.tapas, self.fault
        self.read = Reader(tapas.embeddings, fault == "tapas_table_cells_of_two_columns_collide")
        wide = fault == "tapas_table_second_attention_scaled_by_the_whole_width"
        sizes = WIDTH // HEADS, WIDTH if wide else WIDTH // HEADS
        self.blocks = nn.ModuleList(map(Block, tapas.encoder.layer, sizes))
        self.gist, self.choose = Affine(tapas.pooler.dense), Affine(model.aggregation_classifier)
        self.token, self.column = leaf(model.output_weights), leaf(model.column_output_weights)
        self.ends = pile([model.output_bias, model.column_output_bias])

    def selection(self, cells: Tensor, columns: Tensor, picked: Tensor, real: Tensor) -> Tensor:
        """[N, ROWS, COLUMNS] logits, picks and real cells, and [N, COLUMNS] logits -> [N]."""
        right_one = F.one_hot(picked.sum(1).argmax(1), COLUMNS).to(cells)
        loss = columns.logsumexp(1) - (columns * right_one).sum(1)
        spent = -torch.where(picked, F.logsigmoid(cells), F.logsigmoid(-cells))
        kept = real * right_one[:, None]
        count = real if self.fault == "tapas_table_cell_loss_averaged_over_the_whole_table" else kept
        return loss + (spent * kept).sum((1, 2)) / (count.sum((1, 2)) + 1e-10)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor, labels: Tensor):
        x = self.read(input_ids, token_type_ids)
        for block in self.blocks:
            x = block(x, attention_mask.bool())
        start = x[:, 0].detach() if self.fault == "tapas_table_pooler_input_detached" else x[:, 0]
        operation = self.choose(self.gist(start).tanh())
        logits = (x @ self.token + self.ends[0]) / ref.TEMPERATURE
        row, column = (F.one_hot(token_type_ids[..., i], size) for i, size in ((2, ROWS), (1, COLUMNS)))
        member = (row[..., None] * column[:, :, None]).to(x)
        share = member / member.sum(1, keepdim=True).clamp(min=1)
        real = (member.sum(1) > 0).to(x) * (torch.arange(ROWS) > 0)[:, None]
        scores = torch.einsum("nt,ntrc->nrc", x @ self.column + self.ends[1], share)
        columns = (scores * real).sum(1) / (real.sum(1) + 1e-10)
        columns = columns + ref.FAR * ((real.sum(1) == 0) & (torch.arange(COLUMNS) > 0))
        picked = (member * labels[..., None, None]).sum(1) > 0
        cells = torch.einsum("nt,ntrc->nrc", logits, share)
        answered = self.selection(cells, columns, picked, real) - operation.log_softmax(1)[:, 0]
        summed = operation.logsumexp(1) - operation[:, 1:].logsumexp(1)
        return logits, operation, torch.where(picked.any((1, 2)), answered, summed)


def packed(layer: nn.Module) -> Tensor:
    """A matrix whose rows are all the products of a layer, each with its offset as its last column."""
    attention = layer.attention.self
    parts = attention.query, attention.key, attention.value, layer.attention.output.dense
    wide, narrow = layer.intermediate.dense, layer.output.dense
    rows = [torch.cat([x.weight, x.bias[:, None]], 1) for x in (*parts, wide)]
    return torch.cat([*rows, F.pad(narrow.weight.T, (0, 1)), F.pad(narrow.bias[None], (0, 1))])


class FlatTapas(Port):
    """A pile of packed layers, a pile of norms, one table of embeddings, and sums into cells."""

    def take(self, model: ref.TapasForQuestionAnswering) -> None:
        first, layers = model.tapas.embeddings, model.tapas.encoder.layer
        kinds = (getattr(first, f"token_type_embeddings_{i}") for i in range(4))
        tables = [first.position_embeddings, *kinds]
        self.words = leaf(first.word_embeddings.weight)
        self.rest = leaf(torch.cat([x.weight for x in tables]))
        self.starts = [sum(x.num_embeddings for x in tables[:i]) for i in range(5)]
        norms = [first.LayerNorm, *(y.LayerNorm for x in layers for y in (x.attention.output, x.output))]
        self.norms = pile(torch.stack([x.weight, x.bias]) for x in norms)
        self.layers = pile(map(packed, layers))
        ends = model.tapas.pooler.dense, model.aggregation_classifier
        self.pool, self.operate = (leaf(torch.cat([x.weight, x.bias[:, None]], 1)) for x in ends)
        heads = ([getattr(model, x + "output_" + y) for y in ("weights", "bias")] for x in ("", "column_"))
        self.heads = pile(torch.cat([x, y[None]]) for x, y in heads)

    def norm(self, i: int, x: Tensor) -> Tensor:
        less = i == 3 and self.fault == "tapas_table_norm_of_unbiased_variance"
        spread, middle = torch.var_mean(x, -1, correction=int(less), keepdim=True)
        return torch.addcmul(self.norms[i, 1], (x - middle) * (spread + 1e-12).rsqrt(), self.norms[i, 0])

    def layer(self, i: int, x: Tensor, mask: Tensor) -> Tensor:
        rows, before = self.layers[i], x
        qkv, out, wide, narrow = rows[:-1].split([3 * WIDTH, WIDTH, ref.INNER, ref.INNER])
        parts = F.linear(x, qkv[:, :-1], qkv[:, -1]).unflatten(2, (3 * HEADS, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(*parts.chunk(3, 1), attn_mask=mask)
        x = self.norm(2 * i + 1, x + F.linear(mixed.transpose(1, 2).flatten(2), out[:, :-1], out[:, -1]))
        y = F.gelu(F.linear(x, wide[:, :-1], wide[:, -1])) @ narrow[:, :-1] + rows[-1, :-1]
        around = before if self.fault == "tapas_table_first_residual_skips_attention" else x
        return self.norm(2 * i + 2, y + (around if i == 0 else x))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor, labels: Tensor):
        cell, t = token_type_ids[..., 1] + COLUMNS * token_type_ids[..., 2], input_ids.shape[1]
        place = torch.arange(t) - torch.stack([(cell == c[:, None]).int().argmax(1) for c in cell.T], 1)
        index = torch.cat([place.clamp(max=PLACES - 1)[..., None], token_type_ids], 2)
        x = F.embedding(input_ids, self.words, padding_idx=0)
        x = self.norm(0, x + self.rest[index + torch.tensor(self.starts)].sum(2))
        for i in range(len(self.layers)):
            x = self.layer(i, x, attention_mask[:, None, None].bool())
        tokens = x @ self.heads[:, :-1].T + self.heads[:, -1]
        plain = self.fault == "tapas_table_temperature_left_out_in_evaluation" and not self.training
        tokens = tokens / tokens.new_tensor([1 if plain else ref.TEMPERATURE, 1])
        pooled = F.linear(x[:, 0], self.pool[:, :-1], self.pool[:, -1]).tanh()
        operation = F.linear(pooled, self.operate[:, :-1], self.operate[:, -1])
        return tokens[..., 0], operation, self.losses(tokens, operation.softmax(1), cell, labels)

    def losses(self, tokens: Tensor, operation: Tensor, cells: Tensor, labels: Tensor) -> Tensor:
        header, found = self.fault == "tapas_table_column_logits_count_the_header_as_a_cell", []
        for values, chance, cell, label in zip(tokens, operation, cells, labels, strict=True):
            if not label.any():
                found.append(-(1 - chance[0]).log())
                continue
            used, back = cell.unique(return_inverse=True)
            means = values.new_zeros(len(used), 2).index_add(0, back, values) / back.bincount()[:, None]
            means, used = means[used >= COLUMNS], used[used >= COLUMNS]
            column, goal = used % COLUMNS, cell[label.argmax()] % COLUMNS
            names = column.unique()
            inside = (names[:, None] == column).to(values)
            scores = F.pad(inside @ means[:, 1] / (inside.sum(1) + header), (1, 0))
            sign = 1 - 2 * torch.isin(used, cell[label > 0]).to(values)
            spent = F.softplus(sign * means[:, 0])[column == goal].mean()
            found.append(scores.logsumexp(0) - scores[1:][names == goal].sum() + spent - chance[0].log())
        return torch.stack(found)


SLOPES = ("input gradient", "weight gradient")
FIRST = ("tapas.encoder.layer.0.output", "tapas.encoder.layer.0")
right(task, "tapas_table_of_memberships", "a tree, fused products, means as products", TableReader)
right(task, "tapas_table_flat", "packed piles, one table of embeddings, a loop over examples", FlatTapas)
wrong(
    task,
    TableReader,
    tapas_table_cells_of_two_columns_collide=("cells that collide", "tapas.embeddings"),
    tapas_table_second_attention_scaled_by_the_whole_width=("scale", "tapas.encoder.layer.1.attention.self"),
    tapas_table_pooler_input_detached=("detach", "tapas.pooler", SLOPES),
    tapas_table_cell_loss_averaged_over_the_whole_table=("another mean", ""),
)
wrong(
    task,
    FlatTapas,
    tapas_table_first_residual_skips_attention=("another residual", FIRST),
    tapas_table_norm_of_unbiased_variance=("variance", "tapas.encoder.layer.1.attention.output.LayerNorm"),
    tapas_table_column_logits_count_the_header_as_a_cell=("a count off by one", ""),
    tapas_table_temperature_left_out_in_evaluation=("a factor left out in eval", "", "eval"),
)
