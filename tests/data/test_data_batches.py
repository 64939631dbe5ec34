"""Steps and pieces: which worker gets which rows, where a run resumes, what is random, what fails and how."""

import multiprocessing
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.data.evaluation import eval_pieces
from manyhands.data.randomness import randomness, seed_all
from manyhands.data.sample_order import Position, SliceDivision
from manyhands.data.sources.as_source import as_source
from manyhands.data.sources.row_source import RowSource
from manyhands.errors import DataError, DataFetchFailed, ManyhandsError
from tests.data.data_cases import (
    Augmented,
    Broken,
    Endings,
    Ledger,
    batches_of,
    pieces_by_slice,
    shuffled_numbers,
    take_all,
)
from tests.variants import variants


def test_each_example_is_used_once_per_epoch_across_a_resume_on_2_then_3_then_1_workers():
    ledger = Ledger(lambda: torch.arange(103), batch_size=10, slices=6, epochs=2, seed=5)
    ledger.run(world_size=2, num_steps=4)
    assert ledger.position == Position(5, 0, 40)
    ledger.run(world_size=3, num_steps=9)
    ledger.run(world_size=1)
    assert sorted(ledger.rows[0]) == sorted(ledger.rows[1]) == list(range(103))
    assert ledger.position == Position(5, 2, 0)
    assert ledger.next_step == 23

    undisturbed = Ledger(lambda: torch.arange(103), batch_size=10, slices=6, epochs=2, seed=5)
    undisturbed.run(world_size=1)
    assert undisturbed.rows == ledger.rows  # the same rows in the same order


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 6), st.integers(1, 5))
def test_no_row_is_lost_or_used_twice_for_any_sizes(rows, batch_size, slices, world_size):
    batch_size = max(batch_size, slices)
    ledger = Ledger(lambda: torch.arange(rows), batch_size=batch_size, slices=slices, epochs=2)
    ledger.run(world_size, num_steps=1)
    ledger.run(world_size + 1)
    assert sorted(ledger.rows[0]) == sorted(ledger.rows[1]) == list(range(rows))


def test_a_worker_without_a_slice_still_sees_every_step():
    seen = [list(batches_of(torch.arange(3), batch_size=8, slices=4, rank=rank, world_size=4)) for rank in range(4)]
    assert [len(steps) for steps in seen] == [1, 1, 1, 1]
    assert [steps[0].num_slices for steps in seen] == [1, 1, 1, 1]
    assert [list(steps[0].indices) for steps in seen] == [[0], [], [], []]


def test_a_short_last_batch_is_used_and_ends_its_epoch():
    steps = list(batches_of(torch.arange(11), batch_size=8, slices=4, epochs=2))
    assert [(step.rows, step.num_slices, step.last_of_epoch, step.epoch) for step in steps] == [
        (8, 4, False, 0),
        (3, 1, True, 0),
        (8, 4, False, 1),
        (3, 1, True, 1),
    ]
    assert [step.number for step in steps] == [1, 2, 3, 4]
    assert [step.after for step in steps[:2]] == [Position(0, 0, 8), Position(0, 1, 0)]


def test_steps_and_epochs_say_how_long_the_run_is():
    assert batches_of(torch.arange(11), batch_size=4, epochs=3).total_steps == 9
    assert batches_of(torch.arange(11), batch_size=4, epochs=3).steps_per_epoch == 3
    assert batches_of(torch.arange(11), batch_size=4, epochs=3, steps=5).total_steps == 5
    resumed = batches_of(torch.arange(11), batch_size=4, epochs=3, position=Position(0, 1, 4), first_step=5)
    assert resumed.total_steps == 9
    assert [step.number for step in resumed] == [5, 6, 7, 8, 9]
    assert len(list(batches_of(torch.arange(11), batch_size=4, steps=7))) == 7


