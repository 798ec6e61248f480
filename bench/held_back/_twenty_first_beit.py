"""A tiny BEiT that reads pictures with masked patches: it tells their visual tokens and a kind."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, INNER, LAYERS, EPS, TOKENS, IGNORED = 24, 3, 48, 3, 1e-12, 10, -100
CHANNELS, PATCH, WINDOW, PICTURES, MASKED = 3, 3, (3, 4), 5, 5
STEPS = ((1, 1), (1, 3), (2, 1), (3, 2))


class BeitPatchEmbeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.projection = nn.Conv2d(CHANNELS, WIDTH, kernel_size=PATCH, stride=PATCH)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.projection(pixel_values).flatten(2).transpose(1, 2)


class BeitEmbeddings(nn.Module):
    """The class token, and the patches, of which the masked ones give way to the mask token."""

    def __init__(self):
        super().__init__()
        self.cls_token, self.mask_token = (nn.Parameter(torch.zeros(1, 1, WIDTH)) for _ in range(2))
        self.patch_embeddings = BeitPatchEmbeddings()

    def forward(self, pixel_values: Tensor, bool_masked_pos: Tensor) -> Tensor:
        embeddings = self.patch_embeddings(pixel_values)
        w = bool_masked_pos.unsqueeze(-1).type_as(embeddings)
        embeddings = embeddings * (1 - w) + self.mask_token * w
        return torch.cat((self.cls_token.expand(len(embeddings), -1, -1), embeddings), dim=1)


class BeitRelativePositionBias(nn.Module):
    """A bias per head for each difference of places; the last three entries are the class token's."""

    def __init__(self):
        super().__init__()
        self.window_size = height, width = WINDOW
        self.num_relative_distance = (2 * height - 1) * (2 * width - 1) + 3
        self.relative_position_bias_table = nn.Parameter(torch.zeros(self.num_relative_distance, HEADS))

    def generate_relative_position_index(self, device: torch.device) -> Tensor:
        height, width = self.window_size
        coords = torch.cartesian_prod(*(torch.arange(n, device=device) for n in (height, width))).T
        relative = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0)
        relative[:, :, 0] += height - 1
        relative[:, :, 1] += width - 1
        relative[:, :, 0] *= 2 * width - 1
        index = relative.new_zeros((height * width + 1,) * 2)
        index[1:, 1:] = relative.sum(-1)
        index[0, 0:] = self.num_relative_distance - 3
        index[0:, 0] = self.num_relative_distance - 2
        index[0, 0] = self.num_relative_distance - 1
        return index

    def forward(self) -> Tensor:
        index = self.generate_relative_position_index(self.relative_position_bias_table.device)
        return self.relative_position_bias_table[index].permute(2, 0, 1).unsqueeze(0)


class BeitSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_attention_heads, self.attention_head_size = HEADS, WIDTH // HEADS
        self.query, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.relative_position_bias = BeitRelativePositionBias()

    def forward(self, hidden_states: Tensor, relative_position_bias: Tensor) -> Tensor:
        layers, shape = (
            (self.query, self.key, self.value),
            (self.num_attention_heads, self.attention_head_size),
        )
        q, k, v = (layer(hidden_states).unflatten(2, shape).transpose(1, 2) for layer in layers)
        scores = q @ k.transpose(-1, -2) / self.attention_head_size**0.5
        scores = scores + self.relative_position_bias() + relative_position_bias
        return (scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2)


class BeitOutput(nn.Module):
    def __init__(self, given: int):
        super().__init__()
        self.dense = nn.Linear(given, WIDTH)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.dense(hidden_states)


class BeitAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = BeitSelfAttention()
        self.output = BeitOutput(WIDTH)

    def forward(self, hidden_states: Tensor, relative_position_bias: Tensor) -> Tensor:
        return self.output(self.attention(hidden_states, relative_position_bias))


