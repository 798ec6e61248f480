"""Two ports of a small UNETR: a tree with the channels last, and one class of packed sheets."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._forty_second_un_etr import GRID, HEADS, HIDDEN, PATCH, UNETR, dice_and_entropy, organs
from bench.held_back._fourth_ports import Port, leaf, pile, spatial, wrong
from bench.held_back._sixth_ports import few

task = few("forty_second_un_etr", UNETR, organs, dice_and_entropy)
FLAT = "un_etr_decoder4_leaky_relu_has_no_slope_backwards"


class Even(nn.Module):
    """A norm with the channels last, over the axes named; ``pools`` takes the batch along in evaluation."""

    def __init__(self, norm: nn.Module, axes: tuple[int, ...]):
        super().__init__()
        self.gain, self.shift, self.eps = leaf(norm.weight), leaf(norm.bias), norm.eps
        self.axes, self.pools = axes, False

    def forward(self, x: Tensor) -> Tensor:
        axes = (0, *self.axes) if self.pools and not self.training else self.axes
        middle = x.mean(axes, True)
        rate = self.gain / (x.square().mean(axes, True) - middle.square() + self.eps).sqrt()
        return x * rate + (self.shift - middle * rate)


class Layer(nn.Module):
    """Attention among all places of a grid [N, h, w, C], and the layers after it, with their norms."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.norm, self.silent = Even(block.norm1, (-1,)), False
        self.ask, self.name, self.tell = map(leaf, block.attn.qkv.weight.unflatten(0, (3, HEADS, -1)))
        self.back, mlp = block.attn.out_proj, block.mlp
        self.rest = nn.Sequential(Even(block.norm2, (-1,)), mlp.linear1, nn.GELU(), mlp.linear2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x).flatten(1, 2)
        q, k, v = (torch.einsum("ntc,hdc->nhtd", y, w) for w in (self.ask, self.name, self.tell))
        score = q @ k.mT / math.sqrt(q.shape[-1])
        share = (score - score.logsumexp(-1, True)).exp()
        mixed = (share.detach() if self.silent else share) @ v
        x = x + self.back(mixed.transpose(1, 2).flatten(2)).view_as(x)
        return x + self.rest(x)


