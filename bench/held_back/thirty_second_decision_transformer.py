"""Two ports of a small Decision Transformer: a tree with the time first, and one class of packed weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _thirty_second_decision_transformer as known
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

Model, HEADS, LAYERS = known.DecisionTransformerModel, known.HEADS, known.LAYERS
task = few("thirty_second_decision_transformer", Model, known.trajectories, known.masked_errors)


class Affine(nn.Module):
    """A product with a matrix (out, in), and an offset."""

    def __init__(self, matrix: Tensor, offset: Tensor):
        super().__init__()
        self.matrix, self.offset = leaf(matrix), leaf(offset)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.matrix) + self.offset


class Standard(nn.Module):
    """A layer norm of the last axis."""

    def __init__(self, norm: nn.LayerNorm):
        super().__init__()
        self.gain, self.shift, self.eps = leaf(norm.weight), leaf(norm.bias), norm.eps

    def forward(self, x: Tensor) -> Tensor:
        spread, center = torch.var_mean(x, -1, correction=0, keepdim=True)
        return (x - center) * (spread + self.eps).rsqrt() * self.gain + self.shift


class Looking(nn.Module):
    """The residual branch of attention, norm included, of [L, N, D]."""

    def __init__(self, block: nn.Module):
        super().__init__()
        weights, offsets = block.attn.c_attn.weight.chunk(3, 1), block.attn.c_attn.bias.chunk(3)
        self.norm, self.silent = Standard(block.ln_1), False
        self.ask, self.key, self.value = (Affine(w.T, b) for w, b in zip(weights, offsets, strict=True))
        self.out = Affine(block.attn.c_proj.weight.T, block.attn.c_proj.bias)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (part(y).unflatten(2, (HEADS, -1)) for part in (self.ask, self.key, self.value))
        v = v.detach() if self.silent else v
        scores = torch.einsum("qnhd,knhd->nhqk", q * q.shape[-1] ** -0.5, k)
        share = scores.masked_fill(hidden, torch.finfo(x.dtype).min).softmax(-1)
        return self.out(torch.einsum("nhqk,knhd->qnhd", share, v).flatten(2))


class Thinking(nn.Module):
    """The residual branch of the MLP, norm included."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.norm, self.form = Standard(block.ln_2), "tanh"
        self.up, self.down = (Affine(x.weight.T, x.bias) for x in (block.mlp.c_fc, block.mlp.c_proj))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x)), approximate=self.form))


class Tokens(nn.Module):
    """Three tokens for each time, [3 T, N, D]."""

    def __init__(self, model: Model):
        super().__init__()
        layers = (model.embed_return, model.embed_state, model.embed_action)
        self.kinds = nn.ModuleList([Affine(x.weight, x.bias) for x in layers])
        self.clock, self.norm = leaf(model.embed_timestep.weight), Standard(model.embed_ln)
        self.place, self.timed = leaf(model.encoder.wpe.weight), 3

    def forward(self, given: tuple[Tensor, ...], times: Tensor) -> Tensor:
        time, tokens = self.clock[times.T], []
        for i, (kind, x) in enumerate(zip(self.kinds, given, strict=True)):
            token = kind(x.transpose(0, 1))
            tokens.append(token + time if i < self.timed else token)
        return self.norm(torch.stack(tokens, 1).flatten(0, 1)) + self.place[0]


