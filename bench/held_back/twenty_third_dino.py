"""Two ports of a small DINO: a tree that learns from its twin, and all crops padded to one length."""

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twenty_third_dino import DEPTH, DINO, HEADS, PATCH, agreement, crops

task = few("twenty_third_dino", DINO, crops, agreement)


class Stage(nn.Module):
    """A block whose attention has maps of its own for each head."""

    def __init__(self, old: nn.Module):
        super().__init__()
        self.before, self.between, self.on_level = deepcopy(old.norm1), deepcopy(old.norm2), False
        self.maps = leaf(old.attn.qkv.weight.unflatten(0, (3, HEADS, -1)).transpose(2, 3))
        self.tilts = leaf(old.attn.qkv.bias.unflatten(0, (3, 1, HEADS, 1, -1)))
        self.back = leaf(old.attn.proj.weight.T.unflatten(0, (HEADS, -1)))
        self.shift = leaf(old.attn.proj.bias)
        self.up, self.up_b = leaf(old.mlp.fc1.weight.T), leaf(old.mlp.fc1.bias)
        self.down, self.down_b = leaf(old.mlp.fc2.weight.T), leaf(old.mlp.fc2.bias)

    def forward(self, x: Tensor) -> Tensor:
        qkv = torch.einsum("ntc,ahcd->anhtd", self.before(x), self.maps) + self.tilts
        x = x + torch.einsum("nhtd,hdc->ntc", F.scaled_dot_product_attention(*qkv), self.back) + self.shift
        y = self.between(x)
        return (y if self.on_level else x) + F.gelu(y @ self.up + self.up_b) @ self.down + self.down_b


class Sight(nn.Module):
    """One table of the class token, its position and those of the tiles."""

    def __init__(self, old: nn.Module):
        super().__init__()
        proj, self.straight = old.patch_embed.proj, False
        self.tiles, self.shift = leaf(proj.weight.permute(2, 3, 1, 0)), leaf(proj.bias)
        self.table = leaf(torch.cat([old.cls_token[0], old.pos_embed[0]]))
        self.stages, self.after = nn.Sequential(*map(Stage, old.blocks)), deepcopy(old.norm)

    def forward(self, x: Tensor) -> Tensor:
        cells = x.unflatten(3, (-1, PATCH)).unflatten(2, (-1, PATCH))
        x = torch.einsum("nciajb,abcd->nijd", cells, self.tiles) + self.shift
        places, (high, wide) = self.table[2:].unflatten(0, (4, 4)), x.shape[1:3]
        if (high, wide) != (4, 4):
            mode = "bilinear" if self.straight and not self.training else "bicubic"
            places, stretch = places.permute(2, 0, 1)[None], ((high + 0.1) / 4, (wide + 0.1) / 4)
            places = F.interpolate(places, scale_factor=stretch, mode=mode)[0].permute(1, 2, 0)
        token = self.table[:2].sum(0).expand(len(x), 1, -1)
        return self.after(self.stages(torch.cat([token, (x + places).flatten(1, 2)], 1))[:, 0])


class Speaker(nn.Module):
    """What is seen, told by its angles to directions of fixed lengths."""

    def __init__(self, old: nn.Module):
        super().__init__()
        self.sight, self.thought, self.rigid = Sight(old.backbone), deepcopy(old.head.mlp), False
        lengths, directions = old.head.last_layer.parametrizations.weight.parameters()
        self.directions, self.lengths = leaf(directions.T), leaf(lengths[:, 0]).requires_grad_(False)

    def forward(self, *views: Tensor) -> Tensor:
        z = self.thought(torch.cat([self.sight(view.flatten(0, 1)) for view in views]))
        size = torch.linalg.vector_norm(z, dim=1, keepdim=True)
        cosines = z / (size.detach() if self.rigid else size) @ F.normalize(self.directions, dim=0)
        return cosines * self.lengths


