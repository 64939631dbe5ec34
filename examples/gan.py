"""A GAN in a loop of one's own: two models, two optimizers, which take turns on each batch.

    python examples/gan.py
    mh run -n 2 examples/gan.py                             # the same figures to rounding
    python examples/gan.py --data points.npy                # rows of numbers, to draw more like them

`hands.setup` takes lists, and `hands.batches` yields each batch once for every optimizer: `hands.turn` says whose
turn it is, and only the parameters of that optimizer get gradients. The noise is drawn in the loop, and yet the same
on any number of workers: randomness belongs to the slice.

Without --data the points are synthetic: eight clusters on a circle. A GAN's losses say little, so the figure is the
energy distance between drawn and held-out points: 0 if they have one distribution. For comparison, that of other real
points, and of a normal distribution with the same mean and covariance.

Strategies that make sense: "mirrored", since turns of several optimizers need whole replicas. Change the
line to `strategy=mh.Mirrored(workers=2)`, and `python examples/gan.py` alone starts two workers.

GAN，自己写训练循环：两个模型、两个优化器，在每个批次上轮流更新。

hands.setup 接受列表，hands.batches 把每个批次给每个优化器各一次，hands.turn 说明轮到谁；只有它的参数有梯度。噪声在
循环里生成，但无论几个 worker 都相同，因为随机数属于切片。

不写 --data 时用合成的点：圆上的八簇。GAN 的损失说明不了什么，所以指标是生成的点与留出的点之间的能量距离，分布相同时
为 0；对比另一组真实的点，以及均值和协方差相同的正态分布。适合的策略：mirrored，因为多个优化器轮流更新要求每个
worker 有完整的副本。

Expected output:

    energy distance of 1000 drawn points to held-out ones: 0.0232
      other real points -0.0020, a normal distribution 0.0928
    points were drawn in 8 of 8 clusters
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import manyhands as mh

NOISE = 8


def make_points(rows: int) -> Tensor:
    draw = torch.Generator().manual_seed(0)  # every worker runs this script, and must make the same points
    angle = torch.randint(8, (rows,), generator=draw) * (math.pi / 4)
    return torch.stack([angle.cos(), angle.sin()], 1) * 2 + 0.1 * torch.randn(rows, 2, generator=draw)


def network(inputs: int, outputs: int, width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, outputs),
    )


def energy_distance(a: Tensor, b: Tensor) -> float:
    def apart(left: Tensor, right: Tensor) -> Tensor:
        return torch.cdist(left.double(), right.double()).sum()

    n, m = len(a), len(b)
    within = apart(a, a) / (n * (n - 1)) + apart(b, b) / (m * (m - 1))
    return float(2 * apart(a, b) / (n * m) - within)


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description="A GAN with two optimizers.")
    parser.add_argument("--data", type=Path, help="a .npy file of rows of numbers")
    parser.add_argument("--rows", type=int, default=8000, help="synthetic points")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--width", type=int, default=128)
    options = parser.parse_args(arguments)

    points = torch.from_numpy(np.load(options.data)).float() if options.data else make_points(options.rows)
    points = points[torch.randperm(len(points), generator=torch.Generator().manual_seed(1))]
    held_out, others, training = points[:1000], points[1000:2000], points[2000:]

    hands = mh.join(strategy="mirrored", slices=4)  # fixed: any number of workers gives the same models
    generator = network(NOISE, points.shape[1], options.width)  # after join, which seeds
    critic = network(points.shape[1], 1, options.width)
    of_critic = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.99))
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
    hands.setup([generator, critic], [of_critic, of_generator])
    hands.resume()
    for real in hands.batches(training, batch_size=256, epochs=options.epochs):
        drawn = generator(torch.randn(len(real), NOISE))
        if hands.turn == 0:  # the critic learns to tell real points from drawn ones
            real = real.requires_grad_()
            judged = critic(real)
            (slope,) = torch.autograd.grad(judged.sum(), real, create_graph=True)
            penalty = (
                0.1 * slope.square().sum(1).mean()
            )  # on its slope at real points, or the two would circle each other
            hands.backward(softplus(-judged).mean() + softplus(critic(drawn.detach())).mean() + penalty)
        else:  # the generator learns to pass for real
            hands.backward(softplus(-critic(drawn)).mean())
        hands.step()
        if hands.stepped and hands.every(200):
            hands.log(loss=hands.loss)

    with torch.no_grad():
        drawn = generator(torch.randn(1000, NOISE, generator=torch.Generator().manual_seed(2)))
    deviations = torch.linalg.cholesky(training.T.cov())
    normal = training.mean(0) + torch.randn(held_out.shape, generator=torch.Generator().manual_seed(3)) @ deviations.T
    results = {
        "drawn": energy_distance(drawn, held_out),
        "real": energy_distance(others, held_out),
        "normal": energy_distance(normal, held_out),
    }
    if options.data is None:
        results["clusters"] = len(((drawn[:, 1].atan2(drawn[:, 0]) / (math.pi / 4)).round() % 8).unique())
    if hands.is_chief:
        print(f"energy distance of 1000 drawn points to held-out ones: {results['drawn']:.4f}")
        print(f"  other real points {results['real']:.4f}, a normal distribution {results['normal']:.4f}")
        if "clusters" in results:
            print(f"points were drawn in {results['clusters']} of 8 clusters")
    return results


if __name__ == "__main__":
    main()
