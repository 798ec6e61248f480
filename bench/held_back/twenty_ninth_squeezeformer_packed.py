"""A port of a small Squeezeformer: one class of packed weights."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._twenty_ninth_squeezeformer import HEADS, WIDTH, ASRModel
from bench.held_back.twenty_ninth_squeezeformer import task, waves


class PackedSqueezeformer(Port):
    """What the layers have stacked by shape; distances as a table of all pairs of frames."""

    def take(self, model: ASRModel) -> None:
        old = model.encoder
        layers = [
            {k: x.flatten(1) if x.dim() == 3 else x for k, x in y.named_parameters()} for y in old.encoders
        ]
        layers = [{k: x.flatten() if x.numel() == WIDTH else x for k, x in y.items()} for y in layers]
        shapes, self.at = list(dict.fromkeys(x.shape for x in layers[0].values())), {}
        for name, x in layers[0].items():
            self.at[name] = (shapes.index(x.shape), sum(layers[0][k].shape == x.shape for k in self.at))
        groups = [[k for k, x in layers[0].items() if x.shape == shape] for shape in shapes]
        self.w = nn.ParameterList(pile(torch.stack([x[k] for k in each]) for x in layers) for each in groups)
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            values = [getattr(x.conv_module.norm, name) for x in old.encoders]
            self.register_buffer(name, torch.stack(values))
        rest = [x for k, x in model.named_parameters() if ".encoders." not in k]
        self.ends = nn.ParameterList(map(leaf, rest))

    def of(self, i: int, name: str) -> Tensor:
        group, place = self.at[name]
        return self.w[group][i, place]

    def line(self, i: int, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.of(i, name + ".weight"), self.of(i, name + ".bias"))

    def attend(self, i: int, x: Tensor, real: Tensor, pace: int) -> Tensor:
        q, k, v = (self.line(i, f"self_attn.linear_{c}", x).unflatten(2, (HEADS, -1)) for c in "qkv")
        u, turn = (self.of(i, f"self_attn.pos_bias_{c}").view(HEADS, -1) for c in "uv")
        frame = torch.arange(x.shape[1], dtype=x.dtype)
        far = F.linear(waves(pace * (frame[:, None] - frame)), self.of(i, "self_attn.linear_pos.weight"))
        bias = torch.einsum("nihd,ijhd->nhij", q + turn, far.unflatten(2, (HEADS, -1))) / q.shape[3] ** 0.5
        bias = bias.masked_fill(~real[:, None, None, :, 0], -math.inf)
        y = F.scaled_dot_product_attention(*((z.transpose(1, 2)) for z in (q + u, k, v)), attn_mask=bias)
        return self.line(i, "self_attn.linear_out", y.transpose(1, 2).flatten(2))

    def slide(self, i: int, x: Tensor, real: Tensor) -> Tensor:
        at = "conv_module."
        x = F.glu(self.line(i, at + "pointwise_conv1", x * real), 2).mT
        taps = self.of(i, at + "depthwise_conv.weight")[:, None]
        x = F.conv1d(x, taps, self.of(i, at + "depthwise_conv.bias"), padding="same", groups=WIDTH)
        norm = self.of(i, at + "norm.weight"), self.of(i, at + "norm.bias")
        x = F.batch_norm(x, self.running_mean[i], self.running_var[i], *norm, self.training)
        self.num_batches_tracked[i] += self.training
        return self.line(i, at + "pointwise_conv2", F.silu(x).mT) * real

    def layer(self, i: int, x: Tensor, real: Tensor, pace: int = 1) -> Tensor:
        for j, name in enumerate(("self_attn", "ffn1", "conv_module", "ffn2"), 1):
            y = x * self.of(i, name + ".ada_scale") + self.of(i, name + ".ada_bias")
            if j == 1:
                y = self.attend(i, y, real, pace)
            elif j == 3:
                y = self.slide(i, y, real)
            else:
                y = self.line(i, name + ".w_2", F.silu(self.line(i, name + ".w_1", y)))
            rough = self.fault == "squeezeformer_last_norm_with_a_larger_epsilon" and (i, j) == (3, 4)
            norm = (self.of(i, f"layer_norm{j}.{k}") for k in ("weight", "bias"))
            x = F.layer_norm(x + y, (WIDTH,), *norm, 1e-3 if rough else 1e-5)
        return x

    def forward(self, speech: Tensor, speech_lengths: Tensor) -> Tensor:
        w = self.ends
        x = F.conv2d(speech[:, None], w[0], w[1], 2).relu()
        x = F.conv2d(x, w[2], w[3], 2, groups=WIDTH).relu().transpose(1, 2)
        if self.fault == "squeezeformer_bands_flattened_before_channels":
            x = x.transpose(2, 3)
        x = F.layer_norm(F.linear(x.flatten(2) * WIDTH**0.5, w[4], w[5]), (WIDTH,), w[6], w[7])
        real = (torch.arange(x.shape[1]) * 4 < speech_lengths[:, None])[..., None]
        x = self.layer(0, x, real)
        edge = 2 if self.fault == "squeezeformer_time_reduction_padded_as_same" else 3
        half = real[:, ::2]
        y = F.conv1d((x * real).mT, w[8], w[9], 2, edge, groups=WIDTH)[..., : half.shape[1]]
        y = F.conv1d(y, w[10], w[11]).mT
        for i in (1, 2):
            y = self.layer(i, y, half, 2)
        y = F.linear(y, w[12], w[13]).repeat_interleave(2, 1)[:, : x.shape[1]]
        if self.fault == "squeezeformer_skip_over_the_middle_detached":
            x = x.detach()
        x = self.layer(3, (x + y) * real, real)
        return F.linear(F.linear(x, w[14], w[15]), w[16], w[17]).log_softmax(2)


SLOPES = ("input gradient", "weight gradient")
right(task, "squeezeformer_of_packed_weights", "stacks by shape, a table of pairs", PackedSqueezeformer)
wrong(
    task,
    PackedSqueezeformer,
    squeezeformer_bands_flattened_before_channels=("another order of axes", "encoder.embed"),
    squeezeformer_time_reduction_padded_as_same=("other padding", "encoder.time_reduction_layer.dw_conv"),
    squeezeformer_skip_over_the_middle_detached=("detach", "encoder", SLOPES),
    squeezeformer_last_norm_with_a_larger_epsilon=("epsilon", "encoder.encoders.3.layer_norm4"),
)
