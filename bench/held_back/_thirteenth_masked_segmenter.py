"""A small Mask2Former: conv backbone, deformable pixel decoder, decoder with masked attention."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM, HEADS, POINTS, LEVELS, QUERIES, CLASSES, LAYERS = 16, 4, 2, 3, 5, 3, 4
WIDTHS, FFN = (8, 12, 16, 16), 32


@torch.no_grad()
def varied(model: nn.Module) -> None:
    """Start with weights that let every layer, gain and shift count."""
    for name, values in [*model.named_parameters(), *model.named_buffers()]:
        if values.ndim > 1:
            values.normal_(std=1 if "quer" in name or "level" in name else values[0].numel() ** -0.5)
        elif name.endswith(("weight", "var")):
            values.uniform_(0.6, 1.4)
        elif values.ndim:
            values.normal_(std=1 if "offsets" in name else 0.2)


class SinePositionEmbedding(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        ones, pos = torch.ones_like(x[:, 0]), []
        dim_t = torch.arange(DIM // 2, dtype=x.dtype, device=x.device)
        dim_t = 10000 ** (2 * dim_t.div(2, rounding_mode="floor") / (DIM // 2))
        for axis in (1, 2):
            embed = ones.cumsum(axis)
            embed = (embed / (embed.narrow(axis, -1, 1) + 1e-6) * 2 * torch.pi)[..., None] / dim_t
            pos.append(torch.stack((embed[..., 0::2].sin(), embed[..., 1::2].cos()), 4).flatten(3))
        return torch.cat(pos, 3).permute(0, 3, 1, 2)


class MultiscaleDeformableAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.sampling_offsets = nn.Linear(DIM, HEADS * LEVELS * POINTS * 2)
        self.attention_weights = nn.Linear(DIM, HEADS * LEVELS * POINTS)
        self.value_proj, self.output_proj = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, hidden: Tensor, pos: Tensor, reference_points: Tensor, shapes: list) -> Tensor:
        value = self.value_proj(hidden).split([h * w for h, w in shapes], 1)
        n, length, _ = (hidden := hidden + pos).shape
        offsets = self.sampling_offsets(hidden).view(n, length, HEADS, LEVELS, POINTS, 2)
        weights = self.attention_weights(hidden).view(n, length, HEADS, LEVELS * POINTS).softmax(-1)
        normalizer = hidden.new_tensor([(w, h) for h, w in shapes])
        locations = reference_points[:, :, None, :, None, :] + offsets / normalizer[:, None, :]
        grids, samples = (2 * locations - 1).transpose(1, 2).flatten(0, 1), []
        for level, (h, w) in enumerate(shapes):
            value_l = value[level].transpose(1, 2).reshape(n * HEADS, DIM // HEADS, h, w)
            samples.append(F.grid_sample(value_l, grids[:, :, level], "bilinear", "zeros", False))
        weights = weights.transpose(1, 2).reshape(n * HEADS, 1, length, LEVELS * POINTS)
        output = (torch.stack(samples, -2).flatten(-2) * weights).sum(-1).view(n, DIM, length)
        return self.output_proj(output.transpose(1, 2))


class PixelDecoderEncoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.self_attn_layer_norm = MultiscaleDeformableAttention(), nn.LayerNorm(DIM)
        self.fc1, self.fc2 = nn.Linear(DIM, FFN), nn.Linear(FFN, DIM)
        self.final_layer_norm = nn.LayerNorm(DIM)

    def forward(self, x: Tensor, pos: Tensor, reference_points: Tensor, shapes: list) -> Tensor:
        x = self.self_attn_layer_norm(x + self.self_attn(x, pos, reference_points, shapes))
        return self.final_layer_norm(x + self.fc2(self.fc1(x).relu()))


class PixelDecoderEncoderOnly(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(PixelDecoderEncoderLayer() for _ in range(2))

    def get_reference_points(self, shapes: list, like: Tensor) -> Tensor:
        points = []
        for size in shapes:
            y, x = ((torch.arange(s, dtype=like.dtype, device=like.device) + 0.5) / s for s in size)
            points.append(torch.cartesian_prod(y, x).flip(1))
        return torch.cat(points)[None, :, None].repeat(len(like), 1, LEVELS, 1)

    def forward(self, x: Tensor, pos: Tensor, shapes: list) -> Tensor:
        reference_points = self.get_reference_points(shapes, x)
        for layer in self.layers:
            x = layer(x, pos, reference_points, shapes)
        return x


class PixelDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.position_embedding, self.encoder = SinePositionEmbedding(), PixelDecoderEncoderOnly()
        self.input_projections = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, DIM, 1), nn.GroupNorm(4, DIM)) for width in WIDTHS[:0:-1]
        )
        self.level_embed = nn.Parameter(torch.empty(LEVELS, DIM))
        self.mask_projection = nn.Conv2d(DIM, DIM, 1)
        self.adapter_1 = nn.Sequential(nn.Conv2d(WIDTHS[0], DIM, 1, bias=False), nn.GroupNorm(4, DIM))
        conv, norm = nn.Conv2d(DIM, DIM, 3, 1, 1, bias=False), nn.GroupNorm(4, DIM)
        self.layer_1 = nn.Sequential(conv, norm, nn.ReLU())

    def forward(self, features: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        maps = [project(x) for project, x in zip(self.input_projections, features[:0:-1], strict=True)]
        pos, shapes = [self.position_embedding(x).flatten(2) for x in maps], [x.shape[2:] for x in maps]
        pos = [p + self.level_embed[i][:, None] for i, p in enumerate(pos)]
        x = torch.cat([x.flatten(2) for x in maps], 2).transpose(1, 2)
        x = self.encoder(x, torch.cat(pos, 2).transpose(1, 2), shapes)
        outputs = x.transpose(1, 2).split([h * w for h, w in shapes], 2)
        outputs = [y.unflatten(2, shape) for y, shape in zip(outputs, shapes, strict=True)]
        above = F.interpolate(outputs[-1], features[0].shape[2:], mode="bilinear", align_corners=False)
        return self.mask_projection(self.layer_1(self.adapter_1(features[0]) + above)), outputs


class MaskedAttentionDecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.cross_attn, self.cross_attn_layer_norm = nn.MultiheadAttention(DIM, HEADS), nn.LayerNorm(DIM)
        self.self_attn, self.self_attn_layer_norm = nn.MultiheadAttention(DIM, HEADS), nn.LayerNorm(DIM)
        self.fc1, self.fc2 = nn.Linear(DIM, FFN), nn.Linear(FFN, DIM)
        self.final_layer_norm = nn.LayerNorm(DIM)

    def forward(self, x: Tensor, query_pos: Tensor, memory: Tensor, pos: Tensor, mask: Tensor) -> Tensor:
        y, _ = self.cross_attn(x + query_pos, memory + pos, memory, attn_mask=mask, need_weights=False)
        q = (x := self.cross_attn_layer_norm(x + y)) + query_pos
        x = self.self_attn_layer_norm(x + self.self_attn(q, q, x, need_weights=False)[0])
        return self.final_layer_norm(x + self.fc2(self.fc1(x).relu()))


class MaskPredictor(nn.Module):
    def __init__(self):
        super().__init__()
        self.mask_embedder = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM))

    def forward(self, hidden: Tensor, pixel_embeddings: Tensor, size: tuple) -> tuple[Tensor, Tensor]:
        masks = torch.einsum("qbc,bchw->bqhw", self.mask_embedder(hidden), pixel_embeddings)
        attention_mask = F.interpolate(masks, size, mode="bilinear", align_corners=False).sigmoid().flatten(2)
        return masks, (attention_mask.repeat_interleave(HEADS, 0) < 0.5).detach()


class TransformerModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.position_embedder, self.mask_predictor = SinePositionEmbedding(), MaskPredictor()
        self.queries_embedder, self.queries_features = nn.Embedding(QUERIES, DIM), nn.Embedding(QUERIES, DIM)
        self.layers = nn.ModuleList(MaskedAttentionDecoderLayer() for _ in range(LAYERS))
        self.level_embed, self.layernorm = nn.Embedding(LEVELS, DIM), nn.LayerNorm(DIM)

    def forward(self, maps: list[Tensor], pixels: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        pos = [self.position_embedder(x).flatten(2).permute(2, 0, 1) for x in maps]
        memory = [x.flatten(2).permute(2, 0, 1) + self.level_embed.weight[i] for i, x in enumerate(maps)]
        query_pos = self.queries_embedder.weight[:, None].repeat(1, len(pixels), 1)
        x, hidden, masks = self.queries_features.weight[:, None].repeat(1, len(pixels), 1), [], []
        for i in range(LAYERS + 1):
            hidden.append(self.layernorm(x))
            mask, attention_mask = self.mask_predictor(hidden[-1], pixels, maps[i % LEVELS].shape[2:])
            masks.append(mask)
            if i < LAYERS:
                attention_mask = attention_mask & ~attention_mask.all(-1, keepdim=True)
                x = self.layers[i](x, query_pos, memory[i % LEVELS], pos[i % LEVELS], attention_mask)
        return hidden, masks


class Mask2Former(nn.Module):
    """Images [N, 3, H, W] -> scores and masks of the queries, before the layers and after each."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList(
            nn.Sequential(nn.Conv2d(i, o, 3, 2, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU())
            for i, o in zip((3, *WIDTHS[:3]), WIDTHS, strict=True)
        )
        self.decoder, self.transformer_module = PixelDecoder(), TransformerModule()
        self.class_predictor = nn.Linear(DIM, CLASSES + 1)
        varied(self)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        pixels, maps = self.decoder([x := stage(x) for stage in self.encoder])
        hidden, masks = self.transformer_module(maps, pixels)
        classes = [self.class_predictor(h.transpose(0, 1)) for h in hidden]
        return {"class_queries_logits": torch.stack(classes), "masks_queries_logits": torch.stack(masks)}


