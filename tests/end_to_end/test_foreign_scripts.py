"""Models and scripts that are not ours, under the real `mh run`; and mistakes that look like success."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import manyhands
from manyhands.testing import RankPool

SCRIPTS = Path(__file__).parent / "scripts"
WARNING = "manyhands: "


@pytest.fixture
def mh_run(tmp_path: Path) -> Any:
    def run(*words: str) -> tuple[str, str]:
        hidden = ("MANYHANDS_", "PET_", "TF_CONFIG")
        clean = {name: text for name, text in os.environ.items() if not name.startswith(hidden)}
        done = subprocess.run(
            [sys.executable, "-m", "manyhands.cli.main", "run", "--ui", "none", "--max-restarts", "0", *words],
            cwd=tmp_path,
            env={**clean, "PYTHONPATH": str(Path(manyhands.__file__).parents[1])},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    return run


def warnings_in(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith(WARNING)]


@pytest.mark.slow
@pytest.mark.long
def test_a_hugging_face_model_trained_by_two_workers_is_the_one_that_one_worker_trains(
    mh_run: Any, ranks: RankPool, tmp_path: Path
) -> None:
    out, err = mh_run("-n", "2", str(SCRIPTS / "hugging_face.py"), "two.safetensors")
    assert "accuracy" in out
    assert warnings_in(err) == []
    ranks(1, run_main, str(SCRIPTS / "hugging_face.py"), str(tmp_path / "one.safetensors"))
    one, two = load_file(tmp_path / "one.safetensors"), load_file(tmp_path / "two.safetensors")
    assert one.keys() == two.keys()
    for name in one:
        np.testing.assert_allclose(two[name], one[name], rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.slow
def test_a_ddp_script_runs_unmodified_with_torchruns_flags(mh_run: Any, tmp_path: Path) -> None:
    out, err = mh_run("--nproc-per-node", "2", "--standalone", str(SCRIPTS / "ddp_tutorial.py"), str(tmp_path))
    assert out == "trained on 2 ranks, local rank 0\n", err
    assert warnings_in(err) == []
    first, second = (torch.load(tmp_path / f"rank-{rank}.pt", weights_only=True) for rank in (0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.long
@pytest.mark.slow
def test_ranks_that_train_on_the_same_samples_get_one_warning(mh_run: Any) -> None:
    _, err = mh_run("-n", "2", str(SCRIPTS / "same_samples.py"), "join")
    (line,) = warnings_in(err)
    assert "ranks 0 and 1 read the same first batch" in line
    assert "DistributedSampler" in line
    assert "mh.join()" in line


@pytest.mark.slow
def test_workers_that_train_without_joining_get_one_warning(mh_run: Any) -> None:
    _, err = mh_run("-n", "2", str(SCRIPTS / "same_samples.py"))
    (line,) = warnings_in(err)
    assert "nothing joins the 2 workers" in line
    assert "mh.join()" in line


def test_a_script_that_joins_nothing_gets_a_warning_at_its_end(mh_run: Any, tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text("import sys\nprint('done')\nsys.exit(0)\n")
    out, err = mh_run("-n", "2", "alone.py")
    assert out == "done\n"
    (line,) = warnings_in(err)
    assert "the 2 workers never joined each other" in line
    _, err = mh_run("-n", "1", "alone.py")
    assert warnings_in(err) == []


def run_main(script: str, *args: str) -> None:
    spec = importlib.util.spec_from_file_location(Path(script).stem, script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(*args)
