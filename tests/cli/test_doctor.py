"""`mh doctor`: finds nothing wrong where all is well, and what is wrong where it is not, with what to do."""

import json
import os
import subprocess
import sys
import textwrap
import time

import pytest
from click.testing import CliRunner

from manyhands.cli.machine.doctor import doctor
from manyhands.launcher import machine_check
from manyhands.launcher.machine_check import CheckResult, all_reduce, cores, disk, examine, judge_load, load, packages


@pytest.mark.slow
def test_this_machine_can_train_and_every_check_says_so(tmp_path):
    """The real thing, from the command line: it starts two processes that sum over Gloo."""
    command = [sys.executable, "-m", "manyhands.cli.main", "doctor", "--json", "--run-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    assert document["ok"]
    assert [finding["check"] for finding in document["findings"]] == [
        *(
            "python",
            "packages",
            "cores",
            "load",
            "memory",
            "loopback",
            "shared memory",
            "native",
            "disk",
            "clock",
            "open files",
        ),
        *("encryption", "accelerators", "torch names", "all-reduce"),
    ]
    assert os.listdir(tmp_path) == [], "it leaves nothing behind"


def test_a_failed_check_ends_with_3_and_says_what_to_do(monkeypatch):
    found = [CheckResult("disk", "ok", "roomy"), CheckResult("loopback", "fail", "down", fix=["ip link set lo up"])]
    monkeypatch.setattr("manyhands.cli.machine.doctor.examine", lambda run_dir, environ: iter(found))
    done = CliRunner().invoke(doctor, [])
    assert done.exit_code == 3
    assert done.output.splitlines() == [
        "ok    disk           roomy",
        "fail  loopback       down",
        "      try: ip link set lo up",
        "This machine cannot train yet: loopback.",
    ]
    as_json = CliRunner().invoke(doctor, ["--json"])
    assert as_json.exit_code == 3
    assert json.loads(as_json.output)["ok"] is False


def test_a_warning_does_not_fail(monkeypatch):
    found = [CheckResult("memory", "warn", "little", fix=["end other programs"])]
    monkeypatch.setattr("manyhands.cli.machine.doctor.examine", lambda run_dir, environ: iter(found))
    assert CliRunner().invoke(doctor, []).exit_code == 0


def test_a_check_that_cannot_look_is_a_finding_not_a_traceback(monkeypatch, tmp_path):
    def breaks():
        raise RuntimeError("no such thing here")

    monkeypatch.setattr(machine_check, "memory", breaks)
    monkeypatch.setattr(machine_check, "all_reduce", list)
    (memory,) = [finding for finding in examine(tmp_path, {}) if finding.check == "memory"]
    assert memory.verdict == "fail"
    assert "RuntimeError: no such thing here" in memory.text


def test_missing_and_old_packages_are_named():
    finding = packages({"msgspec": "99", "there-is-no-such-package": "1"})
    assert finding.verdict == "fail"
    assert "missing: there-is-no-such-package" in finding.text
    assert "too old: msgspec" in finding.text
    assert finding.fix


def test_another_torch_than_the_tested_one_is_warned_about(monkeypatch):
    monkeypatch.setattr(machine_check.importlib.metadata, "version", lambda name: "2.14.1+cpu")
    finding = packages({"torch": "2.13"})
    assert finding.verdict == "warn"
    assert "torch 2.14.1" in finding.text


def test_private_names_that_torch_lacks_are_named_with_what_cannot_run():
    fine = machine_check.private_names(40, [])
    assert fine.verdict == "ok" and "all 40" in fine.text
    slower = machine_check.private_names(40, [("torch._foreach_add_", "sums", "a loop over tensors", [])])
    assert slower.verdict == "warn" and "torch._foreach_add_, for sums (a loop over tensors)" in slower.text
    fatal = machine_check.private_names(40, [("torch.utils._pytree", "nested batches", "", ["*"])])
    assert fatal.verdict == "fail" and "every strategy" in fatal.fix[1]


def test_a_container_with_fewer_cores_than_it_shows_is_warned_about(monkeypatch):
    monkeypatch.setattr(machine_check, "_cpu_quota", lambda: 0.5)
    assert cores({}).verdict == "warn"
    assert "OMP_NUM_THREADS=3" in cores({"OMP_NUM_THREADS": "3"}).text


@pytest.mark.parametrize(
    ("average", "cores", "stalled", "verdict"),
    [
        (0.3, 2, 0.5, "ok"),
        (2.9, 2, 90.0, "ok"),  # two workers and little else
        (8.0, 2, 97.0, "warn"),
        (8.0, 16, 1.0, "ok"),
        (8.0, 2, 3.0, "ok"),  # it was, and is over
        (8.0, 2, None, "warn"),
    ],
)
def test_an_overloaded_machine_is_warned_about(average, cores, stalled, verdict):
    found = judge_load(average, cores, stalled)
    assert found.verdict == verdict
    assert found.text.startswith(f"{average:.1f} processes running or ready on {cores} cores")
    assert ("overloaded" in found.text) == bool(found.fix) == (verdict == "warn")


def test_the_load_of_this_machine_is_known():
    assert load().facts["load_average"] >= 0


def test_the_disk_check_looks_at_the_nearest_directory_there_is_and_makes_none(tmp_path):
    finding = disk(tmp_path / "not" / "yet")
    assert finding.verdict == "ok", finding
    assert finding.facts["path"] == str(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_file_system_with_torn_renames_fails(monkeypatch, tmp_path):
    def torn_replace(self, target):
        target.unlink()
        time.sleep(0.001)
        os.rename(self, target)

    monkeypatch.setattr(machine_check.Path, "replace", torn_replace)
    assert disk(tmp_path).verdict == "fail"


@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="NOT SHOWN HERE: mounting a small or read-only disk needs root"
)
@pytest.mark.parametrize(("options", "verdict"), [("ro", "fail"), ("size=64k", "fail"), ("size=16m", "warn")])
def test_a_read_only_or_full_disk_fails_and_a_small_one_is_warned_about(tmp_path, options, verdict):
    script = """
        import pathlib, subprocess, sys
        from manyhands.launcher.machine_check import disk
        subprocess.run(["mount", "-t", "tmpfs", "-o", sys.argv[2], "none", sys.argv[1]], check=True)
        print(disk(pathlib.Path(sys.argv[1])).verdict)
    """
    command = ["unshare", "--mount", sys.executable, "-c", textwrap.dedent(script), str(tmp_path), options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.stdout == f"{verdict}\n", done.stderr


def test_a_sum_that_never_ends_is_given_up_and_its_processes_are_gone(tmp_path):
    note = tmp_path / "pids"
    hang = f"import os, time; open({str(note)!r}, 'a').write(f'{{os.getpid()}}\\n'); time.sleep(300)"
    (finding,) = all_reduce(hang, timeout_s=2.0)
    assert finding.verdict == "fail"
    assert "within 2 s" in finding.text
    for pid in note.read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_a_sum_whose_process_fails_names_it_with_its_last_words():
    crash = "import sys; sys.exit('no torch today') if sys.argv[1] == '1' else None"
    (finding,) = all_reduce(crash)
    assert finding.text == "process 1 failed: no torch today"
