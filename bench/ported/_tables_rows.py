"""Networks for rows of a table: entity embeddings, factorisation machines, feature tokens, a flow."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.cases._rewritten import copied, linear_of
from bench.tasks import _classes, _task

CARDS = (5, 9, 4)


class Entities(nn.Module):
    """Three categories and five numbers -> four classes; the loss is the network's own."""

    def __init__(self):
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(size, 8) for size in CARDS)
        self.norm = nn.BatchNorm1d(5)
        self.hidden = nn.Linear(29, 32)
        self.hidden_norm = nn.BatchNorm1d(32)
        self.out = nn.Linear(32, 4)
        self.criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.0, 1.0, 2.0]), label_smoothing=0.125)

    def forward(self, categories: Tensor, numbers: Tensor, labels: Tensor) -> dict[str, Tensor]:
        parts = [embed(categories[:, i]) for i, embed in enumerate(self.embeddings)]
        x = torch.cat([*parts, self.norm(numbers)], 1)
        logits = self.out(self.hidden_norm(self.hidden(x).relu()))
        return {"loss": self.criterion(logits, labels), "logits": logits}


def _rows() -> tuple[dict, Tensor]:
    categories = torch.stack([torch.randint(size, (8,)) for size in CARDS], 1)
    categories[:2, 0] = 0
    labels = _classes(8, 4)
    return {"categories": categories, "numbers": torch.randn(8, 5), "labels": labels}, labels


def _own_loss(output: dict | tuple, targets: Tensor) -> Tensor:
    return output["loss"] if isinstance(output, dict) else output[0]


entities = _task("ported_entities", Entities, _rows, _own_loss)


class OneTable(nn.Module):
    """One table for all categories; norms and loss by hand; the answer is a tuple."""

    def __init__(
        self, model: Entities, padding: int | None = None, always: bool = False, by_count: bool = False
    ):
        super().__init__()
        self.table = copied(torch.cat([e.weight for e in model.embeddings]))
        self.register_buffer("offsets", torch.tensor([0, 5, 14]), persistent=False)
        self.norms = nn.ModuleList([model.norm, model.hidden_norm])
        by_category, by_number = model.hidden.weight.split([24, 5], 1)
        self.of_categories, self.of_numbers = linear_of(by_category, model.hidden.bias), linear_of(by_number)
        self.answer = linear_of(model.out.weight, model.out.bias)
        self.register_buffer("balance", model.criterion.weight.clone(), persistent=False)
        self.padding, self.always, self.by_count = padding, always, by_count

    def normed(self, norm: nn.BatchNorm1d, x: Tensor, always: bool) -> Tensor:
        if always and not self.training:
            return F.batch_norm(x, None, None, norm.weight, norm.bias, training=True)
        return norm(x)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        logs, weights = logits.log_softmax(1), self.balance[labels]
        exact = -logs.gather(1, labels[:, None])[:, 0] * weights
        spread = -(logs * self.balance).mean(1)
        total = (0.875 * exact + 0.125 * spread).sum()
        return total / (len(labels) if self.by_count else weights.sum())

    def forward(self, categories: Tensor, numbers: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        found = F.embedding(categories + self.offsets, self.table, padding_idx=self.padding)
        numbers = self.normed(self.norms[0], numbers, self.always)
        x = F.relu(self.of_categories(found.flatten(1)) + self.of_numbers(numbers))
        logits = self.answer(self.norms[1](x))
        return self.loss(logits, labels), logits


class Tokens(nn.Module):
    """[N, 6] -> [N, 3]: a token for each number and one to be read, attention, a gated layer."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 16)), nn.Parameter(0.1 * torch.randn(6, 16))
        self.cls = nn.Parameter(torch.randn(16))
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(16), nn.LayerNorm(16), nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.up, self.down = nn.Linear(16, 48), nn.Linear(24, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x[..., None] * self.weight + self.bias
        x = torch.cat([self.cls.expand(len(x), 1, -1), tokens], 1)
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        value, gate = self.up(self.norm2(x)).chunk(2, -1)
        x = x + self.down(value * gate.relu())
        return self.head(self.norm3(x[:, 0]).relu())


tokens = _task("ported_tokens", Tokens, lambda: (torch.randn(8, 6), torch.randn(8, 3)), F.mse_loss)


class Tokenizer(nn.Module):
    def __init__(self, model: Tokens):
        super().__init__()
        self.table = copied(torch.cat([model.cls[None], model.weight]))
        self.shift = copied(model.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([torch.ones_like(x[:, :1]), x], 1)
        return torch.einsum("nf,fd->nfd", x, self.table) + F.pad(self.shift, (0, 0, 1, 0))


class FeatureTransformer(nn.Module):
    """Projections apart, gate and value apart, norms in a list."""

    def __init__(self, model: Tokens):
        super().__init__()
        self.tokenizer, own = Tokenizer(model), model.attention
        parts = zip("qkv", own.in_proj_weight.chunk(3), own.in_proj_bias.chunk(3), strict=True)
        self.project = nn.ModuleDict({name: linear_of(weight, bias) for name, weight, bias in parts})
        self.project["o"] = linear_of(own.out_proj.weight, own.out_proj.bias)
        self.value, self.gate = (
            linear_of(*part) for part in zip(model.up.weight.chunk(2), model.up.bias.chunk(2), strict=True)
        )
        self.back, self.norms = model.down, nn.ModuleList([model.norm1, model.norm2, model.norm3])
        self.top = model.head

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokenizer(x)
        y = self.norms[0](x)
        q, k, v = (self.project[name](y).unflatten(-1, (2, 8)) for name in "qkv")
        shares = (torch.einsum("nihd,njhd->nhij", q, k) / 8**0.5).softmax(-1)
        x = x + self.project["o"](torch.einsum("nhij,njhd->nihd", shares, v).flatten(2))
        y = self.norms[1](x)
        x = x + self.back(self.value(y) * F.relu(self.gate(y)))
        return self.top(F.relu(self.norms[2](x)[:, 0]))
