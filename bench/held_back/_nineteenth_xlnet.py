"""A tiny XLNet: two streams over a permuted order, relative positions and segments, memory of a segment."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED, SEP, CLS, PAD, FIRST_WORD, WORDS = -100, 4, 3, 5, 7, 17
LENGTHS, ROWS, TARGETS = (7, 9), 3, 4


@dataclass
class XLNetConfig:
    vocab_size: int = FIRST_WORD + WORDS
    d_model: int = 16
    n_layer: int = 3
    n_head: int = 2
    d_head: int = 8
    d_inner: int = 24
    mem_len: int = 5
    layer_norm_eps: float = 1e-12


class XLNetRelativeAttention(nn.Module):
    """Both streams ask; what they ask is the content stream with the memory before it. Time comes first."""

    def __init__(self, config: XLNetConfig):
        super().__init__()
        width, heads, size = config.d_model, config.n_head, config.d_head
        self.scale = size**-0.5
        for name in ("q", "k", "v", "o", "r"):
            self.register_parameter(name, nn.Parameter(torch.randn(width, heads, size) * 0.3))
        for name in ("r_r_bias", "r_s_bias", "r_w_bias"):
            self.register_parameter(name, nn.Parameter(torch.randn(heads, size) * 0.5))
        self.seg_embed = nn.Parameter(torch.randn(2, heads, size) * 0.7)
        self.layer_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)

    @staticmethod
    def rel_shift(x: Tensor, klen: int) -> Tensor:
        """Scores by position [b, n, i, p] become scores by key [b, n, i, j]: each row one step less."""
        b, n, i, p = x.shape
        return x.reshape(b, n, p, i)[:, :, 1:].reshape(b, n, i, p - 1)[..., :klen]

    def rel_attn_core(self, q: Tensor, k: Tensor, v: Tensor, k_r: Tensor, seg_mat: Tensor, attn_mask: Tensor):
        ac = torch.einsum("ibnd,jbnd->bnij", q + self.r_w_bias, k)
        bd = self.rel_shift(torch.einsum("ibnd,pnd->bnip", q + self.r_r_bias, k_r), k.shape[0])
        ef = torch.einsum("ibnd,snd->ibns", q + self.r_s_bias, self.seg_embed)
        ef = torch.einsum("ijbs,ibns->bnij", seg_mat, ef)
        score = (ac + bd + ef) * self.scale - 1e30 * attn_mask.permute(2, 0, 1)[:, None]
        return torch.einsum("bnij,jbnd->ibnd", score.softmax(dim=3), v)

    def post_attention(self, x: Tensor, attn_vec: Tensor) -> Tensor:
        return self.layer_norm(torch.einsum("ibnd,hnd->ibh", attn_vec, self.o) + x)

    def forward(
        self,
        h: Tensor,
        g: Tensor | None,
        attn_mask_h: Tensor,
        attn_mask_g: Tensor,
        r: Tensor,
        seg_mat: Tensor,
        mems: Tensor | None = None,
        target_mapping: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        cat = h if mems is None else torch.cat([mems, h], dim=0)
        k, v = (torch.einsum("ibh,hnd->ibnd", cat, weight) for weight in (self.k, self.v))
        k_r = torch.einsum("ph,hnd->pnd", r, self.r)
        q_h = torch.einsum("ibh,hnd->ibnd", h, self.q)
        output_h = self.post_attention(h, self.rel_attn_core(q_h, k, v, k_r, seg_mat, attn_mask_h))
        if g is None:
            return output_h, None
        q_g = torch.einsum("ibh,hnd->ibnd", g, self.q)
        q_g = torch.einsum("mbnd,mlb->lbnd", q_g, target_mapping)
        vec_g = self.rel_attn_core(q_g, k, v, k_r, seg_mat, attn_mask_g)
        vec_g = torch.einsum("lbnd,mlb->mbnd", vec_g, target_mapping)
        return output_h, self.post_attention(g, vec_g)


class XLNetFeedForward(nn.Module):
    def __init__(self, config: XLNetConfig):
        super().__init__()
        self.layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.layer_1 = nn.Linear(config.d_model, config.d_inner)
        self.layer_2 = nn.Linear(config.d_inner, config.d_model)
        self.activation_function = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer_norm(self.layer_2(self.activation_function(self.layer_1(x))) + x)


class XLNetLayer(nn.Module):
    def __init__(self, config: XLNetConfig):
        super().__init__()
        self.rel_attn, self.ff = XLNetRelativeAttention(config), XLNetFeedForward(config)

    def forward(self, h: Tensor, g: Tensor | None, *rest: Tensor | None) -> tuple[Tensor, Tensor | None]:
        h, g = self.rel_attn(h, g, *rest)
        return self.ff(h), None if g is None else self.ff(g)


class XLNetModel(nn.Module):
    """A segment -> the states of both streams [N, T, D] after each layer, and the memory for the next."""

    def __init__(self, config: XLNetConfig):
        super().__init__()
        self.d_model, self.mem_len = config.d_model, config.mem_len
        self.word_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.mask_emb = nn.Parameter(torch.randn(1, 1, config.d_model) * 0.7)
        self.layer = nn.ModuleList(XLNetLayer(config) for _ in range(config.n_layer))

    def relative_positional_encoding(self, qlen: int, klen: int) -> Tensor:
        steps = torch.arange(0, self.d_model, 2).to(self.mask_emb)
        positions = torch.arange(klen, -qlen, -1).to(self.mask_emb)
        angles = positions[:, None] / 10000 ** (steps / self.d_model)
        return torch.cat([angles.sin(), angles.cos()], dim=-1)

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor,
        attention_mask: Tensor,
        perm_mask: Tensor,
        target_mapping: Tensor | None = None,
        mems: list[Tensor] | None = None,
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        h, g, types = self.word_embedding(input_ids.T), None, token_type_ids.T
        qlen, mlen = h.shape[0], mems[0].shape[0] if mems else 0
        masked = perm_mask.permute(1, 2, 0) + (1 - attention_mask.T)[None]
        masked = (F.pad(masked, (0, 0, mlen, 0)) > 0).to(h)
        itself = F.pad(torch.eye(qlen).to(h), (mlen, 0))
        masked_h = (masked - itself[:, :, None] > 0).to(h)
        differ = types[:, None] != F.pad(types, (0, 0, mlen, 0))[None]
        seg_mat = F.one_hot(differ.long(), 2).to(h)
        pos_emb = self.relative_positional_encoding(qlen, mlen + qlen)
        if target_mapping is not None:
            target_mapping = target_mapping.permute(1, 2, 0).to(h)
            g = self.mask_emb.expand(target_mapping.shape[0], h.shape[1], -1)
        new_mems, content, query = [], [], []
        for i, layer in enumerate(self.layer):
            new_mems.append(h[-self.mem_len :].detach())
            mem = mems[i] if mems else None
            h, g = layer(h, g, masked_h, masked, pos_emb, seg_mat, mem, target_mapping)
            content.append(h.transpose(0, 1))
            query.append(None if g is None else g.transpose(0, 1))
        return content, query, new_mems


class XLNetLMHeadModel(nn.Module):
    """Two segments in turn -> scores of the words at the targets of the second, and its streams."""

    def __init__(self, config: XLNetConfig | None = None):
        super().__init__()
        config = config or XLNetConfig()
        self.transformer = XLNetModel(config)
        self.lm_loss = nn.Linear(config.d_model, config.vocab_size)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                nn.init.uniform_(module.weight, 0.6, 1.4)
                nn.init.normal_(module.bias, std=0.2)
            elif isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.4)
        nn.init.normal_(self.lm_loss.bias, std=0.3)
        self.lm_loss.weight = self.transformer.word_embedding.weight

    def forward(self, first: dict[str, Tensor], second: dict[str, Tensor]) -> dict[str, Tensor]:
        mems = self.transformer(**first)[2]
        content, query, _ = self.transformer(**second, mems=mems)
        outputs = {"logits": self.lm_loss(query[-1])}
        for i, (h, g) in enumerate(zip(content, query, strict=True)):
            outputs |= {f"content_{i}": h, f"query_{i}": g}
        return outputs


def segment(length: int, spare: int) -> dict[str, Tensor]:
    """Two texts that count up, each with its end, and the mark of the whole, with padding before them;
    the last words of a random order are to be found, ``spare`` fewer than the others in the first row."""
    ids, types = torch.full((ROWS, length), PAD), torch.full((ROWS, length), 3)
    perm, targets = torch.zeros(ROWS, length, length).long(), torch.zeros(ROWS, TARGETS, length).long()
    for row, pads in enumerate(torch.randperm(3).tolist()):
        size, split = length - pads, (length - pads) // 2
        words = FIRST_WORD + (torch.randint(WORDS, ()) + torch.randint(1, 4, ()) * torch.arange(size)) % WORDS
        words[[split - 1, size - 2]], words[-1] = SEP, CLS
        ids[row, pads:], types[row, pads:] = words, (torch.arange(size) >= split).long()
        types[row, -1], found = 2, torch.nonzero(ids[row] >= FIRST_WORD)[:, 0]
        found = found[torch.randperm(len(found))[: min(len(found) - 1, TARGETS) - spare * (row == 0)]]
        rank = torch.full((length,), -1)
        rank[found] = torch.arange(len(found))
        perm[row], targets[row, range(len(found)), found] = (rank[:, None] <= rank) & (rank >= 0), 1
    real = (ids != PAD).long()
    names = ("input_ids", "token_type_ids", "attention_mask", "perm_mask", "target_mapping")
    return dict(zip(names, (ids, types, real, perm, targets), strict=True))


def two_segments() -> tuple[dict[str, dict[str, Tensor]], Tensor]:
    first, second = segment(LENGTHS[0], 0), segment(LENGTHS[1], 1)
    first.pop("target_mapping")
    mapping = second["target_mapping"]
    labels = (mapping * second["input_ids"][:, None]).sum(-1).masked_fill(mapping.sum(-1) == 0, IGNORED)
    return {"first": first, "second": second}, labels


def surprise(outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    return 0.3 * F.cross_entropy(outputs["logits"].mT, labels, ignore_index=IGNORED)
