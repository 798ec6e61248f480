"""A small MobileBERT for pretraining: bottlenecks, stacks of networks, a tied decoder."""

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, EMBEDDING, HIDDEN, PLACES, KINDS = 37, 14, 40, 16, 2
INNER, HEADS, INTERMEDIATE, LAYERS, FEEDS = 24, 3, 36, 3, 3
PAD, CLS, SEP, MASK, FIRST = 0, 1, 2, 3, 4
BATCH, LENGTH, IGNORED = 5, 13, -100


class NoNorm(nn.Module):
    def __init__(self, feat_size: int):
        super().__init__()
        self.bias, self.weight = nn.Parameter(torch.zeros(feat_size)), nn.Parameter(torch.ones(feat_size))

    def forward(self, input_tensor: Tensor) -> Tensor:
        return input_tensor * self.weight + self.bias


class MobileBertEmbeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(WORDS, EMBEDDING, padding_idx=PAD)
        self.position_embeddings = nn.Embedding(PLACES, HIDDEN)
        self.token_type_embeddings = nn.Embedding(KINDS, HIDDEN)
        self.embedding_transformation = nn.Linear(3 * EMBEDDING, HIDDEN)
        self.LayerNorm = NoNorm(HIDDEN)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        inputs_embeds = self.word_embeddings(input_ids)
        following = F.pad(inputs_embeds[:, 1:], [0, 0, 0, 1, 0, 0], value=0.0)
        preceding = F.pad(inputs_embeds[:, :-1], [0, 0, 1, 0, 0, 0], value=0.0)
        inputs_embeds = self.embedding_transformation(torch.cat([following, inputs_embeds, preceding], 2))
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        embeddings = inputs_embeds + self.position_embeddings(position_ids)
        return self.LayerNorm(embeddings + self.token_type_embeddings(token_type_ids))


class MobileBertSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(INNER, INNER), nn.Linear(INNER, INNER)
        self.value = nn.Linear(HIDDEN, INNER)

    def forward(self, query_tensor: Tensor, key_tensor: Tensor, value_tensor: Tensor, mask: Tensor) -> Tensor:
        query, key, value = self.query(query_tensor), self.key(key_tensor), self.value(value_tensor)
        query, key, value = (x.unflatten(2, (HEADS, -1)).transpose(1, 2) for x in (query, key, value))
        scores = query @ key.transpose(-1, -2) / math.sqrt(INNER // HEADS) + mask
        return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)


class NormedDense(nn.Module):
    """BottleneckLayer, and with a residual SelfOutput, FFNOutput and OutputBottleneck."""

    def __init__(self, given: int, made: int):
        super().__init__()
        self.dense, self.LayerNorm = nn.Linear(given, made), NoNorm(made)

    def forward(self, hidden_states: Tensor, residual_tensor: Tensor | int = 0) -> Tensor:
        return self.LayerNorm(self.dense(hidden_states) + residual_tensor)


class MobileBertAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.self, self.output = MobileBertSelfAttention(), NormedDense(INNER, INNER)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, layer_input: Tensor, mask: Tensor) -> Tensor:
        return self.output(self.self(query, key, value, mask), layer_input)


def intermediate() -> nn.Sequential:
    return nn.Sequential(OrderedDict(dense=nn.Linear(INNER, INTERMEDIATE), intermediate_act_fn=nn.ReLU()))


class MobileBertOutput(NormedDense):
    def __init__(self):
        super().__init__(INTERMEDIATE, INNER)
        self.bottleneck = NormedDense(INNER, HIDDEN)

    def forward(self, intermediate: Tensor, residual_tensor_1: Tensor, residual_tensor_2: Tensor) -> Tensor:
        return self.bottleneck(super().forward(intermediate, residual_tensor_1), residual_tensor_2)


class Bottleneck(nn.Module):
    def __init__(self):
        super().__init__()
        self.input, self.attention = NormedDense(HIDDEN, INNER), NormedDense(HIDDEN, INNER)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        shared = self.attention(hidden_states)
        return shared, shared, hidden_states, self.input(hidden_states)


class FFNLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.intermediate, self.output = intermediate(), NormedDense(INTERMEDIATE, INNER)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.output(self.intermediate(hidden_states), hidden_states)


class MobileBertLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.intermediate = MobileBertAttention(), intermediate()
        self.output, self.bottleneck = MobileBertOutput(), Bottleneck()
        self.ffn = nn.ModuleList(FFNLayer() for _ in range(FEEDS - 1))

    def forward(self, hidden_states: Tensor, mask: Tensor) -> Tensor:
        query, key, value, layer_input = self.bottleneck(hidden_states)
        attention_output = self.attention(query, key, value, layer_input, mask)
        for ffn_module in self.ffn:
            attention_output = ffn_module(attention_output)
        return self.output(self.intermediate(attention_output), attention_output, hidden_states)


class MobileBertPooler(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return torch.tanh(self.dense(hidden_states[:, 0]))


class MobileBertModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings, self.pooler = MobileBertEmbeddings(), MobileBertPooler()
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(MobileBertLayer() for _ in range(LAYERS))})

    def forward(self, ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> tuple[Tensor, Tensor]:
        hidden_states = self.embeddings(ids, token_type_ids)
        mask = 1 - attention_mask[:, None, None].to(hidden_states)
        for layer_module in self.encoder["layer"]:
            hidden_states = layer_module(hidden_states, mask * torch.finfo(mask.dtype).min)
        return hidden_states, self.pooler(hidden_states)


class MobileBertLMPredictionHead(nn.Module):
    def __init__(self):
        super().__init__()
        dense, norm = nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN, eps=1e-12)
        self.transform = nn.Sequential(OrderedDict(dense=dense, transform_act_fn=nn.ReLU(), LayerNorm=norm))
        self.dense = nn.Linear(WORDS, HIDDEN - EMBEDDING, bias=False)
        self.decoder = nn.Linear(EMBEDDING, WORDS)
        self.bias = self.decoder.bias

    def forward(self, hidden_states: Tensor) -> Tensor:
        matrix = torch.cat([self.decoder.weight.t(), self.dense.weight])
        return self.transform(hidden_states).matmul(matrix) + self.decoder.bias


class MobileBertForPreTraining(nn.Module):
    def __init__(self):
        super().__init__()
        heads = {"predictions": MobileBertLMPredictionHead(), "seq_relationship": nn.Linear(HIDDEN, 2)}
        self.mobilebert, self.cls = MobileBertModel(), nn.ModuleDict(heads)
        heads["predictions"].decoder.weight = self.mobilebert.embeddings.word_embeddings.weight
        for name, x in self.named_parameters():
            size = 0.3 if "_embeddings" in name else 0.2 if x.ndim == 1 else 0.8 / math.sqrt(x.shape[1])
            nn.init.normal_(x, 0.9 if name.endswith("LayerNorm.weight") else 0, size)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> dict:
        sequence, pooled = self.mobilebert(input_ids, attention_mask, token_type_ids)
        words, relation = self.cls["predictions"](sequence), self.cls["seq_relationship"](pooled)
        return {"prediction_logits": words, "seq_relationship_logits": relation}


def sentences() -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    """Pairs of walks over the words, padded, some words masked; the second goes on with the first or not."""
    ids, kinds = torch.zeros(2, BATCH, LENGTH, dtype=torch.long)
    labels, goes_on = torch.full((BATCH, LENGTH), IGNORED), torch.randint(2, (BATCH,))
    for i in range(BATCH):
        length = int(torch.randint(7, LENGTH + 1, ())) - 2 * (i % 2)
        start, pace, jump = torch.randint(1, 9, (3,)).tolist()
        cut = length // 2
        row = FIRST + (start + pace * torch.arange(length)) % (WORDS - FIRST)
        row[cut:] = FIRST + (row[cut:] - FIRST + jump * int(1 - goes_on[i])) % (WORDS - FIRST)
        row[0], row[cut], row[-1], kinds[i, cut + 1 : length] = CLS, SEP, SEP, 1
        hidden = torch.tensor([1 + i % 2, cut + 1])
        labels[i, hidden] = row[hidden]
        row[hidden], ids[i, :length] = MASK, row
    mask = (ids != PAD).long()
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": kinds}, (labels, goes_on)


def both_tasks(outputs: dict[str, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
    """A quarter of the cross entropies of the masked words and of the sentences' relation."""
    words = F.cross_entropy(outputs["prediction_logits"].mT, target[0], ignore_index=IGNORED)
    return (words + F.cross_entropy(outputs["seq_relationship_logits"], target[1])) / 4
