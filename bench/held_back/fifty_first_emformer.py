"""Two ports of a small Emformer: a tree that walks from chunk to chunk, and one class of stacked weights."""

import torch
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fifty_first_emformer import SIZES, EmformerEncoder, sound_loss, speech
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("fifty_first_emformer", EmformerEncoder, speech, sound_loss)
HEADS, STRIDE, SEGMENT, LEFT, RIGHT, MEMORIES = SIZES


def product(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(*weight.T.shape)
    layer.weight, layer.bias = leaf(weight), leaf(bias)
    return layer


class Standard(nn.Module):
    def __init__(self, norm: nn.LayerNorm):
        super().__init__()
        self.gain, self.offset, self.eps, self.lost = leaf(norm.weight), leaf(norm.bias), norm.eps, 0

    def forward(self, x: Tensor) -> Tensor:
        spread, center = torch.var_mean(x, -1, correction=self.lost, keepdim=True)
        return (x - center) / (spread + self.eps).sqrt() * self.gain + self.offset


class Look(nn.Module):
    """The attention of one chunk: [B, Q, D] looks at [B, K, D], of which some are silent."""

    def __init__(self, attention: nn.Module):
        super().__init__()
        both = attention.emb_to_key_value
        pairs = zip(both.weight.chunk(2), both.bias.chunk(2), strict=True)
        self.key, self.value = (product(*pair) for pair in pairs)
        ends = attention.emb_to_query, attention.out_proj
        self.query, self.out = (product(x.weight, x.bias) for x in ends)

    def forward(self, asking: Tensor, known: Tensor, silent: Tensor) -> Tensor:
        found = self.query(asking), self.key(known), self.value(known)
        q, k, v = (x.unflatten(2, (HEADS, -1)) for x in found)
        score = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        share = score.masked_fill(silent[:, None, None], -torch.inf).softmax(3)
        return self.out(torch.einsum("bhqk,bkhd->bqhd", share, v).flatten(2))


class ChunkLayer(nn.Module):
    """Takes lists by chunk: right contexts and frames in ``ahead`` and ``now``, and what is remembered."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.look, self.flat, self.normed_copies = Look(layer.attention), False, False
        self.before, self.after = Standard(layer.layer_norm_input), Standard(layer.layer_norm_output)
        norm, up, _, _, down, _ = layer.pos_ff
        products = (product(x.weight, x.bias) for x in (up, down))
        self.feed = nn.Sequential(Standard(norm), next(products), nn.ReLU(), next(products))

    def forward(self, ahead: list, now: list, memory: list, lengths: Tensor) -> tuple[list, list, list]:
        copies, frames = [self.before(x) for x in ahead], [self.before(x) for x in now]
        past, then, found = torch.cat(frames, 1), [[], []], []
        for i, (copy, frame) in enumerate(zip(copies, frames, strict=True)):
            start, end = max(i * SEGMENT - LEFT, 0), i * SEGMENT + frame.shape[1]
            silent = torch.arange(start, end, device=lengths.device) >= lengths[:, None]
            heard = torch.zeros_like(silent[:, :1])
            near, gap = torch.cat([copy, past[:, start:end]], 1), heard.expand(-1, RIGHT)
            seen, kept = memory[max(i - MEMORIES, 0) : i], torch.cat([gap, silent], 1)
            known, quiet = torch.cat([*seen, near], 1), torch.cat([heard.expand(-1, len(seen)), kept], 1)
            x = torch.cat([copy if self.normed_copies else ahead[i], now[i]], 1)
            x = x + self.look(torch.cat([copy, frame], 1), known, quiet)
            x = self.after(x + self.feed(x))
            then[0].append(x[:, :RIGHT]), then[1].append(x[:, RIGHT:])
            new = self.look(frame.mean(1, keepdim=True), near, kept)
            found.append(new if self.flat else new.tanh())
        return *then, found[:-1]


class EmformerOfChunks(Port):
    """Walks over the chunks without a mask, the batch first, keys and values by products of their own."""

    def take(self, model: EmformerEncoder) -> None:
        self.enter = leaf(model.input_linear.weight)
        self.layers = nn.ModuleList(map(ChunkLayer, model.transformer.emformer_layers))
        self.leave = product(model.output_linear.weight, model.output_linear.bias)
        self.end = Standard(model.layer_norm)
        self.layers[0].normed_copies = self.fault == "emformer_first_layer_adds_to_normed_right_context"
        self.layers[1].flat = self.fault == "emformer_second_layer_memory_without_tanh"
        self.end.lost = int(self.fault == "emformer_final_norm_by_the_unbiased_variance")

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        size, lengths = x.shape[1] // STRIDE, lengths.div(STRIDE, rounding_mode="floor")
        x = torch.einsum("bsti,oi->bsto", x[:, : size * STRIDE].unflatten(1, (size, STRIDE)), self.enter)
        x, frames = x.flatten(2), size - RIGHT
        now = list(x[:, :frames].split(SEGMENT, 1))
        ahead = [x[:, i : i + RIGHT] for i in (*range(SEGMENT, frames, SEGMENT), frames)]
        memory = [chunk.mean(1, keepdim=True) for chunk in now[:-1]]
        if self.fault == "emformer_first_memories_without_gradient":
            memory = [mean.detach() for mean in memory]
        for layer in self.layers:
            ahead, now, memory = layer(ahead, now, memory, lengths)
        return self.end(self.leave(torch.cat(now, 1))), lengths


def rows(layer: nn.Linear) -> Tensor:
    return torch.cat([layer.weight, layer.bias[:, None]], 1)


def norm(x: Tensor, w: Tensor, eps: float = 1e-5) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * w[0] + w[1]


def affine(x: Tensor, w: Tensor) -> Tensor:
    return x @ w[:, :-1].mT + w[:, -1]


class StackedEmformer(Port):
    """Stacks over the layers, one product for queries, keys and values, a mask by comparing chunks."""

    def take(self, model: EmformerEncoder) -> None:
        layers = model.transformer.emformer_layers
        attentions = [x.attention for x in layers]
        self.qkv = pile(torch.cat([rows(x.emb_to_query), rows(x.emb_to_key_value)]) for x in attentions)
        self.mix = pile(rows(x.out_proj) for x in attentions)
        self.up = pile(rows(x.pos_ff[1]) for x in layers)
        self.down = pile(rows(x.pos_ff[4]) for x in layers)
        norms = [(x.layer_norm_input, x.pos_ff[0], x.layer_norm_output) for x in layers]
        self.norms = pile(torch.stack([pile((y.weight, y.bias)) for y in x]) for x in norms)
        self.enter, self.leave = leaf(model.input_linear.weight), leaf(rows(model.output_linear))
        self.end = pile((model.layer_norm.weight, model.layer_norm.bias))

    def allowed(self, chunk: Tensor, place: Tensor, kind: Tensor) -> Tensor:
        """Which item may look at which; kinds are memory 0, right context 1, frame 2 and summary 3."""
        back = chunk[:, None] - chunk
        memory = (kind == 0) & (kind != 3)[:, None] & (back > 0) & (back <= MEMORIES)
        frame = (kind == 2) & (place >= chunk[:, None] * SEGMENT - LEFT) & (back >= 0)
        return memory | (kind == 1) & (back == 0) | frame

    def layer(self, i: int, x: Tensor, memory: Tensor, pool: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        fault, count = self.fault, memory.shape[1]
        y = norm(x, self.norms[i, 0])
        items = torch.cat([memory, y, pool @ y], 1)
        q, k, v = affine(items, self.qkv[i]).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        score = (q @ k.mT) * q.shape[-1] ** -0.5
        share = score[:, :, count:].masked_fill(~seen[:, None, count:], -1e9).softmax(3)
        y = affine((share @ v).transpose(1, 2).flatten(2), self.mix[i])
        y, memory = y[:, : x.shape[1]] + x, y[:, x.shape[1] : -1].tanh()
        wide = fault == "emformer_second_feed_forward_norm_with_a_larger_epsilon" and i == 1
        z = affine(norm(y, self.norms[i, 1], 1e-3 if wide else 1e-5), self.up[i])
        loose = fault == "emformer_last_relu_passes_all_gradient" and i == 2
        z = z.clamp(min=0).detach() + (z - z.detach()) if loose else z.clamp(min=0)
        return norm(affine(z, self.down[i]) + y, self.norms[i, 2]), memory

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        size, lengths = x.shape[1] // STRIDE, lengths // STRIDE
        x = (x @ self.enter.T)[:, : size * STRIDE].unflatten(1, (size, STRIDE))
        x = (x.mT if self.fault == "emformer_frames_stacked_channel_by_channel" else x).flatten(2)
        place = torch.arange(size - RIGHT, device=x.device)
        own = place // SEGMENT
        chunks = own.unique()
        ahead = torch.arange(RIGHT, device=x.device)
        copy = ((chunks + 1) * SEGMENT).clamp(max=size - RIGHT)[:, None] + ahead
        member = (own == chunks[:, None]).to(x)
        pool = member / member.sum(1, keepdim=True)
        memory = (pool @ x[:, : size - RIGHT])[:, :-1]
        order = [chunks[:-1], chunks.repeat_interleave(RIGHT), own, chunks]
        kind = torch.cat([torch.full_like(part, j) for j, part in enumerate(order)])
        spot = torch.cat([torch.zeros_like(torch.cat(order[:2])), place, torch.zeros_like(chunks)])
        open_to = self.allowed(torch.cat(order), spot, kind)
        seen = open_to & ((kind != 2) | (spot < lengths[:, None]))[:, None]
        x = torch.cat([x[:, copy.flatten()], x[:, : size - RIGHT]], 1)
        pool = torch.cat([torch.zeros_like(pool[:, :1]).expand(-1, copy.numel()), pool], 1)
        for i in range(len(self.qkv)):
            bare = self.fault == "emformer_first_layer_hears_padding_in_evaluation" and i == 0
            mask = open_to.expand_as(seen) if bare and not self.training else seen
            x, memory = self.layer(i, x, memory, pool, mask)
        return norm(affine(x[:, copy.numel() :], self.leave), self.end), lengths


SLOPES, LAYER = ("input gradient", "weight gradient"), "transformer.emformer_layers."
right(task, "emformer_of_chunks", "a tree, chunks without a mask, split keys", EmformerOfChunks)
right(task, "emformer_of_stacked_weights", "packed stacks, one product, a compared mask", StackedEmformer)
wrong(
    task,
    EmformerOfChunks,
    emformer_first_memories_without_gradient=("detach", ("transformer", "transformer.memory_op"), SLOPES),
    emformer_first_layer_adds_to_normed_right_context=("another residual", LAYER + "0"),
    emformer_second_layer_memory_without_tanh=("a function left out", LAYER + "1.attention"),
    emformer_final_norm_by_the_unbiased_variance=("another variance", "layer_norm"),
)
wrong(
    task,
    StackedEmformer,
    emformer_frames_stacked_channel_by_channel=("another channel order", "time_reduction"),
    emformer_first_layer_hears_padding_in_evaluation=("a mask left out", LAYER + "0.attention", "eval"),
    emformer_second_feed_forward_norm_with_a_larger_epsilon=("another epsilon", LAYER + "1.pos_ff.0"),
    emformer_last_relu_passes_all_gradient=("a wrong backward", LAYER + "2.pos_ff.2", SLOPES),
)
