"""The process of a parameter server: where a worker would begin to train, it serves until the run ends.

Servers run the script from the top, as workers do, up to `Trainer(...)`; `serve` is called there with what the script
made. It returns if workers open an interval of a later training, so that the script continues to that one; calls of
earlier trainings return their recorded results. A server serves all trainings that its script has reached. This file
owns the socket and the clock; `parameter_server/server/server.py` handles the messages, or
`parameter_server/tables/row_server.py` where servers have embedding rows only.
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
from manyhands.control.security.rejected_peers import PeerGate
from manyhands.control.servers.spare_server import READY
from manyhands.control.session.session import RunFacts, Session
from manyhands.errors import ServerStateLost
from manyhands.events import ServerWentOn, Warned
from manyhands.parameter_server.engine.leased_engine import has_backups
from manyhands.parameter_server.engine.local_steps_engine import way_of
from manyhands.parameter_server.log.log_storage import Backups, FromBackup
from manyhands.parameter_server.log.write_ahead_log import WriteAheadLog, log_of, saved_step
from manyhands.parameter_server.loop.variable_file import write_variables
from manyhands.parameter_server.memory.versioned_memory import Attendance, StateTorn
from manyhands.parameter_server.protocol.messages import FromServer, FromWorker, Number, Open, OpenRows
from manyhands.parameter_server.protocol.variable_listing import ServedVariable
from manyhands.parameter_server.server.server import ParameterServerCore
from manyhands.parameter_server.tables.row_server import RowServer
from manyhands.strategies.choices import LocalSGD, ParameterServer
from manyhands.training.setup.user_model import Parts, foreign_state
from manyhands.training.worker.worker import Worker

__all__ = ["serve"]

TICK_S = 0.2
# So that updates do not wait for all queued frames of gradients.
TAKE_AT_ONCE = 50


_Maker = Callable[[int], "ParameterServerCore | RowServer"]
_makers: dict[int, _Maker] = {}
"""By training: a function that makes its server, given the server's number."""


def serve(worker: Worker, parts: Parts, scheduler: Callable[[Any], Any] | None) -> None:
    """Join the run and serve; exit the process with 0 when the run no longer needs it."""
    session, spec, choice = worker.agent_session, worker.resolved.spec, worker.strategy
    assert choice.on_servers
    worker.join_run(
        RunFacts(
            run_dir=spec.run.run_dir,
            overwrite=spec.run.overwrite,
            strategy=worker.strategy.name,
            precision=spec.train.precision,
            script=sys.argv[0],
            spare=choice.keeps_spare(session.identity.num_hosts),
            backup=has_backups(choice),
        )
    )
    _makers[worker.number] = _prepare(worker, session, parts, scheduler)
    try:
        if not session.identity.is_spare or _is_appointed(session):
            reached = _TrainingProgress(session.shared_memory)
            if reached.training > worker.number or not _ServerLoop(worker, session, reached).run():
                return
    except StateTorn as torn:
        raise _state_lost(torn, worker) from torn
    worker.close()
    raise SystemExit(0)


class _TrainingProgress:
    """Which training the workers have reached, for a server that is restarted on this host."""

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
        """The training whose interval was opened last: trainings may alternate. 0: none yet."""
        return int(self._words[1])

    @in_use.setter
    def in_use(self, number: int) -> None:
        self._words[1] = number


def _state_lost(torn: StateTorn, worker: Worker) -> ServerStateLost:
    """All workers and servers restart; they can only continue from a checkpoint."""
    saved = saved_step(worker.home) or 0
    return ServerStateLost(
        f"Server {torn.server} was lost in the middle of update {torn.version + 1}, and with it all updates after the "
        f"checkpoint of step {saved}: {torn.version - saved} updates, whose batches are computed again.",
        fix=['durability="upstream", to keep two copies of the optimizer state'],
    )


def _is_appointed(session: Session) -> bool:
    """A spare server waits here, fully prepared, until it is assigned the number of a server that it replaces."""
    session.report(0, READY)
    return session.await_appointment()


