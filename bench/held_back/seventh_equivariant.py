"""Points that turn with their space: messages by distances along edges, which push features and positions."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, wrong
from bench.held_back._sixth_ports import few

WIDTH, LAYERS = 10, 3


class Gate(nn.Module):
    """A message by how much it counts."""

    def __init__(self):
        super().__init__()
        self.weigh = nn.Linear(WIDTH, 1)

    def forward(self, m: Tensor) -> Tensor:
        return m * self.weigh(m).sigmoid()


class Equivariant(nn.Module):
    """Features [P, C] and positions [P, 3] along edges [2, E], which end in their first row's points."""

    def __init__(self):
        super().__init__()
        self.edge = nn.Sequential(
            nn.Linear(2 * WIDTH + 1, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU()
        )
        self.gate = Gate()
        self.push = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1, bias=False))
        self.node = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, h: Tensor, x: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
        to, of = edges
        away = x[to] - x[of]
        square = away.square().sum(1, keepdim=True)
        m = self.gate(self.edge(torch.cat([h[to], h[of], square], 1)))
        away = away / (square.sqrt().detach() + 1)
        moves = torch.zeros_like(x).index_add(0, to, away * self.push(m))
        counts = torch.bincount(to, minlength=len(x)).clamp(min=1)
        gathered = torch.zeros_like(h).index_add(0, to, m)
        return h + self.node(torch.cat([h, gathered], 1)), x + moves / counts[:, None]


class Readout(nn.Module):
    """The sum of what the points of each cloud give."""

    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1))

    def forward(self, h: Tensor, owner: Tensor, count: int) -> Tensor:
        given = self.mlp(h).squeeze(1)
        return given.new_zeros(count).index_add(0, owner, given)


