"""A small recommender: DCN-V2 by low-rank experts and a deep tower, two tasks by MMoE, and retrieval."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, DENSE, WINDOWS, PEOPLE, ITEMS, GENRES, HISTORY = 7, 4, 3, 10, 24, 4, 5
LAYERS, RANK, LOW_RANK_EXPERTS, EXPERTS, TASKS, MASKED = 2, 5, 3, 4, 2, -40.0
BUCKETS = {"user_id": 31, "city": 13, "item_id": 37, "category": 11, "history": 19, "genres": 17}


class HashEmbedding(nn.Module):
    """An embedding of raw ids by their hash."""

    def __init__(self, buckets: int):
        super().__init__()
        self.buckets = buckets
        self.embedding = nn.Embedding(buckets, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embedding(ids * 2654435761 % 2**32 % self.buckets)


class MaskedAveragePooling(HashEmbedding):
    """The mean of the embeddings of several ids; an id of 0 is padding."""

    def forward(self, ids: Tensor) -> Tensor:
        mask = (ids > 0).unsqueeze(-1)
        return (super().forward(ids) * mask).sum(-2) / mask.sum(-2).clamp(min=1)


class FeatureEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        kinds = dict.fromkeys(BUCKETS, HashEmbedding)
        kinds |= dict.fromkeys(("history", "genres"), MaskedAveragePooling)
        self.embedding_layers = nn.ModuleDict({name: kinds[name](size) for name, size in BUCKETS.items()})

    def forward(self, features: dict[str, Tensor]) -> Tensor:
        return torch.cat([self.embedding_layers[name](ids) for name, ids in features.items()], -1)


class DenseLayer(nn.Module):
    """Counts in several windows of time, of which each kind has its norm."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(DENSE)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.log1p()).flatten(1)


