"""A port of a small Grounding DINO: one class of packed rows."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _thirty_sixth_grounding as made
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, wrong
from bench.held_back._thirty_sixth_grounding_ports import (
    SHAPES,
    H,
    L,
    P,
    attend,
    choose,
    likeness,
    phrase,
    sines,
    spots,
    task,
)

GROUPS = "bert.layer.", "fusion_layers.", "text_layers.", "encoder.", "decoder.", "bbox_embed."


class PackedGrounding(Port):
    """Rows of all the weights of each layer, a row for each of its kind, and one for all else."""

    def take(self, m: nn.Module) -> None:
        self.rows, self.forms = nn.ParameterList(), []
        for group in (*GROUPS, ""):
            tops = [f"{group}{i}." for i in range(2)] if group else [""]
            own = [
                {k.removeprefix(top): w for k, w in m.named_parameters() if k.startswith(top)} for top in tops
            ]
            if not group:
                own = [{k: w for k, w in own[0].items() if not k.startswith(GROUPS)}]
            self.forms.append({k: w.shape for k, w in own[0].items()})
            self.rows.append(leaf(torch.stack([torch.cat([w.flatten() for w in x.values()]) for x in own])))

    def use(self, group: int, i: int = 0) -> None:
        form = self.forms[group]
        pieces = self.rows[group][i].split([k.numel() for k in form.values()])
        self.w = {name: x.view(form[name]) for name, x in zip(form, pieces, strict=True)}

    def line(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.w[name + ".weight"].flatten(1), self.w[name + ".bias"])

    def even(self, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.w[name + ".weight"], self.w[name + ".bias"])

    def mlp(self, name: str, x: Tensor) -> Tensor:
        return self.line(name + "2", self.line(name + "0", x).clamp(min=0))

    def mix(self, name: str, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None, heads=H) -> Tensor:
        ends = zip(
            (q, k, v), *(self.w[f"{name}.in_proj_{x}"].chunk(3) for x in ("weight", "bias")), strict=True
        )
        q, k, v = (F.linear(*x).unflatten(2, (heads, -1)).transpose(1, 2) for x in ends)
        mixed = F.scaled_dot_product_attention(q, k, v, None if seen is None else seen[:, None])
        return self.line(name + ".out_proj", mixed.transpose(1, 2).flatten(2))

    def text(self, t: Tensor, near: Tensor, place: Tensor | float, heads: int, act) -> Tensor:
        t = self.even("norm1", t + self.mix("self_attn", t + place, t + place, t, near, heads))
        return self.even("norm2", t + self.line("linear2", act(self.line("linear1", t))))

    def fuse(self, v: Tensor, t: Tensor, seen: Tensor, still: bool) -> tuple[Tensor, Tensor]:
        v, t = self.even("layer_norm_v", v), self.even("layer_norm_l", t)
        q, x = self.line("v_proj", v), self.line("values_v_proj", v)
        k, y = self.line("l_proj", t), self.line("values_l_proj", t)
        gain = self.w["gamma_v"].detach() if still else self.w["gamma_v"]
        more = gain * self.line("out_v_proj", attend(q, k, y, H, seen[:, None]))
        return v + more, t + self.w["gamma_l"] * self.line("out_l_proj", attend(k, q, x, H))

    def deform(self, x: Tensor, q: Tensor, box: Tensor, memory: Tensor, align=False, half=0.5) -> Tensor:
        said = self.line("cross_attn.value_proj", memory).mT.unflatten(1, (H, -1)).flatten(0, 1)
        move = (
            self.line("cross_attn.sampling_offsets", q).unflatten(2, (H, L, P, 2)).permute(0, 2, 3, 1, 4, 5)
        )
        much = self.line("cross_attn.attention_weights", q).unflatten(2, (H, -1)).softmax(3)
        much, out = much.transpose(1, 2).flatten(0, 1).unflatten(2, (L, P)), 0
        for i, ((h, w), part) in enumerate(zip(SHAPES, said.split([24, 6], 2), strict=True)):
            span = 1 / x.new_tensor([w, h]) if box.shape[2] == 2 else half * box[:, None, :, None, 2:] / P
            grid = 2 * (box[:, None, :, None, :2] + move[:, :, i] * span).flatten(0, 1) - 1
            got = F.grid_sample(part.unflatten(2, (h, w)), grid, align_corners=align)
            out = out + (got * much[:, None, :, i]).sum(3)
        x = x + self.line("cross_attn.output_proj", out.unflatten(0, (-1, H)).flatten(1, 2).mT)
        x = self.even("norm1", x)
        return self.even("norm3", x + self.line("linear2", self.line("linear1", x).clamp(min=0)))

    def forward(self, pixel_values: Tensor, input_ids: Tensor) -> tuple[Tensor, ...]:
        (near, place), seen, x, levels = phrase(input_ids), input_ids > 0, pixel_values, []
        self.use(6)
        rest = self.w
        words = F.one_hot(input_ids, made.WORDS).to(x) @ rest["bert.word_embeddings.weight"]
        t = self.even("bert.LayerNorm", words + rest["bert.position_embeddings.weight"][place])
        for i in range(2):
            self.use(0, i)
            t = self.text(t, near, 0.0, 3, F.gelu)
        self.w = rest
        t = self.line("feat_map", t)
        for i in range(2):
            x = F.conv2d(x, rest[f"backbone.{i}.weight"], rest[f"backbone.{i}.bias"], 2).clamp(min=0)
            y = self.line(f"input_proj.{i}", x.flatten(2).mT).mT
            eps = 1e-3 if i and self.fault == "grounding_second_level_norm_of_a_larger_epsilon" else 1e-5
            ends = (rest[f"input_norm.{i}.{k}"] for k in ("weight", "bias"))
            levels.append(F.group_norm(y, 4, *ends, eps))
        v, (waves, middle, first) = torch.cat(levels, 2).mT, spots(x)
        level = rest["level_embed"]
        waves = waves + torch.cat([level[:1].expand(24, -1), level[1:].expand(6, -1)])
        middle = middle.expand(len(x), -1, -1)
        for i in range(2):
            self.use(1, i)
            v, t = self.fuse(
                v, t, seen, i == 0 and self.fault == "grounding_first_fusion_scales_by_a_constant"
            )
            self.use(2, i)
            t = self.text(t, near, sines(place.to(v), 16, 1e4), H, F.relu)
            self.use(3, i)
            align = i == 0 and self.fault == "grounding_first_image_layer_aligns_the_corners"
            v = self.deform(v, v + waves, middle, v, align)
        self.w = rest
        y = self.even("enc_output_norm", self.line("enc_output", v))
        ends, found = choose(likeness(y, t, seen), first + self.mlp("enc_bbox_embed.", y)), []
        box, x = ends[1].detach(), rest["tgt_embed.weight"].expand(len(v), -1, -1)
        for i in range(2):
            self.w = rest
            q = self.mlp("ref_point_head.", sines(box[..., [1, 0, 2, 3]] * math.tau, 8, 1e4).flatten(2))
            self.use(4, i)
            x = self.even("norm2", x + self.mix("self_attn", x + q, x + q, x))
            heard = seen[:, None].expand(-1, made.QUERIES, -1)
            x = self.even("catext_norm", x + self.mix("ca_text", x + q, t, t, heard))
            whole = i == 1 and self.fault == "grounding_second_decoder_layer_moves_by_whole_boxes"
            x = self.deform(x, x + q, box, v, half=1.0 if whole else 0.5)
            self.w = rest
            y = self.even("norm", x)
            self.use(5, i)
            found += [likeness(y, t, seen), (self.mlp("", y) + box.logit(1e-3)).sigmoid()]
            box = (self.mlp("", x) + box.logit(1e-3)).sigmoid().detach()
        return (*found, *ends)


right(task, "grounding_of_packed_rows", "flat code, a row of weights for each layer", PackedGrounding)
wrong(
    task,
    PackedGrounding,
    grounding_second_level_norm_of_a_larger_epsilon=("another epsilon", "input_norm.1"),
    grounding_first_fusion_scales_by_a_constant=("detach", "fusion_layers.0", "weight gradient"),
    grounding_first_image_layer_aligns_the_corners=("another grid", "encoder.0.cross_attn"),
    grounding_second_decoder_layer_moves_by_whole_boxes=("a factor left out", "decoder.1.cross_attn"),
)
