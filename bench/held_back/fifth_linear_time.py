"""Decaying states rewritten: over all pairs of steps at once, and chunk by chunk."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import method_of
from bench.held_back._fifth_linear_time import (
    GatedForecast,
    GatedState,
    ReceptiveDecoder,
    TimeMix,
    gated_states,
    receptive,
)
from bench.held_back._fifth_ports import SAME, centred, flattened, gently, pairs, scaled
from bench.held_back._fourth_ports import Port, leaf, pile, wrong


class Pairs(Port):
    """The weighed average as a softmax over all pairs of steps; the mixes of a kind stacked."""

    def take(self, model: ReceptiveDecoder) -> None:
        self.table, self.head = leaf(model.embed.weight), leaf(model.head.weight.T)
        self.ends = pile(torch.stack([norm.weight, norm.bias]) for norm in (model.first, model.norm))
        self.layers = nn.ModuleList()
        for block in model.blocks:
            t, c = block.time, block.channel
            w = {
                "norms": torch.stack([torch.stack([n.weight, n.bias]) for n in (block.norm1, block.norm2)]),
                "age": torch.stack([t.decay, t.bonus], 1),
                "time_mix": torch.stack([t.mix_gate, t.mix_key, t.mix_value]),
                "time_in": torch.stack([t.gate.weight, t.key.weight, t.value.weight]),
                "time_out": t.output.weight,
                "channel_mix": torch.stack([c.mix_gate, c.mix_key]),
                "channel_in": torch.cat([c.gate.weight, c.key.weight]),
                "channel_out": c.value.weight.T,
            }
            self.layers.append(nn.ParameterDict({name: leaf(value) for name, value in w.items()}))

    def average(self, i: int, k: Tensor, v: Tensor) -> Tensor:
        decay, bonus = self.layers[i]["age"].unbind(1)
        rate = decay.exp()
        if self.fault == "decay_without_its_chain_factor" and i == 2:
            rate = decay + (rate - decay).detach()
        steps = torch.arange(k.shape[1])
        age = steps[:, None] - steps - (0 if self.fault == "decay_starts_a_step_early" and i == 1 else 1)
        weights = k[:, None] - age[..., None].to(k) * rate
        now = (k + bonus)[:, None].expand_as(weights)
        weights = torch.where(torch.eye(len(steps), dtype=torch.bool)[..., None], now, weights)
        weights = weights.masked_fill((steps > steps[:, None])[..., None], float("-inf"))
        return torch.einsum("ntsc,nsc->ntc", weights.softmax(2), v)

    def time(self, i: int, x: Tensor) -> Tensor:
        w, past = self.layers[i], F.pad(x[:, :-1], (0, 0, 1, 0))
        mix = w["time_mix"][:, None, None]
        gate, k, v = torch.einsum("sntc,sdc->sntd", mix * x + (1 - mix) * past, w["time_in"])
        return (torch.sigmoid(gate) * self.average(i, k, v)) @ w["time_out"].T

    def channel(self, i: int, x: Tensor) -> Tensor:
        w, past = self.layers[i], torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
        gate, key = (past + m * (x - past) for m in w["channel_mix"])
        gate, key = gate @ w["channel_in"][:16].T, key @ w["channel_in"][16:].T
        return gate.sigmoid() * ((key * key.relu()) @ w["channel_out"])

    def forward(self, drawn: Tensor) -> Tensor:
        x = centred(self.table[drawn], *self.ends[0])
        for i, w in enumerate(self.layers):
            x = x + self.time(i, centred(x, *w["norms"][0]))
            x = x + self.channel(i, centred(x, *w["norms"][1]))
        return centred(x, *self.ends[1]) @ self.head


class Chunks(Port):
    """Heads first; within four steps by pairs, from one four to the next by the state."""

    def take(self, model: GatedForecast) -> None:
        ends = {n.replace(".", "_"): p for n, p in model.named_parameters() if not n.startswith("blocks")}
        self.ends = nn.ParameterDict({name: leaf(p) for name, p in ends.items()})
        self.layers, self.mixes = nn.ModuleList(), nn.ParameterList()
        for block in model.blocks:
            m = block.mix
            by_head = [f.weight.view(2, -1, 16) for f in (m.q, m.k, m.fade, m.v, m.swish)]
            self.mixes.append(leaf(torch.cat(by_head, 1)))
            self.mixes.append(
                leaf(torch.cat([f.bias.view(2, -1) for f in (m.q, m.k, m.fade, m.v, m.swish)], 1))
            )
            kept = flattened(block)
            for name in ("q", "k", "fade", "v", "swish"):
                del kept[f"mix_{name}_weight"], kept[f"mix_{name}_bias"]
            self.layers.append(kept)

    def scan(self, i: int, q: Tensor, k: Tensor, v: Tensor, fade: Tensor) -> Tensor:
        length = q.shape[2]
        q, k, v, fade = (
            F.pad(y, (0, 0, 0, -length % 4)).unflatten(2, (-1, 4)).unbind(2) for y in (q, k, v, fade)
        )
        state, y = torch.zeros_like(k[0].mT @ v[0]), []
        for q_, k_, v_, fade_ in zip(q, k, v, fade, strict=True):
            age = fade_.cumsum(2)
            within = ((q_ * age.exp()) @ (k_ * (-age).exp()).mT).tril()
            y.append(within @ v_ + (q_ * age.exp()) @ state)
            rest = age[:, :, -1:] - age
            if self.fault == "keys_not_faded_to_the_end" and i == 1:
                rest = torch.zeros_like(rest)
            state = state * age[:, :, -1, :, None].exp() + (k_ * rest.exp()).mT @ v_
            if self.fault == "state_cut_between_chunks" and i == 0:
                state = state.detach()
            if self.fault == "state_kept_in_bfloat16" and i == 1:
                state = state.bfloat16().to(q_)
        return torch.cat(y, 2)[:, :, :length]

    def mix(self, i: int, x: Tensor) -> Tensor:
        w = self.layers[i]
        packed = torch.einsum("ntc,hdc->nhtd", x, self.mixes[2 * i]) + self.mixes[2 * i + 1][:, None]
        q, k, fade, v, swish = packed.split([4, 4, 4, 8, 8], 3)
        y = scaled(self.scan(i, q / 2, k, v, F.logsigmoid(fade) / 2), w["mix_norm_weight"], 1e-5)
        y = (y * swish * swish.sigmoid()).transpose(1, 2).flatten(2)
        return F.linear(y, w["mix_out_weight"], w["mix_out_bias"])

    def forward(self, x: Tensor) -> Tensor:
        e = self.ends
        x = x @ e["enter_weight"].T + e["enter_bias"]
        for i, w in enumerate(self.layers):
            x = x + self.mix(i, centred(x, w["norm1_weight"], w["norm1_bias"]))
            h = centred(x, w["norm2_weight"], w["norm2_bias"])
            h = F.linear(h, w["mlp_0_weight"], w["mlp_0_bias"])
            h = h * (1.702 * h).sigmoid() if self.fault == "gelu_by_a_sigmoid" and i == 1 else F.gelu(h)
            x = x + F.linear(h, w["mlp_2_weight"], w["mlp_2_bias"])
        return F.linear(centred(x, e["norm_weight"], e["norm_bias"]), e["head_weight"], e["head_bias"])


pairs(SAME, receptive, Pairs, decaying_average_by_softmax="recurrence as a softmax")
wrong(
    receptive,
    Pairs,
    decay_starts_a_step_early=("off by one", "blocks.1.time"),
    decay_without_its_chain_factor=("missing factor of a gradient", "blocks.2.time", "weight gradient"),
)
pairs(SAME, gated_states, Chunks, {"optimizer": gently}, gated_states_by_chunks="recurrence by chunks")
pairs(
    "reduced_precision",
    gated_states,
    Chunks,
    {"optimizer": gently},
    state_kept_in_bfloat16=("state in fewer bits", "blocks.1.mix"),
)
pairs(
    "bug",
    gated_states,
    Chunks,
    {"optimizer": gently},
    gelu_by_a_sigmoid=("exact against approximate GELU", "blocks.1.mlp.1"),
    keys_not_faded_to_the_end=("missing decay", "blocks.1.mix"),
    state_cut_between_chunks=(
        "one detach too many",
        "blocks.0.mix",
        ("input gradient", "weight gradient"),
    ),
)


@method_of("blocks.1.time", SAME, "exponents without a shift", receptive, method="average")
def exponents_left_as_they_are(self: TimeMix, k: Tensor, v: Tensor) -> Tensor:
    raised, fade, total, weight, y = k.exp(), torch.exp(-self.decay.exp()), 0.0, 0.0, []
    for t in range(k.shape[1]):
        now = raised[:, t] * self.bonus.exp()
        y.append((total + now * v[:, t]) / (weight + now))
        total, weight = fade * total + raised[:, t] * v[:, t], fade * weight + raised[:, t]
    return torch.stack(y, 1)


@method_of("blocks.0.mix", SAME, "recurrence over all pairs", gated_states, method="mixed", optimizer=gently)
def gated_states_by_pairs(self: GatedState, q: Tensor, k: Tensor, v: Tensor, fade: Tensor) -> Tensor:
    age = fade.cumsum(1)
    earlier = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()[..., None, None]
    faded = (age[:, :, None] - age[:, None]).masked_fill(~earlier, float("-inf")).exp()
    return torch.einsum("nthd,nshd,ntshd,nshe->nthe", q, k, faded, v)
