"""A parameter server of Ray actors, taking turns: `python -m bench.peers.ray_side documented|lean mlp-10m 2`.

One actor has the weights and the optimizer, the others compute gradients. The driver passes the first finished gradient
to the server, and the updated weights to the worker that computed it. "documented" is the asynchronous example of Ray's
documentation: weights are torch tensors that workers load, gradients are stacked and summed, although there is one.
"lean" does neither: both are numpy arrays, used in place in Ray's object store.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor, nn

from bench.driver.turns import Turns, take_turns
from bench.programs.models import loss, make_data, make_model, optimizer_of
from bench.programs.workloads import SERVED_ROWS, WORKLOADS

Arrays = list[np.ndarray[Any, np.dtype[np.float32]]]
Weights = dict[str, Tensor] | Arrays


@ray.remote(num_cpus=1)
class Server:
    """The weights, and the only optimizer."""

    def __init__(self, kind: str, workload: str) -> None:
        torch.set_num_threads(1)
        self._is_lean, self._model = kind == "lean", make_model(workload)
        self._params = list(self._model.parameters())
        self._optimizer = optimizer_of(workload)(self._params)

    def weights(self) -> Weights:
        if self._is_lean:
            return [param.detach().numpy() for param in self._params]
        return {name: value.cpu() for name, value in self._model.state_dict().items()}

    def apply(self, *gradients: Arrays) -> Weights:
        if self._is_lean:
            (found,) = gradients
        else:
            found = [np.stack(of_one).sum(axis=0) for of_one in zip(*gradients, strict=True)]
        for param, gradient in zip(self._params, found, strict=True):
            param.grad = torch.from_numpy(gradient)
        self._optimizer.step()
        return self.weights()


@ray.remote(num_cpus=1)
class Worker:
    def __init__(self, workload: str, rank: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(rank)
        self._model: nn.Module = make_model(workload)
        self._params = list(self._model.parameters())
        self._x, self._y = make_data(workload, SERVED_ROWS)
        self._batch = WORKLOADS[workload].batch
        self._order, self._start = torch.randperm(SERVED_ROWS), 0

    def gradients(self, weights: Weights) -> Arrays:
        self._look_at(weights)
        self._model.zero_grad()
        rows = self._next_rows()
        loss(self._model, (self._x[rows], self._y[rows])).backward()  # type: ignore[no-untyped-call]
        return [param.grad.numpy() for param in self._params if param.grad is not None]

    def _look_at(self, weights: Weights) -> None:
        if isinstance(weights, dict):
            self._model.load_state_dict(weights)
            return
        for param, weight in zip(self._params, weights, strict=True):
            param.data = torch.from_numpy(weight)

    def _next_rows(self) -> Tensor:
        if self._start + self._batch > SERVED_ROWS:
            self._order, self._start = torch.randperm(SERVED_ROWS), 0
        self._start += self._batch
        return self._order[self._start - self._batch : self._start]


class Training:
    def __init__(self, kind: str, workload: str, num_workers: int) -> None:
        self._server: Any = Server.remote(kind, workload)
        self._workers: list[Any] = [Worker.remote(workload, rank) for rank in range(num_workers)]
        self._weights: list[Any] = [self._server.weights.remote() for _ in self._workers]

    def run(self, num_steps: int) -> None:
        """So many on each worker, on average."""
        started = len(self._workers)
        at_work = {
            worker.gradients.remote(weights): rank
            for rank, (worker, weights) in enumerate(zip(self._workers, self._weights, strict=True))
        }
        while at_work:
            (first, *_), _ = ray.wait(list(at_work))
            rank = at_work.pop(first)
            self._weights[rank] = self._server.apply.remote(first)
            if started < num_steps * len(self._workers):
                started += 1
                at_work[self._workers[rank].gradients.remote(self._weights[rank])] = rank
        ray.wait(self._weights, num_returns=len(self._weights))


def main() -> None:
    kind, workload, num_workers = sys.argv[1], sys.argv[2], int(sys.argv[3])
    ray.init(
        num_cpus=num_workers + 2,
        include_dashboard=False,
        logging_level="WARNING",
        runtime_env={"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"], "PYTHONWARNINGS": "ignore"}},
    )
    training = Training(kind, workload, num_workers)
    training.run(2)
    versions = {"ray": ray.__version__, "torch": torch.__version__}
    take_turns(Turns(threads=1, versions=versions, how=f"actors, async, {kind}"), training.run)
    ray.shutdown()


if __name__ == "__main__":
    main()
