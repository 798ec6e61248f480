"""Two ports of a small soft actor-critic: a tree of policy and judges, and all critics in one product."""

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _twenty_second_soft_actor_critic as sac
from bench.held_back._fifth_vision import filled, right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("twenty_second_soft_actor_critic", sac.SAC, sac.transitions, sac.soft_loss, count=4)


class Scaler(nn.Module):
    """Squares around a center, and what waits to be counted, as it differs from this center."""

    def __init__(self, norm: nn.Module, stays: bool):
        super().__init__()
        self.least, self.stays = norm.eps**2, stays
        self.register_buffer("seen", norm.total_count.clone())
        self.register_buffer("center", norm.mean.clone())
        self.register_buffer("squares", norm.std.square() * self.seen)
        self.register_buffer("waiting", torch.zeros_like(torch.stack([norm.mean] * 3)))

    @torch.no_grad()
    def watch(self, rows: Tensor) -> None:
        if self.waiting[2, 0] >= sac.LATE:
            off, squares, count = self.waiting
            self.seen += count[0]
            self.center += off / self.seen
            self.squares += squares if self.stays else squares - off.square() / self.seen
            self.waiting.zero_()
        off = rows - self.center
        self.waiting += torch.stack([off, off.square(), torch.ones_like(off)]).sum(1)

    def forward(self, x: Tensor) -> Tensor:
        y = (x - self.center) * (self.squares / self.seen).clip(self.least).rsqrt()
        return y.clip(-sac.CLIP, sac.CLIP)


class Judge(nn.Module):
    """A critic whose weights are one list; ``still`` they get no gradient."""

    def __init__(self, critic: nn.Module):
        super().__init__()
        self.w, self.eps = nn.ParameterList(leaf(w.t()) for w in critic.parameters()), [1e-5, 1e-5]

    def forward(self, state: Tensor, act: Tensor, still: bool = False) -> Tensor:
        w, x = [w.detach() if still else w for w in self.w], torch.hstack([state, act])
        for i, eps in enumerate(self.eps):
            kernel, offset, gain, shift = w[4 * i : 4 * i + 4]
            x = F.layer_norm(x @ kernel + offset, gain.shape, gain, shift, eps).relu()
        return torch.addmm(w[9], x, w[8])[:, 0]


