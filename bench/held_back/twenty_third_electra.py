"""Two ports of a small ELECTRA: a tree of readers of one lexicon, and one class of stacked weights."""

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twenty_third_electra import PAD, ELECTRAModel, both_losses, sentences

task = few("twenty_third_electra", ELECTRAModel, sentences, both_losses)


class Lexicon(nn.Module):
    """The tables that both readers share; ``late`` adds the kinds of the texts behind the norm."""

    def __init__(self, old: nn.Module, offset: Tensor):
        super().__init__()
        self.words, self.offset, self.late = leaf(old.word_embeddings.weight), leaf(offset), False
        self.spots, self.norm = leaf(old.position_embeddings.weight), deepcopy(old.LayerNorm)
        self.kinds = leaf(old.token_type_embeddings.weight)

    def forward(self, ids: Tensor, types: Tensor) -> Tensor:
        kinds = torch.lerp(self.kinds[0], self.kinds[1], types[:, :, None].to(self.kinds))
        x = F.embedding(ids, self.words, padding_idx=PAD) + self.spots[: ids.shape[1]]
        return self.norm(x) + kinds if self.late else self.norm(x + kinds)

    def scores(self, x: Tensor) -> Tensor:
        return torch.addmm(self.offset, x.flatten(0, 1), self.words.T).unflatten(0, x.shape[:2])


class Look(nn.Module):
    """One map for what is asked, held and told; it adds its input and norms the sum."""

    def __init__(self, old: nn.Module):
        super().__init__()
        maps = (old.self.query, old.self.key, old.self.value)
        self.heads, self.blind, self.cut = old.self.num_attention_heads, False, False
        self.maps = leaf(torch.cat([m.weight for m in maps]))
        self.shifts = leaf(torch.cat([m.bias for m in maps]))
        self.back, self.norm = deepcopy(old.output.dense), deepcopy(old.output.LayerNorm)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        parts = F.linear(x, self.maps, self.shifts).unflatten(2, (3, self.heads, -1)).transpose(1, 3)
        asked, held, told = parts.unbind(2)
        held, real = held.detach() if self.cut else held, None if self.blind else real[:, None, None]
        seen = F.scaled_dot_product_attention(asked, held, told, real)
        return self.norm(x + self.back(torch.cat(seen.unbind(1), 2)))


class Think(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.wide, self.back = deepcopy(layer.intermediate.dense), deepcopy(layer.output.dense)
        self.norm = deepcopy(layer.output.LayerNorm)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.back(F.gelu(self.wide(x))))


class Reader(nn.Module):
    def __init__(self, old: nn.Module):
        super().__init__()
        self.entry = deepcopy(old.embeddings_project)
        self.looks = nn.ModuleList(Look(layer.attention) for layer in old.encoder.layer)
        self.thinks = nn.ModuleList(map(Think, old.encoder.layer))

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        x = self.entry(x)
        for look, think in zip(self.looks, self.thinks, strict=True):
            x = think(look(x, real))
        return x


