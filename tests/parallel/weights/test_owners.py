"""Who updates which tensor, and which optimizers may be divided like that."""

from __future__ import annotations

import torch

from manyhands.launcher.worker_process.lazy_compiler import load_compiler_late
from manyhands.parallel.weights.owner_updates import ownable, owners

load_compiler_late()  # as every worker does: a plain optimizer would load all of torch's compiler


def test_tensors_are_dealt_out_by_size_and_always_the_same_way() -> None:
    assert owners([100, 1, 60, 50, 1], 2) == [0, 0, 1, 1, 0]
    assert owners([8, 8, 8, 8], 4) == [0, 1, 2, 3]
    assert owners([5], 3) == [0]
    assert owners([], 2) == []


def test_no_rank_has_more_than_its_share_and_the_largest_tensor_it_was_given_last() -> None:
    sizes = [int(size) for size in torch.randint(0, 1000, (200,), generator=torch.Generator().manual_seed(1))]
    for ranks in (1, 2, 3, 7):
        owner = owners(sizes, ranks)
        loads = [sum(size for size, rank in zip(sizes, owner, strict=True) if rank == r) for r in range(ranks)]
        assert max(loads) - min(loads) <= max(sizes)


class Derived(torch.optim.Adadelta):
    pass


def test_only_optimizers_that_are_known_are_divided() -> None:
    params = [torch.nn.Parameter(torch.zeros(2, 2))]
    assert ownable(torch.optim.Adadelta(params))
    assert not ownable(Derived(params)), "a subclass may look at all tensors"
    assert not ownable(torch.optim.LBFGS(params))
    watched = torch.optim.Adadelta(params)
    watched.register_step_pre_hook(lambda *_: None)
    assert not ownable(watched), "a hook would see some of the gradients only"
