"""Two ports of a world model: a tree with weights split by input, and flat code that goes time first."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twelfth_world_model import ACTIONS, DETER, FREE, HIDDEN, WorldModel, episodes, scaled

task = few("twelfth_world_model", WorldModel, episodes, scaled)
LATENTS, DRAWN = (4, 5), 20


class Blend(nn.Module):
    def __init__(self, linear: nn.Module, norm: nn.LayerNorm, *sizes: int):
        super().__init__()
        self.products = nn.ParameterList(leaf(part.T) for part in linear.weight.flatten(1).split(sizes, 1))
        self.gain, self.shift = leaf(norm.weight), leaf(norm.bias)

    def forward(self, *inputs: Tensor) -> Tensor:
        x = sum(map(torch.matmul, inputs, self.products))
        return F.layer_norm(x, x.shape[-1:], self.gain, self.shift, 1e-3)


class Table(Blend):
    def __init__(self, layers: nn.Module, end: nn.Linear, shape: tuple[int, ...], *sizes: int):
        super().__init__(*layers[:2], *sizes)
        self.table, self.offset = leaf(end.weight.T.unflatten(1, shape)), leaf(end.bias.view(shape))

    def forward(self, *inputs: Tensor) -> Tensor:
        return torch.tensordot(F.silu(super().forward(*inputs)), self.table, 1) + self.offset


class Story(nn.Module):
    def __init__(self, old: nn.Module, fault: str):
        super().__init__()
        self.fault, self.begin = fault, leaf(old.W[0])
        self.enter = Blend(*old._img_in_layers[:2], DRAWN, ACTIONS)
        self.gates = Blend(old._cell.GRU_linear, old._cell.GRU_norm, HIDDEN, DETER)
        self.prior = Table(old._img_out_layers, old._imgs_stat_layer, LATENTS, DETER)
        self.post = Table(old._obs_out_layers, old._obs_stat_layer, LATENTS, DETER, 40)
        self.even = (0.0 if fault == "dreamer_prior_without_its_uniform_share" else 0.01, 0.01)

    def belief(self, seen: bool, *inputs: Tensor) -> Tensor:
        odds = (self.post if seen else self.prior)(*inputs)
        return odds.softmax(-1).lerp(torch.full_like(odds, 1 / LATENTS[1]), self.even[seen]).log()

    def draw(self, logs: Tensor, noise: Tensor | float = 0.0) -> Tensor:
        noisy = self.training or self.fault == "dreamer_posterior_still_sampled_at_evaluation"
        best, shares = (logs + noise if noisy else logs).argmax(-1, keepdim=True), logs.exp()
        return ((torch.zeros_like(shares).scatter(-1, best, 1) - shares).detach() + shares).flatten(1)

    def forward(self, seen: Tensor, action: Tensor, first: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
        start = kept = self.begin.tanh().expand(len(action), -1)
        blank = drawn = self.draw(self.belief(False, start))
        action, story = action * (~first).to(action)[..., None], []
        for t, new in enumerate(first.mT[..., None]):
            drawn = blank.where(new, drawn)
            if self.fault != "dreamer_new_episode_keeps_the_old_recurrent_state":
                kept = start.where(new, kept)
            reset, fresh, write = self.gates(F.silu(self.enter(drawn, action[:, t])), kept).chunk(3, -1)
            kept = kept.lerp((reset.sigmoid() * fresh).tanh(), (write - 1).sigmoid())
            post = self.belief(True, kept, seen[:, t])
            story.append((kept, drawn := self.draw(post, noise[:, t]), post))
        kept, drawn, post = (torch.stack(x, 1) for x in zip(*story, strict=True))
        return torch.cat([drawn, kept], -1), post, self.belief(False, kept)


class TreeOfDreams(Port):
    def take(self, model: WorldModel) -> None:
        (decoder, *voices), layers = model.heads.values(), model.encoder.layers
        self.eye = nn.ModuleList(Blend(*layers[i : i + 2], layers[i].weight[0].numel()) for i in (0, 3, 6))
        self.grid, self.offset = leaf(decoder._linear_layer.weight.T), leaf(decoder._linear_layer.bias)
        self.kernels = nn.ParameterList(leaf(conv.weight) for conv in decoder.layers[::3])
        self.levels = nn.ParameterList(pile(norm.parameters()) for norm in decoder.layers[1::3])
        self.cuts = (1, 2 if self.fault == "dreamer_middle_picture_cut_one_cell_late" else 1, 1)
        self.tint, self.story = leaf(decoder.layers[-1].bias), Story(model.dynamics, self.fault)
        self.voices = nn.ModuleList(Blend(*x[:2], DRAWN + DETER) for x in voices)
        self.ends = nn.ModuleList(Table(x[3:], x[-1], x[-1].bias.shape, HIDDEN) for x in voices)
        self.price, self.gap = model.reward_dist, model.kl_loss

    def forward(self, image, action, is_first, noise, reward, is_terminal) -> dict[str, Tensor]:
        x = (image - 0.5).flatten(0, 1).movedim(3, 1)
        for blend in self.eye:
            x = F.silu(blend(F.unfold(x, 4, 1, 1, 2).mT)).mT.unflatten(2, (x.shape[3] // 2, -1))
        story, post, prior = self.story(x.movedim(1, 3).reshape(*reward.shape, -1), action, is_first, noise)
        x = (story @ self.grid + self.offset).view(-1, 2, 2, 10)
        for kernel, near, level in zip(self.kernels, self.cuts, [*self.levels, None], strict=True):
            x = F.conv_transpose2d(x.movedim(3, 1), kernel, stride=2)
            x = F.pad(x, (-near, near - 2) * 2).movedim(1, 3)
            x = x if level is None else F.silu(F.layer_norm(x, x.shape[3:], *level, 1e-3))
        worth, cont = (end(F.silu(voice(story))) for voice, end in zip(self.voices, self.ends, strict=True))
        cont = F.softplus(cont[..., 0]) - cont[..., 0].masked_fill(is_terminal, 0)
        x, (dyn, rep) = x.view(image.shape) + self.tint + 0.5, self.gap(post, prior)
        return {"image": x, "reward": self.price(worth, reward), "cont": cont, "dyn": dyn, "rep": rep}


class FlatDreams(Port):
    """Time first, channels last, all weights in lists."""

    def take(self, model: WorldModel) -> None:
        d, (decoder, reward, cont) = model.dynamics, model.heads.values()
        blocks = [d._img_in_layers, d._img_out_layers, d._obs_out_layers, reward, reward[3:], cont, cont[3:]]
        layers = [*model.encoder.layers, *decoder.layers]
        ends = [d._imgs_stat_layer, d._obs_stat_layer, decoder._linear_layer, reward[-1], cont[-1]]
        self.dense = nn.ParameterList(leaf(x[0].weight.T) for x in blocks)
        self.levels = nn.ParameterList(pile(x.parameters()) for x in [*(x[1] for x in blocks), *layers[1::3]])
        self.kernels = nn.ParameterList(leaf(conv.weight.permute(2, 3, 1, 0)) for conv in layers[::3])
        self.ends = nn.ParameterList(leaf(torch.cat([end.weight.T, end.bias[None]])) for end in ends)
        self.gates = leaf(d._cell.GRU_linear.weight.unflatten(0, (3, -1)).mT)
        self.gains = leaf(torch.stack([*d._cell.GRU_norm.parameters()]).unflatten(1, (3, -1)))
        self.tint, self.start = leaf(decoder.layers[-1].bias), leaf(d.W)
        self.register_buffer("edges", model.reward_dist.buckets.clone())

    def level(self, i: int, x: Tensor) -> Tensor:
        x, (gain, shift) = x - x.mean(-1, keepdim=True), self.levels[i]
        return F.silu(x * (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * gain + shift)

    def end(self, i: int, x: Tensor, *hidden: int) -> Tensor:
        for j in hidden:
            x = self.level(j, x @ self.dense[j])
        return x @ self.ends[i][:-1] + self.ends[i][-1]

    def latents(self, i: int, x: Tensor) -> Tensor:
        return (0.99 * self.end(i, x, i + 1).unflatten(-1, LATENTS).softmax(-1) + 0.002).log()

    def draw(self, logs: Tensor, noise: Tensor | float) -> Tensor:
        scores = logs + noise if self.training else logs
        soft = logs if self.fault == "dreamer_straight_through_the_logits" else logs.exp()
        return (scores.ge(scores.amax(-1, True)).to(soft) + soft - soft.detach()).flatten(-2)

    def cell(self, x: Tensor, h: Tensor) -> Tensor:
        parts = torch.einsum("bi,gis->bgs", torch.cat([x, h], -1), self.gates)
        axes = 2 if self.fault == "dreamer_gate_norm_for_each_gate_alone" else (1, 2)
        spread, center = torch.var_mean(parts, axes, correction=0, keepdim=True)
        parts = (parts - center) * (spread + 1e-3).rsqrt() * self.gains[0] + self.gains[1]
        new = (parts[:, 0].sigmoid() * parts[:, 1]).tanh()
        return new + (1 - parts[:, 2]).sigmoid() * (h - new)

    def pixels(self, x: Tensor, *layers: int) -> Tensor:
        for i in layers:
            if i < 3:
                x = F.pad(x, (0, 0, 1, 1, 1, 1)).unfold(1, 4, 2).unfold(2, 4, 2)
                x = torch.einsum("nhwcij,ijco->nhwo", x, self.kernels[i])
            else:
                columns = torch.einsum("nhwc,ijoc->noijhw", x, self.kernels[i]).flatten(1, 3).flatten(2)
                x = F.fold(columns, 2 * x.shape[1], 4, padding=1, stride=2).movedim(1, 3)
            x = self.level(7 + i, x) if i < 5 else x + self.tint + 0.5
        return x

    def surprise(self, scores: Tensor, value: Tensor) -> Tensor:
        edges, x, logs = self.edges, value.sign() * (1 + value.abs()).log(), scores.log_softmax(-1)
        if self.fault == "dreamer_reward_shares_measured_outside_symlog":
            edges, x = edges.sign() * edges.abs().expm1(), value
        above = torch.searchsorted(edges, x.detach(), right=True).clamp(1, len(edges) - 1)
        share = ((x - edges[above - 1]) / (edges[above] - edges[above - 1])).clamp(0, 1)
        low, high = (logs.gather(-1, i[..., None])[..., 0] for i in (above - 1, above))
        return (share - 1) * low - share * high

    def divergence(self, p: Tensor, q: Tensor) -> Tensor:
        kl = torch.einsum("tbsk,tbsk->bts", p.exp(), p - q)
        if self.fault != "dreamer_free_bits_shared_out_among_the_latents":
            kl = kl.sum(-1, keepdim=True)
        return kl.clamp_min(FREE / kl.shape[-1]).sum(-1)

    def forward(self, image, action, is_first, noise, reward, is_terminal) -> dict[str, Tensor]:
        seen = self.pixels(image.transpose(0, 1).flatten(0, 1) - 0.5, 0, 1, 2).view(*reward.mT.shape, -1)
        start, steps = self.start.tanh().expand(len(action), -1), []
        h, z = start, (blank := self.draw(self.latents(0, start), 0.0))
        for t, first in enumerate(is_first.mT[..., None]):
            h, z = torch.where(first, start, h), torch.where(first, blank, z)
            x = torch.cat([z, torch.where(first, 0.0, action[:, t])], -1)
            h = self.cell(self.level(0, x @ self.dense[0]), h)
            post = self.latents(1, torch.cat([h, seen[t]], -1))
            z = self.draw(post, noise[:, t])
            steps.append((torch.cat([z, h], -1), post, self.latents(0, h)))
        story, post, prior = (torch.stack(x) for x in zip(*steps, strict=True))
        x = self.pixels(self.end(2, story).view(-1, 2, 2, 10), 3, 4, 5).unflatten(0, story.shape[:2])
        worth, cont = self.end(3, story, 3, 4).transpose(0, 1), self.end(4, story, 5, 6)[..., 0].mT
        worth, cont = self.surprise(worth, reward), F.softplus(torch.where(is_terminal, cont, -cont))
        dyn, rep = self.divergence(post.detach(), prior), self.divergence(post, prior.detach())
        return {"image": x.transpose(0, 1), "reward": worth, "cont": cont, "dyn": dyn, "rep": rep}


SAMPLE, CELL = ("dynamics._sample", "dynamics"), ("dynamics._cell.GRU_norm", "dynamics._cell")
right(
    task,
    "dreamer_as_a_tree_of_blends",
    "weights split by input, one table for the latents",
    TreeOfDreams,
    True,
)
right(task, "dreamer_time_first_in_flat_code", "windows, folds, weights in lists", FlatDreams, True)
wrong(
    task,
    TreeOfDreams,
    dreamer_middle_picture_cut_one_cell_late=("a crop off by one", "heads.decoder.layers.3"),
    dreamer_new_episode_keeps_the_old_recurrent_state=("half of the state not reset", "dynamics"),
    dreamer_prior_without_its_uniform_share=("one mixture missing", "dynamics._imgs_stat_layer"),
    dreamer_posterior_still_sampled_at_evaluation=("noise in eval mode", SAMPLE, "eval"),
)
wrong(
    task,
    FlatDreams,
    dreamer_gate_norm_for_each_gate_alone=("statistics of a part", CELL),
    dreamer_straight_through_the_logits=("another surrogate", SAMPLE, ("input gradient", "weight gradient")),
    dreamer_free_bits_shared_out_among_the_latents=("a floor before the sum", "kl_loss"),
    dreamer_reward_shares_measured_outside_symlog=("interpolation on another scale", "reward_dist"),
)
