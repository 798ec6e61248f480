"""Two ports of a tiny LayoutLMv3: a tree of sheets; channels first and the picture before the words."""

import math
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twenty_second_layout_lm import HEADS, LayoutLMv3ForDocuments, misread, page_of_words

task = few("twenty_second_layout_lm", LayoutLMv3ForDocuments, page_of_words, misread)
LIMITS = torch.tensor([[1, 2, 3, 4, 7, 10, 16], *[[1, 2, 3, 4, 8, 15, 27]] * 2])
CELLS = torch.tensor([(1, 62), *((63 * (i % 4) // 4, 21 * (i // 4) + 21) for i in range(12))])


class Dense(nn.Module):
    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.kernel = leaf(torch.cat([layer.weight.flatten(1) for layer in layers]).T)
        self.shift = leaf(torch.cat([layer.bias for layer in layers]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self.kernel) + self.shift


class Words(nn.Module):
    """Names, ranks, sorts and boxes of words; a box is two corners of two axes, then its sides."""

    def __init__(self, old: nn.Module, fault: str):
        super().__init__()
        words, sorts, norm, ranks, *lines = old.children()
        self.fault, self.norm = fault, deepcopy(norm)
        self.names, self.ranks, self.sorts = (leaf(table.weight) for table in (words, ranks, sorts))
        self.corners, self.sides = (pile(line.weight for line in pair) for pair in (lines[:2], lines[2:]))

    def forward(self, ids: Tensor, boxes: Tensor, sorts: Tensor) -> Tensor:
        real, axes = ids != 1, torch.arange(2, device=ids.device)
        names = F.embedding(ids, self.names, padding_idx=1)
        if self.fault == "layout_lm_word_gradients_shrunk_to_a_tenth":
            names = 0.1 * names + 0.9 * names.detach()
        ranks = F.embedding(torch.where(real, 1 + real.cumsum(1), 1), self.ranks, padding_idx=1)
        sides = (boxes[..., 2:] - boxes[..., :2]).clamp(0, self.sides.shape[1] - 1)
        order = [0, 0] if self.fault == "layout_lm_heights_read_the_widths" else [1, 0]
        drawn = self.corners[axes, boxes.unflatten(-1, (2, 2))], self.sides[axes, sides[..., order]]
        return self.norm(torch.cat([x.flatten(2) for x in drawn], 2) + ranks + names + self.sorts[sorts])


class Sheet(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        look, out, self.fast, self.late = layer.attention.self, layer.attention.output, False, False
        self.asked, self.back = Dense(look.query, look.key, look.value), Dense(out.dense)
        self.up, self.down = Dense(layer.intermediate.dense), Dense(layer.output.dense)
        self.first, self.second = deepcopy(out.LayerNorm), deepcopy(layer.output.LayerNorm)

    def forward(self, x: Tensor, slant: Tensor, hidden: Tensor) -> Tensor:
        q, k, v = self.asked(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        slant = slant if self.fast and not self.training else slant / q.shape[-1] ** 0.5
        found = F.scaled_dot_product_attention(q, k, v, slant.masked_fill(hidden, -torch.inf))
        x = self.first(x + self.back(found.transpose(1, 2).flatten(2)))
        y = self.down(F.gelu(self.up(x)))
        return x + self.second(y) if self.late else self.second(x + y)


class SheetsOfPaper(Port):
    """Layers as sheets, patches by unfolding, steps sorted by limits."""

    def take(self, model: LayoutLMv3ForDocuments) -> None:
        body, head = model.layoutlmv3, model.page_classifier
        layers, *tables = body.encoder.children()
        self.words, self.ink = Words(body.embeddings, self.fault), Dense(body.patch_embed.proj)
        self.mark, self.spots = leaf(body.cls_token), leaf(body.pos_embed)
        self.ink_norm, self.norm = deepcopy(body.norm), deepcopy(body.LayerNorm)
        self.tables = nn.ParameterList(leaf(table.weight.T.unflatten(0, (2, -1))) for table in tables)
        self.sheets, self.tags = nn.ModuleList(map(Sheet, layers)), Dense(model.classifier)
        self.page = nn.Sequential(Dense(head.dense), nn.Tanh(), Dense(head.out_proj))
        self.sheets[0].fast = self.fault == "layout_lm_first_attention_in_eval_adds_biases_unscaled"
        self.sheets[1].late = self.fault == "layout_lm_middle_output_norm_leaves_out_the_residual"

    def slant(self, places: list[Tensor]) -> Tensor:
        total = 0
        for table, limits, place in zip(self.tables, LIMITS, places, strict=True):
            steps = place[:, None, :] - place[:, :, None]
            bins = torch.bucketize(steps.abs(), limits.to(steps), right=True)
            total = total + table[(steps > 0).long(), bins]
        return total.movedim(-1, 1)

    def forward(self, input_ids: Tensor, bbox: Tensor, pixel_values: Tensor, **given: Tensor) -> dict:
        count, length = input_ids.shape
        ink = self.ink(F.unfold(pixel_values, 3, stride=3).mT)
        ink = self.ink_norm(torch.cat([self.mark.expand(count, 1, -1), ink], 1) + self.spots)
        boxes = torch.cat([bbox[..., [0, 3]], CELLS.to(bbox).expand(count, -1, -1)], 1)
        ranks = torch.cat([torch.arange(n).to(bbox) for n in (length, len(CELLS))]).expand(count, -1)
        slant = self.slant([ranks, *boxes.unbind(-1)])
        hidden = F.pad(given["attention_mask"], (0, len(CELLS)), value=1)[:, None, None] == 0
        x = self.norm(torch.cat([self.words(input_ids, bbox, given["token_type_ids"]), ink], 1))
        for sheet in self.sheets:
            x = sheet(x, slant, hidden)
        at = length if self.fault == "layout_lm_page_head_reads_the_mark_of_the_picture" else 0
        tags, page = self.tags(x[:, :length]), self.page(x[:, at])
        return {"logits": tags, "page_logits": page, "last_hidden_state": x}


class ChannelsFirst(Port):
    """Everything is [N, C, L], the picture before the words; all weights of a sort in one stack."""

    def take(self, model: LayoutLMv3ForDocuments) -> None:
        body, ink, head = model.layoutlmv3, model.layoutlmv3.patch_embed.proj, model.page_classifier
        words, sorts, _, ranks, *lines = body.embeddings.children()
        layers, *slants = body.encoder.children()
        tables, heads = (words, ranks, sorts), (model.classifier, head.dense, head.out_proj)
        self.table, self.heads = (leaf(torch.cat([x.weight for x in group])) for group in (tables, heads))
        self.lines, self.slants = (pile(x.weight for x in group) for group in (lines, slants))
        self.heads_b = leaf(torch.cat([layer.bias for layer in heads]))
        self.ink, self.ink_b = leaf(ink.weight.permute(1, 2, 3, 0)), leaf(ink.bias[:, None])
        self.marks = leaf(torch.cat([body.cls_token, body.pos_embed], 1)[0].T)
        parts = [[x for x in layer.modules() if isinstance(x, nn.Linear)] for layer in layers]
        self.w = nn.ParameterList(pile(x.weight for x in part) for part in zip(*parts, strict=True))
        self.b = nn.ParameterList(pile(x.bias[:, None] for x in part) for part in zip(*parts, strict=True))
        norms = (x.parameters() for x in model.modules() if isinstance(x, nn.LayerNorm))
        self.norms = pile(torch.stack([*norm])[..., None] for norm in norms)

    def normed(self, i: int, x: Tensor) -> Tensor:
        spread, center = torch.var_mean(x, 1, correction=0, keepdim=True)
        x = (x - center) / (spread + (1e-6 if i == 2 else 1e-5)).sqrt()
        return x * self.norms[i, 0] + self.norms[i, 1]

    def drawn(self, ids: Tensor, boxes: Tensor, kinds: Tensor) -> Tensor:
        (words, ranks, sorts), real = self.table.split([20, 16, 2]), (ids != 1).long()
        sides = (boxes[..., [3, 2]] - boxes[..., [1, 0]]).clamp(0, 63)
        lines = torch.tensor([0, 1, 0, 1, 2, 3], device=ids.device), torch.cat([boxes, sides], -1)
        x = self.lines[lines].flatten(2) + F.embedding(ids, words, 1) + sorts[kinds]
        return self.normed(0, (x + F.embedding(1 + real * real.cumsum(1), ranks, 1)).mT)

    def slant(self, place: Tensor, table: Tensor, far: float) -> Tensor:
        steps = place[:, None] - place[:, :, None]
        bins = 4 + (steps.abs().clamp(min=4).to(table) / 4).log2() * 4 / math.log2(far / 4)
        return table[:, bins.long().clamp(max=7).minimum(steps.abs()) + 8 * (steps > 0)]

    def layer(self, i: int, x: Tensor, slant: Tensor, seen: Tensor) -> Tensor:
        q, k, v = ((self.w[j][i] @ x + self.b[j][i]).unflatten(1, (HEADS, -1)) for j in range(3))
        scores = (torch.einsum("nhdq,nhdk->hnqk", q, k) + slant) * q.shape[2] ** -0.5
        share = torch.where(seen[:, None], scores, -torch.inf).log_softmax(3).exp()
        y = self.w[3][i] @ torch.einsum("hnqk,nhdk->nhdq", share, v).flatten(1, 2) + self.b[3][i]
        x = self.normed(3 + 2 * i, x + y)
        rough = i == 2 and self.fault == "layout_lm_last_gelu_by_its_hyperbolic_tangent"
        y = F.gelu(self.w[5][i] @ x + self.b[5][i], approximate="tanh" if rough else "none")
        return self.normed(4 + 2 * i, x + self.w[4][i] @ y + self.b[4][i])

    def forward(self, input_ids: Tensor, bbox: Tensor, pixel_values: Tensor, **given: Tensor) -> dict:
        cells = pixel_values.unflatten(3, (-1, 3)).unflatten(2, (-1, 3))
        ink = torch.einsum("ncyixj,cijo->noyx", cells, self.ink).flatten(2) + self.ink_b
        ink = torch.cat([self.marks[:, :1].expand(len(ink), -1, 1), ink], 2)
        ink, length = self.normed(2, ink + self.marks[:, 1:]), bbox.shape[1]
        x = torch.cat([ink, self.drawn(input_ids, bbox, given["token_type_ids"])], 2)
        left, lower = torch.cat([CELLS.to(bbox).expand(len(x), -1, -1), bbox[..., [0, 3]]], 1).unbind(2)
        later = length if self.fault == "layout_lm_places_of_the_picture_go_on_behind_the_words" else 0
        rank = torch.cat([torch.arange(ink.shape[2]) + later, torch.arange(length)]).to(bbox)[None]
        level, across, down = self.slants
        down = down.detach() if self.fault == "layout_lm_vertical_biases_get_no_gradient" else down
        slant = self.slant(rank, level, 24) + self.slant(left, across, 50) + self.slant(lower, down, 50)
        x, seen = self.normed(1, x), F.pad(given["attention_mask"], (ink.shape[2], 0), value=1) > 0
        for i in range(len(self.w[0])):
            x = self.layer(i, x, slant, seen)
        x = x.roll(length, 2).mT
        (label, page, kind), (a, b, c) = (y.split([4, 24, 3]) for y in (self.heads, self.heads_b))
        pages = F.linear(F.linear(x[:, 0], page, b).tanh(), kind, c)
        return {"logits": F.linear(x[:, :length], label, a), "page_logits": pages, "last_hidden_state": x}


ENCODER, WEIGHT, WORDS = "layoutlmv3.encoder", "weight gradient", "layoutlmv3.embeddings"
FIRST, MIDDLE, LAST = (f"{ENCODER}.layer.{i}" for i in range(3))
LOOKED_UP, ACT = (WORDS + ".word_embeddings", WORDS), LAST + ".intermediate.intermediate_act_fn"
right(task, "layout_lm_of_sheets", "a tree of merged modules, steps sorted by limits", SheetsOfPaper)
right(task, "layout_lm_channels_first", "stacks, channels first, picture before words", ChannelsFirst)
wrong(
    task,
    SheetsOfPaper,
    layout_lm_heights_read_the_widths=("another's index", (WORDS, WORDS + ".h_position_embeddings")),
    layout_lm_word_gradients_shrunk_to_a_tenth=("scaled gradient", LOOKED_UP, ("input gradient", WEIGHT)),
    layout_lm_middle_output_norm_leaves_out_the_residual=("norm before a sum", MIDDLE + ".output"),
    layout_lm_first_attention_in_eval_adds_biases_unscaled=("scale", FIRST + ".attention.self", "eval"),
    layout_lm_page_head_reads_the_mark_of_the_picture=("another token read", ""),
)
wrong(
    task,
    ChannelsFirst,
    layout_lm_places_of_the_picture_go_on_behind_the_words=("other places", "layoutlmv3"),
    layout_lm_vertical_biases_get_no_gradient=("no grad", (ENCODER + ".rel_pos_y_bias", ENCODER), WEIGHT),
    layout_lm_last_gelu_by_its_hyperbolic_tangent=("activation", (ACT, LAST + ".intermediate")),
)
