"""What a run was asked to do: one frozen Struct per section of the config file.

Every field stands here with its default, its meaning and its check; `spec.load` fills them from the config
file, the environment, constructor arguments and flags. No torch, no I/O.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from manyhands.errors import SpecError

__all__ = [
    "AVERAGING",
    "SAME_STRATEGY",
    "CheckpointSection",
    "CommSection",
    "LaunchSection",
    "RunSection",
    "RunSpec",
    "TrainSection",
    "best_result",
    "strategy_name",
]


AVERAGING = ("local_sgd", "diloco")
"""Strategies whose workers train weights of their own."""
DIVIDING = ("tensor", "pipeline", "mesh")
"""Strategies whose workers have parts of the model."""
STORING = ("sharded", "central_storage")
"""Strategies that say where weights and states are kept, and change nothing else of what replicas do."""


DEFAULT_SERVERS = 2
SMALL_IS_GOOD, LARGE_IS_GOOD = ("loss", "error", "perplexity"), ("accuracy",)
"""How the names of such results end; others say it with "min:" or "max:"."""

SAME_STRATEGY = {
    "ddp": "mirrored",
    "dp": "mirrored",
    "fsdp": "sharded",
    "zero3": "sharded",
    "tp": "tensor",
    "pp": "pipeline",
    "ps": "parameter_server",
}
"""Names that others have for exactly the same."""


def strategy_name(asked: str) -> str:
    """The name that a strategy has here: "DDP" is "mirrored", "local-sgd" is "local_sgd"; others as they are."""
    plain = asked.lower().replace("-", "_")
    return SAME_STRATEGY.get(plain.replace("_", ""), plain)


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


def _at_least(section: str, name: str, value: float | None, least: float) -> None:
    if value is not None and value < least:
        raise SpecError(f"[{section}] {name} is {value}, but must be at least {least:g}.", fix=[f"{name} = {least:g}"])


class RunSection(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    run_dir: str | None = None
    """Where everything the run writes goes; without it, runs/<time>-<script>."""
    overwrite: bool = False
    """Start over in the directory of a finished run."""
    group_readable: bool = False
    """Let the directory's group read the run: directories 0750, files 0640, whatever the umask. Else 0700 and 0600."""
    seed: int = 0
    """All randomness and the data order are functions of it."""
    max_restarts: int = 3
    """How often a lost worker may restart the run from its last checkpoint."""
    grace_s: float = 30.0
    """How long workers get to commit a checkpoint after SIGTERM before they are killed."""
    heartbeat_s: float = 3.0
    """Elastic runs: a worker that gave no sign of life for this long is killed and replaced. A worker gives one five
    times a second, unless it is stopped or a C function of it keeps the interpreter to itself."""
    hang_s: float = 10.0
    """Elastic runs: a worker that finished no step for this long, and for ten of its slowest, has to show its stack;
    after twice that it is killed and replaced, unless it only waits for another one."""

    def __post_init__(self) -> None:
        _at_least("run", "max_restarts", self.max_restarts, 0)
        _at_least("run", "grace_s", self.grace_s, 0)
        _at_least("run", "heartbeat_s", self.heartbeat_s, 1)
        _at_least("run", "hang_s", self.hang_s, 1)


