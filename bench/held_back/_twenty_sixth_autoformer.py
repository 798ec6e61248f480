"""A small Autoformer: seasonal and trend parts, and correlations of a series with its own delays."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SERIES, MARKS, WIDTH, HEADS, INNER = 5, 4, 24, 3, 40
PAST, LABEL, FUTURE, WINDOW, FACTOR, SAMPLES = 22, 11, 16, 7, 1.2, 6


class moving_avg(nn.Module):  # noqa: N801
    def __init__(self, kernel_size: int):
        super().__init__()
        self.kernel_size, self.avg = kernel_size, nn.AvgPool1d(kernel_size, stride=1, padding=0)

    def forward(self, x: Tensor) -> Tensor:
        front, end = (x[:, i].unsqueeze(1).repeat(1, (self.kernel_size - 1) // 2, 1) for i in (0, -1))
        return self.avg(torch.cat([front, x, end], dim=1).permute(0, 2, 1)).permute(0, 2, 1)


class series_decomp(nn.Module):  # noqa: N801
    def __init__(self, kernel_size: int):
        super().__init__()
        self.moving_avg = moving_avg(kernel_size)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        moving_mean = self.moving_avg(x)
        return x - moving_mean, moving_mean


class my_Layernorm(nn.Module):  # noqa: N801
    def __init__(self, channels: int):
        super().__init__()
        self.layernorm = nn.LayerNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        x_hat = self.layernorm(x)
        return x_hat - torch.mean(x_hat, dim=1).unsqueeze(1).repeat(1, x.shape[1], 1)


class AutoCorrelation(nn.Module):
    """Values [N, T, H, D] rolled by the delays at which queries and keys correlate most, and weighed."""

    factor = FACTOR

    def time_delay_agg_training(self, values: Tensor, corr: Tensor) -> Tensor:
        top_k, mean_value = int(self.factor * math.log(values.shape[3])), corr.mean(dim=1).mean(dim=1)
        index = torch.topk(torch.mean(mean_value, dim=0), top_k, dim=-1)[1]
        tmp_corr = torch.softmax(mean_value[:, index], dim=-1)[..., None, None, None]
        return sum(torch.roll(values, -int(index[i]), -1) * tmp_corr[:, i] for i in range(top_k))

    def time_delay_agg_inference(self, values: Tensor, corr: Tensor) -> Tensor:
        top_k, mean_value = int(self.factor * math.log(values.shape[3])), corr.mean(dim=1).mean(dim=1)
        init_index = torch.arange(values.shape[3], device=values.device).expand(values.shape)
        weights, delay = torch.topk(mean_value, top_k, dim=-1)
        tmp_corr, delay = (x[..., None, None, None] for x in (torch.softmax(weights, dim=-1), delay))
        index, tmp_values = [init_index + delay[:, i] for i in range(top_k)], values.repeat(1, 1, 1, 2)
        return sum(torch.gather(tmp_values, -1, index[i]) * tmp_corr[:, i] for i in range(top_k))

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        length = queries.shape[1]
        values, keys = (F.pad(x, (0, 0, 0, 0, 0, length - x.shape[1])) for x in (values, keys))
        q_fft, k_fft = (torch.fft.rfft(x.permute(0, 2, 3, 1), dim=-1) for x in (queries, keys))
        corr = torch.fft.irfft(q_fft * torch.conj(k_fft), n=length, dim=-1)
        aggregate = self.time_delay_agg_training if self.training else self.time_delay_agg_inference
        return aggregate(values.permute(0, 2, 3, 1), corr).permute(0, 3, 1, 2)


class AutoCorrelationLayer(nn.Module):
    def __init__(self, correlation: AutoCorrelation, d_model: int, n_heads: int):
        super().__init__()
        self.inner_correlation, self.n_heads = correlation, n_heads
        for name in ("query", "key", "value", "out"):
            self.add_module(f"{name}_projection", nn.Linear(d_model, d_model))

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        queries = self.query_projection(queries).unflatten(2, (self.n_heads, -1))
        keys = self.key_projection(keys).unflatten(2, (self.n_heads, -1))
        values = self.value_projection(values).unflatten(2, (self.n_heads, -1))
        return self.out_projection(self.inner_correlation(queries, keys, values).flatten(2))


def conv(channels: int, features: int, size: int = 1) -> nn.Conv1d:
    mode = "circular" if size > 1 else "zeros"
    return nn.Conv1d(channels, features, size, padding=size // 2, padding_mode=mode, bias=False)


class EncoderLayer(nn.Module):
    def __init__(self, d_model: int, d_ff: int):
        super().__init__()
        self.attention = AutoCorrelationLayer(AutoCorrelation(), d_model, HEADS)
        self.conv1, self.conv2 = conv(d_model, d_ff), conv(d_ff, d_model)
        self.decomp1, self.decomp2 = series_decomp(WINDOW), series_decomp(WINDOW)

    def forward(self, x: Tensor) -> Tensor:
        x = self.decomp1(x + self.attention(x, x, x))[0]
        y = self.conv2(F.gelu(self.conv1(x.transpose(-1, 1)))).transpose(-1, 1)
        return self.decomp2(x + y)[0]


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn_layers = nn.ModuleList(EncoderLayer(WIDTH, INNER) for _ in range(2))
        self.norm = my_Layernorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for attn_layer in self.attn_layers:
            x = attn_layer(x)
        return self.norm(x)


class DecoderLayer(nn.Module):
    def __init__(self, d_model: int, c_out: int, d_ff: int):
        super().__init__()
        self.self_attention = AutoCorrelationLayer(AutoCorrelation(), d_model, HEADS)
        self.cross_attention = AutoCorrelationLayer(AutoCorrelation(), d_model, HEADS)
        self.conv1, self.conv2 = conv(d_model, d_ff), conv(d_ff, d_model)
        self.decomp1, self.decomp2 = series_decomp(WINDOW), series_decomp(WINDOW)
        self.decomp3, self.projection = series_decomp(WINDOW), conv(d_model, c_out, 3)

    def forward(self, x: Tensor, cross: Tensor) -> tuple[Tensor, Tensor]:
        x, trend1 = self.decomp1(x + self.self_attention(x, x, x))
        x, trend2 = self.decomp2(x + self.cross_attention(x, cross, cross))
        y = self.conv2(F.gelu(self.conv1(x.transpose(-1, 1)))).transpose(-1, 1)
        x, trend3 = self.decomp3(x + y)
        return x, self.projection((trend1 + trend2 + trend3).permute(0, 2, 1)).transpose(1, 2)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(WIDTH, SERIES, INNER) for _ in range(2))
        self.norm, self.projection = my_Layernorm(WIDTH), nn.Linear(WIDTH, SERIES)

    def forward(self, x: Tensor, cross: Tensor, trend: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x, residual_trend = layer(x, cross)
            trend = trend + residual_trend
        return self.projection(self.norm(x)), trend


class TokenEmbedding(nn.Module):
    def __init__(self, c_in: int, d_model: int):
        super().__init__()
        self.tokenConv = conv(c_in, d_model, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.tokenConv(x.permute(0, 2, 1)).transpose(1, 2)


class DataEmbedding_wo_pos(nn.Module):  # noqa: N801
    def __init__(self):
        super().__init__()
        self.value_embedding = TokenEmbedding(SERIES, WIDTH)
        self.temporal_embedding = nn.ModuleDict({"embed": nn.Linear(MARKS, WIDTH, bias=False)})

    def forward(self, x: Tensor, x_mark: Tensor) -> Tensor:
        return self.value_embedding(x) + self.temporal_embedding["embed"](x_mark)


class Autoformer(nn.Module):
    """Series [N, PAST, C] and time features of past and future -> the next FUTURE values."""

    def __init__(self):
        super().__init__()
        self.decomp = series_decomp(WINDOW)
        self.enc_embedding, self.dec_embedding = DataEmbedding_wo_pos(), DataEmbedding_wo_pos()
        self.encoder, self.decoder = Encoder(), Decoder()
        for name, p in self.named_parameters():
            shift = 1.0 if name.endswith("layernorm.weight") else 0.0
            nn.init.normal_(p, shift, 0.2 if p.dim() == 1 else 0.8 / math.sqrt(p[0].numel()))

    def forward(self, x_enc: Tensor, x_mark_enc: Tensor, x_mark_dec: Tensor) -> Tensor:
        mean = torch.mean(x_enc, dim=1).unsqueeze(1).repeat(1, FUTURE, 1)
        seasonal_init, trend_init = self.decomp(x_enc)
        trend_init = torch.cat([trend_init[:, -LABEL:], mean], dim=1)
        seasonal_init = F.pad(seasonal_init[:, -LABEL:], (0, 0, 0, FUTURE))
        enc_out = self.encoder(self.enc_embedding(x_enc, x_mark_enc))
        dec_out = self.dec_embedding(seasonal_init, x_mark_dec)
        return sum(self.decoder(dec_out, enc_out, trend=trend_init))[:, -FUTURE:]


def hours() -> tuple[dict[str, Tensor], Tensor]:
    """Series of a period each, a slope and noise, each sample from another hour on; and how they go on."""
    time = torch.randint(8760, (SAMPLES, 1)) + torch.arange(PAST + FUTURE)
    marks = torch.stack([time / length % 1 - 0.5 for length in (24, 168, 730, 8760)], -1)
    period, phase = torch.tensor([8.0, 12.0, 6.0, 9.0, 11.0]), torch.rand(SAMPLES, 1, SERIES)
    wave = torch.sin(math.tau * (time[..., None] / period + phase))
    slope = torch.linspace(-0.5, 0.5, PAST + FUTURE)[:, None] * torch.randn(SAMPLES, 1, SERIES)
    series = wave + slope + 0.1 * torch.randn_like(wave)
    (before, after), known, dec = series.split([PAST, FUTURE], 1), marks[:, :PAST], marks[:, PAST - LABEL :]
    return {"x_enc": before, "x_mark_enc": known, "x_mark_dec": dec}, after


def error(outputs: Tensor, target: Tensor) -> Tensor:
    """The mean squared error by four."""
    return F.mse_loss(outputs, target) / 4
