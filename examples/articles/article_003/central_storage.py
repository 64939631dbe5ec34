"""Article 003, a program: CentralStorageStrategy, which is taken for fault tolerance there.

Central storage is one copy of the weights in the host's memory, with which all workers compute: it saves memory. If the
host is lost, so is the copy. What makes a run survive are files that are written while it trains, and elastic workers
(article_004/fault_flow.py). Keras's own fit trains under it as under the others. Only the imports are changed.

文章 003 的程序：CentralStorageStrategy，文中把它当作容错手段。

中心存储是把唯一一份权重放在主机内存里，所有 worker 用它计算：省的是内存。主机没了，这份权重也就没了。让训练能够继续的
是训练过程中写下的文件，以及弹性 worker（见 article_004/fault_flow.py）。和在其他策略下一样，Keras 自己的 fit 可以在它
下面训练。这里只改了 import。
"""

import glob
import os

os.environ["KERAS_BACKEND"] = "torch"  # before Keras is imported / 必须在导入 Keras 之前
import keras
import numpy as np

from manyhands.distribute.experimental import CentralStorageStrategy

if __name__ == "__main__":
    strategy = CentralStorageStrategy(compute_devices=["/cpu:0", "/cpu:1"])
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(2, activation="softmax")]
        )
        model.compile(optimizer=keras.optimizers.Adam(0.01), loss="sparse_categorical_crossentropy")
    x = np.random.default_rng(0).normal(size=(256, 8)).astype("float32")
    y = (x[:, 0] > 0).astype("int64")
    save = keras.callbacks.ModelCheckpoint("central-{epoch}.keras")
    model.fit(x, y, batch_size=32, epochs=3, callbacks=[save], verbose=2)
    loss = model.evaluate(x, y, batch_size=32, verbose=0)
    print(f"loss {loss:.4f}; what a lost host leaves is {max(glob.glob('central-*.keras'))}")