class SelfTaught(Port):
    """A pupil and its twin; all pairs of crops in one table, of which the diagonal is left out."""

    def take(self, model: DINO) -> None:
        self.pupil, self.twin = Speaker(model.student), Speaker(model.teacher).requires_grad_(False)
        self.register_buffer("middle", model.dino_loss.center[0].clone())
        self.pupil.rigid = self.fault == "dino_bottleneck_norm_held_constant_for_the_gradient"
        self.pupil.sight.straight = self.fault == "dino_small_crops_placed_bilinearly_in_evaluation"
        self.pupil.sight.stages[2].on_level = self.fault == "dino_last_block_adds_its_mlp_to_the_normed"

    def forward(self, global_crops: Tensor, local_crops: Tensor) -> dict[str, Tensor]:
        told, heard = self.pupil(global_crops, local_crops), self.twin(global_crops).detach()
        logits, aims = (x.unflatten(0, (-1, global_crops.shape[1])) for x in (told, heard))
        late = self.fault == "dino_center_subtracted_behind_the_temperature"
        aims = (aims / 0.1 - self.middle if late else (aims - self.middle) / 0.1).softmax(2)
        table = torch.einsum("anp,bnp->ab", aims, (logits / 0.2).log_softmax(2)) / -logits.shape[1]
        others = 1 - torch.eye(*table.shape, dtype=table.dtype, device=table.device)
        if self.training:
            self.middle.lerp_(heard.mean(0), 0.1)
        return {"loss": (table * others).sum() / others.sum(), "student": told, "teacher": heard}


def spread(count: int, like: Tensor, side: int = 4) -> Tensor:
    """The cubic weights [count, side] by which as many places are drawn from a side of the grid."""
    at = (torch.arange(count).to(like) + 0.5) * (side / (count + 0.1)) - 0.5
    taps = torch.arange(-2, side + 2, device=like.device)
    d = (at[:, None] - taps).abs()
    near, far = 1.25 * d**3 - 2.25 * d**2 + 1, -0.75 * (d**3 - 5 * d**2 + 8 * d - 4)
    weights = torch.where(d <= 1, near, torch.where(d < 2, far, 0))
    return weights @ F.one_hot(taps.clamp(0, side - 1), side).to(like)


def stacks(old: nn.Module) -> nn.ParameterDict:
    eye, head, w = old.backbone, old.head, {}
    norms = [*(norm for block in eye.blocks for norm in (block.norm1, block.norm2)), eye.norm]
    uses = [(name[5:], [x.get_submodule(name) for x in eye.blocks]) for name in ("attn.qkv", "attn.proj")]
    uses += [(name, [x.mlp.get_submodule(name) for x in eye.blocks]) for name in ("fc1", "fc2")]
    uses += [("norm", norms), ("tile", [eye.patch_embed.proj])]
    for name, layers in [*uses, *((f"head{i}", [head.mlp[i]]) for i in (0, 2, 4))]:
        w |= {name: pile(x.weight for x in layers), name + "_b": pile(x.bias for x in layers)}
    lengths, rays = head.last_layer.parametrizations.weight.parameters()
    w |= {"token": leaf(eye.cls_token[0]), "place": leaf(eye.pos_embed[0]), "rays": leaf(rays)}
    return nn.ParameterDict(w | {"lengths": leaf(lengths).requires_grad_(False)})


def by(w: nn.ParameterDict, name: str, x: Tensor, i: int = 0, level: int | None = None) -> Tensor:
    """A product by a stacked weight, behind the norm of that number if there is one."""
    if level is not None:
        spread, center = torch.var_mean(x, -1, correction=0, keepdim=True)
        x = (x - center) * (spread + 1e-6).rsqrt() * w["norm"][level] + w["norm_b"][level]
    return x @ w[name][i].flatten(1).T + w[name + "_b"][i]


