"""ResNet18 for 32x32 images (He et al., "Deep residual learning", CVPR 2016, in its usual CIFAR form)."""

import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS = {"relu": nn.ReLU, "silu": nn.SiLU}
POOLS = {"max": nn.MaxPool2d, "average": nn.AvgPool2d}


def _activation(name: str) -> nn.Module:
    if name not in ACTIVATIONS:
        raise ValueError(f"ResNet18: activation={name!r} is not known; write one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]()


def _pool(name: str | None) -> nn.Module | None:
    if name is None:
        return None
    if name not in POOLS:
        raise ValueError(f"ResNet18: pool={name!r} is not known; write one of {', '.join(POOLS)}, or None")
    return POOLS[name](kernel_size=3, stride=2, padding=1)


class BasicBlock(nn.Module):
    """Two 3x3 convs around a shortcut: [N, inputs, H, W] -> [N, outputs, H / stride, W / stride].

    Each activation is a module of its own (act1, act2), so that a hook sees each under its own name.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int, activation: str):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, groups=groups, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.act1 = _activation(activation)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, groups=groups, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )
        self.act2 = _activation(activation)

    def forward(self, x: Tensor) -> Tensor:
        residual = self.bn2(self.conv2(self.act1(self.bn1(self.conv1(x)))))
        return self.act2(residual + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet18 with a 3x3 stem and no max-pool: images [N, 3, H, W] -> logits [N, classes].

    11,173,962 parameters at width 64 with 10 classes. The initial weights are torch's defaults
    (``kaiming_uniform_`` with a = sqrt(5) for convs and the linear layer, ones and zeros for BatchNorm), as
    in the CIFAR ResNets in common use. No residual branch starts at zero, so every weight has a gradient
    from step 0.

    Args:
        width: channels of the stem and the first stage; the stages have width x (1, 2, 4, 8).
        classes: length of the logits.
        groups: of every 3x3 conv but the stem; the 1x1 convs of the shortcuts stay ungrouped.
        activation: "relu" or "silu".
        pool: "max" or "average" puts a 3x3 pool with stride 2 behind the stem's activation, as the form for
            larger images has one (max); the stages then see images of half the size.
        shrink: 2 averages every image over 2x2 pixels first, for about a quarter of the work.

    Raises:
        ValueError: for an unknown activation or pool, a size below one, a width no multiple of groups.
    """

    def __init__(
        self,
        width: int = 64,
        classes: int = 10,
        groups: int = 1,
        activation: str = "relu",
        pool: str | None = None,
        shrink: int = 1,
    ):
        super().__init__()
        if min(width, classes, groups, shrink) < 1:
            sizes = f"shrink={shrink}, width={width}, classes={classes}, groups={groups}"
            raise ValueError(f"ResNet18: {sizes} must all be 1 or more")
        if width % groups:
            below = max(width // groups, 1) * groups
            raise ValueError(
                f"ResNet18: width={width} is not a multiple of groups={groups}; write a width such as {below}"
            )
        self.shrink = shrink
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.act1 = _activation(activation)
        self.pool = _pool(pool)
        self.layer1 = _stage(width, width, 1, groups, activation)
        self.layer2 = _stage(width, 2 * width, 2, groups, activation)
        self.layer3 = _stage(2 * width, 4 * width, 2, groups, activation)
        self.layer4 = _stage(4 * width, 8 * width, 2, groups, activation)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        if self.shrink > 1:
            x = F.avg_pool2d(x, self.shrink)
        x = self.act1(self.bn1(self.conv1(x)))
        if self.pool is not None:
            x = self.pool(x)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


def _stage(inputs: int, outputs: int, stride: int, groups: int, activation: str) -> nn.Sequential:
    return nn.Sequential(
        BasicBlock(inputs, outputs, stride, groups, activation),
        BasicBlock(outputs, outputs, 1, groups, activation),
    )
