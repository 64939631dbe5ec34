"""Digests of two dozen small runs: every strategy, with BatchNorm, dropout, clipping, precision, own loops and resumes.

    python -m tools.run_digests > before.json          # before a change that must change no bit
    python -m tools.run_digests --compare before.json  # after it

A digest is of the bytes of all weights and of the history. Runs whose order depends on timing (asynchronous servers)
have one worker. This file is also the script that `mh run` starts, with the name of a run as its argument.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple


class Case(NamedTuple):
    workers: int
    strategy: str = "mirrored"
    flags: tuple[str, ...] = ()
    script: str = "trainer"
    options: dict[str, Any] = {}


CASES = {
    "one worker": Case(1),
    "mirrored, 2 workers": Case(2),
    "mirrored, 3 workers": Case(3),
    "mirrored, exact": Case(3, flags=("--exact",)),
    "mirrored, bf16, clipped": Case(2, flags=("--precision", "bf16", "--clip-norm", "0.5")),
    "mirrored, fp64": Case(2, flags=("--precision", "fp64")),
    "mirrored, coded gradients": Case(2, flags=("--reducer", "bf16")),
    "mirrored, over the network": Case(2, flags=("--plane", "gloo")),
    "elastic": Case(2, flags=("--elastic", "1:2")),
    "central storage": Case(2, "central-storage"),
    "sharded": Case(2, "sharded"),
    "tensor": Case(2, "tensor", options={"plain": True}),
    # Cuts are set: the balance by measured times may differ, and each worker's digest is of its own layers.
    "pipeline": Case(2, options={"plain": True, "pipeline": {"stages": 2, "cuts": ("2",)}}),
    "mesh": Case(4, "mesh", options={"plain": True, "mesh": {"data": 2, "tensor": 2}}),
    "local SGD": Case(2, "local-sgd"),
    "diloco": Case(2, "diloco"),
    "servers, sync": Case(2, "parameter-server", options={"servers": {"servers": 2, "mode": "sync"}}),
    "servers, async": Case(1, "parameter-server", options={"servers": {"servers": 2, "mode": "async"}}),
    "servers, hybrid": Case(
        2, "parameter-server", script="rows", options={"servers": {"servers": 1, "mode": "hybrid"}}
    ),
    "own loop": Case(2, script="loop"),
    "own loop on servers": Case(2, "parameter-server", script="loop", options={"servers": {"mode": "sync"}}),
    "embedding rows": Case(2, script="rows"),
    "two trainings": Case(2, script="two"),
    "resumed on other workers": Case(2, options={"stop": 5, "then": 3}),
}


# ---- the script ----------------------------------------------------------------------------------------------------


def train(name: str, out: Path) -> None:
    import torch
    from torch import nn

    import manyhands as mh

    case = CASES[name]
    draw = torch.Generator().manual_seed(0)
    x, ids = torch.randn(83, 8, generator=draw), torch.randint(0, 40, (83, 3), generator=draw)
    data = (x, ids, x.sum(1, keepdim=True).tanh())

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with_rows, plain = case.script == "rows", case.options.get("plain", False)
            self.rows = mh.nn.Embedding(4, name="ids") if with_rows else None
            self.first = nn.Linear(12 if with_rows else 8, 16)
            self.norm = nn.Identity() if plain else nn.BatchNorm1d(16)
            self.rest = nn.Sequential(nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))

        def forward(self, x: Any, ids: Any) -> Any:
            if self.rows is not None:
                x = torch.cat([x, self.rows(ids).mean(1)], 1)
            return self.rest(self.norm(self.first(x)))

    def make() -> nn.Module:
        if case.options.get("plain"):  # tensor and pipeline can cut this model automatically
            return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
        return Net()

    def loss(model: Any, batch: Any) -> Any:
        x, ids, target = batch
        given = model(x) if case.options.get("plain") else model(x, ids)
        return nn.functional.mse_loss(given, target)

    def stop_at(trainer: Any, step: int) -> None:
        if step == case.options.get("stop") and not out.with_suffix(".stopped").exists() and trainer.is_chief:
            out.with_suffix(".stopped").touch()
            os.kill(os.getppid(), 15)

    def strategy() -> Any:
        if "mesh" in case.options:
            return mh.Mesh(**case.options["mesh"])
        if "pipeline" in case.options:
            return mh.PipelineParallel(**case.options["pipeline"])
        return mh.ParameterServer(**case.options["servers"]) if "servers" in case.options else case.strategy

    def optimizer(parameters: Any) -> Any:
        return torch.optim.AdamW(parameters, lr=0.01)

    history: list[Any] = []
    if case.script == "loop":
        hands = mh.join(strategy(), seed=3, slices=6)
        net = make()
        model, _ = hands.setup(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9))
        for batch in hands.batches(data, batch_size=16, epochs=2):
            hands.backward(loss(model, batch))
            hands.step()
        history.append(hands.loss)
        trainers, chief = [hands], hands.is_chief
        states = [model.state_dict()]
    else:
        hook = type("Stop", (), {"before_step": staticmethod(stop_at)})()
        trainers = [mh.Trainer(make, loss, optimizer, strategy(), seed=3, slices=6, hooks=[hook])]
        history.append(trainers[0].fit(data, epochs=2, batch_size=16, checkpoint=mh.Checkpoints(every_steps=2)))
        if case.script == "two":
            trainers.append(mh.Trainer(trainers[0].model, loss, optimizer, strategy(), seed=4, slices=6))
            history.append(trainers[1].fit(data, epochs=1, batch_size=20))
        history.append(trainers[-1].evaluate(data))
        chief = trainers[0].is_chief
        states = [trainer.model.state_dict() for trainer in trainers]
    digest = hashlib.sha256()

    def take(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            digest.update(
                bytes(value.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).tolist())
            )
        elif isinstance(value, dict):
            for key, one in value.items():
                digest.update(str(key).encode())
                take(one)
        else:
            digest.update(repr(value).encode())

    take(dict(enumerate(states)))
    if chief:
        out.write_text(json.dumps({"weights": digest.hexdigest()[:24], "history": shown(history)}))


def shown(history: Any) -> str:
    """The history, without the fields that differ from run to run."""
    rows = [dict(row) for part in history if isinstance(part, list) for row in part]
    others = [part for part in history if not isinstance(part, list)]
    for row in rows:
        for name in [one for one in row if one.endswith("_s")]:
            del row[name]
    return hashlib.sha256(json.dumps([rows, others], sort_keys=True).encode()).hexdigest()[:24]


# ---- all of them ---------------------------------------------------------------------------------------------------


def digest_of(name: str) -> Any:
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        for workers in [case.workers, *([case.options["then"]] if "then" in case.options else [])]:
            start = [sys.executable, "-m", "manyhands.cli.main", "run", "-n", str(workers), "--threads", "1"]
            where = ["--run-dir", f"{folder}/run", "--ui", "none"]
            words = [*start, *where, *case.flags, __file__, name, str(out)]
            done = subprocess.run(words, capture_output=True, text=True, timeout=300)
        if not out.exists():
            return {"failed": done.stderr[-2000:]}
        return json.loads(out.read_text())


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] in CASES:
        train(sys.argv[1], Path(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--compare", type=Path, metavar="FILE", help="print which digests differ from this file")
    parser.add_argument("--only", nargs="*", default=list(CASES), metavar="NAME")
    asked = parser.parse_args()
    found = {}
    for name in asked.only:
        found[name] = digest_of(name)
        print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    if asked.compare is None:
        print(json.dumps(found, indent=1))
        return
    before = json.loads(asked.compare.read_text())
    others = [name for name in found if found[name] != before.get(name)]
    print(f"{len(found) - len(others)} of {len(found)} are the same" + "".join(f"\n  other: {name}" for name in others))
    sys.exit(bool(others))


if __name__ == "__main__":
    main()
