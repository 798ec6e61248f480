"""Two ports of a small MusicGen decoder: a row of branches, time first, and one class, features first."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twenty_fifth_music_gen import CODEBOOKS, HEADS, PAD, MusicgenForCausalLM, own, tunes

task = few("twenty_fifth_music_gen", MusicgenForCausalLM, tunes, own)


class Level(nn.Module):
    def __init__(self, norm: nn.LayerNorm):
        super().__init__()
        self.gain, self.lift, self.eps = leaf(norm.weight), leaf(norm.bias), norm.eps

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return torch.addcmul(self.lift, x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt(), self.gain)


class Listening(nn.Module):
    """A look at a tune's own past or at the words that are told, added to the tune.

    It ``forgets`` all but six steps in evaluation.
    """

    def __init__(self, attention: nn.Module, norm: nn.LayerNorm, reads: bool):
        super().__init__()
        self.level, self.reads, self.forgets = Level(norm), reads, False
        self.ask, self.out = leaf(attention.q_proj.weight.T), leaf(attention.out_proj.weight.T)
        self.tell = leaf(torch.cat([attention.k_proj.weight, attention.v_proj.weight]).T)

    def forward(self, x: Tensor, text: Tensor, told: Tensor) -> Tensor:
        y, keep = self.level(x), told[:, None, None]
        if not self.reads:
            text, keep = y, torch.ones(len(x), len(x), dtype=torch.bool, device=x.device).tril()
            if self.forgets and not self.training:
                keep = keep.triu(-5)
        flat = y @ self.ask, *(text @ self.tell).chunk(2, -1)
        q, k, v = (z.unflatten(2, (HEADS, -1)).permute(1, 2, 0, 3) for z in flat)
        return x + F.scaled_dot_product_attention(q, k, v, keep).permute(2, 0, 1, 3).flatten(2) @ self.out


class Thinking(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.level, self.adds_normed = Level(layer.final_layer_norm), False
        self.up, self.down = leaf(layer.fc1.weight.T), leaf(layer.fc2.weight.T)

    def forward(self, x: Tensor, text: Tensor, told: Tensor) -> Tensor:
        y = self.level(x)
        return (y if self.adds_normed else x) + F.gelu(y @ self.up) @ self.down


class Dial(nn.Module):
    """Hands that turn in the plane, each at its own speed: their places on both axes are the positions."""

    def __init__(self, shape: torch.Size, whole: bool):
        super().__init__()
        hands = shape[1] // 2
        speed = 10000 ** (-torch.arange(hands).double() / (hands if whole else hands - 1))
        turned = torch.outer(torch.arange(shape[0]).double(), speed)
        hand = torch.polar(torch.ones_like(turned), turned)
        self.register_buffer("places", torch.cat([hand.real, hand.imag], 1).float())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.places[: len(x), None]


class MusicOfBranches(Port):
    """A row of branches with their norms inside, fused projections, and logits moved back to the labels."""

    def take(self, model: MusicgenForCausalLM) -> None:
        decoder, fault = model.model.decoder, self.fault
        self.codes = nn.ModuleList()
        for k, table in enumerate(decoder.embed_tokens):
            still = PAD if k == 2 and fault == "music_gen_third_codebook_never_trains_its_pad_row" else None
            self.codes.append(nn.Embedding.from_pretrained(table.weight.detach().clone(), False, still))
        whole = fault == "music_gen_position_speeds_spread_over_one_more"
        self.dial = Dial(decoder.embed_positions.weights.shape, whole)
        self.branches = nn.ModuleList()
        for layer in decoder.layers:
            self.branches.append(Listening(layer.self_attn, layer.self_attn_layer_norm, False))
            self.branches.append(Listening(layer.encoder_attn, layer.encoder_attn_layer_norm, True))
            self.branches.append(Thinking(layer))
        self.branches[3].forgets = fault == "music_gen_second_layer_keeps_six_steps_in_evaluation"
        self.branches[8].adds_normed = fault == "music_gen_last_feed_forward_is_added_to_its_normed_input"
        self.level = Level(decoder.layer_norm)
        self.say = leaf(torch.cat([head.weight for head in model.lm_heads]).T)

    def forward(self, labels: Tensor, encoder_hidden_states: Tensor, encoder_attention_mask: Tensor) -> tuple:
        read, steps, x = labels.where(labels >= 0, PAD), labels.shape[1], 0
        for k, table in enumerate(self.codes):
            x = x + table(F.pad(read[..., k].T, (0, 0, k + 1, CODEBOOKS - 2 - k), value=PAD))
        x, text = self.dial(x), encoder_hidden_states.transpose(0, 1)
        for branch in self.branches:
            x = branch(x, text, encoder_attention_mask.bool())
        said = (self.level(x) @ self.say).unflatten(2, (CODEBOOKS, -1))
        back = (said[k : k + steps, :, k].permute(1, 2, 0) for k in range(CODEBOOKS))
        losses = [F.cross_entropy(y, labels[..., k]) for k, y in enumerate(back)]
        return torch.stack(losses).mean(), said.permute(1, 2, 0, 3).flatten(0, 1)


class StackedMusic(Port):
    """Stacks of tables, of squares, of wide weights and of norms; [N, D, T] everywhere."""

    def take(self, model: MusicgenForCausalLM) -> None:
        decoder = model.model.decoder
        names, square, wide, norms = ("q_proj", "k_proj", "v_proj", "out_proj"), [], [], []
        for layer in decoder.layers:
            both = layer.self_attn, layer.encoder_attn
            square += [getattr(each, name).weight for each in both for name in names]
            wide += [layer.fc1.weight, layer.fc2.weight.T]
            norms += [layer.self_attn_layer_norm, layer.encoder_attn_layer_norm, layer.final_layer_norm]
        self.square = leaf(torch.stack(square).unflatten(0, (-1, 2, 4)))
        self.wide = leaf(torch.stack(wide).unflatten(0, (-1, 2)))
        self.norms = pile(torch.stack([x.weight, x.bias], 1) for x in (*norms, decoder.layer_norm))
        self.tables = pile(table.weight.T for table in decoder.embed_tokens)
        self.ends = pile(head.weight for head in model.lm_heads)
        count, width = decoder.embed_positions.weights.shape
        power = (torch.arange(width // 2).double() / (width // 2 - 1)).repeat(2)
        quarter = (torch.arange(width) < width // 2).double()
        angle = torch.arange(count) / 1e4 ** power[:, None] + quarter[:, None] * math.pi / 2
        self.register_buffer("places", angle.sin().float())

    def normed(self, x: Tensor, i: int) -> Tensor:
        spread, center = torch.var_mean(x, 1, correction=0, keepdim=True)
        gain, lift = self.norms[i].split(1, 1)
        return (x - center) / (spread + 1e-5).sqrt() * gain + lift

    def mixed(self, x: Tensor, given: Tensor, keep: Tensor, i: int, j: int) -> Tensor:
        """The ``j``-th attention of the ``i``-th layer: to itself, or to the text."""
        q, k, v = (w @ y for w, y in zip(self.square[i, j], (x, given, given), strict=False))
        q, k, v = (y.unflatten(1, (HEADS, -1)) for y in (q, k, v))
        scores = q.mT @ k / math.sqrt(q.shape[2])
        scores = (scores - scores.detach().amax(-1, True)).exp()
        kept = scores * keep
        total = kept.sum(-1, True)
        if (i, j) == (1, 1) and self.fault == "music_gen_second_reading_divides_by_a_detached_sum":
            total = total.detach()
        if (i, j) == (2, 1) and self.fault == "music_gen_last_reading_masks_behind_its_softmax":
            total = scores.sum(-1, True)
        return self.square[i, j, 3] @ (v @ (kept / total).mT).flatten(1, 2)

    def think(self, x: Tensor, i: int) -> Tensor:
        up, down = self.wide[i]
        y = up @ x
        if i == 0 and self.fault == "music_gen_first_feed_forward_bends_by_tanh":
            return down.T @ (y / 2 * (1 + (math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)).tanh()))
        return down.T @ (y / 2 * (1 + (y / math.sqrt(2)).erf()))

    def forward(self, labels: Tensor, encoder_hidden_states: Tensor, encoder_attention_mask: Tensor) -> tuple:
        steps, book = labels.shape[1], torch.arange(CODEBOOKS, device=labels.device)[:, None]
        when = torch.arange(-1, steps + CODEBOOKS - 1, device=labels.device) - book
        spread = labels.mT.gather(2, when.clamp(0, steps - 1).expand(len(labels), -1, -1))
        spread = spread.where((when >= 0) & (when < steps) & (spread >= 0), PAD)
        read, wanted = spread[..., :-1].clone(), spread[..., 1:]
        if self.fault == "music_gen_tokens_begin_with_code_zero":
            read[..., 0] = 0
        x = self.tables.mT[book, read].sum(1).mT + self.places[:, : read.shape[2]]
        past = torch.ones(read.shape[2], read.shape[2], device=x.device, dtype=x.dtype).tril()
        text, told = encoder_hidden_states.mT, encoder_attention_mask[:, None, None]
        for i in range(len(self.wide)):
            y = self.normed(x, 3 * i)
            x = x + self.mixed(y, y, past, i, 0)
            x = x + self.mixed(self.normed(x, 3 * i + 1), text, told, i, 1)
            x = x + self.think(self.normed(x, 3 * i + 2), i)
        said = torch.einsum("kvd,ndt->nktv", self.ends, self.normed(x, -1))
        count = (wanted != PAD).to(x)
        chosen = said.gather(3, wanted.clamp(max=PAD - 1)[..., None])[..., 0]
        lost = ((said.logsumexp(3) - chosen) * count).sum((0, 2)) / count.sum((0, 2))
        return lost.mean(), said.flatten(0, 1)


SLOPES, LAYER = ("input gradient", "weight gradient"), "model.decoder.layers"
CODE = "model.decoder.embed_tokens"
right(task, "music_gen_of_branches_time_first", "a tree, fused projections, logits moved", MusicOfBranches)
right(task, "music_gen_of_stacked_weights", "packed stacks, features first, sums by hand", StackedMusic)
wrong(
    task,
    MusicOfBranches,
    music_gen_position_speeds_spread_over_one_more=("a count off by one", "model.decoder.embed_positions"),
    music_gen_third_codebook_never_trains_its_pad_row=("a frozen row", f"{CODE}.2", SLOPES[1]),
    music_gen_second_layer_keeps_six_steps_in_evaluation=("a short cache", f"{LAYER}.1.self_attn", "eval"),
    music_gen_last_feed_forward_is_added_to_its_normed_input=("another residual", f"{LAYER}.2"),
)
wrong(
    task,
    StackedMusic,
    music_gen_tokens_begin_with_code_zero=("another start token", ""),
    music_gen_first_feed_forward_bends_by_tanh=("another formula of GELU", f"{LAYER}.0.activation_fn"),
    music_gen_second_reading_divides_by_a_detached_sum=("detach", f"{LAYER}.1.encoder_attn", SLOPES),
    music_gen_last_reading_masks_behind_its_softmax=("another order", f"{LAYER}.2.encoder_attn"),
)
