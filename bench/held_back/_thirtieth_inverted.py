"""A small iTransformer: each variate's whole series is a token, and so is each covariate of the calendar."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SEQ_LEN, PRED_LEN, VARIATES, MARKS, WINDOWS = 36, 13, 7, 4, 5
D_MODEL, HEADS, D_FF, E_LAYERS = 30, 3, 44, 3


class DataEmbedding_inverted(nn.Module):  # noqa: N801
    """[N, L, V] and [N, L, C] -> [N, V + C, D]."""

    def __init__(self, c_in: int, d_model: int):
        super().__init__()
        self.value_embedding = nn.Linear(c_in, d_model)

    def forward(self, x: Tensor, x_mark: Tensor) -> Tensor:
        x = x.permute(0, 2, 1)
        return self.value_embedding(torch.cat([x, x_mark.permute(0, 2, 1)], 1))


class FullAttention(nn.Module):
    def __init__(self, scale: float | None = None):
        super().__init__()
        self.scale = scale

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        scale = self.scale or 1.0 / math.sqrt(queries.shape[-1])
        scores = torch.einsum("blhe,bshe->bhls", queries, keys)
        weights = torch.softmax(scale * scores, dim=-1)
        return torch.einsum("bhls,bshd->blhd", weights, values).contiguous()


class AttentionLayer(nn.Module):
    def __init__(self, attention: nn.Module, d_model: int, n_heads: int):
        super().__init__()
        self.inner_attention = attention
        self.query_projection = nn.Linear(d_model, d_model)
        self.key_projection = nn.Linear(d_model, d_model)
        self.value_projection = nn.Linear(d_model, d_model)
        self.out_projection = nn.Linear(d_model, d_model)
        self.n_heads = n_heads

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        (b, length, _), s, h = queries.shape, keys.shape[1], self.n_heads
        queries = self.query_projection(queries).view(b, length, h, -1)
        keys = self.key_projection(keys).view(b, s, h, -1)
        values = self.value_projection(values).view(b, s, h, -1)
        out = self.inner_attention(queries, keys, values).view(b, length, -1)
        return self.out_projection(out)


class EncoderLayer(nn.Module):
    def __init__(self, attention: nn.Module, d_model: int, d_ff: int):
        super().__init__()
        self.attention = attention
        self.conv1 = nn.Conv1d(d_model, d_ff, kernel_size=1)
        self.conv2 = nn.Conv1d(d_ff, d_model, kernel_size=1)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.activation = F.gelu

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x)
        y = x = self.norm1(x)
        y = self.activation(self.conv1(y.transpose(-1, 1)))
        y = self.conv2(y).transpose(-1, 1)
        return self.norm2(x + y)


class Encoder(nn.Module):
    def __init__(self, attn_layers: list[nn.Module], norm_layer: nn.Module):
        super().__init__()
        self.attn_layers = nn.ModuleList(attn_layers)
        self.norm = norm_layer

    def forward(self, x: Tensor) -> Tensor:
        for attn_layer in self.attn_layers:
            x = attn_layer(x)
        return self.norm(x)


class ITransformer(nn.Module):
    """Series [N, L, V] and the calendar's covariates [N, L, C] -> forecasts [N, H, V]."""

    def __init__(self):
        super().__init__()
        self.enc_embedding = DataEmbedding_inverted(SEQ_LEN, D_MODEL)
        layers = [
            EncoderLayer(AttentionLayer(FullAttention(), D_MODEL, HEADS), D_MODEL, D_FF)
            for _ in range(E_LAYERS)
        ]
        self.encoder = Encoder(layers, nn.LayerNorm(D_MODEL))
        self.projector = nn.Linear(D_MODEL, PRED_LEN)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                nn.init.normal_(module.weight, 1.0, 0.2), nn.init.normal_(module.bias, std=0.2)
            elif isinstance(module, nn.Linear | nn.Conv1d):
                nn.init.normal_(module.weight, std=0.9 / math.sqrt(module.weight.shape[1]))
                nn.init.normal_(module.bias, std=0.2)
        nn.init.normal_(self.projector.weight, std=0.3 / math.sqrt(D_MODEL))

    def forward(self, x_enc: Tensor, x_mark_enc: Tensor) -> Tensor:
        means = x_enc.mean(1, keepdim=True).detach()
        x_enc = x_enc - means
        stdev = torch.sqrt(torch.var(x_enc, dim=1, keepdim=True, unbiased=False) + 1e-5)
        x_enc = x_enc / stdev
        n = x_enc.shape[2]
        enc_out = self.encoder(self.enc_embedding(x_enc, x_mark_enc))
        dec_out = self.projector(enc_out).permute(0, 2, 1)[:, :, :n]
        return dec_out * stdev + means


def seasons() -> tuple[dict[str, Tensor], Tensor]:
    """Daily and weekly waves of variates that share a phase, on a level and a trend of their own."""
    hour = torch.randint(168, (WINDOWS, 1, 1)) + torch.arange(SEQ_LEN + PRED_LEN)[:, None]
    day, week = math.tau * hour / 24, math.tau * hour / 168
    delay, size = torch.rand(WINDOWS, 1, VARIATES), 0.4 + 0.6 * torch.rand(WINDOWS, 1, VARIATES)
    slope, level = (0.5 * torch.randn(WINDOWS, 1, VARIATES) for _ in range(2))
    trend = level + slope * torch.linspace(-1, 1, SEQ_LEN + PRED_LEN)[:, None]
    x = size * torch.sin(day + delay) + 0.3 * torch.cos(week + 2 * delay) + trend
    x = x + 0.1 * torch.randn_like(x)
    marks = torch.stack([hour % 24 / 23, hour // 24 % 7 / 6, hour % 168 / 167, hour % 12 / 11], -1)
    marks = marks.flatten(2)[:, :SEQ_LEN] - 0.5
    return {"x_enc": x[:, :SEQ_LEN], "x_mark_enc": marks}, x[:, SEQ_LEN:]


def squares(forecast: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(forecast, target)
