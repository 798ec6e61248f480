"""Two ports of a small ProphetNet: a tree with an axis of streams, and one class of stacked sheets."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fiftieth_prophet_net import DISTANCE, ProphetNet, sentences, smoothed
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

READERS, WRITERS, BUCKETS, SIZE = 3, 4, 6, (24,)
EDGES = [1, 2, 3, *(3 * (DISTANCE / 3) ** (i / 3) for i in (1, 2))]
task = few("fiftieth_prophet_net", ProphetNet, sentences, smoothed)


class Mix(nn.Module):
    """Attention of [..., T, D] with one packed product; ``near`` gives values by bucket and head."""

    def __init__(self, old: nn.Module, heads: int):
        super().__init__()
        three = old.query_proj, old.key_proj, old.value_proj
        self.w, self.b = leaf(torch.cat([x.weight for x in three])), leaf(torch.cat([x.bias for x in three]))
        self.end, self.near = old.out_proj, getattr(old, "relative_pos_embeddings", None)
        self.heads, self.cut, self.open, self.lent = heads, False, False, False

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(-2, -3)

    def merge(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return self.end(F.scaled_dot_product_attention(q, k, v, mask).transpose(-2, -3).flatten(-2))

    def forward(self, x: Tensor, memory: Tensor, seen: Tensor) -> Tensor:
        (a, b, c), (d, e, f) = self.w.chunk(3), self.b.chunk(3)
        if self.open and not self.training:
            seen = torch.ones_like(seen)
        k = F.linear(memory.detach() if self.cut else memory, b, e)
        q, k, v = (self.split(y) for y in (F.linear(x, a, d), k, F.linear(memory, c, f)))
        return self.merge(q, k, v, seen)

    def streams(self, x: Tensor, seen: Tensor, bucket: Tensor) -> Tensor:
        """[N, 3, T, D]: each stream reads the main stream, the first, and then itself."""
        q, k, v = (self.split(y) for y in F.linear(x, self.w, self.b).chunk(3, -1))
        k, v = (torch.cat([y[:, :1].expand_as(y), y], 3) for y in (k, v))
        values = self.near(x[:, :1].expand_as(x) if self.lent else x)
        values = values.unflatten(-1, (-1, self.heads)).permute(0, 1, 4, 2, 3)
        bias = values.gather(4, bucket[:, None].expand(*values.shape[:4], -1))
        return self.merge(q, k, v, bias.masked_fill(~seen[:, None], -math.inf))


class Layer(nn.Module):
    def __init__(self, old: nn.Module, heads: int):
        super().__init__()
        self.own, self.norm1, self.norm3 = Mix(old.self_attn, heads), old.self_attn_layer_norm, None
        ffn, self.norm2 = old.feed_forward, old.feed_forward_layer_norm
        self.wide = nn.Sequential(ffn.intermediate, nn.GELU(), ffn.output)
        if hasattr(old, "cross_attn"):
            self.other, self.norm3 = Mix(old.cross_attn, heads), old.cross_attn_layer_norm

    def forward(self, x: Tensor, seen: Tensor, memory: Tensor | None = None, *maps: Tensor) -> Tensor:
        if memory is None:
            x = self.norm1(x + self.own(x, x, seen))
        else:
            x = self.norm1(x + self.own.streams(x, *maps))
            x = self.norm3(x + self.other(x, memory[:, None], seen[:, None]))
        return self.norm2(x + self.wide(x))


class ProphetOfStreams(Port):
    """A tree of layers over an axis of streams; the main stream too has keys of its own, never seen."""

    def take(self, model: ProphetNet) -> None:
        fault, old = self.fault, model.prophetnet
        self.word, self.norms = leaf(old.word_embeddings.weight), nn.ModuleList()
        self.ahead = leaf(old.decoder.ngram_embeddings.weight.roll(1, 0))
        self.places = nn.ParameterList(leaf(x.position_embeddings.weight) for x in (old.encoder, old.decoder))
        self.norms.extend(x.embeddings_layer_norm for x in (old.encoder, old.decoder))
        self.read = nn.ModuleList(Layer(x, READERS) for x in old.encoder.layers)
        self.write = nn.ModuleList(Layer(x, WRITERS) for x in old.decoder.layers)
        self.write[0].other.cut = fault == "prophet_net_first_cross_keys_detach_memory"
        self.write[1].other.open = fault == "prophet_net_second_cross_open_in_evaluation"
        self.write[2].own.lent = fault == "prophet_net_last_streams_take_main_bucket_values"

    def maps(self, length: int) -> tuple[Tensor, Tensor]:
        back = torch.arange(length)[:, None] - torch.arange(length)
        first, never = torch.arange(length) == 0, torch.zeros(length, length, dtype=torch.bool)
        rows = (back >= 0, never), (back >= 0, back == 0), ((back > 0) | first, back == 0)
        seen = torch.stack([torch.cat(row, 1) for row in rows])
        far = torch.stack([torch.cat([back + lag, back], 1) for lag in (0, 1, 1)]).double()
        return seen, torch.bucketize(far, torch.tensor(EDGES).double(), right=True)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor):
        counted = attention_mask | (self.fault == "prophet_net_encoder_positions_count_padding")
        place = counted.cumsum(1) * attention_mask
        seen, length = attention_mask[:, None, None].bool(), decoder_input_ids.shape[1]
        memory = self.norms[0](F.embedding(input_ids, self.word, 0) + F.embedding(place, self.places[0], 0))
        for layer in self.read:
            memory = layer(memory, seen)
        main = F.embedding(decoder_input_ids, self.word, 0) + self.places[1][1 : length + 1]
        ahead = self.ahead[:, None] + self.places[1][2 : length + 2]
        x = self.norms[1](torch.cat([main[:, None], ahead.expand(len(main), -1, -1, -1)], 1))
        for layer in self.write:
            x = layer(x, seen, memory, *self.maps(length))
        return dict(zip(("logits", "logits_ngram"), (x[:, 1:] @ self.word.T).unbind(1), strict=True))


def sheet(layer: nn.Module) -> Tensor:
    return torch.cat([layer.weight, layer.bias[:, None]], 1)


def four(old: nn.Module) -> Tensor:
    return torch.stack([sheet(x) for x in (old.query_proj, old.key_proj, old.value_proj, old.out_proj)])


def line(x: Tensor, rows: Tensor) -> Tensor:
    return x @ rows[:, :-1].T + rows[:, -1]


class StackedProphet(Port):
    """Stacks of sheets; all streams stand one after the other in one square of attention."""

    def take(self, model: ProphetNet) -> None:
        old = model.prophetnet
        ends, self.word = (old.encoder, old.decoder), leaf(old.word_embeddings.weight)
        self.places = pile(x.position_embeddings.weight for x in ends)
        self.start = pile(torch.stack([*x.embeddings_layer_norm.parameters()]) for x in ends)
        self.kinds, self.w = leaf(old.decoder.ngram_embeddings.weight), nn.ParameterDict()
        for i, end in enumerate(ends):
            layers, names = end.layers, ("self_attn", "cross_attn", "feed_forward")[:: 2 - i]
            self.w[f"own{i}"] = pile(four(x.self_attn) for x in layers)
            self.w[f"up{i}"] = pile(sheet(x.feed_forward.intermediate) for x in layers)
            self.w[f"down{i}"] = pile(sheet(x.feed_forward.output) for x in layers)
            norms = [[*x.get_submodule(f"{n}_layer_norm").parameters()] for x in layers for n in names]
            self.w[f"norms{i}"] = leaf(torch.stack([torch.stack(x) for x in norms]).unflatten(0, (-1, i + 2)))
        self.w["cross"] = pile(four(x.cross_attn) for x in old.decoder.layers)
        self.w["near"] = pile(sheet(x.self_attn.relative_pos_embeddings) for x in old.decoder.layers)
        if self.fault == "prophet_net_middle_bucket_values_by_head":
            near = self.w["near"].data[1]
            near.copy_(near.clone().unflatten(0, (WRITERS, BUCKETS)).transpose(0, 1).flatten(0, 1))

    def attend(self, x: Tensor, y: Tensor, w: Tensor, heads: int, seen: Tensor, bias: Tensor | float = 0):
        q, k, v = (line(z, rows).unflatten(-1, (heads, -1)) for z, rows in zip((x, y, y), w[:3], strict=True))
        score = torch.einsum("nthc,nshc->nhts", q, k) / q.shape[-1] ** 0.5 + bias
        power = score.masked_fill(~seen, -1e30).softmax(-1)
        return line(torch.einsum("nhts,nshc->nthc", power, v).flatten(2), w[3])

    def wide(self, i: int, j: int, x: Tensor) -> Tensor:
        tanh = self.fault == "prophet_net_last_gelu_by_tanh" and (i, j) == (1, 2)
        how, y = "tanh" if tanh else "none", line(x, self.w[f"up{i}"][j])
        return line(F.gelu(y, approximate=how), self.w[f"down{i}"][j])

    def forward(self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor):
        seen, n = attention_mask[:, None, None] > 0, decoder_input_ids.shape[1]
        pad = None if self.fault == "prophet_net_start_padding_trained" else 0
        y = F.embedding(input_ids, self.word, 0) + self.places[0][attention_mask.cumsum(1) * attention_mask]
        y, w = F.layer_norm(y, SIZE, *self.start[0]), self.w
        for j, norms in enumerate(w["norms0"]):
            y = F.layer_norm(y + self.attend(y, y, w["own0"][j], READERS, seen), SIZE, *norms[0])
            y = F.layer_norm(y + self.wide(0, j, y), SIZE, *norms[1])
        kinds = self.kinds if self.fault == "prophet_net_stream_embeddings_unrolled" else self.kinds.flip(0)
        x = F.embedding(decoder_input_ids, self.word, pad) + self.places[1, 1 : n + 1]
        ahead = (kinds[:, None] + self.places[1, 2 : n + 2]).flatten(0, 1)
        x = F.layer_norm(torch.cat([x, ahead.expand(len(x), -1, -1)], 1), SIZE, *self.start[1])
        s, t = torch.arange(3 * n) // n, torch.arange(3 * n) % n
        rows = torch.arange(3 * n)[:, None]
        back, main = t[:, None] - t, (s == 0).expand(3 * n, -1)
        apart = (back >= (s[:, None] == 2)) | ((t == 0) & (s[:, None] > 0))
        open_ = torch.where(main, apart, (back == 0) & (s[:, None] == s))
        bucket = sum((back + (main & (s[:, None] > 0)) >= edge).long() for edge in EDGES)
        for j, norms in enumerate(w["norms1"]):
            bias = line(x, w["near"][j]).unflatten(-1, (BUCKETS, WRITERS))[:, rows, bucket].movedim(3, 1)
            x = F.layer_norm(x + self.attend(x, x, w["own1"][j], WRITERS, open_, bias), SIZE, *norms[0])
            x = F.layer_norm(x + self.attend(x, y, w["cross"][j], WRITERS, seen), SIZE, *norms[1])
            x = F.layer_norm(x + self.wide(1, j, x), SIZE, *norms[2])
        return dict(zip(("logits", "logits_ngram"), (x @ self.word.T).split(n, 1)[1:], strict=True))


D, SLOPE, SLOPES = "prophetnet.decoder", "weight gradient", ("input gradient", "weight gradient")
LAYERS, PLACES = f"{D}.layers", "prophetnet.encoder.position_embeddings"
NEAR = f"{LAYERS}.1.self_attn", f"{LAYERS}.1.self_attn.relative_pos_embeddings"
right(task, "prophet_net_of_streams", "a tree, an axis of streams, packed products", ProphetOfStreams)
right(task, "prophet_net_of_stacked_sheets", "stacks, one square of all streams", StackedProphet)
wrong(
    task,
    ProphetOfStreams,
    prophet_net_encoder_positions_count_padding=("positions without the mask", PLACES),
    prophet_net_first_cross_keys_detach_memory=("detach", f"{LAYERS}.0.cross_attn", SLOPES),
    prophet_net_second_cross_open_in_evaluation=("no mask in eval", f"{LAYERS}.1.cross_attn", "eval"),
    prophet_net_last_streams_take_main_bucket_values=("another input", f"{LAYERS}.2.self_attn"),
)
wrong(
    task,
    StackedProphet,
    prophet_net_stream_embeddings_unrolled=("another index", D),
    prophet_net_start_padding_trained=("a gradient too many", "prophetnet.word_embeddings", SLOPE),
    prophet_net_middle_bucket_values_by_head=("another layout", NEAR),
    prophet_net_last_gelu_by_tanh=("another formula", f"{LAYERS}.2.feed_forward"),
)
