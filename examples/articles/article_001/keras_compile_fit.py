"""Article 001, a program: Keras's compile and fit, with validation_split, callbacks and verbose.

Keras 3 on torch itself has no fit on several workers; made inside this scope, the same model is trained by all of them,
with `batch_size` as the global batch and Keras's History. What is easily wrong is a batch size for each worker: then
the result depends on how many there are. Only the imports are changed.

文章 001 的程序：Keras 的 compile 和 fit，带 validation_split、callbacks 和 verbose。

Keras 3 的 torch 后端自己不能用多个 worker 执行 fit；在这里的 scope 里建的模型由所有 worker 一起训练，batch_size 是全
局批次，History 仍是 Keras 的。容易弄错的是按每个 worker 设批次大小：那样结果就取决于 worker 的个数。这里只改了 import。
"""

import os

os.environ["KERAS_BACKEND"] = "torch"  # before Keras is imported / 必须在导入 Keras 之前
import keras
import numpy as np

from manyhands.distribute import MirroredStrategy

if __name__ == "__main__":
    random = np.random.default_rng(0)
    x = random.normal(size=(320, 8)).astype("float32")
    y = (x[:, 0] + x[:, 1] > 0).astype("int64")
    strategy = MirroredStrategy(devices=["/cpu:0", "/cpu:1"])
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(2, activation="softmax")]
        )
        model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    stop = keras.callbacks.EarlyStopping("val_loss", patience=2)
    history = model.fit(x, y, batch_size=32, epochs=3, validation_split=0.2, callbacks=[stop], verbose=2)
    print("val_accuracy", [round(value, 4) for value in history.history["val_accuracy"]])
