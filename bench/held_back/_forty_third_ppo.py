"""A small recurrent PPO: its actor-critic on padded episodes, its advantages and its clipped losses."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

OBSERVED, FEATURES, STATES, POLICY, VALUE = 11, (29, 37, 33), (31, 26), 23, 27
ACTIONS, MOTORS, EPISODES, STEPS = 7, 3, 6, 9


class RunningMeanStd(nn.Module):
    """Normalises observations by running statistics of those that are no padding."""

    def __init__(self, width: int, epsilon: float = 1e-4, clip_obs: float = 2.0):
        super().__init__()
        self.register_buffer("mean", 0.2 * torch.randn(width))
        self.register_buffer("var", 0.8 + 0.5 * torch.rand(width))
        self.register_buffer("count", torch.tensor(40.0))
        self.epsilon, self.clip_obs = epsilon, clip_obs

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        delta, total = x.mean(0) - self.mean, self.count + len(x)
        m2 = self.var * self.count + x.var(0, correction=0) * len(x)
        m2 = m2 + delta**2 * self.count * len(x) / total
        self.mean.add_(delta * len(x) / total)
        self.var.copy_(m2 / total)
        self.count.copy_(total)

    def forward(self, obs: Tensor, mask: Tensor) -> Tensor:
        if self.training:
            self.update(obs[mask])
        obs = (obs - self.mean) / torch.sqrt(self.var + self.epsilon)
        return obs.clamp(-self.clip_obs, self.clip_obs)


def linear(inner: int, outer: int, gain: float = 1.0) -> nn.Linear:
    layer = nn.Linear(inner, outer)
    nn.init.orthogonal_(layer.weight, gain), nn.init.normal_(layer.bias, std=0.1)
    return layer


class EncoderBlock(nn.Module):
    def __init__(self, inner: int, outer: int):
        super().__init__()
        self.linear, self.norm = linear(inner, outer), nn.LayerNorm(outer)
        nn.init.normal_(self.norm.weight, 1, 0.2), nn.init.normal_(self.norm.bias, std=0.2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.linear(x)))


class MaskedGRU(nn.Module):
    """A GRU over [N, T, C] whose state is zero again where an episode starts."""

    def __init__(self, inner: int, outer: int):
        super().__init__()
        self.cell = nn.GRUCell(inner, outer)

    def forward(self, x: Tensor, starts: Tensor) -> Tensor:
        state, states, keep = x.new_zeros(len(x), self.cell.hidden_size), [], 1 - starts.to(x)
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], keep[:, t, None] * state)
            states.append(state)
        return torch.stack(states, 1)


class MlpExtractor(nn.Module):
    def __init__(self):
        super().__init__()
        self.policy_net = nn.Sequential(linear(STATES[-1], POLICY), nn.Tanh())
        self.value_net = nn.Sequential(linear(STATES[-1], VALUE), nn.Tanh())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.policy_net(x), self.value_net(x)


class MaskableCategorical(nn.Module):
    def forward(self, logits: Tensor, action: Tensor, action_masks: Tensor) -> tuple[Tensor, Tensor]:
        logits = torch.where(action_masks, logits, -1e8)
        spread = Categorical(logits=logits, validate_args=False)
        return spread.log_prob(action), spread.entropy()


class SquashedDiagGaussian(nn.Module):
    """Actions are the tanh of a gaussian; the entropy is that of the gaussian."""

    def __init__(self):
        super().__init__()
        self.log_std, self.epsilon = nn.Parameter(0.2 * torch.randn(MOTORS)), 1e-6

    def forward(self, mean: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        spread = Normal(mean, self.log_std.exp().expand_as(mean), validate_args=False)
        log_prob = spread.log_prob(torch.atanh(action)).sum(-1)
        log_prob = log_prob - torch.log(1 - action**2 + self.epsilon).sum(-1)
        return log_prob, spread.entropy().sum(-1)


class RecurrentActorCriticPolicy(nn.Module):
    def __init__(self):
        super().__init__()
        widths = (OBSERVED, *FEATURES)
        self.features_extractor = nn.Sequential(*map(EncoderBlock, widths, widths[1:]))
        self.rnn = nn.ModuleList(map(MaskedGRU, (FEATURES[-1], *STATES), STATES))
        self.mlp_extractor = MlpExtractor()
        self.action_net, self.mean_net = linear(POLICY, ACTIONS, 0.5), linear(POLICY, MOTORS, 0.3)
        self.action_dist, self.mean_dist = MaskableCategorical(), SquashedDiagGaussian()
        self.value_net = linear(VALUE, 1)

    def forward(
        self, obs: Tensor, starts: Tensor, action: Tensor, action_masks: Tensor, motor: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        x = self.features_extractor(obs)
        for rnn in self.rnn:
            x = rnn(x, starts)
        latent_pi, latent_vf = self.mlp_extractor(x)
        latent_pi = latent_pi[:, :-1]
        log_prob, entropy = self.action_dist(self.action_net(latent_pi), action, action_masks)
        more, wider = self.mean_dist(self.mean_net(latent_pi), motor)
        return self.value_net(latent_vf).squeeze(-1), log_prob + more, entropy + wider


class AdvantageEstimator(nn.Module):
    """Generalised advantages, and the returns that the values are to be."""

    gamma, gae_lambda = 0.9, 0.8

    @torch.no_grad()
    def forward(self, rewards: Tensor, values: Tensor, starts: Tensor, valid: Tensor):
        last, advantages, going = torch.zeros_like(values[:, 0]), [], 1 - starts.to(values)
        for t in reversed(range(rewards.shape[1])):
            delta = rewards[:, t] + self.gamma * values[:, t + 1] * going[:, t + 1] - values[:, t]
            last = delta + self.gamma * self.gae_lambda * going[:, t + 1] * last
            last = torch.where(valid[:, t], last, 0.0)
            advantages.insert(0, last)
        advantages = torch.stack(advantages, 1)
        return advantages, advantages + values[:, :-1]


class PPOLoss(nn.Module):
    clip_range, clip_range_vf = 0.2, 0.3

    def forward(self, log_prob, old_log_prob, advantages, values, old_values, returns, entropy, valid):
        chosen = advantages[valid]
        advantages = (advantages - chosen.mean()) / (chosen.std() + 1e-8)
        ratio = torch.exp(log_prob - old_log_prob)
        clipped = ratio.clamp(1 - self.clip_range, 1 + self.clip_range)
        policy_loss = -torch.min(advantages * ratio, advantages * clipped)[valid].mean()
        near = old_values + (values - old_values).clamp(-self.clip_range_vf, self.clip_range_vf)
        value_loss = torch.max((values - returns) ** 2, (near - returns) ** 2)[valid].mean()
        return policy_loss, value_loss, -entropy[valid].mean()


class RecurrentPPO(nn.Module):
    """Episodes with one more observation than steps -> log-probabilities, values, and three losses."""

    def __init__(self):
        super().__init__()
        self.obs_rms, self.policy = RunningMeanStd(OBSERVED), RecurrentActorCriticPolicy()
        self.gae, self.loss = AdvantageEstimator(), PPOLoss()

    def forward(self, obs, mask, starts, action, action_masks, motor, rewards, old_log_prob, old_values):
        valid, obs = mask[:, 1:], self.obs_rms(obs, mask)
        values, log_prob, entropy = self.policy(obs, starts, action, action_masks, motor)
        values, log_prob = values * mask, log_prob * valid
        advantages, returns = self.gae(rewards, values, starts, valid)
        old = old_log_prob, advantages, values[:, :-1], old_values, returns
        return log_prob, values, *self.loss(log_prob, *old, entropy, valid)


def walks() -> tuple[dict[str, Tensor], Tensor]:
    """Swings under a policy of even choices, padded; the target is what each loss counts."""
    length = torch.randint(STEPS // 2, STEPS + 1, (EPISODES, 1))
    mask = torch.arange(STEPS + 1) <= length
    starts = torch.rand(EPISODES, STEPS + 1) < 0.2
    starts[:, 3], starts[:, 0] = torch.arange(EPISODES) % 2 == 0, True
    time = torch.arange(STEPS + 1)[:, None] * torch.linspace(0.3, 1.1, OBSERVED)
    obs = 1.3 * torch.sin(time + 6 * torch.rand(EPISODES, 1, 1)) + 0.6 * torch.randn(EPISODES, 1, OBSERVED)
    masks = torch.rand(EPISODES, STEPS, ACTIONS) < 0.7
    action = torch.randint(ACTIONS, (EPISODES, STEPS))
    masks = (masks | F.one_hot(action, ACTIONS).bool()) | (torch.arange(ACTIONS) == 0)
    wish = torch.randn(EPISODES, STEPS, MOTORS).clamp(-2, 2)
    likely = -(wish**2 + math.log(math.tau)).sum(-1) / 2 - torch.log(1 - wish.tanh() ** 2).sum(-1)
    old = likely - masks.sum(-1).log() + 0.1 * torch.randn(EPISODES, STEPS)
    rewards = 0.5 * obs[:, 1:, 0] + 0.3 * wish[..., 0] + 0.2 * (action == 1)
    batch = {"obs": obs * mask[..., None], "mask": mask, "starts": starts, "action": action}
    batch |= {"action_masks": masks, "motor": wish.tanh(), "rewards": rewards * mask[:, 1:]}
    batch |= {"old_log_prob": old * mask[:, 1:], "old_values": 0.4 * torch.randn(EPISODES, STEPS)}
    return batch, torch.tensor([1.0, 0.5, 0.02])


def weighted(outputs: tuple[Tensor, ...], weights: Tensor) -> Tensor:
    """The losses of policy, values and entropy by their weights, and by four."""
    return (torch.stack(outputs[2:]) * weights).sum() / 4
