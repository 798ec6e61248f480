"""Two ports of a masked autoencoder: a tree that picks pixels first, and stacks that never drop a patch."""

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _twentieth_masked_autoencoder as mae
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("twentieth_masked_autoencoder", mae.ViTMAEForPreTraining, mae.waves, mae.told_loss)
PATCH, LEFT = mae.PATCH, 1 - mae.MASK_RATIO
USES = {
    **{f"_{name[0]}": f"attention.attention.{name}" for name in ("query", "key", "value")},
    **{"_back": "attention.output.dense", "_rise": "intermediate.dense", "_fall": "output.dense"},
}


class Mixer(nn.Module):
    """Attention with one product for queries, keys and values; ``cut`` gives the keys no way back."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        old, self.back, self.cut = layer.attention.attention, deepcopy(layer.attention.output.dense), False
        self.heads, parts = old.num_attention_heads, (old.query, old.key, old.value)
        self.pack = leaf(torch.cat([part.weight for part in parts]))
        self.pack_b = leaf(torch.cat([part.bias for part in parts]))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.linear(x, self.pack, self.pack_b).chunk(3, 2)
        if self.cut:
            k = F.linear(x.detach(), self.pack.chunk(3)[1], self.pack_b.chunk(3)[1])
        q, k, v = (y.unflatten(2, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))
        return self.back(torch.cat(F.scaled_dot_product_attention(q, k, v).unbind(1), 2))


class Step(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.mix = nn.Sequential(deepcopy(layer.layernorm_before), Mixer(layer))
        before, after = [layer.layernorm_after, layer.intermediate.dense], layer.output.dense
        self.think = nn.Sequential(*map(deepcopy, before), nn.GELU(), deepcopy(after))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x)
        return x + self.think(x)


class PickedPixels(Port):
    """The pixels of the kept patches alone are embedded; the class token stands behind all others."""

    def take(self, model: mae.ViTMAEForPreTraining) -> None:
        old, told = model.vit.embeddings, model.decoder
        kernel = old.patch_embeddings.projection
        self.stamp, self.stamp_b = leaf(kernel.weight.permute(2, 3, 1, 0).flatten(0, 2)), leaf(kernel.bias)
        self.token, self.blank = leaf(old.cls_token[0]), leaf(told.mask_token[0])
        self.sites = leaf(old.position_embeddings[0]).requires_grad_(False)
        self.reader = nn.Sequential(*map(Step, model.vit.encoder.layer), deepcopy(model.vit.layernorm))
        self.bridge, self.brush = deepcopy(told.decoder_embed), deepcopy(told.decoder_pred)
        self.spots = leaf(told.decoder_pos_embed[0]).requires_grad_(False)
        self.teller = nn.Sequential(*map(Step, told.decoder_layers), deepcopy(told.decoder_norm))
        self.reader[1].mix[1].cut = self.fault == "masked_autoencoder_middle_keys_read_a_detached_state"
        if self.fault == "masked_autoencoder_first_layer_approximates_its_gelu":
            self.reader[0].think[2] = nn.GELU("tanh")

    def read(self, cells: Tensor, kept: Tensor) -> Tensor:
        """The states of the patches that are kept, by rising noise, then that of the class token."""
        sites = self.sites[1:][kept]
        if self.fault == "masked_autoencoder_kept_patches_take_the_first_positions":
            sites = self.sites[1 : kept.shape[1] + 1]
        seen = cells.gather(1, kept[:, :, None].expand(-1, -1, cells.shape[2])) @ self.stamp
        token = (self.token + self.sites[0]).expand(len(cells), 1, -1)
        return self.reader(torch.cat([seen + self.stamp_b + sites, token], 1))

    def tell(self, states: Tensor, kept: Tensor, gone: Tensor) -> Tensor:
        states, spots = self.bridge(states), self.spots[1:].expand(*gone.shape, -1)
        if self.fault == "masked_autoencoder_mask_tokens_get_no_positions":
            spots = spots * (1 - gone)[:, :, None]
        sheet = self.blank.expand_as(spots)
        sheet = sheet.scatter(1, kept[:, :, None].expand(-1, -1, sheet.shape[2]), states[:, :-1])
        sheet = torch.cat([sheet + spots, states[:, -1:] + self.spots[0]], 1)
        return self.brush(self.teller(sheet)[:, :-1])

    def forward(self, pixel_values: Tensor, noise: Tensor) -> dict[str, Tensor]:
        cells = F.unfold(pixel_values, PATCH, stride=PATCH).unflatten(1, (mae.CHANNELS, -1))
        cells = cells.permute(0, 3, 2, 1).flatten(2)
        kept = noise.topk(int(noise.shape[1] * LEFT), 1, largest=False).indices
        rank = (noise[:, :, None] > noise[:, None]).sum(2)
        gone = (rank >= kept.shape[1]).to(cells)
        logits = self.tell(self.read(cells, kept), kept, gone)
        centered = cells - cells.mean(2, keepdim=True)
        power = centered.square().sum(2, keepdim=True) / (cells.shape[2] - 1)
        missed = F.mse_loss(logits, centered / torch.sqrt(power + 1e-6), reduction="none").mean(2)
        every = self.fault == "masked_autoencoder_evaluation_scores_every_patch" and not self.training
        counted = torch.ones_like(gone) if every else gone
        loss = torch.sum(missed * counted / counted.sum())
        return {"loss": loss, "logits": logits, "mask": gone, "ids_restore": rank}


class HiddenPatches(Port):
    """All patches pass through the encoder, the removed unseen by any; weights of one use in one stack."""

    def take(self, model: mae.ViTMAEForPreTraining) -> None:
        old, told = model.vit.embeddings, model.decoder
        kernel = old.patch_embeddings.projection
        self.kernel, self.kernel_b = leaf(kernel.weight), leaf(kernel.bias)
        self.head, self.blank = leaf(old.cls_token), leaf(told.mask_token)
        grids = old.position_embeddings, told.decoder_pos_embed
        self.grids = nn.ParameterList(leaf(grid).requires_grad_(False) for grid in grids)
        self.cross, self.cross_b = leaf(told.decoder_embed.weight.T), leaf(told.decoder_embed.bias)
        self.paint, self.paint_b = leaf(told.decoder_pred.weight.T), leaf(told.decoder_pred.bias)
        self.w, self.heads = nn.ParameterDict(), {}
        self.stack("see", model.vit.encoder.layer, model.vit.layernorm)
        self.stack("tell", told.decoder_layers, told.decoder_norm)

    def stack(self, side: str, layers: nn.ModuleList, norm: nn.LayerNorm) -> None:
        self.heads[side] = layers[0].attention.attention.num_attention_heads
        for use, path in USES.items():
            parts = [layer.get_submodule(path) for layer in layers]
            self.w[side + use] = pile(part.weight.T for part in parts)
            self.w[side + use + "_b"] = pile(part.bias for part in parts)
        norms = [x for layer in layers for x in (layer.layernorm_before, layer.layernorm_after)]
        self.w[side + "_norms"] = pile(torch.stack([x.weight, x.bias]) for x in [*norms, norm])

    def by(self, use: str, i: int, x: Tensor) -> Tensor:
        return x @ self.w[use][i] + self.w[use + "_b"][i]

    def normed(self, side: str, i: int, x: Tensor) -> Tensor:
        spread, center = torch.var_mean(x, 2, correction=0, keepdim=True)
        gain, offset = self.w[side + "_norms"][i]
        return (x - center) * (spread + 1e-12).rsqrt() * gain + offset

    def layer(self, side: str, i: int, x: Tensor, unseen: Tensor) -> Tensor:
        y, heads = self.normed(side, 2 * i, x), self.heads[side]
        q, k, v = (self.by(side + use, i, y).unflatten(2, (heads, -1)) for use in ("_q", "_k", "_v"))
        size = q.shape[3]
        if self.fault == "masked_autoencoder_last_decoder_layer_scales_by_the_whole_width":
            size = x.shape[2] if (side, i) == ("tell", 1) else size
        scores = torch.einsum("nlhd,nmhd->nhlm", q / size**0.5, k)
        shares = scores.masked_fill(unseen[:, None, None], -torch.inf).softmax(3)
        x = x + self.by(side + "_back", i, torch.einsum("nhlm,nmhd->nlhd", shares, v).flatten(2))
        y = self.by(side + "_rise", i, self.normed(side, 2 * i + 1, x))
        return x + self.by(side + "_fall", i, 0.5 * y * (1 + torch.erf(y * 0.5**0.5)))

    def side(self, side: str, x: Tensor, unseen: Tensor) -> Tensor:
        count = len(self.w[side + "_q"])
        for i in range(count):
            x = self.layer(side, i, x, unseen)
        return self.normed(side, 2 * count, x)

    def forward(self, pixel_values: Tensor, noise: Tensor) -> dict[str, Tensor]:
        windows = pixel_values.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH)
        stopped = self.fault == "masked_autoencoder_patch_kernel_gets_no_gradient"
        kernel = self.kernel.detach() if stopped else self.kernel
        x = torch.einsum("nchwpq,dcpq->nhwd", windows, kernel).flatten(1, 2) + self.kernel_b
        order = noise.argsort(1)
        rank = torch.empty_like(order)
        rank.scatter_(1, order, torch.arange(order.shape[1], device=order.device).expand_as(order))
        away = rank >= int(order.shape[1] * LEFT)
        unseen = F.pad(away, (1, 0), value=False)
        x = self.side("see", torch.cat([self.head.expand(len(x), -1, -1), x], 1) + self.grids[0], unseen)
        x = torch.where(unseen[:, :, None], self.blank, x @ self.cross + self.cross_b) + self.grids[1]
        logits = self.side("tell", x, torch.zeros_like(unseen))[:, 1:] @ self.paint + self.paint_b
        goal = windows.permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(1, 2)
        biased = self.fault == "masked_autoencoder_pixels_normed_by_the_biased_variance"
        spread, center = torch.var_mean(goal, 2, correction=0 if biased else 1, keepdim=True)
        loss = (logits - (goal - center) * (spread + 1e-6).rsqrt())[away].square().mean()
        return {"loss": loss, "logits": logits, "mask": away.to(goal), "ids_restore": rank}


act, keys = "vit.encoder.layer.0.intermediate", "vit.encoder.layer.1.attention.attention"
patch, slopes = "vit.embeddings.patch_embeddings", ("input gradient", "weight gradient")
acts, scores = (act + ".intermediate_act_fn", act), "decoder.decoder_layers.1.attention.attention"
right(task, "masked_autoencoder_of_picked_pixels", "a tree, pixels picked before all else", PickedPixels)
right(task, "masked_autoencoder_of_hidden_patches", "stacks, patches hidden not dropped", HiddenPatches)
wrong(
    task,
    PickedPixels,
    masked_autoencoder_kept_patches_take_the_first_positions=("positions not picked", "vit.embeddings"),
    masked_autoencoder_first_layer_approximates_its_gelu=("an approximation", acts),
    masked_autoencoder_middle_keys_read_a_detached_state=("detach", (keys, keys + ".key"), slopes),
    masked_autoencoder_mask_tokens_get_no_positions=("positions left out", "decoder"),
    masked_autoencoder_evaluation_scores_every_patch=("a loss over too much in eval", "", "eval"),
)
wrong(
    task,
    HiddenPatches,
    masked_autoencoder_last_decoder_layer_scales_by_the_whole_width=("scale", scores),
    masked_autoencoder_patch_kernel_gets_no_gradient=("detach", (patch + ".projection", patch), slopes[1]),
    masked_autoencoder_pixels_normed_by_the_biased_variance=("variance not corrected", ""),
)
