"""A small ALBERT for pre-training: a group of two layers goes three times over padded pairs of sentences."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, EMBEDDING, HIDDEN, INTERMEDIATE, HEADS = 43, 20, 36, 56, 4
POSITIONS, TYPES, ORDERS, LAYERS, GROUPS, INNER, EPS = 19, 2, 2, 3, 1, 2, 1e-12
PAD, CLS, SEP, MASK, WORD = 0, 2, 3, 4, 5
SEQUENCES, LENGTH, IGNORED = 6, 15, -100


class NewGELUActivation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
        return 0.5 * x * (1.0 + torch.tanh(inner))


class AlbertEmbeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, EMBEDDING, padding_idx=PAD)
        self.position_embeddings = nn.Embedding(POSITIONS, EMBEDDING)
        self.token_type_embeddings = nn.Embedding(TYPES, EMBEDDING)
        self.LayerNorm = nn.LayerNorm(EMBEDDING, eps=EPS)
        self.register_buffer("position_ids", torch.arange(POSITIONS)[None], persistent=False)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        position_ids = self.position_ids[:, : input_ids.shape[1]]
        embeddings = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        embeddings = embeddings + self.position_embeddings(position_ids)
        return self.LayerNorm(embeddings)


class AlbertAttention(nn.Module):
    """Self-attention with its output's projection, the residual and the norm after it."""

    def __init__(self):
        super().__init__()
        self.num_attention_heads, self.attention_head_size = HEADS, HIDDEN // HEADS
        self.query = nn.Linear(HIDDEN, HIDDEN)
        self.key = nn.Linear(HIDDEN, HIDDEN)
        self.value = nn.Linear(HIDDEN, HIDDEN)
        self.dense = nn.Linear(HIDDEN, HIDDEN)
        self.LayerNorm = nn.LayerNorm(HIDDEN, eps=EPS)

    def transpose_for_scores(self, x: Tensor) -> Tensor:
        """[N, T, C] -> [N, heads, T, C / heads]."""
        return x.view(*x.shape[:2], self.num_attention_heads, self.attention_head_size).permute(0, 2, 1, 3)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        query_layer = self.transpose_for_scores(self.query(hidden_states))
        key_layer = self.transpose_for_scores(self.key(hidden_states))
        value_layer = self.transpose_for_scores(self.value(hidden_states))
        attention_scores = torch.matmul(query_layer, key_layer.transpose(-1, -2))
        attention_scores = attention_scores / math.sqrt(self.attention_head_size) + attention_mask
        attention_probs = F.softmax(attention_scores, dim=-1)
        context_layer = torch.matmul(attention_probs, value_layer).transpose(2, 1).flatten(2)
        return self.LayerNorm(hidden_states + self.dense(context_layer))


class AlbertLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.full_layer_layer_norm = nn.LayerNorm(HIDDEN, eps=EPS)
        self.attention = AlbertAttention()
        self.ffn = nn.Linear(HIDDEN, INTERMEDIATE)
        self.ffn_output = nn.Linear(INTERMEDIATE, HIDDEN)
        self.activation = NewGELUActivation()

    def ff_chunk(self, attention_output: Tensor) -> Tensor:
        return self.ffn_output(self.activation(self.ffn(attention_output)))

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        attention_output = self.attention(hidden_states, attention_mask)
        return self.full_layer_layer_norm(self.ff_chunk(attention_output) + attention_output)


class AlbertLayerGroup(nn.Module):
    def __init__(self):
        super().__init__()
        self.albert_layers = nn.ModuleList(AlbertLayer() for _ in range(INNER))

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        for albert_layer in self.albert_layers:
            hidden_states = albert_layer(hidden_states, attention_mask)
        return hidden_states


class AlbertTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding_hidden_mapping_in = nn.Linear(EMBEDDING, HIDDEN)
        self.albert_layer_groups = nn.ModuleList(AlbertLayerGroup() for _ in range(GROUPS))

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        hidden_states = self.embedding_hidden_mapping_in(hidden_states)
        for i in range(LAYERS):
            group_idx = int(i / (LAYERS / GROUPS))
            hidden_states = self.albert_layer_groups[group_idx](hidden_states, attention_mask)
        return hidden_states


class AlbertModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings, self.encoder = AlbertEmbeddings(), AlbertTransformer()
        self.pooler, self.pooler_activation = nn.Linear(HIDDEN, HIDDEN), nn.Tanh()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> tuple:
        embedding_output = self.embeddings(input_ids, token_type_ids)
        extended = attention_mask[:, None, None, :].to(embedding_output)
        extended = (1.0 - extended) * torch.finfo(embedding_output.dtype).min
        sequence_output = self.encoder(embedding_output, extended)
        return sequence_output, self.pooler_activation(self.pooler(sequence_output[:, 0]))


class AlbertMLMHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.LayerNorm = nn.LayerNorm(EMBEDDING, eps=EPS)
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))
        self.dense = nn.Linear(HIDDEN, EMBEDDING)
        self.decoder = nn.Linear(EMBEDDING, VOCABULARY)
        self.activation = NewGELUActivation()
        self.decoder.bias = self.bias

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.decoder(self.LayerNorm(self.activation(self.dense(hidden_states))))


class AlbertSOPHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.classifier = nn.Linear(HIDDEN, ORDERS)

    def forward(self, pooled_output: Tensor) -> Tensor:
        return self.classifier(pooled_output)


class AlbertForPreTraining(nn.Module):
    """Tokens, which of them are real and their sentence -> logits of each token and of the order."""

    def __init__(self):
        super().__init__()
        self.albert, self.predictions, self.sop_classifier = AlbertModel(), AlbertMLMHead(), AlbertSOPHead()
        self.predictions.decoder.weight = self.albert.embeddings.word_embeddings.weight
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            nn.init.normal_(module.bias, std=0.1)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.25)
        elif isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight, mean=1.0, std=0.2), nn.init.normal_(module.bias, std=0.1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> dict[str, Tensor]:
        sequence_output, pooled_output = self.albert(input_ids, attention_mask, token_type_ids)
        prediction_scores = self.predictions(sequence_output)
        return {"prediction_logits": prediction_scores, "sop_logits": self.sop_classifier(pooled_output)}


def sentences() -> tuple[dict[str, Tensor], Tensor]:
    """Rows of numbers cut in two, the parts maybe swapped, with some words masked; the order comes first."""
    tokens, types = torch.full((SEQUENCES, LENGTH), PAD), torch.zeros(SEQUENCES, LENGTH, dtype=torch.long)
    order, words = torch.randint(ORDERS, (SEQUENCES,)), VOCABULARY - WORD
    for row in range(SEQUENCES):
        cut, rest = torch.randint(3, 7, (2,)).tolist()
        start, step = torch.randint(words, (1,)), torch.randint(1, 4, (1,))
        text = WORD + (start + step * torch.arange(cut + rest)) % words
        first, second = (text[cut:], text[:cut]) if order[row] else (text[:cut], text[cut:])
        line = [CLS, *first.tolist(), SEP, *second.tolist(), SEP]
        tokens[row, : len(line)] = torch.tensor(line)
        types[row, len(first) + 2 : len(line)] = 1
    hidden = torch.rand(tokens.shape) < 0.2
    hidden[:, 2] = True
    hidden &= tokens >= WORD
    labels = torch.where(hidden, tokens, IGNORED)
    inputs = {"input_ids": torch.where(hidden, MASK, tokens), "attention_mask": (tokens != PAD).long()}
    return inputs | {"token_type_ids": types}, torch.cat([order[:, None], labels], 1)


def words_and_order(outputs: dict[str, Tensor], target: Tensor) -> Tensor:
    """The mean of the cross entropies of the masked words and of the order."""
    order, labels = target[:, 0], target[:, 1:]
    masked_lm = F.cross_entropy(outputs["prediction_logits"].flatten(0, 1), labels.flatten())
    return (masked_lm + F.cross_entropy(outputs["sop_logits"], order)) / 2
