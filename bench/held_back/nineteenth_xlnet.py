"""Two ports of XLNet: one list of rows for both streams, and keys by pair with the streams side by side."""

from copy import deepcopy
from types import SimpleNamespace as Scene

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._nineteenth_xlnet import XLNetLMHeadModel, surprise, two_segments
from bench.held_back._sixth_ports import few

task = few("nineteenth_xlnet", XLNetLMHeadModel, two_segments, surprise)


def waves(distance: Tensor, table: Tensor) -> Tensor:
    """Sines, then cosines, of whole distances, as many as a row of the table is wide."""
    rates = 10000 ** (-torch.arange(0, table.shape[-1], 2).to(table) / table.shape[-1])
    angles = distance.to(table)[..., None] * rates
    return torch.cat([torch.sin(angles), torch.cos(angles)], -1)


class Gaze(nn.Module):
    """Rows [N, R, D], first the tokens, then the blanks, look at what is held and at the tokens."""

    def __init__(self, old: nn.Module):
        super().__init__()
        self.heads, self.kind_bias, self.by_number = old.q.shape[1], 2, False
        self.ask, self.hold = leaf(old.q.flatten(1)), leaf(torch.cat([old.k, old.v], 1).flatten(1))
        self.place, self.back = leaf(old.r.flatten(1)), leaf(old.o.flatten(1).T)
        self.tilts = pile(bias[:, None] for bias in (old.r_w_bias, old.r_r_bias, old.r_s_bias))
        self.kinds, self.norm = leaf(old.seg_embed.permute(1, 2, 0)), deepcopy(old.layer_norm)

    def forward(self, rows: Tensor, held: Tensor, scene: Scene) -> Tensor:
        sources, spots = torch.cat([held, rows[:, : scene.length]], 1), scene.spots
        if self.by_number:
            spots = torch.cat([spots[:, : scene.length], spots[:, : spots.shape[1] - scene.length]], 1)
        q = (rows @ self.ask).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (sources @ self.hold).unflatten(-1, (2 * self.heads, -1)).transpose(1, 2).chunk(2, 1)
        places = (scene.line @ self.place).unflatten(-1, (self.heads, -1)).permute(1, 2, 0)
        index = scene.length - spots[:, :, None] + torch.arange(k.shape[2], device=q.device)
        index = index[:, None].expand(-1, self.heads, -1, -1)
        by_place = ((q + self.tilts[1]) @ places).gather(3, index)
        same, other = ((q + self.tilts[self.kind_bias]) @ self.kinds).split(1, -1)
        scores = (q + self.tilts[0]) @ k.mT + by_place + torch.where(scene.unlike[:, None], other, same)
        scores = (scores / q.shape[-1] ** 0.5).masked_fill(scene.hidden[:, None], -torch.inf)
        seen = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ self.back
        return self.norm(torch.addcmul(rows, seen, scene.real))


