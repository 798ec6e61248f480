"""A small DETR: a residual backbone, sine positions of a padding mask, a transformer, boxes step by step."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, QUERIES, KINDS, IMAGES, HIGH, WIDE = 16, 4, 5, 3, 3, 24, 32


class FrozenBatchNorm2d(nn.Module):
    def __init__(self, width: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        return x * scale[:, None, None] + (self.bias - self.running_mean * scale)[:, None, None]


class BasicBlock(nn.Module):
    def __init__(self, inner: int, width: int, stride: int, norm: type[nn.Module]):
        super().__init__()
        self.conv1 = nn.Conv2d(inner, width, 3, stride, 1, bias=False)
        self.bn1, self.relu = norm(width), nn.ReLU()
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), norm(width)
        self.downsample = None
        if stride > 1 or inner != width:
            self.downsample = nn.Sequential(nn.Conv2d(inner, width, 1, stride, bias=False), norm(width))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        return self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))) + identity)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, 2, 1, bias=False)
        self.bn1, self.relu = FrozenBatchNorm2d(8), nn.ReLU()
        self.layer1 = nn.Sequential(*(BasicBlock(8, 8, 1, FrozenBatchNorm2d) for _ in range(2)))
        blocks = BasicBlock(8, 10, 2, nn.BatchNorm2d), BasicBlock(10, 10, 1, nn.BatchNorm2d)
        self.layer2 = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer2(self.layer1(self.relu(self.bn1(self.conv1(x)))))


class PositionEmbeddingSine(nn.Module):
    def __init__(self, num_pos_feats: int, temperature: float = 10000, scale: float = 2 * torch.pi):
        super().__init__()
        self.num_pos_feats, self.temperature, self.scale, self.eps = num_pos_feats, temperature, scale, 1e-6

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        not_mask = (~mask).to(x.dtype)
        y_embed, x_embed = not_mask.cumsum(1), not_mask.cumsum(2)
        y_embed = y_embed / (y_embed[:, -1:] + self.eps) * self.scale
        x_embed = x_embed / (x_embed[:, :, -1:] + self.eps) * self.scale
        dim_t = torch.arange(self.num_pos_feats, dtype=x.dtype, device=x.device)
        dim_t = self.temperature ** (2 * (dim_t // 2) / self.num_pos_feats)
        pos = torch.stack((y_embed, x_embed), 3)[..., None] / dim_t
        pos = torch.stack((pos[..., 0::2].sin(), pos[..., 1::2].cos()), 5)
        return pos.flatten(3).permute(0, 3, 1, 2)


class Joiner(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.position_embedding = ResNet(), PositionEmbeddingSine(WIDTH // 2)

    def forward(self, images: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.body(images)
        mask = F.interpolate(mask[:, None].to(x.dtype), size=x.shape[-2:])[:, 0].bool()
        return x, mask, self.position_embedding(x, mask)


class EncoderLayer(nn.Module):
    def __init__(self, inner: int = 20):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(WIDTH, HEADS)
        self.linear1, self.linear2 = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, src: Tensor, mask: Tensor, pos: Tensor) -> Tensor:
        q = k = src + pos
        src = self.norm1(src + self.self_attn(q, k, value=src, key_padding_mask=mask)[0])
        return self.norm2(src + self.linear2(F.relu(self.linear1(src))))


class DecoderLayer(EncoderLayer):
    def __init__(self):
        super().__init__()
        self.multihead_attn, self.norm3 = nn.MultiheadAttention(WIDTH, HEADS), nn.LayerNorm(WIDTH)

    def forward(self, tgt: Tensor, memory: Tensor, mask: Tensor, pos: Tensor, query_pos: Tensor) -> Tensor:
        q = k = tgt + query_pos
        tgt = self.norm1(tgt + self.self_attn(q, k, value=tgt)[0])
        q, k = tgt + query_pos, memory + pos
        tgt = self.norm2(tgt + self.multihead_attn(q, k, value=memory, key_padding_mask=mask)[0])
        return self.norm3(tgt + self.linear2(F.relu(self.linear1(tgt))))


class MLP(nn.Module):
    def __init__(self, *widths: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(n, k) for n, k in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)


class Decoder(nn.Module):
    """Each layer's boxes start from those of the layer before, which learn nothing from it."""

    def __init__(self):
        super().__init__()
        self.layers, self.norm = nn.ModuleList(DecoderLayer() for _ in range(3)), nn.LayerNorm(WIDTH)
        self.bbox_embed = MLP(WIDTH, WIDTH, WIDTH, 4)

    def forward(self, tgt, memory, mask, pos, query_pos, reference) -> tuple[Tensor, Tensor]:
        states, boxes = [], []
        for layer in self.layers:
            tgt = layer(tgt, memory, mask, pos, query_pos)
            states.append(self.norm(tgt))
            boxes.append((self.bbox_embed(states[-1]) + torch.logit(reference, eps=1e-5)).sigmoid())
            reference = boxes[-1].detach()
        return torch.stack(states), torch.stack(boxes)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList(EncoderLayer() for _ in range(2))
        self.decoder, self.reference_points = Decoder(), nn.Linear(WIDTH, 4)

    def forward(self, src: Tensor, mask: Tensor, query_embed: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
        src, pos, mask = src.flatten(2).permute(2, 0, 1), pos.flatten(2).permute(2, 0, 1), mask.flatten(1)
        query_pos, tgt = query_embed[:, None].repeat(1, src.shape[1], 1).split(WIDTH, 2)
        reference = self.reference_points(query_pos).sigmoid()
        for layer in self.encoder:
            src = layer(src, mask, pos)
        states, boxes = self.decoder(tgt, src, mask, pos, query_pos, reference)
        return states.transpose(1, 2), boxes.transpose(1, 2)


class DETR(nn.Module):
    """Images [N, 3, H, W] and a mask of padding -> kinds and boxes of the last layer and of those before."""

    def __init__(self):
        super().__init__()
        self.backbone, self.input_proj = Joiner(), nn.Conv2d(10, WIDTH, 1)
        self.query_embed, self.transformer = nn.Embedding(QUERIES, 2 * WIDTH), Transformer()
        self.class_embed = nn.Linear(WIDTH, KINDS + 1)
        for name, x in (*self.named_parameters(), *self.named_buffers()):
            if name.endswith("running_var"):
                nn.init.uniform_(x, 0.3, 1.2)
            elif x.ndim == 1:
                nn.init.uniform_(x, 0.6, 1.4) if name.endswith("weight") else nn.init.normal_(x, std=0.2)
            elif x.ndim == 4:
                nn.init.kaiming_normal_(x)
            elif x.ndim == 2 and name != "query_embed.weight":
                nn.init.xavier_uniform_(x, 1.3 if "in_proj" in name else 1.0)

    def forward(self, images: Tensor, mask: Tensor) -> dict[str, Tensor]:
        x, mask, pos = self.backbone(images, mask)
        states, boxes = self.transformer(self.input_proj(x), mask, self.query_embed.weight, pos)
        kinds = self.class_embed(states)
        last = {"pred_logits": kinds[-1], "pred_boxes": boxes[-1]}
        return {**last, "aux_logits": kinds[:-1], "aux_boxes": boxes[:-1]}


def scenes() -> tuple[dict[str, Tensor], Tensor]:
    """Images of several sizes with a rectangle or nothing in each of five bands; its colour is its kind."""
    high, wide = torch.randint(13, HIGH + 1, (IMAGES, 1)), torch.randint(17, WIDE + 1, (IMAGES, 1))
    y, x = (torch.arange(HIGH) + 0.5) / high, (torch.arange(WIDE) + 0.5) / wide
    mask = (y > 1)[:, :, None] | (x > 1)[:, None]
    kinds, draw = torch.randint(KINDS + 1, (IMAGES, QUERIES)), torch.rand(4, IMAGES, QUERIES)
    across, down = (torch.arange(QUERIES) + draw[0]) / QUERIES, 0.25 + 0.5 * draw[1]
    broad, tall = 0.15 + 0.15 * draw[2], 0.2 + 0.4 * draw[3]
    rows = ((y[:, None] - down[..., None]).abs() < tall[..., None] / 2).float()
    columns = ((x[:, None] - across[..., None]).abs() < broad[..., None] / 2).float()
    colours = F.one_hot(kinds, KINDS + 1)[..., :KINDS].float()
    images = torch.einsum("nqh,nqw,nqc->nchw", rows, columns, colours)
    images = (images + 0.3 * torch.randn(images.shape)).masked_fill(mask[:, None], 0)
    return {"images": images, "mask": mask}, torch.stack([kinds, across, down, broad, tall], 2)


def detection(outputs: dict[str, Tensor], target: Tensor) -> Tensor:
    kinds, boxes = target[..., 0].long(), target[..., 1:].to(outputs["pred_boxes"])
    logits = torch.cat([outputs["aux_logits"], outputs["pred_logits"][None]])
    found = torch.cat([outputs["aux_boxes"], outputs["pred_boxes"][None]])
    apart = F.smooth_l1_loss(found, boxes.expand_as(found), reduction="none", beta=0.1)
    named = F.cross_entropy(logits.movedim(-1, 1), kinds.expand(logits.shape[:-1]))
    return named / 2 + 2 * (apart * (kinds < KINDS)[..., None]).mean()
