"""A small MuZero, unrolled over the actions of a game, with EfficientZero's consistency of states."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PLANES, HIGH, WIDE, CHANNELS, ACTIONS, STEPS, GAMES = 3, 5, 6, 10, 7, 3, 4
SUPPORT, EPS, BLOCKS, HIDDEN, PROJECTED = 8, 0.001, 2, 18, 22


def renormalize(x: Tensor) -> Tensor:
    """Each sample's state from its least to its greatest value -> [0, 1]."""
    flat = x.flatten(1)
    low, high = flat.min(1, keepdim=True)[0], flat.max(1, keepdim=True)[0]
    return ((flat - low) / (high - low + 1e-5)).view_as(x)


def scale_gradient(x: Tensor, scale: float) -> Tensor:
    return x * scale + x.detach() * (1 - scale)


def support_to_scalar(logits: Tensor) -> Tensor:
    """The expected value over the support, by the inverse of h."""
    bins = torch.arange(-SUPPORT, SUPPORT + 1).to(logits)
    x = (torch.softmax(logits, -1) * bins).sum(-1)
    root = (torch.sqrt(1 + 4 * EPS * (x.abs() + 1 + EPS)) - 1) / (2 * EPS)
    return torch.sign(x) * (root**2 - 1)


@torch.no_grad()
def scalar_to_support(x: Tensor) -> Tensor:
    """Two neighbours on the support share the value of h(x)."""
    x = torch.sign(x) * (torch.sqrt(x.abs() + 1) - 1) + EPS * x
    x = x.clamp(-SUPPORT, SUPPORT)
    low = x.floor()
    logits = x.new_zeros(*x.shape, 2 * SUPPORT + 1)
    logits.scatter_(-1, (low + SUPPORT).long()[..., None], (1 - (x - low))[..., None])
    above = (low + SUPPORT + 1).clamp(max=2 * SUPPORT)
    return logits.scatter_add_(-1, above.long()[..., None], (x - low)[..., None])


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return -(target * F.log_softmax(logits, -1)).sum(-1)


