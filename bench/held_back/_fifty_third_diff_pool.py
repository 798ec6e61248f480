"""A small DiffPool: two levels of soft clusters over dense graphs with masks, by GraphSAGE convolutions."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GRAPHS, NODES, FEATURES, HIDDEN, EMBED, CLUSTERS = 5, 11, 7, 18, 20, (6, 4)
WIDTH, DENSE, CLASSES = 2 * HIDDEN + EMBED, 26, 3


def linear(inputs: int, outputs: int, bias: bool = True, gain: float = 1.0) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias)
    nn.init.normal_(layer.weight, std=gain / math.sqrt(inputs))
    if bias:
        nn.init.normal_(layer.bias, std=0.2)
    return layer


def batch_norm(width: int) -> nn.BatchNorm1d:
    norm = nn.BatchNorm1d(width)
    nn.init.normal_(norm.weight, 0.9, 0.15), nn.init.normal_(norm.bias, 0.05, 0.15)
    nn.init.normal_(norm.running_mean, 0.08, 0.02), nn.init.uniform_(norm.running_var, 0.01, 0.03)
    return norm


class DenseSAGEConv(nn.Module):
    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.lin_rel = linear(in_channels, out_channels, bias=False)
        self.lin_root = linear(in_channels, out_channels)

    def forward(self, x: Tensor, adj: Tensor, mask: Tensor | None = None) -> Tensor:
        out = torch.matmul(adj, x)
        out = out / adj.sum(dim=-1, keepdim=True).clamp(min=1)
        out = self.lin_rel(out) + self.lin_root(x)
        out = F.normalize(out, p=2, dim=-1)
        return out if mask is None else out * mask.unsqueeze(-1).to(x)


class SAGEConvolutions(nn.Module):
    """Three convolutions whose outputs are put together, and a linear layer for an assignment."""

    def __init__(self, in_channels: int, out_channels: int, lin: bool = False):
        super().__init__()
        self.conv1 = DenseSAGEConv(in_channels, HIDDEN)
        self.bn1 = batch_norm(HIDDEN)
        self.conv2 = DenseSAGEConv(HIDDEN, HIDDEN)
        self.bn2 = batch_norm(HIDDEN)
        self.conv3 = DenseSAGEConv(HIDDEN, out_channels)
        self.lin = linear(2 * HIDDEN + out_channels, out_channels, gain=1.5) if lin else None

    def bn(self, i: int, x: Tensor) -> Tensor:
        batch_size, num_nodes, num_channels = x.shape
        x = getattr(self, f"bn{i}")(x.reshape(-1, num_channels))
        return x.view(batch_size, num_nodes, num_channels)

    def forward(self, x: Tensor, adj: Tensor, mask: Tensor | None = None) -> Tensor:
        x1 = self.bn(1, F.relu(self.conv1(x, adj, mask)))
        x2 = self.bn(2, F.relu(self.conv2(x1, adj, mask)))
        x3 = self.conv3(x2, adj, mask)
        x = torch.cat([x1, x2, x3], dim=-1)
        return x if self.lin is None else self.lin(x)


def dense_diff_pool(x: Tensor, adj: Tensor, s: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    """The coarser features and adjacency, the link prediction loss and the entropy of the nodes."""
    s, nodes = torch.softmax(s, dim=-1), x.shape[0] * x.shape[1]
    if mask is not None:
        kept = mask.unsqueeze(-1).to(x)
        x, s, nodes = x * kept, s * kept, kept.sum()
    out = torch.matmul(s.transpose(1, 2), x)
    out_adj = torch.matmul(torch.matmul(s.transpose(1, 2), adj), s)
    link_loss = torch.norm(adj - torch.matmul(s, s.transpose(1, 2)), p=2) / adj.numel()
    ent_loss = (-s * torch.log(s + 1e-15)).sum() / nodes
    return out, out_adj, link_loss, ent_loss


class DiffPoolLayer(nn.Module):
    def __init__(self, in_channels: int, clusters: int):
        super().__init__()
        self.gnn_pool = SAGEConvolutions(in_channels, clusters, lin=True)
        self.gnn_embed = SAGEConvolutions(in_channels, EMBED)

    def forward(self, x: Tensor, adj: Tensor, mask: Tensor | None = None) -> tuple[Tensor, ...]:
        s = self.gnn_pool(x, adj, mask)
        x = self.gnn_embed(x, adj, mask)
        return dense_diff_pool(x, adj, s, mask)


class DiffPool(nn.Module):
    """Features, adjacency and mask -> class logits, the sum of link losses and that of entropies."""

    def __init__(self):
        super().__init__()
        widths = zip((FEATURES, WIDTH), CLUSTERS, strict=True)
        self.diffpool_layers = nn.ModuleList(DiffPoolLayer(*pair) for pair in widths)
        self.final_embed = SAGEConvolutions(WIDTH, EMBED)
        self.lin1 = linear(4 * WIDTH, DENSE)
        self.lin2 = linear(DENSE, CLASSES)

    def forward(self, x: Tensor, adj: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        x_all, l_total, e_total = [], 0, 0
        for i, layer in enumerate(self.diffpool_layers):
            x, adj, link, entropy = layer(x, adj, mask if i == 0 else None)
            l_total, e_total = l_total + link, e_total + entropy
            if i == 0:
                x_all += [x.mean(dim=1), x.max(dim=1)[0]]
        x = self.final_embed(x, adj)
        x_all += [x.mean(dim=1), x.max(dim=1)[0]]
        x = F.relu(self.lin1(torch.cat(x_all, dim=1)))
        return self.lin2(x), l_total, e_total


def communities() -> tuple[dict[str, Tensor], Tensor]:
    """Graphs of as many communities as their class says, padded, with weights on their edges."""
    label = torch.randint(CLASSES, (GRAPHS,))
    sizes = torch.randint(NODES - 4, NODES, (GRAPHS,))
    sizes[0] = NODES
    mask = torch.arange(NODES) < sizes[:, None]
    group = torch.arange(NODES) % (label[:, None] + 2)
    near = group[:, :, None] == group[:, None]
    drawn = torch.rand(GRAPHS, NODES, NODES) < torch.where(near, 0.6, 0.15)
    adj = (drawn * (0.2 + 0.8 * torch.rand(GRAPHS, NODES, NODES))).triu(1)
    adj = (adj + adj.mT) * (mask[:, :, None] & mask[:, None])
    x = torch.sin(group[..., None] + torch.arange(FEATURES)) + 0.4 * torch.randn(GRAPHS, NODES, FEATURES)
    return {"x": x * mask[..., None], "adj": adj, "mask": mask}, label


def weighted(outputs: tuple[Tensor, Tensor, Tensor], label: Tensor) -> Tensor:
    """Cross entropy, link losses and entropies, weighted, by four."""
    logits, link, entropy = outputs
    return (F.cross_entropy(logits, label) + 5 * link + 0.3 * entropy) / 4
