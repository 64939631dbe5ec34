"""`mh.Dataset`: what each step of a chain means, against plain lists and itertools, and on any number of workers."""

import random
from itertools import chain, islice, zip_longest

import numpy as np
import pytest
import torch

import manyhands as mh
from manyhands.data.batches import Batches
from manyhands.data.feeds import BatchSchedule
from manyhands.data.pipeline.index_orders import buffered_order, interleaved_order
from manyhands.data.sample_order import Position, SliceDivision
from manyhands.data.sources.as_source import as_source
from manyhands.data.sources.row_source import RowSource
from manyhands.data.sources.stream_source import StreamSource
from manyhands.errors import DataError
from tests.data.data_cases import ThreadExchange, together

NUMBERS = mh.Dataset.range(10)


def elements(data, epoch=0, seed=0):
    return list(data.as_numpy_iterator(epoch=epoch, seed=seed))


def noisy(x):
    return x, float(torch.rand(())), random.random(), float(np.random.rand())


def plus(x, y=0):
    return x + y


def is_even(x):
    return x % 2 == 0


def words(epoch):
    numbers = list(range(13))
    random.shuffle(numbers)
    for number in numbers:
        yield number + 100 * epoch


class Run:
    """Workers simulated in one process, taking the steps of a chain together."""

    def __init__(self, data, *, slices=4, seed=3, batch_size=None, **source):
        self.data, self.slices, self.seed, self.given, self.source = data, slices, seed, batch_size, source

    def batches(self, rank, world, position=None, first_step=1, **until):
        source = as_source(self.data, seed=self.seed, **self.source)
        size = self.given or source.own_batch_size or 1
        position = position or Position(self.seed, 0, 0)
        until = until or {"epochs": 2}
        schedule = BatchSchedule(size, self.slices, position, first_step=first_step, **until)
        return Batches(source, schedule, rank, SliceDivision(world))

    def steps(self, world=1, position=None, first_step=1, count=None, **until):
        """(number, epoch, every slice's batch in order), then where it ended."""
        workers = [self.batches(rank, world, position, first_step, **until) for rank in range(world)]
        found, after = [], position
        for steps in islice(zip_longest(*workers), count):
            pieces = {piece.index: plain(piece.batch) for step in steps for piece in step.mine()}
            found.append((steps[0].number, steps[0].epoch, [pieces[v] for v in sorted(pieces)]))
            after = steps[0].after
        for worker in workers:
            worker.close()
        return found, after


def plain(batch):
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return [plain(value) for value in batch]
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (NUMBERS.take(3), [0, 1, 2]),
        (NUMBERS.take(-1).skip(8), [8, 9]),
        (NUMBERS.skip(-1), []),
        (NUMBERS.take(20), list(range(10))),
        (NUMBERS.shard(3, 1), [1, 4, 7]),
        (NUMBERS.take(2).repeat(3), [0, 1] * 3),
        (NUMBERS.take(2).repeat().take(5), [0, 1, 0, 1, 0]),
        (NUMBERS.take(2).repeat().skip(3).shard(2, 0).take(3), [1, 1, 1]),
        (NUMBERS.take(2).concatenate(NUMBERS.skip(8)), [0, 1, 8, 9]),
        (mh.Dataset.zip(NUMBERS, NUMBERS.skip(7)), [(0, 7), (1, 8), (2, 9)]),
        (mh.Dataset.zip({"a": NUMBERS.take(1), "b": NUMBERS}), [{"a": 0, "b": 0}]),
        (NUMBERS.skip(8).enumerate(5), [(5, 8), (6, 9)]),
        (NUMBERS.filter(is_even), [0, 2, 4, 6, 8]),
        (NUMBERS.filter(is_even).skip(1).take(2).repeat(2), [2, 4, 2, 4]),
        (NUMBERS.filter(is_even).shard(2, 1).enumerate(), [(0, 2), (1, 6)]),
        (NUMBERS.filter(is_even).concatenate(NUMBERS.take(1)), [0, 2, 4, 6, 8, 0]),
        (mh.Dataset.zip((NUMBERS.filter(is_even), NUMBERS)).map(plus), [0, 3, 6, 9, 12]),
        (NUMBERS.batch(4).unbatch().take(6), list(range(6))),
        (NUMBERS.prefetch(2).cache().map(lambda x: x * x).skip(8), [64, 81]),
        (mh.Dataset.from_tensor_slices((["a", "b"], [1, 2])), [("a", 1), ("b", 2)]),
        (mh.Dataset.from_tensor_slices({"x": ["a", "b"]}), [{"x": "a"}, {"x": "b"}]),
        (mh.Dataset.range(4, 0, -2), [4, 2]),
    ],
)
def test_a_step_of_a_chain_means_what_it_means_for_a_list(data, wanted):
    assert elements(data) == wanted
    assert data.cardinality() in (len(wanted), data.UNKNOWN_CARDINALITY)
    # Through the trainer's batches as well, an example at a time.
    if wanted:
        found, _ = Run(data.batch(1), slices=1).steps(epochs=1)
        assert [row_value(pieces[0]) for _, _, pieces in found] == [row_value(plain(one), one=True) for one in wanted]


