"""A small IMPALA learner: a residual torso, an LSTM that starts again with an episode, V-trace and losses."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PLANES, HIGH, WIDE, ACTIONS = 2, 10, 14, 5
CHANNELS, FEATURES, HIDDEN, LAYERS = (5, 6), 22, 20, 2
STEPS, UNROLLS, DISCOUNTING = 7, 3, 0.9


def action_log_probs(policy_logits: Tensor, actions: Tensor) -> Tensor:
    return F.log_softmax(policy_logits, -1).gather(-1, actions[..., None]).squeeze(-1)


class Net(nn.Module):
    """The policy's logits [T, B, A] and the baseline [T, B] for frames [T, B, C, H, W]."""

    def __init__(self):
        super().__init__()
        self.feat_convs, self.resnet1, self.resnet2 = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        before = PLANES
        for count in CHANNELS:
            conv = nn.Conv2d(before, count, 3, padding=1)
            self.feat_convs.append(nn.Sequential(conv, nn.MaxPool2d(3, stride=2, padding=1)))
            for blocks in (self.resnet1, self.resnet2):
                one, two = (nn.Conv2d(count, count, 3, padding=1) for _ in range(2))
                blocks.append(nn.Sequential(nn.ReLU(), one, nn.ReLU(), two))
            before = count
        self.fc = nn.Linear(CHANNELS[-1] * 3 * 4, FEATURES)
        self.core = nn.LSTM(FEATURES + ACTIONS + 1, HIDDEN, LAYERS)
        self.policy = nn.Linear(HIDDEN, ACTIONS)
        self.baseline = nn.Linear(HIDDEN, 1)

    def initial_state(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(x.new_zeros(self.core.num_layers, x.shape[1], self.core.hidden_size) for _ in range(2))

    def forward(self, frame: Tensor, last_action: Tensor, reward: Tensor, done: Tensor) -> tuple:
        x = frame.flatten(0, 1) / 255.0
        for fconv, first, second in zip(self.feat_convs, self.resnet1, self.resnet2, strict=True):
            x = fconv(x)
            x = first(x) + x
            x = second(x) + x
        x = F.relu(self.fc(F.relu(x).flatten(1))).unflatten(0, frame.shape[:2])
        one_hot = F.one_hot(last_action, ACTIONS).to(x)
        core_input = torch.cat([x, reward.clamp(-1, 1)[..., None], one_hot], -1)
        core_state, core_output = self.initial_state(core_input), []
        for step, notdone in zip(core_input, (~done).to(x), strict=True):
            core_state = tuple(notdone[None, :, None] * s for s in core_state)
            output, core_state = self.core(step[None], core_state)
            core_output.append(output)
        core_output = torch.cat(core_output)
        return self.policy(core_output), self.baseline(core_output).squeeze(-1)


class VTrace(nn.Module):
    """Targets for the baseline and advantages for the policy, both without gradient."""

    clip_rho_threshold, clip_pg_rho_threshold = 1.5, 1.2

    @torch.no_grad()
    def forward(
        self, log_rhos: Tensor, discounts: Tensor, rewards: Tensor, values: Tensor, bootstrap_value: Tensor
    ) -> tuple[Tensor, Tensor]:
        rhos = log_rhos.exp()
        clipped_rhos, cs = rhos.clamp(max=self.clip_rho_threshold), rhos.clamp(max=1.0)
        values_t_plus_1 = torch.cat([values[1:], bootstrap_value[None]])
        deltas = clipped_rhos * (rewards + discounts * values_t_plus_1 - values)
        acc, result = torch.zeros_like(bootstrap_value), []
        for t in reversed(range(len(deltas))):
            acc = deltas[t] + discounts[t] * cs[t] * acc
            result.append(acc)
        vs = torch.stack(result[::-1]) + values
        vs_t_plus_1 = torch.cat([vs[1:], bootstrap_value[None]])
        clipped_pg_rhos = rhos.clamp(max=self.clip_pg_rho_threshold)
        return vs, clipped_pg_rhos * (rewards + discounts * vs_t_plus_1 - values)


class Losses(nn.Module):
    """Sums over time and batch."""

    def forward(
        self, logits: Tensor, actions: Tensor, values: Tensor, vs: Tensor, advantages: Tensor
    ) -> dict:
        policy, log_policy = F.softmax(logits, -1), F.log_softmax(logits, -1)
        return {
            "pg_loss": -(action_log_probs(logits, actions) * advantages).sum(),
            "baseline_loss": 0.5 * (vs - values).square().sum(),
            "entropy_loss": (policy * log_policy).sum(),
        }


class Impala(nn.Module):
    """The losses of unrolls [B, T + 1, ...]; in evaluation the greedy actions' log-probabilities besides."""

    def __init__(self):
        super().__init__()
        self.model, self.vtrace, self.losses = Net(), VTrace(), Losses()
        with torch.no_grad():
            for p in self.parameters():
                p.mul_(1.5)

    def forward(
        self, frame: Tensor, action: Tensor, reward: Tensor, done: Tensor, policy_logits: Tensor
    ) -> dict[str, Tensor]:
        batch = (x.transpose(0, 1) for x in (frame, action, reward, done, policy_logits))
        frame, action, reward, done, policy_logits = batch
        logits, baseline = self.model(frame, action, reward, done)
        bootstrap_value, values, target_logits = baseline[-1], baseline[:-1], logits[:-1]
        actions, rewards = action[1:], reward[1:].clamp(-1, 1)
        discounts = (~done[1:]).to(values) * DISCOUNTING
        log_rhos = action_log_probs(target_logits, actions) - action_log_probs(policy_logits[1:], actions)
        vs, advantages = self.vtrace(log_rhos, discounts, rewards, values, bootstrap_value)
        outputs = self.losses(target_logits, actions, values, vs, advantages)
        if not self.training:
            outputs["greedy"] = F.log_softmax(logits, -1).amax(-1).T
        return outputs


def unrolls() -> tuple[dict[str, Tensor], Tensor]:
    """Frames of a blob that moves, acted on by an older policy; its rewards are now and then large."""
    shape = (UNROLLS, STEPS)
    track = torch.rand(UNROLLS, 1, 2) + 0.15 * torch.randn(*shape, 2).cumsum(1)
    high, wide = torch.linspace(0, 1, HIGH)[:, None], torch.linspace(0, 1, WIDE)
    spot = [track[..., i, None, None] for i in (0, 1)]
    blob = torch.exp(-8 * ((high - spot[0]).square() + (wide - spot[1]).square()))[:, :, None]
    frame = 180 * blob * torch.tensor([1.0, 0.6])[:, None, None] + 60 * torch.rand(*shape, PLANES, HIGH, WIDE)
    logits = 0.8 * torch.randn(*shape, ACTIONS)
    action = torch.distributions.Categorical(logits=logits).sample()
    reward = track[..., 0] + 0.9 * torch.randn(shape)
    done = torch.rand(shape) < 0.2
    done[:, 3] |= torch.arange(UNROLLS) == 0
    inputs = {"frame": frame, "action": action, "reward": reward, "done": done, "policy_logits": logits}
    return inputs, torch.full((UNROLLS,), STEPS - 1.0)


def total(outputs: dict[str, Tensor], steps: Tensor) -> Tensor:
    """The three losses by their costs, for a step."""
    loss = outputs["pg_loss"] + 0.5 * outputs["baseline_loss"] + 0.1 * outputs["entropy_loss"]
    return loss / steps.sum()