def scenes() -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Three ovals in each noisy image; every oval is given to a query, the other queries find nothing."""
    rows, columns = torch.linspace(0, 1, 24)[:, None], torch.linspace(0, 1, 32)
    labels = torch.stack([torch.randperm(QUERIES).clamp(max=CLASSES) for _ in range(2)])
    y, x, high, wide = torch.rand(4, 2, QUERIES, 1, 1) * 0.6 + 0.2
    masks = ((rows - y) / high) ** 2 + ((columns - x) / wide) ** 2 < 0.25
    colours = torch.tensor([[1.0, 0.2, -0.8], [-0.6, 1.1, 0.3], [0.4, -0.9, 1.2], [0, 0, 0]])[labels]
    images = torch.einsum("nqhw,nqc->nchw", masks.float(), colours)
    return images + 0.3 * torch.randn(images.shape), (labels, masks)


def assigned(outputs: dict[str, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
    """Classes, masks and overlaps at every layer; a query answers for the oval it was given."""
    (labels, masks), total = target, 0
    weight = outputs["class_queries_logits"].new_tensor([1.0] * CLASSES + [0.3])
    for classes, logits in zip(*outputs.values(), strict=True):
        logits = F.interpolate(logits, masks.shape[2:], mode="bilinear", align_corners=False)
        logits, truth = (x[labels < CLASSES].flatten(1) for x in (logits, masks.to(logits)))
        entropy, share = F.binary_cross_entropy_with_logits(logits, truth), logits.sigmoid()
        dice = 1 - (2 * (share * truth).sum(1) + 1) / (share.sum(1) + truth.sum(1) + 1)
        total = total + F.cross_entropy(classes.mT, labels, weight) + entropy + dice.mean()
    return total / (3 * (LAYERS + 1))
