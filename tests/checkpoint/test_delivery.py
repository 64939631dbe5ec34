"""Tensors that come while a checkpoint is written: one at a time, and whole or not at all."""

from __future__ import annotations

import math
import threading
import weakref
from pathlib import Path

import pytest
import torch

from manyhands.checkpoint import load
from manyhands.checkpoint.tensor_stream import TensorStream, announced
from tests.checkpoint.checkpoint_cases import leftovers, must_save, snapshot, whole_step, writer


def made(step: int) -> dict[str, torch.Tensor]:
    return {
        "model/layer/weight": torch.full((4, 4), float(step)),
        "model/half": torch.full((3,), step, dtype=torch.bfloat16),
        "optimizer/momentum": torch.full((16,), step + 0.5),
    }


def begin(tmp_path: Path, step: int, tensors: dict[str, torch.Tensor]) -> tuple[object, TensorStream]:
    """A save of these, all of which are still to come."""
    hand = writer(tmp_path)
    likes = {name: announced(one.shape, one.dtype) for name, one in tensors.items()}
    delivery = hand.deliver(likes, likes)
    hand.save(snapshot(step, tensors=likes, delivery=delivery), wait=False)
    return hand, delivery


def test_what_comes_is_what_is_written(tmp_path: Path) -> None:
    tensors = made(7)
    hand, delivery = begin(tmp_path, 7, tensors)
    for name in delivery.names:
        delivery.give(name, tensors[name])
    delivery.wait()
    for one in tensors.values():
        one.zero_()  # training continues once all is written
    hand.wait()
    [result] = hand.poll()
    assert result.error is None
    for name, one in load(result.path).tensors.items():
        assert torch.equal(one, made(7)[name])


def test_no_more_than_two_are_there_at_a_time() -> None:
    delivery, alive, most = TensorStream([str(number) for number in range(20)]), weakref.WeakSet(), 0

    def write() -> None:
        for name in delivery.names:
            delivery.take(name)
        delivery.end()

    thread = threading.Thread(target=write)
    thread.start()
    for name in delivery.names:
        one = torch.zeros(3)
        alive.add(one)
        most = max(most, len(alive))
        delivery.give(name, one)
        del one
    delivery.wait()
    thread.join()
    assert most <= 2 and not alive


def test_a_worker_that_is_lost_on_the_way_leaves_nothing(tmp_path: Path) -> None:
    must_save(tmp_path, 1)
    tensors = made(2)
    hand, delivery = begin(tmp_path, 2, tensors)
    delivery.give(delivery.names[0], tensors[delivery.names[0]])
    delivery.break_off()
    delivery.wait()
    hand.wait()
    [result] = hand.poll()
    assert f"before sending {delivery.names[1]!r};" in result.error.what
    assert leftovers(tmp_path) == [] and whole_step(tmp_path) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_ends_the_save_and_not_the_giving(tmp_path: Path, bad: float) -> None:
    must_save(tmp_path, 1)
    tensors = made(2)
    tensors["model/layer/weight"][3, 3] = bad
    hand, delivery = begin(tmp_path, 2, tensors)
    for name in delivery.names:
        delivery.give(name, tensors[name])
    delivery.wait()
    hand.wait()
    [result] = hand.poll()
    assert "'model/layer/weight' contains NaN or infinity" in result.error.what
    assert leftovers(tmp_path) == [] and whole_step(tmp_path) == 1
