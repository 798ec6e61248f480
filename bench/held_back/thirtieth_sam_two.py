"""Two ports of a small SAM 2: a tree with the channels last, and one class of packed weights."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, spatial, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._thirtieth_sam_two import HIGH, MEMORY, SAM2, WIDE, WIDTH, mask_loss, moving_discs

task = few("thirtieth_sam_two", SAM2, moving_discs, mask_loss)


def scene(model: SAM2) -> tuple[Tensor, Tensor]:
    ends, blank = (model.position, model.memory_encoder.position_encoding), torch.zeros(1, 1, HIGH, WIDE)
    return tuple(at(blank.double())[0].flatten(1).T for at in ends)


def turn(x: Tensor, swapped: bool = False) -> Tensor:
    rate = 100 ** -(torch.arange(0, x.shape[-1], 4).double() / x.shape[-1])
    cell = torch.arange(x.shape[2])[:, None] % (HIGH * WIDE)
    angle = torch.cat([cell % WIDE * rate, cell // WIDE * rate][:: -1 if swapped else 1], 1).to(x)
    a, b, cos, sin = x[..., ::2], x[..., 1::2], angle.cos(), angle.sin()
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(3)


def same(layer: nn.Module) -> nn.Module:
    weight = layer.weight.flatten(1) if layer.weight.ndim > 1 else layer.weight
    new = nn.Linear(*weight.shape[::-1]) if weight.ndim > 1 else nn.LayerNorm(len(weight), layer.eps)
    new.weight, new.bias = leaf(weight), leaf(layer.bias)
    return new


class Look(nn.Module):
    def __init__(self, old: nn.Module):
        super().__init__()
        self.parts = nn.ModuleList(map(same, (old.q_proj, old.k_proj, old.v_proj, old.out_proj)))
        self.still = False

    def forward(self, *given: Tensor, free: int = 0) -> Tensor:
        q, k, v = (self.parts[i](x).unflatten(2, (2, -1)).movedim(2, 1) for i, x in enumerate(given))
        k = k.detach() if self.still else k
        grid, rest = k.split([k.shape[2] - free, free], 2)
        q, k = turn(q), torch.cat([turn(grid), rest], 2)
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        return self.parts[3]((weights @ v).transpose(1, 2).flatten(2))


class Recall(nn.Module):
    def __init__(self, old: nn.Module):
        super().__init__()
        self.own, self.past = Look(old.self_attn), Look(old.cross_attn_image)
        self.rest = nn.ModuleList(map(same, (old.norm1, old.norm2, old.norm3, old.linear1, old.linear2)))

    def forward(self, x: Tensor, memory: Tensor, place: Tensor, free: int) -> Tensor:
        x = x + self.own(*[self.rest[0](x)] * 3)
        x = x + self.past(self.rest[1](x), memory + place, memory, free=free)
        return x + self.rest[4](self.rest[3](self.rest[2](x)).clamp(min=0))


class Blend(nn.Module):
    def __init__(self, old: nn.Module):
        super().__init__()
        self.deep, self.bias, self.norm = leaf(old.dwconv.weight[:, 0]), leaf(old.dwconv.bias), same(old.norm)
        self.up, self.down, self.rate, self.all = same(old.pwconv1), same(old.pwconv2), leaf(old.gamma), False

    def forward(self, x: Tensor) -> Tensor:
        windows = F.pad(x, (0, 0, 3, 3, 3, 3)).unfold(1, 7, 1).unfold(2, 7, 1)
        y = self.up(self.norm(torch.einsum("nhwcij,cij->nhwc", windows, self.deep) + self.bias))
        y = self.down(F.gelu(y))
        return (x + y) * self.rate if self.all else x + self.rate * y


class TreeOfMemory(Port):
    def take(self, model: SAM2) -> None:
        attention, encoder, decoder = model.memory_attention, model.memory_encoder, model.sam_mask_decoder
        self.recall, self.last = nn.ModuleList(map(Recall, attention.layers)), same(attention.norm)
        down, up, fault = encoder.mask_downsampler, decoder.output_upscaling[0], self.fault
        self.small = nn.ParameterList([leaf(x) for f in (down[0], down[3], up) for x in (f.weight, f.bias)])
        self.calm, self.feature = nn.ModuleList(map(same, (down[1], down[4]))), same(encoder.pix_feat_proj)
        self.wide, self.store = same(down[6]), same(encoder.out_proj)
        self.blend, self.scene = nn.Sequential(*map(Blend, encoder.fuser)), scene(model)
        self.token, self.first = leaf(decoder.mask_tokens.weight), leaf(model.no_mem_embed)
        self.norm, self.times = same(decoder.norm), leaf(model.maskmem_tpos_enc)
        self.hyper, self.pointer = same(decoder.output_hypernetwork), same(model.obj_ptr_proj)
        self.calm[1].eps = 1e-2 if fault == "sam_two_second_mask_norm_with_a_larger_epsilon" else 1e-6
        self.blend[1].all = fault == "sam_two_second_fuser_block_scales_its_residual_too"
        self.recall[1].past.still = fault == "sam_two_second_cross_attention_keys_without_gradient"
        self.rough = "tanh" if fault == "sam_two_upscaling_gelu_by_tanh" else "none"

    def forward(self, features: Tensor) -> Tensor:
        (place, near), kept, tokens, found = (x.to(features) for x in self.scene), [], [], []
        for x in features.flatten(3).permute(1, 0, 3, 2):
            y = x + self.first
            if kept:
                past, told = [kept[0], *kept[1:][-1:]], torch.cat(tokens, 1).view(len(x), -1, MEMORY)
                y, times = x + place / 10, self.times.flip(0)[: len(past)]
                places = F.pad((near + times).flatten(0, 1), (0, 0, 0, told.shape[1]))
                for layer in self.recall:
                    y = layer(y, torch.cat([*past, told], 1), places, told.shape[1])
                y = self.last(y)
            token = self.norm(self.token + y.mean(1, keepdim=True))
            y = torch.einsum("nhwc,coij->nhiwjo", y.unflatten(1, (HIGH, WIDE)), self.small[4]) + self.small[5]
            y = F.gelu(y.flatten(3, 4).flatten(1, 2), approximate=self.rough)
            mask = (y @ self.hyper(token)[..., None]).squeeze(-1)
            found.append(mask), tokens.append(self.pointer(token))
            y = 10 * (mask / 2).tanh()[..., None]
            for i, norm in enumerate(self.calm):
                y = F.gelu(norm(spatial(y, self.small[2 * i], self.small[2 * i + 1], 2)))
            y = self.feature(x).unflatten(1, (HIGH, WIDE)) + self.wide(y)
            kept.append(self.store(self.blend(y)).flatten(1, 2))
        return torch.stack(found, 1)


class FlatMemory(Port):
    def take(self, model: SAM2) -> None:
        sizes = [p.numel() for p in model.parameters()]
        places = torch.arange(sum(sizes)).split(sizes)
        self.places = {n: i.view(p.shape) for (n, p), i in zip(model.named_parameters(), places, strict=True)}
        self.scene, self.all = scene(model), leaf(torch.cat([p.flatten() for p in model.parameters()]))

    def __getitem__(self, name: str) -> Tensor:
        return self.all[self.places[name]]

    def norm(self, x: Tensor, at: str, eps: float = 1e-6) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self[at + ".weight"], self[at + ".bias"], eps)

    def line(self, x: Tensor, at: str) -> Tensor:
        return x @ self[at + ".weight"].flatten(1).T + self[at + ".bias"]

    def conv(self, x: Tensor, at: str, call=F.conv2d, **how: int) -> Tensor:
        return call(x.movedim(3, 1), self[at + ".weight"], self[at + ".bias"], **how).movedim(1, 3)

    def look(self, at: str, *given: Tensor, free: int = 0) -> Tensor:
        lines = (self.line(x, f"{at}.{'qkv'[i]}_proj") for i, x in enumerate(given))
        q, k, v = (x.unflatten(2, (2, -1)).transpose(1, 2) for x in lines)
        swap = self.fault == "sam_two_first_rotation_swaps_its_axes" and at.endswith("0.self_attn")
        whole = self.fault == "sam_two_pointers_rotated_in_the_second_layer" and "layers.1" in at
        count = k.shape[2] - (0 if whole else free)
        q, k = turn(q, swap), torch.cat([turn(k[:, :, :count], swap), k[:, :, count:]], 2)
        return self.line(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2), at + ".out_proj")

    def recall(self, x: Tensor, past: list, tokens: list) -> Tensor:
        told, times = torch.cat(tokens, 1).view(len(x), -1, MEMORY), self["maskmem_tpos_enc"]
        grid = [m + self.scene[1].to(x) + times[1 - i] for i, m in enumerate(past)]
        keys, values = (torch.cat([*part, told], 1) for part in (grid, past))
        for at in ("memory_attention.layers.0.", "memory_attention.layers.1."):
            x = x + self.look(at + "self_attn", *[self.norm(x, at + "norm1", 1e-5)] * 3)
            y = self.norm(x, at + "norm2", 1e-5)
            x = x + self.look(at + "cross_attn_image", y, keys, values, free=told.shape[1])
            y = self.line(self.norm(x, at + "norm3", 1e-5), at + "linear1")
            x = x + self.line(y.relu(), at + "linear2")
        return self.norm(x, "memory_attention.norm", 1e-5)

    def store(self, x: Tensor, mask: Tensor) -> Tensor:
        at, y = "memory_encoder.", mask.sigmoid()[..., None]
        hard = self.fault == "sam_two_memory_mask_made_binary_in_evaluation" and not self.training
        y, down = 20 * ((y > 0.5).to(y) if hard else y) - 10, at + "mask_downsampler."
        for i in (0, 3):
            y = F.gelu(self.norm(self.conv(y, f"{down}{i}", stride=2, padding=1), f"{down}{i + 1}"))
        y = self.line(y, down + "6") + self.line(x, at + "pix_feat_proj").unflatten(1, (HIGH, WIDE))
        for at in ("memory_encoder.fuser.0.", "memory_encoder.fuser.1."):
            z = self.norm(self.conv(y, at + "dwconv", padding=3, groups=WIDTH), at + "norm")
            y = y + self[at + "gamma"] * self.line(F.gelu(self.line(z, at + "pwconv1")), at + "pwconv2")
        return self.line(y, "memory_encoder.out_proj").flatten(1, 2)

    def forward(self, features: Tensor) -> Tensor:
        at, past, tokens, found = "sam_mask_decoder.", [], [], []
        up, share = at + "output_upscaling.0", 0.1 * (self.fault != "sam_two_current_positions_not_added")
        for t, x in enumerate(features.flatten(3).mT.unbind(1)):
            y = self.recall(x + share * self.scene[0].to(x), past, tokens) if t else x + self["no_mem_embed"]
            hs = self.norm(self[at + "mask_tokens.weight"] + y.mean(1, keepdim=True), at + "norm", 1e-5)
            y = self.conv(y.unflatten(1, (HIGH, WIDE)), up, F.conv_transpose2d, stride=4)
            found.append((F.gelu(y) * self.line(hs, at + "output_hypernetwork")[:, None]).sum(-1))
            tokens.append(self.line(hs, "obj_ptr_proj")), past.append(self.store(x, found[-1]))
        return torch.stack(found, 1)


LAYERS, SLOPES = "memory_attention.layers.", ("input gradient", "weight gradient")
right(task, "sam_two_of_a_tree_with_channels_last", "a tree, channels last, other formulas", TreeOfMemory)
right(task, "sam_two_of_one_vector", "one vector of weights, flat code", FlatMemory)
wrong(
    task,
    TreeOfMemory,
    sam_two_second_mask_norm_with_a_larger_epsilon=("epsilon", "memory_encoder.mask_downsampler.4"),
    sam_two_second_fuser_block_scales_its_residual_too=("a scale too wide", "memory_encoder.fuser.1"),
    sam_two_second_cross_attention_keys_without_gradient=("detach", LAYERS + "1.cross_attn_image", SLOPES),
    sam_two_upscaling_gelu_by_tanh=("gelu by tanh", "sam_mask_decoder.output_upscaling.1"),
)
wrong(
    task,
    FlatMemory,
    sam_two_pointers_rotated_in_the_second_layer=("rotation", LAYERS + "1.cross_attn_image"),
    sam_two_first_rotation_swaps_its_axes=("axes swapped", LAYERS + "0.self_attn"),
    sam_two_current_positions_not_added=("a term left out", "memory_attention"),
    sam_two_memory_mask_made_binary_in_evaluation=("a threshold in eval", "", "eval"),
)
