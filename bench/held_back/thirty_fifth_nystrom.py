"""Two ports of a small Nystromformer: a tree of post-normed branches, and one class of packed weights."""

import math
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _thirty_fifth_nystrom as source
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("thirty_fifth_nystrom", source.NystromformerForMaskedLM, source.sentences, source.masked_words)
HIDDEN, HEADS, LANDMARKS, LENGTH = source.HIDDEN, source.HEADS, source.LANDMARKS, source.LENGTH
VOCABULARY, PAD, KERNEL = source.VOCABULARY, source.PAD, source.KERNEL
DEPTH, SEGMENT = HIDDEN // HEADS, LENGTH // LANDMARKS


class Affine(nn.Module):
    """A product and an offset; the weights of several layers are one after the other."""

    def __init__(self, *layers: nn.Linear):
        super().__init__()
        self.matrix = leaf(torch.cat([layer.weight for layer in layers]).T)
        self.offset = leaf(torch.cat([layer.bias for layer in layers]))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix + self.offset


class Landmarks(nn.Module):
    """Attention by way of the segments' means, beside a convolution along the time of the values."""

    def __init__(self, attention: nn.Module):
        super().__init__()
        own = attention.self
        self.enter, self.leave = Affine(own.query, own.key, own.value), Affine(attention.output.dense)
        self.taps = leaf(own.conv.weight.flatten(1))
        self.constant = self.hasty = self.flipped = False

    def inverse(self, a: Tensor) -> Tensor:
        """Z <- Z (1 + R + R R + R R R / 4), where R is what is left of the identity."""
        most = a.sum(-2).amax(-1)[..., None, None]
        z, one = a.mT / (most.detach() if self.constant else most), torch.eye(a.shape[-1]).to(a)
        for _ in range(5 if self.hasty and not self.training else 6):
            r = one - a @ z
            z = z @ (one + r + r @ r @ (one + r / 4))
        return z

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        q, k, v = self.enter(x).unflatten(2, (3, HEADS, DEPTH)).permute(2, 0, 3, 1, 4)
        q, cut = q / math.sqrt(DEPTH), (LANDMARKS, SEGMENT)
        few_q, few_k = q.unflatten(2, cut).mean(3), k.unflatten(2, cut).mean(3)
        read = (few_q @ k.mT).masked_fill(~real[:, None, None], -math.inf).softmax(-1) @ v
        middle = self.inverse((few_q @ few_k.mT).softmax(-1))
        taps = (self.taps.flip(1) if self.flipped else self.taps).repeat_interleave(DEPTH, 0)[:, None]
        near = F.conv1d(v.mT.flatten(1, 2), taps, padding=KERNEL // 2, groups=HIDDEN).mT
        far = (q @ few_k.mT).softmax(-1) @ (middle @ read)
        return self.leave(far.transpose(1, 2).flatten(2) + near)


class Widening(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.up, self.down = Affine(layer.intermediate.dense), Affine(layer.output.dense)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Branch(nn.Module):
    def __init__(self, body: nn.Module, norm: nn.LayerNorm):
        super().__init__()
        self.body, self.level = body, deepcopy(norm)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        return self.level(x + self.body(x, real))


class NystromOfBranches(Port):
    """Post-normed branches under one list; fused entries, a polynomial of the residue for the inverse."""

    def take(self, model: nn.Module) -> None:
        start, head, fault = model.nystromformer.embeddings, model.cls.predictions, self.fault
        self.words, self.kinds = deepcopy(start.word_embeddings), leaf(start.token_type_embeddings.weight)
        self.places, self.prior = leaf(start.position_embeddings.weight), leaf(head.bias)
        self.first = 0 if fault == "nystrom_positions_count_from_zero" else 2
        self.ready, self.branches = deepcopy(start.LayerNorm), nn.ModuleList()
        for layer in model.nystromformer.encoder.layer:
            self.branches.append(Branch(Landmarks(layer.attention), layer.attention.output.LayerNorm))
            self.branches.append(Branch(Widening(layer), layer.output.LayerNorm))
        bodies = [branch.body for branch in self.branches[::2]]
        bodies[0].constant = fault == "nystrom_first_inverse_starts_from_a_constant_sum"
        bodies[1].hasty = fault == "nystrom_second_inverse_one_iteration_short_in_evaluation"
        bodies[2].flipped = fault == "nystrom_third_value_convolution_with_its_kernel_flipped"
        self.turn, self.last = Affine(head.transform.dense), deepcopy(head.transform.LayerNorm)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        x = self.places[self.first :][: input_ids.shape[1]]
        x = self.ready(x + self.kinds[token_type_ids] + self.words(input_ids))
        for branch in self.branches:
            x = branch(x, attention_mask > 0)
        return self.last(F.gelu(self.turn(x), approximate="tanh")) @ self.words.weight.T + self.prior


def packed(layer: nn.Linear | nn.LayerNorm) -> Tensor:
    return torch.cat([layer.weight.reshape(len(layer.bias), -1), layer.bias[:, None]], 1)


def times(x: Tensor, pack: Tensor) -> Tensor:
    return torch.einsum("...i,oi->...o", x, pack[:, :-1]) + pack[:, -1]


def normed(x: Tensor, pack: Tensor) -> Tensor:
    x = x - x.mean(-1, True)
    return x * (x.square().mean(-1, True) + 1e-5).rsqrt() * pack[:, 0] + pack[:, 1]


def gelu_new(x: Tensor) -> Tensor:
    return x * torch.sigmoid(math.sqrt(8 / math.pi) * x * (1 + 0.044715 * x * x))


class PackedNystrom(Port):
    """Packs of the layers' weights with their biases; the inverse's cubic is written out."""

    def take(self, model: nn.Module) -> None:
        start, head = model.nystromformer.embeddings, model.cls.predictions
        layers, turn = model.nystromformer.encoder.layer, head.transform
        self.words, self.prior = leaf(start.word_embeddings.weight), leaf(head.bias)
        tables = start.position_embeddings, start.token_type_embeddings
        self.tables = leaf(torch.cat([tables[0].weight[2:], tables[1].weight]))
        squares = [y for x in layers for y in x.attention.modules() if isinstance(y, nn.Linear)]
        self.squares = pile(map(packed, [*squares, turn.dense]))
        self.taps = pile(x.attention.self.conv.weight[:, 0, :, 0] for x in layers)
        self.up = pile(packed(x.intermediate.dense) for x in layers)
        self.down = pile(packed(x.output.dense) for x in layers)
        norms = [y.LayerNorm for x in layers for y in (x.attention.output, x.output)]
        self.norms = pile(map(packed, [start.LayerNorm, *norms, turn.LayerNorm]))

    def begin(self, ids: Tensor, types: Tensor) -> Tensor:
        kept = -1 if self.fault == "nystrom_padding_word_takes_its_gradient" else PAD
        pad = (torch.arange(VOCABULARY, device=ids.device) == kept)[:, None]
        words = F.one_hot(ids, VOCABULARY).to(self.words) @ torch.where(pad, self.words.detach(), self.words)
        kinds = self.tables[-2] + types[..., None] * (self.tables[-1] - self.tables[-2])
        return normed(words + self.tables[: ids.shape[1]] + kinds, self.norms[0])

    def attend(self, i: int, x: Tensor, bias: Tensor) -> Tensor:
        pack = self.squares[4 * i : 4 * i + 4]
        q, k, v = (times(x, y).unflatten(2, (HEADS, DEPTH)) for y in pack[:3])
        pool = torch.eye(LANDMARKS).to(x).repeat_interleave(SEGMENT, 0) / SEGMENT
        mean_q, mean_k = (torch.einsum("tm,nthd->nmhd", pool, y) for y in (q, k))
        if i == 1 and self.fault == "nystrom_second_key_landmarks_of_every_fifth_word":
            mean_k = k.unflatten(1, (SEGMENT, LANDMARKS)).mean(1)
        pairs = ((q, mean_k), (mean_q, mean_k), (mean_q, k))
        one, two, three = (torch.einsum("nahd,nbhd->nhab", y, z) / math.sqrt(DEPTH) for y, z in pairs)
        one, two, three = one.softmax(-1), two.softmax(-1), (three + bias[:, None, None]).softmax(-1)
        z = two.mT / two.sum(2).max(2).values[..., None, None]
        for _ in range(6):
            y = two @ z
            z = (13 * z - 15 * z @ y + 7 * z @ y @ y - z @ y @ y @ y) / 4
        far = torch.einsum("nhtm,nhmc->nthc", one @ z, torch.einsum("nhmt,nthc->nhmc", three, v))
        windows = F.pad(v, (0, 0, 0, 0, *[KERNEL // 2] * 2)).unfold(1, KERNEL, 1)
        return times((far + torch.einsum("nthck,hk->nthc", windows, self.taps[i])).flatten(2), pack[3])

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        x = self.begin(input_ids, token_type_ids)
        bias = (attention_mask - 1) * (5.0 if self.fault == "nystrom_padding_masked_by_a_small_bias" else 1e9)
        for i in range(len(self.up)):
            x = normed(x + self.attend(i, x, bias), self.norms[2 * i + 1])
            x = normed(x + times(gelu_new(times(x, self.up[i])), self.down[i]), self.norms[2 * i + 2])
        x = times(x, self.squares[-1])
        x = F.gelu(x) if self.fault == "nystrom_head_with_the_exact_gelu" else gelu_new(x)
        return normed(x, self.norms[-1]) @ self.words.T + self.prior


SLOPES = ("input gradient", "weight gradient")
START, LAYER = "nystromformer.embeddings", "nystromformer.encoder.layer"
HASTE = ("too few turns", f"{LAYER}.1.attention.self", "eval")
FLIP = ("a flipped kernel", f"{LAYER}.2.attention.self.conv")
PADDING = ("a gradient too many", f"{START}.word_embeddings", "weight gradient")
right(task, "nystrom_of_post_normed_branches", "a tree, fused entries, a polynomial", NystromOfBranches)
right(task, "nystrom_of_packed_weights", "packed stacks, einsums, a cubic written out", PackedNystrom)
wrong(
    task,
    NystromOfBranches,
    nystrom_positions_count_from_zero=("an index off by two", START),
    nystrom_first_inverse_starts_from_a_constant_sum=("detach", f"{LAYER}.0.attention.self", SLOPES),
    nystrom_second_inverse_one_iteration_short_in_evaluation=HASTE,
    nystrom_third_value_convolution_with_its_kernel_flipped=FLIP,
)
wrong(
    task,
    PackedNystrom,
    nystrom_padding_word_takes_its_gradient=PADDING,
    nystrom_padding_masked_by_a_small_bias=("a mask too weak", "nystromformer"),
    nystrom_second_key_landmarks_of_every_fifth_word=("other segments", f"{LAYER}.1.attention.self"),
    nystrom_head_with_the_exact_gelu=("another gelu", "cls.predictions.transform.transform_act_fn"),
)
