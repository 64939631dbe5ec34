"""Settings of this process that make steps faster or repeatable: device, threads, allocator, deterministic kernels."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Sequence

import torch

from manyhands.errors import SpecError
from manyhands.launcher.worker_process.import_hooks import after_import

__all__ = [
    "asked_device",
    "choose_device",
    "choose_threads",
    "give_freed_memory_back",
    "is_there",
    "keep_freed_memory",
    "make_deterministic",
]

# glibc's parameter numbers for mallopt.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 2**30


def keep_freed_memory() -> bool:
    """Make glibc keep freed blocks instead of returning them and faulting the pages in again next step.

    Gradients are new memory every step; without this each costs a page fault per 4 KiB. Workers of a launcher get the
    same through their environment. False if the C library is not glibc, or another allocator is preloaded.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
        return bool(libc.mallopt(M_MMAP_THRESHOLD, KEPT_BYTES) and libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))
    except (OSError, AttributeError):
        return False


def give_freed_memory_back() -> None:
    """After something large is freed: weights replaced by shared ones, or the tensors of a checkpoint."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def choose_threads(asked: int | None, local_workers: int, *, exact: bool) -> int:
    """Threads per worker: the setting; else 1 if bits must not depend on it; else a share of the cores."""
    if asked is not None:
        return asked
    if exact:
        return 1
    return max(1, len(os.sched_getaffinity(0)) // local_workers)


def make_deterministic() -> None:
    # What `torch.use_deterministic_algorithms` does, without loading the compiler, which is configured on import.
    torch.set_deterministic_debug_mode("error")
    after_import("torch._inductor.config", lambda config: setattr(config, "deterministic", True))
    if torch.cuda.is_available():
        torch.backends.cudnn.benchmark = False


def is_there(device: torch.device) -> bool:
    """Whether this machine has the device; it always has the CPU."""
    if device.type == "cpu":
        return True
    accelerator = torch.accelerator.current_accelerator()
    has_kind = accelerator is not None and accelerator.type == device.type
    return has_kind and (device.index or 0) < torch.accelerator.device_count()


def asked_device(devices: Sequence[str], local_rank: int) -> torch.device:
    """The device set for one worker of the host, even if the machine does not have it. One name is for all workers."""
    names = [devices] if isinstance(devices, str) else devices
    name = names[local_rank % len(names)]
    try:
        return torch.device(name)
    except (RuntimeError, TypeError) as error:
        what = f"devices has {name!r}, which is not a torch device."
        raise SpecError(what, fix=['devices=("cuda:0", "cuda:1")', 'devices=("cpu",)']) from error


def choose_device(devices: Sequence[str] | None, local_rank: int) -> torch.device:
    if devices:
        asked = asked_device(devices, local_rank)
        return asked if is_there(asked) else torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    return torch.device("cpu")
