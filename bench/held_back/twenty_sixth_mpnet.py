"""Two ports of a small MPNet: a tree of stages with the time first, and one class of stacked weights."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _twenty_sixth_mpnet as small
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("twenty_sixth_mpnet", small.MPNetForMaskedLM, small.texts, small.masked_words)
HEADS, PAD, EPS, HALF = small.HEADS, small.PAD, small.EPS, small.BUCKETS // 2
NEAR, FARTHEST = HALF // 2, small.FARTHEST


class Affine(nn.Module):
    """The products of one or more linear layers of the reference, side by side."""

    def __init__(self, *layers: nn.Linear):
        super().__init__()
        self.matrix = leaf(torch.cat([x.weight for x in layers]).T)
        self.offset = leaf(torch.cat([x.bias for x in layers]))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix + self.offset


class Standard(nn.Module):
    def __init__(self, norm: nn.LayerNorm):
        super().__init__()
        self.gain, self.shift = leaf(norm.weight), leaf(norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        spread, center = torch.var_mean(x, -1, correction=0, keepdim=True)
        return (x - center) * (spread + EPS).rsqrt() * self.gain + self.shift


class Distance(nn.Module):
    """Which words are kept [N, T] -> what is added to the scores [N, heads, T, T]."""

    def __init__(self, table: nn.Embedding):
        super().__init__()
        self.ahead, self.behind = leaf(table.weight[HALF:]), leaf(table.weight[:HALF])
        far = [NEAR * (FARTHEST / NEAR) ** (i / (HALF - NEAR)) for i in range(1, HALF - NEAR)]
        self.register_buffer("ends", torch.tensor([*range(1, NEAR + 1), *map(math.ceil, far)]))

    def forward(self, kept: Tensor) -> Tensor:
        place = torch.arange(kept.shape[1], device=kept.device)
        lead = place - place[:, None]
        bucket = torch.bucketize(lead.abs(), self.ends, right=True)
        added = torch.where((lead > 0)[..., None], self.ahead[bucket], self.behind[bucket])
        return added.movedim(2, 0).masked_fill(~kept[:, None, None], -math.inf)


class Mixing(nn.Module):
    """[T, N, D]: the norm that ends what came before, and attention beside it."""

    def __init__(self, norm: nn.LayerNorm, attn: nn.Module, hurried: bool):
        super().__init__()
        self.norm, self.ask, self.tell = Standard(norm), Affine(attn.q, attn.k, attn.v), Affine(attn.o)
        self.hurried = hurried

    def forward(self, x: Tensor, added: Tensor) -> Tensor:
        x = self.norm(x)
        q, k, v = self.ask(x).unflatten(2, (3, HEADS, -1)).permute(2, 1, 3, 0, 4)
        if self.hurried and not self.training:
            added = added / math.sqrt(q.shape[-1])
        mixed = F.scaled_dot_product_attention(q, k, v, added)
        return x + self.tell(mixed.permute(2, 0, 1, 3).flatten(2))


class Widening(nn.Module):
    def __init__(self, norm: nn.LayerNorm, up: nn.Linear, down: nn.Linear, fixed: bool):
        super().__init__()
        self.norm, self.up, self.down, self.fixed = Standard(norm), Affine(up), Affine(down), fixed

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        x = self.norm(x)
        y = self.up(x)
        gate = torch.special.ndtr(y)
        return x + self.down(y * (gate.detach() if self.fixed else gate))


class MpnetOfStages(Port):
    """Stages that begin with the norm before them, time first; the padding is part of the bias."""

    def take(self, model: small.MPNetForMaskedLM) -> None:
        start, head, stages = model.mpnet.embeddings, model.lm_head, []
        self.what, self.where = leaf(start.word_embeddings.weight), leaf(start.position_embeddings.weight)
        self.distance, norm = Distance(model.mpnet.encoder.relative_attention_bias), start.LayerNorm
        for i, layer in enumerate(model.mpnet.encoder.layer):
            hurried = self.fault == "mpnet_last_attention_scales_bias_in_evaluation" and i == 2
            fixed = self.fault == "mpnet_second_gelu_takes_its_gate_for_a_constant" and i == 1
            stages.append(Mixing(norm, layer.attention.attn, hurried))
            up, down, norm = layer.intermediate.dense, layer.output.dense, layer.output.LayerNorm
            stages.append(Widening(layer.attention.LayerNorm, up, down, fixed))
        self.stages, self.before = nn.ModuleList(stages), Standard(norm)
        self.turn, self.after, self.prior = Affine(head.dense), Standard(head.layer_norm), leaf(head.bias)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        words, added = input_ids.T, self.distance(attention_mask.bool())
        first = PAD if self.fault == "mpnet_positions_start_at_the_padding_index" else PAD + 1
        order = torch.where(words != PAD, (words != PAD).cumsum(0) - 1 + first, PAD)
        x = F.embedding(words, self.what, PAD) + F.embedding(order, self.where, PAD)
        for stage in self.stages:
            x = stage(x, added)
        x = self.turn(self.before(x))
        swapped = self.fault == "mpnet_head_norms_before_its_gelu"
        x = F.gelu(self.after(x)) if swapped else self.after(x * torch.special.ndtr(x))
        return torch.einsum("tnd,wd->ntw", x, self.what) + self.prior


def rows(layer: nn.Linear) -> Tensor:
    """[in + 1, out]: the transposed matrix, and the bias below it."""
    return torch.cat([layer.weight.T, layer.bias[None]])


def normed(x: Tensor, w: Tensor, eps: float = EPS) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return w[0] * x / (x.square().mean(-1, keepdim=True) + eps).sqrt() + w[1]


def times(x: Tensor, w: Tensor) -> Tensor:
    return x @ w[:-1] + w[-1]


class StackedMpnet(Port):
    """Stacks over the layers, biases below the matrices; a line of biases by distance, slid along."""

    def take(self, model: small.MPNetForMaskedLM) -> None:
        net, head, norms = model.mpnet, model.lm_head, [model.mpnet.embeddings.LayerNorm]
        for layer in net.encoder.layer:
            norms += [layer.attention.LayerNorm, layer.output.LayerNorm]
        four = [(x.q, x.k, x.v, x.o) for x in (layer.attention.attn for layer in net.encoder.layer)]
        self.mix = pile(torch.stack([*map(rows, each)]) for each in four)
        self.up = pile(rows(layer.intermediate.dense) for layer in net.encoder.layer)
        self.down = pile(rows(layer.output.dense) for layer in net.encoder.layer)
        self.norms = pile(torch.stack([x.weight, x.bias]) for x in (*norms, head.layer_norm))
        self.words = leaf(torch.cat([net.embeddings.word_embeddings.weight, head.bias[:, None]], 1))
        self.places = leaf(net.embeddings.position_embeddings.weight)
        self.table, self.turn = leaf(net.encoder.relative_attention_bias.weight.T), leaf(rows(head.dense))

    def slid(self, length: int) -> Tensor:
        """[heads, T, T]: the row of a word is the line of all distances, seen from that word."""
        lead = torch.arange(1 - length, length, device=self.table.device)
        far = (lead.abs().clamp(min=NEAR) / NEAR).log() / math.log(FARTHEST / NEAR) * (HALF - NEAR)
        if self.fault == "mpnet_far_buckets_rounded_to_the_nearest":
            far = far.round()
        bucket = torch.where(lead.abs() < NEAR, lead.abs(), (NEAR + far.long()).clamp(max=HALF - 1))
        line = self.table[:, bucket + HALF * (lead > 0)]
        if self.fault == "mpnet_relative_bias_taken_for_a_constant":
            line = line.detach()
        return line.unfold(1, length, 1).flip(1)

    def mixed(self, i: int, x: Tensor, slid: Tensor, kept: Tensor) -> Tensor:
        ask, key, value = (times(x, self.mix[i, j]).unflatten(2, (HEADS, -1)) for j in range(3))
        score = torch.einsum("nqhe,nkhe->nhqk", ask * ask.shape[-1] ** -0.5, key) + slid
        power = (score - score.detach().amax(-1, keepdim=True)).exp()
        share = power * kept[:, None, None]
        counted = self.fault == "mpnet_first_softmax_counts_the_padding" and i == 0
        total = (power if counted else share).sum(-1).transpose(1, 2)
        found = torch.einsum("nhqk,nkhe->nqhe", share, value) / total[..., None]
        return times(found.flatten(2), self.mix[i, 3])

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        kept, slid = (input_ids != PAD).long(), self.slid(input_ids.shape[1])
        x = F.embedding(PAD + kept * kept.cumsum(1), self.places, PAD)
        x = normed(x + F.embedding(input_ids, self.words[:, :-1], PAD), self.norms[0])
        for i in range(len(self.mix)):
            x = normed(x + self.mixed(i, x, slid, attention_mask), self.norms[2 * i + 1])
            loose = self.fault == "mpnet_second_output_norm_has_a_larger_epsilon" and i == 1
            x = x + times(F.gelu(times(x, self.up[i])), self.down[i])
            x = normed(x, self.norms[2 * i + 2], 1e-3 if loose else EPS)
        x = normed(F.gelu(times(x, self.turn)), self.norms[-1])
        return F.linear(x, self.words[:, :-1], self.words[:, -1])


SLOPES, ENCODER, LAYER = ("input gradient", "weight gradient"), "mpnet.encoder", "mpnet.encoder.layer"
TABLE, GELU = f"{ENCODER}.relative_attention_bias", f"{LAYER}.1.intermediate.intermediate_act_fn"
right(task, "mpnet_of_stages_with_time_first", "a tree, norms first, fused and split weights", MpnetOfStages)
right(task, "mpnet_of_stacked_weights", "packed stacks, a softmax by hand, biases slid along", StackedMpnet)
wrong(
    task,
    MpnetOfStages,
    mpnet_positions_start_at_the_padding_index=("a count off by one", "mpnet.embeddings"),
    mpnet_second_gelu_takes_its_gate_for_a_constant=("detached gate", GELU, SLOPES),
    mpnet_last_attention_scales_bias_in_evaluation=("scaled in eval", f"{LAYER}.2.attention.attn", "eval"),
    mpnet_head_norms_before_its_gelu=("two operations swapped", "lm_head"),
)
wrong(
    task,
    StackedMpnet,
    mpnet_far_buckets_rounded_to_the_nearest=("a rounding for a floor", ENCODER),
    mpnet_relative_bias_taken_for_a_constant=("detach", (ENCODER, TABLE), SLOPES),
    mpnet_first_softmax_counts_the_padding=("a sum over the padding", f"{LAYER}.0.attention.attn"),
    mpnet_second_output_norm_has_a_larger_epsilon=("another epsilon", f"{LAYER}.1.output.LayerNorm"),
)
