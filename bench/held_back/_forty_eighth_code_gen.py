"""A small CodeGen: a decoder of parallel blocks with partial rotary positions, over padded sequences."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS, INNER, ROTARY = 53, 48, 6, 80, 4
LAYERS, LONGEST, PARTS, SEQUENCES, LENGTH = 3, 16, 2, 5, 11
SIZE = WIDTH // HEADS


def create_sinusoidal_positions(num_pos: int, dim: int) -> Tensor:
    inv_freq = 1.0 / (10000 ** (torch.arange(0, dim, 2) / dim))
    sinusoid_inp = torch.outer(torch.arange(num_pos).float(), inv_freq)
    return torch.cat((sinusoid_inp.sin(), sinusoid_inp.cos()), 1)


def rotate_every_two(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def apply_rotary_pos_emb(tensor: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    sin = torch.repeat_interleave(sin[:, :, None, :], 2, 3)
    cos = torch.repeat_interleave(cos[:, :, None, :], 2, 3)
    return tensor * cos + rotate_every_two(tensor) * sin


class NewGELUActivation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x.pow(3))))


class CodeGenAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_attention_heads, self.head_dim, self.rotary_dim = HEADS, SIZE, ROTARY
        self.scale_attn = SIZE**0.5
        self.qkv_proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        table = create_sinusoidal_positions(LONGEST, ROTARY)
        self.register_buffer("embed_positions", table, persistent=False)

    def _split_heads(self, x: Tensor) -> Tensor:
        """[N, T, parts, D / parts] -> [N, T, heads, D / heads]."""
        return x.unflatten(-1, (self.num_attention_heads // PARTS, self.head_dim)).flatten(2, 3)

    def _attn(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor) -> Tensor:
        attn_weights = query @ key.transpose(-1, -2) / self.scale_attn + attention_mask
        return attn_weights.softmax(-1) @ value

    def forward(self, hidden_states: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        qkv_split = self.qkv_proj(hidden_states).unflatten(-1, (PARTS, -1))
        query, value, key = map(self._split_heads, qkv_split.split(WIDTH // PARTS, -1))
        sin, cos = self.embed_positions[position_ids].chunk(2, -1)
        dim = self.rotary_dim
        k_rot = apply_rotary_pos_emb(key[..., :dim], sin, cos)
        q_rot = apply_rotary_pos_emb(query[..., :dim], sin, cos)
        key = torch.cat([k_rot, key[..., dim:]], -1).transpose(1, 2)
        query = torch.cat([q_rot, query[..., dim:]], -1).transpose(1, 2)
        attn_output = self._attn(query, key, value.transpose(1, 2), attention_mask)
        return self.out_proj(attn_output.transpose(1, 2).flatten(2))


class CodeGenMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc_in = nn.Linear(WIDTH, INNER)
        self.fc_out = nn.Linear(INNER, WIDTH)
        self.act = NewGELUActivation()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.fc_out(self.act(self.fc_in(hidden_states)))


class CodeGenBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH, eps=1e-5)
        self.attn = CodeGenAttention()
        self.mlp = CodeGenMLP()

    def forward(self, hidden_states: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        residual = hidden_states
        hidden_states = self.ln_1(hidden_states)
        attn_output = self.attn(hidden_states, attention_mask, position_ids)
        return attn_output + self.mlp(hidden_states) + residual


class CodeGenModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.h = nn.ModuleList(CodeGenBlock() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH, eps=1e-5)

    def _update_causal_mask(self, attention_mask: Tensor, x: Tensor) -> Tensor:
        """[N, T] of ones and zeros -> [N, 1, T, T]: zero, or the least number where nothing is to be seen."""
        least, length = torch.finfo(x.dtype).min, x.shape[1]
        causal_mask = torch.full((length, length), least, dtype=x.dtype, device=x.device).triu(1)
        return causal_mask.masked_fill(attention_mask[:, None, None] == 0, least)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        hidden_states = self.wte(input_ids)
        causal_mask = self._update_causal_mask(attention_mask, hidden_states)
        for block in self.h:
            hidden_states = block(hidden_states, causal_mask, position_ids)
        return self.ln_f(hidden_states)


class CodeGenForCausalLM(nn.Module):
    """Tokens [N, T], their mask and their positions -> logits [N, T, V]."""

    def __init__(self):
        super().__init__()
        self.transformer = CodeGenModel()
        self.lm_head = nn.Linear(WIDTH, VOCABULARY)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                nn.init.normal_(module.weight, 1, 0.2)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0, module.in_features**-0.5)
            if getattr(module, "bias", None) is not None:
                nn.init.normal_(module.bias, 0, 0.2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        return self.lm_head(self.transformer(input_ids, attention_mask, position_ids))


def counted() -> tuple[dict[str, Tensor], Tensor]:
    """Tokens that go up by a step, padded on the left; the labels are the tokens."""
    start, step = torch.randint(VOCABULARY, (SEQUENCES, 1)), torch.randint(1, 4, (SEQUENCES, 1))
    mask = (torch.arange(LENGTH) >= torch.randint(1, 5, (SEQUENCES, 1))).long()
    tokens = (1 + (start + step * torch.arange(LENGTH)) % (VOCABULARY - 1)) * mask
    places = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    inputs = {"input_ids": tokens, "attention_mask": mask, "position_ids": places}
    return inputs, tokens.masked_fill(mask == 0, -100)


def next_token(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross entropy of the token after each, by four."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()) / 4
