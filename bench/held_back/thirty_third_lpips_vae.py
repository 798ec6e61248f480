"""Two ports of a small VAE under LPIPS: a path of parts, channels last, and one class of packed rows."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import GRADIENTS
from bench.held_back import _thirty_third_lpips_vae as first
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, Rows, leaf, spatial, wrong
from bench.held_back._sixth_ports import few

task = few("thirty_third_lpips_vae", first.AutoencoderKL, first.ripples, first.by_value)


class Patch(nn.Module):
    def __init__(self, conv: nn.Conv2d, every: int = 1, start: int = 0, times: int = 1):
        super().__init__()
        self.kernel, self.every, self.start, self.times = leaf(conv.weight), every, start, times
        self.offset = None if conv.bias is None else leaf(conv.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x.repeat_interleave(self.times, 1).repeat_interleave(self.times, 2)
        return spatial(x, self.kernel, self.offset)[:, self.start :: self.every, self.start :: self.every]


class Still(nn.Module):
    def __init__(self, norm: nn.GroupNorm):
        super().__init__()
        self.gain, self.offset = leaf(norm.weight), leaf(norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        groups = x.unflatten(3, (first.GROUPS, -1))
        var, mean = torch.var_mean(groups, (1, 2, 4), correction=0, keepdim=True)
        return ((groups - mean) * (var + 1e-6).rsqrt()).flatten(3) * self.gain + self.offset


class Residual(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        self.inner = nn.Sequential(Still(block.norm1), nn.SiLU(), Patch(block.conv1))
        self.inner.extend([Still(block.norm2), nn.SiLU(), Patch(block.conv2)])
        self.side = Patch(block.nin_shortcut) if hasattr(block, "nin_shortcut") else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.side(x)


class Look(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        self.norm, self.fixed = Still(block.norm), False
        self.turns = nn.ModuleList(map(Patch, (block.q, block.k, block.v, block.proj_out)))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (turn(y).flatten(1, 2) for turn in self.turns[:3])
        share = (q @ k.mT / x.shape[3] ** 0.5).softmax(-1)
        return x + self.turns[3](((share.detach() if self.fixed else share) @ v).view_as(x))


class Eye(nn.Module):
    def __init__(self, lpips: nn.Module):
        super().__init__()
        net, scaling, self.early = lpips.net, lpips.scaling_layer, False
        self.register_buffer("shift", scaling.shift.flatten())
        self.register_buffer("scale", scaling.scale.flatten())
        self.layers = nn.ModuleList(map(Patch, (net.slice1[0], net.slice2[1], net.slice3[1])))
        self.shares = nn.ParameterList(leaf(x.weight.flatten()) for x in lpips.lins)

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        x, total = torch.cat([one, two]), 0
        x = x / self.scale - self.shift if self.early else (x - self.shift) / self.scale
        for i, (layer, share) in enumerate(zip(self.layers, self.shares, strict=True)):
            x = layer(x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).amax((2, 4)) if i else x).relu()
            a, b = (x * (x.square().sum(3, True) + 1e-10).rsqrt()).chunk(2)
            total = total + (a - b).square().mean((1, 2)) @ share
        return total


class FirstStageOfParts(Port):
    def take(self, model: nn.Module) -> None:
        up, down, judge = model.decoder, model.encoder, model.loss.discriminator.main
        self.down = nn.Sequential(Patch(down.conv_in), Residual(down.down[0].block[0]))
        self.up = nn.Sequential(Patch(model.post_quant_conv), Patch(up.conv_in))
        start = int(self.fault != "lpips_vae_pads_evenly")
        self.down.extend([Patch(down.down[0].downsample.conv, 2, start), Residual(down.down[1].block[0])])
        for path, mid in ((self.down, down.mid), (self.up, up.mid)):
            path.extend([Residual(mid.block_1), Look(mid.attn_1), Residual(mid.block_2)])
        self.down.extend([Still(down.norm_out), nn.SiLU(), Patch(down.conv_out), Patch(model.quant_conv)])
        self.up.extend([*map(Residual, up.up[1].block), Patch(up.up[1].upsample[1], times=2)])
        self.up.extend([*map(Residual, up.up[0].block), Still(up.norm_out), nn.SiLU(), Patch(up.conv_out)])
        steps = [Patch(judge[0], 2), judge[1], Patch(judge[2], 2), Rows(judge[3]), judge[4], Patch(judge[5])]
        self.judge = nn.Sequential(*steps, Rows(judge[6]), judge[7], Patch(judge[8])).requires_grad_(False)
        self.eye, self.doubt = Eye(model.loss.perceptual_loss).requires_grad_(False), leaf(model.loss.logvar)
        self.down[5].fixed = self.fault == "lpips_vae_encoder_attention_takes_its_weights_for_constants"
        self.eye.early = self.fault == "lpips_vae_pictures_scaled_before_they_are_shifted"
        self.judge[6].own = self.fault == "lpips_vae_second_patch_norm_by_batch_in_eval"

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        x, noise = x.movedim(1, 3), noise.movedim(1, 3)
        middle, power = self.down(x).chunk(2, 3)
        made = self.up(torch.addcmul(middle, (power / 2).exp(), noise))
        off = (x - made).abs().mean() + first.PERCEPTUAL * self.eye(made, x).mean()
        total = x[0].numel() * (off * (-self.doubt).exp() + self.doubt)
        kl = (middle.square() + power.exp() - power - 1).flatten(1).sum(1).mean() / 2
        return made.movedim(3, 1), total + first.KL * kl - first.DISCRIMINATOR * self.judge(made).mean()


class PackedFirstStage(Port):
    def take(self, model: nn.Module) -> None:
        rows, self.spots = {True: [], False: []}, {}
        for name, x in model.named_parameters():
            rows[x.requires_grad].append(x.detach().flatten())
            self.spots[name] = x.requires_grad, sum(map(len, rows[x.requires_grad])), x.shape
        self.row = leaf(torch.cat(rows[True]))
        self.register_buffer("frozen", torch.cat(rows[False]))
        for name, x in filter(lambda pair: pair[1].ndim, model.loss.named_buffers()):
            self.register_buffer("_".join(name.split(".")[-2:]), x.clone())

    def at(self, name: str) -> Tensor:
        trained, end, shape = self.spots[name]
        return (self.row if trained else self.frozen)[end - shape.numel() : end].view(shape)

    def conv(self, x: Tensor, name: str, stride: int = 1, edge: int = 1) -> Tensor:
        bias = self.at(name + ".bias") if name + ".bias" in self.spots else None
        return F.conv2d(x, self.at(name + ".weight"), bias, stride, edge)

    def norm(self, x: Tensor, name: str, eps: float = 1e-6) -> Tensor:
        return F.group_norm(x, first.GROUPS, self.at(name + ".weight"), self.at(name + ".bias"), eps)

    def block(self, x: Tensor, name: str) -> Tensor:
        y = F.silu(self.norm(x, name + ".norm1"))
        kept = y if self.fault == "lpips_vae_last_shortcut_reads_the_normed_input" and "up.0" in name else x
        if name + ".nin_shortcut.bias" in self.spots:
            x = self.conv(kept, name + ".nin_shortcut", edge=0)
        return x + self.ready(self.conv(y, name + ".conv1"), name + ".norm2", name + ".conv2")

    def ready(self, x: Tensor, norm: str, conv: str, eps: float = 1e-6) -> Tensor:
        return self.conv(F.silu(self.norm(x, norm, eps)), conv)

    def middle(self, x: Tensor, name: str) -> Tensor:
        x, at = self.block(x, name + ".mid.block_1"), name + ".mid.attn_1."
        y = self.norm(x, at + "norm")
        q, k, v = (self.conv(y, at + each, edge=0).flatten(2).mT[:, None] for each in "qkv")
        y = F.scaled_dot_product_attention(q, k, v)[:, 0].mT.reshape(x.shape)
        return self.block(x + self.conv(y, at + "proj_out", edge=0), name + ".mid.block_2")

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        y = F.pad(self.block(self.conv(x, "encoder.conv_in"), "encoder.down.0.block.0"), (0, 1, 0, 1))
        y = self.block(self.conv(y, "encoder.down.0.downsample.conv", 2, 0), "encoder.down.1.block.0")
        y = self.ready(self.middle(y, "encoder"), "encoder.norm_out", "encoder.conv_out")
        mean, logvar = self.conv(y, "quant_conv", edge=0).tensor_split(2, 1)
        y = self.conv(mean + logvar.exp().sqrt() * noise, "post_quant_conv", edge=0)
        y = self.block(self.middle(self.conv(y, "decoder.conv_in"), "decoder"), "decoder.up.1.block.0")
        y = torch.kron(self.block(y, "decoder.up.1.block.1"), y.new_ones(2, 2))
        y = self.block(self.conv(y, "decoder.up.1.upsample.1"), "decoder.up.0.block.0")
        eps = 1e-3 if self.fault == "lpips_vae_last_norm_of_the_decoder_with_epsilon_of_keras" else 1e-6
        y = self.block(y, "decoder.up.0.block.1")
        made = self.ready(y, "decoder.norm_out", "decoder.conv_out", eps)
        z, apart = (torch.cat([made, x]) - self.scaling_layer_shift) / self.scaling_layer_scale, 0
        for i in range(3):
            mean_of = i == 2 and self.fault == "lpips_vae_second_pooling_by_the_mean"
            z = (F.avg_pool2d if mean_of else F.max_pool2d)(z, 2) if i else z
            z = self.conv(z, f"loss.perceptual_loss.net.slice{i + 1}.{int(i > 0)}").relu()
            a, b = (z / (z.pow(2).sum(1, True) + 1e-10).sqrt()).chunk(2)
            share = self.at(f"loss.perceptual_loss.lins.{i}.weight")[0]
            apart = apart + (share * (a - b).pow(2)).sum(1).mean((1, 2))
        name, y = "loss.discriminator.main.", self.conv(made, "loss.discriminator.main.0", 2)
        for i, stride in ((3, 2), (6, 1)):
            state = [self.get_buffer(f"{i}_running_{each}") for each in ("mean", "var")]
            state += [self.at(f"{name}{i}.{each}") for each in ("weight", "bias")]
            y = F.batch_norm(self.conv(F.leaky_relu(y, 0.2), f"{name}{i - 1}", stride), *state, self.training)
        score = self.conv(F.leaky_relu(y, 0.2), name + "8")
        count, doubt = x[0].numel(), self.at("loss.logvar")
        off = (made - x).abs().flatten(1).sum(1) + first.PERCEPTUAL * count * apart
        held = self.fault == "lpips_vae_reconstruction_takes_its_variance_for_a_constant"
        nll = off / (doubt.detach() if held else doubt).exp() + count * doubt
        kl = (mean.pow(2) + logvar.expm1() - logvar).flatten(1).sum(1) / 2
        return made, (nll + first.KL * kl).mean() - first.DISCRIMINATOR * score.mean()


right(task, "lpips_vae_of_parts_with_channels_last", "a tree, channels last", FirstStageOfParts)
right(task, "lpips_vae_of_packed_rows", "packed rows, functions only", PackedFirstStage)
wrong(
    task,
    FirstStageOfParts,
    lpips_vae_pads_evenly=("padding", ("encoder.down.0.downsample", "encoder.down.0.downsample.conv")),
    lpips_vae_encoder_attention_takes_its_weights_for_constants=("detach", "encoder.mid.attn_1", GRADIENTS),
    lpips_vae_pictures_scaled_before_they_are_shifted=("another order", "loss.perceptual_loss.scaling_layer"),
    lpips_vae_second_patch_norm_by_batch_in_eval=("batch in eval", "loss.discriminator.main.6", "eval"),
)
wrong(
    task,
    PackedFirstStage,
    lpips_vae_last_shortcut_reads_the_normed_input=("another input", "decoder.up.0.block.0"),
    lpips_vae_last_norm_of_the_decoder_with_epsilon_of_keras=("another epsilon", "decoder.norm_out"),
    lpips_vae_second_pooling_by_the_mean=("another pooling", "loss.perceptual_loss.net.slice3.0"),
    lpips_vae_reconstruction_takes_its_variance_for_a_constant=("detach", "loss", "weight gradient"),
)
