"""A small Zamba2: Mamba-2 layers, two of which are joined by one attention block with adapters by use."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, LAYERS, HYBRID = 31, 24, 5, (1, 3)
INNER, HEADS, GROUPS, STATE, KERNEL, LIMITS = 48, 6, 2, 5, 4, (0.1, 0.8)
QUERIES, KEYS, HEAD, HIDDEN, RANK, EPS = 4, 2, 12, 40, 3, 1e-5
SENTENCES, LENGTH = 3, 14


def linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=1 / math.sqrt(inputs))
    return layer


class Zamba2RMSNorm(nn.Module):
    def __init__(self, hidden_size: int):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(1 + 0.2 * torch.randn(hidden_size)), EPS

    def forward(self, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * hidden_states * torch.rsqrt(variance + self.variance_epsilon)


class Zamba2RMSNormGated(nn.Module):
    def __init__(self, hidden_size: int, group_size: int):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(1 + 0.2 * torch.randn(hidden_size)), EPS
        self.group_size = group_size

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        hidden_states = (hidden_states * F.silu(gate)).unflatten(-1, (-1, self.group_size))
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.flatten(-2)


class Zamba2Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.scaling = (HEAD / 2) ** -0.5
        self.q_proj, self.k_proj = linear(2 * WIDTH, QUERIES * HEAD), linear(2 * WIDTH, KEYS * HEAD)
        self.v_proj, self.o_proj = linear(2 * WIDTH, KEYS * HEAD), linear(QUERIES * HEAD, WIDTH)

    def forward(self, hidden_states: Tensor, causal_mask: Tensor) -> Tensor:
        projections = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (f(hidden_states).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in projections)
        k, v = (x.repeat_interleave(QUERIES // KEYS, 1) for x in (k, v))
        scores = (q @ k.transpose(2, 3) * self.scaling).masked_fill(~causal_mask, -torch.inf)
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Zamba2MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj, self.down_proj = linear(WIDTH, 2 * HIDDEN), linear(HIDDEN, WIDTH)
        self.act_fn = nn.GELU()
        adapters = (nn.Sequential(linear(WIDTH, RANK), linear(RANK, 2 * HIDDEN)) for _ in HYBRID)
        self.gate_up_proj_adapter_list = nn.ModuleList(adapters)
        self.layer_map = {layer: i for i, layer in enumerate(HYBRID)}

    def forward(self, hidden_state: Tensor, layer_idx: int) -> Tensor:
        gate_up_state = self.gate_up_proj(hidden_state)
        adapter = self.gate_up_proj_adapter_list[self.layer_map[layer_idx]]
        gate, up = torch.chunk(gate_up_state + adapter(hidden_state), 2, -1)
        return self.down_proj(self.act_fn(gate) * up)


class Zamba2MambaMixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_dim = INNER + 2 * GROUPS * STATE
        self.conv1d = nn.Conv1d(
            self.conv_dim, self.conv_dim, KERNEL, groups=self.conv_dim, padding=KERNEL - 1
        )
        nn.init.normal_(self.conv1d.weight, std=0.5), nn.init.normal_(self.conv1d.bias, std=0.2)
        self.act, self.in_proj = nn.SiLU(), linear(WIDTH, INNER + self.conv_dim + HEADS)
        self.dt_bias = nn.Parameter(0.5 * torch.randn(HEADS) - 0.5)
        self.A_log = nn.Parameter(torch.log(0.3 + 2 * torch.rand(HEADS)))
        self.norm = Zamba2RMSNormGated(INNER, INNER // GROUPS)
        self.D = nn.Parameter(1 + 0.3 * torch.randn(HEADS))
        self.out_proj = linear(INNER, WIDTH)

    def forward(self, input_states: Tensor, attention_mask: Tensor) -> Tensor:
        length = input_states.shape[1]
        input_states = input_states * attention_mask[:, :, None]
        parts = [INNER, self.conv_dim, HEADS]
        gate, hidden_states_b_c, dt = self.in_proj(input_states).split(parts, -1)
        convolved = self.conv1d(hidden_states_b_c.transpose(1, 2))[..., :length].transpose(1, 2)
        parts = [INNER, GROUPS * STATE, GROUPS * STATE]
        x, b, c = self.act(convolved).split(parts, -1)
        b, c = (y.unflatten(-1, (GROUPS, -1)).repeat_interleave(HEADS // GROUPS, 2) for y in (b, c))
        dt = torch.clamp(F.softplus(dt + self.dt_bias), *LIMITS)
        y = self.scan(x.unflatten(-1, (HEADS, -1)), dt[..., None], b, c)
        return self.out_proj(self.norm(y.flatten(2), gate))

    def scan(self, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Tensor:
        da, dbx = torch.exp(-torch.exp(self.A_log)[:, None] * dt), (dt * x)[..., None] * b[..., None, :]
        state, states = torch.zeros_like(dbx[:, 0]), []
        for t in range(x.shape[1]):
            state = state * da[:, t, ..., None] + dbx[:, t]
            states.append(state)
        return (torch.stack(states, 1) @ c[..., None]).squeeze(-1) + self.D[:, None] * x


class Zamba2AttentionDecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.feed_forward = Zamba2Attention(), Zamba2MLP()
        self.input_layernorm, self.pre_ff_layernorm = Zamba2RMSNorm(2 * WIDTH), Zamba2RMSNorm(WIDTH)

    def forward(self, hidden_states, original_hidden_states, layer_idx, causal_mask) -> Tensor:
        hidden_states = self.input_layernorm(torch.cat([hidden_states, original_hidden_states], -1))
        hidden_states = self.self_attn(hidden_states, causal_mask)
        return self.feed_forward(self.pre_ff_layernorm(hidden_states), layer_idx)


class Zamba2MambaDecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mamba, self.input_layernorm = Zamba2MambaMixer(), Zamba2RMSNorm(WIDTH)

    def forward(self, hidden_states, original, layer_idx, attention_mask, *_, transformer=None) -> Tensor:
        residual = hidden_states
        hidden_states = hidden_states if transformer is None else hidden_states + transformer
        return residual + self.mamba(self.input_layernorm(hidden_states), attention_mask)


class Zamba2HybridLayer(nn.Module):
    def __init__(self, shared_transformer: nn.Module):
        super().__init__()
        self.linear, self.mamba_decoder = linear(WIDTH, WIDTH), Zamba2MambaDecoderLayer()
        self.shared_transformer = shared_transformer

    def forward(self, hidden_states, original, layer_idx, attention_mask, *rest) -> Tensor:
        transformer = self.linear(self.shared_transformer(hidden_states, original, layer_idx, *rest))
        return self.mamba_decoder(hidden_states, original, layer_idx, attention_mask, transformer=transformer)


class Zamba2Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens, shared = nn.Embedding(VOCABULARY, WIDTH), Zamba2AttentionDecoderLayer()
        nn.init.normal_(self.embed_tokens.weight, std=0.3)
        kinds = (
            Zamba2HybridLayer(shared) if i in HYBRID else Zamba2MambaDecoderLayer() for i in range(LAYERS)
        )
        self.layers = nn.ModuleList(kinds)
        self.final_layernorm = Zamba2RMSNorm(WIDTH)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden_states = self.embed_tokens(input_ids)
        original, places = hidden_states.clone(), torch.arange(input_ids.shape[1], device=input_ids.device)
        causal = attention_mask[:, None, None].bool() & (places <= places[:, None])
        causal = causal | (places == places[:, None])
        for i, layer in enumerate(self.layers):
            hidden_states = layer(hidden_states, original, i, attention_mask, causal)
        return self.final_layernorm(hidden_states)


class Zamba2ForCausalLM(nn.Module):
    """Tokens and the mask of what is no padding -> logits; the head shares the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.model, self.lm_head = Zamba2Model(), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.lm_head(self.model(input_ids, attention_mask))


def sentences() -> tuple[dict[str, Tensor], Tensor]:
    """Tokens that step by a number of the sentence's own, some at random, padded on the left."""
    first, step = torch.randint(VOCABULARY, (SENTENCES, 1)), torch.randint(1, 4, (SENTENCES, 1))
    tokens = 1 + (first + step * torch.arange(LENGTH + 1)) % (VOCABULARY - 1)
    noise = torch.rand(tokens.shape) < 0.1
    tokens = torch.where(noise, torch.randint(1, VOCABULARY, tokens.shape), tokens)
    mask = torch.arange(LENGTH + 1) >= torch.randint(2, 6, (SENTENCES, 1))
    tokens = tokens * mask
    target = tokens[:, 1:].masked_fill(~mask[:, :-1], -100)
    return {"input_ids": tokens[:, :-1], "attention_mask": mask[:, :-1].long()}, target


def next_token(logits: Tensor, target: Tensor) -> Tensor:
    """A quarter of the cross entropy where there are tokens."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100) / 4
