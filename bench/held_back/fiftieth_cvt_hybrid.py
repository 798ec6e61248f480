"""Two ports of a small CvT: a tree with channels last and a token apart, and one class of stacked weights."""

import math
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import Stats, right
from bench.held_back._fiftieth_cvt_hybrid import STAGES, ConvolutionalVisionTransformer, eased, stripes
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("fiftieth_cvt_hybrid", ConvolutionalVisionTransformer, stripes, eased)


def windows(x: Tensor, size: int, stride: int, edge: int) -> Tensor:
    return F.pad(x, (0, 0, *[edge] * 4)).unfold(1, size, stride).unfold(2, size, stride)


class Matrix(nn.Module):
    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.matrix, self.offset = leaf(layer.weight.T), leaf(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix + self.offset


class Local(nn.Module):
    def __init__(self, pair: nn.Sequential, stride: int):
        super().__init__()
        self.taps, self.stats, self.stride = leaf(pair.conv.weight[:, 0]), Stats(pair.bn), stride

    def forward(self, x: Tensor) -> Tensor:
        return self.stats((windows(x, 3, self.stride, 1) * self.taps).sum((4, 5)))


class Mixer(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        a, self.whole = block.attn, True
        self.before, self.after, self.heads = deepcopy(block.norm1), deepcopy(block.norm2), a.num_heads
        locals_ = zip((a.conv_proj_q, a.conv_proj_k, a.conv_proj_v), (1, 2, 2), strict=True)
        self.ask, self.show, self.tell = (Local(*pair) for pair in locals_)
        self.queries, self.keys, self.values, self.out = map(Matrix, (a.proj_q, a.proj_k, a.proj_v, a.proj))
        self.wide, self.narrow = Matrix(block.mlp.fc1), Matrix(block.mlp.fc2)
        self.root = math.sqrt(len(block.norm1.weight))

    def attend(self, x: Tensor, token: list[Tensor]) -> Tensor:
        locals_ = (each(x).flatten(1, 2) for each in (self.ask, self.show, self.tell))
        q, k, v = (torch.cat([*token, each], 1) for each in locals_)
        q, k, v = self.queries(q), self.keys(k), self.values(v)
        found = []
        for a, b, c in zip(*(each.chunk(self.heads, 2) for each in (q, k, v)), strict=True):
            score = a @ b.transpose(1, 2) / self.root
            found.append((score - score.logsumexp(2, True)).exp() @ c)
        return self.out(torch.cat(found, 2))

    def feed(self, x: Tensor) -> Tensor:
        y = self.wide(self.after(x))
        gate = (1 + torch.erf(y / math.sqrt(2))) / 2
        return x + self.narrow(y * (gate if self.whole else gate.detach()))

    def forward(self, x: Tensor, token: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        mixed = self.attend(self.before(x), [self.before(t) for t in token])
        x = x + mixed[:, len(token) :].unflatten(1, x.shape[1:3])
        return self.feed(x), [self.feed(t + mixed[:, :1]) for t in token]


class Embedding(nn.Module):
    def __init__(self, embed: nn.Module):
        super().__init__()
        self.kernel, self.offset = leaf(embed.proj.weight), leaf(embed.proj.bias)
        self.stride, self.edge = embed.proj.stride[0], embed.proj.padding[0]
        self.norm = deepcopy(embed.norm)

    def forward(self, x: Tensor) -> Tensor:
        x = windows(x, self.kernel.shape[-1], self.stride, self.edge).flatten(3)
        return self.norm(x @ self.kernel.flatten(1).T + self.offset)


class CvtOfPictures(Port):
    def take(self, model: ConvolutionalVisionTransformer) -> None:
        stages, fault = (model.stage0, model.stage1), self.fault
        self.embeddings = nn.ModuleList(Embedding(x.patch_embed) for x in stages)
        self.mixers = nn.ModuleList(nn.ModuleList(map(Mixer, x.blocks)) for x in stages)
        self.token, self.norm = leaf(model.stage1.cls_token), deepcopy(model.norm)
        self.classes = Matrix(model.head)
        if fault == "cvt_hybrid_first_embedding_padded_by_half_its_kernel":
            self.embeddings[0].edge = 3
        self.mixers[0][0].whole = fault != "cvt_hybrid_first_gelu_gate_detached"
        if fault == "cvt_hybrid_query_norm_momentum_reversed":
            self.mixers[0][1].ask.stats.rate = 0.9
        if fault == "cvt_hybrid_third_attention_scaled_by_head_width":
            self.mixers[1][0].root = math.sqrt(STAGES[1][3] // STAGES[1][5])

    def forward(self, x: Tensor) -> Tensor:
        x, tokens = x.movedim(1, 3), ([], [self.token.expand(len(x), 1, -1)])
        for embedding, mixers, token in zip(self.embeddings, self.mixers, tokens, strict=True):
            x = embedding(x)
            for mixer in mixers:
                x, token = mixer(x, token)
        return self.classes(self.norm(token[0][:, 0]))


def affine(*layers: nn.Module) -> Tensor:
    return torch.stack([torch.cat([x.weight.flatten(1), x.bias[:, None]], 1) for x in layers])


def pairs(*norms: nn.Module) -> Tensor:
    return torch.stack([torch.stack([x.weight, x.bias]) for x in norms])


class StackedCvt(Port):
    def take(self, model: ConvolutionalVisionTransformer) -> None:
        self.w, self.ends = nn.ParameterList(), nn.ParameterList()
        for i, stage in enumerate((model.stage0, model.stage1)):
            every = [self.sheets(block) for block in stage.blocks]
            self.w.extend(pile(each) for each in list(zip(*every, strict=True))[:-1])
            self.register_buffer(f"kept_{i}", torch.stack([each[-1] for each in every]))
            embed = stage.patch_embed
            self.ends.extend([leaf(affine(embed.proj)[0]), leaf(pairs(embed.norm)[0])])
        self.token = leaf(model.stage1.cls_token[0].T)
        self.ends.extend([leaf(pairs(model.norm)[0]), leaf(affine(model.head)[0])])

    def sheets(self, block: nn.Module) -> tuple[Tensor, ...]:
        a, mlp = block.attn, block.mlp
        local = a.conv_proj_q, a.conv_proj_k, a.conv_proj_v
        norms = pairs(*(x.bn for x in local), block.norm1, block.norm2)
        kept = torch.stack([torch.stack([x.bn.running_mean, x.bn.running_var]) for x in local])
        mats, taps = affine(a.proj_q, a.proj_k, a.proj_v, a.proj), torch.stack([x.conv.weight for x in local])
        return mats, taps, norms, affine(mlp.fc1)[0], affine(mlp.fc2)[0], kept

    def line(self, x: Tensor, rows: Tensor) -> Tensor:
        return rows[:, :-1] @ x + rows[:, -1:]

    def even(self, x: Tensor, pair: Tensor, eps: float = 1e-5) -> Tensor:
        spread, center = torch.var_mean(x, 1, correction=0, keepdim=True)
        return (x - center) / (spread + eps).sqrt() * pair[0, :, None] + pair[1, :, None]

    def near(self, x: Tensor, i: int, j: int, k: int) -> Tensor:
        y = F.conv2d(x, self.w[5 * i + 1][j, k], padding=1, groups=x.shape[1])
        if k:
            late = self.fault == "cvt_hybrid_first_keys_padded_at_the_end_only" and (i, j, k) == (0, 0, 1)
            y = y[:, :, late::2, late::2]
        own = self.fault == "cvt_hybrid_last_values_by_batch_in_evaluation" and (i, j, k) == (1, 1, 2)
        kept, pair = self.get_buffer(f"kept_{i}")[j, k], self.w[5 * i + 2][j, k]
        if own and not self.training:
            kept = None, None
        return F.batch_norm(y, *kept, *pair, self.training or own).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        for i, (size, stride, edge, width, depth, heads, _, has_token) in enumerate(STAGES):
            high, wide = ((n + 2 * edge - size) // stride + 1 for n in x.shape[2:])
            keras = self.fault == "cvt_hybrid_second_embedding_norm_with_a_larger_epsilon" and i == 1
            x = self.line(F.unfold(x, size, padding=edge, stride=stride), self.ends[2 * i])
            x = self.even(x, self.ends[2 * i + 1], 1e-3 if keras else 1e-5)
            if has_token:
                x = torch.cat([self.token.expand(len(x), -1, 1), x], 2)
            for j in range(depth):
                mats, _, norms, up, down = (self.w[5 * i + k][j] for k in range(5))
                y = self.even(x, norms[3])
                if self.fault == "cvt_hybrid_last_attention_added_to_the_normed" and (i, j) == (1, 1):
                    x = y
                first, picture = y[:, :, :has_token], y[:, :, has_token:].unflatten(2, (high, wide))
                locals_ = [torch.cat([first, self.near(picture, i, j, n)], 2) for n in range(3)]
                q, k, v = (self.line(locals_[n], mats[n]).unflatten(1, (heads, -1)) for n in range(3))
                share = (torch.einsum("nhct,nhcs->nhst", q, k) * width**-0.5).softmax(2)
                x = x + self.line((v @ share).flatten(1, 2), mats[3])
                x = x + self.line(F.gelu(self.line(self.even(x, norms[4]), up)), down)
            token, x = x[:, :, :1], x[:, :, has_token:].unflatten(2, (high, wide))
        return self.line(self.even(token, self.ends[4]), self.ends[5])[:, :, 0]


SLOPES, OF_BATCH = ("input gradient", "weight gradient"), "batch statistics in eval"
FIRST, SECOND, LAST = "stage0.blocks.0", "stage0.blocks.1", "stage1.blocks.1"
right(task, "cvt_hybrid_of_pictures_with_a_token_apart", "a tree, channels last, windows", CvtOfPictures)
right(task, "cvt_hybrid_of_stacked_weights", "stacks, columns, convolutions cut down", StackedCvt)
wrong(
    task,
    CvtOfPictures,
    cvt_hybrid_first_embedding_padded_by_half_its_kernel=("another padding", "stage0.patch_embed.proj"),
    cvt_hybrid_first_gelu_gate_detached=("detach", FIRST + ".mlp.act", SLOPES),
    cvt_hybrid_query_norm_momentum_reversed=("a momentum", SECOND + ".attn.conv_proj_q.bn", "buffer"),
    cvt_hybrid_third_attention_scaled_by_head_width=("another scale", "stage1.blocks.0.attn"),
)
wrong(
    task,
    StackedCvt,
    cvt_hybrid_first_keys_padded_at_the_end_only=("another padding", FIRST + ".attn.conv_proj_k.conv"),
    cvt_hybrid_second_embedding_norm_with_a_larger_epsilon=("another epsilon", "stage1.patch_embed.norm"),
    cvt_hybrid_last_attention_added_to_the_normed=("another residual", LAST),
    cvt_hybrid_last_values_by_batch_in_evaluation=(OF_BATCH, LAST + ".attn.conv_proj_v.bn", "eval"),
)
