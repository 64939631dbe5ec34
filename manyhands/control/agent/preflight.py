"""Checks a launch before anything is started, and chooses the addresses that it will use.

Raises `UsageError` and `EnvironmentProblem` with what to type instead. Starts nothing, and leaves no port bound.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import platform
import re
import shlex
import socket
import sys
import warnings
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from msgspec.structs import replace

from manyhands.control.messages.agent_messages import JobDescription
from manyhands.control.messages.launch_request import JoinTicket, LaunchRequest, WorkerCommand
from manyhands.control.security.keys import key_of, local_key, new_key
from manyhands.errors import EnvironmentProblem, JoinRefused, UsageError
from manyhands.native import why_not
from manyhands.spec.addresses import is_loopback, parse_address
from manyhands.spec.undecodable_names import check_name

__all__ = [
    "Addresses",
    "check_command",
    "imports_manyhands",
    "job_of",
    "joined_job",
    "local_address_to",
    "may_import_torch",
    "program_digest",
    "require_clear_text_consent",
    "resolve",
    "versions",
]

IMPORTING_US = re.compile(rb"^\s*(import\b[^#\n]*\bmanyhands\b|from manyhands\b)", re.MULTILINE)


class Addresses:
    """How this host's agent reaches the others: it listens, it joins, or (one host) neither."""

    def __init__(
        self,
        data: str,
        *,
        listen: tuple[str, int] | None = None,
        key: bytes | None = None,
        join: tuple[str, int] | None = None,
        run: str = "",
    ) -> None:
        self.data, self.listen, self.key, self.join, self.run = data, listen, key, join, run


def versions() -> dict[str, str]:
    """Versions that must be the same on every host."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in ("manyhands", "torch"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    found["C extension"] = "missing" if why_not() else "built"  # with and without it, updates round differently
    return found


def job_of(request: LaunchRequest) -> JobDescription | None:
    """What every host's workers run; None if this host joins a run, which sends it."""
    if request.command is None:
        return None
    return JobDescription(
        command=check_command(request.command),
        flags=request.flags,
        grace_s=request.grace_s,
        max_restarts=request.max_restarts,
        threads=request.threads,
        most_workers=request.elastic[1] if request.elastic else 0,
        least_workers=request.elastic[0] if request.elastic else 0,
        heartbeat_s=request.heartbeat_s,
        hang_s=request.hang_s,
        servers=request.servers,
        host=socket.gethostname(),
        program=program_digest(request.command),
    )


def joined_job(job: JobDescription, own: WorkerCommand | None, host: str) -> JobDescription:
    """The run's job as this host runs it. Raises `JoinRefused` where the host would train something else.

    `own`: the command that was typed on this host, if one was.
    """
    name = Path(job.command.target.rpartition(":")[0] or job.command.target).name
    try:
        command = check_command(job.command)
    except UsageError as error:
        what = f"{host} cannot run what {job.host} runs: {error.what}"
        raise JoinRefused(what, where=job.command.target, fix=["the same files under the same path"]) from error
    mine = program_digest(command)
    if job.program and mine != job.program:
        raise JoinRefused(
            f"{host} runs another {name} (sha {mine[:12] or 'of no file'} against {job.program[:12]} on {job.host}).",
            where=command.target,
            fix=[f"copy {name} from {job.host}", "a directory that all hosts share"],
        )
    if own is not None and (own.kind, own.args) != (job.command.kind, job.command.args):
        raise JoinRefused(
            f"{host} runs {name} with {_shown(own)}, and {job.host} with {_shown(job.command)}.",
            where="the command line",
            fix=["the same command on every host"],
        )
    return replace(job, command=command)


def _shown(command: WorkerCommand) -> str:
    return shlex.join(command.args)[:200] or "no arguments"


def program_digest(command: WorkerCommand) -> str:
    try:
        source = _source(replace(command, target=command.target.rpartition(":")[0]) if _is_call(command) else command)
        return hashlib.sha256(source.read_bytes()).hexdigest()
    except OSError:
        return ""


def _is_call(command: WorkerCommand) -> bool:
    return command.kind == "call"


def check_command(command: WorkerCommand) -> WorkerCommand:
    """The command with its path made absolute. Raises `UsageError` if it cannot run."""
    for number, argument in enumerate(command.args, 1):
        check_name(argument, f"The script's argument {number},")
    if command.kind == "script":
        path = _existing(command.target)
        _check_syntax(command.target)
        return replace(command, target=path)
    module = command.target.rpartition(":")[0] if command.kind == "call" else command.target
    if command.kind == "call" and module.endswith(".py"):
        return replace(command, target=f"{_existing(module)}:{command.target.rpartition(':')[2]}")
    if not module or _find(module) is None:
        raise UsageError(f"There is no module named {module!r}.", fix=["a name that `python -m` would find from here"])
    return command


def _existing(path: str) -> str:
    if not Path(path).exists():
        raise UsageError(f"{path} does not exist.", where="the command line", fix=["the path of a Python script"])
    absolute = str(Path(path).absolute())
    check_name(absolute, "The path of the script,")
    return absolute


