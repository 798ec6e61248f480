"""A tiny BLOOM: ALiBi for six heads, fused projections, both kinds of residual, a cache."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED, PAD, FIRST_WORD, WORDS, ROWS, LENGTHS = -100, 3, 5, 19, 4, (6, 7)
Past = tuple[Tensor, Tensor]


@dataclass
class BloomConfig:
    """As the library's, but that each layer says for itself where its residuals start."""

    vocab_size: int = FIRST_WORD + WORDS
    hidden_size: int = 18
    n_layer: int = 3
    n_head: int = 6
    layer_norm_epsilon: float = 1e-5
    apply_residual_connection_post_layernorm: tuple[bool, ...] = (False, True, False)


def build_alibi_tensor(attention_mask: Tensor, num_heads: int, like: Tensor) -> Tensor:
    """A slope for each head times the place of each key among the real ones: [N H, 1, K]."""
    closest = 2 ** math.floor(math.log2(num_heads))
    base = 2 ** -(2 ** -(math.log2(closest) - 3))
    slopes = base ** torch.arange(1, 1 + closest).to(like)
    if closest != num_heads:
        extra_base = 2 ** -(2 ** -(math.log2(2 * closest) - 3))
        remaining = min(closest, num_heads - closest)
        slopes = torch.cat([slopes, extra_base ** torch.arange(1, 1 + 2 * remaining, 2).to(like)])
    places = ((attention_mask.cumsum(-1) - 1) * attention_mask)[:, None]
    return (slopes[:, None] * places).flatten(0, 1)[:, None]


def bloom_gelu_forward(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def bloom_gelu_back(g: Tensor, x: Tensor) -> Tensor:
    tanh_out = torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))
    slope = 0.79788456 * (1 + 3 * 0.044715 * x * x)
    return (0.5 * x * ((1 - tanh_out * tanh_out) * slope) + 0.5 * (1 + tanh_out)) * g


class GeLUFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return bloom_gelu_forward(x)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> Tensor:
        return bloom_gelu_back(grad_output, *ctx.saved_tensors)


class BloomGelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return GeLUFunction.apply(x) if self.training else bloom_gelu_forward(x)


class BloomAttention(nn.Module):
    def __init__(self, config: BloomConfig):
        super().__init__()
        self.num_heads, self.head_dim = config.n_head, config.hidden_size // config.n_head
        self.inv_norm_factor, self.beta = 1.0 / math.sqrt(self.head_dim), 1.0
        self.query_key_value = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def _reshape(self, fused_qkv: Tensor) -> tuple[Tensor, ...]:
        """[N, T, H 3 d] -> three of [N, H, T, d]."""
        fused = fused_qkv.unflatten(2, (self.num_heads, 3, self.head_dim))
        return tuple(x.transpose(1, 2) for x in fused.unbind(3))

    def _merge_heads(self, x: Tensor) -> Tensor:
        """[N H, T, d] -> [N, T, H d]."""
        return x.unflatten(0, (-1, self.num_heads)).transpose(1, 2).flatten(2)

    def forward(
        self, hidden_states: Tensor, residual: Tensor, alibi: Tensor, mask: Tensor, layer_past: Past | None
    ) -> tuple[Tensor, Past]:
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        if layer_past is not None:
            key, value = torch.cat([layer_past[0], key], 2), torch.cat([layer_past[1], value], 2)
        q, k, v = (x.flatten(0, 1) for x in (query, key, value))
        scores = alibi.baddbmm(q, k.transpose(1, 2), beta=self.beta, alpha=self.inv_norm_factor)
        scores = scores.unflatten(0, (-1, self.num_heads)).masked_fill(mask, torch.finfo(scores.dtype).min)
        context = self._merge_heads(torch.bmm(F.softmax(scores, dim=-1).flatten(0, 1), v))
        return residual + self.dense(context), (key, value)


class BloomMLP(nn.Module):
    def __init__(self, config: BloomConfig):
        super().__init__()
        self.dense_h_to_4h = nn.Linear(config.hidden_size, 4 * config.hidden_size)
        self.gelu_impl = BloomGelu()
        self.dense_4h_to_h = nn.Linear(4 * config.hidden_size, config.hidden_size)

    def forward(self, hidden_states: Tensor, residual: Tensor) -> Tensor:
        return residual + self.dense_4h_to_h(self.gelu_impl(self.dense_h_to_4h(hidden_states)))


