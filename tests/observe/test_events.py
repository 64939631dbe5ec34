"""Every kind of event can be written, read, and shown to people where that is meant."""

from __future__ import annotations

import ast
import inspect
from typing import get_args

from manyhands import events
from manyhands.observe import event_text

# Recorded for programs, or shown in another way: in the line of steps, in `mh status`, at the end of a run.
WITHOUT_A_LINE = {
    "CopiesDiverged",
    "ResourcesUsed",
    "ServerStarted",
    "ServerWentOn",
    "StepDone",
    "WorkerStarted",
    "WrongGradientFound",
}


def test_every_event_is_public_and_can_be_decoded() -> None:
    classes = {name for name, value in vars(events).items() if getattr(value, "__module__", "") == events.__name__}
    defined = {name for name in classes if inspect.isclass(vars(events)[name]) and not name.startswith("_")}
    assert defined <= set(events.__all__)
    assert defined == {kind.__name__ for kind in get_args(events.Event)}


def test_every_event_has_a_line_or_is_known_to_have_none() -> None:
    tree = ast.parse(inspect.getsource(event_text._line_of))
    shown = {ast.unparse(node.cls) for node in ast.walk(tree) if isinstance(node, ast.MatchClass)}
    assert shown | WITHOUT_A_LINE == {kind.__name__ for kind in get_args(events.Event)}
    assert not shown & WITHOUT_A_LINE
