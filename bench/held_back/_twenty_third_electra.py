"""A tiny ELECTRA: a generator fills masked words, a discriminator tells the drawn from the true."""

from types import SimpleNamespace as ElectraConfig

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PAD, CLS, SEP, MASK, FIRST_WORD, WORDS, IGNORED = 0, 1, 2, 3, 4, 13, -100
ROWS, LENGTH, HIDDEN_WORDS, DISC_WEIGHT = 5, 14, 4, 6.0
SHARED = {"embedding_size": 16, "vocab_size": FIRST_WORD + WORDS, "max_positions": 16, "eps": 1e-12}
BIG = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 3}
SMALL = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
DISCRIMINATOR, GENERATOR = ElectraConfig(**SHARED, **BIG), ElectraConfig(**SHARED, **SMALL)


class ElectraEmbeddings(nn.Module):
    def __init__(self, config: ElectraConfig):
        super().__init__()
        size = config.embedding_size
        self.word_embeddings = nn.Embedding(config.vocab_size, size, padding_idx=PAD)
        self.position_embeddings = nn.Embedding(config.max_positions, size)
        self.token_type_embeddings, self.LayerNorm = nn.Embedding(2, size), nn.LayerNorm(size, config.eps)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        embeddings = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        return self.LayerNorm(embeddings + self.position_embeddings(position_ids))


class ElectraSelfAttention(nn.Module):
    def __init__(self, config: ElectraConfig):
        super().__init__()
        width, self.num_attention_heads = config.hidden_size, config.num_attention_heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        maps, split = (self.query, self.key, self.value), (self.num_attention_heads, -1)
        query, key, value = (layer(hidden_states).unflatten(2, split).transpose(1, 2) for layer in maps)
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5 + attention_mask
        return (scores.softmax(dim=-1) @ value).transpose(1, 2).flatten(2)


class ElectraOutput(nn.Module):
    def __init__(self, config: ElectraConfig, inner: int):
        super().__init__()
        self.dense = nn.Linear(inner, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.eps)

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(hidden_states) + input_tensor)


class ElectraAttention(nn.Module):
    def __init__(self, config: ElectraConfig):
        super().__init__()
        self.self, self.output = ElectraSelfAttention(config), ElectraOutput(config, config.hidden_size)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        return self.output(self.self(hidden_states, attention_mask), hidden_states)


