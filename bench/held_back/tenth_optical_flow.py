"""Ports of an optical flow network: a tree of blocks, and one flat module with its weights in piles."""

import copy
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._tenth_optical_flow import FACTOR, HIDDEN, STEPS, OpticalFlow, frames, grid, loss, reach

refined = few("tenth_optical_flow", OpticalFlow, frames, loss)
UNIT = ("feature_encoder.layer1.1", "feature_encoder.layer1.1.relu")
MOTION = ("update_block.motion_encoder", "update_block.motion_encoder.conv")
same = partial(F.conv2d, padding="same")


def chain(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*map(copy.deepcopy, layers))


class Unit(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        self.body = chain(block.conv1, block.norm1, nn.ReLU(), block.conv2, block.norm2, nn.ReLU())
        self.bypass = chain(*block.downsample.children())

    def forward(self, x: Tensor) -> Tensor:
        return (self.bypass(x) + self.body(x)).relu()


def trunk(e: nn.Module) -> nn.Sequential:
    units = map(Unit, [*e.layer1, *e.layer2])
    return nn.Sequential(*chain(e.conv1, e.norm1, nn.ReLU()), *units, *chain(e.conv2))


class Sweep(nn.Module):
    def __init__(self, gru: nn.Module, fault: str = ""):
        super().__init__()
        self.fault = fault
        self.gates, self.fresh = chain(gru.convz, gru.convq)
        self.gates.weight = leaf(torch.cat([gru.convz.weight, gru.convr.weight]))
        self.gates.bias = leaf(torch.cat([gru.convz.bias, gru.convr.bias]))

    def forward(self, state: Tensor, given: Tensor) -> Tensor:
        renew, reset = self.gates(torch.cat([state, given], 1)).sigmoid().chunk(2, 1)
        kept = state if self.fault == "raft_vertical_gru_never_resets" else reset * state
        fresh = self.fresh(torch.cat([kept, given], 1)).tanh()
        return state + renew * (fresh - state)


class Blocks(Port):
    def take(self, model: OpticalFlow) -> None:
        self.see, self.know = trunk(model.feature_encoder), trunk(model.context_encoder)
        if self.fault == "raft_feature_block_adds_before_its_second_relu":
            self.see[4].body[5] = nn.Identity()
        if self.fault == "raft_feature_norm_keeps_averages_for_eval":
            norm = self.see[5].body[1]
            norm.track_running_stats = True
            norm.running_mean, norm.running_var = torch.zeros_like(norm.bias), torch.ones_like(norm.bias)
        if self.fault == "raft_context_shortcut_norm_has_a_larger_eps":
            self.know[5].bypass[1].eps = 1e-3
        update, act = model.update_block, nn.ReLU()
        cost, cost_deep, move, move_deep, fuse = update.motion_encoder.children()
        self.costs, self.moves = chain(cost, act, cost_deep, act), chain(move, act, move_deep, act)
        self.fuse = chain(fuse, act)
        self.sweeps = nn.ModuleList([Sweep(update.convgru1), Sweep(update.convgru2, self.fault)])
        self.step, self.blend = chain(update.flow_head, model.mask_predictor)

    def look(self, level: Tensor, at: Tensor) -> Tensor:
        high, wide = level.shape[2:]
        x, y = torch.broadcast_tensors(at[..., 0] + reach(at)[:, None], at[..., 1] + reach(at))
        spots = torch.stack([(2 * x + 1) / wide - 1, (2 * y + 1) / high - 1], -1)
        return F.grid_sample(level, spots, align_corners=False).flatten(1)

    def enlarge(self, flow: Tensor, state: Tensor) -> Tensor:
        (high, wide), edged = flow.shape[2:], F.pad(flow * FACTOR, (1, 1, 1, 1))
        near = torch.stack([edged[:, :, i : i + high, j : j + wide] for i in range(3) for j in range(3)], 1)
        shares = (self.blend(state) / 4).unflatten(1, (9, -1)).softmax(1)
        return F.pixel_shuffle(torch.einsum("nkphw,nkchw->ncphw", shares, near).flatten(1, 2), FACTOR)

    def forward(self, image1: Tensor, image2: Tensor) -> tuple[Tensor, ...]:
        one, two = self.see(image1), self.see(image2)
        count, width, high, wide = one.shape
        costs = one.flatten(2).transpose(1, 2) @ two.flatten(2) * width**-0.5
        levels = [F.avg_pool2d(costs.reshape(-1, 1, high, wide), 2**i) for i in range(2)]
        state, known = self.know(image1).tensor_split([HIDDEN], 1)
        state, known, flow, flows = state.tanh(), known.relu(), torch.zeros_like(state[:, :2]), []
        for _ in range(STEPS):
            at = (grid(flow) + flow.detach()).permute(0, 2, 3, 1).reshape(-1, 1, 1, 2)
            found = torch.cat([self.look(level, at / 2**i) for i, level in enumerate(levels)], 1)
            found = found.unflatten(0, (count, high, wide)).permute(0, 3, 1, 2)
            both = [self.costs(found), self.moves(flow.detach())]
            if self.fault == "raft_motion_joins_flow_before_costs":
                both.reverse()
            given = torch.cat([known, self.fuse(torch.cat(both, 1)), flow.detach()], 1)
            for sweep in self.sweeps:
                state = sweep(state, given)
            flow = flow.detach() + self.step(state)
            flows.append(self.enlarge(flow, state))
        return tuple(flows)


class Piles(Port):
    def take(self, model: OpticalFlow) -> None:
        both, update = (model.feature_encoder, model.context_encoder), model.update_block
        blocks, grus = [[*e.layer1, *e.layer2] for e in both], (update.convgru1, update.convgru2)
        norms = [[m for m in e.modules() if hasattr(m, "running_mean")] for e in both]
        bodies = [[c.weight for b in bs for c in (b.conv1, b.conv2)] for bs in blocks]
        self.stem, self.last = pile(e.conv1.weight for e in both), pile(e.conv2.weight for e in both)
        self.last_b, self.body = pile(e.conv2.bias for e in both), pile(map(torch.stack, bodies))
        self.short = pile(bs[2].downsample[0].weight for bs in blocks)
        self.norm = pile(torch.stack([torch.stack([n.weight, n.bias]) for n in ns]) for ns in norms)
        self.gru = pile(torch.cat([c.weight.flatten(2) for c in g.children()]) for g in grus)
        self.gru_b = pile(torch.cat([c.bias for c in g.children()]) for g in grus)
        layers = [*update.motion_encoder.children(), *update.flow_head[::2], *model.mask_predictor[::2]]
        names = "cost cost_deep move move_deep join turn turn_deep blend blend_deep"
        named = list(zip(names.split(), layers, strict=True))
        self.w = nn.ParameterDict({name: leaf(layer.weight) for name, layer in named})
        self.b = nn.ParameterDict({name: leaf(layer.bias) for name, layer in named})
        kept = [torch.stack([n.running_mean, n.running_var]) for n in norms[1]]
        self.register_buffer("kept", torch.stack(kept))

    def encode(self, of: int, x: Tensor) -> Tensor:
        places = iter(range(self.norm.shape[1]))

        def normed(x: Tensor, weight: Tensor, stride: int = 1) -> Tensor:
            k = next(places)
            x, (gain, shift) = F.conv2d(x, weight, None, stride, weight.shape[3] // 2), self.norm[of, k]
            if of == 0:
                return F.instance_norm(x, weight=gain, bias=shift)
            return F.batch_norm(x, *self.kept[k], gain, shift, self.training)

        x = normed(x, self.stem[of], 2).relu()
        for i, stride in enumerate((1, 1, 2, 1)):
            y = normed(x, self.body[of, 2 * i], stride).relu()
            y = normed(y, self.body[of, 2 * i + 1]).relu()
            x = (y + (normed(x, self.short[of], 2) if stride == 2 else x)).relu()
        return F.conv2d(x, self.last[of], self.last_b[of])

    def deep(self, name: str, x: Tensor) -> Tensor:
        x = same(x, self.w[name], self.b[name]).relu()
        return same(x, self.w[name + "_deep"], self.b[name + "_deep"])

    def look(self, volumes: list[Tensor], at: Tensor) -> Tensor:
        at = at if self.fault == "raft_lookup_learns_where_to_look" else at.detach()
        at, found = at.movedim(1, 0)[..., None, None], []
        for i, volume in enumerate(volumes):
            cells = [torch.arange(size, device=at.device) for size in volume.shape[:2:-1]]
            spots = [a / 2**i + reach(a)[:, None] for a in at]
            x, y = ((1 - (a - c).abs()).relu() for a, c in zip(spots, cells, strict=True))
            found.append(torch.einsum("nhwyx,nhwix,nhwjy->nijhw", volume, x, y).flatten(1, 2))
        return torch.cat(found, 1)

    def forward(self, image1: Tensor, image2: Tensor) -> tuple[Tensor, ...]:
        one, two = self.encode(0, torch.cat([image1, image2])).chunk(2)
        one = one / one.shape[1] ** (1 if self.fault == "raft_correlation_divided_by_the_width" else 0.5)
        volumes = [torch.einsum("nchw,ncyx->nhwyx", one, x) for x in (two, F.avg_pool2d(two, 2))]
        h, context = self.encode(1, image1).tensor_split([HIDDEN], 1)
        h, context, flow, states, flows = h.tanh(), context.relu(), torch.zeros_like(h[:, :2]), [], []
        for _ in range(STEPS):
            old, costs = flow.detach(), self.deep("cost", self.look(volumes, grid(flow) + flow)).relu()
            moved = torch.cat([costs, self.deep("move", old).relu()], 1)
            x = torch.cat([context, same(moved, self.w["join"], self.b["join"]).relu(), old], 1)
            for axis, w in enumerate(self.gru):
                own, other = w.unsqueeze(2 + axis).tensor_split([HIDDEN], 1)
                gates, fresh = same(x, other, self.gru_b[axis]).tensor_split([2 * HIDDEN], 1)
                z, r = (gates + same(h, own[: 2 * HIDDEN])).sigmoid().chunk(2, 1)
                h = torch.lerp(h, (fresh + same(r * h, own[2 * HIDDEN :])).tanh(), z)
            flow = old + self.deep("turn", h)
            states, flows = [*states, h], [*flows, flow]
        shares = self.deep("blend", torch.cat(states)).div(4).unflatten(1, (9, FACTOR, FACTOR)).softmax(1)
        near = F.unfold(torch.cat(flows) * FACTOR, 3, 1, 1).unflatten(1, (2, 9)).unflatten(3, h.shape[2:])
        fine = "nkjihw" if self.fault == "raft_upsampling_transposes_the_subpixels" else "nkijhw"
        return torch.einsum(fine + ",nckhw->nchiwj", shares, near).flatten(4).flatten(2, 3).chunk(STEPS)


right(refined, "raft_as_a_tree_of_blocks", "other blocks, gates in one convolution", Blocks)
right(refined, "raft_in_piles_with_hats", "flat, weights in piles, lookup as products", Piles)
wrong(
    refined,
    Blocks,
    raft_feature_block_adds_before_its_second_relu=("an activation missing", UNIT),
    raft_feature_norm_keeps_averages_for_eval=("averages kept", "feature_encoder.layer2.0.norm1", ("eval",)),
    raft_context_shortcut_norm_has_a_larger_eps=("another epsilon", "context_encoder.layer2.0.downsample.1"),
    raft_motion_joins_flow_before_costs=("joined in another order", MOTION),
    raft_vertical_gru_never_resets=("a gate forgotten", "update_block.convgru2"),
)
wrong(
    refined,
    Piles,
    raft_correlation_divided_by_the_width=("another scale", "corr_pyramid"),
    raft_lookup_learns_where_to_look=("no detach", "corr_lookup", ("input gradient", "weight gradient")),
    raft_upsampling_transposes_the_subpixels=("axes swapped", "upsample"),
)
