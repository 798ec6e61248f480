"""wav2vec 2.0 in pre-training: codes of what is heard, told from others where the time is masked."""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIMS, KERNELS, STRIDES = (12, 16, 16), (10, 3, 2), (5, 2, 2)
HIDDEN, HEADS, INNER, LAYERS, POSITIONS, POSITION_GROUPS = 24, 3, 48, 3, 8, 4
GROUPS, ENTRIES, CODE, PROJECTED, TEMPERATURE, KAPPA, DIVERSITY = 2, 4, 16, 16, 2.0, 0.1, 0.1
SAMPLES, NEGATIVES, SPAN = 640, 6, 4


def varied(module: nn.Module) -> None:
    """Start with weights that let every layer, gain and shift count."""
    if getattr(module, "bias", None) is not None:
        nn.init.normal_(module.bias, std=0.2)
    if isinstance(module, nn.LayerNorm | nn.GroupNorm):
        nn.init.uniform_(module.weight, 0.6, 1.4)
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=module.in_features**-0.5)
    elif hasattr(module, "parametrizations"):
        nn.init.uniform_(module.parametrizations.weight.original0, 0.8, 2.0)
        nn.init.normal_(module.parametrizations.weight.original1)
    elif isinstance(module, nn.Conv1d):
        nn.init.kaiming_normal_(module.weight)


def named(**modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(modules))


class Wav2Vec2FeatureEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_layers, inputs = nn.Sequential(), 1
        for i, (width, kernel, stride) in enumerate(zip(DIMS, KERNELS, STRIDES, strict=True)):
            norm = {} if i else {"layer_norm": nn.GroupNorm(width, width)}
            conv = nn.Conv1d(inputs, width, kernel, stride, bias=False)
            self.conv_layers.append(named(conv=conv, **norm, activation=nn.GELU()))
            inputs = width

    def forward(self, input_values: Tensor) -> Tensor:
        return self.conv_layers(input_values[:, None])


class Wav2Vec2FeatureProjection(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer_norm, self.projection = nn.LayerNorm(DIMS[-1]), nn.Linear(DIMS[-1], HIDDEN)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.layer_norm(x)
        return self.projection(normed), normed


class Wav2Vec2SamePadLayer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, :-1]


class Wav2Vec2PositionalConvEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        conv = nn.Conv1d(HIDDEN, HIDDEN, POSITIONS, padding=POSITIONS // 2, groups=POSITION_GROUPS)
        self.conv = nn.utils.parametrizations.weight_norm(conv, dim=2)
        self.padding, self.activation = Wav2Vec2SamePadLayer(), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.padding(self.conv(x.transpose(1, 2)))).transpose(1, 2)


class Wav2Vec2Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.scaling = (HIDDEN // HEADS) ** -0.5
        self.k_proj, self.v_proj = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.q_proj, self.out_proj = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        q, k, v = self.q_proj(x) * self.scaling, self.k_proj(x), self.v_proj(x)
        q, k, v = (y.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for y in (q, k, v))
        shares = (q @ k.transpose(2, 3) + attention_mask).softmax(-1)
        return self.out_proj((shares @ v).transpose(1, 2).reshape(x.shape))


class Wav2Vec2EncoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.layer_norm = Wav2Vec2Attention(), nn.LayerNorm(HIDDEN)
        up, down = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)
        self.feed_forward = named(intermediate_dense=up, intermediate_act_fn=nn.GELU(), output_dense=down)
        self.final_layer_norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.layer_norm(x + self.attention(x, attention_mask))
        return self.final_layer_norm(x + self.feed_forward(x))


class Wav2Vec2Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.pos_conv_embed, self.layer_norm = Wav2Vec2PositionalConvEmbedding(), nn.LayerNorm(HIDDEN)
        self.layers = nn.ModuleList(Wav2Vec2EncoderLayer() for _ in range(LAYERS))

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        x = x.masked_fill(~attention_mask[:, :, None], 0)
        bias = (1 - attention_mask[:, None, None].to(x)) * torch.finfo(x.dtype).min
        x = self.layer_norm(x + self.pos_conv_embed(x))
        for layer in self.layers:
            x = layer(x, bias)
        return x


def output_lengths(lengths: Tensor) -> Tensor:
    for kernel, stride in zip(KERNELS, STRIDES, strict=True):
        lengths = torch.div(lengths - kernel, stride, rounding_mode="floor") + 1
    return lengths


class Wav2Vec2Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.feature_extractor = Wav2Vec2FeatureEncoder()
        self.feature_projection = Wav2Vec2FeatureProjection()
        self.masked_spec_embed = nn.Parameter(torch.rand(HIDDEN))
        self.encoder = Wav2Vec2Encoder()

    def forward(self, waves: Tensor, attention_mask: Tensor, masked: Tensor) -> tuple[Tensor, Tensor]:
        extracted = self.feature_extractor(waves).transpose(1, 2)
        lengths = output_lengths(attention_mask.cumsum(-1)[:, -1])
        attention_mask = torch.arange(extracted.shape[1], device=waves.device) < lengths[:, None]
        x, extracted = self.feature_projection(extracted)
        x = torch.where(masked[:, :, None], self.masked_spec_embed, x)
        return self.encoder(x, attention_mask), extracted


