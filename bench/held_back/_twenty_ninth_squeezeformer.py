"""A small Squeezeformer with a temporal U-Net, post-norm blocks and adaptive scales, under a CTC loss."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._twenty_ninth_squeezeformer_parts import (
    ConvolutionModule,
    DepthwiseConv2dSubsampling4,
    PositionwiseFeedForward,
    RelPositionMultiHeadedAttention,
    TimeReductionLayer1D,
)

BANDS, FRAMES, UTTERANCES, LABELS, VOCABULARY = 21, 57, 3, 4, 11
WIDTH, HEADS, HIDDEN, KERNEL, OUT = 24, 3, 40, 7, 20
LAYERS, REDUCE, RECOVER = 4, 1, 3


class SqueezeformerEncoderLayer(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.self_attn = RelPositionMultiHeadedAttention(HEADS, size)
        self.layer_norm1 = nn.LayerNorm(size)
        self.ffn1 = PositionwiseFeedForward(size, HIDDEN)
        self.layer_norm2 = nn.LayerNorm(size)
        self.conv_module = ConvolutionModule(size, KERNEL)
        self.layer_norm3 = nn.LayerNorm(size)
        self.ffn2 = PositionwiseFeedForward(size, HIDDEN)
        self.layer_norm4 = nn.LayerNorm(size)

    def forward(self, x: Tensor, mask: Tensor, pos_emb: Tensor) -> Tensor:
        x = self.layer_norm1(x + self.self_attn(x, mask, pos_emb))
        x = self.layer_norm2(x + self.ffn1(x))
        x = self.layer_norm3(x + self.conv_module(x, mask))
        return self.layer_norm4(x + self.ffn2(x))


class SqueezeformerEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = DepthwiseConv2dSubsampling4(WIDTH, BANDS)
        self.preln = nn.LayerNorm(WIDTH)
        self.encoders = nn.ModuleList(SqueezeformerEncoderLayer(WIDTH) for _ in range(LAYERS))
        self.time_reduction_layer = TimeReductionLayer1D(WIDTH)
        self.time_recover_layer = nn.Linear(WIDTH, WIDTH)
        self.final_proj = nn.Linear(WIDTH, OUT)

    def forward(self, xs: Tensor, xs_lens: Tensor) -> Tensor:
        mask = (torch.arange(xs.size(1), device=xs.device) < xs_lens.unsqueeze(1)).unsqueeze(1)
        xs, pos_emb, mask = self.embed(xs, mask)
        xs = self.preln(xs)
        for i, layer in enumerate(self.encoders):
            if i == REDUCE:
                kept = (xs, mask, pos_emb)
                pos_emb = pos_emb[:, (xs.size(1) - 1) % 2 :: 2]
                xs, mask = self.time_reduction_layer(xs, mask)
            if i == RECOVER:
                recover_tensor, mask, pos_emb = kept
                xs = xs.unsqueeze(2).repeat(1, 1, 2, 1).flatten(1, 2)
                xs = recover_tensor + self.time_recover_layer(xs)[:, : recover_tensor.size(1)]
                xs = xs.masked_fill(~mask.transpose(1, 2), 0.0)
            xs = layer(xs, mask, pos_emb)
        return self.final_proj(xs)


class CTC(nn.Module):
    def __init__(self):
        super().__init__()
        self.ctc_lo = nn.Linear(OUT, VOCABULARY)

    def forward(self, hs: Tensor) -> Tensor:
        return F.log_softmax(self.ctc_lo(hs), dim=2)


class ASRModel(nn.Module):
    """Features [N, T, bands] and their lengths -> log-probabilities [N, t, vocabulary]."""

    def __init__(self):
        super().__init__()
        self.encoder, self.ctc = SqueezeformerEncoder(), CTC()
        for name, values in [*self.named_parameters(), *self.named_buffers()]:
            if "running_var" in name:
                nn.init.uniform_(values, 0.5, 1.5)
            elif values.is_floating_point() and (values.dim() == 1 or "ada_" in name or "pos_bias" in name):
                scale = "ada_scale" in name or (("norm" in name or "preln" in name) and "weight" in name)
                nn.init.normal_(values, float(scale), 0.2)

    def forward(self, speech: Tensor, speech_lengths: Tensor) -> Tensor:
        return self.ctc(self.encoder(speech, speech_lengths))


def utterances() -> tuple[dict[str, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Labels as bands of their own sounding one after another, and silence after the end."""
    text = torch.randint(1, VOCABULARY, (UTTERANCES, LABELS))
    lengths = torch.randint(33, 46, (UTTERANCES,))
    lengths[0] = FRAMES
    frame = torch.arange(FRAMES)
    spoken = text.gather(1, (frame * LABELS // lengths[:, None]).clamp(max=LABELS - 1))
    speech = torch.exp(-((torch.arange(BANDS) - 2.0 * spoken[..., None]) ** 2) / 4) * 2
    speech = speech + 0.3 * torch.randn_like(speech)
    speech = speech * (frame < lengths[:, None])[..., None]
    short = ((FRAMES - 1) // 2 - 1) // 2
    heard = ((lengths + 3) // 4).clamp(max=short)
    sizes = torch.randint(2, LABELS + 1, (UTTERANCES,))
    return {"speech": speech, "speech_lengths": lengths}, (text, sizes, heard)


def ctc_by_twenty(log_probs: Tensor, target: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    text, sizes, heard = target
    return F.ctc_loss(log_probs.transpose(0, 1), text, heard, sizes, reduction="sum") / len(text) / 20
