"""Tasks of Slurm and MPI, as their environments say it. The values are those that srun 22.05 and mpirun 4.1.4 set."""

from __future__ import annotations

import pytest

from manyhands.errors import UsageError
from manyhands.spec.launcher_tasks import EngineTask, engine_task, refuse_one_run_per_task

BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_NNODES": "2", "SLURM_NODEID": "0"}
STEP = BATCH | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (STEP, ("srun", 1, 2, 2)),
        ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "3", "SLURM_PROCID": "0"}, ("srun", 0, 3, None)),
        (OPEN_MPI | {"PMIX_RANK": "3"}, ("mpirun", 3, 4, 2)),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, ("mpirun", 0, 2, None)),
        ({"PMIX_RANK": "1"}, ("the MPI launcher", 1, 2, None)),
        ({"FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "1"}, ("flux run", 1, 2, None)),
        # One task of srun that starts two tasks.
        (STEP | {"SLURM_STEP_NUM_TASKS": "1"} | OPEN_MPI, ("mpirun", 3, 4, 2)),
    ],
)
def test_one_task_of_several_is_recognised(environ, expected):
    found = engine_task(environ)
    assert found is not None
    assert found[:4] == expected


@pytest.mark.parametrize(
    "environ",
    [
        {},
        BATCH,  # a batch script, which runs once however many tasks the job may have
        STEP | {"SLURM_STEP_NUM_TASKS": "1"},
        OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"},
        {"PMI_SIZE": "many", "OMPI_COMM_WORLD_SIZE": "", "SLURM_STEP_ID": ""},
    ],
)
def test_the_only_task_is_like_any_process(environ):
    assert engine_task(environ) is None
    refuse_one_run_per_task(engine_task(environ))


def test_a_script_that_would_train_once_per_task_is_refused_with_what_to_type():
    with pytest.raises(UsageError, match="srun started this command in 2 tasks") as caught:
        refuse_one_run_per_task(engine_task(STEP))
    assert caught.value.exit_code == 2
    assert "SLURM_STEP_NUM_TASKS=2" in str(caught.value.where)
    first, *others = caught.value.fix
    assert first.startswith("srun -N2 --ntasks-per-node=1 --exclusive mh run --nnodes=2 --rdzv-backend=c10d")
    assert any("mh agent --join" in one for one in others)
    assert any("--standalone" in one for one in others)


def test_on_one_host_one_task_starts_all_workers():
    with pytest.raises(UsageError) as caught:
        refuse_one_run_per_task(EngineTask("mpirun", 0, 2, 1, "OMPI_COMM_WORLD_SIZE=2"))
    assert caught.value.fix[0].startswith("mpirun -np 1 --bind-to none mh run -n 2")
