"""Two ports of a small PatchTST: a tree of convolutions, features first, and one class of packed weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import filled, right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twenty_fifth_patch_tst import PatchTSTForPrediction, observed_error, seasons

task = few("twenty_fifth_patch_tst", PatchTSTForPrediction, seasons, observed_error)


def convolution(weight: Tensor, bias: Tensor, stride: int = 1) -> nn.Conv1d:
    return filled(nn.Conv1d(weight.shape[1], len(weight), weight.shape[2], stride), weight, bias)


def fused(*layers: nn.Linear) -> nn.Conv1d:
    """A convolution of one step with the rows of these layers, one after the other."""
    return convolution(torch.cat([x.weight for x in layers])[..., None], torch.cat([x.bias for x in layers]))


class Gauge(nn.Module):
    """Tracks [N, C, T] scaled, with the level and the spread of what was seen of each, [N, C, 1]."""

    def __init__(self, floor: float):
        super().__init__()
        self.floor, self.fixed = floor, False

    def forward(self, tracks: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        share = seen.to(tracks) / seen.sum(2, True).clamp(min=1)
        level = (share * tracks).sum(2, True)
        spread = ((share * (tracks - level).square()).sum(2, True) + self.floor).sqrt()
        if self.fixed:
            level, spread = level.detach(), spread.detach()
        return (tracks - level) / spread, level, spread


class Mingling(nn.Module):
    """Norm and attention of [B, D, P], added to what came in."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        attention, self.norm = layer.self_attn, layer.norm_sublayer1.batchnorm
        self.ask, self.heads = (
            fused(attention.q_proj, attention.k_proj, attention.v_proj),
            attention.num_heads,
        )
        self.give, self.from_norm = fused(attention.out_proj), False

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = self.ask(y).unflatten(1, (3, self.heads, -1)).transpose(3, 4).unbind(1)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(2, 3).flatten(1, 2)
        return (y if self.from_norm else x) + self.give(mixed)


class Widening(nn.Sequential):
    """Norm and two layers of [B, D, P], added to what came in."""

    def __init__(self, layer: nn.Module):
        norm, (up, *_, down) = layer.norm_sublayer3.batchnorm, layer.ff
        super().__init__(norm, fused(up), nn.GELU(), fused(down))

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class PatchTSTOfConvolutions(Port):
    """Patches are cut by a strided convolution, and read by one over all of them."""

    def take(self, model: PatchTSTForPrediction) -> None:
        inner, last, fault = model.model, model.head.projection, self.fault
        first, cut, self.gauge = inner.encoder.embedder, inner.patchifier, Gauge(1e-5)
        self.start, stride = cut.sequence_start, cut.patch_stride
        self.cut = convolution(first.input_embedding.weight[:, None], first.input_embedding.bias, stride)
        self.places = leaf(inner.encoder.positional_encoder.position_enc.T).requires_grad_(False)
        self.stages = nn.Sequential()
        for layer in inner.encoder.layers:
            self.stages.extend([Mingling(layer), Widening(layer)])
        self.read = convolution(last.weight.unflatten(1, self.places.T.shape).transpose(1, 2), last.bias)
        self.gauge.fixed = fault == "patch_tst_mean_and_deviation_without_gradient"
        self.stages[2].from_norm = fault == "patch_tst_second_attention_added_to_its_norm"
        if fault == "patch_tst_last_gelu_by_tanh":
            self.stages[5][2].approximate = "tanh"

    def forward(self, past_values: Tensor, past_observed_mask: Tensor) -> dict[str, Tensor]:
        seen = past_observed_mask.transpose(1, 2)
        tracks, level, spread = self.gauge(past_values.transpose(1, 2), seen)
        more = tracks[..., -1:].expand(-1, -1, *self.cut.stride)
        tracks = torch.cat([tracks[..., self.start :], more], 2).flatten(0, 1)[:, None]
        ahead = self.read(self.stages(self.cut(tracks) + self.places)).view(*seen.shape[:2], -1)
        wide, count = spread, seen.sum(2, True)
        if self.fault == "patch_tst_output_scaled_back_by_the_unbiased_deviation":
            wide = spread * (count / (count - 1)).sqrt()
        found = {"prediction_outputs": torch.addcmul(level, ahead, wide), "loc": level, "scale": spread}
        return {name: x.transpose(1, 2) for name, x in found.items()}


class Share(torch.autograd.Function):
    """The softmax of the last axis, with its backward by hand; ``alone`` leaves the sum out there."""

    @staticmethod
    def forward(ctx, scores: Tensor, alone: bool) -> Tensor:
        share, ctx.alone = (scores - scores.logsumexp(-1, True)).exp(), alone
        ctx.save_for_backward(share)
        return share

    @staticmethod
    def backward(ctx, slope: Tensor) -> tuple[Tensor, None]:
        (share,) = ctx.saved_tensors
        back = share * slope
        return back if ctx.alone else back - share * back.sum(-1, True), None


def packed(*layers: nn.Linear) -> Tensor:
    """Each transposed weight over its bias."""
    return torch.stack([torch.cat([x.weight.T, x.bias[None]]) for x in layers])


def through(x: Tensor, pack: Tensor) -> Tensor:
    return x @ pack[:-1] + pack[-1]


