"""Two ports of a small RepVGG: a chain with the channels last that fuses its branches, and packed sheets."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, Rows, leaf, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._thirty_eighth_rep_vgg import RepVGG, RepVGGBlock, quarter, stripes

task = few("thirty_eighth_rep_vgg", RepVGG, stripes, quarter)


def blocks(model: RepVGG) -> list[RepVGGBlock]:
    return [model.stage0, *model.stage1, *model.stage2, *model.stage3]


def folded(norm: Rows, meanless: bool = False) -> tuple[Tensor, Tensor]:
    """The factor and the summand of a norm by its running statistics."""
    factor = norm.scale / (norm.spread + norm.eps).sqrt()
    return factor, norm.shift if meanless else norm.shift - norm.center * factor


class Branches(nn.Module):
    """[N, H, W, C] -> the sum of the branches; in evaluation one kernel [groups, O, C, 3, 3] does it all."""

    def __init__(self, block: RepVGGBlock):
        super().__init__()
        self.stride, self.meanless = block.stride, False
        wide, point = (
            x.conv.weight.unflatten(0, (block.groups, -1)) for x in (block.rbr_dense, block.rbr_1x1)
        )
        self.wide, self.point = leaf(wide), leaf(point[..., 0, 0])
        self.wide_norm, self.point_norm = Rows(block.rbr_dense.bn), Rows(block.rbr_1x1.bn)
        self.skip_norm = None if block.rbr_identity is None else Rows(block.rbr_identity)

    def windows(self, x: Tensor, kernel: Tensor) -> Tensor:
        x = F.pad(x, (0, 0, 1, 1, 1, 1)).unfold(1, 3, self.stride).unfold(2, 3, self.stride)
        return torch.einsum("nhwgcij,gocij->nhwgo", x.unflatten(3, (len(kernel), -1)), kernel).flatten(3)

    def fused(self) -> tuple[Tensor, Tensor]:
        shape = self.point.shape[:2]
        factor, total = folded(self.wide_norm)
        kernel = self.wide * factor.view(*shape, 1, 1, 1)
        factor, shift = folded(self.point_norm, self.meanless)
        middle, total = self.point * factor.view(*shape, 1), total + shift
        if self.skip_norm is not None:
            factor, shift = folded(self.skip_norm)
            middle, total = middle + factor.view(shape).diag_embed(), total + shift
        return kernel + F.pad(middle[..., None, None], (1, 1, 1, 1)), total

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            kernel, total = self.fused()
            return self.windows(x, kernel) + total
        grid = x[:, :: self.stride, :: self.stride].unflatten(3, (len(self.point), -1))
        y = self.point_norm(torch.einsum("nhwgc,goc->nhwgo", grid, self.point).flatten(3))
        if self.skip_norm is not None:
            y = y + self.skip_norm(x)
        return y + self.wide_norm(self.windows(x, self.wide))


class Gate(nn.Module):
    """Rectified values by a share of each channel, which the values before that give."""

    def __init__(self, se: nn.Module):
        super().__init__()
        self.down, self.low = leaf(se.down.weight.flatten(1).T), leaf(se.down.bias)
        self.up, self.high = leaf(se.up.weight.flatten(1).T), leaf(se.up.bias)
        self.silent = self.hard = False

    def forward(self, x: Tensor) -> Tensor:
        seen = (x.detach() if self.silent else x).mean((1, 2), True)
        share = (seen @ self.down + self.low).relu() @ self.up + self.high
        return x.relu() * (F.hardsigmoid(share) if self.hard else 1 / (1 + (-share).exp()))


class RepVGGInAChain(Port):
    """Branches and what follows them in one row, the channels last; one fused kernel in evaluation."""

    def take(self, model: RepVGG) -> None:
        self.chain = nn.Sequential()
        for block in blocks(model):
            gated = not isinstance(block.se, nn.Identity)
            self.chain.extend([Branches(block), Gate(block.se) if gated else nn.ReLU()])
        self.read, self.offset = leaf(model.linear.weight.T), leaf(model.linear.bias)
        if self.fault == "rep_vgg_first_identity_norm_with_the_epsilon_of_keras":
            self.chain[4].skip_norm.eps = 1e-3
        self.chain[5].silent = self.fault == "rep_vgg_first_squeeze_reads_a_detached_map"
        self.chain[10].meanless = self.fault == "rep_vgg_fused_kernel_forgets_the_mean_of_a_point_norm"
        self.chain[15].hard = self.fault == "rep_vgg_last_gate_is_a_hard_sigmoid"

    def forward(self, x: Tensor) -> Tensor:
        return self.chain(x.movedim(1, 3)).mean((1, 2)) @ self.read + self.offset


def sheet(block: RepVGGBlock) -> Tensor:
    """A row for each channel: both kernels, then the gain and the shift of each norm."""
    norms = [block.rbr_dense.bn, block.rbr_1x1.bn, block.rbr_identity]
    ends = [torch.stack([x.weight, x.bias], 1) for x in norms if x is not None]
    kernels = (x.conv.weight.flatten(1) for x in (block.rbr_dense, block.rbr_1x1))
    return torch.cat([*kernels, *ends], 1)


class RepVGGOfSheets(Port):
    """Products of patches with packed sheets; the norms of a block's branches are one."""

    def take(self, model: RepVGG) -> None:
        self.sheets, self.gates, self.form = nn.ParameterList(), nn.ParameterDict(), []
        for i, block in enumerate(blocks(model)):
            norms = [block.rbr_dense.bn, block.rbr_1x1.bn, block.rbr_identity]
            kept = [torch.stack([x.running_mean, x.running_var]) for x in norms if x is not None]
            self.register_buffer(f"kept_{i}", torch.stack(kept, 1))
            self.sheets.append(leaf(sheet(block)))
            self.form.append((block.stride, block.groups))
            if not isinstance(block.se, nn.Identity):
                down, up = block.se.down, block.se.up
                packed = down.weight.flatten(1), up.weight.flatten(1).T, down.bias[:, None]
                self.gates[f"inner_{i}"], self.gates[f"outer_{i}"] = leaf(torch.cat(packed, 1)), leaf(up.bias)
        self.head = leaf(torch.cat([model.linear.weight, model.linear.bias[:, None]], 1))

    def normed(self, i: int, z: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
        """[branches, N, C, L], each branch and channel by its own statistics."""
        kept = self.get_buffer(f"kept_{i}")
        mean, var = kept
        if self.training:
            count = z.shape[1] * z.shape[3]
            mean = z.mean((1, 3))
            if self.fault == "rep_vgg_last_identity_norm_takes_its_mean_for_a_constant" and i == 7:
                mean = torch.cat([mean[:2], mean[2:].detach()])
            var = (z - mean[:, None, :, None]).square().mean((1, 3))
            with torch.no_grad():
                kept.mul_(0.9).add_(0.1 * torch.stack([mean, var * count / (count - 1)]))
        factor = gain / (var + 1e-5).sqrt()
        return z * factor[:, None, :, None] + (shift - mean * factor)[:, None, :, None]

    def block(self, i: int, x: Tensor) -> Tensor:
        (stride, groups), rows = self.form[i], self.sheets[i]
        inner = x.shape[1] // groups
        wide, point, ends = rows.split([9 * inner, inner, rows.shape[1] - 10 * inner], 1)
        before = 0 if self.fault == "rep_vgg_last_downsampling_padded_as_in_tensorflow" and i == 6 else 1
        patches = F.unfold(F.pad(x, (before, 2 - before) * 2), 3, stride=stride).unflatten(1, (groups, -1))
        if self.fault == "rep_vgg_groups_of_a_dense_kernel_interleaved" and i == 4:
            patches = patches.unflatten(2, (-1, 9)).flatten(1, 2).unflatten(1, (-1, groups)).transpose(1, 2)
            patches = patches.flatten(2, 3)
        start = 1 if self.fault == "rep_vgg_stem_point_kernel_starts_at_the_second_pixel" and i == 0 else 0
        grid = x[:, :, start::stride, start::stride]
        pixels = grid.flatten(2).unflatten(1, (groups, -1))
        z = [(y.unflatten(0, (groups, -1)) @ p).flatten(1, 2) for y, p in ((wide, patches), (point, pixels))]
        if ends.shape[1] == 6:
            z.append(x.flatten(2))
        y = self.normed(i, torch.stack(z), ends.T[::2], ends.T[1::2]).sum(0)
        if f"inner_{i}" in self.gates:
            packed, outer = self.gates[f"inner_{i}"], self.gates[f"outer_{i}"]
            down, up, low = packed.tensor_split([y.shape[1], 2 * y.shape[1]], 1)
            y = y * ((down @ y.mean(2, True) + low).clamp(min=0).mT @ up + outer).sigmoid().mT
        return y.clamp(min=0).unflatten(2, grid.shape[2:])

    def forward(self, x: Tensor) -> Tensor:
        for i in range(len(self.sheets)):
            x = self.block(i, x)
        return F.linear(x.flatten(2).mean(2), self.head[:, :-1], self.head[:, -1])


SLOPES = ("input gradient", "weight gradient")
right(task, "rep_vgg_in_a_chain_with_channels_last", "a tree, one fused kernel in evaluation", RepVGGInAChain)
right(task, "rep_vgg_of_packed_sheets", "packed stacks, products of patches, norms in one", RepVGGOfSheets)
wrong(
    task,
    RepVGGInAChain,
    rep_vgg_first_identity_norm_with_the_epsilon_of_keras=("another epsilon", "stage1.1.rbr_identity"),
    rep_vgg_first_squeeze_reads_a_detached_map=("detach", "stage1.1.se", SLOPES),
    rep_vgg_fused_kernel_forgets_the_mean_of_a_point_norm=("a term lost", "stage2.2.rbr_1x1.bn", "eval"),
    rep_vgg_last_gate_is_a_hard_sigmoid=("another activation", "stage3.1.se"),
)
wrong(
    task,
    RepVGGOfSheets,
    rep_vgg_stem_point_kernel_starts_at_the_second_pixel=("off by one", "stage0.rbr_1x1.conv"),
    rep_vgg_groups_of_a_dense_kernel_interleaved=("another channel order", "stage2.1.rbr_dense.conv"),
    rep_vgg_last_downsampling_padded_as_in_tensorflow=("another padding", "stage3.0.rbr_dense.conv"),
    rep_vgg_last_identity_norm_takes_its_mean_for_a_constant=("detach", "stage3.1.rbr_identity", SLOPES),
)
