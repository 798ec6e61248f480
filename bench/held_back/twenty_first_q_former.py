"""Two ports of a small Q-Former: floors of two streams, and stacks that make three passes one."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _twenty_first_q_former as original
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

network, heads = original.Blip2ForImageTextRetrieval, original.HEADS
task = few("twenty_first_q_former", network, original.captioned, original.contrast_and_match)
STACKS = (
    "start: qformer.layernorm; picture: vision_projection,language_projection; text: text_projection; "
    "pair: itm_head; self: attention.attention.query,key,value; self_out: attention.output.dense; "
    "self_norm: attention.output.LayerNorm; ask: crossattention.attention.query; "
    "told: crossattention.attention.key,value; gaze_out: crossattention.output.dense; "
    "gaze_norm: crossattention.output.LayerNorm; asked_up: intermediate_query.dense; "
    "asked_down: output_query.dense; asked_norm: output_query.LayerNorm; said_up: intermediate.dense; "
    "said_down: output.dense; said_norm: output.LayerNorm"
)


class Affine(nn.Module):
    def __init__(self, *layers: nn.Linear):
        super().__init__()
        self.kernel = leaf(torch.cat([layer.weight for layer in layers]).T)
        self.shift = leaf(torch.cat([layer.bias for layer in layers]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self.kernel) + self.shift


def settle(x: Tensor, norm: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-12).sqrt() * norm[0] + norm[1]


class Gather(nn.Module):
    def __init__(self, look: nn.Module, *parts: tuple[str, ...]):
        super().__init__()
        self.takes = nn.ModuleList(Affine(*(getattr(look.attention, x) for x in part)) for part in parts)
        self.out, self.norm = Affine(look.output.dense), pile(look.output.LayerNorm.parameters())
        self.shape, self.cut = (-1, heads, look.output.dense.in_features // heads), False

    def forward(self, rows: Tensor, seen: Tensor, *picture: Tensor) -> Tensor:
        sources = rows.detach() if self.cut else rows, *picture
        taken = [take(x).unflatten(2, self.shape) for take, x in zip(self.takes, sources, strict=True)]
        qkv = (y for x in taken for y in x.permute(2, 0, 3, 1, 4))
        mixed = F.scaled_dot_product_attention(*qkv, attn_mask=seen[:, None, None])
        return settle(rows + self.out(mixed.transpose(1, 2).flatten(2)), self.norm)


class Floor(nn.Module):
    """What is asked and what is said meet in the attention only; what is asked may look at the picture."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.among, self.gaze, self.early = Gather(layer.attention, ("query", "key", "value")), None, False
        if layer.has_cross_attention:
            self.gaze = Gather(layer.crossattention, ("query",), ("key", "value"))
        ends = {"asked": "_query", "said": ""}
        self.up = nn.ModuleDict(
            {k: Affine(getattr(layer, f"intermediate{x}").dense) for k, x in ends.items()}
        )
        downs = {k: getattr(layer, f"output{x}") for k, x in ends.items()}
        self.down = nn.ModuleDict({k: Affine(x.dense) for k, x in downs.items()})
        self.norms = nn.ParameterDict({k: pile(x.LayerNorm.parameters()) for k, x in downs.items()})

    def forward(self, streams: dict[str, Tensor], seen: Tensor, image: Tensor, shown: Tensor) -> dict:
        rows = self.among(torch.cat([*streams.values()], 1), seen)
        parts = dict(zip(streams, rows.split([x.shape[1] for x in streams.values()], 1), strict=True))
        if self.gaze is not None and "asked" in parts:
            parts["asked"] = self.gaze(parts["asked"], shown, image)
        held = parts | ({"said": streams["said"]} if self.early and "said" in streams else {})
        parts = {k: held[k] + self.down[k](F.gelu(self.up[k](x))) for k, x in parts.items()}
        return {k: settle(x, self.norms[k]) for k, x in parts.items()}


