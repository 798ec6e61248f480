"""Two ports of a vision transformer with registers: branches that end alike, and stacks of weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import GRADIENTS
from bench.held_back import _fifteenth_vision_transformer as vit
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("fifteenth_vision_transformer", vit.VisionTransformer, vit.pictures, vit.image_and_patches)


class Norm(nn.Module):
    def __init__(self, norm: nn.LayerNorm):
        super().__init__()
        self.eps, self.correction = norm.eps, 0
        self.gain, self.shift = leaf(norm.weight), leaf(norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        spread, center = torch.var_mean(x, -1, correction=self.correction, keepdim=True)
        return (x - center) / (spread + self.eps).sqrt() * self.gain + self.shift


class Stem(nn.Module):
    """Images to tokens [T, N, C], the class token and the registers in one weight before the patches."""

    def __init__(self, model: vit.VisionTransformer):
        super().__init__()
        self.weight, self.bias = map(leaf, model.patch_embed.proj.parameters())
        self.grid, self.offset = leaf(model.pos_embed[0].T.unflatten(1, vit.GRID)), 0.0
        self.prefix = leaf(torch.cat([model.cls_token, model.reg_token], 1).transpose(0, 1))

    def forward(self, x: Tensor) -> Tensor:
        size = [n // vit.PATCH for n in x.shape[2:]]
        scale = [(n + self.offset) / m for n, m in zip(size, vit.GRID, strict=True)]
        which = {"scale_factor": scale} if self.offset else {"size": size}
        grid = F.interpolate(self.grid[None], mode="bicubic", antialias=True, **which)
        cut = F.unfold(x, vit.PATCH, stride=vit.PATCH).permute(2, 0, 1)
        x = cut @ self.weight.flatten(1).T + self.bias + grid.flatten(2).permute(2, 0, 1)
        return torch.cat([self.prefix.expand(-1, x.shape[1], -1), x])


class Heads(nn.Module):
    def __init__(self, attn: nn.Module):
        super().__init__()
        self.q, self.k, self.v = map(leaf, attn.qkv.weight.unflatten(0, (3, vit.HEADS, -1)).mT)
        self.q_bias, self.k_bias, self.v_bias = map(leaf, attn.qkv.bias.unflatten(0, (3, vit.HEADS, 1, -1)))
        self.q_norm, self.k_norm = Norm(attn.q_norm), Norm(attn.k_norm)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)[:, None]
        q, k = self.q_norm(x @ self.q + self.q_bias), self.k_norm(x @ self.k + self.k_bias)
        y = F.scaled_dot_product_attention(q, k, x @ self.v + self.v_bias)
        return y.permute(2, 0, 1, 3).flatten(2)


class Gate(nn.Module):
    def __init__(self, mlp: nn.Module):
        super().__init__()
        self.weight = leaf(torch.cat([mlp.fc1_x.weight, mlp.fc1_g.weight]).T)
        self.bias = leaf(torch.cat([mlp.fc1_x.bias, mlp.fc1_g.bias]))

    def forward(self, x: Tensor) -> Tensor:
        value, gate = (x @ self.weight + self.bias).chunk(2, -1)
        return value * gate * gate.sigmoid()


class Branch(nn.Module):
    """Tokens, and what is made of them; its last product and scale are one when not in training."""

    def __init__(self, norm: nn.LayerNorm, inner: nn.Module, last: nn.Linear, scale: nn.Module):
        super().__init__()
        self.norm, self.inner, self.normed, self.bias_too = Norm(norm), inner, False, True
        self.weight, self.bias, self.gamma = leaf(last.weight.T), leaf(last.bias), leaf(scale.gamma)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x, y = y if self.normed else x, self.inner(y)
        if self.training:
            return x + (y @ self.weight + self.bias) * self.gamma
        return x + y @ (self.weight * self.gamma) + self.bias * (self.gamma if self.bias_too else 1)


class BranchesAlike(Port):
    """A stem, twice as many branches as blocks, and a head."""

    def take(self, model: vit.VisionTransformer) -> None:
        branches = []
        for block in model.blocks:
            branches.append(Branch(block.norm1, Heads(block.attn), block.attn.proj, block.ls1))
            branches.append(Branch(block.norm2, Gate(block.mlp), block.mlp.fc2, block.ls2))
        self.stem, self.trunk = Stem(model), nn.Sequential(*branches)
        self.final, self.both, self.bias = Norm(model.norm), Norm(model.fc_norm), leaf(model.head.bias)
        self.head = leaf(model.head.weight.T)
        self.stem.offset = 0.1 * (self.fault == "dinov2_position_grid_scaled_to_a_tenth_of_a_cell_more")
        branches[1].normed = self.fault == "dinov2_first_feed_forward_added_to_the_normed_tokens"
        branches[4].inner.q_norm.correction = int(self.fault == "dinov2_last_queries_by_unbiased_variance")
        branches[3].bias_too = self.fault != "dinov2_merged_layer_scale_misses_the_bias"

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.final(self.trunk(self.stem(x)))
        patches = x[len(self.stem.prefix) :]
        y = self.both(torch.cat([x[0], patches.mean(0)], 1))
        return torch.addmm(self.bias, y, self.head), patches.transpose(0, 1)


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, packed: Tensor, short: bool) -> Tensor:
        gate, value = packed.chunk(2, -1)
        part = gate.sigmoid()
        slope = part if short else part + gate * part * (1 - part)
        ctx.save_for_backward(value * slope, gate * part)
        return gate * part * value

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return torch.cat([grad * factor for factor in ctx.saved_tensors], -1), None


def standard(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=vit.EPS)


def shares(old: int, new: int, like: Tensor) -> Tensor:
    """[new, old]: the share of each old cell in each new one, by a cubic widened where cells merge."""
    i, j = torch.arange(new).to(like)[:, None] + 0.5, torch.arange(old).to(like) + 0.5
    t = (j - i * old / new).abs() / max(old / new, 1)
    cubic = torch.where(t < 1, (1.5 * t - 2.5) * t * t + 1, ((2.5 - 0.5 * t) * t - 4) * t + 2) * (t < 2)
    return cubic / cubic.sum(1, keepdim=True)


class StackedTokens(Port):
    """Patches first, then registers, then the class token; one stack for each weight of the blocks."""

    def take(self, model: vit.VisionTransformer) -> None:
        blocks, cut, head = model.blocks, model.patch_embed.proj, model.head
        self.cut, self.cut_b = leaf(cut.weight.permute(2, 3, 1, 0)), leaf(cut.bias)
        self.places = leaf(model.pos_embed[0].unflatten(0, vit.GRID))
        self.extra = leaf(torch.cat([model.reg_token, model.cls_token], 1))
        all_ = [x for b in blocks for x in ((b.norm1, b.attn.proj, b.ls1), (b.norm2, b.mlp.fc2, b.ls2))]
        self.sides = pile(pile([norm.weight, norm.bias, end.bias, ls.gamma]) for norm, end, ls in all_)
        self.qkv = pile(b.attn.qkv.weight.unflatten(0, (3, vit.HEADS, -1)) for b in blocks)
        self.qkv_b = pile(b.attn.qkv.bias.unflatten(0, (3, vit.HEADS, -1)) for b in blocks)
        self.qk = pile(pile(pile([n.weight, n.bias]) for n in (b.attn.q_norm, b.attn.k_norm)) for b in blocks)
        self.proj = pile(b.attn.proj.weight.unflatten(1, (vit.HEADS, -1)) for b in blocks)
        self.up = pile(torch.cat([b.mlp.fc1_g.weight, b.mlp.fc1_x.weight]) for b in blocks)
        self.up_b = pile(torch.cat([b.mlp.fc1_g.bias, b.mlp.fc1_x.bias]) for b in blocks)
        self.down = pile(b.mlp.fc2.weight for b in blocks)
        self.final, self.pool = (pile([n.weight, n.bias]) for n in (model.norm, model.fc_norm))
        self.head = leaf(torch.cat([head.weight.T, head.bias[None]]))

    def gathered(self, i: int, x: Tensor) -> Tensor:
        qkv = torch.einsum("ntd,shed->snhte", x, self.qkv[i]) + self.qkv_b[i][:, None, :, None]
        same = self.fault == "dinov2_first_keys_normed_as_queries" and i == 0
        gain, shift = self.qk[i][[0, 0] if same else [0, 1], :, None, None, None].unbind(1)
        q, k = torch.addcmul(shift, standard(qkv[:2]), gain)
        heavy = torch.einsum("nhqe,nhke->nhqk", q, k) / q.shape[-1] ** 0.5
        heavy = (heavy - heavy.detach().amax(-1, keepdim=True)).exp()
        return torch.einsum("nhqe,dhe->nqd", heavy @ qkv[2] / heavy.sum(-1, keepdim=True), self.proj[i])

    def fed(self, i: int, x: Tensor) -> Tensor:
        short = self.fault == "dinov2_last_swiglu_slope_lacks_a_term" and i == 2
        return Swish.apply(x @ self.up[i].T + self.up_b[i], short) @ self.down[i].T

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        cells = x.unflatten(3, (-1, vit.PATCH)).unflatten(2, (-1, vit.PATCH))
        y = torch.einsum("nchiwj,ijcd->nhwd", cells, self.cut) + self.cut_b
        rows, columns = (shares(m, n, x) for m, n in zip(vit.GRID, y.shape[1:3], strict=True))
        y = y + torch.einsum("hr,wc,rcd->hwd", rows, columns, self.places)
        x = torch.cat([y.flatten(1, 2), self.extra.expand(len(y), -1, -1)], 1)
        for i in range(len(self.qkv)):
            for j, branch in enumerate((self.gathered, self.fed)):
                gain, shift, bias, scale = self.sides[2 * i + j]
                x = torch.addcmul(x, branch(i, torch.addcmul(shift, standard(x), gain)) + bias, scale)
        x = torch.addcmul(self.final[1], standard(x), self.final[0])
        patches = x[:, : -self.extra.shape[1]]
        counted = x[:, :-1] if self.fault == "dinov2_registers_counted_in_the_mean_of_patches" else patches
        y = torch.stack([x[:, -1], counted.mean(1)], 1)
        apart = self.fault == "dinov2_head_norm_over_class_and_mean_each_by_itself"
        y = standard(y).flatten(1) if apart else standard(y.flatten(1))
        return (y * self.pool[0] + self.pool[1]) @ self.head[:-1] + self.head[-1], patches


right(task, "dinov2_of_branches_that_end_alike", "a sequence of branches, tokens first", BranchesAlike)
right(task, "dinov2_of_stacked_weights", "flat code, stacks, a derivative by hand", StackedTokens)
wrong(
    task,
    BranchesAlike,
    dinov2_position_grid_scaled_to_a_tenth_of_a_cell_more=("another scale of resampling", ""),
    dinov2_first_feed_forward_added_to_the_normed_tokens=("residual of the normed value", "blocks.0"),
    dinov2_last_queries_by_unbiased_variance=("unbiased variance", "blocks.2.attn.q_norm"),
    dinov2_merged_layer_scale_misses_the_bias=("bias unscaled", ("blocks.1.ls2", "blocks.1.mlp.fc2"), "eval"),
)
wrong(
    task,
    StackedTokens,
    dinov2_first_keys_normed_as_queries=("another norm's weights", ("blocks.0.attn.k_norm", "blocks.0.attn")),
    dinov2_last_swiglu_slope_lacks_a_term=("wrong slope", ("blocks.2.mlp.act", "blocks.2.mlp"), GRADIENTS),
    dinov2_head_norm_over_class_and_mean_each_by_itself=("a norm over other groups", "fc_norm"),
    dinov2_registers_counted_in_the_mean_of_patches=("more counted in a mean", ""),
)
