"""Layers that keep a state or reshape their weights: standardised, spectral, renormalised, rounded."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import case, in_place_of
from bench.held_back._fifth_states import Renorm, RoundedLinear, SpectralConv, Steady
from bench.held_back._fifth_tables import SAME, fault, right
from bench.held_back._fourth_ports import Port, leaf, spatial
from bench.tasks import _task


class LastAxis(Port):
    """Channels last, the layers as functions of weights in one dict."""

    half = False

    def take(self, model: Steady) -> None:
        self.w = nn.ParameterDict({name.replace(".", "_"): leaf(p) for name, p in model.named_parameters()})
        for name, value in model.named_buffers():
            self.register_buffer(name.replace(".", "_"), value.clone())

    def standard(self, name: str, x: Tensor) -> Tensor:
        weight = self.w[name + "_weight"]
        rows = weight.flatten(1)
        if name == "last" and self.fault == "filters_by_unbiased_variance":
            rows = (rows - rows.mean(1, keepdim=True)) / (rows.var(1, keepdim=True) + 1e-5).sqrt()
        else:
            rows = F.layer_norm(rows, rows.shape[1:])
        filters = (rows / rows.shape[1] ** 0.5).view_as(weight)
        if name == "last" and self.half:
            x, filters = (part.bfloat16().to(x.dtype) for part in (x, filters))
        return spatial(x, filters, self.w[name + "_bias"])

    def spectral(self, name: str, x: Tensor) -> Tensor:
        weight, left = self.w[name + "_weight"], getattr(self, name + "_left")
        rows = weight.flatten(1)
        fixed = rows.detach()
        right = F.normalize(left @ fixed, dim=0)
        new = F.normalize(fixed @ right, dim=0)
        if self.training:
            left.copy_(new)
        size = torch.einsum("o,oi,i->", new, rows, right)
        return spatial(x, weight, None, 2) / size + self.w[name + "_bias"]

    def renormed(self, name: str, x: Tensor) -> Tensor:
        states = [getattr(self, f"{name}_{part}") for part in ("center", "deviation")]
        center, deviation = (state.clone() for state in states)
        weight, bias = self.w[name + "_weight"], self.w[name + "_bias"]
        if not self.training:
            return torch.addcmul(bias, x - center, weight / deviation)
        flat = x.flatten(0, 2)
        mean = flat.mean(0)
        root = ((flat - mean).square().mean(0) + 1e-3).sqrt()
        free = name == "norm2" and self.fault == "factors_carry_gradient"
        of_mean, of_root = (mean, root) if free else (mean.detach(), root.detach())
        stretch = (of_root / deviation).clamp(0.5, 2.0)
        move = ((of_mean - center) / deviation).clamp(-1.0, 1.0)
        with torch.no_grad():
            states[0].copy_(0.9 * center + 0.1 * mean)
            rate = 0.01 if name == "norm3" and self.fault == "deviation_at_another_rate" else 0.1
            states[1].copy_((1 - rate) * deviation + rate * root)
        return (x - mean) * (stretch / root * weight) + (move * weight + bias)

    def rounded(self, x: Tensor) -> Tensor:
        weight, bias = self.w["hidden_weight"], self.w["hidden_bias"]
        step = weight.detach().abs().max(1).values[:, None] / 15
        error = (step * (weight / step).round() - weight).detach()
        return x @ (weight + error).T + bias

    def forward(self, x: Tensor) -> Tensor:
        x = self.renormed("norm1", self.standard("stem", x.permute(0, 2, 3, 1))).relu()
        x = self.renormed("norm2", self.standard("middle", self.spectral("mixer", x).relu())).relu()
        x = self.renormed("norm3", self.standard("last", x)).relu()
        return self.rounded(x.flatten(1, 2).mean(1)).relu() @ self.w["head_weight"].T + self.w["head_bias"]


def _tinted() -> tuple[Tensor, Tensor]:
    kind = torch.randint(5, (12,))
    tint = torch.sin((kind[:, None] + 1) * torch.arange(1, 4))
    return torch.randn(12, 3, 10, 10) + tint[:, :, None, None], kind


steady = _task("fifth_steady", Steady, _tinted)


@in_place_of("mixer", SAME, "the output scaled, not the weight", steady)
class ScaledOutput(SpectralConv):
    """The convolution by the raw weight, then the division."""

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.weight, None) / self.norm() + self.bias.view(-1, 1, 1)


@in_place_of("mixer", "bug", "gradient through the power iteration", steady, passes="weight gradient")
class IterationInTheGraph(SpectralConv):
    """The vectors of the iteration depend on the weight."""

    def norm(self) -> Tensor:
        matrix = self.weight.flatten(1)
        right = F.normalize(matrix.T @ self.left.clone(), dim=0)
        left = F.normalize(matrix @ right, dim=0)
        if self.training:
            self.left.copy_(left.detach())
        return left @ matrix @ right


@in_place_of(("norm1", "norm2", "norm3"), SAME, "factors joined", steady)
class OneAffine(Renorm):
    """Everything after the mean is taken as one factor and one shift."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            scale = self.weight / self.deviation
            return x * scale[:, None, None] + (self.bias - self.center * scale)[:, None, None]
        mean = x.mean((0, 2, 3))
        root = ((x - mean[:, None, None]).square().mean((0, 2, 3)) + 1e-3).sqrt()
        held, level = root.detach(), mean.detach()
        stretch = (held / self.deviation).clamp(0.5, 2.0) / root * self.weight
        move = ((level - self.center) / self.deviation).clamp(-1.0, 1.0) * self.weight + self.bias
        self.center.mul_(0.9).add_(0.1 * level)
        self.deviation.mul_(0.9).add_(0.1 * held)
        return x * stretch[:, None, None] + (move - mean * stretch)[:, None, None]


@in_place_of("hidden", "bug", "gradient through the step", steady, passes="weight gradient")
class StepInTheGraph(RoundedLinear):
    """The step of the levels depends on the weight."""

    def rounded(self) -> Tensor:
        step = self.weight.abs().amax(1, keepdim=True) / 15
        whole = self.weight / step
        return (whole + (whole.round() - whole).detach()) * step


right(steady, LastAxis, "states_channels_last", "port, channels last")
fault(steady, LastAxis, "filters_by_unbiased_variance", "unbiased variance", "last")
fault(steady, LastAxis, "factors_carry_gradient", "a detach missing", "norm2", "input gradient")
fault(steady, LastAxis, "deviation_at_another_rate", "another momentum", "norm3", "buffer")


@case("reduced_precision", "operands in bfloat16", steady, module="last")
def last_filters_in_bfloat16(model: Steady) -> LastAxis:
    """The last convolution takes its operands in bfloat16."""
    port = LastAxis(model)
    port.half = True
    return port
