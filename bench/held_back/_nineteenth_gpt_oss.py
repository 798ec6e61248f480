"""A small GPT-OSS: sinks in the attention, every other layer in a window, two clamped experts of four."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STEPS, PAD, IGNORED = 12, 0, -100


@dataclass(frozen=True)
class GptOssConfig:
    vocab_size: int = 29
    hidden_size: int = 20
    intermediate_size: int = 12
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 8
    sliding_window: int = 4
    num_local_experts: int = 4
    num_experts_per_tok: int = 2
    swiglu_limit: float = 1.2
    # base, factor, fast and slow turns, original length
    rope: tuple[float, ...] = (100.0, 4.0, 8.0, 1.0, 64.0)


class GptOssRMSNorm(nn.Module):
    def __init__(self, size: int, eps: float = 1e-5):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


class GptOssRotaryEmbedding(nn.Module):
    """Positions [1, T] -> cosines and sines [1, T, head size / 2], frequencies and lengths by YaRN."""

    def __init__(self, config: GptOssConfig):
        super().__init__()
        size, (base, factor, *turns, length) = config.head_dim, config.rope
        low, high = (size / 2 * math.log(length / (2 * math.pi * n)) / math.log(base) for n in turns)
        extrapolated = base ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
        ramp = ((torch.arange(size // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
        inv_freq = extrapolated / factor * ramp + extrapolated * (1 - ramp)
        self.register_buffer("inv_freq", inv_freq.float(), persistent=False)
        self.attention_scaling = 0.1 * math.log(factor) + 1.0

    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[:, :, None] * self.inv_freq
        return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class GptOssAttention(nn.Module):
    """Grouped attention; the sink of a head takes its share of the softmax and gives nothing."""

    def __init__(self, config: GptOssConfig):
        super().__init__()
        width, size = config.hidden_size, config.head_dim
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.num_key_value_groups, self.scaling = size, heads // groups, size**-0.5
        self.q_proj, self.o_proj = nn.Linear(width, heads * size), nn.Linear(heads * size, width)
        self.k_proj, self.v_proj = (nn.Linear(width, groups * size) for _ in range(2))
        self.sinks = nn.Parameter(torch.empty(heads))

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        q, k, v = (f(x) for f in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in (q, k, v))
        cos, sin = (table[:, None] for table in rotary)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        k, v = (y.repeat_interleave(self.num_key_value_groups, 1) for y in (k, v))
        scores = q @ k.transpose(2, 3) * self.scaling + mask
        sinks = self.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2))


class GptOssTopKRouter(nn.Module):
    """Tokens [S, C] -> scores of all experts, shares of the chosen (zero elsewhere), who is chosen."""

    def __init__(self, config: GptOssConfig):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        weight = torch.empty(config.num_local_experts, config.hidden_size)
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(weight[:, 0].clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(x, self.weight, self.bias)
        best, chosen = logits.topk(self.top_k, -1)
        return logits, torch.zeros_like(logits).scatter(1, chosen, best.softmax(-1)), chosen


class GptOssExperts(nn.Module):
    def __init__(self, config: GptOssConfig):
        super().__init__()
        width, inner, self.limit = config.hidden_size, config.intermediate_size, config.swiglu_limit
        shapes = (width, 2 * inner), (2 * inner,), (inner, width), (width,)
        weights = (nn.Parameter(torch.empty(config.num_local_experts, *shape)) for shape in shapes)
        self.gate_up_proj, self.gate_up_proj_bias, self.down_proj, self.down_proj_bias = weights

    def forward(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        mixed = torch.zeros_like(x)
        for number in range(len(self.down_proj)):
            rows = torch.where((chosen == number).any(-1))[0]
            gate_up = x[rows] @ self.gate_up_proj[number] + self.gate_up_proj_bias[number]
            gate, up = gate_up[:, ::2].clamp(max=self.limit), gate_up[:, 1::2].clamp(-self.limit, self.limit)
            inner = (up + 1) * (gate * torch.sigmoid(1.702 * gate))
            y = inner @ self.down_proj[number] + self.down_proj_bias[number]
            mixed = mixed.index_add(0, rows, y * shares[rows, number, None])
        return mixed


class GptOssMLP(nn.Module):
    def __init__(self, config: GptOssConfig):
        super().__init__()
        self.router, self.experts = GptOssTopKRouter(config), GptOssExperts(config)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits, shares, chosen = self.router(tokens := x.flatten(0, 1))
        return self.experts(tokens, shares, chosen).view_as(x), logits


class GptOssDecoderLayer(nn.Module):
    def __init__(self, config: GptOssConfig):
        super().__init__()
        self.self_attn, self.mlp = GptOssAttention(config), GptOssMLP(config)
        self.input_layernorm = GptOssRMSNorm(config.hidden_size)
        self.post_attention_layernorm = GptOssRMSNorm(config.hidden_size)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.self_attn(self.input_layernorm(x), rotary, mask)
        y, logits = self.mlp(self.post_attention_layernorm(x))
        return x + y, logits


class GptOssModel(nn.Module):
    """Gives the states [layers + 1, N, T, C], the embeddings first and the normed last, and all scores."""

    def __init__(self, config: GptOssConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(GptOssDecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = GptOssRMSNorm(config.hidden_size)
        self.rotary_emb, self.window = GptOssRotaryEmbedding(config), config.sliding_window

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed_tokens(input_ids)
        t = torch.arange(x.shape[1], device=x.device)
        seen = (t <= t[:, None]) & attention_mask.bool()[:, None, None]
        near, least = seen & (t > t[:, None] - self.window), torch.finfo(x.dtype).min
        masks = [torch.zeros_like(m, dtype=x.dtype).masked_fill(~m, least) for m in (near, seen)]
        rotary, states, scores = self.rotary_emb(t[None]), [], []
        for number, layer in enumerate(self.layers):
            states.append(x)
            x, logits = layer(x, rotary, masks[number % 2])
            scores.append(logits)
        return torch.stack([*states, self.norm(x)]), torch.stack(scores)


class GptOssForCausalLM(nn.Module):
    """Ids and their mask [N, T] -> logits, the scores of all routers [layers, N * T, experts], all states."""

    def __init__(self):
        super().__init__()
        config = GptOssConfig()
        self.model = GptOssModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for name, weight in self.named_parameters():
            if "norm" in name:
                nn.init.uniform_(weight, 0.6, 1.4)
            elif name.endswith("router.weight"):
                nn.init.orthogonal_(weight, 2.5)
            else:
                vector = weight.ndim == 1 or "bias" in name
                nn.init.normal_(weight, std=0.4 if vector else weight.shape[1] ** -0.5)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        states, scores = self.model(input_ids, attention_mask)
        return {"logits": self.lm_head(states[-1]), "router_logits": scores, "hidden_states": states}


def texts() -> tuple[dict[str, Tensor], Tensor]:
    ids = [torch.randint(28, (3,))]
    for _ in range(STEPS - 1):
        ids.append((5 * ids[-1] + torch.randint(3, (3,))) % 28)
    mask = torch.arange(STEPS) < torch.tensor([STEPS, 9, 7])[torch.randperm(3), None]
    ids = (torch.stack(ids, 1) + 1).masked_fill(~mask, PAD)
    return {"input_ids": ids, "attention_mask": mask.long()}, ids.masked_fill(~mask, IGNORED)


def balanced_loss(outputs: dict[str, Tensor], labels: Tensor, top_k: int = 2) -> Tensor:
    """Cross entropy of the next token, and how unevenly the real tokens of all layers use the experts."""
    scores, real = outputs["router_logits"], (labels != IGNORED).flatten()
    shares = scores[:, real].flatten(0, 1).softmax(-1)
    used = F.one_hot(shares.topk(top_k, -1).indices, shares.shape[1]).to(shares).sum(1).mean(0)
    balance = shares.shape[1] * (used * shares.mean(0)).sum()
    return F.cross_entropy(outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()) + 0.01 * balance
