"""Events that a run emits; observers read nothing else.

The recorder, the progress display, TensorBoard, `mh status` and later the dashboard use only these Structs. An event is
written once, never changed; a new field gets a default so that old logs still decode.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from manyhands.exact_json import numbers_to_text

__all__ = [
    "CheckpointEvaluated",
    "CheckpointFailed",
    "CheckpointSaved",
    "CopiesDiverged",
    "Divided",
    "EpochDone",
    "Evaluated",
    "Event",
    "GenerationStarted",
    "LaunchStarted",
    "Logged",
    "PipelineTimed",
    "ResourcesUsed",
    "Resumed",
    "RoundRestarted",
    "RoundsClosed",
    "RunEnded",
    "RunStarted",
    "ServerLost",
    "ServerStarted",
    "ServerWentOn",
    "StalenessSeen",
    "StepDone",
    "Straggler",
    "Validated",
    "Warned",
    "WorkerLost",
    "WorkerStarted",
    "WrongGradientFound",
    "decode",
    "encode",
    "encode_lines",
]


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=True):
    time_s: float = 0.0
    """Wall clock of the emitting process, for display; never compared between hosts."""


class _OfTraining(_Event, frozen=True, kw_only=True):
    training: int = 1
    """Number of the training within the script, in the order of creation."""


class LaunchStarted(_Event, frozen=True):
    """A launcher is about to start processes; none has reported yet. Displayed, but not recorded."""

    workers: int
    """Workers on this host."""
    servers: int = 0


class RunStarted(_OfTraining, frozen=True):
    run: str
    strategy: str
    workers: int
    slices: int
    precision: str
    threads: int
    attempt: int = 1
    total_steps: int | None = None
    """Known if the data has a length and epochs or steps were given."""
    call: str = "fit"
    machine: str = ""
    """Settings of the process that change speed and not results: memory format, allocator, device."""
    exact: bool = False
    mode: str = ""
    """Mode of parameter servers: "sync", "ssp" or "async"; "ssp" without staleness is "sync"."""
    depends_on_slices: str = ""
    """Layers that make results depend on V: "dropout", "BatchNorm", both; empty: V changes nothing."""
    data: str = ""
    """Description of the detected kind of data."""
    origins: dict[str, str] = {}
    """Origins of settings, by dotted key ("train.slices"): "constructor", "--slices", ...; without defaults."""


class GenerationStarted(_Event, frozen=True):
    generation: str
    workers: int
    hosts: int
    why: str = ""
    """What ended the previous one: "worker 2 on a (pid 4121) died: SIGKILL", "1 joined", "2 left"."""


class WorkerStarted(_Event, frozen=True):
    """A worker process was started. Its rank may change between generations of an elastic run, its slot does not."""

    slot: int
    incarnation: int
    host: str
    pid: int
    joining: bool = False


class ServerStarted(_Event, frozen=True):
    """A parameter server's process was started; a replacement has the same number."""

    server: int
    incarnation: int
    host: str
    pid: int


class ServerWentOn(_Event, frozen=True):
    """A parameter server's process made its first update: if it is a replacement, no worker waits for it any longer."""

    server: int
    pid: int
    step: int


class StepDone(_OfTraining, frozen=True):
    step: int
    """Counted from 1, over all calls of `fit`."""
    epoch: int
    """Counted from 0, as in every event: it is printed from 1."""
    loss: float
    rows: int
    samples_per_s: float
    phases: dict[str, float]
    """Seconds of this step in load, forward, backward, reduce and update; and in gc, if garbage was collected."""
    lr: float | None = None
    grad_norm: float | None = None
    eta_s: float | None = None
    total_steps: int | None = None
    took_s: float = 0.0
    """Wall clock since the previous step, without work between epochs; `samples_per_s` is smoothed, this is not."""
    start: tuple[int, int] | None = None
    """Position of its first row in the run's data: the epoch, counted over all calls of `fit`, and the row in its
    order; both from 0."""
    generation: str = ""
    """The generation that committed it."""
    staleness: int | None = None
    """With parameter servers: the largest number of updates that its gradients had not seen."""
    batch: int | None = None
    """With asynchronous parameter servers, where `step` counts updates in order of arrival: the batch of this one."""
    together: int | None = None
    """With averaging by quorum: the number of workers in its averaging round."""
    turn: tuple[int, int] | None = None
    """If several optimizers alternate on each batch: the index of this step's optimizer, and their number."""


