"""A small TAPAS: questions over tables, answered by cells of one column or by an aggregation."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, WIDTH, HEADS, INNER, LAYERS, PLACES = 61, 24, 3, 44, 2, 14
SEGMENTS, COLUMNS, ROWS, RANKS, OPERATIONS = 2, 4, 5, 6, 3
QUESTIONS, LENGTH, TEMPERATURE, FAR = 7, 47, 0.8, -10000.0


def reduce(values: Tensor, index: Tensor, count: int, how: str) -> Tensor:
    """[N, T] -> [N, count]: the values of each segment reduced; an empty segment gives zero."""
    empty = values.new_zeros(len(values), count)
    return empty.scatter_reduce(1, index, values, how, include_self=False)


class TapasEmbeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.position_embeddings = nn.Embedding(PLACES, WIDTH)
        for i, size in enumerate((SEGMENTS, COLUMNS, ROWS, RANKS)):
            setattr(self, f"token_type_embeddings_{i}", nn.Embedding(size, WIDTH))
        self.LayerNorm = nn.LayerNorm(WIDTH, eps=1e-12)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        position = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        cell = token_type_ids[..., 2] * COLUMNS + token_type_ids[..., 1]
        first = reduce(position, cell, ROWS * COLUMNS, "amin").gather(1, cell)
        position = (position - first).clamp(max=PLACES - 1)
        embeddings = self.word_embeddings(input_ids) + self.position_embeddings(position)
        for i in range(4):
            embeddings = embeddings + getattr(self, f"token_type_embeddings_{i}")(token_type_ids[..., i])
        return self.LayerNorm(embeddings)


class TapasSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        layers = self.query, self.key, self.value
        q, k, v = (x(hidden_states).unflatten(2, (HEADS, -1)).transpose(1, 2) for x in layers)
        scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS) + attention_mask
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class TapasOutput(nn.Module):
    """A dense layer, then the norm of its sum with what goes around it."""

    def __init__(self, size: int):
        super().__init__()
        self.dense, self.LayerNorm = nn.Linear(size, WIDTH), nn.LayerNorm(WIDTH, eps=1e-12)

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(hidden_states) + input_tensor)


class TapasAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.self, self.output = TapasSelfAttention(), TapasOutput(WIDTH)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        return self.output(self.self(hidden_states, attention_mask), hidden_states)


class TapasIntermediate(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.intermediate_act_fn = nn.Linear(WIDTH, INNER), nn.GELU()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.intermediate_act_fn(self.dense(hidden_states))


class TapasLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.intermediate = TapasAttention(), TapasIntermediate()
        self.output = TapasOutput(INNER)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        attention_output = self.attention(hidden_states, attention_mask)
        return self.output(self.intermediate(attention_output), attention_output)


class TapasEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.ModuleList(TapasLayer() for _ in range(LAYERS))

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        for layer in self.layer:
            hidden_states = layer(hidden_states, attention_mask)
        return hidden_states


class TapasPooler(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.activation = nn.Linear(WIDTH, WIDTH), nn.Tanh()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.activation(self.dense(hidden_states[:, 0]))


class TapasModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings, self.encoder, self.pooler = TapasEmbeddings(), TapasEncoder(), TapasPooler()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> tuple:
        x = self.embeddings(input_ids, token_type_ids)
        mask = (1 - attention_mask[:, None, None].to(x)) * torch.finfo(x.dtype).min
        x = self.encoder(x, mask)
        return x, self.pooler(x)


class TapasForQuestionAnswering(nn.Module):
    """Tokens, their types and labels -> token logits, aggregation logits and the loss of each example."""

    def __init__(self):
        super().__init__()
        self.tapas, self.aggregation_classifier = TapasModel(), nn.Linear(WIDTH, OPERATIONS)
        self.output_weights, self.column_output_weights = (nn.Parameter(torch.empty(WIDTH)) for _ in "tc")
        self.output_bias, self.column_output_bias = (nn.Parameter(torch.empty(())) for _ in "tc")
        for name, p in self.named_parameters():
            nn.init.normal_(p, float("LayerNorm.weight" in name), 0.2)

    def compute_column_logits(self, x: Tensor, cell: Tensor, cell_mask: Tensor) -> Tensor:
        token_logits = x @ self.column_output_weights + self.column_output_bias
        cell_logits = reduce(token_logits, cell, ROWS * COLUMNS, "mean") * cell_mask
        count = cell_mask.unflatten(1, (ROWS, COLUMNS)).sum(1)
        logits = cell_logits.unflatten(1, (ROWS, COLUMNS)).sum(1) / (count + 1e-10)
        padding = (count < 0.5) & (torch.arange(COLUMNS) != 0)
        return logits + FAR * padding

    def selection_loss(self, logits: Tensor, columns: Tensor, labels: Tensor, cell: Tensor, mask: Tensor):
        chosen = reduce(labels, cell, ROWS * COLUMNS, "amax").to(logits)
        column = chosen.unflatten(1, (ROWS, COLUMNS)).sum(1).argmax(1)
        column_loss = F.cross_entropy(columns, column, reduction="none")
        per_cell = reduce(logits, cell, ROWS * COLUMNS, "mean")
        log_prob = -F.binary_cross_entropy_with_logits(per_cell, chosen, reduction="none")
        mask = mask * (torch.arange(ROWS * COLUMNS) % COLUMNS == column[:, None])
        cell_loss = -(log_prob * mask).sum(1) / (mask.sum(1) + 1e-10)
        return column_loss + torch.where(labels.sum(1) == 0, 0.0, cell_loss)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor, labels: Tensor):
        x, pooled = self.tapas(input_ids, attention_mask, token_type_ids)
        cell = token_type_ids[..., 2] * COLUMNS + token_type_ids[..., 1]
        table_mask = (token_type_ids[..., 2] > 0).to(x)
        cell_mask = reduce(table_mask, cell, ROWS * COLUMNS, "mean")
        logits = (x @ self.output_weights + self.output_bias) / TEMPERATURE
        columns = self.compute_column_logits(x, cell, cell_mask)
        aggregation = self.aggregation_classifier(pooled)
        aggregate_mask = (labels.sum(1) == 0).to(x)
        selection = self.selection_loss(logits, columns, labels, cell, cell_mask) * (1 - aggregate_mask)
        known = -aggregation.log_softmax(1)[:, 0] * (1 - aggregate_mask)
        unknown = -aggregation.softmax(1)[:, 1:].sum(1).log() * aggregate_mask
        return logits, aggregation, selection + known + unknown


def tables() -> tuple[dict[str, Tensor], Tensor]:
    """Questions, then tables of two to four rows under a header; some ask for cells of one column."""
    words, labels, mask = (torch.zeros(QUESTIONS, LENGTH, dtype=torch.long) for _ in range(3))
    types = torch.zeros(QUESTIONS, LENGTH, 4, dtype=torch.long)
    for n in range(QUESTIONS):
        rows, width, asked = 2 + n % 3, 2 + (n > 1), int(torch.randint(1, 3, ()))
        end = 5 + int(torch.randint(4, ()))
        words[n, :end] = torch.randint(10, 30, (end,))
        words[n, 0], words[n, 1], words[n, end - 1] = 1, 3 + asked + 3 * (n % 4 == 0), 2
        for row in range(rows + 1):
            order = torch.randperm(rows)
            for column in range(1, width + 1):
                start, end = end, end + int(torch.randint(1, 4, ()))
                end = min(end, LENGTH)
                words[n, start:end] = torch.randint(30, WORDS, (end - start,))
                rank = 1 + int(order[column % rows]) if row else 0
                types[n, start:end] = torch.tensor([1, column, row, rank])
                labels[n, start:end] = int(n % 4 > 0 and column == asked and row in (1, 2 + n % 2))
        mask[n, :end] = 1
    return {"input_ids": words, "attention_mask": mask, "token_type_ids": types, "labels": labels}, labels


def mixed_loss(outputs: tuple[Tensor, Tensor, Tensor], labels: Tensor) -> Tensor:
    """The mean of the examples' losses, by four."""
    return outputs[2].mean() / 4
