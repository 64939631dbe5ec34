"""Loader processes that cannot send, or do not answer: an error that names the cause, and never a hang."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import Dataset

from manyhands.data.fetchers import SliceRequest
from manyhands.data.lease_prefetch import LeasePrefetch
from manyhands.data.sources.as_source import as_source
from manyhands.errors import DataFetchFailed
from tests.data.data_cases import batches_of, take_all

SMALL = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh"]


def why_no_small_memory() -> str | None:
    """What is missing to have a /dev/shm of our own here, or None."""
    try:
        tried = subprocess.run([*SMALL, "true"], capture_output=True, text=True, timeout=60)
    except OSError as error:
        return f"NOT SHOWN HERE: a small /dev/shm needs unshare ({error})"
    return (
        f"NOT SHOWN HERE: a small /dev/shm needs a mount namespace ({tried.stderr.strip()})"
        if tried.returncode
        else None
    )


@pytest.mark.long
@pytest.mark.parametrize("how", ["loader", "ahead"])
def test_a_batch_that_finds_no_room_in_shared_memory_is_an_error_that_says_so(how):
    if why := why_no_small_memory():
        pytest.skip(why)
    script = Path(__file__).with_name("small_memory.py")
    done = subprocess.run([*SMALL, sys.executable, str(script), how], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    what, fix, verdict, found = done.stdout.splitlines()
    assert what.startswith("Fetching slice 0 of step 1 failed. RuntimeError: unable to allocate shared memory")
    assert "/dev/shm, which has 64 MB" in fix and "--shm-size=1g" in fix
    # The doctor would have said so before.
    assert verdict == "warn" and "67.1 MB" in found


class Stuck(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> int:
        threading.Event().wait()
        return row


@pytest.mark.long
def test_loader_processes_that_give_nothing_are_not_waited_for_beyond_their_deadline():
    source = as_source(Stuck(), num_workers=1)
    source.loader_timeout_s = 2.0
    batches = batches_of(source)
    with pytest.raises(DataFetchFailed, match="alive, but sent nothing for 2 s") as caught:
        take_all(batches)
    batches.close()
    assert "[train] loader_timeout_s = 4" in caught.value.fix[1]
    ahead = LeasePrefetch(source)
    ahead.want([SliceRequest(1, 0, np.arange(2), 0)])
    with pytest.raises(DataFetchFailed, match="sent nothing for 2 s"):
        ahead.take(1, 0)
    ahead.close()
