"""Which systems manyhands trains on, asked before anything is imported that only Linux has."""

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
    """`EnvironmentProblem` on any system but Linux, with what works there."""
    if sys.platform == "linux":
        return
    raise EnvironmentProblem(
        f"manyhands trains on Linux only, and this is {NAMES.get(sys.platform, sys.platform)}.",
        fix=INSTEAD.get(sys.platform, ["a Linux machine or container"]),
    )
