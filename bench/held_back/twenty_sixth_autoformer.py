"""Two ports of a small Autoformer: stages over [N, D, T], and one class of sheets over [T, N, D]."""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, fft, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twenty_sixth_autoformer import FACTOR, FUTURE, LABEL, WINDOW, Autoformer, error, hours

task = few("twenty_sixth_autoformer", Autoformer, hours, error)


class Map(nn.Module):
    """A product of the channels of [N, D, T] by one weight made of several."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.weight = leaf(torch.cat([x.weight.flatten(1) for x in layers]))
        self.offset = 0 if layers[0].bias is None else leaf(torch.cat([x.bias for x in layers])[:, None])

    def forward(self, x: Tensor) -> Tensor:
        return self.weight @ x + self.offset


class Ring(Map):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.stack([x.roll(1, 2), x, x.roll(-1, 2)], 2).flatten(1, 2))


def smooth(x: Tensor, loose: bool = False) -> Tensor:
    """Differences of the running sum of a series whose ends are held; ``loose`` ones have no gradient."""
    edge = x.detach() if loose else x
    first, last = (edge[..., i, None].expand(-1, -1, WINDOW // 2) for i in (0, -1))
    held = F.pad(torch.cat([first, x, last], 2).cumsum(2), (1, 0))
    return (held[..., WINDOW:] - held[..., :-WINDOW]) / WINDOW


class Mix(nn.Module):
    """Means of scores along each wrapped diagonal choose the delays; the heads would all choose alike."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.ask, self.give = Map(layer.query_projection), Map(layer.out_projection)
        self.tell = Map(layer.key_projection, layer.value_projection)
        self.sign, self.together = 1, False

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        width, size = x.shape[1:]
        q, told, time = self.ask(x), self.tell(other), torch.arange(size, device=x.device)
        k, v = F.pad(told, (0, size - told.shape[2])).chunk(2, 1)
        likeness = (q.mT @ k)[:, (time[:, None] + time) % size, time].sum(2) / width
        judged = likeness.mean(0, True) if self.training or self.together else likeness
        best = judged.argsort(1, descending=True).expand(len(x), -1)[:, : int(FACTOR * math.log(size))]
        share = torch.zeros_like(likeness).scatter(1, best, likeness.gather(1, best).softmax(1))
        return self.give(v @ share[:, self.sign * (time[:, None] - time) % size])


class Stage(nn.Module):
    def __init__(self, work: nn.Module):
        super().__init__()
        self.work, self.loose = work, False

    def forward(self, x: Tensor, *other: Tensor) -> tuple[Tensor, Tensor]:
        slow = smooth(x := x + self.work(x, *other), self.loose)
        return x - slow, slow


def stages(layer: nn.Module, *mixes: nn.Module) -> nn.ModuleList:
    feed = nn.Sequential(Map(layer.conv1), nn.GELU(), Map(layer.conv2))
    return nn.ModuleList(map(Stage, (*map(Mix, mixes), feed)))


class Seasonal(nn.Module):
    def __init__(self, norm: nn.LayerNorm):
        super().__init__()
        self.gain, self.offset = leaf(norm.weight[:, None]), leaf(norm.bias[:, None])
        self.eps, self.centred = norm.eps, True

    def forward(self, x: Tensor) -> Tensor:
        spread, middle = torch.var_mean(x, 1, correction=0, keepdim=True)
        y = (x - middle) / (spread + self.eps).sqrt() * self.gain + self.offset
        return y - y.mean(2, True) if self.centred else y


