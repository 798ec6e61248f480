"""Two ports of a small Rainbow: a tree with the channels last, and one class of packed sheets."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _thirty_eighth_rainbow as given
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._thirty_eighth_rainbow import ACTIONS, ATOMS, KERNELS, V_MAX, V_MIN, Rainbow

task = few("thirty_eighth_rainbow", Rainbow, given.transitions, given.third_of_loss)
LATER = given.DISCOUNT**given.MULTI_STEP


class Windows(nn.Module):
    """A strided convolution of [N, H, W, C], and a ReLU."""

    def __init__(self, conv: nn.Conv2d):
        super().__init__()
        self.kernel, self.offset = leaf(conv.weight.permute(2, 3, 1, 0)), leaf(conv.bias)
        self.size, self.stride, self.turned = conv.kernel_size[0], conv.stride[0], False

    def forward(self, x: Tensor) -> Tensor:
        x = x.unfold(1, self.size, self.stride).unfold(2, self.size, self.stride)
        kernel = self.kernel.transpose(0, 1) if self.turned else self.kernel
        return (torch.einsum("nhwcij,ijco->nhwo", x, kernel) + self.offset).clamp(min=0)


class Fuzzy(nn.Module):
    """The noise meets what goes in and what comes out; no noisy weight is made."""

    def __init__(self, layer: nn.Module, order: Tensor | slice = slice(None)):
        super().__init__()
        self.plain, self.rough = leaf(layer.weight_mu.T[order]), leaf(layer.weight_sigma.T[order])
        self.shift, self.shake = leaf(layer.bias_mu), leaf(layer.bias_sigma)
        self.register_buffer("before", layer.epsilon_in[order].clone())
        self.register_buffer("after", layer.epsilon_out.clone())
        self.restless = False

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.plain + self.shift
        if self.training or self.restless:
            before, after = (e * e.abs().rsqrt() for e in (self.before, self.after))
            y = y + after * ((x * before) @ self.rough + self.shake)
        return y


class Judge(nn.Module):
    """Frames -> logits [N, atoms, actions]."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.look = nn.Sequential(*(Windows(net.convs[i]) for i in (0, 2, 4)))
        order = torch.arange(net.fc_h_v.weight_mu.shape[1]).view(KERNELS[-1][0], -1).T.flatten()
        self.worth = nn.Sequential(Fuzzy(net.fc_h_v, order), nn.ReLU(), Fuzzy(net.fc_z_v))
        self.gain = nn.Sequential(Fuzzy(net.fc_h_a, order), nn.ReLU(), Fuzzy(net.fc_z_a))
        self.silent = False

    def forward(self, frames: Tensor) -> Tensor:
        x = self.look(frames.movedim(1, 3) / 255).flatten(1)
        gain = self.gain(x).unflatten(1, (ACTIONS, ATOMS)).mT
        common = gain.mean(2, keepdim=True)
        return gain + (self.worth(x)[..., None] - (common.detach() if self.silent else common))


class Spreading(nn.Module):
    """Each atom of the return is shared out by its distance to the atoms of the support."""

    def __init__(self, support: Tensor, bounded: bool):
        super().__init__()
        self.register_buffer("support", support.clone())
        self.bounded = bounded

    def forward(self, chance: Tensor, returns: Tensor, goes_on: Tensor) -> Tensor:
        goal = returns[:, None] + (LATER * goes_on)[:, None] * self.support
        if self.bounded:
            goal = goal.clamp(V_MIN, V_MAX)
        far = (goal[:, :, None] - self.support).abs() * ((ATOMS - 1) / (V_MAX - V_MIN))
        return torch.einsum("nj,nji->ni", chance, (1 - far).clamp(min=0))


class RainbowOfJudges(Port):
    """Two judges with their atoms before the actions, channels last; the projection is a product."""

    def take(self, model: Rainbow) -> None:
        self.player, self.critic = Judge(model.online_net), Judge(model.target_net).requires_grad_(False)
        bounded = self.fault != "rainbow_projection_leaves_the_range_of_the_support"
        self.spreading = Spreading(model.projection.support, bounded)
        self.player.look[1].turned = self.fault == "rainbow_second_convolution_swaps_rows_and_columns"
        self.player.silent = self.fault == "rainbow_mean_advantage_without_gradient"
        self.player.worth[2].restless = self.fault == "rainbow_value_atoms_noisy_in_evaluation"

    def forward(self, states, actions, returns, next_states, nonterminals, weights):
        rows = torch.arange(len(actions), device=actions.device)
        logits = self.player(states)
        with torch.no_grad():
            best = (self.spreading.support @ self.player(next_states).softmax(1)).argmax(1)
            chance = self.critic(next_states)[rows, :, best].softmax(1)
            goal = self.spreading(chance, returns, nonterminals)
        taken = logits[rows, :, actions]
        surprise = torch.einsum("nz,nz->n", goal, -taken.log_softmax(1))
        return logits.mT, goal, surprise * weights


def sheet(weight: Tensor, bias: Tensor) -> Tensor:
    """A row for each output: its weights and its bias."""
    return torch.cat([weight.flatten(1), bias[:, None]], 1).detach()


