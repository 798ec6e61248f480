"""A small Segment Anything: its image encoder of windows and one whole map, and masks for given points."""

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

COLOURS, PATCH, HIGH, WIDE, WIDTH, HEADS, INNER = 3, 4, 7, 5, 20, 2, 40
WINDOW, GLOBAL, TRAINED, OUTPUT, IMAGES, POINTS = 3, (2,), (8, 6), 16, 3, 5
SIZE = PATCH * HIGH, PATCH * WIDE


def named(**parts: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(parts))


class SamLayerNorm(nn.LayerNorm):
    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class SamVisionAttention(nn.Module):
    """All cells of a map attend to each other; the tables may be those of a map of another size."""

    def __init__(self, input_size: tuple[int, int]):
        super().__init__()
        self.scale = (WIDTH // HEADS) ** -0.5
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        tables = (0.35 * torch.randn(2 * size - 1, WIDTH // HEADS) for size in input_size)
        self.rel_pos_h, self.rel_pos_w = map(nn.Parameter, tables)

    def get_rel_pos(self, size: int, rel_pos: Tensor) -> Tensor:
        """A row of the table, stretched to the size, for each query and key: [Q, K, D]."""
        resized = F.interpolate(rel_pos.T[None], size=2 * size - 1, mode="linear")[0].T
        coords = torch.arange(size, device=rel_pos.device)
        return resized[coords[:, None] - coords + size - 1]

    def get_decomposed_rel_pos(self, query: Tensor, height: int, width: int) -> Tensor:
        query = query.unflatten(1, (height, width))
        rel_h = torch.einsum("bhwc,hkc->bhwk", query, self.get_rel_pos(height, self.rel_pos_h))
        rel_w = torch.einsum("bhwc,wkc->bhwk", query, self.get_rel_pos(width, self.rel_pos_w))
        return (rel_h[:, :, :, :, None] + rel_w[:, :, :, None, :]).flatten(3).flatten(1, 2)

    def forward(self, hidden_states: Tensor) -> Tensor:
        count, height, width, _ = hidden_states.shape
        qkv = self.qkv(hidden_states).reshape(count, height * width, 3, HEADS, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).flatten(1, 2).unbind(0)
        attn_weights = (query * self.scale) @ key.transpose(-2, -1)
        attn_weights = attn_weights + self.get_decomposed_rel_pos(query, height, width)
        attn_output = (attn_weights.softmax(-1) @ value).reshape(count, -1, height, width, WIDTH // HEADS)
        return self.proj(attn_output.permute(0, 2, 3, 1, 4).flatten(3))


class SamVisionLayer(nn.Module):
    def __init__(self, window_size: int):
        super().__init__()
        self.layer_norm1, self.layer_norm2 = (nn.LayerNorm(WIDTH, eps=1e-6) for _ in range(2))
        self.attn = SamVisionAttention((window_size, window_size) if window_size else TRAINED)
        self.mlp = named(lin1=nn.Linear(WIDTH, INNER), act=nn.GELU(), lin2=nn.Linear(INNER, WIDTH))
        self.window_size = window_size

    def window_partition(self, hidden_states: Tensor) -> tuple[Tensor, tuple]:
        size, (_, height, width, _) = self.window_size, hidden_states.shape
        padded = F.pad(hidden_states, (0, 0, 0, -width % size, 0, -height % size))
        windows = padded.unflatten(2, (-1, size)).unflatten(1, (-1, size)).transpose(2, 3)
        return windows.flatten(0, 2), windows.shape[1:3]

    def window_unpartition(self, windows: Tensor, counts: tuple, height: int, width: int) -> Tensor:
        hidden_states = windows.unflatten(0, (-1, *counts)).transpose(2, 3)
        return hidden_states.flatten(3, 4).flatten(1, 2)[:, :height, :width]

    def forward(self, hidden_states: Tensor) -> Tensor:
        residual, hidden_states = hidden_states, self.layer_norm1(hidden_states)
        if self.window_size:
            hidden_states, counts = self.window_partition(hidden_states)
        hidden_states = self.attn(hidden_states)
        if self.window_size:
            hidden_states = self.window_unpartition(hidden_states, counts, *residual.shape[1:3])
        hidden_states = residual + hidden_states
        return hidden_states + self.mlp(self.layer_norm2(hidden_states))


class SamVisionEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = named(projection=nn.Conv2d(COLOURS, WIDTH, PATCH, PATCH))
        self.pos_embed = nn.Parameter(0.5 * torch.randn(1, HIGH, WIDE, WIDTH))
        self.layers = nn.ModuleList(SamVisionLayer(0 if i in GLOBAL else WINDOW) for i in range(3))
        one, two = (
            nn.Conv2d(WIDTH, OUTPUT, 1, bias=False),
            nn.Conv2d(OUTPUT, OUTPUT, 3, padding=1, bias=False),
        )
        norms = [SamLayerNorm(OUTPUT, eps=1e-6) for _ in range(2)]
        self.neck = named(conv1=one, layer_norm1=norms[0], conv2=two, layer_norm2=norms[1])

    def forward(self, pixel_values: Tensor) -> Tensor:
        hidden_states = self.patch_embed(pixel_values).permute(0, 2, 3, 1) + self.pos_embed
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return self.neck(hidden_states.permute(0, 3, 1, 2))


class SamPositionalEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("positional_embedding", 0.5 * torch.randn(2, OUTPUT // 2))

    def forward(self, coordinates: Tensor) -> Tensor:
        angles = 2 * math.pi * ((2 * coordinates - 1) @ self.positional_embedding)
        return torch.cat([angles.sin(), angles.cos()], -1)


class SamPromptEncoder(nn.Module):
    """Points (x, y) in pixels [N, P, 2], inside (1), outside (0) or none at all (-1) -> [N, P, C]."""

    def __init__(self, shared_embedding: SamPositionalEmbedding):
        super().__init__()
        self.shared_embedding, self.not_a_point_embed = shared_embedding, nn.Embedding(1, OUTPUT)
        self.point_embed = nn.ModuleList(nn.Embedding(1, OUTPUT) for _ in range(2))

    def forward(self, input_points: Tensor, input_labels: Tensor) -> Tensor:
        points, labels = input_points + 0.5, input_labels[..., None]
        embedding = self.shared_embedding(torch.stack([points[..., i] / SIZE[1 - i] for i in (0, 1)], -1))
        embedding = torch.where(labels == -1, self.not_a_point_embed.weight, embedding)
        embedding = torch.where(labels == 0, embedding + self.point_embed[0].weight, embedding)
        return torch.where(labels == 1, embedding + self.point_embed[1].weight, embedding)


class SamMaskDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.mask_tokens = nn.Embedding(1, OUTPUT)
        first, last, self.iou_prediction_head = (nn.Linear(OUTPUT, n) for n in (OUTPUT, OUTPUT, 1))
        self.output_hypernetworks_mlp = nn.Sequential(first, nn.ReLU(), last)

    def forward(self, image_embeddings: Tensor, image_pe: Tensor, prompts: Tensor) -> tuple[Tensor, Tensor]:
        tokens, source = prompts + self.mask_tokens.weight, (image_embeddings + image_pe).flatten(2)
        masks = self.output_hypernetworks_mlp(tokens) @ source / OUTPUT**0.5
        iou_scores = self.iou_prediction_head(tokens + masks.softmax(-1) @ source.mT).squeeze(-1)
        return masks.unflatten(-1, image_embeddings.shape[2:]), iou_scores


class SamModel(nn.Module):
    """Images [N, 3, H, W] and points in them -> a mask and its quality for each point, and the map."""

    def __init__(self):
        super().__init__()
        self.shared_image_embedding, self.vision_encoder = SamPositionalEmbedding(), SamVisionEncoder()
        self.prompt_encoder = SamPromptEncoder(self.shared_image_embedding)
        self.mask_decoder = SamMaskDecoder()
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                nn.init.uniform_(module.weight, 0.6, 1.4)
            elif isinstance(module, nn.Linear | nn.Conv2d | nn.Embedding):
                nn.init.xavier_uniform_(module.weight)
            if getattr(module, "bias", None) is not None:
                nn.init.normal_(module.bias, std=0.2)

    def forward(self, pixel_values: Tensor, input_points: Tensor, input_labels: Tensor) -> dict:
        across, down = ((torch.arange(n).to(pixel_values) + 0.5) / n for n in (WIDE, HIGH))
        places = torch.stack(torch.meshgrid(across, down, indexing="xy"), -1)
        image_pe = self.shared_image_embedding(places).permute(2, 0, 1)[None]
        image_embeddings = self.vision_encoder(pixel_values)
        prompts = self.prompt_encoder(input_points, input_labels)
        masks, iou_scores = self.mask_decoder(image_embeddings, image_pe, prompts)
        return {"pred_masks": masks, "iou_scores": iou_scores, "image_embeddings": image_embeddings}


def scene() -> tuple[dict[str, Tensor], Tensor]:
    """A striped box before a plain ground: the mask of a point is what it lies on, or all else."""
    x, y, images = torch.arange(SIZE[1]), torch.arange(SIZE[0])[:, None], torch.arange(IMAGES)[:, None]
    ends = (0, 10), (0, 14), (6, 11), (8, 15)
    left, top, wide, high = (torch.randint(*pair, (IMAGES, 1, 1)) for pair in ends)
    box = (x >= left) & (x < left + wide) & (y >= top) & (y < top + high)
    ground, paint = torch.randn(2, IMAGES, COLOURS, 1, 1)
    paint = paint + torch.sin(1.5 * (x + y) + 6 * torch.rand(IMAGES, 1, 1, 1))
    pixels = torch.where(box[:, None], paint, ground) + 0.1 * torch.randn(IMAGES, COLOURS, *SIZE)
    chosen = torch.multinomial(box.flatten(1) + 0.2, POINTS)
    labels = torch.tensor([1, 0, 1, -1, 1]).repeat(IMAGES, 1)
    same, signs = box.flatten(1)[images, chosen][..., None, None] == box[:, None], labels[..., None, None]
    wanted = torch.where(signs == 1, same, ~same) & (signs >= 0)
    points = torch.stack([chosen % SIZE[1], chosen // SIZE[1]], -1).to(pixels)
    given = {"pixel_values": pixels, "input_points": points, "input_labels": labels}
    return given, F.avg_pool2d(wanted.to(pixels), PATCH)


def missed(outputs: dict[str, Tensor], target: Tensor) -> Tensor:
    """Cross entropy and dice of the masks, and squares of what is missed of their quality."""
    masks, target = outputs["pred_masks"].flatten(2), target.to(outputs["pred_masks"]).flatten(2)
    shares, entropy = masks.sigmoid(), F.binary_cross_entropy_with_logits(masks, target)
    both, each = (shares * target).sum(-1), (shares + target).sum(-1)
    off = outputs["iou_scores"] - (both / (each - both + 1)).detach()
    return entropy + (1 - (2 * both + 1) / (each + 1)).mean() + 0.2 * off.square().mean()
