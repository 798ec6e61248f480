"""A port of a small SpeechT5: sheets of weights, piled by layer."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _twenty_eighth_speech_t_five as old
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back.twenty_eighth_speech_t_five import task


def sheet(layer: nn.Linear) -> Tensor:
    """A weight with its bias as the last column."""
    return torch.cat([layer.weight, layer.bias[:, None]], 1)


def pair(layer: nn.Module) -> Tensor:
    return torch.stack([layer.weight, layer.bias])


def sheets(mix: nn.Module) -> Tensor:
    return torch.stack([sheet(x) for x in (mix.q_proj, mix.k_proj, mix.v_proj, mix.out_proj)])


def by(x: Tensor, rows: Tensor) -> Tensor:
    return x @ rows[:, :-1].T + rows[:, -1]


class PackedSpeech(Port):
    """Sheets of weights and biases, piled by layer; convolutions tap by tap."""

    def take(self, model: old.SpeechT5ForTextToSpeech) -> None:
        text, speech = model.speecht5["encoder"], model.speecht5["decoder"]
        inner, front, post = text.wrapped_encoder, speech.prenet, model.speech_decoder_postnet
        sides = inner.layers, speech.wrapped_decoder.layers
        self.letters, self.near = leaf(text.prenet[0].weight), leaf(inner.embed_positions.pe_k.weight)
        self.alphas = pile([text.prenet[1].alpha, front.encode_positions.alpha])
        self.register_buffer("waves", text.prenet[1].pe[0].clone())
        self.open = leaf(pair(inner.layer_norm))
        mixes = [x.attention for x in sides[0]], [y for x in sides[1] for y in (x.self_attn, x.encoder_attn)]
        self.mixes = nn.ParameterList(pile(map(sheets, each)) for each in mixes)
        self.norms = nn.ParameterList(
            pile(pair(y) for x in side for y in x.children() if isinstance(y, nn.LayerNorm)) for side in sides
        )
        self.up, self.down = (
            nn.ParameterList(pile(sheet(x.feed_forward[i]) for x in side) for side in sides) for i in (0, 2)
        )
        lines = *front.layers, front.final_layer, front.speaker_embeds_layer, post.feat_out, post.prob_out
        self.lines = nn.ParameterList(leaf(sheet(x)) for x in lines)
        self.taps = nn.ParameterList(leaf(x.conv.weight.permute(2, 1, 0)) for x in post.layers)
        self.scales = nn.ParameterList(leaf(pair(x.batch_norm)) for x in post.layers)
        for i, x in enumerate(post.layers):
            self.register_buffer(f"middle_{i}", x.batch_norm.running_mean.clone())
            self.register_buffer(f"spread_{i}", x.batch_norm.running_var.clone())

    def mix(
        self, rows: Tensor, heads: int, x: Tensor, memory: Tensor, seen: Tensor, near: Tensor | None = None
    ):
        q, k, v = (
            by(y, w).unflatten(2, (heads, -1)) for y, w in zip((x, memory, memory), rows, strict=False)
        )
        scores = q.transpose(1, 2) @ k.permute(0, 2, 3, 1)
        if near is not None:
            step = torch.arange(x.shape[1], device=x.device)
            index = (step[:, None] - step).clamp(-old.DISTANCE, old.DISTANCE - 1) + old.DISTANCE
            scores = scores + (q.transpose(1, 2) @ near.T).gather(3, index.expand_as(scores))
        scores = torch.where(seen, scores * q.shape[-1] ** -0.5, -1e30)
        return by((scores.softmax(3) @ v.transpose(1, 2)).transpose(1, 2).flatten(2), rows[3])

    def even(self, x: Tensor, rows: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], *rows)

    def think(self, side: int, i: int, x: Tensor) -> Tensor:
        y = by(F.gelu(by(x, self.up[side][i])), self.down[side][i])
        return self.even(x + y, self.norms[side][(2 + side) * i + 1 + side])

    def settle(self, i: int, x: Tensor) -> Tensor:
        kept = self.get_buffer(f"middle_{i}"), self.get_buffer(f"spread_{i}")
        spread, middle = torch.var_mean(x, (0, 1), correction=0)
        if self.training:
            count, rate = x[..., 0].numel(), 0.1
            if self.fault == "speech_t_five_first_batch_norm_keeps_a_tenth_of_the_old" and i == 0:
                rate = 0.9
            with torch.no_grad():
                kept[0].lerp_(middle, rate), kept[1].lerp_(spread * count / (count - 1), rate)
        else:
            middle, spread = kept
        return (x - middle) / (spread + 1e-5).sqrt() * self.scales[i][0] + self.scales[i][1]

    def forward(self, input_ids, attention_mask, labels, decoder_attention_mask, speaker_embeddings):
        x, seen = self.letters[input_ids], attention_mask[:, None, None].bool()
        x = self.even(x + self.alphas[0] * self.waves[: x.shape[1]], self.open)
        for i, rows in enumerate(self.mixes[0]):
            x = self.even(x + self.mix(rows, old.ENCODER_HEADS, x, x, seen, self.near), self.norms[0][2 * i])
            x = self.think(0, i, x)
        first = self.fault == "speech_t_five_shift_takes_the_first_frame_of_each_step"
        y = F.pad(labels[:, 0 if first else 1 : -2 : 2], (0, 0, 1, 0))
        y = by(by(by(y, self.lines[0]).relu(), self.lines[1]).relu(), self.lines[2])
        fixed = self.fault == "speech_t_five_decoder_position_scale_is_no_weight"
        alpha = self.alphas[1].detach() if fixed else self.alphas[1]
        y, who = y + alpha * self.waves[: y.shape[1]], F.normalize(speaker_embeddings, dim=1)[:, None]
        wide = y.shape[2]
        y = (y @ self.lines[3][:, :wide].T + by(who, self.lines[3][:, wide:])).relu()
        own = torch.ones(y.shape[1], y.shape[1], device=y.device).tril().bool()
        own = own & decoder_attention_mask[:, None, None, 1::2].bool()
        for i in range(len(self.up[1])):
            y = self.even(
                y + self.mix(self.mixes[1][2 * i], old.DECODER_HEADS, y, y, own), self.norms[1][3 * i]
            )
            if self.fault == "speech_t_five_second_cross_attention_hears_the_padding" and i == 1:
                seen = torch.ones_like(seen)
            heard = self.mix(self.mixes[1][2 * i + 1], old.DECODER_HEADS, y, x, seen)
            y = self.think(1, i, self.even(y + heard, self.norms[1][3 * i + 1]))
        before = z = by(y, self.lines[4]).unflatten(2, (2, old.MELS)).flatten(1, 2)
        for i, taps in enumerate(self.taps):
            long, edge = z.shape[1], len(taps) // 2
            z = F.pad(z, (0, 0, edge, edge))
            z = self.settle(i, sum(z[:, j : j + long] @ tap for j, tap in enumerate(taps)))
            z = z.tanh() if i < 2 else z
        return before, before + z, by(y, self.lines[5]).flatten(1)


DECODER, POSTNET = "speecht5.decoder", "speech_decoder_postnet.layers"
CROSS, SCALE = f"{DECODER}.wrapped_decoder.layers.1.encoder_attn", f"{DECODER}.prenet.encode_positions"
right(task, "speech_t_five_packed_sheets", "packed stacks, split products, taps", PackedSpeech)
wrong(
    task,
    PackedSpeech,
    speech_t_five_shift_takes_the_first_frame_of_each_step=("an index off by one", ""),
    speech_t_five_decoder_position_scale_is_no_weight=("detach", SCALE, "weight gradient"),
    speech_t_five_second_cross_attention_hears_the_padding=("a mask left out", CROSS),
    speech_t_five_first_batch_norm_keeps_a_tenth_of_the_old=("a rate", f"{POSTNET}.0.batch_norm", "buffer"),
)
