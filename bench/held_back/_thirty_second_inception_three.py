"""A small Inception v3: a stem, blocks A to E, an auxiliary head in training, inputs renormalised."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIGH, WIDE, CLASSES, PICTURES = 59, 75, 6, 3


class BasicConv2d(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, **kwargs):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, bias=False, **kwargs)
        self.bn = nn.BatchNorm2d(out_channels, eps=0.001)
        nn.init.kaiming_normal_(self.conv.weight)
        nn.init.uniform_(self.bn.weight, 0.7, 1.3), nn.init.normal_(self.bn.bias, 0.1, 0.2)
        nn.init.normal_(self.bn.running_mean, 0, 0.2), nn.init.uniform_(self.bn.running_var, 0.6, 1.6)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)), inplace=True)


class InceptionA(nn.Module):
    def __init__(self, in_channels: int, pool_features: int):
        super().__init__()
        self.branch1x1 = BasicConv2d(in_channels, 8, kernel_size=1)
        self.branch5x5_1 = BasicConv2d(in_channels, 6, kernel_size=1)
        self.branch5x5_2 = BasicConv2d(6, 7, kernel_size=5, padding=2)
        self.branch3x3dbl_1 = BasicConv2d(in_channels, 5, kernel_size=1)
        self.branch3x3dbl_2 = BasicConv2d(5, 9, kernel_size=3, padding=1)
        self.branch3x3dbl_3 = BasicConv2d(9, 10, kernel_size=3, padding=1)
        self.branch_pool = BasicConv2d(in_channels, pool_features, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        branch1x1 = self.branch1x1(x)
        branch5x5 = self.branch5x5_2(self.branch5x5_1(x))
        branch3x3dbl = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        branch_pool = self.branch_pool(F.avg_pool2d(x, kernel_size=3, stride=1, padding=1))
        return torch.cat([branch1x1, branch5x5, branch3x3dbl, branch_pool], 1)


class InceptionB(nn.Module):
    def __init__(self, in_channels: int):
        super().__init__()
        self.branch3x3 = BasicConv2d(in_channels, 11, kernel_size=3, stride=2)
        self.branch3x3dbl_1 = BasicConv2d(in_channels, 6, kernel_size=1)
        self.branch3x3dbl_2 = BasicConv2d(6, 8, kernel_size=3, padding=1)
        self.branch3x3dbl_3 = BasicConv2d(8, 9, kernel_size=3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        branch3x3dbl = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        branch_pool = F.max_pool2d(x, kernel_size=3, stride=2)
        return torch.cat([self.branch3x3(x), branch3x3dbl, branch_pool], 1)


class InceptionC(nn.Module):
    def __init__(self, in_channels: int, channels_7x7: int):
        super().__init__()
        c7, row, column = channels_7x7, ((1, 7), (0, 3)), ((7, 1), (3, 0))

        def long(i: int, o: int, way: tuple) -> BasicConv2d:
            return BasicConv2d(i, o, kernel_size=way[0], padding=way[1])

        self.branch1x1 = BasicConv2d(in_channels, 9, kernel_size=1)
        self.branch7x7_1 = BasicConv2d(in_channels, c7, kernel_size=1)
        self.branch7x7_2, self.branch7x7_3 = long(c7, c7, row), long(c7, 10, column)
        self.branch7x7dbl_1 = BasicConv2d(in_channels, c7, kernel_size=1)
        self.branch7x7dbl_2, self.branch7x7dbl_3 = long(c7, c7, column), long(c7, c7, row)
        self.branch7x7dbl_4, self.branch7x7dbl_5 = long(c7, c7, column), long(c7, 11, row)
        self.branch_pool = BasicConv2d(in_channels, 12, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        branch7x7 = self.branch7x7_3(self.branch7x7_2(self.branch7x7_1(x)))
        branch7x7dbl = self.branch7x7dbl_3(self.branch7x7dbl_2(self.branch7x7dbl_1(x)))
        branch7x7dbl = self.branch7x7dbl_5(self.branch7x7dbl_4(branch7x7dbl))
        branch_pool = self.branch_pool(F.avg_pool2d(x, kernel_size=3, stride=1, padding=1))
        return torch.cat([self.branch1x1(x), branch7x7, branch7x7dbl, branch_pool], 1)


class InceptionD(nn.Module):
    def __init__(self, in_channels: int):
        super().__init__()
        self.branch3x3_1 = BasicConv2d(in_channels, 6, kernel_size=1)
        self.branch3x3_2 = BasicConv2d(6, 13, kernel_size=3, stride=2)
        self.branch7x7x3_1 = BasicConv2d(in_channels, 7, kernel_size=1)
        self.branch7x7x3_2 = BasicConv2d(7, 7, kernel_size=(1, 7), padding=(0, 3))
        self.branch7x7x3_3 = BasicConv2d(7, 7, kernel_size=(7, 1), padding=(3, 0))
        self.branch7x7x3_4 = BasicConv2d(7, 9, kernel_size=3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        branch3x3 = self.branch3x3_2(self.branch3x3_1(x))
        branch7x7x3 = self.branch7x7x3_2(self.branch7x7x3_1(x))
        branch7x7x3 = self.branch7x7x3_4(self.branch7x7x3_3(branch7x7x3))
        return torch.cat([branch3x3, branch7x7x3, F.max_pool2d(x, kernel_size=3, stride=2)], 1)


class InceptionE(nn.Module):
    def __init__(self, in_channels: int):
        super().__init__()
        row, column = {"kernel_size": (1, 3), "padding": (0, 1)}, {"kernel_size": (3, 1), "padding": (1, 0)}
        self.branch1x1 = BasicConv2d(in_channels, 11, kernel_size=1)
        self.branch3x3_1 = BasicConv2d(in_channels, 9, kernel_size=1)
        self.branch3x3_2a, self.branch3x3_2b = BasicConv2d(9, 8, **row), BasicConv2d(9, 8, **column)
        self.branch3x3dbl_1 = BasicConv2d(in_channels, 7, kernel_size=1)
        self.branch3x3dbl_2 = BasicConv2d(7, 10, kernel_size=3, padding=1)
        self.branch3x3dbl_3a, self.branch3x3dbl_3b = BasicConv2d(10, 6, **row), BasicConv2d(10, 6, **column)
        self.branch_pool = BasicConv2d(in_channels, 5, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.branch3x3_1(x)
        branch3x3 = torch.cat([self.branch3x3_2a(y), self.branch3x3_2b(y)], 1)
        y = self.branch3x3dbl_2(self.branch3x3dbl_1(x))
        branch3x3dbl = torch.cat([self.branch3x3dbl_3a(y), self.branch3x3dbl_3b(y)], 1)
        branch_pool = self.branch_pool(F.avg_pool2d(x, kernel_size=3, stride=1, padding=1))
        return torch.cat([self.branch1x1(x), branch3x3, branch3x3dbl, branch_pool], 1)


class InceptionAux(nn.Module):
    def __init__(self, in_channels: int, num_classes: int):
        super().__init__()
        self.conv0 = BasicConv2d(in_channels, 8, kernel_size=1)
        self.conv1 = BasicConv2d(8, 15, kernel_size=2)
        self.fc = nn.Linear(15, num_classes)
        nn.init.normal_(self.fc.weight, std=0.2), nn.init.normal_(self.fc.bias, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(self.conv0(F.avg_pool2d(x, kernel_size=3, stride=1)))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, (1, 1)), 1))


class Inception3(nn.Module):
    """Pictures -> logits, and the auxiliary head's too in training; without the second max pooling."""

    def __init__(self):
        super().__init__()
        self.transform_input = True
        self.Conv2d_1a_3x3 = BasicConv2d(3, 5, kernel_size=3, stride=2)
        self.Conv2d_2a_3x3 = BasicConv2d(5, 6, kernel_size=3)
        self.Conv2d_2b_3x3 = BasicConv2d(6, 8, kernel_size=3, padding=1)
        self.maxpool1 = nn.MaxPool2d(kernel_size=3, stride=2)
        self.Conv2d_3b_1x1 = BasicConv2d(8, 10, kernel_size=1)
        self.Conv2d_4a_3x3 = BasicConv2d(10, 12, kernel_size=3)
        self.Mixed_5b, self.Mixed_5c = InceptionA(12, 3), InceptionA(28, 4)
        self.Mixed_6a = InceptionB(29)
        self.Mixed_6b, self.Mixed_6c = InceptionC(49, 6), InceptionC(42, 7)
        self.AuxLogits = InceptionAux(42, CLASSES)
        self.Mixed_7a = InceptionD(42)
        self.Mixed_7b, self.Mixed_7c = InceptionE(64), InceptionE(44)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(44, CLASSES)
        nn.init.normal_(self.fc.weight, std=0.2), nn.init.normal_(self.fc.bias, std=0.1)

    def _transform_input(self, x: Tensor) -> Tensor:
        x_ch0 = torch.unsqueeze(x[:, 0], 1) * (0.229 / 0.5) + (0.485 - 0.5) / 0.5
        x_ch1 = torch.unsqueeze(x[:, 1], 1) * (0.224 / 0.5) + (0.456 - 0.5) / 0.5
        x_ch2 = torch.unsqueeze(x[:, 2], 1) * (0.225 / 0.5) + (0.406 - 0.5) / 0.5
        return torch.cat((x_ch0, x_ch1, x_ch2), 1)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self._transform_input(x) if self.transform_input else x
        x = self.maxpool1(self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x))))
        x = self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(x))
        x = self.Mixed_6a(self.Mixed_5c(self.Mixed_5b(x)))
        x = self.Mixed_6c(self.Mixed_6b(x))
        aux = self.AuxLogits(x) if self.training else None
        x = self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(x)))
        x = self.fc(torch.flatten(self.avgpool(x), 1))
        return (x, aux) if self.training else x


def stripes() -> tuple[Tensor, Tensor]:
    """Stripes, whose class tells their direction and their colour."""
    label = torch.randint(CLASSES, (PICTURES,))
    turn = (torch.pi * label / CLASSES)[:, None, None, None]
    across, down = torch.arange(WIDE) / 4, torch.arange(HIGH)[:, None] / 4
    phase, tone = 6 * torch.rand(PICTURES, 1, 1, 1), 2 * torch.arange(3)[:, None, None]
    wave = torch.sin(turn.cos() * across + turn.sin() * down + phase) + torch.cos(2 * turn + tone)
    return wave + 0.2 * torch.randn_like(wave), label


def both_heads(outputs: Tensor | tuple[Tensor, Tensor], label: Tensor) -> Tensor:
    """The cross entropy and 0.4 of the auxiliary head's, by four."""
    if isinstance(outputs, Tensor):
        return F.cross_entropy(outputs, label) / 4
    return (F.cross_entropy(outputs[0], label) + 0.4 * F.cross_entropy(outputs[1], label)) / 4