def row_value(batch, one=False):
    if isinstance(batch, dict):
        return {key: row_value(value, one) for key, value in batch.items()}
    if isinstance(batch, tuple) or (isinstance(batch, list) and (one or isinstance(batch[0], list))):
        return [row_value(value, one) for value in batch]
    return batch if one else batch[0]


def test_batches_have_the_shapes_and_types_of_tf_data():
    data = mh.Dataset.from_tensor_slices({"x": np.ones((5, 3), np.float32), "y": [0, 1, 2, 3, 4]})
    first, *_, last = list(data.batch(2))
    assert first["x"].shape == (2, 3) and first["y"].dtype == torch.int64 and last["y"].tolist() == [4]
    assert len(data.batch(2, drop_remainder=True)) == 2
    mapped = next(iter(data.map(lambda row: (row["x"].sum(), 0.5, True, "text")).batch(2)))
    assert mapped[0].tolist() == [3.0, 3.0] and mapped[1].dtype == torch.float32
    assert mapped[2].dtype == torch.bool and mapped[3] == ["text", "text"]
    twice = next(iter(data.map(lambda row: row["y"]).batch(2).batch(2)))
    assert twice.tolist() == [[0, 1], [2, 3]]


def test_padded_batches_are_padded_to_the_longest_or_to_a_shape():
    ragged = NUMBERS.take(3).map(lambda n: (torch.arange(n + 1), n))
    (batch,) = ragged.padded_batch(3)
    assert batch[0].tolist() == [[0, 0, 0], [0, 1, 0], [0, 1, 2]] and batch[1].tolist() == [0, 1, 2]
    (batch,) = ragged.padded_batch(3, padded_shapes=([4], []), padding_values=(-1, 0))
    assert batch[0].tolist() == [[0, -1, -1, -1], [0, 1, -1, -1], [0, 1, 2, -1]]
    with pytest.raises(DataError, match=r"size \[3\] does not fit into padded_shapes \[2\]"):
        list(ragged.padded_batch(3, padded_shapes=([2], [])))
    with pytest.raises(DataError, match="differ in shape"):
        list(ragged.batch(3))


def interleaved_by_hand(lists, cycle, block):
    """tf.data's rule, written once more over iterators."""
    waiting, places, place = iter([iter(one) for one in lists]), [None] * cycle, 0
    is_over = False
    while not is_over or any(places):
        if places[place] is None and not is_over:
            places[place] = next(waiting, None)
            is_over = places[place] is None
        if places[place] is not None:
            found = list(islice(places[place], block))
            yield from found
            if len(found) < block:
                places[place] = None
        place = (place + 1) % cycle


