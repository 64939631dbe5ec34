"""Which words of a command go on to the agents, what is refused before it waits, and `--print`, `--dry-run`."""

from __future__ import annotations

import json
import subprocess

import pytest

from manyhands.cli.main import cli
from manyhands.control.messages.launch_request import WorkerCommand
from manyhands.errors import ManyhandsError, SpecError, UsageError
from manyhands.launcher.placers.shell import is_elsewhere
from manyhands.launcher.placers.shipping import tracked_files
from manyhands.launcher.placers.spec import Kubernetes, PlacedRun, Slurm, Ssh
from manyhands.launcher.placers.submission import placed_run
from manyhands.spec.load import resolve
from manyhands.strategies.choices import Mirrored

SCRIPT = WorkerCommand("script", "train.py", ["--lr", "0.1"])
HOME = {"HOME": "/home/ada"}


def placed(
    environ: dict[str, str] | None = None, arguments: dict[str, object] | None = None, **flags: object
) -> PlacedRun:
    found = {**HOME, **(environ or {})}
    resolved = resolve(flags=flags, arguments=arguments, environ=found)
    return placed_run(resolved, SCRIPT, "/home/ada/project", found, "mh run")


def test_flags_go_on_and_those_of_the_cluster_do_not():
    run = placed(on="slurm", hosts="2", queue="gpu", insecure_data_plane=True, seed=3, every_s="none", check_loss=False)
    assert run.settings == ("--seed=3", "--no-check-loss", "--insecure-data-plane", "--every-s=none", "--grace=50")
    assert run.script == ("train.py", "--lr", "0.1")
    assert run.run_dir.startswith("/home/ada/project/runs/") and run.jobs_dir == "/home/ada/.manyhands/jobs"


def test_workers_of_a_script_that_places_itself_are_started_by_its_number():
    run = placed(arguments={"on": "slurm", "workers": 2, "servers": 1, "strategy": "parameter_server", "seed": 5})
    assert (run.workers, run.settings) == (2, ("--servers=1", "--grace=50"))  # its seed is the script's own


def test_settings_of_the_environment_go_on_where_the_placer_does_not_pass_it():
    environ = {"MANYHANDS_SEED": "4", "MANYHANDS_ELASTIC": "1:2", "MANYHANDS_KEY_FILE": "/secret"}
    assert placed(environ, on="slurm").environment == {"MANYHANDS_RESUME": "mh run"}
    by_ssh = placed(environ, hosts="a,b", insecure_data_plane=True).environment
    assert by_ssh == {"MANYHANDS_RESUME": "mh run", "MANYHANDS_SEED": "4", "MANYHANDS_ELASTIC": "1:2"}


def test_a_function_and_a_module_are_what_they_are():
    resolved = resolve(flags={"on": "slurm"}, environ=HOME)
    module = placed_run(resolved, WorkerCommand("module", "package.train", []), "/x", HOME, "mh run")
    assert module.script == ("-m", "package.train")
    with pytest.raises(UsageError, match="processes of this host only"):
        placed_run(resolved, WorkerCommand("call", "m:f", ["{}"]), "/x", HOME, "mh run")


