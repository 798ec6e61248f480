"""A small XLM-RoBERTa with the language adapters of X-MOD, a masked-LM head and a tagging head."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, INNER, NECK, LAYERS = 24, 3, 40, 7, 3
VOCABULARY, PLACES, TYPES, TAGS, PAD, MASK = 37, 16, 2, 5, 1, 4
LANGUAGES, SENTENCES, LENGTH = ("en_XX", "fr_XX", "sw_KE"), 6, 11


class XmodEmbeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, WIDTH, padding_idx=PAD)
        self.position_embeddings = nn.Embedding(PLACES, WIDTH, padding_idx=PAD)
        self.token_type_embeddings = nn.Embedding(TYPES, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        mask = input_ids.ne(PAD).long()
        position_ids = torch.cumsum(mask, dim=1) * mask + PAD
        embeddings = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        return self.LayerNorm(embeddings + self.position_embeddings(position_ids))


class XmodSelfAttention(nn.Module):
    def __init__(self, position_embedding_type: str):
        super().__init__()
        self.num_attention_heads, self.attention_head_size = HEADS, WIDTH // HEADS
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.position_embedding_type = position_embedding_type
        if position_embedding_type == "relative_key":
            self.max_position_embeddings = PLACES
            self.distance_embedding = nn.Embedding(2 * PLACES - 1, self.attention_head_size)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        layers = self.query, self.key, self.value
        states = (x(hidden_states).unflatten(2, (self.num_attention_heads, -1)) for x in layers)
        query, key, value = (x.transpose(1, 2) for x in states)
        scores = query @ key.transpose(-1, -2)
        if self.position_embedding_type == "relative_key":
            place = torch.arange(hidden_states.shape[1], device=hidden_states.device)
            distance = place[:, None] - place[None, :] + self.max_position_embeddings - 1
            positional_embedding = self.distance_embedding(distance)
            scores = scores + torch.einsum("bhld,lrd->bhlr", query, positional_embedding)
        scores = scores / math.sqrt(self.attention_head_size) + attention_mask
        return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)


class XmodSelfOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH)

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(hidden_states) + input_tensor)


class XmodAttention(nn.Module):
    def __init__(self, position_embedding_type: str):
        super().__init__()
        self.self = XmodSelfAttention(position_embedding_type)
        self.output = XmodSelfOutput()

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        return self.output(self.self(hidden_states, attention_mask), hidden_states)


class XmodIntermediate(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(WIDTH, INNER)
        self.intermediate_act_fn = nn.GELU()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.intermediate_act_fn(self.dense(hidden_states))


class XmodAdapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense1, self.dense2 = nn.Linear(WIDTH, NECK), nn.Linear(NECK, WIDTH)
        self.adapter_act_fn = nn.GELU()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.dense2(self.adapter_act_fn(self.dense1(hidden_states)))


class XmodOutput(nn.Module):
    def __init__(self, adapters: bool):
        super().__init__()
        self.dense = nn.Linear(INNER, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH)
        self.adapter_layer_norm = nn.LayerNorm(WIDTH) if adapters else None
        if adapters:
            self.adapter_modules = nn.ModuleDict({language: XmodAdapter() for language in LANGUAGES})

    def lang_adapter(self, lang_ids: Tensor, hidden_states: Tensor) -> Tensor:
        residual = hidden_states
        hidden_states = self.adapter_layer_norm(hidden_states)
        new_hidden_states = torch.zeros_like(hidden_states)
        for i, adapter in enumerate(self.adapter_modules.values()):
            chosen = lang_ids == i
            new_hidden_states[chosen] = adapter(hidden_states[chosen])
        return new_hidden_states + residual

    def forward(self, hidden_states: Tensor, input_tensor: Tensor, lang_ids: Tensor) -> Tensor:
        hidden_states = self.dense(hidden_states) + input_tensor
        if self.adapter_layer_norm is not None:
            hidden_states = self.lang_adapter(lang_ids, hidden_states)
        return self.LayerNorm(hidden_states)


class XmodLayer(nn.Module):
    def __init__(self, position_embedding_type: str, adapters: bool):
        super().__init__()
        self.attention = XmodAttention(position_embedding_type)
        self.intermediate = XmodIntermediate()
        self.output = XmodOutput(adapters)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor, lang_ids: Tensor) -> Tensor:
        attention_output = self.attention(hidden_states, attention_mask)
        return self.output(self.intermediate(attention_output), attention_output, lang_ids)


class XmodEncoder(nn.Module):
    """The first layer has neither distances nor adapters."""

    def __init__(self):
        super().__init__()
        kinds = ("absolute", False), *[("relative_key", True)] * (LAYERS - 1)
        self.layer = nn.ModuleList(XmodLayer(*kind) for kind in kinds)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor, lang_ids: Tensor) -> Tensor:
        for layer in self.layer:
            hidden_states = layer(hidden_states, attention_mask, lang_ids)
        return hidden_states


class XmodModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = XmodEmbeddings()
        self.encoder = XmodEncoder()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor, lang_ids: Tensor):
        hidden_states = self.embeddings(input_ids, token_type_ids)
        mask = (1 - attention_mask[:, None, None, :].to(hidden_states)) * torch.finfo(hidden_states.dtype).min
        return self.encoder(hidden_states, mask, lang_ids)


class XmodLMHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.layer_norm = nn.LayerNorm(WIDTH)
        self.decoder = nn.Linear(WIDTH, VOCABULARY)
        self.bias = self.decoder.bias

    def forward(self, features: Tensor) -> Tensor:
        return self.decoder(self.layer_norm(F.gelu(self.dense(features))))


class XmodRoberta(nn.Module):
    def __init__(self):
        super().__init__()
        self.roberta, self.lm_head, self.classifier = XmodModel(), XmodLMHead(), nn.Linear(WIDTH, TAGS)
        self.lm_head.decoder.weight = self.roberta.embeddings.word_embeddings.weight
        for name, weight in self.named_parameters():
            scale = 0.3 if "embedding" in name else 0.9 / math.sqrt(weight.shape[-1])
            nn.init.normal_(weight, float("norm.weight" in name.lower()), 0.15 if weight.ndim == 1 else scale)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor, lang_ids: Tensor):
        sequence_output = self.roberta(input_ids, attention_mask, token_type_ids, lang_ids)
        return self.lm_head(sequence_output), self.classifier(sequence_output)


def sentences() -> tuple[dict[str, Tensor], Tensor]:
    """Pairs of segments that count on by a step of their language, padded left or right; labels and tags."""
    place, long = torch.arange(LENGTH), torch.randint(6, LENGTH + 1, (SENTENCES, 1))
    lang_ids = torch.randint(len(LANGUAGES), (SENTENCES,))
    start = (LENGTH - long) * (torch.arange(SENTENCES)[:, None] % 2)
    real = (place >= start) & (place < start + long)
    words = 5 + (torch.randint(32, (SENTENCES, 1)) + place * (2 * lang_ids[:, None] + 1)) % 32
    hidden = (torch.rand(SENTENCES, LENGTH) < 0.2) | (place == start + 2)
    input_ids = words.masked_fill(hidden, MASK).masked_fill(~real, PAD)
    types = ((place >= start + long // 2) & real).long()
    labels, tags = words.masked_fill(~(hidden & real), -100), (words % TAGS).masked_fill(~real, -100)
    inputs = {"input_ids": input_ids, "attention_mask": real.long(), "token_type_ids": types}
    return inputs | {"lang_ids": lang_ids}, torch.stack([labels, tags], 2)


def words_and_tags(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """The cross entropies of the masked words and of the tags of the real ones, by four."""
    found = (F.cross_entropy(y.flatten(0, 1), target[..., i].flatten()) for i, y in enumerate(outputs))
    return sum(found) / 4
