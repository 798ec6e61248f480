"""Two ports of a VQ-GAN: a tree of stages with fused projections, and flat weights with channels last."""

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import GRADIENTS
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._seventeenth_vq_gan import BETA, EPS, GROUPS, OUTPUTS, SLOPE, VQGAN, both_sides, images
from bench.held_back._sixth_ports import few

task = few("seventeenth_vq_gan", VQGAN, images, both_sides)


class Spatial(nn.Module):
    """A convolution, its kernel kept as [k, k, in, out], after a group norm and SiLU if there is one."""

    def __init__(self, conv: nn.Conv2d, norm: nn.GroupNorm | None = None):
        super().__init__()
        self.kernel, self.bias = leaf(conv.weight.permute(2, 3, 1, 0)), leaf(conv.bias)
        self.affine = pile([norm.weight, norm.bias]) if norm else None
        self.stride, self.padding = conv.stride, conv.padding

    def forward(self, x: Tensor) -> Tensor:
        if self.affine is not None:
            x = F.silu(F.group_norm(x, GROUPS, *self.affine, EPS))
        return F.conv2d(x, self.kernel.permute(3, 2, 0, 1), self.bias, self.stride, self.padding)


class Around(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        self.inner = nn.Sequential(Spatial(block.conv1, block.norm1), Spatial(block.conv2, block.norm2))
        self.outer = Spatial(block.nin_shortcut) if block.nin_shortcut else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(x) + self.inner(x)


class Gather(nn.Module):
    def __init__(self, attn: nn.Module):
        super().__init__()
        three = (attn.q, attn.k, attn.v)
        self.affine = pile([attn.norm.weight, attn.norm.bias])
        self.into = leaf(torch.cat([conv.weight.flatten(1) for conv in three]).T)
        self.into_bias = leaf(torch.cat([conv.bias for conv in three]))
        self.back, self.back_bias = leaf(attn.proj_out.weight.flatten(1)), leaf(attn.proj_out.bias)

    def forward(self, x: Tensor) -> Tensor:
        rows = F.group_norm(x, GROUPS, *self.affine, EPS).flatten(2).mT @ self.into + self.into_bias
        seen = F.scaled_dot_product_attention(*rows.unsqueeze(1).chunk(3, 3)).squeeze(1)
        return x + F.linear(seen, self.back, self.back_bias).mT.unflatten(2, x.shape[2:])


class Codes(nn.Module):
    def __init__(self, embedding: nn.Embedding, *weights: float):
        super().__init__()
        self.columns, self.weights = leaf(embedding.weight.T), weights

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        apart = z.unsqueeze(-1) - self.columns[:, None, None]
        found = self.columns[:, apart.square().sum(1).argmin(-1)].transpose(0, 1)
        a, b = self.weights
        return z + (found - z).detach(), a * F.mse_loss(z, found.detach()) + b * F.mse_loss(found, z.detach())


class StageTree(Port):
    """A tree of stages down to the codes, one up from them, and a critic of patches."""

    def take(self, model: VQGAN) -> None:
        head, tail, main = model.encoder, model.decoder, model.discriminator.main
        (fine, low), (last, start), pad = head.down, tail.up, nn.ZeroPad2d((0, 1, 0, 1))
        first = [Spatial(head.conv_in), Around(fine.block[0]), pad, Spatial(fine.downsample.conv)]
        ends = [Spatial(head.conv_out, head.norm_out), Spatial(model.quant_conv)]
        middle = self.chain(low.block[0], low.attn[0], *head.mid.children())
        self.analyse = nn.Sequential(*first, middle, *ends)
        swapped = self.fault == "vqgan_beta_weighs_the_term_of_the_codes"
        self.codes = Codes(model.quantize.embedding, *((1, BETA) if swapped else (BETA, 1)))
        mode = "bilinear" if self.fault == "vqgan_first_upsampling_is_bilinear" else "nearest"
        first = [Spatial(model.post_quant_conv), Spatial(tail.conv_in)]
        ends = [self.chain(*last.block), Spatial(tail.conv_out, tail.norm_out)]
        grow = nn.Sequential(nn.Upsample(scale_factor=2, mode=mode), Spatial(start.upsample.conv))
        pairs = [x for pair in zip(start.block, start.attn, strict=True) for x in pair]
        self.compose = nn.Sequential(*first, self.chain(*tail.mid.children(), *pairs), grow, *ends)
        slope = 0.01 if self.fault == "vqgan_second_patch_activation_of_the_default_slope" else SLOPE
        norm, rest = deepcopy(main[3]), [Spatial(main[5]), *deepcopy(main[6:8]), Spatial(main[8])]
        norm.momentum = 0.9 if self.fault == "vqgan_first_patch_norm_with_the_momentum_reversed" else 0.1
        patches = [Spatial(main[0]), nn.LeakyReLU(SLOPE), Spatial(main[2]), norm, nn.LeakyReLU(slope)]
        self.critic = nn.Sequential(*patches, *rest)

    def chain(self, *modules: nn.Module) -> nn.Module:
        return nn.Sequential(*(Gather(x) if hasattr(x, "proj_out") else Around(x) for x in modules))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        found, loss = self.codes(self.analyse(x))
        made = self.compose(found)
        logits = map(self.critic, (made, x.detach(), made.detach()))
        return dict(zip(OUTPUTS, (made, loss, *logits), strict=True))


class FlatVQGAN(Port):
    """Channels last, lists of weights by number, attentions in stacks; all patches at once."""

    def take(self, model: VQGAN) -> None:
        head, tail, main = model.encoder, model.decoder, model.discriminator.main
        (fine, low), (last, start), mids = head.down, tail.up, (head.mid, tail.mid)
        blocks = [fine.block[0], low.block[0], *(b for mid in mids for b in (mid.block_1, mid.block_2))]
        blocks += [*start.block, *last.block]
        looks = [low.attn[0], *(mid.attn_1 for mid in mids), *start.attn]
        convs = [conv for block in blocks for conv in (block.conv1, block.conv2)]
        convs += [head.conv_in, fine.downsample.conv, head.conv_out, tail.conv_in, start.upsample.conv]
        convs += [tail.conv_out, main[0], main[2], main[5], main[8]]
        norms = [norm for block in blocks for norm in (block.norm1, block.norm2)]
        norms += [head.norm_out, tail.norm_out, main[3], main[6], *(look.norm for look in looks)]
        convs += [blocks[i].nin_shortcut for i in (0, 1, 8)] + [model.quant_conv, model.post_quant_conv]
        self.kernels = nn.ParameterList(leaf(conv.weight.permute(1, 2, 3, 0)) for conv in convs)
        self.biases = nn.ParameterList(leaf(conv.bias) for conv in convs)
        self.norms = nn.ParameterList(pile([norm.weight, norm.bias]) for norm in norms)
        fours = [(look.q, look.k, look.v, look.proj_out) for look in looks]
        self.looks = pile(torch.stack([conv.weight.flatten(1) for conv in four]) for four in fours)
        self.looks_b = pile(torch.stack([conv.bias for conv in four]) for four in fours)
        self.codes = leaf(model.quantize.embedding.weight)
        for i in (3, 6):
            self.register_buffer(f"kept{i}", torch.stack([main[i].running_mean, main[i].running_var]))

    def conv(self, i: int, x: Tensor, stride: int = 1, near: int = 1) -> Tensor:
        if (size := self.kernels[i].shape[1]) > 1:
            x = F.pad(x, (0, 0, near, 1, near, 1)).unfold(1, size, stride).unfold(2, size, stride).flatten(3)
        return x @ self.kernels[i].flatten(0, 2) + self.biases[i]

    def level(self, x: Tensor, norm: int) -> Tensor:
        parts, (gain, shift) = x.unflatten(3, (GROUPS, -1)), self.norms[norm]
        spread, center = torch.var_mean(parts, (1, 2, 4), correction=0, keepdim=True)
        return ((parts - center) / (spread + EPS).sqrt()).flatten(3) * gain + shift

    def bent(self, x: Tensor, norm: int, conv: int) -> Tensor:
        return self.conv(conv, F.silu(self.level(x, norm)))

    def block(self, i: int, x: Tensor, point: int | None = None) -> Tensor:
        again = self.fault == "vqgan_last_block_reads_its_first_norm_twice" and i == 9
        y = self.bent(self.bent(x, 2 * i, 2 * i), 2 * i + (not again), 2 * i + 1)
        return y + (x if point is None else self.conv(point, x))

    def look(self, i: int, x: Tensor) -> Tensor:
        y = self.level(x, 24 + i)
        raw = self.fault == "vqgan_encoder_middle_values_of_the_raw_map" and i == 1
        (wq, wk, wv, wo), (bq, bk, bv, bo) = self.looks[i], self.looks_b[i]
        q, k, v = y @ wq.T + bq, y @ wk.T + bk, (x if raw else y) @ wv.T + bv
        shares = torch.einsum("nhwc,npc->nhwp", q / q.shape[3] ** 0.5, k.flatten(1, 2)).softmax(3)
        return x + torch.einsum("nhwp,npc,oc->nhwo", shares, v.flatten(1, 2), wo) + bo

    def nearest(self, z: Tensor) -> tuple[Tensor, Tensor]:
        bare = self.fault == "vqgan_nearest_code_without_the_squares_of_the_codes"
        found = self.codes[(z @ self.codes.T - (not bare) * self.codes.square().sum(1) / 2).argmax(3)]
        loss = BETA * (found.detach() - z).pow(2).mean() + (found - z.detach()).pow(2).mean()
        return found.detach() + (z - z.detach()), loss

    def three(self, x: Tensor, norm: int, layer: int) -> Tensor:
        x, kept = x.unflatten(0, (3, -1)), getattr(self, f"kept{layer}")
        center, spread = kept
        if self.training:
            joint = self.fault == "vqgan_last_patch_norm_over_real_and_made_together" and layer == 6
            spread, center = torch.var_mean(x, (0, 1, 2, 3)[not joint :], correction=0, keepdim=True)
            count = x[..., 0].numel() / len(center)
            news = torch.stack([center, spread * count / (count - 1)], 1).detach().flatten(2)
            for new in news.expand(3, -1, -1):
                kept.lerp_(new, 0.1)
        x = (x - center) * torch.rsqrt(spread + 1e-5) * self.norms[norm][0] + self.norms[norm][1]
        return torch.maximum(x, SLOPE * x).flatten(0, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.block(0, self.conv(20, x.movedim(1, 3)), 30)
        y = self.block(2, self.look(0, self.block(1, self.conv(21, y, 2, 0), 31)))
        found, loss = self.nearest(self.conv(33, self.bent(self.block(3, self.look(1, y)), 20, 22)))
        y = self.block(5, self.look(2, self.block(4, self.conv(23, self.conv(34, found)))))
        y = self.look(4, self.block(7, self.look(3, self.block(6, y))))
        y = self.conv(24, y.repeat_interleave(2, 1).repeat_interleave(2, 2))
        made = self.bent(self.block(9, self.block(8, y, 32)), 21, 25)
        y = self.conv(26, torch.cat([made, x.movedim(1, 3).detach(), made.detach()]), 2)
        y = self.three(self.conv(28, self.three(self.conv(27, torch.maximum(y, SLOPE * y), 2), 22, 3)), 23, 6)
        logits = self.conv(29, y).movedim(3, 1).chunk(3)
        return dict(zip(OUTPUTS, (made.movedim(3, 1), loss, *logits), strict=True))


right(task, "vqgan_as_a_tree_of_stages", "fused norms and projections, codes in columns", StageTree)
right(task, "vqgan_of_flat_weights", "channels last, windows, all patches at once", FlatVQGAN)
wrong(
    task,
    StageTree,
    vqgan_beta_weighs_the_term_of_the_codes=("a weight on the other term", "quantize", GRADIENTS),
    vqgan_first_upsampling_is_bilinear=("another interpolation", "decoder.up.1.upsample"),
    vqgan_second_patch_activation_of_the_default_slope=("another slope", "discriminator.main.4"),
    vqgan_first_patch_norm_with_the_momentum_reversed=("momentum reversed", "discriminator.main.3", "buffer"),
)
wrong(
    task,
    FlatVQGAN,
    vqgan_last_block_reads_its_first_norm_twice=("another layer's weights", "decoder.up.0.block.1.norm2"),
    vqgan_encoder_middle_values_of_the_raw_map=("raw input", ("encoder.mid.attn_1", "encoder.mid.attn_1.v")),
    vqgan_nearest_code_without_the_squares_of_the_codes=("a term of the distance missing", "quantize"),
    vqgan_last_patch_norm_over_real_and_made_together=("joint statistics", "discriminator.main.6"),
)
