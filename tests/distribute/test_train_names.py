"""TensorFlow 1's names that need no run: clusters, threads, devices, bars, files."""

from __future__ import annotations

import queue
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.distribute import train
from manyhands.distribute.train import notices, placement
from manyhands.errors import CheckpointMismatch, ClusterError, EnvironmentProblem, NotHere, SpecError, UsageError


@pytest.fixture(autouse=True)
def _says_everything_again() -> Iterator[None]:
    notices.forget_notices()
    yield
    notices.forget_notices()
    placement._missing.clear()


CLUSTER = {"worker": ["localhost:2222", "localhost:2223"], "ps": ["localhost:2224"]}


def test_a_cluster_is_a_dict_or_pairs_and_its_task_has_an_address() -> None:
    cluster = train.ClusterSpec(CLUSTER)
    assert train.ClusterSpec(list(CLUSTER.items())) == cluster == mh.ClusterSpec(CLUSTER)
    server = train.Server(cluster, job_name="worker", task_index=1)
    assert server.target == "localhost:2223" and server.target.server is server
    assert server.ours.task.host_rank == 1
    assert train.Server({"master": ["localhost:1"], "worker": ["localhost:2"]}, "master").ours.task.is_chief


def test_the_only_job_of_a_cluster_may_have_any_name() -> None:
    server = train.Server(train.ClusterSpec({"local": ["localhost:2222", "localhost:2223"]}), task_index=1)
    assert server.ours.task.trains and server.target == "localhost:2223"
    local = server.cluster_spec
    assert (
        local.jobs == ["local"] and local.num_tasks("local") == 2 and local.task_address("local", 1) == "localhost:2223"
    )
    assert local.job_tasks("local") == local.as_dict()["local"] == ["localhost:2222", "localhost:2223"]
    assert local == mh.ClusterSpec({"worker": ["localhost:2222", "localhost:2223"]}) == train.ClusterSpec(local)
    several = train.ClusterSpec({"trainer": ["localhost:1"], "worker": ["localhost:2"]})
    assert several.job_tasks("trainer") == ["localhost:1"] and several.jobs == ["trainer", "worker"]
    with pytest.raises(ClusterError, match="'trainer' is not"):
        train.Server(several, job_name="worker")
    with pytest.raises(ClusterError, match='no job "reader"; it has trainer, worker'):
        several.job_tasks("reader")
    with pytest.raises(ClusterError, match="list of pairs"):
        train.ClusterSpec(["localhost:1"])  # type: ignore[list-item]


def test_a_ps_task_that_only_waits_is_told_what_it_does_here() -> None:
    with pytest.raises(NotHere, match="applies the optimizer") as refused:
        train.Server(CLUSTER, job_name="ps", task_index=0).join()
    assert "leave out" in str(refused.value)


def test_a_coordinator_ends_threads_and_raises_their_error() -> None:
    coord, rounds = train.Coordinator(), []

    def work(number: int) -> None:
        with coord.stop_on_exception():
            while not coord.should_stop():
                rounds.append(number)
                if len(rounds) > 20:
                    raise ValueError("enough")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    with pytest.raises(ValueError, match="enough"):
        coord.join(threads, stop_grace_period_secs=5)
    assert len(rounds) > 20 and not any(thread.is_alive() for thread in threads)
    coord.clear_stop()
    assert not coord.should_stop()


def test_a_thread_that_ignores_the_request_is_named() -> None:
    coord, release = train.Coordinator(), threading.Event()
    thread = threading.Thread(target=release.wait, name="deaf")
    thread.start()
    coord.request_stop()
    try:
        with pytest.raises(UsageError, match="deaf"):
            coord.join([thread], stop_grace_period_secs=0.05)
    finally:
        release.set()
        thread.join()


