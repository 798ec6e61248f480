"""Two ports of a small VectorNet: a tree over rows of real vectors only, and one class of packed sheets."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fiftieth_vector_net import HEADS, MODES, NODE, STEPS, VectorNet, roads, total
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("fiftieth_vector_net", VectorNet, roads, total)


def twofold(mlp: nn.Module) -> nn.Sequential:
    return nn.Sequential(mlp.linear1, mlp.norm1, nn.ReLU(), mlp.linear2, mlp.norm2, nn.ReLU())


def pool(x: Tensor, line: Tensor, count: int, how: str = "amax") -> Tensor:
    zeros = x.new_zeros(count, x.shape[1])
    return zeros.scatter_reduce(0, line[:, None].expand_as(x), x, how, include_self=False)


class Exchange(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.ask, self.key, self.value = layer.q_lin, layer.k_lin, layer.v_lin
        self.near, self.away = leaf(layer.pos_mlp[0].weight.T), leaf(layer.pos_mlp[0].bias)
        self.pull, self.out, self.norm = leaf(layer.pos_mlp[2].weight), layer.out_lin, layer.norm

    def forward(self, x: Tensor, centre: Tensor, real: Tensor) -> Tensor:
        at = centre @ self.near
        apart = (at[:, :, None] - at[:, None] + self.away).relu()
        offset = torch.einsum("nijc,hc->nhij", apart, self.pull)
        offset = offset.masked_fill(real[:, None, None].logical_not(), -torch.inf)
        parts = (part(x).unflatten(2, (HEADS, -1)) for part in (self.ask, self.key, self.value))
        q, k, v = (part.transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=offset)
        return self.norm(self.out(mixed.transpose(1, 2).flatten(2)) + x)


class VectorNetOfRows(Port):
    def take(self, model: VectorNet) -> None:
        back, mean = model.backbone, self.fault == "vector_net_second_subgraph_layer_pools_a_mean"
        self.pools = ("amax", "mean" if mean else "amax", "amax")
        self.stages = nn.ModuleList(twofold(layer.mlp) for layer in back.subgraph.layer_seq)
        self.weight, self.offset = leaf(back.subgraph.linear.weight.T), leaf(back.subgraph.linear.bias)
        self.exchanges = nn.ModuleList(map(Exchange, back.global_graph.layers))
        self.complete, self.inner = back.aux_mlp, twofold(model.decoder.mlp)
        self.moves, self.logits = model.decoder.reg, model.decoder.cls

    def forward(self, vectors, kinds, mask, hidden, origin, heading, future) -> dict[str, Tensor]:
        scenes, polylines, _ = mask.shape
        turn, count = torch.polar(torch.ones_like(heading), heading), scenes * polylines
        line, start = mask.flatten(0, 1).nonzero()[:, 0], torch.complex(*origin.unbind(1))
        at, back = (each[line // polylines, None] for each in (start, turn.conj()))
        points = torch.view_as_complex(vectors[mask].unflatten(1, (2, 2)).contiguous())
        early = self.fault == "vector_net_vectors_turned_before_they_are_shifted"
        points = torch.view_as_real(points * back - at if early else (points - at) * back)
        x = torch.cat([points.flatten(1), kinds[mask]], 1)
        for stage, how in zip(self.stages, self.pools, strict=True):
            x = stage(x)
            x = torch.cat([x, pool(x, line, count, how)[line]], 1)
        nodes = F.normalize(pool(x @ self.weight + self.offset, line, count))
        corner = pool(points[:, 0], line, count, "amin")
        centre = pool(points.mean(1), line, count, "mean").unflatten(0, (scenes, -1))
        chosen = hidden + polylines * torch.arange(scenes, device=hidden.device)
        truth = nodes[chosen]
        if self.training:
            nodes = nodes.index_fill(0, chosen, 0)
        x = torch.cat([nodes, corner], 1).unflatten(0, (scenes, -1))
        for exchange in self.exchanges:
            x = exchange(x, centre, mask.any(2))
        agent = self.inner(x[:, 0])
        moves, logits = self.moves(agent).view(-1, MODES, STEPS, 2), self.logits(agent)
        sums = torch.einsum("nmtc,ts->nmsc", moves, moves.new_ones(STEPS, STEPS).triu())
        if self.fault == "vector_net_first_displacement_left_out_of_the_sums":
            sums = sums - moves[:, :, :1]
        paths = torch.view_as_complex(sums.contiguous()) * turn[:, None, None] + start[:, None, None]
        paths, chances = torch.view_as_real(paths), logits.log_softmax(1)
        ends = (paths[:, :, -1] - future[:, None, -1]).square().sum(2)
        best = F.one_hot(ends.argmin(1), MODES).to(chances)
        off = F.huber_loss(paths, future[:, None].expand_as(paths), reduction="none").mean((2, 3))
        loss = (best * (off - chances)).sum() / scenes
        if self.training:
            if self.fault == "vector_net_completion_truth_without_gradient":
                truth = truth.detach()
            loss = loss + (self.complete(x.flatten(0, 1)[chosen]) - truth).square().mean()
        return {"paths": paths, "scores": chances.exp(), "loss": loss}


def sheet(linear: nn.Linear, norm: nn.LayerNorm) -> Tensor:
    """A row for each output: its weights, its offset, and the norm's gain and shift."""
    return torch.cat([linear.weight, torch.stack([linear.bias, norm.weight, norm.bias], 1)], 1)


