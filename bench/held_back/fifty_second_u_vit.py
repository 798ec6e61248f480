"""Two ports of a small U-ViT: nested levels with the channels last, and one class of stacked weights."""

import math
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fifty_second_u_vit import Diffusion, noise_loss, noisy_waves
from bench.held_back._fourth_ports import Port, leaf, pile, spatial, wrong
from bench.held_back._sixth_ports import few

task = few("fifty_second_u_vit", Diffusion, noisy_waves, noise_loss)
CHANNELS, HIGH, WIDE, PATCH, ROWS, COLUMNS = 3, 8, 10, 2, 4, 5
DIM, HEADS, CLASSES, EXTRAS = 24, 3, 7, 2


class Affine(nn.Module):
    def __init__(self, layer: nn.Module, weight: Tensor | None = None):
        super().__init__()
        self.weight = leaf((layer.weight if weight is None else weight).T)
        self.offset = leaf(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.offset


class Mixing(nn.Module):
    """A norm and an attention whose weights are kept by head; ``room`` is what the scores are scaled by."""

    def __init__(self, norm: nn.LayerNorm, attention: nn.Module):
        super().__init__()
        self.norm, self.room = deepcopy(norm), DIM // HEADS
        weights = attention.qkv.weight.chunk(3)
        self.ask, self.key, self.value = (leaf(w.unflatten(0, (HEADS, -1))) for w in weights)
        self.back = leaf(attention.proj.weight.unflatten(1, (HEADS, -1)))
        self.offset = leaf(attention.proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        q, k, v = (torch.einsum("nld,hed->nlhe", x, w) for w in (self.ask, self.key, self.value))
        score = torch.einsum("nlhe,nmhe->nhlm", q / math.sqrt(self.room), k)
        share = (score - score.logsumexp(-1, True)).exp()
        return torch.einsum("nhlm,nmhe,dhe->nld", share, v, self.back) + self.offset


class Layer(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        self.mixing = Mixing(block.norm1, block.attn)
        up, down = Affine(block.mlp.fc1), Affine(block.mlp.fc2)
        self.widen = nn.Sequential(deepcopy(block.norm2), up, nn.GELU(), down)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixing(x)
        return x + self.widen(x)


class Level(nn.Module):
    """A layer, what is inside, and a layer that reads both; the skip's linear is two products."""

    def __init__(self, enter: nn.Module, inner: nn.Module, leave: nn.Module):
        super().__init__()
        self.enter, self.inner, self.leave = Layer(enter), inner, Layer(leave)
        own, other = leave.skip_linear.weight.chunk(2, 1)
        self.own, self.other, self.silent = Affine(leave.skip_linear, own), leaf(other.T), False

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        skip = x.detach() if self.silent else x
        return self.leave(self.own(self.inner(x)) + skip @ self.other)


class Front(nn.Module):
    """The tokens of label, time and patches, each with its place; sines come before cosines."""

    def __init__(self, net: nn.Module):
        super().__init__()
        patch, (first, _, second) = net.patch_embed.proj, net.time_embed
        self.patch = Affine(patch, patch.weight.permute(0, 2, 3, 1).flatten(1))
        self.clock = Affine(first, first.weight.roll(DIM // 2, 1))
        self.clock_out, self.names = Affine(second), leaf(net.label_emb.weight)
        self.places, self.steps = leaf(net.pos_embed[0]), DIM // 2

    def forward(self, x: Tensor, n: Tensor, y: Tensor) -> Tensor:
        angle = n[:, None] * 10000 ** -(torch.arange(DIM // 2).to(x) / self.steps)
        time = self.clock_out(F.silu(self.clock(torch.cat([angle.sin(), angle.cos()], 1))))
        x = x.unflatten(2, (COLUMNS, PATCH)).unflatten(1, (ROWS, PATCH)).transpose(2, 3)
        x = self.patch(x.flatten(3).flatten(1, 2))
        return torch.cat([self.names[y][:, None], time[:, None], x], 1) + self.places


class NestedUViT(Port):
    """Levels within levels, channels last."""

    def take(self, model: Diffusion) -> None:
        net, fault = model.nnet, self.fault
        self.front, self.end = Front(net), deepcopy(net.norm)
        inner = Level(net.in_blocks[1], Layer(net.mid_block), net.out_blocks[0])
        self.body = Level(net.in_blocks[0], inner, net.out_blocks[1])
        self.decode, last = Affine(net.decoder_pred), net.final_layer
        self.smooth, self.offset = leaf(last.weight), leaf(last.bias)
        self.register_buffer("kept", model.alphas_cumprod.clone())
        self.body.silent = fault == "u_vit_last_skip_sends_no_gradient_back"
        if fault == "u_vit_time_frequencies_reach_the_last_period":
            self.front.steps -= 1
        if fault == "u_vit_second_in_block_scales_scores_by_the_whole_width":
            inner.enter.mixing.room = DIM

    def forward(self, x: Tensor, noise: Tensor, n: Tensor, y: Tensor, drop: Tensor) -> Tensor:
        kept = self.kept[n].view(-1, 1, 1, 1)
        x = (kept**0.5 * x + (1 - kept) ** 0.5 * noise).movedim(1, 3)
        if self.training or self.fault != "u_vit_labels_never_dropped_in_evaluation":
            y = y.masked_fill(drop, CLASSES)
        x = self.decode(self.end(self.body(self.front(x, n.to(x), y)))[:, EXTRAS:])
        x = x.view(-1, ROWS, COLUMNS, PATCH, PATCH, CHANNELS).transpose(2, 3)
        return spatial(x.reshape(-1, HIGH, WIDE, CHANNELS), self.smooth, self.offset).movedim(3, 1)


def sheet(layer: nn.Module) -> Tensor:
    return torch.cat([layer.weight.flatten(1).T, layer.bias[None]])


class StackedUViT(Port):
    """Stacks of the five blocks' weights in the order of their run, and a stack of skips."""

    def take(self, model: Diffusion) -> None:
        net = model.nnet
        blocks = [*net.in_blocks, net.mid_block, *net.out_blocks]
        self.qkv = pile(b.attn.qkv.weight.T for b in blocks)
        self.proj = pile(sheet(b.attn.proj) for b in blocks)
        self.up, self.down = pile(sheet(b.mlp.fc1) for b in blocks), pile(sheet(b.mlp.fc2) for b in blocks)
        norms = [x for b in blocks for x in (b.norm1, b.norm2)] + [net.norm]
        self.norms = pile(torch.stack([x.weight, x.bias]) for x in norms)
        self.joins = pile(sheet(b.skip_linear) for b in net.out_blocks)
        ends = (*net.time_embed[::2], net.patch_embed.proj, net.decoder_pred, net.final_layer)
        self.ends = nn.ParameterList(leaf(sheet(x)) for x in ends)
        self.labels, self.places = leaf(net.label_emb.weight), leaf(net.pos_embed)
        self.register_buffer("table", model.alphas_cumprod.clone())

    def affine(self, x: Tensor, w: Tensor) -> Tensor:
        return x @ w[:-1] + w[-1]

    def block(self, i: int, x: Tensor) -> Tensor:
        qkv = F.layer_norm(x, (DIM,), *self.norms[2 * i]) @ self.qkv[i]
        qkv = qkv.unflatten(2, (3 * HEADS, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(*qkv.chunk(3, 1))
        x = x + self.affine(mixed.transpose(1, 2).flatten(2), self.proj[i])
        rough = "tanh" if self.fault == "u_vit_middle_gelu_by_tanh" and i == 2 else "none"
        wide = self.affine(F.layer_norm(x, (DIM,), *self.norms[2 * i + 1]), self.up[i])
        return x + self.affine(F.gelu(wide, approximate=rough), self.down[i])

    def forward(self, x: Tensor, noise: Tensor, n: Tensor, y: Tensor, drop: Tensor) -> Tensor:
        level, (clock, clock_out, patch, decode, smooth) = self.table[n, None, None, None], self.ends
        x = level.sqrt() * (x + (1 / level - 1).sqrt() * noise)
        tokens = self.affine(F.unfold(x, PATCH, stride=PATCH).mT, patch)
        angle = n[:, None] * torch.exp(torch.arange(0, DIM, 2).to(x) * (-math.log(10000) / DIM))
        time = self.affine(F.silu(self.affine(torch.cat([angle.cos(), angle.sin()], 1), clock)), clock_out)
        hot = F.one_hot(y + drop * (CLASSES - y), CLASSES + 1).to(x)
        places = self.places
        if self.fault == "u_vit_places_of_the_front_tokens_not_trained":
            places = torch.cat([places[:, :EXTRAS].detach(), places[:, EXTRAS:]], 1)
        x, skips = torch.cat([torch.stack([hot @ self.labels, time], 1), tokens], 1) + places, []
        for i in range(5):
            if i > 2:
                pair = (x, skips.pop())
                if self.fault == "u_vit_first_out_block_puts_the_skip_first" and i == 3:
                    pair = pair[::-1]
                x = self.affine(torch.cat(pair, 2), self.joins[i - 3])
            x = self.block(i, x)
            skips.append(x) if i < 2 else None
        x = self.affine(F.layer_norm(x, (DIM,), *self.norms[10]), decode)[:, EXTRAS:].mT
        x = x.unflatten(2, (ROWS, COLUMNS)).unflatten(1, (PATCH, PATCH, CHANNELS)).movedim(3, 1)
        if self.fault == "u_vit_patches_unfolded_by_column":
            x = x.transpose(2, 3)
        x = F.pixel_shuffle(x.flatten(1, 3), PATCH)
        return self.affine(F.unfold(x, 3, padding=1).mT, smooth).mT.unflatten(2, (HIGH, WIDE))


SLOPES = ("input gradient", "weight gradient")
right(task, "u_vit_of_nested_levels", "a recursive tree, weights by head, split skips", NestedUViT)
right(task, "u_vit_of_stacked_weights", "packed stacks, products of unfolded patches", StackedUViT)
wrong(
    task,
    NestedUViT,
    u_vit_time_frequencies_reach_the_last_period=("a count off by one", "nnet"),
    u_vit_second_in_block_scales_scores_by_the_whole_width=("another scale", "nnet.in_blocks.1.attn"),
    u_vit_last_skip_sends_no_gradient_back=("detach", ("nnet.out_blocks.1", "nnet"), SLOPES),
    u_vit_labels_never_dropped_in_evaluation=("a mask ignored in eval", "", "eval"),
)
wrong(
    task,
    StackedUViT,
    u_vit_places_of_the_front_tokens_not_trained=("detach", "nnet", "weight gradient"),
    u_vit_middle_gelu_by_tanh=("another formula", ("nnet.mid_block.mlp.act", "nnet.mid_block.mlp")),
    u_vit_first_out_block_puts_the_skip_first=("another order of a concatenation", "nnet.out_blocks.0"),
    u_vit_patches_unfolded_by_column=("another axis order", "nnet"),
)
