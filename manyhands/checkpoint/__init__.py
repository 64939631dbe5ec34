"""Checkpoints that are whole or absent.

`writer` saves beside training, `reader` finds and loads, `commit` is the protocol, `format` the format, `files` the
only way to the disk. docs/checkpoints.md says what is promised and what that rests on. Which tensors and state there
are, and when to save, is the runtime's business.
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
