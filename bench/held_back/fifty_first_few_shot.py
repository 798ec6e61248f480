"""Two ports of a small few-shot learner: a tree with the channels last, and one class of packed sheets."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import Stats, right
from bench.held_back._fifty_first_few_shot import STEPS, FewShotLearner, episodes, three_losses
from bench.held_back._fourth_ports import Port, leaf, pile, spatial, wrong
from bench.held_back._sixth_ports import few

task = few("fifty_first_few_shot", FewShotLearner, episodes, three_losses)


class Look(nn.Module):
    """Windows of [N, H, W, C], normed; the largest of each square is taken before it is cut at zero."""

    def __init__(self, block: nn.Sequential):
        super().__init__()
        self.kernel, self.offset = leaf(block[0].weight), leaf(block[0].bias)
        self.norm, self.halve = Stats(block[1]), len(block) > 3

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(spatial(x, self.kernel, self.offset))
        if self.halve:
            x = x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).amax((2, 4))
        return x.relu()


def cell(source: nn.Module, end: str = "") -> nn.LSTMCell:
    made = nn.LSTMCell(source.input_size, source.hidden_size)
    made.load_state_dict({name: getattr(source, name + end) for name in made.state_dict()})
    return made


class Context(nn.Module):
    """What the samples of a support are among the others, then what the queries are to them."""

    def __init__(self, model: FewShotLearner):
        super().__init__()
        self.there, self.back = cell(model.g.lstm, "_l0"), cell(model.g.lstm, "_l0_reverse")
        self.reader = cell(model.f.lstm_cell)

    def forward(self, known: Tensor, asked: Tensor) -> tuple[Tensor, Tensor]:
        seen, order = [*known.unbind(1)], range(known.shape[1])
        for walk, way in ((self.there, order), (self.back, order[::-1])):
            state = None
            for t in way:
                state = walk(known[:, t], state)
                seen[t] = seen[t] + state[0]
        known, h, c = torch.stack(seen, 1), asked, torch.zeros_like(asked).flatten(0, 1)
        for _ in range(STEPS):
            mixed = F.scaled_dot_product_attention(h, known, known, scale=1.0)
            h, c = self.reader(asked.flatten(0, 1), ((h + mixed).flatten(0, 1), c))
            h = asked + h.view_as(asked)
        return known, h


class Pairs(nn.Module):
    def __init__(self, net: nn.Module):
        super().__init__()
        self.look, self.swapped = Look(net.layer1), False
        self.hidden, self.last = leaf(net.fc1.weight.unflatten(1, (-1, 2, 3))), leaf(net.fc2.weight[0])
        self.offset, self.end = leaf(net.fc1.bias), leaf(net.fc2.bias)

    def forward(self, means: Tensor, asked: Tensor) -> Tensor:
        (e, w, *shape), q = means.shape, asked.shape[1]
        pair = [means[:, None].expand(e, q, w, *shape), asked[:, :, None].expand(e, q, w, *shape)]
        x = self.look(torch.cat(pair[::-1] if self.swapped else pair, -1).flatten(0, 2))
        x = (torch.einsum("nhwc,kchw->nk", x, self.hidden) + self.offset).clamp(min=0)
        return (x @ self.last + self.end).sigmoid().view(e, q, w)


class TreeLearner(Port):
    """Looks with the channels last, pairs of maps, and a context of cells."""

    def take(self, model: FewShotLearner) -> None:
        self.looks = nn.Sequential(*map(Look, model.encoder))
        self.pairs, self.context = Pairs(model.relation), Context(model)
        self.heat, self.eps = leaf(model.proto.log_temperature), model.calibration.eps
        self.looks[2].norm.by_images = self.fault == "few_shot_third_norm_corrects_variance_by_images"
        self.pairs.swapped = self.fault == "few_shot_relation_puts_the_query_before_the_prototype"

    def match(self, known: Tensor, asked: Tensor) -> Tensor:
        lost = int(self.fault == "few_shot_calibration_takes_the_corrected_spread_of_the_support")
        wide = known.var(1, correction=lost, keepdim=True) + self.eps
        rate = (wide / (asked.var(1, correction=0, keepdim=True) + self.eps)).sqrt()
        return known.mean(1, True) + rate * (asked - asked.mean(1, True))

    def forward(self, support: Tensor, onehot: Tensor, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (e, s), q = support.shape[:2], query.shape[1]
        both = torch.cat([support.flatten(0, 1), query.flatten(0, 1)]).permute(0, 2, 3, 1)
        known, asked = (x.unflatten(0, (e, -1)) for x in self.looks(both).split([e * s, e * q]))
        share = onehot / onehot.sum(1, keepdim=True)
        means = (share.mT @ known.flatten(2)).unflatten(2, known.shape[2:])
        if self.fault == "few_shot_prototypes_made_without_gradient":
            means = means.detach()
        scores = self.pairs(means, asked)
        known, asked, means = (x.movedim(4, 2).flatten(2) for x in (known, asked, means))
        asked = asked if self.training else self.match(known, asked)
        far = asked.square().sum(2, True) + means.square().sum(2)[:, None] - 2 * asked @ means.mT
        known, asked = self.context(known, asked)
        likeness = (F.normalize(asked, dim=2) @ F.normalize(known, dim=2).mT).exp()
        likeness = likeness * (onehot.sum(2) > 0)[:, None]
        likeness = likeness @ onehot / likeness.sum(2, True)
        return -far * self.heat.exp(), scores, (likeness + 1e-6).log()


class PackedLearner(Port):
    """Sheets of kernels with their offsets and gains, one stack of three cells, and functions."""

    def take(self, model: FewShotLearner) -> None:
        blocks, net, lstm = [*model.encoder, model.relation.layer1], model.relation, model.g.lstm
        rows = [(a.weight.flatten(1), a.bias, b.weight, b.bias) for a, b, *_ in blocks]
        self.sheets = nn.ParameterList(leaf(torch.column_stack(row)) for row in rows)
        for k, (_, norm, *_) in enumerate(blocks):
            self.register_buffer(f"kept_{k}", torch.stack([norm.running_mean, norm.running_var]))
        names, ends = ("weight_ih", "weight_hh", "bias_ih", "bias_hh"), ("_l0", "_l0_reverse", "")
        sources = zip((lstm, lstm, model.f.lstm_cell), ends, strict=True)
        self.cells = pile(torch.column_stack([getattr(m, n + e) for n in names]).T for m, e in sources)
        self.hidden = leaf(torch.cat([net.fc1.weight.T, net.fc1.bias[None]]))
        self.last = leaf(torch.cat([net.fc2.weight[0], net.fc2.bias, model.proto.log_temperature[None]]))

    def norm(self, k: int, x: Tensor) -> Tensor:
        kept, (gain, offset) = self.get_buffer(f"kept_{k}"), self.sheets[k][:, -2:].T
        return F.batch_norm(x, kept[0], kept[1], gain, offset, self.training)

    def cell(self, k: int, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        ones = torch.ones_like(x[..., :2])
        i, f, g, o = (torch.cat([x, h, ones], -1) @ self.cells[k]).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return c.tanh() * o.sigmoid(), c

    def forward(self, support: Tensor, onehot: Tensor, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (e, s, ways), q = onehot.shape, query.shape[1]
        x = torch.cat([support.flatten(0, 1), query.flatten(0, 1)])
        for k in range(4):
            y = self.sheets[k][:, :-3] @ F.unfold(x, 3, padding=1) + self.sheets[k][:, -3:-2]
            x = self.norm(k, y.unflatten(2, x.shape[2:])).relu()
            if k == 1 and self.fault == "few_shot_second_pool_takes_the_mean":
                x = F.avg_pool2d(x, 2)
            elif k < 3:
                x = F.max_pool2d(x, 2)
        known, asked = (part.unflatten(0, (e, -1)) for part in x.split([e * s, e * q]))
        means = torch.einsum("eschv,esw->ewchv", known, onehot) / onehot.sum(1).view(e, ways, 1, 1, 1)
        one, two = self.sheets[4][:, :-3].unflatten(1, (-1, 3, 3)).chunk(2, 1)
        x = F.conv2d(means.flatten(0, 1), one, padding=1).unflatten(0, (e, 1, ways))
        y = F.conv2d(asked.flatten(0, 1), two, self.sheets[4][:, -3], padding=1)
        pairs = self.norm(4, (x + y.unflatten(0, (e, q, 1))).flatten(0, 2)).relu().flatten(1)
        pairs = (pairs @ self.hidden[:-1] + self.hidden[-1]).relu() @ self.last[:-2] + self.last[-2]
        known, asked, means = (part.flatten(2) for part in (known, asked, means))
        if not self.training:
            (v, m), (w, n) = (torch.var_mean(part, 1, correction=0, keepdim=True) for part in (known, asked))
            asked = (asked - n) * ((v + 0.01) / (w + 0.01)).sqrt() + m
        fixed = self.fault == "few_shot_temperature_taken_for_a_constant"
        heat = self.last[-1].detach() if fixed else self.last[-1]
        logits = -(heat.exp() * (means.unsqueeze(1) - asked.unsqueeze(2)).square()).sum(3)
        found = []
        for k, turned in enumerate((known, known.flip(1))):
            h, c, states = *torch.zeros_like(known[None, :, 0]).expand(2, -1, -1), []
            for t in range(s):
                h, c = self.cell(k, turned[:, t], h, c)
                states.append(h)
            found.append(torch.stack(states, 1))
        turn = self.fault != "few_shot_backward_context_not_turned_round_again"
        known = known + found[0] + (found[1].flip(1) if turn else found[1])
        h = c = torch.zeros_like(asked)
        for _ in range(STEPS):
            asks = h if self.fault == "few_shot_attention_asks_without_the_query_itself" else h + asked
            weights = torch.einsum("eqd,esd->eqs", asks, known).softmax(2)
            h, c = self.cell(2, asked, h + asked + weights @ known, c)
        asked = h + asked
        likeness = asked @ known.mT / asked.norm(dim=2)[:, :, None] / known.norm(dim=2)[:, None]
        likeness = likeness + (onehot.sum(2) > 0).to(asked).log()[:, None]
        return logits, pairs.sigmoid().view(e, q, ways), (likeness.softmax(2) @ onehot + 1e-6).log()


SLOPES = ("input gradient", "weight gradient")
right(task, "few_shot_tree_with_channels_last", "a tree, cells by step, other formulas", TreeLearner)
right(task, "few_shot_of_packed_sheets", "packed weights, split convolution, flat code", PackedLearner)
wrong(
    task,
    TreeLearner,
    few_shot_third_norm_corrects_variance_by_images=(
        "another count",
        "encoder.2.1",
        ("buffer", "eval"),
    ),
    few_shot_prototypes_made_without_gradient=("detach", "prototypes", SLOPES),
    few_shot_relation_puts_the_query_before_the_prototype=("swapped parts", "relation"),
    few_shot_calibration_takes_the_corrected_spread_of_the_support=("unbiased", "calibration", "eval"),
)
wrong(
    task,
    PackedLearner,
    few_shot_second_pool_takes_the_mean=("another pooling", "encoder.1.3"),
    few_shot_backward_context_not_turned_round_again=("an axis not flipped back", "g.lstm"),
    few_shot_attention_asks_without_the_query_itself=("a term left out", "f"),
    few_shot_temperature_taken_for_a_constant=("detach", "proto", "weight gradient"),
)
