"""Small models of Hugging Face's, from a config: as people divide them, without a word about their layers."""

from __future__ import annotations

from typing import Any

import torch
from layout_cases import saved_weights
from torch import Tensor, nn

import manyhands as mh

WORDS, LENGTH = 48, 12


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=4, n_head=4, use_cache=False)
    return GPT2LMHeadModel(config)


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
    )
    return BertForMaskedLM(config)


MODELS = {"GPT-2": gpt2, "BERT": bert}


def loss(model: nn.Module, batch: Any) -> Tensor:
    words, mask = batch
    logits = model(input_ids=words, attention_mask=mask).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), words.roll(-1, 1).flatten())


def train(name: str, strategy: Any) -> dict[str, Any]:
    trainer = mh.Trainer(
        MODELS[name],
        loss,
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        strategy,
        slices=4,
        clip_norm=1.0,
    )
    words = torch.randint(WORDS, (16, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(words)
    mask[::3, -3:] = 0
    history = trainer.fit((words, mask), epochs=2, batch_size=8)
    return {
        "losses": [row["loss"] for row in history],
        "evaluation": trainer.evaluate((words, mask), batch_size=5),
        "weights": saved_weights(trainer),
    }
