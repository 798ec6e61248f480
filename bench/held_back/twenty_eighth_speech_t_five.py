"""A port of a small SpeechT5: a tree with time before the batch."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _twenty_eighth_speech_t_five as old
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, Rows, leaf, wrong
from bench.held_back._sixth_ports import few

task = few("twenty_eighth_speech_t_five", old.SpeechT5ForTextToSpeech, old.sayings, old.spectrogram_and_stop)


class Affine(nn.Module):
    def __init__(self, *layers: nn.Linear):
        super().__init__()
        self.matrix = leaf(torch.cat([layer.weight for layer in layers]).T)
        self.offset = leaf(torch.cat([layer.bias for layer in layers]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tensordot(x, self.matrix, 1) + self.offset


class Even(nn.Module):
    """A layer norm by hand of a sum."""

    def __init__(self, norm: nn.LayerNorm):
        super().__init__()
        self.gain, self.shift, self.eps = leaf(norm.weight), leaf(norm.bias), norm.eps

    def forward(self, x: Tensor, more: Tensor | float = 0.0) -> Tensor:
        spread, middle = torch.var_mean(x + more, -1, correction=0, keepdim=True)
        return (x + more - middle) / (spread + self.eps).sqrt() * self.gain + self.shift


class Listening(nn.Module):
    """Attention of [T, N, D] over [S, N, D]; ``near`` are the keys of distances."""

    def __init__(self, mix: nn.Module):
        super().__init__()
        self.heads, self.ask = mix.num_heads, Affine(mix.q_proj)
        self.tell, self.leave = Affine(mix.v_proj, mix.k_proj), Affine(mix.out_proj)

    def forward(self, x: Tensor, memory: Tensor, hidden: Tensor, near: Tensor | None = None) -> Tensor:
        q = self.ask(x).unflatten(2, (self.heads, -1))
        v, k = (y.unflatten(2, (self.heads, -1)) for y in self.tell(memory).chunk(2, -1))
        scores = torch.einsum("tnhe,snhe->nhts", q, k)
        if near is not None:
            scores = scores + torch.einsum("tnhe,tse->nhts", q, near)
        scores = (scores / math.sqrt(q.shape[-1])).masked_fill(hidden, -math.inf)
        return self.leave(torch.einsum("nhts,snhe->tnhe", scores.softmax(-1), v).flatten(2))


class Stage(nn.Module):
    """A layer of either side: it listens to itself, perhaps to the text, and thinks."""

    def __init__(self, layer: nn.Module, mixes: list, norms: list, early: bool = False):
        super().__init__()
        self.mixes, self.norms = nn.ModuleList(map(Listening, mixes)), nn.ModuleList(map(Even, norms))
        up, down = layer.feed_forward.intermediate_dense, layer.feed_forward.output_dense
        self.up, self.down, self.early = Affine(up), Affine(down), early

    def forward(self, x: Tensor, own: Tensor, near: Tensor | None = None, *text: Tensor) -> Tensor:
        start = x
        x = raw = x + self.mixes[0](x, x, own, near)
        start = x = self.norms[0](x)
        if text:
            start = x = self.norms[1](x, self.mixes[1](x, *text))
        y = self.up(x)
        y = self.down(y * (1 + torch.erf(y / math.sqrt(2))) / 2)
        return self.norms[-1](raw if self.early else start, y)


class Squash(torch.autograd.Function):
    """A hyperbolic tangent with its slope by hand, which may lack its square."""

    @staticmethod
    def forward(ctx, x: Tensor, power: int) -> Tensor:
        y, ctx.power = x.tanh(), power
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, slope: Tensor) -> tuple[Tensor, None]:
        return slope * (1 - ctx.saved_tensors[0].abs() ** ctx.power), None


class SpeakingTree(Port):
    """Stages of [T, N, C], fused keys and values, windows for convolutions."""

    def take(self, model: old.SpeechT5ForTextToSpeech) -> None:
        text, speech = model.speecht5["encoder"], model.speecht5["decoder"]
        inner, front, post = text.wrapped_encoder, speech.prenet, model.speech_decoder_postnet
        self.letters, self.beat = leaf(text.prenet[0].weight), leaf(text.prenet[1].alpha)
        self.tick, self.open = leaf(front.encode_positions.alpha), Even(inner.layer_norm)
        self.register_buffer("waves", text.prenet[1].pe[0, :, None].clone())
        self.near, early = leaf(inner.embed_positions.pe_k.weight), self.fault.endswith("before_the_norm")
        self.readers = nn.ModuleList(
            Stage(x, [x.attention], [x.layer_norm, x.final_layer_norm], early and i == 0)
            for i, x in enumerate(inner.layers)
        )
        self.speakers = nn.ModuleList()
        for x in speech.wrapped_decoder.layers:
            norms = [x.self_attn_layer_norm, x.encoder_attn_layer_norm, x.final_layer_norm]
            self.speakers.append(Stage(x, [x.self_attn, x.encoder_attn], norms))
        self.front = nn.ModuleList(
            map(Affine, [*front.layers, front.final_layer, front.speaker_embeds_layer])
        )
        self.ends = Affine(post.feat_out, post.prob_out)
        self.kernels = nn.ParameterList(leaf(x.conv.weight) for x in post.layers)
        self.rows = nn.ModuleList(Rows(x.batch_norm) for x in post.layers)

    def polish(self, x: Tensor) -> Tensor:
        for i, (kernel, rows) in enumerate(zip(self.kernels, self.rows, strict=True)):
            edge = kernel.shape[2] // 2
            windows = F.pad(x, (0, 0, 0, 0, edge, edge)).unfold(0, kernel.shape[2], 1)
            x = rows(torch.einsum("tnck,ock->tno", windows, kernel))
            if i < 2:
                late = self.fault == "speech_t_five_second_tanh_slope_without_its_square" and i == 1
                x = Squash.apply(x, 1 if late else 2)
        return x

    def forward(self, input_ids, attention_mask, labels, decoder_attention_mask, speaker_embeddings):
        x = self.letters[input_ids.T]
        x = self.open(x + self.beat * self.waves[: len(x)])
        step = torch.arange(len(x), device=x.device)
        apart = step[:, None] - step
        if self.fault == "speech_t_five_relative_positions_count_from_the_key":
            apart = -apart
        near, gone = (
            self.near[apart.clamp(-old.DISTANCE, old.DISTANCE - 1) + old.DISTANCE],
            attention_mask == 0,
        )
        gone = gone[:, None, None]
        for stage in self.readers:
            x = stage(x, gone, near)
        y = labels.transpose(0, 1)[1::2]
        y = torch.cat([torch.zeros_like(y[:1]), y[:-1]])
        y = self.front[2](self.front[1](self.front[0](y).relu()).relu()) + self.tick * self.waves[: len(y)]
        size = speaker_embeddings.square().sum(1, keepdim=True).sqrt()
        if self.fault == "speech_t_five_speaker_divided_by_a_little_more_than_its_norm":
            size = size + 1e-2
        who = (speaker_embeddings / size).expand(len(y), -1, -1)
        y, ahead = self.front[3](torch.cat([y, who], 2)).relu(), torch.ones(len(y), len(y), device=y.device)
        own = (decoder_attention_mask[:, None, None, 1::2] == 0) | (ahead.triu(1) > 0)
        for stage in self.speakers:
            y = stage(y, own, None, x, gone)
        frames, stops = self.ends(y).split([2 * old.MELS, 2], 2)
        frames = frames.unflatten(2, (2, old.MELS)).transpose(1, 2).flatten(0, 1)
        outputs = (
            frames,
            frames + self.polish(frames),
            stops.unflatten(2, (2, 1)).transpose(1, 2).flatten(0, 1),
        )
        return (*(z.transpose(0, 1) for z in outputs[:2]), outputs[2][..., 0].T)


SLOPES, ENCODER = ("input gradient", "weight gradient"), "speecht5.encoder.wrapped_encoder"
DECODER, POSTNET = "speecht5.decoder", "speech_decoder_postnet.layers"
right(task, "speech_t_five_tree_with_time_first", "a tree, fused keys and values, windows", SpeakingTree)
wrong(
    task,
    SpeakingTree,
    speech_t_five_relative_positions_count_from_the_key=("a sign", f"{ENCODER}.embed_positions"),
    speech_t_five_first_layer_keeps_what_was_before_the_norm=("another residual", f"{ENCODER}.layers.0"),
    speech_t_five_speaker_divided_by_a_little_more_than_its_norm=("another epsilon", f"{DECODER}.prenet"),
    speech_t_five_second_tanh_slope_without_its_square=("a wrong slope", f"{POSTNET}.1.activation", SLOPES),
)