class ForgerAndJudge(Port):
    """Two readers with one lexicon: the forger fills the gaps, the judge looks for what it filled in."""

    def take(self, model: ELECTRAModel) -> None:
        forger, judge = model.generator, model.discriminator
        self.lexicon = Lexicon(forger.electra.embeddings, forger.generator_lm_head.bias)
        self.forger, self.judge = Reader(forger.electra), Reader(judge.electra)
        guess, verdict = forger.generator_predictions, judge.discriminator_predictions
        self.guess = nn.Sequential(deepcopy(guess.dense), nn.GELU(), deepcopy(guess.LayerNorm))
        self.verdict = nn.Sequential(deepcopy(verdict.dense), nn.GELU(), deepcopy(verdict.dense_prediction))
        self.lexicon.late = self.fault == "electra_token_types_join_behind_the_embedding_norm"
        self.judge.looks[1].cut = self.fault == "electra_middle_layer_detaches_its_keys"
        self.judge.looks[2].blind = self.fault == "electra_last_layer_attends_to_the_padding"

    def forward(self, masked_inputs, is_mlm_applied, labels, attention_mask, token_type_ids, gumbel):
        real = attention_mask > 0
        gen = self.guess(self.forger(self.lexicon(masked_inputs, token_type_ids), real))
        gen = self.lexicon.scores(gen)
        with torch.no_grad():
            greedy = self.fault == "electra_draws_the_likeliest_words_in_evaluation" and not self.training
            drawn = (gen if greedy else gen + gumbel).max(2).indices
            filled = masked_inputs.masked_scatter(is_mlm_applied, drawn[is_mlm_applied])
            forged = (filled != labels).logical_and(is_mlm_applied).type_as(gen)
        disc = self.verdict(self.judge(self.lexicon(filled, token_type_ids), real))[..., 0]
        return {"gen": gen, "disc": disc, "is_replaced": forged}


class StackedElectra(Port):
    """Weights of one use and size in a stack, time before rows, words by products with their indicators."""

    def take(self, model: ELECTRAModel) -> None:
        gen, disc, table = model.generator, model.discriminator, model.generator.electra.embeddings
        self.words, self.own_b = leaf(table.word_embeddings.weight), leaf(gen.generator_lm_head.bias)
        untied = self.fault == "electra_generator_head_keeps_its_own_word_table"
        self.own = leaf(self.words) if untied else self.words
        self.spots = leaf(table.position_embeddings.weight)
        self.kinds = leaf(table.token_type_embeddings.weight)
        self.w, self.b, self.depth = nn.ParameterDict(), nn.ParameterDict(), {}
        for size, body in (("small", gen.electra), ("large", disc.electra)):
            layers, at = body.encoder.layer, [layer.attention.self for layer in body.encoder.layer]
            self.depth[size], heads = len(layers), (at[0].num_attention_heads, -1)
            self.w[f"{size}_in"], self.b[f"{size}_in"] = map(leaf, body.embeddings_project.parameters())
            uses = {"seen": "attention.output", "wide": "intermediate", "back": "output"}
            for kept, part in ((self.w, "weight"), (self.b, "bias")):
                trios = [torch.stack([getattr(m, part) for m in (x.query, x.key, x.value)]) for x in at]
                kept[f"{size}_look"] = pile(trio.unflatten(1, heads) for trio in trios)
                for use, name in uses.items():
                    kept[f"{size}_{use}"] = pile(getattr(x.get_submodule(name).dense, part) for x in layers)
            norms = [norm for x in layers for norm in (x.attention.output.LayerNorm, x.output.LayerNorm)]
            self.w[f"{size}_norm"] = pile(torch.stack([x.weight, x.bias]) for x in norms)
        guess, judge = gen.generator_predictions, disc.discriminator_predictions
        self.w["norm"] = pile(torch.stack([x.weight, x.bias]) for x in (table.LayerNorm, guess.LayerNorm))
        ends = (("guess", guess.dense), ("judge", judge.dense), ("last", judge.dense_prediction))
        for use, layer in ends:
            self.w[use], self.b[use] = map(leaf, layer.parameters())

    @staticmethod
    def normed(x: Tensor, pair: Tensor) -> Tensor:
        x = x - x.mean(-1, True)
        return x * (x.square().mean(-1, True) + 1e-12).rsqrt() * pair[0] + pair[1]

    def by(self, use: str, x: Tensor, i: int | None = None) -> Tensor:
        w, b = (part[use] if i is None else part[use][i] for part in (self.w, self.b))
        return torch.einsum("...i,oi->...o", x, w) + b

    def read(self, size: str, shown: Tensor, types: Tensor, hidden: Tensor) -> Tensor:
        """Indicators of words [T, N, V] and kinds [T, N, 2] -> states [T, N, D]."""
        words = torch.cat([self.words[:1].detach(), self.words[1:]])
        x = shown @ words + types @ self.kinds + self.spots[: len(shown), None]
        x = self.by(f"{size}_in", self.normed(x, self.w["norm"][0]))
        for i in range(self.depth[size]):
            look, shift = self.w[f"{size}_look"][i], self.b[f"{size}_look"][i]
            q, k, v = torch.einsum("tnc,phdc->ptnhd", x, look) + shift[:, None, None]
            scores = torch.einsum("tnhd,snhd->nhts", q * q.shape[-1] ** -0.5, k)
            shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            seen = self.by(f"{size}_seen", torch.einsum("nhts,snhd->tnhd", shares, v).flatten(2), i)
            x = self.normed(seen + x, self.w[f"{size}_norm"][2 * i])
            tanh = self.fault == "electra_middle_layer_bends_by_the_tanh_gelu" and (size, i) == ("large", 1)
            wide = F.gelu(self.by(f"{size}_wide", x, i), approximate="tanh" if tanh else "none")
            x = self.normed(self.by(f"{size}_back", wide, i) + x, self.w[f"{size}_norm"][2 * i + 1])
        return x

    def forward(self, masked_inputs, is_mlm_applied, labels, attention_mask, token_type_ids, gumbel):
        types, hidden = F.one_hot(token_type_ids.T, 2).to(self.kinds), (attention_mask == 0)[:, None, None]
        shown, gaps = F.one_hot(masked_inputs.T, len(self.words)).to(types), is_mlm_applied.T[..., None]
        x = self.by("guess", self.read("small", shown, types, hidden))
        swapped, norm = self.fault == "electra_generator_head_norms_before_its_gelu", self.w["norm"][1]
        x = F.gelu(self.normed(x, norm)) if swapped else self.normed(F.gelu(x), norm)
        gen = torch.einsum("tnc,vc->ntv", x, self.own) + self.own_b
        drawn = (gen.detach() + gumbel).argmax(2)
        shown = torch.where(gaps, F.one_hot(drawn.T, len(self.words)).to(shown), shown)
        every = self.fault == "electra_rightly_drawn_words_count_as_replaced"
        forged = is_mlm_applied.to(gen) * (every | (drawn != labels))
        x = F.gelu(self.by("judge", self.read("large", shown, types, hidden)))
        return {"gen": gen, "disc": self.by("last", x)[..., 0].T, "is_replaced": forged}


