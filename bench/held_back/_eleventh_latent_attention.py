"""A causal language model with multi-head latent attention and mixtures of experts chosen within groups."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DeepseekConfig:
    vocab_size, hidden_size, intermediate_size, moe_intermediate_size = 20, 16, 24, 4
    num_hidden_layers, first_k_dense_replace, num_attention_heads = 4, 1, 2
    q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim = 8, 6, 4, 4, 6
    n_routed_experts, n_shared_experts, num_experts_per_tok, n_group, topk_group = 12, 2, 3, 3, 2
    routed_scaling_factor, bias_update_speed, rms_norm_eps, rope_theta = 1.5, 0.01, 1e-6, 100.0


class DeepseekRMSNorm(nn.Module):
    def __init__(self, hidden_size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


class DeepseekRotaryEmbedding(nn.Module):
    """Cosines and sines [T, R], each frequency twice, for vectors whose halves turn together."""

    def __init__(self, config: DeepseekConfig):
        super().__init__()
        self.dim, self.base = config.qk_rope_head_dim, config.rope_theta

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        even = torch.arange(0, self.dim, 2, dtype=x.dtype, device=x.device)
        positions = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)
        angles = torch.outer(positions, self.base ** (-even / self.dim)).repeat(1, 2)
        return angles.cos(), angles.sin()


def apply_rotary_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs of neighbours in the last axis of [N, H, T, R], brought apart into halves first."""
    x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class DeepseekAttention(nn.Module):
    """Queries, keys and values out of narrow bottlenecks; one rotary key for all heads."""

    def __init__(self, config: DeepseekConfig):
        super().__init__()
        width, heads, eps = config.hidden_size, config.num_attention_heads, config.rms_norm_eps
        self.num_heads, self.kv_lora_rank, self.v_head_dim = heads, config.kv_lora_rank, config.v_head_dim
        self.qk_nope_head_dim, self.qk_rope_head_dim = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.qk_head_dim = self.qk_nope_head_dim + self.qk_rope_head_dim
        self.scaling = self.qk_head_dim**-0.5
        self.q_a_proj = nn.Linear(width, config.q_lora_rank)
        self.q_a_layernorm = DeepseekRMSNorm(config.q_lora_rank, eps)
        self.q_b_proj = nn.Linear(config.q_lora_rank, heads * self.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, self.kv_lora_rank + self.qk_rope_head_dim)
        self.kv_a_layernorm = DeepseekRMSNorm(self.kv_lora_rank, eps)
        expanded = heads * (self.qk_nope_head_dim + self.v_head_dim)
        self.kv_b_proj = nn.Linear(self.kv_lora_rank, expanded, bias=False)
        self.o_proj = nn.Linear(heads * self.v_head_dim, width)

    def forward(self, hidden_states: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        query = query.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        q_pass, q_rot = query.tensor_split([self.qk_nope_head_dim], -1)
        latent, k_rot = self.kv_a_proj_with_mqa(hidden_states).tensor_split([self.kv_lora_rank], -1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.num_heads, -1))
        k_pass, value = expanded.transpose(1, 2).tensor_split([self.qk_nope_head_dim], -1)
        q_rot, k_rot = (apply_rotary_interleaved(x, *rotary) for x in (q_rot, k_rot[:, None]))
        query = torch.cat([q_pass, q_rot], -1)
        key = torch.cat([k_pass, k_rot.expand(-1, self.num_heads, -1, -1)], -1)
        weights = (query @ key.transpose(2, 3) * self.scaling + mask).softmax(-1)
        return self.o_proj((weights @ value).transpose(1, 2).flatten(2))


