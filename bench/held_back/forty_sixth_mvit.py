"""Two ports of a small MViTv2: a tree with the class token apart and channels last, and one flat class."""

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import filled, right
from bench.held_back._forty_sixth_mvit import BLOCKS, MViT, fifth_of_entropy, spots
from bench.held_back._fourth_ports import Port, leaf, spatial, wrong
from bench.held_back._sixth_ports import few

task = few("forty_sixth_mvit", MViT, spots, fifth_of_entropy)
Pair = tuple[Tensor, Tensor]


class Reader(nn.Module):
    """Queries, keys or values: projected, pooled by windows, evened; the token goes beside the grid."""

    def __init__(self, attn: nn.Module, which: int):
        super().__init__()
        name, self.heads, self.bare = "qkv"[which], attn.num_heads, False
        pool, norm = getattr(attn, f"pool_{name}"), getattr(attn, f"norm_{name}")
        weight, bias = (x.chunk(3)[which] for x in (attn.qkv.weight, attn.qkv.bias))
        self.read = filled(nn.Linear(*weight.T.shape), weight, bias)
        self.kernel, self.stride, self.even = leaf(pool.weight[:, 0]), pool.stride[0], deepcopy(norm)

    def forward(self, token: Tensor, grid: Tensor) -> Pair:
        token = self.read(token).unflatten(1, (self.heads, -1))
        grid = self.read(grid).unflatten(3, (self.heads, -1)).movedim(3, 1)
        windows = F.pad(grid, (0, 0, 1, 1, 1, 1)).unfold(2, 3, self.stride).unfold(3, 3, self.stride)
        grid = torch.einsum("nhyxcij,cij->nhyxc", windows, self.kernel)
        return token if self.bare else self.even(token), self.even(grid)


