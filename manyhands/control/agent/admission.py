"""Hello and Welcome: which directory the run gets, and who has to wait until that is known.

The launch may name the directory, or the chief's Hello; else it is named after the run. Where it cannot be had, the
whole run is refused before any worker starts on it.
"""

from __future__ import annotations

from collections.abc import Callable

from manyhands.control.agent.host_workers import Crew
from manyhands.control.agent.run_record import Book
from manyhands.control.agent.worker_channel import Desk
from manyhands.control.messages.launch_request import LaunchRequest
from manyhands.control.messages.worker_messages import RunFacts
from manyhands.control.processes.worker_process import Worker
from manyhands.errors import ManyhandsError

__all__ = ["Reception"]


class Reception:
    def __init__(self, request: LaunchRequest, book: Book, *, owner: bool, say: Callable[[str], None]) -> None:
        self._request, self._book, self._owner, self._say = request, book, owner, say
        self._waiting: list[Worker] = []
        self.refusal: ManyhandsError | None = None

    def new_generation(self) -> None:
        self._waiting.clear()

    def greet(self, worker: Worker, facts: RunFacts, crew: Crew, desk: Desk, stop: str | None) -> None:
        # Where chiefs come and go, any worker's word will do: all run the same script.
        if self._owner and (worker.seat.rank == 0 or crew.elastic):
            overwrite = self._request.overwrite or facts.overwrite
            try:
                changed = self._book.adopt(self._request.run_dir or facts.run_dir, overwrite, crew.generation)
            except ManyhandsError as error:
                desk.refuse(worker, error)
                self.refusal = error
                return
            if changed:
                self._move_logs(crew)
        self._waiting.append(worker)
        self.welcome(desk, stop)

    def welcome(self, desk: Desk, stop: str | None) -> None:
        """Those who wait, if the directory is known by now."""
        if self._book.path is not None:
            for worker in self._waiting:
                desk.welcome(worker, self._book.run, self._book.path, stop)
            self._waiting.clear()

    def adopt_default(self, crew: Crew | None) -> None:
        """Nobody named a directory so far, and now it is needed."""
        if not self._owner or self._book.directory is not None:
            return
        try:
            self._book.adopt(None, False, crew.generation if crew else None)
        except ManyhandsError as error:
            self._say(str(error))
            return
        self._move_logs(crew)

    def visit(self, path: str, log_base: int, crew: Crew | None) -> None:
        """On other hosts: the first host's directory, or the one this host was told to use."""
        if not self._owner and self._book.visit(self._request.run_dir or path, log_base):
            self._move_logs(crew)

    def _move_logs(self, crew: Crew | None) -> None:
        if crew is not None and (folder := self._book.logs(crew.plan.attempt)) is not None:
            crew.write_logs_to(folder)
        self._book.discard_provisional()
