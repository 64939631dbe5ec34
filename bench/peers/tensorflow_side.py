"""TensorFlow's MultiWorkerMirroredStrategy, taking turns: `python -m bench.peers.tensorflow_side mlp-10m`, TF_CONFIG.

The whole step is one `tf.function`: rows gathered from tensors in memory, gradients summed in one packed all-reduce,
TensorFlow's fused momentum update. Written with variables and kernels, without Keras, whose own loop would only cost
time. The loss is read every step, as in the loops of the others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import numpy as np
import tensorflow as tf

from bench.driver.turns import Turns, take_turns
from bench.programs.workloads import WORKLOADS

WIDTHS = {"mlp-10m": (784, 2048, 2048, 2048, 10)}
NUM_ROWS = 4096
LEARNING_RATE, MOMENTUM = 0.001, 0.9
TRIED_STEPS = 8


class Training:
    """The model's variables, its data, and the step."""

    def __init__(self, workload: str, strategy: Any) -> None:
        self._strategy, self._batch = strategy, WORKLOADS[workload].batch
        rank, num_workers = int(os.environ["RANK"]), strategy.num_replicas_in_sync
        draw = np.random.default_rng(rank)
        self._draw, self._start, self._order = draw, 0, draw.permutation(NUM_ROWS).astype(np.int32)
        self._x = tf.constant(draw.standard_normal((NUM_ROWS, WIDTHS[workload][0]), dtype=np.float32))
        self._y = tf.constant(draw.integers(0, 10, NUM_ROWS, dtype=np.int32))
        self._weight = 1.0 / (self._batch * num_workers)
        with strategy.scope():
            shapes = [shape for before, after in pairwise(WIDTHS[workload]) for shape in ((before, after), (after,))]
            self._params = [tf.Variable(_initial(shape)) for shape in shapes]
            self._momenta = [tf.Variable(tf.zeros(shape)) for shape in shapes]
        self.xla = self._faster_with_xla()

    def _faster_with_xla(self) -> bool:
        """Forward and backward compiled by XLA or not: whichever takes less time here, the loop then uses."""
        took = {}
        for xla in (True, False):
            self._compile(xla)
            self.run(2)
            took[xla] = median(_seconds(self.run) for _ in range(TRIED_STEPS))
        faster = took[True] < took[False]
        self._compile(faster)
        self.run(2)  # every rank runs the same number of steps, whichever is faster there
        return faster

    def _compile(self, xla: bool) -> None:
        self._gradients = tf.function(self._loss_and_gradients, jit_compile=xla)
        self._step = tf.function(lambda rows: self._strategy.run(self._replica_step, args=(rows,)))

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            float(self._step(self._next_rows()))

    def _replica_step(self, rows: tf.Tensor) -> tf.Tensor:
        loss, gradients = self._gradients(tf.gather(self._x, rows), tf.gather(self._y, rows))
        context = tf.distribute.get_replica_context()
        summed = context.all_reduce(tf.distribute.ReduceOp.SUM, gradients)
        context.merge_call(self._update, args=(summed,))
        return loss

    def _loss_and_gradients(self, x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=self._forward(x))
            loss = tf.reduce_sum(losses) * self._weight
        return loss, tape.gradient(loss, self._params)

    def _forward(self, x: tf.Tensor) -> tf.Tensor:
        layers = list(zip(self._params[::2], self._params[1::2], strict=True))
        for weight, bias in layers[:-1]:
            x = tf.nn.relu(tf.nn.bias_add(tf.matmul(x, weight), bias))
        weight, bias = layers[-1]
        return tf.nn.bias_add(tf.matmul(x, weight), bias)

    def _update(self, strategy: Any, gradients: list[tf.Tensor]) -> None:
        for param, momentum, gradient in zip(self._params, self._momenta, gradients, strict=True):
            strategy.extended.update(param, _apply, args=(momentum, gradient), group=False)

    def _next_rows(self) -> tf.Tensor:
        if self._start + self._batch > NUM_ROWS:
            self._order, self._start = self._draw.permutation(NUM_ROWS).astype(np.int32), 0
        self._start += self._batch
        return tf.constant(self._order[self._start - self._batch : self._start])


def _seconds(run: Callable[[int], None]) -> float:
    started = perf_counter()
    run(1)
    return perf_counter() - started


def _apply(param: Any, momentum: Any, gradient: tf.Tensor) -> None:
    tf.raw_ops.ResourceApplyMomentum(
        var=param.handle, accum=momentum.handle, lr=LEARNING_RATE, grad=gradient, momentum=MOMENTUM
    )


def _initial(shape: tuple[int, ...]) -> tf.Tensor:
    bound = 1.0 / np.sqrt(shape[0])
    return tf.random.stateless_uniform(shape, (0, len(shape)), -bound, bound)


def main() -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    training = Training(sys.argv[1], strategy)
    how = f"MultiWorkerMirroredStrategy, ring, XLA {'on' if training.xla else 'off'}: the faster"
    take_turns(Turns(threads=1, versions={"tensorflow": tf.__version__}, how=how), training.run)


if __name__ == "__main__":
    main()
