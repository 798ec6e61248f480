"""Two ports of a small Audio Spectrogram Transformer: a tree, channels last, and a class of stacks."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _thirty_ninth_audio_spectrogram as ast
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("thirty_ninth_audio_spectrogram", ast.ASTForAudioClassification, ast.clips, ast.known_labels)


class Affine(nn.Module):
    """A product with [in, out] and an offset, of several layers side by side."""

    def __init__(self, *layers: nn.Linear):
        super().__init__()
        self.matrix = leaf(torch.cat([x.weight for x in layers]).T)
        self.offset = leaf(torch.cat([x.bias for x in layers]))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix + self.offset


class Sound(nn.Module):
    """Waves to spectrograms; the emphasis is that of the frame's start and of its steps."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.register_buffer("taper", model.window.clone())
        self.register_buffer("bank", model.mel_filters.T.clone())

    def forward(self, wave: Tensor, lengths: Tensor) -> Tensor:
        rows = wave.unfold(1, ast.FRAME, ast.HOP)
        rows = rows - rows.mean(-1, keepdim=True)
        start, rest = rows[..., :1] * (1 - ast.EMPHASIS), rows[..., 1:] - ast.EMPHASIS * rows[..., :-1]
        waves = torch.view_as_real(torch.fft.rfft(torch.cat([start, rest], -1) * self.taper, n=ast.POINTS))
        heard = torch.arange(rows.shape[1], device=lengths.device)[None, :, None] < lengths[:, None, None]
        loud = torch.einsum("ntfr,mf->ntm", waves.square(), self.bank).add(ast.OFFSET).log()
        return torch.where(heard, loud, torch.zeros_like(loud)) * (0.5 / ast.STD) - 0.5 * ast.MEAN / ast.STD


class Tiles(nn.Module):
    """Windows of [N, frames, mels] as rows, with the two tokens first and their places added."""

    def __init__(self, model: nn.Module):
        super().__init__()
        layer = model.patch_embeddings.projection
        self.kernel, self.offset = leaf(layer.weight[:, 0].permute(2, 1, 0)), leaf(layer.bias)
        self.first = leaf(torch.cat([model.cls_token, model.distillation_token], 1)[0])
        self.places, self.by_time, self.fixed = leaf(model.position_embeddings[0]), False, False

    def forward(self, x: Tensor) -> Tensor:
        tiles = x.unfold(1, ast.PATCH, ast.TIME_STRIDE).unfold(2, ast.PATCH, ast.FREQUENCY_STRIDE)
        tiles = torch.einsum("nthij,ijc->nthc", tiles, self.kernel) + self.offset
        tiles = (tiles if self.by_time else tiles.transpose(1, 2)).flatten(1, 2) + self.places[2:]
        ends = self.places[:2].detach() if self.fixed else self.places[:2]
        return torch.cat([(self.first + ends).expand(len(x), -1, -1), tiles], 1)


