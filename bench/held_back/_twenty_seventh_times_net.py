"""A small TimesNet, as in the Time-Series-Library: convolutions over series folded at their periods."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SERIES, MARKS, SEQ_LEN, PRED_LEN, BATCH = 5, 3, 40, 14, 4
D_MODEL, D_FF, LAYERS, TOP_K, NUM_KERNELS, MAX_LEN = 12, 16, 3, 2, 3, 64


class TokenEmbedding(nn.Module):
    def __init__(self, c_in: int, d_model: int):
        super().__init__()
        self.tokenConv = nn.Conv1d(c_in, d_model, 3, padding=1, padding_mode="circular", bias=False)
        nn.init.normal_(self.tokenConv.weight, std=1.2 / math.sqrt(3 * c_in))

    def forward(self, x: Tensor) -> Tensor:
        return self.tokenConv(x.permute(0, 2, 1)).transpose(1, 2)


class PositionalEmbedding(nn.Module):
    def __init__(self, d_model: int, max_len: int):
        super().__init__()
        position = torch.arange(max_len).float()[:, None]
        div_term = torch.exp(torch.arange(0, d_model, 2).float() * -(math.log(10000.0) / d_model))
        pe = torch.zeros(max_len, d_model)
        pe[:, 0::2] = torch.sin(position * div_term)
        pe[:, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe[None])

    def forward(self, x: Tensor) -> Tensor:
        return self.pe[:, : x.size(1)]


class TimeFeatureEmbedding(nn.Module):
    def __init__(self, d_inp: int, d_model: int):
        super().__init__()
        self.embed = nn.Linear(d_inp, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(x)


class DataEmbedding(nn.Module):
    def __init__(self, c_in: int, d_model: int):
        super().__init__()
        self.value_embedding = TokenEmbedding(c_in, d_model)
        self.position_embedding = PositionalEmbedding(d_model, MAX_LEN)
        self.temporal_embedding = TimeFeatureEmbedding(MARKS, d_model)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor, x_mark: Tensor) -> Tensor:
        x = self.value_embedding(x) + self.temporal_embedding(x_mark) + self.position_embedding(x)
        return self.dropout(x)


class InceptionBlockV1(nn.Module):
    """The mean of convolutions with kernels of 1, 3, 5, ..."""

    def __init__(self, in_channels: int, out_channels: int, num_kernels: int):
        super().__init__()
        self.num_kernels = num_kernels
        self.kernels = nn.ModuleList(
            nn.Conv2d(in_channels, out_channels, kernel_size=2 * i + 1, padding=i) for i in range(num_kernels)
        )
        for kernel in self.kernels:
            nn.init.kaiming_normal_(kernel.weight, mode="fan_out", nonlinearity="relu")
            nn.init.normal_(kernel.bias, std=0.2)

    def forward(self, x: Tensor) -> Tensor:
        res_list = [self.kernels[i](x) for i in range(self.num_kernels)]
        return torch.stack(res_list, dim=-1).mean(-1)


def fft_for_period(x: Tensor, k: int) -> tuple[list[int], Tensor]:
    """The k periods of the largest amplitudes over the batch, and their amplitudes in each sample."""
    xf = torch.fft.rfft(x, dim=1)
    frequency_list = abs(xf).mean(0).mean(-1).detach()
    frequency_list[0] = 0
    top_list = torch.topk(frequency_list, k)[1].tolist()
    return [x.shape[1] // top for top in top_list], abs(xf).mean(-1)[:, top_list]


class TimesBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.seq_len, self.pred_len, self.k = SEQ_LEN, PRED_LEN, TOP_K
        self.conv = nn.Sequential(
            InceptionBlockV1(D_MODEL, D_FF, NUM_KERNELS),
            nn.GELU(),
            InceptionBlockV1(D_FF, D_MODEL, NUM_KERNELS),
        )

    def forward(self, x: Tensor) -> Tensor:
        b, t, n = x.size()
        period_list, period_weight = fft_for_period(x, self.k)
        res, total = [], self.seq_len + self.pred_len
        for period in period_list:
            length, out = total, x
            if total % period != 0:
                length = (total // period + 1) * period
                out = torch.cat([x, x.new_zeros(b, length - total, n)], dim=1)
            out = out.reshape(b, length // period, period, n).permute(0, 3, 1, 2).contiguous()
            out = self.conv(out)
            out = out.permute(0, 2, 3, 1).reshape(b, -1, n)
            res.append(out[:, :total, :])
        res = torch.stack(res, dim=-1)
        period_weight = F.softmax(period_weight, dim=1)
        period_weight = period_weight.unsqueeze(1).unsqueeze(1).repeat(1, t, n, 1)
        return torch.sum(res * period_weight, -1) + x


class TimesNet(nn.Module):
    """Series [N, 40, 5] and marks of time [N, 40, 3] -> the next steps [N, 14, 5]."""

    def __init__(self):
        super().__init__()
        self.seq_len, self.pred_len, self.layer = SEQ_LEN, PRED_LEN, LAYERS
        self.enc_embedding = DataEmbedding(SERIES, D_MODEL)
        self.model = nn.ModuleList(TimesBlock() for _ in range(LAYERS))
        self.layer_norm = nn.LayerNorm(D_MODEL)
        nn.init.normal_(self.layer_norm.weight, 0.4, 0.06), nn.init.normal_(self.layer_norm.bias, std=0.1)
        self.predict_linear = nn.Linear(SEQ_LEN, PRED_LEN + SEQ_LEN)
        self.projection = nn.Linear(D_MODEL, SERIES)
        with torch.no_grad():
            # starts near a copy of what is known, and of 27 steps ago for what is not
            known = [*range(SEQ_LEN), *range(SEQ_LEN - 27, SEQ_LEN - 27 + PRED_LEN)]
            noise = 0.03 * torch.randn(PRED_LEN + SEQ_LEN, SEQ_LEN)
            self.predict_linear.weight.copy_(0.7 * F.one_hot(torch.tensor(known), SEQ_LEN) + noise)

    def forecast(self, x_enc: Tensor, x_mark_enc: Tensor) -> Tensor:
        means = x_enc.mean(1, keepdim=True).detach()
        x_enc = x_enc.sub(means)
        stdev = torch.sqrt(torch.var(x_enc, dim=1, keepdim=True, unbiased=False) + 1e-5)
        x_enc = x_enc.div(stdev)
        enc_out = self.enc_embedding(x_enc, x_mark_enc)
        enc_out = self.predict_linear(enc_out.permute(0, 2, 1)).permute(0, 2, 1)
        for i in range(self.layer):
            enc_out = self.layer_norm(self.model[i](enc_out))
        dec_out = self.projection(enc_out)
        dec_out = dec_out.mul(stdev[:, 0, :].unsqueeze(1).repeat(1, self.pred_len + self.seq_len, 1))
        return dec_out.add(means[:, 0, :].unsqueeze(1).repeat(1, self.pred_len + self.seq_len, 1))

    def forward(self, x_enc: Tensor, x_mark_enc: Tensor) -> Tensor:
        return self.forecast(x_enc, x_mark_enc)[:, -self.pred_len :, :]


def seasons() -> tuple[dict[str, Tensor], Tensor]:
    """Waves of three frequencies with a level and a size by series; the first sample has a mix of its own."""
    total = SEQ_LEN + PRED_LEN
    mix = torch.tensor([[1.0, 0.3, 0.9]] + [[1.0, 0.9, 0.35]] * (BATCH - 1))
    mix = mix[:, None] * (0.9 + 0.2 * torch.rand(BATCH, SERIES, 3))
    angle = 2 * math.pi * torch.arange(total)[:, None, None] / total * torch.tensor([4, 6, 10])
    wave = torch.sin(angle + 6 * torch.rand(BATCH, 1, SERIES, 3)) * mix[:, None]
    level, size = torch.randn(BATCH, 1, SERIES), 0.5 + torch.rand(BATCH, 1, SERIES)
    series = level + size * (wave.sum(3) + 0.1 * torch.randn(BATCH, total, SERIES))
    hour = torch.randint(24, (BATCH, 1)) + torch.arange(SEQ_LEN)
    marks = torch.stack([hour % 24 / 23, hour // 24 % 7 / 6, hour / 64], 2) - 0.5
    return {"x_enc": series[:, :SEQ_LEN], "x_mark_enc": marks}, series[:, SEQ_LEN:]


def squares(outputs: Tensor, target: Tensor) -> Tensor:
    """A quarter of the mean squared error."""
    return F.mse_loss(outputs, target) / 4