class StalenessSeen(_OfTraining, frozen=True):
    """Staleness of gradients in a call of `fit` with parameter servers."""

    step: int
    updates: dict[int, int]
    """Number of updates, by staleness."""


class RoundsClosed(_OfTraining, frozen=True):
    """Sizes of averaging rounds in a call of `fit` that averaged by quorum."""

    step: int
    rounds: dict[int, int]
    """Number of rounds, by number of workers."""


class EpochDone(_OfTraining, frozen=True):
    epoch: int
    """From 0: the one printed as "epoch 1 done" is 0."""
    step: int
    results: dict[str, float]


class Validated(_OfTraining, frozen=True):
    """`fit` validated within an epoch, or ended there: one row of its history."""

    epoch: int
    """From 0."""
    step: int
    results: dict[str, float]


class Evaluated(_OfTraining, frozen=True):
    step: int
    results: dict[str, float]
    rows: int


class CheckpointEvaluated(_OfTraining, frozen=True):
    """A process beside the training evaluated a checkpoint; recorded in a file of that process."""

    step: int
    results: dict[str, float]
    rows: int
    seconds: float
    """For the evaluation, without loading the checkpoint."""
    call: int
    """The call of the script in which the checkpoint was taken."""
    commit: tuple[int, int, int]
    """The checkpoint's place in the order of commits: its generation (two numbers) and its sequence."""
    digest: str
    """Of its tensors and step: one that is saved a second time with the same tensors is evaluated once."""
    step_s: float | None = None
    """Median seconds of the training's steps during evaluations, so far; None: the record has none yet."""
    step_alone_s: float | None = None
    """The same of its other steps."""


class Logged(_OfTraining, frozen=True):
    """Values logged by the user's code."""

    step: int
    values: dict[str, float]


class ResourcesUsed(_OfTraining, frozen=True):
    """Resources that one worker used in a call of `fit`, from the call's first step to `step`; one event per worker."""

    rank: int
    step: int
    steps: int
    seconds: float
    cpu_s: float
    """CPU time of all its threads and loader processes; divided by `seconds`: the cores it kept busy."""
    peak_rss_bytes: int
    """Peak resident memory, including pages that other workers map as well."""
    pss_bytes: int | None = None
    """Memory at the end of the call, with shared pages divided among the processes that share them. Linux only."""
    bytes_sent: int = 0
    """Sent to the other workers, over all steps."""
    predicted_bytes: int | None = None
    """Predicted peak of its memory, if there is a `memory_limit`."""
    predicted_phase: str = ""
    """Phase of the predicted peak: "start", "step" or "save"."""
    phases: dict[str, float] = {}
    """This worker's seconds in load, forward, backward, reduce, update and gc."""
    handed_over: int = 0
    """Bytes given to other processes, over all steps: as `bytes_sent`, and what passed through memory of this host."""
    slices: int = 0
    """Slices that it computed, over all steps; 0 where parameter servers lease them."""


class Straggler(_Event, frozen=True):
    """A worker is slower than the others, other than reported before; or, with `is_over`, no longer."""

    rank: int
    host: str
    phase: str
    """Phase in which it loses most time: load, forward, backward, reduce or update."""
    factor: float
    """Its time for equal work over the median of the others."""
    step: int
    waiting: float = 0.0
    """The fraction of a step for which the others wait."""
    is_over: bool = False
    generation: str = ""
    """The generation that `rank` refers to."""


