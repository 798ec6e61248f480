"""Two ports of a HiFi-GAN generator: a tree of stages, and channels last with the kernel sizes as groups."""

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _tenth_vocoder as hifi
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

vocoder = few("tenth_vocoder", hifi.HiFiGANGenerator, hifi.speech, hifi.waveform_and_spectrum)


class Conv(nn.Module):
    """A convolution that keeps the length, by directions and their lengths along the first axis."""

    def __init__(self, conv: nn.Module):
        super().__init__()
        length, direction = conv.parametrizations.weight.original0, conv.parametrizations.weight.original1
        self.length, self.direction, self.shift = leaf(length.flatten()), leaf(direction), leaf(conv.bias)
        self.gap, self.rate, self.constant, self.sideways = conv.dilation[0], conv.stride[0], False, False

    def kernel(self) -> Tensor:
        v, axes = self.direction, (0, 2) if self.sideways and not self.training else (1, 2)
        norm = v.square().sum(axes, keepdim=True).sqrt()
        return v * (self.length[:, None, None] / (norm.detach() if self.constant else norm))

    def forward(self, x: Tensor) -> Tensor:
        w = self.kernel()
        return F.conv1d(x, w, self.shift, padding=self.gap * (w.shape[2] // 2), dilation=self.gap)


class Stretch(Conv):
    """A transposed convolution that makes the signal ``rate`` times as long."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.conv_transpose1d(x, self.kernel(), self.shift, self.rate)
        return y[..., (self.rate + 1) // 2 :][..., : self.rate * x.shape[2]]


class Step(nn.Module):
    """A dilated and a plain convolution around which the state goes on."""

    def __init__(self, wide: nn.Conv1d, plain: nn.Conv1d):
        super().__init__()
        self.wide, self.plain, self.in_place = Conv(wide), Conv(plain), False

    def forward(self, x: Tensor) -> Tensor:
        active = F.leaky_relu(x, 0.1)
        change = self.plain(F.leaky_relu(self.wide(active), 0.1))
        return change + (active if self.in_place else x)


class Stage(nn.Module):
    """Longer, tinted, and through branches of several kernel sizes."""

    def __init__(self, up: nn.Sequential, cond: nn.Conv1d, mrf: nn.Module):
        super().__init__()
        self.stretch, self.tint = Stretch(up[1]), deepcopy(cond)
        self.branches = nn.ModuleList(
            nn.Sequential(*(Step(a[1], b[1]) for a, b in zip(block.convs1, block.convs2, strict=True)))
            for block in mrf.blocks
        )

    def forward(self, x: Tensor, voice: Tensor) -> Tensor:
        x = self.stretch(F.leaky_relu(x, 0.2)) + self.tint(voice)
        return torch.stack([branch(x) for branch in self.branches]).mean(0)


class StagesOfBranches(Port):
    def take(self, model: hifi.HiFiGANGenerator) -> None:
        self.register_buffer("offset", model.mean[:, None].clone())
        self.register_buffer("spread", model.scale[:, None].clone())
        self.register_buffer("tones", model.spectrum.filters.clone())
        self.voices = leaf(model.speaker.table.weight)
        self.first, self.last = Conv(model.input_conv), Conv(model.output_conv[1])
        parts = zip(model.upsamples, model.conds, model.mrfs, strict=True)
        self.tint, self.stages = deepcopy(model.global_conv), nn.ModuleList(Stage(*part) for part in parts)
        self.first.constant = self.fault == "vocoder_first_norm_takes_no_gradient"
        if self.fault == "vocoder_second_convolution_dilated_too":
            self.stages[0].branches[1][1].plain.gap = hifi.DILATIONS[1]
        self.stages[1].branches[2][0].in_place = self.fault == "vocoder_residual_adds_the_activated_state"
        if self.fault == "vocoder_folded_norm_over_the_outputs_in_eval":
            self.stages[1].branches[0][1].wide.sideways = True

    def loudness(self, wave: Tensor) -> Tensor:
        mode = "constant" if self.fault == "vocoder_spectrum_padded_with_zeros" else "reflect"
        wave = F.pad(wave, [hifi.WINDOW // 2] * 2, mode=mode)
        cosine, sine = F.conv1d(wave, self.tones, stride=hifi.HOP).chunk(2, 1)
        return (cosine**2 + sine**2 + 1e-3).sqrt().log()

    def forward(self, mel: Tensor, speaker: Tensor) -> dict[str, Tensor]:
        voice = F.normalize(self.voices[speaker], dim=1)[..., None]
        x = self.first((mel - self.offset) / self.spread) + self.tint(voice)
        for stage in self.stages:
            x = stage(x, voice)
        wave = self.last(F.leaky_relu(x)).tanh()
        return {"waveform": wave.squeeze(1), "spectrum": self.loudness(wave)}


def windows(x: Tensor, size: int, gap: int = 1) -> Tensor:
    """[N, T, ...] -> [N, T, ..., size]: what lies around each moment."""
    edge = gap * (size // 2)
    padded = F.pad(x, (*[0] * (2 * (x.ndim - 2)), edge, edge))
    return padded.unfold(1, gap * (size - 1) + 1, 1)[..., ::gap]


class KernelsInGroups(Port):
    """Signals [N, T, C]; the blocks of a stage are groups [N, T, G, C], their kernels padded to a size."""

    def take(self, model: hifi.HiFiGANGenerator) -> None:
        self.w, self.stages = nn.ParameterDict(), range(len(hifi.RATES))
        conds = [model.global_conv, *model.conds]
        self.w["voices"] = leaf(model.speaker.table.weight)
        self.w["tints"] = leaf(torch.cat([c.weight[..., 0] for c in conds]).T)
        self.w["tints_b"] = leaf(torch.cat([c.bias for c in conds]))
        convs = {"first": model.input_conv, "last": model.output_conv[1]}
        convs |= {f"up{i}": model.upsamples[i][1] for i in self.stages}
        for name, conv in convs.items():
            weight = conv.parametrizations.weight
            self.w[name + "_g"], self.w[name + "_v"] = leaf(weight.original0), leaf(weight.original1)
            self.w[name + "_b"] = leaf(conv.bias)
        for i in self.stages:
            pairs = [zip(block.convs1, block.convs2, strict=True) for block in model.mrfs[i].blocks]
            groups = [[layer[1] for pair in block for layer in pair] for block in pairs]
            self.w[f"{i}_g"] = pile(pile(c.parametrizations.weight.original0 for c in g) for g in groups)
            self.w[f"{i}_b"] = pile(pile(c.bias for c in g) for g in groups)
            for size, group in zip(hifi.KERNELS, groups, strict=True):
                self.w[f"{i}_v{size}"] = pile(c.parametrizations.weight.original1 for c in group)
        self.register_buffer("mel", torch.stack([model.mean, model.scale]))
        self.register_buffer("tones", model.spectrum.filters[:, 0].T.clone())

    def weight(self, name: str) -> Tensor:
        v = self.w[name + "_v"]
        return v * (self.w[name + "_g"] / torch.linalg.vector_norm(v, dim=(1, 2), keepdim=True))

    def longer(self, i: int, x: Tensor) -> Tensor:
        """Each moment gives two halves of a kernel, of which the second falls on the next moment's first."""
        rate, bias = hifi.RATES[i], self.w[f"up{i}_b"]
        now, later = torch.einsum("nti,iok->ntko", x, self.weight(f"up{i}")).chunk(2, 2)
        y = F.pad(now, (0, 0, 0, 0, 0, 1)) + F.pad(later, (0, 0, 0, 0, 1, 0))
        y = y.flatten(1, 2)[:, (rate + 1) // 2 :][:, : rate * x.shape[1]] + bias
        if self.fault == "vocoder_extra_sample_left_zero" and i == 1:
            y = F.pad(y[:, :-1], (0, 0, 0, 1))
        return y

    def blocks(self, i: int, x: Tensor) -> Tensor:
        size, g, b = max(hifi.KERNELS), self.w[f"{i}_g"], self.w[f"{i}_b"]
        v = torch.stack([F.pad(self.w[f"{i}_v{k}"], [(size - k) // 2] * 2) for k in hifi.KERNELS])
        v = v * (g / torch.linalg.vector_norm(v, dim=(3, 4), keepdim=True))
        x = x[:, :, None].expand(-1, -1, len(hifi.KERNELS), -1)
        for d, gap in enumerate(hifi.DILATIONS):
            y = x
            for j, apart in ((2 * d, gap), (2 * d + 1, 1)):
                around = windows(F.leaky_relu(y, 0.1), size, apart)
                y = torch.einsum("ntgik,goik->ntgo", around, v[:, j]) + b[:, j]
            x = x + y
        return x.mean(2)

    def forward(self, mel: Tensor, speaker: Tensor) -> dict[str, Tensor]:
        w, axis = self.w, 1 if self.fault == "vocoder_speaker_normed_over_the_frames" else 2
        voice = F.normalize(w["voices"][speaker][:, None], dim=axis)
        tints = (voice @ w["tints"] + w["tints_b"]).split(hifi.WIDTHS, 2)
        around = windows((mel.mT - self.mel[0]) / self.mel[1], 7)
        x = torch.einsum("ntik,oik->nto", around, self.weight("first")) + w["first_b"] + tints[0]
        for i in self.stages:
            x = self.blocks(i, self.longer(i, F.leaky_relu(x, 0.2)) + tints[i + 1])
        x = F.leaky_relu(x, 0.1 if self.fault == "vocoder_last_slope_as_in_the_blocks" else 0.01)
        wave = (torch.einsum("ntik,oik->nt", windows(x, 7), self.weight("last")) + w["last_b"]).tanh()
        pieces = F.pad(wave, [hifi.WINDOW // 2] * 2, mode="reflect").unfold(1, hifi.WINDOW, hifi.HOP)
        power = (pieces @ self.tones).unflatten(2, (2, -1)).square().sum(2)
        return {"waveform": wave, "spectrum": 0.5 * (power + 1e-3).log().mT}


right(vocoder, "vocoder_as_stages_of_branches", "another tree of modules", StagesOfBranches)
right(vocoder, "vocoder_with_kernels_in_groups", "kernel sizes batched as groups", KernelsInGroups)
norm = ".parametrizations.weight"
first, folded = "input_conv", "mrfs.1.blocks.0.convs1.1.1"
first, folded = ((name, name + norm, name + norm + ".0") for name in (first, folded))
state = "mrfs.1.blocks.2", "mrfs.1.blocks.2.convs1.0.0"
wrong(
    vocoder,
    StagesOfBranches,
    # what a parametrization is given is the weight
    vocoder_first_norm_takes_no_gradient=("a detach too many", first, ("weight gradient", "input gradient")),
    vocoder_second_convolution_dilated_too=("wrong dilation", "mrfs.0.blocks.1.convs2.1.1"),
    vocoder_residual_adds_the_activated_state=("an activation in place", state),
    vocoder_folded_norm_over_the_outputs_in_eval=("weight norm over the wrong axes", folded, "eval"),
    vocoder_spectrum_padded_with_zeros=("wrong padding mode", "spectrum"),
)
wrong(
    vocoder,
    KernelsInGroups,
    vocoder_speaker_normed_over_the_frames=("normalised over the wrong axis", "speaker"),
    vocoder_extra_sample_left_zero=("output padding filled with zero", "upsamples.1.1"),
    vocoder_last_slope_as_in_the_blocks=("wrong slope", "output_conv.0"),
)
