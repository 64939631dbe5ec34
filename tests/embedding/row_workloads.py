"""What the tests of embeddings train: clicks on items by users, with ids from all over 64 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.errors import SpecError
from manyhands.events import Warned

ROWS = 300
Batch = tuple[Tensor, Tensor, Tensor]


def clicks(rows: int = ROWS) -> Batch:
    """Users, the items each has seen (-1: none), and whether they clicked."""
    generator = torch.Generator().manual_seed(0)
    users = torch.randint(0, 40, (rows,), generator=generator) * (2**57 - 5) - 2**61
    items = torch.randint(-1, 25, (rows, 3), generator=generator)
    return users, items, (items.sum(1) % 3 == 0).float()


class Clicks(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.users = mh.nn.Embedding(4, name="users", optimizer=mh.optim.rows.Adam(lr=0.02), **settings)
        self.items = mh.nn.EmbeddingBag(5, name="items", combiner="mean", padding=-1, init="normal", **settings)
        self.out = nn.Linear(9, 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        found: Tensor = self.out(torch.cat([self.users(users), self.items(items)], 1)).squeeze(1)
        return found


def loss(model: nn.Module, batch: Batch) -> Tensor:
    users, items, clicked = batch
    return nn.functional.binary_cross_entropy_with_logits(model(users, items), clicked)


def make_trainer(table: dict[str, Any] | None = None, **arguments: Any) -> mh.Trainer:
    arguments = {"slices": 6, "exact": True, "seed": 4, **arguments}
    return mh.Trainer(
        lambda: Clicks(**(table or {})),
        loss,
        lambda params: torch.optim.SGD(params, lr=0.1),
        "mirrored",
        metrics={"loss of each": lambda model, batch: model(batch[0], batch[1])},
        **arguments,
    )


def contents(model: nn.Module) -> dict[str, bytes]:
    """All weights and rows, with the rows' states."""
    found: dict[str, bytes] = {}
    for name, value in model.state_dict().items():
        parts = value if isinstance(value, dict) else {"": value}
        found |= {f"{name}/{key}": part.numpy().tobytes() for key, part in parts.items()}
    return found


def train(fit: dict[str, Any] | None = None, table: dict[str, Any] | None = None, **arguments: Any) -> Any:
    trainer = make_trainer(table, **arguments)
    history = trainer.fit(clicks(), **{"epochs": 2, "batch_size": 33, **(fit or {})})
    return contents(trainer.model), [row["loss"] for row in history]


class Spoil:
    """Rank 2 has another row than the others, once."""

    def __init__(self) -> None:
        self.done = False

    def before_step(self, trainer: Any, step: int) -> None:
        if step != 5 or self.done or trainer._run.worker.rank != 2:
            return
        self.done = True
        saved = trainer.model.state_dict()["users._extra_state"]
        saved["rows"][:, 1] += 1e-3
        trainer.model.users.set_extra_state(saved)


def train_with_an_odd_one() -> Any:
    return train(hooks=[Spoil()])


def train_evaluate_and_predict() -> tuple[bool, dict[str, float], np.ndarray[Any, Any]]:
    """Whether evaluation and prediction, with ids that training has not seen, left everything alone."""
    trainer = make_trainer({"admit_after": 2})
    trainer.fit(clicks(), epochs=1, batch_size=33)
    before = contents(trainer.model)
    users, items, clicked = clicks(90)
    results = trainer.evaluate((users + 1, items + 1, clicked))
    outputs = np.array([results["loss of each"]])
    return contents(trainer.model) == before, results, outputs


def save_and_load(path: str) -> tuple[dict[str, bytes], dict[str, bytes]]:
    trainer = make_trainer()
    trainer.fit(clicks(), epochs=1, batch_size=33)
    trainer.save(Path(path))
    saved = contents(trainer.model)
    trainer.fit(clicks(), epochs=1, batch_size=33)
    assert contents(trainer.model) != saved
    trainer.load(Path(path))
    return saved, contents(trainer.model)


def own_loop() -> dict[str, bytes]:
    hands = mh.join("mirrored", slices=6, exact=True, seed=4)
    torch.manual_seed(1)
    model = Clicks()
    hands.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in hands.batches(clicks(), batch_size=33, epochs=1):
        hands.backward(loss(model, batch))
        hands.step()
    return contents(model)


def warnings_of_a_run() -> list[str]:
    trainer = make_trainer()
    trainer.fit(clicks(), steps=2, batch_size=33)
    session: Any = trainer._run.worker.session
    return [event.text for event in session.events if isinstance(event, Warned)]


def with_lbfgs() -> str:
    trainer = mh.Trainer(Clicks, loss, torch.optim.LBFGS, "single")
    try:
        trainer.fit(clicks(), steps=1, batch_size=30)
    except SpecError as error:
        return error.what
    return ""
