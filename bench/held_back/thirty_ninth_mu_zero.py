"""Two ports of a small MuZero: a tree of modules with the channels last, and one class of stacked weights."""

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _thirty_ninth_mu_zero as mz
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, Rows, leaf, pile, spatial, wrong
from bench.held_back._sixth_ports import few

task = few("thirty_ninth_mu_zero", mz.MuZeroNetwork, mz.games, mz.weighted)


class Stage(nn.Module):
    """A convolution of [N, H, W, C] and a norm; what is given is added before the rectifier."""

    def __init__(self, conv: nn.Module, norm: nn.Module):
        super().__init__()
        self.kernel, self.norm = leaf(conv.weight), Rows(norm)

    def forward(self, x: Tensor, more: Tensor | float = 0) -> Tensor:
        return (self.norm(spatial(x, self.kernel)) + more).relu()


class Tower(nn.Module):
    def __init__(self, blocks: nn.ModuleList):
        super().__init__()
        self.inner = nn.ModuleList(Stage(x.conv1, x.bn1) for x in blocks)
        self.outer = nn.ModuleList(Stage(x.conv2, x.bn2) for x in blocks)

    def forward(self, x: Tensor) -> Tensor:
        for inner, outer in zip(self.inner, self.outer, strict=True):
            x = outer(inner(x), x)
        return x


class Head(nn.Module):
    """Logits of a state; the first product reads its axes as they stand."""

    def __init__(self, conv: nn.Module, fc: nn.Sequential):
        super().__init__()
        self.squeeze, self.offset = leaf(conv.weight.flatten(1).T), leaf(conv.bias)
        self.read = leaf(fc[0].weight.unflatten(1, (-1, mz.HIGH, mz.WIDE)).permute(2, 3, 1, 0))
        self.bias, self.last = leaf(fc[0].bias), leaf(torch.cat((fc[2].weight.T, fc[2].bias[None])))

    def forward(self, x: Tensor) -> Tensor:
        x = (x @ self.squeeze + self.offset).relu()
        x = (torch.einsum("nhwc,hwco->no", x, self.read) + self.bias).relu()
        return x @ self.last[:-1] + self.last[-1]


def unit(x: Tensor, axes: tuple[int, ...] = (1, 2, 3)) -> Tensor:
    low = x.amin(axes, True)
    return (x - low) / (x.amax(axes, True) - low + 1e-5)


def miss(logits: Tensor, value: Tensor) -> Tensor:
    """The cross entropy to a hat about h of the value."""
    grown = value.detach()
    grown = grown / ((grown.abs() + 1).sqrt() + 1) + mz.EPS * grown
    bins = torch.arange(-mz.SUPPORT, mz.SUPPORT + 1).to(logits)
    hat = (1 - (grown.clamp(-mz.SUPPORT, mz.SUPPORT)[..., None] - bins).abs()).relu()
    return logits.logsumexp(-1) - (hat * logits).sum(-1)


