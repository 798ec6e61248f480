"""A small BERT with both of its heads: hidden words, and whether the second sentence follows the first."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, PLACES, KINDS, WIDTH, HEADS, INNER, DEPTH, EPS = 32, 16, 2, 24, 3, 48, 3, 1e-12
PAD, CLS, SEP, MASK, FIRST = range(5)
ROWS, LENGTH, IGNORED = 4, 12, -100


def varied(module: nn.Module) -> None:
    """Start with weights that let every layer, gain and shift count."""
    if isinstance(module, nn.LayerNorm):
        nn.init.uniform_(module.weight, 0.6, 1.4)
        nn.init.normal_(module.bias, std=0.2)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.3)
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=1.2 * module.in_features**-0.5)
        nn.init.normal_(module.bias, std=0.2)


class BertEmbeddings(nn.Module):
    """The sum of what word, place and sentence stand for, normed."""

    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(WORDS, WIDTH, padding_idx=PAD)
        self.position_embeddings = nn.Embedding(PLACES, WIDTH)
        self.token_type_embeddings = nn.Embedding(KINDS, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH, EPS)
        self.register_buffer("position_ids", torch.arange(PLACES)[None], persistent=False)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        places = self.position_ids[:, : input_ids.shape[1]]
        summed = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        return self.LayerNorm(summed + self.position_embeddings(places))


class BertSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], HEADS, -1).transpose(1, 2)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        query, key = self.split(self.query(hidden_states)), self.split(self.key(hidden_states))
        scores = query @ key.transpose(2, 3) / query.shape[-1] ** 0.5 + attention_mask
        context = scores.softmax(-1) @ self.split(self.value(hidden_states))
        return context.transpose(1, 2).flatten(2)


class BertSelfOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.LayerNorm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH, EPS)

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(hidden_states) + input_tensor)


class BertAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.self, self.output = BertSelfAttention(), BertSelfOutput()

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        return self.output(self.self(hidden_states, attention_mask), hidden_states)


class BertIntermediate(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.intermediate_act_fn = nn.Linear(WIDTH, INNER), nn.GELU()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.intermediate_act_fn(self.dense(hidden_states))


class BertOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.LayerNorm = nn.Linear(INNER, WIDTH), nn.LayerNorm(WIDTH, EPS)

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(hidden_states) + input_tensor)


class BertLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.intermediate, self.output = BertAttention(), BertIntermediate(), BertOutput()

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        attended = self.attention(hidden_states, attention_mask)
        return self.output(self.intermediate(attended), attended)


class BertEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.ModuleList(BertLayer() for _ in range(DEPTH))

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        for layer in self.layer:
            hidden_states = layer(hidden_states, attention_mask)
        return hidden_states


class BertPooler(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.activation = nn.Linear(WIDTH, WIDTH), nn.Tanh()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.activation(self.dense(hidden_states[:, 0]))


class BertModel(nn.Module):
    """All tokens, and the first one pooled; what is no token gets the lowest score of all."""

    def __init__(self):
        super().__init__()
        self.embeddings, self.encoder, self.pooler = BertEmbeddings(), BertEncoder(), BertPooler()

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor):
        embedded = self.embeddings(input_ids, token_type_ids)
        absent = 1 - attention_mask[:, None, None].to(embedded)
        sequence = self.encoder(embedded, absent * torch.finfo(embedded.dtype).min)
        return sequence, self.pooler(sequence)


class BertPredictionHeadTransform(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.transform_act_fn = nn.Linear(WIDTH, WIDTH), nn.GELU()
        self.LayerNorm = nn.LayerNorm(WIDTH, EPS)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.LayerNorm(self.transform_act_fn(self.dense(hidden_states)))


class BertLMPredictionHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.transform, self.decoder = BertPredictionHeadTransform(), nn.Linear(WIDTH, WORDS)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.decoder(self.transform(hidden_states))


class BertPreTrainingHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.predictions, self.seq_relationship = BertLMPredictionHead(), nn.Linear(WIDTH, 2)

    def forward(self, sequence: Tensor, pooled: Tensor) -> tuple[Tensor, Tensor]:
        return self.predictions(sequence), self.seq_relationship(pooled)


class BertForPreTraining(nn.Module):
    """Two sentences -> scores of the words at each place, and of their order; the decoder is the table."""

    def __init__(self):
        super().__init__()
        self.bert, self.cls = BertModel(), BertPreTrainingHeads()
        self.apply(varied)
        self.cls.predictions.decoder.weight = self.bert.embeddings.word_embeddings.weight

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        sequence, pooled = self.bert(input_ids, token_type_ids, attention_mask)
        words, order = self.cls(sequence, pooled)
        return {"prediction_logits": words, "seq_relationship_logits": order}


def sentences() -> tuple[dict[str, Tensor], Tensor]:
    """Words that count up, in the second sentence on or from anywhere; two hidden; the longest row first."""
    ids, labels = torch.full((ROWS, LENGTH), PAD), torch.full((ROWS, LENGTH + 1), IGNORED)
    kinds, lengths = torch.zeros_like(ids), [LENGTH, *(torch.randperm(4)[: ROWS - 1] + 8).tolist()]
    for row, length in enumerate(lengths):
        first = int(torch.randint(3, 5, ()))
        follows = (row + int(torch.randint(2, ()))) % 2
        words = torch.arange(length - 3) + torch.randint(WORDS - FIRST, ())
        if not follows:
            words[first:] += torch.randint(5, 20, ())
        words = FIRST + words % (WORDS - FIRST)
        marks = [torch.tensor([mark]) for mark in (CLS, SEP, SEP)]
        whole = torch.cat([marks[0], words[:first], marks[1], words[first:], marks[2]])
        hidden = torch.stack([1 + torch.randint(first, ()), torch.randint(first + 2, length - 1, ())])
        labels[row, hidden], labels[row, -1] = whole[hidden], follows
        whole[hidden] = torch.tensor([MASK, int(torch.randint(FIRST, WORDS, ())) if row == 1 else MASK])
        ids[row, :length], kinds[row, first + 2 : length] = whole, 1
    inputs = {"input_ids": ids, "token_type_ids": kinds, "attention_mask": (ids != PAD).long()}
    return inputs, labels


def both_heads(outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    """The entropies of the hidden words and of the order, which is the last label of each row."""
    words, order = outputs["prediction_logits"], outputs["seq_relationship_logits"]
    hidden = F.cross_entropy(words.flatten(0, 1), labels[:, :-1].flatten(), ignore_index=IGNORED)
    return 0.2 * (hidden + F.cross_entropy(order, labels[:, -1]))
