"""Each strategy, in each mode, keeps what `exact`, `reducer`, `audit` and `balance` say, or refuses it by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import manyhands as mh
from manyhands.errors import SpecError
from manyhands.spec.load import resolve
from manyhands.strategies.registry import STRATEGIES
from manyhands.training.loop.setting_checks import check_elastic
from manyhands.training.worker.strategy_lookup import check_promises

QUORUM = {"quorum": 2, "deadline_s": 1.0}
KEPT: dict[str, tuple[Any, set[str]]] = {
    "single": (mh.Single(), {"exact", "bf16", "int8", "audit", "balance"}),
    "mirrored": (mh.Mirrored(), {"exact", "bf16", "int8", "audit", "balance"}),
    "servers, sync": (mh.ParameterServer(mode="sync"), {"exact"}),
    "servers, sync with backup workers": (mh.ParameterServer(mode="sync", backup_workers=1), {"exact"}),
    "servers, ssp of 0": (mh.ParameterServer(mode="ssp", staleness=0), {"exact"}),
    "servers, ssp": (mh.ParameterServer(mode="ssp", staleness=2), set()),
    "servers, async": (mh.ParameterServer(), set()),
    "servers, Downpour": (mh.ParameterServer(push_every=4), set()),
    "servers, hybrid": (mh.ParameterServer(mode="hybrid"), {"exact", "bf16", "audit", "balance"}),
    "local_sgd": (mh.LocalSGD(), {"bf16"}),
    "diloco": (mh.LocalSGD(outer="nesterov"), {"bf16"}),
    "local_sgd, asynchronous": (mh.LocalSGD(outer="elastic", asynchronous=True), set()),
    "local_sgd, quorum": (mh.LocalSGD(**QUORUM), set()),
    "tensor": (mh.TensorParallel(), set()),
    "pipeline": (mh.PipelineParallel(), set()),
    "mesh": (mh.Mesh(data=2), set()),
    "sharded": (mh.Sharded(), set()),
    "central_storage": (mh.CentralStorage(), set()),
}
ASKED: dict[str, dict[str, Any]] = {
    "exact": {"exact": True},
    "bf16": {"reducer": "bf16"},
    "int8": {"reducer": "int8"},
    "audit": {"audit": True},
    "balance": {"balance": True},
}


def enter(choice: Any, asked: dict[str, Any]) -> None:
    """What `mh.Trainer(...)` and `mh.join(...)` begin with; runs with servers are elastic."""
    spec = resolve(arguments={"strategy": choice.name, **asked}, environ={}).spec
    check_promises(choice, spec)
    if choice.on_servers:
        check_elastic(torch.optim.SGD([torch.zeros(1)]), spec.comm.reducer)


@pytest.mark.parametrize("what", ASKED)
@pytest.mark.parametrize("case", KEPT)
def test_a_promise_is_kept_or_refused_by_name(case: str, what: str) -> None:
    choice, kept = KEPT[case]
    if what in kept:
        enter(choice, ASKED[what])
        return
    with pytest.raises(SpecError, match=next(iter(ASKED[what]))):
        enter(choice, ASKED[what])


@pytest.mark.parametrize("name", ["tensor", "pipeline", "mesh"])
def test_the_launcher_refuses_to_balance_a_divided_model(name: str) -> None:
    with pytest.raises(SpecError, match=f"balance .* with {name} the workers of a replica"):
        resolve(flags={"train.strategy": name, "train.balance": True}, environ={})


def test_every_strategy_is_in_the_table() -> None:
    assert {choice.name for choice, _ in KEPT.values()} == set(STRATEGIES)


def test_a_trainer_refuses_before_it_starts_anything() -> None:
    with pytest.raises(SpecError, match=r'mode="async".*depends on which worker') as caught:
        mh.Trainer(lambda: None, strategy="parameter_server", exact=True)
    assert "sync" in str(caught.value)


@pytest.mark.parametrize("text", ["max:", "min: ", "", ":", "most:loss"])
def test_keep_best_without_a_result_is_refused_where_it_is_given(text: str) -> None:
    with pytest.raises(SpecError, match="keep_best"):
        mh.Checkpoints(keep_best=text)
    with pytest.raises(SpecError, match="keep_best"):
        resolve(flags={"keep_best": text}, environ={})
