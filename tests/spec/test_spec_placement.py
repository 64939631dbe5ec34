"""Three ways to say which host of how many this is, one answer."""

import pytest

from manyhands.errors import SpecError
from manyhands.spec.cluster import ClusterTask
from manyhands.spec.placement import Machine, from_cluster, from_cluster_with_servers, from_settings, from_torchrun
from manyhands.spec.run import LaunchSection

CPUS = Machine(4, 0)
GPUS = Machine(16, 8)
NONE_ASKED = LaunchSection()


def refused(flags) -> SpecError:
    with pytest.raises(SpecError) as caught:
        from_torchrun(flags, NONE_ASKED, CPUS)
    return caught.value


def test_without_a_number_there_is_a_worker_per_accelerator_else_one():
    assert from_settings(NONE_ASKED, CPUS).workers == 1
    assert from_settings(NONE_ASKED, GPUS).workers == 8
    assert from_settings(LaunchSection(workers=3), GPUS).workers == 3


def test_an_elastic_run_starts_with_its_most_workers_unless_a_number_is_given():
    elastic = LaunchSection(elastic=(2, 6))
    assert from_settings(elastic, CPUS).workers == 6
    assert from_settings(LaunchSection(elastic=(2, 6), workers=3), CPUS).workers == 3
    assert from_settings(LaunchSection(elastic=(2, 6), hosts_wanted=2, listen="10.0.0.1"), CPUS).workers == 3
    assert from_torchrun({"nnodes": "2"}, elastic, CPUS).workers == 3
    assert from_torchrun({"nproc_per_node": "2"}, elastic, CPUS).workers == 2
    with pytest.raises(SpecError, match="8 workers on each of 2 hosts are not within elastic, 2:6"):
        from_torchrun({"nnodes": "2", "nproc_per_node": "8"}, elastic, CPUS)


def test_several_hosts_need_an_address():
    with pytest.raises(SpecError, match="2 hosts are requested"):
        from_settings(LaunchSection(hosts_wanted=2), CPUS)
    assert from_settings(LaunchSection(hosts_wanted=2, listen="10.0.0.1"), CPUS).beyond_loopback


@pytest.mark.parametrize(
    ("text", "machine", "workers"),
    [("3", CPUS, 3), ("cpu", GPUS, 16), ("gpu", GPUS, 8), ("auto", GPUS, 8), ("auto", CPUS, 4)],
)
def test_nproc_per_node_counts_as_torchrun_counts(text, machine, workers):
    assert from_torchrun({"nproc_per_node": text}, NONE_ASKED, machine).workers == workers


def test_torchruns_flags_without_a_number_start_one_worker():
    assert from_torchrun({"nnodes": "1"}, NONE_ASKED, GPUS).workers == 1
    assert from_torchrun({"standalone": True, "nnodes": "4"}, NONE_ASKED, GPUS).num_hosts == 1


def test_a_range_of_nodes_is_an_elastic_run_of_their_workers():
    placed = from_torchrun({"nnodes": "2:4", "nproc_per_node": "3", "node_rank": "1"}, NONE_ASKED, CPUS)
    assert (placed.elastic, placed.num_hosts, placed.begins_with_fewer) == ((6, 12), 4, True)
    assert from_torchrun({"nnodes": "2:2"}, NONE_ASKED, CPUS).elastic is None
    asked = LaunchSection(elastic=(5, 12))
    assert from_torchrun({"nnodes": "2:4", "nproc_per_node": "3"}, asked, CPUS).elastic == (5, 12)


def test_static_nodes_connect_to_the_master_address():
    zero = from_torchrun({"nnodes": "2"}, NONE_ASKED, CPUS)
    assert (zero.host_rank, zero.coordinates, zero.master) == (0, True, ("127.0.0.1", 29500))
    assert not zero.beyond_loopback
    flags = {"nnodes": "2:2", "node_rank": "1", "master_addr": "10.0.0.1", "master_port": "3"}
    one = from_torchrun(flags, NONE_ASKED, CPUS)
    assert (one.host_rank, one.coordinates, one.master) == (1, False, ("10.0.0.1", 3))
    assert one.beyond_loopback


