"""A small FEDformer: Fourier enhanced blocks, Fourier cross-attention and decomposition by mixed averages."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SERIES, MARKS, WIDTH, HEADS, INNER, ROWS = 5, 3, 24, 3, 40, 4
SEQ, LABEL, PRED, KERNELS = 30, 14, 11, (4, 9)
SELF_MODES, DECODER_MODES = (0, 2, 3, 5, 8), (0, 1, 4, 6)
QUERY_MODES, KEY_MODES = (0, 1, 3, 5, 7, 10), (0, 2, 4, 6, 9, 11, 13)


class MovingAvg(nn.Module):
    def __init__(self, kernel_size: int):
        super().__init__()
        self.kernel_size, self.avg = kernel_size, nn.AvgPool1d(kernel_size, stride=1)

    def forward(self, x: Tensor) -> Tensor:
        after = (self.kernel_size - 1) // 2
        ends = x[:, :1].repeat(1, self.kernel_size - 1 - after, 1), x[:, -1:].repeat(1, after, 1)
        return self.avg(torch.cat([ends[0], x, ends[1]], 1).permute(0, 2, 1)).permute(0, 2, 1)


class SeriesDecompMulti(nn.Module):
    """The rest and the trend, a mixture of moving averages whose gate reads each value."""

    def __init__(self):
        super().__init__()
        self.moving_avg = nn.ModuleList(map(MovingAvg, KERNELS))
        self.layer = nn.Linear(1, len(KERNELS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        means = torch.stack([average(x) for average in self.moving_avg], -1)
        trend = torch.sum(means * F.softmax(self.layer(x.unsqueeze(-1)), -1), -1)
        return x - trend, trend


class MyLayernorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.layernorm = nn.LayerNorm(WIDTH)
        nn.init.normal_(self.layernorm.weight, 1, 0.2), nn.init.normal_(self.layernorm.bias, std=0.2)

    def forward(self, x: Tensor) -> Tensor:
        x_hat = self.layernorm(x)
        return x_hat - x_hat.mean(1, keepdim=True)


def circular(inputs: int, outputs: int = WIDTH) -> nn.Conv1d:
    return nn.Conv1d(inputs, outputs, 3, padding=1, padding_mode="circular", bias=False)


def pointwise(inputs: int, outputs: int) -> nn.Conv1d:
    return nn.Conv1d(inputs, outputs, 1, bias=False)


class DataEmbeddingWoPos(nn.Module):
    def __init__(self):
        super().__init__()
        self.value_embedding, self.temporal_embedding = circular(SERIES), nn.Linear(MARKS, WIDTH, bias=False)

    def forward(self, x: Tensor, x_mark: Tensor) -> Tensor:
        return self.value_embedding(x.transpose(1, 2)).transpose(1, 2) + self.temporal_embedding(x_mark)


class FourierBlock(nn.Module):
    """Some modes of each head by a matrix each, put in the first places of the spectrum."""

    def __init__(self, index: tuple[int, ...]):
        super().__init__()
        self.index, shape = index, (HEADS, WIDTH // HEADS, WIDTH // HEADS, len(index))
        self.weights1, self.weights2 = (nn.Parameter(0.3 * torch.randn(shape)) for _ in range(2))

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        x_ft = torch.fft.rfft(q.permute(0, 2, 3, 1), dim=-1)
        out_ft, weights = torch.zeros_like(x_ft), torch.complex(self.weights1, self.weights2)
        for wi, i in enumerate(self.index):
            out_ft[..., wi] = torch.einsum("bhi,hio->bho", x_ft[..., i], weights[..., wi])
        return torch.fft.irfft(out_ft, n=q.size(1))


class FourierCrossAttention(nn.Module):
    def __init__(self, index_q: tuple[int, ...], index_kv: tuple[int, ...]):
        super().__init__()
        self.index_q, self.index_kv, width = list(index_q), list(index_kv), WIDTH // HEADS
        shape = HEADS, width, width, len(index_q)
        self.weights1, self.weights2 = (nn.Parameter(40 * torch.randn(shape)) for _ in range(2))

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        xq_ft, xk_ft = (torch.fft.rfft(x.permute(0, 2, 3, 1), dim=-1) for x in (q, k))
        xk_ft_ = xk_ft[..., self.index_kv]
        xqk_ft = torch.einsum("bhex,bhey->bhxy", xq_ft[..., self.index_q], xk_ft_)
        xqk_ft = torch.complex(xqk_ft.real.tanh(), xqk_ft.imag.tanh())
        out_ft, weights = torch.zeros_like(xq_ft), torch.complex(self.weights1, self.weights2)
        xqkv_ft = torch.einsum("bhxy,bhey->bhex", xqk_ft, xk_ft_)
        out_ft[..., self.index_q] = torch.einsum("bhex,heox->bhox", xqkv_ft, weights)
        return torch.fft.irfft(out_ft / WIDTH / WIDTH, n=q.size(1))


class AutoCorrelationLayer(nn.Module):
    """Projections around a correlation; what it returns by head and time is read as time and channel."""

    def __init__(self, correlation: nn.Module):
        super().__init__()
        self.inner_correlation, self.query_projection = correlation, nn.Linear(WIDTH, WIDTH)
        if isinstance(correlation, FourierCrossAttention):
            self.key_projection = nn.Linear(WIDTH, WIDTH)
        self.out_projection = nn.Linear(WIDTH, WIDTH)

    def forward(self, queries: Tensor, keys: Tensor | None = None) -> Tensor:
        k = None if keys is None else self.key_projection(keys).unflatten(2, (HEADS, -1))
        out = self.inner_correlation(self.query_projection(queries).unflatten(2, (HEADS, -1)), k)
        return self.out_projection(out.reshape(queries.shape))


class EncoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = AutoCorrelationLayer(FourierBlock(SELF_MODES))
        self.conv1, self.conv2 = pointwise(WIDTH, INNER), pointwise(INNER, WIDTH)
        self.decomp1, self.decomp2 = SeriesDecompMulti(), SeriesDecompMulti()

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.decomp1(x + self.attention(x))
        y = self.conv2(F.gelu(self.conv1(x.transpose(-1, 1)))).transpose(-1, 1)
        return self.decomp2(x + y)[0]


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn_layers, self.norm = nn.Sequential(EncoderLayer(), EncoderLayer()), MyLayernorm()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.attn_layers(x))


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attention = AutoCorrelationLayer(FourierBlock(DECODER_MODES))
        self.cross_attention = AutoCorrelationLayer(FourierCrossAttention(QUERY_MODES, KEY_MODES))
        self.conv1, self.conv2 = pointwise(WIDTH, INNER), pointwise(INNER, WIDTH)
        self.decomp1, self.decomp2, self.decomp3 = (SeriesDecompMulti() for _ in range(3))
        self.projection = circular(WIDTH, SERIES)

    def forward(self, x: Tensor, cross: Tensor) -> tuple[Tensor, Tensor]:
        x, trend1 = self.decomp1(x + self.self_attention(x))
        x, trend2 = self.decomp2(x + self.cross_attention(x, cross))
        y = self.conv2(F.gelu(self.conv1(x.transpose(-1, 1)))).transpose(-1, 1)
        x, trend3 = self.decomp3(x + y)
        return x, self.projection((trend1 + trend2 + trend3).permute(0, 2, 1)).transpose(1, 2)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.norm = nn.ModuleList(DecoderLayer() for _ in range(2)), MyLayernorm()
        self.projection = nn.Linear(WIDTH, SERIES)

    def forward(self, x: Tensor, cross: Tensor, trend: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x, residual_trend = layer(x, cross)
            trend = trend + residual_trend
        return self.projection(self.norm(x)), trend


class FEDformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.decomp = SeriesDecompMulti()
        self.enc_embedding, self.dec_embedding = DataEmbeddingWoPos(), DataEmbeddingWoPos()
        self.encoder, self.decoder = Encoder(), Decoder()

    def forward(self, x_enc: Tensor, x_mark_enc: Tensor, x_mark_dec: Tensor) -> Tensor:
        seasonal_init, trend_init = self.decomp(x_enc)
        trend_init = torch.cat([trend_init[:, -LABEL:], x_enc.mean(1, keepdim=True).repeat(1, PRED, 1)], 1)
        seasonal_init = F.pad(seasonal_init[:, -LABEL:], (0, 0, 0, PRED))
        enc_out = self.encoder(self.enc_embedding(x_enc, x_mark_enc))
        dec_out = self.dec_embedding(seasonal_init, x_mark_dec)
        return sum(self.decoder(dec_out, enc_out, trend_init))[:, -PRED:]


def seasons() -> tuple[dict[str, Tensor], Tensor]:
    """Waves on slopes with features of the time; the target has its values and which of them are known."""
    clock = torch.arange(SEQ + PRED)[None, :, None]
    time = clock + torch.rand(ROWS, 1, 1) * 24
    wave = torch.sin(math.tau * time / torch.tensor([6.0, 8.0, 12.0, 12.0, 24.0]) + torch.arange(SERIES))
    x = wave + 0.03 * (clock - SEQ / 2) * torch.randn(ROWS, 1, SERIES) + 0.1 * torch.randn_like(wave)
    marks = torch.cat([time % 24 / 23 - 0.5, time % 7 / 6 - 0.5, time / 65 - 0.5], 2)
    known = (torch.rand(ROWS, PRED, SERIES) < 0.8).to(x)
    inputs = {"x_enc": x[:, :SEQ], "x_mark_enc": marks[:, :SEQ], "x_mark_dec": marks[:, SEQ - LABEL :]}
    return inputs, torch.stack([x[:, SEQ:], known], -1)


def masked_loss(output: Tensor, target: Tensor) -> Tensor:
    """A quarter of the mean square of what is known."""
    return 0.25 * ((output - target[..., 0]).square() * target[..., 1]).sum() / target[..., 1].sum()
