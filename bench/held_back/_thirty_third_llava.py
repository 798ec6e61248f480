"""A small LLaVA: patches of a CLIP tower take the places of image tokens before a Llama-like decoder."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS, HIGH, WIDE, PATCH, SEES, VISION_HEADS, VISION_INNER, VISION_LAYERS = 3, 8, 12, 4, 20, 5, 36, 3
WIDTH, HEADS, KEY_HEADS, INNER, LAYERS, VOCABULARY, LONG, BATCH = 24, 4, 2, 44, 3, 41, 15, 3
PATCHES, IMAGE, PAD, START, IGNORED = HIGH // PATCH * (WIDE // PATCH), VOCABULARY - 1, 0, 1, -100


class CLIPVisionEmbeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.class_embedding = nn.Parameter(torch.randn(SEES))
        self.patch_embedding = nn.Conv2d(CHANNELS, SEES, PATCH, stride=PATCH, bias=False)
        self.position_embedding = nn.Embedding(PATCHES + 1, SEES)

    def forward(self, pixel_values: Tensor) -> Tensor:
        patch_embeds = self.patch_embedding(pixel_values).flatten(2).transpose(1, 2)
        class_embeds = self.class_embedding.expand(len(pixel_values), 1, -1)
        return torch.cat([class_embeds, patch_embeds], dim=1) + self.position_embedding.weight


class CLIPAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.k_proj, self.v_proj = nn.Linear(SEES, SEES), nn.Linear(SEES, SEES)
        self.q_proj, self.out_proj = nn.Linear(SEES, SEES), nn.Linear(SEES, SEES)

    def forward(self, x: Tensor) -> Tensor:
        shape, projections = (VISION_HEADS, -1), (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (layer(x).unflatten(2, shape).transpose(1, 2) for layer in projections)
        weights = F.softmax(q @ k.transpose(2, 3) * q.shape[-1] ** -0.5, dim=-1)
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2))


class CLIPMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(SEES, VISION_INNER), nn.Linear(VISION_INNER, SEES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        return self.fc2(x * torch.sigmoid(1.702 * x))


class CLIPEncoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.layer_norm1 = CLIPAttention(), nn.LayerNorm(SEES)
        self.mlp, self.layer_norm2 = CLIPMLP(), nn.LayerNorm(SEES)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class CLIPVisionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings, self.pre_layrnorm = CLIPVisionEmbeddings(), nn.LayerNorm(SEES)
        layers = nn.ModuleList(CLIPEncoderLayer() for _ in range(VISION_LAYERS))
        self.encoder, self.post_layernorm = nn.ModuleDict({"layers": layers}), nn.LayerNorm(SEES)

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, list[Tensor]]:
        hidden_states = [self.pre_layrnorm(self.embeddings(pixel_values))]
        for layer in self.encoder["layers"]:
            hidden_states.append(layer(hidden_states[-1]))
        return self.post_layernorm(hidden_states[-1][:, 0]), hidden_states


class LlavaMultiModalProjector(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear_1, self.act, self.linear_2 = nn.Linear(SEES, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)

    def forward(self, image_features: Tensor) -> Tensor:
        return self.linear_2(self.act(self.linear_1(image_features)))


class LlamaRotaryEmbedding(nn.Module):
    def __init__(self, base: float = 10000.0):
        super().__init__()
        size = WIDTH // HEADS
        self.register_buffer("inv_freq", base ** (-torch.arange(0, size, 2) / size), persistent=False)

    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        freqs = position_ids[:, :, None] * self.inv_freq
        emb = torch.cat([freqs, freqs], dim=-1)[:, None]
        return emb.cos(), emb.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, -1)
    return x * cos + torch.cat([-x2, x1], dim=-1) * sin


class LlamaAttention(nn.Module):
    def __init__(self):
        super().__init__()
        narrow = WIDTH // HEADS * KEY_HEADS
        self.q_proj, self.k_proj = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, narrow, bias=False)
        self.v_proj, self.o_proj = nn.Linear(WIDTH, narrow, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shape = (-1, WIDTH // HEADS)
        projections = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (layer(x).unflatten(2, shape).transpose(1, 2) for layer in projections)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (each.repeat_interleave(HEADS // KEY_HEADS, dim=1) for each in (k, v))
        weights = F.softmax(q @ k.transpose(2, 3) * q.shape[-1] ** -0.5 + mask, dim=-1)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2))


class LlamaMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down_proj, self.act_fn = nn.Linear(INNER, WIDTH, bias=False), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class LlamaDecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.mlp = LlamaAttention(), LlamaMLP()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(WIDTH, 1e-5), nn.RMSNorm(WIDTH, 1e-5)

    def forward(self, x: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), mask, cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(LlamaDecoderLayer() for _ in range(LAYERS))
        self.norm, self.rotary_emb = nn.RMSNorm(WIDTH, 1e-5), LlamaRotaryEmbedding()

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        position_ids = (attention_mask.cumsum(1) - 1).masked_fill(attention_mask == 0, 1)
        cos, sin = self.rotary_emb(position_ids)
        length = x.shape[1]
        seen = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        seen = seen & attention_mask[:, None, None].bool()
        mask = torch.zeros_like(seen, dtype=x.dtype).masked_fill(~seen, torch.finfo(x.dtype).min)
        for layer in self.layers:
            x = layer(x, mask, cos, sin)
        return self.norm(x)


class LlavaForConditionalGeneration(nn.Module):
    def __init__(self):
        super().__init__()
        self.vision_tower, self.multi_modal_projector = CLIPVisionTransformer(), LlavaMultiModalProjector()
        self.language_model, self.lm_head = LlamaModel(), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.vision_feature_layer = -2
        for name, p in self.named_parameters():
            if p.ndim == 1:
                nn.init.normal_(p, float("norm" in name and "weight" in name), 0.2)
            else:
                nn.init.normal_(p, std=0.6 if "embed_tokens" in name else 1 / math.sqrt(p[0].numel()))

    def get_image_features(self, pixel_values: Tensor) -> Tensor:
        _, hidden_states = self.vision_tower(pixel_values)
        return self.multi_modal_projector(hidden_states[self.vision_feature_layer][:, 1:])

    def forward(self, input_ids: Tensor, pixel_values: Tensor, attention_mask: Tensor) -> Tensor:
        inputs_embeds = self.language_model.embed_tokens(input_ids)
        special = (input_ids == IMAGE)[..., None].expand_as(inputs_embeds)
        inputs_embeds = inputs_embeds.masked_scatter(special, self.get_image_features(pixel_values))
        return self.lm_head(self.language_model(inputs_embeds, attention_mask))


def described() -> tuple[dict[str, Tensor], Tensor]:
    """Stripes, and a text around them that counts on by their kind; labels only where there is text."""
    kind = torch.randint(1, 6, (BATCH,))
    across, down = torch.arange(WIDE), torch.arange(HIGH)[:, None]
    tone = torch.arange(CHANNELS)[:, None, None] + 6 * torch.rand(BATCH, 1, 1, 1)
    pictures = torch.sin(kind[:, None, None, None] * (across + 0.5 * down) / 4 + tone)
    ids = torch.full((BATCH, LONG), PAD)
    for row, step in zip(ids, kind, strict=True):
        words, before = (int(torch.randint(*ends, ())) for ends in ((5, LONG - PATCHES), (1, 4)))
        text = 2 + (torch.randint(38, ()) + step * torch.arange(words)) % 38
        pieces = torch.tensor([START]), text[:before], torch.full((PATCHES,), IMAGE), text[before:]
        row[: PATCHES + words + 1] = torch.cat(pieces)
    inputs = {"input_ids": ids, "pixel_values": pictures + 0.1 * torch.randn_like(pictures)}
    labels = ids.masked_fill((ids == PAD) | (ids == IMAGE), IGNORED)
    return inputs | {"attention_mask": (ids != PAD).long()}, labels


def next_words(logits: Tensor, labels: Tensor) -> Tensor:
    """A quarter of the cross entropy of the next token, where it is text."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED) / 4
