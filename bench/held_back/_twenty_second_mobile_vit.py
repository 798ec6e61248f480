"""A small MobileViT: inverted residuals, then attention between equal places of patches."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIGH, WIDE, PICTURES, LABELS = 37, 53, 4, 5
FEATURES, HIDDEN, WIDER, HEADS, PATCH, EXPAND_RATIO = 24, 20, 36, 2, 2, 2


class MobileViTLayers(nn.Module):
    """What the encoder, its stages and the transformer share: one layer after the other."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.layer = nn.ModuleList(layers)

    def forward(self, hidden_states: Tensor) -> Tensor:
        for layer_module in self.layer:
            hidden_states = layer_module(hidden_states)
        return hidden_states


class MobileViTConvLayer(nn.Module):
    def __init__(self, inputs: int, outputs: int, size: int, stride=1, groups=1, norm=True, act=True):
        super().__init__()
        self.convolution = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
        self.normalization = nn.BatchNorm2d(outputs) if norm else None
        self.activation = nn.SiLU() if act else None

    def forward(self, features: Tensor) -> Tensor:
        features = self.convolution(features)
        if self.normalization is not None:
            features = self.normalization(features)
        return features if self.activation is None else self.activation(features)


class MobileViTInvertedResidual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        expanded, self.use_residual = inputs * EXPAND_RATIO, stride == 1 and inputs == outputs
        self.expand_1x1 = MobileViTConvLayer(inputs, expanded, 1)
        self.conv_3x3 = MobileViTConvLayer(expanded, expanded, 3, stride, groups=expanded)
        self.reduce_1x1 = MobileViTConvLayer(expanded, outputs, 1, act=False)

    def forward(self, features: Tensor) -> Tensor:
        residual = features
        features = self.reduce_1x1(self.conv_3x3(self.expand_1x1(features)))
        return residual + features if self.use_residual else features


class MobileViTSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, hidden_states: Tensor) -> Tensor:
        layers = (layer(hidden_states) for layer in (self.query, self.key, self.value))
        query, key, value = (x.unflatten(2, (HEADS, -1)).transpose(1, 2) for x in layers)
        attention_scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        return (attention_scores.softmax(dim=-1) @ value).transpose(1, 2).flatten(2)


class MobileViTSelfOutput(nn.Module):
    def __init__(self, inputs: int = HIDDEN, outputs: int = HIDDEN):
        super().__init__()
        self.dense = nn.Linear(inputs, outputs)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.dense(hidden_states)


class MobileViTAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.output = MobileViTSelfAttention(), MobileViTSelfOutput()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.output(self.attention(hidden_states))


class MobileViTIntermediate(MobileViTSelfOutput):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return F.silu(self.dense(hidden_states))


class MobileViTOutput(MobileViTSelfOutput):
    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return self.dense(hidden_states) + input_tensor


class MobileViTTransformerLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.intermediate = MobileViTAttention(), MobileViTIntermediate(HIDDEN, WIDER)
        self.output = MobileViTOutput(WIDER, HIDDEN)
        self.layernorm_before, self.layernorm_after = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = self.attention(self.layernorm_before(hidden_states)) + hidden_states
        return self.output(self.intermediate(self.layernorm_after(hidden_states)), hidden_states)


