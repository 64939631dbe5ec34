"""What a parameter server's process does where a worker would begin to train: it serves until the run ends.

Servers run the script from the top, as workers do, up to `Trainer(...)`; `serve` is called there with what the script
made. It returns if workers open a course of a later training, so that the script goes on to that one; calls before it
are over, and return what is on record. A server serves all trainings that its script has come to. This file owns the
socket and the clock; what a message means is `parameter_server/server/server.py`'s, or
`parameter_server/tables/row_server.py`'s where servers have nothing but rows.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import zmq

from manyhands.comm.host_memory import Segment
from manyhands.comm.transport import Port, open_port
from manyhands.control.security.rejected_peers import DoorKeeper
from manyhands.control.servers.spare_server import READY
from manyhands.control.session.session import RunFacts, Session
from manyhands.errors import ServerStateLost
from manyhands.events import ServerWentOn, Warned
from manyhands.parameter_server.engine.local_steps_engine import way_of
from manyhands.parameter_server.engine.served import has_backups
from manyhands.parameter_server.log.log_storage import Backups, FromBackup
from manyhands.parameter_server.log.write_ahead_log import ServedLog, log_of, saved_step
from manyhands.parameter_server.loop.variable_file import write_variables
from manyhands.parameter_server.memory.versioned_memory import Attendance, StateTorn
from manyhands.parameter_server.protocol.messages import FromServer, FromWorker, Number, Open, OpenRows
from manyhands.parameter_server.protocol.variable_listing import ServedVariable
from manyhands.parameter_server.server.server import PartServer
from manyhands.parameter_server.tables.row_server import RowServer
from manyhands.strategies.choices import LocalSGD, ParameterServer
from manyhands.training.setup.user_model import Parts, foreign_state
from manyhands.training.worker.worker import Worker

__all__ = ["serve"]

TICK_S = 0.2
# So that updates do not wait for all the frames of gradients that are under way.
TAKE_AT_ONCE = 50


_Maker = Callable[[int], "PartServer | RowServer"]
_makers: dict[int, _Maker] = {}
"""By training: what makes a server of it, of this process's number."""


def serve(worker: Worker, parts: Parts, scheduler: Callable[[Any], Any] | None) -> None:
    """Join the run, and end the process with 0 when the run has no more use for it."""
    session, spec, choice = worker.session, worker.resolved.spec, worker.strategy
    assert isinstance(session, Session) and choice.on_servers
    worker.settle_in(
        RunFacts(
            run_dir=spec.run.run_dir,
            overwrite=spec.run.overwrite,
            strategy=worker.strategy.name,
            precision=spec.train.precision,
            script=sys.argv[0],
            spare=choice.keeps_spare(session.seat.num_hosts),
            backup=has_backups(choice),
        )
    )
    _makers[worker.number] = _prepare(worker, session, parts, scheduler)
    try:
        if not session.seat.is_spare or _is_appointed(session):
            reached = _Reached(session.shared_memory)
            if reached.training > worker.number or not _Serving(worker, session, reached).run():
                return
    except StateTorn as torn:
        raise _state_lost(torn, worker) from torn
    worker.close()
    raise SystemExit(0)


class _Reached:
    """How far the workers have come among the trainings, for a server that is started anew on this host."""

    def __init__(self, memory: Callable[[str, int], Segment]) -> None:
        self._words = memory("training of servers", mmap.PAGESIZE).words()

    @property
    def training(self) -> int:
        return int(self._words[0])

    @training.setter
    def training(self, number: int) -> None:
        self._words[0] = max(number, self.training)

    @property
    def in_use(self) -> int:
        """The one whose course was opened last: trainings may take turns. 0: none yet."""
        return int(self._words[1])

    @in_use.setter
    def in_use(self, number: int) -> None:
        self._words[1] = number


def _state_lost(torn: StateTorn, worker: Worker) -> ServerStateLost:
    """All workers and servers begin again; nobody but those who begin with a checkpoint has anything to go on with."""
    saved = saved_step(worker.home) or 0
    return ServerStateLost(
        f"Server {torn.server} was lost in the middle of update {torn.version + 1}, and with it what came after the "
        f"checkpoint of step {saved}: {torn.version - saved} updates, whose batches are computed again.",
        fix=['durability="upstream", to keep two copies of the states'],
    )


