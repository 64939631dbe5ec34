"""TensorFlow's ParameterServerStrategy with a table of 10 M rows on the server: `... tensorflow_rows_side 2`.

The cluster is that of `tensorflow_ps_side`. Rows are gathered on the server and sent to the worker, their gradients are
sent back and subtracted there: nothing of the table's size is sent.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from typing import Any

from bench.driver.turns import Turns, take_turns
from bench.peers.tensorflow_ps_side import addresses, start
from bench.programs.workloads import SPARSE_BATCH, SPARSE_DIM, SPARSE_IDS, SPARSE_PER_ROW

import tensorflow as tf  # isort: skip  the line above sets its environment up

LEARNING_RATE = 0.01


class Training:
    def __init__(self, strategy: Any, num_workers: int) -> None:
        self._num_workers = num_workers
        with strategy.scope():
            self._table = tf.Variable(lambda: tf.random.stateless_normal((SPARSE_IDS, SPARSE_DIM), (0, 0)))
            self._out = tf.Variable(tf.ones((SPARSE_DIM, 1)))
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self._batches = iter(self._coordinator.create_per_worker_dataset(_dataset))
        self._step = tf.function(self._one_step)

    def run(self, num_steps: int) -> None:
        """So many on each worker, on average."""
        for _ in range(num_steps * self._num_workers):
            self._coordinator.schedule(self._step, args=(self._batches,))
        self._coordinator.join()

    def _one_step(self, batches: Any) -> tf.Tensor:
        ids = tf.reshape(next(batches), [-1])
        rows, out = tf.nn.embedding_lookup(self._table, ids), self._out.read_value()
        with tf.GradientTape() as tape:
            tape.watch([rows, out])
            scores = tf.matmul(tf.reduce_mean(tf.reshape(rows, (-1, SPARSE_PER_ROW, SPARSE_DIM)), 1), out)
            loss = tf.reduce_mean(tf.square(scores - 1.0))
        of_rows, of_out = tape.gradient(loss, [rows, out])
        tf.raw_ops.ResourceScatterSub(resource=self._table.handle, indices=ids, updates=LEARNING_RATE * of_rows)
        self._out.assign_sub(LEARNING_RATE * of_out)
        return loss


def _dataset(_context: Any = None) -> tf.data.Dataset:
    num_rows = SPARSE_IDS // SPARSE_PER_ROW
    order = tf.random.experimental.stateless_shuffle(tf.range(SPARSE_IDS, dtype=tf.int64), (0, 0))
    ids = tf.reshape(order[: num_rows * SPARSE_PER_ROW], (num_rows, SPARSE_PER_ROW))
    rows = tf.data.Dataset.range(num_rows).shuffle(num_rows).repeat().batch(SPARSE_BATCH)
    return rows.map(lambda rows: tf.gather(ids, rows)).prefetch(2)


def main() -> None:
    num_workers = int(sys.argv[1])
    tf.config.threading.set_intra_op_parallelism_threads(1)
    with ExitStack() as stack:
        training = Training(start(addresses(num_workers), stack), num_workers)
        training.run(2)
        how = "ParameterServerStrategy, gRPC, embedding_lookup"
        take_turns(Turns(threads=1, versions={"tensorflow": tf.__version__}, how=how), training.run)
    os._exit(0)  # as in `tensorflow_ps_side`


if __name__ == "__main__":
    main()
