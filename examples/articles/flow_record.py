"""Numbered steps of an article, beside what one real run shows of each.

A script lists its `Step`s in a `Flow`, opens a lane in each worker, marks what the worker does there, and calls `show`
at its end. That reads the marks and the run's own events (`mh.read_events`), prints them beside the steps, and writes
`flow.json` and `flow.svg` into the run directory. `python -m tools.article_pages` makes pages of these.

把文章里编号的步骤，和一次真实训练中对应的记录放在一起：脚本列出步骤，每个 worker 标记自己做的事，最后由 show 读取这些
标记和训练自身的事件，打印对照表，并把 flow.json 和 flow.svg 写进训练目录。
"""

import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import flow_figure

import manyhands as mh

SETTLED_S = 1.2
"""The record is written within half a second."""


class Mark(NamedTuple):
    """Shown by the first mark of this name in each lane."""

    name: str


class Event(NamedTuple):
    """Shown by an event of the run: the first, or the last, whose `where` fields have these values."""

    name: str
    fields: tuple[str, ...] = ()
    """Fields to show; "phases.reduce" is an entry of a field."""
    last: bool = False
    where: dict[str, Any] = {}


class Step(NamedTuple):
    english: str
    chinese: str
    shown_by: Mark | Event


class Seen(NamedTuple):
    """Where the run shows a step. Times are seconds since the first thing that is shown."""

    step: int
    lane: str
    start: float
    end: float
    name: str
    text: str


class Flow:
    def __init__(self, *steps: Step, repeats: int = 2, around: str = "") -> None:
        """The figure has the first `repeats` marks of a name in each lane, or those next to the first `around` mark."""
        self.steps, self._repeats, self._around = steps, repeats, around
        self._file: Path | None = None
        self._lane = ""
        self._early: list[dict[str, Any]] = []
        self._since = time.time()

    def open(self, run_dir: Path, lane: str = "") -> None:
        """The marks of this process are in this lane, by default its worker's; earlier ones too.

        Call it once the run has its directory: after `hands.setup`.
        """
        folder = Path(run_dir) / "flow"
        folder.mkdir(parents=True, exist_ok=True)
        self._file, self._lane = folder / f"{os.getpid()}.jsonl", lane or f"worker {os.environ.get('RANK', 0)}"
        while self._early:
            self._write(self._early.pop(0))

    def lap(self, name: str = "", text: str = "") -> None:
        """A mark from the end of the one before, in this process, to now; without a name, time that is not shown."""
        if name:
            self.note(name, self._since, text)
        self._since = time.time()

    def note(self, name: str, start: float, text: str = "") -> None:
        """A mark from `start`, of `time.time()`, to now."""
        line = {"name": name, "start": start, "end": time.time(), "text": text}
        if self._file is None:
            self._early.append(line)
        else:
            self._write(line)

    def _write(self, line: dict[str, Any]) -> None:
        assert self._file is not None
        with self._file.open("a") as file:
            file.write(json.dumps({"lane": self._lane, **line}) + "\n")

    def show(self, run_dir: Path) -> None:
        """On the chief, at the end: print the steps beside the run, and write the record and the figure."""
        run_dir = Path(run_dir)
        events = _settled(run_dir)
        marks = [json.loads(line) for file in run_dir.glob("flow/*.jsonl") for line in file.read_text().splitlines()]
        table, drawn = self._find(sorted(marks, key=lambda one: one["start"]), events)
        in_chinese = os.environ.get("LANG", "").startswith("zh")
        for number, step in enumerate(self.steps, 1):
            print(f"{number}. {step.chinese if in_chinese else step.english}")
            shown = [f"{one.start:8.3f} s  {one.lane:10}  {one.text}" for one in table if one.step == number]
            print("\n".join(f"     {line}" for line in shown or ["this run shows nothing of it"]))
        record = {"steps": [step[:2] for step in self.steps], "seen": [one._asdict() for one in table]}
        (run_dir / "flow.json").write_text(json.dumps(record, indent=1, ensure_ascii=False))
        (run_dir / "flow.svg").write_text(flow_figure.draw([one._asdict() for one in drawn]))
        print(f"the figure is {run_dir / 'flow.svg'}")

    def _find(self, marks: list[dict[str, Any]], events: list[Any]) -> tuple[list[Seen], list[Seen]]:
        """What the table shows, and what the figure shows."""
        table, drawn = [], []
        middle = next((mark["start"] for mark in marks if mark["name"] == self._around), None)
        for number, step in enumerate(self.steps, 1):
            if isinstance(step.shown_by, Mark):
                found = [_seen_mark(number, mark) for mark in marks if mark["name"] == step.shown_by.name]
                for lane in sorted({one.lane for one in found}):
                    here = [one for one in found if one.lane == lane]
                    if middle is not None:
                        here.sort(key=lambda one: abs(one.start - middle))
                    table, drawn = [*table, here[0]], [*drawn, *here[: self._repeats]]
            else:
                matching = [event for event in events if _matches(event, step.shown_by)]
                later = [event for event in matching if middle is None or event.time_s >= middle]
                for event in later[-1:] if step.shown_by.last else later[:1]:
                    seen = _seen_event(number, event, step.shown_by)
                    table, drawn = [*table, seen], [*drawn, seen]
        zero = min((one.start for one in table + drawn), default=0.0)
        table, drawn = (
            [one._replace(start=one.start - zero, end=one.end - zero) for one in many] for many in (table, drawn)
        )
        return table, drawn


def _seen_mark(number: int, mark: dict[str, Any]) -> Seen:
    took = f"{mark['name']} {1000 * (mark['end'] - mark['start']):.2f} ms"
    text = ": ".join(filter(None, [took, mark["text"]]))
    return Seen(number, mark["lane"], mark["start"], mark["end"], mark["name"], text)


def _seen_event(number: int, event: Any, wanted: Event) -> Seen:
    """An event is written when what it reports has ended; some say how many seconds that took."""
    values = ", ".join(_value(event, field) for field in wanted.fields)
    end = event.time_s + number * 1e-6  # two steps may be shown by one event / 两个步骤可能由同一个事件体现
    start = end - (event.seconds if "seconds" in wanted.fields else 0.0)
    return Seen(number, "record", start, end, wanted.name, f"{wanted.name}({values})")


def _settled(run_dir: Path) -> list[Any]:
    """The run's events so far, once no more of them arrive."""
    known = list(mh.read_events(run_dir))
    for _ in range(20):
        time.sleep(SETTLED_S)
        before, known = known, list(mh.read_events(run_dir))
        if len(before) == len(known):
            break
    return known


def _matches(event: Any, wanted: Event) -> bool:
    return type(event).__name__ == wanted.name and all(
        getattr(event, name) == value for name, value in wanted.where.items()
    )


def _value(event: Any, field: str) -> str:
    name, _, entry = field.partition(".")
    value = getattr(event, name)
    if entry:
        return f"{entry} {1000 * value.get(entry, 0.0):.2f} ms"
    if isinstance(value, float):
        return f"{name}={value:.4g}"
    return f"{name}={Path(value).name if name == 'path' else value}"
