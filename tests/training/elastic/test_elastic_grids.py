"""Which bounds an elastic run of a divided model can have."""

from __future__ import annotations

import pytest

import manyhands as mh
from manyhands.errors import SpecError
from manyhands.spec.worker_identity import WorkerIdentity
from manyhands.training.worker.strategy_lookup import check_grid

MESH = mh.Mesh(data=2, pipeline=2)


def identity(workers: int, least: int, most: int) -> WorkerIdentity:
    return WorkerIdentity(
        agent="",
        rank=0,
        world_size=workers,
        local_rank=0,
        local_world_size=workers,
        generation="1.1",
        incarnation=1,
        least_workers=least,
        most_workers=most,
    )


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_a_mesh_may_have_fewer_replicas_than_it_says(workers: int) -> None:
    check_grid(MESH, identity(workers, 2, 4))


@pytest.mark.parametrize(("least", "most", "fix"), [(2, 8, "--elastic 2:4"), (1, 4, "--elastic 2:4")])
def test_but_no_more_of_them_and_one_at_least(least: int, most: int, fix: str) -> None:
    with pytest.raises(SpecError) as refused:
        check_grid(MESH, identity(4, least, most))
    assert fix in refused.value.fix


def test_one_that_is_not_elastic_has_all_of_its_workers() -> None:
    with pytest.raises(SpecError, match="this run has 2"):
        check_grid(MESH, identity(2, 0, 0))
