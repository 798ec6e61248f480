"""Two ports of a Longformer: windows gathered around each token, and one square of scores per head."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._thirteenth_longformer import KINDS, PAD, LongformerForMaskedLM, masked_entropy, passages

task = few("thirteenth_longformer", LongformerForMaskedLM, passages, masked_entropy)


class Joint(nn.Module):
    """Several linear layers of one input as one product; also for one layer alone."""

    def __init__(self, *layers: nn.Linear):
        super().__init__()
        self.count = len(layers)
        self.weight = leaf(torch.cat([layer.weight for layer in layers]).T)
        self.bias = leaf(torch.cat([layer.bias for layer in layers]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])

    def heads(self, x: Tensor, count: int) -> tuple[Tensor, ...]:
        return self(x).unflatten(-1, (self.count, count, -1)).unbind(-3)


def settled(x: Tensor, pair: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], *pair, 1e-5)


class Look(nn.Module):
    """Attention around each token and to the picked ones, which themselves read everything."""

    def __init__(self, attention: nn.Module):
        super().__init__()
        own = attention.self
        self.count, self.reach = own.num_heads, own.one_sided_attn_window_size
        self.near, self.ask = Joint(own.query, own.key, own.value), Joint(own.query_global)
        self.far, self.merge = Joint(own.key_global, own.value_global), Joint(attention.output.dense)
        self.pair = pile(attention.output.LayerNorm.parameters())
        self.repeats = self.loose = self.cut = False

    def around(self, x: Tensor) -> Tensor:
        return F.pad(x, [0, 0] * (x.ndim - 2) + [self.reach] * 2).unfold(1, 2 * self.reach + 1, 1)

    def locals(self, x: Tensor, real: Tensor, marks: Tensor, pick: Tensor) -> Tensor:
        q, k, v = self.near.heads(x, self.count)
        q = q * q.shape[-1] ** -0.5
        picked, told = torch.einsum("nst,ynthd->ynshd", pick, torch.stack([k, v]))
        to_picked = torch.einsum("nthd,nshd->nths", q, picked.detach() if self.cut else picked)
        if not self.loose:
            to_picked = to_picked.masked_fill(~pick.any(2)[:, None, None], -torch.inf)
        to_near = torch.einsum("nthd,nthdw->nthw", q, self.around(k))
        near = self.around(real if self.repeats else real & ~marks)
        scores = torch.cat([to_picked, to_near.masked_fill(~near[:, :, None], -torch.inf)], -1)
        shares = scores.softmax(-1) * real[..., None, None]
        far, near = shares.tensor_split([pick.shape[1]], -1)
        read = torch.einsum("nthw,nthdw->nthd", near, self.around(v))
        return (read + torch.einsum("nths,nshd->nthd", far, told)).flatten(2)

    def globals(self, x: Tensor, real: Tensor, pick: Tensor) -> Tensor:
        (q,), (k, v) = self.ask.heads(pick @ x, self.count), self.far.heads(x, self.count)
        scores = torch.einsum("nshd,nthd->nsht", q * q.shape[-1] ** -0.5, k)
        shares = scores.masked_fill(~real[:, None, None], -torch.inf).softmax(-1)
        return torch.einsum("nsht,nthd->nshd", shares, v).flatten(2)

    def forward(self, x: Tensor, real: Tensor, marks: Tensor, pick: Tensor) -> Tensor:
        told = pick.mT @ self.globals(x, real, pick)
        read = torch.where(marks[..., None], told, self.locals(x, real, marks, pick))
        return settled(x + self.merge(read), self.pair)


class Trunk(nn.Module):
    """One block: a look around, then a widened map of each token."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.look = Look(layer.attention)
        self.widen, self.narrow = Joint(layer.intermediate.dense), Joint(layer.output.dense)
        self.pair = pile(layer.output.LayerNorm.parameters())

    def forward(self, x: Tensor, *where: Tensor) -> Tensor:
        y = self.look(x, *where)
        return settled(y + self.narrow(F.gelu(self.widen(y))), self.pair)


