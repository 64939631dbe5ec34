"""Article 002, a program: experimental_distribute_dataset, and a training step of one's own on every replica.

With twice the devices either the global batch doubles or the steps halve; which one is easily left unclear. Here a
dataset has global batches, and each replica takes its rows of every one: an epoch of 100 examples in batches of 20 is 5
steps, for any number of replicas. Per-replica losses are reduced by sum. Only the imports are changed.

文章 002 的程序：experimental_distribute_dataset，以及在每个副本上运行自定义的训练步。

设备加倍，要么全局批次加倍，要么步数减半，这一点常常没有说清。这里数据集给出的是全局批次，每个副本取其中自己的几行：
100 个样本、每批 20 个，一轮总是 5 步，与副本数无关。各副本的损失按和归约。这里只改了 import。
"""

import os

os.environ["KERAS_BACKEND"] = "torch"  # before Keras is imported / 必须在导入 Keras 之前
import keras
import numpy as np

import manyhands as mh
from manyhands import distribute as tf_distribute

if __name__ == "__main__":
    strategy = tf_distribute.MirroredStrategy(devices=["/cpu:0", "/cpu:1"])
    x = np.random.default_rng(0).normal(size=(100, 4)).astype("float32")
    dataset = mh.Dataset.from_tensor_slices((x, (x[:, 0] > 0).astype("int64"))).shuffle(100).batch(20)
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        optimizer = keras.optimizers.Adam(0.05)
        loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    rows = []

    @tf_distribute.function
    def train_step(inputs):
        features, labels = inputs
        rows.append(len(features))
        with tf_distribute.GradientTape() as tape:
            losses = loss_object(labels, model(features, training=True))
            loss = tf_distribute.compute_average_loss(losses, global_batch_size=20)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    for epoch in range(3):
        total, steps = 0.0, 0
        for inputs in strategy.experimental_distribute_dataset(dataset):
            total += float(strategy.reduce("SUM", strategy.run(train_step, args=(inputs,)), axis=None))
            steps += 1
        print(f"epoch {epoch}: {steps} steps, {rows[-1]} of 20 rows on replica 0, loss {total / steps:.4f}")