class Wav2Vec2GumbelVectorQuantizer(nn.Module):
    """In training the choice is noisy, and its gradient is that of the soft choice."""

    def __init__(self):
        super().__init__()
        self.codevectors = nn.Parameter(torch.randn(1, GROUPS * ENTRIES, CODE // GROUPS))
        self.weight_proj, self.temperature = nn.Linear(DIMS[-1], GROUPS * ENTRIES), TEMPERATURE

    def forward(self, x: Tensor, masked: Tensor, gumbels: Tensor) -> tuple[Tensor, Tensor]:
        scores, count = self.weight_proj(x).view(-1, ENTRIES), x.shape[0] * x.shape[1]
        noisy = (scores + gumbels.reshape(scores.shape)) / self.temperature if self.training else scores
        chosen = shares = torch.zeros_like(scores).scatter(1, noisy.argmax(-1, keepdim=True), 1.0)
        if self.training:
            soft, shares = noisy.softmax(-1), scores.softmax(-1)
            chosen = chosen + (soft - soft.detach())
        shares = torch.where(masked.flatten()[:, None, None], shares.view(count, GROUPS, -1), 0)
        marginal = shares.sum(0) / masked.sum()
        perplexity = torch.exp(-(marginal * torch.log(marginal + 1e-7)).sum(-1)).sum()
        codes = chosen.view(count, -1, 1) * self.codevectors
        return codes.view(count, GROUPS, ENTRIES, -1).sum(-2).view(*x.shape[:2], -1), perplexity


class Wav2Vec2ForPreTraining(nn.Module):
    """Waves with their masks, negatives and noise -> the states, their targets and the sums of the losses."""

    def __init__(self):
        super().__init__()
        self.wav2vec2, self.quantizer = Wav2Vec2Model(), Wav2Vec2GumbelVectorQuantizer()
        self.project_hid, self.project_q = nn.Linear(HIDDEN, PROJECTED), nn.Linear(CODE, PROJECTED)
        self.apply(varied)

    def forward(
        self, input_values, attention_mask, mask_time_indices, sampled_negative_indices, gumbels
    ) -> tuple[Tensor, ...]:
        states, extracted = self.wav2vec2(input_values, attention_mask, mask_time_indices)
        states = self.project_hid(states)
        codes, perplexity = self.quantizer(extracted, mask_time_indices, gumbels)
        negatives = codes.flatten(0, 1)[sampled_negative_indices].permute(2, 0, 1, 3)
        same = (negatives == codes).all(-1)
        targets = self.project_q(torch.cat([codes[None], negatives]))
        logits = F.cosine_similarity(states, targets, dim=-1) / KAPPA
        logits = torch.cat([logits[:1], logits[1:].masked_fill(same, float("-inf"))])
        labels = (mask_time_indices.long() - 1) * 100
        contrastive = F.cross_entropy(logits.flatten(1).T, labels.flatten(), reduction="sum")
        diversity = (1 - perplexity / (GROUPS * ENTRIES)) * mask_time_indices.sum()
        loss = contrastive + DIVERSITY * diversity
        return loss, states, targets[0], perplexity


def utterances() -> tuple[tuple[Tensor, ...], Tensor]:
    """Voices of three overtones under noise, padded with silence, and how many frames are masked."""
    lengths = torch.stack([torch.tensor(SAMPLES), *torch.randint(320, 600, (2,))])
    heard = torch.arange(SAMPLES) < lengths[:, None]
    pitch, phase = 0.03 + 0.2 * torch.rand(3, 3, 1), 6 * torch.rand(3, 3, 1)
    waves = torch.sin(pitch * torch.arange(SAMPLES) + phase).sum(1) + 0.3 * torch.randn(3, SAMPLES)
    counts = output_lengths(lengths)
    masked = torch.zeros(3, int(counts.max()), dtype=torch.bool)
    negatives = torch.zeros(*masked.shape, NEGATIVES, dtype=torch.long)
    for i, count in enumerate(counts.tolist()):
        for start in torch.randperm(count - SPAN)[:3]:
            masked[i, start : start + SPAN] = True
        own = masked[i].nonzero()[:, 0]
        steps = torch.randint(1, len(own), (len(own), NEGATIVES))
        negatives[i, own] = own[(torch.arange(len(own))[:, None] + steps) % len(own)] + i * masked.shape[1]
    gumbels = -torch.empty(*masked.shape, GROUPS * ENTRIES).exponential_().log()
    return (waves * heard, heard.long(), masked, negatives, gumbels), masked.sum()
