"""Ports of a ranking network: a tree of modules with the history time first, and one of fused weights."""

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._ninth_recommender import Recommender, entropy, impressions
from bench.held_back._sixth_ports import few

ranked = few("ninth_recommender", Recommender, impressions, entropy)


class Lookup(Port):
    """The rows of all tables; of items and kinds, the candidate's first and then those of the history."""

    def take(self, sparse: nn.Module) -> None:
        self.rows, self.tags = deepcopy(sparse.embedding_dict), deepcopy(sparse.embedding_bags["tags"])
        if self.fault == "padding_row_of_the_items_learns":
            self.rows["item"].padding_idx = None

    def forward(self, ids: Tensor, history: Tensor, bag: dict[str, Tensor]) -> tuple[list[Tensor], Tensor]:
        (user, item, kind, hour), (items, kinds) = ids.T, history.permute(2, 1, 0)
        items = self.rows["item"](torch.cat([item[None], items]))
        kinds = self.rows["category"](torch.cat([kind[None], kinds]))
        tags = self.tags(bag["tags"], bag["offsets"], bag["weights"])
        fields = [self.rows["user"](user), items[0], kinds[0], self.rows["hour"](hour), tags]
        return fields, torch.cat([items, kinds], 2)


class Gate(Port):
    """Dice over the last axis of [T, N, C]."""

    def take(self, dice: nn.Module) -> None:
        self.norm, self.low = deepcopy(dice.bn), leaf(dice.alpha)

    def forward(self, x: Tensor) -> Tensor:
        high = self.norm(x.flatten(0, 1)).sigmoid().view_as(x)
        return x * (self.low + (1 - self.low) * high)


class Reader(Port):
    """What the history [T, N, C] says of the candidate [N, C]."""

    def take(self, model: Recommender) -> None:
        first, low, second, high = model.attention.local_att.dnn
        self.parts, self.shift = pile(first.weight.T.chunk(4)), leaf(first.bias)
        self.hidden = nn.Sequential(Gate(low), deepcopy(second), Gate(high))
        self.score, self.out = leaf(model.attention.local_att.dense.weight[0]), deepcopy(model.history_proj)

    def forward(self, wanted: Tensor, seen: Tensor, mask: Tensor) -> Tensor:
        difference = wanted - seen
        if self.fault == "candidate_taken_from_the_history_in_the_difference":
            difference = seen - wanted
        given = wanted, seen, difference, wanted * seen
        x = sum(x @ part for x, part in zip(given, self.parts, strict=True))
        scores = self.hidden(x + self.shift) @ self.score
        shares = scores.masked_fill(~mask.T, torch.finfo(scores.dtype).min).softmax(0)
        return self.out((shares[..., None] * seen).sum(0))


class Crossing(Port):
    def take(self, layer: nn.Module) -> None:
        self.down, self.up, self.shift = leaf(layer.v.weight.T), leaf(layer.w.weight.T), leaf(layer.w.bias)

    def forward(self, start: Tensor, x: Tensor) -> Tensor:
        by = x if self.fault == "middle_crossing_by_its_own_input" else start
        return torch.addcmul(x, by, x @ self.down @ self.up + self.shift)


