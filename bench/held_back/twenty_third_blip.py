"""Two ports of BLIP: torch's own attention with time first, and stacks that read all texts at once."""

import re
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twenty_third_blip import BlipForPretraining, captioned, three_losses

task = few("twenty_third_blip", BlipForPretraining, captioned, three_losses)
RENAMED = {"qkv.": "in_proj_", "projection": "out_proj", "layer_norm": "norm", "mlp.fc": "linear"}


def glimpse(layer: nn.Module) -> nn.Module:
    made, state = nn.TransformerEncoderLayer(16, 2, 32, 0.0, F.gelu, norm_first=True), layer.state_dict()
    for old, new in RENAMED.items():
        state = {name.replace(old, new): value for name, value in state.items()}
    made.to(state["linear1.weight"]).load_state_dict(state)
    return made


def looker(old: nn.Module, crossed: bool = False) -> nn.Module:
    ask, key, value, out = old.self.query, old.self.key, old.self.value, old.output.dense
    maps, source = (ask, value, key) if crossed else (ask, key, value), key.in_features
    made = nn.MultiheadAttention(12, 3, kdim=source, vdim=source).to(ask.weight)
    state = {f"{name}_proj_weight": x.weight for name, x in zip("qkv", maps, strict=True)}
    state = state if source > 12 else {"in_proj_weight": torch.cat([x.weight for x in maps])}
    state |= {"out_proj.weight": out.weight, "out_proj.bias": out.bias}
    made.load_state_dict(state | {"in_proj_bias": torch.cat([x.bias for x in maps])})
    return made


class Phrase(nn.Module):
    def __init__(self, layer: nn.Module, crossed: bool):
        super().__init__()
        own, other, inner = layer.attention, layer.crossattention, layer.intermediate.dense
        self.own, self.other, self.still = looker(own), looker(other, crossed), False
        self.norms = nn.ModuleList(deepcopy(x.output.LayerNorm) for x in (own, other, layer))
        self.inner = nn.Sequential(deepcopy(inner), nn.GELU(), deepcopy(layer.output.dense))

    def forward(self, x: Tensor, unreal: Tensor, later: Tensor | None, picture: Tensor | None) -> Tensor:
        x = self.norms[0](x + self.own(x, x, x, unreal, False, later)[0])
        if picture is not None:
            picture = picture.detach() if self.still else picture
            x = self.norms[1](x + self.other(x, picture, picture, need_weights=False)[0])
        return self.norms[2](x + self.inner(x))


class Script(nn.Module):
    def __init__(self, model: nn.Module, crossed: int = -1):
        super().__init__()
        begin = model.embeddings
        self.words, self.norm = leaf(begin.word_embeddings.weight), deepcopy(begin.LayerNorm)
        self.places = leaf(begin.position_embeddings.weight[:, None])
        self.phrases = nn.ModuleList(Phrase(x, i == crossed) for i, x in enumerate(model.encoder.layer))

    def forward(self, ids: Tensor, *rest: Tensor | None, skipped: int = 0) -> Tensor:
        x = self.norm(self.words[ids.T] + self.places[skipped : skipped + ids.shape[1]])
        for phrase in self.phrases:
            x = phrase(x, *rest)
        return x


