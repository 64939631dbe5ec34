"""Small trainings as a pipeline on real ranks, and the same in one process: losses, gradients, weights and buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import FileStore

from manyhands.comm.axis import Axis, connect
from manyhands.comm.point_to_point import PointToPoint
from manyhands.data.randomness import torch_randomness
from manyhands.parallel.model.step_buffers import StepBuffers
from manyhands.parallel.pipeline.exported_stages import ExportedModel
from manyhands.parallel.pipeline.model_proxy import learn_inputs
from manyhands.parallel.pipeline.partition import Blocks, Chain, balance, is_chain, shared_between, starts_at
from manyhands.parallel.pipeline.stage_runner import StageRunner


def axis_of(store: str, world: int) -> Axis:
    from manyhands.training.worker.worker import _current_session

    if world == 1:
        return Axis(0, 1)
    session, _ = _current_session.get()
    device = torch.device("cpu")
    return connect(
        FileStore(store, world), session.identity.rank, world, address="127.0.0.1", device=device, timeout_s=60
    )


class Piece(NamedTuple):
    index: int
    batch: Any
    rows: int


def slices(batch: tuple[Tensor, ...], count: int) -> list[Piece]:
    rows = len(batch[0])
    cuts = [v * rows // count for v in range(count + 1)]
    return [Piece(v, tuple(t[a:b] for t in batch), b - a) for v, (a, b) in enumerate(pairwise(cuts))]


class Sums:
    """As small an engine as does: per slice buffers, randomness and weight; gradients added up in slice order."""

    def __init__(self, model: nn.Module, rows: int, count: int) -> None:
        self.model, self._rows = model, rows
        self.losses: list[float] = []
        self.contributions: dict[int, Tensor] = {}
        self.done: list[int] = []
        self.total: dict[str, Tensor] = {}
        self._buffers = StepBuffers(model)
        self._buffers.begin(count, 2)

    @contextmanager
    def slice_context(self, piece: Piece) -> Iterator[None]:
        with self.forward_of(piece):
            yield
        self.put_back()

    @contextmanager
    def forward_of(self, piece: Piece) -> Iterator[None]:
        self._buffers.enter(piece.index)
        with torch_randomness(1000 * self._rows + piece.index):
            yield
        made = self._buffers.leave(piece.index)
        before = self.contributions.get(piece.index)
        self.contributions[piece.index] = made if before is None else self._both(before, made)

    def put_back(self) -> None:
        self._buffers.put_back()

    def _both(self, first: Tensor, second: Tensor) -> Tensor:
        """Of two stages on one rank: what either changed."""
        layers = len(self._buffers._layers)
        start = torch.cat([self._buffers._start, torch.zeros(layers, dtype=torch.float64)])
        return torch.where(second != start, second, first)

    def weigh(self, piece: Piece, result: Tensor) -> Tensor:
        self.losses.append(result.item() * piece.rows)
        return result * (piece.rows / self._rows)

    def slice_done(self, piece: Piece) -> None:
        self.done.append(piece.index)
        for name, param in self.model.named_parameters():
            if param.grad is not None:
                self.total[name] = self.total[name] + param.grad if name in self.total else param.grad
                param.grad = None

    def commit(self) -> None:
        if self.contributions:
            self._buffers.commit([self.contributions[v] for v in sorted(self.contributions)])


def cross_entropy(model: Any, batch: Any) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    data: Callable[[int, int], tuple[Tensor, ...]]
    loss: Callable[..., Any] = cross_entropy
    at: Sequence[str] = ()


def train_alone(case: Case, plan: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """One process: every slice's forward, then its backward."""
    torch.manual_seed(0)
    model = case.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = []
    for step, (rows, count) in enumerate(plan):
        sums = Sums(model, rows, count)
        for piece in slices(case.data(step, rows), count):
            with sums.forward_of(piece):
                result = case.loss(model, piece.batch)
            sums.weigh(piece, result).backward()
            sums.put_back()
            sums.slice_done(piece)
        sums.commit()
        steps.append(_results_of(model, sums, rows))
        _update(model, optimizer, sums)
    return {"steps": steps, "weights": _arrays(model.state_dict()), "evaluation": _evaluate(model, model, case)}


