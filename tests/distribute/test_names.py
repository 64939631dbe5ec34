"""TensorFlow 2's names that need no run: contexts, tapes, resolvers, policies, and names without a meaning."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands import distribute as tf_distribute
from manyhands.distribute import train
from manyhands.distribute.train import notices
from manyhands.errors import ClusterError, EnvironmentProblem, NotHere, SpecError, UsageError

CLUSTER = {"worker": ["localhost:2222", "localhost:2223"], "ps": ["localhost:2224"]}


@pytest.fixture(autouse=True)
def _says_everything_again() -> Iterator[None]:
    notices.forget_notices()
    yield
    notices.forget_notices()


def test_outside_of_a_strategy_there_is_one_replica() -> None:
    strategy, context = tf_distribute.get_strategy(), tf_distribute.get_replica_context()
    assert strategy.num_replicas_in_sync == 1 and not tf_distribute.has_strategy()
    assert not tf_distribute.in_cross_replica_context()
    assert context is not None and context.replica_id_in_sync_group == 0
    assert context.all_reduce(tf_distribute.ReduceOp.SUM, {"a": 2.0}) == {"a": 2.0}
    assert strategy.run(lambda x: x + 1, args=(1,)) == 2
    assert strategy.reduce("MEAN", torch.tensor([1.0, 2.0]), axis=0) == 1.5


def test_a_tape_gives_the_gradients_of_torch_in_the_structure_of_the_sources() -> None:
    weight, unused, x = nn.Parameter(torch.tensor([2.0, 3.0])), nn.Parameter(torch.ones(1)), torch.tensor(4.0)
    with torch.no_grad(), tf_distribute.GradientTape(persistent=True) as tape:
        tape.watch(x)
        loss = (weight**2).sum() * x
    gradients = tape.gradient(loss, {"w": weight, "none": unused, "x": x})
    assert gradients["w"].tolist() == [16.0, 24.0] and gradients["none"] is None and float(gradients["x"]) == 13.0
    assert tape.gradient(loss, weight).tolist() == [16.0, 24.0] and weight.grad is None
    with tf_distribute.GradientTape() as once:
        loss = weight.sum()
    assert [one.tolist() for one in once.gradient(loss, [weight])] == [[1.0, 1.0]]
    with pytest.raises(UsageError, match="called twice"):
        once.gradient(loss, weight)
    with pytest.raises(SpecError, match="watch_accessed_variables"):
        tf_distribute.GradientTape(watch_accessed_variables=False)


def test_function_runs_eagerly_and_says_so_once() -> None:
    seen = []

    def first(x: int) -> int:
        seen.append(x)
        return x + 1

    with pytest.warns(UserWarning, match="runs eagerly") as said:
        first, second = (
            tf_distribute.function(first),
            tf_distribute.function(reduce_retracing=True)(lambda x: first(x) * 2),
        )

    assert second(1) == 4 and second(2) == 6 and seen == [1, 2] and len(said) == 1
    with pytest.raises(SpecError, match="'jit_compile'"):
        tf_distribute.function(jit_compile=True)


def test_losses_are_divided_by_the_global_batch_and_the_replicas() -> None:
    losses = torch.tensor([1.0, 2.0, 3.0])
    assert tf_distribute.compute_average_loss(losses, global_batch_size=12) == 0.5
    assert tf_distribute.compute_average_loss(losses, sample_weight=torch.tensor([1.0, 0.0, 1.0])) == pytest.approx(
        4 / 3
    )
    assert tf_distribute.scale_regularization_loss(torch.tensor(3.0)) == 3.0


def test_resolvers_give_a_strategy_the_cluster_and_this_process_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    simple = tf_distribute.cluster_resolver.SimpleClusterResolver(
        train.ClusterSpec(CLUSTER), task_type="worker", task_id=1
    )
    assert simple.master() == "localhost:2223" and simple.master("ps", 0) == "localhost:2224"
    strategy = tf_distribute.MultiWorkerMirroredStrategy(cluster_resolver=simple)
    assert isinstance(strategy.choice, mh.Mirrored) and strategy.choice.cluster.task.index == 1
    assert strategy.cluster_resolver is simple
    config = {"cluster": CLUSTER, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    found = tf_distribute.cluster_resolver.TFConfigClusterResolver()
    assert (found.task_type, found.task_id) == ("worker", 0) and found.cluster_spec() == train.ClusterSpec(CLUSTER)
    assert tf_distribute.experimental.ParameterServerStrategy(found).choice == mh.ParameterServer()
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": "localhost:2222"}, "task": {"type": "worker", "index": 0}}')
    with pytest.raises(ClusterError, match=r'"cluster"\."worker"'):
        tf_distribute.cluster_resolver.TFConfigClusterResolver()
    monkeypatch.delenv("TF_CONFIG")
    with pytest.raises(ClusterError, match="TF_CONFIG is not set"):
        tf_distribute.cluster_resolver.TFConfigClusterResolver()
    with pytest.raises(ClusterError, match="has only"):
        tf_distribute.cluster_resolver.SimpleClusterResolver(CLUSTER, task_type="chief", task_id=0)
    with pytest.raises(SpecError, match="cluster_resolver is 'worker'"):
        tf_distribute.MultiWorkerMirroredStrategy(cluster_resolver="worker")


def test_strategies_are_ours_under_tensorflows_names() -> None:
    named = tf_distribute.MirroredStrategy(devices=["/gpu:0", "/device:GPU:1", "/cpu:0"]).choice
    assert named.workers == 3 and named.devices[2] == "cpu" and not any("gpu" in one.lower() for one in named.devices)
    assert isinstance(tf_distribute.OneDeviceStrategy("cpu").choice, mh.Single)
    assert isinstance(tf_distribute.CentralStorageStrategy().choice, mh.CentralStorage)
    kinds = tf_distribute.experimental
    assert kinds.MultiWorkerMirroredStrategy is tf_distribute.MultiWorkerMirroredStrategy
    assert kinds.MirroredStrategy is tf_distribute.MirroredStrategy
    assert kinds.OneDeviceStrategy is tf_distribute.OneDeviceStrategy
    assert kinds.CentralStorageStrategy is tf_distribute.CentralStorageStrategy
    assert kinds.coordinator.ClusterCoordinator is tf_distribute.coordinator.ClusterCoordinator
    with pytest.raises(SpecError, match="no parameter servers"):
        tf_distribute.coordinator.ClusterCoordinator(tf_distribute.MirroredStrategy())


def test_a_policy_names_a_precision_and_casts_to_it() -> None:
    policy = tf_distribute.mixed_precision.Policy("mixed_bfloat16")
    assert (policy.precision, policy.compute_dtype, policy.variable_dtype) == ("bf16", "bfloat16", "float32")
    floats, whole = policy.cast_to_dtype([torch.ones(2), torch.tensor([1])])
    assert floats.dtype is torch.bfloat16 and whole.dtype is torch.int64
    with pytest.raises(SpecError, match="'mixed_float8'"):
        tf_distribute.mixed_precision.Policy("mixed_float8")


def test_a_policy_without_keras_says_what_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "keras", None)
    with pytest.raises(EnvironmentProblem, match="Keras is not imported") as refused:
        tf_distribute.mixed_precision.set_policy("mixed_float16")
    assert 'precision="fp16"' in str(refused.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the limit holds")
def test_a_worker_with_a_memory_limit_says_that_there_is_no_gpu() -> None:
    class Mine(train.PSWorker):
        pass

    from manyhands.dispatch.worker_session import WorkerConfig

    with pytest.warns(UserWarning, match="limit of 1024 MB"):
        worker = Mine(WorkerConfig(address="ipc:///nowhere"), memory_limit=1024)
    assert not worker.is_limited and worker.session is None and worker.config.address == "ipc:///nowhere"
    assert all(callable(getattr(worker, name)) for name in ("start", "stop", "run", "join"))


@pytest.mark.parametrize("name", sorted(tf_distribute.NOT_HERE))
def test_a_name_without_meaning_says_what_to_write(name: str) -> None:
    with pytest.raises(NotHere, match=f"{name} has no meaning here") as refused:
        getattr(tf_distribute, name)
    assert refused.value.fix


def test_every_name_is_there() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(getattr(tf_distribute, name) is not None for name in tf_distribute.__all__)
    assert tf_distribute.InputContext(num_input_pipelines=2, input_pipeline_id=1).get_per_replica_batch_size(8) == 4
    with pytest.raises(SpecError, match="does not divide"):
        tf_distribute.InputContext(num_input_pipelines=3).get_per_replica_batch_size(8)
