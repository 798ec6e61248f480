"""A MobileNetV3 as converted from TensorFlow: "same" padding, inverted residuals, squeeze and excitation."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES, IMAGES = 4, 8


class Conv2dSame(nn.Conv2d):
    """A convolution that pads as TensorFlow does: what is odd goes to the bottom and to the right."""

    def forward(self, x: Tensor) -> Tensor:
        pads = []
        sizes = zip(x.shape[:1:-1], self.kernel_size[::-1], self.stride[::-1], strict=True)
        for size, kernel, stride in sizes:
            total = max((math.ceil(size / stride) - 1) * stride + kernel - size, 0)
            pads += [total // 2, total - total // 2]
        return F.conv2d(F.pad(x, pads), self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


def create_conv2d(inputs: int, outputs: int, size: int, stride: int = 1, *, depthwise=False) -> nn.Conv2d:
    """A convolution without bias; where the stride is one, "same" padding is even on all sides."""
    groups = inputs if depthwise else 1
    if stride > 1:
        return Conv2dSame(inputs, outputs, size, stride, groups=groups, bias=False)
    return nn.Conv2d(inputs, outputs, size, padding=size // 2, groups=groups, bias=False)


class BatchNormAct2d(nn.BatchNorm2d):
    """A batch norm with TensorFlow's eps and decay, then the activation."""

    def __init__(self, channels: int, act_layer: type[nn.Module] = nn.Identity):
        super().__init__(channels, eps=1e-3, momentum=0.01)
        self.act = act_layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))


class HardSigmoid(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu6(x + 3) / 6


class SqueezeExcite(nn.Module):
    """A gate for each channel out of the means of all channels."""

    def __init__(self, channels: int, reduced: int):
        super().__init__()
        self.conv_reduce, self.act1 = nn.Conv2d(channels, reduced, 1), nn.ReLU()
        self.conv_expand, self.gate = nn.Conv2d(reduced, channels, 1), HardSigmoid()

    def forward(self, x: Tensor) -> Tensor:
        squeezed = self.act1(self.conv_reduce(x.mean((2, 3), keepdim=True)))
        return x * self.gate(self.conv_expand(squeezed))


class DepthwiseSeparableConv(nn.Module):
    def __init__(self, inputs: int, outputs: int, size: int, stride: int, act_layer: type[nn.Module]):
        super().__init__()
        self.has_skip = stride == 1 and inputs == outputs
        self.conv_dw = create_conv2d(inputs, inputs, size, stride, depthwise=True)
        self.bn1 = BatchNormAct2d(inputs, act_layer)
        self.se = nn.Identity()
        self.conv_pw = create_conv2d(inputs, outputs, 1)
        self.bn2 = BatchNormAct2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.se(self.bn1(self.conv_dw(x)))
        x = self.bn2(self.conv_pw(x))
        return x + shortcut if self.has_skip else x


class InvertedResidual(nn.Module):
    def __init__(
        self, inputs: int, outputs: int, size: int, stride: int, act_layer: type[nn.Module], reduced: int = 0
    ):
        super().__init__()
        wide = 3 * inputs
        self.has_skip = stride == 1 and inputs == outputs
        self.conv_pw = create_conv2d(inputs, wide, 1)
        self.bn1 = BatchNormAct2d(wide, act_layer)
        self.conv_dw = create_conv2d(wide, wide, size, stride, depthwise=True)
        self.bn2 = BatchNormAct2d(wide, act_layer)
        self.se = SqueezeExcite(wide, reduced) if reduced else nn.Identity()
        self.conv_pwl = create_conv2d(wide, outputs, 1)
        self.bn3 = BatchNormAct2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.bn1(self.conv_pw(x))
        x = self.se(self.bn2(self.conv_dw(x)))
        x = self.bn3(self.conv_pwl(x))
        return x + shortcut if self.has_skip else x


class ConvBnAct(nn.Module):
    def __init__(self, inputs: int, outputs: int, act_layer: type[nn.Module]):
        super().__init__()
        self.conv, self.bn1 = create_conv2d(inputs, outputs, 1), BatchNormAct2d(outputs, act_layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn1(self.conv(x))


def start(module: nn.Module) -> None:
    """TensorFlow's start, by the fan out of all groups, and shifts and scales as after some training."""
    if isinstance(module, nn.Conv2d):
        fan_out = math.prod(module.kernel_size) * module.out_channels
        nn.init.normal_(module.weight, std=math.sqrt(2 / fan_out))
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=module.in_features**-0.5)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.uniform_(module.weight, 0.6, 1.4)
    if getattr(module, "bias", None) is not None:
        nn.init.normal_(module.bias, std=0.3)


class MobileNetV3(nn.Module):
    """Images [N, 3, H, W] -> [N, CLASSES]; the head pools before its convolution."""

    def __init__(self):
        super().__init__()
        self.conv_stem, self.bn1 = create_conv2d(3, 8, 3, 2), BatchNormAct2d(8, nn.Hardswish)
        self.blocks = nn.Sequential(
            nn.Sequential(*(DepthwiseSeparableConv(8, 8, 3, 1, nn.ReLU) for _ in range(2))),
            nn.Sequential(
                InvertedResidual(8, 12, 3, 2, nn.ReLU),
                InvertedResidual(12, 12, 3, 1, nn.ReLU),
                InvertedResidual(12, 12, 3, 1, nn.ReLU),
            ),
            nn.Sequential(
                InvertedResidual(12, 16, 5, 2, nn.Hardswish, 8),
                InvertedResidual(16, 16, 5, 1, nn.Hardswish, 8),
                InvertedResidual(16, 16, 5, 1, nn.Hardswish, 8),
            ),
            nn.Sequential(ConvBnAct(16, 24, nn.Hardswish)),
        )
        self.global_pool = nn.AdaptiveAvgPool2d(1)
        self.conv_head, self.act2 = nn.Conv2d(24, 24, 1), nn.Hardswish()
        self.flatten = nn.Flatten()
        self.classifier = nn.Linear(24, CLASSES)
        self.apply(start)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.bn1(self.conv_stem(x)))
        x = self.act2(self.conv_head(self.global_pool(x)))
        return self.classifier(self.flatten(x))


def settled() -> MobileNetV3:
    """The network with running averages that fit its activations."""
    model = MobileNetV3()
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    decay = norms[0].momentum
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        model(gratings()[0])
    for norm in norms:
        norm.momentum = decay
    return model


def gratings() -> tuple[Tensor, Tensor]:
    """Coloured waves in noise, 24 high and 20 wide; the class is their direction."""
    kind = torch.randint(CLASSES, (IMAGES,))
    angle = (kind * math.pi / CLASSES + 0.1 * torch.randn(IMAGES))[:, None, None]
    phase = 2 * math.pi * torch.rand(IMAGES, 1, 1)
    y, x = torch.meshgrid(torch.arange(24.0), torch.arange(20.0), indexing="ij")
    waves = torch.sin(0.8 * (angle.cos() * x + angle.sin() * y) + phase)
    colours = 0.5 + torch.rand(IMAGES, 3, 1, 1)
    return 0.3 + colours * waves[:, None] + 0.3 * torch.randn(IMAGES, 3, 24, 20), kind


def entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


class LeanHardSwish(torch.autograd.Function):
    """Hard swish that keeps its input only; ``bend`` is the change of its slope between the kinks."""

    @staticmethod
    def forward(ctx, x: Tensor, bend: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.bend = bend
        return x * (x / 6 + 0.5).clamp(0, 1)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * torch.where(x.abs() < 3, ctx.bend * x + 0.5, (x > 0).to(x)), None
