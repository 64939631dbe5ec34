"""The printed programs, with only their imports changed, as `mh run` starts them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

SERVERS = """
import torch
from manyhands.distribute import train as tf_train

cluster = tf_train.ClusterSpec(
    {"worker": ["localhost:2222", "localhost:2223"], "ps": ["localhost:2224", "localhost:2225"]})

def loss(model, batch):
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

if __name__ == "__main__":
    x = torch.arange(32.0).view(16, 2) / 16
    data = x, x.sum(1, keepdim=True)
    with tf_train.device(tf_train.replica_device_setter(worker_device="/job:worker/task:0", cluster=cluster)):
        model = torch.nn.Linear(2, 1)
        torch.nn.init.ones_(model.weight), torch.nn.init.zeros_(model.bias)
    global_step = tf_train.get_or_create_global_step()
    optimizer = tf_train.SyncReplicasOptimizer(
        tf_train.GradientDescentOptimizer(0.1), replicas_to_aggregate=2, total_num_replicas=2)
    train_op = optimizer.minimize(loss, global_step=global_step, model=model, data=data, batch_size=16)
    hooks = [optimizer.make_session_run_hook(True), tf_train.StopAtStepHook(last_step=5)]
    saver = tf_train.Saver(model)
    config = tf_train.ConfigProto(allow_soft_placement=True, log_device_placement=True)
    with tf_train.MonitoredTrainingSession(checkpoint_dir="logs", hooks=hooks, config=config) as sess:
        while not sess.should_stop():
            sess.run(train_op)
    if sess.hands.is_chief:
        print("step", sess.global_step, "of", sess.hands.world_size, "workers")
        saver.save(sess, "weights", global_step=0)
"""


def run(folder: Path, code: str, *flags: str, timeout_s: float = 150) -> str:
    (folder / "program.py").write_text(code)
    command = [sys.executable, "-m", "manyhands.cli.main", "run", *flags, "program.py"]
    environment = {**os.environ, "KERAS_BACKEND": "torch"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_synchronous_replicas_on_two_workers_and_two_servers_take_the_steps_of_one_process(tmp_path: Path) -> None:
    output = run(tmp_path, SERVERS, "-n", "2", "--servers", "2")
    assert "step 5 of 2 workers" in output
    assert "weight: /job:ps/task:0/device:CPU:0" in output and "bias: /job:ps/task:1/device:CPU:0" in output
    x = torch.arange(32.0).view(16, 2) / 16
    model = nn.Linear(2, 1)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()
    found = safetensors.torch.load_file(tmp_path / "weights-0.safetensors")
    for name, value in model.named_parameters():
        torch.testing.assert_close(found[name], value.detach(), rtol=0, atol=1e-6)


KERAS = """
import keras, numpy as np
from manyhands import distribute as tf_distribute

strategy = tf_distribute.MirroredStrategy()
print("replicas", strategy.num_replicas_in_sync)
GLOBAL_BATCH = 16
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
y = (x[:, 0] > 0).astype("int64")
dataset = [(x[low:low + GLOBAL_BATCH], y[low:low + GLOBAL_BATCH]) for low in range(0, 64, GLOBAL_BATCH)]

with strategy.scope():
    assert tf_distribute.get_strategy() is strategy and tf_distribute.in_cross_replica_context()
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(2)])
    optimizer = keras.optimizers.SGD(0.5)
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    first = [np.array(one) for one in model.get_weights()]
    dist_dataset = strategy.experimental_distribute_dataset(dataset)

@tf_distribute.function
def train_step(inputs):
    images, labels = inputs
    with tf_distribute.GradientTape() as tape:
        predictions = model(images, training=True)
        loss = tf_distribute.compute_average_loss(loss_object(labels, predictions), global_batch_size=GLOBAL_BATCH)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    accuracy.update_state(labels, predictions)
    return loss

@tf_distribute.function
def distributed_train_step(inputs):
    per_replica_losses = strategy.run(train_step, args=(inputs,))
    return strategy.reduce(tf_distribute.ReduceOp.SUM, per_replica_losses, axis=None)

for epoch in range(3):
    total = sum(float(distributed_train_step(inputs)) for inputs in dist_dataset)
    print(f"epoch {epoch} loss {total / 4:.5f} accuracy {float(accuracy.result()):.5f}")
    accuracy.reset_state()

# The same by Keras alone, from the same weights.
alone = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(2)])
alone.set_weights(first)
alone.compile(optimizer=keras.optimizers.SGD(0.5), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
alone.fit(x, y, batch_size=GLOBAL_BATCH, epochs=3, shuffle=False, verbose=0)
print("same", max(float(np.abs(a - b).max()) for a, b in zip(model.get_weights(), alone.get_weights())) < 1e-5)
"""


@pytest.mark.long
def test_the_custom_loop_of_tensorflows_guide_ends_where_keras_ends(tmp_path: Path) -> None:
    output = run(tmp_path, KERAS, "-n", "2")
    assert "replicas 2" in output and "same True" in output
    assert output.count("accuracy") == 3


TASKS = """
import sys, torch
from manyhands.distribute import train

def loss(model, batch):
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

if __name__ == "__main__":
    index = int(sys.argv[1])
    cluster = train.ClusterSpec([("local", sys.argv[2:])])
    server = train.Server(cluster, job_name="local", task_index=index)
    x = torch.arange(64.0).view(32, 2) / 64
    train_op = train.GradientDescentOptimizer(0.1).minimize(
        loss, model=lambda: torch.nn.Linear(2, 1), data=(x, x.sum(1, keepdim=True)), batch_size=8)
    hooks = [train.StopAtStepHook(last_step=5)]
    with train.MonitoredTrainingSession(master=server.target, is_chief=index == 0, hooks=hooks) as sess:
        while not sess.should_stop():
            sess.run(train_op)
    print("rank", sess.hands.rank, "of", sess.hands.world_size, "step", sess.global_step)
"""


@pytest.mark.long
def test_two_tasks_of_a_cluster_that_are_started_by_hand_take_the_same_steps(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(TASKS)
    with socket.socket() as first, socket.socket() as second:
        for one in (first, second):
            one.bind(("127.0.0.1", 0))
        addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in (first, second)]
    started = [
        subprocess.Popen(
            [sys.executable, "program.py", str(index), *addresses],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    outputs = [task.communicate(timeout=120)[0] for task in started]
    assert [task.returncode for task in started] == [0, 0], outputs
    assert "rank 0 of 2 step 5" in outputs[0]