class Policy(nn.Module):
    """Centers and widths by one layer; chances by the noise itself."""

    def __init__(self, actor: nn.Module, bare: bool):
        super().__init__()
        self.bare, parts = bare, zip(actor.fc_mean.parameters(), actor.fc_logstd.parameters(), strict=True)
        head = filled(nn.Linear(sac.WIDTH, 2 * sac.ACTIONS), *map(torch.cat, parts))
        self.net = nn.Sequential(deepcopy(actor.fc1), nn.ReLU(), deepcopy(actor.fc2), nn.ReLU(), head)
        self.register_buffer("box", torch.stack([actor.action_bias, actor.action_scale]))

    def forward(self, state: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        center, width = self.net(state).tensor_split(2, 1)
        width = width.clip(sac.LOG_STD_MIN, sac.LOG_STD_MAX)
        free = center + noise * width.exp()
        slope = F.logsigmoid(2 * free) + F.logsigmoid(-2 * free)
        chance = -0.5 * noise.square() - width - slope - torch.log(4 * (2 * torch.pi) ** 0.5 * self.box[1])
        act, calm = (torch.addcmul(*self.box, x.tanh()) for x in (free, center))
        return act, chance.sum(1), center.tanh() if self.bare else calm


class PolicyAndJudges(Port):
    """A tree: what scales, what acts, and two pairs of critics, the slow one frozen."""

    def take(self, model: sac.SAC) -> None:
        told, self.aim = self.fault.removeprefix("soft_actor_critic_"), model.target_entropy
        self.scaler = Scaler(model.normalizer, told == "normaliser_leaves_its_squares_around_the_old_mean")
        self.policy = Policy(model.actor, told == "action_in_evaluation_is_not_brought_to_its_bounds")
        self.live = nn.ModuleList(map(Judge, (model.qf1, model.qf2)))
        self.slow = nn.ModuleList(map(Judge, (model.qf1_target, model.qf2_target))).requires_grad_(False)
        self.heat, self.still = leaf(model.log_alpha), told != "actor_loss_trains_the_critics_too"
        if told == "first_target_critic_shares_the_live_output_layer":
            self.slow[0].w = nn.ParameterList([*self.slow[0].w[:8], *self.live[0].w[8:]])
        self.live[1].eps[1] *= 100 if told == "second_critic_ends_in_a_norm_with_epsilon_of_keras" else 1

    def promised(self, reward: Tensor, after: Tensor, over: Tensor, noise: Tensor) -> Tensor:
        act, chance, _ = self.policy(after, noise)
        ahead = torch.stack([judge(after, act) for judge in self.slow]).amin(0) - self.heat.exp() * chance
        return torch.lerp(reward + sac.GAMMA * ahead, reward, over).detach()

    def forward(self, observations, actions, rewards, next_observations, dones, noise, next_noise) -> dict:
        if self.training:
            self.scaler.watch(observations)
        state, after, heat = self.scaler(observations), self.scaler(next_observations), self.heat.exp()
        act, chance, calm = self.policy(state, noise)
        worth = torch.stack([judge(state, act, self.still) for judge in self.live]).amin(0)
        out = {f"qf{i}": judge(state, actions) for i, judge in enumerate(self.live, 1)}
        out["target"] = self.promised(rewards, after, dones, next_noise)
        out |= {"actor": chance * heat.detach() - worth, "alpha": -heat * (chance.detach() + self.aim)}
        return {**out, "action": act if self.training else calm}


class SixCritics(Port):
    """Now and next in one batch; live, held and target critics in one product of stacks."""

    def take(self, model: sac.SAC) -> None:
        pairs = (model.qf1, model.qf2), (model.qf1_target, model.qf2_target)
        names = [name.replace(".", "_") for name in model.qf1.state_dict()]
        stacks = (map(pile, zip(*(x.parameters() for x in pair), strict=True)) for pair in pairs)
        self.q, self.slow = (nn.ParameterDict(zip(names, stack, strict=True)) for stack in stacks)
        self.slow.requires_grad_(False)
        actor, norm, self.entropy = model.actor, model.normalizer, -model.target_entropy
        w = list(actor.parameters())
        self.pi = nn.ParameterList([*map(leaf, w[:4]), pile(w[4::2]), pile(w[5::2])])
        self.told, self.log_t = self.fault.removeprefix("soft_actor_critic_"), leaf(model.log_alpha[0])
        self.register_buffer("bounds", torch.stack([actor.action_bias, actor.action_scale]))
        self.register_buffer("stats", torch.stack([norm.mean, norm.std.square()]))
        self.register_buffer("late", torch.zeros_like(self.stats))
        self.register_buffer("rows", torch.stack([norm.total_count, norm.local_count]))

    def scaled(self, now: Tensor, after: Tensor) -> Tensor:
        """Both observations [2, N, C]; two moments of the first ones are kept until they count."""
        with torch.no_grad():
            if self.training and self.rows[1] >= sac.LATE:
                share, (mean, power) = self.rows[1] / self.rows.sum(), self.late / self.rows[1]
                moved = (1 - share) * (mean - self.stats[0]).square()
                self.stats.lerp_(torch.stack([mean, power - mean.square() + moved]), share)
                self.rows.copy_(torch.stack([self.rows.sum(), self.rows[1] * 0]))
                self.late.zero_()
            if self.training:
                self.late += torch.stack([now, now**2]).sum(1)
                self.rows[1] += len(now)
        s = torch.stack([now, after.detach()]) - self.stats[0]
        return (s / self.stats[1].clamp(min=1e-4).sqrt()).clamp(-sac.CLIP, sac.CLIP)

    def normed(self, x: Tensor, layer: str, w: dict[str, Tensor]) -> Tensor:
        x = (x - x.mean(2, True)) / torch.sqrt(x.var(2, False, True) + 1e-5)
        return x * w[layer + "_weight"][:, None] + w[layer + "_bias"][:, None]

    def values(self, z: Tensor) -> Tensor:
        """[6, N, observation and action] -> [6, N]: twice live, twice held, twice target."""
        w = {name: torch.cat([x, x.detach(), self.slow[name]]) for name, x in self.q.items()}
        for i in "12":
            z = torch.einsum("knc,kdc->knd", z, w[f"fc{i}_weight"]) + w[f"fc{i}_bias"][:, None]
            late, z = self.normed(z.relu(), "ln" + i, w), self.normed(z, "ln" + i, w).relu()
            if i == "1" and self.told == "first_critic_norms_after_its_first_activation":
                z = torch.stack([late[0], z[1], late[2], *z[3:]])
        return torch.einsum("knc,kc->kn", z, w["fc3_weight"][:, 0]) + w["fc3_bias"]

    def forward(self, observations, actions, rewards, next_observations, dones, noise, next_noise) -> dict:
        s, (mid, half) = self.scaled(observations, next_observations), self.bounds
        w, b, w_2, b_2, last, offset = self.pi
        h = F.linear(F.linear(s, w, b).relu(), w_2, b_2).relu()
        mean, spread = torch.einsum("snc,jac->jsna", h, last) + offset[:, None, None]
        spread = spread.clamp(sac.LOG_STD_MIN, sac.LOG_STD_MAX).exp()
        u = torch.addcmul(mean, spread, torch.stack([noise, next_noise.detach()]))
        a, cut = mid + half * u.tanh(), self.told == "tanh_correction_sends_no_gradient"
        flat = u.detach() if cut else u
        chance = 2 * torch.logaddexp(flat, -flat) - torch.log(4 * half * spread * (2 * torch.pi) ** 0.5)
        chance = (chance - ((u - mean) / spread).square() / 2).sum(2)
        z = torch.cat([s[[0, 0, 1]], torch.stack([actions, *a])], 2)
        q, heat, going = self.values(z.repeat_interleave(2, 0)), self.log_t.exp(), 1 - dones
        kept = 1 if self.told == "targets_keep_the_entropy_after_the_end" else going
        target = rewards + sac.GAMMA * (going * q[4:].amin(0) - kept * heat * chance[1])
        actor, alpha = heat.detach() * chance[0] - q[2:4].amin(0), self.entropy - chance[0].detach()
        out = {"qf1": q[0], "qf2": q[1], "target": target.detach(), "actor": actor, "alpha": heat * alpha}
        return {**out, "action": a[0] if self.training else mid + half * mean[0].tanh()}


CRITICS, SLOPES, KEPT = ("", "qf1", "qf2"), ("input gradient", "weight gradient"), ("forward", "buffer")
right(task, "soft_actor_critic_of_policy_and_judges", "fused heads and lists in a tree", PolicyAndJudges)
right(task, "soft_actor_critic_of_six_critics_at_once", "stacked critics, now and next at once", SixCritics)
wrong(
    task,
    PolicyAndJudges,
    soft_actor_critic_normaliser_leaves_its_squares_around_the_old_mean=("moments", "normalizer", KEPT),
    soft_actor_critic_action_in_evaluation_is_not_brought_to_its_bounds=("no bounds", "actor", "eval"),
    soft_actor_critic_actor_loss_trains_the_critics_too=("weights not held", CRITICS, "weight gradient"),
    soft_actor_critic_first_target_critic_shares_the_live_output_layer=("a shared layer", "qf1_target.fc3"),
    soft_actor_critic_second_critic_ends_in_a_norm_with_epsilon_of_keras=("another eps", "qf2.ln2"),
)
wrong(
    task,
    SixCritics,
    soft_actor_critic_first_critic_norms_after_its_first_activation=("order", ("qf1.ln1", "qf1")),
    soft_actor_critic_tanh_correction_sends_no_gradient=("a detached term", "actor", SLOPES),
    soft_actor_critic_targets_keep_the_entropy_after_the_end=("a mask on one term only", ""),
)
