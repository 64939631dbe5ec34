"""Article 002, a program: MirroredStrategy with named devices, SyncReplicasOptimizer, and a reduction by sum.

A strategy of replicas and an optimizer of parameter servers in one program would aggregate gradients twice. They are
alternatives. The strategy names its devices and reduces per-replica losses by sum; the optimizer waits for
`replicas_to_aggregate` gradients on servers. This file runs the first; sync_replicas_session.py the second. A device
that the machine lacks is replaced by the CPU, with a warning, so `["/gpu:0", "/gpu:1"]` runs here as well.
Only the imports are changed.

文章 002 的程序：指定设备的 MirroredStrategy、SyncReplicasOptimizer，以及按和归约。

在同一个程序里同时使用副本策略和参数服务器的优化器，梯度会被聚合两次；两者只能选一个。策略指定设备，把各副本的损失求和；
优化器在服务器上等够 replicas_to_aggregate 个梯度。本文件运行前者，后者见 sync_replicas_session.py。机器上没有的设备会
换成 CPU 并给出警告，所以 ["/gpu:0", "/gpu:1"] 在这里也能运行。这里只改了 import。
"""

import os

os.environ["KERAS_BACKEND"] = "torch"  # before Keras is imported / 必须在导入 Keras 之前
import keras
import numpy as np

from manyhands import distribute as tf_distribute

GLOBAL_BATCH = 16

if __name__ == "__main__":
    strategy = tf_distribute.MirroredStrategy(devices=["/gpu:0", "/gpu:1"])
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1)
        loss_object = keras.losses.MeanSquaredError(reduction="none")
    x = np.random.default_rng(0).normal(size=(128, 4)).astype("float32")
    batches = [(part, part.sum(1, keepdims=True)) for part in np.split(x, len(x) // GLOBAL_BATCH)]

    def replica_step(inputs):
        features, targets = inputs
        with tf_distribute.GradientTape() as tape:
            losses = loss_object(targets, model(features, training=True))
            loss = tf_distribute.compute_average_loss(losses, global_batch_size=GLOBAL_BATCH)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))  # their sum / 求和之后
        return loss

    for epoch in range(3):
        for inputs in strategy.experimental_distribute_dataset(batches):
            per_replica = strategy.run(replica_step, args=(inputs,))
            total = strategy.reduce(tf_distribute.ReduceOp.SUM, per_replica, axis=None)
        print(f"epoch {epoch}, {strategy.num_replicas_in_sync} replicas, loss of the last batch {float(total):.5f}")
