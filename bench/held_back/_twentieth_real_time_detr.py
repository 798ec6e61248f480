"""A small RT-DETR: three scales, a hybrid encoder, queries chosen by score, boxes refined by layers."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._seventeenth_retina_net import FrozenBatchNorm2d
from bench.held_back._tenth_detr import MLP

LABELS, QUERIES, WIDTH, HEADS, LEVELS, POINTS = 5, 6, 12, 2, 3, 2
DEPTHS, GRID, MARGIN, COUNT = (6, 8, 12), 0.06, 0.05, HEADS * LEVELS * POINTS
NAMES = "intermediate_logits", "intermediate_reference_points", "enc_topk_logits", "enc_topk_bboxes"


def cells(x: Tensor) -> tuple[Tensor, ...]:
    return torch.meshgrid(*(torch.arange(n).to(x) for n in x.shape[2:]), indexing="ij")


class RTDetrConvNormLayer(nn.Sequential):
    def __init__(self, inputs: int, outputs: int, kernel: int, stride=1, act=nn.SiLU, norm=nn.BatchNorm2d):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        self.norm, self.activation = norm(outputs), act()
        nn.init.kaiming_normal_(self.conv.weight)


class RTDetrConvEncoder(nn.ModuleList):
    def __init__(self):
        end, conv, (a, b, c) = (nn.ReLU, FrozenBatchNorm2d), RTDetrConvNormLayer, DEPTHS
        stem = conv(3, a, 3, 2, *end), nn.MaxPool2d(3, 2, 1), conv(a, a, 3, 1, *end)
        later = [nn.Sequential(conv(i, o, 3, 2, *end), conv(o, o, 3, 1, *end)) for i, o in ((a, b), (b, c))]
        super().__init__([nn.Sequential(*stem), *later])

    def forward(self, x: Tensor) -> list[Tensor]:
        return [x := stage(x) for stage in self]


class RTDetrRepVggBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.conv1, self.conv2 = (RTDetrConvNormLayer(width, width, n, act=nn.Identity) for n in (3, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.conv1(x) + self.conv2(x))


class RTDetrCSPRepLayer(nn.Module):
    def __init__(self, half: int):
        super().__init__()
        self.conv1, self.conv2 = (RTDetrConvNormLayer(2 * WIDTH, half, 1) for _ in range(2))
        self.bottlenecks = nn.Sequential(RTDetrRepVggBlock(half))
        self.conv3 = RTDetrConvNormLayer(half, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv3(self.bottlenecks(self.conv1(x)) + self.conv2(x))


class RTDetrEncoderLayer(nn.Module):
    def __init__(self, act: type[nn.Module] = nn.GELU):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.fc1, self.fc2, self.activation_fn = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH), act()

    def forward(self, x: Tensor, places: Tensor, *given: object) -> Tensor:
        mixed = self.self_attn(x + places, x + places, x, need_weights=False)[0]
        x = self.self_attn_layer_norm(x + mixed)
        if given:
            x = self.encoder_attn_layer_norm(x + self.encoder_attn(x + places, *given))
        return self.final_layer_norm(x + self.fc2(self.activation_fn(self.fc1(x))))


class RTDetrHybridEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, conv = nn.ModuleList([RTDetrEncoderLayer()]), RTDetrConvNormLayer
        self.lateral_convs = nn.ModuleList(conv(WIDTH, WIDTH, 1) for _ in range(2))
        self.fpn_blocks, self.pan_blocks = (nn.ModuleList(map(RTDetrCSPRepLayer, (6, 6))) for _ in range(2))
        self.downsample_convs = nn.ModuleList(conv(WIDTH, WIDTH, 3, 2) for _ in range(2))

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        rates = 10000.0 ** -(torch.arange(WIDTH // 4).to(maps[-1]) / (WIDTH // 4))
        down, across = (z.flatten()[:, None] * rates for z in cells(maps[-1]))
        places = torch.cat([across.sin(), across.cos(), down.sin(), down.cos()], 1)
        fpn = [self.encoder[0](maps[-1].flatten(2).mT, places).mT.unflatten(2, maps[-1].shape[2:])]
        for i, (lateral, block) in enumerate(zip(self.lateral_convs, self.fpn_blocks, strict=True)):
            fpn[-1] = lateral(fpn[-1])
            fpn.append(block(torch.cat([F.interpolate(fpn[-1], scale_factor=2.0), maps[-2 - i]], 1)))
        pan = [fpn[-1]]
        for i, (down, block) in enumerate(zip(self.downsample_convs, self.pan_blocks, strict=True)):
            pan.append(block(torch.cat([down(pan[-1]), fpn[-2 - i]], 1)))
        return pan


class RTDetrMultiscaleDeformableAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.sampling_offsets, self.attention_weights = (nn.Linear(WIDTH, n * COUNT) for n in (2, 1))
        self.value_proj, self.output_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, asks: Tensor, memory: Tensor, boxes: Tensor, shapes: list[torch.Size]) -> Tensor:
        values = self.value_proj(memory).mT.unflatten(1, (HEADS, -1)).flatten(0, 1)
        offsets = self.sampling_offsets(asks).unflatten(2, (HEADS, LEVELS, POINTS, 2))
        share = self.attention_weights(asks).unflatten(2, (HEADS, -1)).softmax(-1).transpose(1, 2)
        centers, sizes = boxes[:, :, None, None, None].chunk(2, -1)
        spots = (2 * (centers + offsets / POINTS * sizes * 0.5) - 1).transpose(1, 2).flatten(0, 1)
        levels = zip(values.split([h * w for h, w in shapes], 2), shapes, spots.unbind(2), strict=True)
        seen = [F.grid_sample(v.unflatten(2, s), at, align_corners=False) for v, s, at in levels]
        mixed = (torch.cat(seen, -1) * share.flatten(0, 1)[:, None]).sum(-1)
        return self.output_proj(mixed.unflatten(0, (-1, HEADS)).flatten(1, 2).mT)


class RTDetrDecoderLayer(RTDetrEncoderLayer):
    def __init__(self):
        super().__init__(nn.ReLU)
        self.encoder_attn = RTDetrMultiscaleDeformableAttention()
        self.encoder_attn_layer_norm = nn.LayerNorm(WIDTH)


class RTDetrDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(RTDetrDecoderLayer() for _ in range(2))
        self.query_pos_head = MLP(4, 2 * WIDTH, WIDTH)
        self.class_embed = nn.ModuleList(nn.Linear(WIDTH, LABELS) for _ in range(2))
        self.bbox_embed = nn.ModuleList(MLP(WIDTH, WIDTH, WIDTH, 4) for _ in range(2))

    def forward(self, x: Tensor, memory: Tensor, boxes: Tensor, shapes: list) -> tuple[Tensor, Tensor]:
        boxes, logits, refined = boxes.sigmoid(), [], []
        for layer, classify, locate in zip(self.layers, self.class_embed, self.bbox_embed, strict=True):
            x = layer(x, self.query_pos_head(boxes), memory, boxes, shapes)
            refined.append((locate(x) + torch.logit(boxes, 1e-5)).sigmoid())
            logits.append(classify(x))
            boxes = refined[-1].detach()
        return torch.stack(logits, 1), torch.stack(refined, 1)


class RTDetrForObjectDetection(nn.Module):
    """Images -> class scores and boxes of the chosen queries, as the encoder and each layer see them."""

    def __init__(self):
        super().__init__()
        self.backbone, conv = RTDetrConvEncoder(), RTDetrConvNormLayer
        self.encoder_input_proj = nn.ModuleList(conv(n, WIDTH, 1, act=nn.Identity) for n in DEPTHS)
        self.encoder = RTDetrHybridEncoder()
        self.decoder_input_proj = nn.ModuleList(conv(WIDTH, WIDTH, 1, act=nn.Identity) for _ in DEPTHS)
        self.enc_output = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
        self.enc_score_head = nn.Linear(WIDTH, LABELS)
        self.enc_bbox_head, self.decoder = MLP(WIDTH, WIDTH, WIDTH, 4), RTDetrDecoder()
        for name, p in filter(lambda pair: pair[1].ndim == 1, self.named_parameters()):
            nn.init.uniform_(p, *((0.6, 1.4) if name.endswith("weight") else (-0.4, 0.4)))
        self.enc_score_head.weight.data -= 0.5 * self.enc_output(torch.zeros(WIDTH)).detach()

    def generate_anchors(self, maps: list[Tensor]) -> tuple[Tensor, Tensor]:
        anchors = []
        for level, x in enumerate(maps):
            down, across = ((z.flatten() + 0.5) / n for z, n in zip(cells(x), x.shape[2:], strict=True))
            size = torch.full_like(down, GRID * 2**level)
            anchors.append(torch.stack([across, down, size, size], -1))
        anchors = torch.cat(anchors)
        valid = ((anchors > MARGIN) & (anchors < 1 - MARGIN)).all(-1, keepdim=True)
        return torch.logit(anchors).where(valid, torch.finfo(anchors.dtype).max), valid

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        maps = map(nn.Module.__call__, self.encoder_input_proj, self.backbone(pixel_values))
        maps = list(map(nn.Module.__call__, self.decoder_input_proj, self.encoder(list(maps))))
        rows, (anchors, valid) = torch.cat([x.flatten(2).mT for x in maps], 1), self.generate_anchors(maps)
        content = self.enc_output(rows * valid)
        scores, places = self.enc_score_head(content), self.enc_bbox_head(content) + anchors
        best = scores.amax(-1).topk(QUERIES, 1).indices[..., None]
        content, scores, places = (torch.take_along_dim(z, best, 1) for z in (content, scores, places))
        logits, boxes = self.decoder(content.detach(), rows, places.detach(), [x.shape[2:] for x in maps])
        return dict(zip(NAMES, (logits, boxes, scores, places.sigmoid()), strict=True))


def scenes() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two bright rectangles in noise, whose colour tells their class; the queries have them by turns."""
    sizes, labels = 0.2 + 0.3 * torch.rand(4, 2, 2), torch.randint(LABELS, (4, 2))
    centers = sizes / 2 + (1 - sizes) * torch.rand(4, 2, 2)
    spots = (torch.stack(cells(torch.empty(1, 1, 32, 48))[::-1], -1) + 0.5) / torch.tensor([48, 32])
    inside = ((spots - centers[:, :, None, None]).abs() < sizes[:, :, None, None] / 2).all(-1)
    colours = torch.cos(1.3 * labels[..., None] + 2.1 * torch.arange(3))
    images = 0.3 * torch.randn(4, 3, 32, 48) + torch.einsum("nohw,noc->nchw", inside.to(colours), colours)
    boxes, turn = torch.cat([centers, sizes], -1), torch.arange(QUERIES) % 2
    return {"pixel_values": images}, {"labels": labels[:, turn], "boxes": boxes[:, turn]}


def matched(outputs: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
    """Varifocal loss by how near the box is, and the distance of boxes, for encoder and layers."""
    logits = torch.cat([outputs["enc_topk_logits"][:, None], outputs["intermediate_logits"]], 1)
    boxes = torch.cat([outputs["enc_topk_bboxes"][:, None], outputs["intermediate_reference_points"]], 1)
    far = (boxes - target["boxes"].to(boxes)[:, None]).abs().sum(-1)
    score = F.one_hot(target["labels"], LABELS)[:, None] * (-2 * far.detach()).exp()[..., None]
    weight = torch.where(score > 0, score, 0.75 * logits.detach().sigmoid().square())
    return (F.binary_cross_entropy_with_logits(logits, score, weight) * LABELS + 2 * far.mean()) / 2
