"""Ports of a small perceiver: latents first, sines alone, fused keys and values, masks as factors."""

import torch
from torch import Tensor, nn

from bench.held_back._eighth_perceiver import (
    BANDS,
    FIELDS,
    HEADS,
    LAYERS,
    ROUNDS,
    WIDTH,
    Attention,
    Perceiver,
    fields,
    missed,
)
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, wrong
from bench.held_back._sixth_ports import few

perceiver = few("eighth_perceiver", Perceiver, fields, missed)
SIZE = WIDTH // HEADS
# the port's order of what is known of a place: of x, then of y, itself, then sine and cosine of each band
ORDER = [
    [4 * BANDS + i, *(k for j in range(BANDS) for k in (i * BANDS + j, (2 + i) * BANDS + j))] for i in (0, 1)
]
ORDER = ORDER[0] + ORDER[1]
POINTS = [*range(FIELDS), *(FIELDS + i for i in ORDER)]


def attention_weights(of: Attention, columns: list[int] | None = None) -> dict[str, Tensor]:
    """Queries apart, keys and values in one; heads before what they are of."""
    kv = torch.stack([each.weight.unflatten(0, (HEADS, SIZE)) for each in (of.k, of.v)])
    kv = kv if columns is None else kv[..., columns]
    return {"q": of.q.weight.unflatten(0, (HEADS, SIZE)), "kv": kv, "o": of.out.weight.T, "ob": of.out.bias}


