"""A small crystal graph network (CGCNN): gated convolutions over neighbour lists, and a mean by crystal."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

KINDS, WIDTH, HIDDEN, CONVOLUTIONS, HEADS = 11, 26, 30, 3, 2
CRYSTALS, ATOMS, NEIGHBOURS, RADIUS, STEP = 5, 9, 6, 3.2, 0.35


class GaussianDistance(nn.Module):
    """[..., M] -> [..., M, F]: distances by gaussians at even steps, as wide as the step."""

    def __init__(self, dmin: float, dmax: float, step: float):
        super().__init__()
        self.register_buffer("filter", torch.arange(dmin, dmax + step, step))
        self.register_buffer("var", torch.tensor(step))

    def forward(self, distances: Tensor) -> Tensor:
        return torch.exp(-((distances[..., None] - self.filter) ** 2) / self.var**2)


class Normalizer(nn.Module):
    """Undoes the normalisation of the targets."""

    def __init__(self, mean: float, std: float):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean))
        self.register_buffer("std", torch.tensor(std))

    def forward(self, normed: Tensor) -> Tensor:
        return normed * self.std + self.mean


class ConvLayer(nn.Module):
    def __init__(self, atom_fea_len: int, nbr_fea_len: int):
        super().__init__()
        self.fc_full = nn.Linear(2 * atom_fea_len + nbr_fea_len, 2 * atom_fea_len)
        self.sigmoid = nn.Sigmoid()
        self.softplus1 = nn.Softplus()
        self.bn1 = nn.BatchNorm1d(2 * atom_fea_len)
        self.bn2 = nn.BatchNorm1d(atom_fea_len)
        self.softplus2 = nn.Softplus()

    def forward(self, atom_in_fea: Tensor, nbr_fea: Tensor, nbr_fea_idx: Tensor, nbr_mask: Tensor) -> Tensor:
        n, m = nbr_fea_idx.shape
        atom_nbr_fea = atom_in_fea[nbr_fea_idx]
        own = atom_in_fea.unsqueeze(1).expand(n, m, -1)
        total_gated_fea = self.fc_full(torch.cat([own, atom_nbr_fea, nbr_fea], dim=2))
        total_gated_fea = self.bn1(total_gated_fea.view(n * m, -1)).view(n, m, -1)
        nbr_filter, nbr_core = total_gated_fea.chunk(2, dim=2)
        messages = self.sigmoid(nbr_filter) * self.softplus1(nbr_core)
        nbr_sumed = torch.sum(messages * nbr_mask[:, :, None], dim=1)
        return self.softplus2(atom_in_fea + self.bn2(nbr_sumed))


class CrystalGraphConvNet(nn.Module):
    """Padded crystals of atoms, each with its padded neighbours -> one property for each crystal."""

    def __init__(self):
        super().__init__()
        self.gdf = GaussianDistance(0.5, RADIUS + 1, STEP)
        self.embedding = nn.Linear(KINDS, WIDTH)
        self.convs = nn.ModuleList(ConvLayer(WIDTH, len(self.gdf.filter)) for _ in range(CONVOLUTIONS))
        self.conv_to_fc = nn.Linear(WIDTH, HIDDEN)
        self.conv_to_fc_softplus = nn.Softplus()
        self.fcs = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(HEADS - 1))
        self.softpluses = nn.ModuleList(nn.Softplus() for _ in range(HEADS - 1))
        self.fc_out = nn.Linear(HIDDEN, 1)
        self.normalizer = Normalizer(0.7, 1.6)
        for norm in self.modules():
            if isinstance(norm, nn.BatchNorm1d):
                nn.init.normal_(norm.weight, 0.8, 0.15), nn.init.normal_(norm.bias, 0, 0.2)
                norm.running_mean.normal_(0, 0.2), norm.running_var.uniform_(0.5, 1.5)

    def collate(self, nbr_idx: Tensor, atom_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Where each atom stands among all the real ones, and its neighbours: [B, A] and [N, M]."""
        crystal_atom_idx = (atom_mask.flatten().cumsum(0) - 1).clamp(min=0).view_as(atom_mask)
        base = crystal_atom_idx[:, :1, None]
        return crystal_atom_idx, (nbr_idx + base)[atom_mask]

    def pooling(self, atom_fea: Tensor, crystal_atom_idx: Tensor, atom_mask: Tensor) -> Tensor:
        listed = atom_fea[crystal_atom_idx] * atom_mask[:, :, None]
        return listed.sum(1) / atom_mask.sum(1, keepdim=True)

    def forward(
        self, atom_types: Tensor, nbr_dist: Tensor, nbr_idx: Tensor, nbr_mask: Tensor, atom_mask: Tensor
    ) -> Tensor:
        crystal_atom_idx, nbr_fea_idx = self.collate(nbr_idx, atom_mask)
        nbr_fea, nbr_mask = self.gdf(nbr_dist[atom_mask]), nbr_mask[atom_mask]
        one_hot = F.one_hot(atom_types[atom_mask], KINDS).to(nbr_fea)
        atom_fea = self.embedding(one_hot)
        for conv in self.convs:
            atom_fea = conv(atom_fea, nbr_fea, nbr_fea_idx, nbr_mask)
        crys_fea = self.pooling(atom_fea, crystal_atom_idx, atom_mask)
        crys_fea = self.conv_to_fc(self.conv_to_fc_softplus(crys_fea))
        crys_fea = self.conv_to_fc_softplus(crys_fea)
        for fc, softplus in zip(self.fcs, self.softpluses, strict=True):
            crys_fea = softplus(fc(crys_fea))
        return self.normalizer(self.fc_out(crys_fea))


def crystals() -> tuple[dict[str, Tensor], Tensor]:
    """Boxes of points with their nearest neighbours; denser ones of heavier atoms have more energy."""
    count = torch.randint(5, ATOMS + 1, (CRYSTALS,))
    atom_mask = torch.arange(ATOMS) < count[:, None]
    atom_types = torch.randint(KINDS, (CRYSTALS, ATOMS)) * atom_mask
    place = torch.rand(CRYSTALS, ATOMS, 3) * (2 + 2 * torch.rand(CRYSTALS, 1, 1))
    apart = torch.cdist(place, place) + 0.6
    apart = apart.masked_fill(~atom_mask[:, None] | torch.eye(ATOMS, dtype=torch.bool), 99.0)
    nbr_dist, nbr_idx = apart.topk(NEIGHBOURS, largest=False)
    nbr_mask = (nbr_dist < RADIUS) & atom_mask[:, :, None]
    nbr_dist, nbr_idx = nbr_dist.where(nbr_mask, torch.tensor(RADIUS + 1)), nbr_idx * nbr_mask
    heavy = (atom_types * atom_mask).sum(1) / count / KINDS
    target = 2 * heavy + nbr_mask.sum((1, 2)) / count / NEIGHBOURS - 0.5
    inputs = {"atom_types": atom_types, "nbr_dist": nbr_dist, "nbr_idx": nbr_idx}
    return inputs | {"nbr_mask": nbr_mask, "atom_mask": atom_mask}, target[:, None]


def squares(outputs: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(outputs, target) / 8
