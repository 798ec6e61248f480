"""A thin DeepLabV3: bottlenecks, the last stage dilated, an atrous pyramid with image context, two heads."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STEM, PLANES, EXPANSION = 8, (4, 6, 8), 4
PYRAMID, AUX, RATES, CLASSES, IGNORED, SHAPE = 8, 6, (2, 3, 4), 5, 255, (40, 48)


def varied(module: nn.Module) -> None:
    """Start with weights and running statistics that let every layer, gain and shift count."""
    if isinstance(module, nn.BatchNorm2d):
        nn.init.uniform_(module.weight, 0.6, 1.4)
        nn.init.normal_(module.bias, std=0.2)
        nn.init.normal_(module.running_mean, std=0.2)
        nn.init.uniform_(module.running_var, 0.5, 1.5)
    elif isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        if module.bias is not None:
            nn.init.normal_(module.bias, std=0.2)


def conv3x3(inputs: int, outputs: int, stride: int = 1, dilation: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, padding=dilation, dilation=dilation, bias=False)


def conv1x1(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 1, stride, bias=False)


class Bottleneck(nn.Module):
    """Narrow, convolve, widen; the stride is in the middle."""

    def __init__(self, inputs: int, planes: int, stride: int = 1, dilation: int = 1):
        super().__init__()
        outputs = planes * EXPANSION
        self.conv1, self.bn1 = conv1x1(inputs, planes), nn.BatchNorm2d(planes)
        self.conv2, self.bn2 = conv3x3(planes, planes, stride, dilation), nn.BatchNorm2d(planes)
        self.conv3, self.bn3 = conv1x1(planes, outputs), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1 or inputs != outputs:
            self.downsample = nn.Sequential(conv1x1(inputs, outputs, stride), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        return self.relu(self.bn3(self.conv3(y)) + shortcut)


class ResNet(nn.Module):
    """The stages; where one dilates in place of a stride its first block keeps the dilation before it."""

    def __init__(self):
        super().__init__()
        a, b, c = PLANES
        self.conv1 = nn.Conv2d(3, STEM, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(STEM)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = nn.Sequential(Bottleneck(STEM, a))
        self.layer2 = nn.Sequential(Bottleneck(a * EXPANSION, b, stride=2))
        self.layer3 = nn.Sequential(Bottleneck(b * EXPANSION, c), Bottleneck(c * EXPANSION, c, dilation=2))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        aux = self.layer2(self.layer1(x))
        return {"out": self.layer3(aux), "aux": aux}


class ASPPConv(nn.Sequential):
    def __init__(self, inputs: int, outputs: int, rate: int):
        super().__init__(conv3x3(inputs, outputs, dilation=rate), nn.BatchNorm2d(outputs), nn.ReLU())


class ASPPPooling(nn.Sequential):
    """The mean of the image, spread over it again."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(
            nn.AdaptiveAvgPool2d(1), conv1x1(inputs, outputs), nn.BatchNorm2d(outputs), nn.ReLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(super().forward(x), x.shape[-2:], mode="bilinear", align_corners=False)


class ASPP(nn.Module):
    def __init__(self, inputs: int, outputs: int, rates: tuple[int, ...]):
        super().__init__()
        point = nn.Sequential(conv1x1(inputs, outputs), nn.BatchNorm2d(outputs), nn.ReLU())
        atrous = [ASPPConv(inputs, outputs, rate) for rate in rates]
        self.convs = nn.ModuleList([point, *atrous, ASPPPooling(inputs, outputs)])
        self.project = nn.Sequential(
            conv1x1(len(self.convs) * outputs, outputs), nn.BatchNorm2d(outputs), nn.ReLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.project(torch.cat([conv(x) for conv in self.convs], 1))


class DeepLabHead(nn.Sequential):
    def __init__(self, inputs: int):
        super().__init__(
            ASPP(inputs, PYRAMID, RATES),
            conv3x3(PYRAMID, PYRAMID),
            nn.BatchNorm2d(PYRAMID),
            nn.ReLU(),
            nn.Conv2d(PYRAMID, CLASSES, 1),
        )


class FCNHead(nn.Sequential):
    def __init__(self, inputs: int):
        super().__init__(conv3x3(inputs, AUX), nn.BatchNorm2d(AUX), nn.ReLU(), nn.Conv2d(AUX, CLASSES, 1))


class DeepLabV3(nn.Module):
    """Images [N, 3, H, W] -> scores of the classes at each pixel by the main and the auxiliary head."""

    def __init__(self):
        super().__init__()
        self.backbone = ResNet()
        self.classifier = DeepLabHead(PLANES[2] * EXPANSION)
        self.aux_classifier = FCNHead(PLANES[1] * EXPANSION)
        self.apply(varied)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.backbone(x)
        scores = {"out": self.classifier(features["out"]), "aux": self.aux_classifier(features["aux"])}
        return {
            name: F.interpolate(y, x.shape[-2:], mode="bilinear", align_corners=False)
            for name, y in scores.items()
        }


def street() -> tuple[Tensor, Tensor]:
    """Regions of five classes, each with its colour, light and noise; their borders are ignored."""
    fields = F.interpolate(torch.randn(4, CLASSES, 5, 6), SHAPE, mode="bilinear", align_corners=True)
    best, target = fields.topk(2, 1).values, fields.argmax(1)
    colours = torch.tensor(
        [[0.9, 0.1, -0.5], [-0.8, 0.6, 0.2], [0.1, -0.9, 0.7], [0.5, 0.8, 0.9], [-0.6, -0.4, -0.8]]
    )
    light = 1 + 0.3 * torch.randn(4, 1, 1, 1)
    images = light * colours[target].movedim(3, 1) + 0.3 * torch.randn(4, 3, *SHAPE)
    return images, target.masked_fill(best[:, 0] - best[:, 1] < 0.08, IGNORED)


def both_heads(outputs: dict[str, Tensor], target: Tensor) -> Tensor:
    """Cross entropy over what is not ignored; the auxiliary head counts half."""
    out, aux = (F.cross_entropy(outputs[name], target, ignore_index=IGNORED) for name in ("out", "aux"))
    return out + 0.5 * aux
