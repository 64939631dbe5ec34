"""Strategies and codecs are in one registry each; what has to name them elsewhere names the same."""

from __future__ import annotations

from manyhands import torch_private
from manyhands.comm.codecs import CODECS
from manyhands.spec.strategy_names import LIMITS, REDUCERS, SAME_STRATEGY, STRATEGY_NAMES, WITH_RESIDUALS, WITH_SERVERS
from manyhands.strategies.registry import PRESETS, STRATEGIES, refused_without
from manyhands.training.setup.engine_factory import MAKERS
from manyhands.trials.layout_check import SINGLE, layouts_for


def test_settings_have_the_names_of_the_registry_and_one_preset() -> None:
    assert set(STRATEGY_NAMES) == set(LIMITS) == {*STRATEGIES, "diloco"}
    assert set(SAME_STRATEGY.values()) <= set(STRATEGY_NAMES)
    assert not set(PRESETS) & set(STRATEGIES)


def test_a_strategy_is_found_under_the_name_that_its_settings_have() -> None:
    assert {name: entry.settings().name for name, entry in STRATEGIES.items()} == {name: name for name in STRATEGIES}


def test_every_engine_has_a_maker_but_those_of_divided_models() -> None:
    assert {entry.engine for entry in STRATEGIES.values()} == {*MAKERS, "model parts"}


def test_strategies_that_may_have_servers_are_those_with_such_settings() -> None:
    with_servers = {name for name, entry in STRATEGIES.items() if hasattr(entry.settings, "servers")}
    assert with_servers | {"diloco"} == set(WITH_SERVERS)


def test_every_feature_that_needs_private_names_of_torch_is_one_that_a_strategy_uses() -> None:
    needed = {one for name in torch_private.NAMES for one in name.needed_by} - set(torch_private.ALL)
    assert needed == {one for entry in STRATEGIES.values() for one in entry.uses}
    assert refused_without(torch_private.STAGES) == ["pipeline", "mesh"]
    assert set(refused_without(torch_private.GROUPS)) == set(STRATEGIES) - {"single"}


def test_a_check_of_all_layouts_has_every_strategy_that_ends_where_one_process_ends() -> None:
    alike = {name for name, entry in STRATEGIES.items() if entry.is_alike}
    assert {layout.strategy for layout in layouts_for(4)} | {SINGLE.strategy} == alike


def test_reducers_have_the_names_of_the_codecs_and_say_which_keep_residuals() -> None:
    assert set(REDUCERS) == {"exact", *CODECS}
    assert set(WITH_RESIDUALS) == {name for name, codec in CODECS.items() if codec.feeds_back}