class TimeFirst(Port):
    def take(self, model: BlipForPretraining) -> None:
        eye, head = model.vision_model, model.text_decoder.cls.predictions
        begin = eye.embeddings
        self.mark, self.spots = leaf(begin.class_embedding), leaf(begin.position_embedding.transpose(0, 1))
        self.cut, self.scale = deepcopy(begin.patch_embedding), leaf(model.logit_scale)
        self.eye = nn.Sequential(*map(glimpse, eye.encoder.layers), deepcopy(eye.post_layernorm))
        crossed = 1 if self.fault == "blip_middle_caption_layer_takes_picture_values_for_keys" else -1
        self.listener, self.speaker = Script(model.text_encoder), Script(model.text_decoder.bert, crossed)
        self.polish, self.bent = deepcopy(head.transform), leaf(head.decoder.bias)
        self.sides = nn.ModuleList(map(deepcopy, (model.vision_proj, model.text_proj, model.itm_head)))
        if self.fault == "blip_first_picture_layer_takes_the_quick_gelu":
            self.eye[0].activation = lambda x: x * torch.sigmoid(1.702 * x)
        self.listener.phrases[1].still = self.fault == "blip_last_matching_layer_sends_the_picture_nothing"

    def forward(self, pixel_values, input_ids: Tensor, attention_mask: Tensor, pairs: Tensor) -> dict:
        cells = pixel_values.unfold(2, 4, 4).unfold(3, 4, 4)
        cells = torch.einsum("nchwij,ocij->hwno", cells, self.cut.weight).flatten(0, 1) + self.cut.bias
        unreal, bare = attention_mask == 0, self.fault == "blip_class_token_is_left_without_its_position"
        spots = F.pad(self.spots[1:], (0, 0, 0, 0, 1, 0)) if bare else self.spots
        seen = self.eye(torch.cat([self.mark.expand(-1, len(unreal), -1), cells]) + spots)
        to_match, to_tell = (F.pad(input_ids[:, 1:], (1, 0), value=start) for start in (3, 4))
        heard = self.listener(input_ids, unreal, None, None)
        matched = self.listener(to_match[pairs], unreal[pairs], None, seen)
        image, text, own = (side(x[0]) for side, x in zip(self.sides, (seen, heard, matched), strict=True))
        image, text = (x / x.square().sum(1, keepdim=True).sqrt() for x in (image, text))
        late = self.fault == "blip_captions_are_counted_from_one_in_evaluation" and not self.training
        later = torch.ones_like(unreal[0]).expand(unreal.shape[1], -1).triu(1)
        told = self.polish(self.speaker(to_tell, unreal, later, seen, skipped=int(late))).transpose(0, 1)
        logits = told @ self.speaker.words.T + self.bent
        outputs = {"logits": logits, "itm_score": own, "image_embeds": image}
        return outputs | {"text_embeds": text, "logits_per_image": image @ text.T * self.scale.exp()}


