"""A port of a small Grounding DINO: a tree of readers, channels last."""

import math
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


class Dense(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor):
        super().__init__()
        self.w, self.b = leaf(weight.flatten(1).T), leaf(bias)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w + self.b


def dense(layer: nn.Module) -> Dense:
    return Dense(layer.weight, layer.bias)


class Even(nn.Module):
    def __init__(self, norm: nn.LayerNorm):
        super().__init__()
        self.scale, self.shift = leaf(norm.weight), leaf(norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        spread, center = torch.var_mean(x, -1, correction=0, keepdim=True)
        return (x - center) / (spread + 1e-5).sqrt() * self.scale + self.shift


class Reader(nn.Module):
    def __init__(self, layer: nn.MultiheadAttention, norm: nn.LayerNorm):
        super().__init__()
        pairs = zip(layer.in_proj_weight.chunk(3), layer.in_proj_bias.chunk(3), strict=True)
        self.ask, self.key, self.say = (Dense(*pair) for pair in pairs)
        self.end, self.even, self.heads = dense(layer.out_proj), Even(norm), layer.num_heads

    def forward(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
        mixed = attend(self.ask(q), self.key(k), self.say(v), self.heads, seen)
        return self.even(x + self.end(mixed))


class Thinker(nn.Module):
    def __init__(self, one: nn.Linear, two: nn.Linear, norm: nn.LayerNorm, act: nn.Module):
        super().__init__()
        self.up, self.down, self.even, self.act, self.rough = dense(one), dense(two), Even(norm), act, False

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        y = F.gelu(y, approximate="tanh") if self.rough and not self.training else self.act(y)
        return self.even(x + self.down(y))


class Sentence(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.read = Reader(layer.self_attn, layer.norm1)
        self.think, self.moved = Thinker(layer.linear1, layer.linear2, layer.norm2, layer.act), False

    def forward(self, x: Tensor, near: Tensor, place: Tensor) -> Tensor:
        y = x + place
        return self.think(self.read(x, y, y, y if self.moved else x, near))


class Meeting(nn.Module):
    def __init__(self, m: nn.Module):
        super().__init__()
        self.even_v, self.even_t, self.all = Even(m.layer_norm_v), Even(m.layer_norm_l), False
        both = (m.v_proj, m.values_v_proj), (m.l_proj, m.values_l_proj)
        join = (
            Dense(*(torch.cat([getattr(x, k) for x in pair]) for k in ("weight", "bias"))) for pair in both
        )
        (self.from_v, self.from_t), self.to_v, self.to_t = join, dense(m.out_v_proj), dense(m.out_l_proj)
        self.gain_v, self.gain_t = leaf(m.gamma_v), leaf(m.gamma_l)

    def forward(self, v: Tensor, t: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        v, t = self.even_v(v), self.even_t(t)
        (q, x), (k, y) = self.from_v(v).chunk(2, -1), self.from_t(t).chunk(2, -1)
        more = self.to_v(attend(q, k, y, H, None if self.all else seen[:, None]))
        return v + more * self.gain_v, t + self.to_t(attend(k, q, x, H)) * self.gain_t


class Looker(nn.Module):
    """Each place of a level is seen by how near the points are to it: a tent in each direction."""

    def __init__(self, m: nn.Module, norm: nn.LayerNorm):
        super().__init__()
        parts = m.sampling_offsets, m.attention_weights, m.value_proj, m.output_proj
        self.move, self.weigh, self.say, self.end = map(dense, parts)
        self.even = Even(norm)

    def forward(self, x: Tensor, q: Tensor, middle: Tensor, span: Tensor | None, memory: Tensor) -> Tensor:
        move = self.move(q).unflatten(2, (H, L, P, 2))
        much = self.weigh(q).unflatten(2, (H, L * P)).softmax(-1).unflatten(3, (L, P))
        said, mixed = self.say(memory).unflatten(2, (H, -1)).split([24, 6], 1), 0
        for i, (h, w) in enumerate(SHAPES):
            size = q.new_tensor([w, h])
            spot = middle[:, :, None, None] * size - 0.5
            reach = 1 if span is None else span[:, :, None, None] * size / (2 * P)
            spot = spot + move[:, :, :, i] * reach
            near = [
                (1 - (spot[..., k, None] - torch.arange(n).to(q)).abs()).relu() for k, n in ((0, w), (1, h))
            ]
            seen = torch.einsum("nqmp,nqmpx,nqmpy->nqmyx", much[:, :, :, i], *near).flatten(3)
            mixed = mixed + torch.einsum("nqma,namd->nqmd", seen, said[i])
        return self.even(x + self.end(mixed.flatten(2)))


class GroundingOfReaders(Port):
    """Sentences, meetings and lookers, with pictures as [N, H, W, C]."""

    def take(self, m: nn.Module) -> None:
        bert, make = m.bert, nn.ModuleList
        self.word, self.spot = leaf(bert.word_embeddings.weight), leaf(bert.position_embeddings.weight)
        self.start, self.lift, self.level = Even(bert.LayerNorm), dense(m.feat_map), leaf(m.level_embed)
        self.speech, self.phrase = (make(map(Sentence, x)) for x in (bert.layer, m.text_layers))
        self.meet, self.shade = make(map(Meeting, m.fusion_layers)), deepcopy(m.input_norm)
        self.see, self.tint = (make(map(dense, x)) for x in (m.backbone, m.input_proj))
        layers = [*m.encoder, *m.decoder]
        self.look = make(Looker(x.cross_attn, x.norm1) for x in layers)
        self.think = make(Thinker(x.linear1, x.linear2, x.norm3, nn.ReLU()) for x in layers)
        self.talk = make(Reader(x.self_attn, x.norm2) for x in m.decoder)
        self.listen = make(Reader(x.ca_text, x.catext_norm) for x in m.decoder)
        self.propose, self.sift, self.last = dense(m.enc_output), Even(m.enc_output_norm), Even(m.norm)
        heads = (m.ref_point_head, m.enc_bbox_embed, *m.bbox_embed)
        self.heads = make(nn.Sequential(dense(x[0]), nn.ReLU(), dense(x[2])) for x in heads)
        self.wish = leaf(m.tgt_embed.weight)
        self.meet[1].all = self.fault == "grounding_second_fusion_reads_the_padding"
        self.phrase[1].moved = self.fault == "grounding_second_text_layer_adds_positions_to_values"
        self.speech[1].think.rough = self.fault == "grounding_second_bert_layer_in_evaluation_by_gelu_of_tanh"

    def forward(self, pixel_values: Tensor, input_ids: Tensor) -> tuple[Tensor, ...]:
        (near, place), seen, x, levels = phrase(input_ids), input_ids > 0, pixel_values.movedim(1, 3), []
        t = self.start(self.word[input_ids] + self.spot[place])
        for layer in self.speech:
            t = layer(t, near, 0)
        t = self.lift(t)
        for see, tint, shade in zip(self.see, self.tint, self.shade, strict=True):
            x = see(x.unfold(1, 2, 2).unfold(2, 2, 2).flatten(3)).relu()
            levels.append(shade(tint(x).movedim(3, 1)).flatten(2).mT)
        v, (waves, middle, first) = torch.cat(levels, 1), spots(x)
        waves = waves + self.level.repeat_interleave(torch.tensor([24, 6]), 0)
        for i in range(2):
            v, t = self.meet[i](v, t, seen)
            t = self.phrase[i](t, near, sines(place.to(v), 16, 1e4))
            v = self.think[i](self.look[i](v, v + waves, middle[None], None, v))
        y = self.sift(self.propose(v))
        ends, found = choose(likeness(y, t, seen), first + self.heads[1](y)), []
        box, x = ends[1].detach(), self.wish.expand(len(v), -1, -1)
        for i in range(2):
            q = self.heads[0](sines(box[..., [1, 0, 2, 3]] * math.tau, 8, 1e4).flatten(2))
            x = self.talk[i](x, x + q, x + q, x)
            x = self.listen[i](x, x + q, t, t, seen[:, None])
            x = self.think[2 + i](self.look[2 + i](x, x + q, box[..., :2], box[..., 2:], v))
            y, head, start = self.last(x), self.heads[2 + i], box.logit(1e-3)
            found += [likeness(y, t, seen), (head(y) + start).sigmoid()]
            box = (head(x) + start).sigmoid()
            if self.fault != "grounding_refined_box_keeps_its_gradient":
                box = box.detach()
        return (*found, *ends)


SLOPES = ("input gradient", "weight gradient")
right(
    task,
    "grounding_of_readers_with_channels_last",
    "a tree, tents for samples, split weights",
    GroundingOfReaders,
)
wrong(
    task,
    GroundingOfReaders,
    grounding_second_bert_layer_in_evaluation_by_gelu_of_tanh=(
        "approximate in eval",
        "bert.layer.1.act",
        "eval",
    ),
    grounding_second_fusion_reads_the_padding=("a mask left out", "fusion_layers.1"),
    grounding_second_text_layer_adds_positions_to_values=("positions in values", "text_layers.1"),
    grounding_refined_box_keeps_its_gradient=("a detach left out", "", SLOPES),
)
