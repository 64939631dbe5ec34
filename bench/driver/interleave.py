"""Blocks of a peer's steps between blocks of the trainer's, inside one call of `fit`.

Both sides then share the process, its threads and its allocator, and are disturbed alike. What `fit` does once, such as
its first and last checkpoint, is outside of every block. Start reading at `Interleave.after_step`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

from bench.driver.baton import WARM_UP_STEPS, steps_per_block
from bench.driver.turns import SETTLING_STEPS
from bench.results.table import OURS

__all__ = ["Interleave", "Peer"]

Peer = Callable[[int], None]
"""Runs so many steps."""


class Interleave:
    """A hook for `mh.Trainer` that ends `fit` after `num_blocks` blocks of every side.

    `agree` turns this rank's number of steps per block into that of all ranks; `barrier` waits for all ranks.
    `seconds` holds, per side, the seconds per step of each block.
    """

    def __init__(
        self,
        peers: Mapping[str, Peer],
        *,
        num_blocks: int,
        block_s: float,
        agree: Callable[[int], int] = lambda steps: steps,
        barrier: Callable[[], None] = lambda: None,
    ) -> None:
        self._peers, self._num_blocks, self._block_s = dict(peers), num_blocks, block_s
        self._agree, self._barrier = agree, barrier
        self.seconds: dict[str, list[float]] = {name: [] for name in (OURS, *self._peers)}
        self.steps_per_block = 0
        self._step = 0
        self._started = 0.0

    def after_step(self, trainer: Any, step: int, stats: Any) -> None:
        self._step += 1
        if self.steps_per_block == 0:
            self._warm_up()
        elif self._step == SETTLING_STEPS:
            self._started = perf_counter()
        elif self._step == SETTLING_STEPS + self.steps_per_block:
            self.seconds[OURS].append((perf_counter() - self._started) / self.steps_per_block)
            self._run_peers()
            self._step = 0
            if len(self.seconds[OURS]) == self._num_blocks:
                trainer.request_stop()

    def _warm_up(self) -> None:
        if self._step == WARM_UP_STEPS // 2:
            self._started = perf_counter()
        if self._step == WARM_UP_STEPS:
            step_s = (perf_counter() - self._started) / (WARM_UP_STEPS - WARM_UP_STEPS // 2)
            self.steps_per_block = self._agree(steps_per_block(step_s, self._block_s))
            for peer in self._peers.values():
                peer(WARM_UP_STEPS)
            self._barrier()
            self._step = 0

    def _run_peers(self) -> None:
        turn = len(self.seconds[OURS])
        names = list(self._peers)
        for name in names if turn % 2 else reversed(names):  # so that neither always runs right after us
            self._barrier()
            peer = self._peers[name]
            peer(SETTLING_STEPS)
            started = perf_counter()
            peer(self.steps_per_block)
            self.seconds[name].append((perf_counter() - started) / self.steps_per_block)
        self._barrier()
