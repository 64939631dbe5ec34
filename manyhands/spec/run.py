"""Settings of a run: one frozen Struct per section of the config file.

Every field has its default, its meaning and its check here; `spec.load` fills them from the config file, the
environment, constructor arguments and flags. No torch, no I/O.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from manyhands.errors import SpecError
from manyhands.spec.cluster_section import ClusterSection
from manyhands.spec.strategy_names import LIMITS, ReducerName, StrategyName

__all__ = [
    "CheckpointSection",
    "CommSection",
    "LaunchSection",
    "RunSection",
    "RunSpec",
    "TrainSection",
    "best_result",
]

DEFAULT_SERVERS = 2
SMALL_IS_GOOD, LARGE_IS_GOOD = ("loss", "error", "perplexity"), ("accuracy",)
"""Suffixes of result names that imply the direction; other results need "min:" or "max:"."""


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


def _at_least(section: str, name: str, value: float | None, least: float) -> None:
    if value is not None and value < least:
        raise SpecError(f"[{section}] {name} is {value}, but must be at least {least:g}.", fix=[f"{name} = {least:g}"])


class RunSection(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    run_dir: str | None = None
    """Directory of everything that the run writes; default: runs/<time>-<script>."""
    overwrite: bool = False
    """Start over in the directory of a finished run."""
    group_readable: bool = False
    """Let the directory's group read the run: directories 0750, files 0640, for any umask. Else 0700 and 0600."""
    seed: int = 0
    """All randomness and the data order are functions of it."""
    max_restarts: int = 3
    """How often a lost worker may restart the run from its last checkpoint."""
    grace_s: float = 30.0
    """How long workers get to commit a checkpoint after SIGTERM before they are killed."""
    heartbeat_s: float = 3.0
    """Elastic runs: a worker that sent no heartbeat for this long is killed and replaced. A worker sends five per
    second, unless it is stopped or a C function in it does not release the interpreter lock."""
    hang_s: float = 10.0
    """Elastic runs: a worker that finished no step for this long, and for ten times its slowest step, has to show its
    stack; after twice that time it is killed and replaced, unless it only waits for another worker."""

    def __post_init__(self) -> None:
        _at_least("run", "max_restarts", self.max_restarts, 0)
        _at_least("run", "grace_s", self.grace_s, 0)
        _at_least("run", "heartbeat_s", self.heartbeat_s, 1)
        _at_least("run", "hang_s", self.hang_s, 1)


