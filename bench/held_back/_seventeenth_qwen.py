"""A small Qwen3 of experts: normed queries and keys, two experts a token, texts packed and padded."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STEPS, IGNORED = 14, -100
# the padding of each row, then the lengths of its texts
LAYOUTS = ((0, 8, 6), (3, 5, 6), (2, 4, 3, 5))


@dataclass(frozen=True)
class Qwen3MoeConfig:
    vocab_size: int = 29
    hidden_size: int = 24
    intermediate_size: int = 32
    moe_intermediate_size: int = 12
    num_hidden_layers: int = 3
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 6
    num_experts: int = 5
    num_experts_per_tok: int = 2
    norm_topk_prob: bool = True
    mlp_only_layers: tuple[int, ...] = (0,)
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6


def wide(x: Tensor) -> torch.dtype:
    """The type of ``x``, or single precision where that is wider."""
    return torch.promote_types(x.dtype, torch.float32)


class Qwen3MoeRMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(wide(x))
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * y.to(x.dtype)


class Qwen3MoeRotaryEmbedding(nn.Module):
    """Positions [N, T] -> cosines and sines [N, T, head size], the same in both halves."""

    def __init__(self, config: Qwen3MoeConfig):
        super().__init__()
        powers = torch.arange(0, config.head_dim, 2) / config.head_dim
        self.register_buffer("inv_freq", config.rope_theta**-powers, persistent=False)

    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[:, :, None] * self.inv_freq
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


class Qwen3MoeAttention(nn.Module):
    def __init__(self, config: Qwen3MoeConfig):
        super().__init__()
        width, size = config.hidden_size, config.head_dim
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.num_key_value_groups, self.scaling = size, heads // groups, size**-0.5
        self.q_proj = nn.Linear(width, heads * size, bias=False)
        self.k_proj = nn.Linear(width, groups * size, bias=False)
        self.v_proj = nn.Linear(width, groups * size, bias=False)
        self.o_proj = nn.Linear(heads * size, width, bias=False)
        self.q_norm = Qwen3MoeRMSNorm(size, config.rms_norm_eps)
        self.k_norm = Qwen3MoeRMSNorm(size, config.rms_norm_eps)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        cos, sin = (table[:, None] for table in rotary)
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        k, v = (y.repeat_interleave(self.num_key_value_groups, 1) for y in (k, v))
        scores = q @ k.transpose(2, 3) * self.scaling
        scores = scores.masked_fill(~mask[:, None], torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1, dtype=wide(scores)).to(v.dtype)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2))


class Qwen3MoeMLP(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Qwen3MoeSparseMoeBlock(nn.Module):
    """Each token to its best experts, weighed by their shares; gives the router's scores too."""

    def __init__(self, config: Qwen3MoeConfig):
        super().__init__()
        width, inner = config.hidden_size, config.moe_intermediate_size
        self.top_k, self.norm_topk_prob = config.num_experts_per_tok, config.norm_topk_prob
        self.gate = nn.Linear(width, config.num_experts, bias=False)
        self.experts = nn.ModuleList(Qwen3MoeMLP(width, inner) for _ in range(config.num_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.flatten(0, 1)
        router_logits = self.gate(tokens)
        shares, chosen = router_logits.softmax(-1, dtype=wide(router_logits)).topk(self.top_k, -1)
        if self.norm_topk_prob:
            shares = shares / shares.sum(-1, keepdim=True)
        shares, mixed = shares.to(x.dtype), torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, ranks = torch.where(chosen == number)
            mixed = mixed.index_add(0, rows, expert(tokens[rows]) * shares[rows, ranks, None])
        return mixed.view_as(x), router_logits


class Qwen3MoeDecoderLayer(nn.Module):
    def __init__(self, config: Qwen3MoeConfig, number: int):
        super().__init__()
        self.self_attn = Qwen3MoeAttention(config)
        self.sparse = number not in config.mlp_only_layers
        dense = (config.hidden_size, config.intermediate_size)
        self.mlp = Qwen3MoeSparseMoeBlock(config) if self.sparse else Qwen3MoeMLP(*dense)
        self.input_layernorm = Qwen3MoeRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3MoeRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, rotary: tuple, mask: Tensor) -> tuple[Tensor, Tensor | None]:
        x = x + self.self_attn(self.input_layernorm(x), rotary, mask)
        y, router_logits = self.mlp(self.post_attention_layernorm(x)), None
        if self.sparse:
            y, router_logits = y
        return x + y, router_logits


class Qwen3MoeModel(nn.Module):
    def __init__(self, config: Qwen3MoeConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Qwen3MoeDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Qwen3MoeRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = Qwen3MoeRotaryEmbedding(config)

    def forward(self, input_ids: Tensor, segment_ids: Tensor) -> tuple[Tensor, Tensor]:
        mask = (segment_ids[:, :, None] == segment_ids[:, None]).tril()
        rotary = self.rotary_emb(mask.sum(-1) - 1)
        x, scores = self.embed_tokens(input_ids), []
        for layer in self.layers:
            x, router_logits = layer(x, rotary, mask)
            if router_logits is not None:
                scores.append(router_logits)
        return self.norm(x), torch.stack(scores)


class Qwen3MoeForCausalLM(nn.Module):
    """Ids and segments [N, T] -> logits [N, T, vocabulary], router scores [sparse layers, N * T, experts]."""

    def __init__(self, config: Qwen3MoeConfig | None = None):
        super().__init__()
        config = config or Qwen3MoeConfig()
        self.model = Qwen3MoeModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.apply(self.varied)
        for layer in self.model.layers[1:]:
            nn.init.orthogonal_(layer.mlp.gate.weight, 2.5)

    @staticmethod
    def varied(module: nn.Module) -> None:
        """Start with weights that let every layer and every gain count."""
        if isinstance(module, Qwen3MoeRMSNorm):
            nn.init.uniform_(module.weight, 0.6, 1.4)
        elif isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=module.weight.shape[1] ** -0.5)

    def forward(self, input_ids: Tensor, segment_ids: Tensor) -> dict[str, Tensor]:
        x, router_logits = self.model(input_ids, segment_ids)
        return {"logits": self.lm_head(x), "router_logits": router_logits}


def packed_texts() -> tuple[dict[str, Tensor], Tensor]:
    """Rows of padding and texts of other lengths; each text goes on by a rule with some noise."""
    rows = [[pad, *(texts[i] for i in torch.randperm(len(texts)))] for pad, *texts in LAYOUTS]
    segments = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows])
    ids = [torch.randint(28, (len(rows),))]
    for _ in range(STEPS - 1):
        ids.append((3 * ids[-1] + 1 + torch.randint(3, (len(rows),))) % 28)
    ids, padding = torch.stack(ids, 1) + 1, segments == 0
    begins = F.pad(segments, (1, 0))[:, :-1] != segments
    inputs = {"input_ids": ids.masked_fill(padding, 0), "segment_ids": segments}
    return inputs, ids.masked_fill(padding | begins, IGNORED)


def next_token_loss(outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten())
