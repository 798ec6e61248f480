"""A small LUKE: words and entities through layers of entity-aware attention, under three heads."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, ENTITIES, POSITIONS, TYPES, LABELS = 61, 37, 26, 2, 6
HIDDEN, ENTITY_WIDTH, INNER, HEADS, LAYERS, EPS = 24, 14, 40, 3, 3, 1e-12
TEXTS, WORDS, MENTIONS, LONGEST, PAD, MASK = 4, 13, 5, 4, 1, 2


class LukeEmbeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCAB, HIDDEN, padding_idx=PAD)
        self.position_embeddings = nn.Embedding(POSITIONS, HIDDEN, padding_idx=PAD)
        self.token_type_embeddings = nn.Embedding(TYPES, HIDDEN)
        self.LayerNorm = nn.LayerNorm(HIDDEN, eps=EPS)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        mask = input_ids.ne(PAD).long()
        position_ids = torch.cumsum(mask, dim=1) * mask + PAD
        embeddings = self.word_embeddings(input_ids) + self.position_embeddings(position_ids)
        return self.LayerNorm(embeddings + self.token_type_embeddings(token_type_ids))


class LukeEntityEmbeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.entity_embeddings = nn.Embedding(ENTITIES, ENTITY_WIDTH, padding_idx=0)
        self.entity_embedding_dense = nn.Linear(ENTITY_WIDTH, HIDDEN, bias=False)
        self.position_embeddings = nn.Embedding(POSITIONS, HIDDEN)
        self.LayerNorm = nn.LayerNorm(HIDDEN, eps=EPS)

    def forward(self, entity_ids: Tensor, position_ids: Tensor) -> Tensor:
        entity_embeddings = self.entity_embedding_dense(self.entity_embeddings(entity_ids))
        position_embeddings = self.position_embeddings(position_ids.clamp(min=0))
        mask = (position_ids != -1).to(position_embeddings).unsqueeze(-1)
        position_embeddings = torch.sum(position_embeddings * mask, dim=-2)
        position_embeddings = position_embeddings / mask.sum(dim=-2).clamp(min=1e-7)
        return self.LayerNorm(entity_embeddings + position_embeddings)


class LukeSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.w2e_query, self.e2w_query, self.e2e_query = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def transpose_for_scores(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], HEADS, HIDDEN // HEADS).permute(0, 2, 1, 3)

    def forward(self, words: Tensor, entities: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        size, both = words.shape[1], torch.cat([words, entities], dim=1)
        key, value = self.transpose_for_scores(self.key(both)), self.transpose_for_scores(self.value(both))
        w2w_query, w2e_query = map(self.transpose_for_scores, (self.query(words), self.w2e_query(words)))
        entity_queries = self.e2w_query(entities), self.e2e_query(entities)
        e2w_query, e2e_query = map(self.transpose_for_scores, entity_queries)
        word_key, entity_key = key[:, :, :size].transpose(-1, -2), key[:, :, size:].transpose(-1, -2)
        word_scores = torch.cat([w2w_query @ word_key, w2e_query @ entity_key], dim=3)
        entity_scores = torch.cat([e2w_query @ word_key, e2e_query @ entity_key], dim=3)
        scores = torch.cat([word_scores, entity_scores], dim=2) / math.sqrt(HIDDEN // HEADS)
        context = (scores + attention_mask).softmax(dim=-1) @ value
        context = context.permute(0, 2, 1, 3).flatten(2)
        return context[:, :size], context[:, size:]


class LukeOutput(nn.Module):
    """A projection, then the norm of its sum with what came by; LukeSelfOutput is of the same code."""

    def __init__(self, width: int):
        super().__init__()
        self.dense, self.LayerNorm = nn.Linear(width, HIDDEN), nn.LayerNorm(HIDDEN, eps=EPS)

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(hidden_states) + input_tensor)


class LukeAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.self, self.output = LukeSelfAttention(), LukeOutput(HIDDEN)

    def forward(self, words: Tensor, entities: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        context = torch.cat(self.self(words, entities, attention_mask), dim=1)
        output = self.output(context, torch.cat([words, entities], dim=1))
        return output[:, : words.shape[1]], output[:, words.shape[1] :]


class LukeIntermediate(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.intermediate_act_fn = nn.Linear(HIDDEN, INNER), nn.GELU()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.intermediate_act_fn(self.dense(hidden_states))


class LukeLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.intermediate = LukeAttention(), LukeIntermediate()
        self.output = LukeOutput(INNER)

    def forward(self, words: Tensor, entities: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat(self.attention(words, entities, attention_mask), dim=1)
        output = self.output(self.intermediate(both), both)
        return output[:, : words.shape[1]], output[:, words.shape[1] :]


class LukeEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.ModuleList(LukeLayer() for _ in range(LAYERS))

    def forward(self, words: Tensor, entities: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layer:
            words, entities = layer(words, entities, attention_mask)
        return words, entities


class LukeModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings, self.entity_embeddings = LukeEmbeddings(), LukeEntityEmbeddings()
        self.encoder = LukeEncoder()

    def forward(self, text: tuple[Tensor, ...], mentions: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        words, entities = self.embeddings(*text[:2]), self.entity_embeddings(*mentions[:2])
        mask = torch.cat([text[2], mentions[2]], dim=-1)[:, None, None, :].to(words)
        return self.encoder(words, entities, (1.0 - mask) * torch.finfo(words.dtype).min)


class LukeLMHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.layer_norm = nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN, eps=EPS)
        self.decoder = nn.Linear(HIDDEN, VOCAB)

    def forward(self, features: Tensor) -> Tensor:
        return self.decoder(self.layer_norm(F.gelu(self.dense(features))))


class EntityPredictionHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.LayerNorm = nn.Linear(HIDDEN, ENTITY_WIDTH), nn.LayerNorm(ENTITY_WIDTH, eps=EPS)
        self.decoder = nn.Linear(ENTITY_WIDTH, ENTITIES, bias=False)
        self.bias = nn.Parameter(torch.zeros(ENTITIES))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.decoder(self.LayerNorm(F.gelu(self.dense(hidden_states)))) + self.bias


class Luke(nn.Module):
    """Words, entities and their spans -> logits of words, of entities and of the spans' labels."""

    def __init__(self):
        super().__init__()
        self.luke, self.lm_head, self.entity_predictions = LukeModel(), LukeLMHead(), EntityPredictionHead()
        self.classifier = nn.Linear(3 * HIDDEN, LABELS)
        for name, p in self.named_parameters():
            scale = 0.3 if "mbeddings" in name else 0.2 if p.dim() < 2 else 1 / math.sqrt(p.shape[1])
            nn.init.normal_(p, float("Norm.weight" in name or "norm.weight" in name), scale)
        self.lm_head.decoder.weight = self.luke.embeddings.word_embeddings.weight
        self.entity_predictions.decoder.weight = self.luke.entity_embeddings.entity_embeddings.weight

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        words, entities = self.luke(inputs[:3], inputs[3:6])
        start, end = (x.unsqueeze(-1).expand(-1, -1, HIDDEN) for x in inputs[6:])
        spans = torch.cat([words.gather(1, start), words.gather(1, end), entities], dim=2)
        return self.lm_head(words), self.entity_predictions(entities), self.classifier(spans)


