"""Two ports of a small recurrent PPO: a tree that steps through time, and one class of packed sheets."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._forty_third_ppo import ACTIONS, POLICY, RecurrentPPO, walks, weighted
from bench.held_back._fourth_ports import Port, leaf, wrong
from bench.held_back._sixth_ports import Gates, few

task = few("forty_third_ppo", RecurrentPPO, walks, weighted)


class Whiten(nn.Module):
    def __init__(self, rms: nn.Module, loose: bool = False):
        super().__init__()
        self.register_buffer("center", rms.mean.clone()), self.register_buffer("spread", rms.var.clone())
        self.register_buffer("seen", rms.count.clone())
        self.loose = loose

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                seen = self.seen + real.sum()
                square = (self.spread + self.center**2) * self.seen + (x[real] ** 2).sum(0)
                self.center.copy_((self.center * self.seen + x[real].sum(0)) / seen)
                self.spread.copy_(square / seen - self.center**2)
                self.seen.copy_(seen)
        x = (x - self.center) * (self.spread + 1e-4).rsqrt()
        return x if self.loose and not self.training else x.clip(-2, 2)


class Dense(nn.Module):
    def __init__(self, *layers: nn.Linear):
        super().__init__()
        self.w = leaf(torch.cat([x.weight for x in layers]).T)
        self.b = leaf(torch.cat([x.bias for x in layers]))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w + self.b


class Layer(Dense):
    def __init__(self, block: nn.Module, correction: int):
        super().__init__(block.linear)
        self.scale, self.shift, self.correction = leaf(block.norm.weight), leaf(block.norm.bias), correction

    def forward(self, x: Tensor) -> Tensor:
        spread, center = torch.var_mean(super().forward(x), -1, correction=self.correction, keepdim=True)
        x = (super().forward(x) - center) / (spread + 1e-5).sqrt()
        return torch.tanh(x * self.scale + self.shift)


class SteppingAgent(Port):
    def take(self, model: RecurrentPPO) -> None:
        policy, fault = model.policy, self.fault
        self.whiten = Whiten(model.obs_rms, fault == "ppo_observations_not_clipped_in_evaluation")
        odd = 1 if fault == "ppo_second_norm_by_unbiased_variance" else None
        blocks = enumerate(policy.features_extractor)
        self.layers = nn.Sequential(*(Layer(x, int(i == odd)) for i, x in blocks))
        self.cells = nn.ModuleList(Gates(dict(x.cell.named_parameters())) for x in policy.rnn)
        self.inner = Dense(policy.mlp_extractor.policy_net[0], policy.mlp_extractor.value_net[0])
        self.act, self.worth = Dense(policy.action_net, policy.mean_net), Dense(policy.value_net)
        self.log = leaf(policy.mean_dist.log_std)

    def remember(self, x: Tensor, fresh: Tensor) -> Tensor:
        lasting = self.fault == "ppo_second_gru_state_lasts_over_starts"
        held, found = [x.new_zeros(len(x), cell.u.shape[0]) for cell in self.cells], []
        for now, new in zip(x.unbind(1), fresh.unbind(1), strict=True):
            for i, cell in enumerate(self.cells):
                kept = held[i] if lasting and i == 1 else held[i].masked_fill(new[:, None], 0)
                now = held[i] = cell(now, kept)
            found.append(now)
        return torch.stack(found, 1)

    def ahead(self, reward: Tensor, value: Tensor, fresh: Tensor, real: Tensor) -> Tensor:
        on = (~fresh[:, 1:]).to(value)
        surprise = (reward + 0.9 * on * value[:, 1:] - value[:, :-1]) * real
        rows = []
        for t in range(reward.shape[1]):
            decay = torch.cat([torch.ones_like(on[:, :1]), (0.72 * on[:, t:-1]).cumprod(1)], 1)
            rows.append((decay * surprise[:, t:]).sum(1) * real[:, t])
        return torch.stack(rows, 1)

    def judge(self, reward, value, fresh, real, change, before, entropy):
        opened = self.fault == "ppo_advantages_keep_their_gradient"
        with torch.set_grad_enabled(opened and torch.is_grad_enabled()):
            gain = self.ahead(reward, value, fresh, real)
            aim = gain + value[:, :-1]
        gain, aim, value, before = gain[real], aim[real], value[:, :-1][real], before[real]
        gain = (gain - gain.mean()) / (gain.var().sqrt() + 1e-8)
        ratio = change[real].exp()
        policy = torch.max(-gain * ratio, -gain * ratio.clip(0.8, 1.2)).mean()
        near = torch.maximum(torch.minimum(value, before + 0.3), before - 0.3)
        return policy, torch.max((aim - value).square(), (aim - near).square()).mean(), -entropy[real].mean()

    def forward(self, obs, mask, starts, action, action_masks, motor, rewards, old_log_prob, old_values):
        real = mask[:, 1:]
        x = self.inner(self.remember(self.layers(self.whiten(obs, mask)), starts)).tanh()
        value = self.worth(x[..., POLICY:])[..., 0] * mask
        logits, middle = self.act(x[:, :-1, :POLICY]).tensor_split([ACTIONS], -1)
        logs = logits.masked_fill(~action_masks, -1e8).log_softmax(-1)
        entropy = -(logs.exp() * logs).sum(-1) + (self.log + math.log(math.tau) / 2 + 0.5).sum()
        way = (torch.log1p(motor) - torch.log1p(-motor)) / 2
        said = ((way - middle) * (-self.log).exp()).square() / 2 + self.log + math.log(math.tau) / 2
        said = said + (1 - motor.square() + 1e-6).log()
        log = (logs.gather(-1, action[..., None])[..., 0] - said.sum(-1)) * real
        return log, value, *self.judge(rewards, value, starts, real, log - old_log_prob, old_values, entropy)


def sheet(*columns: Tensor) -> nn.Parameter:
    return leaf(torch.cat([x if x.dim() == 2 else x[:, None] for x in columns], 1))


class PackedAgent(Port):
    def take(self, model: RecurrentPPO) -> None:
        policy, ends = model.policy, model.policy.mlp_extractor
        blocks, cells = policy.features_extractor, [x.cell for x in policy.rnn]
        parts = [(x.linear.weight, x.linear.bias, x.norm.weight, x.norm.bias) for x in blocks]
        self.rows = nn.ParameterList(sheet(*x) for x in parts)
        self.cells = nn.ParameterList(sheet(*x.parameters()) for x in cells)
        heads = ends.policy_net[0], ends.value_net[0], policy.action_net, policy.mean_net, policy.value_net
        self.ends = nn.ParameterList(sheet(x.weight, x.bias) for x in heads)
        self.log = leaf(policy.mean_dist.log_std)
        self.white = Whiten(model.obs_rms)

    def recur(self, i: int, x: Tensor, fresh: Tensor) -> Tensor:
        rows, found, width = self.cells[i], [], len(self.cells[i]) // 3
        w, u, b, c = rows.split([x.shape[-1], width, 1, 1], 1)
        given, h = x @ w.T + b[:, 0], x.new_zeros(x.shape[1], width)
        for t in range(len(x)):
            h = torch.where(fresh[t, :, None], 0, h)
            if self.fault == "ppo_first_gru_state_detached_between_steps" and i == 0:
                h = h.detach()
            (r, z, n), (r2, z2, n2) = given[t].chunk(3, 1), (h @ u.T + c[:, 0]).chunk(3, 1)
            z = torch.sigmoid(z + z2)
            h = z * h + (1 - z) * torch.tanh(n + torch.sigmoid(r + r2) * n2)
            found.append(h)
        return torch.stack(found)

    def end(self, i: int, x: Tensor) -> Tensor:
        return F.linear(x, self.ends[i][:, :-1], self.ends[i][:, -1])

    def forward(self, obs, mask, starts, action, action_masks, motor, rewards, old_log_prob, old_values):
        real, fresh, x = mask[:, 1:], starts.T, self.white(obs, mask).transpose(0, 1)
        for rows in self.rows:
            x = F.linear(x, rows[:, :-3], rows[:, -3])
            x = F.layer_norm(x, x.shape[-1:], rows[:, -2], rows[:, -1]).tanh()
        x = self.recur(1, self.recur(0, x, fresh), fresh).transpose(0, 1)
        pi, value = self.end(0, x[:, :-1]).tanh(), self.end(4, self.end(1, x).tanh())[..., 0] * mask
        never = -6.0 if self.fault == "ppo_invalid_actions_left_a_small_chance" else -math.inf
        logits = torch.where(action_masks, self.end(2, pi), never)
        total = logits.logsumexp(-1)
        mean = (logits.softmax(-1) * logits.clamp(min=-1e8)).sum(-1)
        entropy = total - mean + self.log.sum() + len(self.log) * (1 + math.log(math.tau)) / 2
        far = (motor.atanh() - self.end(3, pi)) / self.log.exp()
        said = far.square().sum(-1) / 2 + self.log.sum() + len(self.log) * math.log(math.tau) / 2
        said = said + (1 - motor * motor + 1e-6).prod(-1).log()
        log = (logits.gather(-1, action.unsqueeze(-1)).squeeze(-1) - total - said) * real
        v, gain, last = value.detach(), torch.zeros_like(rewards), 0
        for t in range(rewards.shape[1] - 1, -1, -1):
            ends, bootstrap = fresh[t + 1], v[:, t + 1]
            if self.fault != "ppo_next_value_counts_over_the_end":
                bootstrap = bootstrap.masked_fill(ends, 0)
            last = (rewards[:, t] + 0.9 * (bootstrap + 0.8 * last * ~ends) - v[:, t]) * real[:, t]
            gain[:, t] = last
        gain, value_now, count = gain.detach(), value[:, :-1], real.sum()
        aim, gain = gain + v[:, :-1], (gain - gain[real].mean()) / (gain[real].std() + 1e-8)
        ratio = (log - old_log_prob).exp()
        bound = torch.where(gain > 0, ratio.clamp(max=1.2), ratio.clamp(min=0.8))
        near = old_values + (value_now - old_values).clamp(-0.3, 0.3)
        errors = torch.stack([value_now - aim, near - aim]).square()
        worse = errors.amin(0) if self.fault == "ppo_value_loss_takes_the_lesser" else errors.amax(0)
        losses = ((x * real).sum() / count for x in (-gain * bound, worse, -entropy))
        return log, value, *losses


SLOPES = ("input gradient", "weight gradient")
right(task, "ppo_of_a_stepping_tree", "a tree, cells by step, decays as products", SteppingAgent)
right(task, "ppo_of_packed_sheets", "packed sheets, time first, other formulas", PackedAgent)
wrong(
    task,
    SteppingAgent,
    ppo_observations_not_clipped_in_evaluation=("a clip left out in eval", "obs_rms", "eval"),
    ppo_second_norm_by_unbiased_variance=("another variance", "policy.features_extractor.1.norm"),
    ppo_second_gru_state_lasts_over_starts=("a reset left out", "policy.rnn.1"),
    ppo_advantages_keep_their_gradient=("a missing no_grad", "gae", SLOPES),
)
wrong(
    task,
    PackedAgent,
    ppo_first_gru_state_detached_between_steps=("detach", "policy.rnn.0", SLOPES),
    ppo_invalid_actions_left_a_small_chance=("a mask too weak", "policy.action_dist"),
    ppo_next_value_counts_over_the_end=("a done flag left out", "gae"),
    ppo_value_loss_takes_the_lesser=("min for max", "loss"),
)
