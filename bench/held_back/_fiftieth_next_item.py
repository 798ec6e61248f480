"""A small pair of session recommenders, GRU4Rec and NextItNet, mixed by a gate from the user."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ITEMS, USERS, LENGTH, NEGATIVES, SESSIONS = 61, 7, 11, 6, 5
EMBEDDING, HIDDEN, CHANNELS, FINAL, USER, GATE = 18, 22, 16, 20, 10, 8
DILATIONS = (1, 2, 1, 4)


def last_valid(states: Tensor, lengths: Tensor) -> Tensor:
    """[N, T, D] -> [N, D], the state at the last item of each session."""
    index = (lengths - 1).view(-1, 1, 1).expand(-1, -1, states.shape[2])
    return states.gather(1, index).squeeze(1)


class RecencyWeights(nn.Module):
    """A learned factor for each item by how many items ago it was."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.3 * torch.randn(LENGTH))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        ago = (lengths[:, None] - 1 - torch.arange(x.shape[1], device=x.device)).clamp(min=0)
        return x * self.weight[ago].unsqueeze(2)


class OutputLayer(nn.Module):
    """Scores of all items and of the candidates, and the squares of the embeddings used."""

    def __init__(self, width: int):
        super().__init__()
        self.item_embedding = nn.Embedding(ITEMS, width)
        self.item_bias = nn.Embedding(ITEMS, 1)

    def forward(self, hidden: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        full = hidden @ self.item_embedding.weight.T + self.item_bias.weight.squeeze(1)
        rows = self.item_embedding(candidates)
        scores = (rows * hidden.unsqueeze(1)).sum(2) + self.item_bias(candidates).squeeze(2)
        return full, scores, rows.square().sum((1, 2))


class GRU4Rec(nn.Module):
    def __init__(self):
        super().__init__()
        self.item_embedding = nn.Embedding(ITEMS, EMBEDDING)
        self.recency = RecencyWeights()
        self.gru = nn.GRU(EMBEDDING, HIDDEN, batch_first=True)
        self.output = OutputLayer(HIDDEN)

    def forward(self, items: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        lengths = items.ne(0).sum(1)
        x = self.item_embedding(items) * items.ne(0).unsqueeze(2)
        states, _ = self.gru(self.recency(x, lengths))
        full, scores, squares = self.output(last_valid(states, lengths), candidates)
        return full, scores, squares + x.square().sum((1, 2))


class ResidualBlock(nn.Module):
    """Two causal convolutions, the second of twice the dilation, each before a norm of the channels."""

    def __init__(self, dilation: int):
        super().__init__()
        self.conv1 = nn.Conv1d(CHANNELS, CHANNELS, 3, dilation=dilation)
        self.ln1 = nn.LayerNorm(CHANNELS)
        self.conv2 = nn.Conv1d(CHANNELS, CHANNELS, 3, dilation=2 * dilation)
        self.ln2 = nn.LayerNorm(CHANNELS)

    def causal(self, conv: nn.Conv1d, x: Tensor) -> Tensor:
        return conv(F.pad(x.transpose(1, 2), (2 * conv.dilation[0], 0))).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.ln1(self.causal(self.conv1, x)))
        out = F.relu(self.ln2(self.causal(self.conv2, out)))
        return out + x


class NextItNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.item_embedding = nn.Embedding(ITEMS, CHANNELS)
        self.residual_blocks = nn.Sequential(*map(ResidualBlock, DILATIONS))
        self.final_layer = nn.Linear(CHANNELS, FINAL)
        self.output = OutputLayer(FINAL)

    def forward(self, items: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.item_embedding(items) * items.ne(0).unsqueeze(2)
        hidden = last_valid(self.residual_blocks(x), items.ne(0).sum(1))
        full, scores, squares = self.output(self.final_layer(hidden), candidates)
        return full, scores, squares + x.square().sum((1, 2))


class MixGate(nn.Module):
    """The share of the first recommender."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(USER, GATE)
        self.out = nn.Linear(GATE, 1)

    def forward(self, user: Tensor) -> Tensor:
        return torch.sigmoid(self.out(torch.tanh(self.dense(user))))


class FullSoftmax(nn.Module):
    """Log-probabilities of the items; the padding item has none, and reads zero."""

    def forward(self, full: Tensor) -> Tensor:
        padding = torch.arange(full.shape[1], device=full.device).eq(0)
        return full.masked_fill(padding, float("-inf")).log_softmax(1).masked_fill(padding, 0.0)


class BPRMax(nn.Module):
    def __init__(self, reg: float = 0.3):
        super().__init__()
        self.reg = reg

    def forward(self, positive: Tensor, negative: Tensor, valid: Tensor) -> Tensor:
        weight = negative.masked_fill(~valid, float("-inf")).softmax(1)
        better = (weight * torch.sigmoid(positive - negative)).sum(1)
        return -torch.log(better + 1e-24) + self.reg * (weight * negative.square()).sum(1)


class TOP1(nn.Module):
    def forward(self, positive: Tensor, negative: Tensor, valid: Tensor) -> Tensor:
        each = torch.sigmoid(negative - positive) + torch.sigmoid(negative.square())
        return (each * valid).sum(1) / valid.sum(1)


class RankingLoss(nn.Module):
    """Both losses of each session, without the negatives that are the target."""

    def __init__(self):
        super().__init__()
        self.bpr_max, self.top1 = BPRMax(), TOP1()

    def forward(self, scores: Tensor, candidates: Tensor) -> Tensor:
        positive, negative = scores[:, :1], scores[:, 1:]
        valid = candidates[:, 1:].ne(candidates[:, :1])
        return self.bpr_max(positive, negative, valid) + self.top1(positive, negative, valid)


class SessionPair(nn.Module):
    """Sessions, users and candidates, the target first -> scores, log-probabilities, losses, squares."""

    def __init__(self):
        super().__init__()
        self.gru4rec, self.nextitnet = GRU4Rec(), NextItNet()
        self.user_embedding = nn.Embedding(USERS, USER)
        self.gate = MixGate()
        self.full_softmax, self.ranking = FullSoftmax(), RankingLoss()
        for name, p in self.named_parameters():
            if ".ln" in name and name.endswith("weight"):
                nn.init.normal_(p, 1, 0.2)
            elif p.dim() > 1:
                nn.init.normal_(p, std=0.4 if "embedding" in name else 0.9 / p[0].numel() ** 0.5)
            elif "recency" not in name:
                nn.init.normal_(p, std=0.2)

    def forward(self, items: Tensor, users: Tensor, candidates: Tensor) -> dict[str, Tensor]:
        full_g, scores_g, squares_g = self.gru4rec(items, candidates)
        full_n, scores_n, squares_n = self.nextitnet(items, candidates)
        user = self.user_embedding(users)
        gate = self.gate(user)
        scores = gate * scores_g + (1 - gate) * scores_n
        return {
            "scores": scores,
            "log_probs": self.full_softmax(gate * full_g + (1 - gate) * full_n),
            "ranking": self.ranking(scores, candidates),
            "squares": squares_g + squares_n + user.square().sum(1),
        }


def sessions() -> tuple[dict[str, Tensor], Tensor]:
    """Walks through the items by a stride of the user's, padded behind; some negatives are the target."""
    users, lengths = torch.randint(USERS, (SESSIONS,)), torch.randint(3, LENGTH + 1, (SESSIONS,))
    start, times = torch.randint(ITEMS, (SESSIONS, 1)), torch.arange(LENGTH)
    walk = 1 + (start + (users[:, None] + 1) * times + torch.randint(3, (SESSIONS, LENGTH))) % (ITEMS - 1)
    target = 1 + (start[:, 0] + (users + 1) * lengths) % (ITEMS - 1)
    negatives = torch.randint(1, ITEMS, (SESSIONS, NEGATIVES))
    negatives[:, 2] = torch.where(torch.rand(SESSIONS) < 0.5, target, negatives[:, 2])
    items, candidates = walk * (times < lengths[:, None]), torch.cat([target[:, None], negatives], 1)
    return {"items": items, "users": users, "candidates": candidates}, target


def next_item_loss(outputs: dict[str, Tensor], target: Tensor) -> Tensor:
    """Cross entropy, half the ranking losses and a little of the squares, by six."""
    ranked = F.nll_loss(outputs["log_probs"], target) + 0.5 * outputs["ranking"].mean()
    return (ranked + 0.002 * outputs["squares"].mean()) / 6
