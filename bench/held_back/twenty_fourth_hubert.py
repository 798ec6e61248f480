"""Two ports of a small HuBERT: a tree of stages with time before channels, and one class of packed rows."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bench.held_back._twenty_fourth_hubert as made
from bench.held_back._fifth_vision import filled, right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twenty_fourth_hubert import FEATURE_GRAD_MULT, GROUPS, HEADS, HIDDEN, HOP, POSITIONS

task = few("twenty_fourth_hubert", made.HubertForPreTraining, made.tones, made.masked_prediction)
SIGHT = 60  # the samples that a frame is made of


class Cut(nn.Module):  # of [N, T, C] into windows
    def __init__(self, conv: nn.Conv1d):
        super().__init__()
        self.kernel, self.window = leaf(conv.weight.flatten(1).T), (1, *conv.kernel_size, *conv.stride)

    def forward(self, x: Tensor) -> Tensor:
        return x.unfold(*self.window).flatten(2) @ self.kernel


class Level(nn.Module):
    def __init__(self, norm: nn.GroupNorm | nn.LayerNorm, axis: int = -1):
        super().__init__()
        self.gain, self.offset, self.eps = leaf(norm.weight), leaf(norm.bias), norm.eps
        self.axis, self.correction = axis, 0

    def forward(self, x: Tensor) -> Tensor:
        spread, center = torch.var_mean(x, self.axis, correction=self.correction, keepdim=True)
        return (x - center) / (spread + self.eps).sqrt() * self.gain + self.offset


def joined(*layers: nn.Linear) -> nn.Linear:
    weight, bias = (torch.cat([getattr(x, name) for x in layers]) for name in ("weight", "bias"))
    return filled(nn.Linear(*weight.T.shape), weight, bias)


class Opening(nn.Module):
    """Features -> the first states: projected, some hidden, the padding silenced, and placed."""

    def __init__(self, model: nn.Module):
        super().__init__()
        start, conv = model.feature_projection, model.encoder.pos_conv_embed.conv
        self.enter = nn.Sequential(Level(start.layer_norm), joined(start.projection))
        self.hidden, self.reveal = leaf(model.masked_spec_embed), False
        weight, self.offset = conv.parametrizations.weight, leaf(conv.bias)
        self.direction = leaf(weight.original1.unflatten(0, (GROUPS, -1)).permute(0, 3, 2, 1))
        self.length, self.level = leaf(weight.original0.flatten()), Level(model.encoder.layer_norm)

    def forward(self, x: Tensor, hide: Tensor, real: Tensor) -> Tensor:
        x = self.enter(x)
        if self.training or not self.reveal:
            x = x + hide[:, :, None] * (self.hidden - x)
        x = x * real[:, :, None]
        length = self.length / self.direction.square().sum((0, 2, 3)).sqrt()
        y = F.pad(x, (0, 0, POSITIONS // 2, (POSITIONS - 1) // 2)).unfold(1, POSITIONS, 1)
        y = torch.einsum("ntgik,gkio,k->ntgo", y.unflatten(2, (GROUPS, -1)), self.direction, length)
        return self.level(x + F.gelu(y.flatten(2) + self.offset))


class Layer(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        part, forward = layer.attention, layer.feed_forward
        self.ask, self.answer = joined(part.q_proj, part.k_proj, part.v_proj), joined(part.out_proj)
        self.wide, self.narrow = joined(forward.intermediate_dense), joined(forward.output_dense)
        self.first, self.second = Level(layer.layer_norm), Level(layer.final_layer_norm)
        self.everywhere = False

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        q, k, v = self.ask(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, None if self.everywhere else real[:, None, None])
        x = self.first(x + self.answer(mixed.transpose(1, 2).flatten(2)))
        return self.second(x + self.narrow(F.gelu(self.wide(x))))


class HubertOfStages(Port):
    """An ear, an opening and layers; windows for convolutions, fused products, time before channels."""

    def take(self, model: made.HubertForPreTraining) -> None:
        (first, *rest), head = model.hubert.feature_extractor.conv_layers, model.logit_generator
        self.ear = nn.Sequential(Cut(first.conv), Level(first.layer_norm, 1), nn.GELU())
        self.ear.extend(part for each in rest for part in (Cut(each.conv), nn.GELU()))
        self.layers = nn.ModuleList(map(Layer, model.hubert.encoder.layers))
        self.opening, self.last = Opening(model.hubert), joined(head.final_proj)
        self.names = leaf(head.label_embeddings.T)
        self.ear[1].correction = int(self.fault == "hubert_first_group_norm_takes_the_unbiased_variance")
        self.opening.reveal = self.fault == "hubert_masked_frames_heard_in_evaluation"
        self.layers[1].everywhere = self.fault == "hubert_second_layer_attends_to_the_padding"

    def forward(self, input_values: Tensor, attention_mask: Tensor, mask_time_indices: Tensor):
        x = self.ear(input_values[:, :, None])
        x = x.detach().lerp(x, FEATURE_GRAD_MULT)
        size, real = x.square().mean(), attention_mask.unfold(1, SIGHT, HOP).amin(2) > 0
        x = self.opening(x, mask_time_indices, real)
        for layer in self.layers:
            x = layer(x, real)
        still = self.fault == "hubert_label_norms_taken_for_constants"
        length = (self.names.detach() if still else self.names).norm(dim=0)
        return F.normalize(self.last(x), dim=2) @ (self.names / length) / made.TEMPERATURE, size


def sheet(*layers: nn.Linear) -> Tensor:
    return torch.cat([torch.cat([x.weight, x.bias[:, None]], 1) for x in layers])


def rows(x: Tensor, table: Tensor) -> Tensor:
    return table[:, :-1] @ x + table[:, -1:]


def even(x: Tensor, gain: Tensor, offset: Tensor, axis: int = 1) -> Tensor:
    x = x - x.mean(axis, keepdim=True)
    return x * (x.square().mean(axis, keepdim=True) + 1e-5).rsqrt() * gain[:, None] + offset[:, None]


def slide(x: Tensor, kernel: Tensor, stride: int = 1) -> Tensor:
    end = x.shape[-1] - kernel.shape[-1] + 1
    return sum(w @ x[..., j : j + end : stride] for j, w in enumerate(kernel.unbind(-1)))


class HubertInRows(Port):
    """Packed weights; channels before time, tap by tap, and offsets as a last column."""

    def take(self, model: made.HubertForPreTraining) -> None:
        hubert, head = model.hubert, model.logit_generator
        ear, start, encoder = hubert.feature_extractor.conv_layers, hubert.feature_projection, hubert.encoder
        conv, inner = encoder.pos_conv_embed.conv, [(x, x.attention, x.feed_forward) for x in encoder.layers]
        norms = ear[0].layer_norm, start.layer_norm, encoder.layer_norm
        self.even_0, self.even_1, self.even_2 = (pile((norm.weight, norm.bias)) for norm in norms)
        self.ear = leaf(torch.cat([x.conv.weight.flatten() for x in ear]))
        self.enter = leaf(torch.cat([sheet(start.projection), hubert.masked_spec_embed[:, None]], 1))
        (length, direction), self.offset = conv.parametrizations.weight.parameters(), leaf(conv.bias)
        self.place = leaf(torch.cat([direction.flatten(0, 1), length[0]]))
        wide = [sheet(a.q_proj, a.k_proj, a.v_proj, a.out_proj, f.intermediate_dense) for _, a, f in inner]
        norms = [[*x.layer_norm.parameters(), *x.final_layer_norm.parameters()] for x, *_ in inner]
        self.wide, self.evens = pile(wide), pile(map(torch.stack, norms))
        self.narrow = pile(sheet(f.output_dense) for *_, f in inner)
        self.end, self.names = leaf(sheet(head.final_proj)), leaf(head.label_embeddings)

    def places(self, x: Tensor) -> Tensor:
        kernel = self.place[-1] * self.place[:-1] / self.place[:-1].square().sum(0).sqrt()
        kernel = kernel.view(GROUPS, HIDDEN // GROUPS, -1, POSITIONS)
        x = slide(F.pad(x, [POSITIONS // 2] * 2).unflatten(1, (GROUPS, -1)), kernel).flatten(1, 2)
        x = x[..., 1:] if self.fault == "hubert_positions_drop_the_first_frame" else x[..., :-1]
        return F.gelu(x + self.offset[:, None])

    def layer(self, i: int, x: Tensor, real: Tensor) -> Tensor:
        ask, answer, wide = self.wide[i].tensor_split((3 * HIDDEN, 4 * HIDDEN))
        q, k, v = rows(x, ask).unflatten(1, (3, HEADS, -1)).unbind(1)
        score = (k.mT @ q / q.shape[2] ** 0.5).masked_fill(~real[:, None, :, None], -torch.inf)
        x = x + rows((v @ score.softmax(2)).flatten(1, 2), answer)
        y = even(x, *self.evens[i, :2])
        kept = x if self.fault == "hubert_last_layer_adds_to_the_unnormed_sum" and i == 2 else y
        return even(kept + rows(F.gelu(rows(y, wide)), self.narrow[i]), *self.evens[i, 2:])

    def forward(self, input_values: Tensor, attention_mask: Tensor, mask_time_indices: Tensor):
        x, used = input_values[:, None], 0
        for out, size, stride in zip(made.CONV_DIM, made.CONV_KERNEL, made.CONV_STRIDE, strict=True):
            kernel = self.ear[used : used + out * x.shape[1] * size].view(out, -1, size)
            x = slide(x, kernel, stride)
            x, used = F.gelu(x if used else even(x, *self.even_0, axis=2)), used + kernel.numel()
        if self.fault != "hubert_feature_gradients_left_whole":
            x = FEATURE_GRAD_MULT * x + (1 - FEATURE_GRAD_MULT) * x.detach()
        real = torch.arange(x.shape[2]).to(x.device) <= (attention_mask.sum(1, True) - SIGHT) // HOP
        sizes = x.square().mean(1)
        if self.fault == "hubert_penalty_of_the_real_frames_only":
            sizes = sizes[real]
        x = rows(even(x, *self.even_1), self.enter[:, :-1])
        x = torch.where(mask_time_indices[:, None], self.enter[:, -1:], x) * real[:, None]
        x = even(x + self.places(x), *self.even_2)
        for i in range(len(self.wide)):
            x = self.layer(i, x, real)
        x = rows(x, self.end)
        x = self.names @ x / x.norm(dim=1, keepdim=True) / self.names.norm(dim=1)[:, None]
        return x.mT / made.TEMPERATURE, sizes.mean()


SLOPES, NORM = ("input gradient", "weight gradient"), "hubert.feature_extractor.conv_layers.0.layer_norm"
right(task, "hubert_of_stages_with_time_first", "a tree, windows, fused products", HubertOfStages)
right(task, "hubert_in_packed_rows", "packed weights, taps, channels first", HubertInRows)
wrong(
    task,
    HubertOfStages,
    hubert_first_group_norm_takes_the_unbiased_variance=("a divisor off by one", NORM),
    hubert_masked_frames_heard_in_evaluation=("a mask in training only", "hubert", "eval"),
    hubert_second_layer_attends_to_the_padding=("a mask left out", "hubert.encoder.layers.1.attention"),
    hubert_label_norms_taken_for_constants=("a detached norm", "logit_generator", "weight gradient"),
)
wrong(
    task,
    HubertInRows,
    hubert_penalty_of_the_real_frames_only=("a mean over fewer", ""),
    hubert_positions_drop_the_first_frame=("a shift by one", "hubert.encoder.pos_conv_embed.padding"),
    hubert_feature_gradients_left_whole=("a gradient's factor left out", "hubert", SLOPES),
    hubert_last_layer_adds_to_the_unnormed_sum=("another residual", "hubert.encoder.layers.2"),
)
