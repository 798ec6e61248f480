"""A small GPT-J: attention and MLP in parallel, rotary positions on part of each head, a cache handed in."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS, INNER, ROTARY, LAYERS, LONGEST = 41, 36, 3, 52, 8, 3, 20
SEQUENCES, EARLIER, TOKENS = 4, 5, 9


def create_sinusoidal_positions(num_pos: int, dim: int) -> Tensor:
    inv_freq = 1.0 / (10000 ** (torch.arange(0, dim, 2) / dim))
    sinusoid_inp = torch.outer(torch.arange(num_pos).float(), inv_freq)
    return torch.cat((torch.sin(sinusoid_inp), torch.cos(sinusoid_inp)), dim=1)


def rotate_every_two(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def apply_rotary_pos_emb(tensor: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    sin = torch.repeat_interleave(sin[:, :, None, :], 2, 3)
    cos = torch.repeat_interleave(cos[:, :, None, :], 2, 3)
    return (tensor * cos) + (rotate_every_two(tensor) * sin)


class NewGELUActivation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class GPTJAttention(nn.Module):
    def __init__(self):
        super().__init__()
        mask = torch.tril(torch.ones(LONGEST, LONGEST, dtype=torch.bool)).view(1, 1, LONGEST, LONGEST)
        self.register_buffer("bias", mask, persistent=False)
        self.head_dim = WIDTH // HEADS
        self.scale_attn = math.sqrt(self.head_dim)
        self.k_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.v_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer(
            "embed_positions", create_sinusoidal_positions(LONGEST, ROTARY), persistent=False
        )

    def _split_heads(self, tensor: Tensor, rotary: bool) -> Tensor:
        tensor = tensor.view(*tensor.shape[:2], HEADS, self.head_dim)
        return tensor if rotary else tensor.permute(0, 2, 1, 3)

    def _attn(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor) -> Tensor:
        query_length, key_length = query.size(-2), key.size(-2)
        causal_mask = self.bias[:, :, key_length - query_length : key_length, :key_length]
        kept = torch.promote_types(query.dtype, torch.float32)  # float32 at least
        attn_weights = torch.matmul(query.to(kept), key.to(kept).transpose(-1, -2))
        mask_value = torch.full([], torch.finfo(kept).min, dtype=kept, device=query.device)
        attn_weights = torch.where(causal_mask, attn_weights, mask_value)
        attn_weights = attn_weights / self.scale_attn
        attn_weights = F.softmax(attn_weights + attention_mask, dim=-1).to(value.dtype)
        return torch.matmul(attn_weights, value)

    def forward(
        self, hidden_states: Tensor, layer_past: Tensor, attention_mask: Tensor, position_ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        query = self._split_heads(self.q_proj(hidden_states), True)
        key = self._split_heads(self.k_proj(hidden_states), True)
        value = self._split_heads(self.v_proj(hidden_states), False)
        sin, cos = self.embed_positions[position_ids].chunk(2, dim=-1)
        k_rot, k_pass = key[..., :ROTARY], key[..., ROTARY:]
        q_rot, q_pass = query[..., :ROTARY], query[..., ROTARY:]
        key = torch.cat([apply_rotary_pos_emb(k_rot, sin, cos), k_pass], dim=-1).permute(0, 2, 1, 3)
        query = torch.cat([apply_rotary_pos_emb(q_rot, sin, cos), q_pass], dim=-1).permute(0, 2, 1, 3)
        key = torch.cat((layer_past[:, 0], key), dim=-2)
        value = torch.cat((layer_past[:, 1], value), dim=-2)
        attn_output = self._attn(query, key, value, attention_mask).permute(0, 2, 1, 3).flatten(2)
        return self.out_proj(attn_output), torch.stack((key, value), 1)


class GPTJMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc_in, self.fc_out = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.act = NewGELUActivation()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.fc_out(self.act(self.fc_in(hidden_states)))


class GPTJBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH, eps=1e-5)
        self.attn, self.mlp = GPTJAttention(), GPTJMLP()

    def forward(
        self, hidden_states: Tensor, layer_past: Tensor, attention_mask: Tensor, position_ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        residual = hidden_states
        hidden_states = self.ln_1(hidden_states)
        attn_output, present = self.attn(hidden_states, layer_past, attention_mask, position_ids)
        return attn_output + self.mlp(hidden_states) + residual, present


class GPTJModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.h = nn.ModuleList(GPTJBlock() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH, eps=1e-5)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        position_ids = (attention_mask.cumsum(-1) - 1).masked_fill(attention_mask == 0, 1)
        position_ids = position_ids[:, -input_ids.shape[1] :]
        hidden_states, presents = self.wte(input_ids), []
        seen = attention_mask[:, None, None, :].to(hidden_states.dtype)
        mask = (1.0 - seen) * torch.finfo(hidden_states.dtype).min
        for i, block in enumerate(self.h):
            hidden_states, present = block(hidden_states, past[:, i], mask, position_ids)
            presents.append(present)
        return self.ln_f(hidden_states), torch.stack(presents, 1)


class GPTJForCausalLM(nn.Module):
    """Tokens, the mask of earlier ones and these, a cache [N, layer, 2, ...] -> logits, the longer cache."""

    def __init__(self):
        super().__init__()
        self.transformer = GPTJModel()
        self.lm_head = nn.Linear(WIDTH, VOCABULARY)
        for name, weight in self.named_parameters():
            scale = 0.2 if weight.dim() == 1 else 0.6 if "wte" in name else 1.2 / math.sqrt(weight.shape[1])
            weight.data = scale * torch.randn_like(weight) + (1.0 if "ln" in name and "weight" in name else 0)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, past_key_values: Tensor
    ) -> tuple[Tensor, Tensor]:
        hidden_states, presents = self.transformer(input_ids, attention_mask, past_key_values)
        return self.lm_head(hidden_states), presents


def counting() -> tuple[dict[str, Tensor], Tensor]:
    """Counting by steps, padded before the earlier tokens and after these."""
    start, stride = torch.randint(VOCABULARY, (SEQUENCES, 1)), torch.randint(1, 4, (SEQUENCES, 1))
    place = torch.arange(EARLIER + TOKENS)
    before, after = torch.randint(0, 4, (SEQUENCES, 1)), torch.randint(0, 4, (SEQUENCES, 1))
    before[0], after[0] = 2, 1
    mask = ((place >= before) & (place < EARLIER + TOKENS - after)).long()
    tokens = ((start + stride * place) % VOCABULARY * mask)[:, EARLIER:]
    past = torch.randn(SEQUENCES, LAYERS, 2, HEADS, EARLIER, WIDTH // HEADS)
    labels = tokens.masked_fill(mask[:, EARLIER:] == 0, -100)
    return {"input_ids": tokens, "attention_mask": mask, "past_key_values": past}, labels


def next_token(outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """The cross entropy of each next token, by four."""
    return F.cross_entropy(outputs[0][:, :-1].flatten(0, 1), labels[:, 1:].flatten()) / 4