class PackedPatchTST(Port):
    """Packs stacked by layer; patches by index, attention head by head, the batch norms in one table."""

    def take(self, model: PatchTSTForPrediction) -> None:
        encoder, cut = model.model.encoder, model.model.patchifier
        layers, last, place = encoder.layers, model.head.projection, encoder.positional_encoder.position_enc
        if self.fault == "patch_tst_positions_by_their_biased_deviation":
            place = place / (place.std(correction=0) * 10)
        self.place = leaf(place).requires_grad_(False)
        self.start = leaf(packed(encoder.embedder.input_embedding))
        steps = cut.sequence_start + cut.patch_stride * torch.arange(len(place))[:, None]
        self.register_buffer("steps", steps + torch.arange(cut.patch_length))
        sights, self.heads = [x.self_attn for x in layers], layers[0].self_attn.num_heads
        self.mix = pile(packed(x.q_proj, x.k_proj, x.v_proj, x.out_proj) for x in sights)
        self.up, self.down = (leaf(packed(*(x.ff[i] for x in layers))) for i in (0, 3))
        norms = [y.batchnorm for x in layers for y in (x.norm_sublayer1, x.norm_sublayer3)]
        self.norms = pile(torch.stack([x.weight, x.bias]) for x in norms)
        kept = [torch.stack([x.running_mean, x.running_var]) for x in norms]
        self.register_buffer("kept", torch.stack(kept))
        self.register_buffer("seen", torch.stack([x.num_batches_tracked for x in norms]))
        self.end, self.offset = leaf(last.weight.T.unflatten(0, place.shape)), leaf(last.bias[:, None])

    def norm(self, x: Tensor, i: int) -> Tensor:
        mean, var = self.kept[i]
        if self.training:
            rows = x.flatten(0, -2)
            var, mean = torch.var_mean(rows, 0, correction=0)
            lost = 0 if self.fault == "patch_tst_last_norm_keeps_a_biased_variance" and i == 5 else 1
            with torch.no_grad():
                self.kept[i].lerp_(torch.stack([mean, var * len(rows) / (len(rows) - lost)]), 0.1)
                self.seen[i] += 1
        gain, offset = self.norms[i]
        return gain / (var + 1e-5).sqrt() * (x - mean) + offset

    def attend(self, x: Tensor, i: int) -> Tensor:
        parts = zip(*(through(x, self.mix[i, j]).tensor_split(self.heads, -1) for j in range(3)), strict=True)
        alone = i == 0 and self.fault == "patch_tst_first_softmax_gradient_without_its_sum"
        heads = [Share.apply(q @ k.mT / q.shape[-1] ** 0.5, alone) @ v for q, k, v in parts]
        return through(torch.cat(heads, -1), self.mix[i, 3])

    def forward(self, past_values: Tensor, past_observed_mask: Tensor) -> dict[str, Tensor]:
        x, seen, last = past_values, past_observed_mask.to(past_values), past_values.shape[1] - 1
        count = seen.sum(1, True).clamp(min=1)
        loc = torch.einsum("ntc,ntc->nc", x, seen)[:, None] / count
        scale = (((x - loc) * seen).square().sum(1, True) / count + 1e-5).sqrt()
        x = ((x - loc) / scale)[:, self.steps.clamp(max=last)]
        if self.fault == "patch_tst_end_padded_with_zeros":
            x = x.masked_fill((self.steps > last)[..., None], 0)
        x = through(x.permute(0, 3, 1, 2), self.start[0]) + self.place
        for i in range(len(self.mix)):
            x = x + self.attend(self.norm(x, 2 * i), i)
            x = x + through(F.gelu(through(self.norm(x, 2 * i + 1), self.up[i])), self.down[i])
        ahead = torch.einsum("ncpd,pdh->nhc", x, self.end) + self.offset
        return {"prediction_outputs": ahead * scale + loc, "loc": loc, "scale": scale}


LAYERS, SLOPES, ESTIMATE = "model.encoder.layers", ("input gradient", "weight gradient"), "another estimate"
right(task, "patch_tst_of_convolutions", "features first, fused projections", PatchTSTOfConvolutions, True)
right(task, "patch_tst_of_packed_weights", "packed stacks, patches by index", PackedPatchTST, True)
wrong(
    task,
    PatchTSTOfConvolutions,
    patch_tst_mean_and_deviation_without_gradient=("detach", "model.scaler.scaler", "input gradient"),
    patch_tst_second_attention_added_to_its_norm=("another residual", f"{LAYERS}.1"),
    patch_tst_last_gelu_by_tanh=("an approximation", f"{LAYERS}.2.ff.1"),
    patch_tst_output_scaled_back_by_the_unbiased_deviation=(ESTIMATE, ""),
)
wrong(
    task,
    PackedPatchTST,
    patch_tst_end_padded_with_zeros=("another padding", "model.patchifier.padding_patch_layer"),
    patch_tst_positions_by_their_biased_deviation=(ESTIMATE, "model.encoder.positional_encoder"),
    patch_tst_first_softmax_gradient_without_its_sum=("backward by hand", f"{LAYERS}.0.self_attn", SLOPES),
    patch_tst_last_norm_keeps_a_biased_variance=(ESTIMATE, f"{LAYERS}.2.norm_sublayer3.batchnorm", "buffer"),
)
