"""A GPT-2 with its loss inside: layers stacked in one tensor, torch's encoder layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._first_shared import both, later, leaf, pile
from bench.tasks import SelfAttention, _task


class Feed(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.c_fc, self.act, self.c_proj = nn.Linear(width, 40), nn.GELU("tanh"), nn.Linear(40, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.act(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), SelfAttention(width, 3)
        self.ln_2, self.mlp = nn.LayerNorm(width), Feed(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Tokens and labels [N, T] -> loss and logits; labels of -100 do not count."""

    def __init__(self, vocabulary: int = 23, width: int = 24):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(12, width)
        nn.init.normal_(self.wte.weight, std=0.3)
        self.h = nn.ModuleList(Block(width) for _ in range(2))
        self.ln_f = nn.LayerNorm(width)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        logits = self.ln_f(x) @ self.wte.weight.T
        return {"loss": self.loss(logits, labels), "logits": logits}


def _batch() -> tuple[dict, Tensor]:
    tokens = torch.randint(23, (6, 10))
    labels = tokens.masked_fill(torch.arange(10) >= torch.randint(6, 11, (6, 1)), -100)
    return {"tokens": tokens, "labels": labels}, labels


gpt = _task("first_gpt", GPT, _batch, lambda out, _: out["loss"] if isinstance(out, dict) else out[0])


class Stacked(nn.Module):
    """Each kind of weight of all layers in one tensor, einsum throughout."""

    def __init__(self, model: GPT, wrong: bool = False):
        super().__init__()
        h, self.act = model.h, "none" if wrong else "tanh"
        self.vocab, self.place, self.last = (
            leaf(model.wte.weight),
            leaf(model.wpe.weight),
            leaf(model.ln_f.weight),
        )
        self.last_bias = leaf(model.ln_f.bias)
        self.norms = pile(torch.stack([b.ln_1.weight, b.ln_1.bias, b.ln_2.weight, b.ln_2.bias]) for b in h)
        self.qkv = pile(b.attn.qkv.weight.T.reshape(24, 3, 3, 8) for b in h)
        self.qkv_bias = pile(b.attn.qkv.bias.view(3, 3, 8) for b in h)
        self.out = pile(b.attn.out.weight.T.reshape(3, 8, 24) for b in h)
        self.up, self.up_bias = pile(b.mlp.c_fc.weight.T for b in h), pile(b.mlp.c_fc.bias for b in h)
        self.down = pile(b.mlp.c_proj.weight.T for b in h)
        self.biases = pile(torch.stack([b.attn.out.bias, b.mlp.c_proj.bias]) for b in h)

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        t = tokens.shape[1]
        x = F.embedding(tokens, self.vocab) + self.place[:t]
        for i in range(len(self.norms)):
            g1, b1, g2, b2 = self.norms[i]
            y = F.layer_norm(x, (24,), g1, b1)
            q, k, v = (
                torch.einsum("ntd,dchk->cnhtk", y, self.qkv[i]) + self.qkv_bias[i][:, None, :, None]
            ).unbind()
            scores = torch.einsum("nhtk,nhsk->nhts", q * 8**-0.5, k)
            weights = scores.where(~later(t, x.device), -torch.inf).softmax(-1)
            x = x + torch.einsum("nhts,nhsk,hkd->ntd", weights, v, self.out[i]) + self.biases[i, 0]
            y = F.layer_norm(x, (24,), g2, b2)
            inner = F.gelu(torch.einsum("ntd,df->ntf", y, self.up[i]) + self.up_bias[i], approximate=self.act)
            x = x + torch.einsum("ntf,fd->ntd", inner, self.down[i]) + self.biases[i, 1]
        logits = torch.einsum("ntd,vd->ntv", F.layer_norm(x, (24,), self.last, self.last_bias), self.vocab)
        kept = labels[:, 1:] != -100
        return {"loss": F.cross_entropy(logits[:, :-1][kept], labels[:, 1:][kept]), "logits": logits}


class TimeFirst(nn.Module):
    """torch's own encoder layers on [T, N, D]; a tuple comes out."""

    def __init__(self, model: GPT, wrong: bool = False):
        super().__init__()
        self.ahead, self.decoder = int(wrong), nn.Linear(24, 23, bias=False)
        self.decoder.weight = leaf(model.wte.weight)
        self.place = leaf(model.wpe.weight[:, None])
        one = nn.TransformerEncoderLayer(
            24, 3, 40, 0.0, lambda x: F.gelu(x, approximate="tanh"), norm_first=True
        )
        self.body = nn.TransformerEncoder(one, 2, model.ln_f, enable_nested_tensor=False)
        for ours, b in zip(self.body.layers, model.h, strict=True):
            ours.norm1, ours.norm2, ours.linear1, ours.linear2 = b.ln_1, b.ln_2, b.mlp.c_fc, b.mlp.c_proj
            ours.self_attn.out_proj.load_state_dict(b.attn.out.state_dict())
            ours.self_attn.in_proj_weight = leaf(b.attn.qkv.weight)
            ours.self_attn.in_proj_bias = leaf(b.attn.qkv.bias)

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = F.embedding(tokens.T, self.decoder.weight) + self.place[: tokens.shape[1]]
        hidden = torch.ones(len(x), len(x), dtype=torch.bool, device=x.device).triu(1 + self.ahead)
        logits = self.decoder(self.body(x, mask=hidden)).transpose(0, 1)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits


class OtherLoss(GPT):
    """The loss written out with logsumexp."""

    wrong = False

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        kept = labels[:, 1:] != -100
        right = logits[:, :-1].gather(2, labels[:, 1:, None].clamp(min=0)).squeeze(2)
        each = (logits[:, :-1].logsumexp(2) - right) * kept
        return each.mean() if self.wrong else each.sum() / kept.sum()


both(gpt, Stacked, "layers_in_one_tensor", "exact_gelu_for_the_fast_one", ("h.0.mlp.act", "h.0.mlp"))
both(gpt, TimeFirst, "ready_made_encoder_layers", "each_token_sees_the_next", "h.0.attn")
both(gpt, OtherLoss, "loss_by_logsumexp", "padded_labels_thin_the_loss", "")
