"""A small Grounding DINO: phrases and a picture in, boxes and their likeness to each token out."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, TEXT, FUSED, HEADS, POINTS, QUERIES = 16, 12, 20, 2, 3, 5
WORDS, LONG, LONGEST, LOW, SHAPES = 23, 10, 13, -20.0, ((4, 6), (2, 3))


def masks_with_special_tokens(input_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Who sees whom within a phrase, and positions that start again at each."""
    n, long = input_ids.shape
    mask = torch.eye(long, dtype=torch.bool, device=input_ids.device).repeat(n, 1, 1)
    position_ids, previous = torch.zeros_like(input_ids), 0
    for row, col in ((input_ids > 0) & (input_ids < 4)).nonzero().tolist():
        if col not in (0, long - 1):
            mask[row, previous + 1 : col + 1, previous + 1 : col + 1] = True
            position_ids[row, previous + 1 : col + 1] = torch.arange(col - previous, device=input_ids.device)
        previous = col
    return mask, position_ids


def sine(position: Tensor, width: int, temperature: float = 10000) -> Tensor:
    dim = torch.arange(width).to(position)
    x = position[..., None] / temperature ** (2 * (dim // 2) / width)
    return torch.stack((x[..., 0::2].sin(), x[..., 1::2].cos()), -1).flatten(-2)


def mlp(wide: int, last: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(wide, WIDTH), nn.ReLU(), nn.Linear(WIDTH, last))


class TextLayer(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int, act: nn.Module):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.linear1, self.act, self.linear2 = nn.Linear(width, hidden), act, nn.Linear(hidden, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor, pos: Tensor | float = 0.0) -> Tensor:
        q, mask = x + pos, ~mask.repeat_interleave(self.self_attn.num_heads, 0)
        x = self.norm1(x + self.self_attn(q, q, x, attn_mask=mask, need_weights=False)[0])
        return self.norm2(x + self.linear2(self.act(self.linear1(x))))


class BertModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings, self.position_embeddings = nn.Embedding(WORDS, TEXT), nn.Embedding(LONG, TEXT)
        self.LayerNorm = nn.LayerNorm(TEXT)
        self.layer = nn.ModuleList(TextLayer(TEXT, 3, 22, nn.GELU()) for _ in range(2))

    def forward(self, input_ids: Tensor, mask: Tensor, position_ids: Tensor) -> Tensor:
        x = self.LayerNorm(self.word_embeddings(input_ids) + self.position_embeddings(position_ids))
        for layer in self.layer:
            x = layer(x, mask)
        return x


class BiAttentionBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer_norm_v, self.layer_norm_l = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.v_proj, self.l_proj = nn.Linear(WIDTH, FUSED), nn.Linear(WIDTH, FUSED)
        self.values_v_proj, self.values_l_proj = nn.Linear(WIDTH, FUSED), nn.Linear(WIDTH, FUSED)
        self.out_v_proj, self.out_l_proj = nn.Linear(FUSED, WIDTH), nn.Linear(FUSED, WIDTH)
        self.gamma_v, self.gamma_l = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, v: Tensor, text: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        v, t = self.layer_norm_v(v), self.layer_norm_l(text)
        ends = (
            self.v_proj(v) * (FUSED // HEADS) ** -0.5,
            self.l_proj(t),
            self.values_v_proj(v),
            self.values_l_proj(t),
        )
        q, k, value_v, value_t = (x.unflatten(2, (HEADS, -1)).transpose(1, 2) for x in ends)
        weights = q @ k.mT
        weights = (weights - weights.max()).clamp(-50000, 50000)
        back = (weights.mT - weights.mT.max(-1, keepdim=True)[0]).clamp(-50000, 50000).softmax(-1)
        weights = weights.masked_fill(~mask[:, None, None], float("-inf")).softmax(-1)
        a, b = ((p @ x).transpose(1, 2).flatten(2) for p, x in ((weights, value_t), (back, value_v)))
        return v + self.gamma_v * self.out_v_proj(a), t + self.gamma_l * self.out_l_proj(b)


class MSDeformAttn(nn.Module):
    def __init__(self):
        super().__init__()
        count = HEADS * len(SHAPES) * POINTS
        self.sampling_offsets, self.attention_weights = nn.Linear(WIDTH, 2 * count), nn.Linear(WIDTH, count)
        self.value_proj, self.output_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, query: Tensor, points: Tensor, value: Tensor) -> Tensor:
        n, q, levels = *query.shape[:2], len(SHAPES)
        values = self.value_proj(value).unflatten(2, (HEADS, -1)).split([h * w for h, w in SHAPES], 1)
        offsets = self.sampling_offsets(query).view(n, q, HEADS, levels, POINTS, 2)
        weights = self.attention_weights(query).view(n, q, HEADS, -1).softmax(-1)
        size = points.new_tensor([(w, h) for h, w in SHAPES])[:, None]
        points = points[:, :, None, None, None]
        span = 1 / size if points.shape[-1] == 2 else points[..., 2:] * 0.5 / POINTS
        places = points[..., :2] + offsets * span
        grids, found = (2 * places - 1).transpose(1, 2).flatten(0, 1), []
        for i, (h, w) in enumerate(SHAPES):
            picture = values[i].permute(0, 2, 3, 1).reshape(n * HEADS, -1, h, w)
            found.append(F.grid_sample(picture, grids[:, :, i], "bilinear", "zeros", align_corners=False))
        mixed = torch.cat(found, -1) * weights.transpose(1, 2).flatten(0, 1)[:, None]
        return self.output_proj(mixed.sum(-1).view(n, WIDTH, q).mT)


class ImageLayer(nn.Module):
    def __init__(self, text: bool = False):
        super().__init__()
        if text:
            self.self_attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
            self.ca_text = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
            self.norm2, self.catext_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.cross_attn, self.norm1, self.norm3 = MSDeformAttn(), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.linear1, self.linear2 = nn.Linear(WIDTH, 26), nn.Linear(26, WIDTH)

    def forward(self, x: Tensor, pos: Tensor, points: Tensor, memory=None, text=None, mask=None) -> Tensor:
        if text is not None:
            x = self.norm2(x + self.self_attn(x + pos, x + pos, x)[0])
            x = self.catext_norm(x + self.ca_text(x + pos, text, text, key_padding_mask=~mask)[0])
        x = self.norm1(x + self.cross_attn(x + pos, points, x if memory is None else memory))
        return self.norm3(x + self.linear2(F.relu(self.linear1(x))))


class GroundingDINO(nn.Module):
    def __init__(self):
        super().__init__()
        self.bert, self.feat_map = BertModel(), nn.Linear(TEXT, WIDTH)
        self.backbone = nn.ModuleList([nn.Conv2d(3, 9, 2, 2), nn.Conv2d(9, 14, 2, 2)])
        self.input_proj = nn.ModuleList(nn.Conv2d(c, WIDTH, 1) for c in (9, 14))
        self.input_norm = nn.ModuleList(nn.GroupNorm(4, WIDTH) for _ in SHAPES)
        self.level_embed, self.tgt_embed = nn.Parameter(torch.ones(2, WIDTH)), nn.Embedding(QUERIES, WIDTH)
        self.fusion_layers = nn.ModuleList(BiAttentionBlock() for _ in range(2))
        self.text_layers = nn.ModuleList(TextLayer(WIDTH, HEADS, 18, nn.ReLU()) for _ in range(2))
        self.encoder = nn.ModuleList(ImageLayer() for _ in range(2))
        self.enc_output, self.enc_output_norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.decoder, self.norm = nn.ModuleList(ImageLayer(True) for _ in range(2)), nn.LayerNorm(WIDTH)
        self.ref_point_head, self.enc_bbox_embed = mlp(2 * WIDTH, WIDTH), mlp(WIDTH, 4)
        self.bbox_embed = nn.ModuleList(mlp(WIDTH, 4) for _ in range(2))
        for name, weight in self.named_parameters():
            one = ("norm" in name.lower() and name.endswith("weight")) or "gamma" in name
            weight.data = 0.15 * torch.randn_like(weight) * (1 if weight.dim() < 2 else 1.6) + one

    def enhance(self, pixel_values: Tensor, text: Tensor, seen: Tensor, masks: Tensor, places: Tensor):
        x, levels, pos, points = pixel_values, [], [], []
        for i, (h, w) in enumerate(SHAPES):
            x = F.relu(self.backbone[i](x))
            levels.append(self.input_norm[i](self.input_proj[i](x)).flatten(2).mT)
            steps = torch.cartesian_prod(torch.arange(h).to(x), torch.arange(w).to(x))
            angles = (steps + 1) / (x.new_tensor([h, w]) + 1e-6) * math.tau
            pos.append(sine(angles, WIDTH // 2, 20).flatten(1) + self.level_embed[i])
            points.append((steps.flip(1) + 0.5) / x.new_tensor([w, h]))
        image, pos, points = torch.cat(levels, 1), torch.cat(pos), torch.cat(points)[None]
        for fuse, read, look in zip(self.fusion_layers, self.text_layers, self.encoder, strict=True):
            image, text = fuse(image, text, seen)
            text = read(text, masks, sine(places.to(x), WIDTH))
            image = look(image, pos, points.expand(len(x), -1, -1))
        return image, text, points

    def contrast(self, x: Tensor, text: Tensor, seen: Tensor) -> Tensor:
        return F.pad((x @ text.mT).masked_fill(~seen[:, None], LOW), (0, LONGEST - LONG), value=LOW)

    def forward(self, pixel_values: Tensor, input_ids: Tensor) -> tuple[Tensor, ...]:
        (masks, places), seen = masks_with_special_tokens(input_ids), input_ids != 0
        text = self.feat_map(self.bert(input_ids, masks, places))
        image, text, points = self.enhance(pixel_values, text, seen, masks, places)
        sizes = torch.cat([points.new_full((1, h * w, 2), 0.05 * 2**i) for i, (h, w) in enumerate(SHAPES)], 1)
        made = self.enc_output_norm(self.enc_output(image))
        logits = self.contrast(made, text, seen)
        boxes = self.enc_bbox_embed(made) + torch.cat([points, sizes], -1).logit()
        best = logits.max(-1)[0].topk(QUERIES, 1)[1][..., None]
        logits, boxes = (y.gather(1, best.expand(-1, -1, y.shape[2])) for y in (logits, boxes.sigmoid()))
        box, x, found = boxes.detach(), self.tgt_embed.weight.expand(len(image), -1, -1), []
        for layer, head in zip(self.decoder, self.bbox_embed, strict=True):
            query = sine(box[..., [1, 0, 2, 3]] * math.tau, WIDTH // 2).flatten(2)
            x = layer(x, self.ref_point_head(query), box, image, text, seen)
            y, start = self.norm(x), box.logit(1e-3)
            found += [self.contrast(y, text, seen), (head(y) + start).sigmoid()]
            box = (head(x) + start).sigmoid().detach()
        return (*found, logits, boxes)


def phrases() -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    kept = torch.tensor([[1, 9, 9, 9, 3, 9, 9, 3, 2, 0], [1, 9, 9, 3, 9, 3, 2, 0, 0, 0]])
    ids = torch.where(kept == 9, torch.randint(4, WORDS, kept.shape), kept)
    picture = torch.randn(2, 3, 8, 12) + torch.linspace(-1, 1, 12).cos()
    boxes, hot = 0.2 + 0.5 * torch.rand(2, QUERIES, 4), torch.randint(1, 4, (2, QUERIES))
    return {"pixel_values": picture, "input_ids": ids}, (F.one_hot(hot, LONGEST), boxes)


def logits_and_boxes(outputs: tuple[Tensor, ...], target: tuple[Tensor, Tensor]) -> Tensor:
    hot, boxes = target
    likes = sum(F.binary_cross_entropy_with_logits(x, hot.to(x)) for x in outputs[::2])
    return (likes + 2 * sum((x - boxes).square().mean() for x in outputs[1::2])) / 6