class MuZeroOfStages(Port):
    """Towers and heads with the channels last; the kernel of the action stands alone."""

    def take(self, model: mz.MuZeroNetwork) -> None:
        see, move, judge = model.representation_network, model.dynamics_network, model.prediction_network
        self.eye, self.see = Stage(see.conv, see.bn), Tower(see.resblocks)
        kernel = move.conv.weight
        self.turn, self.act, self.norm = leaf(kernel[:, :-1]), leaf(kernel[:, -1:]), Rows(move.bn)
        self.move, self.judge = Tower(move.resblocks), Tower(judge.resblocks)
        self.reward = Head(move.conv1x1_reward, move.fc)
        self.value = Head(judge.conv1x1_value, judge.fc_value)
        self.policy = Head(judge.conv1x1_policy, judge.fc_policy)
        self.project, self.guess = deepcopy(model.projection), deepcopy(model.projection_head)
        weight = self.project[0].weight.unflatten(1, (mz.CHANNELS, mz.HIGH, mz.WIDE))
        self.project[0].weight = leaf(weight.permute(0, 2, 3, 1).flatten(1))
        self.move.inner[1].norm.own = self.fault == "mu_zero_second_dynamics_block_by_batch_in_eval"
        self.half = 1 if self.fault == "mu_zero_state_enters_dynamics_with_its_whole_gradient" else 0.5
        self.count = mz.ACTIONS - (self.fault == "mu_zero_action_plane_divided_by_one_action_fewer")
        self.axes = (1, 2) if self.fault == "mu_zero_representation_scaled_by_channel" else (1, 2, 3)

    def sight(self, x: Tensor) -> Tensor:
        return unit(self.see(self.eye(x.movedim(-3, -1))), self.axes)

    def forward(self, observation, action, value, reward, policy, mask) -> tuple[Tensor, ...]:
        h = self.sight(observation[:, 0])
        seen, rewards, states = [self.judge(h)], [], []
        for a in action.unbind(1):
            h = h.detach() + self.half * (h - h.detach())
            plane = (a.to(h) / self.count)[:, None, None, None].expand(-1, mz.HIGH, mz.WIDE, 1)
            x = self.norm(spatial(h, self.turn) + spatial(plane, self.act)) + h
            x = self.move(x.relu())
            rewards.append(self.reward(x))
            h = unit(x)
            seen.append(self.judge(h)), states.append(h.flatten(1))
        p, v, r = (torch.stack(x, 1) for x in ([*map(self.policy, seen)], [*map(self.value, seen)], rewards))
        online = F.normalize(self.guess(self.project(torch.cat(states))), dim=-1)
        goal = self.project(self.sight(observation[:, 1:].transpose(0, 1).flatten(0, 1)).flatten(1))
        apart = 1 - (online * F.normalize(goal.detach(), dim=-1)).sum(-1).view(mz.STEPS, -1).T
        lost = -(policy * p.log_softmax(-1)).sum(-1) * mask + miss(v, value) / 4
        later = lost[:, 1:] + miss(r, reward) + 2 * apart * mask[:, 1:]
        return p, mz.support_to_scalar(v), mz.support_to_scalar(r), lost[:, 0] + later.mean(1)


