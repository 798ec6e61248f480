"""A small decoder of sparse experts, after OLMoE, with the gated shared expert of Qwen's."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS, GROUPS, HEAD, LAYERS = 41, 32, 4, 2, 8, 3
EXPERTS, TOP, INNER, SHARED, EPS, THETA = 6, 3, 18, 22, 1e-5, 10000.0
BALANCE, CALM, SENTENCES, LENGTH, PAD = 0.05, 0.01, 5, 13, 1


def linear(wide: int, out: int) -> nn.Linear:
    layer = nn.Linear(wide, out, bias=False)
    nn.init.normal_(layer.weight, std=0.9 / math.sqrt(wide))
    return layer


class OlmoeRMSNorm(nn.Module):
    def __init__(self, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.2 * torch.randn(hidden_size))
        self.variance_epsilon = EPS

    def forward(self, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


class OlmoeRotaryEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        inv_freq = 1.0 / (THETA ** (torch.arange(0, HEAD, 2) / HEAD))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        freqs = position_ids[:, :, None].to(x) * self.inv_freq
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos(), emb.sin()


def rotate_half(x: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, -1)
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos[:, None], sin[:, None]
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class OlmoeAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = linear(WIDTH, HEADS * HEAD), linear(WIDTH, GROUPS * HEAD)
        self.v_proj, self.o_proj = linear(WIDTH, GROUPS * HEAD), linear(HEADS * HEAD, WIDTH)
        self.q_norm, self.k_norm = OlmoeRMSNorm(HEADS * HEAD), OlmoeRMSNorm(GROUPS * HEAD)

    def forward(self, hidden_states: Tensor, position_embeddings: tuple, attention_mask: Tensor) -> Tensor:
        q, k = self.q_norm(self.q_proj(hidden_states)), self.k_norm(self.k_proj(hidden_states))
        q, k, v = (x.unflatten(2, (-1, HEAD)).transpose(1, 2) for x in (q, k, self.v_proj(hidden_states)))
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        k, v = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (k, v))
        scores = q @ k.transpose(2, 3) * HEAD**-0.5 + attention_mask
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class OlmoeMLP(nn.Module):
    def __init__(self, intermediate_size: int):
        super().__init__()
        self.gate_proj, self.up_proj = linear(WIDTH, intermediate_size), linear(WIDTH, intermediate_size)
        self.down_proj, self.act_fn = linear(intermediate_size, WIDTH), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class OlmoeSparseMoeBlock(nn.Module):
    """The best experts of each token by its router, not renormalised, and a shared one with a gate."""

    def __init__(self):
        super().__init__()
        self.norm_topk_prob = False
        self.gate = linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(OlmoeMLP(INNER) for _ in range(EXPERTS))
        self.shared_expert, self.shared_expert_gate = OlmoeMLP(SHARED), linear(WIDTH, 1)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        tokens = hidden_states.flatten(0, 1)
        router_logits = self.gate(tokens)
        routing_weights, selected = router_logits.softmax(-1).topk(TOP, dim=-1)
        if self.norm_topk_prob:
            routing_weights = routing_weights / routing_weights.sum(-1, keepdim=True)
        final = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            row, rank = torch.where(selected == index)
            final = final.index_add(0, row, expert(tokens[row]) * routing_weights[row, rank, None])
        final = final + torch.sigmoid(self.shared_expert_gate(tokens)) * self.shared_expert(tokens)
        return final.view_as(hidden_states), router_logits


class OlmoeDecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.mlp = OlmoeAttention(), OlmoeSparseMoeBlock()
        self.input_layernorm, self.post_attention_layernorm = OlmoeRMSNorm(WIDTH), OlmoeRMSNorm(WIDTH)

    def forward(self, x: Tensor, position_embeddings: tuple, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.self_attn(self.input_layernorm(x), position_embeddings, attention_mask)
        y, router_logits = self.mlp(self.post_attention_layernorm(x))
        return x + y, router_logits


class OlmoeModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(OlmoeDecoderLayer() for _ in range(LAYERS))
        self.norm, self.rotary_emb = OlmoeRMSNorm(WIDTH), OlmoeRotaryEmbedding()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, list[Tensor]]:
        x, length, found = self.embed_tokens(input_ids), input_ids.shape[1], []
        own = torch.eye(length, dtype=torch.bool, device=x.device)
        seen = torch.ones_like(own).tril() & (attention_mask[:, None, None].bool() | own)
        mask = torch.zeros_like(seen, dtype=x.dtype).masked_fill(~seen, torch.finfo(x.dtype).min)
        position_embeddings = self.rotary_emb(x, torch.arange(length, device=x.device)[None])
        for layer in self.layers:
            x, router_logits = layer(x, position_embeddings, mask)
            found.append(router_logits)
        return self.norm(x), found


def load_balancing_loss_func(gate_logits: Tensor, attention_mask: Tensor) -> Tensor:
    """Of the logits of all layers, by the tokens that are no padding."""
    routing_weights = gate_logits.softmax(-1)
    expert_mask = F.one_hot(routing_weights.topk(TOP, dim=-1).indices, EXPERTS).to(gate_logits)
    real = attention_mask.flatten().repeat(LAYERS).to(gate_logits)
    tokens_per_expert = (expert_mask * real[:, None, None]).sum(0) / real.sum()
    router_prob_per_expert = (routing_weights * real[:, None]).sum(0) / real.sum()
    return EXPERTS * (tokens_per_expert * router_prob_per_expert).sum()


def router_z_loss_func(gate_logits: Tensor, attention_mask: Tensor) -> Tensor:
    real = attention_mask.flatten().repeat(LAYERS).to(gate_logits)
    return (gate_logits.logsumexp(-1).square() * real).sum() / real.sum()


class OlmoeForCausalLM(nn.Module):
    """Tokens, their mask and labels -> the loss with its router's parts, logits and these parts."""

    def __init__(self):
        super().__init__()
        self.model, self.lm_head = OlmoeModel(), linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        hidden_states, gate_logits = self.model(input_ids, attention_mask)
        logits, gate_logits = self.lm_head(hidden_states), torch.cat(gate_logits)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        aux = load_balancing_loss_func(gate_logits, attention_mask)
        calm = router_z_loss_func(gate_logits, attention_mask)
        return loss + BALANCE * aux + CALM * calm, logits, aux, calm


def counting() -> tuple[dict[str, Tensor], Tensor]:
    """Counts in steps, padded on the left or the right; labels leave out padding and a prompt."""
    start, step = torch.randint(VOCABULARY, (SENTENCES, 1)), torch.randint(1, 5, (SENTENCES, 1))
    place, short = torch.arange(LENGTH), torch.randint(1, 5, (SENTENCES, 1))
    left = torch.arange(SENTENCES)[:, None] % 2 == 0
    mask = torch.where(left, place >= short, place < LENGTH - short)
    tokens = (2 + (start + step * place) % (VOCABULARY - 2)).where(mask, PAD)
    prompt = torch.where(left, place < short + 2, place < 2)
    labels = tokens.masked_fill(prompt | ~mask, -100)
    return {"input_ids": tokens, "attention_mask": mask.long(), "labels": labels}, labels


def quarter(outputs: tuple[Tensor, ...], _: Tensor) -> Tensor:
    """The network's own loss, by four."""
    return outputs[0] / 4
