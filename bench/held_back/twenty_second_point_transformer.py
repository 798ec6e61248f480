"""Two ports of a Point Transformer: a tree over one table of distances, and packed rows in one class."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _twenty_second_point_transformer as theirs
from bench.held_back._fifth_vision import filled, right
from bench.held_back._fourth_ports import Port, Rows, leaf, pile, wrong
from bench.held_back._sixth_ports import few

SIZES, STRIDES, SHARE = theirs.NSAMPLE, theirs.STRIDES, theirs.SHARE
task = few("twenty_second_point_transformer", theirs.PointTransformerSeg, theirs.scenes, theirs.parted)


def at(x: Tensor, numbers: Tensor) -> Tensor:
    return torch.stack([cloud[mine] for cloud, mine in zip(x, numbers, strict=True)])


def linear(*convs: nn.Module) -> nn.Linear:
    weight, bias = torch.cat([conv.weight.flatten(1) for conv in convs]), convs[0].bias
    return filled(nn.Linear(*weight.mT.shape, bias is not None), weight, bias)


def project(conv: nn.Module, norm: nn.Module, *rest: nn.Module) -> nn.Sequential:
    return nn.Sequential(linear(conv), Rows(norm), nn.ReLU(), *map(linear, rest))


class Refine(nn.Module):
    def __init__(self, old: nn.Module):
        super().__init__()
        look, self.beside, self.measured = old.transformer2, False, False
        self.into, self.seen, self.after = project(old.linear1, old.bn1), Rows(old.bn2), Rows(old.bn3)
        self.three, self.out = linear(look.linear_q, look.linear_k, look.linear_v), linear(old.linear3)
        self.place, self.lift = project(*look.linear_p[:2]), linear(look.linear_p[3])
        self.before, self.score = Rows(look.linear_w[0]), project(*look.linear_w[2:4], look.linear_w[5])

    def forward(self, x: Tensor, near: Tensor, steps: Tensor) -> Tensor:
        asks, keys, values = self.three(self.into(x)).chunk(3, -1)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.measured):
            place = self.lift(self.place(steps))
        y = self.score(self.before(at(keys, near) + place - asks[:, :, None]).relu()).softmax(2)
        y = y.repeat_interleave(SHARE, 3) if self.beside else y.repeat(1, 1, 1, SHARE)
        y = self.seen(torch.sum((at(values, near) + place) * y, 2)).relu()
        return (x + self.after(self.out(y))).relu()


class TableOfDistances(Port):
    """Distances are measured once, between all points, and picked for each level; channels last."""

    def take(self, model: nn.Module) -> None:
        downs, ups = [model.enc1, model.enc2, model.enc3], [model.dec1, model.dec2, model.dec3]
        self.enter = nn.ModuleList(project(old[0].linear, old[0].bn) for old in downs)
        self.fine, self.back = (nn.ModuleList(Refine(old[1]) for old in side) for side in (downs, ups))
        self.skip = nn.ModuleList(project(*old[0].linear1[:2]) for old in ups)
        self.deep = nn.ModuleList(project(*old[0].linear2[:2]) for old in ups[:2])
        self.ask, self.way = linear(ups[2][0].linear2[0]), linear(model.offset)
        self.score = project(*model.cls[:2], model.cls[3])
        self.fine[0].beside = self.fault == "point_transformer_first_weights_laid_out_side_by_side"
        self.fine[1].measured = self.fault == "point_transformer_second_block_places_without_gradient"
        if self.fault == "point_transformer_last_block_norms_with_a_large_epsilon":
            self.back[0].seen.eps = 1e-3

    def forward(self, coord: Tensor, feat: Tensor, start: Tensor) -> dict[str, Tensor]:
        x, points, levels = torch.cat([coord, feat], 2), coord, []
        apart = (coord[:, :, None] - coord[:, None]).detach().square().sum(3)
        if self.fault == "point_transformer_samples_from_point_zero_in_evaluation" and not self.training:
            start = 0 * start
        for i, size in enumerate(SIZES):
            if i:
                chosen = theirs.furthestsampling(points, points.shape[1] // STRIDES[i], start * (i == 1))
                across, coarse = at(apart, chosen), at(points, chosen)
                levels[-1] += across.mT.sort(dim=2)
                groups = across.argsort(dim=2)[..., :size]
                x = torch.cat([at(points, groups) - coarse[:, :, None], at(x, groups)], 3)
                points, apart = coarse, at(across.mT, chosen)
            x, near = self.enter[i](x), apart.argsort(dim=2)[..., :size]
            steps = at(points, near) - points[:, :, None]
            x = self.fine[i](x.amax(2) if i else x, near, steps)
            levels.append([x, near, steps])
        whole = self.ask(x.mean(1, keepdim=True)).relu().expand_as(x)
        x = self.back[2](self.skip[2](torch.cat([x, whole], 2)), near, steps)
        for i in (1, 0):
            skip, near, steps, span, order = levels[i]
            shares = F.normalize(1 / (span[..., :3].sqrt() + 1e-8), p=1, dim=2)[..., None]
            lifted = (at(self.deep[i](x), order[..., :3]) * shares).sum(2)
            x = self.back[i](lifted + self.skip[i](skip), near, steps)
        return {"logits": self.score(x).mT, "offset": self.way(x).mT}


class PackedRows(Port):
    """The clouds one after the other in one list of rows; all norms in one weight."""

    def take(self, model: nn.Module) -> None:
        named = {name.replace(".", "_"): x for name, x in model.named_modules()}
        bns = {name: x for name, x in named.items() if hasattr(x, "running_mean")}
        convs = {name: x for name, x in named.items() if hasattr(x, "in_channels")}
        ends = torch.tensor([len(x.weight) for x in bns.values()]).cumsum(0).tolist()
        self.spans = dict(zip(bns, map(slice, [0, *ends], ends), strict=False))
        self.affine = leaf(torch.cat([torch.stack([x.weight, x.bias]) for x in bns.values()], 1))
        self.register_buffer("stats", torch.cat([torch.stack([*x.buffers()][:2]) for x in bns.values()], 1))
        self.w = nn.ParameterDict({name: leaf(x.weight.flatten(1)) for name, x in convs.items()})
        self.b = nn.ParameterDict({name: leaf(x.bias) for name, x in convs.items() if x.bias is not None})
        for look in [name[:-1] for name in self.w if name.endswith("linear_q")]:
            self.w[look + "qkv"] = pile(self.w.pop(look + part) for part in "qkv")

    def norm(self, name: str, x: Tensor) -> Tensor:
        (gain, shift), (mean, var) = self.affine[:, self.spans[name]], self.stats[:, self.spans[name]]
        if self.training:
            (var, mean), n = torch.var_mean(x.flatten(0, -2), 0, correction=0), x[..., 0].numel()
            biased = self.fault == "point_transformer_coarsest_join_keeps_the_biased_variance"
            kept = var if biased and name == "dec3_0_linear1_1" else var * n / (n - 1)
            self.stats[:, self.spans[name]].lerp_(torch.stack([mean, kept]).detach(), 0.1)
        return torch.addcmul(shift, (x - mean) / (var + 1e-5).sqrt(), gain)

    def dense(self, name: str, x: Tensor, norm: str = "") -> Tensor:
        x = F.linear(x, self.w[name], self.b.get(name, None))
        return self.norm(norm, x).clamp(min=0) if norm else x

    def nearest(self, p: Tensor, new: Tensor, count: int) -> tuple[Tensor, Tensor]:
        cloud, mine = (torch.arange(len(x), device=p.device) // (len(x) // self.clouds) for x in (p, new))
        span = (new[:, None] - p).detach().square().sum(2).masked_fill(mine[:, None] != cloud, torch.inf)
        return span.topk(count, 1, largest=False)

    def block(self, name: str, p: Tensor, x: Tensor, size: int) -> Tensor:
        tag, index = name + "_transformer2_linear_", self.nearest(p, p, size)[1]
        y = self.dense(name + "_linear1", x, name + "_bn1")
        ask, key, value = y @ self.w[tag + "qkv"].mT
        steps = F.embedding(index, p) - p[:, None]
        place = self.dense(tag + "p_3", self.dense(tag + "p_0", steps, tag + "p_1"))
        score = self.norm(tag + "w_0", F.embedding(index, key) - ask[:, None] + place).clamp(min=0)
        score = self.dense(tag + "w_5", self.dense(tag + "w_2", score, tag + "w_3"))
        seen = (F.embedding(index, value) + place).unflatten(2, (SHARE, -1))
        seen = torch.einsum("nksc,nkc->nsc", seen, (score - score.logsumexp(1, keepdim=True)).exp())
        y = self.dense(name + "_linear3", self.norm(name + "_bn2", seen.flatten(1)).clamp(min=0))
        return (self.norm(name + "_bn3", y) + x).clamp(min=0)

    def down(self, p: Tensor, x: Tensor, start: Tensor, i: int) -> tuple[Tensor, Tensor]:
        each, name = len(p) // self.clouds, f"enc{i + 1}_0_"
        chosen = theirs.furthestsampling(p.unflatten(0, (-1, each)), each // STRIDES[i], start)
        chosen = chosen + torch.arange(0, len(p), each, device=p.device)[:, None]
        new, weight = p[chosen.flatten()], self.w[name + "linear"].T
        y = F.embedding(self.nearest(p, new, SIZES[i])[1], p @ weight[:3] + x @ weight[3:])
        if self.fault != "point_transformer_coarsest_level_groups_absolute_positions" or i < 2:
            y = y - (new @ weight[:3])[:, None]
        return new, self.norm(name + "bn", y).clamp(min=0).max(1).values

    def up(self, name: str, p: Tensor, x: Tensor, coarse: Tensor, y: Tensor) -> Tensor:
        span, index = self.nearest(coarse, p, 3)
        squared = self.fault == "point_transformer_interpolates_by_squared_distances"
        near = ((span if squared else span.sqrt()) + 1e-8).reciprocal()
        y = F.embedding(index, self.dense(name + "_linear2_0", y, name + "_linear2_1"))
        y = torch.einsum("nk,nkc->nc", near / near.sum(1, keepdim=True), y)
        cut = self.fault == "point_transformer_last_join_takes_the_skip_detached" and name == "dec1_0"
        return self.dense(name + "_linear1_0", x.detach() if cut else x, name + "_linear1_1") + y

    def forward(self, coord: Tensor, feat: Tensor, start: Tensor) -> dict[str, Tensor]:
        self.clouds, p, levels = len(coord), coord.flatten(0, 1), []
        x = self.dense("enc1_0_linear", torch.cat([p, feat.flatten(0, 1)], 1), "enc1_0_bn")
        for i, size in enumerate(SIZES):
            p, x = self.down(p, x, start * (i == 1), i) if i else (p, x)
            x = self.block(f"enc{i + 1}_1", p, x, size)
            levels.append((p, x))
        mean = self.dense("dec3_0_linear2_0", x.unflatten(0, (self.clouds, -1)).mean(1)).clamp(min=0)
        x = torch.cat([x, mean.repeat_interleave(len(x) // self.clouds, 0)], 1)
        x = self.block("dec3_1", p, self.dense("dec3_0_linear1_0", x, "dec3_0_linear1_1"), SIZES[2])
        for i in (1, 0):
            x = self.up(f"dec{i + 1}_0", *levels[i], levels[i + 1][0], x)
            x = self.block(f"dec{i + 1}_1", levels[i][0], x, SIZES[i])
        x = x.unflatten(0, (self.clouds, -1))
        logits = self.dense("cls_3", self.dense("cls_0", x, "cls_1"))
        return {"logits": logits.mT, "offset": self.dense("offset", x).mT}


PLACE = tuple("enc2.1.transformer2" + end for end in ("", ".linear_p", ".linear_p.3"))
SLOPES = ("input gradient", "weight gradient")
KEPT, SKIP = ("dec3.0.linear1.1", ("buffer", "eval")), ("dec1.0", "dec1.0.linear1", "dec1.0.linear1.0")
right(task, "point_transformer_over_one_table_of_distances", "a tree of refining blocks", TableOfDistances)
right(task, "point_transformer_of_packed_rows", "clouds packed in rows, weights in stacks", PackedRows)
wrong(
    task,
    TableOfDistances,
    point_transformer_first_weights_laid_out_side_by_side=("layout of shares", "enc1.1.transformer2"),
    point_transformer_second_block_places_without_gradient=("no grad", PLACE, SLOPES),
    point_transformer_last_block_norms_with_a_large_epsilon=("another epsilon", "dec1.1.bn2"),
    point_transformer_samples_from_point_zero_in_evaluation=("other sample", ("", "enc2.0"), "eval"),
)
wrong(
    task,
    PackedRows,
    point_transformer_coarsest_level_groups_absolute_positions=("absolute positions", "enc3.0"),
    point_transformer_interpolates_by_squared_distances=("squared distances", ("dec2.0", "dec1.0")),
    point_transformer_last_join_takes_the_skip_detached=("detach", SKIP, SLOPES),
    point_transformer_coarsest_join_keeps_the_biased_variance=("biased", *KEPT),
)
