"""Two ports of a temporal fusion transformer: modules with the time first; named weights in functions."""

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _eleventh_forecaster as tft
from bench.held_back._eleventh_forecaster import HEADS, HISTORY, LAYERS, WIDTH
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, wrong
from bench.held_back._sixth_ports import few

forecasts = few("eleventh_forecaster", tft.TemporalFusionTransformer, tft.series, tft.quantile_loss)
CONTEXTS = ("variable_selection", "initial_hidden_lstm", "initial_cell_lstm", "enrichment")


class Closing(nn.Module):
    def __init__(self, block: nn.Module, crossed: bool = False):
        super().__init__()
        self.both, self.norm, self.crossed = block.glu.fc, block.norm, crossed

    def forward(self, x: Tensor, shortcut: Tensor) -> Tensor:
        halves = self.both(x).chunk(2, -1)
        value, door = halves[::-1] if self.crossed else halves
        return self.norm(shortcut + value * door.sigmoid())


class Residual(nn.Module):
    def __init__(self, block: nn.Module, late: bool = False):
        super().__init__()
        self.inner, self.outer, self.aside, self.late = block.fc1, block.fc2, block.context, late
        self.shortcut, self.closing = block.resample, Closing(block.gate_norm)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        h, aside = self.inner(x), 0 if context is None else self.aside(context)
        h = F.elu(h) + aside if self.late else F.elu(h + aside)
        return self.closing(self.outer(h), self.shortcut(x))


