"""A small MaskGIT: a convolutional tokenizer of pictures, and a transformer of masked tokens."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIGH, WIDE, CODES, CODE, CLASSES, PICTURES = 16, 24, 33, 10, 5, 3
HIDDEN, HEADS, INNER, LAYERS, TOKENS, TIMES = 20, 4, 44, 3, 24, 17
EMPTY, MASK, SMOOTHING, COMMITMENT = CODES + CLASSES, CODES + CLASSES + 1, 0.1, 0.25


class ResBlock(nn.Module):
    def __init__(self, input_dim: int, filters: int):
        super().__init__()
        self.norm1 = nn.GroupNorm(4, input_dim)
        self.conv1 = nn.Conv2d(input_dim, filters, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(4, filters)
        self.conv2 = nn.Conv2d(filters, filters, 3, padding=1, bias=False)
        same = input_dim == filters
        self.shortcut = nn.Identity() if same else nn.Conv2d(input_dim, filters, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        residual = self.shortcut(x)
        x = self.conv1(F.silu(self.norm1(x)))
        x = self.conv2(F.silu(self.norm2(x)))
        return x + residual


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_in = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList([ResBlock(8, 8), ResBlock(8, 12), ResBlock(12, 12)])
        self.pool = nn.AvgPool2d(2)
        self.norm_out = nn.GroupNorm(4, 12)
        self.conv_out = nn.Conv2d(12, CODE, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for block in self.blocks[:-1]:
            x = self.pool(block(x))
        return self.conv_out(F.silu(self.norm_out(self.blocks[-1](x))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_in, self.conv_out = nn.Conv2d(CODE, 12, 3, padding=1), nn.Conv2d(12, 3, 3, padding=1)
        self.up = nn.Upsample(scale_factor=4, mode="nearest")

    def forward(self, x: Tensor) -> Tensor:
        return self.conv_out(self.up(F.silu(self.conv_in(x))))


class VectorQuantizer(nn.Module):
    """[N, D, H, W] -> the nearest codes, with a straight-through gradient, their numbers and a loss."""

    def __init__(self):
        super().__init__()
        self.codebook = nn.Parameter(0.7 * torch.randn(CODES, CODE))

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = z.permute(0, 2, 3, 1)
        flat = x.reshape(-1, CODE)
        a2, b2 = flat.square().sum(1, keepdim=True), self.codebook.square().sum(1)
        ids = (a2 - 2 * flat @ self.codebook.t() + b2).argmin(1).view(x.shape[:-1])
        quantized = self.codebook[ids]
        e_latent_loss = COMMITMENT * F.mse_loss(x, quantized.detach())
        q_latent_loss = F.mse_loss(quantized, x.detach())
        quantized = x + (quantized - x).detach()
        return quantized.permute(0, 3, 1, 2), ids.flatten(1), e_latent_loss + q_latent_loss


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.quantizer, self.decoder = Encoder(), VectorQuantizer(), Decoder()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        quantized, ids, loss = self.quantizer(self.encoder(x))
        return self.decoder(quantized), ids, loss


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(MASK + 1, HIDDEN)
        self.position_embeddings = nn.Embedding(TOKENS + 1, HIDDEN)
        self.embeddings_ln = nn.LayerNorm(HIDDEN, eps=1e-5)

    def forward(self, input_ids: Tensor) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        return self.embeddings_ln(self.word_embeddings(input_ids) + self.position_embeddings(positions))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.attention_output = nn.Linear(HIDDEN, HIDDEN)
        self.attention_output_ln = nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        three = self.query(x), self.key(x), self.value(x)
        q, k, v = (y.unflatten(2, (HEADS, -1)).transpose(1, 2) for y in three)
        weights = (q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])).softmax(-1)
        return self.attention_output_ln(self.attention_output((weights @ v).transpose(1, 2).flatten(2)) + x)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.intermediate_output = nn.Linear(HIDDEN, INNER)
        self.layer_output = nn.Linear(INNER, HIDDEN)
        self.layer_output_ln = nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer_output_ln(self.layer_output(F.gelu(self.intermediate_output(x))) + x)


class TransformerLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.attention(x))


class MlmLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlm_dense, self.mlm_ln = nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN)
        self.mlm_bias = nn.Parameter(torch.zeros(CODES))

    def forward(self, last_layer: Tensor, embeddings: Tensor) -> Tensor:
        x = self.mlm_ln(F.gelu(self.mlm_dense(last_layer)))
        return x @ embeddings[:CODES].t() + self.mlm_bias


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mlm_layer = Embed(), MlmLayer()
        self.layers = nn.ModuleList(TransformerLayer() for _ in range(LAYERS))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.mlm_layer(x, self.embed.word_embeddings.weight)


class MaskGIT(nn.Module):
    """Pictures, classes, which are dropped, times and an order of places -> logits, losses, confidences."""

    def __init__(self):
        super().__init__()
        self.tokenizer, self.transformer = VQVAE(), Transformer()
        for name, weight in self.named_parameters():
            if weight.ndim == 1:
                nn.init.normal_(weight, float(name.endswith("weight")), 0.2)
        nn.init.normal_(self.transformer.embed.word_embeddings.weight, std=0.3)
        nn.init.normal_(self.transformer.embed.position_embeddings.weight, std=0.3)

    def forward(self, x: Tensor, label: Tensor, drop: Tensor, time: Tensor, order: Tensor) -> tuple:
        image, ids, vq_loss = self.tokenizer(x)
        ratio = torch.cos(math.pi / 2 * time.to(x.dtype) / TIMES)
        count = (ratio * TOKENS).ceil().clamp(min=1)
        mask = order < count[:, None]
        cls = torch.where(drop, EMPTY, CODES + label)
        input_ids = torch.cat([cls[:, None], torch.where(mask, MASK, ids)], 1)
        logits = self.transformer(input_ids)[:, 1:]
        soft = F.one_hot(ids, CODES).to(logits) * (1 - SMOOTHING) + SMOOTHING / CODES
        token_loss = -(soft * logits.log_softmax(-1)).sum(-1)
        token_loss = (token_loss * mask).sum() / mask.sum()
        picked = ids if self.training else torch.where(mask, logits.argmax(-1), ids)
        confidence = logits.softmax(-1).gather(2, picked[:, :, None])[:, :, 0]
        if not self.training:
            confidence = torch.where(mask, confidence, 1.0)
        return image, logits, confidence, token_loss, vq_loss


def blobs() -> tuple[dict[str, Tensor], Tensor]:
    """Waves whose direction and colour tell their class, and what is drawn for the mask."""
    label = torch.randint(CLASSES, (PICTURES,))
    turn, phase = (math.pi * label / CLASSES)[:, None, None, None], 6 * torch.rand(PICTURES, 1, 1, 1)
    across, down, tone = torch.arange(WIDE) / 3, torch.arange(HIGH)[:, None] / 3, torch.arange(3)
    x = torch.sin(turn.cos() * across + turn.sin() * down + phase + tone[:, None, None])
    x = x + 0.2 * torch.randn(PICTURES, 3, HIGH, WIDE)
    order = torch.rand(PICTURES, TOKENS).argsort(1)
    drawn = {"drop": torch.rand(PICTURES) < 0.3, "time": torch.randint(1, TIMES, (PICTURES,))}
    return {"x": x, "label": label, **drawn, "order": order}, x


def tokens_and_pixels(outputs: tuple[Tensor, ...], x: Tensor) -> Tensor:
    image, _, _, token_loss, vq_loss = outputs
    return (token_loss + vq_loss + F.mse_loss(image, x)) / 8
