"""TensorFlow's ParameterServerStrategy, taking turns: `python -m bench.peers.tensorflow_ps_side mlp-10m 2`.

This process is the coordinator; it starts one server and so many workers as separate processes, with gRPC between them.
As in TensorFlow's tutorial a step is one `tf.function` that is scheduled on any idle worker: it reads the variables,
and applies its gradients to them on the server. The loss stays on the worker.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["GRPC_FAIL_FAST"] = "use_caller"

import numpy as np
import tensorflow as tf

from bench.driver.turns import Turns, take_turns
from bench.programs.workloads import SERVED_ROWS, WORKLOADS

WIDTHS = (784, 2048, 2048, 2048, 10)
LEARNING_RATE, MOMENTUM = 0.001, 0.9
TRIED_STEPS = 6


class Training:
    """The model's variables on the server, data on the workers, and the step."""

    def __init__(self, workload: str, strategy: Any, num_workers: int) -> None:
        self._batch, self._num_workers = WORKLOADS[workload].batch, num_workers
        with strategy.scope():
            shapes = [shape for before, after in pairwise(WIDTHS) for shape in ((before, after), (after,))]
            self._params = [tf.Variable(_initial(shape)) for shape in shapes]
            self._momenta = [tf.Variable(tf.zeros(shape)) for shape in shapes]
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        data = self._coordinator.create_per_worker_dataset(self._dataset)
        self._rows = iter(data)
        self.xla = self._faster_with_xla()

    def run(self, num_steps: int) -> None:
        """So many on each worker, on average."""
        for _ in range(num_steps * self._num_workers):
            self._coordinator.schedule(self._step, args=(self._rows,))
        self._coordinator.join()

    def _faster_with_xla(self) -> bool:
        """Forward and backward compiled by XLA or not: whichever takes less time here, the loop then uses."""
        took = {}
        for xla in (True, False):
            self._compile(xla)
            self.run(2)
            took[xla] = median(_seconds(self.run) for _ in range(TRIED_STEPS))
        self._compile(took[True] < took[False])
        self.run(2)
        return took[True] < took[False]

    def _compile(self, xla: bool) -> None:
        gradients = tf.function(_gradients, jit_compile=xla)

        def step(rows: Any) -> tf.Tensor:
            x, y = next(rows)
            loss, found = gradients(x, y, [param.read_value() for param in self._params])
            for param, momentum, gradient in zip(self._params, self._momenta, found, strict=True):
                _apply(param, momentum, gradient)
            return loss

        self._step = tf.function(step)

    def _dataset(self, _context: Any = None) -> tf.data.Dataset:
        x = tf.random.stateless_normal((SERVED_ROWS, WIDTHS[0]), (0, 0))
        y = tf.random.stateless_uniform((SERVED_ROWS,), (0, 1), 0, 10, tf.int32)
        rows = tf.data.Dataset.range(SERVED_ROWS).shuffle(SERVED_ROWS).repeat().batch(self._batch)
        return rows.map(lambda rows: (tf.gather(x, rows), tf.gather(y, rows))).prefetch(2)


def _gradients(x: tf.Tensor, y: tf.Tensor, params: list[tf.Tensor]) -> tuple[tf.Tensor, list[tf.Tensor]]:
    with tf.GradientTape() as tape:
        tape.watch(params)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=_forward(x, params))
        loss = tf.reduce_mean(losses)
    return loss, tape.gradient(loss, params)


def _forward(x: tf.Tensor, params: list[tf.Tensor]) -> tf.Tensor:
    *layers, (weight, bias) = zip(params[::2], params[1::2], strict=True)
    for w, b in layers:
        x = tf.nn.relu(tf.nn.bias_add(tf.matmul(x, w), b))
    return tf.nn.bias_add(tf.matmul(x, weight), bias)


def _apply(param: Any, momentum: Any, gradient: tf.Tensor) -> None:
    """On the server: an update runs where its variable is."""
    tf.raw_ops.ResourceApplyMomentum(
        var=param.handle, accum=momentum.handle, lr=LEARNING_RATE, grad=gradient, momentum=MOMENTUM
    )


def _initial(shape: tuple[int, ...]) -> tf.Tensor:
    bound = 1.0 / np.sqrt(shape[0])
    return tf.random.stateless_uniform(shape, (0, len(shape)), -bound, bound)


def _seconds(run: Callable[[int], None]) -> float:
    started = perf_counter()
    run(1)
    return perf_counter() - started


# ---- processes ----


def start(cluster: dict[str, list[str]], stack: ExitStack) -> Any:
    """The strategy over a server and workers that are started here, and end with `stack`."""
    for job in ("ps", "worker"):
        for index in range(len(cluster[job])):
            config = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
            command = [sys.executable, "-m", "bench.peers.tensorflow_ps_side"]
            task = subprocess.Popen(command, env={**os.environ, "TF_CONFIG": config})
            stack.callback(task.wait)
            stack.callback(task.kill)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), task_type="chief", task_id=0, rpc_layer="grpc"
    )
    return tf.distribute.ParameterServerStrategy(resolver)


def addresses(num_workers: int) -> dict[str, list[str]]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(num_workers + 2)]
    chief, server, *workers = [f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
    for listener in listeners:
        listener.close()
    return {"chief": [chief], "ps": [server], "worker": workers}


def serve() -> None:
    """One task of the cluster, until it is killed. One thread computes; more of them only wait for others."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=4)
    tf.distribute.Server(
        resolver.cluster_spec(),
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol="grpc",
        config=config,
    ).join()


def main() -> None:
    if "TF_CONFIG" in os.environ:
        return serve()
    workload, num_workers = sys.argv[1], int(sys.argv[2])
    tf.config.threading.set_intra_op_parallelism_threads(1)
    with ExitStack() as stack:
        training = Training(workload, start(addresses(num_workers), stack), num_workers)
        how = f"ParameterServerStrategy, gRPC, XLA {'on' if training.xla else 'off'}: the faster"
        take_turns(Turns(threads=1, versions={"tensorflow": tf.__version__}, how=how), training.run)
    os._exit(0)  # TensorFlow would contact the other processes, which have ended, to release their functions


if __name__ == "__main__":
    main()
