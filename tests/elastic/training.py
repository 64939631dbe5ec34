"""What the tests of elastic runs train: dropout, BatchNorm, AdamW, exact; with faults at chosen points on request.

`python training.py '{"steps": 60, "faults": [{"slot": 1, "step": 8, "at": "flip"}]}'`. A fault happens in the first
process of its slot only. Every commit of a step is appended to `commits.jsonl` of the working directory, or what is
asked for. With "until",
the first call of `fit` ends when the file of that name is there. With "pause", every worker waits before that step for
the file "continue"; faults "wait" and "die late" do so where they are. With "mesh", as in {"data": 2, "tensor": 2}, the
model is divided, with momentum and not to the bit; "tied" has its stages share a weight. A fault of a "newcomer" is
that of processes that were started later. With "kind", data comes in another order or in ready batches; with "diary",
every call of a hook about validations, checkpoints and ends is appended to the file of that name.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import manyhands as mh
from manyhands.comm.axis import Axis
from manyhands.errors import PeerLost
from manyhands.parallel.gradients.network_sum import GradientSum
from manyhands.parallel.gradients.shared_memory_sum import SharedMemorySum
from manyhands.parallel.replicas.model_parallel_replica import ModelParallelReplica
from manyhands.parallel.weights.fused_shared_weights import FusedSharedWeights
from manyhands.spec.load import own_identity
from manyhands.training.loop.run import Run
from manyhands.training.setup import divide_model
from manyhands.training.state.checkpointing import Saver
from manyhands.training.state.training_state import TrainingState
from manyhands.training.step import evaluation

ASKED: dict[str, Any] = {}
STEP = 0
"""The step under way, as the hook below knows it."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hold_the_interpreter() -> None:
    ctypes.PyDLL(None).sleep(60)  # PyDLL keeps the lock that CDLL would let go


def spin() -> None:
    while True:
        time.sleep(0.01)


def wait() -> None:
    while not os.path.exists("continue"):
        time.sleep(0.01)


def die_late() -> None:
    wait()
    die()


