"""Two ports of a small BigGAN: a tree with the channels last, and one class of packed sheets."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import GRADIENTS
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, Rows, leaf, spatial, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._thirty_eighth_big_gan import CHUNK, HIGH, WIDE, BigGAN, blobs, hinges

task = few("thirty_eighth_big_gan", BigGAN, blobs, hinges)


class Bounded(nn.Module):
    """A map of the last axis or of its windows, whose result is divided by the norm of the weight."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.kernel, self.size, self.fixed = leaf(layer.weight.flatten(1).T), layer.weight.shape[2:], False
        self.offset = None if getattr(layer, "bias", None) is None else leaf(layer.bias)
        self.register_buffer("left", layer.u0[0].clone())

    def norm(self) -> Tensor:
        with torch.no_grad():
            across = F.normalize(self.kernel @ self.left, dim=0)
            if self.training:
                self.left.copy_(F.normalize(across @ self.kernel, dim=0))
        length = (across @ self.kernel).norm()
        return length.detach() if self.fixed else length

    def forward(self, x: Tensor) -> Tensor:
        wide = self.size and self.size[0] > 1
        y = spatial(x, self.kernel.T.unflatten(1, (-1, *self.size))) if wide else x @ self.kernel
        return y / self.norm() + (0 if self.offset is None else self.offset)


