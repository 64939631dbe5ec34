"""`mh.launch(fn, ..., workers=N)`: run an importable function in every worker and return the chief's result.

Workers are new processes, so the function is sent by name, its arguments and result as plain values; nothing is
pickled. Start reading at `launch`.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from manyhands.control.messages.launch_request import WorkerCommand
from manyhands.errors import EnvironmentProblem, GaveUp, Preempted, TrainingFailed, UsageError
from manyhands.launcher.launch import launch_command, make_request, open_display, place
from manyhands.launcher.script_exit import watch_ending
from manyhands.observe.notebook import how_to_write_a_file
from manyhands.spec.load import KEYS, environment, own_identity, resolve

if TYPE_CHECKING:
    from manyhands.control.messages.failure import Failure
    from manyhands.control.messages.launch_request import Display
    from manyhands.events import Event

__all__ = ["call_target", "launch"]


def launch(fn: Callable[..., Any], *args: Any, workers: int, **settings: Any) -> Any:
    """Run `fn(*args)` in `workers` workers; returns the chief's return value.

    Raises `TrainingFailed` with the failure block if a worker failed. Refused inside a worker: call it below `if
    __name__ == "__main__":`.

    Args:
        fn: A top-level function of a module or script, which new processes can import; no lambda and no function of a
            notebook cell. Each worker calls it, and usually it makes a `mh.Trainer`.
        args: Its arguments: numbers, text, lists and dicts with text keys, as they are sent to other processes. The
            same holds for its return value.
        workers: How many processes, on this host.
        settings: Settings of the run (seed=1, run_dir="runs/a", ...; `mh config show` lists them). Like flags, they
            override the arguments in the script.
    """
    watch_ending()
    if own_identity() is not None:
        raise UsageError("mh.launch was called inside a worker.", fix=['if __name__ == "__main__": around the call'])
    target, environ = call_target(fn), environment()
    payload = json.dumps({"args": [_plain(value, f"argument {n}") for n, value in enumerate(args)], "kwargs": {}})
    resolved = resolve(arguments={"workers": workers, **settings}, environ=environ)
    with tempfile.TemporaryDirectory(prefix="manyhands-") as folder:
        result_file = Path(folder) / "result.json"
        request = make_request(
            resolved,
            WorkerCommand("call", target, [payload]),
            placement := place(resolved, environ),
            environ,
            run_dir=resolved.spec.run.run_dir,
            result_file=str(result_file),
        )
        request.flags = {KEYS[name].dotted: value for name, value in settings.items() if value is not None}
        display = _FailureKeeper(open_display(resolved, environ))
        code = launch_command(request, placement, display)
        if code != 0:
            raise _error(code, fn, display)
        return json.loads(result_file.read_text()) if result_file.exists() else None


def call_target(fn: Callable[..., Any]) -> str:
    """ "module:qualname" or "path.py:qualname" of a function that a new process can import."""
    name = getattr(fn, "__qualname__", None)
    if isinstance(fn, functools.partial) or name is None:
        raise _not_importable(f"{fn!r} is not a function with a name", "def train(): ...")
    if "<lambda>" in name:
        raise _not_importable("A lambda has no name", "def train(): ...")
    if "<locals>" in name:
        raise _not_importable(f"{name} is defined inside another function", "move it to the top of its module")
    module = sys.modules.get(fn.__module__)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not fn:
        raise _not_importable(f"{fn.__module__}.{name} is another object now", "the function itself, undecorated")
    if fn.__module__ != "__main__":
        return f"{fn.__module__}:{name}"
    spec, file = getattr(module, "__spec__", None), getattr(module, "__file__", None)
    if spec is not None:
        return f"{spec.name}:{name}"
    if file is None or "ipykernel" in sys.modules or not Path(file).is_file():
        fix = [*how_to_write_a_file(name), f"mh.launch({name}, workers=2)"]
        raise _not_importable(f"{name} is defined in a notebook cell or at a prompt", *fix)
    return f"{Path(file).resolve()}:{name}"


def _not_importable(why: str, *fix: str) -> UsageError:
    return UsageError(f"{why}, so new worker processes cannot import it.", where="mh.launch(fn, ...)", fix=list(fix))


def _plain(value: Any, name: str) -> Any:
    """The value, if it can be sent to another process as plain data."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item, f"{name}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(item, f"{name}[{key!r}]") for key, item in value.items()}
    raise UsageError(
        f"{name} is a {type(value).__name__}, which cannot be sent to workers.",
        where="mh.launch(fn, ...)",
        fix=["numbers, text, lists and dicts with text keys; make the rest inside fn, or pass a path"],
    )


class _FailureKeeper:
    """A display that also keeps the failure, to raise it in `launch`."""

    def __init__(self, inner: Display) -> None:
        self._inner = inner
        self.block: Failure | None = None
        self.run = ""

    def event(self, event: Event) -> None:
        self.run = getattr(event, "run", "") or self.run
        self._inner.event(event)

    def output(self, rank: int, stream: Literal["stdout", "stderr"], data: bytes) -> None:
        self._inner.output(rank, stream, data)

    def say(self, line: str) -> None:
        self._inner.say(line)

    def failure(self, block: Failure) -> None:
        self.block = block

    def close(self) -> None:
        self._inner.close()


def _error(code: int, fn: Callable[..., Any], shown: _FailureKeeper) -> BaseException:
    from manyhands.control.messages.failure import render

    what = f"{fn.__qualname__} failed with exit code {code}." + (f"\n{render(shown.block)}" if shown.block else "")
    if code in (130, 143):
        return KeyboardInterrupt()
    if code == 75:
        fix = [f"the same call with run_dir={shown.run!r} continues from there"] if shown.run else []
        return Preempted(f"{fn.__qualname__} was stopped by a signal, with a committed checkpoint.", fix=fix)
    kinds = {3: EnvironmentProblem, 4: GaveUp}
    return kinds.get(code, TrainingFailed)(what)
