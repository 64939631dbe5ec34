"""[cluster]: hosts by number or by name, times as Slurm reads them, and the site file that describes a cluster once."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.errors import SpecError
from manyhands.launcher.placers.spec import Slurm
from manyhands.spec.cluster_section import ClusterSection, HostCount, NamedHost, parse_hosts, seconds_of
from manyhands.spec.config_file import dump_toml
from manyhands.spec.load import resolve
from manyhands.spec.worker_identity import IDENTITY_VARIABLES


@pytest.mark.parametrize(
    ("value", "hosts"),
    [
        (None, HostCount(1, 1)),
        (4, HostCount(4, 4)),
        ("4", HostCount(4, 4)),
        ("2:8", HostCount(2, 8)),
        ((2, 8), HostCount(2, 8)),
        ("a,b:2", [NamedHost("a", None), NamedHost("b", 2)]),
        (("ada@a.example.org", "[fd00::1]:3"), [NamedHost("ada@a.example.org", None), NamedHost("[fd00::1]", 3)]),
    ],
)
def test_hosts_are_a_number_a_range_or_names(value, hosts):
    assert parse_hosts(value) == hosts


@pytest.mark.parametrize(
    "value",
    ["", "0", "8:2", (2, 8, 9), "a,,b", "a,a", "a b", "-oProxyCommand=x", "a,-x", "a;b", "a:0", "$(id)", (1, "a")],
)
def test_what_is_neither_is_refused_with_what_to_type(value):
    with pytest.raises(SpecError) as refused:
        parse_hosts(value)
    assert refused.value.fix


@settings(max_examples=60, deadline=None)
@given(st.text("a1-,:@.[_ =", max_size=12))
def test_no_text_is_taken_for_a_host_that_ssh_would_read_as_an_option(text):
    try:
        found = parse_hosts(text)
    except SpecError:
        return
    assert isinstance(found, HostCount) or not any(host.name.startswith("-") for host in found)


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90", 5400), ("30:15", 1815), ("8:00:00", 28800), ("2-00:00:00", 172800), ("1-12", 129600), ("1-12:30", 131400)],
)
def test_times_are_read_as_slurm_reads_them(time, seconds):
    assert seconds_of(time) == seconds


@pytest.mark.parametrize("time", ["", "x", "0", "1:2:3:4", "-1", "1 h"])
def test_what_is_no_time_is_refused(time):
    with pytest.raises(SpecError):
        seconds_of(time)


@pytest.mark.parametrize(
    ("given_settings", "what"),
    [
        ({"on": "slurm", "hosts": "a,b"}, "which slurm chooses itself"),
        ({"on": "ssh", "hosts": 4}, "ssh needs names"),
        ({"cpus": 0}, "cpus is 0"),
        ({"memory": "64"}, "must be like 64G"),
        ({"queue": "gpu --wrap=x"}, "which is no name"),
        ({"setup": ("a\nb",)}, "control characters"),
        ({"array": "0-3;x"}, "must be like 0-3%2"),
    ],
)
def test_settings_that_do_not_fit_are_refused(given_settings, what):
    with pytest.raises(SpecError, match=what):
        ClusterSection(**given_settings)


def test_lists_come_from_files_as_arrays_and_from_the_environment_as_lines(tmp_path):
    (tmp_path / "run.toml").write_text('[cluster]\non = "slurm"\nhosts = [2, 8]\nsetup = ["module load cuda", "x"]\n')
    cluster = resolve(environ={}, config_file=str(tmp_path / "run.toml")).spec.cluster
    assert (cluster.count, cluster.setup) == (HostCount(2, 8), ("module load cuda", "x"))
    assert resolve(environ={"MANYHANDS_SETUP": "a\nb"}).spec.cluster.setup == ("a", "b")
    with pytest.raises(SpecError, match="a list of texts"):
        resolve(environ={}, arguments={"setup": 3})


def test_the_shown_file_gives_the_same_cluster_again(tmp_path):
    spec = resolve(environ={}, flags={"on": "slurm", "hosts": "2:8", "extra": ("--constraint=a100",)}).spec
    (tmp_path / "again.toml").write_text(dump_toml(spec))
    assert resolve(environ={}, config_file=str(tmp_path / "again.toml")).spec == spec


def site(tmp_path: Path, text: str) -> dict[str, str]:
    (tmp_path / ".config").mkdir()
    (tmp_path / ".config/manyhands.toml").write_text(text)
    return {"HOME": str(tmp_path)}


SITE = '[cluster]\non = "slurm"\nqueue = "gpu"\n[launch]\ninsecure_data_plane = true\n'


def test_a_site_describes_its_cluster_once_and_everything_else_overrides_it(tmp_path):
    environ = site(tmp_path, SITE)
    resolved = resolve(environ=environ)
    assert (resolved.spec.cluster.on, resolved.spec.launch.insecure_data_plane) == ("slurm", True)
    assert resolved.origins["cluster.queue"].endswith("manyhands.toml line 3")
    assert resolve(environ=environ, flags={"queue": "cpu"}).spec.cluster.queue == "cpu"
    assert resolve(environ={**environ, "XDG_CONFIG_HOME": "/none"}).spec.cluster.on == "here"


def test_a_worker_does_not_read_the_site_file(tmp_path):
    """Its host may have another one, and all workers must have the same settings."""
    environ = site(tmp_path, SITE)
    assert resolve(environ={**environ, min(IDENTITY_VARIABLES): "x"}).spec.cluster.on == "here"


def test_a_setting_of_a_run_in_the_site_file_is_refused(tmp_path):
    with pytest.raises(SpecError, match="seed is a setting of a run, not of a cluster"):
        resolve(environ=site(tmp_path, "[run]\nseed = 3\n"))


def test_the_schema_of_config_files_takes_every_form_of_hosts():
    import msgspec

    schema = json.dumps(msgspec.json.schema(ClusterSection))
    assert all(f'"type": "{kind}"' in schema for kind in ("integer", "string", "array"))


def test_the_documented_site_file_and_object_are_right(tmp_path):
    page = (Path(__file__).parents[2] / "docs/clusters.md").read_text()
    (text,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    spec = resolve(environ=site(tmp_path, text)).spec
    assert (spec.cluster.on, spec.cluster.count, spec.cluster.gpus) == ("slurm", HostCount(2, 8), 4)
    call = ast.parse(page[page.index("mh.Slurm(") :].partition(")))\n")[0] + ")", mode="eval").body
    given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    assert resolve(environ={}, arguments=Slurm(**given).settings()).spec.cluster.count == HostCount(2, 8)
