"""`mh run` up to the moment where processes would start: what is placed where, and what is refused."""

import json
import os
import socket

import pytest

from manyhands.cli.main import cli, report
from manyhands.errors import ManyhandsError
from manyhands.launcher.launch import ALLOCATOR, WAITING_CHOICES, WAITING_THREADS
from manyhands.spec.load import CONFIG_VARIABLE

ENGINES = ("SLURM_", "OMPI_", "PMI", "FLUX_")


@pytest.fixture
def plan(tmp_path, monkeypatch, capsys):
    """`mh run --dry-run --json …` in a directory with train.py; the printed plan."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in [name for name in os.environ if name.startswith(("MANYHANDS_", "PET_", "TF_CONFIG", *ENGINES))]:
        monkeypatch.delenv(name)
    (tmp_path / "train.py").write_text("print('hello')\n")

    def run(*words: str, **environ: str):
        for name, text in environ.items():
            monkeypatch.setenv(name, text)
        cli.main(["run", "--dry-run", "--json", *words], prog_name="mh", standalone_mode=False)
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def refused(plan):
    def run(*words: str, **environ: str) -> ManyhandsError:
        with pytest.raises(ManyhandsError) as caught:
            plan(*words, **environ)
        return caught.value

    return run


def test_workers_get_ranks_on_this_host_and_the_rest_of_the_line_is_the_scripts(plan):
    shown = plan("-n", "3", "--seed=5", "train.py", "--seed", "7", "-n", "--", "x")
    assert (shown["hosts"], shown["ranks"], shown["master"]) == (1, [0, 1, 2], None)
    assert shown["command"] == {"kind": "script", "target": "train.py", "args": ["--seed", "7", "-n", "--", "x"]}
    assert shown["flags"] == {"run.seed": 5, "launch.workers": 3}


def test_a_run_with_servers_is_elastic_and_counts_them_beside_its_workers(plan, tmp_path):
    shown = plan("--servers", "2", "-n", "4", "train.py")
    assert (shown["servers"], shown["ranks"], shown["elastic"]) == (2, [0, 1, 2, 3], [1, 4])
    assert shown["flags"] == {"launch.workers": 4, "launch.servers": 2}
    assert plan("--servers", "1", "-n", "2", "--elastic", "2:6", "train.py")["elastic"] == [2, 6]
    (tmp_path / "run.toml").write_text("[launch]\nservers = 3\n")
    assert plan("--config", "run.toml", "train.py")["servers"] == 3
    assert plan("--config", "run.toml", "train.py", MANYHANDS_SERVERS="4")["servers"] == 4


def test_no_servers_are_refused(refused):
    assert "[launch] servers is 0, but must be at least 1" in refused("--servers", "0", "train.py").what


def test_a_clusters_ps_tasks_are_hosts_with_a_server_each_and_its_chief_only_coordinates(plan, refused):
    cluster = {
        "chief": ["127.0.0.1:2001"],
        "worker": ["127.0.0.1:2002", "127.0.0.1:2003"],
        "ps": ["127.0.0.1:2004", "127.0.0.1:2005"],
    }

    def tf_config(job: str, index: int = 0) -> str:
        return json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})

    def of(job: str, index: int = 0) -> tuple:
        shown = plan("--strategy", "parameter_server", "-n", "3", "train.py", TF_CONFIG=tf_config(job, index))
        assert (shown["hosts"], shown["servers"], shown["elastic"]) == (5, 2, [1, 6])
        assert (shown["trains"], shown["ranks"], shown["master"]) == (True, None, "127.0.0.1:2001")
        return shown["host"], shown["workers"], shown["server"], shown["coordinator"]

    assert of("chief") == (0, 0, None, True)
    assert [of("worker", index) for index in (0, 1)] == [(1, 3, None, False), (2, 3, None, False)]
    assert [of("ps", index) for index in (0, 1)] == [(3, 0, 0, False), (4, 0, 1, False)]
    wrong = refused("--servers", "3", "train.py", TF_CONFIG=tf_config("ps"))
    assert "3 parameter servers are requested, but the cluster has 2 ps tasks" in wrong.what
    assert plan("train.py", TF_CONFIG=tf_config("ps"))["trains"] is False, "under other strategies it waits"
    cluster.pop("worker")
    nobody = refused("--servers", "2", "train.py", TF_CONFIG=tf_config("chief"))
    assert "a chief coordinates and does not train" in nobody.what


def test_a_recipe_is_a_module_of_ours_and_what_follows_is_its_own(plan, refused):
    shown = plan("-n", "2", "--recipe", "recommender", "--", "--rows", "500", "x")
    wanted = {"kind": "module", "target": "manyhands.recipes.recommender", "args": ["--rows", "500", "x"]}
    assert (shown["ranks"], shown["command"]) == ([0, 1], wanted)
    assert plan("--recipe", "digits")["command"]["args"] == []
    error = refused("--recipe", "digit")
    assert (error.what, error.fix[0], error.exit_code) == ("There is no recipe 'digit'.", "--recipe digits", 2)
    assert (refused().what, refused().exit_code) == ("Neither SCRIPT nor --recipe was given.", 2)


def test_two_dashes_end_our_flags(plan):
    assert plan("-n", "2", "--", "train.py", "--help")["command"]["args"] == ["--help"]


def test_a_module_is_started_by_name(plan):
    assert plan("-m", "train", "-x")["command"] == {"kind": "module", "target": "train", "args": ["-x"]}
    assert plan("-m", "json.tool")["command"]["target"] == "json.tool"


def test_workers_find_the_config_file_and_the_allocator_settings(plan, tmp_path):
    (tmp_path / "run.toml").write_text("[launch]\nworkers = 2\n")
    shown = plan("--config", "run.toml", "train.py")
    assert shown["workers"] == 2
    assert shown["environment"][CONFIG_VARIABLE] == str(tmp_path / "run.toml")
    assert ALLOCATOR.items() <= shown["environment"].items()
    assert "MALLOC_TRIM_THRESHOLD_" not in plan("--allocator", "system", "train.py")["environment"]
    assert "MALLOC_TRIM_THRESHOLD_" not in plan("train.py", MALLOC_TRIM_THRESHOLD_="7")["environment"]


def test_threads_that_wait_for_each_other_sleep_soon_unless_the_user_has_decided(plan, monkeypatch):
    for name in WAITING_CHOICES:
        monkeypatch.delenv(name, raising=False)
    assert WAITING_THREADS.items() <= plan("train.py")["environment"].items()
    assert not WAITING_THREADS.keys() & plan("train.py", OMP_WAIT_POLICY="ACTIVE")["environment"].keys()
    monkeypatch.delenv("OMP_WAIT_POLICY")
    assert "GOMP_SPINCOUNT" not in plan("train.py", GOMP_SPINCOUNT="7")["environment"]


def test_torchruns_usual_commands_are_understood(plan):
    assert plan("--standalone", "--nproc-per-node=2", "train.py")["ranks"] == [0, 1]
    assert plan("--standalone", "--nproc_per_node=2", "--nnodes=1", "train.py")["ranks"] == [0, 1]
    shown = plan("--nnodes=2", "--nproc_per_node", "2", "--node_rank=1", "--master_port=1234", "-t", "3", "train.py")
    assert (shown["hosts"], shown["host"], shown["ranks"]) == (2, 1, [2, 3])
    assert (shown["coordinator"], shown["master"]) == (False, "127.0.0.1:1234")
    assert [note.partition(" ")[0] for note in shown["notes"]] == ["--tee"]


def test_pet_variables_replace_flags_that_are_not_given(plan):
    shown = plan("train.py", PET_NNODES="2", PET_NPROC_PER_NODE="3", PET_NODE_RANK="1", PET_MAX_RESTARTS="7")
    assert shown["ranks"] == [3, 4, 5]
    assert shown["flags"] == {"run.max_restarts": 7}
    assert plan("--node-rank", "0", "train.py")["ranks"] == [0, 1, 2]


def test_no_python_unwraps_a_python_command(plan, refused, tmp_path):
    unwrapped = {"kind": "script", "target": "train.py", "args": ["a"]}
    assert plan("--no-python", "python3", "-u", "train.py", "a")["command"] == unwrapped
    assert plan("--no-python", "python", "-m", "train", "a")["command"]["kind"] == "module"
    (tmp_path / "train").write_text("#!/usr/bin/env python3\n")
    assert plan("--no-python", "train")["command"]["target"] == "train"
    assert "not a Python script" in refused("--no-python", "/bin/sh", "x").what


CLUSTER = {"chief": ["127.0.0.1:4001"], "worker": ["127.0.0.1:4002"], "ps": ["127.0.0.1:4003"]}


def tf_config(kind, cluster=CLUSTER):
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": 0}})


def test_tf_config_makes_this_host_a_task(plan):
    chief = plan("-n", "2", "train.py", TF_CONFIG=tf_config("chief"))
    assert (chief["hosts"], chief["ranks"], chief["coordinator"]) == (2, [0, 1], True)
    worker = plan("-n", "2", "train.py", TF_CONFIG=tf_config("worker"))
    assert (worker["ranks"], worker["master"]) == ([2, 3], "127.0.0.1:4001")
    assert not plan("train.py", TF_CONFIG=tf_config("ps"))["trains"]
    assert plan("--standalone", "train.py")["hosts"] == 1


def test_a_script_that_does_not_exist_is_refused_with_the_nearest_name(refused):
    error = refused("trian.py")
    assert (error.what, error.fix, error.exit_code) == ("There is no script trian.py.", ("train.py",), 2)
    assert "no module nowhere" in refused("-m", "nowhere.train").what


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--nnodes", "4:1"], "a number from 4 to"),
        (["-n", "2", "--nproc-per-node", "3"], "2 workers, and --nproc-per-node 3"),
        (["--hosts-wanted", "2"], "no address at which to reach this one"),
        (["--listen", "0.0.0.0"], "every interface"),
        (["--slices", "0"], "slices is 0"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(refused, words, says):
    error = refused(*words, "train.py")
    assert says in error.what
    assert error.exit_code == 2


def test_addresses_beyond_loopback_need_a_key(refused, plan, tmp_path):
    words = ("--nnodes", "2", "--master-addr", "10.0.0.1", "train.py")
    error = refused(*words)
    assert (error.exit_code, error.fix[0]) == (3, "mh keygen run.key")
    cli.main(["keygen", "run.key"], standalone_mode=False)
    assert oct((tmp_path / "run.key").stat().st_mode)[-3:] == "600"


@pytest.mark.parametrize(
    ("content", "mode", "says"),
    [
        (None, 0o600, "Cannot read"),
        ("a" * 64, 0o644, "can be read by others"),
        ("a" * 64, 0o660, "can be read by others"),
        ("a" * 63, 0o600, "does not contain a key"),
    ],
)
def test_a_missing_open_or_wrong_key_file_ends_with_3(refused, tmp_path, content, mode, says):
    path = tmp_path / "run.key"
    if content is not None:
        path.write_text(content)
        path.chmod(mode)
    error = refused("--nnodes", "2", "--master-addr", "10.0.0.1", "train.py", MANYHANDS_KEY_FILE=str(path))
    assert says in error.what
    assert (error.exit_code, error.where) == (3, "MANYHANDS_KEY_FILE")
    assert content is None or content not in str(error)


def test_the_key_is_in_no_plan_and_in_no_workers_environment(plan, tmp_path):
    (tmp_path / "run.key").write_text("ab" * 32)
    (tmp_path / "run.key").chmod(0o600)
    shown = plan("--nnodes", "2", "--master-addr", socket.gethostname(), "train.py", MANYHANDS_KEY_FILE="run.key")
    assert "ab" * 32 not in json.dumps(shown)
    assert "MANYHANDS_KEY_FILE" not in shown["environment"]


def test_an_unknown_flag_is_a_usage_error(plan, capsys):
    with pytest.raises(Exception, match="no flag --wrokers") as caught:
        plan("--wrokers", "2", "train.py")
    assert report(caught.value, open(os.devnull, "w")) == 2  # noqa: SIM115


@pytest.mark.parametrize(
    "engine",
    [
        {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"},
        {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
    ],
)
def test_the_same_run_in_several_tasks_of_an_engine_is_refused_unless_the_other_tasks_are_given(plan, refused, engine):
    assert refused("train.py", **engine).exit_code == 2
    assert refused("--nproc-per-node", "2", "train.py").exit_code == 2
    assert refused("--elastic", "1:4", "--listen", "127.0.0.1", "train.py").exit_code == 2
    together = plan("--nnodes=2", "--node-rank=1", "--master-addr=127.0.0.1", "train.py")
    assert (together["hosts"], together["host"]) == (2, 1)
    assert plan("--standalone", "train.py")["hosts"] == 1, "each for itself, and it was said"


def test_one_task_of_an_engine_is_a_run_as_any_other(plan):
    batch = {"SLURM_JOB_ID": "3", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
    assert plan("-n", "2", "train.py", **batch)["ranks"] == [0, 1]
    assert plan("train.py", OMPI_COMM_WORLD_SIZE="1", OMPI_COMM_WORLD_RANK="0", PMIX_RANK="0")["hosts"] == 1
