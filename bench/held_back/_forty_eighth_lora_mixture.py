"""A small frozen encoder under a mixture of adapters: LoRA, DoRA, IA3, a prefix, prompts and a saved head."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, LONG, WIDTH, HEADS, INNER, LAYERS, CLASSES, TEXTS = 53, 11, 24, 3, 40, 3, 6, 7
PROMPTS, PREFIX, ALPHA, EPS = 4, 5, 6, 1e-5
RANKS, DORA_RANK = (3, 5, 2), 4


class LoraLinear(nn.Module):
    """A frozen layer and a product of two thin ones; with ``use_dora`` its rows' lengths are learned too."""

    def __init__(self, base_layer: nn.Linear, r: int, use_rslora: bool = False, use_dora: bool = False):
        super().__init__()
        self.base_layer, self.use_dora = base_layer, use_dora
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, r, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(r, base_layer.out_features, bias=False)})
        self.scaling = {"default": ALPHA / math.sqrt(r) if use_rslora else ALPHA / r}
        if use_dora:
            norm = base_layer.weight.norm(dim=1) * (1 + 0.2 * torch.rand(base_layer.out_features))
            self.lora_magnitude_vector = nn.ParameterDict({"default": norm})

    def apply_dora(self, x: Tensor) -> Tensor:
        lora_a, lora_b = self.lora_A["default"], self.lora_B["default"]
        magnitude, weight = self.lora_magnitude_vector["default"], self.base_layer.weight
        scaling = self.scaling["default"]
        norm = torch.linalg.norm(weight + scaling * lora_b.weight @ lora_a.weight, dim=1).detach()
        scale = (magnitude / norm).view(1, -1)
        return (scale - 1) * F.linear(x, weight) + scale * lora_b(lora_a(x)) * scaling

    def forward(self, x: Tensor) -> Tensor:
        result = self.base_layer(x)
        if self.use_dora:
            return result + self.apply_dora(x)
        return result + self.lora_B["default"](self.lora_A["default"](x)) * self.scaling["default"]


class IA3Linear(nn.Module):
    """A frozen layer whose output, or input if it ends a feed-forward block, is scaled by a vector."""

    def __init__(self, base_layer: nn.Linear, is_feedforward: bool):
        super().__init__()
        self.base_layer, self.is_feedforward = base_layer, is_feedforward
        size = base_layer.in_features if is_feedforward else base_layer.out_features
        self.ia3_l = nn.ParameterDict({"default": torch.empty(1, size)})

    def forward(self, x: Tensor) -> Tensor:
        scaling = self.ia3_l["default"].flatten()
        return self.base_layer(x * scaling) if self.is_feedforward else self.base_layer(x) * scaling


class ModulesToSaveWrapper(nn.Module):
    def __init__(self, module: nn.Module):
        super().__init__()
        self.original_module = module
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(module)})

    def forward(self, x: Tensor) -> Tensor:
        return self.modules_to_save["default"](x)


class BertSelfAttention(nn.Module):
    def __init__(self, i: int):
        super().__init__()
        self.query = LoraLinear(nn.Linear(WIDTH, WIDTH), RANKS[i], use_rslora=i == 1)
        self.key = IA3Linear(nn.Linear(WIDTH, WIDTH), False)
        self.value = LoraLinear(nn.Linear(WIDTH, WIDTH), RANKS[i], use_rslora=i == 1)

    def forward(self, x: Tensor, mask: Tensor, past: tuple[Tensor, Tensor] | None) -> Tensor:
        layers = self.query, self.key, self.value
        query, key, value = (layer(x).unflatten(2, (HEADS, -1)).transpose(1, 2) for layer in layers)
        if past is not None:
            key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
            mask = torch.cat([mask.new_ones(len(mask), PREFIX), mask], 1)
        scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[-1])
        scores = scores.masked_fill(mask[:, None, None] == 0, -1e9)
        return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)


class BertOutput(nn.Module):
    """The end of either half of a layer: a product, the sum with what came in, a trained norm."""

    def __init__(self, dense: nn.Module):
        super().__init__()
        self.dense, self.LayerNorm = dense, nn.LayerNorm(WIDTH, eps=EPS)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(x) + residual)


