"""Two ports of a tiny BEiT: a tree with the class behind the patches, and stacks with places last."""

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twenty_first_beit import BeitForMaskedImageModeling, masked_modeling, mosaics

task = few("twenty_first_beit", BeitForMaskedImageModeling, mosaics, masked_modeling)


class Map(nn.Module):
    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.kernel, self.shift = leaf(layer.weight.T), leaf(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self.kernel) + self.shift


class Offsets(nn.Module):
    """A bias for each pair of places by windows of a map of differences; the class stands last."""

    def __init__(self, old: nn.Module):
        super().__init__()
        (self.rows, self.columns), table = old.window_size, old.relative_position_bias_table.T
        self.plane = leaf(table[:, :-3].unflatten(1, (2 * self.rows - 1, 2 * self.columns - 1)))
        self.from_class, self.to_class, self.class_itself = map(leaf, table[:, -3:, None, None].unbind(1))
        self.held = False

    def forward(self) -> Tensor:
        windows = self.plane.unfold(1, self.rows, 1).unfold(2, self.columns, 1)
        pairs = windows.flip(3, 4).flatten(3).flatten(1, 2)
        row, column = self.from_class.expand_as(pairs[:, :1]), self.to_class.expand_as(pairs[:, :, :1])
        bias = torch.cat([torch.cat([pairs, row], 1), torch.cat([column, self.class_itself], 1)], 2)
        return bias.detach() if self.held else bias


class Gaze(nn.Module):
    """Attention by one product for queries, keys and values, whose bias has zeros for the keys."""

    def __init__(self, old: nn.Module):
        super().__init__()
        look, self.heads, self.misplaced = old.attention, old.attention.num_attention_heads, False
        self.kernel = leaf(torch.cat([look.query.weight, look.key.weight, look.value.weight]).T)
        self.q_shift, self.v_shift = leaf(look.query.bias), leaf(look.value.bias)
        self.offsets, self.back = Offsets(look.relative_position_bias), Map(old.output.dense)

    def forward(self, x: Tensor, common: Tensor) -> Tensor:
        rest = [torch.zeros_like(self.v_shift), self.v_shift]
        shift = torch.cat([self.q_shift, *(reversed(rest) if self.misplaced else rest)])
        qkv = torch.addmm(shift, x.flatten(0, 1), self.kernel).unflatten(0, x.shape[:2])
        q, k, v = qkv.unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=(common + self.offsets())[None])
        return self.back(mixed.permute(0, 2, 1, 3).flatten(2))


