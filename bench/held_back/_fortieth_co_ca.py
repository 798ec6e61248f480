"""A small CoCa: a ViT, an attentional pooler, and a text decoder whose second half reads the picture."""

import torch
import torch.nn.functional as F
from torch import Tensor, einsum, nn

COLOURS, HIGH, WIDE, PATCH = 3, 8, 12, 4
IMAGE_DIM, DIM, HEADS, DIM_HEAD, INNER, LATENTS = 17, 20, 3, 6, 26, 14
DEPTH, QUERIES, TOKENS, LENGTH, PAIRS = 2, 5, 37, 9, 4


class Residual(nn.Module):
    def __init__(self, fn: nn.Module):
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor, *args: Tensor) -> Tensor:
        return self.fn(x, *args) + x


class EmbedToLatents(nn.Module):
    def __init__(self, dim: int, dim_latents: int):
        super().__init__()
        self.to_latents = nn.Linear(dim, dim_latents, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.to_latents(x), dim=-1)


class RotaryEmbedding(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / (10000 ** (torch.arange(0, dim, 2).float() / dim)))

    def forward(self, length: int) -> Tensor:
        freqs = torch.arange(length).to(self.inv_freq)[:, None] * self.inv_freq
        return torch.cat((freqs, freqs), dim=-1)


def apply_rotary_pos_emb(pos: Tensor, t: Tensor) -> Tensor:
    x1, x2 = t.chunk(2, dim=-1)
    return t * pos.cos() + torch.cat((-x2, x1), dim=-1) * pos.sin()


class SwiGLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x, gate = x.chunk(2, dim=-1)
        return F.silu(gate) * x


class ParallelTransformerBlock(nn.Module):
    """Attention of one head of keys and values, and a feedforward beside it; turned where it is causal."""

    def __init__(self, dim: int, causal: bool = True):
        super().__init__()
        self.causal = causal
        self.fused_dims = (HEADS * DIM_HEAD, DIM_HEAD, DIM_HEAD, 2 * INNER)
        self.scale, self.norm, self.rotary_emb = DIM_HEAD**-0.5, nn.LayerNorm(dim), RotaryEmbedding(DIM_HEAD)
        self.fused_attn_ff_proj = nn.Linear(dim, sum(self.fused_dims), bias=False)
        self.attn_out = nn.Linear(HEADS * DIM_HEAD, dim, bias=False)
        self.ff_out = nn.Sequential(SwiGLU(), nn.Linear(INNER, dim, bias=False))

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        n = x.shape[1]
        q, k, v, ff = self.fused_attn_ff_proj(self.norm(x)).split(self.fused_dims, dim=-1)
        q, positions = q.unflatten(-1, (HEADS, -1)).transpose(1, 2), self.rotary_emb(n)
        if self.causal:
            q, k = apply_rotary_pos_emb(positions, q), apply_rotary_pos_emb(positions, k)
        sim = einsum("b h i d, b j d -> b h i j", q * self.scale, k)
        if self.causal:
            causal = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
            sim = sim.masked_fill(causal, -torch.finfo(sim.dtype).max)
        if attn_mask is not None:
            sim = sim.masked_fill(~attn_mask[:, None], -torch.finfo(sim.dtype).max)
        attn = (sim - sim.amax(dim=-1, keepdim=True).detach()).softmax(dim=-1)
        out = einsum("b h i j, b j d -> b h i d", attn, v).transpose(1, 2).flatten(2)
        return self.attn_out(out) + self.ff_out(ff)


class CrossAttention(nn.Module):
    def __init__(self, dim: int, context_dim: int, parallel_ff: bool = False, norm_context: bool = False):
        super().__init__()
        self.scale, self.norm = DIM_HEAD**-0.5, nn.LayerNorm(dim)
        self.context_norm = nn.LayerNorm(context_dim) if norm_context else nn.Identity()
        self.to_q = nn.Linear(dim, HEADS * DIM_HEAD, bias=False)
        self.to_kv = nn.Linear(context_dim, 2 * DIM_HEAD, bias=False)
        self.to_out, self.ff = nn.Linear(HEADS * DIM_HEAD, dim, bias=False), None
        if parallel_ff:
            up, down = nn.Linear(dim, 2 * INNER, bias=False), nn.Linear(INNER, dim, bias=False)
            self.ff = nn.Sequential(up, SwiGLU(), down)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        x, context = self.norm(x), self.context_norm(context)
        q = self.to_q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) * self.scale
        k, v = self.to_kv(context).chunk(2, dim=-1)
        attn = einsum("b h i d, b j d -> b h i j", q, k).softmax(dim=-1)
        out = self.to_out(einsum("b h i j, b j d -> b h i d", attn, v).transpose(1, 2).flatten(2))
        return out if self.ff is None else out + self.ff(x)


