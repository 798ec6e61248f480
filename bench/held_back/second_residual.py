"""Residual and densely connected networks."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._second_pairs import Port, classifier, leaf, pair
from bench.tasks import _classes, _task


class Block(nn.Module):
    def __init__(self, inside: int, out: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inside, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.shortcut = nn.Sequential(nn.Conv2d(inside, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class FlatResNet(Port):
    """All weights in one flat dictionary, the layers called as functions; the fault: Keras's momentum."""

    def take(self, model: nn.Sequential) -> None:
        self.w = nn.ParameterDict({k.replace(".", "_"): p for k, p in model.named_parameters()})
        for name, values in model.named_buffers():
            self.register_buffer("at_" + name.replace(".", "_"), values)

    def bn(self, name: str, x: Tensor) -> Tensor:
        mean, var = (getattr(self, f"at_{name}_running_{kind}") for kind in ("mean", "var"))
        getattr(self, f"at_{name}_num_batches_tracked").add_(int(self.training))
        momentum = 0.9 if self.fault and name == "1_shortcut_1" else 0.1
        scale, shift = self.w[name + "_weight"], self.w[name + "_bias"]
        return F.batch_norm(x, mean, var, scale, shift, self.training, momentum)

    def forward(self, x: Tensor) -> Tensor:
        for at, stride in (("0", 1), ("1", 2)):
            y = F.conv2d(x, self.w[at + "_conv1_weight"], stride=stride, padding=1)
            y = F.conv2d(self.bn(at + "_bn1", y).relu(), self.w[at + "_conv2_weight"], padding=1)
            x = F.conv2d(x, self.w[at + "_shortcut_0_weight"], stride=stride)
            x = (self.bn(at + "_bn2", y) + self.bn(at + "_shortcut_1", x)).relu()
        return F.linear(x.mean((2, 3)), self.w["4_weight"], self.w["4_bias"])


class DenseLayer(nn.Module):
    def __init__(self, inside: int):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(inside, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)

    def forward(self, features: list[Tensor]) -> Tensor:
        return F.relu(self.norm(self.conv(torch.cat(features, 1))))


class DenseNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.fc = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(32, 5)
        self.layers = nn.ModuleList(DenseLayer(8 + 8 * i) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(layer(features))
        return self.fc(torch.cat(features, 1).mean((2, 3)))


class PushingDenseNet(Port):
    """Each feature map adds its part to all later layers; the fault: two parts of the last are swapped."""

    def take(self, model: DenseNet) -> None:
        self.entry, self.norms = model.stem, nn.ModuleList(layer.norm for layer in model.layers)
        kernels = [list(layer.conv.weight.split(8, 1)) for layer in model.layers]
        if self.fault:
            kernels[2][1], kernels[2][2] = kernels[2][2], kernels[2][1]
        by_source = ([leaf(kernels[to][i]) for to in range(i, 3)] for i in range(3))
        self.from_map = nn.ModuleList(nn.ParameterList(group) for group in by_source)
        self.readout = nn.ParameterList(leaf(w) for w in model.fc.weight.split(8, 1))
        self.offset = model.fc.bias

    def forward(self, x: Tensor) -> Tensor:
        x, sums = self.entry(x), [0, 0, 0]
        logits = self.offset + x.mean((2, 3)) @ self.readout[0].T
        for i, kernels in enumerate(self.from_map):
            for to, kernel in enumerate(kernels, i):
                sums[to] = sums[to] + F.conv2d(x, kernel, padding=1)
            x = self.norms[i](sums[i]).relu()
            logits = logits + x.mean((2, 3)) @ self.readout[i + 1].T
        return logits


def _batch() -> tuple[Tensor, Tensor]:
    return torch.randn(12, 3, 10, 10), _classes(12, 5)


resnet = _task("second_resnet", lambda: classifier(Block(3, 16, 1), Block(16, 24, 2), width=24), _batch)
pair(resnet, FlatResNet, "layers_become_functions", "momentum_of_keras", "1.shortcut.1", "buffer")
dense = _task("second_densenet", DenseNet, _batch)
pair(dense, PushingDenseNet, "sum_for_concatenation", "two_maps_swapped", ("layers.2", "layers.2.conv"))
