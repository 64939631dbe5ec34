import pytest
from msgspec.structs import replace

from manyhands.errors import SpecError
from manyhands.spec.load import own_identity
from manyhands.spec.worker_identity import IDENTITY_VARIABLES, WorkerIdentity, identity_environment, server_endpoint

IDENTITY = WorkerIdentity(
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


def test_a_worker_identity_survives_the_way_through_the_environment():
    assert own_identity(identity_environment(IDENTITY)) == IDENTITY
    assert set(identity_environment(IDENTITY)) == IDENTITY_VARIABLES


def test_a_server_has_its_own_identity_and_is_in_no_group():
    server = replace(
        IDENTITY, role="server", rank=-1, generation="", server=1, num_servers=2, servers="ipc:///tmp/mh-1/server-"
    )
    assert own_identity(identity_environment(server)) == server
    group = server.group()
    assert (group.rank, group.generation, group.world_size, group.slots) == (-1, "", 0, [])
    assert server.is_server
    assert not server.is_chief
    assert not IDENTITY.is_server


def test_a_worker_identity_says_where_each_server_is():
    assert server_endpoint("ipc:///tmp/mh-1/server-", 12) == "ipc:///tmp/mh-1/server-12"
    assert server_endpoint("tcp://10.0.0.1:4000,tcp://[::1]:4001", 1) == "tcp://[::1]:4001"


def test_without_an_agent_there_is_no_worker_identity():
    assert own_identity({"RANK": "0", "WORLD_SIZE": "1"}) is None


@pytest.mark.parametrize("broken", [{"RANK": "first"}, {"MANYHANDS_FLAGS": "{"}, {"MANYHANDS_FLAGS": "[]"}])
def test_a_broken_worker_identity_is_refused(broken):
    with pytest.raises(SpecError, match="identity are invalid"):
        own_identity({**identity_environment(IDENTITY), **broken})
