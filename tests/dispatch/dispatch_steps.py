"""Step functions that the tests of dispatch schedule; workers import this file."""

from __future__ import annotations

import itertools
import os
import random
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import manyhands as mh


@mh.dispatch.remote
def give_back(ctx: Any, *args: Any, **kwargs: Any) -> Any:
    return {"args": list(args), "kwargs": kwargs}


@mh.dispatch.remote
def count(ctx: Any, cell: int, cells: int) -> int:
    """Every call adds 1 to its own cell, and to a variable that all have in common."""
    one = torch.zeros(cells, dtype=torch.int64)
    one[cell] = 1
    ctx.add("cells", one)
    ctx.add("total", torch.tensor(1))
    return cell


@mh.dispatch.remote
def count_and_die_once(ctx: Any, cell: int, cells: int, mark: str) -> int:
    """The first worker that comes here dies of it, after it has asked for its changes."""
    count(ctx, cell, cells)
    if _first_to_take(mark):
        os.kill(os.getpid(), signal.SIGKILL)
    return cell


@mh.dispatch.remote
def see_twice(ctx: Any, other: str) -> tuple[int, int, int]:
    """Reads one variable, waits until the test has changed both, and reads the other one."""
    first = int(ctx.variables["first"])
    with socket.socket(socket.AF_UNIX) as gate:
        gate.connect(other)
        gate.recv(1)
    return first, int(ctx.variables["second"]), int(ctx.variables["first"])


@mh.dispatch.remote
def fail(ctx: Any, why: str) -> None:
    ctx.assign("never", torch.ones(1))
    raise ValueError(why)


@mh.dispatch.remote
def wait_at(ctx: Any, place: str) -> int:
    """Waits until the test opens the gate."""
    with socket.socket(socket.AF_UNIX) as gate:
        gate.connect(place)
        gate.recv(1)
    return ctx.call


@mh.dispatch.remote
def draw(ctx: Any) -> tuple[float, float]:
    return random.random(), float(torch.rand(()))


@mh.dispatch.remote
def who(ctx: Any) -> tuple[int, int]:
    return ctx.worker, os.getpid()


@mh.dispatch.remote
def change(ctx: Any, op: str, name: str, value: Any) -> None:
    getattr(ctx, op)(name, value)


@mh.dispatch.remote
def change_oddly(ctx: Any, how: str) -> None:
    match how:
        case "type":
            ctx.assign("odd", torch.ones(2).to(torch.float8_e4m3fn))
        case "layout":
            ctx.add("odd", torch.eye(2).to_sparse())
        case "name":
            ctx.assign(5, torch.ones(2))
        case "long name":
            ctx.assign("n" * 2**20, torch.ones(2))
        case "many":
            for number in range(10_001):
                ctx.assign(f"odd {number}", torch.ones(1))


@mh.dispatch.remote
def twice(ctx: Any) -> list[int]:
    before = ctx.variables["both"].clone()
    ctx.add("both", torch.tensor(1))
    ctx.add("both", torch.tensor(2))
    return [int(before), int(ctx.variables["both"])]


@mh.dispatch.remote
def return_a_set(ctx: Any) -> Any:
    return {1, 2}


@mh.dispatch.remote
def numbers(ctx: Any) -> Iterator[tuple[int, int]]:
    """Each worker's own: numbers from 0, with the process that made them."""
    return ((os.getpid(), number) for number in itertools.count())


@mh.dispatch.remote
def take_next(ctx: Any, iterator: Iterator[tuple[int, int]]) -> tuple[int, int]:
    return next(iterator)


def _first_to_take(mark: str) -> bool:
    try:
        Path(mark).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
