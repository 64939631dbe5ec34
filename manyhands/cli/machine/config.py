"""`mh config`: every setting with its origin, and the schema of config files."""

from __future__ import annotations

import json
from typing import Any

import click
import msgspec

from manyhands import exact_json
from manyhands.cli.common.setting_options import BOTH_SPELLINGS, settings_options, take_settings
from manyhands.spec.load import Resolved, dump_toml, resolve
from manyhands.spec.run import RunSpec

__all__ = ["config"]


@click.group()
def config() -> None:
    """Show settings with their origin; the schema of config files.

    Priority, lowest first: defaults, config file, MANYHANDS_<KEY> in the environment, constructor arguments in the
    script, flags.
    """


@config.command(context_settings=BOTH_SPELLINGS)
@click.option("--config", "config_file", metavar="FILE", help="A TOML file of settings.")
@click.option("--toml", is_flag=True, help="As a config file.")
@click.option("--json", "as_json", is_flag=True, help="As one JSON document.")
@settings_options
def show(config_file: str | None, toml: bool, as_json: bool, **options: Any) -> None:
    """Print every setting with its value and origin.

    A script's constructor arguments are not known here; they override everything except flags.
    """
    resolved = resolve(flags=take_settings(options), config_file=config_file)
    if toml:
        click.echo(dump_toml(resolved.spec), nl=False)
    elif as_json:
        click.echo(exact_json.encode(_with_origins(resolved), indent=2))
    else:
        _print_table(resolved)


@config.command()
@click.option("--json", "as_json", is_flag=True, help="No effect: the schema is always JSON.")
def schema(as_json: bool) -> None:
    """Print the JSON Schema of config files, for editors."""
    click.echo(json.dumps(msgspec.json.schema(RunSpec), indent=2))


def _with_origins(resolved: Resolved) -> dict[str, dict[str, Any]]:
    sections = msgspec.to_builtins(resolved.spec)
    return {key: {"value": _value(sections, key), "origin": origin} for key, origin in resolved.origins.items()}


def _value(sections: dict[str, dict[str, Any]], dotted: str) -> Any:
    section, name = dotted.split(".")
    return sections[section][name]


def _print_table(resolved: Resolved) -> None:
    rows = [(key, _text(row["value"]), row["origin"]) for key, row in _with_origins(resolved).items()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for key, value, origin in rows:
        click.echo(f"{key:<{widths[0]}}  {value:<{widths[1]}}  {origin}")


def _text(value: Any) -> str:
    return "not set" if value is None else json.dumps(value)
