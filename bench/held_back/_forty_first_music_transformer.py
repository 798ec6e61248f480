"""A small Music Transformer: relative attention by skewing, and in one layer by clipped distances."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PAD, VOCAB, WIDTH, HEADS, INNER, LAYERS = 0, 41, 30, 3, 22, 3
MAX_SEQ, CLIP, CLIPPED, LENGTH, PIECES = 19, 5, 1, 13, 4


def linear(inside: int, outside: int) -> nn.Linear:
    layer = nn.Linear(inside, outside)
    nn.init.normal_(layer.weight, std=1 / math.sqrt(inside)), nn.init.normal_(layer.bias, std=0.1)
    return layer


def layer_norm(width: int) -> nn.LayerNorm:
    norm = nn.LayerNorm(width, eps=1e-6)
    nn.init.normal_(norm.weight, 1.1, 0.2), nn.init.normal_(norm.bias, std=0.1)
    return norm


def get_masked_with_pad_tensor(x: Tensor) -> Tensor:
    """One for each key that is padding and for each that comes later, [N, 1, T, T]."""
    later = torch.ones(x.shape[1], x.shape[1], device=x.device).triu(1).bool()
    return (x == PAD)[:, None, None] | later


class DynamicPositionEmbedding(nn.Module):
    def __init__(self, embedding_dim: int, max_seq: int):
        super().__init__()
        i, position = torch.arange(embedding_dim).double(), torch.arange(max_seq).double()[:, None]
        rate = torch.exp(-math.log(10000) * (i - i % 2) / embedding_dim)
        self.register_buffer(
            "positional_embedding", torch.sin(position * rate + math.pi / 2 * (i % 2)).float()
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.positional_embedding[: x.shape[1]]


class RelativeGlobalAttention(nn.Module):
    """Heads with a table each, from the furthest distance to none."""

    def __init__(self, h: int, d: int, max_seq: int):
        super().__init__()
        self.h, self.d, self.dh, self.max_seq = h, d, d // h, max_seq
        self.Wq, self.Wk, self.Wv = linear(d, d), linear(d, d), linear(d, d)
        self.fc = linear(d, d)
        self.E = nn.Parameter(0.7 * torch.randn(h, max_seq, self.dh))

    def _heads(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], x.shape[1], self.h, -1).permute(0, 2, 1, 3)

    def _get_left_embedding(self, len_q: int) -> Tensor:
        return self.E[:, max(0, self.max_seq - len_q) :]

    def _qe_masking(self, qe: Tensor) -> Tensor:
        """Nought where the distance reaches before the beginning."""
        return qe * torch.ones_like(qe[0, 0]).tril().flip(1)

    def _skewing(self, tensor: Tensor) -> Tensor:
        padded = F.pad(tensor, [1, 0])
        n, h, rows, columns = padded.shape
        return padded.reshape(n, h, columns, rows)[:, :, 1:]

    def _relative(self, q: Tensor) -> Tensor:
        qe = torch.einsum("bhld,hmd->bhlm", q, self._get_left_embedding(q.shape[2]))
        return self._skewing(self._qe_masking(qe))

    def forward(self, inputs: list[Tensor], mask: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (self._heads(w(x)) for w, x in zip((self.Wq, self.Wk, self.Wv), inputs, strict=True))
        logits = (q @ k.permute(0, 1, 3, 2) + self._relative(q)) / math.sqrt(self.dh)
        logits = logits + mask.to(logits) * -1e9
        weights = F.softmax(logits, -1)
        out = (weights @ v).permute(0, 2, 1, 3)
        return self.fc(out.reshape(out.shape[0], -1, self.d)), weights


class ClippedRelativeAttention(RelativeGlobalAttention):
    """All that is further than the table's first row shares that row."""

    def _relative(self, q: Tensor) -> Tensor:
        place = torch.arange(q.shape[2], device=q.device)
        distance = (place - place[:, None]).clamp(1 - self.max_seq, 0)
        return torch.einsum("bhld,hlmd->bhlm", q, self.E[:, distance + self.max_seq - 1])


class EncoderLayer(nn.Module):
    def __init__(self, d: int, rga: RelativeGlobalAttention):
        super().__init__()
        self.rga = rga
        self.FFN_pre, self.FFN_suf = linear(d, INNER), linear(INNER, d)
        self.layernorm1, self.layernorm2 = layer_norm(d), layer_norm(d)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        attn_out, w = self.rga([x, x, x], mask)
        out1 = self.layernorm1(attn_out + x)
        ffn_out = self.FFN_suf(F.relu(self.FFN_pre(out1)))
        return self.layernorm2(out1 + ffn_out), w


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.d_model = WIDTH
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        nn.init.normal_(self.embedding.weight, std=1 / math.sqrt(WIDTH))
        self.pos_encoding = DynamicPositionEmbedding(WIDTH, MAX_SEQ)
        kinds = [(RelativeGlobalAttention, MAX_SEQ)] * LAYERS
        kinds[CLIPPED] = (ClippedRelativeAttention, CLIP + 1)
        self.enc_layers = nn.ModuleList(EncoderLayer(WIDTH, make(HEADS, WIDTH, n)) for make, n in kinds)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, list[Tensor]]:
        x, weights = self.pos_encoding(self.embedding(x) * math.sqrt(self.d_model)), []
        for layer in self.enc_layers:
            x, w = layer(x, mask)
            weights.append(w)
        return x, weights


class MusicTransformer(nn.Module):
    """Events [N, T] -> logits of the next ones, [N, T, VOCAB]."""

    def __init__(self):
        super().__init__()
        self.Decoder, self.fc = Encoder(), linear(WIDTH, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        decoder, _ = self.Decoder(x, get_masked_with_pad_tensor(x))
        return self.fc(decoder)


def motifs() -> tuple[Tensor, Tensor]:
    """Repeated motifs, transposed as they go on, of several lengths; a few events of the input are lost."""
    start, step = torch.randint(VOCAB - 1, (PIECES, 1)), torch.randint(1, 5, (PIECES, 1))
    motif, beat = torch.randint(12, (PIECES, 4)), torch.arange(LENGTH + 1)
    piece = 1 + (start + motif[:, beat % 4] + step * (beat // 4)) % (VOCAB - 1)
    ends = torch.randint(LENGTH - 5, LENGTH + 2, (PIECES, 1))
    piece = torch.where(beat < ends, piece, PAD)
    lost = (torch.rand(PIECES, LENGTH) < 0.12) & (beat[:-1] > 0)
    return piece[:, :-1].masked_fill(lost, PAD), piece[:, 1:]


def smooth_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Cross entropy with smoothed labels, padding left out, by four."""
    hot = F.one_hot(target, VOCAB).to(logits) * 0.9 + 0.1 / VOCAB
    kept = (target != PAD).to(logits)
    return -((hot * logits.log_softmax(-1)).sum(-1) * kept).sum() / kept.sum() / 4
