"""A small Emformer encoder: stacked frames in segments with hard copied right context and memories."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEATURES, REDUCED, STRIDE, CLASSES, UTTERANCES, FRAMES = 10, 6, 4, 9, 5, 65
WIDTH, HEADS, HIDDEN, LAYERS, SEGMENT, LEFT, RIGHT, MEMORIES = 24, 3, 40, 3, 4, 3, 2, 2
SIZES = HEADS, STRIDE, SEGMENT, LEFT, RIGHT, MEMORIES


class TimeReduction(nn.Module):
    """Stacks ``stride`` frames in one and leaves out what remains."""

    def __init__(self, stride: int):
        super().__init__()
        self.stride = stride

    def forward(self, input: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        b, t, d = input.shape
        input = input[:, : t - t % self.stride]
        return input.reshape(b, t // self.stride, d * self.stride), lengths // self.stride


class EmformerAttention(nn.Module):
    """Time first: right context, utterance, summary ask; memory, right context, utterance answer."""

    def __init__(self):
        super().__init__()
        self.scaling = (WIDTH // HEADS) ** -0.5
        self.emb_to_key_value = nn.Linear(WIDTH, 2 * WIDTH)
        self.emb_to_query = nn.Linear(WIDTH, WIDTH)
        self.out_proj = nn.Linear(WIDTH, WIDTH)

    def by_head(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), -1, WIDTH // HEADS).transpose(0, 1)

    def gen_padding_mask(self, utterance: Tensor, lengths: Tensor, before: int) -> Tensor:
        places = torch.arange(before + len(utterance), device=lengths.device)
        return places >= (lengths + before)[:, None]

    def forward(
        self,
        utterance: Tensor,
        lengths: Tensor,
        right_context: Tensor,
        summary: Tensor,
        mems: Tensor,
        attention_mask: Tensor,
    ) -> tuple[Tensor, Tensor]:
        query = self.emb_to_query(torch.cat([right_context, utterance, summary]))
        key, value = self.emb_to_key_value(torch.cat([mems, right_context, utterance])).chunk(2, dim=2)
        q, k, v = self.by_head(query), self.by_head(key), self.by_head(value)
        weights = torch.bmm(q * self.scaling, k.transpose(1, 2))
        padding = self.gen_padding_mask(utterance, lengths, len(mems) + len(right_context))
        mask = attention_mask[None] | padding.repeat_interleave(HEADS, 0)[:, None]
        probs = weights.masked_fill(mask, -1e8).softmax(dim=-1)
        attention = torch.bmm(probs, v).transpose(0, 1).reshape(query.shape)
        output = self.out_proj(attention)
        cut = len(query) - len(summary)
        return output[:cut], torch.tanh(output[cut:])[:-1]


class EmformerLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = EmformerAttention()
        self.dropout = nn.Dropout(0.0)
        self.memory_op = nn.AvgPool1d(SEGMENT, SEGMENT, ceil_mode=True)
        up, down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.pos_ff = nn.Sequential(
            nn.LayerNorm(WIDTH), up, nn.ReLU(), nn.Dropout(0.0), down, nn.Dropout(0.0)
        )
        self.layer_norm_input, self.layer_norm_output = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(
        self, utterance: Tensor, lengths: Tensor, right_context: Tensor, mems: Tensor, attention_mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        both, copies = torch.cat([right_context, utterance]), len(right_context)
        normed = self.layer_norm_input(both)
        summary = self.memory_op(normed[copies:].permute(1, 2, 0)).permute(2, 0, 1)
        rc_output, next_m = self.attention(
            normed[copies:], lengths, normed[:copies], summary, mems, attention_mask
        )
        result = self.dropout(rc_output) + both
        result = self.layer_norm_output(self.pos_ff(result) + result)
        return result[copies:], result[:copies], next_m


class Emformer(nn.Module):
    """[B, U + R, D] -> [B, U, D]; the last R frames are right context only."""

    def __init__(self):
        super().__init__()
        self.emformer_layers = nn.ModuleList(EmformerLayer() for _ in range(LAYERS))
        self.memory_op = nn.AvgPool1d(SEGMENT, SEGMENT, ceil_mode=True)

    def gen_right_context(self, input: Tensor) -> Tensor:
        segments = math.ceil((len(input) - RIGHT) / SEGMENT)
        starts = [(i + 1) * SEGMENT for i in range(segments - 1)] + [len(input) - RIGHT]
        return torch.cat([input[start : start + RIGHT] for start in starts])

    def gen_attention_mask(self, utterance: Tensor) -> Tensor:
        size = len(utterance)
        count = math.ceil(size / SEGMENT)
        copies, frames, summaries = [], [], []
        for i in range(count):
            start, end = max(i * SEGMENT - LEFT, 0), min((i + 1) * SEGMENT, size)
            row = torch.zeros(count - 1 + count * RIGHT + size, dtype=torch.bool, device=utterance.device)
            row[count - 1 + i * RIGHT : count - 1 + (i + 1) * RIGHT] = True
            row[count - 1 + count * RIGHT + start : count - 1 + count * RIGHT + end] = True
            summaries.append(row.clone()[None])
            row[max(i - MEMORIES, 0) : i] = True
            copies.append(row.expand(RIGHT, -1))
            frames.append(row.expand(end - i * SEGMENT, -1))
        return ~torch.cat(copies + frames + summaries)

    def forward(self, input: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        input = input.permute(1, 0, 2)
        right_context, output = self.gen_right_context(input), input[: len(input) - RIGHT]
        attention_mask = self.gen_attention_mask(output)
        mems = self.memory_op(output.permute(1, 2, 0)).permute(2, 0, 1)[:-1]
        for layer in self.emformer_layers:
            output, right_context, mems = layer(output, lengths, right_context, mems, attention_mask)
        return output.permute(1, 0, 2), lengths


class EmformerEncoder(nn.Module):
    """Frames [B, T, F] and their lengths -> classes of the stacked frames, normed, and new lengths."""

    def __init__(self):
        super().__init__()
        self.input_linear = nn.Linear(FEATURES, REDUCED, bias=False)
        self.time_reduction = TimeReduction(STRIDE)
        self.transformer = Emformer()
        self.output_linear = nn.Linear(WIDTH, CLASSES)
        self.layer_norm = nn.LayerNorm(CLASSES)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                nn.init.normal_(module.weight, 1.0, 0.2), nn.init.normal_(module.bias, 0.0, 0.1)

    def forward(self, input: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        reduced, lengths = self.time_reduction(self.input_linear(input), lengths)
        encoded, lengths = self.transformer(reduced, lengths)
        return self.layer_norm(self.output_linear(encoded)), lengths


def speech() -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Sounds that last for some frames, each with its spectrum; silence and no targets after the end."""
    size = FRAMES // STRIDE - RIGHT
    sounds = torch.randint(CLASSES, (UTTERANCES, FRAMES // 6 + 1)).repeat_interleave(6, 1)[:, :FRAMES]
    tone = torch.sin((sounds[..., None] + 1) * torch.arange(1, FEATURES + 1) / 3)
    loud = 1 + 0.3 * torch.sin(torch.arange(FRAMES) / 2 + 6 * torch.rand(UTTERANCES, 1))
    lengths = torch.randint(size * STRIDE // 2, size * STRIDE + 1, (UTTERANCES,))
    lengths[0] = size * STRIDE
    heard = (torch.arange(FRAMES) < (lengths + RIGHT * STRIDE)[:, None])[..., None]
    x = (tone * loud[..., None] + 0.3 * torch.randn_like(tone)) * heard
    target = sounds[:, STRIDE // 2 :: STRIDE][:, :size]
    return (x, lengths), target.masked_fill(torch.arange(size) >= (lengths // STRIDE)[:, None], -100)


def sound_loss(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """A third of the cross entropy of the frames that are not padding."""
    return F.cross_entropy(outputs[0].flatten(0, 1), target.flatten(), ignore_index=-100) / 3
