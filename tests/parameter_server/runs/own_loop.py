"""The same training as `training.py`, with the same faults, in a user loop.

`python own_loop.py '{"mode": "sync", "exact": true, "faults": [...]}'`.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch

import manyhands as mh
from manyhands.errors import UsageError
from tests.parameter_server.runs import training
from tests.parameter_server.runs.training import ASKED, BATCH, ROWS, Counted, arm, ids_of, loss, optimizer

MINE = Path(f"said-{os.getpid()}.jsonl")


def report(line: dict[str, Any]) -> None:
    with MINE.open("a") as file:
        file.write(json.dumps(line) + "\n")


def digest(model: Counted) -> str:
    found = hashlib.sha256()
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        found.update(name.encode() + value.detach().numpy().tobytes())
    return found.hexdigest()


class Noisy(torch.utils.data.Dataset[Any]):
    """The rows with noise, which is the slice's, and the process that has read them."""

    def __init__(self, columns: tuple[torch.Tensor, ...]) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[Any, ...]:
        x, *others = (column[row] for column in self._columns)
        return x + torch.randn(8), *others, os.getpid()


def await_others(lines: int) -> None:
    """Until some other worker has said so much."""
    deadline = time.monotonic() + 100
    while not any(len(one.read_text().splitlines()) >= lines for one in Path().glob("said-*.jsonl") if one != MINE):
        assert time.monotonic() < deadline, "no other worker trains without this one"
        time.sleep(0.05)


def try_together(hands: mh.Hands) -> None:
    """What all workers have to do at the same place."""
    for name, act in (("gather", hands.gather), ("reduce", hands.reduce)):
        try:
            act(torch.zeros(1))
        except UsageError as refused:
            report({"refused": name, "named": str(refused).startswith(f"{name} needs all workers")})


if __name__ == "__main__":
    arm()
    random = torch.Generator().manual_seed(5)
    x = torch.randn(ROWS, 8, generator=random)
    data = (x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long(), torch.arange(ROWS))
    torch.manual_seed(0)
    model, mode = Counted(), ASKED.get("mode")
    hands = mh.join(
        mh.Mirrored() if mode is None else mh.ParameterServer(mode=mode, **ASKED.get("settings", {})),
        slices=ASKED.get("slices", 4),
        exact=ASKED.get("exact", False),
        clip_norm=ASKED.get("clip"),
    )
    sgd = optimizer(model)
    schedule = torch.optim.lr_scheduler.StepLR(sgd, 5, gamma=0.5) if ASKED.get("schedule") else None
    model, sgd = hands.setup(model, sgd, schedule)
    hands.resume()
    rows = Noisy(data) if ASKED.get("noisy") else data
    settings = {"batch_size": BATCH, "epochs": ASKED.get("epochs", 2), "num_workers": ASKED.get("loaders")}
    for x, y, row, *readers in hands.batches(rows, **settings):
        if readers:
            report({"is_me": os.getpid() in readers[0]})
        training.STEP = max(training.STEP, hands.steps_done + 1)
        if "waits" in ASKED:
            training.wait_to_continue(hands._worker.session, hands.steps_done + 1, **ASKED["waits"])
        value = loss(model, (x, y, row))
        hands.backward(value)
        sgd.zero_grad()
        hands.step()
        torch.rand(3)  # of no concern to slices
        if hands.stepped:
            report({"mean": hands.mean(1.0 + hands.rank)})
        if hands.stepped and hands.every(8):
            hands.log(loss=hands.mean(value))
            hands.save()
        if hands.stepped and ASKED.get("together"):
            try_together(hands)
        if hands.stepped and ASKED.get("inside"):
            report({"inside": hands.steps_done, "loss": hands.evaluate(data, loss)["loss"]})
        if hands.rank == 1 and ASKED.get("leaves"):
            break
        if hands.steps_done >= 10 and "lr" in ASKED:
            sgd.param_groups[0]["lr"] = ASKED["lr"]
    if hands.rank == 1 and ASKED.get("leaves"):
        await_others(lines=5)  # before they synchronise for a checkpoint
    evaluated = hands.evaluate(data, loss)
    counts = [model.counter.detach()]
    if model.seen is not None:
        with torch.no_grad():
            counts.append(model.seen(ids_of(torch.arange(ROWS))).flatten())
    result = {
        "reached": hands.steps_done,
        "weights": digest(model),
        "counter": sorted({float(value) for value in torch.cat(counts)}),
        "loss": hands.loss,
        "evaluated": evaluated["loss"],
        "workers": [float(rank) for rank in torch.cat(hands.gather(torch.tensor([float(hands.rank)])))],
    }
    if hands.is_chief:
        print("RESULT " + json.dumps(result))
