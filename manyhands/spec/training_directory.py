"""The directory of each training of a script inside the run directory; the same for workers, servers and backups."""

from __future__ import annotations

from pathlib import Path

__all__ = ["home_of"]

FOLDER = "trainings"


def home_of(run_dir: Path, training: int) -> Path:
    """The directory of a training's checkpoints, records and logs; for the first training, the run directory itself."""
    return run_dir if training == 1 else run_dir / FOLDER / str(training)