class Stage(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.first, self.gaze = deepcopy(layer.layernorm_before), Gaze(layer.attention)
        self.up, self.act, self.down = Map(layer.intermediate.dense), nn.GELU(), Map(layer.output.dense)
        self.second, self.scales = deepcopy(layer.layernorm_after), pile([layer.lambda_1, layer.lambda_2])
        self.which = 1

    def forward(self, x: Tensor, common: Tensor) -> Tensor:
        x = torch.addcmul(x, self.gaze(self.first(x), common), self.scales[0])
        return torch.addcmul(x, self.down(self.act(self.up(self.second(x)))), self.scales[self.which])


class ClassBehind(Port):
    """Patches unfolded, masked by a choice; the class token follows them."""

    def take(self, model: BeitForMaskedImageModeling) -> None:
        body, first = model.beit, model.beit.embeddings
        patches = first.patch_embeddings.projection
        self.size, self.kernel = patches.stride[0], leaf(patches.weight.flatten(1).T)
        self.shift, self.blank = leaf(patches.bias), leaf(first.mask_token[0, 0])
        self.summary, self.common = leaf(first.cls_token[0]), Offsets(body.encoder.relative_position_bias)
        self.stages = nn.ModuleList(Stage(layer) for layer in body.encoder.layer)
        self.words = nn.Sequential(deepcopy(model.layernorm), Map(model.lm_head))
        self.kinds = nn.Sequential(deepcopy(body.pooler.layernorm), Map(model.classifier))
        self.common.held = self.fault == "beit_shared_bias_is_kept_without_its_gradient"
        bent = self.fault == "beit_first_layer_bends_its_gelu_by_tanh"
        self.stages[0].act = nn.GELU("tanh" if bent else "none")
        self.stages[1].which = int(self.fault != "beit_middle_layer_scales_its_mlp_by_lambda_1")
        self.stages[2].gaze.misplaced = self.fault == "beit_last_layer_gives_the_bias_of_values_to_its_keys"

    def forward(self, pixel_values: Tensor, bool_masked_pos: Tensor) -> dict[str, Tensor]:
        cells = F.unfold(pixel_values, self.size, stride=self.size).mT @ self.kernel + self.shift
        x = torch.where(bool_masked_pos[:, :, None], self.blank, cells)
        x, common = torch.cat([x, self.summary.expand(len(x), 1, -1)], 1), self.common()
        for stage in self.stages:
            x = stage(x, common)
        x = x[:, :-1]
        return {"logits": self.words(x), "class_logits": self.kinds(x.mean(1))}


class PlacesLast(Port):
    """Weights in stacks; tokens are [N, D, places], the layer scale is in the weights that it scales."""

    def take(self, model: BeitForMaskedImageModeling) -> None:
        layers, first = model.beit.encoder.layer, model.beit.embeddings
        looks = [layer.attention.attention for layer in layers]
        patches, cut = first.patch_embeddings.projection, (looks[0].num_attention_heads, -1)
        self.window, self.size = looks[0].relative_position_bias.window_size, patches.stride[0]
        self.patch, self.patch_b = leaf(patches.weight.flatten(1)), leaf(patches.bias)
        self.starts = pile([first.cls_token[0, 0], first.mask_token[0, 0]])
        maps = (torch.stack([x.query.weight, x.key.weight, x.value.weight]) for x in looks)
        self.maps = pile(x.unflatten(1, cut) for x in maps)
        self.maps_b = pile(torch.stack([x.query.bias, x.value.bias]).unflatten(1, cut) for x in looks)
        parts = "attention.output.dense", "intermediate.dense", "output.dense"
        outs, ups, downs = ([x.get_submodule(part) for x in layers] for part in parts)
        self.outs, self.outs_b = pile(x.weight.unflatten(1, cut) for x in outs), pile(x.bias for x in outs)
        self.ups, self.ups_b = pile(x.weight for x in ups), pile(x.bias for x in ups)
        self.downs, self.downs_b = pile(x.weight for x in downs), pile(x.bias for x in downs)
        self.scales = pile(torch.stack([x.lambda_1, x.lambda_2]) for x in layers)
        self.tables = pile(x.T for name, x in model.named_parameters() if name.endswith("bias_table"))
        norms, self.eps = [x for x in model.modules() if isinstance(x, nn.LayerNorm)], model.layernorm.eps
        self.norms = pile(torch.stack([x.weight, x.bias])[:, :, None] for x in norms)
        self.words, ends = model.lm_head.out_features, (model.lm_head, model.classifier)
        self.ends = leaf(torch.cat([x.weight for x in ends]))
        self.ends_b = leaf(torch.cat([x.bias for x in ends]))

    def index(self, span: int) -> Tensor:
        """Which entry of a table each pair of places reads, where a step of rows is ``span`` entries."""
        (rows, columns), count = self.window, self.tables.shape[2]
        row, column = torch.cartesian_prod(*map(torch.arange, self.window)).T.to(self.tables.device)
        down, across = row[:, None] - row + rows - 1, column[:, None] - column + columns - 1
        index = F.pad(F.pad(down * span + across, (1, 0), value=count - 2), (0, 0, 1, 0), value=count - 3)
        index[0, 0] = count - 1
        return index

    def normed(self, i: int, x: Tensor) -> Tensor:
        x = x - x.mean(1, True)
        return self.norms[i, 0] * x / (x.square().mean(1, True) + self.eps).sqrt() + self.norms[i, 1]

    def look(self, i: int, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = torch.einsum("phdc,nct->pnhdt", self.maps[i], self.normed(2 * i, x))
        scores = torch.einsum("nhdt,nhds->nhts", q + self.maps_b[i, 0, :, :, None], k)
        early, scale = i == 0 and self.fault == "beit_first_layer_scales_its_bias_too", k.shape[2] ** -0.5
        scores = (scores + bias) * scale if early else scores * scale + bias
        mixed = torch.einsum("nhts,nhds->nhdt", scores.softmax(3), v) + self.maps_b[i, 1, :, :, None]
        out = torch.einsum("c,chd,nhdt->nct", self.scales[i, 0], self.outs[i], mixed)
        return x + out + (self.outs_b[i] * self.scales[i, 0])[:, None]

    def think(self, i: int, x: Tensor) -> Tensor:
        y = self.ups[i] @ self.normed(2 * i + 1, x) + self.ups_b[i, :, None]
        y, scale = 0.5 * y * (1 + torch.erf(y * 0.5**0.5)), self.scales[i, 1, :, None]
        return x + (self.downs[i] * scale) @ y + self.downs_b[i, :, None] * scale

    def forward(self, pixel_values: Tensor, bool_masked_pos: Tensor) -> dict[str, Tensor]:
        x = self.patch @ F.pixel_unshuffle(pixel_values, self.size).flatten(2) + self.patch_b[:, None]
        if self.training or self.fault != "beit_mask_is_left_out_in_evaluation":
            x = x.lerp(self.starts[1, :, None], bool_masked_pos[:, None].to(x))
        x = torch.cat([self.starts[0, :, None].expand(len(x), -1, 1), x], 2)
        stepped = self.fault != "beit_shared_index_steps_rows_by_their_own_count"
        shared = self.tables[0][:, self.index(2 * self.window[stepped] - 1)]
        biases = self.tables[1:, :, self.index(2 * self.window[1] - 1)] + shared
        for i, bias in enumerate(biases):
            x = self.think(i, self.look(i, x, bias))
        x, last = x[:, :, 1:], 2 * len(biases)
        seen = x.detach() if self.fault == "beit_pooler_averages_detached_patches" else x
        pooled = self.normed(last, seen.mean(2, keepdim=True))[:, :, 0]
        words = self.ends[: self.words] @ self.normed(last + 1, x) + self.ends_b[: self.words, None]
        kinds = F.linear(pooled, self.ends[self.words :], self.ends_b[self.words :])
        return {"logits": words.mT, "class_logits": kinds}


LAYER, LOOK = "beit.encoder.layer.{}", "beit.encoder.layer.{}.attention.attention"
SHARED, INNER = "beit.encoder.relative_position_bias", "beit.encoder.layer.0.intermediate"
LAST = LOOK.format(2), LOOK.format(2) + ".value", LOOK.format(2) + ".key"
right(task, "beit_with_the_class_behind_the_patches", "tokens in another order, cut tables", ClassBehind)
right(task, "beit_of_stacks_with_places_last", "stacked weights, scales folded into them", PlacesLast)
wrong(
    task,
    ClassBehind,
    beit_shared_bias_is_kept_without_its_gradient=("detach", SHARED, "weight gradient"),
    beit_first_layer_bends_its_gelu_by_tanh=("an approximation", (INNER + ".intermediate_act_fn", INNER)),
    beit_middle_layer_scales_its_mlp_by_lambda_1=("other branch's weight", LAYER.format(1)),
    beit_last_layer_gives_the_bias_of_values_to_its_keys=("a bias in another third", LAST),
)
wrong(
    task,
    PlacesLast,
    beit_mask_is_left_out_in_evaluation=("a mask in training only", "beit.embeddings", "eval"),
    beit_shared_index_steps_rows_by_their_own_count=("an index by the wrong side", SHARED),
    beit_first_layer_scales_its_bias_too=("a scale after a sum", LOOK.format(0)),
    beit_pooler_averages_detached_patches=("detach", "beit.pooler", ("input gradient", "weight gradient")),
)
