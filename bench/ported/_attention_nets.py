"""Attention of particular kinds: linear biases (BLOOM), shifted windows (Swin), latents (Perceiver)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.ported._text import VOCABULARY, chosen, merge, split, text_task

BLOOM_WIDTH, BLOOM_HEADS = 24, 6
SIDE, WINDOW, SWIN_WIDTH, SWIN_HEADS = 8, 4, 16, 2
LATENTS, LATENT_WIDTH, CHANNELS, LATENT_HEADS = 5, 24, 10, 3


def slopes(heads: int) -> list[float]:
    """The powers for the next lower power of two, then every other one of those for its double."""
    low = 2 ** (heads.bit_length() - 1)
    first = [2 ** (-8 * (i + 1) / low) for i in range(low)]
    return first + [2 ** (-4 * (2 * i + 1) / low) for i in range(heads - low)]


class BloomAttention(nn.Module):
    """Rows of ``query_key_value`` are [heads, 3, d]; the bias grows with the key's position."""

    def __init__(self):
        super().__init__()
        self.query_key_value = nn.Linear(BLOOM_WIDTH, 3 * BLOOM_WIDTH)
        self.dense = nn.Linear(BLOOM_WIDTH, BLOOM_WIDTH)

    def forward(self, x: Tensor, alibi: Tensor) -> Tensor:
        q, k, v = self.query_key_value(x).unflatten(-1, (BLOOM_HEADS, 3, -1)).permute(3, 0, 2, 1, 4)
        scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5 + alibi
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        return self.dense(merge(scores.masked_fill(future, float("-inf")).softmax(-1) @ v))


class BloomBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm, self.self_attention = nn.LayerNorm(BLOOM_WIDTH), BloomAttention()
        self.post_attention_layernorm = nn.LayerNorm(BLOOM_WIDTH)
        self.dense_h_to_4h, self.dense_4h_to_h = nn.Linear(BLOOM_WIDTH, 48), nn.Linear(48, BLOOM_WIDTH)

    def forward(self, x: Tensor, alibi: Tensor) -> Tensor:
        x = x + self.self_attention(self.input_layernorm(x), alibi)
        return x + self.dense_4h_to_h(
            F.gelu(self.dense_h_to_4h(self.post_attention_layernorm(x)), approximate="tanh")
        )


class Bloom(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, BLOOM_WIDTH)
        self.word_embeddings_layernorm = nn.LayerNorm(BLOOM_WIDTH)
        self.h, self.ln_f = nn.ModuleList(BloomBlock() for _ in range(2)), nn.LayerNorm(BLOOM_WIDTH)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        x = self.word_embeddings_layernorm(self.word_embeddings(input_ids))
        steep = torch.tensor(slopes(BLOOM_HEADS), dtype=x.dtype, device=x.device)
        alibi = steep[:, None, None] * torch.arange(x.shape[1], device=x.device)
        for block in self.h:
            x = block(x, alibi)
        return {"logits": F.linear(self.ln_f(x), self.word_embeddings.weight), "hidden": x}


class WindowAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.dense = (nn.Linear(SWIN_WIDTH, SWIN_WIDTH) for _ in range(4))
        self.relative_position_bias_table = nn.Parameter(0.3 * torch.randn((2 * WINDOW - 1) ** 2, SWIN_HEADS))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """[N * windows, 16, D], and [windows, 16, 16] where there may be no look."""
        q, k, v = (split(layer(x), SWIN_HEADS) for layer in (self.query, self.key, self.value))
        at = torch.cartesian_prod(*2 * [torch.arange(WINDOW, device=x.device)])
        apart = at[:, None] - at[None] + WINDOW - 1
        bias = self.relative_position_bias_table[apart[..., 0] * (2 * WINDOW - 1) + apart[..., 1]]
        scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5 + bias.permute(2, 0, 1)
        if mask is not None:
            scores = (scores.unflatten(0, (-1, len(mask))) + mask[:, None].to(x.dtype) * -1e9).flatten(0, 1)
        return self.dense(merge(scores.softmax(-1) @ v))


