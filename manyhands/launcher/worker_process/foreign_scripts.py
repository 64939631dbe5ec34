"""Scripts that do not use manyhands: warns if N workers do the same work N times.

Two mistakes look like success: a DataLoader without a DistributedSampler gives every rank the same samples, and a
script without a process group is N separate trainings. The chief prints one line, once. Only the first few batches are
watched; errors in here never reach the script. Start reading at `watched`.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from manyhands.launcher.worker_process.import_hooks import after_import
from manyhands.spec.worker_identity import WorkerIdentity

__all__ = ["watched"]

LOADER_MODULE = "torch.utils.data.dataloader"
# Libraries through which workers communicate without torch.distributed.
OTHER_MEETINGS = ("mpi4py", "horovod", "jax", "ray", "tensorflow")
MAX_LOOKS = 20
MAX_HASHED_BYTES = 2**20

SAME_SAMPLES = (
    "manyhands: ranks {ranks} read the same first batch, so they train on the same samples. "
    "Give the DataLoader sampler=DistributedSampler(dataset), or let mh.join() cut the batches."
)
NOT_JOINED = (
    "manyhands: nothing joins the {count} workers, so each trains separately. Use "
    "torch.distributed.init_process_group, DistributedDataParallel and DistributedSampler; or mh.join()."
)
NEVER_JOINED = (
    "manyhands: the {count} workers never joined each other; unless the script divides the work by RANK, each did "
    "all of it. Use torch.distributed, mh.join() or mh.Trainer, or start it with -n 1."
)


@contextmanager
def watched(identity: WorkerIdentity | None) -> Iterator[None]:
    """Around the user's script, in the worker that runs it."""
    if identity is None or identity.world_size == 1:
        yield
        return
    watch = _Watch(identity.rank, identity.world_size)
    after_import(LOADER_MODULE, watch.attach)
    try:
        yield
    except SystemExit as end:
        if not end.code:
            watch.at_end()
        raise
    watch.at_end()


class _Watch:
    """Compares the first batch that each rank trains on, through the store of the script's process group.

    A rank gets its next batch after a step that needed all ranks, so by then their first batches are known.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._looks = 0
        self._own: bytes | None = None
        self._has_warned = False

    def attach(self, loader_module: Any) -> None:
        kind = getattr(loader_module, "_BaseDataLoaderIter", None)
        if kind is None:
            return
        original = kind.__next__

        def watched_next(iterator: Any) -> Any:
            batch = original(iterator)
            try:
                done = self._look(batch)
            except Exception:
                done = True
            if done:
                kind.__next__ = original
            return batch

        kind.__next__ = watched_next

    def at_end(self) -> None:
        if not self._has_warned and not _joined():
            self._say(NEVER_JOINED.format(count=self._world_size))

    def _look(self, batch: Any) -> bool:
        """Whether watching can end."""
        torch = sys.modules["torch"]
        if "manyhands.training.worker.worker" in sys.modules:
            return True
        if not torch.is_grad_enabled():  # evaluation: every rank may do all of it
            return False
        self._looks += 1
        if not torch.distributed.is_initialized():
            if self._looks == 2 and not _joined():  # the script may read one batch before it joins
                self._say(NOT_JOINED.format(count=self._world_size))
            return self._looks >= 2
        store = torch.distributed.distributed_c10d._get_default_store()
        if self._own is None:
            self._own = _digest(batch, torch)
            store.set(_key(self._rank), self._own)
            return self._rank != 0
        return self._compare(store) or self._looks >= MAX_LOOKS

    def _compare(self, store: Any) -> bool:
        others = range(1, self._world_size)
        if not store.check([_key(rank) for rank in others]):
            return False
        same = [rank for rank in others if store.get(_key(rank)) == self._own]
        if same:
            self._say(SAME_SAMPLES.format(ranks=" and ".join(map(str, [0, *same]))))
        return True

    def _say(self, line: str) -> None:
        self._has_warned = True
        if self._rank == 0:
            with suppress(Exception):
                print(line, file=sys.stderr, flush=True)


def _joined() -> bool:
    """Whether this process ever joined the others, as far as can be seen."""
    if "manyhands.training.worker.worker" in sys.modules or any(name in sys.modules for name in OTHER_MEETINGS):
        return True
    session = sys.modules.get("manyhands.control.session.session")
    if session is not None and session.was_opened():
        return True
    group = sys.modules.get("torch.distributed.distributed_c10d")
    # The init method is kept when the group is destroyed.
    return group is not None and (group.is_initialized() or group._default_pg_init_method is not None)


def _key(rank: int) -> str:
    return f"manyhands/first batch/{rank}"


def _digest(batch: Any, torch: Any) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for leaf in torch.utils._pytree.tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            values = leaf.detach().reshape(-1).contiguous().view(torch.uint8)[:MAX_HASHED_BYTES]
            found.update(values.cpu().numpy().tobytes())
        else:
            found.update(repr(leaf)[:1000].encode())
    return found.digest().hex().encode()
