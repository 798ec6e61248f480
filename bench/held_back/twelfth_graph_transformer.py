"""Two ports of a Graphormer: padded graphs through other modules, and all their real tokens in one row."""

import math
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twelfth_graph_transformer import GraphormerForGraphsAndNodes, both, collated

task = few("twelfth_graph_transformer", GraphormerForGraphsAndNodes, collated, both)


class Settled(nn.Module):
    """The norm of what a body adds to its input, or of the input alone."""

    def __init__(self, norm: nn.LayerNorm, body: nn.Module | None = None):
        super().__init__()
        self.body, self.gain, self.shift, self.eps = body, leaf(norm.weight), leaf(norm.bias), norm.eps

    def forward(self, x: Tensor, *sides: Tensor) -> Tensor:
        x = x if self.body is None else x + self.body(x, *sides)
        return F.layer_norm(x, x.shape[-1:], self.gain, self.shift, self.eps)


class Atoms(nn.Module):
    """One table of kinds and degrees; the graph's own token in front; the first norm."""

    def __init__(self, encoder: nn.Module):
        super().__init__()
        feature = encoder.graph_node_feature
        tables = [getattr(feature, f"{x}_encoder").weight for x in ("atom", "in_degree", "out_degree")]
        self.starts = (len(tables[0]), len(tables[0]) + len(tables[1]))
        self.table, self.token = leaf(torch.cat(tables)), leaf(feature.graph_token.weight[0])
        self.settled, self.noisy_only_in_training = Settled(encoder.emb_layer_norm), False

    def forward(self, kinds: Tensor, entering: Tensor, leaving: Tensor, noise: Tensor) -> Tensor:
        rows = torch.stack([*kinds.unbind(-1), entering + self.starts[0], leaving + self.starts[1]], -1)
        x = F.embedding_bag(rows.flatten(0, 1), self.table, mode="sum").unflatten(0, kinds.shape[:2])
        x = x + noise if self.training or not self.noisy_only_in_training else x
        return self.settled(torch.cat([self.token.expand(len(x), 1, -1), x], 1))


class Paths(nn.Module):
    """The bias of pairs; what an edge adds at each hop is looked up in a table made beforehand."""

    def __init__(self, bias: nn.Module):
        super().__init__()
        self.lengths, self.edges = leaf(bias.spatial_pos_encoder.weight), leaf(bias.edge_encoder.weight)
        self.hops = leaf(bias.edge_dis_encoder.weight.view(-1, bias.num_heads, bias.num_heads))
        self.token, self.counted_twice = leaf(bias.graph_token_virtual_distance.weight[0]), False

    def forward(self, prior: Tensor, lengths: Tensor, edges: Tensor) -> Tensor:
        table = torch.cat([self.edges[:1].detach(), self.edges[1:]])
        table, reach = (table @ self.hops).flatten(0, 1), len(self.hops)
        starts = len(self.edges) * torch.arange(reach, device=edges.device)
        on_path = F.embedding(edges[..., :reach, :] + starts[:, None], table).sum((3, 4))
        on_path = on_path / (edges.shape[-1] * (lengths - 1).clamp(1, reach))[..., None]
        inner = F.pad(F.embedding(lengths, self.lengths, padding_idx=0) + on_path, (0, 0, 1, 0, 1, 0))
        first = (torch.arange(prior.shape[1], device=prior.device) == 0).to(prior)
        touched = (torch.add if self.counted_twice else torch.maximum)(first, first[:, None])
        return (inner + touched[..., None] * self.token).permute(0, 3, 1, 2) + 2 * prior[:, None]


class Attend(nn.Module):
    """Attention of [B, T, C]; query, key and value of a head lie side by side."""

    def __init__(self, attn: nn.Module):
        super().__init__()
        self.heads, parts = attn.num_heads, (attn.q_proj, attn.k_proj, attn.v_proj)
        cut = [(x.weight.unflatten(0, (self.heads, -1)), x.bias.view(self.heads, -1)) for x in parts]
        self.weight, self.bias = (leaf(torch.stack(x, 1).flatten(0, 2)) for x in zip(*cut, strict=True))
        self.out, self.sees_all = deepcopy(attn.out_proj), False

    def forward(self, x: Tensor, bias: Tensor, hidden: Tensor) -> Tensor:
        q, k, v = F.linear(x, self.weight, self.bias).unflatten(2, (self.heads, 3, -1)).permute(3, 0, 2, 1, 4)
        bias = bias if self.sees_all else bias.masked_fill(hidden, -math.inf)
        return self.out(F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).flatten(2))


