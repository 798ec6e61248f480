"""Two ports of a small LightGlue: one row of points of both pictures, and one class of stacked weights."""

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twentieth_light_glue import HEADS, KEEP_ABOVE, LightGlue, matched, views

task = few("twentieth_light_glue", LightGlue, views, matched)


class Gather(nn.Module):
    """Points take in what they see of others; what is turned has its even channels before the odd ones."""

    def __init__(self, values: Tensor, shift: Tensor, out: nn.Linear, ffn: nn.Sequential):
        super().__init__()
        self.values, self.shift, self.back = leaf(values.T), leaf(shift), deepcopy(out)
        self.state, self.news = (leaf(x.T) for x in ffn[0].weight.chunk(2, 1))
        self.start, self.norm, self.end, self.bend = leaf(ffn[0].bias), *map(deepcopy, ffn[1::2]), 0

    def taken(self, x: Tensor, q: Tensor, k: Tensor, padded: Tensor, foreign: Tensor) -> Tensor:
        near = (q / q.shape[-1] ** 0.5 @ k.mT).masked_fill(padded[:, None, None], torch.finfo(x.dtype).min)
        share = near.masked_fill(foreign, -torch.inf).softmax(-1)
        v = (x @ self.values + self.shift).unflatten(2, (HEADS, -1)).transpose(1, 2)
        y = x @ self.state + self.back((share @ v).transpose(1, 2).flatten(2)) @ self.news + self.start
        return x + self.end(F.gelu(self.norm(y), approximate=("none", "tanh")[self.bend]))


class Within(Gather):
    def __init__(self, old: nn.Module):
        weight, bias = (x.unflatten(0, (HEADS, -1, 3)) for x in (old.Wqkv.weight, old.Wqkv.bias))
        super().__init__(weight[:, :, 2].flatten(0, 1), bias[:, :, 2].flatten(), old.out_proj, old.ffn)
        halves = [torch.cat([x[:, ::2, :2], x[:, 1::2, :2]], 1).transpose(1, 2) for x in (weight, bias)]
        self.pairs, self.offset = leaf(halves[0].flatten(0, 2).T), leaf(halves[1].flatten())

    def forward(self, x: Tensor, angles: Tensor, padded: Tensor, other: Tensor) -> Tensor:
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        a, b = (x @ self.pairs + self.offset).unflatten(2, (HEADS, 2, 2, -1)).permute(4, 3, 0, 2, 1, 5)
        return self.taken(x, *torch.cat([a * cos - b * sin, b * cos + a * sin], -1), padded, other)


