"""Two ports of a small SASRec: a tree of blocks with the channels first, and one class of packed weights."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twenty_seventh_sas_rec import BLOCKS, HEADS, HIDDEN, ITEMS, SASRec, next_or_not, walks

task = few("twenty_seventh_sas_rec", SASRec, walks, next_or_not)


class Guided(torch.autograd.Function):
    """A rectifier that sends back what is positive alone."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, slope: Tensor) -> Tensor:
        return slope.clamp(min=0) * (ctx.saved_tensors[0] > 0)


class Mix(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor):
        super().__init__()
        self.weight, self.bias = leaf(weight), leaf(bias[:, None])

    def forward(self, x: Tensor) -> Tensor:
        return self.weight @ x + self.bias


class Level(nn.Module):
    """A layer norm over the channels of [N, C, T]."""

    def __init__(self, norm: nn.LayerNorm):
        super().__init__()
        self.gain, self.shift, self.eps = leaf(norm.weight[:, None]), leaf(norm.bias[:, None]), norm.eps

    def forward(self, x: Tensor) -> Tensor:
        spread, center = torch.var_mean(x, 1, correction=0, keepdim=True)
        return (x - center) * (spread + self.eps).rsqrt() * self.gain + self.shift


class Looking(nn.Module):
    """The levelled sequence and what it finds in the past of the sequence as it was."""

    def __init__(self, norm: nn.LayerNorm, layer: nn.MultiheadAttention):
        super().__init__()
        self.level = Level(norm)
        self.ask, self.name, self.tell = map(Mix, layer.in_proj_weight.chunk(3), layer.in_proj_bias.chunk(3))
        self.join = Mix(layer.out_proj.weight, layer.out_proj.bias)
        self.mingled = self.hiding = False

    def heads(self, x: Tensor) -> Tensor:
        """[N, C, T] -> [N, heads, C / heads, T]."""
        return x.unflatten(1, (-1, HEADS)).transpose(1, 2) if self.mingled else x.unflatten(1, (HEADS, -1))

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        asking = self.level(x)
        q, k, v = (self.heads(y) for y in (self.ask(asking), self.name(x), self.tell(x)))
        match = k.mT @ (q / math.sqrt(q.shape[2]))
        if self.hiding and not self.training:
            match = match.masked_fill(~real[:, :, :, None], -1e9)
        future = torch.ones_like(match[0, 0], dtype=torch.bool).tril(-1)
        share = match.masked_fill(future, -math.inf).softmax(2)
        return asking + self.join((v @ share).flatten(1, 2))


