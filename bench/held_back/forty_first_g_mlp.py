"""Two ports of a small gMLP: a tree with the channels before the tokens, and one class of stacked weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._forty_first_g_mlp import PATCH, TextAndVision, sentences_and_waves, three_losses
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("forty_first_g_mlp", TextAndVision, sentences_and_waves, three_losses)


class Map(nn.Module):
    """A linear map of the channels of [N, C, T], or of rows of its weight."""

    def __init__(self, weight: Tensor, offset: Tensor | None = None):
        super().__init__()
        self.kernel = leaf(weight[..., None])
        self.offset = None if offset is None else leaf(offset)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv1d(x, self.kernel, self.offset)


def map_of(layer: nn.Linear) -> Map:
    return Map(layer.weight, layer.bias)


class Standard(nn.Module):
    """A norm over the channels of [N, C, T]."""

    def __init__(self, norm: nn.LayerNorm):
        super().__init__()
        self.gain, self.offset = leaf(norm.weight[:, None]), leaf(norm.bias[:, None])
        self.eps, self.constant = norm.eps, False

    def forward(self, x: Tensor) -> Tensor:
        center = x.mean(1, keepdim=True)
        spread = (x - center).square().mean(1, keepdim=True).add(self.eps).sqrt()
        if self.constant:
            center, spread = center.detach(), spread.detach()
        return (x - center) / spread * self.gain + self.offset


class Glance(nn.Module):
    """Causal attention of one head, its three maps apart."""

    def __init__(self, attention: nn.Module):
        super().__init__()
        self.ask, self.key, self.value = map(Map, attention.to_qkv.weight.chunk(3))
        self.out = map_of(attention.to_out)
        self.width = attention.to_out.in_features

    def forward(self, x: Tensor) -> Tensor:
        scores = self.key(x).mT @ (self.ask(x) / self.width**0.5)
        scores = scores + torch.full_like(scores[0], -torch.inf).tril(-1)
        return self.out(self.value(x) @ scores.softmax(1))


class Mixer(nn.Module):
    """A residual block: the content and a gate that is mixed over the tokens by group of channels."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        block, unit, first = layer.fn.fn, layer.fn.fn.sgu, layer.fn.fn.proj_in[0]
        sides = zip(first.weight.chunk(2), first.bias.chunk(2), strict=True)
        self.content, self.gate = (Map(*side) for side in sides)
        self.before, self.inner = Standard(layer.fn.norm), Standard(unit.norm)
        self.mix, self.level = leaf(unit.weight.mT), leaf(unit.bias[:, None])
        self.glance = Glance(block.attn) if block.attn is not None else None
        self.out, self.ahead = map_of(block.proj_out), 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        gate = self.inner(F.gelu(self.gate(y))).unflatten(1, (len(self.mix), -1))
        mix = self.mix if self.glance is None else self.mix.triu(-self.ahead)
        gate = (gate @ mix + self.level).flatten(1, 2)
        gate = gate.tanh() if self.glance is None else gate + self.glance(y)
        return x + self.out(F.gelu(self.content(y)) * gate)


class GMLPOfChannels(Port):
    """Mixers of [N, C, T] with split maps, norms by hand and products with matrices on the right."""

    def take(self, model: TextAndVision) -> None:
        text, vision, fault = model.text, model.vision, self.fault
        self.words, self.see = leaf(text.to_embed.weight.T), map_of(vision.to_patch_embed[1])
        self.reader = nn.Sequential(*map(Mixer, text.layers), Standard(text.norm))
        self.viewer = nn.Sequential(*map(Mixer, vision.layers), Standard(vision.norm))
        self.next, self.topic, self.shape = map(map_of, (text.to_logits, text.to_class, vision.to_logits))
        if fault == "g_mlp_first_attention_scaled_by_the_width_of_the_tokens":
            self.reader[0].glance.width = len(self.words)
        if fault == "g_mlp_third_text_unit_sees_one_token_ahead":
            self.reader[2].ahead = 1
        if fault == "g_mlp_first_vision_gate_norm_detached":
            self.viewer[0].inner.constant = True

    def forward(self, tokens: Tensor, mask: Tensor, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.reader(self.words[:, tokens].transpose(0, 1))
        share = mask.to(x) / mask.sum(1, keepdim=True)
        patches = image.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH)
        order = (0, 1, 4, 5, 2, 3) if self.fault == "g_mlp_patches_put_channels_first" else (0, 4, 5, 1, 2, 3)
        patches = patches.permute(order).flatten(1, 3).flatten(2)
        seen = self.viewer(self.see(patches)).mean(2, keepdim=True)
        return self.next(x).mT, self.topic(x @ share[..., None])[..., 0], self.shape(seen)[..., 0]


def sheet(layer: nn.Module) -> Tensor:
    """Rows of a linear layer's inputs, then its bias; or a norm's scale and bias."""
    return torch.cat([layer.weight.T if layer.weight.ndim == 2 else layer.weight[None], layer.bias[None]])


def stacks(layers: nn.ModuleList) -> list[nn.Parameter]:
    """For all layers: both norms, the way in and out, the mixing with its bias for a last column."""
    blocks = [layer.fn.fn for layer in layers]
    found = [pile(sheet(layer.fn.norm) for layer in layers), pile(sheet(x.sgu.norm) for x in blocks)]
    found += [pile(sheet(x.proj_in[0]) for x in blocks), pile(sheet(x.proj_out) for x in blocks)]
    return [*found, pile(torch.cat([x.sgu.weight, x.sgu.bias[..., None]], 2) for x in blocks)]