class TrainSection(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    strategy: StrategyName = "mirrored"
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """fp64: model and data. bf16, fp16: forward and backward; weights stay fp32."""
    slices: int | None = None
    """V: number of slices that every global batch is cut into. Default: accumulate x workers."""
    accumulate: int = 1
    """Slices per worker and step, if `slices` is not given."""
    exact: bool = False
    """The same bits for every number of workers: one thread per slice, deterministic kernels."""
    clip_norm: float | None = None
    """Scale the gradient down to this global norm if it is larger."""
    balance: bool = False
    """Move slices from slow workers to fast ones; results stay the same. Needs more slices than workers."""
    straggler_factor: float = 1.25
    """A worker that takes more than this many times as long as the others for the same work is reported."""
    straggler_steps: int = 50
    """Number of steps over which workers are compared; with `balance`, slices move after this many at the earliest."""
    manage_gc: bool = True
    """Keep Python's garbage collector out of steps: all workers collect at the end of the same steps."""
    loader_timeout_s: float = 300.0
    """How long a worker waits for a slice from its loader processes (`num_workers`) before it fails; 0: no limit."""
    check_every: int = 100
    """Compare the workers' copies of weights and optimizer state after every so many steps, and watch weights in shared
    memory for changes that no step made; 0: never."""
    audit: bool = False
    """Compute one slice of every step on two workers, and compare its gradients."""
    check_loss: bool = True
    """Before the first step, compare the loss of a few examples with that of subsets of them, and warn if it is not a
    mean over examples: its result would depend on the number of slices."""

    def __post_init__(self) -> None:
        _at_least("train", "straggler_factor", self.straggler_factor, 1)
        _at_least("train", "straggler_steps", self.straggler_steps, 1)
        _at_least("train", "check_every", self.check_every, 0)
        _at_least("train", "loader_timeout_s", self.loader_timeout_s, 0)
        _at_least("train", "slices", self.slices, 1)
        _at_least("train", "accumulate", self.accumulate, 1)
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise SpecError(f"[train] clip_norm is {self.clip_norm}, but must be above 0.", fix=["clip_norm = 1.0"])


class LaunchSection(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    workers: int | None = None
    """Workers on this host. Default: one per accelerator; without accelerators, one."""
    threads: int | None = None
    """Threads per worker. Default: cores / workers; with `exact`, 1."""
    servers: int | None = None
    """Parameter servers, beside the workers. Default: 2 where the strategy is parameter_server, else none."""
    elastic: tuple[int, int] | None = None
    """Minimum and maximum number of workers over all hosts: workers may join, leave and die while the others train.
    Default with servers: from 1 to all workers; otherwise the run is not elastic."""
    hosts_wanted: int = 1
    """The run starts when this many hosts have joined."""
    listen: str | None = None
    """Address at which other hosts reach this one; needed for more than one host."""
    insecure_data_plane: bool = False
    """Accept that tensors travel between hosts over Gloo or NCCL unencrypted and without authentication."""
    allocator: Literal["keep", "system"] = "keep"
    """keep: glibc keeps freed memory for the next step (fewer page faults). system: glibc's defaults."""
    start: Literal["auto", "spawn"] = "auto"
    """auto: workers are forked from one process that has imported torch, in milliseconds, unless the host has
    accelerators. spawn: every worker is a new interpreter."""
    memory_format: Literal["contiguous", "channels_last"] = "contiguous"
    ui: Literal["auto", "live", "plain", "none"] = "auto"
    """Progress: a bar on a terminal, a line per interval elsewhere."""
    verbose: bool = False
    """Print more: slices, precision, threads, memory; what each worker used; tracebacks with every frame."""

    def __post_init__(self) -> None:
        _at_least("launch", "workers", self.workers, 1)
        _at_least("launch", "threads", self.threads, 1)
        _at_least("launch", "servers", self.servers, 1)
        _at_least("launch", "hosts_wanted", self.hosts_wanted, 1)
        if self.listen in ("0.0.0.0", "::", "*"):
            raise SpecError(
                f"[launch] listen is {self.listen}, which means every interface.",
                fix=["listen = the one address that the other hosts use"],
            )
        if self.elastic is not None:
            self._check_elastic(*self.elastic)

    def _check_elastic(self, least: int, most: int) -> None:
        if not 1 <= least <= most:
            what = f"[launch] elastic is {least}:{most}, but must be the minimum (1 or more) and maximum of workers."
            least, most = max(1, min(least, most)), max(1, least, most)
            raise SpecError(what, fix=[f"elastic = [{least}, {most}]"])
        if self.workers is not None and not least <= self.workers * self.hosts_wanted <= most:
            on_hosts = f" on each of {self.hosts_wanted} hosts" if self.hosts_wanted > 1 else ""
            nearest = min(max(self.workers, -(-least // self.hosts_wanted)), max(1, most // self.hosts_wanted))
            raise SpecError(
                f"[launch] workers is {self.workers}{on_hosts}, but must be within elastic, {least}:{most}.",
                fix=[f"workers = {nearest}"],
            )


class CommSection(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    plane: Literal["auto", "gloo"] = "auto"
    """auto: workers of one host communicate through shared memory if possible. gloo: always over sockets."""
    timeout_s: float = 30.0
    """How long a collective waits for its slowest peer before `PeerTimeout` names it."""
    bucket_bytes: int = 4 * 2**20
    """Gradients are sent in buckets of about this size, while backward still runs."""
    reducer: ReducerName = "exact"
    """How fp32 gradients are sent: unchanged, in half the bytes, or in a quarter of them with error feedback."""

    def __post_init__(self) -> None:
        _at_least("comm", "timeout_s", self.timeout_s, 0.1)
        _at_least("comm", "bucket_bytes", self.bucket_bytes, 1024)


def best_result(keep_best: str | None) -> tuple[str, bool] | None:
    """The result that `keep_best` names, and whether larger is better; `SpecError` if that is not known."""
    if keep_best is None:
        return None
    direction, colon, name = keep_best.partition(":")
    if colon and name.strip() and direction in ("min", "max"):
        return name, direction == "max"
    if not colon and keep_best.endswith(SMALL_IS_GOOD + LARGE_IS_GOOD):
        return keep_best, keep_best.endswith(LARGE_IS_GOOD)
    known = (name if colon else keep_best).strip()
    what = "does not say whether smaller or larger is better" if known else "names no result"
    fix = [f'keep_best = "min:{known}"', f'keep_best = "max:{known}"'] if known else ['"loss"', '"max:accuracy"']
    raise SpecError(f'[checkpoint] keep_best is "{keep_best}", which {what}.', fix=fix)


class CheckpointSection(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    every_steps: int | None = None
    every_s: float | None = 600.0
    keep_last: int = 3
    keep_best: str | None = None
    """A result such as "loss" (smallest) or "accuracy" (largest), or "min:NAME" / "max:NAME"."""

    def __post_init__(self) -> None:
        _at_least("checkpoint", "every_steps", self.every_steps, 1)
        _at_least("checkpoint", "every_s", self.every_s, 0)
        _at_least("checkpoint", "keep_last", self.keep_last, 1)
        best_result(self.keep_best)


class RunSpec(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    run: RunSection = RunSection()
    train: TrainSection = TrainSection()
    launch: LaunchSection = LaunchSection()
    comm: CommSection = CommSection()
    checkpoint: CheckpointSection = CheckpointSection()
    cluster: ClusterSection = ClusterSection()

    @property
    def num_servers(self) -> int:
        """As set; a strategy that needs servers has a default."""
        default = DEFAULT_SERVERS if self.train.strategy == "parameter_server" else 0
        return default if self.launch.servers is None else self.launch.servers

    def __post_init__(self) -> None:
        reducer = self.comm.reducer
        if self.train.exact and reducer != "exact":
            raise SpecError(
                f"[comm] reducer is {reducer}, which rounds the gradients that workers send; exact promises the same "
                "bits for any number of workers.",
                fix=['reducer = "exact"', "exact = false"],
            )
        if self.train.precision == "fp64" and reducer != "exact":
            raise SpecError(
                f"[comm] reducer is {reducer}, which drops most of the precision of fp64.",
                fix=['reducer = "exact"', 'precision = "fp32"'],
            )
        for dotted, limit in LIMITS[self.train.strategy].items():
            section, setting = dotted.split(".")
            value = getattr(getattr(self, section), setting)
            if value not in limit.allowed:
                why = limit.why.format(name=self.train.strategy, value=value)
                raise SpecError(f"[{section}] {setting} {why}", fix=limit.fix)
