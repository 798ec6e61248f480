"""Two ports of a small EDM denoiser: a tree with the channels last, and one class of a vector a block."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fiftieth_edm_karras import EDMPrecond, edm_loss, noisy_waves
from bench.held_back._fourth_ports import Port, leaf, spatial, wrong
from bench.held_back._sixth_ports import few

task = few("fiftieth_edm_karras", EDMPrecond, noisy_waves, edm_loss)
HALF, SLOPES = math.sqrt(0.5), ("input gradient", "weight gradient")


class Layer(nn.Module):
    """A product of the last axis, or a convolution of [N, H, W, C], of those rows of a layer's weight."""

    def __init__(self, layer: nn.Module, rows: slice = slice(None)):
        super().__init__()
        self.kernel, self.offset = leaf(layer.weight[rows]), leaf(layer.bias[rows])

    def forward(self, x: Tensor) -> Tensor:
        return (spatial if self.kernel.ndim == 4 else F.linear)(x, self.kernel, self.offset)


class Groups(nn.Module):
    """A group norm of [N, H, W, C]; ``correction`` is that of its variance."""

    def __init__(self, norm: nn.Module, correction: int = 0):
        super().__init__()
        self.gain, self.offset = leaf(norm.weight), leaf(norm.bias)
        self.count, self.eps, self.correction = norm.num_groups, norm.eps, correction

    def forward(self, x: Tensor) -> Tensor:
        y = x.unflatten(3, (self.count, -1))
        var, mean = torch.var_mean(y, (1, 2, 4), correction=self.correction, keepdim=True)
        return ((y - mean) * (var + self.eps).rsqrt()).flatten(3) * self.gain + self.offset


class Mixer(nn.Module):
    def __init__(self, block: nn.Module, silent: bool = False):
        super().__init__()
        self.norm, self.heads, self.silent = Groups(block.norm2), block.num_heads, silent
        self.three = nn.ModuleList(Layer(block.qkv, slice(i, None, 3)) for i in range(3))
        self.out = Layer(block.proj)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (f(y).flatten(1, 2).unflatten(2, (self.heads, -1)).transpose(1, 2) for f in self.three)
        share = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        mixed = (share.detach() if self.silent else share) @ v
        return (x + self.out(mixed.transpose(1, 2).reshape(x.shape))) * HALF


def resized(x: Tensor, way: str) -> Tensor:
    """[N, H, W, C] of twice the size, half the size or the same."""
    if way == "up":
        return x.repeat_interleave(2, 1).repeat_interleave(2, 2)
    return x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).mean((2, 4)) if way == "down" else x


class Residual(nn.Module):
    def __init__(self, block: nn.Module, one: float = 1.0, silent: bool = False):
        super().__init__()
        self.way = "up" if block.conv0.up else "down" if block.conv0.down else ""
        self.before, self.enter = Groups(block.norm0), Layer(block.conv0)
        self.between, self.leave, self.one = Groups(block.norm1), Layer(block.conv1), one
        half = block.affine.weight.shape[0] // 2
        self.stretch, self.move = Layer(block.affine, slice(half)), Layer(block.affine, slice(half, None))
        self.side = nn.Identity() if block.skip is None else Layer(block.skip)
        self.mixer = Mixer(block, silent) if block.num_heads else nn.Identity()

    def forward(self, x: Tensor, e: Tensor) -> Tensor:
        y = self.enter(resized(F.silu(self.before(x)), self.way))
        y = self.between(y) * (self.one + self.stretch(e)) + self.move(e)
        y = self.leave(F.silu(y)) + resized(self.side(x), self.way)
        return self.mixer(y * HALF)


class EdmTree(Port):
    """Conditions, a way down, a way up and an end, channels last."""

    def take(self, model: EDMPrecond) -> None:
        net, fault = model.model, self.fault
        enc, dec = net.enc, net.dec
        self.kind, self.first, self.second = map(Layer, (net.map_label, net.map_layer0, net.map_layer1))
        self.stem = Layer(enc["8x12_conv"])
        one = 0.0 if fault == "edm_karras_first_block_scales_without_the_one" else 1.0
        self.down = nn.ModuleList([Residual(enc["8x12_block0"], one)])
        self.down.extend(Residual(enc[x]) for x in ("4x6_down", "4x6_block0"))
        silent = fault == "edm_karras_decoder_attention_weights_detached"
        self.up = nn.ModuleList([Residual(dec["4x6_in0"], silent=silent)])
        self.up.extend(Residual(block) for block in list(dec.values())[1:6])
        self.last = Groups(dec["8x12_aux_norm"], int(fault == "edm_karras_last_norm_of_unbiased_variance"))
        self.end, self.scale = Layer(dec["8x12_aux_conv"]), model.sigma_data

    def forward(self, x: Tensor, sigma: Tensor, class_labels: Tensor) -> Tensor:
        angle = sigma.log()[:, None] / 4 * (-math.log(10000) / 6 * torch.arange(7).to(sigma)).exp()
        waves = [angle.sin(), angle.cos()]
        if self.fault == "edm_karras_cosine_before_sine_not_swapped":
            waves.reverse()
        e = torch.cat(waves, 1) + self.kind(class_labels * math.sqrt(class_labels.shape[1]))
        e, s = F.silu(self.second(F.silu(self.first(e))))[:, None, None], sigma[:, None, None, None]
        total = torch.hypot(s, torch.full_like(s, self.scale))
        kept = [self.stem((x / total).movedim(1, 3))]
        for block in self.down:
            kept.append(block(kept[-1], e))
        y = kept[-1]
        for i, block in enumerate(self.up):
            y = block(torch.cat([y, kept.pop()], 3) if i in (1, 2, 4, 5) else y, e)
        y = self.end(F.silu(self.last(y))).movedim(3, 1)
        return (self.scale / total) * (self.scale / total * x + s * y)


