"""The networks of the bench, each with its batches and its loss: small, but of every common make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.resnet import ResNet18


@dataclass(frozen=True)
class Task:
    """What is trained: ``network()`` and ``batches()`` give the same each time they are called."""

    name: str
    network: Callable[[], nn.Module]
    batches: Callable[[], list]
    loss: Callable = F.cross_entropy


def _task(name: str, network: Callable[[], nn.Module], batch: Callable[[], tuple], loss=F.cross_entropy):
    """A task whose weights and batches come from fixed seeds; ``batch`` draws from torch's generator."""

    def seeded(make: Callable, seed: int):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return make()

    def batches() -> list:
        return seeded(lambda: [batch() for _ in range(8)], 1)

    return Task(name, lambda: seeded(network, 0), batches, loss)


class MLP(nn.Module):
    """[N, 20] -> [N, 5]; two hidden layers with ReLU."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(20, 48)
        self.act1 = nn.ReLU()
        self.fc2 = nn.Linear(48, 32)
        self.act2 = nn.ReLU()
        self.fc3 = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(self.act2(self.fc2(self.act1(self.fc1(x)))))


class CNN(nn.Module):
    """[N, 3, 16, 16] -> [N, 5]; three convs (the second strided, the third grouped), BatchNorm, max-pool."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 12, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(12)
        self.act1 = nn.ReLU()
        self.pool = nn.MaxPool2d(2)
        self.conv2 = nn.Conv2d(12, 16, 3, stride=2, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(16)
        self.act2 = nn.ReLU()
        self.conv3 = nn.Conv2d(16, 16, 3, padding=1, groups=2)
        self.norm3 = nn.GroupNorm(4, 16)
        self.act3 = nn.GELU()
        self.avg = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.act1(self.bn1(self.conv1(x))))
        x = self.act2(self.bn2(self.conv2(x)))
        return self.classify(self.act3(self.norm3(self.conv3(x))))

    def classify(self, x: Tensor) -> Tensor:
        return self.fc(self.avg(x).flatten(1))


class SelfAttention(nn.Module):
    """Causal multi-head self-attention, [N, T, D] -> [N, T, D], with one projection for q, k and v."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def by_head(self, qkv: Tensor) -> Tensor:
        """[N, T, 3 D] -> [3, N, heads, T, D / heads]."""
        return qkv.unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)

    def project(self, x: Tensor) -> Tensor:
        return self.by_head(self.qkv(x))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.drop(self.down(self.act(self.up(self.norm2(x)))))


class Transformer(nn.Module):
    """Tokens [N, T] -> logits [N, T, V]; the head shares the embedding's weight."""

    def __init__(self, dropout: float = 0.0, vocabulary: int = 29, width: int = 24, heads: int = 3):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.1 * torch.randn(12, width))
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, dropout) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def place(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens) + self.position[: tokens.shape[1]]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.place(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Recurrent(nn.Module):
    """[N, T, 6] -> [N, 4]: an LSTM, a GRU cell stepped by hand, a linear layer on its last state."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 14, batch_first=True)
        self.cell = nn.GRUCell(14, 10)
        self.fc = nn.Linear(10, 4)

    def start(self, x: Tensor) -> Tensor:
        return x.new_zeros(x.shape[0], 10)

    def states(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]

    def step(self, state: Tensor, h: Tensor) -> Tensor:
        return self.cell(state, h)

    def forward(self, x: Tensor) -> Tensor:
        states, h = self.states(x), self.start(x)
        for t in range(states.shape[1]):
            h = self.step(states[:, t], h)
        return self.fc(h)


class Autoencoder(nn.Module):
    """[N, 1, 12, 12] -> itself: strided convs down, transposed convs up, SiLU, InstanceNorm."""

    def __init__(self):
        super().__init__()
        self.down1 = nn.Conv2d(1, 8, 4, stride=2, padding=1)
        self.norm1 = nn.InstanceNorm2d(8, affine=True)
        self.act1 = nn.SiLU()
        self.down2 = nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.act2 = nn.SiLU()
        self.up1 = nn.ConvTranspose2d(12, 8, 4, stride=2, padding=1)
        self.act3 = nn.SiLU()
        self.up2 = nn.ConvTranspose2d(8, 1, 4, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act2(self.down2(self.act1(self.norm1(self.down1(x)))))
        return self.up2(self.act3(self.up1(x)))


class TwoInputs(nn.Module):
    """A dict in, a dict out: an image branch and a table branch, joined."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(2, 6, 5, padding=2)
        self.table = nn.Linear(7, 6)
        self.act = nn.Tanh()
        self.joint = nn.Linear(12, 3)

    def forward(self, signal: Tensor, table: Tensor) -> dict[str, Tensor]:
        features = torch.cat([self.act(self.conv(signal)).mean(2), self.act(self.table(table))], 1)
        return {"logits": self.joint(features), "features": features}


def _tokens_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _classes(n: int, count: int) -> Tensor:
    return torch.randint(count, (n,))


def _sequence() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(29, (6, 12))
    return tokens[:, :11], tokens[:, 1:]


def _image() -> tuple[Tensor, Tensor]:
    x = torch.randn(10, 1, 12, 12)
    return x, x


mlp = _task("mlp", MLP, lambda: (torch.randn(17, 20), _classes(17, 5)))
cnn = _task("cnn", CNN, lambda: (torch.randn(12, 3, 16, 16), _classes(12, 5)))
resnet = _task("resnet", lambda: ResNet18(width=8), lambda: (torch.randn(32, 3, 32, 32), _classes(32, 10)))
transformer = _task("transformer", Transformer, _sequence, _tokens_loss)
dropout_transformer = _task("dropout_transformer", lambda: Transformer(dropout=0.1), _sequence, _tokens_loss)
recurrent = _task("recurrent", Recurrent, lambda: (torch.randn(9, 7, 6), _classes(9, 4)))
autoencoder = _task("autoencoder", Autoencoder, _image, F.mse_loss)
two_inputs = _task(
    "two_inputs",
    TwoInputs,
    lambda: ({"signal": torch.randn(8, 2, 15), "table": torch.randn(8, 7)}, _classes(8, 3)),
    lambda outputs, targets: F.cross_entropy(outputs["logits"], targets),
)