class Styled(nn.Module):
    """A norm over all but the last axis, styled by a condition, then the positive part."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.stretch, self.move, self.eps = Bounded(norm.gain), Bounded(norm.bias), norm.eps
        self.register_buffer("center", norm.stored_mean.clone())
        self.register_buffer("spread", norm.stored_var.clone())

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        stats = self.center, self.spread
        x = F.batch_norm(x.movedim(3, 1), *stats, None, None, self.training, 0.1, self.eps).movedim(1, 3)
        return (x + x * self.stretch(style[:, None, None]) + self.move(style[:, None, None])).clamp(min=0)


class Stage(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        self.wide, self.fine, self.by = map(Bounded, (block.conv1, block.conv2, block.conv_sc))
        if hasattr(block, "bn1"):
            self.before, self.between = Styled(block.bn1), Styled(block.bn2)
        else:
            self.raw, self.halve = not block.preactivation, isinstance(block.downsample, nn.AvgPool2d)


class Rising(Stage):
    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        both = self.before(x, style), self.by(x)
        larger, kept = (y.repeat_interleave(2, 1).repeat_interleave(2, 2) for y in both)
        return kept + self.fine(self.between(self.wide(larger), style))


class Falling(Stage):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fine(self.wide(x if self.raw else x.relu()).relu()) + self.by(x)
        return y.unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).mean((2, 4)) if self.halve else y


class GanOfChannelsLast(Port):
    """Stages of pictures with the channels last; results are divided by the norms of the weights."""

    def take(self, model: BigGAN) -> None:
        maker, judge = model.G, model.D
        self.classes, self.seed = leaf(maker.shared.weight.T), Bounded(maker.linear)
        self.low, self.high = (Rising(x[0]) for x in maker.blocks)
        self.last, self.paint = Rows(maker.output_layer[0]), Bounded(maker.output_layer[2])
        self.fall = nn.ModuleList(Falling(x[0]) for x in judge.blocks)
        self.verdict, self.fits = Bounded(judge.linear), Bounded(judge.embed)
        self.low.between.eps = 1e-3 if self.fault == "big_gan_second_norm_with_a_larger_eps" else 1e-5
        self.fall[0].raw = self.fault != "big_gan_first_block_of_the_discriminator_activates_its_input"
        self.last.own = self.fault == "big_gan_output_norm_by_the_batch_in_evaluation"
        self.fall[1].wide.fixed = self.fault == "big_gan_spectral_norm_taken_for_a_constant"

    def paints(self, z: Tensor, label: Tensor) -> Tensor:
        seed, *noise = z.split(CHUNK, 1)
        low, high = (torch.cat([self.classes.T[label], each], 1) for each in noise)
        x = self.seed(seed).unflatten(1, (-1, HIGH, WIDE)).movedim(1, 3)
        return self.paint(self.last(self.high(self.low(x, low), high)).relu()).tanh()

    def forward(self, z: Tensor, gy: Tensor, x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        made = self.paints(z, gy)
        h = torch.cat([x.movedim(1, 3), made.detach(), made])
        for block in self.fall:
            h = block(h)
        h = h.relu().sum((1, 2))
        fits = self.fits.kernel.T[torch.cat([dy, gy, gy])] / self.fits.norm()
        score = self.verdict(h)[:, 0] + torch.einsum("nc,nc->n", fits, h)
        real, fake, fooled = score.split([len(x), len(z), len(z)])
        return made.movedim(3, 1), (1 + fake).relu().mean(), (1 - real).relu().mean(), -fooled.mean()


class PackedGan(Port):
    """Matrices with their offsets in the last column, all left vectors in one, statistics in another."""

    def take(self, model: BigGAN) -> None:
        layers = {k: x for k, x in model.named_modules() if hasattr(x, "u0")}
        self.biased = [k for k, x in layers.items() if getattr(x, "bias", None) is not None]
        columns = ([p.reshape(len(p), -1) for p in x.parameters()] for x in layers.values())
        self.at, self.w = list(layers), nn.ParameterList(leaf(torch.cat(x, 1)) for x in columns)
        self.register_buffer("left", torch.cat([x.u0[0] for x in layers.values()]))
        last, norms = model.G.output_layer[0], [n for x in model.G.blocks for n in (x[0].bn1, x[0].bn2)]
        stats = [torch.stack([n.stored_mean, n.stored_var]) for n in norms]
        stats += [torch.stack([last.running_mean, last.running_var])]
        self.widths = [x.shape[1] for x in stats]
        self.register_buffer("stats", torch.cat(stats, 1))
        self.classes, self.last = leaf(model.G.shared.weight), leaf(torch.stack([last.weight, last.bias]))

    def sharp(self, name: str) -> tuple[Tensor, Tensor | None]:
        i = self.at.index(name)
        w, b = (self.w[i][:, :-1], self.w[i][:, -1]) if name in self.biased else (self.w[i], None)
        with torch.no_grad():
            first = sum(len(x) for x in self.w[:i])
            u = self.left[first : first + len(w)]
            v = F.normalize(u @ w, dim=0)
            new = F.normalize(w @ v, dim=0)
            u.copy_(new if self.training else u)
        if self.fault == "big_gan_class_embedding_not_bounded" and name == "D.embed":
            return w, b
        return w / torch.einsum("o,oi,i->", new, w, v), b

    def conv(self, name: str, x: Tensor) -> Tensor:
        w, b = self.sharp(name)
        size = 3 if w.shape[1] == 9 * x.shape[1] else 1
        return F.conv2d(x, w.unflatten(1, (-1, size, size)), b, padding=size // 2)

    def norm(self, i: int, x: Tensor) -> Tensor:
        middle, width = self.stats.split(self.widths, 1)[i]
        return F.batch_norm(x, middle, width, training=self.training)

    def styled(self, name: str, i: int, x: Tensor, y: Tensor) -> Tensor:
        gain, bias = (torch.einsum("oi,ni->no", self.sharp(name + k)[0], y) for k in (".gain", ".bias"))
        return F.relu(self.norm(i, x) * (1 + gain)[..., None, None] + bias[..., None, None])

    def make(self, z: Tensor, y: Tensor) -> Tensor:
        w, b = self.sharp("G.linear")
        x = torch.addmm(b, z[:, :CHUNK], w.T).view(len(z), -1, HIGH, WIDE)
        for i in (0, 1):
            at, off = f"G.blocks.{i}.0", self.fault == "big_gan_second_block_reads_the_seed_chunk" and i
            k = 0 if off else i + 1
            style = torch.cat([self.classes[y], z[:, k * CHUNK : (k + 1) * CHUNK]], 1)
            h = F.interpolate(self.styled(at + ".bn1", 2 * i, x, style), scale_factor=2)
            h = self.styled(at + ".bn2", 2 * i + 1, self.conv(at + ".conv1", h), style)
            x = self.conv(at + ".conv2", h) + F.interpolate(self.conv(at + ".conv_sc", x), scale_factor=2)
        x = self.norm(4, x) * self.last[0, :, None, None] + self.last[1, :, None, None]
        return self.conv("G.output_layer.2", F.relu(x)).tanh()

    def judge(self, x: Tensor, y: Tensor) -> Tensor:
        for i in range(3):
            at, h = f"D.blocks.{i}.0", F.relu(x) if i else x
            if i == 2 and self.fault == "big_gan_last_shortcut_sees_the_activated_input":
                x = h
            h = self.conv(at + ".conv2", F.relu(self.conv(at + ".conv1", h))) + self.conv(at + ".conv_sc", x)
            x = F.avg_pool2d(h, 2) if i < 2 else h
        (w, b), h = self.sharp("D.linear"), F.relu(x).flatten(2).sum(2)
        return ((w + self.sharp("D.embed")[0][y]) * h).sum(1) + b

    def forward(self, z: Tensor, gy: Tensor, x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        made = self.make(z, gy)
        given = made if self.fault == "big_gan_discriminator_loss_reaches_the_generator" else made.detach()
        scores = self.judge(torch.cat([given, x, made]), torch.cat([gy, dy, gy]))
        n, m = len(z), len(z) + len(x)
        return made, F.relu(1 + scores[:n]).mean(), F.relu(1 - scores[n:m]).mean(), -scores[m:].mean()


right(task, "big_gan_with_channels_last", "a tree, results divided by norms, pooled after", GanOfChannelsLast)
right(task, "big_gan_of_packed_matrices", "packed matrices and buffers, flat code, fused scores", PackedGan)
wrong(
    task,
    GanOfChannelsLast,
    big_gan_second_norm_with_a_larger_eps=("another eps", "G.blocks.0.0.bn2"),
    big_gan_output_norm_by_the_batch_in_evaluation=("batch statistics in eval", "G.output_layer.0", "eval"),
    big_gan_first_block_of_the_discriminator_activates_its_input=("one more relu", "D.blocks.0.0"),
    big_gan_spectral_norm_taken_for_a_constant=("detach", "D.blocks.1.0.conv1", "weight gradient"),
)
wrong(
    task,
    PackedGan,
    big_gan_second_block_reads_the_seed_chunk=("another chunk", "G"),
    big_gan_discriminator_loss_reaches_the_generator=("detach left out", "", GRADIENTS),
    big_gan_last_shortcut_sees_the_activated_input=("activation in place", "D.blocks.2.0"),
    big_gan_class_embedding_not_bounded=("a norm left out", "D.embed"),
)