def _check_syntax(path: str) -> None:
    """Raise one error before any worker starts, rather than the same one in each of them."""
    if not path.endswith(".py"):  # for example a zip file
        return
    try:
        with warnings.catch_warnings(action="ignore"):  # the workers warn
            compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    except (OSError, ValueError):
        return
    except SyntaxError as error:
        fix = [f"python -m py_compile {path}, for the line itself"]
        raise UsageError(f"{path} is not Python: {error.msg}.", where=f"{path} line {error.lineno}", fix=fix) from None


def imports_manyhands(command: WorkerCommand) -> bool:
    """Whether the program's main file does, so that its workers will join the run; those of a "call" always do."""
    if command.kind == "call":
        return True
    try:
        return IMPORTING_US.search(_source(command).read_bytes()) is not None
    except OSError:
        return False


def may_import_torch(command: WorkerCommand) -> bool:
    """Whether the program's main file imports more than Python's own modules: any other one may import torch."""
    if command.kind == "call":
        return True
    try:
        tree = ast.parse(_source(command).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return True
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0] if not node.level else "")
    return not names <= sys.stdlib_module_names - {"importlib", "runpy"}


def _source(command: WorkerCommand) -> Path:
    if command.kind == "script" or command.target.endswith(".py"):
        return Path(command.target)
    spec = _find(command.target)
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)), "__main__.py")
    return Path((spec and spec.origin) or "")


def _find(name: str) -> ModuleSpec | None:
    """Look a module up without importing anything, its parents included."""
    if name in sys.modules:
        return sys.modules[name].__spec__
    path: list[str] | None = ["", *sys.path]
    parts = name.split(".")
    spec: ModuleSpec | None = None
    for number in range(len(parts)):
        spec = PathFinder.find_spec(".".join(parts[: number + 1]), path)
        if spec is None and number == 0:
            spec = importlib.util.find_spec(parts[0])  # built in, or an editable install with its own finder
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or [])
    return spec


def resolve(request: LaunchRequest) -> Addresses:
    """Whether this host listens or joins, where, and with which key; refuses what would be open or unencrypted."""
    join = _ticket(request)
    if join is not None:
        host, port = parse_address(join.address)
        data = parse_address(request.listen)[0] if request.listen else local_address_to(host, port)
        require_clear_text_consent(data, request)
        return Addresses(data, join=(host, port), key=key_of(join), run=join.run)
    if request.hosts_wanted == 1 and request.listen is None and request.master is None:
        return Addresses("127.0.0.1")
    listen = request.master if request.master else parse_address(request.listen) if request.listen else None
    if listen is None:
        raise UsageError(
            f"{request.hosts_wanted} hosts are wanted, but this one has no address to be joined at.",
            fix=["--listen ADDR, the address the other hosts reach this one at"],
        )
    parse_address(f"{listen[0]}:{listen[1]}" if ":" not in listen[0] else f"[{listen[0]}]:{listen[1]}")
    if request.hosts_wanted > 1 or request.elastic:
        require_clear_text_consent(listen[0], request)
    key = request.key or (_shared_key(listen[0]) if request.master else new_key())
    return Addresses(listen[0], listen=_free_port(*listen), key=key)


def _ticket(request: LaunchRequest) -> JoinTicket | None:
    if request.join is not None or request.master is None or not request.host_rank:
        return request.join
    host, port = request.master
    key = request.key or _shared_key(host)
    return JoinTicket(address=f"[{host}]:{port}" if ":" in host else f"{host}:{port}", run="", key=key.hex())


def _shared_key(host: str) -> bytes:
    if is_loopback(host):
        return local_key()
    raise JoinRefused(
        f"{host} is not a loopback address, and there is no key that the hosts share.",
        fix=[
            "MANYHANDS_KEY_FILE=FILE on every host: 32 bytes in hexadecimal, mode 0600",
            "mh run --hosts-wanted N --listen ADDR, which makes a join file",
        ],
    )


def require_clear_text_consent(host: str, request: LaunchRequest) -> None:
    if is_loopback(host) or request.insecure_data_plane:
        return
    raise EnvironmentProblem(
        f"Tensors between hosts would be sent unencrypted at {host}: Gloo and NCCL have neither encryption nor "
        "authentication. Control messages are encrypted either way.",
        fix=["--insecure-data-plane, on a network that only trusted hosts can read"],
    )


def _free_port(host: str, port: int) -> tuple[str, int]:
    """The port, or a free one for 0. Found by binding, so that a port in use is an error before anything starts."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise EnvironmentProblem(
                f"Cannot listen on {host} port {port}: {error.strerror}.",
                fix=["an address of this host", "another port"],
            ) from error
        return host, int(probe.getsockname()[1])


def local_address_to(host: str, port: int) -> str:
    """The local address that packets to `host` leave from."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise EnvironmentProblem(f"There is no route from this host to {host}: {error}.") from error
