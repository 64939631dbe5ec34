"""A worker that shares no memory with its servers, in one process: what gets across, and what does no harm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_args

import msgspec
import pytest
import torch
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manyhands.comm.transport import open_port
from manyhands.embedding.row_table import RowTable
from manyhands.errors import EnvironmentProblem, SpecError
from manyhands.native import why_not
from manyhands.parallel.gradients.gradient_norm import clip_factor, global_norm
from manyhands.parallel.model.step_buffers import ForeignState
from manyhands.parameter_server.memory.frames import FRAME_BYTES, checksum
from manyhands.parameter_server.memory.optimizer_states import load_states, merge_states
from manyhands.parameter_server.protocol.leases import Lease
from manyhands.parameter_server.protocol.messages import (
    Bring,
    Filled,
    FrameReply,
    FromWorker,
    GradientPart,
    Lookup,
    Of,
    Refused,
    RowGradients,
    Want,
    Watermark,
    WorkRequest,
)
from manyhands.parameter_server.server.interval_state import more_of
from manyhands.parameter_server.worker.remote_access import RemoteAccess
from manyhands.parameter_server.worker.row_lookup import ServedRows
from manyhands.parameter_server.worker.server_connection import ServerConnection
from tests.parameter_server.runs.remote_worker import ROWS, WORKER, Away, make_model

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"NOT SHOWN HERE: {why_not()}")

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused": lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9),
    "whole": lambda params: torch.optim.Rprop(params, lr=0.5),
}


@pytest.fixture
def away() -> Iterator[Callable[..., Away]]:
    made: list[Away] = []

    def make(kind: str = "fused", **how: Any) -> Away:
        made.append(Away(OPTIMIZERS[kind], **how))
        return made[-1]

    yield make
    while made:
        made.pop().close()


def gradients(step: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(step)
    return [torch.randn(param.shape, generator=random) for param in make_model().parameters()]


def alone(kind: str, steps: int, clip_norm: float | None = None) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    """What one process makes of the same gradients."""
    model = make_model()
    optimizer = OPTIMIZERS[kind](model.parameters())
    for step in range(1, steps + 1):
        grads = gradients(step)
        norm = global_norm(grads)
        for param, grad in zip(model.parameters(), grads, strict=True):
            param.grad = grad * clip_factor(norm, clip_norm) if clip_norm else grad
        optimizer.step()
    return [param.detach() for param in model.parameters()], optimizer


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_weights_are_those_of_one_process_though_messages_go_wrong_and_servers_die(away, kind, clip_norm):
    one = away(kind, clip_norm=clip_norm)
    one.wire.faults, one.wire.deaths = 0.3, 0.1
    one.open()
    for step in (1, 2, 3):
        one.step(step, gradients(step))
        assert one.remote.look(step)
    expected, optimizer = alone(kind, 3, clip_norm)
    assert_equal(one.served.weights(3).views, expected)
    opened, standings = one.opened, one.remote.standings(one.opened)
    assert msgspec.msgpack.encode(one.remote.last_interval()) == msgspec.msgpack.encode(opened)
    saved = [msgspec.msgpack.decode(value) for value in standings]
    counts, more = merge_states([(each["counts"], each["more"]) for each in saved])
    one.remote.fetch_states(opened, 3, [more_of(value, opened) for value in standings])
    places = range(len(one.served.params))
    load_states(one.served, one.optimizer, 3, counts, more, places, whole=kind == "whole")
    mine = [one.optimizer.state[param] for param in one.model.parameters()]
    for found, wanted in zip(mine, optimizer.state.values(), strict=True):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)
    assert one.wire.dead and {"broken", "repeated"} <= one.wire.refused.keys(), "nothing went wrong"


def test_buffers_come_with_the_weights_and_batch_statistics_with_the_gradient(away):
    one = away()
    one.open()
    one.step(1, gradients(1))
    assert one.remote.look(1)
    mean = one.served.buffers(1)[0]
    assert mean.shape == (500,)
    torch.testing.assert_close(mean, torch.full((500,), 1.0))


def test_an_interval_continues_with_the_states_that_servers_have(away):
    one = away()
    one.open()
    one.step(1, gradients(1))
    one.remote.look(1)
    for param, view in zip(one.model.parameters(), one.served.weights(1).views, strict=True):
        param.data = view
    saved = [msgspec.msgpack.decode(value) for value in one.remote.standings(one.opened)]
    counts, _ = merge_states([(each["counts"], each["more"]) for each in saved])
    one.open(2, 1, counts)
    one.step(2, gradients(2))
    assert one.remote.look(2)
    assert_equal(one.served.weights(2).views, alone("fused", 2)[0])


def test_rows_of_embeddings_begin_an_interval_and_come_back_for_a_checkpoint(away):
    one, ids = away(), torch.arange(20_000) * 2**40 - 7
    local = RowTable(one.rows_here()._specs["rows"])
    local.update(1, ids, torch.arange(20_000.0)[:, None].expand(-1, 64), factor=1.0)
    mine = one.rows_here()
    mine.restore("rows", local.snapshot())
    one.wire.faults, one.wire.deaths = 0.3, 0.02
    opened = one.open(rows=mine.install(0))
    assert min(opened.tables) > 4 * FRAME_BYTES
    one.open(2, 0, opened.counts)
    other = RemoteAccess(one.wire, WORKER, clips=False)
    fetched = ServedRows(make_model(), 0, one.wire, other.memory, shares=False).everything()
    assert fetched.snapshot("rows")["ids"].numel() == 0
    other.enter(one.model, one.opened, [[], []], ForeignState())
    other.fetch_rows(fetched)
    found, wanted = fetched.snapshot("rows"), local.snapshot()
    assert one.wire.dead
    for name in wanted.keys() - {"number", "updates"}:
        assert torch.equal(found[name], wanted[name]), name
    # They have seen one update more than the interval they begin has steps, and stay as old as they are.
    assert torch.equal(found["number"] - found["updates"], wanted["number"] - wanted["updates"])
    other.close()


def test_what_was_acknowledged_is_not_sent_again_to_the_next_server(away):
    one = away(num_servers=1)
    one.open()
    held = Lease(1, 0, 0, 2**32 + 1)
    pieces = frames_of(one, held)
    assert len(pieces) > 3
    for piece in pieces[:2]:
        one.wire.say(0, piece)
    one.wire.kill(0)
    (got,) = one.wire.say(0, pieces[0])
    assert got.received == 2 * FRAME_BYTES
    assert one.wire.servers[0].refused == {"repeated": 1}


def frames_of(one: Away, held: Lease) -> list[GradientPart]:
    """The frames of the gradient in the worker's row; the server has taken none of them yet."""
    stream = one.remote._streams[0].row(0)
    return [
        GradientPart(
            number=one.opened.number,
            worker=WORKER,
            held=held,
            offset=offset,
            crc=checksum(
                held.filling, offset, data := stream.read(offset, min(FRAME_BYTES, stream.num_bytes - offset))
            ),
            data=data,
        )
        for offset in range(0, stream.num_bytes, FRAME_BYTES)
    ]


