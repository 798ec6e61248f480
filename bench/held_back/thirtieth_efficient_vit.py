"""Two ports of a small EfficientViT: a tree with the channels last, and flat code over packed weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, Rows, leaf, spatial, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._thirtieth_efficient_vit import DIM, SCALES, EfficientVit, quarter_entropy, stripes

SLOPES, FIRST, SECOND = ("input gradient", "weight gradient"), "stages.1.blocks.1", "stages.1.blocks.2"
MLA, EARLY = ".context_module.main", "stages.0.blocks.0.main.depth_conv"
task = few("thirtieth_efficient_vit", EfficientVit, stripes, quarter_entropy)


def by_channel(x: Tensor, weight: Tensor, stride: int = 1) -> Tensor:
    size = weight.shape[-1]
    padded = F.pad(x, (0, 0, *[size // 2] * 4))
    return torch.einsum("nhwcij,cij->nhwc", padded.unfold(1, size, stride).unfold(2, size, stride), weight)


class Unit(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        conv = layer.conv
        self.kernel, self.stride = leaf(conv.weight[:, 0] if conv.groups > 1 else conv.weight), conv.stride[0]
        self.offset = None if conv.bias is None else leaf(conv.bias)
        self.norm = Rows(layer.norm) if isinstance(layer.norm, nn.BatchNorm2d) else None
        self.bend = F.hardswish if isinstance(layer.act, nn.Hardswish) else None

    def forward(self, x: Tensor) -> Tensor:
        x = (by_channel if self.kernel.ndim == 3 else spatial)(x, self.kernel, stride=self.stride)
        x = x if self.offset is None else x + self.offset
        x = x if self.norm is None else self.norm(x)
        return x if self.bend is None else self.bend(x)


class Chain(nn.Module):
    def __init__(self, residual: nn.Module):
        super().__init__()
        self.units = nn.Sequential(*map(Unit, residual.main.children()))
        self.skips = residual.shortcut is not None

    def forward(self, x: Tensor) -> Tensor:
        return x + self.units(x) if self.skips else self.units(x)


class Scale(nn.Module):
    def __init__(self, windows: nn.Conv2d, mix: nn.Conv2d):
        super().__init__()
        self.windows, self.mix = leaf(windows.weight[:, 0]), leaf(mix.weight.view(-1, 3, DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        y = by_channel(x.flatten(3), self.windows).view_as(x)
        return torch.einsum("nyxhjd,hjed->nyxhje", y, self.mix)


class Context(nn.Module):
    """Linear attention with its scores written out, added to what it reads."""

    def __init__(self, mla: nn.Module):
        super().__init__()
        self.ask = leaf(mla.qkv.conv.weight.view(-1, 3, DIM, mla.qkv.conv.in_channels))
        self.scales = nn.ModuleList(Scale(*pair) for pair in mla.aggreg)
        self.out, self.eps, self.cascade, self.constant = Unit(mla.proj), mla.eps, False, False

    def forward(self, x: Tensor) -> Tensor:
        found = [torch.einsum("nyxc,hjdc->nyxhjd", x, self.ask)]
        for scale in self.scales:
            found.append(scale(found[-1] if self.cascade else found[0]))
        q, k, v = torch.stack(found, 3).flatten(1, 2).unbind(4)
        scores = torch.einsum("npshd,nmshd->nshpm", q.relu(), k.relu())
        total = scores.sum(-1, True) + self.eps
        scores = scores / (total.detach() if self.constant else total)
        y = torch.einsum("nshpm,nmshd->npshd", scores, v)
        return x + self.out(y.flatten(2).unflatten(1, x.shape[1:3]))


class Decision(nn.Module):
    def __init__(self, head: nn.Module):
        super().__init__()
        one, self.norm, _, two = head.classifier
        self.widen, self.bias = Unit(head.in_conv), leaf(two.bias)
        self.one, self.two = leaf(one.weight.T), leaf(two.weight.T)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm((self.widen(x) @ self.one).mean((1, 2)))
        return y * (y + 3).clamp(0, 6) / 6 @ self.two + self.bias


class VitOfChains(Port):
    def take(self, model: EfficientVit) -> None:
        (_, res0), early, late = model.stem, model.stages[0].blocks, model.stages[1].blocks
        self.row = nn.Sequential(Unit(model.stem.in_conv), *map(Chain, (res0, *early, late[0])))
        for block in late[1:]:
            self.row.extend([Context(block.context_module.main), Chain(block.local_module)])
        self.decide = Decision(model.head)
        if self.fault == "efficient_vit_stem_activation_is_silu":
            self.row[0].bend = F.silu
        self.row[5].cascade = self.fault == "efficient_vit_second_scale_reads_the_first_scale"
        self.row[7].constant = self.fault == "efficient_vit_attention_total_without_gradient"
        self.decide.widen.norm.own = self.fault == "efficient_vit_head_norm_by_the_batch_in_evaluation"

    def forward(self, x: Tensor) -> Tensor:
        return self.decide(self.row(x.movedim(1, 3)))


class PackedVit(Port):
    """All weights in one row and the norms in one table; a scale is one grouped convolution."""

    def take(self, model: EfficientVit) -> None:
        norms = {k: m for k, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}
        rest = {k: p for k, p in model.named_parameters() if k.rpartition(".")[0] not in norms}
        self.names, self.shapes = list(rest), [p.shape for p in rest.values()]
        self.norms, self.widths = list(norms), [len(m.weight) for m in norms.values()]
        self.flat = leaf(torch.cat([p.flatten() for p in rest.values()]))
        tables = (("weight", "bias"), ("running_mean", "running_var"))
        pairs = ([torch.cat([getattr(m, k) for m in norms.values()]) for k in table] for table in tables)
        affine, kept = map(torch.stack, pairs)
        self.affine = leaf(affine)
        self.register_buffer("kept", kept), self.register_buffer("seen", torch.tensor(0))

    def w(self, name: str) -> Tensor:
        i = self.names.index(name)
        sizes = [shape.numel() for shape in self.shapes[: i + 1]]
        return self.flat.narrow(0, sum(sizes[:i]), sizes[i]).view(self.shapes[i])

    def conv(self, x: Tensor, at: str, stride: int = 1, act: bool = True) -> Tensor:
        weight, norm = self.w(at + ".conv.weight"), at + ".norm"
        bias = self.w(at + ".conv.bias") if at + ".conv.bias" in self.names else None
        edge = weight.shape[-1] // 2
        early = self.fault == "efficient_vit_first_stride_pads_at_the_end"
        before = 0 if early and at == EARLY else edge
        x = F.pad(x, (before, 2 * edge - before) * 2)
        x = F.conv2d(x, weight, bias, stride, groups=x.shape[1] // weight.shape[1])
        if norm in self.norms:
            i = self.norms.index(norm)
            (gain, shift), (mean, var) = (y.split(self.widths, 1)[i] for y in (self.affine, self.kept))
            x = F.batch_norm(x, mean, var, gain, shift, self.training)
        return F.hardswish(x) if act else x

    def narrow(self, x: Tensor, at: str, stride: int = 1) -> Tensor:
        if at + ".inverted_conv.conv.weight" in self.names:
            x = self.conv(x, at + ".inverted_conv")
        return self.conv(self.conv(x, at + ".depth_conv", stride), at + ".point_conv", act=False)

    def attend(self, x: Tensor, at: str) -> Tensor:
        qkv, outs, eps = self.conv(x, at + ".qkv", act=False), [], 1e-5
        if self.fault == "efficient_vit_first_attention_has_a_larger_epsilon" and FIRST in at:
            eps = 1e-3
        for i in range(len(SCALES) + 1):
            y = qkv
            if i:
                window, mix = (self.w(f"{at}.aggreg.{i - 1}.{j}.weight") for j in range(2))
                if self.fault == "efficient_vit_last_wide_windows_frozen" and i == 2 and SECOND in at:
                    window = window.detach()
                inner = window.view(-1, 1, DIM, *window.shape[2:]).expand(-1, DIM, -1, -1, -1).flatten(0, 1)
                y = F.conv2d(qkv, mix * inner, padding=SCALES[i - 1] // 2, groups=len(mix) // DIM)
            q, k, v = y.flatten(2).unflatten(1, (-1, 3, DIM)).unbind(2)
            q, k = q.clamp(min=0), k.clamp(min=0)
            total = (k.sum(3, True) * q).sum(2, True) + eps
            outs.append((v @ k.mT @ q / total).flatten(1, 2))
        return self.conv(torch.cat(outs, 1).unflatten(2, x.shape[2:]), at + ".proj", act=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += self.training
        x = self.conv(x, "stem.in_conv", 2)
        x = self.narrow(x + self.narrow(x, "stem.res0.main"), "stages.0.blocks.0.main", 2)
        x = self.narrow(x + self.narrow(x, "stages.0.blocks.1.main"), "stages.1.blocks.0.main", 2)
        for at in (FIRST, SECOND):
            x = x + self.attend(x, at + ".context_module.main")
            x = x + self.narrow(x, at + ".local_module.main")
        y = self.conv(x, "head.in_conv").mean((2, 3)) @ self.w("head.classifier.0.weight").T
        count = y.shape[1] - (self.fault == "efficient_vit_classifier_norm_by_one_fewer")
        y = y - y.mean(1, True)
        y = y / (y.square().sum(1, True) / count + 1e-5).sqrt()
        y = F.hardswish(y * self.w("head.classifier.1.weight") + self.w("head.classifier.1.bias"))
        return F.linear(y, self.w("head.classifier.3.weight"), self.w("head.classifier.3.bias"))


right(task, "efficient_vit_of_chains", "a tree, channels last, scores written out", VitOfChains)
right(task, "efficient_vit_of_packed_weights", "packed weights, fused grouped convolutions", PackedVit)
wrong(
    task,
    VitOfChains,
    efficient_vit_stem_activation_is_silu=("another activation", "stem.in_conv.act"),
    efficient_vit_second_scale_reads_the_first_scale=("another input", FIRST + MLA),
    efficient_vit_attention_total_without_gradient=("detach", SECOND + MLA, SLOPES),
    efficient_vit_head_norm_by_the_batch_in_evaluation=("batch statistics", "head.in_conv.norm", "eval"),
)
wrong(
    task,
    PackedVit,
    efficient_vit_first_stride_pads_at_the_end=("padding", EARLY + ".conv"),
    efficient_vit_first_attention_has_a_larger_epsilon=("another epsilon", FIRST + MLA),
    efficient_vit_last_wide_windows_frozen=("detach", SECOND + MLA + ".aggreg.1.0", "weight gradient"),
    efficient_vit_classifier_norm_by_one_fewer=("unbiased variance", "head.classifier.1"),
)
