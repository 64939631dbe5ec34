"""Facts a run emits, and all that watchers may read.

The recorder, the progress display, TensorBoard, `mh status` and later the dashboard know these Structs and nothing
else of a run. An event is written once, never changed; a new field gets a default so that old logs still decode.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from manyhands.exact_json import numbers_to_text

__all__ = [
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
    """Wall clock of the emitting process, for people; never compared between hosts."""


class _OfTraining(_Event, frozen=True, kw_only=True):
    training: int = 1
    """Which one of the script's trainings, by the order in which it made them."""


class LaunchStarted(_Event, frozen=True):
    """A launcher is about to start processes; none of them has said anything yet. Shown, and in no record."""

    workers: int
    """On this host."""
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
    """Known when the data has a length and epochs or steps were given."""
    call: str = "fit"
    machine: str = ""
    """Settings of the process that change speed and not results: memory format, allocator, device."""
    exact: bool = False
    mode: str = ""
    """Of parameter servers: "sync", "ssp" or "async"; "ssp" without staleness is "sync"."""
    depends_on_slices: str = ""
    """What in the model makes results depend on V: "dropout", "BatchNorm", both; empty: V changes nothing."""
    data: str = ""
    """What the data was taken for, in words."""
    origins: dict[str, str] = {}
    """Where settings came from, by dotted key ("train.slices"): "constructor", "--slices", ...; no defaults."""


class GenerationStarted(_Event, frozen=True):
    generation: str
    workers: int
    hosts: int
    why: str = ""
    """What ended the one before: "worker 2 on a (pid 4121) died: SIGKILL", "1 joined", "2 left"."""


class WorkerStarted(_Event, frozen=True):
    """A process was started. Ranks change between the generations of an elastic run, its slot does not."""

    slot: int
    incarnation: int
    host: str
    pid: int
    joining: bool = False


class ServerStarted(_Event, frozen=True):
    """A parameter server's process was started; a replacement has the number of the one before."""

    server: int
    incarnation: int
    host: str
    pid: int


class ServerWentOn(_Event, frozen=True):
    """The first update that a parameter server's process has made: if it is a replacement, nobody waits for it now."""

    server: int
    pid: int
    step: int


class StepDone(_OfTraining, frozen=True):
    step: int
    """Counted from 1, over all calls of `fit`."""
    epoch: int
    """Counted from 0: what is printed as epoch 1 is epoch 0. So it is in every event."""
    loss: float
    rows: int
    samples_per_s: float
    phases: dict[str, float]
    """Seconds of this step in load, forward, backward, reduce and update; and in gc, where garbage was collected."""
    lr: float | None = None
    grad_norm: float | None = None
    eta_s: float | None = None
    total_steps: int | None = None
    took_s: float = 0.0
    """Wall clock from the step before, without what came between epochs; `samples_per_s` is smoothed, this is not."""
    start: tuple[int, int] | None = None
    """Where its rows begin in the run's data: the epoch, counted over all calls of `fit`, and the row in its order;
    both from 0."""
    generation: str = ""
    """The one that committed it."""
    staleness: int | None = None
    """Under parameter servers: how many updates its gradients had not seen, at most."""
    batch: int | None = None
    """Under asynchronous parameter servers, where `step` counts updates as they come: whose rows this one took."""
    together: int | None = None
    """Under averaging with a quorum: how many workers the round had that it was in."""
    turn: tuple[int, int] | None = None
    """Where several optimizers take turns on each batch: whose turn it was, and how many there are."""


class StalenessSeen(_OfTraining, frozen=True):
    """How stale gradients were in a call of `fit` under parameter servers."""

    step: int
    updates: dict[int, int]
    """By staleness: how many updates had it."""


class RoundsClosed(_OfTraining, frozen=True):
    """How many workers rounds had in a call of `fit` that averaged with a quorum."""

    step: int
    rounds: dict[int, int]
    """By the number of workers."""


class EpochDone(_OfTraining, frozen=True):
    epoch: int
    """From 0: after the one that is printed as "epoch 1 done" it is 0."""
    step: int
    results: dict[str, float]


