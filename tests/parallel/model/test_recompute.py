"""Blocks of a model, and activations that are computed again instead of kept: the same bits, in less memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from manyhands.errors import SpecError
from manyhands.parallel.model.activation_checkpointing import recompute
from manyhands.parallel.model.layer_blocks import blocks_of


class Encoder(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(layers))
        self.output = nn.Linear(32, 50, bias=False)
        self.output.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


class Tower(nn.Module):
    """Nearly everything is in the first of two members."""

    def __init__(self) -> None:
        super().__init__()
        stages = [nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3)) for _ in range(6)]
        self.both = nn.Sequential(nn.Sequential(*stages), nn.Linear(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.both(x)


def test_members_of_lists_are_blocks_and_what_holds_nearly_everything_is_looked_into() -> None:
    assert list(blocks_of(Encoder(6))) == [f"layers.{i}" for i in range(6)]
    assert list(blocks_of(Tower())) == [*(f"both.0.{i}" for i in range(6)), "both.0", "both.1"]


def test_layers_that_share_a_parameter_and_small_ones_are_no_blocks() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(5)), nn.Linear(64, 2))
    assert list(blocks_of(model)) == ["0", "1", "2", "3", "4"]
    model[3].weight = model[1].weight
    assert list(blocks_of(model)) == ["0", "2", "4"]


def run(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    """Loss of a forward and a backward pass, and the bytes that were kept between them."""
    kept: dict[int, int] = {}
    weights = {param.untyped_storage().data_ptr() for param in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in weights:
            kept[place] = tensor.untyped_storage().nbytes()
        return tensor

    torch.manual_seed(5)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(x).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss, sum(kept.values())


@pytest.mark.parametrize("which", ["blocks", "both.0.*", ("both.0.1", "both.0.4")])
def test_gradients_and_statistics_are_the_same_bits_and_less_is_kept(which: str | tuple[str, ...]) -> None:
    plain = Tower()
    again = copy.deepcopy(plain)
    assert recompute(again, which, "here")
    x = torch.randn(128, 64)
    (loss, kept), (same, less) = run(plain, x), run(again, x)
    assert loss.equal(same) and less < kept
    assert list(plain.state_dict()) == list(again.state_dict())
    for name, value in plain.state_dict().items():
        assert value.equal(again.state_dict()[name]), name
    for mine, theirs in zip(plain.parameters(), again.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None and mine.grad.equal(theirs.grad)


def test_repeated_layers_are_recomputed_as_a_whole() -> None:
    assert set(recompute(Tower(), "blocks", "here")) == {f"both.0.{i}" for i in range(6)} | {"both.1"}
    assert set(recompute(Encoder(2), "blocks", "here")) == {"layers.0", "layers.1"}


def test_a_pattern_that_names_no_layer_is_refused_with_ones_that_there_are() -> None:
    with pytest.raises(SpecError, match=r"No layer is called 'encoder\.\*'[\s\S]*layers\.0"):
        recompute(Encoder(), "encoder.*", "mh.Sharded(recompute=...)")