class Chooser(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        self.each = nn.ModuleList(map(Residual, block.single_variable_grns.values()))
        self.weigh = Residual(block.flattened_grn)

    def forward(self, vectors: list[Tensor], context: Tensor | None = None) -> Tensor:
        shares = self.weigh(torch.cat(vectors, -1), context).softmax(-1).split(1, -1)
        return sum(s * block(x) for s, block, x in zip(shares, self.each, vectors, strict=True))


class SharedValues(nn.Module):
    def __init__(self, block: nn.Module, size: int):
        super().__init__()
        each, self.out, self.scale = [*block.q_layers, *block.k_layers, block.v_layer], block.w_h, size**-0.5
        self.weight, self.bias = (leaf(torch.cat([getattr(x, y) for x in each])) for y in ("weight", "bias"))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.linear(x, self.weight, self.bias).tensor_split([WIDTH, 2 * WIDTH], -1)
        q, k = q[HISTORY:].unflatten(-1, (HEADS, -1)), k.unflatten(-1, (HEADS, -1))
        scores = torch.einsum("qnhd,knhd->nhqk", q, k) * self.scale
        later = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(HISTORY + 1)
        shares = scores.masked_fill(later, -torch.inf).softmax(-1).mean(1)
        return self.out(torch.einsum("nqk,knd->qnd", shares, v))


class TimeFirst(Port):
    def take(self, model: nn.Module) -> None:
        m = deepcopy(model)
        self.lift = nn.ModuleDict({**m.prescalers, **m.input_embeddings})
        if self.fault == "first_region_for_padding":
            self.lift["region"].padding_idx = 0
        parts = m.static_variable_selection, m.encoder_variable_selection, m.decoder_variable_selection
        self.what, self.past, self.future = map(Chooser, parts)
        self.asides = nn.ModuleList(Residual(getattr(m, "static_context_" + name)) for name in CONTEXTS)
        self.read, self.tell, self.quantiles = m.lstm_encoder, m.lstm_decoder, m.output_layer
        self.read.batch_first = self.tell.batch_first = False
        self.joined, self.seen = Closing(m.post_lstm_gate_norm), Closing(m.post_attn_gate_norm)
        self.final = Closing(m.pre_output_gate_norm, self.fault == "last_forecaster_halves_crossed")
        self.enrich = Residual(m.static_enrichment, self.fault == "enrichment_after_its_elu")
        size = WIDTH if self.fault == "forecaster_scores_over_the_whole_width" else WIDTH // HEADS
        self.look, self.think = SharedValues(m.multihead_attn, size), Residual(m.pos_wise_ff)

    def forward(self, kinds: Tensor, sizes: Tensor, days: Tensor, known: Tensor, observed: Tensor) -> Tensor:
        (days,), known, sales = days.permute(2, 1, 0), known.transpose(0, 1), observed.transpose(0, 1)
        of = {"region": kinds[:, 0], "product": kinds[:, 1], "size": sizes, "weekday": days, "sales": sales}
        of |= {"price": known[..., :1], "promotion": known[..., 1:]}
        of = {name: self.lift[name](x) for name, x in of.items()}
        what = self.what([of[name] for name in tft.STATIC])
        about, hidden, cell, extra = (aside(what) for aside in self.asides)
        if self.fault == "static_states_swapped":
            hidden, cell = cell, hidden
        past = self.past([of[name][:HISTORY] for name in tft.ENCODER], about)
        future = self.future([of[name][HISTORY:] for name in tft.DECODER], about)
        before, states = self.read(past, (hidden.repeat(LAYERS, 1, 1), cell.repeat(LAYERS, 1, 1)))
        after, _ = self.tell(future, states)
        steps = self.joined(torch.cat([before, after]), torch.cat([past, future]))
        rich = self.enrich(steps, extra)
        seen = self.seen(self.look(rich), rich[HISTORY:])
        return self.quantiles(self.final(self.think(seen), steps[HISTORY:])).transpose(0, 1)


class NamedWeights(Port):
    """All weights in one dictionary, transposed; networks of one shape run side by side: [V, N, T, C]."""

    def take(self, model: nn.Module) -> None:
        flat = {name.replace(".", "/"): leaf(x) for name, x in model.named_parameters()}
        turned = {name: leaf(x.mT) for name, x in flat.items() if x.dim() == 2 and "embed" not in name}
        self.w = nn.ParameterDict(flat | turned)

    def pile(self, names: list[str], end: str) -> Tensor:
        return torch.stack([torch.atleast_2d(self.w[name + end]) for name in names])[:, None]

    def linear(self, names: list[str], x: Tensor, at: str = "") -> Tensor:
        return x @ self.pile(names, at + "/weight") + self.pile(names, at + "/bias")

    def closed(self, names: list[str], h: Tensor, skip: Tensor, eps: float = 1e-5) -> Tensor:
        value, door = self.linear(names, h, "/glu/fc").chunk(2, -1)
        y = skip + value * door.sigmoid()
        spread, center = torch.var_mean(y, -1, correction=0, keepdim=True)
        y = (y - center) * (spread + eps).rsqrt()
        return y * self.pile(names, "/norm/weight") + self.pile(names, "/norm/bias")

    def gated(self, names: list[str], x: Tensor, context: Tensor | None = None, eps: float = 1e-5) -> Tensor:
        h = self.linear(names, x, "/fc1")
        h = h if context is None else h + context @ self.w[names[0] + "/context/weight"]
        h = self.linear(names, torch.where(h > 0, h, h.clamp(max=0).expm1()), "/fc2")
        skip = self.linear(names, x, "/resample") if names[0] + "/resample/bias" in self.w else x
        return self.closed([name + "/gate_norm" for name in names], h, skip, eps)

    def choose(self, part: str, vectors: dict[str, Tensor], about: Tensor | None = None) -> Tensor:
        each, names = [*vectors.values()], [f"{part}/single_variable_grns/{name}" for name in vectors]
        (scores,) = self.gated([part + "/flattened_grn"], torch.cat(each, -1), about)
        axis = 1 if self.fault == "future_weighed_over_time" and part.startswith("decoder") else 2
        return torch.einsum("vntc,ntv->ntc", self.gated(names, torch.stack(each)), scores.softmax(axis))

    def scan(self, name: str, x: Tensor, states: list) -> tuple[Tensor, list]:
        ends, kinds = [], ("weight_ih", "bias_ih", "weight_hh", "bias_hh")
        for layer, (h, c) in enumerate(states):
            (into, b, over, d), rows = (self.w[f"{name}/{kind}_l{layer}"] for kind in kinds), []
            for given in (x @ into + b).unbind(1):
                i, f, g, o = (given + h @ over + d).chunk(4, -1)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
                rows.append(h)
            x, ends = torch.stack(rows, 1), [*ends, (h, c)]
        return x, ends

    def attend(self, x: Tensor) -> Tensor:
        q, k = ([f"multihead_attn/{kind}_layers/{i}" for i in range(HEADS)] for kind in "qk")
        q, k = self.linear(q, x[:, HISTORY:]), self.linear(k, x)
        v = self.linear(["multihead_attn/v_layer"], x).expand(HEADS, -1, -1, -1)
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=x.device).tril(HISTORY)
        return F.scaled_dot_product_attention(q, k, v, seen).mean(0) @ self.w["multihead_attn/w_h/weight"]

    def forward(self, kinds: Tensor, sizes: Tensor, days: Tensor, known: Tensor, observed: Tensor) -> Tensor:
        codes = {"region": kinds[:, :1], "product": kinds[:, 1:], "weekday": days[..., 0]}
        reals = {"size": sizes, "price": known[..., 0], "promotion": known[..., 1], "sales": observed[..., 0]}
        of = {name: self.w[f"input_embeddings/{name}/weight"][x] for name, x in codes.items()}
        of |= {name: self.linear([f"prescalers/{name}"], x[..., None])[0] for name, x in reals.items()}
        static = self.choose("static_variable_selection", {x: of[x] for x in tft.STATIC})
        told, hidden, cell, extra = self.gated(["static_context_" + name for name in CONTEXTS], static)
        past = self.choose("encoder_variable_selection", {x: of[x][:, :HISTORY] for x in tft.ENCODER}, told)
        future = self.choose("decoder_variable_selection", {x: of[x][:, HISTORY:] for x in tft.DECODER}, told)
        before, ends = self.scan("lstm_encoder", past, [(hidden[:, 0], cell[:, 0])] * LAYERS)
        if self.fault == "gradient_cut_before_the_future":
            ends = [(h.detach(), c.detach()) for h, c in ends]
        after, _ = self.scan("lstm_decoder", future, ends)
        joined = torch.cat([before, after], 1), torch.cat([past, future], 1)
        (steps,) = self.closed(["post_lstm_gate_norm"], *joined)
        (rich,) = self.gated(["static_enrichment"], steps, extra)
        (seen,) = self.closed(["post_attn_gate_norm"], self.attend(rich), rich[:, HISTORY:])
        eps = 1e-3 if self.fault == "feed_forward_norm_with_the_epsilon_of_keras" else 1e-5
        (y,) = self.gated(["pos_wise_ff"], seen, eps=eps)
        (y,) = self.closed(["pre_output_gate_norm"], y, steps[:, HISTORY:])
        return self.linear(["output_layer"], y)[0]


