"""What a small Squeezeformer is made of: attention, layers and convolutions with adaptive scales."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class AdaptiveScale(nn.Module):
    """What the parts of a block share: a scale and a bias for what comes in."""

    def __init__(self, size: int):
        super().__init__()
        self.ada_scale = nn.Parameter(torch.ones(1, 1, size))
        self.ada_bias = nn.Parameter(torch.zeros(1, 1, size))


class RelPositionalEncoding(nn.Module):
    """Scales the frames and gives a sinusoid for each distance, from T - 1 down to 1 - T."""

    def __init__(self, d_model: int):
        super().__init__()
        self.d_model, self.xscale = d_model, math.sqrt(d_model)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        size = x.size(1)
        position = torch.arange(size - 1, -size, -1, dtype=x.dtype, device=x.device).unsqueeze(1)
        even = torch.arange(0, self.d_model, 2, dtype=x.dtype, device=x.device)
        div_term = torch.exp(even * -(math.log(10000.0) / self.d_model))
        pe = x.new_zeros(2 * size - 1, self.d_model)
        pe[:, 0::2] = torch.sin(position * div_term)
        pe[:, 1::2] = torch.cos(position * div_term)
        return x * self.xscale, pe.unsqueeze(0)


class DepthwiseConv2dSubsampling4(nn.Module):
    def __init__(self, odim: int, input_size: int):
        super().__init__()
        self.pw_conv = nn.Conv2d(1, odim, 3, stride=2)
        self.act1 = nn.ReLU()
        self.dw_conv = nn.Conv2d(odim, odim, 3, stride=2, groups=odim)
        self.act2 = nn.ReLU()
        width = odim * (((input_size - 1) // 2 - 1) // 2)
        self.pos_enc = RelPositionalEncoding(odim)
        self.input_proj = nn.Sequential(nn.Linear(width, odim), nn.Dropout(0.0))

    def forward(self, x: Tensor, x_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.act1(self.pw_conv(x.unsqueeze(1)))
        x = self.act2(self.dw_conv(x))
        b, c, t, f = x.size()
        x = x.permute(0, 2, 1, 3).contiguous().view(b, t, c * f)
        x, pos_emb = self.pos_enc(x)
        return self.input_proj(x), pos_emb, x_mask[:, :, :-2:2][:, :, :-2:2]


class RelPositionMultiHeadedAttention(AdaptiveScale):
    def __init__(self, n_head: int, n_feat: int):
        super().__init__(n_feat)
        self.h, self.d_k = n_head, n_feat // n_head
        self.linear_q = nn.Linear(n_feat, n_feat)
        self.linear_k = nn.Linear(n_feat, n_feat)
        self.linear_v = nn.Linear(n_feat, n_feat)
        self.linear_out = nn.Linear(n_feat, n_feat)
        self.linear_pos = nn.Linear(n_feat, n_feat, bias=False)
        self.pos_bias_u = nn.Parameter(torch.zeros(self.h, self.d_k))
        self.pos_bias_v = nn.Parameter(torch.zeros(self.h, self.d_k))

    def rel_shift(self, x: Tensor) -> Tensor:
        """[N, h, T, 2 T - 1] by distance -> [N, h, T, T] by key."""
        n, h, t, both = x.size()
        padded = torch.cat([x.new_zeros(n, h, t, 1), x], dim=-1).view(n, h, both + 1, t)
        return padded[:, :, 1:].reshape(n, h, t, both)[..., :t]

    def forward(self, x: Tensor, mask: Tensor, pos_emb: Tensor) -> Tensor:
        x = self.ada_scale * x + self.ada_bias
        n = x.size(0)
        q = self.linear_q(x).view(n, -1, self.h, self.d_k)
        k = self.linear_k(x).view(n, -1, self.h, self.d_k).transpose(1, 2)
        v = self.linear_v(x).view(n, -1, self.h, self.d_k).transpose(1, 2)
        p = self.linear_pos(pos_emb).view(1, -1, self.h, self.d_k).transpose(1, 2)
        q_with_bias_u = (q + self.pos_bias_u).transpose(1, 2)
        q_with_bias_v = (q + self.pos_bias_v).transpose(1, 2)
        matrix_ac = torch.matmul(q_with_bias_u, k.transpose(-2, -1))
        matrix_bd = self.rel_shift(torch.matmul(q_with_bias_v, p.transpose(-2, -1)))
        scores = (matrix_ac + matrix_bd) / math.sqrt(self.d_k)
        mask = mask.unsqueeze(1).eq(0)
        attn = torch.softmax(scores.masked_fill(mask, -float("inf")), dim=-1).masked_fill(mask, 0.0)
        x = torch.matmul(attn, v).transpose(1, 2).contiguous().view(n, -1, self.h * self.d_k)
        return self.linear_out(x)


class PositionwiseFeedForward(AdaptiveScale):
    def __init__(self, idim: int, hidden_units: int):
        super().__init__(idim)
        self.w_1 = nn.Linear(idim, hidden_units)
        self.activation = nn.SiLU()
        self.w_2 = nn.Linear(hidden_units, idim)

    def forward(self, xs: Tensor) -> Tensor:
        return self.w_2(self.activation(self.w_1(self.ada_scale * xs + self.ada_bias)))


class ConvolutionModule(AdaptiveScale):
    def __init__(self, channels: int, kernel_size: int):
        super().__init__(channels)
        self.pointwise_conv1 = nn.Conv1d(channels, 2 * channels, 1)
        edge = (kernel_size - 1) // 2
        self.depthwise_conv = nn.Conv1d(channels, channels, kernel_size, padding=edge, groups=channels)
        self.norm = nn.BatchNorm1d(channels)
        self.activation = nn.SiLU()
        self.pointwise_conv2 = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor, mask_pad: Tensor) -> Tensor:
        x = (self.ada_scale * x + self.ada_bias).transpose(1, 2)
        x = x.masked_fill(~mask_pad, 0.0)
        x = F.glu(self.pointwise_conv1(x), dim=1)
        x = self.activation(self.norm(self.depthwise_conv(x)))
        return self.pointwise_conv2(x).masked_fill(~mask_pad, 0.0).transpose(1, 2)


class TimeReductionLayer1D(nn.Module):
    def __init__(self, channel: int, kernel_size: int = 5, stride: int = 2):
        super().__init__()
        edge = kernel_size - stride
        self.dw_conv = nn.Conv1d(channel, channel, kernel_size, stride, padding=edge, groups=channel)
        self.pw_conv = nn.Conv1d(channel, channel, 1)

    def forward(self, xs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        xs = xs.transpose(1, 2).masked_fill(~mask, 0.0)
        xs = self.pw_conv(self.dw_conv(xs)).transpose(1, 2)
        mask = mask[:, :, ::2]
        return xs[:, : mask.size(-1)], mask
