"""The training that `mh doctor --gpu` runs under every strategy: a small network on handwritten digits.

No dropout, no batch statistics and plain SGD with momentum, so that every strategy has to end with the weights of one
process; and only smooth functions: a rounding error that switches a ReLU or a max pool would grow with every step.
Run by `mh run -m manyhands.recipes.device_check ORDER`; ORDER is a `DeviceOrder` in JSON.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.recipes.digits import load, loss
from manyhands.strategies.registry import STRATEGIES

__all__ = ["DeviceOrder", "DeviceOutcome"]

WARM_STEPS = 5


class DeviceOrder(msgspec.Struct, kw_only=True):
    strategy: str
    """Its name; "ddp" is torch's DistributedDataParallel, in a user loop."""
    settings: dict[str, Any] = {}
    devices: tuple[str, ...] = ("cpu",)
    folder: str
    """Directory for outcome.json and model.safetensors."""
    steps: int = 20
    width: int = 128
    batch_size: int = 64
    slices: int = 4


class DeviceOutcome(msgspec.Struct, kw_only=True):
    """The result, written by the chief."""

    device: str
    losses: list[float]
    rows_per_s: float
    """Without the first few steps."""
    peak_bytes: int = 0
    """Peak of the chief's device memory; 0 on the CPU."""
    slices: int = 0
    """Forward and backward passes per step, over all workers."""
    threads: int = 0
    """Number of threads of the chief."""


def make_model(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.GELU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, width),
        nn.GELU(),
        nn.Linear(width, 10),
    )


def make_optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


class Clock:
    """A hook that records losses, and examples per second after the first steps."""

    chief_only = True

    def __init__(self, rows: int, device: str) -> None:
        self._rows, self._device, self._started = rows, device, 0.0
        self.losses: list[float] = []
        self.rows_per_s = 0.0

    def after_step(self, trainer: Any, step: int, stats: Any) -> None:
        self.add(float(stats.loss))

    def add(self, value: float) -> None:
        self.losses.append(value)
        if self._device != "cpu":
            torch.cuda.synchronize()
        now, timed = time.perf_counter(), len(self.losses) - WARM_STEPS
        if timed == 0:
            self._started = now
        elif timed > 0:
            self.rows_per_s = timed * self._rows / (now - self._started)


def by_manyhands(order: DeviceOrder, pictures: tuple[Tensor, Tensor]) -> None:
    device = torch.device(order.devices[0]).type
    clock = Clock(order.batch_size, device)
    trainer = mh.Trainer(
        model=lambda: make_model(order.width),
        loss=loss,
        optimizer=make_optimizer,
        strategy=STRATEGIES[order.strategy].settings(devices=order.devices, **order.settings),
        slices=order.slices,
        hooks=[clock],
    )
    trainer.fit(pictures, steps=order.steps, batch_size=order.batch_size)
    trainer.save(Path(order.folder) / "model.safetensors")
    if trainer.is_chief:
        write(order, device, clock, order.slices)


def by_ddp(order: DeviceOrder, pictures: tuple[Tensor, Tensor]) -> None:
    """The same network and batch size with DDP, as in torch's tutorial. Only for its speed."""
    import torch.distributed as dist

    from manyhands.spec.load import environment

    local, is_cuda = int(environment()["LOCAL_RANK"]), torch.device(order.devices[0]).type == "cuda"
    device = torch.device(order.devices[local % len(order.devices)])
    dist.init_process_group("nccl" if is_cuda else "gloo")
    model = nn.parallel.DistributedDataParallel(make_model(order.width).to(device))
    optimizer = make_optimizer(model.parameters())
    clock, share = Clock(order.batch_size, device.type), order.batch_size // dist.get_world_size()
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(order.steps):
        rows = torch.randint(0, len(pictures[0]), (share,), generator=generator)
        value = loss(model, (pictures[0][rows].to(device), pictures[1][rows].to(device)))
        optimizer.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        clock.add(float(value.detach()))
    if dist.get_rank() == 0:
        write(order, device.type, clock, dist.get_world_size())
    dist.destroy_process_group()


def write(order: DeviceOrder, device: str, clock: Clock, slices: int) -> None:
    peak = torch.cuda.max_memory_allocated() if device != "cpu" else 0
    found = DeviceOutcome(
        device=device,
        losses=clock.losses,
        rows_per_s=clock.rows_per_s,
        peak_bytes=peak,
        slices=slices,
        threads=torch.get_num_threads(),
    )
    (Path(order.folder) / "outcome.json").write_bytes(msgspec.json.encode(found))


def main() -> None:
    order = msgspec.json.decode(sys.argv[1], type=DeviceOrder)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False  # results are compared in full fp32
    training, _ = load()
    (by_ddp if order.strategy == "ddp" else by_manyhands)(order, training)


if __name__ == "__main__":
    main()
