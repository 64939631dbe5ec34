"""The first code in a worker process: ties it to its agent, then runs the user's code as `python` would.

Run as `python -u -m manyhands.launcher.worker_process.bootstrap --parent PID --lifeline FD --kind KIND --target TARGET
-- args`. If the code raises, the exception is sent to the agent through the lifeline before anything is torn down, so
the first failure is known even if this process hangs while it exits. Exit codes are those of `manyhands.errors`.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import faulthandler
import importlib
import importlib.util
import json
import os
import runpy
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from manyhands.control.messages.lifeline_records import (
    STACK_SIGNAL,
    Began,
    Raised,
    Record,
    Returned,
    WantsStore,
    encode,
)
from manyhands.control.processes.fence import die_with_parent
from manyhands.errors import ManyhandsError, PeerLost, Preempted, UsageError
from manyhands.launcher.worker_process.error_hints import hint_for
from manyhands.launcher.worker_process.foreign_scripts import watched
from manyhands.launcher.worker_process.hang_on_signal import install_hang_handler
from manyhands.launcher.worker_process.import_hooks import import_to_stay
from manyhands.launcher.worker_process.lazy_compiler import load_compiler_late
from manyhands.launcher.worker_process.store_requests import request_before_connecting
from manyhands.launcher.worker_process.user_tracebacks import format_error
from manyhands.spec import load
from manyhands.spec.worker_identity import WorkerIdentity

__all__ = ["leave", "main"]

TRACEBACK_CHARS = 6000
MESSAGE_CHARS = 1000


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--lifeline", type=int, required=True)
    parser.add_argument("--kind", choices=["script", "module", "call"], required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("args", nargs="*")
    asked = parser.parse_args(argv)
    die_with_parent(asked.parent)
    os.set_inheritable(asked.lifeline, False)
    faulthandler.enable()
    # For the agent, when this process makes no progress; a copy, as the script may redirect its standard error.
    faulthandler.register(STACK_SIGNAL, file=os.dup(2), all_threads=True)
    if load.under_chaos():
        install_hang_handler()
    import_to_stay("torch")
    load_compiler_late()
    request_before_connecting(load.master_port(), lambda: _send(asked.lifeline, WantsStore()))
    _send(asked.lifeline, Began())
    leave(_run_to_the_end(asked))


def _run_to_the_end(asked: argparse.Namespace) -> int:
    """Run the user's code; returns the exit code that Python, or the error, would give."""
    try:
        with watched(_worker_identity() if asked.kind != "call" else None):
            _run(asked.kind, asked.target, asked.args, asked.lifeline)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except Preempted as stopped:  # an orderly end, not a failure; the agent says so
        return stopped.exit_code
    except BaseException as error:
        prints = _printed(error)
        _send(asked.lifeline, _raised(error, prints if len(prints) <= TRACEBACK_CHARS else ""))
        print(prints, end="", file=sys.stderr)
        return _exit_code(error)
    return 0


def _worker_identity() -> WorkerIdentity | None:
    identity = load.own_identity()
    return None if identity is None or identity.is_server else identity


def leave(code: int) -> NoReturn:
    """Exit as the interpreter would, but without C++ destructors.

    If a script leaves its process group open, torch's threads can abort the process in them, and a worker that has
    finished would count as crashed.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _run(kind: str, target: str, args: list[str], lifeline: int) -> None:
    sys.argv = [target, *args]
    match kind:
        case "script":
            sys.path[0] = str(Path(target).resolve().parent)
            runpy.run_path(target, run_name="__main__")
        case "module":
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        case _:
            arguments = json.loads(args[0]) if args else {}
            function = _function(target)
            result = function(*arguments.get("args", []), **arguments.get("kwargs", {}))
            _send(lifeline, Returned(value=_as_json(result)))


def _function(target: str) -> Callable[..., Any]:
    place, _, qualname = target.rpartition(":")
    if place.endswith(".py"):
        sys.path[0] = str(Path(place).resolve().parent)
        found: Any = _module_from(Path(place))
    else:
        found = importlib.import_module(place)
    for name in qualname.split("."):
        found = getattr(found, name)
    if not callable(found):
        raise UsageError(f"{target} is not a function.")
    return found  # type: ignore[no-any-return]


def _module_from(path: Path) -> Any:
    """Import a file under its own name, so that loader processes can pickle what it defines."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _as_json(result: Any) -> str:
    try:
        return json.dumps(result)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"The function returned a {type(result).__name__}, which does not fit into JSON: {error}.",
            fix=["return numbers, strings, lists and dicts; save tensors with trainer.save(...)"],
        ) from error


def _exit_code(error: BaseException) -> int:
    if isinstance(error, ManyhandsError):
        return error.exit_code
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _raised(error: BaseException, prints: str) -> Raised:
    first_step, step, phase = _position()
    bases = [kind.__name__ for kind in type(error).__mro__ if kind not in (BaseException, object)]
    return Raised(
        error=type(error).__name__,
        message="\n  try: ".join(filter(None, [str(error), hint_for(error)]))[:MESSAGE_CHARS],
        bases=bases,
        traceback=format_error(error, whole=load.verbose())[-TRACEBACK_CHARS:],
        exit_code=_exit_code(error),
        step=step,
        first_step=first_step,
        phase=phase,
        prints=prints,
    )


def _position() -> tuple[int | None, int | None, str]:
    """Where the worker began and last reported to be; imports nothing that the user's code did not."""
    session = sys.modules.get("manyhands.control.session.session")
    return session.latest_position() if session is not None else (None, None, "")


def _printed(error: BaseException) -> str:
    """For stderr: only the message for an error that the user can act on, else the traceback."""
    if isinstance(error, PeerLost) or (isinstance(error, ManyhandsError) and error.exit_code not in (1, 70)):
        return f"{type(error).__name__}: {error}\n"  # the log of a lost peer has its own error
    return format_error(error, whole=load.verbose())


def _send(lifeline: int, record: Record) -> None:
    # The agent may be gone; then this process ends in a moment, too.
    with contextlib.suppress(OSError):
        os.write(lifeline, encode(record))


if __name__ == "__main__":
    main()
