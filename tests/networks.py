"""The smallest networks that the experiments take: a pretended GPU takes its time by operations."""

from collections import OrderedDict

from torch import nn

from models.resnet import ResNet18


def one_block(width: int = 4, zero_scale: bool = False, **options) -> ResNet18:
    """ResNet18 with one of its eight blocks."""
    model = ResNet18(width, **options)
    model.layer1 = model.layer1[:1]
    model.layer2, model.layer3, model.layer4 = nn.Identity(), nn.Identity(), nn.Identity()
    model.fc = nn.Linear(width, model.fc.out_features)
    return model


class Added(nn.Module):
    """What its layers make of the same input, added."""

    def __init__(self, **layers):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x):
        return sum(layer(x) for layer in self.children())


def faulty_layers(width: int = 4, **options) -> nn.Sequential:
    """The layers that ``experiments/loss_curves_do_not_tell`` plants faults in, and few others."""
    first, shortcut = (nn.Conv2d(3, width, 3, stride=2, bias=False) for _ in range(2))
    third = nn.Sequential(Added(conv1=first, shortcut=nn.Sequential(shortcut)))
    conv, norm = nn.Conv2d(width, width, 3, bias=False), nn.BatchNorm2d(width)
    fourth = nn.Sequential(Added(conv1=conv), Added(bn1=norm))
    rest = {
        "act": nn.ReLU(),
        "pool": nn.AdaptiveAvgPool2d(1),
        "flat": nn.Flatten(),
        "fc": nn.Linear(width, 10),
    }
    return nn.Sequential(OrderedDict(layer3=third, layer4=fourth, **rest))
