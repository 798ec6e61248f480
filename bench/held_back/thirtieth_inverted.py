"""Two ports of a small iTransformer: a tree with the tokens first, and one class of stacked weights."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._thirtieth_inverted import D_MODEL, HEADS, ITransformer, seasons, squares

task = few("thirtieth_inverted", ITransformer, seasons, squares)


class Balance(nn.Module):
    """A layer norm of the last axis by hand."""

    def __init__(self, norm: nn.LayerNorm):
        super().__init__()
        self.gain, self.shift, self.eps = leaf(norm.weight), leaf(norm.bias), norm.eps

    def forward(self, x: Tensor) -> Tensor:
        spread, middle = torch.var_mean(x, -1, correction=0, keepdim=True)
        return (x - middle) * (spread + self.eps).rsqrt() * self.gain + self.shift


class Tokens(nn.Module):
    """Series [L, N, V] and covariates [L, N, C] -> tokens [V + C, N, D], each kind by itself."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.kernel, self.offset, self.forgets = leaf(linear.weight.T), leaf(linear.bias), False

    def forward(self, series: Tensor, calendar: Tensor) -> Tensor:
        kinds = [series] if self.forgets and not self.training else [series, calendar]
        return torch.cat([torch.einsum("lnv,ld->vnd", x, self.kernel) + self.offset for x in kinds])


class Exchange(nn.Module):
    """Attention among the tokens of [T, N, D]; a fused weight makes the three parts by head."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        three = layer.query_projection, layer.key_projection, layer.value_projection
        self.fused = pile(x.weight.unflatten(0, (HEADS, -1)) for x in three)
        self.fused_offset = pile(x.bias.view(HEADS, 1, -1) for x in three)
        self.back, self.back_offset = leaf(layer.out_projection.weight), leaf(layer.out_projection.bias)
        self.size = D_MODEL // HEADS

    def forward(self, x: Tensor) -> Tensor:
        made = torch.einsum("tnd,khed->knhte", x, self.fused) + self.fused_offset[:, None]
        mixed = F.scaled_dot_product_attention(*made, scale=self.size**-0.5)
        return mixed.permute(2, 0, 1, 3).flatten(2) @ self.back.T + self.back_offset


class Round(nn.Module):
    """An exchange and the perceptron of each token, each with the norm that follows it."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.exchange, self.calm = Exchange(layer.attention), Balance(layer.norm1)
        self.widen, self.widen_offset = leaf(layer.conv1.weight[..., 0].T), leaf(layer.conv1.bias)
        self.narrow, self.narrow_offset = leaf(layer.conv2.weight[..., 0].T), leaf(layer.conv2.bias)
        self.settle, self.cut = Balance(layer.norm2), False

    def forward(self, x: Tensor) -> Tensor:
        x = self.calm(self.exchange(x) + x)
        y = F.gelu(x @ self.widen + self.widen_offset) @ self.narrow
        return self.settle(y + self.narrow_offset + (x.detach() if self.cut else x))


class TokensFirst(Port):
    """Time, then tokens, on the first axis; the covariates' tokens go before the last norm."""

    def take(self, model: ITransformer) -> None:
        self.tokens = Tokens(model.enc_embedding.value_embedding)
        self.rounds = nn.ModuleList(map(Round, model.encoder.attn_layers))
        self.end = Balance(model.encoder.norm)
        self.ahead, self.ahead_offset = leaf(model.projector.weight), leaf(model.projector.bias)
        self.tokens.forgets = self.fault == "inverted_covariates_left_out_in_evaluation"
        if self.fault == "inverted_second_layer_scales_scores_by_the_width":
            self.rounds[1].exchange.size = D_MODEL
        self.rounds[2].cut = self.fault == "inverted_third_layer_skips_its_feed_forward_without_gradient"
        if self.fault == "inverted_final_norm_has_a_larger_epsilon":
            self.end.eps = 1e-3

    def forward(self, x_enc: Tensor, x_mark_enc: Tensor) -> Tensor:
        spread, level = torch.var_mean(x_enc, 1, correction=0)
        spread, level = (spread + 1e-5).sqrt(), level.detach()
        x = self.tokens((x_enc.transpose(0, 1) - level) / spread, x_mark_enc.transpose(0, 1))
        for part in self.rounds:
            x = part(x)
        x = self.end(x[: x_enc.shape[2]])
        ahead = torch.einsum("vnd,hd->hnv", x, self.ahead) + self.ahead_offset[:, None, None]
        return torch.addcmul(level, ahead, spread).transpose(0, 1)