def test_a_gradient_that_has_not_come_whole_does_not_count(away):
    one = away(num_servers=1)
    one.open()
    held = Lease(1, 0, 0, 2**32 + 1)
    pieces = frames_of(one, held)
    filled = Filled(number=one.opened.number, worker=WORKER, held=held, based_on=0, total=1.0, weight=10.0)
    for piece in pieces[:-1]:
        one.wire.say(0, piece)
    one.tell(filled)
    assert one.wire.servers[0].version == 0
    one.wire.say(0, pieces[-1])
    one.tell(filled)
    assert one.wire.servers[0].version == 1


def test_a_gradient_of_weights_that_are_still_to_come_does_not_count(away):
    one = away(num_servers=1)
    one.open()
    held = Lease(1, 0, 0, 2**32 + 1)
    for piece in frames_of(one, held):
        one.wire.say(0, piece)
    filled = Filled(number=one.opened.number, worker=WORKER, held=held, based_on=1, total=1.0, weight=10.0)
    one.tell(filled)
    assert one.wire.servers[0].version == 0
    one.tell(msgspec.structs.replace(filled, based_on=0))
    assert one.wire.servers[0].version == 1


def test_a_frame_of_a_lease_that_is_over_does_not_touch_the_row_of_the_next(away):
    one = away(num_servers=1)
    one.open()
    old = frames_of(one, Lease(1, 0, 0, 2**32 + 1))
    one.wire.say(0, old[0])
    with torch.no_grad():
        for view in one.served.row(0).views:
            view.fill_(2.0)
    for piece in frames_of(one, Lease(1, 0, 0, 2**32 + 2)):
        one.wire.say(0, piece)
    (got,) = one.wire.say(0, old[1])
    assert got.received == one.remote._streams[0].row(0).num_bytes, "no server wants the rest of it"
    held = Lease(1, 0, 0, 2**32 + 2)
    one.tell(Filled(number=one.opened.number, worker=WORKER, held=held, based_on=0, total=1.0, weight=10.0))
    expected = [param - 0.5 * 2.0 for param in make_model().parameters()]
    assert_equal(one.weights_of_servers(1), expected)
    assert one.wire.servers[0].refused == {"late": 1}