def train_pipelined(
    store: str, world: int, case: Case, plan: Sequence[tuple[int, int]], schedule: str, options: dict[str, Any]
) -> dict[str, Any]:
    """The same on this rank's stages; gradients of tied weights are summed over the ranks that have them."""
    axis = axis_of(store, world)
    torch.manual_seed(0)
    model = case.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = []
    stages = world * (options.get("chunks") or (2 if schedule in ("interleaved", "zero_bubble") else 1))
    blocks = blocks_of(model, case, stages)
    starts = starts_at(blocks.names, case.at, stages) if case.at else balance([1.0] * len(blocks.names), stages)
    parts = blocks.parts(starts)
    runner: StageRunner | None = None
    alive = 0
    for step, (rows, count) in enumerate(plan):
        sums = Sums(model, rows, count)
        runner = StageRunner(PointToPoint(axis), model, parts, case.loss, sums, schedule=schedule, **options)
        pieces = slices(case.data(step, rows), count)
        runner.train(pieces, f"step {step}")
        assert sums.done == [piece.index for piece in pieces]
        alive = max(alive, runner.most_alive)
        sums.commit()
        _sum_tied(axis, model, sums, shared_between(parts), runner)
        steps.append(_results_of(model, sums, rows))
        _update(model, optimizer, sums)
    assert runner is not None
    own = {name for stage in runner.stages for name in _names(model, parts[stage].params.values())}
    buffers = {n for stage in runner.stages for p, m in parts[stage].modules.items() for n in _buffers(p, m)}
    weights = {name: value for name, value in _arrays(model.state_dict()).items() if name in own | buffers}
    model.eval()
    return {
        "steps": steps,
        "weights": weights,
        "evaluation": _evaluate(runner.model, model, case),
        "alive": alive,
        "spans": runner.spans,
        "tied": shared_between(parts),
    }


def blocks_of(model: nn.Module, case: Case, stages: int) -> Blocks:
    if is_chain(model):
        return Chain(model)
    return ExportedModel(model, learn_inputs(case.loss, model, slices(case.data(0, 8), 2)[0].batch), stages, case.at)


def _names(model: nn.Module, params: Any) -> list[str]:
    wanted = {id(param) for param in params}
    return [name for name, param in model.named_parameters(remove_duplicate=False) if id(param) in wanted]


def _buffers(prefix: str, module: nn.Module) -> list[str]:
    return [f"{prefix}.{name}" for name, _ in module.named_buffers()]


def _sum_tied(axis: Axis, model: nn.Module, sums: Sums, tied: dict[str, list[int]], runner: StageRunner) -> None:
    known = {id(param): name for name, param in model.named_parameters()}
    for name in sorted(tied):
        first = known[id(model.get_parameter(name))]
        grad = sums.total.get(first, torch.zeros_like(model.get_parameter(name)))
        axis.sum_start(grad, f"tied {name}").wait()
        if set(tied[name]) & set(runner.stages):
            sums.total[first] = grad


def _results_of(model: nn.Module, sums: Sums, rows: int) -> dict[str, Any]:
    return {"loss": sum(sums.losses) / rows, "grads": _arrays(sums.total)}


def _update(model: nn.Module, optimizer: torch.optim.Optimizer, sums: Sums) -> None:
    for name, param in model.named_parameters():
        param.grad = sums.total.get(name)
    optimizer.step()
    optimizer.zero_grad()


def _evaluate(callee: Any, model: nn.Module, case: Case) -> np.ndarray[Any, Any]:
    model.eval()
    with torch.no_grad():
        return np.array([case.loss(callee, piece.batch).item() for piece in slices(case.data(7, 9), 2)])


def _arrays(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name: value.detach().numpy().copy() for name, value in tensors.items()}


# ---- models ----------------------------------------------------------------------------------------------------


def flat_data(step: int, rows: int) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(step)
    return torch.randn(rows, 12, generator=g), torch.randint(0, 4, (rows,), generator=g)


def sequential() -> nn.Module:
    layers = [
        m for _ in range(4) for m in (nn.Linear(12, 12), nn.BatchNorm1d(12), nn.ReLU(inplace=True), nn.Dropout(0.2))
    ]
    return nn.Sequential(nn.Sequential(*layers), nn.Linear(12, 4))


