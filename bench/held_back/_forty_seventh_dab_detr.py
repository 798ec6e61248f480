"""A small DAB-DETR without an encoder: padded pictures, anchor boxes as queries, refined layer by layer."""

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, HIDDEN, CLASSES, PATTERNS, ANCHORS = 24, 3, 40, 4, 2, 5
HIGH, WIDE, PICTURES, DECODED = 20, 28, 3, 3


def sine(x: Tensor, temperature: float, features: int) -> Tensor:
    """Sines and cosines by turns, on a new last axis."""
    i = torch.arange(features, device=x.device)
    x = x[..., None] / temperature ** (2 * (i // 2).to(x) / features)
    return torch.stack((x[..., 0::2].sin(), x[..., 1::2].cos()), dim=-1).flatten(-2)


def gen_sineembed_for_position(boxes: Tensor) -> Tensor:
    return torch.cat([sine(boxes[..., i] * 2 * math.pi, 10000, WIDTH // 2) for i in (1, 0, 2, 3)], dim=-1)


class MLP(nn.Module):
    def __init__(self, input_dim: int, hidden_dim: int, output_dim: int, num_layers: int):
        super().__init__()
        sizes = [input_dim, *[hidden_dim] * (num_layers - 1), output_dim]
        self.layers = nn.ModuleList(nn.Linear(n, k) for n, k in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = F.relu(layer(x)) if i < len(self.layers) - 1 else layer(x)
        return x


class FrozenBatchNorm2d(nn.Module):
    def __init__(self, n: int):
        super().__init__()
        weight, bias, running_mean = torch.randn(3, n) * 0.2
        self.register_buffer("weight", 1 + weight), self.register_buffer("bias", bias)
        self.register_buffer("running_mean", running_mean)
        self.register_buffer("running_var", 0.5 + torch.rand(n))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + 1e-5).rsqrt()
        return x * scale[:, None, None] + (self.bias - self.running_mean * scale)[:, None, None]


class PositionEmbeddingSineHW(nn.Module):
    temperature_h, temperature_w, scale = 20, 30, 2 * math.pi

    def forward(self, mask: Tensor, like: Tensor) -> Tensor:
        y, x = (~mask).cumsum(1).to(like), (~mask).cumsum(2).to(like)
        y, x = (z / (end + 1e-6) * self.scale for z, end in ((y, y[:, -1:, :]), (x, x[:, :, -1:])))
        pos_y, pos_x = sine(y, self.temperature_h, WIDTH // 2), sine(x, self.temperature_w, WIDTH // 2)
        return torch.cat((pos_y, pos_x), dim=3).permute(0, 3, 1, 2)


class MultiheadAttention(nn.Module):  # of what is projected already, but for the result
    def __init__(self, vdim: int):
        super().__init__(), self.add_module("out_proj", nn.Linear(vdim, vdim))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (x.unflatten(2, (HEADS, -1)).permute(1, 2, 0, 3) for x in (q, k, v))
        weights = (q * q.shape[-1] ** -0.5) @ k.transpose(2, 3)
        if mask is not None:
            weights = weights.masked_fill(mask[:, None, None], -math.inf)
        return self.out_proj((weights.softmax(-1) @ v).permute(2, 0, 1, 3).flatten(2))


class TransformerDecoderLayer(nn.Module):
    def __init__(self, is_first: bool):
        super().__init__()
        names = (
            "sa_qcontent sa_qpos sa_kcontent sa_kpos sa_v ca_qcontent ca_kcontent ca_kpos ca_v ca_qpos_sine"
        )
        self.is_first = is_first
        for name in [*names.split(), "ca_qpos"] if is_first else names.split():
            self.add_module(f"{name}_proj", nn.Linear(WIDTH, WIDTH))
        self.self_attn, self.cross_attn = MultiheadAttention(WIDTH), MultiheadAttention(WIDTH)
        self.linear1, self.linear2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, tgt: Tensor, memory: Tensor, mask: Tensor, pos: Tensor, query_pos, sine_embed):
        q = self.sa_qcontent_proj(tgt) + self.sa_qpos_proj(query_pos)
        k = self.sa_kcontent_proj(tgt) + self.sa_kpos_proj(query_pos)
        tgt = self.norm1(tgt + self.self_attn(q, k, self.sa_v_proj(tgt)))
        q, k, v = self.ca_qcontent_proj(tgt), self.ca_kcontent_proj(memory), self.ca_v_proj(memory)
        k_pos = self.ca_kpos_proj(pos)
        if self.is_first:
            q, k = q + self.ca_qpos_proj(query_pos), k + k_pos
        pairs = (q, self.ca_qpos_sine_proj(sine_embed)), (k, k_pos)
        q, k = (torch.cat([x.unflatten(2, (HEADS, -1)) for x in pair], 3).flatten(2) for pair in pairs)
        tgt = self.norm2(tgt + self.cross_attn(q, k, v, mask))
        return self.norm3(tgt + self.linear2(F.relu(self.linear1(tgt))))


class TransformerDecoder(nn.Module):
    def __init__(self, bbox_embed: nn.Module):
        super().__init__()
        self.layers = nn.ModuleList(TransformerDecoderLayer(i == 0) for i in range(DECODED))
        self.norm, self.bbox_embed = nn.LayerNorm(WIDTH), bbox_embed
        self.query_scale, self.ref_point_head = MLP(WIDTH, WIDTH, WIDTH, 2), MLP(2 * WIDTH, WIDTH, WIDTH, 2)
        self.ref_anchor_head = MLP(WIDTH, WIDTH, 2, 2)

    def forward(self, output, memory, mask, pos, refpoints_unsigmoid) -> tuple[Tensor, Tensor]:
        ref_points, intermediate = [reference_points := refpoints_unsigmoid.sigmoid()], []
        for i, layer in enumerate(self.layers):
            sine_embed = gen_sineembed_for_position(reference_points)
            query_pos = self.ref_point_head(sine_embed)
            sine_embed = sine_embed[..., :WIDTH] * (self.query_scale(output) if i > 0 else 1)
            ratio = self.ref_anchor_head(output).sigmoid() / reference_points[..., 2:]
            sine_embed = sine_embed * ratio.flip(-1).repeat_interleave(WIDTH // 2, -1)  # y by h, x by w
            output = layer(output, memory, mask, pos, query_pos, sine_embed)
            new_points = (self.bbox_embed(output) + reference_points.logit(eps=1e-3)).sigmoid()
            ref_points.append(new_points)
            reference_points = new_points.detach()
            intermediate.append(self.norm(output))
        return torch.stack(intermediate).transpose(1, 2), torch.stack(ref_points[:-1]).transpose(1, 2)


class Transformer(nn.Module):
    def __init__(self, bbox_embed: nn.Module):
        super().__init__()
        self.decoder, self.patterns = TransformerDecoder(bbox_embed), nn.Embedding(PATTERNS, WIDTH)

    def forward(self, src: Tensor, mask: Tensor, refpoint: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
        src, pos, mask = src.flatten(2).permute(2, 0, 1), pos.flatten(2).permute(2, 0, 1), mask.flatten(1)
        tgt = self.patterns.weight.repeat_interleave(ANCHORS, 0)[:, None].repeat(1, src.shape[1], 1)
        return self.decoder(tgt, src, mask, pos, refpoint[:, None].repeat(PATTERNS, src.shape[1], 1))


class DABDETR(nn.Module):
    """Pictures and where they are padded -> logits and boxes, [DECODED, N, queries, ...] each."""

    def __init__(self):
        super().__init__()
        one, two = (nn.Conv2d(n, k, 3, stride=2, padding=1, bias=False) for n, k in ((3, 10), (10, 14)))
        body = one, FrozenBatchNorm2d(10), nn.ReLU(), two, FrozenBatchNorm2d(14), nn.ReLU()
        self.backbone = nn.ModuleList([nn.Sequential(*body), PositionEmbeddingSineHW()])
        self.input_proj = nn.Conv2d(14, WIDTH, 1)
        self.class_embed, self.bbox_embed = nn.Linear(WIDTH, CLASSES), MLP(WIDTH, WIDTH, 4, 3)
        self.transformer, self.refpoint_embed = Transformer(self.bbox_embed), nn.Embedding(ANCHORS, 4)
        for name, p in self.named_parameters():
            if "norm" in name or p.dim() == 1:
                nn.init.normal_(p, float("norm" in name and name.endswith("weight")), 0.15)
            else:
                drawn = "point_embed" in name or "patterns" in name
                nn.init.normal_(p, std=0.8 if drawn else 1.1 / math.sqrt(p[0].numel()))

    def forward(self, samples: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        src = self.backbone[0](samples)
        mask = F.interpolate(mask[None].float(), size=src.shape[-2:]).bool()[0]
        pos = self.backbone[1](mask, src)
        hs, reference = self.transformer(self.input_proj(src), mask, self.refpoint_embed.weight, pos)
        return self.class_embed(hs), (self.bbox_embed(hs) + reference.logit(eps=1e-3)).sigmoid()


def scenes() -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    """Bright boxes in padded pictures, and the queries that they are assigned to."""
    samples, mask = torch.zeros(PICTURES, 3, HIGH, WIDE), torch.ones(PICTURES, HIGH, WIDE, dtype=torch.bool)
    labels = torch.full((PICTURES, PATTERNS * ANCHORS), CLASSES)
    boxes = torch.rand(PICTURES, PATTERNS * ANCHORS, 4) * 0.3 + 0.3
    for n in range(PICTURES):
        h, w = HIGH - 4 * n, WIDE - 6 * n
        mask[n, :h, :w], samples[n, :, :h, :w] = False, 0.5 * torch.randn(3, h, w)
        for query in torch.randperm(PATTERNS * ANCHORS)[:3]:
            labels[n, query] = label = torch.randint(CLASSES, ())
            x, y, a, b = (boxes[n, query] * torch.tensor([w, h, w, h])).int()
            samples[n, label % 3, y - b // 2 : y + b // 2, x - a // 2 : x + a // 2] += 1 + label / 4
    return {"samples": samples, "mask": mask}, (labels, boxes)


def set_loss(outputs: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
    """Focal loss, and L1 of the assigned, of every layer; by ten."""
    (logits, boxes), (labels, wanted) = outputs, target
    wanted, found = wanted.expand_as(boxes), (labels < CLASSES).to(boxes)
    hot = F.one_hot(labels, CLASSES + 1)[..., :-1].to(logits).expand_as(logits)
    p, count = logits.sigmoid(), found.sum() * len(boxes)
    cross = F.binary_cross_entropy_with_logits(logits, hot, reduction="none")
    focal = (0.75 - 0.5 * hot) * cross * (p * (1 - hot) + (1 - p) * hot) ** 2
    far = 5 * (boxes - wanted).abs().sum(-1)
    return (2 * focal.sum() + (far * found).sum()) / count / 10
