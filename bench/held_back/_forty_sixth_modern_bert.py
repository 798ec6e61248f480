"""A small ModernBERT: global and sliding-window attention, for masked words and for classes of sentences."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, WIDTH, HEADS, INNER, LAYERS, CLASSES = 41, 24, 3, 20, 4, 5
WINDOW, EVERY, BASES = 6, 3, (16000.0, 100.0)
SENTENCES, LENGTH, MASK = 6, 13, 1


class ModernBertNorm(nn.LayerNorm):
    """A layer norm without bias."""

    def __init__(self, width: int = WIDTH):
        super().__init__(width, eps=1e-5, bias=False)
        nn.init.normal_(self.weight, 1.0, 0.2)


def linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.normal_(layer.weight, std=inputs**-0.5)
    if bias:
        nn.init.normal_(layer.bias, std=0.1)
    return layer


def rotate_half(x: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, -1)
    return torch.cat((-x2, x1), -1)


class ModernBertEmbeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        nn.init.normal_(self.tok_embeddings.weight, std=0.15)
        self.norm = ModernBertNorm()

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.norm(self.tok_embeddings(input_ids))


class ModernBertRotaryEmbedding(nn.Module):
    def __init__(self, dim: int, base: float):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / base ** (torch.arange(0, dim, 2) / dim), persistent=False)

    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        freqs = position_ids[:, None] * self.inv_freq
        emb = torch.cat((freqs, freqs), -1)
        return emb.cos(), emb.sin()


class ModernBertAttention(nn.Module):
    def __init__(self, layer_id: int):
        super().__init__()
        self.local, self.head_dim = layer_id % EVERY != 0, WIDTH // HEADS
        self.Wqkv = linear(WIDTH, 3 * WIDTH)
        self.rotary_emb = ModernBertRotaryEmbedding(self.head_dim, BASES[self.local])
        self.Wo = linear(WIDTH, WIDTH)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor, sliding_window_mask: Tensor) -> Tensor:
        n, length, width = hidden_states.shape
        qkv = self.Wqkv(hidden_states).view(n, length, 3, HEADS, self.head_dim)
        cos, sin = self.rotary_emb(torch.arange(length, device=qkv.device))
        query, key, value = qkv.transpose(3, 1).unbind(dim=2)
        query = query * cos + rotate_half(query) * sin
        key = key * cos + rotate_half(key) * sin
        scores = query @ key.transpose(2, 3) * self.head_dim**-0.5
        scores = scores + (sliding_window_mask if self.local else attention_mask)
        mixed = scores.softmax(-1) @ value
        return self.Wo(mixed.transpose(1, 2).reshape(n, length, width))


class ModernBertMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.Wi, self.act, self.Wo = linear(WIDTH, 2 * INNER), nn.GELU(), linear(INNER, WIDTH)

    def forward(self, hidden_states: Tensor) -> Tensor:
        input, gate = self.Wi(hidden_states).chunk(2, dim=-1)
        return self.Wo(self.act(input) * gate)


class ModernBertEncoderLayer(nn.Module):
    def __init__(self, layer_id: int):
        super().__init__()
        self.attn_norm = ModernBertNorm() if layer_id else nn.Identity()
        self.attn = ModernBertAttention(layer_id)
        self.mlp_norm, self.mlp = ModernBertNorm(), ModernBertMLP()

    def forward(self, hidden_states: Tensor, attention_mask: Tensor, sliding_window_mask: Tensor) -> Tensor:
        attended = self.attn(self.attn_norm(hidden_states), attention_mask, sliding_window_mask)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.mlp_norm(hidden_states))


class ModernBertModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = ModernBertEmbeddings()
        self.layers = nn.ModuleList(ModernBertEncoderLayer(i) for i in range(LAYERS))
        self.final_norm = ModernBertNorm()

    def masks(self, attention_mask: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """What is added to the scores of a global layer, and of a local one."""
        lowest = torch.finfo(like.dtype).min
        everywhere = like.new_zeros(len(like), 1, like.shape[1], like.shape[1])
        everywhere = everywhere.masked_fill(attention_mask[:, None, None] == 0, lowest)
        rows = torch.arange(like.shape[1], device=like.device)
        far = (rows[None] - rows[:, None]).abs() > WINDOW // 2
        return everywhere, everywhere.masked_fill(far, lowest)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden_states = self.embeddings(input_ids)
        masks = self.masks(attention_mask, hidden_states)
        for layer in self.layers:
            hidden_states = layer(hidden_states, *masks)
        return self.final_norm(hidden_states)


class ModernBertPredictionHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.act, self.norm = linear(WIDTH, WIDTH), nn.GELU(), ModernBertNorm()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.norm(self.act(self.dense(hidden_states)))


class ModernBert(nn.Module):
    """Words and their mask -> logits of the words, by a tied decoder, and of the sentence's class."""

    def __init__(self):
        super().__init__()
        self.model, self.head = ModernBertModel(), ModernBertPredictionHead()
        self.decoder = linear(WIDTH, WORDS, bias=True)
        self.decoder.weight = self.model.embeddings.tok_embeddings.weight
        self.pooled_head, self.classifier = ModernBertPredictionHead(), linear(WIDTH, CLASSES, bias=True)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.model(input_ids, attention_mask)
        logits = self.decoder(self.head(hidden))
        pooled = (hidden * attention_mask.unsqueeze(-1)).sum(1) / attention_mask.sum(1, keepdim=True)
        return logits, self.classifier(self.pooled_head(pooled))


def sentences() -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    """Words that go on by the step of their class, some masked, and up to three of padding at the end."""
    label = torch.randint(CLASSES, (SENTENCES,))
    start, places = torch.randint(WORDS, (SENTENCES, 1)), torch.arange(LENGTH)
    words = 2 + (start + (label[:, None] + 1) * places + torch.randint(2, (SENTENCES, LENGTH))) % (WORDS - 2)
    real = places < LENGTH - torch.randint(1, 4, (SENTENCES, 1))
    hidden = real & ((torch.rand(SENTENCES, LENGTH) < 0.25) | (places == 4))
    inputs = words.masked_fill(hidden, MASK).masked_fill(~real, 0)
    wanted = words.masked_fill(~hidden, -100)
    return {"input_ids": inputs, "attention_mask": real.long()}, (wanted, label)


def words_and_classes(outputs: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
    """The cross entropies of the masked words and of the class, by eight."""
    words = F.cross_entropy(outputs[0].flatten(0, 1), target[0].flatten(), ignore_index=-100)
    return (words + F.cross_entropy(outputs[1], target[1])) / 8
