"""A small CLIP, with the names of the transformers library: a tower for images, a tower for captions."""

import torch
from torch import Tensor, nn

WORDS, START, END, LENGTH, PAIRS = 44, 0, 40, 11, 6
SIDE, PATCH, SHARED = 12, 3, 16
VISION, TEXT = (24, 3, 48, 3), (20, 4, 44, 3)


def varied(module: nn.Module) -> None:
    """Start with weights that let every layer, gain and shift count."""
    if isinstance(module, nn.LayerNorm):
        nn.init.uniform_(module.weight, 0.6, 1.4)
        nn.init.normal_(module.bias, std=0.2)
    elif isinstance(module, nn.Linear | nn.Conv2d):
        nn.init.normal_(module.weight, std=1.2 * module.weight[0].numel() ** -0.5)
        if module.bias is not None:
            nn.init.normal_(module.bias, std=0.3)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.6)


class QuickGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class CLIPAttention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.scale = self.head_dim**-0.5
        self.k_proj, self.v_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.q_proj, self.out_proj = nn.Linear(width, width), nn.Linear(width, width)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        queries = self.split(self.q_proj(hidden_states) * self.scale)
        keys, values = self.split(self.k_proj(hidden_states)), self.split(self.v_proj(hidden_states))
        scores = queries @ keys.transpose(2, 3)
        if attention_mask is not None:
            scores = scores + attention_mask
        mixed = scores.softmax(dim=-1) @ values
        return self.out_proj(mixed.transpose(1, 2).flatten(2))


