"""Two ports of a small MobileViT: a tree that shuffles pixels, and stacks, channels last, with a mask."""

from copy import deepcopy
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right, tapped
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twenty_second_mobile_vit import MobileViTForImageClassification, smoothed, stripes

task = few("twenty_second_mobile_vit", MobileViTForImageClassification, stripes, smoothed)


class Grain(nn.Module):
    """A convolution of input channels given in parts, a batch norm, and SiLU where it is not ``plain``."""

    def __init__(self, unit: nn.Module, parts: int = 1):
        super().__init__()
        conv, self.norm, self.plain = unit.convolution, unit.normalization, not unit.activation
        self.kernels = nn.ParameterList(map(leaf, conv.weight.chunk(parts, 1)))
        self.how, self.edge, self.own = (conv.stride, 0, 1, conv.groups), 4 * conv.padding[:1], False

    def forward(self, *parts: Tensor) -> Tensor:
        pairs = zip(parts, self.kernels, strict=True)
        y = sum(F.conv2d(F.pad(x, self.edge), kernel, None, *self.how) for x, kernel in pairs)
        by_batch = self.own and not self.training
        y = F.batch_norm(y, None, None, *self.norm.parameters(), True) if by_batch else self.norm(y)
        return y if self.plain else y * y.sigmoid()


