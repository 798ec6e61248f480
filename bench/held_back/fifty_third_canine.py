"""Two ports of a small CANINE: a tree with attention by counts, and one class of stacked weights."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _fifty_third_canine as canine
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

BUCKETS, HASHES, PRIMES = canine.BUCKETS, canine.HASHES, canine.PRIMES
HEADS, HIDDEN, KERNEL, RATE = canine.HEADS, canine.HIDDEN, canine.KERNEL, canine.RATE


task = few("fifty_third_canine", canine.CanineTagger, canine.texts, canine.tags_and_kinds)


def ways(length: int) -> Tensor:
    """How often each character is seen by each."""
    place = torch.arange(length)
    seen = (((place - 1) // canine.STRIDE)[:, None] == place // canine.STRIDE).double()
    seen[0] = 1
    seen[:, 0] += 1
    return seen


class Stage(nn.Module):
    """One layer of attention and one of two products, each with a norm after its sum."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        own, mixed = layer.attention.self, layer.attention.output
        self.ask = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.ask.weight = leaf(torch.cat([x.weight for x in (own.query, own.key, own.value)]))
        self.ask.bias = leaf(torch.cat([x.bias for x in (own.query, own.key, own.value)]))
        self.tell, self.level = mixed.dense, mixed.LayerNorm
        self.widen, self.narrow = layer.intermediate.dense, layer.output.dense
        self.smooth = layer.output.LayerNorm
        self.rough = self.cut = False

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = self.ask(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, bias.to(x)[:, None].expand(-1, 1, x.shape[1], -1))
        x = self.level(x + self.tell(mixed.transpose(1, 2).flatten(2)))
        form = "tanh" if self.rough and not self.training else "none"
        y = self.narrow(F.gelu(self.widen(x), approximate=form))
        return self.smooth((x.detach() if self.cut else x) + y)


class Windows(nn.Module):
    """Products of windows of [N, T, C], and the activation."""

    def __init__(self, conv: nn.Conv1d):
        super().__init__()
        self.taps, self.offset = leaf(conv.weight.permute(2, 1, 0)), leaf(conv.bias)
        self.step = conv.stride[0]

    def forward(self, x: Tensor) -> Tensor:
        windows = x.unfold(1, len(self.taps), self.step)
        return F.gelu(torch.einsum("ntck,kcd->ntd", windows, self.taps) + self.offset)