def pair(mlp: nn.Module) -> list[Tensor]:
    return [sheet(mlp.linear1, mlp.norm1), sheet(mlp.linear2, mlp.norm2)]


class SheetsOfVectorNet(Port):
    def take(self, model: VectorNet) -> None:
        back, decoder = model.backbone, model.decoder
        first, *more = (pair(layer.mlp) for layer in back.subgraph.layer_seq)
        aux, ends = back.aux_mlp, (back.subgraph.linear, back.aux_mlp[3])
        self.first = nn.ParameterList(map(leaf, first))
        self.deep = nn.ParameterList(map(pile, zip(*more, strict=True)))
        self.last, self.guess = nn.ParameterList(map(leaf, pair(decoder.mlp))), leaf(sheet(aux[0], aux[1]))
        self.ends = nn.ParameterList(leaf(torch.cat([x.weight, x.bias[:, None]], 1).T) for x in ends)
        heads = [torch.cat([x.weight, x.bias[:, None]], 1) for x in (decoder.reg, decoder.cls)]
        self.heads, layers = leaf(torch.cat(heads).T), back.global_graph.layers
        squares = ([y.weight.T for y in (x.q_lin, x.k_lin, x.v_lin, x.out_lin)] for x in layers)
        self.square = pile(map(torch.stack, squares))
        rows = ((x.q_lin.bias, x.v_lin.bias, x.out_lin.bias, x.norm.weight, x.norm.bias) for x in layers)
        self.rows = pile(map(torch.stack, rows))
        ways = ((x.pos_mlp[0].weight, x.pos_mlp[0].bias[:, None], x.pos_mlp[2].weight.T) for x in layers)
        self.place = pile(torch.cat(way, 1) for way in ways)

    def level(self, x: Tensor, gain: Tensor, shift: Tensor, eps: float = 1e-5) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * gain + shift

    def dense(self, x: Tensor, rows: Tensor, eps: float = 1e-5) -> Tensor:
        return self.level(x @ rows[:, :-3].T + rows[:, -3], rows[:, -2], rows[:, -1], eps)

    def twofold(self, x: Tensor, one: Tensor, two: Tensor, eps: float = 1e-5) -> Tensor:
        return self.dense(self.dense(x, one, eps).clamp(min=0), two).clamp(min=0)

    def forward(self, vectors, kinds, mask, hidden, origin, heading, future) -> dict[str, Tensor]:
        cos, sin, seen, real = heading.cos(), heading.sin(), mask[..., None], mask.any(2)
        turn = torch.stack([cos, -sin, sin, cos], 1).unflatten(1, (2, 2))
        points = vectors.unflatten(3, (2, 2)) - origin[:, None, None, None]
        points = torch.einsum("npvec,ncd->npved", points, turn)
        x = torch.cat([points.flatten(3), kinds], 3)
        loose = self.fault == "vector_net_third_subgraph_layer_first_norm_has_a_larger_epsilon"
        for i in range(3):
            sheets = [w[i - 1] for w in self.deep] if i else self.first
            x = self.twofold(x, *sheets, eps=1e-3 if loose and i == 2 else 1e-5)
            x = torch.cat([x, torch.where(seen, x, 0).amax(2, keepdim=True).expand_as(x)], 3)
        nodes = torch.where(seen, x @ self.ends[0][:-1] + self.ends[0][-1], -1e6).amax(2)
        nodes = nodes / nodes.norm(dim=2, keepdim=True) * real[..., None]
        picked = F.one_hot(hidden, mask.shape[1]).to(nodes)[..., None]
        truth = (nodes * picked).sum(1)
        if self.training or self.fault == "vector_net_polyline_hidden_in_evaluation_too":
            nodes = nodes * (1 - picked)
        corner = -torch.where(seen, -points[..., 0, :], -1e6).amax(2) * real[..., None]
        x = torch.cat([nodes, corner], 2)
        centre = (points.sum(3) * seen).sum(2) / (2 * seen.sum(2)).clamp(min=1)
        for i, (square, rows, place) in enumerate(zip(self.square, self.rows, self.place, strict=True)):
            q, k, v = x @ square[0] + rows[0], x @ square[1], x @ square[2] + rows[1]
            apart = centre[:, :, None] - centre[:, None]
            if self.fault == "vector_net_second_attention_takes_positions_from_the_other_end" and i == 1:
                apart = -apart
            pull = (apart @ place[:, :2].T + place[:, 2]).clamp(min=0) @ place[:, 3:]
            q, k, v = (y.unflatten(2, (HEADS, -1)) for y in (q, k, v))
            power = (torch.einsum("nihc,njhc->nijh", q, k) / q.shape[3] ** 0.5 + pull).exp() * real[
                :, None, :, None
            ]
            mixed = torch.einsum("nijh,njhc->nihc", power / power.sum(2, keepdim=True), v)
            x = self.level(x + mixed.flatten(2) @ square[3] + rows[2], rows[3], rows[4])
        out = self.twofold(x[:, 0], *self.last) @ self.heads[:-1] + self.heads[-1]
        moves, logits = out[:, :-MODES].unflatten(1, (MODES, STEPS, 2)), out[:, -MODES:]
        paths = (moves @ turn.mT[:, None]).cumsum(2) + origin[:, None, None]
        away = (paths - future[:, None]).detach().square().sum(3).sqrt()
        mean = self.fault == "vector_net_winner_by_the_mean_displacement"
        best = (away.mean(2) if mean else away[:, :, -1]).argmin(1)[:, None]
        far = (torch.take_along_dim(paths, best[..., None, None], 1)[:, 0] - future).abs()
        off = torch.where(far < 1, far.square() / 2, far - 0.5).mean()
        loss = off + (logits.logsumexp(1) - logits.gather(1, best)[:, 0]).mean()
        if self.training:
            guess = (
                self.dense((x * picked).sum(1), self.guess).clamp(min=0) @ self.ends[1][:-1]
                + self.ends[1][-1]
            )
            loss = loss + (guess - truth).square().sum() / (len(mask) * NODE)
        return {"paths": paths, "scores": logits.softmax(1), "loss": loss}