class DeepseekMLP(nn.Module):
    def __init__(self, hidden_size: int, inner_size: int):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden_size, inner_size, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner_size, hidden_size, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class DeepseekTopkRouter(nn.Module):
    """The experts of each row and their weights; a bias, moved against the load, takes part in the choice."""

    def __init__(self, config: DeepseekConfig):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        c = self.config
        scores = F.linear(hidden_states, self.weight).sigmoid()
        groups = (scores + self.e_score_correction_bias).unflatten(-1, (c.n_group, -1))
        group_indices = groups.topk(2, -1).values.sum(-1).topk(c.topk_group, -1).indices
        group_mask = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(-1, group_indices, True)
        allowed = groups.masked_fill(~group_mask[..., None], -torch.inf).flatten(-2)
        indices = allowed.topk(c.num_experts_per_tok, -1).indices
        weights = scores.gather(-1, indices)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling_factor
        if self.training:
            load = torch.bincount(indices.flatten(), minlength=c.n_routed_experts).to(scores.dtype)
            self.e_score_correction_bias += c.bias_update_speed * (load.mean() - load).sign()
        return indices, weights


class DeepseekMoE(nn.Module):
    def __init__(self, config: DeepseekConfig):
        super().__init__()
        width, each = config.hidden_size, config.moe_intermediate_size
        self.gate = DeepseekTopkRouter(config)
        self.experts = nn.ModuleList(DeepseekMLP(width, each) for _ in range(config.n_routed_experts))
        self.shared_experts = DeepseekMLP(width, each * config.n_shared_experts)

    def forward(self, hidden_states: Tensor) -> Tensor:
        tokens = hidden_states.flatten(0, -2)
        indices, weights = self.gate(tokens)
        routed = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            rows, slots = torch.where(indices == i)
            routed = routed.index_add(0, rows, expert(tokens[rows]) * weights[rows, slots, None])
        return routed.view_as(hidden_states) + self.shared_experts(hidden_states)


class DeepseekDecoderLayer(nn.Module):
    def __init__(self, config: DeepseekConfig, index: int):
        super().__init__()
        width, eps, dense = config.hidden_size, config.rms_norm_eps, index < config.first_k_dense_replace
        self.self_attn = DeepseekAttention(config)
        self.mlp = DeepseekMLP(width, config.intermediate_size) if dense else DeepseekMoE(config)
        self.input_layernorm, self.post_attention_layernorm = (DeepseekRMSNorm(width, eps) for _ in range(2))

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class DeepseekModel(nn.Module):
    def __init__(self, config: DeepseekConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DeepseekDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = DeepseekRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = DeepseekRotaryEmbedding(config)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        rotary = self.rotary_emb(x)
        mask = x.new_full((x.shape[1], x.shape[1]), torch.finfo(x.dtype).min).triu(1)
        for layer in self.layers:
            x = layer(x, rotary, mask)
        return self.norm(x)


class DeepseekForCausalLM(nn.Module):
    """Token numbers [N, T] -> scores of the next token [N, T, vocabulary]."""

    def __init__(self):
        super().__init__()
        self.config = config = DeepseekConfig()
        self.model = DeepseekModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.apply(start)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.lm_head(self.model(input_ids))


def start(module: nn.Module) -> None:
    """Weights large enough for uneven attention; norms and biases as after some training."""
    if isinstance(module, nn.Linear | DeepseekTopkRouter):
        nn.init.normal_(module.weight, std=1.2 * module.weight.shape[1] ** -0.5)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.normal_(module.bias, std=0.2)
    if isinstance(module, DeepseekRMSNorm):
        nn.init.uniform_(module.weight, 0.6, 1.4)
    if isinstance(module, DeepseekTopkRouter):
        nn.init.normal_(module.e_score_correction_bias, std=0.1)


def counting() -> tuple[dict[str, Tensor], Tensor]:
    """Six rows that count round in steps of one to three, with a few slips."""
    ids = (torch.randint(20, (6, 1)) + torch.randint(1, 4, (6, 1)) * torch.arange(13)) % 20
    ids = torch.where(torch.rand(ids.shape) < 0.1, torch.randint(20, ids.shape), ids)
    return {"input_ids": ids[:, :-1].contiguous()}, ids[:, 1:].contiguous()


def next_token(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())
