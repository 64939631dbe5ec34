"""What a callback's attributes hold goes through a checkpoint and back; what cannot is named."""

from __future__ import annotations

import io
from collections import deque
from typing import Any

import numpy as np
import torch

from manyhands.checkpoint.state_packing import pack, unpack
from manyhands.compat.keras.callback_state import restore, state_of, unsaved


class Callback:
    def __init__(self) -> None:
        self._model, self.params = object(), {"epochs": 3}
        self.wait, self.best, self.mode, self.stopped = 0, np.inf, "min", None
        self.weights = [np.ones(3), np.zeros((2, 2), dtype=np.int64)]
        self.by_name = {"loss": [0.5, float("nan")], 3: (1, 2.5)}
        self.mean, self.last, self.seen = torch.ones(2), deque([1, 2], maxlen=2), {1, 2}
        self.compare, self.kind, self.file, self.mixed = max, dict, io.StringIO(), [1, io.StringIO()]


def through_a_checkpoint(state: dict[str, Any]) -> dict[str, Any]:
    tensors: dict[str, torch.Tensor] = {}
    packed = pack(state, "hooks", tensors)
    return dict(unpack(packed, {name: one.clone() for name, one in tensors.items()}))


def test_plain_values_come_back_with_their_types() -> None:
    callback = Callback()
    state = through_a_checkpoint(state_of(callback))
    callback.wait, callback.best, callback.weights, callback.seen = 5, 0.0, [], {7}
    callback.last.append(9)
    callback.mean += 1
    restore(callback, state)
    assert (callback.wait, callback.best, callback.mode, callback.stopped) == (0, np.inf, "min", None)
    np.testing.assert_array_equal(callback.weights[0], np.ones(3))
    assert callback.weights[1].dtype == np.int64
    assert callback.by_name[3] == (1, 2.5)
    assert np.isnan(callback.by_name["loss"][1])
    assert callback.last == deque([1, 2], maxlen=2)
    assert callback.last.maxlen == 2
    assert callback.seen == {1, 2}
    assert callback.mean.tolist() == [1.0, 1.0]


def test_a_state_is_a_copy() -> None:
    callback = Callback()
    state = state_of(callback)
    callback.weights[0][0] = callback.by_name["loss"][0] = 8.0
    assert state["weights"][0][0] == 1.0
    assert state["by_name"]["loss"][0] == 0.5


def test_what_cannot_be_saved_is_named_and_functions_classes_and_keras_own_are_not() -> None:
    assert unsaved(Callback()) == ["file (StringIO)", "mixed (list)"]
    assert not {"file", "mixed", "compare", "kind", "_model", "params"} & state_of(Callback()).keys()
