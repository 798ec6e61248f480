"""Two ports of a small x-vector network: a tree with the channels last, and one class of packed sheets."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._forty_fourth_x_vector import LAYERS, LOG_EPS, MARGIN, SCALE, XVector, speakers, voices
from bench.held_back._forty_fourth_x_vector import POOL_EPS as FLOOR
from bench.held_back._fourth_ports import Port, Rows, leaf, wrong
from bench.held_back._sixth_ports import few

task = few("forty_fourth_x_vector", XVector, voices, speakers)


class Context(nn.Module):
    """Frames joined with their neighbours, one product, a rectifier and a norm of rows."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.taps, self.apart = layer.conv.kernel_size[0], layer.conv.dilation[0]
        self.weight = leaf(layer.conv.weight.permute(2, 1, 0).flatten(0, 1))
        self.offset = leaf(layer.conv.bias)
        self.rows = Rows(layer.norm)

    def forward(self, x: Tensor, there: Tensor) -> Tensor:
        reach, length = self.apart * (self.taps // 2), x.shape[1]
        x = F.pad(x, (0, 0, reach, reach))
        near = [x[:, i * self.apart : i * self.apart + length] for i in range(self.taps)]
        x = self.rows((torch.cat(near, -1) @ self.weight + self.offset).relu())
        return x * there[..., None]


class Pools(nn.Module):
    """Both poolings: moments under even weights and under those of the attention."""

    def __init__(self, pool: nn.Module):
        super().__init__()
        self.down, self.up = (leaf(x.weight[..., 0].T) for x in (pool.linear1, pool.linear2))
        self.low, self.high = leaf(pool.linear1.bias), leaf(pool.linear2.bias)

    def moments(self, x: Tensor, share: Tensor, more: Tensor | float) -> list[Tensor]:
        mean = (share * x).sum(1)
        spread = (share * (x - mean[:, None]).square()).sum(1) * more
        return [mean, (spread + FLOOR).sqrt()]

    def forward(self, x: Tensor, there: Tensor) -> Tensor:
        count = there.sum(1, keepdim=True)
        even = (there / count)[..., None]
        score = ((x @ self.down + self.low).tanh() @ self.up + self.high).exp() * there[..., None]
        heavy = score / score.sum(1, keepdim=True)
        return torch.cat(self.moments(x, even, count / (count - 1)) + self.moments(x, heavy, 1.0), 1)


class Segment(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.matrix, self.offset = leaf(layer.affine.weight.T), leaf(layer.affine.bias)
        self.scale, self.shift, self.eps = leaf(layer.norm.weight), leaf(layer.norm.bias), layer.norm.eps
        self.late = False

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.matrix + self.offset
        x = x if self.late else x.relu()
        spread, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
        x = (x - mean) / (spread + self.eps).sqrt() * self.scale + self.shift
        return x.relu() if self.late else x


class VoiceTree(Port):
    """Frames and voice, channels last: joined windows, shares of frames, angles."""

    def take(self, model: XVector) -> None:
        self.register_buffer("triangles", model.fbank.fb.T.clone())
        self.frames, self.pools = nn.ModuleList(map(Context, model.tdnn)), Pools(model.att_pool)
        self.voice = nn.Sequential(*map(Segment, model.segments))
        self.centers = leaf(model.head.weight.T)
        self.voice[0].late = self.fault == "x_vector_first_segment_rectified_after_its_norm"
        if self.fault == "x_vector_third_layer_dilated_as_the_second":
            self.frames[2].apart = self.frames[1].apart

    def angles(self, x: Tensor, label: Tensor) -> Tensor:
        cosine = x @ self.centers / x.norm(dim=1, keepdim=True) / self.centers.norm(dim=0)
        if self.training or self.fault == "x_vector_margin_kept_in_evaluation":
            own = cosine.gather(1, label[:, None])
            own = torch.where(own > 0, (own.acos() + MARGIN).cos(), own)
            cosine = cosine.scatter(1, label[:, None], own)
        return SCALE * cosine if self.training else cosine

    def forward(self, power: Tensor, lengths: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        there = torch.arange(power.shape[1], device=power.device).lt(lengths[:, None]).to(power)
        x, counted = (F.linear(power, self.triangles) + LOG_EPS).log(), there
        if self.fault == "x_vector_cepstral_mean_over_the_padding_too":
            counted = torch.ones_like(there)
        mean = torch.einsum("ntm,nt->nm", x, counted) / counted.sum(1, keepdim=True)
        x = (x - mean[:, None]) * there[..., None]
        for layer in self.frames:
            x = layer(x, there)
        x = self.voice(self.pools(x, there))
        return self.angles(x, label), x


def sheet(layer: nn.Module, *norm: nn.Module) -> Tensor:
    """A row for each channel: its kernel, its offset, and its norm's scale and shift, if any."""
    ends = [layer.bias, *(t for x in norm for t in (x.weight, x.bias))]
    return torch.cat([layer.weight.flatten(1), torch.stack(ends, 1)], 1)


class PackedVoice(Port):
    """Sheets of rows in one list; the norms' statistics in one buffer a layer."""

    def take(self, model: XVector) -> None:
        pool, sheets = model.att_pool, [sheet(x.conv, x.norm) for x in model.tdnn]
        sheets += [sheet(pool.linear1), sheet(pool.linear2)]
        sheets += [sheet(x.affine, x.norm) for x in model.segments]
        self.w = nn.ParameterList(map(leaf, [*sheets, model.head.weight]))
        self.register_buffer("mel", model.fbank.fb.clone())
        self.register_buffer("steps", torch.stack([x.norm.num_batches_tracked for x in model.tdnn]))
        for i, layer in enumerate(model.tdnn):
            self.register_buffer(f"seen_{i}", torch.stack([layer.norm.running_mean, layer.norm.running_var]))

    def norm(self, i: int, x: Tensor) -> Tensor:
        """What the norm of layer ``i`` makes of [C, N, T], before its scale and shift."""
        kept, eps = self.get_buffer(f"seen_{i}"), 1e-5
        if self.fault == "x_vector_second_norm_with_another_epsilon" and i == 1:
            eps = 1e-3
        mean, var = kept
        if self.training:
            mean, count = x.mean((1, 2)), x[0].numel()
            var = x.square().mean((1, 2)) - mean.square()
            less = 0 if self.fault == "x_vector_first_running_variance_biased" and i == 0 else 1
            self.steps[i] += 1
            kept.lerp_(torch.stack([mean, var * count / (count - less)]).detach(), 0.1)
        return (x - mean[:, None, None]) / (var + eps).sqrt()[:, None, None]

    def layer(self, i: int, x: Tensor, valid: Tensor) -> Tensor:
        (_, taps, apart), (w, b, scale, shift) = LAYERS[i], self.w[i].tensor_split([-3, -2, -1], 1)
        w, y, length = w.unflatten(1, (-1, taps)), b[:, :, None], x.shape[2]
        for k in range(taps):
            move = (k - taps // 2) * apart
            shifted = F.pad(x, (max(-move, 0), max(move, 0)))[..., max(move, 0) :][..., :length]
            y = y + torch.einsum("oc,cnt->ont", w[:, :, k], shifted)
        return (self.norm(i, y.clamp(min=0)) * scale[:, :, None] + shift[:, :, None]) * valid

    def pooled(self, x: Tensor, valid: Tensor) -> Tensor:
        one, two, count = self.w[4], self.w[5], valid.sum(1)
        score = torch.tensordot(one[:, :-1], x, 1) + one[:, -1:, None]
        score = torch.tensordot(two[:, :-1], score.tanh(), 1) + two[:, -1:, None]
        if self.fault != "x_vector_attention_shared_with_the_padding":
            score = score + valid.log()
        share = (score - score.logsumexp(2, keepdim=True)).exp()
        mean, heavy = x.sum(2) / count, (x * share).sum(2)
        var = (x.square().sum(2) - count * mean.square()) / (count - 1)
        other = (x.square() * share).sum(2) - heavy.square()
        return torch.cat([mean, (var + FLOOR).sqrt(), heavy, (other + FLOOR).sqrt()]).T

    def logits(self, x: Tensor, label: Tensor) -> Tensor:
        unit = self.w[8] / self.w[8].square().sum(1, keepdim=True).sqrt()
        cosine = x @ unit.T / x.square().sum(1, keepdim=True).sqrt()
        if not self.training:
            return cosine
        sine = (1 - cosine.square()).sqrt()
        if self.fault == "x_vector_margin_takes_the_sine_for_a_constant":
            sine = sine.detach()
        less = cosine * (1 - math.cos(MARGIN)) + sine * math.sin(MARGIN)
        return SCALE * (cosine - less * (cosine > 0) * F.one_hot(label, len(unit)))

    def forward(self, power: Tensor, lengths: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        valid = (torch.arange(power.shape[1], device=power.device) < lengths[:, None]).to(power)
        x = (torch.einsum("ntf,fm->mnt", power, self.mel) + LOG_EPS).log() * valid
        x = (x - (x.sum(2) / valid.sum(1))[..., None]) * valid
        for i in range(len(LAYERS)):
            x = self.layer(i, x, valid)
        x = self.pooled(x, valid)
        for w in self.w[6:8]:
            x = (x @ w[:, :-3].T + w[:, -3]).clamp(min=0)
            x = F.layer_norm(x, x.shape[1:], w[:, -2], w[:, -1])
        return self.logits(x, label), x


right(task, "x_vector_tree_with_channels_last", "a tree, joined windows, shares and angles", VoiceTree)
right(task, "x_vector_of_packed_sheets", "packed sheets, sums of shifted products, raw moments", PackedVoice)
wrong(
    task,
    VoiceTree,
    x_vector_cepstral_mean_over_the_padding_too=("a mean over padding", "fbank"),
    x_vector_third_layer_dilated_as_the_second=("another dilation", "tdnn.2.conv"),
    x_vector_first_segment_rectified_after_its_norm=("another order", "segments.0"),
    x_vector_margin_kept_in_evaluation=("training's formula in eval", "head", "eval"),
)
wrong(
    task,
    PackedVoice,
    x_vector_first_running_variance_biased=("a biased variance kept", "tdnn.0.norm", "buffer"),
    x_vector_second_norm_with_another_epsilon=("another epsilon", "tdnn.1.norm"),
    x_vector_attention_shared_with_the_padding=("a mask left out", "att_pool"),
    x_vector_margin_takes_the_sine_for_a_constant=("detach", "head", ("input gradient", "weight gradient")),
)