class ResidualBlock(nn.Module):
    def __init__(self, num_channels: int):
        super().__init__()
        self.conv1 = nn.Conv2d(num_channels, num_channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(num_channels)
        self.conv2 = nn.Conv2d(num_channels, num_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(num_channels)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + x)


class RepresentationNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(PLANES, CHANNELS, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(CHANNELS)
        self.resblocks = nn.ModuleList(ResidualBlock(CHANNELS) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.conv(x)))
        for block in self.resblocks:
            x = block(x)
        return renormalize(x)


def mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


class DynamicsNetwork(nn.Module):
    def __init__(self, reduced: int = 2):
        super().__init__()
        self.conv = nn.Conv2d(CHANNELS + 1, CHANNELS, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(CHANNELS)
        self.resblocks = nn.ModuleList(ResidualBlock(CHANNELS) for _ in range(BLOCKS))
        self.conv1x1_reward = nn.Conv2d(CHANNELS, reduced, 1)
        self.fc = mlp(reduced * HIGH * WIDE, 13, 2 * SUPPORT + 1)

    def forward(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        plane = torch.ones_like(state[:, :1]) * action[:, None, None, None] / ACTIONS
        x = self.bn(self.conv(torch.cat((state, plane), 1)))
        x = F.relu(x + state)
        for block in self.resblocks:
            x = block(x)
        reward = F.relu(self.conv1x1_reward(x)).flatten(1)
        return renormalize(x), self.fc(reward)


class PredictionNetwork(nn.Module):
    def __init__(self, value: int = 3, policy: int = 4):
        super().__init__()
        self.resblocks = nn.ModuleList([ResidualBlock(CHANNELS)])
        self.conv1x1_value = nn.Conv2d(CHANNELS, value, 1)
        self.conv1x1_policy = nn.Conv2d(CHANNELS, policy, 1)
        self.fc_value = mlp(value * HIGH * WIDE, 14, 2 * SUPPORT + 1)
        self.fc_policy = mlp(policy * HIGH * WIDE, 15, ACTIONS)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.resblocks:
            x = block(x)
        value, policy = F.relu(self.conv1x1_value(x)), F.relu(self.conv1x1_policy(x))
        return self.fc_policy(policy.flatten(1)), self.fc_value(value.flatten(1))


class MuZeroNetwork(nn.Module):
    """A game's observations, actions and targets -> policies, values, rewards and each game's loss."""

    def __init__(self):
        super().__init__()
        self.representation_network = RepresentationNetwork()
        self.dynamics_network = DynamicsNetwork()
        self.prediction_network = PredictionNetwork()
        self.projection = mlp(CHANNELS * HIGH * WIDE, HIDDEN, PROJECTED)
        self.projection_head = mlp(PROJECTED, 12, PROJECTED)
        for name, p in self.named_parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=p[0].numel() ** -0.5)
            else:
                nn.init.normal_(p, float("bn" in name) * name.endswith("weight"), 0.15)
        for name, b in self.named_buffers():
            if b.is_floating_point():
                b.copy_(0.1 * torch.randn(b.shape) if "mean" in name else 0.6 + 0.6 * torch.rand(b.shape))

    def forward(
        self, observation: Tensor, action: Tensor, value: Tensor, reward: Tensor, policy: Tensor, mask: Tensor
    ) -> tuple[Tensor, ...]:
        state = self.representation_network(observation[:, 0])
        policies, values, rewards, states = *([x] for x in self.prediction_network(state)), [], []
        for k in range(STEPS):
            state, reward_logits = self.dynamics_network(scale_gradient(state, 0.5), action[:, k])
            policy_logits, value_logits = self.prediction_network(state)
            policies.append(policy_logits), values.append(value_logits)
            rewards.append(reward_logits), states.append(state)
        policies, values, rewards = (torch.stack(x, 1) for x in (policies, values, rewards))
        online = self.projection_head(self.projection(torch.stack(states, 1).flatten(0, 1).flatten(1)))
        future = self.representation_network(observation[:, 1:].flatten(0, 1))
        target = self.projection(future.flatten(1)).detach()
        similar = F.cosine_similarity(online, target, dim=-1).unflatten(0, (-1, STEPS))
        loss_policy = cross_entropy(policies, policy) * mask
        loss = loss_policy + 0.25 * cross_entropy(values, scalar_to_support(value))
        steps = cross_entropy(rewards, scalar_to_support(reward)) + 2 * (1 - similar) * mask[:, 1:]
        loss = loss[:, 0] + (loss[:, 1:] + steps).sum(1) / STEPS
        return policies, support_to_scalar(values), support_to_scalar(rewards), loss


def games() -> tuple[dict[str, Tensor], Tensor]:
    """A piece moves over a board, some games ending before the unroll; the weights of the replay."""
    action, ends = torch.randint(ACTIONS, (GAMES, STEPS)), torch.randint(2, STEPS + 2, (GAMES,))
    ends[0] = 2
    mask = (torch.arange(STEPS + 1) < ends[:, None]).float()
    at = torch.cat((torch.randint(30, (GAMES, 1)), action + 1), 1).cumsum(1) % (HIGH * WIDE)
    piece = F.one_hot(at, HIGH * WIDE).float().unflatten(2, (1, HIGH, WIDE))
    observation = 2 * piece + 0.5 * torch.randn(GAMES, STEPS + 1, PLANES, HIGH, WIDE)
    value, reward = mask * (at - 13.3) / 2, mask[:, 1:] * torch.randn(GAMES, STEPS)
    policy = (2 * torch.randn(GAMES, STEPS + 1, ACTIONS)).softmax(-1)
    inputs = {"observation": observation, "action": action, "value": value, "reward": reward}
    return inputs | {"policy": policy, "mask": mask}, 0.5 + torch.rand(GAMES)


def weighted(outputs: tuple[Tensor, ...], weight: Tensor) -> Tensor:
    """The mean of the games' losses by their weights in the replay, by twenty."""
    return (outputs[3] * weight).mean() / 20
