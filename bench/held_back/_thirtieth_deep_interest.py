"""A small Deep Interest Evolution Network: attention over a history, a GRU, and a GRU gated by attention."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

ITEMS, CATES, ITEM_DIM, CATE_DIM, DENSE = 211, 19, 10, 6, 5
WIDTH, HIDDEN, STATE, TIME, SAMPLES = ITEM_DIM + CATE_DIM, 18, 14, 11, 9


class Dice(nn.Module):
    """Between a line and a line of slope alpha, by where the value stands in the batch."""

    def __init__(self, emb_size: int, epsilon: float = 1e-5):
        super().__init__()
        self.bn = nn.BatchNorm1d(emb_size, eps=epsilon, affine=False)
        self.alpha = nn.Parameter(torch.zeros(emb_size))

    def forward(self, x: Tensor) -> Tensor:
        x_p = torch.sigmoid(self.bn(x.flatten(0, -2))).view_as(x)
        return self.alpha * (1 - x_p) * x + x_p * x


class DNN(nn.Module):
    def __init__(self, sizes: tuple[int, ...], activation: type[nn.Module]):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(sizes))
        self.activation_layers = nn.ModuleList(activation(size) for size in sizes[1:])

    def forward(self, x: Tensor) -> Tensor:
        for linear, activation in zip(self.linears, self.activation_layers, strict=True):
            x = activation(linear(x))
        return x


class LocalActivationUnit(nn.Module):
    """The query [N, 1, E] and the keys [N, T, E] -> a score for each key, [N, T, 1]."""

    def __init__(self, width: int, hidden: tuple[int, ...]):
        super().__init__()
        self.dnn = DNN((4 * width, *hidden), Dice)
        self.dense = nn.Linear(hidden[-1], 1)

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        queries = query.expand_as(keys)
        joined = torch.cat([queries, keys, queries - keys, queries * keys], dim=-1)
        return self.dense(self.dnn(joined))


class AttentionSequencePoolingLayer(nn.Module):
    """The keys' sum weighted by their scores, or the scores themselves after a softmax."""

    def __init__(self, width: int, hidden: tuple[int, ...], weight_normalization: bool, return_score: bool):
        super().__init__()
        self.local_att = LocalActivationUnit(width, hidden)
        self.weight_normalization, self.return_score = weight_normalization, return_score

    def forward(self, query: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        scores = self.local_att(query, keys).transpose(1, 2)
        if self.weight_normalization:
            scores = scores.masked_fill(~mask[:, None], float("-inf")).softmax(-1)
        else:
            scores = scores.masked_fill(~mask[:, None], 0.0)
        return scores.squeeze(1) if self.return_score else (scores @ keys).squeeze(1)


class InterestExtractor(nn.Module):
    """States of the history, and the log loss of telling the next click from a sampled item by them."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(WIDTH, HIDDEN, batch_first=True)
        width = HIDDEN + WIDTH
        inner = nn.Linear(width, 24), nn.Sigmoid(), nn.Linear(24, 13), nn.Sigmoid(), nn.Linear(13, 1)
        self.auxiliary_net = nn.Sequential(*inner)

    def auxiliary_loss(self, states: Tensor, clicks: Tensor, noclicks: Tensor, mask: Tensor) -> Tensor:
        click = self.auxiliary_net(torch.cat([states, clicks], -1)).squeeze(-1)
        noclick = self.auxiliary_net(torch.cat([states, noclicks], -1)).squeeze(-1)
        return -((F.logsigmoid(click) + F.logsigmoid(-noclick)) * mask).mean(1)

    def forward(self, keys: Tensor, noclicks: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        lengths = mask.sum(1).cpu()
        packed = pack_padded_sequence(keys, lengths, batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True, total_length=keys.shape[1])
        return states, self.auxiliary_loss(states[:, :-1], keys[:, 1:], noclicks[:, 1:], mask[:, 1:])


class AUGRUCell(nn.Module):
    """A GRU cell whose update gate is scaled by the attention."""

    def __init__(self, input_size: int, hidden_size: int):
        super().__init__()
        self.weight_ih = nn.Parameter(torch.zeros(3 * hidden_size, input_size))
        self.weight_hh = nn.Parameter(torch.zeros(3 * hidden_size, hidden_size))
        self.bias_ih = nn.Parameter(torch.zeros(3 * hidden_size))
        self.bias_hh = nn.Parameter(torch.zeros(3 * hidden_size))

    def forward(self, inputs: Tensor, hx: Tensor, att_score: Tensor) -> Tensor:
        i_r, i_z, i_n = F.linear(inputs, self.weight_ih, self.bias_ih).chunk(3, 1)
        h_r, h_z, h_n = F.linear(hx, self.weight_hh, self.bias_hh).chunk(3, 1)
        reset_gate = torch.sigmoid(i_r + h_r)
        update_gate = att_score[:, None] * torch.sigmoid(i_z + h_z)
        new_state = torch.tanh(i_n + reset_gate * h_n)
        return (1 - update_gate) * hx + update_gate * new_state


class DynamicGRU(nn.Module):
    def __init__(self, input_size: int, hidden_size: int):
        super().__init__()
        self.rnn, self.hidden_size = AUGRUCell(input_size, hidden_size), hidden_size

    def forward(self, inputs: Tensor, att_scores: Tensor) -> Tensor:
        hx = inputs.new_zeros(len(inputs), self.hidden_size)
        for t in range(inputs.shape[1]):
            hx = self.rnn(inputs[:, t], hx, att_scores[:, t])
        return hx


class InterestEvolving(nn.Module):
    def __init__(self):
        super().__init__()
        self.query_dense, self.query_act = nn.Linear(WIDTH, HIDDEN), nn.PReLU(HIDDEN)
        self.attention = AttentionSequencePoolingLayer(HIDDEN, (30, 17), True, True)
        self.interest_evolution = DynamicGRU(HIDDEN, STATE)

    def forward(self, query: Tensor, states: Tensor, mask: Tensor) -> Tensor:
        query = self.query_act(self.query_dense(query))[:, None]
        return self.interest_evolution(states, self.attention(query, states, mask))


class DIEN(nn.Module):
    """An item, a history of clicks, sampled items and dense features -> a logit and the auxiliary loss."""

    def __init__(self):
        super().__init__()
        self.item_embedding = nn.Embedding(ITEMS, ITEM_DIM, padding_idx=0)
        self.cate_embedding = nn.Embedding(CATES, CATE_DIM, padding_idx=0)
        self.din_attention = AttentionSequencePoolingLayer(WIDTH, (32, 20), False, False)
        self.interest_extractor, self.interest_evolution = InterestExtractor(), InterestEvolving()
        self.dnn = DNN((4 * WIDTH + STATE + DENSE, 40, 15), nn.PReLU)
        self.dnn_linear = nn.Linear(15, 1)
        for name, value in self.named_parameters():
            slope = name.endswith("alpha") or value.shape == (HIDDEN,) or name.startswith("dnn.activation")
            scale = 0.1 if slope else 0.2 if value.dim() == 1 else 1.2 * value.shape[1] ** -0.5
            nn.init.normal_(value, 0.3 if slope else 0.0, scale)
        for embedding in (self.item_embedding, self.cate_embedding):
            nn.init.normal_(embedding.weight, 0.0, 0.7).data[0] = 0.0
        for name, value in self.named_buffers():
            if value.is_floating_point():
                nn.init.uniform_(value, 0.4, 0.8) if "var" in name else nn.init.normal_(value, 0.0, 0.2)

    def embed(self, pair: Tensor) -> Tensor:
        return torch.cat([self.item_embedding(pair[..., 0]), self.cate_embedding(pair[..., 1])], -1)

    def forward(self, target: Tensor, history: Tensor, sampled: Tensor, lengths: Tensor, dense: Tensor):
        query, keys, noclicks = self.embed(target), self.embed(history), self.embed(sampled)
        mask = torch.arange(keys.shape[1], device=lengths.device) < lengths[:, None]
        total = keys.sum(1)
        pooled = self.din_attention(query[:, None], keys, mask)
        states, aux_loss = self.interest_extractor(keys, noclicks, mask)
        final = self.interest_evolution(query, states, mask)
        joined = torch.cat([query, total, query * total, pooled, final, dense], -1)
        return self.dnn_linear(self.dnn(joined)).squeeze(-1), aux_loss


def clicks() -> tuple[dict[str, Tensor], Tensor]:
    """Users who stay near two kinds of items; those who meet one of their own kinds click."""
    lengths = torch.randint(4, TIME + 1, (SAMPLES,))
    lengths[0] = TIME
    kinds = torch.randint(1, CATES, (SAMPLES, 2))
    cate = kinds.gather(1, torch.randint(2, (SAMPLES, TIME)))
    clicked = torch.arange(SAMPLES) % 2
    wanted = torch.where(clicked > 0, kinds[:, 0], torch.randint(1, CATES, (SAMPLES,)))

    def pairs(cate: Tensor) -> Tensor:
        return torch.stack([1 + (cate - 1) * 11 + torch.randint(11, cate.shape), cate], -1)

    held = (torch.arange(TIME) < lengths[:, None])[..., None]
    history, sampled = pairs(cate) * held, pairs(torch.randint(1, CATES, cate.shape)) * held
    dense = torch.randn(SAMPLES, DENSE)
    names = "target", "history", "sampled", "lengths", "dense"
    return dict(zip(names, (pairs(wanted), history, sampled, lengths, dense), strict=True)), clicked.float()


def log_losses(outputs: tuple[Tensor, Tensor], clicked: Tensor) -> Tensor:
    """The log loss of the click and the auxiliary loss, by four."""
    return (F.binary_cross_entropy_with_logits(outputs[0], clicked) + outputs[1].mean()) / 4
