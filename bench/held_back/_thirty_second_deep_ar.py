"""A small DeepAR: scaled lags and features through an LSTM to the parameters of a Student-t."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import AffineTransform, StudentT, TransformedDistribution

CONTEXT, HORIZON, LAGS, TIME, REAL = 9, 4, (1, 2, 3, 5, 7, 8), 3, 2
CARDINALITY, EMBEDDING, CELLS, LAYERS, SERIES = (8, 11), (4, 5), 34, 2, 7
PAST, MINIMUM = CONTEXT + max(LAGS), 0.05


def lagged_sequence_values(indices: list[int], prior_sequence: Tensor, sequence: Tensor) -> Tensor:
    """[N, P], [N, T] -> [N, T, lags]: what stood so many steps before."""
    full, length, values = torch.cat((prior_sequence, sequence), dim=1), sequence.shape[1], []
    for index in indices:
        values.append(full[:, -index - length : -index if index > 0 else None])
    return torch.stack(values, dim=-1)


def weighted_average(values: Tensor, weights: Tensor) -> Tensor:
    """The mean of the last axis, where there is weight."""
    kept = torch.where(weights, values, torch.zeros_like(values))
    return kept.sum(dim=-1) / weights.sum(dim=-1).clamp(min=1)


class MeanScaler(nn.Module):
    """Divides by the mean absolute observed value; a series without any takes the batch's."""

    def __init__(self, minimum_scale: float = MINIMUM):
        super().__init__()
        self.minimum_scale = minimum_scale

    def forward(self, data: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        ts_sum = (data * weights).abs().sum(dim=-1, keepdim=True)
        num_observed = weights.sum(dim=-1, keepdim=True)
        default_scale = ts_sum.sum(dim=0) / num_observed.sum(dim=0).clamp(min=1)
        scale = torch.where(num_observed > 0, ts_sum / num_observed.clamp(min=1), default_scale)
        scale = scale.clamp(min=self.minimum_scale)
        return data / scale, scale


class FeatureEmbedder(nn.Module):
    def __init__(self, cardinalities: tuple[int, ...], embedding_dims: tuple[int, ...]):
        super().__init__()
        pairs = zip(cardinalities, embedding_dims, strict=True)
        self._embedders = nn.ModuleList(nn.Embedding(c, d) for c, d in pairs)

    def forward(self, features: Tensor) -> Tensor:
        slices = features.unbind(dim=-1)
        return torch.cat([embed(x) for embed, x in zip(self._embedders, slices, strict=True)], dim=-1)


class StudentTMap(nn.Module):
    """Raw df, loc and scale, [N, T, 1] each -> those of a Student-t, [N, T]."""

    def forward(self, df: Tensor, loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scale = F.softplus(scale)
        df = 2.0 + F.softplus(df)
        return df.squeeze(-1), loc.squeeze(-1), scale.squeeze(-1)


class PtArgProj(nn.Module):
    def __init__(self, in_features: int):
        super().__init__()
        self.proj = nn.ModuleList(nn.Linear(in_features, 1) for _ in range(3))
        self.domain_map = StudentTMap()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.domain_map(*[proj(x) for proj in self.proj])


class NegativeLogLikelihood(nn.Module):
    """Of the target under the rescaled distribution, averaged for each series over what is observed."""

    def forward(self, params: tuple, scale: Tensor, target: Tensor, observed: Tensor) -> Tensor:
        base = StudentT(*params, validate_args=False)
        distr = TransformedDistribution(base, [AffineTransform(0.0, scale)], validate_args=False)
        return weighted_average(-distr.log_prob(target), observed)


class DeepARModel(nn.Module):
    """Series and their features -> df, loc, scale by step, the series' scales and their losses."""

    def __init__(self):
        super().__init__()
        self.context_length, self.lags_seq = CONTEXT, [lag - 1 for lag in LAGS]
        self.scaler, self.embedder = MeanScaler(), FeatureEmbedder(CARDINALITY, EMBEDDING)
        width = len(LAGS) + sum(EMBEDDING) + REAL + 1 + TIME
        self.rnn = nn.LSTM(width, CELLS, num_layers=LAYERS, batch_first=True)
        self.param_proj, self.loss = PtArgProj(CELLS), NegativeLogLikelihood()

    def prepare_rnn_input(
        self,
        feat_static_cat: Tensor,
        feat_static_real: Tensor,
        past_time_feat: Tensor,
        past_target: Tensor,
        past_observed_values: Tensor,
        future_time_feat: Tensor,
        future_target: Tensor,
    ) -> tuple[Tensor, Tensor]:
        context, observed = (x[:, -self.context_length :] for x in (past_target, past_observed_values))
        sequence, scale = self.scaler(context, observed)
        sequence = torch.cat((sequence, future_target[:, :-1] / scale), dim=1)
        prior = past_target[:, : -self.context_length] / scale
        lags = lagged_sequence_values(self.lags_seq, prior, sequence)
        time_feat = torch.cat((past_time_feat[:, -self.context_length + 1 :], future_time_feat), dim=1)
        static_feat = torch.cat((self.embedder(feat_static_cat), feat_static_real, scale.log()), dim=-1)
        expanded = static_feat.unsqueeze(1).expand(-1, time_feat.shape[1], -1)
        return torch.cat((lags, expanded, time_feat), dim=-1), scale

    def forward(
        self,
        feat_static_cat: Tensor,
        feat_static_real: Tensor,
        past_time_feat: Tensor,
        past_target: Tensor,
        past_observed_values: Tensor,
        future_time_feat: Tensor,
        future_target: Tensor,
        future_observed_values: Tensor,
    ) -> tuple[Tensor, ...]:
        given = feat_static_cat, feat_static_real, past_time_feat, past_target, past_observed_values
        rnn_input, scale = self.prepare_rnn_input(*given, future_time_feat, future_target)
        output, _ = self.rnn(rnn_input)
        params = self.param_proj(output)
        start = -self.context_length + 1
        target = torch.cat((past_target[:, start:], future_target), dim=1)
        observed = torch.cat((past_observed_values[:, start:], future_observed_values), dim=1)
        return *params, scale, self.loss(params, scale, target, observed)


def seasons() -> tuple[dict[str, Tensor], Tensor]:
    """Seasonal series of many sizes with gaps; one is tiny, and one has no observed context."""
    kinds = torch.stack([torch.randint(c, (SERIES,)) for c in CARDINALITY], 1)
    size, phase = (0.7 * torch.randn(SERIES, 1)).exp(), 6 * torch.rand(SERIES, 1)
    size[1], kinds[::3, 1] = 0.02, 0
    when = torch.randint(50, (SERIES, 1)) + torch.arange(PAST + HORIZON)
    wave = torch.sin(math.tau * when / 7 + phase) + 0.3 * kinds[:, :1] / CARDINALITY[0]
    series = size * (1.5 + wave + 0.2 * torch.randn_like(wave))
    angle = math.tau * when / 7
    time = torch.stack([angle.sin(), angle.cos(), when / 40 - 1], 2)
    seen = torch.rand_like(series) > 0.2
    seen[3, PAST - CONTEXT : PAST] = False
    series = series * seen
    inputs = {
        "feat_static_cat": kinds,
        "feat_static_real": torch.cat([size.log() + 0.3 * torch.randn_like(size), phase / 6], 1),
        "past_time_feat": time[:, :PAST],
        "past_target": series[:, :PAST],
        "past_observed_values": seen[:, :PAST],
        "future_time_feat": time[:, PAST:],
        "future_target": series[:, PAST:],
        "future_observed_values": seen[:, PAST:],
    }
    return inputs, series[:, PAST:]


def mean_loss(outputs: tuple[Tensor, ...], _: Tensor) -> Tensor:
    """The network's own losses, by four."""
    return outputs[-1].mean() / 4
