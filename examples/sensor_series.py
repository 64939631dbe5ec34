"""A sensor series: an LSTM that forecasts a temperature, tested on a later time than it was trained on.

    python examples/sensor_series.py
    mh run -n 2 examples/sensor_series.py                   # the same figures to rounding
    python examples/sensor_series.py --data sensor.csv      # numbers with a line of names, one row for each hour;
                                                            # the first column is forecast from all of them

A window is 48 hours of readings; the target is the first sensor 6 hours after its end. Windows overlap, so a random
split would put almost the same hours into training and test, and flatter. Here the series is cut in time, a window
belongs to a part only if its target does too, and scaling uses the training hours alone.

Baselines: the last reading (persistence), and the reading at the same hour of the day before.

Without --data the series is synthetic: a machine hall with a daily course, load by working days, weather that drifts,
and noise in every sensor.

Strategies that make sense: "mirrored". For workers over a slow network change the line to
`strategy=mh.Mirrored(reducer="bf16")`: gradients are sent in half the bytes.

传感器序列：用 LSTM 预测温度，测试的时间晚于训练的时间。

一个窗口是 48 小时的读数，目标是窗口结束 6 小时之后的第一个传感器。窗口相互重叠，随机划分会让训练和测试里有几乎相同
的小时，结果虚高；这里按时间切开，目标也属于同一部分的窗口才归入那一部分，归一化只用训练的小时。

基线：最后一个读数，以及前一天同一小时的读数。不写 --data 时序列是合成的。适合的策略：mirrored；网络慢时加
reducer="bf16"，梯度只发一半字节。

Expected output:

    error of a forecast 6 hours ahead on the last 747 hours (root mean square):
      the LSTM 1.275
      the last reading 4.309, the day before 4.630
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

WINDOW, AHEAD = 48, 6


class Forecast(nn.Module):
    """Forecasts the change from the last reading, which is easier to learn than the reading itself."""

    def __init__(self, sensors: int, hidden: int = 32) -> None:
        super().__init__()
        self.lstm = nn.LSTM(sensors, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, window: Tensor) -> Tensor:
        states, _ = self.lstm(window)
        return window[:, -1, 0] + self.out(states[:, -1]).squeeze(1)


def make_series(hours: int) -> Tensor:
    """Temperature, outside temperature and load, by the hour."""
    draw = torch.Generator().manual_seed(0)  # every worker runs this script, and must make the same series
    hour = torch.arange(hours)
    day = torch.sin(2 * math.pi * (hour - 9) / 24)
    weather = torch.zeros(hours)
    for step in range(1, hours):
        weather[step] = 0.98 * weather[step - 1] + 0.6 * torch.randn((), generator=draw)
    outside = 12 + 6 * day + weather
    load = ((hour % 24 >= 7) & (hour % 24 < 18) & (hour // 24 % 7 < 5)).float() * (
        0.7 + 0.3 * torch.rand(hours, generator=draw)
    )
    inside = torch.full((hours,), 18.0)
    for step in range(1, hours):  # the hall warms up and cools down slowly
        inside[step] = inside[step - 1] + 0.08 * (outside[step] - inside[step - 1]) + 1.5 * load[step]
    series = torch.stack([inside, outside, load], 1)
    return series + torch.randn(series.shape, generator=draw) * torch.tensor([0.2, 0.5, 0.02])


def read_series(path: Path) -> Tensor:
    return torch.from_numpy(np.loadtxt(path, delimiter=",", skiprows=1, dtype=np.float32, ndmin=2))


def windows(series: Tensor) -> tuple[Tensor, Tensor]:
    """All windows of a part of the series, and their targets, which are inside this part as well."""
    inputs = series.unfold(0, WINDOW, 1)[:-AHEAD].transpose(1, 2)  # a view: overlapping windows take no memory
    return inputs, series[WINDOW + AHEAD - 1 :, 0]


def root_mean_square(errors: Tensor) -> float:
    return float(errors.double().square().mean().sqrt())


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description="An LSTM on a sensor series.")
    parser.add_argument("--data", type=Path, help="a .csv file of numbers, one row for each hour")
    parser.add_argument("--hours", type=int, default=4000, help="of the synthetic series")
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args(arguments)

    series = read_series(options.data) if options.data else make_series(options.hours)
    if not series.isfinite().all():
        parser.error(f"{options.data} has gaps: fill them, or begin after them")
    cut, end = int(len(series) * 0.7), int(len(series) * 0.8)
    mean, deviation = series[:cut].mean(0), series[:cut].std(0).clamp(min=1e-6)
    scaled = (series - mean) / deviation
    training, validation, test = windows(scaled[:cut]), windows(scaled[cut:end]), windows(scaled[end:])

    trainer = mh.Trainer(
        model=lambda: Forecast(series.shape[1]),
        loss=nn.MSELoss(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=5e-3),
        strategy="mirrored",
        slices=4,  # fixed, so that any number of workers gives the same model
        clip_norm=1.0,
    )
    trainer.fit(training, epochs=options.epochs, batch_size=64, validation=validation)

    inputs, targets = test
    unit = float(deviation[0])
    results = {
        "lstm": root_mean_square(trainer.predict(inputs) - targets) * unit,
        "last reading": root_mean_square(inputs[:, -1, 0] - targets) * unit,
        "day before": root_mean_square(inputs[:, AHEAD - 1 - 24, 0] - targets) * unit,
    }
    if trainer.is_chief:
        print(f"error of a forecast {AHEAD} hours ahead on the last {len(targets)} hours (root mean square):")
        print(f"  the LSTM {results['lstm']:.3f}")
        print(f"  the last reading {results['last reading']:.3f}, the day before {results['day before']:.3f}")
    trainer.save(trainer.run_dir / "model.safetensors")
    return results


if __name__ == "__main__":
    main()
