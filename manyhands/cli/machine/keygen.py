"""`mh keygen`: makes the key that the hosts of a run share if there is no join file."""

from __future__ import annotations

import json
from pathlib import Path

import click

from manyhands.errors import EnvironmentProblem, UsageError
from manyhands.launcher.machine import write_key

__all__ = ["keygen"]


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="As one JSON document.")
def keygen(file: Path, as_json: bool) -> None:
    """Make a new key in FILE, readable by you only.

    Copy it to every host of a run that uses torchrun's flags or TF_CONFIG, and set MANYHANDS_KEY_FILE to it there.
    """
    try:
        write_key(file)
    except FileExistsError:
        raise UsageError(f"{file} exists already; a key is never overwritten.", fix=[f"rm {file}"]) from None
    except OSError as error:
        raise EnvironmentProblem(f"Cannot write {file}: {error.strerror}.") from error
    click.echo(json.dumps({"file": str(file), "mode": "0600"}) if as_json else f"{file} (mode 0600)")
