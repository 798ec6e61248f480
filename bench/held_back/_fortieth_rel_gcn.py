"""A small R-GCN for link prediction: convolutions by bases and by blocks, and a ComplEx decoder."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GRAPHS, NODES, EDGES, EVERY = 3, 13, 31, 4
ENTITIES, RELATIONS, ATTRIBUTES, EMBEDDED = 97, 4, 7, 20
WIDTHS, BASES, BLOCKS = (24, 30, 22), (3, 5), 3


def drawn(*shape: int, std: float) -> nn.Parameter:
    return nn.Parameter(std * torch.randn(shape))


class MeanAggregation(nn.Module):
    """The mean of the rows of each index; zero where there is none."""

    def forward(self, x: Tensor, index: Tensor, dim_size: int) -> Tensor:
        count = x.new_zeros(dim_size).index_add(0, index, x.new_ones(len(index)))
        total = x.new_zeros(dim_size, x.shape[1]).index_add(0, index, x)
        return total / count.clamp(min=1)[:, None]


class RGCNConv(nn.Module):
    """A mean over the neighbours of each relation times its weight, the root's weight and a bias."""

    def __init__(self, in_channels: int, out_channels: int, num_relations: int, **parts: int):
        super().__init__()
        self.num_relations = num_relations
        self.num_bases, self.num_blocks = parts.get("num_bases"), parts.get("num_blocks")
        std = 0.7 / math.sqrt(in_channels)
        if self.num_bases is not None:
            self.weight = drawn(self.num_bases, in_channels, out_channels, std=std)
            self.comp = drawn(num_relations, self.num_bases, std=0.5)
        else:
            sides = in_channels // self.num_blocks, out_channels // self.num_blocks
            self.weight = drawn(num_relations, self.num_blocks, *sides, std=0.7 / math.sqrt(sides[0]))
        self.root, self.bias = drawn(in_channels, out_channels, std=std), drawn(out_channels, std=0.2)
        self.aggr_module = MeanAggregation()

    def propagate(self, edge_index: Tensor, x: Tensor) -> Tensor:
        return self.aggr_module(x[edge_index[0]], edge_index[1], len(x))

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        weight, out = self.weight, 0
        if self.num_bases is not None:
            weight = (self.comp @ weight.flatten(1)).unflatten(1, weight.shape[1:])
        for i in range(self.num_relations):
            h = self.propagate(edge_index[:, edge_type == i], x)
            if self.num_blocks is not None:
                h = h.view(len(x), self.num_blocks, -1)
                out = out + torch.einsum("abc,bcd->abd", h, weight[i]).flatten(1)
            else:
                out = out + h @ weight[i]
        return out + x @ self.root + self.bias