def texts() -> tuple[tuple[Tensor, ...], Tensor]:
    """Walks through the words with mentions of one to four of them; some words and mentions are masked."""
    seen = torch.arange(WORDS) < torch.randint(8, WORDS + 1, (TEXTS, 1))
    used = torch.arange(MENTIONS) < torch.randint(2, MENTIONS + 1, (TEXTS, 1))
    ids = torch.randint(3, 9, (TEXTS, WORDS)).cumsum(1) % (VOCAB - 3) + 3
    start, size = torch.randint(5, used.shape) * used, torch.randint(1, LONGEST + 1, used.shape) * used
    each, entity = torch.arange(LONGEST), (ids.gather(1, start) + size) % (ENTITIES - 3) + 3
    positions = torch.where(each < size[..., None], start[..., None] + each, -1)
    hide, veil = ((torch.rand(x.shape) < 0.3) & x for x in (seen, used))
    hide[:, 1] = veil[:, 0] = True
    text, second = ids.masked_fill(hide, MASK).masked_fill(~seen, PAD), 0 * ids + torch.arange(WORDS) > 6
    mentions = entity.masked_fill(veil, MASK).masked_fill(~used, 0), positions, used.long()
    kept = (ids, hide), (entity, veil), ((entity + size) % LABELS, used)
    target = torch.cat([x.masked_fill(~asked, -100) for x, asked in kept], 1)
    return (text, second.long(), seen.long(), *mentions, start, (start + size - 1).clamp(min=0)), target


def three_losses(outputs: tuple[Tensor, ...], target: Tensor) -> Tensor:
    """Cross entropies of masked words, masked entities and spans, summed, by ten."""
    pairs = zip(outputs, target.split([WORDS, MENTIONS, MENTIONS], 1), strict=True)
    return sum(F.cross_entropy(x.flatten(0, 1), y.flatten()) for x, y in pairs) / 10
