"""Two ports of a small Graphormer: a tree with the heads last, and one class of stacked weights."""

import math
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._thirty_fifth_graphormer import ATOMS, DEGREES, HEADS, HOPS, WIDTH, error, molecules
from bench.held_back._thirty_fifth_graphormer import GraphormerForGraphClassification as Graphormer

task = few("thirty_fifth_graphormer", Graphormer, molecules, error)


class Affine(nn.Module):
    """A product by a matrix of [inputs, outputs], then an offset; of one layer or of several side by side."""

    def __init__(self, *layers: nn.Linear):
        super().__init__()
        self.matrix = leaf(torch.cat([x.weight.T for x in layers], 1))
        self.offset = leaf(torch.cat([x.bias for x in layers]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.offset, x.flatten(0, -2), self.matrix).unflatten(0, x.shape[:-1])


def table(source: nn.Embedding) -> nn.Embedding:
    return nn.Embedding.from_pretrained(source.weight.detach().clone(), freeze=False, padding_idx=0)


class Entry(nn.Module):
    def __init__(self, source: nn.Module, norm: nn.LayerNorm):
        super().__init__()
        self.kinds, self.into = table(source.atom_encoder), table(source.in_degree_encoder)
        self.out, self.whole = table(source.out_degree_encoder), leaf(source.graph_token.weight[0])
        self.norm = deepcopy(norm)

    def forward(self, nodes: Tensor, into: Tensor, out: Tensor) -> Tensor:
        x = self.into(into) + self.out(out)
        for k in range(nodes.shape[2]):
            x = x + self.kinds(nodes[..., k])
        return self.norm(torch.cat([self.whole.expand(len(x), 1, -1), x], 1))


class Relations(nn.Module):
    """[N, T + 1, T + 1, heads] of the given bias, distances and paths."""

    def __init__(self, source: nn.Module):
        super().__init__()
        self.bond, self.far = table(source.edge_encoder), table(source.spatial_pos_encoder)
        self.hop = leaf(source.edge_dis_encoder.weight.view(HOPS, HEADS, HEADS))
        self.virtual, self.times = leaf(source.graph_token_virtual_distance.weight[0]), 2

    def forward(self, given: Tensor, distance: Tensor, paths: Tensor) -> Tensor:
        roads = torch.einsum("nijdeh,dhk->nijk", self.bond(paths), self.hop) / paths.shape[-1]
        pairs = self.far(distance) + roads / (distance - 1).clamp(1, HOPS)[..., None]
        outer = F.pad(torch.zeros_like(distance), (1, 0, 1, 0), value=1)
        pairs = F.pad(pairs, (0, 0, 1, 0, 1, 0)) + outer[..., None] * self.virtual
        return pairs + self.times * given[..., None]


class Mixer(nn.Module):
    def __init__(self, source: nn.Module):
        super().__init__()
        attn, ends = source.self_attn, (source.self_attn_layer_norm, source.final_layer_norm)
        self.norm, norm = map(deepcopy, ends)
        self.all = Affine(attn.q_proj, attn.k_proj, attn.v_proj)
        self.inner = nn.Sequential(norm, Affine(source.fc1), nn.GELU(), Affine(source.fc2))
        self.back, self.size = Affine(attn.out_proj), WIDTH // HEADS

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = self.all(self.norm(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, bias, scale=1 / math.sqrt(self.size))
        x = x + self.back(mixed.transpose(1, 2).flatten(2))
        return x + self.inner(x)


class GraphormerOfMixers(Port):
    """Batches first, heads last in the bias; the head reads the token only."""

    def take(self, model: Graphormer) -> None:
        top, body, fault = model.encoder, model.encoder.graph_encoder, self.fault
        self.entry = Entry(body.graph_node_feature, body.emb_layer_norm)
        self.relations = Relations(body.graph_attn_bias)
        self.mixers = nn.ModuleList(map(Mixer, body.layers))
        ends = Affine(top.lm_head_transform_weight), nn.GELU(), deepcopy(top.layer_norm)
        self.last, self.matrix = nn.Sequential(*ends), leaf(model.classifier.classifier.weight.T)
        self.level = leaf(model.classifier.lm_output_learned_bias)
        if fault == "graphormer_padding_bond_is_trained":
            self.relations.bond.padding_idx = None
        self.relations.times = 1 if fault == "graphormer_given_bias_added_once" else 2
        if fault == "graphormer_second_layer_scaled_by_its_whole_width":
            self.mixers[1].size = WIDTH
        if fault == "graphormer_last_norm_with_a_larger_epsilon":
            self.last[2].eps = 1e-3

    def forward(self, input_nodes, input_edges, attn_bias, in_degree, out_degree, spatial_pos) -> Tensor:
        x = self.entry(input_nodes, in_degree, out_degree)
        bias = self.relations(attn_bias, spatial_pos, input_edges).permute(0, 3, 1, 2)
        bias = bias.masked_fill(F.pad(input_nodes[..., 0] == 0, (1, 0))[:, None, None], -math.inf)
        for mixer in self.mixers:
            x = mixer(x, bias)
        return self.last(x[:, 0]) @ self.matrix + self.level


def rows(layer: nn.Module) -> Tensor:
    """A row for each output: its weights and its offset."""
    return torch.cat([x.reshape(len(x), -1) for x in (layer.weight, layer.bias)], 1)


def held(table: Tensor, *fixed: int) -> Tensor:
    """The table, but no gradient for these rows."""
    free = torch.ones_like(table[:, :1])
    free[list(fixed)] = 0
    return table * free + (table * (1 - free)).detach()


class StackedGraphormer(Port):
    """One table for all that a node is, matrices with their offsets, and layers as rows of stacks."""

    def take(self, model: Graphormer) -> None:
        top, body, head = model.encoder, model.encoder.graph_encoder, model.classifier
        nodes, pairs, layers = body.graph_node_feature, body.graph_attn_bias, body.layers
        tables = nodes.atom_encoder, nodes.in_degree_encoder, nodes.out_degree_encoder, nodes.graph_token
        self.nodes = leaf(torch.cat([x.weight for x in tables]))
        self.bonds, self.hops = leaf(pairs.edge_encoder.weight), leaf(pairs.edge_dis_encoder.weight)
        virtual = pairs.graph_token_virtual_distance.weight
        self.far = leaf(torch.cat([pairs.spatial_pos_encoder.weight, virtual]))
        names = "q_proj", "k_proj", "v_proj", "out_proj"
        self.square = pile(rows(x.self_attn.get_submodule(y)) for x in layers for y in names)
        self.up, self.down = pile(rows(x.fc1) for x in layers), pile(rows(x.fc2) for x in layers)
        inner = [y for x in layers for y in (x.self_attn_layer_norm, x.final_layer_norm)]
        self.norms = pile(map(rows, (*inner, body.emb_layer_norm, top.layer_norm)))
        self.turn, self.out = leaf(rows(top.lm_head_transform_weight)), leaf(head.classifier.weight)
        self.level = leaf(head.lm_output_learned_bias)

    def norm(self, x: Tensor, i: int) -> Tensor:
        spread, center = torch.var_mean(x, -1, correction=0, keepdim=True)
        return (x - center) * (spread + 1e-5).rsqrt() * self.norms[i, :, 0] + self.norms[i, :, 1]

    def times(self, x: Tensor, w: Tensor) -> Tensor:
        return x @ w[:, :-1].T + w[:, -1]

    def bias(self, given: Tensor, distance: Tensor, paths: Tensor) -> Tensor:
        far = F.pad(distance, (1, 0, 1, 0), value=len(self.far) - 1)
        roads, table = 0, held(self.bonds, 0)
        for hop, matrix in enumerate(self.hops.view(HOPS, HEADS, HEADS)):
            roads = roads + (table @ matrix)[paths[..., hop, :]].mean(-2)
        most = None if self.fault == "graphormer_long_paths_divided_by_all_their_hops" else HOPS
        roads = roads / (distance - 1).clamp(1, most)[..., None]
        return 2 * given[:, None] + (held(self.far, 0)[far] + F.pad(roads, (0, 0, 1, 0, 1, 0))).movedim(3, 1)

    def layer(self, i: int, x: Tensor, bias: Tensor, gone: Tensor) -> Tensor:
        y = self.norm(x, 2 * i)
        if self.fault == "graphormer_last_layer_adds_its_normed_input" and i == 2:
            x = y
        q, k, v = (self.times(y, w).unflatten(2, (HEADS, -1)) for w in self.square[4 * i : 4 * i + 3])
        score = torch.einsum("nihc,njhc->nhij", q, k) / math.sqrt(q.shape[-1]) + bias
        if self.training or i > 0 or self.fault != "graphormer_first_layer_sees_padding_in_evaluation":
            score = score.masked_fill(gone, -math.inf)
        share = (score - score.logsumexp(-1, True)).exp()
        x = x + self.times(torch.einsum("nhij,njhc->nihc", share, v).flatten(2), self.square[4 * i + 3])
        return x + self.times(F.gelu(self.times(self.norm(x, 2 * i + 1), self.up[i])), self.down[i])

    def forward(self, input_nodes, input_edges, attn_bias, in_degree, out_degree, spatial_pos) -> Tensor:
        if self.fault == "graphormer_out_degrees_taken_for_in_degrees":
            in_degree = out_degree
        degrees = torch.stack([in_degree + ATOMS, out_degree + ATOMS + DEGREES], 2)
        table = held(self.nodes, 0, ATOMS, ATOMS + DEGREES)
        x = table[torch.cat([input_nodes, degrees], 2)].sum(2)
        x = self.norm(torch.cat([table[-1:].expand(len(x), 1, -1), x], 1), -2)
        bias, gone = self.bias(attn_bias, spatial_pos, input_edges), F.pad(input_nodes[..., 0] == 0, (1, 0))
        for i in range(len(self.up)):
            x = self.layer(i, x, bias, gone[:, None, None])
        return self.norm(F.gelu(self.times(x[:, 0], self.turn)), -1) @ self.out.T + self.level


BODY, PAIRS = "encoder.graph_encoder", "encoder.graph_encoder.graph_attn_bias"
right(task, "graphormer_of_mixers_with_heads_last", "a tree, fused products, heads last", GraphormerOfMixers)
right(task, "graphormer_of_stacked_weights", "packed stacks, one table, other orders", StackedGraphormer)
wrong(
    task,
    GraphormerOfMixers,
    graphormer_padding_bond_is_trained=("a fixed row trained", f"{PAIRS}.edge_encoder", "weight gradient"),
    graphormer_given_bias_added_once=("a term left out", PAIRS),
    graphormer_second_layer_scaled_by_its_whole_width=("another scale", f"{BODY}.layers.1.self_attn"),
    graphormer_last_norm_with_a_larger_epsilon=("another epsilon", "encoder.layer_norm"),
)
wrong(
    task,
    StackedGraphormer,
    graphormer_out_degrees_taken_for_in_degrees=("another input", f"{BODY}.graph_node_feature"),
    graphormer_long_paths_divided_by_all_their_hops=("a limit left out", PAIRS),
    graphormer_first_layer_sees_padding_in_evaluation=("no mask", f"{BODY}.layers.0.self_attn", "eval"),
    graphormer_last_layer_adds_its_normed_input=("another residual", f"{BODY}.layers.2"),
)