base, judge = "generator.electra.embeddings", "discriminator.electra.encoder.layer"
keys, tied = f"{judge}.1.attention.self", ("generator.generator_lm_head", f"{base}.word_embeddings")
slopes = ("input gradient", "weight gradient")
right(task, "electra_of_a_forger_and_a_judge", "fused maps, one lexicon, fused attention", ForgerAndJudge)
right(task, "electra_of_stacked_weights", "stacks, time first, indicators of words", StackedElectra)
wrong(
    task,
    ForgerAndJudge,
    electra_token_types_join_behind_the_embedding_norm=("added behind a norm", (base, f"{base}.LayerNorm")),
    electra_middle_layer_detaches_its_keys=("detach", (keys, f"{keys}.key"), slopes),
    electra_last_layer_attends_to_the_padding=("a mask left out", f"{judge}.2.attention.self"),
    electra_draws_the_likeliest_words_in_evaluation=("no noise in eval", "", "eval"),
)
wrong(
    task,
    StackedElectra,
    electra_generator_head_keeps_its_own_word_table=("a tie lost", tied, ("weight gradient", "update")),
    electra_middle_layer_bends_by_the_tanh_gelu=("another GELU", f"{judge}.1.intermediate"),
    electra_generator_head_norms_before_its_gelu=("two steps swapped", "generator.generator_predictions"),
    electra_rightly_drawn_words_count_as_replaced=("right counted as wrong", ""),
)
