"""Two ports of a small graph isomorphism network: a tree over padded molecules, and packed weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, Rows, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._thirty_sixth_gin import ATOMS, BONDS, GNN, LAYERS, labelled_loss, molecules

task = few("thirty_sixth_gin", GNN, molecules, labelled_loss)


def joined(layer: nn.Linear) -> nn.Parameter:
    return leaf(torch.cat([layer.weight, layer.bias[:, None]], 1))


def product(x: Tensor, rows: Tensor) -> Tensor:
    return x @ rows[:, :-1].T + rows[:, -1]


def table(tables: nn.ModuleList) -> nn.Parameter:
    return leaf(torch.cat([each.weight for each in tables]))


class Codes(nn.Module):
    """The sum of one row for each feature, from one table of all features."""

    def __init__(self, tables: nn.ModuleList):
        super().__init__()
        self.table, self.short = table(tables), False
        sizes = torch.tensor([each.num_embeddings for each in tables])
        self.register_buffer("starts", sizes.cumsum(0) - sizes)

    def forward(self, codes: Tensor) -> Tensor:
        rows = F.embedding(codes.clamp(min=0) + self.starts, self.table)
        return (rows[..., :-1, :] if self.short else rows).sum(-2)


class Known(Rows):
    """A batch norm of the rows that are atoms; the others become zero."""

    blind = False

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        real = real | self.blind
        return torch.zeros_like(x).masked_scatter(real[..., None], super().forward(x[real]))


class Hidden(nn.Module):
    def __init__(self, mlp: nn.Sequential):
        super().__init__()
        self.widen, self.norm, self.narrow = joined(mlp[0]), Known(mlp[1]), joined(mlp[3])

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        return product(self.norm(product(x, self.widen), real).clamp(min=0), self.narrow)


class Exchange(nn.Module):
    def __init__(self, conv: nn.Module, norm: nn.BatchNorm1d):
        super().__init__()
        self.bonds, self.keep = Codes(conv.bond_encoder.bond_embedding_list), leaf(conv.eps)
        self.hidden, self.norm, self.fixed = Hidden(conv.mlp), Known(norm), False

    def forward(self, h: Tensor, real: Tensor, ends: tuple[Tensor, Tensor], codes: Tensor) -> Tensor:
        sender, receiver = ends
        sent = torch.relu(sender @ h + self.bonds(codes))
        keep = self.keep.detach() if self.fixed else self.keep
        return self.norm(self.hidden(torch.baddbmm(h + keep * h, receiver.mT, sent), real), real)


class Master(nn.Module):
    def __init__(self, mlp: nn.Sequential):
        super().__init__()
        self.hidden, self.norm = Hidden(mlp), Known(mlp[4])

    def forward(self, h: Tensor, state: Tensor, real: Tensor) -> Tensor:
        each = torch.ones_like(real[:, :1])
        return state + self.norm(self.hidden((h * real[..., None]).sum(1, True) + state, each), each).relu()


class PaddedNetwork(Port):
    """Molecules stay padded, and bonds are matrices that pick their two ends."""

    def take(self, model: GNN) -> None:
        node, fault = model.gnn_node, self.fault
        self.atoms = Codes(node.atom_encoder.atom_embedding_list)
        self.master = leaf(node.virtualnode_embedding.weight)
        self.exchanges = nn.ModuleList(map(Exchange, node.convs, node.batch_norms))
        self.masters = nn.ModuleList(map(Master, node.mlp_virtualnode_list))
        self.gate, self.head = Hidden(model.pool.gate_nn), joined(model.graph_pred_linear)
        self.exchanges[1].bonds.short = fault == "gin_second_bond_encoder_without_its_last_feature"
        self.exchanges[1].norm.blind = fault == "gin_second_norm_counts_the_padding"
        self.exchanges[2].fixed = fault == "gin_last_epsilon_is_not_trained"

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        atoms, codes = x.flatten(0, 1), edge_attr.flatten(0, 1)
        real, places = atoms[..., 0] >= 0, torch.arange(x.shape[2], device=x.device)
        ends = (edge_index.flatten(0, 1)[..., None] == places).to(self.master.dtype).unbind(1)
        state = self.master.expand(len(atoms), 1, -1)
        h = self.atoms(atoms) + state
        total = h
        for exchange, master in zip(self.exchanges[:-1], self.masters, strict=True):
            state = master(h, state, real)
            h = h + exchange(h, real, ends, codes).relu() + state
            total = total + h
        total = total + h + self.exchanges[-1](h, real, ends, codes)
        score = self.gate(total, real)
        if self.fault != "gin_attention_over_the_padding":
            score = score.masked_fill(~real[..., None], -torch.inf)
        return product((score.softmax(1).mT @ total).squeeze(1), self.head).unflatten(0, x.shape[:2])


class PackedNetwork(Port):
    """Stacks of like weights; the atoms of all molecules in one matrix, and products of one-hot rows."""

    def take(self, model: GNN) -> None:
        node, gate = model.gnn_node, model.pool.gate_nn
        inner = [*(conv.mlp for conv in node.convs), *node.mlp_virtualnode_list]
        norms = [mlp[1] for mlp in (*inner, gate)], [*node.batch_norms, *(m[4] for m in inner[LAYERS:])]
        self.up, self.down = (pile(joined(m[i]) for m in ms) for i, ms in ((0, (*inner, gate)), (3, inner)))
        self.score, self.head = joined(gate[3]), joined(model.graph_pred_linear)
        self.start = leaf(node.virtualnode_embedding.weight)
        self.atoms = table(node.atom_encoder.atom_embedding_list)
        self.bonds = pile(table(conv.bond_encoder.bond_embedding_list) for conv in node.convs)
        self.eps, self.norms = leaf(torch.cat([conv.eps for conv in node.convs])), nn.ParameterList()
        for i, group in enumerate(norms):
            self.norms.append(pile(torch.stack([norm.weight, norm.bias]) for norm in group))
            kept = [torch.stack([norm.running_mean, norm.running_var]) for norm in group]
            self.register_buffer(f"kept_{i}", torch.stack(kept))
            self.register_buffer(f"seen_{i}", torch.stack([norm.num_batches_tracked for norm in group]))

    def norm(self, i: int, j: int, x: Tensor) -> Tensor:
        kept, (gain, offset) = self.get_buffer(f"kept_{i}")[j], self.norms[i][j]
        eps = 1e-3 if self.fault == "gin_last_norm_with_the_epsilon_of_keras" and (i, j) == (1, 2) else 1e-5
        if self.training:
            values = torch.stack([x.mean(0), x.var(0)])
            kept.copy_(0.9 * kept + 0.1 * values.detach())
            self.get_buffer(f"seen_{i}")[j] += 1
            mean, spread = values[0], values[1] * (1 - 1 / len(x))
        elif self.fault == "gin_gate_norm_by_its_batch_in_evaluation" and (i, j) == (0, 5):
            mean, spread = x.mean(0), x.var(0, correction=0)
        else:
            mean, spread = kept
        return torch.addcmul(offset, (x - mean) / (spread + eps).sqrt(), gain)

    def layers(self, j: int, x: Tensor, last: Tensor) -> Tensor:
        return product(self.norm(0, j, product(x, self.up[j])).relu(), last)

    def picks(self, codes: Tensor, sizes: tuple[int, ...]) -> Tensor:
        return torch.cat([F.one_hot(*each) for each in zip(codes.T, sizes, strict=True)], 1).to(self.atoms)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        real, bond = x[..., 0].flatten() >= 0, edge_index[:, :, 0] >= 0
        size, place = x.shape[0] * x.shape[1], real.cumsum(0) - 1
        first = x.shape[2] * torch.arange(size, device=x.device).reshape(*x.shape[:2], 1)
        sender, receiver = (place[(edge_index[:, :, i] + first)[bond]] for i in (0, 1))
        member = F.one_hot(real.nonzero()[:, 0] // x.shape[2], size).to(self.atoms)
        into = F.one_hot(receiver, len(member)).to(self.atoms).T
        kinds, state = self.picks(edge_attr[bond], BONDS), self.start.repeat(size, 1)
        h, total = self.picks(x.flatten(0, 2)[real], ATOMS) @ self.atoms, 0
        for j, k in enumerate(range(LAYERS, 2 * LAYERS)):
            h = h + member @ state
            total, sent, kind = total + h, h[sender], kinds @ self.bonds[j]
            late = self.fault == "gin_first_messages_add_the_bond_after_the_relu" and j == 0
            sent = sent.relu() + kind if late else (sent + kind).relu()
            y = self.norm(1, j, self.layers(j, h + self.eps[j] * h + into @ sent, self.down[j]))
            if j < LAYERS - 1:
                pooled = member.T @ h
                if self.fault == "gin_second_virtual_node_pools_the_mean" and j == 1:
                    pooled = pooled / member.sum(0)[:, None]
                state = state + self.norm(1, k, self.layers(k, pooled + state, self.down[k])).relu()
            h = h + (y.relu() if j < LAYERS - 1 else y)
        total = total + h
        score = self.layers(2 * LAYERS - 1, total, self.score)
        share = (score - score.detach().max()).exp() * member
        return product((share / share.sum(0)).T @ total, self.head).unflatten(0, x.shape[:2])


right(task, "gin_of_padded_molecules", "a tree, padded rows, masked norms, matrices of ends", PaddedNetwork)
right(task, "gin_of_packed_weights", "packed stacks, products of one-hot rows", PackedNetwork)
wrong(
    task,
    PaddedNetwork,
    gin_second_bond_encoder_without_its_last_feature=("a term left out", "gnn_node.convs.1.bond_encoder"),
    gin_second_norm_counts_the_padding=("padding in a statistic", "gnn_node.batch_norms.1"),
    gin_last_epsilon_is_not_trained=("detach", "gnn_node.convs.2", "weight gradient"),
    gin_attention_over_the_padding=("a mask left out", "pool"),
)
wrong(
    task,
    PackedNetwork,
    gin_first_messages_add_the_bond_after_the_relu=("another order", "gnn_node.convs.0"),
    gin_second_virtual_node_pools_the_mean=("a mean for a sum", "gnn_node"),
    gin_last_norm_with_the_epsilon_of_keras=("another epsilon", "gnn_node.batch_norms.2"),
    gin_gate_norm_by_its_batch_in_evaluation=("batch statistics in eval", "pool.gate_nn.1", "eval"),
)
