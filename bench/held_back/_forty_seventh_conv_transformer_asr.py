"""A small hybrid recogniser: gated separable convolutions, relative attention, two heads."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEATURES, FRAMES, CLIPS, TOKENS, LONGEST = 10, 38, 4, 9, 5
BOS, PAD, WORDS = TOKENS, TOKENS + 1, TOKENS + 2
PROLOGUE, MIDDLE, WIDTH, HEADS, INNER, LAYERS = 12, 18, 28, 4, 40, 2


def valid(lens: Tensor, count: int) -> Tensor:
    """[N, T]: whether the frame is no padding."""
    return torch.arange(count, device=lens.device) < lens[:, None]


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """[T, width]: sines at even places and cosines at odd ones."""
    rate = torch.exp(torch.arange(0, width, 2).to(positions) * -(math.log(10000.0) / width))
    angle = positions[:, None] * rate
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)


class MaskedConv1d(nn.Module):
    def __init__(self, inputs: int, outputs: int, kernel_size: int = 1, stride: int = 1, groups: int = 1):
        super().__init__()
        settings = {"stride": stride, "padding": kernel_size // 2, "groups": groups, "bias": False}
        self.conv = nn.Conv1d(inputs, outputs, kernel_size, **settings)

    def get_seq_len(self, lens: Tensor) -> Tensor:
        kernel, stride, padding = self.conv.kernel_size[0], self.conv.stride[0], self.conv.padding[0]
        return (lens + 2 * padding - kernel) // stride + 1

    def forward(self, x: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
        x = x.masked_fill(~valid(lens, x.shape[2])[:, None], 0)
        return self.conv(x), self.get_seq_len(lens)


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        small = channels // 3
        self.fc = nn.Sequential(nn.Linear(channels, small), nn.ReLU(), nn.Linear(small, channels))

    def forward(self, x: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
        kept = x.masked_fill(~valid(lens, x.shape[2])[:, None], 0)
        y = self.fc(kept.sum(2) / lens[:, None].to(x))
        return x * torch.sigmoid(y)[:, :, None], lens


class JasperBlock(nn.Module):
    def __init__(self, inputs: int, filters: int, kernel: int, stride: int = 1, dense: tuple = ()):
        super().__init__()
        separable = MaskedConv1d(inputs, inputs, kernel, stride, inputs), MaskedConv1d(inputs, filters)
        norm = nn.BatchNorm1d(filters, eps=1e-3)
        self.mconv = nn.ModuleList([*separable, norm, SqueezeExcite(filters)])
        self.res = nn.ModuleList()
        for panes in dense:
            self.res.append(nn.ModuleList([MaskedConv1d(panes, filters), nn.BatchNorm1d(filters, eps=1e-3)]))
        self.mout = nn.Sequential(nn.ReLU())

    def forward(self, xs: list[Tensor], lens_orig: Tensor) -> tuple[list[Tensor], Tensor]:
        out, lens = xs[-1], lens_orig
        for layer in self.mconv:
            if isinstance(layer, (MaskedConv1d, SqueezeExcite)):
                out, lens = layer(out, lens)
            else:
                out = layer(out)
        for x, (conv, norm) in zip(xs, self.res, strict=False):
            out = out + norm(conv(x, lens_orig)[0])
        out = self.mout(out)
        return ([*xs, out] if len(self.res) else [out]), lens


class RelPositionMultiHeadAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear_q, self.linear_k, self.linear_v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.linear_out, self.linear_pos = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.pos_bias_u = nn.Parameter(0.4 * torch.randn(HEADS, WIDTH // HEADS))
        self.pos_bias_v = nn.Parameter(0.4 * torch.randn(HEADS, WIDTH // HEADS))

    def rel_shift(self, x: Tensor) -> Tensor:
        n, h, query, places = x.shape
        return F.pad(x, (1, 0)).view(n, h, places + 1, query)[:, :, 1:].view(n, h, query, places)

    def forward(self, x: Tensor, mask: Tensor, pos_emb: Tensor) -> Tensor:
        q = self.linear_q(x).unflatten(2, (HEADS, -1))
        k, v = (f(x).unflatten(2, (HEADS, -1)).transpose(1, 2) for f in (self.linear_k, self.linear_v))
        p = self.linear_pos(pos_emb).unflatten(1, (HEADS, -1)).transpose(0, 1)
        with_u, with_v = (q + self.pos_bias_u).transpose(1, 2), (q + self.pos_bias_v).transpose(1, 2)
        matrix_bd = self.rel_shift(with_v @ p.transpose(1, 2))[..., : x.shape[1]]
        scores = (with_u @ k.transpose(2, 3) + matrix_bd) / math.sqrt(q.shape[3])
        attn = torch.softmax(scores.masked_fill(~mask[:, None, None], -1e4), -1)
        return self.linear_out((attn @ v).transpose(1, 2).flatten(2))


class AttentionLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_self_att, self.self_attn = nn.LayerNorm(WIDTH), RelPositionMultiHeadAttention()
        self.norm_feed_forward = nn.LayerNorm(WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, INNER), nn.SiLU(), nn.Linear(INNER, WIDTH))

    def forward(self, x: Tensor, mask: Tensor, pos_emb: Tensor) -> Tensor:
        x = x + self.self_attn(self.norm_self_att(x), mask, pos_emb)
        return x + self.feed_forward(self.norm_feed_forward(x))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        first = JasperBlock(FEATURES, PROLOGUE, 5, stride=2)
        second = JasperBlock(PROLOGUE, MIDDLE, 7, dense=(PROLOGUE,))
        third = JasperBlock(MIDDLE, WIDTH, 9, dense=(PROLOGUE, MIDDLE))
        self.blocks = nn.ModuleList([first, second, third])
        self.layers = nn.ModuleList(AttentionLayer() for _ in range(LAYERS))
        self.norm_out = nn.LayerNorm(WIDTH)

    def forward(self, audio_signal: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        xs = [audio_signal]
        for block in self.blocks:
            xs, length = block(xs, length)
        x = xs[-1].transpose(1, 2)
        mask, count = valid(length, x.shape[1]), x.shape[1]
        pos_emb = sinusoids(torch.arange(count - 1, -count, -1).to(x), WIDTH)
        for layer in self.layers:
            x = layer(x, mask, pos_emb)
        return self.norm_out(x) * mask[:, :, None], mask


class MultiHeadAttention(nn.Module):
    def __init__(self, heads: int = 2):
        super().__init__()
        self.query_net, self.key_net, self.value_net = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out_projection, self.heads = nn.Linear(WIDTH, WIDTH), heads

    def forward(self, queries: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        nets = (self.query_net, queries), (self.key_net, keys), (self.value_net, keys)
        q, k, v = (net(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for net, x in nets)
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
        probs = torch.softmax(scores.masked_fill(~mask, -1e4), -1)
        return self.out_projection((probs @ v).transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """Attention of the tokens so far to the frames, norms first."""

    def __init__(self):
        super().__init__()
        self.embedding, self.layer_norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.cross_attn, self.final_layer_norm = MultiHeadAttention(), nn.LayerNorm(WIDTH)
        self.classifier = nn.Linear(WIDTH, WORDS - 1)

    def forward(self, tokens: Tensor, encoded: Tensor, mask: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + sinusoids(torch.arange(tokens.shape[1]).to(x), WIDTH)
        x = x + self.cross_attn(self.layer_norm(x), encoded, mask[:, None, None])
        return self.classifier(self.final_layer_norm(x)).log_softmax(-1)


class HybridRecogniser(nn.Module):
    """Features of frames, their count and tokens so far -> log-probabilities of both heads."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Encoder(), Decoder()
        self.ctc = nn.Linear(WIDTH, TOKENS + 1)
        for name, value in [*self.named_parameters(), *self.named_buffers()]:
            if value.dim() == 1:
                nn.init.normal_(value, float(name.endswith(("var", "weight"))), 0.1)

    def forward(self, audio_signal: Tensor, length: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        encoded, mask = self.encoder(audio_signal, length)
        return self.ctc(encoded).log_softmax(-1), self.decoder(tokens, encoded, mask)


def speech() -> tuple[dict[str, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Tokens that last some frames each, as bumps over the features; clips and texts end in padding."""
    many, length = torch.randint(3, LONGEST + 1, (CLIPS,)), torch.randint(24, FRAMES, (CLIPS,))
    text = torch.randint(TOKENS, (CLIPS, LONGEST)).masked_fill(~valid(many, LONGEST), PAD)
    place = (torch.arange(FRAMES) * many[:, None] // length[:, None]).clamp(max=LONGEST - 1)
    said = text.gather(1, place)[:, None]
    x = torch.exp(-((torch.arange(FEATURES)[:, None] - said) ** 2) / 4.0) + 0.3 * torch.randn(
        1, FEATURES, FRAMES
    )
    x = x.masked_fill(~valid(length, FRAMES)[:, None], 0)
    tokens = F.pad(text, (1, 0), value=BOS)
    return {"audio_signal": x, "length": length, "tokens": tokens}, (text, many, (length + 1) // 2)


def both_losses(outputs: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """A part of CTC and the rest smoothed cross entropy of the next token, by four."""
    (ctc, words), (text, many, frames) = outputs, target
    aligned = F.ctc_loss(ctc.transpose(0, 1), text, frames, many, blank=TOKENS, zero_infinity=True)
    wanted = F.pad(text, (0, 1), value=PAD).scatter(1, many[:, None], BOS)
    settings = {"ignore_index": PAD, "label_smoothing": 0.1}
    return (0.3 * aligned + 0.7 * F.cross_entropy(words.transpose(1, 2), wanted, **settings)) / 4