def _prepare(
    worker: Worker, session: Session, parts: Parts, scheduler: Callable[[Any], Any] | None
) -> Callable[[int], ParameterServerCore | RowServer]:
    """Prepare all that does not depend on the server's number; the returned function makes the server of a number."""
    spec, strategy, model = worker.resolved.spec, worker.strategy, parts.model
    assert isinstance(strategy, ParameterServer | LocalSGD)
    if not strategy.leases:
        return lambda number: RowServer(number, model, worker.shared_memory, seed=spec.run.seed)
    if spec.launch.memory_format == "channels_last":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    way = way_of(strategy) if strategy.takes_local_steps else None
    outer = way.make_outer if way is not None else None  # if not None, workers use the script's optimizer
    optimizer = parts.make_optimizer(model) if outer is None else outer(model.parameters())
    schedule = scheduler(optimizer) if scheduler is not None and outer is None else None
    return lambda number: ParameterServerCore(
        number,
        model,
        optimizer,
        schedule,
        worker.shared_memory,
        clip_norm=None if strategy.takes_local_steps else spec.train.clip_norm,
        place=(strategy.place if isinstance(strategy, ParameterServer) else None) or {},
        foreign=foreign_state(model, parts.sums),
        seed=spec.run.seed,
        log=_log(worker, session, strategy, number),
    )


def _log(worker: Worker, session: Session, strategy: ParameterServer | LocalSGD, number: int) -> WriteAheadLog | None:
    if worker.in_trial or not isinstance(strategy, ParameterServer) or not strategy.keeps_log:
        return None
    if strategy.durability == "wal":
        return log_of(worker.home, number)
    context: zmq.Context[Any] = zmq.Context()

    def connect(address: str) -> Port[FromBackup]:
        return open_port(context, zmq.DEALER, address, FromBackup, curve=session.as_client)

    def warn(text: str) -> None:
        worker.events.emit_own(Warned(text=f"server {number}: {text}"))

    backups = Backups(number, lambda: session.backups, connect, training=worker.number)
    return log_of(worker.home, number, backups, warn)


