"""A small SASRec: what a user looks at next, from the padded sequence of what the user has looked at."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ITEMS, MAXLEN, HIDDEN, HEADS, BLOCKS, USERS = 211, 11, 28, 4, 3, 6


class PointWiseFeedForward(nn.Module):
    def __init__(self, hidden_units: int, dropout_rate: float):
        super().__init__()
        self.conv1 = nn.Conv1d(hidden_units, hidden_units, kernel_size=1)
        self.dropout1 = nn.Dropout(p=dropout_rate)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv1d(hidden_units, hidden_units, kernel_size=1)
        self.dropout2 = nn.Dropout(p=dropout_rate)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.relu(self.dropout1(self.conv1(inputs.transpose(-1, -2))))
        outputs = self.dropout2(self.conv2(outputs))
        outputs = outputs.transpose(-1, -2)  # as Conv1d requires (N, C, Length)
        outputs += inputs
        return outputs


class SASRec(nn.Module):
    """Users [N] and items [N, T], seen, next and not next, 0 for padding -> logits [N, T] of both nexts."""

    def __init__(self, dropout_rate: float = 0.0):
        super().__init__()
        self.item_emb = nn.Embedding(ITEMS + 1, HIDDEN, padding_idx=0)
        self.pos_emb = nn.Embedding(MAXLEN + 1, HIDDEN, padding_idx=0)
        self.emb_dropout = nn.Dropout(p=dropout_rate)
        self.attention_layernorms, self.attention_layers = nn.ModuleList(), nn.ModuleList()
        self.forward_layernorms, self.forward_layers = nn.ModuleList(), nn.ModuleList()
        self.last_layernorm = nn.LayerNorm(HIDDEN, eps=1e-8)
        for _ in range(BLOCKS):
            self.attention_layernorms.append(nn.LayerNorm(HIDDEN, eps=1e-8))
            self.attention_layers.append(nn.MultiheadAttention(HIDDEN, HEADS, dropout_rate))
            self.forward_layernorms.append(nn.LayerNorm(HIDDEN, eps=1e-8))
            self.forward_layers.append(PointWiseFeedForward(HIDDEN, dropout_rate))
        self.initialize()

    @torch.no_grad()
    def initialize(self) -> None:
        """Draws every weight; the rows of the padding stay zero."""
        for name, weight in self.named_parameters():
            if "layernorm" in name:
                weight.normal_(float(name.endswith("weight")), 0.2)
            elif "emb" in name:
                weight.normal_(std=0.2)[0] = 0
            else:
                weight.normal_(std=0.2 if weight.dim() == 1 else 1 / math.sqrt(HIDDEN))

    def log2feats(self, log_seqs: Tensor) -> Tensor:
        seqs = self.item_emb(log_seqs)
        seqs = seqs * self.item_emb.embedding_dim**0.5
        poss = torch.arange(1, log_seqs.shape[1] + 1, device=log_seqs.device).repeat(len(log_seqs), 1)
        poss = poss * (log_seqs != 0)
        seqs = self.emb_dropout(seqs + self.pos_emb(poss))
        timeline_mask = log_seqs == 0

        tl = seqs.shape[1]  # time dim len for enforce causality
        attention_mask = ~torch.tril(torch.ones((tl, tl), dtype=torch.bool, device=seqs.device))
        for i in range(len(self.attention_layers)):
            seqs = torch.transpose(seqs, 0, 1)
            query = self.attention_layernorms[i](seqs)
            mha_outputs, _ = self.attention_layers[i](query, seqs, seqs, attn_mask=attention_mask)
            seqs = query + mha_outputs
            seqs = torch.transpose(seqs, 0, 1)

            seqs = self.forward_layernorms[i](seqs)
            seqs = self.forward_layers[i](seqs)
            seqs = seqs * ~timeline_mask.unsqueeze(-1)
        return self.last_layernorm(seqs)

    def forward(
        self, user_ids: Tensor, log_seqs: Tensor, pos_seqs: Tensor, neg_seqs: Tensor
    ) -> tuple[Tensor, Tensor]:
        log_feats = self.log2feats(log_seqs)  # user_ids hasn't been used yet
        pos_embs = self.item_emb(pos_seqs)
        neg_embs = self.item_emb(neg_seqs)
        pos_logits = (log_feats * pos_embs).sum(dim=-1)
        neg_logits = (log_feats * neg_embs).sum(dim=-1)
        return pos_logits, neg_logits


def walks() -> tuple[dict[str, Tensor], Tensor]:
    """Walks through the catalogue, each user's with a stride, padded in front; the target is what follows."""
    start, stride = torch.randint(ITEMS, (USERS, 1)), torch.randint(1, 9, (USERS, 1))
    walk = start + stride * torch.arange(MAXLEN + 1) + torch.randint(2, (USERS, MAXLEN + 1))
    walk = 1 + walk % ITEMS
    length = torch.randint(4, MAXLEN, (USERS, 1))
    length[0] = MAXLEN
    real = torch.arange(MAXLEN) >= MAXLEN - length
    log_seqs, pos_seqs = walk[:, :-1] * real, walk[:, 1:] * real
    others = torch.ones(USERS, ITEMS + 1).scatter(1, log_seqs, 0.0).scatter(1, pos_seqs, 0.0)
    others[:, 0] = 0
    neg_seqs = torch.multinomial(others, MAXLEN) * real
    seqs = {"log_seqs": log_seqs, "pos_seqs": pos_seqs, "neg_seqs": neg_seqs}
    return {"user_ids": torch.randint(1, 1000, (USERS,)), **seqs}, pos_seqs


def next_or_not(outputs: tuple[Tensor, Tensor], pos_seqs: Tensor) -> Tensor:
    """The mean of the binary cross entropies of both logits, over what is not padding."""
    pos_logits, neg_logits = (logits[pos_seqs != 0] for logits in outputs)
    bce = F.binary_cross_entropy_with_logits
    return (bce(pos_logits, torch.ones_like(pos_logits)) + bce(neg_logits, torch.zeros_like(neg_logits))) / 2
