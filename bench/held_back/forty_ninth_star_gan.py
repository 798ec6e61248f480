"""Two ports of a small StarGAN: a tree with the channels last, and packed weights with slopes by hand."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._forty_ninth_star_gan import G_SHARE, SLOPE, StarGAN, both, faces
from bench.held_back._fourth_ports import Port, leaf, pile, spatial, wrong
from bench.held_back._sixth_ports import few

task = few("forty_ninth_star_gan", StarGAN, faces, both)


class Stage(nn.Module):
    """A convolution and an instance norm of [N, H, W, C]; ``grow`` sets zeros between the pixels first."""

    def __init__(self, conv: nn.Module, norm: nn.InstanceNorm2d, grow: bool = False):
        super().__init__()
        self.kernel = leaf(conv.weight.transpose(0, 1).flip(2, 3) if grow else conv.weight)
        self.grow, self.stride, self.own = grow, 1 if grow else conv.stride[0], False
        self.gain, self.offset = leaf(norm.weight), leaf(norm.bias)
        self.register_buffer("middle", norm.running_mean.clone())
        self.register_buffer("power", norm.running_var.clone())

    def forward(self, x: Tensor) -> Tensor:
        if self.grow:
            x = F.pad(x[:, :, None, :, None], (0, 0, 0, 1, 0, 0, 0, 1)).flatten(3, 4).flatten(1, 2)
            x = F.pad(x, (0, 0, 1, 0, 1, 0))
        x = spatial(x, self.kernel, stride=self.stride)
        middle, power = self.middle, self.power
        if self.training or self.own:
            middle = x.mean((1, 2), keepdim=True)
            power = (x - middle).square().mean((1, 2), keepdim=True)
        if self.training:
            self.middle.lerp_(x.detach().mean((0, 1, 2)), 0.1)
            self.power.lerp_(x.detach().var((1, 2)).mean(0), 0.1)
        return (x - middle) * (self.gain / (power + 1e-5).sqrt()) + self.offset


class Painter(nn.Module):
    def __init__(self, main: nn.Sequential):
        super().__init__()
        self.shrink = nn.ModuleList(Stage(main[i], main[i + 1]) for i in (0, 3, 6))
        self.body = nn.ModuleList(Stage(x.main[i], x.main[i + 1]) for x in main[9:11] for i in (0, 3))
        self.grow = nn.ModuleList(Stage(main[i], main[i + 1], True) for i in (11, 14))
        self.show, self.closed = leaf(main[17].weight), False

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = torch.cat([x, labels[:, None, None].expand(-1, *x.shape[1:3], -1)], 3)
        for stage in self.shrink:
            x = stage(x).relu()
        for i in (0, 2):
            x = self.body[i + 1](self.body[i](x).relu()) + x
            if self.closed and i == 0:
                x = x.relu()
        for stage in self.grow:
            x = stage(x).relu()
        return spatial(x, self.show).tanh()


class StarGANOfTwo(Port):
    """A painter of stages of a convolution and its norm, and a judge, channels last."""

    def take(self, model: StarGAN) -> None:
        critic, self.painter = model.D, Painter(model.G.main)
        self.kernels = nn.ParameterList(leaf(layer.weight) for layer in critic.main[::2])
        self.offsets = nn.ParameterList(leaf(layer.bias) for layer in critic.main[::2])
        self.score, self.name = leaf(critic.conv1.weight), leaf(critic.conv2.weight.movedim(1, 3).flatten(1))
        self.painter.closed = self.fault == "star_gan_first_residual_sum_rectified"
        self.painter.grow[1].own = self.fault == "star_gan_last_norm_by_own_statistics_in_evaluation"

    def judge(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for i, (kernel, offset) in enumerate(zip(self.kernels, self.offsets, strict=True)):
            x = spatial(x, kernel, offset, 2)
            steep = self.fault == "star_gan_second_leak_of_the_critic_of_a_fifth" and i == 1
            x = x.relu() - (0.2 if steep else SLOPE) * (-x).relu()
        return spatial(x, self.score), x.flatten(1) @ self.name.T

    def steepness(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            slopes = torch.autograd.grad(self.judge(x)[0].sum(), x, create_graph=True)[0]
            return (slopes.flatten(1).norm(dim=1) - 1).square().mean()

    def forward(self, x_real: Tensor, c_org: Tensor, c_trg: Tensor, alpha: Tensor) -> dict[str, Tensor]:
        x = x_real.movedim(1, 3)
        fake = self.painter(x, c_trg)
        again = self.painter(fake, c_org)
        shown = fake if self.fault == "star_gan_critic_judges_attached_fakes" else fake.detach()
        (real, told), (false, _), (score, named) = self.judge(x), self.judge(shown), self.judge(fake)
        critic = false.mean() - real.mean() + 10 * self.steepness(torch.lerp(fake, x, alpha))
        critic = critic + (F.softplus(told) - told * c_org).sum(1).mean()
        maker = (F.softplus(named) - named * c_trg).sum(1).mean() - score.mean()
        maker = maker + 10 * (again - x).abs().mean()
        losses = {"loss": critic + G_SHARE * maker, "d_loss": critic, "g_loss": maker}
        return {**losses, "x_fake": fake.movedim(3, 1)}


class PackedStarGAN(Port):
    """Products of patches; norms in one sheet, the critic runs once for all, its slopes are by hand."""

    def take(self, model: StarGAN) -> None:
        main, critic = model.G.main, model.D
        inner = [x.main[i] for x in main[9:11] for i in (0, 1, 3, 4)]
        norms = [main[1], main[4], main[7], *inner[1::2], main[12], main[15]]
        self.w = nn.ParameterList(leaf(main[i].weight.flatten(1)) for i in (0, 3, 6, 11, 14, 17))
        self.body = pile(conv.weight.flatten(1) for conv in inner[::2])
        self.widths = [norm.num_features for norm in norms]
        self.affine = leaf(torch.cat([torch.stack([x.weight, x.bias]) for x in norms], 1))
        kept = [torch.stack([x.running_mean, x.running_var]) for x in norms]
        self.register_buffer("kept", torch.cat(kept, 1))
        sheets = (torch.cat([x.weight.flatten(1), x.bias[:, None]], 1) for x in critic.main[::2])
        self.critic = nn.ParameterList(map(leaf, sheets))
        self.score, self.names = leaf(critic.conv1.weight.flatten(1)), leaf(critic.conv2.weight.flatten(1))

    def patches(self, x: Tensor, rows: Tensor, size: int, stride: int = 1) -> Tensor:
        y = rows @ F.unfold(x, size, padding=(size - 1) // 2, stride=stride)
        return y.unflatten(2, (x.shape[2] // stride, -1))

    def spread(self, x: Tensor, columns: Tensor) -> Tensor:
        high, wide = x.shape[2:]
        return F.fold(columns @ x.flatten(2), (2 * high, 2 * wide), 4, padding=1, stride=2)

    def norm(self, i: int, x: Tensor) -> Tensor:
        begin = sum(self.widths[:i])
        part = slice(begin, begin + self.widths[i])
        eps = 1e-3 if self.fault == "star_gan_second_norm_with_the_epsilon_of_keras" and i == 1 else 1e-5
        sheets = (*self.kept[:, part], *self.affine[:, part])
        return F.instance_norm(x, *sheets, self.training, 0.1, eps)

    def paint(self, x: Tensor, labels: Tensor) -> Tensor:
        x = torch.cat([x, labels[:, :, None, None].expand(-1, -1, *x.shape[2:])], 1)
        for i, (size, stride) in enumerate(((7, 1), (4, 2), (4, 2))):
            x = self.norm(i, self.patches(x, self.w[i], size, stride)).clamp(min=0)
        for i in (0, 2):
            y = self.norm(3 + i, self.patches(x, self.body[i], 3)).clamp(min=0)
            x = x + self.norm(4 + i, self.patches(y, self.body[i + 1], 3))
        for i in (3, 4):
            rows = self.w[i]
            if self.fault == "star_gan_first_transposed_kernel_turned" and i == 3:
                rows = rows.unflatten(1, (-1, 16)).flip(2).flatten(1)
            x = self.norm(4 + i, self.spread(x, rows.T)).clamp(min=0)
        return self.patches(x, self.w[5], 7).tanh()

    def judge(self, x: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        rates = []
        for sheet in self.critic:
            x = self.patches(x, sheet[:, :-1], 4, 2) + sheet[:, -1:, None]
            rates.append(SLOPE + (1 - SLOPE) * (x > 0).to(x))
            x = x * rates[-1]
        return self.patches(x, self.score, 3), x.flatten(1) @ self.names.T, rates

    def steepness(self, rates: list[Tensor]) -> Tensor:
        """The critic backwards, from a one at each place of its map."""
        ones = torch.ones_like(rates[-1][:, :1]).flatten(2)
        slopes = F.fold(self.score.T @ ones, rates[-1].shape[2:], 3, padding=1)
        for sheet, rate in zip(reversed(self.critic), reversed(rates), strict=True):
            slopes = self.spread(slopes * rate, sheet[:, :-1].T)
        if self.fault == "star_gan_penalty_without_a_graph_of_its_slopes":
            slopes = slopes.detach()
        return (slopes.square().sum((1, 2, 3)).sqrt() - 1).square().mean()

    def named(self, logits: Tensor, labels: Tensor) -> Tensor:
        losses = -labels * F.logsigmoid(logits) - (1 - labels) * F.logsigmoid(-logits)
        every = self.fault == "star_gan_class_loss_averaged_over_the_labels"
        return losses.mean() if every else losses.sum(1).mean()

    def forward(self, x_real: Tensor, c_org: Tensor, c_trg: Tensor, alpha: Tensor) -> dict[str, Tensor]:
        fake = self.paint(x_real, c_trg)
        mixed = (fake + alpha * (x_real - fake)).detach()
        scores, logits, rates = self.judge(torch.cat([x_real, fake.detach(), fake, mixed]))
        real, false, score, _ = scores.mean((1, 2, 3)).chunk(4)
        told, _, named, _ = logits.chunk(4)
        penalty = self.steepness([rate.chunk(4)[3] for rate in rates])
        critic = (false - real).mean() + self.named(told, c_org) + 10 * penalty
        lost = (x_real - self.paint(fake, c_org)).abs().mean()
        maker = self.named(named, c_trg) + 10 * lost - score.mean()
        return {"loss": critic + G_SHARE * maker, "d_loss": critic, "g_loss": maker, "x_fake": fake}


SLOPES = ("input gradient", "weight gradient")
right(task, "star_gan_of_two_with_channels_last", "a tree, zeros between pixels", StarGANOfTwo)
right(task, "star_gan_of_packed_weights", "packed, one batch for the critic, slopes by hand", PackedStarGAN)
wrong(
    task,
    StarGANOfTwo,
    star_gan_first_residual_sum_rectified=("an activation too many", "G.main.9"),
    star_gan_critic_judges_attached_fakes=("a detach left out", "", SLOPES),
    star_gan_last_norm_by_own_statistics_in_evaluation=("statistics in eval", "G.main.15", "eval"),
    star_gan_second_leak_of_the_critic_of_a_fifth=("another slope", "D.main.3"),
)
wrong(
    task,
    PackedStarGAN,
    star_gan_second_norm_with_the_epsilon_of_keras=("another epsilon", "G.main.4"),
    star_gan_first_transposed_kernel_turned=("a kernel turned", "G.main.11"),
    star_gan_penalty_without_a_graph_of_its_slopes=("detach", "", "weight gradient"),
    star_gan_class_loss_averaged_over_the_labels=("another mean", ""),
)
