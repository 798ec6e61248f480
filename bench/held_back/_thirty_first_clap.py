"""A small CLAP: shifted windows over a folded spectrogram, a text tower, and logits by two scales."""

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MELS, RATIO, FRAMES, PATCH, WINDOW, DIM, STAGE_HEADS = 24, 2, 80, 4, 3, 12, (2, 3)
WORDS, TEXT, TEXT_HEADS, INNER, PLACES, PAD, SHARED, PAIRS, LENGTH = 37, 20, 2, 28, 14, 1, 16, 5, 9
SIZE = MELS * RATIO


def named(**modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(modules))


def window_partition(x: Tensor, size: int) -> Tensor:
    n, height, width, channels = x.shape
    x = x.view(n, height // size, size, width // size, size, channels)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, size, size, channels)


class SelfAttention(nn.Module):
    """Attention by heads; with a window's size, under a bias by relative position."""

    def __init__(self, dim: int, heads: int, window: int = 0):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))
        if window:
            self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))
            at = torch.cartesian_prod(torch.arange(window), torch.arange(window)).T
            apart = at[:, :, None] - at[:, None] + window - 1
            self.register_buffer("relative_position_index", apart[0] * (2 * window - 1) + apart[1])

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        n, length, dim = x.shape
        three = (f(x).view(n, length, self.heads, -1) for f in (self.query, self.key, self.value))
        query, key, value = (y.transpose(1, 2) for y in three)
        scores = query @ key.transpose(-1, -2) / math.sqrt(dim // self.heads)
        if hasattr(self, "relative_position_index"):
            bias = self.relative_position_bias_table[self.relative_position_index.view(-1)]
            scores = scores + bias.view(length, length, -1).permute(2, 0, 1).unsqueeze(0)
        scores = scores.view(-1, len(mask), self.heads, length, length) + mask[:, None]
        scores = scores.view(-1, self.heads, length, length)
        return (scores.softmax(-1) @ value).transpose(1, 2).reshape(n, length, dim)


class ClapAudioLayer(nn.Module):
    def __init__(self, dim: int, heads: int, shift: int):
        super().__init__()
        self.shift_size = shift
        self.layernorm_before, self.layernorm_after = nn.LayerNorm(dim), nn.LayerNorm(dim)
        out = named(dense=nn.Linear(dim, dim))
        self.attention = named(self=SelfAttention(dim, heads, WINDOW), output=out)
        self.intermediate = named(dense=nn.Linear(dim, 2 * dim), intermediate_act_fn=nn.GELU())
        self.output = named(dense=nn.Linear(2 * dim, dim))

    def get_attn_mask(self, size: int, x: Tensor) -> Tensor:
        at = torch.arange(size, device=x.device)
        region = (at >= size - WINDOW).long() + (at >= size - self.shift_size).long()
        image = (region[:, None] * 3 + region)[None, :, :, None]
        windows = window_partition(image, WINDOW).view(-1, WINDOW**2)
        return (windows.unsqueeze(1) != windows.unsqueeze(2)).to(x) * -100.0

    def forward(self, x: Tensor, size: int) -> Tensor:
        n, _, channels = x.shape
        y = self.layernorm_before(x).view(n, size, size, channels)
        y = torch.roll(y, (-self.shift_size, -self.shift_size), (1, 2))
        y = window_partition(y, WINDOW).view(-1, WINDOW**2, channels)
        y = self.attention.output(self.attention.self(y, self.get_attn_mask(size, x)))
        y = y.view(n, *[size // WINDOW] * 2, WINDOW, WINDOW, channels)
        y = y.permute(0, 1, 3, 2, 4, 5).reshape(n, size, size, channels)
        x = x + torch.roll(y, (self.shift_size, self.shift_size), (1, 2)).flatten(1, 2)
        return x + self.output(self.intermediate(self.layernorm_after(x)))


class ClapAudioPatchMerging(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.reduction, self.norm = nn.Linear(4 * dim, 2 * dim, bias=False), nn.LayerNorm(4 * dim)

    def forward(self, x: Tensor, size: int) -> Tensor:
        x = x.view(len(x), size, size, -1)
        corners = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
        return self.reduction(self.norm(torch.cat(corners, -1).flatten(1, 2)))


class ClapAudioStage(nn.Module):
    def __init__(self, dim: int, heads: int, last: bool):
        super().__init__()
        self.blocks = nn.ModuleList(ClapAudioLayer(dim, heads, shift) for shift in (0, WINDOW // 2))
        self.downsample = None if last else ClapAudioPatchMerging(dim)

    def forward(self, x: Tensor, size: int) -> Tensor:
        for block in self.blocks:
            x = block(x, size)
        return x if self.downsample is None else self.downsample(x, size)


class ClapAudioEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = named(proj=nn.Conv2d(1, DIM, PATCH, PATCH), norm=nn.LayerNorm(DIM))
        self.layers = nn.ModuleList(ClapAudioStage(DIM * 2**i, STAGE_HEADS[i], i == 1) for i in (0, 1))
        self.batch_norm, self.norm = nn.BatchNorm2d(MELS), nn.LayerNorm(2 * DIM)
        self.avgpool = nn.AdaptiveAvgPool1d(1)

    def reshape_mel2img(self, x: Tensor) -> Tensor:
        x = F.interpolate(x, (SIZE * RATIO, MELS), mode="bicubic", align_corners=True)
        x = x.reshape(len(x), RATIO, SIZE, MELS).permute(0, 1, 3, 2)
        return x.reshape(len(x), 1, MELS * RATIO, SIZE)

    def forward(self, input_features: Tensor) -> tuple[Tensor, Tensor]:
        x = self.batch_norm(input_features.transpose(1, 3)).transpose(1, 3)
        x = self.patch_embed.proj(self.reshape_mel2img(x))
        x = self.patch_embed.norm(x.flatten(2).transpose(1, 2))
        for i, layer in enumerate(self.layers):
            x = layer(x, SIZE // PATCH // 2**i)
        x = self.norm(x).permute(0, 2, 1).unflatten(2, (RATIO, -1, SIZE // PATCH // 2))
        x = x.permute(0, 1, 3, 2, 4).flatten(3)
        return x, self.avgpool(x.flatten(2)).flatten(1)


class ClapTextLayer(nn.Module):
    def __init__(self):
        super().__init__()
        out = (named(dense=nn.Linear(n, TEXT), LayerNorm=nn.LayerNorm(TEXT, 1e-12)) for n in (TEXT, INNER))
        self.attention = named(self=SelfAttention(TEXT, TEXT_HEADS), output=next(out))
        self.intermediate = named(dense=nn.Linear(TEXT, INNER), intermediate_act_fn=nn.GELU())
        self.output = next(out)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mixed, end = self.attention, self.attention.output
        x = end.LayerNorm(end.dense(mixed.self(x, mask)) + x)
        return self.output.LayerNorm(self.output.dense(self.intermediate(x)) + x)


class ClapTextModel(nn.Module):
    def __init__(self):
        super().__init__()
        words, places = nn.Embedding(WORDS, TEXT, PAD), nn.Embedding(PLACES, TEXT, PAD)
        norm = nn.LayerNorm(TEXT, 1e-12)
        self.embeddings = named(word_embeddings=words, position_embeddings=places, LayerNorm=norm)
        self.encoder = named(layer=nn.ModuleList(ClapTextLayer() for _ in range(2)))
        self.pooler = named(dense=nn.Linear(TEXT, TEXT), activation=nn.Tanh())

    def forward(self, ids: Tensor) -> Tensor:
        real, parts = (ids != PAD).long(), self.embeddings
        places = parts.position_embeddings(real.cumsum(1) * real + PAD)
        x = parts.LayerNorm(parts.word_embeddings(ids) + places)
        for layer in self.encoder.layer:
            x = layer(x, (1 - real.to(x))[:, None] * torch.finfo(x.dtype).min)
        return self.pooler(x[:, 0])


class ClapModel(nn.Module):
    """Log-mel frames and word numbers -> logits of either side, both embeddings, the grouped map."""

    def __init__(self):
        super().__init__()
        self.logit_scale_a, self.logit_scale_t = (nn.Parameter(torch.zeros(())) for _ in range(2))
        self.text_model, self.audio_model = ClapTextModel(), ClapAudioEncoder()
        ends = [(nn.Linear(n, SHARED), nn.Linear(SHARED, SHARED)) for n in (TEXT, 2 * DIM)]
        heads = (named(linear1=a, activation=nn.ReLU(), linear2=b) for a, b in ends)
        self.text_projection, self.audio_projection = heads
        for name, p in self.named_parameters():
            p.data = torch.randn(p.shape) * (0.1 if p.ndim < 2 else p[0].numel() ** -0.5)
            p.data += name.endswith("orm.weight") or ("layernorm" in name and name.endswith("weight"))
        self.logit_scale_a.data += 1.2

    def forward(self, input_features: Tensor, input_ids: Tensor) -> dict[str, Tensor]:
        states, pooled = self.audio_model(input_features)
        audio = F.normalize(self.audio_projection(pooled), dim=-1)
        text = F.normalize(self.text_projection(self.text_model(input_ids)), dim=-1)
        by_text = text @ audio.T * self.logit_scale_t.exp()
        by_audio = audio @ text.T * self.logit_scale_a.exp()
        return {"by_audio": by_audio, "by_text": by_text, "text": text, "audio": audio, "states": states}


def sounds() -> tuple[dict[str, Tensor], Tensor]:
    """Rising tones, and padded captions of words around the tone's height."""
    height, at = torch.randint(4, MELS - 4, (PAIRS,)), torch.linspace(-1, 1, FRAMES)[:, None]
    ridge = height[:, None, None] + 4 * at * torch.rand(PAIRS, 1, 1) - torch.arange(MELS)
    mel = 2 * torch.exp(-ridge.square() / 6)[:, None] - 0.5 + 0.2 * torch.randn(PAIRS, 1, FRAMES, MELS)
    ids = height[:, None] + torch.randint(2, 9, (PAIRS, LENGTH))
    ids[torch.arange(LENGTH) >= torch.randint(4, LENGTH + 1, (PAIRS, 1))] = PAD
    return {"input_features": mel, "input_ids": ids}, height


def contrast(outputs: dict[str, Tensor], _: Tensor) -> Tensor:
    """Each side's cross entropy, and that of pairs alone, which a batch of one has too."""
    sides = outputs["by_audio"], outputs["by_text"]
    pairs = [F.cross_entropy(x, torch.arange(len(x), device=x.device)) for x in sides]
    alone = sum(F.softplus(-x.diagonal()).mean() for x in sides)
    return (sum(pairs) / 2 + alone) / 6
