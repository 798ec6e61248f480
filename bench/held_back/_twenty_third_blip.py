"""A small BLIP: a picture, a text encoder that reads with or without it, a decoder that captions it."""

from collections import OrderedDict
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PICTURES, CHANNELS, HIGH, WIDE, PATCH, LENGTH, IGNORED = 4, 3, 8, 12, 4, 7, -100
PAD, CLS, SEP, ENC, DEC, ON, COLOUR, WAY, SIZE, WORDS = 0, 1, 2, 3, 4, 5, 6, 9, 11, 14
SEEN, INNER, SEEN_HEADS, SEEN_LAYERS = 16, 32, 2, 3
READ, READ_INNER, READ_HEADS, PLACES, JOINT = 12, 20, 3, 9, 8
seen_norm, read_norm = partial(nn.LayerNorm, SEEN, eps=1e-5), partial(nn.LayerNorm, READ, eps=1e-12)


def chain(**parts: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(parts))


class Parts(nn.Module):
    """A module that is given its parts by their names."""

    def __init__(self, /, **parts: nn.Module | nn.Parameter):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


class BlipVisionEmbeddings(Parts):
    def forward(self, pixel_values: Tensor) -> Tensor:
        patch_embeds = self.patch_embedding(pixel_values).flatten(2).transpose(1, 2)
        class_embeds = self.class_embedding.expand(len(pixel_values), 1, -1)
        return torch.cat([class_embeds, patch_embeds], 1) + self.position_embedding


class BlipAttention(Parts):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, SEEN_HEADS, -1)).permute(2, 0, 3, 1, 4)
        shares = (q @ k.transpose(2, 3) * q.shape[3] ** -0.5).softmax(-1)
        return self.projection((shares @ v).transpose(1, 2).flatten(2))


class BlipEncoderLayer(Parts):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class BlipTextEmbeddings(Parts):
    def forward(self, input_ids: Tensor) -> Tensor:
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        return self.LayerNorm(self.word_embeddings(input_ids) + self.position_embeddings(position_ids))


class BlipTextSelfAttention(Parts):
    def forward(self, x: Tensor, source: Tensor, attention_mask: Tensor | float) -> Tensor:
        maps = self.query(x), self.key(source), self.value(source)
        q, k, v = (y.unflatten(2, (READ_HEADS, -1)).transpose(1, 2) for y in maps)
        scores = q @ k.transpose(2, 3) / q.shape[3] ** 0.5 + attention_mask
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class BlipTextOutput(Parts):
    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(hidden_states) + input_tensor)


class BlipTextAttention(Parts):
    def forward(self, x: Tensor, source: Tensor, attention_mask: Tensor | float = 0.0) -> Tensor:
        return self.output(self.self(x, source, attention_mask), x)


class BlipTextLayer(Parts):
    def forward(self, x: Tensor, attention_mask: Tensor, picture: Tensor | None) -> Tensor:
        x = self.attention(x, x, attention_mask)
        if picture is not None:
            x = self.crossattention(x, picture)
        return self.output(self.intermediate(x), x)


class BlipTextEncoder(Parts):
    def forward(self, x: Tensor, attention_mask: Tensor, picture: Tensor | None) -> Tensor:
        for layer in self.layer:
            x = layer(x, attention_mask, picture)
        return x


class BlipTextModel(Parts):
    def forward(self, input_ids: Tensor, mask: Tensor, picture=None, is_decoder: bool = False) -> Tensor:
        x, seen = self.embeddings(input_ids), mask[:, None, None]
        if is_decoder:
            seen = seen * mask.new_ones(mask.shape[1], mask.shape[1]).tril()
        return self.encoder(x, -10000.0 * (1 - seen).to(x), picture)


class BlipTextLMHeadModel(Parts):
    def forward(self, input_ids: Tensor, mask: Tensor, picture: Tensor) -> Tensor:
        return self.cls(self.bert(input_ids, mask, picture, is_decoder=True))


def vision_model() -> nn.Sequential:
    def layer() -> nn.Module:
        attn = BlipAttention(qkv=nn.Linear(SEEN, 3 * SEEN), projection=nn.Linear(SEEN, SEEN))
        mlp = chain(fc1=nn.Linear(SEEN, INNER), activation_fn=nn.GELU(), fc2=nn.Linear(INNER, SEEN))
        return BlipEncoderLayer(self_attn=attn, layer_norm1=seen_norm(), mlp=mlp, layer_norm2=seen_norm())

    mark, count = nn.Parameter(0.7 * torch.randn(1, 1, SEEN)), HIGH * WIDE // PATCH**2 + 1
    embeddings = BlipVisionEmbeddings(class_embedding=mark)
    embeddings.patch_embedding = nn.Conv2d(CHANNELS, SEEN, PATCH, stride=PATCH)
    embeddings.position_embedding = nn.Parameter(0.5 * torch.randn(1, count, SEEN))
    encoder = chain(layers=nn.Sequential(*(layer() for _ in range(SEEN_LAYERS))))
    return chain(embeddings=embeddings, encoder=encoder, post_layernorm=seen_norm())


