"""Two ports of a small MaskGIT: a tree with the channels last, and one class of stacked weights."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _thirty_seventh_mask_git as ref
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, spatial, wrong
from bench.held_back._sixth_ports import few

task = few("thirty_seventh_mask_git", ref.MaskGIT, ref.blobs, ref.tokens_and_pixels)
CODES, HEADS, HIDDEN, MASK, TOKENS = ref.CODES, ref.HEADS, ref.HIDDEN, ref.MASK, ref.TOKENS


class Fold(nn.Module):
    def __init__(self, conv: nn.Conv2d, norm: nn.GroupNorm | None = None):
        super().__init__()
        self.kernel, self.shift = leaf(conv.weight), None if conv.bias is None else leaf(conv.bias)
        self.rows, self.groups = norm and pile([norm.weight, norm.bias]), 4

    def forward(self, x: Tensor) -> Tensor:
        if self.rows is not None:
            y = x.unflatten(3, (self.groups, -1))
            spread, middle = torch.var_mean(y, (1, 2, 4), correction=0, keepdim=True)
            y = ((y - middle) / (spread + 1e-5).sqrt()).flatten(3) * self.rows[0] + self.rows[1]
            x = y * y.sigmoid()
        return spatial(x, self.kernel, self.shift)


class Wide(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        self.branch = nn.Sequential(Fold(block.conv1, block.norm1), Fold(block.conv2, block.norm2))
        self.around = Fold(block.shortcut) if hasattr(block.shortcut, "weight") else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.around(x) + self.branch(x)


class Mixer(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        three = block.query, block.key, block.value
        self.qkv, self.b = (leaf(torch.cat([getattr(f, n) for f in three])) for n in ("weight", "bias"))
        self.back, self.c = leaf(block.attention_output.weight), leaf(block.attention_output.bias)
        self.size = HIDDEN // HEADS

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.linear(x, self.qkv, self.b).unflatten(2, (3, HEADS, -1)).unbind(2)
        near = torch.einsum("nihd,njhd->nhij", q * self.size**-0.5, k).softmax(-1)
        return F.linear(torch.einsum("nhij,njhd->nihd", near, v).flatten(2), self.back, self.c)


class MaskedTree(Port):
    """A line of layers to the codes, one back to pixels, and one of branches around which goes the input."""

    def take(self, model: ref.MaskGIT) -> None:
        coder, net, back = model.tokenizer.encoder, model.transformer, model.tokenizer.decoder
        last = Fold(coder.conv_out, coder.norm_out)
        self.seen = nn.ModuleList([Fold(coder.conv_in), *map(Wide, coder.blocks), last])
        self.codes = leaf(model.tokenizer.quantizer.codebook)
        self.drawn = nn.ModuleList([Fold(back.conv_in), Fold(back.conv_out)])
        words = net.embed.word_embeddings.weight
        self.names, self.others = leaf(words[:CODES]), leaf(words[CODES:])
        self.places, self.first = leaf(net.embed.position_embeddings.weight), net.embed.embeddings_ln
        self.line = nn.ModuleList()
        for m in net.layers:
            fed = nn.Sequential(m.mlp.intermediate_output, nn.GELU(), m.mlp.layer_output)
            self.line += [Mixer(m.attention), m.attention.attention_output_ln, fed, m.mlp.layer_output_ln]
        self.last = nn.Sequential(net.mlm_layer.mlm_dense, nn.GELU(), net.mlm_layer.mlm_ln)
        self.often = leaf(net.mlm_layer.mlm_bias)
        if self.fault == "mask_git_first_block_second_norm_of_two_groups":
            self.seen[1].branch[1].groups = 2
        if self.fault == "mask_git_second_attention_scaled_by_the_whole_width":
            self.line[4].size = HIDDEN

    def forward(self, x: Tensor, label: Tensor, drop: Tensor, time: Tensor, order: Tensor) -> tuple:
        y = x.movedim(1, 3)
        for i, layer in enumerate(self.seen):
            y = layer(y)
            if i in (1, 2):
                y = y.unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).mean((2, 4))
        ids = (self.codes.square().sum(1) / 2 - y @ self.codes.T).argmin(-1)
        found = F.embedding(ids, self.codes)
        pulled = found if self.fault == "mask_git_commitment_pulls_the_codes_too" else found.detach()
        vq_loss = ref.COMMITMENT * (y - pulled).square().mean() + (found - y.detach()).square().mean()
        near, ids = found.detach() + y - y.detach(), ids.flatten(1)
        near = F.silu(self.drawn[0](near)).repeat_interleave(4, 1).repeat_interleave(4, 2)
        count = (TOKENS * (time.to(x.dtype) * (math.pi / 2 / ref.TIMES)).cos()).ceil().clamp(min=1)
        hidden = order < count.unsqueeze(1)
        about = (CODES + label).masked_fill(drop, ref.EMPTY)
        tokens = torch.cat([about[:, None], ids.masked_fill(hidden, MASK)], 1)
        words = F.embedding(tokens, torch.cat([self.names, self.others]))
        y = self.first(words + self.places)
        for branch, norm in zip(self.line[::2], self.line[1::2], strict=True):
            y = norm(y + branch(y))
        logits = F.linear(self.last(y)[:, 1:], self.names, self.often)
        token_loss = F.cross_entropy(logits[hidden], ids[hidden], label_smoothing=ref.SMOOTHING)
        chance = logits.softmax(-1)
        known = sure = chance.gather(2, ids[..., None])[..., 0]
        if not self.training:
            bare = self.fault == "mask_git_known_tokens_less_than_sure_in_evaluation"
            sure = torch.where(hidden, chance.amax(-1), known if bare else 1.0)
        return self.drawn[1](near).movedim(3, 1), logits, sure, token_loss, vq_loss


def glued(layer: nn.Linear) -> Tensor:
    return torch.cat([layer.weight, layer.bias[:, None]], 1)


def flat(x: Tensor, w: Tensor) -> Tensor:
    return x @ w[:, :-1].T + w[:, -1]


class MaskedStacks(Port):
    """Stacks by layer whose last column is the bias, and lists of kernels and of rows of norms."""

    def take(self, model: ref.MaskGIT) -> None:
        coder, back, net = model.tokenizer.encoder, model.tokenizer.decoder, model.transformer
        convs = [m for m in (*coder.modules(), *back.modules()) if isinstance(m, nn.Conv2d)]
        self.k = nn.ParameterList(leaf(m.weight) for m in convs)
        self.b = nn.ParameterList(leaf(m.bias) for m in convs if m.bias is not None)
        self.g = nn.ParameterList(pile(m.parameters()) for m in coder.modules() if type(m) is nn.GroupNorm)
        self.codes, self.often = leaf(model.tokenizer.quantizer.codebook.T), leaf(net.mlm_layer.mlm_bias)
        e, end, layers = net.embed, net.mlm_layer, [(x.attention, x.mlp) for x in net.layers]
        squares = [glued(f) for m, _ in layers for f in (m.query, m.key, m.value, m.attention_output)]
        self.squares = pile([*squares, glued(end.mlm_dense)])
        feeds = [[glued(m.intermediate_output), glued(m.layer_output)] for _, m in layers]
        self.up, self.down = map(pile, zip(*feeds, strict=True))
        pairs = [y for a, m in layers for y in (a.attention_output_ln, m.layer_output_ln)]
        self.ln = pile(torch.stack([m.weight, m.bias]) for m in (e.embeddings_ln, *pairs, end.mlm_ln))
        self.table = leaf(torch.cat([e.word_embeddings.weight, e.position_embeddings.weight]))

    def block(self, x: Tensor, g: int, k: int) -> Tensor:
        for i in (0, 1):
            x = F.conv2d(F.silu(F.group_norm(x, 4, *self.g[g + i])), self.k[k + i], padding=1)
        return x

    def forward(self, x: Tensor, label: Tensor, drop: Tensor, time: Tensor, order: Tensor) -> tuple:
        fault, k = self.fault, self.k
        y = F.conv2d(x, k[0], padding=1)
        y = F.avg_pool2d(y + self.block(y, 0, 1), 2)
        y = F.avg_pool2d(F.conv2d(y, k[5]) + self.block(y, 2, 3), 2)
        y = F.silu(F.group_norm(y + self.block(y, 4, 6), 4, *self.g[6]))
        z = F.conv2d(y, k[8], self.b[0])
        ids = (z[:, :, None] - self.codes[:, :, None, None]).square().sum(1).argmin(1)
        found = self.codes[:, ids].transpose(0, 1)
        vq_loss = (ref.COMMITMENT * (z - found.detach()) ** 2 + (found - z.detach()) ** 2).mean()
        y = F.silu(F.conv2d(z + (found - z).detach(), k[9], self.b[1], padding=1))
        image = F.conv2d(F.interpolate(y, scale_factor=4), k[10], self.b[2], padding=1)
        ids, angle = ids.flatten(1), math.pi * time.to(x.dtype) / (2 * ref.TIMES)
        mask = order < (angle.cos() * TOKENS).ceil().clamp(min=1)[:, None]
        cls = torch.where(drop, ref.EMPTY, label + CODES)[:, None]
        places = self.table[MASK + 1 :]
        if fault == "mask_git_class_token_takes_the_last_position":
            places = places.roll(1, 0)
        h = self.table[torch.cat([cls, ids.where(~mask, MASK)], 1)] + places
        h = F.layer_norm(h, (HIDDEN,), *self.ln[0])
        for i in range(ref.LAYERS):
            w = self.squares[4 * i : 4 * i + 4]
            q, key, v = (flat(h, m).unflatten(2, (HEADS, -1)).transpose(1, 2) for m in w[:3])
            mixed = F.scaled_dot_product_attention(q, key, v).transpose(1, 2).flatten(2)
            h = F.layer_norm(h + flat(mixed, w[3]), (HIDDEN,), *self.ln[2 * i + 1])
            rough = "tanh" if fault == "mask_git_last_mlp_gelu_by_tanh" and i == 2 else "none"
            y = F.gelu(flat(h, self.up[i]), approximate=rough)
            h = F.layer_norm(h + flat(y, self.down[i]), (HIDDEN,), *self.ln[2 * i + 2])
        h, tied = F.gelu(flat(h[:, 1:], self.squares[-1])), self.table[:CODES]
        if fault == "mask_git_tied_head_detached":
            tied = tied.detach()
        logits = F.layer_norm(h, (HIDDEN,), *self.ln[-1]) @ tied.T + self.often
        log = logits.log_softmax(2)
        hit, total, each, s = log.gather(2, ids[..., None])[..., 0], log.sum(2), CODES, ref.SMOOTHING
        if fault == "mask_git_smoothing_over_the_other_codes_only":
            each, total = CODES - 1, total - hit
        token_loss = -((1 - s) * hit + s / each * total)[mask].mean()
        sure = hit.exp() if self.training else torch.where(mask, log.amax(2).exp(), 1.0)
        return image, logits, sure, token_loss, vq_loss


right(task, "mask_git_of_branches_with_channels_last", "a tree, fused projections", MaskedTree)
right(task, "mask_git_of_stacked_weights", "packed stacks, flat code", MaskedStacks)
wrong(
    task,
    MaskedTree,
    mask_git_first_block_second_norm_of_two_groups=("other groups", "tokenizer.encoder.blocks.0.norm2"),
    mask_git_commitment_pulls_the_codes_too=("no detach", "tokenizer.quantizer", "weight gradient"),
    mask_git_second_attention_scaled_by_the_whole_width=("another scale", "transformer.layers.1.attention"),
    mask_git_known_tokens_less_than_sure_in_evaluation=("a mask left out in eval", "", "eval"),
)
wrong(
    task,
    MaskedStacks,
    mask_git_class_token_takes_the_last_position=("positions shifted", "transformer.embed"),
    mask_git_last_mlp_gelu_by_tanh=("another gelu", "transformer.layers.2.mlp"),
    mask_git_tied_head_detached=("detach", ("transformer.mlm_layer", "transformer"), "weight gradient"),
    mask_git_smoothing_over_the_other_codes_only=("a count off by one", ""),
)
