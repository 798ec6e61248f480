"""Two ports of a small TabTransformer: a tree with the columns first, and one class of packed weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _forty_fourth_tab_transformer as tab
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, Rows, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("forty_fourth_tab_transformer", tab.TabTransformer, tab.tables, tab.both_tasks)


class Centred(nn.Module):
    def __init__(self, norm: nn.LayerNorm):
        super().__init__()
        self.gain, self.offset, self.eps = leaf(norm.weight), leaf(norm.bias), norm.eps

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return self.offset + self.gain * x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()


class Looking(nn.Module):
    """Attention over the first axis of [L, N, D], with the residual; the keys' costs are [L, N]."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        ask, key, give = layer.to_qkv.weight.unflatten(0, (3, layer.heads, -1))
        self.ask, self.key, self.give = leaf(ask), leaf(key), leaf(give)
        self.back = leaf(layer.to_out.weight.unflatten(1, (layer.heads, -1)))
        self.even, self.frozen, self.open_late = Centred(layer.norm), False, False

    def forward(self, x: Tensor, cost: Tensor | None = None) -> Tensor:
        y = self.even(x)
        ask, key, give = (torch.einsum("lnd,hed->lnhe", y, w) for w in (self.ask, self.key, self.give))
        score = torch.einsum("lnhe,mnhe->lmnh", ask / ask.shape[-1] ** 0.5, key)
        if cost is not None and not (self.open_late and not self.training):
            score = score + cost[:, :, None]
        share = (score - score.logsumexp(1, keepdim=True)).exp()
        share = share.detach() if self.frozen else share
        return x + torch.einsum("lmnh,mnhe,dhe->lnd", share, give, self.back)