def test_queue_runners_fill_a_queue_until_their_functions_have_no_more() -> None:
    filled: queue.Queue[object] = queue.Queue(maxsize=4)
    numbers, lock = iter(range(30)), threading.Lock()

    def read() -> int:
        with lock:
            return next(numbers)

    runner, coord = train.QueueRunner(filled, [read] * 3), train.Coordinator()
    train.add_queue_runner(runner)
    threads = train.start_queue_runners(coord=coord)
    found = list(iter(filled.get, train.QueueRunner.END))
    coord.request_stop()
    coord.join(threads)
    assert sorted(found) == list(range(30)) and runner.put == 30  # type: ignore[type-var]
    with pytest.raises(SpecError, match="must be functions"):
        train.QueueRunner(filled, ["an operation"])  # type: ignore[list-item]


def test_a_parameter_made_in_a_device_context_is_placed_there() -> None:
    with train.device("/job:ps/task:1"):
        first = nn.Linear(2, 2)
        with train.device("/job:ps/task:0"):
            second = nn.Linear(2, 2)
    model = nn.Sequential(first, second, nn.Linear(2, 2))
    assert {name: (one.job, one.task) for name, one in placement.places_of(model).items()} == {
        "0.weight": ("ps", 1),
        "0.bias": ("ps", 1),
        "1.weight": ("ps", 0),
        "1.bias": ("ps", 0),
    }


def test_replica_device_setter_deals_parameters_to_servers_in_turn() -> None:
    setter = train.replica_device_setter(cluster={"worker": ["a:1"], "ps": ["b:1", "c:1"]})
    with train.device(setter):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    assert [one.task for one in placement.places_of(model).values()] == [0, 1, 0]
    assert train.replica_device_setter(cluster={"worker": ["a:1"]}) is None
    with pytest.raises(SpecError, match="ps_strategy"):
        train.replica_device_setter(ps_tasks=2, ps_strategy=lambda: 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the devices are there")
def test_a_gpu_that_is_not_there_is_the_cpu_and_said_once() -> None:

    def made() -> nn.Linear:
        with train.device("/gpu:0"):
            return nn.Linear(2, 2)

    with pytest.warns(UserWarning, match="/gpu:0 is not in this machine") as said:
        layers = [made(), made()]
    assert len(said) == 1 and all(layer.weight.device.type == "cpu" for layer in layers)
    train.ConfigProto(allow_soft_placement=True).apply()
    with pytest.raises(EnvironmentProblem, match="soft placement is not allowed"):
        train.ConfigProto(allow_soft_placement=False).apply()


def test_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(SpecError, match="'inter_op_parallelism_threads'"):
        train.ConfigProto(inter_op_parallelism_threads=2)
    with pytest.raises(SpecError, match="'use_locking'"):
        train.GradientDescentOptimizer(0.1, use_locking=True)
    with pytest.raises(SpecError, match="'scaffold'"):
        train.MonitoredTrainingSession(scaffold=None)
    with pytest.raises(SpecError, match="no device"), train.device("/tpu:0"):
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="the limit holds")
def test_a_memory_limit_without_a_gpu_is_said_once() -> None:
    with pytest.warns(UserWarning, match="limit of 512 MB has no effect") as said:
        assert not train.limit_gpu_memory(512) and not train.limit_gpu_memory(512)
    assert len(said) == 1
    with pytest.warns(UserWarning, match=r"0.5 of its memory"):
        assert not train.GPUOptions(per_process_gpu_memory_fraction=0.5).apply()


@pytest.mark.skipif(torch.cuda.is_available(), reason="uses the GPUs")
def test_multi_gpu_model_computes_the_batch_in_parts_with_the_models_weights() -> None:
    model, seen = nn.Linear(3, 2), []
    model.register_forward_hook(lambda module, inputs, output: seen.append(len(inputs[0])))
    with pytest.warns(UserWarning, match="2 GPUs are not in this machine"):
        parallel = train.multi_gpu_model(model, gpus=2)
    x = torch.randn(7, 3)
    outputs = parallel(x)
    assert seen == [4, 3]
    torch.testing.assert_close(outputs, model(x))
    outputs.sum().backward()
    assert model.weight.grad is not None