def text_model(layers: int) -> BlipTextModel:
    def output(inputs: int) -> nn.Module:
        return BlipTextOutput(dense=nn.Linear(inputs, READ), LayerNorm=read_norm())

    def attention(source: int) -> nn.Module:
        maps = {"query": nn.Linear(READ, READ), "key": nn.Linear(source, READ)}
        looked = BlipTextSelfAttention(**maps, value=nn.Linear(source, READ))
        return BlipTextAttention(**{"self": looked, "output": output(READ)})

    def layer() -> nn.Module:
        inner = chain(dense=nn.Linear(READ, READ_INNER), intermediate_act_fn=nn.GELU())
        looks = {"attention": attention(READ), "crossattention": attention(SEEN)}
        return BlipTextLayer(**looks, intermediate=inner, output=output(READ_INNER))

    embeddings = BlipTextEmbeddings(word_embeddings=nn.Embedding(WORDS, READ), LayerNorm=read_norm())
    embeddings.position_embeddings = nn.Embedding(PLACES, READ)
    encoder = BlipTextEncoder(layer=nn.ModuleList(layer() for _ in range(layers)))
    return BlipTextModel(embeddings=embeddings, encoder=encoder)


class BlipForPretraining(nn.Module):
    """Pictures, texts and the text to match to each picture -> what contrast, match and caption need."""

    def __init__(self):
        super().__init__()
        self.vision_model, self.text_encoder, bert = vision_model(), text_model(2), text_model(3)
        transform = chain(dense=nn.Linear(READ, READ), transform_act_fn=nn.GELU(), LayerNorm=read_norm())
        head = chain(predictions=chain(transform=transform, decoder=nn.Linear(READ, WORDS)))
        self.text_decoder, self.itm_head = BlipTextLMHeadModel(bert=bert, cls=head), nn.Linear(READ, 2)
        self.vision_proj, self.text_proj = nn.Linear(SEEN, JOINT), nn.Linear(READ, JOINT)
        self.logit_scale = nn.Parameter(torch.tensor(1.4))
        for name, weight in self.named_parameters():
            if name.lower().endswith(("norm.weight", "norm1.weight", "norm2.weight")):
                nn.init.uniform_(weight, 0.6, 1.4)
            elif name.endswith(("weight", "bias")):
                nn.init.normal_(weight, std=0.2 if weight.ndim == 1 else 0.3)
        head.predictions.decoder.weight = bert.embeddings.word_embeddings.weight

    def forward(self, pixel_values, input_ids: Tensor, attention_mask: Tensor, pairs: Tensor) -> dict:
        picture, words = self.vision_model(pixel_values), self.text_encoder(input_ids, attention_mask)
        image_embeds = F.normalize(self.vision_proj(picture[:, 0]), dim=-1)
        text_embeds = F.normalize(self.text_proj(words[:, 0]), dim=-1)
        pair_ids, caption_ids = input_ids[pairs], input_ids.clone()
        pair_ids[:, 0], caption_ids[:, 0] = ENC, DEC
        matched = self.text_encoder(pair_ids, attention_mask[pairs], picture)
        outputs = {"logits": self.text_decoder(caption_ids, attention_mask, picture)}
        outputs |= {"itm_score": self.itm_head(matched[:, 0]), "image_embeds": image_embeds}
        scale = self.logit_scale.exp()
        return outputs | {
            "text_embeds": text_embeds,
            "logits_per_image": scale * image_embeds @ text_embeds.T,
        }


def captioned() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Stripes of a colour, a way and a size, some on ground of another colour, told in words."""
    pictures = 0.3 * torch.randn(PICTURES, CHANNELS, HIGH, WIDE)
    input_ids, kinds = torch.full((PICTURES, LENGTH), PAD), torch.randperm(18)[:PICTURES].tolist()
    for n, kind in enumerate(kinds):
        colour, way, size, ground = kind % 3, kind // 3 % 2, kind // 6, int(torch.randint(5, ()))
        along = torch.arange(WIDE).to(pictures) if way else torch.arange(HIGH).to(pictures)[:, None]
        pictures[n, colour] += torch.sin((2.2, 1.3, 0.7)[size] * along + 6 * torch.rand(()))
        told = [CLS, COLOUR + colour, *[SIZE + size] * (size != 1), WAY + way]
        if ground < 3 and ground != colour:
            pictures[n, ground] += 0.8
            told += [ON, COLOUR + ground]
        input_ids[n, : len(told) + 1] = torch.tensor([*told, SEP])
    own, mask = torch.randperm(PICTURES) % 2, (input_ids != PAD).long()
    given = {"pixel_values": pictures, "input_ids": input_ids, "attention_mask": mask}
    pairs = (torch.arange(PICTURES) + 1 - own) % PICTURES
    return given | {"pairs": pairs}, {"labels": input_ids.masked_fill(mask == 0, IGNORED), "own": own}


def three_losses(outputs: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
    logits, near = outputs["logits"][:, :-1].mT, outputs["logits_per_image"]
    caption = F.cross_entropy(logits, target["labels"][:, 1:], ignore_index=IGNORED, label_smoothing=0.1)
    row = torch.arange(len(near), device=near.device)
    contrast = (F.cross_entropy(near, row) + F.cross_entropy(near.T, row)) / 2
    return 0.5 * caption + 0.2 * (contrast + F.cross_entropy(outputs["itm_score"], target["own"]))