def test_any_slice_can_be_fetched_by_anyone_and_twice():
    whole = pieces_by_slice(torch.arange(40), batch_size=16, slices=4, world_size=2)
    for step in batches_of(torch.arange(40), batch_size=16, slices=4, rank=1, world_size=2):
        again = {v: step.slice(v).batch for v in range(step.num_slices)}
        first = {piece.index: piece.batch for piece in step.mine()}
        second = {piece.index: piece.batch for piece in step.mine()}
        for v, batch in again.items():
            assert torch.equal(batch, whole[step.number, v])
        assert first.keys() == second.keys() == set(step.indices)
        assert all(torch.equal(first[v], second[v]) for v in first)


def test_slices_are_fetched_when_the_step_is_made_and_again_once_they_are_used():
    source, fetched = as_source(torch.arange(40)), []
    take = source.reader.take
    source.reader.take = lambda rows: fetched.append(len(rows)) or take(rows)
    step = next(batches_of(source, batch_size=16, slices=4, rank=1, world_size=2))
    assert fetched == [4, 4] and step.load_s > 0
    first = {piece.index: piece.batch for piece in step.mine()}
    assert fetched == [4, 4]
    assert all(torch.equal(first[v], step.slice(v).batch) for v in first)
    assert fetched == [4, 4, 4, 4]


def test_steps_that_are_passed_over_do_not_shift_the_later_ones():
    whole = pieces_by_slice(torch.arange(40), batch_size=8, slices=2)
    for step in batches_of(torch.arange(40), batch_size=8, slices=2):
        if step.number % 2 == 0:
            assert torch.equal(next(step.mine()).batch, whole[step.number, 0])


@pytest.mark.slow
def test_augmentation_is_the_same_for_any_number_of_loader_processes_and_workers():
    def drawn(world_size: int, num_workers: int) -> dict[tuple[int, int], list[torch.Tensor]]:
        return pieces_by_slice(Augmented(), batch_size=6, slices=2, world_size=world_size, num_workers=num_workers)

    alone = drawn(1, 0)
    for other in (drawn(2, 0), drawn(1, 2)):
        assert other.keys() == alone.keys()
        for place, columns in alone.items():
            assert all(torch.equal(a, b) for a, b in zip(columns, other[place], strict=True))
    assert not torch.equal(alone[1, 0][3], alone[1, 1][3])  # and slices differ


def test_fetching_leaves_the_runs_own_randomness_alone():
    seed_all(11)
    expected = random.random(), np.random.rand(), torch.rand(1)
    seed_all(11)
    for step in batches_of(Augmented()):
        list(step.mine())
    assert (random.random(), np.random.rand(), torch.rand(1)) == expected


def test_randomness_depends_on_the_key_alone_and_nests():
    def draw():
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    with randomness(3):
        first = draw()
        with randomness(3):
            assert draw() == first
        assert draw() != first
    with randomness(3):
        assert draw() == first
    with randomness(4):
        assert draw() != first


def test_a_pieces_randomness_is_a_function_of_seed_step_and_slice():
    def masks(world_size):
        found = {}
        for rank in range(world_size):
            for step in batches_of(torch.arange(8), batch_size=4, slices=2, rank=rank, world_size=world_size):
                for piece in step.mine():
                    with piece.randomness():
                        found[step.number, piece.index] = torch.rand(1).item()
        return found

    assert masks(1) == masks(2)
    assert len(set(masks(1).values())) == 4


def test_a_batch_smaller_than_the_slices_is_refused():
    with pytest.raises(DataError, match="batch_size is 3, but every batch is cut into 4 slices") as caught:
        batches_of(torch.arange(20), batch_size=3, slices=4)
    assert caught.value.fix == ("batch_size=4", "slices=3")


def test_a_run_without_an_end_is_refused():
    with pytest.raises(DataError, match="no end"):
        batches_of(torch.arange(20), epochs=None)


def test_a_position_beyond_the_data_is_refused():
    with pytest.raises(DataError, match="used 30 rows of epoch 1, but the data has 20"):
        batches_of(torch.arange(20), position=Position(0, 0, 30))


