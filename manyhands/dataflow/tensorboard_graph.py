"""The graph in the form that TensorBoard's graph tab reads: one event with a GraphDef.

TensorBoard folds by the parts of a node's name between slashes, which are the modules here, and colours by device,
which is the place. Needs the extra `tensorboard`. Start reading at `write_graph`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import time
from pathlib import Path
from typing import Any

from manyhands.dataflow.graph import DataflowGraph, Operation, cost_of
from manyhands.errors import EnvironmentProblem

__all__ = ["node_names", "write_graph"]


def write_graph(graph: DataflowGraph, folder: Path) -> Path:
    """Write an event file into the folder, which `tensorboard --logdir` shows; returns the file."""
    if importlib.util.find_spec("tensorboard") is None:
        raise EnvironmentProblem(
            "TensorBoard's files need the package tensorboard, which is not installed.",
            fix=["pip install 'manyhands[tensorboard]'", "-o graph.html"],
        )
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"events.out.tfevents.{time.time_ns():020d}.graph.{os.getpid()}"
    with path.open("xb") as file:
        records = RecordWriter(file)
        for event in (
            Event(wall_time=time.time(), file_version="brain.Event:2"),
            Event(wall_time=time.time(), graph_def=_graph_def(graph).SerializeToString()),
        ):
            records.write(event.SerializeToString())
    return path


def _graph_def(graph: DataflowGraph) -> Any:
    from tensorboard.compat.proto.graph_pb2 import GraphDef
    from tensorboard.compat.proto.versions_pb2 import VersionDef

    names = node_names(graph)
    found = GraphDef(versions=VersionDef(producer=22))
    for one in graph.operations:
        node = found.node.add(name=names[one.name], op=one.kind, device=one.place.replace(" ", "_"))
        node.input.extend(names[source] for source in one.inputs)
        for spec in one.outputs:
            shape = node.attr["_output_shapes"].list.shape.add()
            for size in spec.shape:
                shape.dim.add(size=size)
        for key, text in (("cost", cost_of(one.flops, one.seconds, one.parameter_bytes)), ("place", one.place)):
            if text:
                node.attr[key].s = text.encode()
    return found


def node_names(graph: DataflowGraph) -> dict[str, str]:
    """Names with the modules as folders; unique, and of characters that TensorBoard accepts."""
    found: dict[str, str] = {}
    used = set[str]()
    for one in graph.operations:
        name = base = "/".join([graph.model, *_parts(graph, one), _plain(one.name)])
        number = 1
        while name in used:
            number += 1
            name = f"{base}_{number}"
        used.add(name)
        found[one.name] = name
    return found


def _parts(graph: DataflowGraph, one: Operation) -> list[str]:
    """Each module's name without that of the module around it."""
    parts, outer = [], ""
    for path in one.scope:
        name = graph.modules[path].name
        call = path.rpartition("@")[2] if "@" in path else ""
        short = name.removeprefix(f"{outer}.") if outer else name
        parts.append(_plain(f"{short}_call{int(call) + 1}" if call.isdigit() else short))
        outer = name
    return parts


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name.strip()) or "_"
