"""Step functions by name: how `mh.dispatch.remote` registers them, how a new process finds them, what a step can do.

Functions are sent by name only. A worker imports the modules that the cluster names and finds the same functions there.
Start reading at `remote`, and at `Context` for the first argument of a step function.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, overload

from manyhands.errors import SpecError, UsageError
from manyhands.observe.notebook import how_to_write_a_file
from manyhands.spec.load import nearest

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Context",
    "DatasetContext",
    "find_step",
    "import_steps",
    "modules_of_steps",
    "remote",
    "sendable",
    "step_name",
]

F = TypeVar("F", bound=Callable[..., Any])

_steps: dict[str, Callable[..., Any]] = {}


@overload
def remote(fn: F) -> F: ...


@overload
def remote(fn: str) -> Callable[[F], F]: ...


def remote(fn: Any) -> Any:
    """Register a function at the top of a module as a step: `@mh.dispatch.remote`, or `@mh.dispatch.remote("name")`.

    It is called as `fn(ctx, *args, **kwargs)`, in any worker, and stays an ordinary function here.

    Args:
        fn: The function; or the name to register it by, if not the function's name.
    """
    return _register(fn, fn.__name__) if callable(fn) else lambda function: _register(function, fn)


def _register(fn: F, name: str) -> F:
    if "<locals>" in fn.__qualname__ or "<lambda>" in fn.__qualname__:
        raise UsageError(
            f"{fn.__qualname__} cannot be a step: new worker processes would not find it.",
            where="mh.dispatch.remote",
            fix=["move it to the top of its module"],
        )
    before = _steps.get(name)
    if before is not None and _origin(before) != _origin(fn):
        raise SpecError(
            f"Two functions are registered as step {name!r}: in {_origin(before)[0]} and in {_origin(fn)[0]}.",
            fix=['@mh.dispatch.remote("another name")'],
        )
    _steps[name] = fn
    return fn


def _origin(fn: Callable[..., Any]) -> tuple[str, str]:
    """File and name of a function: the same file may be imported under two names, as a script and as a module."""
    return fn.__code__.co_filename, fn.__qualname__


def find_step(name: str) -> Callable[..., Any]:
    if name not in _steps:
        raise UsageError(
            f"No step is called {name!r}; there are {', '.join(sorted(_steps)) or 'none'}.",
            fix=[f'"{close}"' for close in nearest(name, _steps)] or ["@mh.dispatch.remote above the function"],
        )
    return _steps[name]


def step_name(fn: Callable[..., Any]) -> str:
    """The name that a step function is registered by."""
    found = [name for name, known in _steps.items() if known is fn]
    if not found:
        raise UsageError(
            f"{getattr(fn, '__qualname__', fn)!s} is not a registered step.", fix=["@mh.dispatch.remote above it"]
        )
    return found[0]


def modules_of_steps() -> list[str]:
    """The modules, and the script, of all registered steps, for workers to import."""
    return sorted({_module_of(fn) for fn in _steps.values()})


def _module_of(fn: Callable[..., Any]) -> str:
    if fn.__module__ != "__main__":
        return fn.__module__
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), fn.__code__.co_filename
    if spec is not None:
        return str(spec.name)
    if not Path(file).is_file():
        raise UsageError(
            f"Step {fn.__qualname__} is defined in a notebook or at a prompt: new worker processes cannot find it.",
            fix=how_to_write_a_file(fn.__qualname__),
        )
    return str(Path(file).resolve())


def import_steps(modules: Sequence[str]) -> None:
    """Import modules by name, and files by their path."""
    for module in modules:
        if module.endswith(".py"):
            _import_file(Path(module))
        else:
            importlib.import_module(module)


def _import_file(path: Path) -> None:
    if any(_is_file(module, path) for module in list(sys.modules.values())):
        return
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UsageError(f"{path} is not an existing Python file.")
    module = importlib.util.module_from_spec(spec)
    # Under the file's name, so that loader processes find what it defines.
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)


def _is_file(module: Any, path: Path) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and Path(file).resolve() == path.resolve()


# ---- arguments of step functions -------------------------------------------------------------------------------


class DatasetContext(NamedTuple):
    """Argument of a function that makes a worker's dataset."""

    worker: int
    seed: int


class Context:
    """One call, as its step function sees it.

    It reads variables as they were when the call started; its changes take effect when, and only if, the call
    completes.
    """

    def __init__(self, call: int, worker: int, names: Collection[str], read: Callable[[str], Tensor]) -> None:
        self.call, self.worker = call, worker
        self.variables: Mapping[str, Tensor] = Variables(names, read)
        self._changes: dict[str, tuple[str, Tensor]] = {}

    def assign(self, name: str, value: Tensor) -> None:
        """Set a variable when the call completes; create it if it does not exist."""
        self._changes[name] = ("assign", sendable(name, value).clone())

    def add(self, name: str, value: Tensor) -> None:
        """Add to a variable when the call completes, to its value at that time."""
        value = sendable(name, value)
        op, before = self._changes.get(name, ("add", None))
        self._changes[name] = (op, value.clone() if before is None else before + value)

    @property
    def changes(self) -> dict[str, tuple[str, Tensor]]:
        """The changes requested so far: by name, "assign" or "add", and the value."""
        return dict(self._changes)


def sendable(name: str, value: Any) -> Tensor:
    """The value as a tensor; `UsageError` if no variable can have that value, or that name."""
    from torch import as_tensor

    from manyhands.comm.tensor_messages import check_tensor

    if not isinstance(name, str):
        raise UsageError(f"{name!r} is a {type(name).__name__}; variables have names.", fix=['"weights"'])
    return check_tensor(as_tensor(value).detach(), f"Variable {name!r}")


class Variables(Mapping[str, "Tensor"]):
    """The variables of a snapshot; each is fetched on first access, and is a copy for the caller."""

    def __init__(self, names: Collection[str], read: Callable[[str], Tensor]) -> None:
        self._names, self._read = names, read
        self._found: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            have = ", ".join(self._names) or "none"
            raise UsageError(f"No variable is called {name!r}; there are {have}.", fix=["cluster.assign(name, tensor)"])
        if name not in self._found:
            self._found[name] = self._read(name)
        return self._found[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