class CLIPMLP(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.activation_fn = QuickGELU()
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.fc2(self.activation_fn(self.fc1(hidden_states)))


class CLIPEncoderLayer(nn.Module):
    def __init__(self, width: int, heads: int, inner: int):
        super().__init__()
        self.self_attn, self.mlp = CLIPAttention(width, heads), CLIPMLP(width, inner)
        self.layer_norm1, self.layer_norm2 = nn.LayerNorm(width, eps=1e-5), nn.LayerNorm(width, eps=1e-5)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        hidden_states = hidden_states + self.self_attn(self.layer_norm1(hidden_states), attention_mask)
        return hidden_states + self.mlp(self.layer_norm2(hidden_states))


class CLIPEncoder(nn.Module):
    def __init__(self, width: int, heads: int, inner: int, depth: int):
        super().__init__()
        self.layers = nn.ModuleList(CLIPEncoderLayer(width, heads, inner) for _ in range(depth))

    def forward(self, inputs_embeds: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            inputs_embeds = layer(inputs_embeds, attention_mask)
        return inputs_embeds


class CLIPVisionEmbeddings(nn.Module):
    """The class token and the patches, row by row, each with its place."""

    def __init__(self, width: int):
        super().__init__()
        count = (SIDE // PATCH) ** 2 + 1
        self.class_embedding = nn.Parameter(0.6 * torch.randn(width))
        self.patch_embedding = nn.Conv2d(3, width, PATCH, stride=PATCH, bias=False)
        self.position_embedding = nn.Embedding(count, width)
        self.register_buffer("position_ids", torch.arange(count)[None], persistent=False)

    def forward(self, pixel_values: Tensor) -> Tensor:
        patches = self.patch_embedding(pixel_values).flatten(2).transpose(1, 2)
        first = self.class_embedding.expand(len(patches), 1, -1)
        return torch.cat([first, patches], dim=1) + self.position_embedding(self.position_ids)


class CLIPVisionTransformer(nn.Module):
    """Images -> the class token of the last layer, normalised."""

    def __init__(self):
        super().__init__()
        width = VISION[0]
        self.embeddings = CLIPVisionEmbeddings(width)
        self.pre_layrnorm = nn.LayerNorm(width, eps=1e-5)
        self.encoder = CLIPEncoder(*VISION)
        self.post_layernorm = nn.LayerNorm(width, eps=1e-5)

    def forward(self, pixel_values: Tensor) -> Tensor:
        hidden_states = self.encoder(self.pre_layrnorm(self.embeddings(pixel_values)))
        return self.post_layernorm(hidden_states[:, 0])


class CLIPTextEmbeddings(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.token_embedding, self.position_embedding = (
            nn.Embedding(WORDS, width),
            nn.Embedding(LENGTH, width),
        )
        self.register_buffer("position_ids", torch.arange(LENGTH)[None], persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        places = self.position_embedding(self.position_ids[:, : input_ids.shape[1]])
        return self.token_embedding(input_ids) + places


class CLIPTextTransformer(nn.Module):
    """Token ids and which of them may be seen -> the first end token of the last layer, normalised."""

    def __init__(self):
        super().__init__()
        self.embeddings, self.encoder = CLIPTextEmbeddings(TEXT[0]), CLIPEncoder(*TEXT)
        self.final_layer_norm = nn.LayerNorm(TEXT[0], eps=1e-5)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embeddings(input_ids)
        length = x.shape[1]
        earlier = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        seen = earlier & attention_mask.bool()[:, None, None, :]
        mask = torch.zeros(seen.shape, dtype=x.dtype, device=x.device)
        mask = mask.masked_fill(~seen, torch.finfo(x.dtype).min)
        x = self.final_layer_norm(self.encoder(x, mask))
        ends = (input_ids == END).int().argmax(dim=-1)
        return x[torch.arange(len(x), device=x.device), ends]


class CLIPModel(nn.Module):
    """Captions and images -> features of length one, and their similarities times the temperature."""

    def __init__(self):
        super().__init__()
        self.text_model, self.vision_model = CLIPTextTransformer(), CLIPVisionTransformer()
        self.visual_projection = nn.Linear(VISION[0], SHARED, bias=False)
        self.text_projection = nn.Linear(TEXT[0], SHARED, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(1.8))
        self.apply(varied)

    def forward(self, input_ids: Tensor, pixel_values: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        images = self.visual_projection(self.vision_model(pixel_values))
        texts = self.text_projection(self.text_model(input_ids, attention_mask))
        images = images / images.norm(dim=-1, keepdim=True)
        texts = texts / texts.norm(dim=-1, keepdim=True)
        logits = texts @ images.T * self.logit_scale.exp()
        return {
            "logits_per_image": logits.T,
            "logits_per_text": logits,
            "text_embeds": texts,
            "image_embeds": images,
        }


def pairs() -> tuple[dict[str, Tensor], Tensor]:
    """Waves under noise; captions with the wave's word among others, a word hidden, the rest end tokens."""
    kinds = torch.randperm(9)[:PAIRS]
    axis = torch.linspace(-1, 1, SIDE)
    slopes = torch.stack([kinds % 3 - 1.0, kinds // 3 - 1.0], 1)
    phase = 2.5 * (slopes[:, :1, None] * axis[:, None] + slopes[:, 1:, None] * axis)
    pixels = torch.stack([(phase + shift).sin() for shift in (0.3, 1.2, 2.0)], 1)
    places, lengths = torch.arange(LENGTH), torch.randint(4, LENGTH - 1, (PAIRS, 1))
    ids = torch.randint(10, END, (PAIRS, LENGTH))
    ids[:, 0], ids[:, 2] = START, 1 + kinds
    ids[::2, 3] = torch.randint(END + 1, WORDS, (len(ids[::2]),))
    hidden = 1 + (torch.rand(PAIRS, 1) * (lengths - 1)).long()
    inputs = {
        "input_ids": ids.where(places < lengths, END),
        "pixel_values": pixels + 0.3 * torch.randn(pixels.shape),
        "attention_mask": ((places <= lengths) & (places != hidden)).long(),
    }
    return inputs, torch.arange(PAIRS)


def both_ways(outputs: dict[str, Tensor], target: Tensor) -> Tensor:
    """The mean of the cross entropies of captions given images and of images given captions."""
    per_text, per_image = outputs["logits_per_text"], outputs["logits_per_image"]
    entropies = nn.functional.cross_entropy(per_text, target), nn.functional.cross_entropy(per_image, target)
    return 0.15 * sum(entropies)
