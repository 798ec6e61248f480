"""A small few-shot learner: one embedding under prototypes, relations and matching in context."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPISODES, WAYS, SHOTS, QUERIES, CHANNELS, HIGH, WIDE = 2, 3, 7, 5, 2, 16, 24
WIDTHS, RELATION, HIDDEN, STEPS = (8, 11, 9, 5), 7, 12, 3
SIZE = WIDTHS[-1] * (HIGH // 8) * (WIDE // 8)


def conv_block(in_channels: int, out_channels: int, pool: bool = True) -> nn.Sequential:
    layers = nn.Conv2d(in_channels, out_channels, 3, padding=1), nn.BatchNorm2d(out_channels), nn.ReLU()
    return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if pool else []))


class Prototypes(nn.Module):
    """Means of the support maps by class; a sample of no class has a row of zeros."""

    def forward(self, maps: Tensor, onehot: Tensor) -> Tensor:
        return torch.einsum("esw,eschv->ewchv", onehot, maps) / onehot.sum(1)[:, :, None, None, None]


class Calibration(nn.Module):
    """In evaluation the queries of an episode take on the mean and the spread of its support."""

    def __init__(self, eps: float = 1e-2):
        super().__init__()
        self.eps = eps

    def forward(self, support: Tensor, queries: Tensor) -> Tensor:
        if self.training:
            return queries
        std = (support.var(1, unbiased=False, keepdim=True) + self.eps).sqrt()
        own = (queries.var(1, unbiased=False, keepdim=True) + self.eps).sqrt()
        return (queries - queries.mean(1, keepdim=True)) / own * std + support.mean(1, keepdim=True)


class PrototypicalHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_temperature = nn.Parameter(torch.tensor(-1.3))

    def forward(self, prototypes: Tensor, queries: Tensor) -> Tensor:
        distances = (queries[:, :, None] - prototypes[:, None]).pow(2).sum(-1)
        return -self.log_temperature.exp() * distances


class RelationNetwork(nn.Module):
    """The score of each pair of a prototype's map and a query's."""

    def __init__(self):
        super().__init__()
        self.layer1 = conv_block(2 * WIDTHS[-1], RELATION, pool=False)
        self.fc1 = nn.Linear(RELATION * (HIGH // 8) * (WIDE // 8), HIDDEN)
        self.fc2 = nn.Linear(HIDDEN, 1)

    def forward(self, prototypes: Tensor, queries: Tensor) -> Tensor:
        shape = queries.shape[:2] + prototypes.shape[1:]
        pairs = prototypes[:, None].expand(shape), queries[:, :, None].expand(shape)
        out = self.layer1(torch.cat(pairs, 3).flatten(0, 2)).flatten(1)
        return torch.sigmoid(self.fc2(F.relu(self.fc1(out)))).view(shape[:3])


class BidirectionalLSTM(nn.Module):
    """The full context embedding of a support."""

    def __init__(self, size: int):
        super().__init__()
        self.lstm = nn.LSTM(size, size, bidirectional=True, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        output, _ = self.lstm(inputs)
        return output[..., : self.lstm.hidden_size] + output[..., self.lstm.hidden_size :] + inputs


class AttentionLSTM(nn.Module):
    """The full context embedding of queries, which read the support at each step."""

    def __init__(self, size: int, unrolling_steps: int):
        super().__init__()
        self.unrolling_steps = unrolling_steps
        self.lstm_cell = nn.LSTMCell(size, size)

    def forward(self, support: Tensor, queries: Tensor) -> Tensor:
        h_hat, c = torch.zeros_like(queries), torch.zeros_like(queries).flatten(0, 1)
        for _ in range(self.unrolling_steps):
            h = h_hat + queries
            attentions = torch.softmax(h @ support.transpose(1, 2), dim=2)
            state = (h + attentions @ support).flatten(0, 1)
            h_hat, c = self.lstm_cell(queries.flatten(0, 1), (state, c))
            h_hat = h_hat.view_as(queries)
        return h_hat + queries


class MatchingHead(nn.Module):
    """The log probability of each class, by attention to the support's samples that have one."""

    def forward(self, support: Tensor, queries: Tensor, onehot: Tensor) -> Tensor:
        similarity = F.cosine_similarity(queries[:, :, None], support[:, None], dim=-1)
        unlabelled = onehot.sum(2)[:, None] == 0
        attention = similarity.masked_fill(unlabelled, float("-inf")).softmax(2)
        return torch.log(attention @ onehot + 1e-6)


