"""True rewrites of bidirectional LSTMs and GRUs over padded sequences."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from bench.case import case, in_place_of
from bench.cases._heldout_sequences import PackedLSTM, packed_lstm, tagger
from bench.cases._rewritten import SAME, copied, filled, rewritten
from bench.surgery import recast

PARTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
BOTH = ("", "_reverse")


def _part(rnn: nn.RNNBase, part: str, layer: int, direction: str) -> Tensor:
    return getattr(rnn, f"{part}_l{layer}{direction}")


@in_place_of("", SAME, "bidirectional as two LSTMs", packed_lstm, "directions_apart_without_packing")
class _TwoDirections(nn.Module):
    """Nothing is packed: each sequence is turned round in its length; nobody looks at the padding read."""

    def __init__(self, model: PackedLSTM):
        super().__init__()
        self.layers, lstm = nn.ModuleList(), model.lstm
        for layer, width in enumerate((5, 18)):
            pair = {}
            for name, direction in zip(("ahead", "back"), BOTH, strict=True):
                weights = {f"{part}_l0": _part(lstm, part, layer, direction) for part in PARTS}
                pair[name] = filled(nn.LSTM(width, 9, batch_first=True), **weights)
            self.layers.append(nn.ModuleDict(pair))
        self.classify = model.fc

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        lengths = lengths.to(x.device)[:, None]
        places = torch.arange(x.shape[1], device=x.device)
        turned = torch.where(places < lengths, lengths - 1 - places, places)[..., None]
        last = (lengths - 1)[..., None].expand(-1, 1, 9)
        for layer in self.layers:
            ahead, _ = layer["ahead"](x)
            back, _ = layer["back"](x.take_along_dim(turned, 1))
            x = torch.cat([ahead, back.take_along_dim(turned, 1)], 2)
        return self.classify(torch.cat([ahead.gather(1, last), back.gather(1, last)], 2).squeeze(1))


class _Frozen(nn.Module):
    """LSTM cells in a loop over the padded batch; a state stays as it is where its sequence has ended."""

    def __init__(self, lstm: nn.LSTM):
        super().__init__()
        self.cells = nn.ModuleDict()
        for layer, width in enumerate((5, 18)):
            for direction in BOTH:
                weights = {part: _part(lstm, part, layer, direction) for part in PARTS}
                self.cells[f"layer{layer}{direction}"] = filled(nn.LSTMCell(width, 9), **weights)

    def run(self, cell: nn.LSTMCell, x: Tensor, real: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
        h = c = x.new_zeros(len(x), 9)
        states = [h] * x.shape[1]
        for t in reversed(range(x.shape[1])) if reverse else range(x.shape[1]):
            new_h, new_c = cell(x[:, t], (h, c))
            h, c = torch.where(real[:, t], new_h, h), torch.where(real[:, t], new_c, c)
            states[t] = h
        return torch.stack(states, 1), h

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        real = (torch.arange(x.shape[1], device=x.device) < lengths.to(x.device)[:, None])[..., None]
        for layer in ("layer0", "layer1"):
            ahead, last_ahead = self.run(self.cells[layer], x, real, reverse=False)
            back, last_back = self.run(self.cells[f"{layer}_reverse"], x, real, reverse=True)
            x = torch.cat([ahead, back], 2)
        return torch.cat([last_ahead, last_back], 1)


@case(SAME, "LSTM by cells", on=packed_lstm)
def lstm_cells_that_stop_at_the_end(model: nn.Module) -> nn.Module:
    """Four cells stepped by hand, which keep their state through the padding."""

    class ByCells(PackedLSTM):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return self.fc(self.lstm(x, lengths))

    return recast(rewritten(model, "lstm", _Frozen), "", ByCells)


@in_place_of("", SAME, "layers apart", packed_lstm, "lstm_layers_apart_on_sorted_sequences")
class _LayerByLayer(nn.Module):
    """Two modules for two layers; time comes first, and the longest sequence."""

    def __init__(self, model: PackedLSTM):
        super().__init__()
        self.bottom = nn.LSTM(5, 9, bidirectional=True)
        self.top = nn.LSTM(18, 9, bidirectional=True)
        for layer, lstm in enumerate((self.bottom, self.top)):
            names = [(part, direction) for part in PARTS for direction in BOTH]
            filled(lstm, **{f"{p}_l0{d}": _part(model.lstm, p, layer, d) for p, d in names})
        self.fc = model.fc

    def forward(self, **batch: Tensor) -> Tensor:
        lengths, order = batch["lengths"].cpu().sort(descending=True, stable=True)
        packed = pack_padded_sequence(batch["x"][order].transpose(0, 1), lengths)
        _, (last, _) = self.top(self.bottom(packed)[0])
        return self.fc(last.transpose(0, 1).flatten(1))[order.argsort()]


@in_place_of("gru", SAME, "all weights in one vector", tagger, "gru_of_one_vector")
class _OneVector(nn.Module):
    """The sixteen tensors of the GRU in one vector, cut up at each call; time before the batch."""

    def __init__(self, gru: nn.GRU):
        super().__init__()
        self.shapes = [weight.shape for weight in gru.parameters()]
        self.flat = copied(torch.cat([weight.detach().flatten() for weight in gru.parameters()]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        pieces = self.flat.split([shape.numel() for shape in self.shapes])
        weights = [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]
        start = x.new_zeros(4, len(x), 8)
        y, last = torch.gru(x.transpose(0, 1), start, weights, True, 2, 0.0, self.training, True, False)
        return y.transpose(0, 1), last


@in_place_of("gru", SAME, "weights in another layout", tagger, "gru_with_keras_weights")
class _KerasGRU(nn.Module):
    """Both directions in one loop: weights lie as [direction, in, gates], the gates as z, r, n."""

    def __init__(self, gru: nn.GRU):
        super().__init__()
        self.kernels, self.recurrent, self.biases = (nn.ParameterList() for _ in range(3))
        for layer in range(2):
            parts = {part: [self.swapped(_part(gru, part, layer, d)) for d in BOTH] for part in PARTS}
            self.kernels.append(copied(torch.stack(parts["weight_ih"]).mT))
            self.recurrent.append(copied(torch.stack(parts["weight_hh"]).mT))
            biases = [torch.stack(parts["bias_ih"]), torch.stack(parts["bias_hh"])]
            self.biases.append(copied(torch.stack(biases, 1)))

    @staticmethod
    def swapped(weight: Tensor) -> Tensor:
        reset, update, new = weight.detach().chunk(3)
        return torch.cat([update, reset, new])

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        for kernel, recurrent, bias in zip(self.kernels, self.recurrent, self.biases, strict=True):
            both = torch.stack([x, x.flip(1)])
            inputs = torch.einsum("dnti,dig->dtng", both, kernel) + bias[:, None, None, 0]
            h, states = x.new_zeros(2, len(x), 8), []
            for now in inputs.unbind(1):
                update, reset, new = now.chunk(3, 2)
                from_state = torch.baddbmm(bias[:, 1:], h, recurrent).chunk(3, 2)
                gate = torch.sigmoid(update + from_state[0])
                new = torch.tanh(new + torch.sigmoid(reset + from_state[1]) * from_state[2])
                h = torch.lerp(new, h, gate)
                states.append(h)
            ahead, back = torch.stack(states, 2)
            x = torch.cat([ahead, back.flip(1)], 2)
        return x, None