def test_a_dataset_that_raises_names_step_slice_and_row():
    with pytest.raises(DataFetchFailed, match="row 7 is torn") as caught:
        take_all(batches_of(Broken(), batch_size=4, slices=2, shuffle=False))
    assert "slice 1 of step 2" in str(caught.value)
    assert "while reading row 7" in str(caught.value)
    assert "rows: 6, 7" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)


def mapped(rows, folder):
    """Numbers in a file that is mapped, not read: what a thread fetches ahead."""
    np.save(folder / "numbers.npy", np.arange(rows))
    return np.load(folder / "numbers.npy", mmap_mode="r")


def test_rows_in_memory_are_copied_by_the_step_itself_without_a_thread():
    before = threading.active_count()
    batches = batches_of(torch.arange(40), batch_size=8)
    assert sum(len(piece.batch) for step in batches for piece in step.mine()) == 40
    assert threading.active_count() == before


def test_an_error_in_the_prefetch_thread_surfaces_at_the_step_that_needs_it(tmp_path):
    source = as_source(mapped(20, tmp_path))
    take = source.reader.take

    def torn(rows):
        if 9 in rows:
            raise OSError("disk says no")
        return take(rows)

    source.reader.take = torn
    batches = batches_of(source, batch_size=4, shuffle=False)
    assert [len(list(next(batches).mine())) for _ in range(2)] == [1, 1]
    with pytest.raises(DataFetchFailed, match=r"slice 0 of step 3 failed\. OSError: disk says no"):
        list(next(batches).mine())
    with pytest.raises(DataFetchFailed, match="step 3"):
        list(next(batches).mine())  # asking again raises again
    batches.close()


@pytest.mark.slow
def test_an_error_in_a_loader_process_carries_its_traceback():
    batches = batches_of(Broken(), batch_size=4, shuffle=False, num_workers=1)
    with pytest.raises(DataFetchFailed, match="ValueError: row 7 is torn") as caught:
        take_all(batches)
    assert "slice 0 of step 2" in str(caught.value)
    assert "in __getitem__" in str(caught.value)
    batches.close()


@pytest.mark.slow
def test_a_loader_process_that_dies_is_reported():
    batches = batches_of(Endings(), num_workers=1)
    with pytest.raises(DataFetchFailed, match="loader process died"):
        take_all(batches)
    batches.close()


def test_data_that_cannot_be_sent_to_a_loader_process_is_refused():
    class Local(Broken):
        pass

    batches = batches_of(Local(), num_workers=1)
    with pytest.raises(DataError, match="cannot be sent to a loader process") as caught:
        take_all(batches)
    assert "num_workers=0" in caught.value.fix


def test_leaving_the_loop_early_ends_the_prefetch_thread(tmp_path):
    before = threading.active_count()
    batches = batches_of(mapped(1000, tmp_path))
    step = next(batches)
    pieces = step.mine()
    next(pieces)
    assert threading.active_count() == before + 1
    batches.close()
    batches.close()
    assert threading.active_count() == before
    with pytest.raises(ManyhandsError, match="closed"):
        list(next(batches).mine())


def test_forgetting_the_batches_ends_the_prefetch_thread(tmp_path):
    before = threading.active_count()
    for step in batches_of(mapped(1000, tmp_path)):
        list(step.mine())
        break
    assert threading.active_count() == before + 1
    del step
    assert threading.active_count() == before


def test_the_prefetch_thread_stays_two_steps_ahead(tmp_path):
    source = as_source(mapped(100, tmp_path))
    take, taken = source.reader.take, []

    def counted(rows):
        taken.append(len(rows))
        return take(rows)

    source.reader.take = counted
    batches = batches_of(source, batch_size=4, slices=2)
    step = next(iter(batches))
    next(step.mine())
    deadline = time.monotonic() + 60
    while len(taken) < 6 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert len(taken) == 6  # the 2 slices of this step, and 2 steps of 2 slices
    batches.close()


