"""Two ports of a small PointNet++: a tree with the channels last, and one class of packed sheets."""

import torch
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, Rows, leaf, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twenty_ninth_point_net_two import (
    PointNet2,
    index_points,
    objects,
    parts_and_classes,
    square_distance,
)

task = few("twenty_ninth_point_net_two", PointNet2, objects, parts_and_classes)


class Dense(nn.Module):
    """A linear layer of the last axis, a norm if there is one, and then a ReLU."""

    def __init__(self, layer: nn.Module, norm: nn.Module | None = None):
        super().__init__()
        self.weight, self.bias = leaf(layer.weight.flatten(1).T), leaf(layer.bias)
        self.finish = nn.Sequential(Rows(norm), nn.ReLU()) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.finish(x @ self.weight + self.bias)


def chain(block: nn.Module, start: int = 0) -> nn.Sequential:
    return nn.Sequential(*map(Dense, block.mlp_convs[start:], block.mlp_bns[start:]))


class Divided(nn.Module):
    """The first layer of a block, its weight in two by the input's channels, and the other layers."""

    def __init__(self, block: nn.Module, border: int):
        super().__init__()
        weight, self.bias = block.mlp_convs[0].weight.flatten(1).T, leaf(block.mlp_convs[0].bias)
        self.near, self.far = leaf(weight[:border]), leaf(weight[border:])
        self.norm, self.rest = Rows(block.mlp_bns[0]), chain(block, 1)

    def finish(self, x: Tensor) -> Tensor:
        return self.rest(self.norm(x + self.bias).relu())


