"""CLIP as transformers names it against OpenAI's; adapters as peft has them against fused and merged ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import case
from bench.cases._rewritten import SAME
from bench.optimizers import sgd
from bench.ported._text import dense, kept, merge, split, stacked
from bench.ported._text_towers import HEADS, LENGTH, WIDTH, clip, lora


class ResidualAttentionBlock(nn.Module):
    """On [T, N, D]."""

    def __init__(self, layer: nn.Module, exact: bool):
        super().__init__()
        own, self.exact = layer.self_attn, exact
        self.attn = nn.MultiheadAttention(WIDTH, HEADS)
        joint = stacked(own.q_proj, own.k_proj, own.v_proj)
        self.attn.in_proj_weight, self.attn.in_proj_bias = joint.weight, joint.bias
        self.attn.out_proj.weight, self.attn.out_proj.bias = (
            kept(own.out_proj.weight),
            kept(own.out_proj.bias),
        )
        self.ln_1, self.ln_2 = layer.layer_norm1, layer.layer_norm2
        self.c_fc, self.c_proj = layer.mlp.fc1, layer.mlp.fc2

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.ln_1(x)
        x = x + self.attn(h, h, h, need_weights=False, attn_mask=mask)[0]
        h = self.c_fc(self.ln_2(x))
        return x + self.c_proj(F.gelu(h) if self.exact else h * torch.sigmoid(1.702 * h))


class OpenAIClip(nn.Module):
    def __init__(self, model: nn.Module, exact: bool = False):
        super().__init__()
        text, vision = model.text_model, model.vision_model
        self.conv1, self.class_embedding = vision.patch_embedding, kept(vision.class_embedding)
        self.positional_embedding = kept(vision.position_embedding.weight)
        self.ln_pre, self.ln_post, self.proj = (
            vision.pre_layrnorm,
            vision.post_layernorm,
            kept(model.visual_projection.weight.T),
        )
        self.visual = nn.ModuleList(ResidualAttentionBlock(layer, exact) for layer in vision.layers)
        self.token, self.text_positions = (
            kept(text.token_embedding.weight),
            kept(text.position_embedding.weight),
        )
        self.resblocks = nn.ModuleList(ResidualAttentionBlock(layer, exact) for layer in text.layers)
        self.ln_final, self.text_proj = text.final_layer_norm, kept(model.text_projection.weight.T)
        self.temperature = kept(model.logit_scale)

    def encode_image(self, image: Tensor) -> Tensor:
        x = self.conv1(image).flatten(2).permute(2, 0, 1)
        x = (
            torch.cat([self.class_embedding.expand(1, x.shape[1], -1), x])
            + self.positional_embedding[:, None]
        )
        x = self.ln_pre(x)
        for block in self.visual:
            x = block(x)
        return self.ln_post(x[0]) @ self.proj

    def encode_text(self, text: Tensor) -> Tensor:
        x = (F.embedding(text, self.token) + self.text_positions[:LENGTH]).transpose(0, 1)
        mask = torch.full((LENGTH, LENGTH), float("-inf"), dtype=x.dtype, device=x.device).triu(1)
        for block in self.resblocks:
            x = block(x, mask)
        end = text.argmax(-1)
        return self.ln_final(x)[end, torch.arange(len(end), device=end.device)] @ self.text_proj

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> dict[str, Tensor]:
        image, text = self.encode_image(pixel_values), self.encode_text(input_ids)
        image, text = F.normalize(image, dim=1), F.normalize(text, dim=1)
        per_image = self.temperature.exp() * image @ text.t()
        return {"logits_per_image": per_image, "logits_per_text": per_image.t()}


@case(SAME, "two towers, torch's attention", clip, optimizer=sgd(0.02))
def clip_as_openai_writes_it(model: nn.Module) -> nn.Module:
    return OpenAIClip(model)


LAYERS = tuple(f"{tower}_model.layers.{i}" for tower in ("text", "vision") for i in (0, 1))
MLPS = tuple(f"{layer}.mlp{part}" for layer in LAYERS for part in ("", ".activation_fn"))


@case(
    "bug",
    "gelu variant",
    clip,
    module=(*LAYERS, *MLPS),
    optimizer=sgd(0.02),
)
def clip_with_the_exact_gelu(model: nn.Module, wrong: bool = True) -> nn.Module:
    """The port's blocks take the exact GELU; OpenAI's weights were trained with x * sigmoid(1.702 x)."""
    return OpenAIClip(model, exact=wrong)


class MergedLinear(nn.Module):
    """loralib's: q, k and v in one frozen layer, beside which q and v have adapters in one stack."""

    def __init__(self, block: nn.Module, merges: bool, root: bool, thaws: bool):
        super().__init__()
        adapted = (block.q_proj, block.v_proj)
        joint = stacked(block.q_proj.base_layer, block.k_proj, block.v_proj.base_layer)
        self.frozen = joint.requires_grad_(thaws)
        self.down = kept(torch.cat([layer.lora_A.weight for layer in adapted]))
        self.up, self.merges = kept(torch.stack([layer.lora_B.weight for layer in adapted])), merges
        self.scale = 8 / 3**0.5 if root else 8 / 3

    def forward(self, x: Tensor) -> Tensor:
        down = self.down.unflatten(0, (2, -1))
        if self.merges:
            q, v = self.up @ down * self.scale
            return F.linear(x, self.frozen.weight + torch.cat([q, torch.zeros_like(q), v]), self.frozen.bias)
        q, v = torch.einsum("ntd,crd,cor->cnto", x, down, self.up) * self.scale
        return self.frozen(x) + torch.cat([q, torch.zeros_like(q), v], -1)


