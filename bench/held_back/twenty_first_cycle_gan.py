"""Two ports of CycleGAN: a tree of sweeps with colours last, and both directions in grouped stacks."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from bench.case import GRADIENTS
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twenty_first_cycle_gan import COLOURS, CycleGANModel, all_losses, unpaired

task = few("twenty_first_cycle_gan", CycleGANModel, unpaired, all_losses)


def mirrored(x: Tensor, edge: int, repeats: bool = False) -> Tensor:
    """[N, H, W, C] with an edge that mirrors what is inside, or repeats the outermost."""
    for axis in (1, 2):
        last = x.shape[axis] - 1
        index = torch.arange(-edge, last + edge + 1, device=x.device)
        index = index.clamp(0, last) if repeats else last - (last - index.abs()).abs()
        x = x.index_select(axis, index)
    return x


class Sweep(nn.Module):
    """A convolution of [N, H, W, C] by windows; its kernel is a matrix."""

    def __init__(self, conv: nn.Conv2d, edge: int | None = None):
        super().__init__()
        self.size, self.stride, self.zeros = conv.kernel_size[0], conv.stride[0], conv.padding[0]
        self.edge, self.repeats, self.matrix = edge, False, leaf(conv.weight.flatten(1).T)
        self.shift = None if conv.bias is None else leaf(conv.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = mirrored(x, self.edge, self.repeats) if self.edge else F.pad(x, (0, 0, *[self.zeros] * 4))
        windows = x.unfold(1, self.size, self.stride).unfold(2, self.size, self.stride)
        y = windows.flatten(3) @ self.matrix
        return y if self.shift is None else y + self.shift


class Spread(nn.Module):
    """A transposed convolution that doubles the size: zeros in between, then taps of the turned kernel."""

    def __init__(self, conv: nn.ConvTranspose2d):
        super().__init__()
        self.taps = leaf(conv.weight.flip(2, 3).permute(2, 3, 0, 1))

    def forward(self, x: Tensor) -> Tensor:
        (count, high, wide, _), size = x.shape, len(self.taps)
        sparse = F.pad(x[:, :, None, :, None], (0, 0, 0, 1, 0, 0, 0, 1))
        sparse = F.pad(sparse.reshape(count, 2 * high, 2 * wide, -1), (0, 0, 1, 1, 1, 1))
        spots = [(i, j) for i in range(size) for j in range(size)]
        return sum(sparse[:, i : i + 2 * high, j : j + 2 * wide] @ self.taps[i, j] for i, j in spots)


class Level(nn.Module):
    def __init__(self, norm: nn.InstanceNorm2d):
        super().__init__()
        self.gain, self.shift, self.eps = leaf(norm.weight), leaf(norm.bias), norm.eps
        self.constant = self.pooled = False

    def forward(self, x: Tensor) -> Tensor:
        axes = (0, 1, 2) if self.pooled and not self.training else (1, 2)
        measured = x.detach() if self.constant else x
        spread, center = torch.var_mean(measured, axes, correction=0, keepdim=True)
        return torch.addcmul(self.shift, x - center, self.gain / (spread + self.eps).sqrt())


class Echo(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        _, first, level, _, _, second, last = block.conv_block
        self.call, self.answer = nn.Sequential(Sweep(first, 1), Level(level)), Sweep(second, 1)
        self.level, self.rectified = Level(last), False

    def forward(self, x: Tensor) -> Tensor:
        x = self.level(self.answer(self.call(x).clamp(min=0))) + x
        return x.relu() if self.rectified else x


class Painter(nn.Module):
    def __init__(self, model: nn.Sequential):
        super().__init__()
        self.near, self.near_level, self.far = Sweep(model[1], 3), Level(model[2]), Sweep(model[4])
        self.far_level, self.echoes = Level(model[5]), nn.Sequential(*map(Echo, model[7:9]))
        self.spread, self.spread_level, self.brush = Spread(model[9]), Level(model[10]), Sweep(model[13], 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.far_level(self.far(F.relu(self.near_level(self.near(x)))))
        x = self.spread_level(self.spread(self.echoes(F.relu(x))))
        return torch.tanh(self.brush(F.relu(x)))


class TreeOfSweeps(Port):
    """What one generator is given of real pictures goes through it at once, and so with the critics."""

    def take(self, model: CycleGANModel) -> None:
        self.there, self.back = Painter(model.netG_A.model), Painter(model.netG_B.model)
        fault, self.critics, leak = self.fault, nn.ModuleList(), nn.LeakyReLU(0.2)
        for net in (model.netD_A.model, model.netD_B.model):
            middle = [Sweep(net[2]), Level(net[3]), leak, Sweep(net[5]), Level(net[6]), leak]
            self.critics.append(nn.Sequential(Sweep(net[0]), leak, *middle, Sweep(net[8])))
        self.there.near.repeats = fault == "cycle_gan_first_generator_begins_by_repeating_its_edge"
        self.back.echoes[1].rectified = fault == "cycle_gan_last_block_on_the_way_back_rectifies_its_sum"
        self.there.spread_level.pooled = fault == "cycle_gan_last_norm_pools_the_batch_in_evaluation"
        self.critics[0][3].constant = fault == "cycle_gan_first_critic_norm_has_constant_statistics"

    def forward(self, real_a: Tensor, real_b: Tensor) -> dict[str, Tensor]:
        a, b = real_a.movedim(1, 3), real_b.movedim(1, 3)
        fake_b, same_b = self.there(torch.cat([a, b])).tensor_split(2)
        fake_a, same_a = self.back(torch.cat([b, a])).tensor_split(2)
        named = {"fake_B": fake_b, "fake_A": fake_a, "idt_A": same_b, "idt_B": same_a}
        named |= {"rec_A": self.back(fake_b), "rec_B": self.there(fake_a)}
        teaches = self.fault == "cycle_gan_second_discriminator_teaches_its_generator"
        for name, critic, true, made in zip("AB", self.critics, (b, a), (fake_b, fake_a), strict=True):
            still = {key: value.detach() for key, value in critic.named_parameters()}
            named[f"gan_{name}"] = functional_call(critic, still, (made,))
            known = made if teaches and name == "B" else made.detach()
            named[f"real_{name}"], named[f"false_{name}"] = critic(torch.cat([true, known])).tensor_split(2)
        return {name: value.movedim(3, 1) for name, value in named.items()}


class BothWays(Port):
    """The colours of both kinds side by side: each layer of two networks is a convolution of two groups."""

    def take(self, model: CycleGANModel) -> None:
        self.paint, self.judge = nn.ParameterDict(), nn.ParameterDict()
        for store, kind in ((self.paint, "netG"), (self.judge, "netD")):
            nets = (model.get_submodule(f"{kind}_{end}").modules() for end in "AB")
            for pair in zip(*nets, strict=True):
                if isinstance(pair[0], (nn.Conv2d, nn.ConvTranspose2d)):
                    store[f"w{len(store)}"] = leaf(torch.cat([layer.weight for layer in pair]))
                    if pair[0].bias is not None:
                        store[f"b{len(store)}"] = leaf(torch.cat([layer.bias for layer in pair]))
                elif isinstance(pair[0], nn.InstanceNorm2d):
                    affine = [torch.stack([norm.weight, norm.bias]) for norm in pair]
                    store[f"n{len(store)}"] = leaf(torch.cat(affine, 1)[..., None, None])

    def normed(self, x: Tensor, affine: Tensor, eps: Tensor | float = 1e-5) -> Tensor:
        x = x - x.mean((2, 3), keepdim=True)
        return affine[0] * x * (x.square().mean((2, 3), keepdim=True) + eps).rsqrt() + affine[1]

    def painted(self, x: Tensor) -> Tensor:
        near, near_n, far, far_n, *own, wide, wide_n, brush, brush_b = self.paint.values()
        x = self.normed(F.conv2d(F.pad(x, [3] * 4, "reflect"), near, groups=2), near_n).relu()
        x = self.normed(F.conv2d(x, far, None, 2, 1, groups=2), far_n).relu()
        for i in (0, 4):
            y = self.normed(F.conv2d(F.pad(x, [1] * 4, "reflect"), own[i], groups=2), own[i + 1]).relu()
            x = x + self.normed(F.conv2d(F.pad(y, [1] * 4, "reflect"), own[i + 2], groups=2), own[i + 3])
        x = F.conv_transpose2d(x, wide, stride=2, groups=2)
        far_edge = self.fault == "cycle_gan_upsampling_crops_its_far_edge"
        x = self.normed(x[..., :-1, :-1] if far_edge else x[..., 1:, 1:], wide_n).relu()
        return F.conv2d(F.pad(x, [3] * 4, "reflect"), brush, brush_b, groups=2).tanh()

    def judged(self, x: Tensor, weights: nn.ParameterDict | dict[str, Tensor]) -> Tensor:
        near, near_b, far, far_n, deep, deep_n, *last = weights.values()
        keras = self.fault == "cycle_gan_last_norm_of_the_second_critic_has_the_eps_of_keras"
        eps = x.new_tensor([1e-5, 1e-3 if keras else 1e-5]).repeat_interleave(len(deep) // 2)[:, None, None]
        x = F.leaky_relu(F.conv2d(x, near, near_b, 2, 1, groups=2), 0.2)
        x = F.leaky_relu(self.normed(F.conv2d(x, far, None, 2, 1, groups=2), far_n), 0.2)
        x = F.leaky_relu(self.normed(F.conv2d(x, deep, None, 1, 1, groups=2), deep_n, eps), 0.2)
        return F.conv2d(x, *last, 1, 1, groups=2)

    def forward(self, real_a: Tensor, real_b: Tensor) -> dict[str, Tensor]:
        real, other = (torch.cat(x, 1) for x in ((real_a, real_b), (real_b, real_a)))
        fake, still = self.painted(real), {key: value.detach() for key, value in self.judge.items()}
        named = {("fake_B", "fake_A"): fake, ("rec_B", "rec_A"): self.painted(fake.roll(COLOURS, 1))}
        unswapped = self.fault == "cycle_gan_identities_of_the_pictures_to_translate"
        named["idt_A", "idt_B"] = self.painted(real if unswapped else other)
        named["gan_A", "gan_B"] = self.judged(fake, still)
        named["real_A", "real_B"] = self.judged(other, self.judge)
        named["false_A", "false_B"] = self.judged(fake.detach(), self.judge)
        return {name: y for names, x in named.items() for name, y in zip(names, x.chunk(2, 1), strict=True)}


right(task, "cycle_gan_of_sweeps_over_rows", "a tree of windowed sweeps, colours last", TreeOfSweeps)
right(task, "cycle_gan_of_both_ways_at_once", "both directions in grouped convolutions", BothWays)
wrong(
    task,
    TreeOfSweeps,
    cycle_gan_first_generator_begins_by_repeating_its_edge=("another padding", "netG_A.model.0"),
    cycle_gan_last_block_on_the_way_back_rectifies_its_sum=("an activation too many", "netG_B.model.8"),
    cycle_gan_last_norm_pools_the_batch_in_evaluation=("statistics too wide", "netG_A.model.10", "eval"),
    cycle_gan_first_critic_norm_has_constant_statistics=("detach", "netD_A.model.3", GRADIENTS),
    cycle_gan_second_discriminator_teaches_its_generator=("a detach missing", "", GRADIENTS),
)
wrong(
    task,
    BothWays,
    cycle_gan_upsampling_crops_its_far_edge=("crop of the wrong end", ("netG_A.model.9", "netG_B.model.9")),
    cycle_gan_last_norm_of_the_second_critic_has_the_eps_of_keras=("another eps", "netD_B.model.6"),
    cycle_gan_identities_of_the_pictures_to_translate=("wrong input", ""),
)