class Stage(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.gaze, self.early = Gaze(layer.rel_attn), False
        self.up, self.up_b = leaf(layer.ff.layer_1.weight.T), leaf(layer.ff.layer_1.bias)
        self.down, self.down_b = leaf(layer.ff.layer_2.weight.T), leaf(layer.ff.layer_2.bias)
        self.norm = deepcopy(layer.ff.layer_norm)

    def forward(self, rows: Tensor, held: Tensor, scene: Scene) -> Tensor:
        seen = self.gaze(rows, held, scene)
        y = F.gelu(seen @ self.up + self.up_b) @ self.down + self.down_b
        return self.norm(y + (rows if self.early else seen))


class RowsReader(Port):
    """The blanks are more rows behind the tokens, each at the place that it asks for."""

    def take(self, model: XLNetLMHeadModel) -> None:
        body, self.span = model.transformer, model.transformer.mem_len
        self.table, self.offset = leaf(body.word_embedding.weight), leaf(model.lm_loss.bias)
        self.blank, self.stages = leaf(body.mask_emb[0]), nn.ModuleList(Stage(x) for x in body.layer)
        if self.fault == "xlnet_first_layer_compares_segments_with_the_content_bias":
            self.stages[0].gaze.kind_bias = 0
        self.stages[2].gaze.by_number = self.fault == "xlnet_last_layer_places_queries_by_their_target_number"
        self.stages[1].early = self.fault == "xlnet_middle_feed_forward_adds_the_unattended"

    def scene(self, part: dict[str, Tensor], past: int) -> Scene:
        """How the rows stand to the keys; ``real`` is zero for a blank that asks for nothing."""
        hidden = (part["perm_mask"] > 0) | (part["attention_mask"] < 1)[:, None]
        (count, length), kinds = hidden.shape[:2], part["token_type_ids"]
        targets = part.get("target_mapping", kinds.new_zeros(count, 0, length))
        own, asked = torch.arange(length, device=kinds.device).expand(count, -1), targets.argmax(-1)
        spots, real = torch.cat([own, asked], 1), F.pad(targets.sum(-1), (length, 0), value=1)
        blanks = hidden.gather(1, asked[:, :, None].expand(-1, -1, length))
        hidden = torch.cat([hidden & (own[:1] != own[:1].T), blanks], 1)
        unlike = kinds.gather(1, spots)[:, :, None] != F.pad(kinds, (past, 0))[:, None]
        line = waves(torch.arange(past + length, -length, -1, device=kinds.device), self.table)
        real, hidden = real.to(line)[:, :, None], F.pad(hidden, (past, 0))
        return Scene(length=length, spots=spots, real=real, hidden=hidden, unlike=unlike, line=line)

    def read(self, part: dict[str, Tensor], held: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        scene, rows, states, kept = self.scene(part, held[0].shape[1]), self.table[part["input_ids"]], [], []
        blanks = self.blank.expand(len(rows), scene.spots.shape[1] - scene.length, -1)
        rows = torch.cat([rows, blanks], 1)
        for stage, memory in zip(self.stages, held, strict=True):
            before, rows = rows, stage(rows, memory, scene)
            kept.append(rows if self.fault == "xlnet_memory_keeps_what_each_layer_gave_out" else before)
            states.append(rows)
        whole = self.fault == "xlnet_memory_of_the_whole_segment_in_evaluation" and not self.training
        span = scene.length if whole else self.span
        return states, [x[:, : scene.length][:, -span:].detach() for x in kept]

    def forward(self, first: dict[str, Tensor], second: dict[str, Tensor]) -> dict[str, Tensor]:
        nothing = self.table.new_empty(len(first["input_ids"]), 0, self.table.shape[1])
        states, _ = self.read(second, self.read(first, [nothing] * len(self.stages))[1])
        length, named = second["input_ids"].shape[1], {}
        for i, rows in enumerate(states):
            named[f"content_{i}"], named[f"query_{i}"] = rows[:, :length], rows[:, length:]
        return {"logits": F.linear(states[-1][:, length:], self.table, self.offset), **named}


class PairedStreams(Port):
    """All weights in stacks; a key of three parts for each pair of places, for one stream or for both."""

    def take(self, model: XLNetLMHeadModel) -> None:
        body, looks = model.transformer, [layer.rel_attn for layer in model.transformer.layer]
        self.words, self.words_b = leaf(body.word_embedding.weight), leaf(model.lm_loss.bias)
        self.blank, self.span, units = leaf(body.mask_emb), body.mem_len, [layer.ff for layer in body.layer]
        self.maps = pile(torch.stack([x.q, x.k, x.v, x.r, x.o]).transpose(1, 2) for x in looks)
        self.tilts = pile(torch.cat([x.r_w_bias, x.r_r_bias, x.r_s_bias], -1) for x in looks)
        self.kinds = pile(x.seg_embed for x in looks)
        self.rise, self.rise_b = pile(x.layer_1.weight for x in units), pile(x.layer_1.bias for x in units)
        self.fall, self.fall_b = pile(x.layer_2.weight for x in units), pile(x.layer_2.bias for x in units)
        norms = [norm for x, y in zip(looks, units, strict=True) for norm in (x.layer_norm, y.layer_norm)]
        self.norms = pile(torch.stack([norm.weight, norm.bias]) for norm in norms)

    def normed(self, i: int, x: Tensor) -> Tensor:
        spread, center = torch.var_mean(x, -1, correction=0, keepdim=True)
        return self.norms[i, 0] * (x - center) / torch.sqrt(spread + 1e-12) + self.norms[i, 1]

    def unit(self, i: int, x: Tensor) -> Tensor:
        y = torch.einsum("btc,fc->btf", x, self.rise[i]) + self.rise_b[i]
        y = 0.5 * y * (1 + torch.erf(y * 0.5**0.5))
        return self.normed(2 * i + 1, x + torch.einsum("btf,cf->btc", y, self.fall[i]) + self.fall_b[i])

    def attend(self, i: int, h: Tensor, x: Tensor, seen: Tensor, unlike: Tensor, places: Tensor) -> Tensor:
        """The streams [S, N, T, D], sources [N, K, D], what each stream sees [S, N, T, K]."""
        ask, key, value, place, back = self.maps[i]
        q = torch.einsum("sbtc,ncd->sbtnd", h, ask)
        content = torch.einsum("bkc,ncd->bnkd", x, key)[:, :, None].expand(-1, -1, q.shape[2], -1, -1)
        far = torch.einsum("tkc,ncd->ntkd", places, place).expand_as(content)
        kinds = self.kinds[i][unlike].permute(0, 3, 1, 2, 4)
        keys, size = torch.cat([content, far, kinds], -1), q.shape[-1] ** 0.5
        if self.fault == "xlnet_second_layer_scales_queries_before_their_biases" and i == 1:
            q, size = q / size, 1
        scores = torch.einsum("sbtne,bntke->sbntk", torch.cat([q, q, q], -1) + self.tilts[i], keys) / size
        share = (scores - scores.amax(-1, keepdim=True)).exp() * seen[:, :, None]
        share = share / share.sum(-1, keepdim=True)
        return torch.einsum("sbntk,bkc,ncd,nod->sbto", share, x, value, back)

    def read(self, part: dict[str, Tensor], memory: list[Tensor] | None = None) -> tuple[dict, list]:
        h, kinds, mapping = self.words[part["input_ids"]], part["token_type_ids"], part.get("target_mapping")
        past, length = memory[0].shape[1] if memory else 0, h.shape[1]
        if self.fault == "xlnet_mark_of_the_whole_counted_to_the_second_text":
            kinds = kinds.clamp(max=1)
        seen = (1 - part["perm_mask"]) * part["attention_mask"][:, None]
        seen = torch.stack([seen | torch.eye(length, device=h.device).long(), seen][: 1 + bool(memory)])
        seen, unlike = F.pad(seen, (past, 0), value=1), kinds[:, :, None] != F.pad(kinds, (past, 0))[:, None]
        place = torch.arange(-past, length, device=h.device)
        places = waves(place[past:, None] - place, self.words)
        kept, named = [], {}
        if mapping is not None:
            g, mapping = self.blank.expand(len(h), mapping.shape[1], -1), mapping.to(h)
        for i in range(len(self.maps)):
            kept.append(h[:, -self.span :].detach())
            x = torch.cat([memory[i], h], 1) if memory else h
            streams = [h] if mapping is None else [h, mapping.mT @ g]
            found = self.attend(i, torch.stack(streams), x, seen.to(h), unlike.long(), places)
            named[f"content_{i}"] = h = self.unit(i, self.normed(2 * i, h + found[0]))
            if mapping is not None:
                named[f"query_{i}"] = g = self.unit(i, self.normed(2 * i, g + mapping @ found[1]))
        return named, kept

    def forward(self, first: dict[str, Tensor], second: dict[str, Tensor]) -> dict[str, Tensor]:
        with torch.no_grad():
            memory = self.read(first)[1]
        named, _ = self.read(second, memory)
        tied = self.fault != "xlnet_tied_head_sends_the_table_no_gradient"
        table, last = self.words if tied else self.words.detach(), named[f"query_{len(self.maps) - 1}"]
        return {"logits": last @ table.T + self.words_b, **named}


attention, ff = (tuple(f"transformer.layer.{i}.{part}" for i in range(3)) for part in ("rel_attn", "ff"))
head = "lm_loss", "transformer.word_embedding"
right(task, "xlnet_of_rows_with_blanks_behind", "one list of rows, distances gathered", RowsReader)
right(task, "xlnet_of_paired_keys_in_stacks", "stacked weights, a packed key for each pair", PairedStreams)
wrong(
    task,
    RowsReader,
    xlnet_first_layer_compares_segments_with_the_content_bias=("another's bias", attention[0]),
    xlnet_memory_keeps_what_each_layer_gave_out=("memory of the wrong states", "transformer"),
    xlnet_middle_feed_forward_adds_the_unattended=("residual from elsewhere", (ff[1], "transformer.layer.1")),
    xlnet_memory_of_the_whole_segment_in_evaluation=("a memory too long", "transformer", "eval"),
    xlnet_last_layer_places_queries_by_their_target_number=("places by another count", attention[2]),
)
wrong(
    task,
    PairedStreams,
    xlnet_mark_of_the_whole_counted_to_the_second_text=("kinds merged", "transformer"),
    xlnet_tied_head_sends_the_table_no_gradient=("a tie without gradient", head, "weight gradient"),
    xlnet_second_layer_scales_queries_before_their_biases=("a scale before a sum", attention[1]),
)
