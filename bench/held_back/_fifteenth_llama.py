"""A small Llama: grouped heads, positions by rotation, root mean square norms and gated products."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, INNER, DEPTH, HEADS, GROUPS, LENGTH = 40, 32, 56, 3, 4, 2, 12
EPS, THETA, PAD, IGNORED = 1e-5, 10000.0, 0, -100


def varied(module: nn.Module) -> None:
    """Start with weights that let every layer and gain count."""
    if isinstance(module, LlamaRMSNorm):
        nn.init.uniform_(module.weight, 0.6, 1.4)
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=module.in_features**-0.5)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.1)


def rotate_half(x: Tensor) -> Tensor:
    front, back = x.chunk(2, -1)
    return torch.cat([-back, front], -1)


def repeat_kv(x: Tensor, times: int) -> Tensor:
    """Each of the heads [B, G, T, E] as often as there are queries that share it."""
    return x if times == 1 else x[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2)


class LlamaRMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = EPS):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        variance = x.square().mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + self.variance_epsilon))


class LlamaRotaryEmbedding(nn.Module):
    """Cosines and sines [B, T, E] of the positions, each frequency in both halves."""

    def __init__(self, size: int, base: float = THETA):
        super().__init__()
        self.register_buffer("inv_freq", base ** -(torch.arange(0, size, 2) / size), persistent=False)

    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].to(self.inv_freq) * self.inv_freq
        both = torch.cat([angles, angles], -1)
        return both.cos(), both.sin()


class LlamaMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, INNER, bias=False)
        self.up_proj = nn.Linear(WIDTH, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, WIDTH, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class LlamaAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.head_dim = WIDTH // HEADS
        self.num_key_value_groups, self.scaling = HEADS // GROUPS, self.head_dim**-0.5
        self.q_proj = nn.Linear(WIDTH, HEADS * self.head_dim, bias=False)
        self.k_proj = nn.Linear(WIDTH, GROUPS * self.head_dim, bias=False)
        self.v_proj = nn.Linear(WIDTH, GROUPS * self.head_dim, bias=False)
        self.o_proj = nn.Linear(HEADS * self.head_dim, WIDTH, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = (table[:, None] for table in rotation)
        q, k = (y * cos + rotate_half(y) * sin for y in (q, k))
        k, v = (repeat_kv(y, self.num_key_value_groups) for y in (k, v))
        scores = q @ k.transpose(2, 3) * self.scaling + mask
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class LlamaDecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.mlp = LlamaAttention(), LlamaMLP()
        self.input_layernorm, self.post_attention_layernorm = LlamaRMSNorm(WIDTH), LlamaRMSNorm(WIDTH)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaModel(nn.Module):
    """What is hidden gets the lowest number of the type; a row that sees nothing has equal shares."""

    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(LlamaDecoderLayer() for _ in range(DEPTH))
        self.norm = LlamaRMSNorm(WIDTH)
        self.rotary_emb = LlamaRotaryEmbedding(WIDTH // HEADS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        length = input_ids.shape[1]
        earlier = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        seen = earlier & attention_mask.bool()[:, None, None, :]
        mask = torch.zeros(seen.shape, dtype=x.dtype, device=x.device)
        mask = mask.masked_fill(~seen, torch.finfo(x.dtype).min)
        rotation = self.rotary_emb(position_ids)
        for layer in self.layers:
            x = layer(x, rotation, mask)
        return self.norm(x)


class LlamaForCausalLM(nn.Module):
    """Tokens, their mask and their positions, all [B, T] -> logits [B, T, V]."""

    def __init__(self):
        super().__init__()
        self.model = LlamaModel()
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.apply(varied)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        return self.lm_head(self.model(input_ids, attention_mask, position_ids))


def texts() -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Noisy even steps through the vocabulary, padded on either side; a prompt of three has no labels."""
    step, start = torch.randint(1, 4, (4, 1)), torch.randint(0, VOCABULARY, (4, 1))
    column = torch.arange(LENGTH)
    ids = 1 + (start + step * column) % (VOCABULARY - 1)
    ids = torch.where(torch.rand(ids.shape) < 0.15, torch.randint(1, VOCABULARY, ids.shape), ids)
    first, right, left = torch.randint(2, 6, (3,)).tolist()
    begin, end = torch.tensor([first, 0, left, 0]), torch.tensor([0, right, 0, 0])
    mask = ((column >= begin[:, None]) & (column < LENGTH - end[:, None])).long()
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    ids = ids.masked_fill(mask == 0, PAD)
    labels = ids.masked_fill((mask == 0) | (positions < 3), IGNORED)
    return (ids, mask, positions), labels


def next_token(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of each token given those before it."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