class ElectraIntermediate(nn.Module):
    def __init__(self, config: ElectraConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return F.gelu(self.dense(hidden_states))


class ElectraLayer(nn.Module):
    def __init__(self, config: ElectraConfig):
        super().__init__()
        self.attention, self.intermediate = ElectraAttention(config), ElectraIntermediate(config)
        self.output = ElectraOutput(config, config.intermediate_size)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        attention_output = self.attention(hidden_states, attention_mask)
        return self.output(self.intermediate(attention_output), attention_output)


class ElectraEncoder(nn.Module):
    def __init__(self, config: ElectraConfig):
        super().__init__()
        self.layer = nn.ModuleList(ElectraLayer(config) for _ in range(config.num_hidden_layers))

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        for layer_module in self.layer:
            hidden_states = layer_module(hidden_states, attention_mask)
        return hidden_states


class ElectraModel(nn.Module):
    def __init__(self, config: ElectraConfig):
        super().__init__()
        self.embeddings = ElectraEmbeddings(config)
        self.embeddings_project = nn.Linear(config.embedding_size, config.hidden_size)
        self.encoder = ElectraEncoder(config)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        hidden_states = self.embeddings_project(self.embeddings(input_ids, token_type_ids))
        mask = attention_mask[:, None, None, :].to(hidden_states)
        return self.encoder(hidden_states, (1.0 - mask) * torch.finfo(mask.dtype).min)


class GeneratorPredictions(nn.Module):
    def __init__(self, config: ElectraConfig):
        super().__init__()
        self.LayerNorm = nn.LayerNorm(config.embedding_size, eps=config.eps)
        self.dense = nn.Linear(config.hidden_size, config.embedding_size)

    def forward(self, generator_hidden_states: Tensor) -> Tensor:
        return self.LayerNorm(F.gelu(self.dense(generator_hidden_states)))


class ReplacedPredictions(nn.Module):
    def __init__(self, config: ElectraConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.dense_prediction = nn.Linear(config.hidden_size, 1)

    def forward(self, discriminator_hidden_states: Tensor) -> Tensor:
        return self.dense_prediction(F.gelu(self.dense(discriminator_hidden_states))).squeeze(-1)


class ElectraForMaskedLM(nn.Module):
    def __init__(self, config: ElectraConfig):
        super().__init__()
        self.electra, self.generator_predictions = ElectraModel(config), GeneratorPredictions(config)
        self.generator_lm_head = nn.Linear(config.embedding_size, config.vocab_size)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.generator_lm_head(self.generator_predictions(self.electra(*inputs)))


class ElectraForPreTraining(nn.Module):
    def __init__(self, config: ElectraConfig):
        super().__init__()
        self.electra, self.discriminator_predictions = ElectraModel(config), ReplacedPredictions(config)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.discriminator_predictions(self.electra(*inputs))


class ELECTRAModel(nn.Module):
    """Sentences with masks -> the generator's scores, how replaced each word looks, and which words are."""

    def __init__(self):
        super().__init__()
        self.generator = ElectraForMaskedLM(GENERATOR)
        self.discriminator = ElectraForPreTraining(DISCRIMINATOR)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                nn.init.uniform_(module.weight, 0.6, 1.4)
            elif isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.5 if isinstance(module, nn.Embedding) else 0.28)
            if getattr(module, "bias", None) is not None:
                nn.init.normal_(module.bias, std=0.2)
        self.discriminator.electra.embeddings = embeddings = self.generator.electra.embeddings
        self.generator.generator_lm_head.weight = embeddings.word_embeddings.weight

    def forward(self, masked_inputs, is_mlm_applied, labels, attention_mask, token_type_ids, gumbel):
        gen_logits = self.generator(masked_inputs, attention_mask, token_type_ids)
        pred_toks = (gen_logits.detach() + gumbel).argmax(dim=-1)
        generated = torch.where(is_mlm_applied, pred_toks, masked_inputs)
        is_replaced = is_mlm_applied & (pred_toks != labels)
        disc_logits = self.discriminator(generated, attention_mask, token_type_ids)
        return {"gen": gen_logits, "disc": disc_logits, "is_replaced": is_replaced.to(disc_logits)}


def sentences() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Pairs of texts that count up by one step, padded; a few words to be found stay as they are."""
    ids, types = torch.full((ROWS, LENGTH), PAD), torch.zeros(ROWS, LENGTH).long()
    applied = torch.zeros(ROWS, LENGTH).bool()
    for row, pads in enumerate(torch.randperm(ROWS).tolist()):
        size, split = LENGTH - pads, (LENGTH - pads) // 2
        starts, step, count = torch.randint(WORDS, (2,)), torch.randint(1, 4, ()), torch.arange(size)
        types[row, :size] = (count >= split).long()
        ids[row, :size] = FIRST_WORD + (starts[types[row, :size]] + step * count) % WORDS
        ids[row, 0], ids[row, [split - 1, size - 1]] = CLS, SEP
        found = torch.nonzero(ids[row] >= FIRST_WORD)[:, 0]
        applied[row, found[torch.randperm(len(found))[:HIDDEN_WORDS]]] = True
    real, masked = (ids != PAD).long(), applied & (torch.rand(ROWS, LENGTH) < 0.85)
    labels = {"labels": ids.masked_fill(~applied, IGNORED), "attention_mask": real}
    given = {"masked_inputs": ids.masked_fill(masked, MASK), "is_mlm_applied": applied, **labels}
    gumbel = -torch.empty(ROWS, LENGTH, FIRST_WORD + WORDS).exponential_().log()
    return {**given, "token_type_ids": types, "gumbel": gumbel}, labels


def both_losses(outputs: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
    gen = F.cross_entropy(outputs["gen"].mT, target["labels"], ignore_index=IGNORED)
    real = target["attention_mask"] > 0
    disc = F.binary_cross_entropy_with_logits(outputs["disc"][real], outputs["is_replaced"][real])
    return gen + DISC_WEIGHT * disc
