import pytest

from manyhands.errors import SpecError
from manyhands.spec.load import seat
from manyhands.spec.seat import SEAT_VARIABLES, Seat, seat_environment

SEAT = Seat(
    agent="ipc://agent",
    rank=3,
    world_size=4,
    local_rank=1,
    local_world_size=2,
    host=1,
    num_hosts=2,
    generation="2.7",
    incarnation=5,
    attempt=2,
    data_address="10.0.0.2",
    lifeline_fd=9,
    memory_fd=10,
    flags={"run.seed": 3, "train.exact": True},
)


def test_a_seat_survives_the_way_through_the_environment():
    assert seat(seat_environment(SEAT)) == SEAT
    assert set(seat_environment(SEAT)) == SEAT_VARIABLES


def test_without_an_agent_there_is_no_seat():
    assert seat({"RANK": "0", "WORLD_SIZE": "1"}) is None


@pytest.mark.parametrize("broken", [{"RANK": "first"}, {"MANYHANDS_FLAGS": "{"}, {"MANYHANDS_FLAGS": "[]"}])
def test_a_broken_seat_is_refused(broken):
    with pytest.raises(SpecError, match="seat are broken"):
        seat({**seat_environment(SEAT), **broken})
