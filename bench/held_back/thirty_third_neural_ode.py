"""Two ports of a small latent ODE: a tree that reads time first, and one class of sheets over columns."""

import math
from functools import partial

import torch
from torch import Tensor, distributions, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._thirty_third_neural_ode import OBSRV_STD, LatentODE, bound_and_error, spirals

task = few("thirty_third_neural_ode", LatentODE, spirals, bound_and_error)
Normal = partial(distributions.Normal, validate_args=False)
WIDTH, HELD, Three = 14, 28, tuple[Tensor, Tensor, Tensor]


class Reader(nn.Module):
    """All that is seen is projected at once; the two gates are one pair of stacks."""

    def __init__(self, cell: nn.Module):
        super().__init__()
        nets = cell.update_gate, cell.reset_gate, cell.new_state_net
        self.seen = leaf(torch.cat([x[0].weight[:, HELD:] for x in nets]).T)
        self.shift = leaf(torch.cat([x[0].bias for x in nets]))
        self.held = pile(x[0].weight[:, :HELD].T for x in nets)
        self.gates, self.offsets = pile(x[2].weight.T for x in nets[:2]), pile(x[2].bias for x in nets[:2])
        self.out, self.end = leaf(nets[2][2].weight.T), leaf(nets[2][2].bias)
        self.silent = False

    def forward(self, x: Tensor, known: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[1], 2, WIDTH)
        for seen, some in zip((x @ self.seen + self.shift).unbind(), known.unbind(), strict=True):
            u, r, n = seen.chunk(3, -1)
            inner = torch.tanh(torch.stack([u, r]) + state.flatten(1) @ self.held[:2])
            keep, reset = torch.sigmoid(inner @ self.gates + self.offsets[:, None]).unsqueeze(2)
            reset = reset.detach() if self.silent else reset
            fresh = torch.tanh(n + (state * reset).flatten(1) @ self.held[2]) @ self.out + self.end
            middle, spread = fresh.unflatten(1, (2, -1)).unbind(1)
            fresh = torch.stack([middle, spread.abs()], 1)
            state = torch.where(some[:, None, None], fresh + keep * (state - fresh), state)
        return state.flatten(1)


