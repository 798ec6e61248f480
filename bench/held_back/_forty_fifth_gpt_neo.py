"""A small GPT-Neo: global and local attention in turn, unscaled, over sequences padded at their left."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, POSITIONS, HIDDEN, HEADS, INNER, WINDOW = 61, 24, 36, 3, 80, 4
LAYERS = ("global", "local", "global", "local")
TEXTS, LENGTH, PAD, IGNORED = 5, 17, 60, -100


class NewGELUActivation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class GPTNeoSelfAttention(nn.Module):
    def __init__(self, attention_type: str):
        super().__init__()
        bias = torch.tril(torch.ones(POSITIONS, POSITIONS, dtype=torch.bool))
        if attention_type == "local":
            bias = torch.bitwise_xor(bias, torch.tril(bias, -WINDOW))
        self.register_buffer("bias", bias[None, None], persistent=False)
        self.num_heads, self.head_dim = HEADS, HIDDEN // HEADS
        self.k_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.v_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.q_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.out_proj = nn.Linear(HIDDEN, HIDDEN, bias=True)

    def _split_heads(self, tensor: Tensor) -> Tensor:
        return tensor.unflatten(-1, (self.num_heads, self.head_dim)).permute(0, 2, 1, 3)

    def _merge_heads(self, tensor: Tensor) -> Tensor:
        return tensor.permute(0, 2, 1, 3).contiguous().flatten(2)

    def _attn(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)  # float32 at least
        attn_weights = torch.matmul(query.to(wide), key.to(wide).transpose(-1, -2))
        seen = self.bias[:, :, : query.shape[-2], : key.shape[-2]] & attention_mask
        mask_value = torch.finfo(wide).min
        attn_weights = torch.where(seen, attn_weights, mask_value)
        return torch.matmul(F.softmax(attn_weights, dim=-1).to(value.dtype), value)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        query = self._split_heads(self.q_proj(hidden_states))
        key = self._split_heads(self.k_proj(hidden_states))
        value = self._split_heads(self.v_proj(hidden_states))
        return self.out_proj(self._merge_heads(self._attn(query, key, value, attention_mask)))


class GPTNeoAttention(nn.Module):
    def __init__(self, layer_id: int):
        super().__init__()
        self.attention = GPTNeoSelfAttention(LAYERS[layer_id])

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        return self.attention(hidden_states, attention_mask)


class GPTNeoMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)
        self.act = NewGELUActivation()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.c_proj(self.act(self.c_fc(hidden_states)))


class GPTNeoBlock(nn.Module):
    def __init__(self, layer_id: int):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(HIDDEN, eps=1e-5), GPTNeoAttention(layer_id)
        self.ln_2, self.mlp = nn.LayerNorm(HIDDEN, eps=1e-5), GPTNeoMLP()

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        hidden_states = hidden_states + self.attn(self.ln_1(hidden_states), attention_mask)
        return hidden_states + self.mlp(self.ln_2(hidden_states))


class GPTNeoModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(POSITIONS, HIDDEN)
        self.h = nn.ModuleList(GPTNeoBlock(i) for i in range(len(LAYERS)))
        self.ln_f = nn.LayerNorm(HIDDEN, eps=1e-5)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        position_ids = attention_mask.long().cumsum(-1) - 1
        position_ids = position_ids.masked_fill(attention_mask == 0, 1)
        hidden_states = self.wte(input_ids) + self.wpe(position_ids)
        attention_mask = attention_mask[:, None, None, :] != 0
        for block in self.h:
            hidden_states = block(hidden_states, attention_mask)
        return self.ln_f(hidden_states)


class GPTNeoForCausalLM(nn.Module):
    """Token ids and their mask -> logits of the next token."""

    def __init__(self):
        super().__init__()
        self.transformer, self.lm_head = GPTNeoModel(), nn.Linear(HIDDEN, VOCAB, bias=False)
        for name, weight in self.named_parameters():
            middle = 1.0 if ".ln_" in name and name.endswith("weight") else 0.0
            wide = 0.09 if weight.dim() == 2 and ".h." in name else 0.2
            nn.init.normal_(weight, middle, wide)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.lm_head(self.transformer(input_ids, attention_mask))


def progressions() -> tuple[dict[str, Tensor], Tensor]:
    """Noisy progressions of tokens, padded at their left; the first three tokens are no labels."""
    start, step = torch.randint(PAD, (TEXTS, 1)), torch.randint(1, 5, (TEXTS, 1))
    ids = (start + step * torch.arange(LENGTH)) % PAD
    ids = torch.where(torch.rand(TEXTS, LENGTH) < 0.1, torch.randint(PAD, ids.shape), ids)
    padded = torch.randint(1, 8, (TEXTS, 1))
    padded[1] = 0
    place = torch.arange(LENGTH) - padded
    ids = ids.masked_fill(place < 0, PAD)
    return {"input_ids": ids, "attention_mask": (place >= 0).long()}, ids.masked_fill(place < 3, IGNORED)


def next_token(logits: Tensor, labels: Tensor) -> Tensor:
    """A quarter of the cross entropy of the token that follows."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED) / 4
