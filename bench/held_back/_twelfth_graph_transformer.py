"""A small Graphormer after the one in transformers: a value of each graph and one of each of its nodes."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, INNER, HEADS, LAYERS, HOPS, SPATIAL = 24, 32, 4, 3, 3, 9
ATOMS, DEGREES, EDGES, NODES, REACH, PAD = 12, 8, 8, 7, 5, -100.0


def varied(module: nn.Module) -> None:
    """Start with weights that let every table, gain and shift count; a padding row is never trained."""
    if isinstance(module, nn.LayerNorm):
        nn.init.uniform_(module.weight, 0.6, 1.4)
        nn.init.normal_(module.bias, std=0.2)
    elif isinstance(module, nn.Linear):
        nn.init.xavier_normal_(module.weight)
        if module.bias is not None:
            nn.init.normal_(module.bias, std=0.2)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.7)


class GraphormerGraphNodeFeature(nn.Module):
    """What each node starts with; the graph's own token comes first."""

    def __init__(self):
        super().__init__()
        self.atom_encoder = nn.Embedding(ATOMS + 1, WIDTH, padding_idx=0)
        self.in_degree_encoder = nn.Embedding(DEGREES, WIDTH, padding_idx=0)
        self.out_degree_encoder = nn.Embedding(DEGREES, WIDTH, padding_idx=0)
        self.graph_token = nn.Embedding(1, WIDTH)

    def forward(self, input_nodes: Tensor, in_degree: Tensor, out_degree: Tensor) -> Tensor:
        node_feature = self.atom_encoder(input_nodes).sum(dim=-2)
        node_feature = node_feature + self.in_degree_encoder(in_degree) + self.out_degree_encoder(out_degree)
        graph_token_feature = self.graph_token.weight.unsqueeze(0).repeat(len(input_nodes), 1, 1)
        return torch.cat([graph_token_feature, node_feature], dim=1)


class GraphormerGraphAttnBias(nn.Module):
    """The bias of each head for each pair, from the length of the path between them and the edges on it."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.multi_hop_max_dist = HEADS, HOPS
        self.edge_encoder = nn.Embedding(EDGES + 1, HEADS, padding_idx=0)
        self.edge_dis_encoder = nn.Embedding(HOPS * HEADS * HEADS, 1)
        self.spatial_pos_encoder = nn.Embedding(SPATIAL, HEADS, padding_idx=0)
        self.graph_token_virtual_distance = nn.Embedding(1, HEADS)

    def forward(self, attn_bias: Tensor, spatial_pos: Tensor, input_edges: Tensor) -> Tensor:
        n_graph, n_node = spatial_pos.shape[:2]
        bias = attn_bias.unsqueeze(1).repeat(1, self.num_heads, 1, 1)
        bias[:, :, 1:, 1:] = bias[:, :, 1:, 1:] + self.spatial_pos_encoder(spatial_pos).permute(0, 3, 1, 2)
        t = self.graph_token_virtual_distance.weight.view(1, self.num_heads, 1)
        bias[:, :, 1:, 0] = bias[:, :, 1:, 0] + t
        bias[:, :, 0, :] = bias[:, :, 0, :] + t

        spatial_pos_ = spatial_pos.clone()
        spatial_pos_[spatial_pos_ == 0] = 1
        spatial_pos_ = torch.where(spatial_pos_ > 1, spatial_pos_ - 1, spatial_pos_)
        spatial_pos_ = spatial_pos_.clamp(0, self.multi_hop_max_dist)
        edges = self.edge_encoder(input_edges[:, :, :, : self.multi_hop_max_dist]).mean(-2)
        max_dist = edges.shape[-2]
        flat = edges.permute(3, 0, 1, 2, 4).reshape(max_dist, -1, self.num_heads)
        mix = self.edge_dis_encoder.weight.reshape(-1, self.num_heads, self.num_heads)[:max_dist]
        edges = torch.bmm(flat, mix).reshape(max_dist, n_graph, n_node, n_node, self.num_heads)
        edges = edges.permute(1, 2, 3, 0, 4).sum(-2) / spatial_pos_.unsqueeze(-1)
        bias[:, :, 1:, 1:] = bias[:, :, 1:, 1:] + edges.permute(0, 3, 1, 2)
        return bias + attn_bias.unsqueeze(1)


class GraphormerMultiheadAttention(nn.Module):
    """Attention of [T, B, C] with a bias and without the padding."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
        self.scaling = self.head_dim**-0.5
        self.k_proj, self.v_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q_proj, self.out_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, query: Tensor, attn_bias: Tensor, key_padding_mask: Tensor) -> Tensor:
        length, batch, width = query.shape
        q, k, v = self.q_proj(query) * self.scaling, self.k_proj(query), self.v_proj(query)
        shape = (length, batch * self.num_heads, self.head_dim)
        q, k, v = (x.contiguous().view(shape).transpose(0, 1) for x in (q, k, v))
        scores = torch.bmm(q, k.transpose(1, 2)) + attn_bias.reshape(-1, length, length)
        scores = scores.view(batch, self.num_heads, length, length)
        scores = scores.masked_fill(key_padding_mask[:, None, None], float("-inf"))
        probs = scores.view(-1, length, length).softmax(-1)
        attn = torch.bmm(probs, v).transpose(0, 1).contiguous().view(length, batch, width)
        return self.out_proj(attn)


