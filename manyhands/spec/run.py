"""What a run was asked to do: one frozen Struct per section of the config file.

Every field stands here with its default, its meaning and its check; `spec.load` fills them from the config
file, the environment, constructor arguments and flags. No torch, no I/O.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from manyhands.errors import SpecError

__all__ = ["CheckpointSection", "CommSection", "LaunchSection", "RunSection", "RunSpec", "TrainSection"]


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
    seed: int = 0
    """All randomness and the data order are functions of it."""
    max_restarts: int = 3
    """How often a lost worker may restart the run from its last checkpoint."""
    grace_s: float = 30.0
    """How long workers get to commit a checkpoint after SIGTERM before they are killed."""

    def __post_init__(self) -> None:
        _at_least("run", "max_restarts", self.max_restarts, 0)
        _at_least("run", "grace_s", self.grace_s, 0)


class TrainSection(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    strategy: Literal["single", "mirrored", "multi_worker"] = "mirrored"
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    slices: int | None = None
    """V: the pieces every global batch is cut into. Default: accumulate x workers."""
    accumulate: int = 1
    """Slices per worker and step, where `slices` is not given."""
    exact: bool = False
    """The same bits for every number of workers: one thread per slice, deterministic kernels."""
    clip_norm: float | None = None
    """Scale the gradient down to this global norm when it is longer."""

    def __post_init__(self) -> None:
        _at_least("train", "slices", self.slices, 1)
        _at_least("train", "accumulate", self.accumulate, 1)
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise SpecError(f"[train] clip_norm is {self.clip_norm}, but must be above 0.", fix=["clip_norm = 1.0"])


class LaunchSection(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    workers: int | None = None
    """Workers on this host. Default: one per accelerator; without accelerators, one."""
    threads: int | None = None
    """Threads per worker. Default: cores / workers; with `exact`, 1."""
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

    def __post_init__(self) -> None:
        _at_least("launch", "workers", self.workers, 1)
        _at_least("launch", "threads", self.threads, 1)
        _at_least("launch", "hosts_wanted", self.hosts_wanted, 1)
        if self.listen in ("0.0.0.0", "::", "*"):
            raise SpecError(
                f"[launch] listen is {self.listen}, which is every interface.",
                fix=["listen = the one address the other hosts use"],
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


class RunSpec(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    run: RunSection = RunSection()
    train: TrainSection = TrainSection()
    launch: LaunchSection = LaunchSection()
    comm: CommSection = CommSection()
    checkpoint: CheckpointSection = CheckpointSection()

    def __post_init__(self) -> None:
        reducer = self.comm.reducer
        if self.train.exact and reducer != "exact":
            raise SpecError(
                f"[comm] reducer is {reducer}, which rounds what workers send each other; exact promises the same bits "
                "for any number of them.",
                fix=['reducer = "exact"', "exact = false"],
            )
