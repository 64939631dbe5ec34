"""A Hugging Face model without the hub: random weights, a dataset of dicts, dropout on. `mh run -n 2` runs it."""

import sys

import datasets
import torch
from transformers import BertConfig, BertForSequenceClassification

import manyhands as mh

CONFIG = BertConfig(
    vocab_size=50,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=16,
    num_labels=3,
)


def make_data() -> datasets.Dataset:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 50, (40, 8), generator=generator)
    mask = (torch.arange(8) < torch.randint(4, 9, (40, 1), generator=generator)).long()
    rows = {"input_ids": ids.tolist(), "attention_mask": mask.tolist(), "labels": (ids[:, 0] % 3).tolist()}
    return datasets.Dataset.from_dict(rows).with_format("torch")


def main(out: str) -> None:
    trainer = mh.Trainer(
        model=lambda: BertForSequenceClassification(CONFIG),
        loss=lambda model, batch: model(**batch).loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        metrics={"accuracy": lambda model, batch: (model(**batch).logits.argmax(1) == batch["labels"]).float()},
        slices=4,
    )
    data = make_data()
    trainer.fit(data, epochs=2, batch_size=16)
    print(trainer.evaluate(data))
    trainer.save(out)


if __name__ == "__main__":
    main(sys.argv[1])
