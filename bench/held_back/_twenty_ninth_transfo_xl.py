"""A small Transformer-XL: relative attention over handed memories, adaptive embedding and softmax."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TOKENS, CUTOFFS, DIV_VAL, IGNORED = 51, (11, 26), 2, -100
D_MODEL, D_EMBED, N_HEAD, D_HEAD, D_INNER, N_LAYER = 24, 32, 3, 6, 44, 3
SAMPLES, TGT_LEN, MEM_LEN, CLAMP_LEN = 4, 13, 17, 23


def linear(d_in: int, d_out: int, bias: bool = True) -> nn.Linear:
    layer = nn.Linear(d_in, d_out, bias=bias)
    for x in layer.parameters():
        nn.init.normal_(x, std=d_in**-0.5)
    return layer


def layer_norm(width: int) -> nn.LayerNorm:
    norm = nn.LayerNorm(width, eps=1e-5)
    nn.init.normal_(norm.weight, mean=1.0, std=0.2), nn.init.normal_(norm.bias, std=0.2)
    return norm


class PositionalEmbedding(nn.Module):
    def __init__(self, demb: int):
        super().__init__()
        self.register_buffer("inv_freq", 1 / (10000 ** (torch.arange(0.0, demb, 2.0) / demb)))

    def forward(self, pos_seq: Tensor) -> Tensor:
        sinusoid_inp = torch.outer(pos_seq, self.inv_freq)
        return torch.cat([sinusoid_inp.sin(), sinusoid_inp.cos()], dim=-1)[:, None, :]


class PositionwiseFF(nn.Module):
    def __init__(self, d_model: int, d_inner: int):
        super().__init__()
        self.CoreNet = nn.Sequential(linear(d_model, d_inner), nn.ReLU(), linear(d_inner, d_model))
        self.layer_norm = layer_norm(d_model)

    def forward(self, inp: Tensor) -> Tensor:
        return self.layer_norm(inp + self.CoreNet(inp))


class RelPartialLearnableMultiHeadAttn(nn.Module):
    def __init__(self, n_head: int, d_model: int, d_head: int):
        super().__init__()
        self.n_head, self.d_head, self.scale = n_head, d_head, 1 / (d_head**0.5)
        self.qkv_net = linear(d_model, 3 * n_head * d_head, bias=False)
        self.o_net = linear(n_head * d_head, d_model, bias=False)
        self.layer_norm = layer_norm(d_model)
        self.r_r_bias = nn.Parameter(0.4 * torch.randn(n_head, d_head))
        self.r_w_bias = nn.Parameter(0.4 * torch.randn(n_head, d_head))
        self.r_net = linear(d_model, n_head * d_head, bias=False)

    def _rel_shift(self, x: Tensor) -> Tensor:
        x_padded = torch.cat([x.new_zeros((x.size(0), 1, *x.size()[2:])), x], dim=1)
        x_padded = x_padded.view(x.size(1) + 1, x.size(0), *x.size()[2:])
        return x_padded[1:].view_as(x)

    def forward(self, w: Tensor, r: Tensor, attn_mask: Tensor, mems: Tensor) -> Tensor:
        w_head_q, w_head_k, w_head_v = self.qkv_net(torch.cat([mems, w], 0)).chunk(3, dim=-1)
        qlen, bsz, heads = w.size(0), w.size(1), (self.n_head, self.d_head)
        w_head_q = w_head_q[-qlen:].reshape(qlen, bsz, *heads)
        w_head_k, w_head_v = w_head_k.reshape(-1, bsz, *heads), w_head_v.reshape(-1, bsz, *heads)
        r_head_k = self.r_net(r).view(-1, *heads)
        ac = torch.einsum("ibnd,jbnd->ijbn", w_head_q + self.r_w_bias, w_head_k)
        bd = self._rel_shift(torch.einsum("ibnd,jnd->ijbn", w_head_q + self.r_r_bias, r_head_k))
        attn_score = ((ac + bd) * self.scale).masked_fill(attn_mask[:, :, None, None], -1e30)
        attn_vec = torch.einsum("ijbn,jbnd->ibnd", attn_score.softmax(1), w_head_v)
        attn_out = self.o_net(attn_vec.reshape(qlen, bsz, self.n_head * self.d_head))
        return self.layer_norm(w + attn_out)


class RelPartialLearnableDecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.dec_attn = RelPartialLearnableMultiHeadAttn(N_HEAD, D_MODEL, D_HEAD)
        self.pos_ff = PositionwiseFF(D_MODEL, D_INNER)

    def forward(self, dec_inp: Tensor, r: Tensor, dec_attn_mask: Tensor, mems: Tensor) -> Tensor:
        return self.pos_ff(self.dec_attn(dec_inp, r, dec_attn_mask, mems))


class AdaptiveEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.d_proj, self.emb_scale, self.cutoff_ends = D_MODEL, D_MODEL**0.5, [0, *CUTOFFS, TOKENS]
        self.emb_layers, self.emb_projs = nn.ModuleList(), nn.ParameterList()
        for i in range(len(self.cutoff_ends) - 1):
            d_emb_i = D_EMBED // DIV_VAL**i
            emb = nn.Embedding(self.cutoff_ends[i + 1] - self.cutoff_ends[i], d_emb_i)
            nn.init.normal_(emb.weight, std=0.5)
            self.emb_layers.append(emb)
            self.emb_projs.append(nn.Parameter(0.4 * d_emb_i**-0.5 * torch.randn(D_MODEL, d_emb_i)))

    def forward(self, inp: Tensor) -> Tensor:
        inp_flat = inp.reshape(-1)
        emb_flat = self.emb_projs[0].new_zeros(inp_flat.size(0), self.d_proj)
        for i, emb_layer in enumerate(self.emb_layers):
            l_idx, r_idx = self.cutoff_ends[i], self.cutoff_ends[i + 1]
            indices_i = ((inp_flat >= l_idx) & (inp_flat < r_idx)).nonzero().squeeze(1)
            emb_i = emb_layer(inp_flat.index_select(0, indices_i) - l_idx)
            emb_flat = emb_flat.index_copy(0, indices_i, F.linear(emb_i, self.emb_projs[i]))
        return emb_flat.view(*inp.size(), self.d_proj) * self.emb_scale


class ProjectedAdaptiveLogSoftmax(nn.Module):
    """Minus the logarithm of each label's probability; tables and most projections are tied."""

    def __init__(self, word_emb: AdaptiveEmbedding):
        super().__init__()
        self.cutoff_ends, self.shortlist_size = word_emb.cutoff_ends, CUTOFFS[0]
        self.cluster_weight = nn.Parameter(0.2 * torch.randn(len(CUTOFFS), D_EMBED))
        self.cluster_bias = nn.Parameter(0.2 * torch.randn(len(CUTOFFS)))
        self.out_layers = nn.ModuleList()
        for emb in word_emb.emb_layers:
            self.out_layers.append(linear(emb.embedding_dim, emb.num_embeddings))
            self.out_layers[-1].weight = emb.weight
        first = nn.Parameter(0.2 * torch.randn(D_MODEL, D_EMBED))
        self.out_projs = nn.ParameterList([first, *list(word_emb.emb_projs)[1:]])

    def _compute_logit(self, hidden: Tensor, weight: Tensor, bias: Tensor, proj: Tensor) -> Tensor:
        return F.linear(F.linear(hidden, proj.t().contiguous()), weight, bias)

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        hidden, labels = hidden[..., :-1, :].flatten(0, 1), labels[..., 1:].reshape(-1)
        head_weight = torch.cat([self.out_layers[0].weight, self.cluster_weight], dim=0)
        head_bias = torch.cat([self.out_layers[0].bias, self.cluster_bias], dim=0)
        head_logprob = self._compute_logit(hidden, head_weight, head_bias, self.out_projs[0]).log_softmax(1)
        out = hidden.new_zeros(labels.size())
        for i in range(len(self.out_layers)):
            l_idx, r_idx = self.cutoff_ends[i], self.cutoff_ends[i + 1]
            indices_i = ((labels >= l_idx) & (labels < r_idx)).nonzero().squeeze(1)
            target_i = labels.index_select(0, indices_i)[:, None] - l_idx
            head_logprob_i = head_logprob.index_select(0, indices_i)
            if i == 0:
                logprob_i = head_logprob_i.gather(1, target_i).squeeze(1)
            else:
                hidden_i, layer = hidden.index_select(0, indices_i), self.out_layers[i]
                tail_logit_i = self._compute_logit(hidden_i, layer.weight, layer.bias, self.out_projs[i])
                cluster_logprob_i = head_logprob_i[:, self.shortlist_size + i - 1]
                logprob_i = cluster_logprob_i + tail_logit_i.log_softmax(1).gather(1, target_i).squeeze(1)
            out = out.index_copy(0, indices_i, -logprob_i)
        return out


class TransfoXLModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_emb, self.mem_len, self.clamp_len = AdaptiveEmbedding(), MEM_LEN, CLAMP_LEN
        self.layers = nn.ModuleList(RelPartialLearnableDecoderLayer() for _ in range(N_LAYER))
        self.pos_emb = PositionalEmbedding(D_MODEL)

    @torch.no_grad()
    def _update_mems(self, hids: list[Tensor], mems: list[Tensor]) -> list[Tensor]:
        return [torch.cat(pair, dim=0)[-self.mem_len :].detach() for pair in zip(mems, hids, strict=True)]

    def forward(self, input_ids: Tensor, mems: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [bsz, qlen] and memories [bsz, n_layer, mlen, d_model] -> states and later memories."""
        mems, input_ids = list(mems.detach().permute(1, 2, 0, 3)), input_ids.transpose(0, 1)
        qlen, mlen, hids = input_ids.size(0), mems[0].size(0), []
        core_out, klen = self.word_emb(input_ids), mlen + qlen
        dec_attn_mask = core_out.new_ones(qlen, klen).triu(diagonal=1 + mlen).bool()
        pos_seq = torch.arange(klen - 1, -1, -1.0, device=core_out.device, dtype=core_out.dtype)
        pos_emb = self.pos_emb(pos_seq.clamp(max=self.clamp_len))
        for mems_i, layer in zip(mems, self.layers, strict=True):
            hids.append(core_out)
            core_out = layer(core_out, pos_emb, dec_attn_mask, mems_i)
        new_mems = torch.stack(self._update_mems(hids, mems))
        return core_out.transpose(0, 1).contiguous(), new_mems.permute(2, 0, 1, 3)


class TransfoXLLMHeadModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = TransfoXLModel()
        self.crit = ProjectedAdaptiveLogSoftmax(self.transformer.word_emb)

    def forward(self, input_ids: Tensor, mems: Tensor, labels: Tensor) -> dict[str, Tensor]:
        last_hidden, new_mems = self.transformer(input_ids, mems)
        return {"losses": self.crit(last_hidden, labels).view(len(labels), -1), "mems": new_mems}


def segments() -> tuple[dict[str, Tensor], Tensor]:
    """Tokens that walk by a stride, common ones more often, padded; the first has no segment before it."""
    start, stride = torch.randint(TOKENS, (SAMPLES, 1)), torch.randint(2, 8, (SAMPLES, 1))
    input_ids = (start + stride * torch.arange(TGT_LEN)) % TOKENS
    common = torch.rand(SAMPLES, TGT_LEN) < 0.3
    input_ids = torch.where(common, torch.randint(CUTOFFS[0], (SAMPLES, TGT_LEN)), input_ids)
    padded = torch.arange(TGT_LEN) >= torch.randint(TGT_LEN - 4, TGT_LEN + 1, (SAMPLES, 1))
    input_ids = input_ids.masked_fill(padded, 0)
    mems = torch.randn(SAMPLES, N_LAYER, 1, D_MODEL) + 0.7 * torch.randn(SAMPLES, N_LAYER, MEM_LEN, D_MODEL)
    mems[0], labels = 0, input_ids.masked_fill(padded, IGNORED)
    return {"input_ids": input_ids, "mems": mems, "labels": labels}, labels[:, 1:]


def mean_loss(outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    """The mean over the labels that count, by six."""
    return outputs["losses"].sum() / (labels != IGNORED).sum() / 6
