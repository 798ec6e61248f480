"""Two ports of a small LeViT: a tree over grids with the channels last, and one class of stacked sheets."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import picked, right
from bench.held_back._fourth_ports import Port, Rows, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._thirty_fourth_levit import LevitDistilled, both_heads, gratings

task = few("thirty_fourth_levit", LevitDistilled, gratings, both_heads)


def bent(x: Tensor) -> Tensor:
    return x * F.relu6(x + 3) / 6


class Lane(nn.Module):
    """A product, of some of a layer's outputs, or a strided convolution of [N, H, W, C], then a norm."""

    def __init__(self, layer: nn.Module, only: Tensor | None = None):
        super().__init__()
        only = torch.arange(len(layer.linear.weight)) if only is None else only.flatten()
        self.kernel, self.rows = leaf(layer.linear.weight[only]), Rows(picked(layer.bn, only))
        self.edges = (1, 1, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.kernel.ndim == 2:
            return self.rows(x @ self.kernel.T)
        x = F.pad(x.movedim(3, 1), self.edges)
        return self.rows(F.conv2d(x, self.kernel, stride=2).movedim(1, 3))


class Look(nn.Module):
    def __init__(self, layer: nn.Module, shape: tuple[int, int], step: int):
        super().__init__()
        self.heads, self.step, self.clamped, self.fixed = layer.num_heads, step, False, False
        joint, size = layer.qkv if step == 1 else layer.kv, layer.key_dim
        order = torch.arange(len(joint.linear.weight)).view(self.heads, -1)
        self.ask = Lane(joint, order[:, :size]) if step == 1 else Lane(layer.q.ln)
        order = order[:, size:] if step == 1 else order
        self.match, self.value = Lane(joint, order[:, :size]), Lane(joint, order[:, size:])
        self.out, self.table = Lane(layer.proj.ln), leaf(layer.attention_biases.unflatten(1, shape))

    def apart(self, length: int, device: torch.device) -> Tensor:
        places = torch.arange(length, device=device)
        offset = places[:: self.step, None] - places
        return offset.relu() if self.clamped else offset.abs()

    def forward(self, x: Tensor) -> Tensor:
        down, across = (self.apart(length, x.device) for length in x.shape[1:3])
        table = self.table.detach() if self.fixed else self.table
        bias = table[:, down[:, None, :, None], across[None, :, None]]
        x = self.ask(x[:, :: self.step, :: self.step]), self.match(x), self.value(x)
        q, k, v = (y.unflatten(3, (self.heads, -1)) for y in x)
        score = torch.einsum("nhwac,nijac->nahwij", q / q.shape[4] ** 0.5, k) + bias
        share = score.flatten(4).softmax(4).view_as(score)
        return self.out(bent(torch.einsum("nahwij,nijac->nhwac", share, v).flatten(3)))


class Unit(nn.Module):
    def __init__(self, look: Look, mlp: nn.Module):
        super().__init__()
        self.look, self.wide, self.narrow = look, Lane(mlp.ln1), Lane(mlp.ln2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.look(x) + (x if self.look.step == 1 else 0)
        return x + self.narrow(bent(self.wide(x)))


class LevitOfGrids(Port):
    """One row of units over [N, H, W, C]; queries, keys and values are products of their own."""

    def take(self, model: LevitDistilled) -> None:
        stem, units, shape = model.stem, [], model.stages[0].resolution
        self.stem = nn.Sequential(*(Lane(x) for x in (stem.conv1, stem.conv2, stem.conv3)))
        for i, stage in enumerate(model.stages):
            shrink = stage.downsample
            if i:
                units.append(Unit(Look(shrink.attn_downsample, shape, 2), shrink.mlp))
            shape = stage.resolution
            units.extend(Unit(Look(x.attn, shape, 1), x.mlp) for x in stage.blocks)
        self.units = nn.Sequential(*units)
        heads = model.head, model.head_dist
        self.answers = nn.ModuleList(nn.Sequential(Rows(x.bn), x.linear) for x in heads)
        far = self.fault == "levit_second_stem_convolution_pads_the_far_edges_only"
        self.stem[1].edges = (0, 1, 0, 1) if far else (1, 1, 1, 1)
        units[1].look.clamped = self.fault == "levit_second_block_clamps_its_offsets"
        units[2].look.fixed = self.fault == "levit_first_shrinking_biases_not_trained"
        larger = self.fault == "levit_last_shrinking_query_norm_with_larger_epsilon"
        units[5].look.ask.rows.eps = 1e-3 if larger else 1e-5

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        count, x = x.shape[:2], x.flatten(0, 1).movedim(1, 3)
        x = self.units(self.stem[2](bent(self.stem[1](bent(self.stem[0](x)))))).mean((1, 2))
        first, second = (answer(x).unflatten(0, count) for answer in self.answers)
        return (first, second) if self.training else torch.lerp(first, second, 0.5)


class StackedLevit(Port):
    """Sheets by the kind of layer: in a row an output's weights, its gain and its shift."""

    def take(self, model: LevitDistilled) -> None:
        self.w, self.b, self.plan, stem = nn.ParameterDict(), nn.ParameterDict(), [], model.stem
        for i, layer in enumerate((stem.conv1, stem.conv2, stem.conv3)):
            self.put(f"stem{i}", [layer])
        for i, stage in enumerate(model.stages):
            if i:
                attn = stage.downsample.attn_downsample
                self.put(f"q{i}", [attn.q.ln])
                self.attend(f"down{i}", [attn], [attn.kv], [stage.downsample.mlp])
            attns, mlps = [x.attn for x in stage.blocks], [x.mlp for x in stage.blocks]
            self.attend(f"keep{i}", attns, [x.qkv for x in attns], mlps)
        heads = model.head, model.head_dist
        self.last = pile(torch.cat([x.linear.weight, x.linear.bias[:, None]], 1) for x in heads)
        self.scale = pile(torch.cat([getattr(x.bn, key) for x in heads]) for key in ("weight", "bias"))
        stats = [torch.cat([getattr(x.bn, key) for x in heads]) for key in ("running_mean", "running_var")]
        self.register_buffer("kept_last", torch.stack(stats))

    def put(self, key: str, layers: list[nn.Module]) -> None:
        columns = [(x.linear.weight.flatten(1), x.bn.weight[:, None], x.bn.bias[:, None]) for x in layers]
        self.w[key] = pile(torch.cat(x, 1) for x in columns)
        stats = [torch.stack([x.bn.running_mean, x.bn.running_var]) for x in layers]
        self.register_buffer("kept_" + key, torch.stack(stats))

    def attend(self, key: str, attns: list, joint: list, mlps: list) -> None:
        outs, ups, backs = [x.proj.ln for x in attns], [x.ln1 for x in mlps], [x.ln2 for x in mlps]
        for name, layers in (("in", joint), ("out", outs), ("up", ups), ("back", backs)):
            self.put(key + name, layers)
        self.b[key] = pile(x.attention_biases for x in attns)
        self.register_buffer("at_" + key, attns[0].attention_bias_idxs.clone())
        self.plan.extend((key, i, attns[0].key_dim) for i in range(len(attns)))

    def norm(self, x: Tensor, kept: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
        return F.batch_norm(x.flatten(0, -2), *kept, gain, shift, self.training).view_as(x)

    def dense(self, key: str, i: int, x: Tensor) -> Tensor:
        sheet, kept = self.w[key][i], self.get_buffer("kept_" + key)[i]
        return self.norm(x @ sheet[:, :-2].T, kept, *sheet[:, -2:].T.contiguous())  # strided: wrong gradients

    def mix(self, key: str, i: int, size: int, x: Tensor, shape: tuple[int, int]) -> Tensor:
        heads = self.b[key].shape[1]
        y = self.dense(key + "in", i, x).unflatten(2, (heads, -1)).transpose(1, 2)
        q, y = y[..., :size], y[..., size:] if key.startswith("keep") else y
        if key.startswith("down"):
            q = self.dense("q" + key[4:], 0, x.unflatten(1, shape)[:, ::2, ::2].flatten(1, 2))
            q = q.unflatten(2, (heads, -1)).transpose(1, 2)
        k, v, bias = y[..., :size], y[..., size:], self.b[key][i][:, self.get_buffer("at_" + key)]
        y = F.softmax(q @ k.mT / size**0.5 + bias, 3) @ v
        if self.fault != "levit_last_attention_lays_its_heads_out_unmoved" or key != "keep2":
            y = y.transpose(1, 2)
        y = y.reshape(len(x), -1, self.w[key + "out"].shape[2] - 2)
        return self.dense(key + "out", i, F.hardswish(y))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        count, x = x.shape[:2], x.flatten(0, 1)
        for i in range(3):
            shape = x.shape[2] // 2, x.shape[3] // 2
            x = self.dense(f"stem{i}", 0, F.unfold(x, 3, padding=1, stride=2).transpose(1, 2))
            held = self.fault == "levit_first_stem_activation_holds_its_gate" and i == 0
            gate = F.relu6(x + 3) / 6
            if i < 2:
                x = (x * (gate.detach() if held else gate)).transpose(1, 2).unflatten(2, shape)
        for key, i, size in self.plan:
            down, y = key.startswith("down"), self.mix(key, i, size, x, shape)
            x = y if down else x + y
            shape = tuple((length + 1) // 2 for length in shape) if down else shape
            swish = self.fault == "levit_fourth_block_mlp_takes_swish" and (key, i) == ("keep1", 1)
            y = self.dense(key + "up", i, x)
            x = x + self.dense(key + "back", i, F.silu(y) if swish else F.hardswish(y))
        x = self.norm(x.mean(1).repeat(1, 2), self.kept_last, *self.scale).unflatten(1, (2, -1))
        x = torch.einsum("nhc,hoc->hno", x, self.last[..., :-1]) + self.last[:, None, :, -1]
        x, alone = x.unflatten(1, count), self.fault == "levit_evaluation_answers_with_the_first_head"
        return tuple(x) if self.training else x[0] if alone else x.mean(0)


second, last = (f"stages.{i}.downsample.attn_downsample" for i in (1, 2))
right(task, "levit_of_grids_with_channels_last", "a tree, split products, biases by grid", LevitOfGrids)
right(task, "levit_of_stacked_sheets", "packed stacks, patches, one norm for both heads", StackedLevit)
wrong(
    task,
    LevitOfGrids,
    levit_second_stem_convolution_pads_the_far_edges_only=("other padding", "stem.conv2.linear"),
    levit_second_block_clamps_its_offsets=("negative offsets as none", "stages.0.blocks.1.attn"),
    levit_first_shrinking_biases_not_trained=("detach", second, "weight gradient"),
    levit_last_shrinking_query_norm_with_larger_epsilon=("another epsilon", f"{last}.q.ln.bn"),
)
wrong(
    task,
    StackedLevit,
    levit_first_stem_activation_holds_its_gate=(
        "detached gate",
        "stem.act1",
        ("input gradient", "weight gradient"),
    ),
    levit_fourth_block_mlp_takes_swish=("another activation", "stages.1.blocks.1.mlp.act"),
    levit_last_attention_lays_its_heads_out_unmoved=("heads and tokens mixed", "stages.2.blocks.0.attn"),
    levit_evaluation_answers_with_the_first_head=("a mean left out in eval", "", "eval"),
)
