"""Two ports of a Flamingo: one kind of attention in an album and its verses, and stacks without layers."""

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twelfth_flamingo import MEDIA, Flamingo, captions, next_word

task = few("twelfth_flamingo", Flamingo, captions, next_word)


class Attend(nn.Module):
    def __init__(self, heads: int, weights: list[Tensor], out: nn.Linear, norms: tuple = ()):
        super().__init__()
        self.heads, self.scale, self.inner, self.parts = heads, (len(weights[0]) // heads) ** -0.5, 1.0, 1
        self.q, self.k, self.v, self.out = (leaf(weight.T) for weight in [*weights, out.weight])
        self.gains, self.cut = pile(x.weight for x in norms) if norms else None, False

    def forward(self, asking: Tensor, shown: Tensor, bias: Tensor | None = None) -> Tensor:
        q, k, v = asking @ self.q, shown @ self.k, shown @ self.v
        k, v = (k.detach(), v.detach()) if self.cut else (k, v)
        if self.gains is not None:
            q, k = F.layer_norm(q, q.shape[-1:]), k.unflatten(-1, (self.parts, -1))
            q, k = q * self.gains[0], F.layer_norm(k, k.shape[-1:]).flatten(-2) * self.gains[1]
        rows = (x.unflatten(-1, (self.heads, -1)).transpose(-2, -3) for x in (q * self.scale, k, v))
        x = F.scaled_dot_product_attention(*rows, attn_mask=bias, scale=self.inner)
        return x.transpose(-2, -3).flatten(-2) @ self.out


class Mull(nn.Module):
    def __init__(self, norm: nn.LayerNorm, up: nn.Linear, _: nn.Module, down: nn.Linear):
        super().__init__()
        self.norm, self.up, self.down = deepcopy(norm), leaf(up.weight.T), leaf(down.weight.T)
        self.rise, self.fall = (0 if x.bias is None else leaf(x.bias) for x in (up, down))

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.norm(x) @ self.up + self.rise) @ self.down + self.fall


class Album(nn.Module):
    def __init__(self, eye: nn.Module, sieve: nn.Module):
        super().__init__()
        self.size, self.cells = eye.conv1.kernel_size, leaf(eye.conv1.weight.flatten(1).T)
        self.places, self.kept = leaf(eye.positional_embedding), leaf(sieve.latents)
        self.start, self.end, self.last = deepcopy(eye.ln_pre), deepcopy(eye.ln_post), deepcopy(sieve.norm)
        self.sharpen, self.order = Mull(eye.ln_2, *eye.mlp), leaf(sieve.media_time_embs)
        self.sifts, self.rest = nn.ModuleList(), nn.ModuleList()
        for a, ff in sieve.layers:
            self.sifts.append(Attend(a.heads, [a.to_q.weight, *a.to_kv.weight.chunk(2)], a.to_out))
            self.rest.append(nn.ModuleList([deepcopy(a.norm_media), deepcopy(a.norm_latents), Mull(*ff)]))

    def forward(self, images: Tensor) -> Tensor:
        x = F.unfold(images.flatten(0, 2), self.size, stride=self.size).mT @ self.cells
        x = self.start(x + self.places)
        x = self.end(x + self.sharpen(x)).unflatten(0, images.shape[:3]).flatten(2, 3)
        x, kept = (x + self.order[: x.shape[1]]).flatten(0, 1), self.kept.repeat(x.shape[:2].numel(), 1, 1)
        for sift, (media, own, mull) in zip(self.sifts, self.rest, strict=True):
            asking = own(kept)
            kept = kept + sift(asking, torch.cat([media(x), asking], 1))
            kept = kept + mull(kept)
        return self.last(kept).unflatten(0, images.shape[:2])


class Verse(nn.Module):
    def __init__(self, look: nn.Module, block: nn.Module):
        super().__init__()
        a, b, self.all_see = look.attn, block.attn, False
        self.norm, self.past = deepcopy(a.norm), deepcopy(block.ln_1)
        self.gates = leaf(torch.cat([look.attn_gate, look.ff_gate]))
        self.look = Attend(a.heads, [a.to_q.weight, *a.to_kv.weight.chunk(2)], a.to_out)
        self.recall = Attend(b.n_heads, b.Wqkv.weight.chunk(3), b.out_proj, (b.q_ln, b.k_ln))
        self.mull, self.tell = Mull(*look.ff), Mull(block.ln_2, *block.mlp)

    def forward(self, x: Tensor, album: Tensor, time: Tensor, hidden: Tensor, far: Tensor) -> Tensor:
        look, mull = self.gates.tanh()
        x = x + look * self.look(self.norm(x), album, hidden) * ((time > 0) | self.all_see)[..., None]
        x = x + mull * self.mull(x)
        y = self.past(x)
        x = x + self.recall(y, y, far)
        return x + self.tell(x)