class Floors(Port):
    def take(self, model: nn.Module) -> None:
        told, body = model.embeddings, model.qformer
        self.askers, self.heat = leaf(model.query_tokens[0]), leaf(model.logit_scale)
        self.words, self.places = leaf(told.word_embeddings.weight), leaf(told.position_embeddings.weight)
        self.begin = pile(body.layernorm.parameters())
        self.floors = nn.ModuleList(map(Floor, body.encoder.layer))
        last = model.vision_projection, model.text_projection, model.itm_head, model.language_projection
        self.shown, self.spoken, self.fits, self.prefix = map(Affine, last)
        self.floors[0].gaze.cut = self.fault == "q_former_first_cross_attention_asks_with_detached_rows"
        self.floors[1].early = self.fault == "q_former_second_layer_words_add_their_rows_before_attention"

    def read(self, seen: Tensor, image: Tensor, shown: Tensor, **streams: Tensor) -> dict[str, Tensor]:
        bare = self.fault == "q_former_embedding_norm_skips_the_words_beside_queries" and len(streams) == 2
        streams = {k: x if bare and k == "said" else settle(x, self.begin) for k, x in streams.items()}
        for floor in self.floors:
            streams = floor(streams, seen, image, shown)
        return streams

    def forward(self, image: Tensor, image_mask: Tensor, ids: Tensor, mask: Tensor, pairs: Tensor) -> dict:
        askers, picture, told = self.askers.repeat(len(ids), 1, 1), (image, image_mask.bool()), mask.bool()
        words = F.embedding(ids, self.words, padding_idx=0) + self.places[: ids.shape[1]]
        free, both = told.new_ones(askers.shape[:2]), {"asked": askers, "said": words[pairs]}
        seen = self.read(free, *picture, asked=askers)["asked"]
        said = self.read(told, *picture, said=words)["said"][:, 0]
        joint = self.read(torch.cat([free, told[pairs]], 1), *picture, **both)["asked"]
        shown, spoken = (x / x.norm(dim=-1, keepdim=True) for x in (self.shown(seen), self.spoken(said)))
        alike = torch.einsum("nqe,me->nmq", shown, spoken)
        even = self.fault == "q_former_similarity_averages_the_queries_in_evaluation" and not self.training
        alike = self.heat.exp() * (alike.mean(2) if even else alike.amax(2))
        named = {"language_model_inputs": self.prefix(seen), "image_embeds": shown, "text_embeds": spoken}
        return {"logits_per_image": alike, "itm_score": self.fits(joint.mean(1)), **named}