def test_with_c10d_the_node_that_the_endpoint_names_coordinates():
    here = Machine(4, 0, lambda host, port: (host, port) == ("a", 7))
    flags = {"nnodes": "2", "rdzv_backend": "c10d", "rdzv_endpoint": "a:7"}
    first = from_torchrun(flags, NONE_ASKED, here)
    assert (first.host_rank, first.coordinates, first.master) == (0, True, ("a", 7))
    other = from_torchrun({**flags, "rdzv_endpoint": "b"}, NONE_ASKED, here)
    assert (other.host_rank, other.coordinates, other.master) == (None, False, ("b", 29500))
    assert "no rendezvous endpoint" in refused({"nnodes": "2", "rdzv_backend": "c10d"}).what


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"nnodes": "3:1"}, "--nnodes is '1', but must be a number from 3"),
        ({"nnodes": "1:"}, "--nnodes is '', but must be a number from 1"),
        ({"nnodes": "many"}, "must be a number"),
        ({"nproc_per_node": "gpu"}, "no GPU"),
        ({"nproc_per_node": "0"}, "from 1 to 65536, or auto, cpu or gpu"),
        ({"nnodes": "2", "node_rank": "2"}, "from 0 to 1"),
        ({"nnodes": "2", "master_port": "x"}, "from 1 to 65535"),
        ({"nnodes": "2", "rdzv_endpoint": "a:b:c"}, "not host:port"),
    ],
)
def test_torchrun_flags_that_cannot_work_are_refused(flags, says):
    assert says in refused(flags).what


def test_ignored_flags_are_said():
    notes = from_torchrun({"redirects": "3", "nnodes": "1"}, NONE_ASKED, CPUS).notes
    assert len(notes) == 1
    assert notes[0].startswith("--redirects is ignored")


CLUSTER = {"chief": ["10.0.0.1:1"], "worker": ["10.0.0.2:1"], "ps": ["10.0.0.3:1"]}


def test_a_cluster_task_is_a_host_of_the_run():
    chief = from_cluster(ClusterTask(CLUSTER, "chief", 0), NONE_ASKED, GPUS)
    assert (chief.num_hosts, chief.host_rank, chief.coordinates, chief.workers) == (2, 0, True, 8)
    worker = from_cluster(ClusterTask(CLUSTER, "worker", 0), NONE_ASKED, CPUS)
    assert (worker.host_rank, worker.master, worker.listen) == (1, ("10.0.0.1", 1), "10.0.0.2")
    server = from_cluster(ClusterTask(CLUSTER, "ps", 0), NONE_ASKED, CPUS)
    assert (server.trains, server.master, server.announce) == (False, ("10.0.0.1", 1), None)
    assert not (chief.evaluates or worker.evaluates or server.evaluates)


@pytest.mark.parametrize("placed", [from_cluster, from_cluster_with_servers])
def test_the_evaluator_of_a_cluster_is_no_host_of_the_run(placed):
    evaluator = placed(ClusterTask(CLUSTER, "evaluator", 0), NONE_ASKED, CPUS)
    assert (evaluator.trains, evaluator.evaluates, evaluator.host_rank) == (False, True, None)


def test_a_lone_trainer_shows_waiting_tasks_that_the_run_lasts():
    lone = {"worker": ["127.0.0.1:1"], "ps": ["127.0.0.1:2"]}
    placed = from_cluster(ClusterTask(lone, "worker", 0), NONE_ASKED, CPUS)
    assert (placed.announce, placed.listen) == (("127.0.0.1", 1), None)


def test_a_run_on_one_host_does_not_listen_and_says_so():
    placed = from_settings(LaunchSection(listen="10.0.0.1"), CPUS)
    assert placed.listen is None
    assert "--listen is ignored" in placed.notes[0]
