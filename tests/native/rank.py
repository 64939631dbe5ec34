"""Ranks of a plane that carry out commands from JSON lines: `python rank.py MEMORY BYTES CONTROL`. Tensors are hex.

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


def tensor_of(command: dict) -> torch.Tensor:
    data = bytearray.fromhex(command["data"])
    dtype = getattr(torch, command["dtype"])
    return torch.frombuffer(data, dtype=dtype).clone() if data else torch.empty(0, dtype=dtype)


def hex_of(tensor: torch.Tensor) -> str:
    return tensor.view(torch.uint8).numpy().tobytes().hex() if tensor.numel() else ""


def answer(plane: Plane, command: dict) -> str:
    program = bytes.fromhex(command.get("program", ""))
    if command["op"] == "barrier":
        plane.barrier("barrier")
        return ""
    if command["op"] == "post":
        plane.post(command.get("times", 1))
        return ""
    if command["op"] == "all_posted":
        return str(plane.all_posted(command["times"]))
    if command["op"] == "wait_posted":
        plane.wait_posted(command["times"], "posts")
        return ""
    tensor = tensor_of(command)
    if command["op"] == "all_reduce":
        plane.all_reduce_(tensor, program, "sum")
        return hex_of(tensor)
    if command["op"] == "broadcast":
        plane.broadcast_(tensor, "broadcast", source=command["source"])
        return hex_of(tensor)
    if command["op"] == "all_gather":
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
        command = json.loads(text)
        if command["op"] == "open":
            options = {name: command[name] for name in ("area_bytes", "timeout_s")}
            plane = Plane(segment, command["rank"], command["world"], **options)
            say({"data": ""})
            continue
        assert plane is not None
        try:
            say({"data": answer(plane, command)})
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
