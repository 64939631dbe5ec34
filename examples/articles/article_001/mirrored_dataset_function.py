"""Article 001, a program: the model is made inside MirroredStrategy's scope, the data by a dataset function.

Each replica calls the function and gets its own batches; one without an argument may return (train, test). Losses are
summed over replicas, so they must be divided by the global batch: with the mean over each replica's own rows, which
such programs easily take, gradients are too large by the number of replicas. Only the imports are changed.

文章 001 的程序：在 MirroredStrategy 的 scope 里建模型，数据由 dataset 函数给出。

每个副本调用该函数，得到自己的批次；没有参数的函数可以返回 (train, test)。损失要对副本求和，所以必须除以全局批次；这类
程序常犯的错是各副本只对自己的样本取平均，梯度就大了“副本数”倍。这里只改了 import。
"""

import os

os.environ["KERAS_BACKEND"] = "torch"  # before Keras is imported / 必须在导入 Keras 之前
import keras
import numpy as np

from manyhands import distribute as tf_distribute

GLOBAL_BATCH = 16


def make_dataset(context):
    x = np.random.default_rng(0).normal(size=(8, GLOBAL_BATCH, 4)).astype("float32")
    rows = context.get_per_replica_batch_size(GLOBAL_BATCH)
    mine = slice(context.input_pipeline_id * rows, (context.input_pipeline_id + 1) * rows)
    return [(batch[mine], (batch[mine, 0] > 0).astype("int64")) for batch in x]


if __name__ == "__main__":
    strategy = tf_distribute.MirroredStrategy(devices=["/cpu:0", "/cpu:1"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(2)])
        optimizer = keras.optimizers.SGD(0.5)
        loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        dataset = strategy.experimental_distribute_datasets_from_function(make_dataset)

    def train_step(inputs):
        images, labels = inputs
        with tf_distribute.GradientTape() as tape:
            losses = loss_object(labels, model(images, training=True))
            loss = tf_distribute.compute_average_loss(losses, global_batch_size=GLOBAL_BATCH)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    for epoch in range(3):
        losses = [strategy.reduce("SUM", strategy.run(train_step, args=(inputs,)), axis=None) for inputs in dataset]
        print(f"epoch {epoch}, {strategy.num_replicas_in_sync} replicas, loss {float(sum(losses)) / 8:.4f}")
