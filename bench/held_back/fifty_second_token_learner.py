"""Two ports of a small RT-1: a tree with the channels last, and one class of packed weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _fifty_second_token_learner as rt
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, Rows, leaf, pile, spatial, wrong
from bench.held_back._sixth_ports import few

task = few("fifty_second_token_learner", rt.TransformerNetwork, rt.episodes, rt.action_loss)


class Dense(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor):
        super().__init__()
        self.matrix, self.offset = leaf(weight.flatten(1).T), leaf(bias)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix + self.offset


class Stage(nn.Module):
    def __init__(self, block: nn.Module, film: nn.Module):
        super().__init__()
        ends = block.expand_conv, block.project_conv
        self.wide, self.narrow = (leaf(x.weight[..., 0, 0].T) for x in ends)
        self.taps, self.hard = leaf(block.depthwise_conv.weight[:, 0]), False
        self.norms = nn.ModuleList(map(Rows, (block.bn0, block.bn1, block.bn2)))
        self.down, self.up = (Dense(*x.parameters()) for x in block.se.children())
        pair = film.projection_mult, film.projection_add
        self.tune = Dense(*(torch.cat(each) for each in zip(*(x.parameters() for x in pair), strict=True)))

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        y = F.silu(self.norms[0](x @ self.wide))
        size = len(self.taps[0])
        windows = F.pad(y, (0, 0, *[size // 2] * 4)).unfold(1, size, 1).unfold(2, size, 1)
        y = F.silu(self.norms[1](torch.einsum("nhwcij,cij->nhwc", windows, self.taps)))
        gate = self.up(F.silu(self.down(y.mean((1, 2), True))))
        gate = F.hardsigmoid(gate) if self.hard else (1 + (gate / 2).tanh()) / 2
        y = self.norms[2]((gate * y) @ self.narrow)
        y = x + y if x.shape == y.shape else y
        times, plus = self.tune(words)[:, None, None].chunk(2, -1)
        return y + torch.addcmul(plus, times, y)


class Gaze(nn.Module):
    def __init__(self, learner: nn.Module):
        super().__init__()
        self.scale, self.shift = map(leaf, learner.layernorm.parameters())
        self.kernel, self.offset = map(leaf, learner.mlp.hidden_layer.parameters())
        self.maps, self.still = leaf(learner.mlp.output_layer.weight[..., 0, 0].T), False

    def forward(self, x: Tensor) -> Tensor:
        spread, middle = torch.var_mean(x, -1, correction=0, keepdim=True)
        y = (x - middle) / (spread + 1e-5).sqrt() * self.scale + self.shift
        y = (F.gelu(spatial(y, self.kernel, self.offset)) @ self.maps).flatten(1, 2)
        y = (y - y.logsumexp(1, keepdim=True)).exp()
        return (y.detach() if self.still else y).mT @ x.flatten(1, 2)


class Mixer(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.before, self.after, (*three, out) = layer.layernorm_1, layer.layernorm_2, layer.mha_1.children()
        self.three = leaf(torch.cat([x.weight for x in three]).T)
        self.join, self.feed = (Dense(x.weight, x.bias) for x in (out, layer.ff))

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        three = (self.before(x) @ self.three).unflatten(2, (3, rt.HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.join(F.scaled_dot_product_attention(*three, seen).transpose(1, 2).flatten(2))
        return x + self.feed(self.after(x))


class TreeOfStages(Port):
    def take(self, model: rt.TransformerNetwork) -> None:
        eye, body = model.image_tokenizer.tokenizer, model.transformer
        self.start, self.start_norm = leaf(eye.stem_conv.weight), Rows(eye.stem_bn)
        self.stages = nn.ModuleList(map(Stage, eye.blocks, eye.films))
        self.gaze, self.lift = Gaze(model.image_tokenizer.token_learner), Dense(*body.token_emb.parameters())
        self.where = leaf(body.position_emb.weight.unflatten(0, (rt.FRAMES, rt.TOKENS)))
        self.mixers = nn.ModuleList(map(Mixer, body.layers))
        self.choose = Dense(*body.output_tokens.parameters())
        self.stages[1].hard = self.fault == "token_learner_second_excitation_is_a_hard_sigmoid"
        self.stages[2].norms[2].own = self.fault == "token_learner_last_batch_norm_keeps_to_the_batch"
        self.gaze.still = self.fault == "token_learner_maps_are_constants_to_the_gradient"
        per = 1 if self.fault == "token_learner_mask_is_causal_by_single_tokens" else rt.TOKENS
        step = torch.arange(rt.FRAMES * rt.TOKENS) // per
        self.register_buffer("seen", step[:, None] >= step)

    def forward(self, image: Tensor, instruction: Tensor) -> Tensor:
        n, f = image.shape[:2]
        x = F.silu(self.start_norm(spatial(image.flatten(0, 1).movedim(1, 3), self.start, stride=2)))
        for stage in self.stages:
            x = stage(x, instruction.repeat_interleave(f, 0))
        x = (self.lift(self.gaze(x)).unflatten(0, (n, f)) + self.where[:f]).flatten(1, 2)
        for mixer in self.mixers:
            x = mixer(x, self.seen[: f * rt.TOKENS, : f * rt.TOKENS])
        return self.choose(x.unflatten(1, (f, rt.TOKENS))[:, :, -rt.ACTIONS :])


class PackedPolicy(Port):
    """Lists of packed weights; heads and frames are loops, of which each frame looks at the ones so far."""

    def take(self, model: rt.TransformerNetwork) -> None:
        eye, learner, body = *model.image_tokenizer.children(), model.transformer
        norms = [eye.stem_bn, *(x for b in eye.blocks for x in (b.bn0, b.bn1, b.bn2))]
        self.norms = nn.ParameterList(pile([x.weight, x.bias]) for x in norms)
        for i, x in enumerate(norms):
            self.register_buffer(f"kept_{i}", torch.stack([x.running_mean, x.running_var]))
        self.start, self.convs = leaf(eye.stem_conv.weight), nn.ParameterList()
        for b in eye.blocks:
            kernels = b.expand_conv, b.depthwise_conv, b.se.se_reduce, b.se.se_expand, b.project_conv
            self.convs.extend(leaf(x.weight) for x in kernels)
            self.convs.append(leaf(torch.cat([b.se.se_reduce.bias, b.se.se_expand.bias])))
        films = [x for film in eye.films for x in (film.projection_mult, film.projection_add)]
        self.film = leaf(torch.cat([torch.cat([x.weight, x.bias[:, None]], 1) for x in films]))
        self.look = nn.ParameterList(map(leaf, learner.parameters()))
        self.where = leaf(body.position_emb.weight)
        ends = body.token_emb, body.output_tokens
        self.up, self.out = (leaf(torch.cat([x.weight, x.bias[:, None]], 1)) for x in ends)
        squares = [(x.mha_1.query, x.mha_1.key, x.mha_1.value, x.mha_1.out, x.ff) for x in body.layers]
        self.squares = pile(torch.stack([x.weight for x in each]) for each in squares)
        halves = [((x.layernorm_1, x.mha_1.out), (x.layernorm_2, x.ff)) for x in body.layers]
        self.rows = pile(torch.stack([x for a, b in y for x in (*a.parameters(), b.bias)]) for y in halves)

    def norm(self, i: int, x: Tensor) -> Tensor:
        return F.batch_norm(x, *self.get_buffer(f"kept_{i}"), *self.norms[i], self.training, 0.1, 1e-3)

    def block(self, i: int, x: Tensor) -> Tensor:
        wide, deep, less, more, narrow, offsets = self.convs[6 * i : 6 * i + 6]
        y = F.silu(self.norm(3 * i + 1, F.conv2d(x, wide)))
        y = F.silu(self.norm(3 * i + 2, F.conv2d(y, deep, padding="same", groups=len(deep))))
        gate = F.silu(y.flatten(2).mean(2) @ less.flatten(1).T + offsets[: len(less)])
        gate = (gate @ more.flatten(1).T + offsets[len(less) :]).sigmoid()
        y = self.norm(3 * i + 3, torch.einsum("nchw,nc,oc->nohw", y, gate, narrow[..., 0, 0]))
        return y + x if i != 1 else y

    def tokens(self, x: Tensor) -> Tensor:
        scale, shift, kernel, offset, last = self.look
        y = F.layer_norm(x.movedim(1, 3), x.shape[1:2], scale, shift).movedim(3, 1)
        y = F.conv2d(y, kernel, offset, padding=1)
        quick = self.fault == "token_learner_map_activation_is_a_quick_gelu"
        y = y * (1.702 * y).sigmoid() if quick else F.gelu(y)
        return F.conv2d(y, last).flatten(2).softmax(2) @ x.flatten(2).mT

    def mix(self, i: int, x: Tensor) -> Tensor:
        a, b, c, d, e, f = self.rows[i]
        y, size = F.layer_norm(x, a.shape, a, b, 1e-6), len(a) // rt.HEADS
        q, k, v = (y @ w.T for w in self.squares[i, :3])
        total = x + c
        for h in range(0, len(a), size):
            s, found = slice(h, h + size), []
            for t in range(rt.TOKENS, x.shape[1] + 1, rt.TOKENS):
                power = q[:, t - rt.TOKENS : t, s] @ k[:, :t, s].mT / size**0.5
                found.append(power.softmax(2) @ v[:, :t, s])
            total = total + torch.cat(found, 1) @ self.squares[i, 3][:, s].T
        y = F.layer_norm(total, d.shape, d, e, 1e-6)
        normed = self.fault == "token_learner_second_layer_adds_to_its_normed_tokens" and i == 1
        return (y if normed else total) + y @ self.squares[i, 4].T + f

    def forward(self, image: Tensor, instruction: Tensor) -> Tensor:
        n, f = image.shape[:2]
        films = F.linear(instruction, self.film[:, :-1], self.film[:, -1]).repeat_interleave(f, 0)
        films = [*films[..., None, None].split([8, 8, 12, 12, 12, 12], 1)]
        if self.fault == "token_learner_first_film_swaps_gamma_and_beta":
            films[:2] = films[1::-1]
        x = F.silu(self.norm(0, F.conv2d(image.flatten(0, 1), self.start, stride=2, padding=1)))
        for i in range(3):
            x = self.block(i, x)
            x = x + films[2 * i] * x + films[2 * i + 1]
        x = F.linear(self.tokens(x), self.up[:, :-1], self.up[:, -1])
        x = x.reshape(n, f * rt.TOKENS, -1) + self.where[: f * rt.TOKENS]
        for i in range(3):
            x = self.mix(i, x)
        end = rt.TOKENS - 1 if self.fault == "token_learner_actions_read_one_token_early" else rt.TOKENS
        x = x.reshape(n, f, rt.TOKENS, -1)[:, :, end - rt.ACTIONS : end]
        return F.linear(x, self.out[:, :-1], self.out[:, -1])


SLOPES, EYE = ("input gradient", "weight gradient"), "image_tokenizer.tokenizer."
right(task, "token_learner_of_stages_with_channels_last", "a tree, windows, fused projections", TreeOfStages)
right(task, "token_learner_of_packed_weights", "packed weights, loops over heads and frames", PackedPolicy)
wrong(
    task,
    TreeOfStages,
    token_learner_second_excitation_is_a_hard_sigmoid=("another activation", EYE + "blocks.1.se"),
    token_learner_last_batch_norm_keeps_to_the_batch=("batch statistics", EYE + "blocks.2.bn2", "eval"),
    token_learner_maps_are_constants_to_the_gradient=("detach", "image_tokenizer.token_learner", SLOPES),
    token_learner_mask_is_causal_by_single_tokens=("another mask", "transformer"),
)
wrong(
    task,
    PackedPolicy,
    token_learner_first_film_swaps_gamma_and_beta=("swapped parts", EYE + "films.0"),
    token_learner_map_activation_is_a_quick_gelu=("another gelu", "image_tokenizer.token_learner.mlp"),
    token_learner_second_layer_adds_to_its_normed_tokens=("another residual", "transformer.layers.1"),
    token_learner_actions_read_one_token_early=("an index off by one", ""),
)
