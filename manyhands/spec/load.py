"""Config file, environment, constructor arguments and flags -> one `RunSpec`, with the origin of every value.

The only module that reads the environment. Later sources win:
defaults < config file < MANYHANDS_<KEY> < constructor arguments < command-line flags. Unknown names are refused with
the closest known name. Start reading at `resolve`.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from manyhands.errors import SpecError
from manyhands.spec.cluster import ClusterTask, from_tf_config
from manyhands.spec.config_file import Setting, dump_toml, read_config
from manyhands.spec.run import RunSpec
from manyhands.spec.strategy_names import strategy_name
from manyhands.spec.undecodable_names import check_name
from manyhands.spec.worker_identity import IDENTITY_VARIABLES, WorkerIdentity, parse_identity

__all__ = [
    "KEYS",
    "Key",
    "Resolved",
    "TorchrunTask",
    "checked",
    "cluster_task",
    "dump_toml",
    "environment",
    "flag_name",
    "in_trial",
    "master_port",
    "nearest",
    "own_identity",
    "profiled",
    "queue_directory",
    "replace_environment",
    "resolve",
    "site_file",
    "torchrun_defaults",
    "torchrun_task",
    "under_chaos",
    "verbose",
]

CONFIG_VARIABLE = "MANYHANDS_CONFIG"
KEY_FILE_VARIABLE = "MANYHANDS_KEY_FILE"
PREFIX = "MANYHANDS_"
TRIAL_VARIABLE = "MANYHANDS_TRIAL"
CHAOS_VARIABLE = "MANYHANDS_CHAOS"
CHECK_VARIABLE = "MANYHANDS_CHECK"
PLAN_VARIABLE = "MANYHANDS_PLAN"
PROFILE_VARIABLE = "MANYHANDS_PROFILE"
GRAPH_VARIABLE = "MANYHANDS_GRAPH"
PLACER_VARIABLE = "MANYHANDS_PLACER"
STATE_VARIABLE = "MANYHANDS_STATE_DIR"
RESUME_VARIABLE = "MANYHANDS_RESUME"
"""What a user types to resume a run whose agents a placer starts: their own command lines are not what was typed."""
QUEUE_VARIABLE = "MANYHANDS_QUEUE"
EVALUATE_VARIABLE = "MANYHANDS_EVALUATE"
RESERVED = IDENTITY_VARIABLES | {
    CONFIG_VARIABLE,
    KEY_FILE_VARIABLE,
    TRIAL_VARIABLE,
    CHAOS_VARIABLE,
    CHECK_VARIABLE,
    PLAN_VARIABLE,
    PROFILE_VARIABLE,
    GRAPH_VARIABLE,
    PLACER_VARIABLE,
    RESUME_VARIABLE,
    STATE_VARIABLE,
    QUEUE_VARIABLE,
    EVALUATE_VARIABLE,
}
MAX_TEXT = 4096
MAX_LINES = 100
SITE_FILE = "manyhands.toml"
SITE_SETTINGS = ("insecure_data_plane",)
"""What the site file holds beside [cluster]: whether the network between its hosts is one that its users trust."""


class Key(NamedTuple):
    section: str
    name: str
    type: Any
    default: Any

    @property
    def dotted(self) -> str:
        return f"{self.section}.{self.name}"


def _all_keys() -> dict[str, Key]:
    keys: dict[str, Key] = {}
    for section in msgspec.structs.fields(RunSpec):
        hints = typing.get_type_hints(section.type)
        for field in msgspec.structs.fields(section.type):
            assert field.name not in keys, (
                f"{field.name} is in two sections, but environment and flags use the name without its section"
            )
            keys[field.name] = Key(section.name, field.name, hints[field.name], field.default)
    return keys


KEYS = _all_keys()
"""Every setting by its name without the section; names are unique over all sections."""


class Resolved(msgspec.Struct, frozen=True):
    spec: RunSpec
    origins: dict[str, str]
    """By dotted key: "default", "run.toml line 9", "MANYHANDS_SEED", "constructor" or "--seed"."""
    overrides: list[str]
    """One line for each flag that overrides a constructor argument: name, old value, new value."""
    config_file: str | None = None

    def given(self, dotted: str) -> bool:
        """Whether this value was set, as opposed to its default."""
        return self.origins[dotted] != "default"

    def flags(self) -> dict[str, Any]:
        """The values that came from flags, by dotted key: the agent passes them to its workers."""
        pairs = (dotted.split(".") for dotted, origin in self.origins.items() if origin.startswith("--"))
        return {f"{section}.{name}": getattr(getattr(self.spec, section), name) for section, name in pairs}


class _Given(NamedTuple):
    key: Key
    value: Any
    origin: str


def environment() -> dict[str, str]:
    """A copy of this process's environment; other modules call this instead of reading `os.environ`."""
    return dict(os.environ)


