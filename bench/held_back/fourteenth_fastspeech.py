"""Two ports of FastSpeech 2: a row of blocks with channels first, and stacked layers with channels last."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourteenth_fastspeech import BINS, HEADS, WIDTH, FastSpeech2, spoken, utterances
from bench.held_back._fourth_ports import Port, Rows, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("fourteenth_fastspeech", FastSpeech2, utterances, spoken)


class Norm(nn.Module):
    def __init__(self, norm: nn.LayerNorm):
        super().__init__()
        self.gain, self.shift, self.eps, self.grouped = leaf(norm.weight), leaf(norm.bias), norm.eps, False

    def forward(self, x: Tensor) -> Tensor:
        if self.grouped:
            return F.group_norm(x, 1, self.gain, self.shift, self.eps)
        return F.layer_norm(x.mT, self.gain.shape, self.gain, self.shift, self.eps).mT


class Slide(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.taps, self.bias = leaf(layer.weight.reshape(*layer.weight.shape[:2], -1)), leaf(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv1d(x, self.taps, self.bias, padding="same")


class Block(nn.Module):
    """Attention, whose queries, keys and values come from one product, and convolutions."""

    def __init__(self, block: nn.Module):
        super().__init__()
        own, feed, self.crossed = block.slf_attn, block.pos_ffn, False
        three, self.outer = (own.w_qs, own.w_ks, own.w_vs), Slide(own.fc)
        self.inner, self.bias = (leaf(torch.cat([getattr(w, n) for w in three])) for n in ("weight", "bias"))
        self.bend = nn.Sequential(Slide(feed.w_1), nn.ReLU(), Slide(feed.w_2))
        self.norms = nn.ModuleList([Norm(own.layer_norm), Norm(feed.layer_norm)])

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        made = (self.inner @ x + self.bias[:, None]).unflatten(1, (3, HEADS, -1))
        q, k, v = (made[:, i].flatten(0, 1) for i in range(3))
        seen = keep.repeat(HEADS, 1, 1) if self.crossed else keep.repeat_interleave(HEADS, 0)
        shares = (q.mT @ k * q.shape[1] ** -0.5).masked_fill(seen == 0, -torch.inf).softmax(2)
        x = self.norms[0](x + self.outer((v @ shares.mT).unflatten(0, (-1, HEADS)).flatten(1, 2))) * keep
        return self.norms[1](x + self.bend(x)) * keep


class SpeechInOneRow(Port):
    """Sequences [N, C, T] and masks [N, 1, T] of what to keep; each frame looks its phoneme up."""

    def take(self, model: FastSpeech2) -> None:
        adaptor, post = model.variance_adaptor, model.postnet.convolutions
        self.words, self.mel = leaf(model.encoder.src_word_emb.weight), Slide(model.mel_linear)
        self.register_buffer("places", model.encoder.position_enc[0].T.clone())
        self.row = nn.ModuleList(map(Block, (*model.encoder.layer_stack, *model.decoder.layer_stack)))
        self.guesses = nn.ModuleList()
        for maker in (adaptor.pitch_predictor, adaptor.energy_predictor, adaptor.duration_predictor):
            a, _, b, c, _, d = maker.conv_layer
            layers = (Slide(a.conv), nn.ReLU(), Norm(b), Slide(c.conv), nn.ReLU(), Norm(d))
            self.guesses.append(nn.Sequential(*layers, Slide(maker.linear_layer)))
        self.high, self.loud = leaf(adaptor.pitch_embedding.weight), leaf(adaptor.energy_embedding.weight)
        self.register_buffer("edges", pile((adaptor.pitch_bins, adaptor.energy_bins)).data)
        self.slides = nn.ModuleList(Slide(layer[0].conv) for layer in post)
        self.rows = nn.ModuleList(Rows(layer[1]) for layer in post)
        self.row[0].crossed = self.fault == "fastspeech_heads_masked_by_the_lengths_of_other_texts"
        self.row[1].norms[1].grouped = self.fault == "fastspeech_text_norm_in_one_group_over_all_phonemes"

    def adapted(self, x: Tensor, keep: Tensor, pitch: Tensor, energy: Tensor) -> tuple[Tensor, ...]:
        plain = x.detach() if self.fault == "fastspeech_pitch_predictor_reads_a_detached_text" else x
        high = F.embedding(torch.searchsorted(self.edges[0], pitch), self.high).mT
        loud = F.embedding(torch.searchsorted(self.edges[1], energy), self.loud).mT
        pitched = x if self.fault == "fastspeech_energy_predicted_before_the_pitch_is_added" else x + high
        made = [(guess(y) * keep)[:, 0] for guess, y in zip(self.guesses, (plain, pitched, x), strict=True)]
        return x + high + loud, *made

    def forward(self, texts: Tensor, src_lens: Tensor, mel_lens: Tensor, *targets: Tensor) -> tuple:
        count, frames = texts.shape[1], torch.arange(int(mel_lens.max())).expand(len(texts), -1).contiguous()
        read = (torch.arange(count) < src_lens[:, None])[:, None].to(self.words)
        said = (frames < mel_lens[:, None])[:, None].to(self.words)
        x = F.embedding(texts, self.words).mT + self.places[:, :count]
        x, *guesses = self.adapted(self.row[1](self.row[0](x, read), read), read, *targets[:2])
        owner = torch.searchsorted(targets[2].cumsum(1), frames, right=True).clamp(max=count - 1)
        x = x.gather(2, owner[:, None].expand(-1, WIDTH, -1)) * said + self.places[:, : frames.shape[1]]
        y = mel = self.mel(self.row[3](self.row[2](x, said), said))
        for i, (slide, rows) in enumerate(zip(self.slides, self.rows, strict=True)):
            y = rows(slide(y if i == 0 else y.tanh()).mT).mT
        return mel.mT, (mel + y).mT, *guesses


def slid(x: Tensor, taps: Tensor, bias: Tensor) -> Tensor:
    size = taps.shape[2]
    windows = F.pad(x, (0, 0, size // 2, size // 2)).unfold(1, size, 1)
    return torch.einsum("ntck,ock->nto", windows, taps) + bias


class StackedSpeech(Port):
    """Sequences [N, T, C]; all layers of a kind are one stack, and the regulator is a product."""

    def take(self, model: FastSpeech2) -> None:
        adaptor, blocks = model.variance_adaptor, [*model.encoder.layer_stack, *model.decoder.layer_stack]
        own, feed = [x.slf_attn for x in blocks], [x.pos_ffn for x in blocks]
        makers = (adaptor.duration_predictor, adaptor.pitch_predictor, adaptor.energy_predictor)
        kinds = {"three": [w for x in own for w in (x.w_qs, x.w_ks, x.w_vs)], "out": [x.fc for x in own]}
        kinds |= {"up": [x.w_1 for x in feed], "down": [x.w_2 for x in feed]}
        kinds |= {"mixed": [x.layer_norm for x in own], "bent": [x.layer_norm for x in feed]}
        kinds |= {f"conv{i}": [x.conv_layer[3 * i].conv for x in makers] for i in range(2)}
        kinds |= {f"norm{i}": [x.conv_layer[3 * i + 2] for x in makers] for i in range(2)}
        kinds["head"], kinds["mel"] = [x.linear_layer for x in makers], [model.mel_linear]
        for i, (conv, norm) in enumerate(model.postnet.convolutions):
            kinds[f"post{i}"], kinds[f"tune{i}"] = [conv.conv], [norm]
            self.register_buffer(f"kept{i}", torch.stack([norm.running_mean, norm.running_var]))
        self.w = nn.ParameterDict({name: pile(x.weight for x in layers) for name, layers in kinds.items()})
        self.b = nn.ParameterDict({name: pile(x.bias for x in layers) for name, layers in kinds.items()})
        self.words = leaf(model.encoder.src_word_emb.weight)
        self.tables = pile((adaptor.pitch_embedding.weight, adaptor.energy_embedding.weight))
        self.register_buffer("places", model.decoder.position_enc[0].clone())
        self.register_buffer("edges", pile((adaptor.pitch_bins, adaptor.energy_bins)).data)

    def product(self, name: str, i: int, x: Tensor) -> Tensor:
        return x @ self.w[name][i].T + self.b[name][i]

    def normed(self, name: str, i: int, x: Tensor) -> Tensor:
        spread, center = torch.var_mean(x, -1, correction=0, keepdim=True)
        factor = self.w[name][i] * (spread + 1e-5).rsqrt()
        return torch.addcmul(self.b[name][i] - center * factor, x, factor)

    def block(self, i: int, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = (self.product("three", 3 * i + j, x).unflatten(2, (HEADS, -1)) for j in range(3))
        scores = torch.einsum("nthd,nshd->nhts", q, k) / q.shape[3] ** 0.5 + keep.log().mT[:, None]
        y = torch.einsum("nhts,nshd->nthd", scores.softmax(3), v).flatten(2)
        x = self.normed("mixed", i, x + self.product("out", i, y))
        if i != 3 or self.fault != "fastspeech_frames_past_the_end_reach_the_last_convolutions":
            x = x * keep
        y = slid(x, self.w["up"][i], self.b["up"][i]).relu()
        return self.normed("bent", i, x + slid(y, self.w["down"][i], self.b["down"][i])) * keep

    def guess(self, i: int, x: Tensor, keep: Tensor) -> Tensor:
        for j in range(2):
            x = self.normed(f"norm{j}", i, slid(x, self.w[f"conv{j}"][i], self.b[f"conv{j}"][i]).relu())
        return (self.product("head", i, x) * keep)[..., 0]

    def coded(self, i: int, values: Tensor) -> Tensor:
        over = torch.ge if i == 0 and self.fault == "fastspeech_pitch_on_an_edge_one_bin_up" else torch.gt
        return F.one_hot(over(values[..., None], self.edges[i]).sum(2), BINS).to(self.tables) @ self.tables[i]

    def tuned(self, i: int, x: Tensor) -> Tensor:
        taps, bias, gain, shift = (y[f"{name}{i}"][0] for name in ("post", "tune") for y in (self.w, self.b))
        kept = self.get_buffer(f"kept{i}")
        if self.training:
            x = slid(x, taps, bias)
            spread, center = torch.var_mean(x, (0, 1), correction=0)
            kept.lerp_(torch.stack([center, x.var((0, 1))]).detach(), 0.1)
            return (x - center) * (spread + 1e-5).rsqrt() * gain + shift
        factor = gain * (kept[1] + 1e-5).rsqrt()
        offset = (bias - kept[0]) * factor + shift
        if i == 1 and self.fault == "fastspeech_postnet_folded_with_the_bias_unscaled":
            offset = bias - kept[0] * factor + shift
        return slid(x, taps * factor[:, None, None], offset)

    def forward(self, texts: Tensor, src_lens: Tensor, mel_lens: Tensor, *targets: Tensor) -> tuple:
        pitch, energy, durations = targets
        count, ends, frames = texts.shape[1], durations.cumsum(1)[:, None], torch.arange(int(mel_lens.max()))
        read = (torch.arange(count) < src_lens[:, None])[..., None].to(self.words)
        said = (frames < mel_lens[:, None])[..., None].to(self.words)
        x = self.block(1, self.block(0, self.words[texts] + self.places[:count], read), read)
        pitched = x + self.coded(0, pitch)
        guesses = (self.guess(1, x, read), self.guess(2, pitched, read), self.guess(0, x, read))
        owned = (frames[:, None] < ends) & (frames[:, None] >= ends - durations[:, None])
        first = int(self.fault == "fastspeech_frame_positions_counted_from_one")
        x = owned.to(x) @ (pitched + self.coded(1, energy)) + self.places[first : first + len(frames)]
        y = mel = self.product("mel", 0, self.block(3, self.block(2, x, said), said))
        for i in range(3):
            y = self.tuned(i, y if i == 0 else y.tanh())
        return mel, mel + y, *guesses


right(task, "fastspeech_in_one_row_of_blocks", "channels first, fused products", SpeechInOneRow)
right(task, "fastspeech_of_stacked_layers", "flat, channels last, products of windows", StackedSpeech)
MASKED = ("encoder.layer_stack.0.slf_attn.attention", "encoder.layer_stack.0.slf_attn")
NORM, ADAPTOR, FOLD = "encoder.layer_stack.1.pos_ffn.layer_norm", "variance_adaptor", "postnet.convolutions.1"
PITCH, CODE = f"{ADAPTOR}.pitch_predictor", f"{ADAPTOR}.pitch_embedding"
BACK = ("input gradient", "weight gradient")
wrong(
    task,
    SpeechInOneRow,
    fastspeech_heads_masked_by_the_lengths_of_other_texts=("masks of others", MASKED),
    fastspeech_text_norm_in_one_group_over_all_phonemes=("statistics over time too", NORM),
    fastspeech_pitch_predictor_reads_a_detached_text=("a detached branch", (PITCH, ADAPTOR), BACK),
    fastspeech_energy_predicted_before_the_pitch_is_added=("a branch taken too early", ADAPTOR),
)
wrong(
    task,
    StackedSpeech,
    fastspeech_frames_past_the_end_reach_the_last_convolutions=("a mask missing", "decoder.layer_stack.1"),
    fastspeech_pitch_on_an_edge_one_bin_up=("the other side of an edge", (ADAPTOR, CODE)),
    fastspeech_frame_positions_counted_from_one=("positions off by one", "decoder"),
    fastspeech_postnet_folded_with_the_bias_unscaled=("norm folded wrongly", (FOLD, f"{FOLD}.1"), "eval"),
)
