"""Slots that compete for the places of a picture, each drawn by itself and laid over the others."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_tables import layer_norm
from bench.held_back._fifth_vision import right, tapped
from bench.held_back._fourth_ports import Port, leaf, wrong
from bench.held_back._sixth_ports import Gates, few


class Place(nn.Module):
    """Adds a linear map of each place's distances from the four sides to [..., H, W, C]."""

    def __init__(self, width: int):
        super().__init__()
        self.map = nn.Linear(4, width)

    def forward(self, x: Tensor) -> Tensor:
        down, across = (torch.linspace(0, 1, size, dtype=x.dtype) for size in x.shape[-3:-1])
        down, across = torch.meshgrid(down, across, indexing="ij")
        return x + self.map(torch.stack([down, across, 1 - down, 1 - across], -1))


class Compete(nn.Module):
    """For each slot a mean of the places' values, by shares that a place gives to all slots."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, slots: Tensor, x: Tensor) -> Tensor:
        scores = self.q(self.norm(slots)) @ self.k(x).mT / x.shape[-1] ** 0.5
        shares = scores.softmax(1) + 1e-3
        return shares / shares.sum(2, keepdim=True) @ self.v(x)


class Slots(nn.Module):
    def __init__(self, width: int, count: int = 4, turns: int = 3):
        super().__init__()
        self.start, self.turns = nn.Parameter(torch.randn(count, width)), turns
        self.norm, self.compete, self.cell = nn.LayerNorm(width), Compete(width), nn.GRUCell(width, width)
        self.between = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 24), nn.ReLU(), nn.Linear(24, width))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        slots = self.start.expand(len(x), -1, -1)
        for _ in range(self.turns):
            found = self.compete(slots, x)
            slots = self.cell(found.flatten(0, 1), slots.flatten(0, 1)).view_as(slots)
            slots = slots + self.mlp(self.between(slots))
        return slots


class Draw(nn.Module):
    """Slots [N, S, C] -> their pictures [N, S, 3, H, W] and their heights [N, S, 1, H, W]."""

    def __init__(self, width: int):
        super().__init__()
        self.place = Place(width)
        self.mlp = nn.Sequential(nn.Linear(width, 20), nn.ReLU(), nn.Linear(20, 4))

    def forward(self, slots: Tensor, high: int, wide: int) -> tuple[Tensor, Tensor]:
        x = self.place(slots[:, :, None, None].expand(-1, -1, high, wide, -1))
        return self.mlp(x).movedim(-1, 2).split([3, 1], 2)


class SlotPictures(nn.Module):
    """Pictures [N, 3, 8, 6] -> themselves and each slot's share of them."""

    def __init__(self):
        super().__init__()
        self.look = nn.Sequential(
            nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 16, 3, padding=1), nn.ReLU()
        )
        self.place, self.slots, self.draw = Place(16), Slots(16), Draw(16)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        places = self.place(self.look(x).movedim(1, -1)).flatten(1, 2)
        pictures, heights = self.draw(self.slots(places), *x.shape[2:])
        shares = heights.softmax(1)
        return {"pictures": (pictures * shares).sum(1), "shares": shares}


def _blocks() -> tuple[Tensor, Tensor]:
    """Two coloured rectangles on a ground of one colour."""
    x = torch.rand(5, 3, 1, 1).expand(-1, -1, 8, 6).clone()
    for picture in x:
        for _ in range(2):
            top, left = int(torch.randint(6, ())), int(torch.randint(4, ()))
            picture[:, top : top + 3, left : left + 3] = torch.rand(3, 1, 1)
    return x, x


slots = few("sixth_slots", SlotPictures, _blocks, lambda outputs, x: F.mse_loss(outputs["pictures"], x))


