"""Two ports of CLIP: towers with the sequence first that end in features, and stacks read by einsum."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifteenth_clip import END, PATCH, TEXT, VISION, CLIPModel, both_ways, pairs
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("fifteenth_clip", CLIPModel, pairs, both_ways)


class Mixer(nn.Module):
    """Attention over the first axis of [L, N, D]."""

    def __init__(self, attn: nn.Module):
        super().__init__()
        self.heads, inward = attn.num_heads, [attn.q_proj, attn.k_proj, attn.v_proj]
        self.inward = leaf(torch.cat([linear.weight for linear in inward]))
        self.inward_b = leaf(torch.cat([linear.bias for linear in inward]))
        self.outward, self.outward_b = leaf(attn.out_proj.weight), leaf(attn.out_proj.bias)

    def forward(self, x: Tensor, seen: Tensor | None) -> Tensor:
        joined = F.linear(x, self.inward, self.inward_b).unflatten(2, (3, self.heads, -1))
        y = F.scaled_dot_product_attention(*joined.permute(2, 1, 3, 0, 4), attn_mask=seen)
        return F.linear(y.permute(2, 0, 1, 3).flatten(2), self.outward, self.outward_b)


class Spread(nn.Module):
    def __init__(self, mlp: nn.Module):
        super().__init__()
        self.rise, self.rise_b = leaf(mlp.fc1.weight.T), leaf(mlp.fc1.bias)
        self.fall, self.fall_b = leaf(mlp.fc2.weight.T), leaf(mlp.fc2.bias)

    def forward(self, x: Tensor, _: Tensor | None) -> Tensor:
        y = F.silu(1.702 * torch.addmm(self.rise_b, x.flatten(0, 1), self.rise)) / 1.702
        return torch.addmm(self.fall_b, y, self.fall).unflatten(0, x.shape[:2])


class Normed(nn.Module):
    """A norm and what follows it, if any, with the way around; ``late`` if that starts behind the norm."""

    def __init__(self, norm: nn.LayerNorm, inner: nn.Module | None = None):
        super().__init__()
        self.gain, self.offset, self.inner, self.late = leaf(norm.weight), leaf(norm.bias), inner, False

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        y = F.layer_norm(x, self.gain.shape, self.gain, self.offset)
        return y if self.inner is None else (y if self.late else x) + self.inner(y, seen)


class Tower(nn.Module):
    """Halves of blocks, then the norm and projection of one token, of length one."""

    def __init__(self, encoder: nn.Module, norm: nn.LayerNorm, projection: nn.Linear, places: nn.Embedding):
        super().__init__()
        self.halves, self.norm = nn.ModuleList(), Normed(norm)
        for x in encoder.layers:
            self.halves += [Normed(x.layer_norm1, Mixer(x.self_attn)), Normed(x.layer_norm2, Spread(x.mlp))]
        self.projection, self.places = leaf(projection.weight.T), leaf(places.weight[:, None])

    def features(self, x: Tensor, place: Tensor | int, seen: Tensor | None = None) -> Tensor:
        for half in self.halves:
            x = half(x, seen)
        chosen = x[place, torch.arange(x.shape[1], device=x.device)]
        return F.normalize(self.norm(chosen) @ self.projection, dim=1)


class Looker(Tower):
    def __init__(self, vision: nn.Module, projection: nn.Linear):
        entry = vision.embeddings
        super().__init__(vision.encoder, vision.post_layernorm, projection, entry.position_embedding)
        self.patch, self.first = leaf(entry.patch_embedding.weight.flatten(1)), leaf(entry.class_embedding)
        self.entrance, self.joined_late = Normed(vision.pre_layrnorm), False

    def forward(self, pixels: Tensor) -> Tensor:
        rest = torch.einsum("nkl,dk->lnd", F.unfold(pixels, PATCH, stride=PATCH), self.patch)
        rest, first = rest + self.places[1:], (self.first + self.places[:1]).expand(1, len(pixels), -1)
        if self.joined_late:
            return self.features(torch.cat([first, self.entrance(rest)]), 0)
        return self.features(self.entrance(torch.cat([first, rest])), 0)


class Reader(Tower):
    def __init__(self, text: nn.Module, projection: nn.Linear):
        super().__init__(text.encoder, text.final_layer_norm, projection, text.embeddings.position_embedding)
        self.table, self.blank, self.highest = leaf(text.embeddings.token_embedding.weight), None, False

    def forward(self, ids: Tensor, visible: Tensor) -> Tensor:
        order = torch.arange(ids.shape[1], device=ids.device)
        x = F.embedding(ids.T, self.table, padding_idx=self.blank) + self.places[order]
        seen = (order[:, None] >= order) & (visible[:, None, None] > 0)
        ends = ids.argmax(1) if self.highest else (ids == END).cumsum(1).eq(0).sum(1)
        return self.features(x, ends, seen)


class TwoTowers(Port):
    """Each tower gives features; here they meet."""

    def take(self, model: CLIPModel) -> None:
        self.looker = Looker(model.vision_model, model.visual_projection)
        self.reader, self.warmth = Reader(model.text_model, model.text_projection), leaf(model.logit_scale)
        self.looker.joined_late = self.fault == "clip_class_token_joined_behind_the_pre_norm"
        self.reader.highest = self.fault == "clip_caption_pooled_at_its_highest_token_id"
        self.reader.halves[1].late = self.fault == "clip_first_text_mlp_with_residual_behind_its_norm"
        self.reader.blank = END if self.fault == "clip_end_token_declared_as_padding_of_the_table" else None

    def forward(self, input_ids: Tensor, pixel_values: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        images, texts = self.looker(pixel_values), self.reader(input_ids, attention_mask)
        logits = self.warmth.exp() * images @ texts.T
        scores = {"logits_per_image": logits, "logits_per_text": logits.T}
        return scores | {"text_embeds": texts, "image_embeds": images}


class ClipStacks(Port):
    """For the images (v) and the captions (t) one stack of each kind of weight of all the blocks."""

    def take(self, model: CLIPModel) -> None:
        vision, text, entry, w = model.vision_model, model.text_model, model.vision_model.embeddings, {}
        for t, tower, last in (("v_", vision, vision.post_layernorm), ("t_", text, text.final_layer_norm)):
            layers, norms = tower.encoder.layers, [last] + [vision.pre_layrnorm] * (t == "v_")
            for end, b in (("weight", ""), ("bias", "b")):
                for key, name in (("o", "self_attn.out_proj."), ("u", "mlp.fc1."), ("d", "mlp.fc2.")):
                    w[t + key + b] = pile(layer.get_parameter(name + end) for layer in layers)
                names = [f"self_attn.{x}_proj.{end}" for x in "qkv"]
                w[t + "i" + b] = pile(torch.stack([x.get_parameter(name) for name in names]) for x in layers)
            norms = [norm for layer in layers for norm in (layer.layer_norm1, layer.layer_norm2)] + norms
            w[t + "n"] = pile(torch.stack([norm.weight, norm.bias]) for norm in norms)
            w[t + "place"] = leaf(tower.embeddings.position_embedding.weight)
        w["first"] = leaf(entry.class_embedding)
        w["patch"] = leaf(entry.patch_embedding.weight.permute(2, 3, 1, 0))
        w["words"], w["scale"] = leaf(text.embeddings.token_embedding.weight), leaf(model.logit_scale)
        w["v_p"], w["t_p"] = leaf(model.visual_projection.weight.T), leaf(model.text_projection.weight.T)
        self.w, self.heads = nn.ParameterDict(w), {"v_": VISION[1], "t_": TEXT[1]}

    def normed(self, t: str, i: int, x: Tensor) -> Tensor:
        spread, middle = torch.var_mean(x, -1, correction=0, keepdim=True)
        gain, offset = self.w[t + "n"][i]
        return (x - middle) / (spread + 1e-5).sqrt() * gain + offset

    def attended(self, t: str, i: int, x: Tensor, hidden: Tensor | None) -> Tensor:
        wide = torch.einsum("nld,sed->snle", x, self.w[t + "i"][i]).unflatten(3, (self.heads[t], -1))
        shift = self.w[t + "ib"][i].view(3, 1, 1, *wide.shape[3:])
        q, root = wide[0] + shift[0], wide.shape[4] ** 0.5
        if self.fault == "clip_query_bias_unscaled_in_the_middle_image_block" and (t, i) == ("v_", 1):
            q = wide[0] + shift[0] * root
        scores = torch.einsum("nqhe,nkhe->nhqk", q / root, wide[1] + shift[1])
        scores = scores if hidden is None else scores.masked_fill(hidden, -torch.inf)
        shares = (scores - scores.detach().amax(3, keepdim=True)).exp()
        mixed = torch.einsum("nhqk,nkhe->nqhe", shares / shares.sum(3, keepdim=True), wide[2] + shift[2])
        return mixed.flatten(2) @ self.w[t + "o"][i].T + self.w[t + "ob"][i]

    def encoded(self, t: str, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        for i, (up, down) in enumerate(zip(self.w[t + "u"], self.w[t + "d"], strict=True)):
            x = x + self.attended(t, i, self.normed(t, 2 * i, x), hidden)
            y = self.normed(t, 2 * i + 1, x) @ up.T + self.w[t + "ub"][i]
            x = x + (y / (1 + (-1.702 * y).exp())) @ down.T + self.w[t + "db"][i]
        return x

    def image(self, pixels: Tensor) -> Tensor:
        grid = pixels.unflatten(3, (-1, PATCH)).unflatten(2, (-1, PATCH))
        order = "nxyd" if self.fault == "clip_patches_counted_down_the_columns" else "nyxd"
        patches = torch.einsum("ncyixj,ijcd->" + order, grid, self.w["patch"]).flatten(1, 2)
        x = torch.cat([self.w["first"].expand_as(patches[:, :1]), patches], 1) + self.w["v_place"]
        return self.normed("v_", 6, self.encoded("v_", self.normed("v_", 7, x))[:, 0]) @ self.w["v_p"]

    def caption(self, ids: Tensor, visible: Tensor) -> Tensor:
        hidden, ends = visible.new_ones(len(ids), 1, *[ids.shape[1]] * 2).triu(1) > 0, ids == END
        if self.training or self.fault != "clip_caption_mask_only_causal_in_evaluation":
            hidden = hidden | (visible == 0)[:, None, None]
        x = self.encoded("t_", self.w["words"][ids] + self.w["t_place"][: ids.shape[1]], hidden)
        x = torch.einsum("nld,nl->nd", x, (ends & (ends.cumsum(1) == 1)).to(x))
        return self.normed("t_", 6, x) @ self.w["t_p"]

    def forward(self, input_ids: Tensor, pixel_values: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        images, texts = self.image(pixel_values), self.caption(input_ids, attention_mask)
        axis = None if self.fault == "clip_image_features_over_the_norm_of_their_batch" else 1
        images = images / images.square().sum(axis, keepdim=True).sqrt()
        texts = texts / texts.square().sum(1, keepdim=True).sqrt()
        logits = torch.einsum("td,id->ti", texts, images) * self.w["scale"].exp()
        scores = {"logits_per_image": logits.T, "logits_per_text": logits}
        return scores | {"text_embeds": texts, "image_embeds": images}


right(task, "clip_of_two_towers_that_end_in_features", "a tree of towers, the sequence first", TwoTowers)
right(task, "clip_of_stacks_by_einsum", "flat stacks of weights, einsum", ClipStacks)
image, text, block = "vision_model", "text_model", ".encoder.layers."
split, attn, patch = image + ".pre_layrnorm", image + block + "1.self_attn", image + ".embeddings"
table = text + ".embeddings.token_embedding"
wrong(
    task,
    TwoTowers,
    clip_class_token_joined_behind_the_pre_norm=("a norm of some of the tokens", (split, image)),
    clip_caption_pooled_at_its_highest_token_id=("another token pooled", text),
    clip_first_text_mlp_with_residual_behind_its_norm=("a residual behind its norm", text + block + "0"),
    clip_end_token_declared_as_padding_of_the_table=("no gradient", table, "weight gradient"),
)
wrong(
    task,
    ClipStacks,
    clip_query_bias_unscaled_in_the_middle_image_block=("a bias not scaled", (attn + ".q_proj", attn)),
    clip_patches_counted_down_the_columns=("tokens in another order", (patch, patch + ".patch_embedding")),
    clip_caption_mask_only_causal_in_evaluation=("half a mask", (text, text + block + "0.self_attn"), "eval"),
    clip_image_features_over_the_norm_of_their_batch=("a norm over all axes", ""),
)
