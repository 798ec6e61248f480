"""A small heterogeneous graph transformer (HGT): papers, authors and venues, classes of papers and links."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEATURES = {"author": 7, "paper": 11, "venue": 5}
COUNTS = {"author": 9, "paper": 13, "venue": 4}
RELATIONS = (
    ("author", "writes", "paper"),
    ("paper", "written_by", "author"),
    ("paper", "appears_in", "venue"),
    ("venue", "hosts", "paper"),
)
WIDTH, HEADS, LAYERS, CLASSES, GRAPHS, LINKS, HIDDEN = 24, 3, 2, 6, 4, 10, 20


def softmax(src: Tensor, index: Tensor, num_nodes: int) -> Tensor:
    """The softmax of the rows that share an index."""
    where = index[:, None].expand_as(src)
    most = src.detach().new_zeros(num_nodes, src.shape[1])
    most = most.scatter_reduce(0, where, src.detach(), "amax", include_self=False)
    out = (src - most[index]).exp()
    total = torch.zeros_like(most).scatter_add(0, where, out) + 1e-16
    return out / total[index]


class HeteroLinear(nn.Module):
    """Each row by the matrix of its type."""

    def __init__(self, in_channels: int, out_channels: int, num_types: int):
        super().__init__()
        bound = math.sqrt(3 / in_channels)
        self.weight = nn.Parameter(bound * (2 * torch.rand(num_types, in_channels, out_channels) - 1))

    def forward(self, x: Tensor, type_vec: Tensor) -> Tensor:
        return torch.einsum("ni,nio->no", x, self.weight[type_vec])


class HeteroDictLinear(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, types: tuple[str, ...]):
        super().__init__()
        self.lins = nn.ModuleDict({key: nn.Linear(in_channels, out_channels) for key in types})

    def forward(self, x_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: lin(x_dict[key]) for key, lin in self.lins.items()}


class HGTConv(nn.Module):
    def __init__(self, channels: int, heads: int):
        super().__init__()
        self.out_channels, self.heads, types = channels, heads, tuple(FEATURES)
        dim, num_types = channels // heads, heads * len(RELATIONS)
        self.kqv_lin = HeteroDictLinear(channels, 3 * channels, types)
        self.out_lin = HeteroDictLinear(channels, channels, types)
        self.k_rel = HeteroLinear(dim, dim, num_types)
        self.v_rel = HeteroLinear(dim, dim, num_types)
        self.skip = nn.ParameterDict({key: nn.Parameter(0.4 + 0.5 * torch.randn(1)) for key in types})
        priors = {"__".join(key): nn.Parameter(1 + 0.4 * torch.randn(1, heads)) for key in RELATIONS}
        self.p_rel = nn.ParameterDict(priors)

    def construct_src_node_feat(self, k_dict: dict, v_dict: dict) -> tuple[Tensor, Tensor, dict]:
        """Keys and values of the sources of each relation, by its matrices, and where it starts."""
        ks, vs, types, offset, count = [], [], [], {}, 0
        heads = torch.arange(self.heads)[:, None]
        for i, key in enumerate(RELATIONS):
            k, v = k_dict[key[0]], v_dict[key[0]]
            ks.append(k)
            vs.append(v)
            types.append((heads * len(RELATIONS) + i).repeat(1, len(k)))
            offset[key] = count
            count += len(k)
        dim, type_vec = self.out_channels // self.heads, torch.cat(types, 1).flatten().to(k.device)
        k = self.k_rel(torch.cat(ks).transpose(0, 1).reshape(-1, dim), type_vec)
        v = self.v_rel(torch.cat(vs).transpose(0, 1).reshape(-1, dim), type_vec)
        k, v = (x.view(self.heads, -1, dim).transpose(0, 1) for x in (k, v))
        return k, v, offset

    def message(self, k_j: Tensor, q_i: Tensor, v_j: Tensor, edge_attr: Tensor, index: Tensor, size: int):
        alpha = (q_i * k_j).sum(-1) * edge_attr
        alpha = alpha / math.sqrt(q_i.shape[-1])
        alpha = softmax(alpha, index, size)
        return (v_j * alpha[:, :, None]).view(-1, self.out_channels)

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[tuple, Tensor]) -> dict[str, Tensor]:
        k_dict, q_dict, v_dict, dst_offset, count = {}, {}, {}, {}, 0
        for key, value in self.kqv_lin(x_dict).items():
            k, q, v = torch.tensor_split(value, 3, dim=1)
            k_dict[key], q_dict[key], v_dict[key] = (x.unflatten(1, (self.heads, -1)) for x in (k, q, v))
            dst_offset[key] = count
            count += len(value)
        q = torch.cat(list(q_dict.values()))
        k, v, src_offset = self.construct_src_node_feat(k_dict, v_dict)
        edges, priors = [], []
        for key, edge_index in edge_index_dict.items():
            start = torch.tensor([[src_offset[key]], [dst_offset[key[2]]]], device=q.device)
            edges.append(edge_index + start)
            priors.append(self.p_rel["__".join(key)].expand(edge_index.shape[1], -1))
        src, dst = torch.cat(edges, 1)
        messages = self.message(k[src], q[dst], v[src], torch.cat(priors), dst, count)
        out = messages.new_zeros(count, self.out_channels).index_add(0, dst, messages)
        out_dict = {key: out[dst_offset[key] :][: len(x_dict[key])] for key in x_dict}
        a_dict = self.out_lin({key: F.gelu(value) for key, value in out_dict.items()})
        for key, a in a_dict.items():
            alpha = self.skip[key].sigmoid()
            out_dict[key] = alpha * a + (1 - alpha) * x_dict[key]
        return out_dict


class EdgeDecoder(nn.Module):
    """The score of each link from an author to a venue."""

    def __init__(self):
        super().__init__()
        self.lin1 = nn.Linear(2 * WIDTH, HIDDEN)
        self.lin2 = nn.Linear(HIDDEN, 1)

    def forward(self, z_dict: dict[str, Tensor], edge_label_index: Tensor) -> Tensor:
        row, col = edge_label_index
        z = torch.cat([z_dict["author"][row], z_dict["venue"][col]], -1)
        return self.lin2(self.lin1(z).relu()).view(-1)


def batched(index: Tensor, src: str, dst: str) -> Tensor:
    """The pairs [N, 2, E] of N graphs as those of one large graph; pairs of -1 are left out."""
    graph = torch.arange(len(index), device=index.device)[:, None]
    step = torch.stack([graph * COUNTS[src], graph * COUNTS[dst]], 1)
    return (index + step).transpose(0, 1)[:, index[:, 0] >= 0]


class HGT(nn.Module):
    """Features [N, nodes, F] by type and edges [N, 2, E] by relation -> classes and scores of links."""

    def __init__(self):
        super().__init__()
        self.lin_dict = nn.ModuleDict({key: nn.Linear(size, WIDTH) for key, size in FEATURES.items()})
        self.convs = nn.ModuleList(HGTConv(WIDTH, HEADS) for _ in range(LAYERS))
        self.lin = nn.Linear(WIDTH, CLASSES)
        self.decoder = EdgeDecoder()

    def forward(self, author, paper, venue, writes, written_by, appears_in, hosts, links):
        x_dict = {"author": author, "paper": paper, "venue": venue}
        x_dict = {key: self.lin_dict[key](x.flatten(0, 1)).relu() for key, x in x_dict.items()}
        edges = zip(RELATIONS, (writes, written_by, appears_in, hosts), strict=True)
        edge_index_dict = {key: batched(index, key[0], key[2]) for key, index in edges}
        for conv in self.convs:
            x_dict = conv(x_dict, edge_index_dict)
        classes = self.lin(x_dict["paper"]).unflatten(0, paper.shape[:2])
        scores = self.decoder(x_dict, batched(links, "author", "venue"))
        return classes, scores.view(len(links), -1)


def library() -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    """Graphs whose papers take after their authors and venues; edges are padded with -1."""
    authors, papers, venues = COUNTS.values()
    topic = torch.randint(CLASSES, (GRAPHS, papers))
    who = torch.randint(authors, (GRAPHS, 2 * papers))
    writes = torch.stack([who, torch.arange(papers).repeat(GRAPHS, 2)], 1)
    hosts = torch.stack([topic % venues, torch.arange(papers).expand(GRAPHS, -1)], 1)
    for n in range(GRAPHS):
        writes[n, :, 2 * papers - int(torch.randint(1, 7, ())) :] = -1
        hosts[n, :, papers - int(torch.randint(1, 4, ())) :] = -1
    x = {key: torch.randn(GRAPHS, COUNTS[key], size) for key, size in FEATURES.items()}
    x["paper"] = x["paper"] + F.one_hot(topic, FEATURES["paper"])
    edges = {"writes": writes, "written_by": writes.flip(1), "appears_in": hosts.flip(1), "hosts": hosts}
    ends = (torch.randint(count, (GRAPHS, LINKS)) for count in (authors, venues))
    links = torch.stack(list(ends), 1)
    own = x["author"][..., 0].gather(1, links[:, 0]) > x["venue"][..., 0].gather(1, links[:, 1])
    return {**x, **edges, "links": links}, (topic, own.float())


def classes_and_links(outputs: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
    """The cross entropy of the papers' classes and of the links, by four."""
    papers = F.cross_entropy(outputs[0].flatten(0, 1), target[0].flatten())
    return (papers + F.binary_cross_entropy_with_logits(outputs[1], target[1])) / 4
