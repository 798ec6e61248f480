"""Networks for sequences: dilated convs, packed and padded recurrence, cross attention, a padding mask."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.rnn import pack_padded_sequence

from bench.tasks import _classes, _task


class TemporalBlock(nn.Module):
    """A causal, dilated, weight-normalised conv with a residual: padded on both sides, then cut."""

    def __init__(self, width: int, dilation: int):
        super().__init__()
        self.conv = weight_norm(nn.Conv1d(width, width, 3, padding=2 * dilation, dilation=dilation))
        self.cut = 2 * dilation

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.conv(x)[..., : -self.cut])


class Temporal(nn.Module):
    """[N, 4, 16] -> [N, 5, 16]: one 1x1 conv is shared by all blocks; the head sees the mean of the past."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv1d(4, 8, 1)
        self.blocks = nn.ModuleList(TemporalBlock(8, dilation) for dilation in (1, 2, 4))
        self.mix = nn.Conv1d(8, 8, 1)
        self.head = nn.Conv1d(8, 5, 1)

    def past(self, x: Tensor) -> Tensor:
        """The mean of all time steps so far."""
        return x.cumsum(2) / torch.arange(1, x.shape[2] + 1, device=x.device)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = torch.tanh(self.mix(block(x)))
        return self.head(self.past(x))


class PackedLSTM(nn.Module):
    """Sequences of several lengths -> [N, 4]: two bidirectional layers, the last state of each direction."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(5, 9, num_layers=2, bidirectional=True, batch_first=True)
        self.fc = nn.Linear(18, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, (last, _) = self.lstm(packed)
        return self.fc(torch.cat([last[-2], last[-1]], 1))


class Tagger(nn.Module):
    """Tokens [N, T], 0 for padding -> tag scores [N, 6, T]; padding is read as well."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(23, 10, padding_idx=0)
        self.gru = nn.GRU(10, 8, num_layers=2, bidirectional=True, batch_first=True)
        self.fc = nn.Linear(16, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.fc(self.gru(self.embed(tokens))[0]).transpose(1, 2)


class Seq2Seq(nn.Module):
    """A source [N, S, 6] and the tokens so far [N, T] -> scores [N, 11, T]; GRUs and cross attention."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.GRU(6, 12, batch_first=True)
        self.embed = nn.Embedding(11, 12)
        self.decoder = nn.GRU(12, 12, batch_first=True)
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)
        self.out = nn.Linear(24, 11)

    def forward(self, source: Tensor, tokens: Tensor) -> Tensor:
        memory, last = self.encoder(source)
        states, _ = self.decoder(self.embed(tokens), last)
        context, _ = self.attention(states, memory, memory, need_weights=False)
        return self.out(torch.cat([states, context], 2)).transpose(1, 2)


def sinusoids(length: int, width: int) -> Tensor:
    """The table of positions of "Attention is all you need"."""
    angles = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
    return torch.stack([angles.sin(), angles.cos()], 2).flatten(1)


class MaskedEncoder(nn.Module):
    """Tokens, segments and a mask, True at real tokens, [N, T] -> [N, 4]: the library's encoder, a mean."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(31, 16, padding_idx=0)
        self.segment = nn.Embedding(2, 16)
        self.register_buffer("position", sinusoids(20, 16))
        layer = nn.TransformerEncoderLayer(
            16, 2, dim_feedforward=24, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(16)
        self.fc = nn.Linear(16, 4)

    def forward(self, tokens: Tensor, mask: Tensor, segments: Tensor) -> Tensor:
        x = self.embed(tokens) + self.segment(segments) + self.position[: tokens.shape[1]]
        x = self.norm(self.encoder(x, src_key_padding_mask=~mask))
        real = mask[..., None].to(x.dtype)
        return self.fc((x * real).sum(1) / real.sum(1))


def _signal() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 4, 16), torch.randint(5, (8, 16))


def _packed() -> tuple[dict, Tensor]:
    return {"x": torch.randn(9, 8, 5), "lengths": torch.randint(2, 9, (9,))}, _classes(9, 4)


def _tagged() -> tuple[Tensor, Tensor]:
    real = torch.arange(10) < torch.randint(3, 11, (7, 1))
    return torch.where(real, torch.randint(1, 23, (7, 10)), 0), torch.where(
        real, torch.randint(6, (7, 10)), -100
    )


def _translated() -> tuple[tuple[Tensor, Tensor], Tensor]:
    tokens = torch.randint(11, (8, 8))
    return (torch.randn(8, 6, 6), tokens[:, :-1]), tokens[:, 1:]


def _masked() -> tuple[dict, Tensor]:
    mask = torch.arange(11) < torch.randint(4, 12, (8, 1))
    tokens = torch.where(mask, torch.randint(1, 31, (8, 11)), 0)
    segments = (torch.arange(11) >= torch.randint(1, 11, (8, 1))).long()
    return {"tokens": tokens, "mask": mask, "segments": segments}, _classes(8, 4)


temporal = _task("temporal", Temporal, _signal)
packed_lstm = _task("packed_lstm", PackedLSTM, _packed)
tagger = _task("tagger", Tagger, _tagged)
seq2seq = _task("seq2seq", Seq2Seq, _translated)
masked_encoder = _task("masked_encoder", MaskedEncoder, _masked)
