"""Two ports of twin networks: a tree with the channels last, and one class of packed weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._forty_sixth_bar_low import SIZE, TwinNetworks, joint_loss, two_views
from bench.held_back._fourth_ports import Port, Rows, leaf, pile, spatial, wrong
from bench.held_back._sixth_ports import few

task = few("forty_sixth_bar_low", TwinNetworks, two_views, joint_loss)


class Unit(nn.Module):
    """A convolution of [N, H, W, C], or a product of rows, and its batch norm."""

    def __init__(self, layer: nn.Module, norm: nn.Module):
        super().__init__()
        self.flat, self.norm = layer.weight.ndim == 2, Rows(norm)
        self.kernel, self.stride = leaf(layer.weight), 1 if self.flat else layer.stride[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x @ self.kernel.T if self.flat else spatial(x, self.kernel, None, self.stride))


class Residual(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        self.enter, self.leave = Unit(block.conv1, block.bn1), Unit(block.conv2, block.bn2)
        self.across, self.early = Unit(*block.downsample) if block.downsample else nn.Identity(), False

    def forward(self, x: Tensor) -> Tensor:
        y, kept = self.leave(self.enter(x).relu()), self.across(x)
        return y.relu() + kept if self.early else (y + kept).relu()


class Head(nn.Module):
    def __init__(self, layers: nn.Sequential):
        super().__init__()
        self.units = nn.ModuleList(map(Unit, layers[:-1:3], layers[1:-1:3]))
        self.out, bias = leaf(layers[-1].weight.T), layers[-1].bias
        self.offset = 0 if bias is None else leaf(bias)

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x).relu()
        return x @ self.out + self.offset


class Branch(nn.Module):
    """Pictures of the channels last -> the means of regions, and their embeddings."""

    def __init__(self, trunk: nn.Module, head: nn.Module):
        super().__init__()
        self.stem, self.head = Unit(trunk.conv1, trunk.bn1), Head(head)
        self.blocks = nn.ModuleList(Residual(part[0]) for part in (trunk.layer1, trunk.layer2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x.movedim(1, 3)).relu()
        for block in self.blocks:
            x = block(x)
        x = x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).mean((2, 4))
        return x, self.head(x.flatten(0, 2))


class TwinsOfBranches(Port):
    """One branch for both views; losses are methods, by moments and by angles."""

    def take(self, model: TwinNetworks) -> None:
        self.student = Branch(model.backbone, model.projector)
        self.guess, norm = Head(model.predictor), model.barlow.bn
        self.register_buffer("middle", norm.running_mean.clone())
        self.register_buffer("width", norm.running_var.clone())
        self.probe, self.told = leaf(model.classifier.weight.T), leaf(model.classifier.bias)
        self.student.blocks[1].early = self.fault == "bar_low_second_block_adds_its_shortcut_after_the_relu"
        self.guess.units[0].norm.own = self.fault == "bar_low_predictor_norm_by_the_batch_in_evaluation"

    def barlow(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = (F.batch_norm(x, self.middle, self.width, training=self.training) for x in (a, b))
        c = torch.einsum("ni,nj->ij", a, b) / len(a)
        return (1 - c.diagonal()).square().sum() + 0.02 * (c.triu(1) + c.tril(-1)).square().sum()

    def vicreg(self, a: Tensor, b: Tensor) -> Tensor:
        total = 25 * (a - b).square().mean()
        for cov in (torch.cov(a.T), torch.cov(b.T)):
            var = cov.diagonal()
            biased = self.fault == "bar_low_deviation_by_the_biased_variance"
            std = ((var * (1 - 1 / len(a)) if biased else var) + 1e-4).sqrt()
            total = total + 12.5 * (1 - std).clamp(min=0).mean()
            total = total + (cov.square().sum() - var.square().sum()) / SIZE
        return total

    def angle(self, a: Tensor, b: Tensor) -> Tensor:
        return ((a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))).mean()

    def contrast(self, a: Tensor, b: Tensor) -> Tensor:
        z = F.normalize(torch.stack([a, b], 1).flatten(0, 1), dim=1)
        near = (2 * z @ z.T).exp()
        others = near.sum(1) - near.diagonal()
        return (others.log() - 2 * (z[::2] * z[1::2]).sum(1).repeat_interleave(2)).mean()

    def forward(self, view1: Tensor, view2: Tensor) -> dict[str, Tensor]:
        (h, a), (_, b) = self.student(view1), self.student(view2)
        still = b if self.fault == "bar_low_simsiam_first_pair_without_its_stop_gradient" else b.detach()
        return {
            "embedding": a,
            "barlow": self.barlow(a, b),
            "vicreg": self.vicreg(a, b),
            "simsiam": -(self.angle(self.guess(a), still) + self.angle(self.guess(b), a.detach())) / 2,
            "ntxent": self.contrast(a, b),
            "logits": h.detach().mean((1, 2)) @ self.probe + self.told,
        }


class PackedTwins(Port):
    """Matrices in a list, all norms in one weight, and their statistics in one buffer."""

    def take(self, model: TwinNetworks) -> None:
        every = [*model.backbone.modules(), *model.projector, *model.predictor]
        layers = [x for x in every if isinstance(x, (nn.Conv2d, nn.Linear))]
        norms = [x for x in every if isinstance(x, (nn.BatchNorm2d, nn.BatchNorm1d))]
        self.w = nn.ParameterList(leaf(layer.weight.flatten(1)) for layer in layers)
        self.told, self.probe = leaf(model.predictor[3].bias), leaf(model.classifier.weight)
        self.ask, self.sizes = leaf(model.classifier.bias), [*(len(x.weight) for x in norms), SIZE]
        self.affine = pile(torch.cat([getattr(x, k) for x in norms]) for k in ("weight", "bias"))
        norms, names = [*norms, model.barlow.bn], ("running_mean", "running_var")
        self.register_buffer("kept", torch.stack([torch.cat([getattr(x, k) for x in norms]) for k in names]))

    def norm(self, x: Tensor, i: int) -> Tensor:
        """The norm of [C, M], the last of all without weights."""
        part = slice(sum(self.sizes[:i]), sum(self.sizes[: i + 1]))
        (middle, var), count = self.kept[:, part], x.shape[1]
        wide = self.fault == "bar_low_first_block_second_norm_with_an_eps_of_1e_3" and i == 2
        biased = self.fault == "bar_low_second_projector_norm_keeps_the_biased_variance" and i == 7
        if self.training:
            var, middle = torch.var_mean(x, 1, correction=0)
            new = torch.stack([middle, var if biased else var * count / (count - 1)])
            self.kept[:, part].lerp_(new.detach(), 0.1)
        y = (x - middle[:, None]) / (var + (1e-3 if wide else 1e-5)).sqrt()[:, None]
        return y if i == 9 else self.affine[0, part, None] * y + self.affine[1, part, None]

    def conv(self, x: Tensor, i: int, size: int = 3, stride: int = 1) -> Tensor:
        n, _, high, wide = x.shape
        y = self.w[i] @ F.unfold(x, size, padding=size // 2, stride=stride).transpose(0, 1).flatten(1)
        return self.norm(y, i).unflatten(1, (n, high // stride, wide // stride)).transpose(0, 1)

    def embed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.conv(x, 0).relu()
        x = (x + self.conv(self.conv(x, 1).relu(), 2)).relu()
        x = (self.conv(x, 5, 1, 2) + self.conv(self.conv(x, 3, 3, 2).relu(), 4)).relu()
        h = F.avg_pool2d(x, 2).flatten(2)
        y = self.norm(self.w[6] @ h.transpose(0, 1).flatten(1), 6).relu()
        return h, self.w[8] @ self.norm(self.w[7] @ y, 7).relu()

    def forward(self, view1: Tensor, view2: Tensor) -> dict[str, Tensor]:
        (h, a), (_, b), fault = self.embed(view1), self.embed(view2), self.fault
        n, w, one, two = a.shape[1], self.w, self.norm(a, 9), self.norm(b, 9)
        c, eye = one @ two.T / n, torch.eye(SIZE).to(a)
        pull = 0.02 if fault == "bar_low_cross_correlation_weighs_its_diagonal_twice" else 0.02 * (1 - eye)
        spread = 0
        for cov in (torch.cov(a), torch.cov(b)):
            spread = spread + 12.5 * (1 - (cov.diagonal() + 1e-4) ** 0.5).relu().mean()
            spread = spread + (cov * (1 - eye)).square().sum() / SIZE
        p = [w[10] @ self.norm(w[9] @ z, 8).relu() + self.told[:, None] for z in (a, b)]
        a1, b1, p1, p2 = (z / z.norm(dim=0) for z in (a, b, *p))
        cross, masks = 2 * a1.T @ b1, fault != "bar_low_contrast_of_each_region_with_itself_too"
        far = -1e9 * masks * torch.eye(n).to(a)
        rows = torch.cat([2 * a1.T @ a1 + far, cross], 1), torch.cat([2 * b1.T @ b1 + far, cross.T], 1)
        return {
            "embedding": a.T,
            "barlow": ((c - eye) * eye).square().sum() + (pull * c.square()).sum(),
            "vicreg": 25 * (a - b).square().mean() + spread,
            "simsiam": -(p1 * b1.detach() + p2 * a1.detach()).sum() / (2 * n),
            "ntxent": torch.cat(rows).logsumexp(1).mean() - cross.diagonal().mean(),
            "logits": h.detach().mean(2) @ self.probe.T + self.ask,
        }


SLOPES = ("input gradient", "weight gradient")
right(task, "bar_low_of_branches_with_channels_last", "a tree, losses by moments and angles", TwinsOfBranches)
right(task, "bar_low_of_packed_norms", "packed norms, transposed rows, losses in one function", PackedTwins)
wrong(
    task,
    TwinsOfBranches,
    bar_low_second_block_adds_its_shortcut_after_the_relu=("order of operations", "backbone.layer2.0"),
    bar_low_predictor_norm_by_the_batch_in_evaluation=("batch statistics in eval", "predictor.1", "eval"),
    bar_low_deviation_by_the_biased_variance=("a biased variance", "vicreg"),
    bar_low_simsiam_first_pair_without_its_stop_gradient=("a missing detach", "simsiam", SLOPES),
)
wrong(
    task,
    PackedTwins,
    bar_low_first_block_second_norm_with_an_eps_of_1e_3=("an epsilon", "backbone.layer1.0.bn2"),
    bar_low_second_projector_norm_keeps_the_biased_variance=("a buffer", "projector.4", "buffer"),
    bar_low_cross_correlation_weighs_its_diagonal_twice=("a missing mask", "barlow"),
    bar_low_contrast_of_each_region_with_itself_too=("a missing mask", "ntxent"),
)
