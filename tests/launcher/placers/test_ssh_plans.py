"""Commands for ssh, and the error of a host that could not start its agent. All pure."""

from __future__ import annotations

import json
import shlex
import subprocess

import pytest

from manyhands.launcher.placers.spec import PlacedRun
from manyhands.launcher.placers.ssh import failure_of, plan
from manyhands.spec.cluster_section import ClusterSection

KEY = "5ec7e7" * 10 + "abcd"
RUN = PlacedRun(
    name="train",
    settings=("--insecure-data-plane",),
    script=("train.py", "--lr", "0.1 $HOME"),
    folder="/home/ada/my work",
    run_dir="/home/ada/my work/runs/a",
    jobs_dir="/home/ada/.manyhands/jobs",
    program=("/env/bin/python", "-m", "manyhands.cli.main"),
    environment={"MANYHANDS_RESUME": "mh run"},
)


def planned(hosts: object = "ash,birch:2", *, detach: bool = False, **settings: object):
    cluster = ClusterSection(on="ssh", hosts=hosts, **settings)
    return plan(cluster, RUN, ("10.0.0.1", 20123), KEY, detach=detach)


def line_on_host(command) -> str:
    """What the shell of the host is given to run."""
    assert command.argv[-1].startswith("exec bash -c ")
    return shlex.split(command.argv[-1])[-1]


def test_the_first_host_runs_mh_run_and_the_others_join_it():
    first, second = planned().commands
    options = ("-oBatchMode=yes", "-oServerAliveInterval=5", "-oServerAliveCountMax=3", "--")
    assert first.argv[:-1] == ("ssh", *options, "ash")
    lines = line_on_host(first).splitlines()
    assert lines[0].startswith("cd '/home/ada/my work' || { echo 'ash has no directory /home/ada/my work.")
    assert shlex.split(lines[1]) == [
        *("exec", "env", "MANYHANDS_RUN_DIR=/home/ada/my work/runs/a", "MANYHANDS_RESUME=mh run"),
        *("MANYHANDS_KEY_FILE=-", "/env/bin/python", "-m", "manyhands.cli.main", "run", "--on=here"),
        *("--insecure-data-plane", "--hosts-wanted=2", "--listen=10.0.0.1:20123", "--lifeline"),
        *("train.py", "--lr", "0.1 $HOME"),
    ]
    assert shlex.split(line_on_host(second).splitlines()[1])[4:] == [
        *("agent", "--join=-", "--ui=none", "--workers=2", "--lifeline"),
    ]
    assert first.stdin == f"{KEY}\n"
    assert json.loads(second.stdin) == {"address": "10.0.0.1:20123", "run": "", "key": KEY}


@pytest.mark.parametrize("detach", [False, True])
def test_the_key_is_in_no_argument_and_in_nothing_that_is_shown(detach):
    found = planned(detach=detach, code="ship")
    assert all(KEY not in word for command in found.commands for word in command.argv)
    assert KEY not in found.text() and KEY not in json.dumps(found.shown())
    assert sum(KEY in command.stdin for command in found.commands) == 2


def test_setup_lines_run_first_and_cannot_read_the_key():
    line = line_on_host(planned(setup=("source env/bin/activate", "export A=1")).commands[0])
    ran = subprocess.run(
        ["bash", "-c", line.split("\nexec ")[0].replace("cd '/home/ada/my work'", "cd /") + "\ncat; echo $A"],
        input=KEY, capture_output=True, text=True, timeout=20,
    )  # fmt: skip
    assert ran.stdout == f"{KEY}1\n"


def test_options_of_the_user_come_before_ours_and_so_count():
    assert planned(extra=("-oBatchMode=no", "-p2222")).commands[0].argv[1:4] == (
        *("-oBatchMode=no", "-p2222", "-oBatchMode=yes"),
    )


def test_one_host_needs_no_key_and_no_address():
    (only,) = planned("ash").commands
    assert only.stdin == ""
    assert "--listen" not in only.argv[-1] and "--hosts-wanted" not in only.argv[-1]


def test_code_is_copied_into_a_directory_of_this_run_on_every_host():
    first, second, run, agent = planned(code="ship").commands
    assert (first.code, second.code, run.code) == (True, True, False)
    assert first.argv[-1] == 'mkdir -p "$HOME"/.manyhands/code/train && tar -x -C "$HOME"/.manyhands/code/train'
    assert all('cd "$HOME"/.manyhands/code/train ||' in line_on_host(one) for one in (run, agent))


def test_detached_agents_have_no_lifeline_and_a_key_in_a_private_file():
    first, second = planned(detach=True).commands
    lines = line_on_host(first).splitlines()
    assert lines[1:4] == [
        "umask 077",
        'mkdir -p "$HOME"/.manyhands/jobs',
        'cat > "$HOME"/.manyhands/jobs/ssh-train-ash.key',
    ]
    assert 'MANYHANDS_KEY_FILE="$HOME"/.manyhands/jobs/ssh-train-ash.key' in lines[4]
    assert '--join="$HOME"/.manyhands/jobs/ssh-train-birch.key' in line_on_host(second)
    assert not first.lifeline and "--lifeline" not in first.argv[-1] + second.argv[-1]


@pytest.mark.parametrize(
    ("code", "said", "what"),
    [
        (255, "ssh: connect to host ash port 22: Connection refused", "ash cannot be reached: ssh: connect to"),
        (255, "No ED25519 host key is known\nHost key verification failed.", "ash is not known to ssh by its key"),
        (255, "REMOTE HOST IDENTIFICATION HAS CHANGED!\nHost key verification failed.", "ash has another key than"),
        (255, "ada@ash: Permission denied (publickey).", "ash did not accept this user"),
        (127, "bash: line 1: /env/bin/python: No such file", "ash could not start mh"),
    ],
)
def test_a_host_that_did_not_start_its_agent_is_named_with_what_ssh_said(code, said, what):
    error = failure_of("ash", code, said)
    assert error is not None and error.what.startswith(what) and error.exit_code == 3
    assert error.fix


@pytest.mark.parametrize("code", [0, 1, 2, 3, 75, 143])
def test_an_agent_that_ended_by_itself_is_no_failure_of_ssh(code):
    assert failure_of("ash", code, "whatever") is None


def test_a_host_that_is_lost_while_it_trains_is_left_to_the_run():
    assert failure_of("ash", 255, "Connection to 10.0.0.2 closed by remote host.") is None
    assert failure_of("ash", 255, "Timeout, server ash not responding.") is None
