"""The tables of `python -m bench modes`: as plain text, and as Markdown in English and in Chinese."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bench.modes.networks import NETWORKS
from bench.results.machine import describe

__all__ = ["CHINESE", "ENGLISH", "markdown", "text"]


class Words(NamedTuple):
    headings: tuple[str, ...]
    link_headings: tuple[str, ...]
    link: str
    measured: str
    steps: str
    failed: str


ENGLISH = Words(
    headings=(
        *("mode", "rows/s", "MB per worker", "KB per step", "staleness"),
        *("loss, equal steps", "loss, equal time", "kill: s", "kill: steps lost"),
    ),
    link_headings=("mode", "rows/s", "KB per step on the link"),
    link="wide, on two hosts with a link of 100 Mbit/s",
    measured=(
        "Measured {date} on: {machine}. One thread per worker; speed: the median of {blocks} blocks of about "
        "{block_s:g} s; the rest: the median of {launches} run(s) of each."
    ),
    steps="{loss:.3f} ({steps} steps)",
    failed="failed: {why}",
)
CHINESE = Words(
    headings=(
        *("方式", "行/秒", "每 worker MB", "每步 KB", "陈旧度"),
        *("损失（同步数）", "损失（同时间）", "杀进程：秒", "杀进程：重做步数"),
    ),
    link_headings=("方式", "行/秒", "链路上每步 KB"),
    link="wide，两台主机，链路 100 Mbit/s",
    measured=(
        "测于 {date}，机器：{machine}。每个 worker 一个线程；速度是 {blocks} 个区段（各约 {block_s:g} 秒）的中位数；"
        "其余是各 {launches} 次训练的中位数。"
    ),
    steps="{loss:.3f}（{steps} 步）",
    failed="失败：{why}",
)


def text(found: Mapping[str, Any]) -> str:
    return "\n\n".join(f"{title}\n{_aligned(rows)}" for title, rows in _tables(found["results"], ENGLISH))


def markdown(found: Mapping[str, Any], words: Words = ENGLISH) -> str:
    size = {name: found[name] for name in ("date", "blocks", "block_s", "launches")}
    parts = [words.measured.format(machine=describe(found["machine"]), **size)]
    for title, rows in _tables(found["results"], words):
        head, *rest = rows
        lines = [head, ["---"] * len(head), *rest]
        parts.append("\n".join([f"**{title}**", "", *("| " + " | ".join(row) + " |" for row in lines)]))
    return "\n\n".join(parts)


def _tables(results: Mapping[str, Any], words: Words) -> list[tuple[str, list[Sequence[str]]]]:
    tables: list[tuple[str, list[Sequence[str]]]] = []
    for name, rows in results.items():
        if name != "link":
            cells = [words.headings, *(_cells(row, words) for row in rows)]
            tables.append((f"{name}: {NETWORKS[name][2]}", cells))
        elif isinstance(rows, dict):
            tables.append((f"{words.link}: {rows['skipped']}", [words.link_headings]))
        else:
            tables.append((words.link, [words.link_headings, *(_link_cells(row, words) for row in rows)]))
    return tables


def _cells(row: Mapping[str, Any], words: Words) -> Sequence[str]:
    name, speed = row["mode"].replace("_", " "), f"{row['rows_per_s']:,.0f}"
    if "failed" in row:
        return (name, speed, words.failed.format(why=row["failed"]), *["-"] * (len(words.headings) - 3))
    return (
        name,
        speed,
        f"{row['memory_bytes'] / 1e6:.0f}",
        f"{row['bytes_per_step'] / 1e3:,.1f}",
        f"{row['staleness']:.2f}" if row["staleness"] is not None else "-",
        f"{row['loss_after_steps']:.3f}",
        words.steps.format(loss=row["loss_after_time"], steps=row["steps_in_time"]),
        f"{row['kill_s']:.2f}",
        f"{row['kill_steps_lost']:g}",
    )


def _link_cells(row: Mapping[str, Any], words: Words) -> Sequence[str]:
    name = row["mode"].replace("_", " ")
    if "failed" in row:
        return (name, words.failed.format(why=row["failed"]), "-")
    return (name, f"{row['rows_per_s']:,.0f}", f"{row['link_bytes_per_step'] / 1e3:,.0f}")


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
