"""Checkpoints that are complete or absent.

`writer` saves in the background, `reader` finds and loads, `commit` is the protocol, `format` the format, `file_ops`
the only access to the disk. docs/checkpoints.md states the promises and their assumptions. The training loop decides
which tensors and state there are, and when to save.
May import `spec`.
Start reading at `commit.commit`.
"""

from manyhands.checkpoint.export import export, save_tensors
from manyhands.checkpoint.reader import check_model, load, newest_valid
from manyhands.checkpoint.tensor_file import read_tensors
from manyhands.checkpoint.writer import CheckpointWriter, SaveResult, Snapshot, take_snapshot_tensors

__all__ = [
    "CheckpointWriter",
    "SaveResult",
    "Snapshot",
    "check_model",
    "export",
    "load",
    "newest_valid",
    "read_tensors",
    "save_tensors",
    "take_snapshot_tensors",
]
