"""A small TD3+BC whose actor and twin critics read histories by an LSTM, under a running norm of states."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

STATES, ACTIONS, STEPS, MEMORY, HIDDEN, INNER, BATCH = 7, 3, 6, 20, 44, 32, 10
DISCOUNT, POLICY_NOISE, NOISE_CLIP, ALPHA, DELTA, CLIP = 0.9, 0.4, 0.5, 2.5, 0.6, 5.0


class RunningMeanStd(nn.Module):
    """States by the mean and the variance of all valid ones seen; only training moves them."""

    def __init__(self, size: int):
        super().__init__()
        self.epsilon = 1e-4
        self.register_buffer("mean", 0.3 * torch.randn(size))
        self.register_buffer("var", 0.5 + torch.rand(size))
        self.register_buffer("count", torch.tensor(83.0))

    @torch.no_grad()
    def update(self, rows: Tensor) -> None:
        var, mean = torch.var_mean(rows, 0, correction=0)
        delta, total = mean - self.mean, self.count + len(rows)
        square = self.var * self.count + var * len(rows) + delta**2 * self.count * len(rows) / total
        self.mean.add_(delta * len(rows) / total)
        self.var.copy_(square / total)
        self.count.copy_(total)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        if self.training and valid is not None:
            self.update(x[valid])
        return ((x - self.mean) / torch.sqrt(self.var + self.epsilon)).clamp(-CLIP, CLIP)


class HistoryEncoder(nn.Module):
    """[N, T, S] -> [N, M], the output at the last valid step."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(STATES, MEMORY, batch_first=True)
        self.norm = nn.LayerNorm(MEMORY)
        nn.init.normal_(self.norm.weight, 1.0, 0.2), nn.init.normal_(self.norm.bias, std=0.1)

    def forward(self, state: Tensor, length: Tensor) -> Tensor:
        out, _ = self.lstm(state)
        return self.norm(out[torch.arange(len(out)), length - 1])


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = HistoryEncoder()
        self.l1, self.l2 = nn.Linear(MEMORY, HIDDEN), nn.Linear(HIDDEN, INNER)
        self.l3 = nn.Linear(INNER, ACTIONS)
        nn.init.normal_(self.l3.weight, std=1.2)
        self.register_buffer("action_scale", torch.tensor([0.8, 1.3, 0.6]))
        self.register_buffer("action_bias", torch.tensor([0.3, -0.2, 0.5]))

    def forward(self, state: Tensor, length: Tensor) -> Tensor:
        a = F.relu(self.l1(self.encoder(state, length)))
        a = F.relu(self.l2(a))
        return torch.tanh(self.l3(a)) * self.action_scale + self.action_bias


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = HistoryEncoder()
        self.l1, self.l2 = nn.Linear(MEMORY + ACTIONS, HIDDEN), nn.Linear(HIDDEN, INNER)
        self.l3 = nn.Linear(INNER, 1)
        self.l4, self.l5 = nn.Linear(MEMORY + ACTIONS, HIDDEN), nn.Linear(HIDDEN, INNER)
        self.l6 = nn.Linear(INNER, 1)

    def forward(self, state: Tensor, length: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        sa = torch.cat([self.encoder(state, length), action], 1)
        q1 = F.relu(self.l1(sa))
        q1 = F.relu(self.l2(q1))
        q2 = F.relu(self.l4(sa))
        q2 = F.relu(self.l5(q2))
        return self.l3(q1), self.l6(q2)


def target_of(network: nn.Module) -> nn.Module:
    """A frozen copy whose weights lag behind a little."""
    target = copy.deepcopy(network).requires_grad_(False)
    for p in target.parameters():
        p.add_(0.05 * torch.randn_like(p))
    return target


class TD3(nn.Module):
    """Transitions and noise -> actions, both values, their target, and the losses of critics and actor."""

    def __init__(self):
        super().__init__()
        self.state_norm = RunningMeanStd(STATES)
        self.actor, self.critic = Actor(), Critic()
        self.actor_target, self.critic_target = target_of(self.actor), target_of(self.critic)

    @torch.no_grad()
    def target(
        self, next_state: Tensor, length: Tensor, reward: Tensor, not_done: Tensor, noise: Tensor
    ) -> Tensor:
        scale, bias = self.actor.action_scale, self.actor.action_bias
        noise = (noise * POLICY_NOISE).clamp(-NOISE_CLIP, NOISE_CLIP) * scale
        action = self.actor_target(next_state, length) + noise
        action = torch.minimum(torch.maximum(action, bias - scale), bias + scale)
        q1, q2 = self.critic_target(next_state, length, action)
        return reward + not_done * DISCOUNT * torch.min(q1, q2)

    def forward(
        self,
        state: Tensor,
        action: Tensor,
        reward: Tensor,
        next_state: Tensor,
        not_done: Tensor,
        noise: Tensor,
        length: Tensor,
    ) -> tuple[Tensor, ...]:
        state = self.state_norm(state, torch.arange(state.shape[1]) < length[:, None])
        target_q = self.target(self.state_norm(next_state), length, reward, not_done, noise)
        q1, q2 = self.critic(state, length, action)
        critic_loss = F.huber_loss(q1, target_q, reduction="none", delta=DELTA) + (q2 - target_q) ** 2
        pi = self.actor(state, length)
        frozen = {name: p.detach() for name, p in self.critic.named_parameters()}
        q, _ = functional_call(self.critic, frozen, (state, length, pi))
        lmbda = ALPHA / q.abs().mean().detach()
        actor_loss = -lmbda * q + ((pi - action) ** 2).mean(1, keepdim=True)
        return pi, q1, q2, target_q, critic_loss, actor_loss


class Scaler(nn.Module):
    """What the ports have for the running norm: the moments of all that was seen, by sums."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.eps, self.always = norm.epsilon, False
        for name in ("mean", "var", "count"):
            self.register_buffer(name, getattr(norm, name).clone())

    def learn(self, x: Tensor, valid: Tensor) -> None:
        if self.training or self.always:
            with torch.no_grad():
                x, count = x * valid, self.count + valid.sum()
                square = (self.var + self.mean**2) * self.count + x.square().sum((0, 1))
                self.mean.mul_(self.count).add_(x.sum((0, 1))).div_(count)
                self.var.copy_(square / count - self.mean**2)
                self.count.copy_(count)

    def forward(self, x: Tensor) -> Tensor:
        return F.hardtanh((x - self.mean) * (self.var + self.eps).rsqrt(), -CLIP, CLIP)


def transitions() -> tuple[dict[str, Tensor], Tensor]:
    """Swinging states, padded at the end, with the weight of each transition in the replay."""
    time, phase = torch.arange(STEPS + 1) / 2, 6 * torch.rand(BATCH, 1, 1)
    path = torch.sin(time[:, None] * (1 + torch.arange(STATES) / 4) + phase)
    path = path + 0.3 * torch.randn_like(path) + 0.3
    length = torch.randint(2, STEPS + 1, (BATCH,))
    length[0] = STEPS - 2
    valid = (torch.arange(STEPS) < length[:, None])[:, :, None]
    action = torch.tensor([0.3, -0.2, 0.5]) + 0.5 * torch.tanh(torch.randn(BATCH, ACTIONS))
    reward = 0.8 * phase[:, :, 0].cos() + 0.2 * action.sum(1, keepdim=True)
    not_done = (torch.rand(BATCH, 1) < 0.75).to(path)
    not_done[0] = 1
    inputs = {"state": path[:, :-1] * valid, "action": action, "reward": reward}
    inputs |= {"next_state": path[:, 1:] * valid, "not_done": not_done}
    return inputs | {"noise": 1.3 * torch.randn(BATCH, ACTIONS), "length": length}, 0.5 + torch.rand(BATCH, 1)


def weighted_losses(outputs: tuple[Tensor, ...], weight: Tensor) -> Tensor:
    """The critics' losses by the weights of the replay and the actor's loss, by ten."""
    return ((weight * outputs[4]).mean() + outputs[5].mean()) / 10
