"""A small MPNet for masked words: post-norm layers that share one bias by buckets of relative positions."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, PLACES, WIDTH, HEADS, INNER, LAYERS = 53, 26, 28, 4, 44, 3
BUCKETS, FARTHEST, EPS = 12, 16, 1e-5
BOS, PAD, EOS, MASK, FIRST, IGNORED = 0, 1, 2, WORDS - 1, 4, -100
TEXTS, LENGTH = 5, 17


def create_position_ids_from_input_ids(input_ids: Tensor, padding_idx: int) -> Tensor:
    """Positions of what is no padding, counted from ``padding_idx + 1``."""
    mask = input_ids.ne(padding_idx).int()
    incremental_indices = torch.cumsum(mask, dim=1).type_as(mask) * mask
    return incremental_indices.long() + padding_idx


class MPNetEmbeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.padding_idx = PAD
        self.word_embeddings = nn.Embedding(WORDS, WIDTH, padding_idx=PAD)
        self.position_embeddings = nn.Embedding(PLACES, WIDTH, padding_idx=PAD)
        self.LayerNorm = nn.LayerNorm(WIDTH, eps=EPS)

    def forward(self, input_ids: Tensor) -> Tensor:
        position_ids = create_position_ids_from_input_ids(input_ids, self.padding_idx)
        return self.LayerNorm(self.word_embeddings(input_ids) + self.position_embeddings(position_ids))


class MPNetSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_attention_heads, self.attention_head_size = HEADS, WIDTH // HEADS
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def transpose_for_scores(self, x: Tensor) -> Tensor:
        x = x.view(*x.shape[:-1], self.num_attention_heads, self.attention_head_size)
        return x.permute(0, 2, 1, 3)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor, position_bias: Tensor) -> Tensor:
        q, k, v = (self.transpose_for_scores(f(hidden_states)) for f in (self.q, self.k, self.v))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.attention_head_size)
        scores = scores + position_bias + attention_mask
        c = torch.matmul(scores.softmax(-1), v).permute(0, 2, 1, 3).contiguous()
        return self.o(c.view(*c.shape[:-2], -1))


class MPNetAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = MPNetSelfAttention()
        self.LayerNorm = nn.LayerNorm(WIDTH, eps=EPS)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor, position_bias: Tensor) -> Tensor:
        return self.LayerNorm(self.attn(hidden_states, attention_mask, position_bias) + hidden_states)


class MPNetIntermediate(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(WIDTH, INNER)
        self.intermediate_act_fn = nn.GELU()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.intermediate_act_fn(self.dense(hidden_states))


class MPNetOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(INNER, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH, eps=EPS)

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(hidden_states) + input_tensor)


class MPNetLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.intermediate, self.output = MPNetAttention(), MPNetIntermediate(), MPNetOutput()

    def forward(self, hidden_states: Tensor, attention_mask: Tensor, position_bias: Tensor) -> Tensor:
        attention_output = self.attention(hidden_states, attention_mask, position_bias)
        return self.output(self.intermediate(attention_output), attention_output)


class MPNetEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.ModuleList(MPNetLayer() for _ in range(LAYERS))
        self.relative_attention_bias = nn.Embedding(BUCKETS, HEADS)

    def compute_position_bias(self, x: Tensor) -> Tensor:
        """[N, T, D] -> [N, heads, T, T]."""
        bsz, qlen, klen = x.size(0), x.size(1), x.size(1)
        context_position = torch.arange(qlen, device=x.device)[:, None]
        memory_position = torch.arange(klen, device=x.device)[None, :]
        rp_bucket = self.relative_position_bucket(memory_position - context_position, BUCKETS, FARTHEST)
        values = self.relative_attention_bias(rp_bucket).permute(2, 0, 1).unsqueeze(0)
        return values.expand((bsz, -1, qlen, klen)).contiguous()

    @staticmethod
    def relative_position_bucket(relative_position: Tensor, num_buckets: int, max_distance: int) -> Tensor:
        n = -relative_position
        num_buckets //= 2
        ret = (n < 0).to(torch.long) * num_buckets
        n, max_exact = torch.abs(n), num_buckets // 2
        far = torch.log(n.float().clamp(min=1) / max_exact) / math.log(max_distance / max_exact)
        val_if_large = max_exact + (far * (num_buckets - max_exact)).to(torch.long)
        val_if_large = torch.clamp(val_if_large, max=num_buckets - 1)
        return ret + torch.where(n < max_exact, n, val_if_large)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        position_bias = self.compute_position_bias(hidden_states)
        for layer_module in self.layer:
            hidden_states = layer_module(hidden_states, attention_mask, position_bias)
        return hidden_states


class MPNetModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = MPNetEmbeddings()
        self.encoder = MPNetEncoder()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embeddings(input_ids)
        extended_attention_mask = attention_mask[:, None, None, :].to(x.dtype)
        extended_attention_mask = (1.0 - extended_attention_mask) * torch.finfo(x.dtype).min
        return self.encoder(x, extended_attention_mask)


class MPNetLMHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.layer_norm = nn.LayerNorm(WIDTH, eps=EPS)
        self.decoder = nn.Linear(WIDTH, WORDS, bias=False)
        self.bias = nn.Parameter(torch.zeros(WORDS))
        self.decoder.bias = self.bias

    def forward(self, features: Tensor) -> Tensor:
        x = self.layer_norm(F.gelu(self.dense(features)))
        return self.decoder(x)


def scatter(module: nn.Module) -> None:
    """Weights at random, with nothing at zero or at one."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.9 / math.sqrt(module.in_features))
        nn.init.normal_(module.bias, std=0.1)
    elif isinstance(module, nn.LayerNorm):
        nn.init.normal_(module.weight, 1.0, 0.2), nn.init.normal_(module.bias, std=0.1)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.7 if module.num_embeddings == BUCKETS else 0.3)


class MPNetForMaskedLM(nn.Module):
    """Words [N, T] and which of them are no padding -> logits [N, T, words]."""

    def __init__(self):
        super().__init__()
        self.mpnet = MPNetModel()
        self.lm_head = MPNetLMHead()
        self.apply(scatter)
        self.lm_head.decoder.weight = self.mpnet.embeddings.word_embeddings.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.lm_head(self.mpnet(input_ids, attention_mask))


def texts() -> tuple[dict[str, Tensor], Tensor]:
    """Words that go on by a step of their text's own, a quarter of them masked; short texts are padded."""
    place = torch.arange(LENGTH)
    length = torch.randint(7, LENGTH - 1, (TEXTS, 1))
    length[0] = LENGTH
    start, step = torch.randint(40, (TEXTS, 1)), torch.randint(1, 6, (TEXTS, 1))
    words = FIRST + (start + step * place) % (MASK - FIRST)
    inside = (place > 0) & (place < length - 1)
    words = torch.where(inside, words, EOS).masked_fill(place == 0, BOS)
    hidden = inside & ((torch.rand(TEXTS, LENGTH) < 0.2) | (place == 3))
    target = words.masked_fill(~hidden, IGNORED)
    input_ids = words.masked_fill(hidden, MASK).masked_fill(place >= length, PAD)
    return {"input_ids": input_ids, "attention_mask": input_ids.ne(PAD).long()}, target


def masked_words(logits: Tensor, target: Tensor) -> Tensor:
    """The cross entropy of the masked words, by four."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED) / 4
