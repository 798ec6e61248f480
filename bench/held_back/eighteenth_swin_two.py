"""Two ports of a Swin Transformer V2: branches as modules, and stacked weights with gathered windows."""

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._eighteenth_swin_two import TOP, WINDOW, SwinTransformer, images, smoothed
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("eighteenth_swin_two", SwinTransformer, images, smoothed)


class Distances(nn.Module):
    def __init__(self, mlp: nn.Sequential, reach: int):
        super().__init__()
        steps = torch.arange(1.0 - WINDOW, WINDOW) * 8 / reach
        self.register_buffer("steps", (steps.sign() * torch.log2(1 + steps.abs()) / 3).to(mlp[0].weight))
        self.inner = leaf(torch.cat([mlp[0].weight, mlp[0].bias[:, None]], 1))
        self.outer = leaf(mlp[2].weight)

    def forward(self) -> Tensor:
        down, across = torch.meshgrid(self.steps, self.steps, indexing="ij")
        hidden = torch.einsum("fk,kxy->fxy", self.inner, torch.stack([down, across, torch.ones_like(down)]))
        table = 16 * torch.einsum("hf,fxy->hxy", self.outer, hidden.relu()).sigmoid()
        return table.unfold(1, WINDOW, 1).unfold(2, WINDOW, 1).flip(3, 4).flatten(3).flatten(1, 2)


