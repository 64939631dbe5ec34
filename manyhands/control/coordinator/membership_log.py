"""The coordinator's log: the state of the run, on disk before any agent acts on it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from manyhands.control.line_log import LINE_BYTES, LineLog
from manyhands.control.membership.state import Membership

__all__ = ["MembershipLog"]

# Only the last state counts. Weeks of changes and commits would make the log long, and a restart slow.
MAX_BYTES = 4 * 2**20


class MembershipLog:
    """States, one per line; an incomplete last line is ignored. On disk before `append` returns."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._lines, self._max_bytes = LineLog(path), max_bytes

    def last(self) -> Membership | None:
        whole = [line for line in self._lines.read() if line is not None]
        return msgspec.json.decode(whole[-1], type=Membership) if whole else None

    def append(self, state: Membership) -> None:
        body, before = msgspec.json.encode(state), self._lines.num_bytes
        if before is None or before + len(body) + LINE_BYTES > self._max_bytes:
            self._lines.begin_file([body])
        else:
            self._lines.append(body)