class FlatEdm(Port):
    """A vector for each block and one for the rest, cut in pieces; convolutions are products of patches."""

    def take(self, model: EDMPrecond) -> None:
        net, self.w, self.shapes = model.model, nn.ParameterList(), []
        blocks = [*list(net.enc.values())[1:], *list(net.dec.values())[:6]]
        rest = (net.map_label, net.map_layer0, net.map_layer1, net.enc["8x12_conv"])
        ends = nn.ModuleList([*rest, net.dec["8x12_aux_norm"], net.dec["8x12_aux_conv"]])
        for part in (ends, *blocks):
            self.shapes.append({name: value.shape for name, value in part.named_parameters()})
            self.w.append(leaf(torch.cat([value.flatten() for value in part.parameters()])))

    def pieces(self, i: int) -> dict[str, tuple[Tensor, Tensor]]:
        shapes = self.shapes[i]
        cut = self.w[i].split([shape.numel() for shape in shapes.values()])
        found = {name: x.view(shape) for (name, shape), x in zip(shapes.items(), cut, strict=True)}
        return {k[:-7]: (x, found[k[:-6] + "bias"]) for k, x in found.items() if k.endswith("weight")}

    def conv(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        size = weight.shape[-1]
        y = weight.flatten(1) @ F.unfold(x, size, padding=size // 2) + bias[:, None]
        return y.unflatten(2, x.shape[2:])

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.group_norm(x, x.shape[1] // 4, weight, bias, 1e-6)

    def block(self, i: int, x: Tensor, e: Tensor) -> Tensor:
        p, y = self.pieces(i), F.silu(self.norm(x, *self.pieces(i)["norm0"]))
        if i == 2:
            y = F.avg_pool2d(y, 2)
            picked = self.fault == "edm_karras_down_skip_takes_every_other_pixel"
            x = x[:, :, ::2, ::2] if picked else F.avg_pool2d(x, 2)
        elif i == 7:
            x, y = (F.interpolate(z, scale_factor=2.0, mode="nearest") for z in (x, y))
        scale, shift = F.linear(e, *p["affine"])[:, :, None, None].tensor_split(2, 1)
        y = self.norm(self.conv(y, *p["conv0"]), *p["norm1"])
        y = self.conv(F.silu(y + y * scale + shift), *p["conv1"])
        x = (y + (self.conv(x, *p["skip"]) if "skip" in p else x)) * HALF
        if "qkv" not in p:
            return x
        y = self.conv(self.norm(x, *p["norm2"]), *p["qkv"]).flatten(2)
        q, k, v = y.unflatten(1, (2, -1, 3)).unbind(3)
        y = F.scaled_dot_product_attention(q.mT, k.mT, v.mT).mT.reshape(x.shape)
        y = x + self.conv(y, *p["proj"])
        return y if i == 6 and self.fault == "edm_karras_last_attention_sum_not_scaled" else y * HALF

    def forward(self, x: Tensor, sigma: Tensor, class_labels: Tensor) -> Tensor:
        label, first, second, stem, last, end = self.pieces(0).values()
        over = 2 if self.fault == "edm_karras_c_noise_is_half_the_logarithm" else 4
        angle = torch.outer(sigma.log() / over, 1e4 ** (torch.arange(7).to(sigma) / -6))
        if self.fault == "edm_karras_labels_dropped_in_evaluation" and not self.training:
            class_labels = torch.zeros_like(class_labels)
        e = torch.cat([angle.sin(), angle.cos()], 1) + F.linear(class_labels * 5**0.5, *label)
        e = F.silu(F.linear(F.silu(F.linear(e, *first)), *second))
        s, kept = sigma.view(-1, 1, 1, 1), []
        power = s.square() + 0.25
        y = self.conv(x * power.rsqrt(), *stem)
        for i in range(1, 10):
            kept += [y] if i < 5 else []
            y = self.block(i, torch.cat([y, kept.pop()], 1) if i in (5, 6, 8, 9) else y, e)
        y = self.conv(F.silu(self.norm(y, *last)), *end)
        return 0.25 / power * x + 0.5 * s * power.rsqrt() * y


right(task, "edm_karras_tree_with_channels_last", "a tree, split products, windows", EdmTree)
right(task, "edm_karras_flat_with_a_vector_a_block", "packed vectors, products of patches", FlatEdm)
wrong(
    task,
    EdmTree,
    edm_karras_cosine_before_sine_not_swapped=("another channel order", "model"),
    edm_karras_first_block_scales_without_the_one=("a term left out", "model.enc.8x12_block0"),
    edm_karras_decoder_attention_weights_detached=("detach", "model.dec.4x6_in0", SLOPES),
    edm_karras_last_norm_of_unbiased_variance=("another variance", "model.dec.8x12_aux_norm"),
)
wrong(
    task,
    FlatEdm,
    edm_karras_c_noise_is_half_the_logarithm=("another constant", ""),
    edm_karras_labels_dropped_in_evaluation=("an input dropped in eval", "model", "eval"),
    edm_karras_down_skip_takes_every_other_pixel=("another resampling", "model.enc.4x6_down.skip"),
    edm_karras_last_attention_sum_not_scaled=("a factor left out", "model.dec.4x6_block1"),
)
