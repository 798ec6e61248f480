"""Ports of a conditional U-Net: lists of steps with one signature, and channels last with piled weights."""

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, spatial, wrong
from bench.held_back._ninth_unet import GROUPS, HEADS, SINES, UNet2DConditionModel, missed, noisy
from bench.held_back._sixth_ports import few

latent = few("ninth_unet", UNet2DConditionModel, noisy, missed)


class Residual(Port):
    def take(self, block: nn.Module) -> None:
        norms, convs = deepcopy(([block.norm1, block.norm2], [block.conv1, block.conv2]))
        self.enter, self.leave = (nn.Sequential(n, nn.SiLU(), c) for n, c in zip(norms, convs, strict=True))
        self.when, self.bypass = deepcopy(block.time_emb_proj), deepcopy(block.conv_shortcut)

    def forward(self, x: Tensor, code: Tensor, text: Tensor) -> Tensor:
        if self.fault != "time_enters_the_first_rise_as_it_is":
            code = F.silu(code)
        y = self.leave(self.enter(x) + self.when(code)[..., None, None])
        return y + (self.bypass(x) if self.bypass else x)


class Look(Port):
    def take(self, attention: nn.Module) -> None:
        self.kv = leaf(torch.cat([attention.to_k.weight, attention.to_v.weight]).T)
        self.q, self.back = deepcopy((attention.to_q, attention.to_out[0]))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        apart = self.q(x), *(at @ self.kv).chunk(2, 2)
        q, k, v = (h.unflatten(2, (HEADS, -1)).transpose(1, 2) for h in apart)
        if self.fault == "middle_scores_scaled_by_the_whole_width":
            q = q * HEADS**-0.5
        return self.back(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Reader(Port):
    """Pixels as tokens [N, T, C]: they look at each other, at the text, and pass a gated layer."""

    def take(self, block: nn.Module) -> None:
        (inner,) = block.transformer_blocks
        self.norms = deepcopy(nn.ModuleList([block.norm, inner.norm1, inner.norm2, inner.norm3]))
        self.enter, self.leave = deepcopy(block.proj_in), deepcopy(block.proj_out)
        self.pixels, self.words = Look(inner.attn1, self.fault), Look(inner.attn2)
        self.up, self.down = deepcopy(inner.ff.net[0].proj), deepcopy(inner.ff.net[2])

    def forward(self, x: Tensor, code: Tensor, text: Tensor) -> Tensor:
        h = self.enter(self.norms[0](x)).flatten(2).mT
        seen = self.norms[1](h)
        h = h + self.pixels(seen, seen)
        h = h + self.words(self.norms[2](h), text)
        value, gate = self.up(self.norms[3](h)).chunk(2, 2)
        if self.fault == "gate_and_value_change_places_near_the_end":
            value, gate = gate, value
        return x + self.leave((h + self.down(F.gelu(gate) * value)).mT.reshape(x.shape))


class Resize(Port):
    def take(self, sampler: nn.Module) -> None:
        self.conv = deepcopy(sampler.conv)

    def forward(self, x: Tensor, code: Tensor, text: Tensor) -> Tensor:
        if self.conv.stride == (1, 1):
            x = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
        if self.fault == "halving_pads_on_one_side_only":
            return F.conv2d(F.pad(x, (0, 1, 0, 1)), self.conv.weight, self.conv.bias, 2)
        return self.conv(x)


class FlatSteps(Port):
    """One list of steps: three down, each of which leaves what a later one reads, one turn, four up."""

    def take(self, model: UNet2DConditionModel) -> None:
        (high, low), mid, (up, end) = model.down_blocks, model.mid_block, model.up_blocks
        middle, near = (self.fault if self.fault.startswith(start) else "" for start in ("middle", "gate"))
        self.clock = nn.Sequential(*deepcopy(list(model.time_embedding)))
        self.first, self.last, self.norm = deepcopy((model.conv_in, model.conv_out, model.conv_norm_out))
        steps = [[Residual(high.resnets[0]), Reader(high.attentions[0])]]
        steps += [[Resize(high.downsamplers[0], self.fault)], [Residual(low.resnets[0])]]
        steps += [[Residual(mid.resnets[0]), Reader(mid.attentions[0], middle), Residual(mid.resnets[1])]]
        steps += [[Residual(up.resnets[0], self.fault)], [Residual(up.resnets[1]), Resize(up.upsamplers[0])]]
        for block, reader, fault in zip(end.resnets, end.attentions, (near, ""), strict=True):
            steps += [[Residual(block), Reader(reader, fault)]]
        self.steps = nn.ModuleList(map(nn.ModuleList, steps))

    def forward(self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        x, half = self.first(sample), SINES // 2
        powers = torch.arange(half, dtype=x.dtype, device=x.device) / half
        if self.fault == "sines_spaced_to_the_very_end":
            powers = powers * half / (half - 1)
        angles = torch.outer(timestep.to(x), 1e4**-powers)
        code, left = self.clock(torch.cat([angles.cos(), angles.sin()], 1)), [x]
        for i, steps in enumerate(self.steps):
            x = x if i < 4 else torch.cat([x, left.pop()], 1)
            for step in steps:
                x = step(x, code, encoder_hidden_states)
            left += [x] if i < 3 else []
        return self.last(F.silu(self.norm(x)))


def piled(modules: list[nn.Module]) -> nn.ParameterDict:
    names = {name: name.removeprefix("transformer_blocks.0.") for name, _ in modules[0].named_parameters()}
    piles = {name: pile(module.get_parameter(name) for module in modules) for name in names}
    return nn.ParameterDict({names[name].replace(".", "_"): rows for name, rows in piles.items()})


def both(w: nn.ParameterDict, name: str, i: int = 0) -> tuple[Tensor, Tensor]:
    return w[name + "_weight"][i], w[name + "_bias"][i]


def grouped(x: Tensor, gain: Tensor, shift: Tensor, eps=1e-5, less=0, strided=False) -> Tensor:
    parts = x.flatten(1, -2).unflatten(2, (-1, GROUPS) if strided else (GROUPS, -1))
    spread, mean = torch.var_mean(parts, (1, 2 if strided else 3), correction=less, keepdim=True)
    return ((parts - mean) * (spread + eps).rsqrt()).reshape(x.shape) * gain + shift


class Piles(Port):
    """Channels last; equal blocks in piles of weights, the text read once for all of them."""

    def take(self, model: UNet2DConditionModel) -> None:
        stages, embed = [*model.down_blocks, model.mid_block, *model.up_blocks], model.time_embedding
        blocks = [block for stage in stages for block in stage.resnets]
        self.narrow, self.wide = piled(blocks[:4]), piled(blocks[4:])
        self.readers = piled([reader for stage in stages for reader in stage.attentions])
        alone = {"first": model.conv_in, "norm": model.conv_norm_out, "last": model.conv_out}
        alone |= {"shrink": stages[0].downsamplers[0].conv, "grow": stages[3].upsamplers[0].conv}
        self.alone = piled([nn.ModuleDict(alone | {"lift": embed.linear_1, "turn": embed.linear_2})])

    def residual(self, w: nn.ParameterDict, i: int, x: Tensor, code: Tensor) -> Tensor:
        h = spatial(F.silu(grouped(x, *both(w, "norm1", i))), *both(w, "conv1", i))
        h = h + F.linear(code, *both(w, "time_emb_proj", i))[:, None, None]
        strided = self.fault == "low_block_groups_every_fourth_channel" and w is self.narrow and i == 1
        h = spatial(F.silu(grouped(h, *both(w, "norm2", i), strided=strided)), *both(w, "conv2", i))
        return h + (spatial(x, *both(w, "conv_shortcut", i)) if w is self.wide else x)

    def read(self, i: int, x: Tensor, told: Tensor) -> Tensor:
        w, width = self.readers, x.shape[3:]
        if self.fault == "first_text_learns_nothing" and i == 0:
            told = told.detach()
        h = spatial(grouped(x, *both(w, "norm", i), 1e-6), *both(w, "proj_in", i)).flatten(1, 2)
        for j, names in ((1, "qkv"), (2, "q")):
            seen = F.layer_norm(h, width, *both(w, f"norm{j}", i))
            q, *own = (F.linear(seen, w[f"attn{j}_to_{name}_weight"][i]) for name in names)
            q, k, v = (rows.unflatten(2, (HEADS, -1)) for rows in (q, *(own or told)))
            shares = torch.einsum("nqhd,nkhd->nhqk", q, k).div(q.shape[3] ** 0.5).softmax(3)
            seen = torch.einsum("nhqk,nkhd->nqhd", shares, v).flatten(2)
            h = h + F.linear(seen, *both(w, f"attn{j}_to_out_0", i))
        seen = F.layer_norm(h, width, *both(w, "norm3", i))
        value, gate = F.linear(seen, *both(w, "ff_net_0_proj", i)).chunk(2, 2)
        h = h + F.linear(F.gelu(gate) * value, *both(w, "ff_net_2", i))
        return x + spatial(h.reshape(x.shape), *both(w, "proj_out", i))

    def forward(self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        w, narrow, wide, half = self.alone, self.narrow, self.wide, SINES // 2
        x = spatial(sample.permute(0, 2, 3, 1), *both(w, "first"))
        angles = timestep[:, None] * torch.logspace(0, 4 / half - 4, half, dtype=x.dtype, device=x.device)
        code = F.silu(F.linear(torch.cat([angles.cos(), angles.sin()], 1), *both(w, "lift")))
        code = F.silu(F.linear(code, *both(w, "turn")))
        told = torch.stack([self.readers["attn2_to_k_weight"], self.readers["attn2_to_v_weight"]], 1)
        told = torch.einsum("ntc,bkoc->bknto", encoder_hidden_states, told)
        y = self.read(0, self.residual(narrow, 0, x, code), told[0])
        z = spatial(y, *both(w, "shrink"), stride=2)
        low = self.residual(narrow, 1, z, code)
        h = self.read(1, self.residual(narrow, 2, low, code), told[1])
        h = torch.cat([self.residual(narrow, 3, h, code), low], 3)
        h = self.residual(wide, 1, torch.cat([self.residual(wide, 0, h, code), z], 3), code)
        h = spatial(h.repeat_interleave(2, 1).repeat_interleave(2, 2), *both(w, "grow"))
        h = self.read(2, self.residual(wide, 2, torch.cat([h, y], 3), code), told[2])
        h = self.read(3, self.residual(wide, 3, torch.cat([h, x], 3), code), told[3])
        h = grouped(h, *both(w, "norm"), less=int(self.fault == "last_spread_divides_by_one_less"))
        return spatial(F.silu(h), *both(w, "last")).permute(0, 3, 1, 2)


right(latent, "latent_unet_as_a_list_of_steps", "other tree of modules", FlatSteps)
right(latent, "latent_unet_in_piles_channels_last", "channels last, weights in piles", Piles)
inner, learnt = "attentions.0.transformer_blocks.0", ("input gradient", "weight gradient")
halve, rise, words = "down_blocks.0.downsamplers.0", "up_blocks.0.resnets.0", f"down_blocks.0.{inner}.attn2"
wrong(
    latent,
    FlatSteps,
    sines_spaced_to_the_very_end=("other spacing of frequencies", "time_proj"),
    halving_pads_on_one_side_only=("other padding", (halve, halve + ".conv")),
    middle_scores_scaled_by_the_whole_width=("wrong scale of scores", f"mid_block.{inner}.attn1"),
    time_enters_the_first_rise_as_it_is=("activation missing", (rise, rise + ".time_emb_proj")),
    gate_and_value_change_places_near_the_end=("halves swapped", f"up_blocks.1.{inner}.ff.net.0"),
)
wrong(
    latent,
    Piles,
    first_text_learns_nothing=("a detach too many", (words, words + ".to_k", words + ".to_v"), learnt),
    low_block_groups_every_fourth_channel=("groups of other channels", "down_blocks.1.resnets.0.norm2"),
    last_spread_divides_by_one_less=("unbiased variance", "conv_norm_out"),
)
