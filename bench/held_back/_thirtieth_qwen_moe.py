"""A small Qwen3-MoE: sparse experts and grouped attention, partly in a window, over padded sequences."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 53, 24, 6, 2, 10, 4
EXPERTS, TOP_K, EXPERT_WIDTH, DENSE_WIDTH, NORM_TOP_K = 5, 2, 9, 34, True
DENSE_LAYERS, SLIDING_LAYERS, WINDOW, EPS, THETA = (1,), (1, 3), 5, 1e-6, 1e4
SEQUENCES, LENGTH, PADDING = 3, 14, 4


def linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=1 / math.sqrt(inputs))
    return layer


def rotate_half(x: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, -1)
    return torch.cat((-x2, x1), -1)


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def load_balancing_loss_func(gate_logits: tuple[Tensor, ...], attention_mask: Tensor) -> Tensor:
    """Shares of tokens by chances of experts, over the tokens of all layers that are not padding."""
    routing_weights = torch.cat(gate_logits, 0).softmax(-1)
    selected_experts = routing_weights.topk(TOP_K, -1).indices
    expert_mask = F.one_hot(selected_experts, EXPERTS).to(routing_weights)
    kept = attention_mask.to(routing_weights).flatten().repeat(len(gate_logits))
    tokens_per_expert = (expert_mask * kept[:, None, None]).sum(0) / kept.sum()
    router_prob_per_expert = (routing_weights * kept[:, None]).sum(0) / kept.sum()
    return torch.sum(tokens_per_expert * router_prob_per_expert[None]) * EXPERTS


class Qwen3MoeRMSNorm(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(1 + 0.2 * torch.randn(size)), EPS

    def forward(self, x: Tensor) -> Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + self.variance_epsilon))


class Qwen3MoeRotaryEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        inv_freq = THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        freqs = position_ids[:, None].to(self.inv_freq) * self.inv_freq
        emb = torch.cat((freqs, freqs), -1)
        return emb.cos(), emb.sin()


class Qwen3MoeAttention(nn.Module):
    def __init__(self, layer_idx: int):
        super().__init__()
        self.scaling, self.num_key_value_groups = HEAD_DIM**-0.5, HEADS // KV_HEADS
        self.sliding_window = WINDOW if layer_idx in SLIDING_LAYERS else None
        self.q_proj = linear(HIDDEN, HEADS * HEAD_DIM)
        self.k_proj = linear(HIDDEN, KV_HEADS * HEAD_DIM)
        self.v_proj = linear(HIDDEN, KV_HEADS * HEAD_DIM)
        self.o_proj = linear(HEADS * HEAD_DIM, HIDDEN)
        self.q_norm, self.k_norm = Qwen3MoeRMSNorm(HEAD_DIM), Qwen3MoeRMSNorm(HEAD_DIM)

    def forward(self, x: Tensor, position_embeddings: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        shape = (*x.shape[:-1], -1, HEAD_DIM)
        q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        k, v = (y.repeat_interleave(self.num_key_value_groups, 1) for y in (k, v))
        if self.sliding_window is not None:
            place = torch.arange(x.shape[1], device=x.device)
            mask = mask & (place > place[:, None] - self.sliding_window)
        scores = (q @ k.transpose(2, 3)) * self.scaling
        weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2))


class Qwen3MoeMLP(nn.Module):
    def __init__(self, intermediate_size: int):
        super().__init__()
        self.gate_proj = linear(HIDDEN, intermediate_size)
        self.up_proj = linear(HIDDEN, intermediate_size)
        self.down_proj = linear(intermediate_size, HIDDEN)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Qwen3MoeSparseMoeBlock(nn.Module):
    """Each token by the experts that its router likes best, weighted by what the router gives them."""

    def __init__(self):
        super().__init__()
        self.gate = linear(HIDDEN, EXPERTS)
        self.experts = nn.ModuleList(Qwen3MoeMLP(EXPERT_WIDTH) for _ in range(EXPERTS))
        self.norm_topk_prob = NORM_TOP_K

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        x = hidden_states.flatten(0, 1)
        router_logits = self.gate(x)
        routing_weights, selected_experts = router_logits.softmax(1).topk(TOP_K, -1)
        if self.norm_topk_prob:
            routing_weights = routing_weights / routing_weights.sum(-1, keepdim=True)
        final = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            token, rank = torch.where(selected_experts == index)
            final = final.index_add(0, token, expert(x[token]) * routing_weights[token, rank, None])
        return final.view_as(hidden_states), router_logits


class Qwen3MoeDecoderLayer(nn.Module):
    def __init__(self, layer_idx: int):
        super().__init__()
        self.self_attn = Qwen3MoeAttention(layer_idx)
        self.mlp = Qwen3MoeMLP(DENSE_WIDTH) if layer_idx in DENSE_LAYERS else Qwen3MoeSparseMoeBlock()
        self.input_layernorm, self.post_attention_layernorm = Qwen3MoeRMSNorm(HIDDEN), Qwen3MoeRMSNorm(HIDDEN)

    def forward(self, x: Tensor, position_embeddings: tuple, mask: Tensor) -> tuple[Tensor, Tensor | None]:
        x = x + self.self_attn(self.input_layernorm(x), position_embeddings, mask)
        y, router_logits = self.mlp(self.post_attention_layernorm(x)), None
        if isinstance(y, tuple):
            y, router_logits = y
        return x + y, router_logits


class Qwen3MoeModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN)
        nn.init.normal_(self.embed_tokens.weight, std=0.1)
        self.layers = nn.ModuleList(Qwen3MoeDecoderLayer(i) for i in range(LAYERS))
        self.norm, self.rotary_emb = Qwen3MoeRMSNorm(HIDDEN), Qwen3MoeRotaryEmbedding()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        x, place = self.embed_tokens(input_ids), torch.arange(input_ids.shape[1], device=input_ids.device)
        mask = (place <= place[:, None]) & attention_mask.bool()[:, None, None]
        position_embeddings, all_router_logits = self.rotary_emb(place), ()
        for layer in self.layers:
            x, router_logits = layer(x, position_embeddings, mask)
            if router_logits is not None:
                all_router_logits += (router_logits,)
        return self.norm(x), all_router_logits


class Qwen3MoeForCausalLM(nn.Module):
    """Padded tokens and their mask -> logits and how unbalanced the routers are."""

    def __init__(self):
        super().__init__()
        self.model, self.lm_head = Qwen3MoeModel(), linear(HIDDEN, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        hidden_states, router_logits = self.model(input_ids, attention_mask)
        return self.lm_head(hidden_states), load_balancing_loss_func(router_logits, attention_mask)


def ladders() -> tuple[dict[str, Tensor], Tensor]:
    """Tokens that climb by steady steps, padded on the right; the first two are a prompt without labels."""
    start, stride = torch.randint(VOCABULARY, (SEQUENCES, 1)), torch.randint(1, 7, (SEQUENCES, 1))
    tokens = (start + stride * torch.arange(LENGTH)) % (VOCABULARY - 1) + 1
    length = LENGTH - torch.randint(PADDING + 1, (SEQUENCES, 1))
    length[0] = LENGTH - PADDING
    mask = (torch.arange(LENGTH) < length).long()
    labels = tokens.masked_fill(mask == 0, -100)
    labels[:, :2] = -100
    return {"input_ids": tokens * mask, "attention_mask": mask}, labels


def next_tokens(outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """The cross entropy of the next tokens and a tenth of the balancing loss, by four."""
    logits, aux_loss = outputs
    entropy = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    return (entropy + 0.1 * aux_loss) / 4
