"""Two ports of an EnCodec: a tree of layers that bend what they read, and flat weights, channels last."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _nineteenth_encodec as known
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("nineteenth_encodec", known.EncodecModel, known.waves, known.codec)
SHORTCUT, LSTM = ("decoder.model.7.shortcut", "decoder.model.7"), ("decoder.model.1.lstm", "decoder.model.1")
BOOK, GRADIENTS = "quantizer.vq.layers.2._codebook", ("input gradient", "weight gradient")


class Bent(nn.Module):
    def __init__(self, conv: nn.Module, slope: float | None = None):
        super().__init__()
        self.rows, self.lengths = leaf(conv.weight_v.flatten(1)), leaf(conv.weight_g.flatten())
        self.shape, self.shift, self.stride = conv.weight_v.shape, leaf(conv.bias), conv.stride[-1]
        self.slope, self.rate, self.late = slope, conv.dilation[0], True

    def forward(self, x: Tensor) -> Tensor:
        x = F.elu(x) if self.slope is None else F.leaky_relu(x, self.slope)
        kernel = (F.normalize(self.rows, dim=1) * self.lengths[:, None]).view(self.shape)
        if x.ndim == 4:
            edges = self.shape[3] // 2, self.rate * (self.shape[2] // 2)
            return F.conv2d(x, kernel.mT, self.shift, (self.stride, 1), edges, (1, self.rate))
        if len(self.rows) != len(self.shift):
            return F.conv_transpose1d(x, kernel, self.shift, self.stride)[..., : self.stride * x.shape[2]]
        past, rest = self.rate * (self.shape[2] - 1) + 1 - self.stride, -x.shape[2] % self.stride
        x = F.pad(x, (past, rest) if self.late else (past + rest, 0), "reflect")
        return F.conv1d(x, kernel, self.shift, self.stride, 0, self.rate)


class Around(nn.Module):
    def __init__(self, unit: nn.Module):
        super().__init__()
        if hasattr(unit, "lstm"):
            self.weights = nn.ParameterList(map(leaf, unit.lstm.parameters()))
        else:
            self.inner, self.outer = nn.Sequential(*map(Bent, unit.block[1::2])), Bent(unit.shortcut, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "inner"):
            return self.inner(x) + self.outer(x)
        rows, start = x.mT, (x.new_zeros(2, len(x), x.shape[1]),) * 2
        return x + torch.lstm(rows, start, [*self.weights], True, 2, 0.0, False, False, True)[0].mT


class Codec(Port):
    """Waves to codes and back, with the codebooks of all stages in stacks."""

    def keep(self, model: nn.Module) -> None:
        for name in ("embed", "cluster_size", "embed_avg"):
            self.register_buffer(name, torch.stack([getattr(x[0], name) for x in model.quantizer.vq.layers]))
        self.register_buffer("windows", torch.cat([x.spec_transform.window for x in model.discriminators]))

    def coded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rest, lost = x.mT, 0
        for i, codes in enumerate(self.embed.clone()):
            chosen = F.one_hot((rest.unsqueeze(2) - codes).square().sum(3).argmin(2), known.CODES).to(x)
            if self.training:
                counts = self.cluster_size[i].clone()
                self.cluster_size[i] = known.DECAY * counts + (1 - known.DECAY) * chosen.sum((0, 1))
                self.embed_avg[i].lerp_(torch.einsum("ntk,ntd->kd", chosen, rest.detach()), 1 - known.DECAY)
                if self.fault != "encodec_third_codebook_divided_by_its_counts_of_before" or i < 2:
                    counts = self.cluster_size[i]
                smooth = counts.sum() * (counts + known.SMOOTH) / (counts.sum() + known.CODES * known.SMOOTH)
                self.embed[i] = self.embed_avg[i] / smooth[:, None]
            found = chosen @ codes
            lost = lost + F.mse_loss(found, rest) / known.BOOKS
            through = self.fault == "encodec_residuals_keep_their_straight_through_path"
            rest = rest - (rest + (found - rest).detach() if through else found)
        return (x if self.training else x.detach()) - rest.detach().mT, lost

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        both = self.fault == "encodec_loudness_of_both_channels_in_place_of_their_mix"
        loud = (x if both else x.mean(1, True)).square().mean((1, 2), True).sqrt() + 1e-8
        latents, lost = self.coded(self.analysed(x / loud))
        audio = loud * self.composed(latents)[:, :, : x.shape[2]]
        given = self.judged(torch.cat([x, audio, audio.detach()]))
        values = (value.chunk(3)[wave] for wave in range(3) for value in given)
        return dict(zip(known.OUTPUTS, (audio, latents, lost, *values), strict=True))


class BentTree(Codec):
    """Chains of layers that bend what they read; the spectrograms' bins before their frames."""

    def take(self, model: nn.Module) -> None:
        self.keep(model)
        self.analysed, self.composed = self.chain(*model.encoder.model), self.chain(*model.decoder.model)
        layers = ([*judge.convs, judge.conv_post] for judge in model.discriminators)
        self.critics = nn.ModuleList(nn.ModuleList(map(Bent, x, (1.0, *[known.SLOPE] * 3))) for x in layers)
        self.analysed[4].late = self.fault != "encodec_extra_sample_of_the_second_stride_on_the_left"

    def chain(self, first: nn.Module, *modules: nn.Module) -> nn.Sequential:
        rest = [x for x in modules if not isinstance(x, nn.ELU)]
        return nn.Sequential(Bent(first, 1.0), *(Bent(x) if hasattr(x, "bias") else Around(x) for x in rest))

    def judged(self, x: Tensor) -> list[Tensor]:
        given = []
        for critic, window in zip(self.critics, self.windows.split(known.SIZES), strict=True):
            n, unit, marks = len(window), window.norm(), []
            if self.fault == "encodec_first_spectrogram_over_the_root_of_its_length" and not given:
                unit = n**0.5
            z = torch.stft(x.flatten(0, 1), n, n // 4, n, window, center=False, return_complex=True)
            z = torch.view_as_real(z / unit).unflatten(0, x.shape[:2]).movedim(4, 1).flatten(1, 2)
            for layer in critic:
                marks.append(z := layer(z))
            given += [z.mT, *(F.leaky_relu(mark.mT, known.SLOPE) for mark in marks[:-1])]
        return given


class FlatEncodec(Codec):
    """[N, T, C] all the way; kernels by number as [k, in, out]; spectrograms by products."""

    def take(self, model: nn.Module) -> None:
        self.keep(model)
        convs = [x for x in model.modules() if hasattr(x, "weight_v")]
        self.plans = [(conv.stride[-1], conv.dilation[0]) for conv in convs]
        self.v = nn.ParameterList(leaf(conv.weight_v.movedim((0, 1), (-1, -2))) for conv in convs)
        self.g = nn.ParameterList(leaf(conv.weight_g.flatten()) for conv in convs)
        self.b = nn.ParameterList(leaf(conv.bias) for conv in convs)
        cells = [cell for x in model.modules() if isinstance(x, nn.LSTM) for cell in x.all_weights]
        self.cells, self.cells_b = (pile(torch.stack(cell[i : i + 2]) for cell in cells) for i in (0, 2))

    def kernel(self, i: int) -> Tensor:
        return self.v[i] * (self.g[i] / self.v[i].flatten(0, -2).square().sum(0).sqrt())

    def conv(self, i: int, x: Tensor) -> Tensor:
        kernel, (stride, rate) = self.kernel(i), self.plans[i]
        edge = not (self.fault == "encodec_dilated_encoder_conv_mirrors_its_first_sample_too" and i == 5)
        past, rest = (len(kernel) - 1) * rate + 1 - stride, -x.shape[1] % stride
        x = torch.cat([x[:, edge : past + edge].flip(1), x, x[:, -1 - rest : -1].flip(1)], 1)
        starts = torch.arange(0, x.shape[1] - rate * (len(kernel) - 1), stride)[:, None]
        return x[:, starts + rate * torch.arange(len(kernel))].flatten(2) @ kernel.flatten(0, 1) + self.b[i]

    def rise(self, i: int, x: Tensor) -> Tensor:
        here, later = torch.einsum("ntc,koc->ntko", F.elu(x), self.kernel(i)).chunk(2, 2)
        return (here + F.pad(later[:, :-1], (0, 0, 0, 0, 1, 0))).flatten(1, 2) + self.b[i]

    def unit(self, i: int, x: Tensor) -> Tensor:
        bent, y = self.fault == "encodec_last_shortcut_reads_what_its_block_bends" and i == 16, F.elu(x)
        return self.conv(i + 1, F.elu(self.conv(i, y))) + self.conv(i + 2, y if bent else x)

    def remember(self, first: int, x: Tensor) -> Tensor:
        frames, h, c = x.unbind(1), 0 * x[:, 0], 0 * x[:, 0]
        for j in (first, first + 1):
            (into, back), shift, kept = self.cells[j], self.cells_b[j].sum(0), []
            if self.fault != "encodec_last_recurrent_layer_starts_where_the_lower_ended" or j < 3:
                h, c = torch.zeros_like(h), torch.zeros_like(c)
            for frame in frames:
                i, f, g, o = (frame @ into.T + h @ back.T + shift).chunk(4, 1)
                c = torch.addcmul(f.sigmoid() * c, i.sigmoid(), g.tanh())
                h = o.sigmoid() * c.tanh()
                kept.append(h)
            frames = kept
        return x + torch.stack(frames, 1)

    def judged(self, x: Tensor) -> list[Tensor]:
        values = []
        for i, window in zip((20, 24), self.windows.split(known.SIZES), strict=True):
            size, time = len(window), torch.arange(len(window)).to(x)
            turns = torch.outer(time, time[: size // 2 + 1]) * (2 * torch.pi / size)
            frames, marks = x.unfold(2, size, size // 4) * (window / window.norm()), []
            z = torch.cat([frames @ turns.cos(), -frames @ turns.sin()], 1).movedim(1, 3)
            for j in range(i, i + 4):
                kernel, (stride, rate), count = self.kernel(j), self.plans[j], z.shape[1]
                high, wide = (size // 2 for size in kernel.shape[:2])
                z = F.pad(z, (0, 0, wide, wide, rate * high, rate * high)).unfold(2, 2 * wide + 1, stride)
                z = z[:, torch.arange(count)[:, None] + rate * torch.arange(len(kernel))]
                y = torch.einsum("ntafck,akco->ntfo", z, kernel) + self.b[j]
                marks.append(z := torch.maximum(y, known.SLOPE * y))
            values += [value.movedim(3, 1) for value in (y, *marks[:-1])]
        return values

    def analysed(self, x: Tensor) -> Tensor:
        y = self.conv(4, F.elu(self.unit(1, self.conv(0, x.mT))))
        return self.conv(9, F.elu(self.remember(0, self.conv(8, F.elu(self.unit(5, y)))))).mT

    def composed(self, x: Tensor) -> Tensor:
        y = self.unit(12, self.rise(11, self.remember(2, self.conv(10, x.mT))))
        return self.conv(19, F.elu(self.unit(16, self.rise(15, y)))).mT


right(task, "encodec_as_a_tree_of_bent_layers", "functional layers, bins before frames", BentTree)
right(task, "encodec_of_flat_weights", "channels last, kernels by number, windows", FlatEncodec)
wrong(
    task,
    BentTree,
    encodec_extra_sample_of_the_second_stride_on_the_left=("padding elsewhere", "encoder.model.6"),
    encodec_residuals_keep_their_straight_through_path=("a gradient lost", "quantizer.vq", GRADIENTS),
    encodec_first_spectrogram_over_the_root_of_its_length=("other units", "discriminators.0.spec_transform"),
    encodec_loudness_of_both_channels_in_place_of_their_mix=("a mean over other axes", ""),
)
wrong(
    task,
    FlatEncodec,
    encodec_dilated_encoder_conv_mirrors_its_first_sample_too=("another border", "encoder.model.4.block.1"),
    encodec_last_shortcut_reads_what_its_block_bends=("input bent in place", SHORTCUT),
    encodec_last_recurrent_layer_starts_where_the_lower_ended=("a state carried over", LSTM),
    encodec_third_codebook_divided_by_its_counts_of_before=("an update in another order", BOOK, "buffer"),
)