class LongformerOfGatheredWindows(Port):
    """The tokens around each token, and the picked tokens by a matrix of zeros and ones."""

    def take(self, model: LongformerForMaskedLM) -> None:
        front, head = model.longformer.embeddings, model.lm_head
        self.words, self.places, self.kinds = (leaf(table.weight) for table in [*front.children()][:3])
        self.start, self.close = (pile(norm.parameters()) for norm in (front.LayerNorm, head.layer_norm))
        self.trunks = nn.ModuleList(Trunk(layer) for layer in model.longformer.encoder.layer)
        self.turn, self.shift = Joint(head.dense), leaf(head.decoder.bias)
        first, middle, last = (trunk.look for trunk in self.trunks)
        first.loose = self.fault == "longformer_empty_global_slots_take_a_share"
        middle.cut = self.fault == "longformer_gathered_global_keys_without_gradient"
        last.repeats = self.fault == "longformer_last_window_still_holds_its_global_keys"

    def front(self, ids: Tensor, kinds: Tensor) -> Tensor:
        first = PAD if self.fault == "longformer_positions_start_on_the_padding_row" else PAD + 1
        places = torch.where(ids == PAD, PAD, (ids != PAD).cumsum(1) - 1 + first)
        words = F.embedding(ids, self.words, padding_idx=PAD)
        places = F.embedding(places, self.places, padding_idx=PAD)
        return settled(words + places + self.kinds[kinds], self.start)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, **masks: Tensor) -> Tensor:
        x, real = self.front(input_ids, token_type_ids), masks["attention_mask"] > 0
        marks = real & (masks["global_attention_mask"] > 0)
        pick = F.one_hot(marks.cumsum(1) * marks)[..., 1:].mT.to(x)
        for trunk in self.trunks:
            x = trunk(x, real, marks, pick)
        return settled(F.gelu(self.turn(x)), self.close) @ self.words.T + self.shift


def piled(layers: nn.ModuleList, path: str) -> tuple[nn.Parameter, nn.Parameter]:
    """The transposed weights and the biases at that path of all layers."""
    found = [layer.get_submodule(path) for layer in layers]
    return pile(x.weight.T for x in found), pile(x.bias for x in found)


