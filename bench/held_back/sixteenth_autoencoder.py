"""Two ports of the autoencoder of latent diffusion: two chains of stages, and tables of weights."""

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import GRADIENTS
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixteenth_autoencoder import BOUNDS, GROUPS, SCALE, AutoencoderKL, evidence, images
from bench.held_back._sixth_ports import few

task = few("sixteenth_autoencoder", AutoencoderKL, images, evidence)


class Filter(nn.Module):
    """A convolution within explicit edges (left, right, top, bottom), its kernel kept as [k, k, in, out]."""

    def __init__(self, conv: nn.Conv2d, edges: tuple[int, ...] = ()):
        super().__init__()
        self.kernel, self.bias = leaf(conv.weight.permute(2, 3, 1, 0)), leaf(conv.bias)
        self.edges, self.stride = edges or (conv.padding[0],) * 4, conv.stride

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, self.edges), self.kernel.permute(3, 2, 0, 1), self.bias, self.stride)


class Branch(nn.Module):
    """What is added to a way around it."""

    def __init__(self, block: nn.Module, late: bool = False):
        super().__init__()
        self.start = nn.Sequential(deepcopy(block.norm1), nn.SiLU())
        self.rest = nn.Sequential(Filter(block.conv1), deepcopy(block.norm2), nn.SiLU(), Filter(block.conv2))
        self.around, self.late = Filter(block.conv_shortcut) if block.conv_shortcut else nn.Identity(), late

    def forward(self, x: Tensor) -> Tensor:
        y = self.start(x)
        return self.rest(y) + self.around(y if self.late else x)