def die_once() -> None:
    try:
        os.close(os.open("died", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    die()


def lose() -> None:
    """As on a network, where an exchange may fail for some and not for others."""
    raise PeerLost("on request")


HOW = {
    "die": die,
    "stop": stop,
    "hold": hold_the_interpreter,
    "spin": spin,
    "wait": wait,
    "die late": die_late,
    "die once": die_once,
    "lose": lose,
}


def arm() -> None:
    here = own_identity()
    slot = here.slot if here is not None else 0
    for fault in ASKED.get("faults", []):
        newcomer = here is not None and here.joining
        if slot == fault["slot"] and newcomer == ("newcomer" in fault) and (here is None or here.attempt == 1):
            PLACES[fault["at"]](_once(fault["step"], HOW[fault.get("how", "die")]))


def _once(step: int, act: Callable[[], None]) -> Callable[[], None]:
    left = [act]
    return lambda: left.pop()() if step == STEP and left else None


def _before(owner: Any, name: str) -> Callable[[Callable[[], None]], None]:
    def place(act: Callable[[], None]) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            act()
            return original(*args, **kwargs)

        setattr(owner, name, wrapped)

    return place


def _after(owner: Any, name: str) -> Callable[[Callable[[], None]], None]:
    def place(act: Callable[[], None]) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            act()
            return result

        setattr(owner, name, wrapped)

    return place


IN_BACKWARD: list[Callable[[], None]] = []
IN_FORWARD: list[Callable[[], None]] = []
BEFORE_STEP: list[Callable[[], None]] = []
PLACES: dict[str, Callable[[Callable[[], None]], None]] = {
    "before": BEFORE_STEP.append,
    "forward": IN_FORWARD.append,
    "backward": IN_BACKWARD.append,
    "before the sum": _before(SharedMemorySum, "finish"),
    "after the sum": _after(SharedMemorySum, "finish"),
    "before its part": _before(FusedSharedWeights, "finish_for"),
    "after its part": _after(FusedSharedWeights, "finish_for"),
    "before the flip": _before(FusedSharedWeights, "_flip"),
    "before Gloo's sum": _before(GradientSum, "finish"),
    "after Gloo's sum": _after(GradientSum, "finish"),
    "set up": _after(Run, "_build"),
    "in evaluation": _before(evaluation, "evaluate"),
    "after a barrier": _after(Axis, "barrier"),
    "while saving": _before(Saver, "save_now"),
    "while cutting": _before(divide_model, "_ties"),
    "before the replica agrees": _before(ModelParallelReplica, "agree"),
    "before predictions are kept": _before(evaluation, "to_file"),
    "while loading": _before(TrainingState, "load_weights"),
}


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    time.sleep(ASKED.get("slow_s", 0.005))
    for act in IN_FORWARD:
        act()
    outputs = model(batch[0])
    for act in IN_BACKWARD:
        outputs.register_hook(lambda grad, act=act: act())
    return nn.functional.cross_entropy(outputs, batch[1])


class Watch:
    """Keeps track of the step, and records every commit."""

    def __init__(self) -> None:
        self._file = os.open(ASKED.get("commits", "commits.jsonl"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._calls = 0

    def begin(self, trainer: Any) -> None:
        global STEP
        STEP = trainer.step
        self._calls += 1

    def before_step(self, trainer: Any, step: int) -> None:
        global STEP
        STEP = step
        for act in BEFORE_STEP:
            act()
        if step == ASKED.get("pause"):
            wait()

    def after_step(self, trainer: Any, step: int, stats: Any) -> None:
        line = {"pid": os.getpid(), "step": step, "at": time.monotonic(), "loss": stats.loss, "chief": trainer.is_chief}
        os.write(self._file, json.dumps(line).encode() + b"\n")
        is_first = self._calls == 1 and trainer.is_chief  # the first call of a newcomer may be the second of the others
        if is_first and ASKED.get("until") and os.path.exists(ASKED["until"]):
            trainer.request_stop()


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 40),
        nn.BatchNorm1d(40),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(40, 40),
        nn.ReLU(),
        nn.Linear(40, 4),
    )


class Tied(nn.Module):
    """Two layers share one matrix, and the model's forward adds code between them: it is cut into stages by tracing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.second.weight = self.first.weight
        self.offset = nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        between = torch.relu(self.first(x) + self.offset)
        found: Tensor = self.last(torch.relu(self.second(between)))
        return found


class WithRows(nn.Module):
    """The same, with rows of embeddings for the signs and sizes of some features."""

    def __init__(self) -> None:
        super().__init__()
        self.rest, self.rows = (
            model(),
            mh.nn.EmbeddingBag(4, name="features", optimizer=mh.optim.rows.Adam(), keep_steps=8),
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.rest(x) + self.rows((x[:, :6] * 30).long())
        return found


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(640, 16, generator=generator)
    return x, (x[:, :4] + 0.3 * torch.randn(640, 4, generator=generator)).argmax(1)


def ready_batches() -> Iterator[tuple[Tensor, Tensor]]:
    """A short one, and one that has fewer rows than there are slices, among them."""
    x, y = data()
    sizes = [64, 80, 5, 64, 43, 128, 64, 64, 64, 64]
    yield from zip(x.split(sizes), y.split(sizes), strict=True)


def loader_of_batches() -> DataLoader[Any]:
    rows = [list(range(start, 640, 10)) for start in range(10)]
    return DataLoader(TensorDataset(*data()), batch_sampler=rows)


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": lambda: {"data": data(), "batch_size": 64},
    "by weight": lambda: {"data": data(), "batch_size": 64, "order": mh.order.Weighted(torch.arange(640) % 5)},
    "by length": lambda: {"data": data(), "batch_size": 64, "order": mh.order.ByLength(torch.arange(640) % 7)},
    "ready batches": lambda: {"data": ready_batches, "batched": True},
    "loader of batches": lambda: {"data": loader_of_batches(), "batched": True},
}


class Diary:
    """The moments that hooks are called at once."""

    def __init__(self, chief_only: bool) -> None:
        self.chief_only = chief_only

    def _write(self, moment: str, *what: Any) -> None:
        line = {"pid": os.getpid(), "chief_only": self.chief_only, "of": [moment, *what]}
        with open(ASKED["diary"], "ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")

    def before_validation(self, trainer: Any) -> None:
        self._write("before validation", trainer.step)

    def after_validation(self, trainer: Any, results: dict[str, float]) -> None:
        self._write("after validation", trainer.step, results)

    def on_checkpoint(self, trainer: Any, step: int, path: str) -> None:
        self._write("checkpoint", step)

    def on_failure(self, trainer: Any, error: Exception) -> None:
        self._write("failure", trainer.step, repr(error))

    def end(self, trainer: Any, error: Any) -> None:
        self._write("end", trainer.step, repr(error))


def saved_weights(trainer: mh.Trainer) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        trainer.save(path := Path(folder) / "model.safetensors")
        return {name: one.flatten().tolist() for name, one in load_file(path).items()} if trainer.is_chief else {}


def digest(trained: nn.Module) -> str:
    found = hashlib.sha256()
    for value in trained.state_dict().values():
        for part in value.values() if isinstance(value, dict) else [value]:
            found.update(part.detach().numpy().tobytes())
    return found.hexdigest()


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def train(asked: dict[str, Any]) -> dict[str, Any]:
    """Two calls of `fit` and of `evaluate`; the weights in the end, and what each call returned."""
    ASKED.clear()
    ASKED.update(asked)
    mesh, divided = ASKED.get("mesh"), "mesh" in ASKED
    trainer = mh.Trainer(
        WithRows if ASKED.get("rows") else Tied if ASKED.get("tied") else model,
        loss,
        momentum if divided else lambda params: torch.optim.AdamW(params, lr=2e-3),
        strategy=mh.Mesh(**mesh) if mesh else None,
        exact=ASKED.get("exact", not divided),
        slices=8,
        seed=3,
        clip_norm=ASKED.get("clip"),
        hooks=[Watch(), *([Diary(False), Diary(True)] if "diary" in ASKED else [])],
        metrics={"accuracy": lambda m, batch: (m(batch[0]).argmax(1) == batch[1]).float()},
    )
    arm()
    steps, keep = ASKED["steps"], mh.Checkpoints(every_s=None, every_steps=ASKED.get("save_every"))
    rows = {name: ASKED[name] for name in ("validate_every", "validate_every_s", "train_metrics") if name in ASKED}
    taken = KINDS[ASKED.get("kind", "plain")]()
    first = trainer.fit(**taken, steps=steps, validation=data(), checkpoint=keep, **rows)
    reached = trainer.step
    between = trainer.evaluate(data())
    second = trainer.fit(data(), steps=20, batch_size=64, checkpoint=keep)
    after = trainer.evaluate(data())
    end = {"weights": saved_weights(trainer)} if divided else {"digest": digest(trainer.model)}
    batches = [int(one) for name, one in trainer.model.named_buffers() if name.endswith("num_batches_tracked")]
    return {**end, "batches": batches, "reached": reached, "calls": [list(first), between, list(second), after]}


if __name__ == "__main__":
    print("RESULT " + json.dumps(train(json.loads(sys.argv[1]))), flush=True)
