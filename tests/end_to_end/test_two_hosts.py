"""Two hosts train together; strangers do not get in. The hosts are network namespaces."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from namespaces import ADDRESSES, two_hosts, why_not

SCRIPT = Path(__file__).with_name("small_training.py")
MH = [sys.executable, "-m", "manyhands.cli.main"]
REASON = why_not()

pytestmark = [pytest.mark.slow, pytest.mark.skipif(REASON is not None, reason=str(REASON))]


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[list[str], list[str]]]:
    with two_hosts() as prefixes:
        yield prefixes


def start(prefix: list[str], *words: str, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([*prefix, *words], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(path: Path, deadline_s: float = 20.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.05)


def digest(output: str) -> str:
    found = re.search(r"weights (\w+)", output)
    assert found, output
    return found.group(1)


def lead(prefix: list[str], cwd: Path, name: str, *words: str) -> subprocess.Popen[str]:
    return start(
        prefix, *MH, "run", "-n", "1", "--run-dir", name, "--hosts-wanted", "2", "--listen", ADDRESSES[0],
        "--join-file", f"{name}.join", *words, str(SCRIPT), "--strategy", "multi_worker", "--pause", "0.05", cwd=cwd,
    )  # fmt: skip


def test_two_hosts_end_where_one_process_ends_bit_for_bit(hosts: tuple[list[str], list[str]], tmp_path: Path) -> None:
    alone = subprocess.run(
        [*MH, "run", "-n", "1", "--ui", "none", "--run-dir", "alone", str(SCRIPT)],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    first = lead(hosts[0], tmp_path, "both", "--insecure-data-plane")
    wait_for(tmp_path / "both.join")
    assert (tmp_path / "both.join").stat().st_mode & 0o777 == 0o600
    second = start(hosts[1], *MH, "agent", "--join", "both.join", cwd=tmp_path)
    out, err = first.communicate(timeout=60)
    second.communicate(timeout=30)
    assert first.returncode == second.returncode == 0, err
    assert digest(out) == digest(alone.stdout)
    assert "2 workers" in err
    assert re.search(r"in the clear|not encrypted|insecure", err), "the first lines say that tensors are not encrypted"


def test_without_asking_for_the_insecure_data_plane_nothing_starts(
    hosts: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    refused = lead(hosts[0], tmp_path, "closed")
    _, err = refused.communicate(timeout=30)
    assert refused.returncode == 3
    assert "--insecure-data-plane" in err


@pytest.mark.faults
def test_strangers_are_refused_and_told_of_once_while_the_run_goes_on(
    hosts: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    first = lead(hosts[0], tmp_path, "guarded", "--insecure-data-plane")
    wait_for(tmp_path / "guarded.join")
    ticket = json.loads((tmp_path / "guarded.join").read_text())
    for name, key in (("wrong", "ab" * 32), ("other", "17" * 32)):
        (tmp_path / f"{name}.join").write_text(json.dumps({**ticket, "key": key}))
        (tmp_path / f"{name}.join").chmod(0o600)
    for name in ("wrong", "other"):
        stranger = start(hosts[1], *MH, "agent", "--join", f"{name}.join", cwd=tmp_path)
        _, err = stranger.communicate(timeout=60)
        assert stranger.returncode == 3, err
    keyless = subprocess.run([*hosts[1], sys.executable, "-c", KEYLESS, ticket["address"]], timeout=30)
    assert keyless.returncode == 0
    second = start(hosts[1], *MH, "agent", "--join", "guarded.join", cwd=tmp_path)
    out, err = first.communicate(timeout=60)
    second.communicate(timeout=30)
    assert first.returncode == 0, err
    assert digest(out)
    refusals = [line.partition("refused a join from ")[2] for line in err.splitlines() if "refused a join" in line]
    assert f"{ADDRESSES[1]}: a wrong key, or another run's" in refusals, err
    assert any("no key" in refusal for refusal in refusals), err
    assert len(refusals) == len(set(refusals)), "each is told once"
    assert ticket["key"] not in out + err


# A client that speaks ZeroMQ without any key: it must get no answer at all.
KEYLESS = """
import sys, zmq
socket = zmq.Context().socket(zmq.DEALER)
socket.linger = 0
socket.connect("tcp://" + sys.argv[1])
socket.send(b"hello")
sys.exit(1 if socket.poll(1000) else 0)
"""
