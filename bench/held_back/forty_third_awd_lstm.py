"""Two ports of a small AWD-LSTM: a ladder of cells stepped in time, and flat code over packed sheets."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._forty_third_awd_lstm import (
    ALPHA,
    BETA,
    BPTT,
    HIDDEN_P,
    OUTPUT_P,
    PAD,
    WEIGHT_P,
    LanguageModel,
    counting,
    next_token,
)
from bench.held_back._fourth_ports import Port, leaf, wrong
from bench.held_back._sixth_ports import few

task = few("forty_third_awd_lstm", LanguageModel, counting, next_token)


class Cell(nn.Module):
    """One time step of a layer, with weights by gate, and the mask of what follows it."""

    def __init__(self, rnn: nn.Module, after: nn.Module):
        super().__init__()
        lstm = rnn.module
        self.across, self.back = (
            leaf(w.unflatten(0, (4, -1)).mT) for w in (lstm.weight_ih_l0, lstm.weight_hh_l0)
        )
        self.shift = leaf(torch.stack([lstm.bias_ih_l0, lstm.bias_hh_l0]).unflatten(1, (4, 1, -1)))
        self.register_buffer("wires", rnn.mask.unflatten(0, (4, -1)).mT.clone())
        self.register_buffer("after", after.mask.flatten().clone())
        self.held, self.kept = 1 - rnn.weight_p, 1 - after.p
        self.swapped = self.always = False

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h, c = past
        back = self.back / self.held * self.wires if self.training or self.always else self.back
        write, keep, new, show = x @ self.across + h @ back + self.shift.sum(0)
        if self.swapped:
            write, keep = keep, write
        c = c / (1 + torch.exp(-keep)) + new.tanh() / (1 + torch.exp(-write))
        h = c.tanh() / (1 + torch.exp(-show))
        return h, (h, c)

    def thin(self, h: Tensor) -> Tensor:
        return h / self.kept * self.after if self.training else h


class Words(nn.Module):
    """The table that is read and asked, words as columns."""

    def __init__(self, model: LanguageModel):
        super().__init__()
        self.table, self.prior = leaf(model.encoder.encoder.weight.T), leaf(model.decoder.decoder.bias)

    def read(self, token: Tensor) -> Tensor:
        rows = self.table.T[token]
        return torch.where((token == PAD)[..., None], rows.detach(), rows)

    def ask(self, x: Tensor) -> Tensor:
        return x @ self.table + self.prior


class LadderOfCells(Port):
    """All the layers at each time step, time first."""

    def take(self, model: LanguageModel) -> None:
        body = model.encoder
        pairs = zip(body.rnns, (*body.hidden_dps, model.decoder.output_dp), strict=True)
        self.words, self.ladder = Words(model), nn.ModuleList(Cell(*pair) for pair in pairs)
        self.ladder[1].swapped = self.fault == "awd_lstm_second_layer_swaps_input_and_forget_gate"
        self.ladder[2].always = self.fault == "awd_lstm_third_layer_drops_weights_in_evaluation"

    def climb(self, x: Tensor, past: list) -> tuple[Tensor, Tensor, list]:
        now = []
        for cell, state in zip(self.ladder, past, strict=True):
            raw, state = cell(x, state)
            now.append(state)
            x = cell.thin(raw)
        return raw, x, now

    def cost(self, raw: Tensor, thin: Tensor) -> Tensor:
        if self.fault == "awd_lstm_activation_penalty_of_the_raw_output":
            thin = raw
        return ALPHA * thin.square().mean((0, 2)) + BETA * raw.diff(dim=0).square().mean((0, 2))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        inputs, cost, thins = self.words.read(tokens.T), 0, []
        zeros = [inputs.new_zeros(len(tokens), cell.back.shape[1]) for cell in self.ladder]
        past = [(zero, zero) for zero in zeros]
        for piece in inputs.split(BPTT):
            if self.fault != "awd_lstm_carried_states_keep_their_history":
                past = [tuple(x.detach() for x in state) for state in past]
            raws, thin = [], []
            for x in piece:
                raw, out, past = self.climb(x, past)
                raws.append(raw), thin.append(out)
            cost = cost + self.cost(torch.stack(raws), torch.stack(thin))
            thins += thin
        return self.words.ask(torch.stack(thins, 1)), cost


def rate(x: Tensor) -> Tensor:
    return (1 + (x / 2).tanh()) / 2


class PackedAwdLstm(Port):
    """A sheet for each layer: inputs, states and two offsets as rows; a layer runs over the whole text."""

    def take(self, model: LanguageModel) -> None:
        body, lstms = model.encoder, [rnn.module for rnn in model.encoder.rnns]
        self.sheets = nn.ParameterList(
            leaf(torch.cat([x.weight_ih_l0.T, x.weight_hh_l0.T, x.bias_ih_l0[None], x.bias_hh_l0[None]]))
            for x in lstms
        )
        self.words = leaf(torch.cat([body.encoder.weight, model.decoder.decoder.bias[:, None]], 1))
        for i, rnn in enumerate(body.rnns):
            self.register_buffer(f"wires_{i}", rnn.mask.T.bool())
        ends = (*body.hidden_dps, model.decoder.output_dp)
        self.register_buffer("locks", torch.cat([x.mask.flatten() for x in ends]))

    def layer(self, i: int, x: Tensor) -> Tensor:
        sheet, size = self.sheets[i], self.sheets[i].shape[1] // 4
        into, back, offsets = sheet.split([x.shape[2], size, 2])
        if self.training:
            back = back.masked_fill(~self.get_buffer(f"wires_{i}"), 0)
            if not (i == 0 and self.fault == "awd_lstm_first_layer_drops_weights_without_scaling"):
                back = back / (1 - WEIGHT_P)
        gate = rate
        if i == 2 and self.fault == "awd_lstm_third_layer_takes_hard_sigmoids":
            gate = lambda y: (0.2 * y + 0.5).clamp(0, 1)  # noqa: E731
        h = c = x.new_zeros(len(x), size)
        given, outs = x @ into + offsets.sum(0), []
        for t in range(x.shape[1]):
            if t == BPTT:
                h, c = h.detach(), c.detach()
            y = given[:, t] + h @ back
            a, f, o = gate(y[:, :size]), gate(y[:, size : 2 * size]), gate(y[:, 3 * size :])
            c = f * c + a * y[:, 2 * size : 3 * size].tanh()
            h = o * c.tanh()
            outs.append(h)
        return torch.stack(outs, 1)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        table, prior = self.words[:, :-1], self.words[:, -1]
        still = None if self.fault == "awd_lstm_padding_row_trained_as_a_word" else PAD
        x = F.embedding(tokens, table, padding_idx=still)
        locks = self.locks.split([sheet.shape[1] // 4 for sheet in self.sheets])
        for i, p in enumerate((HIDDEN_P, HIDDEN_P, OUTPUT_P)):
            raw = self.layer(i, x)
            x = raw * (locks[i] / (1 - p)) if self.training else raw
        cost = 0
        for dropped, plain in zip(x.split(BPTT, 1), raw.split(BPTT, 1), strict=True):
            moves = plain.shape[1] - 1
            if self.fault == "awd_lstm_temporal_penalty_averaged_over_all_steps":
                moves = moves + 1
            change = (plain[:, 1:] - plain[:, :-1]).square().mean(2).sum(1) / moves
            cost = cost + ALPHA * dropped.square().flatten(1).mean(1) + BETA * change
        return torch.einsum("nte,ve->ntv", x, table) + prior, cost


SLOPES = ("input gradient", "weight gradient")
right(
    task,
    "awd_lstm_as_a_ladder_of_cells",
    "a tree stepped in time, weights by gate",
    LadderOfCells,
)
right(task, "awd_lstm_of_packed_sheets", "packed sheets, layers over whole texts", PackedAwdLstm)
wrong(
    task,
    LadderOfCells,
    awd_lstm_second_layer_swaps_input_and_forget_gate=("another gate order", "encoder.rnns.1.module"),
    awd_lstm_third_layer_drops_weights_in_evaluation=("dropout in eval", "encoder.rnns.2", "eval"),
    awd_lstm_carried_states_keep_their_history=("a detach left out", "", SLOPES),
    awd_lstm_activation_penalty_of_the_raw_output=("another tensor", "regularizer"),
)
wrong(
    task,
    PackedAwdLstm,
    awd_lstm_padding_row_trained_as_a_word=("padding trained", "encoder.encoder", "weight gradient"),
    awd_lstm_first_layer_drops_weights_without_scaling=("a factor left out", "encoder.rnns.0"),
    awd_lstm_third_layer_takes_hard_sigmoids=("another activation", "encoder.rnns.2.module"),
    awd_lstm_temporal_penalty_averaged_over_all_steps=("a count off by one", "regularizer"),
)
