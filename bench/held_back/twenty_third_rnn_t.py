"""Two ports of an RNN transducer: cells that step under a mask, and one class of stacked weights."""

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, Rows, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twenty_third_rnn_t import RNNTModel, per_label, utterances

task = few("twenty_third_rnn_t", RNNTModel, utterances, per_label)
NEVER, SLOPES, FRONT = -1e9, ("input gradient", "weight gradient"), "encoder.pre_encode"


class Ear(nn.Module):
    """Frames [N, T, F], bands first inside -> half as many [N, T, D], and which are real [N, T, 1]."""

    def __init__(self, old: nn.Module):
        super().__init__()
        self.near, self.near_b = leaf(old.conv1.weight.mT), leaf(old.conv1.bias)
        self.far, self.far_b = leaf(old.conv2.weight.mT), leaf(old.conv2.bias)
        self.level, self.mix, self.open = Rows(old.norm), deepcopy(old.out), False

    def forward(self, sound: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        x = F.conv2d(sound.mT[:, None], self.near, self.near_b, 2, 1).movedim(1, 3)
        real = (2 * torch.arange(x.shape[2], device=x.device) < count[:, None]).to(x)[:, :, None]
        x = self.level(x).clamp(min=0) * (1 if self.open else real[:, None])
        x = F.conv2d(x.movedim(3, 1), self.far, self.far_b, (2, 1), 1).clamp(min=0)
        return self.mix(x.flatten(1, 2).mT), real


def celled(make: type, weights: list[Tensor]) -> nn.Module:
    """A cell with the weights of one way through one layer."""
    cell = make(weights[0].shape[1], weights[1].shape[1]).to(weights[0])
    cell.load_state_dict(dict(zip(cell.state_dict(), weights, strict=True)))
    return cell


class Walk(nn.Module):
    """A memory that walks one way through [N, T, C], and is empty wherever a row is."""

    def __init__(self, weights: list[Tensor], back: bool = False):
        super().__init__()
        self.cell, self.back = celled(nn.LSTMCell, weights), back

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        h = c = x.new_zeros(len(x), self.cell.hidden_size)
        said = [h] * x.shape[1]
        for t in sorted(range(len(said)), reverse=self.back):
            h, c = (state * real[:, t] for state in self.cell(x[:, t], (h, c)))
            said[t] = h
        return torch.stack(said, 1)


class PartsOfSpeech(Port):
    """An ear, walks, a speller and their meeting; the loss goes by diagonals of the lattice."""

    def take(self, model: RNNTModel) -> None:
        old, joint, (table, spell) = model.encoder, model.joint, model.decoder.children()
        self.ear, self.norm, self.table = Ear(old.pre_encode), deepcopy(old.norm), leaf(table.weight)
        self.around = nn.ModuleList(map(Walk, old.pre_rnn.all_weights, (False, True)))
        self.ahead = nn.ModuleList(map(Walk, old.post_rnn.all_weights))
        self.cell = celled(nn.GRUCell, *spell.all_weights)
        self.heard, self.told, self.say = deepcopy([joint.enc, joint.pred, joint.joint_net[1]])
        self.ear.open = self.fault == "rnn_t_second_convolution_reads_what_the_first_left_in_the_padding"
        repeats = self.fault == "rnn_t_time_reduction_repeats_an_odd_last_frame"
        self.mode = "replicate" if repeats else "constant"

    def forward(self, signal: Tensor, length: Tensor, targets: Tensor, target_length: Tensor) -> dict:
        x, real = self.ear(signal, length)
        x = torch.cat([walk(x, real) for walk in self.around], 2).mT
        x = F.pad(x, (0, x.shape[2] % 2), self.mode)
        x, real = self.norm(torch.cat([x[:, :, ::2], x[:, :, 1::2]], 1).mT), real[:, ::2]
        for walk in self.ahead:
            x = walk(x, real)
        x, spelled = self.heard(x)[:, :, None], self.told(self.spelled(targets))[:, None]
        odds = (odds := self.say((x + spelled).tanh())) - odds.logsumexp(3, keepdim=True)
        chance = self.reached(odds, targets, real[:, :, 0].sum(1).long() - 1, target_length)
        return {"log_probs": odds, "losses": -chance}

    def spelled(self, labels: Tensor) -> Tensor:
        table = self.table
        if self.fault == "rnn_t_embedding_of_the_blank_gets_no_gradient":
            table = torch.cat([table[:1].detach(), table[1:]])
        states = [self.cell(table[:1]).expand(len(labels), -1)]
        for column in labels.unbind(1):
            states.append(self.cell(table[column], states[-1]))
        return torch.stack(states, 1)

    def reached(self, odds: Tensor, labels: Tensor, last: Tensor, counts: Tensor) -> Tensor:
        """Every step of a way leads to the next diagonal, by a blank or by a label."""
        rows, u = (torch.arange(odds.shape[axis], device=odds.device) for axis in (0, 2))
        line = [at := F.pad(odds.new_zeros(len(rows), 1), (0, len(u) - 1), value=NEVER)]
        for step in range(1, odds.shape[1] + len(u) - 1):
            before, now = ((step - i - u).clamp(0, odds.shape[1] - 1) for i in (1, 0))
            says = F.pad(at[:, :-1] + odds[rows[:, None], now[1:], u[:-1], labels], (1, 0), value=NEVER)
            line.append(at := torch.logaddexp(at + odds[:, before, u, 0], says))
        end = torch.stack(line, 1)[rows, last + counts, counts]
        whole = self.fault != "rnn_t_last_blank_left_out_of_the_sum"
        return end + odds[rows, last, counts, 0] if whole else end


class StackedTransducer(Port):
    """Time first, rows turned round for the way back, the loss frame by frame."""

    def take(self, model: RNNTModel) -> None:
        old, joint, (table, gru) = model.encoder, model.joint, model.decoder.children()
        near, norm, far, mix = old.pre_encode.children()
        layers = {"near": near, "far": far, "mix": mix, "say": joint.joint_net[1]}
        self.w = nn.ParameterDict({use: leaf(layer.weight.flatten(1)) for use, layer in layers.items()})
        self.b = nn.ParameterDict({use: leaf(layer.bias) for use, layer in layers.items()})
        self.meet = leaf(torch.cat([joint.enc.weight, joint.pred.weight], 1))
        self.meet_b, self.names = pile([joint.enc.bias, joint.pred.bias]), leaf(table.weight)
        self.around = nn.ParameterList(map(pile, zip(*old.pre_rnn.all_weights, strict=True)))
        self.ahead, self.spell = (nn.ParameterList(map(leaf, x.parameters())) for x in (old.post_rnn, gru))
        self.rate, self.eps, self.small = norm.momentum, norm.eps, old.norm.eps
        self.level, self.scales = (pile([x.weight, x.bias]) for x in (norm, old.norm))
        self.register_buffer("kept", torch.stack([norm.running_mean, norm.running_var]))
        self.register_buffer("seen", norm.num_batches_tracked.clone())

    def windows(self, use: str, x: Tensor, stride: int) -> Tensor:
        cells = self.w[use] @ F.unfold(x, 3, padding=1, stride=(stride, 2)) + self.b[use][:, None]
        return cells.unflatten(2, (-1, (x.shape[3] + 1) // 2))

    def leveled(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
            return F.batch_norm(x, *self.kept, *self.level, True, self.rate, self.eps)
        spread = (self.kept[1] + self.eps).sqrt()
        scale = self.level[0] / spread
        bare = self.fault == "rnn_t_first_norm_folds_its_mean_without_the_gain_in_evaluation"
        shift = self.level[1] - self.kept[0] * (1 / spread if bare else scale)
        return x * scale[:, None, None] + shift[:, None, None]

    def memory(self, x: Tensor, weights: list[Tensor]) -> Tensor:
        h = x.new_zeros(len(weights) // 4, x.shape[1], weights[1].shape[1])
        return torch.lstm(x, (h, h), weights, True, len(h), 0.0, False, False, False)[0]

    def forward(self, signal: Tensor, length: Tensor, targets: Tensor, target_length: Tensor) -> dict:
        last, x = (length - 1) // 2, F.relu(self.leveled(self.windows("near", signal[:, None], 2)))
        times, rows = (torch.arange(x.shape[axis], device=x.device) for axis in (2, 0))
        real, back = times[:, None] <= last, last - times[:, None]
        x = F.relu(self.windows("far", torch.where(real.T[:, None, :, None], x, 0), 1))
        x = F.linear(x.permute(2, 0, 1, 3).flatten(2), self.w["mix"], self.b["mix"])
        if self.fault == "rnn_t_backward_direction_begins_in_the_padding":
            back = times.flip(0)[:, None].expand_as(back)
        ahead, behind = ([w[i] for w in self.around] for i in (0, 1))
        behind = self.memory(x[back, rows], behind)[back, rows]
        x = torch.cat([self.memory(x, ahead), behind], 2) * real[:, :, None]
        x = F.pad(x, (0, 0, 0, 0, 0, len(x) % 2)).unflatten(0, (-1, 2)).transpose(1, 2).flatten(2)
        fair = self.fault == "rnn_t_stacked_norm_divides_by_the_corrected_deviation"
        spread, mean = torch.var_mean(x, 2, correction=int(fair), keepdim=True)
        x = (x - mean) / (spread + self.small).sqrt() * self.scales[0] + self.scales[1]
        x = self.memory(x, [*self.ahead]) * real[::2, :, None]
        told = self.names[F.pad(targets.T, (0, 0, 1, 0))]
        h = x.new_zeros(1, len(rows), self.spell[1].shape[1])
        spelled = torch.gru(told, h, [*self.spell], True, 1, 0.0, False, False, False)[0]
        both = [part.expand(len(x), len(spelled), -1, -1) for part in (x[:, None], spelled)]
        z = 2 * torch.sigmoid(2 * F.linear(torch.cat(both, 3), self.meet, self.meet_b.sum(0))) - 1
        odds = F.linear(z, self.w["say"], self.b["say"]).log_softmax(3)
        losses = self.lost(odds, targets.T, last // 2, target_length)
        return {"log_probs": odds.permute(2, 0, 1, 3), "losses": losses}

    def lost(self, odds: Tensor, labels: Tensor, last: Tensor, counts: Tensor) -> Tensor:
        names = odds[:, :-1].gather(3, labels[None, :, :, None].expand(len(odds), -1, -1, -1))[..., 0]
        if self.fault == "rnn_t_loss_strengthens_the_gradient_of_the_labels":
            names = names + 0.1 * (names - names.detach())
        said, blanks = F.pad(names.cumsum(1), (0, 0, 1, 0)), odds[..., 0]
        ends = [said[0] + blanks[0]]
        for t in range(1, len(odds)):
            ends.append(said[t] + torch.logcumsumexp(ends[-1] - said[t], 0) + blanks[t])
        return -torch.stack(ends)[last, counts, torch.arange(len(counts), device=odds.device)]


right(task, "rnn_t_of_walks_and_diagonals", "cells under a mask, a lattice by diagonals", PartsOfSpeech)
right(task, "rnn_t_of_stacks_and_turned_rows", "stacked weights, a lattice by frames", StackedTransducer)
wrong(
    task,
    PartsOfSpeech,
    rnn_t_second_convolution_reads_what_the_first_left_in_the_padding=("mask left out", FRONT),
    rnn_t_time_reduction_repeats_an_odd_last_frame=("other padding", "encoder.stack_time"),
    rnn_t_embedding_of_the_blank_gets_no_gradient=("frozen row", "decoder.embed", "weight gradient"),
    rnn_t_last_blank_left_out_of_the_sum=("last term left out", "loss"),
)
wrong(
    task,
    StackedTransducer,
    rnn_t_first_norm_folds_its_mean_without_the_gain_in_evaluation=("folded", f"{FRONT}.norm", "eval"),
    rnn_t_backward_direction_begins_in_the_padding=("lengths ignored", ("encoder.pre_rnn", "encoder")),
    rnn_t_stacked_norm_divides_by_the_corrected_deviation=("corrected variance", "encoder.norm"),
    rnn_t_loss_strengthens_the_gradient_of_the_labels=("gradient scaled", "loss", SLOPES),
)