def distances(q: int, k: int) -> Tensor:
    most = max(q, k)
    return (torch.arange(q) * (most // q))[:, None] + (torch.arange(k).flip(0) * (most // k))


class Look(nn.Module):
    """Attention; a query says something to each distance along an axis, then it is picked for each key."""

    def __init__(self, attn: nn.Module, size: tuple[int, int], backwards: bool):
        super().__init__()
        self.q, self.k, self.v = (Reader(attn, i) for i in range(3))
        high, wide = (distances(x // self.q.stride, x // self.k.stride) for x in size)
        self.tables = leaf(torch.cat([attn.rel_pos_h, attn.rel_pos_w]).T)
        wide = len(attn.rel_pos_w) - 1 - wide if backwards else wide
        self.register_buffer("high", high[:, None])
        self.register_buffer("wide", wide + len(attn.rel_pos_h))
        self.out, self.frozen = deepcopy(attn.proj), False

    def forward(self, token: Tensor, grid: Tensor) -> Pair:
        (ask, asks), *others = (f(token, grid) for f in (self.q, self.k, self.v))
        keys, values = (torch.cat([x[:, :, None], y.flatten(2, 3)], 2) for x, y in others)
        said, size = asks @ self.tables, ask.shape[-1] ** 0.5
        down, across = (said.gather(-1, x.expand(*said.shape[:-1], -1)) for x in (self.high, self.wide))
        bias = F.pad((down[..., None] + across[..., None, :]).flatten(4), (1, 0))
        share = (torch.einsum("nhyxc,nhkc->nhyxk", asks, keys) / size + bias).softmax(-1)
        alone = (torch.einsum("nhc,nhkc->nhk", ask, keys) / size).softmax(-1)
        token = torch.einsum("nhk,nhkc->nhc", alone, values)
        grid = torch.einsum("nhyxk,nhkc->nhyxc", share, values)
        grid = (grid + (asks.detach() if self.frozen else asks)).movedim(1, 3)
        return self.out(token.flatten(1)), self.out(grid.flatten(3))


class Layer(nn.Module):
    def __init__(self, block: nn.Module, size: tuple[int, int], stride: int, backwards: bool):
        super().__init__()
        self.before, self.after = deepcopy(block.norm1), deepcopy(block.norm2)
        self.look, self.stride = Look(block.attn, size, backwards), stride
        self.widen, self.raw = deepcopy(block.proj), False
        self.think = nn.Sequential(*map(deepcopy, (block.mlp.fc1, block.mlp.act, block.mlp.fc2)))

    def forward(self, token: Tensor, grid: Tensor) -> Pair:
        level, plane = self.before(token), self.before(grid)
        if self.widen is not None:
            token, grid = (self.widen(x) for x in ((token, grid) if self.raw else (level, plane)))
            edged = F.pad(grid, (0, 0, 1, 1, 1, 1), value=-torch.inf)
            grid = edged.unfold(1, 3, self.stride).unfold(2, 3, self.stride).amax((-2, -1))
        token, grid = map(torch.add, (token, grid), self.look(level, plane))
        return token + self.think(self.after(token)), grid + self.think(self.after(grid))


class TokenBesideGrid(Port):
    """A tree of layers that hand on the class token and a grid with its channels last."""

    def take(self, model: MViT) -> None:
        conv, last, size = model.patch_embed.proj, model.head.projection, (8, 12)
        self.kernel, self.offset, self.token = leaf(conv.weight), leaf(conv.bias), leaf(model.cls_token[0])
        self.layers, fault = nn.ModuleList(), self.fault
        for i, (block, (_, _, _, stride, _)) in enumerate(zip(model.blocks, BLOCKS, strict=True)):
            backwards = i == 2 and fault == "mvit_third_block_column_distances_reversed"
            self.layers.append(Layer(block, size, stride, backwards))
            size = size[0] // stride, size[1] // stride
        self.end = nn.Sequential(deepcopy(model.norm), deepcopy(last))
        self.layers[0].look.k.bare = fault == "mvit_first_class_key_left_without_norm"
        self.layers[1].raw = fault == "mvit_second_block_skip_projected_before_the_norm"
        self.layers[3].look.frozen = fault == "mvit_last_block_residual_query_without_gradient"

    def forward(self, x: Tensor) -> Tensor:
        grid, token = spatial(x.movedim(1, 3), self.kernel, self.offset, 2), self.token.expand(len(x), -1)
        for layer in self.layers:
            token, grid = layer(token, grid)
        logits = self.end(grid.mean((1, 2)))
        return logits if self.training else logits.exp() / logits.exp().sum(1, keepdim=True)


def sheet(layer: nn.Module) -> Tensor:
    """A row for each output: its weights and its bias."""
    return torch.cat([layer.weight.reshape(len(layer.bias), -1), layer.bias[:, None]], 1)


class FlatMViT(Port):
    """Sheets of weights; relative positions ride in longer queries and keys."""

    def take(self, model: MViT) -> None:
        self.stem, self.token = leaf(sheet(model.patch_embed.proj)), leaf(model.cls_token)
        self.end, self.last = leaf(sheet(model.norm)), leaf(sheet(model.head.projection))
        self.w = nn.ParameterDict()
        for i, block in enumerate(model.blocks):
            a, mlp = block.attn, block.mlp
            layers = {"read": a.qkv, "out": a.proj, "up": mlp.fc1, "down": mlp.fc2, "widen": block.proj}
            layers |= {"before": block.norm1, "after": block.norm2}
            self.w.update({f"{k}_{i}": leaf(sheet(x)) for k, x in layers.items() if x is not None})
            self.w[f"pool_{i}"] = leaf(torch.cat([a.pool_q.weight, a.pool_k.weight, a.pool_v.weight]))
            self.w[f"norm_{i}"] = leaf(torch.stack([sheet(x) for x in (a.norm_q, a.norm_k, a.norm_v)]))
            self.w[f"far_{i}"] = leaf(torch.cat([a.rel_pos_h, a.rel_pos_w]))

    def linear(self, x: Tensor, rows: Tensor) -> Tensor:
        return F.linear(F.pad(x, (0, 1), value=1), rows)

    def even(self, x: Tensor, rows: Tensor) -> Tensor:
        return F.layer_norm(x, rows.shape[:1], *rows.unbind(1), eps=1e-6)

    def attend(self, i: int, x: Tensor, size: tuple[int, int]) -> tuple[Tensor, tuple[int, int]]:
        (_, _, heads, *strides), n = BLOCKS[i], len(x)
        found, sizes, kernels = [], [], self.w[f"pool_{i}"].chunk(3)
        for j, y in enumerate(self.linear(x, self.w[f"read_{i}"]).chunk(3, 2)):
            y = y.unflatten(2, (heads, -1)).permute(0, 2, 3, 1).flatten(0, 1)
            grid, stride = y[..., 1:].unflatten(2, size), strides[min(j, 1)]
            grid = F.conv2d(grid, kernels[j], None, stride, 1, 1, y.shape[1])
            sizes.append(tuple(grid.shape[2:]))
            found.append(self.even(torch.cat([y[..., :1], grid.flatten(2)], 2).mT, self.w[f"norm_{i}"][j]))
        (q, k, v), (a, b), table = found, sizes[:2], self.w[f"far_{i}"]
        down, across = table.split([2 * max(s, t) - 1 for s, t in zip(a, b, strict=True)])
        small = q * q.shape[2] ** -0.5
        asks = small if self.fault == "mvit_second_block_positions_read_the_scaled_query" and i == 1 else q
        grid = asks[:, 1:].unflatten(1, a)
        high = torch.einsum("nyxc,ykc->nyxk", grid, down[distances(a[0], b[0])])
        wide = torch.einsum("nyxc,xkc->nyxk", grid, across[distances(a[1], b[1])])
        more = F.pad(torch.cat([high, wide], 3).flatten(1, 2), (0, 0, 1, 0))
        ones = [torch.eye(b[0]).repeat_interleave(b[1], 0), torch.eye(b[1]).repeat(b[0], 1)]
        ones = F.pad(torch.cat(ones, 1), (0, 0, 1, 0)).to(k).expand(len(k), -1, -1)
        share = (torch.cat([small, more], 2) @ torch.cat([k, ones], 2).mT).softmax(2)
        y = (share @ v + F.pad(q[:, 1:], (0, 0, 1, 0))).unflatten(0, (n, heads)).transpose(1, 2).flatten(2)
        return self.linear(y, self.w[f"out_{i}"]), a

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[2] // 2, x.shape[3] // 2
        x = self.linear(F.unfold(x, 3, padding=1, stride=2).mT, self.stem)
        x = torch.cat([self.token.expand(len(x), 1, -1), x], 1)
        for i in range(len(BLOCKS)):
            level, old = self.even(x, self.w[f"before_{i}"]), size
            y, size = self.attend(i, level, old)
            if f"widen_{i}" in self.w:
                x = self.linear(level, self.w[f"widen_{i}"])
                grid, zero = x[:, 1:].mT.unflatten(2, old), "mvit_second_block_skip_pool_padded_with_zeros"
                edge = 0.0 if self.fault == zero and i == 1 else -torch.inf
                grid = F.max_pool2d(F.pad(grid, (1, 1, 1, 1), value=edge), 3, 2)
                x = torch.cat([x[:, :1], grid.flatten(2).mT], 1)
            x = x + y
            y = self.linear(self.even(x, self.w[f"after_{i}"]), self.w[f"up_{i}"])
            rough = i == 3 and self.fault == "mvit_last_block_gelu_by_sigmoid"
            x = x + self.linear(y * (1.702 * y).sigmoid() if rough else F.gelu(y), self.w[f"down_{i}"])
        x = self.linear(self.even(x[:, 1:].mean(1), self.end), self.last)
        return x if self.training or self.fault == "mvit_head_leaves_logits_in_evaluation" else x.softmax(1)


SLOPES = ("input gradient", "weight gradient")
right(task, "mvit_with_the_token_beside_the_grid", "a tree, channels last, split weights", TokenBesideGrid)
right(task, "mvit_of_flat_sheets", "packed weights, positions in longer queries and keys", FlatMViT)
wrong(
    task,
    TokenBesideGrid,
    mvit_first_class_key_left_without_norm=("a norm left out", ("blocks.0.attn", "blocks.0.attn.norm_k")),
    mvit_second_block_skip_projected_before_the_norm=("another input", "blocks.1"),
    mvit_third_block_column_distances_reversed=("a sign", "blocks.2.attn"),
    mvit_last_block_residual_query_without_gradient=("detach", "blocks.3.attn", SLOPES),
)
wrong(
    task,
    FlatMViT,
    mvit_second_block_skip_pool_padded_with_zeros=("another padding", "blocks.1.pool_skip"),
    mvit_second_block_positions_read_the_scaled_query=("a scale", "blocks.1.attn"),
    mvit_last_block_gelu_by_sigmoid=("another activation", "blocks.3.mlp.act"),
    mvit_head_leaves_logits_in_evaluation=("no softmax in eval", ("head", "head.act"), "eval"),
)