class FewShotLearner(nn.Module):
    """Episodes of support, its classes and queries -> logits, relation scores and log probabilities."""

    def __init__(self):
        super().__init__()
        widths = zip((CHANNELS, *WIDTHS), WIDTHS, strict=False)
        self.encoder = nn.Sequential(*(conv_block(i, o, pool=k < 3) for k, (i, o) in enumerate(widths)))
        self.prototypes, self.calibration, self.proto = Prototypes(), Calibration(), PrototypicalHead()
        self.relation, self.matching = RelationNetwork(), MatchingHead()
        self.g, self.f = BidirectionalLSTM(SIZE), AttentionLSTM(SIZE, STEPS)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.weight, 0.6, 1.4)
                nn.init.normal_(module.bias, 0.1, 0.2)
                nn.init.normal_(module.running_mean, 0, 0.2)
                nn.init.uniform_(module.running_var, 0.3, 0.9)

    def forward(self, support: Tensor, onehot: Tensor, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shots = support.shape[1]
        images = torch.cat([support, query], 1)
        maps = self.encoder(images.flatten(0, 1)).unflatten(0, images.shape[:2])
        support_maps, query_maps = maps[:, :shots], maps[:, shots:]
        prototypes = self.prototypes(support_maps, onehot)
        scores = self.relation(prototypes, query_maps)
        embedded, queries = support_maps.flatten(2), query_maps.flatten(2)
        queries = self.calibration(embedded, queries)
        logits = self.proto(prototypes.flatten(2), queries)
        context = self.g(embedded)
        return logits, scores, self.matching(context, self.f(context, queries), onehot)


def pictures(label: Tensor) -> Tensor:
    """Waves, whose class tells their direction, under noise; -1 is a class of its own."""
    turn = (label * 1.1)[..., None, None, None]
    across, down = torch.arange(WIDE) / 2, torch.arange(HIGH)[:, None] / 2
    phase = 6 * torch.rand(turn.shape) + torch.arange(CHANNELS)[:, None, None]
    wave = torch.sin(turn.cos() * across + turn.sin() * down + phase)
    return wave + 0.2 * torch.randn_like(wave)


def episodes() -> tuple[dict[str, Tensor], Tensor]:
    """Uneven shots in any order, then samples of no class up to the number of shots."""
    label = torch.full((EPISODES, SHOTS), -1)
    for row in label:
        count = int(torch.randint(SHOTS - 2, SHOTS, ()))
        order = torch.randperm(count)
        row[:count] = torch.cat([torch.arange(WAYS), torch.randint(WAYS, (count - WAYS,))])[order]
    target = torch.randint(WAYS, (EPISODES, QUERIES))
    onehot = (label[..., None] == torch.arange(WAYS)).float()
    return {"support": pictures(label), "onehot": onehot, "query": pictures(target)}, target


def three_losses(outputs: tuple[Tensor, Tensor, Tensor], target: Tensor) -> Tensor:
    """A mixture of the prototypes' cross entropy, the relations' squares and the matching's likelihood."""
    logits, scores, logs = outputs
    squares = F.mse_loss(scores, F.one_hot(target, WAYS).to(scores))
    match = F.nll_loss(logs.flatten(0, 1), target.flatten())
    return (0.4 * F.cross_entropy(logits.flatten(0, 1), target.flatten()) + squares + 0.5 * match) / 2
