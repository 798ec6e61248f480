"""Two ports of a small DAB-DETR: a tree, batch first and channels last, and one class of stacked weights."""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._forty_seventh_dab_detr import DABDETR, HEADS, WIDTH, scenes, set_loss
from bench.held_back._fourth_ports import Port, leaf, pile, spatial, wrong
from bench.held_back._sixth_ports import few

task = few("forty_seventh_dab_detr", DABDETR, scenes, set_loss)
SIZE, HALF, EDGE = WIDTH // HEADS, WIDTH // 2, math.log(999)


class Map(nn.Module):  # the sum of affine maps, one of each argument
    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.w = nn.ParameterList(leaf(x.weight.flatten(1).T) for x in layers)
        self.b = nn.ParameterList(leaf(x.bias) for x in layers)

    def forward(self, *xs: Tensor) -> Tensor:
        return sum(x @ w + b for x, w, b in zip(xs, self.w, self.b, strict=True))


def chain(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*[y for x in layers for y in (nn.ReLU(), Map(x))][1:])


def waves(x: Tensor, temperature: float) -> Tensor:
    """Sines, and cosines as sines of a quarter more, by turns."""
    i = torch.arange(HALF).to(x)
    rate = torch.exp(-2 * math.log(temperature) / HALF * (i // 2))
    return (x[..., None] * math.tau * rate + (i % 2) * (math.pi / 2)).sin()


def mix(pairs: tuple, v: Tensor, free: Tensor | float = 1) -> Tensor:
    """Attention by the sum of the products of pairs of queries and keys."""
    *pairs, (v,) = [[x.unflatten(2, (HEADS, SIZE)) for x in group] for group in (*pairs, (v,))]
    scores = sum(torch.einsum("nqhd,nkhd->nqkh", q, k) for q, k in pairs) / math.sqrt(SIZE * len(pairs))
    weights = (scores - scores.detach().amax(2, True)).exp() * free
    return (torch.einsum("nqkh,nkhd->nqhd", weights, v) / weights.sum(2)[..., None]).flatten(2)


class Asker(nn.Module):  # a decoder layer; scores of content and of position are added
    def __init__(self, x: nn.Module):
        super().__init__()
        self.q, self.k = Map(x.sa_qcontent_proj, x.sa_qpos_proj), Map(x.sa_kcontent_proj, x.sa_kpos_proj)
        self.v, self.value, self.near = map(Map, (x.sa_v_proj, x.ca_v_proj, x.ca_qpos_sine_proj))
        self.ask = Map(x.ca_qcontent_proj, *([x.ca_qpos_proj] if x.is_first else []))
        self.content, self.place = Map(x.ca_kcontent_proj), Map(x.ca_kpos_proj)
        self.out, self.end = Map(x.self_attn.out_proj), Map(x.cross_attn.out_proj)
        self.feed, self.first = chain(x.linear1, x.linear2), x.is_first
        self.norms = nn.ModuleList([x.norm1, x.norm2, x.norm3])

    def forward(self, x, memory, free, place, spot, sine) -> Tensor:
        x = self.norms[0](x + self.out(mix([(self.q(x, spot), self.k(x, spot))], self.v(x))))
        content, place = self.content(memory), self.place(place)
        q, k = (self.ask(x, spot), content + place) if self.first else (self.ask(x), content)
        x = self.norms[1](x + self.end(mix([(q, k), (self.near(sine), place)], self.value(memory), free)))
        return self.norms[2](x + self.feed(x))


class DetrOfTwoScores(Port):
    def take(self, model: DABDETR) -> None:
        body, decoder = model.backbone[0], model.transformer.decoder
        self.convs = nn.ParameterList([leaf(body[0].weight), leaf(body[3].weight)])
        self.frozen = nn.ModuleList([body[1], body[4]])
        self.entry, self.label = Map(model.input_proj), Map(model.class_embed)
        self.askers, self.norm = nn.ModuleList(map(Asker, decoder.layers)), decoder.norm
        heads = decoder.query_scale, decoder.ref_point_head, decoder.ref_anchor_head, model.bbox_embed
        self.scale, self.spot, self.sizes, self.box = (chain(*x.layers) for x in heads)
        self.start, self.anchors = leaf(model.transformer.patterns.weight), leaf(model.refpoint_embed.weight)

    def forward(self, samples: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        y, free, odd = samples.movedim(1, 3), (~mask[:, ::4, ::4]).to(samples), self.fault
        tiny = 1e-3 if odd == "dab_detr_first_norm_by_another_epsilon" else 1e-5
        for w, x, eps in zip(self.convs, self.frozen, (tiny, 1e-5), strict=True):
            gain = x.weight / (x.running_var + eps).sqrt()
            y = spatial(y, w * gain[:, None, None, None], x.bias - gain * x.running_mean, 2).relu()
        memory = self.entry(y).flatten(1, 2)
        ends = [free.sum(i, True) for i in (1, 2)]
        if odd == "dab_detr_positions_over_the_padded_picture":
            ends = free.shape[1:]
        parts = zip((1, 2), ends, (20, 30), strict=True)
        place = torch.cat([waves(free.cumsum(i) / (end + 1e-6), t) for i, end, t in parts], 3).flatten(1, 2)
        free = free.flatten(1)[:, None, :, None]
        x = self.start.repeat_interleave(len(self.anchors), 0).expand(len(samples), -1, -1)
        kept = box = self.anchors.repeat(len(self.start), 1).expand(len(samples), -1, -1).sigmoid()
        logits, boxes = [], []
        for i, asker in enumerate(self.askers):
            sine = waves(box[..., [1, 0, 2, 3]], 10000)
            size = 1 if odd == "dab_detr_ratio_not_by_the_size_of_the_anchor" else box[..., 2:]
            ratio = self.sizes(x).sigmoid() / size
            near = (sine[..., :2, :] * ratio.flip(-1)[..., None]).flatten(-2) * (self.scale(x) if i else 1)
            x = asker(x, memory, free, place, self.spot(sine.flatten(-2)), near)
            logits.append(self.label(self.norm(x)))
            boxes.append((self.box(self.norm(x)) + kept.logit(1e-3)).sigmoid())
            kept = (self.box(x) + box.logit(1e-3)).sigmoid()
            box = kept if odd == "dab_detr_anchors_not_detached" else kept.detach()
        return torch.stack(logits), torch.stack(boxes)


def sheet(layer: nn.Module) -> Tensor:
    return torch.cat([layer.weight.flatten(1), layer.bias[:, None]], 1)


ASKED = ("qcontent", "qpos", "kcontent", "kpos", "v"), ("qcontent", "kcontent", "kpos", "v", "qpos_sine")


class StackedDetr(Port):  # stacks of weights, biases as a last column; anchors are kept as logits
    def take(self, model: DABDETR) -> None:
        body, decoder = model.backbone[0], model.transformer.decoder
        layers, self.one, self.two = decoder.layers, leaf(body[0].weight), leaf(body[3].weight)
        for i in (1, 4):
            self.register_buffer(f"fixed_{i}", torch.stack([*body[i].buffers()])[..., None, None])
        self.up, self.down = pile(sheet(x.linear1) for x in layers), pile(sheet(x.linear2) for x in layers)
        norms = [x for x in model.modules() if isinstance(x, nn.LayerNorm)]
        self.norms = pile(torch.stack([x.weight, x.bias]) for x in norms)
        names = [f"{end}_{x}_proj" for end, group in zip(("sa", "ca"), ASKED, strict=True) for x in group]
        names += ["self_attn.out_proj", "cross_attn.out_proj"]
        self.ask = pile(torch.stack([sheet(x.get_submodule(n)) for n in names]) for x in layers)
        heads = decoder.query_scale, decoder.ref_point_head, decoder.ref_anchor_head, model.bbox_embed
        singles = (*(x for head in heads for x in head.layers), model.class_embed, model.input_proj)
        self.flat = nn.ParameterList(leaf(sheet(x)) for x in (*singles, decoder.layers[0].ca_qpos_proj))
        self.start, self.anchors = leaf(model.transformer.patterns.weight), leaf(model.refpoint_embed.weight)

    def chain(self, x: Tensor, *sheets: Tensor) -> Tensor:
        for i, w in enumerate(sheets):
            x = F.linear(x.relu() if i else x, w[:, :-1], w[:, -1])
        return x

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, size: int = SIZE) -> Tensor:
        q, k, v = (x.unflatten(2, (HEADS, -1)).transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, mask, scale=size**-0.5).transpose(1, 2).flatten(2)

    def forward(self, samples: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        m, (*heads, label, entry, turn), fault = samples, self.flat, self.fault
        norms = [partial(F.layer_norm, normalized_shape=(WIDTH,), weight=w, bias=b) for w, b in self.norms]
        for w, (gain, shift, mean, var) in ((self.one, self.fixed_1), (self.two, self.fixed_4)):
            m = ((F.conv2d(m, w, None, 2, 1) - mean) / (var + 1e-5).sqrt() * gain + shift).relu()
        m, free = self.chain(m.flatten(2).mT, entry), (~mask[:, ::4, ::4]).to(m)
        down, across = (free.cumsum(i) / (free.sum(i, True) + 1e-6) for i in (1, 2))
        place = torch.cat([waves(down, 20), waves(across, 30)], 3).flatten(1, 2)
        free = free.flatten(1)[:, None, None] > 0
        x = self.start.repeat_interleave(len(self.anchors), 0).repeat(len(m), 1, 1)
        kept = raw = self.anchors.repeat(len(self.start), 1).repeat(len(m), 1, 1)
        logits, boxes = [], []
        for i, w in enumerate(self.ask):
            box, (wide, high) = raw.sigmoid(), self.chain(x, *heads[4:6]).sigmoid().split(1, -1)
            sine = torch.cat([waves(box[..., j], 10000) for j in (1, 0, 2, 3)], -1)
            spot, w_, h_ = self.chain(sine, *heads[2:4]), wide / box[..., 2:3], high / box[..., 3:]
            near = torch.cat([sine[..., :HALF] * h_, sine[..., HALF:WIDTH] * w_], -1)
            near = near * self.chain(x, *heads[:2]) if i else near
            q, k = self.chain(x, w[0]) + self.chain(spot, w[1]), self.chain(x, w[2]) + self.chain(spot, w[3])
            x = norms[3 * i](x + self.chain(self.attend(q, k, self.chain(x, w[4]), None), w[10]))
            q, k, there = self.chain(x, w[5]), self.chain(m, w[6]), self.chain(place, w[7])
            if i == 0:
                q, k = q + self.chain(spot, turn), k + there
            pairs = (q, self.chain(near, w[9])), (k, there)
            split = WIDTH if fault == "dab_detr_second_layer_joins_before_heads" and i == 1 else SIZE
            q, k = (torch.stack([y.unflatten(2, (-1, split)) for y in pair], 3).flatten(2) for pair in pairs)
            size = SIZE if fault == "dab_detr_last_cross_scale_of_content_only" and i == 2 else 2 * SIZE
            blind = fault == "dab_detr_first_cross_sees_padding_in_evaluation" and not (i or self.training)
            mixed = self.attend(q, k, self.chain(m, w[8]), None if blind else free, size)
            x = norms[3 * i + 1](x + self.chain(mixed, w[11]))
            x = norms[3 * i + 2](x + self.chain(x, self.up[i], self.down[i]))
            final, base = norms[-1](x), kept.clamp(-EDGE, EDGE)
            base = base.sigmoid() if fault == "dab_detr_boxes_added_to_anchors_not_inverted" else base
            logits.append(self.chain(final, label))
            boxes.append((self.chain(final, *heads[6:]) + base).sigmoid())
            kept = self.chain(x, *heads[6:]) + raw.clamp(-EDGE, EDGE)
            raw = kept.detach()
        return torch.stack(logits), torch.stack(boxes)


right(task, "dab_detr_of_two_scores", "a tree, channels last, scores added, folded norms", DetrOfTwoScores)
right(task, "dab_detr_of_stacked_weights", "packed stacks, anchors kept as logits", StackedDetr)
LAYERS, SLOPES = "transformer.decoder.layers", ("input gradient", "weight gradient")
faults = {
    "dab_detr_first_norm_by_another_epsilon": ("another constant", "backbone.0.1"),
    "dab_detr_positions_over_the_padded_picture": ("padding", "backbone.1"),
    "dab_detr_ratio_not_by_the_size_of_the_anchor": ("a factor left out", "transformer.decoder"),
    "dab_detr_anchors_not_detached": ("a detach left out", "transformer.decoder", SLOPES),
}
wrong(task, DetrOfTwoScores, **faults)
crossed = f"{LAYERS}.0.cross_attn", f"{LAYERS}.0"
faults = {
    "dab_detr_second_layer_joins_before_heads": ("another order of axes", f"{LAYERS}.1"),
    "dab_detr_last_cross_scale_of_content_only": ("another scale", f"{LAYERS}.2.cross_attn"),
    "dab_detr_first_cross_sees_padding_in_evaluation": ("padding", crossed, "eval"),
    "dab_detr_boxes_added_to_anchors_not_inverted": ("a function left out", ""),
}
wrong(task, StackedDetr, **faults)