class AllTextsAtOnce(Port):
    """Three texts for a picture (alone, to match, to tell) in one stack, each by its tower's weights."""

    def take(self, model: BlipForPretraining) -> None:
        stacks = {}
        for name, weight in model.named_parameters():
            use = re.sub(r".*layers?\.\d\.|(text_..coder|bert|cls|vision_model|embeddings)\.", "", name)
            stacks.setdefault(use.replace(".", "_"), []).append(weight)
        self.w = nn.ParameterDict({use: pile(weights) for use, weights in stacks.items()})

    def by(self, use: str, x: Tensor, rows: list | tuple = (0,)) -> Tensor:
        weight, bias = (self.w[f"{use}_{part}"][rows, None] for part in ("weight", "bias"))
        return x @ weight.flatten(3).mT + bias[:, None]

    def normed(self, use: str, x: Tensor, rows: list | tuple = (0,), eps: float = 1e-12) -> Tensor:
        gain, offset = (self.w[f"{use}_{part}"][rows, None, None] for part in ("weight", "bias"))
        spread, center = torch.var_mean(x, -1, correction=0, keepdim=True)
        return (x - center) * (spread + eps).rsqrt() * gain + offset

    def mixed(self, parts: list[Tensor], heads: int, seen: Tensor | None = None) -> Tensor:
        q, k, v = (x.unflatten(3, (heads, -1)).transpose(2, 3) for x in parts)
        return F.scaled_dot_product_attention(q, k, v, seen).transpose(2, 3).flatten(3)

    def look(self, pictures: Tensor) -> Tensor:
        cells = self.by("patch_embedding", F.unfold(pictures, 4, stride=4).mT[None])
        mark = self.w["class_embedding"].expand(1, len(pictures), 1, -1)
        x = torch.cat([mark, cells], 2) + self.w["position_embedding"]
        for i in range(3):
            qkv = self.by("self_attn_qkv", self.normed("layer_norm1", x, [i], 1e-5), [i])
            x = x + self.by("self_attn_projection", self.mixed(qkv.chunk(3, 3), 2), [i])
            y = self.by("mlp_fc1", self.normed("layer_norm2", x, [i], 1e-5), [i])
            x = x + self.by("mlp_fc2", F.gelu(y), [i])
        return self.normed("post_layernorm", x, eps=1e-5)

    def sought(self, use: str, x: Tensor, source: Tensor, rows: list, seen: Tensor | None = None) -> Tensor:
        qkv = zip(("query", "key", "value"), (x, source, source), strict=True)
        y = self.mixed([self.by(f"{use}_self_{part}", y, rows) for part, y in qkv], 3, seen)
        return self.normed(f"{use}_output_LayerNorm", x + self.by(f"{use}_output_dense", y, rows), rows)

    def read(self, ids: Tensor, seen: Tensor, picture: Tensor) -> Tensor:
        x = torch.stack([self.w["word_weight"][int(i == 2)][ids[i]] for i in range(3)])
        x = x + self.w["position_weight"][[0, 0, 1], None, : ids.shape[2]]
        x = self.normed("LayerNorm", x, [0, 0, 1])
        for rows in ([0, 0, 2], [1, 1, 3], [4]):
            done, x, bare = x[: 3 - len(rows)], x[-len(rows) :], len(rows) // 2
            x = self.sought("attention", x, x, rows, seen[-len(rows) :])
            x = torch.cat([x[:bare], self.sought("crossattention", x[bare:], picture, rows[bare:])])
            y = self.by("output_dense", F.gelu(self.by("intermediate_dense", x, rows)), rows)
            x = torch.cat([done, self.normed("output_LayerNorm", x + y, rows)])
        return x

    def forward(self, pixel_values, input_ids: Tensor, attention_mask: Tensor, pairs: Tensor) -> dict:
        picture, ids = self.look(pixel_values), torch.stack([input_ids, input_ids[pairs], input_ids])
        ids[1, :, 0], ids[2, :, 0] = 3, 4
        own = self.fault == "blip_texts_to_match_are_masked_as_the_unpaired"
        masks = [attention_mask, attention_mask if own else attention_mask[pairs], attention_mask]
        seen = (torch.stack(masks) > 0)[:, :, None, None].repeat(1, 1, 1, ids.shape[2], 1)
        seen[2].tril_()
        x = self.read(ids, seen, picture)
        image, text = self.by("vision_proj", picture)[0, :, 0], self.by("text_proj", x)[0, :, 0]
        length = image.norm(dim=1, keepdim=True)
        held = self.fault == "blip_picture_side_of_contrast_holds_its_length_constant"
        image, text = image / (length.detach() if held else length), text / text.norm(dim=1, keepdim=True)
        early = self.fault == "blip_caption_head_norms_before_its_gelu"
        told, bias = self.by("predictions_transform_dense", x[2:]), self.w["predictions_decoder_bias"]
        told = self.normed("predictions_transform_LayerNorm", told if early else F.gelu(told))[0]
        told = (F.gelu(told) if early else told) @ self.w["word_weight"][1].T + bias
        outputs = {"logits": told, "itm_score": self.by("itm_head", x[1:2])[0, :, 0], "image_embeds": image}
        near = self.w["logit_scale"].exp() * image @ text.T
        return outputs | {"text_embeds": text, "logits_per_image": near}


MLP, CROSS = "vision_model.encoder.layers.0.mlp", "encoder.layer.1.crossattention"
MIDDLE, MATCHING = f"text_decoder.bert.{CROSS}", f"text_encoder.{CROSS}"
SLOPES = ("input gradient", "weight gradient")
right(task, "blip_of_torch_attention_with_time_first", "torch's own attention, other axes", TimeFirst)
right(task, "blip_of_stacks_for_all_texts_at_once", "stacks, towers side by side", AllTextsAtOnce)
wrong(
    task,
    TimeFirst,
    blip_class_token_is_left_without_its_position=("a position left out", "vision_model.embeddings"),
    blip_first_picture_layer_takes_the_quick_gelu=("other activation", (MLP + ".activation_fn", MLP)),
    blip_middle_caption_layer_takes_picture_values_for_keys=("maps swapped", (MIDDLE + ".self", MIDDLE)),
    blip_last_matching_layer_sends_the_picture_nothing=("detach", (MATCHING + ".self", MATCHING), SLOPES),
    blip_captions_are_counted_from_one_in_evaluation=("an offset", "text_decoder.bert.embeddings", "eval"),
)
wrong(
    task,
    AllTextsAtOnce,
    blip_texts_to_match_are_masked_as_the_unpaired=("mask of another text", ("", "text_encoder")),
    blip_picture_side_of_contrast_holds_its_length_constant=("a norm held constant", "", SLOPES),
    blip_caption_head_norms_before_its_gelu=("order", "text_decoder.cls.predictions.transform"),
)