class BeitIntermediate(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(WIDTH, INNER)
        self.intermediate_act_fn = nn.GELU()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.intermediate_act_fn(self.dense(hidden_states))


class BeitLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = BeitAttention()
        self.intermediate, self.output = BeitIntermediate(), BeitOutput(INNER)
        self.layernorm_before, self.layernorm_after = (nn.LayerNorm(WIDTH, eps=EPS) for _ in range(2))
        self.lambda_1, self.lambda_2 = (nn.Parameter(torch.ones(WIDTH)) for _ in range(2))

    def forward(self, hidden_states: Tensor, relative_position_bias: Tensor) -> Tensor:
        attention_output = self.attention(self.layernorm_before(hidden_states), relative_position_bias)
        hidden_states = self.lambda_1 * attention_output + hidden_states
        layer_output = self.output(self.intermediate(self.layernorm_after(hidden_states)))
        return self.lambda_2 * layer_output + hidden_states


class BeitEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.relative_position_bias = BeitRelativePositionBias()
        self.layer = nn.ModuleList(BeitLayer() for _ in range(LAYERS))

    def forward(self, hidden_states: Tensor) -> Tensor:
        bias = self.relative_position_bias()
        for layer_module in self.layer:
            hidden_states = layer_module(hidden_states, bias)
        return hidden_states


class BeitPooler(nn.Module):
    def __init__(self):
        super().__init__()
        self.layernorm = nn.LayerNorm(WIDTH, eps=EPS)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.layernorm(hidden_states[:, 1:, :].mean(1))


class BeitModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings, self.encoder, self.pooler = BeitEmbeddings(), BeitEncoder(), BeitPooler()

    def forward(self, pixel_values: Tensor, bool_masked_pos: Tensor) -> tuple[Tensor, Tensor]:
        hidden_states = self.encoder(self.embeddings(pixel_values, bool_masked_pos))
        return hidden_states, self.pooler(hidden_states)


class BeitForMaskedImageModeling(nn.Module):
    """The scores of the visual tokens of all patches, and those of the kind by the mean of the patches."""

    def __init__(self):
        super().__init__()
        self.beit, self.layernorm = BeitModel(), nn.LayerNorm(WIDTH, eps=EPS)
        self.lm_head, self.classifier = nn.Linear(WIDTH, TOKENS), nn.Linear(WIDTH, len(STEPS))
        for name, weight in self.named_parameters():
            size = weight[0].numel() ** -0.5 if name.endswith(".weight") and weight.ndim > 1 else 0.4
            size *= 1.6 if "query" in name or "key" in name else 1
            center = 0.7 * ("lambda" in name) + ("norm" in name and "weight" in name)
            nn.init.normal_(weight, center, 0.2 if "lambda" in name else size)

    def forward(self, pixel_values: Tensor, bool_masked_pos: Tensor) -> dict[str, Tensor]:
        sequence_output, pooled_output = self.beit(pixel_values, bool_masked_pos)
        logits = self.lm_head(self.layernorm(sequence_output)[:, 1:])
        return {"logits": logits, "class_logits": self.classifier(pooled_output)}


def mosaics() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Patches of a small book of waves that step on by rows and columns as the kind says, some masked."""
    kinds = torch.randint(len(STEPS), (PICTURES,))
    down, across = torch.tensor(STEPS)[kinds].T[:, :, None, None]
    start = torch.randint(TOKENS, (PICTURES, 1, 1))
    tokens = (start + down * torch.arange(WINDOW[0])[:, None] + across * torch.arange(WINDOW[1])) % TOKENS
    book = torch.sin(1.7 * torch.outer(torch.arange(1.0, TOKENS + 1), torch.arange(1.0, CHANNELS * 9 + 1)))
    clean = F.pixel_shuffle(book[tokens].permute(0, 3, 1, 2), PATCH)
    pixels = clean + 0.15 * torch.randn_like(clean)
    masked = torch.rand(PICTURES, WINDOW[0] * WINDOW[1]).argsort(1) < MASKED
    labels = tokens.flatten(1).masked_fill(~masked, IGNORED)
    return {"pixel_values": pixels, "bool_masked_pos": masked}, {"labels": labels, "kinds": kinds}


def masked_modeling(outputs: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
    """Cross entropy of the tokens at masked places, and half as much of the kind of the picture."""
    tokens = F.cross_entropy(outputs["logits"].mT, target["labels"], ignore_index=IGNORED)
    return tokens + 0.5 * F.cross_entropy(outputs["class_logits"], target["kinds"])
