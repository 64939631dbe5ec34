"""The verbs that the training loop knows of a strategy, and nothing else.

`setup(model, optimizer)`, `train_step(step)`, `eval_step(pieces)`, `state()`, `restore(state)`, `close()`. Where ranks
have state of their own, `gather_state()` brings it to rank 0 before `state()` is asked there. For users who write their
own loop, `train_step` also comes in parts: `begin_step`, `slice_context`, `backward`, `end_step`. `Engine` adds what
runs ask of whoever does a strategy's work when workers come and go, or copies are compared.
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
from manyhands.parallel.weights.replica_backend import Holding
from manyhands.parallel.weights.shared_memory_group import Sharing
from manyhands.parameter_server.worker.hybrid_rows import ServedStep

__all__ = ["Engine", "Evaluator", "LossFn", "MetricFn", "PieceLike", "PieceResult", "StepLike", "StepStats", "Strategy"]

LossFn = Callable[[nn.Module, Any], Any]
"""(model, batch) -> mean over the batch, or (sum, weight)."""
MetricFn = Callable[[nn.Module, Any], Tensor]
"""(model, batch) -> one value per example."""


class PieceLike(Protocol):
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
    def mine(self) -> Iterable[PieceLike]: ...
    def slice(self, v: int) -> PieceLike: ...


@dataclass(slots=True)
class StepStats:
    """One committed step, as hooks and watchers see it. The same on every worker, but for `seconds`."""

    loss: float
    rows: int
    seconds: dict[str, float] = field(default_factory=dict)
    """This worker's time in load, forward, backward, reduce and update; and in gc, where it came to that."""
    grad_norm: float | None = None
    skipped: bool = False
    """An fp16 overflow: the loss scale was lowered and the weights were left alone."""
    agreed: bool = False
    """The workers' copies of the state before this step were compared, and are the same."""
    stop: int = 0
    """The largest of what the workers passed in as `stop`."""
    collect: bool = False
    """Whether any worker passed in `collect`: all are to collect garbage now."""
    times: Sequence[Sequence[float]] = ()
    """Of the step before, by rank: seconds at work in each phase, and of waiting for others. Empty: not known."""
    staleness: int | None = None
    """Under parameter servers: how many updates its gradients had not seen, at most."""
    batch: int | None = None
    """Under asynchronous parameter servers: the step whose rows it took, and where they begin; else its own."""
    start: tuple[int, int] | None = None
    together: int | None = None
    """Under averaging with a quorum: how many workers the round had that it was in."""
    bytes_sent: int = 0
    lr: float | None = None
    samples_per_s: float = 0.0


@dataclass(frozen=True)
class PieceResult:
    """Evaluation of one piece: sums over its rows."""

    index: int
    rows: int
    loss_sum: float
    weight: float
    metric_sums: dict[str, float]


class Strategy(Protocol):
    def setup(self, model: nn.Module, optimizer: Optimizer) -> None: ...
    def train_step(self, step: StepLike, *, stop: int = 0, collect: bool = False) -> StepStats: ...
    def eval_step(self, pieces: Iterable[PieceLike], metrics: Mapping[str, MetricFn]) -> list[PieceResult]: ...
    def gather_state(self) -> None: ...
    def state(self) -> dict[str, Any]: ...
    def restore(self, state: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class Evaluator(Protocol):
    """Whoever can be asked for a model's results, however it is trained."""

    @property
    def model(self) -> nn.Module: ...
    def eval_step(self, pieces: Iterable[PieceLike], metrics: Mapping[str, MetricFn]) -> list[PieceResult]: ...
    def evaluating(self) -> AbstractContextManager[None]: ...


class Engine(Strategy, Protocol):
    """Who does a strategy's work, as the runtime sees it."""

    phases: Phases
    averaging: str
    """How ranks that train weights of their own bring them together; "none" where all have the same."""

    @property
    def model(self) -> nn.Module: ...
    @property
    def held(self) -> Holding: ...
    def editing(self) -> AbstractContextManager[nn.Module]: ...
    def synchronise(self) -> None: ...
    def setup(self, model: nn.Module, optimizer: Optimizer, *, joining: bool = False) -> None: ...
    def begin_step(self, step: StepLike, *, stop: int = 0, collect: bool = False) -> None: ...
    def slice_context(self, piece: PieceLike) -> AbstractContextManager[None]: ...
    def look_first(self, look: Any) -> None: ...
    def loss_of(self, step: StepLike, piece: PieceLike) -> Any: ...
    def backward(self, piece: PieceLike, result: Any) -> None: ...
    def end_step(self) -> StepStats: ...
    def evaluating(self) -> AbstractContextManager[None]: ...
    def using_loss(self, loss_fn: LossFn) -> AbstractContextManager[None]: ...
    @property
    def served_rows(self) -> ServedStep | None:
        """Rows of embeddings that parameter servers have, while all else is in this process; None: there are none."""

    @property
    def has_residuals(self) -> bool:
        """Whether each rank has state of its own, so that `gather_state` needs all of them."""

    # Ranks that come and go.
    @property
    def round_closed(self) -> bool:
        """Whether ranks may come and go here, and a loss later on takes everybody back to here at most."""

    @property
    def goes_back(self) -> bool:
        """Whether a loss takes all ranks back to where the last round closed; else the step is done again at most."""

    def abandon(self) -> None: ...
    def put_down(self) -> Callable[[], None]:
        """Leave the model alone, with weights and states of this rank's own, until `take_up`: another training comes.

        Waits for nobody. What is returned gives shared memory back, once every rank has come so far.
        """

    def take_up(self) -> None:
        """The training goes on, on every rank."""

    def regroup(self, axis: Axis, sharing: Sharing | None) -> None: ...
    @property
    def can_go_on(self) -> bool: ...
    def resume_step(self) -> StepStats: ...
    def lost_slices(self) -> list[int]: ...
    def round_closes_with(self, step: int) -> bool:
        """The same, told before that step."""

    # Copies that should be the same.
    @property
    def compares_copies(self) -> bool: ...
    def hashes(self) -> Hashes: ...
    def compare(self, told: Sequence[Hashes]) -> None: ...
