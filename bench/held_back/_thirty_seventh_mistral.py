"""A small Mistral: a prefill on a left-padded prompt, then decoding by a rolling cache of its window."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 41, 36, 52, 6, 2, 8, 2
WINDOW, PROMPT, DECODED, TEXTS, THETA, EPS = 6, 10, 3, 5, 10000.0, 1e-5

Cache = tuple[Tensor, Tensor]


class MistralRMSNorm(nn.Module):
    def __init__(self, hidden_size: int, eps: float = EPS):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.2 * torch.randn(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


class MistralRotaryEmbedding(nn.Module):
    """The cosine and the sine of each position's angles, twice side by side."""

    def __init__(self, dim: int, base: float = THETA):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / base ** (torch.arange(0, dim, 2).float() / dim))

    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        freqs = position_ids[:, :, None].to(self.inv_freq) * self.inv_freq
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos(), emb.sin()


def rotate_half(x: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def repeat_kv(hidden_states: Tensor, n_rep: int) -> Tensor:
    """[N, key heads, T, D] -> [N, key heads x n_rep, T, D], the copies of a head beside each other."""
    n, heads, length, dim = hidden_states.shape
    hidden_states = hidden_states[:, :, None].expand(n, heads, n_rep, length, dim)
    return hidden_states.reshape(n, heads * n_rep, length, dim)


class MistralMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, INNER, bias=False)
        self.up_proj = nn.Linear(WIDTH, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, WIDTH, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class MistralAttention(nn.Module):
    """Over the prompt's own keys where nothing is cached, else over the slots of the rolling cache."""

    def __init__(self):
        super().__init__()
        self.num_key_value_groups, self.scaling = HEADS // KV_HEADS, HEAD_DIM**-0.5
        self.q_proj = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)

    def update(self, past: Cache | None, k: Tensor, v: Tensor, cache_position: Tensor) -> Cache:
        """The cache with the last keys and values written at their positions modulo the window."""
        if past is None:
            empty = k.new_zeros(*k.shape[:2], WINDOW, HEAD_DIM)
            past = empty, empty
        slots = cache_position[-WINDOW:] % WINDOW
        return tuple(old.index_copy(2, slots, x[:, :, -WINDOW:]) for old, x in zip(past, (k, v), strict=True))

    def forward(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        mask: Tensor,
        past: Cache | None,
        cache_position: Tensor,
    ) -> tuple[Tensor, Cache]:
        shape = (*x.shape[:2], -1, HEAD_DIM)
        q, k, v = (f(x).view(shape).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rotary_pos_emb(q, k, *angles)
        cache = self.update(past, k, v, cache_position)
        k, v = (k, v) if past is None else cache
        k, v = repeat_kv(k, self.num_key_value_groups), repeat_kv(v, self.num_key_value_groups)
        weights = torch.matmul(q, k.transpose(2, 3)) * self.scaling
        weights = weights.masked_fill(~mask, torch.finfo(weights.dtype).min)
        mixed = torch.matmul(F.softmax(weights, dim=-1), v)
        return self.o_proj(mixed.transpose(1, 2).flatten(2)), cache


class MistralDecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.mlp = MistralAttention(), MistralMLP()
        self.input_layernorm, self.post_attention_layernorm = MistralRMSNorm(WIDTH), MistralRMSNorm(WIDTH)

    def forward(self, hidden_states: Tensor, *how: object) -> tuple[Tensor, Cache]:
        mixed, cache = self.self_attn(self.input_layernorm(hidden_states), *how)
        hidden_states = hidden_states + mixed
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states)), cache


class MistralModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(MistralDecoderLayer() for _ in range(LAYERS))
        self.norm, self.rotary_emb = MistralRMSNorm(WIDTH), MistralRotaryEmbedding(HEAD_DIM)

    def causal_mask(self, attention_mask: Tensor, cache_position: Tensor) -> Tensor:
        """What each query of the prompt sees: the window up to itself without the padding, and itself."""
        back = cache_position[:, None] - cache_position
        near = (back >= 0) & (back < WINDOW)
        return ((near & attention_mask.bool()[:, None]) | (back == 0))[:, None]

    def slot_mask(self, attention_mask: Tensor, cache_position: Tensor) -> Tensor:
        """Which slots are filled, and not with padding, once the newest token is written."""
        slots = torch.arange(WINDOW, device=cache_position.device)
        held = cache_position - (cache_position - slots) % WINDOW
        return ((held >= 0) & attention_mask.bool()[:, held.clamp(min=0)])[:, None, None]

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past: list | None, start: int
    ) -> tuple[Tensor, list]:
        cache_position = torch.arange(start, start + input_ids.shape[1], device=input_ids.device)
        make = self.causal_mask if past is None else self.slot_mask
        mask, angles = make(attention_mask, cache_position), self.rotary_emb(position_ids)
        hidden_states, caches = self.embed_tokens(input_ids), []
        for i, layer in enumerate(self.layers):
            old = None if past is None else past[i]
            hidden_states, cache = layer(hidden_states, angles, mask, old, cache_position)
            caches.append(cache)
        return self.norm(hidden_states), caches


class MistralForCausalLM(nn.Module):
    """Tokens, which of them count, their positions -> the logits of the prefill and of each decoding."""

    def __init__(self):
        super().__init__()
        self.model, self.lm_head = MistralModel(), nn.Linear(WIDTH, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        nn.init.normal_(self.model.embed_tokens.weight, std=0.1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        prompt = (x[:, :PROMPT] for x in (input_ids, attention_mask, position_ids))
        hidden_states, past = self.model(*prompt, None, 0)
        logits = [self.lm_head(hidden_states)]
        for t in range(PROMPT, input_ids.shape[1]):
            one = input_ids[:, t : t + 1], attention_mask[:, : t + 1], position_ids[:, t : t + 1]
            hidden_states, past = self.model(*one, past, t)
            logits.append(self.lm_head(hidden_states))
        return torch.cat(logits, dim=1)


def progressions() -> tuple[dict[str, Tensor], Tensor]:
    """Tokens that rise by a stride of each text's own, now and then by another, padded at left."""
    length = PROMPT + DECODED
    stride = torch.randint(1, 6, (TEXTS, 1)) + (torch.rand(TEXTS, length + 1) < 0.15)
    tokens = (torch.randint(VOCABULARY, (TEXTS, 1)) + stride.cumsum(1)) % (VOCABULARY - 1) + 1
    real = torch.arange(length) >= 2 * torch.randperm(TEXTS)[:, None]
    position = (real.cumsum(1) - 1).masked_fill(~real, 1)
    inputs = {
        "input_ids": tokens[:, :-1].masked_fill(~real, 0),
        "attention_mask": real.long(),
        "position_ids": position,
    }
    return inputs, tokens[:, 1:].masked_fill(~real, -100)


def next_tokens(logits: Tensor, target: Tensor) -> Tensor:
    """A quarter of the cross entropy over the joined logits."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100) / 4
