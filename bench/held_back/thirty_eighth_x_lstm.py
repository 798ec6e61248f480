"""Two ports of a small xLSTM: a tree with the time last, and one class of packed weights stepped in time."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._thirty_eighth_x_lstm import EPS, M_HEADS, S_HEADS, XLSTMLMModel, next_token, sentences

GATES = ("igate", "fgate", "zgate", "ogate")
task = few("thirty_eighth_x_lstm", XLSTMLMModel, sentences, next_token)


def norm(x: Tensor, weight: Tensor, groups: int = 1) -> Tensor:
    """Of each group of the last axis."""
    spread, middle = torch.var_mean(x.unflatten(-1, (groups, -1)), -1, correction=0, keepdim=True)
    return ((x.unflatten(-1, (groups, -1)) - middle) * (spread + 1e-5).rsqrt()).flatten(-2) * (1 + weight)


def blocks(x: Tensor, weight: Tensor) -> Tensor:
    """[N, C, T] by some [K, B, O, I] at once -> [N, K, C, T]."""
    return torch.einsum("kboi,nbit->nkbot", weight, x.unflatten(1, (weight.shape[1], -1))).flatten(2, 3)


class Matrix(nn.Module):
    def __init__(self, gain: Tensor, layer: nn.Module):
        super().__init__()
        cell, self.fault = layer.mlstm_cell, ""
        self.before, self.after = leaf(gain), leaf(cell.outnorm.weight)
        self.content, self.side = (leaf(x) for x in layer.proj_up.weight.chunk(2))
        conv = layer.conv1d.conv
        self.taps, self.shift = leaf(conv.weight[:, 0, None]), leaf(conv.bias[:, None])
        self.down, self.skip = leaf(layer.proj_down.weight), leaf(layer.learnable_skip[:, None])
        self.ask = pile([layer.q_proj.weight, layer.k_proj.weight])
        self.tell = leaf(layer.v_proj.weight[None])
        self.gates = leaf(torch.cat([cell.igate.weight, cell.fgate.weight]))
        self.offset = leaf(torch.cat([cell.igate.bias, cell.fgate.bias])[:, None])

    def forward(self, x: Tensor) -> Tensor:
        y, length = norm(x.mT, self.before).mT, x.shape[2]
        inner, side = self.content @ y, self.side @ y
        windows = F.pad(inner, (self.taps.shape[2] - 1, 0)).unfold(2, self.taps.shape[2], 1)
        seen = F.silu((windows * self.taps).sum(3) + self.shift)
        told = seen if self.fault == "value" else inner
        three = torch.cat([blocks(seen, self.ask), blocks(told, self.tell)], 1)
        enter, keep = (self.gates @ three.flatten(1, 2) + self.offset).chunk(2, 1)
        q, k, v = three.unflatten(2, (M_HEADS, -1)).unbind(1)
        before = torch.ones(length, length, dtype=torch.bool, device=x.device).triu()
        keep = -F.softplus(-keep)[:, :, None].expand(-1, -1, length, -1)
        log = torch.where(before, (keep * before.triu(1)).cumsum(3) + enter[..., None], -torch.inf)
        top = log.max(2, keepdim=True)[0]
        score = torch.einsum("nhds,nhdt->nhst", k, q) / math.sqrt(q.shape[2]) * torch.exp(log - top)
        least = torch.ones_like(top) if self.fault == "bound" and not self.training else torch.exp(-top)
        score = score / (torch.maximum(score.sum(2, keepdim=True).abs(), least) + EPS)
        h = norm((v @ score).flatten(1, 2).mT, self.after, M_HEADS).mT
        return x + self.down @ ((h + self.skip * seen) * F.silu(side))


class Scalar(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        layer, self.approximate = block.xlstm, "none"
        kept = (block.xlstm_norm, layer.group_norm, block.ffn_norm)
        self.gains = nn.ParameterList(leaf(x.weight) for x in kept)
        self.given = pile(layer.get_submodule(x).weight for x in GATES)
        self.back = leaf(layer.slstm_cell._recurrent_kernel_.permute(1, 0, 3, 2))
        self.offset = leaf(layer.slstm_cell._bias_.transpose(0, 1).flatten(1)[..., None])
        self.gate, self.up = (leaf(x) for x in block.ffn.proj_up.weight.chunk(2))
        self.down, self.turned = leaf(block.ffn.proj_down.weight), False

    def forward(self, x: Tensor) -> Tensor:
        given = blocks(norm(x.mT, self.gains[0]).mT, self.given) + self.offset
        back = self.back.mT if self.turned else self.back
        enter, keep, new, out = given[..., :1].unbind(1)
        top, content, count = enter, new.tanh(), torch.ones_like(enter)
        states = [out.sigmoid() * content]
        for t in range(1, x.shape[2]):
            enter, keep, new, out = (given[..., t : t + 1] + blocks(states[-1], back)).unbind(1)
            keep = top - F.softplus(-keep)
            top = torch.maximum(enter, keep)
            enter, keep = torch.exp(enter - top), torch.exp(keep - top)
            content, count = content * keep + enter * new.tanh(), count * keep + enter
            states.append(content / count * out.sigmoid())
        x = x + norm(torch.cat(states, 2).mT, self.gains[1], S_HEADS).mT
        y = norm(x.mT, self.gains[2]).mT
        return x + self.down @ (F.gelu(self.gate @ y, approximate=self.approximate) * (self.up @ y))


class XLSTMWithTimeLast(Port):
    """Residual parts on [N, C, T]: split projections, gates in pairs, the decay as a masked running sum."""

    def take(self, model: XLSTMLMModel) -> None:
        stack, fault = model.xlstm_block_stack, self.fault
        one, two, three, four = stack.blocks
        first, third = (Matrix(x.xlstm_norm.weight, x.xlstm) for x in (one, three))
        self.parts = nn.Sequential(first, Scalar(two), third, Scalar(four))
        self.last = leaf(stack.post_blocks_norm.weight)
        self.words, self.ends = leaf(model.token_embedding.weight.T), leaf(model.lm_head.weight)
        first.fault = "value" if fault == "x_lstm_first_value_reads_the_convolved_branch" else ""
        third.fault = "bound" if fault == "x_lstm_normaliser_bounded_by_one_in_evaluation" else ""
        self.parts[1].turned = fault == "x_lstm_first_scalar_recurrence_is_transposed"
        if fault == "x_lstm_last_feed_forward_gelu_by_tanh":
            self.parts[3].approximate = "tanh"

    def forward(self, idx: Tensor) -> Tensor:
        return norm(self.parts(self.words[:, idx].transpose(0, 1)).mT, self.last) @ self.ends.T


class PackedXLSTM(Port):
    """Weights by pairs of like blocks, transposed; both memories are stepped in time."""

    def take(self, model: XLSTMLMModel) -> None:
        stack, self.w = model.xlstm_block_stack, nn.ParameterDict()
        self.last, self.words = leaf(stack.post_blocks_norm.weight), leaf(model.token_embedding.weight)
        self.head = leaf(model.lm_head.weight.T)
        for k in (0, 1):
            for name, p in stack.blocks[k].named_parameters():
                both = [x.get_parameter(name) for x in stack.blocks[k::2]]
                self.w[f"{k}_{name.replace('.', '_')}"] = pile(x.mT if p.ndim > 1 else x for x in both)

    def matrix(self, i: int, x: Tensor, w: dict[str, Tensor]) -> Tensor:
        inner, side = (x @ w["xlstm_proj_up_weight"]).tensor_split(2, 2)
        taps, length = w["xlstm_conv1d_conv_weight"][..., 0].T, x.shape[1]
        if i and self.fault == "x_lstm_second_convolution_taps_reversed":
            taps = taps.flip(0)
        padded = F.pad(inner, (0, 0, len(taps) - 1, 0))
        seen = (taps[j] * padded[:, j : j + length] for j in range(len(taps)))
        seen = F.silu(sum(seen, w["xlstm_conv1d_conv_bias"]))
        weight = torch.stack([w[f"xlstm_{name}_proj_weight"] for name in "qkv"])
        both = torch.stack([seen, seen, inner], 2).unflatten(3, (weight.shape[1], -1))
        qkv = torch.einsum("ntkbi,kbio->ntkbo", both, weight).flatten(2)
        gates = [qkv @ w[f"xlstm_mlstm_cell_{g}_weight"] + w[f"xlstm_mlstm_cell_{g}_bias"] for g in GATES[:2]]
        found, qkv, (c, n, top) = [], qkv.unflatten(2, (3, M_HEADS, -1)), (0, 0, 0)
        size = qkv.shape[-1]
        if i == 0 and self.fault == "x_lstm_first_keys_scaled_by_the_width_of_all_heads":
            size = inner.shape[-1]
        for t in range(length):
            (q, k, v), enter, keep = qkv[:, t].unbind(1), gates[0][:, t], F.logsigmoid(gates[1][:, t]) + top
            top = torch.maximum(enter, keep) if t else enter
            enter, keep, k = (enter - top).exp()[..., None], (keep - top).exp()[..., None], k / size**0.5
            c = keep[..., None] * c + (enter * k)[..., None] * v[..., None, :]
            n = keep * n + enter * k
            least = torch.maximum((n * q).sum(-1).abs(), torch.exp(-top)) + EPS
            found.append((q[..., None, :] @ c)[..., 0, :] / least[..., None])
        groups = 1 if i and self.fault == "x_lstm_second_matrix_norm_over_all_heads" else M_HEADS
        h = norm(torch.stack(found, 1).flatten(2), w["xlstm_mlstm_cell_outnorm_weight"], groups)
        return ((h + w["xlstm_learnable_skip"] * seen) * F.silu(side)) @ w["xlstm_proj_down_weight"]

    def scalar(self, i: int, x: Tensor, w: dict[str, Tensor]) -> Tensor:
        weight = torch.stack([w[f"xlstm_{g}_weight"] for g in GATES], 1)
        back, bias = w["xlstm_slstm_cell__recurrent_kernel_"], w["xlstm_slstm_cell__bias_"].mT
        given = torch.einsum("nthi,hgio->nthgo", x.unflatten(2, (S_HEADS, -1)), weight) + bias
        y = c = n = top = torch.zeros_like(given[:, 0, :, 0])
        found = []
        for t in range(x.shape[1]):
            enter, keep, new, out = (given[:, t] + torch.einsum("nhi,hgoi->nhgo", y, back)).unbind(2)
            keep = top + F.logsigmoid(keep)
            top = torch.maximum(enter, keep) if t else enter
            enter, keep = (enter - top).exp(), (keep - top).exp()
            c, n = keep * c + enter * new.tanh(), keep * n + enter
            silent = i == 0 and self.fault == "x_lstm_first_scalar_normaliser_without_gradient"
            y = out.sigmoid() * c / (n.detach() if silent else n)
            found.append(y)
        return norm(torch.stack(found, 1).flatten(2), w["xlstm_group_norm_weight"], S_HEADS)

    def forward(self, idx: Tensor) -> Tensor:
        x = F.embedding(idx, self.words)
        for i in range(4):
            w = {name[2:]: p[i // 2] for name, p in self.w.items() if name[0] == str(i % 2)}
            x = x + (self.scalar if i % 2 else self.matrix)(i // 2, norm(x, w["xlstm_norm_weight"]), w)
            if i % 2:
                gate, up = (norm(x, w["ffn_norm_weight"]) @ w["ffn_proj_up_weight"]).tensor_split(2, 2)
                x = x + (F.gelu(gate) * up) @ w["ffn_proj_down_weight"]
        return norm(x, self.last) @ self.head


SLOPES, STACK = ("input gradient", "weight gradient"), "xlstm_block_stack.blocks."
CONV = STACK + "2.xlstm.conv1d"
right(task, "x_lstm_with_time_last", "a tree, time last, split and paired weights", XLSTMWithTimeLast)
right(task, "x_lstm_of_packed_weights", "packed weights, both memories stepped in time", PackedXLSTM)
wrong(
    task,
    XLSTMWithTimeLast,
    x_lstm_first_value_reads_the_convolved_branch=("another input", STACK + "0.xlstm"),
    x_lstm_first_scalar_recurrence_is_transposed=("a transposed weight", STACK + "1.xlstm.slstm_cell"),
    x_lstm_normaliser_bounded_by_one_in_evaluation=("a bound in eval", STACK + "2.xlstm.mlstm_cell", "eval"),
    x_lstm_last_feed_forward_gelu_by_tanh=("an approximate activation", STACK + "3.ffn.act_fn"),
)
wrong(
    task,
    PackedXLSTM,
    x_lstm_first_keys_scaled_by_the_width_of_all_heads=("another scale", STACK + "0.xlstm.mlstm_cell"),
    x_lstm_first_scalar_normaliser_without_gradient=("detach", STACK + "1.xlstm.slstm_cell", SLOPES),
    x_lstm_second_matrix_norm_over_all_heads=("a norm over other axes", STACK + "2.xlstm.mlstm_cell.outnorm"),
    x_lstm_second_convolution_taps_reversed=("a flipped kernel", (CONV, CONV + ".conv")),
)
