"""Two ports of a small MEGA: a tree whose averages are recurrences, and one class of stacked weights."""

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fortieth_mega import CHUNK, MegaForMaskedLM, masked_words, sentences
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("fortieth_mega", MegaForMaskedLM, sentences, masked_words)


class Average(nn.Module):
    """The moving average as a state [N, D, n] that is stepped forwards, then another backwards."""

    def __init__(self, ema: nn.Module):
        super().__init__()
        factors, shape = [*ema.parameters()], (2, -1, ema.damping_factor.shape[1])
        self.delta, self.alpha, self.beta, self.eta = (leaf(x.view(shape)) for x in factors[:4])
        self.omega = leaf(ema.residual_weight)
        self.later = False

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        delta, total = self.delta.sigmoid(), x * self.omega
        kept, given, seen = 1 - delta * self.alpha.sigmoid(), delta * self.beta, x * real[..., None]
        for way in (0, 1):
            state, found = x.new_zeros(len(x), *self.beta[0].shape), []
            for now in (seen.flip(1) if way else seen).unbind(1):
                before, state = state, kept[way] * state + given[way] * now[..., None]
                read = kept[way] * before if way and self.later else state
                found.append((read * self.eta[way]).sum(-1) / self.beta.shape[2] ** 0.5)
            found = torch.stack(found[::-1] if way else found, 1)
            total = total + found
        return F.silu(total)