class RGCNEncoder(nn.Module):
    """Entities and their attributes -> latents; each edge is walked backwards too, as a type of its own."""

    def __init__(self):
        super().__init__()
        self.node_emb = nn.Embedding(ENTITIES, EMBEDDED)
        self.lin = nn.Linear(ATTRIBUTES, EMBEDDED)
        for values, std in ((self.node_emb.weight, 0.6), (self.lin.weight, 0.3), (self.lin.bias, 0.2)):
            nn.init.normal_(values, std=std)
        one, two, three = WIDTHS
        self.conv1 = RGCNConv(EMBEDDED, one, 2 * RELATIONS, num_bases=BASES[0])
        self.conv2 = RGCNConv(one, two, 2 * RELATIONS, num_blocks=BLOCKS)
        self.conv3 = RGCNConv(two, three, 2 * RELATIONS, num_bases=BASES[1])

    def forward(self, n_id: Tensor, attr: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        edge_index = torch.cat([edge_index, edge_index.flip(0)], 1)
        edge_type = torch.cat([edge_type, edge_type + RELATIONS])
        x = self.node_emb(n_id) + self.lin(attr)
        x = self.conv1(x, edge_index, edge_type).relu()
        x = self.conv2(x, edge_index, edge_type).relu()
        return self.conv3(x, edge_index, edge_type)


class ComplExDecoder(nn.Module):
    """The real part of <head, relation, conjugate of tail>; halves of the latents are real and imaginary."""

    def __init__(self, num_relations: int, hidden_channels: int):
        super().__init__()
        self.rel_emb = drawn(num_relations, hidden_channels, std=0.4)
        self.rel_emb_im = drawn(num_relations, hidden_channels, std=0.4)

    def forward(self, z: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        head_re, head_im = z[edge_index[0]].chunk(2, -1)
        tail_re, tail_im = z[edge_index[1]].chunk(2, -1)
        rel_re, rel_im = self.rel_emb[edge_type], self.rel_emb_im[edge_type]
        out = head_re * rel_re * tail_re + head_im * rel_re * tail_im
        return (out + head_re * rel_im * tail_im - head_im * rel_im * tail_re).sum(-1)


class GAE(nn.Module):
    """Graphs with padded edges, and triplets -> latents, a score of each triplet, and the penalty."""

    def __init__(self):
        super().__init__()
        self.encoder = RGCNEncoder()
        self.decoder = ComplExDecoder(RELATIONS, WIDTHS[-1] // 2)

    def forward(
        self,
        n_id: Tensor,
        attr: Tensor,
        edge_index: Tensor,
        edge_type: Tensor,
        edge_mask: Tensor,
        triplets: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        graphs, nodes = n_id.shape
        first = nodes * torch.arange(graphs, device=n_id.device)[:, None]
        edges = (edge_index + first[:, None]).transpose(0, 1)[:, edge_mask]
        z = self.encoder(n_id.flatten(), attr.flatten(0, 1), edges, edge_type[edge_mask])
        head, kind, tail = triplets.unbind(1)
        ends = torch.stack([(head + first).flatten(), (tail + first).flatten()])
        scores = self.decoder(z, ends, kind.flatten())
        relations = self.decoder.rel_emb.pow(2).mean() + self.decoder.rel_emb_im.pow(2).mean()
        return z.unflatten(0, (graphs, nodes)), scores.view(graphs, -1), z.pow(2).mean() + relations


def facts() -> tuple[dict[str, Tensor], Tensor]:
    """Graphs whose relations tell how far apart the kinds of their entities are; true and false triplets."""
    n_id = torch.stack([torch.randperm(ENTITIES)[:NODES] for _ in range(GRAPHS)])
    sort = n_id % RELATIONS
    angle = 2 * math.pi * sort[..., None] / RELATIONS
    attr = torch.cos(angle + torch.arange(ATTRIBUTES)) + 0.3 * torch.randn(GRAPHS, NODES, ATTRIBUTES)
    edge_index = torch.randint(NODES, (GRAPHS, 2, EDGES))
    head, tail = edge_index.unbind(1)
    edge_type = (sort.gather(1, tail) - sort.gather(1, head)) % RELATIONS
    edge_mask = torch.arange(EDGES) < torch.randint(2 * EDGES // 3, EDGES + 1, (GRAPHS, 1))
    edge_index, edge_type = edge_index * edge_mask[:, None], edge_type * edge_mask
    true = torch.stack([edge_index[:, 0], edge_type, edge_index[:, 1]], 1)[..., ::EVERY]
    false = torch.cat([true[:, :2], torch.randint(NODES, true[:, :1].shape)], 1)
    known = edge_mask[:, ::EVERY].repeat(1, 2)
    label = torch.cat([torch.ones_like(true[:, 0]), torch.zeros_like(true[:, 0])], 1)
    names = "n_id", "attr", "edge_index", "edge_type", "edge_mask", "triplets"
    values = n_id, attr, edge_index, edge_type, edge_mask, torch.cat([true, false], 2)
    return dict(zip(names, values, strict=True)), label.where(known, -1).float()


def link_loss(outputs: tuple[Tensor, Tensor, Tensor], label: Tensor) -> Tensor:
    """Cross entropy of the triplets that are no padding and a tenth of the penalty, by two."""
    known = label >= 0
    return (F.binary_cross_entropy_with_logits(outputs[1][known], label[known]) + 0.1 * outputs[2]) / 2