def test_changing_a_batch_in_place_does_not_change_the_data():
    x = torch.arange(8.0)
    for shuffle in (True, False):
        for step in batches_of(x, shuffle=shuffle):
            next(step.mine()).batch.zero_()
    assert torch.equal(x, torch.arange(8.0))


@pytest.mark.parametrize("data", [torch.arange(23), list(range(23)), lambda: iter(range(23))])
@pytest.mark.parametrize("world_size", [1, 2, 5, 30])
def test_evaluation_sees_every_example_once_on_any_number_of_workers(data, world_size):
    source = as_source(data)
    found = {}
    for rank in range(world_size):
        for piece in eval_pieces(source, batch_size=4, rank=rank, world_size=world_size):
            assert piece.index not in found
            assert piece.rows == len(piece.batch)
            found[piece.index] = piece.batch.tolist()
    assert [row for index in sorted(found) for row in found[index]] == list(range(23))
    assert len(found) == 6


@pytest.mark.slow
@pytest.mark.faults
def test_loader_processes_end_with_a_killed_worker():
    script = Path(__file__).parent / "data_cases.py"
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        loader = psutil.Process(int(worker.stdout.readline()))
        worker.kill()
    psutil.wait_procs([loader], timeout=60)
    assert not loader.is_running()


@pytest.mark.slow
def test_evaluations_share_their_loader_processes():
    source = as_source(Augmented(), num_workers=1)

    def evaluate():
        return [piece.batch for piece in eval_pieces(source, batch_size=5, rank=0, world_size=1)]

    first = evaluate()
    children = multiprocessing.active_children()
    half = eval_pieces(source, batch_size=5, rank=0, world_size=1)
    next(half)
    half.close()
    second = evaluate()
    assert [child.pid for child in multiprocessing.active_children()] == [child.pid for child in children]
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def rows_by_slice(data, parts_by_step, **settings):
    """What two workers got, with slices divided anew before some steps; and the loader processes they ended with."""
    found, children = {}, set()
    others = {child.pid for child in multiprocessing.active_children()}
    workers = [batches_of(data, rank=rank, world_size=2, batch_size=8, slices=4, **settings) for rank in range(2)]
    for steps in zip(*workers, strict=True):
        for step, worker in zip(steps, workers, strict=True):
            found |= {(step.number, piece.index): piece.batch for piece in step.mine()}
            worker.divide(SliceDivision(2, parts_by_step.get(step.number + 1, worker.division.parts)))
        children.add(frozenset(child.pid for child in multiprocessing.active_children()) - others)
    return found, children


class ReadAhead(Augmented):
    """Long enough that several steps are fetched ahead."""

    def __len__(self) -> int:
        return 60


@pytest.mark.parametrize("kind", variants(["memory", "thread", "caller", "processes"], "memory", "thread", "caller"))
def test_slices_may_be_divided_anew_between_any_two_steps(kind: str) -> None:
    data = ReadAhead() if kind in ("caller", "processes") else torch.arange(60)
    if kind == "thread":
        data = RowSource(as_source(data).reader, fetched_by="thread")
    settings = {"num_workers": 1} if kind == "processes" else {}
    expected = pieces_by_slice(data, batch_size=8, slices=4, epochs=2)
    found, children = rows_by_slice(data, {3: (3, 1), 4: (1, 3), 10: None, 12: (3, 1)}, epochs=2, **settings)
    assert found.keys() == expected.keys()
    for place, columns in expected.items():
        for a, b in zip(columns, found[place], strict=True):
            assert torch.equal(a, b)
    assert len(children) == 1 and len(children.pop()) == (2 if kind == "processes" else 0), "processes stay"


def test_a_stream_follows_a_new_division() -> None:
    expected = pieces_by_slice(shuffled_numbers, batch_size=8, slices=4, epochs=2)
    found, _ = rows_by_slice(shuffled_numbers, {2: (3, 1), 4: (1, 3)}, epochs=2)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[place], batch) for place, batch in expected.items())
