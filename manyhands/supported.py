"""Checks the operating system before any Linux-only module is imported."""

from __future__ import annotations

import sys

from manyhands.errors import EnvironmentProblem

__all__ = ["check_system"]

NAMES = {"darwin": "macOS", "win32": "Windows", "cygwin": "Cygwin"}
INSTEAD = {
    "darwin": ["a Linux container: the source distribution has a Dockerfile; docs/install.md says how to use it"],
    "win32": [
        "WSL 2: wsl --install, then pip install manyhands inside it",
        "a Linux container: the source distribution has a Dockerfile; docs/install.md says how to use it",
    ],
}


def check_system() -> None:
    """Raise `EnvironmentProblem` on any system except Linux, with what works there."""
    if sys.platform == "linux":
        return
    raise EnvironmentProblem(
        f"manyhands trains on Linux only, but this is {NAMES.get(sys.platform, sys.platform)}.",
        fix=INSTEAD.get(sys.platform, ["a Linux machine or container"]),
    )
