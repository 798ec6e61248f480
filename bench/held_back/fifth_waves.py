"""A WaveNet by taps and by queues, and N-BEATS with all its coefficients in one weight."""

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.case import method_of
from bench.held_back._fifth_ports import SAME, gently, pairs
from bench.held_back._fifth_waves import Beats, Gate, Grid, Wave, beats, wave
from bench.held_back._fourth_ports import Port, leaf, pile, wrong


class Taps(Port):
    """Channels last; each tap a product, both ways out in one, the skips summed at the end."""

    dilations = (1, 2, 4, 8, 1)

    def take(self, model: Wave) -> None:
        self.table = leaf(model.enter.weight)
        self.taps = pile(layer.dilated.weight.permute(2, 1, 0) for layer in model.layers)
        self.tap_shifts = pile(layer.dilated.bias for layer in model.layers)
        self.out = pile(torch.cat([y.on.weight, y.skip.weight])[..., 0].T for y in model.layers)
        self.out_shifts = pile(torch.cat([y.on.bias, y.skip.bias]) for y in model.layers)
        self.join, self.join_shift = leaf(model.join.weight[..., 0]), leaf(model.join.bias)
        self.leave, self.leave_shift = leaf(model.leave.weight[..., 0]), leaf(model.leave.bias)

    def gated(self, i: int, past: Tensor, now: Tensor) -> tuple[Tensor, Tensor]:
        """What goes on, without what it is added to, and what goes to the sum."""
        h = past @ self.taps[i, 0] + now @ self.taps[i, 1] + self.tap_shifts[i]
        value, gate = h.tensor_split(2, -1)
        on, skip = (value.tanh() / (1 + (-gate).exp()) @ self.out[i] + self.out_shifts[i]).split(12, -1)
        return on, skip

    def layers(self, x: Tensor) -> list[Tensor]:
        skips = []
        for i, dilation in enumerate(self.dilations):
            if self.fault == "last_dilation_not_reset" and i == 4:
                dilation = 16
            past = F.pad(x, (0, 0, dilation, 0))[:, : x.shape[1]]
            on, skip = self.gated(i, past, x)
            x = x + on
            skips.append(skip)
        return skips

    def sums(self, x: Tensor) -> Tensor:
        return torch.stack(self.layers(x)).sum(0)

    def forward(self, samples: Tensor) -> Tensor:
        h = self.sums(self.table[samples]).relu()
        h = F.linear(h, self.join, self.join_shift).relu()
        return F.linear(h, self.leave, self.leave_shift).mT


class Queues(Taps):
    """Step by step, each layer with a queue of what it has been given."""

    def sums(self, x: Tensor) -> Tensor:
        queues, y = [[torch.zeros_like(x[:, 0])] * dilation for dilation in self.dilations], []
        if self.fault == "queue_one_step_short":
            queues[2].pop()
        for now in x.unbind(1):
            total = 0.0
            for i, queue in enumerate(queues):
                queue.append(now)
                past = queue.pop(0)
                on, skip = self.gated(i, past, now)
                now, total = now + on, total + skip
            y.append(total)
        return torch.stack(y, 1)


class Coefficients(Port):
    """All layers stacked, past and future made in one product; each grid reaches from past to future."""

    def take(self, model: Beats) -> None:
        for name, layer in (("first", 0), ("second", 2)):
            layers = [block.mlp[layer] for block in model.blocks]
            setattr(self, name, pile(f.weight.T for f in layers))
            setattr(self, name + "_shift", pile(f.bias for f in layers))
        self.theta = leaf(torch.cat([block.theta.weight for block in model.blocks]))

    def grids(self, like: Tensor) -> list[Tensor]:
        past, future = (torch.arange(n).to(like) / n for n in (12, 4))
        made = []
        for time in (past, future):
            trend = torch.stack([torch.ones_like(time), time, time * time])
            turns = 2 * torch.pi * torch.outer(torch.tensor([1.0, 2.0]).to(like), time)
            made.append((trend, torch.cat([turns.cos(), turns.sin()])))
        return [torch.block_diag(*pair) for pair in zip(*made, strict=True)]

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        trend, waves = self.grids(x)
        total = torch.zeros_like(x[:, :4])
        for i, theta in enumerate(self.theta.split([6, 6, 8, 8])):
            h = (x @ self.first[i] + self.first_shift[i]).relu()
            h = (h @ self.second[i] + self.second_shift[i]).relu()
            back, ahead = (h @ theta.T @ (trend if i < 2 else waves)).split([12, 4], 1)
            x = x + back if self.fault == "explained_past_added" and i == 0 else x - back
            total = total + ahead
        return {"ahead": total, "left": x}


pairs(SAME, wave, Taps, waves_by_taps="another layout, taps as products")
pairs(SAME, wave, Queues, waves_by_queues="step by step with queues")
wrong(
    wave,
    Taps,
    last_dilation_not_reset=("another dilation", "layers.4.dilated"),
)
wrong(wave, Queues, queue_one_step_short=("off by one", "layers.2.dilated"))
pairs(SAME, beats, Coefficients, {"optimizer": gently}, coefficients_in_one_weight="all layers stacked")
pairs("bug", beats, Coefficients, {"optimizer": gently}, explained_past_added=("wrong sign", ""))


@method_of("layers.3", "bug", "another tensor taken", wave)
def skip_after_the_residual(self: Gate, x: Tensor) -> tuple[Tensor, Tensor]:
    value, gate = self.dilated(F.pad(x, (self.dilated.dilation[0], 0))).chunk(2, 1)
    x = x + self.on(value.tanh() * gate.sigmoid())
    return x, self.skip(x)


@method_of("blocks.1.grid", "bug", "grid that includes its end", beats, method="rows", optimizer=gently)
def trend_to_the_very_end(self: Grid, length: int, like: Tensor) -> Tensor:
    return torch.linspace(0, 1, length, dtype=like.dtype) ** torch.arange(3).to(like)[:, None]
