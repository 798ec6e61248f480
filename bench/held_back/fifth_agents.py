"""A duelling net of distributions over returns with a target copy, the projected target made inside."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import method_of
from bench.held_back._fifth_tables import SAME, fault, layer_norm, named, right
from bench.held_back._fourth_ports import Port, leaf, pile
from bench.tasks import _task

ACTIONS, ATOMS, WIDTH, LOW, STEP, DISCOUNT, EVERY = 4, 9, 20, -2.0, 0.5, 0.5, 5


class Duelling(nn.Module):
    """[N, 6] -> logits [N, actions, atoms]."""

    def __init__(self):
        super().__init__()
        first = [nn.Linear(6, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
        self.trunk = nn.Sequential(*first)
        self.value, self.advantage = nn.Linear(WIDTH, ATOMS), nn.Linear(WIDTH, ACTIONS * ATOMS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x)
        gain = self.advantage(x).unflatten(1, (ACTIONS, ATOMS))
        return self.value(x)[:, None] + gain - gain.mean(1, keepdim=True)


class Copy(nn.Module):
    """The net as it was at the last step that five divides, in buffers."""

    def __init__(self, net: Duelling):
        super().__init__()
        for name, value in net.named_parameters():
            self.register_buffer(name.replace(".", "_"), value.detach().clone())
        self.register_buffer("count", torch.tensor(0))

    @torch.no_grad()
    def follow(self, net: Duelling) -> None:
        if self.count % EVERY == 0:
            for name, value in net.named_parameters():
                self.get_buffer(name.replace(".", "_")).copy_(value)
        self.count += 1

    def layer(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.get_buffer(name + "_weight"), self.get_buffer(name + "_bias"))

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(self.layer(x, "trunk_0"), (WIDTH,), self.trunk_1_weight, self.trunk_1_bias).relu()
        x = self.layer(x, "trunk_3").relu()
        gain = self.layer(x, "advantage").unflatten(1, (ACTIONS, ATOMS))
        return self.layer(x, "value")[:, None] + gain - gain.mean(1, keepdim=True)


class Project(nn.Module):
    """The distribution of the discounted return, back on the atoms."""

    def forward(self, chances: Tensor, reward: Tensor, done: Tensor) -> Tensor:
        atoms = LOW + STEP * torch.arange(ATOMS).to(chances)
        moved = reward[:, None] + DISCOUNT * (1 - done[:, None]) * atoms
        place = (moved.clamp(LOW, -LOW) - LOW) / STEP
        below = place.floor().long().clamp(max=ATOMS - 2)
        part = place - below
        spread = torch.zeros_like(chances).scatter_add(1, below, chances * (1 - part))
        return spread.scatter_add(1, below + 1, chances * part)


class Agent(nn.Module):
    """What was seen, done and earned -> the log chances of the action's atoms and their targets."""

    def __init__(self):
        super().__init__()
        self.net = Duelling()
        self.copy, self.project = Copy(self.net), Project()

    def forward(self, seen: Tensor, then: Tensor, action: Tensor, reward: Tensor, done: Tensor) -> dict:
        if self.training:
            self.copy.follow(self.net)
        rows = torch.arange(len(seen))
        chosen = self.net(seen)[rows, action].log_softmax(1)
        with torch.no_grad():
            atoms = LOW + STEP * torch.arange(ATOMS).to(seen)
            best = (self.net(then).softmax(2) @ atoms).argmax(1)
        target = self.project(self.copy(then)[rows, best].softmax(1), reward, done)
        return {"chosen": chosen, "target": target}


@dataclass
class Learned:
    target: Tensor
    chosen: Tensor


