"""A small Segment Anything: a windowed image encoder, prompts as random waves, a two-way mask decoder."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IMAGE, GRID, WIDTH, DIM, MASKS = (24, 28), (6, 7), 16, 24, 3


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class MLP(nn.Module):
    def __init__(self, *widths: int, activation: type[nn.Module] = nn.ReLU):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(widths))
        self.act = activation()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = self.act(layer(x))
        return self.layers[-1](x)


class RelPosAttention(nn.Module):
    def __init__(self, dim: int, num_heads: int, size: tuple[int, int]):
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, dim * 3), nn.Linear(dim, dim)
        self.rel_pos_h = nn.Parameter(torch.zeros(2 * size[0] - 1, dim // num_heads))
        self.rel_pos_w = nn.Parameter(torch.zeros(2 * size[1] - 1, dim // num_heads))

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, h * w, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).flatten(1, 2)
        attn, q = ((q * self.scale) @ k.mT).view(-1, h, w, h, w), q.unflatten(1, (h, w))
        at_h, at_w = (torch.arange(s)[:, None] - torch.arange(s) + s - 1 for s in (h, w))
        rel_h = torch.einsum("bhwc,hkc->bhwk", q, self.rel_pos_h[at_h])
        rel_w = torch.einsum("bhwc,wkc->bhwk", q, self.rel_pos_w[at_w])
        attn = (attn + rel_h[..., :, None] + rel_w[..., None, :]).flatten(3).flatten(1, 2).softmax(-1)
        return self.proj((attn @ v).view(b, -1, h, w, v.shape[-1]).permute(0, 2, 3, 1, 4).flatten(3))


class Block(nn.Module):
    def __init__(self, dim: int, window_size: tuple[int, int]):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.attn, self.window_size = RelPosAttention(dim, 2, window_size), window_size
        self.mlp = MLP(dim, 2 * dim, dim, activation=nn.GELU)

    def forward(self, x: Tensor) -> Tensor:
        (h, w), (m, n) = x.shape[1:3], self.window_size
        y = F.pad(self.norm1(x), (0, 0, 0, -w % n, 0, -h % m)).unflatten(2, (-1, n)).unflatten(1, (-1, m))
        windows = y.transpose(2, 3)
        y = self.attn(windows.reshape(-1, m, n, x.shape[3])).view(windows.shape).transpose(2, 3)
        x = x + y.flatten(3, 4).flatten(1, 2)[:, :h, :w]
        return x + self.mlp(self.norm2(x))


class ImageEncoderViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed, self.pos_embed = nn.Conv2d(3, WIDTH, 4, 4), nn.Parameter(torch.zeros(*GRID, WIDTH))
        self.blocks = nn.Sequential(*(Block(WIDTH, size) for size in ((4, 4), GRID, (4, 4))))
        point, wide = nn.Conv2d(WIDTH, DIM, 1, bias=False), nn.Conv2d(DIM, DIM, 3, padding=1, bias=False)
        self.neck = nn.Sequential(point, LayerNorm2d(DIM, 1e-6), wide, LayerNorm2d(DIM, 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.patch_embed(x).permute(0, 2, 3, 1) + self.pos_embed)
        return self.neck(x.permute(0, 3, 1, 2))


class PositionEmbeddingRandom(nn.Module):
    def __init__(self, num_pos_feats: int):
        super().__init__()
        self.register_buffer("positional_encoding_gaussian_matrix", torch.randn(2, num_pos_feats))

    def forward(self, coords: Tensor) -> Tensor:
        coords = 2 * torch.pi * ((2 * coords - 1) @ self.positional_encoding_gaussian_matrix)
        return torch.cat([coords.sin(), coords.cos()], -1)


class PromptEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.pe_layer = PositionEmbeddingRandom(DIM // 2)
        self.point_embeddings = nn.ModuleList(nn.Embedding(1, DIM) for _ in range(4))
        self.not_a_point_embed, self.no_mask_embed = nn.Embedding(1, DIM), nn.Embedding(1, DIM)

    def get_dense_pe(self) -> Tensor:
        grid = self.no_mask_embed.weight.new_ones(GRID)
        y, x = (grid.cumsum(0) - 0.5) / GRID[0], (grid.cumsum(1) - 0.5) / GRID[1]
        return self.pe_layer(torch.stack([x, y], -1)).permute(2, 0, 1)[None]

    def forward(self, points: Tensor, labels: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
        size, labels, unused = points.new_tensor(IMAGE[::-1]), labels[..., None], self.not_a_point_embed
        clicks = torch.where(labels == -1, unused.weight, self.pe_layer((points + 0.5) / size))
        for i in range(2):
            clicks = torch.where(labels == i, clicks + self.point_embeddings[i].weight, clicks)
        corners = self.pe_layer((boxes.reshape(-1, 2, 2) + 0.5) / size)
        corners = corners + torch.cat([embedding.weight for embedding in self.point_embeddings[2:]])
        dense = self.no_mask_embed.weight.reshape(1, -1, 1, 1).expand(len(boxes), -1, *GRID)
        return torch.cat([clicks, corners], 1), dense


class Attention(nn.Module):
    def __init__(self, dim: int, downsample_rate: int = 2, num_heads: int = 3):
        super().__init__()
        self.num_heads, inner = num_heads, dim // downsample_rate
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(dim, inner) for _ in range(3))
        self.out_proj = nn.Linear(inner, dim)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = self.q_proj(q), self.k_proj(k), self.v_proj(v)
        q, k, v = (t.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for t in (q, k, v))
        attn = (q @ k.transpose(2, 3) / q.shape[-1] ** 0.5).softmax(-1)
        return self.out_proj((attn @ v).transpose(1, 2).flatten(2))


class TwoWayAttentionBlock(nn.Module):
    def __init__(self, dim: int, skip_pe: bool):
        super().__init__()
        self.self_attn, self.mlp, self.skip_first_layer_pe = Attention(dim, 1), MLP(dim, 32, dim), skip_pe
        self.norm1, self.norm2, self.norm3, self.norm4 = (nn.LayerNorm(dim) for _ in range(4))
        self.cross_attn_token_to_image, self.cross_attn_image_to_token = Attention(dim), Attention(dim)

    def forward(self, queries: Tensor, keys: Tensor, query_pe: Tensor, key_pe: Tensor):
        q, k = queries if self.skip_first_layer_pe else queries + query_pe, keys + key_pe
        attn_out = self.self_attn(q, q, queries)
        queries = self.norm1(attn_out if self.skip_first_layer_pe else queries + attn_out)
        queries = self.norm2(queries + self.cross_attn_token_to_image(queries + query_pe, k, keys))
        queries = self.norm3(queries + self.mlp(queries))
        return queries, self.norm4(keys + self.cross_attn_image_to_token(k, queries + query_pe, queries))


class TwoWayTransformer(nn.Module):
    def __init__(self, depth: int, dim: int):
        super().__init__()
        self.layers = nn.ModuleList(TwoWayAttentionBlock(dim, i == 0) for i in range(depth))
        self.final_attn_token_to_image, self.norm_final_attn = Attention(dim), nn.LayerNorm(dim)

    def forward(self, src: Tensor, pos_src: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        queries, keys, pos_src = tokens, src.flatten(2).mT, pos_src.flatten(2).mT
        for layer in self.layers:
            queries, keys = layer(queries, keys, tokens, pos_src)
        attn_out = self.final_attn_token_to_image(queries + tokens, keys + pos_src, keys)
        return self.norm_final_attn(queries + attn_out), keys


class MaskDecoder(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.transformer, low, high = TwoWayTransformer(2, dim), dim // 4, dim // 8
        self.iou_token, self.mask_tokens = nn.Embedding(1, dim), nn.Embedding(MASKS, dim)
        first, second = nn.ConvTranspose2d(dim, low, 2, 2), nn.ConvTranspose2d(low, high, 2, 2)
        self.output_upscaling = nn.Sequential(first, LayerNorm2d(low, 1e-6), nn.GELU(), second, nn.GELU())
        self.output_hypernetworks_mlps = nn.ModuleList(MLP(dim, dim, dim, high) for _ in range(MASKS))
        self.iou_prediction_head = MLP(dim, 16, 16, MASKS)

    def forward(self, image_embeddings: Tensor, image_pe: Tensor, sparse: Tensor, dense: Tensor):
        tokens = torch.cat([self.iou_token.weight, self.mask_tokens.weight]).expand(len(sparse), -1, -1)
        hs, src = self.transformer(image_embeddings + dense, image_pe, torch.cat([tokens, sparse], 1))
        upscaled = self.output_upscaling(src.mT.unflatten(2, GRID))
        hyper_in = [mlp(hs[:, 1 + i]) for i, mlp in enumerate(self.output_hypernetworks_mlps)]
        masks = (torch.stack(hyper_in, 1) @ upscaled.flatten(2)).unflatten(2, upscaled.shape[2:])
        return masks, self.iou_prediction_head(hs[:, 0])


class Sam(nn.Module):
    def __init__(self):
        super().__init__()
        self.image_encoder, self.prompt_encoder = ImageEncoderViT(), PromptEncoder()
        self.mask_decoder = MaskDecoder(DIM)
        for name, p in self.named_parameters():
            gain = p.ndim == 1 and name.endswith("weight")
            nn.init.normal_(p, float(gain), 0.25 if p.ndim == 1 else 1.2 * p[0].numel() ** -0.5)

    def forward(self, images: Tensor, points: Tensor, labels: Tensor, boxes: Tensor) -> dict[str, Tensor]:
        sparse, dense = self.prompt_encoder(points, labels, boxes)
        features, image_pe = self.image_encoder(images), self.prompt_encoder.get_dense_pe()
        masks, iou_predictions = self.mask_decoder(features, image_pe, sparse, dense)
        return {"masks": masks, "iou_predictions": iou_predictions}


def prompted() -> tuple[dict[str, Tensor], Tensor]:
    """Bright ellipses under noise, each with three clicks (some unused) and a loose box around it."""
    place = torch.stack(torch.meshgrid(torch.arange(28), torch.arange(24), indexing="xy"), -1)
    middle, radius = 8 + 8 * torch.rand(2, 1, 2), 4 + 3 * torch.rand(2, 1, 2)
    target = (((place - middle[:, None]) / radius[:, None]).square().sum(-1) < 1).float()
    images = 0.8 * target[:, None] * torch.randn(2, 3, 1, 1) + 0.5 * torch.randn(2, 3, *IMAGE)
    clicks, unused = torch.randn(2, 3, 2), torch.tensor([[False, False, True], [False, True, False]])
    points, labels = middle + radius * clicks, (clicks.square().sum(-1) < 1).long().masked_fill(unused, -1)
    boxes = torch.cat([middle - radius, middle + radius], 2)[:, 0] + torch.randn(2, 4)
    return {"images": images, "points": points, "labels": labels, "boxes": boxes}, target


def segmented(outputs: dict[str, Tensor], target: Tensor) -> Tensor:
    """Focal and dice loss of every mask, and the error of its predicted overlap."""
    logits, truth = outputs["masks"].flatten(2), target.flatten(1)[:, None].expand(-1, MASKS, -1)
    shares, entropy = logits.sigmoid(), F.binary_cross_entropy_with_logits(logits, truth, reduction="none")
    both, sizes = (shares * truth).sum(2), shares.sum(2) + truth.sum(2)
    focal, dice = (entropy * (shares - truth).square()).mean(), 1 - (2 * both + 1) / (sizes + 1)
    return 20 * focal + dice.mean() + F.mse_loss(outputs["iou_predictions"], (both / (sizes - both)).detach())
