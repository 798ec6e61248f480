"""A small Depth Anything: DINOv2 with registers, its four states reassembled, fused and read as a depth."""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, LAYERS, HIDDEN, PATCH, SIDE, REGISTERS = 16, 2, 4, 20, 10, 6, 2
NECK, FUSED, HEAD, FARTHEST, GRID, TONES = (8, 8, 10, 12), 8, 6, 4.0, (4, 9), ([[2.0]], [[1.4]], [[-1.0]])


class Embeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.register_tokens = nn.Parameter(torch.randn(1, REGISTERS, WIDTH))
        self.position_embeddings = nn.Parameter(torch.randn(1, 1 + SIDE * SIDE, WIDTH))
        self.patch_embeddings = nn.Sequential(OrderedDict(projection=nn.Conv2d(3, WIDTH, PATCH, PATCH)))

    def forward(self, pixels: Tensor) -> Tensor:
        patches, count = self.patch_embeddings(pixels), len(pixels)
        first, rest = self.position_embeddings.transpose(1, 2).split([1, SIDE * SIDE], 2)
        square, options = rest.unflatten(2, (SIDE, SIDE)), {"mode": "bicubic", "antialias": True}
        there = F.interpolate(square, patches.shape[2:], align_corners=False, **options)
        x = torch.cat([self.cls_token.mT.expand(count, -1, -1), patches.flatten(2)], 2)
        x = (x + torch.cat([first, there.flatten(2)], 2)).transpose(1, 2)
        return torch.cat([x[:, :1], self.register_tokens.expand(count, -1, -1), x[:, 1:]], 1)


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(2, (HEADS, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        shares = (q @ k.transpose(2, 3) * (WIDTH // HEADS) ** -0.5).softmax(-1)
        return (shares @ v).transpose(1, 2).flatten(2)


class LayerScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.lambda1 = nn.Parameter(torch.empty(WIDTH).uniform_(0.3, 1.1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.lambda1


class SwiGLUFFN(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights_in, self.weights_out = nn.Linear(WIDTH, 2 * HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.weights_in(x).chunk(2, -1)
        return self.weights_out(F.silu(gate) * value)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.layer_scale1 = nn.LayerNorm(WIDTH, 1e-6), LayerScale()
        output = nn.Sequential(OrderedDict(dense=nn.Linear(WIDTH, WIDTH)))
        self.attention = nn.Sequential(OrderedDict(attention=SelfAttention(), output=output))
        self.norm2, self.mlp, self.layer_scale2 = nn.LayerNorm(WIDTH, 1e-6), SwiGLUFFN(), LayerScale()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.layer_scale1(self.attention(self.norm1(x)))
        return x + self.layer_scale2(self.mlp(self.norm2(x)))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [x := layer(x) for layer in self.layer]


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings, self.encoder, self.layernorm = Embeddings(), Encoder(), nn.LayerNorm(WIDTH, 1e-6)

    def forward(self, pixels: Tensor) -> list[Tensor]:
        return [self.layernorm(state) for state in self.encoder(self.embeddings(pixels))]


class ReassembleStage(nn.Module):
    def __init__(self):
        super().__init__()
        (a, b, _, d), maps = NECK, [nn.Conv2d(WIDTH, width, 1) for width in NECK]
        ups = [nn.ConvTranspose2d(a, a, 4, 4), nn.ConvTranspose2d(b, b, 2, 2)]
        pairs = zip(maps, [*ups, nn.Identity(), nn.Conv2d(d, d, 3, 2, 1)], strict=True)
        self.layers = nn.ModuleList(nn.Sequential(OrderedDict(projection=p, resize=r)) for p, r in pairs)
        readouts = [nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.GELU()) for _ in NECK]
        self.readout_projects = nn.ModuleList(readouts)

    def forward(self, states: list[Tensor], size: tuple[int, int]) -> list[Tensor]:
        maps = []
        for state, readout, layer in zip(states, self.readout_projects, self.layers, strict=True):
            patches = state[:, 1 + REGISTERS :]
            x = readout(torch.cat([patches, state[:, :1].expand_as(patches)], -1))
            maps.append(layer(x.transpose(1, 2).unflatten(2, size)))
        return maps


class PreActResidualLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.activation1, self.convolution1 = nn.ReLU(), nn.Conv2d(FUSED, FUSED, 3, 1, 1)
        self.activation2, self.convolution2 = nn.ReLU(), nn.Conv2d(FUSED, FUSED, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.convolution2(self.activation2(self.convolution1(self.activation1(x))))


class FeatureFusionLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.projection = nn.Conv2d(FUSED, FUSED, 1)
        self.residual_layer1, self.residual_layer2 = PreActResidualLayer(), PreActResidualLayer()

    def forward(self, size: torch.Size, x: Tensor, lateral: Tensor | None = None) -> Tensor:
        if lateral is not None:
            x = x + self.residual_layer1(lateral)
        x = F.interpolate(self.residual_layer2(x), size, mode="bilinear", align_corners=True)
        return self.projection(x)


class FeatureFusionStage(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(FeatureFusionLayer() for _ in NECK)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        sizes, fused = [x.shape[2:] for x in maps[-2::-1]], []
        for layer, x, size in zip(self.layers, maps[::-1], [*sizes, [2 * n for n in sizes[-1]]], strict=True):
            fused.append(layer(size, *fused[-1:], x))
        return fused


class Neck(nn.Module):
    def __init__(self):
        super().__init__()
        self.reassemble_stage, self.fusion_stage = ReassembleStage(), FeatureFusionStage()
        self.convs = nn.ModuleList(nn.Conv2d(width, FUSED, 3, 1, 1, bias=False) for width in NECK)

    def forward(self, states: list[Tensor], size: tuple[int, int]) -> list[Tensor]:
        maps = self.reassemble_stage(states, size)
        return self.fusion_stage([conv(x) for conv, x in zip(self.convs, maps, strict=True)])


class DepthHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(FUSED, HEAD, 3, 1, 1), nn.Conv2d(HEAD, HEAD, 3, 1, 1)
        self.activation1, self.conv3, self.activation2 = nn.ReLU(), nn.Conv2d(HEAD, 1, 1), nn.ReLU()

    def forward(self, x: Tensor, size: torch.Size) -> Tensor:
        x = F.interpolate(self.conv1(x), size, mode="bilinear", align_corners=True)
        return self.activation2(self.conv3(self.activation1(self.conv2(x)))).squeeze(1) * FARTHEST


class DepthAnything(nn.Module):
    """Images [N, 3, H, W] -> their depths [N, H, W] and the fused maps, the deepest first."""

    def __init__(self):
        super().__init__()
        self.backbone, self.neck, self.head = Backbone(), Neck(), DepthHead()
        for name, p in self.named_parameters():
            if name.endswith("bias") or "norm" in name:
                nn.init.normal_(p, 0.0 if name.endswith("bias") else 1.0, 0.2)
            elif p.dim() in (2, 4):
                nn.init.normal_(p, std=p[0].numel() ** -0.5)

    def forward(self, pixels: Tensor) -> dict[str, Tensor | tuple[Tensor, ...]]:
        fused = self.neck(self.backbone(pixels), tuple(length // PATCH for length in pixels.shape[2:]))
        return {"predicted_depth": self.head(fused[-1], pixels.shape[2:]), "fused_maps": tuple(fused)}


def views() -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Slopes with things on them, darker with the distance; some depths were not measured."""
    size, coarse = [length * PATCH for length in GRID], torch.randn(2, 1, 3, 5)
    near = F.interpolate(coarse, size, mode="bicubic").squeeze(1).sigmoid()
    pixels = near[:, None] * torch.tensor(TONES) + 0.4 * torch.randn(2, 3, *size)
    return pixels, (near, torch.rand(2, *size) < 0.8)


def aligned_loss(outputs: dict, target: tuple[Tensor, Tensor]) -> Tensor:
    """Squares after the best scale and shift of each image, and slopes of the rest at four scales."""
    depth, (near, valid) = outputs["predicted_depth"], target
    m = valid.to(depth)
    mean, goal = ((m * x).sum((1, 2), keepdim=True) / m.sum((1, 2), keepdim=True) for x in (depth, near))
    both, own = ((m * (depth - mean) * x).sum((1, 2), keepdim=True) for x in (near - goal, depth - mean))
    rest = both / (own + 1e-3) * (depth - mean) + goal - near
    loss = (m * rest.square()).sum() / (2 * m.sum())
    for step in (1, 2, 4, 8):
        r, v = rest[:, ::step, ::step], m[:, ::step, ::step]
        slopes = sum((r.diff(dim=i).abs() * v.unfold(i, 2, 1).prod(-1)).sum() for i in (1, 2))
        loss = loss + 0.5 * slopes / v.sum()
    return loss
