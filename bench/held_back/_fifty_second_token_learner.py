"""A small RT-1: pictures conditioned by FiLM, learned tokens, a decoder causal by frames, bins of actions."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FRAMES, TOKENS, ACTIONS, BINS = 4, 5, 3, 11
CONTEXT, WIDTH, HEADS, SAMPLES, HIGH, WIDE = 14, 30, 3, 3, 10, 14


class SqueezeExcitation(nn.Module):
    def __init__(self, channels: int, reduced: int):
        super().__init__()
        self.se_reduce = nn.Conv2d(channels, reduced, 1)
        self.se_expand = nn.Conv2d(reduced, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.se_expand(F.silu(self.se_reduce(x.mean((2, 3), keepdim=True))))
        return gate.sigmoid() * x


class MBConvBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, expand: int, kernel: int):
        super().__init__()
        middle = inputs * expand
        self.expand_conv = nn.Conv2d(inputs, middle, 1, bias=False)
        self.bn0 = nn.BatchNorm2d(middle, eps=1e-3)
        self.depthwise_conv = nn.Conv2d(
            middle, middle, kernel, padding=kernel // 2, groups=middle, bias=False
        )
        self.bn1 = nn.BatchNorm2d(middle, eps=1e-3)
        self.se = SqueezeExcitation(middle, inputs // 2)
        self.project_conv = nn.Conv2d(middle, outputs, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs, eps=1e-3)

    def forward(self, inputs: Tensor) -> Tensor:
        x = F.silu(self.bn0(self.expand_conv(inputs)))
        x = F.silu(self.bn1(self.depthwise_conv(x)))
        x = self.bn2(self.project_conv(self.se(x)))
        return x + inputs if x.shape == inputs.shape else x


class FilmConditioning(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.projection_add = nn.Linear(CONTEXT, channels)
        self.projection_mult = nn.Linear(CONTEXT, channels)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        beta = self.projection_add(context)[:, :, None, None]
        gamma = self.projection_mult(context)[:, :, None, None]
        return (1 + gamma) * x + beta


class FilmEfficientNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem_conv = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.stem_bn = nn.BatchNorm2d(8, eps=1e-3)
        sizes = (8, 8, 2, 3), (8, 12, 3, 5), (12, 12, 2, 3)
        self.blocks = nn.ModuleList(MBConvBlock(*each) for each in sizes)
        self.films = nn.ModuleList(FilmConditioning(each[1]) for each in sizes)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        x = F.silu(self.stem_bn(self.stem_conv(x)))
        for block, film in zip(self.blocks, self.films, strict=True):
            x = film(block(x), context)
        return x


class MlpBlock(nn.Module):
    def __init__(self, channels: int, hidden: int):
        super().__init__()
        self.hidden_layer = nn.Conv2d(channels, hidden, 3, padding=1)
        self.output_layer = nn.Conv2d(hidden, TOKENS, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.output_layer(F.gelu(self.hidden_layer(x)))


class TokenLearnerModule(nn.Module):
    """[N, C, H, W] -> [N, tokens, C]: sums of the pixels weighted by maps."""

    def __init__(self, channels: int, hidden: int):
        super().__init__()
        self.layernorm = nn.LayerNorm(channels)
        self.mlp = MlpBlock(channels, hidden)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.layernorm(inputs.movedim(1, 3)).movedim(3, 1)
        selected = self.mlp(x).flatten(2).softmax(-1)
        return torch.einsum("nsp,ncp->nsc", selected, inputs.flatten(2))


class ImageTokenizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokenizer = FilmEfficientNet()
        self.token_learner = TokenLearnerModule(12, 16)

    def forward(self, image: Tensor, context: Tensor) -> Tensor:
        context = context.repeat_interleave(image.shape[1], 0)
        tokens = self.token_learner(self.tokenizer(image.flatten(0, 1), context))
        return tokens.unflatten(0, image.shape[:2])


class MultiHeadAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            each(x).unflatten(2, (HEADS, -1)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class TransformerLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layernorm_1 = nn.LayerNorm(WIDTH, eps=1e-6)
        self.mha_1 = MultiHeadAttention()
        self.layernorm_2 = nn.LayerNorm(WIDTH, eps=1e-6)
        self.ff = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.mha_1(self.layernorm_1(x), mask)
        return x + self.ff(self.layernorm_2(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.token_emb = nn.Linear(12, WIDTH)
        self.position_emb = nn.Embedding(FRAMES * TOKENS, WIDTH)
        self.layers = nn.ModuleList(TransformerLayer() for _ in range(3))
        self.output_tokens = nn.Linear(WIDTH, BINS)

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1], device=x.device)
        x = self.token_emb(x) + self.position_emb(place)
        frame = place // TOKENS
        mask = frame[:, None] >= frame
        for layer in self.layers:
            x = layer(x, mask)
        return self.output_tokens(x)


class TransformerNetwork(nn.Module):
    """Pictures [N, F, 3, H, W], instructions [N, 14] -> logits [N, F, actions, bins]."""

    def __init__(self):
        super().__init__()
        self.image_tokenizer = ImageTokenizer()
        self.transformer = Transformer()
        for name, p in self.named_parameters():
            if p.ndim > 1:
                nn.init.normal_(
                    p,
                    0,
                    (0.3 if "projection" in name or "output_tokens" in name else 1) * p[0].numel() ** -0.5,
                )
            else:
                nn.init.normal_(p, "weight" in name, 0.2)
        for name, x in self.named_buffers():
            if x.ndim:
                x.copy_(torch.rand_like(x) + 0.5 if "var" in name else 0.3 * torch.randn_like(x))

    def forward(self, image: Tensor, instruction: Tensor) -> Tensor:
        tokens = self.image_tokenizer(image, instruction)
        logits = self.transformer(tokens.flatten(1, 2))
        return logits.unflatten(1, (-1, TOKENS))[:, :, TOKENS - ACTIONS :]


def episodes() -> tuple[dict[str, Tensor], Tensor]:
    """A blob that wanders over each picture, its moves as bins; frames after the end are zero."""
    lengths = torch.tensor([FRAMES, FRAMES - 1, FRAMES - 2])[:, None]
    live = torch.arange(FRAMES) < lengths
    moves = torch.rand(SAMPLES, FRAMES, ACTIONS) - 0.5
    y, x, size = (torch.rand(SAMPLES, 1, 3) * 0.5 + 0.25 + 0.3 * moves.cumsum(1))[..., None, None].unbind(2)
    rows, columns = torch.linspace(0, 1, HIGH)[:, None], torch.linspace(0, 1, WIDE)
    blob = torch.exp(-((rows - y).square() + (columns - x).square()) / (0.05 + 0.1 * size.square()))
    color = torch.rand(SAMPLES, 1, 3, 1, 1)
    image = color * blob[:, :, None] + 0.1 * torch.rand(SAMPLES, FRAMES, 3, HIGH, WIDE)
    target = ((moves + 0.5) * BINS).long().clamp(max=BINS - 1)
    words = torch.randn(SAMPLES, CONTEXT)
    image = image * live[:, :, None, None, None]
    return {"image": image, "instruction": words}, target.masked_fill(~live[..., None], -100)


def action_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of the bins, averaged over dimensions and frames that are there, by twelve."""
    return F.cross_entropy(logits.flatten(0, 2), target.flatten(), ignore_index=-100) / 12
