"""Ports of a transformer of patches with a class token."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import case, method_of
from bench.held_back._fifth_patches import ViT, vit
from bench.held_back._fifth_vision import SAME, right, wrong_under
from bench.held_back._fourth_ports import Port, leaf, pile


class Piled(Port):
    """The ViT of [T, N, C], whose layers are the slices of piles of weights."""

    def take(self, model: ViT) -> None:
        kernel = model.patch.weight
        self.patch = leaf(kernel.permute(2, 3, 1, 0).flatten(0, 2))
        self.patch_bias = leaf(model.patch.bias)
        self.start, self.grid = leaf(model.token[0]), leaf(model.positions[0, 1:].unflatten(0, (3, 3)))
        self.start_place = leaf(model.positions[0, :1])
        blocks = [dict(block.named_parameters()) for block in model.blocks]
        piles = {name.replace(".", "_"): pile(block[name] for block in blocks) for name in blocks[0]}
        piles["attention_qkv_weight"] = leaf(piles["attention_qkv_weight"].unflatten(1, (3, 3, 8)))
        piles["attention_qkv_bias"] = leaf(piles["attention_qkv_bias"].unflatten(1, (3, 3, 8)))
        self.layers = nn.ParameterDict(piles)
        self.last = nn.ParameterList(leaf(p) for p in (*model.norm.parameters(), *model.head.parameters()))

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight + bias

    def attend(self, x: Tensor, w: dict[str, Tensor], scale: float) -> Tensor:
        qkv = torch.einsum("tnc,phdc->pnhtd", x, w["attention_qkv_weight"])
        q, k, v = qkv + w["attention_qkv_bias"][:, None, :, None]
        weights = torch.einsum("nhtd,nhsd->nhts", q * scale, k).softmax(-1)
        mixed = torch.einsum("nhts,nhsd->tnhd", weights, v).flatten(2)
        return mixed @ w["attention_out_weight"].T + w["attention_out_bias"]

    def patches(self, image: Tensor) -> Tensor:
        """[N, 3, 12, 12] -> [9, N, C]."""
        pieces = image.unflatten(3, (3, 4)).unflatten(2, (3, 4))
        return pieces.permute(2, 4, 0, 3, 5, 1).flatten(3).flatten(0, 1) @ self.patch + self.patch_bias

    def forward(self, image: Tensor) -> Tensor:
        patches = self.patches(image) + self.grid.flatten(0, 1)[:, None]
        start = self.start if self.fault == "class_token_without_its_place" else self.start + self.start_place
        x = torch.cat([start[:, None].expand(-1, len(image), -1), patches])
        for layer in range(3):
            w = {name: weight[layer] for name, weight in self.layers.items()}
            wide = self.fault == "scores_scaled_by_the_whole_width" and layer == 1
            quick = self.fault == "last_gelu_by_sigmoid" and layer == 2
            y = self.norm(x, w["norm1_weight"], w["norm1_bias"])
            x = x + self.attend(y, w, (24 if wide else 8) ** -0.5)
            y = self.norm(x, w["norm2_weight"], w["norm2_bias"]) @ w["mlp_0_weight"].T + w["mlp_0_bias"]
            y = y * (1.702 * y).sigmoid() if quick else F.gelu(y)
            x = x + y @ w["mlp_2_weight"].T + w["mlp_2_bias"]
        gain, offset, head, bias = self.last
        return self.norm(x[0], gain, offset) @ head.T + bias


def decayed_all(params) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=2e-3, weight_decay=0.1)


def decayed(params) -> torch.optim.Optimizer:
    """Decay for what has two axes or more."""
    params = list(params)
    groups = [p for p in params if p.ndim > 1], [p for p in params if p.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.3}, {"params": groups[1], "weight_decay": 0.0}], lr=2e-3
    )


def decayed_by_layer(model: nn.Module) -> torch.optim.Optimizer:
    """Decay for the weights of linear layers and convolutions."""
    kinds = nn.Linear, nn.Conv2d
    heavy = {id(module.weight) for module in model.modules() if isinstance(module, kinds)}
    groups = {decay: [] for decay in (0.3, 0.0)}
    for p in model.parameters():
        groups[0.3 if id(p) in heavy else 0.0].append(p)
    return torch.optim.AdamW(
        [{"params": params, "weight_decay": decay} for decay, params in groups.items()], lr=2e-3
    )


GENTLE = {"optimizer": lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9)}

right(vit, "layers_piled_and_time_first", "port to piles of weights", Piled, **GENTLE)
right(vit, "layers_piled_and_decayed", "port under another optimizer", Piled, optimizer=decayed_all)
wrong_under(
    GENTLE,
    vit,
    Piled,
    class_token_without_its_place=("a term missing", ""),
    scores_scaled_by_the_whole_width=("wrong scale", "blocks.1.attention"),
    last_gelu_by_sigmoid=("another form of gelu", "blocks.2.mlp.1"),
)


@case(
    "bug",
    "weights in the wrong group of the optimizer",
    vit,
    module="",
    passes="update",
    optimizer=decayed,
    candidate_optimizer=decayed_by_layer,
)
def token_and_places_not_decayed(model: nn.Module) -> nn.Module:
    return model


@method_of("blocks.2", SAME, "only what is read is computed", vit, **GENTLE)
def last_block_for_the_class_token(self, x: Tensor) -> Tensor:
    attention, first = self.attention, x[:, :1]
    normed = self.norm1(x)
    weight, bias = (p.unflatten(0, (3, -1)) for p in (attention.qkv.weight, attention.qkv.bias))
    q = F.linear(normed[:, :1], weight[0], bias[0])
    k, v = (F.linear(normed, weight[i], bias[i]) for i in (1, 2))
    q, k, v = (part.unflatten(2, (attention.heads, -1)).transpose(1, 2) for part in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    first = first + attention.out(mixed)
    return first + self.mlp(self.norm2(first))


@method_of("blocks.1.attention", "reduced_precision", "attention in half the bits", vit, **GENTLE)
def attention_weights_in_bfloat16(self, x: Tensor) -> Tensor:
    q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
    weights = self.scores(q.bfloat16(), k.bfloat16()).softmax(3)
    return self.out((weights @ v.bfloat16()).to(x.dtype).transpose(1, 2).flatten(2))
