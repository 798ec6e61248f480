"""Two ports of a small BitNet: a tree that multiplies whole numbers, and one class of packed weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _thirty_first_bit_net as net
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("thirty_first_bit_net", net.BitNetForCausalLM, net.counting, net.next_tokens)
WIDTH, INNER, HEADS, KEYS, HEAD = net.WIDTH, net.INNER, net.HEADS, net.KEYS, net.HEAD
SLOPES = ("input gradient", "weight gradient")


def through(x: Tensor, low: int, high: int) -> Tensor:
    """Whole numbers of the range, whose gradient passes unchanged."""
    return x + (x.round().clamp(low, high) - x).detach()


class Gain(nn.Module):
    def __init__(self, norm: nn.Module):
        super().__init__()
        self.gain = leaf(norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain / (x.square().mean(-1, True) + net.EPS).sqrt()


class Ternary(nn.Module):
    """Whole numbers times whole numbers; the two scales come after the product."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.before, self.table = Gain(layer.rms_norm), leaf(layer.weight.T)
        self.whole = self.stops = self.exact = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        peak = x.abs().amax(None if self.whole else -1, True).clamp(min=1e-5).detach()
        unit = self.table.abs().mean().clamp(min=1e-5).detach()
        table = self.table / unit
        table = through(table.clamp(-1, 1) if self.stops else table, -1, 1)
        steps, exact = x * (127 / peak), self.exact and not self.training
        steps = steps if exact else through(steps, -128, 127)
        return steps @ table * (peak * unit / 127)


class Looking(nn.Module):
    """Causal attention of [N, T, C] with its norm before; pairs of features turn as complex numbers."""

    def __init__(self, norm: nn.Module, layer: nn.Module):
        super().__init__()
        self.before, self.after = Gain(norm), Gain(layer.attn_sub_norm)
        self.ask, self.tell = Ternary(layer.q_proj), Ternary(layer.k_proj)
        self.give, self.out = Ternary(layer.v_proj), Ternary(layer.o_proj)
        self.neighbours = False

    def turn(self, x: Tensor, turns: Tensor) -> Tensor:
        pairs = x.unflatten(-1, (-1, 2)) if self.neighbours else x.unflatten(-1, (2, -1)).transpose(-1, -2)
        pairs = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turns)
        return (pairs if self.neighbours else pairs.transpose(-1, -2)).flatten(-2)

    def forward(self, x: Tensor, turns: Tensor, hidden: Tensor) -> Tensor:
        y = self.before(x)
        q = self.turn(self.ask(y).unflatten(2, (KEYS, -1, HEAD)), turns[:, None, None])
        k = self.turn(self.tell(y).unflatten(2, (KEYS, HEAD)), turns[:, None])
        v = self.give(y).unflatten(2, (KEYS, HEAD))
        scores = torch.einsum("nqgrd,nkgd->ngrqk", q, k) / HEAD**0.5
        weights = scores.masked_fill(hidden[:, None, None], -torch.inf).softmax(-1)
        return x + self.out(self.after(torch.einsum("ngrqk,nkgd->nqgrd", weights, v).flatten(2)))


class Thinking(nn.Module):
    def __init__(self, norm: nn.Module, layer: nn.Module):
        super().__init__()
        self.before, self.middle = Gain(norm), Gain(layer.ffn_sub_norm)
        self.gate, self.up, self.down = map(Ternary, (layer.gate_proj, layer.up_proj, layer.down_proj))

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        y = self.before(x)
        gate = self.gate(y)
        return x + self.down(self.middle(gate * gate.relu() * self.up(y)))


class BitNetOfWholeNumbers(Port):
    """Residual halves of layers, one after the other, whose products are of whole numbers."""

    def take(self, model: nn.Module) -> None:
        inner, fault, self.halves = model.model, self.fault, nn.ModuleList()
        for x in inner.layers:
            looking, thinking = (x.input_layernorm, x.self_attn), (x.post_attention_layernorm, x.mlp)
            self.halves.extend([Looking(*looking), Thinking(*thinking)])
        self.words, self.last = leaf(inner.embed_tokens.weight), Gain(inner.norm)
        self.register_buffer("rates", inner.rotary_emb.inv_freq.clone())
        self.halves[0].neighbours = fault == "bit_net_first_attention_turns_neighbouring_features"
        self.halves[3].up.exact = fault == "bit_net_second_up_unrounded_in_evaluation"
        self.halves[3].down.whole = fault == "bit_net_second_down_projection_scaled_by_the_batch"
        self.halves[5].down.stops = fault == "bit_net_last_down_stops_at_the_clamp"

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x, places = self.words[input_ids], torch.arange(input_ids.shape[1], device=input_ids.device)
        angles = torch.outer(places.to(x), self.rates)
        turns = torch.polar(torch.ones_like(angles), angles)
        hidden = (places > places[:, None]) | (attention_mask == 0)[:, None]
        for half in self.halves:
            x = half(x, turns, hidden)
        return self.last(x) @ self.words.T


GAINS = (*[WIDTH] * 4, *[HEADS * HEAD] * 2, *[WIDTH] * 3, *[INNER] * 2)
LOOKING = [HEADS * HEAD, KEYS * HEAD, KEYS * HEAD, HEADS * HEAD]