class ViT(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.to_patch_embedding = nn.Linear(COLOURS * PATCH**2, dim)
        self.pos_embedding = nn.Parameter(0.4 * torch.randn(1, HIGH * WIDE // PATCH**2, dim))
        blocks = (Residual(ParallelTransformerBlock(dim, causal=False)) for _ in range(DEPTH))
        self.layers, self.norm = nn.ModuleList(blocks), nn.LayerNorm(dim)

    def forward(self, img: Tensor) -> Tensor:
        x = img.unflatten(3, (-1, PATCH)).unflatten(2, (-1, PATCH)).permute(0, 2, 4, 3, 5, 1)
        x = self.to_patch_embedding(x.flatten(3).flatten(1, 2)) + self.pos_embedding
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class CoCa(nn.Module):
    """Tokens (0 is padding) and pictures -> caption logits, and similarities of pictures by texts' rows."""

    def __init__(self):
        super().__init__()
        self.pad_id, self.token_emb = 0, nn.Embedding(TOKENS, DIM)
        self.text_cls_token, self.img_encoder = nn.Parameter(torch.randn(DIM)), ViT(IMAGE_DIM)
        self.img_queries = nn.Parameter(torch.randn(QUERIES, DIM))
        self.img_attn_pool = CrossAttention(DIM, IMAGE_DIM, norm_context=True)
        self.img_attn_pool_norm, self.text_cls_norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.img_to_latents, self.text_to_latents = EmbedToLatents(DIM, LATENTS), EmbedToLatents(DIM, LATENTS)
        self.temperature = nn.Parameter(torch.tensor([0.8]))
        self.unimodal_layers = nn.ModuleList(Residual(ParallelTransformerBlock(DIM)) for _ in range(DEPTH))
        self.multimodal_layers = nn.ModuleList()
        for _ in range(DEPTH):
            block, cross = ParallelTransformerBlock(DIM), CrossAttention(DIM, DIM, parallel_ff=True)
            self.multimodal_layers.append(nn.ModuleList([Residual(block), Residual(cross)]))
        self.to_logits = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, TOKENS, bias=False))
        self.to_logits[-1].weight = self.token_emb.weight
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                nn.init.normal_(module.weight, 1.0, 0.2), nn.init.normal_(module.bias, 0.0, 0.2)
        nn.init.normal_(self.token_emb.weight, std=0.3)

    def embed_text(self, text: Tensor) -> tuple[Tensor, Tensor]:
        batch, seq = text.shape
        tokens = torch.cat((self.token_emb(text), self.text_cls_token.expand(batch, 1, -1)), dim=1)
        attn_mask = F.pad((text != self.pad_id)[:, None], (0, 1, seq, 0), value=True)
        for layer in self.unimodal_layers:
            tokens = layer(tokens, attn_mask)
        return self.text_cls_norm(tokens[:, -1]), tokens[:, :-1]

    def embed_image(self, images: Tensor) -> tuple[Tensor, Tensor]:
        image_tokens = self.img_encoder(images)
        queries = self.img_queries.expand(len(images), -1, -1)
        pooled = self.img_attn_pool_norm(self.img_attn_pool(queries, image_tokens))
        return pooled[:, 0], pooled[:, 1:]

    def forward(self, text: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
        (text_embeds, tokens), (image_embeds, image_tokens) = self.embed_text(text), self.embed_image(images)
        for block, cross in self.multimodal_layers:
            tokens = cross(block(tokens), image_tokens)
        text_latents, image_latents = self.text_to_latents(text_embeds), self.img_to_latents(image_embeds)
        sim = einsum("i d, j d -> i j", text_latents, image_latents) * self.temperature.exp()
        return self.to_logits(tokens), sim


def captions() -> tuple[dict[str, Tensor], Tensor]:
    """Tinted waves, and texts that count on from a start by the tint, of several lengths."""
    tint, start = torch.randint(1, 5, (PAIRS, 1)), torch.randint(0, TOKENS, (PAIRS, 1))
    text = 1 + (start + tint * torch.arange(LENGTH + 1)) % (TOKENS - 1)
    text[torch.arange(LENGTH + 1) >= torch.randint(4, LENGTH + 1, (PAIRS, 1))] = 0
    place = torch.arange(HIGH)[:, None] / 3 + torch.arange(WIDE) / 2 + torch.arange(COLOURS)[:, None, None]
    images = torch.sin(tint[..., None, None] * place + start[..., None, None] / 9)
    return {"text": text[:, :-1], "images": images + 0.1 * torch.randn_like(images)}, text[:, 1:]


def caption_and_contrast(outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """The cross entropy of the next tokens, twice, and the contrastive one both ways, by eight."""
    (logits, sim), index = outputs, torch.arange(len(labels), device=labels.device)
    contrast = (F.cross_entropy(sim, index) + F.cross_entropy(sim.T, index)) / 2
    return (2 * F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=0) + contrast) / 8