def test_a_version_that_was_overwritten_is_refused_and_the_newest_is_given(away):
    one = away(num_servers=1)
    one.open()
    for step in (1, 2):
        one.step(step, gradients(step))
    assert not one.remote.look(0)
    assert not one.remote.look(3), "nor is one that is still to come"
    assert one.remote.look(2)
    weights, versions = one.remote.pull()
    assert versions == [2]
    assert_equal(weights, alone("fused", 2)[0])


def test_weights_that_change_while_they_are_pulled_count_as_the_oldest_among_them(away):
    one = away(num_servers=1, ahead=None)
    one.open()
    carry, steps = one.wire.say, iter((1, 2, 3))

    def say(server: int, message: Any) -> list[Any]:
        answers = carry(server, message)
        if isinstance(message, Want) and message.offset == FRAME_BYTES:
            for step in steps:
                one.wire.say = carry  # type: ignore[method-assign]
                held = Lease(step, 0, step % ROWS, 2**32 + 9 + step)
                for piece in frames_of(one, held):
                    one.wire.say(0, piece)
                one.tell(Filled(number=one.opened.number, worker=WORKER, held=held, based_on=0, total=1.0, weight=10.0))
        return answers

    one.wire.say = say  # type: ignore[method-assign]
    _, versions = one.remote.pull()
    assert one.wire.servers[0].version == 3
    assert versions == [0], "some of it is of the version that was newest when the pull began"


ints = st.integers(-(2**63), 2**64 - 1) | st.integers(-3, 5)
numbers = st.just((1, 1, 1)) | st.tuples(ints, ints, ints)
helds = st.builds(Lease, ints, ints, ints, ints)
noise = st.one_of(
    st.builds(GradientPart, number=numbers, worker=st.just(WORKER) | ints, held=helds, offset=ints, crc=ints,
              data=st.binary(max_size=20)),
    st.builds(Bring, number=numbers, offset=ints, crc=ints, data=st.binary(max_size=20)),
    st.builds(Want, number=numbers, ticket=ints, of=st.sampled_from(get_args(Of)), version=ints | st.none(),
              offset=ints),
    st.builds(WorkRequest, number=numbers, worker=ints, book=ints, ticket=ints, met=ints, told=st.integers(-3, 9)),
    st.builds(Watermark, number=numbers, server=ints, low=ints, seen=st.lists(ints, max_size=3),
              has=st.lists(st.tuples(ints, ints), max_size=3)),
    st.builds(Lookup, number=numbers, ticket=ints, table=st.sampled_from(["rows", "others"]),
              ids=st.binary(max_size=32)),
    st.builds(RowGradients, number=numbers, filling=ints, order=ints, table=st.sampled_from(["rows", "others"]),
              ids=st.binary(max_size=16), gradients=st.binary(max_size=16) | st.just(bytes(256))),
    st.builds(Filled, number=numbers, worker=ints, held=helds, based_on=ints, total=st.floats(), weight=st.floats()),
)  # fmt: skip


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(noise, max_size=30))
def test_no_message_makes_a_server_fail_or_change_its_weights(busy, messages):
    before = busy.weights_of_servers(1)
    for message in messages:
        for number, server in enumerate(busy.wire.servers):
            answers = busy.wire.say(number, message) + [answer for _, answer in server.work()]
            for answer in answers:
                assert len(msgspec.msgpack.encode(answer)) < 2**20
                assert not isinstance(answer, FrameReply) or len(answer.data) <= FRAME_BYTES
    assert_equal(busy.weights_of_servers(1), before)
    assert [server.version for server in busy.wire.servers] == [1, 1]