class AutoformerOfStages(Port):
    def take(self, model: Autoformer) -> None:
        past, future, ins = model.encoder, model.decoder, (model.enc_embedding, model.dec_embedding)
        self.values = nn.ModuleList(Ring(x.value_embedding.tokenConv) for x in ins)
        self.clocks = nn.ModuleList(Map(x.temporal_embedding["embed"]) for x in ins)
        self.past = nn.ModuleList(stages(x, x.attention) for x in past.attn_layers)
        self.future = nn.ModuleList(stages(x, x.self_attention, x.cross_attention) for x in future.layers)
        self.trends = nn.ModuleList(Ring(x.projection) for x in future.layers)
        self.norms = nn.ModuleList(Seasonal(x.norm.layernorm) for x in (past, future))
        self.out, fault, last = Map(future.projection), self.fault, self.future[1][1].work
        self.past[0][1].loose = fault == "autoformer_first_encoder_ends_detached"
        self.past[1][0].work.sign = -1 if fault == "autoformer_second_encoder_rolls_the_other_way" else 1
        last.together = fault == "autoformer_last_cross_delays_of_the_batch_in_evaluation"
        self.norms[1].centred = fault != "autoformer_last_norm_keeps_its_mean_over_time"

    def forward(self, x_enc: Tensor, x_mark_enc: Tensor, x_mark_dec: Tensor) -> Tensor:
        series = x_enc.mT
        x, fast = self.values[0](series) + self.clocks[0](x_mark_enc.mT), series - smooth(series)
        for mix, feed in self.past:
            x = feed(mix(x, x)[0])[0]
        known, total = self.norms[0](x), series.mean(2, True)
        x = self.clocks[1](x_mark_dec.mT) + self.values[1](F.pad(fast[..., -LABEL:], (0, FUTURE)))
        for (own, cross, feed), trend in zip(self.future, self.trends, strict=True):
            x, one = own(x, x)
            x, two = cross(x, known)
            x, three = feed(x)
            total = total + trend(three + two + one)[..., -FUTURE:]
        return (total + self.out(self.norms[1](x)[..., -FUTURE:])).mT


def sheet(weight: Tensor, *last: Tensor) -> Tensor:
    return torch.cat([weight.T if weight.dim() == 2 else weight.permute(2, 1, 0).flatten(0, 1), *last])


def around(x: Tensor) -> Tensor:
    return torch.cat([x.roll(1, 0), x, x.roll(-1, 0)], 2)


