"""Two ports of a small IMPALA learner: a tree with the channels last, and one class of packed rows."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fifty_third_vtrace import ACTIONS, DISCOUNTING, HIDDEN, Impala, VTrace, total, unrolls
from bench.held_back._fourth_ports import Port, leaf, pile, spatial, wrong
from bench.held_back._sixth_ports import few

task = few("fifty_third_vtrace", Impala, unrolls, total)
RHO_BAR, PG_RHO_BAR = VTrace.clip_rho_threshold, VTrace.clip_pg_rho_threshold


class Branch(nn.Module):
    def __init__(self, block: nn.Sequential):
        super().__init__()
        self.w, self.b = (pile(getattr(block[i], x) for i in (1, 3)) for x in ("weight", "bias"))
        self.straight = False

    def forward(self, x: Tensor) -> Tensor:
        y = spatial(x.clamp(min=0), self.w[0], self.b[0])
        return x + spatial(y if self.straight else y.clamp(min=0), self.w[1], self.b[1])


class Stage(nn.Module):
    def __init__(self, conv: nn.Conv2d, *blocks: nn.Sequential):
        super().__init__()
        self.w, self.b, self.edge = leaf(conv.weight), leaf(conv.bias), -torch.inf
        self.branches = nn.Sequential(*map(Branch, blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(spatial(x, self.w, self.b), (0, 0, 1, 1, 1, 1), value=self.edge)
        return self.branches(x.unfold(1, 3, 2).unfold(2, 3, 2).amax((-2, -1)))


class Memory(nn.Module):
    def __init__(self, core: nn.LSTM, layer: int):
        super().__init__()
        self.w, self.u, self.b, self.c = map(leaf, core.all_weights[layer])
        self.clears = True

    def forward(self, x: Tensor, begins: Tensor) -> Tensor:
        given, seen = F.linear(x, self.w, self.b), []
        h = c = x.new_zeros(len(x), self.u.shape[1])
        for t in range(x.shape[1]):
            new = begins[:, t, None]
            h, c = h.masked_fill(new, 0), c.masked_fill(new & self.clears, 0)
            i, f, g, o = (given[:, t] + F.linear(h, self.u, self.c)).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            seen.append(h)
        return torch.stack(seen, 1)


class Agent(nn.Module):
    def __init__(self, net: nn.Module):
        super().__init__()
        stages = zip((x[0] for x in net.feat_convs), net.resnet1, net.resnet2, strict=True)
        self.eye = nn.Sequential(*(Stage(*each) for each in stages))
        self.gather = leaf(net.fc.weight.unflatten(1, (-1, 3, 4)).permute(2, 3, 1, 0))
        self.gathered = leaf(net.fc.bias)
        self.memory = nn.ModuleList(Memory(net.core, i) for i in range(net.core.num_layers))
        self.actor, self.critic = net.policy, net.baseline

    def forward(self, frame: Tensor, action: Tensor, gain: Tensor, begins: Tensor) -> tuple[Tensor, Tensor]:
        x = self.eye((frame / 255).flatten(0, 1).movedim(1, 3)).clamp(min=0)
        x = (torch.einsum("nhwc,hwcd->nd", x, self.gather) + self.gathered).clamp(min=0)
        hot = F.one_hot(action, ACTIONS).to(x)
        x = torch.cat([x.unflatten(0, action.shape), gain[..., None], hot], -1)
        for layer in self.memory:
            x = layer(x, begins)
        return self.actor(x).log_softmax(-1), self.critic(x)[..., 0]


class ImpalaOfStages(Port):
    """An eye with the channels last, memories layer by layer, targets that correct the next target."""

    def take(self, model: Impala) -> None:
        self.agent, fault = Agent(model.model), self.fault
        if fault == "vtrace_second_pool_pads_with_zeros":
            self.agent.eye[1].edge = 0.0
        self.agent.eye[1].branches[1].straight = fault == "vtrace_last_block_without_its_inner_relu"
        for layer in self.agent.memory:
            layer.clears = fault != "vtrace_cell_kept_over_the_end_of_an_episode"
        self.half = 1.0 if fault == "vtrace_baseline_loss_without_its_half" else 0.5

    def targets(self, ratio: Tensor, fade: Tensor, gain: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        target = [value[:, -1]]
        for t in reversed(range(ratio.shape[1])):
            surprise = gain[:, t] + fade[:, t] * value[:, t + 1] - value[:, t]
            late = fade[:, t] * ratio[:, t].clamp(max=1) * (target[0] - value[:, t + 1])
            target.insert(0, value[:, t] + ratio[:, t].clamp(max=RHO_BAR) * surprise + late)
        target = torch.stack(target, 1)
        better = ratio.clamp(max=PG_RHO_BAR) * (gain + fade * target[:, 1:] - value[:, :-1])
        return target[:, :-1], better

    def forward(self, frame: Tensor, action: Tensor, reward: Tensor, done: Tensor, policy_logits: Tensor):
        gain = reward.clamp(-1, 1)
        scores, value = self.agent(frame, action, gain, done)
        chosen, scored = action[:, 1:, None], scores[:, :-1]
        mine = scored.gather(2, chosen)[..., 0]
        theirs = policy_logits[:, 1:].log_softmax(-1).gather(2, chosen)[..., 0]
        fade = DISCOUNTING * (~done[:, 1:]).to(value)
        ratio = (mine - theirs).exp().detach()
        target, better = self.targets(ratio, fade, gain[:, 1:].detach(), value.detach())
        found = {
            "pg_loss": -(mine * better).sum(),
            "baseline_loss": self.half * F.mse_loss(value[:, :-1], target, reduction="sum"),
            "entropy_loss": (scored.exp() * scored).sum(),
        }
        return found if self.training else found | {"greedy": scores.amax(-1)}


def sheet(weight: Tensor, bias: Tensor) -> Tensor:
    return torch.cat([weight.flatten(1), bias[:, None]], 1)


class PackedImpala(Port):
    """Rows of kernels with their offsets, gates in one product, and V-trace as a sum over what follows."""

    def take(self, model: Impala) -> None:
        net, core = model.model, model.model.core
        self.enter = nn.ParameterList(leaf(sheet(x[0].weight, x[0].bias)) for x in net.feat_convs)
        stages = zip(net.resnet1, net.resnet2, strict=True)
        inner = ([sheet(x[i].weight, x[i].bias) for x in pair for i in (1, 3)] for pair in stages)
        self.inner = nn.ParameterList(pile(each) for each in inner)
        self.full = leaf(sheet(net.fc.weight, net.fc.bias).T)
        gates = (torch.cat([w, u, b[:, None], c[:, None]], 1) for w, u, b, c in core.all_weights)
        self.gates = nn.ParameterList(map(leaf, gates))
        self.heads = leaf(torch.cat([sheet(x.weight, x.bias) for x in (net.policy, net.baseline)]).T)
        self.white = 256.0 if self.fault == "vtrace_frames_divided_by_256" else 255.0

    def patches(self, x: Tensor, rows: Tensor) -> Tensor:
        return (rows[:, :-1] @ F.unfold(x, 3, padding=1) + rows[:, -1:]).unflatten(2, x.shape[2:])

    def see(self, x: Tensor) -> Tensor:
        for enter, inner in zip(self.enter, self.inner, strict=True):
            x = F.max_pool2d(self.patches(x, enter), 3, 2, 1)
            for one, two in inner.unflatten(0, (2, 2)):
                x = x + self.patches(self.patches(x.relu(), one).relu(), two)
        return (x.relu().flatten(1) @ self.full[:-1] + self.full[-1]).relu()

    def recall(self, x: Tensor, done: Tensor) -> Tensor:
        state, seen, ones = x.new_zeros(2, 2, x.shape[0], HIDDEN), [], x.new_ones(x.shape[0], 2)
        for t in range(x.shape[1]):
            state, y, after = state * (1 - done[:, t, None].to(x)), x[:, t], []
            for rows, (h, c) in zip(self.gates, state, strict=True):
                a = (torch.cat([y, h, ones], 1) @ rows.T).unflatten(1, (4, HIDDEN))
                (i, f, o), g = a[:, [0, 1, 3]].sigmoid().unbind(1), a[:, 2].tanh()
                c = f * c + i * g
                y = o * c.tanh()
                after.append(torch.stack([y, c]))
            state = torch.stack(after)
            seen.append(y)
        return torch.stack(seen, 1)

    def forward(self, frame: Tensor, action: Tensor, reward: Tensor, done: Tensor, policy_logits: Tensor):
        seen, gain = self.see(frame.flatten(0, 1) / self.white), reward.clip(-1, 1)
        hot = torch.eye(ACTIONS, dtype=seen.dtype, device=seen.device)[action]
        x = self.recall(torch.cat([seen.unflatten(0, action.shape), gain[..., None], hot], 2), done)
        logits, values = (x @ self.heads[:-1] + self.heads[-1]).split([ACTIONS, 1], 2)
        logs, values, hot = logits - logits.logsumexp(2, True), values[..., 0], hot[:, 1:]
        mine, fixed, gain = (logs[:, :-1] * hot).sum(2), values.detach(), gain[:, 1:].detach()
        rho = (mine - (policy_logits[:, 1:].log_softmax(2) * hot).sum(2)).exp().detach()
        fade = DISCOUNTING * (1 - done[:, 1:].to(x))
        trace = fade * rho.clip(max=RHO_BAR if self.fault == "vtrace_traces_clipped_by_rho_bar" else 1)
        delta = rho.clip(max=RHO_BAR) * (gain + fade * fixed[:, 1:] - fixed[:, :-1])
        times = range(delta.shape[1])
        late = [sum(trace[:, t:s].prod(1) * delta[:, s] for s in times[t:]) for t in times]
        target = torch.cat([fixed[:, :-1] + torch.stack(late, 1), fixed[:, -1:]], 1)
        base = values if self.fault == "vtrace_advantages_keep_the_gradient_of_values" else fixed
        better = rho.clip(max=PG_RHO_BAR) * (gain + fade * target[:, 1:] - base[:, :-1])
        losses = -(mine * better).sum(), (target - values)[:, :-1].square().sum() / 2
        found = dict(zip(("pg_loss", "baseline_loss"), losses, strict=True))
        found["entropy_loss"] = (logs.softmax(2) * logs)[:, :-1].sum()
        best = logits if self.fault == "vtrace_greedy_logits_not_normalised_in_evaluation" else logs
        return found if self.training else found | {"greedy": best.amax(2)}


SLOPES, LAST = ("input gradient", "weight gradient"), "model.resnet2.1"
right(task, "vtrace_of_stages_with_channels_last", "a tree, channels last, layer by layer", ImpalaOfStages)
right(task, "vtrace_of_packed_rows", "packed rows, unfolded patches, sums of traces", PackedImpala)
wrong(
    task,
    ImpalaOfStages,
    vtrace_second_pool_pads_with_zeros=("another padding", "model.feat_convs.1.1"),
    vtrace_last_block_without_its_inner_relu=("an activation left out", (f"{LAST}.2", LAST)),
    vtrace_cell_kept_over_the_end_of_an_episode=("a state not reset", "model"),
    vtrace_baseline_loss_without_its_half=("a factor left out", "losses"),
)
wrong(
    task,
    PackedImpala,
    vtrace_frames_divided_by_256=("a constant off by one", "model"),
    vtrace_traces_clipped_by_rho_bar=("another clip", "vtrace"),
    vtrace_advantages_keep_the_gradient_of_values=("detach left out", "vtrace", SLOPES),
    vtrace_greedy_logits_not_normalised_in_evaluation=("a norm left out in eval", "", "eval"),
)
