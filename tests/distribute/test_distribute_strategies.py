"""tf.distribute's strategies are ours: as many replicas, and the models of their scopes train on all of them."""

from __future__ import annotations

from typing import Any

import pytest

from manyhands.testing import RankPool
from tests.distribute.strategy_programs import trained


@pytest.mark.parametrize(
    ("name", "settings", "ranks_asked"),
    [
        ("MirroredStrategy", {"workers": 2}, 2),
        ("MirroredStrategy", {"devices": ["/cpu:0", "/cpu:1"]}, 2),
        ("MultiWorkerMirroredStrategy", {}, 2),
        ("CentralStorageStrategy", {"workers": 2}, 2),
        ("OneDeviceStrategy", {"device": "cpu"}, 1),
    ],
    ids=["workers", "devices", "multi worker", "central storage", "one device"],
)
def test_a_scope_trains_on_all_replicas(ranks: RankPool, name: str, settings: dict[str, Any], ranks_asked: int) -> None:
    found = ranks(ranks_asked, trained, name, settings)
    assert {replicas for replicas, _ in found} == {ranks_asked}
    (loss,) = {loss for _, loss in found}
    assert 0.0 <= float(loss) < 5.0
