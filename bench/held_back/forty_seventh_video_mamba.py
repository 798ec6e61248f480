"""Two ports of a small VideoMamba: a tree of directions that never flip, and flat code with prefix scans."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _forty_seventh_video_mamba as known
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("forty_seventh_video_mamba", known.VideoMamba, known.drifting, known.third_of_cross_entropy)
PATCH, PARTS = known.PATCH, [known.RANK, known.STATE, known.STATE]


def both(mixer: nn.Module) -> list[tuple]:
    one = mixer.conv1d, mixer.x_proj, mixer.dt_proj, mixer.A_log, mixer.D
    return [one, (mixer.conv1d_b, mixer.x_proj_b, mixer.dt_proj_b, mixer.A_b_log, mixer.D_b)]


class Scale(nn.Module):
    def __init__(self, norm: nn.Module):
        super().__init__()
        self.gain, self.eps, self.silent = leaf(norm.weight), norm.eps, False

    def forward(self, x: Tensor) -> Tensor:
        root = (x.square().mean(-1, True) + self.eps).sqrt()
        return x / (root.detach() if self.silent else root) * self.gain


class Walk(nn.Module):
    def __init__(self, parts: tuple, backwards: bool):
        super().__init__()
        conv, ask, step, log, skip = parts
        self.backwards, self.turned = backwards, backwards
        self.taps, self.offset = leaf(conv.weight[:, 0]), leaf(conv.bias)
        self.coarse, self.write, self.read = map(leaf, ask.weight.T.split(PARTS, 1))
        self.fine, self.pace, self.log, self.skip = map(leaf, (step.weight.T, step.bias, log, skip))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        order, edge = range(x.shape[1]), (0, known.KERNEL - 1) if self.backwards else (known.KERNEL - 1, 0)
        windows = F.pad(x, (0, 0, *edge)).unfold(1, known.KERNEL, 1)
        x = F.silu((windows * (self.taps.flip(1) if self.turned else self.taps)).sum(-1) + self.offset) * keep
        pace = F.softplus(x @ self.coarse @ self.fine + self.pace)
        write, read, found = x @ self.write, x @ self.read, {}
        state, rate = x.new_zeros(len(x), *self.log.shape), self.log.exp()
        for t in reversed(order) if self.backwards else order:
            now = pace[:, t, :, None]
            state = state * (-now * rate).exp() + now * x[:, t, :, None] * write[:, t, None]
            found[t] = (state @ read[:, t, :, None]).squeeze(-1)
        return torch.stack([found[t] for t in order], 1) + self.skip * x


class Selective(nn.Module):
    def __init__(self, mixer: nn.Module):
        super().__init__()
        self.value, self.gate = map(leaf, mixer.in_proj.weight.T.chunk(2, 1))
        self.ahead, self.back = (Walk(parts, bool(i)) for i, parts in enumerate(both(mixer)))
        self.out = leaf(mixer.out_proj.weight.T)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        x = x * keep
        value = x @ self.value
        return ((self.ahead(value, keep) + self.back(value, keep)) * F.silu(x @ self.gate)) @ self.out


class Ringing(nn.Module):
    def __init__(self, mixer: nn.Module):
        super().__init__()
        kernel, last = mixer.kernel, mixer.output_linear[0]
        self.real, self.imag = map(leaf, kernel.C.unbind(-1))
        self.step, self.damp, self.turn = leaf(kernel.log_dt), leaf(kernel.log_A_real), leaf(kernel.A_imag)
        self.skip, self.euler = leaf(mixer.D), False
        self.last, self.lift = leaf(last.weight[..., 0].T), leaf(last.bias)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        x, places = x * keep, torch.arange(x.shape[1])
        step = self.step.exp()[:, None]
        pole = torch.complex(-self.damp.exp(), self.turn)
        hold = step if self.euler else torch.expm1(step * pole) / pole
        first = 2 * torch.complex(self.real, self.imag) * hold
        waves = (first[..., None] * torch.exp((step * pole)[..., None] * places)).sum(1).real
        lag = places[:, None] - places
        y = torch.einsum("dts,nsd->ntd", waves[:, lag.clamp(min=0)] * (lag >= 0), x)
        return F.glu(F.gelu(y + self.skip * x) @ self.last + self.lift)


class MambaOfWalks(Port):
    def take(self, model: known.VideoMamba) -> None:
        proj, (one, two, three) = model.patch_embed.proj, model.layers
        self.cut, self.base = leaf(proj.weight[:, :, 0]), leaf(proj.bias)
        self.spot, self.moment = leaf(model.pos_embed[0]), leaf(model.temporal_pos_embedding[0])
        self.norms = nn.ModuleList(Scale(x.norm) for x in model.layers)
        self.mixers = nn.ModuleList([Selective(one.mixer), Ringing(two.mixer), Selective(three.mixer)])
        self.last, self.classes = Scale(model.norm_f), model.head
        unturned = "video_mamba_first_backward_convolution_keeps_its_kernel_unturned"
        self.mixers[0].back.turned = self.fault != unturned
        self.mixers[1].euler = self.fault == "video_mamba_s4d_kernel_by_euler_for_zero_order_hold"
        self.last.silent = self.fault == "video_mamba_last_norm_takes_its_root_for_a_constant"

    def forward(self, video: Tensor, frames: Tensor) -> Tensor:
        x = video.unfold(3, PATCH[0], PATCH[0]).unfold(4, PATCH[1], PATCH[1])
        x = (torch.einsum("ncthwij,dcij->nthwd", x, self.cut) + self.base).flatten(1, 3)
        count, grid = len(self.moment), len(self.spot)
        tiled = self.fault == "video_mamba_temporal_positions_tiled_over_the_patches"
        moment = self.moment.repeat(grid, 1) if tiled else self.moment.repeat_interleave(grid, 0)
        x = x + self.spot.repeat(count, 1) + moment
        keep = frames[:, :, None].expand(-1, -1, grid).flatten(1)[..., None].to(x)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(norm(x), keep)
        return self.classes((self.last(x) * keep / keep.sum(1, True)).sum(1))


def prefix(decay: Tensor, x: Tensor) -> Tensor:
    """All states of a linear recurrence over [..., L, D, N], by doubling the span that each one covers."""
    span, length = 1, x.shape[-3]
    while span < length:
        before, early = (F.pad(a, (0, 0, 0, 0, span, 0))[..., :length, :, :] for a in (decay, x))
        decay, x, span = decay * before, x + decay * early, 2 * span
    return x


class PackedMamba(Port):
    def take(self, model: known.VideoMamba) -> None:
        proj, (one, ring, two) = model.patch_embed.proj, model.layers
        mixers, ways = (one.mixer, two.mixer), [x for m in (one, two) for x in both(m.mixer)]
        self.spot, self.moment = leaf(model.pos_embed), leaf(model.temporal_pos_embedding)
        self.gains = pile([*(x.norm.weight for x in model.layers), model.norm_f.weight])
        self.ins, self.outs = pile(m.in_proj.weight for m in mixers), pile(m.out_proj.weight for m in mixers)
        self.conv = pile(torch.cat([w[0].weight[:, 0], w[0].bias[:, None]], 1) for w in ways)
        self.ask = pile(w[1].weight for w in ways)
        self.pace = pile(torch.cat([w[2].weight, w[2].bias[:, None]], 1) for w in ways)
        self.scan = pile(torch.cat([w[3], w[4][:, None]], 1) for w in ways)
        kernel, ends = ring.mixer.kernel, (proj, ring.mixer.output_linear[0], model.head)
        self.modes = pile([*kernel.C.unbind(-1), kernel.log_A_real, kernel.A_imag])
        self.steps = pile([kernel.log_dt, ring.mixer.D])
        rows = (leaf(torch.cat([m.weight.flatten(1), m.bias[:, None]], 1)) for m in ends)
        self.cut, self.mix, self.head = rows

    def norm(self, x: Tensor, i: int) -> Tensor:
        eps = 1e-3 if self.fault == "video_mamba_second_norm_with_a_larger_epsilon" and i == 1 else 1e-5
        return x * self.gains[i] * (x.square().sum(-1, True) / x.shape[-1] + eps) ** -0.5

    def select(self, i: int, x: Tensor, keep: Tensor) -> Tensor:
        packs = self.conv, self.ask, self.pace, self.scan
        conv, ask, pace, scan = (w[2 * i : 2 * i + 2, None] for w in packs)
        x, gate = ((x * keep) @ self.ins[i].T).tensor_split(2, -1)
        x, keep = (torch.stack([a, a.flip(1)]) for a in (x, keep))
        x = F.pad(x, (0, 0, known.KERNEL - 1, 0)).unfold(2, known.KERNEL, 1)
        x = F.silu(torch.einsum("snldk,sdk->snld", x, conv[:, 0, :, :-1]) + conv[:, :, None, :, -1])
        if not (self.fault == "video_mamba_third_block_fills_padding_after_its_convolution" and i == 1):
            x = x * keep
        dt, write, read = (x @ ask.mT).split(PARTS, -1)
        dt = F.softplus(dt @ pace[..., :-1].mT + pace[:, :, None, :, -1])[..., None]
        if self.fault == "video_mamba_first_block_takes_its_steps_for_constants" and i == 0:
            dt = dt.detach()
        given = dt * x[..., None] * write[..., None, :]
        states = prefix(torch.exp(-scan[:, :, None, :, :-1].exp() * dt), given)
        y = (states * read[..., None, :]).sum(-1) + x * scan[:, :, None, :, -1]
        return ((y[0] + y[1].flip(1)) * F.silu(gate)) @ self.outs[i].T

    def ring(self, x: Tensor, keep: Tensor) -> Tensor:
        x, (real, imag, damp, turn) = x * keep, self.modes
        decay = ((pole := torch.complex(-damp.exp(), turn)) * self.steps[0].exp()[:, None]).exp()
        held = prefix(decay.expand(1, x.shape[1], -1, -1), x[..., None].to(decay))
        y = 2 * (held * (torch.complex(real, imag) * (decay - 1) / pole)).sum(-1).real
        return F.glu(F.gelu(y + x * self.steps[1]) @ self.mix[:, :-1].T + self.mix[:, -1])

    def forward(self, video: Tensor, frames: Tensor) -> Tensor:
        x = F.unfold(video.transpose(1, 2).flatten(0, 1), PATCH, stride=PATCH).mT @ self.cut[:, :-1].T
        x = x.unflatten(0, frames.shape) + self.cut[:, -1] + self.spot[:, None] + self.moment[:, :, None]
        keep = frames.to(x)[:, :, None, None].expand(*x.shape[:3], 1).flatten(1, 2)
        x = (x := x.flatten(1, 2)) + self.select(0, self.norm(x, 0), keep)
        x = x + self.ring(self.norm(x, 1), keep)
        x = self.norm(x + self.select(1, self.norm(x, 2), keep), 3)
        count = keep.sum(1)
        if self.fault == "video_mamba_pool_counts_padding_in_evaluation" and not self.training:
            count = torch.full_like(count, x.shape[1])
        return (keep.mT @ x)[:, 0] / count @ self.head[:, :-1].T + self.head[:, -1]


SLOPES = ("input gradient", "weight gradient")
right(task, "video_mamba_of_walks_without_flips", "a tree, split weights, a matrix for the FFT", MambaOfWalks)
right(task, "video_mamba_of_packed_weights", "packed stacks, prefix scans, both ways at once", PackedMamba)
wrong(
    task,
    MambaOfWalks,
    video_mamba_temporal_positions_tiled_over_the_patches=("another token order", ""),
    video_mamba_first_backward_convolution_keeps_its_kernel_unturned=("flip", "layers.0.mixer.conv1d_b"),
    video_mamba_s4d_kernel_by_euler_for_zero_order_hold=("discretisation", "layers.1.mixer.kernel"),
    video_mamba_last_norm_takes_its_root_for_a_constant=("detach", "norm_f", SLOPES),
)
wrong(
    task,
    PackedMamba,
    video_mamba_first_block_takes_its_steps_for_constants=("detach", "layers.0.mixer", SLOPES),
    video_mamba_second_norm_with_a_larger_epsilon=("epsilon", "layers.1.norm"),
    video_mamba_third_block_fills_padding_after_its_convolution=("mask left out", "layers.2.mixer"),
    video_mamba_pool_counts_padding_in_evaluation=("a padded count in eval", "", "eval"),
)
