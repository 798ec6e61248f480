"""A small E-Branchformer: an encoder of two branches a layer, a CTC head and a decoder without attention."""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MELS, FRAMES, WIDTH, HEADS, HIDDEN, GATED, LAYERS = 17, 47, 24, 3, 40, 56, 3
VOCABULARY, TOKENS, SAMPLES = 13, 5, 4
LayerNorm = partial(nn.LayerNorm, eps=1e-12)


class RelPositionalEncoding(nn.Module):
    """Scales the frames, and encodes the positions from T - 1 down to 1 - T."""

    def __init__(self, d_model: int):
        super().__init__()
        self.d_model, self.xscale = d_model, math.sqrt(d_model)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        size = x.shape[1]
        position = torch.arange(size - 1, -size, -1, dtype=x.dtype, device=x.device)[:, None]
        even = torch.arange(0, self.d_model, 2, dtype=x.dtype, device=x.device)
        angle = position * torch.exp(even * -(math.log(10000.0) / self.d_model))
        return x * self.xscale, torch.stack([angle.sin(), angle.cos()], 2).flatten(1)[None]


class Conv2dSubsampling(nn.Module):
    def __init__(self, idim: int, odim: int):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, odim, 3, 2), nn.ReLU(), nn.Conv2d(odim, odim, 3, 2), nn.ReLU())
        linear = nn.Linear(odim * (((idim - 1) // 2 - 1) // 2), odim)
        self.out = nn.Sequential(linear, RelPositionalEncoding(odim))

    def forward(self, x: Tensor, x_mask: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        x = self.conv(x.unsqueeze(1))
        b, c, t, f = x.size()
        x = self.out(x.transpose(1, 2).contiguous().view(b, t, c * f))
        return x, x_mask[:, :, :-2:2][:, :, :-2:2]


class PositionwiseFeedForward(nn.Module):
    def __init__(self, idim: int, hidden_units: int):
        super().__init__()
        self.w_1, self.w_2 = nn.Linear(idim, hidden_units), nn.Linear(hidden_units, idim)
        self.activation = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.w_2(self.activation(self.w_1(x)))


class RelPositionMultiHeadedAttention(nn.Module):
    def __init__(self, n_head: int, n_feat: int):
        super().__init__()
        self.h, self.d_k = n_head, n_feat // n_head
        square = partial(nn.Linear, n_feat, n_feat)
        self.linear_q, self.linear_k, self.linear_v, self.linear_out = square(), square(), square(), square()
        self.linear_pos = square(bias=False)
        self.pos_bias_u, self.pos_bias_v = (nn.Parameter(torch.empty(self.h, self.d_k)) for _ in "uv")

    def rel_shift(self, x: Tensor) -> Tensor:
        x_padded = F.pad(x, (1, 0))
        return x_padded.view(*x.size()[:2], -1, x.size(2))[:, :, 1:].view_as(x)[
            :, :, :, : x.size(-1) // 2 + 1
        ]

    def forward(self, query: Tensor, key: Tensor, value: Tensor, pos_emb: Tensor, mask: Tensor) -> Tensor:
        q = self.linear_q(query).unflatten(2, (self.h, self.d_k))
        k = self.linear_k(key).unflatten(2, (self.h, self.d_k)).transpose(1, 2)
        v = self.linear_v(value).unflatten(2, (self.h, self.d_k)).transpose(1, 2)
        p = self.linear_pos(pos_emb).unflatten(2, (self.h, self.d_k)).transpose(1, 2)
        matrix_ac = torch.matmul((q + self.pos_bias_u).transpose(1, 2), k.transpose(-2, -1))
        matrix_bd = torch.matmul((q + self.pos_bias_v).transpose(1, 2), p.transpose(-2, -1))
        scores = (matrix_ac + self.rel_shift(matrix_bd)) / math.sqrt(self.d_k)
        mask = mask.unsqueeze(1).eq(0)
        scores = scores.masked_fill(mask, torch.finfo(scores.dtype).min)
        attn = torch.softmax(scores, dim=-1).masked_fill(mask, 0.0)
        return self.linear_out(torch.matmul(attn, v).transpose(1, 2).flatten(2))


class ConvolutionalSpatialGatingUnit(nn.Module):
    def __init__(self, size: int, kernel_size: int):
        super().__init__()
        n_channels = size // 2
        self.norm = LayerNorm(n_channels)
        self.conv = nn.Conv1d(n_channels, n_channels, kernel_size, 1, kernel_size // 2, groups=n_channels)

    def forward(self, x: Tensor) -> Tensor:
        x_r, x_g = x.chunk(2, dim=-1)
        return x_r * self.conv(self.norm(x_g).transpose(1, 2)).transpose(1, 2)


class ConvolutionalGatingMLP(nn.Module):
    def __init__(self, size: int, linear_units: int, kernel_size: int):
        super().__init__()
        self.channel_proj1 = nn.Sequential(nn.Linear(size, linear_units), nn.GELU())
        self.csgu = ConvolutionalSpatialGatingUnit(linear_units, kernel_size)
        self.channel_proj2 = nn.Linear(linear_units // 2, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.channel_proj2(self.csgu(self.channel_proj1(x)))


class EBranchformerEncoderLayer(nn.Module):
    def __init__(self, size: int, merge_conv_kernel: int = 7):
        super().__init__()
        self.attn = RelPositionMultiHeadedAttention(HEADS, size)
        self.cgmlp = ConvolutionalGatingMLP(size, GATED, 5)
        self.feed_forward = PositionwiseFeedForward(size, HIDDEN)
        self.feed_forward_macaron = PositionwiseFeedForward(size, HIDDEN)
        self.ff_scale, self.norm_ff, self.norm_ff_macaron = 0.5, LayerNorm(size), LayerNorm(size)
        self.norm_mha, self.norm_mlp, self.norm_final = LayerNorm(size), LayerNorm(size), LayerNorm(size)
        both, edge = 2 * size, merge_conv_kernel // 2
        self.depthwise_conv_fusion = nn.Conv1d(both, both, merge_conv_kernel, 1, edge, groups=both)
        self.merge_proj = nn.Linear(both, size)

    def forward(self, x: Tensor, pos_emb: Tensor, mask: Tensor) -> Tensor:
        x = x + self.ff_scale * self.feed_forward_macaron(self.norm_ff_macaron(x))
        x1 = self.norm_mha(x)
        x1 = self.attn(x1, x1, x1, pos_emb, mask)
        x2 = self.cgmlp(self.norm_mlp(x))
        x_concat = torch.cat([x1, x2], dim=-1)
        x_tmp = self.depthwise_conv_fusion(x_concat.transpose(1, 2)).transpose(1, 2)
        x = x + self.merge_proj(x_concat + x_tmp)
        x = x + self.ff_scale * self.feed_forward(self.norm_ff(x))
        return self.norm_final(x)


class EBranchformerEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = Conv2dSubsampling(MELS, WIDTH)
        self.encoders = nn.ModuleList(EBranchformerEncoderLayer(WIDTH) for _ in range(LAYERS))
        self.after_norm = LayerNorm(WIDTH)

    def forward(self, xs_pad: Tensor, ilens: Tensor) -> tuple[Tensor, Tensor]:
        masks = torch.arange(xs_pad.shape[1], device=ilens.device) < ilens[:, None, None]
        (x, pos_emb), masks = self.embed(xs_pad, masks)
        for layer in self.encoders:
            x = layer(x, pos_emb, masks)
        return self.after_norm(x), masks


class CTC(nn.Module):
    def __init__(self):
        super().__init__()
        self.ctc_lo = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, hs_pad: Tensor) -> Tensor:
        return F.log_softmax(self.ctc_lo(hs_pad), dim=2)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.context = nn.Embedding(VOCABULARY, 20), nn.Linear(WIDTH, 20)
        self.output_layer = nn.Linear(20, VOCABULARY)

    def forward(self, hs_pad: Tensor, masks: Tensor, ys_in_pad: Tensor) -> Tensor:
        masks = masks.transpose(1, 2).to(hs_pad.dtype)
        pooled = (hs_pad * masks).sum(1) / masks.sum(1)
        return self.output_layer(torch.tanh(self.embed(ys_in_pad) + self.context(pooled)[:, None]))


class ESPnetASRModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder, self.ctc = EBranchformerEncoder(), Decoder(), CTC()
        for name, p in self.named_parameters():
            std = 0.2 if p.dim() == 1 or "pos_bias" in name else 0.8 / math.sqrt(p[0].numel())
            nn.init.normal_(p, float("norm" in name and name.endswith("weight")), std)

    def forward(self, speech: Tensor, speech_lengths: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        hs, masks = self.encoder(speech, speech_lengths)
        return self.ctc(hs), self.decoder(hs, masks, text)


def utterances() -> tuple[dict, Tensor]:
    """Tokens as bands of frequency in turn; the target is the number of frames left, the tokens, the end."""
    end, frames, mels = VOCABULARY - 1, torch.arange(FRAMES), torch.arange(MELS)
    lengths, counts = torch.randint(32, FRAMES, (SAMPLES,)), torch.randint(2, TOKENS, (SAMPLES,))
    lengths[0] = FRAMES
    tokens, place = torch.randint(1, end, (SAMPLES, TOKENS)), torch.arange(TOKENS)
    spoken = tokens.gather(1, (frames * counts[:, None] // lengths[:, None]).clamp(max=TOKENS - 1))
    speech = 2 * torch.exp(-((mels - 1.4 * spoken[..., None]) ** 2) / 6) - 0.5
    speech = (speech + 0.3 * torch.randn_like(speech)) * (frames < lengths[:, None])[..., None]
    text = tokens.where(place < counts[:, None], end)
    target = text.where(place <= counts[:, None], -1)
    text = torch.cat([torch.full((SAMPLES, 1), end), text[:, :-1]], 1)
    left = ((lengths[:, None] + 3) // 4).clamp(max=11)
    return {"speech": speech, "speech_lengths": lengths, "text": text}, torch.cat([left, target], 1)


def hybrid(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    (found, logits), tokens = outputs, target[:, 1:]
    counts = (tokens >= 0).sum(1) - 1
    ctc = F.ctc_loss(found.transpose(0, 1), tokens.clamp(min=0), target[:, 0], counts)
    return 0.1 * ctc + 0.2 * F.cross_entropy(logits.transpose(1, 2), tokens, ignore_index=-1)
