"""Buffers after a step: as if one process had seen one slice after the other."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from manyhands.errors import TrainingFailed
from manyhands.parallel.model.step_buffers import StepBuffers


def step_in_slices(model: nn.Module, slices: list[torch.Tensor], runners: list[list[int]]) -> list[nn.Module]:
    """One step on several replicas; runner r forwards the slices in runners[r]. Returns the replicas."""
    replicas = [copy.deepcopy(model) for _ in runners]
    contributions: dict[int, torch.Tensor] = {}
    changes, all_buffers = b"", [StepBuffers(replica) for replica in replicas]
    for replica, buffers, mine in zip(replicas, all_buffers, runners, strict=True):
        buffers.begin(len(slices), len(runners))
        for v in mine:
            buffers.enter(v)
            replica(slices[v])
            contributions[v] = buffers.leave(v)
            buffers.put_back()
        changes = changes or buffers.first_changes()
    for buffers in all_buffers:
        buffers.commit([contributions[v] for v in range(len(slices))])
        buffers.apply_first_changes(changes)
    return replicas


def one_after_the_other(model: nn.Module, slices: list[torch.Tensor]) -> nn.Module:
    alone = copy.deepcopy(model)
    for piece in slices:
        alone(piece)
    return alone


@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
def test_batch_statistics_are_replayed_in_slice_order(momentum: float | None) -> None:
    torch.manual_seed(0)
    model = nn.BatchNorm1d(4, momentum=momentum).train()
    model(torch.randn(6, 4))
    slices = [torch.randn(3, 4) * (v + 1) for v in range(4)]
    replicas = step_in_slices(model, slices, [[0, 1], [2, 3], []])
    expected = one_after_the_other(model, slices)
    for replica in replicas:
        torch.testing.assert_close(replica.state_dict(), expected.state_dict(), rtol=1e-6, atol=1e-7)
        assert torch.equal(replica.running_var, replicas[0].running_var)


def test_statistics_have_the_same_bits_wherever_a_slice_ran() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4)).train()
    slices = [torch.randn(5, 4) for _ in range(3)]
    (alone,) = step_in_slices(model, slices, [[0, 1, 2]])
    split = step_in_slices(model, slices, [[0], [1, 2]])
    for replica in split:
        for name, value in alone.state_dict().items():
            assert torch.equal(value, replica.state_dict()[name]), name


def test_a_layer_called_twice_per_slice_or_not_at_all_is_replayed_as_often() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.rare = nn.BatchNorm1d(4), nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.shared(self.shared(x) + 1)
            return self.rare(y) if x.sum() > 0 else y

    torch.manual_seed(2)
    model = Twice().train()
    slices = [torch.randn(4, 4) + sign for sign in (-3, 3, -3)]
    (replica,) = step_in_slices(model, slices, [[0, 1, 2]])
    torch.testing.assert_close(
        replica.state_dict(), one_after_the_other(model, slices).state_dict(), rtol=1e-5, atol=1e-6
    )
    assert int(replica.rare.num_batches_tracked) == 1


def test_any_other_buffer_takes_the_value_of_slice_0_on_every_replica() -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(2))
            self.register_buffer("untouched", torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += x.sum()
            return x

    slices = [torch.full((2, 2), float(v + 1)) for v in range(3)]
    for replica in step_in_slices(Remembers(), slices, [[0], [1, 2]]):
        assert replica.seen.tolist() == [4.0, 4.0]


def test_a_buffer_that_is_replaced_instead_of_changed_counts_as_changed() -> None:
    class Replaces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("last", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last = self.last + x.mean(0)[:1]
            return x

    slices = [torch.full((2, 1), float(v + 1)) for v in range(2)]
    for replica in step_in_slices(Replaces(), slices, [[0], [1]]):
        assert replica.last.tolist() == [1.0]


def test_a_large_frozen_parameter_that_changes_in_forward_is_refused_by_name() -> None:
    class Drifts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.zeros(2**20 + 1), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.table.add_(1)
            return x

    with pytest.raises(TrainingFailed, match="table"):
        step_in_slices(Drifts(), [torch.ones(1), torch.ones(1)], [[0, 1]])


def test_a_step_of_one_slice_through_two_stages_of_one_rank_leaves_the_right_values_without_replay() -> None:
    torch.manual_seed(2)
    first, second = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    expected, rows = copy.deepcopy(first), torch.randn(5, 4)
    buffers = StepBuffers(nn.Sequential(first, second))
    buffers.begin(1, 1)
    left = []
    for stage in (first, second):
        buffers.enter(0)
        stage(rows)
        left.append(buffers.leave(0))
        buffers.put_back()
    buffers.commit([buffers.united(*left)])
    expected(rows)
    torch.testing.assert_close(first.state_dict(), expected.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(second.state_dict(), expected.state_dict(), rtol=0, atol=0)
