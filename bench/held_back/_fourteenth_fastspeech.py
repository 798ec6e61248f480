"""A small FastSpeech 2: phonemes with taught durations, pitch and energy become frames of a spectrogram."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, INNER, DEPTH = 16, 2, 24, 2
PHONEMES, LONGEST, BINS, FILTER, MELS = 20, 48, 16, 12, 10


def varied(module: nn.Module) -> None:
    if isinstance(module, nn.LayerNorm | nn.BatchNorm1d):
        nn.init.uniform_(module.weight, 0.6, 1.4)
    elif isinstance(module, nn.Linear | nn.Conv1d):
        nn.init.xavier_normal_(module.weight)
    if getattr(module, "bias", None) is not None:
        nn.init.normal_(module.bias, std=0.2)
    if isinstance(module, nn.BatchNorm1d):
        nn.init.normal_(module.running_mean, std=0.2)
        nn.init.uniform_(module.running_var, 0.5, 1.5)


def sinusoid_encoding_table(count: int, width: int) -> Tensor:
    pairs = torch.arange(0, width, 2, dtype=torch.float64)
    angles = torch.arange(count, dtype=torch.float64)[:, None] * 1e4 ** (-pairs / width)
    return torch.stack([angles.sin(), angles.cos()], 2).reshape(1, count, width).float()


def padding_mask(lengths: Tensor, longest: int) -> Tensor:
    return torch.arange(longest, device=lengths.device)[None] >= lengths[:, None]


class ScaledDotProductAttention(nn.Module):
    def __init__(self, temperature: float):
        super().__init__()
        self.temperature, self.softmax = temperature, nn.Softmax(dim=2)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = torch.bmm(q, k.mT) / self.temperature
        return torch.bmm(self.softmax(scores.masked_fill(mask, -torch.inf)), v)


class MultiHeadAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.w_qs, self.w_ks, self.w_vs = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.attention = ScaledDotProductAttention((WIDTH // HEADS) ** 0.5)
        self.layer_norm, self.fc = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        made = (w(x).unflatten(2, (HEADS, -1)) for w in (self.w_qs, self.w_ks, self.w_vs))
        q, k, v = (y.permute(2, 0, 1, 3).flatten(0, 1) for y in made)
        y = self.attention(q, k, v, mask.repeat(HEADS, 1, 1)).unflatten(0, (HEADS, -1))
        return self.layer_norm(self.fc(y.permute(1, 2, 0, 3).flatten(2)) + x)


class PositionwiseFeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w_1 = nn.Conv1d(WIDTH, INNER, 5, padding=2)
        self.w_2 = nn.Conv1d(INNER, WIDTH, 1)
        self.layer_norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer_norm(self.w_2(F.relu(self.w_1(x.mT))).mT + x)


class FFTBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.slf_attn, self.pos_ffn = MultiHeadAttention(), PositionwiseFeedForward()

    def forward(self, x: Tensor, mask: Tensor, slf_attn_mask: Tensor) -> Tensor:
        x = self.slf_attn(x, slf_attn_mask).masked_fill(mask[..., None], 0)
        return self.pos_ffn(x).masked_fill(mask[..., None], 0)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.position_enc = nn.Parameter(sinusoid_encoding_table(LONGEST + 1, WIDTH), requires_grad=False)
        self.layer_stack = nn.ModuleList(FFTBlock() for _ in range(DEPTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.position_enc[:, : x.shape[1]]
        for layer in self.layer_stack:
            x = layer(x, mask, mask[:, None].expand(-1, x.shape[1], -1))
        return x


class Encoder(Decoder):
    def __init__(self):
        super().__init__()
        self.src_word_emb = nn.Embedding(PHONEMES, WIDTH, padding_idx=0)

    def forward(self, src_seq: Tensor, mask: Tensor) -> Tensor:
        return super().forward(self.src_word_emb(src_seq), mask)


class ConvNorm(nn.Module):
    def __init__(self, inputs: int, outputs: int, kernel: int):
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, kernel, padding=kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class Conv(ConvNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.mT).mT


class VariancePredictor(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_layer, self.linear_layer = nn.Sequential(), nn.Linear(FILTER, 1)
        for i, inputs in ((1, WIDTH), (2, FILTER)):
            self.conv_layer.add_module(f"conv1d_{i}", Conv(inputs, FILTER, 3))
            self.conv_layer.add_module(f"relu_{i}", nn.ReLU())
            self.conv_layer.add_module(f"layer_norm_{i}", nn.LayerNorm(FILTER))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.linear_layer(self.conv_layer(x)).squeeze(-1).masked_fill(mask, 0)


class LengthRegulator(nn.Module):
    def forward(self, x: Tensor, durations: Tensor, longest: int) -> Tensor:
        frames = [x[i].repeat_interleave(times, 0) for i, times in enumerate(durations)]
        return torch.stack([F.pad(row, (0, 0, 0, longest - len(row))) for row in frames])


class VarianceAdaptor(nn.Module):
    def __init__(self):
        super().__init__()
        self.duration_predictor, self.length_regulator = VariancePredictor(), LengthRegulator()
        self.pitch_predictor, self.energy_predictor = VariancePredictor(), VariancePredictor()
        edges = torch.linspace(-1.75, 1.75, BINS - 1)
        self.pitch_bins, self.energy_bins = (nn.Parameter(edges.clone(), False) for _ in range(2))
        self.pitch_embedding, self.energy_embedding = nn.Embedding(BINS, WIDTH), nn.Embedding(BINS, WIDTH)

    def forward(self, x: Tensor, mask: Tensor, longest: int, *targets: Tensor) -> tuple[Tensor, ...]:
        pitch, energy, durations = targets
        log_durations, pitches = self.duration_predictor(x, mask), self.pitch_predictor(x, mask)
        x = x + self.pitch_embedding(torch.bucketize(pitch, self.pitch_bins))
        energies = self.energy_predictor(x, mask)
        x = x + self.energy_embedding(torch.bucketize(energy, self.energy_bins))
        return self.length_regulator(x, durations, longest), pitches, energies, log_durations


class PostNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Sequential(ConvNorm(i, o, 5), nn.BatchNorm1d(o))
            for i, o in ((MELS, WIDTH), (WIDTH, WIDTH), (WIDTH, MELS))
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x.mT
        for layer in self.convolutions[:-1]:
            x = torch.tanh(layer(x))
        return self.convolutions[-1](x).mT


class FastSpeech2(nn.Module):
    """Phonemes [N, S] -> frames [N, T, mels] before and after the post-net, pitch, energy, log durations."""

    def __init__(self):
        super().__init__()
        self.encoder, self.variance_adaptor, self.decoder = Encoder(), VarianceAdaptor(), Decoder()
        self.mel_linear, self.postnet = nn.Linear(WIDTH, MELS), PostNet()
        self.apply(varied)

    def forward(self, texts: Tensor, src_lens: Tensor, mel_lens: Tensor, *targets: Tensor) -> tuple:
        longest = int(mel_lens.max())
        src_masks, mel_masks = padding_mask(src_lens, texts.shape[1]), padding_mask(mel_lens, longest)
        x = self.encoder(texts, src_masks)
        x, *predicted = self.variance_adaptor(x, src_masks, longest, *targets)
        mel = self.mel_linear(self.decoder(x, mel_masks))
        return mel, mel + self.postnet(mel), *predicted


def utterances() -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Three texts, some phonemes without voice or length; each phoneme has its own colour in the frames."""
    src_lens = torch.tensor([8, 6, 5])
    voiced = ~padding_mask(src_lens, 8)
    texts = torch.randint(1, PHONEMES, (3, 8)) * voiced
    durations = torch.randint(0, 5, (3, 8)).index_fill(1, torch.tensor([1]), 3) * voiced
    pitch, energy = torch.randn(3, 8) * (torch.rand(3, 8) > 0.3) * voiced, torch.randn(3, 8) * voiced
    mel_lens = durations.sum(1)
    colour = torch.sin(texts[..., None] * torch.linspace(0.3, 1.7, MELS)) + 0.3 * (pitch + energy)[..., None]
    mels = LengthRegulator()(colour + 0.1 * torch.randn(3, 8, MELS), durations, int(mel_lens.max()))
    known = (src_lens, mel_lens, pitch, energy, durations)
    return (texts, *known), (mels, *known)


def spoken(outputs: tuple[Tensor, ...], target: tuple[Tensor, ...]) -> Tensor:
    """Absolute errors of both spectrograms, squared ones of the rest, each over what is not padding."""
    mels, src_lens, mel_lens, pitch, energy, durations = target
    text, frames = ~padding_mask(src_lens, pitch.shape[1]), ~padding_mask(mel_lens, mels.shape[1])
    mel, final, *predicted = outputs
    wanted = (pitch, energy, torch.log(durations.to(mel) + 1))
    losses = [F.mse_loss(value[text], goal[text]) for value, goal in zip(predicted, wanted, strict=True)]
    return 0.3 * (sum(losses) + sum(F.l1_loss(value[frames], mels[frames]) for value in (mel, final)))
