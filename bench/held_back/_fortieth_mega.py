"""A small MEGA: gated attention in chunks over a moving average with damping, for masked words."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, HIDDEN, SHARED, INTERMEDIATE, NDIM, NFFN = 31, 20, 12, 28, 4, 36
LENGTH, CHUNK, POSITIONS, SENTENCES = 18, 6, 23, 5


@dataclass
class Settings:
    attention_activation: str
    normalization_type: str
    normalize_before: bool


LAYERS = (
    Settings("softmax", "layernorm", True),
    Settings("laplace", "scalenorm", True),
    Settings("laplace", "layernorm", False),
)


class MegaSimpleRelativePositionalBias(nn.Module):
    def __init__(self):
        super().__init__()
        self.rel_pos_bias = nn.Parameter(torch.empty(2 * POSITIONS - 1))

    def forward(self, length: int) -> Tensor:
        bias = self.rel_pos_bias[POSITIONS - length : POSITIONS + length - 1]
        tile = F.pad(F.pad(bias, (0, length)).repeat(length), (0, -length)).view(length, -1)
        start = (2 * length - 1) // 2
        return tile[:, start : tile.shape[1] - start]


class MegaMultiDimensionDampedEma(nn.Module):
    """In both directions, by a convolution in frequencies; [T, N, D] -> [T, N, D]."""

    def __init__(self):
        super().__init__()
        self.damping_factor = nn.Parameter(torch.empty(2 * HIDDEN, NDIM, 1))
        self.decay_factor = nn.Parameter(torch.empty(2 * HIDDEN, NDIM, 1))
        self.ema_expansion_matrix = nn.Parameter(torch.empty(2 * HIDDEN, NDIM, 1))
        self.kernel_projection_matrix = nn.Parameter(torch.empty(2 * HIDDEN, NDIM))
        self.residual_weight = nn.Parameter(torch.empty(HIDDEN))
        self.scaling = math.sqrt(1 / NDIM)

    def kernel(self, length: int) -> Tensor:
        damping, decay = self.damping_factor.sigmoid(), self.decay_factor.sigmoid()
        vander = torch.arange(length, device=damping.device) * torch.log(1 - damping * decay)
        kernel = damping * self.ema_expansion_matrix * vander.exp()
        return torch.einsum("dnl,dn->dl", kernel, self.kernel_projection_matrix * self.scaling)

    def forward(self, inputs: Tensor, mask: Tensor) -> Tensor:
        length, residual = len(inputs), inputs * self.residual_weight
        inputs = inputs.permute(1, 2, 0) * mask[:, None].to(inputs)
        ahead, back = self.kernel(length).split(HIDDEN)
        kernel = F.pad(ahead, (length - 1, 0)) + F.pad(back.flip(-1), (0, length - 1))
        size, start = 2 * (2 * length - 1), 2 * length - 2
        spectrum = torch.fft.rfft(F.pad(inputs, (length - 1, 0)), size) * torch.fft.rfft(kernel, size)
        out = torch.fft.irfft(spectrum, size)[..., start : start + length]
        return F.silu(out.permute(2, 0, 1) + residual)


class LaplaceActivation(nn.Module):
    def forward(self, x: Tensor, mu: float = 0.707107, sigma: float = 0.282095) -> Tensor:
        return 0.5 * (1 + torch.erf((x - mu) / (sigma * math.sqrt(2))))


class MegaScaleNorm(nn.Module):
    def __init__(self, eps: float = 1e-5):
        super().__init__()
        self.scalar, self.eps = nn.Parameter(torch.empty(1)), eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.scalar


class MegaSequenceNorm(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN) if kind == "layernorm" else MegaScaleNorm()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class MegaMovingAverageGatedAttention(nn.Module):
    def __init__(self, config: Settings):
        super().__init__()
        self.config, laplace = config, config.attention_activation == "laplace"
        self.norm = MegaSequenceNorm(config.normalization_type)
        self.ema_gate = MegaMultiDimensionDampedEma()
        self.v_proj = nn.Linear(HIDDEN, INTERMEDIATE)
        self.mx_proj = nn.Linear(HIDDEN, SHARED + INTERMEDIATE + 2 * HIDDEN)
        self.h_proj = nn.Linear(INTERMEDIATE, HIDDEN)
        self.qk_weight, self.qk_bias = (nn.Parameter(torch.empty(2, SHARED)) for _ in range(2))
        self.rel_pos_bias = MegaSimpleRelativePositionalBias()
        self.attention_activation = LaplaceActivation() if laplace else nn.Softmax(-1)
        self.attention_function = self.element_attention if laplace else self.softmax_attention

    def element_attention(self, query: Tensor, key: Tensor, mask: Tensor) -> Tensor:
        lengths = mask.sum(-1)[..., None, None].clamp(min=1)
        qk = query @ key.mT / lengths + self.rel_pos_bias(key.shape[2])
        return self.attention_activation(qk) * mask[:, :, None].to(qk)

    def softmax_attention(self, query: Tensor, key: Tensor, mask: Tensor) -> Tensor:
        qk = SHARED**-0.5 * query @ key.mT + self.rel_pos_bias(key.shape[2])
        return self.attention_activation(qk.masked_fill(mask[:, :, None] == 0, float("-inf")))

    def forward(self, inputs: Tensor, mask: Tensor) -> Tensor:
        residual = inputs
        if self.config.normalize_before:
            inputs = self.norm(inputs)
        value = F.silu(self.v_proj(inputs))
        base = self.mx_proj(self.ema_gate(inputs, mask))
        residual_weight, gates, state = base.split([HIDDEN, SHARED + INTERMEDIATE, HIDDEN], -1)
        residual_weight = residual_weight.sigmoid()
        query_key, attention_gate = F.silu(gates).split([SHARED, INTERMEDIATE], -1)
        query, key = (query_key[:, :, None] * self.qk_weight + self.qk_bias).unbind(2)
        query, key, value = (x.transpose(0, 1).unflatten(1, (-1, CHUNK)) for x in (query, key, value))
        weights = self.attention_function(query, key, mask.unflatten(1, (-1, CHUNK)))
        attended = (weights @ value).flatten(1, 2).transpose(0, 1)
        attended = F.silu(state + self.h_proj(attended * attention_gate))
        out = torch.addcmul(residual, residual_weight, attended - residual)
        return out if self.config.normalize_before else self.norm(out)


class MegaNormalizedFeedForwardNetwork(nn.Module):
    def __init__(self, config: Settings):
        super().__init__()
        self.config, self.norm = config, MegaSequenceNorm(config.normalization_type)
        self.fc1, self.fc2 = nn.Linear(HIDDEN, NFFN), nn.Linear(NFFN, HIDDEN)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(inputs) if self.config.normalize_before else inputs
        out = self.fc2(F.silu(self.fc1(hidden))) + inputs
        return out if self.config.normalize_before else self.norm(out)


class MegaBlock(nn.Module):
    def __init__(self, config: Settings):
        super().__init__()
        self.mega_layer = MegaMovingAverageGatedAttention(config)
        self.nffn = MegaNormalizedFeedForwardNetwork(config)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return self.nffn(self.mega_layer(hidden, mask))


class MegaModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding_layer = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(map(MegaBlock, LAYERS))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.embedding_layer(input_ids).transpose(0, 1)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask)
        return hidden.transpose(0, 1)


class MegaForMaskedLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.mega = MegaModel()
        self.mlm_head = nn.Linear(HIDDEN, VOCABULARY)
        for name, p in self.named_parameters():
            middle = 1.0 if name.endswith(("norm.weight", "scalar", "qk_weight")) else 0.0
            linear = name.endswith(("proj.weight", "fc1.weight", "fc2.weight"))
            nn.init.normal_(p, middle, p.shape[1] ** -0.5 if linear else 0.3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.mlm_head(self.mega(input_ids, attention_mask))


def sentences() -> tuple[dict[str, Tensor], Tensor]:
    """Words that step through the vocabulary at a pace, some under a mask (2), padded (1) at the end."""
    pace, start = torch.randint(1, 4, (SENTENCES, 1)), torch.randint(27, (SENTENCES, 1))
    words = 4 + (start + pace * torch.arange(LENGTH)) % (VOCABULARY - 4)
    real = torch.arange(LENGTH) < torch.randint(2 * CHUNK + 1, LENGTH + 1, (SENTENCES, 1))
    hidden = real & ((torch.rand(SENTENCES, LENGTH) < 0.25) | (torch.arange(LENGTH) == 3))
    ids = words.masked_fill(hidden, 2).masked_fill(~real, 1)
    return {"input_ids": ids, "attention_mask": real.long()}, words.masked_fill(~hidden, -100)


def masked_words(logits: Tensor, words: Tensor) -> Tensor:
    """The cross entropy of the hidden words, by four."""
    return F.cross_entropy(logits.flatten(0, 1), words.flatten(), ignore_index=-100) / 4
