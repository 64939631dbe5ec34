"""Regression: predict a number from other numbers, and say how good that is.

    python examples/regression.py                           # one worker
    mh run -n 2 examples/regression.py                      # two workers: the same bits, thanks to exact=True
    python examples/regression.py --data table.csv          # numbers with a line of names; the last column is predicted

Without --data the table is synthetic: Friedman's function (1991) of ten numbers, of which it uses five, plus noise of
deviation 1. So the best possible error is known: 1.

Strategies that make sense: "mirrored", as here. For workers of unequal speed change that line to
`strategy=mh.ParameterServer(servers=1, mode="sync")`: a fast worker gets more slices of each step, and the result is
the same. It is small; `mh tune` measures whether a second worker brings anything.

回归：用一些数预测另一个数，并说明预测得多好。

不写 --data 时表格是合成的：Friedman 函数（1991），十个数里只用到五个，加上标准差为 1 的噪声，所以可能达到的最小误差
是已知的：1。

适合的策略：mirrored；exact=True 使一个和两个 worker 的结果逐位相同。worker 快慢不一时用同步的参数服务器，快的
worker 每步多算几个切片，结果不变。这个程序很小，第二个 worker 有没有用，可以用 mh tune 测。

Expected output:

    error on 800 test rows (root mean square), and R2 = 0.9516:
      the network 1.0350
      least squares 2.5794, always the mean 4.7045
      the true function, whose noise has deviation 1, about 1.0
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import manyhands as mh


def make_table(rows: int) -> Tensor:
    """Friedman's function: the last column depends on the first five, not linearly."""
    draw = torch.Generator().manual_seed(0)  # every worker runs this script, and must make the same table
    x = torch.rand(rows, 10, generator=draw)
    y = 10 * torch.sin(math.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    return torch.cat([x, (y + torch.randn(rows, generator=draw))[:, None]], 1)


def read_table(path: Path) -> Tensor:
    return torch.from_numpy(np.loadtxt(path, delimiter=",", skiprows=1, dtype=np.float32, ndmin=2))


def root_mean_square(errors: Tensor) -> float:
    return float(errors.double().square().mean().sqrt())


def least_squares(x: Tensor, y: Tensor, new: Tensor) -> Tensor:
    """What the best linear function of the training rows predicts for new ones."""

    def with_ones(table: Tensor) -> Tensor:
        return torch.cat([table, torch.ones(len(table), 1)], 1)

    return with_ones(new) @ torch.linalg.lstsq(with_ones(x), y[:, None]).solution.squeeze(1)


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description="Regression on a table of numbers.")
    parser.add_argument("--data", type=Path, help="a .csv file; its last column is predicted")
    parser.add_argument("--rows", type=int, default=4000, help="of the synthetic table")
    parser.add_argument("--epochs", type=int, default=30)
    options = parser.parse_args(arguments)

    table = read_table(options.data) if options.data else make_table(options.rows)
    if not table.isfinite().all():
        parser.error(f"{options.data} has gaps, or numbers that are not finite")
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(1))]
    test_rows = len(table) // 5
    training, test = table[test_rows:], table[:test_rows]
    # Scaled by the training rows alone: nothing about the test rows may reach the model.
    mean, deviation = training.mean(0), training.std(0).clamp(min=1e-6)
    scaled, unit = (training - mean) / deviation, float(deviation[-1])
    x, y = scaled[:, :-1], scaled[:, -1:]
    test_x, test_y = ((test - mean) / deviation)[:, :-1], test[:, -1]

    trainer = mh.Trainer(
        model=lambda: nn.Sequential(
            nn.Linear(x.shape[1], 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1)
        ),
        loss=nn.MSELoss(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3, weight_decay=1e-2),
        strategy="mirrored",
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.epochs),
        scheduler_every="epoch",
        slices=4,  # fixed, with exact: 1 to 4 workers end with the same bits
        exact=True,
    )
    trainer.fit((x, y), epochs=options.epochs, batch_size=64, validation_split=0.1)

    predicted = trainer.predict(test_x).squeeze(1) * unit + mean[-1]
    results = {
        "network": root_mean_square(predicted - test_y),
        "least squares": root_mean_square(least_squares(x, y.squeeze(1), test_x) * unit + mean[-1] - test_y),
        "mean": root_mean_square(mean[-1] - test_y),
    }
    results["r2"] = 1 - (results["network"] / results["mean"]) ** 2
    if trainer.is_chief:
        print(f"error on {test_rows} test rows (root mean square), and R2 = {results['r2']:.4f}:")
        print(f"  the network {results['network']:.4f}")
        print(f"  least squares {results['least squares']:.4f}, always the mean {results['mean']:.4f}")
        if options.data is None:
            print("  the true function, whose noise has deviation 1, about 1.0")
    trainer.save(trainer.run_dir / "model.safetensors")
    return results


if __name__ == "__main__":
    main()