class CanineOfStages(Port):
    """Stages with biases on the scores, and windows of characters; molecules are spread by their index."""

    def take(self, model: canine.CanineTagger) -> None:
        old = model.canine
        parts, self.near = old.char_embeddings, Stage(old.initial_char_encoder.layer[0])
        tables = [getattr(parts, f"HashBucketCodepointEmbedder_{i}").weight for i in range(HASHES)]
        self.table, self.types = leaf(torch.cat(tables)), leaf(parts.token_type_embeddings.weight)
        self.places, self.first = leaf(parts.char_position_embeddings.weight), parts.LayerNorm
        self.shrink, self.shrunk = Windows(old.chars_to_molecules.conv), old.chars_to_molecules.LayerNorm
        self.deep = nn.ModuleList(map(Stage, old.encoder.layer))
        self.join, self.joined = Windows(old.projection.conv), old.projection.LayerNorm
        self.last, self.pool = Stage(old.final_char_encoder.layer[0]), old.pooler.dense
        self.tags, self.kinds = model.classifier, model.text_classifier
        self.deep[0].cut = self.fault == "canine_first_deep_layer_adds_its_residual_without_gradient"
        self.last.rough = self.fault == "canine_final_layer_approximates_gelu_in_evaluation"

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> tuple:
        length = input_ids.shape[1]
        shown = torch.zeros_like(attention_mask, dtype=torch.double).masked_fill(
            attention_mask == 0, -math.inf
        )
        counts = ways(length).to(shown)
        if self.fault == "canine_first_position_counted_once_in_its_own_block":
            counts = counts.clamp(max=1)
        rows = (input_ids[..., None] + 1) * torch.tensor(PRIMES[:HASHES]) % BUCKETS
        x = self.table[rows + BUCKETS * torch.arange(HASHES)].flatten(2) + self.places[:length]
        chars = self.near(self.first(x + self.types[token_type_ids]), counts.log() + shown[:, None])
        first, small = chars[:, :1], self.shrink(chars)[:, :-1]
        late = self.fault == "canine_class_joins_the_molecules_after_their_norm"
        x = torch.cat([first if late else self.shrunk(first), self.shrunk(small)], 1)
        coarse = shown.unfold(1, RATE, RATE).amax(2)[:, None]
        for stage in self.deep:
            x = stage(x, coarse)
        spread = x[:, (torch.arange(length) // RATE + 1).clamp(max=x.shape[1] - 1)]
        front = (KERNEL - 1) // 2
        both = F.pad(torch.cat([chars, spread], 2), (0, 0, front, KERNEL - 1 - front))
        final = self.last(self.joined(self.join(both)), shown[:, None])
        return self.tags(final), self.kinds(self.pool(x[:, 0]).tanh())


def sheet(layer: nn.Linear) -> Tensor:
    return torch.cat([layer.weight.T, layer.bias[None]])


class StackedCanine(Port):
    """Stacks over all the layers, sums of exponentials by head, and one product for each convolution."""

    def take(self, model: canine.CanineTagger) -> None:
        old, self.w = model.canine, nn.ParameterDict()
        layers = [old.initial_char_encoder.layer[0], *old.encoder.layer, old.final_char_encoder.layer[0]]
        four = [(*x.attention.self.children(), x.attention.output.dense) for x in layers]
        self.w["square"] = pile(torch.stack([sheet(y) for y in x]) for x in four)
        self.w["up"] = pile(sheet(x.intermediate.dense) for x in layers)
        self.w["down"] = pile(sheet(x.output.dense) for x in layers)
        norms = [y for x in layers for y in (x.attention.output.LayerNorm, x.output.LayerNorm)]
        norms += [x.LayerNorm for x in (old.char_embeddings, old.chars_to_molecules, old.projection)]
        self.w["norm"] = pile(torch.stack([x.weight, x.bias]) for x in norms)
        for name, conv in (("shrink", old.chars_to_molecules.conv), ("join", old.projection.conv)):
            self.w[name] = leaf(torch.cat([conv.weight.permute(2, 1, 0).flatten(0, 1), conv.bias[None]]))
        self.w["pool"] = leaf(sheet(old.pooler.dense))
        self.w["tag"], self.w["kind"] = leaf(sheet(model.classifier)), leaf(sheet(model.text_classifier))
        e = old.char_embeddings
        self.w["hash"] = pile(getattr(e, f"HashBucketCodepointEmbedder_{i}").weight for i in range(HASHES))
        self.w["place"] = leaf(torch.cat([e.char_position_embeddings.weight, e.token_type_embeddings.weight]))

    def norm(self, i: int, x: Tensor) -> Tensor:
        x = x - x.mean(-1, True)
        gain, offset = self.w["norm"][i]
        return x * gain / (x.square().mean(-1, True) + canine.EPS).sqrt() + offset

    def layer(self, i: int, x: Tensor, seen: Tensor) -> Tensor:
        q, k, v, out = self.w["square"][i]
        q, k, v = (x @ w[:-1] + w[-1] for w in (q, k, v))
        size, mixed = HIDDEN // HEADS, []
        wide = self.fault == "canine_second_deep_layer_scales_by_the_whole_width" and i == 2
        for part in (slice(h * size, (h + 1) * size) for h in range(HEADS)):
            score = q[..., part] @ k[..., part].mT * (HIDDEN if wide else size) ** -0.5
            raised = (score - score.detach().amax(-1, True)).exp() * seen
            mixed.append(raised @ v[..., part] / raised.sum(-1, True))
        x = self.norm(2 * i, x + torch.cat(mixed, -1) @ out[:-1] + out[-1])
        up, down = self.w["up"][i], self.w["down"][i]
        return self.norm(2 * i + 1, x + F.gelu(x @ up[:-1] + up[-1]) @ down[:-1] + down[-1])

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> tuple:
        w, (n, length) = self.w, input_ids.shape
        primes = list(PRIMES[:HASHES])
        if self.fault == "canine_last_hash_takes_the_prime_after_its_own":
            primes[-1] = PRIMES[HASHES]
        x = torch.cat([w["hash"][i][(input_ids * p + p) % BUCKETS] for i, p in enumerate(primes)], -1)
        x = self.norm(8, x + w["place"][:length] + w["place"][BUCKETS:][token_type_ids])
        shown = attention_mask[:, None].to(x)
        chars = self.layer(0, x, shown * ways(length).to(x))
        count = length // RATE
        small = chars[:, : RATE * (count - 1)].reshape(n, count - 1, -1) @ w["shrink"][:-1] + w["shrink"][-1]
        x = self.norm(9, torch.cat([chars[:, :1], F.gelu(small)], 1))
        coarse = shown[..., : RATE * count].unflatten(2, (count, RATE)).amax(3)
        if self.fault == "canine_molecule_mask_moved_on_behind_the_class":
            coarse = torch.cat([torch.ones_like(coarse[..., :1]), coarse[..., :-1]], 2)
        for i in (1, 2):
            x = self.layer(i, x, coarse)
        each = x[:, 1:, None].expand(-1, -1, RATE, -1).flatten(1, 2)
        spread = torch.cat([each, x[:, -1:].expand(-1, length - each.shape[1], -1)], 1)
        front = KERNEL // 2 if self.fault == "canine_projection_padded_more_in_front" else (KERNEL - 1) // 2
        both = F.pad(torch.cat([chars, spread], 2), (0, 0, front, KERNEL - 1 - front))
        both = torch.cat([both[:, i : i + length] for i in range(KERNEL)], 2)
        final = self.layer(3, self.norm(10, F.gelu(both @ w["join"][:-1] + w["join"][-1])), shown)
        pooled = torch.tanh(x[:, 0] @ w["pool"][:-1] + w["pool"][-1])
        return final @ w["tag"][:-1] + w["tag"][-1], pooled @ w["kind"][:-1] + w["kind"][-1]


SLOPES, DEEP = ("input gradient", "weight gradient"), "canine.encoder.layer"
LOCAL = "canine.initial_char_encoder.layer.0.attention"
FINAL = "canine.final_char_encoder.layer.0.intermediate.intermediate_act_fn"
right(task, "canine_of_stages_with_counted_scores", "a tree, fused weights, biased scores", CanineOfStages)
right(task, "canine_of_stacked_layers", "packed stacks, windows by products", StackedCanine)
wrong(
    task,
    CanineOfStages,
    canine_first_position_counted_once_in_its_own_block=("a key seen once", LOCAL),
    canine_class_joins_the_molecules_after_their_norm=("a norm left out", "canine.chars_to_molecules"),
    canine_first_deep_layer_adds_its_residual_without_gradient=("detach", f"{DEEP}.0.output", SLOPES),
    canine_final_layer_approximates_gelu_in_evaluation=("approximate", FINAL, "eval"),
)
wrong(
    task,
    StackedCanine,
    canine_last_hash_takes_the_prime_after_its_own=("a wrong constant", "canine.char_embeddings"),
    canine_molecule_mask_moved_on_behind_the_class=("a mask off by one", "canine"),
    canine_second_deep_layer_scales_by_the_whole_width=("another scale", f"{DEEP}.1.attention.self"),
    canine_projection_padded_more_in_front=("another padding", "canine.projection"),
)
