"""Two ports of a small SiamRPN tracker: a tree by kind of head with channels last, and flat fused weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._forty_eighth_siamese_track import ModelBuilder, pictures, tracking_loss
from bench.held_back._fourth_ports import Port, Rows, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("forty_eighth_siamese_track", ModelBuilder, pictures, tracking_loss)


class Window(nn.Module):
    """A convolution of [N, H, W, C] without padding, then a batch norm."""

    def __init__(self, conv: nn.Conv2d, norm: nn.BatchNorm2d):
        super().__init__()
        self.weight, self.norm = leaf(conv.weight.permute(1, 2, 3, 0)), Rows(norm)
        self.stride = conv.stride[0]

    def forward(self, x: Tensor) -> Tensor:
        size = self.weight.shape[1]
        windows = x.unfold(1, size, self.stride).unfold(2, size, self.stride)
        return self.norm(torch.tensordot(windows, self.weight, 3))


class Trunk(nn.Module):
    """A picture [N, C, H, W] -> the adjusted maps of two levels, from ``starts`` on and ``less`` long."""

    def __init__(self, model: ModelBuilder):
        super().__init__()
        body, neck = model.backbone, model.neck
        self.stem, self.middle, self.deep = (Window(*x[:2]) for x in (body.layer1, body.layer2, body.layer3))
        self.taps = nn.ModuleList(Window(*x.downsample) for x in (neck.downsample2, neck.downsample3))

    def forward(self, x: Tensor, starts: tuple[int, int] = (0, 0), less: int = 0) -> list[Tensor]:
        x = self.middle(self.stem(x.movedim(1, -1)).relu()).relu()
        maps = [tap(y) for tap, y in zip(self.taps, (x, self.deep(x)), strict=True)]
        cut = zip(maps, starts, strict=True)
        return [y[:, i : i + y.shape[1] - less, i : i + y.shape[2] - less] for y, i in cut]


class Match(nn.Module):
    """One level of one head."""

    def __init__(self, branch: nn.Module):
        super().__init__()
        self.ask, self.look = Window(*branch.conv_kernel[:2]), Window(*branch.conv_search[:2])
        self.mix, self.out = Window(*branch.head[:2]), nn.Linear(*branch.head[3].weight.shape[1::-1])
        self.out.weight, self.out.bias = leaf(branch.head[3].weight.flatten(1)), leaf(branch.head[3].bias)
        self.turned = self.fixed = False

    def forward(self, template: Tensor, search: Tensor) -> Tensor:
        small, large = self.ask(template).relu(), self.look(search).relu()
        small = small.flip(1, 2) if self.turned else small
        small = small.detach() if self.fixed else small
        windows = large.unfold(1, small.shape[1], 1).unfold(2, small.shape[2], 1)
        return self.out(self.mix(torch.einsum("nhwcij,nijc->nhwc", windows, small)).relu())


class Head(nn.Module):
    """[N, H, W, parts, K] of one kind, from both levels."""

    def __init__(self, levels: list[nn.Module], share: Tensor, parts: int):
        super().__init__()
        self.levels, self.share, self.parts = nn.ModuleList(map(Match, levels)), leaf(share), parts

    def forward(self, small: list[Tensor], large: list[Tensor]) -> Tensor:
        one, two = (match(*x) for match, *x in zip(self.levels, small, large, strict=True))
        rate = torch.sigmoid(self.share[0] - self.share[1])
        return (two + rate * (one - two)).unflatten(-1, (self.parts, -1))


class TrackerOfHeads(Port):
    def take(self, model: ModelBuilder) -> None:
        head = model.rpn_head
        self.trunk = Trunk(model)
        self.sort = Head([head.rpn2.cls, head.rpn3.cls], head.cls_weight, 2)
        self.move = Head([head.rpn2.loc, head.rpn3.loc], head.loc_weight, 4)
        self.register_buffer("places", model.anchors.permute(2, 3, 0, 1).clone())
        off = self.fault == "siamese_track_deeper_template_cropped_off_the_centre"
        self.starts = (1, 2 if off else 1)
        if self.fault == "siamese_track_second_backbone_norm_of_another_eps":
            self.trunk.middle.norm.eps = 1e-3
        self.sort.levels[0].turned = self.fault == "siamese_track_first_class_correlation_turned"
        self.move.levels[1].fixed = self.fault == "siamese_track_second_box_template_without_gradient"

    def forward(self, template, search, label_cls, label_loc, label_weight) -> dict[str, Tensor]:
        small, large = self.trunk(template, self.starts, 2), self.trunk(search)
        sort, move = self.sort(small, large), self.move(small, large)
        logit = (sort[..., 1, :] - sort[..., 0, :]).permute(0, 3, 1, 2)
        middle, size = self.places.chunk(2, 2)
        box = torch.cat([middle + size * move[..., :2, :], size * move[..., 2:, :].exp()], 3)
        off = F.huber_loss(move.permute(0, 3, 4, 1, 2), label_loc, reduction="none")
        hit, miss = F.softplus(-logit)[label_cls == 1].mean(), F.softplus(logit)[label_cls == 0].mean()
        return {
            "score": logit.sigmoid(),
            "bbox": box.permute(0, 3, 4, 1, 2),
            "cls_loss": (hit + miss) / 2,
            "loc_loss": torch.einsum("nakhw,nkhw->", off, label_weight) / len(off),
        }


class FusedTracker(Port):
    """Class and box heads side by side in the channels; all norms' weights in one table."""

    def take(self, model: ModelBuilder) -> None:
        body, neck, head = model.backbone, model.neck, model.rpn_head
        levels = head.rpn2, head.rpn3
        single = [body.layer1, body.layer2, body.layer3, *(x.downsample for x in neck.children())]
        self.w = nn.ParameterList(leaf(x[0].weight) for x in single)
        norms = [[x[1]] for x in single]
        for part in ("conv_kernel", "conv_search", "head"):
            pairs = [[getattr(x.cls, part), getattr(x.loc, part)] for x in levels]
            self.w.append(pile(torch.cat([y[0].weight for y in x]) for x in pairs))
            norms += [[y[1] for y in x] for x in pairs]
        self.ends = [0, *torch.tensor([sum(len(y.weight) for y in x) for x in norms]).cumsum(0).tolist()]
        flat = [y for each in norms for y in each]
        self.table = leaf(torch.stack([torch.cat([getattr(y, k) for y in flat]) for k in ("weight", "bias")]))
        self.register_buffer("mean", torch.cat([y.running_mean for y in flat]))
        self.register_buffer("var", torch.cat([y.running_var for y in flat]))
        self.last = pile(torch.cat([x.cls.head[3].weight, x.loc.head[3].weight]).flatten(1) for x in levels)
        self.shift = pile(torch.cat([x.cls.head[3].bias, x.loc.head[3].bias]) for x in levels)
        self.share = pile([head.cls_weight, head.loc_weight])
        self.register_buffer("grid", model.anchors.flatten(1))

    def norm(self, x: Tensor, i: int) -> Tensor:
        at, train = slice(self.ends[i], self.ends[i + 1]), self.training
        mean, var = self.mean[at], self.var[at]
        if self.fault == "siamese_track_box_norm_by_the_batch_in_evaluation" and i == 8 and not train:
            half = x.shape[1] // 2
            own = torch.var_mean(x[:, half:], (0, 2, 3), correction=0)
            var, mean = (torch.cat([y[:half], z]) for y, z in zip((var, mean), own, strict=True))
        return F.batch_norm(x, mean, var, *self.table[:, at], train, 0.1, 1e-5)

    def features(self, x: Tensor) -> list[Tensor]:
        x = self.norm(F.conv2d(x, self.w[0], stride=2), 0).relu()
        x = self.norm(F.conv2d(x, self.w[1]), 1).relu()
        maps = x, self.norm(F.conv2d(x, self.w[2]), 2)
        return [self.norm(F.conv2d(y, self.w[i]), i) for i, y in enumerate(maps, 3)]

    def level(self, i: int, small: Tensor, large: Tensor) -> Tensor:
        small = self.norm(F.conv2d(small[..., 1:-1, 1:-1], self.w[5][i]), 5 + i).relu()
        large, total = self.norm(F.conv2d(large, self.w[6][i]), 7 + i).relu(), 0
        high, wide = (large.shape[k] - small.shape[k] + 1 for k in (2, 3))
        for row in range(small.shape[2]):
            for column in range(small.shape[3]):
                piece = large[:, :, row : row + high, column : column + wide]
                total = total + piece * small[:, :, row, column, None, None]
        y = self.norm(F.conv2d(total, self.w[7][i], groups=2), 9 + i).relu()
        cls, loc = y.flatten(2).chunk(2, 1)
        return torch.cat([self.last[i, :6] @ cls, self.last[i, 6:] @ loc], 1) + self.shift[i, :, None]

    def forward(self, template, search, label_cls, label_loc, label_weight) -> dict[str, Tensor]:
        pairs = zip(self.features(template), self.features(search), strict=True)
        y = torch.stack([self.level(i, *x) for i, x in enumerate(pairs)])
        share = self.share.softmax(1)
        if self.fault == "siamese_track_boxes_averaged_by_the_weights_of_the_classes":
            share = share[[0, 0]]
        y = (y * share.repeat_interleave(torch.tensor([6, 12], device=y.device), 0).T[:, None, :, None]).sum(
            0
        )
        cls, loc = y[:, :6].unflatten(1, (2, 3)), y[:, 6:].reshape(len(y), 4, -1)
        if self.fault == "siamese_track_classes_viewed_as_pairs_by_anchor":
            cls = y[:, :6].unflatten(1, (3, 2)).transpose(1, 2)
        logs = (cls - cls.logsumexp(1, True)).flatten(2)
        size = self.grid[2:]
        wide = size[[0, 0]] if self.fault == "siamese_track_box_heights_scaled_by_anchor_widths" else size
        box = torch.cat([loc[:, :2] * size + self.grid[:2], wide * loc[:, 2:].exp()], 1)
        label, off = label_cls.flatten(1), F.huber_loss(loc, label_loc.flatten(2), reduction="none")
        halves = [(logs[:, k] * (label == k)).sum() / (label == k).sum() for k in (0, 1)]
        return {
            "score": logs[:, 1].exp().view_as(label_cls),
            "bbox": box.view_as(label_loc),
            "cls_loss": -sum(halves) / 2,
            "loc_loss": (off.sum(1) * label_weight.flatten(1)).sum(1).mean(),
        }


