"""Two ports of a small Granite MoE: a tree of time-first branches, and one class of stacked weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _twenty_eighth_granite_moe as granite
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

HEADS, PAIRS, HEAD, TOP, EXPERTS = (
    granite.HEADS,
    granite.KEY_HEADS,
    granite.HEAD,
    granite.TOP,
    granite.EXPERTS,
)
GROUP, RESIDUAL = HEADS // PAIRS, granite.RESIDUAL_MULTIPLIER
task = few("twenty_eighth_granite_moe", granite.GraniteMoeForCausalLM, granite.walks, granite.next_tokens)


class Level(nn.Module):
    """Divides by the root mean square."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.gain, self.eps = leaf(norm.weight), norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, True) + self.eps).sqrt() * self.gain


def woven(weight: Tensor) -> Tensor:
    """[heads * HEAD, D] -> [heads, HEAD, D], whose two halves of each head alternate."""
    return weight.unflatten(0, (-1, 2, HEAD // 2)).transpose(1, 2).flatten(1, 2)


class Looking(nn.Module):
    """Norm, attention of [T, N, D] by key head and query in its group, and what it adds."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        own = layer.self_attn
        q = woven(own.q_proj.weight).unflatten(0, (PAIRS, GROUP))
        k, v = woven(own.k_proj.weight), own.v_proj.weight.unflatten(0, (PAIRS, HEAD))
        self.level, self.all = Level(layer.input_layernorm), leaf(torch.cat([q, k[:, None], v[:, None]], 1))
        self.back, self.by_turns = leaf(own.o_proj.weight.T.unflatten(0, (PAIRS, GROUP, HEAD))), False

    def forward(self, x: Tensor, hidden: Tensor, turn: Tensor) -> Tensor:
        every = torch.einsum("tnd,pghd->npgth", self.level(x), self.all)
        both, v = every[:, :, :-1], every[:, :, -1]
        even, odd, c, s = both[..., 0::2], both[..., 1::2], turn.cos(), turn.sin()
        both = torch.stack([even * c - odd * s, odd * c + even * s], -1).flatten(-2)
        q, k = both[:, :, :-1], both[:, :, -1]
        if self.by_turns:
            q = q.flatten(1, 2).unflatten(1, (GROUP, PAIRS)).transpose(1, 2)
        scores = torch.einsum("npgth,npsh->npgts", q * granite.ATTENTION_MULTIPLIER, k)
        mixed = scores.masked_fill(hidden[:, None, None], -torch.inf).softmax(-1) @ v[:, :, None]
        if self.by_turns:
            mixed = mixed.transpose(1, 2).flatten(1, 2).unflatten(1, (PAIRS, GROUP))
        return torch.einsum("npgth,pghd->tnd", mixed, self.back) * RESIDUAL


class Council(nn.Module):
    """Norm, all experts on all tokens, of which those not chosen have no weight, and what they add."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        own = layer.block_sparse_moe
        gate, up = own.input_linear.weight.chunk(2, 1)
        self.level, self.ask = Level(layer.post_attention_layernorm), leaf(own.router.layer.weight.T)
        self.gate, self.up = leaf(gate.permute(2, 0, 1)), leaf(up.permute(2, 0, 1))
        self.down, self.silent, self.whole = leaf(own.output_linear.weight.transpose(1, 2)), False, False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        votes = (x := self.level(x)) @ self.ask
        chosen = torch.zeros_like(votes).scatter(-1, votes.topk(TOP).indices, 1)
        share = (votes if self.whole else votes.masked_fill(chosen == 0, -torch.inf)).softmax(-1) * chosen
        gate = torch.einsum("tnd,dei->tnei", x, self.gate)
        inner = gate * gate.sigmoid() * torch.einsum("tnd,dei->tnei", x, self.up)
        inner = inner * (share.detach() if self.silent else share)[..., None] * RESIDUAL
        return torch.einsum("tnei,eid->tnd", inner, self.down), chosen, votes.softmax(-1)


class GraniteOfBranches(Port):
    """Branches that add to [T, N, D]; one weight for q, k and v, whose pairs to turn lie together."""

    def take(self, model: nn.Module) -> None:
        inner = model.model
        self.table, self.last = leaf(inner.embed_tokens.weight), Level(inner.norm)
        self.looks, self.councils = (nn.ModuleList(map(x, inner.layers)) for x in (Looking, Council))
        self.register_buffer("rate", inner.rotary_emb.inv_freq.clone())
        self.councils[0].whole = self.fault == "granite_moe_first_router_softmax_over_all_experts"
        self.councils[1].silent = self.fault == "granite_moe_second_router_gates_without_gradient"
        self.looks[2].by_turns = self.fault == "granite_moe_last_attention_deals_key_heads_by_turns"
        if self.fault == "granite_moe_second_attention_norm_with_a_hundredfold_eps":
            self.looks[1].level.eps *= 100

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        x = F.embedding(input_ids.T, self.table * granite.EMBEDDING_MULTIPLIER)
        time, load, mass = torch.arange(len(x), device=x.device), 0, 0
        hidden = (time[:, None] < time) | (attention_mask == 0)[:, None]
        turn, kept = time.to(x)[:, None] * self.rate, attention_mask.T[..., None].to(x)
        for look, council in zip(self.looks, self.councils, strict=True):
            x = x + look(x, hidden, turn)
            added, chosen, likely = council(x)
            x = x + added
            load, mass = load + (chosen * kept).sum((0, 1)), mass + (likely * kept).sum((0, 1))
        count = kept.sum() * len(self.looks)
        logits = self.last(x) @ (self.table / granite.LOGITS_SCALING).T
        return logits.transpose(0, 1), (load / count) @ (mass / count) * EXPERTS


class StackedGranite(Port):
    """Weights stacked by layer; each token fetches the matrices of its experts, choice by choice."""

    def take(self, model: nn.Module) -> None:
        inner, layers = model.model, model.model.layers
        pairs = [(x.self_attn, x.block_sparse_moe) for x in layers]
        self.words, self.end = leaf(inner.embed_tokens.weight.T), leaf(inner.norm.weight)
        names = "input_layernorm.weight", "post_attention_layernorm.weight"
        self.gains = pile(x.get_parameter(name) for name in names for x in layers)
        self.qkv = pile(torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight]).T for a, _ in pairs)
        self.out = pile(a.o_proj.weight.T for a, _ in pairs)
        self.router = pile(m.router.layer.weight for _, m in pairs)
        self.wide = pile(torch.cat([m.input_linear.weight.mT, m.output_linear.weight], 2) for _, m in pairs)
        self.register_buffer("rate", inner.rotary_emb.inv_freq.clone())

    def norm(self, x: Tensor, gain: Tensor) -> Tensor:
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return gain * x * (size * size / x.shape[-1] + granite.EPS) ** -0.5

    def attend(self, i: int, x: Tensor, bias: Tensor, c: Tensor, s: Tensor) -> Tensor:
        heads = (x @ self.qkv[i]).unflatten(2, (-1, HEAD)).unbind(2)
        turned = [torch.cat([a * c - b * s, b * c + a * s], -1) for a, b in (h.chunk(2, -1) for h in heads)]
        done = []
        for h in range(HEADS):
            scores = granite.ATTENTION_MULTIPLIER * turned[h] @ turned[HEADS + h // GROUP].mT + bias
            done.append((scores - scores.logsumexp(-1, True)).exp() @ heads[HEADS + PAIRS + h // GROUP])
        return torch.cat(done, -1) @ self.out[i]

    def consult(self, i: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the experts say to tokens [M, D], the probabilities and how often each expert is asked."""
        likely, total = (x @ self.router[i].T).softmax(-1), 0
        best, index = likely.topk(TOP)
        best = best / best.sum(-1, True)
        for j in range(TOP):
            first, last, down = self.wide[i][index[:, j]].split(granite.INNER, 2)
            a, b = (torch.einsum("md,mdi->mi", x, w) for w in (first, last))
            if self.fault == "granite_moe_first_experts_activate_the_up_half" and i == 0:
                a, b = b, a
            total = total + best[:, j, None] * torch.einsum("mi,mdi->md", F.silu(a) * b, down)
        return total, likely, F.one_hot(index, EXPERTS).sum(1).to(x)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        depth, odds, asked = len(self.qkv), [], []
        rooted = self.fault == "granite_moe_embedding_multiplied_by_the_root_of_the_width"
        x = (granite.WIDTH**0.5 if rooted else granite.EMBEDDING_MULTIPLIER) * self.words.T[input_ids]
        angle = torch.arange(x.shape[1], device=x.device).to(x).outer(self.rate)
        seen = attention_mask.bool()[:, None] & torch.ones_like(x[0] @ x[0].T, dtype=torch.bool).tril()
        bias = torch.zeros_like(seen, dtype=x.dtype).masked_fill(~seen, -torch.inf)
        for i in range(depth):
            x = x + RESIDUAL * self.attend(i, self.norm(x, self.gains[i]), bias, angle.cos(), angle.sin())
            more, likely, count = self.consult(i, self.norm(x, self.gains[depth + i]).flatten(0, 1))
            x = x + RESIDUAL * more.view_as(x)
            odds.append(likely), asked.append(count)
        loose = self.fault == "granite_moe_load_counts_padding_in_evaluation" and not self.training
        kept = (torch.ones_like(attention_mask) if loose else attention_mask).flatten().to(x)
        load, mass = (
            torch.einsum("lme,m->e", torch.stack(each), kept / kept.sum()) / depth for each in (asked, odds)
        )
        untied = self.fault == "granite_moe_tied_head_gives_its_weight_no_gradient"
        head = self.words.detach() if untied else self.words
        return self.norm(x, self.end / granite.LOGITS_SCALING) @ head, (load * mass).sum() * EXPERTS


SLOPES, MOE = ("input gradient", "weight gradient"), "model.layers.1.block_sparse_moe"
right(task, "granite_moe_of_branches_with_time_first", "a tree, all experts, woven", GraniteOfBranches)
right(task, "granite_moe_of_stacked_weights", "stacked packs, fetched matrices, head by head", StackedGranite)
wrong(
    task,
    GraniteOfBranches,
    granite_moe_first_router_softmax_over_all_experts=(
        "another softmax",
        "model.layers.0.block_sparse_moe.router",
    ),
    granite_moe_second_attention_norm_with_a_hundredfold_eps=("eps", "model.layers.1.input_layernorm"),
    granite_moe_second_router_gates_without_gradient=("detach", (f"{MOE}.router", MOE), SLOPES),
    granite_moe_last_attention_deals_key_heads_by_turns=("another head order", "model.layers.2.self_attn"),
)
wrong(
    task,
    StackedGranite,
    granite_moe_embedding_multiplied_by_the_root_of_the_width=("another factor", "model"),
    granite_moe_first_experts_activate_the_up_half=("swapped halves", "model.layers.0.block_sparse_moe"),
    granite_moe_load_counts_padding_in_evaluation=("a mask left out in eval", "", "eval"),
    granite_moe_tied_head_gives_its_weight_no_gradient=("detach", "lm_head", "weight gradient"),
)