class Mixer(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.first, self.soft = layer.config.normalize_before, layer.config.attention_activation == "softmax"
        self.level, self.average = deepcopy(layer.norm.norm), Average(layer.ema_gate)
        self.value, self.back = deepcopy(layer.v_proj), deepcopy(layer.h_proj)
        self.table, self.turned, self.whole = leaf(layer.rel_pos_bias.rel_pos_bias), False, False
        width, middle = layer.h_proj.weight.shape
        self.sizes, self.wide = [width, layer.qk_bias.shape[1], middle, width], deepcopy(layer.mx_proj)
        self.ask, self.tell = (pile([layer.qk_weight[i], layer.qk_bias[i]]) for i in (0, 1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        score, place = torch.einsum("nqs,nks->nqk", q, k), torch.arange(q.shape[1], device=q.device)
        gap = place - place[:, None]
        bias = self.table[len(self.table) // 2 + (-gap if self.turned else gap)]
        if self.soft:
            part = (score / q.shape[2] ** 0.5 + bias).exp() * real[:, None]
            return part @ v / part.sum(2, keepdim=True)
        score = score / real.sum(1)[:, None, None] + bias
        part = torch.special.ndtr((score - 0.707107) / 0.282095)
        return part @ (v * real[..., None])

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        y = self.level(x) if self.first else x
        gate, z, reset, own = self.wide(self.average(y, real)).split(self.sizes, -1)
        gate, z, reset, v = gate.sigmoid(), F.silu(z), F.silu(reset), F.silu(self.value(y))
        q, k = (torch.addcmul(w[1], z, w[0]) for w in (self.ask, self.tell))
        size = x.shape[1] if self.whole and not self.training else CHUNK
        pieces = zip(*(t.split(size, 1) for t in (q, k, v, real)), strict=True)
        read = torch.cat([self.attend(*piece) for piece in pieces], 1)
        out = gate * F.silu(own + self.back(reset * read)) + (1 - gate) * x
        return out if self.first else self.level(out)


class Forward(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.level, self.first = deepcopy(layer.norm.norm), layer.config.normalize_before
        self.up, self.down = deepcopy(layer.fc1), deepcopy(layer.fc2)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.down(F.silu(self.up(self.level(x) if self.first else x)))
        return y if self.first else self.level(y)


class MegaOfRecurrences(Port):
    """Mixers and feed-forward parts in a row, with the sentence first; averages step by step."""

    def take(self, model: MegaForMaskedLM) -> None:
        fault, layers = self.fault, model.mega.layers
        self.words = leaf(model.mega.embedding_layer.weight)
        self.mixers = nn.ModuleList(Mixer(x.mega_layer) for x in layers)
        self.forwards = nn.ModuleList(Forward(x.nffn) for x in layers)
        self.head = deepcopy(model.mlm_head)
        self.mixers[0].average.later = fault == "mega_first_backward_average_leaves_out_the_present"
        self.mixers[1].whole = fault == "mega_second_attention_not_chunked_in_evaluation"
        self.mixers[1].turned = fault == "mega_second_bias_by_query_minus_key"
        if fault == "mega_last_feed_forward_normalised_before":
            self.forwards[2].first = True

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x, real = self.words[input_ids], attention_mask.to(self.words)
        for mixer, forward in zip(self.mixers, self.forwards, strict=True):
            x = forward(mixer(x, real))
        return self.head(x)


def packed(layer: nn.Linear) -> Tensor:
    return torch.cat([layer.weight, layer.bias[:, None]], 1)


def through(x: Tensor, rows: Tensor) -> Tensor:
    return F.linear(x, rows[:, :-1], rows[:, -1])


class StackedMega(Port):
    """Stacks by layer; the averages are products with a matrix of [T, T], the chunks one masked square."""

    def take(self, model: MegaForMaskedLM) -> None:
        layers = model.mega.layers
        mixers, nets = [x.mega_layer for x in layers], [x.nffn for x in layers]
        self.words, self.head = leaf(model.mega.embedding_layer.weight), leaf(packed(model.mlm_head))
        self.omega = pile(x.ema_gate.residual_weight for x in mixers)
        self.wide = pile(torch.cat([packed(x.v_proj), packed(x.mx_proj)]) for x in mixers)
        rows = ((packed(x.h_proj), packed(y.fc1), packed(y.fc2)) for x, y in zip(mixers, nets, strict=True))
        self.back, self.up, self.down = map(pile, zip(*rows, strict=True))
        self.ema = pile(torch.stack([p.flatten(1) for p in [*x.ema_gate.parameters()][:4]]) for x in mixers)
        self.qk = pile(torch.stack([x.qk_weight, x.qk_bias]) for x in mixers)
        self.bias = pile(x.rel_pos_bias.rel_pos_bias for x in mixers)
        norms = [[*x.norm.parameters()] for pair in zip(mixers, nets, strict=True) for x in pair]
        self.norms = nn.ParameterList(leaf(torch.stack(x)) for x in norms)

    def norm(self, i: int, x: Tensor) -> Tensor:
        gain = self.norms[i]
        if len(gain) == 2:
            return F.layer_norm(x, x.shape[-1:], *gain)
        return F.rms_norm(x, x.shape[-1:], eps=1e-5) * gain

    def average(self, i: int, x: Tensor, real: Tensor, gap: Tensor) -> Tensor:
        (delta, alpha), (beta, eta) = self.ema[i][:2].sigmoid(), self.ema[i][2:]
        power = (1 - delta * alpha)[..., None, None] ** gap.abs()
        both = torch.einsum("dn,dntu->dtu", delta * beta * eta / beta.shape[1] ** 0.5, power)
        ahead, back = both.chunk(2)
        taps = ahead * (gap >= 0) + back * (gap <= 0)
        return F.silu(torch.einsum("dtu,nud->ntd", taps, x * real[..., None]) + x * self.omega[i])

    def weights(self, i: int, q: Tensor, k: Tensor, real: Tensor, gap: Tensor) -> Tensor:
        place = torch.arange(len(gap), device=gap.device) // CHUNK
        near = (place == place[:, None]) * real[:, None]
        score, bias = q @ k.mT, self.bias[i][self.bias.shape[1] // 2 - gap]
        if i == 0:
            return (score * q.shape[2] ** -0.5 + bias).masked_fill(near == 0, -torch.inf).softmax(2)
        counted = self.fault == "mega_last_scores_by_the_size_of_the_chunk" and i == 2
        score = score / (CHUNK if counted else near.sum(2, keepdim=True)) + bias
        mu = 0.70 if self.fault == "mega_second_laplace_at_seven_tenths" and i == 1 else 0.707107
        return torch.erfc((mu - score) / (0.282095 * 2**0.5)) / 2 * near

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x, real = F.embedding(input_ids, self.words), attention_mask.to(self.words)
        place = torch.arange(x.shape[1], device=x.device)
        gap, middle, width = place[:, None] - place, self.back.shape[2] - 1, x.shape[2]
        for i in range(3):
            y = self.norm(2 * i, x) if i < 2 else x
            v = F.silu(through(y, self.wide[i, :middle]))
            base = through(self.average(i, y, real, gap), self.wide[i, middle:])
            gate, z, own = base[..., :width].sigmoid(), F.silu(base[..., width:-width]), base[..., -width:]
            if self.fault == "mega_second_update_gate_for_a_constant" and i == 1:
                gate = gate.detach()
            z, reset = z[..., :-middle], z[..., -middle:]
            q, k = (z * self.qk[i, 0, j] + self.qk[i, 1, j] for j in (0, 1))
            if self.fault == "mega_first_query_and_key_change_places" and i == 0:
                q, k = k, q
            read = self.weights(i, q, k, real, gap) @ v
            x = x + gate * (F.silu(own + through(reset * read, self.back[i])) - x)
            x = self.norm(4, x) if i == 2 else x
            y = self.norm(2 * i + 1, x) if i < 2 else x
            x = x + through(F.silu(through(y, self.up[i])), self.down[i])
            x = self.norm(5, x) if i == 2 else x
        return through(x, self.head)


SLOPES = ("input gradient", "weight gradient")
right(task, "mega_of_recurrences", "a tree, averages step by step, chunks one by one", MegaOfRecurrences)
right(task, "mega_of_stacked_weights", "packed stacks, averages as matrices, masked chunks", StackedMega)
wrong(
    task,
    MegaOfRecurrences,
    mega_first_backward_average_leaves_out_the_present=("off by one", "mega.layers.0.mega_layer.ema_gate"),
    mega_second_attention_not_chunked_in_evaluation=("no chunks in eval", "mega.layers.1.mega_layer", "eval"),
    mega_second_bias_by_query_minus_key=("transposed bias", "mega.layers.1.mega_layer.rel_pos_bias"),
    mega_last_feed_forward_normalised_before=("pre-norm for post-norm", "mega.layers.2.nffn"),
)
wrong(
    task,
    StackedMega,
    mega_first_query_and_key_change_places=("swapped", "mega.layers.0.mega_layer"),
    mega_second_laplace_at_seven_tenths=("rounded", "mega.layers.1.mega_layer.attention_activation"),
    mega_second_update_gate_for_a_constant=("detach", "mega.layers.1.mega_layer", SLOPES),
    mega_last_scores_by_the_size_of_the_chunk=("padding counted", "mega.layers.2.mega_layer"),
)
