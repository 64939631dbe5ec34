"""What users give as model, loss and precision: modes stay theirs, torch's losses work, fp64 is fp64 all through."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.checkpoint.reader import newest_valid
from manyhands.checkpoint.tensor_file import read_tensors
from manyhands.data.randomness import drawn_unseeded, randomness
from manyhands.errors import BadLoss, Preempted, SpecError
from manyhands.events import Warned
from manyhands.launcher.worker_process.error_hints import hint_for
from manyhands.parallel.model.training_modes import begin_training_
from manyhands.spec.load import resolve
from manyhands.testing import RankPool
from manyhands.training.setup.torch_losses import as_loss_function
from manyhands.training.setup.user_model import set_precision_
from tests.stopping import StopAt
from tests.training.workloads import CLASSES, FEATURES, data, mean_loss, weights_of

# Modes.


def with_frozen_body() -> nn.Module:
    body = nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Dropout(0.5)).requires_grad_(False).eval()
    return nn.Sequential(body, nn.BatchNorm1d(16), nn.Linear(16, CLASSES))


def train_a_head(strategy: Any) -> dict[str, Any]:
    trainer = mh.Trainer(with_frozen_body, mean_loss, lambda p: torch.optim.SGD(p, lr=0.1), strategy, slices=2)
    trainer.fit(data(), epochs=2, batch_size=30, validation=data(20))
    trainer.predict(data()[0])
    trainer.fit(data(), epochs=1, batch_size=30)
    return {"weights": weights_of(trainer), "modes": [module.training for module in trainer.model.modules()]}


@pytest.mark.parametrize("strategy", ["mirrored", "local_sgd"])
def test_a_body_in_evaluation_mode_stays_there_through_training_and_validation(ranks: RankPool, strategy: str) -> None:
    for found in ranks(2, train_a_head, strategy):
        weights = found["weights"]
        assert weights["0.1.num_batches_tracked"] == 0 and not weights["0.1.running_mean"].any()
        assert weights["1.num_batches_tracked"] > 0 and weights["1.running_mean"].any()
        assert found["modes"] == [True, False, False, False, False, True, True]


def loop_over_a_head() -> int:
    hands = mh.join(slices=2)
    model = with_frozen_body()
    hands.setup(model, torch.optim.SGD(model[2].parameters(), lr=0.1))
    for batch in hands.batches(data(), batch_size=30, epochs=2):
        hands.backward(mean_loss(model, batch))
        hands.step()
    hands.evaluate(data(20), mean_loss)
    return int(model[0][1].num_batches_tracked) + sum(module.training for module in model[0].modules())


def test_so_it_does_in_a_loop_of_ones_own(ranks: RankPool) -> None:
    assert ranks(2, loop_over_a_head) == [0, 0]


def test_a_model_in_evaluation_mode_as_a_whole_is_trained_and_one_in_part_stays_and_is_named_if_it_has_to_train() -> (
    None
):
    model = with_frozen_body().eval()
    assert begin_training_(model) == [] and all(module.training for module in model.modules())
    model = with_frozen_body()
    assert begin_training_(model) == [] and not model[0][1].training
    model[0].requires_grad_(True)
    assert begin_training_(model) == ["0"]
    model[0].train()
    model[1].eval()  # batch statistics that stay, with a scale that is trained
    assert begin_training_(model) == [] and not model[1].training


class Body(nn.Module):
    """What a library gives: statistics, and dropout that goes by the container's own mode."""

    def __init__(self) -> None:
        super().__init__()
        self.lower, self.norm = nn.Linear(FEATURES, 16), nn.BatchNorm1d(16)
        self.norm.running_mean.copy_(torch.linspace(-1, 1, 16))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(torch.relu(self.norm(self.lower(x))), 0.5, self.training)


