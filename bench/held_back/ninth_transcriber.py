"""Two ports of a transcriber of speech: a tree of blocks, and stacked weights over time-major states."""

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._ninth_transcriber import HEADS, Transcriber, next_word, shift_tokens_right, speech
from bench.held_back._sixth_ports import few

task = few("ninth_transcriber", Transcriber, speech, next_word)


def waves(x: Tensor, length: int, half: int, steps: int) -> Tensor:
    """Sines, then cosines [length, 2 half], ``steps`` from the first to one 10000 times slower."""
    places, order = (torch.arange(n, dtype=x.dtype, device=x.device) for n in (length, half))
    angles = torch.outer(places, 10000 ** (-order / steps))
    return torch.hstack([angles.sin(), angles.cos()])


class Attend(nn.Module):
    """Attention of normed states [N, T, C] over themselves or a source; keys and values are one product."""

    def __init__(self, norm: nn.LayerNorm, a: nn.Module, causal: bool = False):
        super().__init__()
        self.causal, self.norm = causal, deepcopy(norm)
        self.ask, self.out = deepcopy(a.q_proj), deepcopy(a.out_proj)
        self.kv, self.shift = leaf(torch.cat([a.k_proj.weight, a.v_proj.weight]).T), leaf(a.v_proj.bias)

    def forward(self, x: Tensor, source: Tensor | None = None) -> Tensor:
        x = self.norm(x)
        k, v = ((x if source is None else source) @ self.kv).chunk(2, -1)
        q, k, v = (y.unflatten(2, (HEADS, -1)).transpose(1, 2) for y in (self.ask(x), k, v + self.shift))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A layer of the listener, or of the writer, who also attends to what was heard."""

    def __init__(self, layer: nn.Module, writes: bool, quick: bool = False):
        super().__init__()
        self.within = Attend(layer.self_attn_layer_norm, layer.self_attn, causal=writes)
        self.across = Attend(layer.encoder_attn_layer_norm, layer.encoder_attn) if writes else None
        self.norm, self.up = deepcopy(layer.final_layer_norm), deepcopy(layer.fc1)
        self.down, self.quick = deepcopy(layer.fc2), quick

    def forward(self, x: Tensor, heard: Tensor | None = None) -> Tensor:
        x = x + self.within(x)
        if self.across is not None:
            x = x + self.across(x, heard)
        inner = self.up(self.norm(x))
        inner = inner * torch.sigmoid(1.702 * inner) if self.quick else F.gelu(inner)
        return x + self.down(inner)


class Listener(Port):
    """Mel frames [N, mels, T] -> what was heard [N, T / 2, C]."""

    def take(self, model: nn.Module) -> None:
        self.near, self.halve, self.norm = (deepcopy(m) for m in (model.conv1, model.conv2, model.layer_norm))
        self.halve.padding = (0,)
        self.blocks = nn.ModuleList()
        for i, layer in enumerate(model.layers):
            quick = self.fault == "second_listener_uses_the_quick_gelu" and i == 1
            self.blocks.append(Block(layer, writes=False, quick=quick))

    def forward(self, frames: Tensor) -> Tensor:
        edges = (1, 1)
        if self.fault == "second_convolution_pads_the_end_only":
            edges = (0, 1)
        x = F.gelu(self.halve(F.pad(F.gelu(self.near(frames)), edges)).transpose(1, 2))
        half, steps = x.shape[2] // 2, x.shape[2] // 2 - 1
        if self.fault == "heard_positions_spaced_by_one_frequency_more":
            steps = half
        x = x + waves(x, x.shape[1], half, steps)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class SpeechToWords(Port):
    """A listener and a writer, whose words in are its words out."""

    def take(self, model: Transcriber) -> None:
        decoder = model.model.decoder
        self.listener, self.norm = Listener(model.model.encoder, self.fault), deepcopy(decoder.layer_norm)
        self.words, self.places = leaf(decoder.embed_tokens.weight), leaf(decoder.embed_positions.weight)
        self.blocks = nn.ModuleList(Block(layer, writes=True) for layer in decoder.layers)
        if self.fault == "first_look_at_the_speech_is_causal":
            self.blocks[0].across.causal = True
        self.words_out = self.words
        if self.fault == "words_out_no_longer_tied":
            self.words_out = leaf(self.words)

    def forward(self, input_features: Tensor, labels: Tensor) -> Tensor:
        heard = self.listener(input_features)
        x = F.embedding(shift_tokens_right(labels), self.words) + self.places[: labels.shape[1]]
        for block in self.blocks:
            x = block(x, heard)
        return F.linear(self.norm(x), self.words_out)


class StackedTranscriber(Port):
    """States [T, N, C]; layers 0 and 1 listen, 2 and 3 write; like weights of all layers are stacked."""

    def take(self, model: Transcriber) -> None:
        ear, pen = model.model.encoder, model.model.decoder
        layers, across = [*ear.layers, *pen.layers], [x.encoder_attn for x in pen.layers]
        within = [x.self_attn for x in layers]
        norms = [x.self_attn_layer_norm for x in layers] + [x.final_layer_norm for x in layers]
        norms += [x.encoder_attn_layer_norm for x in pen.layers] + [ear.layer_norm, pen.layer_norm]
        w = {"words": leaf(pen.embed_tokens.weight), "places": leaf(pen.embed_positions.weight[:, None])}
        for name, conv in ("near", ear.conv1), ("halve", ear.conv2):
            w[name], w[name + "_b"] = leaf(conv.weight.permute(2, 1, 0)), leaf(conv.bias)
        for name, products in {
            "ask": [a.q_proj for a in across],
            "out": [a.out_proj for a in within + across],
            "up": [x.fc1 for x in layers],
            "down": [x.fc2 for x in layers],
        }.items():
            w[name], w[name + "_b"] = pile(p.weight.T for p in products), pile(p.bias for p in products)
        w["norms"] = pile(torch.stack([n.weight, n.bias]) for n in norms)
        w["qkv"] = pile(torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight]).T for a in within)
        w["qv_b"] = pile(torch.stack([a.q_proj.bias, a.v_proj.bias]) for a in within)
        w["heard"] = leaf(torch.cat([p.weight for a in across for p in (a.k_proj, a.v_proj)]).T)
        w["heard_b"] = pile(a.v_proj.bias for a in across)
        self.w = nn.ParameterDict(w)

    def fold(self, name: str, x: Tensor, stride: int) -> Tensor:
        windows = F.pad(x, (0, 0, 0, 0, 1, 1)).unfold(0, 3, stride)
        return F.gelu(torch.einsum("tncj,jco->tno", windows, self.w[name]) + self.w[name + "_b"])

    def normed(self, i: int, x: Tensor) -> Tensor:
        less = 0
        if self.fault == "first_writer_norm_divides_by_one_less" and i == 6:
            less = 1
        spread, mean = torch.var_mean(x, 2, correction=less, keepdim=True)
        gain, offset = self.w["norms"][i]
        return (x - mean) * (spread + 1e-5).rsqrt() * gain + offset

    def attend(self, i: int, q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
        root = (q.shape[2] / HEADS) ** 0.5
        if self.fault == "second_writer_scales_by_the_whole_width" and i == 3:
            root = q.shape[2] ** 0.5
        q, k, v = (x.unflatten(2, (HEADS, -1)) for x in (q / root, k, v))
        scores = torch.einsum("qnhc,knhc->nhqk", q, k)
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -torch.inf)
        mixed = torch.einsum("nhqk,knhc->qnhc", scores.softmax(3), v)
        return mixed.flatten(2) @ self.w["out"][i] + self.w["out_b"][i]

    def within(self, i: int, x: Tensor) -> Tensor:
        (q, k, v), (shift_q, shift) = (self.normed(i, x) @ self.w["qkv"][i]).chunk(3, 2), self.w["qv_b"][i]
        if self.fault == "first_bias_lands_on_the_keys" and i == 0:
            return x + self.attend(i, q + shift_q, k + shift, v)
        return x + self.attend(i, q + shift_q, k, v + shift, causal=i > 1)

    def feed(self, i: int, x: Tensor) -> Tensor:
        inner = F.gelu(self.normed(4 + i, x) @ self.w["up"][i] + self.w["up_b"][i])
        return x + inner @ self.w["down"][i] + self.w["down_b"][i]

    def forward(self, input_features: Tensor, labels: Tensor) -> Tensor:
        w, x = self.w, self.fold("halve", self.fold("near", input_features.permute(2, 0, 1), 1), 2)
        x = x + waves(x, len(x), x.shape[2] // 2, x.shape[2] // 2 - 1)[:, None]
        x = self.feed(1, self.within(1, self.feed(0, self.within(0, x))))
        heard = (self.normed(10, x) @ w["heard"]).chunk(4, 2)
        x = w["words"][shift_tokens_right(labels).T] + w["places"][: labels.shape[1]]
        for i in 0, 1:
            x = self.within(2 + i, x)
            q = self.normed(8 + i, x) @ w["ask"][i] + w["ask_b"][i]
            x = x + self.attend(4 + i, q, heard[2 * i], heard[2 * i + 1] + w["heard_b"][i])
            x = self.feed(2 + i, x)
        return torch.einsum("tnc,wc->ntw", self.normed(11, x), w["words"])


EAR, PEN = "model.encoder.", "model.decoder."
FIRST, LATER = EAR + "layers.0.self_attn", ("weight gradient", "update")
right(task, "speech_to_words_as_a_tree", "one kind of block, keys and values in one product", SpeechToWords)
right(task, "speech_to_words_stacked", "stacked weights, time first", StackedTranscriber)
wrong(
    task,
    SpeechToWords,
    second_convolution_pads_the_end_only=("padding on one side", EAR + "conv2"),
    heard_positions_spaced_by_one_frequency_more=("wrong frequencies", EAR + "embed_positions"),
    second_listener_uses_the_quick_gelu=("quick GELU", (EAR + "layers.1.activation_fn", EAR + "layers.1")),
    first_look_at_the_speech_is_causal=("a mask too many", PEN + "layers.0.encoder_attn"),
    words_out_no_longer_tied=("a tie lost", ("proj_out", PEN + "embed_tokens"), LATER),
)
wrong(
    task,
    StackedTranscriber,
    first_bias_lands_on_the_keys=("a bias at the wrong place", (FIRST + ".v_proj", FIRST)),
    first_writer_norm_divides_by_one_less=("variance by another count", PEN + "layers.0.final_layer_norm"),
    second_writer_scales_by_the_whole_width=("wrong scale", PEN + "layers.1.self_attn"),
)
