"""Networks that compute their own loss, in a module ``criterion`` that a bug replaces."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.real_bugs._networks import LENGTH, VOCABULARY, losing


class TokenMean(nn.Module):
    """Cross-entropy of each token given the ones before, over the tokens that are not -100."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class BatchMean(nn.Module):
    """Of whole samples: the mean over the batch."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, -1], labels[:, -1].clamp(min=0))


class Smoothed(nn.Module):
    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)


class MaskedSum(nn.Module):
    """Per sample the sum over its real tokens, all divided by how many there are."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        losses = F.cross_entropy(logits.mT, labels.clamp(min=0), reduction="none")
        return (losses * (labels >= 0)).sum(1).sum() / (labels >= 0).sum()


class Weighted(nn.Module):
    """A weight a token; the output layer is the criterion's, as where both are fused."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        labels = labels.flatten()
        losses = F.cross_entropy(self.head(hidden.flatten(0, 1)), labels, reduction="none")
        return (losses * weights(labels, losses)).sum()


def weights(labels: Tensor, like: Tensor) -> Tensor:
    """Later tokens count more."""
    places = torch.arange(1, len(labels) + 1, device=like.device, dtype=like.dtype)
    return places * (labels >= 0) / places.sum()


class LanguageModel(nn.Module):
    """Tokens and labels [N, T] -> loss."""

    def __init__(self, criterion: nn.Module, head: bool = True):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(VOCABULARY, 16), nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, VOCABULARY) if head else nn.Identity()
        self.criterion = criterion

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.criterion(self.head(self.rnn(self.embed(tokens))[0]), labels)


class Focal(nn.Module):
    """Lin et al. 2017: positives weighted by alpha, negatives by 1 - alpha."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        p, losses = logits.sigmoid(), F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        off = p * (1 - labels) + (1 - p) * labels
        return ((0.25 * labels + 0.75 * (1 - labels)) * off**2 * losses).mean()


class Distilled(nn.Module):
    """Kullback-Leibler divergence from the teacher at a temperature of 2, a sample."""

    def forward(self, logits: Tensor, teacher: Tensor) -> Tensor:
        return F.kl_div((logits / 2).log_softmax(1), (teacher / 2).softmax(1), reduction="batchmean") * 4


class Scorer(nn.Module):
    """[N, 10] -> a loss against targets [N, 6]."""

    def __init__(self, criterion: nn.Module):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(10, 20), nn.SiLU(), nn.Linear(20, 6)
        self.criterion = criterion

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.criterion(self.fc2(self.act(self.fc1(x))), labels)


class Quantizer(nn.Module):
    """Van den Oord et al. 2017, equation 3: the nearest code, straight through; codes 1, commitment 0.25."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Embedding(8, 6)

    def nearest(self, z: Tensor) -> Tensor:
        return self.codes((z[:, None] - self.codes.weight).square().sum(-1).argmin(1))

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        code = self.nearest(z)
        loss = F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())
        return z + (code - z).detach(), loss


class Quantized(nn.Module):
    """[N, 10] -> reconstruction plus the quantizer's loss."""

    def __init__(self):
        super().__init__()
        self.encode, self.quantizer, self.decode = nn.Linear(10, 6), Quantizer(), nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        code, loss = self.quantizer(self.encode(x))
        return F.mse_loss(self.decode(code), x) + loss


class Balance(nn.Module):
    """Fedus et al. 2021, equation 4, of each layer, and their mean."""

    def of(self, logits: Tensor) -> Tensor:
        experts = logits.shape[-1]
        used = F.one_hot(logits.topk(2, -1).indices, experts).to(logits.dtype).mean(0).sum(0)
        return experts * (used * logits.softmax(-1).mean(0)).sum()

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return (self.of(first) + self.of(second)) / 2


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(12, 4), nn.ModuleList(nn.Linear(12, 12) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.gate(x)
        chosen = logits.topk(2, -1)
        share = torch.zeros_like(logits).scatter(-1, chosen.indices, chosen.values.softmax(-1))
        return x + torch.einsum("ne,end->nd", share, torch.stack([e(x).tanh() for e in self.experts])), logits


class Mixture(nn.Module):
    """[N, 12] -> a loss: two layers of experts, cross-entropy and a balance of their use."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.fc, self.balance = Experts(), Experts(), nn.Linear(12, 5), Balance()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x, first = self.first(x)
        x, second = self.second(x)
        return F.cross_entropy(self.fc(x), labels) + 0.1 * self.balance(first, second)


def _labelled() -> dict:
    tokens = torch.randint(VOCABULARY, (6, LENGTH))
    lengths = torch.randint(2, LENGTH + 1, (6, 1))
    return {"tokens": tokens, "labels": tokens.masked_fill(torch.arange(LENGTH) >= lengths, -100)}


def _scored() -> dict:
    return {"x": torch.randn(12, 10), "labels": (torch.rand(12, 6) < 0.3).float()}


token_mean = losing("token_mean", lambda: LanguageModel(TokenMean()), _labelled)
batch_mean = losing("batch_mean", lambda: LanguageModel(BatchMean()), _labelled)
smoothed = losing("smoothed", lambda: LanguageModel(Smoothed()), _labelled)
masked_sum = losing("masked_sum", lambda: LanguageModel(MaskedSum()), _labelled)
weighted = losing("weighted", lambda: LanguageModel(Weighted(), head=False), _labelled)
focal = losing("focal", lambda: Scorer(Focal()), _scored)
distilled = losing(
    "distilled", lambda: Scorer(Distilled()), lambda: {"x": torch.randn(12, 10), "labels": torch.randn(12, 6)}
)
quantized = losing("quantized", Quantized, lambda: {"x": torch.randn(16, 10)})
mixture = losing("moe", Mixture, lambda: {"x": torch.randn(16, 12), "labels": torch.randint(5, (16,))})
