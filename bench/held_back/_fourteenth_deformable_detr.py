"""A small Deformable DETR: frozen norms, three levels, attention that samples, boxes refined by layers."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, LEVELS, POINTS, HIDDEN, DEPTH, QUERIES, CLASSES = 16, 4, 3, 2, 24, 2, 6, 3
CHANNELS, COUNT = (3, 8, 12, 16, 20), HEADS * LEVELS * POINTS


def varied(module: nn.Module) -> None:
    if isinstance(module, nn.GroupNorm | nn.LayerNorm):
        nn.init.uniform_(module.weight, 0.6, 1.4)
    for name in ("bias", "in_proj_bias"):
        if isinstance(getattr(module, name, None), nn.Parameter):
            nn.init.normal_(getattr(module, name), std=0.2)
    if isinstance(module, MSDeformAttn):
        nn.init.normal_(module.sampling_offsets.bias)


def refined(points: Tensor, change: Tensor) -> Tensor:
    known = torch.log(points.clamp(1e-5, 1) / (1 - points).clamp(1e-5, 1))
    return (F.pad(known, (0, 4 - known.shape[-1])) + change).sigmoid()


class FrozenBatchNorm2d(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        for name, start in (("weight", 1.2), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 0.6)):
            self.register_buffer(name, start + 0.4 * torch.rand(channels))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + 1e-5).rsqrt()
        return x * scale[:, None, None] + (self.bias - self.running_mean * scale)[:, None, None]


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.ModuleDict()
        for name, i, o in zip(("stem", "layer1", "layer2", "layer3"), CHANNELS, CHANNELS[1:], strict=False):
            layers = nn.Conv2d(i, o, 3, 2, 1, bias=False), FrozenBatchNorm2d(o), nn.ReLU()
            self.body[name] = nn.Sequential(*layers)

    def forward(self, x: Tensor, mask: Tensor) -> list[tuple[Tensor, Tensor]]:
        maps = [x := layer(x) for layer in self.body.values()][1:]
        return [(x, F.interpolate(mask[:, None].to(x), x.shape[2:])[:, 0].bool()) for x in maps]


class PositionEmbeddingSine(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        periods = 10000 ** (torch.arange(0, WIDTH // 2, 2, dtype=x.dtype, device=x.device) / (WIDTH // 2))
        waves = []
        for axis in (1, 2):
            place = (~mask).cumsum(axis, dtype=x.dtype)
            place = (place - 0.5) / (place.narrow(axis, -1, 1) + 1e-6) * (2 * torch.pi)
            angles = place[..., None] / periods
            waves.append(torch.stack([angles.sin(), angles.cos()], -1).flatten(3))
        return torch.cat(waves, 3).permute(0, 3, 1, 2)


class MSDeformAttn(nn.Module):
    def __init__(self):
        super().__init__()
        self.sampling_offsets, self.attention_weights = nn.Linear(WIDTH, 2 * COUNT), nn.Linear(WIDTH, COUNT)
        self.value_proj, self.output_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, query: Tensor, points: Tensor, source: Tensor, shapes: list, mask: Tensor) -> Tensor:
        n, q, _ = query.shape
        value = self.value_proj(source).masked_fill(mask[..., None], 0.0)
        offsets = self.sampling_offsets(query).view(n, q, HEADS, LEVELS, POINTS, 2)
        weights = self.attention_weights(query).view(n, q, HEADS, LEVELS * POINTS).softmax(-1)
        points = points[:, :, None, :, None]
        if points.shape[-1] == 2:
            offsets = offsets / points.new_tensor([(w, h) for h, w in shapes])[:, None]
        else:
            offsets = offsets / POINTS * points[..., 2:] * 0.5
        grids, sampled = (2 * (points[..., :2] + offsets) - 1).transpose(1, 2).flatten(0, 1), []
        for i, x in enumerate(value.split([h * w for h, w in shapes], 1)):
            x = x.mT.reshape(n * HEADS, WIDTH // HEADS, *shapes[i])
            sampled.append(F.grid_sample(x, grids[:, :, i], "bilinear", "zeros", align_corners=False))
        weights = weights.transpose(1, 2).reshape(n * HEADS, 1, q, LEVELS * POINTS)
        return self.output_proj((torch.cat(sampled, -1) * weights).sum(-1).view(n, WIDTH, q).mT)


class EncoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.norm1, self.norm2 = MSDeformAttn(), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.linear1, self.linear2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, src: Tensor, pos: Tensor, points: Tensor, *where: Tensor | list) -> Tensor:
        src = self.norm1(src + self.self_attn(src + pos, points, src, *where))
        return self.norm2(src + self.linear2(self.linear1(src).relu()))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer() for _ in range(DEPTH))

    def forward(self, src: Tensor, pos: Tensor, ratios: Tensor, shapes: list, mask: Tensor) -> Tensor:
        points = []
        for i, (h, w) in enumerate(shapes):
            cells = src.new_ones(h, w).nonzero().flip(1).to(src) + 0.5
            points.append(cells / (ratios[:, None, i] * src.new_tensor((w, h))))
        points = torch.cat(points, 1)[:, :, None] * ratios[:, None]
        for layer in self.layers:
            src = layer(src, pos, points, shapes, mask)
        return src


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.cross_attn = MSDeformAttn()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.linear1, self.linear2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, tgt: Tensor, pos: Tensor, points: Tensor, *memory: Tensor | list) -> Tensor:
        tgt = self.norm2(tgt + self.self_attn(tgt + pos, tgt + pos, tgt, need_weights=False)[0])
        tgt = self.norm1(tgt + self.cross_attn(tgt + pos, points, *memory))
        return self.norm3(tgt + self.linear2(self.linear1(tgt).relu()))


class Decoder(nn.Module):
    def __init__(self, bbox_embed: nn.ModuleList):
        super().__init__()
        self.layers, self.bbox_embed = nn.ModuleList(DecoderLayer() for _ in range(DEPTH)), bbox_embed

    def forward(self, tgt: Tensor, pos: Tensor, points: Tensor, ratios: Tensor, *memory: Tensor | list):
        states, references = [], [points]
        for layer, head in zip(self.layers, self.bbox_embed, strict=True):
            scale = torch.cat([ratios, ratios], -1)[:, None, :, : points.shape[-1]]
            tgt = layer(tgt, pos, points[:, :, None] * scale, *memory)
            points = refined(points, head(tgt)).detach()
            states, references = [*states, tgt], [*references, points]
        return states, references[:-1]


class Transformer(nn.Module):
    def __init__(self, bbox_embed: nn.ModuleList):
        super().__init__()
        self.encoder, self.decoder = Encoder(), Decoder(bbox_embed)
        self.level_embed = nn.Parameter(torch.randn(LEVELS, WIDTH))
        self.reference_points = nn.Linear(WIDTH, 2)

    def forward(self, srcs: list, masks: list, positions: list, query_embed: Tensor):
        pos = torch.cat([p.flatten(2).mT + e for p, e in zip(positions, self.level_embed, strict=True)], 1)
        ratios = [torch.stack([(~m[:, 0]).to(pos).mean(1), (~m[:, :, 0]).to(pos).mean(1)], -1) for m in masks]
        ratios, shapes = torch.stack(ratios, 1), [tuple(x.shape[2:]) for x in srcs]
        mask = torch.cat([m.flatten(1) for m in masks], 1)
        memory = self.encoder(torch.cat([x.flatten(2).mT for x in srcs], 1), pos, ratios, shapes, mask)
        pos, tgt = query_embed.expand(len(memory), -1, -1).chunk(2, -1)
        return self.decoder(tgt, pos, self.reference_points(pos).sigmoid(), ratios, memory, shapes, mask)


class DeformableDETR(nn.Module):
    """Padded images and masks -> class scores and boxes of every decoder layer [L, N, Q, ...]."""

    def __init__(self):
        super().__init__()
        box = [(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4)) for _ in range(DEPTH)]
        self.bbox_embed = nn.ModuleList(nn.Sequential(*layers) for layers in box)
        self.transformer = Transformer(self.bbox_embed)
        self.class_embed = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(DEPTH))
        self.query_embed = nn.Embedding(QUERIES, 2 * WIDTH)
        sides = [(nn.Conv2d(c, WIDTH, 1), nn.GroupNorm(4, WIDTH)) for c in CHANNELS[2:]]
        self.input_proj = nn.ModuleList(nn.Sequential(*layers) for layers in sides)
        self.backbone = nn.ModuleList([Backbone(), PositionEmbeddingSine()])
        self.apply(varied)

    def forward(self, images: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        features, masks = zip(*self.backbone[0](images, mask), strict=True)
        positions = [self.backbone[1](x, m) for x, m in zip(features, masks, strict=True)]
        srcs = [proj(x) for proj, x in zip(self.input_proj, features, strict=True)]
        states, references = self.transformer(srcs, masks, positions, self.query_embed.weight)
        scores = [head(x) for head, x in zip(self.class_embed, states, strict=True)]
        changes = [head(x) for head, x in zip(self.bbox_embed, states, strict=True)]
        return torch.stack(scores), torch.stack([*map(refined, references, changes)])


def padded() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    images, mask = torch.zeros(2, 3, 32, 40), torch.ones(2, 32, 40, dtype=torch.bool)
    labels = torch.rand(2, CLASSES).argsort(1)[:, :2]
    boxes = torch.cat([0.3 + 0.4 * torch.rand(2, 2, 2), 0.2 + 0.4 * torch.rand(2, 2, 2)], 2)
    for i, (h, w) in enumerate([(32, 30), (int(torch.randint(18, 28, ())), 40)]):
        mask[i, :h, :w] = False
        images[i, :, :h, :w] = 0.3 * torch.randn(3, h, w)
        for label, box in zip(labels[i], boxes[i], strict=True):
            corners = torch.cat([box[:2] - box[2:] / 2, box[:2] + box[2:] / 2])
            left, top, right, low = (corners * torch.tensor([w, h, w, h])).long()
            images[i, label, top:low, left:right] += 2
    return (images, mask), (labels, boxes, 2 * labels)


def matched(outputs: tuple[Tensor, Tensor], target: tuple[Tensor, ...]) -> Tensor:
    """The focal loss of all scores and the distance of the matched boxes, in all layers."""
    (scores, boxes), (labels, truth, picked) = outputs, target
    rows, wanted = torch.arange(len(picked), device=picked.device)[:, None], torch.zeros_like(scores)
    wanted[:, rows, picked, labels] = 1
    share = (0.75 - 0.5 * wanted) * (scores.sigmoid() - wanted).square()
    focal = share * F.binary_cross_entropy_with_logits(scores, wanted, reduction="none")
    return 0.1 * (focal.sum() + 5 * (boxes[:, rows, picked] - truth).abs().sum()) / picked.numel()
