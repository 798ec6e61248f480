"""A small HuBERT in pretraining: padded sounds, masked frames, and clusters told by cosine."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONV_DIM, CONV_KERNEL, CONV_STRIDE = (11, 14, 16, 18), (10, 3, 3, 2), (5, 2, 2, 2)
HIDDEN, HEADS, LAYERS, INTERMEDIATE, POSITIONS, GROUPS = 36, 4, 3, 60, 8, 3
FINAL, CLUSTERS, TEMPERATURE, FEATURE_GRAD_MULT = 26, 13, 0.1, 0.1
BATCH, SAMPLES, FRAMES, HOP, SPAN = 5, 875, 21, 40, 4


def output_lengths(lengths: Tensor) -> Tensor:
    """Frames that the convolutions make of so many samples."""
    for kernel, stride in zip(CONV_KERNEL, CONV_STRIDE, strict=True):
        lengths = torch.div(lengths - kernel, stride, rounding_mode="floor") + 1
    return lengths


class GradMultiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.scale, None


class HubertNoLayerNormConvLayer(nn.Module):
    def __init__(self, layer_id: int):
        super().__init__()
        in_dim, *sizes = (x[layer_id] for x in ((1, *CONV_DIM), CONV_DIM, CONV_KERNEL, CONV_STRIDE))
        self.conv, self.activation = nn.Conv1d(in_dim, *sizes, bias=False), nn.GELU()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.activation(self.conv(hidden_states))


class HubertGroupNormConvLayer(HubertNoLayerNormConvLayer):
    def __init__(self, layer_id: int):
        super().__init__(layer_id)
        self.layer_norm = nn.GroupNorm(CONV_DIM[layer_id], CONV_DIM[layer_id])

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.activation(self.layer_norm(self.conv(hidden_states)))


class HubertFeatureEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_layers = nn.ModuleList([HubertGroupNormConvLayer(0)])
        self.conv_layers.extend(map(HubertNoLayerNormConvLayer, range(1, len(CONV_DIM))))

    def forward(self, input_values: Tensor) -> Tensor:
        hidden_states = input_values[:, None]
        for conv_layer in self.conv_layers:
            hidden_states = conv_layer(hidden_states)
        return hidden_states


class HubertFeatureProjection(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer_norm, self.projection = nn.LayerNorm(CONV_DIM[-1]), nn.Linear(CONV_DIM[-1], HIDDEN)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.projection(self.layer_norm(hidden_states))


class HubertSamePadLayer(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states[:, :, :-1] if POSITIONS % 2 == 0 else hidden_states


class HubertPositionalConvEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        conv = nn.Conv1d(HIDDEN, HIDDEN, POSITIONS, padding=POSITIONS // 2, groups=GROUPS)
        self.conv = nn.utils.parametrizations.weight_norm(conv, name="weight", dim=2)
        self.padding, self.activation = HubertSamePadLayer(), nn.GELU()

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = self.padding(self.conv(hidden_states.transpose(1, 2)))
        return self.activation(hidden_states).transpose(1, 2)


class HubertAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.scaling = (HIDDEN // HEADS) ** -0.5
        self.k_proj, self.v_proj = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.q_proj, self.out_proj = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        layers = self.q_proj, self.k_proj, self.v_proj
        query, key, value = (f(hidden_states).unflatten(2, (HEADS, -1)).transpose(1, 2) for f in layers)
        attn_weights = torch.matmul(query, key.transpose(2, 3)) * self.scaling
        attn_weights = attn_weights.masked_fill(~attention_mask, torch.finfo(attn_weights.dtype).min)
        attn_output = torch.matmul(F.softmax(attn_weights, dim=-1), value).transpose(1, 2)
        return self.out_proj(attn_output.reshape(hidden_states.shape))


class HubertFeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.intermediate_dense, self.intermediate_act_fn = nn.Linear(HIDDEN, INTERMEDIATE), nn.GELU()
        self.output_dense = nn.Linear(INTERMEDIATE, HIDDEN)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.output_dense(self.intermediate_act_fn(self.intermediate_dense(hidden_states)))


class HubertEncoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.layer_norm = HubertAttention(), nn.LayerNorm(HIDDEN)
        self.feed_forward, self.final_layer_norm = HubertFeedForward(), nn.LayerNorm(HIDDEN)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        hidden_states = hidden_states + self.attention(hidden_states, attention_mask)
        hidden_states = self.layer_norm(hidden_states)
        return self.final_layer_norm(hidden_states + self.feed_forward(hidden_states))


class HubertEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.pos_conv_embed, self.layer_norm = HubertPositionalConvEmbedding(), nn.LayerNorm(HIDDEN)
        self.layers = nn.ModuleList(HubertEncoderLayer() for _ in range(LAYERS))

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        hidden_states = hidden_states.masked_fill(~attention_mask[:, :, None], 0.0)
        hidden_states = self.layer_norm(hidden_states + self.pos_conv_embed(hidden_states))
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask[:, None, None])
        return hidden_states


class HubertModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.feature_extractor, self.feature_projection = HubertFeatureEncoder(), HubertFeatureProjection()
        self.masked_spec_embed, self.encoder = nn.Parameter(torch.empty(HIDDEN)), HubertEncoder()

    def forward(self, input_values: Tensor, attention_mask: Tensor, mask_time_indices: Tensor):
        extract_features = self.feature_extractor(input_values)
        extract_features = GradMultiply.apply(extract_features, FEATURE_GRAD_MULT).transpose(1, 2)
        lengths = output_lengths(attention_mask.sum(-1, keepdim=True))
        attention_mask = torch.arange(extract_features.shape[1], device=lengths.device) < lengths
        hidden_states = self.feature_projection(extract_features)
        hidden_states = torch.where(mask_time_indices[:, :, None], self.masked_spec_embed, hidden_states)
        return self.encoder(hidden_states, attention_mask), extract_features


class LogitGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.label_embeddings = nn.Parameter(torch.empty(CLUSTERS, FINAL))
        self.final_proj = nn.Linear(HIDDEN, FINAL)

    def forward(self, x: Tensor) -> Tensor:
        return F.cosine_similarity(self.final_proj(x)[:, :, None], self.label_embeddings, -1) / TEMPERATURE


class HubertForPreTraining(nn.Module):
    def __init__(self):
        super().__init__()
        self.hubert, self.logit_generator = HubertModel(), LogitGenerator()
        for name, p in self.named_parameters():
            mean = 1.0 * name.endswith("norm.weight") + 2.0 * name.endswith("original0")
            nn.init.normal_(p, mean, 0.2 if p.ndim == 1 else 1.3 / math.sqrt(p[0].numel()))

    def forward(self, input_values: Tensor, attention_mask: Tensor, mask_time_indices: Tensor):
        hidden_states, features = self.hubert(input_values, attention_mask, mask_time_indices)
        return self.logit_generator(hidden_states), features.pow(2).mean()


def tones() -> tuple[dict[str, Tensor], Tensor]:
    """Tones in a row, each of a cluster; padded, with spans of masked frames, which count apart."""
    cluster = torch.randint(CLUSTERS, (BATCH, FRAMES // 3)).repeat_interleave(3, 1)
    pitch = cluster[:, (torch.arange(SAMPLES) // HOP).clamp(max=FRAMES - 1)]
    phase = (0.08 + 0.09 * pitch).cumsum(1) + 6 * torch.rand(BATCH, 1)
    wave = phase.sin() + 0.4 * (2 * phase + pitch).sin() + 0.1 * torch.randn(BATCH, SAMPLES)
    length = SAMPLES - torch.randint(9 * HOP, (BATCH, 1)) * torch.arange(BATCH)[:, None].clamp(max=1)
    heard, real = (torch.arange(n) < k for n, k in ((SAMPLES, length), (FRAMES, output_lengths(length))))
    wave = torch.stack([(w - w[m].mean()) / w[m].std() * m for w, m in zip(wave, heard, strict=True)])
    starts = F.pad((torch.rand(BATCH, FRAMES) < 0.16).float(), (SPAN - 1, 0))
    masked = starts.unfold(1, SPAN, 1).amax(-1).bool() & real
    targets = torch.stack([torch.where(kept & real, cluster, -100) for kept in (masked, ~masked)], 2)
    return {"input_values": wave, "attention_mask": heard.long(), "mask_time_indices": masked}, targets


def masked_prediction(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    """The cross entropy of the masked frames, half that of the others, and the features' penalty."""
    masked, unmasked = (F.cross_entropy(outputs[0].transpose(1, 2), t) for t in targets.unbind(2))
    return (masked + 0.5 * unmasked) / 3 + 4 * outputs[1]
