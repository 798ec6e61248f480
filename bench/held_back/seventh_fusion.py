"""Ports of a temporal fusion transformer: gates as products, all variables at once, recurrence by hand."""

import torch
from torch import Tensor, nn

from bench.held_back._fifth_tables import layer_norm
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._seventh_fusion import GRN, HEADS, PAST, WIDTH, Fusion, GateNorm, Select, pinball, sales
from bench.held_back._sixth_ports import few

fusion = few("seventh_fusion", Fusion, sales, pinball)


def bent(x: Tensor) -> Tensor:
    """An ELU."""
    return x.relu() + x.clamp(max=0).expm1()


class Residual(nn.Module):
    """A gated residual network of [..., C], or many of [V, N, C] at once from a list of them."""

    def __init__(self, grns: list[GRN | GateNorm], swapped: bool = False):
        super().__init__()
        self.swapped, names = swapped, [name for name, _ in grns[0].named_parameters()]
        self.w = nn.ParameterDict()
        for name in names:
            values = [grn.get_parameter(name) for grn in grns]
            values = [value.T if value.ndim == 2 else value for value in values]
            short = name.replace(".weight", "").replace(".bias", "_b").replace(".", "_")
            many = [value if value.ndim == 2 else value[None] for value in values]
            self.w[short] = leaf(values[0]) if len(grns) == 1 else pile(many)

    def join(self, x: Tensor, skip: Tensor) -> Tensor:
        gated = x @ self.w["gate_fc"] + self.w["gate_fc_b"]
        value, gate = gated.tensor_split(2, -1)
        if self.swapped:
            value, gate = gate, value
        return layer_norm(skip + value / (1 + (-gate).exp()), self.w["norm"], self.w["norm_b"])

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        w = self.w
        h = x @ w["fc1"] + w["fc1_b"]
        if context is not None:
            h = h + context @ w["context"]
        skip = x @ w["skip"] + w["skip_b"] if "skip" in w else x
        return self.join(bent(h) @ w["fc2"] + w["fc2_b"], skip)


class Choose(nn.Module):
    """All variables' networks in one; variables first."""

    def __init__(self, select: Select, held: bool = False, blind: bool = False):
        super().__init__()
        self.held, self.blind = held, blind
        self.scale = pile(lift.weight[:, 0] for lift in select.lifts)
        self.shift = pile(lift.bias for lift in select.lifts)
        self.weigh, self.each = Residual([select.weigh]), Residual([*select.each])

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        features = x[..., None] * self.scale + self.shift
        shares = self.weigh(features.flatten(2), None if self.blind else context[:, None])
        shares = shares.softmax(2).detach() if self.held else shares.softmax(2)
        made = self.each(features.permute(2, 0, 1, 3).flatten(1, 2)).unflatten(1, x.shape[:2])
        return torch.einsum("vntc,ntv->ntc", made, shares)


class Memory(nn.Module):
    """An LSTM by hand, time first: [T, N, C] and a state -> states and the last state."""

    def __init__(self, lstm: nn.LSTM):
        super().__init__()
        self.w = leaf(torch.cat([lstm.weight_ih_l0, lstm.weight_hh_l0], 1).T)
        self.b = pile([lstm.bias_ih_l0, lstm.bias_hh_l0])

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        states = []
        for row in x:
            i, f, g, o = (torch.cat([row, h], 1) @ self.w + self.b.sum(0)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            states.append(h)
        return torch.stack(states), h, c


class FusionInOneGo(Port):
    """Stacked variables, one product for queries, keys and values, heads by Einstein's sums."""

    def take(self, model: Fusion) -> None:
        self.enter, self.enter_b = leaf(model.fixed.weight.T), leaf(model.fixed.bias)
        self.views = Residual([*model.contexts])
        self.was = Choose(model.past, held=self.fault == "past_shares_learn_nothing")
        self.comes = Choose(model.future, blind=self.fault == "future_chosen_without_its_context")
        self.reader, self.writer = Memory(model.encoder), Memory(model.decoder)
        self.near, self.met, self.final = (Residual([m]) for m in (model.local, model.attended, model.last))
        self.rich = Residual([model.enrich], swapped=self.fault == "halves_of_one_gate_swapped")
        self.feed = Residual([model.feed])
        at = model.attention
        self.qkv = leaf(torch.cat([at.q.weight, at.k.weight, at.v.weight]).T)
        self.qkv_b = leaf(torch.cat([at.q.bias, at.k.bias, at.v.bias]))
        self.out = leaf(at.out.weight.T)
        self.leave, self.leave_b = leaf(model.quantiles.weight.T), leaf(model.quantiles.bias)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (x @ self.qkv + self.qkv_b).split([WIDTH, WIDTH, WIDTH // HEADS], 2)
        q, k = (each.unflatten(2, (HEADS, -1)) for each in (q, k))
        scale = WIDTH if self.fault == "interpretable_scores_over_the_whole_width" else WIDTH // HEADS
        scores = torch.einsum("nqhc,nkhc->nhqk", q, k) * scale**-0.5
        steps = torch.arange(x.shape[1], device=x.device)
        scores = torch.where(steps[:, None] >= steps, scores, torch.full_like(scores, -torch.inf))
        return torch.einsum("nhqk,nkc->nqc", scores.softmax(3) / HEADS, v) @ self.out

    def forward(self, fixed: Tensor, past: Tensor, future: Tensor) -> Tensor:
        views = self.views((fixed @ self.enter + self.enter_b).expand(4, -1, -1))
        select, h, c, enrich = views
        chosen = [self.was(past, select), self.comes(future, select)]
        seen, h, c = self.reader(chosen[0].transpose(0, 1), h, c)
        if self.fault == "future_starts_from_the_first_memory":
            c = views[2]
        ahead, _, _ = self.writer(chosen[1].transpose(0, 1), h, c)
        x = self.near.join(torch.cat([seen, ahead]).transpose(0, 1), torch.cat(chosen, 1))
        rich = self.rich(x, enrich[:, None])
        y = self.met.join(self.attend(rich)[:, PAST:], rich[:, PAST:])
        return self.final.join(self.feed(y), x[:, PAST:]) @ self.leave + self.leave_b


right(fusion, "fusion_with_all_variables_at_once", "stacked networks, recurrence by hand", FusionInOneGo)
BOTH = ("input gradient", "weight gradient")
wrong(
    fusion,
    FusionInOneGo,
    future_chosen_without_its_context=("a term missing", ("future.weigh", "future")),
    future_starts_from_the_first_memory=("state of another point in time", ("", "decoder")),
    halves_of_one_gate_swapped=("swapped halves", "enrich.gate"),
    interpretable_scores_over_the_whole_width=("wrong scale", "attention"),
    past_shares_learn_nothing=("a detach too many", "past", BOTH),
)
