"""Parameter servers as settings: how many there are, and what `mh.ParameterServer` refuses."""

import pytest

import manyhands as mh
from manyhands.errors import SpecError
from manyhands.spec.load import resolve


def test_only_a_strategy_that_needs_servers_has_some_by_default():
    assert resolve(environ={}).spec.num_servers == 0
    assert resolve(environ={}, arguments={"strategy": "parameter_server"}).spec.num_servers == 2
    assert resolve(environ={}, arguments={"strategy": "parameter_server", "servers": 1}).spec.num_servers == 1


def test_a_flag_wins_over_the_script_and_the_script_over_the_environment():
    said = {"environ": {"MANYHANDS_SERVERS": "4"}, "arguments": {"strategy": "parameter_server", "servers": 3}}
    assert resolve(**said).spec.num_servers == 3
    assert resolve(**said, flags={"launch.servers": 5}).spec.num_servers == 5


@pytest.mark.parametrize(
    ("wrong", "what", "fix"),
    [
        ({"mode": "eventual"}, "mode is 'eventual'", 'mode="sync"'),
        ({"mode": "async", "aggregate": 4}, "async applies every gradient separately", 'mode="sync"'),
        ({"mode": "sync", "damping": True}, "sync has none", "damping=False"),
        ({"servers": 0}, "servers is 0", "servers=1"),
        ({"servers": 1.5}, "servers is 1.5", "servers=1"),
        ({"staleness": -1}, "staleness is -1", "staleness=0"),
        ({"backup_workers": -2}, "backup_workers is -2", "backup_workers=0"),
        ({"aggregate": 0}, "aggregate is 0", "aggregate=1"),
        ({"mode": "hybrid", "staleness": 1}, "staleness is 1, but in hybrid mode", "no staleness="),
        ({"durability": "disk"}, "durability is 'disk'", 'durability="wal"'),
        ({"mode": "hybrid", "durability": "wal"}, "durability is 'wal', but in hybrid mode", "no durability="),
        ({"mode": "hybrid", "backup_workers": 1}, "backup_workers is 1, but in hybrid mode", 'mode="sync"'),
        ({"mode": "hybrid", "aggregate": 2}, "aggregate is 2, but in hybrid mode", "no aggregate="),
        ({"mode": "hybrid", "damping": True}, "damping is True, but in hybrid mode", "no damping="),
        ({"mode": "hybrid", "place": {"x": 1}}, "place is {'x': 1}, but in hybrid mode", "no place="),
    ],
)
def test_what_cannot_work_is_refused_where_it_is_written(wrong, what, fix):
    with pytest.raises(SpecError) as caught:
        mh.ParameterServer(**wrong)
    assert what in caught.value.what
    assert fix in caught.value.fix


def test_a_spare_is_kept_where_the_run_has_one_host_unless_the_script_says_otherwise():
    assert [mh.ParameterServer().keeps_spare(hosts) for hosts in (1, 2)] == [True, False]
    assert [mh.ParameterServer(spare=False).keeps_spare(hosts) for hosts in (1, 2)] == [False, False]
    assert [mh.ParameterServer(spare=True, mode="hybrid").keeps_spare(hosts) for hosts in (1, 2)] == [True, True]
