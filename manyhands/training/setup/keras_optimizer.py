"""A Keras optimizer as a torch one: gradients are read from `.grad`, Keras makes the update.

Keras keeps a list of variables per kind of state, such as all momentums, and one count of updates for all of them.
Here each parameter's state is in `state`, as in torch, so that strategies can move it: into memory that workers share,
to a parameter server, or to a shard. Keras's variables are views of it while it updates. Start reading at
`KerasOptimizer.step`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from manyhands.errors import SpecError

__all__ = ["KerasOptimizer", "is_keras_optimizer", "keras_optimizer"]

BY_ELEMENT = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Ftrl", "Lion")
BY_TENSOR = (*BY_ELEMENT, "Lamb")


class KerasOptimizer(torch.optim.Optimizer):
    """Its learning rate is shown in `param_groups` and may be set there, by a torch scheduler for instance, unless the
    Keras optimizer has a schedule. `iterations` there counts the updates.
    """

    def __init__(self, optimizer: Any, variables: list[Any]) -> None:
        self.keras, self._variables = optimizer, list(variables)
        if not optimizer.built:
            optimizer.build(self._variables)
        self._shown_lr = float(optimizer.learning_rate)
        iterations = int(optimizer._iterations)
        super().__init__(
            [variable.value for variable in self._variables], {"lr": self._shown_lr, "iterations": iterations}
        )
        self._kinds = _kinds_of_state(optimizer)
        self._variable_of = {id(variable.value): variable for variable in self._variables}
        for variable in self._variables:
            own = {kind: one.value.detach() for kind, one in self._slots(variable)}
            self.state[variable.value] = {"step": torch.tensor(float(iterations)), **own}

    # ---- how far an update can be divided ----

    @property
    def divisible_by(self) -> str:
        """What of the weights may be updated apart from the rest: "elements", "tensors", or nothing."""
        if self.why_whole:
            return ""
        constrained = any(variable.constraint is not None for variable in self._variables)
        return "elements" if _kind(self.keras) in BY_ELEMENT and not (constrained or self.keras.clipnorm) else "tensors"

    @property
    def why_whole(self) -> str:
        """Why one process has to make the update of all weights; empty if it need not."""
        optimizer, name = self.keras, type(self.keras).__name__
        if _kind(optimizer) not in BY_TENSOR:
            return f"{name} is not known to update each variable on its own"
        for setting in ("global_clipnorm", "use_ema", "gradient_accumulation_steps"):
            if getattr(optimizer, setting):
                return f"{name}({setting}={getattr(optimizer, setting)!r}) needs the gradients of all variables"
        return ""

    # ---- the update ----

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.refresh_settings()
        group = self.param_groups[0]
        updated = [one for one in self._variables if one.value.grad is not None]
        # A server's copy of the settings may be older than the states that it has.
        number = max([group["iterations"], *(int(self._state_of(one)["step"]) for one in updated)])
        if number != int(self.keras._iterations):
            self.keras._iterations.assign(number)
        if updated:
            with torch.no_grad(), self._with_states(updated):
                self.keras.apply([one.value.grad for one in updated], updated)
            number = int(self.keras._iterations)
        else:
            number += 1
        group["iterations"] = number
        for one in updated:
            self.state[one.value]["step"].fill_(float(number))

    def _slots(self, variable: Any) -> Iterator[tuple[str, Any]]:
        """Keras's variables that are state of this one, by kind."""
        index = self.keras._get_variable_index(variable)
        return ((kind, of_all[index]) for kind, of_all in self._kinds.items() if of_all[index] is not None)

    def _state_of(self, variable: Any) -> dict[str, Any]:
        state: dict[str, Any] = self.state[variable.value]
        state.setdefault("step", torch.tensor(0.0))
        return state

    @contextmanager
    def _with_states(self, updated: Sequence[Any]) -> Iterator[None]:
        """Inside, Keras's variables are the states, which a strategy may have moved; and have the shape of shards."""
        bound = [slot for variable in updated for slot in self._bound(variable)]
        shapes = [(one, one._shape) for one in (*updated, *bound) if tuple(one._shape) != tuple(one.value.shape)]
        for one, _ in shapes:
            one._shape = tuple(one.value.shape)
        try:
            yield
        finally:
            for one, shape in shapes:
                one._shape = shape

    def _bound(self, variable: Any) -> Iterator[Any]:
        state = self.state[variable.value]
        for kind, slot in self._slots(variable):
            assert kind in state, f"{variable.path} has lost its {kind}"
            _show(slot, state[kind])
            yield slot

    # ---- settings ----

    def refresh_settings(self) -> None:
        """Make the learning rates that Keras and `param_groups` show equal: the one that was changed last counts."""
        group, schedule = self.param_groups[0], self.has_schedule
        if schedule or group["lr"] == self._shown_lr:
            self._refuse_two_schedules(schedule)
            group["lr"] = float(self.keras.learning_rate)
        else:
            self.keras.learning_rate = group["lr"]
        self._shown_lr = group["lr"]

    def _refuse_two_schedules(self, schedule: bool) -> None:
        value = self.param_groups[0]["lr"]
        if schedule and value not in (self._shown_lr, self._scheduled(self.param_groups[0]["iterations"])):
            raise SpecError(
                f"The learning rate was set to {value:g}, but the Keras optimizer has a schedule itself.",
                fix=["one of the two: scheduler=, or the schedule in keras.optimizers"],
            )

    def _scheduled(self, iterations: int) -> float:
        self.keras._iterations.assign(iterations)
        return float(self.keras.learning_rate)

    @property
    def has_schedule(self) -> bool:
        """Whether the learning rate is a function of the number of updates."""
        return not hasattr(self.keras._learning_rate, "assign")

    def count_update(self) -> None:
        """Another process has made an update."""
        self.param_groups[0]["iterations"] += 1
        self.keras._iterations.assign(self.param_groups[0]["iterations"])

    def show_states(self, whole: Callable[[Tensor, Tensor], Tensor] = lambda weight, part: part) -> None:
        """Have Keras's variables show the states, for files and callbacks; `whole(weight, part)` as one tensor."""
        for variable in self._variables:
            state = self.state.get(variable.value, {})
            for kind, slot in self._slots(variable):
                if kind in state:
                    _show(slot, whole(variable.value, state[kind]))

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = super().state_dict()
        found["param_groups"][0]["keras"] = {name: one.value.detach() for name, one in self._others().items()}
        return found

    def _others(self) -> dict[str, Any]:
        """Keras's variables that belong to no parameter: counts, the learning rate, a loss scale."""
        own = {name: one for name, one in vars(self.keras).items() if _is_variable(one)}  # Keras does not list all
        known = {id(one) for of_all in (*self._kinds.values(), own.values()) for one in of_all}
        return own | {one.path: one for one in self.keras.variables if id(one) not in known}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        (group,) = state_dict["param_groups"]
        others, saved = self._others(), group["keras"]
        if "iterations" not in group:  # the checkpoint of a version that kept all variables together
            self._load_together(saved)
        elif list(saved) != list(others):
            raise ValueError(
                f"it has {len(saved)} variables, {', '.join(list(saved)[:3])}..., and now {len(others)} others"
            )
        else:
            for index, values in state_dict["state"].items():
                self._load_state(self._variables[index], values)
        for name, variable in others.items():
            if name in saved:
                variable.assign(saved[name])
        number = int(self.keras._iterations)
        self.param_groups[0]["iterations"] = group.get("iterations", number)
        self._shown_lr = self.param_groups[0]["lr"] = group["lr"]

    def _load_state(self, variable: Any, values: dict[str, Any]) -> None:
        kinds = ["step", *(kind for kind, _ in self._slots(variable))]
        if sorted(values) != sorted(kinds):
            raise ValueError(f"{variable.path} has {', '.join(sorted(values))}, and needs {', '.join(sorted(kinds))}")
        state = self.state[variable.value]
        for kind, value in values.items():
            if kind in state and state[kind].shape == value.shape:
                state[kind].copy_(value)
            else:
                state[kind] = value.clone()
        for _ in self._bound(variable):
            pass

    def _load_together(self, saved: dict[str, Any]) -> None:
        paths = [one.path for one in self.keras.variables]
        if list(saved) != paths:
            raise ValueError(
                f"it has {len(saved)} variables, {', '.join(list(saved)[:3])}..., and now {len(paths)} others"
            )
        for one in self.keras.variables:
            one.assign(saved[one.path])
        for variable in self._variables:
            self._state_of(variable)["step"].fill_(float(self.keras._iterations))