@pytest.mark.parametrize(("cycle", "block"), [(1, 1), (2, 4), (3, 2), (4, 1), (9, 3)])
def test_interleave_takes_blocks_in_turn_by_position_and_as_a_stream(cycle, block):
    lengths = [5, 0, 3, 8, 1, 2]
    lists = [[(number, place) for place in range(length)] for number, length in enumerate(lengths)]
    wanted = list(interleaved_by_hand(lists, cycle, block))
    which, where = interleaved_order(lengths, cycle, block)
    assert list(zip(which.tolist(), where.tolist(), strict=True)) == wanted
    outer = mh.Dataset.range(len(lengths))
    by_position = outer.interleave(
        lambda n: mh.Dataset.range(lengths[n]).map(lambda p: (n, p)), cycle_length=cycle, block_length=block
    )
    assert elements(by_position) == wanted and len(by_position) == sum(lengths)
    as_stream = outer.interleave(
        lambda n: mh.Dataset.range(lengths[n]).filter(lambda p: True).map(lambda p: (n, p)), cycle, block
    )
    assert elements(as_stream) == wanted and as_stream.cardinality() == -2


def test_the_example_of_tf_datas_page_on_interleave():
    data = mh.Dataset.range(1, 6).interleave(
        lambda x: mh.Dataset.from_tensor_slices([x]).repeat(6), cycle_length=2, block_length=4
    )
    shown = "1111 2222 11 22 3333 4444 33 44 5555 55"
    assert [int(x) for x in elements(data)] == [int(digit) for digit in shown.replace(" ", "")]


def test_shuffles_take_every_element_once_in_a_new_order_each_epoch():
    for data in [
        NUMBERS.shuffle("full"),
        NUMBERS.shuffle(4),
        NUMBERS.shuffle(100),
        NUMBERS.filter(lambda x: True).shuffle(4),
    ]:
        orders = [elements(data, epoch) for epoch in range(3)]
        assert all(sorted(order) == list(range(10)) for order in orders)
        assert len({tuple(order) for order in orders}) == 3
        assert elements(data, 1) == orders[1] and elements(data, 1, seed=5) != orders[1]
        repeated = elements(data.repeat(3))
        assert repeated == list(chain.from_iterable(orders)) and elements(data.repeat().take(30)) == repeated
    kept = NUMBERS.shuffle("full", reshuffle_each_iteration=False)
    assert elements(kept, 0) == elements(kept, 4) == elements(kept.repeat(2))[10:]
    pairs = mh.Dataset.zip(NUMBERS.shuffle(4, seed=1), NUMBERS.map(plus).shuffle(4, seed=1))
    assert all(a == b for a, b in elements(pairs, 2))
    assert elements(NUMBERS.shuffle("full").shuffle("full")) != elements(NUMBERS.shuffle("full"))


def test_a_buffer_holds_an_element_for_a_while_only():
    for order in [
        buffered_order(1000, 10, 7).tolist(),
        elements(mh.Dataset.range(1000).shuffle(10)),
        elements(mh.Dataset.range(1000).filter(lambda x: True).shuffle(10)),
    ]:
        assert sorted(order) == list(range(1000)) and order != list(range(1000))
        assert all(number <= place + 9 for place, number in enumerate(order))
    # By position and forward, a buffer is the same list.
    stream = mh.Dataset.from_generator(lambda: iter(range(50))).shuffle(8, seed=2)
    assert elements(stream, 1) == elements(mh.Dataset.range(50).shuffle(8, seed=2), 1)
    # Orders are part of every checkpoint, and may never change.
    assert buffered_order(10, 4, 7).tolist() == PINNED


PINNED = [3, 0, 2, 4, 6, 1, 8, 5, 9, 7]