def test_a_progress_bar_shows_steps_and_means(capsys: pytest.CaptureFixture[str]) -> None:
    bar = train.Progbar(10, interval=0.0, stateful_metrics=["accuracy"])
    bar.update(5, [("loss", 2.0), ("accuracy", 0.1)])
    bar.add(5, [("loss", 1.0), ("accuracy", 0.9)])
    shown = capsys.readouterr().out.split("\r")
    assert shown[1] == " 5/10 [==========..........] - loss: 2.0000 - accuracy: 0.1000"
    assert shown[2] == "10/10 [====================] - loss: 1.5000 - accuracy: 0.9000\n"


def test_a_saver_keeps_the_newest_files_and_restores_one(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    saver = train.Saver(model, max_to_keep=2)
    for step in (1, 2, 3):
        with torch.no_grad():
            model[0].weight.fill_(step)
        path = saver.save(None, tmp_path / "model", global_step=step)
    assert sorted(one.name for one in tmp_path.iterdir()) == [
        "checkpoint",
        "model-2.safetensors",
        "model-3.safetensors",
    ]
    assert train.latest_checkpoint(tmp_path) == path == saver.last_checkpoints[-1]
    other = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    train.Saver(other).restore(None, tmp_path / "model-2")
    assert other[0].weight[0, 0].item() == 2.0
    with pytest.raises(CheckpointMismatch, match="does not fit"):
        train.Saver(nn.Linear(5, 5)).restore(None, path)
    assert train.latest_checkpoint(tmp_path / "nowhere") is None


def test_optimizers_by_tensorflows_names_compute_as_tensorflow_does() -> None:
    gradients = [torch.tensor([0.5, -2.0]), torch.tensor([1.0, 0.25])]

    def after(optimizer: object) -> torch.Tensor:
        weight = nn.Parameter(torch.tensor([1.0, 1.0]))
        made = optimizer([weight])  # type: ignore[operator]
        for gradient in gradients:
            weight.grad = gradient.clone()
            made.step()
        return weight.detach()

    plain, momentum, adagrad = torch.ones(2), torch.ones(2), torch.ones(2)
    velocity, squares = torch.zeros(2), torch.full((2,), 0.1)
    for gradient in gradients:
        plain -= 0.1 * gradient
        velocity = 0.9 * velocity + gradient
        momentum -= 0.1 * velocity
        squares += gradient**2
        adagrad -= 0.1 * gradient / squares.sqrt()
    torch.testing.assert_close(after(train.GradientDescentOptimizer(0.1)), plain)
    torch.testing.assert_close(after(train.MomentumOptimizer(0.1, 0.9)), momentum)
    torch.testing.assert_close(after(train.AdagradOptimizer(0.1)), adagrad)
    # With one step, z is the gradient less sigma times the weight, and l2 counts twice.
    gradients[1:] = []
    n, lr, l1, l2 = 0.1 + gradients[0] ** 2, 0.1, 0.01, 0.5
    z = gradients[0] - (n.sqrt() - 0.1**0.5) / lr
    expected = (z.sign() * l1 - z) / (n.sqrt() / lr + 2 * l2)
    torch.testing.assert_close(
        after(train.FtrlOptimizer(0.1, l1_regularization_strength=l1, l2_regularization_strength=l2)), expected
    )


@pytest.mark.parametrize("name", sorted(train.NOT_HERE))
def test_a_name_without_meaning_says_what_to_write(name: str) -> None:
    with pytest.raises(NotHere, match=f"{name} has no meaning here") as refused:
        getattr(train, name)
    assert refused.value.fix


def test_every_name_is_there() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(getattr(train, name) is not None for name in train.__all__)
    with pytest.raises(AttributeError):
        _ = train.NoSuchName  # type: ignore[attr-defined]


def test_sync_replicas_are_synchronous_servers_with_backup_workers() -> None:
    made = train.SyncReplicasOptimizer(
        train.GradientDescentOptimizer(0.1), replicas_to_aggregate=2, total_num_replicas=3
    )
    assert made.strategy == mh.ParameterServer(mode="sync", aggregate=2, backup_workers=1, workers=3)
    assert train.TowerOptimizer(train.GradientDescentOptimizer(0.1), 2).strategy == mh.Mirrored(workers=2)
    weight = nn.Parameter(torch.ones(1))
    with pytest.raises(SpecError, match="an optimizer that it can make"):
        train.SyncReplicasOptimizer(torch.optim.SGD([weight], lr=0.1), replicas_to_aggregate=2)


def test_a_cluster_of_processes_has_the_workers_and_servers_of_its_spec() -> None:
    class Mine(train.TFCluster):
        pass

    cluster = Mine(CLUSTER, steps=[])
    assert (cluster._settings["workers"], cluster._settings["servers"]) == (2, 1)
    assert all(callable(getattr(cluster, name)) for name in ("start", "join", "start_server", "shutdown"))
    with pytest.raises(ClusterError, match=r"at 10\.0\.0\.1:2222"):
        train.TFCluster({"worker": ["10.0.0.1:2222"]})


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def test_a_session_takes_its_strategy_from_the_optimizer_the_places_and_the_server() -> None:
    server = train.Server(CLUSTER, job_name="worker", task_index=1)
    with train.device(train.replica_device_setter(cluster=CLUSTER)):
        placed = nn.Linear(2, 1)

    def strategy(master: str, optimizer: Any, model: nn.Module) -> Any:
        op = optimizer.minimize(loss, model=model, data=(torch.ones(4, 2), torch.ones(4, 1)), batch_size=2)
        session = train.MonitoredTrainingSession(master, config=train.ConfigProto(intra_op_parallelism_threads=3))
        return session._strategy_of(op, placement.places_of(model))

    plain = train.GradientDescentOptimizer(0.1)
    assert strategy("", plain, nn.Linear(2, 1)) == mh.Mirrored(threads=3)
    assert strategy("", plain, placed) == mh.ParameterServer(servers=1, place={"weight": 0, "bias": 0}, threads=3)
    on_cluster = strategy(server.target, plain, nn.Linear(2, 1))
    assert isinstance(on_cluster, mh.ParameterServer) and on_cluster.cluster is server.ours
    synchronous = strategy(server.target, train.SyncReplicasOptimizer(plain, 2), placed)
    assert (synchronous.mode, synchronous.aggregate, synchronous.place) == ("sync", 2, {"weight": 0, "bias": 0})
    with pytest.raises(SpecError, match='placed on "/job:ps"'):
        strategy("", train.TowerOptimizer(plain), placed)
    with pytest.raises(SpecError, match=r"master is 'localhost:2222'"):
        train.MonitoredTrainingSession("localhost:2222")


def test_checkpoints_are_saved_when_the_session_or_its_hook_says(tmp_path: Path) -> None:
    hook = train.CheckpointSaverHook(tmp_path, save_steps=5, saver=train.Saver(nn.Linear(1, 1), max_to_keep=2))
    session = train.MonitoredTrainingSession(checkpoint_dir=tmp_path, hooks=[hook], save_summaries_steps=None)
    assert session._checkpoints == mh.Checkpoints(every_s=None, every_steps=5, keep_last=2)
    by_time = train.MonitoredTrainingSession(
        checkpoint_dir=tmp_path, save_checkpoint_secs=30, save_summaries_steps=None
    )
    assert by_time._checkpoints == mh.Checkpoints(every_s=30, every_steps=None)
    with pytest.raises(SpecError, match="one directory for checkpoints"):
        train.MonitoredTrainingSession(checkpoint_dir=tmp_path / "other", hooks=[hook], save_summaries_steps=None)
    with pytest.raises(SpecError, match="Either save_secs or save_steps"):
        train.CheckpointSaverHook(tmp_path)
    with pytest.raises(SpecError, match="Either num_steps or last_step"):
        train.StopAtStepHook()