def _show(slot: Any, value: Tensor) -> None:
    if slot._value.data_ptr() != value.data_ptr() or slot._value.shape != value.shape:
        slot._value.data = value


def _kind(optimizer: Any) -> str:
    """The name of Keras's own class; empty for one of the user's, which may do anything."""
    own = type(optimizer)
    return own.__name__ if own.__module__.startswith("keras.src.") else ""


def _is_variable(value: Any) -> bool:
    return isinstance(value, sys.modules["keras"].Variable)


def _kinds_of_state(optimizer: Any) -> dict[str, list[Any]]:
    """The lists of Keras's variables with an entry for each trained variable, or None for those without."""
    trained = set(map(id, optimizer._trainable_variables))
    found = {}
    for name, value in vars(optimizer).items():
        if name in ("_variables", "_trainable_variables") or not isinstance(value, list) or not value:
            continue
        if len(value) != len(trained) or not all(one is None or _is_variable(one) for one in value):
            continue
        if not any(id(one) in trained for one in value):
            found[name.lstrip("_")] = list(value)
    return found


def is_keras_optimizer(optimizer: Any) -> bool:
    kinds = getattr(sys.modules.get("keras"), "optimizers", None)
    return kinds is not None and isinstance(optimizer, kinds.Optimizer)


def keras_optimizer(model: Any, optimizer: Any) -> KerasOptimizer:
    """`optimizer` for the trainable variables of `model`. Refuses features that Keras implements outside of `apply`."""
    keras = sys.modules["keras"]
    name = type(optimizer).__name__
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or optimizer.loss_scale_factor is not None:
        raise SpecError(
            f"{name} expects a loss that Keras's fit has scaled, which is not used here.",
            fix=['precision="fp16" of the trainer, and compile(..., auto_scale_loss=False)'],
        )
    if optimizer.use_ema:
        raise SpecError(
            f"{name}(use_ema=True) swaps averages into the model at the end of Keras's fit, which is not used here.",
            fix=["use_ema=False"],
        )
    return KerasOptimizer(optimizer, model.trainable_variables)