class TrainSection(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    strategy: Literal[
        "single",
        "mirrored",
        "multi_worker",
        "parameter_server",
        "local_sgd",
        "diloco",
        "tensor",
        "pipeline",
        "mesh",
        "sharded",
        "central_storage",
    ] = "mirrored"
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """fp64: model and data, all of it. bf16, fp16: forward and backward; weights stay fp32."""
    slices: int | None = None
    """V: the pieces every global batch is cut into. Default: accumulate x workers."""
    accumulate: int = 1
    """Slices per worker and step, where `slices` is not given."""
    exact: bool = False
    """The same bits for every number of workers: one thread per slice, deterministic kernels."""
    clip_norm: float | None = None
    """Scale the gradient down to this global norm when it is longer."""
    balance: bool = False
    """Move slices from slow workers to fast ones; results stay the same. Needs more slices than workers."""
    straggler_factor: float = 1.25
    """A worker that takes more than this many times as long as the others, for as much work, is named."""
    straggler_steps: int = 50
    """Over how many steps workers are compared; with `balance`, slices move after so many at the earliest."""
    manage_gc: bool = True
    """Keep Python's garbage collector out of steps: all workers collect at the end of the same ones."""
    loader_timeout_s: float = 300.0
    """How long a worker waits for a slice from its loader processes (`num_workers`) before it fails; 0: for ever."""
    check_every: int = 100
    """Compare the workers' copies of weights and states after every so many steps, and have weights in shared memory
    watched for changes that no step made; 0: never."""
    audit: bool = False
    """Compute one slice of every step on two workers, and compare its gradients."""
    check_loss: bool = True
    """Before the first step, compare the loss of a few rows with those of their parts, and warn where it is no mean
    over examples: its result would depend on the number of slices."""

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
    """The least and the most workers, over all hosts: they may come, go and die while the others train on. Default
    with servers: from 1 to all of them; else they may not."""
    hosts_wanted: int = 1
    """The run starts when this many hosts have joined."""
    listen: str | None = None
    """Address other hosts reach this one at; needed for more than one host."""
    insecure_data_plane: bool = False
    """Tensors between hosts travel over Gloo or NCCL, in the clear and without authentication. Say so."""
    allocator: Literal["keep", "system"] = "keep"
    """keep: glibc keeps freed memory for the next step (fewer page faults). system: as it comes."""
    memory_format: Literal["contiguous", "channels_last"] = "contiguous"
    ui: Literal["auto", "live", "plain", "none"] = "auto"
    """Progress: a bar on a terminal, a line per interval elsewhere."""
    verbose: bool = False
    """Say more: slices, precision, threads, memory; what each worker used; tracebacks with every frame."""

    def __post_init__(self) -> None:
        _at_least("launch", "workers", self.workers, 1)
        _at_least("launch", "threads", self.threads, 1)
        _at_least("launch", "servers", self.servers, 1)
        _at_least("launch", "hosts_wanted", self.hosts_wanted, 1)
        if self.listen in ("0.0.0.0", "::", "*"):
            raise SpecError(
                f"[launch] listen is {self.listen}, which is every interface.",
                fix=["listen = the one address the other hosts use"],
            )
        if self.elastic is not None:
            self._check_elastic(*self.elastic)

    def _check_elastic(self, least: int, most: int) -> None:
        if not 1 <= least <= most:
            what = f"[launch] elastic is {least}:{most}, but must be the least, from 1 on, and the most workers."
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
    """auto: workers of one host talk through shared memory where they can. gloo: always over sockets."""
    timeout_s: float = 30.0
    """How long a collective waits for its slowest peer before `PeerTimeout` names it."""
    bucket_bytes: int = 4 * 2**20
    """Gradients travel in pieces of about this size, while backward still runs."""
    reducer: Literal["exact", "bf16", "int8"] = "exact"
    """How fp32 gradients travel: as they are, in half the bytes, or in a quarter of them with error feedback."""

    def __post_init__(self) -> None:
        _at_least("comm", "timeout_s", self.timeout_s, 0.1)
        _at_least("comm", "bucket_bytes", self.bucket_bytes, 1024)


def best_result(keep_best: str | None) -> tuple[str, bool] | None:
    """The result that `keep_best` names, and whether large is good; `SpecError` where it does not say that."""
    if keep_best is None:
        return None
    direction, colon, name = keep_best.partition(":")
    if colon and name.strip() and direction in ("min", "max"):
        return name, direction == "max"
    if not colon and keep_best.endswith(SMALL_IS_GOOD + LARGE_IS_GOOD):
        return keep_best, keep_best.endswith(LARGE_IS_GOOD)
    known = (name if colon else keep_best).strip()
    what = "does not say whether small or large is good" if known else "names no result"
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

    @property
    def num_servers(self) -> int:
        """As asked for; a strategy that needs servers has some also where nobody said how many."""
        default = DEFAULT_SERVERS if self.train.strategy == "parameter_server" else 0
        return default if self.launch.servers is None else self.launch.servers

    def __post_init__(self) -> None:
        if self.launch.elastic is not None and self.train.strategy == "single":
            raise SpecError(
                "[launch] elastic is for workers that come and go, but strategy is single: one worker, for good.",
                fix=['strategy = "mirrored"', 'elastic = "none"'],
            )
        reducer = self.comm.reducer
        if self.train.exact and reducer != "exact":
            raise SpecError(
                f"[comm] reducer is {reducer}, which rounds what workers send each other; exact promises the same bits "
                "for any number of them.",
                fix=['reducer = "exact"', "exact = false"],
            )
        if self.train.precision == "fp64" and reducer != "exact":
            raise SpecError(
                f"[comm] reducer is {reducer}, which leaves out most of what fp64 is for.",
                fix=['reducer = "exact"', 'precision = "fp32"'],
            )
        if self.train.strategy in AVERAGING:
            self._check_averaging()
        if self.train.strategy in DIVIDING:
            self._check_dividing()
        if self.train.strategy in STORING:
            self._check_storing()

    def _check_storing(self) -> None:
        train, name = self.train, self.train.strategy
        if train.exact:
            raise SpecError(
                f"[train] exact promises the same bits for any number of workers, which {name} does not.",
                fix=["exact = false", 'strategy = "mirrored"'],
            )
        if train.audit or train.balance:
            what = "audit" if train.audit else "balance"
            raise SpecError(
                f"[train] {what} moves slices from one worker to another, but with {name} all take part in each.",
                fix=[f"{what} = false", 'strategy = "mirrored"'],
            )
        self._check_reducer()
        if self.launch.elastic is not None:
            raise SpecError(
                f"[launch] elastic is for workers that come and go, but {name} has each keep what others lack.",
                fix=['elastic = "none"', 'strategy = "mirrored"'],
            )

    def _check_reducer(self) -> None:
        if self.comm.reducer != "exact":
            what = f"[comm] reducer is {self.comm.reducer}, which {self.train.strategy} does not have."
            raise SpecError(what, fix=['reducer = "exact"'])

    def _check_dividing(self) -> None:
        """Whatever rests on each worker having the whole model is refused."""
        train, name = self.train, self.train.strategy
        if train.exact:
            raise SpecError(
                f"[train] exact promises the same bits for any number of workers, but {name} adds up parts of the "
                "model's own sums, and rounds otherwise: to about 1e-6 the results are the same.",
                fix=["exact = false", 'strategy = "mirrored"'],
            )
        if train.audit:
            raise SpecError(
                f"[train] audit has another worker compute a slice again, but with {name} none has the whole model.",
                fix=["audit = false"],
            )
        if train.balance:
            raise SpecError(
                f"[train] balance moves slices between workers that each have the whole model, but with {name} the "
                "workers of a replica compute each slice together, and measure times that differ.",
                fix=["balance = false", 'strategy = "mirrored"'],
            )
        self._check_reducer()

    def _check_averaging(self) -> None:
        """Workers with weights of their own: whatever rests on all having the same is refused."""
        train, name = self.train, self.train.strategy
        if train.exact:
            raise SpecError(
                f"[train] exact promises the same bits for any number of workers, but with {name} each trains weights "
                "of its own, and the result depends on how many they are.",
                fix=["exact = false", 'strategy = "mirrored"'],
            )
        if train.balance:
            raise SpecError(
                f"[train] balance moves slices between workers, but with {name} it matters who trains on what.",
                fix=["balance = false"],
            )
        if train.audit:
            raise SpecError(
                f"[train] audit compares two workers' gradients of one slice, but with {name} their weights differ.",
                fix=["audit = false"],
            )
        if self.comm.reducer == "int8":
            raise SpecError(
                f"[comm] reducer is int8, which tells later what it leaves out; {name} averages too seldom for that.",
                fix=['reducer = "bf16"'],
            )
