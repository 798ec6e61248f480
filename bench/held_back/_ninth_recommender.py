"""A ranking network: embeddings, attention over a history, pairs, crossings, click and conversion."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, DENSE, ROWS, TIME, RANK = 8, 6, 32, 6, 6
USERS, ITEMS, CATEGORIES, HOURS, TAGS = 30, 41, 10, 24, 25
FIELDS = 7


def vary(module: nn.Module) -> None:
    """Start with weights, shifts and averages that all have something to say."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight, gain=1.2)
        if module.bias is not None:
            nn.init.normal_(module.bias, std=0.2)
    elif isinstance(module, nn.BatchNorm1d):
        nn.init.uniform_(module.weight, 0.6, 1.4)
        nn.init.normal_(module.bias, std=0.3)
        nn.init.normal_(module.running_mean, std=0.2)
        nn.init.uniform_(module.running_var, 0.7, 1.5)
    elif isinstance(module, nn.Embedding | nn.EmbeddingBag):
        nn.init.normal_(module.weight, std=0.6)
        if module.padding_idx is not None:
            nn.init.zeros_(module.weight.data[module.padding_idx])


class SparseArch(nn.Module):
    """The tables; row 0 of items and categories is the filler of the history [N, T, 2]."""

    def __init__(self):
        super().__init__()
        tables = {
            "user": nn.Embedding(USERS, WIDTH),
            "item": nn.Embedding(ITEMS, WIDTH, padding_idx=0),
            "category": nn.Embedding(CATEGORIES, WIDTH, padding_idx=0),
            "hour": nn.Embedding(HOURS, WIDTH),
        }
        self.embedding_dict = nn.ModuleDict(tables)
        self.embedding_bags = nn.ModuleDict({"tags": nn.EmbeddingBag(TAGS, WIDTH, mode="sum")})

    def forward(
        self, ids: Tensor, history: Tensor, tags: Tensor, offsets: Tensor, weights: Tensor
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        fields = [table(i) for table, i in zip(self.embedding_dict.values(), ids.unbind(1), strict=True)]
        shared = self.embedding_dict["item"], self.embedding_dict["category"]
        keys = torch.cat([table(i) for table, i in zip(shared, history.unbind(2), strict=True)], -1)
        bag = self.embedding_bags["tags"](tags, offsets, per_sample_weights=weights)
        return [*fields, bag], torch.cat(fields[1:3], -1)[:, None], keys


class Perceptron(nn.Module):
    def __init__(self, width: int, out: int, norm: bool = False):
        super().__init__()
        self.linear = nn.Linear(width, out, bias=not norm)
        self.bn = nn.BatchNorm1d(out) if norm else nn.Identity()
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.bn(self.linear(x)))