def queue_directory() -> Path:
    """Of the jobs of `mh submit`: MANYHANDS_QUEUE, else among the files that programs keep for this user."""
    if chosen := os.environ.get(QUEUE_VARIABLE):
        return Path(chosen)
    state = os.environ.get("XDG_STATE_HOME", "")
    return (Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state") / "manyhands" / "queue"


def replace_environment(variables: Mapping[str, str]) -> None:
    """For a process that was forked, and is to have the environment that it would have been started with."""
    os.environ.clear()
    os.environ.update(variables)


def resolve(
    *,
    flags: Mapping[str, Any] | None = None,
    arguments: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    config_file: str | None = None,
) -> Resolved:
    """Merge all sources into one spec. `flags` and `arguments` are by name ("seed") or dotted key ("run.seed").

    A flag or argument of None counts as not given. Raises `SpecError` naming the source and what to type instead.
    """
    environ = environment() if environ is None else environ
    config_file = config_file or environ.get(CONFIG_VARIABLE) or None
    given = [
        *_from_site(environ),
        *_from_file(config_file),
        *_from_environment(environ),
        *_from_mapping(arguments or {}, lambda name: "constructor"),
        *_from_mapping(flags or {}, flag_name),
    ]
    values = {key.name: key.default for key in KEYS.values()}
    origins = {key.dotted: "default" for key in KEYS.values()}
    overrides = []
    for key, value, origin in given:
        if origins[key.dotted] == "constructor" and values[key.name] != value:
            overrides.append(f"{origin} {_shown(value)} overrides {key.name}={_shown(values[key.name])} in the script.")
        values[key.name], origins[key.dotted] = value, origin
    return Resolved(_build(values, origins), origins, overrides, config_file)


def _build(values: Mapping[str, Any], origins: Mapping[str, str]) -> RunSpec:
    sections = {}
    for section in msgspec.structs.fields(RunSpec):
        mine = {key.name: values[key.name] for key in KEYS.values() if key.section == section.name}
        sections[section.name] = _checked(section.type, mine, origins)
    spec: RunSpec = _checked(RunSpec, sections, origins)
    return spec


def _checked(kind: Callable[..., Any], values: Mapping[str, Any], origins: Mapping[str, str]) -> Any:
    """`kind(**values)`, with the source of the wrong value added to the error: the Struct does not know it."""
    try:
        return kind(**values)
    except SpecError as error:
        named = re.match(r"\[(\w+)\] (\w+)", error.what)
        origin = origins.get(f"{named[1]}.{named[2]}") if named else None
        fix = [_in_syntax_of(_origin_of(suggestion, origin, origins), suggestion) for suggestion in error.fix]
        raise SpecError(error.what, where=origin or error.where, fix=fix) from None


def _origin_of(suggestion: str, fallback: str | None, origins: Mapping[str, str]) -> str | None:
    """The source of the value that the suggestion would change."""
    key = KEYS.get(suggestion.partition(" = ")[0])
    return origins[key.dotted] if key is not None else fallback


def _from_file(path: str | None) -> Iterator[_Given]:
    for setting in read_config(path).settings if path else ():
        key = _file_key(setting)
        yield _Given(key, _typed(key, setting.value, setting.where, loose=False), setting.where)


def site_file(environ: Mapping[str, str]) -> str | None:
    """Where a site, or a user for all runs, describes the cluster; None without a home directory."""
    home = environ.get("HOME", "")
    folder = environ.get("XDG_CONFIG_HOME") or (os.path.join(home, ".config") if home else "")
    return os.path.join(folder, SITE_FILE) if folder else None


def _from_site(environ: Mapping[str, str]) -> Iterator[_Given]:
    """Only the launcher reads it: other hosts may not have it, and workers must agree on their settings."""
    path = site_file(environ)
    if path is None or not environ.keys().isdisjoint(IDENTITY_VARIABLES) or not os.path.isfile(path):
        return
    for one in _from_file(path):
        if one.key.section != "cluster" and one.key.name not in SITE_SETTINGS:
            raise SpecError(
                f"{one.key.name} is a setting of a run, not of a cluster.",
                where=one.origin,
                fix=[f"a config file with [{one.key.section}] {one.key.name}, and mh run --config FILE"],
            )
        yield one


def _file_key(setting: Setting) -> Key:
    section, name, _, where = setting
    sections = [field.name for field in msgspec.structs.fields(RunSpec)]
    known = KEYS.get(name)
    if section is None and name in sections:
        raise SpecError(f"{name} is a section of the config, not a value.", where=where, fix=[f"[{name}]"])
    if section is not None and section not in sections:
        fix = [f"[{close}]" for close in nearest(section, sections)] or [f"one of {', '.join(sections)}"]
        raise SpecError(f"There is no section [{_clip(section)}].", where=where, fix=fix)
    if known is not None and known.section == section:
        return known
    if known is not None:
        found_in = f"[{section}]" if section else "the top of the file"
        raise SpecError(
            f"{name} belongs to [{known.section}], not to {found_in}.", where=where, fix=[f"[{known.section}]"]
        )
    mine = [key.name for key in KEYS.values() if section in (None, key.section)]
    close = nearest(name, mine) or nearest(name, KEYS)
    fix = [f"[{KEYS[right].section}] {right}" for right in close] or [f"one of {', '.join(mine)}"]
    raise SpecError(f"There is no setting {_clip(name)}{f' in [{section}]' if section else ''}.", where=where, fix=fix)


def _from_environment(environ: Mapping[str, str]) -> Iterator[_Given]:
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable in RESERVED:
            continue
        key = KEYS.get(variable.removeprefix(PREFIX).lower())
        if key is None or variable != variable.upper():
            known = [PREFIX + name.upper() for name in KEYS] + [CONFIG_VARIABLE, KEY_FILE_VARIABLE, QUEUE_VARIABLE]
            raise SpecError(
                f"The environment variable {_clip(variable)} is not a setting of manyhands.",
                where="the environment",
                fix=nearest(variable.upper(), known) or [f"unset {_clip(variable)}"],
            )
        if text != "":
            yield _Given(key, _typed(key, text, variable, loose=True), variable)


def _from_mapping(values: Mapping[str, Any], origin_of: typing.Callable[[str], str]) -> Iterator[_Given]:
    for asked, value in values.items():
        if value is None:
            continue
        name = asked.rpartition(".")[2]
        key = KEYS.get(name)
        if key is None or asked not in (name, key.dotted):
            origin = origin_of(asked)
            fix = nearest(name, KEYS) or [f"one of {', '.join(KEYS)}"]
            raise SpecError(f"There is no setting {_clip(asked)}.", where=origin, fix=fix)
        yield _Given(key, _typed(key, value, origin_of(name), loose=False), origin_of(name))


_SHORT_FLAGS = {"grace_s": "--grace", "timeout_s": "--timeout", "heartbeat_s": "--heartbeat", "hang_s": "--hang"}


def flag_name(name: str) -> str:
    return _SHORT_FLAGS.get(name) or "--" + name.replace("_", "-")


def _is_range(key: Key) -> bool:
    return any(typing.get_args(one) == (int, int) for one in _plain_types(key.type))


def _is_list(key: Key) -> bool:
    """Whether the setting is a list of texts. In the environment, each line is one of them."""
    return bool(typing.get_args(key.type) == (str, ...))


def _typed(key: Key, value: Any, where: str, *, loose: bool) -> Any:
    given = value
    if isinstance(value, str) and value.lower() == "none" and type(None) in typing.get_args(key.type):
        return None
    if isinstance(value, str) and key.name == "strategy":
        value = strategy_name(value)
    if isinstance(value, str) and _is_range(key):
        value, loose = value.split(":"), True
    if isinstance(value, str) and _is_list(key):
        value = value.splitlines()
    if isinstance(value, str) and key.name == "hosts":
        loose = False  # "4" stays text: which it is, a number or names, is decided in one place
    try:
        typed = msgspec.convert(value, key.type, strict=not loose)
    except msgspec.ValidationError:
        typed = None
    if isinstance(typed, str):
        check_name(typed, f"[{key.section}] {key.name}, set by {where},")
    fits = typed is not None and not (isinstance(typed, float) and not math.isfinite(typed))
    if not fits or _too_long(typed):
        what = f"[{key.section}] {key.name} is {_shown(given)}, but must be {_expected(key.type)}."
        raise SpecError(what, where=where, fix=[_in_syntax_of(where, _example(key, value))]) from None
    return typed


def _too_long(typed: Any) -> bool:
    if isinstance(typed, tuple):
        return len(typed) > MAX_LINES or any(_too_long(one) for one in typed)
    return isinstance(typed, str) and len(typed) > MAX_TEXT


def _in_syntax_of(origin: str | None, suggestion: str) -> str:
    """A suggestion "seed = 0" in the syntax of the source that was wrong: "--seed 0", "MANYHANDS_SEED=0"."""
    name, equals, value = suggestion.partition(" = ")
    if not equals or name not in KEYS or origin is None:
        return suggestion
    if value.startswith("["):
        pair = value.strip("[]")
        value = f"({pair})" if origin == "constructor" else value
        if origin.startswith(("--", PREFIX)):
            value = pair.replace(", ", ":")
    if origin == "constructor":
        return f"{name}={value.title() if value in ('true', 'false') else value}"
    bare = value.strip('"')
    if origin.startswith("--"):
        return {"true": origin, "false": f"--no-{origin[2:]}"}.get(value, f"{origin} {bare}")
    return f"{origin}={bare}" if origin.startswith(PREFIX) else suggestion


def _plain_types(kind: Any) -> list[Any]:
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return [one for one in typing.get_args(kind) if one is not type(None)] if is_union else [kind]


def _choices(kind: Any) -> list[str]:
    return [
        str(choice)
        for one in _plain_types(kind)
        if typing.get_origin(one) is Literal
        for choice in typing.get_args(one)
    ]


_TYPE_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text (at most 4096 characters)"}


def _type_words(kind: Any) -> str:
    if typing.get_args(kind) == (str, ...):
        return "a list of texts"
    if ... in typing.get_args(kind):
        return "a list of them"
    return _TYPE_WORDS.get(kind, "two whole numbers, such as 2:8")


def _expected(kind: Any) -> str:
    if choices := _choices(kind):
        return f"one of {', '.join(choices)}"
    return " or ".join(_type_words(one) for one in _plain_types(kind))


def _example(key: Key, value: Any) -> str:
    if choices := _choices(key.type):
        right = (nearest(str(value), choices) or choices)[0]
        return f'{key.name} = "{right}"'
    if _is_range(key):
        return f"{key.name} = [2, 8]"
    if _is_list(key):
        return f'{key.name} = ["..."]'
    examples = {int: "2", float: "1.0", bool: "true", str: '"name"'}
    default = key.default if isinstance(key.default, int | float) and not isinstance(key.default, bool) else None
    return f"{key.name} = {examples[_plain_types(key.type)[0]] if default is None else default}"


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """The closest known name, or nothing."""
    return difflib.get_close_matches(word[:80].lower().replace("-", "_"), list(known), n=1, cutoff=0.6) or (
        difflib.get_close_matches(word[:80], list(known), n=1, cutoff=0.6)
    )


def _clip(text: str) -> str:
    text = "".join(character if character.isprintable() else "?" for character in text[:81])
    return text if len(text) <= 80 else text[:80] + "…"


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return f'"{_clip(value)}"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(one, int) for one in value):
        return f"{value[0]}:{value[1]}"
    return str(value) if isinstance(value, int | float) else f"a {type(value).__name__}"


def own_identity(environ: Mapping[str, str] | None = None) -> WorkerIdentity | None:
    """The identity of this worker, or None if no agent started this process."""
    return parse_identity(environment() if environ is None else environ)


def master_port() -> int | None:
    """The rendezvous port of ranks started by torchrun or by our agent; None if there is none."""
    text = environment().get("MASTER_PORT", "")
    return int(text) if text.isdecimal() else None


def in_trial() -> bool:
    """Whether this worker is only a trial of `mh tune`, `mh check` or `mh profile`: it must leave no files behind."""
    environ = environment()
    return bool(environ.get(TRIAL_VARIABLE)) and own_identity(environ) is not None


def checked() -> str:
    """The request of `mh check` to this worker, as text; empty if `mh check` did not start it."""
    return _request_of_trial(CHECK_VARIABLE)


def profiled() -> str:
    """The request of `mh profile` to this worker, as text; empty if `mh profile` did not start it."""
    return _request_of_trial(PROFILE_VARIABLE)


def _request_of_trial(variable: str) -> str:
    environ = environment()
    return environ.get(variable, "") if own_identity(environ) is not None else ""


def verbose() -> bool:
    """Whether this process prints more, for code that runs before, or without, a run's settings."""
    environ = environment()
    mine = own_identity(environ)
    asked = environ.get(f"{PREFIX}VERBOSE", "").lower() in ("1", "true")
    return bool(mine.flags.get("launch.verbose", asked)) if mine is not None else asked


def under_chaos() -> bool:
    """Whether `mh chaos` started this worker, and may make it hang."""
    environ = environment()
    return bool(environ.get(CHAOS_VARIABLE)) and own_identity(environ) is not None


def cluster_task(environ: Mapping[str, str] | None = None) -> ClusterTask | None:
    """This process's task according to TF_CONFIG, or None. Raises `ClusterError` if TF_CONFIG is invalid."""
    text = (environment() if environ is None else environ).get("TF_CONFIG", "")
    # Platforms set TF_CONFIG to "{}" for jobs of one task; TensorFlow also treats that as no cluster.
    return from_tf_config(text) if text.strip() not in ("", "{}") else None


class TorchrunTask(msgspec.Struct, frozen=True):
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def torchrun_task(environ: Mapping[str, str] | None = None) -> TorchrunTask | None:
    """This process's ranks if torchrun started it, not our agent; else None."""
    environ = environment() if environ is None else environ
    if "TORCHELASTIC_RUN_ID" not in environ or environ.get("MANYHANDS_AGENT"):
        return None
    names = {
        "rank": "RANK",
        "world_size": "WORLD_SIZE",
        "local_rank": "LOCAL_RANK",
        "local_world_size": "LOCAL_WORLD_SIZE",
    }
    raw = {name: environ.get(variable, "") for name, variable in names.items()}
    try:
        return msgspec.convert(raw, TorchrunTask, strict=False)
    except msgspec.ValidationError:
        return None


def torchrun_defaults(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """PET_<FLAG> variables: defaults for torchrun's flags, as torchrun reads them (Kubeflow sets them)."""
    environ = environment() if environ is None else environ
    return {name.removeprefix("PET_").lower(): text for name, text in environ.items() if name.startswith("PET_")}