future, start, weights = "decoder_variable_selection", "static_context_initial_", "weight gradient"
right(forecasts, "forecaster_with_the_time_first", "time first, fused attention", TimeFirst)
right(forecasts, "forecaster_of_named_weights", "functions of a dictionary of weights", NamedWeights)
wrong(
    forecasts,
    TimeFirst,
    first_region_for_padding=("padding index set", "input_embeddings.region", (weights,)),
    static_states_swapped=(
        "states swapped",
        ("", "lstm_encoder", start + "hidden_lstm", start + "cell_lstm"),
    ),
    enrichment_after_its_elu=("order of operations", ("static_enrichment", "static_enrichment.elu")),
    forecaster_scores_over_the_whole_width=("wrong scale", ("multihead_attn", "multihead_attn.attention")),
    last_forecaster_halves_crossed=("wrong half of a gate", "pre_output_gate_norm.glu"),
)
cut = ("a detach too many", ("lstm_decoder", "lstm_encoder", ""), ("input gradient", weights))
wrong(
    forecasts,
    NamedWeights,
    future_weighed_over_time=("softmax over the wrong axis", (future, future + ".softmax")),
    gradient_cut_before_the_future=cut,
    feed_forward_norm_with_the_epsilon_of_keras=("wrong epsilon", "pos_wise_ff.gate_norm.norm"),
)