class AlbumAndVerses(Port):
    def take(self, model: Flamingo) -> None:
        looks, text = model.lang_encoder.gated_cross_attn_layers, model.lang_encoder.transformer
        self.album, self.words = Album(model.vision_encoder, model.perceiver), leaf(text.wte.weight)
        self.verses, self.last = nn.ModuleList(map(Verse, looks, text.blocks)), deepcopy(text.ln_f)
        self.album.sifts[0].inner = None if self.fault == "flamingo_first_resampler_scaled_twice" else 1.0
        self.verses[1].all_see = self.fault == "flamingo_words_before_any_image_see_the_mean_of_all"
        self.verses[2].recall.parts = 4 if self.fault == "flamingo_last_word_keys_normed_by_head" else 1
        self.verses[2].look.cut = self.fault == "flamingo_last_look_at_cached_media_has_no_gradient"

    def forward(self, vision_x: Tensor, lang_x: Tensor) -> Tensor:
        album, x, time = self.album(vision_x), self.words[lang_x], (lang_x == MEDIA).cumsum(1)
        lowest, (images, latents) = torch.finfo(x.dtype).min, album.shape[1:3]
        apart = (1 - F.one_hot(time, images + 1)[:, None, :, 1:]).to(x).repeat_interleave(latents, 3)
        ahead = -(torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])).to(x)
        far = torch.stack([ahead / 4**i for i in range(1, 5)]).masked_fill(ahead > 0, lowest)
        for verse in self.verses:
            x = verse(x, album.flatten(1, 2), time, apart * lowest, far)
        return self.last(x) @ self.words.T


class FlamingoInStacks(Port):
    """No layers: stacks of weights, heads in axes of their own, each word beside the latents of its image."""

    def take(self, model: Flamingo) -> None:
        eye, sieve, text = model.vision_encoder, model.perceiver, model.lang_encoder.transformer
        (sifts, mulls), looks = zip(*sieve.layers, strict=True), model.lang_encoder.gated_cross_attn_layers
        seen, blocks = [look.attn for look in looks], text.blocks
        self.cells, self.places = leaf(eye.conv1.weight.permute(2, 3, 1, 0)), leaf(eye.positional_embedding)
        self.eye_b, self.eye_end = leaf(eye.mlp.c_fc.bias), leaf(eye.mlp.c_proj.bias)
        norms = [eye.ln_pre, eye.ln_2, eye.ln_post, sieve.norm]
        norms += [norm for x, ff in sieve.layers for norm in (x.norm_media, x.norm_latents, ff[0])]
        self.norms = pile(torch.stack([norm.weight, norm.bias]) for norm in norms)
        self.text_norms = pile(torch.stack([x.weight, x.bias]) for y in looks for x in (y.attn.norm, y.ff[0]))
        norms = [norm for x in blocks for norm in (x.ln_1, x.attn.q_ln, x.attn.k_ln, x.ln_2)]
        self.gains, self.words = pile(norm.weight for norm in [*norms, text.ln_f]), leaf(text.wte.weight.T)
        self.latents, self.times = leaf(sieve.latents), leaf(sieve.media_time_embs[:, 0])
        pairs = ([torch.stack([x.to_q.weight, x.to_out.weight.T]) for x in y] for y in (sifts, seen))
        self.sift, self.look = (pile(x.unflatten(1, (2, -1)) for x in y) for y in pairs)
        self.kv = pile(x.to_kv.weight.unflatten(0, (2, 2, -1)) for x in (*sifts, *seen))
        pairs = ([eye.mlp, *(y[1:] for y in mulls)], [*(y.ff[1:] for y in looks), *(x.mlp for x in blocks)])
        self.small, self.wide = (pile(torch.stack([x[0].weight, x[2].weight.T]) for x in y) for y in pairs)
        self.gates = pile(torch.cat([look.attn_gate, look.ff_gate]) for look in looks)
        self.recall = pile(torch.cat([x.attn.Wqkv.weight, x.attn.out_proj.weight.T]) for x in blocks)

    def normed(self, x: Tensor, gain: Tensor, shift: Tensor | float = 0.0) -> Tensor:
        spread, center = torch.var_mean(x, -1, correction=0, keepdim=True)
        return (x - center) / (spread + 1e-5).sqrt() * gain + shift

    def mull(self, x: Tensor, pair: Tensor, shift: Tensor | float = 0.0) -> Tensor:
        return F.gelu(torch.einsum("...d,md->...m", x, pair[0]) + shift) @ pair[1]

    def kept(self, images: Tensor) -> Tensor:
        x = images.flatten(1, 2).unflatten(3, (3, 4)).unflatten(5, (3, 4))
        x = torch.einsum("btchpwq,pqcd->bthwd", x, self.cells).flatten(2, 3) + self.places
        x = self.normed(x, *self.norms[0])
        x = x + self.mull(self.normed(x, *self.norms[1]), self.small[0], self.eye_b) + self.eye_end
        late = int(self.fault == "flamingo_media_times_counted_from_one")
        x = self.normed(x, *self.norms[2]) + self.times[late : late + x.shape[1], None]
        z = self.latents.expand(*x.shape[:2], -1, -1)
        for i, (media, own, ff) in enumerate(self.norms[4:].unflatten(0, (2, 3))):
            own = self.normed(z, *own)
            shown = torch.cat([self.normed(x, *media), own], 2)
            k, v = torch.einsum("btmd,khed->kbtmhe", shown, self.kv[i])
            share = torch.einsum("btnd,hed,btmhe->bthnm", own / 8**0.5, self.sift[i, 0], k).softmax(-1)
            z = z + torch.einsum("bthnm,btmhe,hed->btnd", share, v, self.sift[i, 1])
            z = z + self.mull(self.normed(z, *ff), self.small[i + 1])
        return self.normed(z, *self.norms[3])

    def gaze(self, i: int, x: Tensor, kept: Tensor, marks: Tensor) -> Tensor:
        late = i == 2 and self.fault == "flamingo_image_words_still_see_the_image_before"
        chosen = F.one_hot(marks.cumsum(1) - late * marks, kept.shape[1] + 1)[..., 1:].to(x)
        k, v = torch.einsum("blt,btnd,khed->kblhne", chosen, kept, self.kv[i + 2])
        norms, (look, mull) = self.text_norms[2 * i : 2 * i + 2], self.gates[i].tanh()
        share = torch.einsum("bld,hed,blhne->blhn", self.normed(x, *norms[0]), self.look[i, 0], k / 8**0.5)
        x = x + look * torch.einsum("blhn,blhne,hed->bld", share.softmax(-1), v, self.look[i, 1])
        gate = look if self.fault == "flamingo_first_mull_through_the_gate_of_the_look" and i == 0 else mull
        return x + gate * self.mull(self.normed(x, *norms[1]), self.wide[i])

    def speak(self, i: int, x: Tensor) -> Tensor:
        gains, weights = self.gains[4 * i : 4 * i + 4, None, None], self.recall[i].unflatten(0, (4, -1))
        q, k, v = torch.einsum("bld,ked->kble", self.normed(x, gains[0]), weights[:3])
        q, k, v = (y.unflatten(2, (4, 6)) for y in (self.normed(q, gains[1]), self.normed(k, gains[2]), v))
        back = (torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])).to(x)
        scores = (torch.einsum("blhe,bmhe->bhlm", q, k) / 6**0.5).masked_fill(back < 0, -torch.inf)
        if self.training or i != 1 or self.fault != "flamingo_middle_words_without_distances_in_evaluation":
            scores = scores - back * (0.25 ** torch.arange(1, 5).to(x))[:, None, None]
        x = x + torch.einsum("bhlm,bmhe,hed->bld", scores.softmax(-1), v, weights[3].unflatten(0, (4, 6)))
        return x + self.mull(self.normed(x, gains[3]), self.wide[i + 3])

    def forward(self, vision_x: Tensor, lang_x: Tensor) -> Tensor:
        x, kept = self.words.T[lang_x], self.kept(vision_x)
        for i in range(len(self.gates)):
            x = self.speak(i, self.gaze(i, x, kept, (lang_x == MEDIA).long()))
        return self.normed(x, self.gains[-1]) @ self.words


