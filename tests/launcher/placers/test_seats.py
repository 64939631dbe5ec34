"""What Slurm and MPI say to the tasks that they start. The values are those that srun 22.05 and mpirun 4.1.4 set."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.errors import SpecError, UsageError
from manyhands.launcher.launch import place
from manyhands.launcher.placers.node_list import MAX_NODES, expand_counts, expand_names
from manyhands.launcher.placers.seats import find_seat, only_task
from manyhands.launcher.placers.wrong_seats import check_seat, notes_on
from manyhands.spec.load import resolve
from manyhands.spec.placement import Machine, from_seat
from manyhands.spec.run import LaunchSection

BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_NNODES": "2", "SLURM_NODEID": "0"}
STEP = {
    **BATCH,
    "SLURM_CLUSTER_NAME": "scratch",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_SRUN_COMM_PORT": "38445",
    "SLURMD_NODENAME": "n2",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "PMIX_NAMESPACE": "3164602369",
    "PMIX_RANK": "1",
    "PMIX_HOSTNAME": "n2",
    "OMPI_MCA_orte_hnp_uri": "3164602368.0;tcp://10.231.8.1:40671",
}
TWO_EACH = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
WRONG = {
    "tasks": (
        STEP | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
        "2 tasks of this srun are on n2",
    ),
    "mpirun": (OPEN_MPI | TWO_EACH, "2 tasks of this mpirun are on n2"),
    "parts": (STEP | {"SLURM_HET_SIZE": "2"}, "heterogeneous: its 2 components"),
    "inside": (STEP | {"MANYHANDS_AGENT": "ipc:///x"}, "srun was called by a worker of a run"),
    "mpich": ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "mpirun started this command in 2 tasks"),
    "pmix": ({"PMIX_RANK": "1"}, "the MPI launcher started this command in 2 tasks"),
    "flux": ({"FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "1"}, "flux run started this command in 2 tasks"),
}


def seat_of(environ):
    found = find_seat(environ)
    assert found is not None
    return found


def test_a_task_of_srun_knows_its_host_and_the_others():
    seat = seat_of(STEP)
    assert (seat.placer, seat.job, seat.num_hosts, seat.host_rank) == ("slurm", "7", 2, 1)
    assert (seat.node, seat.nodes) == ("n2", ["n1", "n2"])
    check_seat(seat, STEP)
    placed = from_seat(seat, LaunchSection(workers=3, listen="10.0.0.1"), Machine(4, 0))
    assert (placed.workers, placed.num_hosts, placed.host_rank, placed.coordinates) == (3, 2, 1, False)
    assert placed.listen is None, "--listen names an address of the first host"


def test_a_task_of_mpirun_knows_its_host_even_inside_of_a_slurm_step():
    seat = seat_of(STEP | {"SLURM_PROCID": "0"} | OPEN_MPI)
    assert (seat.placer, seat.num_hosts, seat.host_rank, seat.node) == ("mpi", 2, 1, "n2")
    check_seat(seat, OPEN_MPI)


@pytest.mark.parametrize(
    ("environ", "changes"),
    [
        (STEP, {"SLURM_STEP_ID": "1"}),
        (STEP, {"SLURM_RESTART_COUNT": "1"}),
        (STEP, {"SLURM_SRUN_COMM_PORT": "38446"}),
        (OPEN_MPI, {"PMIX_NAMESPACE": "3164602370"}),
        (OPEN_MPI, {"OMPI_MCA_orte_hnp_uri": "3164602368.0;tcp://10.231.8.1:40672"}),
    ],
)
def test_each_start_of_a_job_has_a_name_that_all_its_tasks_share_and_no_other_start_has(environ, changes):
    other_task = {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURMD_NODENAME": "n1", "OMPI_COMM_WORLD_RANK": "0"}
    assert seat_of(environ).meeting == seat_of(environ | other_task).meeting != ""
    assert seat_of(environ | changes).meeting != seat_of(environ).meeting


@pytest.mark.parametrize(
    "environ",
    [
        {},
        BATCH,  # a batch script, which runs once however many tasks the job may have
        STEP | {"MANYHANDS_PLACER": "none"},
        {"PMI_SIZE": "many", "OMPI_COMM_WORLD_SIZE": "", "SLURM_STEP_ID": ""},
    ],
)
def test_outside_of_a_step_or_when_told_not_to_look_there_is_no_seat(environ):
    assert find_seat(environ) is None
    check_seat(None, environ)


@pytest.mark.parametrize(
    "environ",
    [STEP | {"SLURM_STEP_NUM_TASKS": "1"}, OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"}],
)
def test_the_only_task_is_a_run_of_one_host(environ):
    assert only_task(find_seat(environ))
    check_seat(find_seat(environ), environ | {"MANYHANDS_AGENT": "x", "SLURM_HET_SIZE": "2"})
    assert place(resolve(environ={}), environ).num_hosts == 1


@pytest.mark.parametrize(("environ", "says"), WRONG.values(), ids=WRONG.keys())
def test_tasks_that_would_each_train_a_separate_model_are_refused_with_what_to_type(environ, says):
    with pytest.raises(UsageError, match=says) as caught:
        place(resolve(environ={}), environ)
    assert caught.value.exit_code == 2
    assert caught.value.fix
    assert place(resolve(environ={}), environ, torchrun={"standalone": True}).num_hosts == 1
    assert place(resolve(environ={}), environ, torchrun={"nnodes": "2"}).master is not None


def test_on_one_host_one_task_starts_all_workers():
    environ = STEP | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "n2"}
    with pytest.raises(UsageError) as caught:
        check_seat(find_seat(environ), environ)
    assert caught.value.fix[0] == "srun -n1 --exclusive mh run -n 2 ..."


def test_torchruns_flags_and_a_cluster_decide_before_the_seat_and_the_seat_before_one_host():
    assert place(resolve(environ={}), STEP, torchrun={"nnodes": "4", "node_rank": "3"}).num_hosts == 4
    cluster = '{"cluster": {"worker": ["a:1", "b:1", "c:1"]}, "task": {"type": "worker", "index": 0}}'
    assert place(resolve(environ={}), STEP | {"TF_CONFIG": cluster}).num_hosts == 3
    assert place(resolve(environ={}), STEP).num_hosts == 2
    with_workers = place(resolve(environ={}), STEP, torchrun={"nproc_per_node": "3", "tee": "3"})
    assert (with_workers.num_hosts, with_workers.workers, with_workers.host_rank) == (2, 3, 1)
    with pytest.raises(UsageError, match="--nnodes is 1, but srun has started 2 tasks"):
        place(resolve(environ={}), STEP, torchrun={"nnodes": "1"})
    with pytest.raises(SpecError, match="3 hosts are requested, but srun has started this command on 2"):
        place(resolve(environ={}, flags={"hosts_wanted": 3}), STEP)


def test_one_core_of_many_and_one_thread_by_ray_are_said():
    assert "1 of the 64 cores" in notes_on(find_seat(STEP), STEP, 1, 64)[0]
    assert "--bind-to none" in notes_on(find_seat(OPEN_MPI), OPEN_MPI, 2, 64)[0]
    assert notes_on(find_seat(STEP), STEP, 64, 64) == notes_on(None, {}, 1, 64) == []
    assert "OMP_NUM_THREADS=1" in notes_on(None, {"RAY_JOB_ID": "1", "OMP_NUM_THREADS": "1"}, 4, 4)[0]


# ---- node lists -------------------------------------------------------------------------------------------------

plain = st.from_regex(r"[a-z][a-z0-9-]{0,5}", fullmatch=True)


@st.composite
def ranges(draw):
    """A bracket's content and the numbers that it stands for."""
    texts, numbers = [], []
    for _ in range(draw(st.integers(1, 3))):
        width, first = draw(st.integers(1, 4)), draw(st.integers(0, 120))
        last = first + draw(st.integers(0, 12))
        texts.append(str(first).zfill(width) + (f"-{last:0{width}}" if last > first else ""))
        numbers += [str(number).zfill(width) for number in range(first, last + 1)]
    return ",".join(texts), numbers