class Thinking(nn.Module):
    def __init__(self, norm: nn.LayerNorm, layer: nn.Module):
        super().__init__()
        self.level, self.bend = Level(norm), F.relu
        self.wide, self.back = (Mix(conv.weight[..., 0], conv.bias) for conv in (layer.conv1, layer.conv2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.level(x)
        return x + self.back(self.bend(self.wide(x)))


class Block(nn.Module):
    def __init__(self, model: SASRec, i: int):
        super().__init__()
        self.looking = Looking(model.attention_layernorms[i], model.attention_layers[i])
        self.thinking = Thinking(model.forward_layernorms[i], model.forward_layers[i])

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        return self.thinking(self.looking(x, real)) * real


class Shop(nn.Module):
    """The vectors of items and of times, without those of padding, each a column."""

    def __init__(self, model: SASRec):
        super().__init__()
        self.goods, self.times = leaf(model.item_emb.weight[1:].T), leaf(model.pos_emb.weight[1:].T)
        self.timeless = True

    def forward(self, items: Tensor) -> Tensor:
        return F.pad(self.goods, (1, 0))[:, items].movedim(0, 1)

    def enter(self, items: Tensor, real: Tensor) -> Tensor:
        times = self.times[:, : items.shape[1]] * (real if self.timeless else 1)
        return math.sqrt(HIDDEN) * self(items) + times


class SasRecOfChannels(Port):
    """Blocks of a look and a thought with the channels first, split projections, no row for padding."""

    def take(self, model: SASRec) -> None:
        self.shop, self.end = Shop(model), Level(model.last_layernorm)
        self.blocks = nn.ModuleList(Block(model, i) for i in range(BLOCKS))
        self.shop.timeless = self.fault != "sas_rec_positions_given_to_padding_too"
        self.blocks[0].looking.mingled = self.fault == "sas_rec_first_attention_splits_heads_innermost"
        self.blocks[2].looking.hiding = self.fault == "sas_rec_last_attention_hides_padding_in_evaluation"
        if self.fault == "sas_rec_second_relu_sends_positive_slopes_alone":
            self.blocks[1].thinking.bend = Guided.apply

    def forward(self, user_ids: Tensor, log_seqs: Tensor, pos_seqs: Tensor, neg_seqs: Tensor) -> tuple:
        real = (log_seqs > 0)[:, None]
        x = self.shop.enter(log_seqs, real)
        for block in self.blocks:
            x = block(x, real)
        x = self.end(x)
        return tuple(torch.einsum("nct,nct->nt", x, self.shop(items)) for items in (pos_seqs, neg_seqs))


class PackedSasRec(Port):
    """A book of items and times, stacks of squares and lines; one time after the other, all items scored."""

    def take(self, model: SASRec) -> None:
        squares, lines, norms = [], [], []
        for i in range(BLOCKS):
            look, think = model.attention_layers[i], model.forward_layers[i]
            rest = (look.out_proj, think.conv1, think.conv2)
            square = torch.cat([look.in_proj_weight, *(x.weight.flatten(1) for x in rest)])
            squares.append(square.unflatten(0, (6, -1)).mT)
            lines.append(torch.cat([look.in_proj_bias, *(x.bias for x in rest)]).view(6, -1))
            norms += [model.attention_layernorms[i], model.forward_layernorms[i]]
        self.squares, self.lines = pile(squares), pile(lines)
        self.norms = pile(torch.stack([x.weight, x.bias]) for x in (*norms, model.last_layernorm))
        self.book = leaf(torch.cat([model.item_emb.weight[1:], model.pos_emb.weight[1:]]))

    def norm(self, j: int, x: Tensor) -> Tensor:
        eps = 1e-3 if self.fault == "sas_rec_second_forward_norm_takes_keras_epsilon" and j == 3 else 1e-8
        x = x - x.mean(-1, keepdim=True)
        size = (x.square().mean(-1, keepdim=True) + eps).sqrt()
        if self.fault == "sas_rec_last_norm_takes_its_deviation_for_a_constant" and j == 2 * BLOCKS:
            size = size.detach()
        return torch.addcmul(self.norms[j, 1], x / size, self.norms[j, 0])

    def block(self, i: int, x: Tensor) -> Tensor:
        (q, k, v, o, one, two), (qb, kb, vb, ob, one_b, two_b) = self.squares[i], self.lines[i]
        y, found = self.norm(2 * i, x), []
        q, k, v = ((z + b).unflatten(2, (HEADS, -1)) for z, b in ((y @ q, qb), (x @ k, kb), (x @ v, vb)))
        for t in range(x.shape[1]):
            share = ((q[:, t, None] * k[:, : t + 1]).sum(3) * (HEADS / HIDDEN) ** 0.5).softmax(1)
            found.append((share[..., None] * v[:, : t + 1]).sum(1).flatten(1))
        bare = self.fault == "sas_rec_last_block_adds_the_sequence_before_its_norm" and i == 2
        y = self.norm(2 * i + 1, torch.stack(found, 1) @ o + ob + (x if bare else y))
        if self.fault == "sas_rec_first_feed_forward_has_no_second_bias" and i == 0:
            two_b = 0
        return (y @ one + one_b).clamp(min=0) @ two + two_b + y

    def forward(self, user_ids: Tensor, log_seqs: Tensor, pos_seqs: Tensor, neg_seqs: Tensor) -> tuple:
        count = log_seqs.shape[1]
        real = log_seqs.sign()[..., None].to(self.book)
        which = F.one_hot(log_seqs, ITEMS + 1)[..., 1:].to(real)
        x = torch.cat([which * HIDDEN**0.5, torch.eye(count).to(real) * real], 2) @ self.book[: ITEMS + count]
        for i in range(BLOCKS):
            x = self.block(i, x) * real
        scores = F.pad(self.norm(2 * BLOCKS, x) @ self.book[:ITEMS].T, (1, 0))
        return tuple(scores.gather(2, items[..., None])[..., 0] for items in (pos_seqs, neg_seqs))


SLOPES = ("input gradient", "weight gradient")
right(task, "sas_rec_of_channels_first", "a tree, channels first, split projections", SasRecOfChannels)
right(task, "sas_rec_of_packed_weights", "packed stacks, a loop over time, all items scored", PackedSasRec)
wrong(
    task,
    SasRecOfChannels,
    sas_rec_positions_given_to_padding_too=("a mask left out", ""),
    sas_rec_first_attention_splits_heads_innermost=("another order of heads", "attention_layers.0"),
    sas_rec_second_relu_sends_positive_slopes_alone=("a wrong backward", "forward_layers.1.relu", SLOPES),
    sas_rec_last_attention_hides_padding_in_evaluation=("one more mask", ("attention_layers.2", ""), "eval"),
)
wrong(
    task,
    PackedSasRec,
    sas_rec_first_feed_forward_has_no_second_bias=("a bias left out", "forward_layers.0.conv2"),
    sas_rec_second_forward_norm_takes_keras_epsilon=("another epsilon", "forward_layernorms.1"),
    sas_rec_last_block_adds_the_sequence_before_its_norm=("another residual", ""),
    sas_rec_last_norm_takes_its_deviation_for_a_constant=("detach", "last_layernorm", SLOPES),
)
