"""Two ports of a WaveNet: a tree of cells whose rows stand in line, and stacks with time first."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twenty_first_wave_net import WaveNet, next_sample, recordings

task = few("twenty_first_wave_net", WaveNet, recordings, next_sample)


def polar(conv: nn.Module) -> tuple[Tensor, Tensor]:
    """The lengths and the directions of a normed weight."""
    return conv.parametrizations.weight.original0, conv.parametrizations.weight.original1


class Affine(nn.Module):
    """One or more convolutions of one tap, side by side, for rows."""

    def __init__(self, *convs: nn.Conv1d):
        super().__init__()
        self.matrix = leaf(torch.cat([conv.weight[..., 0] for conv in convs]).T)
        self.offset = leaf(torch.cat([conv.bias for conv in convs]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.offset, x.flatten(0, 1), self.matrix).unflatten(0, x.shape[:2])


class Taps(nn.Module):
    """A normed convolution of rows [N, T, C] that stand in line until their time has come."""

    def __init__(self, conv: nn.Module):
        super().__init__()
        length, way = polar(conv)
        self.was, self.now = leaf(way[..., 0].T), leaf(way[..., 1].T)
        self.length, self.offset = leaf(length.flatten()), leaf(conv.bias)
        self.late, self.line, self.short, self.repeats = conv.dilation[0], None, 0, False

    def forward(self, x: Tensor) -> Tensor:
        if self.line is None:
            before = x[:, :1] if self.repeats else torch.zeros_like(x[:, :1])
            self.line = before.expand(-1, self.late if self.training else self.late - self.short, -1)
        late, self.line = torch.cat([self.line, x], 1).tensor_split([x.shape[1]], 1)
        size = torch.sqrt(self.was.square().sum(0) + self.now.square().sum(0))
        return torch.addcmul(self.offset, late @ self.was + x @ self.now, self.length / size)


class Cell(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.taps, self.share, self.cut = Taps(layer.conv), 0.5**0.5, False
        self.sound, self.person = (leaf(z.weight[..., 0].T) for z in (layer.conv1x1c, layer.conv1x1g))
        self.give = Affine(*(conv for conv in (layer.conv1x1_skip, layer.conv1x1_out) if conv))
        self.skip = layer.conv1x1_skip.out_channels

    def forward(self, x: Tensor, mel: Tensor, who: Tensor) -> tuple[Tensor, Tensor]:
        y = self.taps(x) + (mel.detach() if self.cut else mel) @ self.sound + (who @ self.person)[:, None]
        tone, gate = y.unflatten(2, (2, -1)).unbind(2)
        given = self.give(0.5 * tone.tanh() * (1 + (gate / 2).tanh()))
        skip, rest = given[..., : self.skip], given[..., self.skip :]
        return (x + rest) * self.share if rest.shape[-1] else x, skip


class Stretch(nn.Module):
    """Frames [N, 1, M, F] to more samples: zeros put between them, then a convolution."""

    def __init__(self, conv: nn.ConvTranspose2d):
        super().__init__()
        length, way = polar(conv)
        self.length, self.way = leaf(length.squeeze()), leaf(way.flip(2, 3))
        self.offset, self.times = leaf(conv.bias), conv.stride[1]

    def forward(self, mel: Tensor) -> Tensor:
        spaced = F.pad(mel[..., None], (0, self.times - 1)).flatten(3)
        spaced = F.pad(spaced, (3 * self.times // 2 - 1, self.times // 2, 1, 1))
        y = F.conv2d(spaced, self.way * (self.length / self.way.norm()), self.offset)
        return torch.where(y > 0, y, 0.4 * y)


class CellsInLine(Port):
    """Cells on rows [N, T, C]; evaluation passes one sample at a time, training all at once."""

    def take(self, model: WaveNet) -> None:
        self.stretch = nn.Sequential(*map(Stretch, model.upsample_conv[::2]))
        self.sounds, self.people = leaf(model.embed.weight), leaf(model.embed_speakers.weight)
        self.front, self.cells = Taps(model.first_conv), nn.ModuleList(map(Cell, model.conv_layers))
        self.head = nn.Sequential(nn.ReLU(), Affine(model.last_conv_layers[1]), nn.ReLU())
        self.head.append(Affine(model.last_conv_layers[3]))
        self.front.repeats = self.fault == "wave_net_front_convolution_repeats_the_first_sample"
        if self.fault == "wave_net_third_layer_shares_by_two_digits":
            self.cells[2].share = 0.71
        self.cells[4].cut = self.fault == "wave_net_fifth_layer_detaches_its_frames"
        self.cells[5].taps.short = int(self.fault == "wave_net_last_queue_short_by_one_in_evaluation")

    def read(self, x: Tensor, mel: Tensor, who: Tensor) -> Tensor:
        x, skips = self.front(x), 0
        for cell in self.cells:
            x, skip = cell(x, mel, who)
            skips = skips + skip / len(self.cells) ** 0.5
        return skips

    def forward(self, x: Tensor, c: Tensor, g: Tensor) -> dict[str, Tensor]:
        mel, size = self.stretch(c[:, None])[:, 0].mT, x.shape[1] if self.training else 1
        pairs = zip(self.sounds[x].split(size, 1), mel.split(size, 1), strict=True)
        skips = torch.cat([self.read(*pair, self.people[g]) for pair in pairs], 1)
        for taps in (self.front, *(cell.taps for cell in self.cells)):
            taps.line = None
        return {"logits": self.head(skips).mT, "skips": skips.mT}


class StackedWaveNet(Port):
    """Time first, weights of all layers in stacks; both conditions in one product, and all skips in one."""

    def take(self, model: WaveNet) -> None:
        self.table, self.people = leaf(model.embed.weight), leaf(model.embed_speakers.weight)
        length, way = polar(model.first_conv)
        self.front_g, self.front_v = leaf(length.flatten()), leaf(way.permute(2, 1, 0))
        self.front_b, layers = leaf(model.first_conv.bias), model.conv_layers
        normed, self.b = [polar(layer.conv) for layer in layers], pile(layer.conv.bias for layer in layers)
        self.g = pile(length.flatten() for length, _ in normed)
        self.v = pile(way.permute(2, 1, 0).flatten(0, 1) for _, way in normed)
        pairs = ((layer.conv1x1c.weight, layer.conv1x1g.weight) for layer in layers)
        self.steer = pile(torch.cat(pair, 1)[..., 0].T for pair in pairs)
        self.skip = pile(layer.conv1x1_skip.weight[..., 0].T for layer in layers)
        self.skip_b = pile(layer.conv1x1_skip.bias for layer in layers)
        self.stay = pile(layer.conv1x1_out.weight[..., 0].T for layer in layers[:-1])
        self.stay_b = pile(layer.conv1x1_out.bias for layer in layers[:-1])
        self.rates, ups = [layer.conv.dilation[0] for layer in layers], model.upsample_conv[::2]
        if self.fault == "wave_net_fourth_layer_keeps_the_dilation_of_the_third":
            self.rates[3] = self.rates[2]
        self.up_g, self.up_b = pile(polar(up)[0].squeeze() for up in ups), pile(up.bias for up in ups)
        self.up_v = nn.ParameterList(leaf(polar(up)[1].squeeze()) for up in ups)
        self.end = nn.ParameterList(leaf(z.weight[..., 0].T) for z in model.last_conv_layers[1::2])
        self.end_b = nn.ParameterList(leaf(z.bias) for z in model.last_conv_layers[1::2])

    def rise(self, i: int, mel: Tensor) -> Tensor:
        """Every frame [N, M, F] becomes a block as long as the kernel; the blocks overlap by half."""
        kernel = self.up_v[i] * self.up_g[i] / self.up_v[i].square().sum().sqrt()
        rows = F.pad(mel, (0, 0, 1, 1)).unfold(1, 3, 1)
        early, late = torch.einsum("nmfj,jk->nmfk", rows, kernel.flip(0)).chunk(2, 3)
        blocks, hop = F.pad(early, (0, 0, 0, 1)) + F.pad(late, (0, 0, 1, 0)), early.shape[3]
        start = 0 if self.fault == "wave_net_second_upsampling_cuts_its_end_only" and i == 1 else hop // 2
        y = blocks.flatten(2)[..., start : start + mel.shape[2] * hop] + self.up_b[i]
        return y.clamp(min=0) + 0.4 * y.clamp(max=0)

    def forward(self, x: Tensor, c: Tensor, g: Tensor) -> dict[str, Tensor]:
        mel = self.rise(1, self.rise(0, c)).permute(2, 0, 1)
        given = torch.cat([mel, self.people[g].expand(len(mel), -1, -1)], 2)
        steer = torch.einsum("tnc,lco->ltno", given, self.steer) + self.b[:, None, None]
        front = self.front_v * self.front_g / self.front_v.square().sum((0, 1)).sqrt()
        was, now = torch.einsum("qc,kco->kqo", self.table, front)
        sizes, x, units = [*self.v.square().sum(1).sqrt()], x.T, []
        if self.fault == "wave_net_second_layer_takes_its_norm_for_a_constant":
            sizes[1] = sizes[1].detach()
        total = now[x] + F.pad(was[x[:-1]], (0, 0, 0, 0, 1, 0)) + self.front_b
        for i, rate in enumerate(self.rates):
            state = total * 0.5 ** (i / 2)
            late = F.pad(state[:-rate], (0, 0, 0, 0, rate, 0))
            kernel = self.v[i] * self.g[i] / sizes[i]
            tone, gate = (torch.cat([late, state], 2) @ kernel + steer[i]).chunk(2, 2)
            units.append(tone.tanh() / (1 + torch.exp(-gate)))
            if i < len(self.stay):
                total = total + 2 ** (i / 2) * (units[i] @ self.stay[i] + self.stay_b[i])
        counted = self.stay if self.fault == "wave_net_skips_scaled_by_the_residual_count" else units
        skips = torch.einsum("ltnc,lcs->tns", torch.stack(units), self.skip) + self.skip_b.sum(0)
        y = skips = skips / len(counted) ** 0.5
        for matrix, offset in zip(self.end, self.end_b, strict=True):
            y = y.relu() @ matrix + offset
        return {"logits": y.permute(1, 2, 0), "skips": skips.permute(1, 2, 0)}


NORM = "conv_layers.1.conv.parametrizations.weight"
NORMS, FIFTH = ("conv_layers.1.conv", NORM, NORM + ".0"), ("conv_layers.4", "conv_layers.4.conv1x1c")
SLOPES = "input gradient", "weight gradient"
right(task, "wave_net_of_cells_in_line", "a tree of fused cells, taps apart, chunks in line", CellsInLine)
right(task, "wave_net_of_stacked_layers", "stacked weights, time first, fused conditions", StackedWaveNet)
wrong(
    task,
    CellsInLine,
    wave_net_front_convolution_repeats_the_first_sample=("another padding", "first_conv"),
    wave_net_third_layer_shares_by_two_digits=("a rounded constant", "conv_layers.2"),
    wave_net_fifth_layer_detaches_its_frames=("detach", FIFTH, SLOPES),
    wave_net_last_queue_short_by_one_in_evaluation=("a short queue", "conv_layers.5.conv", "eval"),
)
wrong(
    task,
    StackedWaveNet,
    wave_net_second_upsampling_cuts_its_end_only=("an uneven crop", "upsample_conv.2"),
    wave_net_second_layer_takes_its_norm_for_a_constant=("a norm without gradient", NORMS, SLOPES),
    wave_net_fourth_layer_keeps_the_dilation_of_the_third=("another dilation", "conv_layers.3.conv"),
    wave_net_skips_scaled_by_the_residual_count=("a sum scaled by another count", ""),
)
