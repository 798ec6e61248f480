"""Two ports of wav2vec 2.0: an ear, a stem and blocks around a codebook; and windows and products."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _thirteenth_wav_to_vec as own
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

G, V, HEADS, EDGES, NEVER = own.GROUPS, own.ENTRIES, own.HEADS, (4, 3), float("-inf")
task = few("thirteenth_wav_to_vec", own.Wav2Vec2ForPreTraining, own.utterances, lambda out, n: out[0] / n)


def bound(layer: nn.Module) -> nn.Parameter:
    return leaf(torch.cat([layer.weight.t().reshape(-1, len(layer.bias)), layer.bias[None]]))


def times(x: Tensor, both: Tensor) -> Tensor:
    return x @ both[:-1] + both[-1]


def normed(x: Tensor, both: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], *both)


class Ear(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        layers, self.within = model.feature_extractor.conv_layers, False
        self.taps = nn.ParameterList(leaf(layer.conv.weight.mT) for layer in layers)
        self.along, self.across = bound(layers[0].layer_norm), bound(model.feature_projection.layer_norm)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x, (gain, shift) = x[:, None], self.along[:, :, None]
        for i, (taps, stride) in enumerate(zip(self.taps, own.STRIDES, strict=True)):
            x, lengths = F.conv1d(x, taps.mT, stride=stride), (lengths - taps.shape[1]) // stride + 1
            if i == 0:
                limit = lengths[:, None, None] if self.within else x.shape[2]
                share = (torch.arange(x.shape[2], device=x.device) < limit).to(x) / limit
                x = x - (x * share).sum(2, keepdim=True)
                x = x * ((x.square() * share).sum(2, keepdim=True) + 1e-5).rsqrt() * gain + shift
            x = F.gelu(x)
        return normed(x.mT, self.across), torch.arange(x.shape[2], device=x.device) < lengths[:, None]


class Stem(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        place, self.rise = model.encoder.pos_conv_embed.conv, bound(model.feature_projection.projection)
        size, way = place.parametrizations.weight.original0, place.parametrizations.weight.original1
        self.size, self.way, self.shift = leaf(size.movedim(2, 0)), leaf(way.movedim(2, 0)), leaf(place.bias)
        self.hidden, self.norm = leaf(model.masked_spec_embed), bound(model.encoder.layer_norm)

    def forward(self, x: Tensor, heard: Tensor, masked: Tensor) -> Tensor:
        x = times(x, self.rise)
        x = x.lerp(self.hidden.expand_as(x), masked[:, :, None].to(x)) * heard[:, :, None]
        taps = (self.way * self.size / self.way.norm(dim=(1, 2), keepdim=True)).permute(1, 2, 0)
        return normed(x + F.gelu(F.conv1d(F.pad(x.mT, EDGES), taps, self.shift, groups=4)).mT, self.norm)


class Block(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        mix, (up, _, down), self.around = layer.attention, layer.feed_forward, False
        self.qkv = leaf(torch.cat([bound(x) for x in (mix.q_proj, mix.k_proj, mix.v_proj)], 1))
        self.out, self.up, self.down = bound(mix.out_proj), bound(up), bound(down)
        self.norms = pile([bound(layer.layer_norm), bound(layer.final_layer_norm)])

    def forward(self, x: Tensor, heard: Tensor) -> Tensor:
        q, k, v = times(x, self.qkv).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, heard[:, None, None])
        total, (first, last) = x + times(mixed.transpose(1, 2).flatten(2), self.out), self.norms
        x = normed(total, first)
        return normed((total if self.around else x) + times(F.gelu(times(x, self.up)), self.down), last)


class Codebook(nn.Module):
    def __init__(self, quantizer: nn.Module, noisy: bool = False):
        super().__init__()
        self.scores, self.soft, self.noisy = bound(quantizer.weight_proj), quantizer.temperature, noisy
        self.entries = leaf(quantizer.codevectors.unflatten(1, (G, V))[0])

    def forward(self, x: Tensor, masked: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores, noise = (y.unflatten(2, (G, V)) for y in (times(x, self.scores), noise))
        number = (scores + noise if self.training or self.noisy else scores).argmax(-1)
        picked = shares = F.one_hot(number, V).to(x)
        if self.training:
            soft, shares = ((scores + noise) / self.soft).softmax(-1), scores.softmax(-1)
            picked = picked + (soft - soft.detach())
        use = shares[masked].mean(0)
        perplexity = (-use * (use + 1e-7).log()).sum(1).exp().sum()
        return number, torch.einsum("ntgv,gvd->ntgd", picked, self.entries).flatten(2), perplexity


class EarAndBlocks(Port):
    """A tree whose borders lie elsewhere."""

    def take(self, model: nn.Module) -> None:
        core, self.codebook = model.wav2vec2, Codebook(model.quantizer)
        self.ear, self.stem = Ear(core), Stem(core)
        self.blocks = nn.ModuleList(Block(layer) for layer in core.encoder.layers)
        self.state, self.code = bound(model.project_hid), bound(model.project_q)
        self.ear.within = self.fault == "wavtovec_first_group_norm_over_the_heard_part_only"
        self.blocks[1].around = self.fault == "wavtovec_second_feed_forward_residual_skips_the_norm"
        if self.fault == "wavtovec_straight_through_softmax_without_temperature":
            self.codebook.soft = 1.0

    def forward(self, waves, attention_mask, masked, negatives, noise) -> tuple[Tensor, ...]:
        features, heard = self.ear(waves, attention_mask.sum(1))
        x = self.stem(features, heard, masked)
        for block in self.blocks:
            x = block(x, heard)
        number, codes, perplexity = self.codebook(features, masked, noise)
        x, targets = times(x, self.state), times(codes, self.code)
        field = torch.cat([targets[:, :, None], targets.flatten(0, 1)[negatives]], 2)
        logits = (F.normalize(x, dim=2)[:, :, None] * F.normalize(field, dim=3)).sum(3) / own.KAPPA
        if self.fault != "wavtovec_negatives_equal_to_the_positive_stay":
            same = (number.flatten(0, 1)[negatives] == number[:, :, None]).all(3)
            logits = logits.masked_fill(F.pad(same, (1, 0)), NEVER)
        loss = -logits.log_softmax(2)[..., 0][masked].sum()
        return loss + (1 - perplexity / (G * V)) * own.DIVERSITY * masked.sum(), x, targets, perplexity


class WavesByWindows(Port):
    """Channels last, stacks of all blocks, windows for convolutions; the codebook alone is a module."""

    def take(self, model: nn.Module) -> None:
        core, encoder = model.wav2vec2, model.wav2vec2.encoder
        convs, place = core.feature_extractor.conv_layers, encoder.pos_conv_embed.conv
        ends, weight = core.feature_projection, place.parametrizations.weight
        self.codebook = Codebook(model.quantizer, self.fault == "wavtovec_noise_chooses_codes_in_evaluation")
        self.kernels = nn.ParameterList(leaf(x.conv.weight.permute(2, 1, 0).flatten(0, 1)) for x in convs)
        self.mixes = pile(pile(bound(y) for y in x.attention.children()) for x in encoder.layers)
        self.ups, self.downs = (pile(bound(x.feed_forward[i]) for x in encoder.layers) for i in (0, 2))
        self.norms = pile(bound(x) for y in encoder.layers for x in (y.layer_norm, y.final_layer_norm))
        self.first, self.second = bound(convs[0].layer_norm), bound(ends.layer_norm)
        self.third, self.rise = bound(encoder.layer_norm), bound(ends.projection)
        self.state, self.code = bound(model.project_hid), bound(model.project_q)
        self.size, self.hidden = leaf(weight.original0.movedim(2, 0)), leaf(core.masked_spec_embed)
        self.way, self.shift = leaf(weight.original1.unflatten(0, (4, -1)).transpose(1, 3)), leaf(place.bias)

    def heard(self, waves: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x, ends = waves[:, :, None], lengths
        for i, (size, stride) in enumerate(zip(own.KERNELS, own.STRIDES, strict=True)):
            x, ends = x.unfold(1, size, stride).mT.flatten(2) @ self.kernels[i], (ends - size) // stride + 1
            x = F.gelu(x if i else normed(x.mT, ()).mT * self.first[0] + self.first[1])
        if self.fault == "wavtovec_lengths_divided_by_the_product_of_strides":
            ends = lengths // 20
        return normed(x, self.second), torch.arange(x.shape[1], device=x.device) < ends[:, None]

    def placed(self, x: Tensor) -> Tensor:
        axes = (2, 3) if self.fault == "wavtovec_positional_weights_normed_group_by_group" else (0, 2, 3)
        taps = self.way * self.size / self.way.square().sum(axes, keepdim=True).sqrt()
        windows = F.pad(x, (0, 0, *EDGES)).unfold(1, own.POSITIONS, 1).unflatten(2, (4, -1))
        y = F.gelu(torch.einsum("ntgik,gkio->ntgo", windows, taps).flatten(2) + self.shift)
        return normed(x + y, self.third)

    def mixed(self, i: int, x: Tensor, heard: Tensor) -> Tensor:
        scale, (k, v, q, out) = (own.HIDDEN // HEADS) ** -0.5, self.mixes[i]
        late = self.fault == "wavtovec_last_query_bias_escapes_the_scale" and i == 2
        q = x @ q[:-1] * scale + q[-1] * (1 if late else scale)
        q, k, v = (y.unflatten(2, (HEADS, -1)) for y in (q, times(x, k), times(x, v)))
        scores = torch.einsum("nqhe,nkhe->nhqk", q, k).masked_fill(~heard[:, None, None], NEVER)
        return times(torch.einsum("nhqk,nkhe->nqhe", scores.softmax(3), v).flatten(2), out)

    def forward(self, waves, attention_mask, masked, negatives, noise) -> tuple[Tensor, ...]:
        features, heard = self.heard(waves, attention_mask.sum(1))
        x = torch.where(masked[:, :, None], self.hidden, times(features, self.rise)) * heard[:, :, None]
        x = self.placed(x)
        for i, (before, after) in enumerate(self.norms.unflatten(0, (-1, 2))):
            x = normed(x + self.mixed(i, x, heard), before)
            x = normed(x + times(F.gelu(times(x, self.ups[i])), self.downs[i]), after)
        number, codes, perplexity = self.codebook(features, masked, noise)
        x, targets, rows = times(x, self.state), times(codes, self.code), masked.flatten().nonzero()
        number, others = number.flatten(0, 1), torch.cat([rows, negatives[masked]], 1)
        cosines = F.normalize(x[masked], dim=1) @ F.normalize(targets.flatten(0, 1), dim=1).T / own.KAPPA
        same = (number[others[:, 1:]] == number[rows]).all(2)
        logits = cosines.gather(1, others).masked_fill(F.pad(same, (1, 0)), NEVER)
        loss = (logits.logsumexp(1) - logits[:, 0]).sum()
        return loss + own.DIVERSITY * len(rows) / (G * V) * (G * V - perplexity), x, targets, perplexity


FIRST, BOTH = "wav2vec2.feature_extractor.conv_layers.0.layer_norm", ("input gradient", "weight gradient")
PLACE, MIX = "wav2vec2.encoder.pos_conv_embed.conv", "wav2vec2.encoder.layers.2.attention"
PLACES = (PLACE, PLACE + ".parametrizations.weight", PLACE + ".parametrizations.weight.0")
right(task, "wavtovec_of_an_ear_and_blocks", "other borders, fused weights", EarAndBlocks)
right(task, "wavtovec_by_windows_and_stacks", "flat, channels last, products of windows", WavesByWindows)
wrong(
    task,
    EarAndBlocks,
    wavtovec_first_group_norm_over_the_heard_part_only=("statistics of fewer frames", FIRST),
    wavtovec_second_feed_forward_residual_skips_the_norm=("another residual", "wav2vec2.encoder.layers.1"),
    wavtovec_straight_through_softmax_without_temperature=("another backward", "quantizer", BOTH),
    wavtovec_negatives_equal_to_the_positive_stay=("an exclusion missing", ""),
)
wrong(
    task,
    WavesByWindows,
    wavtovec_lengths_divided_by_the_product_of_strides=("another mask", ("wav2vec2", "wav2vec2.encoder")),
    wavtovec_positional_weights_normed_group_by_group=("a norm over fewer axes", PLACES),
    wavtovec_last_query_bias_escapes_the_scale=("another order of scale and shift", (MIX, MIX + ".q_proj")),
    wavtovec_noise_chooses_codes_in_evaluation=("training mode in evaluation", "quantizer", "eval"),
)
