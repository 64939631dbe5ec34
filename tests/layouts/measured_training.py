"""A training that saves in its middle, under a layout that is named: what it was said to need, and what it needed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import manyhands as mh

ROWS, LENGTH, WORDS, WIDTH = 8, 64, 30_000, 1536
LIMIT = "40GB"
LAYOUTS: dict[str, Any] = {
    "pipeline": mh.PipelineParallel(2, memory_limit=LIMIT),
    "sharded": mh.Sharded(workers=2, memory_limit=LIMIT),
    "tensor": mh.TensorParallel(2, memory_limit=LIMIT),
    "mirrored": mh.Mirrored(workers=2, memory_limit=LIMIT),
}


def wide() -> nn.Module:
    """20 M parameters."""
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


def wide_loss(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def bert_base() -> nn.Module:
    """110 M parameters."""
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig())


def bert_loss(model: nn.Module, batch: Any) -> Tensor:
    words, mask = batch
    logits = model(input_ids=words, attention_mask=mask).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), words.roll(-1, 1).flatten())


def rows_of(model: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if model == "wide":
        return torch.randn(3 * ROWS, WIDTH, generator=generator), torch.randn(3 * ROWS, WIDTH, generator=generator)
    words = torch.randint(WORDS, (3 * ROWS, LENGTH), generator=generator)
    return words, torch.ones_like(words)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Any], Tensor]]] = {
    "wide": (wide, wide_loss),
    "BERT-base": (bert_base, bert_loss),
}

if __name__ == "__main__":
    model, layout = sys.argv[1:]
    trainer = mh.Trainer(*MODELS[model], lambda params: torch.optim.AdamW(params, lr=1e-4), LAYOUTS[layout], slices=2)
    trainer.fit(rows_of(model), steps=3, batch_size=ROWS, checkpoint=mh.Checkpoints(every_steps=2, keep_last=1))
