"""A small Rainbow: dueling noisy networks of atoms, and the projected target of a frozen network."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HISTORY, HIGH, WIDE, ACTIONS, PLAYED = 3, 28, 24, 5, 7
ATOMS, V_MIN, V_MAX, DISCOUNT, MULTI_STEP = 11, -2.0, 3.0, 0.9, 3
KERNELS, FEATURES, VALUE_HIDDEN, ADVANTAGE_HIDDEN = ((6, 5, 2), (10, 4, 2), (9, 3, 1)), 54, 24, 20


class NoisyLinear(nn.Module):
    """A linear layer with factorised gaussian noise, which is held as it was drawn."""

    def __init__(self, in_features: int, out_features: int, std_init: float = 0.5):
        super().__init__()
        std = in_features**-0.5
        self.weight_mu = nn.Parameter(std * torch.randn(out_features, in_features))
        self.weight_sigma = nn.Parameter(std_init * std * (0.5 + torch.rand(out_features, in_features)))
        self.bias_mu = nn.Parameter(0.2 * torch.randn(out_features))
        self.bias_sigma = nn.Parameter(std_init * std * (0.5 + torch.rand(out_features)))
        self.register_buffer("epsilon_in", torch.randn(in_features))
        self.register_buffer("epsilon_out", torch.randn(out_features))

    def scale_noise(self, x: Tensor) -> Tensor:
        return x.sign().mul(x.abs().sqrt())

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return F.linear(x, self.weight_mu, self.bias_mu)
        epsilon_in, epsilon_out = self.scale_noise(self.epsilon_in), self.scale_noise(self.epsilon_out)
        weight = self.weight_mu + self.weight_sigma * epsilon_out.outer(epsilon_in)
        return F.linear(x, weight, self.bias_mu + self.bias_sigma * epsilon_out)


class DQN(nn.Module):
    """[N, history, H, W] in 0 .. 255 -> logits [N, actions, atoms]."""

    def __init__(self):
        super().__init__()
        self.convs, width = nn.Sequential(), HISTORY
        for channels, size, stride in KERNELS:
            conv = nn.Conv2d(width, channels, size, stride)
            nn.init.normal_(conv.weight, std=1.5 / (size * width**0.5)), nn.init.normal_(conv.bias, std=0.1)
            self.convs.extend([conv, nn.ReLU()])
            width = channels
        self.fc_h_v = NoisyLinear(FEATURES, VALUE_HIDDEN)
        self.fc_h_a = NoisyLinear(FEATURES, ADVANTAGE_HIDDEN)
        self.fc_z_v = NoisyLinear(VALUE_HIDDEN, ATOMS)
        self.fc_z_a = NoisyLinear(ADVANTAGE_HIDDEN, ACTIONS * ATOMS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.convs(x / 255).flatten(1)
        v = self.fc_z_v(F.relu(self.fc_h_v(x))).view(-1, 1, ATOMS)
        a = self.fc_z_a(F.relu(self.fc_h_a(x))).view(-1, ACTIONS, ATOMS)
        return v + a - a.mean(1, keepdim=True)


class Projection(nn.Module):
    """The categorical distribution of the n-step return, on the atoms of the support."""

    def __init__(self):
        super().__init__()
        self.register_buffer("support", torch.linspace(V_MIN, V_MAX, ATOMS))
        self.delta_z = (V_MAX - V_MIN) / (ATOMS - 1)

    def forward(self, pns_a: Tensor, returns: Tensor, nonterminals: Tensor) -> Tensor:
        tz = returns[:, None] + nonterminals[:, None] * DISCOUNT**MULTI_STEP * self.support
        b = (tz.clamp(V_MIN, V_MAX) - V_MIN) / self.delta_z
        lower, upper = b.floor().long(), b.ceil().long()
        lower = torch.where((upper > 0) & (lower == upper), lower - 1, lower)
        upper = torch.where((lower < ATOMS - 1) & (lower == upper), upper + 1, upper)
        m = torch.zeros_like(pns_a).scatter_add(1, lower, pns_a * (upper - b))
        return m.scatter_add(1, upper, pns_a * (b - lower))


class Rainbow(nn.Module):
    """Transitions -> logits, the projected target, and the weighted cross entropy of each transition."""

    def __init__(self):
        super().__init__()
        self.online_net, self.target_net = DQN(), DQN()
        self.target_net.requires_grad_(False)
        self.projection = Projection()

    def target(self, returns: Tensor, next_states: Tensor, nonterminals: Tensor) -> Tensor:
        pns = self.online_net(next_states).softmax(2)
        action = (self.projection.support * pns).sum(2).argmax(1)
        pns_a = self.target_net(next_states).softmax(2)[range(len(action)), action]
        return self.projection(pns_a, returns, nonterminals)

    def forward(
        self,
        states: Tensor,
        actions: Tensor,
        returns: Tensor,
        next_states: Tensor,
        nonterminals: Tensor,
        weights: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.online_net(states)
        log_ps_a = logits.log_softmax(2)[range(len(actions)), actions]
        with torch.no_grad():
            m = self.target(returns, next_states, nonterminals)
        return logits, m, weights * -(m * log_ps_a).sum(1)


def transitions() -> tuple[dict[str, Tensor], Tensor]:
    """A ball and a bar that move over the frames; the last two transitions end their episodes."""
    time = torch.arange(HISTORY + MULTI_STEP)
    start, speed = torch.rand(2, PLAYED, 1) * 12 + 5, torch.randn(2, PLAYED, 1)
    y, x = (start + speed * time)[..., None, None]
    down, across = torch.arange(HIGH)[:, None], torch.arange(WIDE)
    ball = torch.exp(-((down - y) ** 2 + (across - x) ** 2) / 9)
    bar = 0.5 * torch.sigmoid(3 - (across - WIDE + x).abs()) * (down > HIGH - 5)
    frames = (255 * (ball + bar).clamp(max=1)).floor()
    actions = torch.randint(ACTIONS, (PLAYED,))
    inputs = {
        "states": frames[:, :HISTORY],
        "actions": actions,
        "returns": 0.4 * actions - 0.6 + 0.7 * torch.randn(PLAYED),
        "next_states": frames[:, MULTI_STEP:],
        "nonterminals": (torch.arange(PLAYED) < PLAYED - 2).to(frames),
        "weights": 0.3 + 0.7 * torch.rand(PLAYED),
    }
    return inputs, actions


def third_of_loss(outputs: tuple[Tensor, Tensor, Tensor], _: Tensor) -> Tensor:
    """A third of the mean of the weighted cross entropies."""
    return outputs[2].mean() / 3
