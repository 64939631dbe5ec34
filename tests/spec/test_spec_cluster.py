"""ClusterSpec and TF_CONFIG: TensorFlow's meaning, and an error for each field that is broken."""

import json

import pytest

from manyhands.errors import ClusterError
from manyhands.spec.addresses import parse_task_address
from manyhands.spec.cluster import ClusterSpec, ClusterTask, from_tf_config
from manyhands.spec.load import cluster_task

FULL = {"chief": ["c:1"], "worker": ["w0:1", "w1:1"], "ps": ["p:1"], "evaluator": ["e:1"]}


def tf_config(cluster=FULL, kind="worker", index=0, **more) -> str:
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}, **more})


def test_a_cluster_answers_as_tensorflows_does():
    cluster = ClusterSpec(FULL)
    assert cluster.jobs == ["chief", "evaluator", "ps", "worker"]
    assert cluster.num_tasks("worker") == 2
    assert cluster.task_indices("worker") == [0, 1]
    assert cluster.task_address("worker", 1) == "w1:1"
    assert cluster.job_tasks("worker") == ["w0:1", "w1:1"]
    assert cluster.as_dict() == dict(sorted(FULL.items()))


def test_a_sparse_job_keeps_its_indices():
    cluster = ClusterSpec({"worker": {1: "w1:1", 3: "w3:1"}})
    assert cluster.job_tasks("worker") == [None, "w1:1", None, "w3:1"]
    assert cluster.as_dict() == {"worker": {1: "w1:1", 3: "w3:1"}}
    assert ClusterSpec(cluster.as_dict()) == cluster
    with pytest.raises(ClusterError, match="no task 0; it has 1, 3"):
        cluster.task_address("worker", 0)


def test_clusters_are_equal_by_value():
    assert ClusterSpec(FULL) == ClusterSpec(ClusterSpec(FULL))
    assert hash(ClusterSpec(FULL)) == hash(ClusterSpec(dict(reversed(FULL.items()))))
    assert ClusterSpec({"worker": ["a:1"]}) != ClusterSpec({"worker": {1: "a:1"}})


def test_the_chief_is_the_chief_task_else_worker_zero():
    assert ClusterTask(FULL, "chief", 0).is_chief
    assert not ClusterTask(FULL, "worker", 0).is_chief
    without = {"worker": ["w0:7", "w1:8"], "ps": ["p:1"]}
    assert ClusterTask(without, "worker", 0).is_chief
    assert ClusterTask(without, "worker", 1).chief_address == ("w0", 7)


def test_trainers_are_numbered_chief_first_and_the_others_do_not_train():
    assert ClusterTask(FULL, "worker", 1).trainers == [("chief", 0), ("worker", 0), ("worker", 1)]
    assert ClusterTask(FULL, "worker", 1).host_rank == 2
    assert not ClusterTask(FULL, "ps", 0).trains
    assert not ClusterTask(FULL, "evaluator", 0).trains


def test_tf_config_is_read_as_tensorflow_reads_it():
    task = from_tf_config(tf_config(kind="ps", index=0, environment="cloud", rpc_layer="grpc"))
    assert (task.job, task.index, task.address) == ("ps", 0, ("p", 1))
    assert task.cluster == ClusterSpec(FULL)


def test_an_evaluator_may_be_outside_the_cluster():
    task = from_tf_config(tf_config({"chief": ["c:1"]}, "evaluator", 0))
    assert (task.trains, task.address) == (False, None)


@pytest.mark.parametrize("text", ["", "{}", "  "])
def test_an_empty_tf_config_is_none_at_all(text):
    assert cluster_task({"TF_CONFIG": text}) is None
    assert cluster_task({}) is None


BROKEN = {
    "not JSON": ("{cluster: 1}", "not JSON (line 1, column 2)"),
    "deep": ("[" * 100_000, "not JSON"),
    "huge": (" " * 2_000_000, "2000000 characters"),
    "a list": ("[1]", "TF_CONFIG is a list"),
    "no cluster": ('{"task": {"type": "worker", "index": 0}}', 'no "cluster"'),
    "cluster a list": (tf_config(["a:1"]), '"cluster" is a list'),
    "cluster empty": (tf_config({}), '"cluster" is empty'),
    "unknown job": (tf_config({"worker": ["a:1"], "wroker": ["b:1"]}), 'a job "wroker"'),
    "job not a list": (tf_config({"worker": "a:1"}), '"cluster"."worker" is text'),
    "job empty": (tf_config({"worker": []}), '"cluster"."worker" is an empty list'),
    "sparse index": (tf_config({"worker": {"x": "a:1"}}), 'has "x" for a task index'),
    "address a number": (tf_config({"worker": [1]}), '"cluster"."worker"[0] is 1'),
    "no port": (tf_config({"worker": ["a:1", "b"]}), '"cluster"."worker"[1] is "b", an address without a port'),
    "no host": (tf_config({"worker": [":1"]}), "no valid host name"),
    "a URL": (tf_config({"worker": ["grpc://a:1"]}), "not host:port"),
    "port zero": (tf_config({"worker": ["a:0"]}), "a number from 1 to 65535"),
    "port too large": (tf_config({"worker": ["a:65536"]}), "a number from 1 to 65535"),
    "port text": (tf_config({"worker": ["a:http"]}), 'not "http"'),
    "twice": (tf_config({"worker": ["a:1", "b:1"], "ps": ["a:1"]}), '"ps"[0] and "worker"[0] have the same address'),
    "two chiefs": (tf_config({"chief": ["a:1", "b:1"]}, "chief"), '"chief" has 2 addresses'),
    "no worker": (tf_config({"ps": ["a:1"]}, "ps"), "neither a chief nor a worker"),
    "no task": (json.dumps({"cluster": FULL}), 'no "task"'),
    "task a list": (json.dumps({"cluster": FULL, "task": []}), '"task" is a list'),
    "no type": (json.dumps({"cluster": FULL, "task": {"index": 0}}), '"task" has no "type"'),
    "no index": (json.dumps({"cluster": FULL, "task": {"type": "worker"}}), '"task" has no "index"'),
    "unknown type": (tf_config(kind="master"), '"task"."type" is "master"'),
    "type a list": (tf_config(kind=[]), '"task"."type" is []'),
    "type not there": (tf_config({"chief": ["a:1"]}), 'is "worker", but the cluster has only chief'),
    "index too large": (tf_config(index=2), 'job "worker" has 0, 1'),
    "index negative": (tf_config(index=-1), '"task"."index" is -1'),
    "index text": (tf_config(index="0"), "must be a whole number"),
    "index true": (tf_config(index=True), "must be a whole number"),
}


@pytest.mark.parametrize(("text", "says"), BROKEN.values(), ids=BROKEN)
def test_a_broken_field_of_tf_config_is_named_with_a_right_example(text, says):
    with pytest.raises(ClusterError) as caught:
        from_tf_config(text)
    assert says in caught.value.what
    assert caught.value.where == "TF_CONFIG"
    assert caught.value.fix
    assert len(caught.value.what) < 400


def test_addresses_of_both_kinds_are_read():
    assert parse_task_address("10.0.0.1:2222", "x") == ("10.0.0.1", 2222)
    assert parse_task_address("[fe80::1%eth0]:1", "x") == ("fe80::1%eth0", 1)
    for broken in ("fe80::1:1", "a b:1", "-a:1", "a:\uff11", "a:+1", "a\n:1"):
        with pytest.raises(ClusterError):
            parse_task_address(broken, "x")