class BloomBlock(nn.Module):
    def __init__(self, config: BloomConfig, index: int):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.self_attention = BloomAttention(config)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.mlp = BloomMLP(config)
        self.post_layernorm = config.apply_residual_connection_post_layernorm[index]

    def forward(
        self, hidden_states: Tensor, alibi: Tensor, mask: Tensor, layer_past: Past | None
    ) -> tuple[Tensor, Past]:
        normed = self.input_layernorm(hidden_states)
        residual = normed if self.post_layernorm else hidden_states
        attended, present = self.self_attention(normed, residual, alibi, mask, layer_past)
        normed = self.post_attention_layernorm(attended)
        residual = normed if self.post_layernorm else attended
        return self.mlp(normed, residual), present


class BloomModel(nn.Module):
    """Words [N, T] behind what is in the cache, and a mask of both [N, K] -> states and the new cache."""

    def __init__(self, config: BloomConfig):
        super().__init__()
        self.num_heads = config.n_head
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.word_embeddings_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.h = nn.ModuleList(BloomBlock(config, i) for i in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)

    @staticmethod
    def _prepare_attn_mask(attention_mask: Tensor, length: int) -> Tensor:
        """True for what a word must not see, [N, 1, T, K]: later words and padding."""
        total = attention_mask.shape[1]
        places = torch.arange(total, device=attention_mask.device)
        return (places > places[total - length :, None]) | (attention_mask < 1)[:, None, None]

    def forward(self, input_ids: Tensor, attention_mask: Tensor, past: list[Past] | None = None) -> tuple:
        hidden_states = self.word_embeddings_layernorm(self.word_embeddings(input_ids))
        alibi = build_alibi_tensor(attention_mask, self.num_heads, hidden_states)
        mask, presents = self._prepare_attn_mask(attention_mask, input_ids.shape[1]), []
        for i, block in enumerate(self.h):
            hidden_states, present = block(hidden_states, alibi, mask, past[i] if past else None)
            presents.append(present)
        return self.ln_f(hidden_states), presents


class BloomForCausalLM(nn.Module):
    """Two parts of a text, the second read behind the cache of the first -> the logits of both."""

    def __init__(self):
        super().__init__()
        config = BloomConfig()
        self.transformer = BloomModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=1.1 * module.in_features**-0.5)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.3)
            elif isinstance(module, nn.LayerNorm):
                nn.init.uniform_(module.weight, 0.6, 1.4)
            if getattr(module, "bias", None) is not None:
                nn.init.normal_(module.bias, std=0.2)
        self.lm_head.weight = self.transformer.word_embeddings.weight

    def forward(self, first: Tensor, second: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        begun, past = self.transformer(first, attention_mask[:, : first.shape[1]])
        continued, _ = self.transformer(second, attention_mask, past)
        states = torch.cat([begun, continued], 1)
        return {"logits": self.lm_head(states), "last_hidden_state": states}


def counting() -> tuple[dict[str, Tensor], Tensor]:
    """Words that count up by a step of each text; padding stands on the left of each of the two parts."""
    ids, labels = torch.full((2, ROWS, sum(LENGTHS)), PAD).unbind(0)
    labels.fill_(IGNORED)
    for row in range(ROWS):
        pads = (torch.randint(0, 4, ()), torch.randint(0, 3, ()))
        real = [*range(pads[0], LENGTHS[0]), *range(LENGTHS[0] + pads[1], sum(LENGTHS))]
        words = torch.randint(WORDS, ()) + torch.randint(1, 4, ()) * torch.arange(len(real) + 1)
        ids[row, real], labels[row, real] = FIRST_WORD + words[:-1] % WORDS, FIRST_WORD + words[1:] % WORDS
    first, second = ids.split(LENGTHS, 1)
    return {"first": first, "second": second, "attention_mask": (ids != PAD).long()}, labels


def surprise(outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs["logits"].mT, labels, ignore_index=IGNORED)