class Divided(_Event, frozen=True):
    """With `balance`: number of slices of a batch per rank, from the next step on."""

    step: int
    slices: list[int]


class PipelineTimed(_Event, frozen=True):
    """Fraction of a step that the workers of a pipeline waited: by the schedule, and in a measured step."""

    step: int
    schedule: str
    microbatches: int
    theory: float
    measured: float
    path: str
    """File of a picture of both."""


class CheckpointSaved(_OfTraining, frozen=True):
    step: int
    path: str
    num_bytes: int
    seconds: float
    blocked_s: float
    """How long the training loop waited for the snapshot; the rest ran in the background."""


class CheckpointFailed(_OfTraining, frozen=True):
    step: int
    reason: str


class Resumed(_OfTraining, frozen=True):
    step: int
    epoch: int
    """From 0."""
    path: str
    skipped: list[str] = []
    """Newer checkpoints that did not verify, with the reason."""


class RoundRestarted(_OfTraining, frozen=True):
    """Under local SGD a worker was lost, and the others rolled back to the end of the last averaging round: without a
    checkpoint, and without restarting a process."""

    step: int
    """The last step that is kept; the live workers repeat those after it."""
    steps: int
    """The number of repeated steps, as far as the chief knows."""


class WorkerLost(_Event, frozen=True):
    rank: int
    host: str
    pid: int
    reason: str
    collateral: bool = False


class ServerLost(_Event, frozen=True):
    server: int
    host: str
    pid: int
    reason: str


class CopiesDiverged(_Event, frozen=True):
    """Copies of weights and optimizer state that should be equal differed."""

    step: int
    """The last committed step."""
    workers: list[str]
    """Workers whose copy is not that of the majority; without a majority, all in question."""
    ranks: list[int]
    healed: bool
    """The state of a correct worker was copied to them; else the run stops."""
    agreed_step: int
    """The last step after which they were equal."""


class WrongGradientFound(_Event, frozen=True):
    """Two workers computed the same slice, and the gradients differed."""

    step: int
    slice: int
    workers: list[str]
    """The worker that was wrong; both if that is unknown."""
    ranks: list[int]
    replaced: bool
    """The worker is ended and the others finish the step; else the run stops."""


class Warned(_Event, frozen=True):
    text: str


class RunEnded(_Event, frozen=True):
    exit_code: int
    step: int
    reason: str
    dropped: int = 0
    """Events that could not be recorded."""


Event = (
    LaunchStarted
    | RunStarted
    | GenerationStarted
    | WorkerStarted
    | ServerStarted
    | ServerWentOn
    | StepDone
    | StalenessSeen
    | RoundsClosed
    | Straggler
    | Divided
    | PipelineTimed
    | EpochDone
    | Evaluated
    | CheckpointEvaluated
    | Validated
    | Logged
    | ResourcesUsed
    | CheckpointSaved
    | CheckpointFailed
    | Resumed
    | RoundRestarted
    | WorkerLost
    | ServerLost
    | CopiesDiverged
    | WrongGradientFound
    | Warned
    | RunEnded
)

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


_lax_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event, strict=False)


def encode(event: Event) -> bytes:
    """Strict JSON; non-finite numbers are the strings "nan", "inf" or "-inf"."""
    line = _encoder.encode(event)
    # There is an event for every step, and checking each of its numbers would take longer than encoding it.
    if line.count(b"null") == msgspec.structs.astuple(event).count(None):
        return line
    return _encoder.encode(numbers_to_text(event))


def encode_lines(many: Sequence[Event]) -> bytes:
    return b"".join(encode(event) + b"\n" for event in many)


def decode(line: bytes) -> Event:
    try:
        return _decoder.decode(line)
    except msgspec.ValidationError:  # perhaps because of a number encoded as text
        return _lax_decoder.decode(line)