def sheets(net: nn.Module) -> list[Tensor]:
    """Of the three convolutions; then those of the noisy layers, the means over the deviations."""
    noisy = (net.fc_h_v, net.fc_z_v, net.fc_h_a, net.fc_z_a)
    pairs = [(sheet(x.weight_mu, x.bias_mu), sheet(x.weight_sigma, x.bias_sigma)) for x in noisy]
    return [*(sheet(net.convs[i].weight, net.convs[i].bias) for i in (0, 2, 4)), *map(torch.stack, pairs)]


class PackedRainbow(Port):
    """Packed sheets, patches as columns, and the noise of weights and biases in one outer product."""

    def take(self, model: Rainbow) -> None:
        self.w = nn.ParameterList(map(leaf, sheets(model.online_net)))
        for i, each in enumerate(sheets(model.target_net)):
            self.register_buffer(f"still_{i}", each.clone())
        for name, net in (("live", model.online_net), ("frozen", model.target_net)):
            for i, x in enumerate((net.fc_h_v, net.fc_z_v, net.fc_h_a, net.fc_z_a), 3):
                drawn = torch.cat([x.epsilon_out, x.epsilon_in, x.epsilon_in.new_ones(1)])
                self.register_buffer(f"{name}_noise_{i}", drawn)
        self.register_buffer("atoms", model.projection.support.clone())

    def noisy(self, x: Tensor, pair: Tensor, i: int, name: str) -> Tensor:
        mean, spread = pair
        if name == "live" and i == 3 and self.fault == "rainbow_hidden_value_deviations_without_gradient":
            spread = spread.detach()
        if self.training:
            drawn = self.get_buffer(f"{name}_noise_{i}")
            root = drawn.abs().sqrt()
            if name == "frozen" or i != 6 or self.fault != "rainbow_advantage_atoms_noise_loses_its_sign":
                root = root.copysign(drawn)
            mean = mean + spread * root[: len(mean), None] * root[len(mean) :]
        return torch.addmm(mean[:, -1], x, mean[:, :-1].T)

    def logits(self, x: Tensor, name: str) -> Tensor:
        w = self.w if name == "live" else [self.get_buffer(f"still_{i}") for i in range(7)]
        most = 255
        if name == "frozen" and self.fault == "rainbow_frames_of_target_network_scaled_by_256":
            most = 256
        for i, (_, size, stride) in enumerate(KERNELS):
            shape = [(length - size) // stride + 1 for length in x.shape[2:]]
            x = w[i][:, :-1] @ F.unfold(x, size, stride=stride) / (most if i == 0 else 1)
            x = (x + w[i][:, -1:]).relu().unflatten(2, shape)
        x = x.flatten(1)
        v, a = (self.noisy(self.noisy(x, w[i], i, name).relu(), w[i + 1], i + 1, name) for i in (3, 5))
        a = a.view(len(a), ACTIONS, ATOMS)
        return a + (v - a.sum(1) / ACTIONS)[:, None]

    def forward(self, states, actions, returns, next_states, nonterminals, weights):
        logits, goal = self.logits(states, "live"), 0
        with torch.no_grad():
            chance, judged = (self.logits(next_states, x).softmax(2) for x in ("frozen", "live"))
            if self.fault == "rainbow_next_action_chosen_by_target_network":
                judged = chance
            best = F.one_hot((judged @ self.atoms).argmax(1), ACTIONS).to(chance)
            chance = torch.einsum("naz,na->nz", chance, best)
            for j in range(ATOMS):
                at = returns + nonterminals * LATER * self.atoms[j]
                at = ((at - V_MIN) * (ATOMS - 1) / (V_MAX - V_MIN)).clamp(0, ATOMS - 1)
                share = 1 - (at[:, None] - torch.arange(ATOMS).to(at)).abs()
                goal = goal + chance[:, j, None] * share.relu()
        taken = logits.take_along_dim(actions[:, None, None], 1)[:, 0]
        return logits, goal, F.cross_entropy(taken, goal, reduction="none") * weights


SLOPES = ("input gradient", "weight gradient")
right(task, "rainbow_of_judges_with_channels_last", "a tree, noise on both sides", RainbowOfJudges)
right(task, "rainbow_of_packed_sheets", "packed sheets, patches, noise by outer products", PackedRainbow)
wrong(
    task,
    RainbowOfJudges,
    rainbow_second_convolution_swaps_rows_and_columns=("a kernel transposed", "online_net.convs.2"),
    rainbow_mean_advantage_without_gradient=("detached mean", "online_net", SLOPES),
    rainbow_value_atoms_noisy_in_evaluation=("training's noise in eval", "online_net.fc_z_v", "eval"),
    rainbow_projection_leaves_the_range_of_the_support=("a clamp left out", "projection"),
)
wrong(
    task,
    PackedRainbow,
    rainbow_frames_of_target_network_scaled_by_256=("a count off by one", "target_net"),
    rainbow_hidden_value_deviations_without_gradient=("detach", "online_net.fc_h_v", "weight gradient"),
    rainbow_advantage_atoms_noise_loses_its_sign=("a sign left out", "online_net.fc_z_a"),
    rainbow_next_action_chosen_by_target_network=("another network asked", ""),
)