class TreeOfBranches(Port):
    """Residual branches with their norms, split queries, keys and values, the time as the first axis."""

    def take(self, model: Model) -> None:
        self.tokens, blocks = Tokens(model), model.encoder.h
        self.looks = nn.ModuleList(map(Looking, blocks))
        self.thoughts = nn.ModuleList(map(Thinking, blocks))
        self.last = Standard(model.encoder.ln_f)
        heads = (model.predict_state, model.predict_action[0], model.predict_return)
        self.state, self.action, self.value = (Affine(x.weight, x.bias) for x in heads)
        self.tokens.timed = 2 if self.fault == "decision_transformer_action_tokens_without_their_time" else 3
        if self.fault == "decision_transformer_second_mlp_with_the_exact_gelu":
            self.thoughts[1].form = "none"
        self.looks[2].silent = self.fault == "decision_transformer_last_attention_values_without_gradient"

    def forward(self, s: Tensor, a: Tensor, r: Tensor, t: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        x = self.tokens((r, s, a), t)
        order = torch.arange(len(x), device=x.device)
        absent = (mask == 0)[:, :, None].expand(-1, -1, 3).flatten(1)
        hidden = (order > order[:, None]) | absent[:, None, None]
        for look, think in zip(self.looks, self.thoughts, strict=True):
            x = x + look(x, hidden)
            x = x + think(x)
        _, seen, done = self.last(x).transpose(0, 1).unflatten(1, (-1, 3)).unbind(2)
        action = self.action(seen)
        if self.training or self.fault != "decision_transformer_actions_without_tanh_in_evaluation":
            action = action.tanh()
        return self.state(done), action, self.value(done)


def sheet(weight: Tensor, bias: Tensor) -> Tensor:
    """A matrix (in, out) over a row of offsets."""
    return torch.cat([weight, bias[None]])


def times(x: Tensor, rows: Tensor) -> Tensor:
    return F.pad(x, (0, 1), value=1.0) @ rows


class PackedDecisions(Port):
    """One matrix embeds all three kinds, one predicts all; the layers' sheets and the norms are stacked."""

    def take(self, model: Model) -> None:
        body = model.encoder
        embeds = (model.embed_return, model.embed_state, model.embed_action)
        heads = (model.predict_state, model.predict_return, model.predict_action[0])
        self.embed = leaf(torch.cat([sheet(x.weight.T, x.bias) for x in embeds]))
        self.heads = leaf(torch.cat([sheet(x.weight.T, x.bias) for x in heads], 1))
        self.rows = leaf(torch.cat([model.embed_timestep.weight, body.wpe.weight[:1]]))
        square = [x.attn.c_proj.weight for x in body.h]
        if self.fault == "decision_transformer_second_attention_projects_by_the_transpose":
            square[1] = square[1].T
        self.qkv = pile(sheet(x.attn.c_attn.weight, x.attn.c_attn.bias) for x in body.h)
        self.out = pile(sheet(w, x.attn.c_proj.bias) for w, x in zip(square, body.h, strict=True))
        self.up = pile(sheet(x.mlp.c_fc.weight, x.mlp.c_fc.bias) for x in body.h)
        self.down = pile(sheet(x.mlp.c_proj.weight, x.mlp.c_proj.bias) for x in body.h)
        norms = [model.embed_ln, *(y for x in body.h for y in (x.ln_1, x.ln_2)), body.ln_f]
        self.norms = pile(torch.stack([x.weight, x.bias]) for x in norms)

    def norm(self, i: int, x: Tensor) -> Tensor:
        coarse = self.fault == "decision_transformer_last_norm_with_a_larger_eps" and i == 2 * LAYERS + 1
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + (1e-3 if coarse else 1e-5)).sqrt()
        return torch.addcmul(self.norms[i, 1], x, self.norms[i, 0])

    def mixed(self, i: int, x: Tensor, allowed: Tensor) -> Tensor:
        packed = times(x, self.qkv[i]).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        scores = packed[0] @ packed[1].mT / packed.shape[-1] ** 0.5
        weights = (scores - scores.amax(-1, keepdim=True).detach()).exp() * allowed
        weights = torch.where(allowed.any(-1, keepdim=True), weights, 1.0)
        weights = weights / weights.sum(-1, keepdim=True)
        return times((weights @ packed[2]).transpose(1, 2).flatten(2), self.out[i])

    def forward(self, s: Tensor, a: Tensor, r: Tensor, t: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        given = [F.pad(x, (0, 1), value=1.0) for x in (r, s, a)]
        rows = self.embed.split([x.shape[2] for x in given])
        still = 0 if self.fault == "decision_transformer_time_zero_embedded_as_padding" else None
        time = F.embedding(t, self.rows[:-1], padding_idx=still)
        x = torch.stack([x @ w + time for x, w in zip(given, rows, strict=True)], 2).flatten(1, 2)
        x = self.norm(0, x) + self.rows[-1]
        by_kind = self.fault == "decision_transformer_mask_repeated_by_kind_and_not_by_time"
        real = (mask.repeat(1, 3) if by_kind else mask.repeat_interleave(3, 1)) > 0
        allowed = (real[:, None] & real.new_ones(x.shape[1], x.shape[1]).tril())[:, None]
        for i in range(LAYERS):
            x = x + self.mixed(i, self.norm(2 * i + 1, x), allowed)
            y = times(self.norm(2 * i + 2, x), self.up[i])
            y = y * torch.sigmoid((8 / torch.pi) ** 0.5 * y * (1 + 0.044715 * y * y))
            x = x + times(y, self.down[i])
        x, cut = self.norm(2 * LAYERS + 1, x), s.shape[2]
        done, seen = times(x[:, 2::3], self.heads[:, : cut + 1]), times(x[:, 1::3], self.heads[:, cut + 1 :])
        return done[..., :cut], seen.tanh(), done[..., cut:]


SLOPES = ("input gradient", "weight gradient")
right(task, "decision_transformer_of_branches", "a tree, time first, split projections", TreeOfBranches)
right(task, "decision_transformer_of_packed_sheets", "packed stacks, fused embeddings", PackedDecisions)
wrong(
    task,
    TreeOfBranches,
    decision_transformer_action_tokens_without_their_time=("a term left out", ""),
    decision_transformer_second_mlp_with_the_exact_gelu=("another activation", "encoder.h.1.mlp.act"),
    decision_transformer_last_attention_values_without_gradient=("detach", "encoder.h.2.attn", SLOPES),
    decision_transformer_actions_without_tanh_in_evaluation=("left out in eval", "predict_action.1", "eval"),
)
wrong(
    task,
    PackedDecisions,
    decision_transformer_time_zero_embedded_as_padding=("no gradient", "embed_timestep", "weight gradient"),
    decision_transformer_mask_repeated_by_kind_and_not_by_time=("another order", ""),
    decision_transformer_second_attention_projects_by_the_transpose=("transpose", "encoder.h.1.attn.c_proj"),
    decision_transformer_last_norm_with_a_larger_eps=("another eps", "encoder.ln_f"),
)