class WithFrozenBody(nn.Module):
    """Not a chain of layers, so that a pipeline has to trace it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.middle, self.head = Body(), nn.Linear(16, 16), nn.Linear(16, CLASSES)
        self.body.requires_grad_(False).eval()

    def forward(self, x: Tensor) -> Tensor:
        seen = self.body(x)
        return self.head(seen + torch.tanh(self.middle(seen)))


def train_on_a_frozen_body(strategy: Any) -> dict[str, np.ndarray]:
    trainer = mh.Trainer(WithFrozenBody, mean_loss, lambda p: torch.optim.SGD(p, lr=0.5), strategy, slices=2, seed=6)
    trainer.fit(data(), steps=2, batch_size=90)
    trainer.evaluate(data(20))
    trainer.fit(data(), steps=2, batch_size=90)
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "weights.safetensors"
        trainer.save(kept)
        return {name: one.numpy() for name, one in read_tensors(kept).items()} if trainer.is_chief else {}


@pytest.mark.parametrize(
    "strategy",
    [
        mh.PipelineParallel(2, cuts=["body.norm"]),  # within the body: what lies between its layers is traced
        pytest.param(mh.PipelineParallel(2, cuts=["middle"]), marks=pytest.mark.long),
        pytest.param(
            mh.PipelineParallel(2, cuts=["body.norm", "middle", "head"], schedule="zero_bubble", recompute="blocks"),
            marks=pytest.mark.long,
        ),
        pytest.param(mh.TensorParallel(2), marks=pytest.mark.long),
        pytest.param(mh.Sharded(), marks=pytest.mark.long),
    ],
    ids=lambda strategy: f"{strategy.name} {getattr(strategy, 'cuts', '')}",
)
def test_a_frozen_body_with_statistics_ends_where_a_loop_by_hand_ends(ranks: RankPool, strategy: Any) -> None:
    found = ranks(2, train_on_a_frozen_body, strategy)[0]
    torch.manual_seed(6)
    model, (x, y) = WithFrozenBody(), data()
    optimizer = torch.optim.SGD([*model.middle.parameters(), *model.head.parameters()], lr=0.5)
    for _ in range(4):
        optimizer.zero_grad()
        mean_loss(model, (x, y)).backward()
        optimizer.step()
    for name, expected in model.state_dict().items():
        np.testing.assert_allclose(found[name], expected.numpy(), rtol=1e-5, atol=1e-6, err_msg=name)
    assert found["body.norm.num_batches_tracked"] == 0


def warnings_of(trainer: mh.Trainer) -> list[str]:
    session: Any = trainer._run.worker.session
    return [event.text for event in session.events if isinstance(event, Warned)]


def warned_of_modes(kind: str) -> list[str]:
    model = with_frozen_body()
    if kind == "trained":
        model[0].requires_grad_(True)
    trainer = mh.Trainer(lambda: model, mean_loss, lambda p: torch.optim.SGD(p, lr=0.1), slices=1)
    trainer.fit(data(), steps=1, batch_size=30)
    return [text for text in warnings_of(trainer) if "evaluation mode" in text]


def test_a_body_that_is_to_be_trained_in_evaluation_mode_is_warned_of_and_a_frozen_one_is_not(ranks: RankPool) -> None:
    ((warned,),) = ranks(1, warned_of_modes, "trained")
    assert warned.startswith("0 is in evaluation mode and stays there, though it has parameters to train")
    assert "model.train()" in warned and "requires_grad_(False)" in warned
    assert ranks(1, warned_of_modes, "frozen") == [[]]


# Seeds.


def first_weights(_: int) -> list[np.ndarray]:
    torch.rand(int(torch.initial_seed() % 7))  # as code before it may draw numbers
    hands = mh.join(seed=3, slices=2)
    model = nn.Linear(4, 2)
    hands.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return [model.weight.detach().numpy().copy()]


def test_a_model_made_after_join_has_the_seeds_weights(ranks: RankPool) -> None:
    torch.manual_seed(3)
    expected = nn.Linear(4, 2).weight.detach().numpy()
    for (found,) in ranks(2, first_weights, 0):
        assert found.tobytes() == expected.tobytes()


def test_it_is_known_whether_torch_drew_without_a_seed() -> None:
    with randomness(1):
        torch.seed()
        assert not drawn_unseeded()  # nothing was drawn
        nn.Linear(2, 2)
        assert drawn_unseeded()
        torch.manual_seed(1)
        nn.Linear(2, 2)
        assert not drawn_unseeded()


def warned_of_seeds(kind: str) -> list[str]:
    torch.seed() if kind != "seeded" else torch.manual_seed(5)
    made = nn.Linear(FEATURES, CLASSES)
    model = nn.Linear(FEATURES, CLASSES) if kind != "function" else lambda: nn.Linear(FEATURES, CLASSES)
    seed = {} if kind == "no seed=" else {"seed": 3}
    trainer = mh.Trainer(model, mean_loss, lambda p: torch.optim.SGD(p, lr=0.1), slices=1, **seed)
    trainer.fit(data(), steps=1, batch_size=30)
    del made
    return [text for text in warnings_of(trainer) if "its initial weights do not depend on seed=" in text]


@pytest.mark.parametrize(
    ("kind", "count"), [("ready", 1), ("function", 0), ("seeded", 0), ("no seed=", 0)], ids=lambda one: str(one)
)
def test_a_ready_model_made_unseeded_is_warned_of_where_a_seed_is_given(ranks: RankPool, kind: str, count: int) -> None:
    (warned,) = ranks(1, warned_of_seeds, kind)
    assert len(warned) == count
    assert all("model=lambda: Net()" in text and "torch.manual_seed" in text for text in warned)


# Losses of torch's own.

TOKENS = 6


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x).transpose(1, 2)


def tagged() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(24, TOKENS, 3, generator=generator), torch.randint(0, CLASSES, (24, TOKENS), generator=generator)
    return x, y.masked_fill(torch.arange(TOKENS) >= torch.randint(1, TOKENS, (24, 1), generator=generator), -100)


CRITERIA = {
    "tokens": lambda: nn.CrossEntropyLoss(),
    "class weights": lambda: nn.CrossEntropyLoss(weight=torch.arange(1.0, CLASSES + 1), label_smoothing=0.1),
}


def tag(name: str) -> dict[str, np.ndarray]:
    trainer = mh.Trainer(Tagger, CRITERIA[name](), lambda p: torch.optim.SGD(p, lr=0.5), slices=4, seed=1)
    trainer.fit(tagged(), steps=3, batch_size=24)
    return weights_of(trainer)


@pytest.mark.parametrize("name", CRITERIA)
def test_torchs_own_loss_is_that_of_the_whole_batch_with_any_masks_in_its_slices(ranks: RankPool, name: str) -> None:
    found, _ = ranks(2, tag, name)
    torch.manual_seed(1)
    model, (x, y) = Tagger(), tagged()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        CRITERIA[name]()(model(x), y).backward()
        optimizer.step()
    for key, expected in model.state_dict().items():
        np.testing.assert_allclose(found[key], expected.numpy(), rtol=1e-5, atol=1e-6)


def test_torchs_own_losses_and_functions_take_outputs_and_targets() -> None:
    model, batch = nn.Linear(3, 1), (torch.randn(5, 3), torch.randn(5, 1))
    expected = nn.functional.mse_loss(model(batch[0]), batch[1])
    for given in (nn.MSELoss(), nn.functional.mse_loss):
        assert torch.equal(as_loss_function(given)(model, batch), expected)
    assert as_loss_function(mean_loss) is mean_loss


def test_what_torchs_own_losses_cannot_mean_is_refused_with_what_to_write() -> None:
    model, x = nn.Linear(3, 1), torch.randn(5, 3)
    with pytest.raises(SpecError, match="not a mean over the batch"):
        as_loss_function(nn.MSELoss(reduction="sum"))
    with pytest.raises(SpecError, match=r"takes \(anchor, positive, negative\)"):
        as_loss_function(nn.TripletMarginLoss())
    with pytest.raises(BadLoss, match=r"returns \(5, 1\) and the targets are \(5,\)"):
        as_loss_function(nn.MSELoss())(model, (x, torch.randn(5)))
    with pytest.raises(BadLoss, match=r"takes batches \(inputs, targets\); this one is a dict"):
        as_loss_function(nn.MSELoss())(model, {"x": x})


# fp64.


def in_double() -> dict[str, np.ndarray]:
    trainer = mh.Trainer(
        lambda: nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES)),
        mean_loss,
        lambda p: torch.optim.AdamW(p, lr=0.01),
        precision="fp64",
        slices=2,
        seed=4,
        clip_norm=1.0,
    )
    trainer.fit(data(), steps=5, batch_size=90)  # floats that are float32
    assert trainer.predict(data()[0]).dtype == torch.float64
    return weights_of(trainer)


def test_fp64_ends_where_a_loop_by_hand_in_float64_ends(ranks: RankPool) -> None:
    first, second = ranks(2, in_double)
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES)).double()
    optimizer, (x, y) = torch.optim.AdamW(model.parameters(), lr=0.01), data()
    for _ in range(5):
        optimizer.zero_grad()
        mean_loss(model, (x.double(), y)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    for key, expected in model.state_dict().items():
        assert first[key].dtype == np.float64 and first[key].tobytes() == second[key].tobytes()
        np.testing.assert_allclose(first[key], expected.numpy(), rtol=1e-12, atol=1e-13)


def in_double_until(run_dir: str, stop_at: int | None) -> dict[str, bytes]:
    trainer = mh.Trainer(
        lambda: nn.Sequential(
            nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, CLASSES)
        ),
        mean_loss,
        lambda p: torch.optim.AdamW(p, lr=0.01),
        precision="fp64",
        slices=2,
        exact=True,
        hooks=[StopAt(stop_at)],
        run_dir=run_dir,
    )
    with contextlib.suppress(Preempted):
        trainer.fit(data(), steps=5, batch_size=24)
    state = trainer.optimizer.state_dict()["state"] if stop_at is None else {}
    assert all(one.dtype == torch.float64 for kept in state.values() for key, one in kept.items() if "exp_avg" in key)
    return {name: one.tobytes() for name, one in weights_of(trainer).items()}


def test_fp64_resumes_from_a_checkpoint_on_another_number_of_workers_to_the_same_bits(
    ranks: RankPool, tmp_path: Path
) -> None:
    whole = ranks(2, in_double_until, str(tmp_path / "whole"), None, run_dir=tmp_path / "whole")[0]
    ranks(2, in_double_until, str(tmp_path / "cut"), 3, run_dir=tmp_path / "cut")
    found = newest_valid(tmp_path / "cut" / "checkpoints")
    assert found is not None and found.manifest.step == 3
    (after,) = ranks(1, in_double_until, str(tmp_path / "cut"), None, run_dir=tmp_path / "cut")
    assert after == whole


def test_what_cannot_be_fp64_is_refused_by_name() -> None:
    with pytest.raises(SpecError, match="drops most of the precision of fp64"):
        resolve(arguments={"precision": "fp64", "reducer": "bf16"})
    with pytest.raises(SpecError, match=r"Rows of mh\.nn\.Embedding"):
        set_precision_(nn.Sequential(mh.nn.Embedding(4, name="users")), "fp64")


# Words that help.


def test_a_misspelt_keyword_is_answered_with_the_one_that_was_meant() -> None:
    make, fit = cast("tuple[Any, Any]", (mh.Trainer, mh.Trainer.fit))
    with pytest.raises(SpecError, match=r"Trainer\.fit has no argument 'batchsize'\. Did you mean batch_size\?"):
        fit(None, data(), batchsize=3)
    for keyword in ("epochs", "checkpoints", "batch_size"):
        with pytest.raises(SpecError, match=rf"Did you mean {keyword[:10]} of Trainer\.fit\?"):
            make(None, None, None, **{keyword: 3})
    with pytest.raises(SpecError, match=r"join has no argument 'slicse'\. Did you mean slices\?"):
        mh.join(slicse=2)  # type: ignore[call-arg]


def raised_by(call: Any) -> BaseException:
    with pytest.raises((RuntimeError, AssertionError, TypeError)) as caught:
        call()
    return caught.value


@pytest.mark.parametrize(
    "call",
    [
        lambda: nn.Linear(2, 2)(torch.ones(3, 2, dtype=torch.float64)),
        lambda: nn.Conv1d(1, 1, 1)(torch.ones(1, 1, 2, dtype=torch.float64)),
        lambda: torch.ones(2, 2) @ torch.ones(2, 2, dtype=torch.float64),
    ],
)
def test_data_and_a_model_of_other_types_are_explained(call: Any) -> None:
    assert 'precision="fp64"' in (hint_for(raised_by(call)) or "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_call_of_cuda_without_a_gpu_is_explained() -> None:
    assert "No GPU here; batches are on the worker's device already" in (hint_for(raised_by(torch.ones(1).cuda)) or "")


def test_a_criterion_called_with_the_model_is_explained_and_other_errors_are_left_alone() -> None:
    error = raised_by(lambda: nn.functional.logsigmoid(nn.Linear(1, 1)))  # type: ignore[arg-type]
    assert "A loss is called with (model, batch)" in (hint_for(error) or "")
    assert hint_for(raised_by(lambda: nn.Linear(2, 2)(torch.ones(3, 3)))) is None