MISFITS = {
    "no parameter ghost": {"trained": ["0.weight", "ghost"]},
    "other shapes": {"trained": ["2.weight", "0.weight"]},
    "is server 0, but the worker expects 0 servers": {"servers": 0},
    "with 1 groups": {"groups": []},
    "optimizer is SGD": {"groups": [{"lr": 0.1, "betas": [0.9, 0.99], "eps": 1e-8}]},
    "no sense": {"rows": -1},
    "numbers make no sense": {"servers": 2**40},
    "the interval's numbers": {"ahead": -1},
    "MB, and it has": {"rows": 2**20},
    "weights, states and gradients take": {"copies": 2**16, "brings": []},
    "MB of memory to share": {"tables": [2**50, 0]},
}


@pytest.mark.parametrize("why", MISFITS)
def test_an_interval_that_does_not_fit_is_refused_and_the_open_one_is_left_alone(busy, why):
    wrong = msgspec.structs.replace(busy.opened, number=(9, 9, 9), **MISFITS[why])
    before, known = busy.weights_of_servers(1), busy.wire.servers[0].refused["misfit"]
    (answer,) = busy.wire.say(0, wrong)
    assert isinstance(answer, Refused) and answer.number == (9, 9, 9) and why in answer.why
    assert busy.wire.servers[0].refused["misfit"] == known + 1
    assert busy.wire.servers[0].interval_number == busy.opened.number
    assert_equal(busy.weights_of_servers(1), before)


@pytest.mark.parametrize(
    ("why", "raises", "message"),
    [
        ("no parameter ghost", SpecError, r"Parameter server 0 cannot train .* it has no parameter ghost"),
        ("MB, and it has", EnvironmentProblem, r"Parameter server 0 has no room for this training: .* MB, and it has"),
    ],
)
def test_the_worker_that_opened_it_gets_the_error(busy, tmp_path, why, raises, message):
    at = f"ipc://{tmp_path}/server"
    wrong = msgspec.structs.replace(busy.opened, number=(9, 9, 9), servers=1, **MISFITS[why])
    with zmq.Context() as context, ThreadPoolExecutor(1) as threads:
        port = open_port(context, zmq.ROUTER, at, FromWorker, bind=True)
        link = ServerConnection(lambda server: at, b"worker")

        def answer_one() -> None:
            assert port.socket.poll(60_000)
            ((sender, message),) = port.receive(1)
            for receiver, answer in busy.wire.servers[0].take(sender, message):
                port.send(answer, to=receiver)

        answered = threads.submit(answer_one)
        with pytest.raises(raises, match=message):
            link.open(wrong)
        answered.result()
        link.close()
        port.close()


@pytest.fixture(scope="module")
def busy() -> Iterator[Away]:
    """Servers in the middle of an interval."""
    one = Away(OPTIMIZERS["fused"])
    one.open()
    one.step(1, gradients(1))
    yield one
    one.close()