class Gaze(nn.Module):
    """Every pixel looks at every other; three projections in one."""

    def __init__(self, attention: nn.Module, fresh: bool = True):
        super().__init__()
        three = (attention.to_q, attention.to_k, attention.to_v)
        self.level, self.fresh = deepcopy(attention.group_norm), fresh
        self.packed = leaf(torch.cat([linear.weight for linear in three]))
        self.packed_bias = leaf(torch.cat([linear.bias for linear in three]))
        self.last, self.last_bias = leaf(attention.to_out[0].weight), leaf(attention.to_out[0].bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.level(x)
        rows = F.linear(y.permute(0, 2, 3, 1).flatten(1, 2), self.packed, self.packed_bias)
        seen = F.scaled_dot_product_attention(*rows[:, None].chunk(3, -1))[:, 0]
        return (x if self.fresh else y) + F.linear(seen, self.last, self.last_bias).mT.reshape_as(x)


class LatentChains(Port):
    """A chain down to the latent and one up from it, with the draw between them."""

    def take(self, model: AutoencoderKL) -> None:
        head, tail, cut = model.encoder, model.decoder, model.quant_conv
        late = self.fault == "autoencoder_shortcut_of_the_middle_up_block_reads_the_activated_input"
        fresh = self.fault != "autoencoder_encoder_attention_added_to_its_normalised_input"
        even = self.fault == "autoencoder_second_downsampler_padded_on_all_sides"
        down = [Filter(head.conv_in)]
        for i, block in enumerate(head.down_blocks):
            down += [Branch(unit) for unit in block.resnets]
            edges = (1, 1, 1, 1) if even and i == 1 else (0, 1, 0, 1)
            down += [Filter(unit.conv, edges) for unit in block.downsamplers or ()]
        up = [Filter(model.post_quant_conv), Filter(tail.conv_in), *self.middle(tail.mid_block)]
        for i, block in enumerate(tail.up_blocks):
            up += [Branch(unit, late and i == 1 and j == 0) for j, unit in enumerate(block.resnets)]
            for unit in block.upsamplers or ():
                up += [nn.Upsample(scale_factor=2), Filter(unit.conv)]
        ends = [(deepcopy(end.conv_norm_out), nn.SiLU(), Filter(end.conv_out)) for end in (head, tail)]
        self.down = nn.Sequential(*down, *self.middle(head.mid_block, fresh), *ends[0])
        self.up = nn.Sequential(*up, *ends[1])
        self.cut, self.cut_bias = pile(cut.weight.flatten(1).chunk(2)), pile(cut.bias.chunk(2))

    def middle(self, block: nn.Module, fresh: bool = True) -> list[nn.Module]:
        return [Branch(block.resnets[0]), Gaze(block.attentions[0], fresh), Branch(block.resnets[1])]

    def forward(self, sample: Tensor, noise: Tensor) -> dict[str, Tensor]:
        halves = torch.einsum("koc,nchw->knohw", self.cut, self.down(sample))
        mean, spread = halves + self.cut_bias[:, None, :, None, None]
        spread = F.hardtanh(spread, *BOUNDS)
        drawn = torch.addcmul(mean, spread.exp().sqrt(), noise)
        if self.fault == "autoencoder_latent_is_the_mean_outside_of_training" and not self.training:
            drawn = mean
        return {"sample": self.up(SCALE * drawn / SCALE), "mean": mean, "logvar": spread}


class LatentTables(Port):
    """Images [N, H, W, C]; lists of weights and a table of their places; products of windows."""

    def take(self, model: AutoencoderKL) -> None:
        self.kernels, self.biases, self.norms, self.looks, self.looks_b = map(nn.ParameterList, [()] * 5)
        self.place = {}
        for name, module in model.named_modules():
            if isinstance(module, nn.Conv2d):
                self.place[name] = len(self.kernels)
                self.kernels.append(leaf(module.weight.flatten(1).T))
                self.biases.append(leaf(module.bias))
            elif isinstance(module, nn.GroupNorm):
                self.place[name] = len(self.norms)
                self.norms.append(pile([module.weight, module.bias]))
            elif hasattr(module, "to_out"):
                four = (module.to_q, module.to_k, module.to_v, module.to_out[0])
                self.place[name] = len(self.looks)
                self.looks.append(pile(linear.weight.T for linear in four))
                self.looks_b.append(pile(linear.bias for linear in four))

    def levelled(self, x: Tensor, name: str) -> Tensor:
        shape, axes, (gain, shift) = (GROUPS, -1), (1, 2, 4), self.norms[self.place[name]]
        odd = self.fault == "autoencoder_last_block_norm_groups_alternate_channels"
        if odd and name == "decoder.up_blocks.2.resnets.1.norm1":
            shape, axes = (-1, GROUPS), (1, 2, 3)
        cells = x.unflatten(3, shape)
        cells = cells - cells.mean(axes, keepdim=True)
        cells = cells * (cells.square().mean(axes, keepdim=True) + 1e-6).rsqrt()
        return cells.flatten(3) * gain + shift

    def filtered(self, x: Tensor, name: str, stride: int = 1) -> Tensor:
        kernel, bias = self.kernels[self.place[name]], self.biases[self.place[name]]
        if len(kernel) > x.shape[3]:
            near = 2 - stride
            x = F.pad(x, (0, 0, near, 1, near, 1)).unfold(1, 3, stride).unfold(2, 3, stride).flatten(3)
        return x @ kernel + bias

    def bent(self, x: Tensor, norm: str, conv: str) -> Tensor:
        y = self.levelled(x, norm)
        return self.filtered(y * y.sigmoid(), conv)

    def block(self, x: Tensor, name: str) -> Tensor:
        y, side = x, f"{name}.conv_shortcut"
        for i in (1, 2):
            y = self.bent(y, f"{name}.norm{i}", f"{name}.conv{i}")
        return y + (self.filtered(x, side) if side in self.place else x)

    def looked(self, x: Tensor, name: str) -> Tensor:
        at, pixels = self.place[name], self.levelled(x, f"{name}.group_norm").flatten(1, 2)
        weights, biases = self.looks[at], self.looks_b[at]
        q, k, v = torch.einsum("npc,tcd->tndp", pixels, weights[:3]) + biases[:3, None, :, None]
        by_pixels = self.fault == "autoencoder_decoder_scores_scaled_by_the_count_of_pixels"
        width = q.shape[-1 if by_pixels and name.startswith("decoder") else -2]
        scores = torch.einsum("ndp,ndq->npq", q, k) / width**0.5
        seen = torch.einsum("npq,ndq->npd", scores.softmax(-1), v) @ weights[3] + biases[3]
        return x + seen.view_as(x)

    def middle(self, x: Tensor, name: str) -> Tensor:
        x = self.looked(self.block(x, f"{name}.resnets.0"), f"{name}.attentions.0")
        return self.block(x, f"{name}.resnets.1")

    def grown(self, x: Tensor, i: int) -> Tensor:
        tiled = self.fault == "autoencoder_first_upsampler_tiles_the_image" and i == 0
        x = x.repeat(1, 2, 2, 1) if tiled else x.repeat_interleave(2, 1).repeat_interleave(2, 2)
        return self.filtered(x, f"decoder.up_blocks.{i}.upsamplers.0.conv")

    def forward(self, sample: Tensor, noise: Tensor) -> dict[str, Tensor]:
        x = self.filtered(sample.movedim(1, 3), "encoder.conv_in")
        for i in range(3):
            x = self.block(x, f"encoder.down_blocks.{i}.resnets.0")
            x = self.filtered(x, f"encoder.down_blocks.{i}.downsamplers.0.conv", 2) if i < 2 else x
        x = self.bent(self.middle(x, "encoder.mid_block"), "encoder.conv_norm_out", "encoder.conv_out")
        mean, spread = self.filtered(x, "quant_conv").unflatten(3, (2, -1)).unbind(3)
        if self.fault == "autoencoder_log_variance_clamped_behind_the_gradient":
            spread.data.clamp_(*BOUNDS)
        else:
            spread = spread.clamp(*BOUNDS)
        x = self.filtered(mean + (spread / 2).exp() * noise.movedim(1, 3), "post_quant_conv")
        x = self.middle(self.filtered(x, "decoder.conv_in"), "decoder.mid_block")
        for i in range(3):
            for j in range(2):
                x = self.block(x, f"decoder.up_blocks.{i}.resnets.{j}")
            x = self.grown(x, i) if i < 2 else x
        x = self.bent(x, "decoder.conv_norm_out", "decoder.conv_out")
        return {"sample": x.movedim(3, 1), "mean": mean.movedim(3, 1), "logvar": spread.movedim(3, 1)}


right(task, "autoencoder_of_two_chains", "flat chains of filters, packed attention", LatentChains)
right(task, "autoencoder_by_tables_of_weights", "channels last, products of windows", LatentTables)
UP, DOWN, MIDDLE = "decoder.up_blocks", "encoder.down_blocks", "mid_block.attentions.0"
SIDE = (f"{UP}.1.resnets.0", f"{UP}.1.resnets.0.conv_shortcut")
SHRINK = (f"{DOWN}.1.downsamplers.0", f"{DOWN}.1.downsamplers.0.conv")
wrong(
    task,
    LatentChains,
    autoencoder_second_downsampler_padded_on_all_sides=("even padding", SHRINK),
    autoencoder_shortcut_of_the_middle_up_block_reads_the_activated_input=("a later shortcut", SIDE),
    autoencoder_encoder_attention_added_to_its_normalised_input=("a later residual", f"encoder.{MIDDLE}"),
    autoencoder_latent_is_the_mean_outside_of_training=("no draw in eval mode", "", "eval"),
)
wrong(
    task,
    LatentTables,
    autoencoder_last_block_norm_groups_alternate_channels=("other groups", f"{UP}.2.resnets.1.norm1"),
    autoencoder_first_upsampler_tiles_the_image=("tiled, not repeated", f"{UP}.0.upsamplers.0"),
    autoencoder_decoder_scores_scaled_by_the_count_of_pixels=("another scale", f"decoder.{MIDDLE}"),
    autoencoder_log_variance_clamped_behind_the_gradient=("a clamp that lets gradients pass", "", GRADIENTS),
)
