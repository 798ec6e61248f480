"""A small soft actor-critic on states: all parts of its loss in one pass, the noise given."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal

AXES, OBS, ACTIONS, WIDTH, ROWS = 3, 9, 3, 24, 6
LOG_STD_MIN, LOG_STD_MAX, CLIP, GAMMA, LATE = -1.0, 1.0, 2.5, 0.9, 12
LOW, HIGH = (-1.0, -0.5, -2.0), (1.5, 1.0, 0.6)


class Normalizer(nn.Module):
    """Observations less their mean, over their deviation; training counts what it saw batches later."""

    def __init__(self, size: int, eps: float = 1e-2):
        super().__init__()
        self.eps = eps
        mean, std, count = torch.randint(-8, 9, (size,)) / 16, torch.randint(10, 25, (size,)) / 16, 16.0
        sums = {
            "sum": count * mean,
            "sumsq": count * (mean**2 + std**2),
            "count": torch.tensor(count),
        }
        for name, value in sums.items():
            self.register_buffer("total_" + name, value)
            self.register_buffer("local_" + name, torch.zeros_like(value))
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def update(self, v: Tensor) -> None:
        self.local_sum.add_(v.sum(0))
        self.local_sumsq.add_(v.square().sum(0))
        self.local_count.add_(len(v))

    def recompute_stats(self) -> None:
        for name in ("sum", "sumsq", "count"):
            local = getattr(self, "local_" + name)
            getattr(self, "total_" + name).add_(local)
            local.zero_()
        self.mean.copy_(self.total_sum / self.total_count)
        var = self.total_sumsq / self.total_count - self.mean.square()
        self.std.copy_(var.clamp(min=self.eps**2).sqrt())

    def forward(self, v: Tensor, update: bool = True) -> Tensor:
        if self.training and update:
            with torch.no_grad():
                if self.local_count >= LATE:
                    self.recompute_stats()
                self.update(v)
        return ((v - self.mean) / self.std).clamp(-CLIP, CLIP)


class SoftQNetwork(nn.Module):
    """Observations and actions -> one value each."""

    def __init__(self):
        super().__init__()
        self.fc1, self.ln1 = nn.Linear(OBS + ACTIONS, WIDTH), nn.LayerNorm(WIDTH)
        self.fc2, self.ln2 = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.fc3 = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, a: Tensor) -> Tensor:
        x = F.relu(self.ln1(self.fc1(torch.cat([x, a], 1))))
        x = F.relu(self.ln2(self.fc2(x)))
        return self.fc3(x).squeeze(1)


class Actor(nn.Module):
    """A Gaussian squashed by tanh into the bounds of the actions."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(OBS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fc_mean, self.fc_logstd = nn.Linear(WIDTH, ACTIONS), nn.Linear(WIDTH, ACTIONS)
        low, high = torch.tensor(LOW), torch.tensor(HIGH)
        self.register_buffer("action_scale", (high - low) / 2)
        self.register_buffer("action_bias", (high + low) / 2)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The sample that the noise makes, its log-probability and the action without noise."""
        x = F.relu(self.fc2(F.relu(self.fc1(x))))
        mean = self.fc_mean(x)
        std = self.fc_logstd(x).clamp(LOG_STD_MIN, LOG_STD_MAX).exp()
        x_t = mean + std * noise
        action = torch.tanh(x_t) * self.action_scale + self.action_bias
        log_prob = Normal(mean, std, validate_args=False).log_prob(x_t) - torch.log(self.action_scale)
        log_prob = (log_prob - 2 * (math.log(2) - x_t - F.softplus(-2 * x_t))).sum(1)
        return action, log_prob, torch.tanh(mean) * self.action_scale + self.action_bias


class SAC(nn.Module):
    """A batch of transitions -> the targets, both values, the parts of the actor and the temperature.

    The action to take is the sample in training and the one without noise in evaluation.
    """

    def __init__(self):
        super().__init__()
        self.normalizer, self.actor = Normalizer(OBS), Actor()
        self.qf1, self.qf2, self.qf1_target, self.qf2_target = (SoftQNetwork() for _ in range(4))
        self.log_alpha, self.target_entropy = nn.Parameter(torch.full((1,), -0.8)), -float(ACTIONS)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight, gain=1.4)
                nn.init.normal_(module.bias, std=0.2)
            elif isinstance(module, nn.LayerNorm):
                nn.init.uniform_(module.weight, 0.6, 1.4)
                nn.init.normal_(module.bias, std=0.2)
        for target in (self.qf1_target, self.qf2_target):
            target.requires_grad_(False)

    def held(self, critic: SoftQNetwork, observations: Tensor, actions: Tensor) -> Tensor:
        """The critic's values, whose gradient reaches the actions but none of the critic's weights."""
        weights = {name: weight.detach() for name, weight in critic.named_parameters()}
        return torch.func.functional_call(critic, weights, (observations, actions))

    def forward(
        self,
        observations: Tensor,
        actions: Tensor,
        rewards: Tensor,
        next_observations: Tensor,
        dones: Tensor,
        noise: Tensor,
        next_noise: Tensor,
    ) -> dict[str, Tensor]:
        obs = self.normalizer(observations)
        alpha = self.log_alpha.exp()
        with torch.no_grad():
            next_obs = self.normalizer(next_observations, update=False)
            next_actions, next_log_pi, _ = self.actor(next_obs, next_noise)
            ahead = self.qf1_target(next_obs, next_actions), self.qf2_target(next_obs, next_actions)
            next_value = torch.min(*ahead) - alpha * next_log_pi
            target = rewards + (1 - dones) * GAMMA * next_value
        pi, log_pi, mean = self.actor(obs, noise)
        value = torch.min(self.held(self.qf1, obs, pi), self.held(self.qf2, obs, pi))
        return {
            "target": target,
            "qf1": self.qf1(obs, actions),
            "qf2": self.qf2(obs, actions),
            "actor": alpha.detach() * log_pi - value,
            "alpha": -alpha * (log_pi.detach() + self.target_entropy),
            "action": pi if self.training else mean,
        }


def transitions() -> tuple[dict[str, Tensor], Tensor]:
    """Pushes of a body that slows down, rewarded by how near to its goal it comes; with their weights."""
    low, high = torch.tensor(LOW), torch.tensor(HIGH)
    place, speed, goal = torch.randn(3, ROWS, AXES)
    push = low + (high - low) * torch.rand(ROWS, ACTIONS)
    faster = 0.8 * speed + 0.5 * push
    moved = place + 0.5 * faster
    gap = (moved - goal).norm(dim=1)
    given = {
        "observations": torch.cat([1.5 * place, speed, goal + 0.5], 1),
        "actions": push,
        "rewards": 1 - gap - 0.1 * push.square().sum(1),
        "next_observations": torch.cat([1.5 * moved, faster, goal + 0.5], 1),
        "dones": (gap <= gap.kthvalue(2).values).to(gap),
        "noise": torch.randn(ROWS, ACTIONS),
        "next_noise": torch.randn(ROWS, ACTIONS),
    }
    return given, 0.5 + torch.rand(ROWS)


def soft_loss(outputs: dict[str, Tensor], weights: Tensor) -> Tensor:
    """Both critics' weighted squares of what they miss, and the parts of the actor and the temperature."""
    weights, target = weights.to(outputs["target"]), outputs["target"]
    missed = sum((weights * (outputs[name] - target).square()).mean() for name in ("qf1", "qf2"))
    return missed / 2 + outputs["actor"].mean() + outputs["alpha"].mean()