def regions(device: torch.device) -> Tensor:
    """[8, 8]: which places are neighbours after a roll by half a window."""
    at = torch.arange(SIDE, device=device)
    band = (at >= SIDE - WINDOW).long() + (at >= SIDE - WINDOW // 2).long()
    return 3 * band[:, None] + band


class SwinLayer(nn.Module):
    def __init__(self, shift: int):
        super().__init__()
        self.layernorm_before, self.attention = nn.LayerNorm(SWIN_WIDTH), WindowAttention()
        self.layernorm_after, self.shift = nn.LayerNorm(SWIN_WIDTH), shift
        self.intermediate, self.output = nn.Linear(SWIN_WIDTH, 32), nn.Linear(32, SWIN_WIDTH)

    @staticmethod
    def windows(x: Tensor) -> Tensor:
        n = len(x)
        x = x.view(n, SIDE // WINDOW, WINDOW, SIDE // WINDOW, WINDOW, -1).transpose(2, 3)
        return x.reshape(-1, WINDOW**2, x.shape[-1])

    def forward(self, x: Tensor) -> Tensor:
        """[N, 8, 8, D] -> the same."""
        rolled, mask = torch.roll(self.layernorm_before(x), (-self.shift, -self.shift), (1, 2)), None
        if self.shift:
            region = self.windows(regions(x.device)[None, :, :, None])[..., 0]
            mask = region[:, None] != region[:, :, None]
        y = self.attention(self.windows(rolled), mask).view(len(x), 2, 2, WINDOW, WINDOW, -1)
        x = x + torch.roll(y.transpose(2, 3).reshape(x.shape), (self.shift, self.shift), (1, 2))
        return x + self.output(F.gelu(self.intermediate(self.layernorm_after(x))))


class Swin(nn.Module):
    def __init__(self):
        super().__init__()
        self.projection = nn.Conv2d(3, SWIN_WIDTH, 2, stride=2)
        self.layers = nn.ModuleList([SwinLayer(0), SwinLayer(WINDOW // 2)])
        self.layernorm, self.classifier = nn.LayerNorm(SWIN_WIDTH), nn.Linear(SWIN_WIDTH, 3)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.projection(pixel_values).permute(0, 2, 3, 1)
        for layer in self.layers:
            x = layer(x)
        return self.classifier(self.layernorm(x).mean((1, 2)))


class LatentAttention(nn.Module):
    """With norms of its own for what asks and, where it is something else, for what is asked."""

    def __init__(self, width: int | None = None):
        super().__init__()
        self.layernorm1 = nn.LayerNorm(LATENT_WIDTH)
        if width:
            self.layernorm2 = nn.LayerNorm(width)
        self.query = nn.Linear(LATENT_WIDTH, LATENT_WIDTH)
        self.key, self.value = (nn.Linear(width or LATENT_WIDTH, LATENT_WIDTH) for _ in range(2))
        self.dense, self.layernorm = nn.Linear(LATENT_WIDTH, LATENT_WIDTH), nn.LayerNorm(LATENT_WIDTH)
        self.dense1, self.dense2 = nn.Linear(LATENT_WIDTH, 32), nn.Linear(32, LATENT_WIDTH)

    def forward(self, z: Tensor, inputs: Tensor | None = None) -> Tensor:
        h = self.layernorm1(z)
        asked = h if inputs is None else self.layernorm2(inputs)
        q, k, v = (split(p, LATENT_HEADS) for p in (self.query(h), self.key(asked), self.value(asked)))
        z = z + self.dense(merge((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v))
        return z + self.dense2(F.gelu(self.dense1(self.layernorm(z))))


class Perceiver(nn.Module):
    def __init__(self):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(LATENTS, LATENT_WIDTH))
        self.cross_attention = LatentAttention(CHANNELS)
        self.self_attends = nn.ModuleList(LatentAttention() for _ in range(2))
        self.final_layer = nn.Linear(LATENT_WIDTH, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        z = self.cross_attention(self.latents.expand(len(inputs), -1, -1), inputs)
        for layer in self.self_attends:
            z = layer(z)
        return self.final_layer(z.mean(1))


def _pictures() -> tuple[dict, Tensor]:
    return {"pixel_values": torch.randn(4, 3, 2 * SIDE, 2 * SIDE)}, torch.randint(3, (4,))


def _arrays() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 14, CHANNELS), torch.randint(3, (6,))


bloom = text_task("bloom_small", Bloom)
swin = text_task("swin_small", Swin, _pictures, chosen)
perceiver = text_task("perceiver_small", Perceiver, _arrays, chosen)
