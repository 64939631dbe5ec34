"""What an evaluator beside a training decides: which checkpoint is next, how many threads, and what it costs.

Plain values in and out; `checkpoint_follower` reads the files. Start reading at `next_checkpoint`.
"""

from __future__ import annotations

import hashlib
import statistics
from collections import deque
from collections.abc import Sequence

from manyhands.checkpoint.format import Manifest
from manyhands.checkpoint.reader import Candidate

__all__ = ["Commit", "SpeedBeside", "commit_of", "digest_of", "next_checkpoint", "threads_beside"]

Commit = tuple[int, int, int]
"""A checkpoint's place in the order of commits: generation and sequence."""
MIN_STEPS = 5
MAX_STEPS = 1000
MAX_EVALUATIONS = 16


def commit_of(manifest: Manifest) -> Commit:
    return *manifest.generation, manifest.sequence


def digest_of(manifest: Manifest) -> str:
    """Of all tensors: equal for the last save of a `fit` and one just before it, which need one evaluation."""
    shards = manifest.by_shard()
    digests = sorted(entry.sha256 for entry in manifest.files if entry.name in shards)
    return hashlib.sha256(f"{manifest.step} {' '.join(digests)}".encode()).hexdigest()


def next_checkpoint(candidates: Sequence[Candidate], after: Commit | None) -> Candidate | None:
    """The first one committed after `after`; None if there is none yet.

    In the order of commits, not of steps: a resumed run may commit a step a second time. An evaluator that is slower
    than the training loses what retention removes, and so is never further behind than the checkpoints on disk.
    """
    known = [(commit_of(one.manifest), one) for one in candidates if one.manifest is not None]
    newer = [pair for pair in known if after is None or pair[0] > after]
    return min(newer, key=lambda pair: pair[0])[1] if newer else None


def threads_beside(cores: int, used: int) -> int:
    """The cores that a training of `used` threads on this host leaves; at least one, which both then share."""
    return max(1, cores - used)


class SpeedBeside:
    """How long the training's steps take while an evaluation computes, and at other times."""

    def __init__(self) -> None:
        self._beside: deque[float] = deque(maxlen=MAX_STEPS)
        self._alone: deque[float] = deque(maxlen=MAX_STEPS)
        self._evaluations: deque[tuple[float, float]] = deque(maxlen=MAX_EVALUATIONS)

    def evaluated(self, began_s: float, ended_s: float) -> None:
        self._evaluations.append((began_s, ended_s))

    def add(self, ended_s: float, took_s: float) -> None:
        """Count a step by its wall clock. One that was measured by no clock does not count."""
        if took_s <= 0:
            return
        middle_s = ended_s - took_s / 2  # of any overlap, long steps would have more than their share
        is_beside = any(began <= middle_s <= end for began, end in self._evaluations)
        (self._beside if is_beside else self._alone).append(took_s)

    @property
    def beside_s(self) -> float | None:
        return _median(self._beside)

    @property
    def alone_s(self) -> float | None:
        return _median(self._alone)


def _median(seconds: Sequence[float]) -> float | None:
    """None of so few steps that one unusual step decides."""
    return statistics.median(seconds) if len(seconds) >= MIN_STEPS else None