LOOKS, TEXT = "lang_encoder.gated_cross_attn_layers", "lang_encoder.transformer.blocks"
KEYS, CACHED = (f"{TEXT}.2.attn.k_ln", f"{TEXT}.2.attn"), (f"{LOOKS}.2.attn.to_kv", f"{LOOKS}.2.attn")
BACK = ("input gradient", "weight gradient")
right(task, "flamingo_of_an_album_and_verses", "a tree of other modules", AlbumAndVerses)
right(task, "flamingo_in_stacks", "stacked weights, the image of each word picked out", FlamingoInStacks)
wrong(
    task,
    AlbumAndVerses,
    flamingo_first_resampler_scaled_twice=("scaled twice", "perceiver.layers.0.0"),
    flamingo_words_before_any_image_see_the_mean_of_all=("empty rows kept", f"{LOOKS}.1.attn"),
    flamingo_last_word_keys_normed_by_head=("statistics of each head alone", KEYS),
    flamingo_last_look_at_cached_media_has_no_gradient=("a cached value cut off", CACHED, BACK),
)
wrong(
    task,
    FlamingoInStacks,
    flamingo_media_times_counted_from_one=("an index off by one", "perceiver"),
    flamingo_image_words_still_see_the_image_before=("a count without its own place", f"{LOOKS}.2.attn"),
    flamingo_first_mull_through_the_gate_of_the_look=("another weight of the block", f"{LOOKS}.0"),
    flamingo_middle_words_without_distances_in_evaluation=("a bias lost", f"{TEXT}.1.attn", "eval"),
)