class StackedMuZero(Port):
    """All kernels of the blocks in one stack, all norms in another; heads are lists of tensors."""

    def take(self, model: mz.MuZeroNetwork) -> None:
        see, move, judge = model.representation_network, model.dynamics_network, model.prediction_network
        blocks = [*see.resblocks, *move.resblocks, *judge.resblocks]
        norms = [x for b in blocks for x in (b.bn1, b.bn2)] + [see.bn, move.bn]
        self.kernels = pile(x.weight for b in blocks for x in (b.conv1, b.conv2))
        self.norms = leaf(torch.stack([torch.stack((x.weight, x.bias)) for x in norms]))
        kept = torch.stack([torch.stack((x.running_mean, x.running_var)) for x in norms])
        self.register_buffer("kept", kept)
        self.ends = nn.ParameterList(map(leaf, (see.conv.weight, move.conv.weight)))
        convs = move.conv1x1_reward, judge.conv1x1_value, judge.conv1x1_policy
        self.thin = leaf(torch.cat([torch.cat((x.weight.flatten(1), x.bias[:, None]), 1) for x in convs]))
        heads = move.fc, judge.fc_value, judge.fc_policy, model.projection, model.projection_head
        full = (torch.cat((x[k].weight, x[k].bias[:, None]), 1) for x in heads for k in (0, 2))
        self.full = nn.ParameterList(map(leaf, full))

    def normed(self, x: Tensor, scale: Tensor, kept: Tensor, eps: float = 1e-5) -> Tensor:
        return F.batch_norm(x, kept[0], kept[1], scale[0], scale[1], self.training, 0.1, eps)

    def blocks(self, x: Tensor, first: int, last: int) -> Tensor:
        wide = "mu_zero_prediction_block_with_another_epsilon"
        for i in range(first, last, 2):
            y = F.conv2d(x, self.kernels[i], padding=1)
            y = F.conv2d(self.normed(y, self.norms[i], self.kept[i]).relu(), self.kernels[i + 1], padding=1)
            eps = 1e-3 if self.fault == wide and i == 8 else 1e-5
            x = (x + self.normed(y, self.norms[i + 1], self.kept[i + 1], eps)).relu()
        return x

    def dense(self, x: Tensor, i: int) -> Tensor:
        x = F.linear(x, self.full[2 * i][:, :-1], self.full[2 * i][:, -1])
        return F.linear(x.relu(), self.full[2 * i + 1][:, :-1], self.full[2 * i + 1][:, -1])

    def head(self, x: Tensor, i: int) -> Tensor:
        rows = self.thin.split([2, 3, 4])[i]
        x = torch.einsum("oc,nchw->nohw", rows[:, :-1], x) + rows[:, -1, None, None]
        if self.fault != "mu_zero_policy_head_leaves_out_its_relu" or i < 2:
            x = x.clamp(min=0)
        return self.dense(x.flatten(1), i)

    def look(self, x: Tensor) -> Tensor:
        x = self.normed(F.conv2d(x, self.ends[0], padding=1), self.norms[-2], self.kept[-2])
        return unit(self.blocks(x.relu(), 0, 4))

    def forward(self, observation, action, value, reward, policy, mask) -> tuple[Tensor, ...]:
        h, p, v, r, states = self.look(observation[:, 0]), [], [], [], []
        for k in range(mz.STEPS + 1):
            if k:
                h = (h + h.detach()) / 2
                plane = (action[:, k - 1].to(h) / mz.ACTIONS)[:, None, None, None].expand_as(h[:, :1])
                x = torch.cat((h, plane), 1)
                x = self.normed(F.conv2d(x, self.ends[1], padding=1), self.norms[-1], self.kept[-1])
                x = self.blocks((x + h).relu(), 4, 8)
                h = unit(x)
                r.append(self.head(x, 0)), states.append(h.flatten(1))
            y = self.blocks(h, 8, 10)
            v.append(self.head(y, 1)), p.append(self.head(y, 2))
        p, v, r = (torch.stack(x, 1) for x in (p, v, r))
        a = self.dense(self.dense(torch.cat(states), 3), 4)
        b = self.dense(self.look(observation[:, 1:].transpose(0, 1).flatten(0, 1)).flatten(1), 3)
        b = b if self.fault == "mu_zero_consistency_target_keeps_its_gradient" else b.detach()
        apart = 1 - ((a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))).view(mz.STEPS, -1).T
        counted = mask**0 if self.fault == "mu_zero_absorbing_states_count_for_the_policy" else mask
        lost = (p.logsumexp(-1) * policy.sum(-1) - (policy * p).sum(-1)) * counted + miss(v, value) / 4
        lost = lost + F.pad(miss(r, reward) + 2 * mask[:, 1:] * apart, (1, 0))
        return p, mz.support_to_scalar(v), mz.support_to_scalar(r), lost[:, 0] + lost[:, 1:].mean(1)


SLOPES = ("input gradient", "weight gradient")
LOOP = "dynamics_network.resblocks.1.bn1"
right(task, "mu_zero_of_stages_with_channels_last", "a tree, channels last, a split kernel", MuZeroOfStages)
right(task, "mu_zero_of_stacked_weights", "stacks of kernels and norms, packed biases", StackedMuZero)
wrong(
    task,
    MuZeroOfStages,
    mu_zero_representation_scaled_by_channel=("a scale over fewer axes", "representation_network"),
    mu_zero_state_enters_dynamics_with_its_whole_gradient=("a gradient not scaled", "", SLOPES),
    mu_zero_action_plane_divided_by_one_action_fewer=("a count off by one", "dynamics_network"),
    mu_zero_second_dynamics_block_by_batch_in_eval=("batch statistics in eval", LOOP, "eval"),
)
wrong(
    task,
    StackedMuZero,
    mu_zero_prediction_block_with_another_epsilon=("epsilon", "prediction_network.resblocks.0.bn2"),
    mu_zero_policy_head_leaves_out_its_relu=("an activation left out", "prediction_network"),
    mu_zero_absorbing_states_count_for_the_policy=("a mask left out", ""),
    mu_zero_consistency_target_keeps_its_gradient=("a detach left out", "", SLOPES),
)
