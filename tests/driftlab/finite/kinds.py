"""Networks with right gradients, of many kinds, and how far the gradient check finds them off.

``python -m tests.driftlab.finite.kinds 500`` checks each with 500 seeds and prints the distribution of the
largest ratio of a check: where the limit comes from.
"""

import sys
from collections import Counter

import torch
import torch.nn.functional as F
from torch import nn

from driftlab import gradient_check


class Net(nn.Module):
    """``function(net, *inputs)`` with the given parameters and layers."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, torch.Tensor) else part)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def squares(outputs):
    return outputs.square().mean()


def perceptron(activation=nn.Tanh):
    return nn.Sequential(nn.Linear(5, 16), activation(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


def classes(outputs):
    return F.cross_entropy(outputs.flatten(1), torch.zeros(len(outputs), dtype=torch.long))


def evaluated(net, x):
    net(x)
    return net.eval()


def narrow(dtype):
    return perceptron().to(dtype), torch.randn(6, 5).to(dtype), squares


def badly_scaled():
    net = perceptron()
    with torch.no_grad():
        net[0].weight.mul_(1e8)
        net[2].weight.mul_(1e-8)
    return net, torch.randn(6, 5), squares


def tied():
    net = nn.Sequential(nn.Embedding(12, 6), nn.Tanh(), nn.Linear(6, 12))
    net[2].weight = net[0].weight
    return net, torch.randint(12, (4, 5)), squares


def zero_initialised():
    net = perceptron()
    for parameter in net[2].parameters():
        nn.init.zeros_(parameter)
    return net, torch.randn(6, 5), squares


def blank_images():
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 3)
    )
    return net, torch.zeros(2, 1, 8, 8), classes


def cancelling():
    w = torch.randn(200)
    net = Net(lambda s, x: (s.w * x).sum() - (s.b * x).sum(), w=w, b=w + 1e-6 * torch.randn(200))
    return net, torch.randn(200), torch.sum


KINDS = {
    "perceptron": lambda: (perceptron(), torch.randn(6, 5), classes),
    "gelu": lambda: (perceptron(nn.GELU), torch.randn(6, 5), None),
    "conv": lambda: (
        nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.LeakyReLU(), nn.Conv2d(8, 4, 2, groups=2)),
        torch.randn(2, 3, 9, 9),
        squares,
    ),
    "batch norm, training": lambda: (
        nn.Sequential(nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        torch.randn(4, 2, 8, 8),
        classes,
    ),
    "batch norm, evaluating": lambda: (
        evaluated(nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU()), torch.randn(9, 5)),
        torch.randn(6, 5),
        squares,
    ),
    "batch norm of two": lambda: (nn.BatchNorm1d(5), torch.randn(2, 5), lambda o: o.pow(3).sum()),
    "layer norm": lambda: (
        nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.SiLU()),
        torch.randn(6, 5),
        squares,
    ),
    "group norm": lambda: (
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True)),
        torch.randn(2, 2, 6, 6),
        None,
    ),
    "lstm": lambda: (nn.LSTM(4, 6, 2), torch.randn(5, 2, 4), lambda o: o[0].square().sum()),
    "gru": lambda: (nn.GRU(4, 6, batch_first=True), torch.randn(2, 5, 4), lambda o: o[1].sum()),
    "transformer": lambda: (
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True),
        torch.randn(2, 5, 8),
        squares,
    ),
    "embedding": lambda: (
        nn.Sequential(nn.Embedding(20, 6), nn.Flatten(), nn.Linear(24, 3)),
        torch.randint(20, (5, 4)),
        classes,
    ),
    "sparse embedding": lambda: (nn.Embedding(20, 6, sparse=True), torch.randint(20, (5, 4)), squares),
    "dropout": lambda: (nn.Sequential(nn.Linear(5, 20), nn.Dropout()), torch.randn(6, 5), squares),
    "average pool": lambda: (nn.Sequential(nn.AvgPool2d(2), nn.Tanh()), torch.randn(2, 2, 8, 8), squares),
    "abs": lambda: (lambda x: x.abs(), torch.randn(30), torch.sum),
    "clamp": lambda: (lambda x: x.clamp(-1, 1) ** 2 + x, torch.randn(30), None),
    "maximum": lambda: (lambda x: x.amax(1) + x.min(1).values, torch.randn(9, 20), None),
    "sort": lambda: (lambda x: x.sort(1).values, torch.randn(3, 9), None),
    "log sum exp": lambda: (nn.Linear(5, 40), 100 * torch.randn(6, 5), lambda o: o.logsumexp(1).mean()),
    "tiny loss": lambda: (perceptron(), torch.randn(6, 5), lambda o: 1e-12 * squares(o)),
    "huge loss": lambda: (perceptron(), torch.randn(6, 5), lambda o: 1e12 * squares(o)),
    "badly scaled": badly_scaled,
    "cancelling": cancelling,
    "zero-initialised": zero_initialised,
    "blank images": blank_images,
    "float16": lambda: narrow(torch.float16),
    "bfloat16": lambda: narrow(torch.bfloat16),
    "complex": lambda: (
        Net(lambda s, z: torch.fft.fft(s.w * z).abs(), w=torch.randn(9, dtype=torch.complex64)),
        torch.randn(4, 9, dtype=torch.complex64),
        None,
    ),
    "tied": tied,
    "one parameter": lambda: (
        Net(lambda s, x: (s.w * x).sin(), w=torch.randn(())),
        torch.arange(4),
        None,
    ),
    "a function": lambda: (torch.lgamma, torch.rand(9) + 0.5, None),
    "expanded": lambda: (perceptron(), torch.randn(1, 5).expand(6, 5), squares),
    "transposed": lambda: (perceptron(), torch.randn(5, 6).t(), squares),
    "strong curvature": lambda: (lambda x: F.softplus(100 * x) + (3 * x).exp(), torch.randn(9), torch.sum),
    "high frequency": lambda: (lambda x: (777.7 * x).sin(), torch.randn(40), None),
    "near a pole": lambda: (lambda x: 1 / x, torch.randn(9), None),
    "inverse": lambda: (torch.linalg.inv, torch.randn(4, 4) + 4 * torch.eye(4), torch.sum),
    "two inputs": lambda: (nn.Bilinear(5, 6, 4), (torch.randn(7, 5), torch.randn(7, 6)), squares),
    "weight norm": lambda: (
        nn.utils.parametrizations.weight_norm(nn.Linear(5, 6)),
        torch.randn(6, 5),
        squares,
    ),
}


def checked(kind, seed):
    torch.manual_seed(seed)
    module, inputs, loss = KINDS[kind]()
    return gradient_check(module, inputs, loss, seed=seed)


def main(seeds: int) -> None:
    torch.set_num_threads(1)
    ratios, outcomes, worst = [], Counter(), (0.0, "")
    for kind in KINDS:
        for seed in range(seeds):
            found = checked(kind, seed)
            outcomes[str(found.outcome)] += 1
            ratio = max((d.ratio for d in found.differences), default=0.0)
            ratios.append(ratio)
            worst = max(worst, (ratio, f"{kind}, seed {seed}"))
    shares = (0.5, 0.9, 0.99, 0.999, 0.9999)
    quantiles = torch.tensor(ratios).double().quantile(torch.tensor(shares).double()).tolist()
    print(f"{len(ratios)} checks of {len(KINDS)} kinds: {dict(outcomes)}")
    print(", ".join(f"{100 * s:g} %: {q:.2f}" for s, q in zip(shares, quantiles, strict=True)))
    print(f"largest {worst[0]:.2f} ({worst[1]})")


if __name__ == "__main__":
    main(int(sys.argv[1]))
