"""Ports of an Evoformer: one flat dict of weights, products fused, heads last."""

import torch
from torch import Tensor, nn

from bench.held_back._fifth_tables import layer_norm
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, wrong
from bench.held_back._seventh_triangles import HEADS, REACH, Folder, bins, families
from bench.held_back._sixth_ports import few

folder = few("seventh_folder", Folder, families, bins)


class Folding(Port):
    """One flat dict of weights, places first in attention; all five maps of a triangle in one product."""

    def take(self, model: Folder) -> None:
        self.w = nn.ParameterDict()
        for name, p in model.named_parameters():
            if not any(f".{part}." in name for part in ("a", "b", "a_gate", "b_gate", "gate")):
                self.w[name.replace(".", "_")] = leaf(p.T if "qkv" in name else p)
        for i, block in enumerate(model.blocks):
            self.join(f"rows{i}", block.rows.gate)
            self.join(f"outer{i}", block.outer.a, block.outer.b)
            for kind in ("outgoing", "incoming"):
                t = block.get_submodule(kind)
                self.join(f"{kind}{i}", t.a, t.b, t.a_gate, t.b_gate, t.gate)

    def join(self, name: str, *layers: nn.Linear) -> None:
        self.w[name] = leaf(torch.cat([layer.weight for layer in layers]).T)
        self.w[name + "_b"] = leaf(torch.cat([layer.bias for layer in layers]))

    def linear(self, at: str, x: Tensor) -> Tensor:
        return x @ self.w[at + "_weight"].T + self.w[at + "_bias"]

    def normed(self, at: str, x: Tensor) -> Tensor:
        return layer_norm(x, self.w[at + "_weight"], self.w[at + "_bias"])

    def rows(self, i: int, m: Tensor, z: Tensor) -> Tensor:
        at = f"blocks_{i}_rows"
        m = self.normed(at + "_norm", m)
        q, k, v = (m @ self.w[at + "_qkv_weight"]).unflatten(3, (3, HEADS, -1)).unbind(3)
        bias = self.normed(at + "_pair_norm", z) @ self.w[at + "_bias_weight"].T
        scores = torch.einsum("nsqhc,nskhc->nsqkh", q, k) * q.shape[-1] ** -0.5 + bias[:, None]
        mixed = torch.einsum("nsqkh,nskhc->nsqhc", scores.softmax(3), v).flatten(3)
        return self.linear(at + "_out", mixed * torch.sigmoid(m @ self.w[f"rows{i}"] + self.w[f"rows{i}_b"]))

    def outer(self, i: int, m: Tensor) -> Tensor:
        at = f"blocks_{i}_outer"
        ab = self.normed(at + "_norm", m) @ self.w[f"outer{i}"] + self.w[f"outer{i}_b"]
        a, b = ab.chunk(2, 3)
        if self.fault == "places_of_the_products_swapped" and i == 0:
            a, b = b, a
        products = torch.einsum("nsic,nsjd->nijcd", a, b / m.shape[1])
        return self.linear(at + "_out", products.flatten(3))

    def triangle(self, i: int, kind: str, z: Tensor) -> Tensor:
        at, key = f"blocks_{i}_{kind}", f"{kind}{i}"
        z = self.normed(at + "_norm", z)
        a, b, a_gate, b_gate, gate = (z @ self.w[key] + self.w[key + "_b"]).chunk(5, 3)
        a, b = (x.movedim(3, 1) for x in (a * a_gate.sigmoid(), b * b_gate.sigmoid()))
        out = kind == "outgoing" or (self.fault == "last_triangles_go_out_twice" and i == 1)
        sides = (a @ b.mT if out else a.mT @ b).movedim(1, 3)
        return gate.sigmoid() * self.linear(at + "_out", self.normed(at + "_mid", sides))

    def block(self, i: int, m: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        m = m + self.rows(i, m, z)
        at = f"blocks_{i}_feed_"
        m = m + self.linear(at + "3", self.linear(at + "1", self.normed(at + "0", m)).relu())
        z = z + self.outer(i, m)
        z = z + self.triangle(i, "outgoing", z)
        return m, z + self.triangle(i, "incoming", z)

    def forward(self, letters: Tensor) -> Tensor:
        m, first = self.w["letters_weight"][letters], letters[:, 0]
        steps = torch.arange(letters.shape[2], device=letters.device)
        far = steps - steps[:, None]
        far = -far if self.fault == "places_before_taken_for_after" else far
        z = self.w["apart_embed_weight"][far.clamp(-REACH, REACH) + REACH]
        z = self.w["left_weight"][first][:, :, None] + self.w["right_weight"][first][:, None] + z
        for i in range(2):
            m, z = self.block(i, m, z)
        z = self.normed("distances_norm", z)
        turned = z.transpose(1, 2)
        if self.fault == "one_side_of_a_pair_held":
            turned = turned.detach()
        return self.linear("distances_bins", z + turned)


right(folder, "folder_from_one_dict_of_weights", "fused products, heads last", Folding)
wrong(
    folder,
    Folding,
    places_before_taken_for_after=("a sign of an index", "apart"),
    places_of_the_products_swapped=("swapped operands", "blocks.0.outer"),
    last_triangles_go_out_twice=("another of two kinds", "blocks.1.incoming"),
    one_side_of_a_pair_held=("a detach too many", "distances", ("input gradient", "weight gradient")),
)
