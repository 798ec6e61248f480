"""A small OpenFlamingo: patches of several images, a resampler, gated looks between decoder blocks."""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VISION, TEXT, WORDS, MEDIA, IMAGES = 16, 24, 40, 39, 3


def varied(module: nn.Module) -> None:
    """Start with weights that let every layer, gain, shift and gate count."""
    for name, weight in module.named_parameters(recurse=False):
        if name.endswith("gate") or (isinstance(module, nn.LayerNorm) and name == "weight"):
            nn.init.uniform_(weight, 0.5, 1.4)
        elif weight.ndim > 1:
            nn.init.normal_(weight, std=1.2 * weight[0].numel() ** -0.5)
        else:
            nn.init.normal_(weight, std=0.2)


def two_layers(dim: int, first: str, act: str, last: str, bias: bool) -> nn.Sequential:
    up, down = nn.Linear(dim, 2 * dim, bias=bias), nn.Linear(2 * dim, dim, bias=bias)
    return nn.Sequential(OrderedDict({first: up, act: nn.GELU(), last: down}))


def feed_forward(dim: int) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(dim), *two_layers(dim, "up", "act", "down", False))


def by_head(heads: int, *rows: Tensor) -> list[Tensor]:
    return [x.unflatten(-1, (heads, -1)).transpose(-3, -2) for x in rows]


class VisionTransformer(nn.Module):
    """Images [N, 3, 12, 12] -> tokens of their patches [N, 9, D], each worked on alone."""

    def __init__(self, width: int):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 4, 4, bias=False)
        self.positional_embedding = nn.Parameter(torch.zeros(9, width))
        self.ln_pre, self.ln_2, self.ln_post = (nn.LayerNorm(width) for _ in range(3))
        self.mlp = two_layers(width, "c_fc", "gelu", "c_proj", True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.ln_pre(self.conv1(x).flatten(2).transpose(1, 2) + self.positional_embedding)
        return self.ln_post(x + self.mlp(self.ln_2(x)))


class PerceiverAttention(nn.Module):
    def __init__(self, dim: int, dim_head: int = 8, heads: int = 2):
        super().__init__()
        self.scale, self.heads, inner = dim_head**-0.5, heads, dim_head * heads
        self.norm_media, self.norm_latents = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.to_q, self.to_kv = nn.Linear(dim, inner, bias=False), nn.Linear(dim, inner * 2, bias=False)
        self.to_out = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor, latents: Tensor) -> Tensor:
        x, latents = self.norm_media(x), self.norm_latents(latents)
        kv = self.to_kv(torch.cat((x, latents), dim=-2)).chunk(2, dim=-1)
        q, k, v = by_head(self.heads, self.to_q(latents), *kv)
        sim = (q * self.scale) @ k.transpose(-1, -2)
        out = (sim - sim.amax(dim=-1, keepdim=True).detach()).softmax(dim=-1) @ v
        return self.to_out(out.transpose(-3, -2).flatten(-2))


class PerceiverResampler(nn.Module):
    """Patches [B, T, F, V, D] -> latents of each image [B, T, N, D]."""

    def __init__(self, dim: int, depth: int = 2, num_latents: int = 3, max_num_media: int = 4):
        super().__init__()
        self.latents = nn.Parameter(torch.zeros(num_latents, dim))
        self.media_time_embs = nn.Parameter(torch.zeros(max_num_media, 1, dim))
        pairs = ([PerceiverAttention(dim), feed_forward(dim)] for _ in range(depth))
        self.layers, self.norm = nn.ModuleList(nn.ModuleList(pair) for pair in pairs), nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(2, 3) + self.media_time_embs[: x.shape[1]]
        latents = self.latents.expand(*x.shape[:2], -1, -1)
        for attn, ff in self.layers:
            latents = attn(x, latents) + latents
            latents = ff(latents) + latents
        return self.norm(latents)


class MaskedCrossAttention(nn.Module):
    """Each token looks at the latest image up to it; a token before all images at none."""

    def __init__(self, dim: int, dim_visual: int, dim_head: int = 8, heads: int = 2):
        super().__init__()
        self.scale, self.heads, inner = dim_head**-0.5, heads, dim_head * heads
        self.norm, self.to_q = nn.LayerNorm(dim), nn.Linear(dim, inner, bias=False)
        self.to_kv = nn.Linear(dim_visual, inner * 2, bias=False)
        self.to_out = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor, media: Tensor, media_locations: Tensor) -> Tensor:
        kv = self.to_kv(media.flatten(1, 2)).chunk(2, dim=-1)
        q, k, v = by_head(self.heads, self.to_q(self.norm(x)), *kv)
        sim = (q * self.scale) @ k.transpose(-1, -2)
        media_time = torch.arange(1, media.shape[1] + 1, device=x.device).repeat_interleave(media.shape[2])
        text_time = media_locations.cumsum(dim=-1)[:, None, :, None]
        sim = sim.masked_fill(text_time != media_time, -torch.finfo(sim.dtype).max)
        attn = (sim - sim.amax(dim=-1, keepdim=True).detach()).softmax(dim=-1)
        out = attn.masked_fill(text_time == 0, 0.0) @ v
        return self.to_out(out.transpose(-3, -2).flatten(-2))