@st.composite
def node_lists(draw):
    expressions, names = [], []
    for _ in range(draw(st.integers(1, 3))):
        pieces = [(draw(plain), None)]
        for _ in range(draw(st.integers(0, 2))):
            pieces.append(draw(ranges()))
            pieces.append((draw(st.sampled_from(["", "x", "-r"])), None))
        expressions.append("".join(text if numbers is None else f"[{text}]" for text, numbers in pieces))
        names += map("".join, itertools.product(*([text] if numbers is None else numbers for text, numbers in pieces)))
    return ",".join(expressions), names


@given(node_lists())
def test_node_lists_expand_to_the_names_that_they_were_made_from(made):
    expression, names = made
    assert expand_names(expression) == names


@pytest.mark.parametrize(
    "text", ["", "n[", "n[]", "n[2-1]", "n[1-x]", "n]1", "n[1-9999999]", "n[1-99999]x[1-9]", "a,,b", "n 1"]
)
def test_what_is_no_node_list_is_refused(text):
    with pytest.raises(SpecError):
        expand_names(text)


@given(st.lists(st.tuples(st.integers(1, 128), st.integers(1, 5)), min_size=1, max_size=5))
def test_task_counts_expand(pairs):
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in pairs)
    assert expand_counts(text) == [count for count, times in pairs for _ in range(times)]
    assert expand_counts(f"1(x{MAX_NODES + 1})") == expand_counts("x") == expand_counts("") == []
