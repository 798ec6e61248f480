"""A small captioner: an encoder as Swin's under one window, a projection, a BART decoder with a tied head."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIGH, WIDE, PATCH, RATIO = 16, 32, 2, 2
WIDTHS, HEADS, DEPTH = (12, 24), (2, 3), 2
MODEL, DECODER_HEADS, FFN, LAYERS = 20, 4, 36, 2
VOCABULARY, LONGEST, LENGTH, PICTURES = 37, 14, 9, 4
START, PAD, SMOOTH = 2, 1, 0.1


class SwinSelfAttention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        given = (self.query(x), self.key(x), self.value(x))
        q, k, v = (y.unflatten(2, (self.heads, -1)).transpose(1, 2) for y in given)
        scores = q @ k.transpose(2, 3) / math.sqrt(self.size)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class Dense(nn.Module):
    """What the library calls an output or an intermediate: one linear layer, and its activation."""

    def __init__(self, width: int, out: int, act: bool = False):
        super().__init__()
        self.dense = nn.Linear(width, out)
        self.intermediate_act_fn = nn.GELU() if act else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.intermediate_act_fn(self.dense(x))


class SwinAttention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.self = SwinSelfAttention(width, heads)
        self.output = Dense(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.self(x))


class SwinLayer(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.layernorm_before, self.layernorm_after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = SwinAttention(width, heads)
        self.intermediate = Dense(width, RATIO * width, act=True)
        self.output = Dense(RATIO * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention(self.layernorm_before(x).flatten(1, 2))
        x = x + y.view_as(x)
        return x + self.output(self.intermediate(self.layernorm_after(x)))


class SwinPatchMerging(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.reduction, self.norm = nn.Linear(4 * width, 2 * width, bias=False), nn.LayerNorm(4 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1)
        return self.reduction(self.norm(x))


class SwinStage(nn.Module):
    def __init__(self, i: int):
        super().__init__()
        self.blocks = nn.ModuleList(SwinLayer(WIDTHS[i], HEADS[i]) for _ in range(DEPTH))
        self.downsample = SwinPatchMerging(WIDTHS[i]) if i == 0 else None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x if self.downsample is None else self.downsample(x)


class SwinModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.ModuleDict({"projection": nn.Conv2d(3, WIDTHS[0], PATCH, PATCH)})
        self.embeddings["norm"] = nn.LayerNorm(WIDTHS[0])
        self.layers = nn.ModuleList(SwinStage(i) for i in range(2))

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.embeddings["norm"](self.embeddings["projection"](pixel_values).permute(0, 2, 3, 1))
        for layer in self.layers:
            x = layer(x)
        return x.flatten(1, 2)


class BartAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.scaling = (MODEL // DECODER_HEADS) ** -0.5
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (nn.Linear(MODEL, MODEL) for _ in range(4))

    def forward(self, x: Tensor, states: Tensor, mask: Tensor | None = None) -> Tensor:
        given = (self.q_proj(x) * self.scaling, self.k_proj(states), self.v_proj(states))
        q, k, v = (y.unflatten(2, (DECODER_HEADS, -1)).transpose(1, 2) for y in given)
        scores = q @ k.transpose(2, 3)
        scores = scores if mask is None else scores.masked_fill(~mask, torch.finfo(x.dtype).min)
        return self.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class BartDecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.self_attn_layer_norm = BartAttention(), nn.LayerNorm(MODEL)
        self.encoder_attn, self.encoder_attn_layer_norm = BartAttention(), nn.LayerNorm(MODEL)
        self.fc1, self.activation_fn, self.fc2 = nn.Linear(MODEL, FFN), nn.GELU(), nn.Linear(FFN, MODEL)
        self.final_layer_norm = nn.LayerNorm(MODEL)

    def forward(self, x: Tensor, states: Tensor, mask: Tensor) -> Tensor:
        x = self.self_attn_layer_norm(x + self.self_attn(x, x, mask))
        x = self.encoder_attn_layer_norm(x + self.encoder_attn(x, states))
        return self.final_layer_norm(x + self.fc2(self.activation_fn(self.fc1(x))))


class BartLearnedPositionalEmbedding(nn.Embedding):
    offset = 2

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(torch.arange(tokens.shape[1], device=tokens.device) + self.offset)


class BartForCausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, MODEL, PAD)
        self.embed_positions = BartLearnedPositionalEmbedding(LONGEST + 2, MODEL)
        self.layernorm_embedding = nn.LayerNorm(MODEL)
        self.layers = nn.ModuleList(BartDecoderLayer() for _ in range(LAYERS))
        self.lm_head = nn.Linear(MODEL, VOCABULARY, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        self.register_buffer("final_logits_bias", 0.3 * torch.randn(1, VOCABULARY))

    def forward(self, tokens: Tensor, seen: Tensor, states: Tensor) -> Tensor:
        x = self.embed_tokens(tokens) * math.sqrt(MODEL) + self.embed_positions(tokens)
        x = self.layernorm_embedding(x)
        mask = seen[:, None, None].bool() & torch.ones_like(seen[0]).expand(x.shape[1], -1).tril().bool()
        for layer in self.layers:
            x = layer(x, states, mask)
        return self.lm_head(x) + self.final_logits_bias


class VisionEncoderDecoder(nn.Module):
    """Pictures [N, 3, H, W] and the tokens before [N, T] -> logits [N, T, V]."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = SwinModel(), BartForCausalLM()
        self.enc_to_dec_proj = nn.Linear(WIDTHS[1], MODEL)
        for name, p in self.named_parameters():
            if "norm" in name:
                nn.init.normal_(p, float(name.endswith("weight")), 0.2)
            elif "embed_" in name:
                nn.init.normal_(p, 0, 0.3)

    def forward(
        self, pixel_values: Tensor, decoder_input_ids: Tensor, decoder_attention_mask: Tensor
    ) -> Tensor:
        states = self.enc_to_dec_proj(self.encoder(pixel_values))
        return self.decoder(decoder_input_ids, decoder_attention_mask, states)


def captions() -> tuple[dict[str, Tensor], Tensor]:
    """Waves of several colours and directions, and captions of several lengths that follow from them."""
    kind, lengths = torch.randint(1, 6, (PICTURES, 3)), torch.randint(5, LENGTH + 1, (PICTURES,))
    y, x = torch.arange(HIGH)[:, None] / HIGH, torch.arange(WIDE) / WIDE
    phase = kind[:, :1, None, None] * y + kind[:, 1:2, None, None] * x + kind[..., None, None] / 6
    pictures = (math.tau * phase).sin() + 0.2 * torch.randn(PICTURES, 3, HIGH, WIDE)
    steps = torch.arange(LENGTH)
    labels = 3 + (kind[:, :1] * steps + 5 * kind[:, 1:2] + kind[:, 2:]) % (VOCABULARY - 3)
    labels = torch.where(steps < lengths[:, None], labels, -100)
    tokens = F.pad(labels, (1, -1), value=START).masked_fill(steps > lengths[:, None], PAD)
    tokens = tokens.masked_fill(tokens == -100, PAD)
    inputs = {"pixel_values": pictures, "decoder_input_ids": tokens}
    return inputs | {"decoder_attention_mask": (tokens != PAD).long()}, labels


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross entropy of smoothed labels over the tokens that are not padded, by eight."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=SMOOTH) / 8