class Squash(nn.Module):
    """A product whose gate and offset move with the time."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.weight, self.bias = leaf(layer._layer.weight.T), leaf(layer._layer.bias)
        self.rates = pile(x.weight[:, 0] for x in (layer._hyper_gate, layer._hyper_bias))
        self.level, self.inside = leaf(layer._hyper_gate.bias), False

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        gate, drift = t * self.rates[0] + self.level, t * self.rates[1]
        x = x @ self.weight + self.bias
        back = 1 + torch.exp(-gate)
        return (x + drift) / back if self.inside else x / back + drift


class Path(nn.Module):
    """The states at all times, by thirds of the step."""

    def __init__(self, layers: nn.ModuleList):
        super().__init__()
        self.field = nn.ModuleList(map(Squash, layers))

    def slope(self, t: Tensor, z: Tensor) -> Tensor:
        first, second, third = self.field
        return third(second(first(z, t).tanh(), t).tanh(), t)

    def forward(self, z: Tensor, times: Tensor) -> Tensor:
        path, thirds = [z], times.diff(dim=0) / 3
        for t, h in zip(times[:-1], thirds, strict=True):
            b = self.slope(t + h, z + h * (a := self.slope(t, z)))
            c = self.slope(t + 2 * h, z - h * a + 3 * h * b)
            d = self.slope(t + 3 * h, z + 3 * h * (a + c - b))
            path.append(z := z + h * (0.375 * (a + d) + 1.125 * (b + c)))
        return torch.stack(path)


class LatentPath(Port):
    """A reader, a guess, a path and a view of it, with the time on the first axis."""

    def take(self, model: LatentODE) -> None:
        self.reader = Reader(model.encoder_z0.gru_rnn)
        first, _, last = model.encoder_z0.hiddens_to_z0
        self.guess, (self.middle, self.spread) = first, (nn.Linear(36, 10) for _ in range(2))
        for part, rows in ((self.middle, slice(10)), (self.spread, slice(10, None))):
            part.weight, part.bias = leaf(last.weight[rows]), leaf(last.bias[rows])
        self.path = Path(model.diffeq_solver.ode_func.gradient_net.layers)
        self.view = model.decoder.decoder
        self.reader.silent = self.fault == "neural_ode_reset_gate_taken_without_gradient"
        self.path.field[1].inside = self.fault == "neural_ode_second_layer_gates_its_time_offset_too"

    def forward(self, data: Tensor, mask: Tensor, time_steps: Tensor, noise: Tensor, coef: Tensor) -> Three:
        seen, known, times = data.transpose(0, 1), mask.transpose(0, 1), time_steps.T[..., None]
        gaps = times.diff(dim=0)
        gaps = gaps if self.fault == "neural_ode_gaps_left_in_order_of_time" else gaps.flip(0)
        x = torch.cat([torch.cat([gaps, 0 * times[:1]]), seen.flip(0), known.flip(0).to(data)], -1)
        inner = self.guess(self.reader(x, known.flip(0).any(-1))).tanh()
        first = Normal(self.middle(inner), (self.spread(inner) / 2).exp())
        z = first.mean + first.stddev * noise
        if self.fault == "neural_ode_first_state_without_noise_in_evaluation" and not self.training:
            z = first.mean
        y = self.view(self.path(z, times))
        likely = (Normal(y, OBSRV_STD).log_prob(seen) * known).sum(0) / known.sum(0)
        apart = distributions.kl_divergence(first, Normal(torch.zeros_like(z), torch.ones_like(z))).mean(1)
        return y.transpose(0, 1), apart, coef * apart - likely.mean(1)


def sheet(*layers: nn.Linear) -> nn.Parameter:
    columns = [x for layer in layers for x in (layer.weight, layer.bias) if x is not None]
    return leaf(torch.cat([x.reshape(len(x), -1) for x in columns], 1))


RULE = ((), (1 / 3,), (-1 / 3, 1), (1, -1, 1)), (0, 1 / 3, 2 / 3, 1), (1 / 8, 3 / 8, 3 / 8, 1 / 8)


class SheetsODE(Port):
    """Sheets of weights, series in columns, and the rule of the steps as a table."""

    def take(self, model: LatentODE) -> None:
        cell, head = model.encoder_z0.gru_rnn, model.encoder_z0.hiddens_to_z0
        nets = cell.update_gate, cell.reset_gate, cell.new_state_net, head, model.decoder.decoder
        self.nets = nn.ParameterList(sheet(net[i]) for net in nets for i in (0, 2))
        layers = model.diffeq_solver.ode_func.gradient_net.layers
        self.field = nn.ParameterList(sheet(x._layer, x._hyper_bias, x._hyper_gate) for x in layers)

    def affine(self, w: Tensor, x: Tensor) -> Tensor:
        return torch.addmm(w[:, -1:], w[:, :-1], x)

    def net(self, i: int, x: Tensor) -> Tensor:
        return self.affine(self.nets[2 * i + 1], self.affine(self.nets[2 * i], x).tanh())

    def read(self, rows: Tensor, known: Tensor) -> Tensor:
        y = s = rows.new_zeros(WIDTH, rows.shape[2])
        for i in range(len(rows) - 1, -1, -1):
            all_in = torch.cat([y, s, rows[i]])
            new, reset = self.net(0, all_in).neg().sigmoid(), self.net(1, all_in).sigmoid()
            fresh = self.net(2, torch.cat([torch.cat([y, s]) * reset.repeat(2, 1), rows[i]]))
            one, two = torch.lerp(y, fresh[:WIDTH], new), torch.lerp(s, fresh[WIDTH:].abs(), new)
            always = self.fault == "neural_ode_deviation_moves_without_observation"
            y, s = one.where(known[i], y), two.where(known[i] | always, s)
        return torch.cat([y, s])

    def slope(self, t: Tensor, z: Tensor) -> Tensor:
        for i, w in enumerate(self.field):
            product, gate = self.affine(w[:, :-3], z.tanh() if i else z), self.affine(w[:, -2:], t)
            z = product * gate.sigmoid() + w[:, -3:-2] * t
        return z

    def solve(self, z: Tensor, times: Tensor) -> Tensor:
        (table, nodes, weights), path = RULE, [z]
        if self.fault == "neural_ode_third_slope_at_the_time_of_the_second":
            nodes = (0, 1 / 3, 1 / 3, 1)
        for i in range(len(times) - 1):
            t, h, slopes = times[i], times[i + 1] - times[i], []
            for row, node in zip(table, nodes, strict=True):
                moved = sum((a * k for a, k in zip(row, slopes, strict=True)), torch.zeros_like(z))
                slopes.append(self.slope(t + node * h, z + h * moved))
            if self.fault == "neural_ode_last_slope_taken_without_gradient":
                slopes[3] = slopes[3].detach()
            path.append(z := z + h * sum(b * k for b, k in zip(weights, slopes, strict=True)))
        return torch.stack(path)

    def forward(self, data: Tensor, mask: Tensor, time_steps: Tensor, noise: Tensor, coef: Tensor) -> Three:
        x, m, times = data.permute(1, 2, 0), mask.to(data).permute(1, 2, 0), time_steps.T[:, None]
        gaps = torch.cat([torch.zeros_like(times[:1]), times[1:] - times[:-1]])
        mean, log = self.net(3, self.read(torch.cat([gaps, x, m], 1), m.amax(1, True) > 0)).tensor_split(2)
        path = self.solve(mean + log.exp().sqrt() * noise.T, times)
        y = self.net(4, path.transpose(0, 1).flatten(1)).unflatten(1, (len(times), -1)).transpose(0, 1)
        count = len(m) if self.fault == "neural_ode_likelihood_averaged_over_all_times" else m.sum(0)
        error = (m * (x - y).square()).sum(0) / (2 * OBSRV_STD**2)
        cost = (error + math.log(OBSRV_STD * math.sqrt(math.tau)) * m.sum(0)) / count
        kl = (mean.square() + log.expm1() - log).sum(0) / (2 * len(mean))
        return y.permute(2, 0, 1), kl, cost.mean(0) + coef * kl


SLOPES, PLACE = ("input gradient", "weight gradient"), "diffeq_solver.ode_func.gradient_net.layers.1"
right(task, "neural_ode_of_time_first", "a tree, split weights, thirds of steps", LatentPath)
right(task, "neural_ode_of_sheets", "packed sheets, columns, a table of the rule", SheetsODE)
wrong(
    task,
    LatentPath,
    neural_ode_gaps_left_in_order_of_time=("an axis not reversed", "encoder_z0"),
    neural_ode_reset_gate_taken_without_gradient=("detach", "encoder_z0.gru_rnn", SLOPES),
    neural_ode_second_layer_gates_its_time_offset_too=("another order", PLACE),
    neural_ode_first_state_without_noise_in_evaluation=("no noise in eval", "", "eval"),
)
wrong(
    task,
    SheetsODE,
    neural_ode_deviation_moves_without_observation=("a mask left out", "encoder_z0.gru_rnn"),
    neural_ode_third_slope_at_the_time_of_the_second=("another time", "diffeq_solver"),
    neural_ode_last_slope_taken_without_gradient=("detach", "diffeq_solver", SLOPES),
    neural_ode_likelihood_averaged_over_all_times=("another count", ""),
)