class GraphsInHalves(Port):
    """Half blocks in turn between what makes tokens and biases and what reads them out."""

    def take(self, model: GraphormerForGraphsAndNodes) -> None:
        whole, heads = model.encoder, (model.classifier, model.node_classifier)
        self.atoms, self.paths = Atoms(whole.graph_encoder), Paths(whole.graph_encoder.graph_attn_bias)
        self.mixes, self.thinks = nn.ModuleList(), nn.ModuleList()
        for x in whole.graph_encoder.layers:
            self.mixes.append(Settled(x.self_attn_layer_norm, Attend(x.self_attn)))
            think = nn.Sequential(x.fc1, nn.GELU(), x.fc2)
            self.thinks.append(Settled(x.final_layer_norm, deepcopy(think)))
        self.settled, self.last = Settled(whole.layer_norm), deepcopy(whole.lm_head_transform_weight)
        self.heads = pile(x.classifier.weight[0] for x in heads)
        self.heads_b = pile(x.lm_output_learned_bias[0] for x in heads)
        self.paths.counted_twice = self.fault == "graphormer_virtual_distance_twice_from_token_to_itself"
        self.mixes[-1].body.sees_all = self.fault == "graphormer_padded_atoms_are_keys_in_last_block"
        self.atoms.noisy_only_in_training = self.fault == "graphormer_perturbation_skipped_in_evaluation"

    def forward(self, input_nodes: Tensor, **graphs: Tensor) -> tuple[Tensor, Tensor]:
        empty = input_nodes[..., 0] == 0
        hidden = F.pad(empty, (1, 0))[:, None, None]
        bias = self.paths(graphs["attn_bias"], graphs["spatial_pos"], graphs["input_edges"])
        x = self.atoms(input_nodes, graphs["in_degree"], graphs["out_degree"], graphs["perturb"])
        for mix, think in zip(self.mixes, self.thinks, strict=True):
            x = think(mix(x, bias, hidden))
        early = self.fault == "graphormer_head_normed_before_its_activation"
        x = F.gelu(self.settled(self.last(x))) if early else self.settled(F.gelu(self.last(x)))
        (graph, node), (graph_b, node_b) = self.heads, self.heads_b
        return x[:, 0] @ graph + graph_b, (x[:, 1:] @ node + node_b) * ~empty