class _ServerLoop:
    """The event loop of a server process."""

    def __init__(self, worker: Worker, session: Session, reached: _TrainingProgress) -> None:
        self._worker, self._session, self._warn, identity = worker, session, worker.events.warn, session.identity
        self._reached = reached
        self._training = self._wanted = reached.in_use if reached.in_use in _makers else worker.number
        self._newest: Number = (0, 0, 0)
        """The interval that was opened last, of any training: an older one arrives too late."""
        self._server = _makers[self._training](identity.server)
        self._context: zmq.Context[Any] = zmq.Context()
        self._ports: list[Port[FromWorker]] = []
        if not _is_remote(at := session.server_endpoint(identity.server)):
            self._ports.append(open_port(self._context, zmq.ROUTER, at, FromWorker, bind=True))
        self._gate = self._listen()
        self._first = self._reach_first() if identity.server > 0 else None
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        session.on_change = self._wake_loop
        self._poller = zmq.Poller()
        gate_sockets = self._gate.sockets if self._gate is not None else []
        for one in (self._wake, *(port.socket for port in self._ports), *gate_sockets):
            self._poller.register(one, zmq.POLLIN)
        self._reported_at, self._reported_step, self._has_updated = 0.0, -1, False
        self._listed_interval: Number | tuple[()] | None = ()
        self._listed: list[ServedVariable] | None = None
        self._number = identity.server

    def run(self) -> bool:
        """False: workers have begun a training that this server's script has not reached."""
        attendance = Attendance(self._worker.shared_memory)
        attendance.mark(self._number, up=True)
        while self._session.stop_requested is None and not self._is_released() and self._wanted in _makers:
            if self._wanted != self._training:
                self._switch_training()
            ready = dict(self._poller.poll(0 if self._server.has_work else round(TICK_S * 1000)))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            if self._session.living is not None:
                self._server.set_living_workers(self._session.living)
            self._report_rejected_peers()
            for number, port in enumerate(self._ports):
                for sender, message in port.receive(TAKE_AT_ONCE):
                    if self._is_of_this_training(message):
                        self._send(self._server.take(bytes([number]) + sender, message))
            self._send(self._server.work())
            self._report_first_update()
            self._list_variables()
            self._report_progress()
        if isinstance(self._server, ParameterServerCore):
            self._server.close()
        continues = self._wanted not in _makers
        if not continues:
            attendance.mark(self._number, up=False)
        self._session.on_change = None
        if broken := self._server.refused["broken"] + sum(port.garbage for port in self._ports):
            self._warn(f"Server {self._number} received {broken} broken messages, and ignored them.")
        if self._gate is not None:
            self._gate.close()
        self._context.destroy(linger=0)
        os.close(self._wake)
        return not continues

    def _is_of_this_training(self, message: FromWorker) -> bool:
        """Whether this server should handle the message now.

        When workers open an interval of another training, this server switches to it. It does not answer, so the
        workers open the interval again there.
        """
        if isinstance(message, Open | OpenRows):
            if message.number < self._newest:
                return False
            self._newest = message.number
            self._wanted = self._reached.in_use = self._reached.training = message.training
        return self._wanted == self._training

    def _switch_training(self) -> None:
        if isinstance(self._server, ParameterServerCore):
            self._server.close()
        self._training = self._wanted
        self._server = _makers[self._training](self._number)

    def _listen(self) -> PeerGate | None:
        """Open the port for workers of other hosts, if there are any; peers without a key are rejected."""
        at, session = self._session.identity.listen, self._session
        if not at:
            return None
        gate = PeerGate(self._context, session.clients)
        self._ports.append(open_port(self._context, zmq.ROUTER, at, FromWorker, bind=True, curve=session.curve))
        gate.watch(self._ports[-1])
        return gate

    def _reach_first(self) -> Port[FromServer]:
        session, first = self._session, self._session.server_endpoint(0)
        identity, curve = f"server {session.identity.server}".encode(), session.as_client if _is_remote(first) else None
        return open_port(self._context, zmq.DEALER, first, FromServer, identity=identity, curve=curve)

    def _report_rejected_peers(self) -> None:
        for refused in self._gate.attend() if self._gate is not None else ():
            self._warn(f"Server {self._number} {refused}")

    def _is_released(self) -> bool:
        """Whether fewer servers are wanted, and the others have taken over this server's state."""
        return self._session.servers_wanted <= self._number and self._server.is_released()

    def _send(self, outbox: list[tuple[bytes, Any]]) -> None:
        """Send each message; the receiver's first byte is the number of its port."""
        for receiver, message in outbox:
            self._ports[receiver[0]].send(message, to=receiver[1:])

    def _report_first_update(self) -> None:
        if self._server.num_made and not self._has_updated:
            self._has_updated = True
            step = self._server.version
            self._session.publish(ServerWentOn(time_s=time.time(), server=self._number, pid=os.getpid(), step=step))

    def _list_variables(self) -> None:
        """Write which server stores which variables, for `mh status --variables`; updated with each interval."""
        if self._number or self._server.interval_number == self._listed_interval:
            return
        self._listed_interval, before = self._server.interval_number, self._listed
        self._listed = self._server.variables()
        try:
            if self._listed != before:
                write_variables(self._session.run_dir, self._listed)
        except OSError as error:  # a failed listing must not end the server
            text = f"The list of variables for `mh status --variables` could not be written: {error.strerror}"
            self._session.publish(Warned(time_s=time.time(), text=text))

    def _report_progress(self) -> None:
        """Report progress to the first server and to the agent, at every step and tick."""
        now, step = time.monotonic(), self._server.version
        if step == self._reported_step and now - self._reported_at < TICK_S:
            return
        self._reported_at, self._reported_step = now, step
        self._session.report(step, "serving")
        progress = self._server.standing()
        if self._first is not None and progress is not None:
            self._first.send(progress)

    def _wake_loop(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the counter is full: the loop will wake anyway
            os.eventfd_write(self._wake, 1)


def _is_remote(endpoint: str) -> bool:
    """Whether a server is on another host; those of this host are reached without a network."""
    return endpoint.startswith("tcp:")