class GatedCrossAttentionBlock(nn.Module):
    def __init__(self, dim: int, dim_visual: int):
        super().__init__()
        self.attn, self.ff = MaskedCrossAttention(dim, dim_visual), feed_forward(dim)
        self.attn_gate, self.ff_gate = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, media: Tensor, media_locations: Tensor) -> Tensor:
        x = self.attn(x, media, media_locations) * self.attn_gate.tanh() + x
        return self.ff(x) * self.ff_gate.tanh() + x


class MultiheadAttention(nn.Module):
    """Causal, with queries and keys normalised over all heads at once, and a bias by distance."""

    def __init__(self, d_model: int, n_heads: int):
        super().__init__()
        self.n_heads, self.softmax_scale = n_heads, (d_model // n_heads) ** -0.5
        self.Wqkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.q_ln, self.k_ln = nn.LayerNorm(d_model, bias=False), nn.LayerNorm(d_model, bias=False)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor, attn_bias: Tensor) -> Tensor:
        q, k, v = self.Wqkv(x).chunk(3, dim=2)
        q, k, v = by_head(self.n_heads, self.q_ln(q), self.k_ln(k), v)
        weight = q @ k.transpose(-1, -2) * self.softmax_scale + attn_bias
        later = torch.ones(weight.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        weight = weight.masked_fill(later, torch.finfo(weight.dtype).min).softmax(-1)
        return self.out_proj((weight @ v).transpose(-3, -2).flatten(-2))


class GPTBlock(nn.Module):
    def __init__(self, d_model: int, n_heads: int):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(d_model, bias=False), nn.LayerNorm(d_model, bias=False)
        self.attn = MultiheadAttention(d_model, n_heads)
        self.mlp = two_layers(d_model, "mlp_up", "mlp_act", "mlp_down", False)

    def forward(self, x: Tensor, attn_bias: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x), attn_bias)
        return x + self.mlp(self.ln_2(x))


class MosaicGPT(nn.Module):
    def __init__(self, heads: int = 4, layers: int = 3):
        super().__init__()
        self.heads, blocks = heads, nn.ModuleList(GPTBlock(TEXT, heads) for _ in range(layers))
        rest = {"blocks": blocks, "ln_f": nn.LayerNorm(TEXT, bias=False)}
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(WORDS, TEXT)} | rest)
        looks = (GatedCrossAttentionBlock(TEXT, VISION) for _ in range(layers))
        self.gated_cross_attn_layers = nn.ModuleList(looks)

    def forward(self, lang_x: Tensor, vis_x: Tensor) -> Tensor:
        x, length = self.transformer.wte(lang_x), lang_x.shape[1]
        slopes = 2.0 ** -(torch.arange(1, self.heads + 1).to(x) * (8 / self.heads))
        attn_bias = slopes[:, None, None] * torch.arange(1 - length, 1).to(x)
        for look, block in zip(self.gated_cross_attn_layers, self.transformer.blocks, strict=True):
            x = block(look(x, vis_x, lang_x == MEDIA), attn_bias)
        return F.linear(self.transformer.ln_f(x), self.transformer.wte.weight)


class Flamingo(nn.Module):
    """Images [B, T, F, 3, H, W] and tokens [B, L] -> scores of the next token [B, L, words]."""

    def __init__(self):
        super().__init__()
        self.vision_encoder, self.perceiver = VisionTransformer(VISION), PerceiverResampler(VISION)
        self.lang_encoder = MosaicGPT()
        self.apply(varied)

    def forward(self, vision_x: Tensor, lang_x: Tensor) -> Tensor:
        tokens = self.vision_encoder(vision_x.flatten(0, 2)).unflatten(0, vision_x.shape[:3])
        return self.lang_encoder(lang_x, self.perceiver(tokens))


def captions() -> tuple[dict[str, Tensor], Tensor]:
    """Two documents of three images; the second mentions but two of them."""
    tokens = torch.randint(MEDIA, (2, 15))
    places = torch.tensor([2, 6, 10]) + torch.randint(4, (2, IMAGES))
    places[1, 2] = places[1, 1]
    tokens = tokens.scatter(1, places, MEDIA)
    images = torch.randn(2, IMAGES, 1, 3, 12, 12)
    return {"vision_x": images, "lang_x": tokens}, tokens.masked_fill(tokens == MEDIA, -100)


def next_word(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