class GraphormerGraphEncoderLayer(nn.Module):
    """Attention and a network for each token, both normed after their sums."""

    def __init__(self):
        super().__init__()
        self.self_attn, self.self_attn_layer_norm = GraphormerMultiheadAttention(), nn.LayerNorm(WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.activation_fn, self.final_layer_norm = nn.GELU(), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, self_attn_bias: Tensor, self_attn_padding_mask: Tensor) -> Tensor:
        x = self.self_attn_layer_norm(x + self.self_attn(x, self_attn_bias, self_attn_padding_mask))
        return self.final_layer_norm(x + self.fc2(self.activation_fn(self.fc1(x))))


class GraphormerGraphEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.graph_node_feature, self.graph_attn_bias = (
            GraphormerGraphNodeFeature(),
            GraphormerGraphAttnBias(),
        )
        self.emb_layer_norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(GraphormerGraphEncoderLayer() for _ in range(LAYERS))

    def forward(self, input_nodes: Tensor, perturb: Tensor, **graphs: Tensor) -> Tensor:
        padding_mask = F.pad(input_nodes[:, :, 0].eq(0), (1, 0), value=False)
        bias = self.graph_attn_bias(graphs["attn_bias"], graphs["spatial_pos"], graphs["input_edges"])
        x = self.graph_node_feature(input_nodes, graphs["in_degree"], graphs["out_degree"])
        x = torch.cat([x[:, :1], x[:, 1:] + perturb], dim=1)
        x = self.emb_layer_norm(x).transpose(0, 1)
        for layer in self.layers:
            x = layer(x, bias, padding_mask)
        return x


class GraphormerModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.graph_encoder = GraphormerGraphEncoder()
        self.lm_head_transform_weight = nn.Linear(WIDTH, WIDTH)
        self.activation_fn, self.layer_norm = nn.GELU(), nn.LayerNorm(WIDTH)

    def forward(self, **graphs: Tensor) -> Tensor:
        x = self.graph_encoder(**graphs).transpose(0, 1)
        return self.layer_norm(self.activation_fn(self.lm_head_transform_weight(x)))


class GraphormerDecoderHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.classifier = nn.Linear(WIDTH, 1, bias=False)
        self.lm_output_learned_bias = nn.Parameter(0.3 * torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(x) + self.lm_output_learned_bias


class GraphormerForGraphsAndNodes(nn.Module):
    """Padded graphs -> a value of each [B], and one of each node [B, N] that is zero in the padding."""

    def __init__(self):
        super().__init__()
        self.encoder = GraphormerModel()
        self.classifier, self.node_classifier = GraphormerDecoderHead(), GraphormerDecoderHead()
        self.apply(varied)

    def forward(self, input_nodes: Tensor, **graphs: Tensor) -> tuple[Tensor, Tensor]:
        x = self.encoder(input_nodes=input_nodes, **graphs)
        nodes = self.node_classifier(x[:, 1:]).squeeze(-1)
        return self.classifier(x[:, 0]).squeeze(-1), nodes.masked_fill(input_nodes[:, :, 0].eq(0), 0.0)


def collated() -> tuple[dict[str, Tensor], Tensor]:
    """Three graphs: a tree of edges both ways and some arcs one way, with their shortest paths."""
    sizes = [NODES, *torch.randint(3, NODES, (2,)).tolist()]
    shapes = {"input_nodes": (2,), "in_degree": (), "out_degree": (), "spatial_pos": (NODES,)}
    graphs = {key: torch.zeros(3, NODES, *shape, dtype=torch.long) for key, shape in shapes.items()}
    graphs["input_edges"] = torch.zeros(3, NODES, NODES, REACH, 2, dtype=torch.long)
    graphs |= {
        "attn_bias": torch.zeros(3, NODES + 1, NODES + 1),
        "perturb": 0.3 * torch.randn(3, NODES, WIDTH),
    }
    target = torch.full((3, NODES + 1), PAD)
    for g, n in enumerate(sizes):
        arcs = {(i, max(0, i - int(torch.randint(1, 3, ())))) for i in range(1, n)}
        arcs |= {(j, i) for i, j in arcs} | {(0, n - 1), (1, 2)}
        kinds = {arc: torch.randint(1, 5, (2,)) + torch.tensor([0, 4]) for arc in sorted(arcs)}
        for i in range(n):
            paths, queue = {i: []}, [i]
            for here in queue:
                for _, there in (arc for arc in kinds if arc[0] == here and arc[1] not in paths):
                    paths[there] = [*paths[here], kinds[here, there]]
                    queue.append(there)
            for j, path in paths.items():
                graphs["spatial_pos"][g, i, j] = len(path) + 1
                graphs["input_edges"][g, i, j, : len(path)] = torch.stack(path)[:REACH] if path else 0
            graphs["in_degree"][g, i] = 1 + sum(arc[1] == i for arc in kinds)
            graphs["out_degree"][g, i] = 1 + sum(arc[0] == i for arc in kinds)
        graphs["input_nodes"][g, :n] = torch.randint(1, 7, (n, 2)) + torch.tensor([0, 6])
        places = torch.randn(n, 3)
        graphs["attn_bias"][g, 1 : n + 1, 1 : n + 1] = -0.3 * torch.cdist(places, places)
        target[g, : n + 1] = torch.randn(n + 1)
    return graphs, target


def both(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """The squared errors of the graphs and of the nodes that are there."""
    there = target[:, 1:] != PAD
    return F.mse_loss(outputs[0], target[:, 0]) + F.mse_loss(outputs[1][there], target[:, 1:][there])
