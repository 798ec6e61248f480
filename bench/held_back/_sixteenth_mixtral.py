"""A small Mixtral: grouped attention in a sliding window, and two experts of five for each token."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

END, STEPS, IGNORED = 2, 12, -100


@dataclass(frozen=True)
class MixtralConfig:
    vocab_size: int = 31
    hidden_size: int = 24
    intermediate_size: int = 20
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 8
    sliding_window: int = 5
    rope_theta: float = 100.0
    rms_norm_eps: float = 1e-5
    num_local_experts: int = 5
    num_experts_per_tok: int = 2


class MixtralRMSNorm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        power = x.square().mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(power + self.variance_epsilon))


class MixtralRotaryEmbedding(nn.Module):
    """Positions [T] -> cosines and sines [T, head_dim], the second half as the first."""

    def __init__(self, config: MixtralConfig):
        super().__init__()
        exponents = torch.arange(0, config.head_dim, 2) / config.head_dim
        self.register_buffer("inv_freq", config.rope_theta**-exponents, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions.to(self.inv_freq)[:, None] * self.inv_freq
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each head of [N, heads, T, D] turned: channel i goes with channel i + D / 2."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class MixtralAttention(nn.Module):
    def __init__(self, config: MixtralConfig):
        super().__init__()
        width, self.head_dim = config.hidden_size, config.head_dim
        heads, pairs = config.num_attention_heads, config.num_key_value_heads
        self.num_key_value_groups, self.scaling = heads // pairs, self.head_dim**-0.5
        self.q_proj = nn.Linear(width, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, pairs * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, pairs * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, width, bias=False)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        q, k = (rotated(self.heads(f(x)), *rotary) for f in (self.q_proj, self.k_proj))
        v = self.heads(self.v_proj(x))
        k, v = (y.repeat_interleave(self.num_key_value_groups, 1) for y in (k, v))
        scores = q @ k.transpose(2, 3) * self.scaling + mask
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class MixtralBlockSparseTop2MLP(nn.Module):
    def __init__(self, config: MixtralConfig):
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.w1, self.w3 = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.w2, self.act_fn = nn.Linear(inner, width, bias=False), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.act_fn(self.w1(x)) * self.w3(x))


class MixtralSparseMoeBlock(nn.Module):
    """Each token goes through the experts of its largest shares; what they say is added by these shares."""

    def __init__(self, config: MixtralConfig):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_local_experts, bias=False)
        self.experts = nn.ModuleList(
            MixtralBlockSparseTop2MLP(config) for _ in range(config.num_local_experts)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.flatten(0, 1)
        logits = self.gate(tokens)
        shares, chosen = logits.softmax(-1).topk(self.top_k, -1)
        shares = shares / shares.sum(-1, keepdim=True)
        result = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, rank = torch.where(chosen == number)
            result = result.index_add(0, rows, expert(tokens[rows]) * shares[rows, rank, None])
        return result.view_as(x), logits


class MixtralDecoderLayer(nn.Module):
    def __init__(self, config: MixtralConfig):
        super().__init__()
        self.self_attn, self.block_sparse_moe = MixtralAttention(config), MixtralSparseMoeBlock(config)
        self.input_layernorm = MixtralRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = MixtralRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.self_attn(self.input_layernorm(x), rotary, mask)
        y, logits = self.block_sparse_moe(self.post_attention_layernorm(x))
        return x + y, logits


class MixtralModel(nn.Module):
    def __init__(self, config: MixtralConfig):
        super().__init__()
        self.window = config.sliding_window
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(MixtralDecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = MixtralRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = MixtralRotaryEmbedding(config)

    def mask(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        """[N, 1, T, T]: nothing where a query sees a key, the least number elsewhere."""
        t = torch.arange(x.shape[1], device=x.device)
        back = t[:, None] - t
        seen = (back >= 0) & (back < self.window) & attention_mask.bool()[:, None, None]
        return torch.zeros_like(seen, dtype=x.dtype).masked_fill(~seen, torch.finfo(x.dtype).min)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, list[Tensor]]:
        x = self.embed_tokens(input_ids)
        mask = self.mask(x, attention_mask)
        rotary = self.rotary_emb(torch.arange(x.shape[1], device=x.device))
        router_logits = []
        for layer in self.layers:
            x, logits = layer(x, rotary, mask)
            router_logits.append(logits)
        return self.norm(x), router_logits


def load_balancing_loss(router_logits: list[Tensor], top_k: int, attention_mask: Tensor) -> Tensor:
    """Experts times the sum of share of tokens x mean probability, over real tokens of all layers."""
    probabilities = torch.cat(router_logits).softmax(-1)
    count = probabilities.shape[-1]
    chosen = F.one_hot(probabilities.topk(top_k, -1).indices, count).to(probabilities)
    real = attention_mask.flatten().repeat(len(router_logits)).to(probabilities)[:, None]
    tokens = (chosen * real[:, None]).sum(0) / real.sum()
    mean = (probabilities * real).sum(0) / real.sum()
    return count * (tokens * mean).sum()


class MixtralForCausalLM(nn.Module):
    """Token ids and their mask [N, T] -> logits [N, T, vocabulary] and the load-balancing loss."""

    def __init__(self, config: MixtralConfig | None = None):
        super().__init__()
        self.config = config = config or MixtralConfig()
        self.model = MixtralModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.apply(self.varied)
        for layer in self.model.layers:
            nn.init.orthogonal_(layer.block_sparse_moe.gate.weight, 4.5)

    @staticmethod
    def varied(module: nn.Module) -> None:
        """Start with weights that let every layer and every gain count."""
        if isinstance(module, MixtralRMSNorm):
            nn.init.uniform_(module.weight, 0.6, 1.4)
        elif isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=module.weight.shape[1] ** -0.5)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        x, router_logits = self.model(input_ids, attention_mask)
        balance = load_balancing_loss(router_logits, self.config.num_experts_per_tok, attention_mask)
        return {"logits": self.lm_head(x), "aux_loss": balance}


def sentences() -> tuple[dict[str, Tensor], Tensor]:
    """Rows of two sentences, each ended by the token that also fills up to the length of the longest."""
    ids = [torch.randint(3, 31, (3,))]
    for _ in range(STEPS - 1):
        ids.append((5 * ids[-1] + torch.randint(3, (3,))) % 28 + 3)
    ids = torch.stack(ids, 1).scatter(1, torch.randint(3, 7, (3, 1)), END)
    mask = torch.arange(STEPS) < torch.tensor([STEPS, 10, 9])[torch.randperm(3), None]
    labels = ids.masked_fill(~mask, IGNORED)
    return {"input_ids": ids.masked_fill(~mask, END), "attention_mask": mask.long()}, labels


def next_token_loss(outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    scores, after = outputs["logits"][:, :-1], labels[:, 1:]
    return F.cross_entropy(scores.flatten(0, 1), after.flatten()) + 0.1 * outputs["aux_loss"]
