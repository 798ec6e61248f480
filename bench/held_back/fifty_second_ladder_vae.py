"""Two ports of a small NVAE: a tree of floors with the channels last, and one class that reads a tape."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, distributions, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fifty_second_ladder_vae import LATENTS, AutoEncoder, Cell, bits, blobs
from bench.held_back._fourth_ports import Port, Rows, leaf, wrong
from bench.held_back._sixth_ports import few

task = few("fifty_second_ladder_vae", AutoEncoder, blobs, bits)


class Patch(nn.Module):
    def __init__(self, conv: nn.Conv2d):
        super().__init__()
        self.weight, self.offset = leaf(conv.weight), None if conv.bias is None else leaf(conv.bias)
        self.how = conv.stride, conv.padding, conv.dilation, conv.groups

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x.movedim(3, 1), self.weight, self.offset, *self.how).movedim(1, 3)


class Taller(nn.Upsample):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(3, 1)).movedim(1, 3)


class Smaller(nn.Module):
    def __init__(self, old: nn.Module, swapped: bool):
        super().__init__()
        self.parts = nn.ModuleList(Patch(x) for x in (old.conv_1, old.conv_2, old.conv_3, old.conv_4))
        self.corners = ((0, 0), (1, 1), (1, 0), (0, 1)) if swapped else ((0, 0), (1, 1), (0, 1), (1, 0))

    def forward(self, x: Tensor) -> Tensor:
        pairs = zip(self.parts, self.corners, strict=True)
        return torch.cat([f(F.silu(x[:, i:, j:])) for f, (i, j) in pairs], 3)


class Lift(nn.Module):
    def __init__(self, cell: Cell, fault: str = ""):
        super().__init__()
        layers = []
        for x in cell._ops.modules():
            if isinstance(x, nn.Conv2d):
                layers.append(Patch(x))
            elif isinstance(x, nn.BatchNorm2d):
                layers += [Rows(x), nn.SiLU()] if "Swish" in type(x).__name__ else [Rows(x)]
            elif type(x).__name__ == "UpSample":
                layers.append(Taller(None, 2, "bilinear", True))
        self.layers, self.past = nn.Sequential(*layers), nn.Identity()
        self.a, self.b, self.c, self.d = map(leaf, cell.se.parameters())
        self.silent = fault.endswith("detached")
        if cell.cell_type == "down_enc":
            self.past = Smaller(cell.skip, fault.endswith("swapped"))
        elif cell.cell_type == "up_dec":
            self.past = nn.Sequential(
                Patch(cell.skip[1]), Taller(None, 2, "bilinear", not fault.endswith("corners"))
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        gate = torch.sigmoid((y.mean((1, 2)) @ self.a.mT + self.b).clamp(min=0) @ self.c.mT + self.d) / 10
        return torch.addcmul(self.past(x), y, (gate.detach() if self.silent else gate)[:, None, None])


class LadderOfFloors(Port):
    def take(self, model: AutoEncoder) -> None:
        enc, dec, fault = model.enc_tower, model.dec_tower, self.fault
        self.low = nn.Sequential(Patch(model.stem), Lift(enc[0]))
        self.middle = nn.Sequential(Lift(enc[2], fault), Lift(enc[3]))
        self.top = nn.Sequential(Lift(enc[5]), nn.ELU(), Patch(model.enc0[1]), nn.ELU())
        self.start = leaf(model.prior_ftr0.movedim(0, 2))
        self.find = nn.ModuleList(map(Patch, model.enc_sampler))
        self.join = nn.ModuleList(Patch(dec[i].conv) for i in (0, 2, 4))
        rows = zip((1, 3), model.dec_sampler, (4, 1), strict=True)
        floors = ((Lift(dec[i], fault), Patch(guess[1]), Patch(enc[j].conv)) for i, guess, j in rows)
        self.floors = nn.ModuleList(map(nn.ModuleList, floors))
        self.end = nn.Sequential(Lift(model.post_process[0]), nn.ELU(), Patch(model.image_conditional[1]))

    def forward(self, x: Tensor, eps0: Tensor, eps1: Tensor, eps2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        low = self.low(2 * x.movedim(1, 3) - 1)
        middle, kl, s = self.middle(low), [], self.start.expand(len(x), -1, -1, -1)
        found = self.find[0](self.top(middle))
        guess = torch.zeros_like(found)
        for i, eps in enumerate((eps0, eps1, eps2)):
            if i > 0:
                down, expect, mix = self.floors[i - 1]
                s = down(s)
                guess, change = expect(F.elu(s)), self.find[i]((middle, low)[i - 1] + mix(s))
                found = guess + change
                if self.fault.endswith("not_relative_to_the_prior") and i == 1:
                    found = torch.cat([found[..., :LATENTS], change[..., LATENTS:]], 3)
            pairs = ((5 * (t / 5).tanh()).chunk(2, 3) for t in (found, guess))
            q, p = (distributions.Normal(m, t.exp() + 0.01, validate_args=False) for m, t in pairs)
            kl.append(distributions.kl_divergence(q, p).sum((1, 2, 3)))
            s = self.join[i](torch.cat([s, q.mean + q.stddev * eps.movedim(1, 3)], 3))
        y, kl = self.end(s).movedim(3, 1), torch.stack(kl, 1)
        share = (kl.detach().abs().mean(0) + 0.01) / kl.new_tensor([1, 1, 8])
        share = share / share.mean() if self.training else torch.ones_like(share)
        return y, ((F.softplus(y) - x * y).flatten(1).sum(1) + kl @ share) / (x[0].numel() * math.log(2)), kl


class TapedLadder(Port):
    def take(self, model: AutoEncoder) -> None:
        enc, dec, find, guess = model.enc_tower, model.dec_tower, model.enc_sampler, model.dec_sampler
        up = [model.stem, enc[0], enc[2], enc[3], enc[5], model.enc0, find[0], dec[0]]
        down = [dec[1], guess[0], enc[4], find[1], dec[2], dec[3], guess[1], enc[1], find[2], dec[4]]
        order = nn.ModuleList([*up, *down, model.post_process, model.image_conditional])
        weights = [model.prior_ftr0, *order.parameters()]
        norms = [x for x in order.modules() if isinstance(x, nn.BatchNorm2d)]
        self.shapes, self.widths = [x.shape for x in weights], [len(x.bias) for x in norms]
        self.tape = leaf(torch.cat([x.flatten() for x in weights]))
        kept = [torch.stack([x.running_mean, x.running_var]) for x in norms]
        self.register_buffer("kept", torch.cat(kept, 1))

    def conv(self, x: Tensor, bias: bool = True, **how: int) -> Tensor:
        kernel = next(self.w)
        return F.conv2d(x, kernel, next(self.w) if bias else None, padding=kernel.shape[2] // 2, **how)

    def norm(self, x: Tensor, rate: float = 0.05) -> Tensor:
        return F.batch_norm(x, *next(self.m), next(self.w), next(self.w), self.training, rate)

    def gated(self, past: Tensor, x: Tensor, by: float = 0.1) -> Tensor:
        a, b, c, d = (next(self.w) for _ in range(4))
        gate = F.linear(F.linear(x.mean((2, 3)), a, b).relu(), c, d).sigmoid()
        return past + by * gate[:, :, None, None] * x

    def climb(self, x: Tensor, i: int) -> Tensor:
        past, fault = x, self.fault
        if i == 1:
            corners = (x, x[:, :, 1:, 1:], x[..., 1:], x[:, :, 1:])
            past = torch.cat([self.conv(F.silu(t), stride=2) for t in corners], 1)
        rate = 0.95 if fault == "ladder_vae_norm_momentum_for_the_old_share" and i == 2 else 0.05
        x = self.conv(F.silu(self.norm(x, rate)), stride=1 + (i == 1))
        by = 1.0 if fault == "ladder_vae_first_cell_residual_not_scaled_by_a_tenth" and i == 0 else 0.1
        return self.gated(past, self.conv(F.silu(self.norm(x))), by)

    def sink(self, x: Tensor, i: int) -> Tensor:
        past = x
        if i == 1:
            x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True)
            past = self.conv(x)
        x = F.silu(self.norm(self.conv(self.norm(x), False)))
        turned = self.fault == "ladder_vae_last_depthwise_kernel_transposed" and i == 2
        kernel = next(self.w).transpose(2, 3) if turned else next(self.w)
        x = F.silu(self.norm(F.conv2d(x, kernel, padding=2, groups=len(kernel))))
        return self.gated(past, self.norm(self.conv(x, False)))

    def forward(self, x: Tensor, eps0: Tensor, eps1: Tensor, eps2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.w = map(Tensor.view, self.tape.split([s.numel() for s in self.shapes]), self.shapes)
        self.m, kls, ups = iter(self.kept.split(self.widths, 1)), [], []
        s, y = next(self.w).repeat(len(x), 1, 1, 1), self.conv(2 * x - 1)
        for i in range(4):
            ups.append(y := self.climb(y, i))
        found, guess = self.conv(F.elu(self.conv(F.elu(y)))), x.new_zeros(1, 2 * LATENTS, 1, 1)
        for i, eps in enumerate((eps0, eps1, eps2)):
            if i:
                s = self.sink(s, i - 1)
                cut = self.fault.endswith("reads_the_decoder_without_gradient") and i == 1
                guess, below = self.conv(F.elu(s)), s.detach() if cut else s
                found = guess + self.conv(ups[2 if i == 1 else 0] + self.conv(below))
            (m, a), (n, b) = ((5 * (t / 5).tanh()).chunk(2, 1) for t in (found, guess))
            a, b = a.exp() + 0.01, b.exp() + 0.01
            kls.append((((m - n).square() + a * a) / (2 * b * b) - 0.5 + (b / a).log()).flatten(1).sum(1))
            s = self.conv(torch.cat([s, m + a * eps], 1))
        y, kl = self.conv(F.elu(self.sink(s, 2))), torch.stack(kls, 1)
        self.w = self.m = None
        share = (kl.detach().mean(0) + 0.01) * kl.new_tensor([8, 8, 1])
        share = 3 * share / share.sum() if self.training else torch.ones_like(share)
        likely = (x * F.logsigmoid(y) + (1 - x) * F.logsigmoid(-y)).sum((1, 2, 3))
        return y, ((kl * share).sum(1) - likely) / x[0].numel() / math.log(2), kl


SLOPES = ("input gradient", "weight gradient")
right(task, "ladder_vae_of_floors_with_channels_last", "a tree of floors, channels last", LadderOfFloors)
right(task, "ladder_vae_read_from_a_tape", "all weights packed in one, channels first", TapedLadder)
wrong(
    task,
    LadderOfFloors,
    ladder_vae_reduction_rows_and_columns_swapped=("offsets swapped", "enc_tower.2.skip"),
    ladder_vae_second_posterior_log_sigma_not_relative_to_the_prior=("a term left out", ""),
    ladder_vae_decoder_gate_detached=("detach", "dec_tower.1.se", SLOPES),
    ladder_vae_upsampled_skip_without_aligned_corners=("another setting", "dec_tower.3.skip.0"),
)
wrong(
    task,
    TapedLadder,
    ladder_vae_first_cell_residual_not_scaled_by_a_tenth=("a factor left out", "enc_tower.0"),
    ladder_vae_norm_momentum_for_the_old_share=("another rate", "enc_tower.3._ops.0.bn_act", "buffer"),
    ladder_vae_first_combiner_reads_the_decoder_without_gradient=(
        "detach",
        ("enc_tower.4", "enc_tower.4.conv"),
        SLOPES,
    ),
    ladder_vae_last_depthwise_kernel_transposed=("a transposed kernel", "post_process.0._ops.0.conv.2.0"),
)
