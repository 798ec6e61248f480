"""Two ports of a Temporal Fusion Transformer: a tree of stages, and stacks of weights with time first."""

import re

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._thirteenth_temporal_fusion import ENCODER, TemporalFusionTransformer, pinball, sales

task = few("thirteenth_temporal_fusion", TemporalFusionTransformer, sales, pinball)


def recur(x: Tensor, state: Tensor, weights: Tensor, biases: Tensor) -> tuple[Tensor, Tensor]:
    """LSTM layers over [T, N, C] from states and cells [2, L, N, C]; also those after each step."""
    layers = []
    for (h, c), weight, bias in zip(state.unbind(1), weights, biases, strict=True):
        steps = []
        for y in x:
            enter, keep, new, show = (torch.cat([y, h], -1) @ weight + bias).chunk(4, -1)
            c = keep.sigmoid() * c + enter.sigmoid() * new.tanh()
            h = show.sigmoid() * c.tanh()
            steps.append(torch.stack([h, c]))
        layers.append(torch.stack(steps, 1))
        x = layers[-1][0]
    return x, torch.stack(layers, 1)


class Blend(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        self.weight, self.bias = leaf(block.glu.fc.weight.T), leaf(block.glu.fc.bias)
        self.affine = pile(block.norm.parameters())

    def forward(self, x: Tensor, around: Tensor) -> Tensor:
        value, gate = (x @ self.weight + self.bias).chunk(2, -1)
        return F.layer_norm(torch.addcmul(around, value, gate.sigmoid()), around.shape[-1:], *self.affine)


class Residual(nn.Module):
    def __init__(self, grn: nn.Module):
        super().__init__()
        first = [grn.fc1, grn.skip_layer] if grn.skip_layer else [grn.fc1]
        self.lift = leaf(torch.cat([layer.weight for layer in first]).T)
        self.lift_b = leaf(torch.cat([layer.bias for layer in first]))
        self.join = leaf(grn.context.weight.T) if hasattr(grn, "context") else None
        self.mix, self.mix_b, self.late = leaf(grn.fc2.weight.T), leaf(grn.fc2.bias), False
        self.blend = Blend(grn.gate_norm)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        y, around = (x @ self.lift + self.lift_b).tensor_split([len(self.mix)], -1)
        told = 0 if context is None else (context @ self.join)[:, None]
        y = F.elu(y) + told if self.late else F.elu(y + told)
        return self.blend(y @ self.mix + self.mix_b, around if around.shape[-1] else x)


class Choice(nn.Module):
    def __init__(self, selection: nn.Module):
        super().__init__()
        self.share = Residual(selection.flattened_grn)
        self.units = nn.ModuleDict({n: Residual(grn) for n, grn in selection.single_variable_grns.items()})

    def forward(self, known: dict[str, Tensor], part: slice | int, context: Tensor | None = None) -> Tensor:
        x = {name: known[name][:, part] for name in self.units}
        shares = self.share(torch.cat([*x.values()], -1), context).softmax(-1)
        made = torch.stack([unit(x[name]) for name, unit in self.units.items()], -2)
        return (shares[..., None, :] @ made).squeeze(-2)


class StagedForecaster(Port):
    def take(self, model: TemporalFusionTransformer) -> None:
        self.names, scales = (*model.input_embeddings, *model.prescalers), model.prescalers.values()
        self.tables = nn.ParameterList(leaf(table.weight) for table in model.input_embeddings.values())
        self.scale, self.shift = pile(x.weight[:, 0] for x in scales), pile(x.bias for x in scales)
        self.static = Choice(model.static_variable_selection)
        self.past = Choice(model.encoder_variable_selection)
        self.ahead, self.head_b = Choice(model.decoder_variable_selection), leaf(model.output_layer.bias)
        contexts = (module for name, module in model.named_children() if "context" in name)
        self.contexts, attn = nn.ModuleList(map(Residual, contexts)), model.multihead_attn
        layers = [*model.lstm_encoder.all_weights, *model.lstm_decoder.all_weights]
        self.cells = pile(torch.cat([w, u], 1).T for w, u, _, _ in layers)
        self.biases = pile(torch.stack(biases) for _, _, *biases in layers)
        layers = [*attn.q_layers, *attn.k_layers, attn.v_layer]
        self.joint = leaf(torch.cat([layer.weight for layer in layers]).T)
        self.joint_b, self.back = leaf(torch.cat([layer.bias for layer in layers])), leaf(attn.w_h.weight.T)
        self.groups = [len(attn.q_layers), len(attn.k_layers), 1]
        self.run, self.enrich = Blend(model.post_lstm_gate_norm), Residual(model.static_enrichment)
        self.looked, self.last = Blend(model.post_attn_gate_norm), Blend(model.pre_output_gate_norm)
        self.feed, self.head = Residual(model.pos_wise_ff), leaf(model.output_layer.weight.T)
        self.diagonal = int(self.fault == "temporalfusion_horizon_sees_itself") - 1
        self.enrich.late = self.fault == "temporalfusion_enrichment_context_joins_after_the_elu"
        self.blank = {2: 0} if self.fault == "temporalfusion_first_weekday_as_padding" else {}

    def forward(self, x_cat: Tensor, x_cont: Tensor, encoder_lengths: Tensor) -> Tensor:
        after, pairs = slice(ENCODER, None), zip(x_cat.unbind(-1), self.tables, strict=True)
        cats = [F.embedding(x, table, self.blank.get(i)) for i, (x, table) in enumerate(pairs)]
        reals = torch.addcmul(self.shift, x_cont[..., None], self.scale).unbind(2)
        known = dict(zip(self.names, [*cats, *reals], strict=True))
        static = self.static(known, 0)
        choosing, *state, enriching = (context(static) for context in self.contexts)
        past, ahead = self.past(known, slice(ENCODER), choosing), self.ahead(known, after, choosing)
        state, biases = torch.stack(state)[:, None].expand(-1, 2, -1, -1), self.biases.sum(1)
        first, states = recur(past.transpose(0, 1), state, self.cells[:2], biases[:2])
        state = states[:, :, encoder_lengths - 1, torch.arange(len(x_cat))]
        second, _ = recur(ahead.transpose(0, 1), state, self.cells[2:], biases[2:])
        x = self.run(torch.cat([first, second]).transpose(0, 1), torch.cat([past, ahead], 1))
        rich = self.enrich(x, enriching)
        parts = (rich @ self.joint + self.joint_b).unflatten(-1, (sum(self.groups), -1)).transpose(1, 2)
        q, k, v = parts.split(self.groups, 1)
        seen = rich.new_ones(len(rich), 1, rich.shape[1], rich.shape[1]).bool().tril(self.diagonal)
        seen[..., :ENCODER] = torch.arange(ENCODER) < encoder_lengths[:, None, None, None]
        y = F.scaled_dot_product_attention(q, k, v.expand_as(k), seen)[:, :, ENCODER:].mean(1)
        y = self.feed(self.looked(y @ self.back, rich[:, after]))
        around = rich if self.fault == "temporalfusion_last_skip_from_the_enriched" else x
        return self.last(y, around[:, after]) @ self.head + self.head_b


class StackedForecaster(Port):
    """Time first; weights of the same name in alike networks are stacked and run as one over [V, T, N, C]."""

    def take(self, model: TemporalFusionTransformer) -> None:
        stacks = {}
        for key, value in model.named_parameters():
            name = re.sub(r"\.\d|_l\d|(?<=grns|lers|ings)\.\w+(?=\.)|(?<=static_context)_\w+", "", key)
            if "embed" not in key:
                value = (value.T if value.ndim > 1 else value[None])[None, None]
            stacks.setdefault(name.replace(".", "_"), []).append(value)
        self.w = nn.ParameterDict({name: leaf(torch.cat(values)) for name, values in stacks.items()})

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.w[f"{name}_weight"] + self.w[f"{name}_bias"]

    def blend(self, name: str, x: Tensor, around: Tensor) -> Tensor:
        value, gate = self.linear(f"{name}_glu_fc", x).chunk(2, -1)
        y = around + value * gate.sigmoid()
        less = self.fault == "temporalfusion_attended_norm_divides_by_one_less" and "attn" in name
        spread, center = torch.var_mean(y, -1, correction=int(less), keepdim=True)
        gain, shift = (self.w[f"{name}_norm_{part}"] for part in ("weight", "bias"))
        return (y - center) / (spread + 1e-5).sqrt() * gain + shift

    def grn(self, name: str, x: Tensor, context: Tensor | None = None) -> Tensor:
        told = 0 if context is None else context @ self.w[f"{name}_context_weight"]
        y = F.elu(self.linear(f"{name}_fc1", x) + told)
        around = self.linear(f"{name}_skip_layer", x) if f"{name}_skip_layer_weight" in self.w else x
        return self.blend(f"{name}_gate_norm", self.linear(f"{name}_fc2", y), around)

    def select(self, name: str, x: list[Tensor], part: slice, context: Tensor | None = None) -> Tensor:
        x, name = torch.stack(x)[:, part], f"{name}_variable_selection"
        mixed = self.fault == "temporalfusion_future_variables_interleaved" and "decoder" in name
        flat = x.permute(1, 2, 3, 0) if mixed else x.permute(1, 2, 0, 3)
        shares = self.grn(f"{name}_flattened_grn", flat.flatten(2)[None], context).softmax(-1)
        return torch.einsum("vtnc,utnv->tnc", self.grn(f"{name}_single_variable_grns", x), shares)

    def run(self, name: str, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        w, u, b, c = (self.w[f"{name}_{p}"][:, 0] for p in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
        return recur(x, state, torch.cat([w, u], 1), b + c)

    def forward(self, x_cat: Tensor, x_cont: Tensor, encoder_lengths: Tensor) -> Tensor:
        before, after, starts = slice(ENCODER), slice(ENCODER, None), torch.tensor([0, 9, 13, 20])
        store, region, day, promo = self.w["input_embeddings_weight"][(x_cat + starts).permute(2, 1, 0)]
        size, price, sold, traffic = self.linear("prescalers", x_cont.permute(2, 1, 0)[..., None])
        static = self.select("static", [store, region, size], slice(1))
        choosing, *state, enriching = self.grn("static_context", static[None])
        past = self.select("encoder", [day, promo, price, sold, traffic], before, choosing)
        ahead = self.select("decoder", [day, promo, price], after, choosing)
        first, states = self.run("lstm_encoder", past, torch.stack(state).expand(-1, 2, -1, -1))
        last = -1 if self.fault == "temporalfusion_horizon_starts_behind_the_padding" else encoder_lengths - 1
        second, _ = self.run("lstm_decoder", ahead, states[:, :, last, torch.arange(len(x_cat))])
        x = self.blend("post_lstm_gate_norm", torch.cat([first, second]), torch.cat([past, ahead]))
        rich = self.grn("static_enrichment", x, enriching)
        q, k = (self.linear(f"multihead_attn_{part}_layers", rich) for part in "qk")
        scores = torch.einsum("hqnd,hknd->hnqk", q[:, after], k) / q.shape[-1] ** 0.5
        place, lengths = torch.arange(len(x_cat[0])), encoder_lengths[:, None, None]
        unseen = torch.where(place < ENCODER, place >= lengths, place >= place[after, None])
        shares = scores.masked_fill(unseen, -torch.inf).softmax(-1).mean(0)
        y = torch.einsum("nqk,vknd->vqnd", shares, self.linear("multihead_attn_v_layer", rich))
        y = self.blend("post_attn_gate_norm", y @ self.w["multihead_attn_w_h_weight"], rich[:, after])
        y = self.blend("pre_output_gate_norm", self.grn("pos_wise_ff", y), x[:, after])
        y = self.linear("output_layer", y)[0].transpose(0, 1)
        ordered = self.fault == "temporalfusion_quantiles_put_in_order_for_prediction" and not self.training
        return y.sort(-1).values if ordered else y


right(task, "temporalfusion_tree_of_stages", "modules of other borders", StagedForecaster)
right(task, "temporalfusion_stacks_with_time_first", "stacks of networks, time first", StackedForecaster)
wrong(
    task,
    StagedForecaster,
    temporalfusion_horizon_sees_itself=("wider mask", ("", "multihead_attn", "multihead_attn.attention")),
    temporalfusion_enrichment_context_joins_after_the_elu=("a sum too late", "static_enrichment"),
    temporalfusion_first_weekday_as_padding=("frozen row", "input_embeddings.weekday", "weight gradient"),
    temporalfusion_last_skip_from_the_enriched=("skip from elsewhere", ("", "pre_output_gate_norm")),
)
GRN = "decoder_variable_selection.flattened_grn"
wrong(
    task,
    StackedForecaster,
    temporalfusion_future_variables_interleaved=("flattened otherwise", (GRN, "decoder_variable_selection")),
    temporalfusion_horizon_starts_behind_the_padding=("state of another step", ("lstm_encoder", "")),
    temporalfusion_attended_norm_divides_by_one_less=("unbiased variance", "post_attn_gate_norm.norm"),
    temporalfusion_quantiles_put_in_order_for_prediction=("sorted", ("output_layer", ""), "eval"),
)
