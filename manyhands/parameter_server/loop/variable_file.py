"""The named variables of a live run: the first server writes which server stores what, the agent knows each version.

The listing is a file of the run directory, since a model may have more names than fit into a message. It is rewritten
whenever the placement of variables changes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from manyhands.control.session.run_client import query
from manyhands.errors import UsageError
from manyhands.parameter_server.protocol.variable_listing import ServedVariable, with_versions
from manyhands.private_files import write_private

__all__ = ["read_variables", "write_variables"]

FILE = "variables.json"


def write_variables(run_dir: Path, variables: Sequence[ServedVariable]) -> None:
    """Replace the listing atomically."""
    temporary = run_dir / f".{FILE}.{os.getpid()}"
    write_private(temporary, msgspec.json.encode(variables))
    os.replace(temporary, run_dir / FILE)


def read_variables(run_dir: Path) -> list[ServedVariable]:
    """The variables on the servers of a run on this host; `UsageError` if it is not running or has no servers."""
    status = query(run_dir)
    if not status.servers:
        raise UsageError(
            f"{run_dir} has no parameter servers here: every worker has all variables.",
            fix=[f"mh ckpt ls {run_dir}, for what it has saved"],
        )
    listing = run_dir / FILE
    variables = msgspec.json.decode(listing.read_bytes(), type=list[ServedVariable]) if listing.exists() else []
    if not variables:
        raise UsageError(f"The servers of {run_dir} have no variables yet.", fix=["retry after its first step"])
    return with_versions(variables, {one.server: one.step for one in status.servers})