class PaddedCrops(Port):
    """Two dictionaries of stacks, one to learn and one fixed; rows of few tiles are filled and masked."""

    def take(self, model: DINO) -> None:
        self.learnt, self.fixed = stacks(model.student), stacks(model.teacher).requires_grad_(False)
        self.register_buffer("center", model.dino_loss.center.clone())

    def row(self, w: nn.ParameterDict, x: Tensor) -> Tensor:
        high, wide = (size // PATCH for size in x.shape[-2:])
        token, grid = w["token"] + w["place"][:1], w["place"][1:]
        if (high, wide) != (4, 4):
            cut = self.fault == "dino_small_crops_give_the_positions_no_gradient"
            grid = (grid.detach() if cut else grid).unflatten(0, (4, 4))
            grid = torch.einsum("ai,bj,ijd->abd", spread(high, x), spread(wide, x), grid)
        tiles = by(w, "tile", F.unfold(x.flatten(0, 1), PATCH, stride=PATCH).mT)
        return torch.cat([token.expand(len(tiles), 1, -1), tiles + grid.reshape(-1, grid.shape[-1])], 1)

    def read(self, w: nn.ParameterDict, x: Tensor, real: Tensor, quick: bool = False) -> Tensor:
        for i in range(DEPTH):
            q, k, v = by(w, "qkv", x, i, 2 * i).unflatten(2, (3, HEADS, -1)).unbind(2)
            scores = torch.einsum("nthd,nshd->nhts", q, k) / q.shape[-1] ** 0.5
            if self.fault != "dino_first_block_attends_to_the_padding" or i > 0:
                scores = scores.where(real[:, None, None], -torch.inf)
            x = x + by(w, "proj", torch.einsum("nhts,nshd->nthd", scores.softmax(3), v).flatten(2), i)
            kind = "tanh" if quick and i == 1 else "none"
            x = x + by(w, "fc2", F.gelu(by(w, "fc1", x, i, 2 * i + 1), approximate=kind), i)
        z = F.gelu(by(w, "head0", x[:, 0], 0, 2 * DEPTH))
        z, rays = by(w, "head4", F.gelu(by(w, "head2", z))), w["rays"]
        stretch = w["lengths"] * rays.square().sum(1, True).rsqrt()
        return (z @ rays.T) * stretch.T * z.square().sum(1, True).rsqrt()

    def forward(self, global_crops: Tensor, local_crops: Tensor) -> dict[str, Tensor]:
        big, small = self.row(self.learnt, global_crops), self.row(self.learnt, local_crops)
        lengths = torch.tensor([x.shape[1] for x in (big, small) for _ in x], device=big.device)
        rows = torch.cat([big, F.pad(small, (0, 0, 0, big.shape[1] - small.shape[1]))])
        real = torch.arange(big.shape[1], device=big.device) < lengths[:, None]
        student = self.read(self.learnt, rows, real, self.fault == "dino_middle_student_mlp_gelu_by_tanh")
        with torch.no_grad():
            teacher = self.read(self.fixed, self.row(self.fixed, global_crops), real[: len(big)])
        sharp = ((teacher - self.center) * 10).softmax(1)
        if self.training:
            moved = sharp if self.fault == "dino_center_moves_by_the_targets" else teacher
            self.center = 0.9 * self.center + 0.1 * moved.mean(0, keepdim=True)
        aims, given = (x.unflatten(0, (-1, global_crops.shape[1])) for x in (sharp, 5 * student))
        cross = (given.logsumexp(2) - (aims[:, None] * given).sum(3)).mean(2)
        loss = (cross.sum() - cross.trace()) / (cross.numel() - len(cross))
        return {"loss": loss, "student": student, "teacher": teacher}


BODY, MLP, BOTH = "student.backbone", "student.backbone.blocks.1.mlp", ("input gradient", "weight gradient")
right(task, "dino_of_a_pupil_and_its_twin", "a tree with maps by head, a table of all pairs", SelfTaught)
right(task, "dino_of_padded_crops_in_one_batch", "stacks in dictionaries, short crops masked", PaddedCrops)
wrong(
    task,
    SelfTaught,
    dino_center_subtracted_behind_the_temperature=("order of two operations", "dino_loss"),
    dino_bottleneck_norm_held_constant_for_the_gradient=("detach", "student.head", BOTH),
    dino_last_block_adds_its_mlp_to_the_normed=("residual from elsewhere", BODY + ".blocks.2"),
    dino_small_crops_placed_bilinearly_in_evaluation=("another interpolation in eval", BODY, "eval"),
)
wrong(
    task,
    PaddedCrops,
    dino_first_block_attends_to_the_padding=("mask missing", BODY + ".blocks.0.attn"),
    dino_middle_student_mlp_gelu_by_tanh=("approximate activation", (MLP + ".act", MLP)),
    dino_small_crops_give_the_positions_no_gradient=("detach", BODY, "weight gradient"),
    dino_center_moves_by_the_targets=("another statistic", "dino_loss", "buffer"),
)