class LatentsFirst(Port):
    """Latents [L, N, C], points [T, N, C] and queries [Q, N, C]; one dictionary of weights."""

    def take(self, model: Perceiver) -> None:
        self.register_buffer("middle", model.whiten.mean.clone())
        self.register_buffer("width", model.whiten.var.clone())
        self.seed, self.w = leaf(model.latents[:, None]), nn.ParameterDict()
        read, answer = model.read, model.answer
        self.keep("read", attention_weights(read.attention, POINTS))
        points = read.norm_points
        self.keep("read", {"points": torch.stack([points.weight[POINTS], points.bias[POINTS]])})
        self.keep("answer", attention_weights(answer.attention))
        self.keep("answer", {"lift": answer.lift.weight[:, ORDER].T, "lift_b": answer.lift.bias})
        self.keep("answer", {"head": answer.head.weight.T, "head_b": answer.head.bias})
        norms = {
            "read": (read.norm_latents, read.norm),
            "answer": (answer.norm_queries, answer.norm_latents, answer.norm),
        }
        mlps = {"read": read.mlp, "answer": answer.mlp}
        for i, layer in enumerate(model.layers):
            self.keep(f"think{i}", attention_weights(layer.attention))
            norms[f"think{i}"], mlps[f"think{i}"] = (layer.norm1, layer.norm2), layer.mlp
        for part, mlp in mlps.items():
            for j, norm in enumerate(norms[part]):
                self.keep(part, {f"norm{j}": torch.stack([norm.weight, norm.bias])})
            self.keep(part, {"up": mlp.up.weight.T, "up_b": mlp.up.bias})
            self.keep(part, {"down": mlp.down.weight.T, "down_b": mlp.down.bias})
        self.kind, self.kind_b = leaf(model.probe.fc.weight.T), leaf(model.probe.fc.bias)

    def keep(self, part: str, weights: dict[str, Tensor]) -> None:
        self.w.update({f"{part}_{name}": leaf(weight) for name, weight in weights.items()})

    def level(self, name: str, x: Tensor) -> Tensor:
        """The layer norm of that name."""
        tiny = 1e-5
        if self.fault == "points_normed_with_the_epsilon_of_keras" and name == "read_points":
            tiny = 1e-3
        spread, center = torch.var_mean(x, -1, correction=0, keepdim=True)
        gain, offset = self.w[name]
        return torch.addcmul(offset, (x - center) / (spread + tiny).sqrt(), gain)

    def attend(self, part: str, x: Tensor, of: Tensor, real: Tensor | None = None) -> Tensor:
        w = self.w
        q = torch.einsum("lnc,hdc->hnld", x, w[part + "_q"])
        k, v = torch.einsum("tnc,ghdc->ghntd", of, w[part + "_kv"])
        if self.fault == "values_of_the_first_layer_split_with_heads_last" and part == "think0":
            v = v.permute(1, 2, 0, 3).flatten(2).unflatten(2, (SIZE, HEADS)).permute(3, 0, 1, 2)
        odds = (torch.einsum("hnld,hntd->hnlt", q, k) * SIZE**-0.5).exp()
        if real is not None:
            odds = odds * real.T[:, None]
        found = torch.einsum("hnlt,hntd->lnhd", odds / odds.sum(3, keepdim=True), v)
        return found.flatten(2) @ w[part + "_o"] + w[part + "_ob"]

    def bend(self, part: str, x: Tensor) -> Tensor:
        """The two linear layers with a GELU between."""
        h = x @ self.w[part + "_up"] + self.w[part + "_up_b"]
        h = h * (1 + (h * 0.5**0.5).erf()) / 2
        return h @ self.w[part + "_down"] + self.w[part + "_down_b"]

    def waves(self, places: Tensor) -> Tensor:
        """Places [T, N, 2] -> for x, then for y: itself, and a sine and a cosine of each frequency."""
        steps = torch.arange(BANDS, device=places.device)
        rates = 2.0**steps if self.fault == "frequencies_doubled_in_place_of_equal_steps" else 1 + 1.5 * steps
        phases = torch.tensor([0, torch.pi / 2], dtype=places.dtype, device=places.device)
        angles = (places * torch.pi)[..., None, None] * rates.to(places)[:, None] + phases
        return torch.cat([places[..., None], angles.sin().flatten(3)], 3).flatten(2)

    def whitened(self, values: Tensor, real: Tensor) -> Tensor:
        middle, width = self.middle, self.width
        if self.training or self.fault == "points_whitened_by_themselves_in_eval":
            share = (real.to(values) / real.sum())[..., None]
            middle = (share * values).sum((0, 1))
            width = (share * (values - middle).square()).sum((0, 1))
        if self.training:
            with torch.no_grad():
                self.middle.mul_(0.9).add_(middle, alpha=0.1)
                self.width.mul_(0.9).add_(width, alpha=0.1)
        return (values - middle) * (width + 1e-5).rsqrt()

    def think(self, i: int, x: Tensor) -> Tensor:
        part = f"think{i}"
        normed = self.level(part + "_norm0", x)
        start = normed if self.fault == "second_layer_adds_to_what_is_normed" and i == 1 else x
        x = start + self.attend(part, normed, normed)
        return x + self.bend(part, self.level(part + "_norm1", x))

    def forward(
        self, values: Tensor, places: Tensor, lengths: Tensor, asked: Tensor
    ) -> tuple[Tensor, Tensor]:
        values, places, asked = (given.transpose(0, 1) for given in (values, places, asked))
        real = lengths > torch.arange(len(values), device=values.device)[:, None]
        points = torch.cat([self.whitened(values, real), self.waves(places)], 2)
        points = self.level("read_points", points)
        x = self.seed.repeat(1, len(lengths), 1)
        for _ in range(ROUNDS):
            x = x + self.attend("read", self.level("read_norm0", x), points, real)
            x = x + self.bend("read", self.level("read_norm1", x))
            for i in range(LAYERS):
                x = self.think(i, x)
        w = self.w
        asking = self.level("answer_norm0", self.waves(asked) @ w["answer_lift"] + w["answer_lift_b"])
        y = self.attend("answer", asking, self.level("answer_norm1", x))
        y = y + self.bend("answer", self.level("answer_norm2", y))
        seen = x if self.fault == "probe_pulls_at_the_latents" else x.detach()
        kinds = seen.sum(0) / len(seen) @ self.kind + self.kind_b
        return (y @ w["answer_head"] + w["answer_head_b"]).transpose(0, 1), kinds


right(
    perceiver,
    "perceiver_with_latents_first",
    "other axes, fused keys and values, features in order",
    LatentsFirst,
)
wrong(
    perceiver,
    LatentsFirst,
    frequencies_doubled_in_place_of_equal_steps=("other frequencies", "fourier"),
    points_normed_with_the_epsilon_of_keras=("epsilon", "read.norm_points"),
    values_of_the_first_layer_split_with_heads_last=("wrong order of channels", "layers.0.attention"),
    second_layer_adds_to_what_is_normed=("residual taken at another point", "layers.1"),
    probe_pulls_at_the_latents=("a detach too few", "probe", ("input gradient", "weight gradient")),
    points_whitened_by_themselves_in_eval=("wrong in eval mode alone", "whiten", "eval"),
)
