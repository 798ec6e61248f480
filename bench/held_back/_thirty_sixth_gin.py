"""A small graph isomorphism network with bonds and a virtual node, as that of OGB, for sets of molecules."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ATOMS, BONDS = (13, 4, 7, 5), (5, 6, 2)
WIDTH, LAYERS, TASKS = 22, 3, 8
SETS, MOLECULES, MOST_ATOMS, MOST_BONDS = 4, 3, 11, 24


def global_add_pool(x: Tensor, batch: Tensor, size: int) -> Tensor:
    return x.new_zeros(size, x.shape[1]).index_add(0, batch, x)


def softmax(src: Tensor, index: Tensor, size: int) -> Tensor:
    """The softmax among the rows of one index."""
    top = src.new_full((size, 1), -torch.inf).scatter_reduce(0, index[:, None], src.detach(), "amax")
    out = (src - top[index]).exp()
    return out / global_add_pool(out, index, size)[index]


class AtomEncoder(nn.Module):
    def __init__(self, emb_dim: int):
        super().__init__()
        self.atom_embedding_list = nn.ModuleList(nn.Embedding(dim, emb_dim) for dim in ATOMS)

    def forward(self, x: Tensor) -> Tensor:
        x_embedding = 0
        for i in range(x.shape[1]):
            x_embedding = x_embedding + self.atom_embedding_list[i](x[:, i])
        return x_embedding


class BondEncoder(nn.Module):
    def __init__(self, emb_dim: int):
        super().__init__()
        self.bond_embedding_list = nn.ModuleList(nn.Embedding(dim, emb_dim) for dim in BONDS)

    def forward(self, edge_attr: Tensor) -> Tensor:
        bond_embedding = 0
        for i in range(edge_attr.shape[1]):
            bond_embedding = bond_embedding + self.bond_embedding_list[i](edge_attr[:, i])
        return bond_embedding


class GINConv(nn.Module):
    def __init__(self, emb_dim: int):
        super().__init__()
        first, second = nn.Linear(emb_dim, 2 * emb_dim), nn.Linear(2 * emb_dim, emb_dim)
        self.mlp = nn.Sequential(first, nn.BatchNorm1d(2 * emb_dim), nn.ReLU(), second)
        self.eps = nn.Parameter(0.3 * torch.randn(1))
        self.bond_encoder = BondEncoder(emb_dim)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        edge_embedding = self.bond_encoder(edge_attr)
        return self.mlp((1 + self.eps) * x + self.propagate(edge_index, x, edge_embedding))

    def propagate(self, edge_index: Tensor, x: Tensor, edge_attr: Tensor) -> Tensor:
        message = F.relu(x[edge_index[0]] + edge_attr)
        return torch.zeros_like(x).index_add(0, edge_index[1], message)


class GNNNodeVirtualnode(nn.Module):
    """Atoms of all molecules -> the sum of what each layer was given, and of what the last one gives."""

    def __init__(self, num_layer: int, emb_dim: int):
        super().__init__()
        self.num_layer = num_layer
        self.atom_encoder = AtomEncoder(emb_dim)
        self.virtualnode_embedding = nn.Embedding(1, emb_dim)
        self.convs = nn.ModuleList(GINConv(emb_dim) for _ in range(num_layer))
        self.batch_norms = nn.ModuleList(nn.BatchNorm1d(emb_dim) for _ in range(num_layer))
        self.mlp_virtualnode_list = nn.ModuleList()
        for _ in range(num_layer - 1):
            first, second = nn.Linear(emb_dim, 2 * emb_dim), nn.Linear(2 * emb_dim, emb_dim)
            inner, outer = nn.BatchNorm1d(2 * emb_dim), nn.BatchNorm1d(emb_dim)
            self.mlp_virtualnode_list.append(nn.Sequential(first, inner, nn.ReLU(), second, outer, nn.ReLU()))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor, size: int) -> Tensor:
        virtualnode_embedding = self.virtualnode_embedding(batch.new_zeros(size))
        h_list = [self.atom_encoder(x)]
        for layer in range(self.num_layer):
            h_list[layer] = h_list[layer] + virtualnode_embedding[batch]
            h = self.batch_norms[layer](self.convs[layer](h_list[layer], edge_index, edge_attr))
            if layer < self.num_layer - 1:
                h = F.relu(h)
            h_list.append(h + h_list[layer])
            if layer < self.num_layer - 1:
                temp = global_add_pool(h_list[layer], batch, size) + virtualnode_embedding
                virtualnode_embedding = virtualnode_embedding + self.mlp_virtualnode_list[layer](temp)
        return sum(h_list)


class GlobalAttention(nn.Module):
    def __init__(self, gate_nn: nn.Module):
        super().__init__()
        self.gate_nn = gate_nn

    def forward(self, x: Tensor, batch: Tensor, size: int) -> Tensor:
        gate = softmax(self.gate_nn(x), batch, size)
        return global_add_pool(gate * x, batch, size)


class GNN(nn.Module):
    """Sets of molecules, padded by -1 -> logits of the tasks for each molecule."""

    def __init__(self):
        super().__init__()
        self.gnn_node = GNNNodeVirtualnode(LAYERS, WIDTH)
        first, second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, 1)
        self.pool = GlobalAttention(nn.Sequential(first, nn.BatchNorm1d(2 * WIDTH), nn.ReLU(), second))
        self.graph_pred_linear = nn.Linear(WIDTH, TASKS)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                nn.init.normal_(module.weight, 1, 0.2), nn.init.normal_(module.bias, 0, 0.2)
                nn.init.normal_(module.running_mean, 0, 0.3), nn.init.uniform_(module.running_var, 0.5, 2)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, 0, 0.4)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        shape = x.shape[:2]
        x, edge_index, edge_attr = (each.flatten(0, 1) for each in (x, edge_index, edge_attr))
        atom, bond, size = x[:, :, 0] >= 0, edge_index[:, 0] >= 0, len(x)
        counts = atom.sum(1)
        batch = torch.arange(size, device=x.device).repeat_interleave(counts)
        edge_index = (edge_index + (counts.cumsum(0) - counts)[:, None, None]).movedim(1, 0)[:, bond]
        h_node = self.gnn_node(x[atom], edge_index, edge_attr[bond], batch, size)
        h_graph = self.pool(h_node, batch, size)
        return self.graph_pred_linear(h_graph).unflatten(0, shape)


def molecule() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A tree of atoms with one ring or none; bonds run both ways."""
    count = int(torch.randint(5, MOST_ATOMS + 1, ()))
    pairs = [(i, int(torch.randint(max(0, i - 3), i, ()))) for i in range(1, count)]
    ring = (count - 1, 0)
    pairs += [ring] if ring not in pairs and torch.rand(()) < 0.6 else []
    atoms = torch.stack([torch.randint(dim, (count,)) for dim in ATOMS], 1)
    kinds = torch.stack([torch.randint(dim, (len(pairs),)) for dim in BONDS], 1)
    ends = torch.tensor(pairs).T
    index, attributes = torch.cat([ends, ends.flip(0)], 1), kinds.repeat(2, 1)
    heavy = (atoms[:, :1] + atoms[:, 1:2] > torch.arange(TASKS) + 3).float().mean(0)
    label = (heavy + 0.1 * torch.randn(TASKS) > 0.5).float()
    label[1:][torch.rand(TASKS - 1) < 0.25] = torch.nan
    x = F.pad(atoms, (0, 0, 0, MOST_ATOMS - count), value=-1)
    rest = MOST_BONDS - index.shape[1]
    return x, F.pad(index, (0, rest), value=-1), F.pad(attributes, (0, 0, 0, rest), value=-1), label


def molecules() -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Sets of molecules, and the labels of each, of which some are missing."""
    drawn = zip(*(molecule() for _ in range(SETS * MOLECULES)), strict=True)
    *inputs, label = (torch.stack(each).unflatten(0, (SETS, MOLECULES)) for each in drawn)
    return tuple(inputs), label


def labelled_loss(logits: Tensor, label: Tensor) -> Tensor:
    """Half the binary cross entropy of the labels that are not missing."""
    known = label == label
    return F.binary_cross_entropy_with_logits(logits[known], label[known]) / 2