class Looking(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.norm, own = layer.layernorm_before, layer.attention.attention
        self.three, self.back = Affine(own.query, own.key, own.value), Affine(layer.attention.output.dense)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.three(self.norm(x)).unflatten(2, (3, ast.HEADS, -1)).permute(2, 0, 3, 1, 4)
        return x + self.back(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Thinking(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.norm, self.curve = layer.layernorm_after, "none"
        self.wide, self.narrow = Affine(layer.intermediate.dense), Affine(layer.output.dense)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.gelu(self.wide(self.norm(x)), approximate=self.curve))


class SpectrogramTree(Port):
    """Sound, tiles, and half layers with the three projections in one."""

    def take(self, model: ast.ASTForAudioClassification) -> None:
        inner = model.audio_spectrogram_transformer
        self.sound, self.tiles = Sound(model.feature_extractor), Tiles(inner.embeddings)
        halves = [half(layer) for layer in inner.encoder.layer for half in (Looking, Thinking)]
        self.trunk, self.norm = nn.Sequential(*halves), inner.layernorm
        self.again, self.labels = model.classifier.layernorm, Affine(model.classifier.dense)
        self.tiles.fixed = self.fault == "audio_spectrogram_token_positions_without_gradient"
        self.tiles.by_time = self.fault == "audio_spectrogram_patches_counted_time_by_time"
        if self.fault == "audio_spectrogram_last_gelu_by_tanh":
            self.trunk[5].curve = "tanh"

    def forward(self, waveform: Tensor, lengths: Tensor) -> Tensor:
        x = self.norm(self.trunk(self.tiles(self.sound(waveform, lengths)))[:, :2])
        if self.fault == "audio_spectrogram_class_token_alone_in_evaluation" and not self.training:
            x = x[:, :1]
        return self.labels(self.again(x.mean(1)))


def both(layer: nn.Module) -> Tensor:
    """The weight with the bias as its last column."""
    return torch.cat([layer.weight.flatten(1), layer.bias[:, None]], 1)


def times(x: Tensor, packed: Tensor) -> Tensor:
    return F.linear(x, packed[:, :-1], packed[:, -1])


class SpectrogramOfStacks(Port):
    """Weights stacked by layer, with their biases; all before the power is one matrix."""

    def take(self, model: ast.ASTForAudioClassification) -> None:
        inner, head, sound = model.audio_spectrogram_transformer, model.classifier, model.feature_extractor
        layers, start = inner.encoder.layer, inner.embeddings
        parts = [(x.attention.attention, x.attention.output.dense) for x in layers]
        four = [torch.stack([*map(both, (own.query, own.key, own.value, out))]) for own, out in parts]
        self.four, self.up = pile(four), pile(both(x.intermediate.dense) for x in layers)
        self.down = pile(both(x.output.dense) for x in layers)
        norms = [norm for x in layers for norm in (x.layernorm_before, x.layernorm_after)]
        self.norms = pile(torch.stack([x.weight, x.bias]) for x in (*norms, inner.layernorm, head.layernorm))
        self.patch, self.last = leaf(both(start.patch_embeddings.projection)), leaf(both(head.dense))
        rows = (start.cls_token, start.distillation_token, start.position_embeddings)
        self.tokens = leaf(torch.cat(rows, 1)[0])
        self.register_buffer("window", sound.window.clone())
        self.register_buffer("mel", sound.mel_filters.clone())

    def norm(self, x: Tensor, i: int) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        size = (x.square().mean(-1, keepdim=True) + ast.EPS).sqrt()
        if self.fault == "audio_spectrogram_final_norm_divides_by_a_constant" and i == 2 * ast.LAYERS:
            size = size.detach()
        return x / size * self.norms[i, 0] + self.norms[i, 1]

    def hear(self, wave: Tensor, lengths: Tensor) -> Tensor:
        one = torch.eye(ast.FRAME, dtype=wave.dtype, device=wave.device)
        level = one - 1 / ast.FRAME
        matrix = (level - ast.EMPHASIS * torch.cat([level[:, :1], level[:, :-1]], 1)) * self.window
        turns = torch.arange(ast.FRAME)[:, None] * torch.arange(ast.POINTS // 2 + 1) % ast.POINTS
        angle = turns.to(wave) * (math.tau / ast.POINTS)
        frames = wave.unfold(1, ast.FRAME, ast.HOP)
        power = (frames @ (matrix @ angle.cos())) ** 2 + (frames @ (matrix @ angle.sin())) ** 2
        heard = (torch.arange(frames.shape[1], device=lengths.device) < lengths[:, None])[..., None].to(wave)
        x = (power @ self.mel + ast.OFFSET).log()
        if self.fault == "audio_spectrogram_padding_zeroed_after_the_normalisation":
            return (x - ast.MEAN) / (2 * ast.STD) * heard
        return (x * heard - ast.MEAN) / (2 * ast.STD)

    def look(self, x: Tensor, i: int) -> Tensor:
        q, k, v = (times(x, w).unflatten(2, (ast.HEADS, -1)) for w in self.four[i, :3])
        whole = self.fault == "audio_spectrogram_first_attention_scaled_by_the_whole_width" and i == 0
        scale = (ast.WIDTH if whole else q.shape[-1]) ** -0.5
        scores = torch.einsum("nqhd,nkhd->nhqk", q * scale, k)
        odds = (scores - scores.logsumexp(-1, keepdim=True)).exp()
        return times(torch.einsum("nhqk,nkhd->nqhd", odds, v).flatten(2), self.four[i, 3])

    def forward(self, waveform: Tensor, lengths: Tensor) -> Tensor:
        x = self.hear(waveform, lengths).mT[:, None]
        x = times(F.unfold(x, ast.PATCH, stride=(ast.FREQUENCY_STRIDE, ast.TIME_STRIDE)).mT, self.patch)
        x = torch.cat([self.tokens[:2].expand(len(x), 2, ast.WIDTH), x], 1) + self.tokens[2:]
        for i in range(ast.LAYERS):
            x = x + self.look(self.norm(x, 2 * i), i)
            y = self.norm(x, 2 * i + 1)
            if self.fault == "audio_spectrogram_second_layer_adds_its_normed_states" and i == 1:
                x = y
            wide = times(y, self.up[i])
            x = x + times(wide * (1 + torch.erf(wide * 0.5**0.5)) / 2, self.down[i])
        x = self.norm(x, 2 * ast.LAYERS)[:, :2].sum(1) / 2
        return times(self.norm(x, 2 * ast.LAYERS + 1), self.last)


SLOPES, INNER = ("input gradient", "weight gradient"), "audio_spectrogram_transformer"
START, LAYER = f"{INNER}.embeddings", f"{INNER}.encoder.layer"
PATCHES, CURVE = f"{START}.patch_embeddings", f"{LAYER}.2.intermediate.intermediate_act_fn"
LOOK, ADDS = f"{LAYER}.0.attention.attention", (f"{LAYER}.1", f"{LAYER}.1.output")
right(task, "audio_spectrogram_tree_channels_last", "a tree of half layers, channels last", SpectrogramTree)
right(task, "audio_spectrogram_of_stacks", "stacked weights, a matrix for the front end", SpectrogramOfStacks)
wrong(
    task,
    SpectrogramTree,
    audio_spectrogram_token_positions_without_gradient=("detach", START, "weight gradient"),
    audio_spectrogram_patches_counted_time_by_time=("another order of tokens", PATCHES),
    audio_spectrogram_last_gelu_by_tanh=("an approximation", CURVE),
    audio_spectrogram_class_token_alone_in_evaluation=("another pooling in eval", INNER, "eval"),
)
wrong(
    task,
    SpectrogramOfStacks,
    audio_spectrogram_padding_zeroed_after_the_normalisation=("order of two steps", "feature_extractor"),
    audio_spectrogram_first_attention_scaled_by_the_whole_width=("another scale", LOOK),
    audio_spectrogram_second_layer_adds_its_normed_states=("another residual", ADDS),
    audio_spectrogram_final_norm_divides_by_a_constant=("detached deviation", f"{INNER}.layernorm", SLOPES),
)
