"""Tacotron 2 in small: characters and the frames so far -> the next frames, when to stop, where it looked."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

SYMBOLS, EMBEDDING, KERNEL, CONVOLUTIONS = 20, 16, 5, 3
MELS, PRENET, ATTENTION_RNN, DECODER_RNN, POSTNET = 8, 12, 20, 18, 12
ATTENTION, FILTERS, LOCATION_KERNEL = 14, 4, 7


def varied(module: nn.Module) -> None:
    """Start with weights that let every layer, gain and shift count."""
    if isinstance(module, nn.BatchNorm1d):
        nn.init.uniform_(module.weight, 0.6, 1.4)
        nn.init.normal_(module.bias, std=0.2)
        nn.init.normal_(module.running_mean, std=0.2)
        nn.init.uniform_(module.running_var, 0.6, 1.4)
    elif isinstance(module, nn.Conv1d | nn.Linear):
        nn.init.normal_(module.weight, std=1.2 * module.weight[0].numel() ** -0.5)
        if module.bias is not None:
            nn.init.normal_(module.bias, std=0.2)
    elif isinstance(module, nn.LSTM | nn.LSTMCell):
        for weight in module.parameters():
            nn.init.uniform_(weight, -0.4, 0.4)


def get_mask_from_lengths(lengths: Tensor, size: int) -> Tensor:
    return torch.arange(size, device=lengths.device) < lengths[:, None]


class LinearNorm(nn.Module):
    def __init__(self, in_dim: int, out_dim: int, bias: bool = True):
        super().__init__()
        self.linear_layer = nn.Linear(in_dim, out_dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_layer(x)


class ConvNorm(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, bias: bool = True):
        super().__init__()
        padding = (kernel_size - 1) // 2
        self.conv = nn.Conv1d(in_channels, out_channels, kernel_size, padding=padding, bias=bias)

    def forward(self, signal: Tensor) -> Tensor:
        return self.conv(signal)


class Encoder(nn.Module):
    """Convolutions with batch normalization, and a bidirectional LSTM."""

    def __init__(self):
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Sequential(ConvNorm(EMBEDDING, EMBEDDING, KERNEL), nn.BatchNorm1d(EMBEDDING))
            for _ in range(CONVOLUTIONS)
        )
        self.lstm = nn.LSTM(EMBEDDING, EMBEDDING // 2, 1, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor, input_lengths: Tensor) -> Tensor:
        for conv in self.convolutions:
            x = F.relu(conv(x))
        packed = pack_padded_sequence(x.transpose(1, 2), input_lengths.cpu(), batch_first=True)
        outputs, _ = self.lstm(packed)
        return pad_packed_sequence(outputs, batch_first=True, total_length=x.shape[2])[0]


class LocationLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.location_conv = ConvNorm(2, FILTERS, LOCATION_KERNEL, bias=False)
        self.location_dense = LinearNorm(FILTERS, ATTENTION, bias=False)

    def forward(self, attention_weights_cat: Tensor) -> Tensor:
        return self.location_dense(self.location_conv(attention_weights_cat).transpose(1, 2))


class Attention(nn.Module):
    """Additive attention that knows where it looked, in the last step and in all."""

    def __init__(self):
        super().__init__()
        self.query_layer = LinearNorm(ATTENTION_RNN, ATTENTION, bias=False)
        self.memory_layer = LinearNorm(EMBEDDING, ATTENTION, bias=False)
        self.v = LinearNorm(ATTENTION, 1, bias=False)
        self.location_layer = LocationLayer()
        self.score_mask_value = -float("inf")

    def forward(self, hidden: Tensor, memory: Tensor, processed_memory: Tensor, weights_cat: Tensor, mask):
        query = self.query_layer(hidden.unsqueeze(1))
        location = self.location_layer(weights_cat)
        alignment = self.v(torch.tanh(query + location + processed_memory)).squeeze(-1)
        alignment = alignment.masked_fill(mask, self.score_mask_value)
        attention_weights = F.softmax(alignment, dim=1)
        attention_context = torch.bmm(attention_weights.unsqueeze(1), memory).squeeze(1)
        return attention_context, attention_weights


class Prenet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(LinearNorm(i, PRENET, bias=False) for i in (MELS, PRENET))

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.layers:
            x = F.relu(linear(x))
        return x


class Decoder(nn.Module):
    """One frame after the other, each from the true one before it."""

    def __init__(self):
        super().__init__()
        self.prenet = Prenet()
        self.attention_rnn = nn.LSTMCell(PRENET + EMBEDDING, ATTENTION_RNN)
        self.attention_layer = Attention()
        self.decoder_rnn = nn.LSTMCell(ATTENTION_RNN + EMBEDDING, DECODER_RNN)
        self.linear_projection = LinearNorm(DECODER_RNN + EMBEDDING, MELS)
        self.gate_layer = LinearNorm(DECODER_RNN + EMBEDDING, 1)

    def decode(self, frame: Tensor, state: tuple, memory: Tensor, processed_memory: Tensor, mask: Tensor):
        attention_state, decoder_state, weights, weights_cum, context = state
        attention_state = self.attention_rnn(torch.cat((frame, context), -1), attention_state)
        weights_cat = torch.stack((weights, weights_cum), 1)
        hidden = attention_state[0]
        context, weights = self.attention_layer(hidden, memory, processed_memory, weights_cat, mask)
        weights_cum = weights_cum + weights
        decoder_state = self.decoder_rnn(torch.cat((hidden, context), -1), decoder_state)
        hidden_context = torch.cat((decoder_state[0], context), 1)
        mel, gate = self.linear_projection(hidden_context), self.gate_layer(hidden_context)
        return mel, gate, (attention_state, decoder_state, weights, weights_cum, context)

    def forward(self, memory: Tensor, mels: Tensor, memory_lengths: Tensor) -> tuple[Tensor, ...]:
        mask = ~get_mask_from_lengths(memory_lengths, memory.shape[1])
        go_frame = memory.new_zeros(1, len(memory), MELS)
        frames = self.prenet(torch.cat((go_frame, mels.permute(2, 0, 1))))
        processed_memory = self.attention_layer.memory_layer(memory)
        start = [memory.new_zeros(len(memory), size) for size in (ATTENTION_RNN, DECODER_RNN)]
        nowhere = memory.new_zeros(memory.shape[:2])
        state = ((start[0],) * 2, (start[1],) * 2, nowhere, nowhere, torch.zeros_like(memory[:, 0]))
        mel_outputs, gate_outputs, alignments = [], [], []
        for frame in frames[:-1]:
            mel, gate, state = self.decode(frame, state, memory, processed_memory, mask)
            mel_outputs.append(mel)
            gate_outputs.append(gate.squeeze(1))
            alignments.append(state[2])
        return torch.stack(mel_outputs, 2), torch.stack(gate_outputs, 1), torch.stack(alignments, 1)


class Postnet(nn.Module):
    """Convolutions with batch normalization and tanh, none after the last."""

    def __init__(self):
        super().__init__()
        pairs = (MELS, POSTNET), *[(POSTNET, POSTNET)] * (CONVOLUTIONS - 2), (POSTNET, MELS)
        self.convolutions = nn.ModuleList(
            nn.Sequential(ConvNorm(i, o, KERNEL), nn.BatchNorm1d(o)) for i, o in pairs
        )

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convolutions[:-1]:
            x = torch.tanh(conv(x))
        return self.convolutions[-1](x)


class Tacotron2(nn.Module):
    """Ids [N, S], lengths, frames [N, M, T], lengths -> frames, refined ones, stop logits, alignments."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, EMBEDDING)
        self.encoder, self.decoder, self.postnet = Encoder(), Decoder(), Postnet()
        self.apply(varied)

    def forward(self, text: Tensor, text_lengths: Tensor, mels: Tensor, output_lengths: Tensor):
        embedded_inputs = self.embedding(text).transpose(1, 2)
        encoder_outputs = self.encoder(embedded_inputs, text_lengths)
        mel_outputs, gate_outputs, alignments = self.decoder(encoder_outputs, mels, text_lengths)
        mel_outputs_postnet = mel_outputs + self.postnet(mel_outputs)
        mask = ~get_mask_from_lengths(output_lengths, mels.shape[2])
        mel_outputs = mel_outputs.masked_fill(mask[:, None], 0.0)
        mel_outputs_postnet = mel_outputs_postnet.masked_fill(mask[:, None], 0.0)
        return mel_outputs, mel_outputs_postnet, gate_outputs.masked_fill(mask, 1e3), alignments


def speech() -> tuple[tuple[Tensor, ...], Tensor]:
    """Three sentences, the longest first; each character sounds for a frame, silence ends them."""
    lengths = torch.cat([torch.tensor([9]), torch.randint(4, 9, (2,)).sort(descending=True)[0]])
    text = torch.randint(1, SYMBOLS, (3, 9)) * get_mask_from_lengths(lengths, 9)
    tones = torch.sin(0.4 * F.pad(text, (0, 1))[:, None] * torch.arange(1, MELS + 1)[:, None])
    real = get_mask_from_lengths(lengths + 1, 10)[:, None]
    mels = (tones + 0.3 * torch.randn(tones.shape)) * real
    gates = (torch.arange(10) >= lengths[:, None])[:, None]
    return (text, lengths, mels, lengths + 1), torch.cat([mels, gates.to(mels)], 1)


def tacotron2_loss(outputs: tuple[Tensor, ...], target: Tensor) -> Tensor:
    mels, gates = target[:, :-1], target[:, -1]
    mel_out, mel_out_postnet, gate_out, _ = outputs
    mel_loss = F.mse_loss(mel_out, mels) + F.mse_loss(mel_out_postnet, mels)
    return mel_loss + F.binary_cross_entropy_with_logits(gate_out, gates)
