"""The methods of a strategy that the training loop calls.

`setup(model, optimizer)`, `train_step(step)`, `eval_step(pieces)`, `state()`, `restore(state)`, `close()`. Where each
rank has state that the others lack, `gather_state()` sends it to rank 0 before `state()` is called there. User loops
call the parts of `train_step`: `begin_step`, `slice_context`, `backward`, `end_step`. `Engine` adds what a run calls
when workers join or leave, and when replicas are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.comm.axis import Axis
from manyhands.parallel.replicas.divergence import Hashes
from manyhands.parallel.replicas.phase_timer import Phases
from manyhands.parallel.weights.replica_backend import ReplicaBackend
from manyhands.parallel.weights.shared_memory_group import SharedMemoryGroup
from manyhands.parameter_server.worker.hybrid_rows import HybridStep

__all__ = ["Engine", "Evaluator", "LossFn", "MetricFn", "SliceLike", "SliceResult", "StepLike", "StepStats", "Strategy"]

LossFn = Callable[[nn.Module, Any], Any]
"""(model, batch) -> mean over the batch, or (sum, weight)."""
MetricFn = Callable[[nn.Module, Any], Tensor]
"""(model, batch) -> one value per example."""


class SliceLike(Protocol):
    @property
    def index(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def batch(self) -> Any: ...
    def randomness(self) -> AbstractContextManager[None]: ...


class StepLike(Protocol):
    @property
    def number(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def num_slices(self) -> int: ...
    @property
    def bounds(self) -> Sequence[tuple[int, int]]: ...
    @property
    def load_s(self) -> float: ...
    @property
    def fetched_together(self) -> bool: ...
    @property
    def last(self) -> bool: ...
    def mine(self) -> Iterable[SliceLike]: ...
    def slice(self, v: int) -> SliceLike: ...


@dataclass(slots=True)
class StepStats:
    """One committed step, as hooks and monitors see it. The same on every worker, except for `seconds`."""

    loss: float
    rows: int
    seconds: dict[str, float] = field(default_factory=dict)
    """This worker's time in load, forward, backward, reduce and update; and in gc, where there was any."""
    grad_norm: float | None = None
    skipped: bool = False
    """An fp16 overflow: the loss scale was lowered and the weights were not updated."""
    agreed: bool = False
    """The workers' replicas of the state before this step were compared, and are equal."""
    stop: int = 0
    """The largest `stop` that any worker passed in."""
    collect: bool = False
    """Whether any worker passed in `collect`: then every worker runs the garbage collector now."""
    times: Sequence[Sequence[float]] = ()
    """Of the previous step, by rank: busy seconds in each phase, then seconds waiting for others. Empty: unknown."""
    staleness: int | None = None
    """With parameter servers: by how many updates its stalest gradient lagged."""
    batch: int | None = None
    """With asynchronous parameter servers: the step whose rows it used, and where they begin; else its own."""
    start: tuple[int, int] | None = None
    together: int | None = None
    """Averaging with a quorum: how many workers contributed to this step's averaging round."""
    bytes_sent: int = 0
    lr: float | None = None
    samples_per_s: float = 0.0


@dataclass(frozen=True)
class SliceResult:
    """Evaluation of one slice: sums over its rows."""

    index: int
    rows: int
    loss_sum: float
    weight: float
    metric_sums: dict[str, float]


class Strategy(Protocol):
    def setup(self, model: nn.Module, optimizer: Optimizer) -> None: ...
    def train_step(self, step: StepLike, *, stop: int = 0, collect: bool = False) -> StepStats: ...
    def eval_step(self, pieces: Iterable[SliceLike], metrics: Mapping[str, MetricFn]) -> list[SliceResult]: ...
    def gather_state(self) -> None: ...
    def state(self) -> dict[str, Any]: ...
    def restore(self, state: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class Evaluator(Protocol):
    """Evaluates a model, independently of how it is trained."""

    @property
    def model(self) -> nn.Module: ...
    def eval_step(self, pieces: Iterable[SliceLike], metrics: Mapping[str, MetricFn]) -> list[SliceResult]: ...
    def evaluating(self) -> AbstractContextManager[None]: ...


class Engine(Strategy, Protocol):
    """The implementation of a strategy, as the training loop sees it."""

    phases: Phases
    averaging: str
    """How ranks whose weights differ between rounds average them; "none" where all ranks have the same weights."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def held(self) -> ReplicaBackend: ...
    def editing(self) -> AbstractContextManager[nn.Module]: ...
    def synchronise(self) -> None: ...
    def setup(self, model: nn.Module, optimizer: Optimizer, *, joining: bool = False) -> None: ...
    def begin_step(self, step: StepLike, *, stop: int = 0, collect: bool = False) -> None: ...
    def slice_context(self, piece: SliceLike) -> AbstractContextManager[None]: ...
    def check_first_loss(self, look: Any) -> None: ...
    def loss_of(self, step: StepLike, piece: SliceLike) -> Any: ...
    def backward(self, piece: SliceLike, result: Any) -> None: ...
    def end_step(self) -> StepStats: ...
    def evaluating(self) -> AbstractContextManager[None]: ...
    def using_loss(self, loss_fn: LossFn) -> AbstractContextManager[None]: ...
    @property
    def served_rows(self) -> HybridStep | None:
        """Embedding rows on parameter servers, while all other state is in this process; None: there are none."""

    @property
    def has_residuals(self) -> bool:
        """Whether each rank has state that the others lack, so that `gather_state` has to run on all of them."""

    # Elasticity: ranks join and leave.
    @property
    def round_closed(self) -> bool:
        """Whether ranks may join and leave now; losing a rank later rolls the others back to here at most."""

    @property
    def rolls_back(self) -> bool:
        """Whether losing a rank rolls all ranks back to the end of the last averaging round.

        Otherwise at most the current step is repeated.
        """

    def abandon(self) -> None: ...
    def put_down(self) -> Callable[[], None]:
        """Detach from the model until `take_up`, so that another training can use it.

        The model keeps private copies of its weights and of the optimizer state. Waits for no rank. The returned
        function frees shared memory; call it once every rank has called `put_down`.
        """

    def take_up(self) -> None:
        """Continue this training after `put_down`, on every rank."""

    def adopt_rows(self) -> None:
        """The local part of `take_up`, for a rank that is not admitted yet: reattach embeddings to this training."""

    def regroup(self, axis: Axis, sharing: SharedMemoryGroup | None) -> None: ...
    @property
    def can_finish_step(self) -> bool: ...
    def resume_step(self) -> StepStats: ...
    def lost_slices(self) -> list[int]: ...
    def round_closes_with(self, step: int) -> bool:
        """What `round_closed` will be after that step."""

    # Comparing replicas, which should be equal.
    @property
    def compares_copies(self) -> bool: ...
    def hashes(self) -> Hashes: ...
    def compare(self, hashes: Sequence[Hashes]) -> None: ...
