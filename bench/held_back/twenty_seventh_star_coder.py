"""Two ports of a small StarCoder: a tree with the time first and weights by head, and five packed weights."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _twenty_seventh_star_coder as star
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

HEADS, INNER, LAYERS, VOCABULARY, WIDTH = star.HEADS, star.INNER, star.LAYERS, star.VOCABULARY, star.WIDTH
task = few("twenty_seventh_star_coder", star.GPTBigCodeForCausalLM, star.lines, star.next_token)
EACH, BEND, CUBE = WIDTH // HEADS, math.sqrt(2 / math.pi), 0.044715


class Level(nn.Module):
    """A layer norm of the last axis."""

    def __init__(self, norm: nn.LayerNorm):
        super().__init__()
        self.gain, self.offset, self.eps = leaf(norm.weight), leaf(norm.bias), norm.eps

    def forward(self, x: Tensor) -> Tensor:
        spread, middle = torch.var_mean(x, -1, correction=0, keepdim=True)
        return torch.addcmul(self.offset, (x - middle) * (spread + self.eps).rsqrt(), self.gain)


class Front(nn.Module):
    """Tokens and mask, [T, N] each, to what goes into the first layer and which key [N, Q, K] is seen."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.words, self.places = leaf(model.wte.weight), leaf(model.wpe.weight)
        self.from_the_edge = False

    def forward(self, tokens: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        spot = torch.arange(len(tokens), device=tokens.device)[:, None]
        place = torch.where(real, spot - (~real).sum(0), 1)
        if self.from_the_edge:
            place = spot.expand_as(tokens)
        return self.words[tokens] + self.places[place], (spot >= spot.T) & real.T[:, None]


class Look(nn.Module):
    """The first half of a block with its norm and its sum: weights by head, [T, N, C] to the same."""

    def __init__(self, norm: nn.LayerNorm, attention: nn.Module):
        super().__init__()
        into, out = attention.c_attn, attention.c_proj
        weights, offsets = into.weight.split([WIDTH, EACH, EACH]), into.bias.split([WIDTH, EACH, EACH])
        self.level = Level(norm)
        self.ask = leaf(weights[0].unflatten(0, (HEADS, EACH)))
        self.ask_offset = leaf(offsets[0].view(HEADS, 1, EACH))
        self.key, self.key_offset = leaf(weights[1].T), leaf(offsets[1])
        self.value, self.value_offset = leaf(weights[2].T), leaf(offsets[2])
        self.out, self.out_offset = leaf(out.weight.T.unflatten(0, (HEADS, EACH))), leaf(out.bias)
        self.cached, self.offset_by_head, self.cooled = False, False, 1

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        y = self.level(x)
        key, value = y @ self.key + self.key_offset, y @ self.value + self.value_offset
        if self.cached:
            key, value = key.detach(), value.detach()
        ask = torch.einsum("tnc,hdc->nhtd", y, self.ask) + self.ask_offset
        scores = torch.einsum("nhtd,snd->nhts", ask * EACH**-0.5, key)
        if not self.training:
            scores = scores / self.cooled
        shares = scores.masked_fill(~seen[:, None], torch.finfo(x.dtype).min).softmax(-1)
        heads = torch.einsum("nhts,snd,hdc->htnc", shares, value, self.out)
        if self.offset_by_head:
            return x + (heads + self.out_offset).sum(0)
        return x + heads.sum(0) + self.out_offset


class Think(nn.Module):
    """The second half of a block with its norm and its sum."""

    def __init__(self, norm: nn.LayerNorm, mlp: nn.Module):
        super().__init__()
        self.level = Level(norm)
        self.up, self.up_offset = leaf(mlp.c_fc.weight.T), leaf(mlp.c_fc.bias)
        self.down, self.down_offset = leaf(mlp.c_proj.weight.T), leaf(mlp.c_proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.level(x) @ self.up + self.up_offset
        y = y * torch.sigmoid(2 * BEND * y * (1 + CUBE * y.square()))
        return x + self.down_offset + y @ self.down


class CoderOfHalves(Port):
    """Halves of blocks that hold their norms and sums, with the time first and a weight for each head."""

    def take(self, model: star.GPTBigCodeForCausalLM) -> None:
        body = model.transformer
        self.front, self.last = Front(body), Level(body.ln_f)
        self.looks = nn.ModuleList(Look(block.ln_1, block.attn) for block in body.h)
        self.thinks = nn.ModuleList(Think(block.ln_2, block.mlp) for block in body.h)
        self.front.from_the_edge = self.fault == "star_coder_positions_counted_from_the_padding"
        self.looks[0].cached = self.fault == "star_coder_first_layer_caches_key_and_value_without_gradient"
        if self.fault == "star_coder_second_layer_scores_halved_in_evaluation":
            self.looks[1].cooled = 2
        self.looks[2].offset_by_head = self.fault == "star_coder_third_layer_output_bias_added_by_every_head"

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x, seen = self.front(input_ids.T, attention_mask.T.bool())
        for look, think in zip(self.looks, self.thinks, strict=True):
            x = think(look(x, seen))
        return torch.einsum("tnc,vc->ntv", self.last(x), self.front.words)


class Bent(torch.autograd.Function):
    """GELU by tanh with its slope by hand, in which the cube's own slope is ``power``."""

    @staticmethod
    def forward(ctx, x: Tensor, power: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.power = power
        return 0.5 * x * (1 + torch.tanh(BEND * x * (1 + CUBE * x * x)))

    @staticmethod
    def backward(ctx, slope: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        t = torch.tanh(BEND * x * (1 + CUBE * x * x))
        inner = BEND * (1 + ctx.power * CUBE * x * x)
        return slope * 0.5 * ((1 + t) + x * (1 - t * t) * inner), None


class PackedCoder(Port):
    """One table of words and places, and a pack for each kind of weight with a layer in each row."""

    def take(self, model: star.GPTBigCodeForCausalLM) -> None:
        body = model.transformer
        blocks = list(body.h)
        self.table = leaf(torch.cat([body.wte.weight, body.wpe.weight]))
        self.thin = pile(torch.cat([b.attn.c_attn.weight, b.attn.c_proj.weight]) for b in blocks)
        self.thick = pile(torch.stack([b.mlp.c_fc.weight, b.mlp.c_proj.weight.T]) for b in blocks)
        layers = [(b.attn.c_attn, b.attn.c_proj, b.mlp.c_fc, b.mlp.c_proj) for b in blocks]
        self.offsets = pile(torch.cat([layer.bias for layer in each]) for each in layers)
        norms = [norm for b in blocks for norm in (b.ln_1, b.ln_2)] + [body.ln_f]
        self.norms = pile(torch.stack([norm.weight, norm.bias]) for norm in norms)

    def level(self, i: int, x: Tensor) -> Tensor:
        keras = self.fault == "star_coder_final_norm_takes_the_epsilon_of_keras" and i == 2 * LAYERS
        x = x - x.mean(-1, keepdim=True)
        size = (x.square().mean(-1, keepdim=True) + (1e-3 if keras else 1e-5)).sqrt()
        return x / size * self.norms[i, 0] + self.norms[i, 1]

    def attend(self, i: int, y: Tensor, seen: Tensor, offset: Tensor) -> Tensor:
        """The heads of all queries one below the other, against one key: [N, T H, D] by [N, D, T]."""
        ask, key, value = (y @ self.thin[i, :-WIDTH].T + offset).split([WIDTH, EACH, EACH], 2)
        if self.fault == "star_coder_first_layer_queries_unfolded_with_the_head_last" and i == 0:
            ask = ask.unflatten(2, (EACH, HEADS)).transpose(2, 3).flatten(2)
        scores = ask.reshape(len(y), -1, EACH) @ key.mT / math.sqrt(EACH)
        seen = seen.repeat_interleave(HEADS, 1)
        top = scores.detach().masked_fill(~seen, -1e9).amax(-1, keepdim=True)
        shares = torch.where(seen, scores - top, -torch.inf).exp()
        shares = torch.where(seen.any(-1, keepdim=True), shares, 1)
        return (shares @ value / shares.sum(-1, keepdim=True)).view_as(y)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        place = (attention_mask.cumsum(1) - 1) * attention_mask + (1 - attention_mask)
        x = F.embedding(torch.stack([input_ids, place + VOCABULARY]), self.table).sum(0)
        seen = (attention_mask[:, None].bool().expand(-1, x.shape[1], -1)).tril()
        for i in range(LAYERS):
            asked, out, up, down = self.offsets[i].split([WIDTH + 2 * EACH, WIDTH, INNER, WIDTH])
            mixed = self.attend(i, self.level(2 * i, x), seen, asked)
            x = x + F.linear(mixed, self.thin[i, -WIDTH:], out)
            y = self.level(2 * i + 1, x)
            power = 1 if self.fault == "star_coder_second_gelu_slope_misses_a_three" and i == 1 else 3
            z = Bent.apply(F.linear(y, self.thick[i, 0], up), power)
            if self.fault == "star_coder_third_layer_adds_the_normed_states_to_the_mlp" and i == 2:
                x = y
            x = x + z @ self.thick[i, 1] + down
        return self.level(2 * LAYERS, x) @ self.table[:VOCABULARY].T


SLOPES = ("input gradient", "weight gradient")
right(task, "star_coder_of_halves_with_the_time_first", "a tree, weights by head", CoderOfHalves)
right(task, "star_coder_of_packed_weights", "packed stacks, a softmax and a slope by hand", PackedCoder)
wrong(
    task,
    CoderOfHalves,
    star_coder_positions_counted_from_the_padding=("positions shifted by padding", "transformer"),
    star_coder_first_layer_caches_key_and_value_without_gradient=("detach", "transformer.h.0.attn", SLOPES),
    star_coder_second_layer_scores_halved_in_evaluation=("a scale in eval", "transformer.h.1.attn", "eval"),
    star_coder_third_layer_output_bias_added_by_every_head=("a bias by head", "transformer.h.2.attn.c_proj"),
)
wrong(
    task,
    PackedCoder,
    star_coder_first_layer_queries_unfolded_with_the_head_last=("axes confused", "transformer.h.0.attn"),
    star_coder_second_gelu_slope_misses_a_three=("wrong backward", "transformer.h.1.mlp.act", SLOPES),
    star_coder_third_layer_adds_the_normed_states_to_the_mlp=("another residual", "transformer.h.2"),
    star_coder_final_norm_takes_the_epsilon_of_keras=("another epsilon", "transformer.ln_f"),
)
