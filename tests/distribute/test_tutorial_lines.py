"""Lines as TensorFlow's tutorials have them: each acts, or is refused by name with what to write instead."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands import distribute as tf_distribute
from manyhands.distribute import cluster_resolver, experimental, train
from manyhands.distribute.train import notices
from manyhands.errors import CheckpointError, ClusterError, ManyhandsError, NotHere, SpecError

CLUSTER = {"worker": ["localhost:2222", "localhost:2223"], "ps": ["localhost:2224"]}


@pytest.fixture(autouse=True)
def _says_everything_again() -> Iterator[None]:
    notices.forget_notices()
    yield
    notices.forget_notices()


@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs are there")
def test_devices_by_tensorflows_names_are_torchs_or_the_cpu() -> None:
    with pytest.warns(UserWarning, match="/gpu:1 is not in this machine"):
        mirrored = tf_distribute.MirroredStrategy(devices=["/gpu:0", "GPU:1", "cpu"])
    assert (mirrored.choice.workers, list(mirrored.choice.devices)) == (3, ["cpu"] * 3)
    central = tf_distribute.CentralStorageStrategy(compute_devices=["/gpu:0", "/cpu:0"], parameter_device="/cpu:0")
    assert (central.choice.workers, list(central.choice.devices)) == (2, ["cpu"] * 2)
    assert list(tf_distribute.OneDeviceStrategy("/device:CPU:0").choice.devices) == ["cpu"]
    assert list(tf_distribute.OneDeviceStrategy("cuda:1").choice.devices) == ["cuda:1"]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: tf_distribute.MirroredStrategy(cross_device_ops=1), "'cross_device_ops'"),
        (lambda: tf_distribute.MultiWorkerMirroredStrategy(communication_options=1), "'communication_options'"),
        (lambda: tf_distribute.ParameterServerStrategy(variable_partitioner=1), "'variable_partitioner'"),
        (lambda: tf_distribute.CentralStorageStrategy(parameter_device="/gpu:0"), "parameter_device is '/gpu:0'"),
        (lambda: tf_distribute.MirroredStrategy(wrkers=2), "'wrkers'"),
        (lambda: train.Server({"worker": ["a:1"]}, protocol="grpc+verbs"), "'protocol'"),
        (lambda: train.ConfigProto(device_filters=["/job:ps"]), "'device_filters'"),
        (lambda: train.GPUOptions(visible_device_list="0"), "'visible_device_list'"),
        (lambda: setattr(train.ConfigProto(), "inter_op_parallelism_threads", 4), "'inter_op_parallelism_threads'"),
        (lambda: setattr(train.ConfigProto().gpu_options, "allow_growth", False), "never all of it"),
        (lambda: train.GradientDescentOptimizer(0.1).minimize(lambda m, b: 0, var_list=[]), "'var_list'"),
        (lambda: train.GradientDescentOptimizer(0.1).minimize(torch.tensor(1.0)), "no graph in which the model"),
        (lambda: train.Saver(sharded=True), "'sharded'"),
        (lambda: train.Saver(), "needs the model"),
        (lambda: train.StopAtStepHook(last_step=0), "last step is 0"),
        (lambda: train.StopAtStepHook(num_steps=0), "last step is 0"),
        (lambda: train.LoggingTensorHook([], every_n_iter=0), "0 is no interval"),
        (lambda: train.ClusterSpec([("worker", ["a:1"]), ("worker", ["a:2"])]), "given twice"),
    ],
)
def test_an_option_that_nothing_acts_on_is_refused_by_its_name(make: Any, said: str) -> None:
    with pytest.raises(ManyhandsError, match=said) as refused:
        make()
    assert isinstance(refused.value, SpecError | ClusterError) and refused.value.fix


def test_options_that_mean_what_is_done_anyway_are_accepted() -> None:
    assert tf_distribute.MirroredStrategy(cross_device_ops=None).cluster_resolver is None
    train.Server({"worker": ["a:1"]}, protocol="grpc", config=None, start=True)
    cluster_resolver.SimpleClusterResolver(CLUSTER, rpc_layer="grpc")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the limit holds")
def test_the_options_of_a_configuration_act_when_they_are_set_as_attributes() -> None:
    config = train.ConfigProto()
    config.gpu_options.allow_growth = True
    config.gpu_options.per_process_gpu_memory_fraction = 0.4
    config.log_device_placement = True
    with pytest.warns(UserWarning, match=r"limit to 0\.4 of its memory"):
        config.apply()


@pytest.mark.parametrize("name", ["MultiWorkerMirroredStragety", "MultiWorkMirroredStrategy"])
def test_a_misprint_of_the_longest_name_is_understood_and_said(name: str) -> None:
    with pytest.warns(UserWarning, match="is taken for MultiWorkerMirroredStrategy"):
        assert getattr(tf_distribute, name) is tf_distribute.MultiWorkerMirroredStrategy
    assert getattr(experimental, name) is tf_distribute.MultiWorkerMirroredStrategy
    with pytest.raises(AttributeError):
        _ = tf_distribute.MirrorStrategy  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("module", "name"),
    [(one, name) for one in (experimental, cluster_resolver, train) for name in sorted(one.NOT_HERE)],
)
def test_a_name_of_a_module_without_meaning_says_what_to_write(module: Any, name: str) -> None:
    with pytest.raises(NotHere, match=f"{name} has no meaning here") as refused:
        getattr(module, name)
    assert refused.value.fix and name not in module.__all__


def test_methods_without_meaning_say_what_to_write() -> None:
    strategy = tf_distribute.MirroredStrategy()
    for name in ("extended", "experimental_make_numpy_dataset"):
        with pytest.raises(NotHere, match=rf"strategy\.{name}"):
            getattr(strategy, name)
    with pytest.raises(AttributeError, match="no attribute 'wrong'"):
        _ = strategy.wrong
    with pytest.raises(NotHere, match="one step"):
        train.AdagradOptimizer(0.1).compute_gradients(None)
    with pytest.raises(NotHere, match="needs no server"):
        train.Server.create_local_server()
    context = tf_distribute.get_replica_context()
    with pytest.raises(NotHere, match="merge_call"):
        context.merge_call(lambda strategy: None)  # type: ignore[union-attr]


def test_without_a_strategy_a_loop_runs_on_one_replica() -> None:
    strategy = tf_distribute.get_strategy()
    with strategy.scope():
        batches = strategy.experimental_distribute_dataset([torch.ones(2)])
    made = strategy.distribute_datasets_from_function(lambda context: [context.get_per_replica_batch_size(4)])
    assert made == [4] and strategy.cluster_resolver is None
    per_replica = [strategy.experimental_run_v2(torch.sum, args=(one,)) for one in batches]
    assert strategy.gather(torch.ones(1), axis=0).tolist() == [1.0] and per_replica == [2.0]


def test_a_model_that_is_made_later_cannot_be_placed() -> None:
    optimizer = train.GradientDescentOptimizer(0.1)
    with (
        train.device(train.replica_device_setter(ps_tasks=2)),
        pytest.raises(SpecError, match="made later") as refused,
    ):
        optimizer.minimize(lambda model, batch: 0.0, model=lambda: nn.Linear(1, 1), data=(torch.ones(4, 1),))
    assert "inside of device()" in str(refused.value)


def test_parameters_on_several_workers_are_refused() -> None:
    model = nn.Sequential()
    for task in range(2):
        with train.device(f"/job:worker/task:{task}"):
            model.append(nn.Linear(1, 1))
    train_op = train.GradientDescentOptimizer(0.1).minimize(lambda m, b: 0.0, model=model, data=(torch.ones(4, 1),))
    with (
        train.MonitoredTrainingSession() as session,
        pytest.raises(SpecError, match=r"placed on the workers \[0, 1\]") as refused,
    ):
        session.run(train_op)
    assert "PipelineParallel" in str(refused.value)


def test_a_saver_takes_the_step_as_tutorials_give_it_and_refuses_parts_of_weights(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    saver = train.Saver(model)
    with pytest.raises(SpecError, match="which step"):
        saver.save(None, tmp_path / "a", global_step=train.get_or_create_global_step())
    assert saver.save(None, tmp_path / "a", global_step=torch.tensor(3)).endswith("a-3.safetensors")
    model.weight = nn.Parameter(model.weight[:, :1])
    with pytest.raises(CheckpointError, match="such as of weight") as refused:
        saver.save(None, tmp_path / "a")
    assert "mh ckpt export" in str(refused.value)


def test_checkpoints_of_several_hooks_and_of_the_session_are_one_choice(tmp_path: Path) -> None:
    forever = train.Saver(nn.Linear(1, 1), max_to_keep=None)
    hooks = [
        train.CheckpointSaverHook(tmp_path, save_steps=5, saver=forever),
        train.CheckpointSaverHook(tmp_path, save_secs=30),
    ]
    chosen = train.MonitoredTrainingSession(checkpoint_dir=tmp_path, hooks=hooks)._checkpoints
    assert (chosen.every_steps, chosen.every_s) == (5, 30) and chosen.keep_last > 10**6
    with pytest.raises(SpecError, match="every 5 and every 7 steps"):
        train.MonitoredTrainingSession(checkpoint_dir=tmp_path, hooks=hooks, save_checkpoint_steps=7)


def test_a_resolver_that_contradicts_tf_config_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": CLUSTER, "task": {"type": "worker", "index": 0}}))
    with pytest.raises(ClusterError, match="worker 0, and the resolver worker 1"):
        cluster_resolver.TFConfigClusterResolver(task_id=1)
    found = tf_distribute.MultiWorkerMirroredStrategy().cluster_resolver
    assert (found.task_type, found.task_id) == ("worker", 0) and "chief" not in found.cluster_spec().as_dict()


def test_a_cluster_without_a_task_is_for_a_coordinator_only() -> None:
    resolver = cluster_resolver.SimpleClusterResolver(CLUSTER)
    strategy = tf_distribute.ParameterServerStrategy(resolver)
    with pytest.raises(ClusterError, match="Which task"):
        _ = strategy.hands


def test_a_queue_ends_for_those_who_take_from_it_when_its_threads_are_stopped() -> None:
    items: queue.Queue[Any] = queue.Queue(8)
    coord = train.Coordinator()

    def fail() -> int:
        raise OSError("a torn file")

    train.QueueRunner(items, [fail]).create_threads(coord=coord, start=True)
    assert items.get(timeout=10) is train.QueueRunner.END
    with pytest.raises(OSError, match="torn"):
        coord.join()


def test_parts_of_a_batch_may_have_structures_and_no_rows() -> None:
    class Pair(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return {"double": x * 2}, x.sum(1)

    with pytest.warns(UserWarning, match="GPUs are not in this machine"):
        model = train.multi_gpu_model(Pair(), gpus=2)
    found, sums = model(torch.ones(5, 4))
    assert found["double"].tolist() == [[2.0] * 4] * 5 and sums.tolist() == [4.0] * 5
    assert model(torch.ones(0, 4))[1].shape == (0,)


def test_a_policy_casts_to_a_dtype_by_name_and_arrays_too() -> None:
    policy = tf_distribute.mixed_precision.experimental.Policy("mixed_float16")  # type: ignore[attr-defined]
    assert policy.cast_to_dtype(torch.ones(1, dtype=torch.float16), "float32").dtype is torch.float32
    assert policy.cast_to_dtype(torch.ones(2).numpy()).dtype is torch.float16
    with pytest.raises(SpecError, match="'float33' is no dtype"):
        policy.cast_to_dtype(torch.ones(1), "float33")


def test_the_parts_of_the_table_are_in_the_docs() -> None:
    """Each test file that docs/tensorflow.md names is there."""
    import re

    text = Path(__file__).parents[2].joinpath("docs/tensorflow.md").read_text()
    named = set(re.findall(r"test_\w+\.py", text))
    assert named and all((Path(__file__).parent / name).is_file() for name in named)
    assert mh.__name__ == "manyhands"