class Neighbourhood(Divided):
    """Centres far apart, and the greatest features around each; the first product is by point."""

    def __init__(self, block: nn.Module):
        super().__init__(block, 3)
        self.count, self.radius, self.size, self.zero = block.npoint, block.radius, block.nsample, False

    @torch.no_grad()
    def choose(self, place: Tensor) -> tuple[Tensor, Tensor]:
        gaps = square_distance(place, place)
        rows, nearest = torch.arange(len(gaps)), gaps[:, 0]
        chosen = [torch.zeros_like(rows)]
        while len(chosen) < self.count:
            chosen.append(nearest.argmax(1))
            nearest = torch.minimum(nearest, gaps[rows, chosen[-1]])
        centres = torch.stack(chosen, 1)
        inside = index_points(gaps, centres) <= self.radius**2
        order = (~inside).long().sort(stable=True)[1][..., : self.size]
        spare = torch.arange(self.size, device=place.device) >= inside.sum(-1, keepdim=True)
        return centres, torch.where(spare, 0 * order if self.zero else order[..., :1], order)

    def forward(self, place: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        centres, members = self.choose(place)
        middle = index_points(place, centres)
        y = index_points(place @ self.near + x @ self.far, members) - (middle @ self.near).unsqueeze(2)
        return middle, self.finish(y).amax(2)


class Carry(Divided):
    """Features carried to more points, after their product with the weight."""

    power, silent = 1, False

    def forward(self, place: Tensor, coarse: Tensor | None, skip: Tensor, x: Tensor) -> Tensor:
        far = x @ self.far
        if coarse is not None:
            gaps, index = square_distance(place, coarse).topk(3, largest=False)
            rates = 1 / (gaps**self.power + 1e-8)
            far = ((rates / rates.sum(-1, True)).unsqueeze(-2) @ index_points(far, index)).squeeze(-2)
        return self.finish((skip.detach() if self.silent else skip) @ self.near + far)


class PointsLast(Port):
    """Levels up and down, channels last; first layers are divided and taken before the points are picked."""

    def take(self, model: PointNet2) -> None:
        fault, self.whole = self.fault, chain(model.sa3)
        self.climb = nn.ModuleList([Neighbourhood(model.sa1), Neighbourhood(model.sa2)])
        self.descend = nn.ModuleList([Carry(model.fp1, 12), Carry(model.fp2, 24), Carry(model.fp3, 36)])
        self.parts = nn.Sequential(Dense(model.conv1, model.bn1), Dense(model.conv2))
        self.kinds = nn.Sequential(Dense(model.fc1), nn.ReLU(), Dense(model.fc2))
        self.climb[1].zero = fault == "point_net_two_second_balls_padded_by_the_first_point"
        self.descend[1].silent = fault == "point_net_two_second_propagation_detaches_its_skip_link"
        self.parts[0].finish[0].own = fault == "point_net_two_head_norm_by_the_batch_in_evaluation"
        self.descend[0].power = 1 + (fault == "point_net_two_last_interpolation_squares_its_distances_twice")

    def forward(self, xyz: Tensor, cls_label: Tensor) -> tuple[Tensor, Tensor]:
        points, place = xyz.mT, xyz[:, :3].mT
        kind = cls_label.unsqueeze(1).expand(-1, points.shape[1], -1)
        one = self.climb[0](place, points)
        two = self.climb[1](*one)
        whole = self.whole(torch.cat(two, -1)).amax(1, True)
        x = self.descend[1](one[0], two[0], one[1], self.descend[2](two[0], None, two[1], whole))
        x = self.descend[0](place, one[0], torch.cat([kind, place, points], -1), x)
        return self.parts(x).log_softmax(-1), self.kinds(whole.squeeze(1)).log_softmax(-1)


class PackedPoints(Port):
    """A sheet for each layer and one store of all statistics; [C, B, ...], interpolation by matrices."""

    def take(self, model: PointNet2) -> None:
        blocks = (model.sa1, model.sa2, model.sa3, model.fp3, model.fp2, model.fp1)
        pairs = [pair for x in blocks for pair in zip(x.mlp_convs, x.mlp_bns, strict=True)]
        pairs.append((model.conv1, model.bn1))
        sheets = (torch.column_stack([a.weight.flatten(1), a.bias, b.weight, b.bias]) for a, b in pairs)
        self.sheets = nn.ParameterList(map(leaf, sheets))
        ends = (model.conv2, model.fc1, model.fc2)
        self.ends = nn.ParameterList(leaf(torch.column_stack([x.weight.flatten(1), x.bias])) for x in ends)
        kept = (torch.stack([b.running_mean, b.running_var]) for _, b in pairs)
        self.register_buffer("kept", torch.cat([*kept], 1))

    def layer(self, i: int, x: Tensor) -> Tensor:
        w, rows = self.sheets[i], x.flatten(1)
        rows = w[:, :-3] @ rows + w[:, -3:-2]
        kept = self.kept.split([len(x) for x in self.sheets], 1)[i]
        mean, var = kept
        if self.training:
            (var, mean), n = torch.var_mean(rows, 1, correction=0), rows.shape[1]
            kept.lerp_(torch.stack([mean, var * n / (n - 1)]).detach(), 0.1)
        loose = self.fault == "point_net_two_fifth_norm_with_a_large_epsilon" and i == 4
        gain = w[:, -2] / (var + (1e-3 if loose else 1e-5)).sqrt()
        return (gain[:, None] * rows + (w[:, -1] - gain * mean)[:, None]).relu().unflatten(1, x.shape[1:])

    def group(self, level: int, place: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        count, reach, size = ((14, 0.5, 5), (6, 0.9, 4))[level]
        (b, n), spot = place.shape[1:], place.detach()
        base = n * torch.arange(b, device=x.device)
        picks, left = [base], spot.new_full((b, n), torch.inf)
        for _ in range(count - 1):
            gap = (spot - spot.flatten(1)[:, picks[-1], None]).square().sum(0)
            forgets = self.fault == "point_net_two_first_sampling_far_from_the_latest_only" and level == 0
            left = gap if forgets else left.minimum(gap)
            picks.append(base + left.argmax(1))
        middle = place.flatten(1)[:, torch.stack(picks, 1)]
        outside = (spot[:, :, None] - middle.detach()[..., None]).square().sum(0) > reach**2
        names = torch.arange(n, device=x.device).masked_fill(outside, n).sort()[0][..., :size]
        names = base[:, None, None] + names.where(names < n, names[..., :1])
        points = torch.cat([place, x]).flatten(1)[:, names]
        return middle, torch.cat([points[:3] - middle[..., None], points[3:]])

    def forward(self, xyz: Tensor, cls_label: Tensor) -> tuple[Tensor, Tensor]:
        places, features = [xyz[:, :3].transpose(0, 1)], [xyz.transpose(0, 1)]
        for level in (0, 1):
            place, x = self.group(level, places[-1], features[-1])
            x = self.layer(3 * level + 2, self.layer(3 * level + 1, self.layer(3 * level, x)))
            places, features = [*places, place], [*features, x.amax(3)]
        middle = place.mean(2, True) if self.fault == "point_net_two_global_abstraction_centred" else 0
        whole = self.layer(7, self.layer(6, torch.cat([place - middle, features[2]]))).amax(2)
        features[0] = torch.cat([cls_label.T[..., None].expand(-1, -1, xyz.shape[2]), places[0], features[0]])
        x = whole[..., None].expand(-1, -1, place.shape[2])
        for level in (2, 1, 0):
            if level < 2:
                gap = (places[level][..., None] - places[level + 1][:, :, None]).square().sum(0)
                near = torch.zeros_like(gap).scatter(2, gap.argsort(2)[..., :3], 1.0) / (gap + 1e-8)
                x = torch.einsum("bns,cbs->cbn", near / near.sum(2, True), x)
            x = self.layer(13 - 2 * level, self.layer(12 - 2 * level, torch.cat([features[level], x])))
        a, b, c = self.ends
        x = torch.einsum("oc,cbn->bno", a[:, :-1], self.layer(14, x)) + a[:, -1]
        y = (b[:, :-1] @ whole + b[:, -1:]).relu()
        axis = 1 if self.fault == "point_net_two_class_softmax_over_the_batch" else 0
        return x - x.logsumexp(2, True), (c[:, :-1] @ y + c[:, -1:]).log_softmax(axis).T


SLOPES = ("input gradient", "weight gradient")
right(task, "point_net_two_of_points_last", "a tree, divided first layers, channels last", PointsLast)
right(task, "point_net_two_of_packed_sheets", "packed sheets, folded norms, matrices", PackedPoints)
wrong(
    task,
    PointsLast,
    point_net_two_second_balls_padded_by_the_first_point=("another padding", "sa2"),
    point_net_two_second_propagation_detaches_its_skip_link=("detach", "fp2", SLOPES),
    point_net_two_head_norm_by_the_batch_in_evaluation=("batch statistics in eval", "bn1", "eval"),
    point_net_two_last_interpolation_squares_its_distances_twice=("another power", "fp1"),
)
wrong(
    task,
    PackedPoints,
    point_net_two_first_sampling_far_from_the_latest_only=("a minimum left out", "sa1"),
    point_net_two_fifth_norm_with_a_large_epsilon=("epsilon", "sa2.mlp_bns.1"),
    point_net_two_global_abstraction_centred=("other coordinates", "sa3"),
    point_net_two_class_softmax_over_the_batch=("another axis", ""),
)