class CrossNetMixLayer(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.U, self.V = (nn.Parameter(torch.randn(LOW_RANK_EXPERTS, dim, RANK) / 4) for _ in range(2))
        self.C = nn.Parameter(torch.randn(LOW_RANK_EXPERTS, RANK, RANK) / 2)
        self.bias = nn.Parameter(torch.randn(dim) / 4)
        self.gating = nn.Linear(dim, LOW_RANK_EXPERTS, bias=False)

    def forward(self, x_0: Tensor, x_l: Tensor) -> Tensor:
        experts = []
        for u, v, c in zip(self.U, self.V, self.C, strict=True):
            v_x = torch.tanh(torch.tanh(x_l @ v) @ c.T)
            experts.append(x_0 * (v_x @ u.T + self.bias))
        gate = self.gating(x_l).softmax(-1)
        return (torch.stack(experts, 2) @ gate.unsqueeze(2)).squeeze(2) + x_l


class CrossNetMix(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.layers = nn.ModuleList(CrossNetMixLayer(dim) for _ in range(LAYERS))

    def forward(self, x_0: Tensor) -> Tensor:
        x_l = x_0
        for layer in self.layers:
            x_l = layer(x_0, x_l)
        return x_l


def mlp_block(*sizes: int) -> nn.Sequential:
    layers = [f for a, b in pairwise(sizes) for f in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class MMoE(nn.Module):
    def __init__(self, dim: int, out: int):
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(dim, out), nn.ReLU()) for _ in range(EXPERTS))
        self.gate = nn.ModuleList(nn.Linear(dim, EXPERTS) for _ in range(TASKS))

    def forward(self, x: Tensor) -> list[Tensor]:
        experts = torch.stack([expert(x) for expert in self.experts], 1)
        return [(gate(x).softmax(-1).unsqueeze(-1) * experts).sum(1) for gate in self.gate]


class Retrieval(nn.Module):
    """Logits of every user for the items of the batch, then for as many sampled ones."""

    def __init__(self, user: int, item: int):
        super().__init__()
        self.user_tower, self.item_tower = mlp_block(user, 28, 16), mlp_block(item, 24, 16)
        self.log_temperature = nn.Parameter(torch.tensor(-1.2))

    def forward(self, user: Tensor, item: Tensor, ids: Tensor, frequency: Tensor) -> Tensor:
        user, item = F.normalize(self.user_tower(user), dim=-1), F.normalize(self.item_tower(item), dim=-1)
        logits = user @ item.T / self.log_temperature.exp() - frequency.log()
        duplicate = ids[: len(user), None] == ids
        duplicate = duplicate & ~torch.eye(*duplicate.shape, dtype=torch.bool, device=ids.device)
        return logits.masked_fill(duplicate, MASKED)


class DCNv2(nn.Module):
    """Logits of a click and of a like, and those of retrieval; items come in pairs, own and sampled."""

    def __init__(self):
        super().__init__()
        side, dense = 3 * WIDTH, DENSE * WINDOWS
        self.embedding_layer, self.dense = FeatureEmbedding(), DenseLayer()
        self.crossnet, self.parallel_dnn = CrossNetMix(2 * side + dense), mlp_block(2 * side + dense, 40, 26)
        self.mmoe = MMoE(2 * side + dense + 26, 22)
        self.tower = nn.ModuleList(mlp_block(22, 10, 1) for _ in range(TASKS))
        self.retrieval = Retrieval(side + dense, side)
        for tensor in (self.dense.norm.weight, self.dense.norm.running_var):
            nn.init.uniform_(tensor, 0.5, 1.5)
        for tensor in (self.dense.norm.bias, self.dense.norm.running_mean):
            nn.init.normal_(tensor, 0.3, 0.3)

    def forward(
        self, user: Tensor, history: Tensor, dense: Tensor, item: Tensor, genres: Tensor, frequency: Tensor
    ):
        item, genres, frequency = (x.transpose(0, 1).flatten(0, 1) for x in (item, genres, frequency))
        of_user = {"user_id": user[:, 0], "city": user[:, 1], "history": history}
        user = torch.cat([self.embedding_layer(of_user), self.dense(dense)], 1)
        of_item = {"item_id": item[:, 0], "category": item[:, 1], "genres": genres}
        items = self.embedding_layer(of_item)
        x = torch.cat([user, items[: len(user)]], 1)
        x = torch.cat([self.crossnet(x), self.parallel_dnn(x)], 1)
        logits = torch.cat([tower(y) for tower, y in zip(self.tower, self.mmoe(x), strict=True)], 1)
        return logits, self.retrieval(user, items, item[:, 0], frequency)


def visits() -> tuple[dict[str, Tensor], Tensor]:
    """People with a padded history, and items drawn by popularity; likes come of clicks only."""
    chance = 1 / torch.arange(2.0, ITEMS + 2)
    chance = chance / chance.sum()
    k = torch.multinomial(chance, 2 * PEOPLE, replacement=True).view(PEOPLE, 2)
    genres = (k[..., None] * torch.tensor([3, 5, 7, 11]) % 23 + 1) * (
        torch.arange(GENRES) <= k[..., None] % GENRES
    )
    user = torch.stack([torch.randint(1, 9999, (PEOPLE,)), torch.randint(100, 140, (PEOPLE,))], 1)
    kept = torch.arange(HISTORY) < torch.randint(HISTORY + 1, (PEOPLE, 1))
    history = torch.randint(1, 60, (PEOPLE, HISTORY)) * kept
    dense = torch.distributions.Exponential(0.3).sample((PEOPLE, DENSE, WINDOWS)).cumsum(2)
    click = ((user[:, 1] + k[:, 0]) % 3 > 0).float()
    item = torch.stack([1000 + 37 * k, 300 + k % 9], -1)
    named = {"user": user, "history": history, "dense": dense, "item": item, "genres": genres}
    return named | {"frequency": chance[k]}, torch.stack([click, click * (k[:, 0] % 2)], 1)


def tasks_and_retrieval(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """The clicks, the likes of what was clicked, and the sampled softmax, by four."""
    logits, retrieval = outputs
    each, click = F.binary_cross_entropy_with_logits(logits, target, reduction="none"), target[:, 0]
    like = (each[:, 1] * click).sum() / click.sum().clamp(min=1)
    own = torch.arange(len(retrieval), device=retrieval.device)
    return (each[:, 0].mean() + like + 0.5 * F.cross_entropy(retrieval, own)) / 4
