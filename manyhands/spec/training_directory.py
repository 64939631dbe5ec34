"""Where each training of a script is in the run directory: for workers, for servers, for backups on other hosts."""

from __future__ import annotations

from pathlib import Path

__all__ = ["home_of"]

FOLDER = "trainings"


def home_of(run_dir: Path, training: int) -> Path:
    """Where a training keeps its checkpoints, records and logs: the first one in the run directory itself."""
    return run_dir if training == 1 else run_dir / FOLDER / str(training)