def norm(x: Tensor, rows: Tensor) -> Tensor:
    return F.layer_norm(x, rows[0].shape, rows[0], rows[1])


def linear(x: Tensor, rows: Tensor) -> Tensor:
    return torch.addmm(rows[-1], x.flatten(0, -2), rows[:-1]).unflatten(0, x.shape[:-1])


class StackedGMLP(Port):
    """Stacks of sheets by depth, one loop for both kinds of layers, products over tokens by einsum."""

    def take(self, model: TextAndVision) -> None:
        text, vision = model.text, model.vision
        self.read, self.view = nn.ParameterList(stacks(text.layers)), nn.ParameterList(stacks(vision.layers))
        looks = [layer.fn.fn.attn for layer in text.layers]
        self.look, self.tell = pile(x.to_qkv.weight.T for x in looks), pile(sheet(x.to_out) for x in looks)
        patch = vision.to_patch_embed[1]
        self.embed = leaf(text.to_embed.weight)
        self.patch = leaf(patch.weight.unflatten(1, (PATCH, PATCH, -1)).permute(0, 3, 1, 2))
        self.start, self.last = leaf(patch.bias), pile([text.norm.weight, text.norm.bias])
        self.heads = leaf(torch.cat([sheet(text.to_logits), sheet(text.to_class)], 1))
        self.end, self.answer = leaf(sheet(vision.norm)), leaf(sheet(vision.to_logits))

    def attend(self, i: int, x: Tensor) -> Tensor:
        q, k, v = (x @ self.look[i]).tensor_split(3, -1)
        scores = torch.einsum("nid,njd->nij", q, k) / q.shape[-1] ** 0.5
        shares = F.normalize(scores.exp().tril(), 1, -1)
        if self.fault == "g_mlp_third_attention_takes_its_shares_for_constants" and i == 2:
            shares = shares.detach()
        return linear(shares @ v, self.tell[i])

    def run(self, x: Tensor, stack: nn.ParameterList, text: bool) -> Tensor:
        for i, (before, inner, up, down, mix) in enumerate(zip(*stack, strict=True)):
            y = norm(x, before)
            rough = self.fault == "g_mlp_second_text_layer_approximates_its_gelu" and text and i == 1
            wide = F.gelu(linear(y, up), approximate="tanh" if rough else "none")
            content, gate = wide.tensor_split(2, -1)
            over = mix[..., :-1].tril() if text else mix[..., :-1]
            gate = norm(gate, inner).unflatten(2, (len(mix), -1))
            gate = (torch.einsum("hmt,nthd->nmhd", over, gate) + mix[..., -1].T[..., None]).flatten(2)
            gated = content * (gate + self.attend(i, y) if text else gate.tanh())
            if self.fault == "g_mlp_second_vision_unit_squashes_the_product" and not text and i == 1:
                gated = (content * gate).tanh()
            x = x + linear(gated, down)
        return x

    def forward(self, tokens: Tensor, mask: Tensor, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = norm(self.run(self.embed[tokens], self.read, True), self.last)
        following, topic = self.heads.split([len(self.embed), self.heads.shape[1] - len(self.embed)], 1)
        if self.fault == "g_mlp_topic_pools_the_padding_too_in_evaluation" and not self.training:
            mask = torch.ones_like(mask)
        pooled = torch.einsum("ntd,nt->nd", x, mask.to(x)) / mask.sum(1, keepdim=True)
        z = F.conv2d(image, self.patch, self.start, stride=PATCH).flatten(2).mT
        z = norm(self.run(z, self.view, False), self.end)
        return linear(x, following), linear(pooled, topic), linear(z.mean(1), self.answer)


SLOPES = ("input gradient", "weight gradient")
right(task, "g_mlp_of_channels_before_tokens", "a tree, split maps, norms by hand", GMLPOfChannels)
right(task, "g_mlp_of_stacked_weights", "packed stacks, one loop for both towers", StackedGMLP)
wrong(
    task,
    GMLPOfChannels,
    g_mlp_patches_put_channels_first=("another order in patches", "vision.to_patch_embed.0"),
    g_mlp_first_attention_scaled_by_the_width_of_the_tokens=("another scale", "text.layers.0.fn.fn.attn"),
    g_mlp_third_text_unit_sees_one_token_ahead=("a mask off by one", "text.layers.2.fn.fn.sgu"),
    g_mlp_first_vision_gate_norm_detached=("statistics cut", "vision.layers.0.fn.fn.sgu.norm", SLOPES),
)
wrong(
    task,
    StackedGMLP,
    g_mlp_second_text_layer_approximates_its_gelu=("another gelu", "text.layers.1.fn.fn.proj_in.1"),
    g_mlp_second_vision_unit_squashes_the_product=("another order", "vision.layers.1.fn.fn.sgu"),
    g_mlp_third_attention_takes_its_shares_for_constants=("detach", "text.layers.2.fn.fn.attn", SLOPES),
    g_mlp_topic_pools_the_padding_too_in_evaluation=("padding in a mean", "text", "eval"),
)
