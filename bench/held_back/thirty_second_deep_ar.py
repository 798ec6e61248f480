"""Two ports of a small DeepAR: an encoder with a decoder, time first, and one class of packed weights."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, distributions, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._thirty_second_deep_ar import CONTEXT, LAGS, PAST, DeepARModel, mean_loss, seasons

task = few("thirty_second_deep_ar", DeepARModel, seasons, mean_loss)


class Magnitude(nn.Module):
    """[T, N] and what is seen -> [N], the mean size of what is seen."""

    def __init__(self, least: float, fault: str):
        super().__init__()
        self.least, self.of_series = least, fault == "deep_ar_default_scale_is_the_mean_of_the_scales"

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        total, count = x.abs().masked_fill(~seen, 0).sum(0), seen.sum(0)
        own = total / count.clamp(min=1)
        shared = total.sum() / count.sum().clamp(min=1)
        if self.of_series:
            shared = own.sum() / (count > 0).sum().clamp(min=1)
        return own.where(count > 0, shared).clamp(min=self.least)


class Kinds(nn.Module):
    """The rows of several tables, by products."""

    def __init__(self, tables: nn.ModuleList):
        super().__init__()
        self.tables = nn.ParameterList(leaf(x.weight.T) for x in tables)

    def forward(self, kinds: Tensor) -> Tensor:
        pairs = zip(kinds.T, self.tables, strict=True)
        return torch.cat([F.one_hot(x, w.shape[1]).to(w) @ w.T for x, w in pairs], 1)


class Memory(nn.Module):
    """One layer's step; its input comes projected."""

    def __init__(self, rnn: nn.LSTM, layer: int):
        super().__init__()
        self.u, self.b = leaf(getattr(rnn, f"weight_hh_l{layer}").T), leaf(getattr(rnn, f"bias_hh_l{layer}"))

    def forward(self, given: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h, c = state
        i, f, g, o = (given + h @ self.u + self.b).unflatten(1, (4, -1)).unbind(1)
        c = c * f.sigmoid() + g.tanh() * i.sigmoid()
        return o.sigmoid() * c.tanh(), c


class Stack(nn.Module):
    """Two layers stepped together; what stays the same for a series is projected once."""

    def __init__(self, rnn: nn.LSTM):
        super().__init__()
        lags, fixed, time = rnn.weight_ih_l0.split([len(LAGS), rnn.input_size - len(LAGS) - 3, 3], 1)
        self.lagged, self.timed, self.fixed = leaf(lags.T), leaf(time.T), nn.Linear(*fixed.shape[::-1])
        self.fixed.weight, self.fixed.bias = leaf(fixed), leaf(rnn.bias_ih_l0)
        self.between = nn.Linear(*rnn.weight_ih_l1.shape[::-1])
        self.between.weight, self.between.bias = leaf(rnn.weight_ih_l1), leaf(rnn.bias_ih_l1)
        self.low, self.high = Memory(rnn, 0), Memory(rnn, 1)

    def forward(self, lags: Tensor, time: Tensor, fixed: Tensor, state: tuple) -> tuple[Tensor, tuple]:
        (low, high), found = state, []
        for given in lags @ self.lagged + time @ self.timed + self.fixed(fixed):
            low = self.low(given, low)
            high = self.high(self.between(low[0]), high)
            found.append(high[0])
        return torch.stack(found), (low, high)


class Ending(nn.Module):
    """Three numbers by step from one product, made into those of a Student-t."""

    def __init__(self, proj: nn.ModuleList, fault: str):
        super().__init__()
        self.w, self.b = leaf(torch.cat([x.weight for x in proj])), leaf(torch.cat([x.bias for x in proj]))
        self.least = 1e-3 if fault == "deep_ar_student_scale_raised_by_a_thousandth" else 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heavy, middle, wide = F.linear(x, self.w, self.b).unbind(-1)
        return 2 - F.logsigmoid(-heavy), middle, self.least - F.logsigmoid(-wide)


class EncoderDecoder(Port):
    """Reads the context, then the horizon from the state reached, with the time first."""

    def take(self, model: DeepARModel) -> None:
        least, tables = model.scaler.minimum_scale, model.embedder._embedders
        self.size, self.kinds = Magnitude(least, self.fault), Kinds(tables)
        self.stack, self.ending = Stack(model.rnn), Ending(model.param_proj.proj, self.fault)

    def forward(self, **x: Tensor) -> tuple[Tensor, ...]:
        starts, cut = PAST - CONTEXT + 1, CONTEXT - 1
        past, seen = x["past_target"].T, x["past_observed_values"].T
        size = self.size(past[-CONTEXT:], seen[-CONTEXT:])
        values = torch.cat([past, x["future_target"].T])
        time = torch.cat([x["past_time_feat"], x["future_time_feat"]], 1).transpose(0, 1)[starts:]
        lags = torch.stack([values[starts - lag : len(values) - lag] for lag in LAGS], 2) / size[:, None]
        fixed = torch.cat([self.kinds(x["feat_static_cat"]), x["feat_static_real"], size.log()[:, None]], 1)
        empty = size.new_zeros(2, len(size), self.stack.low.u.shape[0]).unbind()
        before, (low, high) = self.stack(lags[:cut], time[:cut], fixed, (empty, empty))
        if self.fault == "deep_ar_decoder_begins_with_a_detached_first_state":
            low = low[0].detach(), low[1].detach()
        after, _ = self.stack(lags[cut:], time[cut:], fixed, (low, high))
        heavy, middle, wide = self.ending(torch.cat([before, after]))
        student = distributions.StudentT(heavy, middle * size, wide * size, validate_args=False)
        counted = torch.cat([seen, x["future_observed_values"].T])[starts:]
        density = student.log_prob(values[starts:])
        if self.fault == "deep_ar_density_of_the_scaled_target_left_unscaled":
            density = density + size.log()
        loss = density.masked_fill(~counted, 0).sum(0) / -counted.sum(0).clamp(min=1)
        return heavy.T, middle.T, wide.T, size[:, None], loss


class PackedDeepAR(Port):
    """A sheet of weights and biases for each layer, one list of all categories, densities by hand."""

    def take(self, model: DeepARModel) -> None:
        sheets = (torch.cat([w, u, b[:, None], c[:, None]], 1) for w, u, b, c in model.rnn.all_weights)
        self.sheets = nn.ParameterList(map(leaf, sheets))
        tables, self.least = [x.weight for x in model.embedder._embedders], model.scaler.minimum_scale
        self.shapes, self.tables = [x.shape for x in tables], leaf(torch.cat([x.flatten() for x in tables]))
        self.ends = pile(torch.cat([x.weight[0], x.bias]) for x in model.param_proj.proj)

    def rows(self, kinds: Tensor) -> list[Tensor]:
        flat = self.tables.split([x.numel() for x in self.shapes])
        first, second = (x.view(shape) for x, shape in zip(flat, self.shapes, strict=True))
        if self.fault == "deep_ar_second_embedding_pads_class_zero":
            second = torch.cat([second[:1].detach(), second[1:]])
        return [first[kinds[:, 0]], second[kinds[:, 1]]]

    def layer(self, i: int, x: Tensor) -> Tensor:
        h = c = x.new_zeros(len(x), len(self.sheets[i]) // 4)
        more = 1 if self.fault == "deep_ar_second_layer_adds_one_to_its_forget_gate" and i == 1 else 0
        found, ones = [], x.new_ones(len(x), 2)
        for t in range(x.shape[1]):
            gates = torch.cat([x[:, t], h, ones], 1) @ self.sheets[i].T
            write, keep, new, show = gates.tensor_split(4, 1)
            c = torch.sigmoid(keep + more) * c + torch.sigmoid(write) * torch.tanh(new)
            h = torch.sigmoid(show) * torch.tanh(c)
            found.append(h)
        return torch.stack(found, 1)

    def forward(self, **x: Tensor) -> tuple[Tensor, ...]:
        values = torch.cat([x["past_target"], x["future_target"]], 1)
        seen = torch.cat([x["past_observed_values"], x["future_observed_values"]], 1)
        near, first = slice(PAST - CONTEXT, PAST), PAST - CONTEXT + 1
        count, total = seen[:, near].sum(1, True), (values * seen)[:, near].abs().sum(1, True)
        lone = (count == 0).to(values)
        size = total / (count + lone) + lone * total.sum() / count.sum().clamp(min=1)
        size = size.maximum(torch.full_like(size, self.least))
        windows = (values / size).unfold(1, max(LAGS), 1)[:, :-1]
        lags = windows[..., [max(LAGS) - lag for lag in LAGS]][:, first - max(LAGS) :]
        late = 1 if self.fault == "deep_ar_time_features_of_the_step_before" else 0
        time = torch.cat([x["past_time_feat"], x["future_time_feat"]], 1).roll(late, 1)[:, first:]
        fixed = torch.cat([*self.rows(x["feat_static_cat"]), x["feat_static_real"], torch.log(size)], 1)
        h = torch.cat([lags, fixed[:, None].repeat(1, lags.shape[1], 1), time], 2)
        h = self.layer(1, self.layer(0, h))
        raw = torch.einsum("ntc,kc->knt", h, self.ends[:, :-1]) + self.ends[:, -1, None, None]
        df, wide = 2 + torch.log1p(raw[0].exp()), torch.log1p(raw[2].exp())
        far = (values[:, first:] / size - raw[1]) / wide
        bulk = torch.lgamma((df + 1) / 2) - torch.lgamma(df / 2) - (math.pi * df).log() / 2
        density = bulk - (df + 1) / 2 * torch.log1p(far.square() / df) - (wide * size).log()
        counted = seen[:, first:].to(density)
        if self.fault == "deep_ar_loss_counts_unobserved_steps_in_evaluation" and not self.training:
            counted = torch.ones_like(counted)
        loss = -(density * counted).sum(1) / counted.sum(1).clamp(min=1)
        return df, raw[1], wide, size, loss


SLOPES = ("input gradient", "weight gradient")
right(task, "deep_ar_of_an_encoder_and_a_decoder", "a tree, time first, split products", EncoderDecoder)
right(task, "deep_ar_of_packed_weights", "packed weights, loops, densities by hand", PackedDeepAR)
wrong(
    task,
    EncoderDecoder,
    deep_ar_default_scale_is_the_mean_of_the_scales=("a mean of means", "scaler"),
    deep_ar_decoder_begins_with_a_detached_first_state=("detach", "rnn", SLOPES),
    deep_ar_student_scale_raised_by_a_thousandth=("another shift", "param_proj.domain_map"),
    deep_ar_density_of_the_scaled_target_left_unscaled=("a term left out", "loss"),
)
wrong(
    task,
    PackedDeepAR,
    deep_ar_second_embedding_pads_class_zero=("detach", "embedder._embedders.1", "weight gradient"),
    deep_ar_time_features_of_the_step_before=("an index off by one", ""),
    deep_ar_second_layer_adds_one_to_its_forget_gate=("another bias", "rnn"),
    deep_ar_loss_counts_unobserved_steps_in_evaluation=("a mask left out in eval", "loss", "eval"),
)
