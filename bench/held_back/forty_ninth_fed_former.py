"""Two ports of a small FEDformer: stages over [N, C, T] with bases of waves, and piles over [N, T, C]."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _forty_ninth_fed_former as old
from bench.held_back._fifth_vision import filled, right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("forty_ninth_fed_former", old.FEDformer, old.seasons, old.masked_loss)
HEADS, LABEL, PRED, WIDTH = old.HEADS, old.LABEL, old.PRED, old.WIDTH


class Smoothing(nn.Module):
    def __init__(self, decomp: nn.Module):
        super().__init__()
        self.slope, self.start = leaf(decomp.layer.weight[:, 0]), leaf(decomp.layer.bias)
        self.before, self.still = [size // 2 for size in old.KERNELS], False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gate, trend, times = x.detach() if self.still else x, 0, torch.arange(x.shape[-1])
        share = (self.slope * gate[..., None] + self.start).softmax(-1)
        for i, size in enumerate(old.KERNELS):
            taps = (times[:, None] + torch.arange(size) - self.before[i]).clamp(0, len(times) - 1)
            trend = trend + share[..., i] * (x @ F.one_hot(taps, len(times)).sum(1).T.to(x) / size)
        return x - trend, trend


def point(linear: nn.Linear) -> nn.Conv1d:
    return filled(nn.Conv1d(*linear.weight.T.shape, 1), linear.weight[..., None], linear.bias)


class Spectrum(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        core, self.crossed, self.mirrored = layer.inner_correlation, hasattr(layer, "key_projection"), False
        self.ask, self.leave = point(layer.query_projection), point(layer.out_projection)
        self.mix = leaf(torch.stack([core.weights1, core.weights2], -1))
        self.read = core.index_q if self.crossed else core.index
        self.written = self.read if self.crossed else range(len(self.read))
        self.tell = point(layer.key_projection) if self.crossed else None

    def waves(self, modes: list[int], x: Tensor) -> Tensor:
        angle = (
            2 * torch.pi * torch.tensor(modes).to(x) * torch.arange(x.shape[-1])[:, None].to(x) / x.shape[-1]
        )
        return torch.complex(angle.cos(), -angle.sin())

    def analyse(self, x: Tensor, modes: list[int]) -> Tensor:
        waves = self.waves(modes, x)
        return x.unflatten(1, (HEADS, -1)).to(waves) @ waves

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        z = self.analyse(self.ask(x), self.read)
        if self.crossed:
            told = self.analyse(self.tell(other), old.KEY_MODES)
            score = (told.conj() if self.mirrored else told).mT @ z
            z = told @ torch.complex(score.real.tanh(), score.imag.tanh()) / WIDTH**2
        z = torch.einsum("nhim,hiom->nhom", z, torch.view_as_complex(self.mix))
        z = z * torch.tensor([1 if mode == 0 else 2 for mode in self.written]) / x.shape[-1]
        y = (z @ self.waves(self.written, x).mH).real
        return self.leave(y.reshape(len(x), -1, WIDTH).mT)


class Stage(nn.Module):
    def __init__(self, layer: nn.Module, *attentions: nn.Module):
        super().__init__()
        self.attentions = nn.ModuleList(map(Spectrum, attentions))
        self.rise, self.fall = leaf(layer.conv1.weight[..., 0]), leaf(layer.conv2.weight[..., 0])
        self.smooth = nn.ModuleList(Smoothing(x) for x in layer.children() if hasattr(x, "moving_avg"))

    def forward(self, x: Tensor, other: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = 0
        for attention, smooth in zip(self.attentions, self.smooth, strict=False):
            x, trend = smooth(x + attention(x, other))
            total = total + trend
        x, trend = self.smooth[-1](x + self.fall @ F.gelu(self.rise @ x))
        return x, total + trend


def level(x: Tensor, norm: Tensor, eps: float = 1e-5) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * norm[0] + norm[1]
    return x - x.mean(1, keepdim=True)


class FormerOfStages(Port):
    def take(self, model: nn.Module) -> None:
        one, two, ends = model.encoder, model.decoder, (model.enc_embedding, model.dec_embedding)
        self.values = nn.ParameterList(leaf(x.value_embedding.weight) for x in ends)
        self.clocks = nn.ParameterList(leaf(x.temporal_embedding.weight) for x in ends)
        self.first, self.end = Smoothing(model.decomp), point(two.projection)
        self.reading = nn.ModuleList(Stage(x, x.attention) for x in one.attn_layers)
        self.writing = nn.ModuleList(Stage(x, x.self_attention, x.cross_attention) for x in two.layers)
        self.trends = nn.ParameterList(leaf(x.projection.weight) for x in two.layers)
        self.norms = pile(torch.stack([x.norm.layernorm.weight, x.norm.layernorm.bias]) for x in (one, two))
        self.reading[0].smooth[0].before[0] -= self.fault == "fed_former_first_average_leans_to_the_future"
        self.reading[1].smooth[1].still = self.fault == "fed_former_gate_reads_without_gradient"
        self.writing[1].attentions[1].mirrored = self.fault == "fed_former_second_cross_conjugates_the_keys"
        zeros = self.fault == "fed_former_decoder_values_convolved_between_zeros"
        self.edge = "constant" if zeros else "circular"

    def forward(self, x_enc: Tensor, x_mark_enc: Tensor, x_mark_dec: Tensor) -> Tensor:
        x, rest = x_enc.mT, F.pad(self.first(x_enc.mT)[0][..., -LABEL:], (0, PRED))
        y = F.conv1d(F.pad(x, (1, 1), "circular"), self.values[0]) + self.clocks[0] @ x_mark_enc.mT
        z = F.conv1d(F.pad(rest, (1, 1), self.edge), self.values[1]) + self.clocks[1] @ x_mark_dec.mT
        for stage in self.reading:
            y, _ = stage(y)
        y, trend = level(y.mT, self.norms[0]).mT, x.mean(-1, keepdim=True)
        for stage, taps in zip(self.writing, self.trends, strict=True):
            z, more = stage(z, y)
            trend = trend + F.conv1d(F.pad(more, (1, 1), "circular"), taps)
        return (trend + self.end(level(z.mT, self.norms[1]).mT))[..., -PRED:].mT


class StackedFormer(Port):
    def take(self, model: nn.Module) -> None:
        ends, parts = (model.enc_embedding, model.dec_embedding), [*model.modules()]
        linears = [x for x in parts if isinstance(x, nn.Linear)]
        cores = [x for x in parts if hasattr(x, "weights1")]
        self.modes = [getattr(x, "index", None) or x.index_q for x in cores]
        self.mix = nn.ParameterList(leaf(torch.stack([x.weights1, x.weights2])) for x in cores)
        self.dense, self.gates, self.end = (
            pile(torch.cat([x.weight, x.bias[:, None]], 1) for x in linears if x.weight.shape == shape)
            for shape in ((WIDTH, WIDTH), (len(old.KERNELS), 1), (old.SERIES, WIDTH))
        )
        self.enter = pile(torch.cat([w.flatten(1) for w in x.parameters()], 1) for x in ends)
        layers = [*model.encoder.attn_layers, *model.decoder.layers]
        self.inner = pile(torch.stack([x.conv1.weight[..., 0], x.conv2.weight[..., 0].T]) for x in layers)
        self.trends = pile(x.projection.weight.flatten(1) for x in layers[2:])
        self.norms = pile(torch.stack([x.weight, x.bias]) for x in parts if isinstance(x, nn.LayerNorm))

    def line(self, x: Tensor, both: Tensor) -> Tensor:
        return x @ both[:, :-1].T + both[:, -1]

    def round(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, -1:], x, x[:, :1]], 1).unfold(1, 3, 1).flatten(2)

    def cut(self, x: Tensor, i: int) -> tuple[Tensor, Tensor]:
        slope, start = self.gates[i, 0] - self.gates[i, 1]
        padded = (F.pad(x.mT, (k // 2, (k - 1) // 2), "replicate").unfold(2, k, 1) for k in old.KERNELS)
        short, long = (windows.mean(-1).mT for windows in padded)
        trend = long + (slope * x + start).sigmoid() * (short - long)
        return x - trend, trend

    def meet(self, x: Tensor, i: int, other: Tensor | None = None) -> Tensor:
        ask, *tell, leave = self.dense[(0, 2, 4, 6, 9, 11)[i] : (2, 4, 6, 9, 11, 14)[i]]
        places = self.modes[i]
        z = torch.fft.rfft(self.line(x, ask).mT)[..., places].unflatten(1, (HEADS, -1))
        if other is not None:
            k = torch.fft.rfft(self.line(other, tell[0]).mT)[..., old.KEY_MODES].unflatten(1, (HEADS, -1))
            score = torch.view_as_real(torch.einsum("nhex,nhey->nhxy", z, k)).tanh()
            z = torch.einsum("nhxy,nhey->nhex", torch.view_as_complex(score), k) / WIDTH**2
        elif i != 1 or self.fault != "fed_former_second_block_puts_modes_at_their_own_frequency":
            places = range(len(places))
        z = torch.einsum("nhim,hiom->nhom", z, torch.complex(*self.mix[i])).flatten(1, 2)
        y = torch.fft.irfft(z @ F.one_hot(torch.tensor(places)).to(z), x.shape[1])
        turned = i == 2 and self.fault == "fed_former_decoder_attention_transposed_not_viewed"
        return x + self.line(y.mT if turned else y.reshape(x.shape), leave)

    def forward(self, x_enc: Tensor, x_mark_enc: Tensor, x_mark_dec: Tensor) -> Tensor:
        late = self.fault == "fed_former_trend_starts_at_a_late_mean_in_evaluation" and not self.training
        trend = x_enc[:, -LABEL if late else 0 :].mean(1, keepdim=True)
        rest = F.pad(self.cut(x_enc, 0)[0][:, -LABEL:], (0, 0, 0, PRED))
        y = torch.cat([self.round(x_enc), x_mark_enc], 2) @ self.enter[0].T
        z = torch.cat([self.round(rest), x_mark_dec], 2) @ self.enter[1].T
        for i in (0, 1):
            y, _ = self.cut(self.meet(y, i), 1 + 2 * i)
            y, _ = self.cut(y + F.gelu(y @ self.inner[i, 0].T) @ self.inner[i, 1], 2 + 2 * i)
        y = level(y, self.norms[0])
        for i in (0, 1):
            z, one = self.cut(self.meet(z, 2 + 2 * i), 5 + 3 * i)
            z, two = self.cut(self.meet(z, 3 + 2 * i, y), 6 + 3 * i)
            z, three = self.cut(z + F.gelu(z @ self.inner[2 + i, 0].T) @ self.inner[2 + i, 1], 7 + 3 * i)
            trend = trend + self.round(one + two + three) @ self.trends[i].T
        eps = 1e-3 if self.fault == "fed_former_last_norm_with_a_larger_epsilon" else 1e-5
        return (trend + self.line(level(z, self.norms[1], eps), self.end[0]))[:, -PRED:]


right(task, "fed_former_of_stages_with_the_time_last", "a tree, bases of waves, matrices", FormerOfStages)
right(task, "fed_former_of_stacked_weights", "packed stacks, flat code", StackedFormer)
gated, core = "encoder.attn_layers.1.decomp2", "attention.inner_correlation"
wrong(
    task,
    FormerOfStages,
    fed_former_first_average_leans_to_the_future=("padding", "encoder.attn_layers.0.decomp1.moving_avg.0"),
    fed_former_gate_reads_without_gradient=("detach", gated, ("input gradient", "weight gradient")),
    fed_former_decoder_values_convolved_between_zeros=("padding mode", "dec_embedding.value_embedding"),
    fed_former_second_cross_conjugates_the_keys=("a conjugate", f"decoder.layers.1.cross_{core}"),
)
wrong(
    task,
    StackedFormer,
    fed_former_second_block_puts_modes_at_their_own_frequency=("order", f"encoder.attn_layers.1.{core}"),
    fed_former_decoder_attention_transposed_not_viewed=("layout", "decoder.layers.0.self_attention"),
    fed_former_last_norm_with_a_larger_epsilon=("epsilon", "decoder.norm.layernorm"),
    fed_former_trend_starts_at_a_late_mean_in_evaluation=("a mean in eval", "", "eval"),
)
