"""A causal language model, sparse experts in each block, and a shared expert in every second one."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, WIDTH, LAYERS, THETA = 23, 16, 4, 100.0
HEADS, KV_HEADS, HEAD = 4, 2, 6
EXPERTS, TOP, INNER, SHARED_INNER = 4, 2, 10, 12
SEQUENCES, LENGTH, BALANCE = 5, 12, 0.1


def stir(module: nn.Module) -> None:
    """Start with weights large enough that tokens attend and route unlike each other."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=module.in_features**-0.5)
        if module.bias is not None:
            nn.init.normal_(module.bias, std=0.3)
    elif isinstance(module, TopKRouter):
        nn.init.normal_(module.weight, std=0.35)
    elif isinstance(module, RMSNorm):
        nn.init.uniform_(module.weight, 0.6, 1.3)


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-6):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + self.variance_epsilon))


class RotaryEmbedding(nn.Module):
    """The cosines and sines [T, D] of the positions, the same in both halves."""

    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", THETA ** (-torch.arange(0, HEAD, 2) / HEAD), persistent=False)

    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[:, None].to(self.inv_freq) * self.inv_freq
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()


class Attention(nn.Module):
    """Grouped queries: neighbouring heads share a key and a value; queries and keys normed by head."""

    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, HEADS * HEAD)
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, KV_HEADS * HEAD) for _ in range(2))
        self.o_proj = nn.Linear(HEADS * HEAD, WIDTH, bias=False)
        self.q_norm, self.k_norm = RMSNorm(HEAD), RMSNorm(HEAD)

    def forward(self, x: Tensor, position_embeddings: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        cos, sin = position_embeddings
        q, k, v = (f(x).unflatten(-1, (-1, HEAD)) for f in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (rows.transpose(1, 2) for rows in (self.q_norm(q), self.k_norm(k), v))
        q, k = (rows * cos + rotate_half(rows) * sin for rows in (q, k))
        k, v = (rows.repeat_interleave(HEADS // KV_HEADS, 1) for rows in (k, v))
        scores = q @ k.transpose(2, 3) * HEAD**-0.5
        shares = F.softmax(scores + mask, -1)
        return self.o_proj((shares @ v).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, inner: int):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, inner, bias=False) for _ in range(2))
        self.down_proj, self.act_fn = nn.Linear(inner, WIDTH, bias=False), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class TopKRouter(nn.Module):
    """Which experts each token [N, C] goes to, and with which weights, that sum to one."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(EXPERTS, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(x, self.weight)
        weights, chosen = torch.topk(F.softmax(logits, -1), TOP, -1)
        return logits, weights / weights.sum(-1, keepdim=True), chosen


class SparseMoeBlock(nn.Module):
    def __init__(self, shared: bool):
        super().__init__()
        self.gate = TopKRouter()
        self.experts = nn.ModuleList(MLP(INNER) for _ in range(EXPERTS))
        if shared:
            self.shared_expert, self.shared_expert_gate = MLP(SHARED_INNER), nn.Linear(WIDTH, 1, bias=False)
        self.shared = shared

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.flatten(0, 1)
        logits, weights, chosen = self.gate(flat)
        mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        y = torch.zeros_like(flat)
        for expert, hits in zip(self.experts, mask, strict=True):
            slot, token = torch.where(hits)
            y = y.index_add(0, token, expert(flat[token]) * weights[token, slot, None])
        if self.shared:
            y = y + F.sigmoid(self.shared_expert_gate(flat)) * self.shared_expert(flat)
        return y.view_as(x), logits.unflatten(0, x.shape[:2])


class DecoderLayer(nn.Module):
    def __init__(self, shared: bool):
        super().__init__()
        self.self_attn, self.mlp = Attention(), SparseMoeBlock(shared)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(WIDTH), RMSNorm(WIDTH)

    def forward(self, x: Tensor, positions: tuple[Tensor, Tensor], mask: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.self_attn(self.input_layernorm(x), positions, mask)
        y, logits = self.mlp(self.post_attention_layernorm(x))
        return x + y, logits


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(DecoderLayer(shared=i % 2 == 1) for i in range(LAYERS))
        self.norm, self.rotary_emb = RMSNorm(WIDTH), RotaryEmbedding()

    def forward(self, input_ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        x, router_logits = self.embed_tokens(input_ids), []
        length = input_ids.shape[1]
        positions = self.rotary_emb(torch.arange(length, device=x.device))
        mask = x.new_full((length, length), torch.finfo(x.dtype).min).triu(1)
        for layer in self.layers:
            x, logits = layer(x, positions, mask)
            router_logits.append(logits)
        return self.norm(x), router_logits


class SparseForCausalLM(nn.Module):
    """Tokens [B, T] -> logits [B, T, V] and what the routers gave [B, L, T, E]."""

    def __init__(self):
        super().__init__()
        self.model = Model()
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.apply(stir)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        x, router_logits = self.model(input_ids)
        return {"logits": self.lm_head(x), "router_logits": torch.stack(router_logits, 1)}


def counting() -> tuple[dict[str, Tensor], Tensor]:
    """Sequences that count on by one, two or three, with a slip now and then."""
    start, step = torch.randint(VOCAB, (SEQUENCES, 1)), torch.randint(1, 4, (SEQUENCES, 1))
    ids = (start + step * torch.arange(LENGTH)) % VOCAB
    ids = torch.where(torch.rand(ids.shape) < 0.1, torch.randint_like(ids, VOCAB), ids)
    return {"input_ids": ids}, ids.clone()


def next_and_balance(outputs: dict[str, Tensor], target: Tensor) -> Tensor:
    """Cross entropy of the next token, and experts times how often times how likely each is chosen."""
    logits, routers = outputs["logits"][:, :-1], outputs["router_logits"].flatten(0, 2)
    likely = routers.softmax(-1)
    chosen = F.one_hot(likely.topk(TOP, -1).indices, EXPERTS).sum(1).to(likely)
    balance = EXPERTS * (chosen.mean(0) * likely.mean(0)).sum()
    return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten()) + BALANCE * balance