class TwoCopies(Port):
    """The streams in one weight; the weights in a dict, their copies in buffers."""

    def take(self, model: Agent) -> None:
        net = model.net
        streams = torch.cat([net.value.weight, net.advantage.weight]).view(1 + ACTIONS, ATOMS, WIDTH)
        shifts = torch.cat([net.value.bias, net.advantage.bias]).view(1 + ACTIONS, ATOMS)
        trunk, norm = net.trunk, net.trunk[1]
        kept = {"first": trunk[0].weight.T, "first_shift": trunk[0].bias, "norm": norm.weight}
        kept |= {"norm_shift": norm.bias, "second": trunk[3].weight.T, "second_shift": trunk[3].bias}
        self.w = nn.ParameterDict({name: leaf(p) for name, p in kept.items()} | {"streams": leaf(streams)})
        self.w["streams_shift"] = pile(shifts)
        for name, value in self.w.items():
            self.register_buffer("old_" + name, value.detach().clone())
        self.register_buffer("ticks", model.copy.count.clone())

    def logits(self, x: Tensor, w: dict[str, Tensor]) -> Tensor:
        h = layer_norm(x @ w["first"] + w["first_shift"], w["norm"], w["norm_shift"]).relu()
        h = torch.relu(h @ w["second"] + w["second_shift"])
        if self.fault == "trunk_held_for_the_value" and w is self.w:
            gain = torch.einsum("nw,jaw->nja", h, w["streams"][1:]) + w["streams_shift"][1:]
            value = torch.einsum("nw,aw->na", h.detach(), w["streams"][0]) + w["streams_shift"][0]
        else:
            streams = torch.einsum("nw,jaw->nja", h, w["streams"]) + w["streams_shift"]
            value, gain = streams[:, 0], streams[:, 1:]
        return value[:, None] + (gain - gain.mean(1, keepdim=True))

    @torch.no_grad()
    def follow(self) -> None:
        early = 1 if self.fault == "copied_a_step_early" else 0
        if (self.ticks + early) % EVERY == 0:
            for name, value in self.w.items():
                self.get_buffer("old_" + name).copy_(value)
        self.ticks += 1

    @torch.no_grad()
    def target(self, then: Tensor, reward: Tensor, done: Tensor) -> Tensor:
        old = self.logits(then, {name: self.get_buffer("old_" + name) for name in self.w})
        chooser = old if self.fault == "target_chooses_for_itself" else self.logits(then, self.w)
        atoms = torch.linspace(LOW, -LOW, ATOMS).to(old)
        best = (chooser.softmax(2) * atoms).sum(2).argmax(1)
        chances = old[torch.arange(len(then)), best].softmax(1)
        moved = torch.where(done[:, None] > 0, reward[:, None], reward[:, None] + DISCOUNT * atoms)
        place = (moved.clamp(LOW, -LOW) - LOW) / STEP
        if self.fault == "whole_atoms_lose_their_mass":
            low, high = place.floor(), place.ceil()
            spread = torch.zeros_like(chances).scatter_add(1, low.long(), chances * (high - place))
            return spread.scatter_add(1, high.long(), chances * (place - low))
        near = (1 - (place[:, :, None] - torch.arange(ATOMS)).abs()).clamp(min=0)
        return torch.einsum("na,nab->nb", chances, near)

    def forward(self, seen: Tensor, then: Tensor, action: Tensor, reward: Tensor, done: Tensor) -> Learned:
        if self.training:
            self.follow()
        taken = F.one_hot(action, ACTIONS).to(seen)
        chosen = torch.einsum("nja,nj->na", self.logits(seen, self.w), taken).log_softmax(1)
        return Learned(self.target(then, reward, done), chosen)


def _lived() -> tuple[dict[str, Tensor], Tensor]:
    seen = torch.randn(24, 6)
    earned = {"reward": torch.randint(-1, 2, (24,)).float(), "done": (torch.rand(24) < 0.3).float()}
    then = seen + 0.5 * torch.randn(24, 6)
    return {"seen": seen, "then": then, "action": torch.randint(ACTIONS, (24,)), **earned}, torch.zeros(24)


def _cross(outputs: dict | Learned, targets: Tensor) -> Tensor:
    chosen, target = named(outputs, "chosen", "target")
    return -(target.detach() * chosen).sum(1).mean()


agent = _task("fifth_agent", Agent, _lived, _cross)


@method_of("project", SAME, "another formula", agent)
def projected_by_tents(self: Project, chances: Tensor, reward: Tensor, done: Tensor) -> Tensor:
    """Each atom gets of every moved one by how near that is."""
    atoms = LOW + STEP * torch.arange(ATOMS).to(chances)
    moved = torch.clamp(reward[:, None] + DISCOUNT * atoms * (1 - done)[:, None], LOW, -LOW)
    return (chances[:, None] * (1 - (moved[:, None] - atoms[:, None]).abs() / STEP).relu()).sum(2)


right(agent, TwoCopies, "streams_in_one_weight", "port, fused streams")
fault(
    agent, TwoCopies, "trunk_held_for_the_value", "a detach too many", ("net.value", "net"), "input gradient"
)
fault(agent, TwoCopies, "whole_atoms_lose_their_mass", "mass lost at whole numbers", "project")
fault(agent, TwoCopies, "target_chooses_for_itself", "another net chooses", "", step=1)
fault(agent, TwoCopies, "copied_a_step_early", "sets in late", "copy", step=4)