right(
    task, "vector_net_of_rows", "a tree, rows without padding, complex points, split weights", VectorNetOfRows
)
right(task, "vector_net_of_sheets", "packed stacks, loops, products of norms by hand", SheetsOfVectorNet)
SUB, GLOBAL = "backbone.subgraph.layer_seq.glp_", "backbone.global_graph.layers.glp_"
SLOPES = ("input gradient", "weight gradient")
wrong(
    task,
    VectorNetOfRows,
    vector_net_vectors_turned_before_they_are_shifted=("another order", ""),
    vector_net_second_subgraph_layer_pools_a_mean=("another pooling", SUB + "1"),
    vector_net_completion_truth_without_gradient=("detach", ("backbone", "criterion"), SLOPES),
    vector_net_first_displacement_left_out_of_the_sums=("a sum that starts late", "decoder"),
)
wrong(
    task,
    SheetsOfVectorNet,
    vector_net_third_subgraph_layer_first_norm_has_a_larger_epsilon=("epsilon", SUB + "2.mlp.norm1"),
    vector_net_second_attention_takes_positions_from_the_other_end=("another sign", GLOBAL + "1"),
    vector_net_polyline_hidden_in_evaluation_too=("masking in eval", "backbone", "eval"),
    vector_net_winner_by_the_mean_displacement=("another choice", "criterion"),
)
