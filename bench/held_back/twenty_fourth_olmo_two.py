"""Two ports of a small OLMo 2: a chain of normed branches, time first, and one class of stacked weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _twenty_fourth_olmo_two as olmo
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("twenty_fourth_olmo_two", olmo.Olmo2ForCausalLM, olmo.counting, olmo.next_token_and_z)
HEADS, KEY_HEADS, HEAD, EPS, PAD = olmo.HEADS, olmo.KEY_HEADS, olmo.HEAD, olmo.EPS, olmo.PAD
GROUP, QUERY, KEY = HEADS // KEY_HEADS, HEADS * HEAD, KEY_HEADS * HEAD


def paired(rows: Tensor) -> Tensor:
    """Rows of heads, of which the halves of each head are made neighbours: 0, 4, 1, 5, 2, 6, 3, 7."""
    return rows.unflatten(0, (-1, 2, HEAD // 2)).transpose(1, 2).flatten(0, 2)


class Level(nn.Module):
    """Divides by the root of the mean square; ``loose`` adds epsilon to the root, not below it."""

    def __init__(self, gain: Tensor, loose: bool = False):
        super().__init__()
        self.gain, self.loose = leaf(gain), loose

    def forward(self, x: Tensor) -> Tensor:
        if not self.loose:
            return F.rms_norm(x, self.gain.shape, self.gain, EPS)
        return self.gain * x / (x.square().mean(-1, keepdim=True).sqrt() + EPS)


class Heads(nn.Module):
    """[T, N, C] -> queries [T, N, key heads, group, head], keys and values [T, N, key heads, head]."""

    def __init__(self, attention: nn.Module, halved: bool):
        super().__init__()
        q, k, v = (getattr(attention, f"{name}_proj").weight for name in "qkv")
        self.weight = leaf(torch.cat([paired(q), paired(k), v]))
        gain, other = attention.q_norm.weight, attention.k_norm.weight
        self.ask, self.answer = Level(gain if halved else paired(gain)), Level(paired(other))

    def turned(self, x: Tensor, angle: Tensor) -> Tensor:
        """Neighbours turned by the angles of their place, [T, head / 2]."""
        angle = angle.reshape(len(x), *[1] * (x.ndim - 2), -1)
        cos, sin = angle.cos(), angle.sin()
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)

    def forward(self, x: Tensor, angle: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = F.linear(x, self.weight).split([QUERY, KEY, KEY], -1)
        q = self.ask(q).unflatten(-1, (KEY_HEADS, GROUP, HEAD)) / HEAD**0.5
        k = self.answer(k).unflatten(-1, (KEY_HEADS, HEAD))
        return self.turned(q, angle), self.turned(k, angle), v.unflatten(-1, (KEY_HEADS, HEAD))


class Looking(nn.Module):
    def __init__(self, attention: nn.Module, halved: bool):
        super().__init__()
        self.heads, self.gather = Heads(attention, halved), leaf(attention.o_proj.weight)

    def forward(self, x: Tensor, angle: Tensor, closed: Tensor) -> Tensor:
        q, k, v = self.heads(x, angle)
        scores = torch.einsum("qnkgd,tnkd->nkgqt", q, k) + closed[:, None, None]
        return F.linear(torch.einsum("nkgqt,tnkd->qnkgd", scores.softmax(-1), v).flatten(2), self.gather)


class Gated(nn.Module):
    """Gate and rise in one weight, row by row; ``still`` takes the sigmoid for a constant."""

    def __init__(self, mlp: nn.Module, still: bool):
        super().__init__()
        self.both = leaf(torch.stack([mlp.gate_proj.weight, mlp.up_proj.weight], 1).flatten(0, 1))
        self.fall, self.still = leaf(mlp.down_proj.weight), still

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        gate, rise = F.linear(x, self.both).unflatten(-1, (-1, 2)).unbind(-1)
        share = gate.sigmoid()
        return F.linear(gate * rise * (share.detach() if self.still else share), self.fall)


class Branch(nn.Module):
    def __init__(self, inner: nn.Module, gain: Tensor, loose: bool = False):
        super().__init__()
        self.inner, self.level = inner, Level(gain, loose)

    def forward(self, x: Tensor, angle: Tensor, closed: Tensor) -> Tensor:
        return self.level(self.inner(x, angle, closed)) + x


class OlmoOfBranches(Port):
    """A chain of branches, [T, N, C], that turns neighbours where the reference turns halves."""

    def take(self, model: olmo.Olmo2ForCausalLM) -> None:
        chain, fault = [], self.fault
        for i, layer in enumerate(model.model.layers):
            halved = i == 2 and fault == "olmo_two_third_query_gain_left_in_halves"
            loose = i == 1 and fault == "olmo_two_second_attention_norm_adds_epsilon_to_the_root"
            still = i == 2 and fault == "olmo_two_third_gate_takes_its_sigmoid_for_a_constant"
            gains = layer.post_attention_layernorm.weight, layer.post_feedforward_layernorm.weight
            chain.append(Branch(Looking(layer.self_attn, halved), gains[0], loose))
            chain.append(Branch(Gated(layer.mlp, still), gains[1]))
        self.words, self.chain = leaf(model.model.embed_tokens.weight), nn.ModuleList(chain)
        self.level, self.say = Level(model.model.norm.weight), leaf(model.lm_head.weight)
        self.register_buffer("speed", model.model.rotary_emb.inv_freq.clone())

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        place = torch.arange(input_ids.shape[1], device=input_ids.device)
        seen = self.fault == "olmo_two_padding_seen_in_evaluation" and not self.training
        hidden = (attention_mask[:, None] < (0 if seen else 1)) | (place > place[:, None])
        x = F.embedding(input_ids.T, self.words, PAD)
        closed = hidden.to(x) * torch.finfo(x.dtype).min
        angle = torch.outer(place.to(x), self.speed)
        for branch in self.chain:
            x = branch(x, angle, closed)
        return F.linear(self.level(x), self.say).transpose(0, 1)


class StackedOlmo(Port):
    """Stacks of transposed weights by layer, [N, C, T], rotation matrices and a softmax by hand."""

    def take(self, model: olmo.Olmo2ForCausalLM) -> None:
        core, layers = model.model, model.model.layers
        looks = [x.self_attn for x in layers]
        self.look = pile(torch.cat([x.q_proj.weight, x.k_proj.weight, x.v_proj.weight]).T for x in looks)
        self.gather = pile(x.o_proj.weight.T for x in looks)
        self.rise = pile(torch.cat([x.mlp.up_proj.weight, x.mlp.gate_proj.weight]).T for x in layers)
        self.fall = pile(x.mlp.down_proj.weight.T for x in layers)
        ends = ((x.post_attention_layernorm.weight, x.post_feedforward_layernorm.weight) for x in layers)
        inner = ((x.q_norm.weight, x.k_norm.weight) for x in looks)
        self.gains = pile(torch.cat([*a, *b]) for a, b in zip(inner, ends, strict=True))
        self.last, self.ends = leaf(core.norm.weight), pile((core.embed_tokens.weight, model.lm_head.weight))
        speed = core.rotary_emb.inv_freq.clone()
        if self.fault == "olmo_two_rotary_base_of_the_first_olmo":
            speed = 10000.0 ** -(torch.arange(HEAD // 2) * 2 / HEAD).to(speed)
        self.register_buffer("speed", speed)

    def level(self, x: Tensor, gain: Tensor, still: bool = False) -> Tensor:
        root = (x.square().sum(1, keepdim=True) + x.shape[1] * EPS).sqrt()
        return x / (root.detach() if still else root) * (gain * x.shape[1] ** 0.5)[:, None]

    def turns(self, length: int) -> Tensor:
        """A rotation matrix for each place."""
        angle = torch.arange(length).to(self.speed)[:, None] * self.speed
        cos, sin = angle.cos().diag_embed(), angle.sin().diag_embed()
        return torch.cat([torch.cat([cos, -sin], 2), torch.cat([sin, cos], 2)], 1)

    def attend(self, i: int, x: Tensor, seen: Tensor) -> Tensor:
        q, k, v = torch.einsum("cd,nct->ndt", self.look[i], x).split([QUERY, KEY, KEY], 1)
        gain, turn = self.gains[i], self.turns(x.shape[2])
        q, k = self.level(q, gain[:QUERY]), self.level(k, gain[QUERY : QUERY + KEY])
        q, k = (torch.einsum("tij,nhjt->nhit", turn, y.unflatten(1, (-1, HEAD))) for y in (q, k))
        owner = torch.arange(HEADS) // GROUP
        if i == 0 and self.fault == "olmo_two_first_layer_deals_its_key_heads_in_turn":
            owner = torch.arange(HEADS) % KEY_HEADS
        k, v = k[:, owner], v.unflatten(1, (-1, HEAD))[:, owner]
        scores = (q.transpose(2, 3) @ k) / HEAD**0.5 + seen
        share = (scores - scores.detach().amax(3, keepdim=True)).exp()
        y = torch.einsum("nhqt,nhdt->nhdq", share / share.sum(3, keepdim=True), v).flatten(1, 2)
        return torch.einsum("dc,ndt->nct", self.gather[i], y)

    def spread(self, i: int, x: Tensor) -> Tensor:
        rise, gate = torch.einsum("cd,nct->ndt", self.rise[i], x).chunk(2, 1)
        return torch.einsum("dc,ndt->nct", self.fall[i], gate * rise / (1 + torch.exp(-gate)))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = F.embedding(input_ids, self.ends[0], PAD).transpose(1, 2)
        allowed = attention_mask.bool()[:, None].expand(-1, x.shape[2], -1).tril()
        seen = (allowed.to(x) - 1)[:, None] * torch.finfo(x.dtype).max
        for i in range(len(self.look)):
            after, later = self.gains[i, QUERY + KEY :].chunk(2)
            x = x + self.level(self.attend(i, x, seen), after)
            more, last = self.spread(i, x), i == len(self.look) - 1
            whole = last and self.fault == "olmo_two_last_layer_norms_the_sum_with_the_mlp"
            x = self.level(x + more, later) if whole else x + self.level(more, later)
        x = self.level(x, self.last, self.fault == "olmo_two_final_norm_takes_its_root_for_a_constant")
        return torch.einsum("vc,nct->ntv", self.ends[1], x)


SLOPES, NORM = ("input gradient", "weight gradient"), "model.layers.1.post_attention_layernorm"
right(task, "olmo_two_of_branches_time_first", "a tree, fused weights, turned pairs", OlmoOfBranches)
right(task, "olmo_two_of_stacked_weights", "packed stacks, rotation matrices, softmax by hand", StackedOlmo)
wrong(
    task,
    OlmoOfBranches,
    olmo_two_second_attention_norm_adds_epsilon_to_the_root=("epsilon outside", NORM),
    olmo_two_third_query_gain_left_in_halves=("a weight not permuted", "model.layers.2.self_attn.q_norm"),
    olmo_two_third_gate_takes_its_sigmoid_for_a_constant=("detach", "model.layers.2.mlp.act_fn", SLOPES),
    olmo_two_padding_seen_in_evaluation=("a mask left out in eval", "model", "eval"),
)
wrong(
    task,
    StackedOlmo,
    olmo_two_rotary_base_of_the_first_olmo=("another constant", "model.rotary_emb"),
    olmo_two_first_layer_deals_its_key_heads_in_turn=("another head order", "model.layers.0.self_attn"),
    olmo_two_last_layer_norms_the_sum_with_the_mlp=("a norm after the sum", "model.layers.3"),
    olmo_two_final_norm_takes_its_root_for_a_constant=("detached root", "model.norm", SLOPES),
)