class TimeFirst(Port):
    """The network as a tree of modules; the top reads the crossings apart from the dense field and pairs."""

    def take(self, model: Recommender) -> None:
        self.lookup, self.reader = Lookup(model.sparse_arch, self.fault), Reader(model, self.fault)
        parts = [part for x in model.dense_arch for part in (x.linear, x.bn, nn.ReLU())]
        if self.fault == "second_bottom_block_norms_after_its_relu":
            parts[4:] = parts[5], parts[4]
        self.bottom = deepcopy(nn.Sequential(*parts))
        named = zip(model.crossnet.layers, ("", self.fault, ""), strict=True)
        self.crossings = nn.ModuleList(Crossing(layer, fault) for layer, fault in named)
        first, width = model.over_arch[0].linear, model.crossnet.layers[0].v.in_features
        self.of_plain, self.of_crossed = leaf(first.weight[:, :-width].T), leaf(first.weight[:, -width:].T)
        self.top_shift, self.top = leaf(first.bias), deepcopy(model.over_arch[1].linear)
        towers = [nn.Sequential(x[0].linear, nn.ReLU(), x[1]) for x in model.esmm.towers.values()]
        self.click, self.purchase = deepcopy(towers)
        if self.fault == "conversion_tower_without_its_last_shift":
            self.purchase[2].bias = None

    def forward(self, dense: Tensor, ids: Tensor, history: Tensor, mask: Tensor, **bag: Tensor) -> dict:
        fields, words = self.lookup(ids, history, bag)
        dense = self.bottom(dense)
        fields = torch.stack([dense, *fields, self.reader(words[0], words[1:], mask)], 1)
        lower = torch.ones(fields.shape[1], fields.shape[1], dtype=torch.bool, device=dense.device).tril(-1)
        plain = torch.cat([dense, torch.einsum("nic,njc->nij", fields, fields)[:, lower]], 1)
        start = crossed = fields.flatten(1)
        for crossing in self.crossings:
            crossed = crossing(start, crossed)
        x = self.top((plain @ self.of_plain + crossed @ self.of_crossed + self.top_shift).relu()).relu()
        click, purchase = (tower(x)[:, 0].sigmoid() for tower in (self.click, self.purchase))
        return {"click": click, "conversion": purchase * click}


def joined(linear: nn.Linear) -> Tensor:
    """The weight [in, out] with the bias as a last row."""
    return torch.cat([linear.weight.T, linear.bias[None]])