def _is_appointed(session: Session) -> bool:
    """A spare waits here, with all done that can be, until another server's number is its own."""
    session.report(0, READY)
    return session.await_appointment()


def _prepare(
    worker: Worker, session: Session, parts: Parts, scheduler: Callable[[Any], Any] | None
) -> Callable[[int], PartServer | RowServer]:
    """Make what does not depend on a server's number; the rest, of what the strategy has on servers, comes with it."""
    spec, strategy, model = worker.resolved.spec, worker.strategy, parts.model
    assert isinstance(strategy, ParameterServer | LocalSGD)
    if not strategy.leases:
        return lambda number: RowServer(number, model, worker.shared_memory, seed=spec.run.seed)
    if spec.launch.memory_format == "channels_last":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    way = way_of(strategy) if strategy.takes_local_steps else None
    outer = way.make_outer if way is not None else None  # the script's optimizer is each worker's own then
    optimizer = parts.make_optimizer(model) if outer is None else outer(model.parameters())
    schedule = scheduler(optimizer) if scheduler is not None and outer is None else None
    return lambda number: PartServer(
        number,
        model,
        optimizer,
        schedule,
        worker.shared_memory,
        clip_norm=None if strategy.takes_local_steps else spec.train.clip_norm,
        place=(strategy.place if isinstance(strategy, ParameterServer) else None) or {},
        foreign=foreign_state(model),
        seed=spec.run.seed,
        log=_log(worker, session, strategy, number),
    )


def _log(worker: Worker, session: Session, strategy: ParameterServer | LocalSGD, number: int) -> ServedLog | None:
    if worker.in_trial or not isinstance(strategy, ParameterServer) or not strategy.keeps_log:
        return None
    if strategy.durability == "wal":
        return log_of(worker.home, number)
    context: zmq.Context[Any] = zmq.Context()

    def connect(address: str) -> Port[FromBackup]:
        return open_port(context, zmq.DEALER, address, FromBackup, curve=session.as_client)

    def tell(text: str) -> None:
        worker.tell(Warned(text=f"server {number}: {text}"))

    backups = Backups(number, lambda: session.backups, connect, training=worker.number)
    return log_of(worker.home, number, backups, tell)


