"""What the tests of parameter servers train: dropout, BatchNorm and a counter; with faults at chosen points on request.

`python training.py '{"mode": "async", "faults": [{"who": "server 0", "step": 8, "at": "before commit"}]}'`. Every row
of the data adds 1 to its own cell of the counter, with a learning rate of 1: after so many epochs every cell is exactly
that number, or a gradient was lost or counted twice. A fault happens once, in whichever process comes first; with
"spared", it waits until there is a spare server, and leaves its process number behind; with "late", for the file
"continue", and with "lives", that is all; with "loses", it is another worker that dies.

With "others", the script has more trainings: each of these (what their strategies are) trains for an epoch before every
call of `fit` of the one that the rest is about. Another model counts their rows, too; with "same", it is the
same model.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.comm.axis import Axis
from manyhands.comm.shared_register import Register
from manyhands.control.servers.spare_server import READY
from manyhands.control.session.run_client import query
from manyhands.embedding.row_table import RowTable
from manyhands.errors import PeerLost
from manyhands.parameter_server.engine.leased_engine import LeasedEngine
from manyhands.parameter_server.server import server as served_server
from manyhands.parameter_server.server.remote_worker_service import RemoteWorkerService
from manyhands.parameter_server.server.shard_optimizer import FusedShardOptimizer
from manyhands.parameter_server.tables.row_server import RowServer
from manyhands.parameter_server.tables.server_tables import ServerTables
from manyhands.parameter_server.worker.hybrid_rows import HybridStep
from manyhands.parameter_server.worker.server_connection import ServerConnection
from manyhands.parameter_server.worker.stream_transfers import PushStream
from manyhands.spec.load import own_identity
from manyhands.training.state.checkpointing import Saver
from manyhands.training.step import evaluation

ASKED = json.loads(sys.argv[1])
ROWS, BATCH = 256, 16
HERE = own_identity()
WHO = "alone" if HERE is None else f"server {HERE.server}" if HERE.is_server else f"worker {HERE.slot}"
IN_BACKWARD: list[Callable[[], None]] = []
STEP = 0


def once(number: int, fault: dict[str, Any]) -> Callable[[], None]:
    def act() -> None:
        if fault["step"] > STEP or fault["who"] != WHO:
            return
        try:
            file = os.open(f"fault-{number}", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return
        if fault.get("spared"):
            os.write(file, str(ready_spare()).encode())
        if fault.get("late"):
            await_file("continue")
        if "loses" in fault:
            os.kill(next(one.pid for one in query("run").members if one.slot == fault["loses"]), signal.SIGKILL)
            raise PeerLost("the others have passed where this worker has lost one of them")
        if not fault.get("lives"):
            os.kill(os.getpid(), signal.SIGKILL)

    return act


def await_file(name: str) -> None:
    deadline = time.monotonic() + 60
    while not os.path.exists(name):
        assert time.monotonic() < deadline, f"there is no {name!r}"
        time.sleep(0.01)


def ready_spare() -> int:
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        spare = query("run").spare
        if spare is not None and spare.status == READY:
            return spare.pid
        time.sleep(0.05)
    raise AssertionError("there is no spare server")


def before(owner: Any, name: str, act: Callable[[], None], only: Callable[..., bool] = lambda *_: True) -> None:
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if only(*args):
            act()
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def after(owner: Any, name: str, act: Callable[[], None]) -> None:
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        act()
        return result

    setattr(owner, name, wrapped)


def half_way(act: Callable[[], None]) -> None:
    """In the middle of reporting a push: some servers have received it, others have not."""
    original = ServerConnection.tell

    def tell(self: ServerConnection, push: Any) -> None:
        self.tell_one(0, push)
        time.sleep(0.05)  # it has left this process
        act()
        original(self, push)

    ServerConnection.tell = tell  # type: ignore[method-assign]


def half_way_to_servers(act: Callable[[], None]) -> None:
    """In the middle of switching to other servers of rows: the first has received it, others have not."""
    original = ServerConnection.open

    def open_some(self: ServerConnection, message: Any, *rest: Any) -> None:
        if STEP:
            self._ports[0].send(message)
            time.sleep(0.05)  # it has left this process
            act()
        original(self, message, *rest)

    ServerConnection.open = open_some  # type: ignore[method-assign]


PLACES: dict[str, Callable[[Callable[[], None]], None]] = {
    "backward": IN_BACKWARD.append,
    "before the push": lambda act: before(LeasedEngine, "_push", act),
    "half-way through the push": half_way,
    "between frames": lambda act: after(PushStream, "hear", act),
    "taking a frame": lambda act: after(RemoteWorkerService, "take", act),
    "giving a frame": lambda act: before(RemoteWorkerService, "give", act),
    "after the push": lambda act: after(ServerConnection, "tell", act),
    "before the update": lambda act: before(FusedShardOptimizer, "update", act),
    "before commit": lambda act: after(FusedShardOptimizer, "update", act),
    "between tables and weights": lambda act: after(ServerTables, "apply", act),
    "after commit": lambda act: before(FusedShardOptimizer, "updated", act),
    "in the register": lambda act: before(Register, "write", act),
    "before the answer": lambda act: after(served_server.ParameterServerCore, "take", act),
    "before the rows are sent": lambda act: before(HybridStep, "_send", act),
    "after the rows are sent": lambda act: after(HybridStep, "_send", act),
    "before the step is taken": lambda act: before(HybridStep, "apply", act),
    "before rows are applied": lambda act: before(RowServer, "_apply", act),
    "between two parts of a table": lambda act: after(RowTable, "update_at", act),
    "before the answer of rows": lambda act: after(RowServer, "_apply", act),
    "half-way to other servers": half_way_to_servers,
    "when all have opened": lambda act: after(Axis, "barrier", act),
    "in evaluation": lambda act: before(evaluation, "evaluate", act),
    "while saving": lambda act: before(Saver, "save_now", act),
}


def arm() -> None:
    for number, fault in enumerate(ASKED.get("faults", [])):
        if fault["who"].split()[0] == WHO.split()[0]:
            PLACES[fault["at"]](once(number, fault))
    if WHO.startswith("server"):
        before(served_server.ParameterServerCore, "__init__", lambda: None, see_number)
        before(RowServer, "__init__", lambda: None, see_number)
        original = FusedShardOptimizer.update

        def update(self: FusedShardOptimizer, version: int, gradient: Any) -> Any:
            global STEP
            STEP = version + 1
            return original(self, version, gradient)

        FusedShardOptimizer.update = update  # type: ignore[method-assign]
        before(RowServer, "_apply", lambda: None, see_step)


def see_number(server: Any, number: int, *_: Any) -> bool:
    """A spare one has had none until now."""
    global WHO
    WHO = f"server {number}"
    return False


def see_step(server: RowServer, sender: bytes, opened: Any, message: Any) -> bool:
    global STEP
    STEP = message.step
    return False


def record_push(engine: LeasedEngine, push: Any) -> bool:
    """What a range of local steps adds to all cells of the counter; if it is leased again, the later one counts."""
    row = engine._memory_now()[0].row(engine._reach.row(push.filled.held)).views[0]
    with open("pushes.jsonl", "a") as file:
        file.write(json.dumps({"step": push.filled.held.step, "who": WHO, "added": -float(row.double().sum())}) + "\n")
    return False


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Dropout(0.2), nn.Linear(300, 4000), nn.Linear(4000, 3)
        )
        self.counter = nn.Parameter(torch.zeros(ROWS))
        self.seen = None
        if ASKED.get("rows"):  # the same once more, with ids anywhere and rows on servers
            self.seen = mh.nn.Embedding(1, name="seen", optimizer=mh.optim.rows.SGD(lr=1.0), init="zeros", cache=50)
        self.groups = None
        if ASKED.get("deep"):  # what its rows are, every gradient depends on
            self.groups = mh.nn.Embedding(8, name="groups", optimizer=mh.optim.rows.Adam(lr=0.05), keep_steps=3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def loss(model: Counted, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    x, y, row = batch
    time.sleep(ASKED.get("slow_s", {}).get(WHO, 0.0))
    outputs = model(x if model.groups is None else x + model.groups(ids_of(row % 40)))
    for act in IN_BACKWARD if outputs.requires_grad else ():
        outputs.register_hook(lambda grad, act=act: act())
    counted = model.counter[row]
    if model.seen is not None:
        counted = counted + model.seen(ids_of(row)).squeeze(1)
    return nn.functional.cross_entropy(outputs, y) - BATCH * counted.mean()


def ids_of(row: Tensor) -> Tensor:
    return row * 2**40 - 7


def wait_to_continue(session: Any, step: int, *, hold: int, most_s: float = 300.0) -> None:
    """From step `hold` on, each worker waits with every step: so a test has time, however slow it is itself."""
    deadline = time.monotonic() + most_s
    while step >= hold and not os.path.exists("continue") and session.stop_requested is None:
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)


class Watch:
    def before_step(self, trainer: Any, step: int) -> None:
        global STEP
        STEP = max(STEP, step)
        if "waits" in ASKED:
            wait_to_continue(trainer._run.worker.session, step, **ASKED["waits"])

    def after_step(self, trainer: Any, step: int, stats: Any) -> None:
        if trainer.is_chief:
            with open("steps.jsonl", "a") as file:
                file.write(json.dumps({"step": step, "loss": stats.loss, "staleness": stats.staleness}) + "\n")


def optimizer(model: Counted) -> torch.optim.Optimizer:
    groups = [
        {"params": model.layers.parameters(), "lr": 0.01, "momentum": 0.9},
        {"params": [model.counter], "lr": 1.0, "momentum": 0.0},
    ]
    return torch.optim.SGD(groups)  # type: ignore[arg-type]


def strategy_of(mode: str | None, settings: dict[str, Any]) -> Any:
    if mode == "local_sgd":
        return mh.LocalSGD(**settings)
    return mh.Mirrored() if mode is None else mh.ParameterServer(mode=mode, **settings)


def make_other(model: Counted, mode: str | None, settings: dict[str, Any]) -> mh.Trainer:
    exact = ASKED.get("exact", False)
    return mh.Trainer(model, loss, optimizer(model), strategy_of(mode, settings), slices=4, seed=7, exact=exact)


def counted(model: Counted) -> list[float]:
    """What the cells of its counters have; after so many epochs, that number is all that there is."""
    counts = [model.counter.detach()]
    if model.seen is not None:
        with torch.no_grad():
            counts.append(model.seen(ids_of(torch.arange(ROWS))).flatten())
    return sorted({float(value) for value in torch.cat(counts)})


if __name__ == "__main__":
    arm()
    if ASKED.get("record"):
        before(LeasedEngine, "_push", lambda: None, record_push)
    random = torch.Generator().manual_seed(5)
    x = torch.randn(ROWS, 8, generator=random)
    data = (x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long(), torch.arange(ROWS))
    torch.manual_seed(0)
    model = Counted()
    others = [
        make_other(model if one.get("same") else Counted(), one["mode"], one.get("settings", {}))
        for one in ASKED.get("others", [])
    ]
    mode = ASKED.get("mode")
    trainer = mh.Trainer(
        model,
        loss,
        optimizer(model),
        strategy_of(mode, ASKED.get("settings", {})),
        slices=None if mode in ("async", "local_sgd") else 4,
        exact=ASKED.get("exact", False),
        clip_norm=ASKED.get("clip"),
        hooks=[Watch()],
    )
    for _ in range(ASKED.get("fits", 1)):
        for other in others:
            other.fit(data, epochs=1, batch_size=BATCH)
        history = trainer.fit(
            data,
            epochs=ASKED.get("epochs", 2),
            batch_size=BATCH,
            validation=data if ASKED.get("validate") else None,
            **ASKED.get("rows_at", {}),
            checkpoint=mh.Checkpoints(every_steps=ASKED.get("save_every"), every_s=None),
        )
    digest = hashlib.sha256()
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(name.encode() + value.detach().numpy().tobytes())
    if model.groups is not None:
        for name, value in model.groups.get_extra_state().items():
            digest.update(name.encode() + value.numpy().tobytes())
    result = {
        "reached": trainer.step,
        "weights": digest.hexdigest(),
        "counter": counted(model),
        "cells": model.counter.tolist() if ASKED.get("record") else [],
        "loss": history[-1]["loss"],
        **({"history": list(history)} if "rows_at" in ASKED else {}),
        **({"others": [counted(other.model) for other in others]} if others else {}),
    }
    if trainer.is_chief:
        print("RESULT " + json.dumps(result))