class MobileViTLayer(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.downsampling_layer = MobileViTInvertedResidual(inputs, outputs, stride)
        self.conv_kxk = MobileViTConvLayer(outputs, outputs, 3)
        self.conv_1x1 = MobileViTConvLayer(outputs, HIDDEN, 1, norm=False, act=False)
        self.transformer = MobileViTLayers(MobileViTTransformerLayer(), MobileViTTransformerLayer())
        self.layernorm = nn.LayerNorm(HIDDEN)
        self.conv_projection = MobileViTConvLayer(HIDDEN, outputs, 1)
        self.fusion = MobileViTConvLayer(2 * outputs, outputs, 3)

    def unfolding(self, features: Tensor) -> tuple[Tensor, list[int]]:
        """[N, C, H, W] -> [N * pixels of a patch, patches, C], with the sides that were unfolded."""
        p, (n, c, *size) = PATCH, features.shape
        sides = [math.ceil(side / p) * p for side in size]
        if sides != size:
            features = F.interpolate(features, size=sides, mode="bilinear", align_corners=False)
        patches = features.reshape(n * c * (sides[0] // p), p, sides[1] // p, p).transpose(1, 2)
        patches = patches.reshape(n, c, -1, p * p).transpose(1, 3)
        return patches.reshape(n * p * p, -1, c), sides

    def folding(self, patches: Tensor, sides: list[int], size: list[int]) -> Tensor:
        """Undo ``unfolding``, for features whose height and width were ``size``."""
        p, (_, count, c) = PATCH, patches.shape
        features = patches.reshape(-1, p * p, count, c).transpose(1, 3)
        features = features.reshape(-1, sides[1] // p, p, p).transpose(1, 2).reshape(-1, c, *sides)
        if sides != size:
            features = F.interpolate(features, size=size, mode="bilinear", align_corners=False)
        return features

    def forward(self, features: Tensor) -> Tensor:
        residual = features = self.downsampling_layer(features)
        features = self.conv_1x1(self.conv_kxk(features))
        patches, sides = self.unfolding(features)
        patches = self.layernorm(self.transformer(patches))
        features = self.conv_projection(self.folding(patches, sides, list(residual.shape[2:])))
        return self.fusion(torch.cat([residual, features], dim=1))


class MobileViTModel(nn.Module):
    """Pictures -> the last features and their mean over all places."""

    def __init__(self):
        super().__init__()
        self.conv_stem, last = MobileViTConvLayer(3, 12, 3, stride=2), MobileViTLayer(16, 16, stride=2)
        first, *more = (MobileViTInvertedResidual(*x) for x in ((12, 12, 1), (12, 16, 2), (16, 16, 1)))
        self.encoder = MobileViTLayers(MobileViTLayers(first), MobileViTLayers(*more), last)
        self.conv_1x1_exp = MobileViTConvLayer(16, FEATURES, 1)

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        last_hidden_state = self.conv_1x1_exp(self.encoder(self.conv_stem(pixel_values)))
        return last_hidden_state, last_hidden_state.mean(dim=[-2, -1])


class MobileViTForImageClassification(nn.Module):
    def __init__(self):
        super().__init__()
        self.mobilevit, self.classifier = MobileViTModel(), nn.Linear(FEATURES, LABELS)
        self.apply(self.init_weights)

    def init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight, gain=1.4)
        elif isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
        elif isinstance(module, nn.BatchNorm2d | nn.LayerNorm):
            nn.init.uniform_(module.weight, 0.6, 1.4)
        if getattr(module, "bias", None) is not None:
            nn.init.normal_(module.bias, std=0.2)
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.2)
            nn.init.uniform_(module.running_var, 0.6, 1.4)

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        last_hidden_state, pooled = self.mobilevit(pixel_values)
        return {"logits": self.classifier(pooled), "last_hidden_state": last_hidden_state}


def stripes() -> tuple[Tensor, Tensor]:
    """Noisy coloured stripes; their direction is the class."""
    labels = torch.randint(LABELS, (PICTURES,))
    turn = (math.pi * labels / LABELS + 0.1 * torch.randn(PICTURES))[:, None, None, None]
    down, across = torch.arange(HIGH)[:, None] / 4, torch.arange(WIDE) / 4
    phase, colour = 6 * torch.rand(PICTURES, 1, 1, 1), 0.5 + torch.rand(PICTURES, 3, 1, 1)
    pictures = colour * torch.sin(turn.cos() * across + turn.sin() * down + phase)
    return pictures + 0.3 * torch.randn(PICTURES, 3, HIGH, WIDE), labels


def smoothed(outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs["logits"], labels, label_smoothing=0.1)
