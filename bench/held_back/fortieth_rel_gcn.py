"""Two ports of a small R-GCN: hops over dense adjacencies, and one class that sums edge by edge."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fortieth_rel_gcn import ATTRIBUTES, ENTITIES, GAE, RELATIONS, facts, link_loss
from bench.held_back._fourth_ports import Port, leaf, wrong
from bench.held_back._sixth_ports import few

task = few("fortieth_rel_gcn", GAE, facts, link_loss)


class Stem(nn.Module):
    """An affine map of the attributes, and a row for each entity."""

    def __init__(self, encoder: nn.Module):
        super().__init__()
        self.rows, self.shift = leaf(encoder.node_emb.weight), leaf(encoder.lin.bias)
        self.mix = leaf(encoder.lin.weight.T)

    def forward(self, which: Tensor, attr: Tensor) -> Tensor:
        return attr @ self.mix + self.shift + self.rows[which]


class Links(nn.Module):
    """Edges -> how many there are [N, R, to, from], those of the inverse relations behind the others."""

    same_type = False

    def forward(self, like: Tensor, edges: Tensor, kind: Tensor, there: Tensor) -> Tensor:
        n, size = like.shape[:2]
        flat = (kind * size + edges[:, 1]) * size + edges[:, 0]
        counts = like.new_zeros(n, RELATIONS * size * size).scatter_add(1, flat, there.to(like))
        ahead = counts.view(n, RELATIONS, size, size)
        back = ahead.mT
        if self.same_type:
            ahead, back = ahead + back, torch.zeros_like(back)
        return torch.cat([ahead, back], 1)


class Hop(nn.Module):
    """What a node says of itself, and what its neighbours say, of which each link has a share."""

    def __init__(self, conv: nn.Module):
        super().__init__()
        self.own = nn.Linear(*conv.root.shape)
        self.own.weight, self.own.bias = leaf(conv.root.T), leaf(conv.bias)
        self.by_sender = False

    def forward(self, x: Tensor, links: Tensor) -> Tensor:
        share = links / links.sum(2 if self.by_sender else 3, keepdim=True).clamp(min=1)
        return self.own(x) + self.heard(x, share)


class BasisHop(Hop):
    """Mixes the adjacencies, not the weights: one for each basis."""

    def __init__(self, conv: nn.Module):
        super().__init__(conv)
        self.bases, self.blend = leaf(conv.weight.permute(1, 0, 2)), leaf(conv.comp.T)
        self.fixed = False

    def heard(self, x: Tensor, share: Tensor) -> Tensor:
        blend = self.blend.detach() if self.fixed else self.blend
        mixed = torch.einsum("kr,nrij->nikj", blend, share).flatten(2)
        said = torch.einsum("njc,ckd->nkjd", x, self.bases).flatten(1, 2)
        return mixed @ said


class BlockHop(Hop):
    """A grouped product of every node for all relations at once, before the mean."""

    def __init__(self, conv: nn.Module):
        super().__init__(conv)
        self.groups = conv.num_blocks
        self.squares = nn.ParameterList(leaf(conv.weight[:, i]) for i in range(self.groups))
        self.strided = False

    def heard(self, x: Tensor, share: Tensor) -> Tensor:
        pieces = x.chunk(self.groups, -1)
        if self.strided:
            pieces = [x[..., i :: self.groups] for i in range(self.groups)]
        said = [piece[:, None] @ square for piece, square in zip(pieces, self.squares, strict=True)]
        return (share @ torch.cat(said, -1)).sum(1)


class Judge(nn.Module):
    """A turn and a stretch of the head by the relation, and its product with the tail."""

    def __init__(self, decoder: nn.Module):
        super().__init__()
        self.table = leaf(torch.cat([decoder.rel_emb, decoder.rel_emb_im], 1))

    def forward(self, z: Tensor, triplets: Tensor) -> tuple[Tensor, Tensor]:
        head, tail = (z.take_along_dim(triplets[:, i, :, None], 1) for i in (0, 2))
        (a, b), (c, d) = head.chunk(2, -1), self.table[triplets[:, 1]].chunk(2, -1)
        turned = torch.cat([a * c - b * d, a * d + b * c], -1)
        return torch.einsum("ntc,ntc->nt", turned, tail), 2 * self.table.square().mean()


class HopsOverAdjacencies(Port):
    """Dense counts by relation; each hop takes the means as products of matrices."""

    def take(self, model: GAE) -> None:
        net, fault = model.encoder, self.fault
        self.stem, self.links, self.judge = Stem(net), Links(), Judge(model.decoder)
        self.hops = nn.ModuleList([BasisHop(net.conv1), BlockHop(net.conv2), BasisHop(net.conv3)])
        self.links.same_type = fault == "rel_gcn_inverse_edges_keep_the_type_of_their_edge"
        self.hops[0].by_sender = fault == "rel_gcn_first_layer_divides_by_out_degree"
        self.hops[1].strided = fault == "rel_gcn_second_layer_blocks_take_every_third_channel"
        self.hops[2].fixed = fault == "rel_gcn_third_layer_coefficients_detached"

    def forward(self, n_id, attr, edge_index, edge_type, edge_mask, triplets) -> tuple[Tensor, ...]:
        links = self.links(attr, edge_index, edge_type, edge_mask)
        z = self.hops[0](self.stem(n_id, attr), links)
        for hop in self.hops[1:]:
            z = hop(F.relu(z), links)
        scores, size = self.judge(z, triplets)
        return z, scores, z.square().mean() + size


class EdgeByEdge(Port):
    """Packed weights; a matrix for each relation, gathered for each edge, padded edges weigh nothing."""

    def take(self, model: GAE) -> None:
        net, ends = model.encoder, model.decoder
        self.front = leaf(torch.cat([net.node_emb.weight, net.lin.weight.T, net.lin.bias[None]]))
        convs = net.conv1, net.conv2, net.conv3
        self.own = nn.ParameterList(leaf(torch.cat([x.root, x.bias[None]])) for x in convs)
        self.kernels = nn.ParameterList(leaf(x.weight) for x in convs)
        self.mix_1, self.mix_3 = leaf(net.conv1.comp), leaf(net.conv3.comp)
        self.ends = leaf(torch.stack([ends.rel_emb, ends.rel_emb_im], -1))

    def matrices(self, i: int) -> Tensor:
        kernel = self.kernels[i]
        if i != 1:
            return torch.tensordot(self.mix_1 if i == 0 else self.mix_3, kernel, 1)
        return torch.stack([torch.block_diag(*each) for each in kernel])

    def layer(self, i: int, x: Tensor, edges: tuple[Tensor, ...]) -> Tensor:
        start, end, kind, weight = edges
        place = end * 2 * RELATIONS + kind
        count = weight.new_zeros(len(x) * 2 * RELATIONS).index_add(0, place, weight)[place].clamp(min=1)
        if self.fault == "rel_gcn_third_layer_mean_has_an_epsilon_below" and i == 2:
            count = count + 1e-3
        said = torch.einsum("ec,ecd->ed", x[start] * (weight / count)[:, None], self.matrices(i)[kind])
        own = self.own[i]
        return (own[-1] + x @ own[:-1]).index_add(0, end, said)

    def forward(self, n_id, attr, edge_index, edge_type, edge_mask, triplets) -> tuple[Tensor, ...]:
        n, size = n_id.shape
        first = size * torch.arange(n, device=n_id.device)[:, None]
        (start, end), kind = ((edge_index[:, i] + first).flatten() for i in (0, 1)), edge_type.flatten()
        there = back = edge_mask.flatten().to(attr)
        if self.fault == "rel_gcn_inverse_edges_only_in_training" and not self.training:
            back = torch.zeros_like(back)
        pairs = (start, end), (end, start), (kind, kind + RELATIONS), (there, back)
        edges = tuple(map(torch.cat, pairs))
        rows, mix, shift = self.front.split([ENTITIES, ATTRIBUTES, 1])
        z = rows[n_id.flatten()] + attr.flatten(0, 1) @ mix + shift
        for i in range(3):
            z = self.layer(i, z if i == 0 else z.clamp(min=0), edges)
        z = z.view(n, size, -1)
        values = torch.stack(z.chunk(2, -1), -1)
        rows = torch.arange(n, device=n_id.device)[:, None]
        (a, b), (c, d) = (values[rows, triplets[:, i]].unbind(-1) for i in (0, 2))
        if self.fault == "rel_gcn_tail_is_not_conjugated":
            d = -d
        # by the relation: its real part meets ac + bd, its imaginary part ad - bc
        meets = torch.stack([a * c + b * d, a * d - b * c], -1)
        scores = (self.ends[triplets[:, 1]] * meets).sum((-2, -1))
        known = z.detach() if self.fault == "rel_gcn_penalty_of_latents_detached" else z
        return z, scores, known.pow(2).mean() + self.ends.pow(2).mean((0, 1)).sum()


SLOPES = ("input gradient", "weight gradient")
THIRD = ("encoder.conv3.aggr_module", "encoder.conv3")
right(task, "rel_gcn_of_hops_over_adjacencies", "a tree, dense adjacencies, mixed first", HopsOverAdjacencies)
right(task, "rel_gcn_edge_by_edge", "packed weights, a matrix for each edge, weighted sums", EdgeByEdge)
wrong(
    task,
    HopsOverAdjacencies,
    rel_gcn_inverse_edges_keep_the_type_of_their_edge=("inverse types left out", "encoder"),
    rel_gcn_first_layer_divides_by_out_degree=(
        "another axis of a mean",
        ("encoder.conv1.aggr_module", "encoder.conv1"),
    ),
    rel_gcn_second_layer_blocks_take_every_third_channel=("another channel order", "encoder.conv2"),
    rel_gcn_third_layer_coefficients_detached=("detach", "encoder.conv3", "weight gradient"),
)
wrong(
    task,
    EdgeByEdge,
    rel_gcn_inverse_edges_only_in_training=("edges left out in eval", "encoder", "eval"),
    rel_gcn_third_layer_mean_has_an_epsilon_below=("an epsilon added", THIRD),
    rel_gcn_tail_is_not_conjugated=("a conjugate left out", "decoder"),
    rel_gcn_penalty_of_latents_detached=("detached penalty", "", SLOPES),
)
