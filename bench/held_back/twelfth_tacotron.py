"""Two ports of Tacotron 2: a reader, a voice and a polish; and flat code with time first."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import Stats, right
from bench.held_back._fourth_ports import Port, Rows, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twelfth_tacotron import Tacotron2, get_mask_from_lengths, speech, tacotron2_loss

LOCATION = "decoder", "decoder.attention_layer", "decoder.attention_layer.location_layer"
task = few("twelfth_tacotron", Tacotron2, speech, tacotron2_loss)


def lines(*layers: nn.Module) -> list[Tensor]:
    return [layer.linear_layer.weight.T for layer in layers]


def gated(gates: Tensor, c: Tensor, lift: float = 0.0) -> tuple[Tensor, Tensor]:
    i, f, g, o = gates.chunk(4, -1)
    c = torch.addcmul(i.sigmoid() * g.tanh(), (f + lift).sigmoid(), c)
    return o.sigmoid() * c.tanh(), c


class Smooth(nn.Module):
    def __init__(self, unit: nn.Sequential, bend: Callable):
        super().__init__()
        self.weight, self.bias = leaf(unit[0].conv.weight), leaf(unit[0].conv.bias)
        self.norm, self.bend = Rows(unit[1]), bend

    def forward(self, x: Tensor) -> Tensor:
        return self.bend(self.norm(F.conv1d(x.mT, self.weight, self.bias, padding="same").mT))


class Cell(nn.Module):
    def __init__(self, w: list[Tensor]):
        super().__init__()
        self.lift, self.weight, self.bias = 0.0, leaf(torch.cat(w[:2], 1).T), pile(w[2:])

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        return gated(torch.cat([x, h], 1) @ self.weight + self.bias.sum(0), c, self.lift)


class Reader(nn.Module):
    """Characters to a memory: the state stands still where there is no character."""

    def __init__(self, model: Tacotron2):
        super().__init__()
        self.table, self.rests = leaf(model.embedding.weight), [True, True]
        self.smooth = nn.Sequential(*(Smooth(unit, torch.relu) for unit in model.encoder.convolutions))
        self.ways = nn.ModuleList(map(Cell, model.encoder.lstm.all_weights))

    def forward(self, text: Tensor, real: Tensor) -> Tensor:
        x, memory = self.smooth(self.table[text]), []
        for cell, rests, turn in zip(self.ways, self.rests, (1, -1), strict=True):
            state, states = x.new_zeros(2, len(x), x.shape[2] // 2), []
            for t in range(x.shape[1])[::turn]:
                state = torch.where(real[:, t, None] | (not rests), torch.stack(cell(x[:, t], *state)), state)
                states.append(state[0])
            memory.append(torch.stack(states[::turn], 1))
        return torch.cat(memory, 2) * real[..., None]


class Voice(nn.Module):
    """The frames of a memory, and the logits of their end in one more channel."""

    def __init__(self, decoder: nn.Module):
        super().__init__()
        look, ends = decoder.attention_layer, (decoder.linear_projection, decoder.gate_layer)
        place, rnns = look.location_layer, (decoder.attention_rnn, decoder.decoder_rnn)
        self.pre = nn.ParameterList(map(leaf, lines(*decoder.prenet.layers)))
        self.query, self.key, self.v = map(leaf, lines(look.query_layer, look.memory_layer, look.v))
        self.last, self.whole = map(leaf, place.location_conv.conv.weight.split(1, 1))
        self.mix, self.head = leaf(lines(place.location_dense)[0]), leaf(torch.cat(lines(*ends), 1))
        self.base = leaf(torch.cat([end.linear_layer.bias for end in ends]))
        self.cells = nn.ModuleList(Cell([*rnn.parameters()]) for rnn in rnns)

    def forward(self, memory: Tensor, real: Tensor, mels: Tensor) -> tuple[Tensor, Tensor]:
        frames = F.pad(mels, (1, -1)).mT
        for weight in self.pre:
            frames = (frames @ weight).relu()
        keys, context, looks, spoken = memory @ self.key, 0 * memory[:, 0], [0 * memory[..., 0]], []
        low, high = (memory.new_zeros(2, len(memory), cell.bias.shape[1] // 4) for cell in self.cells)
        for frame in frames.unbind(1):
            low = self.cells[0](torch.cat([frame, context], 1), *low)
            seen = F.conv1d(looks[-1][:, None], self.last, padding=3)
            seen = (seen + F.conv1d(sum(looks)[:, None], self.whole, padding=3)).mT @ self.mix
            energy = ((low[0] @ self.query)[:, None] + keys + seen).tanh() @ self.v
            looks.append(energy[..., 0].masked_fill(~real, -torch.inf).softmax(1))
            context = (looks[-1][:, :, None] * memory).sum(1)
            high = self.cells[1](torch.cat([low[0], context], 1), *high)
            spoken.append(torch.cat([high[0], context], 1) @ self.head + self.base)
        return torch.stack(spoken, 1), torch.stack(looks[1:], 1)


class ReaderVoicePolish(Port):
    def take(self, model: Tacotron2) -> None:
        self.reader, self.voice = Reader(model), Voice(model.decoder)
        last = torch.tanh if self.fault == "tacotron_postnet_bends_its_last_layer_too" else nn.Identity()
        self.polish = nn.Sequential(*map(Smooth, model.postnet.convolutions, (torch.tanh, torch.tanh, last)))
        self.reader.rests[1] = self.fault != "tacotron_backward_reader_starts_in_the_padding"
        self.voice.cells[1].lift = float(self.fault == "tacotron_frame_lstm_with_a_forget_bias_of_one")
        if self.fault == "tacotron_second_text_norm_with_the_momentum_of_keras":
            self.reader.smooth[1].norm.rate = 0.99

    def forward(self, text: Tensor, text_lengths: Tensor, mels: Tensor, output_lengths: Tensor):
        real = get_mask_from_lengths(text_lengths, text.shape[1])
        mask = get_mask_from_lengths(output_lengths, mels.shape[2])
        voiced, looks = self.voice(self.reader(text, real), real, mels)
        frames = voiced[..., :-1]
        both = ((x * mask[..., None]).mT for x in (frames, frames + self.polish(frames)))
        return *both, voiced[..., -1].where(mask, 1e3), looks


class TimeMajorSpeech(Port):
    """All of it on [T, N, C] in one class: windows, both directions at once, one product for the look."""

    def take(self, model: Tacotron2) -> None:
        units, decoder = [*model.encoder.convolutions, *model.postnet.convolutions], model.decoder
        self.table, look = leaf(model.embedding.weight), decoder.attention_layer
        self.kernels = nn.ParameterList(leaf(conv.conv.weight.permute(2, 1, 0)) for conv, _ in units)
        self.shifts = nn.ParameterList(leaf(conv.conv.bias) for conv, _ in units)
        self.norms = nn.ModuleList(Stats(norm) for _, norm in units)
        cells = [[*cell.parameters()] for cell in (decoder.attention_rnn, decoder.decoder_rnn)]
        both = [torch.stack(pair) for pair in zip(*model.encoder.lstm.all_weights, strict=True)]
        self.cells = nn.ParameterList(leaf(torch.cat(x[:2], -1).mT) for x in (*cells, both))
        self.bases = nn.ParameterList(leaf(torch.stack(x[2:], -2)) for x in (*cells, both))
        ends, place = (decoder.linear_projection, decoder.gate_layer), look.location_layer
        self.inner = leaf(torch.cat(lines(look.query_layer, look.memory_layer, place.location_dense)))
        self.taps = leaf(place.location_conv.conv.weight.permute(1, 2, 0))
        self.lines = nn.ParameterList(map(leaf, lines(*decoder.prenet.layers, *ends, look.v)))
        self.ends = nn.ParameterList(leaf(end.linear_layer.bias) for end in ends)

    def unit(self, i: int, x: Tensor) -> Tensor:
        windows = F.pad(x, (0, 0, 0, 0, 2, 2)).unfold(0, 5, 1)
        return self.norms[i](torch.einsum("tnck,kco->tno", windows, self.kernels[i]) + self.shifts[i])

    def step(self, i: int, state: tuple, *x: Tensor) -> tuple[Tensor, Tensor]:
        return gated(torch.cat([*x, state[0]], -1) @ self.cells[i] + self.bases[i].sum(-2, True), state[1])

    def read(self, text: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x = F.embedding(text.T, self.table, 0 if self.fault == "tacotron_padding_id_learns_nothing" else None)
        for i in range(3):
            x = self.unit(i, x).relu()
        real = (place := torch.arange(len(x), device=x.device)[:, None]) < lengths
        turn = torch.where(real, lengths - 1 - place, place)[..., None]
        state, states = x.new_zeros(2, 2, x.shape[1], x.shape[2] // 2), []
        for now in torch.stack([x, x.take_along_dim(turn, 0)], 1):
            state = self.step(2, state, now)
            states.append(state[0])
        ahead, back = torch.stack(states, 1)
        return torch.cat([ahead, back.take_along_dim(turn, 0)], -1) * real[..., None], real

    def look(self, h: Tensor, memory: Tensor, real: Tensor, looked: Tensor) -> Tensor:
        seen = torch.einsum("jtnk,jkf->tnf", F.pad(looked, (0, 0, 3, 3)).unfold(1, 7, 1), self.taps)
        inner = torch.cat([h.expand(len(memory), -1, -1), memory, seen], -1) @ self.inner
        energy = (inner.tanh() @ self.lines[4])[..., 0]
        if self.fault == "tacotron_attention_masked_after_its_softmax":
            return energy.softmax(0) * real
        return energy.masked_fill(~real, -torch.inf).softmax(0)

    def forward(self, text: Tensor, text_lengths: Tensor, mels: Tensor, output_lengths: Tensor):
        (memory, real), mels = self.read(text, text_lengths), mels.permute(2, 0, 1)
        frames = ((torch.cat([0 * mels[:1], mels[:-1]]) @ self.lines[0]).relu() @ self.lines[1]).relu()
        first, second = (memory.new_zeros(2, memory.shape[1], x.shape[-1] // 4) for x in self.bases[:2])
        whole, context, seen = 0 * memory[..., 0], 0 * memory[0], []
        looks, late = [whole], self.fault == "tacotron_weights_so_far_leave_out_the_last_step"
        for frame in frames:
            first = self.step(0, first, frame, context)
            looks.append(self.look(first[0], memory, real, torch.stack([looks[-1], whole])))
            whole = whole + looks[-2 if late else -1]
            context = torch.einsum("tn,tnc->nc", looks[-1], memory)
            second = self.step(1, second, first[0], context)
            seen.append(torch.cat([second[0], context], -1))
        frames, ends = (torch.stack(seen) @ self.lines[i + 2] + self.ends[i] for i in range(2))
        mask = torch.arange(len(mels), device=mels.device)[:, None] < output_lengths
        if self.fault == "tacotron_frames_cut_before_the_postnet":
            frames = frames * mask[..., None]
        y = frames + self.unit(5, self.unit(4, self.unit(3, frames).tanh()).tanh())
        both = ((x * mask[..., None]).permute(1, 2, 0) for x in (frames, y))
        return *both, ends[..., 0].where(mask, 1e3).T, torch.stack(looks[1:]).permute(2, 0, 1)


right(task, "tacotron_of_reader_voice_and_polish", "a tree with other borders", ReaderVoicePolish)
right(task, "tacotron_in_time_major_flat_code", "time major, windows, directions batched", TimeMajorSpeech)
wrong(
    task,
    ReaderVoicePolish,
    tacotron_postnet_bends_its_last_layer_too=("an activation too many", "postnet"),
    tacotron_backward_reader_starts_in_the_padding=("padding read", ("encoder.lstm", "encoder")),
    tacotron_frame_lstm_with_a_forget_bias_of_one=("forget bias added", "decoder.decoder_rnn"),
    tacotron_second_text_norm_with_the_momentum_of_keras=("momentum", "encoder.convolutions.1.1", "buffer"),
)
wrong(
    task,
    TimeMajorSpeech,
    tacotron_padding_id_learns_nothing=("no gradient of a row", "embedding", "weight gradient"),
    tacotron_attention_masked_after_its_softmax=("mask after the softmax", "decoder.attention_layer"),
    tacotron_weights_so_far_leave_out_the_last_step=("late sum", LOCATION),
    tacotron_frames_cut_before_the_postnet=("mask too early", ("", "postnet")),
)
