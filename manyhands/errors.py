"""Every exception that a user can get.

    ManyhandsError                  70  root; raised directly only for our own bugs
    ├── UsageError                   2  the request cannot work
    │   ├── SpecError                   a setting: unknown, mistyped, or in conflict
    │   ├── ClusterError                TF_CONFIG, a cluster spec, a join file
    │   ├── NotHere                     a name of TensorFlow without a meaning here
    │   ├── DataError                   the data given to `fit`, `evaluate` or `predict`
    │   ├── RunDirectoryInUse           another live run uses the directory
    │   └── RunFinished                 the directory has a finished run
    ├── EnvironmentProblem           3  the machine or the network cannot do it
    │   └── JoinRefused                 no key, a wrong key, or another run's key
    ├── TrainingFailed               1  the training code failed
    │   ├── BadLoss                     a loss that is not a scalar, or has no gradient
    │   ├── NonFinite                   NaN or infinity in a loss or a parameter
    │   │   └── Diverged                copies of the weights that differ, gradients that are wrong: numbers, not code
    │   ├── MemoryChanged               weights in shared memory were changed by something other than a step
    │   ├── DataFetchFailed             the dataset raised while a slice was fetched
    │   ├── StepFailed                  a step function that was scheduled on a cluster raised
    │   └── CallCancelled               a scheduled call never ran, because another one failed
    ├── CheckpointError              3
    │   ├── CheckpointCorrupt           truncated, flipped bits, missing files
    │   ├── CheckpointMismatch          from another model or run
    │   ├── CheckpointTooNew            written by a later format
    │   └── CheckpointSaveFailed        the previous checkpoint is untouched
    ├── PartLost                     1  no live worker has some part of a model-parallel model; the checkpoint does
    ├── PeerLost                     1  another worker was lost; the run's failure block names it
    │   ├── PeerTimeout                 another worker did not arrive in time
    │   └── ServerStateLost             a parameter server with the only copy died in the middle of an update
    ├── GaveUp                       4  the restart budget is spent
    └── Preempted                   75  stopped on request, with a committed checkpoint

The number is the exit code of the command line. An error says what happened with the numbers,
where it was asked for, and what to type instead; the library raises, the command line prints.
"""

from collections.abc import Sequence

__all__ = [
    "BadLoss",
    "CallCancelled",
    "CheckpointCorrupt",
    "CheckpointError",
    "CheckpointMismatch",
    "CheckpointSaveFailed",
    "CheckpointTooNew",
    "ClusterError",
    "DataError",
    "DataFetchFailed",
    "Diverged",
    "EnvironmentProblem",
    "GaveUp",
    "JoinRefused",
    "ManyhandsError",
    "MemoryChanged",
    "NonFinite",
    "NotHere",
    "PartLost",
    "PeerLost",
    "PeerTimeout",
    "Preempted",
    "RunDirectoryInUse",
    "RunFinished",
    "ServerStateLost",
    "SpecError",
    "StepFailed",
    "TrainingFailed",
    "UsageError",
]


class ManyhandsError(Exception):
    """What happened; `where` it was asked for; `fix`: what to type instead, one suggestion per line."""

    exit_code = 70

    def __init__(self, what: str, *, where: str | None = None, fix: Sequence[str] = ()) -> None:
        self.what, self.where, self.fix = what, where, tuple(fix)
        super().__init__(what)

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  asked for in: {self.where}")
        lines += [f"  try: {suggestion}" for suggestion in self.fix]
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions are pickled between processes; the keyword arguments would otherwise be lost.
        return _rebuild, (type(self), self.what, self.where, self.fix)


def _rebuild(kind: type[ManyhandsError], what: str, where: str | None, fix: Sequence[str]) -> ManyhandsError:
    return kind(what, where=where, fix=fix)


class UsageError(ManyhandsError):
    exit_code = 2


class SpecError(UsageError):
    pass


class ClusterError(UsageError):
    pass


class NotHere(UsageError):
    pass


class DataError(UsageError):
    pass


class RunDirectoryInUse(UsageError):
    pass


class RunFinished(UsageError):
    pass


class EnvironmentProblem(ManyhandsError):
    exit_code = 3


class JoinRefused(EnvironmentProblem):
    pass


class TrainingFailed(ManyhandsError):
    exit_code = 1


class BadLoss(TrainingFailed):
    pass


class NonFinite(TrainingFailed):
    pass


class Diverged(TrainingFailed):
    """Two copies of the weights differ, and it is unknown which is right: a restart would not help."""


class MemoryChanged(TrainingFailed):
    pass


class DataFetchFailed(TrainingFailed):
    pass


class StepFailed(TrainingFailed):
    pass


class CallCancelled(TrainingFailed):
    pass


class CheckpointError(ManyhandsError):
    exit_code = 3


class CheckpointCorrupt(CheckpointError):
    pass


class CheckpointMismatch(CheckpointError):
    pass


class CheckpointTooNew(CheckpointError):
    pass


class CheckpointSaveFailed(CheckpointError):
    pass


class PartLost(ManyhandsError):
    exit_code = 1


class PeerLost(ManyhandsError):
    exit_code = 1


class PeerTimeout(PeerLost):
    pass


class ServerStateLost(PeerLost):
    pass


class GaveUp(ManyhandsError):
    exit_code = 4


class Preempted(ManyhandsError):
    exit_code = 75
