"""Two ports of a pair of session recommenders: a tree with joint tables, and one class of packed sheets."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fiftieth_next_item import DILATIONS, EMBEDDING, SessionPair, next_item_loss, sessions
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import Gates, few

task = few("fiftieth_next_item", SessionPair, sessions, next_item_loss)


def score_table(model: SessionPair) -> Tensor:
    outs = model.gru4rec.output, model.nextitnet.output
    return torch.cat([w for out in outs for w in (out.item_embedding.weight, out.item_bias.weight)], 1)


class Reader(nn.Module):
    """A recurrent cell over the session, which holds its state once the session is over."""

    def __init__(self, gru4rec: nn.Module, early: bool, from_start: bool):
        super().__init__()
        self.cell = Gates(dict(gru4rec.gru.named_parameters()), early, "_l0")
        self.fading, self.from_start = leaf(gru4rec.recency.weight), from_start

    def forward(self, x: Tensor, there: Tensor) -> Tensor:
        h = x.new_zeros(len(x), self.cell.u.shape[0])
        for t in range(x.shape[1]):
            ago = there[:, :t].sum(1) if self.from_start else there[:, t + 1 :].sum(1)
            h = torch.where(there[:, t, None], self.cell(x[:, t] * self.fading[ago, None], h), h)
        return h


class Filter(nn.Module):
    """Three taps into the past of [N, T, C] as one product, a norm, and what is positive of it."""

    def __init__(self, conv: nn.Conv1d, norm: nn.LayerNorm, back: int):
        super().__init__()
        self.taps, self.offset = leaf(conv.weight.permute(2, 1, 0).flatten(0, 1)), leaf(conv.bias)
        self.gain, self.shift, self.back = leaf(norm.weight), leaf(norm.bias), back

    def forward(self, x: Tensor) -> Tensor:
        past = [F.pad(x, (0, 0, k * self.back, 0))[:, : x.shape[1]] for k in (2, 1, 0)]
        y = torch.cat(past, 2) @ self.taps + self.offset
        return F.layer_norm(y, y.shape[2:], self.gain, self.shift).relu()


class Ladder(nn.Module):
    def __init__(self, net: nn.Module, shorter: bool):
        super().__init__()
        self.rungs = nn.ModuleList()
        for i, (block, rate) in enumerate(zip(net.residual_blocks, DILATIONS, strict=True)):
            twice = rate if shorter and i == 2 else 2 * rate
            self.rungs.extend((Filter(block.conv1, block.ln1, rate), Filter(block.conv2, block.ln2, twice)))
        self.end, self.late = leaf(net.final_layer.weight), leaf(net.final_layer.bias)

    def forward(self, x: Tensor, there: Tensor) -> Tensor:
        for one, two in zip(self.rungs[::2], self.rungs[1::2], strict=True):
            x = x + two(one(x))
        last = there & ~F.pad(there, (0, 1))[:, 1:]
        return (x * last[:, :, None]).sum(1) @ self.end.T + self.late


class Contest(nn.Module):
    silent = False

    def forward(self, scores: Tensor, candidates: Tensor) -> Tensor:
        good, bad = scores.split([1, scores.shape[1] - 1], 1)
        kept = (candidates[:, 1:] != candidates[:, :1]).to(scores)
        share = bad.exp() * kept
        share = share / share.sum(1, keepdim=True)
        share = share.detach() if self.silent else share
        rise = (bad - good).sigmoid()
        first = 0.3 * (share * bad**2).sum(1) - (share * (1 - rise)).sum(1).log()
        return first + ((rise + (bad**2).sigmoid()) * kept).sum(1) / kept.sum(1)


class SessionTree(Port):
    """Joint tables of the items for both recommenders; the gate scales the states, not the scores."""

    def take(self, model: SessionPair) -> None:
        one, two, fault = model.gru4rec, model.nextitnet, self.fault
        self.read = leaf(torch.cat([two.item_embedding.weight, one.item_embedding.weight], 1))
        early = fault == "next_item_gru_resets_the_state_before_its_product"
        self.reader = Reader(one, early, fault == "next_item_recency_counted_from_the_first_item")
        self.ladder = Ladder(two, fault == "next_item_third_block_does_not_double_its_dilation")
        self.contest = Contest()
        self.contest.silent = fault == "next_item_bpr_max_weights_without_gradient"
        self.score, self.people = leaf(score_table(model)), leaf(model.user_embedding.weight)
        self.tilt, self.rest = leaf(model.gate.dense.weight.T), leaf(model.gate.dense.bias)
        self.sides = leaf(torch.cat([model.gate.out.weight[0], model.gate.out.bias]))

    def forward(self, items: Tensor, users: Tensor, candidates: Tensor) -> dict[str, Tensor]:
        there, user = items > 0, self.people[users]
        x = torch.where(there[:, :, None], self.read[items], 0)
        h, f = self.reader(x[:, :, -EMBEDDING:], there), self.ladder(x[:, :, :-EMBEDDING], there)
        lean = (user @ self.tilt + self.rest).tanh() @ self.sides[:-1, None] + self.sides[-1]
        a, b = lean.sigmoid(), (-lean).sigmoid()
        full = torch.cat([a * h, a, b * f, b], 1) @ self.score.T
        scores = full.gather(1, candidates)
        used = self.score[candidates].square().sum(1)
        used = used[:, :-1].sum(1) - used[:, h.shape[1]]
        return {
            "scores": scores,
            "log_probs": F.pad(full[:, 1:] - full[:, 1:].logsumexp(1, keepdim=True), (1, 0)),
            "ranking": self.contest(scores, candidates),
            "squares": used + x.square().sum((1, 2)) + user.square().sum(1),
        }


class FlatSession(Port):
    """Sheets of packed weights, and loops."""

    def take(self, model: SessionPair) -> None:
        one, two, gate = model.gru4rec, model.nextitnet, model.gate
        pairs = [p for b in two.residual_blocks for p in ((b.conv1, b.ln1), (b.conv2, b.ln2))]
        columns = ((c.weight.flatten(1), torch.stack([c.bias, n.weight, n.bias], 1)) for c, n in pairs)
        self.convs = pile(torch.cat(each, 1) for each in columns)
        cell = (p.reshape(len(p), -1) for p in one.gru.parameters())
        self.cell = leaf(torch.cat([*cell], 1))
        self.recency = leaf(one.recency.weight)
        self.tables = leaf(torch.cat([one.item_embedding.weight, two.item_embedding.weight], 1).T)
        self.outs, self.users = leaf(score_table(model).T), leaf(model.user_embedding.weight.T)
        self.final = leaf(torch.cat([two.final_layer.weight, two.final_layer.bias[:, None]], 1))
        self.gate = leaf(torch.cat([gate.dense.weight, gate.dense.bias[:, None], gate.out.weight.T], 1))
        self.gate_bias = leaf(gate.out.bias)

    def recur(self, x: Tensor, n: Tensor) -> Tensor:
        h, states = x.new_zeros(len(x), len(self.cell) // 3), []
        w, u, b, c = self.cell.split([x.shape[2], h.shape[1], 1, 1], 1)
        for t in range(x.shape[1]):
            step = x[:, t] * self.recency[(n - 1 - t).clamp(min=0), None]
            (r, z, i), (rr, zz, j) = (y.chunk(3, 1) for y in (step @ w.T + b.T[0], h @ u.T + c.T[0]))
            z = torch.sigmoid(z + zz)
            h = (1 - z) * torch.tanh(i + torch.sigmoid(r + rr) * j) + z * h
            states.append(h)
        if self.fault == "next_item_gru_read_at_the_last_step_in_evaluation" and not self.training:
            return h
        return torch.stack(states)[n - 1, torch.arange(len(x))]

    def convolve(self, x: Tensor) -> Tensor:
        y = x
        for k, sheet in enumerate(self.convs):
            rate = DILATIONS[k // 2] * (1 + k % 2)
            kernel, offset = sheet[:, :-3].unflatten(1, (-1, 3)), sheet[:, -3]
            y = F.conv1d(F.pad(y, (2 * rate, 0)), kernel, offset, dilation=rate)
            var, mean = torch.var_mean(y, 1, correction=0, keepdim=True)
            wide = self.fault == "next_item_second_block_first_norm_with_the_eps_of_keras" and k == 2
            y = (y - mean) / (var + (1e-3 if wide else 1e-5)).sqrt()
            y = F.relu(y * sheet[:, -2:-1] + sheet[:, -1:])
            if k % 2:
                x = y = x + y
        return x

    def forward(self, items: Tensor, users: Tensor, candidates: Tensor) -> dict[str, Tensor]:
        n, batch = (items != 0).sum(1), torch.arange(len(items))
        x, user = self.tables.T[items] * (items != 0)[..., None], self.users.T[users]
        h, f = self.recur(x[..., :EMBEDDING], n), self.convolve(x[..., EMBEDDING:].mT)[batch, :, n - 1]
        f = f @ self.final[:, :-1].T + self.final[:, -1]
        inner = torch.tanh(user @ self.gate[:, :-2].T + self.gate[:, -2])
        share = torch.sigmoid(inner @ self.gate[:, -1:] + self.gate_bias)
        v, p, w, q = self.outs.split([h.shape[1], 1, f.shape[1], 1])
        full = f @ w + q + share * (h @ v + p - f @ w - q)
        scores = full[batch[:, None], candidates]
        good, bad, kept = scores[:, :1], scores[:, 1:], candidates[:, 1:] != candidates[:, :1]
        log = bad.masked_fill(~kept, -1e9).log_softmax(1)
        loss = 0.3 * (log.exp() * bad * bad).sum(1) - (log + F.logsigmoid(good - bad)).logsumexp(1)
        size = bad if self.fault == "next_item_top1_regularizes_the_score_not_its_square" else bad * bad
        each = torch.sigmoid(bad - good) + torch.sigmoid(size)
        skip = 0 if self.fault == "next_item_softmax_counts_the_padding_item" else 1
        used = (torch.cat([v, w]) ** 2).sum(0)[candidates].sum(1)
        return {
            "scores": scores,
            "log_probs": F.pad(full[:, skip:].log_softmax(1)[:, 1 - skip :], (1, 0)),
            "ranking": loss + each.where(kept, 0).sum(1) / kept.sum(1),
            "squares": used + (x**2).sum((1, 2)) + (user**2).sum(1),
        }


BLOCKS, SLOPES = "nextitnet.residual_blocks", ("input gradient", "weight gradient")
right(task, "next_item_tree_of_joint_tables", "joint tables, channels last, gated states", SessionTree)
right(task, "next_item_flat_sheets", "packed sheets, loops, logs of sums", FlatSession)
wrong(
    task,
    SessionTree,
    next_item_recency_counted_from_the_first_item=("positions from the other end", "gru4rec.recency"),
    next_item_gru_resets_the_state_before_its_product=("another order of a gate", "gru4rec.gru"),
    next_item_third_block_does_not_double_its_dilation=("another dilation", f"{BLOCKS}.2.conv2"),
    next_item_bpr_max_weights_without_gradient=("detach", "ranking.bpr_max", SLOPES),
)
wrong(
    task,
    FlatSession,
    next_item_gru_read_at_the_last_step_in_evaluation=("padding read in eval", "gru4rec", "eval"),
    next_item_second_block_first_norm_with_the_eps_of_keras=("another eps", f"{BLOCKS}.1.ln1"),
    next_item_softmax_counts_the_padding_item=("a mask left out", "full_softmax"),
    next_item_top1_regularizes_the_score_not_its_square=("a square left out", "ranking.top1"),
)
