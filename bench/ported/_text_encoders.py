"""Encoders of transformers, small: BERT with padding, RoBERTa whose positions count tokens, ALBERT, ViT."""

from __future__ import annotations

import torch
import transformers
from torch import Tensor, nn

from bench.ported._text import VOCABULARY, chosen, sentences, text_task

HEADS = 4
WIDE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 48}
PLAIN = {
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.1,
    "num_labels": 3,
}
TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": 16}


def model_of(kind: str, settings: dict, **more: object) -> nn.Module:
    config = getattr(transformers, f"{kind}Config")(**settings, **more)
    task = "ImageClassification" if kind == "ViT" else "SequenceClassification"
    return getattr(transformers, f"{kind}For{task}")(config)


def images() -> tuple[dict, Tensor]:
    return {"pixel_values": torch.randn(6, 3, 12, 12)}, torch.randint(3, (6,))


def padded_with_one() -> tuple[dict, Tensor]:
    inputs, classes = sentences()
    ids = torch.where(inputs["attention_mask"].bool(), inputs["input_ids"].clamp(2), 1)
    return inputs | {"input_ids": ids}, classes


bert = text_task("bert_small", lambda: model_of("Bert", WIDE | PLAIN | TEXT), sentences, chosen)
roberta = text_task(
    "roberta_small", lambda: model_of("Roberta", WIDE | PLAIN | TEXT, pad_token_id=1), padded_with_one, chosen
)
albert = text_task(
    "albert_small",
    lambda: model_of("Albert", WIDE | PLAIN | TEXT, embedding_size=12, classifier_dropout_prob=0.0),
    sentences,
    chosen,
)
vit = text_task(
    "vit_small", lambda: model_of("ViT", WIDE | PLAIN, image_size=12, patch_size=4), images, chosen
)
