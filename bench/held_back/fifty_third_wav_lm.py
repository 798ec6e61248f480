"""Two ports of a small WavLM: a tree of stages with channels last, and one class of stacked weights."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _fifty_third_wav_lm as known
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("fifty_third_wav_lm", known.WavLMForCodes, known.tones, known.masked_codes)
CONVS, HEADS, GROUPS, KERNEL, HEAT = known.CONVS, known.HEADS, known.GROUPS, known.KERNEL, known.TEMPERATURE
REACH, HOP, HALF, FAR = 24, 16, known.BUCKETS // 2, known.FAR  # a frame sees 24 samples, the next is 16 later


class Scaling(nn.Module):
    def __init__(self, norm: nn.Module, axes: tuple[int, ...] = (-1,)):
        super().__init__()
        self.scale, self.shift, self.axes, self.eps = leaf(norm.weight), leaf(norm.bias), axes, norm.eps

    def forward(self, x: Tensor) -> Tensor:
        spread, center = torch.var_mean(x, self.axes, correction=0, keepdim=True)
        return (x - center) / (spread + self.eps).sqrt() * self.scale + self.shift


class Dense(nn.Module):
    def __init__(self, *layers: nn.Linear):
        super().__init__()
        self.w = leaf(torch.cat([x.weight.T for x in layers], 1))
        self.b = leaf(torch.cat([x.bias for x in layers]))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w + self.b


class Stage(nn.Module):
    def __init__(self, layer: nn.Module, swapped: bool):
        super().__init__()
        old, inner, self.swapped = layer.attention, layer.feed_forward, swapped
        self.ask, self.end = Dense(old.q_proj, old.k_proj, old.v_proj), Dense(old.out_proj)
        self.gate, self.most = Dense(old.gru_rel_pos_linear), leaf(old.gru_rel_pos_const.flatten())
        self.first, self.second = Scaling(layer.layer_norm), Scaling(layer.final_layer_norm)
        self.think = nn.Sequential(Dense(inner.intermediate_dense), nn.GELU(), Dense(inner.output_dense))

    def forward(self, x: Tensor, hidden: Tensor, bias: Tensor) -> Tensor:
        a, b = self.gate(x.unflatten(2, (HEADS, -1))).unflatten(3, (2, 4)).sum(4).sigmoid().unbind(3)
        if self.swapped:
            a, b = b, a
        q, k, v = self.ask(x).unflatten(2, (3, HEADS, -1)).unbind(2)
        scores = torch.einsum("nqhd,nkhd->nqkh", q, k) / math.sqrt(q.shape[-1])
        scores = scores + (2 - a + a * b * self.most)[:, :, None] * bias
        share = (scores + hidden[:, None, :, None]).softmax(2)
        x = self.first(self.end(torch.einsum("nqkh,nkhd->nqhd", share, v).flatten(2)) + x)
        return self.second(self.think(x) + x)


class WavLMOfStages(Port):
    def take(self, model: nn.Module) -> None:
        wav, enc, fault = model.wavlm, model.wavlm.encoder, self.fault
        convs, old = wav.feature_extractor.conv_layers, wav.feature_projection
        self.kernels = nn.ParameterList(leaf(x.conv.weight.flatten(1).T) for x in convs)
        together = fault == "wav_lm_first_norm_over_all_channels_together"
        self.even = Scaling(convs[0].layer_norm, (1, 2) if together else (1,))
        self.widen = nn.Sequential(Scaling(old.layer_norm), Dense(old.projection))
        self.start, pos = Scaling(enc.layer_norm), enc.pos_conv_embed.conv
        self.pos = nn.ParameterList(map(leaf, (*pos.parametrizations.weight.parameters(), pos.bias)))
        table, swapped = enc.layers[0].attention.rel_attn_embed, fault == "wav_lm_third_layer_swaps_its_gates"
        self.before, self.after = map(leaf, table.weight.chunk(2))
        self.stages = nn.ModuleList(Stage(x, swapped and i == 2) for i, x in enumerate(enc.layers))
        self.gap, self.share = leaf(wav.masked_spec_embed), leaf(model.layer_weights)
        self.tell, self.codes = Dense(model.final_proj), leaf(model.label_embs.T)

    def near(self, x: Tensor) -> Tensor:
        size, turn, b = self.pos
        kernel = (turn * (size / turn.square().sum((0, 1)).sqrt())).unflatten(0, (GROUPS, -1))
        before = KERNEL // 2 - (self.fault == "wav_lm_same_padding_removes_the_first_frame")
        x = F.pad(x, (0, 0, before, KERNEL - 1 - before)).unfold(1, KERNEL, 1).unflatten(2, (GROUPS, -1))
        return F.gelu(torch.einsum("ntgik,goik->ntgo", x, kernel).flatten(2) + b)

    def far(self, x: Tensor) -> Tensor:
        near, place = HALF // 2, torch.arange(x.shape[1], device=x.device)
        far = (math.ceil(near * (FAR / near) ** (i / (HALF - near))) for i in range(1, HALF - near))
        edges, apart = torch.tensor([*range(1, near + 1), *far], device=x.device), place - place[:, None]
        level = torch.bucketize(apart.abs(), edges, right=True)
        return torch.where((apart > 0)[..., None], self.after[level], self.before[level])

    def forward(self, input_values: Tensor, attention_mask: Tensor, mask_time_indices: Tensor) -> Tensor:
        x, seen = input_values[..., None], attention_mask[:, REACH - 1 :: HOP]
        spans = mask_time_indices[..., None]
        for i, kernel in enumerate(self.kernels):
            x = x.unfold(1, *CONVS[i][2:]).flatten(2) @ kernel
            x = F.gelu(self.even(x) if i == 0 else x)
        x = (self.widen(x).masked_fill(spans, 0) + spans * self.gap) * seen[..., None]
        x, bias, share = self.start(x + self.near(x)), self.far(x), self.share.exp() / self.share.exp().sum()
        total, hidden = share[0] * x, torch.zeros_like(x[..., 0]).masked_fill(~seen, -torch.inf)
        for part, stage in zip(share[1:], self.stages, strict=True):
            x = stage(x, hidden, bias)
            total = total + part * x
        y = self.tell(total)
        length = y.norm(dim=-1, keepdim=True)
        if self.fault == "wav_lm_cosine_takes_the_length_of_frames_for_a_constant":
            length = length.detach()
        return (y / length) @ (self.codes / self.codes.norm(dim=0)) / HEAT


class StackedWavLM(Port):
    def take(self, model: nn.Module) -> None:
        layers, self.w = model.wavlm.encoder.layers, nn.ParameterDict()
        for name, weight in model.named_parameters():
            if ".layers." not in name or "rel_attn" in name:
                name, weight = name.split("wavlm.")[-1], weight.mT if weight.dim() > 1 else weight
                self.w[name.replace(".", "_")] = leaf(weight)
        for name, _ in layers[1].named_parameters():
            self.w[name.replace("attention.", "").replace(".", "_")] = pile(
                x.get_parameter(name) for x in layers
            )

    def by(self, name: str, x: Tensor, i: int | None = None, do: object = F.linear) -> Tensor:
        w, b = self.w[name + "_weight"], self.w[name + "_bias"]
        w, b = (w.mT if w.dim() > 1 else w, b) if i is None else (w[i], b[i])
        return F.linear(x, w, b) if do is F.linear else F.layer_norm(x, x.shape[-1:], w, b)

    def bucket(self, apart: int) -> int:
        zero, size = self.fault == "wav_lm_bucket_of_distance_zero_counts_as_after", abs(apart)
        if size >= HALF // 2:
            rate = math.log(2 * size / HALF) / math.log(2 * FAR / HALF)
            size = min(HALF - 1, int(HALF // 2 * (1 + rate)))
        return size + HALF * (apart > -zero)

    def around(self, x: Tensor) -> Tensor:
        pos = "encoder_pos_conv_embed_conv_"
        g, v = (self.w[f"{pos}parametrizations_weight_original{i}"].mT for i in (0, 1))
        kernel = g * F.normalize(v.flatten(0, 1), dim=0).view_as(v)
        return F.gelu(F.conv1d(x.mT, kernel, self.w[pos + "bias"], 1, KERNEL // 2, 1, GROUPS)[..., :-1]).mT

    def layer(self, i: int, x: Tensor, seen: Tensor, bias: Tensor) -> Tensor:
        n, time, width = x.shape
        cut = x.view(n, time, HEADS, -1).transpose(1, 2)
        q, k, v = (self.by(f"{y}_proj", x, i).view(n, time, HEADS, -1).transpose(1, 2) for y in "qkv")
        a, b = self.by("gru_rel_pos_linear", cut, i).unflatten(3, (2, 4)).sum(4).sigmoid().split(1, 3)
        gate = 2 + a * (b * self.w["gru_rel_pos_const"][i] - 1)
        if self.fault == "wav_lm_second_layer_gate_without_gradient" and i == 1:
            gate = gate.detach()
        allowed = (gate * bias).masked_fill(~seen[:, None, None], -torch.inf)
        y = F.scaled_dot_product_attention(q, k, v, allowed).transpose(1, 2).reshape(n, time, width)
        x = self.by("layer_norm", x + self.by("out_proj", y, i), i, F.layer_norm)
        y = self.by("feed_forward_intermediate_dense", x, i)
        rough = self.fault == "wav_lm_third_layer_gelu_by_a_sigmoid" and i == 2
        y = y * torch.sigmoid(1.702 * y) if rough else F.gelu(y)
        return self.by("final_layer_norm", x + self.by("feed_forward_output_dense", y, i), i, F.layer_norm)

    def forward(self, input_values: Tensor, attention_mask: Tensor, mask_time_indices: Tensor) -> Tensor:
        x, seen, w = input_values[:, None], attention_mask.unfold(1, REACH, HOP).all(2), self.w
        name = "feature_extractor_conv_layers"
        for i, (_, _, size, stride) in enumerate(CONVS):
            taps, time = w[f"{name}_{i}_conv_weight"], (x.shape[2] - size) // stride + 1
            x = sum(taps[:, k] @ x[:, :, k::stride][:, :, :time] for k in range(size))
            if i == 0:
                norm = w[f"{name}_0_layer_norm_weight"], w[f"{name}_0_layer_norm_bias"]
                x = F.instance_norm(x, None, None, *norm)
            x = F.gelu(x)
        x = self.by("feature_projection_layer_norm", x.mT, do=F.layer_norm)
        x, spans = self.by("feature_projection_projection", x), mask_time_indices[..., None]
        if self.fault == "wav_lm_spans_left_unmasked_in_evaluation" and not self.training:
            spans = torch.zeros_like(spans)
        x = torch.where(seen[..., None], torch.where(spans, w["masked_spec_embed"], x), 0)
        x = self.by("encoder_layer_norm", x + self.around(x), do=F.layer_norm)
        time, states = x.shape[1], [x]
        index = [[self.bucket(k - q) for k in range(time)] for q in range(time)]
        bias = w["encoder_layers_0_attention_rel_attn_embed_weight"][:, index]
        for i in range(known.LAYERS):
            states.append(self.layer(i, states[-1], seen, bias))
        x = torch.einsum("lntc,l->ntc", torch.stack(states), w["layer_weights"].softmax(0))
        y = self.by("final_proj", x)
        return F.normalize(y, dim=2) @ F.normalize(w["label_embs"], dim=0) / HEAT


SLOPES, ENC, STEM = ("input gradient", "weight gradient"), "wavlm.encoder", "wavlm.feature_extractor"
right(task, "wav_lm_of_stages_with_channels_last", "a tree, windows, fused and split weights", WavLMOfStages)
right(task, "wav_lm_of_stacked_weights", "packed stacks, sums over taps", StackedWavLM)
wrong(
    task,
    WavLMOfStages,
    wav_lm_first_norm_over_all_channels_together=("another axis", f"{STEM}.conv_layers.0.layer_norm"),
    wav_lm_same_padding_removes_the_first_frame=("off by one", f"{ENC}.pos_conv_embed.padding"),
    wav_lm_third_layer_swaps_its_gates=("swapped halves", f"{ENC}.layers.2.attention"),
    wav_lm_cosine_takes_the_length_of_frames_for_a_constant=("detach", "", SLOPES),
)
GELU = f"{ENC}.layers.2.feed_forward.intermediate_act_fn"
wrong(
    task,
    StackedWavLM,
    wav_lm_spans_left_unmasked_in_evaluation=("a switch by mode", "wavlm", "eval"),
    wav_lm_bucket_of_distance_zero_counts_as_after=("a bound off by one", f"{ENC}.layers.0.attention"),
    wav_lm_second_layer_gate_without_gradient=("detach", f"{ENC}.layers.1.attention", SLOPES),
    wav_lm_third_layer_gelu_by_a_sigmoid=("another formula", GELU),
)