class FlatLongformer(Port):
    """Weights of all blocks in piles; every token scores every other, and a mask keeps what is allowed."""

    def take(self, model: LongformerForMaskedLM) -> None:
        front, layers, head = model.longformer.embeddings, model.longformer.encoder.layer, model.lm_head
        looks = [layer.attention.self for layer in layers]
        self.reach, self.heads = [look.one_sided_attn_window_size for look in looks], looks[0].num_heads
        kinds = [kind + end for end in ("", "_global") for kind in ("query", "key", "value")]
        maps, shifts = zip(*(piled(layers, f"attention.self.{kind}") for kind in kinds), strict=True)
        self.maps, self.shifts = leaf(torch.cat(maps, 2)), leaf(torch.cat(shifts, 1))
        self.join, self.join_b = piled(layers, "attention.output.dense")
        self.widen, self.widen_b = piled(layers, "intermediate.dense")
        self.narrow, self.narrow_b = piled(layers, "output.dense")
        norms = [y.LayerNorm for x in layers for y in (x.attention.output, x.output)]
        self.norms = pile(pile(x.parameters()) for x in (*norms, front.LayerNorm, head.layer_norm))
        self.rows = leaf(torch.cat([front.position_embeddings.weight, front.token_type_embeddings.weight]))
        self.columns = self.words = leaf(front.word_embeddings.weight)
        if self.fault == "longformer_decoder_untied_from_its_words":
            self.columns = leaf(head.decoder.weight)
        self.turn, self.turn_b = leaf(head.dense.weight.T), leaf(head.dense.bias)
        self.end = leaf(head.decoder.bias)

    def norm(self, i: int, x: Tensor) -> Tensor:
        sample = self.fault == "longformer_first_attention_norm_by_sample_variance" and i == 0
        spread, center = torch.var_mean(x, -1, correction=int(sample), keepdim=True)
        return (x - center) / (spread + 1e-5).sqrt() * self.norms[i, 0] + self.norms[i, 1]

    def look(self, i: int, x: Tensor, real: Tensor, marks: Tensor) -> Tensor:
        parts = (x @ self.maps[i] + self.shifts[i]).unflatten(2, (6, self.heads, -1))
        q, k, v, far_q, far_k, far_v = parts.permute(2, 0, 3, 1, 4)
        if self.fault == "longformer_global_tokens_read_local_values" and i == 2:
            far_v = v
        scores = torch.where(marks[:, None, :, None], far_q @ far_k.mT, q @ k.mT) / q.shape[-1] ** 0.5
        near = real.new_ones(2 * x.shape[1:2]).tril(self.reach[i]).triu(-self.reach[i])
        allowed = (near | marks[:, None] | marks[..., None]) & real[:, None]
        shares = scores.masked_fill(~allowed[:, None], -torch.inf).softmax(-1)
        mine, theirs = shares * torch.stack([real & ~marks, marks])[:, :, None, :, None]
        return (mine @ v + theirs @ far_v).transpose(1, 2).flatten(2) @ self.join[i] + self.join_b[i]

    def block(self, i: int, x: Tensor, *where: Tensor) -> Tensor:
        y = self.norm(2 * i, x + self.look(i, x, *where))
        wide = F.gelu(y @ self.widen[i] + self.widen_b[i])
        kept = x if self.fault == "longformer_middle_map_adds_what_entered_the_block" and i == 1 else y
        return self.norm(2 * i + 1, kept + wide @ self.narrow[i] + self.narrow_b[i])

    def forward(self, **batch: Tensor) -> Tensor:
        ids, real = batch["input_ids"], batch["attention_mask"].bool()
        marks = real & batch["global_attention_mask"].bool()
        rows = (ids != PAD).cumsum(1) * (ids != PAD) + PAD, batch["token_type_ids"] + len(self.rows) - KINDS
        x = F.embedding(torch.stack(rows), self.rows, padding_idx=PAD).sum(0)
        x = self.norm(-2, x + F.embedding(ids, self.words, padding_idx=PAD))
        for i in range(len(self.reach)):
            x = self.block(i, x, real, marks)
        return self.norm(-1, F.gelu(x @ self.turn + self.turn_b)) @ self.columns.T + self.end


FRONT, LAYER = "longformer.embeddings", "longformer.encoder.layer"
FIRST, MIDDLE, LAST = (f"{LAYER}.{i}.attention.self" for i in range(3))
NORM, BLOCK = f"{LAYER}.0.attention.output.LayerNorm", f"{LAYER}.1"
TIED = ("lm_head.decoder", "lm_head", f"{FRONT}.word_embeddings")
BACK, SHARED = ("input gradient", "weight gradient"), ("weight gradient", "update")
right(task, "longformer_of_gathered_windows", "a tree of gathered windows", LongformerOfGatheredWindows)
right(task, "longformer_by_one_square_of_scores", "flat code, a dense mask, piled weights", FlatLongformer)
wrong(
    task,
    LongformerOfGatheredWindows,
    longformer_positions_start_on_the_padding_row=("off by one", (FRONT, f"{FRONT}.position_embeddings")),
    longformer_empty_global_slots_take_a_share=("empty slots not masked", FIRST),
    longformer_gathered_global_keys_without_gradient=("a detach too many", (MIDDLE, f"{MIDDLE}.key"), BACK),
    longformer_last_window_still_holds_its_global_keys=("keys counted twice", LAST),
)
wrong(
    task,
    FlatLongformer,
    longformer_decoder_untied_from_its_words=("a shared weight copied", TIED, SHARED),
    longformer_first_attention_norm_by_sample_variance=("variance with a correction", NORM),
    longformer_global_tokens_read_local_values=("another projection", (f"{LAST}.value_global", LAST)),
    longformer_middle_map_adds_what_entered_the_block=("another residual", (BLOCK, f"{BLOCK}.output")),
)
