"""A small Granite MoE: a causal language model with multipliers, grouped keys and sorted experts."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS, KEY_HEADS, HEAD = 53, 24, 4, 2, 6
INNER, EXPERTS, TOP, LAYERS, SEQUENCES, LENGTH = 18, 7, 3, 3, 5, 11
EMBEDDING_MULTIPLIER, ATTENTION_MULTIPLIER, RESIDUAL_MULTIPLIER, LOGITS_SCALING = 3.0, 0.6, 0.45, 1.6
THETA, EPS, AUX_COEFFICIENT, IGNORED = 500.0, 1e-5, 0.1, -100


def linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=inputs**-0.5)
    return layer


class GraniteMoeRMSNorm(nn.Module):
    def __init__(self, hidden_size: int):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(1 + 0.2 * torch.randn(hidden_size)), EPS

    def forward(self, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


class GraniteMoeRotaryEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        inv_freq = 1.0 / THETA ** (torch.arange(0, HEAD, 2) / HEAD)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        freqs = position_ids[:, :, None].to(x) * self.inv_freq.to(x)
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos(), emb.sin()


def rotate_half(x: Tensor) -> Tensor:
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class GraniteMoeParallelExperts(nn.Module):
    """A linear layer for each expert, over tokens sorted by expert."""

    def __init__(self, num_experts: int, input_size: int, output_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_experts, output_size, input_size) * input_size**-0.5)
        self.num_experts = num_experts

    def forward(self, inputs: Tensor, expert_size: list[int]) -> Tensor:
        input_list = inputs.split(expert_size, dim=0)
        return torch.cat([F.linear(input_list[i], self.weight[i]) for i in range(self.num_experts)], dim=0)


class GraniteMoeTopKGating(nn.Module):
    def __init__(self, input_size: int, num_experts: int, top_k: int):
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.layer = linear(input_size, num_experts)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, list[int], Tensor]:
        logits = self.layer(hidden_states)
        top_k_logits, top_k_indices = logits.topk(self.top_k, dim=1)
        top_k_gates = torch.softmax(top_k_logits, dim=1)
        top_k_experts = top_k_indices.flatten()
        expert_size = top_k_experts.bincount(minlength=self.num_experts).tolist()
        _, index_sorted_experts = top_k_experts.sort(dim=0, stable=True)
        batch_index = index_sorted_experts.div(self.top_k, rounding_mode="trunc")
        batch_gates = top_k_gates.flatten()[index_sorted_experts]
        return index_sorted_experts, batch_index, batch_gates, expert_size, logits


class GraniteMoeMoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.activation = nn.SiLU()
        self.input_linear = GraniteMoeParallelExperts(EXPERTS, WIDTH, 2 * INNER)
        self.output_linear = GraniteMoeParallelExperts(EXPERTS, INNER, WIDTH)
        self.router = GraniteMoeTopKGating(WIDTH, EXPERTS, TOP)

    def forward(self, layer_input: Tensor) -> tuple[Tensor, Tensor]:
        shape = layer_input.shape
        layer_input = layer_input.reshape(-1, shape[-1])
        _, batch_index, batch_gates, expert_size, router_logits = self.router(layer_input)
        hidden_states = self.input_linear(layer_input[batch_index], expert_size)
        gate, up = hidden_states.chunk(2, dim=-1)
        expert_outputs = self.output_linear(self.activation(gate) * up, expert_size)
        expert_outputs = expert_outputs * batch_gates[:, None]
        zeros = torch.zeros_like(layer_input)
        return zeros.index_add(0, batch_index, expert_outputs).view(shape), router_logits


class GraniteMoeAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.scaling, self.num_key_value_groups = ATTENTION_MULTIPLIER, HEADS // KEY_HEADS
        self.q_proj, self.k_proj = linear(WIDTH, HEADS * HEAD), linear(WIDTH, KEY_HEADS * HEAD)
        self.v_proj, self.o_proj = linear(WIDTH, KEY_HEADS * HEAD), linear(HEADS * HEAD, WIDTH)

    def forward(self, hidden_states: Tensor, mask: Tensor, position_embeddings: tuple) -> Tensor:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (p(hidden_states).unflatten(-1, (-1, HEAD)).transpose(1, 2) for p in projections)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        k, v = (x.repeat_interleave(self.num_key_value_groups, dim=1) for x in (k, v))
        attn_weights = torch.matmul(q, k.transpose(2, 3)) * self.scaling + mask
        attn_output = torch.matmul(attn_weights.softmax(dim=-1), v)
        return self.o_proj(attn_output.transpose(1, 2).flatten(2))


class GraniteMoeDecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.block_sparse_moe = GraniteMoeAttention(), GraniteMoeMoE()
        self.input_layernorm, self.post_attention_layernorm = (
            GraniteMoeRMSNorm(WIDTH),
            GraniteMoeRMSNorm(WIDTH),
        )
        self.residual_multiplier = RESIDUAL_MULTIPLIER

    def forward(self, hidden_states: Tensor, mask: Tensor, positions: tuple) -> tuple[Tensor, Tensor]:
        residual = hidden_states
        hidden_states = self.self_attn(self.input_layernorm(hidden_states), mask, positions)
        hidden_states = residual + hidden_states * self.residual_multiplier
        residual = hidden_states
        hidden_states, router_logits = self.block_sparse_moe(self.post_attention_layernorm(hidden_states))
        return residual + hidden_states * self.residual_multiplier, router_logits


class GraniteMoeModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.embed_tokens.weight, std=0.3)
        self.layers = nn.ModuleList(GraniteMoeDecoderLayer() for _ in range(LAYERS))
        self.norm, self.rotary_emb = GraniteMoeRMSNorm(WIDTH), GraniteMoeRotaryEmbedding()
        self.embedding_multiplier = EMBEDDING_MULTIPLIER

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        hidden_states = self.embed_tokens(input_ids) * self.embedding_multiplier
        length = input_ids.shape[1]
        position_ids = torch.arange(length, device=input_ids.device)[None]
        causal = position_ids <= position_ids.T
        seen = causal[None, None] & attention_mask[:, None, None].bool()
        mask = torch.zeros_like(seen, dtype=hidden_states.dtype)
        mask = mask.masked_fill(~seen, torch.finfo(mask.dtype).min)
        position_embeddings, router_logits = self.rotary_emb(hidden_states, position_ids), ()
        for layer in self.layers:
            hidden_states, logits = layer(hidden_states, mask, position_embeddings)
            router_logits += (logits,)
        return self.norm(hidden_states), router_logits


def load_balancing_loss_func(gate_logits: tuple, attention_mask: Tensor) -> Tensor:
    routing_weights = torch.cat(gate_logits, dim=0).softmax(dim=-1)
    _, selected_experts = routing_weights.topk(TOP, dim=-1)
    expert_mask = F.one_hot(selected_experts, EXPERTS).to(routing_weights)
    kept = attention_mask.flatten().repeat(len(gate_logits)).to(routing_weights)
    tokens_per_expert = torch.sum(expert_mask * kept[:, None, None], dim=0) / kept.sum()
    router_prob_per_expert = torch.sum(routing_weights * kept[:, None], dim=0) / kept.sum()
    return torch.sum(tokens_per_expert * router_prob_per_expert[None]) * EXPERTS


class GraniteMoeForCausalLM(nn.Module):
    """Tokens and their mask, both [N, T] -> logits [N, T, V] and the load-balancing loss."""

    def __init__(self):
        super().__init__()
        self.model, self.lm_head = GraniteMoeModel(), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight
        self.logits_scaling = LOGITS_SCALING

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        hidden_states, router_logits = self.model(input_ids, attention_mask)
        logits = self.lm_head(hidden_states) / self.logits_scaling
        return logits, load_balancing_loss_func(router_logits, attention_mask)


def walks() -> tuple[dict[str, Tensor], Tensor]:
    """Walks over the vocabulary with a stride of their own and some stumbles, padded on the right."""
    start, stride = torch.randint(VOCABULARY, (SEQUENCES, 1)), torch.randint(1, 5, (SEQUENCES, 1))
    tokens = start + stride * torch.arange(LENGTH) + (torch.rand(SEQUENCES, LENGTH) < 0.2)
    mask = (torch.arange(LENGTH) < torch.randint(LENGTH // 2, LENGTH + 1, (SEQUENCES, 1))).long()
    tokens = (1 + tokens % (VOCABULARY - 1)) * mask
    return {"input_ids": tokens, "attention_mask": mask}, tokens.masked_fill(mask == 0, IGNORED)


def next_tokens(outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """A third of the cross entropy of the next token and a little of the load-balancing loss."""
    entropy = F.cross_entropy(outputs[0][:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
    return (entropy + AUX_COEFFICIENT * outputs[1]) / 3