class SlotsInRows(Port):
    """Channels last; keys and values once for all turns; slots and sides drawn apart at first."""

    def take(self, model: SlotPictures) -> None:
        w = {name: p for name, p in model.named_parameters() if not name.startswith("slots.cell.")}
        kv = torch.cat([w.pop("slots.compete.k.weight"), w.pop("slots.compete.v.weight")])
        self.kv = leaf(kv.T)
        self.q = leaf(w.pop("slots.compete.q.weight").T)
        short = {"look.0": "c1", "look.2": "c2", "place.map": "sides", "draw.place.map": "sides_drawn"}
        short |= {"slots.norm": "before", "slots.compete.norm": "asking", "slots.between": "between"}
        short |= {"slots.mlp.0": "up", "slots.mlp.2": "down", "draw.mlp.0": "d1", "draw.mlp.2": "d2"}
        self.first = leaf(w.pop("slots.start"))
        self.w = nn.ParameterDict()
        for name, p in w.items():
            at, _, kind = name.rpartition(".")
            self.w[short[at] + ("_w" if kind == "weight" else "_b")] = leaf(p)
        early = self.fault == "slots_reset_before_the_product"
        self.gates = Gates(dict(model.slots.cell.named_parameters()), early)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.w[name + "_w"].T + self.w[name + "_b"]

    def normed(self, name: str, x: Tensor) -> Tensor:
        return layer_norm(x, self.w[name + "_w"], self.w[name + "_b"])

    def sides(self, name: str, high: int, wide: int) -> Tensor:
        index = torch.arange(high * wide).to(self.q)
        down, across = (index / wide).floor() / (high - 1), index % wide / (wide - 1)
        if self.fault == "drawn_places_with_rows_for_columns" and name == "sides_drawn":
            down, across = across, down
        return self.linear(name, torch.stack([down, across, 1 - down, 1 - across], 1))

    def turn(self, held: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("nsc,npc->nps", self.normed("asking", held) @ self.q, k) / 4
        shares = scores.softmax(1 if self.fault == "places_compete_for_the_slots" else 2) + 1e-3
        found = torch.einsum("nps,npc->nsc", shares, v) / shares.sum(1)[..., None]
        held = self.gates(found, held)
        mid = self.normed("between", held)
        if self.fault == "slots_go_on_from_their_norm":
            held = mid
        return held + self.linear("down", self.linear("up", mid).relu())

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        count, _, high, wide = x.shape
        x = (tapped(x.movedim(1, -1), self.w["c1_w"]) + self.w["c1_b"]).relu()
        x = (tapped(x, self.w["c2_w"]) + self.w["c2_b"]).relu().flatten(1, 2)
        k, v = (self.normed("before", x + self.sides("sides", high, wide)) @ self.kv).chunk(2, 2)
        held = self.first.repeat(count, 1, 1)
        for left in (2, 1, 0):
            if self.fault == "slots_held_before_the_last_turn" and left == 0:
                held = held.detach()
            held = self.turn(held, k, v)
        sides = self.linear("d1", self.sides("sides_drawn", high, wide))
        layer = (held @ self.w["d1_w"].T)[:, :, None] + sides
        drawn = self.linear("d2", layer.relu())
        shares = drawn[..., 3:].softmax(1)
        pictures = torch.einsum("nspc,nspo->ncp", drawn[..., :3], shares).unflatten(2, (high, wide))
        return {"pictures": pictures, "shares": shares.mT.unflatten(3, (high, wide))}


right(slots, "slots_with_keys_once_for_all_turns", "hoisted products, places in rows", SlotsInRows)
wrong(
    slots,
    SlotsInRows,
    places_compete_for_the_slots=("softmax over another axis", "slots.compete"),
    slots_reset_before_the_product=("reset gate at another point", "slots.cell"),
    slots_go_on_from_their_norm=("residual at another point", "slots"),
    drawn_places_with_rows_for_columns=("swapped axes", "draw.place"),
    slots_held_before_the_last_turn=("a detach too many", "slots", ("input gradient", "weight gradient")),
)