class _Serving:
    """The loop around a server."""

    def __init__(self, worker: Worker, session: Session, reached: _Reached) -> None:
        self._worker, self._session, self._tell, seat = worker, session, worker.warn, session.seat
        self._reached = reached
        self._training = self._wanted = reached.in_use if reached.in_use in _makers else worker.number
        self._newest: Number = (0, 0, 0)
        """The course that was opened last, of any training: an older one arrives too late."""
        self._server = _makers[self._training](seat.server)
        self._context: zmq.Context[Any] = zmq.Context()
        self._ports: list[Port[FromWorker]] = []
        if not _is_elsewhere(at := session.server_endpoint(seat.server)):
            self._ports.append(open_port(self._context, zmq.ROUTER, at, FromWorker, bind=True))
        self._door = self._listen()
        self._first = self._reach_first() if seat.server > 0 else None
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        session.on_change = self._nudge
        self._poller = zmq.Poller()
        at_the_door = self._door.sockets if self._door is not None else []
        for one in (self._wake, *(port.socket for port in self._ports), *at_the_door):
            self._poller.register(one, zmq.POLLIN)
        self._told_at, self._told_step, self._went_on = 0.0, -1, False
        self._listed_course: Number | tuple[()] | None = ()
        self._listed: list[ServedVariable] | None = None
        self._number = seat.server

    def run(self) -> bool:
        """False: workers have gone on to a training that this server's script has not come to."""
        attendance = Attendance(self._worker.shared_memory)
        attendance.mark(self._number, up=True)
        while self._session.stop_requested is None and not self._is_released() and self._wanted in _makers:
            if self._wanted != self._training:
                self._change()
            ready = dict(self._poller.poll(0 if self._server.has_work else round(TICK_S * 1000)))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if self._session.living is not None:
                self._server.hear_living(self._session.living)
            self._mind_the_door()
            for number, port in enumerate(self._ports):
                for sender, message in port.receive(TAKE_AT_ONCE):
                    if self._is_of_this_training(message):
                        self._send(self._server.take(bytes([number]) + sender, message))
            self._send(self._server.work())
            self._tell_first_update()
            self._tell_variables()
            self._tell_standing()
        if isinstance(self._server, PartServer):
            self._server.close()
        goes_on = self._wanted not in _makers
        if not goes_on:
            attendance.mark(self._number, up=False)
        self._session.on_change = None
        if broken := self._server.refused["broken"] + sum(port.garbage for port in self._ports):
            self._tell(f"Server {self._number} was sent {broken} broken messages, and has ignored them.")
        if self._door is not None:
            self._door.close()
        self._context.destroy(linger=0)
        os.close(self._wake)
        return not goes_on

    def _is_of_this_training(self, message: FromWorker) -> bool:
        """A course of another one has this server go on with that, and is opened again there: it was not answered."""
        if isinstance(message, Open | OpenRows):
            if message.number < self._newest:
                return False
            self._newest = message.number
            self._wanted = self._reached.in_use = self._reached.training = message.training
        return self._wanted == self._training

    def _change(self) -> None:
        if isinstance(self._server, PartServer):
            self._server.close()
        self._training = self._wanted
        self._server = _makers[self._training](self._number)

    def _listen(self) -> DoorKeeper | None:
        """Where workers of other hosts come, if there are any; whoever has no key does not get in."""
        at, session = self._session.seat.listen, self._session
        if not at:
            return None
        door = DoorKeeper(self._context, session.clients)
        self._ports.append(open_port(self._context, zmq.ROUTER, at, FromWorker, bind=True, curve=session.curve))
        door.watch(self._ports[-1])
        return door

    def _reach_first(self) -> Port[FromServer]:
        session, first = self._session, self._session.server_endpoint(0)
        identity, curve = f"server {session.seat.server}".encode(), session.as_client if _is_elsewhere(first) else None
        return open_port(self._context, zmq.DEALER, first, FromServer, identity=identity, curve=curve)

    def _mind_the_door(self) -> None:
        for refused in self._door.attend() if self._door is not None else ():
            self._tell(f"Server {self._number} {refused}")

    def _is_released(self) -> bool:
        """Fewer servers are wanted, and the others have what this one had."""
        return self._session.servers_wanted <= self._number and self._server.is_released()

    def _send(self, outbox: list[tuple[bytes, Any]]) -> None:
        """To whom, and through which port it had come, the receiver says."""
        for receiver, message in outbox:
            self._ports[receiver[0]].send(message, to=receiver[1:])

    def _tell_first_update(self) -> None:
        if self._server.num_made and not self._went_on:
            self._went_on = True
            step = self._server.version
            self._session.publish(ServerWentOn(time_s=time.time(), server=self._number, pid=os.getpid(), step=step))

    def _tell_variables(self) -> None:
        """Who keeps what, for whoever asks; at first nothing, and then what courses make of it."""
        if self._number or self._server.course_number == self._listed_course:
            return
        self._listed_course, before = self._server.course_number, self._listed
        self._listed = self._server.variables()
        try:
            if self._listed != before:
                write_variables(self._session.run_dir, self._listed)
        except OSError as error:  # a listing is worth no server
            text = f"What servers keep could not be written down for `mh status --variables`: {error.strerror}"
            self._session.publish(Warned(time_s=time.time(), text=text))

    def _tell_standing(self) -> None:
        """To the first server, at every step and tick; to the agent, that this one gets somewhere."""
        now, step = time.monotonic(), self._server.version
        if step == self._told_step and now - self._told_at < TICK_S:
            return
        self._told_at, self._told_step = now, step
        self._session.report(step, "serving")
        standing = self._server.standing()
        if self._first is not None and standing is not None:
            self._first.send(standing)

    def _nudge(self) -> None:
        with contextlib.suppress(BlockingIOError):  # The counter is full: the loop will wake anyway.
            os.eventfd_write(self._wake, 1)


def _is_elsewhere(endpoint: str) -> bool:
    """Servers of one host are reached without a network."""
    return endpoint.startswith("tcp:")