SLOPES, SEARCH_NORM = ("input gradient", "weight gradient"), "rpn_head.rpn3.loc.conv_search.1"
right(task, "siamese_track_of_heads_with_channels_last", "a tree by kind of head, windows", TrackerOfHeads)
right(task, "siamese_track_of_fused_heads", "fused heads, one table of norms, taps in a loop", FusedTracker)
wrong(
    task,
    TrackerOfHeads,
    siamese_track_second_backbone_norm_of_another_eps=("another eps", "backbone.layer2.1"),
    siamese_track_deeper_template_cropped_off_the_centre=("a crop off by one", "neck.downsample3"),
    siamese_track_first_class_correlation_turned=("a flipped kernel", "rpn_head.rpn2.cls"),
    siamese_track_second_box_template_without_gradient=("detach", "rpn_head.rpn3.loc", SLOPES),
)
wrong(
    task,
    FusedTracker,
    siamese_track_box_norm_by_the_batch_in_evaluation=("own statistics", SEARCH_NORM, "eval"),
    siamese_track_boxes_averaged_by_the_weights_of_the_classes=("another weight", "rpn_head"),
    siamese_track_classes_viewed_as_pairs_by_anchor=("another channel order", ""),
    siamese_track_box_heights_scaled_by_anchor_widths=("a wrong axis", ""),
)
