"""Two ports of a small Reformer: a tree of reversible halves, and flat code without any sorting or chunks."""

import math
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _thirty_seventh_reformer as small
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

H, D, L, R = small.HEADS, small.HEAD_SIZE, small.LENGTH, small.HASHES
task = few("thirty_seventh_reformer", small.ReformerModelWithLMHead, small.refrains, small.next_word)


class Attend(nn.Module):
    """Norm, one fused projection to [N, heads, L, 7] each, windows, and the way back."""

    def __init__(self, part: nn.Module):
        super().__init__()
        self.norm, inner = deepcopy(part.layer_norm), part.self_attention
        self.project = leaf(torch.cat([layer.weight for layer in inner.children()]).T)
        self.back, self.side, self.still = leaf(part.output.dense.weight.T), 1, False

    def window(self, x: Tensor) -> Tensor:
        return torch.cat([x.roll(self.side, -3), x], -2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = (self.norm(x) @ self.project).unflatten(-1, (-1, H, D)).permute(2, 0, 3, 1, 4)
        return self.mix(x, mask).transpose(1, 2).flatten(2) @ self.back


class Near(Attend):
    def mix(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = x.unflatten(-2, (-1, small.LOCAL_CHUNK))
        place = torch.arange(L, device=x.device).view(-1, small.LOCAL_CHUNK, 1)
        ok = self.window(mask.view(len(mask), 1, -1, small.LOCAL_CHUNK, 1)).mT
        ok = ok & (self.window(place).mT <= place)
        score = torch.where(ok, (q @ self.window(k).mT) * D**-0.5, small.MASKED)
        return (score.softmax(-1) @ self.window(v)).flatten(2, 3)


class Hashed(Attend):
    def __init__(self, part: nn.Module):
        super().__init__(part)
        turn = part.self_attention.rotations.permute(2, 0, 1, 3)
        self.register_buffer("turn", torch.cat([turn, -turn], -1))

    def mix(self, x: Tensor, mask: Tensor) -> Tensor:
        both, v = x
        bucket = [(both.detach() @ turn).argmax(-1) for turn in self.turn]
        bucket = [b.masked_fill(~mask[:, None], small.BUCKETS) for b in bucket]
        bucket = torch.cat([b + i * (small.BUCKETS + 1) for i, b in enumerate(bucket)], -1)
        back = (order := bucket.sort(dim=-1, stable=True).indices).argsort(-1)
        place = (order % L)[..., None]
        q, v, ok = (t.take_along_dim(place, 2) for t in (both, v, mask[:, None, :, None]))
        q, v, ok, place = (t.unflatten(2, (-1, small.LSH_CHUNK)) for t in (q, v, ok, place))
        k = self.window(q / (q.square().sum(-1, keepdim=True) + D * 1e-6).sqrt())
        other = self.window(place).mT
        score = torch.where(self.window(ok).mT & (other <= place), q @ k.mT, small.MASKED)
        score = torch.where(other == place, small.SELF_MASKED, score)
        out, weight = score.softmax(-1) @ self.window(v), score.logsumexp(-1, keepdim=True)
        out, weight = (t.flatten(2, 3).take_along_dim(back[..., None], 2) for t in (out, weight))
        out, weight = out.unflatten(2, (R, -1)), weight.unflatten(2, (R, -1)).softmax(2)
        return ((weight.detach() if self.still else weight) * out).sum(2)


def forward_of(part: nn.Module) -> nn.Sequential:
    norm, wide, slim = map(deepcopy, (part.layer_norm, part.dense.dense, part.output.dense))
    return nn.Sequential(norm, wide, nn.GELU(), slim)


class ReformerOfHalves(Port):
    """Two streams that take turns in halves: one adds to the other what it gives, whatever it is."""

    def take(self, model: small.ReformerModelWithLMHead) -> None:
        layers, fault = model.encoder.layers, self.fault
        self.words = leaf(model.embeddings.word_embeddings.weight)
        self.slow, self.fast = (leaf(x.squeeze()) for x in model.embeddings.position_embeddings.weights)
        self.attends = nn.ModuleList((Near, Hashed)[i % 2](x.attention) for i, x in enumerate(layers))
        self.feeds = nn.ModuleList(forward_of(x.feed_forward) for x in layers)
        self.end, self.out = deepcopy(model.encoder.layer_norm), deepcopy(model.lm_head)
        if fault == "reformer_second_layer_chunks_look_at_the_next":
            self.attends[1].side = -1
        self.attends[3].still = fault == "reformer_last_layer_weights_its_rounds_without_gradient"

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        grid = torch.cartesian_prod(*(torch.arange(n, device=input_ids.device) for n in small.AXES))
        if self.fault == "reformer_axial_table_read_down_its_columns":
            grid = grid.unflatten(0, small.AXES).transpose(0, 1).flatten(0, 1)
        one = two = self.words[input_ids] + torch.cat([self.slow[grid[:, 0]], self.fast[grid[:, 1]]], 1)
        for i, (attend, feed) in enumerate(zip(self.attends, self.feeds, strict=True)):
            one = one + attend(two, attention_mask)
            own = self.fault == "reformer_third_layer_feeds_forward_its_own_stream" and i == 2
            two = two + feed(two if own else one)
        return self.out(self.end(torch.cat([one, two], -1)))


def sheet(layer: nn.Linear) -> Tensor:
    return torch.cat([layer.weight, layer.bias[:, None]], 1)


class FlatReformer(Port):
    """Attention over all pairs: ranks among the tickets tell which chunk each token of each round is in."""

    def take(self, model: small.ReformerModelWithLMHead) -> None:
        layers, place = model.encoder.layers, model.embeddings.position_embeddings.weights
        norms = [norm for x in layers for norm in (x.attention.layer_norm, x.feed_forward.layer_norm)]
        inner = [[c.weight for c in x.attention.self_attention.children()] for x in layers]
        self.norms = pile(torch.stack([norm.weight, norm.bias]) for norm in norms)
        self.near, self.hashed = (pile(map(torch.stack, inner[i::2])) for i in (0, 1))
        self.back = pile(x.attention.output.dense.weight for x in layers)
        self.up = pile(sheet(x.feed_forward.dense.dense) for x in layers)
        self.down = pile(sheet(x.feed_forward.output.dense) for x in layers)
        self.words, self.rows, self.columns = map(leaf, (model.embeddings.word_embeddings.weight, *place))
        self.end, self.head = pile(model.encoder.layer_norm.parameters()), leaf(sheet(model.lm_head))
        turns = [x.attention.self_attention.rotations for x in layers[1::2]]
        self.register_buffer("turns", torch.stack(turns))

    def affine(self, x: Tensor, rows: Tensor) -> Tensor:
        return torch.einsum("nld,od->nlo", x, rows[:, :-1]) + rows[:, -1]

    def norm(self, x: Tensor, rows: Tensor) -> Tensor:
        spread, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
        return torch.addcmul(rows[1], (x - mean) * (spread + 1e-12).rsqrt(), rows[0])

    def local(self, i: int, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = torch.einsum("nld,xod->xnlo", x, self.near[i]).unflatten(-1, (H, D))
        coarse = self.fault == "reformer_first_layer_scales_by_the_width_over_the_heads" and i == 0
        size = x.shape[-1] // H if coarse else D
        place = torch.arange(L, device=x.device)
        away = place[:, None] // small.LOCAL_CHUNK - place // small.LOCAL_CHUNK
        score = torch.einsum("nqhd,nkhd->nhqk", q / math.sqrt(size), k)
        score = score.masked_fill(~((place <= place[:, None]) & mask[:, None, None]), small.MASKED)
        score = score.masked_fill((away % (L // small.LOCAL_CHUNK)) > 1, -math.inf)
        return torch.einsum("nhqk,nkhd->nqhd", score.softmax(-1), v)

    def lsh(self, i: int, x: Tensor, mask: Tensor) -> Tensor:
        both, v = torch.einsum("nld,xod->xnlo", x, self.hashed[i]).unflatten(-1, (H, D))
        place = torch.arange(L, device=x.device)
        turned = torch.einsum("nlhd,hdrb->nhrlb", both.detach(), self.turns[i])
        bucket = torch.cat([turned, -turned], -1).argmax(-1).masked_fill(~mask[:, None, None], small.BUCKETS)
        ticket = bucket * L + place
        rank = (ticket[..., None] > ticket[..., None, :]).sum(-1)
        chunk = (rank + L * torch.arange(R, device=x.device)[:, None]) // small.LSH_CHUNK
        away = chunk[:, :, :, :, None, None] - chunk[:, :, None, None]
        k = both * (both.pow(2).sum(-1, True) + D * 1e-6).rsqrt()
        score = torch.einsum("nqhd,nkhd->nhqk", both, k)
        score = score.masked_fill(~((place <= place[:, None]) & mask[:, None, None]), small.MASKED)
        score = score.masked_fill(place == place[:, None], small.SELF_MASKED)[:, :, None, :, None]
        score = score.masked_fill(away % (R * L // small.LSH_CHUNK) > 1, -math.inf).flatten(4)
        total = score.logsumexp(-1)
        if self.fault == "reformer_second_layer_has_one_round_in_evaluation" and i == 0 and not self.training:
            score, total = score[:, :, :1], total[:, :, :1]
        share = (score.softmax(-1) * total.softmax(2)[..., None]).unflatten(-1, (R, L))
        return torch.einsum("nhrqsk,nkhd->nqhd", share, v)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        down, across = small.AXES
        table = torch.cat([self.rows.expand(-1, across, -1), self.columns.expand(down, -1, -1)], -1)
        one = two = F.embedding(input_ids, self.words) + table.flatten(0, 1)
        for i in range(len(self.back)):
            mix = self.lsh if i % 2 else self.local
            mixed = mix(i // 2, self.norm(two, self.norms[2 * i]), attention_mask)
            one = one + mixed.flatten(2) @ self.back[i].T
            inner = self.affine(self.norm(one, self.norms[2 * i + 1]), self.up[i])
            rough = self.fault == "reformer_third_layer_takes_gelu_by_a_sigmoid" and i == 2
            two = two + self.affine(
                inner * (1.702 * inner).sigmoid() if rough else F.gelu(inner), self.down[i]
            )
        if self.fault == "reformer_final_norm_of_each_stream_apart":
            last = [self.norm(x, w) for x, w in zip((one, two), self.end.chunk(2, 1), strict=True)]
            return self.affine(torch.cat(last, -1), self.head)
        return self.affine(self.norm(torch.cat([one, two], -1), self.end), self.head)


SLOPES = ("input gradient", "weight gradient")
LOCAL, LSH, _, LAST = (f"encoder.layers.{i}.attention.self_attention" for i in range(4))
ACT = "encoder.layers.2.feed_forward.dense.act_fn"
right(task, "reformer_of_reversible_halves", "a tree, fused projections, rolled windows", ReformerOfHalves)
right(task, "reformer_of_all_pairs", "flat, stacked weights, ranks for a sort, dense masks", FlatReformer)
wrong(
    task,
    ReformerOfHalves,
    reformer_axial_table_read_down_its_columns=("another order of axes", "embeddings.position_embeddings"),
    reformer_second_layer_chunks_look_at_the_next=("a shift the other way", LSH),
    reformer_third_layer_feeds_forward_its_own_stream=("the other input", "encoder.layers.2"),
    reformer_last_layer_weights_its_rounds_without_gradient=("detach", LAST, SLOPES),
)
wrong(
    task,
    FlatReformer,
    reformer_first_layer_scales_by_the_width_over_the_heads=("another scale", LOCAL),
    reformer_second_layer_has_one_round_in_evaluation=("fewer rounds in eval", LSH, "eval"),
    reformer_third_layer_takes_gelu_by_a_sigmoid=("an approximation", ACT),
    reformer_final_norm_of_each_stream_apart=("a norm by halves", "encoder.layer_norm"),
)