class Fused(Port):
    """One table for all ids, the shifts as last rows of the weights, both chances from one product."""

    def take(self, model: Recommender) -> None:
        tables, unit = [table.weight for table in model.sparse_arch.embedding_dict.values()], model.attention
        (first, low, second, high), cross = unit.local_att.dnn, model.crossnet.layers
        self.starts, towers = [sum(map(len, tables[:i])) for i in range(4)], model.esmm.towers.values()
        weights = {
            "table": torch.cat(tables),
            "tags": model.sparse_arch.embedding_bags["tags"].weight,
            "unit0": joined(first),
            "unit1": joined(second),
            "low": torch.stack([low.alpha, high.alpha]),
            "score": unit.local_att.dense.weight[0],
            "taste": joined(model.history_proj),
            "down": torch.stack([layer.v.weight.T for layer in cross]),
            "up": torch.stack([joined(layer.w) for layer in cross]),
            "towers": torch.stack([joined(tower[0].linear) for tower in towers]),
            "last": torch.stack([joined(tower[1])[:, 0] for tower in towers]),
        }
        for i, (bottom, top) in enumerate(zip(model.dense_arch, model.over_arch, strict=True)):
            weights[f"bottom{i}"], weights[f"top{i}"] = bottom.linear.weight.T, joined(top.linear)
        norms = model.dense_arch[0].bn, model.dense_arch[1].bn, low.bn, high.bn
        for i, norm in enumerate(norms):
            weights[f"norm{i}"] = torch.stack([norm.weight, norm.bias])
            self.register_buffer(f"mean{i}", norm.running_mean.clone())
            self.register_buffer(f"spread{i}", norm.running_var.clone())
        self.w, self.eps = nn.ParameterDict({k: leaf(w) for k, w in weights.items()}), [n.eps for n in norms]

    def normed(self, i: int, x: Tensor) -> Tensor:
        kept, own = (getattr(self, f"mean{i}"), getattr(self, f"spread{i}")), self.training
        if self.fault == "second_dice_by_the_batch_in_eval" and i == 3 and not self.training:
            kept, own = (None, None), True
        return F.batch_norm(x.flatten(0, -2), *kept, *self.w[f"norm{i}"], own, 0.1, self.eps[i]).view_as(x)

    def affine(self, name: str, x: Tensor) -> Tensor:
        return x @ self.w[name][:-1] + self.w[name][-1]

    def forward(self, dense: Tensor, ids: Tensor, history: Tensor, mask: Tensor, **bag: Tensor) -> dict:
        w, starts = self.w, ids.new_tensor(self.starts)
        spots = torch.cat([ids + starts, (history + starts[1:3]).flatten(1)], 1)
        filler, rows = ((spots == starts[1]) | (spots == starts[2]))[..., None], w["table"][spots]
        rows = torch.where(filler, rows.detach(), rows)
        seen, wanted = rows[:, 4:].reshape(*mask.shape, -1), rows[:, None, 1:3].flatten(2)
        owner = (bag["offsets"][:, None] <= torch.arange(len(bag["tags"]), device=ids.device)).sum(0) - 1
        parts = dense.new_zeros(len(ids), len(w["tags"]))
        parts = parts.index_put((owner, bag["tags"]), bag["weights"], accumulate=True)
        if self.fault == "tags_averaged_by_their_weights":
            parts = parts / parts.sum(1, keepdim=True).clamp(min=1e-9)
        x = torch.cat([wanted.expand_as(seen), seen, wanted - seen, wanted * seen], 2)
        for i in range(2):
            x, dense = self.affine(f"unit{i}", x), self.normed(i, dense @ w[f"bottom{i}"]).relu()
            x = torch.lerp(w["low"][i] * x, x, self.normed(2 + i, x).sigmoid())
        shares = (x @ w["score"]).masked_fill(~mask, torch.finfo(x.dtype).min).softmax(1)
        taste = self.affine("taste", torch.einsum("nt,ntc->nc", shares, seen))
        fields = torch.cat([dense[:, None], rows[:, :4], torch.stack([parts @ w["tags"], taste], 1)], 1)
        pairs = [(i, j) for i in range(7) for j in range(i)]
        if self.fault == "pairs_in_the_order_of_the_upper_triangle":
            pairs = [(i, j) for i in range(7) for j in range(i + 1, 7)]
        left, other = map(list, zip(*pairs, strict=True))
        start = x = fields.flatten(1)
        for down, up in zip(w["down"], w["up"], strict=True):
            x = x + start * (x @ down @ up[:-1] + up[-1])
        x = torch.cat([dense, (fields[:, left] * fields[:, other]).sum(2), x], 1)
        x = self.affine("top1", self.affine("top0", x).relu()).relu()
        x = (torch.einsum("nc,kch->knh", x, w["towers"][:, :-1]) + w["towers"][:, -1:]).relu()
        chances = (torch.einsum("knh,kh->kn", x, w["last"][:, :-1]) + w["last"][:, -1:]).sigmoid()
        return dict(zip(("click", "conversion"), chances.cumprod(0), strict=True))


right(ranked, "history_first_axis_and_parts_of_the_unit", "a tree of modules, time first", TimeFirst)
right(ranked, "one_table_and_shifts_in_the_weights", "fused tables and joined weights", Fused)
wrong(
    ranked,
    TimeFirst,
    padding_row_of_the_items_learns=("padding learns", "sparse_arch.embedding_dict.item", "weight gradient"),
    second_bottom_block_norms_after_its_relu=("norm and relu swapped", ("dense_arch.1", "dense_arch.1.bn")),
    candidate_taken_from_the_history_in_the_difference=("sign of a difference", "attention.local_att"),
    middle_crossing_by_its_own_input=("another operand in a product", "crossnet.layers.1"),
    conversion_tower_without_its_last_shift=("a bias left behind", "esmm.towers.conversion.1"),
)
wrong(
    ranked,
    Fused,
    tags_averaged_by_their_weights=("mean instead of a sum", "sparse_arch.embedding_bags.tags"),
    second_dice_by_the_batch_in_eval=("statistics of the batch", "attention.local_att.dnn.3.bn", "eval"),
    pairs_in_the_order_of_the_upper_triangle=("another order of the pairs", "inter_arch"),
)
