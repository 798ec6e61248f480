"""A small Q-Former of BLIP-2: learned queries read a picture, alone or beside the words of a caption."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PAD, CLS, FIRST_THING, THINGS = 0, 1, 2, 11
PICTURES, PATCHES, WORDS, POSITIONS = 5, 7, 6, 12
WIDTH, HEADS, LAYERS, INNER, QUERIES = 16, 2, 3, 28, 4
CROSS_FREQUENCY, IMAGE_WIDTH, CONTRAST, LANGUAGE = 2, 12, 10, 14
layer_norm = partial(nn.LayerNorm, WIDTH, eps=1e-12)


class Blip2TextEmbeddings(nn.Module):
    """Words with their places, behind the queries where there are any."""

    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(FIRST_THING + THINGS, WIDTH, padding_idx=PAD)
        self.position_embeddings = nn.Embedding(POSITIONS, WIDTH)

    def forward(self, input_ids: Tensor, query_embeds: Tensor | None = None) -> Tensor:
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        embeddings = self.word_embeddings(input_ids) + self.position_embeddings(position_ids)
        return embeddings if query_embeds is None else torch.cat([query_embeds, embeddings], dim=1)


class Blip2QFormerMultiHeadAttention(nn.Module):
    def __init__(self, is_cross_attention: bool):
        super().__init__()
        source = IMAGE_WIDTH if is_cross_attention else WIDTH
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key, self.value = nn.Linear(source, WIDTH), nn.Linear(source, WIDTH)

    def transpose_for_scores(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (HEADS, WIDTH // HEADS)).permute(0, 2, 1, 3)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor, source: Tensor) -> Tensor:
        key_layer = self.transpose_for_scores(self.key(source))
        value_layer = self.transpose_for_scores(self.value(source))
        query_layer = self.transpose_for_scores(self.query(hidden_states))
        attention_scores = query_layer @ key_layer.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
        attention_probs = (attention_scores + attention_mask).softmax(dim=-1)
        return (attention_probs @ value_layer).permute(0, 2, 1, 3).flatten(2)


class Blip2QFormerSelfOutput(nn.Module):
    def __init__(self, inner: int = WIDTH):
        super().__init__()
        self.dense, self.LayerNorm = nn.Linear(inner, WIDTH), layer_norm()

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(hidden_states) + input_tensor)


class Blip2QFormerAttention(nn.Module):
    def __init__(self, is_cross_attention: bool = False):
        super().__init__()
        self.attention = Blip2QFormerMultiHeadAttention(is_cross_attention)
        self.output = Blip2QFormerSelfOutput()

    def forward(self, hidden_states: Tensor, attention_mask: Tensor, source: Tensor) -> Tensor:
        return self.output(self.attention(hidden_states, attention_mask, source), hidden_states)


class Blip2QFormerIntermediate(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.intermediate_act_fn = nn.Linear(WIDTH, INNER), nn.GELU()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.intermediate_act_fn(self.dense(hidden_states))


class Blip2QFormerOutput(Blip2QFormerSelfOutput):
    def __init__(self):
        super().__init__(INNER)


class Blip2QFormerLayer(nn.Module):
    """All attend to all; then the queries look at the picture, in some layers, and go their own way."""

    def __init__(self, layer_idx: int):
        super().__init__()
        self.attention = Blip2QFormerAttention()
        self.has_cross_attention = layer_idx % CROSS_FREQUENCY == 0
        if self.has_cross_attention:
            self.crossattention = Blip2QFormerAttention(is_cross_attention=True)
        self.intermediate, self.output = Blip2QFormerIntermediate(), Blip2QFormerOutput()
        self.intermediate_query, self.output_query = Blip2QFormerIntermediate(), Blip2QFormerOutput()

    def forward(self, hidden_states: Tensor, mask: Tensor, length: int, image, image_mask) -> Tensor:
        attention_output, layer_output = self.attention(hidden_states, mask, hidden_states), []
        query, text = attention_output[:, :length], attention_output[:, length:]
        if length > 0:
            if self.has_cross_attention:
                query = self.crossattention(query, image_mask, image)
            layer_output.append(self.output_query(self.intermediate_query(query), query))
        if text.shape[1] > 0:
            layer_output.append(self.output(self.intermediate(text), text))
        return torch.cat(layer_output, dim=1)


class Blip2QFormerEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.ModuleList(Blip2QFormerLayer(i) for i in range(LAYERS))

    def forward(self, hidden_states: Tensor, mask: Tensor, length: int, image, image_mask) -> Tensor:
        for layer in self.layer:
            hidden_states = layer(hidden_states, mask, length, image, image_mask)
        return hidden_states


class Blip2QFormerModel(nn.Module):
    """Queries, words or both [N, L, D] -> what becomes of them; ``length`` queries come first."""

    def __init__(self):
        super().__init__()
        self.layernorm, self.encoder = layer_norm(), Blip2QFormerEncoder()

    def extended(self, mask: Tensor | None, like: Tensor) -> Tensor:
        return like.new_zeros(1, 1, 1, 1) if mask is None else -10000 * (1 - mask[:, None, None].to(like))

    def forward(self, embeds: Tensor, length: int, mask=None, image=None, image_mask=None) -> Tensor:
        x = self.layernorm(embeds)
        return self.encoder(x, self.extended(mask, x), length, image, self.extended(image_mask, x))


class Blip2ForImageTextRetrieval(nn.Module):
    """Features and captions -> how alike each two are, and whether each picture's ``pairs`` text fits."""

    def __init__(self):
        super().__init__()
        self.query_tokens = nn.Parameter(torch.randn(1, QUERIES, WIDTH))
        self.embeddings, self.qformer = Blip2TextEmbeddings(), Blip2QFormerModel()
        self.vision_projection = nn.Linear(WIDTH, CONTRAST)
        self.text_projection = nn.Linear(WIDTH, CONTRAST)
        self.itm_head, self.language_projection = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, LANGUAGE)
        self.logit_scale = nn.Parameter(torch.tensor(1.3))
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_normal_(module.weight, 1.5 if name.endswith(("query", "key")) else 1.0)
                nn.init.normal_(module.bias, std=0.2)
            elif isinstance(module, nn.LayerNorm):
                nn.init.uniform_(module.weight, 0.6, 1.4)
                nn.init.normal_(module.bias, std=0.2)

    def forward(self, image: Tensor, image_mask: Tensor, ids: Tensor, mask: Tensor, pairs: Tensor) -> dict:
        query, picture = self.query_tokens.expand(len(ids), -1, -1), (image, image_mask)
        seen = self.qformer(query, QUERIES, None, *picture)
        image_embeds = F.normalize(self.vision_projection(seen), dim=-1)
        text_embeds = self.qformer(self.embeddings(ids), 0, mask)[:, 0]
        text_embeds = F.normalize(self.text_projection(text_embeds), dim=-1)
        similarity = (image_embeds @ text_embeds.t()).max(dim=1).values
        beside = torch.cat([mask.new_ones(query.shape[:2]), mask[pairs]], dim=1)
        joint = self.qformer(self.embeddings(ids[pairs], query), QUERIES, beside, *picture)[:, :QUERIES]
        return {
            "logits_per_image": self.logit_scale.exp() * similarity,
            "itm_score": self.itm_head(joint).mean(dim=1),
            "language_model_inputs": self.language_projection(seen),
            "image_embeds": image_embeds,
            "text_embeds": text_embeds,
        }


