"""Two ports of a small E-Branchformer: a tree of halves and branches, and one class of stacked weights."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._thirty_fourth_branchformer import HEADS, LAYERS, ESPnetASRModel, hybrid, utterances

task = few("thirty_fourth_branchformer", ESPnetASRModel, utterances, hybrid)


class Affine(nn.Module):
    def __init__(self, *layers: nn.Linear):
        super().__init__()
        self.w = leaf(torch.cat([x.weight for x in layers]).T)
        self.b = leaf(torch.cat([x.bias for x in layers]))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w + self.b


def slide(x: Tensor, taps: Tensor, offset: Tensor) -> Tensor:
    """A depthwise convolution of [N, T, C] as a sum of shifted frames."""
    size, padded = taps.shape[1], F.pad(x, (0, 0, taps.shape[1] // 2, taps.shape[1] // 2))
    return sum(padded[:, i : i + x.shape[1]] * taps[:, i] for i in range(size)) + offset


class Front(Port):
    def take(self, embed: nn.Module) -> None:
        self.conv, out, self.short = embed.conv, embed.out[0], False
        self.w, self.b = leaf(out.weight.unflatten(1, (len(out.weight), -1))), leaf(out.bias)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.einsum("nctf,ocf->nto", self.conv(x[:, None]), self.w) + self.b
        left = ((lengths - 1) // 2 - 1) // 2 if self.short else (lengths + 3) // 4
        return x * len(self.b) ** 0.5, torch.arange(x.shape[1], device=x.device) < left[:, None]


class Half(nn.Sequential):
    share = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return x + self.share * super().forward(x)


class Global(Port):
    def take(self, attn: nn.Module) -> None:
        self.qkv, self.out = Affine(attn.linear_q, attn.linear_k, attn.linear_v), Affine(attn.linear_out)
        self.place, self.biases = leaf(attn.linear_pos.weight.T), pile([attn.pos_bias_u, attn.pos_bias_v])

    def forward(self, x: Tensor, waves: Tensor, kept: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, HEADS, -1)).unbind(2)
        far = (waves @ self.place).unflatten(2, (HEADS, -1))
        scores = torch.einsum("nihd,njhd->nhij", q + self.biases[0], k)
        scores = scores + torch.einsum("nihd,ijhd->nhij", q + self.biases[1], far)
        scores = (scores / q.shape[3] ** 0.5).masked_fill(~kept[:, None, None], -math.inf)
        return self.out(torch.einsum("nhij,njhd->nihd", scores.softmax(3), v).flatten(2))


class Local(Port):
    def take(self, mlp: nn.Module) -> None:
        self.up, self.down = Affine(mlp.channel_proj1[0]), Affine(mlp.channel_proj2)
        self.inner, conv, self.kind = mlp.csgu.norm, mlp.csgu.conv, "none"
        self.taps, self.b = leaf(conv.weight[:, 0]), leaf(conv.bias)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = F.gelu(self.up(x), approximate=self.kind).tensor_split(2, 2)
        return self.down(value * slide(self.inner(gate), self.taps, self.b))


class Layer(Port):
    def take(self, layer: nn.Module) -> None:
        one, two = layer.feed_forward_macaron, layer.feed_forward
        merge, conv = layer.merge_proj, layer.depthwise_conv_fusion
        self.first = Half(layer.norm_ff_macaron, Affine(one.w_1), nn.SiLU(), Affine(one.w_2))
        self.last = Half(layer.norm_ff, Affine(two.w_1), nn.SiLU(), Affine(two.w_2))
        self.wide, self.near, self.cut = Global(layer.attn), Local(layer.cgmlp), False
        self.norms = nn.ModuleList([layer.norm_mha, layer.norm_mlp, layer.norm_final])
        self.taps, self.c = (pile(x.tensor_split(2)) for x in (conv.weight[:, 0], conv.bias))
        self.merge, self.b = pile(merge.weight.T.tensor_split(2)), leaf(merge.bias)

    def forward(self, x: Tensor, waves: Tensor, kept: Tensor) -> Tensor:
        x = self.first(x)
        total = x + self.b
        for i, y in enumerate((self.wide(self.norms[0](x), waves, kept), self.near(self.norms[1](x)))):
            near = slide(y.detach() if self.cut else y, self.taps[i], self.c[i])
            total = total + (y + near) @ self.merge[i]
        return self.norms[2](self.last(total))


def sinusoids(x: Tensor, way: int = 1) -> Tensor:
    """The waves of the distance from each frame to each other one."""
    at, even = torch.arange(x.shape[1]).to(x), torch.arange(0, x.shape[2], 2).to(x)
    angles = way * (at[:, None] - at)[..., None] * 10000.0 ** (-even / x.shape[2])
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)


class BranchformerOfBranches(Port):
    def take(self, model: ESPnetASRModel) -> None:
        fault, encoder, tail = self.fault, model.encoder, model.decoder
        self.front, self.norm = Front(encoder.embed), encoder.after_norm
        self.layers = nn.ModuleList(map(Layer, encoder.encoders))
        self.words, self.context = leaf(tail.embed.weight), Affine(tail.context)
        self.next, self.letters = Affine(tail.output_layer), Affine(model.ctc.ctc_lo)
        self.front.short = fault == "branchformer_lengths_subsampled_as_the_convolutions_are"
        self.layers[1].first.share = 1 if fault == "branchformer_second_macaron_adds_all_of_its_step" else 0.5
        self.layers[0].cut = fault == "branchformer_first_merge_convolution_without_gradient"
        self.layers[2].near.kind = "tanh" if fault == "branchformer_last_gelu_by_its_tanh_formula" else "none"

    def forward(self, speech: Tensor, speech_lengths: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        x, kept = self.front(speech, speech_lengths)
        for layer in self.layers:
            x = layer(x, sinusoids(x), kept)
        x = self.norm(x)
        mean = torch.einsum("ntc,nt->nc", x, kept / kept.sum(1, True).to(x.dtype))
        y = self.next((self.words[text] + self.context(mean)[:, None]).tanh())
        return self.letters(x).log_softmax(2), y


class StackedBranchformer(Port):
    def take(self, model: ESPnetASRModel) -> None:
        layers = [dict(x.named_parameters()) for x in model.encoder.encoders]
        stacks = {k.replace(".", "_"): pile(x[k] for x in layers) for k in layers[0]}
        rest = {k.replace(".", "_"): leaf(v) for k, v in model.named_parameters() if ".encoders." not in k}
        self.deep, self.w = nn.ParameterDict(stacks), nn.ParameterDict(rest)

    def norm(self, x: Tensor, w: dict, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], w[name + "_weight"], w[name + "_bias"], 1e-12)

    def line(self, x: Tensor, w: dict, name: str) -> Tensor:
        return torch.einsum("...i,oi->...o", x, w[name + "_weight"]) + w[name + "_bias"]

    def half(self, x: Tensor, w: dict, end: str) -> Tensor:
        y = F.silu(self.line(self.norm(x, w, "norm_ff" + end), w, f"feed_forward{end}_w_1"))
        return x + self.line(y, w, f"feed_forward{end}_w_2") / 2

    def attend(self, i: int, x: Tensor, w: dict, kept: Tensor) -> Tensor:
        q, k, v = (self.line(x, w, "attn_linear_" + c).unflatten(2, (HEADS, -1)) for c in "qkv")
        back = self.fault == "branchformer_second_attention_counts_distances_backwards" and i == 1
        far = torch.einsum("ijc,oc->ijo", sinusoids(x, -1 if back else 1), w["attn_linear_pos_weight"])
        scores = ((q + w["attn_pos_bias_u"])[:, :, None] * k[:, None]).sum(4)
        scores = scores + ((q + w["attn_pos_bias_v"])[:, :, None] * far.unflatten(2, (HEADS, -1))).sum(4)
        if self.training or i < 2 or self.fault != "branchformer_last_attention_sees_padding_in_evaluation":
            scores = scores - 1e30 * ~kept[:, None, :, None]
        share = (scores / math.sqrt(q.shape[3])).softmax(2)[..., None]
        return self.line((share * v[:, None]).sum(2).flatten(2), w, "attn_linear_out")

    def gate(self, i: int, x: Tensor, w: dict) -> Tensor:
        value, y = F.gelu(self.line(x, w, "cgmlp_channel_proj1_0")).chunk(2, 2)
        taps = w["cgmlp_csgu_conv_weight"][:, 0], w["cgmlp_csgu_conv_bias"]
        late = self.fault == "branchformer_first_gate_norms_after_its_convolution" and i == 0
        y = slide(y if late else self.norm(y, w, "cgmlp_csgu_norm"), *taps)
        y = self.norm(y, w, "cgmlp_csgu_norm") if late else y
        return self.line(value * y, w, "cgmlp_channel_proj2")

    def forward(self, speech: Tensor, speech_lengths: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        x, w = speech[:, None], self.w
        for name in ("encoder_embed_conv_0", "encoder_embed_conv_2"):
            x = F.conv2d(x, w[name + "_weight"], w[name + "_bias"], 2).clamp(min=0)
        x = self.line(x.transpose(1, 2).flatten(2), w, "encoder_embed_out_0") * math.sqrt(x.shape[1])
        kept = 4 * torch.arange(x.shape[1], device=x.device) < speech_lengths[:, None]
        for i in range(LAYERS):
            v = {k: stack[i] for k, stack in self.deep.items()}
            x = self.half(x, v, "_macaron")
            y = self.attend(i, self.norm(x, v, "norm_mha"), v, kept)
            y = torch.cat([y, self.gate(i, self.norm(x, v, "norm_mlp"), v)], 2)
            y = y + slide(y, v["depthwise_conv_fusion_weight"][:, 0], v["depthwise_conv_fusion_bias"])
            x = self.norm(self.half(x + self.line(y, v, "merge_proj"), v, ""), v, "norm_final")
        x = self.norm(x, w, "encoder_after_norm")
        some = torch.ones_like(kept) if self.fault == "branchformer_decoder_averages_padding_too" else kept
        mean = (x * some[..., None]).sum(1, True) / some.sum(1)[:, None, None]
        y = torch.tanh(w["decoder_embed_weight"][text] + self.line(mean, w, "decoder_context"))
        return F.log_softmax(self.line(x, w, "ctc_ctc_lo"), 2), self.line(y, w, "decoder_output_layer")


SLOPES, FIRST = ("input gradient", "weight gradient"), "encoder.encoders.0"
MERGE, GELU = (FIRST, FIRST + ".depthwise_conv_fusion"), "encoder.encoders.2.cgmlp.channel_proj1.1"
right(task, "branchformer_of_branches", "a tree, fused and split products", BranchformerOfBranches)
right(task, "branchformer_of_stacks", "stacks, shifted sums, an additive mask", StackedBranchformer)
wrong(
    task,
    BranchformerOfBranches,
    branchformer_lengths_subsampled_as_the_convolutions_are=("shorter lengths", "encoder.embed"),
    branchformer_second_macaron_adds_all_of_its_step=("a factor left out", "encoder.encoders.1"),
    branchformer_first_merge_convolution_without_gradient=("detach", MERGE, SLOPES),
    branchformer_last_gelu_by_its_tanh_formula=("another gelu", GELU),
)
wrong(
    task,
    StackedBranchformer,
    branchformer_second_attention_counts_distances_backwards=("a sign", "encoder.encoders.1.attn"),
    branchformer_last_attention_sees_padding_in_evaluation=("no mask", "encoder.encoders.2.attn", "eval"),
    branchformer_first_gate_norms_after_its_convolution=("another order", "encoder.encoders.0.cgmlp.csgu"),
    branchformer_decoder_averages_padding_too=("padding in a mean", "decoder"),
)
