"""What `mh doctor --gpu` has every strategy train: a small network on handwritten digits, the same for all of them.

No dropout, no batch statistics and plain SGD with momentum, so that every strategy has to end where one process ends;
and smooth functions throughout: a rounding error that switches a ReLU or the maximum of a pool grows with every step.
Run by `mh run -m manyhands.recipes.device_check ORDER`; the order says what to make and where to write the outcome.
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

__all__ = ["DeviceOrder", "Outcome"]

WARM_STEPS = 5


class DeviceOrder(msgspec.Struct, kw_only=True):
    strategy: str
    """A class of `mh`; "ddp" is torch's DistributedDataParallel, in a loop by hand."""
    settings: dict[str, Any] = {}
    devices: tuple[str, ...] = ("cpu",)
    folder: str
    """Where outcome.json and model.safetensors are to be written."""
    steps: int = 20
    width: int = 128
    batch_size: int = 64
    slices: int = 4


class Outcome(msgspec.Struct, kw_only=True):
    """What the chief writes."""

    device: str
    losses: list[float]
    rows_per_s: float
    """After the first few steps."""
    peak_bytes: int = 0
    """Of the chief's device memory; 0 on the CPU."""
    slices: int = 0
    """Forward and backward passes in a step, of all workers together."""
    threads: int = 0
    """Of the chief."""


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
    """A hook: the losses, and how many rows a second after the first steps."""

    chief_only = True

    def __init__(self, rows: int, device: str) -> None:
        self._rows, self._device, self._began = rows, device, 0.0
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
            self._began = now
        elif timed > 0:
            self.rows_per_s = timed * self._rows / (now - self._began)


def by_manyhands(order: DeviceOrder, pictures: tuple[Tensor, Tensor]) -> None:
    device = torch.device(order.devices[0]).type
    clock = Clock(order.batch_size, device)
    trainer = mh.Trainer(
        model=lambda: make_model(order.width),
        loss=loss,
        optimizer=make_optimizer,
        strategy=getattr(mh, order.strategy)(devices=order.devices, **order.settings),
        slices=order.slices,
        hooks=[clock],
    )
    trainer.fit(pictures, steps=order.steps, batch_size=order.batch_size)
    trainer.save(Path(order.folder) / "model.safetensors")
    if trainer.is_chief:
        write(order, device, clock, order.slices)


def by_ddp(order: DeviceOrder, pictures: tuple[Tensor, Tensor]) -> None:
    """The same network and as many rows per step, as torch's own tutorial does it. For its speed alone."""
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
    found = Outcome(
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
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False  # to be compared in full fp32
    training, _ = load()
    (by_ddp if order.strategy == "ddp" else by_manyhands)(order, training)


if __name__ == "__main__":
    main()
