"""A small Graphormer: a transformer over padded graphs, whose distances and paths bias its attention."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, INNER, LAYERS, RESULTS = 30, 5, 44, 3, 2
ATOMS, BONDS, DEGREES, DISTANCES, HOPS = 41, 23, 8, 12, 4
GRAPHS, NODES, NODE_FEATURES, EDGE_FEATURES = 4, 9, 3, 2


class GraphormerGraphNodeFeature(nn.Module):
    """Sums of the embeddings of each node, after the token of the graph."""

    def __init__(self):
        super().__init__()
        self.atom_encoder = nn.Embedding(ATOMS, WIDTH, padding_idx=0)
        self.in_degree_encoder = nn.Embedding(DEGREES, WIDTH, padding_idx=0)
        self.out_degree_encoder = nn.Embedding(DEGREES, WIDTH, padding_idx=0)
        self.graph_token = nn.Embedding(1, WIDTH)

    def forward(self, input_nodes: Tensor, in_degree: Tensor, out_degree: Tensor) -> Tensor:
        node_feature = self.atom_encoder(input_nodes).sum(dim=-2)
        node_feature = node_feature + self.in_degree_encoder(in_degree) + self.out_degree_encoder(out_degree)
        token = self.graph_token.weight.unsqueeze(0).repeat(len(input_nodes), 1, 1)
        return torch.cat([token, node_feature], dim=1)


class GraphormerGraphAttnBias(nn.Module):
    """A bias for each head and each pair of nodes: [N, heads, T + 1, T + 1]."""

    def __init__(self):
        super().__init__()
        self.edge_encoder = nn.Embedding(BONDS, HEADS, padding_idx=0)
        self.edge_dis_encoder = nn.Embedding(HOPS * HEADS * HEADS, 1)
        self.spatial_pos_encoder = nn.Embedding(DISTANCES, HEADS, padding_idx=0)
        self.graph_token_virtual_distance = nn.Embedding(1, HEADS)

    def forward(self, attn_bias: Tensor, spatial_pos: Tensor, input_edges: Tensor) -> Tensor:
        bias = attn_bias.unsqueeze(1).repeat(1, HEADS, 1, 1)
        spatial_pos_bias = self.spatial_pos_encoder(spatial_pos).permute(0, 3, 1, 2)
        t = self.graph_token_virtual_distance.weight.view(1, HEADS, 1)
        bias[:, :, 1:, 1:] = bias[:, :, 1:, 1:] + spatial_pos_bias
        bias[:, :, 1:, 0] = bias[:, :, 1:, 0] + t
        bias[:, :, 0, :] = bias[:, :, 0, :] + t

        steps = torch.where(spatial_pos > 1, spatial_pos - 1, 1).clamp(0, HOPS)
        edges = self.edge_encoder(input_edges).mean(-2)
        n, size = edges.shape[:2]
        flat = edges.permute(3, 0, 1, 2, 4).reshape(HOPS, -1, HEADS)
        flat = torch.bmm(flat, self.edge_dis_encoder.weight.reshape(-1, HEADS, HEADS))
        edges = flat.reshape(HOPS, n, size, size, HEADS).permute(1, 2, 3, 0, 4)
        edges = (edges.sum(-2) / steps.unsqueeze(-1)).permute(0, 3, 1, 2)
        bias[:, :, 1:, 1:] = bias[:, :, 1:, 1:] + edges
        return bias + attn_bias.unsqueeze(1)


class GraphormerMultiheadAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.k_proj, self.v_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q_proj, self.out_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scaling = (WIDTH // HEADS) ** -0.5

    def forward(self, query: Tensor, attn_bias: Tensor, key_padding_mask: Tensor) -> Tensor:
        length, n, _ = query.shape
        q, k, v = self.q_proj(query) * self.scaling, self.k_proj(query), self.v_proj(query)
        q, k, v = (x.view(length, n * HEADS, -1).transpose(0, 1) for x in (q, k, v))
        weights = torch.bmm(q, k.transpose(1, 2)) + attn_bias.reshape(n * HEADS, length, length)
        weights = weights.view(n, HEADS, length, length)
        weights = weights.masked_fill(key_padding_mask[:, None, None], float("-inf"))
        weights = F.softmax(weights, dim=-1).view(n * HEADS, length, length)
        attn = torch.bmm(weights, v).transpose(0, 1).reshape(length, n, WIDTH)
        return self.out_proj(attn)


class GraphormerGraphEncoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.activation_fn = nn.GELU()
        self.self_attn = GraphormerMultiheadAttention()
        self.self_attn_layer_norm = nn.LayerNorm(WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.final_layer_norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, attn_bias: Tensor, padding: Tensor) -> Tensor:
        residual = x
        x = residual + self.self_attn(self.self_attn_layer_norm(x), attn_bias, padding)
        residual = x
        x = self.activation_fn(self.fc1(self.final_layer_norm(x)))
        return residual + self.fc2(x)


class GraphormerGraphEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.graph_node_feature = GraphormerGraphNodeFeature()
        self.graph_attn_bias = GraphormerGraphAttnBias()
        self.emb_layer_norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(GraphormerGraphEncoderLayer() for _ in range(LAYERS))

    def forward(self, nodes: Tensor, edges: Tensor, bias: Tensor, into: Tensor, out: Tensor, pos: Tensor):
        padding = F.pad(nodes[:, :, 0].eq(0), (1, 0), value=False)
        x = self.emb_layer_norm(self.graph_node_feature(nodes, into, out))
        attn_bias, x = self.graph_attn_bias(bias, pos, edges), x.transpose(0, 1)
        for layer in self.layers:
            x = layer(x, attn_bias, padding)
        return x


class GraphormerModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.graph_encoder = GraphormerGraphEncoder()
        self.lm_head_transform_weight = nn.Linear(WIDTH, WIDTH)
        self.activation_fn, self.layer_norm = nn.GELU(), nn.LayerNorm(WIDTH)

    def forward(self, *inputs: Tensor) -> Tensor:
        x = self.graph_encoder(*inputs).transpose(0, 1)
        return self.layer_norm(self.activation_fn(self.lm_head_transform_weight(x)))


class GraphormerDecoderHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.lm_output_learned_bias = nn.Parameter(torch.zeros(1))
        self.classifier = nn.Linear(WIDTH, RESULTS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(x) + self.lm_output_learned_bias


class GraphormerForGraphClassification(nn.Module):
    """Padded graphs -> a few numbers for each."""

    def __init__(self):
        super().__init__()
        self.encoder, self.classifier = GraphormerModel(), GraphormerDecoderHead()
        for module in self.modules():
            for name, weight in module.named_parameters(recurse=False):
                if isinstance(module, nn.LayerNorm):
                    nn.init.normal_(weight, float(name == "weight"), 0.2)
                elif isinstance(module, nn.Linear) and name == "weight":
                    nn.init.normal_(weight, std=1 / math.sqrt(weight.shape[1]))
                else:
                    nn.init.normal_(weight, std=0.5 if isinstance(module, nn.Embedding) else 0.2)

    def forward(
        self,
        input_nodes: Tensor,
        input_edges: Tensor,
        attn_bias: Tensor,
        in_degree: Tensor,
        out_degree: Tensor,
        spatial_pos: Tensor,
    ) -> Tensor:
        x = self.encoder(input_nodes, input_edges, attn_bias, in_degree, out_degree, spatial_pos)
        return self.classifier(x)[:, 0, :]


def molecules() -> tuple[dict[str, Tensor], Tensor]:
    """Chains with branches and one-way short cuts; all numbers are shifted, and 0 is padding."""
    nodes = torch.zeros(GRAPHS, NODES, NODE_FEATURES, dtype=torch.long)
    edges = torch.zeros(GRAPHS, NODES, NODES, HOPS, EDGE_FEATURES, dtype=torch.long)
    degrees, pos = torch.zeros(2, GRAPHS, NODES, dtype=torch.long), nodes.new_zeros(GRAPHS, NODES, NODES)
    for g, size in enumerate((9, 6, 8, 7)):
        nodes[g, :size] = torch.randint(1, ATOMS, (size, NODE_FEATURES))
        linked = torch.zeros(size, size, dtype=torch.bool)
        for i in range(1, size):
            other = int(torch.randint(max(0, i - 2), i, ()))
            linked[i, other] = linked[other, i] = True
        linked[0, size // 2] = True
        bonds = torch.randint(1, BONDS, (size, size, EDGE_FEATURES))
        degrees[0, g, :size], degrees[1, g, :size] = linked.sum(0) + 1, linked.sum(1) + 1
        degrees.clamp_(max=DEGREES - 1)
        for i in range(size):
            paths, queue = {i: []}, [i]
            for at in queue:
                for to in linked[at].nonzero().flatten().tolist():
                    if to not in paths:
                        paths[to] = [*paths[at], (at, to)]
                        queue.append(to)
            for j, path in paths.items():
                pos[g, i, j] = len(path) + 1
                for hop, (at, to) in enumerate(path[:HOPS]):
                    edges[g, i, j, hop] = bonds[at, to]
    bias = 0.1 * torch.randn(GRAPHS, NODES + 1, NODES + 1)
    names = "input_nodes", "input_edges", "attn_bias", "in_degree", "out_degree", "spatial_pos"
    target = torch.stack([nodes[..., 0].float().mean(1) / 10, degrees[0].float().mean(1) - 2], 1)
    return dict(zip(names, (nodes, edges, bias, *degrees, pos), strict=True)), target


def error(outputs: Tensor, target: Tensor) -> Tensor:
    """A fifth of the mean of the smooth distances."""
    return F.smooth_l1_loss(outputs, target) / 5
