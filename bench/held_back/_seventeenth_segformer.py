"""A small SegFormer: overlapping patches, attention to reduced maps, and a decoder of projections."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTHS, DEPTHS, HEADS, RATIOS = (8, 16, 24), (1, 2, 1), (1, 2, 3), (4, 2, 1)
PATCHES, STRIDES, EXPANSION, FUSED = (7, 3, 3), (4, 2, 2), 2, 16
CLASSES, IGNORED, SHAPE = 4, 255, (40, 56)


def varied(module: nn.Module) -> None:
    """Start with weights that let every layer, gain and shift count."""
    if isinstance(module, nn.LayerNorm | nn.BatchNorm2d):
        nn.init.uniform_(module.weight, 0.6, 1.4)
        nn.init.normal_(module.bias, std=0.2)
    elif isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.normal_(module.weight, std=1.2 * module.weight[0].numel() ** -0.5)
        if module.bias is not None:
            nn.init.normal_(module.bias, std=0.2)
    if isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.running_mean, std=0.3)
        nn.init.uniform_(module.running_var, 0.5, 1.5)


def to_map(tokens: Tensor, height: int, width: int) -> Tensor:
    return tokens.transpose(1, 2).unflatten(2, (height, width))


def to_tokens(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


class OverlapPatchEmbeddings(nn.Module):
    def __init__(self, size: int, stride: int, inputs: int, width: int):
        super().__init__()
        self.proj = nn.Conv2d(inputs, width, size, stride, size // 2)
        self.layer_norm = nn.LayerNorm(width)

    def forward(self, pixels: Tensor) -> tuple[Tensor, int, int]:
        x = self.proj(pixels)
        return self.layer_norm(to_tokens(x)), x.shape[2], x.shape[3]


class EfficientSelfAttention(nn.Module):
    """Every token asks; the keys and values come from the map reduced by ``ratio``."""

    def __init__(self, width: int, heads: int, ratio: int):
        super().__init__()
        self.heads, self.size, self.ratio = heads, width // heads, ratio
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        if ratio > 1:
            self.sr = nn.Conv2d(width, width, ratio, ratio)
            self.layer_norm = nn.LayerNorm(width)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.heads, self.size)).transpose(1, 2)

    def forward(self, tokens: Tensor, height: int, width: int) -> Tensor:
        q, source = self.split(self.query(tokens)), tokens
        if self.ratio > 1:
            source = self.layer_norm(to_tokens(self.sr(to_map(tokens, height, width))))
        k, v = self.split(self.key(source)), self.split(self.value(source))
        shares = (q @ k.transpose(2, 3) / self.size**0.5).softmax(3)
        return (shares @ v).transpose(1, 2).flatten(2)


class SelfOutput(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.dense = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.dense(tokens)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, ratio: int):
        super().__init__()
        self.self, self.output = EfficientSelfAttention(width, heads, ratio), SelfOutput(width)

    def forward(self, tokens: Tensor, height: int, width: int) -> Tensor:
        return self.output(self.self(tokens, height, width))


class DWConv(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.dwconv = nn.Conv2d(width, width, 3, 1, 1, groups=width)

    def forward(self, tokens: Tensor, height: int, width: int) -> Tensor:
        return to_tokens(self.dwconv(to_map(tokens, height, width)))


class MixFFN(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.dense1, self.dwconv = nn.Linear(width, hidden), DWConv(hidden)
        self.intermediate_act_fn, self.dense2 = nn.GELU(), nn.Linear(hidden, width)

    def forward(self, tokens: Tensor, height: int, width: int) -> Tensor:
        x = self.dwconv(self.dense1(tokens), height, width)
        return self.dense2(self.intermediate_act_fn(x))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, ratio: int):
        super().__init__()
        self.layer_norm_1, self.attention = nn.LayerNorm(width), Attention(width, heads, ratio)
        self.layer_norm_2, self.mlp = nn.LayerNorm(width), MixFFN(width, EXPANSION * width)

    def forward(self, tokens: Tensor, height: int, width: int) -> Tensor:
        tokens = tokens + self.attention(self.layer_norm_1(tokens), height, width)
        return tokens + self.mlp(self.layer_norm_2(tokens), height, width)


class Encoder(nn.Module):
    """The normed map of each stage; the next stage starts from it."""

    def __init__(self):
        super().__init__()
        sizes = zip(PATCHES, STRIDES, (3, *WIDTHS[:-1]), WIDTHS, strict=True)
        self.patch_embeddings = nn.ModuleList(OverlapPatchEmbeddings(*size) for size in sizes)
        self.block = nn.ModuleList(
            nn.ModuleList(Layer(width, heads, ratio) for _ in range(depth))
            for width, heads, ratio, depth in zip(WIDTHS, HEADS, RATIOS, DEPTHS, strict=True)
        )
        self.layer_norm = nn.ModuleList(nn.LayerNorm(width) for width in WIDTHS)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden_states = ()
        for embed, layers, norm in zip(self.patch_embeddings, self.block, self.layer_norm, strict=True):
            tokens, height, width = embed(x)
            for layer in layers:
                tokens = layer(tokens, height, width)
            x = to_map(norm(tokens), height, width)
            hidden_states += (x,)
        return hidden_states


class SegformerModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        return self.encoder(pixels)


class Projection(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.proj = nn.Linear(width, FUSED)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(to_tokens(x))


class DecodeHead(nn.Module):
    """All stages projected, brought to the finest grid and fused, the last stage first."""

    def __init__(self):
        super().__init__()
        self.linear_c = nn.ModuleList(Projection(width) for width in WIDTHS)
        self.linear_fuse = nn.Conv2d(FUSED * len(WIDTHS), FUSED, 1, bias=False)
        self.batch_norm, self.activation = nn.BatchNorm2d(FUSED), nn.ReLU()
        self.classifier = nn.Conv2d(FUSED, CLASSES, 1)

    def forward(self, hidden_states: tuple[Tensor, ...]) -> Tensor:
        size, maps = hidden_states[0].shape[2:], []
        for x, linear in zip(hidden_states, self.linear_c, strict=True):
            y = to_map(linear(x), *x.shape[2:])
            maps.append(F.interpolate(y, size, mode="bilinear", align_corners=False))
        fused = self.linear_fuse(torch.cat(maps[::-1], 1))
        return self.classifier(self.activation(self.batch_norm(fused)))


class SegformerForSemanticSegmentation(nn.Module):
    """Images [N, 3, H, W] -> logits at a quarter of the sides, and the maps of all stages."""

    def __init__(self):
        super().__init__()
        self.segformer, self.decode_head = SegformerModel(), DecodeHead()
        self.apply(varied)

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        hidden_states = self.segformer(pixels)
        return self.decode_head(hidden_states), *hidden_states


def scenes() -> tuple[Tensor, Tensor]:
    """Smooth regions, each of a colour under noise; a strip and some pixels carry no label."""
    field = F.interpolate(torch.randn(2, CLASSES, 4, 5), SHAPE, mode="bilinear", align_corners=True)
    labels = field.argmax(1)
    colours = torch.tensor([[0.9, -0.3, 0.1], [-0.8, 0.5, 0.2], [0.1, 0.8, -0.9], [-0.2, -0.7, 0.8]])
    pixels = colours[labels].movedim(3, 1) + 0.4 * torch.randn(2, 3, *SHAPE)
    hidden = torch.rand(labels.shape) < 0.05
    hidden[:, :, :2] = True
    return pixels, labels.masked_fill(hidden, IGNORED)


def entropy(outputs: tuple[Tensor, ...], labels: Tensor) -> Tensor:
    """Cross entropy at the size of the labels, where there are any."""
    logits = F.interpolate(outputs[0], labels.shape[1:], mode="bilinear", align_corners=False)
    return F.cross_entropy(logits, labels, ignore_index=IGNORED)
