"""A small Audio Spectrogram Transformer, from waveforms to the logits of many labels."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

RATE, FRAME, HOP, POINTS, MELS, FRAMES = 1600, 40, 16, 64, 14, 26
MEAN, STD, EMPHASIS, OFFSET = -0.6, 1.6, 0.97, 0.02
PATCH, FREQUENCY_STRIDE, TIME_STRIDE = 6, 4, 5
WIDTH, HEADS, INNER, LAYERS, LABELS, CLIPS, EPS = 24, 3, 44, 3, 7, 4, 1e-12


def mel_filter_bank() -> Tensor:
    """Triangles on the mel scale, [bins, mels]."""
    bins = 1127 * (1 + torch.arange(POINTS // 2 + 1) * RATE / POINTS / 700).log()
    edges = torch.linspace(1127 * math.log(1 + 20 / 700), float(bins[-1]), MELS + 2)
    rise = (bins[:, None] - edges[:-2]) / (edges[1:-1] - edges[:-2])
    fall = (edges[2:] - bins[:, None]) / (edges[2:] - edges[1:-1])
    return torch.minimum(rise, fall).clamp(min=0)


class ASTFeatureExtractor(nn.Module):
    """Waves [N, samples] -> normalised log-mel spectrograms [N, frames, mels], padded by zeros."""

    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.hann_window(FRAME, periodic=False))
        self.register_buffer("mel_filters", mel_filter_bank())

    def extract_fbank_features(self, waveform: Tensor, lengths: Tensor) -> Tensor:
        frames = waveform.unfold(1, FRAME, HOP)
        frames = frames - frames.mean(2, keepdim=True)
        before = torch.cat([frames[..., :1], frames[..., :-1]], 2)
        spectrum = torch.fft.rfft((frames - EMPHASIS * before) * self.window, n=POINTS)
        power = spectrum.real**2 + spectrum.imag**2
        fbank = torch.log(power @ self.mel_filters + OFFSET)
        padding = torch.arange(fbank.shape[1], device=lengths.device) >= lengths[:, None]
        return fbank.masked_fill(padding[..., None], 0.0)

    def normalize(self, input_values: Tensor) -> Tensor:
        return (input_values - MEAN) / (STD * 2)

    def forward(self, waveform: Tensor, lengths: Tensor) -> Tensor:
        return self.normalize(self.extract_fbank_features(waveform, lengths))


class ASTPatchEmbeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.projection = nn.Conv2d(1, WIDTH, PATCH, (FREQUENCY_STRIDE, TIME_STRIDE))

    def forward(self, input_values: Tensor) -> Tensor:
        input_values = input_values.unsqueeze(1).transpose(2, 3)
        return self.projection(input_values).flatten(2).transpose(1, 2)


class ASTEmbeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embeddings = ASTPatchEmbeddings()
        patches = ((MELS - PATCH) // FREQUENCY_STRIDE + 1) * ((FRAMES - PATCH) // TIME_STRIDE + 1)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.distillation_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.position_embeddings = nn.Parameter(torch.zeros(1, patches + 2, WIDTH))

    def forward(self, input_values: Tensor) -> Tensor:
        embeddings = self.patch_embeddings(input_values)
        tokens = (x.expand(len(embeddings), -1, -1) for x in (self.cls_token, self.distillation_token))
        return torch.cat([*tokens, embeddings], 1) + self.position_embeddings


class ASTSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def transpose_for_scores(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], HEADS, WIDTH // HEADS).permute(0, 2, 1, 3)

    def forward(self, hidden_states: Tensor) -> Tensor:
        layers = (self.query, self.key, self.value)
        query, key, value = (self.transpose_for_scores(layer(hidden_states)) for layer in layers)
        scores = query @ key.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
        return (scores.softmax(-1) @ value).permute(0, 2, 1, 3).flatten(2)


class ASTSelfOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.dense(hidden_states)


class ASTAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.output = ASTSelfAttention(), ASTSelfOutput()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.output(self.attention(hidden_states))


class ASTIntermediate(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.intermediate_act_fn = nn.Linear(WIDTH, INNER), nn.GELU()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.intermediate_act_fn(self.dense(hidden_states))


class ASTOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(INNER, WIDTH)

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return self.dense(hidden_states) + input_tensor


class ASTLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.intermediate, self.output = ASTAttention(), ASTIntermediate(), ASTOutput()
        self.layernorm_before, self.layernorm_after = (nn.LayerNorm(WIDTH, EPS) for _ in range(2))

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = self.attention(self.layernorm_before(hidden_states)) + hidden_states
        return self.output(self.intermediate(self.layernorm_after(hidden_states)), hidden_states)


class ASTEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.ModuleList(ASTLayer() for _ in range(LAYERS))

    def forward(self, hidden_states: Tensor) -> Tensor:
        for layer in self.layer:
            hidden_states = layer(hidden_states)
        return hidden_states


class ASTModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings, self.encoder = ASTEmbeddings(), ASTEncoder()
        self.layernorm = nn.LayerNorm(WIDTH, EPS)

    def forward(self, input_values: Tensor) -> Tensor:
        sequence = self.layernorm(self.encoder(self.embeddings(input_values)))
        return (sequence[:, 0] + sequence[:, 1]) / 2


class ASTMLPHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.layernorm, self.dense = nn.LayerNorm(WIDTH, EPS), nn.Linear(WIDTH, LABELS)

    def forward(self, hidden_state: Tensor) -> Tensor:
        return self.dense(self.layernorm(hidden_state))


class ASTForAudioClassification(nn.Module):
    def __init__(self):
        super().__init__()
        self.feature_extractor = ASTFeatureExtractor()
        self.audio_spectrogram_transformer = ASTModel()
        self.classifier = ASTMLPHead()
        for name, weight in self.named_parameters():
            spread = 0.8 / math.sqrt(weight[0].numel()) if weight.dim() in (2, 4) else 0.2
            middle = 1.0 if "layernorm" in name and name.endswith("weight") else 0.0
            nn.init.normal_(weight, middle, spread)

    def forward(self, waveform: Tensor, lengths: Tensor) -> Tensor:
        return self.classifier(self.audio_spectrogram_transformer(self.feature_extractor(waveform, lengths)))


def clips() -> tuple[dict[str, Tensor], Tensor]:
    """Clips of fading tones, one for each label, padded; the labels, of which -1 is unknown."""
    lengths = torch.randint(FRAMES // 2, FRAMES + 1, (CLIPS,))
    lengths[0] = FRAMES
    time = torch.arange(FRAME + HOP * (FRAMES - 1))
    labels = (torch.rand(CLIPS, LABELS) < 0.4).float()
    pitch = torch.linspace(60, 700, LABELS)[:, None] * (1 + 0.05 * torch.rand(CLIPS, LABELS, 1))
    tones = torch.sin(math.tau * (pitch * time / RATE + torch.rand(CLIPS, LABELS, 1)))
    fading = torch.exp(-3 * torch.rand(CLIPS, LABELS, 1) * time / len(time))
    wave = 0.5 * (labels[..., None] * tones * fading).sum(1) + 0.1 * torch.randn(CLIPS, len(time)) + 0.05
    wave = wave * (time < FRAME + HOP * (lengths[:, None] - 1))
    return {"waveform": wave, "lengths": lengths}, labels.masked_fill(torch.rand(CLIPS, LABELS) < 0.15, -1.0)


def known_labels(logits: Tensor, labels: Tensor) -> Tensor:
    """The binary cross entropy of the labels that are known."""
    known = (labels >= 0).to(logits)
    losses = F.binary_cross_entropy_with_logits(logits, labels.clamp(min=0), reduction="none")
    return (losses * known).sum() / known.sum().clamp(min=1)