class Gated(nn.Module):
    def __init__(self, ff: nn.Sequential):
        super().__init__()
        norm, up, _, down = ff
        self.even, self.on_value = Centred(norm), False
        self.value, self.gate = map(leaf, up.weight.chunk(2))
        self.lift, self.tilt = map(leaf, up.bias.chunk(2))
        self.down, self.drop = leaf(down.weight.T), leaf(down.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.even(x)
        value, gate = y @ self.value.T + self.lift, y @ self.gate.T + self.tilt
        bell = (1 + torch.erf((value if self.on_value else gate) / 2**0.5)) / 2
        return x + (value * gate * bell) @ self.down + self.drop


class Head(nn.Module):
    def __init__(self, layers: nn.Sequential):
        super().__init__()
        of_columns, of_numbers = layers[0].weight.tensor_split([-tab.CONTINUOUS], 1)
        self.of_columns = leaf(of_columns.unflatten(1, (len(tab.CATEGORIES), -1)))
        self.of_numbers, self.base = leaf(of_numbers), leaf(layers[0].bias)
        self.one, self.two = Rows(layers[1]), Rows(layers[4])
        self.mid, self.end = (leaf(layers[i].weight.T) for i in (3, 6))
        self.mid_base, self.end_base = (leaf(layers[i].bias) for i in (3, 6))

    def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
        y = torch.einsum("cnd,ocd->no", x, self.of_columns) + numbers @ self.of_numbers.T + self.base
        y = self.two(F.selu(self.one(y)) @ self.mid + self.mid_base)
        return y.clamp(min=0) @ self.end + self.end_base


class TableOfColumns(Port):
    """A table of categories for each column, columns first, products by head, costs for padded rows."""

    def take(self, model: tab.TabTransformer) -> None:
        missing, *each = model.category_embed.weight.split([1, *tab.CATEGORIES])
        self.missing, self.words = leaf(missing), nn.ParameterList(map(leaf, each))
        self.tags = leaf(model.shared_category_embed)
        layers, fault = model.transformer.layers, self.fault
        self.across = nn.ModuleList(nn.Sequential(Looking(x.attn), Gated(x.ff)) for x in layers)
        self.down, self.over = Looking(layers[tab.ROW_BLOCK].row_attn), Gated(layers[tab.ROW_BLOCK].row_ff)
        self.even, self.head = Centred(model.norm), Head(model.mlp.mlp)
        self.register_buffer("given", model.continuous_mean_std.clone())
        self.across[0][0].frozen = fault == "tab_transformer_first_attention_shares_detached"
        self.down.open_late = fault == "tab_transformer_padded_rows_attended_in_evaluation"
        self.across[2][1].on_value = fault == "tab_transformer_last_feed_forward_gelu_on_the_value_half"
        if fault == "tab_transformer_first_batch_norm_with_the_epsilon_of_keras":
            self.head.one.eps = 1e-3

    def forward(self, x_categ: Tensor, x_cont: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        pairs = zip(x_categ.flatten(0, 1).T, self.words, strict=True)
        x = torch.stack([torch.cat([self.missing, words])[index] for index, words in pairs])
        x = torch.cat([x, self.tags[:, None].expand(-1, x.shape[1], -1)], 2)
        cost = torch.zeros_like(x_cont[..., 0]).masked_fill(~valid, float("-inf")).T
        for i, block in enumerate(self.across):
            x = block(x)
            if i == tab.ROW_BLOCK:
                rows = x.unflatten(1, valid.shape).permute(2, 1, 0, 3)
                flat = self.over(self.down(rows.flatten(2), cost))
                x = flat.view(rows.shape).permute(2, 1, 0, 3).flatten(1, 2)
        numbers = self.even((x_cont - self.given[:, 0]) / self.given[:, 1]).flatten(0, 1)
        return self.head(x, numbers).T.unflatten(1, valid.shape).unbind(0)


def packed(attn: nn.Module, ff: nn.Sequential) -> tuple[Tensor, ...]:
    """Both norms; the products in and out of attention and feed-forward, transposed, the biases below."""
    norms = torch.stack([attn.norm.weight, attn.norm.bias, ff[0].weight, ff[0].bias])
    up, down = (torch.cat([x.weight.T, x.bias[None]]) for x in (ff[1], ff[3]))
    return norms, attn.to_qkv.weight.T, attn.to_out.weight.T, up, down


class PackedTable(Port):
    """Stacks of the column blocks, products with one-hot rows, and torch's functions."""

    def take(self, model: tab.TabTransformer) -> None:
        layers, middle = model.transformer.layers, model.transformer.layers[tab.ROW_BLOCK]
        each = zip(*(packed(x.attn, x.ff) for x in layers), strict=True)
        self.w = nn.ParameterList(pile(x) for x in each)
        self.r = nn.ParameterList(leaf(x) for x in packed(middle.row_attn, middle.row_ff))
        self.words, self.tags = leaf(model.category_embed.weight.T), leaf(model.shared_category_embed.T)
        self.even = leaf(torch.stack([model.norm.weight, model.norm.bias]))
        self.register_buffer("given", model.continuous_mean_std.T.clone())
        first, norm, _, second, other, _, last = model.mlp.mlp
        dense = (first, second, last)
        self.head = nn.ParameterList(leaf(torch.cat([x.weight.T, x.bias[None]])) for x in dense)
        self.norms = nn.ParameterList(leaf(torch.stack([x.weight, x.bias])) for x in (norm, other))
        for i, x in enumerate((norm, other)):
            self.register_buffer(f"kept_{i}", torch.stack([x.running_mean, x.running_var]))
        starts = torch.tensor((0, *tab.CATEGORIES[:-1])).cumsum(0)
        starts[2] -= int(self.fault == "tab_transformer_third_column_offset_one_short")
        self.register_buffer("starts", starts)

    def layer(self, x: Tensor, w: list[Tensor], heads: int, mask: Tensor | None, name: str) -> Tensor:
        norms, into, out, up, down = w
        y = F.layer_norm(x, x.shape[-1:], norms[0], norms[1])
        q, k, v = (y @ into).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        wide = name == "rows" and self.fault == "tab_transformer_row_attention_scaled_by_all_heads_width"
        scale = (q.shape[-1] * (heads if wide else 1)) ** -0.5
        y = F.scaled_dot_product_attention(q, k, v, mask, scale=scale)
        x = x + y.transpose(1, 2).flatten(2) @ out
        spread, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
        if name == "1" and self.fault == "tab_transformer_second_feed_forward_norm_statistics_detached":
            spread, mean = spread.detach(), mean.detach()
        y = (x - mean) * (spread + 1e-5).rsqrt() * norms[2] + norms[3]
        value, gate = (y @ up[:-1] + up[-1]).tensor_split(2, -1)
        return x + (F.gelu(gate) * value) @ down[:-1] + down[-1]

    def batch_norm(self, x: Tensor, i: int) -> Tensor:
        kept, (gain, offset) = self.get_buffer(f"kept_{i}"), self.norms[i]
        mean, spread = kept
        if self.training:
            spread, mean = torch.var_mean(x, 0, correction=0)
            biased = i == 1 and self.fault == "tab_transformer_second_batch_norm_keeps_biased_variance"
            with torch.no_grad():
                kept.lerp_(torch.stack([mean, spread * len(x) / (len(x) - (not biased))]), 0.1)
        rate = gain * (spread + 1e-5).rsqrt()
        return x * rate + (offset - mean * rate)

    def forward(self, x_categ: Tensor, x_cont: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        index = ((x_categ + self.starts) * x_categ.sign()).flatten(0, 1)
        x = F.one_hot(index, self.words.shape[1]).to(x_cont) @ self.words.T
        x = torch.cat([x, self.tags.T[None].repeat(len(x), 1, 1)], 2)
        for i in range(len(self.w[0])):
            x = self.layer(x, [w[i] for w in self.w], tab.HEADS, None, str(i))
            if i == tab.ROW_BLOCK:
                rows = x.view(*valid.shape, -1)
                x = self.layer(rows, list(self.r), tab.ROW_HEADS, valid[:, None, None], "rows").view(x.shape)
        numbers = F.layer_norm((x_cont - self.given[0]) / self.given[1], x_cont.shape[-1:], *self.even)
        y = torch.cat([x.flatten(1), numbers.flatten(0, 1)], 1)
        y = F.selu(self.batch_norm(y @ self.head[0][:-1] + self.head[0][-1], 0))
        y = self.batch_norm(y @ self.head[1][:-1] + self.head[1][-1], 1).relu()
        y = y @ self.head[2][:-1] + self.head[2][-1]
        return y.view(*valid.shape, 2).unbind(-1)


AT, SLOPES = "transformer.layers.", ("input gradient", "weight gradient")
right(task, "tab_transformer_of_columns_first", "a tree, tables by column, split weights", TableOfColumns)
right(task, "tab_transformer_of_packed_weights", "packed stacks, one-hot products, functions", PackedTable)
wrong(
    task,
    TableOfColumns,
    tab_transformer_first_attention_shares_detached=("detach", AT + "0.attn", SLOPES),
    tab_transformer_padded_rows_attended_in_evaluation=("no mask in eval", AT + "1.row_attn", "eval"),
    tab_transformer_last_feed_forward_gelu_on_the_value_half=("another half", AT + "2.ff.2"),
    tab_transformer_first_batch_norm_with_the_epsilon_of_keras=("another epsilon", "mlp.mlp.1"),
)
wrong(
    task,
    PackedTable,
    tab_transformer_third_column_offset_one_short=("a count off by one", ""),
    tab_transformer_second_feed_forward_norm_statistics_detached=("detach", AT + "1.ff.0", SLOPES),
    tab_transformer_row_attention_scaled_by_all_heads_width=("another scale", AT + "1.row_attn"),
    tab_transformer_second_batch_norm_keeps_biased_variance=("biased variance", "mlp.mlp.4", "buffer"),
)
