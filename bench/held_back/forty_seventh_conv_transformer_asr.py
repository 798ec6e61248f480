"""Two ports of a hybrid recogniser: a tree with the channels last, and one class of stacked weights."""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bench.held_back._forty_seventh_conv_transformer_asr as asr
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, Rows, leaf, pile, wrong
from bench.held_back._sixth_ports import few

NAME, HEADS, WIDTH = "conv_transformer_asr_", asr.HEADS, asr.WIDTH
task = few("forty_seventh_conv_transformer_asr", asr.HybridRecogniser, asr.speech, asr.both_losses)


def waves(places: Tensor) -> Tensor:
    k = torch.arange(WIDTH).to(places)
    return torch.sin(places[:, None] / 10000 ** ((k - k % 2) / WIDTH) + k % 2 * math.pi / 2)


def heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(-2, -3)


class Stage(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        depth, point, norm, gate = block.mconv
        pairs, self.edges = [(point, norm), *block.res], (0, 0, *depth.conv.padding * 2)
        self.taps, self.stride = leaf(depth.conv.weight[:, 0].T), depth.conv.stride[0]
        self.mixes = nn.ParameterList(leaf(conv.conv.weight[..., 0].T) for conv, _ in pairs)
        self.norms = nn.ModuleList(Rows(norm) for _, norm in pairs)
        self.gate, self.padded, self.silent = nn.Sequential(*gate.fc, nn.Sigmoid()), False, False

    def forward(self, earlier: list[Tensor], before: Tensor, after: Tensor) -> Tensor:
        x = F.pad(earlier[-1] * before, self.edges).unfold(1, len(self.taps), self.stride)
        given = [torch.einsum("ntck,kc->ntc", x, self.taps), *earlier[: len(self.mixes) - 1]]
        if self.silent:
            given[1] = given[1].detach()
        x, *rest = (f(y * after @ mix) for y, mix, f in zip(given, self.mixes, self.norms, strict=True))
        mean = (x * after).sum(1) / (after.shape[1] if self.padded else after.sum(1))
        return (x * self.gate(mean)[:, None] + sum(rest)).relu()


class Mixer(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        a, self.norm = layer.self_attn, layer.norm_self_att
        self.asks = nn.ModuleList([a.linear_q, a.linear_k, a.linear_v])
        self.out, self.far = a.linear_out, leaf(a.linear_pos.weight.T)
        self.u, self.v = leaf(a.pos_bias_u[:, None]), leaf(a.pos_bias_v[:, None])
        self.feed = nn.Sequential(layer.norm_feed_forward, *layer.feed_forward)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        y, count = self.norm(x), x.shape[1]
        q, k, v = (heads(ask(y), HEADS) for ask in self.asks)
        far, t = heads(waves(torch.arange(1 - count, count).to(x)) @ self.far, HEADS), torch.arange(count)
        bias = torch.einsum("nhid,hijd->nhij", q + self.v, far[:, t[:, None] - t + count - 1])
        bias = (bias / math.sqrt(q.shape[-1])).masked_fill(~seen, -torch.inf)
        y = F.scaled_dot_product_attention(q + self.u, k, v, bias)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.feed(x)


class Writer(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        a, self.words, self.wide = model.cross_attn, leaf(model.embedding.weight), False
        self.ask, self.key, self.value = nn.Sequential(model.layer_norm, a.query_net), a.key_net, a.value_net
        self.out, self.parts = a.out_projection, a.heads
        self.end = nn.Sequential(model.final_layer_norm, model.classifier, nn.LogSoftmax(-1))

    def forward(self, tokens: Tensor, heard: Tensor, seen: Tensor) -> Tensor:
        x = self.words[tokens] + waves(torch.arange(tokens.shape[1]).to(self.words))
        q, k, v = (heads(y, self.parts) for y in (self.ask(x), self.key(heard), self.value(heard)))
        y = F.scaled_dot_product_attention(q, k, v, seen, scale=WIDTH**-0.5 if self.wide else None)
        return self.end(x + self.out(y.transpose(1, 2).flatten(2)))


class RecogniserOfStages(Port):
    """Stages with the channels last and their masks made once, attention with a bias."""

    def take(self, model: asr.HybridRecogniser) -> None:
        parts = map(Stage, model.encoder.blocks), map(Mixer, model.encoder.layers)
        self.stages, self.mixers = map(nn.ModuleList, parts)
        self.last, self.align, self.write = model.encoder.norm_out, model.ctc, Writer(model.decoder)
        self.stages[0].norms[0].own = self.fault == NAME + "prologue_normed_by_its_batch_in_evaluation"
        self.stages[1].padded = self.fault == NAME + "second_squeeze_divides_by_all_frames"
        self.stages[2].silent = self.fault == NAME + "last_block_reads_prologue_detached"
        self.write.wide = self.fault == NAME + "cross_attention_scaled_by_whole_width"

    def forward(self, audio_signal: Tensor, length: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        before = asr.valid(length, audio_signal.shape[2])[..., None].to(audio_signal)
        after = before[:, ::2]
        done = [self.stages[0]([audio_signal.mT], before, after)]
        for stage in self.stages[1:]:
            done.append(stage(done, after, after))
        x, seen = done[-1], after.mT[:, None] > 0
        for mixer in self.mixers:
            x = mixer(x, seen)
        x = self.last(x) * after
        return F.log_softmax(self.align(x), -1), self.write(tokens, x, seen)


def sheet(layer: nn.Module) -> Tensor:
    return torch.cat([layer.weight.T, layer.bias[None]])


def affine(x: Tensor, rows: Tensor) -> Tensor:
    return x @ rows[:-1] + rows[-1]


def attend(scores: Tensor, seen: Tensor, v: Tensor) -> Tensor:
    e = torch.exp(scores - scores.detach().amax(-1, keepdim=True)) * seen
    return ((e / e.sum(-1, keepdim=True)) @ v).transpose(1, 2).flatten(2)


class StackedRecogniser(Port):
    """Kernels of taps times mixes, and stacks of square sheets for all that attends."""

    def take(self, model: asr.HybridRecogniser) -> None:
        enc, dec, self.w, self.rows = model.encoder, model.decoder, nn.ParameterList(), nn.ModuleList()
        for block in enc.blocks:
            depth, point, norm, gate = block.mconv
            self.w.extend([leaf(depth.conv.weight[:, 0]), *(leaf(sheet(gate.fc[i])) for i in (0, 2))])
            self.w.extend(leaf(conv.conv.weight[..., 0]) for conv in (point, *(x[0] for x in block.res)))
            self.rows.extend(Rows(x) for x in (norm, *(x[1] for x in block.res)))
        own, a = [x.self_attn for x in enc.layers], dec.cross_attn
        squares = [y for x in own for y in (x.linear_q, x.linear_k, x.linear_v, x.linear_out)]
        self.squares = pile(map(sheet, [*squares, a.query_net, a.key_net, a.value_net, a.out_projection]))
        self.far = pile(x.linear_pos.weight.T for x in own)
        self.bias = pile(torch.stack([x.pos_bias_u, x.pos_bias_v])[:, :, None] for x in own)
        self.wide, self.thin = (pile(sheet(x.feed_forward[i]) for x in enc.layers) for i in (0, 2))
        norms = [y for x in enc.layers for y in (x.norm_self_att, x.norm_feed_forward)]
        norms += [enc.norm_out, dec.layer_norm, dec.final_layer_norm]
        self.pairs = pile(torch.stack([x.weight, x.bias]) for x in norms)
        self.words = leaf(dec.embedding.weight)
        self.ends = leaf(torch.cat([sheet(model.ctc), sheet(dec.classifier)], 1))

    def hear(self, x: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        w, rows, done = iter(self.w), iter(self.rows), []
        mask = (torch.arange(x.shape[2]) < length[:, None])[:, None].to(x)
        for b in range(3):
            taps, down, up, mix = (next(w) for _ in range(4))
            kernel, stride = mix[:, :, None] * taps, 1 if b else 2
            x = F.conv1d(x * mask, kernel, None, stride, taps.shape[1] // 2)
            if b == 0:
                length = (length - 1) // 2 + (self.fault != NAME + "strided_length_one_frame_short")
                mask = (torch.arange(x.shape[2]) < length[:, None])[:, None].to(x)
            x = next(rows)((x * mask).mT).mT
            mean, fixed = (x * mask).sum(2) / length[:, None], NAME + "third_squeeze_without_gradient"
            mean = mean.detach() if b == 2 and self.fault == fixed else mean
            x = x * affine(affine(mean, down).relu(), up).sigmoid()[:, :, None]
            x = (x + sum(next(rows)((next(w) @ (y * mask)).mT).mT for y in done)).relu()
            done.append(x)
        return x.mT, mask

    def forward(self, audio_signal: Tensor, length: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x, mask = self.hear(audio_signal, length)
        norm = [partial(F.layer_norm, normalized_shape=(WIDTH,), weight=w, bias=b) for w, b in self.pairs]
        seen, t = mask[:, None], torch.arange(x.shape[1])
        apart = waves((t[:, None] - t).flatten().to(x))
        for i, (u, v) in enumerate(self.bias):
            if i == 1 and self.fault == NAME + "second_attention_swaps_its_biases":
                u, v = v, u
            y, sheets = norm[2 * i](x), self.squares[4 * i :]
            q, key, value = (heads(affine(y, sheets[j]), HEADS) for j in range(3))
            place = heads(apart @ self.far[i], HEADS).unflatten(1, (len(t), len(t)))
            scores = torch.einsum("nhid,hijd->nhij", q + v, place) + (q + u) @ key.mT
            x = x + affine(attend(scores * (HEADS / WIDTH) ** 0.5, seen, value), sheets[3])
            x = x + affine(F.silu(affine(norm[2 * i + 1](x), self.wide[i])), self.thin[i])
        x = norm[-3](x) * mask.mT
        steps = torch.arange(tokens.shape[1]) + (self.fault == NAME + "decoder_positions_start_at_one")
        z, sheets = F.embedding(tokens, self.words) + waves(steps.to(x)), self.squares[-4:]
        q, key, value = (heads(affine(y, w), 2) for y, w in zip((norm[-2](z), x, x), sheets[:3], strict=True))
        z = z + affine(attend(q @ key.mT / (WIDTH / 2) ** 0.5, seen, value), sheets[3])
        ends = affine(x, self.ends[:, :10]), affine(norm[-1](z), self.ends[:, 10:])
        return tuple(y - y.logsumexp(-1, True) for y in ends)


SLOPES = ("input gradient", "weight gradient")
right(task, "recogniser_of_stages_with_channels_last", "a tree, masks made once, a bias", RecogniserOfStages)
right(task, "recogniser_of_stacked_weights", "packed stacks, fused kernels, flat loops", StackedRecogniser)
tree = {
    "prologue_normed_by_its_batch_in_evaluation": ("own statistics", "encoder.blocks.0.mconv.2", "eval"),
    "second_squeeze_divides_by_all_frames": ("a mean over padding", "encoder.blocks.1.mconv.3"),
    "last_block_reads_prologue_detached": ("detach", "encoder.blocks.2", SLOPES),
    "cross_attention_scaled_by_whole_width": ("another scale", "decoder.cross_attn"),
}
flat = {
    "strided_length_one_frame_short": ("a count off by one", "encoder.blocks.0.mconv.0"),
    "third_squeeze_without_gradient": ("a mean detached", "encoder.blocks.2.mconv.3", SLOPES),
    "second_attention_swaps_its_biases": ("swapped weights", "encoder.layers.1.self_attn"),
    "decoder_positions_start_at_one": ("positions off by one", "decoder"),
}
wrong(task, RecogniserOfStages, **{NAME + name: truth for name, truth in tree.items()})
wrong(task, StackedRecogniser, **{NAME + name: truth for name, truth in flat.items()})