class LogisticSlope(torch.autograd.Function):
    """GELU, whose slope is that of x sigmoid(1.702 x)."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.gelu(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(1.702 * x)
        return grad * (s + 1.702 * x * s * (1 - s))


def sheet(layer: nn.Module) -> Tensor:
    """The transposed matrix of a layer, and its offset as one more row."""
    return torch.cat([layer.weight.flatten(1).T, layer.bias[None]])


def through(x: Tensor, rows: Tensor) -> Tensor:
    return x @ rows[:-1] + rows[-1]


class StackedInverted(Port):
    """Stacks of sheets by layer, the heads in a loop, the norms' gains and shifts in one weight."""

    def take(self, model: ITransformer) -> None:
        layers, names = model.encoder.attn_layers, ("query", "key", "value", "out")
        self.four = pile(
            torch.stack([sheet(getattr(x.attention, f"{name}_projection")) for name in names]) for x in layers
        )
        self.up, self.down = pile(sheet(x.conv1) for x in layers), pile(sheet(x.conv2) for x in layers)
        norms = [norm for x in layers for norm in (x.norm1, x.norm2)] + [model.encoder.norm]
        self.norms = pile(torch.stack([x.weight, x.bias]) for x in norms)
        self.first = leaf(sheet(model.enc_embedding.value_embedding))
        self.last = leaf(sheet(model.projector))

    def norm(self, x: Tensor, i: int) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        gain, shift = self.norms[i]
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain + shift

    def attend(self, x: Tensor, i: int) -> Tensor:
        q, k, v = (through(x, rows).chunk(HEADS, -1) for rows in self.four[i, :3])
        out, back = self.four[i, 3, -1], self.four[i, 3, :-1].chunk(HEADS)
        for j in range(HEADS):
            scores = (k[j] @ q[j].mT) / math.sqrt(q[j].shape[-1])
            out = out + scores.softmax(1).mT @ v[j] @ back[j]
        return out

    def gelu(self, x: Tensor, i: int) -> Tensor:
        if self.fault == "inverted_first_layer_gelu_has_the_slope_of_its_logistic_form" and i == 0:
            return LogisticSlope.apply(x)
        return x * torch.special.ndtr(x)

    def forward(self, x_enc: Tensor, x_mark_enc: Tensor) -> Tensor:
        level = x_enc.detach().mean(1, keepdim=True)
        x = x_enc - level
        spread = (x.square().mean(1, keepdim=True) + 1e-5).sqrt()
        series, calendar = through((x / spread).mT, self.first), through(x_mark_enc.mT, self.first)
        if self.fault == "inverted_covariates_embedded_without_the_bias":
            calendar = x_mark_enc.mT @ self.first[:-1]
        x = torch.cat([calendar, series], 1)
        for i in range(len(self.up)):
            mixed = x + self.attend(x, i)
            x = self.norm(mixed, 2 * i)
            y = through(self.gelu(through(x, self.up[i]), i), self.down[i])
            if self.fault == "inverted_second_layer_skips_from_before_its_first_norm" and i == 1:
                x = mixed
            x = self.norm(x + y, 2 * i + 1)
        x = through(self.norm(x, -1), self.last)[:, calendar.shape[1] :].mT
        if self.fault == "inverted_forecast_takes_its_level_before_its_spread":
            return (x + level) * spread
        return x * spread + level


SLOPES, SKIP = ("input gradient", "weight gradient"), "another skip"
LAYER, EMBEDDING = "encoder.attn_layers.", ("enc_embedding.value_embedding", "enc_embedding")
right(task, "inverted_with_tokens_first", "a tree, fused heads, kinds embedded apart", TokensFirst)
right(task, "inverted_of_stacked_weights", "packed stacks, loops over heads", StackedInverted)
wrong(
    task,
    TokensFirst,
    inverted_covariates_left_out_in_evaluation=("tokens dropped in eval", "enc_embedding", "eval"),
    inverted_second_layer_scales_scores_by_the_width=("a scale", f"{LAYER}1.attention.inner_attention"),
    inverted_third_layer_skips_its_feed_forward_without_gradient=("detach", f"{LAYER}2", SLOPES),
    inverted_final_norm_has_a_larger_epsilon=("another epsilon", "encoder.norm"),
)
wrong(
    task,
    StackedInverted,
    inverted_covariates_embedded_without_the_bias=("a bias left out for some tokens", EMBEDDING),
    inverted_first_layer_gelu_has_the_slope_of_its_logistic_form=("a wrong slope", f"{LAYER}0", SLOPES),
    inverted_second_layer_skips_from_before_its_first_norm=(SKIP, f"{LAYER}1"),
    inverted_forecast_takes_its_level_before_its_spread=("steps swapped", ""),
)