class Across(Gather):
    def __init__(self, old: nn.Module):
        super().__init__(old.to_v.weight, old.to_v.bias, old.to_out, old.ffn)
        self.look, self.open = deepcopy(old.to_qk), False

    def forward(self, x: Tensor, padded: Tensor, other: Tensor) -> Tensor:
        look = self.look(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
        return self.taken(x, look, look, padded & other[0] if self.open else padded, ~other)


class OneRow(Port):
    """The points of both pictures in one row, barred from those of the other picture or of their own."""

    def take(self, model: LightGlue) -> None:
        self.lift, self.rates = deepcopy(model.input_proj), leaf(model.posenc.Wr.weight.T)
        self.within = nn.ModuleList(Within(layer.self_attn) for layer in model.transformers)
        self.across = nn.ModuleList(Across(layer.cross_attn) for layer in model.transformers)
        self.keys = nn.ModuleList(deepcopy(x.final_proj) for x in model.log_assignment)
        self.matches = nn.ModuleList(deepcopy(x.matchability) for x in model.log_assignment)
        self.doubts = nn.ModuleList(deepcopy(x.token[0]) for x in model.token_confidence)
        self.register_buffer("enough", model.confidence_thresholds.clone())
        self.within[1].bend = self.fault == "light_glue_middle_self_feed_forward_with_the_tanh_gelu"
        self.across[1].open = self.fault == "light_glue_middle_cross_sees_padding_of_the_first_picture"
        self.taught = self.fault == "light_glue_second_confidence_head_teaches_the_descriptors"

    def verdict(self, i: int, x: Tensor, padded: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """The logarithms of matches by sums of exponents, and how sure each point is to have one."""
        sides, sure = [first, x.shape[1] - first], self.matches[i](x)
        (a, b), (hidden, barred) = self.keys[i](x).split(sides, 1), padded[..., None].split(sides, 1)
        scores = (a @ b.mT / x.shape[-1] ** 0.5).masked_fill(hidden | barred.mT, torch.finfo(x.dtype).min)
        scores = 2 * scores - scores.logsumexp(2, True) - scores.logsumexp(1, True)
        yes, no = (F.logsigmoid(sign * sure).split(sides, 1) for sign in (1, -1))
        scores = (scores + yes[0] + yes[1].mT).masked_fill(hidden | barred.mT, 0)
        rows, last = torch.cat([scores, no[0] * ~hidden], 2), F.pad((no[1] * ~barred).mT, (0, 1))
        return torch.cat([rows, last], 1), sure.sigmoid()[..., 0]

    def forward(self, **given: Tensor) -> dict[str, Tensor]:
        places, first, named = [], given["mask0"].shape[1], {}
        for s in (0, 1):
            size = given[f"image_size{s}"][:, None]
            each = self.fault == "light_glue_keypoints_divided_by_each_side_rather_than_the_longer"
            places.append((2 * given[f"keypoints{s}"] - size) / (size if each else size.amax(2, True)))
        angles, padded = torch.cat(places, 1) @ self.rates, ~torch.cat([given["mask0"], given["mask1"]], 1)
        x = self.lift(torch.cat([given["descriptors0"], given["descriptors1"]], 1))
        other = (side := torch.arange(x.shape[1], device=x.device) >= first)[:, None] != side
        for i, (within, across) in enumerate(zip(self.within, self.across, strict=True)):
            x = across(within(x, angles, padded, other), padded, other)
            named[f"log_assignment_{i}"], sure = self.verdict(i, x, padded, first)
            if i < len(self.doubts):
                done = self.doubts[i](x if self.taught and i == 1 else x.detach())[..., 0].sigmoid()
                named[f"token0_{i}"], named[f"token1_{i}"] = done[:, :first], done[:, first:]
                padded = padded | (sure <= KEEP_ABOVE) & (done > self.enough[i]) & (not self.training)
        return named


class StackedGlue(Port):
    """All weights in stacks, biases as their last columns; one table of scores read along both sides."""

    def take(self, model: LightGlue) -> None:
        blocks = [x for layer in model.transformers for x in (layer.self_attn, layer.cross_attn)]
        self.put("enter", [model.input_proj])
        self.put("own", [x.Wqkv for x in blocks[::2]])
        self.put("same", [x.to_qk for x in blocks[1::2]])
        self.put("value", [x.to_v for x in blocks[1::2]])
        self.put("out", [getattr(x, "out_proj", None) or x.to_out for x in blocks])
        for name, i in (("rise", 0), ("norm", 1), ("fall", 3)):
            self.put(name, [x.ffn[i] for x in blocks])
        self.put("key", [x.final_proj for x in model.log_assignment])
        self.put("match", [x.matchability for x in model.log_assignment])
        self.put("token", [x.token[0] for x in model.token_confidence])
        self.rates = leaf(model.posenc.Wr.weight)
        self.register_buffer("levels", model.confidence_thresholds.clone())

    def put(self, name: str, layers: list[nn.Module]) -> None:
        both = ((x.weight.reshape(len(x.bias), -1), x.bias[:, None]) for x in layers)
        self.register_parameter(name, pile(torch.cat(pair, 1) for pair in both))

    def product(self, name: str, i: int, x: Tensor, *shape: int) -> Tensor:
        weight = getattr(self, name)[i]
        return (weight[:, :-1] @ x + weight[:, -1:]).unflatten(1, shape or (-1,))

    def update(self, i: int, x: Tensor, v: Tensor, scores: Tensor, gone: Tensor) -> Tensor:
        share = scores.masked_fill(gone[:, None, None], torch.finfo(x.dtype).min).softmax(3)
        y = self.product("rise", i, torch.cat([x, self.product("out", i, (v @ share.mT).flatten(1, 2))], 1))
        spread, center = torch.var_mean(y, 1, correction=0, keepdim=True)
        y = (y - center) / (spread + 1e-5).sqrt() * self.norm[i, :, :1] + self.norm[i, :, 1:]
        return x + self.product("fall", i, 0.5 * y * (1 + torch.erf(y * 0.5**0.5)))

    def assigned(self, i: int, x: list[Tensor], gone: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        (a, b), hidden = (self.product("key", i, y) for y in x), gone[0][:, :, None] | gone[1][:, None]
        scores = (a.mT @ b / a.shape[1] ** 0.5).masked_fill(hidden, torch.finfo(a.dtype).min)
        z0, z1 = (self.product("match", i, y)[:, 0] for y in x)
        whole = scores.log_softmax(1) + scores.log_softmax(2) - F.softplus(-z0)[:, :, None]
        if self.fault != "light_glue_last_matchability_of_the_second_picture_missing" or i < 2:
            whole = whole - F.softplus(-z1)[:, None]
        full = F.pad(whole.masked_fill(hidden, 0), (0, 1, 0, 1))
        full[:, :-1, -1], full[:, -1, :-1] = -F.softplus(z0) * ~gone[0], -F.softplus(z1) * ~gone[1]
        return full, [z0.sigmoid(), z1.sigmoid()]

    def forward(self, **given: Tensor) -> dict[str, Tensor]:
        x = [self.product("enter", 0, given[f"descriptors{s}"].mT) for s in (0, 1)]
        gone, waves, named = [~given["mask0"], ~given["mask1"]], [], {}
        for s in (0, 1):
            half = given[f"image_size{s}"][..., None] / 2
            angles = self.rates @ ((given[f"keypoints{s}"].mT - half) / half.amax(1, keepdim=True))
            halves = self.fault == "light_glue_turns_repeated_by_halves_while_neighbours_turn_together"
            angles = torch.stack([angles, angles], 1 if halves else 2).flatten(1, 2)[:, None]
            waves.append((angles.cos(), angles.sin()))
        for i in range(len(self.own)):
            for s, (cos, sin) in enumerate(waves):
                q, k, v = self.product("own", i, x[s], HEADS, -1, 3).unbind(3)
                crossed = (torch.stack([-y[:, :, 1::2], y[:, :, ::2]], 3).flatten(2, 3) for y in (q, k))
                q, k = (y * cos + other * sin for y, other in zip((q, k), crossed, strict=True))
                x[s] = self.update(2 * i, x[s], v, q.mT @ k / q.shape[2] ** 0.5, gone[s])
            (a, b), (v0, v1) = ([self.product(n, i, y, HEADS, -1) for y in x] for n in ("same", "value"))
            scores = a.mT @ b / a.shape[2] ** 0.5
            x[0] = self.update(2 * i + 1, x[0], v1, scores, gone[1])
            if self.fault == "light_glue_last_cross_attention_learns_scores_from_one_side_only" and i == 2:
                scores = scores.detach()
            x[1] = self.update(2 * i + 1, x[1], v0, scores.mT, gone[0])
            named[f"log_assignment_{i}"], sure = self.assigned(i, x, gone)
            for s in (0, 1) if i < len(self.token) else ():
                done = named[f"token{s}_{i}"] = self.product("token", i, x[s].detach())[:, 0].sigmoid()
                alone = self.fault == "light_glue_evaluation_prunes_by_matchability_alone"
                off = (not self.training) & (sure[s] <= KEEP_ABOVE) & (alone | (done > self.levels[i]))
                gone[s] = gone[s] | off
        return named


gradients, cross = ("input gradient", "weight gradient"), [f"transformers.{i}.cross_attn" for i in range(3)]
ffn = "transformers.1.self_attn.ffn.2", "transformers.1.self_attn.ffn"
right(task, "light_glue_of_one_row_of_points", "both pictures in one row, halves turn", OneRow)
right(task, "light_glue_of_stacked_weights", "stacked weights, one table of scores", StackedGlue)
wrong(
    task,
    OneRow,
    light_glue_keypoints_divided_by_each_side_rather_than_the_longer=("positions normalised otherwise", ""),
    light_glue_middle_self_feed_forward_with_the_tanh_gelu=("approximate activation", ffn),
    light_glue_middle_cross_sees_padding_of_the_first_picture=("half a mask", cross[1]),
    light_glue_second_confidence_head_teaches_the_descriptors=("attached", "token_confidence.1", gradients),
)
wrong(
    task,
    StackedGlue,
    light_glue_turns_repeated_by_halves_while_neighbours_turn_together=("order of a repeat", "posenc"),
    light_glue_last_cross_attention_learns_scores_from_one_side_only=("detached", cross[2], gradients),
    light_glue_evaluation_prunes_by_matchability_alone=("a condition missing", "", "eval"),
    light_glue_last_matchability_of_the_second_picture_missing=("a term missing", "log_assignment.2"),
)
