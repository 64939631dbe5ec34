"""`mh run --hosts` over real sshd: trains, ends with its client, copies code, and names the host that is no use."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from manyhands.control.run_directory import read_run
from tests.launcher.placers.hosts import finish
from tests.launcher.placers.real_ssh import SshHosts, ssh_hosts, why_not

pytestmark = pytest.mark.faults
MH = [sys.executable, "-m", "manyhands.cli.main"]
TRAIN = """
import os, socket, sys, time, torch, manyhands as mh
class Pause:
    def after_step(self, trainer, step, stats):
        time.sleep(float(sys.argv[2]))
        open(f"on-{socket.gethostname()}", "w").write(str(step))
if __name__ == "__main__":
    rows = torch.arange(64.0).reshape(16, 4) / 64
    data = torch.utils.data.TensorDataset(rows, rows.sum(1, keepdim=True))
    torch.manual_seed(1)
    loss = lambda model, batch: torch.nn.functional.mse_loss(model(batch[0]), batch[1])
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.01)
    trainer = mh.Trainer(torch.nn.Linear(4, 1), loss, optimizer, hooks=[Pause()])
    trainer.fit(data, epochs=int(sys.argv[1]), batch_size=16)
    print("trained", trainer.step, "steps", flush=True)
"""


@pytest.fixture(scope="module")
def ssh() -> Iterator[SshHosts]:
    if (why := why_not()) is not None:
        pytest.skip(why)
    with ssh_hosts() as found:
        yield found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def until(what: Callable[[], object], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def words(ssh: SshHosts, hosts: str, *more: str) -> list[str]:
    return [*MH, "run", "--hosts", hosts, *ssh.flags, *more]


def test_two_hosts_train_together_and_end_when_their_client_is_killed(ssh, folder):
    client = ssh.start(*words(ssh, "n1,n2:2", "--run-dir", "r", "train.py", "100000", "0.02"), cwd=folder)
    until(lambda: (folder / "on-n1").exists() and (folder / "on-n2").exists())
    assert [len(ssh.agents(name)) > 0 for name in ("n1", "n2")] == [True, True]
    assert _keys_held(ssh) == []
    client.kill()
    finish(client)
    until(lambda: not ssh.agents("n1") and not ssh.agents("n2"))
    record = read_run(folder / "r")
    assert (record.status, record.exit_code) == ("stopped", 75)


def _keys_held(ssh: SshHosts) -> list[str]:
    """Any 64 hexadecimal digits in what other users could see of the run's processes."""
    found = []
    for name in ssh.hosts.addresses:
        for pid in ssh.hosts.processes(name):
            for file in ("cmdline", "environ"):
                try:
                    text = Path(f"/proc/{pid}/{file}").read_bytes()
                except OSError:
                    continue
                found += [one.decode() for one in re.findall(rb"(?<![0-9a-fA-F])[0-9a-f]{64}(?![0-9a-fA-F])", text)]
    return found


@pytest.mark.long
def test_a_host_that_ssh_does_not_know_or_cannot_reach_is_named_and_the_others_end(ssh, folder):
    ssh.known.write_text("\n".join(line for line in ssh.known.read_text().splitlines() if not line.startswith("n2")))
    try:
        code, output = ssh.run(*words(ssh, "n1,n2", "train.py", "5", "0"), cwd=folder)
    finally:
        public = (ssh.folder / "host.pub").read_text()
        ssh.known.write_text("".join(f"{name} {public}" for name in ssh.hosts.names))
    assert code == 3
    assert "EnvironmentProblem: n2 is not known to ssh by its key" in output
    assert "try: ssh n2, which shows the key; accept it if it is the right one" in output
    until(lambda: not ssh.agents("n1"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("hosts", "says"),
    [
        ("n1,n9", "n9 cannot be reached"),
        ("n9,n1", "n9 has no address here"),
        ("n1,login", "login cannot be reached: ssh: connect to host login port 22: Connection refused"),
    ],
)
def test_a_host_that_is_not_there_ends_the_run_with_its_name(ssh, folder, hosts, says):
    code, output = ssh.run(*words(ssh, hosts, "train.py", "5", "0"), cwd=folder)
    assert code == 3 and says in output, output


@pytest.mark.long
def test_ctrl_c_commits_a_checkpoint_and_the_same_command_resumes(ssh, folder):
    command = words(ssh, "n1,n2", "--run-dir", "r", "train.py", "60", "0.1")
    client = ssh.start(*command, cwd=folder)
    until(lambda: (folder / "on-n2").exists())
    client.send_signal(signal.SIGINT)
    code, output = finish(client)
    assert code == 75 and "committed checkpoint" in output, output
    assert f"resume: mh run --hosts n1,n2 {ssh.flags[0]} --run-dir r train.py" in output
    code, output = ssh.run(*command, cwd=folder)
    assert code == 0 and "resumed at step" in output and "trained 60 steps" in output, output


@pytest.mark.long
def test_code_is_shipped_to_hosts_that_do_not_have_it(ssh, folder):
    code, output = ssh.run(*words(ssh, "n1,n2", "--code", "ship", "train.py", "5", "0"), cwd=folder)
    assert code == 2 and "try: git init and git add" in output
    for git in (("init", "-q"), ("add", "train.py")):
        subprocess.run(["git", *git], cwd=folder, check=True, timeout=20)
    (folder / "data.bin").write_bytes(b"x" * 1000)  # not tracked: it stays here
    code, output = ssh.run(*words(ssh, "n1,n2", "--code", "ship", "train.py", "5", "0"), cwd=folder)
    assert code == 0 and "n2: copying 1 files" in output and "trained 5 steps" in output, output
    (shipped,) = (ssh.home / ".manyhands/code").iterdir()
    assert {path.name for path in shipped.iterdir()} >= {"train.py", "on-n1", "on-n2"}
    assert not (shipped / "data.bin").exists() and not (folder / "on-n1").exists()


@pytest.mark.long
def test_more_code_than_the_limit_is_refused_with_the_largest_file(ssh, folder):
    with open(folder / "weights.bin", "wb") as file:
        file.truncate(150 * 10**6)
    for git in (("init", "-q"), ("add", ".")):
        subprocess.run(["git", *git], cwd=folder, check=True, timeout=60)
    code, output = ssh.run(*words(ssh, "n1,n2", "--code", "ship", "train.py", "5", "0"), cwd=folder)
    assert code == 2 and "150 MB; at most 100 MB" in output and "The largest is weights.bin" in output, output


@pytest.mark.long
def test_a_detached_run_outlives_its_client(ssh, folder):
    command = words(ssh, "n1,n2", "--detach", "--json", "--run-dir", "r", "train.py", "40", "0.05")
    code, output = ssh.run(*command, cwd=folder)
    assert code == 0 and json.loads(output.splitlines()[-1])["hosts"] == ["n1", "n2"], output
    until(lambda: (folder / "r/run.json").exists() and read_run(folder / "r").status == "finished")
    until(lambda: not ssh.agents("n1") and not ssh.agents("n2"))
    secrets = list((ssh.home / ".manyhands/jobs").glob("*.key"))
    assert all(path.stat().st_mode & 0o77 == 0 for path in secrets)


@pytest.mark.long
def test_a_program_or_directory_that_a_host_does_not_have_is_said(ssh, folder):
    code, output = ssh.run(*words(ssh, "n1,n2", "--setup", "PATH=/nowhere", "train.py", "5", "0"), cwd=folder)
    assert code == 3 and "could not start mh" in output, output
