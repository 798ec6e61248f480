"""A small WavLM that tells the codes of the masked frames of sounds of several lengths."""

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

CONVS = ((1, 10, 8, 4), (10, 12, 3, 2), (12, 14, 2, 2))  # channels in and out, kernel, stride
HIDDEN, HEADS, WIDE, LAYERS, KERNEL, GROUPS, BUCKETS, FAR = 28, 4, 40, 3, 6, 2, 16, 20
CODES, SPACE, TEMPERATURE, SOUNDS, SAMPLES = 11, 9, 0.3, 5, 500


class WavLMConvLayer(nn.Module):
    """A convolution, the first of them with a group norm of single channels."""

    def __init__(self, first: bool, in_dim: int, out_dim: int, kernel: int, stride: int):
        super().__init__()
        self.conv = nn.Conv1d(in_dim, out_dim, kernel, stride=stride, bias=False)
        self.activation = nn.GELU()
        self.layer_norm = nn.GroupNorm(out_dim, out_dim) if first else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = self.conv(hidden_states)
        if self.layer_norm is not None:
            hidden_states = self.layer_norm(hidden_states)
        return self.activation(hidden_states)


class WavLMFeatureEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_layers = nn.ModuleList(WavLMConvLayer(i == 0, *each) for i, each in enumerate(CONVS))

    def forward(self, input_values: Tensor) -> Tensor:
        hidden_states = input_values[:, None]
        for conv_layer in self.conv_layers:
            hidden_states = conv_layer(hidden_states)
        return hidden_states


class WavLMSamePadLayer(nn.Module):
    def __init__(self, kernel: int):
        super().__init__()
        self.num_pad_remove = 1 if kernel % 2 == 0 else 0

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states[:, :, : -self.num_pad_remove] if self.num_pad_remove > 0 else hidden_states


class WavLMPositionalConvEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        conv = nn.Conv1d(HIDDEN, HIDDEN, KERNEL, padding=KERNEL // 2, groups=GROUPS)
        self.conv = weight_norm(conv, name="weight", dim=2)
        self.padding, self.activation = WavLMSamePadLayer(KERNEL), nn.GELU()

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = self.conv(hidden_states.transpose(1, 2))
        return self.activation(self.padding(hidden_states)).transpose(1, 2)


class WavLMAttention(nn.Module):
    """Attention with a bias by distance, which each query scales by a gate of its own."""

    def __init__(self, has_relative_position_bias: bool):
        super().__init__()
        self.num_heads, self.head_dim = HEADS, HIDDEN // HEADS
        self.q_proj, self.k_proj = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.v_proj, self.out_proj = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.gru_rel_pos_const = nn.Parameter(torch.ones(1, HEADS, 1, 1))
        self.gru_rel_pos_linear = nn.Linear(self.head_dim, 8)
        if has_relative_position_bias:
            self.rel_attn_embed = nn.Embedding(BUCKETS, HEADS)

    def compute_bias(self, length: int) -> Tensor:
        position = torch.arange(length, device=self.rel_attn_embed.weight.device)
        buckets = self._relative_positions_bucket(position[None] - position[:, None])
        return self.rel_attn_embed(buckets).permute(2, 0, 1)[None]

    def _relative_positions_bucket(self, relative_positions: Tensor) -> Tensor:
        num_buckets = BUCKETS // 2
        relative_buckets = (relative_positions > 0).long() * num_buckets
        relative_positions, max_exact = relative_positions.abs(), num_buckets // 2
        large = torch.log(relative_positions.clamp(min=1).float() / max_exact) / math.log(FAR / max_exact)
        large = (max_exact + large * (num_buckets - max_exact)).long().clamp(max=num_buckets - 1)
        return relative_buckets + torch.where(relative_positions < max_exact, relative_positions, large)

    def heads(self, hidden_states: Tensor) -> Tensor:
        return hidden_states.view(*hidden_states.shape[:2], self.num_heads, -1).permute(0, 2, 1, 3)

    def forward(self, hidden_states: Tensor, mask: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        if bias is None:
            bias = self.compute_bias(hidden_states.shape[1])
        gate = self.gru_rel_pos_linear(self.heads(hidden_states))
        gate = gate.view(*gate.shape[:-1], 2, 4).sum(-1)
        gate_a, gate_b = torch.sigmoid(gate).chunk(2, dim=-1)
        gate_output = gate_a * (gate_b * self.gru_rel_pos_const - 1.0) + 2.0
        query = self.heads(self.q_proj(hidden_states)) * self.head_dim**-0.5
        key, value = self.heads(self.k_proj(hidden_states)), self.heads(self.v_proj(hidden_states))
        scores = query @ key.transpose(2, 3) + gate_output * bias
        scores = scores.masked_fill(~mask[:, None, None], float("-inf"))
        mixed = (torch.softmax(scores, dim=-1) @ value).transpose(1, 2).flatten(2)
        return self.out_proj(mixed), bias


class WavLMEncoderLayer(nn.Module):
    def __init__(self, has_relative_position_bias: bool):
        super().__init__()
        self.attention, self.layer_norm = WavLMAttention(has_relative_position_bias), nn.LayerNorm(HIDDEN)
        self.final_layer_norm = nn.LayerNorm(HIDDEN)
        dense = {"intermediate_dense": nn.Linear(HIDDEN, WIDE), "intermediate_act_fn": nn.GELU()}
        self.feed_forward = nn.Sequential(OrderedDict(dense, output_dense=nn.Linear(WIDE, HIDDEN)))

    def forward(self, hidden_states: Tensor, mask: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        attended, bias = self.attention(hidden_states, mask, bias)
        hidden_states = self.layer_norm(hidden_states + attended)
        return self.final_layer_norm(hidden_states + self.feed_forward(hidden_states)), bias


class WavLMEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.pos_conv_embed, self.layer_norm = WavLMPositionalConvEmbedding(), nn.LayerNorm(HIDDEN)
        self.layers = nn.ModuleList(WavLMEncoderLayer(i == 0) for i in range(LAYERS))

    def forward(self, hidden_states: Tensor, mask: Tensor) -> list[Tensor]:
        hidden_states = hidden_states.masked_fill(~mask[..., None], 0.0)
        hidden_states = self.layer_norm(hidden_states + self.pos_conv_embed(hidden_states))
        all_hidden_states, bias = [hidden_states], None
        for layer in self.layers:
            hidden_states, bias = layer(hidden_states, mask, bias)
            all_hidden_states.append(hidden_states)
        return all_hidden_states


class WavLMModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.feature_extractor, width = WavLMFeatureEncoder(), CONVS[-1][1]
        parts = {"layer_norm": nn.LayerNorm(width), "projection": nn.Linear(width, HIDDEN)}
        self.feature_projection = nn.Sequential(OrderedDict(parts))
        self.masked_spec_embed = nn.Parameter(torch.rand(HIDDEN))
        self.encoder = WavLMEncoder()

    def forward(self, input_values: Tensor, attention_mask: Tensor, mask_time_indices: Tensor) -> list:
        features = self.feature_extractor(input_values).transpose(1, 2)
        lengths = attention_mask.sum(1)
        for _, _, kernel, stride in CONVS:
            lengths = (lengths - kernel) // stride + 1
        mask = torch.arange(features.shape[1], device=lengths.device) < lengths[:, None]
        hidden_states = self.feature_projection(features)
        hidden_states = torch.where(mask_time_indices[..., None], self.masked_spec_embed, hidden_states)
        return self.encoder(hidden_states, mask)


class WavLMForCodes(nn.Module):
    def __init__(self):
        super().__init__()
        self.wavlm, self.layer_weights = WavLMModel(), nn.Parameter(torch.ones(LAYERS + 1))
        self.final_proj = nn.Linear(HIDDEN, SPACE)
        self.label_embs = nn.Parameter(torch.ones(CODES, SPACE))
        for name, weight in self.named_parameters():
            one = name.endswith(("norm.weight", "const", "original0"))
            spread = 0.2 if weight.dim() < 2 or one else weight[0].numel() ** -0.5
            spread = 0.8 if "embed.weight" in name or name.startswith("label") else spread
            nn.init.normal_(weight, float(one), spread)

    def forward(self, input_values: Tensor, attention_mask: Tensor, mask_time_indices: Tensor) -> Tensor:
        states = torch.stack(self.wavlm(input_values, attention_mask, mask_time_indices), dim=1)
        weights = torch.softmax(self.layer_weights, dim=-1)
        projected = self.final_proj((states * weights.view(-1, 1, 1)).sum(dim=1))
        return F.cosine_similarity(projected[:, :, None], self.label_embs, dim=-1) / TEMPERATURE


def tones() -> tuple[dict[str, Tensor], Tensor]:
    """Tones in a row, each of a code, padded; two spans of frames are masked, whose codes are asked for."""
    frames = SAMPLES // 16 - 1
    codes = torch.randint(CODES, (SOUNDS, SAMPLES // 80 + 1)).repeat_interleave(80, 1)[:, :SAMPLES]
    lengths = torch.randint(300, SAMPLES, (SOUNDS, 1))
    attention_mask = torch.arange(SAMPLES) < lengths
    sound = torch.sin((0.1 + 0.15 * codes).cumsum(1)) + 0.1 * torch.randn(SOUNDS, SAMPLES)
    first, second, time = (
        torch.randint(1, 5, (SOUNDS, 1)),
        torch.randint(8, 13, (SOUNDS, 1)),
        torch.arange(frames),
    )
    spans = (time >= first) & (time < first + 3) | (time >= second) & (time < second + 4)
    target = codes[:, 12::16][:, :frames].masked_fill(~spans, -100)
    values = sound * attention_mask
    return {"input_values": values, "attention_mask": attention_mask, "mask_time_indices": spans}, target


def masked_codes(logits: Tensor, target: Tensor) -> Tensor:
    """The cross entropy of the codes of the masked frames, by four."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100) / 4