class BertAttention(nn.Module):
    def __init__(self, i: int):
        super().__init__()
        dense = nn.Linear(WIDTH, WIDTH)
        tuned = LoraLinear(dense, DORA_RANK, use_dora=True) if i == LAYERS - 1 else dense
        self.self, self.output = BertSelfAttention(i), BertOutput(tuned)

    def forward(self, x: Tensor, mask: Tensor, past: tuple[Tensor, Tensor] | None) -> Tensor:
        return self.output(self.self(x, mask, past), x)


class BertLayer(nn.Module):
    def __init__(self, i: int):
        super().__init__()
        self.attention = BertAttention(i)
        self.intermediate = nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU())
        self.output = BertOutput(IA3Linear(nn.Linear(INNER, WIDTH), True))

    def forward(self, x: Tensor, mask: Tensor, past: tuple[Tensor, Tensor] | None) -> Tensor:
        x = self.attention(x, mask, past)
        return self.output(self.intermediate(x), x)


class BertEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(i) for i in range(LAYERS))

    def forward(self, x: Tensor, mask: Tensor, past_key_values: dict) -> Tensor:
        for i, layer in enumerate(self.layer):
            x = layer(x, mask, past_key_values.get(i))
        return x


class BertEmbeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(WORDS, WIDTH)
        self.position_embeddings = nn.Embedding(LONG + PROMPTS, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH, eps=EPS)

    def forward(self, inputs_embeds: Tensor) -> Tensor:
        position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)
        return self.LayerNorm(inputs_embeds + self.position_embeddings(position_ids))


class BertForSequenceClassification(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings, self.encoder = BertEmbeddings(), BertEncoder()
        self.classifier = ModulesToSaveWrapper(nn.Linear(WIDTH, CLASSES))

    def forward(self, inputs_embeds: Tensor, mask: Tensor, past_key_values: dict) -> Tensor:
        x = self.encoder(self.embeddings(inputs_embeds), mask, past_key_values)
        last = mask.sum(1) - 1
        return self.classifier(x[torch.arange(len(x), device=x.device), last])


class PrefixEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(PREFIX, 2 * WIDTH)

    def forward(self, count: int) -> tuple[Tensor, Tensor]:
        past = self.embedding.weight.view(PREFIX, 2, HEADS, -1).permute(1, 2, 0, 3)
        return tuple(each.expand(count, -1, -1, -1) for each in past)


class PeftMixedModel(nn.Module):
    """Words and which of them are real -> class logits; prompts in front, a prefix in the second layer."""

    def __init__(self):
        super().__init__()
        self.base_model = BertForSequenceClassification()
        prompt = nn.Embedding(PROMPTS, WIDTH)
        self.prompt_encoder = nn.ModuleDict({"prompt": prompt, "prefix": PrefixEncoder()})
        tuned = "lora_", "ia3_", "LayerNorm", "modules_to_save", "prompt_encoder"
        for name, weight in self.named_parameters():
            if "magnitude" not in name:
                std = 0.9 / math.sqrt(weight.shape[-1]) if weight.dim() > 1 else 0.2
                std = 0.7 if "embedding" in name or "prompt_encoder.prompt" in name else std
                nn.init.normal_(weight, 1.0 if "LayerNorm.weight" in name or "ia3_" in name else 0.0, std)
            if "lora_B" in name:
                weight.data.mul_(0.3)
            weight.requires_grad_(any(word in name for word in tuned))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        prompts = self.prompt_encoder["prompt"].weight.expand(len(input_ids), -1, -1)
        inputs_embeds = torch.cat([prompts, self.base_model.embeddings.word_embeddings(input_ids)], 1)
        mask = torch.cat([attention_mask.new_ones(len(prompts), PROMPTS), attention_mask], 1)
        return self.base_model(inputs_embeds, mask, {1: self.prompt_encoder["prefix"](len(prompts))})


def texts() -> tuple[dict[str, Tensor], Tensor]:
    """Counting words of a stride that is the class, ended by zeros."""
    label, start = torch.randint(CLASSES, (TEXTS,)), torch.randint(WORDS, (TEXTS, 1))
    mask = (torch.arange(LONG) < torch.randint(5, LONG + 1, (TEXTS, 1))).long()
    words = (start + (label[:, None] + 1) * torch.arange(LONG)) % (WORDS - 1) + 1
    return {"input_ids": words * mask, "attention_mask": mask}, label


def part_of_entropy(logits: Tensor, label: Tensor) -> Tensor:
    """A fifth of the cross entropy."""
    return F.cross_entropy(logits, label) / 5
