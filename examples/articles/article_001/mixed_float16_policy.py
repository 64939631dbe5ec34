"""Article 001, a program: Keras's mixed_float16 policy.

The policy is set, and the model trained as before. Two things are easily left out: the last layer computes in float32,
or its softmax loses small probabilities; and the loss must be scaled, which compile does (LossScaleOptimizer). Inside
the scope all workers use one loss scale, so an overflow on one of them skips the step on all. Only the
imports are changed.

文章 001 的程序：Keras 的 mixed_float16 策略。

设置策略后照常训练。容易漏掉两点：最后一层要用 float32 计算，否则 softmax 会丢掉小概率；损失必须缩放，compile 会自动加
上 LossScaleOptimizer。在 scope 里，所有 worker 共用一个缩放系数，任何一个溢出，全体都跳过这一步。这里
只改了 import。
"""

import os

os.environ["KERAS_BACKEND"] = "torch"  # before Keras is imported / 必须在导入 Keras 之前
import keras
import numpy as np

from manyhands.distribute import MirroredStrategy, mixed_precision

if __name__ == "__main__":
    random = np.random.default_rng(0)
    x = random.normal(size=(256, 8)).astype("float32")
    y = (x[:, 0] > 0).astype("int64")
    mixed_precision.set_policy("mixed_float16")
    strategy = MirroredStrategy(devices=["/cpu:0", "/cpu:1"])
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(16, activation="relu"),
                keras.layers.Dense(2, activation="softmax", dtype="float32"),
            ]
        )
        model.compile(optimizer=keras.optimizers.SGD(0.1), loss="sparse_categorical_crossentropy")
    history = model.fit(x, y, batch_size=32, epochs=2, verbose=2)
    layer = model.layers[0]
    print(f"computes in {layer.compute_dtype}, weights in {layer.variable_dtype}: {type(model.optimizer).__name__}")
