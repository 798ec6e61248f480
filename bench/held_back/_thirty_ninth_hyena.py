"""A small Hyena language model: three pre-norm blocks whose mixers gate long implicit convolutions."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, INNER, LAYERS, ORDER = 37, 18, 44, 3, 3
FEATURES, FILTER, LONGEST, TOKENS, SEQUENCES, PAD, IGNORED = 5, 12, 24, 20, 6, 0, -100


def fftconv(u: Tensor, k: Tensor, bias: Tensor) -> Tensor:
    """The causal convolution of [N, D, L] by [D, L], and the input by a factor per channel."""
    seqlen = u.shape[-1]
    fft_size = 2 * seqlen
    k_f = torch.fft.rfft(k, n=fft_size) / fft_size
    u_f = torch.fft.rfft(u, n=fft_size)
    y = torch.fft.irfft(u_f * k_f, n=fft_size, norm="forward")[..., :seqlen]
    return y + u * bias.unsqueeze(-1)


class LayerNorm(nn.LayerNorm):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, 1, 0.2), nn.init.normal_(self.bias, 0, 0.1)


class Sin(nn.Module):
    def __init__(self, dim: int, w: float = 2):
        super().__init__()
        self.freq = nn.Parameter(w + 0.3 * torch.randn(1, dim))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.freq * x)


class PositionalEmbedding(nn.Module):
    """Complex exponentials of the position, which are trained, and the time from 0 to 1."""

    def __init__(self, emb_dim: int, seq_len: int):
        super().__init__()
        t, bands = torch.linspace(0, 1, seq_len)[None, :, None], (emb_dim - 1) // 2
        w = 2 * math.pi * torch.linspace(0, seq_len - 1, seq_len)[None, :, None] / seq_len
        z = torch.exp(-1j * torch.linspace(1e-4, bands - 1, bands)[None, None] * w)
        z = torch.cat([t, z.real, z.imag], dim=-1)
        self.z = nn.Parameter(z + 0.02 * torch.randn_like(z))
        self.register_buffer("t", t)

    def forward(self, seqlen: int) -> tuple[Tensor, Tensor]:
        return self.z[:, :seqlen], self.t[:, :seqlen]


class ExponentialModulation(nn.Module):
    def __init__(self, d_model: int, fast_decay_pct: float = 0.3, slow_decay_pct: float = 1.5):
        super().__init__()
        ends = math.log(1e-2) / slow_decay_pct, math.log(1e-2) / fast_decay_pct
        self.deltas = nn.Parameter(torch.linspace(*ends, d_model) + 0.1 * torch.randn(1, 1, d_model))
        self.shift = nn.Parameter(0.05 + 0.02 * torch.randn(1, 1, d_model))

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        decay = torch.exp(-t * self.deltas.abs())
        return x * (decay + self.shift)


class HyenaFilter(nn.Module):
    """A filter for each channel and order as a network's function of the position; one sine serves twice."""

    def __init__(self, d_model: int, emb_dim: int, order: int, seq_len: int):
        super().__init__()
        self.bias, act = nn.Parameter(torch.randn(d_model)), Sin(order)
        self.pos_emb = PositionalEmbedding(emb_dim, seq_len)
        layers = nn.Linear(emb_dim, order), act, nn.Linear(order, order), act
        self.implicit_filter = nn.Sequential(*layers, nn.Linear(order, d_model, bias=False))
        self.modulation = ExponentialModulation(d_model)

    def filter(self, seqlen: int) -> Tensor:
        z, t = self.pos_emb(seqlen)
        return self.modulation(t, self.implicit_filter(z))

    def forward(self, x: Tensor, k: Tensor, bias: Tensor) -> Tensor:
        return fftconv(x, k, bias)


class HyenaOperator(nn.Module):
    def __init__(self, d_model: int, l_max: int, order: int, filter_order: int):
        super().__init__()
        self.d_model, self.l_max, self.order = d_model, l_max, order
        total = d_model * (order + 1)
        self.in_proj, self.out_proj = nn.Linear(d_model, total), nn.Linear(d_model, d_model)
        self.short_filter = nn.Conv1d(total, total, 3, groups=total, padding=2)
        self.filter_fn = HyenaFilter(d_model * (order - 1), FEATURES, filter_order, l_max)

    def forward(self, u: Tensor) -> Tensor:
        l_filter = min(u.size(-2), self.l_max)
        u = self.in_proj(u).transpose(1, 2)
        uc = self.short_filter(u)[..., :l_filter]
        *x, v = uc.split(self.d_model, dim=1)
        k = self.filter_fn.filter(l_filter)[0]
        k = k.view(l_filter, self.order - 1, self.d_model).permute(1, 2, 0)
        bias = self.filter_fn.bias.view(self.order - 1, self.d_model)
        for o, x_i in enumerate(reversed(x[1:])):
            v = self.filter_fn(v * x_i, k=k[o], bias=bias[o])
        return self.out_proj((v * x[0]).transpose(1, 2))


class Mlp(nn.Module):
    def __init__(self, in_features: int, hidden_features: int):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(in_features, hidden_features), nn.Linear(hidden_features, in_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixer, self.norm1 = HyenaOperator(WIDTH, LONGEST, ORDER, FILTER), LayerNorm(WIDTH)
        self.mlp, self.norm2 = Mlp(WIDTH, INNER), LayerNorm(WIDTH)

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = hidden_states + self.mixer(self.norm1(hidden_states))
        return hidden_states + self.mlp(self.norm2(hidden_states))


class GPT2Embeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.word_embeddings.weight, std=0.3)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.word_embeddings(input_ids)


class LMBackbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = GPT2Embeddings()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f = LayerNorm(WIDTH)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden_states = self.embeddings(input_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return self.ln_f(hidden_states)


class HyenaLM(nn.Module):
    """Tokens [N, L] -> logits [N, L, V]; the head shares the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.backbone = LMBackbone()
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.backbone.embeddings.word_embeddings.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.lm_head(self.backbone(input_ids))


def motifs() -> tuple[Tensor, Tensor]:
    """Sequences that repeat a motif of their own, padded behind, and the tokens that come next."""
    tokens = torch.full((SEQUENCES, TOKENS + 1), PAD)
    for row in tokens:
        period, length = int(torch.randint(3, 7, ())), int(torch.randint(12, TOKENS + 2, ()))
        motif = torch.randint(1, VOCABULARY, (period,))
        row[:length] = motif.repeat(TOKENS)[:length]
    target = tokens[:, 1:]
    return tokens[:, :-1], target.masked_fill(target == PAD, IGNORED)


def next_tokens(logits: Tensor, target: Tensor) -> Tensor:
    """The cross entropy of the tokens that are there, by four."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED) / 4
