"""Ports of a small conformer: time first, stacked feed-forwards, distances of all pairs, taps one by one."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._eighth_conformer import BLOCKS, HEADS, TAPS, WIDTH, Block, Conformer, said, speech
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

conformer = few("eighth_conformer", Conformer, speech, said)
SIZE = WIDTH // HEADS


class Layer(nn.Module):
    """The weights of a block and what is done with them, on [T, N, C]."""

    def __init__(self, block: Block, fault: str):
        super().__init__()
        self.fault = fault
        feeds, at, conv = (block.feed1, block.feed2), block.attention, block.conv
        norms = [feeds[0].norm, at.norm, conv.norm, feeds[1].norm, block.norm]
        self.gains, self.offsets = pile(n.weight for n in norms), pile(n.bias for n in norms)
        self.wi, self.bi = pile(f.up.weight.T for f in feeds), pile(f.up.bias for f in feeds)
        self.wo, self.bo = pile(f.down.weight.T for f in feeds), pile(f.down.bias for f in feeds)
        by_head = [each.weight.T.unflatten(1, (HEADS, SIZE)) for each in (at.q, at.k, at.v)]
        self.qkv, self.far = leaf(torch.stack(by_head, 2)), leaf(at.p.weight.T.unflatten(1, (HEADS, SIZE)))
        self.lean = pile([at.by_content, at.by_place])
        self.mix, self.mix_b = leaf(at.out.weight.T.unflatten(0, (HEADS, SIZE))), leaf(at.out.bias)
        self.gated, self.gated_b = leaf(conv.enter.weight[..., 0].T), leaf(conv.enter.bias)
        self.taps = leaf(conv.depthwise.weight[:, 0].T)
        self.scale, self.shift = leaf(conv.batch_norm.weight), leaf(conv.batch_norm.bias)
        self.register_buffer("center", conv.batch_norm.running_mean.clone())
        self.register_buffer("spread", conv.batch_norm.running_var.clone())
        self.point, self.point_b = leaf(conv.leave.weight[..., 0].T), leaf(conv.leave.bias)

    def level(self, i: int, x: Tensor) -> Tensor:
        """The layer norm of that number."""
        x = x - x.mean(-1, keepdim=True)
        return x * ((x * x).mean(-1, keepdim=True) + 1e-5).rsqrt() * self.gains[i] + self.offsets[i]

    def feed(self, i: int, x: Tensor) -> Tensor:
        h = x @ self.wi[i] + self.bi[i]
        return (h * h.sigmoid()) @ self.wo[i] + self.bo[i]

    def attend(self, x: Tensor, sines: Tensor, real: Tensor) -> Tensor:
        q, k, v = torch.einsum("tnc,chgd->gtnhd", x, self.qkv)
        places = torch.einsum("qkc,chd->qkhd", sines, self.far)
        if self.fault == "last_distances_from_key_to_query":
            places = places.transpose(0, 1)
        scores = torch.einsum("qnhd,knhd->hqkn", q + self.lean[0], k)
        scores = scores + torch.einsum("qnhd,qkhd->hqkn", q + self.lean[1], places)
        weights = (scores * SIZE**-0.5 + torch.where(real, 0.0, -1e9)).softmax(2)
        return torch.einsum("hqkn,knhd,hdc->qnc", weights, v, self.mix) + self.mix_b

    def normed(self, x: Tensor, real: Tensor) -> Tensor:
        """By the statistics of the real frames."""
        center, spread = self.center, self.spread
        if self.training:
            share = real[..., None].to(x) / real.sum()
            center = (share * x).sum((0, 1))
            spread = (share * (x - center) ** 2).sum((0, 1))
            rate = 0.01 if self.fault == "last_kept_statistics_at_the_pace_of_keras" else 0.1
            with torch.no_grad():
                self.center += rate * (center - self.center)
                self.spread += rate * (spread / (1 - 1 / real.sum().to(x)) - self.spread)
        return (x - center) / (spread + 1e-5).sqrt() * self.scale + self.shift

    def convolve(self, x: Tensor, real: Tensor) -> Tensor:
        x, gate = (x @ self.gated + self.gated_b).tensor_split(2, 2)
        x = x / (1 + (-gate).exp())
        if self.fault != "first_filler_heard_by_its_neighbours":
            x = torch.where(real[..., None], x, 0.0)
        x = F.pad(x, (0, 0, 0, 0, TAPS // 2, TAPS // 2)).unfold(0, TAPS, 1)
        x = self.normed(torch.einsum("tnck,kc->tnc", x, self.taps), real)
        return (x * x.sigmoid()) @ self.point + self.point_b

    def forward(self, x: Tensor, sines: Tensor, real: Tensor) -> Tensor:
        step = 1.0 if self.fault == "last_block_opens_with_a_full_step" else 0.5
        x = x + step * self.feed(0, self.level(0, x))
        x = x + self.attend(self.level(1, x), sines, real)
        x = x + self.convolve(self.level(2, x), real)
        return self.level(4, x + self.feed(1, self.level(3, x)) / 2)


class TimeFirst(Port):
    """Everything as [T, N, C]; a distance for each pair in place of shifted rows."""

    def take(self, model: Conformer) -> None:
        conv, fc = model.front.conv, model.front.fc
        self.look, self.look_b = leaf(conv.weight.permute(2, 1, 0).flatten(0, 1)), leaf(conv.bias)
        self.lift, self.lift_b = leaf(fc.weight.T), leaf(fc.bias)
        here = [self.fault if self.fault.startswith(end) else "" for end in ("first", "last")]
        self.layers = nn.ModuleList(
            Layer(block, fault) for block, fault in zip(model.blocks, here, strict=True)
        )
        sayers = (model.guess.say, model.head)
        self.say, self.say_b = pile(s.weight.T for s in sayers), pile(s.bias for s in sayers)
        self.tell, self.tell_b = leaf(model.guess.tell.weight.T), leaf(model.guess.tell.bias)
        self.who, self.who_b = leaf(model.voice.fc.weight.T), leaf(model.voice.fc.bias)

    def sines(self, x: Tensor) -> Tensor:
        """Of each pair's distance: [T, T, C]."""
        steps, channels = torch.arange(len(x)).to(x), torch.arange(WIDTH).to(x)
        rates = 50.0 ** (-2 * (channels // 2) / WIDTH)
        angles = (steps[:, None] - steps)[..., None] * rates
        return torch.where(channels % 2 == 0, angles.sin(), angles.cos())

    def voice(self, x: Tensor, real: Tensor) -> Tensor:
        real, counts = real[..., None], real.sum(0)[:, None]
        mean = torch.where(real, x, 0.0).sum(0) / counts
        if self.fault == "spread_of_a_voice_with_correction":
            counts = counts - 1
        spread = torch.where(real, x - mean, 0.0).square().sum(0) / counts
        return mean @ self.who[:WIDTH] + (spread + 1e-5).sqrt() @ self.who[WIDTH:] + self.who_b

    def forward(self, frames: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        x = F.pad(frames.transpose(0, 1), (0, 0, 0, 0, 1, 1))
        x = F.silu(torch.cat([x[:-2:2], x[1:-1:2], x[2::2]], 2) @ self.look + self.look_b)
        x = x @ self.lift + self.lift_b
        real = 2 * torch.arange(len(x), device=x.device)[:, None] < lengths
        sines, heard = self.sines(x), []
        for i in range(BLOCKS):
            x = self.layers[i](x, sines, real)
            heard.append(x @ self.say[i] + self.say_b[i])
            if i == 0:
                odds = heard[0].exp() / heard[0].exp().sum(2, keepdim=True)
                if self.fault == "guess_told_without_its_gradient":
                    odds = odds.detach()
                x = x + odds @ self.tell + self.tell_b
        guess, sounds = (torch.where(real[..., None], y, 0.0).transpose(0, 1) for y in heard)
        return {"sounds": sounds, "guess": guess, "voice": self.voice(x, real)}


right(conformer, "conformer_with_time_first", "stacked weights, pairs in place of shifted rows", TimeFirst)
wrong(
    conformer,
    TimeFirst,
    last_block_opens_with_a_full_step=("wrong scale of a residual", "blocks.1"),
    last_distances_from_key_to_query=("wrong sign of a distance", "blocks.1.attention"),
    first_filler_heard_by_its_neighbours=("padding counted in a convolution", "blocks.0.conv"),
    spread_of_a_voice_with_correction=("wrong count in a variance", "voice"),
    guess_told_without_its_gradient=("a detach too many", "guess", ("input gradient", "weight gradient")),
    last_kept_statistics_at_the_pace_of_keras=("momentum", "blocks.1.conv.batch_norm", "buffer"),
)