class TokensInOneRow(Port):
    """The tokens of all graphs in one row without the padding; pairs of different graphs do not meet."""

    def take(self, model: GraphormerForGraphsAndNodes) -> None:
        encoder, heads = model.encoder.graph_encoder, (model.classifier, model.node_classifier)
        layers, feature, bias = encoder.layers, encoder.graph_node_feature, encoder.graph_attn_bias
        attns, count = [x.self_attn for x in layers], layers[0].self_attn.num_heads
        own = [p for x in attns for p in (x.q_proj, x.k_proj, x.v_proj)]
        self.qkv = leaf(pile(p.weight.unflatten(0, (count, -1)) for p in own).unflatten(0, (-1, 3)))
        self.qkv_b = leaf(pile(p.bias.view(count, 1, -1) for p in own).unflatten(0, (-1, 3)))
        self.out = pile(x.out_proj.weight.T.unflatten(0, (count, -1)) for x in attns)
        self.up, self.up_b = pile(x.fc1.weight.T for x in layers), pile(x.fc1.bias for x in layers)
        self.down = pile(x.fc2.weight.T for x in layers)
        self.offsets = pile(torch.stack([x.self_attn.out_proj.bias, x.fc2.bias]) for x in layers)
        norms = [n for x in layers for n in (x.self_attn_layer_norm, x.final_layer_norm)]
        norms = [encoder.emb_layer_norm, *norms, model.encoder.layer_norm]
        self.gains, self.shifts = pile(x.weight for x in norms), pile(x.bias for x in norms)
        self.atoms, self.token = leaf(feature.atom_encoder.weight), leaf(feature.graph_token.weight)
        self.degrees = pile([feature.in_degree_encoder.weight, feature.out_degree_encoder.weight])
        self.edges, self.spatial = leaf(bias.edge_encoder.weight), leaf(bias.spatial_pos_encoder.weight)
        self.hops = leaf(bias.edge_dis_encoder.weight.view(-1, count, count))
        self.virtual = leaf(bias.graph_token_virtual_distance.weight[0])
        last = model.encoder.lm_head_transform_weight
        self.last, self.last_b = leaf(last.weight.T), leaf(last.bias)
        self.heads = leaf(torch.cat([x.classifier.weight for x in heads]).T)
        self.heads_b = leaf(torch.cat([x.lm_output_learned_bias for x in heads]))

    def normed(self, i: int, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * self.gains[i] + self.shifts[i]

    def pairs(self, prior: Tensor, lengths: Tensor, edges: Tensor) -> Tensor:
        reach, table = len(self.hops), self.edges
        if self.fault != "graphormer_padding_row_of_edges_learns":
            table = torch.cat([table[:1].detach(), table[1:]])
        inner = torch.einsum("bijkfh,khg->bijg", table[edges[:, :, :, :reach]], self.hops) / edges.shape[4]
        inner = self.spatial[lengths] + inner / (lengths - 1).clamp(1, reach)[..., None]
        bias = torch.cat([self.virtual.expand(*inner.shape[:2], 1, -1), inner], 2)
        return torch.cat([self.virtual.expand_as(bias[:, :1]), bias], 1) + 2 * prior[..., None]

    def block(self, i: int, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = torch.einsum("sc,ahdc->ahsd", x, self.qkv[i]) + self.qkv_b[i]
        scale = q.shape[-1] ** -0.5
        late = self.fault == "graphormer_pair_bias_scaled_with_scores_in_middle_block" and i == 1
        scores = (q @ k.mT + bias) * scale if late else torch.baddbmm(bias, q, k.mT, alpha=scale)
        x = x + torch.einsum("hts,hsd,hdc->tc", scores.softmax(2), v, self.out[i]) + self.offsets[i, 0]
        y = self.normed(2 * i + 1, x)
        change = F.gelu(y @ self.up[i] + self.up_b[i]) @ self.down[i] + self.offsets[i, 1]
        around = self.fault == "graphormer_first_block_goes_around_its_attention_norm" and i == 0
        return self.normed(2 * i + 2, (x if around else y) + change)

    def forward(self, input_nodes: Tensor, **graphs: Tensor) -> tuple[Tensor, Tensor]:
        graph, place = F.pad(input_nodes[..., 0] != 0, (1, 0), value=True).nonzero().unbind(1)
        same = self.fault == "graphormer_both_degree_tables_read_by_the_in_degree"
        entering, leaving = graphs["in_degree"], graphs["in_degree" if same else "out_degree"]
        x = self.atoms[input_nodes].sum(2) + self.degrees[0, entering] + self.degrees[1, leaving]
        x = torch.cat([self.token.expand(len(x), 1, -1), x + graphs["perturb"]], 1)
        shape, x = x.shape[:2], self.normed(0, x[graph, place])
        bias = self.pairs(graphs["attn_bias"], graphs["spatial_pos"], graphs["input_edges"])
        bias = bias[graph[:, None], place[:, None], place].movedim(2, 0)
        bias = bias.masked_fill(graph[:, None] != graph, -math.inf)
        for i in range(len(self.qkv)):
            x = self.block(i, x, bias)
        x = self.normed(-1, F.gelu(x @ self.last + self.last_b))
        values = x @ self.heads + self.heads_b
        nodes = values.new_zeros(shape).index_put((graph, place), values[:, 1])
        return values[place == 0, 0], nodes[:, 1:]


right(task, "graphormer_of_half_blocks", "a tree of other modules", GraphsInHalves, True)
right(task, "graphormer_of_tokens_in_one_row", "flat code, packed tokens", TokensInOneRow, True)
ENCODER = "encoder.graph_encoder"
BIAS, FEATURE, LAYERS = (f"{ENCODER}.{x}" for x in ("graph_attn_bias", "graph_node_feature", "layers"))
DEGREE, LAST = (FEATURE, f"{FEATURE}.out_degree_encoder"), (f"{LAYERS}.2.self_attn", f"{LAYERS}.2")
wrong(
    task,
    GraphsInHalves,
    graphormer_virtual_distance_twice_from_token_to_itself=("added twice where slices meet", BIAS),
    graphormer_padded_atoms_are_keys_in_last_block=("a mask left out", LAST),
    graphormer_perturbation_skipped_in_evaluation=("a term of training only", ENCODER, "eval"),
    graphormer_head_normed_before_its_activation=("two steps in the other order", "encoder"),
)
wrong(
    task,
    TokensInOneRow,
    graphormer_both_degree_tables_read_by_the_in_degree=("one input used for two", DEGREE),
    graphormer_padding_row_of_edges_learns=("padding row learns", f"{BIAS}.edge_encoder", "weight gradient"),
    graphormer_pair_bias_scaled_with_scores_in_middle_block=("scaled after a sum", f"{LAYERS}.1.self_attn"),
    graphormer_first_block_goes_around_its_attention_norm=("residual from before a norm", f"{LAYERS}.0"),
)