def waves(numbers: Tensor, width: int, rate: float) -> Tensor:
    return torch.cos(rate * (numbers[..., None] + 1) * torch.arange(1, width + 1))


def captioned() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Pictures of a few things, told in their order; beside two of five stands their own caption."""
    things = torch.rand(PICTURES, THINGS).argsort(1)[:, : WORDS - 1]
    told, own = torch.randint(2, WORDS, (PICTURES, 1)), torch.arange(PICTURES)
    patches = things.gather(1, torch.arange(PATCHES) % told)
    image = waves(patches, IMAGE_WIDTH, 0.7) + 0.5 * waves(torch.arange(PATCHES), IMAGE_WIDTH, 0.2)
    image_mask, mask = (torch.arange(PATCHES) < told + 2).long(), (torch.arange(WORDS) <= told).long()
    image = torch.where(image_mask[:, :, None] > 0, image, 1) + 0.2 * torch.randn_like(image)
    ids = F.pad(things + FIRST_THING, (1, 0), value=CLS).masked_fill(mask == 0, PAD)
    moved, listed = torch.randperm(PICTURES)[:3], mask[:, 1:, None]
    pairs = own.index_put((moved,), moved.roll(1))
    wanted = (waves(things, LANGUAGE, 0.9) * listed).sum(1) / told
    given = {"image": image, "image_mask": image_mask, "ids": ids, "mask": mask, "pairs": pairs}
    return given, {"own": own, "match": (pairs == own).long(), "wanted": wanted}


def contrast_and_match(outputs: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
    """Each picture finds its text and each text its picture; right pairs; what the queries tell of it."""
    logits, prefix = outputs["logits_per_image"], outputs["language_model_inputs"].mean(1)
    contrast = F.cross_entropy(logits, target["own"]) + F.cross_entropy(logits.t(), target["own"])
    match = F.cross_entropy(outputs["itm_score"], target["match"])
    return contrast / 2 + match + F.mse_loss(prefix, target["wanted"].to(prefix))
