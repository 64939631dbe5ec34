"""One rank of a plane, told what to do by lines of JSON: `python rank.py FD BYTES`. Tensors travel as bytes in hex."""

from __future__ import annotations

import json
import sys

import torch

from manyhands.comm.segments import Segment
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
        plane.meet("meet")
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


def main() -> None:
    segment = Segment(int(sys.argv[1]), int(sys.argv[2]))
    plane: Plane | None = None
    print("up", flush=True)
    for line in sys.stdin:
        told = json.loads(line)
        if told["op"] == "open":
            plane = Plane(
                segment, told["rank"], told["world"], area_bytes=told["area_bytes"], timeout_s=told["timeout_s"]
            )
            print(json.dumps({"data": ""}), flush=True)
            continue
        assert plane is not None
        try:
            print(json.dumps({"data": answer(plane, told)}), flush=True)
        except PeerLost as error:
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)


main()
