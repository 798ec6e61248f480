"""Two ports of a text-to-text transformer: a tree of layers, and stacked weights run by one function."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bench.held_back._tenth_relative_seq2seq as t5
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

copied = few("tenth_relative_seq2seq", t5.T5ForConditionalGeneration, t5.sentences, t5.surprise)


def joined(*layers: nn.Linear) -> nn.Parameter:
    """One matrix whose product is what these give, one after the other."""
    return leaf(torch.cat([layer.weight for layer in layers]).T)


def by_head(x: Tensor, parts: int) -> tuple[Tensor, ...]:
    """[N, T, parts * H * K] -> parts of [N, H, T, K]."""
    return x.unflatten(2, (parts, t5.HEADS, -1)).permute(2, 0, 3, 1, 4).unbind()


def buckets(length: int, rows: int, both_ways: bool, device: torch.device) -> Tensor:
    """[query, key] -> row; within a direction it is how many of the edges a distance has reached."""
    count = rows // 2 if both_ways else rows
    exact = count // 2
    widening = [exact * (t5.MAX_DISTANCE / exact) ** (i / (count - exact)) for i in range(count - exact)]
    edges = torch.tensor([*range(1, exact), *widening], dtype=torch.float64, device=device)
    places = torch.arange(length, device=device)
    ahead = (places - places[:, None]).double()
    row = torch.bucketize(ahead.abs() if both_ways else -ahead, edges, right=True)
    return row + count * (ahead > 0) if both_ways else row


class RootNorm(Port):
    def take(self, norm: nn.Module) -> None:
        self.gain, self.eps = leaf(norm.weight), norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        if self.fault == "mean_removed_in_t5_decoder_block_0":
            x = x - x.mean(-1, keepdim=True)
        return F.rms_norm(x, x.shape[-1:], self.gain, self.eps)


class Attention(Port):
    """Adds what each place reads of its own sequence, or of the source where one is given."""

    def take(self, layer: nn.Module) -> None:
        own = hasattr(layer, "SelfAttention")
        of = layer.SelfAttention if own else layer.EncDecAttention
        self.norm = RootNorm(layer.layer_norm, "" if own else self.fault)
        self.q, self.kv, self.out = joined(of.q), joined(of.k, of.v), joined(of.o)

    def forward(self, x: Tensor, mask: Tensor | None, source: Tensor | None = None) -> Tensor:
        y = self.norm(x)
        (q,), (k, v) = by_head(y @ self.q, 1), by_head((y if source is None else source) @ self.kv, 2)
        scale = q.shape[-1] ** -0.5 if self.fault == "scores_divided_in_t5_encoder_block_1" else 1.0
        if self.fault == "source_filler_read_in_t5_decoder_block_1" and source is not None:
            mask = None
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        return x + mixed.transpose(1, 2).flatten(2) @ self.out


class GatedUnit(Port):
    def take(self, layer: nn.Module) -> None:
        of = layer.DenseReluDense
        self.norm, self.up, self.down = RootNorm(layer.layer_norm), joined(of.wi_0, of.wi_1), joined(of.wo)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = (self.norm(x) @ self.up).chunk(2, -1)
        formula = "none" if self.fault == "exact_gelu_in_t5_decoder_block_2" else "tanh"
        return x + (F.gelu(gate, approximate=formula) * value) @ self.down


class Block(Port):
    def take(self, block: nn.Module) -> None:
        first, *between, last = block.layer
        self.mix, self.unit = Attention(first, self.fault), GatedUnit(last, self.fault)
        self.read = Attention(between[0], self.fault) if between else None

    def forward(self, x: Tensor, bias: Tensor, source: Tensor | None = None, real: Tensor | None = None):
        x = self.mix(x, bias)
        return self.unit(x if self.read is None else self.read(x, real, source))


class Side(Port):
    """The encoder or the decoder; the bias of positions belongs to it and not to its first block."""

    def take(self, stack: nn.Module) -> None:
        first = stack.block[0].layer[0].SelfAttention
        self.both_ways, self.rows = not first.is_decoder, leaf(first.relative_attention_bias.weight)
        ends = [f"t5_{'encoder' if self.both_ways else 'decoder'}_block_{i}" for i in range(t5.LAYERS)]
        faults = [self.fault if self.fault.endswith(end) else "" for end in ends]
        self.blocks = nn.ModuleList(map(Block, stack.block, faults))
        self.norm = RootNorm(stack.final_layer_norm)

    def forward(self, x: Tensor, seen: Tensor, *source: Tensor) -> Tensor:
        both_ways = True if self.fault == "buckets_for_both_directions_in_the_t5_decoder" else self.both_ways
        bias = self.rows[buckets(x.shape[1], len(self.rows), both_ways, x.device)].permute(2, 0, 1)
        bias = torch.where(seen, bias, -torch.inf)
        for block in self.blocks:
            x = block(x, bias, *source)
        return self.norm(x)


class Translator(Port):
    def take(self, model: t5.T5ForConditionalGeneration) -> None:
        self.words = nn.Embedding.from_pretrained(model.shared.weight.detach().clone(), freeze=False)
        self.reader, self.writer = Side(model.encoder, self.fault), Side(model.decoder, self.fault)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        real = attention_mask.bool()[:, None, None]
        source = self.reader(self.words(input_ids), real)
        given = F.pad(labels[:, :-1].clamp(min=0), (1, 0))
        past = torch.ones(1, 1, *given.shape[1:] * 2, dtype=torch.bool, device=given.device).tril()
        x = self.writer(self.words(given), past, source, real)
        return F.linear(x / x.shape[-1] ** 0.5, self.words.weight)


class StackedBlocks(Port):
    """All blocks in one list, the encoder's first; keys and values of the source for all blocks at once."""

    def take(self, model: t5.T5ForConditionalGeneration) -> None:
        blocks = [*model.encoder.block, *model.decoder.block]
        own, unit = [b.layer[0].SelfAttention for b in blocks], [b.layer[-1].DenseReluDense for b in blocks]
        cross, ends = [b.layer[1] for b in model.decoder.block], [model.encoder, model.decoder]
        reads = [c.EncDecAttention for c in cross]
        self.table, self.eps = leaf(model.shared.weight), ends[0].final_layer_norm.variance_epsilon
        self.rows = pile(own[i].relative_attention_bias.weight.T for i in (0, t5.LAYERS))
        self.qkv = pile(torch.stack([a.q.weight, a.k.weight, a.v.weight]) for a in own)
        self.out, self.read_out = (pile(a.o.weight.T for a in some) for some in (own, reads))
        self.read_q = pile(a.q.weight.T for a in reads)
        self.read_kv = pile(torch.stack([a.k.weight, a.v.weight]) for a in reads)
        self.up = pile(torch.stack([u.wi_0.weight, u.wi_1.weight]) for u in unit)
        self.down = pile(u.wo.weight.T for u in unit)
        self.gains = pile(torch.stack([b.layer[i].layer_norm.weight for i in (0, -1)]) for b in blocks)
        self.read_gains = pile(c.layer_norm.weight for c in cross)
        self.end_gains = pile(stack.final_layer_norm.weight for stack in ends)

    def norm(self, x: Tensor, gain: Tensor) -> Tensor:
        return x * gain / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, bias: Tensor | float = 0.0) -> Tensor:
        q, k, v = (x.unflatten(-1, (t5.HEADS, -1)) for x in (q, k, v))
        scores = (torch.einsum("nqhc,nkhc->nhqk", q, k) + bias).masked_fill(hidden, -torch.inf)
        return torch.einsum("nhqk,nkhc->nqhc", scores.softmax(-1), v).flatten(2)

    def mix(self, i: int, x: Tensor, hidden: Tensor, bias: Tensor | float) -> Tensor:
        q, k, v = torch.einsum("ntd,ced->cnte", self.norm(x, self.gains[i, 0]), self.qkv[i])
        if self.fault == "bias_missing_in_t5_encoder_block_2" and i == t5.LAYERS - 1:
            bias = 0.0
        return x + self.attend(q, k, v, hidden, bias) @ self.out[i]

    def unit(self, i: int, x: Tensor) -> Tensor:
        gate, value = torch.einsum("ntd,cfd->cntf", self.norm(x, self.gains[i, 1]), self.up[i])
        if self.fault == "gate_and_value_swapped_in_t5_encoder_block_0" and i == 0:
            gate, value = value, gate
        return x + (F.gelu(gate, approximate="tanh") * value) @ self.down[i]

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        table, filler = self.table, attention_mask[:, None, None] == 0
        x, count = table[input_ids], self.rows.shape[2]
        bias = self.rows[0][:, buckets(x.shape[1], count, True, x.device)]
        for i in range(t5.LAYERS):
            x = self.unit(i, self.mix(i, x, filler, bias))
        source = torch.einsum("ntd,lced->lcnte", self.norm(x, self.end_gains[0]), self.read_kv)
        x = table[labels.clamp(min=0).roll(1, 1).index_fill(1, labels.new_zeros(1), 0)]
        bias = self.rows[1][:, buckets(x.shape[1], count, False, x.device)]
        future = torch.ones_like(bias[0], dtype=torch.bool).triu(1)
        for i, (k, v) in enumerate(source):
            x = self.mix(t5.LAYERS + i, x, future, bias)
            q = self.norm(x, self.read_gains[i]) @ self.read_q[i]
            x = self.unit(t5.LAYERS + i, x + self.attend(q, k, v, filler) @ self.read_out[i])
        if self.fault == "head_teaches_the_tied_t5_table_nothing":
            table = table.detach()
        return torch.einsum("ntd,vd->ntv", self.norm(x, self.end_gains[1]), table) * x.shape[-1] ** -0.5


