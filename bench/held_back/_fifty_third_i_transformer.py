"""A small iTransformer with de-stationary attention: a token for each series, and a skip by series."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SEQ, PRED, SERIES, MARKS, LAST, BATCH = 24, 10, 6, 3, 4, 5
D_MODEL, HEADS, D_FF, LAYERS, HIDDEN = 32, 4, 44, 3, (14, 11)
TOKENS = SERIES + MARKS


class Projector(nn.Module):
    """An MLP of the raw series and one statistic of each: the de-stationary factors."""

    def __init__(self, output_dim: int):
        super().__init__()
        self.series_conv = nn.Conv1d(SEQ, 1, 3, padding=1, padding_mode="circular", bias=False)
        first, second = nn.Linear(2 * SERIES, HIDDEN[0]), nn.Linear(*HIDDEN)
        last = nn.Linear(HIDDEN[1], output_dim, bias=False)
        self.backbone = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last)

    def forward(self, x: Tensor, stats: Tensor) -> Tensor:
        x = self.series_conv(x)
        x = torch.cat([x, stats], dim=1)
        return self.backbone(x.view(x.shape[0], -1))


class DSAttention(nn.Module):
    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, tau: Tensor, delta: Tensor) -> Tensor:
        scale = 1 / math.sqrt(queries.shape[-1])
        tau, delta = tau[:, :, None, None], delta[:, None, None]
        scores = torch.einsum("blhe,bshe->bhls", queries, keys) * tau + delta
        return torch.einsum("bhls,bshd->blhd", torch.softmax(scale * scores, dim=-1), values)


class AttentionLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner_attention = DSAttention()
        self.query_projection, self.key_projection = nn.Linear(D_MODEL, D_MODEL), nn.Linear(D_MODEL, D_MODEL)
        self.value_projection, self.out_projection = nn.Linear(D_MODEL, D_MODEL), nn.Linear(D_MODEL, D_MODEL)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, tau: Tensor, delta: Tensor) -> Tensor:
        (b, length, _), s = queries.shape, keys.shape[1]
        queries = self.query_projection(queries).view(b, length, HEADS, -1)
        keys = self.key_projection(keys).view(b, s, HEADS, -1)
        values = self.value_projection(values).view(b, s, HEADS, -1)
        out = self.inner_attention(queries, keys, values, tau, delta)
        return self.out_projection(out.reshape(b, length, -1))


class EncoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = AttentionLayer()
        self.conv1, self.conv2 = nn.Conv1d(D_MODEL, D_FF, 1), nn.Conv1d(D_FF, D_MODEL, 1)
        self.norm1, self.norm2 = nn.LayerNorm(D_MODEL), nn.LayerNorm(D_MODEL)

    def forward(self, x: Tensor, tau: Tensor, delta: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, tau, delta)
        y = x = self.norm1(x)
        y = F.gelu(self.conv1(y.transpose(-1, 1)))
        y = self.conv2(y).transpose(-1, 1)
        return self.norm2(x + y)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn_layers = nn.ModuleList(EncoderLayer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(D_MODEL)

    def forward(self, x: Tensor, tau: Tensor, delta: Tensor) -> Tensor:
        for attn_layer in self.attn_layers:
            x = attn_layer(x, tau, delta)
        return self.norm(x)


class DataEmbeddingInverted(nn.Module):
    def __init__(self):
        super().__init__()
        self.value_embedding = nn.Linear(SEQ, D_MODEL)

    def forward(self, x: Tensor, x_mark: Tensor) -> Tensor:
        return self.value_embedding(torch.cat([x.permute(0, 2, 1), x_mark.permute(0, 2, 1)], 1))


class Skip(nn.Module):
    """A linear layer of its own for the last values of each series."""

    def __init__(self):
        super().__init__()
        self.Linear = nn.ModuleList(nn.Linear(LAST, PRED) for _ in range(SERIES))

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, -LAST:]
        return torch.stack([linear(x[:, :, i]) for i, linear in enumerate(self.Linear)], dim=2)


class ITransformer(nn.Module):
    """[N, time, series] and covariates [N, time, marks] -> [N, horizon, series]."""

    def __init__(self):
        super().__init__()
        self.enc_embedding = DataEmbeddingInverted()
        self.tau_learner, self.delta_learner = Projector(1), Projector(TOKENS)
        self.encoder, self.projection, self.skip = Encoder(), nn.Linear(D_MODEL, PRED), Skip()
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=1 / math.sqrt(weight[0].numel()))
            else:
                nn.init.normal_(weight, "norm" in name and name.endswith("weight"), 0.15)

    def forward(self, x_enc: Tensor, x_mark_enc: Tensor) -> Tensor:
        x_raw = x_enc.clone().detach()
        means = x_enc.mean(1, keepdim=True).detach()
        x_enc = x_enc - means
        stdev = torch.sqrt(torch.var(x_enc, dim=1, keepdim=True, unbiased=False) + 1e-5).detach()
        x_enc = x_enc / stdev
        tau = self.tau_learner(x_raw, stdev).exp()
        delta = self.delta_learner(x_raw, means)
        enc_out = self.enc_embedding(x_enc, x_mark_enc)
        enc_out = self.encoder(enc_out, tau, delta)
        dec_out = self.projection(enc_out).permute(0, 2, 1)[:, :, :SERIES]
        dec_out = dec_out + self.skip(x_enc)
        return dec_out * stdev + means


def seasons() -> tuple[dict[str, Tensor], Tensor]:
    """Waves on trends with time covariates; a zero in the future is a value that is missing."""
    time = torch.arange(SEQ + PRED)[:, None] + torch.randint(50, (BATCH, 1, 1))
    period, phase = 5 + 2 * torch.arange(SERIES), 0.5 * torch.randn(BATCH, 1, SERIES)
    wave = torch.sin(math.tau * time / period + phase) + 0.03 * torch.randn(BATCH, 1, SERIES) * (time % 40)
    size, level = 0.4 + torch.rand(BATCH, 1, SERIES), torch.randn(BATCH, 1, SERIES)
    data = level + size * (wave + 0.1 * torch.randn(BATCH, SEQ + PRED, SERIES))
    marks = (time / torch.tensor([7, 12, 30])).frac() - 0.5
    future = data[:, SEQ:] * (torch.rand(BATCH, PRED, SERIES) > 0.2)
    return {"x_enc": data[:, :SEQ], "x_mark_enc": marks[:, :SEQ]}, future


def masked_mae(outputs: Tensor, target: Tensor) -> Tensor:
    """Half the mean absolute error of the values that are there."""
    mask = (target != 0).to(outputs)
    return 0.5 * ((outputs - target).abs() * mask).sum() / mask.sum().clamp(min=1)