def parted(x: Tensor) -> tuple[Tensor, Tensor]:
    at = torch.arange(len(x), device=x.device)
    at = (at[:, None] + at[:WINDOW] - WINDOW // 2).clamp(0, len(x) - 1)
    return x - (slow := x[at].mean(1)), slow


class SheetAutoformer(Port):
    def take(self, model: Autoformer) -> None:
        past, future, last = model.encoder.attn_layers, model.decoder.layers, model.decoder.projection
        mixes = [[*x.attention.children()] for x in past]
        mixes += [[*y.children()] for x in future for y in (x.self_attention, x.cross_attention)]
        sheets = ([sheet(x.weight, x.bias[None]) for x in layers[1:]] for layers in mixes)
        self.mixes = pile(map(torch.stack, sheets))
        feeds = ((x.conv1.weight[..., 0], x.conv2.weight[..., 0].T) for x in (*past, *future))
        self.feeds = pile(map(torch.stack, feeds))
        self.norms = pile(torch.stack([*x.norm.parameters()]) for x in (model.encoder, model.decoder))
        ins = (x.parameters() for x in (model.enc_embedding, model.dec_embedding))
        self.ins = pile(sheet(taps, clock.T) for taps, clock in ins)
        trends = torch.cat([x.projection.weight for x in future], 1)
        self.trends, self.out = leaf(sheet(trends)), leaf(sheet(last.weight, last.bias[None]))

    def mix(self, i: int, x: Tensor, other: Tensor) -> Tensor:
        w, b = self.mixes[i].split([x.shape[2], 1], 1)
        size = lags = len(x)
        if self.fault == "autoformer_first_decoder_spectrum_back_to_an_even_length" and i == 2:
            lags = size // 2 * 2
        q, k, v = (fft.rfft(y @ w[j] + b[j], size, 0) for j, y in enumerate((x, other, other)))
        likeness = fft.irfft((q * k.conj()).mean(2), lags, 0)
        judged = likeness.mean(1, True) if self.training else likeness
        least = judged.topk(int(FACTOR * math.log(size)), 0).values[-1]
        share = likeness.masked_fill(judged < least, -math.inf).softmax(0)
        return fft.irfft(v * fft.rfft(share, size, 0).conj()[..., None], size, 0) @ w[3] + b[3]

    def norm(self, i: int, x: Tensor) -> Tensor:
        eps = 1e-3 if self.fault == "autoformer_encoder_norm_with_the_epsilon_of_keras" and i == 0 else 1e-5
        return (y := F.layer_norm(x, x.shape[2:], *self.norms[i], eps)) - y.mean(0)

    def forward(self, x_enc: Tensor, x_mark_enc: Tensor, x_mark_dec: Tensor) -> Tensor:
        x, before, after = (y.transpose(0, 1) for y in (x_enc, x_mark_enc, x_mark_dec))
        seen = x[-LABEL:] if self.fault == "autoformer_trend_goes_on_from_the_mean_of_the_label" else x
        y, slow = torch.cat([around(x), before], 2) @ self.ins[0], []
        for i, (up, down) in enumerate(self.feeds[:2]):
            y = parted(y + self.mix(i, y, y))[0]
            y = parted(y + F.gelu(y @ up.T) @ down)[0]
        known, start = self.norm(0, y), F.pad(parted(x)[0][-LABEL:], (0, 0, 0, 0, 0, FUTURE))
        y = torch.cat([around(start), after], 2) @ self.ins[1]
        for i, (up, down) in enumerate(self.feeds[2:]):
            y, one = parted(y + self.mix(2 * i + 2, y, y))
            y, two = parted(y + self.mix(2 * i + 3, y, known))
            y, three = parted(y + F.gelu(y @ up.T) @ down)
            left_out = self.fault == "autoformer_second_decoder_leaves_out_its_cross_trend" and i == 1
            slow.append(one + three if left_out else one + two + three)
        trend = seen.mean(0) + around(torch.cat(slow, 2)) @ self.trends
        return (self.norm(1, y) @ self.out[:-1] + self.out[-1] + trend)[-FUTURE:].transpose(0, 1)


right(task, "autoformer_of_stages", "a tree, channels first, diagonals of scores", AutoformerOfStages)
right(task, "autoformer_of_sheets", "packed stacks, time first, delays by spectra", SheetAutoformer)
PAST, DECODER, DELAYS = "encoder.attn_layers", "decoder.layers", "attention.inner_correlation"
ENDS, SLOPES = f"{PAST}.0.decomp2.moving_avg", ("input gradient", "weight gradient")
wrong_stages, wrong_sheets = (partial(wrong, task, x) for x in (AutoformerOfStages, SheetAutoformer))
wrong_stages(
    autoformer_first_encoder_ends_detached=("detached ends", ENDS, SLOPES),
    autoformer_second_encoder_rolls_the_other_way=("another sign", f"{PAST}.1.{DELAYS}"),
    autoformer_last_cross_delays_of_the_batch_in_evaluation=("eval", f"{DECODER}.1.cross_{DELAYS}", "eval"),
    autoformer_last_norm_keeps_its_mean_over_time=("a term left out", "decoder.norm"),
)
wrong_sheets(
    autoformer_trend_goes_on_from_the_mean_of_the_label=("a mean of fewer", ""),
    autoformer_encoder_norm_with_the_epsilon_of_keras=("epsilon", "encoder.norm.layernorm"),
    autoformer_first_decoder_spectrum_back_to_an_even_length=("a length", f"{DECODER}.0.self_{DELAYS}"),
    autoformer_second_decoder_leaves_out_its_cross_trend=("a term left out", f"{DECODER}.1"),
)