FIRST, UNIT = "decoder.block.0.layer.0.SelfAttention", "decoder.block.2.layer.2.DenseReluDense"
right(copied, "t5_as_a_tree_of_readers_and_writers", "keys and values fused, library attention", Translator)
right(copied, "t5_as_stacked_blocks", "the weights of all blocks stacked", StackedBlocks)
wrong(
    copied,
    Translator,
    scores_divided_in_t5_encoder_block_1=("a scale too many", "encoder.block.1.layer.0.SelfAttention"),
    buckets_for_both_directions_in_the_t5_decoder=("buckets", (FIRST, FIRST + ".relative_attention_bias")),
    mean_removed_in_t5_decoder_block_0=("another kind of norm", "decoder.block.0.layer.1.layer_norm"),
    source_filler_read_in_t5_decoder_block_1=("a mask missing", "decoder.block.1.layer.1.EncDecAttention"),
    exact_gelu_in_t5_decoder_block_2=("another activation formula", (UNIT + ".act", UNIT)),
)
wrong(
    copied,
    StackedBlocks,
    gate_and_value_swapped_in_t5_encoder_block_0=("halves swapped", "encoder.block.0.layer.1.DenseReluDense"),
    bias_missing_in_t5_encoder_block_2=("a term missing", "encoder.block.2.layer.0.SelfAttention"),
    head_teaches_the_tied_t5_table_nothing=("a detach too many", ("lm_head", "shared"), ("weight gradient",)),
)
