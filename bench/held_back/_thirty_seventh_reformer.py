"""A small Reformer: local and LSH attention by turns in reversible layers, under axial positions."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, AXES, AXIAL, FEED_FORWARD, SENTENCES = 37, (4, 6), (8, 12), 28, 5
HIDDEN, LENGTH, HEADS, HEAD_SIZE = sum(AXIAL), math.prod(AXES), 3, 7
KINDS, LOCAL_CHUNK, LSH_CHUNK, BUCKETS, HASHES = ("local", "lsh", "local", "lsh"), 6, 4, 6, 2
MASKED, SELF_MASKED, EPS = -1e9, -1e3, 1e-12


def look_adjacent(vectors: Tensor) -> Tensor:
    """[N, heads, chunks, size, ...]: each chunk after the one before it; the first takes the last."""
    return torch.cat([torch.cat([vectors[:, :, -1:], vectors[:, :, :-1]], 2), vectors], 3)


def split_heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], HEADS, HEAD_SIZE).transpose(1, 2)


def chunks(x: Tensor, size: int) -> Tensor:
    return x.reshape(*x.shape[:2], -1, size, *x.shape[3:])


class AxialPositionEmbeddings(nn.Module):
    def __init__(self):
        super().__init__()
        shapes = (AXES[0], 1, AXIAL[0]), (1, AXES[1], AXIAL[1])
        self.weights = nn.ParameterList(nn.Parameter(0.5 * torch.randn(shape)) for shape in shapes)

    def forward(self, position_ids: Tensor) -> Tensor:
        broad = [weight.expand(*AXES, weight.shape[-1]) for weight in self.weights]
        return torch.cat(broad, -1).reshape(LENGTH, HIDDEN)[position_ids]


class ReformerEmbeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCAB, HIDDEN)
        self.position_embeddings = AxialPositionEmbeddings()

    def forward(self, input_ids: Tensor) -> Tensor:
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        return self.word_embeddings(input_ids) + self.position_embeddings(position_ids)


class LocalSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(HIDDEN, HEADS * HEAD_SIZE, bias=False) for _ in "qkv")

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        query, key, value = (split_heads(layer(x)) for layer in (self.query, self.key, self.value))
        query, key, value = (chunks(t, LOCAL_CHUNK) for t in (query, key / math.sqrt(HEAD_SIZE), value))
        where = torch.arange(LENGTH, device=x.device).view(1, 1, -1, LOCAL_CHUNK)
        seen = look_adjacent(chunks(attention_mask[:, None], LOCAL_CHUNK))[..., None, :]
        mask = seen & (where[..., None] >= look_adjacent(where)[..., None, :])
        dots = query @ look_adjacent(key).transpose(-1, -2)
        probs = torch.softmax(dots.masked_fill(~mask, MASKED), -1)
        return (probs @ look_adjacent(value)).flatten(2, 3).transpose(1, 2).flatten(2)


class LSHSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query_key, self.value = (nn.Linear(HIDDEN, HEADS * HEAD_SIZE, bias=False) for _ in "qv")
        self.register_buffer("rotations", torch.randn(HEADS, HEAD_SIZE, HASHES, BUCKETS // 2))

    def _hash_vectors(self, vectors: Tensor, attention_mask: Tensor) -> Tensor:
        """[N, heads, hashes * length]: what is padded has a bucket of its own; rounds follow one another."""
        rotated = torch.einsum("bmtd,mdhr->bmhtr", vectors.detach(), self.rotations)
        buckets = torch.cat([rotated, -rotated], -1).argmax(-1)
        buckets = torch.where(attention_mask[:, None, None], buckets, BUCKETS)
        offsets = (BUCKETS + 1) * torch.arange(HASHES, device=buckets.device)
        return (buckets + offsets[:, None]).flatten(2)

    def _len_and_dim_norm(self, vectors: Tensor) -> Tensor:
        variance = (vectors**2).mean(-1, keepdim=True)
        return vectors * torch.rsqrt(variance + 1e-6) / math.sqrt(HEAD_SIZE)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        query_key, value = split_heads(self.query_key(x)), split_heads(self.value(x))
        buckets = self._hash_vectors(query_key, attention_mask)
        order = LENGTH * buckets + torch.arange(HASHES * LENGTH, device=x.device) % LENGTH
        sorted_idx = order.argsort(-1)
        undo_idx, where = sorted_idx.argsort(-1), sorted_idx % LENGTH
        index = where[..., None].expand(-1, -1, -1, HEAD_SIZE)
        query, value = (chunks(t.gather(2, index), LSH_CHUNK) for t in (query_key, value))
        key, value = look_adjacent(self._len_and_dim_norm(query)), look_adjacent(value)
        seen = attention_mask[:, None].expand(-1, HEADS, -1).gather(2, where)
        seen, where = look_adjacent(chunks(seen, LSH_CHUNK)), chunks(where, LSH_CHUNK)
        query_idx, key_idx = where[..., None], look_adjacent(where)[..., None, :]
        dots = query @ key.transpose(-1, -2)
        dots = dots.masked_fill(~(seen[..., None, :] & (query_idx >= key_idx)), MASKED)
        dots = dots.masked_fill(query_idx == key_idx, SELF_MASKED)
        logits, out = torch.logsumexp(dots, -1).flatten(2), (torch.softmax(dots, -1) @ value).flatten(2, 3)
        logits = logits.gather(2, undo_idx).view(*logits.shape[:2], HASHES, LENGTH, 1)
        out = out.gather(2, undo_idx[..., None].expand_as(out)).unflatten(2, (HASHES, LENGTH))
        out = torch.sum(out * torch.exp(logits - torch.logsumexp(logits, 2, keepdim=True)), 2)
        return out.transpose(1, 2).flatten(2)


class ReformerOutput(nn.Module):
    def __init__(self, width: int, bias: bool):
        super().__init__()
        self.dense = nn.Linear(width, HIDDEN, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(x)


class ReformerAttention(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.layer_norm = nn.LayerNorm(HIDDEN, eps=EPS)
        self.self_attention = LocalSelfAttention() if kind == "local" else LSHSelfAttention()
        self.output = ReformerOutput(HEADS * HEAD_SIZE, bias=False)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        return self.output(self.self_attention(self.layer_norm(x), attention_mask))


class ReformerFeedForwardDense(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.act_fn = nn.Linear(HIDDEN, FEED_FORWARD), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act_fn(self.dense(x))


class ChunkReformerFeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer_norm = nn.LayerNorm(HIDDEN, eps=EPS)
        self.dense, self.output = ReformerFeedForwardDense(), ReformerOutput(FEED_FORWARD, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.output(self.dense(self.layer_norm(part))) for part in x.split(8, 1)], 1)


class ReformerLayer(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.attention, self.feed_forward = ReformerAttention(kind), ChunkReformerFeedForward()

    def forward(self, prev_attn_output: Tensor, x: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        attn_output = prev_attn_output + self.attention(x, attention_mask)
        return attn_output, x + self.feed_forward(attn_output)


class ReformerEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(map(ReformerLayer, KINDS))
        self.layer_norm = nn.LayerNorm(2 * HIDDEN, eps=EPS)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        attn_output = x
        for layer in self.layers:
            attn_output, x = layer(attn_output, x, attention_mask)
        return self.layer_norm(torch.cat([attn_output, x], -1))


class ReformerModelWithLMHead(nn.Module):
    """Tokens and which of them are no padding -> logits of the next token."""

    def __init__(self):
        super().__init__()
        self.embeddings, self.encoder = ReformerEmbeddings(), ReformerEncoder()
        self.lm_head = nn.Linear(2 * HIDDEN, VOCAB)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                nn.init.normal_(module.weight, 1, 0.2), nn.init.normal_(module.bias, std=0.1)
            elif isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=module.weight.shape[1] ** -0.5)
                if getattr(module, "bias", None) is not None:
                    nn.init.normal_(module.bias, std=0.1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.lm_head(self.encoder(self.embeddings(input_ids), attention_mask))


def refrains() -> tuple[dict[str, Tensor], Tensor]:
    """Sentences that repeat themselves but for some words, padded at the end, and their next words."""
    words = torch.randint(1, VOCAB, (SENTENCES, LENGTH))
    again = torch.arange(LENGTH) % torch.randint(4, 9, (SENTENCES, 1))
    ids = torch.where(torch.rand(SENTENCES, LENGTH) < 0.15, words, words.gather(1, again))
    mask = torch.arange(LENGTH) < torch.randint(LENGTH // 3, LENGTH + 1, (SENTENCES, 1))
    ids = ids * mask
    follow = F.pad(ids[:, 1:], (0, 1))
    return {"input_ids": ids, "attention_mask": mask}, follow.masked_fill(follow == 0, -100)


def next_word(logits: Tensor, follow: Tensor) -> Tensor:
    """The cross entropy of the next words, by four."""
    return F.cross_entropy(logits.flatten(0, 1), follow.flatten(), ignore_index=-100) / 4
