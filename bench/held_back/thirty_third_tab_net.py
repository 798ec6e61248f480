"""Two ports of a small TabNet: a tree with an axis of virtual batches, and flat code with features first."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _thirty_third_tab_net as given
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("thirty_third_tab_net", given.TabNet, given.tables, given.classes_and_sparsity)
EPSILON, GAMMA, N_D, VIRTUAL = given.EPSILON, given.GAMMA, given.N_D, given.VIRTUAL


class Standard(nn.Module):
    def __init__(self, norm: nn.Module, part: slice = slice(None)):
        super().__init__()
        self.rate, self.eps, self.biased = norm.momentum, norm.eps, False
        self.gain, self.offset = leaf(norm.weight[part]), leaf(norm.bias[part])
        self.register_buffer("mean", norm.running_mean[part].clone())
        self.register_buffer("var", norm.running_var[part].clone())

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return (x - self.mean) * (self.gain * (self.var + self.eps).rsqrt()) + self.offset
        var, mean = torch.var_mean(x, 1, correction=0, keepdim=True)
        kept = var if self.biased else var * x.shape[1] / (x.shape[1] - 1)
        with torch.no_grad():
            for one, other in zip(mean[:, 0], kept[:, 0], strict=True):
                self.mean.lerp_(one, self.rate)
                self.var.lerp_(other, self.rate)
        return (x - mean) / (var + self.eps).sqrt() * self.gain + self.offset


class Gated(nn.Module):
    def __init__(self, pair: nn.Parameter, norm: nn.Module):
        super().__init__()
        half = len(norm.weight) // 2
        self.pair = pair
        self.left, self.right = Standard(norm, slice(half)), Standard(norm, slice(half, None))

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x @ self.pair[0]) * self.right(x @ self.pair[1]).sigmoid()


class Ladder(nn.Module):
    def __init__(self, block: nn.Module, pairs: list[nn.Parameter]):
        super().__init__()
        own = block.specifics.glu_layers
        pairs = [*pairs, *(pile(half.T for half in layer.fc.weight.chunk(2)) for layer in own)]
        norms = [layer.bn.bn for layer in (*block.shared.glu_layers, *own)]
        self.rungs, self.early = nn.ModuleList(map(Gated, pairs, norms)), False

    def forward(self, x: Tensor) -> Tensor:
        x = self.rungs[0](x) / (math.sqrt(2) if self.early else 1)
        for rung in self.rungs[1:]:
            x = (x + rung(x)) / math.sqrt(2)
        return x


class Chooser(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        self.ask, self.norm, self.fixed = leaf(block.fc.weight.T), Standard(block.bn.bn), False

    def forward(self, x: Tensor, left: Tensor) -> Tensor:
        z = self.norm(x @ self.ask) * left
        ordered = z.sort(-1, descending=True).values
        cuts = (ordered.cumsum(-1) - 1) / torch.arange(1, z.shape[-1] + 1).to(z)
        cut = cuts.gather(-1, (ordered > cuts).sum(-1, keepdim=True) - 1)
        return F.relu(z - (cut.detach() if self.fixed else cut))


class TabNetOfVirtualBatches(Port):
    def take(self, model: given.TabNet) -> None:
        net, fault = model.tabnet.encoder, self.fault
        shared = net.initial_splitter.shared.glu_layers
        pairs = [pile(half.T for half in layer.fc.weight.chunk(2)) for layer in shared]
        self.books = nn.ParameterList(leaf(table.weight) for table in model.embedder.embeddings)
        self.entry, self.start = Standard(net.initial_bn), Ladder(net.initial_splitter, pairs)
        self.choosers = nn.ModuleList(map(Chooser, net.att_transformers))
        self.ladders = nn.ModuleList(Ladder(block, pairs) for block in net.feat_transformers)
        self.head = leaf(model.tabnet.final_mapping.weight.T)
        self.register_buffer("column", net.group_attention_matrix.argmax(0))
        self.entry.biased = fault == "tab_net_initial_norm_keeps_the_biased_variance"
        self.ladders[1].early = fault == "tab_net_second_step_scales_its_first_shared_layer_too"
        self.choosers[2].fixed = fault == "tab_net_last_sparsemax_takes_its_threshold_for_a_constant"

    def forward(self, x: Tensor, categories: Tensor) -> tuple[Tensor, Tensor]:
        columns = list(x.split(1, 2))
        for at, book, codes in zip(given.CAT_IDXS, self.books, categories.unbind(2), strict=True):
            columns.insert(at, F.embedding(codes, book))
        x = self.entry(torch.cat(columns, 2).flatten(0, 1)[None])[0].unflatten(0, (-1, VIRTUAL))
        seen, left, logits, entropy = self.start(x)[..., N_D:], 1, 0, 0
        for i, (chooser, ladder) in enumerate(zip(self.choosers, self.ladders, strict=True)):
            mask = chooser(seen, left)
            entropy = entropy - (mask * (mask + EPSILON).log()).sum(2).mean()
            forgets = self.fault == "tab_net_second_prior_forgets_the_first_mask" and i == 1
            left = (GAMMA - mask) if forgets else left * (GAMMA - mask)
            y = ladder(x * mask[..., self.column] / self.column.bincount()[self.column])
            logits, seen = logits + y[..., :N_D].clamp(min=0) @ self.head, y[..., N_D:]
        return logits.flatten(0, 1).unflatten(0, categories.shape[:2]), -entropy / len(self.ladders)


def packed(norms: list[nn.Module]) -> tuple[nn.Parameter, Tensor]:
    kept = torch.stack([torch.stack([norm.running_mean, norm.running_var]) for norm in norms])
    return pile(torch.stack([norm.weight, norm.bias]) for norm in norms), kept


class PackedTabNet(Port):
    def take(self, model: given.TabNet) -> None:
        net = model.tabnet.encoder
        blocks = (net.initial_splitter, *net.feat_transformers)
        layers = [x for b in blocks for x in (*b.shared.glu_layers, *b.specifics.glu_layers)]
        self.first, self.second = (leaf(layer.fc.weight) for layer in layers[:2])
        self.own = pile(x.fc.weight for b in blocks for x in b.specifics.glu_layers)
        self.asks = pile(block.fc.weight for block in net.att_transformers)
        groups = {"glu": [x.bn.bn for x in layers], "ask": [x.bn.bn for x in net.att_transformers]}
        self.norms = nn.ParameterDict()
        for key, norms in (groups | {"in": [net.initial_bn]}).items():
            self.norms[key], kept = packed(norms)
            self.register_buffer(f"kept_{key}", kept)
        self.book = leaf(torch.cat([table.weight.flatten() for table in model.embedder.embeddings]))
        self.head = leaf(model.tabnet.final_mapping.weight)
        self.register_buffer("spread", net.group_attention_matrix.T.clone())

    def norm(self, x: Tensor, key: str, i: int, size: int = VIRTUAL, rate: float = 0.02, eps: float = 1e-5):
        (gain, offset), kept = self.norms[key][i], self.get_buffer(f"kept_{key}")[i]
        x = x.unflatten(1, (-1, size))
        mean, var = kept[:, :, None, None]
        if self.training:
            var, mean = torch.var_mean(x, 2, correction=0, keepdim=True)
            with torch.no_grad():
                fading = rate * (1 - rate) ** torch.arange(x.shape[1]).flip(0).to(x)
                new = torch.stack([mean[..., 0], var[..., 0] * size / (size - 1)]) @ fading
                kept.mul_((1 - rate) ** x.shape[1]).add_(new)
        slope = gain[:, None, None] / (var + eps).sqrt()
        return (x * slope + (offset[:, None, None] - mean * slope)).flatten(1)

    def features(self, x: Tensor, i: int) -> Tensor:
        for j, weight in enumerate((self.first, self.second, self.own[2 * i], self.own[2 * i + 1])):
            loose = self.fault == "tab_net_first_step_last_norm_with_a_larger_epsilon" and (i, j) == (1, 3)
            value, gate = self.norm(weight @ x, "glu", 4 * i + j, eps=1e-3 if loose else 1e-5).tensor_split(2)
            y = value / (1 + torch.exp(-gate))
            x = (x + y) * 0.5**0.5 if j else y
        return x

    def mask(self, x: Tensor, prior: Tensor, i: int) -> Tensor:
        whole = self.fault == "tab_net_first_attention_normed_over_the_whole_batch" and i == 0
        z = prior * self.norm(self.asks[i] @ x, "ask", i, x.shape[1] if whole else VIRTUAL)
        kept = torch.ones_like(z)
        for _ in range(len(z)):
            cut = ((z * kept).sum(0) - 1) / kept.sum(0)
            kept = (z > cut).to(z) * kept
        return (z - cut) * kept

    def forward(self, x: Tensor, categories: Tensor) -> tuple[Tensor, Tensor]:
        columns, start, sizes = [*x.flatten(0, 1).T[:, None]], 0, (given.CAT_DIMS, given.CAT_EMB_DIMS)
        for k, (at, count, width) in enumerate(zip(given.CAT_IDXS, *sizes, strict=True)):
            low = self.fault == "tab_net_second_category_clamped_below_its_last_code" and k == 1
            codes = categories[..., k].flatten().clamp(max=count - (2 if low else 1))
            columns.insert(at, self.book[start : start + count * width].view(count, width).T[:, codes])
            start += count * width
        h = self.norm(torch.cat(columns), "in", 0, x.shape[0] * x.shape[1], 0.01)
        y, prior, total, sparsity = self.features(h, 0), 1, 0, 0
        for i in range(len(self.asks)):
            mask = self.mask(y[N_D:], prior, i)
            sparsity = sparsity + (mask * torch.log(mask + EPSILON)).sum() / h.shape[1]
            prior = GAMMA * prior - mask * prior
            y = self.features(self.spread @ mask * h, i + 1)
            bare = self.fault == "tab_net_last_decision_not_rectified" and i == 2
            total = total + (y[:N_D] if bare else y[:N_D].relu())
        return (self.head @ total).T.unflatten(0, x.shape[:2]), sparsity / len(self.asks)


SLOPES, ENCODER = ("input gradient", "weight gradient"), "tabnet.encoder"
SECOND, LAST = f"{ENCODER}.feat_transformers.1.shared", f"{ENCODER}.att_transformers.2.selector"
FIRST = f"{ENCODER}.feat_transformers.0.specifics.glu_layers.1.bn.bn"
right(task, "tab_net_of_virtual_batches", "a tree, split gates, an axis of batches", TabNetOfVirtualBatches)
right(task, "tab_net_packed_with_features_first", "stacks, features first, fused norms", PackedTabNet)
wrong(
    task,
    TabNetOfVirtualBatches,
    tab_net_initial_norm_keeps_the_biased_variance=("variance", f"{ENCODER}.initial_bn", "buffer"),
    tab_net_second_prior_forgets_the_first_mask=("a product left out", ENCODER),
    tab_net_second_step_scales_its_first_shared_layer_too=("a factor too many", SECOND),
    tab_net_last_sparsemax_takes_its_threshold_for_a_constant=("detach", LAST, SLOPES),
)
wrong(
    task,
    PackedTabNet,
    tab_net_second_category_clamped_below_its_last_code=("clamp", ("embedder", "embedder.embeddings.1")),
    tab_net_first_step_last_norm_with_a_larger_epsilon=("another epsilon", FIRST),
    tab_net_first_attention_normed_over_the_whole_batch=("batch", f"{ENCODER}.att_transformers.0.bn"),
    tab_net_last_decision_not_rectified=("an activation left out", ENCODER),
)
