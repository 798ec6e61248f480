"""Two ports of a small TD3+BC: a tree of cells and towers, time first, and one class of packed weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _forty_second_td_three as origin
from bench.held_back._fifth_vision import right
from bench.held_back._forty_second_td_three import TD3, Scaler, transitions, weighted_losses
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("forty_second_td_three", TD3, transitions, weighted_losses)
NOISE, EDGE, GAMMA = origin.POLICY_NOISE, origin.NOISE_CLIP, origin.DISCOUNT
ALPHA, DELTA = origin.ALPHA, origin.DELTA


class Line(nn.Module):
    """An affine map, which may be passed through without being trained."""

    def __init__(self, weight: Tensor, *biases: Tensor):
        super().__init__()
        self.matrix, self.offset = leaf(weight.T), pile(biases)

    def forward(self, x: Tensor, held: bool = False) -> Tensor:
        matrix, offset = self.matrix, self.offset.sum(0)
        return x @ matrix.detach() + offset.detach() if held else x @ matrix + offset


class Recall(nn.Module):
    """A cell of four gates along [T, N, S], whose memory stops at the end of each history."""

    def __init__(self, encoder: nn.Module):
        super().__init__()
        cell, norm = encoder.lstm, encoder.norm
        rows = torch.cat([cell.weight_ih_l0, cell.weight_hh_l0], 1).chunk(4)
        biases = zip(cell.bias_ih_l0.chunk(4), cell.bias_hh_l0.chunk(4), strict=True)
        lines = (Line(row, *pair) for row, pair in zip(rows, biases, strict=True))
        self.enter, self.keep, self.new, self.show = lines
        self.gain, self.shift, self.eps = leaf(norm.weight), leaf(norm.bias), norm.eps
        self.endless = False

    def forward(self, x: Tensor, length: Tensor, held: bool = False) -> Tensor:
        h = c = x.new_zeros(x.shape[1], len(self.gain))
        for t, now in enumerate(x):
            both = torch.cat([now, h], 1)
            enter, keep, show = (x(both, held).sigmoid() for x in (self.enter, self.keep, self.show))
            c_new = keep * c + enter * self.new(both, held).tanh()
            going = (length > t)[:, None] | self.endless
            h, c = torch.where(going, show * c_new.tanh(), h), torch.where(going, c_new, c)
        h = h - h.mean(1, keepdim=True)
        h = h / (h.square().mean(1, keepdim=True) + self.eps).sqrt()
        gain, shift = (self.gain.detach(), self.shift.detach()) if held else (self.gain, self.shift)
        return torch.addcmul(shift, h, gain)


class Side(nn.Module):
    """Towers of three lines each on what is recalled, and on an action where there is one."""

    def __init__(self, encoder: nn.Module, *layers: nn.Linear):
        super().__init__()
        self.recall, self.lines = Recall(encoder), nn.ModuleList(Line(x.weight, x.bias) for x in layers)

    def forward(self, x: Tensor, length: Tensor, *action: Tensor, held: bool = False) -> Tensor:
        given, found = torch.cat([self.recall(x, length, held), *action], 1), []
        for i in range(0, len(self.lines), 3):
            x = self.lines[i + 1](self.lines[i](given, held).relu(), held).relu()
            found.append(self.lines[i + 2](x, held))
        return torch.cat(found, 1)


class TreeOfSides(Port):
    """Sides, time first; actions move in a box from -1 to 1 until they are judged."""

    def take(self, model: TD3) -> None:
        networks = model.actor, model.critic, model.actor_target, model.critic_target
        self.player, self.judges, *old = (Side(*network.children()) for network in networks)
        self.scaler, self.old = Scaler(model.state_norm), nn.ModuleList(old).requires_grad_(False)
        self.register_buffer("box", torch.stack([model.actor.action_scale, model.actor.action_bias]))
        self.scaler.always = self.fault == "td_three_state_norm_moves_in_evaluation"
        self.judges.recall.endless = self.fault == "td_three_critic_history_read_at_the_padded_end"

    def forward(self, state, action, reward, next_state, not_done, noise, length) -> tuple[Tensor, ...]:
        reach, middle = self.box
        self.scaler.learn(state, (torch.arange(state.shape[1]) < length[:, None])[:, :, None])
        now, later = (self.scaler(x.transpose(0, 1)) for x in (state, next_state))
        place = self.old[0](later, length).tanh() + F.hardtanh(NOISE * noise, -EDGE, EDGE)
        if self.fault != "td_three_target_action_left_outside_the_box":
            place = F.hardtanh(place)
        worse = self.old[1](later, length, middle + reach * place).amin(1, True)
        goal = (reward + GAMMA * worse * not_done).detach()
        one, two = self.judges(now, length, action).split(1, 1)
        near = (far := (one - goal).abs()).clamp(max=DELTA)
        wrongness = near * (far - near / 2) + (two - goal).square()
        own = middle + reach * self.player(now, length).tanh()
        praise = self.judges(now, length, own, held=True)[:, :1]
        size = praise.abs().mean()
        if self.fault != "td_three_behaviour_weight_with_gradient":
            size = size.detach()
        return own, one, two, goal, wrongness, (own - action).square().mean(1, True) - ALPHA * praise / size


def packed(layer: nn.Linear) -> Tensor:
    return torch.cat([layer.weight.T, layer.bias[None]])


def memory(encoder: nn.Module) -> tuple[Tensor, Tensor]:
    """The cell's product with two rows for its biases, and the norm's two rows."""
    cell = encoder.lstm
    biases = torch.stack([cell.bias_ih_l0, cell.bias_hh_l0])
    rows = torch.cat([cell.weight_ih_l0.T, cell.weight_hh_l0.T, biases])
    return rows, torch.stack([encoder.norm.weight, encoder.norm.bias])


def affine(x: Tensor, rows: Tensor) -> Tensor:
    matrix, biases = rows.tensor_split([x.shape[-1]], -2)
    return x @ matrix + biases.sum(-2, True)


class PackedTD3(Port):
    """Rows of weights and biases, the twins stacked, the target networks in buffers."""

    def take(self, model: TD3) -> None:
        self.a, self.q = nn.ParameterList(), nn.ParameterList()
        pairs = (model.actor, model.critic, False), (model.actor_target, model.critic_target, True)
        for actor, critic, old in pairs:
            a = [*memory(actor.encoder), *map(packed, (actor.l1, actor.l2, actor.l3))]
            twins = ((critic.l1, critic.l4), (critic.l2, critic.l5), (critic.l3, critic.l6))
            q = [*memory(critic.encoder), *(pile(map(packed, pair)) for pair in twins)]
            for i, (x, y) in enumerate(zip(a, q, strict=True)):
                if old:
                    self.register_buffer(f"a{i}", x.detach().clone())
                    self.register_buffer(f"q{i}", y.detach().clone())
                else:
                    self.a.append(leaf(x)), self.q.append(leaf(y))
        self.scaler = Scaler(model.state_norm)
        self.register_buffer("box", torch.stack([model.actor.action_scale, model.actor.action_bias]))

    def read(self, x: Tensor, length: Tensor, rows: Tensor, norm: Tensor, eps: float = 1e-5) -> Tensor:
        h = c = x.new_zeros(len(x), norm.shape[1])
        found = []
        for t in range(x.shape[1]):
            i, f, g, o = affine(torch.cat([x[:, t], h], 1), rows).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            found.append(h := o.sigmoid() * c.tanh())
        x = torch.stack(found)[length - 1, torch.arange(len(x))]
        return F.layer_norm(x, norm.shape[1:], *norm, eps)

    def act(self, x: Tensor, length: Tensor, w: list[Tensor], middle: float = 1, eps: float = 1e-5) -> Tensor:
        x = self.read(x, length, *w[:2], eps)
        x = affine(affine(x, w[2]).relu(), w[3]).relu()
        return torch.addcmul(middle * self.box[1], affine(x, w[4]).tanh(), self.box[0])

    def judge(self, x: Tensor, length: Tensor, action: Tensor, w: list[Tensor], swap: bool = False) -> Tensor:
        x = torch.cat([self.read(x, length, *w[:2]), action], 1)
        x = affine(affine(x, w[2]).relu(), w[3]).relu()
        bias = w[4][[0, 0], -1:] if swap else w[4][:, -1:]
        return x @ w[4][:, :-1] + bias

    def forward(self, state, action, reward, next_state, not_done, noise, length) -> tuple[Tensor, ...]:
        old_a, old_q = ([self.get_buffer(f"{kind}{i}") for i in range(5)] for kind in "aq")
        self.scaler.learn(state, (torch.arange(state.shape[1]) < length[:, None])[:, :, None])
        now, later = self.scaler(state), self.scaler(next_state)
        middle = 0 if self.fault == "td_three_target_actor_forgets_the_middle_of_the_box" else 1
        eps = 1e-3 if self.fault == "td_three_actor_history_norm_of_larger_eps" else 1e-5
        trains = self.fault == "td_three_actor_loss_trains_the_critic"
        swap = self.fault == "td_three_second_critic_adds_the_bias_of_the_first"
        with torch.no_grad():
            aim = self.act(later, length, old_a, middle)
            aim = aim + self.box[0] * (noise * NOISE).clamp(-EDGE, EDGE)
            aim = aim.clamp(self.box[1] - self.box[0], self.box[1] + self.box[0])
            goal = reward + GAMMA * not_done * self.judge(later, length, aim, old_q).amin(0)
        one, two = self.judge(now, length, action, list(self.q), swap)
        huber = DELTA * F.smooth_l1_loss(one, goal, reduction="none", beta=DELTA)
        pi = self.act(now, length, list(self.a), eps=eps)
        praise = self.judge(now, length, pi, [w if trains else w.detach() for w in self.q])[0]
        push = praise * (ALPHA / praise.detach().abs().mean())
        cloned = F.mse_loss(pi, action, reduction="none").mean(1, True)
        return pi, one, two, goal, huber + (two - goal) ** 2, cloned - push


SLOPES, LEFT_OUT = ("input gradient", "weight gradient"), "a detach left out"
right(task, "td_three_as_a_tree_of_sides", "a tree, time first, gates apart, another box", TreeOfSides)
right(task, "td_three_of_packed_weights", "packed rows, stacked twins, buffers as targets", PackedTD3)
wrong(
    task,
    TreeOfSides,
    td_three_state_norm_moves_in_evaluation=("statistics moved in eval", "state_norm", "eval"),
    td_three_critic_history_read_at_the_padded_end=("padding read", "critic.encoder"),
    td_three_target_action_left_outside_the_box=("a clip left out", ""),
    td_three_behaviour_weight_with_gradient=(LEFT_OUT, "", SLOPES),
)
wrong(
    task,
    PackedTD3,
    td_three_actor_history_norm_of_larger_eps=("another eps", "actor.encoder.norm"),
    td_three_target_actor_forgets_the_middle_of_the_box=("a term left out", "actor_target"),
    td_three_second_critic_adds_the_bias_of_the_first=("a weight taken twice", "critic.l6"),
    td_three_actor_loss_trains_the_critic=(LEFT_OUT, "", "weight gradient"),
)