def gains(layer: nn.Module) -> Tensor:
    a, m = layer.self_attn, layer.mlp
    norms = [layer.input_layernorm, *(x.rms_norm for x in (a.q_proj, a.k_proj, a.v_proj)), a.attn_sub_norm]
    norms += [a.o_proj.rms_norm, layer.post_attention_layernorm, m.gate_proj.rms_norm, m.up_proj.rms_norm]
    return torch.cat([x.weight for x in (*norms, m.ffn_sub_norm, m.down_proj.rms_norm)])


class PackedBitNet(Port):
    """Three stacks by layer: of the norms' weights, of attention's and of the gated layers' rows."""

    def take(self, model: nn.Module) -> None:
        layers, self.words = model.model.layers, leaf(model.lm_head.weight)
        some, more = [x.self_attn for x in layers], [x.mlp for x in layers]
        self.gains, self.end = pile(map(gains, layers)), leaf(model.model.norm.weight)
        rows = ((x.q_proj.weight, x.k_proj.weight, x.v_proj.weight, x.o_proj.weight.T) for x in some)
        wide = ((x.gate_proj.weight, x.up_proj.weight, x.down_proj.weight.T) for x in more)
        self.looking, self.thinking = pile(map(torch.cat, rows)), pile(map(torch.cat, wide))
        rates, other = model.model.rotary_emb.inv_freq, net.THETA ** -torch.linspace(0, 1, HEAD // 2)
        wide = self.fault == "bit_net_rotary_rates_end_at_the_base"
        self.register_buffer("rates", other.to(rates) if wide else rates.clone())

    def norm(self, x: Tensor, gain: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], gain, net.EPS)

    def bits(self, x: Tensor, gain: Tensor, rows: Tensor, leaky: bool = False) -> Tensor:
        x = self.norm(x, gain)
        scale = 127 / x.abs().amax(-1, keepdim=True).clamp(min=1e-5)
        whole = (x * scale).round().clamp(-128, 127)
        x = (x * scale + (whole - x * scale).detach()) / scale if leaky else x + (whole / scale - x).detach()
        size = rows.abs().mean().clamp(min=1e-5)
        ternary = (rows.abs() > size / 2) * rows.sign() * size
        return x @ (rows + (ternary - rows).detach()).T

    def attend(self, i: int, x: Tensor, cos: Tensor, sin: Tensor, hidden: Tensor) -> Tensor:
        first, *each, sub, out = self.gains[i].split(GAINS)[:6]
        *rows, last = self.looking[i].split(LOOKING)
        y, leaky = self.norm(x, first), self.fault == "bit_net_first_value_scale_has_a_gradient" and i == 0
        q, k, v = map(self.bits, [y] * 3, each, rows, [False, False, leaky])
        q, k, v = (z.unflatten(2, (-1, HEAD)).movedim(2, 0) for z in (q, k, v))
        (a, b), (c, d) = q.chunk(2, -1), k.chunk(2, -1)
        q = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        k = torch.cat([c * cos - d * sin, d * cos + c * sin], -1)
        other = self.fault == "bit_net_second_scores_by_width_over_heads" and i == 1
        size, mixed = WIDTH // HEADS if other else HEAD, []
        for head in range(HEADS):
            own = head * KEYS // HEADS
            scores = (q[head] @ k[own].mT / size**0.5).masked_fill(hidden, -torch.inf)
            mixed.append(scores.softmax(-1) @ v[own])
        return x + self.bits(self.norm(torch.cat(mixed, -1), sub), out, last.T)

    def think(self, i: int, x: Tensor) -> Tensor:
        first, one, two, sub, out = self.gains[i].split(GAINS)[6:]
        (gate, up, down), y = self.thinking[i].chunk(3), self.norm(x, first)
        power = 1 if self.fault == "bit_net_last_gate_left_unsquared" and i == net.LAYERS - 1 else 2
        y = self.bits(y, one, gate).clamp(min=0) ** power * self.bits(y, two, up)
        return x + self.bits(self.norm(y, sub), out, down.T)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x, long = F.embedding(input_ids, self.words), input_ids.shape[1]
        angles = torch.arange(long, device=x.device)[:, None] * self.rates
        hidden = attention_mask[:, None].expand(-1, long, -1).tril() == 0
        for i in range(net.LAYERS):
            x = self.think(i, self.attend(i, x, angles.cos(), angles.sin(), hidden))
        return F.linear(self.norm(x, self.end), self.words)


right(task, "bit_net_of_whole_numbers", "a tree of halves, scales after the product", BitNetOfWholeNumbers)
right(task, "bit_net_of_packed_weights", "packed stacks, loops over heads", PackedBitNet)
wrong(
    task,
    BitNetOfWholeNumbers,
    bit_net_first_attention_turns_neighbouring_features=("another pairing", "model.layers.0.self_attn"),
    bit_net_second_up_unrounded_in_evaluation=("unrounded", "model.layers.1.mlp.up_proj", "eval"),
    bit_net_second_down_projection_scaled_by_the_batch=("another axis", "model.layers.1.mlp.down_proj"),
    bit_net_last_down_stops_at_the_clamp=("a clamp", "model.layers.2.mlp.down_proj", "weight gradient"),
)
wrong(
    task,
    PackedBitNet,
    bit_net_first_value_scale_has_a_gradient=("no detach", "model.layers.0.self_attn.v_proj", SLOPES),
    bit_net_second_scores_by_width_over_heads=("another scale", "model.layers.1.self_attn"),
    bit_net_last_gate_left_unsquared=("another activation", "model.layers.2.mlp.act_fn"),
    bit_net_rotary_rates_end_at_the_base=("another spacing", "model.rotary_emb"),
)