class Clouds(nn.Module):
    """Features [N, T, 4], positions [N, T, 3] and how many are real -> an energy and moved positions."""

    def __init__(self):
        super().__init__()
        self.lift, self.norm = nn.Linear(4, WIDTH), nn.BatchNorm1d(WIDTH)
        self.layers = nn.ModuleList(Equivariant() for _ in range(LAYERS))
        self.readout = Readout()

    def forward(self, kinds: Tensor, places: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        real = torch.arange(kinds.shape[1], device=kinds.device) < lengths[:, None]
        owner = real.nonzero()[:, 0]
        edges = ((owner[:, None] == owner) & ~torch.eye(len(owner), dtype=torch.bool).to(real)).nonzero().T
        h, x = self.norm(self.lift(kinds[real])), places[real]
        for layer in self.layers:
            h, x = layer(h, x, edges)
        moved = torch.zeros_like(places).masked_scatter(real[..., None], x)
        return {"energy": self.readout(h, owner, len(real)), "moved": moved}


def _clouds() -> tuple[dict[str, Tensor], Tensor]:
    """Charged points; the targets are an energy and, of each real point, where it goes."""
    lengths = torch.randint(3, 8, (6,))
    real = torch.arange(7) < lengths[:, None]
    kinds, places = torch.randn(6, 7, 4), 1.2 * torch.randn(6, 7, 3)
    kinds, places = kinds * real[..., None], places * real[..., None]
    goal = 0.8 * places + 0.1 * torch.randn(6, 7, 3) * real[..., None]
    energy = (kinds[..., 0] * places.square().sum(2)).sum(1)
    given = {"kinds": kinds, "places": places, "lengths": lengths}
    return given, torch.cat([energy[:, None], goal.flatten(1)], 1)


def _away(outputs: dict[str, Tensor], target: Tensor) -> Tensor:
    target = target.to(outputs["energy"])
    energy = F.smooth_l1_loss(outputs["energy"], target[:, 0])
    return 0.2 * energy + F.mse_loss(outputs["moved"].flatten(1), target[:, 1:])


clouds = few("seventh_clouds", Clouds, _clouds, _away)


class Squares(Port):
    """All pairs of padded points; the first product of an edge apart for its two ends and its length."""

    def take(self, model: Clouds) -> None:
        norm = model.norm
        self.rate, self.eps = norm.momentum, norm.eps
        self.lift, self.lift_b = leaf(model.lift.weight.T), leaf(model.lift.bias)
        self.gain, self.offset = leaf(norm.weight), leaf(norm.bias)
        self.register_buffer("middle", norm.running_mean.clone())
        self.register_buffer("width", norm.running_var.clone())
        self.w = nn.ParameterDict()
        for i, layer in enumerate(model.layers):
            first = layer.edge[0]
            ends = first.weight.split([WIDTH, WIDTH, 1], 1)
            rest = {"to": ends[0].T, "of": ends[1].T, "far": ends[2][:, 0], "shift": first.bias}
            rest |= {"gate": layer.gate.weigh.weight[0], "gate_b": layer.gate.weigh.bias}
            for name, part in (("edge", layer.edge[2:3]), ("push", layer.push), ("node", layer.node)):
                for j, linear in enumerate(part[::2]):
                    rest[f"{name}{j}"] = linear.weight.T
                    if linear.bias is not None:
                        rest[f"{name}{j}_b"] = linear.bias
            self.w.update({f"{name}_{i}": leaf(p) for name, p in rest.items()})
        mlp = model.readout.mlp
        self.out, self.out_b = leaf(mlp[0].weight.T), leaf(mlp[0].bias)
        self.last, self.last_b = leaf(mlp[2].weight[0]), leaf(mlp[2].bias)

    def normed(self, h: Tensor, real: Tensor) -> Tensor:
        """By the statistics of the real points."""
        middle, width = self.middle, self.width
        if self.training:
            count = real.sum()
            middle = (h * real[..., None]).sum((0, 1)) / count
            width = ((h - middle).square() * real[..., None]).sum((0, 1)) / count
            if self.fault != "kept_spread_without_its_correction":
                count = count - 1
            with torch.no_grad():
                self.middle.lerp_(middle, self.rate)
                self.width.lerp_(width * real.sum() / count, self.rate)
        return (h - middle) / (width + self.eps).sqrt() * self.gain + self.offset

    def messages(self, i: int, h: Tensor, far: Tensor) -> Tensor:
        w = self.w
        m = (h @ w[f"to_{i}"])[:, :, None] + (h @ w[f"of_{i}"])[:, None] + w[f"shift_{i}"]
        m = F.silu(F.silu(m + far[..., None] * w[f"far_{i}"]) @ w[f"edge0_{i}"] + w[f"edge0_b_{i}"])
        return m * torch.sigmoid(m @ w[f"gate_{i}"] + w[f"gate_b_{i}"])[..., None]

    def layer(self, i: int, h: Tensor, x: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
        w = self.w
        away = x[:, :, None] - x[:, None]
        square = (away * away).sum(3)
        length = torch.where(pairs, square, 1.0).sqrt()
        m = self.messages(i, h, length if self.fault == "first_lengths_not_squared" and i == 0 else square)
        if not (self.fault == "middle_directions_with_their_length_learnt" and i == 1):
            length = length.detach()
        push = F.silu(m @ w[f"push0_{i}"] + w[f"push0_b_{i}"]) @ w[f"push1_{i}"]
        moves = (pairs[..., None] * away / (length[..., None] + 1) * push).sum(2)
        counts = pairs.sum(2, keepdim=True).clamp(min=1)
        if self.fault == "last_moves_averaged_over_the_filler_too" and i == 2:
            counts = torch.full_like(counts, x.shape[1] - 1)
        both = torch.cat([h, (pairs[..., None] * m).sum(2)], 2)
        new = F.silu(both @ w[f"node0_{i}"] + w[f"node0_b_{i}"]) @ w[f"node1_{i}"] + w[f"node1_b_{i}"]
        return h + new, x + moves / counts

    def forward(self, kinds: Tensor, places: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        steps = torch.arange(kinds.shape[1], device=kinds.device)
        real = steps < lengths[:, None]
        pairs = real[:, :, None] & real[:, None] & (steps[:, None] != steps)
        h, x = self.normed(kinds @ self.lift + self.lift_b, real), places * real[..., None]
        for i in range(LAYERS):
            h, x = self.layer(i, h, x, pairs)
        given = F.silu(h @ self.out + self.out_b) @ self.last + self.last_b
        return {"energy": (given * real).sum(1), "moved": x * real[..., None]}


right(clouds, "clouds_as_squares_of_pairs", "lists of edges as padded squares", Squares)
wrong(
    clouds,
    Squares,
    first_lengths_not_squared=("a length in place of its square", ("layers.0", "layers.0.edge")),
    middle_directions_with_their_length_learnt=("a detach too few", "layers.1", "input gradient"),
    last_moves_averaged_over_the_filler_too=("padding counted in a mean", "layers.2"),
    kept_spread_without_its_correction=("no correction in the running variance", "norm", "buffer"),
)
