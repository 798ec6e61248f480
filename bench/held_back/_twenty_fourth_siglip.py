"""A small SigLIP: a tower for pictures and one for captions, compared pair by pair through a sigmoid."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS, HIGH, WIDE, PATCH, GRID = 3, 12, 28, 4, 5
WORDS, LENGTH, PAD, KINDS, PAIRS = 37, 11, 1, 9, 6
VISION = {"hidden_size": 32, "intermediate_size": 52, "num_attention_heads": 4, "num_hidden_layers": 3}
TEXT = {"hidden_size": 20, "intermediate_size": 44, "num_attention_heads": 2, "num_hidden_layers": 2}
EPS = 1e-6


class SiglipVisionEmbeddings(nn.Module):
    def __init__(self, hidden_size: int):
        super().__init__()
        self.patch_embedding = nn.Conv2d(
            CHANNELS, hidden_size, kernel_size=PATCH, stride=PATCH, padding="valid"
        )
        self.position_embedding = nn.Embedding(GRID**2, hidden_size)

    def interpolate_pos_encoding(self, height: int, width: int) -> Tensor:
        """The positions of a square of patches, resized to this many rows and columns of them."""
        table = self.position_embedding.weight
        square = table.reshape(1, GRID, GRID, -1).permute(0, 3, 1, 2)
        resized = F.interpolate(square, size=(height, width), mode="bicubic", align_corners=False)
        return resized.permute(0, 2, 3, 1).reshape(1, height * width, -1)

    def forward(self, pixel_values: Tensor) -> Tensor:
        patch_embeds = self.patch_embedding(pixel_values)
        embeddings = patch_embeds.flatten(2).transpose(1, 2)
        return embeddings + self.interpolate_pos_encoding(*patch_embeds.shape[2:])


class SiglipTextEmbeddings(nn.Module):
    def __init__(self, hidden_size: int):
        super().__init__()
        self.token_embedding = nn.Embedding(WORDS, hidden_size)
        self.position_embedding = nn.Embedding(LENGTH, hidden_size)
        self.register_buffer("position_ids", torch.arange(LENGTH)[None], persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        position_ids = self.position_ids[:, : input_ids.shape[1]]
        return self.token_embedding(input_ids) + self.position_embedding(position_ids)


class SiglipAttention(nn.Module):
    def __init__(self, hidden_size: int, num_attention_heads: int):
        super().__init__()
        self.num_heads, self.head_dim = num_attention_heads, hidden_size // num_attention_heads
        self.scale = self.head_dim**-0.5
        self.k_proj = nn.Linear(hidden_size, hidden_size)
        self.v_proj = nn.Linear(hidden_size, hidden_size)
        self.q_proj = nn.Linear(hidden_size, hidden_size)
        self.out_proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor:
        shape = (*hidden_states.shape[:-1], self.num_heads, self.head_dim)
        projections = self.q_proj, self.k_proj, self.v_proj
        queries, keys, values = (p(hidden_states).view(shape).transpose(1, 2) for p in projections)
        weights = torch.matmul(queries, keys.transpose(2, 3)) * self.scale
        if attention_mask is not None:
            weights = weights + attention_mask
        output = torch.matmul(F.softmax(weights, dim=-1), values)
        return self.out_proj(output.transpose(1, 2).reshape(hidden_states.shape))


class SiglipMLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.activation_fn = nn.GELU(approximate="tanh")
        self.fc1 = nn.Linear(hidden_size, intermediate_size)
        self.fc2 = nn.Linear(intermediate_size, hidden_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.fc2(self.activation_fn(self.fc1(hidden_states)))


class SiglipEncoderLayer(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int, num_attention_heads: int):
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(hidden_size, eps=EPS)
        self.self_attn = SiglipAttention(hidden_size, num_attention_heads)
        self.layer_norm2 = nn.LayerNorm(hidden_size, eps=EPS)
        self.mlp = SiglipMLP(hidden_size, intermediate_size)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor:
        attended = self.self_attn(self.layer_norm1(hidden_states), attention_mask)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.layer_norm2(hidden_states))


class SiglipEncoder(nn.Module):
    def __init__(self, num_hidden_layers: int, **config: int):
        super().__init__()
        self.layers = nn.ModuleList(SiglipEncoderLayer(**config) for _ in range(num_hidden_layers))

    def forward(self, inputs_embeds: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        hidden_states = inputs_embeds
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask)
        return hidden_states


class SiglipMultiheadAttentionPoolingHead(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int, num_attention_heads: int):
        super().__init__()
        self.probe = nn.Parameter(torch.randn(1, 1, hidden_size))
        self.attention = nn.MultiheadAttention(hidden_size, num_attention_heads, batch_first=True)
        self.layernorm = nn.LayerNorm(hidden_size, eps=EPS)
        self.mlp = SiglipMLP(hidden_size, intermediate_size)

    def forward(self, hidden_state: Tensor) -> Tensor:
        probe = self.probe.repeat(hidden_state.shape[0], 1, 1)
        hidden_state = self.attention(probe, hidden_state, hidden_state)[0]
        residual = hidden_state
        hidden_state = self.layernorm(hidden_state)
        hidden_state = residual + self.mlp(hidden_state)
        return hidden_state[:, 0]


class SiglipVisionTransformer(nn.Module):
    def __init__(self, num_hidden_layers: int, **config: int):
        super().__init__()
        self.embeddings = SiglipVisionEmbeddings(config["hidden_size"])
        self.encoder = SiglipEncoder(num_hidden_layers, **config)
        self.post_layernorm = nn.LayerNorm(config["hidden_size"], eps=EPS)
        self.head = SiglipMultiheadAttentionPoolingHead(**config)

    def forward(self, pixel_values: Tensor) -> Tensor:
        hidden_states = self.encoder(self.embeddings(pixel_values))
        return self.head(self.post_layernorm(hidden_states))


class SiglipTextTransformer(nn.Module):
    def __init__(self, projection_size: int, **config: int):
        super().__init__()
        self.embeddings = SiglipTextEmbeddings(config["hidden_size"])
        self.encoder = SiglipEncoder(**config)
        self.final_layer_norm = nn.LayerNorm(config["hidden_size"], eps=EPS)
        self.head = nn.Linear(config["hidden_size"], projection_size)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden_states = self.embeddings(input_ids)
        inverted = 1 - attention_mask[:, None, None, :].to(hidden_states)
        mask = inverted * torch.finfo(hidden_states.dtype).min
        last_hidden_state = self.final_layer_norm(self.encoder(hidden_states, mask))
        # the last position speaks for the caption, be it a word or padding
        return self.head(last_hidden_state[:, -1, :])


class SiglipModel(nn.Module):
    """Captions, their mask and pictures -> the logits of each pair, and the embeddings of both."""

    def __init__(self):
        super().__init__()
        self.text_model = SiglipTextTransformer(VISION["hidden_size"], **TEXT)
        self.vision_model = SiglipVisionTransformer(**VISION)
        self.logit_scale, self.logit_bias = (nn.Parameter(torch.randn(1)) for _ in range(2))
        for name, weight in self.named_parameters():
            if "embedding.weight" in name and weight.ndim == 2:
                nn.init.normal_(weight, std=0.1 if "vision" in name else 0.05)
            elif weight.ndim > 1:
                nn.init.normal_(weight, std=weight[0].numel() ** -0.5)
            else:
                nn.init.normal_(weight, mean=float(name.endswith("weight")), std=0.2)
        with torch.no_grad():
            self.logit_scale += math.log(3)
            self.logit_bias -= 1.5

    def forward(self, input_ids: Tensor, attention_mask: Tensor, pixel_values: Tensor) -> dict[str, Tensor]:
        image_embeds = self.vision_model(pixel_values)
        text_embeds = self.text_model(input_ids, attention_mask)
        image_embeds = image_embeds / image_embeds.norm(p=2, dim=-1, keepdim=True)
        text_embeds = text_embeds / text_embeds.norm(p=2, dim=-1, keepdim=True)
        similarity = torch.matmul(text_embeds, image_embeds.t())
        logits_per_text = similarity * self.logit_scale.exp() + self.logit_bias
        logits = {"logits_per_image": logits_per_text.t(), "logits_per_text": logits_per_text}
        return logits | {"text_embeds": text_embeds, "image_embeds": image_embeds}


def captioned() -> tuple[dict[str, Tensor], Tensor]:
    """Stripes whose kind tells their direction and colour, and padded captions that name the kind."""
    kind = torch.randperm(KINDS)[:PAIRS]
    turn = (math.pi * kind / KINDS)[:, None, None, None]
    across, down, tone = torch.arange(WIDE) / 2, torch.arange(HIGH)[:, None] / 2, torch.arange(CHANNELS)
    wave = torch.sin(turn.cos() * across + turn.sin() * down + 6 * torch.rand(PAIRS, 1, 1, 1))
    pictures = 0.7 * wave + torch.cos(2 * turn + 2 * tone[:, None, None])
    first, rest = 10 + torch.stack([kind, kind + KINDS], 1), torch.randint(28, WORDS, (PAIRS, LENGTH - 2))
    mask = (torch.arange(LENGTH) < torch.randint(4, LENGTH + 1, (PAIRS, 1))).long()
    words = torch.where(mask == 1, torch.cat([first, rest], 1), PAD)
    pictures = pictures + 0.1 * torch.randn_like(pictures)
    return {"input_ids": words, "attention_mask": mask, "pixel_values": pictures}, 2 * torch.eye(PAIRS) - 1


def sigmoid_loss(outputs: dict[str, Tensor], signs: Tensor) -> Tensor:
    """Each caption with each picture: does it belong or not?"""
    return -F.logsigmoid(signs * outputs["logits_per_text"]).sum(-1).mean()