CHAINS = {
    "positions": mh.Dataset.range(23).shuffle("full").map(noisy).batch(5),
    "buffer": mh.Dataset.range(23).map(noisy).shuffle(6).repeat(2).batch(5, drop_remainder=True),
    "batch, then map": mh.Dataset.range(23).shuffle(9).batch(5).map(lambda x: (x, x + torch.rand(len(x)))),
    "uneven batches": mh.Dataset.range(13).shuffle("full").map(noisy).batch(5).repeat(2),
    "cache": mh.Dataset.range(11).map(noisy).cache().shuffle(5).batch(4),
    "zip": mh.Dataset.zip(NUMBERS.map(noisy), NUMBERS.shuffle(3).map(noisy)).batch(4),
    "interleave": mh.Dataset.range(4)
    .shuffle("full")
    .interleave(lambda n: mh.Dataset.range(n + 3).shuffle("full").map(noisy), cycle_length=2, block_length=2)
    .batch(5),
    "padded": mh.Dataset.range(11)
    .shuffle("full")
    .map(lambda n: torch.full((n + 1,), float(torch.rand(()))))
    .padded_batch(4),
    "filter": mh.Dataset.range(40).shuffle("full").filter(lambda x: x % 3).map(noisy).batch(5),
    "random filter": mh.Dataset.range(40).filter(lambda x: random.random() < 0.5).map(noisy).batch(4),
    "generator": mh.Dataset.from_generator(words).shuffle(4).map(noisy).batch(5, drop_remainder=True),
    "unbatch": mh.Dataset.range(23).batch(3).map(lambda x: x + torch.rand(())).unbatch().shuffle(4).batch(5),
    "filtered, then padded": NUMBERS.filter(is_even).map(lambda n: torch.arange(n)).padded_batch(4),
    "cached stream": mh.Dataset.from_generator(words).map(noisy).cache().shuffle(5).batch(4),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_is_the_same_list_for_any_number_of_workers_and_after_any_stop(name):
    run = Run(CHAINS[name])
    whole, _ = run.steps()
    assert len({epoch for _, epoch, _ in whole}) == 2
    assert run.steps(3)[0] == whole
    for stop in {1, len(whole) // 2, len(whole) - 1}:
        before, position = run.steps(2, count=stop)
        assert before == whole[:stop]
        assert run.steps(1 + stop % 3, position, before[-1][0] + 1)[0] == whole[stop:]
    assert Run(CHAINS[name], seed=4).steps()[0] != whole or name == "filtered, then padded"


@pytest.mark.parametrize("name", CHAINS)
def test_a_run_sees_the_elements_that_a_plain_iteration_sees(name):
    found, _ = Run(CHAINS[name], slices=1).steps(epochs=2)
    for epoch in range(2):
        mine = [pieces[0] for _, of, pieces in found if of == epoch]
        assert mine == [plain_arrays(batch) for batch in elements(CHAINS[name], epoch, seed=3)]


def plain_arrays(batch):
    if isinstance(batch, tuple | list):
        return [plain_arrays(one) for one in batch]
    return batch.tolist() if isinstance(batch, np.ndarray) else batch


def test_chains_that_can_be_read_by_position_are():
    kinds = {name: type(as_source(data)) for name, data in CHAINS.items()}
    forward = {name for name, kind in kinds.items() if kind is not RowSource}
    assert forward == {
        "uneven batches", "filter", "random filter", "generator", "unbatch", "filtered, then padded", "cached stream",
    }  # fmt: skip


def test_maps_above_a_filter_run_for_the_workers_own_slices_only():
    calls = []
    data = mh.Dataset.range(24).filter(is_even).map(lambda x: calls.append(x) or x).batch(4)
    for rank in range(3):
        calls.clear()
        mine = [
            x for step in Run(data).batches(rank, 3, epochs=1) for piece in step.mine() for x in piece.batch.tolist()
        ]
        assert calls == mine and len(mine) < 12
    calls.clear()
    Run(data).steps(1, Position(3, 0, 8), 3, epochs=1)
    assert calls == [16, 18, 20, 22]


def test_a_map_draws_by_example_whatever_was_added_after_it():
    def drawn(data, epoch=0):
        return {value[0]: value[1:] for value in elements(data, epoch)}

    plain_chain = drawn(NUMBERS.map(noisy))
    assert len(set(plain_chain.values())) == 10
    assert (
        drawn(NUMBERS.shuffle("full").map(noisy).skip(2)).items() <= drawn(NUMBERS.shuffle("full").map(noisy)).items()
    )
    assert drawn(NUMBERS.map(noisy).shuffle("full")) == plain_chain
    assert drawn(NUMBERS.map(noisy), 1) != plain_chain == drawn(NUMBERS.map(noisy).cache(), 1)
    both = elements(NUMBERS.map(noisy).map(lambda *first: (first[1], noisy(0)[1])))
    assert all(first != second for first, second in both)
    again = elements(NUMBERS.repeat(2).map(noisy))
    assert len(set(again)) == 20
    files = mh.Dataset.range(2).interleave(lambda n: mh.Dataset.range(3).map(noisy))
    assert len({value[1] for value in elements(files)}) == 6


def test_the_users_generators_are_left_as_they_were():
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    wanted = random.random(), np.random.rand(), torch.rand(())
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    elements(NUMBERS.map(noisy).shuffle(3)), elements(mh.Dataset.from_generator(words).filter(is_even))
    assert (random.random(), np.random.rand(), torch.rand(())) == wanted


def test_a_cache_computes_each_element_once_and_is_not_changed_by_what_follows():
    calls = []
    data = mh.Dataset.range(6).map(lambda x: calls.append(x) or torch.full((2,), float(x))).cache()
    run = Run(data.map(lambda t: t.add_(1)).batch(3), slices=1)
    first, _ = run.steps(epochs=3)
    assert len(calls) == 6
    assert [pieces for _, _, pieces in first[:2]] == [pieces for _, _, pieces in first[2:4]]


def test_rows_of_tensors_are_copied_together():
    source = as_source(mh.Dataset.from_tensor_slices((torch.arange(100), torch.arange(100))).shuffle("full").batch(8))
    assert source.fetched_by == "memory"
    batch = source.take(np.arange(8))
    assert isinstance(batch, tuple) and torch.equal(batch[0], batch[1])
    # A loss may change its batch.
    batch[0].zero_()
    assert source.take(np.arange(8))[1].tolist() == batch[1].tolist() == source.take(np.arange(8))[0].tolist()


def test_the_orders_of_long_chains_need_no_memory():
    data = mh.Dataset.range(10**9).shuffle("full").repeat(3).batch(64)
    source = as_source(data, seed=1)
    last = source.take(np.arange(3 * 10**9 - 4, 3 * 10**9))
    assert len(set(last.tolist())) == 4 and source.num_rows == 3 * 10**9


def test_what_cannot_be_reproduced_is_refused_with_what_to_write():
    for make, what in [
        (lambda: mh.Dataset.from_generator(iter([1])), "can be read only once"),
        (lambda: NUMBERS.map(plus, deterministic=False), "which process is faster"),
        (lambda: NUMBERS.cache("file"), "outlives the functions"),
        (lambda: NUMBERS.shuffle(0), "buffer_size is 0"),
        (lambda: NUMBERS.batch(2.5), "batch_size is 2.5"),
        (lambda: NUMBERS.shard(2, 2), "index is 2 of 2"),
        (lambda: NUMBERS.take(-3), "count is -3"),
        (lambda: NUMBERS.map(3), "given a int"),
        (lambda: NUMBERS.concatenate([1]), "given a list"),
        (lambda: mh.Dataset.zip(), "no Dataset"),
        (lambda: mh.Dataset([1]), "made of a list"),
        (lambda: mh.Dataset.from_tensor_slices((["a"], [1, 2])), "differ in their number"),
        (lambda: elements(NUMBERS.filter(is_even).shuffle("full")), "needs to know how many"),
        (lambda: list(islice(NUMBERS.repeat().shuffle("full"), 3)), "needs to know how many"),
        (lambda: elements(NUMBERS.filter(lambda x: False).repeat()), "has no elements"),
        (lambda: elements(NUMBERS.interleave(plus)), "returned a int"),
        (lambda: elements(NUMBERS.interleave(lambda n: NUMBERS.batch(2))), "Dataset of batches"),
        (lambda: as_source(NUMBERS.repeat()).sample(3, 0), "train_metrics"),
        (lambda: elements(NUMBERS.map(lambda x: (x,) * (1 + x % 2)).batch(2)), "differ in structure"),
        (lambda: as_source(NUMBERS.batch(2), collate=list), "makes its batches itself"),
        (lambda: as_source(NUMBERS.batch(2), batched=False), "are batches"),
        (lambda: as_source(NUMBERS, order=mh.order.Weighted([1] * 10)), "decides its order itself"),
        (lambda: as_source(torch.utils.data.DataLoader(NUMBERS)), "inside of a DataLoader"),
        (lambda: as_source(NUMBERS.take(0)), "no rows"),
        (lambda: as_source(NUMBERS).part(0, 3), "validation_split"),
        (lambda: as_source(lambda context: {0: NUMBERS}), "for each slice"),
        (lambda: Run(NUMBERS.batch(4).repeat()).steps(epochs=1), "no epochs"),
        (lambda: Run(NUMBERS.batch(4).map(lambda x: x[:1])).steps(epochs=1), "keep the number of rows"),
        (lambda: Run(NUMBERS.filter(is_even).batch(4).map(lambda x: x[:1])).steps(epochs=1), "keep the number of rows"),
    ]:
        with pytest.raises((DataError, mh.errors.DataFetchFailed), match=what):
            make()
    with pytest.raises(TypeError, match="no length"):
        len(NUMBERS.repeat())


def test_a_chain_without_batches_takes_the_batch_size_of_fit():
    found, _ = Run(NUMBERS.map(noisy), slices=2, batch_size=4, collate=None).steps(3, epochs=1)
    assert [sum(len(piece[0]) for piece in pieces) for _, _, pieces in found] == [4, 4, 2]
    found, _ = Run(NUMBERS, slices=1, batch_size=4, collate=sum).steps(epochs=1)
    assert [pieces for _, _, pieces in found] == [[6], [22], [17]]


def test_a_generator_of_batches_is_read_with_batched():
    def batches():
        for size in (5, 3, 4):
            yield torch.arange(size)

    data = mh.Dataset.from_generator(batches).map(lambda x: x * 2)
    source = as_source(data, batched=True)
    assert isinstance(source, StreamSource) and source.batched
    found, _ = Run(data, slices=2, batched=True).steps(2, epochs=1)
    assert found == [(1, 0, [[0, 2], [4, 6, 8]]), (2, 0, [[0], [2, 4]]), (3, 0, [[0, 2], [4, 6]])]


def test_an_endless_repeat_at_the_end_means_epochs():
    data = NUMBERS.shuffle("full").batch(4)
    found, _ = Run(data.repeat().prefetch(1)).steps(steps=7)
    assert found == Run(data).steps(epochs=3)[0][:7]
    # Before batch, batches go across repetitions, as in tf.data.
    across, _ = Run(NUMBERS.repeat().batch(4), slices=1).steps(steps=4)
    assert [pieces[0] for _, _, pieces in across] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1], [2, 3, 4, 5]]


def test_workers_with_other_chains_are_refused():
    exchange = ThreadExchange(2)

    def ask(rank):
        with pytest.raises(DataError, match=r"different data.*shard\(2, 0\)"):
            as_source(NUMBERS.shard(2, rank).batch(2), exchange=exchange.of(rank))

    together(2, ask)