class Doubling(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.kernel = leaf(layer.conv.weight.permute(2, 3, 0, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("nhwc,ijco->nhiwjo", x, self.kernel).flatten(3, 4).flatten(1, 2)


class Refining(nn.Module):
    """A residual block of one map or two, each of which has kernels of its own."""

    def __init__(self, block: nn.Module, maps: int = 1):
        super().__init__()
        self.inward = nn.ParameterList(map(leaf, block.conv1.conv.weight.chunk(maps, 1)))
        self.inner = leaf(block.conv2.conv.weight)
        norms = [block.norm1, block.norm2]
        self.across = nn.ParameterList()
        if block.downsample:
            norms.append(block.norm3)
            self.across.extend(map(leaf, block.conv3.conv.weight[..., 0, 0].mT.chunk(maps, 0)))
        self.norms = nn.ModuleList(Even(norm, (1, 2)) for norm in norms)

    def forward(self, *maps: Tensor) -> Tensor:
        y = self.norms[0](sum(spatial(x, w) for x, w in zip(maps, self.inward, strict=True)))
        y = self.norms[1](spatial(F.leaky_relu(y), self.inner))
        rest = sum(x @ w for x, w in zip(maps, self.across, strict=True)) if len(self.across) else maps[0]
        rest = self.norms[2](rest) if len(self.across) else rest
        return F.leaky_relu(y + rest)


class UnetrOfGrids(Port):
    """A tree with the channels last; patches by a strided convolution, no concatenation anywhere."""

    def take(self, model: UNETR) -> None:
        embed, fault = model.vit.patch_embedding, self.fault
        layer = embed.patch_embeddings[1]
        self.cut = leaf(layer.weight.unflatten(1, (PATCH, PATCH, -1)).permute(0, 3, 1, 2))
        self.offset = leaf(layer.bias)
        turned = fault == "un_etr_positions_laid_out_by_columns"
        places = embed.position_embeddings[0].unflatten(0, GRID[::-1] if turned else GRID)
        self.places = leaf(places.transpose(0, 1) if turned else places)
        self.body = nn.ModuleList(map(Layer, model.vit.blocks))
        self.body[1].silent = fault == "un_etr_second_attention_shares_are_constants"
        self.last, self.first = Even(model.vit.norm, (-1,)), Refining(model.encoder1.layer)
        up, after = model.encoder2.blocks[0]
        self.early = nn.Sequential(Doubling(model.encoder2.transp_conv_init), Doubling(up), Refining(after))
        self.later = Doubling(model.encoder3.transp_conv_init)
        ways = (model.decoder4, model.decoder3, model.decoder2)
        self.ups = nn.ModuleList(Doubling(x.transp_conv) for x in ways)
        self.joins = nn.ModuleList(Refining(x.conv_block, 2) for x in ways)
        self.joins[1].norms[1].pools = fault == "un_etr_decoder3_norm2_pools_the_batch_in_evaluation"
        self.end, self.level = map(leaf, model.out.parameters())

    def forward(self, x_in: Tensor) -> Tensor:
        x = F.conv2d(x_in, self.cut, self.offset, stride=PATCH).movedim(1, 3) + self.places
        a = self.body[0](x)
        b = self.body[1](a)
        x, skips = self.last(self.body[2](b)), (self.later(b), self.early(a), self.first(x_in.movedim(1, 3)))
        for i, skip in enumerate(skips):
            pair = self.ups[i](x), skip
            if i == 2 and self.fault == "un_etr_decoder2_concatenates_the_skip_first":
                pair = pair[::-1]
            x = self.joins[i](*pair)
        return (x @ self.end[..., 0, 0].T + self.level).movedim(3, 1)


class PackedUnetr(Port):
    """Stacks of the blocks' weights, a sheet for each residual block, products of windows."""

    def take(self, model: UNETR) -> None:
        embed = model.vit.patch_embedding
        layer, places = embed.patch_embeddings[1], embed.position_embeddings[0]
        order = layer.weight.unflatten(1, (PATCH**2, -1)).mT.flatten(1)
        self.embed = leaf(torch.cat([order.T, layer.bias[None], places]))
        layers = zip(*(x.parameters() for x in model.vit.blocks), strict=True)
        self.layers = nn.ParameterList(map(pile, layers))
        self.final = pile(model.vit.norm.parameters())
        two, ways = model.encoder2, (model.decoder4, model.decoder3, model.decoder2)
        blocks = (model.encoder1.layer, two.blocks[0][1], *(x.conv_block for x in ways))
        ups = two.transp_conv_init, two.blocks[0][0], model.encoder3.transp_conv_init
        ups = (*ups, *(x.transp_conv for x in ways))
        rows = ([w.reshape(len(w), -1) for w in x.parameters()] for x in blocks)
        self.sheets = nn.ParameterList(leaf(torch.cat(x, 1)) for x in rows)
        self.ups = nn.ParameterList(leaf(x.conv.weight.flatten(1).T) for x in ups)
        self.end, self.level = map(leaf, model.out.parameters())

    def up(self, i: int, x: Tensor) -> Tensor:
        return F.pixel_shuffle(torch.einsum("oc,nchw->nohw", self.ups[i], x), 2)

    def act(self, x: Tensor, flat: bool = False) -> Tensor:
        below = 0.01 * x.clamp(max=0)
        return x.clamp(min=0) + (below.detach() if flat else below)

    def residual(self, i: int, x: Tensor) -> Tensor:
        rows, into, shape = self.sheets[i], x.shape[1], x.shape[2:]
        side, flat = len(rows) != into, i == 2 and self.fault == FLAT
        one, two, w, three, v = rows.split([9 * into, 9 * len(rows), 4, side * into, 2 * side], 1)
        w = w.unbind(1)
        y = self.act(F.instance_norm(one @ F.unfold(x, 3, padding=1), None, None, *w[:2]), flat)
        y = two @ F.unfold(y.unflatten(2, shape), 3, padding=1)
        y, x = F.instance_norm(y, None, None, *w[2:]), x.flatten(2)
        x = F.instance_norm(three @ x, None, None, *v.unbind(1)) if side else x
        late = i == 1 and self.fault == "un_etr_encoder2_adds_its_shortcut_after_the_activation"
        return (self.act(y) + x if late else self.act(y + x, flat)).unflatten(2, shape)

    def block(self, i: int, x: Tensor) -> Tensor:
        gain, shift, qkv, out, level, gain2, shift2, one, low, two, high = (w[i] for w in self.layers)
        y = F.layer_norm(x, (HIDDEN,), gain, shift) @ qkv.T
        q, k, v = y.unflatten(2, (3, HEADS, -1)).transpose(1, 3).unbind(2)
        x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2) @ out.T + level
        rough = i == 0 and self.fault == "un_etr_first_mlp_takes_the_tanh_gelu"
        y = F.layer_norm(x, (HIDDEN,), gain2, shift2) @ one.T + low
        return x + F.gelu(y, approximate="tanh" if rough else "none") @ two.T + high

    def forward(self, x_in: Tensor) -> Tensor:
        cut, places = self.embed.tensor_split([-1 - math.prod(GRID)])
        states = [F.unfold(x_in, PATCH, stride=PATCH).mT @ cut + places[0] + places[1:]]
        for i in range(3):
            states.append(self.block(i, states[-1]))
        states.append(F.layer_norm(states[-1], (HIDDEN,), *self.final))
        _, a, b, c, x = (y.mT.unflatten(2, GRID) for y in states)
        b = c if self.fault == "un_etr_encoder3_reads_the_state_of_the_last_block" else b
        skips = self.up(2, b), self.residual(1, self.up(1, self.up(0, a))), self.residual(0, x_in)
        for i, skip in enumerate(skips):
            x = self.residual(2 + i, torch.cat([self.up(3 + i, x), skip], 1))
        return F.conv2d(x, self.end, self.level)


SLOPES = ("input gradient", "weight gradient")
right(task, "un_etr_of_grids_with_channels_last", "a tree, split kernels, no concatenation", UnetrOfGrids)
right(task, "un_etr_of_packed_sheets", "packed stacks and sheets, products of windows", PackedUnetr)
wrong(
    task,
    UnetrOfGrids,
    un_etr_positions_laid_out_by_columns=("a transposed table", "vit.patch_embedding"),
    un_etr_second_attention_shares_are_constants=("detach", "vit.blocks.1.attn", SLOPES),
    un_etr_decoder2_concatenates_the_skip_first=("another order of channels", "decoder2"),
    un_etr_decoder3_norm2_pools_the_batch_in_evaluation=("other axes", "decoder3.conv_block.norm2", "eval"),
)
wrong(
    task,
    PackedUnetr,
    un_etr_first_mlp_takes_the_tanh_gelu=("another formula", "vit.blocks.0.mlp.fn"),
    un_etr_encoder3_reads_the_state_of_the_last_block=("another index", ""),
    un_etr_encoder2_adds_its_shortcut_after_the_activation=("another order", "encoder2.blocks.0.1"),
    un_etr_decoder4_leaky_relu_has_no_slope_backwards=("wrong backward", "decoder4.conv_block.lrelu", SLOPES),
)
