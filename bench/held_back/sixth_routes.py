"""A pointer network: points read one after the other, a route that points at what it has not yet visited."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import case
from bench.held_back._fifth_vision import Stats, right
from bench.held_back._fourth_ports import Port, leaf, wrong
from bench.held_back._sixth_ports import Gates, few


class Additive(nn.Module):
    """Additive attention of one state [N, C] to points [N, T, C]."""

    def __init__(self, width: int):
        super().__init__()
        self.key, self.query = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.score = nn.Linear(width, 1, bias=False)

    def scores(self, h: Tensor, points: Tensor) -> Tensor:
        return self.score((self.key(points) + self.query(h)[:, None]).tanh()).squeeze(2)


class Glimpse(Additive):
    """A mean of the points not yet visited."""

    def forward(self, h: Tensor, points: Tensor, visited: Tensor) -> Tensor:
        shares = self.scores(h, points).masked_fill(visited, float("-inf")).softmax(1)
        return (shares[:, None] @ points).squeeze(1)


class Pointer(Additive):
    """Scores within -8 and 8 for the points that are left, -20 for those visited."""

    def forward(self, h: Tensor, points: Tensor, visited: Tensor) -> Tensor:
        return (8 * self.scores(h, points).tanh()).masked_fill(visited, -20.0)


class Routes(nn.Module):
    """Points [N, T, 2] and the true route [N, T] -> scores [N, T, T], a step's in a row."""

    def __init__(self):
        super().__init__()
        self.lift, self.norm = nn.Linear(2, 12), nn.BatchNorm1d(12)
        self.begin = nn.Parameter(0.3 * torch.randn(12))
        self.read, self.cell = nn.GRU(12, 16, batch_first=True), nn.GRUCell(12, 16)
        self.glimpse, self.pointer = Glimpse(16), Pointer(16)

    def forward(self, points: Tensor, route: Tensor) -> Tensor:
        x = self.norm(self.lift(points).mT).mT
        states, h = self.read(x)
        h, last = h[0], self.begin.expand(len(x), -1)
        visited = torch.zeros_like(route, dtype=torch.bool)
        rows, scores = torch.arange(len(x)), []
        for step in range(route.shape[1]):
            h = self.cell(last, h)
            seen = self.glimpse(h, states, visited)
            scores.append(self.pointer(seen, states, visited))
            visited = visited.scatter(1, route[:, step, None], True)
            last = x[rows, route[:, step]]
        return torch.stack(scores, 1)


def _tours() -> tuple[dict[str, Tensor], Tensor]:
    """Points to be visited by their angle about the middle."""
    points = torch.rand(8, 7, 2)
    away = points - points.mean(1, keepdim=True)
    route = torch.atan2(away[..., 1], away[..., 0]).argsort(1)
    return {"points": points, "route": route}, route


def _loss(scores: Tensor, route: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), route.flatten())


routes = few("sixth_routes", Routes, _tours, _loss)


class AllSteps(Port):
    """The route's states first; then all steps look and point at once, with both maps of keys in one."""

    def take(self, model: Routes) -> None:
        self.raise_w, self.raise_b = leaf(model.lift.weight.T), leaf(model.lift.bias)
        self.stats, self.start = Stats(model.norm), leaf(model.begin)
        self.reader = Gates(dict(model.read.named_parameters()), end="_l0")
        early = self.fault == "route_state_reset_before_the_product"
        self.walker = Gates(dict(model.cell.named_parameters()), early)
        both = (model.glimpse, model.pointer)
        self.keys = leaf(torch.cat([one.key.weight for one in both]))
        self.key_shifts = leaf(torch.cat([one.key.bias for one in both]))
        self.asks = nn.ParameterList(leaf(one.query.weight.T) for one in both)
        self.marks = leaf(torch.cat([one.score.weight for one in both]))

    def normed(self, x: Tensor) -> Tensor:
        if self.fault == "points_normed_by_their_own_batch_in_eval" and not self.training:
            width, middle = torch.var_mean(x.flatten(0, 1), 0, correction=0)
            return (x - middle) / (width + self.stats.eps).sqrt() * self.stats.gain + self.stats.offset
        return self.stats(x)

    def shares(self, scores: Tensor, visited: Tensor, states: Tensor) -> Tensor:
        if self.fault != "glimpse_at_what_is_visited":
            scores = scores.masked_fill(visited, float("-inf"))
        shares = scores.softmax(2)
        if self.fault == "glimpses_summed_in_bfloat16":
            return (shares.bfloat16() @ states.bfloat16()).to(states)
        return shares @ states

    def forward(self, points: Tensor, route: Tensor) -> Tensor:
        count, steps = route.shape
        x = self.normed(points @ self.raise_w + self.raise_b)
        h, states = x.new_zeros(count, 16), []
        for column in x.unbind(1):
            h = self.reader(column, h)
            states.append(h)
        states, walked = torch.stack(states, 1), []
        taken = torch.take_along_dim(x, route[..., None], 1)
        inputs = torch.cat([self.start.repeat(count, 1, 1), taken[:, :-1]], 1)
        for column in inputs.unbind(1):
            h = self.walker(column, h)
            walked.append(h)
        # a point is visited at the steps after its own
        chosen = F.one_hot(route, steps)
        visited = (chosen.cumsum(1) - chosen).bool()
        if self.fault == "last_visited_point_is_still_free":
            visited = F.pad(visited, (0, 0, 1, 0))[:, :-1]
        look, point = (states @ self.keys.T + self.key_shifts).unsqueeze(1).chunk(2, 3)
        asked = (torch.stack(walked, 1) @ self.asks[0]).unsqueeze(2)
        seen = self.shares((look + asked).tanh() @ self.marks[0], visited, states)
        asked = (seen @ self.asks[1]).unsqueeze(2)
        scores = 8 * ((point + asked).tanh() @ self.marks[1]).tanh()
        return torch.where(visited, -20.0, scores)


right(routes, "routes_with_all_steps_pointing_at_once", "a loop taken apart", AllSteps)
wrong(
    routes,
    AllSteps,
    route_state_reset_before_the_product=("reset gate at another point", "cell"),
    points_normed_by_their_own_batch_in_eval=("wrong in eval mode alone", "norm", "eval"),
    glimpse_at_what_is_visited=("mask forgotten", "glimpse"),
    last_visited_point_is_still_free=("mask off by one", ""),
)


@case("reduced_precision", "a sum in fewer bits", routes, module="glimpse")
def glimpses_summed_in_bfloat16(model: Routes) -> nn.Module:
    return AllSteps(model, "glimpses_summed_in_bfloat16")