def test_files_that_have_other_directories_above_them_there_are_named_from_the_working_directory():
    """A script that places itself is known by its whole path."""
    script = WorkerCommand("script", "/home/ada/project/deep/train.py", [])
    for flags in ({"on": "slurm", "code": "ship"}, {"on": "kubernetes", "image": "i"}):
        resolved = resolve(flags=flags, environ=HOME)
        assert placed_run(resolved, script, "/home/ada/project", HOME, "mh run").script == ("deep/train.py",)
        with pytest.raises(UsageError, match="is not below /home/ada/other"):
            placed_run(resolved, script, "/home/ada/other", HOME, "mh run")
    stays = resolve(flags={"on": "slurm"}, environ=HOME)
    assert placed_run(stays, script, "/x", HOME, "mh run").script == ("/home/ada/project/deep/train.py",)


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ({"on": "slurm", "hosts": "2"}, "would be sent unencrypted"),
        ({"on": "slurm", "hosts_wanted": 2, "listen": "10.0.0.1"}, "are to join by hand"),
        ({"on": "slurm", "array": "0-3", "hosts": "1:2", "insecure_data_plane": True}, "helper jobs belong to one run"),
        ({"hosts": "a,b", "array": "0-3", "insecure_data_plane": True}, "an array is Slurm's"),
        (
            {"on": "slurm", "hosts": "1:2", "elastic": "1:4", "insecure_data_plane": True},
            "The workers follow from hosts",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_it_waits_in_a_queue(flags, what):
    with pytest.raises(ManyhandsError, match=what) as refused:
        placed(**flags)
    assert refused.value.fix and refused.value.exit_code in (2, 3)


def test_who_places_agents_has_to_be_said_where_there_are_several_hosts():
    assert is_elsewhere(resolve(flags={"on": "slurm"}, environ={}), {})
    assert is_elsewhere(resolve(flags={"hosts": "a,b"}, environ={}), {})
    assert not is_elsewhere(resolve(environ={}), {})
    with pytest.raises(UsageError, match="but not who starts agents on them"):
        is_elsewhere(resolve(flags={"hosts": "4"}, environ={}), {})


def test_an_agent_that_slurm_placed_is_not_submitted_again():
    """A site's file says on = "slurm" to it as well."""
    resolved = resolve(environ={"MANYHANDS_ON": "slurm", "MANYHANDS_HOSTS": "4"})
    assert not is_elsewhere(resolved, {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"})
    assert not is_elsewhere(resolved, {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"})
    inner = resolve(flags={"on": "here"}, environ={"MANYHANDS_ON": "slurm", "MANYHANDS_HOSTS": "4"})
    assert not is_elsewhere(inner, {})


def test_objects_of_a_script_are_the_same_settings():
    assert Slurm(hosts=(2, 8), queue="gpu").settings() == {"on": "slurm", "hosts": (2, 8), "queue": "gpu"}
    assert Ssh(hosts="a,b:2").settings() == {"on": "ssh", "hosts": "a,b:2"}
    assert Kubernetes(image="i").settings() == {"on": "kubernetes", "image": "i", "hosts": 1}
    for given in (Slurm(hosts=(2, 8), setup=("x",), notice=90, requeue=False), Ssh(hosts="a"), Kubernetes(image="i")):
        resolve(arguments=given.settings(), environ={})
    with pytest.raises(SpecError, match="hosts"):
        Slurm(hosts=(8, 2))
    with pytest.raises(SpecError, match="which places no agents"):
        Mirrored(on="slurm")


@pytest.fixture
def mh(tmp_path, monkeypatch, capsys):
    """`mh run` in this process, in a directory with a script; returns what it printed."""
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> str:
        cli.main(["run", *words, "train.py"], standalone_mode=False)
        return str(capsys.readouterr().out)

    return run


def test_print_is_the_script_and_a_dry_run_its_values_and_neither_starts_anything(mh, tmp_path):
    printed = mh("--on", "slurm", "-N", "2:4", "--insecure-data-plane", "--print")
    assert printed.startswith("sbatch --parsable <<'END'\n#!/bin/bash\n#SBATCH --job-name=")
    plan = json.loads(mh("--hosts", "n1,n2", "--insecure-data-plane", "--dry-run"))
    assert [one["stdin"] for one in plan["commands"]] == ["(the run's key)"] * 2
    shown = json.loads(mh("--on", "kubernetes", "--image", "i", "--print"))
    assert [item["kind"] for item in shown["items"]] == ["Secret", "JobSet"]
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_flags_that_say_how_hosts_find_each_other_are_refused_beside_a_placer(mh):
    with pytest.raises(UsageError, match="--nnodes says how hosts find each other, which slurm does here"):
        mh("--on", "slurm", "--nnodes=2")
    with pytest.raises(UsageError, match="--print is for runs whose agents are placed elsewhere"):
        mh("--print")


def test_only_tracked_files_that_are_there_are_shipped(tmp_path):
    for name in ("kept.py", "gone.py", "new.py"):
        (tmp_path / name).touch()
    for git in (("init", "-q"), ("add", "kept.py", "gone.py")):
        subprocess.run(["git", *git], cwd=tmp_path, check=True, timeout=20)
    (tmp_path / "gone.py").unlink()
    assert tracked_files(str(tmp_path)) == ["kept.py"]
