"""Two ports of Whisper: halves of layers with their sums inside, and stacks of all weights by einsum."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixteenth_whisper import END, START, Whisper, speech, words_loss
from bench.held_back._sixth_ports import few

task = few("sixteenth_whisper", Whisper, speech, words_loss)


class Attend(nn.Module):
    """Norm, attention and sum; queries, keys and values have one weight, its bias leaves out the keys."""

    def __init__(self, norm: nn.LayerNorm, attention: nn.Module):
        super().__init__()
        q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
        self.ln, self.n_head = pile([norm.weight, norm.bias]), attention.num_heads
        self.qkv, self.bias = leaf(torch.cat([q.weight, k.weight, v.weight])), pile([q.bias, v.bias])
        self.out = nn.ParameterList([leaf(attention.out_proj.weight.T), leaf(attention.out_proj.bias)])
        self.slots, self.recorded = (0, 2), False

    def forward(self, x: Tensor, sound: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        y, width = F.layer_norm(x, x.shape[-1:], *self.ln), x.shape[-1]
        bias = x.new_zeros(3, width).index_copy(0, torch.tensor(self.slots, device=x.device), self.bias)
        q = F.linear(y, self.qkv[:width], bias[0])
        kv = F.linear(y if sound is None else sound, self.qkv[width:], bias[1:].flatten())
        q, k, v = (z.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for z in (q, *kv.chunk(2, -1)))
        qk = q @ k.mT * q.shape[-1] ** -0.5
        qk = qk if mask is None else qk.masked_fill(mask, -torch.inf)
        qk = qk.detach() if self.recorded else qk
        return x + ((qk.softmax(-1) @ v).transpose(1, 2).flatten(2) @ self.out[0] + self.out[1])


class Feed(nn.Module):
    """Norm, two products and sum."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.ln = pile([layer.final_layer_norm.weight, layer.final_layer_norm.bias])
        self.up, self.down = leaf(layer.fc1.weight.T), leaf(layer.fc2.weight.T)
        self.up_b, self.down_b = leaf(layer.fc1.bias), leaf(layer.fc2.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(x, x.shape[-1:], *self.ln)
        return x + (F.gelu(y @ self.up + self.up_b) @ self.down + self.down_b)


class AudioTower(nn.Module):
    """From features to normed sounds."""

    def __init__(self, encoder: nn.Module):
        super().__init__()
        convs = encoder.conv1, encoder.conv2
        self.kernels = nn.ParameterList(leaf(conv.weight.transpose(1, 2)) for conv in convs)
        self.shifts = pile(conv.bias for conv in convs)
        self.register_buffer("waves", encoder.embed_positions.weight.detach().clone())
        self.blocks = nn.Sequential()
        for layer in encoder.layers:
            self.blocks.extend([Attend(layer.self_attn_layer_norm, layer.self_attn), Feed(layer)])
        self.ln = pile([encoder.layer_norm.weight, encoder.layer_norm.bias])

    def forward(self, x: Tensor) -> Tensor:
        for kernel, shift, stride in zip(self.kernels, self.shifts, (1, 2), strict=True):
            x = F.gelu(F.conv1d(F.pad(x, (1, 1)), kernel.transpose(1, 2), shift, stride))
        return F.layer_norm(self.blocks(x.mT + self.waves), self.ln.shape[1:], *self.ln)


class TextTower(nn.Module):
    """From ids and sounds to logits; one table of words at both ends."""

    def __init__(self, decoder: nn.Module):
        super().__init__()
        self.words, self.places = leaf(decoder.embed_tokens.weight), leaf(decoder.embed_positions.weight)
        self.own = nn.ModuleList(Attend(x.self_attn_layer_norm, x.self_attn) for x in decoder.layers)
        self.cross = nn.ModuleList(Attend(x.encoder_attn_layer_norm, x.encoder_attn) for x in decoder.layers)
        self.feed = nn.ModuleList(Feed(layer) for layer in decoder.layers)
        self.ln = pile([decoder.layer_norm.weight, decoder.layer_norm.bias])

    def forward(self, ids: Tensor, sound: Tensor) -> Tensor:
        x = F.embedding(ids, self.words, END) + self.places[self.offset :][: ids.shape[1]]
        future = ids.new_ones(2 * ids.shape[1:]).triu(1) > 0
        mask = future if self.training or self.always_causal else None
        for own, cross, feed in zip(self.own, self.cross, self.feed, strict=True):
            x = feed(cross(own(x, mask=mask), sound))
        return F.layer_norm(x, x.shape[-1:], *self.ln) @ self.words.T


class TwoTowers(Port):
    """An audio tower and a text tower of half layers."""

    def take(self, model: Whisper) -> None:
        self.audio, self.text = AudioTower(model.model.encoder), TextTower(model.model.decoder)
        if self.fault == "whisper_first_sound_value_bias_added_to_the_keys":
            self.audio.blocks[0].slots = (0, 1)
        self.text.offset = 2 if self.fault == "whisper_word_positions_start_two_rows_late" else 0
        self.text.cross[-1].recorded = self.fault == "whisper_last_cross_scores_recorded_without_gradient"
        self.text.always_causal = self.fault != "whisper_words_see_the_future_in_evaluation"

    def forward(self, input_features: Tensor, labels: Tensor) -> Tensor:
        ids = F.pad(labels[:, :-1], (1, 0), value=START)
        return self.text(torch.where(ids < 0, END, ids), self.audio(input_features))


class StackedWhisper(Port):
    """Attentions, norms and products of both halves in stacks; all sounds' keys and values at once."""

    def take(self, model: Whisper) -> None:
        encoder, decoder = model.model.encoder, model.model.decoder
        layers, self.depth = [*encoder.layers, *decoder.layers], len(encoder.layers)
        ends = encoder.layer_norm, decoder.layer_norm
        self.linear = 1 if self.fault == "whisper_strided_convolution_without_gelu" else None
        self.taps = nn.ParameterList(leaf(c.weight.permute(2, 1, 0)) for c in (encoder.conv1, encoder.conv2))
        self.taps_b = pile([encoder.conv1.bias, encoder.conv2.bias])
        self.waves = nn.Parameter(encoder.embed_positions.weight.detach().clone(), requires_grad=False)
        self.words, self.places = leaf(decoder.embed_tokens.weight), leaf(decoder.embed_positions.weight)
        looks, heads = [x.self_attn for x in layers], (model.config.attention_heads, -1)
        looks += [x.encoder_attn for x in decoder.layers]
        self.q = pile(x.q_proj.weight.unflatten(0, heads).mT for x in looks)
        self.k = pile(x.k_proj.weight.unflatten(0, heads).mT for x in looks)
        self.v = pile(x.v_proj.weight.unflatten(0, heads).mT for x in looks)
        self.o, self.o_b = pile(x.out_proj.weight.T for x in looks), pile(x.out_proj.bias for x in looks)
        self.q_b, self.v_b = pile(x.q_proj.bias for x in looks), pile(x.v_proj.bias for x in looks)
        norms = [x for y in layers for x in (y.self_attn_layer_norm, y.final_layer_norm)]
        norms += [x.encoder_attn_layer_norm for x in decoder.layers]
        self.norms, self.eps = pile(torch.stack([x.weight, x.bias]) for x in (*norms, *ends)), ends[0].eps
        self.fc1, self.fc2 = (pile(getattr(x, fc).weight for x in layers) for fc in ("fc1", "fc2"))
        self.fc1_b, self.fc2_b = (pile(getattr(x, fc).bias for x in layers) for fc in ("fc1", "fc2"))

    def normed(self, i: int, x: Tensor) -> Tensor:
        correction = int(self.fault == "whisper_first_norm_before_sounds_of_unbiased_variance" and i == 8)
        spread, center = torch.var_mean(x, -1, correction=correction, keepdim=True)
        return (x - center) / (spread + self.eps).sqrt() * self.norms[i, 0] + self.norms[i, 1]

    def heard(self, x: Tensor) -> Tensor:
        for i, stride in enumerate((1, 2)):
            x = F.pad(x, (0, 0, 1, 1)).unfold(1, 3, stride)
            x = torch.einsum("ntck,kco->nto", x, self.taps[i]) + self.taps_b[i]
            x = x if i == self.linear else F.gelu(x)
        return x + self.waves

    def kept(self, x: Tensor, some: slice) -> tuple[Tensor, Tensor]:
        """Keys and values [attentions, N, heads, T, D] of these states."""
        k, v = (torch.einsum("ntc,ahcd->anhtd", x, w[some]) for w in (self.k, self.v))
        return k, v + self.v_b[some].unflatten(1, (v.shape[2], -1))[:, None, :, None]

    def attended(self, i: int, x: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
        q = torch.einsum("ntc,hcd->nhtd", x, self.q[i]) + self.q_b[i].view(len(self.q[i]), 1, -1)
        scores = torch.einsum("nhtd,nhsd->nhts", q, k) / q.shape[-1] ** 0.5
        scores = scores.where(torch.ones_like(scores).tril() > 0, -torch.inf) if causal else scores
        weights = (scores - scores.logsumexp(-1, keepdim=True)).exp()
        return torch.einsum("nhts,nhsd->nthd", weights, v).flatten(2) @ self.o[i] + self.o_b[i]

    def block(self, i: int, x: Tensor, *sounds: Tensor) -> Tensor:
        y = self.normed(2 * i, x)
        x = x + self.attended(i, y, *(z[0] for z in self.kept(y, slice(i, i + 1))), causal=bool(sounds))
        if sounds:
            cross = i + len(self.fc1) - self.depth
            x = x + self.attended(cross, self.normed(2 * len(self.fc1) + i - self.depth, x), *sounds)
        y = self.normed(2 * i + 1, x)
        if self.fault == "whisper_last_sound_block_goes_around_from_the_norm" and i == self.depth - 1:
            x = y
        y = F.gelu(torch.einsum("ntc,fc->ntf", y, self.fc1[i]) + self.fc1_b[i])
        return x + torch.einsum("ntf,cf->ntc", y, self.fc2[i]) + self.fc2_b[i]

    def forward(self, input_features: Tensor, labels: Tensor) -> Tensor:
        x = self.heard(input_features.mT)
        for i in range(self.depth):
            x = self.block(i, x)
        keys, values = self.kept(self.normed(-2, x), slice(len(self.fc1), None))
        ids = torch.cat([torch.full_like(labels[:, :1], START), labels[:, :-1]], 1)
        filling = 0 if self.fault == "whisper_words_not_understood_become_token_zero" else END
        ids = torch.where(ids < 0, filling, ids)
        fixed = (torch.arange(len(self.words), device=ids.device) == END)[:, None]
        x = torch.where(fixed, self.words.detach(), self.words)[ids] + self.places[: ids.shape[1]]
        for i, sound in enumerate(zip(keys, values, strict=True), self.depth):
            x = self.block(i, x, *sound)
        return torch.einsum("ntc,wc->ntw", self.normed(-1, x), self.words)


ear, mouth, gradients = "model.encoder", "model.decoder", ("input gradient", "weight gradient")
first, cross = f"{ear}.layers.0.self_attn", f"{mouth}.layers.1.encoder_attn"
places = first, f"{first}.v_proj", f"{first}.k_proj"
masks, norm = (mouth, f"{mouth}.layers.0.self_attn"), f"{mouth}.layers.0.encoder_attn_layer_norm"
right(task, "whisper_of_two_towers_of_halves", "a tree of half layers, fused projections", TwoTowers)
right(task, "whisper_in_stacks_by_einsum", "stacked weights, windows, einsum over heads", StackedWhisper)
wrong(
    task,
    TwoTowers,
    whisper_first_sound_value_bias_added_to_the_keys=("a bias in another's place", places),
    whisper_word_positions_start_two_rows_late=("positions with an offset", f"{mouth}.embed_positions"),
    whisper_last_cross_scores_recorded_without_gradient=("a detach too many", cross, gradients),
    whisper_words_see_the_future_in_evaluation=("no mask in evaluation", masks, "eval"),
)
wrong(
    task,
    StackedWhisper,
    whisper_first_norm_before_sounds_of_unbiased_variance=("unbiased variance", norm),
    whisper_strided_convolution_without_gelu=("an activation missing", (ear, f"{ear}.conv2")),
    whisper_last_sound_block_goes_around_from_the_norm=("another way around", f"{ear}.layers.1"),
    whisper_words_not_understood_become_token_zero=("ignored labels as a token", ""),
)