class Validated(_OfTraining, frozen=True):
    """`fit` has validated inside an epoch, or has ended there: a row of its history."""

    epoch: int
    """From 0."""
    step: int
    results: dict[str, float]


class Evaluated(_OfTraining, frozen=True):
    step: int
    results: dict[str, float]
    rows: int


class Logged(_OfTraining, frozen=True):
    """Values the user's own code logged."""

    step: int
    values: dict[str, float]


class ResourcesUsed(_OfTraining, frozen=True):
    """What one worker used in a call of `fit`, from the call's first step to `step`. Every worker tells its own."""

    rank: int
    step: int
    steps: int
    seconds: float
    cpu_s: float
    """Of all its threads and loader processes; divided by `seconds`: the cores it kept busy."""
    peak_rss_bytes: int
    """The most memory it ever held, pages that other workers map as well included."""
    pss_bytes: int | None = None
    """At the end of the call: its memory with shared pages divided among those who share them. Linux only."""
    bytes_sent: int = 0
    """Handed to the other workers, over all steps."""
    predicted_bytes: int | None = None
    """What it was said to need at most, where there is a `memory_limit`."""
    predicted_phase: str = ""
    """When: "start", "step" or "save"."""
    phases: dict[str, float] = {}
    """This worker's seconds in load, forward, backward, reduce, update and gc."""


class Straggler(_Event, frozen=True):
    """A worker is slower than the others, in another way than was told before; or, with `is_over`, not any more."""

    rank: int
    host: str
    phase: str
    """Where it loses most: load, forward, backward, reduce or update."""
    factor: float
    """How many times as long it takes as the median of the others, for as much work."""
    step: int
    waiting: float = 0.0
    """The share of a step for which the others wait."""
    is_over: bool = False
    generation: str = ""
    """Whose rank it is."""


class Divided(_Event, frozen=True):
    """With `balance`: from the step after this one on, each rank takes so many slices of a batch."""

    step: int
    slices: list[int]


class PipelineTimed(_Event, frozen=True):
    """How much of a step the workers of a pipeline waited: as the schedule says, and in a step that was measured."""

    step: int
    schedule: str
    microbatches: int
    theory: float
    measured: float
    path: str
    """A picture of both."""


class CheckpointSaved(_OfTraining, frozen=True):
    step: int
    path: str
    num_bytes: int
    seconds: float
    blocked_s: float
    """How long the training loop waited for the snapshot; the rest happened beside it."""


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
    """Workers that train weights of their own lost one, and went back to where all agreed last: no checkpoint, and
    nobody's process."""

    step: int
    """The last that stands; those after it are taken again, by whoever is there."""
    steps: int
    """How many those are, as the chief knows."""


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
    """Copies of weights and states that should be equal were not."""

    step: int
    """The last committed one."""
    workers: list[str]
    """Whose copy is not that of most; where nobody can tell, all in question."""
    ranks: list[int]
    healed: bool
    """They have a right worker's state now; else the run stops."""
    agreed_step: int
    """When they were last found to agree."""


class WrongGradientFound(_Event, frozen=True):
    """A slice was computed by two workers, and its gradients were not the same."""

    step: int
    slice: int
    workers: list[str]
    """Who was wrong; where nobody can tell, both."""
    ranks: list[int]
    replaced: bool
    """The worker ends and the others finish the step; else the run stops."""


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
    """Strict JSON; a number that is not finite is the text "nan", "inf" or "-inf"."""
    line = _encoder.encode(event)
    # There is an event for every step, and looking at each of its numbers would take longer than writing it.
    if line.count(b"null") == msgspec.structs.astuple(event).count(None):
        return line
    return _encoder.encode(numbers_to_text(event))


def encode_lines(many: Sequence[Event]) -> bytes:
    return b"".join(encode(event) + b"\n" for event in many)


def decode(line: bytes) -> Event:
    try:
        return _decoder.decode(line)
    except msgspec.ValidationError:  # perhaps because of a number that is text
        return _lax_decoder.decode(line)