def pictures(step: int, rows: int) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(step)
    return torch.randn(rows, 2, 8, 8, generator=g), torch.randint(0, 3, (rows, 8, 8), generator=g)


class UNet(nn.Module):
    """Skips over one and over two levels, a parameter and dropout outside all modules."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.down2, self.middle = nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.up2, self.up1 = nn.Conv2d(12, 4, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)
        self.out, self.scale = nn.Conv2d(4, 3, 1), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(nn.functional.max_pool2d(a, 2)).relu()
        c = self.middle(nn.functional.max_pool2d(b, 2)).relu()
        d = self.up2(torch.cat([b, nn.functional.interpolate(c, scale_factor=2)], 1) * self.scale)
        d = nn.functional.dropout(d, 0.1, self.training)
        out: Tensor = self.out(self.up1(torch.cat([a, nn.functional.interpolate(d, scale_factor=2)], 1)))
        return out


def tokens(step: int, rows: int) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(step)
    return (torch.randint(0, 50, (rows, 7), generator=g),)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    model: nn.Module = GPT2LMHeadModel(
        GPT2Config(
            n_layer=3,
            n_embd=16,
            n_head=2,
            vocab_size=50,
            n_positions=8,
            bos_token_id=0,
            eos_token_id=0,
            loss_type="ForCausalLM",
        )
    )
    return model


def language_loss(model: Any, batch: Any) -> Tensor:
    (x,) = batch
    loss: Tensor = model(input_ids=x, labels=x).loss
    return loss


class TwoTowers(nn.Module):
    """Branches with separate inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.stage_one, self.stage_two = nn.Linear(5, 6), nn.Linear(7, 6)
        self.combine = nn.Linear(12, 4)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        out: Tensor = self.combine(torch.cat([self.stage_one(a).tanh(), self.stage_two(b).tanh()], 1))
        return out


def two_inputs(model: Any, batch: Any) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x[:, :5], b=x[:, 5:]), y)


class Token:
    """Lives as long as the graph that it was made in."""

    alive = most = 0

    def __init__(self) -> None:
        Token.alive += 1
        Token.most = max(Token.most, Token.alive)

    def __del__(self) -> None:
        Token.alive -= 1


class Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.token = Token()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        kept: Tensor = Kept.apply(self.layer(x))
        return kept


def count_activations(store: str, world: int, schedule: str, microbatches: int) -> tuple[int, int]:
    """Graphs of forwards that this rank keeps at once, at most; and at the end."""
    case = Case(lambda: nn.Sequential(*(Counted() for _ in range(2 * world))), flat_data)
    Token.alive = Token.most = 0
    chunks = 2 if schedule in ("interleaved", "zero_bubble") else 1
    axis, model = axis_of(store, world), case.make()
    parts = Chain(model).parts(range(0, 2 * world, 2 // chunks))
    sums = Sums(model, 12, microbatches)
    runner = StageRunner(PointToPoint(axis), model, parts, case.loss, sums, schedule=schedule)
    runner.train(slices(case.data(0, 12), microbatches), "step 0")
    return Token.most * chunks // 2, Token.alive


class Widen(nn.Module):
    """Hands on a dict: values that take gradients and that do not, numbers and None."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, x: Any) -> dict[str, Any]:
        if isinstance(x, Tensor):
            x = {"h": x, "skip": x, "times": 3, "none": None, "rows": torch.arange(len(x))}
        return {**x, "h": self.layer(x["h"]).tanh(), "skip": x["skip"] + x["times"] * x["h"]}


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 4)

    def forward(self, x: dict[str, Any]) -> Tensor:
        out: Tensor = self.layer(x["h"] + x["skip"]) * (1 + x["rows"][:, None])
        return out


def dicts() -> nn.Module:
    return nn.Sequential(Widen(), Widen(), Widen(), Narrow())


def half_frozen() -> nn.Module:
    model = sequential()
    for param in list(model.parameters())[:8]:
        param.requires_grad_(False)
    return model


CASES = {
    "dicts": Case(dicts, flat_data),
    "half frozen": Case(half_frozen, flat_data),
    "sequential": Case(sequential, flat_data),
    "unet": Case(UNet, pictures),
    "gpt2": Case(gpt2, tokens, language_loss),
    "towers": Case(TwoTowers, flat_data, two_inputs, at=("stage_two",)),
}