class Bridged(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Attend(nn.Module):
    """Attention over the last but one axis of [N, places, patches, C]."""

    def __init__(self, old: nn.Module):
        super().__init__()
        three, self.tell = [*old.attention.children()], old.output.dense
        self.ask, self.ask_b = (leaf(torch.cat([getattr(x, n) for x in three])) for n in ("weight", "bias"))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.linear(x, self.ask, self.ask_b).unflatten(-1, (3, 2, -1)).permute(3, 0, 1, 4, 2, 5)
        return self.tell(F.scaled_dot_product_attention(q, k, v).transpose(2, 3).flatten(3))


class Weave(nn.Module):
    """Places of 2 x 2 patches by shuffling pixels; the first features skip to the last convolution."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.near, self.far, self.enter = Grain(layer.conv_kxk), nn.Sequential(), layer.conv_1x1.convolution
        for old in layer.transformer.layer:
            steps = old.layernorm_after, old.intermediate.dense, nn.SiLU(), old.output.dense
            self.far.extend([Bridged(old.layernorm_before, Attend(old.attention)), Bridged(*steps)])
        self.far.append(layer.layernorm)
        self.back, self.join = Grain(layer.conv_projection), Grain(layer.fusion, 2)

    def forward(self, x: Tensor) -> Tensor:
        even = [side + side % 2 for side in x.shape[2:]]
        y = F.pixel_unshuffle(F.interpolate(self.enter(self.near(x)), even, mode="bilinear"), 2)
        y = self.far(y.flatten(2).unflatten(1, (-1, 4)).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        y = y[:, :, [0, 2, 1, 3]] if self.turned else y
        y = F.pixel_shuffle(y.flatten(1, 2).unflatten(2, (even[0] // 2, -1)), 2)
        y = self.back(F.interpolate(y, x.shape[2:], mode="bilinear"))
        return self.join(x.detach() if self.cut else x, y)


class WovenTree(Port):
    def take(self, model: MobileViTForImageClassification) -> None:
        body = deepcopy(model.mobilevit)
        early, later, last = body.encoder.layer
        blocks = (*early.layer, *later.layer, last.downsampling_layer)
        blocks = ((Bridged if x.use_residual else nn.Sequential)(*map(Grain, x.children())) for x in blocks)
        self.trunk = nn.Sequential(Grain(body.conv_stem), *blocks, Weave(last), Grain(body.conv_1x1_exp))
        self.judge, weave = deepcopy(model.classifier), self.trunk[-2]
        weave.turned = self.fault == "mobile_vit_folds_columns_before_rows"
        weave.cut = self.fault == "mobile_vit_block_input_detached_before_the_fusion"
        weave.join.own = self.fault == "mobile_vit_fusion_norm_by_the_batch_in_evaluation"
        if self.fault == "mobile_vit_last_stride_pads_at_the_end_only":
            self.trunk[-3][1].edge = (0, 1, 0, 1)

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        features = self.trunk(pixel_values)
        return {"logits": self.judge(features.flatten(2).mean(2)), "last_hidden_state": features}


def resized(x: Tensor, sides: list[int]) -> Tensor:
    """Linear interpolation of rows and of columns, by a matrix each."""
    pairs = zip(x.shape[1:3], sides, strict=True)
    maps = (F.interpolate(torch.eye(old).to(x)[None], new, mode="linear")[0] for old, new in pairs)
    return torch.einsum("nhwc,hr,ws->nrsc", x, *maps)


def stacked(linears: list[nn.Linear]) -> tuple[nn.Parameter, nn.Parameter]:
    return pile(x.weight.T for x in linears), pile(x.bias for x in linears)


class FlatMasked(Port):
    def take(self, model: MobileViTForImageClassification) -> None:
        units = [x for x in model.modules() if hasattr(x, "convolution")]
        norms, layers = [x.normalization for x in units], model.mobilevit.encoder.layer[2].transformer.layer
        self.kernels = nn.ParameterList(leaf(x.convolution.weight) for x in units)
        table = torch.cat([torch.stack([*x.parameters(), *x.buffers()][:4]) for x in norms if x], 1)
        self.ends, self.tilts = [0, *accumulate(len(x.bias) if x else 0 for x in norms)], leaf(table[:2])
        self.register_buffer("kept", table[2:].detach().clone())
        looks = [(*x.attention.attention.children(), x.attention.output.dense) for x in layers]
        self.maps, self.maps_b = stacked([x for each in looks for x in each])
        self.ups, self.ups_b = stacked([x.intermediate.dense for x in layers])
        self.downs, self.downs_b = stacked([x.output.dense for x in layers])
        scales = (x for x in model.modules() if isinstance(x, nn.LayerNorm))
        self.scales = pile(torch.stack([*x.parameters()]) for x in scales)
        self.head = leaf(torch.cat([model.classifier.weight, model.classifier.bias[:, None]], 1))

    def convolved(self, i: int, x: Tensor, stride: int = 1) -> Tensor:
        if self.kernels[i].shape[1] > 1:
            return tapped(x, self.kernels[i], stride)
        return F.conv2d(x.movedim(3, 1), self.kernels[i], None, stride, 1, 1, x.shape[3]).movedim(1, 3)

    def cell(self, i: int, x: Tensor, stride: int = 1) -> Tensor:
        x, span = self.convolved(i, x, stride), slice(self.ends[i], self.ends[i + 1])
        swapped = i == 0 and self.fault == "mobile_vit_stem_norm_keeps_a_tenth_of_its_past"
        center, spread = self.kept[:, span]
        if self.training:
            spread, center = torch.var_mean(x, (0, 1, 2), correction=0)
            now = torch.stack([center, x.flatten(0, 2).var(0)]).detach()
            self.kept[:, span] = self.kept[:, span].lerp(now, 0.9 if swapped else 0.1)
        gain, offset = self.tilts[:, span]
        x = torch.addcmul(offset, x - center, gain / torch.sqrt(spread + 1e-5))
        return x if i in (3, 6, 9, 12) else F.silu(x)

    def bottle(self, i: int, x: Tensor, stride: int = 1) -> Tensor:
        return self.cell(i + 2, self.cell(i + 1, self.cell(i, x), stride))

    def normed(self, i: int, x: Tensor) -> Tensor:
        less = i == 3 and self.fault == "mobile_vit_last_mlp_norm_by_unbiased_variance"
        spread, center = torch.var_mean(x, -1, correction=int(less), keepdim=True)
        return (x - center) / (spread + 1e-5).sqrt() * self.scales[i, 0] + self.scales[i, 1]

    def transformed(self, i: int, x: Tensor, hidden: Tensor) -> Tensor:
        """A layer over all pixels [N, L, C], which see those that are not hidden."""
        maps, shifts = self.maps[4 * i : 4 * i + 4], self.maps_b[4 * i : 4 * i + 4]
        asked = torch.einsum("nlc,pcd->pnld", self.normed(2 * i, x), maps[:3]) + shifts[:3, None, None]
        q, k, v = asked.unflatten(-1, (2, -1))
        scores = torch.einsum("nlhd,nmhd->nhlm", q * q.shape[-1] ** -0.5, k).masked_fill(hidden, -torch.inf)
        shares = (scores - scores.logsumexp(-1, keepdim=True)).exp()
        if i == 0 and self.fault == "mobile_vit_first_attention_cuts_its_shares_off":
            shares = shares.detach()
        x = x + torch.einsum("nhlm,nmhd->nlhd", shares, v).flatten(2) @ maps[3] + shifts[3]
        y = F.silu(self.normed(2 * i + 1, x) @ self.ups[i] + self.ups_b[i])
        return x + y @ self.downs[i] + self.downs_b[i]

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        x = self.cell(0, pixel_values.permute(0, 2, 3, 1), 2)
        x = self.bottle(4, x + self.bottle(1, x), 2)
        x = self.bottle(10, x + self.bottle(7, x), 2)
        size, even = x.shape[1:3], [side + side % 2 for side in x.shape[1:3]]
        place = torch.tensor([[0, 1], [2, 3]], device=x.device).repeat(even[0] // 2, even[1] // 2)
        hidden = place.flatten()[:, None] != place.flatten()
        y = self.transformed(0, resized(self.convolved(14, self.cell(13, x)), even).flatten(1, 2), hidden)
        y = resized(self.normed(4, self.transformed(1, y, hidden)).unflatten(1, even), size)
        z = self.cell(17, self.cell(16, torch.cat([x, self.cell(15, y)], 3)))
        high, wide = even if self.fault == "mobile_vit_pooling_divides_by_the_resized_area" else size
        pooled = F.pad(z.sum((1, 2)) / (high * wide), (0, 1), value=1)
        return {"logits": pooled @ self.head.T, "last_hidden_state": z.permute(0, 3, 1, 2)}


BLOCK, SLOPES = "mobilevit.encoder.layer.2", ("input gradient", "weight gradient")
STEM, FUSION, LAYERS = "mobilevit.conv_stem", BLOCK + ".fusion", BLOCK + ".transformer.layer"
DEPTHWISE = BLOCK + ".downsampling_layer.conv_3x3"
right(task, "mobile_vit_of_shuffled_pixels_in_a_tree", "a tree, a split fusion, pixel shuffles", WovenTree)
right(task, "mobile_vit_of_flat_stacks_under_a_mask", "stacked weights, channels last, a mask", FlatMasked)
IN_FUSION, IN_STEM = (FUSION + ".normalization", FUSION), (STEM + ".normalization", STEM)
wrong(
    task,
    WovenTree,
    mobile_vit_last_stride_pads_at_the_end_only=("padding", (DEPTHWISE + ".convolution", DEPTHWISE)),
    mobile_vit_folds_columns_before_rows=("axes swapped", BLOCK),
    mobile_vit_block_input_detached_before_the_fusion=("detach", (BLOCK, FUSION), SLOPES),
    mobile_vit_fusion_norm_by_the_batch_in_evaluation=("batch statistics in eval", IN_FUSION, "eval"),
)
wrong(
    task,
    FlatMasked,
    mobile_vit_stem_norm_keeps_a_tenth_of_its_past=("momentum", IN_STEM, ("buffer", "eval")),
    mobile_vit_first_attention_cuts_its_shares_off=("detach", LAYERS + ".0.attention.attention", SLOPES),
    mobile_vit_last_mlp_norm_by_unbiased_variance=("unbiased variance", LAYERS + ".1.layernorm_after"),
    mobile_vit_pooling_divides_by_the_resized_area=("a mean over more places", "mobilevit"),
)
