"""Two ports of Depth Anything: rungs of a ladder in modules, and stacks of weights with channels last."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, spatial, wrong
from bench.held_back._nineteenth_depth_anything import HEADS, PATCH, SIDE, DepthAnything, aligned_loss, views
from bench.held_back._sixth_ports import few

task = few("nineteenth_depth_anything", DepthAnything, views, aligned_loss)
LAYER, STAGE, FUSION = "backbone.encoder.layer", "neck.reassemble_stage", "neck.fusion_stage.layers"


def dense(*layers: nn.Module) -> nn.Linear:
    made = nn.Linear(1, 1)
    made.weight = leaf(torch.cat([layer.weight.flatten(1) for layer in layers]))
    made.bias = leaf(torch.cat([layer.bias for layer in layers]))
    return made


class Block(nn.Module):
    def __init__(self, layer: nn.Module, twice: bool):
        super().__init__()
        inner, self.twice = layer.attention.attention, twice
        self.norms, self.packed = nn.ModuleList([layer.norm1, layer.norm2]), dense(*inner.children())
        self.merge, self.open = dense(layer.attention.output.dense), dense(layer.mlp.weights_in)
        self.close, scales = dense(layer.mlp.weights_out), (layer.layer_scale1, layer.layer_scale2)
        self.gammas = pile(scale.lambda1 for scale in scales)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.packed(self.norms[0](x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q * q.shape[-1] ** -0.5, k, v, scale=None if self.twice else 1.0)
        x = torch.addcmul(x, self.gammas[0], self.merge(y.transpose(1, 2).flatten(2)))
        gate, value = self.open(self.norms[1](x)).tensor_split(2, -1)
        return torch.addcmul(x, self.gammas[1], self.close(gate * gate.sigmoid() * value))


class Unit(nn.Module):
    def __init__(self, unit: nn.Module):
        super().__init__()
        self.kernels = pile([unit.convolution1.weight, unit.convolution2.weight])
        self.biases, self.around = pile([unit.convolution1.bias, unit.convolution2.bias]), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.conv2d(x.relu(), self.kernels[0], self.biases[0], padding=1)
        return self.around(x) + F.conv2d(y.relu(), self.kernels[1], self.biases[1], padding=1)


class Rung(nn.Module):
    def __init__(self, i: int, neck: nn.Module):
        super().__init__()
        stage, fusion = neck.reassemble_stage, neck.fusion_stage.layers[3 - i]
        self.read, part = dense(stage.readout_projects[i][0]), stage.layers[i]
        self.narrow, self.resize, self.conv = dense(part.projection), part.resize, leaf(neck.convs[i].weight)
        self.side = Unit(fusion.residual_layer1) if i < 3 else None
        self.unit, self.project = Unit(fusion.residual_layer2), fusion.projection

    def map(self, state: Tensor, grid: list[int]) -> Tensor:
        patches = state[:, -grid[0] * grid[1] :]
        known = torch.cat([patches, state[:, 0, None].repeat(1, patches.shape[1], 1)], 2)
        x = self.narrow(F.gelu(self.read(known))).mT.unflatten(2, grid)
        return F.conv2d(self.resize(x), self.conv, padding=1)

    def forward(self, own: Tensor, below: Tensor | None, size: list[int]) -> Tensor:
        x = own if below is None else below + self.side(own)
        return self.project(F.interpolate(self.unit(x), size, mode="bilinear", align_corners=True))


class DepthLadder(Port):
    def take(self, model: DepthAnything) -> None:
        trunk, source, head = model.backbone, model.backbone.embeddings, model.head
        first, rest = source.position_embeddings.split([1, SIDE * SIDE], 1)
        self.first, self.canvas = leaf(first), leaf(rest.mT.unflatten(2, (SIDE, SIDE)))
        self.lift, self.class_token = dense(source.patch_embeddings.projection), leaf(source.cls_token)
        self.registers, self.norm = leaf(source.register_tokens), trunk.layernorm
        twice = self.fault == "depth_anything_query_of_the_last_block_scaled_twice"
        self.blocks = nn.ModuleList(Block(x, twice and i == 3) for i, x in enumerate(trunk.encoder.layer))
        self.rungs = nn.ModuleList(Rung(i, model.neck) for i in (3, 2, 1, 0))
        self.smooth, self.tail = head.conv1, nn.Sequential(head.conv2, nn.ReLU(), head.conv3)
        if self.fault == "depth_anything_third_side_unit_adds_to_activated_input":
            self.rungs[2].side.around = nn.ReLU()

    def forward(self, image: Tensor) -> dict[str, Tensor | tuple[Tensor, ...]]:
        grid, states, fused = [length // PATCH for length in image.shape[2:]], [], []
        canvas = F.interpolate(self.canvas, grid, mode="bicubic", antialias=True)
        patches = self.lift(F.unfold(image, PATCH, stride=PATCH).mT) + canvas.flatten(2).mT
        prefix = torch.cat([self.class_token + self.first, self.registers], 1)
        x = torch.cat([prefix.expand(len(image), -1, -1), patches], 1)
        for block in self.blocks:
            x = block(x)
            raw = self.fault == "depth_anything_first_taken_state_not_normalised" and not states
            states.append(x if raw else self.norm(x))
        maps = [rung.map(x, grid) for rung, x in zip(self.rungs, reversed(states), strict=True)]
        sizes = [x.shape[2:] for x in maps[1:]] + [[8 * length for length in grid]]
        for rung, own, size in zip(self.rungs, maps, sizes, strict=True):
            fused.append(rung(own, fused[-1] if fused else None, size))
        x = F.interpolate(self.smooth(fused[-1]), image.shape[2:], mode="bilinear", align_corners=True)
        capped = self.fault == "depth_anything_depth_capped_in_evaluation" and not self.training
        depth = 4.0 * self.tail(x)[:, 0].clamp(0, 1 if capped else None)
        return {"predicted_depth": depth, "fused_maps": tuple(fused)}


def stretch(x: Tensor, size: list[int], mode: str = "bilinear", **how: object) -> Tensor:
    """Resample [N, H, W, C] by a matrix for each axis."""
    pairs = [*zip(x.shape[1:3], size, strict=True)]
    axes = (F.interpolate(torch.eye(a).to(x)[None, None], (a, b), mode=mode, **how)[0, 0] for a, b in pairs)
    return torch.einsum("nhwc,hp,wq->npqc", x, *axes)


class DepthStacks(Port):
    """Lists of weights by kind; maps are [N, H, W, C], heads are packed, projections come early."""

    def take(self, model: DepthAnything) -> None:
        (source, encoder, last), head = model.backbone.children(), model.head
        (stage, fusion, convs), layers = model.neck.children(), encoder.layer
        lists = {
            "norm": [*(norm for x in layers for norm in (x.norm1, x.norm2)), last],
            "qkv": [y for x in layers for y in x.attention.attention.children()],
            "flat": [y for x in layers for y in (x.attention[1][0], x.mlp.weights_in, x.mlp.weights_out)],
            "read": [*(x[0] for x in stage.readout_projects), *(x.projection for x in stage.layers)],
            "resize": [stage.layers[i].resize for i in (0, 1, 3)],
            "fuse": [conv for conv in fusion.modules() if isinstance(conv, nn.Conv2d)],
            "head": [head.conv1, head.conv2, head.conv3, source.patch_embeddings.projection],
        }
        self.w = nn.ModuleDict({k: nn.ParameterList(leaf(x.weight) for x in v) for k, v in lists.items()})
        self.b = nn.ModuleDict({k: nn.ParameterList(leaf(x.bias) for x in v) for k, v in lists.items()})
        self.scales = pile(scale.lambda1 for x in layers for scale in (x.layer_scale1, x.layer_scale2))
        self.prefix = leaf(torch.cat([source.cls_token, source.register_tokens], 1)[0])
        self.convs = nn.ParameterList(leaf(x.weight) for x in convs)
        self.places = leaf(source.position_embeddings)

    def flat(self, kind: str, i: int, x: Tensor) -> Tensor:
        return x @ self.w[kind][i].flatten(1).T + self.b[kind][i]

    def norm(self, i: int, x: Tensor) -> Tensor:
        spread, center = torch.var_mean(x, -1, correction=0, keepdim=True)
        return (x - center) * (spread + 1e-6).rsqrt() * self.w["norm"][i] + self.b["norm"][i]

    def block(self, i: int, x: Tensor) -> Tensor:
        w, b = (torch.stack([*p["qkv"]][3 * i :][:3]).unflatten(1, (HEADS, -1)) for p in (self.w, self.b))
        q, k, v = torch.einsum("ntc,shdc->snhtd", self.norm(2 * i, x), w) + b[:, None, :, None]
        shares = (torch.einsum("nhqd,nhkd->nhqk", q, k) / q.shape[-1] ** 0.5).softmax(-1)
        frozen = self.fault == "depth_anything_second_block_scaled_by_plain_data" and i == 1
        scale = self.scales[2 * i].data if frozen else self.scales[2 * i]
        x = x + scale * self.flat("flat", 3 * i, torch.einsum("nhqk,nhkd->nqhd", shares, v).flatten(2))
        gate, value = self.flat("flat", 3 * i + 1, self.norm(2 * i + 1, x)).chunk(2, -1)
        return x + self.scales[2 * i + 1] * self.flat("flat", 3 * i + 2, F.silu(gate) * value)

    def map(self, i: int, state: Tensor, grid: list[int]) -> Tensor:
        start = 1 if self.fault == "depth_anything_registers_reassembled_as_patches" else len(self.prefix)
        patches, (own, token) = state[:, start:][:, : grid[0] * grid[1]], self.w["read"][i].chunk(2, 1)
        read = patches @ own.T + (state[:, :1] @ token.T + self.b["read"][i])
        x = self.flat("read", 4 + i, F.gelu(read)).unflatten(1, grid)
        if i < 2:
            x = torch.einsum("nhwc,coij->nhiwjo", x, self.w["resize"][i]).flatten(3, 4).flatten(1, 2)
            x = x + self.b["resize"][i]
        elif i == 3:
            x = spatial(x, self.w["resize"][2], self.b["resize"][2], 2)
        return spatial(x, self.convs[i])

    def unit(self, i: int, x: Tensor) -> Tensor:
        w, b = self.w["fuse"][i : i + 2], self.b["fuse"][i : i + 2]
        return x + spatial(spatial(x.relu(), w[0], b[0]).relu(), w[1], b[1])

    def forward(self, image: Tensor) -> dict[str, Tensor | tuple[Tensor, ...]]:
        windows, size = image.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH), image.shape[2:]
        patches = torch.einsum("nchwij,ocij->nhwo", windows, self.w["head"][3]) + self.b["head"][3]
        grid, first, rest = patches.shape[1:3], self.places[0, :1], self.places[:, 1:]
        if self.fault != "depth_anything_positions_kept_where_their_count_agrees" or grid.numel() != SIDE**2:
            rest = stretch(rest.unflatten(1, (SIDE, SIDE)), grid, "bicubic", antialias=True)
        prefix = torch.cat([self.prefix[:1] + first, self.prefix[1:]]).expand(len(image), -1, -1)
        x, fused = torch.cat([prefix, (patches + rest.view_as(patches[:1])).flatten(1, 2)], 1), []
        maps = [self.map(i, self.norm(8, x := self.block(i, x)), grid) for i in range(4)]
        sizes = [x.shape[1:3] for x in maps[2::-1]] + [[8 * length for length in grid]]
        for i, x in enumerate(reversed(maps)):
            x = fused[-1] + self.unit(5 * i + 1, x) if fused else x
            x = self.flat("fuse", 5 * i, self.unit(5 * i + 3, x))
            loose = self.fault == "depth_anything_second_fusion_without_aligned_corners" and i == 1
            fused.append(stretch(x, sizes[i], align_corners=not loose))
        x = spatial(fused[-1], self.w["head"][0], self.b["head"][0])
        x = spatial(stretch(x, size, align_corners=True), self.w["head"][1], self.b["head"][1]).relu()
        depth = 4.0 * self.flat("head", 2, x).relu().squeeze(3)
        return {"predicted_depth": depth, "fused_maps": tuple(x.movedim(3, 1) for x in fused)}


right(task, "depth_anything_as_a_ladder_of_rungs", "stages as rungs", DepthLadder)
right(task, "depth_anything_of_weight_lists_with_channels_last", "matrices, channels last", DepthStacks)
wrong(
    task,
    DepthLadder,
    depth_anything_third_side_unit_adds_to_activated_input=("skip after relu", f"{FUSION}.2.residual_layer1"),
    depth_anything_query_of_the_last_block_scaled_twice=("scaled twice", f"{LAYER}.3.attention.attention"),
    depth_anything_first_taken_state_not_normalised=("norm missing", ("backbone.layernorm", "backbone")),
    depth_anything_depth_capped_in_evaluation=("clamp in eval", ("head", "head.activation2"), "eval"),
)
wrong(
    task,
    DepthStacks,
    depth_anything_positions_kept_where_their_count_agrees=("shortcut by count", "backbone.embeddings"),
    depth_anything_second_block_scaled_by_plain_data=("detach", f"{LAYER}.1.layer_scale1", "weight gradient"),
    depth_anything_registers_reassembled_as_patches=("slice starts too early", STAGE),
    depth_anything_second_fusion_without_aligned_corners=("half-pixel grid", f"{FUSION}.1"),
)
