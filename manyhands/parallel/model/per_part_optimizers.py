"""One optimizer per part of a model, combined into one: each stage or branch may have a different optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.checkpoint.tensor_names import plain_name
from manyhands.errors import SpecError
from manyhands.spec.load import nearest

__all__ = ["SeveralOptimizers", "divide_parameters"]


def divide_parameters(model: nn.Module, parts: Mapping[str, Any]) -> dict[str, list[nn.Parameter]]:
    """The trained parameters below each of these modules; a parameter belongs to the deepest named module above it.

    Every trained parameter must be below one of them. A tied parameter belongs to its first name.
    """
    names = [name for own, _ in model.named_modules() if (name := plain_name(own))]
    for part in parts:
        if part not in names:
            near = nearest(part, names) or names[:3]
            raise SpecError(
                f"There is an optimizer for {part!r}, which is no part of the model.",
                fix=[f'"{name}"' for name in near],
            )
    found: dict[str, list[nn.Parameter]] = {part: [] for part in parts}
    for own, param in model.named_parameters():
        name = plain_name(own)
        above = [part for part in parts if name.startswith(f"{part}.")]
        if not param.requires_grad:
            continue
        if not above:
            raise SpecError(
                f"{name} is trained, but no optimizer is given for it.",
                fix=[f'"{name.rpartition(".")[0] or name}": lambda params: ...', f"freeze it: {name} without gradient"],
            )
        found[max(above, key=len)].append(param)
    return found


class SeveralOptimizers(Optimizer):
    """Optimizers of different parts of one model. To a scheduler, their groups and state are those of this one."""

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self.optimizers = dict(optimizers)
        super().__init__([group for one in self.optimizers.values() for group in one.param_groups], {})
        # The same dicts, not copies: values that a scheduler sets here are set in the optimizers.
        self.param_groups = [group for one in self.optimizers.values() for group in one.param_groups]

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        found = {param: values for one in self.optimizers.values() for param, values in one.state.items()}
        return defaultdict(dict, found)

    @state.setter
    def state(self, value: Any) -> None:
        """Ignored: torch sets an empty state in `__init__`."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.optimizers.values():
            one.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self.optimizers.values():
            one.zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        first_group = first_param = 0
        for one in self.optimizers.values():
            groups = state_dict["param_groups"][first_group : first_group + len(one.param_groups)]
            count = sum(len(group["params"]) for group in one.param_groups)
            states = {
                number - first_param: values
                for number, values in state_dict["state"].items()
                if first_param <= number < first_param + count
            }
            own = [{**group, "params": [number - first_param for number in group["params"]]} for group in groups]
            one.load_state_dict({"state": states, "param_groups": own})
            first_group, first_param = first_group + len(one.param_groups), first_param + count
        self.param_groups = [group for one in self.optimizers.values() for group in one.param_groups]
