"""A small TrOCR: a distilled image transformer that reads a line, and a text decoder that writes it."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIGH, WIDE, PATCH, LINES = 12, 28, 4, 4
SEEN, SEEN_HEADS, SEEN_INNER, SEEN_LAYERS = 24, 3, 40, 3
TEXT, TEXT_HEADS, TEXT_INNER, TEXT_LAYERS = 30, 5, 44, 2
VOCABULARY, LENGTH, PLACES, PAD, START, IGNORED = 37, 11, 15, 1, 2, -100


def by_head(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(2, (heads, -1)).transpose(1, 2)


class DeiTEmbeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, SEEN))
        self.distillation_token = nn.Parameter(torch.zeros(1, 1, SEEN))
        self.patch_embeddings = nn.Conv2d(3, SEEN, PATCH, stride=PATCH)
        count = HIGH * WIDE // PATCH**2
        self.position_embeddings = nn.Parameter(torch.zeros(1, count + 2, SEEN))

    def forward(self, pixel_values: Tensor) -> Tensor:
        patches = self.patch_embeddings(pixel_values).flatten(2).transpose(1, 2)
        firsts = (x.expand(len(patches), -1, -1) for x in (self.cls_token, self.distillation_token))
        return torch.cat([*firsts, patches], 1) + self.position_embeddings


class DeiTAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(SEEN, SEEN)
        self.k_proj = nn.Linear(SEEN, SEEN)
        self.v_proj = nn.Linear(SEEN, SEEN)
        self.o_proj = nn.Linear(SEEN, SEEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(by_head, (self.q_proj(x), self.k_proj(x), self.v_proj(x)), (SEEN_HEADS,) * 3)
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class DeiTMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(SEEN, SEEN_INNER)
        self.activation_fn = nn.GELU()
        self.fc2 = nn.Linear(SEEN_INNER, SEEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation_fn(self.fc1(x)))


class DeiTLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = DeiTAttention()
        self.mlp = DeiTMLP()
        self.layernorm_before = nn.LayerNorm(SEEN, 1e-12)
        self.layernorm_after = nn.LayerNorm(SEEN, 1e-12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(self.layernorm_before(x)) + x
        return self.mlp(self.layernorm_after(x)) + x


class DeiTModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = DeiTEmbeddings()
        self.layers = nn.Sequential(*(DeiTLayer() for _ in range(SEEN_LAYERS)))
        self.layernorm = nn.LayerNorm(SEEN, 1e-12)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.layernorm(self.layers(self.embeddings(pixel_values)))


class TrOCRScaledWordEmbedding(nn.Embedding):
    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) * math.sqrt(TEXT)


class TrOCRLearnedPositionalEmbedding(nn.Embedding):
    offset = 2

    def forward(self, input_ids: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        return super().forward(places + self.offset)


class TrOCRAttention(nn.Module):
    def __init__(self, source: int):
        super().__init__()
        self.scaling = (TEXT // TEXT_HEADS) ** -0.5
        self.k_proj = nn.Linear(source, TEXT)
        self.v_proj = nn.Linear(source, TEXT)
        self.q_proj = nn.Linear(TEXT, TEXT)
        self.out_proj = nn.Linear(TEXT, TEXT)

    def forward(self, x: Tensor, key_value_states: Tensor, mask: Tensor | None = None) -> Tensor:
        found = (self.q_proj(x) * self.scaling, self.k_proj(key_value_states), self.v_proj(key_value_states))
        q, k, v = (by_head(y, TEXT_HEADS) for y in found)
        scores = q @ k.transpose(2, 3)
        if mask is not None:
            scores = scores + mask
        return self.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class TrOCRDecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = TrOCRAttention(TEXT)
        self.activation_fn = nn.GELU()
        self.self_attn_layer_norm = nn.LayerNorm(TEXT)
        self.encoder_attn = TrOCRAttention(SEEN)
        self.encoder_attn_layer_norm = nn.LayerNorm(TEXT)
        self.fc1 = nn.Linear(TEXT, TEXT_INNER)
        self.fc2 = nn.Linear(TEXT_INNER, TEXT)
        self.final_layer_norm = nn.LayerNorm(TEXT)

    def forward(self, x: Tensor, states: Tensor, mask: Tensor) -> Tensor:
        x = self.self_attn_layer_norm(x + self.self_attn(x, x, mask))
        x = self.encoder_attn_layer_norm(x + self.encoder_attn(x, states))
        return self.final_layer_norm(x + self.fc2(self.activation_fn(self.fc1(x))))


class TrOCRDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = TrOCRScaledWordEmbedding(VOCABULARY, TEXT, PAD)
        self.embed_positions = TrOCRLearnedPositionalEmbedding(PLACES + 2, TEXT)
        self.layernorm_embedding = nn.LayerNorm(TEXT)
        self.layers = nn.ModuleList(TrOCRDecoderLayer() for _ in range(TEXT_LAYERS))

    def forward(self, input_ids: Tensor, states: Tensor) -> Tensor:
        x = self.layernorm_embedding(self.embed_tokens(input_ids) + self.embed_positions(input_ids))
        mask = x.new_full((x.shape[1], x.shape[1]), -torch.inf).triu(1)
        for layer in self.layers:
            x = layer(x, states, mask)
        return x


class TrOCRForCausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = TrOCRDecoder()
        self.output_projection = nn.Linear(TEXT, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        return self.output_projection(self.model(input_ids, encoder_hidden_states))


def shift_tokens_right(labels: Tensor) -> Tensor:
    shifted = torch.cat([labels.new_full((len(labels), 1), START), labels[:, :-1]], 1)
    return shifted.masked_fill(shifted == IGNORED, PAD)


class VisionEncoderDecoderModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = DeiTModel()
        self.decoder = TrOCRForCausalLM()
        for name, p in self.named_parameters():
            size = 0.2 if p.dim() == 1 or "embed_" in name else p[0].numel() ** -0.5
            nn.init.normal_(p, "norm" in name and name.endswith("weight"), size)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        states = self.encoder(pixel_values)
        logits = self.decoder(shift_tokens_right(labels), states)
        return {"logits": logits, "encoder_last_hidden_state": states}


def written() -> tuple[dict[str, Tensor], Tensor]:
    """Lines of letters, each a stripe of its own waves, and the letters, an end, and nothing more."""
    labels = torch.randint(3, VOCABULARY, (LINES, LENGTH))
    count = torch.randint(4, LENGTH, (LINES, 1))
    at = (torch.arange(WIDE) * count) // WIDE
    letter = labels.gather(1, at)[:, None, None]
    rows, colors = torch.arange(HIGH)[:, None], torch.arange(1, 4)[:, None, None]
    pixels = torch.sin(letter * (1 + rows) * 0.1 * colors + letter) + 0.2 * torch.randn(LINES, 3, HIGH, WIDE)
    place = torch.arange(LENGTH).expand(LINES, -1)
    labels = labels.masked_fill(place == count, START).masked_fill(place > count, IGNORED)
    return {"pixel_values": pixels, "labels": labels}, labels


def misread(outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    """A quarter of the cross entropy of the letters that are there."""
    return F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), ignore_index=IGNORED) / 4