class Stacks(Port):
    """Channels first, biases as last columns; the first half is alone, the second in pairs."""

    def take(self, model: nn.Module) -> None:
        bases, told, self.w = (model, *model.qformer.encoder.layer), model.embeddings, nn.ParameterDict()
        for use, where in (line.split(": ") for line in STACKS.split("; ")):
            path, _, names = where.rpartition(".")
            having = [base for base in bases if hasattr(base, where.split(",")[0].split(".")[0])]
            found = [[getattr(x.get_submodule(path), name) for name in names.split(",")] for x in having]
            columns = ([torch.column_stack([x.weight, x.bias]) for x in each] for each in found)
            self.w[use] = pile(map(torch.cat, columns))
        self.queries, self.heat = leaf(model.query_tokens[0].T), leaf(model.logit_scale)
        self.table, self.places = leaf(told.word_embeddings.weight), leaf(told.position_embeddings.weight.T)

    def by(self, use: str, x: Tensor, i: int = 0) -> Tensor:
        return self.w[use][i, :, :-1] @ x + self.w[use][i, :, -1:]

    def normed(self, use: str, x: Tensor, i: int = 0) -> Tensor:
        spread, center = torch.var_mean(x, 1, correction=0, keepdim=True)
        return (x - center) * (spread + 1e-12).rsqrt() * self.w[use][i, :, :1] + self.w[use][i, :, 1:]

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        q, k, v = (x.unflatten(1, (heads, -1)) for x in (q, k, v))
        scores = torch.einsum("nhdq,nhdk->nhqk", q, k) * q.shape[2] ** -0.5
        shares = (scores - scores.amax(3, keepdim=True)).exp() * seen[:, None]
        return (v @ (shares / shares.sum(3, keepdim=True)).mT).flatten(1, 2)

    def thought(self, kind: str, x: Tensor, i: int) -> Tensor:
        y = self.by(kind + "_up", x, i)
        rough = (kind, i) == ("asked", 2) and self.fault == "q_former_last_queries_take_the_tanh_gelu"
        y = F.gelu(y, approximate="tanh") if rough else y * torch.erfc(-y * 0.5**0.5) / 2
        return self.normed(kind + "_norm", x + self.by(kind + "_down", y, i), i)

    def forward(self, image: Tensor, image_mask: Tensor, ids: Tensor, mask: Tensor, pairs: Tensor) -> dict:
        (count, long), many = ids.shape, self.queries.shape[1]
        behind = many if self.fault == "q_former_words_beside_queries_are_placed_behind_them" else 0
        places = torch.stack([self.places[:, :long], self.places[:, behind : behind + long]])
        words = self.table[torch.cat([ids, ids[pairs]])].mT + places.repeat_interleave(count, 0)
        h = self.normed("start", torch.cat([self.queries.expand(2 * count, -1, -1), words], 2))
        asks = torch.arange(many + long, device=ids.device) < many
        real = F.pad(mask, (many, 0), value=1)[:, None].expand(-1, many + long, -1)
        seen = torch.cat([real * (asks[:, None] == asks), real[pairs]]).to(h)
        picture, patches = image.mT.repeat(2, 1, 1), image_mask[:, None].repeat(2, 1, 1).to(h)
        for i in range(3):
            mixed = self.mixed(*self.by("self", h, i).chunk(3, 1), seen)
            h = self.normed("self_norm", h + self.by("self_out", mixed, i), i)
            asked, said = h.tensor_split([many], 2)
            if i != 1:
                if self.fault == "q_former_last_cross_attention_sees_padded_patches" and i == 2:
                    patches = torch.ones_like(patches)
                told = self.by("told", picture, i // 2).chunk(2, 1)
                found = self.mixed(self.by("ask", asked, i // 2), *told, patches)
                asked = self.normed("gaze_norm", asked + self.by("gaze_out", found, i // 2), i // 2)
            h = torch.cat([self.thought("asked", asked, i), self.thought("said", said, i)], 2)
        alone, joint = h.tensor_split(2)
        spoken = self.by("text", alone[:, :, many : many + 1])
        shown, prefix = self.by("picture", alone[:, :, :many]).tensor_split([spoken.shape[1]], 1)
        shown, spoken = (x * x.square().sum(1, keepdim=True).rsqrt() for x in (shown, spoken))
        heat = self.heat.detach() if self.fault == "q_former_temperature_gets_no_gradient" else self.heat
        alike = torch.einsum("neq,mei->nmq", shown, spoken).amax(2) * heat.exp()
        fits, text = self.by("pair", joint[:, :, :many].mean(2, keepdim=True))[:, :, 0], spoken[:, :, 0]
        named = {"language_model_inputs": prefix.mT, "image_embeds": shown.mT, "text_embeds": text}
        return {"logits_per_image": alike, "itm_score": fits, **named}


FIRST, SECOND, LAST = (f"qformer.encoder.layer.{i}." for i in range(3))
GAZES = tuple(FIRST + "crossattention" + part for part in (".attention.query", ".attention", ""))
LAST_GAZE = LAST + "crossattention.attention", LAST + "crossattention"
GELU = LAST + "intermediate_query.intermediate_act_fn", LAST + "intermediate_query"
PLACES, NORM = ("embeddings", "embeddings.position_embeddings"), ("qformer", "qformer.layernorm")
SLOPES, RESIDUAL = ("input gradient", "weight gradient"), (SECOND + "output", SECOND[:-1])
right(task, "q_former_of_two_streams_on_floors", "two streams apart, fused projections", Floors)
right(task, "q_former_of_stacks_in_one_pass", "three passes made one, channels first", Stacks)
wrong(task, Floors, q_former_embedding_norm_skips_the_words_beside_queries=("a norm left out", NORM))
wrong(task, Floors, q_former_first_cross_attention_asks_with_detached_rows=("detach", GAZES, SLOPES))
wrong(task, Floors, q_former_second_layer_words_add_their_rows_before_attention=("residual", RESIDUAL))
wrong(task, Floors, q_former_similarity_averages_the_queries_in_evaluation=("other pooling", "", "eval"))
wrong(task, Stacks, q_former_words_beside_queries_are_placed_behind_them=("other positions", PLACES))
wrong(task, Stacks, q_former_last_cross_attention_sees_padded_patches=("a mask left out", LAST_GAZE))
wrong(task, Stacks, q_former_last_queries_take_the_tanh_gelu=("another form of an activation", GELU))
wrong(task, Stacks, q_former_temperature_gets_no_gradient=("a weight not learned", "", "weight gradient"))
