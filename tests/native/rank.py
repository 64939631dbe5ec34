"""Ranks of a plane, told what to do by lines of JSON: `python rank.py MEMORY BYTES CONTROL`. Tensors travel as hex.

This process imports torch once and forks a rank for every socket that it is sent through the socket CONTROL, so that a
rank is there in milliseconds. It has no threads when it forks.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

import torch

from manyhands.comm.host_memory import Segment
from manyhands.comm.shared_memory import Plane
from manyhands.errors import PeerLost


def tensor_of(told: dict) -> torch.Tensor:
    data = bytearray.fromhex(told["data"])
    dtype = getattr(torch, told["dtype"])
    return torch.frombuffer(data, dtype=dtype).clone() if data else torch.empty(0, dtype=dtype)


def hex_of(tensor: torch.Tensor) -> str:
    return tensor.view(torch.uint8).numpy().tobytes().hex() if tensor.numel() else ""


def answer(plane: Plane, told: dict) -> str:
    program = bytes.fromhex(told.get("program", ""))
    if told["op"] == "meet":
        plane.barrier("meet")
        return ""
    if told["op"] == "post":
        plane.post(told.get("times", 1))
        return ""
    if told["op"] == "all_posted":
        return str(plane.all_posted(told["times"]))
    if told["op"] == "wait_posted":
        plane.wait_posted(told["times"], "posts")
        return ""
    tensor = tensor_of(told)
    if told["op"] == "all_reduce":
        plane.all_reduce_(tensor, program, "sum")
        return hex_of(tensor)
    if told["op"] == "broadcast":
        plane.broadcast_(tensor, "broadcast", source=told["source"])
        return hex_of(tensor)
    if told["op"] == "all_gather":
        gathered = tensor.new_empty(plane.world * tensor.numel())
        plane.all_gather(gathered, tensor, "gather")
        return hex_of(gathered)
    part = tensor.new_empty(tensor.numel() // plane.world)
    plane.reduce_scatter(part, tensor, program, "scatter")
    return hex_of(part)


def serve(segment: Segment, line: socket.socket) -> None:
    plane: Plane | None = None
    stream = line.makefile("rw")

    def say(said: dict) -> None:
        stream.write(json.dumps(said) + "\n")
        stream.flush()

    for text in stream:
        told = json.loads(text)
        if told["op"] == "open":
            options = {name: told[name] for name in ("area_bytes", "timeout_s")}
            plane = Plane(segment, told["rank"], told["world"], **options)
            say({"data": ""})
            continue
        assert plane is not None
        try:
            say({"data": answer(plane, told)})
        except PeerLost as error:
            say({"error": f"{type(error).__name__}: {error}"})


def main() -> None:
    memory, num_bytes, control_fd = map(int, sys.argv[1:])
    segment = Segment(memory, num_bytes)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps
    with socket.socket(fileno=control_fd) as control:
        while True:
            _, fds, _, _ = socket.recv_fds(control, 1, 1)
            if not fds:
                return
            pid = os.fork()
            with socket.socket(fileno=fds[0]) as line:
                if pid == 0:
                    control.close()
                    try:
                        serve(segment, line)
                    finally:
                        os._exit(0)
            control.send(pid.to_bytes(4, "little"))


main()
