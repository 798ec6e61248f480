"""References: CLIP's two towers as transformers names them, and adapters as peft has them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.ported._text import VOCABULARY, chosen, merge, split, text_task

WIDTH, HEADS, JOINT, LENGTH, LAST = 24, 3, 16, 8, VOCABULARY - 1


class ClipAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (split(layer(x), HEADS) for layer in (self.q_proj, self.k_proj, self.v_proj))
        scores = q * q.shape[-1] ** -0.5 @ k.mT
        return self.out_proj(merge((scores if mask is None else scores + mask).softmax(-1) @ v))


class QuickGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class ClipMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.activation_fn, self.fc1, self.fc2 = QuickGELU(), nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation_fn(self.fc1(x)))


class ClipLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.layer_norm1 = ClipAttention(), nn.LayerNorm(WIDTH)
        self.mlp, self.layer_norm2 = ClipMLP(), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x), mask)
        return x + self.mlp(self.layer_norm2(x))


class TextTower(nn.Module):
    """Pooled where the end token, the greatest of all, stands."""

    def __init__(self):
        super().__init__()
        self.token_embedding, self.position_embedding = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Embedding(LENGTH, WIDTH),
        )
        self.layers, self.final_layer_norm = nn.ModuleList(ClipLayer() for _ in range(2)), nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token_embedding(ids) + self.position_embedding.weight[: ids.shape[1]]
        mask = torch.full((ids.shape[1],) * 2, -1e9, dtype=x.dtype, device=x.device).triu(1)
        for layer in self.layers:
            x = layer(x, mask)
        return self.final_layer_norm(x)[torch.arange(len(x), device=x.device), ids.argmax(1)]


class VisionTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.class_embedding = nn.Parameter(torch.randn(WIDTH))
        self.patch_embedding = nn.Conv2d(3, WIDTH, 4, stride=4, bias=False)
        self.position_embedding = nn.Embedding(10, WIDTH)
        self.pre_layrnorm, self.post_layernorm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(ClipLayer() for _ in range(2))

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patch_embedding(images).flatten(2).transpose(1, 2)
        x = (
            torch.cat([self.class_embedding.expand(len(images), 1, -1), patches], 1)
            + self.position_embedding.weight
        )
        x = self.pre_layrnorm(x)
        for layer in self.layers:
            x = layer(x)
        return self.post_layernorm(x[:, 0])


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.text_model, self.vision_model = TextTower(), VisionTower()
        self.visual_projection = nn.Linear(WIDTH, JOINT, bias=False)
        self.text_projection = nn.Linear(WIDTH, JOINT, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> dict[str, Tensor]:
        images = self.visual_projection(self.vision_model(pixel_values))
        texts = self.text_projection(self.text_model(input_ids))
        images, texts = (x / x.norm(dim=-1, keepdim=True) for x in (images, texts))
        scores = texts @ images.T * self.logit_scale.exp()
        return {"logits_per_text": scores, "logits_per_image": scores.T}


def _pairs() -> tuple[dict, Tensor]:
    ids, ends = torch.randint(1, LAST, (6, LENGTH)), torch.randint(3, LENGTH, (6, 1))
    at = torch.arange(LENGTH)
    ids = torch.where(at < ends, ids, torch.where(at == ends, LAST, 0))
    return {"input_ids": ids, "pixel_values": torch.randn(6, 3, 12, 12)}, torch.arange(6)


def contrast(outputs: object, targets: Tensor) -> Tensor:
    scores = outputs["logits_per_text"]
    return (F.cross_entropy(scores, targets) + F.cross_entropy(scores.T, targets)) / 2


class LoraLinear(nn.Module):
    """A frozen layer and what is learned beside it."""

    def __init__(self, width: int, rank: int = 3, alpha: float = 8):
        super().__init__()
        self.base_layer = nn.Linear(width, width)
        self.lora_A, self.lora_B = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)
        self.scaling = alpha / rank
        self.base_layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x)) * self.scaling


class LoraBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_attn, self.ln_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q_proj, self.v_proj, self.k_proj = LoraLinear(WIDTH), LoraLinear(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.o_proj, self.fc1, self.fc2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        for part in (self.ln_attn, self.ln_mlp, self.k_proj, self.o_proj, self.fc1, self.fc2):
            part.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.ln_attn(x)
        q, k, v = (split(layer(h), HEADS) for layer in (self.q_proj, self.k_proj, self.v_proj))
        x = x + self.o_proj(merge((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v))
        return x + self.fc2(F.gelu(self.fc1(self.ln_mlp(x))))


class LoraClassifier(nn.Module):
    """Sums of embedded tokens are not learned; the adapters and the head are."""

    def __init__(self):
        super().__init__()
        self.embed, self.blocks = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.ModuleList(LoraBlock() for _ in range(2)),
        )
        self.embed.requires_grad_(False)
        self.score = nn.Linear(WIDTH, 3)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.score(x.mean(1))


def _ids() -> tuple[Tensor, Tensor]:
    return torch.randint(VOCABULARY, (6, 9)), torch.randint(3, (6,))


clip = text_task("clip_small", Clip, _pairs, contrast)
lora = text_task("lora_small", LoraClassifier, _ids, chosen)