class Attend(nn.Module):
    """Attention within windows, the weights by heads; keys have no shift unless ``shifted_keys``."""

    def __init__(self, attn: nn.Module, reach: int = WINDOW - 1, shifted_keys: bool = False):
        super().__init__()
        heads, self.step = attn.num_heads, attn.shift_size
        weights, biases = attn.qkv.weight.chunk(3), attn.qkv.bias.chunk(3)
        self.q, self.k, self.v = (leaf(w.unflatten(0, (heads, -1)).mT) for w in weights)
        self.q_b, k_b, self.v_b = (leaf(b.reshape(heads, 1, -1)) for b in biases)
        self.k_b = k_b if shifted_keys else 0.0
        self.heat, self.distances = leaf(attn.logit_scale.flatten()), Distances(attn.cpb_mlp, reach)
        self.out, self.out_b = leaf(attn.proj.weight.T.unflatten(0, (heads, -1))), leaf(attn.proj.bias)

    def cut(self, x: Tensor, steps: list[int]) -> Tensor:
        x = x.roll([-step for step in steps], (1, 2)).unflatten(2, (-1, WINDOW)).unflatten(1, (-1, WINDOW))
        return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        h, w = x.shape[1:3]
        x = F.pad(x, (0, 0, 0, -w % WINDOW, 0, -h % WINDOW))
        steps = [self.step * (size > WINDOW) for size in x.shape[1:3]]
        rows, columns = (torch.arange(size) < step for size, step in zip(x.shape[1:3], steps, strict=True))
        wrapped = self.cut((2 * rows[:, None] + columns)[None, :, :, None], steps)
        tokens = self.cut(x, steps)[:, :, None]
        q, k = (F.normalize(tokens @ m + b, dim=-1) for m, b in ((self.q, self.q_b), (self.k, self.k_b)))
        scores = (
            q @ k.mT * self.heat.clamp(max=TOP).exp()[:, None, None]
            + self.distances()
            + (wrapped != wrapped.mT).to(x)[:, :, None] * -100
        )
        y = scores.softmax(-1) @ (tokens @ self.v + self.v_b)
        y = torch.einsum("nwhtd,hdc->nwtc", y, self.out) + self.out_b
        y = y.unflatten(2, (WINDOW, WINDOW)).unflatten(1, (x.shape[1] // WINDOW, -1)).transpose(2, 3)
        return y.flatten(3, 4).flatten(1, 2).roll(steps, (1, 2))[:, :h, :w]


class Branch(nn.Module):
    def __init__(self, body: nn.Module, norm: nn.LayerNorm):
        super().__init__()
        self.body, self.centre, self.late = body, deepcopy(norm), False

    def forward(self, x: Tensor) -> Tensor:
        return self.centre(x + self.body(x)) if self.late else x + self.centre(self.body(x))


class Level(nn.Module):
    def __init__(self, taps: Tensor, bias: Tensor | None, norm: nn.LayerNorm, blocks: nn.Sequential):
        super().__init__()
        self.taps, self.bias = leaf(taps), None if bias is None else leaf(bias)
        self.centre, self.near = deepcopy(norm), False
        self.branches = nn.Sequential()
        for b in blocks:
            feed = nn.Sequential(deepcopy(b.mlp[0]), nn.GELU(), deepcopy(b.mlp[3]))
            self.branches.extend([Branch(Attend(b.attn), b.norm1), Branch(feed, b.norm2)])

    def forward(self, x: Tensor) -> Tensor:
        down, across = (size % 2 for size in x.shape[2:])
        x = F.pad(x, (across, 0, down, 0) if self.near else (0, across, 0, down))
        return self.branches(self.centre(F.conv2d(x, self.taps, self.bias, 2).movedim(1, 3)))


class BranchesOfWindows(Port):
    """Levels that begin with a coarser grid, each a chain of branches."""

    def take(self, model: SwinTransformer) -> None:
        (embed, _, norm), first, merge, second = model.features
        taps = merge.reduction.weight.unflatten(1, (2, 2, -1)).permute(0, 3, 2, 1)
        self.fine = Level(embed.weight, embed.bias, norm, first)
        self.coarse = Level(taps, None, merge.norm, second)
        self.centre, self.head = deepcopy(model.norm), deepcopy(model.head)
        if self.fault == "swin_two_first_key_bias_kept":
            self.fine.branches[0].body = Attend(first[0].attn, shifted_keys=True)
        if self.fault == "swin_two_second_distances_over_the_full_window":
            self.fine.branches[2].body = Attend(first[1].attn, reach=WINDOW)
        self.coarse.branches[1].late = self.fault == "swin_two_third_mlp_summed_before_its_norm"
        self.coarse.near = self.fault == "swin_two_odd_map_padded_at_its_near_sides"

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        fine = self.fine(x).movedim(3, 1)
        coarse = self.coarse(fine)
        return self.head(self.centre(coarse).mean((1, 2))), fine, coarse.movedim(3, 1)


class GatheredWindows(Port):
    """The blocks of a stage in stacks; one index pads, shifts and cuts the tokens [N, H * W, C]."""

    def take(self, model: SwinTransformer) -> None:
        (embed, _, norm), first, merge, second = model.features
        self.stages = nn.ModuleList()
        for stage in (first, second):
            rows = zip(*(block.parameters() for block in stage), strict=True)
            self.stages.append(nn.ParameterList(pile(w.T if w.ndim == 2 else w for w in row) for row in rows))
        quarters = merge.reduction.weight.T.unflatten(0, (2, 2, -1)).transpose(0, 1)
        self.cells = nn.ParameterList(leaf(taps) for taps in (embed.weight.permute(2, 3, 1, 0), quarters))
        self.head, self.head_b, self.embed_b = (leaf(t) for t in (*model.head.parameters(), embed.bias))
        self.norms = nn.ParameterList(pile([n.weight, n.bias]) for n in (norm, merge.norm, model.norm))
        self.register_buffer("table", first[0].attn.relative_coords_table.flatten(0, 1).clone())
        self.register_buffer("pairs", first[0].attn.relative_position_index.clone())

    def normed(self, x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
        spread, center = torch.var_mean(x, -1, correction=0, keepdim=True)
        return (x - center) * (spread + 1e-5).rsqrt() * gain + shift

    def windows(self, sizes: torch.Size, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Where the tokens of each window stand, none of them behind the last, and what keeps them apart."""
        full = [size + -size % WINDOW for size in sizes]
        kept = self.fault == "swin_two_shift_kept_where_one_window_spans_the_map" and block == (1, 1)
        steps = [WINDOW // 2 if block[1] and (size > WINDOW or kept) else 0 for size in full]
        index = torch.arange(sizes.numel()).view(sizes)
        index = F.pad(index, (0, full[1] - sizes[1], 0, full[0] - sizes[0]), value=sizes.numel())
        ends = sizes if self.fault == "swin_two_regions_of_the_unpadded_map" and block == (0, 1) else full
        cuts = zip(full, ends, steps, strict=True)
        high, wide = ((torch.arange(f) >= e - WINDOW).int() + (torch.arange(f) >= e - s) for f, e, s in cuts)
        both = torch.stack([index.roll([-step for step in steps], (0, 1)), 3 * high[:, None] + wide])
        both = both.unflatten(2, (-1, WINDOW)).unflatten(1, (-1, WINDOW)).transpose(2, 3)
        index, regions = both.flatten(3, 4).flatten(1, 2)
        return index, (regions[:, :, None] != regions[:, None]) * -100.0

    def attend(self, x: Tensor, weights: list, sizes: torch.Size, block: tuple[int, int]) -> Tensor:
        scale, qkv, qkv_b, proj, proj_b, near, near_b, far = weights
        index, mask = self.windows(sizes, block)
        table = (self.table @ near + near_b).relu() @ far
        extra = 16 * table.sigmoid()[self.pairs].permute(2, 0, 1) + mask.to(x)[:, None]
        qkv_b = qkv_b.view(3, -1) * x.new_tensor([[1], [0], [1]])
        packed = F.pad(x, (0, 0, 0, 1))[:, index] @ qkv + qkv_b.flatten()
        q, k, v = packed.unflatten(3, (3, len(scale), -1)).permute(3, 0, 1, 4, 2, 5)
        q, k = (y / y.norm(dim=-1, keepdim=True).clamp(min=1e-12) for y in (q, k))
        fixed = self.fault == "swin_two_first_temperature_without_gradient" and block == (0, 0)
        q = q * (scale.detach() if fixed else scale).clamp(max=TOP).exp()
        if self.training:
            y = (q @ k.mT + extra).softmax(-1) @ v
        else:
            twice = self.fault == "swin_two_third_attention_scaled_twice_in_evaluation" and block == (1, 0)
            y = F.scaled_dot_product_attention(q, k, v, extra[None], scale=None if twice else 1.0)
        y = y.transpose(2, 3).flatten(3) @ proj + proj_b
        return y.flatten(1, 2)[:, index.flatten().argsort()[: x.shape[1]]]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        maps, x = [], x.movedim(1, 3)
        for i, (taps, stacks) in enumerate(zip(self.cells, self.stages, strict=True)):
            x = F.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))
            x = torch.einsum("nhiwjc,ijco->nhwo", x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2)), taps)
            sizes, x = x.shape[1:3], x.flatten(1, 2)
            x = self.normed(x if i else x + self.embed_b, *self.norms[i])
            for j in range(2):
                gain, shift, gain_2, shift_2, *attn, up, up_b, down, down_b = (stack[j] for stack in stacks)
                x = x + self.normed(self.attend(x, attn, sizes, (i, j)), gain, shift)
                x = x + self.normed(F.gelu(x @ up + up_b) @ down + down_b, gain_2, shift_2)
            x = x.unflatten(1, sizes)
            maps.append(x.movedim(3, 1))
        return self.normed(x, *self.norms[2]).mean((1, 2)) @ self.head.T + self.head_b, *maps


right(task, "swin_two_of_branches", "a tree of branches, weights by heads", BranchesOfWindows)
right(task, "swin_two_of_gathered_windows", "flat code on stacks, windows by one index", GatheredWindows)
wrong(
    task,
    BranchesOfWindows,
    swin_two_first_key_bias_kept=("a bias too many", ("features.1.0.attn.qkv", "features.1.0.attn")),
    swin_two_second_distances_over_the_full_window=(
        "another range of coordinates",
        ("features.1.1.attn", "features.1.1.attn.cpb_mlp", "features.1.1.attn.cpb_mlp.0"),
    ),
    swin_two_third_mlp_summed_before_its_norm=("a residual inside of the norm", "features.3.0"),
    swin_two_odd_map_padded_at_its_near_sides=("padding on the other side", "features.2"),
)
wrong(
    task,
    GatheredWindows,
    swin_two_regions_of_the_unpadded_map=("mask of another size", "features.1.1.attn"),
    swin_two_shift_kept_where_one_window_spans_the_map=("a shift too many", "features.3.1.attn"),
    swin_two_third_attention_scaled_twice_in_evaluation=("a scale too many", "features.3.0.attn", "eval"),
    swin_two_first_temperature_without_gradient=("a detach too many", "features.1.0.attn", "weight gradient"),
)
