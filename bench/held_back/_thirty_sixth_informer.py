"""A small Informer: sparse attention by sampled keys, distilling between its layers, a causal decoder."""

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ENC_IN, DEC_IN, C_OUT, MARKS, SERIES = 6, 5, 2, 4, 10
SEQ_LEN, LABEL_LEN, PRED_LEN = 28, 7, 9
D_MODEL, N_HEADS, D_FF, FACTOR = 24, 3, 40, 2


class TokenEmbedding(nn.Module):
    def __init__(self, c_in: int, d_model: int):
        super().__init__()
        self.tokenConv = nn.Conv1d(c_in, d_model, 3, padding=1, padding_mode="circular")

    def forward(self, x: Tensor) -> Tensor:
        return self.tokenConv(x.permute(0, 2, 1)).transpose(1, 2)


class PositionalEmbedding(nn.Module):
    def __init__(self, d_model: int, max_len: int = 40):
        super().__init__()
        position = torch.arange(max_len).unsqueeze(1)
        div_term = (torch.arange(0, d_model, 2) * -(math.log(10000.0) / d_model)).exp()
        pe = torch.stack([torch.sin(position * div_term), torch.cos(position * div_term)], 2)
        self.register_buffer("pe", pe.flatten(1).unsqueeze(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.pe[:, : x.size(1)]


class DataEmbedding(nn.Module):
    def __init__(self, c_in: int, d_model: int):
        super().__init__()
        self.value_embedding = TokenEmbedding(c_in, d_model)
        self.position_embedding = PositionalEmbedding(d_model)
        self.temporal_embedding = nn.Sequential(OrderedDict(embed=nn.Linear(MARKS, d_model, bias=False)))

    def forward(self, x: Tensor, x_mark: Tensor) -> Tensor:
        return self.value_embedding(x) + self.position_embedding(x) + self.temporal_embedding(x_mark)


class FullAttention(nn.Module):
    def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        scores = torch.einsum("blhe,bshe->bhls", queries, keys)
        attn = torch.softmax(scores / math.sqrt(queries.shape[-1]), dim=-1)
        return torch.einsum("bhls,bshd->blhd", attn, values)


class ProbAttention(nn.Module):
    """The queries that differ most over some sampled keys attend; the others get what all would."""

    def __init__(self, mask_flag: bool, length: int):
        super().__init__()
        self.mask_flag, self.u = mask_flag, min(FACTOR * math.ceil(math.log(length)), length)
        self.register_buffer("index_sample", torch.randint(length, (length, self.u)))

    def _prob_qk(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        k_sample = k[:, :, self.index_sample]
        qk_sample = torch.matmul(q.unsqueeze(-2), k_sample.transpose(-2, -1)).squeeze(-2)
        m = qk_sample.max(-1)[0] - torch.div(qk_sample.sum(-1), k.shape[2])
        m_top = m.topk(self.u, sorted=False)[1]
        q_reduce = q.gather(2, m_top.unsqueeze(-1).expand(-1, -1, -1, q.shape[-1]))
        return torch.matmul(q_reduce, k.transpose(-2, -1)), m_top

    def _update_context(self, context: Tensor, v: Tensor, scores: Tensor, index: Tensor) -> Tensor:
        if self.mask_flag:
            late = torch.arange(v.shape[2]) > index.unsqueeze(-1)
            scores = scores.masked_fill(late, -math.inf)
        attn = torch.softmax(scores, dim=-1)
        return context.scatter(2, index.unsqueeze(-1).expand(-1, -1, -1, v.shape[-1]), attn @ v)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        queries, keys, values = (x.transpose(2, 1) for x in (queries, keys, values))
        scores_top, index = self._prob_qk(queries, keys)
        scores_top = scores_top * (1.0 / math.sqrt(queries.shape[-1]))
        context = values.cumsum(2) if self.mask_flag else values.mean(2, keepdim=True).expand_as(values)
        return self._update_context(context, values, scores_top, index).transpose(2, 1)


class AttentionLayer(nn.Module):
    def __init__(self, attention: nn.Module, d_model: int, n_heads: int, mix: bool = False):
        super().__init__()
        self.inner_attention, self.n_heads, self.mix = attention, n_heads, mix
        self.query_projection = nn.Linear(d_model, d_model)
        self.key_projection = nn.Linear(d_model, d_model)
        self.value_projection = nn.Linear(d_model, d_model)
        self.out_projection = nn.Linear(d_model, d_model)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        shape = *queries.shape[:2], self.n_heads, -1
        queries = self.query_projection(queries).view(shape)
        keys = self.key_projection(keys).unflatten(2, shape[2:])
        values = self.value_projection(values).unflatten(2, shape[2:])
        out = self.inner_attention(queries, keys, values)
        if self.mix:
            out = out.transpose(2, 1)
        return self.out_projection(out.reshape(*shape[:2], -1))


class ConvLayer(nn.Module):
    def __init__(self, c_in: int):
        super().__init__()
        self.downConv = nn.Conv1d(c_in, c_in, 3, padding=1, padding_mode="circular")
        self.norm, self.activation = nn.BatchNorm1d(c_in), nn.ELU()
        self.maxPool = nn.MaxPool1d(3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.downConv(x.permute(0, 2, 1)))
        return self.maxPool(self.activation(x)).transpose(1, 2)


class EncoderLayer(nn.Module):
    def __init__(self, d_model: int, length: int):
        super().__init__()
        self.attention = AttentionLayer(ProbAttention(False, length), d_model, N_HEADS)
        self.conv1, self.conv2 = nn.Conv1d(d_model, D_FF, 1), nn.Conv1d(D_FF, d_model, 1)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, x: Tensor) -> Tensor:
        y = x = self.norm1(x + self.attention(x, x, x))
        y = self.conv2(F.gelu(self.conv1(y.transpose(-1, 1)))).transpose(-1, 1)
        return self.norm2(x + y)


class Encoder(nn.Module):
    def __init__(self, d_model: int):
        super().__init__()
        self.attn_layers = nn.ModuleList(EncoderLayer(d_model, SEQ_LEN // 2**i) for i in range(3))
        self.conv_layers = nn.ModuleList(ConvLayer(d_model) for _ in range(2))
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x: Tensor) -> Tensor:
        for attn_layer, conv_layer in zip(self.attn_layers, self.conv_layers, strict=False):
            x = conv_layer(attn_layer(x))
        return self.norm(self.attn_layers[-1](x))


class DecoderLayer(nn.Module):
    def __init__(self, d_model: int):
        super().__init__()
        inner = ProbAttention(True, LABEL_LEN + PRED_LEN)
        self.self_attention = AttentionLayer(inner, d_model, N_HEADS, mix=True)
        self.cross_attention = AttentionLayer(FullAttention(), d_model, N_HEADS)
        self.conv1, self.conv2 = nn.Conv1d(d_model, D_FF, 1), nn.Conv1d(D_FF, d_model, 1)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(d_model) for _ in range(3))

    def forward(self, x: Tensor, cross: Tensor) -> Tensor:
        x = self.norm1(x + self.self_attention(x, x, x))
        y = x = self.norm2(x + self.cross_attention(x, cross, cross))
        y = self.conv2(F.gelu(self.conv1(y.transpose(-1, 1)))).transpose(-1, 1)
        return self.norm3(x + y)


class Decoder(nn.Module):
    def __init__(self, d_model: int):
        super().__init__()
        self.layers, self.norm = nn.ModuleList(DecoderLayer(d_model) for _ in range(2)), nn.LayerNorm(d_model)

    def forward(self, x: Tensor, cross: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, cross)
        return self.norm(x)


class Informer(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc_embedding, self.dec_embedding = (DataEmbedding(c, D_MODEL) for c in (ENC_IN, DEC_IN))
        self.encoder, self.decoder = Encoder(D_MODEL), Decoder(D_MODEL)
        self.projection = nn.Linear(D_MODEL, C_OUT)
        for m in self.modules():
            if isinstance(m, nn.LayerNorm | nn.BatchNorm1d):
                nn.init.normal_(m.weight, 1, 0.2), nn.init.normal_(m.bias, 0, 0.1)

    def forward(self, x_enc: Tensor, x_mark_enc: Tensor, x_dec: Tensor, x_mark_dec: Tensor) -> Tensor:
        enc_out = self.encoder(self.enc_embedding(x_enc, x_mark_enc))
        dec_out = self.decoder(self.dec_embedding(x_dec, x_mark_dec), enc_out)
        return self.projection(dec_out)[:, -PRED_LEN:]


def seasons() -> tuple[dict[str, Tensor], Tensor]:
    """Seasonal series with a trend; the decoder is given their end and zeros."""
    time = torch.arange(SEQ_LEN + PRED_LEN) + torch.randint(50, (SERIES, 1))
    marks = torch.stack([(time % p) / (p - 1) - 0.5 for p in (24, 7, 30, 12)], 2)
    wave = torch.sin(math.tau * time[..., None] / torch.tensor([8, 12, 6, 24, 10, 7]) + torch.rand(ENC_IN))
    series = wave + 0.5 * marks[..., 2:3] + 0.2 * torch.randn_like(wave)
    known, start = series[:, :SEQ_LEN], SEQ_LEN - LABEL_LEN
    x_dec = F.pad(known[:, start:, :DEC_IN], (0, 0, 0, PRED_LEN))
    old, new = marks[:, :SEQ_LEN], marks[:, start:]
    inputs = {"x_enc": known, "x_mark_enc": old, "x_dec": x_dec, "x_mark_dec": new}
    return inputs, series[:, SEQ_LEN:, :C_OUT]