class Dice(nn.Module):
    """An activation that lets more through above the average of its channel."""

    def __init__(self, width: int, eps: float = 1e-8):
        super().__init__()
        self.bn = nn.BatchNorm1d(width, eps=eps)
        self.alpha = nn.Parameter(0.2 + 0.1 * torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        p = self.bn(x.transpose(1, 2)).transpose(1, 2).sigmoid()
        return self.alpha * (1 - p) * x + p * x


class LocalActivationUnit(nn.Module):
    """The score [N, T, 1] of each key [N, T, C] for the query [N, 1, C]."""

    def __init__(self, width: int):
        super().__init__()
        layers = nn.Linear(4 * width, WIDTH), Dice(WIDTH), nn.Linear(WIDTH, WIDTH), Dice(WIDTH)
        self.dnn = nn.Sequential(*layers)
        self.dense = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        queries = query.expand_as(keys)
        return self.dense(self.dnn(torch.cat([queries, keys, queries - keys, queries * keys], -1)))


class AttentionSequencePooling(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.local_att = LocalActivationUnit(width)

    def forward(self, query: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        score = self.local_att(query, keys).transpose(1, 2)
        score = score.masked_fill(~mask[:, None], torch.finfo(score.dtype).min)
        return (score.softmax(-1) @ keys).squeeze(1)


class InteractionArch(nn.Module):
    """The dense field and the products of all pairs of fields."""

    def forward(self, dense: Tensor, fields: Tensor) -> Tensor:
        rows, columns = torch.tril_indices(fields.shape[1], fields.shape[1], -1, device=fields.device)
        products = fields @ fields.transpose(1, 2)
        return torch.cat([dense, products[:, rows, columns]], 1)


class LowRankCross(nn.Module):
    def __init__(self, width: int, rank: int):
        super().__init__()
        self.v, self.w = nn.Linear(width, rank, bias=False), nn.Linear(rank, width)

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        return x0 * self.w(self.v(x)) + x


class LowRankCrossNet(nn.Module):
    def __init__(self, width: int, rank: int, count: int):
        super().__init__()
        self.layers = nn.ModuleList(LowRankCross(width, rank) for _ in range(count))

    def forward(self, x0: Tensor) -> Tensor:
        x = x0
        for layer in self.layers:
            x = layer(x0, x)
        return x


class EntireSpace(nn.Module):
    """The chance of a click, and of a click that is followed by a conversion."""

    def __init__(self, width: int):
        super().__init__()
        self.towers = nn.ModuleDict()
        for name in ("click", "conversion"):
            self.towers[name] = nn.Sequential(Perceptron(width, WIDTH), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        click, conversion = (tower(x).squeeze(1).sigmoid() for tower in self.towers.values())
        return {"click": click, "conversion": click * conversion}


class Recommender(nn.Module):
    """Rows of numbers and ids (user, item, category, hour) -> the chances [N] of click and conversion."""

    def __init__(self):
        super().__init__()
        self.sparse_arch = SparseArch()
        self.dense_arch = nn.Sequential(Perceptron(DENSE, 12, norm=True), Perceptron(12, WIDTH, norm=True))
        self.attention = AttentionSequencePooling(2 * WIDTH)
        self.history_proj = nn.Linear(2 * WIDTH, WIDTH)
        self.inter_arch = InteractionArch()
        self.crossnet = LowRankCrossNet(FIELDS * WIDTH, RANK, 3)
        width = WIDTH + FIELDS * (FIELDS - 1) // 2 + FIELDS * WIDTH
        self.over_arch = nn.Sequential(Perceptron(width, 24), Perceptron(24, 16))
        self.esmm = EntireSpace(16)
        self.apply(vary)

    def forward(self, dense: Tensor, ids: Tensor, history: Tensor, mask: Tensor, **tags: Tensor) -> dict:
        fields, query, keys = self.sparse_arch(ids, history, **tags)
        interest = self.history_proj(self.attention(query, keys, mask))
        dense = self.dense_arch(dense)
        fields = torch.stack([dense, *fields, interest], 1)
        crossed = self.crossnet(fields.flatten(1))
        return self.esmm(self.over_arch(torch.cat([self.inter_arch(dense, fields), crossed], 1)))


def impressions() -> tuple[dict[str, Tensor], Tensor]:
    """What was shown to whom; histories of no to six items, no to three tags; click and conversion [N, 2]."""
    dense, item = torch.randn(ROWS, DENSE), torch.randint(1, ITEMS, (ROWS,))
    user, hour = torch.randint(USERS, (ROWS,)), torch.randint(HOURS, (ROWS,))
    mask = torch.arange(TIME) < torch.randint(TIME + 1, (ROWS, 1))
    past = torch.randint(1, ITEMS, (ROWS, TIME))
    kind, kinds = item % (CATEGORIES - 1) + 1, past % (CATEGORIES - 1) + 1
    counts = torch.randint(4, (ROWS,))
    tags, weights = torch.randint(TAGS, (int(counts.sum()),)), 0.3 + 1.2 * torch.rand(int(counts.sum()))
    alike = ((kinds - kind[:, None]).abs() < 3).float().mul(mask).mean(1)
    click = dense[:, 0] - dense[:, 1] + 3 * alike + (hour % 3) - 1 + torch.randn(ROWS) / 2 > 0
    bought = click & (dense[:, 2] + (item % 4) + (user % 2) - 1 > 0)
    inputs = {
        "dense": dense,
        "ids": torch.stack([user, item, kind, hour], 1),
        "history": torch.stack([past, kinds], 2) * mask[..., None],
        "mask": mask,
        "tags": tags,
        "offsets": counts.cumsum(0) - counts,
        "weights": weights,
    }
    return inputs, torch.stack([click, bought], 1).float()


def entropy(outputs: dict[str, Tensor], target: Tensor) -> Tensor:
    click, bought = target.to(outputs["click"]).unbind(1)
    both = outputs["click"], outputs["conversion"]
    return F.binary_cross_entropy(both[0], click) + F.binary_cross_entropy(both[1], bought)