class AdaptedBlock(nn.Module):
    def __init__(self, block: nn.Module, **settings: bool):
        super().__init__()
        self.qkv = MergedLinear(block, **settings)
        self.rest = nn.ModuleList([block.ln_attn, block.o_proj, block.ln_mlp, block.fc1, block.fc2])

    def forward(self, x: Tensor) -> Tensor:
        before, out, between, wide, narrow = self.rest
        q, k, v = (split(part, HEADS) for part in self.qkv(before(x)).chunk(3, -1))
        x = x + out(merge(F.scaled_dot_product_attention(q, k, v)))
        return x + narrow(F.gelu(wide(between(x))))


class Adapted(nn.Module):
    def __init__(self, model: nn.Module, merges: bool = False, root: bool = False, thaws: bool = False):
        super().__init__()
        self.table, self.head = model.embed, dense(model.score.weight, model.score.bias)
        settings = {"merges": merges, "root": root, "thaws": thaws}
        self.trunk = nn.Sequential(*(AdaptedBlock(block, **settings) for block in model.blocks))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.trunk(self.table(input_ids)).mean(1))


@case(SAME, "adapters beside a fused layer", lora, optimizer=sgd(0.02))
def lora_beside_a_fused_layer(model: nn.Module) -> nn.Module:
    return Adapted(model)


@case(SAME, "adapters added to the weights", lora, optimizer=sgd(0.02))
def lora_added_to_the_weights(model: nn.Module) -> nn.Module:
    return Adapted(model, merges=True)


ADAPTED = tuple(f"blocks.{i}.{part}" for i in (0, 1) for part in ("q_proj", "v_proj"))
FROZEN = tuple(
    f"blocks.{i}.{part}" for i in (0, 1) for part in ("q_proj.base_layer", "v_proj.base_layer", "k_proj")
)


@case("bug", "scale", lora, module=(*ADAPTED, "blocks.0", "blocks.1"), optimizer=sgd(0.02))
def lora_scaled_by_the_root_of_the_rank(model: nn.Module, wrong: bool = True) -> nn.Module:
    """The adapters are scaled by alpha over the root of the rank, as in rsLoRA, not over the rank."""
    return Adapted(model, root=wrong)


@case(
    "bug",
    "frozen weights",
    lora,
    module=(*ADAPTED, *FROZEN, "blocks.0", "blocks.1"),
    passes=("weight gradient", "update"),
    optimizer=sgd(0.02),
)
def lora_fused_layer_no_longer_frozen(model: nn.Module, wrong: bool = True) -> nn.Module:
    """The fused layer is made anew, and its weights, which were frozen, learn."""
    return Adapted(model, thaws=wrong)
